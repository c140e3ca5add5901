// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The functions that providers call instead of those of libibverbs.
//!
//! The symbols have no version. The dynamic linker therefore accepts them for every version that a
//! provider needs.

use std::ffi::c_int;

use crate::cuda::Cuda;
use crate::register::{by_dma_buf, Request};
use crate::report::{Mode, Reason};
use crate::verbs::{Api, Context, InitAttr, Mr, Pd, P};

/// Bits of `comp_mask` of `struct ibv_mr_init_attr`.
const IOVA: u64 = 1;
const ADDR: u64 = 1 << 1;
const DMAH: u64 = 1 << 4;

/// Registers memory as `ibv_cmd_reg_mr` of libibverbs does, or by dma-buf.
///
/// # Safety
///
/// The caller follows the contract of `ibv_cmd_reg_mr` in rdma-core's `driver.h`.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_cmd_reg_mr(
    pd: *mut Pd,
    addr: P,
    length: usize,
    iova: u64,
    access: c_int,
    mr: *mut Mr,
    cmd: P,
    cmd_n: usize,
    resp: P,
    resp_n: usize,
) -> c_int {
    // SAFETY: a pd has a live context.
    let Some(api) = (unsafe { Api::of((*pd).context) }) else {
        return missing();
    };
    let real = api.reg_mr;
    let plain = || {
        // SAFETY: these are the caller's arguments.
        unsafe { real(pd, addr, length, iova, access, mr, cmd, cmd_n, resp, resp_n) }
    };
    let other = |error| {
        let request = Request {
            address: addr.addr() as u64,
            length,
            iova,
            access,
            has_dma_handle: false,
        };
        let is_served = by_dma_buf(api.fitness(), &request, error, |part| {
            // SAFETY: this call is in progress, with this pd and mr.
            unsafe { api.register(pd, mr, part, &request) }
        });
        if is_served && resp_n >= size_of::<[u32; 3]>() {
            // SAFETY: the kernel writes the handle and two keys to the caller's response.
            unsafe { resp.cast::<[u32; 3]>().write_unaligned((*mr).keys) };
        }
        is_served
    };
    in_order(true, plain, other)
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
    let Some((api, real)) = api.and_then(|it| Some((it, it.reg_mr_ex?))) else {
        return missing();
    };
    // SAFETY: these are the caller's arguments.
    let plain = || unsafe { real(pd, mr, attr) };
    let other = |error| {
        // SAFETY: the caller passes a live attr, and the real function has returned.
        let init = unsafe { &*attr };
        // Do nothing for a call with the program's own dma-buf, or with unknown members.
        if init.mask & !(IOVA | DMAH) != ADDR {
            return false;
        }
        let address = init.addr.addr() as u64;
        let has_iova = init.mask & IOVA != 0;
        let request = Request {
            address,
            length: init.length,
            iova: if has_iova { init.iova } else { address },
            access: init.access,
            has_dma_handle: init.mask & DMAH != 0,
        };
        by_dma_buf(api.fitness(), &request, error, |part| {
            // SAFETY: this call is in progress, with this pd and mr.
            unsafe { api.register(pd, mr, part, &request) }
        })
    };
    in_order(true, plain, other)
}

/// Changes a region as `ibv_cmd_rereg_mr` of libibverbs does. Prints a line if the change fails on
/// GPU memory.
///
/// # Safety
///
/// The caller follows the contract of `ibv_cmd_rereg_mr` in rdma-core's `driver.h`.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_cmd_rereg_mr(
    mr: *mut Mr,
    flags: u32,
    addr: P,
    len: usize,
    iova: u64,
    access: c_int,
    pd: *mut Pd,
    cmd: P,
    cmd_n: usize,
    resp: P,
    resp_n: usize,
) -> c_int {
    // SAFETY: a registered region has a live context, and the range that its program gave.
    let (api, old) = unsafe { (Api::of((*mr).context), ((*mr).addr, (*mr).length)) };
    let Some(real) = api.and_then(|it| it.rereg_mr) else {
        return missing();
    };
    let plain = || {
        // SAFETY: these are the caller's arguments.
        unsafe {
            real(
                mr, flags, addr, len, iova, access, pd, cmd, cmd_n, resp, resp_n,
            )
        }
    };
    let error = plain();
    if error != 0 && Mode::get() != Mode::Off {
        keeping_errno(|| {
            let ranges = [(addr, len), old].map(|(at, length)| (at.addr() as u64, length));
            let owned = |cuda: &Cuda| ranges.into_iter().find(|range| cuda.owns(range.0));
            if let Some((address, length)) = Cuda::loaded().and_then(owned) {
                Reason::REREG.say_of(address, length, error);
            }
        });
    }
    error
}

/// Sends a command to the kernel as `execute_ioctl` of libibverbs does. Registers memory of
/// `mlx5dv_devx_umem_reg` by dma-buf if the kernel cannot pin it.
///
/// # Safety
///
/// The caller follows the contract of `execute_ioctl` in rdma-core's `cmd_ioctl.h`.
#[no_mangle]
pub(crate) unsafe extern "C" fn execute_ioctl(context: *mut Context, command: P) -> c_int {
    // SAFETY: the caller passes a live context.
    let api = unsafe { Api::of(context) };
    let Some((api, real)) = api.and_then(|it| Some((it, it.execute?))) else {
        return missing();
    };
    // SAFETY: these are the caller's arguments.
    let plain = || unsafe { real(context, command) };
    // SAFETY: the context is live, and the real function has just sent the command.
    let other = |error| unsafe { crate::devx::register(api, context, command, error) };
    // `force` does not apply: the real function must run first, because it fills in the header.
    in_order(false, plain, other)
}

/// Calls the real function, `plain`. If `plain` fails, calls `other`, which registers by dma-buf.
/// If `other` fails too, the program gets the result and `errno` of `plain`. If `other` succeeds,
/// `errno` stays unchanged. If `may_be_forced` is `true`, the mode `force` reverses the order.
fn in_order(
    may_be_forced: bool,
    plain: impl FnOnce() -> c_int,
    other: impl FnOnce(c_int) -> bool,
) -> c_int {
    let before = errno();
    if may_be_forced && keeping_errno(Mode::get) == Mode::Force {
        return match keeping_errno(|| other(0)) {
            true => 0,
            false => plain(),
        };
    }
    let error = plain();
    let is_ours = [libc::EFAULT, libc::EPERM, libc::ENOMEM, libc::EOPNOTSUPP].contains(&error);
    if is_ours && keeping_errno(|| other(error)) {
        set_errno(before);
        return 0;
    }
    error
}

/// Prints that libibverbs was not found, and returns the error for a call whose real function is
/// missing.
#[cold]
fn missing() -> c_int {
    Reason::NO_LIBRARY.say();
    set_errno(libc::ENOSYS);
    libc::ENOSYS
}

pub(crate) fn keeping_errno<T>(call: impl FnOnce() -> T) -> T {
    let kept = errno();
    let result = call();
    set_errno(kept);
    result
}

pub(crate) fn errno() -> c_int {
    // SAFETY: errno is this thread's, for as long as the thread lives.
    unsafe { *libc::__errno_location() }
}

fn set_errno(value: c_int) {
    // SAFETY: errno is this thread's, for as long as the thread lives.
    unsafe { *libc::__errno_location() = value };
}
