// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The parts that call neither neighbour: the arithmetic as kbuild compiles it, and what is made of the
//! kernel's own types.

use crate::{
    device::{
        Gpus,
        PciAddress, //
    },
    module::{
        LoadedModule,
        ModuleRef, //
    },
    params,
    pci::{
        gpu_address,
        gpu_of,
        BarFinder,
        BarMapping, //
    },
    ranges::{
        self,
        AddrRange,
        PageSize,
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

/// `count` pages with a break after each `every`.
fn broken(count: u64, every: u64) -> impl Iterator<Item = u64> + Clone {
    (0..count).map(move |i| (i + i / every) * KIB_64)
}

/// A page of nvidia.ko's.
fn page(addr: u64) -> AddrRange {
    AddrRange { addr, len: KIB_64 }
}

/// Why this lies in no BAR.
fn not_found(addr: u64, len: u64) -> Option<Reason> {
    BarFinder::default().find(AddrRange { addr, len }).err()
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
        let page = PageSize::KIB_64;
        for (gib, want) in rows([(1u64, 1), (4, 2), (80, 40)]) {
            let pages = ranges::pages(broken((gib << 30) / KIB_64, u64::MAX), page);
            let mut count = 0;
            SgLayout::new(VA, page, 1 << 31).entries(pages, |_| count += 1);
            same!(count, want);
        }
    }

    fn an_empty_table_is_refused(_: NoClient) {
        let layout = SgLayout::new(0, PageSize::KIB_64, 1 << 31);
        check!(SgTable::build(core::iter::empty(), layout).is_err());
    }

    /// `sg_alloc_table()` leaves numbers in the table when it fails half way.
    fn a_table_that_could_not_be_allocated_is_not_looked_at(_: NoClient) {
        fail_once(Call::SgAlloc, ENOMEM.to_errno())?;
        let pages = ranges::pages(broken(300, 1), PageSize::KIB_64);
        let table = SgTable::build(pages, SgLayout::new(0, PageSize::KIB_64, 1 << 31));
        same!(table.err(), Some(Reason::NoMemory));
    }

    fn only_a_pci_device_is_one(_: NoClient) {
        check!(Device::NULL.as_pci().is_none());
        check!(plain_device().as_pci().is_none());
        fake_nic_max_segment(0x1234_0000);
        let device = nic().as_pci();
        same!(device.as_ref().map(|d| d.max_segment()), Some(0x1234_0000));
        // One more reference, and both given back.
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
            // No address with a struct page, whatever calls it a BAR.
            (RAM, KIB_64),
        ]) {
            same!(not_found(addr, len), Some(Reason::NotInBar));
        }
    }

    /// The finder remembers a BAR: not for what does not lie in it.
    fn a_bar_that_is_remembered_is_still_looked_at(_: NoClient) {
        let mut finder = BarFinder::default();
        for (addr, want) in rows([
            (BAR, None),
            (BAR + BAR_LEN, Some(Reason::NotInBar)),
            (BAR + KIB_64, None),
            (RAM, Some(Reason::NotInBar)),
            (BAR + 2 * KIB_64, None),
        ]) {
            same!(finder.find(page(addr)).err(), want);
        }
    }

    /// From finder to finder, as from registration to registration.
    fn the_owner_of_a_bar_is_looked_for_once(_: NoClient) {
        let find = |addr| {
            let before = fake_pci_steps();
            (not_found(addr, KIB_64), fake_pci_steps() - before)
        };
        // Past the NIC, to the GPU.
        same!(find(BAR), (None, 2));
        same!(fake_remembered(), 1);
        for page in 0..4 {
            same!(find(BAR + page * KIB_64), (None, 0));
        }
        // What lies in no BAR of it is looked for in all, to the end.
        same!(find(BAR + BAR_LEN), (Some(Reason::NotInBar), 3));
        same!(find(BAR + 9 * KIB_64), (None, 0));
        same!(fake_remembered(), 1);
    }

    fn a_device_that_was_pulled_out_is_not_found_by_what_was_remembered(_: NoClient) {
        same!(not_found(BAR, KIB_64), None);
        fake_gpu_leaves();
        same!(not_found(BAR, KIB_64), Some(Reason::NotInBar));
        same!(gpu_of(&page(BAR)), Gpus::default());
    }

    fn a_gpu_has_the_number_and_the_address_of_its_device(_: NoClient) {
        same!(gpu_of(&page(BAR)), Gpus::one(0));
        // As the fakes have it: domain 3, bus 0x81, device 2, function 1.
        same!(gpu_address(0), Some(PciAddress(3 << 16 | 0x8111)));
        same!(gpu_address(1), None);
        let mut finder = BarFinder::default();
        same!(finder.gpus(), Gpus::default());
        check!(finder.find(page(BAR)).is_ok());
        same!(finder.gpus(), Gpus::one(0));
        // Memory is not looked for.
        let before = fake_pci_steps();
        same!(gpu_of(&page(RAM)), Gpus::default());
        same!(fake_pci_steps(), before);
    }

    fn a_mapping_that_fails_half_way_leaves_nothing_mapped(_: NoClient) {
        let device = nic().as_pci().ok_or(ENODEV)?;
        let mut bars = BarFinder::default();
        let runs = [0, 2, 4].map(|number| bars.find(page(BAR + number * KIB_64)));
        let runs = || runs.iter().filter_map(|run| run.as_ref().ok());
        for nth in rows(1..=3) {
            fail(Call::BarMap, nth, 1, EIO.to_errno())?;
            let refused = BarMapping::map(&device, runs()).err();
            let mapped = u64::from(nth - 1) * KIB_64;
            same!(refused, Some(Reason::MapResource { mapped }));
            nothing_mapped();
        }
        let mapping = BarMapping::map(&device, runs()).map_err(|_| EIO)?;
        same!(mapping.ranges().len(), 3);
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

    /// What of it is read goes with it.
    fn a_neighbour_that_goes_is_not_looked_at(_: NoClient) {
        let look = || LoadedModule::find(c"nvidia_peermem_kunit");
        check!(look().is_some_and(|found| found.version() == params::version()));
        same!(holds(), 0);
        with(|world| world.going = true);
        check!(look().is_none());
        check!(LoadedModule::find(c"none of that name").is_none());
    }
);
