// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Parts of the documentation that are generated from the suite's results, so that they match the
//! results.
//!
//! Such a part is between two markers in its file. A run of the suite compares the part with the
//! results. With `--update-docs`, the run writes the part.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use anyhow::{anyhow, Context as _, Result};
use regex::{Captures, Regex};

use crate::results::{pattern, Test, Verdict};

/// A part of a document, and the runs that it is generated from.
pub(crate) struct Part {
    file: &'static str,
    name: &'static str,
    /// Names of the suite's runs. If one of these runs was not done, the part is not compared.
    pub(crate) runs: &'static [&'static str],
    make: Make,
}

type Make = fn(&[&[Test]]) -> Result<String>;

const fn part(
    file: &'static str,
    name: &'static str,
    runs: &'static [&'static str],
    make: Make,
) -> Part {
    Part {
        file,
        name,
        runs,
        make,
    }
}

const LOOM: &str = "the module's logic, in every order of events";
const HOST: &str = "the module's logic, on the host";

pub(crate) const PARTS: &[Part] = &[
    part(
        "docs/bad-input.md",
        "bad input",
        &[
            // Each run has one column: first the runs of our module, then those of NVIDIA's
            // nvidia-peermem.
            "nvidia.ko's answers: ours, on the stand-in's p2p.c",
            "nvidia.ko's answers: ours, revocable, on the stand-in's p2p.c",
            "verbs: NVIDIA's, persistent client, on the stand-in's p2p.c",
            "verbs: NVIDIA's, callback client, on the stand-in's p2p.c",
        ],
        bad_input,
    ),
    part(
        "docs/verification.md",
        "interleavings",
        &[LOOM],
        interleavings,
    ),
    part("docs/verification.md", "cases", &[HOST], |runs| {
        rows(runs, CASES, "cases", "| test | cases |\n|---|---|\n")
    }),
    part("docs/verification.md", "searches", &[HOST], |runs| {
        rows(runs, SEARCHES, "cases", "| test | cases |\n|---|---|\n")
    }),
    part("docs/registration.md", "calls to pin", &[HOST], |runs| {
        let head = "| allocations side by side | calls to pin | an allocation | bytes of all attempted pins, divided by the range's length |\n|---|---|---|---|\n";
        rows(runs, SEARCHED, "search", head)
    }),
    part("docs/observe.md", "reasons", &[HOST], |runs| {
        let head = "| reason | what happened | what to do |\n|---|---|---|\n";
        rows(runs, REASONS, "reason", head)
    }),
    part("docs/observe.md", "events", &[HOST], |runs| {
        let head = "| event | what happened | what to do |\n|---|---|---|\n";
        rows(runs, REASONS, "event", head)
    }),
];

impl Part {
    /// Compares the part with the runs' results, or writes it. `tests_of` returns the tests of a
    /// run. Returns the problem, if any.
    pub(crate) fn compare<'a>(
        &self,
        repo: &Path,
        tests_of: impl Fn(&str) -> Option<&'a [Test]>,
        update: bool,
    ) -> Option<String> {
        // A run without any result has failed, and has already reported its failure.
        let runs: Vec<&[Test]> = self
            .runs
            .iter()
            .map(|run| tests_of(run).filter(|tests| !tests.is_empty()))
            .collect::<Option<_>>()?;
        // A failed run writes nothing, because it may have stopped halfway.
        let passed = runs
            .iter()
            .copied()
            .flatten()
            .all(|test| test.verdict != Verdict::Failed);
        (self.make)(&runs)
            .and_then(|text| check(&repo.join(self.file), self.name, &text, update && passed))
            .map(|problem| Some(format!("{}\n    --update-docs writes it", problem?)))
            .unwrap_or_else(|error| Some(format!("{}: {}: {error:#}", self.file, self.name)))
    }
}

/// Splits a document at the markers of `name` into the text before, between and after them. The
/// first part includes the begin marker, and the last part includes the end marker.
pub(crate) fn split<'a>(document: &'a str, name: &str) -> Result<[&'a str; 3]> {
    let begin = format!("<!-- begin {name}: made by ");
    let end = format!("<!-- end {name} -->\n");
    let from = document.find(&begin).and_then(|at| {
        let line = document[at..].find('\n')?;
        Some(at + line + 1)
    });
    let to = document.find(&end);
    match (from, to) {
        (Some(from), Some(to)) if from <= to => {
            Ok([&document[..from], &document[from..to], &document[to..]])
        }
        _ => Err(anyhow!("no markers of {name}")),
    }
}

