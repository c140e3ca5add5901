// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The statistics of each peer-memory client. ib_core keeps the same statistics, but does not show
//! them on some kernels.
//!
//! Everything is counted at the same time and in the same way as in ib_core, with three exceptions:
//!
//! - ib_core clears a table before it adds the table's number of entries to `num_dereg_pages`, and
//!   so adds 0. This file adds the actual number.
//! - After a revocation, a client that unmaps by itself counts the registration as deregistered in
//!   `release`. ib_core counts the registration earlier, but makes no call to the client at that
//!   time.
//! - ib_core counts a registration as deregistered twice if it is revoked between its unmapping and
//!   its `release`. This file counts it once.

use kernel::sync::atomic::{
    Atomic,
    Full,
    Relaxed, //
};

use crate::c;

/// A counter of a client, in the order of the files in `memory_peers.c`.
#[derive(Clone, Copy)]
enum Counter {
    /// Registrations that were mapped.
    AllocMrs,
    /// Mapped registrations that have since been deregistered or revoked.
    DeallocMrs,
    /// Scatter-list entries of the mapped registrations, of any size. ib_core's `num_reg_pages`
    /// counts the same entries.
    RegPages,
    /// Scatter-list entries of registrations that have ended.
    DeregPages,
    /// Bytes that applications requested, for the mapped registrations.
    RegBytes,
    /// Requested bytes of registrations that have ended.
    DeregBytes,
    /// Number of revocations that were requested from ib_core.
    FreeCallbacks,
}

const _: () = assert!(Counter::FreeCallbacks as usize + 1 == c::PEERMEM_COUNTERS as usize);

/// The counters of one client since the module was loaded, by [`Counter`]. C code reads the
/// counters without a lock.
#[repr(transparent)]
pub(crate) struct PeerStats(pub(crate) [Atomic<u64>; c::PEERMEM_COUNTERS as usize]);

impl PeerStats {
    pub(crate) const fn new() -> Self {
        PeerStats([const { Atomic::new(0) }; c::PEERMEM_COUNTERS as usize])
    }

    #[inline(always)]
    fn add(&self, counter: Counter, number: u64) {
        // CAST: The number of a counter is an index of the array.
        if let Some(counter) = self.0.get(counter as usize) {
            counter.add(number, Relaxed);
        }
    }
}

/// One registration's share of its client's [`PeerStats`].
///
/// Each event is counted once, in any order and on any thread.
pub(crate) struct MrStats {
    of: &'static PeerStats,
    bytes: u64,
    entries: Atomic<u64>,
    state: Atomic<u32>,
}

/// The registration is not mapped, or no longer mapped.
const UNMAPPED: u32 = 0;
const MAPPED: u32 = 1;
/// The registration was revoked, and ib_core does not count it as mapped. The registration ends
/// when ib_core unmaps or releases it.
const REVOKED: u32 = 2;

impl MrStats {
    /// Makes the statistics of a registration of `bytes` bytes.
    pub(crate) fn new(of: &'static PeerStats, bytes: u64) -> Self {
        MrStats {
            of,
            bytes,
            entries: Atomic::new(0),
            state: Atomic::new(UNMAPPED),
        }
    }

    /// Records that the registration is mapped, with a scatter list of `entries` entries.
    pub(crate) fn mapped(&self, entries: u64) {
        self.entries.store(entries, Relaxed);
        self.state.xchg(MAPPED, Full);
        self.of.add(Counter::AllocMrs, 1);
        self.of.add(Counter::RegPages, entries);
        self.of.add(Counter::RegBytes, self.bytes);
    }

    /// Records that this module is about to ask ib_core to revoke the registration.
    pub(crate) fn revoking(&self) {
        self.of.add(Counter::FreeCallbacks, 1);
    }

    /// Records that ib_core has revoked the registration, if it was mapped.
    pub(crate) fn revoked(&self) {
        if self.state.cmpxchg(MAPPED, REVOKED, Full).is_ok() {
            self.of.add(Counter::DeallocMrs, 1);
        }
    }

    /// Records the end of the registration, if it was ever mapped. A second call has no effect.
    pub(crate) fn unmapped(&self) {
        let was = self.state.xchg(UNMAPPED, Full);
        if was == MAPPED {
            self.of.add(Counter::DeallocMrs, 1);
        }
        if was != UNMAPPED {
            self.of.add(Counter::DeregPages, self.entries.load(Relaxed));
            self.of.add(Counter::DeregBytes, self.bytes);
        }
    }
}
