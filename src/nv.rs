// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Abstractions for nvidia.ko's peer-to-peer interface.
//!
//! C header: `nv-p2p.h` of NVIDIA's driver.
//!
//! This file knows nothing about ib_core. A [`PersistentPin`] lives until it is dropped. A
//! revocable pin can lose its memory earlier. [`callback_pin`](crate::callback_pin) builds a
//! revocable pin from a page table, a number for the callback, [`get_pages`] and [`put_pages`].

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
        Event,
        Reason, //
    },
    sync, //
};

// The symbols that older drivers lack come last.
weak_symbols! {
    nvidia_p2p_get_pages,
    nvidia_p2p_put_pages,
    nvidia_p2p_dma_map_pages,
    nvidia_p2p_dma_unmap_pages,
    nvidia_p2p_get_pages_persistent,
    nvidia_p2p_put_pages_persistent,
}

/// Logs an error if nvidia.ko lacks a function, or is not the flavour that this module was built
/// for. No other function of this file may be called until this check has succeeded.
pub(crate) fn check() -> Result {
    let Some(missing) = WeakSymbol::first_missing(WEAK_SYMBOLS) else {
        return Ok(());
    };
    match LoadedModule::find(c"nvidia") {
        None if !LoadedModule::can_be_found() => pr_err!(
            "not loaded: nvidia.ko is not loaded, or has no {}: modprobe nvidia, or install driver 535 or newer\n",
            missing
        ),
        None => pr_err!(
            "not loaded: nvidia.ko is not loaded, and so there is no {}: modprobe loads it first, insmod does not\n",
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
    // On ENOENT, kmod points the user to the log.
    Err(ENOENT)
}

/// Known versions of `struct nvidia_p2p_page_table`: 1.2 (up to driver 575), 2.x (from 580).
const TABLE_1: u32 = 0x0001_0002;
const TABLE_2: u32 = 0x0002_0000;
/// `NVIDIA_P2P_DMA_MAPPING_VERSION`: 2.3.
const MAPPING_2: u32 = 0x0002_0003;

/// Number of retries of a put that failed with -ENOMEM, after 1 ms, 2 ms, 4 ms and so on, a second
/// in total. More retries would only add warnings: nvidia.ko logs one for each failure.
const PUT_RETRIES: u32 = 10;

/// Calls `put`, and repeats the call for up to a second while `put` returns -ENOMEM. Only for
/// `nvidia_p2p_put_pages()`, where -ENOMEM means that nothing was done.
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

/// Returns `true` if the major numbers match and the minor number of `version` is not lower than
/// that of `known`, like `NVIDIA_P2P_VERSION_COMPATIBLE()`.
fn compatible(version: u32, known: u32) -> bool {
    version >> 16 == known >> 16 && version & 0xffff >= known & 0xffff
}

/// Returns the page size for an `enum nvidia_p2p_page_size_type`. The interface also has pages of 4
/// KiB, which nvidia.ko itself does not map.
fn page_size(size: u32) -> Option<PageSize> {
    match size {
        c::nvidia_p2p_page_size_type_NVIDIA_P2P_PAGE_SIZE_64KB => Some(PageSize::KIB_64),
        c::nvidia_p2p_page_size_type_NVIDIA_P2P_PAGE_SIZE_128KB => Some(PageSize::KIB_128),
        _ => None,
    }
}

/// Returns an error unless `array` has `want` entries. `want` is not 0. A null `array` has no
/// entries.
fn check_entries<T>(array: *const T, entries: u32, want: u64) -> Result<(), Reason> {
    let have = if array.is_null() { 0 } else { entries };
    let is_right = u64::from(have) == want;
    is_right.then_some(()).ok_or(Reason::Entries { have, want })
}

/// A pointer to a page table of nvidia.ko.
///
/// # Invariants
///
/// The pointer comes from a successful `nvidia_p2p_get_pages*()`. The user of this type must know
/// whether the table is still alive.
#[derive(Clone, Copy)]
pub(crate) struct TablePtr(NonNull<c::nvidia_p2p_page_table>);

// SAFETY: The table belongs to nvidia.ko, which accepts its pointer from any thread.
unsafe impl Send for TablePtr {}
// SAFETY: See above. Only `unsafe` functions read through the pointer.
unsafe impl Sync for TablePtr {}

impl TablePtr {
    fn as_raw(self) -> *mut c::nvidia_p2p_page_table {
        self.0.as_ptr()
    }

    /// Checks that the table has a known version, and exactly the pages of `span`.
    ///
    /// # Safety
    ///
    /// The table must stay alive until the borrow ends.
    pub(crate) unsafe fn check<'a>(self, span: Span) -> Result<Checked<'a>, Reason> {
        let raw = self.as_raw().cast::<c::peermem_page_table>();
        // SAFETY: The table is alive, and has these fields in every version. `flags` is not read
        // here.
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
            // SAFETY: The table is alive, and has `flags` from version 2.0 on.
            let flags = unsafe { (*raw).flags };
            flags & c::PEERMEM_PAGE_TABLE_CPU_CACHEABLE != 0
        };
        // INVARIANT: The pages live as long as the table, which is alive for `'a`.
        Ok(Checked {
            // SAFETY: `pages` points to `entries` pointers that live as long as the table.
            pages: unsafe { slice::from_raw_parts(pages, entries as usize) },
            page,
            cacheable,
        })
    }
}

/// The contents of a page table that passed the checks.
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
    /// Returns the BAR of the first page. All pages of an allocation are on one GPU. Returns `None`
    /// for memory that CPUs cache.
    fn bar(&self) -> Option<Bar> {
        let first = self.page_at(0).filter(|_| !self.cacheable)?;
        pci::bar_of_page(&first)
    }

    /// Returns the physical range of page `number`, or `None` if the table has no such page.
    fn page_at(&self, number: usize) -> Option<AddrRange> {
        self.pages.get(number).map(|page| AddrRange {
            // SAFETY: The page is alive by the type invariant.
            addr: unsafe { (**page).physical_address },
            len: self.page.bytes(),
        })
    }

    /// Reads one batch of pages, from page number `from` on: see [`Reader::pages`].
    // Not inlined: a caller has many variables, and the loop's own variables would not stay in
    // registers.
    #[inline(never)]
    pub(crate) fn read(&self, from: usize, reader: &mut Reader<'_, '_>) -> Option<usize> {
        // SAFETY: The page is alive by the type invariant.
        let addr = |page: &*mut c::nvidia_p2p_page| unsafe { (**page).physical_address };
        reader.pages(self.pages, from, addr, self.page)
    }
}

