// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Abstractions for nvidia.ko's peer-to-peer interface.
//!
//! C header: `nv-p2p.h` of NVIDIA's driver.
//!
//! Knows nothing of ib_core. A [`PersistentPin`] lives until it is dropped. A pin that may lose its memory first is a
//! page table, a number for the [`Callback`], and `get_pages` and `put_pages`, of which
//! [`callback_pin`](crate::callback_pin) makes one.

use core::{
    ptr::{
        self,
        NonNull, //
    },
    slice, //
};

use kernel::{
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic,
        Release, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

use crate::{
    c,
    device::Gpus,
    log,
    module::{
        weak_symbols,
        LoadedModule,
        WeakSymbol, //
    },
    pci::{
        self,
        Bar,
        PciDevice, //
    },
    phys::Reader,
    ranges::{
        AddrRange,
        PageSize,
        Span, //
    },
    reason::{
        self,
        Reason, //
    },
    sync, //
};

// Those that older drivers lack come last.
weak_symbols! {
    nvidia_p2p_get_pages,
    nvidia_p2p_put_pages,
    nvidia_p2p_dma_map_pages,
    nvidia_p2p_dma_unmap_pages,
    nvidia_p2p_get_pages_persistent,
    nvidia_p2p_put_pages_persistent,
}

/// Says in the log what nvidia.ko lacks, or that it is not the flavour for this module. Before it has
/// succeeded nothing else of this file may be used.
pub(crate) fn check() -> Result {
    let Some(missing) = WeakSymbol::first_missing(WEAK_SYMBOLS) else {
        return Ok(());
    };
    match LoadedModule::find(c"nvidia") {
        None if !LoadedModule::can_be_found() => pr_err!(
            "not loaded: nvidia.ko is not, or has no {}: modprobe nvidia, or install driver 535 or newer\n",
            missing
        ),
        None => pr_err!(
            "not loaded: no nvidia.ko is, and so there is no {}: modprobe loads it first, insmod does not\n",
            missing
        ),
        Some(driver) if driver.is_proprietary => pr_err!(
            "not loaded: nvidia.ko {} is the proprietary flavour, and this module was not built for it: build it again beside that driver (x86-64), or install NVIDIA's open kernel modules (nvidia-open), or use NVIDIA's own nvidia-peermem\n",
            driver.version()
        ),
        Some(driver) => pr_err!(
            "not loaded: nvidia.ko {} has no {}: install driver 535 or newer\n",
            driver.version(),
            missing
        ),
    }
    // kmod then points to the log.
    Err(ENOENT)
}

/// The versions of `struct nvidia_p2p_page_table` that are known: 1.2 (to 575), 2.x (from 580).
const TABLE_1: u32 = 0x0001_0002;
const TABLE_2: u32 = 0x0002_0000;
/// `NVIDIA_P2P_DMA_MAPPING_VERSION`: 2.3.
const MAPPING_2: u32 = 0x0002_0003;

/// How often a put that failed for want of memory is tried again, after 1 ms, 2 ms, 4 ms, and so on: a second in all.
/// More tries would only add warnings: nvidia.ko writes one for each that fails.
const PUT_RETRIES: u32 = 10;

/// Calls `put` until it returns anything but -ENOMEM; gives up after a second. For
/// `nvidia_p2p_put_pages()` alone, where that says that nothing was done.
pub(crate) fn retry(mut put: impl FnMut() -> c_int) -> c_int {
    for retry in 0..PUT_RETRIES {
        let ret = put();
        if ret != reason::ENOMEM {
            return ret;
        }
        fsleep(Delta::from_millis(1 << retry));
    }
    put()
}

/// `NVIDIA_P2P_VERSION_COMPATIBLE()`: the same major number, and at least the minor one.
fn compatible(version: u32, known: u32) -> bool {
    version >> 16 == known >> 16 && version & 0xffff >= known & 0xffff
}

/// Returns the size of pages of an `enum nvidia_p2p_page_size_type`. nvidia.ko itself does not map the pages of 4 KiB that
/// the interface has.
fn page_size(size: u32) -> Option<PageSize> {
    match size {
        c::nvidia_p2p_page_size_type_NVIDIA_P2P_PAGE_SIZE_64KB => Some(PageSize::KIB_64),
        c::nvidia_p2p_page_size_type_NVIDIA_P2P_PAGE_SIZE_128KB => Some(PageSize::KIB_128),
        _ => None,
    }
}

/// Refused unless `array` has `want` entries, which are never none; NULL has none.
fn check_entries<T>(array: *const T, entries: u32, want: u64) -> Result<(), Reason> {
    let have = if array.is_null() { 0 } else { entries };
    if u64::from(have) == want {
        return Ok(());
    }
    Err(Reason::Entries { have, want })
}

/// A page table of nvidia.ko's.
///
/// # Invariants
///
/// The pointer is what a successful `nvidia_p2p_get_pages*()` gave. Whether it still points to a
/// table is for the user to know.
#[derive(Clone, Copy)]
pub(crate) struct TablePtr(NonNull<c::nvidia_p2p_page_table>);

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
    pub(crate) unsafe fn check<'a>(self, span: Span) -> Result<Checked<'a>, Reason> {
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
            return Err(Reason::TableVersion(version));
        }
        let page = page_size(size).ok_or(Reason::TablePageSize(size))?;
        let want = span.pages(page).ok_or(Reason::TablePageSize(size))?;
        check_entries(pages, entries, want)?;
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
            cacheable,
        })
    }
}