/// Compares the part `name` of `file` with `part`, or writes it. Returns the problem, if any.
pub(crate) fn check(file: &Path, name: &str, part: &str, update: bool) -> Result<Option<String>> {
    let document = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let [before, found, after] = split(&document, name).context(file.display().to_string())?;
    if found == part {
        return Ok(None);
    }
    if update {
        fs::write(file, [before, part, after].concat())?;
        println!("      {}: updated", file.display());
        return Ok(None);
    }
    let (line, there, seen) = found
        .lines()
        .chain(["(the end)"])
        .zip(part.lines().chain(["(the end)"]))
        .enumerate()
        .find(|(_, (there, seen))| there != seen)
        .map_or((0, "", ""), |(line, (there, seen))| (line, there, seen));
    Ok(Some(format!(
        "{}: {name} differs from the results, first in line {}:\n    page:    {there}\n    results: {seen}",
        file.display(),
        line + before.lines().count() + 1,
    )))
}

/// Prefix of all log lines about a refusal.
const REFUSED: &str = "nvidia-peermem: refused ADDRESS+LENGTH of process PID in ";

fn noted<'a>(test: &'a Test, name: &str) -> Option<&'a str> {
    test.notes
        .iter()
        .find_map(|note| note.strip_prefix(name)?.strip_prefix(' '))
}

/// Returns the value of a note, which must exist.
fn figure<'a>(test: &'a Test, name: &str) -> Result<&'a str> {
    noted(test, name).with_context(|| format!("{} has no note {name}", test.name))
}

/// Returns the table of loom's models with their numbers of interleavings. Adds the number of locks
/// and rules that the tests of `can_fail.rs` remove.
fn interleavings(runs: &[&[Test]]) -> Result<String> {
    let tests = || runs.iter().copied().flatten();
    let mut rows = tests()
        .filter(|test| test.name.starts_with("models::"))
        .map(|test| {
            let [threads, model, mode] =
                ["threads", "model", "mode"].map(|name| figure(test, name));
            let count: usize = figure(test, "interleavings")?.parse()?;
            Ok((threads?, model?, mode?, count))
        })
        .collect::<Result<Vec<_>>>()?;
    rows.sort_unstable();
    let mut text = String::from("| model | threads | mode | interleavings |\n|---|---|---|---|\n");
    for (threads, model, mode, count) in rows {
        let count = grouped(&count);
        writeln!(text, "| {model} | {threads} | {mode} | {count} |")?;
    }
    let noticed = tests()
        .filter(|test| test.name.starts_with("can_fail::"))
        .flat_map(|test| &test.notes)
        .filter(|note| note.starts_with("noticed "))
        .count();
    writeln!(
        text,
        "\nLocks and rules that `can_fail.rs` takes away, each noticed by a model: {noticed}."
    )?;
    Ok(text)
}

fn find<'a>(runs: &[&'a [Test]], name: &str) -> Result<&'a Test> {
    let mut tests = runs.iter().copied().flatten();
    let found = tests.find(|test| test.name.strip_prefix("src::") == Some(name));
    found.with_context(|| format!("{name} is missing"))
}

/// Tests that print the rows of the page's table of cases.
const CASES: &[&str] = &[
    "ranges::tests::small_scopes_exhaustively",
    "ranges::tests::small_scopes_with_trimming_exhaustively",
    "ranges::tests::real_limits",
    "ranges::tests::real_sizes",
];
const SEARCHES: &[&str] = &[
    "chunks::tests::all_layouts_of_up_to_five_allocations",
    "chunks::tests::random_sizes",
];
const REASONS: &[&str] = &["reason::tests::each_row_has_a_name_of_its_own"];
const SEARCHED: &[&str] = &[
    "chunks::tests::allocations_of_one_size_cost_about_one_call_each",
    "chunks::tests::the_cost_of_random_sizes",
];

/// Returns a table of the rows that these tests print after the prefix `of`.
fn rows(runs: &[&[Test]], tests: &[&str], of: &str, head: &str) -> Result<String> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| pattern(r"\d{4,}"));

    let mut text = head.to_owned();
    for name in tests {
        let test = find(runs, name)?;
        figure(test, of)?;
        for row in test.notes.iter().filter_map(|note| note.strip_prefix(of)) {
            let row = NUMBER.replace_all(row, |found: &Captures<'_>| grouped(&&found[0]));
            writeln!(text, "{}", row.trim_start())?;
        }
    }
    Ok(text)
}

