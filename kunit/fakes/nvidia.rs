// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A fake of nvidia.ko: page tables, DMA mappings, and the callbacks that revoke pins.

use core::{
    mem,
    ptr, //
};

use kernel::{
    bindings,
    prelude::*, //
};

use super::{
    check,
    failing,
    fails,
    fake_in_reclaim,
    record,
    take_first,
    typed_as_real,
    with,
    Call,
    Event,
    World,
    BAR,
    DMA_OFFSET,
    KIB_64, //
};
use crate::c;

/// `NVIDIA_P2P_PAGE_SIZE_64KB`.
const SIZE_64: u32 = 1;
/// Value that nvidia.ko leaves in the pointer to a result when a call fails.
const GARBAGE: usize = 0xdead_4000;

/// A function from the index of a pinned page to the physical address of the page.
pub(crate) type Layout = fn(u64) -> u64;

pub(crate) const CONTIGUOUS: Layout = |page| BAR + page * KIB_64;
pub(crate) const EVERY_OTHER: Layout = |page| BAR + 2 * page * KIB_64;

/// Properties of the page tables that nvidia.ko returns.
#[derive(Clone, Copy)]
pub(crate) struct TableForm {
    pub(crate) version: u32,
    pub(crate) page_size: u32,
    /// Number of surplus entries. A negative number stands for missing entries.
    pub(crate) surplus: i32,
    pub(crate) flags: u32,
    /// `true` if the page table has no list of pages.
    pub(crate) no_pages: bool,
    /// `true` if a pin succeeds without returning a table.
    pub(crate) no_table: bool,
    pub(crate) address: Layout,
}

impl TableForm {
    pub(crate) const GOOD: TableForm = TableForm {
        version: 0x0002_0000,
        page_size: SIZE_64,
        surplus: 0,
        flags: 0,
        no_pages: false,
        no_table: false,
        address: CONTIGUOUS,
    };
}

/// Properties of the DMA mappings that nvidia.ko returns.
#[derive(Clone, Copy)]
pub(crate) struct MappingForm {
    pub(crate) version: u32,
    pub(crate) page_size: u32,
    pub(crate) surplus: i32,
    pub(crate) no_addresses: bool,
    /// `true` if nvidia.ko's `dma_map_pages()` succeeds without returning a mapping.
    pub(crate) no_mapping: bool,
}

impl MappingForm {
    pub(crate) const GOOD: MappingForm = MappingForm {
        version: 0x0002_0003,
        page_size: SIZE_64,
        surplus: 0,
        no_addresses: false,
        no_mapping: false,
    };
}

pub(super) type FreeCallback = unsafe extern "C" fn(*mut c_void);

/// The memory of a page table. `table` points to `list`, and the entries of `list` point to
/// `pages`.
struct TableMemory {
    table: c::peermem_page_table,
    pages: KVVec<c::nvidia_p2p_page>,
    list: KVVec<*mut c::nvidia_p2p_page>,
}

// SAFETY: The pointers point into memory that the structure owns.
unsafe impl Send for TableMemory {}

pub(super) struct Pinned {
    memory: KBox<TableMemory>,
    callback: Option<FreeCallback>,
    /// The callback's opaque argument, as a number.
    data: usize,
}

impl Pinned {
    fn table(&self) -> usize {
        ptr::from_ref(&self.memory.table).addr()
    }
}

/// The memory of a DMA mapping.
struct MappingMemory {
    raw: c::nvidia_p2p_dma_mapping,
    addresses: KVVec<u64>,
}

// SAFETY: The pointers point into memory that the structure owns, or to a device that no code
// accesses through them.
unsafe impl Send for MappingMemory {}

pub(super) struct Mapped {
    memory: KBox<MappingMemory>,
    table: usize,
}

impl World {
    fn pin_of(&self, table: usize) -> Option<usize> {
        self.pins.iter().position(|pin| pin.table() == table)
    }
}

/// Returns the number of pins that nvidia.ko holds.
pub(crate) fn pins() -> usize {
    with(|world| world.pins.len())
}

