// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Page arithmetic: from a requested range to GPU pages, and from their addresses to the entries of
//! a scatter list.
//!
//! Uses `core` alone, so that the lines that run in the kernel are also compiled by cargo on the
//! host (`tests/host`). Every page size is a value: the provider's comes with each page table, and
//! kernels with pages of 4, 16 and 64 KiB are all real.

use core::num::{
    NonZeroU32,
    NonZeroU64, //
};

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

    /// How many of it are in so many bytes, the rest left out.
    fn whole_in(self, bytes: u64) -> u64 {
        // By what is not zero for the compiler, too: a panic is in no module.
        bytes / NonZeroU64::from(self.0)
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
        ((self.start | self.len) & page.mask() == 0).then(|| page.whole_in(self.len))
    }
}

/// A contiguous range of physical or DMA addresses.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct AddrRange {
    /// First address.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u64,
}

impl AddrRange {
    /// Does all of `other` lie in it?
    #[inline(always)]
    pub(crate) fn contains(&self, other: &AddrRange) -> bool {
        // That of an address below is greater than any length.
        let offset = other.addr.wrapping_sub(self.addr);
        offset < self.len && other.len <= self.len - offset
    }

    /// From the multiple of `round`, a power of two, at or below it to that at or above its end, as far as `within` goes,
    /// which contains it. None of these is empty.
    pub(crate) fn widened(&self, round: u64, within: &AddrRange) -> AddrRange {
        let first = (self.addr & !(round - 1)).max(within.addr);
        AddrRange::between(first, (self.last() | (round - 1)).min(within.last()))
    }

    /// What lies in `other` of it, which begins there.
    pub(crate) fn start_in(&self, other: &AddrRange) -> AddrRange {
        let left = other.len.saturating_sub(self.addr.wrapping_sub(other.addr));
        AddrRange {
            len: self.len.min(left),
            ..*self
        }
    }

    /// From the lowest address of both to the highest. Neither is empty.
    pub(crate) fn bounding(&self, other: &AddrRange) -> AddrRange {
        AddrRange::between(self.addr.min(other.addr), self.last().max(other.last()))
    }

    fn between(first: u64, last: u64) -> AddrRange {
        AddrRange {
            addr: first,
            len: last.wrapping_sub(first).wrapping_add(1),
        }
    }

    /// Its last address, unless it is empty.
    pub(crate) fn last(&self) -> u64 {
        self.addr.wrapping_add(self.len).wrapping_sub(1)
    }
}

/// How much is mapped for a device at once, at most. An IOMMU that translates fills page tables for all of it in one go,
/// from memory that may not be waited for: 2 MiB of tables, where it has no larger pages.
pub(crate) const MAX_STEP: u64 = 1 << 30;

/// `range` in parts that end at multiples of [`MAX_STEP`].
pub(crate) fn steps(mut range: AddrRange) -> impl Iterator<Item = AddrRange> {
    core::iter::from_fn(move || {
        let len = range.len.min(MAX_STEP - (range.addr & (MAX_STEP - 1)));
        let step = AddrRange { len, ..range };
        range.addr = range.addr.wrapping_add(len);
        range.len -= len;
        (len > 0).then_some(step)
    })
}

/// From so many bytes on an HCA has larger pages for memory whose DMA addresses are congruent to its virtual ones.
const LARGE: u64 = 1 << 21;

/// Length of a run of contiguous DMA addresses from which an HCA page can be larger than 2 GiB.
///
/// ib_core of OFED 25.07 and 25.10 steps through such pages with 32 bits, and then gives the HCA wrong addresses: see
/// `docs/dma.md`.
pub(crate) const LONG_RUN: u64 = 1 << 32;

/// By how much a range of DMA addresses for `len` bytes is longer than these, for [`iova_offset`]: a power of two, or 0. The
/// kernel promises no more of the beginning of such a range than that a page of the IOMMU's begins there.
pub(crate) fn iova_slack(len: u64) -> u64 {
    match len.min(MAX_ENTRY).checked_ilog2() {
        Some(shift) if len >= LARGE => 1 << shift,
        _ => 0,
    }
}