/// Formats an unsigned number with digits in groups of three: `12,345`.
pub(crate) fn grouped(number: &impl ToString) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns the table of bad input, and the log lines below it, from the results of its four runs.
fn bad_input(runs: &[&[Test]]) -> Result<String> {
    let runs = <[&[Test]; 4]>::try_from(runs).context("not four runs")?;
    let mut text = String::from(
        "| input | persistent | revocable | NVIDIA's | NVIDIA's, callback | asked, pinned | log |\n\
         |---|---|---|---|---|---|---|\n",
    );
    let mut lines: Vec<&str> = Vec::new();
    let mut skipped: Vec<&str> = Vec::new();
    for test in runs[0]
        .iter()
        .filter(|test| test.name.starts_with("input."))
    {
        let of_runs = runs.map(|run| run.iter().find(|other| other.name == test.name));
        let mut cells = vec![noted(test, "input")
            .context("a case without a name")?
            .to_owned()];
        for found in of_runs {
            let found = found.with_context(|| format!("{} is missing", test.name))?;
            cells.push(match &found.verdict {
                Verdict::Passed => noted(found, "application")
                    .context("a case without a result")?
                    .to_owned(),
                Verdict::Skipped(reason) => {
                    let at = place(&mut skipped, reason);
                    // Uses letters, because the log lines have numbers.
                    let letter = char::from(b'a' + u8::try_from(at)?);
                    format!("not run ({letter})")
                }
                Verdict::Failed => return Err(anyhow!("{} failed", test.name)),
            });
        }
        let ours = [of_runs[0], of_runs[1]];
        let asked = ours.map(|found| {
            let mut counts = found
                .and_then(|found| noted(found, "provider"))
                .unwrap_or_default()
                .split(", ")
                .filter_map(|count| count.split(' ').next());
            match (counts.next(), counts.next()) {
                (Some(asked), Some(pinned)) if !asked.is_empty() => format!("{asked}, {pinned}"),
                _ => "–".to_owned(),
            }
        });
        let logged = ours.map(|found| match found.and_then(|found| noted(found, "log")) {
            Some(line) => (place(&mut lines, line.trim_start_matches(REFUSED)) + 1).to_string(),
            None => "–".to_owned(),
        });
        for [persistent, revocable] in [asked, logged] {
            cells.push(if persistent == revocable {
                persistent
            } else {
                format!("{persistent}; {revocable}")
            });
        }
        writeln!(text, "| {} |", cells.join(" | "))?;
    }
    text.push('\n');
    for (number, line) in lines.iter().enumerate() {
        wrapped(&mut text, &format!("{}. {line}", number + 1), "  ");
    }
    if !skipped.is_empty() {
        text.push('\n');
    }
    for (at, reason) in skipped.iter().enumerate() {
        let letter = char::from(b'a' + u8::try_from(at)?);
        wrapped(&mut text, &format!("({letter}) {reason}.  "), "  ");
    }
    Ok(text)
}

/// Returns the position of `word` in the list, and appends `word` if it is missing.
fn place<'a>(list: &mut Vec<&'a str>, word: &'a str) -> usize {
    if let Some(at) = list.iter().position(|&known| known == word) {
        return at;
    }
    list.push(word);
    list.len() - 1
}

