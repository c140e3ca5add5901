// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The revocable mode of the kernel module under loom, which runs a model once for every order in
//! which its threads can take locks and access atomics.
//!
//! The code under test is the module's own files: `src/revocable.rs`, `src/callback_pin.rs`, and
//! the files that they use. `tests/fakes` has models of nvidia.ko and ib_core with their own
//! locking, on loom's primitives.
//!
//! - `models`: the tests. Each prints its threads and the number of interleavings that it ran.
//!   `docs/verification.md` is generated from these lines.
//! - `can_fail`: disables one lock or rule at a time, and checks that a model then fails.

#![cfg(test)]
// This also covers the module's files that are compiled here. The module keeps its `unsafe` code in
// other files.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "the models use a part of each file")]

#[path = "../../fakes/mod.rs"]
mod fakes;
#[path = "../../fakes/src.rs"]
mod src;
use src::*;

mod can_fail;
mod models;
mod sync;
