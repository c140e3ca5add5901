// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the module's checks of the page tables and DMA mappings that nvidia.ko returns.

use crate::{
    device::Gpus,
    nv::{
        retry,
        PersistentPin, //
    },
    phys::PhysRanges,
    ranges::{
        PageSize,
        Span, //
    },
    reason::Reason,
    setup::*, //
};

/// Pins `count` pages. nvidia.ko returns a valid table that `change` has modified.
fn pin(count: u64, change: impl FnOnce(&mut TableForm)) -> Result<PersistentPin, Reason> {
    with(|world| {
        world.table = TableForm::GOOD;
        change(&mut world.table);
    });
    let span = Span::covering(VA, count * KIB_64, PageSize::KIB_64, 1 << 40)?;
    PersistentPin::pin(span)
}

/// Returns the page size of a pin of four pages, and puts the pin.
fn page_size(change: impl FnOnce(&mut TableForm)) -> Result<PageSize, Reason> {
    log();
    let page = pin(4, change).map(|pin| pin.page_size());
    logged![PinPersistent, PutPersistent];
    page
}

suite!(
    mod peermem_provider;

    fn a_table_is_of_a_known_version_with_known_pages() {
        for version in rows([0x0001_0002, 0x0001_0003, 0x0002_0000, 0x0002_0007]) {
            same!(
                page_size(|form| form.version = version),
                Ok(PageSize::KIB_64)
            );
        }
        for version in rows([0, 0x0001_0001, 0x0000_0002, 0x0003_0000, u32::MAX]) {
            let refused = Err(Reason::TableVersion(version));
            same!(page_size(|form| form.version = version), refused);
        }
        same!(page_size(|form| form.page_size = 2), Ok(PageSize::KIB_128));
        for size in rows([0, 3, u32::MAX]) {
            let refused = Err(Reason::TablePageSize(size));
            same!(page_size(|form| form.page_size = size), refused);
        }
    }

    fn a_table_has_exactly_the_pages_of_the_range() {
        for surplus in rows([-4, -1, 1, 100]) {
            // CAST: The numbers are small.
            let have = (4 + surplus) as u32;
            let refused = Err(Reason::Entries { have, want: 4 });
            same!(page_size(|form| form.surplus = surplus), refused);
        }
        let refused = Err(Reason::Entries { have: 0, want: 4 });
        same!(page_size(|form| form.no_pages = true), refused);
        let odd = pin(3, |form| (form.page_size, form.surplus) = (2, 1));
        same!(odd.err(), Some(Reason::TablePageSize(2)));
    }

    fn without_a_table_nothing_is_put() {
        fail_once(Call::PinPersistent, EIO.to_errno())?;
        same!(pin(4, |_| ()).err(), Some(Reason::Pin(EIO.to_errno())));
        same!(
            pin(4, |form| form.no_table = true).err(),
            Some(Reason::Pin(0))
        );
        logged![PinPersistent, PinPersistent];
        forget_pins();
    }

    /// A page table of version 1.2 has no flags.
    fn memory_that_cpus_cache_is_not_read() {
        for (version, flags, cacheable) in rows([
            (0x0002_0000, 1, true),
            (0x0002_0000, u32::MAX, true),
            // The module ignores unknown flags.
            (0x0002_0000, u32::MAX - 1, false),
            (0x0001_0002, u32::MAX, false),
        ]) {
            let pin = pin(4, |form| (form.version, form.flags) = (version, flags));
            let pin = pin.map_err(|_| EIO)?;
            let gpus = if cacheable {
                Gpus::default()
            } else {
                Gpus::one(0)
            };
            same!(pin.gpus(), gpus);
            let read = PhysRanges::read(VA, |reader| pin.read(reader));
            same!(read.err(), cacheable.then_some(Reason::CpuCacheable));
        }
    }

    /// If nvidia.ko returns a mapping that the module refuses, the module unmaps it.
    fn a_mapping_has_a_known_version_and_the_pages_of_its_table() {
        type Change = fn(&mut MappingForm);
        let nic = nic()?;
        let refused = |change: Change| {
            let mut pin = pin(4, |_| ())?;
            with(|world| {
                world.mapping = MappingForm::GOOD;
                change(&mut world.mapping);
            });
            log();
            let mapped = pin.map(&nic);
            if mapped.is_ok() {
                let want = (0..4).map(|page| CONTIGUOUS(page) + DMA_OFFSET);
                check!(pin.addresses().iter().copied().eq(want));
                same!(pin.map(&nic), Err(Reason::MappedTwice));
            } else {
                check!(pin.addresses().is_empty());
            }
            drop(pin);
            logged![Map, Unmap, PutPersistent];
            mapped
        };
        for (change, want) in rows([
            ((|_| ()) as Change, Ok(())),
            (|form| form.version = 0x0002_0004, Ok(())),
            (
                |form| form.version = 0x0002_0002,
                Err(Reason::MappingVersion(0x0002_0002)),
            ),
            (
                |form| form.version = 0x0003_0003,
                Err(Reason::MappingVersion(0x0003_0003)),
            ),
            (
                |form| form.version = 0x0001_0003,
                Err(Reason::MappingVersion(0x0001_0003)),
            ),
            (|form| form.page_size = 0, Err(Reason::MappingPageSize(0))),
            (|form| form.page_size = 2, Err(Reason::MappingPageSize(2))),
            (
                |form| form.surplus = 1,
                Err(Reason::Entries { have: 5, want: 4 }),
            ),
            (
                |form| form.surplus = -1,
                Err(Reason::Entries { have: 3, want: 4 }),
            ),
            (
                |form| form.no_addresses = true,
                Err(Reason::Entries { have: 0, want: 4 }),
            ),
        ]) {
            same!(refused(change), want);
        }
        let mut pin = pin(4, |_| ()).map_err(|_| EIO)?;
        with(|world| world.mapping.no_mapping = true);
        same!(pin.map(&nic), Err(Reason::Map(0)));
        fail_once(Call::Map, EIO.to_errno())?;
        same!(pin.map(&nic), Err(Reason::Map(EIO.to_errno())));
        log();
        drop(pin);
        logged![PutPersistent];
    }

    /// `ENOMEM` means that the put has done nothing, so the module tries again.
    fn a_put_that_fails_with_enomem_for_ever_is_given_up() {
        for (code, want) in rows([(ENOMEM, 11), (EIO, 1)]) {
            let mut puts = 0;
            let ret = retry(|| {
                puts += 1;
                code.to_errno()
            });
            same!((ret, puts), (code.to_errno(), want));
        }
    }
);
