// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cases, and their results in KTAP.

use std::fmt::Display;
use std::panic;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Error, Result};

use crate::counters::Counters;
use crate::lab::{Lab, Setup};
use crate::sys;

/// A test case: its group and name joined by a dot, and the function that runs the case on a
/// [`Lab`] or another type of bench.
pub(crate) struct Case<Bench: 'static = Lab> {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Bench) -> Result<()>,
}

/// Makes a table of cases. A row has a case's name, the condition under which it runs (if `Case`
/// has one), and its function.
macro_rules! cases {
    ($($name:literal => $run:expr),+ $(,)?) => {
        &[$(Case { name: $name, run: $run }),+]
    };
    ($($name:tt if $on:expr => $run:expr),+ $(,)?) => {
        &[$(Case { name: $name, on: $on, run: $run }),+]
    };
}
pub(crate) use cases;

/// Reason why a case does not apply here.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Skip(String);

/// Ends the case as skipped.
pub(crate) fn skip<T>(reason: impl Display) -> Result<T> {
    Err(Skip(reason.to_string()).into())
}

/// Prints a figure that the case measured.
pub(crate) fn note(name: &str, value: impl Display) {
    println!("# {name} {value}");
}

/// Checks that a number has the expected value.
pub(crate) fn same(what: &str, found: u64, expected: u64) -> Result<()> {
    ensure!(
        found == expected,
        "{what}: {found} where {expected} were expected"
    );
    Ok(())
}

/// Prints a figure that the case measured, and checks that it has the expected value.
pub(crate) fn expect(name: &str, found: u64, expected: u64) -> Result<()> {
    note(name, found);
    same(name, found, expected)
}

/// Time limit for the kernel to finish work after a descriptor is closed.
const SETTLE: Duration = Duration::from_secs(60);

/// Runs the cases one after another. Returns `true` if no case failed.
pub(crate) fn run(cases: &[&Case], setup: &Setup) -> Result<bool> {
    println!("KTAP version 1");
    println!("# seed {}", setup.seed);
    // Some test machines refuse every registration of GPU memory on purpose, so an error is only
    // noted.
    if let Err(error) = Lab::open(setup).and_then(|lab| lab.first_registrations()) {
        note("first_registrations", format_args!("{error:#}"));
    }
    let named = cases.iter().map(|case| (case.name, *case));
    Ok(tell(named, |case| run_one(case, setup)))
}

pub(crate) fn fail(error: &Error) {
    for line in format!("{error:#}").lines() {
        println!("# failure: {line}");
    }
}

/// Runs the cases whose name begins with a word of `filter`, or all cases if `filter` is empty.
/// Returns `true` if no case failed.
pub(crate) fn run_named<'a, T>(
    cases: impl Iterator<Item = (&'a str, T)>,
    filter: &[String],
    run: impl FnMut(T) -> Result<()>,
) -> Result<bool> {
    let is_chosen =
        |name: &str| filter.is_empty() || filter.iter().any(|word| name.starts_with(word));
    let chosen: Vec<_> = cases.filter(|(name, _)| is_chosen(name)).collect();
    ensure!(!chosen.is_empty(), "no case has such a name");
    println!("KTAP version 1");
    Ok(tell(chosen.into_iter(), run))
}

/// Runs each case, and prints its result after the header. Returns `true` if no case failed.
fn tell<'a, T>(
    cases: impl ExactSizeIterator<Item = (&'a str, T)>,
    mut run: impl FnMut(T) -> Result<()>,
) -> bool {
    println!("1..{}", cases.len());
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (index, (name, case)) in cases.enumerate() {
        let number = index + 1;
        let start = Instant::now();
        let result = run(case);
        let seconds = start.elapsed().as_secs_f64();
        note("seconds", format_args!("{seconds:.2}"));
        match result {
            Ok(()) => {
                println!("ok {number} {name}");
                passed += 1;
            }
            Err(error) => match error.downcast_ref::<Skip>() {
                Some(reason) => {
                    println!("ok {number} {name} # SKIP {reason}");
                    skipped += 1;
                }
                None => {
                    fail(&error);
                    for line in sys::kernel_log_tail(5) {
                        println!("# kernel: {line}");
                    }
                    println!("not ok {number} {name}");
                    failed += 1;
                }
            },
        }
    }
    println!("# Totals: pass:{passed} fail:{failed} skip:{skipped}");
    failed == 0
}

fn run_one(case: &Case, setup: &Setup) -> Result<()> {
    let before = Counters::read()?;
    // Destructors of the crate sideway contain assertions. A panic in a destructor fails the case,
    // but not the run.
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        let lab = Lab::open(setup)?;
        (case.run)(&lab)
    }))
    .unwrap_or_else(|_| Err(anyhow!("panicked")));
    // A leak is also reported if the case failed or was skipped, because the leak affects later
    // cases.
    match (result, check_rest(&before)) {
        (result, Ok(())) => result,
        (Ok(()), Err(leak)) => Err(leak),
        (Err(error), Err(leak)) => Err(anyhow!("{error:#}\nand {leak:#}")),
    }
}

/// Checks that a case has left nothing behind.
pub(crate) fn check_rest(before: &Counters) -> Result<()> {
    settled(|| Counters::read()?.leftovers(before))
}

/// Waits until `left` returns nothing. At the end of the time limit, fails with the last result of
/// `left`.
pub(crate) fn settled(mut left: impl FnMut() -> Result<Vec<String>>) -> Result<()> {
    let mut found = Vec::new();
    let clean = sys::wait_until(SETTLE, || {
        found = left()?;
        Ok(found.is_empty())
    })?;
    ensure!(clean, "left behind: {}", found.join(" "));
    Ok(())
}
