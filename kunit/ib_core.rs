// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A fake of ib_core as a peer-memory client sees it, on one thread and without locks. The fake
//! behaves like MLNX_OFED and DOCA-OFED from 25.04 on, or like OFED 4.9. The order of calls matches
//! the test VM's `peer_mem.c`.

use core::{
    mem::offset_of,
    ptr, //
};

use kernel::{
    prelude::*,
    str::CStr, //
};

use crate::{
    c,
    fakes::{
        self,
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
        Point, //
    }, //
};

/// Initial value of the context. A client that answers "not mine" must not change the value.
const NOT_MINE: usize = 0x07_3e11;

/// A client's description of itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Description {
    pub(crate) name: Name,
    /// Length of the version string.
    pub(crate) version_len: Option<usize>,
    /// `true` if the last byte of the version says that more data follows the structure.
    pub(crate) flag: bool,
    /// Size of the extended structure, or 0 if there is none.
    pub(crate) ex_size: usize,
    pub(crate) flags: u32,
    /// The two function pointers that MLNX_OFED 4.9 reads behind the structure.
    pub(crate) pointers: [usize; 2],
    pub(crate) can_revoke: bool,
}

/// Address of a client's `peer_memory_client`.
#[derive(Clone, Copy)]
struct Ops(usize);

impl Ops {
    /// Returns the client's functions. Like ib_core, reads them from the client's structure before
    /// each call.
    fn get(self) -> c::peer_memory_client {
        // SAFETY: The client keeps the structure until it has unregistered.
        unsafe { *ptr::with_exposed_provenance(self.0) }
    }

    fn describe(self, can_revoke: bool) -> Description {
        let client = self.get();
        let [text @ .., flag] = client.version;
        let (ex_size, flags, pointers) = if flag != 0 {
            let ex: *const c::peer_memory_client_ex = ptr::with_exposed_provenance(self.0);
            let client: *const c::peer_memory_client = ptr::with_exposed_provenance(self.0);
            let behind = client.wrapping_add(1).cast::<[usize; 2]>();
            // SAFETY: The flag says that the extended structure follows. The bytes behind the
            // flags mean nothing to current ib_core, but MLNX_OFED 4.9 reads them.
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
            can_revoke,
        }
    }
}

/// A registered client.
#[derive(Clone, Copy)]
struct Client {
    ops: Ops,
    handle: usize,
    description: Description,
}

/// A region that a client has taken.
#[derive(Clone, Copy)]
struct Region {
    client: Client,
    request: Request,
    context: usize,
    ticket: u64,
    is_mapped: bool,
}

/// State of the ib_core fake.
pub(crate) struct Core {
    clients: KVec<Client>,
    regions: KVec<Region>,
    /// The handle or ticket that was given out last.
    last: usize,
}

impl Core {
    pub(crate) const fn new() -> Self {
        Core {
            clients: KVec::new(),
            regions: KVec::new(),
            last: 0,
        }
    }

    fn next(&mut self) -> usize {
        self.last += 1;
        self.last
    }

    /// Returns the number of registered clients and the number of regions.
    pub(crate) fn left(&self) -> (usize, usize) {
        (self.clients.len(), self.regions.len())
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
    let ops = Ops(client.expose_provenance());
    let description = ops.describe(!invalidate_callback.is_null());
    record(Event::Register(description.name));
    if failing(Call::Register).is_some() {
        return ptr::null_mut();
    }
    if description.can_revoke {
        // SAFETY: The caller promises that the pointer is valid for writes.
        unsafe { *invalidate_callback = Some(ib_invalidate_peer_memory) };
    }
    let handle = core(|core| {
        let handle = core.next();
        let client = Client {
            ops,
            handle,
            description,
        };
        core.clients.push(client, GFP_KERNEL).map(|()| handle)
    });
    reach(Point::Registering);
    ptr::without_provenance_mut(handle.unwrap_or(0))
}

/// # Safety
///
/// The requirements are those of `ib_unregister_peer_memory_client()`.
pub(crate) unsafe extern "C" fn ib_unregister_peer_memory_client(reg_handle: *mut c_void) {
    let handle = reg_handle.addr();
    let client = core(|core| take_first(&mut core.clients, |client| client.handle == handle));
    let Some(client) = client else {
        return fails(
            c"ib_core",
            0,
            fmt!("a client that is not registered is unregistered"),
        );
    };
    record(Event::Unregister(client.description.name));
    // The real ib_core would wait until the last region is released. In these tests, no other
    // thread could release a region.
    check!(core(|core| core
        .regions
        .iter()
        .all(|region| region.client.handle != handle)));
    // ib_core keeps the pointer to the client's structure, which must not have changed.
    let can_revoke = client.description.can_revoke;
    same!(client.ops.describe(can_revoke), client.description);
}

/// # Safety
///
/// The requirements are those of ib_core's `invalidate_peer_memory`.
unsafe extern "C" fn ib_invalidate_peer_memory(reg_handle: *mut c_void, ticket: u64) -> c_int {
    record(Event::Invalidate);
    let handle = reg_handle.addr();
    let (known, found) = core(|core| {
        let known = core.clients.iter().any(|client| client.handle == handle);
        let mut regions = core.regions.iter_mut();
        let region = regions.find(|at| at.client.handle == handle && at.ticket == ticket);
        let found = region.map(|region| {
            let before = *region;
            region.is_mapped = false;
            before
        });
        (known, found)
    });
    if !known {
        fails(
            c"ib_core",
            0,
            fmt!("a handle is used after its client was unregistered"),
        );
    }
    let Some(region) = found.filter(|region| region.is_mapped) else {
        return 0;
    };
    let description = region.client.ops.describe(true);
    let unmaps = description.ex_size
        >= offset_of!(c::peer_memory_client_ex, flags) + size_of::<u32>()
        && description.flags & c::PEER_MEM_INVALIDATE_UNMAPS != 0;
    if !unmaps {
        region.unmap();
    }
    if region.request.form == Form::Ofed49 {
        region.release();
    }
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
    /// OFED 4.9: the driver deregisters the region inside the invalidation. The deregistration
    /// includes the call of `release`.
    Ofed49,
}

/// A registration for the fake NIC, as an application and its RDMA driver request it.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) addr: u64,
    pub(crate) len: usize,
    /// `true` if the driver supports the revocation of the region: `IB_PEER_MEM_INVAL_SUPP`.
    pub(crate) can_lose: bool,
    pub(crate) form: Form,
}

