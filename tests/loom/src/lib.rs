// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The revocable flavour of the kernel module under loom, which runs a model once for every order in
//! which its threads can take locks and touch atomics.
//!
//! What runs are the module's files themselves: `src/revocable.rs`, `src/pin.rs`, and what they use. Around
//! them stand the two neighbours, rewritten with loom's primitives and with their own locking:
//!
//! - `provider`: nvidia.ko as `tests/gpu/p2p.c` has it. The API lock; the callback made with it held; the
//!   table freed after the callback; puts by the value of a pointer, which comes round at once, and by
//!   process.
//! - `ib_core`: ib_core as `tests/kernel/overlay/drivers/infiniband/core/peer_mem.c` has it. `mapping_lock`, tickets
//!   that come round, the writes to the scatter list before `dma_unmap`, the pointer that is cleared after
//!   `release`; both ways to invalidate, and a third one after OFED 4.9, which releases inside the callback.
//! - `world`: what belongs to all of them, and what must hold: everything that is allocated is a
//!   `Memory`, which panics when it is used after its end, or beside a use that it is not ordered with.
//! - `env`: the module's surroundings.
//! - `models`: the tests. Each prints which threads it has and how many interleavings it ran; `docs/verification.md`
//!   is made from that.
//! - `can_fail`: each property is seen to fail when a lock or a rule is taken away.

#![cfg(test)]
// Of the module's files as of these: what is `unsafe` in the module stands elsewhere.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "the models use a part of each file")]

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

mod revocable_pin {
    pub(crate) use crate::env::RevocablePin;
}

mod can_fail;
mod env;
mod ib_core;
mod models;
mod provider;
mod world;
