// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! DMA mappings of GPU memory for an RDMA device by the kernel's DMA API, which takes no lock of
//! another driver.
//!
//! There are three ways of mapping, depending on the path between the device and the BAR:
//!
//! - If nothing translates the device's addresses, there is one mapping, from the memory's lowest
//!   address to its highest. DMA addresses are physical addresses. A mapping then gives the device
//!   no access that it did not have before.
//! - If an IOMMU translates the device's addresses, exactly the memory is mapped, in one range of
//!   DMA addresses. Memory that is fragmented behind the BAR is contiguous for the device, up to 4
//!   GiB. Longer memory has two runs ([`IovaLayout`]).
//! - Otherwise, each range is mapped separately. Examples are an architecture's own DMA operations,
//!   memory in several BARs, and a failure of one of the other two ways.
//!
//! C header: [`include/linux/dma-mapping.h`](srctree/include/linux/dma-mapping.h); C side:
//! [`helpers.c`](helpers.c).

use core::iter;

use kernel::{
    bindings,
    prelude::*, //
};

use crate::{
    c,
    collections::SmallVec,
    pci::PciDevice,
    phys::PhysRanges,
    ranges::{
        self,
        AddrRange,
        IovaLayout,
        PageSize,
        SgLayout,
        LONG_RUN,
        MAX_STEP, //
    },
    reason::Reason,
    sg::SgTable,
    task, //
};

/// Calls `cond_resched()` each time [`MAX_STEP`] bytes have been mapped or unmapped. Holds the
/// number of bytes since the last call.
#[derive(Default)]
struct Resched(u64);

impl Resched {
    /// Records that `bytes` more bytes have been mapped or unmapped. May sleep.
    fn after(&mut self, bytes: u64) {
        self.0 = self.0.wrapping_add(bytes);
        if self.0 >= MAX_STEP {
            self.0 = 0;
            // SAFETY: This runs in process context without a spinlock, where sleeping is allowed.
            unsafe { c::peermem_cond_resched() };
        }
    }
}

/// Ranges that `dma_map_phys()` has mapped, until dropped.
///
/// # Invariants
///
/// Each of `ranges` is mapped for `device`.
pub(crate) struct ResourceMapping {
    device: PciDevice,
    ranges: SmallVec<AddrRange>,
}

impl ResourceMapping {
    /// Maps each of `ranges`, which lie in BARs: see [`PhysRanges`].
    ///
    /// The kernel may happen to return consecutive DMA addresses for several ranges. Before these
    /// ranges become a run of [`LONG_RUN`] bytes, this function maps one of them again, at other
    /// addresses. If the DMA addresses are derived from the physical addresses, the second mapping
    /// gets the same addresses, and the run remains.
    fn map(device: &PciDevice, ranges: impl Iterator<Item = AddrRange>) -> Result<Self, Reason> {
        let mut mapping = ResourceMapping {
            device: device.clone(),
            ranges: SmallVec::default(),
        };
        let mut resched = Resched::default();
        let (mut mapped, mut run, mut end) = (0_u64, 0_u64, None);
        for range in ranges {
            let len = range.len;
            // INVARIANT: The range is mapped, and nothing fails before the range is added to
            // `ranges`. The drop of `mapping` unmaps the earlier ranges.
            mapping.ranges.push_with(|| {
                let map = || map_range(device, range).ok_or(Reason::MapResource { mapped });
                let mut addr = map()?;
                if end == Some(addr) && run.saturating_add(len) >= LONG_RUN {
                    // The second mapping gets other addresses, because the first mapping is still
                    // in use.
                    let other = map();
                    // SAFETY: `map_range` made this mapping above. No other value holds the
                    // mapping, so only this call unmaps it.
                    unsafe { unmap_range(device, AddrRange { addr, len }) };
                    addr = other?;
                }
                run = if end == Some(addr) { run } else { 0 }.saturating_add(len);
                end = Some(addr.wrapping_add(len));
                Ok(AddrRange { addr, len })
            })?;
            mapped = mapped.saturating_add(len);
            resched.after(len);
        }
        Ok(mapping)
    }
}

/// Maps `range`, which lies in a BAR, and returns its first DMA address.
fn map_range(device: &PciDevice, range: AddrRange) -> Option<u64> {
    let mut dma = 0;
    // CAST: Addresses have 64 bits.
    let len = range.len as usize;
    // SAFETY: `dma_map_phys()` with `DMA_ATTR_MMIO` needs a live device, and memory of an I/O
    // device: see `map`. The function does not use `struct page`s. `dma` is valid for writes.
    let ret = unsafe { c::peermem_bar_map(device.as_raw(), range.addr, len, &mut dma) };
    (ret == 0).then_some(dma)
}

