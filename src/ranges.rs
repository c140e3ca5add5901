// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Page arithmetic: from a requested range to GPU pages, and from their addresses to the entries of
//! a scatter list.
//!
//! Uses `core` alone, so that the lines that run in the kernel are also compiled by cargo on the
//! host (`tests/host`). Every page size is a value: the provider's comes with each page table, and
//! kernels with pages of 4, 16 and 64 KiB are all real.

use core::num::NonZeroU32;

use super::reason::Reason;

/// Where a scatter-list entry ends at the latest: at a multiple of this virtual address.
///
/// The length of an entry is 32 bits wide. Cut at 2 GiB, and not at the largest multiple of a page
/// below 4 GiB, because `ib_umem_find_best_pgsz()` of older kernels takes the end of each entry for
/// a border of the HCA's pages.
pub(crate) const MAX_ENTRY: u64 = 1 << 31;

/// Size of a provider's page in bytes: a power of two of at most [`MAX_ENTRY`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct PageSize(NonZeroU32);

impl PageSize {
    /// What nvidia.ko wants a pinned range to be aligned to.
    pub(crate) const KIB_64: PageSize = PageSize::of_shift(16);
    /// The larger page that the interface knows.
    pub(crate) const KIB_128: PageSize = PageSize::of_shift(17);

    /// The page of `1 << shift` bytes, for constants. Inline, so that its panic is in no module.
    #[inline]
    pub(crate) const fn of_shift(shift: u32) -> PageSize {
        assert!(shift <= 31);
        match NonZeroU32::new(1 << shift) {
            Some(bytes) => PageSize(bytes),
            None => unreachable!(),
        }
    }

    /// In bytes.
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.0.get())
    }

    /// That of a region whose pins have pages of these sizes: what ib_core trims by must divide every
    /// entry.
    pub(crate) fn of_all(sizes: impl Iterator<Item = PageSize>) -> PageSize {
        sizes.min().unwrap_or(PageSize::KIB_64)
    }

    fn mask(self) -> u64 {
        self.bytes() - 1
    }
}

/// A range of GPU virtual addresses, in whole pages.
///
/// # Invariants
///
/// `len` is not zero, and `start + len` does not overflow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Span {
    start: u64,
    len: u64,
}

impl Span {
    /// The whole pages that `[addr, addr + len)` touches; `max` bounds their bytes.
    pub(crate) fn covering(addr: u64, len: u64, page: PageSize, max: u64) -> Result<Span, Reason> {
        if len == 0 {
            return Err(Reason::Empty);
        }
        let start = addr & !page.mask();
        let end = addr
            .checked_add(len)
            .and_then(|end| end.checked_add(page.mask()))
            .ok_or(Reason::Wraps)?
            & !page.mask();
        // INVARIANT: `end > addr >= start`, for `len` is not zero and rounding up did not wrap.
        let len = end - start;
        if len > max {
            return Err(Reason::TooLong);
        }
        Ok(Span { start, len })
    }

    /// First address.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// What of `[from, to)` lies in it; `None` if nothing does. In whole pages of a size where these two
    /// and the span are.
    pub(crate) fn part(&self, from: u64, to: u64) -> Option<Span> {
        let start = self.start.max(from);
        let len = self
            .start
            .saturating_add(self.len)
            .min(to)
            .checked_sub(start)?;
        // INVARIANT: It ends where the span does, or before.
        (len > 0).then_some(Span { start, len })
    }

    /// The number of `page`s; `None` if the span does not consist of whole ones.
    pub(crate) fn pages(&self, page: PageSize) -> Option<u64> {
        ((self.start | self.len) & page.mask() == 0).then(|| self.len / page.bytes())
    }
}

/// A contiguous range of physical or DMA addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct AddrRange {
    /// First address.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// How much is mapped for a device at once, at most. An IOMMU that translates fills page tables for all of it in one go,
/// from memory that may not be waited for: 2 MiB of tables, where it has no larger pages.
pub(crate) const MAX_STEP: u64 = 1 << 30;

