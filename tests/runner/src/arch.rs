// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The architectures of the test VM. A kernel is built for one architecture, and a run builds
//! everything else for the architecture of its kernel.

use std::sync::LazyLock;
#[cfg(target_arch = "x86_64")]
use std::thread;
#[cfg(target_arch = "x86_64")]
use std::time::Duration;
#[cfg(target_arch = "x86_64")]
use std::time::Instant;

use clap::ValueEnum;

/// TSC frequency of this machine in kHz. QEMU passes the TSC through.
static TSC_KHZ: LazyLock<Option<u64>> = LazyLock::new(tsc_khz);

#[cfg(target_arch = "x86_64")]
fn tsc_khz() -> Option<u64> {
    // Reads both clocks within 20 µs. The error of the measured interval is then at most a
    // thousandth.
    let read = || loop {
        let time = Instant::now();
        // SAFETY: Every x86-64 processor has this instruction, which accesses no memory. Linux
        // allows the instruction in user space unless the process disabled it (prctl(2),
        // PR_SET_TSC).
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

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Arch {
    #[value(name = "x86-64")]
    #[default]
    X86_64,
    /// Cross-compiled, and emulated by QEMU's `virt` machine
    Arm64,
}

impl Arch {
    /// Returns patterns for tar that match the parts of a kernel's source for other architectures.
    /// tar has no pattern for "all names but these", so a few directories of other architectures
    /// stay.
    pub(crate) fn others(self) -> [&'static str; 2] {
        match self {
            Self::X86_64 => ["arch/[!x]*.[chS]", "arch/[!x]*.dts*"],
            // arm64 includes headers of the 32-bit arm.
            Self::Arm64 => ["arch/[!a]*.[chS]", "arch/*.dts*"],
        }
    }

    /// Returns the file in a kernel's build tree that QEMU boots, and its make target.
    pub(crate) fn image(self) -> (&'static str, &'static str) {
        match self {
            // The uncompressed image needs no unpacking at each boot.
            Self::X86_64 => ("vmlinux", "vmlinux"),
            Self::Arm64 => ("arch/arm64/boot/Image", "Image"),
        }
    }

    /// Returns the variables of make for kernels and modules that are cross-compiled.
    pub(crate) const fn make(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &[],
            // clang also compiles the debug kernel. By default, clang reads the addresses of weak
            // symbols from a table (the GOT), which an arm64 module does not have.
            Self::Arm64 => &["ARCH=arm64", "LLVM=-19", "CFLAGS_peer_mem.o=-mcmodel=large"],
        }
    }

    /// Returns the name of QEMU's program, and of the program's package.
    pub(crate) fn qemu(self) -> (&'static str, &'static str) {
        match self {
            Self::X86_64 => ("qemu-system-x86_64", "qemu-system-x86"),
            Self::Arm64 => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    pub(crate) fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "ttyS0",
            Self::Arm64 => "ttyAMA0",
        }
    }

    /// Returns the kernel parameters for clocks and addresses. On a busy machine, the kernel may
    /// measure a TSC frequency that is many times too low, so a parameter passes the frequency. If
    /// `icount` is set, no frequency is passed, because QEMU then counts instructions instead.
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

    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Returns Debian's name of the architecture if this machine cannot run its programs.
    pub(crate) fn foreign(self) -> Option<&'static str> {
        (self != Self::X86_64).then(|| self.debian())
    }

    /// Returns the kernel's name of the architecture, as `uname -m` prints it.
    pub(crate) fn machine(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }
}
