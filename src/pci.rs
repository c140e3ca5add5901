// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! PCI devices and their BARs.
//!
//! C header: [`include/linux/pci.h`](srctree/include/linux/pci.h); C side: [`helpers.c`](helpers.c).

use core::{
    mem::{
        self,
        ManuallyDrop, //
    },
    ptr::{
        self,
        NonNull, //
    }, //
};

use kernel::{
    bindings,
    prelude::*, //
};

use crate::{
    c,
    device::{
        Gpus,
        PciAddress,
        Reach, //
    },
    ranges::AddrRange,
    reason::Reason,
    sync::{
        StaticMutex,
        BARS_LOCK, //
    }, //
};

/// A counted reference to a PCI device.
///
/// # Invariants
///
/// Owns one reference to the device.
pub(crate) struct PciDevice(NonNull<bindings::pci_dev>);

// SAFETY: The reference count of a device is atomic. Any thread may drop a reference.
unsafe impl Send for PciDevice {}
// SAFETY: A shared `PciDevice` gives access only to its pointer and to constant properties of the
// device.
unsafe impl Sync for PciDevice {}

impl PciDevice {
    /// Calls `f` with `dev` as a PCI device, or with `None` if `dev` is null or on another bus.
    /// Takes no reference.
    ///
    /// # Safety
    ///
    /// `dev` must be null, or point to a device that is alive during the call.
    pub(crate) unsafe fn with_device<R>(
        dev: *mut bindings::device,
        f: impl FnOnce(Option<&PciDevice>) -> R,
    ) -> R {
        // SAFETY: The caller promises that `dev` is null or points to a live device.
        let device = NonNull::new(unsafe { c::peermem_pci_dev(dev) });
        // INVARIANT: The reference belongs to the caller, and is not dropped here.
        f(device
            .map(|device| ManuallyDrop::new(PciDevice(device)))
            .as_deref())
    }

    /// Returns the machine's first PCI device, or the device that follows `from` in the kernel's
    /// list.
    fn next(from: Option<PciDevice>) -> Option<PciDevice> {
        let from = from.map_or(ptr::null_mut(), |from| {
            // `pci_get_device()` drops this reference.
            ManuallyDrop::new(from).as_raw()
        });
        // CAST: All bits are set, as in C.
        let any = bindings::PCI_ANY_ID as c_uint;
        // SAFETY: `from` is null, or a device with a reference that the function may drop.
        // INVARIANT: The function took a reference to the device that it returned.
        NonNull::new(unsafe { c::pci_get_device(any, any, from) }).map(PciDevice)
    }

    /// Returns the pointer for C functions. The pointer is valid as long as `self`.
    pub(crate) fn as_raw(&self) -> *mut bindings::pci_dev {
        self.0.as_ptr()
    }

    /// Returns the maximum length of a segment for this device, in bytes.
    pub(crate) fn max_segment(&self) -> u32 {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_max_segment(self.as_raw()) }
    }

    /// Returns the PCI address.
    pub(crate) fn address(&self) -> PciAddress {
        // SAFETY: The device is alive by the type invariant.
        PciAddress(unsafe { c::peermem_pci_address(self.as_raw()) })
    }

    /// Returns `true` if nothing translates the device's DMA addresses. A mapping then gives the
    /// device no access that it did not have before.
    pub(crate) fn is_direct(&self) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_is_direct(self.as_raw()) }
    }

    /// Returns `true` if an IOMMU is known to translate the device's DMA addresses.
    pub(crate) fn is_translated(&self) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_is_translated(self.as_raw()) }
    }

    /// Returns `true` if the kernel maps exactly the requested bytes for this device. `bits` is the
    /// bitwise OR of all addresses and lengths.
    pub(crate) fn maps_exactly(&self, bits: u64) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_maps_exactly(self.as_raw(), bits) }
    }

    /// Returns `true` unless the device has been removed.
    fn is_there(&self) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_pci_is_there(self.as_raw()) }
    }

    /// Returns the device's memory BAR that contains `addr`. A removed device has no BARs.
    fn bar(&self, addr: u64) -> Option<AddrRange> {
        let mut bar = AddrRange::default();
        // SAFETY: The device is alive by the type invariant, and both fields are valid for writes.
        unsafe { c::peermem_pci_bar(self.as_raw(), addr, &mut bar.addr, &mut bar.len) }
            .then_some(bar)
    }
}

impl Clone for PciDevice {
    fn clone(&self) -> Self {
        // SAFETY: The device is alive by the type invariant.
        // INVARIANT: The new value owns the reference that is taken here.
        unsafe { bindings::pci_dev_get(self.as_raw()) };
        PciDevice(self.0)
    }
}

impl Drop for PciDevice {
    fn drop(&mut self) {
        // SAFETY: This drops the reference of the type invariant.
        unsafe { bindings::pci_dev_put(self.as_raw()) };
    }
}

