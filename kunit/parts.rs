// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of scatter lists, PCI devices and references to modules. These parts of the module call
//! neither nvidia.ko nor ib_core.

use kernel::error::to_result;

use crate::{
    device::{
        Gpus,
        PciAddress,
        Reach, //
    },
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
    phys::PhysRanges,
    ranges::AddrRange,
    reason::Reason,
    setup::*,
    sg::SgTable, //
};

/// Returns the range of one of nvidia.ko's pages.
fn page(addr: u64) -> AddrRange {
    AddrRange { addr, len: KIB_64 }
}

/// Returns the GPU whose BAR contains a page.
fn gpu_of(page: &AddrRange) -> Gpus {
    bar_of_page(page).map_or(Gpus::default(), |bar| bar.gpu)
}

/// Returns the reason why [`BarFinder`] refuses these ranges.
fn refused(ranges: &[AddrRange]) -> Option<Reason> {
    let mut bars = BarFinder::default();
    ranges.iter().find_map(|range| bars.lookup(*range).err())
}

fn not_found(addr: u64, len: u64) -> Option<Reason> {
    refused(&[AddrRange { addr, len }])
}

/// Builds a scatter list with `count` entries.
fn table(count: u64) -> Result<SgTable, Reason> {
    let (table, ()) = SgTable::build(|table| {
        for addr in 0..count {
            table.push(AddrRange { addr, len: 1 });
        }
        Ok(())
    })?;
    Ok(table)
}

