// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Persistent pins mapped for a device: by this module where it can, else by the provider.
//!
//! The provider maps each page by itself, under its API lock; this module maps what adjoins at once, and takes no lock of
//! the provider's. But the provider knows of machines in which a device does not reach a GPU (driver 580 and later), and
//! says so only when it maps. So it is asked once for each GPU and device, with a pin of one page. Its answer is remembered
//! until one of the two is removed:
//!
//! - The answer counts for every process. A process may have mapped another GPU's memory at the address since the
//!   registration was pinned, so the page must lie on the registration's GPU. Otherwise there is no answer.
//! - A refusal is an answer only if it is [`DENIED`]. Any other code is about the moment, or about the page.
//! - The revocable mode asks nothing, and refuses a device that was denied.
//!
//! The provider maps:
//!
//! - what CPUs cache, what lies in no BAR, and what has a `struct page` that is not of peer-to-peer DMA memory;
//! - where this module cannot: DMA addresses or page tables of the IOMMU's are used up, or the device does not reach all
//!   of the memory;
//! - where it did not map the page: what it says of the registration itself then counts, also after a denial;
//! - where it gives out the BAR's own addresses though something may translate the device's, or other addresses though
//!   the kernel gives out the BAR's own. It was told of the machine what this module cannot know
//!   (`NVreg_DmaRemapPeerMmio=0`);
//! - everything, with `provider_maps=1`.
//!
//! Uses `core` and [`env`] alone.

use super::{
    device::{
        Gpus,
        Reach, //
    },
    env::{
        self,
        BarMapping,
        PciDevice,
        PersistentPin,
        PhysRanges,
        SgTable, //
    },
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

/// nvidia.ko's refusal of a device that does not reach the GPU. The topology check, `nv_grdma_pci_topology_supported()`,
/// makes it NV_ERR_NOT_SUPPORTED, and `nvidia_p2p_map_status()` makes that -ENOTSUPP. Pins that no device maps have the same
/// code. nvidia.ko makes those for a flag that this module does not give.
pub(crate) const DENIED: Reason = Reason::Map(ENOTSUPP);

/// Maps all of `pins`, which are of the registration `fixed`, for `device`, or nothing, and makes the scatter list. Returns the
/// mapping if this module maps; otherwise each pin has its own. May sleep, and may take the provider's API lock.
pub(crate) fn map(
    pins: &mut [PersistentPin],
    device: &PciDevice,
    fixed: &Fixed,
) -> Result<(Option<BarMapping>, SgTable), Reason> {
    let (va, page) = (fixed.span().start(), fixed.page_size());
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

/// Undoes what the provider has mapped of `pins`.
pub(crate) fn unmap(pins: &mut [PersistentPin]) {
    pins.iter_mut().for_each(PersistentPin::unmap);
}

/// Has the provider map `pins` until one fails.
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

/// Where the memory is, if this module maps it.
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
        // Of a GPU without a number nothing is remembered.
        if gpu == Gpus::default() || !is_asked && !is_reached(pin, gpu, device) {
            return Ok(None);
        }
        reached = reached.or(gpu);
    }
    match PhysRanges::read(va, |reader| {
        pins.iter().try_for_each(|pin| pin.read(reader))
    }) {
        // One allocation is on one GPU, as far as is known. Of others the provider was not asked.
        Ok((memory, gpus)) => Ok((gpus == reached).then_some(memory)),
        Err(reason) if reason.is_handed_on() => Ok(None),
        Err(reason) => Err(reason),
    }
}

/// Whether this module maps for `device` what is on the `gpu` of `pin`.
fn is_reached(pin: &PersistentPin, gpu: Gpus, device: &PciDevice) -> bool {
    let ask = || {
        let answer = ask(pin, gpu, device)?;
        env::remember(gpu, device, answer);
        Some(answer)
    };
    env::recall(gpu, device).or_else(ask) == Some(Reach::AsOurs)
}

/// Has the provider map one page of `gpu`, on which `pin` is, for `device`. Returns `None` if there is no answer.
// On arm64 its caller's frame would exceed 1 KiB otherwise. On x86-64 it does not, and `cold` would cost the loop over pages,
// which the caller has inlined, an instruction for each page.
#[cfg_attr(target_arch = "aarch64", cold, inline(never))]
fn ask(pin: &PersistentPin, gpu: Gpus, device: &PciDevice) -> Option<Reach> {
    // The last page of a BAR by itself is what the provider never maps.
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
        // Where that is not known, Linux may give the BAR's own addresses all the same.
        (false, false) => device.is_translated() || BarMapping::translates(device, &page)?,
        (is_own_address, is_direct) => is_own_address == is_direct,
    };
    Some(match is_ours {
        true => Reach::AsOurs,
        false => Reach::Otherwise,
    })
}
