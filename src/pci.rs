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

// SAFETY: The count of a device is atomic, and may be given back on any thread.
unsafe impl Send for PciDevice {}
// SAFETY: A shared `PciDevice` gives its pointer and constant properties of the device.
unsafe impl Sync for PciDevice {}

impl PciDevice {
    /// Calls `f` with the PCI device that `dev` is, or with `None` if it is NULL or on another bus. Takes no reference.
    ///
    /// # Safety
    ///
    /// `dev` is NULL, or points to a device that is alive during the call.
    pub(crate) unsafe fn with_device<R>(
        dev: *mut bindings::device,
        f: impl FnOnce(Option<&PciDevice>) -> R,
    ) -> R {
        // SAFETY: As promised by the caller.
        let device = NonNull::new(unsafe { c::peermem_pci_dev(dev) });
        // INVARIANT: The reference is the caller's, and is not given back here.
        f(device
            .map(|device| ManuallyDrop::new(PciDevice(device)))
            .as_deref())
    }

    /// The device of the machine that comes after `from`.
    fn next(from: Option<PciDevice>) -> Option<PciDevice> {
        let from = from.map_or(ptr::null_mut(), |from| {
            // The function gives the reference back.
            ManuallyDrop::new(from).as_raw()
        });
        // CAST: All bits set, as in C.
        let any = bindings::PCI_ANY_ID as c_uint;
        // SAFETY: NULL, or a device with a reference, as the function wants it.
        // INVARIANT: The reference that the function took.
        NonNull::new(unsafe { c::pci_get_device(any, any, from) }).map(PciDevice)
    }

    /// For C functions that want one; valid for as long as `self` is.
    pub(crate) fn as_raw(&self) -> *mut bindings::pci_dev {
        self.0.as_ptr()
    }

    /// The longest segment that it takes, in bytes.
    pub(crate) fn max_segment(&self) -> u32 {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_max_segment(self.as_raw()) }
    }

    /// Where it is.
    pub(crate) fn address(&self) -> PciAddress {
        // SAFETY: The device is alive by the type invariant.
        PciAddress(unsafe { c::peermem_pci_address(self.as_raw()) })
    }

    /// Nothing translates what it says: a mapping gives it nothing that it could not reach before.
    pub(crate) fn is_direct(&self) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_is_direct(self.as_raw()) }
    }

    /// Returns `true` if an IOMMU is known to translate what it says.
    pub(crate) fn is_translated(&self) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_is_translated(self.as_raw()) }
    }

    /// Returns `true` if the kernel maps no more for this device than it is asked for, when `bits` has each bit that is set in
    /// an address or a length.
    pub(crate) fn maps_exactly(&self, bits: u64) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_maps_exactly(self.as_raw(), bits) }
    }

    /// It has not been removed.
    fn is_there(&self) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_pci_is_there(self.as_raw()) }
    }

    /// Its memory BAR that has `addr` in it. One that was removed has given up its BARs.
    fn bar(&self, addr: u64) -> Option<AddrRange> {
        let mut bar = AddrRange::default();
        // SAFETY: The device is alive by the type invariant, and both are valid for writes.
        unsafe { c::peermem_pci_bar(self.as_raw(), addr, &mut bar.addr, &mut bar.len) }
            .then_some(bar)
    }
}

impl Clone for PciDevice {
    fn clone(&self) -> Self {
        // SAFETY: The device is alive by the type invariant.
        // INVARIANT: The reference taken here.
        unsafe { bindings::pci_dev_get(self.as_raw()) };
        PciDevice(self.0)
    }
}

impl Drop for PciDevice {
    fn drop(&mut self) {
        // SAFETY: Gives back the reference of the type invariant.
        unsafe { bindings::pci_dev_put(self.as_raw()) };
    }
}

/// A device in whose BARs addresses were found.
struct Known {
    device: PciDevice,
    /// nvidia.ko's answers for other devices: see [`remember`].
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
    /// The GPU that has it; none if all numbers are taken.
    pub(crate) gpu: Gpus,
}

/// The devices in whose BARs addresses were found: the search for the next one begins with these, and walks over all
/// devices of the machine only if it is in none of them. Their references keep no device in the machine.
///
/// The index in both arrays is the GPU's number. A GPU without a number is not remembered.
struct BarCache {
    devices: [Option<Known>; Gpus::MOST as usize],
    /// Where the GPU with that number is, or was: a GPU that comes back gets its number again.
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
    /// The remembered BAR that has `addr` in it.
    fn find(&self, addr: u64) -> Option<Bar> {
        (0..).zip(&self.devices).find_map(|(number, known)| {
            Some(Bar {
                range: known.as_ref()?.device.bar(addr)?,
                gpu: Gpus::one(number),
            })
        })
    }

    /// Keeps `device` in the place of its number, and returns the number. Returns none, and keeps nothing, if every number
    /// is taken.
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

    /// Drops the references to GPUs that were removed, and what was remembered of them.
    fn forget_removed(&mut self) {
        for place in &mut self.devices {
            place.take_if(|known| !known.device.is_there());
        }
    }

    /// The device with that number that is in the machine.
    fn gpu(&mut self, gpu: Gpus) -> Option<&mut Known> {
        let number = gpu.numbers().next()?;
        let known = self.devices.get_mut(number as usize)?.as_mut()?;
        known.device.is_there().then_some(known)
    }
}

