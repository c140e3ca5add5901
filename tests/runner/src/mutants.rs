// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Builds our module, or the library for `LD_PRELOAD`, with one rule removed, and runs the tests that
//! must notice. Each patch in `tests/mutants` removes one rule.
//!
//! A test that passes proves little if nobody has seen it fail. The tests that a patch names must
//! pass on the unchanged module. On the patched module, these tests must fail in the way that the
//! patch declares.

mod host;
mod kept;
mod machine;
mod rule;
mod seen;

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{bail, ensure, Result};
use clap::Args;

use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::duration;
use crate::results::{Test, Verdict};
use crate::setup;
use crate::toolchain::Toolchain;
use crate::vm::Build;

use self::kept::Kept;
use self::machine::{Job, Machines};
use self::rule::{all, Check, Mutant, Place};
pub(crate) use self::rule::{find, fit};

/// Note of a test that was not run, because nothing that it depends on has changed since it passed.
pub(crate) const UNCHANGED: &str = "unchanged";

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Runs only mutants whose name or test contains one of these words
    words: Vec<String>,
    /// Uses the portable build; runs only mutants of C files and of Rust files that wrap C, and only tests in VMs
    #[arg(long)]
    portable: bool,
}

fn tell(test: &Test, started: Instant) {
    let word = match test.verdict {
        Verdict::Passed => "seen  ",
        _ => "FAILED",
    };
    println!(
        "      {word} {} ({})",
        test.name,
        duration(started.elapsed())
    );
    for line in test.notes.iter().flat_map(|note| note.lines()) {
        println!("             {line}");
    }
}

/// Runs one test on the unchanged sources and on the mutant. Returns the signs that showed the
/// mutant.
fn on_host(
    paths: &Paths,
    toolchain: &Toolchain,
    mutant: &Mutant,
    check: &Check,
) -> Result<Vec<String>> {
    let Place::Host { package, release } = &check.place else {
        bail!("{} runs in a VM, not on this machine", check.test);
    };
    let run = |patches| {
        let programs = {
            let _lock = Lock::take(paths, "packages")?;
            host::programs(paths, toolchain, patches, package, *release)?
        };
        host::run(&programs, &check.test)
    };
    run(mutant.base())?.passed(&check.test)?;
    let seen = run(&mutant.patches)?;
    check
        .signs
        .iter()
        .map(|sign| seen.shows(&check.test, sign))
        .collect()
}

/// Returns the mutants whose name or test contains one of `words`, or all if there are none.
///
/// For the portable build, returns only mutants of C files and of Rust files that wrap C, with
/// their tests in VMs. The builds differ only in these files.
fn chosen(paths: &Paths, words: &[String], build: Build) -> Result<Vec<Mutant>> {
    let mut mutants = all(paths)?;
    for mutant in &mut mutants {
        if build == Build::Portable {
            let is_border = mutant.is_for_portable(&paths.repo)?;
            let in_machine = |check: &Check| matches!(check.place, Place::Vm { .. });
            mutant.checks.retain(|check| is_border && in_machine(check));
        }
        let name = mutant.name.clone();
        let chosen = |check: &Check| words.iter().any(|word| check.label(&name).contains(word));
        mutant
            .checks
            .retain(|check| words.is_empty() || chosen(check));
    }
    mutants.retain(|mutant| !mutant.checks.is_empty());
    ensure!(
        !mutants.is_empty(),
        "no name of a mutant or test contains these words"
    );
    Ok(mutants)
}

/// Runs the tests of all mutants that `words` select. Each test of each mutant is one result.
///
/// Unless `fresh` is set, a test that passed with the same sources, patch and case is not run. The
/// only note of such a test is [`UNCHANGED`]. Kernels, modules and programs must already be built.
pub(crate) fn tests(
    paths: &Paths,
    words: &[String],
    fresh: bool,
    build: Build,
) -> Result<Vec<Test>> {
    let toolchain = Toolchain::find(paths)?;
    let mutants = chosen(paths, words, build)?;
    let mut kept = Kept::new(paths, &toolchain, build)?;
    // Each entry has the hash of the test's inputs, and a result as soon as one is known.
    let mut all = Vec::new();
    for mutant in &mutants {
        for check in &mutant.checks {
            let key = kept.key(mutant, check)?;
            let name = check.label(&mutant.name);
            let unchanged = !fresh && kept.has(&name, &key);
            let result = unchanged.then(|| Test::of(name.clone(), Ok(vec![UNCHANGED.to_owned()])));
            all.push((mutant, check, name, key, result));
        }
    }
    let left = all.iter().filter(|one| one.4.is_some()).count();
    if left > 0 {
        println!(
            "      {left} of {} tests noticed their mutant before and have the same inputs, and are not run",
            all.len()
        );
    }
    let (mut on_hosts, mut in_machines) = (Vec::new(), Vec::new());
    for (number, (mutant, check, _, _, result)) in all.iter().enumerate() {
        match check.place {
            _ if result.is_some() => {}
            Place::Host { .. } => on_hosts.push((number, *mutant, *check)),
            Place::Kunit { .. } | Place::Vm { .. } => in_machines.push(Job {
                number,
                mutant,
                check,
            }),
        }
    }
    let found: Mutex<Vec<(usize, Test)>> = Mutex::new(Vec::new());
    let add = |number: usize, started: Instant, result| {
        let Some((_, _, name, key, _)) = all.get(number) else {
            return;
        };
        let test = Test::of(name.clone(), result);
        if test.verdict == Verdict::Passed {
            kept.add(name, key);
        }
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        tell(&test, started);
        found.push((number, test));
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            for (number, mutant, check) in on_hosts {
                let started = Instant::now();
                let result = on_host(paths, &toolchain, mutant, check);
                add(number, started, result);
            }
        });
        let mut started = Instant::now();
        Machines::new(paths, build).run(in_machines, |number, result| {
            add(number, started, result);
            started = Instant::now();
        });
    });
    let mut results: Vec<(usize, Test)> = all
        .into_iter()
        .enumerate()
        .filter_map(|(number, one)| Some((number, one.4?)))
        .collect();
    results.extend(found.into_inner().unwrap_or_else(PoisonError::into_inner));
    results.sort_by_key(|(number, _)| *number);
    Ok(results.into_iter().map(|(_, test)| test).collect())
}

pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    let build = match selection.portable {
        true => Build::Portable,
        false => Build::InTree,
    };
    let mutants = chosen(paths, &selection.words, build)?;
    let mut kernels = vec![crate::kernel::DEFAULT.to_owned()];
    for check in mutants.iter().flat_map(|mutant| &mutant.checks) {
        kernels.extend(machine::kernel(check)?);
    }
    kernels.sort_unstable();
    kernels.dedup();
    setup::all(paths, kernels.iter().map(String::as_str))?;
    let started = Instant::now();
    let results = tests(paths, &selection.words, true, build)?;
    let failed = results
        .iter()
        .filter(|test| test.verdict != Verdict::Passed)
        .count();
    println!(
        "{} seen, {failed} failed ({})",
        results.len() - failed,
        duration(started.elapsed())
    );
    Ok(i32::from(failed > 0))
}
