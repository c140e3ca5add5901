// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The few kernel services that the `kernel` crate has no abstraction for.
//!
//! C headers: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h),
//! [`include/linux/dma-mapping.h`](srctree/include/linux/dma-mapping.h),
//! [`include/linux/pci.h`](srctree/include/linux/pci.h),
//! [`include/linux/module.h`](srctree/include/linux/module.h); C side: [`sys_c.c`](sys_c.c).
//!
//! Knows neither NVIDIA's interface nor ib_core's.

use core::ops::Deref;
use core::ops::DerefMut;
use core::ptr::NonNull;

use kernel::bindings;
use kernel::prelude::*;
use kernel::str::CStr;
use kernel::sync::new_condvar;
use kernel::sync::new_mutex;
use kernel::sync::CondVar;
use kernel::sync::Mutex;

use crate::c;
use crate::extents::Entry;
use crate::extents::Run;
use crate::refusal::Refusal;
use crate::region;
use crate::revocable;

/// The parameter `peerdirect_support`.
pub(crate) fn peerdirect_support() -> c_int {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_peerdirect_support() }
}

/// The parameter `persistent_api_support`.
pub(crate) fn persistent_api_support() -> c_int {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_persistent_api_support() }
}

/// The module's version, as in `/sys/module`.
pub(crate) fn version() -> &'static CStr {
    // SAFETY: Returns a string literal of the module.
    unsafe { CStr::from_char_ptr(c::peermem_version()) }
}

/// Monotonic time in seconds.
pub(crate) fn seconds() -> i64 {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_seconds() }
}

/// Keeps the module loaded until dropped.
pub(crate) struct ModuleHold(());

impl ModuleHold {
    /// `None` once the module is on its way out.
    pub(crate) fn try_new() -> Option<Self> {
        // SAFETY: Has no preconditions.
        unsafe { c::peermem_module_hold() }.then_some(ModuleHold(()))
    }
}

impl Drop for ModuleHold {
    fn drop(&mut self) {
        // SAFETY: `self` is a hold that `peermem_module_hold` gave, and is given back once.
        unsafe { c::peermem_module_release() };
    }
}

/// Runs `f` beside other [`gate_read`]s, and beside no [`gate_write`]. Process context; not
/// re-entrant.
pub(crate) fn gate_read<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: `down_read()` wants a context that may sleep, which every caller of this module is in:
    // ib_core and nvidia.ko call it in process context alone, and no spinlock of ours is ever held.
    unsafe { c::peermem_gate_read() };
    let result = f();
    // SAFETY: Taken above, by this thread.
    unsafe { c::peermem_gate_read_end() };
    result
}

/// Runs `f` beside no other [`gate_read`] or [`gate_write`]. Process context; not re-entrant.
pub(crate) fn gate_write<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: As in `gate_read`.
    unsafe { c::peermem_gate_write() };
    let result = f();
    // SAFETY: Taken above, by this thread.
    unsafe { c::peermem_gate_write_end() };
    result
}

/// A [`Mutex`] in memory of its own, for what the persistent flavour guards.
pub(crate) struct Lock<T>(Pin<KBox<Mutex<T>>>);

impl<T: Send + Unpin> region::Lock<T> for Lock<T> {
    fn new(value: T) -> Result<Self, Refusal> {
        // A lock class of its own: it is held across calls to nvidia.ko, a `Monitor` never is.
        let init = new_mutex!(value, "peermem_persistent");
        let lock = KBox::pin_init(init, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
        Ok(Lock(lock))
    }

    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.0.lock())
    }
}

/// A [`Mutex`] with a place to wait, in memory of its own, for what the revocable flavour guards.
pub(crate) struct Monitor<T>(Pin<KBox<Guarded<T>>>);

#[pin_data]
struct Guarded<T> {
    #[pin]
    value: Mutex<T>,
    #[pin]
    changed: CondVar,
}

impl<T: Send + Unpin> region::Lock<T> for Monitor<T> {
    fn new(value: T) -> Result<Self, Refusal> {
        let init = pin_init!(Guarded {
            value <- new_mutex!(value, "peermem_revocable"),
            changed <- new_condvar!("peermem_revocable"),
        });
        let guarded = KBox::pin_init(init, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
        Ok(Monitor(guarded))
    }

    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.0.value.lock())
    }
}

impl<T: Send + Unpin> revocable::Monitor<T> for Monitor<T> {
    fn wait_while(&self, mut condition: impl FnMut(&mut T) -> bool) {
        let mut guard = self.0.value.lock();
        while condition(&mut *guard) {
            self.0.changed.wait(&mut guard);
        }
    }

    fn notify_all(&self) {
        self.0.changed.notify_all();
    }
}

/// [`KVec`] as a [`region::List`].
pub(crate) struct List<T>(KVec<T>);

impl<T> Default for List<T> {
    fn default() -> Self {
        List(KVec::new())
    }
}

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T: Send> region::List<T> for List<T> {
    fn push(&mut self, value: T) -> Result<(), Refusal> {
        self.0
            .push(value, GFP_KERNEL)
            .map_err(|_| Refusal::NoMemory)
    }
}

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
        let pdev = unsafe { c::peermem_pci_dev_get(dev) };
        // INVARIANT: The reference that the function took.
        NonNull::new(pdev).map(PciDevice)
    }

    /// For C functions that want one; valid for as long as `self` is.
    pub(crate) fn as_raw(&self) -> *mut bindings::pci_dev {
        self.0.as_ptr()
    }
}

