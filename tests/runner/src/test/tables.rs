// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The end of a suite's output: skipped tests, flaky runs, failures, and totals.

use std::collections::BTreeMap;
use std::time::Duration;

use super::report::{Origin, Report};
use crate::documents::wrapped;
use crate::progress::duration;

fn list_skipped(reports: &[Report]) {
    // Collects first the runs by test and reason, then the tests by reason and runs. Most tests are
    // skipped in groups.
    let mut runs: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for report in reports {
        for skipped in report.skipped() {
            runs.entry(skipped).or_default().push(report.run.name);
        }
    }
    let is_any = !runs.is_empty();
    let mut groups: BTreeMap<(&str, Vec<&str>), Vec<&str>> = BTreeMap::new();
    for ((name, reason), runs) in runs {
        groups.entry((reason, runs)).or_default().push(name);
    }
    if is_any {
        println!("\nSkipped");
    }
    for ((reason, runs), names) in groups {
        println!("  {reason}");
        println!("    in {}", runs.join("; "));
        let mut text = "      ".to_owned();
        wrapped(&mut text, &names.join(" "), "      ");
        print!("{text}");
    }
}

fn list_flaky(reports: &[Report]) {
    let mut heading = "\nFlaky: failed, and passed when run once more, alone\n";
    for report in reports {
        let Some(first) = &report.flaky else {
            continue;
        };
        println!("{heading}  {}", report.run.name);
        heading = "";
        for failure in &first.failures {
            println!("    {}", failure.lines().next().unwrap_or_default());
        }
        for log in &first.logs {
            println!("    kernel log: {}", log.display());
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
    flaky: usize,
    /// Number of runs whose kept results were used, and number of their tests.
    unchanged: [usize; 2],
    /// Number of runs done before the pass was interrupted, and number of their tests.
    resumed: [usize; 2],
}

impl Counts {
    fn of(reports: &[Report]) -> Self {
        let mut counts = Self::default();
        for report in reports {
            counts.failed += report.failures().len();
            let runs_and_tests = match report.origin {
                Origin::Run => {
                    counts.passed += report.passed();
                    counts.skipped += report.skipped().count();
                    counts.flaky += usize::from(report.flaky.is_some());
                    continue;
                }
                Origin::Unchanged(_) => &mut counts.unchanged,
                Origin::Resumed(_) => &mut counts.resumed,
            };
            runs_and_tests[0] += 1;
            runs_and_tests[1] += report.passed();
        }
        counts
    }

    fn lines(&self) -> [String; 2] {
        let mut before = format!("{} flaky", self.flaky);
        for ([runs, tests], what) in [
            (self.unchanged, "unchanged"),
            (self.resumed, "passed earlier in this pass"),
        ] {
            if runs > 0 {
                let runs = if runs == 1 {
                    "1 run".to_owned()
                } else {
                    format!("{runs} runs")
                };
                before.push_str(&format!(", {runs} {what} ({tests} tests)"));
            }
        }
        let mut last = format!("{} passed, {} failed", self.passed, self.failed);
        if self.skipped > 0 {
            last.push_str(&format!(", {} skipped", self.skipped));
        }
        [before, last]
    }
}

/// Prints the end of the output. The last line is for programs.
pub(super) fn summary(reports: &[Report], elapsed: Duration) -> i32 {
    list_skipped(reports);
    list_flaky(reports);
    let failures: Vec<(&str, String)> = reports
        .iter()
        .flat_map(|report| {
            report
                .failures()
                .into_iter()
                .map(|failure| (report.run.name, failure))
        })
        .collect();
    let [before, last] = Counts::of(reports).lines();
    println!("\n{before}, in {}", duration(elapsed));
    if !failures.is_empty() {
        println!("Failed");
        for (run, failure) in &failures {
            println!("  {run}: {}", failure.lines().next().unwrap_or_default());
        }
    }
    println!("{last}");
    i32::from(!failures.is_empty())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::history::When;
    use crate::results::tests;
    use crate::suite::{Run, BASE};
    use crate::test::report::FirstTry;

    static RUN: Run = Run {
        name: "run",
        ..BASE
    };

    #[test]
    fn runs_that_were_not_done_are_counted_apart() {
        let of = |lines: &[&str], origin| Report {
            origin,
            ..Report::plain(&RUN, Instant::now(), tests(lines), Vec::new())
        };
        let mut reports = vec![
            of(&["a", "b FAILED", "c SKIP x"], Origin::Run),
            of(&["a"], Origin::Run),
        ];
        let last = "2 passed, 1 failed, 1 skipped";
        assert_eq!(Counts::of(&reports).lines(), ["0 flaky", last]);
        reports[1].flaky = Some(FirstTry {
            failures: vec!["0".to_owned()],
            logs: Vec::new(),
        });
        reports.push(of(
            &["a", "b", "c SKIP x"],
            Origin::Unchanged(When::default()),
        ));
        reports.push(of(&["a"], Origin::Resumed(When::default())));
        reports.push(of(&["a"], Origin::Resumed(When::default())));
        let before =
            "1 flaky, 1 run unchanged (2 tests), 2 runs passed earlier in this pass (2 tests)";
        assert_eq!(Counts::of(&reports).lines(), [before, last]);
    }
}
