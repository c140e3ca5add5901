// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! libibverbs: the structures that are read and written here, and the real functions.
//!
//! The structures are those of rdma-core 34 to 65. `verbs.h` keeps the first fields of `ibv_pd`,
//! `ibv_context` and `ibv_mr` for every program, because its inline functions read them.
//! `driver.h` keeps the rest for one version of the private ABI ([`KNOWN`]).

use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::{offset_of, transmute_copy, zeroed, MaybeUninit};
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::report::Mode;

/// Private ABIs whose structures and functions were read: rdma-core 34 to 64, and 65.
const KNOWN: [&CStr; 2] = [c"IBVERBS_PRIVATE_34", c"IBVERBS_PRIVATE_65"];

/// Numbers of `ibv_context_ops` and of its member `poll_cq`.
const OPS: usize = 32;
const POLL_CQ: usize = 11;

#[repr(C)]
pub(crate) struct Context {
    device: *mut c_void,
    ops: [*mut c_void; OPS],
}

#[repr(C)]
pub(crate) struct Pd {
    pub(crate) context: *mut Context,
    handle: u32,
}

/// `struct verbs_mr`, which starts with the `struct ibv_mr` of the program.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Mr {
    pub(crate) context: *mut Context,
    pd: *mut Pd,
    pub(crate) addr: *mut c_void,
    length: usize,
    handle: u32,
    lkey: u32,
    rkey: u32,
    /// The end of `struct ibv_mr`.
    padding: u32,
    kind: c_int,
    access: c_int,
}

const _: () = assert!(offset_of!(Mr, kind) == 48 && size_of::<Mr>() == 56);

/// `IBV_MR_TYPE_MR` and `IBV_MR_TYPE_DMABUF_MR`.
const PLAIN: c_int = 0;
const DMA_BUF: c_int = 3;

/// `struct ib_uverbs_reg_mr_resp` of the kernel.
#[repr(C)]
pub(crate) struct Response {
    handle: u32,
    lkey: u32,
    rkey: u32,
}

/// `struct ibv_mr_init_attr` without the members after `dmah`.
#[repr(C)]
pub(crate) struct InitAttr {
    pub(crate) length: usize,
    pub(crate) access: c_int,
    pub(crate) mask: u64,
    pub(crate) iova: u64,
    pub(crate) addr: *mut c_void,
}

pub(crate) type RegMr = unsafe extern "C" fn(
    *mut Pd,
    *mut c_void,
    usize,
    u64,
    c_int,
    *mut Mr,
    *mut c_void,
    usize,
    *mut Response,
    usize,
) -> c_int;
pub(crate) type RegMrEx = unsafe extern "C" fn(*mut Pd, *mut Mr, *mut InitAttr) -> c_int;
pub(crate) type ReregMr = unsafe extern "C" fn(
    *mut Mr,
    u32,
    *mut c_void,
    usize,
    u64,
    c_int,
    *mut Pd,
    *mut c_void,
    usize,
    *mut c_void,
    usize,
) -> c_int;
type DeregMr = unsafe extern "C" fn(*mut Mr) -> c_int;
/// Versions before rdma-core 54 lack the last argument, which is passed in a register or in a word
/// of the stack that the caller removes.
type RegDmaBuf =
    unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int, *mut Mr, *mut c_void) -> c_int;

/// The real functions of the libibverbs that a provider is linked to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Api {
    pub(crate) reg_mr: Option<RegMr>,
    pub(crate) reg_mr_ex: Option<RegMrEx>,
    pub(crate) rereg_mr: Option<ReregMr>,
    dereg_mr: Option<DeregMr>,
    reg_dma_buf: Option<RegDmaBuf>,
    is_known: bool,
    pub(crate) is_forced: bool,
}

/// Cause of a missing dma-buf function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// libibverbs has no `ibv_cmd_reg_dmabuf_mr`.
    Old,
    /// The structures of this private ABI were not read.
    Unknown,
}

/// Functions of one provider. `key` is written after `api`, and neither changes again.
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

