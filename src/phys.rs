// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The physical addresses of pinned GPU memory.

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
/// The ranges are stored as a scatter list whose DMA addresses are the physical addresses. If
/// nothing translates DMA addresses, ib_core gets that list.
///
/// # Invariants
///
/// The entries lie in BARs. An entry that has a `struct page` is peer-to-peer DMA memory. The
/// layout of the entries is that of [`SgLayout`] for a device without a segment limit.
pub(crate) struct PhysRanges {
    pub(crate) table: SgTable,
    /// A range in one BAR that contains all entries, if there is one. The range may be somewhat
    /// larger than the memory.
    pub(crate) bounds: Option<AddrRange>,
}

/// Maximum number of pages in a batch. A callback waits for the current batch, and every GPU waits
/// for the callback.
const BATCH: usize = 4096;

/// Builds a [`PhysRanges`], pin by pin.
pub(crate) struct Reader<'a, 'b> {
    layout: SgLayout,
    bars: BarFinder,
    table: &'a mut SgBuilder<'b>,
    /// The entry at which [`Reader::pages`] stopped. The entry is added between two batches.
    pending: Option<AddrRange>,
}

impl Reader<'_, '_> {
    /// Announces that the next pages begin in `bar`, unless `bar` is `None`. The current entry may
    /// lie in the previous BAR, which is then looked up again. Ranges over several BARs are rare.
    pub(crate) fn begin_in(&mut self, bar: Option<Bar>) {
        if let Some(bar) = bar {
            self.bars.enter(bar);
        }
    }

    /// Reads the addresses of the next pages from page number `from` on. `addr` returns the address
    /// of a page. Returns the page number at which the next batch begins ([`Reader::batches`]), or
    /// `None` if no page is left. Does not allocate or lock.
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
            let is_added = bars.lookup_here(entry) && table.push_within(entry);
            if !is_added {
                self.pending = Some(entry);
            }
            is_added
        });
        let left = left.len().saturating_add(later.len());
        (left > 0).then(|| pages.len().saturating_sub(left))
    }

    /// Calls `batch` with the first page number of each batch, beginning with 0, until `batch`
    /// returns `None`. Stops at the first memory that does not lie in any BAR, or that has a
    /// `struct page` and is not peer-to-peer DMA memory. May sleep between the calls.
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
            self.bars.lookup(entry)?;
            self.table.push(entry);
        }
        Ok(())
    }

    /// Returns the bounding range and the GPUs of all pages.
    fn finish(mut self) -> Result<(Option<AddrRange>, Gpus), Reason> {
        self.pending = self.layout.finish();
        self.settle()?;
        Ok((self.bars.bounds(), self.bars.gpus()))
    }
}

impl PhysRanges {
    /// Returns the ranges that `read` reads for virtual addresses from `va` on, and their GPUs.
    /// Fails unless all ranges lie in BARs.
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
        // INVARIANT: The reader returned no error, so all entries lie in BARs, and entries with a
        // `struct page` are peer-to-peer DMA memory.
        Ok((PhysRanges { table, bounds }, gpus))
    }

    /// Returns the ranges, split into the steps in which they are mapped.
    pub(crate) fn steps(&self) -> impl Iterator<Item = AddrRange> + '_ {
        self.table.ranges().flat_map(ranges::steps)
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.table
            .ranges()
            .fold(0, |len: u64, range| len.saturating_add(range.len))
    }
}
