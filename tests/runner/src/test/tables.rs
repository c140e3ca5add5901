// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The end of a suite's output: comparison of results, skipped tests, longest runs, and totals.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::report::{Origin, Report};
use crate::documents::wrapped;
use crate::progress::duration;
use crate::results::{figures, Test, Verdict};

/// Returns the lines of one case: its verdicts, and below them the figures that differ between
/// columns.
fn rows<'a>(name: &'a str, results: &[Option<&'a Test>]) -> Vec<Vec<String>> {
    let verdicts = results
        .iter()
        .map(|test| match test.map(|test| &test.verdict) {
            None => "",
            Some(Verdict::Passed) => "ok",
            Some(Verdict::Failed) => "FAILS",
            Some(Verdict::Skipped(_)) => "-",
        });
    let mut rows = vec![[name]
        .into_iter()
        .chain(verdicts)
        .map(str::to_owned)
        .collect()];
    let measured: Vec<Option<BTreeMap<&str, String>>> = results
        .iter()
        .map(|test| {
            test.filter(|test| !matches!(test.verdict, Verdict::Skipped(_)))
                .map(figures)
        })
        .collect();
    let names: BTreeSet<&str> = measured
        .iter()
        .flatten()
        .flat_map(BTreeMap::keys)
        .copied()
        .collect();
    for figure in names {
        let values: Vec<Option<&str>> = measured
            .iter()
            .map(|figures| Some(figures.as_ref()?.get(figure).map_or("", String::as_str)))
            .collect();
        let different: BTreeSet<&str> = values.iter().flatten().copied().collect();
        if different.len() < 2 {
            continue;
        }
        let mut row = vec![format!("    {figure}")];
        row.extend(
            values
                .iter()
                .map(|value| cut(value.unwrap_or_default(), CELL)),
        );
        rows.push(row);
    }
    rows
}

/// Maximum width of a figure in the table.
const CELL: usize = 48;

/// Cuts a text that is longer than `most` characters.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

/// Prints the results of the same cases with each peer-memory module, side by side.
fn table(reports: &[Report]) {
    let mut columns: Vec<&str> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    let mut results: BTreeMap<(&str, &str), &Test> = BTreeMap::new();
    for report in reports {
        let Some(column) = report.column.as_deref() else {
            continue;
        };
        if !columns.contains(&column) {
            columns.push(column);
        }
        for test in &report.tests {
            if !names.contains(&test.name.as_str()) {
                names.push(&test.name);
            }
            results.insert((&test.name, column), test);
        }
    }
    if columns.len() < 2 {
        return;
    }
    let mut lines = vec![[""]
        .iter()
        .chain(&columns)
        .map(|&word| word.to_owned())
        .collect()];
    for name in names {
        let tests: Vec<Option<&Test>> = columns
            .iter()
            .map(|column| results.get(&(name, *column)).copied())
            .collect();
        lines.extend(rows(name, &tests));
    }
    let mut table = comfy_table::Table::new();
    table
        .load_preset(comfy_table::presets::NOTHING)
        .add_rows(lines);
    println!("\nThe same cases with each module, and the figures in which they differ");
    for line in table.lines() {
        println!(" {}", line.trim_end());
    }
}

/// Lists the skipped tests and their reasons.
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

/// Number of the longest runs to list.
const LONGEST: usize = 10;

fn list_longest(reports: &[Report]) {
    let mut ran: Vec<&Report> = reports
        .iter()
        .filter(|report| report.origin == Origin::Run)
        .collect();
    ran.sort_by_key(|report| std::cmp::Reverse(report.elapsed));
    if ran.len() < 2 {
        return;
    }
    println!("\nLongest");
    for report in ran.into_iter().take(LONGEST) {
        let before = match report.before {
            Some(before) => format!(" ({} the last time)", duration(before)),
            None => String::new(),
        };
        println!(
            "  {:>12}  {}{before}",
            duration(report.elapsed),
            report.run.name
        );
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

/// Numbers in the last two lines.
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
    table(reports);
    list_skipped(reports);
    list_longest(reports);
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
    if !failures.is_empty() {
        println!("\nFailed");
        for (run, failure) in &failures {
            println!("  {run}: {}", failure.lines().next().unwrap_or_default());
        }
    }
    let [before, last] = Counts::of(reports).lines();
    println!("\n{before}, in {}\n{last}", duration(elapsed));
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
    fn long_figures_are_cut() {
        assert_eq!(cut("ab…d", 4), "ab…d");
        assert_eq!(cut("ab…de", 4), "ab……");
    }

    #[test]
    fn figures_that_differ_have_a_row() {
        let tests = tests(&[
            "a | pins 1; bytes 8; seconds 1; pins 3",
            "a | pins 2; bytes 8; seconds 2",
            "a SKIP x | pins 1",
        ]);
        let [one, other, skipped] = [0, 1, 2].map(|at: usize| Some(&tests[at]));
        assert_eq!(
            rows("a", &[one, other, skipped, None]),
            [["a", "ok", "ok", "-", ""], ["    pins", "1 3", "2", "", ""]]
        );
        assert_eq!(rows("a", &[one, None]), [["a", "ok", ""]]);
    }

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
