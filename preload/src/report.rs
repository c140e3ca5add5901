// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The environment variable `PEERMEM_SHIM`, and the lines that this library prints on standard
//! error. A process prints each reason only once.

use std::ffi::{c_int, CStr};
use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicU32, AtomicU8, Ordering};

/// Value of `PEERMEM_SHIM`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The variable is not set.
    Normal = 1,
    /// Every call goes to libibverbs only. dma-buf is never tried.
    Off,
    /// Prints a line for each registration by dma-buf, and for each registration that fails.
    Log,
    /// Tries dma-buf first.
    Force,
}

static MODE: AtomicU8 = AtomicU8::new(0);

impl Mode {
    /// Returns the mode. The first call reads the variable.
    pub(crate) fn get() -> Self {
        match MODE.load(Ordering::Relaxed) {
            0 => Self::read(),
            2 => Self::Off,
            3 => Self::Log,
            4 => Self::Force,
            _ => Self::Normal,
        }
    }

    fn read() -> Self {
        // SAFETY: the name is a C string. getenv returns null or a C string, which is read at once.
        let value = unsafe {
            let value = libc::getenv(c"PEERMEM_SHIM".as_ptr());
            (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
        };
        let mode = match value {
            Some(b"off") => Self::Off,
            Some(b"log") => Self::Log,
            Some(b"force") => Self::Force,
            _ => Self::Normal,
        };
        MODE.store(mode as u8, Ordering::Relaxed);
        if mode == Self::Normal && value.is_some_and(|it| !it.is_empty()) {
            Reason::SETTING.say();
        }
        mode
    }
}

/// Reason why dma-buf does not serve a registration: the number of its bit in [`PRINTED`], its
/// text, and the error code of CUDA or of the kernel, or 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reason(u8, &'static str, c_int);

static PRINTED: AtomicU32 = AtomicU32::new(0);

impl Reason {
    const SETTING: Self = Self(
        0,
        "PEERMEM_SHIM is ignored: it must be off, log or force",
        0,
    );
    pub(crate) const NO_LIBRARY: Self = Self(
        1,
        "no libibverbs was found for the provider. Run the program without this library",
        0,
    );
    pub(crate) const OLD_LIBRARY: Self = Self(2, "libibverbs is older than rdma-core 34", 0);
    pub(crate) const UNKNOWN_LIBRARY: Self = Self(
        3,
        "the private ABI of libibverbs is neither IBVERBS_PRIVATE_34 nor IBVERBS_PRIVATE_65",
        0,
    );
    const LAYOUT: Self = Self(4, "libibverbs has an unknown layout of struct verbs_mr", 0);
    pub(crate) const ACCESS: Self = Self(
        5,
        "dma-buf regions do not support the access flags MW_BIND 16, ZERO_BASED 32, ON_DEMAND 64, \
        HUGETLB 128, FLUSH_GLOBAL 256 and FLUSH_PERSISTENT 512",
        0,
    );
    pub(crate) const DMA_HANDLE: Self = Self(6, "the region has a DMA handle (ibv_alloc_dmah)", 0);
    pub(crate) const OLD_CUDA: Self = Self(7, "libcuda is older than CUDA 11.7", 0);
    pub(crate) const NO_EXPORT: Self = Self(
        8,
        "nvidia.ko cannot export a dma-buf: that requires the open kernel modules, version 515 or \
        newer, and a GPU of the Turing generation or newer",
        0,
    );
    pub(crate) const EXPORT: Self = Self(
        9,
        "cuMemGetHandleForAddressRange refuses this memory (managed memory, for example)",
        0,
    );
    pub(crate) const BEHIND_END: Self =
        Self(10, "the range extends past the end of the GPU memory", 0);
    const KERNEL: Self = Self(
        11,
        "the kernel is older than 5.12, or than 6.1 for DEVX memory",
        0,
    );
    const NIC: Self = Self(
        12,
        "the NIC's driver does not support dma-buf regions (mlx5_ib needs \
        CONFIG_INFINIBAND_ON_DEMAND_PAGING)",
        0,
    );
    const BAR1: Self = Self(
        13,
        "the kernel had no memory for the region. Is the GPU's BAR1 full? See nvidia-smi -q -d MEMORY",
        0,
    );
    const REFUSED: Self = Self(
        14,
        "the kernel refused the dma-buf. Can the GPU and the NIC reach each other? See nvidia-smi topo -m",
        0,
    );
    pub(crate) const REREG: Self = Self(
        15,
        "this library cannot change a region (ibv_rereg_mr). Deregister it, and register a new one",
        0,
    );

    /// Adds an error code of CUDA or of the kernel to the reason.
    pub(crate) fn with(self, code: c_int) -> Self {
        Self(self.0, self.1, code)
    }

    /// Returns the reason for an error of a registration by dma-buf. Error 0 stands for an unknown
    /// layout.
    pub(crate) fn of_kernel(error: c_int) -> Self {
        match error {
            0 => Self::LAYOUT,
            libc::EPROTONOSUPPORT | libc::ENOTTY | libc::ENOSYS => Self::KERNEL,
            libc::EOPNOTSUPP => Self::NIC,
            libc::ENOMEM | libc::ENOSPC => Self::BAR1,
            other => Self::REFUSED.with(other),
        }
    }

    /// Returns `false` if a mapping over PCIe may succeed where the default one has failed.
    pub(crate) fn is_final(self) -> bool {
        use Reason as R;
        [R::LAYOUT, R::KERNEL, R::NIC, R::OLD_CUDA, R::BEHIND_END].contains(&self)
    }

    /// Prints the reason, unless this process has already printed it.
    pub(crate) fn say(self) {
        self.print(&format_args!("{self}"));
    }

    /// Prints the reason together with a range, unless this process has already printed the reason.
    /// `error` is the error of the program's call.
    pub(crate) fn say_of(self, address: u64, length: usize, error: c_int) {
        let range = format_args!("GPU memory {address:#x}, {length} bytes");
        match error {
            0 => self.print(&format_args!("{range}: {self}; libibverbs is called next")),
            _ => self.print(&format_args!(
                "{range}: {self}; the program gets its original error ({error})"
            )),
        }
    }

    fn print(self, line: &fmt::Arguments<'_>) {
        let bit = 1_u32 << (self.0 & 31);
        if Mode::get() == Mode::Log || PRINTED.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            print(line);
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.2 {
            0 => f.write_str(self.1),
            code => write!(f, "{} ({code})", self.1),
        }
    }
}

/// Prints a line with one call of `write`. Prints nothing if this call would block, or would end
/// the program by SIGPIPE.
pub(crate) fn print(text: &fmt::Arguments<'_>) {
    // The line is on the stack: nothing is allocated, and no lock is taken. In the child of a fork, a
    // lock that another thread held would stay locked.
    let mut line = [0; 512];
    let mut rest = &mut line[..];
    let _ = writeln!(rest, "libpeermem_preload: {text}");
    let unused = rest.len();
    let mut output = libc::pollfd {
        fd: libc::STDERR_FILENO,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: poll writes only to `output`, and write reads only bytes of `line`. The results need
    // no check, because a line that is not printed does no harm.
    unsafe {
        if libc::poll(&mut output, 1, 0) == 1 && output.revents == libc::POLLOUT {
            libc::write(output.fd, line.as_ptr().cast(), line.len() - unused);
        }
    }
}