/// GPU memory that stays pinned until this value is dropped, even after the memory was freed and
/// its process is gone. The memory may be mapped for a device.
///
/// # Invariants
///
/// `table` is alive: only `nvidia_p2p_put_pages_persistent()` frees a persistent table, and only
/// the drop calls that function. `mapping` is a mapping of `table`.
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
/// `raw` is alive: only `nvidia_p2p_dma_unmap_pages()` frees it, and only [`PersistentPin::unmap`]
/// calls that function.
struct DmaMapping {
    raw: NonNull<c::nvidia_p2p_dma_mapping>,
    device: PciDevice,
}

// SAFETY: nvidia.ko accepts the pointer from any thread, and the mapping does not change.
unsafe impl Send for DmaMapping {}

impl DmaMapping {
    fn raw(&self) -> &c::nvidia_p2p_dma_mapping {
        // SAFETY: The mapping is alive by the type invariant, and nobody writes to it.
        unsafe { self.raw.as_ref() }
    }

    /// Checks that the mapping has a known version, and exactly the pages of the pin.
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
    /// Pins `span` in the calling process: `nvidia_p2p_get_pages_persistent()`. Takes nvidia.ko's
    /// API lock.
    pub(crate) fn pin(span: Span) -> Result<Self, Reason> {
        let mut table = ptr::null_mut();
        let mut get = || {
            // SAFETY: `table` is valid for writes. The function checks the range.
            unsafe { c::nvidia_p2p_get_pages_persistent(span.start(), span.len(), &mut table, 0) }
        };
        // A put of the revocable mode must not race with a new pin: see `callback_pin`. Without
        // `Callbacks` there is no such put.
        let ret = match CALLBACKS.load(Acquire) {
            true => sync::put_rwsem_read(get),
            false => get(),
        };
        // On failure, nvidia.ko leaves garbage in `table`.
        if ret != 0 {
            return Err(Reason::Pin(ret));
        }
        // INVARIANT: The pin is new, and has been neither put nor mapped.
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

    /// Returns the size of the pages.
    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    /// Returns the GPU of the first page, or no GPU if the BAR of that page is not known.
    pub(crate) fn gpus(&self) -> Gpus {
        self.bar.map_or(Gpus::default(), |bar| bar.gpu)
    }

    /// Returns the range of virtual addresses.
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Checks the page table and returns its contents.
    fn checked(&self) -> Result<Checked<'_>, Reason> {
        // SAFETY: The table is alive by the type invariant while `self` is borrowed.
        unsafe { self.table.check(self.span) }
    }

