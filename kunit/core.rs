// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! ib_core as a peer-memory client sees it: MLNX_OFED and DOCA-OFED from 25.04 on, and in one place
//! OFED 4.9. The order of calls and the difficult cases match the test VM's `peer_mem.c`.
//!
//! The fake calls the module's functions through the registered pointers, and checks all results. A
//! client that breaks the contract fails the running test, whatever that test checks.

use core::{
    mem::offset_of,
    ptr::{
        self,
        NonNull, //
    }, //
};

use kernel::{
    bindings,
    page::PAGE_SIZE,
    prelude::*,
    static_lock_class,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Relaxed,
            Release, //
        },
        lock::{
            mutex::MutexBackend,
            Guard, //
        },
        Arc,
        Completion,
        Mutex, //
    }, //
};

use crate::{
    c,
    fakes::{
        self,
        at,
        check,
        failing,
        fails,
        reach,
        record,
        same,
        take_first,
        typed_as_real,
        Call,
        Event,
        Name,
        Point,
        Thread, //
    },
    pci::PciDevice,
    ranges::SgEntry, //
};

/// The ticket of a registration that cannot be revoked.
const NO_TICKET: u64 = u32::MAX as u64;

/// Value of the context, which a client that says "not mine" must not change.
const NOT_MINE: usize = 0x07_3e11;

/// `struct sg_entry` of `fakes.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct RawSgEntry {
    dma_address: u64,
    dma_length: u32,
    length: u32,
}

impl RawSgEntry {
    /// Returns the entry as the RDMA driver sees it.
    fn seen(&self) -> SgEntry {
        SgEntry {
            addr: self.dma_address,
            len: self.dma_length,
        }
    }
}

/// Returns the entries of a client's table from `sg` on, and the contents of each.
///
/// # Safety
///
/// `sg` must be NULL, or an entry of a table that the client keeps during the iteration.
unsafe fn entries(
    mut sg: *mut bindings::scatterlist,
) -> impl Iterator<Item = (*mut bindings::scatterlist, RawSgEntry)> {
    core::iter::from_fn(move || {
        let here = sg;
        if here.is_null() {
            return None;
        }
        let mut entry = RawSgEntry::default();
        // SAFETY: The caller promises that the client keeps the table.
        sg = unsafe { fake_sg_read(here, &mut entry) };
        Some((here, entry))
    })
}

extern "C" {
    fn fake_sg_read(
        sg: *mut bindings::scatterlist,
        entry: *mut RawSgEntry,
    ) -> *mut bindings::scatterlist;
    fn fake_sg_write(
        sg: *mut bindings::scatterlist,
        entry: *const RawSgEntry,
    ) -> *mut bindings::scatterlist;
    fn fake_sg_has_page(sg: *mut bindings::scatterlist) -> bool;
}

/// The device for which a region is mapped.
#[derive(Clone, Copy)]
pub(crate) struct Device(*mut bindings::device);

// SAFETY: The device outlives the test, and this type only passes the pointer on.
unsafe impl Send for Device {}
// SAFETY: The pointer is only passed on, and the device outlives the test.
unsafe impl Sync for Device {}

impl Device {
    pub(crate) const NULL: Device = Device(ptr::null_mut());

    pub(crate) fn new(raw: *mut bindings::device) -> Self {
        Device(raw)
    }

    /// Returns the device as the module sees it, if it is on the PCI bus.
    pub(crate) fn as_pci(self) -> Option<PciDevice> {
        // SAFETY: The pointer is NULL, or the device outlives the test.
        unsafe { PciDevice::with_device(self.0, |device| device.cloned()) }
    }
}

/// A client's description of itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Description {
    pub(crate) name: Name,
    /// Length of the version string.
    pub(crate) version_len: Option<usize>,
    /// The last byte of the version. `true` if more data follows the structure.
    pub(crate) flag: bool,
    /// Size of the extended structure, or 0 without one.
    pub(crate) ex_size: usize,
    pub(crate) flags: u32,
    /// The two pointers that MLNX_OFED 4.9 reads at this place.
    pub(crate) pointers: [usize; 2],
    /// `true` if all functions are present.
    pub(crate) complete: bool,
    pub(crate) can_revoke: bool,
}

