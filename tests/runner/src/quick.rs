// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `runner quick`: checks for use while editing. No VM is booted.

use std::thread;
use std::time::Instant;

use anyhow::{anyhow, bail, ensure, Result};

use crate::lint::{self, CLIPPY_HOST, SAME_OBJECT};
use crate::paths::Paths;
use crate::progress::duration;
use crate::results::{Format, Test, Verdict};
use crate::{cases, cost, git, mutants, setup};

/// A check: its name, and its function, which returns a message if it passes.
type Step = (&'static str, fn(&Paths) -> Result<String>);

/// Lists of steps. The lists run in parallel, and the steps of one list run one after the other.
/// All steps of cargo are in one list, because cargo runs one command at a time.
const LANES: &[&[Step]] = &[
    &[
        ("host tests", host_tests),
        // cargo itself checks only the packages that have changed.
        ("clippy, on the host", |paths| {
            lint_changed(paths, |name| name == CLIPPY_HOST)
        }),
    ],
    &[
        ("mutants", mutants::fit),
        ("the module for 7.3", |paths| {
            setup::module(paths).map(|()| "compiled".to_owned())
        }),
        ("instructions of a registration", instructions),
        ("lint of changed files", |paths| {
            lint_changed(paths, |name| ![CLIPPY_HOST, SAME_OBJECT].contains(&name))
        }),
    ],
];

fn all_passed(tests: &[Test]) -> Result<()> {
    let failed = tests.iter().filter(|test| test.verdict != Verdict::Passed);
    let failed: Vec<String> = failed
        .map(|test| format!("{}: {}", test.name, test.notes.join("\n")))
        .collect();
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

fn instructions(paths: &Paths) -> Result<String> {
    let tests = cost::in_tree_tests(paths)?;
    all_passed(&tests)?;
    Ok(format!("{} registrations", tests.len()))
}

fn host_tests(paths: &Paths) -> Result<String> {
    let toolchain = setup::tools(paths)?;
    let arguments = "test -p peermem-host";
    let (tests, problems) = cases::on_host(paths, &toolchain, Format::Cargo, arguments)?;
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(format!("{} passed", tests.len()))
}

/// Returns the files that differ from the commit that this work started from. This commit is the
/// merge base with upstream, or the last commit if there is no upstream.
fn changed(paths: &Paths) -> Result<Vec<String>> {
    let git = |words: &[&str]| git::git(&paths.repo, words);
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
    all_passed(&lint::run(paths, Some(changed), wanted)?)?;
    Ok(format!("{count} files changed"))
}

/// Runs all steps. The last line is "quick: ok" or the number of failures.
pub(crate) fn run(paths: &Paths) -> Result<i32> {
    let began = Instant::now();
    let lane = |steps: &[Step]| {
        let mut failed = 0;
        for (name, run) in steps {
            let started = Instant::now();
            let (mark, said) = match run(paths) {
                Ok(said) => ("", said),
                Err(error) => ("FAILED: ", format!("{error:#}")),
            };
            failed += usize::from(!mark.is_empty());
            let took = duration(started.elapsed());
            println!("{name} ({took}): {mark}{}", said.trim_end());
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
