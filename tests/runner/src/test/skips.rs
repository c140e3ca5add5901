// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests that may be skipped: `tests/runner/skips` lists the number and reason for each run. A VM
//! that lacks something skips the tests that need it, and passes. Skips for another reason, or in
//! another number, are therefore failures.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::report::{Origin, Report};
use crate::kernel;
use crate::paths::Paths;
use crate::results::{Test, Verdict};

/// Reasons to skip any number of tests. Some hosts forbid certain operations.
const MAY_BE_SKIPPED: &[&str] = &["this machine lets nobody mount"];

const HEAD: &str = "\
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
#
# Number of skipped tests of each run of the suite, by reason. A run that is not listed skips none. A run that is repeated
# on another kernel (`7.2: …`) has the skips of the run on the default kernel, unless this file lists it separately.
# `make test TEST=--update-skips` writes the actual skips to this file. Check the differences.
";

/// Number of skipped tests of one run, by reason.
type Counts = BTreeMap<String, usize>;

/// Skipped tests by run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Skips(BTreeMap<String, Counts>);

fn file(paths: &Paths) -> PathBuf {
    paths.repo.join("tests/runner/skips")
}

/// Returns the name of the original run, if this run repeats it on another kernel.
fn usual(run: &str) -> Option<&str> {
    kernel::others().find_map(|name| run.strip_prefix(&format!("{name}: ")))
}

fn counted(tests: &[Test]) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for test in tests {
        if let Verdict::Skipped(reason) = &test.verdict {
            found.entry(reason).or_default().push(&test.name);
        }
    }
    found.retain(|reason, _| !MAY_BE_SKIPPED.contains(reason));
    found
}

impl Skips {
    pub(super) fn load(paths: &Paths) -> Result<Self> {
        let file = file(paths);
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        Self::parse(&text).with_context(|| file.display().to_string())
    }

