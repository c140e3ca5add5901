// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! From get_pages to put_pages, for both flavours: the scatter list that ib_core gets, and what follows a
//! step that fails.

use kernel::prelude::*;

#[kunit_tests(peermem_mapping)]
mod tests {
    use kernel::{
        page::PAGE_SIZE,
        prelude::*, //
    };

    use crate::{
        extents::{
            Entry,
            MAX_STEP, //
        },
        fakes::{
            check,
            fail,
            fail_once,
            log,
            logged,
            nic,
            nic_takes,
            nothing_mapped,
            pins,
            plain_device,
            same,
            test,
            with,
            Call,
            Event::*,
            BAR,
            DMA_OFFSET,
            KIB_64, //
        },
        ib::Invalidation,
        ib_core::{
            failure,
            get,
            Device,
            Failed,
            Request, //
        },
        setup::{
            pages,
            persistent_as,
            revocable,
            PAGES,
            VA, //
        }, //
    };

    /// Runs `body` with a client of each flavour, twice: once for a card whose regions are revocable, once
    /// for one whose regions are not.
    fn both(mut body: impl FnMut(bool) -> Result) -> Result {
        test(|| {
            let up = (
                revocable(Invalidation::ClientUnmaps)?,
                persistent_as(c"nv_mem_nc")?,
            );
            for can_lose in [true, false] {
                log();
                body(can_lose)?;
            }
            drop(up);
            Ok(())
        })
    }

    fn range(can_lose: bool, mut request: Request) -> Request {
        request.can_lose = can_lose;
        request
    }

    #[test]
    fn the_calls_of_one_registration_in_order() -> Result {
        both(|can_lose| {
            let umem = get(range(can_lose, pages(PAGES))).map_err(|_| EIO)?;
            if can_lose {
                logged![Acquire, Pin, GetPages, DmaMap, BarMap, PageSize];
            } else {
                logged![Acquire, PinPersistent, GetPages, DmaMap, Map, PageSize];
            }
            umem.stop();
            if can_lose {
                logged![DmaUnmap, BarUnmap, PutPages];
            } else {
                logged![DmaUnmap, Unmap, PutPages];
            }
            umem.release();
            if can_lose {
                logged![Release, Put];
            } else {
                logged![Release, PutPersistent];
            }
            Ok(())
        })
    }

    #[test]
    fn a_range_for_reading_alone_is_no_other() -> Result {
        both(|can_lose| {
            let mut request = range(can_lose, pages(PAGES));
            request.read_only = true;
            get(request).map_err(|_| EIO)?.release();
            Ok(())
        })
    }

    #[test]
    fn entries_are_the_pages_at_their_dma_addresses() -> Result {
        both(|can_lose| {
            for (address, want) in [
                (
                    (|page| BAR + page * KIB_64) as fn(u64) -> u64,
                    &[(0, 6)][..],
                ),
                // A break after two.
                (
                    |page| BAR + (page + page / 2) * KIB_64,
                    &[(0, 2), (3, 2), (6, 2)],
                ),
                (
                    |page| BAR + (5 - page) * KIB_64,
                    &[(5, 1), (4, 1), (3, 1), (2, 1), (1, 1), (0, 1)],
                ),
                // One page for all.
                (
                    |_| BAR + 9 * KIB_64,
                    &[(9, 1), (9, 1), (9, 1), (9, 1), (9, 1), (9, 1)],
                ),
            ] {
                with(|world| world.table.address = address);
                let umem = get(range(can_lose, pages(6))).map_err(|_| EIO)?;
                let want = want.iter().map(|(page, count)| Entry {
                    addr: BAR + DMA_OFFSET + page * KIB_64,
                    // CAST: Small.
                    len: (count * KIB_64) as u32,
                });
                check!(umem.entries().iter().copied().eq(want));
                umem.release();
            }
            Ok(())
        })
    }

    /// Past the 128 entries that fit a page, where the list is chained. What is allocated is exactly what
    /// is used: ib_core walks the one and counts by the other.
    #[test]
    fn nents_is_orig_nents_and_what_dma_map_says() -> Result {
        both(|can_lose| {
            with(|world| world.table.address = |page| BAR + (page + page / 3) * KIB_64);
            for count in [
                1, 2, 31, 32, 33, 64, 127, 128, 129, 159, 160, 254, 255, 256, 1000, 5000,
            ] {
                let umem = get(range(can_lose, pages(count * 3))).map_err(|_| EIO)?;
                same!(umem.entries().len() as u64, count);
                let want = (0..count).map(|entry| BAR + DMA_OFFSET + 4 * entry * KIB_64);
                check!(umem.entries().iter().map(|entry| entry.addr).eq(want));
                umem.release();
            }
            Ok(())
        })
    }

