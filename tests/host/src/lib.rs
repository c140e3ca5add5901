// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The part of the kernel module that uses `core` alone, compiled by cargo: the very files. Around them stand
//! fakes: `env` has them by the names that the module uses.
//!
//! - `account_tests`: the limit on what one user may have pinned.
//! - `extents_tests`: the arithmetic, exhaustively at small sizes and at random at real ones, for kernels
//!   with pages of 4, 16 and 64 KiB.
//! - `pieces_tests`: ranges over several allocations: the search, exhaustively and at random, and both flavours.
//! - `pin_tests`: a revocable pin, between its release and the provider's callback.
//! - `refusal_tests`, `record_tests`: the reasons, and how they are kept and written.
//! - `roll_tests`: which registrations are shown as alive, from which moment to which.
//! - `persistent_tests`, `revocable_tests`: both flavours of a registration on fakes of their
//!   neighbours.

#![cfg(test)]
// Of the module's files as of these: what is `unsafe` in the module stands elsewhere.
#![forbid(unsafe_code)]

#[path = "../../../src/account.rs"]
mod account;
#[path = "../../../src/device.rs"]
mod device;
#[path = "../../../src/extents.rs"]
mod extents;
#[path = "../../../src/mode.rs"]
mod mode;
#[path = "../../../src/pieces.rs"]
mod pieces;
#[path = "../../../src/pin.rs"]
mod pin;
#[path = "../../../src/record.rs"]
mod record;
#[path = "../../../src/refusal.rs"]
#[allow(dead_code, reason = "nothing is logged here")]
mod refusal;
#[path = "../../../src/region.rs"]
mod region;
#[path = "../../../src/registry.rs"]
mod registry;
#[path = "../../../src/revocable.rs"]
mod revocable;

/// The same, of what stands above the pins.
mod revocable_pin {
    pub(crate) use crate::fakes::FakeRevocablePin as RevocablePin;
}

mod account_tests;
mod core_trim;
mod env;
mod extents_tests;
mod fakes;
mod persistent_tests;
mod pieces_tests;
mod pin_tests;
mod provider;
mod record_tests;
mod refusal_tests;
mod revocable_tests;
mod roll_tests;

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;

/// At the end of each case of a test at random: says how many there were, with the last one. The rig reads the line.
fn done(count: &AtomicU32, cases: u32) {
    if count.fetch_add(1, Ordering::Relaxed) + 1 == cases {
        println!("figure: cases {cases} at random");
    }
}
