// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! DMA mappings of persistent pins: by this module if it can, otherwise by nvidia.ko.
//!
//! nvidia.ko maps each page separately, under its API lock. This module maps contiguous pages at
//! once, and takes no lock of nvidia.ko. However, nvidia.ko (driver 580 and later) knows of
//! machines in which a device does not reach a GPU, and refuses such a device only in its mapping
//! function. For each pair of GPU and device, this module therefore makes nvidia.ko map one page,
//! once. This module remembers the result, called the answer, until the GPU or the device is
//! removed:
//!
//! - The answer applies to every process. Since the registration was pinned, the registering
//!   process may have mapped another GPU's memory at the address. The page must therefore lie on
//!   the registration's GPU; otherwise there is no answer.
//! - A refusal counts as an answer only if it is [`DENIED`]. Other codes are temporary, or concern
//!   only that page.
//! - The revocable mode does not ask nvidia.ko, but refuses a device if the remembered answer is a
//!   denial.
//!
//! nvidia.ko maps in these cases:
//!
//! - The memory is cached by CPUs, lies in no BAR, or has a `struct page` that is not peer-to-peer
//!   DMA memory.
//! - This module cannot map: the IOMMU's DMA addresses or page tables are exhausted, or the device
//!   does not reach all of the memory.
//! - nvidia.ko did not map the page that this module asked about. nvidia.ko's result for the
//!   registration itself then decides, even after a denial.
//! - nvidia.ko's addresses do not fit the path. There are two such cases. In the first, nvidia.ko
//!   returns the BAR's own addresses, although something may translate the device's addresses. In
//!   the second, nvidia.ko returns other addresses, although the kernel returns the BAR's own
//!   addresses. In both cases, nvidia.ko was configured with knowledge of the machine that this
//!   module lacks (`NVreg_DmaRemapPeerMmio=0`).
//! - `provider_maps=1` is set.
//!
//! Uses only `core` and [`env`].

use super::{
    device::{
        Gpus,
        Reach, //
    },
    env::{self, *},
    mr::{
        self,
        Fixed, //
    },
    ranges::{
        SgLayout,
        Span, //
    },
    reason::{
        Reason,
        ENOTSUPP, //
    }, //
};

/// nvidia.ko's refusal of a device that does not reach the GPU. The topology check,
/// `nv_grdma_pci_topology_supported()`, returns NV_ERR_NOT_SUPPORTED, and `nvidia_p2p_map_status()`
/// converts this status to -ENOTSUPP. nvidia.ko also returns this code for a pin that was made with
/// a flag that forbids mapping. This module does not use that flag.
pub(crate) const DENIED: Reason = Reason::Map(ENOTSUPP);

/// Maps all of `pins` for `device`, or none, and makes the scatter list. `pins` belong to the
/// registration `fixed`. Returns the mapping if this module maps; otherwise each pin holds its own
/// mapping. May sleep, and may take nvidia.ko's API lock.
pub(crate) fn map(
    pins: &mut [PersistentPin],
    device: &PciDevice,
    fixed: &Fixed,
) -> Result<(Option<BarMapping>, SgTable), Reason> {
    let (va, page) = (fixed.span.start(), fixed.page_size());
    if let Some(memory) = memory(pins, device, va)? {
        match BarMapping::map(device, memory, va, page) {
            Ok((mapping, table)) => return Ok((Some(mapping), table)),
            Err(Reason::MapResource { .. }) => mr::check_killed()?,
            Err(reason) => return Err(reason),
        }
    }
    let layout = SgLayout::new(va, page, device.max_segment());
    let table = map_by_provider(pins, device, layout).inspect_err(|_| unmap(pins))?;
    Ok((None, table))
}

/// Undoes nvidia.ko's mappings of `pins`.
pub(crate) fn unmap(pins: &mut [PersistentPin]) {
    pins.iter_mut().for_each(PersistentPin::unmap);
}

