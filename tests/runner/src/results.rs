// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Parses the output of test programs: KTAP, cargo's tests, Python's unittest.

use std::sync::LazyLock;

use anyhow::Result;
use regex::Regex;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    Skipped(String),
}

/// A test's result and the program's notes about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Test {
    pub(crate) name: String,
    pub(crate) verdict: Verdict,
    /// Diagnostic lines without their prefix.
    pub(crate) notes: Vec<String>,
}

impl Test {
    /// Returns the result of one of the test runner's own checks. The notes are the check's
    /// messages if it passed, or the reason of its failure.
    pub(crate) fn of(name: String, result: Result<Vec<String>>) -> Self {
        let (verdict, notes) = match result {
            Ok(said) => (Verdict::Passed, said),
            Err(error) => (
                Verdict::Failed,
                format!("{error:#}").lines().map(str::to_owned).collect(),
            ),
        };
        Self {
            name,
            verdict,
            notes,
        }
    }

    pub(crate) fn new(name: &str, verdict: Verdict) -> Self {
        Self {
            name: name.to_owned(),
            verdict,
            notes: Vec::new(),
        }
    }

    pub(crate) fn skipped(name: &str, reason: String) -> Self {
        Self::new(name, Verdict::Skipped(reason))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Ktap,
    Cargo,
    /// Output of `unittest` with `--verbose`.
    Unittest,
    /// Output of `gdr demo`, which is one test.
    Demo,
}

/// Last line of a demo that succeeded.
pub(crate) const DEMO_OK: &str = "demo: ok";

/// A parser that gets a program's output line by line.
#[derive(Debug)]
pub(crate) struct Reader {
    format: Format,
    pub(crate) tests: Vec<Test>,
    /// Problems with the output itself.
    problems: Vec<String>,
    notes: Vec<String>,
    /// Number of tests that the program announced, or counted at its end.
    announced: Option<usize>,
    /// For unittest, the test whose result is pending. For cargo, the test whose output is shown.
    pending: Option<String>,
}

#[expect(
    clippy::expect_used,
    reason = "the patterns are constants of this program"
)]
pub(crate) fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("constant pattern")
}

static KTAP_RESULT: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^(not )?ok (\d+)(?: -)? ?([^#]*?)\s*(?:#\s*(\S+)\s*(.*))?$"));
static KTAP_PLAN: LazyLock<Regex> = LazyLock::new(|| pattern(r"^1\.\.(\d+)"));
static CARGO_RESULT: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^test (.+?) \.\.\. (ok|FAILED|ignored)(?:, (.*))?$"));
static CARGO_COUNT: LazyLock<Regex> = LazyLock::new(|| pattern(r"^running (\d+) tests?$"));
static CARGO_SAID: LazyLock<Regex> = LazyLock::new(|| pattern(r"^---- (.+) stdout ----$"));
static UNITTEST_NAME: LazyLock<Regex> = LazyLock::new(|| pattern(r"^(\w+) \(([\w.]+)\)"));
static UNITTEST_RESULT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r#"\.\.\. (ok|FAIL|ERROR|expected failure|unexpected success|skipped (.*))$"#)
});
static UNITTEST_COUNT: LazyLock<Regex> = LazyLock::new(|| pattern(r"^Ran (\d+) tests? in"));

impl Reader {
    pub(crate) fn new(format: Format) -> Self {
        Self {
            format,
            tests: Vec::new(),
            problems: Vec::new(),
            notes: Vec::new(),
            announced: None,
            pending: None,
        }
    }

    pub(crate) fn of(format: Format, text: &str) -> Self {
        let mut reader = Self::new(format);
        for line in text.lines() {
            reader.line(line);
        }
        reader
    }

    /// Parses one line. Returns the test if the line is a result.
    pub(crate) fn line(&mut self, line: &str) -> Option<&Test> {
        let before = self.tests.len();
        match self.format {
            Format::Ktap => self.ktap(line),
            Format::Cargo => self.cargo(line),
            Format::Unittest => self.unittest(line),
            Format::Demo if line == DEMO_OK => {
                self.announced = Some(1);
                self.add("demo", Verdict::Passed);
            }
            Format::Demo => {}
        }
        self.tests.get(before)
    }

    fn add(&mut self, name: &str, verdict: Verdict) {
        if self.tests.iter().any(|test| test.name == name) {
            self.problems.push(format!("'{name}' has two results"));
        }
        self.tests.push(Test {
            name: name.to_owned(),
            verdict,
            notes: std::mem::take(&mut self.notes),
        });
    }