/// What a page table says, once it is known to make sense.
///
/// # Invariants
///
/// Each of `pages` points to a page that lives for `'a`.
pub(crate) struct Checked<'a> {
    pages: &'a [*mut c::nvidia_p2p_page],
    pub(crate) page: PageSize,
    pub(crate) cacheable: bool,
}

impl Checked<'_> {
    /// Returns the BAR of the first page: an allocation lies on one GPU. Returns `None` for memory that CPUs cache.
    fn bar(&self) -> Option<Bar> {
        let first = self.page_at(0).filter(|_| !self.cacheable)?;
        pci::bar_of_page(&first)
    }

    /// Where the page with that number is, if there are so many.
    fn page_at(&self, number: usize) -> Option<AddrRange> {
        self.pages.get(number).map(|page| AddrRange {
            // SAFETY: The page is alive by the type invariant.
            addr: unsafe { (**page).physical_address },
            len: self.page.bytes(),
        })
    }

    /// Reads one of the [`Reader::batches`]: see [`Reader::pages`].
    #[inline(always)]
    pub(crate) fn read(&self, from: usize, reader: &mut Reader<'_, '_>) -> Option<usize> {
        // SAFETY: The page is alive by the type invariant.
        let addr = |page: &*mut c::nvidia_p2p_page| unsafe { (**page).physical_address };
        reader.pages(self.pages, from, addr, self.page)
    }
}

/// GPU memory that stays pinned until this is dropped, also after it was freed and after its process is gone. It may be mapped
/// for a device.
///
/// # Invariants
///
/// `table` is alive: a persistent table goes with `nvidia_p2p_put_pages_persistent()` alone, which the drop alone calls.
/// `mapping` is a mapping of `table`.
pub(crate) struct PersistentPin {
    table: TablePtr,
    span: Span,
    page: PageSize,
    /// The BAR of the first page.
    bar: Option<Bar>,
    mapping: Option<DmaMapping>,
}

/// A page table's mapping for `device`.
///
/// # Invariants
///
/// `raw` is alive: it goes with `nvidia_p2p_dma_unmap_pages()` alone, which [`PersistentPin::unmap`] alone calls.
struct DmaMapping {
    raw: NonNull<c::nvidia_p2p_dma_mapping>,
    device: PciDevice,
}

// SAFETY: nvidia.ko takes the pointer from any thread; what it points to does not change.
unsafe impl Send for DmaMapping {}

impl DmaMapping {
    fn raw(&self) -> &c::nvidia_p2p_dma_mapping {
        // SAFETY: Alive by the type invariant, and nobody writes to it.
        unsafe { self.raw.as_ref() }
    }

    /// Checks the mapping against its pin.
    fn check(&self, span: &Span, page: PageSize) -> Result<(), Reason> {
        let raw = self.raw();
        if !compatible(raw.version, MAPPING_2) {
            return Err(Reason::MappingVersion(raw.version));
        }
        let size = raw.page_size_type;
        let same = page_size(size).filter(|size| *size == page);
        let want = same.and_then(|page| span.pages(page));
        let want = want.ok_or(Reason::MappingPageSize(size))?;
        check_entries(raw.dma_addresses, raw.entries, want)
    }
}

