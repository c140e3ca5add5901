// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The variable `PEERMEM_SHIM`, and lines on standard error. A reason is printed once for each
//! process.

use std::ffi::c_int;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU32, AtomicU8, Ordering};

use crate::verbs::{kernel, variable};

/// Value of `PEERMEM_SHIM`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// The variable is not set.
    Normal = 1,
    /// Every call goes to libibverbs, and nothing is tried afterwards.
    Off,
    /// Prints a line for each registration of GPU memory that reaches this library.
    Log,
    /// Tries dma-buf first.
    Force,
}

static MODE: AtomicU8 = AtomicU8::new(0);

impl Mode {
    /// Reads the variable at the first call.
    pub(crate) fn get() -> Self {
        let known = MODE.load(Ordering::Relaxed);
        if let Some(mode) = [Self::Normal, Self::Off, Self::Log, Self::Force]
            .into_iter()
            .find(|mode| *mode as u8 == known)
        {
            return mode;
        }
        let value = variable(c"PEERMEM_SHIM").map_or(&b""[..], |it| it.to_bytes());
        let mode = match value {
            b"off" => Self::Off,
            b"log" => Self::Log,
            b"force" => Self::Force,
            _ => Self::Normal,
        };
        MODE.store(mode as u8, Ordering::Relaxed);
        if mode == Self::Normal && !value.is_empty() {
            Reason::Setting.print(&format_args!("PEERMEM_SHIM is not off, log or force"));
        }
        mode
    }
}

/// Cause of a registration that dma-buf does not serve. The discriminant is a bit of [`PRINTED`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// `PEERMEM_SHIM` has another value.
    Setting,
    /// No libibverbs was found behind the provider.
    NoLibrary,
    /// rdma-core before 34.
    OldLibrary,
    UnknownLibrary,
    UnknownLayout,
    /// Access flags, or a DMA handle, that a dma-buf region does not have.
    Access(c_int),
    DmaHandle,
    OldCuda,
    /// The driver exports no dma-buf of this memory, by the code of `CUresult`.
    Export(c_int),
    BehindEnd,
    /// The kernel has no dma-buf regions.
    Kernel,
    /// The NIC's driver has no dma-buf regions.
    Nic,
    Bar1,
    /// Another error number of the kernel.
    Kernels(c_int),
    Rereg,
}

static PRINTED: AtomicU32 = AtomicU32::new(0);

impl Reason {
    /// Prints a registration's reason, if it is the first one of its kind.
    pub(crate) fn say(self, address: u64, length: usize, error: c_int) {
        self.print(&format_args!(
            "no dma-buf region for GPU memory {address:#x}, {length} bytes: {self}. ibv_reg_mr keeps its error ({})",
            Number(error)
        ));
    }