/// The pages at `addrs`, each of them a range of one `page`.
pub(crate) fn pages(
    addrs: impl Iterator<Item = u64>,
    page: PageSize,
) -> impl Iterator<Item = AddrRange> {
    let len = page.bytes();
    addrs.map(move |addr| AddrRange { addr, len })
}

/// Joins ranges that continue each other, and calls `each` with what comes of it: ranges that are not empty.
///
/// A walk from the inside, as all that follow: one through iterators in iterators costs many times the
/// instructions for each page.
pub(crate) fn join(ranges: impl Iterator<Item = AddrRange>, mut each: impl FnMut(AddrRange)) {
    // The range in progress: its first address, and the one behind it. None if they are the same. Behind the
    // last address is the first.
    let (mut start, mut end) = (0, 0);
    ranges.for_each(|range| {
        if range.addr != end {
            if start != end {
                each(closed(start, end));
            }
            start = range.addr;
            end = range.addr.wrapping_add(range.len);
        } else {
            end = end.wrapping_add(range.len);
        }
    });
    if start != end {
        each(closed(start, end));
    }
}

/// Joins ranges as [`join`], no further than [`MAX_STEP`], and calls `each` with what comes of it.
pub(crate) fn steps(ranges: impl Iterator<Item = AddrRange>, mut each: impl FnMut(AddrRange)) {
    join(ranges, |mut range| loop {
        let len = range.len.min(MAX_STEP);
        each(AddrRange { len, ..range });
        range.len -= len;
        if range.len == 0 {
            break;
        }
        range.addr = range.addr.wrapping_add(len);
    });
}

/// The range from `start` to `end`, which may lie behind the last address.
fn closed(start: u64, end: u64) -> AddrRange {
    AddrRange {
        addr: start,
        len: end.wrapping_sub(start),
    }
}

/// One entry of a scatter list.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub(crate) struct SgEntry {
    /// DMA address.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u32,
}

/// An entry of at most a window.
fn entry(addr: u64, len: u64) -> SgEntry {
    SgEntry {
        addr,
        // CAST: At most `MAX_ENTRY`.
        len: len as u32,
    }
}

/// How ranges become the entries of a scatter list.
#[derive(Clone, Copy)]
pub(crate) struct SgLayout {
    /// The virtual address that the first range backs.
    va: u64,
    /// A power of two of at most [`MAX_ENTRY`].
    window: u64,
}

impl SgLayout {
    /// For ranges that back the virtual addresses from `va` on, and a device that takes segments of at most
    /// `max_segment` bytes.
    ///
    /// An entry ends at a multiple of a window: [`MAX_ENTRY`], or the largest power of two that the
    /// device takes where that is less. Borders at round virtual addresses leave the HCA the largest
    /// page size that there is. A window is never smaller than `page`, whatever the device says: ib_core
    /// trims the first entry by up to a page, and NVIDIA's module too hands out whole pages.
    pub(crate) fn new(va: u64, page: PageSize, max_segment: u32) -> SgLayout {
        let segment = match max_segment.checked_ilog2() {
            Some(shift) => 1 << shift,
            None => 0,
        };
        SgLayout {
            va,
            window: page.bytes().max(segment).min(MAX_ENTRY),
        }
    }

    /// Joins `ranges`, and calls `each` with the entries for them.
    pub(crate) fn entries(
        self,
        ranges: impl Iterator<Item = AddrRange>,
        mut each: impl FnMut(SgEntry),
    ) {
        // Bytes to the end of the window.
        let mut left = self.window - (self.va & (self.window - 1));
        join(ranges, |mut range| {
            while range.len > left {
                each(entry(range.addr, left));
                range.addr = range.addr.wrapping_add(left);
                range.len -= left;
                left = self.window;
            }
            each(entry(range.addr, range.len));
            left -= range.len;
            if left == 0 {
                left = self.window;
            }
        });
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "ranges/tests.rs"]
mod tests;
