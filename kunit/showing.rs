// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the data that others see about the clients: the counters of each client, and the
//! directory that shows the counters if ib_core does not.

use kernel::{
    str::{
        CStr,
        CString, //
    },
    sync::atomic::Relaxed, //
};

use crate::{
    clients::{
        Persistent,
        Revocable, //
    },
    device::{
        Gpus,
        PciAddress, //
    },
    entries::{
        self,
        Cursor, //
    },
    history::PinMode,
    ib::Client,
    memory_peers::MemoryPeers,
    params,
    peer_stats::PeerStats,
    ranges::PageSize,
    registry::{
        Registration,
        Registry,
        State, //
    },
    setup::*,
    task, //
};

const FIRST: &CStr = c"nv_mem";
const SECOND: &CStr = c"nv_mem_nc";
/// Names of the counters of [`PeerStats`], in their order.
const FILES: [&CStr; 7] = [
    c"num_alloc_mrs",
    c"num_dealloc_mrs",
    c"num_reg_pages",
    c"num_dereg_pages",
    c"num_reg_bytes",
    c"num_dereg_bytes",
    c"num_free_callbacks",
];
/// Length of most ranges, in bytes.
const BYTES: u64 = PAGES * KIB_64;

fn one() -> [(&'static CStr, &'static PeerStats); 1] {
    [(FIRST, Persistent::peer_stats())]
}

fn two() -> [(&'static CStr, &'static PeerStats); 2] {
    [
        (FIRST, Revocable::peer_stats()),
        (SECOND, Persistent::peer_stats()),
    ]
}

/// Returns the changes of the client's counters during `body`.
fn added(of: &PeerStats, body: impl FnOnce()) -> [u64; 7] {
    let numbers = || of.0.each_ref().map(|counter| counter.load(Relaxed));
    let before = numbers();
    body();
    let mut gain = numbers();
    for (gain, before) in gain.iter_mut().zip(before) {
        *gain -= before;
    }
    gain
}

/// Returns the only registration in the registry.
fn only() -> Result<Registration> {
    let registration = registry_from(0).ok_or(ENOENT)?;
    check!(registry_from(registration.number + 1).is_none());
    Ok(registration)
}

/// Returns the numbers of all registrations, in a reader's order.
fn standing() -> Result<KVec<u64>> {
    let mut all = KVec::new();
    let mut next = 0;
    while let Some(registration) = registry_from(next) {
        check!(registration.number >= next);
        next = registration.number + 1;
        all.push(registration.number, GFP_KERNEL)?;
    }
    Ok(all)
}

/// Registers one range `count` times. Each registration can be taken out once.
fn registered(count: u64) -> Result<KVec<Option<Umem>>> {
    let mut umems = KVec::new();
    for _ in 0..count {
        umems.push(get(range()).ok(), GFP_KERNEL)?;
    }
    Ok(umems)
}

fn release(umems: &mut KVec<Option<Umem>>, at: u64) -> Result {
    let umem = umems.get_mut(at as usize).and_then(Option::take);
    umem.ok_or(EIO)?.release();
    Ok(())
}

