// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Page arithmetic: from a requested range to GPU pages, and from page addresses to scatter-list
//! entries.
//!
//! Uses only `core`, so cargo also compiles this file on the host (`tests/host`). No page size is
//! hard-coded: nvidia.ko reports its page size with each page table, and kernels use pages of 4, 16
//! or 64 KiB.

use core::num::{
    NonZeroU32,
    NonZeroU64, //
};

use super::reason::Reason;

/// A scatter-list entry never crosses a virtual address that is a multiple of this number.
///
/// The length of an entry has 32 bits. `ib_umem_find_best_pgsz()` of older kernels treats the end
/// of each entry as a boundary of the HCA's pages. The limit is therefore 2 GiB, and not the
/// largest multiple of a page below 4 GiB.
pub(crate) const MAX_ENTRY: u64 = 1 << 31;

/// Page size of nvidia.ko in bytes: a power of two of at most [`MAX_ENTRY`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct PageSize(NonZeroU32);

impl PageSize {
    /// Alignment that nvidia.ko requires of a pinned range.
    pub(crate) const KIB_64: PageSize = PageSize::of_shift(16);
    /// The larger of the two page sizes of nvidia.ko that this module supports.
    pub(crate) const KIB_128: PageSize = PageSize::of_shift(17);

    /// Returns the page size of `1 << shift` bytes, for constants. This function is inline, so the
    /// module contains no code for the panic of `assert!`.
    #[inline]
    pub(crate) const fn of_shift(shift: u32) -> PageSize {
        assert!(shift <= 31);
        match NonZeroU32::new(1 << shift) {
            Some(bytes) => PageSize(bytes),
            None => unreachable!(),
        }
    }

    /// Returns the size in bytes.
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.0.get())
    }

    /// Returns the page size of a region whose pins have these page sizes: the smallest. ib_core
    /// trims by up to a page, so the page size must divide every entry.
    pub(crate) fn of_all(sizes: impl Iterator<Item = PageSize>) -> PageSize {
        sizes.min().unwrap_or(PageSize::KIB_64)
    }

    /// Returns the number of whole pages in `bytes`.
    fn whole_in(self, bytes: u64) -> u64 {
        // `NonZeroU64` shows the compiler that the divisor is not zero, so the module contains no
        // panic.
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
    /// Returns the whole pages that `[addr, addr + len)` touches. Fails if these pages exceed `max`
    /// bytes.
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
        // INVARIANT: `end > addr >= start`, because `len` is not zero and rounding up did not wrap.
        let len = end - start;
        if len > max {
            return Err(Reason::TooLong);
        }
        Ok(Span { start, len })
    }

    /// Returns the first address.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the part of the span that lies in `[from, to)`, or `None` if that part is empty. The
    /// part has whole pages if `from`, `to` and the span are page-aligned.
    pub(crate) fn part(&self, from: u64, to: u64) -> Option<Span> {
        let start = self.start.max(from);
        let len = self
            .start
            .saturating_add(self.len)
            .min(to)
            .checked_sub(start)?;
        // INVARIANT: The part ends no later than the span.
        (len > 0).then_some(Span { start, len })
    }

    /// Returns the number of pages of size `page`, or `None` if the span is not a multiple of it.
    pub(crate) fn pages(&self, page: PageSize) -> Option<u64> {
        ((self.start | self.len) & page.mask() == 0).then(|| page.whole_in(self.len))
    }
}

/// A contiguous range of physical or DMA addresses.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct AddrRange {
    /// First address.
    pub(crate) addr: u64,
    /// Length in bytes.
    pub(crate) len: u64,
}

impl AddrRange {
    /// Returns `true` if all of `other` lies in this range.
    #[inline(always)]
    pub(crate) fn contains(&self, other: &AddrRange) -> bool {
        // If `other` begins below this range, the offset wraps and exceeds every length.
        let offset = other.addr.wrapping_sub(self.addr);
        offset < self.len && other.len <= self.len - offset
    }

    /// Returns this range extended on both sides to multiples of `round`, a power of two, and cut
    /// off at the limits of `within`. `within` contains this range. Neither range is empty.
    pub(crate) fn widened(&self, round: u64, within: &AddrRange) -> AddrRange {
        let first = (self.addr & !(round - 1)).max(within.addr);
        AddrRange::between(first, (self.last() | (round - 1)).min(within.last()))
    }

