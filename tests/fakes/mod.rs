// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Stand-ins for the kernel, nvidia.ko and ib_core, for the packages `tests/host` and `tests/loom`.
//! Each package has a `sync` module with its own locks.
//!
//! - `env`: the kernel services that the logic uses. `src/env.rs` has the kernel's versions and
//!   documents each name.
//! - `provider`: nvidia.ko, modelled after `tests/gpu/p2p.c`. The model holds the API lock during a
//!   callback, and frees the page table after the callback. A put finds a pin by its process and by
//!   the pointer to its page table. The model reuses the pointer of a freed table at once. Tests
//!   select the calls that fail.
//! - `ib_core`: ib_core, modelled after `tests/kernel/overlay/drivers/infiniband/core/peer_mem.c`.
//!   The model has `mapping_lock`, and reuses tickets. It writes to the scatter list before
//!   `dma_unmap`, and clears its pointer to the client after `release`. The model invalidates in
//!   one of three ways: the client unmaps, ib_core unmaps, or, as in OFED 4.9, ib_core unmaps and
//!   releases inside the callback.
//! - `world`: the shared state, and the properties that must hold. Every allocated object is a
//!   `Memory`, which panics if it is used after it was freed, or if no lock orders two of its uses.

#![allow(dead_code, reason = "each of the two packages uses a part")]
#![allow(
    clippy::arc_with_non_send_sync,
    reason = "loom runs all its threads on one thread of the host"
)]

pub(crate) mod env;
pub(crate) mod ib_core;
pub(crate) mod provider;
pub(crate) mod world;
