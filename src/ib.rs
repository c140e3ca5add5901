// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Abstractions for ib_core's peer-memory interface.
//!
//! C header: `rdma/peer_mem.h` of the kernel, or of MLNX_OFED or DOCA-OFED.
//!
//! This file knows nothing about NVIDIA. A [`Client`] handles memory that has no `struct page`.
//! [`ClientRegistration`] registers the client with ib_core.

use core::{
    marker::PhantomData,
    ptr::{
        self,
        NonNull, //
    }, //
};

use kernel::{
    bindings,
    error::from_result,
    prelude::*,
    str::CStr,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full, //
        },
        Arc,
        SetOnce, //
    },
    time::{
        delay::fsleep,
        Delta, //
    },
    types::ForeignOwnable, //
};

use crate::{
    c,
    module::{
        weak_symbols,
        LoadedModule,
        WeakSymbol, //
    },
    ofed,
    pci::PciDevice,
    peer_stats::{
        MrStats,
        PeerStats, //
    },
    ranges::PageSize,
    reason::Reason,
    sg::SgTableHead, //
};

weak_symbols! {
    ib_register_peer_memory_client,
    ib_unregister_peer_memory_client,
}

/// Logs an error if ib_core lacks a function that this module needs. No other function of this file
/// may be called until this check has succeeded.
pub(crate) fn check() -> Result {
    let Some(missing) = WeakSymbol::first_missing(WEAK_SYMBOLS) else {
        return Ok(());
    };
    if !LoadedModule::can_be_found() {
        pr_err!(
            "not loaded: neither ib_core nor ib_uverbs is loaded with peer memory (no {}): modprobe ib_uverbs, then this module again; or load the ib_core and ib_uverbs of MLNX_OFED or DOCA-OFED\n",
            missing
        );
    } else if LoadedModule::find(c"ib_core").is_none() {
        pr_err!(
            "not loaded: ib_core is not loaded, and so there is no {}: modprobe loads it first, insmod does not\n",
            missing
        );
    } else if LoadedModule::find(c"ib_uverbs").is_none() {
        pr_err!(
            "not loaded: ib_uverbs is not loaded, and OFED since 5.5 has peer memory there (no {}): modprobe ib_uverbs, then this module again\n",
            missing
        );
    } else {
        pr_err!(
            "not loaded: the ib_core that is loaded has no peer memory (no {}): load the ib_core of MLNX_OFED or DOCA-OFED, or use software that registers GPU memory by dma-buf, without this module\n",
            missing
        );
    }
    // On ENOENT, kmod points the user to the log.
    Err(ENOENT)
}

/// Logs a warning unless ib_core is known to survive a revocable registration that fails before the
/// HCA's driver has activated the registration. An ib_core that does not survive such a failure
/// hangs forever with locks held, and no client can prevent that.
///
/// Only OFED has mlx_compat. OFED's mlx5_core has a version, but its ib_core has none.
pub(crate) fn check_revocation() {
    let warn = |why: &str, version: &CStr| {
        pr_warn!(
            "revocable mode needs OFED 25.04 or newer, and {}{}: a registration that fails can hang in ib_core for ever: install OFED 25.04 or newer, or load this module with persistent_api_support=1\n",
            why,
            version
        );
    };
    if !LoadedModule::can_be_found() {
        return warn(
            "this module, built for the proprietary nvidia.ko, cannot see which one is loaded",
            c"",
        );
    }
    if LoadedModule::find(c"mlx_compat").is_none() {
        return warn("the ib_core that is loaded is not OFED's", c"");
    }
    let names = [c"mlx5_core", c"mlx_compat", c"ib_uverbs", c"ib_core"];
    let found = names.into_iter().find_map(|name| {
        let module = LoadedModule::find(name)?;
        let is_newer = ofed::stops_early(module.version().to_bytes())?;
        Some((module, is_newer))
    });
    match found {
        Some((_, true)) => {}
        Some((module, false)) => warn("the ib_core that is loaded has version ", module.version()),
        None => warn(
            "no module shows the OFED version of the ib_core that is loaded",
            c"",
        ),
    }
}

