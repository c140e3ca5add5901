// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Where pinned GPU memory is, in physical addresses.

use crate::{
    device::Gpus,
    pci::BarFinder,
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

/// Makes a [`PhysRanges`], pin by pin.
pub(crate) struct Reader<'a, 'b> {
    layout: SgLayout,
    bars: BarFinder,
    table: &'a mut SgBuilder<'b>,
}

impl Reader<'_, '_> {
    /// The next pages, whose addresses `addr` finds. May sleep.
    #[inline(always)]
    pub(crate) fn pages<T>(&mut self, pages: &[T], addr: impl Fn(&T) -> u64, page: PageSize) {
        let (bars, table) = (&mut self.bars, &mut *self.table);
        self.layout.pages(pages, addr, page, |entry| {
            if bars.lookup(&entry.range()) {
                table.push(entry);
            }
        });
    }

    /// The bounding range and the GPUs of all.
    fn finish(self) -> Result<(Option<AddrRange>, Gpus), Reason> {
        let (mut bars, table) = (self.bars, self.table);
        self.layout.finish(|entry| {
            if bars.lookup(&entry.range()) {
                table.push(entry);
            }
        });
        Ok((bars.bounds()?, bars.gpus()))
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
