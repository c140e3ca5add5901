// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A registration by dma-buf: its preconditions, the pages to export, and a second attempt for a
//! mapping over PCIe.

use std::ffi::c_int;

use crate::cuda::{Cuda, Mapping, INVALID_VALUE, NOT_SUPPORTED};
use crate::report::{print, Mode, Reason};
use crate::verbs::page_size;

#[cfg(test)]
mod tests;

/// Flags of `enum ibv_access_flags` that `ibv_cmd_reg_dmabuf_mr` accepts: LOCAL_WRITE, REMOTE_*,
/// RELAXED_ORDERING.
pub(crate) const ACCEPTED: c_int = 0xf | 1 << 20;
/// `IBV_ACCESS_OPTIONAL_RANGE`. A kernel may ignore these flags.
const OPTIONAL: c_int = 0x3ff0_0000;

/// A program's registration.
pub(crate) struct Request {
    pub(crate) address: u64,
    pub(crate) length: usize,
    pub(crate) iova: u64,
    pub(crate) access: c_int,
    pub(crate) has_dma_handle: bool,
}

/// Whole pages that contain a range, and the offset of the range in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pages {
    start: u64,
    length: usize,
    offset: u64,
}

impl Pages {
    /// Returns the pages that contain the range of `request`. Returns `None` if the range is empty
    /// or wraps around, or if the kernel would refuse its offset. The address and the I/O address
    /// must have the same offset in a page.
    fn around(request: &Request, page: u64) -> Option<Self> {
        let mask = page.checked_sub(1)?;
        let length = u64::try_from(request.length).ok().filter(|it| *it != 0)?;
        let end = request.address.checked_add(length)?;
        let end = end.checked_add(mask)? & !mask;
        let start = request.address & !mask;
        let offset = request.address & mask;
        (offset == request.iova & mask).then_some(Self {
            start,
            length: usize::try_from(end.checked_sub(start)?).ok()?,
            offset,
        })
    }
}

/// Registers GPU memory by dma-buf. `register` gets the descriptor and an offset in the dma-buf.
/// Returns `true` if the memory is registered. If GPU memory cannot be registered, prints the
/// reason. `error` is the error of the program's call, or 0 if libibverbs has not been called yet.
pub(crate) fn by_dma_buf(
    fitness: Result<(), Reason>,
    request: &Request,
    error: c_int,
    register: impl Fn((c_int, u64)) -> Result<(), c_int>,
) -> bool {
    let served = Pages::around(request, page_size())
        .filter(|_| Mode::get() != Mode::Off)
        .zip(Cuda::loaded())
        .filter(|(_, cuda)| cuda.owns(request.address));
    let Some((pages, cuda)) = served else {
        return false;
    };
    let attempt = |mapping| {
        let descriptor = cuda
            .export(pages.start, pages.length, mapping)
            .map_err(|code| refused(cuda, request, code))?;
        register((descriptor.0, pages.offset)).map_err(Reason::of_kernel)
    };
    let both = || {
        // Some platforms accept only a mapping over PCIe. Others do not know the flag. If both
        // attempts fail, the reason of the first attempt is printed.
        attempt(Mapping::Default).or_else(|reason| match reason.is_final() {
            true => Err(reason),
            false => attempt(Mapping::Pcie).map_err(|_| reason),
        })
    };
    let fitness = fitness.and_then(|()| request.fitness());
    let result = fitness.and_then(|()| both());
    let (address, length) = (request.address, request.length);
    match result {
        Ok(()) if Mode::get() == Mode::Log => {
            print(&format_args!(
                "GPU memory {address:#x}, {length} bytes: registered by dma-buf"
            ));
        }
        Ok(()) => {}
        Err(reason) => reason.say_of(address, length, error),
    }
    result.is_ok()
}

impl Request {
    /// Checks that a dma-buf region can have the access flags of this request, and that the request
    /// has no DMA handle.
    fn fitness(&self) -> Result<(), Reason> {
        if self.has_dma_handle {
            return Err(Reason::DMA_HANDLE);
        }
        match self.access & !(ACCEPTED | OPTIONAL) {
            0 => Ok(()),
            unknown => Err(Reason::ACCESS.with(unknown)),
        }
    }
}

/// Returns the reason why an export failed. `code` is CUDA's error code, or `None` if libcuda has
/// no function for exports.
fn refused(cuda: &Cuda, request: &Request, code: Option<c_int>) -> Reason {
    let last = (request.address).saturating_add((request.length as u64).saturating_sub(1));
    match code {
        None => Reason::OLD_CUDA,
        Some(NOT_SUPPORTED) => Reason::NO_EXPORT,
        Some(INVALID_VALUE) if !cuda.owns(last) => Reason::BEHIND_END,
        Some(code) => Reason::EXPORT.with(code),
    }
}
