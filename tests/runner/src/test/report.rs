// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Results and problems of one run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::history::When;
use crate::kept::Kept;
use crate::progress::duration;
use crate::results::{Test, Verdict};
use crate::suite::{Place, Run};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    Run,
    /// The run does not depend on `src/`, and its inputs have not changed since it passed.
    Unchanged(When),
    /// The run passed before the pass of `make test-all` was interrupted.
    Resumed(When),
}

/// The first try of a run that passed at the second try.
#[derive(Debug, Clone)]
pub(super) struct FirstTry {
    pub(super) failures: Vec<String>,
    /// Logs of the first try and of the second.
    pub(super) logs: Vec<PathBuf>,
}

pub(super) struct Report {
    pub(super) run: &'static Run,
    pub(super) tests: Vec<Test>,
    /// Problems besides failed tests. Each problem counts as a failure.
    pub(super) problems: Vec<String>,
    pub(super) elapsed: Duration,
    /// Duration of the previous execution of this run.
    pub(super) before: Option<Duration>,
    pub(super) log: Option<PathBuf>,
    pub(super) origin: Origin,
    pub(super) flaky: Option<FirstTry>,
}

impl Report {
    /// Returns a report of a run that is not a single VM. Such a report has no log.
    pub(super) fn plain(
        run: &'static Run,
        started: Instant,
        tests: Vec<Test>,
        problems: Vec<String>,
    ) -> Self {
        Self {
            run,
            tests,
            problems,
            elapsed: started.elapsed(),
            before: None,
            log: None,
            origin: Origin::Run,
            flaky: None,
        }
    }

    pub(super) fn kept(run: &'static Run, kept: Kept, origin: fn(When) -> Origin) -> Self {
        Self {
            origin: origin(kept.when),
            elapsed: Duration::ZERO,
            ..Self::plain(run, Instant::now(), kept.tests, Vec::new())
        }
    }

    /// Returns the names of tests that failed, and the problems.
    pub(super) fn failures(&self) -> Vec<String> {
        let failed = self
            .tests
            .iter()
            .filter(|test| test.verdict == Verdict::Failed);
        failed
            .map(|test| test.name.clone())
            .chain(self.problems.iter().cloned())
            .collect()
    }

    pub(super) fn has_passed(&self) -> bool {
        self.failures().is_empty()
    }

    pub(super) fn passed(&self) -> usize {
        let skipped = self.skipped().count();
        let failed = self.failures().len() - self.problems.len();
        self.tests.len() - skipped - failed
    }

    pub(super) fn skipped(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tests.iter().filter_map(|test| match &test.verdict {
            Verdict::Skipped(reason) => Some((test.name.as_str(), reason.as_str())),
            _ => None,
        })
    }

    /// Returns `true` if a second try is useful. Only a run of a VM depends on timing.
    pub(super) fn may_be_tried_again(&self) -> bool {
        let is_machine = matches!(
            self.run.place,
            Place::Vm { .. } | Place::Hazards(_) | Place::Debian(_)
        );
        let has_begun = self.log.is_some() || !self.tests.is_empty();
        is_machine && has_begun && self.origin == Origin::Run && !self.has_passed()
    }

    /// Replaces a run by its second try if the second try passed. Otherwise keeps the first try.
    pub(super) fn after_second_try(self, second: Self) -> Self {
        if second.has_passed() {
            let logs = self.log.iter().chain(&second.log).cloned().collect();
            return Self {
                flaky: Some(FirstTry {
                    failures: self.failures(),
                    logs,
                }),
                before: self.before,
                ..second
            };
        }
        let mut report = self;
        let failures = second.failures();
        let first = failures.first().and_then(|failure| failure.lines().next());
        let mut problem = format!(
            "it failed again, when run alone: {}",
            first.unwrap_or_default()
        );
        if let Some(log) = second.log {
            problem.push_str(&format!("\n    kernel log: {}", log.display()));
        }
        report.problems.push(problem);
        report
    }

