// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Memory of `mlx5dv_devx_umem_reg` and `mlx5dv_devx_umem_reg_ex`. libmlx5 registers such memory by
//! an ioctl. If the ioctl fails on GPU memory, this file sends it again with a dma-buf.
//!
//! The ioctl is the kernel's interface (`ib_user_ioctl_cmds.h`, `mlx5_user_ioctl_cmds.h`). Only the
//! position of the header in a command depends on libibverbs. This file checks the header. No
//! software device implements these commands. This file was therefore only compared with the
//! sources of libmlx5 and mlx5_ib, and has not run on a NIC.

use std::ffi::c_int;

use crate::entry::errno;
use crate::register::{by_dma_buf, Request, ACCEPTED};
use crate::verbs::{Api, Context, P};

/// Offset of `hdr` in `struct ibv_command_buffer`.
const HEADER: usize = 32;

/// `RDMA_VERBS_IOCTL`
const IOCTL: u64 = 0xc018_1b01;
const DRIVER_MLX5: u32 = 1;
/// `MLX5_IB_OBJECT_DEVX_UMEM` and `MLX5_IB_METHOD_DEVX_UMEM_REG`.
const OBJECT: u16 = 0x1002;
const METHOD: u16 = 0x1000;
/// `MLX5_IB_ATTR_DEVX_UMEM_REG_*`
const ADDR: u16 = 0x1001;
const LEN: u16 = 0x1002;
const ACCESS: u16 = 0x1003;
const DMABUF_FD: u16 = 0x1006;
/// `UVERBS_ATTR_F_MANDATORY`: a kernel that does not know the attribute refuses the command.
const MANDATORY: u16 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    length: u16,
    object: u16,
    method: u16,
    attrs: u16,
    reserved: u64,
    driver: u32,
    reserved_too: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attr {
    id: u16,
    length: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// Number of attributes of the largest command, including the descriptor.
const MOST: usize = 8;

#[repr(C)]
struct Command {
    header: Header,
    attrs: [Attr; MOST],
}

/// Sends a failed registration again, with a dma-buf. Returns `true` if the memory is registered.
/// `error` is the error of the failed registration.
///
/// # Safety
///
/// `context` is live, and `command` is a `struct ibv_command_buffer` that `execute_ioctl` has just
/// sent.
pub(crate) unsafe fn register(api: &Api, context: *mut Context, command: P, error: c_int) -> bool {
    if api.fitness().is_err() {
        return false;
    }
    let header = command.wrapping_byte_add(HEADER).cast::<Header>();
    // SAFETY: a command has a header.
    let seen = unsafe { *header };
    let count = usize::from(seen.attrs);
    let length = count * size_of::<Attr>() + size_of::<Header>();
    let is_ours = (seen.object, seen.method, seen.driver) == (OBJECT, METHOD, DRIVER_MLX5)
        && usize::from(seen.length) == length
        && count < MOST;
    if !is_ours {
        return false;
    }
    // SAFETY: the attributes follow the header. Nothing else uses the caller's command during this
    // call.
    let attrs = unsafe { std::slice::from_raw_parts_mut(header.add(1).cast::<Attr>(), count) };
    let value = |id| Some(attrs.iter().find(|it| it.id == id)?.data);
    let (Some(address), Some(length), Some(access), None) =
        (value(ADDR), value(LEN), value(ACCESS), value(DMABUF_FD))
    else {
        return false;
    };
    let (Ok(length), Ok(access)) = (usize::try_from(length), c_int::try_from(access)) else {
        return false;
    };
    let request = Request {
        address,
        length,
        iova: address,
        access,
        has_dma_handle: false,
    };
    let answer = std::cell::Cell::new([Attr::default(); MOST]);
    let is_served = by_dma_buf(Ok(()), &request, error, |(fd, offset)| {
        let mut again = Command {
            header: Header {
                length: seen.length + size_of::<Attr>() as u16,
                attrs: seen.attrs + 1,
                ..seen
            },
            attrs: [Attr::default(); MOST],
        };
        for (new, old) in again.attrs.iter_mut().zip(attrs.iter()) {
            *new = *old;
            match new.id {
                ADDR => new.data = offset,
                ACCESS => new.data = (access & ACCEPTED) as u64,
                _ => {}
            }
        }
        again.attrs[count] = Attr {
            id: DMABUF_FD,
            flags: MANDATORY,
            data: fd as u64,
            ..Attr::default()
        };
        // SAFETY: the command has as many attributes as its header says. Its pointers come from the
        // caller's command.
        if unsafe { libc::ioctl((*context).cmd_fd, IOCTL, &mut again) } != 0 {
            return Err(errno());
        }
        answer.set(again.attrs);
        Ok(())
    });
    if is_served {
        // Copy the handle of the new object to the program's command. The address and the access
        // flags in the command stay unchanged.
        let answer = answer.get();
        let new = attrs
            .iter_mut()
            .zip(answer)
            .filter(|(old, _)| !matches!(old.id, ADDR | ACCESS));
        new.for_each(|(old, new)| *old = new);
    }
    is_served
}
