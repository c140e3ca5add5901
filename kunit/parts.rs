// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the parts that call neither nvidia.ko nor ib_core: the arithmetic as kbuild compiles
//! it, and the code that uses the kernel's own types.

use kernel::error::to_result;

use crate::{
    device::{
        Gpus,
        PciAddress,
        Reach, //
    },
    dma::BarMapping,
    module::{
        LoadedModule,
        ModuleRef, //
    },
    params,
    pci::{
        bar_of_page,
        ends_bar,
        gpu_address,
        recall,
        remember,
        BarFinder, //
    },
    phys::{
        PhysRanges,
        Reader, //
    },
    ranges::{
        AddrRange,
        PageSize,
        SgEntry,
        SgLayout,
        Span, //
    },
    reason::Reason,
    setup::*,
    sg::SgTable,
    sync::{
        Lock,
        Monitor, //
    }, //
};

/// Returns the range of one of nvidia.ko's pages.
fn page(addr: u64) -> AddrRange {
    AddrRange { addr, len: KIB_64 }
}

/// Returns the GPU whose BAR contains a page.
fn gpu_of(page: &AddrRange) -> Gpus {
    bar_of_page(page).map_or(Gpus::default(), |bar| bar.gpu)
}

/// Returns the reason why the finder refuses these ranges.
fn refused(ranges: &[AddrRange]) -> Option<Reason> {
    let mut bars = BarFinder::default();
    ranges.iter().find_map(|range| bars.lookup(*range).err())
}

/// Reads the pages at these addresses.
fn read(reader: &mut Reader<'_, '_>, addrs: &[u64]) -> Result<(), Reason> {
    reader.batches(|reader, from| Ok(reader.pages(addrs, from, |addr| *addr, PageSize::KIB_64)))
}

fn not_found(addr: u64, len: u64) -> Option<Reason> {
    refused(&[AddrRange { addr, len }])
}

/// Builds a table with `count` entries.
fn table(count: u64) -> Result<SgTable, Reason> {
    let (table, ()) = SgTable::build(|table| {
        for addr in 0..count {
            table.push(SgEntry { addr, len: 1 });
        }
        Ok(())
    })?;
    Ok(table)
}

