// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Abstractions for nvidia.ko's peer-to-peer interface.
//!
//! C header: `nv-p2p.h` of NVIDIA's driver.
//!
//! Knows nothing of ib_core. The two kinds of pin are two types: [`PersistentPin`] lives until it is
//! dropped; [`RevocablePin`] may lose its memory first, and says so through [`Revoke`].

use core::ptr;
use core::ptr::NonNull;
use core::slice;

use kernel::prelude::*;
use kernel::rbtree::RBTree;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Full;
use kernel::sync::atomic::Relaxed;
use kernel::sync::global_lock;
use kernel::sync::new_mutex;
use kernel::sync::Arc;
use kernel::sync::Mutex;
use kernel::sync::SetOnce;
use kernel::time::delay::fsleep;
use kernel::time::Delta;

use crate::c;
use crate::extents;
use crate::extents::PageSize;
use crate::extents::Run;
use crate::extents::Span;
use crate::observe;
use crate::refusal;
use crate::refusal::Refusal;
use crate::region;
use crate::revocable::Revoke;
use crate::sys;
use crate::sys::BarFinder;
use crate::sys::BarRun;
use crate::sys::ModuleHold;
use crate::sys::PciDevice;

/// The versions of `struct nvidia_p2p_page_table` that are known: 1.2 (to 575), 2.x (from 580).
const TABLE_1: u32 = 0x0001_0002;
const TABLE_2: u32 = 0x0002_0000;
/// `NVIDIA_P2P_DMA_MAPPING_VERSION`: 2.3.
const MAPPING_2: u32 = 0x0002_0003;

/// How often a put that failed for want of memory is tried again, 10 ms apart.
const PUT_RETRIES: u32 = 100;

/// Calls `put` until it returns anything but -ENOMEM, which says that nothing was done; gives up after
/// a second.
fn retry(mut put: impl FnMut() -> c_int) -> c_int {
    for _ in 0..PUT_RETRIES {
        let ret = put();
        if ret != refusal::ENOMEM {
            return ret;
        }
        fsleep(Delta::from_millis(10));
    }
    put()
}

/// `NVIDIA_P2P_VERSION_COMPATIBLE()`: the same major number, and at least the minor one.
fn compatible(version: u32, known: u32) -> bool {
    version >> 16 == known >> 16 && version & 0xffff >= known & 0xffff
}

/// A page table of nvidia.ko's.
///
/// # Invariants
///
/// The pointer is what a successful `nvidia_p2p_get_pages*()` gave. Whether it still points to a
/// table is for the user to know.
#[derive(Clone, Copy)]
struct TablePtr(NonNull<c::nvidia_p2p_page_table>);

// SAFETY: The table belongs to nvidia.ko, which takes its pointer from any thread.
unsafe impl Send for TablePtr {}
// SAFETY: As above; what is read through it is read in `unsafe` functions alone.
unsafe impl Sync for TablePtr {}

impl TablePtr {
    fn as_raw(self) -> *mut c::nvidia_p2p_page_table {
        self.0.as_ptr()
    }

    /// Checks the table against `span`.
    ///
    /// # Safety
    ///
    /// The table must be alive until the borrow ends.
    unsafe fn check<'a>(self, span: Span) -> Result<Checked<'a>, Refusal> {
        let raw = self.as_raw().cast::<c::peermem_page_table>();
        // SAFETY: The table is alive, and has these fields in every version. `flags` is not read.
        let (version, size, entries, pages) = unsafe {
            (
                (*raw).version,
                (*raw).page_size,
                (*raw).entries,
                (*raw).pages,
            )
        };
        let has_flags = compatible(version, TABLE_2);
        if !has_flags && !compatible(version, TABLE_1) {
            return Err(Refusal::TableVersion(version));
        }
        // Pages of 4 KiB exist in the interface only: nvidia.ko itself does not map them.
        let page = match size {
            c::nvidia_p2p_page_size_type_NVIDIA_P2P_PAGE_SIZE_64KB => PageSize::KIB_64,
            c::nvidia_p2p_page_size_type_NVIDIA_P2P_PAGE_SIZE_128KB => PageSize::KIB_128,
            _ => return Err(Refusal::TablePageSize(size)),
        };
        let want = span.pages(page).ok_or(Refusal::TablePageSize(size))?;
        if u64::from(entries) != want || pages.is_null() {
            return Err(Refusal::Entries {
                have: if pages.is_null() { 0 } else { entries },
                want,
            });
        }
        let cacheable = has_flags && {
            // SAFETY: The table is alive, and from version 2.0 on it has `flags`.
            let flags = unsafe { (*raw).flags };
            flags & c::PEERMEM_PAGE_TABLE_CPU_CACHEABLE != 0
        };
        // INVARIANT: As the table is alive, so are its pages.
        Ok(Checked {
            // SAFETY: `pages` points to `entries` pointers that live as long as the table.
            pages: unsafe { slice::from_raw_parts(pages, entries as usize) },
            page,
            size,
            cacheable,
        })
    }
}

