// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The part of the kernel module that uses `core` alone, compiled by cargo: the very files. Around them stand the fakes
//! of `tests/fakes`, on the machine's own locks.
//!
//! What is pure arithmetic has its tests beside it, in `src`; here are those of what needs the fakes:
//!
//! - `chunks_tests`: both modes over several allocations.
//! - `callback_pin_tests`: a revocable pin, between its release and the provider's callback.
//! - `registry_tests`: which registrations are shown as alive, from which moment to which.
//! - `persistent_tests`, `revocable_tests`: the life of a registration in both modes.
//!
//! `order_tests` compares the sources with the table of what their memory order relies on.

#![cfg(test)]
// Of the module's files as of these: what is `unsafe` in the module stands elsewhere.
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

/// At the end of each case of a test at random: says how many there were, with the last one. The test runner reads the line.
fn done(count: &AtomicU32, cases: u32) {
    if count.fetch_add(1, Ordering::Relaxed) + 1 == cases {
        println!("figure: cases {cases} at random");
    }
}