/// Placement of memory in a range of an IOMMU's addresses.
///
/// Memory of up to [`LONG_RUN`] bytes is one run. Longer memory is two runs, with a hole of [`MAX_ENTRY`] bytes behind the
/// first window of virtual addresses. The distance between DMA and virtual addresses then differs between the runs in bit
/// 31. So no HCA page is larger than [`MAX_ENTRY`], whatever `iova` the application has chosen for its region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IovaLayout {
    /// Bytes of the first run.
    first: u64,
    /// Bytes between the runs.
    hole: u64,
}

impl IovaLayout {
    /// For `len` bytes that back the virtual addresses from `va` on.
    pub(crate) fn new(va: u64, len: u64) -> Self {
        if len <= LONG_RUN {
            return IovaLayout {
                first: len,
                hole: 0,
            };
        }
        IovaLayout {
            first: MAX_ENTRY - (va & (MAX_ENTRY - 1)),
            hole: MAX_ENTRY,
        }
    }

    /// Bytes by which the two runs and the hole are longer than the memory.
    pub(crate) fn hole(&self) -> u64 {
        self.hole
    }

    /// Returns where the byte with the number `nth` lies, counted from the first one.
    pub(crate) fn offset(&self, nth: u64) -> u64 {
        let hole = if nth < self.first { 0 } else { self.hole };
        nth.wrapping_add(hole)
    }

    /// Returns the runs of the first `len` bytes, the first of which is at `start`. Runs may be empty.
    pub(crate) fn runs(&self, start: u64, len: u64) -> [AddrRange; 2] {
        let first = len.min(self.first);
        let second = start.wrapping_add(self.offset(self.first));
        let run = |addr, len| AddrRange { addr, len };
        [run(start, first), run(second, len - first)]
    }
}

/// Returns the distance between DMA and virtual addresses modulo 4 GiB, if it is the same for all of `ranges` and at least
/// 4 GiB of DMA addresses follow each other. `ranges` back the virtual addresses from `va` on.
///
/// An HCA page can be larger than 2 GiB only in such a list, and only if the region's `iova` is at the same distance.
pub(crate) fn common_distance(mut va: u64, ranges: impl Iterator<Item = AddrRange>) -> Option<u64> {
    let (mut common, mut end) = (None, None);
    let (mut run, mut longest) = (0_u64, 0);
    for range in ranges {
        if end != Some(range.addr) {
            let distance = range.addr.wrapping_sub(va) & (LONG_RUN - 1);
            if common.is_some_and(|common| common != distance) {
                return None;
            }
            common = Some(distance);
            run = 0;
        }
        run = run.saturating_add(range.len);
        longest = run.max(longest);
        end = Some(range.addr.wrapping_add(range.len));
        va = va.wrapping_add(range.len);
    }
    common.filter(|_| longest >= LONG_RUN)
}

/// Where in the range from `base` on an address is congruent to `va` modulo `slack`.
pub(crate) fn iova_offset(base: u64, va: u64, slack: u64) -> u64 {
    va.wrapping_sub(base) & slack.saturating_sub(1)
}

/// One entry of a scatter list.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct SgEntry {
    /// DMA address.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u32,
}

impl SgEntry {
    /// Its addresses.
    pub(crate) fn range(&self) -> AddrRange {
        AddrRange {
            addr: self.addr,
            len: u64::from(self.len),
        }
    }
}

/// The entry from `start` to `end`, which are in one window.
fn entry(start: u64, end: u64) -> SgEntry {
    SgEntry {
        addr: start,
        // CAST: At most `MAX_ENTRY`.
        len: end.wrapping_sub(start) as u32,
    }
}

/// Joins ranges as they come, and cuts them into the entries of a scatter list.
///
/// An entry ends at a multiple of a window of virtual addresses: [`MAX_ENTRY`], or the largest power of
/// two that the device takes where that is less. Borders at round virtual addresses leave the HCA the
/// largest page size that there is.
pub(crate) struct SgLayout {
    window: u64,
    /// Bytes to the end of the window. 0 where the next range begins another one.
    left: u64,
    /// The range under way, which lies in one window: its first address, and the one behind it, which may be
    /// behind the last of all. None if they are the same.
    start: u64,
    end: u64,
}

