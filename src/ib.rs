// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Abstractions for ib_core's peer-memory interface.
//!
//! C header: `rdma/peer_mem.h` of the kernel, or of MLNX_OFED or DOCA-OFED.
//!
//! Knows nothing of NVIDIA. A [`Client`] answers for memory that has no `struct page`;
//! [`ClientRegistration`] makes it known to ib_core.

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

/// Says in the log what ib_core lacks. Before it has succeeded nothing else of this file may be used.
pub(crate) fn check() -> Result {
    let Some(missing) = WeakSymbol::first_missing(WEAK_SYMBOLS) else {
        return Ok(());
    };
    if !LoadedModule::can_be_found() {
        pr_err!(
            "not loaded: neither ib_core nor ib_uverbs is loaded with peer memory (no {}): modprobe ib_uverbs, then this module again; or load those of MLNX_OFED or DOCA-OFED\n",
            missing
        );
    } else if LoadedModule::find(c"ib_core").is_none() {
        pr_err!(
            "not loaded: no ib_core is, and so there is no {}: modprobe loads it first, insmod does not\n",
            missing
        );
    } else if LoadedModule::find(c"ib_uverbs").is_none() {
        pr_err!(
            "not loaded: no ib_uverbs is, and OFED since 5.5 has peer memory there (no {}): modprobe ib_uverbs, then this module again\n",
            missing
        );
    } else {
        pr_err!(
            "not loaded: the ib_core that is loaded has no peer memory (no {}): load that of MLNX_OFED or DOCA-OFED; or do without this module, with software that registers GPU memory by dma-buf\n",
            missing
        );
    }
    // kmod then points to the log.
    Err(ENOENT)
}

/// Warns in the log unless ib_core is known to bear a registration in revocable mode that fails before the HCA's driver has
/// activated it. One that does not hangs for ever, with locks held, and no client can prevent it.
///
/// Only OFED has mlx_compat. Its mlx5_core has the version, its ib_core has none.
pub(crate) fn check_revocation() {
    const ADVICE: &str = "a registration that fails can hang there for ever: install OFED 25.04 or newer, or load this module with persistent_api_support=1";
    if !LoadedModule::can_be_found() {
        pr_warn!(
            "revocable mode needs OFED 25.04 or newer, and built for the proprietary nvidia.ko this module cannot see which one is loaded: {}\n",
            ADVICE
        );
        return;
    }
    if LoadedModule::find(c"mlx_compat").is_none() {
        pr_warn!(
            "revocable mode needs OFED 25.04 or newer, and the ib_core that is loaded is not OFED's: {}\n",
            ADVICE
        );
        return;
    }
    let names = [c"mlx5_core", c"mlx_compat", c"ib_uverbs", c"ib_core"];
    let found = names.into_iter().find_map(|name| {
        let module = LoadedModule::find(name)?;
        let is_newer = ofed::stops_early(module.version().to_bytes())?;
        Some((module, is_newer))
    });
    match found {
        Some((_, true)) => {}
        Some((module, false)) => pr_warn!(
            "revocable mode needs OFED 25.04 or newer, and the ib_core that is loaded is of {}: {}\n",
            module.version(),
            ADVICE
        ),
        None => pr_warn!(
            "revocable mode needs OFED 25.04 or newer, and no module says of which OFED the ib_core is that is loaded: {}\n",
            ADVICE
        ),
    }
}

/// A peer-memory client of ib_core's: whom it asks about an address that `get_user_pages()` refused.
///
/// For one registration ib_core calls [`acquire`](Client::acquire), [`get_pages`](Client::get_pages),
/// [`dma_map`](Client::dma_map), [`page_size`](Client::page_size), later
/// [`dma_unmap`](Client::dma_unmap), and at last [`release`](Client::release). Where a step
/// fails, the steps before it are undone. `put_pages` has no counterpart: what is pinned belongs to
/// the region.
///
/// All calls are made in process context, and may sleep.
pub(crate) trait Client: 'static {
    /// One registration, from `acquire` to `release`.
    type Mr: Send + Sync + 'static;

    /// Takes the range. Called in the context of the process that registers, under ib_core's global
    /// mutex: every registration of every process waits for it.
    fn acquire(stats: MrStats, addr: u64, size: u64) -> Result<Arc<Self::Mr>, Reason>;

    /// Whether the client of this module that ib_core asked just before has refused the range for good. Then `acquire` is
    /// not called, and `refused` is not told. Called before, in the context of `acquire`.
    fn is_refused(addr: u64, size: u64) -> bool;

    /// Learns why ib_core was told that a range is not this client's. Called in the context of `acquire`.
    fn refused(addr: u64, size: u64, reason: Reason);

    /// Learns ib_core's name for the registration. Called with ib_core's `mapping_lock` held, like
    /// `dma_map`: must not wait for anything that an invalidation holds.
    fn get_pages(mr: &Self::Mr, ticket: Ticket) -> Result;

    /// Maps the region for `device`, which is `None` unless the HCA does its DMA through a PCI
    /// device. Every entry is a multiple of the page size; ib_core trims the first and the last to
    /// what was asked for.
    fn dma_map(mr: &Self::Mr, device: Option<&PciDevice>) -> Result<SgTableHead>;

    /// Undoes `dma_map`, but leaves the entries of its table: ib_core may write to them until
    /// `release`. May be called while an invalidation is under way, on another thread or on its own.
    fn dma_unmap(mr: &Self::Mr);

    /// The last call for the region. Called without a lock that an invalidation takes.
    fn release(mr: Arc<Self::Mr>);

    /// The size of its pages.
    fn page_size(mr: &Self::Mr) -> PageSize;

    /// Returns the statistics that `acquire` was called with.
    fn stats(mr: &Self::Mr) -> &MrStats;

    /// A static of this client's own, in which its registrations are counted.
    fn peer_stats() -> &'static PeerStats;

    /// A static of this client's own, if it revokes: then only HCAs that can lose a registration are
    /// served by it.
    fn revoker() -> Option<&'static RevokerCell> {
        None
    }
}

