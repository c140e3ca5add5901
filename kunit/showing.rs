// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of `/sys/kernel/mm/memory_peers`. The module creates this directory for its clients if
//! ib_core does not.

use kernel::str::CStr;

use crate::{
    clients::{
        Persistent,
        Revocable, //
    },
    ib::Client,
    memory_peers::MemoryPeers,
    peer_stats::PeerStats,
    setup::*, //
};

const FIRST: &CStr = c"nv_mem";
const SECOND: &CStr = c"nv_mem_nc";

fn two() -> [(&'static CStr, &'static PeerStats); 2] {
    [
        (FIRST, Revocable::peer_stats()),
        (SECOND, Persistent::peer_stats()),
    ]
}

suite!(
    mod peermem_showing;

    fn the_directory_exists_from_show_to_drop_and_not_before() {
        // The second round simulates a module that is loaded again.
        for _ in 0..2 {
            let peers = MemoryPeers::probe(FIRST)?;
            check!(!shows(None, None));
            let peers = peers.show(&two()[..1]);
            check!(shows(Some(FIRST), Some(c"version")));
            check!(!shows(Some(SECOND), None));
            drop(peers);
            check!(!shows(None, None));
            logged![Shows, Hides];
        }
    }

    fn a_directory_of_ib_core_is_left_alone() {
        let peers = MemoryPeers::probe(FIRST)?;
        // Simulates an ib_core that creates the directory when its first client registers.
        occupy(Some(FIRST));
        let peers = peers.show(&two()[..1]);
        check!(shows(Some(FIRST), None) && !shows(Some(FIRST), Some(c"version")));
        drop(peers);
        check!(shows(Some(FIRST), None));
        logged![];
    }

    fn without_sys_kernel_mm_nothing_is_shown() {
        crate::fakes::fake_sysfs_without_mm();
        drop(MemoryPeers::probe(FIRST)?.show(&two()));
        logged![];
    }

    fn an_existing_directory_is_left_alone() {
        for (client, clients) in rows([
            // The directory of another module lacks a client.
            (None, &two()[..]),
            (Some(FIRST), &two()),
            (Some(FIRST), &two()[..1]),
        ]) {
            occupy(client);
            let peers = MemoryPeers::probe(FIRST)?.show(clients);
            check!(!shows(Some(SECOND), None));
            drop(peers);
            check!(shows(client, None));
            logged![];
        }
    }

    fn an_incomplete_directory_is_removed() {
        for (call, nth, want) in rows([
            (Call::Kobject, 1, &[][..]),
            (Call::Kobject, 2, &[Shows, Hides]),
            (Call::Kobject, 3, &[Shows, Hides]),
            (Call::Group, 1, &[Shows, Hides]),
            (Call::Group, 2, &[Shows, Hides]),
        ]) {
            fail(call, nth, 1, 0)?;
            let peers = MemoryPeers::probe(FIRST)?.show(&two());
            check!(!shows(None, None));
            drop(peers);
            same!(&log()[..], want);
        }
    }

    fn only_one_directory_is_shown_at_a_time() {
        let peers = MemoryPeers::probe(FIRST)?.show(&two()[..1]);
        same!(MemoryPeers::probe(FIRST).err(), Some(EBUSY));
        check!(shows(Some(FIRST), None));
        drop(peers);
        drop(MemoryPeers::probe(FIRST)?);
    }
);
