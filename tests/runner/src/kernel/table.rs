// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The kernels of the test VM: where their sources and images come from, and which runs of the suite they have.
//!
//! A kernel is one entry of [`FLAVOURS`].

use crate::arch::Arch;

/// Machines of the suite that `make test-all` repeats on a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Nothing,
    /// All that have no kernel of their own.
    All,
    /// Those with these names, and the hazards if they are among them.
    Listed(&'static [&'static str]),
}

/// A smoke run on a kernel: something of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Smoke {
    /// This module.
    Ours,
    /// This module without persistent pins.
    Revocable,
    /// NVIDIA's module, whose client with callbacks serves.
    Nvidia,
    /// This module beside an nvidia.ko that the loader takes for proprietary.
    Proprietary,
    /// The same without persistent pins.
    ProprietaryRevocable,
}

pub(crate) const DEFAULT: &str = "7.3";

/// The series before the default, for what differs in the `kernel` crate.
pub(crate) const EARLIER: &str = "7.2";

/// The fragment of a kernel that looks at signatures: it trusts a key of the test VM's.
pub(super) const SIGNED: &str = "signed.config";

/// The same source with what finds faults that no result shows.
pub(crate) const DEBUG: &str = "debug";

/// The detectors on a kernel without Rust, where the portable build runs.
pub(crate) const DEBUG_PORTABLE: &str = "6.12-debug";

/// The usual one for arm64, with pages of 4 KiB, and the same with pages of 64 KiB.
pub(crate) const ARM64: &str = "7.3-arm64";
pub(crate) const ARM64_64K: &str = "7.3-arm64-64k";

/// Debian 13's own for arm64, with pages of 4 KiB.
const STOCK_ARM64: &str = "6.12-arm64";

/// What shows a machine's topology: NUMA, and config space past 256 bytes.
const HOST: &str = "host.config";

/// The variables for make by which clang 19 and its tools compile for this machine's processors.
pub(super) const CLANG: &[&str] = &["LLVM=-19"];

/// The variables for make by which this machine's gcc compiles modules for a stock kernel, whatever gcc built that kernel.
/// Type information would need the kernel's own version of pahole.
const STOCK_MAKE: &[&str] = &[
    "CC=gcc",
    "CONFIG_DEBUG_INFO=",
    "CONFIG_DEBUG_INFO_BTF_MODULES=",
    // A flag of gcc 14.
    "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=",
];

/// The same where the modules are cross-compiled.
const STOCK_MAKE_ARM64: &[&str] = &[
    "ARCH=arm64",
    "CROSS_COMPILE=aarch64-linux-gnu-",
    "CC=aarch64-linux-gnu-gcc",
    "CONFIG_DEBUG_INFO=",
    "CONFIG_DEBUG_INFO_BTF_MODULES=",
    // A flag of gcc 14, without which the functions are not aligned as arm64's tracer of functions wants them.
    "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=",
    "CONFIG_FUNCTION_TRACER=",
    // The same setting as in `Arch::make`.
    "CFLAGS_peer_mem.o=-mcmodel=large",
];

/// What is run on arm64, where each machine is emulated more slowly: what pages, processors and their IOMMU have a part in.
pub(crate) const ON_ARM64: &[&str] = &[
    "KUnit",
    "verbs: ours",
    "verbs: ours, revocable",
    "verbs: ours, the portable build",
    "verbs: ours, the portable build, revocable",
    "verbs: ours, behind a translating IOMMU",
    "verbs: ours, mapped by nvidia.ko, behind a translating IOMMU",
    "verbs: NVIDIA's, persistent client",
    "verbs: NVIDIA's, callback client",
    "a provider's answers: ours, on the stand-in's p2p.c",
    "a provider's answers: ours, revocable, on the stand-in's p2p.c",
    "memory of coherent GPUs: ours",
    "DMA: ours, behind a translating IOMMU",
    "DMA: ours, behind an IOMMU that forgets lazily",
    "hazards",
    "sweep: calls of the provider's",
    "perftest: ours",
    "pyverbs: patched rxe",
    "stress: two thousand operations in each mode",
];

