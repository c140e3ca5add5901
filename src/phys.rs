// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Where pinned GPU memory is, in physical addresses.

use crate::{
    device::Gpus,
    pci::{
        Bar,
        BarFinder, //
    },
    ranges::{
        self,
        AddrRange,
        PageSize,
        SgEntry,
        SgLayout, //
    },
    reason::Reason,
    sg::{
        SgBuilder,
        SgTable, //
    }, //
};

/// The physical ranges behind a registration, in the order of its virtual addresses.
///
/// Kept as a scatter list, with physical addresses for DMA addresses: where nothing translates, it is the list that ib_core
/// gets.
///
/// # Invariants
///
/// The entries lie in BARs, and have no `struct page` other than of peer-to-peer DMA memory. They are as [`SgLayout`] makes
/// them for a device without limits.
pub(crate) struct PhysRanges {
    table: SgTable,
    /// In one BAR, and with all of the entries in it, if there is one.
    bounds: Option<AddrRange>,
}

/// Most pages in a batch. A callback waits for the batch under way, and with it every GPU.
const BATCH: usize = 4096;

/// Makes a [`PhysRanges`], pin by pin.
pub(crate) struct Reader<'a, 'b> {
    layout: SgLayout,
    bars: BarFinder,
    table: &'a mut SgBuilder<'b>,
    /// An entry that is to be added between two batches.
    pending: Option<SgEntry>,
}

impl Reader<'_, '_> {
    /// The next pages begin in `bar`, if that was found a moment ago. The entry under way may lie in the BAR before, which is
    /// then looked for once more: a range over several BARs is rare.
    pub(crate) fn begin_in(&mut self, bar: Option<Bar>) {
        if let Some(bar) = bar {
            self.bars.enter(bar);
        }
    }

    /// Reads the addresses of the next pages, beginning with page number `from`; `addr` returns the address of one. Returns
    /// the number of the page with which the next of the [`Reader::batches`] begins, if any is left. Neither allocates nor
    /// takes a lock.
    #[inline(always)]
    pub(crate) fn pages<T>(
        &mut self,
        pages: &[T],
        from: usize,
        addr: impl Fn(&T) -> u64,
        page: PageSize,
    ) -> Option<usize> {
        let left = pages.get(from..)?;
        let (now, later) = left.split_at_checked(BATCH).unwrap_or((left, &[]));
        let (bars, table) = (&mut self.bars, &mut *self.table);
        let left = self.layout.pages(now, addr, page, |entry| {
            let is_added = bars.lookup_here(&entry.range()) && table.push_within(entry);
            if !is_added {
                self.pending = Some(entry);
            }
            is_added
        });
        let left = left.len().saturating_add(later.len());
        (left > 0).then(|| pages.len().saturating_sub(left))
    }

    /// Calls `batch` with the number of the page to go on with, first with 0, until it returns `None`. Stops at the first
    /// memory that is not in a BAR as it should be. May sleep between the calls.
    #[inline(always)]
    pub(crate) fn batches(
        &mut self,
        mut batch: impl FnMut(&mut Self, usize) -> Result<Option<usize>, Reason>,
    ) -> Result<(), Reason> {
        let mut next = Some(0);
        while let Some(from) = next {
            next = batch(self, from)?;
            self.settle()?;
        }
        Ok(())
    }

    /// Adds the entry at which [`Reader::pages`] stopped, if there is one.
    fn settle(&mut self) -> Result<(), Reason> {
        if let Some(entry) = self.pending.take() {
            self.bars.lookup(entry.range())?;
            self.table.push(entry);
        }
        Ok(())
    }

    /// The bounding range and the GPUs of all.
    fn finish(mut self) -> Result<(Option<AddrRange>, Gpus), Reason> {
        self.pending = self.layout.finish();
        self.settle()?;
        Ok((self.bars.bounds(), self.bars.gpus()))
    }
}

impl PhysRanges {
    /// What `read` reads, for virtual addresses from `va` on, and whose BARs it is in. Refused unless all of it is in BARs.
    #[inline(always)]
    pub(crate) fn read(
        va: u64,
        read: impl FnOnce(&mut Reader<'_, '_>) -> Result<(), Reason>,
    ) -> Result<(Self, Gpus), Reason> {
        let (table, (bounds, gpus)) = SgTable::build(|table| {
            let mut reader = Reader {
                layout: SgLayout::new(va, PageSize::KIB_64, u32::MAX),
                bars: BarFinder::default(),
                table,
                pending: None,
            };
            read(&mut reader)?;
            reader.finish()
        })?;
        // INVARIANT: All of it is where it should be, or the above is an error.
        Ok((PhysRanges { table, bounds }, gpus))
    }

    /// From the lowest address to the highest, or somewhat further, if that is in one BAR.
    pub(crate) fn bounds(&self) -> Option<AddrRange> {
        self.bounds
    }

    /// As far as they are mapped at once.
    pub(crate) fn steps(&self) -> impl Iterator<Item = AddrRange> + '_ {
        self.table.ranges().flat_map(ranges::steps)
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.table
            .ranges()
            .fold(0, |len: u64, range| len.saturating_add(range.len))
    }

    /// As a scatter list, whose DMA addresses are the physical ones.
    pub(crate) fn into_table(self) -> SgTable {
        self.table
    }
}
