// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The table in `docs/last-passes.md` with the last pass of each run of the suite.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result};

use crate::history::History;
use crate::kept::LAST_PASSES_PAGE;
use crate::paths::Paths;
use crate::suite::{again, every_run};
use crate::{documents, kernel};

const NAME: &str = "last passes";

/// The page's rows: date and commit, by run.
type Rows = BTreeMap<String, [String; 2]>;

fn rows(document: &str) -> Rows {
    document
        .lines()
        .skip_while(|line| !line.starts_with(&format!("<!-- begin {NAME}")))
        .take_while(|line| !line.starts_with(&format!("<!-- end {NAME}")))
        .filter_map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            match cells[..] {
                [name, _, date, commit] if name != "run" && !name.starts_with('-') => {
                    Some((name.to_owned(), [date.to_owned(), commit.to_owned()]))
                }
                _ => None,
            }
        })
        .collect()
}

/// Returns every run of `make test-all`, and `true` if `make test` includes it.
fn runs() -> Vec<(String, bool)> {
    let others: Vec<_> = kernel::others().flat_map(again).collect();
    every_run()
        .iter()
        .chain(&others)
        .map(|run| (run.name.to_owned(), !run.only_in_full))
        .collect()
}

/// Returns the table, and a list of the runs that have not passed yet.
fn table(rows: &Rows) -> String {
    let mut text = String::from("| run | by | last pass | commit |\n|---|---|---|---|\n");
    let mut never = Vec::new();
    for (name, is_usual) in runs() {
        let by = if is_usual { "test" } else { "test-all" };
        match rows.get(&name) {
            Some([date, commit]) => {
                text.push_str(&format!("| {name} | `make {by}` | {date} | {commit} |\n"));
            }
            None => never.push(name),
        }
    }
    if !never.is_empty() {
        text.push_str("\nNever yet:\n");
        documents::wrapped(&mut text, &format!("{}.", never.join("; ")), "");
    }
    text
}

/// Writes the table. Each run has the last pass that this machine knows, or else the pass in the
/// page.
pub(super) fn write(paths: &Paths, history: &History) -> Result<()> {
    let page = paths.repo.join(LAST_PASSES_PAGE);
    let document = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
    let mut rows = rows(&document);
    for (name, _) in runs() {
        if let Some(when) = history
            .get(&name)
            .and_then(|record| record.last_pass.clone())
        {
            rows.insert(name, [when.date, when.commit]);
        }
    }
    documents::check(&page, NAME, &table(&rows), true)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Checks that each run has a row in the page, and that no other run has one.
    #[test]
    fn each_run_has_a_row() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(LAST_PASSES_PAGE);
        let document = fs::read_to_string(&page).unwrap();
        let problem = documents::check(&page, NAME, &table(&rows(&document)), false).unwrap();
        assert_eq!(problem, None, "run `make test-all TEST=--update-docs`");
    }

    #[test]
    fn rows_are_read_as_they_are_written() {
        let mut before = Rows::new();
        before.insert(
            "lint".to_owned(),
            ["2026-01-01".to_owned(), "abc+".to_owned()],
        );
        let text = format!(
            "| a | b |\n<!-- begin {NAME}: x -->\n{}<!-- end {NAME} -->\n| lint | c | d | e |\n",
            table(&before)
        );
        let after = rows(&text);
        assert_eq!(after.len(), 1);
        assert_eq!(after["lint"], before["lint"]);
        assert_eq!(table(&after), table(&before));
    }
}
