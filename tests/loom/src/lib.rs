// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The revocable mode of the kernel module under loom, which runs a model once for every order in
//! which its threads can take locks and touch atomics.
//!
//! What runs are the module's files themselves: `src/revocable.rs`, `src/callback_pin.rs`, and what they use. Around
//! them stand the two neighbours, with their own locking: `tests/fakes`, on loom's primitives.
//!
//! - `models`: the tests. Each prints which threads it has and how many interleavings it ran; `docs/verification.md`
//!   is made from that.
//! - `can_fail`: each property is seen to fail when a lock or a rule is taken away.

#![cfg(test)]
// Of the module's files as of these: what is `unsafe` in the module stands elsewhere.
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
