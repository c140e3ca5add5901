// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A fake of the kernel's DMA interface. It simulates several kinds of path between the NIC and
//! memory, with and without an IOMMU.

use kernel::{
    bindings,
    prelude::*, //
};

use super::{
    check,
    failing,
    fails,
    fake_nic_guard,
    record,
    same,
    take_first,
    with,
    Call,
    Event,
    DMA_OFFSET, //
};

/// A range of the BAR mapped by `dma_map_phys()`.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct BarRange {
    device: usize,
    pub(crate) dma: u64,
    pub(crate) len: usize,
}

/// The kind of path between the NIC and memory. The numbers match `fakes.h`, which describes each
/// kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Guard {
    Ops,
    Nothing,
    Identity,
    Translates,
    Blocks,
    RangeMap,
}

/// A range of IOMMU addresses. This fake only counts the linked bytes. The IOMMU of the test VM
/// also checks where in the range each piece is linked.
pub(crate) struct Iova {
    base: u64,
    len: u64,
    /// Number of linked bytes.
    linked: u64,
}

/// Makes the test fail if anything is mapped.
pub(crate) fn nothing_mapped() {
    let mapped = with(|world| world.bar.len() + world.iovas.len());
    same!(mapped, 0);
}

/// Sets the path between the NIC and memory.
pub(crate) fn guard(guard: Guard) {
    with(|world| world.guard = guard);
    // CAST: The numbers match `fakes.h`.
    fake_nic_guard(guard as c_int);
}

const DMA_BIDIRECTIONAL: c_int = 0;
/// Distance between two IOMMU addresses of the same memory.
const ELSEWHERE: u64 = 1 << 42;

#[no_mangle]
extern "C" fn fake_dma_map(
    device: *mut bindings::device,
    addr: u64,
    len: usize,
    dir: c_int,
    _attrs: c_ulong,
) -> u64 {
    record(Event::BarMap);
    check!(dir == DMA_BIDIRECTIONAL);
    if failing(Call::BarMap).is_some() {
        // `DMA_MAPPING_ERROR`.
        return u64::MAX;
    }
    let dma = with(|world| {
        // Linux adds the offsets in `dev->dma_range_map` to addresses of RAM, but not to addresses
        // of a BAR.
        let direct = matches!(
            world.guard,
            Guard::Nothing | Guard::Identity | Guard::RangeMap
        );
        let mut dma = addr + if direct { 0 } else { DMA_OFFSET };
        // The IOMMU code does not allocate an address that is still mapped.
        while world.guard == Guard::Translates && world.bar.iter().any(|have| have.dma == dma) {
            dma += ELSEWHERE;
        }
        dma
    });
    let range = BarRange {
        device: device.addr(),
        dma,
        len,
    };
    match with(|world| world.bar.push(range, GFP_KERNEL)) {
        Ok(()) => dma,
        Err(_) => u64::MAX,
    }
}

#[no_mangle]
extern "C" fn fake_dma_unmap(
    device: *mut bindings::device,
    dma: u64,
    len: usize,
    dir: c_int,
    _attrs: c_ulong,
) {
    record(Event::BarUnmap);
    check!(dir == DMA_BIDIRECTIONAL);
    let range = BarRange {
        device: device.addr(),
        dma,
        len,
    };
    if with(|world| take_first(&mut world.bar, |have| *have == range)).is_none() {
        fails(c"DMA", 0, fmt!("{:#x}+{:#x} is not mapped", dma, len));
    }
}

/// `DMA_ATTR_MMIO`.
const MMIO: c_ulong = 1 << 10;

/// Stand-in for `dma_iova_try_alloc()`.
#[no_mangle]
extern "C" fn fake_iova_alloc(
    _device: *mut bindings::device,
    state: &mut bindings::dma_iova_state,
    _phys: u64,
    size: usize,
) -> bool {
    *state = bindings::dma_iova_state::default();
    if with(|world| world.guard) != Guard::Translates {
        return false;
    }
    record(Event::IovaAlloc);
    if failing(Call::IovaAlloc).is_some() {
        return false;
    }
    // CAST: Both types have 64 bits.
    let len = size as u64;
    with(|world| {
        let base = world.iova_base;
        // The next range starts directly behind this one.
        world.iova_base += len;
        (state.addr, state.__size) = (base, len);
        let linked = 0;
        let iova = Iova { base, len, linked };
        world.iovas.push(iova, GFP_KERNEL).is_ok()
    })
}

/// Changes the number of linked bytes of a range. `change` gets the old number, and returns the new
/// number or an error.
fn relink(state: &bindings::dma_iova_state, change: impl FnOnce(u64) -> Result<u64, &'static str>) {
    let result = with(|world| {
        let mut iovas = world.iovas.iter_mut();
        let iova = iovas.find(|iova| iova.base == state.addr);
        let iova = iova.ok_or("there is no such range")?;
        iova.linked = change(iova.linked)?;
        match iova.linked > iova.len {
            true => Err("more bytes are linked than the range has"),
            false => Ok(()),
        }
    });
    if let Err(wrong) = result {
        fails(c"IOVA", 0, fmt!("{:#x}: {}", state.addr, wrong));
    }
}

/// Stand-in for `dma_iova_link()`.
#[no_mangle]
extern "C" fn fake_iova_link(
    _device: *mut bindings::device,
    state: &mut bindings::dma_iova_state,
    _phys: u64,
    _offset: usize,
    len: usize,
    dir: c_int,
    attrs: c_ulong,
) -> c_int {
    record(Event::IovaLink);
    check!(dir == DMA_BIDIRECTIONAL && attrs == MMIO);
    if let Some(code) = failing(Call::IovaLink) {
        return code;
    }
    // CAST: Both types have 64 bits.
    relink(state, |linked| Ok(linked + len as u64));
    0
}

/// Stand-in for `dma_iova_sync()`.
#[no_mangle]
extern "C" fn fake_iova_sync(
    _device: *mut bindings::device,
    _state: &mut bindings::dma_iova_state,
    _offset: usize,
    _len: usize,
) -> c_int {
    record(Event::IovaSync);
    failing(Call::IovaSync).unwrap_or(0)
}

/// Stand-in for `dma_iova_unlink()`.
#[no_mangle]
extern "C" fn fake_iova_unlink(
    _device: *mut bindings::device,
    state: &mut bindings::dma_iova_state,
    _offset: usize,
    len: usize,
    dir: c_int,
    attrs: c_ulong,
) {
    record(Event::IovaUnlink);
    check!(dir == DMA_BIDIRECTIONAL && attrs == MMIO);
    relink(state, |linked| {
        // CAST: Both types have 64 bits.
        let left = linked.checked_sub(len as u64);
        left.ok_or("more is unlinked than was linked")
    });
}

/// Stand-in for `dma_iova_free()`.
#[no_mangle]
extern "C" fn fake_iova_free(_device: *mut bindings::device, state: &mut bindings::dma_iova_state) {
    record(Event::IovaFree);
    relink(state, |linked| match linked {
        0 => Ok(0),
        _ => Err("freed with memory linked"),
    });
    with(|world| take_first(&mut world.iovas, |iova| iova.base == state.addr));
}
