// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! GPU memory mapped for an RDMA device by the kernel's DMA API, which takes no lock of another driver's.
//!
//! How depends on what stands between the device and the BAR:
//!
//! - Nothing translates: one mapping, from the memory's lowest address to its highest. DMA addresses are physical ones, so
//!   that a mapping gives the device nothing that it could not reach before.
//! - An IOMMU translates: the memory and nothing else, in one range of DMA addresses. However fragmented it is behind the
//!   BAR, for the device it is contiguous, up to 4 GiB; longer memory has two runs ([`IovaLayout`]).
//! - Anything else, such as an architecture's own DMA operations, memory in several BARs, or where one of the above fails:
//!   each range by itself.
//!
//! C header: [`include/linux/dma-mapping.h`](srctree/include/linux/dma-mapping.h); C side: [`helpers.c`](helpers.c).

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

/// Lets others run whenever so much as [`MAX_STEP`] has been mapped or unmapped.
#[derive(Default)]
struct Resched {
    since: u64,
}

impl Resched {
    /// So many more bytes are done. May sleep.
    fn after(&mut self, bytes: u64) {
        self.since = self.since.wrapping_add(bytes);
        if self.since >= MAX_STEP {
            self.since = 0;
            // SAFETY: Process context without a spinlock, as in all that may sleep.
            unsafe { c::peermem_cond_resched() };
        }
    }
}

