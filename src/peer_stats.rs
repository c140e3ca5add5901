// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What ib_core counts of each peer-memory client, counted by the client: for kernels on which ib_core
//! shows it to nobody.
//!
//! Everything is counted when ib_core counts it, and as it does, with three exceptions. ib_core has
//! cleared a table by the time it adds its entries to `num_dereg_pages`, so that it adds 0: here they
//! are counted. A registration that was revoked by a client that unmaps by itself is over at its
//! `release`, which follows the moment that ib_core counts: no other call tells the client. And one
//! that is revoked between its unmapping and its `release` ib_core counts as deregistered twice.

use kernel::sync::atomic::{
    Atomic,
    Full,
    Relaxed, //
};

/// The numbers of one client, since the module was loaded. As `struct peermem_stats` of
/// `memory_peers.h`, which reads them without a lock.
#[repr(C)]
pub(crate) struct PeerStats {
    /// Registrations that were mapped.
    pub(crate) alloc_mrs: Atomic<u64>,
    /// Of these, how many are not any more: deregistered or revoked.
    pub(crate) dealloc_mrs: Atomic<u64>,
    /// Entries of their scatter lists, whatever their size: `num_reg_pages` means these.
    pub(crate) reg_pages: Atomic<u64>,
    /// Of these, how many belonged to registrations that are over.
    pub(crate) dereg_pages: Atomic<u64>,
    /// Bytes that applications asked for.
    pub(crate) reg_bytes: Atomic<u64>,
    /// Of these, how many belonged to registrations that are over.
    pub(crate) dereg_bytes: Atomic<u64>,
    /// How often ib_core was told to revoke.
    pub(crate) free_callbacks: Atomic<u64>,
}

impl PeerStats {
    pub(crate) const fn new() -> Self {
        PeerStats {
            alloc_mrs: Atomic::new(0),
            dealloc_mrs: Atomic::new(0),
            reg_pages: Atomic::new(0),
            dereg_pages: Atomic::new(0),
            reg_bytes: Atomic::new(0),
            dereg_bytes: Atomic::new(0),
            free_callbacks: Atomic::new(0),
        }
    }
}

/// One registration's part in the [`PeerStats`] of its client.
///
/// Whatever order its events come in, and on whichever threads, each is counted once.
pub(crate) struct MrStats {
    of: &'static PeerStats,
    bytes: u64,
    entries: Atomic<u64>,
    state: Atomic<u32>,
}

/// Not mapped, or not any more.
const UNMAPPED: u32 = 0;
const MAPPED: u32 = 1;
/// Revoked, and ib_core does not count it as mapped. It is over when ib_core says so.
const REVOKED: u32 = 2;

impl MrStats {
    /// A registration of so many bytes.
    pub(crate) fn new(of: &'static PeerStats, bytes: u64) -> Self {
        MrStats {
            of,
            bytes,
            entries: Atomic::new(0),
            state: Atomic::new(UNMAPPED),
        }
    }

    /// It has a table with so many entries.
    pub(crate) fn mapped(&self, entries: u64) {
        self.entries.store(entries, Relaxed);
        self.state.xchg(MAPPED, Full);
        self.of.alloc_mrs.add(1, Relaxed);
        self.of.reg_pages.add(entries, Relaxed);
        self.of.reg_bytes.add(self.bytes, Relaxed);
    }

    /// ib_core is about to be told to revoke it.
    pub(crate) fn revoking(&self) {
        self.of.free_callbacks.add(1, Relaxed);
    }

    /// ib_core has revoked it, if it was there to be revoked.
    pub(crate) fn revoked(&self) {
        if self.state.cmpxchg(MAPPED, REVOKED, Full).is_ok() {
            self.of.dealloc_mrs.add(1, Relaxed);
        }
    }

    /// It is over, if it ever was mapped. May be said again.
    pub(crate) fn unmapped(&self) {
        let was = self.state.xchg(UNMAPPED, Full);
        if was == MAPPED {
            self.of.dealloc_mrs.add(1, Relaxed);
        }
        if was != UNMAPPED {
            self.of.dereg_pages.add(self.entries.load(Relaxed), Relaxed);
            self.of.dereg_bytes.add(self.bytes, Relaxed);
        }
    }
}