/// A peer-memory client of ib_core. ib_core asks its clients about addresses that
/// `get_user_pages()` refused.
///
/// For each registration, ib_core calls [`acquire`](Client::acquire),
/// [`get_pages`](Client::get_pages), [`dma_map`](Client::dma_map),
/// [`page_size`](Client::page_size), later [`dma_unmap`](Client::dma_unmap), and finally
/// [`release`](Client::release). If a step fails, ib_core undoes the steps before it. `put_pages`
/// has no counterpart here, because the pins belong to the region.
///
/// ib_core makes all calls in process context. Each call may sleep.
pub(crate) trait Client: 'static {
    /// One registration, from `acquire` until `release`.
    type Mr: Send + Sync + 'static;

    /// Claims and pins the range. Called in the context of the process that registers, under
    /// ib_core's global mutex. Registrations of all processes wait for that mutex.
    fn acquire(stats: MrStats, addr: u64, size: u64) -> Result<Arc<Self::Mr>, Reason>;

    /// Returns `true` if this module's other client, which ib_core asked just before, has refused
    /// the range for good. In that case neither `acquire` nor `refused` is called. Called before
    /// `acquire`, in the same context.
    fn is_refused(addr: u64, size: u64) -> bool;

    /// Reports the reason for which `acquire` refused a range. Called in the context of `acquire`.
    fn refused(addr: u64, size: u64, reason: Reason);

    /// Receives ib_core's ticket for the registration. Called with ib_core's `mapping_lock` held,
    /// like `dma_map`. Must not wait for anything that an invalidation holds.
    fn get_pages(mr: &Self::Mr, ticket: Ticket) -> Result;

    /// Maps the region for `device`, which is `None` if the HCA does not do its DMA through a PCI
    /// device. The size of every entry is a multiple of the page size. ib_core then trims the first
    /// and the last entry to the requested range.
    fn dma_map(mr: &Self::Mr, device: Option<&PciDevice>) -> Result<SgTableHead>;

    /// Undoes `dma_map`, but keeps the entries of its table, because ib_core may write to them
    /// until `release`. May be called during an invalidation, on another thread or on the thread of
    /// the invalidation.
    fn dma_unmap(mr: &Self::Mr);

    /// Ends the region; this is the last call for it. Called without any lock that an invalidation
    /// takes.
    fn release(mr: Arc<Self::Mr>);

    /// Returns the page size of the region.
    fn page_size(mr: &Self::Mr) -> PageSize;

    /// Returns the statistics that were passed to `acquire`.
    fn stats(mr: &Self::Mr) -> &MrStats;

    /// Returns this client's static statistics.
    fn peer_stats() -> &'static PeerStats;

    /// Returns this client's static cell, if the client revokes. ib_core then uses the client only
    /// for HCAs that support revocation.
    fn revoker() -> Option<&'static RevokerCell> {
        None
    }
}

/// ib_core's handle for one registration, valid from `get_pages` until `release`.
pub(crate) struct Ticket {
    number: u64,
    revoker: Option<&'static RevokerCell>,
}

impl Ticket {
    /// Makes ib_core revoke the registration. When this function returns, no HCA uses the memory.
    /// Takes ib_core's `mapping_lock`, and may call [`Client::dma_unmap`] on this thread.
    ///
    /// Does nothing for a client that does not revoke, and nothing after the client's
    /// [`ClientRegistration`] was dropped. Must not be called after `release` has returned: ib_core
    /// reuses numbers, and another registration would be revoked. `stats` are the statistics of
    /// this registration.
    pub(crate) fn invalidate(self, stats: &MrStats) {
        if let Some(revoker) = self.revoker {
            revoker.call(self.number, stats);
        }
    }
}

/// ib_core's invalidation function, and its handle for the client.
#[derive(Clone, Copy)]
struct Revoker {
    invalidate: unsafe extern "C" fn(*mut c_void, u64) -> c_int,
    handle: NonNull<c_void>,
}

