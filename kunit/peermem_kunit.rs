// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! KUnit tests of the parts of `nvidia-peermem` that need neither neighbour, in the kernel: the
//! arithmetic as kbuild compiles it, and what `sys` makes of the kernel's own types.
//!
//! A module of its own: nothing of it is in the shipped one. Results:
//! `/sys/kernel/debug/kunit/peermem/results`.

#![allow(dead_code, reason = "the tests use a part of each file")]

use kernel::prelude::*;

#[path = "../rust-bindings/bindings.rs"]
mod c;
#[path = "../src/extents.rs"]
mod extents;
#[path = "../src/refusal.rs"]
mod refusal;
#[path = "../src/region.rs"]
mod region;
#[path = "../src/revocable.rs"]
mod revocable;
#[path = "../src/sys.rs"]
mod sys;

module! {
    type: PeerMemKunit,
    name: "nvidia-peermem-kunit",
    authors: ["peermem-rs contributors"],
    description: "KUnit tests of nvidia-peermem",
    license: "Dual BSD/GPL",
}

struct PeerMemKunit;

impl kernel::Module for PeerMemKunit {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        Ok(PeerMemKunit)
    }
}

#[kunit_tests(peermem)]
mod tests {
    use kernel::prelude::*;
    use kernel::scatterlist::SGTable;

    use super::extents::entries;
    use super::extents::page_runs;
    use super::extents::Entry;
    use super::extents::PageSize;
    use super::extents::Run;
    use super::extents::Span;
    use super::extents::SpanError;
    use super::refusal::Refusal;
    use super::region::Lock as _;
    use super::region::Table as _;
    use super::revocable::Monitor as _;
    use super::sys::BarFinder;
    use super::sys::Lock;
    use super::sys::ModuleHold;
    use super::sys::Monitor;
    use super::sys::PciDevice;
    use super::sys::Table;

    const KIB_64: u64 = 64 << 10;

    /// `count` pages with a break after each `every`.
    fn pages(count: u64, every: u64) -> impl Iterator<Item = u64> + Clone {
        (0..count).map(move |i| (i + i / every) * KIB_64)
    }

    #[test]
    fn a_span_covers_whole_pages() {
        let span = Span::covering(0x1_ffff, 2, PageSize::KIB_64, 1 << 40);
        assert!(span.map(|s| (s.start(), s.len())) == Ok((0x1_0000, 0x2_0000)));
        let wraps = Span::covering(u64::MAX, 1, PageSize::KIB_64, 1 << 40);
        assert!(wraps.err() == Some(SpanError::Wraps));
    }

    #[test]
    fn contiguous_memory_is_one_entry_for_each_two_gib() {
        let page = PageSize::KIB_64;
        for (gib, want) in [(1u64, 1), (4, 2), (80, 40)] {
            let runs = page_runs(pages((gib << 30) / KIB_64, u64::MAX), page);
            assert!(entries(runs, 0x7f00_0000_0000, page, 1 << 31).count() == want);
        }
    }

    /// Past the 128 entries that fit a page, where the list is chained.
    #[test]
    fn a_table_has_exactly_its_entries() -> Result {
        let page = PageSize::KIB_64;
        for count in [1u64, 2, 127, 128, 129, 1000, 5000] {
            let want = entries(page_runs(pages(count * 3, 3), page), 0, page, 1 << 31);
            let table = Table::build(want.clone()).map_err(|_| ENOMEM)?;
            let mut lent = table.lend();
            assert!(u64::from(lent.0.nents) == want.clone().count() as u64);
            assert!(lent.0.nents == lent.0.orig_nents);
            // SAFETY: `lent` is the head of `table`, which outlives the borrow.
            let list = unsafe { SGTable::from_raw(&mut lent.0) };
            let got = list.iter().map(|sg| (sg.dma_address(), sg.dma_len()));
            assert!(got.eq(want.map(|Entry { addr, len }| (addr, u64::from(len)))));
        }
        Ok(())
    }

    #[test]
    fn an_empty_table_is_refused() {
        assert!(Table::build(core::iter::empty()).is_err());
    }

    #[test]
    fn no_device_is_no_pci_device() {
        // SAFETY: NULL is allowed.
        assert!(unsafe { PciDevice::from_device(core::ptr::null_mut()) }.is_none());
    }

    #[test]
    fn ram_is_no_bar() {
        // The first megabyte of RAM, where no BAR lies on any machine.
        let run = Run {
            addr: 0x1000,
            len: 1,
        };
        assert!(BarFinder::default().find(run).err() == Some(Refusal::NotInBar));
    }

    #[test]
    fn locks_guard_and_monitors_wait_no_longer_than_they_must() -> Result {
        let lock = Lock::new(1).map_err(|_| ENOMEM)?;
        lock.with(|n| *n += 1);
        assert!(lock.with(|n| *n) == 2);
        let monitor = Monitor::new(false).map_err(|_| ENOMEM)?;
        monitor.with(|done| *done = true);
        monitor.wait_while(|done| !*done);
        monitor.notify_all();
        Ok(())
    }

    #[test]
    fn a_hold_keeps_the_module() {
        assert!(ModuleHold::try_new().is_some());
    }
}
