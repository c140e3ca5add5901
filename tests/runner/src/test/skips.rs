// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Compares the skipped tests of each run with `tests/runner/skips`, which lists the number of
//! skips by reason. A VM that lacks a feature skips the feature's tests, and would pass unnoticed.
//! Therefore, a skip for an unlisted reason is a failure, and so is another number of skips.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{ensure, Context as _, Result};

use super::report::{Origin, Report};
use crate::kernel;
use crate::paths::Paths;
use crate::results::{Test, Verdict};

/// Reasons to skip any number of tests. Some hosts forbid certain operations.
const MAY_BE_SKIPPED: &[&str] = &["this machine forbids mounts"];

/// Entry for a run that skips nothing.
const NONE: &str = "none";

/// Number of skipped tests of one run, by reason.
type Counts = BTreeMap<String, usize>;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Skips {
    /// Comments at the beginning of the file.
    head: String,
    /// Reasons by their short names.
    names: BTreeMap<String, String>,
    runs: BTreeMap<String, Counts>,
}

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

    /// Parses the file. Lines `short name = reason` come first, then the names of runs. Below the
    /// names is an indented list: `  2 the reason; 1 short name`.
    fn parse(text: &str) -> Result<Self> {
        let head = text.lines().take_while(|line| line.starts_with('#'));
        let mut skips = Self {
            head: head.map(|line| format!("{line}\n")).collect(),
            ..Self::default()
        };
        let mut runs: Vec<&str> = Vec::new();
        let mut is_list = false;
        for line in text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty())
        {
            if let Some((name, reason)) = line.split_once(" = ") {
                skips.names.insert(name.to_owned(), reason.to_owned());
            } else if let Some(list) = line.strip_prefix("  ") {
                is_list = true;
                for skip in list.split("; ").filter(|skip| *skip != NONE) {
                    let (count, reason) = skip.split_once(' ').context(line.to_owned())?;
                    let reason = skips
                        .names
                        .get(reason)
                        .map_or(reason, String::as_str)
                        .to_owned();
                    let count: usize = count.parse().with_context(|| line.to_owned())?;
                    for run in &runs {
                        let counts = skips.runs.entry((*run).to_owned()).or_default();
                        counts.insert(reason.clone(), count);
                    }
                }
                ensure!(!runs.is_empty(), "the list belongs to no run: {line}");
            } else {
                if std::mem::take(&mut is_list) {
                    runs.clear();
                }
                runs.push(line);
                skips.runs.entry(line.to_owned()).or_default();
            }
        }
        Ok(skips)
    }

    fn render(&self) -> String {
        let mut text = format!("{}\n", self.head);
        for (name, reason) in &self.names {
            text.push_str(&format!("{name} = {reason}\n"));
        }
        let mut groups: Vec<(&Counts, Vec<&str>)> = Vec::new();
        for (run, counts) in &self.runs {
            match groups.iter_mut().find(|(other, _)| *other == counts) {
                Some((_, runs)) => runs.push(run),
                None => groups.push((counts, vec![run])),
            }
        }
        for (counts, runs) in groups {
            text.push_str(&format!("\n{}\n", runs.join("\n")));
            let mut line = String::new();
            for (reason, count) in counts {
                let name = self.names.iter().find(|(_, known)| *known == reason);
                let skip = format!("{count} {}", name.map_or(reason, |(name, _)| name));
                if line.len() + skip.len() > 115 {
                    text.push_str(&format!("  {line}\n"));
                    line.clear();
                }
                line.push_str(if line.is_empty() { "" } else { "; " });
                line.push_str(&skip);
            }
            let line = if counts.is_empty() { NONE } else { &line };
            text.push_str(&format!("  {line}\n"));
        }
        text
    }

    fn of(&self, run: &str) -> Counts {
        let counts = self.runs.get(run).or_else(|| self.runs.get(usual(run)?));
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
                self.runs.remove(report.run.name);
            } else {
                self.runs.insert(report.run.name.to_owned(), seen);
            }
        }
    }

    /// Replaces the expected skips of these runs by their actual skips, and writes
    /// `tests/runner/skips`.
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
    use crate::results::tests;
    use crate::suite::{again, every_run, Run, BASE};

    fn skips() -> Skips {
        Skips::parse("# x\nw = why\nrun\n  2 w\n\n7.2: run\n  1 why, there\n").unwrap()
    }

    #[test]
    fn every_skip_is_expected_by_reason_and_number() {
        let of = |run, lines: &[&str]| skips().unexpected(run, &tests(lines));
        let both = ["b SKIP why", "c SKIP why"];
        assert!(of("run", &both).is_empty());
        assert_eq!(of("run", &both[..1]), ["1 skipped, 2 expected: why (b)"]);
        assert_eq!(of("run", &[]), ["0 skipped, 2 expected: why"]);
        assert_eq!(
            of("run", &[both[0], both[1], "d SKIP other"]),
            ["1 skipped, 0 expected: other (d)"]
        );
        assert_eq!(of("other", &both[..1]), ["1 skipped, 0 expected: why (b)"]);
        assert!(of("other", &[&format!("d SKIP {}", MAY_BE_SKIPPED[0])]).is_empty());
        assert!(of("7.2: run", &["b SKIP why, there"]).is_empty());
        let usual = Skips::parse("run\n  1 why\n").unwrap();
        assert!(usual.unexpected("7.2: run", &tests(&both[..1])).is_empty());
    }

    #[test]
    fn updated_skips_are_written_and_read() {
        static RUNS: [Run; 4] = [
            Run {
                name: "run",
                ..BASE
            },
            Run {
                name: "7.2: run",
                ..BASE
            },
            Run {
                name: "new",
                ..BASE
            },
            Run {
                name: "failed",
                ..BASE
            },
        ];
        let of = |at: usize, lines: &[&str], problems: &[&str]| {
            let problems = problems.iter().map(|&problem| problem.to_owned()).collect();
            Report::plain(&RUNS[at], Instant::now(), tests(lines), problems)
        };
        let mut found = skips();
        found.take(&[
            of(0, &["a SKIP why"], &[]),
            of(1, &[], &[]),
            of(2, &["a SKIP not this", "b SKIP not this"], &[]),
            of(3, &["a SKIP x"], &["the machine died"]),
        ]);
        let text = "# x\nw = why\nrun\n  1 w\n7.2: run\n  none\nnew\n  2 not this\n";
        assert_eq!(found, Skips::parse(text).unwrap());
        assert_eq!(Skips::parse(&found.render()).unwrap(), found);
        for wrong in ["  1 why\n", "run\n  why\n", "run\n  x why\n"] {
            assert!(Skips::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_table_lists_existing_runs() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("skips");
        let text = fs::read_to_string(file).unwrap();
        let skips = Skips::parse(&text).unwrap();
        assert_eq!(skips.render(), text);
        let others: Vec<Run> = kernel::others().flat_map(again).collect();
        for name in skips.runs.keys() {
            let is_run = |run: &Run| run.name == name;
            assert!(every_run().iter().chain(&others).any(is_run), "{name}");
        }
    }
}