/// Undoes [`map_range`]. The addresses in `range` are DMA addresses.
///
/// # Safety
///
/// `range` must be mapped for `device`, and must not be unmapped elsewhere.
unsafe fn unmap_range(device: &PciDevice, range: AddrRange) {
    // CAST: The length was a `usize` when it was mapped.
    let len = range.len as usize;
    // SAFETY: The caller promises that the range is mapped, and is unmapped only here.
    unsafe { c::peermem_bar_unmap(device.as_raw(), range.addr, len) };
}

impl Drop for ResourceMapping {
    fn drop(&mut self) {
        let mut resched = Resched::default();
        for range in self.ranges.iter() {
            // SAFETY: By the type invariant, the range is mapped. This drop unmaps each range once.
            unsafe { unmap_range(&self.device, *range) };
            resched.after(range.len);
        }
    }
}

/// Memory that is linked into an IOVA range, until dropped.
///
/// # Invariants
///
/// `state` is an address range that was allocated for `device`. The first `linked` bytes of the
/// runs of `layout` from `start` on are linked in this range, and nothing else is.
pub(crate) struct IovaMapping {
    device: PciDevice,
    state: bindings::dma_iova_state,
    layout: IovaLayout,
    /// DMA address of the first byte.
    start: u64,
    linked: u64,
}

impl IovaMapping {
    /// Maps `memory`, which backs the virtual addresses from `va` on. Returns `None`, with nothing
    /// mapped, if no IOMMU translates for this device, or if IOVA space or memory for IOMMU page
    /// tables is exhausted.
    fn map(device: &PciDevice, memory: &PhysRanges, va: u64) -> Option<Self> {
        let len = memory.len();
        let layout = IovaLayout::new(va, len);
        let alloc = |slack: u64| {
            let mut state = bindings::dma_iova_state::default();
            // CAST: Addresses have 64 bits.
            let size = len.saturating_add(layout.hole()).saturating_add(slack) as usize;
            // SAFETY: The device is alive, and `state` is valid for writes.
            let found = unsafe { c::peermem_iova_alloc(device.as_raw(), &mut state, size) };
            found.then_some((state, slack))
        };
        // If there is no room for the slack, a range without slack is still useful: its start is
        // often aligned to the length of the memory. If the layout has a hole ([`IovaLayout`]), no
        // second try follows. This function then returns `None`, and the caller maps the memory as
        // separate ranges.
        let slack = ranges::iova_slack(len);
        let shorter = (slack > 0 && layout.hole() == 0).then_some(0);
        let (state, slack) = alloc(slack).or_else(|| shorter.and_then(alloc))?;
        let offset = ranges::iova_offset(state.addr, va, slack);
        // INVARIANT: The address range was allocated above, and nothing is linked in it.
        let mut mapping = IovaMapping {
            device: device.clone(),
            start: state.addr.wrapping_add(offset),
            layout,
            state,
            linked: 0,
        };
        let mut resched = Resched::default();
        for step in memory.steps() {
            mapping.link(step)?;
            resched.after(step.len);
        }
        // This makes the linked memory visible to the IOMMU.
        for run in mapping.runs() {
            let (at, len) = mapping.place(run);
            // SAFETY: This part is linked by the type invariant.
            let ret = unsafe { c::peermem_iova_sync(device.as_raw(), &mut mapping.state, at, len) };
            if ret != 0 {
                return None;
            }
        }
        Some(mapping)
    }

    /// Links `range` after the memory that is already linked. `range` does not cross a multiple of
    /// [`ranges::MAX_ENTRY`] in virtual addresses, so it lies in one run.
    fn link(&mut self, range: AddrRange) -> Option<()> {
        let addr = self.start.wrapping_add(self.layout.offset(self.linked));
        let (at, len) = self.place(AddrRange { addr, ..range });
        // SAFETY: The address range has room for all runs from `start` on, and nothing is linked at
        // this place.
        let ret = unsafe {
            c::peermem_iova_link(self.device.as_raw(), &mut self.state, range.addr, at, len)
        };
        if ret != 0 {
            return None;
        }
        // INVARIANT: The range was linked above.
        self.linked = self.linked.wrapping_add(range.len);
        Some(())
    }

    /// Returns the non-empty runs of DMA addresses.
    fn runs(&self) -> impl Iterator<Item = AddrRange> {
        let runs = self.layout.runs(self.start, self.linked);
        runs.into_iter().filter(|run| run.len > 0)
    }

    /// Returns the offset of `dma` in the IOMMU's address range, and the length of `dma`.
    fn place(&self, dma: AddrRange) -> (usize, usize) {
        // CAST: Addresses have 64 bits.
        (
            dma.addr.wrapping_sub(self.state.addr) as usize,
            dma.len as usize,
        )
    }
}

