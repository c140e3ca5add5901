// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! GPU memory mapped for an RDMA device by the kernel's DMA API, which takes no lock of another driver's.
//!
//! How depends on what stands between the device and the BAR:
//!
//! - Nothing translates: one mapping, from the memory's lowest address to its highest. DMA addresses are physical ones, so
//!   that a mapping gives the device nothing that it could not reach before.
//! - An IOMMU translates: the memory and nothing else, in one range of DMA addresses. However fragmented it is behind the
//!   BAR, for the device it is contiguous.
//! - Anything else, such as an architecture's own DMA operations, or memory in several BARs: each range by itself.
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
        PageSize,
        SgLayout,
        MAX_STEP, //
    },
    reason::Reason,
    sg::SgTable, //
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

/// Ranges mapped by `dma_map_resource()`, until dropped.
///
/// # Invariants
///
/// Each of `ranges` is mapped for `device`.
pub(crate) struct ResourceMapping {
    device: PciDevice,
    ranges: SmallVec<AddrRange>,
}

impl ResourceMapping {
    /// Maps each of `ranges`, which lie in BARs and have no `struct page`.
    fn map(device: &PciDevice, ranges: impl Iterator<Item = AddrRange>) -> Result<Self, Reason> {
        let mut mapping = ResourceMapping {
            device: device.clone(),
            ranges: SmallVec::new(),
        };
        let mut resched = Resched::default();
        let mut mapped: u64 = 0;
        for AddrRange { addr, len } in ranges {
            // INVARIANT: Mapped, and nothing fails between that and its record. What was mapped before goes with `mapping`.
            mapping.ranges.push_with(|| {
                let mut dma = 0;
                // CAST: Addresses have 64 bits.
                // SAFETY: `dma_map_resource()` wants a device that is alive, and memory of an I/O device that has no
                // `struct page`, as the caller says. `dma` is valid for writes.
                match unsafe { c::peermem_bar_map(device.as_raw(), addr, len as usize, &mut dma) } {
                    0 => Ok(AddrRange { addr: dma, len }),
                    _ => Err(Reason::MapResource { mapped }),
                }
            })?;
            mapped = mapped.saturating_add(len);
            resched.after(len);
        }
        Ok(mapping)
    }
}

impl Drop for ResourceMapping {
    fn drop(&mut self) {
        let mut resched = Resched::default();
        for range in self.ranges.iter() {
            // CAST: Was a `usize` when it was mapped.
            let len = range.len as usize;
            // SAFETY: Mapped for this device by the type invariant, and unmapped once.
            unsafe { c::peermem_bar_unmap(self.device.as_raw(), range.addr, len) };
            resched.after(range.len);
        }
    }
}

/// Memory linked into a range of an IOMMU's addresses, until dropped.
///
/// # Invariants
///
/// `state` is a range of `device`'s. Linked in it are `linked` bytes from `offset` on, and no others.
pub(crate) struct IovaMapping {
    device: PciDevice,
    state: bindings::dma_iova_state,
    offset: u64,
    linked: u64,
}

impl IovaMapping {
    /// Maps `memory`, which backs the virtual addresses from `va` on. `None` where the kernel has no such range: no IOMMU
    /// translates for this device, or its addresses are used up.
    fn map(device: &PciDevice, memory: &PhysRanges, va: u64) -> Result<Option<Self>, Reason> {
        let len = memory.len();
        let alloc = |slack: u64| {
            let mut state = bindings::dma_iova_state::default();
            // CAST: Addresses have 64 bits.
            let size = len.saturating_add(slack) as usize;
            // SAFETY: The device is alive, and `state` is valid for writes.
            let found = unsafe { c::peermem_iova_alloc(device.as_raw(), &mut state, size) };
            found.then_some((state, slack))
        };
        // Where there is no room for more than the memory, one range is still worth having: without more its beginning tends
        // to be as round as the memory is long.
        let slack = ranges::iova_slack(len);
        let again = || (slack > 0).then(|| alloc(0)).flatten();
        let Some((state, slack)) = alloc(slack).or_else(again) else {
            return Ok(None);
        };
        // INVARIANT: Allocated above, with nothing in it.
        let mut mapping = IovaMapping {
            device: device.clone(),
            offset: ranges::iova_offset(state.addr, va, slack),
            state,
            linked: 0,
        };
        let mut resched = Resched::default();
        for step in memory.steps() {
            mapping.link(step)?;
            resched.after(step.len);
        }
        // CAST: Addresses have 64 bits.
        let (offset, linked) = (mapping.offset as usize, mapping.linked as usize);
        // SAFETY: So much is linked there by the type invariant.
        match unsafe { c::peermem_iova_sync(device.as_raw(), &mut mapping.state, offset, linked) } {
            0 => Ok(Some(mapping)),
            _ => Err(mapping.failed()),
        }
    }

