// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of registrations that span several allocations, in persistent and in revocable mode. The
//! search for the borders of the allocations has its own tests, beside the code in `src/chunks`.

use std::sync::Arc;

use crate::fakes::env::{Held, PciDevice, Ticket, IOMMU_OFFSET};
use crate::fakes::provider::{Allocation, DMA_BASE};
use crate::fakes::world::World;
use crate::mr::Mr;
use crate::persistent::PersistentMr;
use crate::ranges::{AddrRange, PageSize};
use crate::reason::{Reason, EINVAL, ENOMEM};
use crate::revocable::RevocableMr;

const MIB: u64 = 1 << 20;

/// Creates a world with adjacent allocations of these lengths in MiB. A length of 0 stands for 2
/// MiB without an allocation. Also returns the total length in bytes.
fn world(start: u64, mib: &[u64]) -> (Arc<World>, u64) {
    let world = World::at(start);
    let mut at = start;
    for &mib in mib {
        let len = mib.max(2) * MIB;
        if mib > 0 {
            let mut layout = world.provider.layout.borrow_mut();
            layout.push(Allocation::new(at, len));
        }
        at += len;
    }
    (world, at - start)
}

fn count(log: &[&str], what: &str) -> usize {
    log.iter().filter(|&&w| w == what).count()
}

/// Checks that the first entry is at the start of the range, that the entries follow each other,
/// and that no byte is missing or present twice.
fn check_entries(entries: &[AddrRange], offset: u64, lengths: &[u64]) {
    assert_eq!(entries.len(), lengths.len());
    let mut at = offset;
    for (number, (entry, len)) in entries.iter().zip(lengths).enumerate() {
        let memory = entry.addr % IOMMU_OFFSET - DMA_BASE;
        assert_eq!(memory, ((number as u64) << 36) + at, "entry {number}");
        assert_eq!(entry.len, *len, "entry {number}");
        at += len;
    }
}

#[test]
fn persistent_over_several() {
    let start = 0x30_0000_0000;
    let (world, len) = world(start, &[2, 20, 6]);
    let region = Held::<PersistentMr>::pin(start + 64 * 1024, len - 128 * 1024).expect("pinned");
    let table = region.map(&PciDevice::default()).expect("mapped");
    let edge = 64 * 1024;
    check_entries(&table, edge, &[2 * MIB - edge, 20 * MIB, 6 * MIB - edge]);
    let log = world.take_log();
    assert_eq!(count(&log, "map"), 1);
    region.unmap();
    assert_eq!(world.take_log(), ["unmap"]);
    drop(region);
    assert_eq!(world.take_log(), ["unpin", "unpin", "unpin", "table freed"]);
}

#[test]
fn a_failed_map_of_one_chunk_undoes_the_others() {
    let start = 0x31_0000_0000;
    let (world, len) = world(start, &[2, 2, 2]);
    world.provider_maps.set(true);
    let region = Held::<PersistentMr>::pin(start, len).expect("pinned");
    world.take_log();
    world.fail_map.set(Some(3));
    assert_eq!(
        region.map(&PciDevice::default()).err(),
        Some(Reason::Map(-5))
    );
    let (maps, unmaps) = ("provider maps", "provider unmaps");
    assert_eq!(world.take_log(), [maps, maps, maps, unmaps, unmaps]);
    region.map(&PciDevice::default()).expect("mapped");
    drop(region);
}

#[test]
fn the_smallest_page_is_that_of_the_region() {
    let (start, half) = (0x32_0000_0000, 2 * MIB);
    for (place, pages) in [
        [PageSize::KIB_64, PageSize::KIB_128],
        [PageSize::KIB_128, PageSize::KIB_64],
    ]
    .into_iter()
    .enumerate()
    {
        let start = start + place as u64 * 0x1000_0000;
        let (world, len) = world(start, &[2, 2]);
        for (allocation, page) in world.provider.layout.borrow_mut().iter_mut().zip(pages) {
            allocation.page = page;
        }
        let region = Held::<PersistentMr>::pin(start, len).expect("pinned");
        assert_eq!(region.fixed().page_size(), PageSize::KIB_64);
        let table = region.map(&PciDevice::default()).expect("mapped");
        check_entries(&table, 0, &[half, half]);
        let mr = Held::<RevocableMr>::pin(start, len).expect("pinned");
        assert_eq!(mr.fixed().page_size(), PageSize::KIB_64);
        mr.set_ticket(Ticket::default()).expect("admitted");
        let table = mr.map(&PciDevice::default()).expect("mapped");
        check_entries(&table, 0, &[half, half]);
    }
}

/// Makes each call to nvidia.ko fail in turn, and then sets a limit for the number of pins that is
/// too low. No pin is left in either mode.
#[test]
fn all_or_nothing_in_both_modes() {
    let start = 0x33_0000_0000;
    let (world, len) = world(start, &[4, 4, 2, 8, 2]);
    drop(Held::<PersistentMr>::pin(start, len).expect("pinned"));
    let calls = world.provider.calls.take();
    drop(Held::<RevocableMr>::pin(start, len).expect("pinned"));
    assert_eq!(world.provider.calls.get(), calls, "both modes search alike");
    let left = |refused: Option<Reason>, revoked: Option<Reason>, want: Reason| {
        assert_eq!((refused, revoked), (Some(want), Some(want)));
        let log = world.take_log();
        assert_eq!(world.provider.live(), 0);
        count(&log, "unpin")
    };
    for call in 1..=calls {
        let attempt = |pin: &dyn Fn() -> Option<Reason>| {
            world.provider.calls.set(0);
            world.provider.fail_call.set(Some((call, ENOMEM)));
            let reason = pin();
            assert_eq!(world.provider.calls.get(), call, "no call after a refusal");
            reason
        };
        let persistent = attempt(&|| Held::<PersistentMr>::pin(start, len).err());
        let revocable = attempt(&|| Held::<RevocableMr>::pin(start, len).err());
        left(persistent, revocable, Reason::Pin(ENOMEM));
    }
    world.provider.fail_call.set(None);
    world.max_chunks.set(Some(3));
    let unpins = left(
        Held::<PersistentMr>::pin(start, len).err(),
        Held::<RevocableMr>::pin(start, len).err(),
        Reason::TooManyChunks { limit: 3 },
    );
    assert!(unpins >= 6, "three pins of each were undone");
    world.max_chunks.set(Some(1));
    left(
        Held::<PersistentMr>::pin(start, len).err(),
        Held::<RevocableMr>::pin(start, len).err(),
        Reason::Pin(EINVAL),
    );
}