/// What a page table says, once it is known to make sense.
///
/// # Invariants
///
/// Each of `pages` points to a page that lives for `'a`.
struct Checked<'a> {
    pages: &'a [*mut c::nvidia_p2p_page],
    page: PageSize,
    /// The same, as `enum nvidia_p2p_page_size_type`.
    size: u32,
    cacheable: bool,
}

impl Checked<'_> {
    /// Where the pages are, in physical addresses.
    fn runs(&self) -> impl Iterator<Item = Run> + Clone + '_ {
        let addrs = self.pages.iter().map(|page| {
            // SAFETY: The page is alive by the type invariant.
            unsafe { (**page).physical_address }
        });
        extents::page_runs(addrs, self.page)
    }
}

/// GPU memory that stays pinned until the last reference to this is dropped, also after it was freed
/// and after its process is gone.
#[derive(Clone)]
pub(crate) struct PersistentPin(Arc<Persistent>);

/// # Invariants
///
/// `table` is alive: a persistent table goes with `nvidia_p2p_put_pages_persistent()` alone, which
/// the drop alone calls.
struct Persistent {
    table: TablePtr,
    span: Span,
    page: PageSize,
    size: u32,
}

impl region::Pinned for PersistentPin {
    type Device = PciDevice;
    type Mapping = DmaMapping;

    /// `nvidia_p2p_get_pages_persistent()`. Takes nvidia.ko's API lock.
    fn pin(span: Span) -> Result<Self, Refusal> {
        let mut table = ptr::null_mut();
        // The gate: see `RevocablePin`. A put of one flavour must not meet a new pin of the other.
        let ret = sys::gate_read(|| {
            // SAFETY: `table` is valid for writes; the function checks the range.
            unsafe { c::nvidia_p2p_get_pages_persistent(span.start(), span.len(), &mut table, 0) }
        });
        // nvidia.ko leaves garbage in `table` when it fails.
        if ret != 0 {
            return Err(Refusal::Pin(ret));
        }
        // INVARIANT: The pin is new, and nobody has put it.
        let mut pin = Persistent {
            table: NonNull::new(table).map(TablePtr).ok_or(Refusal::Pin(0))?,
            span,
            page: PageSize::KIB_64,
            size: 0,
        };
        // SAFETY: Alive by the type invariant, and the borrow ends in this function.
        let checked = unsafe { pin.table.check(span) }?;
        (pin.page, pin.size) = (checked.page, checked.size);
        let pin = Arc::new(pin, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
        Ok(PersistentPin(pin))
    }

    fn page_size(&self) -> PageSize {
        self.0.page
    }

    /// `nvidia_p2p_dma_map_pages()`. Takes nvidia.ko's API lock.
    fn map(&self, device: &PciDevice) -> Result<DmaMapping, Refusal> {
        let mut raw = ptr::null_mut();
        // SAFETY: The device is alive, the table too by the type invariant, and `raw` is valid for
        // writes.
        let ret = unsafe {
            c::nvidia_p2p_dma_map_pages(device.as_raw(), self.0.table.as_raw(), &mut raw)
        };
        if ret != 0 {
            return Err(Refusal::Map(ret));
        }
        // INVARIANT: Mapped above. From here on the drop unmaps.
        let mapping = DmaMapping {
            raw: NonNull::new(raw).ok_or(Refusal::Map(0))?,
            pin: self.clone(),
            device: device.clone(),
        };
        mapping.check()?;
        Ok(mapping)
    }
}

impl Drop for Persistent {
    /// `nvidia_p2p_put_pages_persistent()`. Takes nvidia.ko's API lock.
    fn drop(&mut self) {
        let ret = retry(|| {
            // SAFETY: The table is alive by the type invariant, and put once: -ENOMEM alone says
            // that nothing was done.
            unsafe { c::nvidia_p2p_put_pages_persistent(self.span.start(), self.table.as_raw(), 0) }
        });
        if ret != 0 {
            observe::leaked(&self.span, ret);
        }
    }
}

/// A [`PersistentPin`] mapped for a device.
///
/// # Invariants
///
/// `raw` is a mapping of `pin` for `device`. It is alive, for the drop alone unmaps it, and it goes
/// with `pin` otherwise.
pub(crate) struct DmaMapping {
    raw: NonNull<c::nvidia_p2p_dma_mapping>,
    pin: PersistentPin,
    device: PciDevice,
}

// SAFETY: nvidia.ko takes the pointer from any thread; what it points to does not change.
unsafe impl Send for DmaMapping {}

impl DmaMapping {
    fn raw(&self) -> &c::nvidia_p2p_dma_mapping {
        // SAFETY: Alive by the type invariant, and nobody writes to it.
        unsafe { self.raw.as_ref() }
    }