    /// Adds `range` behind what is linked.
    fn link(&mut self, range: AddrRange) -> Result<(), Reason> {
        // CAST: Addresses have 64 bits.
        let at = self.offset.wrapping_add(self.linked) as usize;
        let len = range.len as usize;
        // SAFETY: The range has room for all of the memory behind `offset`, and nothing is linked there.
        let ret = unsafe {
            c::peermem_iova_link(self.device.as_raw(), &mut self.state, range.addr, at, len)
        };
        if ret != 0 {
            return Err(self.failed());
        }
        // INVARIANT: Linked above.
        self.linked = self.linked.wrapping_add(range.len);
        Ok(())
    }

    fn failed(&self) -> Reason {
        Reason::MapResource {
            mapped: self.linked,
        }
    }

    /// The DMA addresses.
    fn range(&self) -> AddrRange {
        AddrRange {
            addr: self.state.addr.wrapping_add(self.offset),
            len: self.linked,
        }
    }
}

impl Drop for IovaMapping {
    fn drop(&mut self) {
        let device = self.device.as_raw();
        let mut resched = Resched::default();
        // In steps, though each is a flush. None ends within a page of the IOMMU's that is larger: those begin at
        // multiples of their size, and none was linked by more than a step.
        for step in ranges::steps(self.range()) {
            // CAST: Addresses have 64 bits.
            let (at, len) = (
                step.addr.wrapping_sub(self.state.addr) as usize,
                step.len as usize,
            );
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
    /// From its lowest address to its highest.
    Hull(#[expect(dead_code, reason = "held for its drop")] ResourceMapping),
    Ranges(ResourceMapping),
    Iova(IovaMapping),
}

impl BarMapping {
    /// Maps `memory` for `device`, all of it or nothing, and makes the scatter list. `va` is the virtual address that it
    /// backs, `page` the size of its pages. `memory` is taken, and becomes the list where its entries are the right ones.
    /// May sleep.
    pub(crate) fn map(
        device: &PciDevice,
        memory: &mut Option<PhysRanges>,
        va: u64,
        page: PageSize,
    ) -> Result<(Self, SgTable), Reason> {
        let of = memory.as_ref().ok_or(Reason::MappedTwice)?;
        let layout = SgLayout::new(va, page, device.max_segment());
        let mapping = BarMapping::new(device, of, va)?;
        let table = match &mapping {
            BarMapping::Hull(_) if layout.is_whole() => None,
            BarMapping::Hull(_) => Some(list(layout, of.steps())?),
            BarMapping::Ranges(all) => Some(list(layout, all.ranges.iter().copied())?),
            BarMapping::Iova(iova) => Some(list(layout, iter::once(iova.range()))?),
        };
        let own = memory.take().map(PhysRanges::into_table);
        let table = table.or(own).ok_or(Reason::MappedTwice)?;
        Ok((mapping, table))
    }

    fn new(device: &PciDevice, memory: &PhysRanges, va: u64) -> Result<Self, Reason> {
        if let Some(hull) = memory.hull().filter(|_| device.is_direct()) {
            let mapping = ResourceMapping::map(device, iter::once(hull))?;
            if mapping.ranges.iter().eq([&hull]) {
                return Ok(BarMapping::Hull(mapping));
            }
        }
        Ok(match IovaMapping::map(device, memory, va)? {
            Some(mapping) => BarMapping::Iova(mapping),
            None => BarMapping::Ranges(ResourceMapping::map(device, memory.steps())?),
        })
    }
}

/// The scatter list of `ranges`.
fn list(mut layout: SgLayout, ranges: impl Iterator<Item = AddrRange>) -> Result<SgTable, Reason> {
    let (table, ()) = SgTable::build(|table| {
        for range in ranges {
            layout.range(range, |entry| table.push(entry));
        }
        layout.finish(|entry| table.push(entry));
        Ok(())
    })?;
    Ok(table)
}