    fn ktap(&mut self, line: &str) {
        if let Some(plan) = KTAP_PLAN.captures(line) {
            if self.announced.is_some() {
                self.problems.push("two plans".to_owned());
            }
            self.announced = plan[1].parse().ok();
        } else if let Some(found) = KTAP_RESULT.captures(line) {
            let number: Option<usize> = found[2].parse().ok();
            if number != Some(self.tests.len() + 1) {
                self.problems.push(format!("out of order: {line}"));
            }
            let directive = found.get(4).map_or("", |text| text.as_str());
            let reason = found.get(5).map_or("", |text| text.as_str());
            let verdict = if found.get(1).is_some() {
                Verdict::Failed
            } else if directive.eq_ignore_ascii_case("skip") {
                Verdict::Skipped(reason.to_owned())
            } else {
                Verdict::Passed
            };
            self.add(&found[3], verdict);
        } else if let Some(note) = line.strip_prefix("# ") {
            self.notes.push(note.to_owned());
        } else if line.starts_with("Bail out!") {
            self.problems.push(line.to_owned());
        }
    }

    fn cargo(&mut self, line: &str) {
        if let Some(count) = CARGO_COUNT.captures(line) {
            // Each of cargo's test programs announces its number of tests in such a line.
            let count: usize = count[1].parse().unwrap_or(0);
            self.announced = Some(self.announced.unwrap_or(0) + count);
            self.pending = None;
        } else if let Some(found) = CARGO_RESULT.captures(line) {
            let verdict = match &found[2] {
                "ok" => Verdict::Passed,
                "FAILED" => Verdict::Failed,
                _ => Verdict::Skipped(found.get(3).map_or("ignored", |m| m.as_str()).to_owned()),
            };
            // Two programs may have tests of the same name. The later test gets a suffix.
            let mut name = found[1].to_owned();
            while self.tests.iter().any(|test| test.name == name) {
                name.push('\'');
            }
            self.notes.clear();
            self.add(&name, verdict);
        } else if let Some(found) = CARGO_SAID.captures(line) {
            self.pending = Some(found[1].to_owned());
        } else if line == "failures:" || line.starts_with("test result: ") {
            self.pending = None;
        } else if let Some(name) = &self.pending {
            // The output of a test follows the results of the test's program (`--show-output`). An
            // earlier program may have a test of the same name, so the search begins at the end.
            let of = |test: &&mut Test| test.name.trim_end_matches('\'') == name;
            let Some(test) = self.tests.iter_mut().rev().find(of) else {
                return;
            };
            match line.strip_prefix("figure: ") {
                Some(figure) => test.notes.push(figure.to_owned()),
                None if test.verdict == Verdict::Failed => test.notes.push(line.to_owned()),
                None => {}
            }
        } else {
            self.notes.push(line.to_owned());
        }
    }

