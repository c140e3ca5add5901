// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the DMA mappings. In the test VM, the kernel's DMA API never fails, and there is only
//! one kind of path between the NIC and the BAR.

use crate::{
    dma::BarMapping,
    ranges::{
        common_distance,
        AddrRange,
        PageSize,
        MAX_STEP, //
    },
    reason::Reason,
    setup::*,
    sg::SgTable, //
};

const GIB: u64 = 1 << 30;

/// Maps `count` pages in this layout for the NIC.
fn map(count: u64, layout: Layout) -> Result<(BarMapping, SgTable), Reason> {
    let nic = nic().map_err(|_| Reason::NotPci)?;
    BarMapping::map(&nic, memory(count, layout)?, VA, PageSize::KIB_64)
}

/// Maps memory like [`map`]. Makes the test fail if the memory cannot be mapped.
fn mapped(count: u64, layout: Layout) -> Result<(BarMapping, SgTable)> {
    map(count, layout).map_err(|reason| {
        same!(Some(reason), None);
        EIO
    })
}

/// Returns the reason why this memory cannot be mapped. Makes the test fail if anything stays
/// mapped.
fn refused(count: u64, layout: Layout) -> Option<Reason> {
    let reason = map(count, layout).err();
    nothing_mapped();
    reason
}

/// Returns the total length of the ranges that `dma_map_phys()` has mapped, in bytes.
fn bytes() -> u64 {
    // CAST: Both types have 64 bits.
    with(|world| world.bar.iter().map(|range| range.len as u64).sum())
}

/// Returns the number of `event`s since the log was last emptied, and empties the log.
fn count(event: Event) -> usize {
    log().iter().filter(|have| **have == event).count()
}