/// Returns a page table for `len` bytes, with the properties in `form`.
fn new_table(form: &TableForm, len: u64) -> Result<KBox<TableMemory>> {
    let bytes = KIB_64 << u32::from(form.page_size == 2);
    let entries = (len / bytes).saturating_add_signed(i64::from(form.surplus));
    let count = usize::try_from(entries)?;
    let mut memory = KBox::new(
        TableMemory {
            table: c::peermem_page_table::default(),
            pages: KVVec::with_capacity(count, GFP_KERNEL)?,
            list: KVVec::with_capacity(count, GFP_KERNEL)?,
        },
        GFP_KERNEL,
    )?;
    for number in 0..entries {
        let page = c::nvidia_p2p_page {
            physical_address: (form.address)(number),
            ..Default::default()
        };
        memory.pages.push(page, GFP_KERNEL)?;
    }
    let memory_of = &mut *memory;
    for page in memory_of.pages.iter_mut() {
        memory_of.list.push(page, GFP_KERNEL)?;
    }
    memory_of.table = c::peermem_page_table {
        version: form.version,
        page_size: form.page_size,
        pages: if form.no_pages {
            ptr::null_mut()
        } else {
            memory_of.list.as_mut_ptr()
        },
        entries: u32::try_from(entries)?,
        gpu_uuid: ptr::null_mut(),
        flags: form.flags,
    };
    Ok(memory)
}