/// A remembered device: one of its BARs contained an address of an earlier search.
struct Known {
    device: PciDevice,
    /// nvidia.ko's answers to the question whether other devices reach this device: see
    /// [`remember`].
    answers: KVVec<(PciDevice, Reach)>,
}

impl Known {
    fn answer(&self, hca: &PciDevice) -> Option<Reach> {
        let mut all = self.answers.iter();
        let (_, answer) = all.find(|(known, _)| known.0 == hca.0)?;
        Some(*answer)
    }
}

/// A memory BAR.
#[derive(Clone, Copy)]
pub(crate) struct Bar {
    pub(crate) range: AddrRange,
    /// The GPU of the BAR, or an empty set if every GPU number is taken.
    pub(crate) gpu: Gpus,
}

/// The PCI devices that earlier searches found. Each has a BAR that contained the address of a
/// search. A new search begins with these devices. If none of these devices has the address, the
/// search scans all devices of the machine. The references do not prevent the removal of a device.
///
/// The index in both arrays is the GPU's number. A GPU without a number is not remembered.
struct BarCache {
    devices: [Option<Known>; Gpus::MOST as usize],
    /// PCI address of each GPU, even after its removal. A GPU that comes back gets its old number.
    gpus: [Option<PciAddress>; Gpus::MOST as usize],
}

static BAR_CACHE: StaticMutex<BarCache> = StaticMutex::new(
    BARS_LOCK,
    BarCache {
        devices: [const { None }; Gpus::MOST as usize],
        gpus: [None; Gpus::MOST as usize],
    },
);

impl BarCache {
    /// Returns the remembered BAR that contains `addr`.
    fn find(&self, addr: u64) -> Option<Bar> {
        (0..).zip(&self.devices).find_map(|(number, known)| {
            Some(Bar {
                range: known.as_ref()?.device.bar(addr)?,
                gpu: Gpus::one(number),
            })
        })
    }

    /// Remembers `device`, and returns its number. If no number is free, remembers nothing and
    /// returns no GPU.
    fn keep(&mut self, device: PciDevice) -> Gpus {
        let at = device.address();
        let mut places = (0..).zip(self.gpus.iter_mut().zip(&mut self.devices));
        let Some((number, (gpu, place))) =
            places.find(|(_, (gpu, _))| gpu.is_none_or(|known| known == at))
        else {
            return Gpus::default();
        };
        *gpu = Some(at);
        *place = Some(Known {
            device,
            answers: KVVec::new(),
        });
        Gpus::one(number)
    }

    /// Returns the device of `gpu`, if it is still in the machine.
    fn gpu(&mut self, gpu: Gpus) -> Option<&mut Known> {
        let number = gpu.numbers().next()?;
        let known = self.devices.get_mut(number as usize)?.as_mut()?;
        known.device.is_there().then_some(known)
    }
}

/// Returns the memory BAR that contains `addr`, on any PCI device. May sleep.
fn bar_of(addr: u64) -> Option<Bar> {
    BAR_CACHE.with(|cache| {
        if let Some(found) = cache.find(addr) {
            return Some(found);
        }
        // This drops the references to removed GPUs, and the answers for them.
        for place in &mut cache.devices {
            place.take_if(|known| !known.device.is_there());
        }
        let mut device = PciDevice::next(None)?;
        loop {
            if let Some(range) = device.bar(addr) {
                let gpu = cache.keep(device);
                return Some(Bar { range, gpu });
            }
            device = PciDevice::next(Some(device))?;
        }
    })
}

/// Returns nvidia.ko's last answer to the question whether `device` reaches `gpu`, unless the GPU
/// or the device was removed since. Takes no lock of nvidia.ko. May sleep.
pub(crate) fn recall(gpu: Gpus, device: &PciDevice) -> Option<Reach> {
    BAR_CACHE.with(|cache| cache.gpu(gpu)?.answer(device))
}

/// Remembers nvidia.ko's answer to the question whether `device` reaches `gpu`, if there is memory
/// for it. Forgets the answers for removed devices. May sleep.
pub(crate) fn remember(gpu: Gpus, device: &PciDevice, answer: Reach) {
    let len = BAR_CACHE.with(|cache| cache.gpu(gpu).map_or(0, |known| known.answers.len()));
    // `BAR_CACHE` is not locked during this allocation. `dma_map` takes the lock of `BAR_CACHE`
    // under ib_core's `mapping_lock`, and a callback waits for `mapping_lock`.
    let Ok(answers) = KVVec::with_capacity(len + 1, GFP_KERNEL) else {
        return;
    };
    BAR_CACHE.with(|cache| {
        // Other answers may have been added since. In that case the next registration asks
        // nvidia.ko again.
        let fits = |known: &&mut Known| known.answers.len() < answers.capacity();
        let Some(known) = cache.gpu(gpu).filter(fits) else {
            return;
        };
        let old = mem::replace(&mut known.answers, answers);
        let stays = |(of, _): &(PciDevice, Reach)| of.0 != device.0 && of.is_there();
        for old in old.into_iter().filter(stays) {
            let _ = known.answers.push_within_capacity(old);
        }
        let new = (device.clone(), answer);
        let _ = known.answers.push_within_capacity(new);
    });
}