/// A registered client.
#[pin_data]
struct Client {
    ops: NonNull<c::peer_memory_client>,
    handle: usize,
    can_revoke: bool,
    description: Description,
    /// Number of users: one for the registration, and one for each region.
    users: Atomic<u64>,
    #[pin]
    unused: Completion,
}

// SAFETY: The client's structure is only read.
unsafe impl Send for Client {}
// SAFETY: The client's structure is only read.
unsafe impl Sync for Client {}

impl Client {
    /// Returns the client's functions. Reads the functions anew each time, like ib_core, because
    /// the client keeps the structure.
    fn ops(&self) -> c::peer_memory_client {
        // SAFETY: The client keeps the structure until it has unregistered, which waits for all
        // users.
        unsafe { *self.ops.as_ptr() }
    }

    fn put(&self) {
        if self.users.fetch_add(u64::MAX, Full) == 1 {
            self.unused.complete_all();
        }
    }

    fn invalidate_unmaps(&self) -> bool {
        // SAFETY: The client keeps the structure until it has unregistered. `describe` reads the
        // extended part only if the flag is set.
        let seen = unsafe { describe(self.ops, self.can_revoke) };
        seen.flag
            && seen.ex_size >= offset_of!(c::peer_memory_client_ex, flags) + size_of::<u32>()
            && seen.flags & c::PEER_MEM_INVALIDATE_UNMAPS != 0
    }
}

/// # Safety
///
/// `ops` must meet the requirements of `ib_register_peer_memory_client()`.
unsafe fn describe(ops: NonNull<c::peer_memory_client>, can_revoke: bool) -> Description {
    // SAFETY: The caller promises that `ops` is a valid client.
    let client = unsafe { *ops.as_ptr() };
    let [text @ .., flag] = client.version;
    let (ex_size, flags, pointers) = if flag != 0 {
        let ex = ops.as_ptr().cast::<c::peer_memory_client_ex>();
        let behind = ops.as_ptr().wrapping_add(1).cast::<[usize; 2]>();
        // SAFETY: The flag says that the extended structure follows. The bytes behind the flags
        // mean nothing to current ib_core, but MLNX_OFED 4.9 reads them.
        unsafe { ((*ex).ex_size, (*ex).flags, behind.read_volatile()) }
    } else {
        (0, 0, [0; 2])
    };
    let named = |name: &CStr| {
        let bytes = name.to_bytes_with_nul();
        client.name.iter().zip(bytes).all(|(a, b)| a == b)
    };
    Description {
        name: if named(c"nv_mem") {
            Name::NvMem
        } else if named(c"nv_mem_nc") {
            Name::NvMemNc
        } else {
            Name::Other
        },
        version_len: text.iter().position(|byte| *byte == 0),
        flag: flag != 0,
        ex_size,
        flags,
        pointers,
        complete: client.acquire.is_some()
            && client.get_pages.is_some()
            && client.dma_map.is_some()
            && client.dma_unmap.is_some()
            && client.put_pages.is_some()
            && client.get_page_size.is_some()
            && client.release.is_some(),
        can_revoke,
    }
}

/// State of the ib_core fake.
pub(crate) struct Core {
    clients: KVec<Arc<Client>>,
    /// The registered regions, found by ticket.
    peers: KVec<Arc<Peer>>,
    /// Tasks that hold the `mapping_lock` of a region that can be revoked.
    holders: KVec<usize>,
    next_handle: usize,
    next_ticket: u64,
}

impl Core {
    pub(crate) const fn new() -> Self {
        Core {
            clients: KVec::new(),
            peers: KVec::new(),
            holders: KVec::new(),
            next_handle: 0x1000,
            next_ticket: 7,
        }
    }

    /// Returns `true` if this task holds the `mapping_lock` of a region that can be revoked.
    pub(crate) fn has_mapping_lock(&self, task: usize) -> bool {
        self.holders.contains(&task)
    }

    /// Returns the numbers of clients and tickets.
    pub(crate) fn left(&self) -> (usize, usize) {
        (self.clients.len(), self.peers.len())
    }
}

fn core<R>(f: impl FnOnce(&mut Core) -> R) -> R {
    fakes::with(|world| f(&mut world.core))
}

/// Returns the descriptions of the registered clients, in order.
pub(crate) fn descriptions() -> KVec<Description> {
    core(|core| {
        let mut all = KVec::new();
        for client in core.clients.iter() {
            if all.push(client.description, GFP_KERNEL).is_err() {
                break;
            }
        }
        all
    })
}

