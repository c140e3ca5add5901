// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The processors that the test VM may have. A kernel is built for one, and whatever a run makes beside it follows.

use std::sync::LazyLock;
#[cfg(target_arch = "x86_64")]
use std::thread;
#[cfg(target_arch = "x86_64")]
use std::time::Duration;
#[cfg(target_arch = "x86_64")]
use std::time::Instant;

use clap::ValueEnum;

/// How fast the TSC of this machine counts, which QEMU hands through.
static TSC_KHZ: LazyLock<Option<u64>> = LazyLock::new(tsc_khz);

#[cfg(target_arch = "x86_64")]
fn tsc_khz() -> Option<u64> {
    // Both clocks, read so close to each other that the interval below is known to a thousandth.
    let read = || loop {
        let time = Instant::now();
        // SAFETY: Every x86-64 processor has the instruction, which touches no memory, and Linux leaves it to user space but where
        // a process asked otherwise (prctl(2), PR_SET_TSC).
        let ticks = unsafe { core::arch::x86_64::_rdtsc() };
        if time.elapsed() < Duration::from_micros(20) {
            return (time, ticks);
        }
    };
    let (begin, first) = read();
    thread::sleep(Duration::from_millis(20));
    let (end, last) = read();
    let khz = u128::from(last.checked_sub(first)?) * 1_000_000 / (end - begin).as_nanos();
    u64::try_from(khz).ok()
}

#[cfg(not(target_arch = "x86_64"))]
fn tsc_khz() -> Option<u64> {
    None
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Arch {
    #[value(name = "x86-64")]
    X86_64,
    /// Cross-compiled, and emulated by QEMU's `virt` machine
    Arm64,
}

impl Arch {
    /// What of a kernel's source is only for other processors. tar knows no "all but these two letters", so a few stay.
    pub(crate) fn others(self) -> [&'static str; 2] {
        match self {
            Self::X86_64 => ["arch/[!x]*.[chS]", "arch/[!x]*.dts*"],
            // It includes headers of the 32-bit arm.
            Self::Arm64 => ["arch/[!a]*.[chS]", "arch/*.dts*"],
        }
    }

    /// The file of a kernel's build tree that QEMU boots, and how make calls it.
    pub(crate) fn image(self) -> (&'static str, &'static str) {
        match self {
            // As it is: nothing to unpack at each boot.
            Self::X86_64 => ("vmlinux", "vmlinux"),
            Self::Arm64 => ("arch/arm64/boot/Image", "Image"),
        }
    }

    /// Variables of make for kernels and modules, where they are cross-compiled.
    pub(crate) const fn make(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &[],
            // The compiler is the debug kernel's. By default it has addresses of weak symbols from a table that a module does not
            // get there.
            Self::Arm64 => &["ARCH=arm64", "LLVM=-19", "CFLAGS_peer_mem.o=-mcmodel=large"],
        }
    }

    /// QEMU's program, and the package that it comes in.
    pub(crate) fn qemu(self) -> (&'static str, &'static str) {
        match self {
            Self::X86_64 => ("qemu-system-x86_64", "qemu-system-x86"),
            Self::Arm64 => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// The serial line that has the kernel's log.
    pub(crate) fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "ttyS0",
            Self::Arm64 => "ttyAMA0",
        }
    }

    /// What the kernel is told of this machine's clocks and addresses. On a busy machine it may measure the TSC many times too
    /// slow, so it is told how fast that is, but where QEMU counts instructions in its place.
    pub(crate) fn kernel_arguments(self, icount: bool) -> String {
        let told = match self {
            Self::X86_64 => "no_timer_check nokaslr tsc=reliable",
            Self::Arm64 => "nokaslr",
        };
        match *TSC_KHZ {
            Some(khz) if self == Self::X86_64 && !icount => format!("{told} tsc_early_khz={khz}"),
            _ => told.to_owned(),
        }
    }

    /// Debian's name of it.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Debian's name of it, where programs of this machine do not run on it.
    pub(crate) fn foreign(self) -> Option<&'static str> {
        (self != Self::X86_64).then(|| self.debian())
    }

    /// The kernel's name of it, as `uname -m` prints it.
    pub(crate) fn machine(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }
}
