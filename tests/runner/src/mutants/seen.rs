// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Results of tests on one build, and the signs of a mutant in them.

use anyhow::{anyhow, ensure, Result};

use super::rule::Sign;
use crate::results::{Test, Verdict};

#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) tests: Vec<Test>,
    pub(super) hung: bool,
    /// `true` if the run ended, whatever its result is.
    pub(super) ended: bool,
    /// Problems besides failed tests: for a VM, the reports of its kernel.
    pub(super) problems: Vec<String>,
    pub(super) output: String,
}

impl Seen {
    pub(super) fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Test> {
        self.tests
            .iter()
            .filter(move |test| test.name.contains(name))
    }

    pub(super) fn passed(&self, name: &str) -> Result<()> {
        ensure!(!self.hung, "{name} hangs on the unchanged module");
        ensure!(
            self.problems.is_empty(),
            "on the unchanged module: {}",
            self.summary()
        );
        ensure!(self.ended, "{name} did not end on the unchanged module");
        let mut count = 0;
        for test in self.of(name) {
            ensure!(
                test.verdict == Verdict::Passed,
                "{} on the unchanged module: {:?} {}",
                test.name,
                test.verdict,
                test.notes.join("; ")
            );
            count += 1;
        }
        ensure!(count > 0, "there is no test {name}");
        Ok(())
    }

    pub(super) fn shows(&self, name: &str, sign: &Sign) -> Result<String> {
        match sign {
            Sign::Hangs => {
                ensure!(self.hung, "{name} returned, but should hang");
                Ok("hangs".to_owned())
            }
            Sign::Report(pattern) => self
                .problems
                .iter()
                .flat_map(|problem| problem.lines())
                .find(|line| pattern.is_match(line))
                .map(|line| line.trim().to_owned())
                .ok_or_else(|| anyhow!("no report matches {pattern}: {}", self.summary())),
            Sign::Fails(pattern) => {
                let failed: Vec<_> = self
                    .of(name)
                    .filter(|test| test.verdict == Verdict::Failed)
                    .collect();
                ensure!(
                    !failed.is_empty(),
                    "{name} passes without the rule: {}",
                    self.summary()
                );
                // The output of other tests and of the test program is no sign.
                failed
                    .iter()
                    .find_map(|test| {
                        let said = test.notes.join("\n");
                        let found = pattern.find(&said)?.range();
                        let from = said[..found.start].rfind('\n').map_or(0, |at| at + 1);
                        let to = said[found.end..]
                            .find('\n')
                            .map_or(said.len(), |at| found.end + at);
                        Some(said[from..to].trim().to_owned())
                    })
                    .ok_or_else(|| {
                        anyhow!("{name} fails, but not with {pattern}: {}", self.summary())
                    })
            }
        }
    }

    /// Returns a summary for a reader who has not seen the run.
    pub(super) fn summary(&self) -> String {
        let mut lines: Vec<String> = self
            .tests
            .iter()
            .filter(|test| test.verdict != Verdict::Passed)
            .map(|test| {
                format!(
                    "{}: {:?} {}",
                    test.name,
                    test.verdict,
                    test.notes.join("; ")
                )
            })
            .collect();
        // A report's first lines identify it.
        for problem in &self.problems {
            lines.extend(problem.lines().take(8).map(str::to_owned));
        }
        if self.hung {
            lines.push("timed out".to_owned());
        }
        let said: Vec<&str> = self.output.lines().collect();
        if self.tests.is_empty() {
            let tail = &said[said.len().saturating_sub(8)..];
            lines.extend(tail.iter().map(|line| (*line).to_owned()));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::sign;
    use super::*;
    use crate::results::tests;

    #[test]
    fn signs_are_looked_for() {
        let seen = |line: &str, problems: &[&str]| Seen {
            tests: tests(&[line]),
            problems: problems.iter().map(|text| (*text).to_owned()).collect(),
            ended: true,
            output: "KTAP version 1\n# failure: two pins\nnot ok 1 rules.4.x\n".to_owned(),
            ..Seen::default()
        };
        let fails = "rules.4.x FAILED | failure: two pins";
        let shows = |seen: &Seen, text: &str| seen.shows("rules.4.x", &sign(text).unwrap()).is_ok();
        let failed = seen(fails, &["the kernel reports:\n  BUG: x\n"]);
        assert!(shows(&failed, "fails two pins"));
        assert!(!shows(&failed, "fails three pins"));
        // Every run prints this text.
        assert!(!shows(&failed, "fails version"));
        // The output of other cases does not count.
        let mut two = seen(fails, &[]);
        two.tests
            .extend(tests(&["rules.5.y FAILED | failure: three pins"]));
        assert!(!shows(&two, "fails three pins"));
        // A sign may span several lines.
        two.tests[0].notes = ["left: 1", "right: 2", "x"].map(str::to_owned).to_vec();
        assert!(shows(&two, r"fails left: 1\s+right: 2"));
        assert!(!shows(&two, r"fails left: 1.*right: 2"));
        assert!(shows(&failed, "report BUG"));
        assert!(!shows(&failed, "hangs"));
        assert!(failed.passed("rules.4.x").is_err());
        let passed = seen("rules.4.x | failure: two pins", &[]);
        assert!(!shows(&passed, "fails two pins"));
        assert!(passed.passed("rules.4.x").is_ok());
        assert!(passed.passed("rules.5").is_err());
        assert!(seen("rules.4.x SKIP why", &[]).passed("rules.4.x").is_err());
    }
}