/// The memory BAR that has `addr` in it, of any PCI device. May sleep.
fn bar_of(addr: u64) -> Option<Bar> {
    BAR_CACHE.with(|cache| {
        if let Some(found) = cache.find(addr) {
            return Some(found);
        }
        cache.forget_removed();
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

/// Returns nvidia.ko's last answer for `gpu` and `device`, unless one of them was removed since. Takes no lock of
/// nvidia.ko's. May sleep.
pub(crate) fn recall(gpu: Gpus, device: &PciDevice) -> Option<Reach> {
    BAR_CACHE.with(|cache| cache.gpu(gpu)?.answer(device))
}

/// Remembers nvidia.ko's answer for `gpu` and `device`, if there is memory for it, and forgets those for devices that were
/// removed. May sleep.
pub(crate) fn remember(gpu: Gpus, device: &PciDevice, answer: Reach) {
    let len = BAR_CACHE.with(|cache| cache.gpu(gpu).map_or(0, |known| known.answers.len()));
    // Without the lock: `dma_map` takes it with ib_core's `mapping_lock` held, for which a callback waits.
    let Ok(answers) = KVVec::with_capacity(len + 1, GFP_KERNEL) else {
        return;
    };
    BAR_CACHE.with(|cache| {
        // Others may have been remembered since. Then the next registration asks again.
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

/// Whether `page` is the last of its BAR, or in none. May sleep.
pub(crate) fn ends_bar(page: &AddrRange) -> bool {
    let next = page.addr.wrapping_add(page.len);
    bar_of(page.addr).is_none_or(|bar| !bar.range.contains(&AddrRange { addr: next, len: 1 }))
}

/// Where the GPU with that number is.
pub(crate) fn gpu_address(number: u32) -> Option<PciAddress> {
    BAR_CACHE.with(|cache| *cache.gpus.get(number as usize)?)
}

/// Devices are remembered until this is dropped. To be dropped when no pin is left.
pub(crate) struct Bars(());

impl Bars {
    pub(crate) fn new() -> Self {
        Bars(())
    }

    /// How many references to devices are kept.
    #[cfg(peermem_kunit)]
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

/// The BAR in which that page lies. May sleep.
pub(crate) fn bar_of_page(page: &AddrRange) -> Option<Bar> {
    // SAFETY: Has no preconditions.
    if unsafe { c::peermem_has_struct_page(page.addr, page.len, 0, u64::MAX, false) } {
        // Memory, which is in no BAR: not looked for at each registration.
        return None;
    }
    bar_of(page.addr)
}

/// Memory has a `struct page` for each of its pages or for none, in steps of so much at the least.
const SUBSECTION: u64 = 1 << 21;

/// Checks that memory is in BARs, and has no `struct page` but those of a BAR's peer-to-peer DMA memory. Remembers what it
/// has checked: what comes next tends to lie beside it.
#[derive(Default)]
pub(crate) struct BarFinder {
    /// The BAR found last.
    bar: Option<AddrRange>,
    /// A part of it without such a `struct page`.
    clear: AddrRange,
    /// How often it was another BAR than before.
    bars: u32,
    gpus: Gpus,
    /// All that was clear.
    bounds: Option<AddrRange>,
}

impl BarFinder {
    /// Checks `range`, and returns `true` if it is in the BAR found last, and as it should be. Takes no lock.
    #[inline(always)]
    pub(crate) fn lookup_here(&mut self, range: &AddrRange) -> bool {
        self.clear.contains(range) || self.bar.is_some_and(|bar| self.lookup_in(&bar, range))
    }

    #[cold]
    #[inline(never)]
    fn lookup_in(&mut self, bar: &AddrRange, range: &AddrRange) -> bool {
        if !bar.contains(range) {
            return false;
        }
        let clear = range.widened(SUBSECTION, bar);
        // SAFETY: Has no preconditions.
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

    /// Checks `range`, which is not empty and may go on in another BAR. May sleep.
    pub(crate) fn lookup(&mut self, mut range: AddrRange) -> Result<(), Reason> {
        while range.len > 0 {
            let bar = self.bar_at(range.addr).ok_or(Reason::NotInBar)?;
            let here = range.start_in(&bar);
            if !self.lookup_in(&bar, &here) {
                return Err(Reason::HasStructPages);
            }
            range.addr = range.addr.wrapping_add(here.len);
            range.len -= here.len;
        }
        Ok(())
    }

    /// The BAR with `addr` in it.
    fn bar_at(&mut self, addr: u64) -> Option<AddrRange> {
        if !self
            .bar
            .is_some_and(|bar| bar.contains(&AddrRange { addr, len: 1 }))
        {
            self.bar = None;
            self.enter(bar_of(addr)?);
        }
        self.bar
    }

    /// Goes on in `bar`, in which an address was found.
    pub(crate) fn enter(&mut self, bar: Bar) {
        if self.bar != Some(bar.range) {
            self.bar = Some(bar.range);
            self.bars = self.bars.saturating_add(1);
            self.gpus = self.gpus.or(bar.gpu);
        }
    }

    /// A range in one BAR with all that was checked, if there is one.
    pub(crate) fn bounds(&self) -> Option<AddrRange> {
        self.bounds.filter(|_| self.bars == 1)
    }

    /// The GPUs in whose BARs something was found.
    pub(crate) fn gpus(&self) -> Gpus {
        self.gpus
    }
}