/// Runs on Debian's stock kernels: what the kernel's own ib_core, rxe, locks and mapping of DMA have a part in.
const ON_STOCK: &[&str] = &[
    "verbs: ours",
    "verbs: ours, revocable",
    "verbs: ours, on 555's nv-p2p.c",
    "verbs: ours, behind a translating IOMMU",
    "verbs: ours, IOMMU passing through",
    "verbs: NVIDIA's, persistent client",
    "verbs: NVIDIA's, callback client",
    "stress: two thousand operations in each mode",
    "sweep: calls of the provider's",
    "hazards",
    "perftest: ours",
];

/// Runs on the oldest kernel: every callback of ib_core's in both modes, and all that the verbs cases see of the kernel's own rxe.
const ON_OLDEST: &[&str] = &["verbs: ours", "verbs: ours, revocable"];

/// One kernel of the test VM.
pub(crate) struct Flavour {
    /// Name for `--kernel`, and of the kernel's directory in the cache.
    pub(crate) name: &'static str,
    pub(crate) arch: Arch,
    /// Debian's package of the source.
    pub(super) package: &'static str,
    /// Prefix of packages to try, newest first, when the usual one has vanished from the archive.
    pub(super) instead: Option<&'static str>,
    /// Suites of Debian's archive that carry the package. The machine's own need not be among them.
    pub(super) suites: &'static [&'static str],
    /// The flavour whose directory holds the source, if another of the same package and patches does.
    source: Option<&'static str>,
    /// Directories in `tests/kernel/patches`, applied one after the other.
    pub(super) patches: &'static [&'static str],
    /// Configuration fragments in `tests/kernel/config`. A kernel without any is Debian's own image, with headers of the
    /// source's version; only its RDMA modules are compiled.
    pub(super) config: &'static [&'static str],
    /// Variables for make, for the kernel and for modules.
    pub(super) make: &'static [&'static str],
    /// The compiler that the variables for make choose.
    pub(super) compiler: &'static str,
    /// The RDMA modules are also built as the pristine source has them.
    pub(super) pristine_rdma: bool,
    /// The configuration has the detectors of `debug.config`, and every machine must show that they work.
    pub(super) detectors: bool,
    /// Smoke runs of the suite on this kernel.
    pub(crate) smoke: &'static [Smoke],
    /// Runs of the suite that `make test-all` repeats on this kernel.
    pub(crate) again: Again,
    /// `make test` leaves the kernel out: `make test-all` has it.
    pub(crate) only_in_full: bool,
    /// Time that the kernel takes from nothing on two processors, in seconds.
    pub(crate) seconds: f64,
    /// Space that the kernel takes in the cache, in MiB.
    pub(crate) mib: u64,
}

/// Fields that most built kernels have alike.
const BUILT: Flavour = Flavour {
    name: "",
    arch: Arch::X86_64,
    package: "linux-source-7.3",
    instead: None,
    suites: &["trixie-backports", "forky", "sid"],
    source: None,
    patches: &["7.3"],
    config: &[],
    make: &[],
    compiler: "gcc",
    pristine_rdma: false,
    detectors: false,
    smoke: &[],
    again: Again::All,
    only_in_full: false,
    seconds: 404.0,
    mib: 650,
};

/// Fields that most kernels for arm64 have alike. A root, programs and a kernel are too much for the first `make test` on a
/// machine.
const BUILT_ARM64: Flavour = Flavour {
    arch: Arch::Arm64,
    instead: Some("linux-source-7."),
    make: Arch::Arm64.make(),
    compiler: "clang-19",
    again: Again::Listed(ON_ARM64),
    only_in_full: true,
    ..BUILT
};

/// Fields that all stock kernels have alike.
const STOCK: Flavour = Flavour {
    make: STOCK_MAKE,
    smoke: &[Smoke::Nvidia, Smoke::Revocable],
    again: Again::Listed(ON_STOCK),
    seconds: 180.0,
    mib: 80,
    ..BUILT
};