/// # Safety
///
/// The requirements are those of `ib_register_peer_memory_client()`.
pub(crate) unsafe extern "C" fn ib_register_peer_memory_client(
    client: *const c::peer_memory_client,
    invalidate_callback: *mut c::invalidate_peer_memory,
) -> *mut c_void {
    let Some(ops) = NonNull::new(client.cast_mut()) else {
        return ptr::null_mut();
    };
    // SAFETY: The caller promises a valid client.
    let description = unsafe { describe(ops, !invalidate_callback.is_null()) };
    record(Event::Register(description.name));
    if failing(Call::Register).is_some() {
        return ptr::null_mut();
    }
    let handle = core(|core| {
        core.next_handle += 0x100;
        core.next_handle
    });
    let client = Arc::pin_init(
        pin_init!(Client {
            ops,
            handle,
            can_revoke: description.can_revoke,
            description,
            users: Atomic::new(1),
            unused <- Completion::new(),
        }),
        GFP_KERNEL,
    );
    let Ok(client) = client else {
        return ptr::null_mut();
    };
    if description.can_revoke {
        // SAFETY: The caller promises that the pointer is valid for writes.
        unsafe { *invalidate_callback = Some(ib_invalidate_peer_memory) };
    }
    if core(|core| core.clients.push(client, GFP_KERNEL)).is_err() {
        return ptr::null_mut();
    }
    reach(Point::Registering);
    ptr::without_provenance_mut(handle)
}

/// # Safety
///
/// The requirements are those of `ib_unregister_peer_memory_client()`.
pub(crate) unsafe extern "C" fn ib_unregister_peer_memory_client(reg_handle: *mut c_void) {
    let handle = reg_handle.addr();
    let client = core(|core| take_first(&mut core.clients, |client| client.handle == handle));
    let Some(client) = client else {
        return fails(c"ib_core", 0, fmt!("unregistered what is not registered"));
    };
    record(Event::Unregister(client.description.name));
    client.put();
    client.unused.wait_for_completion();
    // ib_core keeps the pointer to the client's structure, which must not have changed.
    // SAFETY: The client keeps the structure until this function returns.
    let description = unsafe { describe(client.ops, client.can_revoke) };
    same!(description, client.description);
}

/// # Safety
///
/// The requirements are those of ib_core's `invalidate_peer_memory`.
unsafe extern "C" fn ib_invalidate_peer_memory(reg_handle: *mut c_void, ticket: u64) -> c_int {
    record(Event::Invalidate(ticket));
    let handle = reg_handle.addr();
    let (known, peer) = core(|core| {
        let known = core.clients.iter().any(|client| client.handle == handle);
        let mut peers = core.peers.iter();
        let peer = peers.find(|peer| peer.client.handle == handle && peer.ticket == ticket);
        (known || peer.is_some(), peer.cloned())
    });
    if !known {
        fails(c"ib_core", 0, fmt!("a handle that is no more was used"));
    }
    // The ticket is unknown, or no longer known.
    let Some(peer) = peer else {
        return 0;
    };
    reach(Point::InvalidateGotRef);
    peer.invalidate();
    reach(Point::InvalidateUnlocked);
    0
}

typed_as_real!(
    ib_register_peer_memory_client,
    ib_unregister_peer_memory_client,
);

/// The way in which an RDMA driver and ib_core handle a revocation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Form {
    /// The driver only stops the NIC. ib_core does the rest of the revocation.
    Modern,
    /// OFED 4.9: the driver deregisters the region inside the invalidation, `release` included.
    Ofed49,
}

/// A registration as an application and its RDMA driver request it.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) device: Device,
    /// `true` if the driver can lose the region: `IB_PEER_MEM_INVAL_SUPP`.
    pub(crate) can_lose: bool,
    /// The ticket, if the test requires a particular one.
    pub(crate) ticket: Option<u64>,
    /// `true` if the region is not for writing.
    pub(crate) read_only: bool,
    pub(crate) form: Form,
}

impl Request {
    /// Returns a request for a range, and for a NIC that can lose the region.
    pub(crate) fn new(addr: u64, len: usize) -> Self {
        Request {
            addr,
            len,
            device: fakes::nic(),
            can_lose: true,
            ticket: None,
            read_only: false,
            form: Form::Modern,
        }
    }