suite!(
    mod peermem_showing;

    // --- the directory ---------------------------------------------------------------------------

    fn it_is_there_from_show_to_drop_and_not_before(_: NoClient) {
        // The loop runs twice, as for a module that is loaded again.
        for _ in 0..2 {
            let peers = MemoryPeers::probe(FIRST)?;
            check!(!shows(None, None));
            let peers = peers.show(&one());
            check!(shows(Some(FIRST), Some(c"version")));
            for file in FILES {
                check!(shows(Some(FIRST), Some(file)));
            }
            check!(!shows(Some(SECOND), None));
            drop(peers);
            check!(!shows(None, None));
            logged![Shows, Hides];
        }
    }

    fn each_client_has_its_own_numbers_and_all_have_one_version(_: NoClient) {
        let peers = MemoryPeers::probe(FIRST)?.show(&two());
        let up = persistent(c"nv_mem")?;
        let umem = get(range())?;
        for (name, peer_stats) in two() {
            let version = read_shown(name, c"version")?;
            let (newline, version) = version.split_last().ok_or(EINVAL)?;
            same!(*newline, b'\n');
            check!(version == params::version().to_bytes());
            for (file, counter) in FILES.into_iter().zip(&peer_stats.0) {
                let want = CString::try_from_fmt(fmt!("{}\n", counter.load(Relaxed)))?;
                same!(&read_shown(name, file)?[..], want.to_bytes());
            }
        }
        umem.release();
        drop((up, peers));
    }

    fn that_of_ib_core_is_left_alone(_: NoClient) {
        let peers = MemoryPeers::probe(FIRST)?;
        // Simulates an ib_core that creates the directory when its first client registers.
        occupy(Some(FIRST));
        let peers = peers.show(&one());
        check!(shows(Some(FIRST), None) && !shows(Some(FIRST), Some(c"version")));
        drop(peers);
        check!(shows(Some(FIRST), None));
        logged![];
    }

    fn a_stranger_s_is_left_alone_though_it_lacks_a_client(_: NoClient) {
        for client in rows([None, Some(FIRST)]) {
            occupy(client);
            let peers = MemoryPeers::probe(FIRST)?.show(&two());
            check!(!shows(Some(SECOND), None));
            drop(peers);
            check!(shows(None, None));
            logged![];
        }
    }

    fn one_that_was_there_before_is_left_alone(_: NoClient) {
        occupy(Some(FIRST));
        drop(MemoryPeers::probe(FIRST)?.show(&one()));
        check!(shows(Some(FIRST), None));
        logged![];
    }

    fn the_parameter_turns_it_off(_: NoClient) {
        fake_sysfs_parameter(false);
        let peers = MemoryPeers::probe(FIRST)?.show(&one());
        check!(!shows(None, None));
        drop(peers);
        logged![];
    }

    fn without_sys_kernel_mm_there_is_none_and_no_harm(_: NoClient) {
        fake_sysfs_without_mm();
        drop(MemoryPeers::probe(FIRST)?.show(&one()));
        logged![];
    }

    fn what_could_not_be_made_whole_is_not_there_at_all(_: NoClient) {
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

    fn there_is_one_at_a_time(_: NoClient) {
        let peers = MemoryPeers::probe(FIRST)?.show(&one());
        same!(MemoryPeers::probe(FIRST).err(), Some(EBUSY));
        check!(shows(Some(FIRST), None));
        drop(peers);
        drop(MemoryPeers::probe(FIRST)?);
    }

    // --- the registry ----------------------------------------------------------------------------

    fn a_registration_is_in_the_registry_from_acquire_to_release(nic: EachNic) {
        let umem = get(nic.range())?;
        let registration = only()?;
        same!(registration.state, State::Mapped);
        same!(registration.entries, 1);
        // The fakes define this address: domain 3, bus 0x81, device 1, function 0.
        same!(registration.hca, Some(PciAddress(3 << 16 | 0x8108)));
        same!(registration.info.mode == PinMode::Revocable, nic.can_lose);
        same!(
            (registration.info.span.start(), registration.info.span.len()),
            (VA, BYTES)
        );
        same!(
            (registration.info.page, registration.info.chunks),
            (PageSize::KIB_64, 1)
        );
        same!(registration.info.gpus, Gpus::one(0));
        same!(registration.info.task, task::task());
        umem.stop();
        let registration = only()?;
        same!(registration.state, State::Pinned);
        same!((registration.entries, registration.hca), (0, None));
        umem.release();
        check!(registry_from(0).is_none());
    }

    fn many_are_met_in_their_order_and_leave_in_any(_: PersistentClient) {
        const COUNT: u64 = 64;
        let before = entries::registry(Registry::last);
        let mut umems = registered(COUNT)?;
        let all = standing()?;
        same!(all.len(), umems.len());
        for (at, number) in all.iter().enumerate() {
            same!(*number, before + 1 + at as u64);
        }
        // 37 and 64 have no common factor, so the loop releases each registration once. The
        // registration released last is neither the first nor the last of the registry.
        for step in 0..COUNT {
            let at = (step * 37 + 11) % COUNT;
            release(&mut umems, at)?;
            same!(standing()?.len() as u64, COUNT - 1 - step);
            let next = registry_from(before + 1 + at);
            check!(next.is_none_or(|registration| registration.number > before + 1 + at));
            // Registers and releases one more range, with a number above all others.
            get(range())?.release();
        }
    }

    /// One reader continues after the last registration that it read. Another starts again, and a
    /// third never continues.
    fn readers_go_on_where_they_were_whatever_goes_and_comes(_: NoClient) {
        const COUNT: u64 = 32;
        let up = persistent(c"nv_mem")?;
        let new = || KBox::pin_init(Cursor::new(), GFP_KERNEL);
        let (reader, other, idle) = (new()?, new()?, new()?);
        let first = entries::registry(Registry::last) + 1;
        check!(reader.find(0).is_none() && idle.find(0).is_none());
        let mut umems = registered(COUNT)?;
        let number = |found: Option<Registration>| found.map(|registration| registration.number);
        for at in 0..COUNT {
            let here = first + at;
            // A reader looks again if a line did not fit, when the registration may already be
            // gone.
            same!(number(reader.find(here)), Some(here));
            same!(number(reader.find(here)), Some(here));
            same!(number(other.find(0)), Some(here));
            release(&mut umems, at)?;
            let next = (at + 1 < COUNT).then_some(here + 1);
            same!(number(reader.find(here)), next);
            same!(number(registry_from(here)), next);
        }
        // A reader is at the end when another registration starts.
        let umem = get(range())?;
        let last = entries::registry(Registry::last);
        for cursor in rows([&idle, &other, &reader, &idle]) {
            same!(number(cursor.find(first)), Some(last));
            same!(number(cursor.find(last + 1)), None);
        }
        drop(reader);
        umem.release();
        check!(other.find(0).is_none() && idle.find(0).is_none());
        drop((up, idle));
    }

    fn who_was_revoked_is_in_the_registry_until_the_release(_: RevocableClient) {
        let umem = get(range())?;
        free_memory();
        let registration = only()?;
        same!(
            (registration.state, registration.entries),
            (State::Revoked, 1)
        );
        umem.release();
        check!(registry_from(0).is_none());
    }

    /// Another process releases the region, so nvidia.ko keeps the pin.
    fn who_is_orphaned_is_in_the_registry_until_the_memory_is_freed(_: RevocableClient) {
        let umem = get(range())?;
        Thread::start(move || umem.release())?.join();
        let registration = only()?;
        same!(
            (registration.state, registration.entries),
            (State::Orphaned, 0)
        );
        free_memory();
        check!(registry_from(0).is_none());
    }

    fn who_was_refused_was_never_in_the_registry(_: PersistentClient) {
        let before = entries::registry(|registry| (registry.last(), registry.counts()));
        fail(Call::PinPersistent, 1, 1, -12)?;
        check!(failure(range()).is_some());
        same!(
            entries::registry(|registry| (registry.last(), registry.counts())),
            before
        );
    }

    fn lives_are_counted(_: RevocableClient) {
        let counts =
            || entries::registry(|registry| registry.counts()[PinMode::Revocable as usize]);
        let before = counts();
        let umem = get(range())?;
        let now = counts();
        same!(
            (now.registered, now.mapped),
            (before.registered + 1, before.mapped + 1)
        );
        same!((now.active, now.active_bytes), (1, BYTES));
        free_memory();
        same!(counts().revoked, before.revoked + 1);
        umem.release();
        let now = counts();
        same!(now.released, before.released + 1);
        same!((now.active, now.active_bytes), (0, 0));
    }

    // --- the numbers -----------------------------------------------------------------------------

    fn a_registration_counts_when_it_is_mapped_and_when_it_ends(_: PersistentClient) {
        let of = Persistent::peer_stats();
        let mut umem = None;
        let gain = added(of, || umem = get(range()).ok());
        same!(gain, [1, 0, 1, 0, BYTES, 0, 0]);
        let umem = umem.ok_or(EIO)?;
        same!(added(of, || umem.release()), [0, 1, 0, 1, 0, BYTES, 0]);
    }

    /// Bytes count the requested length, and pages count entries of the table, as in ib_core.
    fn bytes_are_those_asked_for_and_pages_are_entries(_: RevocableClient) {
        lies(EVERY_OTHER);
        let mut request = range();
        request.addr += 10;
        request.len -= 20;
        let gain = added(Revocable::peer_stats(), || same!(failure(request), None));
        same!(gain, [1, 1, PAGES, PAGES, BYTES - 20, BYTES - 20, 0]);
    }

    fn a_registration_that_fails_counts_for_nothing(_: PersistentClient) {
        for call in rows([Call::PinPersistent, Call::BarMap, Call::SgAlloc]) {
            fail(call, 1, 1, -12)?;
            if call == Call::BarMap {
                // The module then asks nvidia.ko.
                fail_once(Call::Map, -12)?;
            }
            let of = Persistent::peer_stats();
            let gain = added(of, || check!(failure(range()).is_some()));
            same!(gain, [0; 7]);
        }
    }

    /// ib_core counts a region as ended when the region is revoked. ib_core counts the bytes when
    /// the application releases the region.
    fn a_revocation_counts_once_and_the_bytes_follow(_: RevocableClient) {
        let of = Revocable::peer_stats();
        let umem = get(range())?;
        same!(added(of, free_memory), [0, 1, 0, 0, 0, 0, 1]);
        same!(added(of, || umem.release()), [0, 0, 0, 1, 0, BYTES, 0]);
    }

    fn where_core_unmaps_all_of_it_counts_with_the_revocation(_: CoreUnmapsClient) {
        let of = Revocable::peer_stats();
        for form in rows([Form::Modern, Form::Ofed49]) {
            let mut request = range();
            request.form = form;
            let umem = get(request)?;
            same!(added(of, free_memory), [0, 1, 0, 1, 0, BYTES, 1]);
            if form == Form::Modern {
                same!(added(of, || umem.release()), [0; 7]);
            }
        }
    }
);