/// Repeats the registration, each time with the signal during another call to pin. The last call is
/// left out, because the search for the boundaries of the allocations ends with it.
#[test]
fn a_fatal_signal_ends_the_search_in_both_modes() {
    let start = 0x37_0000_0000;
    let (world, len) = world(start, &[4, 4, 2, 8, 2]);
    drop(Held::<PersistentMr>::pin(start, len).expect("pinned"));
    let calls = world.provider.calls.get();
    for call in 1..calls {
        let attempt = |pin: &dyn Fn() -> Option<Reason>| {
            world.provider.calls.set(0);
            world.killed_after.set(Some(call - 1));
            let reason = pin();
            world.killed_after.set(None);
            assert!(
                world.provider.calls.get() == call,
                "the search goes on for a process that was killed"
            );
            assert_eq!(reason, Some(Reason::Killed));
            assert_eq!(world.provider.live(), 0);
        };
        attempt(&|| Held::<PersistentMr>::pin(start, len).err());
        attempt(&|| Held::<RevocableMr>::pin(start, len).err());
    }
}

/// Frees each allocation, and each pair of adjacent allocations, during each call to pin. The call
/// has not returned, so the callback comes for a region that is still being pinned.
#[test]
fn a_callback_at_each_place_of_the_search() {
    let start = 0x34_0000_0000;
    let layout = [2, 2, 6, 2];
    let (world, len) = world(start, &layout);
    drop(Held::<RevocableMr>::pin(start, len).expect("pinned"));
    let calls = world.provider.calls.get();
    let whole = world.provider.layout.borrow().clone();
    let mut revoked = 0;
    for call in 1..=calls {
        for gone in 0..whole.len() {
            for last in gone..(gone + 2).min(whole.len()) {
                world.provider.layout.replace(whole.clone());
                world.provider.calls.set(0);
                world.take_log();
                let (from, to) = (whole[gone].start, whole[last].start + 1);
                let hook = move |world: &World| world.provider.free_part(from, to);
                let hook = (call, Box::new(hook) as _);
                world.provider.on_call.set(Some(hook));
                let found = Held::<RevocableMr>::pin(start, len);
                let came = count(&world.take_log(), "callback") > 0;
                let done = world.provider.calls.get();
                world.provider.on_call.set(None);
                match found {
                    Err(Reason::Revoked) => {
                        assert!(came, "call {call}");
                        assert_eq!(done, call, "the search goes on without a part");
                        revoked += 1;
                    }
                    // The allocation was freed before the module pinned it, or nvidia.ko refused
                    // the call during which it was to be freed.
                    Err(Reason::Hole { .. } | Reason::Pin(EINVAL)) => assert!(!came),
                    Ok(mr) => {
                        assert!(!came);
                        drop(mr);
                    }
                    Err(reason) => panic!("{reason:?}"),
                }
                assert_eq!(world.provider.live(), 0, "call {call}, {gone} to {last}");
            }
        }
    }
    println!("{revoked} callbacks revoked the region");
    assert!(revoked > 10);
}

/// The loss of any allocation stops the HCA and unmaps the whole region once. The other allocations
/// stay pinned until `release`.
#[test]
fn the_loss_of_an_allocation_revokes_the_whole_region() {
    for gone in 0..3 {
        let start = 0x35_0000_0000 + gone as u64 * 0x1000_0000;
        let (world, len) = world(start, &[2, 4, 2]);
        let mr = Held::<RevocableMr>::pin(start, len).expect("pinned");
        mr.set_ticket(Ticket::default()).expect("admitted");
        let table = mr.map(&PciDevice::default()).expect("mapped");
        check_entries(&table, 0, &[2 * MIB, 4 * MIB, 2 * MIB]);
        world.take_log();
        let lost = world.provider.layout.borrow()[gone];
        world.provider.free_part(lost.start, lost.start + 1);
        let revocation = ["ib_core revokes", "ib_core revoked", "unmap"];
        let want = [&["callback"][..], &revocation, &["callback returns"]].concat();
        assert_eq!(world.take_log(), want);
        assert_eq!(world.provider.live(), 2);
        // The callback of another allocation finds nothing to do.
        let next = world.provider.layout.borrow()[0];
        world.provider.free_part(next.start, next.start + 1);
        assert_eq!(world.take_log(), ["callback", "callback returns"]);
        assert_eq!(mr.map(&PciDevice::default()).err(), Some(Reason::Revoked));
        drop(mr);
        let log = world.take_log();
        assert_eq!((count(&log, "unpin"), count(&log, "no unpin")), (1, 2));
        assert_eq!(log.last(), Some(&"table freed"));
        assert_eq!(world.provider.live(), 0);
    }
}