    fn unittest(&mut self, line: &str) {
        if let Some(count) = UNITTEST_COUNT.captures(line) {
            self.announced = count[1].parse().ok();
            return;
        }
        if let Some(found) = UNITTEST_NAME.captures(line) {
            // Newer Python versions include the test's name as the last part of the path.
            let path = found[2].to_owned();
            let suffix = format!(".{}", &found[1]);
            self.pending = Some(if path.ends_with(&suffix) {
                path
            } else {
                format!("{path}{suffix}")
            });
        }
        if let Some(found) = UNITTEST_RESULT.captures(line) {
            let Some(name) = self.pending.take() else {
                return;
            };
            let verdict = match &found[1] {
                "ok" | "expected failure" => Verdict::Passed,
                "FAIL" | "ERROR" | "unexpected success" => Verdict::Failed,
                _ => Verdict::Skipped(found.get(2).map_or("", |m| m.as_str()).to_owned()),
            };
            self.add(&name, verdict);
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.announced == Some(self.tests.len())
    }

    /// Returns the notes since the last result. These notes belong to an unfinished test, or to no
    /// test.
    pub(crate) fn unfinished(&self) -> &[String] {
        &self.notes
    }

    /// Ends the parsing. Returns the tests, and the problems of the output as a whole.
    pub(crate) fn finish(mut self) -> (Vec<Test>, Vec<String>) {
        match self.announced {
            None => self
                .problems
                .push("the program announced no tests".to_owned()),
            Some(0) => self.problems.push("the program ran no tests".to_owned()),
            Some(count) if count != self.tests.len() => self.problems.push(format!(
                "the program announced {count} tests and gave {} results",
                self.tests.len()
            )),
            Some(_) => {}
        }
        (self.tests, self.problems)
    }
}

/// Prints tests and their notes. Returns the number of failed tests.
pub(crate) fn tell(tests: &[Test]) -> usize {
    for test in tests {
        let passed = test.verdict == Verdict::Passed;
        println!("  {}: {}", test.name, if passed { "ok" } else { "FAILED" });
        for note in &test.notes {
            println!("      {note}");
        }
    }
    let failed = tests.iter().filter(|test| test.verdict != Verdict::Passed);
    failed.count()
}

/// Returns results as input for this program's own tests. Each line is `name`, `name FAILED` or
/// `name SKIP reason`, and may have notes: `name | one; two`.
#[cfg(test)]
pub(crate) fn tests(lines: &[&str]) -> Vec<Test> {
    let test = |line: &&str| {
        let (head, notes) = line.split_once(" | ").unwrap_or((line, ""));
        let (name, verdict) = match head.split_once(" SKIP ") {
            Some((name, reason)) => (name, Verdict::Skipped(reason.to_owned())),
            None => match head.strip_suffix(" FAILED") {
                Some(name) => (name, Verdict::Failed),
                None => (head, Verdict::Passed),
            },
        };
        let notes = notes
            .split("; ")
            .filter(|note| !note.is_empty())
            .map(str::to_owned);
        Test {
            notes: notes.collect(),
            ..Test::new(name, verdict)
        }
    };
    lines.iter().map(test).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(format: Format, text: &str) -> (Vec<Test>, Vec<String>) {
        Reader::of(format, text).finish()
    }

    #[test]
    fn ktap_with_everything() {
        let (tests, problems) = read(
            Format::Ktap,
            "KTAP version 1\n1..4\n# pins 1\n# entries 1\nok 1 register.a\nnoise\n\
             ok 2 - register.b # SKIP needs two GPUs\n# failure: why\nnot ok 3 move.c\nok 4 d # TODO later\n",
        );
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(tests[0].name, "register.a");
        assert_eq!(tests[0].notes, ["pins 1", "entries 1"]);
        assert_eq!(tests[1].verdict, Verdict::Skipped("needs two GPUs".into()));
        assert_eq!(tests[1].name, "register.b");
        assert_eq!(tests[2].verdict, Verdict::Failed);
        assert_eq!(tests[2].notes, ["failure: why"]);
        assert_eq!(tests[3].verdict, Verdict::Passed);
    }

    #[test]
    fn ktap_that_is_cut_short_or_empty_is_a_problem() {
        assert_eq!(
            read(Format::Ktap, "1..3\nok 1 a\n").1,
            ["the program announced 3 tests and gave 1 results"]
        );
        assert_eq!(read(Format::Ktap, "").1, ["the program announced no tests"]);
        assert_eq!(read(Format::Ktap, "1..0\n").1, ["the program ran no tests"]);
        assert_eq!(read(Format::Ktap, "1..2\nok 1 a\nok 3 b\n").1.len(), 1);
        assert_eq!(read(Format::Ktap, "1..2\nok 1 a\nok 2 a\n").1.len(), 1);
        assert_eq!(
            read(Format::Ktap, "1..1\nok 1 a\nBail out! x\n").1,
            ["Bail out! x"]
        );
    }

    #[test]
    fn cargo_tests() {
        let (tests, problems) = read(
            Format::Cargo,
            "running 3 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ignored, slow\n\
             test result: FAILED. 1 passed; 1 failed\nrunning 1 test\ntest a::b ... ok\n",
        );
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(tests.len(), 4);
        assert_eq!(tests[1].verdict, Verdict::Failed);
        assert_eq!(tests[2].verdict, Verdict::Skipped("slow".into()));
        assert_eq!(tests[3].name, "a::b'");
    }

    #[test]
    fn figures_of_cargo_tests() {
        let (tests, problems) = read(
            Format::Cargo,
            "running 2 tests\ntest a ... ok\ntest b ... ok\nfigure: cases 9\n\nsuccesses:\n\n\
             ---- b stdout ----\n1 GiB: 1 entry\nfigure: cases 12\nfigure: mode x\n\n\n\
             ---- a stdout ----\nfigure: cases 3\n\nsuccesses:\n    a\n    b\n\ntest result: ok.\n\n\
             running 1 test\ntest a ... ok\nfigure: cases 8\n---- a stdout ----\nfigure: cases 4\n",
        );
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(tests[0].notes, ["cases 3"]);
        assert_eq!(tests[1].notes, ["cases 12", "mode x"]);
        assert_eq!((tests[2].name.as_str(), tests[2].notes.len()), ("a'", 1));
    }

    #[test]
    fn a_demo_passes_by_its_last_line() {
        assert_eq!(read(Format::Demo, "1. x\ndemo: ok\n").0.len(), 1);
        let problems = read(Format::Demo, "1. x\n   demo: ok\n").1;
        assert_eq!(problems, ["the program announced no tests"]);
    }

    #[test]
    fn unittest_with_and_without_descriptions() {
        let (tests, problems) = read(
            Format::Unittest,
            "test_a (tests.test_mr.MRTest.test_a) ... ok\ntest_b (tests.test_mr.MRTest)\nWhat it does ... skipped 'no'\n\
             test_c (tests.test_mr.MRTest) ... ERROR\n\nRan 3 tests in 1.2s\n",
        );
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(tests[0].name, "tests.test_mr.MRTest.test_a");
        assert_eq!(tests[1].name, "tests.test_mr.MRTest.test_b");
        assert_eq!(tests[1].verdict, Verdict::Skipped("'no'".into()));
        assert_eq!(tests[2].verdict, Verdict::Failed);
    }
}