/// Pins `len` bytes, for the two pin functions below. Returns the error code or 0, and the address
/// of the page table.
fn pin(
    len: u64,
    failure: Option<c_int>,
    callback: Option<FreeCallback>,
    data: usize,
) -> (c_int, usize) {
    if let Some(code) = failure {
        return (code, GARBAGE);
    }
    let form = with(|world| world.table);
    let pinned = new_table(&form, len).and_then(|memory| {
        let pin = Pinned {
            memory,
            callback,
            data,
        };
        let table = if form.no_table { 0 } else { pin.table() };
        with(|world| world.pins.push(pin, GFP_KERNEL))?;
        Ok(table)
    });
    match pinned {
        Ok(table) => (0, table),
        Err(error) => (error.to_errno(), GARBAGE),
    }
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_get_pages()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_get_pages(
    _p2p_token: u64,
    _va_space: u32,
    _va: u64,
    len: u64,
    page_table: *mut *mut c::nvidia_p2p_page_table,
    free_callback: Option<FreeCallback>,
    data: *mut c_void,
) -> c_int {
    record(Event::Pin);
    check!(free_callback.is_some());
    let (ret, table) = pin(len, failing(Call::Pin), free_callback, data.addr());
    // SAFETY: The caller promises that the pointer is valid for writes.
    unsafe { *page_table = ptr::with_exposed_provenance_mut(table) };
    ret
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_get_pages_persistent()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_get_pages_persistent(
    _va: u64,
    len: u64,
    page_table: *mut *mut c::nvidia_p2p_page_table,
    flags: u32,
) -> c_int {
    record(Event::PinPersistent);
    check!(flags == 0);
    let (ret, table) = pin(len, failing(Call::PinPersistent), None, 0);
    // SAFETY: The caller promises that the pointer is valid for writes.
    unsafe { *page_table = ptr::with_exposed_provenance_mut(table) };
    ret
}

/// Removes a pin and the mappings of its table from the world.
fn remove_pin(table: usize) -> Option<Pinned> {
    with(|world| {
        let index = world.pin_of(table)?;
        // The real nvidia.ko would unmap the remaining mappings, but the module must not rely on
        // this.
        while take_first(&mut world.mappings, |mapping| mapping.table == table).is_some() {
            fails(c"nvidia.ko", 0, fmt!("unpinned memory is still mapped"));
        }
        world.pins.remove(index).ok()
    })
}

/// Poisons and frees the memory of a pin. A later read of the memory finds no valid table.
fn free_pin(mut pin: Pinned) {
    pin.memory.table.version = 0x6b6b_6b6b;
    pin.memory.table.entries = 0;
    pin.memory.table.pages = ptr::null_mut();
    for page in pin.memory.pages.iter_mut() {
        page.physical_address = 0x6b6b_6b6b_6b6b_6b6b;
    }
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_put_pages()`. `page_table` is only compared, never
/// dereferenced.
pub(crate) unsafe extern "C" fn nvidia_p2p_put_pages(
    _p2p_token: u64,
    _va_space: u32,
    _va: u64,
    page_table: *mut c::nvidia_p2p_page_table,
) -> c_int {
    match remove_pin(page_table.addr()) {
        Some(pin) => {
            record(Event::Put);
            check!(pin.callback.is_some());
            free_pin(pin);
        }
        None => record(Event::PutNothing),
    }
    0
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_put_pages_persistent()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_put_pages_persistent(
    _va: u64,
    page_table: *mut c::nvidia_p2p_page_table,
    flags: u32,
) -> c_int {
    record(Event::PutPersistent);
    check!(flags == 0);
    match remove_pin(page_table.addr()) {
        Some(pin) if pin.callback.is_none() => free_pin(pin),
        _ => fails(c"nvidia.ko", 0, fmt!("this table has no persistent pin")),
    }
    0
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_dma_map_pages()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_dma_map_pages(
    peer: *mut bindings::pci_dev,
    page_table: *mut c::nvidia_p2p_page_table,
    dma_mapping: *mut *mut c::nvidia_p2p_dma_mapping,
) -> c_int {
    record(Event::Map);
    let made = match failing(Call::Map) {
        Some(code) => Err(code),
        None => new_mapping(page_table.addr(), peer).map_err(Error::to_errno),
    };
    let (ret, mapping) = match made {
        Ok(mapping) => (0, mapping),
        Err(code) => (code, GARBAGE),
    };
    // SAFETY: The caller promises that the pointer is valid for writes.
    unsafe { *dma_mapping = ptr::with_exposed_provenance_mut(mapping) };
    ret
}

/// Creates a mapping and returns its address, or returns 0 if the test requires success without a
/// mapping.
fn new_mapping(table: usize, peer: *mut bindings::pci_dev) -> Result<usize> {
    with(|world| {
        let form = world.mapping;
        if form.no_mapping {
            return Ok(0);
        }
        let pin = world.pin_of(table).and_then(|index| world.pins.get(index));
        let pages = &pin.ok_or(EINVAL)?.memory.pages;
        let mut memory = KBox::new(
            MappingMemory {
                raw: c::nvidia_p2p_dma_mapping::default(),
                addresses: KVVec::new(),
            },
            GFP_KERNEL,
        )?;
        for page in pages.iter() {
            let address = page.physical_address + DMA_OFFSET;
            memory.addresses.push(address, GFP_KERNEL)?;
        }
        memory.raw.version = form.version;
        memory.raw.page_size_type = form.page_size;
        // CAST: The number of pages is small.
        memory.raw.entries = (pages.len() as u32).wrapping_add_signed(form.surplus);
        memory.raw.dma_addresses = if form.no_addresses {
            ptr::null_mut()
        } else {
            memory.addresses.as_mut_ptr()
        };
        memory.raw.pci_dev = peer;
        let address = ptr::from_mut(&mut memory.raw).expose_provenance();
        let mapping = Mapped { memory, table };
        world.mappings.push(mapping, GFP_KERNEL)?;
        Ok(address)
    })
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_dma_unmap_pages()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_dma_unmap_pages(
    peer: *mut bindings::pci_dev,
    page_table: *mut c::nvidia_p2p_page_table,
    dma_mapping: *mut c::nvidia_p2p_dma_mapping,
) -> c_int {
    record(Event::Unmap);
    with(|world| {
        let found = take_first(&mut world.mappings, |mapping| {
            ptr::from_ref(&mapping.memory.raw).addr() == dma_mapping.addr()
        });
        let Some(mapping) = found else {
            return fails(c"nvidia.ko", 0, fmt!("no such mapping"));
        };
        check!(mapping.table == page_table.addr());
        check!(mapping.memory.raw.pci_dev == peer);
    });
    0
}

/// Frees the GPU memory: makes one callback for each pin that can be revoked, one after another.
pub(crate) fn free_memory() {
    // SAFETY: This is process context, in which a callback may run.
    free(|callback, data| unsafe { callback(data) });
}

/// Frees the memory like [`free_memory`], and makes each callback as if memory reclaim waited for
/// the callback. lockdep then reports each lock that the callback takes and that a thread has held
/// during an earlier allocation.
pub(crate) fn free_memory_in_reclaim() {
    // SAFETY: This is process context, in which a callback may run.
    free(|callback, data| unsafe { fake_in_reclaim(callback, data) });
}

fn free(call: impl Fn(FreeCallback, *mut c_void)) {
    loop {
        let next = with(|world| {
            let mut pins = world.pins.iter_mut();
            pins.find_map(|pin| Some((pin.callback.take()?, pin.table(), pin.data)))
        });
        let Some((callback, table, data)) = next else {
            return;
        };
        record(Event::Callback);
        call(callback, ptr::without_provenance_mut(data));
        record(Event::CallbackReturns);
        remove_pin(table).into_iter().for_each(free_pin);
    }
}

/// Removes the remaining pins. The module could not put them, because it got no page table.
pub(crate) fn forget_pins() {
    let pins = with(|world| mem::take(&mut world.pins));
    pins.into_iter().for_each(free_pin);
}

typed_as_real!(
    nvidia_p2p_get_pages,
    nvidia_p2p_get_pages_persistent,
    nvidia_p2p_put_pages,
    nvidia_p2p_put_pages_persistent,
    nvidia_p2p_dma_map_pages,
    nvidia_p2p_dma_unmap_pages,
);