impl PersistentPin {
    /// Pins `span` in the calling process: `nvidia_p2p_get_pages_persistent()`. Takes nvidia.ko's API lock.
    pub(crate) fn pin(span: Span) -> Result<Self, Reason> {
        let mut table = ptr::null_mut();
        let mut get = || {
            // SAFETY: `table` is valid for writes; the function checks the range.
            unsafe { c::nvidia_p2p_get_pages_persistent(span.start(), span.len(), &mut table, 0) }
        };
        // A put of the other mode must not meet a new pin: see `callback_pin`. Without `Callbacks` there is no such put.
        let ret = match CALLBACKS.load(Acquire) {
            true => sync::put_rwsem_read(get),
            false => get(),
        };
        // nvidia.ko leaves garbage in `table` when it fails.
        if ret != 0 {
            return Err(Reason::Pin(ret));
        }
        // INVARIANT: The pin is new, and nobody has put or mapped it.
        let mut pin = PersistentPin {
            table: NonNull::new(table).map(TablePtr).ok_or(Reason::Pin(0))?,
            span,
            page: PageSize::KIB_64,
            bar: None,
            mapping: None,
        };
        let checked = pin.checked()?;
        (pin.page, pin.bar) = (checked.page, checked.bar());
        Ok(pin)
    }

    /// The size of its pages.
    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    /// On which GPU it is, as far as its first address shows it.
    pub(crate) fn gpus(&self) -> Gpus {
        self.bar.map_or(Gpus::default(), |bar| bar.gpu)
    }

    /// The range of virtual addresses.
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// What the page table says.
    fn checked(&self) -> Result<Checked<'_>, Reason> {
        // SAFETY: The table is alive by the type invariant, for as long as `self` is borrowed.
        unsafe { self.table.check(self.span) }
    }

    /// Where the page with that number is, if there are so many.
    pub(crate) fn page(&self, number: usize) -> Option<AddrRange> {
        self.checked().ok()?.page_at(number)
    }

    /// Reads where the pages are. Refused where CPUs cache them.
    pub(crate) fn read(&self, reader: &mut Reader<'_, '_>) -> Result<(), Reason> {
        let checked = self.checked()?;
        if checked.cacheable {
            return Err(Reason::CpuCacheable);
        }
        reader.begin_in(self.bar);
        reader.batches(|reader, from| Ok(checked.read(from, reader)))
    }

    /// Maps every page for `device`, once: `nvidia_p2p_dma_map_pages()`. Takes nvidia.ko's API lock.
    pub(crate) fn map(&mut self, device: &PciDevice) -> Result<(), Reason> {
        if self.mapping.is_some() {
            return Err(Reason::MappedTwice);
        }
        let mut raw = ptr::null_mut();
        // SAFETY: The device is alive, the table too by the type invariant, and `raw` is valid for
        // writes.
        let ret =
            unsafe { c::nvidia_p2p_dma_map_pages(device.as_raw(), self.table.as_raw(), &mut raw) };
        if ret != 0 {
            return Err(Reason::Map(ret));
        }
        // INVARIANT: Mapped above.
        let mapping = self.mapping.insert(DmaMapping {
            raw: NonNull::new(raw).ok_or(Reason::Map(0))?,
            device: device.clone(),
        });
        mapping
            .check(&self.span, self.page)
            .inspect_err(|_| self.unmap())
    }

    /// The DMA address of each page, in the order of virtual addresses; none while it is not mapped.
    pub(crate) fn addresses(&self) -> &[u64] {
        self.mapping.as_ref().map_or(&[], |mapping| {
            let raw = mapping.raw();
            // SAFETY: `dma_addresses` points to `entries` addresses that live as long as the mapping, and is not NULL:
            // `map` keeps no mapping that it has not checked.
            unsafe { slice::from_raw_parts(raw.dma_addresses, raw.entries as usize) }
        })
    }

    /// Undoes [`PersistentPin::map`], if that is still to do: `nvidia_p2p_dma_unmap_pages()`. Takes a lock of the page table,
    /// not the API lock.
    pub(crate) fn unmap(&mut self) {
        let Some(DmaMapping { raw, device }) = self.mapping.take() else {
            return;
        };
        // SAFETY: By the type invariants the device, the table and the mapping are alive, and the three belong together.
        let ret = unsafe {
            c::nvidia_p2p_dma_unmap_pages(device.as_raw(), self.table.as_raw(), raw.as_ptr())
        };
        if ret != 0 {
            log::not_unmapped(&self.span, ret);
        }
    }
}