/// A registered region, which is released once.
pub(crate) struct Umem(u64);

/// Registers the region like `ib_umem_get_peer()`. Returns `None` if no client takes the range.
/// Makes the test fail if a step after `acquire` fails.
pub(crate) fn get(request: Request) -> Option<Umem> {
    let mut index = 0;
    let (client, context) = loop {
        let client = core(|core| core.clients.get(index).copied())?;
        index += 1;
        if client.description.can_revoke && !request.can_lose {
            continue;
        }
        let mut context = ptr::without_provenance_mut(NOT_MINE);
        // CAST: Addresses have 64 bits.
        let addr = request.addr as usize;
        let acquire = client.ops.get().acquire?;
        // SAFETY: This calls the client's function as the contract specifies.
        let ret = unsafe {
            acquire(
                addr,
                request.len,
                ptr::null_mut(),
                ptr::null_mut(),
                &mut context,
            )
        };
        if ret > 0 {
            break (client, context);
        }
        // ib_core treats an error like 0, the answer "not mine", but the module must return 0.
        same!(ret, 0);
        check!(context.addr() == NOT_MINE);
    };
    let region = core(|core| {
        // CAST: Both types have 64 bits.
        let region = Region {
            client,
            request,
            context: context.expose_provenance(),
            ticket: core.next() as u64,
            is_mapped: true,
        };
        core.regions.push(region, GFP_KERNEL).map(|()| region)
    });
    let region = region.ok()?;
    same!(region.map(), Some(0));
    Some(Umem(region.ticket))
}

/// Returns `true` if no client takes the range. If a client takes the range, releases the region
/// immediately.
pub(crate) fn not_mine(request: Request) -> bool {
    get(request).map(|umem| umem.release()).is_none()
}

impl Region {
    fn context(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.context)
    }

    /// Calls get_pages, dma_map and get_page_size.
    fn map(&self) -> Option<c_int> {
        let ops = self.client.ops.get();
        // CAST: Addresses have 64 bits.
        let addr = self.request.addr as usize;
        let (mut table, mut nmap) = (Default::default(), 0);
        // SAFETY: This calls the client's functions as the contract specifies, with the client's
        // own context. The NIC outlives the test.
        unsafe {
            let (len, context, ticket) = (self.request.len, self.context(), self.ticket);
            let ret = ops.get_pages?(addr, len, 1, 0, ptr::null_mut(), context, ticket);
            if ret != 0 {
                return Some(ret);
            }
            let nic = fakes::fake_nic().cast();
            let ret = ops.dma_map?(&mut table, context, nic, 0, &mut nmap);
            check!(ops.get_page_size?(context).is_power_of_two());
            // CAST: The number of entries is small.
            same!(table.nents as c_int, nmap);
            Some(ret)
        }
    }

    /// Unmaps the region like `peer_unmap()`.
    fn unmap(&self) {
        let ops = self.client.ops.get();
        let (mut table, nic) = (Default::default(), fakes::fake_nic().cast());
        // SAFETY: This calls the client's functions as the contract specifies, with the client's
        // own context. The NIC outlives the test.
        unsafe {
            if let Some(dma_unmap) = ops.dma_unmap {
                dma_unmap(&mut table, self.context(), nic);
            }
            if let Some(put_pages) = ops.put_pages {
                put_pages(&mut table, self.context());
            }
        }
    }

    /// Forgets the ticket, and calls the client's `release`.
    fn release(&self) {
        core(|core| take_first(&mut core.regions, |region| region.ticket == self.ticket));
        record(Event::Release);
        if let Some(release) = self.client.ops.get().release {
            // SAFETY: This calls the client's function as the contract specifies. No later call
            // uses the context.
            unsafe { release(self.context()) };
        }
    }
}

impl Umem {
    /// Releases the region like `ib_umem_release()`.
    pub(crate) fn release(&self) {
        let region = core(|core| {
            let mut regions = core.regions.iter();
            regions.find(|region| region.ticket == self.0).copied()
        });
        let Some(region) = region else {
            return fails(c"ib_core", 0, fmt!("a region is released twice"));
        };
        if region.is_mapped {
            region.unmap();
        }
        region.release();
    }
}