    fn end(&self) -> u64 {
        // CAST: A `usize` has at most 64 bits.
        self.addr.wrapping_add(self.len as u64)
    }
}

/// Rounds down like `ALIGN_DOWN()`.
fn down(value: u64, to: u64) -> u64 {
    value & !to.wrapping_sub(1)
}

/// Rounds up like `ALIGN()`.
fn up(value: u64, to: u64) -> u64 {
    down(value.wrapping_add(to.wrapping_sub(1)), to)
}

/// The step that failed in a registration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Failed {
    /// No client took the range.
    NotMine,
    GetPages(c_int),
    DmaMap(c_int),
    /// The fake itself ran out of memory.
    Fake,
}

impl From<Failed> for Error {
    fn from(_: Failed) -> Self {
        EIO
    }
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum State {
    #[default]
    Unmapped,
    Mapped,
    Invalidated,
}

/// The contents of an entry before and after it was trimmed.
struct Saved {
    sg: *mut bindings::scatterlist,
    entry: RawSgEntry,
    trimmed: RawSgEntry,
}

impl Saved {
    fn trim(sg: *mut bindings::scatterlist, head: u64, tail: u64) -> Self {
        let mut entry = RawSgEntry::default();
        // SAFETY: The entry belongs to the client's table, which the client keeps until `release`.
        unsafe { fake_sg_read(sg, &mut entry) };
        // ib_core's arithmetic would wrap if the trimmed bytes were not fewer than the entry's
        // bytes.
        check!(head + tail < u64::from(entry.dma_length));
        // CAST: The sum was just checked to be less than the length.
        let len = entry.dma_length.wrapping_sub((head + tail) as u32);
        let trimmed = RawSgEntry {
            dma_address: entry.dma_address + head,
            dma_length: len,
            length: len,
        };
        // SAFETY: The client keeps the table until `release`.
        unsafe { fake_sg_write(sg, &trimmed) };
        Saved { sg, entry, trimmed }
    }

    fn restore(&self) {
        let mut now = RawSgEntry::default();
        // SAFETY: The client keeps the table until `release`.
        unsafe { fake_sg_read(self.sg, &mut now) };
        // The table was freed or changed if the entry differs.
        same!(now, self.trimmed);
        // SAFETY: The client keeps the table until `release`.
        unsafe { fake_sg_write(self.sg, &self.entry) };
    }
}

/// The fields that `mapping_lock` guards.
#[derive(Default)]
struct Mapping {
    state: State,
    table: bindings::sg_table,
    first: Option<Saved>,
    last: Option<Saved>,
    stopped: bool,
}

// SAFETY: The table's entries belong to the client, and are accessed only under the lock.
unsafe impl Send for Mapping {}

/// A region of a client's memory in ib_core: `struct ib_umem_peer`.
#[pin_data]
struct Peer {
    client: Arc<Client>,
    context: usize,
    request: Request,
    ticket: u64,
    /// `true` if `umem_p->ib_peer_client` is NULL.
    client_gone: Atomic<bool>,
    #[pin]
    mapping: Mutex<Mapping>,
}

/// A test's handle of a registered region.
#[derive(Clone)]
pub(crate) struct Umem {
    peer: Arc<Peer>,
    /// The client's entries before ib_core trimmed them.
    entries: Arc<KVec<SgEntry>>,
}

/// Asks the clients in the order of their registration.
fn acquire(request: &Request) -> Option<(Arc<Client>, *mut c_void)> {
    let mut index = 0;
    loop {
        let client = core(|core| core.clients.get(index).cloned())?;
        index += 1;
        if client.can_revoke && !request.can_lose {
            continue;
        }
        let mut context = ptr::without_provenance_mut(NOT_MINE);
        record(Event::Acquire);
        // The user is counted before the call. No test unregisters at the same time.
        client.users.fetch_add(1, Full);
        // CAST: Addresses have 64 bits.
        // SAFETY: This calls the client's function as the contract specifies.
        let ret = client.ops().acquire.map_or(0, |acquire| unsafe {
            acquire(
                request.addr as usize,
                request.len,
                ptr::null_mut(),
                ptr::null_mut(),
                &mut context,
            )
        });
        if ret > 0 {
            return Some((client, context));
        }
        client.put();
        // ib_core treats an error like any other "not mine".
        same!(ret, 0);
        check!(context.addr() == NOT_MINE);
    }
}

/// Returns `true` if `ret` is 0 or an errno that ib_core can turn into a pointer.
fn proper(ret: c_int) -> bool {
    (-4095..=0).contains(&ret)
}

/// Registers like `ib_umem_get_peer()` and `ib_umem_activate_invalidation_notifier()`.
pub(crate) fn get(request: Request) -> Result<Umem, Failed> {
    let (client, context) = acquire(&request).ok_or(Failed::NotMine)?;
    let ticket = if client.can_revoke {
        request.ticket.unwrap_or_else(|| {
            core(|core| {
                core.next_ticket += 1;
                core.next_ticket
            })
        })
    } else {
        NO_TICKET
    };
    // nvidia.ko maps a persistent region with `mapping_lock` held, and no callback ever waits for
    // the `mapping_lock` of a persistent region. `mapping_lock` therefore has one lockdep class for
    // each kind.
    let [revocable, persistent] = [static_lock_class!(), static_lock_class!()];
    let class = if client.can_revoke {
        revocable
    } else {
        persistent
    };
    let peer = Arc::pin_init(
        pin_init!(Peer {
            client: client.clone(),
            context: context.expose_provenance(),
            request,
            ticket,
            client_gone: Atomic::new(false),
            mapping <- Mutex::new(Mapping::default(), c"mapping_lock", class),
        }),
        GFP_KERNEL,
    );
    let peer = peer.map_err(|_| Failed::Fake)?;
    let entries = peer.map().inspect_err(|_| peer.release_context())?;
    let entries = Arc::pin_init(entries, GFP_KERNEL).map_err(|_| Failed::Fake)?;
    Ok(Umem { peer, entries })
}

/// A held `mapping_lock`.
struct Locked<'a> {
    /// The task that holds the lock, if the region can be revoked.
    task: Option<usize>,
    guard: Guard<'a, Mapping, MutexBackend>,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.task {
            core(|core| take_first(&mut core.holders, |holder| *holder == task));
        }
    }
}