    /// Parses the file: each run's name, and below it an indented line for each reason:
    /// `  2  the reason`.
    fn parse(text: &str) -> Result<Self> {
        let mut runs: BTreeMap<String, Counts> = BTreeMap::new();
        let mut run = None;
        for line in text.lines() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            if !line.starts_with(' ') {
                run = Some(runs.entry(line.to_owned()).or_default());
                continue;
            }
            let (count, reason) = line
                .trim()
                .split_once("  ")
                .with_context(|| format!("no count and reason: {line}"))?;
            let count = count.parse().with_context(|| line.to_owned())?;
            run.as_mut()
                .with_context(|| format!("of no run: {line}"))?
                .insert(reason.to_owned(), count);
        }
        Ok(Self(runs))
    }

    fn render(&self) -> String {
        let mut text = HEAD.to_owned();
        for (run, counts) in &self.0 {
            text.push_str(&format!("\n{run}\n"));
            for (reason, count) in counts {
                text.push_str(&format!("  {count}  {reason}\n"));
            }
        }
        text
    }

    fn of(&self, run: &str) -> Counts {
        let counts = self.0.get(run).or_else(|| self.0.get(usual(run)?));
        counts.cloned().unwrap_or_default()
    }

    /// Returns the differences between the expected and the actual skips of a run.
    pub(super) fn unexpected(&self, run: &str, tests: &[Test]) -> Vec<String> {
        let mut expected = self.of(run);
        let mut problems = Vec::new();
        for (reason, names) in counted(tests) {
            let count = expected.remove(reason).unwrap_or(0);
            if names.len() != count {
                problems.push(format!(
                    "{} skipped, {count} expected: {reason} ({})",
                    names.len(),
                    names.join(", ")
                ));
            }
        }
        let missing = expected
            .into_iter()
            .map(|(reason, count)| format!("0 skipped, {count} expected: {reason}"));
        problems.into_iter().chain(missing).collect()
    }

    /// Replaces the expected skips of these runs by the actual skips.
    fn take(&mut self, reports: &[Report]) {
        for report in reports {
            if report.origin != Origin::Run || !report.has_passed() {
                continue;
            }
            let seen: Counts = counted(&report.tests)
                .into_iter()
                .map(|(reason, names)| (reason.to_owned(), names.len()))
                .collect();
            if seen == self.of(report.run.name) {
                continue;
            }
            if seen.is_empty() && usual(report.run.name).is_none() {
                self.0.remove(report.run.name);
            } else {
                self.0.insert(report.run.name.to_owned(), seen);
            }
        }
    }

    /// Writes the actual skips of these runs to the file.
    pub(super) fn update(mut self, paths: &Paths, reports: &[Report]) -> Result<()> {
        self.take(reports);
        fs::write(file(paths), self.render()).context("tests/runner/skips")
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use super::*;
    use crate::suite::{again, every_run, Run, BASE};

    fn skip(name: &str, reason: &str) -> Test {
        Test::skipped(name, reason.to_owned())
    }

    fn skips() -> Skips {
        Skips::parse("# x\nrun\n  2  why\n\n7.2: run\n  1  why, there\n").unwrap()
    }

    #[test]
    fn every_skip_is_expected_by_reason_and_number() {
        let of = |run, tests: &[(&str, &str)]| {
            let tests: Vec<Test> = tests
                .iter()
                .map(|(name, reason)| skip(name, reason))
                .collect();
            skips().unexpected(run, &tests)
        };
        let both = &[("b", "why"), ("c", "why")];
        assert!(of("run", both).is_empty());
        assert_eq!(of("run", &both[..1]), ["1 skipped, 2 expected: why (b)"]);
        assert_eq!(of("run", &[]), ["0 skipped, 2 expected: why"]);
        assert_eq!(
            of("run", &[both[0], both[1], ("d", "other")]),
            ["1 skipped, 0 expected: other (d)"]
        );
        assert_eq!(of("other", &both[..1]), ["1 skipped, 0 expected: why (b)"]);
        assert!(of("other", &[("d", MAY_BE_SKIPPED[0])]).is_empty());
        assert!(of("7.2: run", &[("b", "why, there")]).is_empty());
        let usual = Skips::parse("run\n  1  why\n").unwrap();
        assert!(usual.unexpected("7.2: run", &[skip("b", "why")]).is_empty());
    }

    #[test]
    fn what_was_seen_is_written_and_read() {
        static RUN: Run = Run {
            name: "run",
            ..BASE
        };
        static AGAIN: Run = Run {
            name: "7.2: run",
            ..BASE
        };
        static NEW: Run = Run {
            name: "new",
            ..BASE
        };
        static FAILED: Run = Run {
            name: "failed",
            ..BASE
        };
        let of = |run, tests: &[Test], problems: &[&str]| {
            let problems = problems.iter().map(|&problem| problem.to_owned()).collect();
            Report::plain(run, Instant::now(), tests.to_vec(), problems)
        };
        let mut found = skips();
        found.take(&[
            of(&RUN, &[skip("a", "why")], &[]),
            of(&AGAIN, &[], &[]),
            of(&NEW, &[skip("a", "not this"), skip("b", "not this")], &[]),
            of(&FAILED, &[skip("a", "x")], &["the machine died"]),
        ]);
        let text = "run\n  1  why\n7.2: run\nnew\n  2  not this\n";
        assert_eq!(found, Skips::parse(text).unwrap());
        assert_eq!(Skips::parse(&found.render()).unwrap(), found);
        for wrong in ["  1  why\n", "run\n  why\n", "run\n  x  why\n"] {
            assert!(Skips::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_table_is_of_runs_that_there_are() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("skips");
        let skips = Skips::parse(&fs::read_to_string(file).unwrap()).unwrap();
        let others: Vec<Run> = kernel::others().flat_map(again).collect();
        for name in skips.0.keys() {
            let is_run = |run: &Run| run.name == name;
            assert!(every_run().iter().chain(&others).any(is_run), "{name}");
        }
    }
}