impl SgLayout {
    /// For ranges that back the virtual addresses from `va` on, and a device that takes segments of at most
    /// `max_segment` bytes.
    ///
    /// A window is never smaller than `page`, whatever the device says: ib_core trims the first entry by
    /// up to a page, and NVIDIA's module too hands out whole pages.
    pub(crate) fn new(va: u64, page: PageSize, max_segment: u32) -> SgLayout {
        let segment = match max_segment.checked_ilog2() {
            Some(shift) => 1 << shift,
            None => 0,
        };
        let window = page.bytes().max(segment).min(MAX_ENTRY);
        SgLayout {
            window,
            left: window - (va & (window - 1)),
            start: 0,
            end: 0,
        }
    }

    /// Whether it cuts no further than [`MAX_ENTRY`] does.
    pub(crate) fn is_whole(&self) -> bool {
        self.window == MAX_ENTRY
    }

    /// Goes on with the pages that `addr` finds in `pages`, and calls `each` with the entries that end there, until it
    /// returns `false`. Returns the pages that are left then. What is backed by them begins at a whole page of virtual
    /// addresses.
    ///
    /// One loop over each window's pages: what it does for a page is most of what large regions cost.
    #[inline(always)]
    pub(crate) fn pages<'a, T>(
        &mut self,
        mut pages: &'a [T],
        addr: impl Fn(&T) -> u64,
        page: PageSize,
        mut each: impl FnMut(SgEntry) -> bool,
    ) -> &'a [T] {
        let len = page.bytes();
        while let Some(first) = pages.first() {
            if !self.open(&mut each) {
                break;
            }
            // CAST: No more than there are.
            let count = page.whole_in(self.left).min(pages.len() as u64) as usize;
            let Some((now, rest)) = pages.split_at_checked(count) else {
                break;
            };
            if count == 0 {
                // Another pin has smaller pages, and the window ends in this one. Two entries may end here.
                let addr = addr(first);
                if addr != self.end && !self.close(&mut each) {
                    break;
                }
                pages = pages.get(1..).unwrap_or_default();
                if !self.range(AddrRange { addr, len }, &mut each) {
                    break;
                }
                continue;
            }
            let (mut start, mut end) = (self.start, self.end);
            // Not a closure over `end`, which would be in memory.
            let breaks = |addr, end: &mut u64| {
                let breaks = addr != *end;
                if !breaks {
                    *end = end.wrapping_add(len);
                }
                breaks
            };
            let mut addrs = now.iter();
            let mut goes_on = true;
            while let Some(addr) = addrs
                .by_ref()
                .map(&addr)
                .find(|addr| breaks(*addr, &mut end))
            {
                goes_on = start == end || each(entry(start, end));
                (start, end) = (addr, addr.wrapping_add(len));
                if !goes_on {
                    break;
                }
            }
            (self.start, self.end) = (start, end);
            let done = now.len().saturating_sub(addrs.len());
            self.left = self.left.saturating_sub(len.saturating_mul(done as u64));
            pages = match goes_on {
                true => rest,
                false => return pages.get(done..).unwrap_or_default(),
            };
        }
        pages
    }

    /// Goes on with `range`, and calls `each` with the entries that end in it. Returns `false` if `each` did, which ends
    /// nothing here.
    pub(crate) fn range(
        &mut self,
        mut range: AddrRange,
        mut each: impl FnMut(SgEntry) -> bool,
    ) -> bool {
        let mut goes_on = true;
        while range.len > 0 {
            goes_on &= self.open(&mut each);
            if range.addr != self.end {
                goes_on &= self.close(&mut each);
                (self.start, self.end) = (range.addr, range.addr);
            }
            let len = range.len.min(self.left);
            range.addr = range.addr.wrapping_add(len);
            range.len -= len;
            self.end = range.addr;
            self.left -= len;
        }
        goes_on
    }

    /// Ends the entry under way, and returns it.
    pub(crate) fn finish(&mut self) -> Option<SgEntry> {
        let ended = entry(self.start, self.end);
        let is_empty = self.start == self.end;
        self.start = self.end;
        (!is_empty).then_some(ended)
    }

    /// Begins the next window, if this one is full. Returns what `each` does, or `true` if it is not called.
    fn open(&mut self, each: &mut impl FnMut(SgEntry) -> bool) -> bool {
        if self.left > 0 {
            return true;
        }
        self.left = self.window;
        self.close(each)
    }

    /// Ends the entry under way. Returns what `each` does, or `true` if it is not called.
    fn close(&mut self, each: &mut impl FnMut(SgEntry) -> bool) -> bool {
        self.finish().is_none_or(each)
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "ranges/tests.rs"]
mod tests;