    pub(super) fn tell(&self) {
        let failures = self.failures();
        let skipped = self.skipped().count();
        let mut line = format!("      {} passed", self.passed());
        if !failures.is_empty() {
            line.push_str(&format!(", {} FAILED", failures.len()));
        }
        if skipped > 0 {
            line.push_str(&format!(", {skipped} skipped"));
        }
        let before = self
            .before
            .map(|before| format!("; {} the last time", duration(before)));
        match &self.origin {
            Origin::Run => println!(
                "{line} ({}{})",
                duration(self.elapsed),
                before.unwrap_or_default()
            ),
            Origin::Unchanged(when) => println!("{line}: unchanged since {}", told(when)),
            Origin::Resumed(when) => println!("{line} in this pass: {}", told(when)),
        }
        for test in &self.tests {
            if test.verdict != Verdict::Failed {
                continue;
            }
            println!("      FAILED: {}", test.name);
            for note in &test.notes {
                println!("          {note}");
            }
        }
        for problem in &self.problems {
            println!("      FAILED: {}", problem.trim_end());
        }
        if let (false, Some(log)) = (failures.is_empty(), &self.log) {
            println!("      kernel log: {}", log.display());
        }
    }
}

fn told(when: &When) -> String {
    format!("{} ({})", when.date, when.commit)
}

/// Returns a problem for each expected test that is missing: an incomplete group, or a name that no
/// test has.
pub(super) fn missing(run: &Run, tests: &[Test]) -> Vec<String> {
    let mut problems = Vec::new();
    if !run.groups.is_empty() {
        let mut counts: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
        for test in tests {
            let group = test.name.split('.').next().unwrap_or_default();
            counts.entry(group).or_default()[0] += 1;
        }
        for (group, count) in run.groups {
            counts.entry(group).or_default()[1] = *count;
        }
        for (group, [found, expected]) in counts {
            if found != expected {
                problems.push(format!("{found} tests of {group}, {expected} expected"));
            }
        }
    }
    let words = match run.place {
        Place::Vm { command, .. } => command.strip_prefix("{gdr} test "),
        _ => None,
    };
    if let Some(words) = words {
        for word in words.split(' ') {
            if !tests.iter().any(|test| test.name.contains(word)) {
                problems.push(format!("no test has {word} in its name"));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests;
    use crate::suite::BASE;

    static RUN: Run = Run {
        name: "run",
        ..BASE
    };

    static MACHINE: Run = Run {
        name: "machine",
        place: Place::Vm {
            options: "",
            command: "{gdr} test a.",
        },
        ..BASE
    };

    fn report(run: &'static Run, lines: &[&str], problems: &[&str]) -> Report {
        let problems = problems.iter().map(|&text| text.to_owned()).collect();
        Report::plain(run, Instant::now(), tests(lines), problems)
    }

    #[test]
    fn failures_are_failed_tests_and_problems() {
        let report = report(
            &RUN,
            &["a", "b FAILED", "c", "d FAILED", "e SKIP x"],
            &["the machine died"],
        );
        assert_eq!(report.failures(), ["b", "d", "the machine died"]);
        assert_eq!(report.passed(), 2);
    }

    #[test]
    fn groups_and_names_without_tests_are_noticed() {
        static GROUPS: Run = Run {
            groups: &[("a", 2), ("b", 1)],
            ..BASE
        };
        let of = |names: &[&str]| missing(&GROUPS, &tests(names));
        assert!(of(&["a.x", "a.y", "b.x"]).is_empty());
        let problems = ["0 tests of b, 1 expected", "1 tests of c, 0 expected"];
        assert_eq!(of(&["a.x", "a.y", "c.x"]), problems);
        assert!(missing(&MACHINE, &tests(&["a.x"])).is_empty());
        assert_eq!(
            missing(&MACHINE, &tests(&["b.x"])),
            ["no test has a. in its name"]
        );
    }

    #[test]
    fn a_second_try_that_passes_is_listed_as_flaky() {
        let with_log = |log, lines: &[&str]| Report {
            log: Some(PathBuf::from(log)),
            ..report(&MACHINE, lines, &[])
        };
        let first = || with_log("first", &["a.x FAILED"]);
        assert!(first().may_be_tried_again());
        let report = first().after_second_try(with_log("second", &["a.x"]));
        assert!(report.has_passed() && !report.may_be_tried_again());
        let flaky = report.flaky.unwrap();
        assert_eq!(flaky.failures, ["a.x"]);
        assert_eq!(flaky.logs, ["first", "second"].map(PathBuf::from));
        let report = first().after_second_try(with_log("second", &["a.x FAILED"]));
        assert!(report.flaky.is_none());
        assert_eq!(report.failures().len(), 2);
        assert_eq!(report.log, Some(PathBuf::from("first")));
    }

    #[test]
    fn programs_of_the_host_are_not_tried_again() {
        assert!(!report(&RUN, &["d FAILED"], &[]).may_be_tried_again());
        // A run that could not begin is not repeated.
        assert!(!report(&MACHINE, &[], &["no kernel"]).may_be_tried_again());
    }
}