    fn check(&self) -> Result<(), Refusal> {
        let raw = self.raw();
        let pin = &self.pin.0;
        if !compatible(raw.version, MAPPING_2) {
            return Err(Refusal::MappingVersion(raw.version));
        }
        if raw.page_size_type != pin.size {
            return Err(Refusal::MappingPageSize(raw.page_size_type));
        }
        let want = pin.span.len() / pin.page.bytes();
        if u64::from(raw.entries) != want || raw.dma_addresses.is_null() {
            return Err(Refusal::Entries {
                have: if raw.dma_addresses.is_null() {
                    0
                } else {
                    raw.entries
                },
                want,
            });
        }
        Ok(())
    }
}

impl region::Mapping for DmaMapping {
    fn addresses(&self) -> &[u64] {
        let raw = self.raw();
        // SAFETY: `dma_addresses` points to `entries` addresses that live as long as the mapping.
        // It is not NULL: `check` was the first to look at a new mapping.
        unsafe { slice::from_raw_parts(raw.dma_addresses, raw.entries as usize) }
    }
}

impl Drop for DmaMapping {
    /// `nvidia_p2p_dma_unmap_pages()`. Takes a lock of the page table, not the API lock.
    fn drop(&mut self) {
        // SAFETY: By the type invariant the device, the table and the mapping are alive, and the
        // three belong together.
        let ret = unsafe {
            c::nvidia_p2p_dma_unmap_pages(
                self.device.as_raw(),
                self.pin.0.table.as_raw(),
                self.raw.as_ptr(),
            )
        };
        if ret != 0 {
            observe::not_unmapped(&self.pin.0.span, ret);
        }
    }
}

/// GPU memory that is pinned until this is dropped, or until it is freed.
///
/// # Rules, and what fails without them
///
/// - What nvidia.ko holds of ours is a number, never a pointer: [`free_callback`] looks it up under a
///   lock, and holds a reference while it works. A callback can come long after the drop below, when
///   nvidia.ko did not unpin.
/// - The page table is read only where it is known to live: in [`RevocablePin::pin`], with the slot
///   locked and alive. The callback waits for that lock before it returns, and the table dies with
///   its return. Later the pointer is no more than a key.
/// - A pin whose callback has come is never put: its table's address may belong to another pin by now.
///   Between the look and the put no new pin of ours can be made, of either flavour: pins are made
///   beside each other ([`sys::gate_read`]), look and put are alone ([`sys::gate_write`]). The gate lies
///   outside the API lock, and the callback never takes it. Against pins that another module makes for
///   the same process there is no such help.
/// - nvidia.ko looks for a pin to put among those of the calling process. From another process it
///   does nothing and says 0. Then the slot, and with it the module, stays until the callback comes.
pub(crate) struct RevocablePin {
    id: usize,
    slot: Arc<Slot>,
    /// A key; never dereferenced.
    table: TablePtr,
    span: Span,
    page: PageSize,
    runs: KVVec<BarRun>,
    /// The process that nvidia.ko knows as the owner.
    owner: kernel::task::Pid,
}

/// What a callback finds by its number.
#[pin_data]
struct Slot {
    /// Cleared by the callback, before it does anything else.
    #[pin]
    alive: Mutex<bool>,
    region: Arc<dyn Revoke>,
    /// The callback may come after everything else of the registration is gone.
    _module: ModuleHold,
}

global_lock! {
    // SAFETY: Used only behind `Callbacks::ready`, which follows its initialization.
    unsafe(uninit) static DIRECTORY: Mutex<Option<RBTree<usize, Arc<Slot>>>> = None;
}

/// Numbers are not used twice: 64 bits do not come round.
static NEXT_ID: Atomic<usize> = Atomic::new(1);

/// Callbacks can be made for as long as this exists; its drop waits until none is running.
///
/// To be dropped when no pin is left. A callback gives up its hold on the module before it has
/// returned; but nvidia.ko makes it with the API lock held, and the put of a table that was never
/// given out takes that lock, does nothing, and returns 0.
pub(crate) struct Callbacks(());

static CALLBACKS: SetOnce<()> = SetOnce::new();

impl Callbacks {
    /// To be called once, before the first [`RevocablePin::pin`].
    pub(crate) fn new() -> Result<Self> {
        static CALLED: Atomic<bool> = Atomic::new(false);

        if CALLED.xchg(true, Full) {
            return Err(EBUSY);
        }
        // SAFETY: The exchange lets one caller by, and users wait for `CALLBACKS`.
        unsafe { DIRECTORY.init() };
        CALLBACKS.populate(());
        Ok(Callbacks(()))
    }

