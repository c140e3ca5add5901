// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A registration by dma-buf: its preconditions, its pages, and the second try.

use std::ffi::c_int;

use crate::cuda::{Cuda, Mapping, Refusal, INVALID_VALUE};
use crate::report::{log, Mode, Reason};
use crate::verbs::{Api, Part, Unfit};

/// Flags of `enum ibv_access_flags` that `ibv_cmd_reg_dmabuf_mr` accepts: LOCAL_WRITE, REMOTE_*,
/// RELAXED_ORDERING.
const ACCEPTED: c_int = 0xf | 1 << 20;
/// `IBV_ACCESS_OPTIONAL_RANGE`. A kernel may ignore these flags.
const OPTIONAL: c_int = 0x3ff0_0000;

/// A program's registration.
#[derive(Debug, Clone, Copy)]
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
    /// Returns `None` if no such range exists, or if the kernel would refuse the offset: it must
    /// equal that of the I/O address in a page.
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

/// Returns `true` if dma-buf may help after an error of `ibv_cmd_reg_mr`.
pub(crate) fn is_ours(error: c_int) -> bool {
    matches!(
        error,
        libc::EFAULT | libc::EPERM | libc::ENOMEM | libc::EOPNOTSUPP
    )
}

/// Registers GPU memory with `register`, and returns `true` if there is a region. Prints the reason
/// if there is none. `error` is the program's error, or 0 if its call comes later.
pub(crate) fn by_dma_buf(
    api: &Api,
    request: &Request,
    error: c_int,
    page: Option<u64>,
    register: impl Fn(&Part) -> Result<(), c_int>,
) -> bool {
    let served = page
        .filter(|_| Mode::get() != Mode::Off)
        .and_then(|page| Pages::around(request, page))
        .zip(Cuda::loaded())
        .filter(|(_, cuda)| cuda.owns(request.address));
    let Some((pages, cuda)) = served else {
        return false;
    };
    let result = attempt(api, cuda, request, pages, register);
    let (address, length) = (request.address, request.length);
    match result {
        Ok(Mapping::Default) => log(&format_args!("{address:#x}, {length} bytes: by dma-buf")),
        Ok(Mapping::Pcie) => {
            log(&format_args!("{address:#x}, {length} bytes: by dma-buf, mapped over PCIe"));
        }
        Err(reason) if Mode::get() == Mode::Log => {
            log(&format_args!("{address:#x}, {length} bytes: {reason}"));
        }
        Err(reason) => reason.say(address, length, error),
    }
    result.is_ok()
}

fn attempt(
    api: &Api,
    cuda: &Cuda,
    request: &Request,
    pages: Pages,
    register: impl Fn(&Part) -> Result<(), c_int>,
) -> Result<Mapping, Reason> {
    api.fitness().map_err(|unfit| match unfit {
        Unfit::Old => Reason::OldLibrary,
        Unfit::Unknown => Reason::UnknownLibrary,
    })?;
    if request.has_dma_handle {
        return Err(Reason::DmaHandle);
    }
    let unknown = request.access & !(ACCEPTED | OPTIONAL);
    if unknown != 0 {
        return Err(Reason::Access(unknown));
    }
    let one = |mapping| {
        let descriptor = cuda
            .export(pages.start, pages.length, mapping)
            .map_err(|refusal| refused(cuda, request, refusal))?;
        let part = Part {
            fd: descriptor.0,
            offset: pages.offset,
            length: request.length,
            iova: request.iova,
            access: request.access & ACCEPTED,
            wanted_access: request.access,
        };
        register(&part).map_err(Reason::of_kernel)
    };
    match one(Mapping::Default) {
        Ok(()) => Ok(Mapping::Default),
        // These do not depend on the mapping.
        Err(
            reason @ (Reason::Kernel
            | Reason::Nic
            | Reason::OldCuda
            | Reason::BehindEnd
            | Reason::UnknownLayout),
        ) => Err(reason),
        // Some platforms take only a mapping over PCIe. Others do not know the flag, so the first
        // reason is the one to print.
        Err(reason) => one(Mapping::Pcie)
            .map(|()| Mapping::Pcie)
            .map_err(|_| reason),
    }
}

fn refused(cuda: &Cuda, request: &Request, refusal: Refusal) -> Reason {
    let last = u64::try_from(request.length)
        .ok()
        .and_then(|length| request.address.checked_add(length)?.checked_sub(1));
    match refusal {
        Refusal::Old => Reason::OldCuda,
        Refusal::Code(INVALID_VALUE) if !last.is_some_and(|last| cuda.owns(last)) => {
            Reason::BehindEnd
        }
        Refusal::Code(code) => Reason::Export(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(address: u64, length: usize, iova: u64) -> Request {
        Request {
            address,
            length,
            iova,
            access: 1,
            has_dma_handle: false,
        }
    }

    #[test]
    fn pages_contain_the_range() {
        let around = |address, length| {
            let pages = Pages::around(&request(address, length, address), 4096).unwrap();
            (pages.start, pages.length, pages.offset)
        };
        assert_eq!(around(0x10_0000, 4096), (0x10_0000, 4096, 0));
        assert_eq!(around(0x10_0001, 4095), (0x10_0000, 4096, 1));
        assert_eq!(around(0x10_0001, 4096), (0x10_0000, 8192, 1));
        assert_eq!(around(0x10_0fff, 1), (0x10_0000, 4096, 0xfff));
        assert_eq!(around(0x10_0fff, 2), (0x10_0000, 8192, 0xfff));
        assert_eq!(around(0x10_0200, 1 << 30), (0x10_0000, (1 << 30) + 4096, 0x200));
    }

    #[test]
    fn no_arithmetic_wraps() {
        for (address, length) in [
            (0x1000, 0),
            (0x1000, usize::MAX),
            (u64::MAX, 1),
            (u64::MAX - 4095, 4096),
            (u64::MAX - 4096, 4096),
        ] {
            assert_eq!(Pages::around(&request(address, length, address), 4096), None);
        }
    }

    #[test]
    fn the_offset_equals_that_of_the_io_address() {
        let offset = |address, iova| {
            Pages::around(&request(address, 100, iova), 65536).map(|pages| pages.offset)
        };
        assert_eq!(offset(0x12345, 0x2345), Some(0x2345));
        assert_eq!(offset(0x12345, 0x12346), None);
        assert_eq!(offset(0x12345, 0x3345), None);
    }

    #[test]
    fn errors_that_dma_buf_may_mend() {
        let ours: Vec<_> = (0..200).filter(|error| is_ours(*error)).collect();
        assert_eq!(
            ours,
            [libc::EPERM, libc::ENOMEM, libc::EFAULT, libc::EOPNOTSUPP]
        );
    }
}