    /// Returns the part of this range that lies in `other`. `other` must contain the first address.
    pub(crate) fn start_in(&self, other: &AddrRange) -> AddrRange {
        let left = other.len.saturating_sub(self.addr.wrapping_sub(other.addr));
        AddrRange {
            len: self.len.min(left),
            ..*self
        }
    }

    /// Returns the range from the lowest to the highest address of both ranges. Neither range is
    /// empty.
    pub(crate) fn bounding(&self, other: &AddrRange) -> AddrRange {
        AddrRange::between(self.addr.min(other.addr), self.last().max(other.last()))
    }

    fn between(first: u64, last: u64) -> AddrRange {
        AddrRange {
            addr: first,
            len: last.wrapping_sub(first).wrapping_add(1),
        }
    }

    /// Returns the last address. The range must not be empty.
    pub(crate) fn last(&self) -> u64 {
        self.addr.wrapping_add(self.len).wrapping_sub(1)
    }
}

/// Maximum number of bytes that are mapped for a device in one call. For a translating IOMMU, the
/// kernel fills page tables for all of these bytes at once, with allocations that cannot sleep. If
/// the IOMMU has no huge pages, these tables take 2 MiB.
pub(crate) const MAX_STEP: u64 = 1 << 30;

/// Splits `range` at multiples of [`MAX_STEP`].
pub(crate) fn steps(mut range: AddrRange) -> impl Iterator<Item = AddrRange> {
    core::iter::from_fn(move || {
        let len = range.len.min(MAX_STEP - (range.addr & (MAX_STEP - 1)));
        let step = AddrRange { len, ..range };
        range.addr = range.addr.wrapping_add(len);
        range.len -= len;
        (len > 0).then_some(step)
    })
}

/// Minimum length, in bytes, of memory whose DMA addresses are aligned so that the HCA can use
/// large pages. An HCA page needs DMA addresses that are congruent to the virtual addresses.
const LARGE: u64 = 1 << 21;

/// Minimum length, in bytes, of a run of contiguous DMA addresses in which an HCA page can be
/// larger than 2 GiB.
///
/// ib_core of OFED 25.07 and 25.10 iterates over such pages with 32-bit arithmetic, and then gives
/// the HCA wrong addresses: see `docs/dma.md`.
pub(crate) const LONG_RUN: u64 = 1 << 32;

/// Returns the number of extra bytes in a DMA address range for `len` bytes, so that
/// [`iova_offset`] can align the memory: a power of two, or 0. The kernel aligns such a range only
/// to a page of the IOMMU.
pub(crate) fn iova_slack(len: u64) -> u64 {
    match len.min(MAX_ENTRY).checked_ilog2() {
        Some(shift) if len >= LARGE => 1 << shift,
        _ => 0,
    }
}

/// Placement of memory in an IOVA range.
///
/// Memory of up to [`LONG_RUN`] bytes is one run. Longer memory is two runs, with a hole of
/// [`MAX_ENTRY`] bytes between them. In virtual addresses, the second run begins at the first
/// multiple of [`MAX_ENTRY`] after the start of the memory. The distance between DMA and virtual
/// addresses then differs between the runs in bit 31. No HCA page is therefore larger than
/// [`MAX_ENTRY`], for any `iova` that the application chooses for its region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IovaLayout {
    /// Length of the first run, in bytes.
    first: u64,
    /// Number of DMA addresses between the two runs, which nothing uses.
    hole: u64,
}

impl IovaLayout {
    /// Returns the placement of `len` bytes that back the virtual addresses from `va` on.
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

    /// Returns the size of the hole in bytes.
    pub(crate) fn hole(&self) -> u64 {
        self.hole
    }

    /// Returns the distance in DMA addresses from the first byte of the memory to byte `nth`.
    pub(crate) fn offset(&self, nth: u64) -> u64 {
        let hole = if nth < self.first { 0 } else { self.hole };
        nth.wrapping_add(hole)
    }

    /// Returns the runs of the first `len` bytes. The first run is at `start`. Runs may be empty.
    pub(crate) fn runs(&self, start: u64, len: u64) -> [AddrRange; 2] {
        let first = len.min(self.first);
        let second = start.wrapping_add(self.offset(self.first));
        let run = |addr, len| AddrRange { addr, len };
        [run(start, first), run(second, len - first)]
    }
}