    fn print(self, line: &fmt::Arguments<'_>) {
        let bit = 1_u32 << (self.number() & 31);
        if PRINTED.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            print(line);
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Setting => 0,
            Self::NoLibrary => 1,
            Self::OldLibrary => 2,
            Self::UnknownLibrary => 3,
            Self::UnknownLayout => 4,
            Self::Access(_) => 5,
            Self::DmaHandle => 6,
            Self::OldCuda => 7,
            Self::Export(_) => 8,
            Self::BehindEnd => 9,
            Self::Kernel => 10,
            Self::Nic => 11,
            Self::Bar1 => 12,
            Self::Kernels(_) => 13,
            Self::Rereg => 14,
        }
    }

    /// Prints the line of a call that finds no libibverbs.
    pub(crate) fn no_library() {
        Self::NoLibrary.print(&format_args!("{}", Self::NoLibrary));
    }

    /// Prints the line of `ibv_rereg_mr`.
    pub(crate) fn rereg(address: u64, error: c_int) {
        Self::Rereg.print(&format_args!(
            "{} (at {address:#x}, {})",
            Self::Rereg,
            Number(error)
        ));
    }

    /// Returns the reason of a failed `ibv_cmd_reg_dmabuf_mr`.
    pub(crate) fn of_kernel(error: c_int) -> Self {
        match error {
            0 => Self::UnknownLayout,
            libc::EPROTONOSUPPORT | libc::ENOTTY | libc::ENOSYS => Self::Kernel,
            libc::EOPNOTSUPP => Self::Nic,
            libc::ENOMEM | libc::ENOSPC => Self::Bar1,
            other => Self::Kernels(other),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting => f.write_str("PEERMEM_SHIM"),
            Self::NoLibrary => f.write_str(
                "found no ibv_cmd_reg_mr behind the provider. Every registration fails: run without this library",
            ),
            Self::OldLibrary => f.write_str("libibverbs is older than rdma-core 34"),
            Self::UnknownLibrary => f.write_str(
                "this libibverbs has a private ABI other than IBVERBS_PRIVATE_34 and _65, for which this library was \
                written",
            ),
            Self::UnknownLayout => {
                f.write_str("this libibverbs has another layout of struct verbs_mr than the known ones")
            }
            Self::Access(flags) => {
                write!(f, "dma-buf regions do not take the access flags {flags:#x}:")?;
                for (flag, name) in FLAGS {
                    if flags & flag != 0 {
                        write!(f, " {name}")?;
                    }
                }
                Ok(())
            }
            Self::DmaHandle => f.write_str("the registration has a DMA handle (ibv_alloc_dmah)"),
            Self::OldCuda => f.write_str("libcuda is older than CUDA 11.7"),
            Self::Export(crate::cuda::NOT_SUPPORTED) => f.write_str(
                "the NVIDIA driver exports no dma-buf. The open kernel modules from 515 on do, for GPUs from Turing on",
            ),
            Self::Export(crate::cuda::INVALID_VALUE) => {
                f.write_str("CUDA exports no dma-buf of this memory (managed memory, for example)")
            }
            Self::Export(code) => write!(f, "cuMemGetHandleForAddressRange returned {code}"),
            Self::BehindEnd => f.write_str("the range ends behind the GPU memory"),
            Self::Kernel => match kernel() {
                Some((major, minor)) if (major, minor) < (5, 12) => {
                    write!(f, "kernel {major}.{minor} is older than 5.12")
                }
                _ => f.write_str("the kernel has no dma-buf regions (Linux 5.12 and newer have)"),
            },
            Self::Nic => f.write_str(
                "the NIC's driver has no dma-buf regions (mlx5_ib needs CONFIG_INFINIBAND_ON_DEMAND_PAGING)",
            ),
            Self::Bar1 => f.write_str(
                "the kernel had no memory for the dma-buf region. The GPU's BAR1 may be full (nvidia-smi -q -d MEMORY)",
            ),
            Self::Kernels(error) => write!(
                f,
                "the kernel refused the dma-buf ({}). Often the GPU and the NIC cannot reach each other \
                (nvidia-smi topo -m)",
                Number(*error)
            ),
            Self::Rereg => f.write_str(
                "ibv_rereg_mr on GPU memory is not served by dma-buf. Deregister the region, and register a new one",
            ),
        }
    }
}

/// Flags of `enum ibv_access_flags` that dma-buf regions do not take.
const FLAGS: [(c_int, &str); 6] = [
    (1 << 4, "MW_BIND"),
    (1 << 5, "ZERO_BASED"),
    (1 << 6, "ON_DEMAND"),
    (1 << 7, "HUGETLB"),
    (1 << 8, "FLUSH_GLOBAL"),
    (1 << 9, "FLUSH_PERSISTENT"),
];

/// An error number, with its name if it is a usual one.
struct Number(c_int);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            libc::EFAULT => "EFAULT",
            libc::EPERM => "EPERM",
            libc::ENOMEM => "ENOMEM",
            libc::EOPNOTSUPP => "EOPNOTSUPP",
            libc::EINVAL => "EINVAL",
            number => return write!(f, "error {number}"),
        };
        f.write_str(name)
    }
}

/// Prints a line of mode `log`.
pub(crate) fn log(line: &fmt::Arguments<'_>) {
    if Mode::get() == Mode::Log {
        print(line);
    }
}

/// A line on the stack: nothing is allocated, and a fork in another thread leaves no lock behind.
struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // The last byte is for the line break.
        let end = self.bytes.len().saturating_sub(1);
        let room = self.bytes.get_mut(self.length..end).unwrap_or_default();
        let fits = room.len().min(text.len());
        if let (Some(room), Some(text)) = (room.get_mut(..fits), text.as_bytes().get(..fits)) {
            room.copy_from_slice(text);
            self.length = self.length.saturating_add(fits);
        }
        Ok(())
    }
}

fn print(text: &fmt::Arguments<'_>) {
    let mut line = Line {
        bytes: [0; 512],
        length: 0,
    };
    let _ = write!(line, "libpeermem_preload: {text}");
    if let Some(last) = line.bytes.get_mut(line.length) {
        *last = b'\n';
    }
    let written = line.bytes.get(..line.length.saturating_add(1)).unwrap_or_default();
    // SAFETY: the slice is valid for reading its length. A lost line changes nothing else.
    unsafe { libc::write(libc::STDERR_FILENO, written.as_ptr().cast(), written.len()) };
}
