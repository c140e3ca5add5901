// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! PCI devices and their BARs.
//!
//! C header: [`include/linux/pci.h`](srctree/include/linux/pci.h); C side: [`helpers.c`](helpers.c).

use core::{
    mem::ManuallyDrop,
    ptr::{
        self,
        NonNull, //
    }, //
};

use kernel::{
    bindings,
    container_of,
    prelude::*, //
};

use crate::{
    c,
    collections::SmallVec,
    device::{
        Gpus,
        PciAddress, //
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
    /// The PCI device that `dev` is; `None` if it is NULL or on another bus.
    ///
    /// # Safety
    ///
    /// `dev` is NULL, or points to a device that is alive during the call.
    pub(crate) unsafe fn from_device(dev: *mut bindings::device) -> Option<Self> {
        // SAFETY: As promised by the caller.
        if dev.is_null() || !unsafe { bindings::dev_is_pci(dev) } {
            return None;
        }
        // SAFETY: What is on the PCI bus is part of one.
        let pdev = unsafe { container_of!(dev, bindings::pci_dev, dev) };
        // SAFETY: Alive during the call as promised by the caller.
        // INVARIANT: The reference that the function took.
        NonNull::new(unsafe { bindings::pci_dev_get(pdev) }).map(PciDevice)
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

    /// Returns `true` if the kernel maps no more for this device than it is asked for, when `bits` has each bit that is set in
    /// an address or a length.
    pub(crate) fn maps_exactly(&self, bits: u64) -> bool {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_maps_exactly(self.as_raw(), bits) }
    }

    /// It has not been removed.
    fn is_there(&self) -> bool {
        // SAFETY: The device is alive by the type invariant. No reference to what C changes.
        unsafe { bindings::kobject::state_in_sysfs_raw(&raw const (*self.as_raw()).dev.kobj) != 0 }
    }

    /// Its memory BAR that has `addr` in it. One that was removed has given up its BARs.
    fn bar(&self, addr: u64) -> Option<AddrRange> {
        // SAFETY: The device is alive by the type invariant, and they are part of it.
        let all = unsafe { (&raw const (*self.as_raw()).resource).cast::<bindings::resource>() };
        (0..bindings::PCI_STD_NUM_BARS as usize).find_map(|number| {
            // SAFETY: There are more.
            let bar = unsafe { all.add(number) };
            // SAFETY: As above. They change with the machine alone: hence volatile. No more is made of it than an
            // address of which the provider has said that it is memory.
            let (start, end) = unsafe {
                let (start, end) = (&raw const (*bar).start, &raw const (*bar).end);
                (start.read_volatile(), end.read_volatile())
            };
            if !(start..=end).contains(&addr) {
                return None;
            }
            // SAFETY: As above.
            let (flags, parent) = unsafe {
                let (flags, parent) = (&raw const (*bar).flags, &raw const (*bar).parent);
                (flags.read_volatile(), parent.read_volatile())
            };
            // CAST: No narrower.
            let is_memory = flags & bindings::IORESOURCE_MEM as c_ulong != 0;
            (is_memory && !parent.is_null()).then(|| AddrRange {
                addr: start,
                len: (end - start).wrapping_add(1),
            })
        })
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

/// How many devices are remembered.
const BAR_CACHE_LEN: usize = 16;

/// A device in whose BARs addresses were found.
struct Known {
    device: PciDevice,
    gpu: Gpus,
    /// For which others this module maps its BARs, and for which it does not: see [`remember`].
    answers: SmallVec<(PciDevice, bool)>,
}

impl Known {
    fn answer(&self, hca: &PciDevice) -> Option<bool> {
        let mut all = self.answers.iter();
        let (_, answer) = all.find(|(known, _)| known.0 == hca.0)?;
        Some(*answer)
    }
}

/// The devices in whose BARs addresses were found: the search for the next one begins with these, and walks over all
/// devices of the machine only if it is in none of them. Their references keep no device in the machine.
struct BarCache {
    devices: [Option<Known>; BAR_CACHE_LEN],
    /// Whose place the next one gets, if each has one.
    next: usize,
    /// Numbers of devices, by where they are: these stay.
    gpus: [Option<PciAddress>; Gpus::MOST as usize],
}

static BAR_CACHE: StaticMutex<BarCache> = StaticMutex::new(
    BARS_LOCK,
    BarCache {
        devices: [const { None }; BAR_CACHE_LEN],
        next: 0,
        gpus: [None; Gpus::MOST as usize],
    },
);

impl BarCache {
    /// Keeps `device`, in the place of one that is gone if there is any, and says which GPU it is; none where there
    /// are too many.
    fn keep(&mut self, device: PciDevice) -> Gpus {
        let at = Some(device.address());
        let number = self
            .gpus
            .iter()
            .position(|known| *known == at || known.is_none());
        let gpu = match number.and_then(|number| Some((number, self.gpus.get_mut(number)?))) {
            Some((number, place)) => {
                *place = at;
                // CAST: Few.
                Gpus::one(number as u32)
            }
            None => Gpus::default(),
        };
        let is_free =
            |known: &Option<Known>| !known.as_ref().is_some_and(|known| known.device.is_there());
        let free = self.devices.iter().position(is_free);
        let place = free.unwrap_or_else(|| {
            let oldest = self.next;
            self.next = (oldest + 1) % BAR_CACHE_LEN;
            oldest
        });
        if let Some(known) = self.devices.get_mut(place) {
            let answers = SmallVec::new();
            *known = Some(Known {
                device,
                gpu,
                answers,
            });
        }
        gpu
    }

    /// The device with that number that is in the machine.
    fn gpu(&mut self, gpu: Gpus) -> Option<&mut Known> {
        let mut all = self.devices.iter_mut().flatten();
        all.find(|known| known.gpu == gpu && known.device.is_there())
    }
}

/// The memory BAR that has `addr` in it, of any PCI device, and which GPU that is. May sleep.
fn bar_of(addr: u64) -> Option<(AddrRange, Gpus)> {
    BAR_CACHE.with(|cache| {
        let all = cache.devices.iter().flatten();
        let mut known = all.filter_map(|known| Some((known.device.bar(addr)?, known.gpu)));
        if let Some(found) = known.next() {
            return Some(found);
        }
        let mut device = PciDevice::next(None)?;
        loop {
            if let Some(bar) = device.bar(addr) {
                return Some((bar, cache.keep(device)));
            }
            device = PciDevice::next(Some(device))?;
        }
    })
}

/// What was remembered of `gpu` and `device` last; nothing where one of them was removed since. May sleep.
pub(crate) fn recall(gpu: Gpus, device: &PciDevice) -> Option<bool> {
    BAR_CACHE.with(|cache| cache.gpu(gpu)?.answer(device))
}

/// Remembers something of `gpu` and `device`, if there is memory for it. May sleep.
pub(crate) fn remember(gpu: Gpus, device: &PciDevice, answer: bool) {
    BAR_CACHE.with(|cache| {
        let Some(known) = cache.gpu(gpu) else {
            return;
        };
        let new = (device.clone(), answer);
        let old = |(old, _): &&mut (PciDevice, bool)| old.0 == device.0 || !old.is_there();
        match known.answers.iter_mut().find(old) {
            Some(place) => *place = new,
            // Asked again.
            None => {
                let _ = known.answers.push(new);
            }
        }
    });
}

/// Whether `page` is the last of its BAR, or in none. May sleep.
pub(crate) fn ends_bar(page: &AddrRange) -> bool {
    let next = page.addr.wrapping_add(page.len);
    bar_of(page.addr).is_none_or(|(bar, _)| !bar.contains(&AddrRange { addr: next, len: 1 }))
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
        BAR_CACHE.with(|cache| cache.devices = [const { None }; BAR_CACHE_LEN]);
    }
}

/// The GPU in whose BAR that page lies, for information alone. May sleep.
pub(crate) fn gpu_of(page: &AddrRange) -> Gpus {
    // SAFETY: Has no preconditions.
    if unsafe { c::peermem_has_struct_page(page.addr, page.len, 0, u64::MAX) } {
        // Memory, which is in no BAR: not looked for at each registration.
        return Gpus::default();
    }
    bar_of(page.addr).map_or(Gpus::default(), |(_, gpu)| gpu)
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
    hull: Option<AddrRange>,
    /// The first failure.
    failed: Option<Reason>,
}

impl BarFinder {
    /// Checks `range`, which is not empty and may go on in another BAR, and says whether all is well so far. May sleep.
    #[inline(always)]
    pub(crate) fn lookup(&mut self, range: &AddrRange) -> bool {
        self.clear.contains(range) || self.lookup_beyond(*range)
    }

    #[cold]
    #[inline(never)]
    fn lookup_beyond(&mut self, mut range: AddrRange) -> bool {
        // Nothing is looked for after a failure: each search may go over all devices of the machine.
        while self.failed.is_none() && range.len > 0 {
            let Some(bar) = self.bar_at(range.addr) else {
                return self.fail(Reason::NotInBar);
            };
            let here = range.start_in(&bar);
            let clear = here.widened(SUBSECTION, &bar);
            // SAFETY: Has no preconditions.
            if unsafe { c::peermem_has_struct_page(clear.addr, clear.len, bar.addr, bar.last()) } {
                return self.fail(Reason::HasStructPages);
            }
            self.clear = clear;
            self.hull = Some(self.hull.map_or(clear, |hull| hull.hull(&clear)));
            range.addr = range.addr.wrapping_add(here.len);
            range.len -= here.len;
        }
        self.failed.is_none()
    }

    fn fail(&mut self, reason: Reason) -> bool {
        // What was found clear is no answer any more.
        self.clear = AddrRange::default();
        self.failed = Some(reason);
        false
    }

    /// The BAR with `addr` in it.
    fn bar_at(&mut self, addr: u64) -> Option<AddrRange> {
        if !self
            .bar
            .is_some_and(|bar| bar.contains(&AddrRange { addr, len: 1 }))
        {
            let found = bar_of(addr);
            self.bar = found.map(|(bar, _)| bar);
            self.bars = self.bars.saturating_add(1);
            self.gpus = found.map_or(self.gpus, |(_, gpu)| self.gpus.or(gpu));
        }
        self.bar
    }

    /// A range in one BAR with all that was checked, if there is one. Refused unless all was as it should be.
    pub(crate) fn hull(&self) -> Result<Option<AddrRange>, Reason> {
        if let Some(reason) = self.failed {
            return Err(reason);
        }
        Ok(self.hull.filter(|_| self.bars == 1))
    }

    /// The GPUs in whose BARs something was found.
    pub(crate) fn gpus(&self) -> Gpus {
        self.gpus
    }
}
