// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! `/sys/kernel/mm/memory_peers`, where ib_core does not have it.
//!
//! C side: [`memory_peers.c`](memory_peers.c).

use core::{
    mem::offset_of,
    ptr, //
};

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

// `peermem_memory_peers_show()` reads one as the other.
const _: () = {
    assert!(size_of::<PeerStats>() == size_of::<c::peermem_stats>());
    assert!(offset_of!(PeerStats, alloc_mrs) == offset_of!(c::peermem_stats, alloc_mrs));
    assert!(offset_of!(PeerStats, dealloc_mrs) == offset_of!(c::peermem_stats, dealloc_mrs));
    assert!(offset_of!(PeerStats, reg_pages) == offset_of!(c::peermem_stats, reg_pages));
    assert!(offset_of!(PeerStats, dereg_pages) == offset_of!(c::peermem_stats, dereg_pages));
    assert!(offset_of!(PeerStats, reg_bytes) == offset_of!(c::peermem_stats, reg_bytes));
    assert!(offset_of!(PeerStats, dereg_bytes) == offset_of!(c::peermem_stats, dereg_bytes));
    assert!(offset_of!(PeerStats, free_callbacks) == offset_of!(c::peermem_stats, free_callbacks));
};

/// The directory `/sys/kernel/mm/memory_peers`, from the check whether ib_core has it. Nobody sees it
/// any more, and nobody is in it, after the drop.
///
/// # Invariants
///
/// There is one at a time.
pub(crate) struct MemoryPeers(());

impl MemoryPeers {
    /// To be called before ib_core knows the first client, whose name is `name`. `EBUSY` if there is
    /// one already.
    pub(crate) fn probe(name: &CStr) -> Result<Self> {
        if MEMORY_PEERS.xchg(true, Full) {
            return Err(EBUSY);
        }
        // INVARIANT: The exchange lets nobody by until the drop.
        let this = MemoryPeers(());
        // SAFETY: A string with its NUL, which is used during the call alone. No other of the functions
        // runs: they are called by the one value of this type.
        unsafe { c::peermem_memory_peers_probe(name.as_char_ptr()) };
        Ok(this)
    }

    /// Shows the clients, if ib_core does not. To be called when it knows all of them.
    pub(crate) fn show(self, clients: &[(&CStr, &'static PeerStats)]) -> Self {
        let mut peers = [c::peermem_peer::default(); c::PEERMEM_PEERS as usize];
        let mut count = 0;
        for (peer, (name, peer_stats)) in peers.iter_mut().zip(clients) {
            peer.name = name.as_char_ptr();
            peer.stats = ptr::from_ref(*peer_stats).cast();
            count += 1;
        }
        // SAFETY: The first `count` are filled in. The names are used during the call alone. The
        // statistics live as long as the module does, have the layout that C takes them for, and are
        // atomic. No other of the functions runs, as in `probe`.
        unsafe { c::peermem_memory_peers_show(peers.as_ptr(), count) };
        self
    }
}

impl Drop for MemoryPeers {
    fn drop(&mut self) {
        // SAFETY: No other of the functions runs, as in `probe`.
        unsafe { c::peermem_memory_peers_hide() };
        MEMORY_PEERS.store(false, Release);
    }
}

static MEMORY_PEERS: Atomic<bool> = Atomic::new(false);