/// Appends a paragraph in lines of at most 120 columns. All lines but the first are indented.
pub(crate) fn wrapped(text: &mut String, paragraph: &str, indent: &str) {
    let mut column = 0;
    for word in paragraph.trim_end().split(' ') {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > 120 {
            text.push('\n');
            text.push_str(indent);
            column = indent.len();
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += width;
    }
    // Keeps Markdown's line break if the paragraph ends with one.
    text.push_str(&paragraph[paragraph.trim_end().len()..]);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests;
    use crate::suite::every_run;

    fn body(table: Result<String>) -> String {
        let text = table.expect("a table");
        text.splitn(3, '\n').nth(2).unwrap_or_default().to_owned()
    }

    #[test]
    fn a_table_of_bad_input() {
        let log = format!("log {REFUSED}acquire: why");
        let ours = |asked: u32| {
            let notes =
                format!("input freed; application EFAULT; provider {asked} asked, 0 pinned");
            tests(&["move.a", &format!("input.a | {notes}; {log}")])
        };
        let (one, two) = (ours(1), ours(2));
        let skipped = tests(&["input.a SKIP it would die"]);
        assert_eq!(
            body(bad_input(&[&one, &two, &one, &skipped])),
            "| freed | EFAULT | EFAULT | EFAULT | not run (a) | 1, 0; 2, 0 | 1 |\n\n1. acquire: why\n\n(a) it would die.  \n"
        );
        let failed = tests(&["input.a FAILED | input freed"]);
        assert!(bad_input(&[&one, &two, &one, &failed]).is_err());
        assert!(bad_input(&[&one, &two, &one, &[]]).is_err());
    }

    #[test]
    fn a_part_is_compared_and_written_unless_a_run_failed() {
        let folder = crate::paths::Folder::scratch("documents");
        let file = folder.join("d.md");
        let marked = |part: &str| {
            format!("x\n<!-- begin t: made by `make test` -->\n{part}<!-- end t -->\ny\n")
        };
        fs::write(&file, marked("one\ntwo\n")).expect("written");
        assert!(check(&file, "t", "one\ntwo\n", false)
            .expect("marks")
            .is_none());
        let problem = check(&file, "t", "one\nthree\n", false)
            .expect("marks")
            .expect("differs");
        assert!(
            problem.contains("line 4") && problem.contains("three"),
            "{problem}"
        );
        assert!(check(&file, "u", "", false).is_err());
        let make = |runs: &[&[Test]]| Ok(format!("{}\n", runs[0].len()));
        let part = part("d.md", "t", &["r"], make);
        for (name, has_problem, text) in [("a FAILED", true, "one\ntwo\n"), ("a", false, "1\n")] {
            let tests = tests(&[name]);
            let problem = part.compare(&folder, |_| Some(&tests), true);
            assert_eq!(problem.is_some(), has_problem);
            assert_eq!(fs::read_to_string(&file).expect("read"), marked(text));
        }
    }

    #[test]
    fn interleavings_are_those_that_were_run() {
        let ran = tests(&[
            "models::b | model a free; mode UNMAPS; threads 3, 3 preemptions; interleavings 20379",
            "models::a | model a free; mode UNMAPS; threads 2, all; interleavings 1216312",
            "can_fail::x | noticed NoWait: a; noticed NoPutRwsem: b",
            "world::x",
        ]);
        assert_eq!(
            body(interleavings(&[&ran])),
            "| a free | 2, all | UNMAPS | 1,216,312 |\n| a free | 3, 3 preemptions | UNMAPS | 20,379 |\n\n\
             Locks and rules that `can_fail.rs` takes away, each noticed by a model: 2.\n"
        );
        // A model without an `interleavings` note is an error.
        assert!(interleavings(&[&tests(&["models::a FAILED | model a free"])]).is_err());
    }

    #[test]
    fn rows_are_those_that_tests_wrote() {
        let rows = |notes: &str| {
            let tests = tests(&[&format!("src::a | {notes}"), "src::b | search | x 7 |"]);
            rows(&[&tests], &["a", "b"], "search", "")
        };
        assert_eq!(
            rows("search | 1024 of 20 MiB | 1068 | 1.04 |; other | 1 |").expect("rows"),
            "| 1,024 of 20 MiB | 1,068 | 1.04 |\n| x 7 |\n"
        );
        assert!(rows("").is_err());
        assert!(super::rows(&[&[]], &["a"], "search", "").is_err());
    }

    /// Checks that `make test` has every run that a part needs, and that every part has its place
    /// in a document.
    #[test]
    fn parts_are_compared() {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for part in PARTS {
            assert!(!part.runs.is_empty());
            for name in part.runs {
                let is_done = |run: &&crate::suite::Run| run.name == *name && !run.only_in_full;
                assert_eq!(every_run().iter().filter(is_done).count(), 1, "{name}");
            }
            let document = fs::read_to_string(repo.join(part.file)).expect(part.file);
            assert!(split(&document, part.name).is_ok(), "{}", part.name);
        }
    }

    #[test]
    fn a_part_needs_all_its_runs() {
        let make = |_: &[&[Test]]| Err(anyhow!("made"));
        let part = part("no/such.md", "t", &["a", "b"], make);
        let some = tests(&["x"]);
        let is_made = |b: Option<&[Test]>| {
            let of = |name: &str| if name == "a" { Some(&some[..]) } else { b };
            part.compare(Path::new("/"), of, false)
                .is_some_and(|problem| problem == "no/such.md: t: made")
        };
        assert!(is_made(Some(&some)) && !is_made(None) && !is_made(Some(&[])));
    }

    #[test]
    fn paragraphs_are_wrapped() {
        for indent in ["", "  "] {
            let mut text = String::new();
            wrapped(&mut text, &"word ".repeat(30), indent);
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!(lines.len(), 2);
            assert!(lines.iter().all(|line| line.chars().count() <= 120));
            assert!(lines[1].starts_with(&format!("{indent}word")));
        }
    }
}