impl Drop for PersistentPin {
    /// Unmaps, then calls `nvidia_p2p_put_pages_persistent()`, once. Takes nvidia.ko's API lock.
    ///
    /// Whatever that answers, nvidia.ko has given back what the pin has of the GPU's usage count: a further try after an error
    /// would take it from somebody else, and at last stop the GPU.
    fn drop(&mut self) {
        self.unmap();
        // SAFETY: The table is alive by the type invariant, and put nowhere else.
        let ret = unsafe {
            c::nvidia_p2p_put_pages_persistent(self.span.start(), self.table.as_raw(), 0)
        };
        if ret != 0 {
            log::leaked(&self.span, ret);
        }
    }
}

/// Callbacks can be made for as long as this exists; its drop waits until none is running.
///
/// To be dropped when no pin is left. A callback gives up its hold on the module before it has
/// returned; but nvidia.ko makes it with the API lock held, and the put of a table that was never
/// given out takes that lock, does nothing, and returns 0.
pub(crate) struct Callbacks(());

/// Whether [`Callbacks`] exists.
static CALLBACKS: Atomic<bool> = Atomic::new(false);

impl Callbacks {
    /// To be made before the first pin that can be called back.
    pub(crate) fn new() -> Self {
        CALLBACKS.store(true, Release);
        Callbacks(())
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        CALLBACKS.store(false, Release);
        let mut never_given = c::peermem_page_table::default();
        let table = ptr::from_mut(&mut never_given).cast();
        // SAFETY: The function does not dereference the table, and does not find it.
        let ret = retry(|| unsafe { c::nvidia_p2p_put_pages(0, 0, 0, table) });
        if ret != 0 {
            log::not_fenced(ret);
        }
    }
}

/// What the callback of nvidia.ko calls.
pub(crate) trait Callback {
    /// It frees the memory of the pin with that number. Called at most once for each, in process context, with the
    /// API lock held. The page table dies with the return.
    fn free_callback(number: usize);
}

/// `nvidia_p2p_get_pages()`: pins `span` in the calling process. Takes nvidia.ko's API lock. From then on
/// [`Callback::free_callback`] may be called with `number`, once, and even before the return. `None`: pinned, but
/// without a table. Refused without [`Callbacks`].
pub(crate) fn get_pages<C: Callback>(
    span: &Span,
    number: usize,
) -> Result<Option<TablePtr>, Reason> {
    if !CALLBACKS.load(Acquire) {
        return Err(Reason::Unloading);
    }
    let mut table = ptr::null_mut();
    // SAFETY: `table` is valid for writes, and the function checks the range. The callback takes
    // any number for its data. It is not unloaded before it has returned: there is `Callbacks`, whose drop waits for
    // it, and which is dropped when no pin is left.
    let ret = unsafe {
        c::nvidia_p2p_get_pages(
            0,
            0,
            span.start(),
            span.len(),
            &mut table,
            Some(free_callback::<C>),
            ptr::without_provenance_mut(number),
        )
    };
    match ret {
        0 => Ok(NonNull::new(table).map(TablePtr)),
        // nvidia.ko leaves garbage in `table`.
        ret => Err(Reason::Pin(ret)),
    }
}

/// `nvidia_p2p_put_pages()`: unpins, if `table` is that of a pin of the calling process. Takes nvidia.ko's
/// API lock.
pub(crate) fn put_pages(span: &Span, table: TablePtr) -> c_int {
    // SAFETY: The function does not dereference the table; it looks for the pointer among the
    // pins of this process.
    unsafe { c::nvidia_p2p_put_pages(0, 0, span.start(), table.as_raw()) }
}

/// nvidia.ko frees what the pin `data` stands for.
///
/// # Safety
///
/// For nvidia.ko alone: called at most once for each pin, in process context, with the API lock held.
unsafe extern "C" fn free_callback<C: Callback>(data: *mut c_void) {
    C::free_callback(data.addr());
}