    /// Returns the physical range of page `number`, or `None` if there is no such page.
    pub(crate) fn page(&self, number: usize) -> Option<AddrRange> {
        self.checked().ok()?.page_at(number)
    }

    /// Passes the physical addresses of the pages to `reader`. Fails for memory that CPUs cache.
    pub(crate) fn read(&self, reader: &mut Reader<'_, '_>) -> Result<(), Reason> {
        let checked = self.checked()?;
        if checked.cacheable {
            return Err(Reason::CpuCacheable);
        }
        reader.begin_in(self.bar);
        reader.batches(|reader, from| Ok(checked.read(from, reader)))
    }

    /// Maps every page for `device`: `nvidia_p2p_dma_map_pages()`. Fails if the pin is already
    /// mapped. Takes nvidia.ko's API lock.
    pub(crate) fn map(&mut self, device: &PciDevice) -> Result<(), Reason> {
        if self.mapping.is_some() {
            return Err(Reason::MappedTwice);
        }
        let mut raw = ptr::null_mut();
        // SAFETY: The device is alive, the table is alive by the type invariant, and `raw` is valid
        // for writes.
        let ret =
            unsafe { c::nvidia_p2p_dma_map_pages(device.as_raw(), self.table.as_raw(), &mut raw) };
        if ret != 0 {
            return Err(Reason::Map(ret));
        }
        // INVARIANT: The call above made the mapping.
        let mapping = self.mapping.insert(DmaMapping {
            raw: NonNull::new(raw).ok_or(Reason::Map(0))?,
            device: device.clone(),
        });
        mapping
            .check(&self.span, self.page)
            .inspect_err(|_| self.unmap())
    }

    /// Returns the DMA address of each page, in the order of virtual addresses. Empty while the pin
    /// is not mapped.
    pub(crate) fn addresses(&self) -> &[u64] {
        self.mapping.as_ref().map_or(&[], |mapping| {
            let raw = mapping.raw();
            // SAFETY: `dma_addresses` points to `entries` addresses that live as long as the
            // mapping. The pointer is not null, because `map` keeps only a mapping that passed the
            // check.
            unsafe { slice::from_raw_parts(raw.dma_addresses, raw.entries as usize) }
        })
    }

    /// Undoes [`PersistentPin::map`], if the pin is mapped: `nvidia_p2p_dma_unmap_pages()`. Takes a
    /// lock of the page table, but not the API lock.
    pub(crate) fn unmap(&mut self) {
        let Some(DmaMapping { raw, device }) = self.mapping.take() else {
            return;
        };
        // SAFETY: By the type invariants, the device, the table and the mapping are alive and
        // belong together.
        let ret = unsafe {
            c::nvidia_p2p_dma_unmap_pages(device.as_raw(), self.table.as_raw(), raw.as_ptr())
        };
        if ret != 0 {
            log::report(Event::NotUnmapped, Some(&self.span), Some(ret));
        }
    }
}