const FLAVOURS: &[Flavour] = &[
    Flavour {
        name: DEFAULT,
        instead: Some("linux-source-7."),
        config: &["rig.config"],
        pristine_rdma: true,
        again: Again::Nothing,
        ..BUILT
    },
    Flavour {
        name: EARLIER,
        package: "linux-source-7.2",
        patches: &["7.2", "7.3"],
        config: &["rig.config", "7.2.config", HOST, SIGNED],
        pristine_rdma: true,
        smoke: &[Smoke::Revocable],
        seconds: 600.0,
        ..BUILT
    },
    Flavour {
        name: DEBUG,
        make: CLANG,
        instead: Some("linux-source-7."),
        source: Some(DEFAULT),
        config: &["rig.config", "debug.config"],
        compiler: "clang-19",
        detectors: true,
        again: Again::Nothing,
        seconds: 720.0,
        mib: 3600,
        ..BUILT
    },
    Flavour {
        name: ARM64,
        config: &["rig.config", "arm64.config"],
        ..BUILT_ARM64
    },
    Flavour {
        name: ARM64_64K,
        source: Some(ARM64),
        config: &["rig.config", "arm64.config", "arm64-64k.config"],
        ..BUILT_ARM64
    },
    // Debian 13's, 12's and 11's own kernels.
    Flavour {
        name: "6.12",
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        smoke: &[
            Smoke::Nvidia,
            Smoke::Revocable,
            Smoke::Proprietary,
            Smoke::ProprietaryRevocable,
        ],
        ..STOCK
    },
    Flavour {
        name: STOCK_ARM64,
        arch: Arch::Arm64,
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        make: STOCK_MAKE_ARM64,
        smoke: &[Smoke::Nvidia, Smoke::Ours, Smoke::Revocable],
        again: Again::Nothing,
        only_in_full: true,
        ..STOCK
    },
    Flavour {
        name: DEBUG_PORTABLE,
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        make: &["CC=gcc"],
        config: &["rig.config", "debug.config", "6.12-debug.config"],
        detectors: true,
        again: Again::Nothing,
        only_in_full: true,
        seconds: 720.0,
        mib: 3600,
        ..BUILT
    },
    Flavour {
        name: "6.1",
        package: "linux-source-6.1",
        suites: &["bookworm"],
        patches: &["6.1"],
        ..STOCK
    },
    Flavour {
        name: "5.10",
        package: "linux-source-5.10",
        // The last kernels of Debian 11 are updates: its release has none with what the stand-in is compiled with.
        suites: &["bullseye-security", "bullseye"],
        patches: &["5.10"],
        // The verbs cases have those of the smoke runs.
        smoke: &[],
        again: Again::Listed(ON_OLDEST),
        only_in_full: true,
        ..STOCK
    },
];

impl Flavour {
    /// The flavour whose directory holds the source.
    pub(crate) fn source(&self) -> &'static str {
        self.source.unwrap_or(self.name)
    }

    /// Returns `true` if the kernel is Debian's own image.
    pub(crate) fn is_stock(&self) -> bool {
        self.config.is_empty()
    }

    /// Returns `true` if the kernel sees sockets, and ACS and ATS of a bridge.
    pub(crate) fn shows_topology(&self) -> bool {
        self.is_stock() || self.config.contains(&HOST)
    }
}

pub(crate) fn flavour(name: &str) -> Option<&'static Flavour> {
    FLAVOURS.iter().find(|flavour| flavour.name == name)
}

/// All kernels of the test VM.
pub(crate) fn all() -> impl Iterator<Item = &'static Flavour> {
    FLAVOURS.iter()
}

/// All for these processors.
pub(crate) fn of(arch: Arch) -> impl Iterator<Item = &'static str> {
    FLAVOURS
        .iter()
        .filter(move |flavour| flavour.arch == arch)
        .map(|flavour| flavour.name)
}

/// The kernels on which `make test-all` repeats machines of the suite.
pub(crate) fn others() -> impl Iterator<Item = &'static str> {
    all()
        .filter(|flavour| flavour.again != Again::Nothing)
        .map(|flavour| flavour.name)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_flavours_are_made_of_is_there() {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel");
        for flavour in FLAVOURS {
            for fragment in flavour.config {
                assert!(ours.join("config").join(fragment).is_file());
            }
            for directory in flavour.patches {
                assert!(ours
                    .join("patches")
                    .join(directory)
                    .join("series")
                    .is_file());
            }
            assert!(FLAVOURS.iter().any(|other| other.name == flavour.source()));
        }
    }
}