impl region::Device for PciDevice {
    fn max_segment(&self) -> u32 {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_max_segment(self.as_raw()) }
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

/// A scatter list of DMA addresses without pages.
///
/// # Invariants
///
/// The entries are allocated, and freed by the drop alone. Whoever has a [`LentTable`] may write to
/// them until then.
pub(crate) struct Table(bindings::sg_table);

// SAFETY: A plain owner of memory.
unsafe impl Send for Table {}

/// The head of a [`Table`], for C code that reads its entries, or writes to them.
pub(crate) struct LentTable(pub(crate) bindings::sg_table);

impl region::Table for Table {
    type Lent = LentTable;

    fn build(entries: impl Iterator<Item = Entry> + Clone) -> Result<Self, Refusal> {
        let count = u32::try_from(entries.clone().count()).map_err(|_| Refusal::NoMemory)?;
        let mut table = bindings::sg_table::default();
        // SAFETY: `table` is an empty table. On failure the function has freed what it allocated,
        // and what it leaves in `table` is looked at by nobody.
        if unsafe { c::peermem_sg_alloc(&mut table, count) } != 0 {
            return Err(Refusal::NoMemory);
        }
        let mut sg = table.sgl;
        // INVARIANT: Allocated above.
        let table = Table(table);
        for entry in entries.take(table.0.nents as usize) {
            // SAFETY: `sg` is the next of the table's `nents` entries: the loop runs at most that
            // often, and the function returns the entry after `sg`.
            sg = unsafe { c::peermem_sg_fill(sg, entry.addr, entry.len) };
        }
        Ok(table)
    }

    fn lend(&self) -> LentTable {
        LentTable(self.0)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: The entries are allocated by the type invariant, and freed here alone.
        unsafe { bindings::sg_free_table(&mut self.0) };
    }
}

/// A range of physical addresses in one PCI BAR, with no `struct page` for any part of it.
#[derive(Clone, Copy)]
pub(crate) struct BarRun(Run);

/// Turns runs of physical addresses into [`BarRun`]s; remembers the BAR, for the next run tends to lie
/// in the same one.
#[derive(Default)]
pub(crate) struct BarFinder(Option<Run>);

impl BarFinder {
    /// `run`, if it lies in a BAR.
    pub(crate) fn find(&mut self, run: Run) -> Result<BarRun, Refusal> {
        if !self.0.is_some_and(|bar| contains(&bar, &run)) {
            let mut bar = Run { addr: 0, len: 0 };
            // SAFETY: Both pointers are valid for writes.
            let found = unsafe { c::peermem_bar_of(run.addr, &mut bar.addr, &mut bar.len) };
            self.0 = (found && contains(&bar, &run)).then_some(bar);
        }
        // SAFETY: Has no preconditions.
        if self.0.is_none() || unsafe { c::peermem_has_struct_page(run.addr, run.len) } {
            return Err(Refusal::NotInBar);
        }
        Ok(BarRun(run))
    }
}

/// Does all of `run` lie in `bar`?
fn contains(bar: &Run, run: &Run) -> bool {
    run.addr
        .checked_sub(bar.addr)
        .and_then(|offset| offset.checked_add(run.len))
        .is_some_and(|end| end <= bar.len)
}

/// Ranges of a BAR mapped for a device, until dropped.
///
/// Calls `dma_map_resource()`, which takes no lock of another driver's.
///
/// # Invariants
///
/// Each of `runs` is mapped for `device`.
pub(crate) struct BarMapping {
    device: PciDevice,
    runs: KVVec<Run>,
}

impl revocable::BarMapping for BarMapping {
    type Device = PciDevice;
    type BarRun = BarRun;

    fn map<'a>(
        device: &PciDevice,
        runs: impl Iterator<Item = &'a BarRun>,
    ) -> Result<Self, Refusal> {
        let mut mapping = BarMapping {
            device: device.clone(),
            runs: KVVec::new(),
        };
        for BarRun(run) in runs {
            // First the place, then the mapping: nothing can fail between it and its record.
            if mapping.runs.reserve(1, GFP_KERNEL).is_err() {
                return Err(Refusal::NoMemory);
            }
            let len = usize::try_from(run.len).map_err(|_| Refusal::MapResource)?;
            let mut addr = 0;
            // SAFETY: `dma_map_resource()` wants a device that is alive, and memory of an I/O device
            // that has no `struct page`, which a `BarRun` is. `addr` is valid for writes.
            let ret = unsafe { c::peermem_bar_map(device.as_raw(), run.addr, len, &mut addr) };
            if ret != 0 {
                return Err(Refusal::MapResource);
            }
            // INVARIANT: Mapped above. The place was reserved.
            let _ = mapping
                .runs
                .push_within_capacity(Run { addr, len: run.len });
        }
        Ok(mapping)
    }

    fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Drop for BarMapping {
    fn drop(&mut self) {
        for run in self.runs.iter() {
            // CAST: Was a `usize` when it was mapped.
            let len = run.len as usize;
            // SAFETY: Mapped for this device by the type invariant, and unmapped once.
            unsafe { c::peermem_bar_unmap(self.device.as_raw(), run.addr, len) };
        }
    }
}