suite!(
    mod peermem_parts;

    /// A page of memory holds 128 entries, and a longer list is a chain of pages. ib_core walks the
    /// allocated entries, but counts the used entries. The two numbers must therefore be equal.
    fn a_list_has_as_many_entries_as_were_added() {
        check!(table(0).is_err());
        for count in rows([
            1, 2, 8, 9, 31, 32, 64, 127, 128, 129, 159, 160, 254, 255, 256, 1000, 5000,
        ]) {
            let table = table(count).map_err(|_| ENOMEM)?;
            check!(table.ranges().map(|range| range.addr).eq(0..count));
            let head = table.head().0;
            // SAFETY: The table keeps its entries.
            let chained = unsafe { sg_nents(head.sgl) };
            // CAST: The numbers are small.
            same!(
                (head.nents, head.orig_nents, chained),
                (count as u32, count as u32, count as c_int)
            );
        }
    }

    /// If `sg_alloc_table()` fails half way, it leaves entry counts in the table.
    fn a_table_that_could_not_be_allocated_is_not_read() {
        // The first three allocations are for one chunk each. The fourth allocation replaces the
        // last chunk by a chunk of the exact length.
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
                    table.push(AddrRange { addr, len: 1 });
                }
                Err(Reason::Revoked)
            });
            same!(table.err(), Some(Reason::Revoked));
        }
    }

    fn only_a_memory_bar_that_has_addresses_is_a_bar() {
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
        // [`BarFinder`] refuses an address with a `struct page` that is not peer-to-peer DMA
        // memory.
        same!(not_found(RAM, KIB_64), Some(Reason::HasStructPages));
        for (addr, ends) in rows([
            (BAR, false),
            (BAR + BAR_LEN - 2 * KIB_64, false),
            (BAR + BAR_LEN - KIB_64, true),
            // Another BAR begins directly behind this page.
            (THIRD - KIB_64, true),
            (IO, true),
        ]) {
            same!(ends_bar(&page(addr)), ends);
        }
    }

    /// nvidia-uvm turns a BAR into peer-to-peer DMA memory on hosts that use GPUDirect Storage.
    fn a_bar_may_be_peer_to_peer_dma_memory() {
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

    /// [`BarFinder`] remembers the last BAR, and reuses the result only for addresses inside that
    /// BAR.
    fn a_remembered_bar_is_still_checked() {
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

    fn a_bounding_range_contains_all_memory_and_lies_in_one_bar() {
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

    /// [`PhysRanges::read`] joins memory on both sides of the boundary between two BARs into one
    /// range.
    fn bars_side_by_side_are_two() {
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

    fn a_gpu_that_comes_back_is_another_device_with_the_same_number() {
        to_result(fake_more_gpus(1))?;
        let (gpu, nic) = (gpu_of(&page(BAR)), nic()?);
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
        same!(not_found(BAR, KIB_64), Some(Reason::NotInBar));
        same!(gpu_of(&page(BAR)), Gpus::default());
        same!(fake_remembered(), 1);
        same!(gpu_of(&page(MORE)), Gpus::one(1));
    }

    /// A [`BarFinder`] reuses the results of earlier finders, and so of earlier registrations.
    ///
    /// Only 64 GPUs have a number. The module searches for each additional GPU every time, and
    /// remembers nothing about such a GPU.
    fn each_of_64_gpus_is_looked_for_once() {
        to_result(fake_more_gpus(Gpus::MOST + 2))?;
        let nic = nic()?;
        let find = |number: u32| {
            let bar = MORE + u64::from(number) * SMALL_LEN;
            let before = fake_pci_steps();
            same!(not_found(bar, KIB_64), None);
            let steps = fake_pci_steps() - before;
            (gpu_of(&page(bar)), steps)
        };
        // A search looks at the NIC, the GPU with the large BAR, the GPUs before this one, and this
        // GPU.
        for number in 0..Gpus::MOST {
            same!(find(number), (Gpus::one(number), number + 3));
            remember(Gpus::one(number), &nic, Reach::AsOurs);
        }
        same!(fake_remembered(), 2 * Gpus::MOST);
        for number in 0..Gpus::MOST {
            same!(find(number), (Gpus::one(number), 0));
            same!(recall(Gpus::one(number), &nic), Some(Reach::AsOurs));
        }
        // The fakes define this address: domain 3, bus 0x81, device 3, function 0.
        same!(gpu_address(0), Some(PciAddress(3 << 16 | 0x8118)));
        same!(gpu_address(Gpus::MOST), None);
        for number in rows([Gpus::MOST, Gpus::MOST + 1, Gpus::MOST]) {
            same!(find(number), (Gpus::default(), number + 3));
            remember(Gpus::default(), &nic, Reach::Denied);
            same!(recall(Gpus::default(), &nic), None);
        }
        same!(fake_remembered(), 2 * Gpus::MOST);
        same!(find(0), (Gpus::one(0), 0));
        // A search for an address in no BAR visits all devices. The module stops at the first page
        // that is in no BAR. A list of such pages therefore costs one search. For memory with
        // struct pages, the module does not search.
        let (before, nowhere) = (fake_pci_steps(), [UNASSIGNED; 100]);
        let refused = PhysRanges::read(VA, |reader| read(reader, &nowhere));
        same!(refused.err(), Some(Reason::NotInBar));
        same!(fake_pci_steps() - before, Gpus::MOST + 5);
        same!(gpu_of(&page(RAM)), Gpus::default());
        same!(fake_pci_steps() - before, Gpus::MOST + 5);
    }

    fn an_answer_is_forgotten_when_one_of_its_two_devices_is_removed() {
        let (first, gpu) = (nic()?, gpu_of(&page(BAR)));
        same!(recall(gpu, &first), None);
        for answer in rows([Reach::AsOurs, Reach::Otherwise, Reach::Denied]) {
            remember(gpu, &first, answer);
            same!(recall(gpu, &first), Some(answer));
            same!(fake_remembered(), 2);
        }
        to_result(fake_nic_is_replaced())?;
        let second = nic()?;
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

    fn a_reference_keeps_the_module_until_it_is_dropped() {
        let hold = ModuleRef::try_new();
        check!(hold.is_some());
        same!(holds(), 1);
        drop(hold);
        same!(holds(), 0);
        with(|world| world.going = true);
        check!(ModuleRef::try_new().is_none());
    }

    /// The data of a loaded module disappears when that module is unloaded.
    fn a_module_that_is_being_unloaded_is_not_read() {
        let look = || LoadedModule::find(c"nvidia_peermem_kunit");
        check!(look().is_some_and(|found| found.version() == params::version()));
        same!(holds(), 0);
        with(|world| world.going = true);
        check!(look().is_none());
        check!(LoadedModule::find(c"none of that name").is_none());
    }
);