suite!(
    mod peermem_parts;

    fn a_span_covers_whole_pages(_: NoClient) {
        let span = Span::covering(0x1_ffff, 2, PageSize::KIB_64, 1 << 40);
        same!(span.map(|s| (s.start(), s.len())), Ok((0x1_0000, 0x2_0000)));
        let wraps = Span::covering(u64::MAX, 1, PageSize::KIB_64, 1 << 40);
        same!(wraps.err(), Some(Reason::Wraps));
    }

    fn contiguous_memory_is_one_entry_for_each_two_gib(_: NoClient) {
        for (gib, want) in rows([(1u64, 1), (4, 2), (80, 40)]) {
            let (mut layout, mut count) = (SgLayout::new(VA, PageSize::KIB_64, 1 << 31), 0);
            let len = gib << 30;
            layout.range(AddrRange { addr: 0, len }, |_| {
                count += 1;
                true
            });
            check!(layout.finish().is_some());
            same!(count + 1, want);
        }
    }

    fn an_empty_table_is_refused(_: NoClient) {
        check!(table(0).is_err());
    }

    /// `sg_alloc_table()` leaves counts in the table if it fails half way.
    fn a_table_that_could_not_be_allocated_is_not_looked_at(_: NoClient) {
        // The first three allocations are for the chunks. The fourth allocation is for the last
        // chunk at its exact length.
        for nth in rows(1..=4) {
            fail(Call::SgAlloc, nth, 1, ENOMEM.to_errno())?;
            same!(table(THREE_CHUNKS).err(), Some(Reason::NoMemory));
        }
        let entries = table(THREE_CHUNKS).map(|table| u64::from(table.entries()));
        same!(entries, Ok(THREE_CHUNKS));
        // The function that adds the entries may fail, too.
        for count in rows([0, 1, 200]) {
            let table = SgTable::build(|table| -> Result<(), Reason> {
                for addr in 0..count {
                    table.push(SgEntry { addr, len: 1 });
                }
                Err(Reason::Revoked)
            });
            same!(table.err(), Some(Reason::Revoked));
        }
    }

    fn only_a_pci_device_is_one(_: NoClient) {
        check!(Device::NULL.as_pci().is_none());
        check!(plain_device().as_pci().is_none());
        fake_nic_max_segment(0x1234_0000);
        let device = nic().as_pci();
        same!(device.as_ref().map(|d| d.max_segment()), Some(0x1234_0000));
        // The clone takes one more reference, and this test drops both references.
        drop(device.clone());
    }

    fn only_a_memory_bar_that_has_addresses_is_a_bar(_: NoClient) {
        same!(not_found(BAR, KIB_64), None);
        same!(not_found(BAR, BAR_LEN), None);
        same!(not_found(BAR + BAR_LEN - KIB_64, KIB_64), None);
        for (addr, len) in rows([
            (BAR - 1, KIB_64),
            (BAR, BAR_LEN + 1),
            (BAR + BAR_LEN - KIB_64, KIB_64 + 1),
            (BAR + BAR_LEN, 1),
            (BAR, u64::MAX),
            (u64::MAX, 1),
            (0, 1),
            (IO, KIB_64),
            (UNASSIGNED, KIB_64),
        ]) {
            same!(not_found(addr, len), Some(Reason::NotInBar));
        }
        // The finder refuses an address with a `struct page` that is not peer-to-peer DMA memory.
        same!(not_found(RAM, KIB_64), Some(Reason::HasStructPages));
    }

    /// nvidia-uvm creates such a BAR on hosts that are set up for GPUDirect Storage.
    fn a_bar_may_be_peer_to_peer_dma_memory(_: NoClient) {
        /// `enum memory_type`.
        const PRIVATE: i32 = 1;
        const P2PDMA: i32 = 5;
        const REMOVED: i32 = 0;
        const MIB_2: u64 = 2 << 20;
        let found = |addr| not_found(addr, 2 * MIB_2).is_none();
        for (start, len, kind, want) in rows([
            (BAR, BAR_LEN, P2PDMA, true),
            (BAR + MIB_2, MIB_2, P2PDMA, true),
            // The pagemap belongs to another BAR, or extends beyond this one.
            (BAR, BAR_LEN + MIB_2, P2PDMA, false),
            (BAR - MIB_2, 2 * MIB_2, P2PDMA, false),
            (BAR, BAR_LEN, REMOVED, false),
            (BAR + MIB_2, MIB_2, REMOVED, false),
        ]) {
            fake_pages(start, len, kind);
            same!((found(BAR), fake_pagemap_refs()), (want, 0));
        }
        for kind in rows(PRIVATE..P2PDMA) {
            fake_pages(BAR, BAR_LEN, kind);
            check!(!found(BAR));
            same!(gpu_of(&page(BAR)), Gpus::default());
        }
        fake_pages(BAR, BAR_LEN, P2PDMA);
        same!(gpu_of(&page(BAR)), Gpus::one(0));
        same!(fake_pagemap_refs(), 0);
    }

    /// The finder reuses the BAR that it has found only for addresses inside that BAR.
    fn what_is_remembered_is_still_looked_at(_: NoClient) {
        let (good, far) = (page(BAR), page(BAR + (8 << 30)));
        for (ranges, want) in rows([
            (&[good, far, page(BAR + KIB_64)][..], None),
            (&[good, page(BAR + BAR_LEN)], Some(Reason::NotInBar)),
            (&[good, page(RAM)], Some(Reason::HasStructPages)),
            (&[page(RAM), good], Some(Reason::HasStructPages)),
            // The first failure determines the reason.
            (&[page(RAM), page(IO)], Some(Reason::HasStructPages)),
            (&[page(IO), page(RAM)], Some(Reason::NotInBar)),
            (
                &[page(BAR + BAR_LEN - KIB_64), page(BAR + BAR_LEN)],
                Some(Reason::NotInBar),
            ),
        ]) {
            same!(refused(ranges), want);
        }
    }

    fn a_bounding_range_has_all_of_it_and_lies_in_one_bar(_: NoClient) {
        let bounds = |ranges: &[AddrRange]| {
            let mut bars = BarFinder::default();
            ranges.iter().try_for_each(|range| bars.lookup(*range))?;
            Ok::<_, Reason>(bars.bounds())
        };
        let high = BAR + (9 << 30);
        for ranges in rows([
            &[page(high), page(BAR + 3 * KIB_64)][..],
            &[page(BAR + 3 * KIB_64), page(high)],
            &[page(BAR), page(high), page(BAR + BAR_LEN - KIB_64)],
        ]) {
            let found = bounds(ranges).ok().flatten().ok_or(EINVAL)?;
            check!(ranges.iter().all(|range| found.contains(range)));
            check!(AddrRange {
                addr: BAR,
                len: BAR_LEN
            }
            .contains(&found));
        }
        same!(bounds(&[page(BAR), page(SECOND)]), Ok(None));
        same!(bounds(&[page(BAR), page(SECOND), page(BAR)]), Ok(None));
    }

    /// The reader joins memory on both sides of the boundary between two BARs into one range.
    fn bars_side_by_side_are_two(_: NoClient) {
        let (last, two) = (THIRD - KIB_64, 2 * KIB_64);
        same!(not_found(last, two), None);
        same!(
            not_found(THIRD + KIB_64 - (32 << 20), 32 << 20),
            Some(Reason::NotInBar)
        );
        let memory = PhysRanges::read(VA, |reader| {
            read(reader, &[last])?;
            read(reader, &[THIRD])
        });
        let (memory, gpus) = memory.map_err(|_| EINVAL)?;
        same!(gpus, Gpus::one(0));
        same!(memory.bounds, None);
        same!(memory.len(), two);
        same!(memory.table.entries(), 1);
    }

    /// Each finder reuses the results of earlier finders, and thus of earlier registrations.
    fn the_owner_of_a_bar_is_looked_for_once(_: NoClient) {
        let find = |addr| {
            let before = fake_pci_steps();
            (not_found(addr, KIB_64), fake_pci_steps() - before)
        };
        // The search passes the NIC and finds the GPU.
        same!(find(BAR), (None, 2));
        same!(fake_remembered(), 1);
        for page in 0..4 {
            same!(find(BAR + page * KIB_64), (None, 0));
        }
        // For an address outside of the GPU's BARs, the finder searches all devices.
        same!(find(BAR + BAR_LEN), (Some(Reason::NotInBar), 3));
        same!(find(BAR + 9 * KIB_64), (None, 0));
        same!(fake_remembered(), 1);
        // The search runs once for all pages that lie in no BAR, because each further search would
        // go through all devices too.
        let (before, nowhere) = (fake_pci_steps(), [BAR + BAR_LEN; 100]);
        let refused = PhysRanges::read(VA, |reader| read(reader, &nowhere));
        same!(refused.err(), Some(Reason::NotInBar));
        same!(fake_pci_steps() - before, 3);
    }

    fn a_device_that_was_pulled_out_is_not_found_by_what_was_remembered(_: NoClient) {
        same!(not_found(BAR, KIB_64), None);
        fake_gpu_leaves();
        same!(not_found(BAR, KIB_64), Some(Reason::NotInBar));
        same!(gpu_of(&page(BAR)), Gpus::default());
    }

    fn a_gpu_that_comes_back_is_another_device_of_the_same_number(_: NoClient) {
        to_result(fake_more_gpus(1))?;
        let (gpu, nic) = (gpu_of(&page(BAR)), nic().as_pci().ok_or(ENODEV)?);
        same!(gpu_of(&page(MORE)), Gpus::one(1));
        remember(gpu, &nic, Reach::Denied);
        same!(fake_remembered(), 3);
        to_result(fake_gpu_is_replaced())?;
        same!(recall(gpu, &nic), None);
        // The module keeps no reference to a removed device.
        same!(gpu_of(&page(BAR)), gpu);
        same!(fake_remembered(), 2);
        same!(recall(gpu, &nic), None);
        remember(gpu, &nic, Reach::AsOurs);
        same!(recall(gpu, &nic), Some(Reach::AsOurs));
        fake_gpu_leaves();
        same!(gpu_of(&page(BAR)), Gpus::default());
        same!(fake_remembered(), 1);
        same!(gpu_of(&page(MORE)), Gpus::one(1));
    }

    /// 64 GPUs have a number. The module searches for each additional GPU every time, and remembers
    /// nothing about such a GPU.
    fn each_of_64_gpus_is_looked_for_once(_: NoClient) {
        to_result(fake_more_gpus(Gpus::MOST + 2))?;
        let nic = nic().as_pci().ok_or(ENODEV)?;
        let find = |number: u32| {
            let bar = MORE + u64::from(number) * SMALL_LEN;
            let before = fake_pci_steps();
            same!(not_found(bar, KIB_64), None);
            let steps = fake_pci_steps() - before;
            (gpu_of(&page(bar)), steps)
        };
        // The search passes the NIC, the GPU with the large BAR, and the GPUs before this one.
        for number in 0..Gpus::MOST {
            same!(find(number), (Gpus::one(number), number + 3));
            remember(Gpus::one(number), &nic, Reach::AsOurs);
        }
        same!(fake_remembered(), 2 * Gpus::MOST);
        for number in 0..Gpus::MOST {
            same!(find(number), (Gpus::one(number), 0));
            same!(recall(Gpus::one(number), &nic), Some(Reach::AsOurs));
        }
        for number in rows([Gpus::MOST, Gpus::MOST + 1, Gpus::MOST]) {
            same!(find(number), (Gpus::default(), number + 3));
            remember(Gpus::default(), &nic, Reach::Denied);
            same!(recall(Gpus::default(), &nic), None);
        }
        same!(fake_remembered(), 2 * Gpus::MOST);
        same!(find(0), (Gpus::one(0), 0));
    }

    fn what_is_remembered_of_two_devices_goes_with_either(_: NoClient) {
        let (first, gpu) = (nic().as_pci().ok_or(ENODEV)?, gpu_of(&page(BAR)));
        same!(recall(gpu, &first), None);
        for answer in rows([Reach::AsOurs, Reach::Otherwise, Reach::Denied]) {
            remember(gpu, &first, answer);
            same!(recall(gpu, &first), Some(answer));
            same!(fake_remembered(), 2);
        }
        to_result(fake_nic_is_replaced())?;
        let second = nic().as_pci().ok_or(ENODEV)?;
        same!(recall(gpu, &second), None);
        // The new answer takes the place of the removed NIC's answer.
        remember(gpu, &second, Reach::Otherwise);
        same!(recall(gpu, &second), Some(Reach::Otherwise));
        same!(fake_remembered(), 2);
        fake_gpu_leaves();
        same!(recall(gpu, &second), None);
        remember(gpu, &second, Reach::Denied);
        same!(recall(gpu, &second), None);
    }

    fn a_bar_ends_with_its_last_page(_: NoClient) {
        for (addr, want) in rows([
            (BAR, false),
            (BAR + BAR_LEN - 2 * KIB_64, false),
            (BAR + BAR_LEN - KIB_64, true),
            // Another BAR begins directly behind this page.
            (THIRD - KIB_64, true),
            (IO, true),
        ]) {
            same!(ends_bar(&page(addr)), want);
        }
    }

    fn a_gpu_has_the_number_and_the_address_of_its_device(_: NoClient) {
        same!(gpu_of(&page(BAR)), Gpus::one(0));
        // The fakes define this address: domain 3, bus 0x81, device 2, function 1.
        same!(gpu_address(0), Some(PciAddress(3 << 16 | 0x8111)));
        same!(gpu_address(1), None);
        let mut finder = BarFinder::default();
        same!(finder.gpus(), Gpus::default());
        same!(finder.lookup(page(BAR)), Ok(()));
        same!(finder.gpus(), Gpus::one(0));
        // The finder does not search the PCI devices for memory with struct pages.
        let before = fake_pci_steps();
        same!(gpu_of(&page(RAM)), Gpus::default());
        same!(fake_pci_steps(), before);
    }

    fn a_mapping_that_fails_half_way_leaves_nothing_mapped(_: NoClient) {
        let device = nic().as_pci().ok_or(ENODEV)?;
        let pages = [0, 2, 4].map(|number| BAR + number * KIB_64);
        let map = || {
            let (memory, gpus) = PhysRanges::read(VA, |reader| read(reader, &pages))?;
            same!(gpus, Gpus::one(0));
            BarMapping::map(&device, memory, VA, PageSize::KIB_64)
        };
        for guard_is in rows([Guard::Ops, Guard::Translates]) {
            guard(guard_is);
            for nth in 1..=3 {
                if guard_is == Guard::Translates {
                    fail(Call::IovaLink, nth, 1, ENOMEM.to_errno())?;
                }
                fail(Call::BarMap, nth, 1, ENOMEM.to_errno())?;
                let mapped = u64::from(nth - 1) * KIB_64;
                same!(map().err(), Some(Reason::MapResource { mapped }));
                nothing_mapped();
            }
        }
        guard(Guard::Ops);
        same!(map().map(|(_, table)| table.entries()), Ok(3));
    }

    fn locks_guard_and_monitors_wait_no_longer_than_they_must(_: NoClient) {
        let lock = KBox::pin_init(Lock::new(1), GFP_KERNEL)?;
        lock.with(|n| *n += 1);
        same!(lock.with(|n| *n), 2);
        let monitor = KBox::pin_init(Monitor::new(false), GFP_KERNEL)?;
        monitor.with(|done| *done = true);
        monitor.wait_while(|done| !*done);
        monitor.notify_all();
    }

    fn a_hold_keeps_the_module_until_it_is_dropped(_: NoClient) {
        let hold = ModuleRef::try_new();
        check!(hold.is_some());
        same!(holds(), 1);
        drop(hold);
        same!(holds(), 0);
        with(|world| world.going = true);
        check!(ModuleRef::try_new().is_none());
    }

    /// The data of a loaded module disappears when that module is unloaded.
    fn a_neighbour_that_goes_is_not_looked_at(_: NoClient) {
        let look = || LoadedModule::find(c"nvidia_peermem_kunit");
        check!(look().is_some_and(|found| found.version() == params::version()));
        same!(holds(), 0);
        with(|world| world.going = true);
        check!(look().is_none());
        check!(LoadedModule::find(c"none of that name").is_none());
    }
);
