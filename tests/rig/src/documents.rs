// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Parts of the documentation that are made from what the suite saw, so that they cannot say anything else.
//!
//! Such a part stands between two marks of its file. A run of the suite compares it; with `--update-docs` it writes it.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::anyhow;
use anyhow::Context as _;
use anyhow::Result;

use crate::results::Test;
use crate::results::Verdict;

/// The text between the marks of `name`, with what stands before and after it, marks included.
fn split<'a>(document: &'a str, name: &str) -> Result<[&'a str; 3]> {
    let begin = format!("<!-- begin {name}: made by `make test` -->\n");
    let end = format!("<!-- end {name} -->\n");
    let from = document.find(&begin).map(|at| at + begin.len());
    let to = document.find(&end);
    match (from, to) {
        (Some(from), Some(to)) if from <= to => {
            Ok([&document[..from], &document[from..to], &document[to..]])
        }
        _ => Err(anyhow!("no marks of {name}")),
    }
}

/// Compares the part `name` of `file` with `part`, or puts it there. Returns what is wrong.
pub(crate) fn check(file: &Path, name: &str, part: &str, update: bool) -> Result<Option<String>> {
    let document = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let [before, found, after] = split(&document, name).context(file.display().to_string())?;
    if found == part {
        return Ok(None);
    }
    if update {
        fs::write(file, [before, part, after].concat())?;
        println!("      {}: written anew", file.display());
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
        "{}: {name} is not what was seen (--update-docs writes it), first in line {}:\n    there: {there}\n    seen:  {seen}",
        file.display(),
        line + before.lines().count() + 1,
    )))
}

/// The runs of which `docs/bad-input.md` has a column each: our module's first, then NVIDIA's.
pub(crate) const BAD_INPUT_RUNS: [&str; 4] = [
    "verbs: ours",
    "verbs: ours, revocable",
    "verbs: NVIDIA's, persistent client",
    "verbs: NVIDIA's, callback client",
];

/// What all lines of the log about a refusal begin with.
const REFUSED: &str = "nvidia-peermem: refused ADDRESS+LENGTH of process PID in ";

fn noted<'a>(test: &'a Test, name: &str) -> Option<&'a str> {
    test.notes
        .iter()
        .find_map(|note| note.strip_prefix(name)?.strip_prefix(' '))
}

/// The table of bad input, and the log's lines below it, from the results of [`BAD_INPUT_RUNS`].
pub(crate) fn bad_input(runs: [&[Test]; 4]) -> Result<String> {
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
                    // Letters, for the lines of the log have numbers.
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

/// Where `word` stands in the list, at the end of which it is put if it does not.
fn place<'a>(list: &mut Vec<&'a str>, word: &'a str) -> usize {
    if let Some(at) = list.iter().position(|&known| known == word) {
        return at;
    }
    list.push(word);
    list.len() - 1
}

/// Appends a paragraph in lines of at most 120 columns; those after the first are indented.
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
    // Markdown's line break, where the paragraph has one.
    text.push_str(&paragraph[paragraph.trim_end().len()..]);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(name: &str, verdict: Verdict, notes: &[&str]) -> Test {
        Test {
            name: name.to_owned(),
            verdict,
            notes: notes.iter().map(|&note| note.to_owned()).collect(),
        }
    }

    #[test]
    fn a_table_of_bad_input() {
        let log = format!("log {REFUSED}acquire: why");
        let ours = |asked: &str| {
            vec![
                test("move.a", Verdict::Passed, &[]),
                test(
                    "input.a",
                    Verdict::Passed,
                    &["input freed", "application EFAULT", asked, &log],
                ),
            ]
        };
        let persistent = ours("provider 1 asked, 0 pinned, 0 unpinned");
        let revocable = ours("provider 2 asked, 0 pinned, 0 unpinned");
        let passed = ours("provider 1 asked, 0 pinned, 0 unpinned");
        let skipped = [test(
            "input.a",
            Verdict::Skipped("it would die".into()),
            &["input freed"],
        )];
        let text = bad_input([&persistent, &revocable, &passed, &skipped]).expect("a table");
        assert_eq!(
            text.lines().skip(2).collect::<Vec<_>>(),
            [
                "| freed | EFAULT | EFAULT | EFAULT | not run (a) | 1, 0; 2, 0 | 1 |",
                "",
                "1. acquire: why",
                "",
                "(a) it would die.  ",
            ]
        );
        let failed = [test("input.a", Verdict::Failed, &["input freed"])];
        assert!(bad_input([&persistent, &revocable, &passed, &failed]).is_err());
        assert!(bad_input([&persistent, &revocable, &passed, &[]]).is_err());
    }

    #[test]
    fn a_part_is_found_compared_and_written() {
        let directory = std::env::temp_dir().join(format!("rig-documents-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let file = directory.join("d.md");
        let marked = |part: &str| {
            format!("x\n<!-- begin t: made by `make test` -->\n{part}<!-- end t -->\ny\n")
        };
        fs::write(&file, marked("one\ntwo\n")).expect("written");
        let mut results = vec![
            check(&file, "t", "one\ntwo\n", false)
                .expect("marks")
                .is_none(),
            check(&file, "t", "one\nthree\n", false)
                .expect("marks")
                .is_some_and(|problem| problem.contains("line 4") && problem.contains("three")),
            check(&file, "u", "", false).is_err(),
            check(&file, "t", "three\n", true).expect("marks").is_none(),
        ];
        results.push(fs::read_to_string(&file).expect("read") == marked("three\n"));
        fs::remove_dir_all(&directory).expect("removed");
        assert_eq!(results, [true; 5]);
    }

    #[test]
    fn paragraphs_are_wrapped() {
        for indent in ["", "  "] {
            let mut text = String::new();
            wrapped(&mut text, &"word ".repeat(30), indent);
            assert_eq!(text.lines().count(), 2);
            assert!(text.lines().all(|line| line.chars().count() <= 120));
            assert!(text
                .lines()
                .nth(1)
                .is_some_and(|line| line.starts_with(&format!("{indent}word"))));
        }
    }
}