impl Api {
    /// Returns the real functions for a context.
    ///
    /// `poll_cq` is a function of the provider that opened the context, and tells the provider and
    /// its copy of libibverbs.
    ///
    /// # Safety
    ///
    /// `context` is null or a live `ibv_context`.
    #[inline]
    pub(crate) unsafe fn of(context: *const Context) -> Self {
        // SAFETY: the caller passes null or a live context.
        let key = unsafe { context.as_ref() }.map_or(0, |it| it.ops[POLL_CQ].addr());
        let first = &SLOTS[0];
        if key != 0 && first.key.load(Ordering::Acquire) == key {
            // SAFETY: a slot with a key has a leaked `Api`, which is never written again.
            return unsafe { *first.api.load(Ordering::Relaxed) };
        }
        Self::look_up(key)
    }

    #[cold]
    fn look_up(key: usize) -> Self {
        for slot in &SLOTS {
            if key != 0 && slot.key.load(Ordering::Acquire) == key {
                // SAFETY: as in `of`.
                return unsafe { *slot.api.load(Ordering::Relaxed) };
            }
        }
        let (api, is_found) = Self::resolve(key as *const c_void);
        if is_found && key != 0 {
            let leaked = Box::into_raw(Box::new(api));
            let claimed = SLOTS.iter().find(|slot| {
                slot.api
                    .compare_exchange(null_mut(), leaked, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            });
            match claimed {
                Some(slot) => slot.key.store(key, Ordering::Release),
                // SAFETY: the box was made above, and no slot holds its address.
                None => drop(unsafe { Box::from_raw(leaked) }),
            }
        }
        api
    }

    /// Finds the functions for a provider. The handle stays open, so that neither provider nor
    /// libibverbs is unloaded while its functions are cached.
    fn resolve(code: *const c_void) -> (Self, bool) {
        let found = object_of(code)
            .and_then(|(_, path)| open(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD))
            .map(NonNull::as_ptr)
            .into_iter()
            .chain([libc::RTLD_NEXT])
            .find(|handle| real(*handle, c"ibv_cmd_reg_mr").is_some());
        let Some(handle) = found else {
            return (Self::default(), false);
        };
        // SAFETY: each type is that of the function's declaration in driver.h.
        let api = unsafe {
            Self {
                reg_mr: function(real(handle, c"ibv_cmd_reg_mr")),
                reg_mr_ex: function(real(handle, c"ibv_cmd_reg_mr_ex")),
                rereg_mr: function(real(handle, c"ibv_cmd_rereg_mr")),
                dereg_mr: function(real(handle, c"ibv_cmd_dereg_mr")),
                reg_dma_buf: function(real(handle, c"ibv_cmd_reg_dmabuf_mr")),
                is_known: is_known(handle),
                is_forced: Mode::get() == Mode::Force,
            }
        };
        (api, true)
    }

    /// Says whether this libibverbs can register a dma-buf.
    pub(crate) fn fitness(&self) -> Result<(), Unfit> {
        match (self.reg_dma_buf.and(self.dereg_mr), self.is_known) {
            (None, _) => Err(Unfit::Old),
            (_, false) => Err(Unfit::Unknown),
            (Some(_), true) => Ok(()),
        }
    }

    /// Registers a part of a dma-buf, and makes the region look like one of `ibv_cmd_reg_mr`.
    /// Returns the error number of the call, or 0 if the region has an unexpected layout.
    ///
    /// # Safety
    ///
    /// `pd` and `mr` are those of a call of `ibv_cmd_reg_mr` in progress.
    pub(crate) unsafe fn register(
        &self,
        pd: *mut Pd,
        mr: *mut Mr,
        part: &Part,
    ) -> Result<(), c_int> {
        let (Some(reg), Some(dereg)) = (self.reg_dma_buf, self.dereg_mr) else {
            return Err(libc::EOPNOTSUPP);
        };
        // SAFETY: the caller passes a live pd and a provider's mr. The function keeps no pointer.
        let error = unsafe {
            reg(
                pd,
                part.offset,
                part.length,
                part.iova,
                part.fd,
                part.access,
                mr,
                null_mut(),
            )
        };
        if error != 0 {
            return Err(error);
        }
        // SAFETY: the provider's mr is live, and no other thread knows it yet.
        let region = unsafe { &mut *mr };
        // The function has just written these members, at these places.
        let is_expected = region.kind == DMA_BUF
            && region.length == part.length
            && region.pd == pd
            && u64::try_from(region.addr.addr()) == Ok(part.offset);
        if !is_expected {
            // SAFETY: the function above has registered this mr.
            unsafe { dereg(mr) };
            return Err(0);
        }
        // ibv_dereg_mr calls ibv_dofork_range for this kind, because ibv_reg_mr has called
        // ibv_dontfork_range.
        region.kind = PLAIN;
        region.access = part.wanted_access;
        Ok(())
    }
}

/// Part of a dma-buf to register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) fd: c_int,
    pub(crate) offset: u64,
    pub(crate) length: usize,
    pub(crate) iova: u64,
    pub(crate) access: c_int,
    /// Access flags of the program's call.
    pub(crate) wanted_access: c_int,
}