/// Returns the step at which a registration fails. Releases a registration that succeeds.
pub(crate) fn failure(request: Request) -> Option<Failed> {
    get(request).inspect(Umem::release).err()
}

/// Returns `true` if no client takes the range.
pub(crate) fn not_mine(request: Request) -> bool {
    failure(request) == Some(Failed::NotMine)
}

impl Peer {
    fn context(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.context)
    }

    fn lock(&self) -> Locked<'_> {
        let guard = self.mapping.lock();
        let task = self.client.can_revoke.then(fakes::this_task);
        if let Some(task) = task {
            if core(|core| core.holders.push(task, GFP_KERNEL)).is_err() {
                fails(c"ib_core", 0, fmt!("no memory"));
            }
        }
        Locked { task, guard }
    }

    /// Calls get_pages, dma_map and get_page_size with `mapping_lock` held.
    fn map(self: &Arc<Self>) -> Result<KVec<SgEntry>, Failed> {
        let mut held = self.lock();
        let mapping = &mut *held.guard;
        reach(Point::BeforeGetPages);
        if self.client.can_revoke {
            core(|core| core.peers.push(self.clone(), GFP_KERNEL)).map_err(|_| Failed::Fake)?;
        }
        record(Event::GetPages);
        let get_pages = self.client.ops().get_pages;
        // CAST: Addresses have 64 bits.
        // SAFETY: This calls the client's function as the contract specifies, with the client's own
        // context.
        let ret = get_pages.map_or(0, |get_pages| unsafe {
            get_pages(
                self.request.addr as usize,
                self.request.len,
                1,
                self.request.read_only.into(),
                ptr::null_mut(),
                self.context(),
                self.ticket,
            )
        });
        check!(proper(ret));
        if ret != 0 {
            self.forget_ticket();
            return Err(Failed::GetPages(ret));
        }
        reach(Point::BeforeDmaMap);
        let ret = self.dma_map(mapping);
        check!(proper(ret));
        if ret != 0 {
            self.put_pages(mapping);
            self.forget_ticket();
            return Err(Failed::DmaMap(ret));
        }
        mapping.state = State::Mapped;
        let entries = self.look(mapping).map_err(|_| Failed::Fake)?;
        record(Event::PageSize);
        let page_size = self.page_size();
        check!(page_size.is_power_of_two() && page_size >= PAGE_SIZE as u64);
        if page_size != PAGE_SIZE as u64 {
            self.trim(mapping, page_size);
        }
        reach(Point::BeforeActivate);
        Ok(entries)
    }

    fn dma_map(&self, mapping: &mut Mapping) -> c_int {
        let table = ptr::from_mut(&mut mapping.table);
        // OFED stores the number of entries directly in the table.
        // SAFETY: The pointer is to a field of the table.
        let nmap = unsafe { ptr::addr_of_mut!((*table).nents) }.cast();
        record(Event::DmaMap);
        // SAFETY: This calls the client's function as the contract specifies. Both pointers are
        // valid for writes. The device is NULL or outlives the test.
        self.client.ops().dma_map.map_or(0, |dma_map| unsafe {
            dma_map(table, self.context(), self.request.device.0, 0, nmap)
        })
    }

    fn page_size(&self) -> u64 {
        let get = self.client.ops().get_page_size;
        // CAST: A C `unsigned long` has at most 64 bits.
        // SAFETY: This calls the client's function as the contract specifies.
        get.map_or(0, |get| unsafe { get(self.context()) } as u64)
    }

    fn put_pages(&self, mapping: &mut Mapping) {
        record(Event::PutPages);
        if let Some(put_pages) = self.client.ops().put_pages {
            // SAFETY: This calls the client's function as the contract specifies.
            unsafe { put_pages(&mut mapping.table, self.context()) };
        }
    }

    /// Returns the client's entries. Checks that all allocated entries are used, have no pages, and
    /// cover the range.
    fn look(&self, mapping: &Mapping) -> Result<KVec<SgEntry>> {
        let table = &mapping.table;
        same!(table.nents, table.orig_nents);
        let mut seen = KVec::new();
        let mut total = 0;
        // SAFETY: The client keeps the table until `release`.
        for (sg, entry) in unsafe { entries(table.sgl) } {
            // SAFETY: The client keeps the table until `release`.
            check!(!unsafe { fake_sg_has_page(sg) });
            same!(entry.dma_length, entry.length);
            check!(entry.dma_length != 0);
            total += u64::from(entry.dma_length);
            seen.push(entry.seen(), GFP_KERNEL)?;
        }
        same!(seen.len(), table.nents as usize);
        let start = down(self.request.addr, fakes::KIB_64);
        same!(total, up(self.request.end(), fakes::KIB_64) - start);
        Ok(seen)
    }

    /// Shrinks the first and the last entry from the client's pages to the kernel's, like
    /// `fix_peer_sgls()`.
    fn trim(&self, mapping: &mut Mapping, peer_page: u64) {
        let page = PAGE_SIZE as u64;
        let start = self.request.addr;
        let end = self.request.end();
        let head = down(start, page) - down(start, peer_page);
        let tail = up(end, peer_page) - up(end, page);
        let first = mapping.table.sgl;
        // SAFETY: The client keeps the table until `release`.
        let all = unsafe { entries(first) }.take(mapping.table.nents as usize);
        let last = all.last().map_or(first, |(last, _)| last);
        mapping.first = Some(Saved::trim(first, head, 0));
        mapping.last = Some(Saved::trim(last, 0, tail));
    }

    /// Unmaps like `peer_unmap()`. The caller changes the state.
    fn unmap(&self, mapping: &mut Mapping, call_client: bool) {
        if call_client {
            reach(Point::BeforeDmaUnmap);
        }
        // The loop writes to the client's table, which the client must keep until `release`, even
        // after a revocation. The order is reversed because a single entry has been trimmed twice.
        for saved in [mapping.last.take(), mapping.first.take()]
            .into_iter()
            .flatten()
        {
            saved.restore();
        }
        if call_client {
            record(Event::DmaUnmap);
            if let Some(dma_unmap) = self.client.ops().dma_unmap {
                // ib_core ignores the return value.
                // SAFETY: This calls the client's function as the contract specifies.
                unsafe { dma_unmap(&mut mapping.table, self.context(), self.request.device.0) };
            }
            reach(Point::BeforePutPages);
            self.put_pages(mapping);
        }
        mapping.table = bindings::sg_table::default();
    }

    /// Invalidates the region. The caller has looked up the region by its ticket.
    fn invalidate(&self) {
        let mut held = self.lock();
        let mapping = &mut *held.guard;
        // `unmaps = peer_invalidate_unmaps(umem_p->ib_peer_client->ops)`.
        if self.client_gone.load(Acquire) {
            return fails(
                c"ib_core",
                0,
                fmt!("an invalidation under way when release() returned"),
            );
        }
        if mapping.state != State::Mapped {
            return;
        }
        record(Event::NicStops);
        reach(Point::InvalidateLocked);
        if self.request.form == Form::Ofed49 {
            mapping.state = State::Unmapped;
            mapping.stopped = true;
            self.unmap(mapping, true);
            return self.release_context();
        }
        let unmaps = self.client.invalidate_unmaps();
        mapping.state = if unmaps {
            State::Invalidated
        } else {
            State::Unmapped
        };
        self.unmap(mapping, !unmaps);
    }

    fn forget_ticket(&self) {
        let forgotten = core(|core| take_first(&mut core.peers, |peer| ptr::eq(&**peer, self)));
        drop(forgotten);
    }

    /// Calls the client's `release`, and ends the region's use of the client.
    fn release_context(&self) {
        self.forget_ticket();
        reach(Point::BeforeRelease);
        record(Event::Release);
        if let Some(release) = self.client.ops().release {
            // SAFETY: This calls the client's function as the contract specifies. No later call
            // uses the context.
            unsafe { release(self.context()) };
        }
        self.client.put();
        reach(Point::AfterRelease);
        self.client_gone.store(true, Release);
    }
}