/// Makes nvidia.ko map `pins`, and stops at the first failure.
fn map_by_provider(
    pins: &mut [PersistentPin],
    device: &PciDevice,
    mut layout: SgLayout,
) -> Result<SgTable, Reason> {
    pins.iter_mut().try_for_each(|pin| pin.map(device))?;
    let (table, ()) = SgTable::build(|table| {
        let mut push = |entry| {
            table.push(entry);
            true
        };
        for pin in &*pins {
            layout.pages(pin.addresses(), |addr| *addr, pin.page_size(), &mut push);
        }
        layout.finish().map(push);
        Ok(())
    })?;
    Ok(table)
}

/// Returns the physical ranges of `pins` if this module maps them, and `None` if nvidia.ko does.
fn memory(
    pins: &[PersistentPin],
    device: &PciDevice,
    va: u64,
) -> Result<Option<PhysRanges>, Reason> {
    if env::provider_maps() {
        return Ok(None);
    }
    let mut reached = Gpus::default();
    for pin in pins {
        let gpu = pin.gpus();
        let is_asked = reached.or(gpu) == reached;
        // No answers are remembered for a GPU without a number.
        if gpu == Gpus::default() || !is_asked && !is_reached(pin, gpu, device) {
            return Ok(None);
        }
        reached = reached.or(gpu);
    }
    match PhysRanges::read(va, |reader| {
        pins.iter().try_for_each(|pin| pin.read(reader))
    }) {
        // One allocation is on one GPU, as far as is known. If the pages are on a GPU that is not
        // in `reached`, nvidia.ko was not asked about that GPU.
        Ok((memory, gpus)) => Ok((gpus == reached).then_some(memory)),
        Err(reason) if reason.is_handed_on() => Ok(None),
        Err(reason) => Err(reason),
    }
}

/// Returns `true` if this module maps memory on `gpu`, the GPU of `pin`, for `device`.
// Not inlined: with rustc 1.85, the caller's stack frame would exceed 1 KiB.
#[inline(never)]
fn is_reached(pin: &PersistentPin, gpu: Gpus, device: &PciDevice) -> bool {
    let ask = || {
        let answer = ask(pin, gpu, device)?;
        env::remember(gpu, device, answer);
        Some(answer)
    };
    env::recall(gpu, device).or_else(ask) == Some(Reach::AsOurs)
}

/// Makes nvidia.ko map one page of `pin`, which is on `gpu`, for `device`. Returns `None` if there
/// is no answer.
// Not inlined: on arm64, the caller's stack frame would exceed 1 KiB.
#[cold]
#[inline(never)]
fn ask(pin: &PersistentPin, gpu: Gpus, device: &PciDevice) -> Option<Reach> {
    // nvidia.ko never maps the last page of a BAR separately.
    let maps = |number| pin.page(number).is_some_and(|page| !env::ends_bar(&page));
    let page = pin.page_size();
    let offset = match (maps(0), maps(1)) {
        (true, _) => 0,
        (false, true) => page.bytes(),
        (false, false) => return None,
    };
    let start = pin.span().start().checked_add(offset)?;
    let mut pin = PersistentPin::pin(Span::covering(start, 1, page, u64::MAX).ok()?).ok()?;
    if pin.gpus() != gpu {
        return None;
    }
    match pin.map(device) {
        Err(DENIED) => return Some(Reach::Denied),
        result => result.ok()?,
    };
    let page = pin.page(0)?;
    let is_own_address = page.addr == *pin.addresses().first()?;
    let is_ours = match (is_own_address, device.is_direct()) {
        // If the translation is not known, Linux may still return the BAR's own addresses.
        (false, false) => device.is_translated() || BarMapping::translates(device, &page)?,
        (is_own_address, is_direct) => is_own_address == is_direct,
    };
    Some(match is_ours {
        true => Reach::AsOurs,
        false => Reach::Otherwise,
    })
}
