// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of both modes from get_pages to put_pages: the scatter list that ib_core gets, and the
//! result of a step that fails.

use kernel::{
    error::to_result,
    page::PAGE_SIZE,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

use crate::{
    device::Gpus,
    ranges::{
        common_distance,
        SgEntry,
        MAX_STEP, //
    },
    reason::{
        ENOTSUPP,
        EOPNOTSUPP, //
    },
    setup::*, //
};

const GIB: u64 = 1 << 30;

suite!(
    mod peermem_mapping;

    fn the_calls_of_one_registration_in_order(nic: EachNic) {
        let umem =
            calls!(get(nic.range())? => Acquire, nic.pin, GetPages, DmaMap, nic.map, PageSize);
        calls!(umem.stop() => DmaUnmap, nic.unmap, PutPages);
        calls!(umem.release() => Release, nic.put);
    }

    fn a_range_for_reading_alone_is_no_other(nic: EachNic) {
        let mut request = nic.range();
        request.read_only = true;
        get(request)?.release();
    }

    fn entries_are_the_pages_at_their_dma_addresses(nic: EachNic) {
        // Each row of `want` is the number of the first page and the number of pages.
        for (layout, want) in rows([
            (CONTIGUOUS, &[(0, 6)][..]),
            // The layout has a gap after each two pages.
            (
                |page| BAR + (page + page / 2) * KIB_64,
                &[(0, 2), (3, 2), (6, 2)],
            ),
            (
                |page| BAR + (5 - page) * KIB_64,
                &[(5, 1), (4, 1), (3, 1), (2, 1), (1, 1), (0, 1)],
            ),
            // All entries are the same page.
            (|_| BAR + 9 * KIB_64, &[(9, 1); 6]),
        ]) {
            lies(layout);
            let umem = get(nic.pages(6))?;
            let want = want.iter().map(|(page, count)| SgEntry {
                addr: BAR + DMA_OFFSET + page * KIB_64,
                // CAST: The length is less than 4 GiB.
                len: (count * KIB_64) as u32,
            });
            check!(umem.entries().iter().copied().eq(want));
            umem.release();
        }
    }

    /// A list of more than 128 entries, which fill a page, is chained. The list has exactly as many
    /// allocated entries as used entries, because ib_core walks the allocated entries and counts
    /// the used ones.
    fn nents_is_orig_nents_and_what_dma_map_says(nic: EachNic) {
        lies(|page| BAR + (page + page / 3) * KIB_64);
        for count in rows([
            1, 2, 31, 32, 33, 64, 127, 128, 129, 159, 160, 254, 255, 256, 1000, 5000,
        ]) {
            let umem = get(nic.pages(count * 3))?;
            same!(umem.entries().len() as u64, count);
            let want = (0..count).map(|entry| BAR + DMA_OFFSET + 4 * entry * KIB_64);
            check!(umem.entries().iter().map(|entry| entry.addr).eq(want));
            umem.release();
        }
    }

    fn an_entry_ends_at_two_gib_and_at_what_the_nic_takes(nic: EachNic) {
        let gib = (1 << 30) / KIB_64;
        for (count, segment, want) in rows([
            (4 * gib, 1 << 31, 2),
            (4 * gib, u32::MAX, 2),
            (gib, 1 << 31, 1),
            (16, 1 << 16, 16),
            (16, (1 << 17) - 1, 16),
            (16, 1 << 17, 8),
            // A segment is never shorter than one of nvidia.ko's pages.
            (16, 4096, 16),
        ]) {
            fake_nic_max_segment(segment);
            let umem = get(nic.pages(count))?;
            same!(umem.entries().len(), want);
            umem.release();
        }
    }

    fn ib_core_trims_the_first_and_the_last_entry_and_writes_them_back(nic: EachNic) {
        let page = PAGE_SIZE as u64;
        for (layout, segment) in rows([
            (CONTIGUOUS, 1 << 31),
            (CONTIGUOUS, 1 << 16),
            (EVERY_OTHER, 1 << 31),
        ]) {
            lies(layout);
            fake_nic_max_segment(segment);
            for (skip, len) in rows([
                (0, 1),
                (0, KIB_64),
                (page % KIB_64, KIB_64 - page % KIB_64),
                (KIB_64 - 1, 2),
                (KIB_64 - page, page),
                (3 * page + 17, 3 * KIB_64 + 100),
                (1, 4 * KIB_64 - 2),
            ]) {
                // CAST: Both types have 64 bits.
                let umem = get(nic.asks(Request::new(VA + skip, len as usize)))?;
                let first = (VA + skip) & !(page - 1);
                let end = (VA + skip + len).next_multiple_of(page);
                let seen = umem.seen()?;
                let total: u64 = seen.iter().map(|entry| u64::from(entry.len)).sum();
                same!(total, end - first);
                let at = layout(0) + DMA_OFFSET + (first & (KIB_64 - 1));
                same!(seen.first().map(|entry| entry.addr), Some(at));
                same!(seen.len(), umem.entries().len());
                umem.release();
            }
        }
    }

    fn the_page_size_is_that_of_the_table(nic: EachNic) {
        for (code, size, layout) in rows([
            (1, KIB_64, CONTIGUOUS),
            (2, 2 * KIB_64, EVERY_OTHER), //
        ]) {
            lies(layout);
            with(|world| (world.table.page_size, world.mapping.page_size) = (code, code));
            let umem = get(nic.range())?;
            same!(umem.page_size(), size);
            same!(umem.entries().len(), 1);
            umem.release();
        }
    }

    fn a_nic_that_is_no_pci_device_gets_enodev(nic: EachNic) {
        for device in rows([Device::NULL, plain_device()]) {
            let mut request = nic.range();
            request.device = device;
            same!(failure(request), Some(Failed::DmaMap(ENODEV.to_errno())));
            logged![Acquire, nic.pin, GetPages, DmaMap, PutPages, Release, nic.put];
        }
    }

    fn a_failing_dma_map_is_followed_by_put_pages_and_release(nic: EachNic) {
        let (call, code) = match nic.map {
            Map => (Call::Map, EIO),
            _ => (Call::BarMap, EINVAL),
        };
        fail_once(call, EIO.to_errno())?;
        if nic.map == BarMap && !nic.can_lose {
            // The module then asks nvidia.ko.
            fail_once(Call::Map, EIO.to_errno())?;
            same!(failure(nic.range()), Some(Failed::DmaMap(EIO.to_errno())));
            logged![Acquire, nic.pin, GetPages, DmaMap, BarMap, Map, PutPages, Release, nic.put];
            return Ok(());
        }
        same!(failure(nic.range()), Some(Failed::DmaMap(code.to_errno())));
        logged![Acquire, nic.pin, GetPages, DmaMap, nic.map, PutPages, Release, nic.put];
    }

    /// The IOMMU's page tables for the region come from memory that may not be waited for.
    fn a_long_revocable_region_is_mapped_in_steps_with_rests_between(_: RevocableClient) {
        let request = pages(2 * MAX_STEP / KIB_64 + 1);
        for nth in rows(1..=3) {
            fail(Call::BarMap, nth, 1, EIO.to_errno())?;
            same!(failure(request), Some(Failed::DmaMap(EINVAL.to_errno())));
            nothing_mapped();
        }
        log();
        with(|world| world.rests = 0);
        let umem = get(request)?;
        logged![Acquire, Pin, GetPages, DmaMap, BarMap, BarMap, BarMap, PageSize];
        same!(with(|world| world.rests), 2);
        // Adjacent memory is still one entry, up to the NIC's segment size.
        same!(umem.entries().len(), 2);
        umem.release();
        same!(with(|world| world.rests), 4);
    }

    /// ib_core turns any nonzero value into a pointer, and recognizes only some of them as errors.
    fn what_dma_map_returns_is_zero_or_an_errno(_: ProviderMaps) {
        for (code, want) in rows([
            (-1, -1),
            (-5, -5),
            (-12, -12),
            (-22, -22),
            (-4095, -4095),
            // The kernel's own ENOTSUPP, which user space does not know, becomes EOPNOTSUPP.
            (-524, -95),
            (-4096, EINVAL.to_errno()),
            (c_int::MIN, EINVAL.to_errno()),
            (1, EINVAL.to_errno()),
            (5, EINVAL.to_errno()),
            (c_int::MAX, EINVAL.to_errno()),
        ]) {
            fail_once(Call::Map, code)?;
            same!(failure(range()), Some(Failed::DmaMap(want)));
        }
    }

    /// The table has three chunks. Each chunk's allocation fails once, and then the allocation of
    /// the last chunk at its exact length.
    fn a_scatter_list_that_cannot_be_allocated_leaves_nothing_mapped(_: ProviderMaps) {
        lies(EVERY_OTHER);
        for nth in rows(1..=4) {
            fail(Call::SgAlloc, nth, 1, ENOMEM.to_errno())?;
            let failed = failure(pages(THREE_CHUNKS));
            same!(failed, Some(Failed::DmaMap(ENOMEM.to_errno())));
            let log = log();
            let at = |event| log.iter().rposition(|have| *have == event);
            // The failed step undoes its own work.
            check!(at(Unmap).is_some() && at(Unmap) < at(PutPages));
            nothing_mapped();
            same!(pins(), 0);
        }
        get(pages(THREE_CHUNKS))?.release();
    }

    /// The first four allocations are for the list of physical addresses, which the revocable
    /// client reads in `acquire`. If no address is translated, this list becomes the scatter list.
    fn a_list_of_addresses_that_cannot_be_allocated_leaves_nothing(_: BothClients) {
        lies(EVERY_OTHER);
        for (guard_is, count) in
            rows([(Guard::Ops, 8), (Guard::Nothing, 4), (Guard::Translates, 5)])
        {
            guard(guard_is);
            for nic in [EachNic::CAN_LOSE, EachNic::CANNOT_LOSE] {
                let request = nic.pages(THREE_CHUNKS);
                for nth in 1..=count {
                    fail(Call::SgAlloc, nth, 1, ENOMEM.to_errno())?;
                    let want = match nic.can_lose && nth <= 4 {
                        true => Failed::NotMine,
                        false => Failed::DmaMap(ENOMEM.to_errno()),
                    };
                    same!(failure(request), Some(want));
                    nothing_mapped();
                    same!(pins(), 0);
                }
                get(request)?.release();
            }
        }
    }

    /// The mapping includes everything between the pages. The NIC could reach all of this memory
    /// before the mapping, too.
    fn where_nothing_translates_one_mapping_is_for_all(_: RevocableClient) {
        lies(EVERY_OTHER);
        for guard_is in rows([Guard::Nothing, Guard::Identity]) {
            guard(guard_is);
            log();
            let umem = calls!(get(pages(40))? => Acquire, Pin, GetPages, DmaMap, BarMap, PageSize);
            let want = (0..40).map(EVERY_OTHER);
            check!(umem.entries().iter().map(|entry| entry.addr).eq(want));
            let (first, last) = (EVERY_OTHER(0), EVERY_OTHER(39) + KIB_64);
            let range = with(|world| world.bar.first().copied()).ok_or(ENOENT)?;
            // CAST: Both types have 64 bits.
            let end = range.dma + range.len as u64;
            check!((BAR..=first).contains(&range.dma));
            check!((last..=BAR + BAR_LEN).contains(&end));
            umem.stop();
            logged![DmaUnmap, BarUnmap, PutPages];
            umem.release();
            // The NIC does not reach all memory between the pages, so the module maps only the
            // pages.
            fail_once(Call::BarMap, EIO.to_errno())?;
            let umem = get(pages(40))?;
            same!(umem.entries().len(), 40);
            let mapped = with(|world| world.bar.iter().map(|range| range.len).sum::<usize>());
            // CAST: Both types have 64 bits.
            same!(mapped as u64, 40 * KIB_64);
            umem.release();
            // The NIC does not reach the pages either.
            fail(Call::BarMap, 1, 2, EIO.to_errno())?;
            same!(failure(pages(40)), Some(Failed::DmaMap(EINVAL.to_errno())));
        }
    }

    /// The module builds the scatter list anew, because entries in the list of physical addresses
    /// have no maximum length.
    fn where_nothing_translates_an_entry_is_what_the_nic_takes(_: RevocableClient) {
        guard(Guard::Nothing);
        for (segment, want) in rows([(1 << 31, 1), (1 << 17, 8), (1 << 16, 16)]) {
            fake_nic_max_segment(segment);
            let umem = get(pages(16))?;
            same!(umem.entries().len(), want);
            umem.release();
        }
    }

    /// If an address translation is possible, or if the memory is in two BARs, the module maps only
    /// the pages.
    fn nothing_else_is_mapped_where_anything_may_translate(_: RevocableClient) {
        let in_two_bars: Layout = |page| if page < 20 { BAR } else { SECOND } + page * KIB_64;
        for (guard_is, layout, want) in rows([
            (Guard::Ops, EVERY_OTHER, 40),
            (Guard::Blocks, EVERY_OTHER, 40),
            (Guard::RangeMap, EVERY_OTHER, 40),
            (Guard::Nothing, in_two_bars, 2),
        ]) {
            guard(guard_is);
            lies(layout);
            let umem = get(pages(40))?;
            same!(umem.entries().len(), want);
            let mapped = with(|world| world.bar.iter().map(|range| range.len).sum::<usize>());
            // CAST: Both types have 64 bits.
            same!(mapped as u64, 40 * KIB_64);
            let log = log();
            same!(log.iter().filter(|event| **event == BarMap).count(), want);
            umem.release();
        }
    }

    /// The IOMMU translates to the pages in their order, and to nothing else.
    fn behind_an_iommu_fragmented_memory_is_contiguous_and_alone(_: RevocableClient) {
        guard(Guard::Translates);
        let in_two_bars: Layout = |page| if page % 2 == 0 { BAR } else { SECOND } + page * KIB_64;
        let descending: Layout = |page| BAR + (1 << 30) - page * KIB_64;
        for (layout, count) in rows([
            (EVERY_OTHER, 1),
            (EVERY_OTHER, 40),
            (descending, 40),
            (in_two_bars, 40), //
        ]) {
            lies(layout);
            let umem = get(pages(count))?;
            same!(umem.entries().len(), 1);
            let entry = umem.entries().first().copied().ok_or(ENOENT)?;
            same!(u64::from(entry.len), count * KIB_64);
            for page in 0..count {
                let (phys, linked) = translated(entry.addr + page * KIB_64);
                same!(phys, Some(layout(page)));
                same!(linked, count * KIB_64);
            }
            umem.stop();
            nothing_mapped();
            umem.release();
        }
        lies(EVERY_OTHER);
        log();
        let umem = calls!(get(pages(2))? =>
            Acquire, Pin, GetPages, DmaMap, IovaAlloc, IovaLink, IovaLink, IovaSync, PageSize);
        calls!(umem.stop() => DmaUnmap, IovaUnlink, IovaFree, PutPages);
        umem.release();
    }

    /// Memory of 2 MiB or more has equal IOMMU and virtual addresses modulo 2 MiB, wherever the
    /// IOMMU's range starts.
    fn behind_an_iommu_large_memory_is_congruent_to_its_virtual_addresses(_: RevocableClient) {
        guard(Guard::Translates);
        let mib_2 = 2 << 20;
        for base in rows([0x1_0000_1000, 0x1_001f_f000, 0x1_0020_0000]) {
            for count in [32, 33, 64] {
                with(|world| world.iova_base = base);
                let umem = get(pages(count))?;
                let entry = umem.entries().first().copied().ok_or(ENOENT)?;
                same!(entry.addr % mib_2, VA % mib_2);
                umem.release();
            }
        }
    }

    fn behind_an_iommu_a_long_region_is_linked_and_unlinked_in_steps(_: RevocableClient) {
        guard(Guard::Translates);
        let umem = calls!(get(pages(2 * MAX_STEP / KIB_64 + 1))? => Acquire, Pin, GetPages, DmaMap,
            IovaAlloc, IovaLink, IovaLink, IovaLink, IovaSync, PageSize);
        same!(with(|world| world.rests), 2);
        same!(umem.entries().len(), 2);
        calls!(umem.stop() => DmaUnmap, IovaUnlink, IovaUnlink, IovaUnlink, IovaFree, PutPages);
        same!(with(|world| world.rests), 4);
        umem.release();
    }

    /// OFED 25.07 and 25.10 compute wrong addresses if an HCA page is larger than 2 GiB. The tested
    /// memory gets no larger page at any `iova`.
    fn behind_an_iommu_bit_31_differs_between_the_runs_of_more_than_four_gib(_: RevocableClient) {
        guard(Guard::Translates);
        for base in rows([0x1_0000_1000, 0x1_7fff_f000, 0x2_0000_0000]) {
            with(|world| world.iova_base = base);
            let umem = get(pages(4 * GIB / KIB_64 + 1))?;
            let entries = umem.entries();
            let (mut va, mut distances) = (VA, [0, 0]);
            for entry in entries {
                let distance = entry.addr.wrapping_sub(va) % (4 * GIB);
                same!(distance % (2 * GIB), 0);
                // CAST: The quotient is 0 or 1.
                let known = distances.get_mut((distance / (2 * GIB)) as usize);
                *known.ok_or(ENOENT)? += 1;
                let last = u64::from(entry.len) - KIB_64;
                for at in [0, last] {
                    same!(
                        translated(entry.addr + at).0,
                        Some(CONTIGUOUS((va + at - VA) / KIB_64))
                    );
                }
                va += u64::from(entry.len);
            }
            check!(distances.iter().all(|count| *count > 0));
            same!(translated(base).1, 4 * GIB + KIB_64);
            umem.stop();
            nothing_mapped();
            umem.release();
        }
        // Memory of up to 4 GiB can have a single run.
        let umem = get(pages(4 * GIB / KIB_64))?;
        let ranges = || umem.entries().iter().map(SgEntry::range);
        check!(common_distance(VA, ranges()).is_some());
        umem.release();
    }

    /// The IOMMU has no room for the memory with its hole between two runs, and the calls of
    /// `dma_map_resource()` return adjacent addresses.
    fn behind_an_iommu_ranges_make_no_run_of_four_gib(_: RevocableClient) {
        guard(Guard::Translates);
        fail_once(Call::IovaAlloc, ENOMEM.to_errno())?;
        log();
        let umem = get(pages(6 * GIB / KIB_64))?;
        check!(!log().contains(&IovaFree));
        let ranges = || umem.entries().iter().map(SgEntry::range);
        same!(ranges().map(|range| range.len).sum::<u64>(), 6 * GIB);
        same!(common_distance(VA, ranges()), None);
        let mapped = with(|world| world.bar.iter().map(|range| range.len).sum::<usize>());
        // CAST: Both types have 64 bits.
        same!(mapped as u64, 6 * GIB);
        umem.release();
        nothing_mapped();
    }

    fn behind_an_iommu_what_fails_half_way_is_undone_and_each_range_mapped_by_itself(
        _: RevocableClient,
    ) {
        guard(Guard::Translates);
        lies(EVERY_OTHER);
        for (call, nth) in rows([
            (Call::IovaLink, 1),
            (Call::IovaLink, 2),
            (Call::IovaLink, 4),
            (Call::IovaSync, 1),
        ]) {
            fail(call, nth, 1, ENOMEM.to_errno())?;
            log();
            let umem = get(pages(4))?;
            same!(umem.entries().len(), 4);
            let log = log();
            // CAST: The log is short.
            let count = |event| log.iter().filter(|have| **have == event).count() as u32;
            same!(
                count(IovaUnlink),
                u32::from(nth > 1 || call == Call::IovaSync)
            );
            same!((count(IovaFree), count(BarMap)), (1, 4));
            umem.release();
            nothing_mapped();
            // The mapping of each range fails as well.
            fail(call, nth, 1, ENOMEM.to_errno())?;
            fail(Call::BarMap, 3, 1, EIO.to_errno())?;
            same!(failure(pages(4)), Some(Failed::DmaMap(EINVAL.to_errno())));
            nothing_mapped();
        }
        // The IOMMU has no range for all pages, but may have a range for each page.
        fail_once(Call::IovaAlloc, ENOMEM.to_errno())?;
        let umem = get(pages(4))?;
        same!(umem.entries().len(), 4);
        umem.release();
        // A range longer than the memory does not fit. A range for the memory alone fits in the
        // first row, but not in the second.
        for (times, entries) in rows([(1, 1), (2, 64)]) {
            fail(Call::IovaAlloc, 1, times, ENOMEM.to_errno())?;
            let umem = get(pages(64))?;
            same!(umem.entries().len(), entries);
            umem.release();
            nothing_mapped();
        }
    }

    /// The kernel would round to whole pages of the IOMMU, and map the adjacent memory too.
    fn behind_an_iommu_what_is_in_no_whole_pages_of_its_is_refused(_: RevocableClient) {
        guard(Guard::Translates);
        lies(|page| BAR + page * KIB_64 + 2048);
        log();
        same!(failure(pages(4)), Some(Failed::DmaMap(EINVAL.to_errno())));
        let log = log();
        check!(!log.contains(&IovaLink) && !log.contains(&BarMap));
        nothing_mapped();
    }

    /// nvidia.ko maps persistent memory that this module cannot map. Revocable memory is refused.
    fn a_mapping_that_fails_half_way_is_undone(_: BothClients) {
        lies(EVERY_OTHER);
        for nic in rows([EachNic::CAN_LOSE, EachNic::CANNOT_LOSE]) {
            for nth in 1..=4 {
                fail(Call::BarMap, nth, 1, EIO.to_errno())?;
                log();
                let failed = failure(nic.pages(4));
                let refused = Failed::DmaMap(EINVAL.to_errno());
                same!(failed, nic.can_lose.then_some(refused));
                let log = log();
                // CAST: The log is short.
                let count = |event| log.iter().filter(|have| **have == event).count() as u32;
                same!((count(BarMap), count(BarUnmap)), (nth, nth - 1));
                same!(count(Map), u32::from(!nic.can_lose));
                nothing_mapped();
            }
        }
    }

    /// On some machines only nvidia.ko knows that a NIC does not reach a GPU.
    fn before_the_first_mapping_for_a_nic_nvidia_ko_maps_a_page(_: NoClient) {
        let _up = persistent(c"nv_mem")?;
        log();
        let first = calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap,
            PinPersistent, Map, BarMap, BarUnmap, Unmap, PutPersistent, BarMap, PageSize);
        let second = calls!(get(range())? =>
            Acquire, PinPersistent, GetPages, DmaMap, BarMap, PageSize);
        first.release();
        second.release();
        // Another NIC takes the place of the first.
        to_result(fake_nic_is_replaced())?;
        log();
        calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap,
            PinPersistent, Map, BarMap, BarUnmap, Unmap, PutPersistent, BarMap, PageSize)
        .release();
        get(range())?.release();
        // The module forgets the old NIC.
        same!(fake_remembered(), 2);
    }

    /// The module asks for each GPU that has a number, but not for a GPU without a number.
    fn of_each_gpu_nvidia_ko_is_asked_once(_: NoClient) {
        static GPU: Atomic<u64> = Atomic::new(0);
        let most = u64::from(Gpus::MOST);
        to_result(fake_more_gpus(Gpus::MOST + 1))?;
        let _up = persistent(c"nv_mem")?;
        lies(|page| MORE + GPU.load(Relaxed) * SMALL_LEN + page * KIB_64);
        for gpu in 0..most {
            GPU.store(gpu, Relaxed);
            log();
            calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap,
                PinPersistent, Map, BarMap, BarUnmap, Unmap, PutPersistent, BarMap, PageSize)
            .release();
        }
        let before = fake_pci_steps();
        for gpu in 0..most {
            GPU.store(gpu, Relaxed);
            log();
            calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap, BarMap, PageSize)
                .release();
        }
        same!(fake_pci_steps(), before);
        GPU.store(most, Relaxed);
        for _ in rows(0..2) {
            log();
            calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap, Map, PageSize)
                .release();
        }
    }

    /// The module then leaves all mappings to nvidia.ko, because its own would differ.
    fn where_nvidia_ko_maps_otherwise_it_maps_all(_: NoClient) {
        let _up = persistent(c"nv_mem")?;
        for (guard_is, offset, own) in rows([
            (Guard::Nothing, 0, true),
            (Guard::Nothing, DMA_OFFSET, false),
            (Guard::Identity, 0, true),
            (Guard::Translates, 0, false),
            (Guard::Translates, DMA_OFFSET, true),
            (Guard::Ops, 0, false),
            (Guard::Ops, DMA_OFFSET, true),
            (Guard::RangeMap, 0, false),
            (Guard::RangeMap, DMA_OFFSET, false),
        ]) {
            // The device owns the range map and frees it.
            guard(Guard::Nothing);
            to_result(fake_nic_is_replaced())?;
            guard(guard_is);
            with(|world| world.mapping.offset = offset);
            get(range())?.release();
            log();
            get(range())?.release();
            same!(!log().contains(&Map), own);
        }
        guard(Guard::Nothing);
    }

    fn without_an_answer_nvidia_ko_maps_and_is_asked_again(_: NoClient) {
        let _up = persistent(c"nv_mem")?;
        for (call, asks) in rows([
            (Call::PinPersistent, &[PinPersistent][..]),
            (Call::Map, &[PinPersistent, Map, PutPersistent]),
        ]) {
            // The first pin belongs to the registration.
            let nth = if call == Call::Map { 1 } else { 2 };
            fail(call, nth, 1, ENOMEM.to_errno())?;
            log();
            get(range())?.release();
            let log = log();
            let (before, rest) = log.split_at(4);
            same!(before, &[Acquire, PinPersistent, GetPages, DmaMap]);
            check!(rest.starts_with(asks));
            same!(rest.get(asks.len()), Some(&Map));
            check!(!log.contains(&BarMap));
        }
        // If nvidia.ko refuses the registration itself, its code is returned.
        fail(Call::Map, 1, 2, EIO.to_errno())?;
        same!(failure(range()), Some(Failed::DmaMap(EIO.to_errno())));
        log();
        get(range())?.release();
        check!(log().contains(&BarMap));
    }

    /// The module remembers the refusal until the GPU or the NIC is removed. nvidia.ko itself
    /// refuses each registration.
    fn a_nic_that_is_denied_is_not_asked_about_again(_: NoClient) {
        let _up = persistent(c"nv_mem")?;
        for replaced in rows([fake_nic_is_replaced, fake_gpu_is_replaced]) {
            to_result(replaced())?;
            // Returns how often the module asks nvidia.ko during a registration that nvidia.ko
            // refuses.
            let asks = |times| {
                fail(Call::Map, 1, times, ENOTSUPP)?;
                log();
                let failed = failure(range());
                same!(failed, Some(Failed::DmaMap(EOPNOTSUPP)));
                let log = log();
                let pins = log.iter().filter(|event| **event == PinPersistent);
                Ok::<_, Error>(pins.count() - 1)
            };
            same!(asks(2), Ok(1));
            same!(asks(1), Ok(0));
            same!(asks(1), Ok(0));
            log();
            calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap, Map, PageSize)
                .release();
            to_result(replaced())?;
            log();
            calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap,
                PinPersistent, Map, BarMap, BarUnmap, Unmap, PutPersistent, BarMap, PageSize)
            .release();
        }
    }

    /// The revocable mode never asks nvidia.ko, but uses the answer from a mapping for the other
    /// client.
    fn in_revocable_mode_a_nic_that_was_denied_is_refused(_: NoClient) {
        let _up = (revocable(ClientUnmaps)?, persistent(c"nv_mem_nc")?);
        let (revocable, persistent) = (EachNic::CAN_LOSE, EachNic::CANNOT_LOSE);
        for replaced in rows([fake_nic_is_replaced, fake_gpu_is_replaced]) {
            get(revocable.range())?.release();
            fail(Call::Map, 1, 2, ENOTSUPP)?;
            let refused = Some(Failed::DmaMap(EOPNOTSUPP));
            same!(failure(persistent.range()), refused);
            log();
            same!(failure(revocable.range()), refused);
            let log = log();
            check!(log.starts_with(&[Acquire, Pin, GetPages, DmaMap]));
            check!(log.contains(&Put) && !log.contains(&BarMap));
            check!(!log.contains(&PinPersistent) && !log.contains(&Map));
            to_result(replaced())?;
            get(revocable.range())?.release();
        }
    }

    /// The process has two GPUs, and has replaced the memory by `munmap()` and `mmap()`.
    fn what_nvidia_ko_says_of_another_gpu_is_not_remembered(_: NoClient) {
        to_result(fake_more_gpus(1))?;
        let _up = persistent(c"nv_mem")?;
        at(Point::BeforeDmaMap, || lies(|page| MORE + page * KIB_64))?;
        log();
        calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap,
            PinPersistent, PutPersistent, Map, PageSize)
        .release();
        // The module remembers two GPUs, but no answer.
        same!(fake_remembered(), 2);
        lies(CONTIGUOUS);
        log();
        calls!(get(range())? => Acquire, PinPersistent, GetPages, DmaMap,
            PinPersistent, Map, BarMap, BarUnmap, Unmap, PutPersistent, BarMap, PageSize)
        .release();
    }

    /// nvidia.ko does not map the last page alone.
    fn the_last_page_of_a_bar_is_not_asked_for(_: NoClient) {
        let _up = persistent(c"nv_mem")?;
        lies(|page| BAR + BAR_LEN - (page + 1) * KIB_64);
        log();
        calls!(get(pages(1))? => Acquire, PinPersistent, GetPages, DmaMap, Map, PageSize).release();
        log();
        calls!(get(pages(2))? => Acquire, PinPersistent, GetPages, DmaMap,
            PinPersistent, Map, BarMap, BarUnmap, Unmap, PutPersistent, BarMap, BarMap, PageSize)
        .release();
    }

    fn mapping_a_region_twice_is_refused_and_changes_nothing(nic: EachNic) {
        let umem = mapped(nic.range())?;
        same!(umem.map_again(), EBUSY.to_errno());
        logged![DmaMap];
        umem.release();
    }

    fn a_reference_to_the_nic_is_held_while_it_is_mapped(nic: EachNic) {
        let before = fake_device_refs();
        let umem = get(nic.range())?;
        check!(fake_device_refs() > before);
        umem.stop();
        same!(fake_device_refs(), before);
        umem.release();
    }

    /// Registrations of one range are independent of each other.
    fn a_range_can_be_registered_more_than_once(nic: EachNic) {
        let first = get(nic.range())?;
        let second = get(nic.range())?;
        same!(pins(), 2);
        first.release();
        same!(pins(), 1);
        same!(second.seen()?.len(), 1);
        second.release();
    }
);
