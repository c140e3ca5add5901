// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds the module's logic, for `tests/host` and for `tests/loom`: each has a `sync` with its locks.
//!
//! - `env`: the module's surroundings. `src/env.rs` has the kernel's, and says what each name stands for.
//! - `provider`: nvidia.ko as `tests/gpu/p2p.c` has it. The API lock; the callback made with it held; the
//!   table freed after the callback; puts by the value of a pointer, which comes round at once, and by
//!   process. Tests tell it where to fail.
//! - `ib_core`: ib_core as `tests/kernel/overlay/drivers/infiniband/core/peer_mem.c` has it. `mapping_lock`, tickets
//!   that come round, the writes to the scatter list before `dma_unmap`, the pointer that is cleared after
//!   `release`; both ways to invalidate, and a third one after OFED 4.9, which releases inside the callback.
//! - `world`: what belongs to all of them, and what must hold: everything that is allocated is a
//!   `Memory`, which panics when it is used after its end, or beside a use that it is not ordered with.

#![allow(dead_code, reason = "each of the two packages uses a part")]
#![allow(
    clippy::arc_with_non_send_sync,
    reason = "loom's threads are on one of the machine's"
)]

pub(crate) mod env;
pub(crate) mod ib_core;
pub(crate) mod provider;
pub(crate) mod world;