    fn ready() -> bool {
        CALLBACKS.as_ref().is_some()
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        let mut never_given = c::peermem_page_table::default();
        let table = ptr::from_mut(&mut never_given).cast();
        // SAFETY: The function does not dereference the table, and does not find it.
        let ret = retry(|| unsafe { c::nvidia_p2p_put_pages(0, 0, 0, table) });
        if ret != 0 {
            observe::not_fenced(ret);
        }
    }
}

fn directory_insert(id: usize, slot: Arc<Slot>) -> Result<(), Refusal> {
    if !Callbacks::ready() {
        return Err(Refusal::Unloading);
    }
    DIRECTORY
        .lock()
        .get_or_insert_with(RBTree::new)
        .try_create_and_insert(id, slot, GFP_KERNEL)
        .map(|_| ())
        .map_err(|_| Refusal::NoMemory)
}

/// Only with a number that [`directory_insert`] has taken.
fn directory_get(id: usize) -> Option<Arc<Slot>> {
    DIRECTORY.lock().as_ref()?.get(&id).cloned()
}

/// Only with a number that [`directory_insert`] has taken.
fn directory_remove(id: usize) {
    let slot = DIRECTORY.lock().as_mut().and_then(|tree| tree.remove(&id));
    // The last reference to a region may go here: not under the lock.
    drop(slot);
}

impl RevocablePin {
    /// `nvidia_p2p_get_pages()`. Takes nvidia.ko's API lock. `region` may be revoked before this
    /// returns.
    pub(crate) fn pin(span: Span, region: Arc<dyn Revoke>) -> Result<Self, Refusal> {
        let module = ModuleHold::try_new().ok_or(Refusal::Unloading)?;
        let slot = Arc::pin_init(
            pin_init!(Slot {
                alive <- new_mutex!(true, "peermem_slot"),
                region,
                _module: module,
            }),
            GFP_KERNEL,
        )
        .map_err(|_| Refusal::NoMemory)?;
        let id = NEXT_ID.fetch_add(1, Relaxed);
        directory_insert(id, slot.clone())?;

        let mut table = ptr::null_mut();
        let ret = sys::gate_read(|| {
            // SAFETY: `table` is valid for writes, and the function checks the range. The callback
            // takes any number for its data, and is not unloaded before it has returned: see
            // `Callbacks`.
            unsafe {
                c::nvidia_p2p_get_pages(
                    0,
                    0,
                    span.start(),
                    span.len(),
                    &mut table,
                    Some(free_callback),
                    ptr::without_provenance_mut(id),
                )
            }
        });
        if ret != 0 {
            // No callback comes, and nvidia.ko leaves garbage in `table`.
            directory_remove(id);
            return Err(Refusal::Pin(ret));
        }
        // Pinned, but nothing to put it by: what the callback looks for stays.
        let table = NonNull::new(table).map(TablePtr).ok_or(Refusal::Pin(0))?;
        // From here on the drop unpins.
        let mut pin = RevocablePin {
            id,
            slot,
            table,
            span,
            page: PageSize::KIB_64,
            runs: KVVec::new(),
            owner: current!().tgid(),
        };
        pin.copy_table()?;
        Ok(pin)
    }