/// ib_core's name for one registration, from `get_pages` until `release`.
pub(crate) struct Ticket {
    number: u64,
    revoker: Option<&'static RevokerCell>,
}

impl Ticket {
    /// Has ib_core revoke the registration; when this returns, no HCA uses its memory. Takes ib_core's
    /// `mapping_lock`, and may call [`Client::dma_unmap`] on this thread.
    ///
    /// Does nothing for a client that does not revoke, and after the client's [`ClientRegistration`] is
    /// gone. Not to be called after `release` has returned: numbers come back, and the next
    /// registration that has this one would be revoked. `stats` are those of the registration.
    pub(crate) fn invalidate(self, stats: &MrStats) {
        if let Some(revoker) = self.revoker {
            revoker.call(self.number, stats);
        }
    }
}

/// ib_core's function for revoking, and the client it is for.
#[derive(Clone, Copy)]
struct Revoker {
    invalidate: unsafe extern "C" fn(*mut c_void, u64) -> c_int,
    handle: NonNull<c_void>,
}

// SAFETY: ib_core takes its handle from any thread.
unsafe impl Send for Revoker {}
// SAFETY: As above.
unsafe impl Sync for Revoker {}

/// Where the [`Ticket`]s of a client get the means to revoke: a static of the client's own.
///
/// # Invariants
///
/// The handle of `revoker` is valid while `closed` is not set, and until `calls` is zero.
pub(crate) struct RevokerCell {
    revoker: SetOnce<Revoker>,
    closed: Atomic<bool>,
    calls: Atomic<u64>,
}

impl RevokerCell {
    /// An empty cell; [`ClientRegistration::new`] fills it, once.
    pub(crate) const fn new() -> Self {
        RevokerCell {
            revoker: SetOnce::new(),
            closed: Atomic::new(false),
            calls: Atomic::new(0),
        }
    }

    fn call(&self, number: u64, stats: &MrStats) {
        // Counted first, then looked at; `close` does the opposite. One of the two sees the other.
        self.calls.fetch_add(1, Full);
        let open = !self.closed.load(Acquire);
        if let Some(revoker) = self.revoker.copy().filter(|_| open) {
            stats.revoking();
            // SAFETY: The handle is valid by the type invariant. ib_core looks the number up: one that
            // is not known does nothing.
            unsafe { (revoker.invalidate)(revoker.handle.as_ptr(), number) };
            stats.revoked();
        }
        // Adds minus one: kernel crates before 7.3 have no `fetch_sub`, and atomics wrap around.
        self.calls.fetch_add(u64::MAX, Full);
    }

    /// When this returns, the handle is not used any more.
    fn close(&self) {
        self.closed.xchg(true, Full);
        // Every region, and with it every ticket, keeps the module loaded. So this waits for nothing
        // but a ticket that outlived its region.
        while self.calls.load(Acquire) != 0 {
            fsleep(Delta::from_millis(1));
        }
    }
}

/// How a client that revokes shares the work with ib_core.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Invalidation {
    /// ib_core calls `dma_unmap` and `put_pages` inside [`Ticket::invalidate`].
    CoreUnmaps,
    /// The client unmaps by itself: `PEER_MEM_INVALIDATE_UNMAPS`.
    ClientUnmaps,
}

/// A client that ib_core knows.
///
/// # Invariants
///
/// `handle` is what ib_core gave for `client`, which stays where it is: ib_core keeps the pointer.
pub(crate) struct ClientRegistration<C: Client> {
    handle: NonNull<c_void>,
    _client: KBox<c::ClientEx>,
    _calls: PhantomData<C>,
}

// SAFETY: ib_core takes its handle from any thread.
unsafe impl<C: Client> Send for ClientRegistration<C> {}
// SAFETY: A shared registration can do nothing.
unsafe impl<C: Client> Sync for ClientRegistration<C> {}

