// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The directory `/sys/kernel/mm/memory_peers`, which this module makes if ib_core does not.
//!
//! C side: [`memory_peers.c`](memory_peers.c).

use core::ptr;

use kernel::{
    prelude::*,
    str::CStr,
    sync::atomic::{
        Atomic,
        Full,
        Release, //
    }, //
};

use crate::{
    c,
    peer_stats::PeerStats, //
};

// `peermem_memory_peers_show()` reads a `PeerStats` as an array of `u64`.
const _: () = assert!(size_of::<PeerStats>() == size_of::<u64>() * c::PEERMEM_COUNTERS as usize);

/// Owner of this module's directory `/sys/kernel/mm/memory_peers`. [`MemoryPeers::probe`] makes the
/// value, before the first client is registered with ib_core. After the drop, the directory is gone
/// and no thread runs its code.
///
/// # Invariants
///
/// At most one value of this type exists.
pub(crate) struct MemoryPeers(());

impl MemoryPeers {
    /// Checks whether sysfs already shows a client `name`. Must be called before the first client
    /// is registered with ib_core. `name` is the name of the first client. Returns `EBUSY` if
    /// another value of this type exists.
    pub(crate) fn probe(name: &CStr) -> Result<Self> {
        if MEMORY_PEERS.xchg(true, Full) {
            return Err(EBUSY);
        }
        // INVARIANT: The exchange succeeds only once before the drop.
        let this = MemoryPeers(());
        // SAFETY: The string is NUL-terminated, and used only during the call. No other function of
        // `memory_peers.c` runs, because only the single value of this type calls these functions.
        unsafe { c::peermem_memory_peers_probe(name.as_char_ptr()) };
        Ok(this)
    }

    /// Shows the clients, unless ib_core does. Must be called after all clients are registered.
    pub(crate) fn show(self, clients: &[(&CStr, &'static PeerStats)]) -> Self {
        let mut peers = [c::peermem_peer::default(); c::PEERMEM_PEERS as usize];
        let mut count = 0;
        for (peer, (name, peer_stats)) in peers.iter_mut().zip(clients) {
            peer.name = name.as_char_ptr();
            peer.counters = ptr::from_ref(*peer_stats).cast();
            count += 1;
        }
        // SAFETY: The first `count` peers are initialized. The names are used only during the call.
        // The statistics are atomic, live as long as the module, and have the layout that C
        // expects. No other function of `memory_peers.c` runs, for the reason given in `probe`.
        unsafe { c::peermem_memory_peers_show(peers.as_ptr(), count) };
        self
    }
}

impl Drop for MemoryPeers {
    fn drop(&mut self) {
        // SAFETY: No other function of `memory_peers.c` runs, for the reason given in `probe`.
        unsafe { c::peermem_memory_peers_hide() };
        MEMORY_PEERS.store(false, Release);
    }
}

static MEMORY_PEERS: Atomic<bool> = Atomic::new(false);
