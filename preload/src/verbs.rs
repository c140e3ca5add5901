// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! libibverbs: the structures that this library reads and writes, and the real functions, which it
//! calls.
//!
//! The structures are those of rdma-core 34 to 65. The first fields of `ibv_pd`, `ibv_context` and
//! `ibv_mr` never change, because inline functions in programs read them. A version of the private
//! ABI fixes the rest ([`KNOWN`]).

use std::ffi::{c_int, c_void, CStr};
use std::mem::{offset_of, transmute_copy, MaybeUninit};
use std::ptr::{fn_addr_eq, from_ref, null_mut, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::entry::keeping_errno;
use crate::register::{Request, ACCEPTED};
use crate::report::Reason;

/// Private ABIs whose structures and functions were reviewed: rdma-core 34 to 64, and 65.
const KNOWN: [&CStr; 2] = [c"IBVERBS_PRIVATE_34", c"IBVERBS_PRIVATE_65"];

pub(crate) type P = *mut c_void;

#[repr(C)]
pub(crate) struct Context {
    device: P,
    ops: [P; 32],
    pub(crate) cmd_fd: c_int,
}

/// Index of `poll_cq` in `ops`.
const POLL_CQ: usize = 11;

#[repr(C)]
pub(crate) struct Pd {
    pub(crate) context: *mut Context,
    handle: u32,
}

/// `struct verbs_mr`, which starts with the `struct ibv_mr` of the program.
#[repr(C)]
pub(crate) struct Mr {
    pub(crate) context: *mut Context,
    pd: *mut Pd,
    pub(crate) addr: P,
    pub(crate) length: usize,
    pub(crate) keys: [u32; 3],
    /// The end of `struct ibv_mr`.
    padding: u32,
    kind: c_int,
    access: c_int,
}

const _: () = assert!(offset_of!(Mr, kind) == 48 && size_of::<Mr>() == 56);

/// `IBV_MR_TYPE_MR` and `IBV_MR_TYPE_DMABUF_MR`.
const PLAIN: c_int = 0;
const DMA_BUF: c_int = 3;

/// `struct ibv_mr_init_attr` without the members after `addr`.
#[repr(C)]
pub(crate) struct InitAttr {
    pub(crate) length: usize,
    pub(crate) access: c_int,
    pub(crate) mask: u64,
    pub(crate) iova: u64,
    pub(crate) addr: P,
}

type RegMr =
    unsafe extern "C" fn(*mut Pd, P, usize, u64, c_int, *mut Mr, P, usize, P, usize) -> c_int;
type RegMrEx = unsafe extern "C" fn(*mut Pd, *mut Mr, *mut InitAttr) -> c_int;
type ReregMr =
    unsafe extern "C" fn(*mut Mr, u32, P, usize, u64, c_int, *mut Pd, P, usize, P, usize) -> c_int;
type Execute = unsafe extern "C" fn(*mut Context, P) -> c_int;
type DeregMr = unsafe extern "C" fn(*mut Mr) -> c_int;
/// Older versions of the function lack the last argument, and ignore it. The argument is in a
/// register, or on the stack, where the caller removes it.
type RegDmaBuf = unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int, *mut Mr, P) -> c_int;

/// The real functions of the libibverbs that a provider is linked to.
pub(crate) struct Api {
    pub(crate) reg_mr: RegMr,
    pub(crate) reg_mr_ex: Option<RegMrEx>,
    pub(crate) rereg_mr: Option<ReregMr>,
    pub(crate) execute: Option<Execute>,
    dereg_mr: Option<DeregMr>,
    reg_dma_buf: Option<RegDmaBuf>,
    is_known: bool,
}

/// Real functions for one provider. `key` is written after `api`. Neither changes again.
struct Slot {
    key: AtomicUsize,
    api: AtomicPtr<Api>,
}

static SLOTS: [Slot; 16] = [const {
    Slot {
        key: AtomicUsize::new(0),
        api: AtomicPtr::new(null_mut()),
    }
}; 16];

impl Slot {
    fn any(&self) -> Option<&'static Api> {
        // SAFETY: a slot holds null or a leaked `Api`, which is never written again.
        unsafe { self.api.load(Ordering::Acquire).as_ref() }
    }

    fn get(&self, key: usize) -> Option<&'static Api> {
        let is_known = self.key.load(Ordering::Acquire) == key;
        is_known.then(|| self.any()).flatten()
    }
}