// SAFETY: ib_core accepts its handle from any thread.
unsafe impl Send for Revoker {}
// SAFETY: See above.
unsafe impl Sync for Revoker {}

/// A client's static cell, through which its [`Ticket`]s revoke.
///
/// # Invariants
///
/// The handle of `revoker` stays valid until `closed` is set and `calls` is zero.
pub(crate) struct RevokerCell {
    revoker: SetOnce<Revoker>,
    closed: Atomic<bool>,
    calls: Atomic<u64>,
}

impl RevokerCell {
    /// Returns an empty cell. [`ClientRegistration::new`] fills it once.
    pub(crate) const fn new() -> Self {
        RevokerCell {
            revoker: SetOnce::new(),
            closed: Atomic::new(false),
            calls: Atomic::new(0),
        }
    }

    fn call(&self, number: u64, stats: &MrStats) {
        // This thread increments `calls` before it reads `closed`. `close` sets `closed` before it
        // reads `calls`. At least one of the two threads therefore sees the other's write.
        self.calls.fetch_add(1, Full);
        let open = !self.closed.load(Acquire);
        if let Some(revoker) = self.revoker.copy().filter(|_| open) {
            stats.revoking();
            // SAFETY: The handle is valid by the type invariant. ib_core looks up the number and
            // ignores an unknown one.
            unsafe { (revoker.invalidate)(revoker.handle.as_ptr(), number) };
            stats.revoked();
        }
        // The kernel crate has no `fetch_sub` before 7.3. Atomics wrap around, so adding `u64::MAX`
        // subtracts one.
        self.calls.fetch_add(u64::MAX, Full);
    }

    /// Closes the cell. When this function returns, no thread uses the handle any more.
    fn close(&self) {
        self.closed.xchg(true, Full);
        // A region keeps the module loaded, and normally outlives its ticket. This loop therefore
        // waits only if a ticket has outlived its region.
        while self.calls.load(Acquire) != 0 {
            fsleep(Delta::from_millis(1));
        }
    }
}

/// The division of work between ib_core and a client that revokes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Invalidation {
    /// ib_core calls `dma_unmap` and `put_pages` inside [`Ticket::invalidate`].
    CoreUnmaps,
    /// The client unmaps (`PEER_MEM_INVALIDATE_UNMAPS`).
    ClientUnmaps,
}

/// A client that is registered with ib_core.
///
/// # Invariants
///
/// `handle` is ib_core's handle for `client`. `client` does not move, because ib_core keeps a
/// pointer to it.
pub(crate) struct ClientRegistration<C: Client> {
    handle: NonNull<c_void>,
    _client: KBox<c::ClientEx>,
    _calls: PhantomData<C>,
}

// SAFETY: ib_core accepts its handle from any thread.
unsafe impl<C: Client> Send for ClientRegistration<C> {}
// SAFETY: A shared reference to a registration gives access to nothing.
unsafe impl<C: Client> Sync for ClientRegistration<C> {}

