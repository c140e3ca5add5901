// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The functions that providers call instead of those of libibverbs.
//!
//! The names have no version, and so the dynamic linker takes them for every version that a
//! provider asks for.

use std::ffi::{c_int, c_void};

use crate::cuda::Cuda;
use crate::register::{by_dma_buf, is_ours, Request};
use crate::report::{Mode, Reason};
use crate::verbs::{Api, InitAttr, Mr, Part, Pd, Response};

/// Bits of `comp_mask` of `struct ibv_mr_init_attr`.
const MASK_IOVA: u64 = 1;
const MASK_ADDR: u64 = 1 << 1;
const MASK_DMAH: u64 = 1 << 4;

/// Registers memory as `ibv_cmd_reg_mr` of libibverbs does, or by dma-buf.
///
/// # Safety
///
/// The caller follows the contract of `ibv_cmd_reg_mr` in rdma-core's `driver.h`.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_cmd_reg_mr(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
    mr: *mut Mr,
    command: *mut c_void,
    command_size: usize,
    response: *mut Response,
    response_size: usize,
) -> c_int {
    // SAFETY: a pd has a live context.
    let api = unsafe { Api::of((*pd).context) };
    let Some(real) = api.reg_mr else {
        return missing();
    };
    let plain = || {
        // SAFETY: these are the caller's arguments.
        unsafe {
            real(
                pd,
                addr,
                length,
                iova,
                access,
                mr,
                command,
                command_size,
                response,
                response_size,
            )
        }
    };
    let other = |error| {
        let request = Request {
            address: addr.addr() as u64,
            length,
            iova,
            access,
            has_dma_handle: false,
        };
        // SAFETY: this call is in progress, with this pd and mr.
        let register = |part: &Part| unsafe { api.register(pd, mr, part) };
        let is_served = by_dma_buf(&api, &request, error, page(), register);
        if is_served {
            // SAFETY: the response is the caller's, and the region was registered.
            unsafe { Response::fill(response, response_size, mr) };
        }
        is_served
    };
    in_order(api.is_forced, plain, other)
}

/// Registers memory as `ibv_cmd_reg_mr_ex` of libibverbs does, or by dma-buf.
///
/// # Safety
///
/// The caller follows the contract of `ibv_cmd_reg_mr_ex` in rdma-core's `driver.h`.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_cmd_reg_mr_ex(
    pd: *mut Pd,
    mr: *mut Mr,
    attr: *mut InitAttr,
) -> c_int {
    // SAFETY: a pd has a live context.
    let api = unsafe { Api::of((*pd).context) };
    let Some(real) = api.reg_mr_ex else {
        return missing();
    };
    // SAFETY: these are the caller's arguments.
    let plain = || unsafe { real(pd, mr, attr) };
    let other = |error| {
        // SAFETY: the caller passes a live attr.
        let attr = unsafe { &*attr };
        // The program's own dma-buf, and members that are unknown here, are left alone.
        if attr.mask & !(MASK_IOVA | MASK_DMAH) != MASK_ADDR {
            return false;
        }
        let address = attr.addr.addr() as u64;
        let request = Request {
            address,
            length: attr.length,
            iova: if attr.mask & MASK_IOVA == 0 {
                address
            } else {
                attr.iova
            },
            access: attr.access,
            has_dma_handle: attr.mask & MASK_DMAH != 0,
        };
        // SAFETY: this call is in progress, with this pd and mr.
        let register = |part: &Part| unsafe { api.register(pd, mr, part) };
        by_dma_buf(&api, &request, error, page(), register)
    };
    in_order(api.is_forced, plain, other)
}

/// Changes a region as `ibv_cmd_rereg_mr` of libibverbs does. Prints a line if that fails on GPU
/// memory.
///
/// # Safety
///
/// The caller follows the contract of `ibv_cmd_rereg_mr` in rdma-core's `driver.h`.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_cmd_rereg_mr(
    mr: *mut Mr,
    flags: u32,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
    pd: *mut Pd,
    command: *mut c_void,
    command_size: usize,
    response: *mut c_void,
    response_size: usize,
) -> c_int {
    // SAFETY: a registered region has a live context, and an address that its program gave.
    let (api, old) = unsafe { (Api::of((*mr).context), (*mr).addr) };
    let Some(real) = api.rereg_mr else {
        return missing();
    };
    // SAFETY: these are the caller's arguments.
    let error = unsafe {
        real(
            mr,
            flags,
            addr,
            length,
            iova,
            access,
            pd,
            command,
            command_size,
            response,
            response_size,
        )
    };
    if error != 0 && Mode::get() != Mode::Off {
        keeping_errno(|| {
            let owned = Cuda::loaded().and_then(|cuda| {
                [addr, old]
                    .map(|it| it.addr() as u64)
                    .into_iter()
                    .find(|it| *it != 0 && cuda.owns(*it))
            });
            if let Some(address) = owned {
                Reason::rereg(address, error);
            }
        });
    }
    error
}

/// Calls the real function and then, if it fails, the other way. The program gets the real
/// function's result and `errno` if both fail. `is_forced` turns the order around.
fn in_order(
    is_forced: bool,
    plain: impl FnOnce() -> c_int,
    other: impl FnOnce(c_int) -> bool,
) -> c_int {
    if is_forced {
        return if keeping_errno(|| other(0)) { 0 } else { plain() };
    }
    let error = plain();
    if is_ours(error) && keeping_errno(|| other(error)) {
        return 0;
    }
    error
}

/// Returns the error of a call that has no real function.
#[cold]
fn missing() -> c_int {
    Reason::no_library();
    // SAFETY: errno is this thread's.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    libc::ENOSYS
}

fn keeping_errno<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: errno is this thread's, for as long as the thread lives.
    unsafe {
        let errno = libc::__errno_location();
        let kept = *errno;
        let result = call();
        *errno = kept;
        result
    }
}

fn page() -> Option<u64> {
    // SAFETY: sysconf only reads.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()
}