impl Api {
    /// Returns the real functions for a context. The context's `poll_cq` is a function of the
    /// provider. It identifies the provider and the copy of libibverbs to which the provider is
    /// linked.
    ///
    /// # Safety
    ///
    /// `context` is null or a live `ibv_context`.
    #[inline]
    pub(crate) unsafe fn of(context: *const Context) -> Option<&'static Self> {
        // SAFETY: the caller passes null or a live context.
        let code = unsafe { context.as_ref() }.map_or(null_mut(), |it| it.ops[POLL_CQ]);
        let key = code.addr().max(1);
        SLOTS[0].get(key).or_else(|| Self::look_up(key, code))
    }

    #[cold]
    fn look_up(key: usize, code: P) -> Option<&'static Self> {
        if let Some(api) = SLOTS.iter().find_map(|slot| slot.get(key)) {
            return Some(api);
        }
        // A failure is not stored, because the library may be loaded later.
        let new = keeping_errno(|| Self::resolve(code))?;
        let mut known = SLOTS.iter().filter_map(Slot::any);
        // Providers that are linked to the same libibverbs share one `Api`.
        let api = known.find(|it| fn_addr_eq(it.reg_mr, new.reg_mr));
        let api = api.unwrap_or_else(|| Box::leak(Box::new(new)));
        let claimed = SLOTS.iter().find(|slot| {
            let (done, failed) = (Ordering::AcqRel, Ordering::Relaxed);
            let api = from_ref(api).cast_mut();
            let claim = slot.api.compare_exchange(null_mut(), api, done, failed);
            claim.is_ok()
        });
        if let Some(slot) = claimed {
            slot.key.store(key, Ordering::Release);
        }
        Some(api)
    }

    /// Finds the functions for a provider. The handle stays open, so that neither the provider nor
    /// libibverbs is unloaded while its functions are cached.
    fn resolve(code: P) -> Option<Self> {
        let provider = object_of(code).and_then(|(_, path)| open(path));
        let others = [NonNull::new(libc::RTLD_NEXT), open(c"libibverbs.so.1")];
        let mut handles = provider.into_iter().chain(others.into_iter().flatten());
        let found = handles.find_map(|it| Some((it, real(it, c"ibv_cmd_reg_mr")?)));
        let (handle, reg_mr) = found?;
        let is_known = |version: &&CStr| {
            let name = c"ibv_cmd_reg_mr".as_ptr();
            // SAFETY: the handle is open or RTLD_NEXT, and both names are C strings.
            !unsafe { libc::dlvsym(handle.as_ptr(), name, version.as_ptr()) }.is_null()
        };
        // SAFETY: each type is that of the function's declaration in driver.h.
        unsafe {
            Some(Self {
                reg_mr: function(Some(reg_mr))?,
                reg_mr_ex: function(real(handle, c"ibv_cmd_reg_mr_ex")),
                rereg_mr: function(real(handle, c"ibv_cmd_rereg_mr")),
                execute: function(real(handle, c"execute_ioctl")),
                dereg_mr: function(real(handle, c"ibv_cmd_dereg_mr")),
                reg_dma_buf: function(real(handle, c"ibv_cmd_reg_dmabuf_mr")),
                is_known: KNOWN.iter().any(is_known),
            })
        }
    }

    /// Checks that this libibverbs can register a dma-buf.
    pub(crate) fn fitness(&self) -> Result<(), Reason> {
        match (self.reg_dma_buf, self.is_known) {
            (None, _) => Err(Reason::OLD_LIBRARY),
            (_, false) => Err(Reason::UNKNOWN_LIBRARY),
            (Some(_), true) => Ok(()),
        }
    }

    /// Registers a part of a dma-buf, and makes the region look like a region of `ibv_cmd_reg_mr`.
    /// Returns the error number of the registration, or 0 for an unknown layout.
    ///
    /// # Safety
    ///
    /// `pd` and `mr` are those of a call of `ibv_cmd_reg_mr` in progress.
    pub(crate) unsafe fn register(
        &self,
        pd: *mut Pd,
        mr: *mut Mr,
        (fd, offset): (c_int, u64),
        request: &Request,
    ) -> Result<(), c_int> {
        let (Some(reg), Some(dereg)) = (self.reg_dma_buf, self.dereg_mr) else {
            return Err(libc::EOPNOTSUPP);
        };
        let (length, iova, access) = (request.length, request.iova, request.access & ACCEPTED);
        // SAFETY: the caller passes a live pd and a provider's mr. The function keeps no pointer.
        let error = unsafe { reg(pd, offset, length, iova, fd, access, mr, null_mut()) };
        if error != 0 {
            return Err(error);
        }
        // SAFETY: the provider's mr is live, and no other thread knows it yet.
        let region = unsafe { &mut *mr };
        // `reg` has just written these members. If they have other values, `struct verbs_mr` has
        // another layout.
        let is_expected = (region.kind, region.length, region.pd) == (DMA_BUF, length, pd)
            && region.addr.addr() as u64 == offset;
        if !is_expected {
            // SAFETY: the function above has registered this mr.
            unsafe { dereg(mr) };
            return Err(0);
        }
        // ibv_reg_mr has called ibv_dontfork_range. ibv_dereg_mr calls ibv_dofork_range only for the
        // kind PLAIN.
        region.kind = PLAIN;
        region.access = request.access;
        Ok(())
    }
}

/// Returns the size of a page, in bytes.
pub(crate) fn page_size() -> u64 {
    // SAFETY: sysconf only reads.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Opens a library that the process has loaded.
pub(crate) fn open(path: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the path is a C string. RTLD_NOLOAD loads nothing, so no constructor runs.
    NonNull::new(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) })
}

/// Looks up a function.
pub(crate) fn symbol(handle: NonNull<c_void>, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the handle is an open one or RTLD_NEXT, and the name is a C string.
    NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
}

/// Gives a found function its type.
///
/// # Safety
///
/// `F` must be the function-pointer type of the found function.
pub(crate) unsafe fn function<F: Copy>(found: Option<NonNull<c_void>>) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
    // SAFETY: the sizes are equal, and the caller guarantees that the type fits.
    found.map(|it| unsafe { transmute_copy(&it) })
}

/// Looks up a function. Returns `None` if the function belongs to this library.
fn real(handle: NonNull<c_void>, name: &CStr) -> Option<NonNull<c_void>> {
    let base = |address: P| object_of(address).map(|(base, _)| base);
    let ours = base(SLOTS.as_ptr().cast_mut().cast());
    symbol(handle, name).filter(|it| base(it.as_ptr()) != ours)
}

/// Returns the base and the path of the library that contains an address.
fn object_of(address: P) -> Option<(usize, &'static CStr)> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: dladdr accepts any address, and writes `info` if it returns a number other than 0.
    // The name is a C string that lives as long as the library.
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let info = info.assume_init();
        Some((info.dli_fbase.addr(), CStr::from_ptr(info.dli_fname)))
    }
}