impl<C: Client> ClientRegistration<C> {
    /// Registers `C` as `name`. ib_core may call the client even before this function returns.
    ///
    /// `invalidation` matters only for a client that revokes. Such a client can be registered only
    /// once, because tickets of the first registration may remain; a second attempt returns
    /// `EBUSY`.
    pub(crate) fn new(name: &CStr, version: &CStr, invalidation: Invalidation) -> Result<Self> {
        let mut client = c::ClientEx {
            client: VTable::<C>::CLIENT,
            ..Default::default()
        };
        copy_str(&mut client.client.name, name)?;
        // The last byte of the version is not part of the string: see below.
        let (flag, text) = client.client.version.split_last_mut().ok_or(EINVAL)?;
        copy_str(text, version)?;
        let revoker = C::revoker();
        if let Some(cell) = revoker {
            if cell.revoker.as_ref().is_some() {
                return Err(EBUSY);
            }
            // This flag tells ib_core that more data follows the `peer_memory_client`. `ex_size`
            // gives the size of the valid part. MLNX_OFED 4.9 has two function pointers in that
            // place, and does not call them if both are zero.
            *flag = 1;
            if invalidation == Invalidation::ClientUnmaps {
                client.ex_size = size_of::<c::ClientEx>();
                client.flags = c::PEER_MEM_INVALIDATE_UNMAPS;
            }
        }
        let client = KBox::new(client, GFP_KERNEL)?;

        let mut invalidate: c::invalidate_peer_memory = None;
        let callback = match revoker {
            Some(_) => ptr::from_mut(&mut invalidate),
            None => ptr::null_mut(),
        };
        // The pointer covers the whole `ClientEx`, since ib_core reads past the first member.
        let whole = ptr::from_ref(&*client).cast::<c::peer_memory_client>();
        // SAFETY: The client is complete, and lives until the drop below unregisters it.
        let handle = unsafe { c::ib_register_peer_memory_client(whole, callback) };
        // INVARIANT: This is ib_core's handle for this client.
        let registration = ClientRegistration {
            handle: NonNull::new(handle).ok_or(EINVAL)?,
            _client: client,
            _calls: PhantomData,
        };
        if let Some(cell) = revoker {
            let filled = cell.revoker.populate(Revoker {
                invalidate: invalidate.ok_or(EINVAL)?,
                handle: registration.handle,
            });
            if !filled {
                return Err(EBUSY);
            }
        }
        Ok(registration)
    }
}

impl<C: Client> Drop for ClientRegistration<C> {
    /// Sleeps until the last region of the client is released.
    fn drop(&mut self) {
        if let Some(cell) = C::revoker() {
            cell.close();
        }
        // SAFETY: The handle is ib_core's by the type invariant, and is unregistered once. After
        // the function returns, ib_core does not call the client any more, so its memory may be
        // freed.
        unsafe { c::ib_unregister_peer_memory_client(self.handle.as_ptr()) };
    }
}

/// Copies `from`, including its NUL, into `to`.
fn copy_str(to: &mut [c_char], from: &CStr) -> Result {
    let from = from.to_bytes_with_nul();
    let to = to.get_mut(..from.len()).ok_or(EINVAL)?;
    for (to, from) in to.iter_mut().zip(from) {
        // CAST: Both types are one byte.
        *to = *from as c_char;
    }
    Ok(())
}

/// The C callbacks of a client.
struct VTable<C: Client>(PhantomData<C>);

impl<C: Client> VTable<C> {
    const CLIENT: c::peer_memory_client = c::peer_memory_client {
        name: [0; c::IB_PEER_MEMORY_NAME_MAX as usize],
        version: [0; c::IB_PEER_MEMORY_VER_MAX as usize],
        acquire: Some(Self::acquire_callback),
        get_pages: Some(Self::get_pages_callback),
        dma_map: Some(Self::dma_map_callback),
        dma_unmap: Some(Self::dma_unmap_callback),
        put_pages: Some(Self::put_pages_callback),
        get_page_size: Some(Self::get_page_size_callback),
        release: Some(Self::release_callback),
    };

    /// # Safety
    ///
    /// `context` must come from [`Self::acquire_callback`]. `release` must not be called for it
    /// before the borrow ends.
    unsafe fn mr<'a>(context: *mut c_void) -> <Arc<C::Mr> as ForeignOwnable>::Borrowed<'a> {
        // SAFETY: The caller promises that the pointer comes from `acquire_callback`, where
        // `into_foreign` made it, and that it stays valid.
        unsafe { <Arc<C::Mr>>::borrow(context) }
    }

    /// Returns 1 if the client accepts the range, and 0 if it does not. ib_core accepts no error
    /// code here.
    ///
    /// # Safety
    ///
    /// ib_core calls this with `client_context` valid for writes.
    unsafe extern "C" fn acquire_callback(
        addr: c_ulong,
        size: usize,
        _peer_mem_private_data: *mut c_void,
        _peer_mem_name: *mut c_char,
        client_context: *mut *mut c_void,
    ) -> c_int {
        // CAST: Both types have 64 bits on every architecture that the driver supports, and at most
        // 64 bits elsewhere.
        let (addr, size) = (addr as u64, size as u64);
        if C::is_refused(addr, size) {
            return 0;
        }
        match C::acquire(MrStats::new(C::peer_stats(), size), addr, size) {
            // SAFETY: The caller promises that the pointer is valid for writes.
            Ok(mr) => unsafe { *client_context = mr.into_foreign() },
            Err(reason) => {
                C::refused(addr, size, reason);
                return 0;
            }
        }
        1
    }