impl Drop for IovaMapping {
    fn drop(&mut self) {
        let device = self.device.as_raw();
        let mut resched = Resched::default();
        // The memory is unlinked in steps, so that other threads can run in between. Each step
        // costs a flush of the IOMMU's cache. An IOMMU huge page is aligned to its size, and is not
        // larger than [`ranges::MAX_STEP`], the longest range that is linked at once. A step ends
        // only at a multiple of `MAX_STEP` or at the end of a run, so never inside a huge page.
        for step in self.runs().flat_map(ranges::steps) {
            let (at, len) = self.place(step);
            // SAFETY: The step is linked by the type invariant, and is unlinked once. The device no
            // longer uses the memory.
            unsafe { c::peermem_iova_unlink(device, &mut self.state, at, len) };
            resched.after(step.len);
        }
        // SAFETY: The address range belongs to this device by the type invariant, and nothing is
        // linked in it any more.
        unsafe { c::peermem_iova_free(device, &mut self.state) };
    }
}

/// A DMA mapping of GPU memory for a device, until dropped.
pub(crate) enum BarMapping {
    /// One mapping from the lowest address to the highest: the bounding range.
    Bounds(#[expect(dead_code, reason = "held for its drop")] ResourceMapping),
    Ranges(ResourceMapping),
    Iova(IovaMapping),
}

impl BarMapping {
    /// Maps all of `memory` for `device`, or nothing, and makes the scatter list. `memory` backs
    /// the virtual addresses from `va` on, and `page` is its page size. Uses the scatter list
    /// inside `memory` without a copy if its entries already fit the device. May sleep.
    pub(crate) fn map(
        device: &PciDevice,
        memory: PhysRanges,
        va: u64,
        page: PageSize,
    ) -> Result<(Self, SgTable), Reason> {
        let layout = SgLayout::new(va, page, device.max_segment());
        let mapping = BarMapping::new(device, &memory, va)?;
        let table = match &mapping {
            BarMapping::Bounds(_) if layout.is_whole() => memory.table,
            BarMapping::Bounds(_) => list(layout, memory.steps())?,
            BarMapping::Ranges(all) => list(layout, all.ranges.iter().copied())?,
            BarMapping::Iova(iova) => list(layout, iova.runs())?,
        };
        Ok((mapping, table))
    }

    /// Maps `page`, which lies in a BAR, for `device` and unmaps it again. Returns `true` if the
    /// DMA address differs from the physical address, and `None` if the page cannot be mapped now.
    /// Linux may print a warning for a page that has a `struct page` and is not peer-to-peer DMA
    /// memory. For such a page, returns `false` without mapping. May sleep.
    pub(crate) fn translates(device: &PciDevice, page: &AddrRange) -> Option<bool> {
        // SAFETY: The function has no preconditions.
        if unsafe { c::peermem_has_struct_page(page.addr, page.len, 0, u64::MAX, true) } {
            return Some(false);
        }
        if !device.maps_exactly(page.addr | page.len) {
            return None;
        }
        let addr = map_range(device, *page)?;
        // SAFETY: `map_range` made this mapping above. No other value holds the mapping, so only
        // this call unmaps it.
        unsafe { unmap_range(device, AddrRange { addr, ..*page }) };
        Some(addr != page.addr)
    }

    /// Tries the ways of mapping in the order of the list at the top of this file. If a way fails,
    /// undoes the mappings of that way before the next try.
    fn new(device: &PciDevice, memory: &PhysRanges, va: u64) -> Result<Self, Reason> {
        if let Some(bounds) = memory.bounds.filter(|_| device.is_direct()) {
            // This mapping may fail, because the device may not reach all of the bounding range.
            if let Ok(mapping) = ResourceMapping::map(device, iter::once(bounds)) {
                if mapping.ranges.iter().eq([&bounds]) {
                    return Ok(BarMapping::Bounds(mapping));
                }
            }
        }
        // The kernel rounds to whole pages of the IOMMU. A rounded mapping would include adjacent
        // addresses.
        let bits = memory
            .steps()
            .fold(0, |bits, step| bits | step.addr | step.len);
        if !device.maps_exactly(bits) {
            return Err(Reason::MapResource { mapped: 0 });
        }
        if let Some(mapping) = IovaMapping::map(device, memory, va) {
            return Ok(BarMapping::Iova(mapping));
        }
        if task::is_killed() {
            return Err(Reason::Killed);
        }
        let mapping = ResourceMapping::map(device, memory.steps())?;
        Ok(BarMapping::Ranges(mapping))
    }
}

/// Makes the scatter list of `ranges`.
fn list(mut layout: SgLayout, ranges: impl Iterator<Item = AddrRange>) -> Result<SgTable, Reason> {
    let (table, ()) = SgTable::build(|table| {
        let mut push = |entry| {
            table.push(entry);
            true
        };
        for range in ranges {
            layout.range(range, &mut push);
        }
        layout.finish().map(push);
        Ok(())
    })?;
    Ok(table)
}