/// Ranges mapped by `dma_map_phys()`, until dropped.
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
    /// Ranges that the kernel happens to give consecutive DMA addresses are kept from becoming a run of [`LONG_RUN`] bytes,
    /// unless these addresses follow from the physical ones.
    fn map(device: &PciDevice, ranges: impl Iterator<Item = AddrRange>) -> Result<Self, Reason> {
        let mut mapping = ResourceMapping {
            device: device.clone(),
            ranges: SmallVec::new(),
        };
        let mut resched = Resched::default();
        let (mut mapped, mut run, mut end) = (0_u64, 0_u64, None);
        for range in ranges {
            let len = range.len;
            // INVARIANT: Mapped, and nothing fails between that and its record. What was mapped before goes with `mapping`.
            mapping.ranges.push_with(|| {
                let map = || map_range(device, range).ok_or(Reason::MapResource { mapped });
                let mut addr = map()?;
                if end == Some(addr) && run.saturating_add(len) >= LONG_RUN {
                    // Elsewhere, since its first addresses are in use until it has others.
                    let other = map();
                    // SAFETY: Mapped above, and not recorded.
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
    // SAFETY: `dma_map_phys()` with `DMA_ATTR_MMIO` wants a device that is alive, and memory of an I/O device: see `map`.
    // It looks at no `struct page`. `dma` is valid for writes.
    let ret = unsafe { c::peermem_bar_map(device.as_raw(), range.addr, len, &mut dma) };
    (ret == 0).then_some(dma)
}

/// Undoes [`map_range`]. `range` has DMA addresses.
///
/// # Safety
///
/// `range` is mapped for `device`, and is unmapped here alone.
unsafe fn unmap_range(device: &PciDevice, range: AddrRange) {
    // CAST: Was a `usize` when it was mapped.
    let len = range.len as usize;
    // SAFETY: Mapped, and unmapped once, as promised by the caller.
    unsafe { c::peermem_bar_unmap(device.as_raw(), range.addr, len) };
}

impl Drop for ResourceMapping {
    fn drop(&mut self) {
        let mut resched = Resched::default();
        for range in self.ranges.iter() {
            // SAFETY: Mapped by the type invariant, which ends here.
            unsafe { unmap_range(&self.device, *range) };
            resched.after(range.len);
        }
    }
}

/// Memory linked into a range of an IOMMU's addresses, until dropped.
///
/// # Invariants
///
/// `state` is a range of `device`'s. Linked in it are the first `linked` bytes of the runs that `layout` has from `start` on,
/// and nothing else.
pub(crate) struct IovaMapping {
    device: PciDevice,
    state: bindings::dma_iova_state,
    layout: IovaLayout,
    /// DMA address of the first byte.
    start: u64,
    linked: u64,
}

impl IovaMapping {
    /// Maps `memory`, which backs the virtual addresses from `va` on. Returns `None`, with nothing mapped, where no IOMMU
    /// translates for this device, or where its addresses or the memory for its page tables are used up.
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
        // Where there is no room for more than the memory, one range is still worth having: without more its beginning tends
        // to be as round as the memory is long. Memory with a hole has ranges of its own instead, which have none.
        let slack = ranges::iova_slack(len);
        let shorter = (slack > 0 && layout.hole() == 0).then_some(0);
        let (state, slack) = alloc(slack).or_else(|| shorter.and_then(alloc))?;
        let offset = ranges::iova_offset(state.addr, va, slack);
        // INVARIANT: Allocated above, with nothing in it.
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
        mapping.sync()?;
        Some(mapping)
    }

    /// Adds `range` behind what is linked. `range` lies in one window of virtual addresses, and so in one run.
    fn link(&mut self, range: AddrRange) -> Option<()> {
        let addr = self.start.wrapping_add(self.layout.offset(self.linked));
        let (at, len) = self.place(AddrRange { addr, ..range });
        // SAFETY: The range has room for all runs from `start` on, and nothing is linked there.
        let ret = unsafe {
            c::peermem_iova_link(self.device.as_raw(), &mut self.state, range.addr, at, len)
        };
        if ret != 0 {
            return None;
        }
        // INVARIANT: Linked above.
        self.linked = self.linked.wrapping_add(range.len);
        Some(())
    }

    /// Makes what is linked visible to the IOMMU.
    fn sync(&mut self) -> Option<()> {
        for run in self.runs() {
            let (at, len) = self.place(run);
            // SAFETY: So much is linked there by the type invariant.
            let ret =
                unsafe { c::peermem_iova_sync(self.device.as_raw(), &mut self.state, at, len) };
            if ret != 0 {
                return None;
            }
        }
        Some(())
    }

    /// The runs of DMA addresses. None is empty.
    fn runs(&self) -> impl Iterator<Item = AddrRange> {
        let runs = self.layout.runs(self.start, self.linked);
        runs.into_iter().filter(|run| run.len > 0)
    }

    /// Returns where DMA addresses are in the range of the IOMMU's, and their length.
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
        // In steps, though each is a flush. None ends within a page of the IOMMU's that is larger: those begin at
        // multiples of their size, and none was linked by more than a step.
        for step in self.runs().flat_map(ranges::steps) {
            let (at, len) = self.place(step);
            // SAFETY: Linked by the type invariant, unlinked once, and the device uses it no more.
            unsafe { c::peermem_iova_unlink(device, &mut self.state, at, len) };
            resched.after(step.len);
        }
        // SAFETY: Of this device by the type invariant, and nothing is linked any more.
        unsafe { c::peermem_iova_free(device, &mut self.state) };
    }
}

/// GPU memory mapped for a device, until dropped.
pub(crate) enum BarMapping {
    /// From its lowest address to its highest: its bounding range.
    Bounds(#[expect(dead_code, reason = "held for its drop")] ResourceMapping),
    Ranges(ResourceMapping),
    Iova(IovaMapping),
}

impl BarMapping {
    /// Maps `memory` for `device`, all of it or nothing, and makes the scatter list. `va` is the virtual address that it
    /// backs, `page` the size of its pages. `memory` becomes the list where its entries are the right ones.
    /// May sleep.
    pub(crate) fn map(
        device: &PciDevice,
        memory: PhysRanges,
        va: u64,
        page: PageSize,
    ) -> Result<(Self, SgTable), Reason> {
        let layout = SgLayout::new(va, page, device.max_segment());
        let mapping = BarMapping::new(device, &memory, va)?;
        let table = match &mapping {
            BarMapping::Bounds(_) if layout.is_whole() => memory.into_table(),
            BarMapping::Bounds(_) => list(layout, memory.steps())?,
            BarMapping::Ranges(all) => list(layout, all.ranges.iter().copied())?,
            BarMapping::Iova(iova) => list(layout, iova.runs())?,
        };
        Ok((mapping, table))
    }

    /// Maps `page`, which lies in a BAR, for `device` and unmaps it again. Returns `true` if its DMA address was not its own
    /// address, and `None` if it cannot be mapped now. A page with a `struct page` that is not of peer-to-peer DMA memory is
    /// not mapped, as Linux may warn of it. May sleep.
    pub(crate) fn translates(device: &PciDevice, page: &AddrRange) -> Option<bool> {
        // SAFETY: Has no preconditions.
        if unsafe { c::peermem_has_struct_page(page.addr, page.len, 0, u64::MAX, true) } {
            return Some(false);
        }
        if !device.maps_exactly(page.addr | page.len) {
            return None;
        }
        let addr = map_range(device, *page)?;
        // SAFETY: Mapped above, and recorded nowhere.
        unsafe {
            unmap_range(
                device,
                AddrRange {
                    addr,
                    len: page.len,
                },
            )
        };
        Some(addr != page.addr)
    }

    /// Tries the ways of mapping in the order of the file's first lines. What a way that fails has mapped is undone before the
    /// next one is tried.
    fn new(device: &PciDevice, memory: &PhysRanges, va: u64) -> Result<Self, Reason> {
        if let Some(bounds) = memory.bounds().filter(|_| device.is_direct()) {
            // The device may not reach all of the bounding range.
            if let Ok(mapping) = ResourceMapping::map(device, iter::once(bounds)) {
                if mapping.ranges.iter().eq([&bounds]) {
                    return Ok(BarMapping::Bounds(mapping));
                }
            }
        }
        // The kernel rounds to whole pages of the IOMMU's, and would map what lies beside.
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

/// The scatter list of `ranges`.
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
