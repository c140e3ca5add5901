// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The part of the kernel module that uses `core` alone, compiled by cargo: the very files.
//!
//! - `extents_tests`: the arithmetic, exhaustively at small sizes and at random at real ones, for kernels
//!   with pages of 4, 16 and 64 KiB.
//! - `persistent_tests`, `revocable_tests`: both flavours of a registration on fakes of their
//!   neighbours.

#![cfg(test)]

#[path = "../../../src/extents.rs"]
mod extents;
#[path = "../../../src/refusal.rs"]
mod refusal;
#[path = "../../../src/region.rs"]
mod region;
#[path = "../../../src/revocable.rs"]
mod revocable;

mod core_trim;
mod extents_tests;
mod fakes;
mod persistent_tests;
mod refusal_tests;
mod revocable_tests;