impl<C: Client> ClientRegistration<C> {
    /// Registers `C` as `name`. From then on ib_core may call it, also before this returns.
    ///
    /// Only a client that revokes looks at `invalidation`. Such a client can be registered once, for
    /// tickets may be left of the first time: `EBUSY`.
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
            // Tells ib_core that there is something after the `peer_memory_client`. `ex_size` then
            // says how much of it counts. MLNX_OFED 4.9 has two pointers in that place: both zero
            // keeps it from calling them.
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
        // All of it: ib_core looks behind the first member.
        let whole = ptr::from_ref(&*client).cast::<c::peer_memory_client>();
        // SAFETY: The client is complete, and lives until it is unregistered in the drop below.
        let handle = unsafe { c::ib_register_peer_memory_client(whole, callback) };
        // INVARIANT: ib_core's handle for this client.
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
        // SAFETY: The handle is ib_core's by the type invariant, and unregistered once. When the
        // function returns, ib_core makes no call to the client any more: the memory may go.
        unsafe { c::ib_unregister_peer_memory_client(self.handle.as_ptr()) };
    }
}

/// Copies `from` with its NUL into `to`.
fn copy_str(to: &mut [c_char], from: &CStr) -> Result {
    let from = from.to_bytes_with_nul();
    let to = to.get_mut(..from.len()).ok_or(EINVAL)?;
    for (to, from) in to.iter_mut().zip(from) {
        // CAST: Both are bytes.
        *to = *from as c_char;
    }
    Ok(())
}

/// The C functions of a client.
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
    /// `context` is what [`Self::acquire_callback`] stored, and `release` has not been called for it,
    /// nor is until the borrow ends.
    unsafe fn mr<'a>(context: *mut c_void) -> <Arc<C::Mr> as ForeignOwnable>::Borrowed<'a> {
        // SAFETY: As promised by the caller; `into_foreign` made the pointer.
        unsafe { <Arc<C::Mr>>::borrow(context) }
    }

    /// 1 for mine, 0 for not mine; ib_core knows no errors here.
    ///
    /// # Safety
    ///
    /// Called by ib_core with `client_context` valid for writes.
    unsafe extern "C" fn acquire_callback(
        addr: c_ulong,
        size: usize,
        _peer_mem_private_data: *mut c_void,
        _peer_mem_name: *mut c_char,
        client_context: *mut *mut c_void,
    ) -> c_int {
        // CAST: Both are 64 bits wide wherever there is such a driver, and never wider.
        let (addr, size) = (addr as u64, size as u64);
        if C::is_refused(addr, size) {
            return 0;
        }
        match C::acquire(MrStats::new(C::peer_stats(), size), addr, size) {
            // SAFETY: Valid for writes as promised by the caller.
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
    /// Called by ib_core once after a successful `acquire`, with its context.
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
            // SAFETY: `release` comes later.
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
    /// Called by ib_core after a successful `get_pages`, with the context of `acquire`, with `sg_head`
    /// and `nmap` valid for writes, and with `dma_device` either NULL or alive.
    unsafe extern "C" fn dma_map_callback(
        sg_head: *mut bindings::sg_table,
        client_context: *mut c_void,
        dma_device: *mut bindings::device,
        _dmasync: c_int,
        nmap: *mut c_int,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `release` comes later.
            let mr = unsafe { Self::mr(client_context) };
            // SAFETY: As promised by the caller.
            let table =
                unsafe { PciDevice::with_device(dma_device, |device| C::dma_map(&mr, device)) }?;
            let entries = c_int::try_from(table.0.nents)?;
            // SAFETY: Both are valid for writes as promised by the caller.
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
    /// Called by ib_core after a successful `dma_map`, with the context of `acquire`.
    unsafe extern "C" fn dma_unmap_callback(
        _sg_head: *mut bindings::sg_table,
        client_context: *mut c_void,
        _dma_device: *mut bindings::device,
    ) -> c_int {
        // SAFETY: `release` comes later, or, inside an invalidation by MLNX_OFED 4.9, on this thread.
        let mr = unsafe { Self::mr(client_context) };
        C::dma_unmap(&mr);
        C::stats(&mr).unmapped();
        0
    }

    /// What is pinned belongs to the region: nothing to do.
    ///
    /// # Safety
    ///
    /// Has no requirements; the type is the C interface's.
    unsafe extern "C" fn put_pages_callback(
        _sg_head: *mut bindings::sg_table,
        _client_context: *mut c_void,
    ) {
    }

    /// # Safety
    ///
    /// Called by ib_core between `acquire` and `release`, with the context of `acquire`.
    unsafe extern "C" fn get_page_size_callback(client_context: *mut c_void) -> c_ulong {
        // SAFETY: `release` comes later.
        let mr = unsafe { Self::mr(client_context) };
        // CAST: At most 2 GiB.
        C::page_size(&mr).bytes() as c_ulong
    }

    /// # Safety
    ///
    /// Called by ib_core once for each successful `acquire`, with its context, as the last call.
    unsafe extern "C" fn release_callback(client_context: *mut c_void) {
        // SAFETY: `into_foreign` made the pointer, and no call follows that could borrow it.
        let mr = unsafe { <Arc<C::Mr>>::from_foreign(client_context) };
        // ib_core does not unmap what a client has revoked that unmaps by itself.
        C::stats(&mr).unmapped();
        C::release(mr);
    }
}