suite!(
    mod peermem_mapping;

    fn a_path_is_direct_or_translated_or_neither() {
        let nic = nic()?;
        let page = |addr| AddrRange { addr, len: KIB_64 };
        for (guard_is, direct, translated, differs) in rows([
            (Guard::Ops, false, false, true),
            (Guard::Nothing, true, false, false),
            (Guard::Identity, true, false, false),
            (Guard::Translates, false, true, true),
            (Guard::Blocks, false, true, true),
            // Linux adds the offsets in `dev->dma_range_map` to addresses of RAM, not of a BAR.
            (Guard::RangeMap, false, false, false),
        ]) {
            guard(guard_is);
            same!((nic.is_direct(), nic.is_translated()), (direct, translated));
            same!(BarMapping::translates(&nic, &page(BAR)), Some(differs));
            fail_once(Call::BarMap, EIO.to_errno())?;
            same!(BarMapping::translates(&nic, &page(BAR)), None);
            log();
            same!(BarMapping::translates(&nic, &page(RAM)), Some(false));
            logged![];
        }
        guard(Guard::Nothing);
    }

    /// If nothing translates addresses, one mapping covers all pages and everything that lies
    /// between them. The NIC could reach all of it without a mapping as well.
    fn without_translation_one_mapping_covers_all_pages() {
        for guard_is in rows([Guard::Nothing, Guard::Identity]) {
            guard(guard_is);
            log();
            let mapping = mapped(40, EVERY_OTHER)?;
            logged![BarMap];
            let want = (0..40).map(EVERY_OTHER);
            check!(mapping.1.ranges().map(|range| range.addr).eq(want));
            let (first, last) = (EVERY_OTHER(0), EVERY_OTHER(39) + KIB_64);
            let range = with(|world| world.bar.first().copied()).ok_or(ENOENT)?;
            // CAST: Both types have 64 bits.
            let end = range.dma + range.len as u64;
            check!((BAR..=first).contains(&range.dma));
            check!((last..=BAR + BAR_LEN).contains(&end));
            drop(mapping);
            logged![BarUnmap];
            // The mapping of the whole range fails, as if the NIC did not reach all of it. The
            // module then maps each page separately.
            fail_once(Call::BarMap, EIO.to_errno())?;
            let mapping = mapped(40, EVERY_OTHER)?;
            same!((mapping.1.entries(), bytes()), (40, 40 * KIB_64));
            drop(mapping);
            // The mapping of the whole range fails, and so does the mapping of the first page.
            fail(Call::BarMap, 1, 2, EIO.to_errno())?;
            same!(
                refused(40, EVERY_OTHER),
                Some(Reason::MapResource { mapped: 0 })
            );
        }
        // The list of physical addresses cannot serve as the scatter list, because its entries may
        // be longer than a segment of the NIC. The module therefore builds a new list.
        for (segment, want) in rows([(1 << 31, 1), (1 << 17, 8), (1 << 16, 16)]) {
            fake_nic_max_segment(segment);
            same!(mapped(16, CONTIGUOUS)?.1.entries(), want);
        }
    }

    /// If an address translation is possible, or if the memory is in two BARs, the module maps only
    /// the pages.
    fn with_possible_translation_only_the_pages_are_mapped() {
        let in_two_bars: Layout = |page| if page < 20 { BAR } else { SECOND } + page * KIB_64;
        for (guard_is, layout, want) in rows([
            (Guard::Ops, EVERY_OTHER, 40),
            (Guard::Blocks, EVERY_OTHER, 40),
            (Guard::RangeMap, EVERY_OTHER, 40),
            (Guard::Nothing, in_two_bars, 2),
        ]) {
            guard(guard_is);
            log();
            let mapping = mapped(40, layout)?;
            same!((mapping.1.entries(), bytes()), (want, 40 * KIB_64));
            same!(count(BarMap), want as usize);
        }
        guard(Guard::Nothing);
    }

    /// The kernel allocates the IOMMU's page tables without sleeping. The module therefore maps in
    /// short steps, and calls `cond_resched()` between two steps.
    fn a_long_region_is_mapped_and_unmapped_in_steps_with_rests_between() {
        let pages = 2 * MAX_STEP / KIB_64 + 1;
        for guard_is in rows([Guard::Ops, Guard::Translates]) {
            guard(guard_is);
            log();
            with(|world| world.rests = 0);
            let mapping = mapped(pages, CONTIGUOUS)?;
            match guard_is {
                Guard::Ops => logged![BarMap, BarMap, BarMap],
                _ => logged![IovaAlloc, IovaLink, IovaLink, IovaLink, IovaSync],
            }
            same!(with(|world| world.rests), 2);
            // Adjacent memory becomes one entry, up to the NIC's segment size.
            same!(mapping.1.entries(), 2);
            drop(mapping);
            match guard_is {
                Guard::Ops => logged![BarUnmap, BarUnmap, BarUnmap],
                _ => logged![IovaUnlink, IovaUnlink, IovaUnlink, IovaFree],
            }
            same!(with(|world| world.rests), 4);
        }
    }

    fn a_mapping_that_fails_half_way_is_undone() {
        for nth in rows(1..=4) {
            fail(Call::BarMap, nth, 1, EIO.to_errno())?;
            log();
            let mapped = u64::from(nth - 1) * KIB_64;
            same!(
                refused(4, EVERY_OTHER),
                Some(Reason::MapResource { mapped })
            );
            // CAST: The number is small.
            same!(count(BarUnmap), nth as usize - 1);
        }
        guard(Guard::Translates);
        for (call, nth) in rows([
            (Call::IovaLink, 1),
            (Call::IovaLink, 2),
            (Call::IovaLink, 4),
            (Call::IovaSync, 1),
        ]) {
            // The IOVA mapping fails, so the module maps each range separately.
            fail(call, nth, 1, ENOMEM.to_errno())?;
            let mapping = mapped(4, EVERY_OTHER)?;
            same!((mapping.1.entries(), bytes()), (4, 4 * KIB_64));
            same!(with(|world| world.iovas.len()), 0);
            drop(mapping);
            nothing_mapped();
            // The IOVA mapping fails, and so does the separate mapping of the third range.
            fail(call, nth, 1, ENOMEM.to_errno())?;
            fail(Call::BarMap, 3, 1, EIO.to_errno())?;
            let mapped = 2 * KIB_64;
            same!(
                refused(4, EVERY_OTHER),
                Some(Reason::MapResource { mapped })
            );
        }
        // The module first asks for IOVA space that is longer than the memory, and then for space
        // that is as long as the memory. The first request fails in each row. The second request
        // succeeds in the first row, and fails in the second row. The memory of the last row is
        // short, so the module makes only the first request.
        for (pages, times, entries) in rows([(64, 1, 1), (64, 2, 64), (4, 1, 4)]) {
            fail(Call::IovaAlloc, 1, times, ENOMEM.to_errno())?;
            same!(mapped(pages, EVERY_OTHER)?.1.entries(), entries);
            nothing_mapped();
        }
    }

    /// The first four allocations are for the list of physical addresses. Without a translation,
    /// this list also serves as the scatter list. Behind an IOMMU, the DMA addresses are
    /// contiguous, and the scatter list needs one allocation. Otherwise, the scatter list needs
    /// four more allocations.
    fn a_list_that_cannot_be_allocated_leaves_nothing_mapped() {
        for (guard_is, allocations) in
            rows([(Guard::Ops, 8), (Guard::Nothing, 4), (Guard::Translates, 5)])
        {
            guard(guard_is);
            for nth in 1..=allocations {
                fail(Call::SgAlloc, nth, 1, ENOMEM.to_errno())?;
                same!(refused(THREE_CHUNKS, EVERY_OTHER), Some(Reason::NoMemory));
            }
            mapped(THREE_CHUNKS, EVERY_OTHER)?;
        }
    }

    /// For a region of more than 4 GiB, the module asks for IOVA space with a hole, so that no HCA
    /// page is larger than 2 GiB. Here, the allocation of this space fails, and the module maps
    /// each range separately. `dma_map_phys()` returns adjacent addresses for the ranges. The
    /// module must map a range again, at other addresses, before adjacent DMA addresses form a run
    /// of 4 GiB.
    fn behind_an_iommu_ranges_make_no_run_of_four_gib() {
        guard(Guard::Translates);
        fail_once(Call::IovaAlloc, ENOMEM.to_errno())?;
        let (mapping, table) = mapped(6 * GIB / KIB_64, CONTIGUOUS)?;
        same!(table.ranges().map(|range| range.len).sum::<u64>(), 6 * GIB);
        same!(common_distance(VA, table.ranges()), None);
        same!(bytes(), 6 * GIB);
        drop(mapping);
        nothing_mapped();
    }

    /// The ranges begin and end inside IOMMU pages. The kernel would round each range to whole
    /// IOMMU pages, and would map adjacent memory too.
    fn behind_an_iommu_memory_that_fills_no_whole_iommu_pages_is_refused() {
        guard(Guard::Translates);
        let unaligned: Layout = |page| BAR + page * KIB_64 + 2048;
        log();
        same!(
            refused(4, unaligned),
            Some(Reason::MapResource { mapped: 0 })
        );
        logged![];
    }
);
