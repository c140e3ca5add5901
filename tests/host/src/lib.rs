// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the module's files that use the kernel only through `src/env.rs`. Cargo compiles these
//! files unchanged. In place of the kernel, the files use the stand-ins of `tests/fakes`, with
//! locks of `std`.
//!
//! Tests of pure arithmetic are beside the code, in `src`. The tests here need the stand-ins:
//!
//! - `chunks_tests`: registrations that span several allocations, in both modes.
//! - `callback_pin_tests`: a revocable pin, with its release and nvidia.ko's callback in any order.
//! - `registry_tests`: the time during which the registry shows a registration.
//! - `persistent_tests`, `revocable_tests`: a registration from start to end, in both modes.
//!
//! `order_tests` compares the sources with the documented table of memory orders.

#![cfg(test)]
// This also covers the module's files that are compiled here. The module keeps its `unsafe` code in
// other files.
#![forbid(unsafe_code)]

#[path = "../../fakes/mod.rs"]
mod fakes;
#[path = "../../fakes/src.rs"]
mod src;
use src::*;

mod callback_pin_tests;
mod chunks_tests;
mod order_tests;
mod persistent_tests;
mod registry_tests;
mod revocable_tests;
mod sync;

use std::sync::atomic::{AtomicU32, Ordering};

/// Counts a finished case of a randomized test. After the last case, prints the number of cases in
/// a line that the test runner reads. `what` describes the cases.
fn done(count: &AtomicU32, cases: u32, what: &str) {
    if count.fetch_add(1, Ordering::Relaxed) + 1 == cases {
        println!("figure: cases | {what} | {cases} at random |");
    }
}