    /// # Safety
    ///
    /// ib_core calls this once after a successful `acquire`, with the context of `acquire`.
    unsafe extern "C" fn get_pages_callback(
        _addr: c_ulong,
        _size: usize,
        _write: c_int,
        _force: c_int,
        _sg_head: *mut bindings::sg_table,
        client_context: *mut c_void,
        core_context: u64,
    ) -> c_int {
        from_result(|| {
            // SAFETY: ib_core calls `release` later.
            let mr = unsafe { Self::mr(client_context) };
            let ticket = Ticket {
                number: core_context,
                revoker: C::revoker(),
            };
            C::get_pages(&mr, ticket)?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// ib_core calls this after a successful `get_pages`, with the context of `acquire`. `sg_head`
    /// and `nmap` are valid for writes. `dma_device` is null or alive.
    unsafe extern "C" fn dma_map_callback(
        sg_head: *mut bindings::sg_table,
        client_context: *mut c_void,
        dma_device: *mut bindings::device,
        _dmasync: c_int,
        nmap: *mut c_int,
    ) -> c_int {
        from_result(|| {
            // SAFETY: ib_core calls `release` later.
            let mr = unsafe { Self::mr(client_context) };
            // SAFETY: The caller promises that `dma_device` is null or alive.
            let table =
                unsafe { PciDevice::with_device(dma_device, |device| C::dma_map(&mr, device)) }?;
            let entries = c_int::try_from(table.0.nents)?;
            // SAFETY: The caller promises that both pointers are valid for writes.
            unsafe {
                *sg_head = table.0;
                *nmap = entries;
            }
            C::stats(&mr).mapped(u64::from(table.0.nents));
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// ib_core calls this after a successful `dma_map`, with the context of `acquire`.
    unsafe extern "C" fn dma_unmap_callback(
        _sg_head: *mut bindings::sg_table,
        client_context: *mut c_void,
        _dma_device: *mut bindings::device,
    ) -> c_int {
        // SAFETY: ib_core calls `release` later. Inside an invalidation, MLNX_OFED 4.9 calls
        // `release` later on this thread.
        let mr = unsafe { Self::mr(client_context) };
        C::dma_unmap(&mr);
        C::stats(&mr).unmapped();
        0
    }

    /// Does nothing, because the pins belong to the region.
    ///
    /// # Safety
    ///
    /// There are no requirements. The C interface dictates the type.
    unsafe extern "C" fn put_pages_callback(
        _sg_head: *mut bindings::sg_table,
        _client_context: *mut c_void,
    ) {
    }

    /// # Safety
    ///
    /// ib_core calls this between `acquire` and `release`, with the context of `acquire`.
    unsafe extern "C" fn get_page_size_callback(client_context: *mut c_void) -> c_ulong {
        // SAFETY: ib_core calls `release` later.
        let mr = unsafe { Self::mr(client_context) };
        // CAST: A page has at most 2 GiB.
        C::page_size(&mr).bytes() as c_ulong
    }

    /// # Safety
    ///
    /// ib_core calls this once for each successful `acquire`, with the context of `acquire`, as the
    /// last call.
    unsafe extern "C" fn release_callback(client_context: *mut c_void) {
        // SAFETY: `into_foreign` made the pointer, and no later call can borrow it.
        let mr = unsafe { <Arc<C::Mr>>::from_foreign(client_context) };
        // After a revocation, ib_core does not call `dma_unmap` of a client that unmaps by itself.
        C::stats(&mr).unmapped();
        C::release(mr);
    }
}