/// Returns `true` if `page` is the last page of its BAR, or in no BAR. May sleep.
pub(crate) fn ends_bar(page: &AddrRange) -> bool {
    let next = page.addr.wrapping_add(page.len);
    bar_of(page.addr).is_none_or(|bar| !bar.range.contains(&AddrRange { addr: next, len: 1 }))
}

/// Returns the PCI address of the GPU with this number.
pub(crate) fn gpu_address(number: u32) -> Option<PciAddress> {
    BAR_CACHE.with(|cache| *cache.gpus.get(number as usize)?)
}

/// Token that exists while devices are remembered. Must be dropped after the last pin.
pub(crate) struct Bars;

#[cfg(peermem_kunit)]
impl Bars {
    /// Returns the number of references to devices.
    pub(crate) fn remembered() -> usize {
        BAR_CACHE.with(|cache| {
            let all = cache.devices.iter().flatten();
            all.map(|known| 1 + known.answers.len()).sum()
        })
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        BAR_CACHE.with(|cache| {
            cache.devices.fill_with(|| None);
            cache.gpus.fill(None);
        });
    }
}

/// Returns the BAR that contains `page`. May sleep.
pub(crate) fn bar_of_page(page: &AddrRange) -> Option<Bar> {
    // SAFETY: The function has no preconditions.
    if unsafe { c::peermem_has_struct_page(page.addr, page.len, 0, u64::MAX, false) } {
        // The page is ordinary memory. A search for its BAR would scan all PCI devices, and find
        // nothing.
        return None;
    }
    bar_of(page.addr)
}

/// Granularity in bytes at which memory has or lacks `struct page`s.
const SUBSECTION: u64 = 1 << 21;

/// Checks that memory is in BARs. Memory that has a `struct page` must be a BAR's peer-to-peer DMA
/// memory. Remembers the checked area, because the next address is usually close to it.
#[derive(Default)]
pub(crate) struct BarFinder {
    /// The BAR that was found last.
    bar: Option<AddrRange>,
    /// A part of `bar` that passed the check.
    clear: AddrRange,
    /// Number of times that `bar` changed, including the first BAR.
    bars: u32,
    gpus: Gpus,
    /// The bounding range of all memory that passed the check.
    bounds: Option<AddrRange>,
}

impl BarFinder {
    /// Checks `range`. Returns `true` if `range` is in the BAR that was found last and passes the
    /// check for `struct page`s. Takes no lock.
    #[inline(always)]
    pub(crate) fn lookup_here(&mut self, range: AddrRange) -> bool {
        self.clear.contains(&range) || self.bar.is_some_and(|bar| self.lookup_in(bar, range))
    }

    #[cold]
    #[inline(never)]
    fn lookup_in(&mut self, bar: AddrRange, range: AddrRange) -> bool {
        if !bar.contains(&range) {
            return false;
        }
        let clear = range.widened(SUBSECTION, &bar);
        // SAFETY: The function has no preconditions.
        let has = unsafe {
            c::peermem_has_struct_page(clear.addr, clear.len, bar.addr, bar.last(), true)
        };
        if has {
            return false;
        }
        self.clear = clear;
        self.bounds = Some(self.bounds.map_or(clear, |bounds| bounds.bounding(&clear)));
        true
    }

    /// Checks `range`, which is not empty and may continue in another BAR. May sleep.
    pub(crate) fn lookup(&mut self, mut range: AddrRange) -> Result<(), Reason> {
        while range.len > 0 {
            let bar = self.bar_at(range.addr).ok_or(Reason::NotInBar)?;
            let here = range.start_in(&bar);
            if !self.lookup_in(bar, here) {
                return Err(Reason::HasStructPages);
            }
            range.addr = range.addr.wrapping_add(here.len);
            range.len -= here.len;
        }
        Ok(())
    }

    /// Returns the BAR that contains `addr`.
    fn bar_at(&mut self, addr: u64) -> Option<AddrRange> {
        let here = AddrRange { addr, len: 1 };
        if !self.bar.is_some_and(|bar| bar.contains(&here)) {
            self.bar = None;
            self.enter(bar_of(addr)?);
        }
        self.bar
    }

    /// Makes `bar` the current BAR. `bar` contains an address that is about to be checked.
    pub(crate) fn enter(&mut self, bar: Bar) {
        if self.bar != Some(bar.range) {
            self.bar = Some(bar.range);
            self.bars = self.bars.saturating_add(1);
            self.gpus = self.gpus.or(bar.gpu);
        }
    }

    /// Returns a range that contains all checked memory, if all of that memory is in one BAR.
    pub(crate) fn bounds(&self) -> Option<AddrRange> {
        self.bounds.filter(|_| self.bars == 1)
    }

    /// Returns the GPUs of the BARs that were found.
    pub(crate) fn gpus(&self) -> Gpus {
        self.gpus
    }
}