impl Umem {
    /// Returns the client's entries before ib_core trimmed them.
    pub(crate) fn entries(&self) -> &[SgEntry] {
        &self.entries
    }

    /// Returns the current entries, as the RDMA driver sees them.
    pub(crate) fn seen(&self) -> Result<KVec<SgEntry>> {
        let guard = self.peer.mapping.lock();
        let mut seen = KVec::new();
        // SAFETY: The client keeps the table until `release`.
        for (_, entry) in unsafe { entries(guard.table.sgl) } {
            seen.push(entry.seen(), GFP_KERNEL)?;
        }
        Ok(seen)
    }

    pub(crate) fn ticket(&self) -> u64 {
        self.peer.ticket
    }

    pub(crate) fn page_size(&self) -> u64 {
        self.peer.page_size()
    }

    /// Maps an already mapped region again, which no ib_core does.
    pub(crate) fn map_again(&self) -> c_int {
        self.peer.dma_map(&mut Mapping::default())
    }

    /// Stops invalidations like `ib_umem_stop_invalidation_notifier()`. Later invalidations do
    /// nothing.
    pub(crate) fn stop(&self) {
        let peer = &self.peer;
        let unmaps = peer.client.invalidate_unmaps();
        let mut held = peer.lock();
        let guard = &mut *held.guard;
        if guard.stopped {
            return;
        }
        guard.stopped = true;
        let from = guard.state;
        guard.state = State::Unmapped;
        if from != State::Mapped {
            return;
        }
        if !unmaps {
            return peer.unmap(guard, true);
        }
        // A client that unmaps by itself is called without the lock. An invalidation may run at the
        // same time.
        let mut outside = core::mem::take(guard);
        guard.stopped = true;
        drop(held);
        peer.unmap(&mut outside, true);
    }

    /// Releases the region like `ib_umem_release()`.
    pub(crate) fn release(&self) {
        self.stop();
        self.peer.release_context();
    }

    /// Calls `stop`, dma_unmap with an empty table, and `release`. The contract allows dma_unmap
    /// after an invalidation, and OFED made such calls.
    pub(crate) fn release_with_late_unmap(&self) {
        self.stop();
        self.peer.unmap(&mut Mapping::default(), true);
        self.peer.release_context();
    }
}

/// Frees the memory on a new thread when another thread reaches `point`, and continues that thread
/// after the free. The thread at `point` does not free the memory itself, because it may hold a
/// lock that comes after nvidia.ko's lock.
pub(crate) fn free_at(point: Point) -> Result {
    at(point, || match Thread::start(fakes::free_memory) {
        Ok(thread) => thread.join(),
        Err(_) => fails(c"threads", 0, fmt!("no memory")),
    })
}

/// Returns the number of regions: all users of the clients except the registrations.
pub(crate) fn regions() -> u64 {
    core(|core| {
        let users = core.clients.iter().map(|c| c.users.load(Relaxed) - 1);
        users.sum()
    })
}