impl Drop for PersistentPin {
    /// Unmaps, then calls `nvidia_p2p_put_pages_persistent()` once. Takes nvidia.ko's API lock.
    ///
    /// nvidia.ko drops the pin's share of the GPU's usage count even if the call fails. A retry
    /// would drop another user's share, and could finally stop the GPU.
    fn drop(&mut self) {
        self.unmap();
        // SAFETY: The table is alive by the type invariant, and nothing else puts it.
        let ret = unsafe {
            c::nvidia_p2p_put_pages_persistent(self.span.start(), self.table.as_raw(), 0)
        };
        if ret != 0 {
            log::report(Event::Leaked, Some(&self.span), Some(ret));
        }
    }
}

/// Token that exists while nvidia.ko may call back. The drop waits until no callback is running.
///
/// Must be dropped after the last pin. A callback drops its reference to the module before it
/// returns, so the module could be unloaded while the callback still runs. nvidia.ko holds the API
/// lock during a callback. To wait for the API lock, the drop calls `nvidia_p2p_put_pages()` with a
/// page table that nvidia.ko never returned. This call takes the API lock, does nothing else, and
/// returns 0.
pub(crate) struct Callbacks(());

/// `true` while [`Callbacks`] exists.
static CALLBACKS: Atomic<bool> = Atomic::new(false);

impl Callbacks {
    /// Allows callbacks. Must be called before the first revocable pin is made.
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
        // SAFETY: The function looks for the pointer among the pins of this process, and does not
        // dereference it. No pin has this pointer.
        let ret = retry(|| unsafe { c::nvidia_p2p_put_pages(0, 0, 0, table) });
        if ret != 0 {
            // The module is unloaded, although the last callback may not have returned.
            pr_err!(
                "cannot wait for the end of nvidia.ko's callbacks (error {})\n",
                ret
            );
        }
    }
}

/// Pins `span` in the calling process: `nvidia_p2p_get_pages()`. Takes nvidia.ko's API lock. When
/// nvidia.ko frees the memory, it calls `callback` with `number`, at most once. This call is made
/// in process context with the API lock held, and can come before this function returns. nvidia.ko
/// frees the page table when `callback` returns. `None` means that the memory is pinned, but there
/// is no table. Fails if no [`Callbacks`] exists.
pub(crate) fn get_pages(
    span: &Span,
    number: usize,
    callback: extern "C" fn(*mut c_void),
) -> Result<Option<TablePtr>, Reason> {
    if !CALLBACKS.load(Acquire) {
        return Err(Reason::Unloading);
    }
    let mut table = ptr::null_mut();
    // SAFETY: `table` is valid for writes, and the function checks the range. The callback accepts
    // any number as its data. The callback's code stays loaded until the callback has returned:
    // `Callbacks` exists until no pin is left, and its drop waits for the callback.
    let ret = unsafe {
        c::nvidia_p2p_get_pages(
            0,
            0,
            span.start(),
            span.len(),
            &mut table,
            Some(callback),
            ptr::without_provenance_mut(number),
        )
    };
    match ret {
        0 => Ok(NonNull::new(table).map(TablePtr)),
        // On failure, nvidia.ko leaves garbage in `table`.
        ret => Err(Reason::Pin(ret)),
    }
}

/// Unpins if `table` belongs to a pin of the calling process: `nvidia_p2p_put_pages()`. Takes
/// nvidia.ko's API lock.
pub(crate) fn put_pages(span: &Span, table: TablePtr) -> c_int {
    // SAFETY: The function does not dereference the table. The function looks for the pointer among
    // the pins of this process.
    unsafe { c::nvidia_p2p_put_pages(0, 0, span.start(), table.as_raw()) }
}