/// Returns the distance between DMA and virtual addresses modulo 4 GiB, if it is the same for all
/// of `ranges` and a run of at least 4 GiB of contiguous DMA addresses exists. `ranges` back the
/// virtual addresses from `va` on.
///
/// An HCA page can be larger than 2 GiB only in such a list, and only if the region's `iova` has
/// the same distance from the DMA addresses.
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

/// Returns the offset from `base` to the first address that is congruent to `va` modulo `slack`.
pub(crate) fn iova_offset(base: u64, va: u64, slack: u64) -> u64 {
    va.wrapping_sub(base) & slack.saturating_sub(1)
}

/// Returns the entry from `start` to `end`.
fn entry(start: u64, end: u64) -> AddrRange {
    AddrRange {
        addr: start,
        len: end.wrapping_sub(start),
    }
}

/// Joins contiguous ranges, and cuts them into the entries of a scatter list.
///
/// An entry never crosses a virtual address that is a multiple of the window size. The window size
/// is [`MAX_ENTRY`], or the largest power of two that the device accepts, if that is less.
/// Boundaries at round virtual addresses leave the HCA the largest possible page size.
pub(crate) struct SgLayout {
    window: u64,
    /// Bytes to the end of the window. 0 if the next range begins a new window.
    left: u64,
    /// The current range, which lies in one window: its first address, and the address after its
    /// last one. `end` is 0 if the range contains the highest address. The range is empty if
    /// `start` equals `end`.
    start: u64,
    end: u64,
}

impl SgLayout {
    /// Makes a layout for ranges that back the virtual addresses from `va` on, and for a device
    /// that accepts segments of up to `max_segment` bytes.
    ///
    /// A window is never smaller than `page`, even if the device asks for less: ib_core trims the
    /// first entry by up to a page. NVIDIA's nvidia-peermem also passes whole pages.
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

    /// Returns `true` if the window size is [`MAX_ENTRY`].
    pub(crate) fn is_whole(&self) -> bool {
        self.window == MAX_ENTRY
    }

    /// Adds `pages`, whose addresses `addr` returns. Calls `each` with every finished entry until
    /// `each` returns `false`. Returns the pages that were not added when `each` returned `false`,
    /// or an empty slice. The pages back virtual addresses that begin at a multiple of the page
    /// size.
    ///
    /// The function has one loop over the pages of each window, because the work for each page
    /// dominates the cost of large regions.
    #[inline(always)]
    pub(crate) fn pages<'a, T>(
        &mut self,
        mut pages: &'a [T],
        addr: impl Fn(&T) -> u64,
        page: PageSize,
        mut each: impl FnMut(AddrRange) -> bool,
    ) -> &'a [T] {
        let len = page.bytes();
        while let Some(first) = pages.first() {
            if !self.open(&mut each) {
                break;
            }
            // CAST: `count` is at most `pages.len()`.
            let count = page.whole_in(self.left).min(pages.len() as u64) as usize;
            let Some((now, rest)) = pages.split_at_checked(count) else {
                break;
            };
            if count == 0 {
                // Another pin has smaller pages, and the window ends inside this page. Two entries
                // may end here.
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
            if start == end {
                // No range is open, so the first page begins a range.
                start = addr(first);
                end = start;
            }
            // The closure does not capture `end`: a captured `end` would be kept in memory.
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
                goes_on = each(entry(start, end));
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

    /// Adds `range`, and calls `each` with every entry that is finished. Returns `false` if `each`
    /// returned `false`, but adds all of `range` even then.
    pub(crate) fn range(
        &mut self,
        mut range: AddrRange,
        mut each: impl FnMut(AddrRange) -> bool,
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

    /// Ends the current entry and returns it.
    pub(crate) fn finish(&mut self) -> Option<AddrRange> {
        let ended = entry(self.start, self.end);
        let is_empty = self.start == self.end;
        self.start = self.end;
        (!is_empty).then_some(ended)
    }

    /// Begins the next window if the current window is full. Returns the result of `each`, or
    /// `true` if `each` is not called.
    fn open(&mut self, each: &mut impl FnMut(AddrRange) -> bool) -> bool {
        if self.left > 0 {
            return true;
        }
        self.left = self.window;
        self.close(each)
    }

    /// Ends the current entry. Returns the result of `each`, or `true` if `each` is not called.
    fn close(&mut self, each: &mut impl FnMut(AddrRange) -> bool) -> bool {
        self.finish().is_none_or(each)
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "ranges/tests.rs"]
mod tests;
