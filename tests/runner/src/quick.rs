// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `runner quick`: checks for use while editing. No VM is booted.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{anyhow, bail, Context as _, Result};

use crate::lint::{self, CLIPPY_HOST, SAME_OBJECT};
use crate::paths::Paths;
use crate::progress::{duration, output};
use crate::results::{Format, Reader, Verdict};
use crate::{cost, mutants, setup};

/// A check. Returns a message if it passes.
struct Step {
    name: &'static str,
    run: fn(&Paths) -> Result<String>,
}

/// Rows run in parallel. The steps of a row run one after the other. All steps of cargo are in one
/// row, because cargo runs one command at a time.
const LANES: &[&[Step]] = &[
    &[
        Step {
            name: "host tests",
            run: host_tests,
        },
        Step {
            name: "clippy of what changed, on the host",
            run: |paths| lint_changed(paths, |name| name == CLIPPY_HOST),
        },
    ],
    &[
        Step {
            name: "mutants",
            run: mutants::fit,
        },
        Step {
            name: "the module for 7.3",
            run: |paths| setup::module(paths).map(|()| "compiled".to_owned()),
        },
        Step {
            name: "instructions of a registration",
            run: instructions,
        },
        Step {
            name: "lint of what changed",
            run: |paths| lint_changed(paths, |name| ![CLIPPY_HOST, SAME_OBJECT].contains(&name)),
        },
    ],
];

fn instructions(paths: &Paths) -> Result<String> {
    let tests = cost::in_tree_tests(paths)?;
    let failed: Vec<String> = tests
        .iter()
        .filter(|test| test.verdict != Verdict::Passed)
        .map(|test| format!("{}: {}", test.name, test.notes.join("; ")))
        .collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(format!("{} registrations", tests.len()))
}

fn host_tests(paths: &Paths) -> Result<String> {
    let result = setup::tools(paths)?
        .cargo(paths)
        .args(["test", "--locked", "-p", "peermem-host"])
        .current_dir(&paths.repo)
        .stdin(Stdio::null())
        .output()
        .context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&result.stdout);
    let mut reader = Reader::new(Format::Cargo);
    for line in text.lines() {
        reader.line(line);
    }
    let (tests, problems) = reader.finish();
    if !result.status.success() {
        bail!("{text}{}", String::from_utf8_lossy(&result.stderr));
    }
    if let Some(problem) = problems.first() {
        bail!("{problem}");
    }
    Ok(format!("{} passed", tests.len()))
}

/// Returns the files that differ from the commit that this work started from: the merge base with
/// upstream if there is an upstream, or else the last commit.
fn changed(paths: &Paths) -> Result<Vec<String>> {
    let git = |words: &[&str]| output(Command::new("git").args(words).current_dir(&paths.repo));
    let base = git(&["merge-base", "HEAD", "@{upstream}"]).unwrap_or_else(|_| "HEAD".to_owned());
    let names = [
        git(&["diff", "--name-only", "--no-renames", &base])?,
        git(&["ls-files", "--others", "--exclude-standard"])?,
    ];
    Ok(names
        .iter()
        .flat_map(|names| names.lines())
        .map(str::to_owned)
        .collect())
}

fn lint_changed(paths: &Paths, wanted: fn(&str) -> bool) -> Result<String> {
    let changed = changed(paths)?;
    let count = changed.len();
    let failed: Vec<String> = lint::run(paths, Some(changed), wanted)?
        .into_iter()
        .filter(|test| test.verdict == Verdict::Failed)
        .map(|test| format!("{}: {}", test.name, test.notes.join("\n")))
        .collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(format!("{count} files changed"))
}

/// Runs all steps. The last line is "quick: ok" or the number of failures.
pub(crate) fn run(paths: &Paths) -> Result<i32> {
    let began = Instant::now();
    let lane = |steps: &[Step]| {
        let mut failed = 0;
        for step in steps {
            let started = Instant::now();
            let (mark, said) = match (step.run)(paths) {
                Ok(said) => ("", said),
                Err(error) => ("FAILED: ", format!("{error:#}")),
            };
            failed += usize::from(!mark.is_empty());
            let took = duration(started.elapsed());
            println!("{} ({took}): {mark}{}", step.name, said.trim_end());
        }
        failed
    };
    let failed = thread::scope(|scope| {
        let lanes: Vec<_> = LANES
            .iter()
            .map(|steps| scope.spawn(move || lane(steps)))
            .collect();
        lanes
            .into_iter()
            .map(|lane| lane.join().map_err(|_| anyhow!("a step panicked")))
            .sum::<Result<usize>>()
    })?;
    let took = duration(began.elapsed());
    if failed == 0 {
        println!("quick: ok, in {took}");
    } else {
        println!("quick: {failed} FAILED, in {took}");
    }
    Ok(i32::from(failed > 0))
}