    fn copy_table(&mut self) -> Result<(), Refusal> {
        let alive = self.slot.alive.lock();
        if !*alive {
            return Err(Refusal::Revoked);
        }
        // SAFETY: The table lives until the callback returns, and the callback has not come, or
        // waits for the lock held here. The borrow ends with this function.
        let checked = unsafe { self.table.check(self.span) }?;
        if checked.cacheable {
            return Err(Refusal::CpuCacheable);
        }
        let count = checked.runs().count();
        self.runs
            .reserve(count, GFP_KERNEL)
            .map_err(|_| Refusal::NoMemory)?;
        // Tables before 2.0 do not say what kind of memory they are for.
        let mut bars = BarFinder::default();
        for run in checked.runs() {
            self.runs
                .push_within_capacity(bars.find(run)?)
                .map_err(|_| Refusal::NoMemory)?;
        }
        self.page = checked.page;
        Ok(())
    }

    /// The size of its pages.
    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    /// Where the pages are, in the order of virtual addresses.
    pub(crate) fn runs(&self) -> &[BarRun] {
        &self.runs
    }
}

impl Drop for RevocablePin {
    /// `nvidia_p2p_put_pages()`, unless the callback has come. Takes nvidia.ko's API lock.
    fn drop(&mut self) {
        // The callback removes its number itself, so this asks no more than it must. In particular
        // it takes no gate on the callback's own thread, where OFED 4.9 releases.
        if !*self.slot.alive.lock() {
            return;
        }
        if current!().tgid() != self.owner {
            return observe::orphaned(&self.span);
        }
        // Each try looks again; between tries the gate is open.
        let ret = retry(|| {
            sys::gate_write(|| {
                if !*self.slot.alive.lock() {
                    return 0;
                }
                // SAFETY: The function does not dereference the table; it looks for the pointer
                // among the pins of this process.
                unsafe { c::nvidia_p2p_put_pages(0, 0, self.span.start(), self.table.as_raw()) }
            })
        });
        if ret == 0 {
            // Found and put, or waited for the callback: either way none will come.
            directory_remove(self.id);
        } else {
            observe::not_unpinned(&self.span, ret);
        }
    }
}

/// nvidia.ko frees what the pin `data` stands for.
///
/// # Safety
///
/// For nvidia.ko alone: called at most once for each pin, in process context, with the API lock held.
unsafe extern "C" fn free_callback(data: *mut c_void) {
    let id = data.addr();
    // A pin that was put has no callback, and any other has its slot.
    let Some(slot) = directory_get(id) else {
        return observe::stray_callback();
    };
    *slot.alive.lock() = false;
    slot.region.revoke();
    directory_remove(id);
}