    #[test]
    fn an_entry_ends_at_two_gib_and_at_what_the_card_takes() -> Result {
        both(|can_lose| {
            let gib = (1 << 30) / KIB_64;
            for (count, segment, want) in [
                (4 * gib, 1 << 31, 2),
                (4 * gib, u32::MAX, 2),
                (gib, 1 << 31, 1),
                (16, 1 << 16, 16),
                (16, (1 << 17) - 1, 16),
                (16, 1 << 17, 8),
                // Never less than a page of nvidia.ko's.
                (16, 4096, 16),
            ] {
                nic_takes(segment);
                let umem = get(range(can_lose, pages(count))).map_err(|_| EIO)?;
                same!(umem.entries().len(), want);
                umem.release();
            }
            Ok(())
        })
    }

    #[test]
    fn ib_core_trims_the_first_and_the_last_entry_and_writes_them_back() -> Result {
        both(|can_lose| {
            let page = PAGE_SIZE as u64;
            for (layout, segment) in [
                ((|page| BAR + page * KIB_64) as fn(u64) -> u64, 1 << 31),
                (|page| BAR + page * KIB_64, 1 << 16),
                (|page| BAR + 2 * page * KIB_64, 1 << 31),
            ] {
                with(|world| world.table.address = layout);
                nic_takes(segment);
                for (skip, len) in [
                    (0, 1),
                    (0, KIB_64),
                    (page, KIB_64 - page),
                    (KIB_64 - 1, 2),
                    (KIB_64 - page, page),
                    (3 * page + 17, 3 * KIB_64 + 100),
                    (1, 4 * KIB_64 - 2),
                ] {
                    // CAST: Small.
                    let request = Request::new(VA + skip, len as usize);
                    let umem = get(range(can_lose, request)).map_err(|_| EIO)?;
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
            Ok(())
        })
    }

    #[test]
    fn the_page_size_is_that_of_the_table() -> Result {
        both(|can_lose| {
            for (code, size) in [(1, KIB_64), (2, 2 * KIB_64)] {
                with(|world| {
                    world.table.page_size = code;
                    world.mapping.page_size = code;
                    world.table.address = if code == 2 {
                        |page| BAR + 2 * page * KIB_64
                    } else {
                        |page| BAR + page * KIB_64
                    };
                });
                let umem = get(range(can_lose, pages(PAGES))).map_err(|_| EIO)?;
                same!(umem.page_size(), size);
                same!(umem.entries().len(), 1);
                umem.release();
            }
            Ok(())
        })
    }

    #[test]
    fn a_card_that_is_no_pci_device_gets_enodev() -> Result {
        both(|can_lose| {
            for device in [Device::NULL, plain_device()] {
                let mut request = range(can_lose, pages(PAGES));
                request.device = device;
                let failed = failure(request);
                same!(failed, Some(Failed::DmaMap(ENODEV.to_errno())));
                if can_lose {
                    logged![Acquire, Pin, GetPages, DmaMap, PutPages, Release, Put];
                } else {
                    logged![
                        Acquire,
                        PinPersistent,
                        GetPages,
                        DmaMap,
                        PutPages,
                        Release,
                        PutPersistent
                    ];
                }
            }
            Ok(())
        })
    }

    #[test]
    fn a_failing_dma_map_is_followed_by_put_pages_and_release() -> Result {
        both(|can_lose| {
            let call = if can_lose { Call::BarMap } else { Call::Map };
            fail_once(call, EIO.to_errno())?;
            let failed = failure(range(can_lose, pages(PAGES)));
            if can_lose {
                same!(failed, Some(Failed::DmaMap(EINVAL.to_errno())));
                logged![Acquire, Pin, GetPages, DmaMap, BarMap, PutPages, Release, Put];
            } else {
                same!(failed, Some(Failed::DmaMap(EIO.to_errno())));
                logged![
                    Acquire,
                    PinPersistent,
                    GetPages,
                    DmaMap,
                    Map,
                    PutPages,
                    Release,
                    PutPersistent
                ];
            }
            Ok(())
        })
    }

    /// An IOMMU's page tables for it come from memory that may not be waited for.
    #[test]
    fn a_long_revocable_region_is_mapped_in_steps_with_rests_between() -> Result {
        test(|| {
            let up = revocable(Invalidation::ClientUnmaps)?;
            let request = || pages(2 * MAX_STEP / KIB_64 + 1);
            for nth in 1..=3 {
                fail(Call::BarMap, nth, 1, EIO.to_errno())?;
                let failed = failure(request());
                same!(failed, Some(Failed::DmaMap(EINVAL.to_errno())));
                nothing_mapped();
            }
            log();
            with(|world| world.rests = 0);
            let umem = get(request()).map_err(|_| EIO)?;
            logged![Acquire, Pin, GetPages, DmaMap, BarMap, BarMap, BarMap, PageSize];
            same!(with(|world| world.rests), 2);
            // What is adjacent all the same is one entry, as far as the card takes it.
            same!(umem.entries().len(), 2);
            umem.release();
            same!(with(|world| world.rests), 4);
            drop(up);
            Ok(())
        })
    }

    /// ib_core makes a pointer of whatever is not 0, and sees an error in few of them.
    #[test]
    fn what_dma_map_returns_is_zero_or_an_errno() -> Result {
        both(|can_lose| {
            if can_lose {
                // Calls no function of nvidia.ko's.
                return Ok(());
            }
            for (code, want) in [
                (-1, -1),
                (-5, -5),
                (-12, -12),
                (-22, -22),
                (-4095, -4095),
                // The kernel's own ENOTSUPP, for which applications have no word: EOPNOTSUPP.
                (-524, -95),
                (-4096, EINVAL.to_errno()),
                (c_int::MIN, EINVAL.to_errno()),
                (1, EINVAL.to_errno()),
                (5, EINVAL.to_errno()),
                (c_int::MAX, EINVAL.to_errno()),
            ] {
                fail_once(Call::Map, code)?;
                let failed = failure(range(can_lose, pages(PAGES)));
                same!(failed, Some(Failed::DmaMap(want)));
            }
            Ok(())
        })
    }

    /// A table of more than 256 entries: of its three chunks each, and the last one cut to its length.
    #[test]
    fn a_scatter_list_that_cannot_be_allocated_leaves_nothing_mapped() -> Result {
        both(|can_lose| {
            with(|world| world.table.address = |page| BAR + 2 * page * KIB_64);
            for nth in 1..=4 {
                fail(Call::SgAlloc, nth, 1, ENOMEM.to_errno())?;
                let failed = failure(range(can_lose, pages(300)));
                same!(failed, Some(Failed::DmaMap(ENOMEM.to_errno())));
                let log = log();
                let at = |event| log.iter().rposition(|have| *have == event);
                // Undone by the step that failed.
                let unmapped = at(if can_lose { BarUnmap } else { Unmap });
                check!(unmapped.is_some() && unmapped < at(PutPages));
                nothing_mapped();
                same!(pins(), 0);
            }
            get(range(can_lose, pages(300))).map_err(|_| EIO)?.release();
            Ok(())
        })
    }

    #[test]
    fn a_mapping_that_fails_half_way_is_undone() -> Result {
        both(|can_lose| {
            if !can_lose {
                // nvidia.ko maps all or nothing.
                return Ok(());
            }
            with(|world| world.table.address = |page| BAR + 2 * page * KIB_64);
            for nth in 1..=4 {
                fail(Call::BarMap, nth, 1, EIO.to_errno())?;
                log();
                let failed = failure(range(can_lose, pages(4)));
                same!(failed, Some(Failed::DmaMap(EINVAL.to_errno())));
                let log = log();
                // CAST: Small.
                let count = |event| log.iter().filter(|have| **have == event).count() as u32;
                same!((count(BarMap), count(BarUnmap)), (nth, nth - 1));
            }
            Ok(())
        })
    }

    #[test]
    fn mapping_a_region_twice_is_refused_and_changes_nothing() -> Result {
        both(|can_lose| {
            let umem = get(range(can_lose, pages(PAGES))).map_err(|_| EIO)?;
            log();
            same!(umem.map_again(), EBUSY.to_errno());
            logged![DmaMap];
            umem.release();
            Ok(())
        })
    }

    #[test]
    fn a_reference_to_the_card_is_kept_while_it_is_mapped() -> Result {
        both(|can_lose| {
            let before = crate::fakes::device_refs();
            let mut request = range(can_lose, pages(PAGES));
            request.device = nic();
            let umem = get(request).map_err(|_| EIO)?;
            check!(crate::fakes::device_refs() > before);
            umem.stop();
            same!(crate::fakes::device_refs(), before);
            umem.release();
            Ok(())
        })
    }

    /// Registrations of one range are independent of each other.
    #[test]
    fn a_range_can_be_registered_more_than_once() -> Result {
        both(|can_lose| {
            let first = get(range(can_lose, pages(PAGES))).map_err(|_| EIO)?;
            let second = get(range(can_lose, pages(PAGES))).map_err(|_| EIO)?;
            same!(pins(), 2);
            first.release();
            same!(pins(), 1);
            same!(second.seen()?.len(), 1);
            second.release();
            Ok(())
        })
    }
}