impl Response {
    /// Writes the region's numbers to the response that the provider may read.
    ///
    /// # Safety
    ///
    /// `response` is null or has `size` bytes, and `mr` is a registered region.
    pub(crate) unsafe fn fill(response: *mut Self, size: usize, mr: *const Mr) {
        if response.is_null() || size < size_of::<Self>() {
            return;
        }
        // SAFETY: the caller says that both are live and large enough.
        unsafe {
            (*response).handle = (*mr).handle;
            (*response).lkey = (*mr).lkey;
            (*response).rkey = (*mr).rkey;
        }
    }
}

/// Opens a library as `dlopen` does.
pub(crate) fn open(path: &CStr, flags: c_int) -> Option<NonNull<c_void>> {
    // SAFETY: the path is a C string.
    NonNull::new(unsafe { libc::dlopen(path.as_ptr(), flags) })
}

/// Looks a function up with `dlsym`.
pub(crate) fn symbol(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the handle is an open one or RTLD_NEXT, and the name is a C string.
    NonNull::new(unsafe { libc::dlsym(handle, name.as_ptr()) })
}

/// Gives a found function its type.
///
/// # Safety
///
/// `F` is the type of a function pointer, and fits the function.
pub(crate) unsafe fn function<F: Copy>(found: Option<NonNull<c_void>>) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
    // SAFETY: the sizes are equal, and the caller says that the type fits.
    found.map(|it| unsafe { transmute_copy(&it) })
}

/// Returns a function that is not one of this library.
fn real(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    let ours = object_of(SLOTS.as_ptr().cast()).map(|(base, _)| base);
    symbol(handle, name).filter(|it| object_of(it.as_ptr()).map(|(base, _)| base) != ours)
}

fn is_known(handle: *mut c_void) -> bool {
    KNOWN.iter().any(|version| {
        // SAFETY: the handle is open or RTLD_NEXT, and both names are C strings.
        !unsafe { libc::dlvsym(handle, c"ibv_cmd_reg_mr".as_ptr(), version.as_ptr()) }.is_null()
    })
}

/// Returns the base and the path of the library that contains an address.
fn object_of(address: *const c_void) -> Option<(usize, &'static CStr)> {
    let mut info = MaybeUninit::uninit();
    // SAFETY: dladdr accepts any address, and writes `info` if it returns a number other than 0.
    let info: libc::Dl_info = unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        info.assume_init()
    };
    // SAFETY: dladdr's name is a C string that lives as long as the library.
    (!info.dli_fname.is_null())
        .then(|| (info.dli_fbase.addr(), unsafe { CStr::from_ptr(info.dli_fname) }))
}

/// Returns a variable of the environment.
pub(crate) fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name is a C string. The caller reads the value at once.
    let value: *const c_char = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: getenv returns null or a C string.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

/// Returns the major and minor number of the running kernel.
pub(crate) fn kernel() -> Option<(u32, u32)> {
    // SAFETY: a utsname of zeros is valid, and uname writes C strings to it.
    let release = unsafe {
        let mut name: libc::utsname = zeroed();
        if libc::uname(&mut name) != 0 {
            return None;
        }
        name.release
    };
    let mut numbers = [0_u32; 2];
    let mut at = 0;
    for byte in release {
        match u8::try_from(byte).ok().filter(u8::is_ascii_digit) {
            Some(digit) => {
                let number = numbers.get_mut(at)?;
                *number = number
                    .checked_mul(10)?
                    .checked_add(u32::from(digit.checked_sub(b'0')?))?;
            }
            None if at == 0 => at = 1,
            None => break,
        }
    }
    Some((numbers[0], numbers[1]))
}
