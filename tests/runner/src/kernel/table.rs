// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The kernels of the test VM: sources, images, and the suite's runs on each.
//!
//! A kernel is one entry of [`FLAVOURS`].

use crate::arch::Arch;

/// Runs of the suite that `make test-all` repeats on a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Nothing,
    /// All runs in VMs for which `tests/runner/suite` names no kernel.
    All,
    /// The runs that `tests/runner/suite` repeats on kernels of this kind:
    /// - `arm64`: only runs that depend on page size, processor or IOMMU, because each VM is emulated
    ///   and slower.
    /// - `stock`: runs that depend on the kernel's own ib_core, rxe, locks and DMA mapping.
    /// - `realtime`: runs that depend on how locks sleep and threads are scheduled.
    /// - `oldest`: the verbs cases in both modes, which use every callback of ib_core and test the
    ///   kernel's rxe.
    Kind(&'static str),
}

pub(crate) const DEFAULT: &str = "7.3";

/// The kernel series before the default series. Its `kernel` crate differs from the default's.
pub(crate) const EARLIER: &str = "7.2";

/// Configuration fragment for a kernel that checks module signatures and trusts a key of the test
/// VM.
pub(super) const SIGNED: &str = "signed.config";

/// The default source with detectors for faults that no test result shows.
pub(crate) const DEBUG: &str = "debug";

/// The kernel with detectors for the portable build. This kernel has no Rust.
pub(crate) const DEBUG_PORTABLE: &str = "6.12-debug";

/// The default kernel for arm64, with pages of 4 KiB and of 64 KiB.
pub(crate) const ARM64: &str = "7.3-arm64";
pub(crate) const ARM64_64K: &str = "7.3-arm64-64k";

/// Debian 13's own kernel. Its ib_core has no peer memory, and its rxe is patched to register
/// dma-bufs.
pub(crate) const DMABUF: &str = "6.12-dmabuf";

/// Debian 13's own kernel with PREEMPT_RT.
const REALTIME: &str = "6.12-rt";

/// Debian 13's own kernel for arm64, with pages of 4 KiB.
const STOCK_ARM64: &str = "6.12-arm64";

/// Configuration fragment for VMs with a PCI topology: NUMA, and config space beyond 256 bytes.
const HOST: &str = "host.config";

/// Variables of make for compiling with clang 19 and its tools for this machine's architecture.
const CLANG: &[&str] = &["LLVM=-19"];

/// Variables of make for compiling modules for a stock kernel with this machine's gcc, whichever
/// gcc built that kernel. Type information would need the kernel's own version of pahole.
const STOCK_MAKE: &[&str] = &[
    "CC=gcc",
    "CONFIG_DEBUG_INFO=",
    "CONFIG_DEBUG_INFO_BTF_MODULES=",
    // Only gcc 14 and later have this flag.
    "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=",
];

/// The variables of [`STOCK_MAKE`] for cross-compiled modules.
const STOCK_MAKE_ARM64: &[&str] = &[
    "ARCH=arm64",
    "CROSS_COMPILE=aarch64-linux-gnu-",
    "CC=aarch64-linux-gnu-gcc",
    "CONFIG_DEBUG_INFO=",
    "CONFIG_DEBUG_INFO_BTF_MODULES=",
    // Only gcc 14 and later have this flag. Without the flag, functions are not aligned as arm64's
    // function tracer requires.
    "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=",
    "CONFIG_FUNCTION_TRACER=",
    // The same setting as in `Arch::make`.
    "CFLAGS_peer_mem.o=-mcmodel=large",
];

pub(crate) struct Flavour {
    /// Name of the kernel for `--kernel`, and of its directory in the cache.
    pub(crate) name: &'static str,
    pub(crate) arch: Arch,
    pub(super) package: &'static str,
    /// Prefix of the source packages that are tried, newest first, if the archive no longer has
    /// `package`.
    pub(super) instead: Option<&'static str>,
    /// Suites of Debian's archive that have the package and, for a stock kernel, libc6. This machine
    /// need not use these suites.
    pub(super) suites: &'static [&'static str],
    /// The flavour whose directory holds the source, if another flavour has the same package and
    /// patches.
    source: Option<&'static str>,
    /// `true` for Debian's image with PREEMPT_RT.
    pub(super) realtime: bool,
    /// Directories in `tests/kernel/patches`, applied in this order.
    pub(super) patches: &'static [&'static str],
    /// Configuration fragments in `tests/kernel/config`. A kernel without fragments is Debian's own
    /// image, with headers of the source's version; only its RDMA modules are compiled.
    pub(super) config: &'static [&'static str],
    /// Variables of make, for the kernel and for modules.
    pub(super) make: &'static [&'static str],
    pub(super) compiler: &'static str,
    /// `true` if the kernel's ib_core has peer memory, which our module needs.
    pub(super) peer_memory: bool,
    /// `true` if the RDMA modules are also built from the pristine source.
    pub(crate) pristine_rdma: bool,
    /// `true` if the configuration has the detectors of `debug.config`. Every VM must then show
    /// that the detectors work.
    pub(super) detectors: bool,
    /// Smoke runs on this kernel, by their names in `tests/runner/suite`.
    pub(crate) smoke: &'static [&'static str],
    /// Runs of the suite that `make test-all` repeats on this kernel.
    pub(crate) again: Again,
    /// `true` if only `make test-all` uses the kernel, and `make test` does not.
    pub(crate) only_in_full: bool,
    /// Space that the kernel needs in the cache, in MiB.
    pub(crate) mib: u64,
}

const BUILT: Flavour = Flavour {
    name: "",
    arch: Arch::X86_64,
    package: "linux-source-7.3",
    instead: None,
    suites: &["trixie-backports", "forky", "sid"],
    source: None,
    realtime: false,
    patches: &["7.3"],
    config: &[],
    make: &[],
    compiler: "gcc",
    peer_memory: true,
    pristine_rdma: false,
    detectors: false,
    smoke: &[],
    again: Again::All,
    only_in_full: false,
    mib: 650,
};

/// Defaults for built arm64 kernels. `make test` does not use these kernels, because the first run
/// on a machine would also have to make a root, programs and a kernel.
const BUILT_ARM64: Flavour = Flavour {
    arch: Arch::Arm64,
    instead: Some("linux-source-7."),
    make: Arch::Arm64.make(),
    compiler: "clang-19",
    again: Again::Kind("arm64"),
    only_in_full: true,
    ..BUILT
};

const STOCK: Flavour = Flavour {
    make: STOCK_MAKE,
    smoke: &["NVIDIA's", "ours, revocable"],
    again: Again::Kind("stock"),
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
        smoke: &["ours, revocable"],
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
    // Debian's own kernels, from Debian 13, 12 and 11.
    Flavour {
        name: "6.12",
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        smoke: &[
            "NVIDIA's",
            "ours, revocable",
            "ours, beside a proprietary nvidia.ko",
            "ours, beside a proprietary nvidia.ko, revocable",
        ],
        ..STOCK
    },
    Flavour {
        name: DMABUF,
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12-dmabuf"],
        peer_memory: false,
        // Only the runs of the library for LD_PRELOAD use this kernel.
        smoke: &[],
        again: Again::Nothing,
        only_in_full: true,
        ..STOCK
    },
    Flavour {
        name: STOCK_ARM64,
        arch: Arch::Arm64,
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        make: STOCK_MAKE_ARM64,
        smoke: &["NVIDIA's", "ours", "ours, revocable"],
        again: Again::Nothing,
        only_in_full: true,
        ..STOCK
    },
    Flavour {
        name: REALTIME,
        package: "linux-source-6.12",
        suites: &["trixie"],
        realtime: true,
        patches: &["6.12"],
        smoke: &["NVIDIA's", "ours", "ours, revocable"],
        again: Again::Kind("realtime"),
        only_in_full: true,
        ..STOCK
    },
    Flavour {
        name: DEBUG_PORTABLE,
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        make: &["CC=gcc"],
        config: &[
            "rig.config",
            "debug.config",
            "6.12.config",
            "6.12-debug.config",
        ],
        detectors: true,
        again: Again::Nothing,
        only_in_full: true,
        mib: 3600,
        ..BUILT
    },
    // Ubuntu's kernels for Grace have pages of 64 KiB. Debian has no image with such pages.
    Flavour {
        name: "6.12-arm64-64k",
        package: "linux-source-6.12",
        instead: None,
        suites: &["trixie"],
        patches: &["6.12"],
        config: &[
            "rig.config",
            "arm64.config",
            "arm64-64k.config",
            "6.12.config",
        ],
        smoke: &["NVIDIA's", "ours", "ours, revocable"],
        again: Again::Nothing,
        ..BUILT_ARM64
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
        // The stand-in does not compile with the kernel of Debian 11's release itself. The newer
        // kernels are security updates.
        suites: &["bullseye-security", "bullseye"],
        patches: &["5.10"],
        // The repeated verbs cases include those of the smoke runs.
        smoke: &[],
        again: Again::Kind("oldest"),
        only_in_full: true,
        ..STOCK
    },
];

impl Flavour {
    pub(crate) fn source(&self) -> &'static str {
        self.source.unwrap_or(self.name)
    }

    /// Returns `true` if the kernel is Debian's own image.
    pub(crate) fn is_stock(&self) -> bool {
        self.config.is_empty()
    }

    /// Returns `true` if the kernel shows a VM's topology: the sockets, and the ACS and ATS of
    /// bridges.
    pub(crate) fn shows_topology(&self) -> bool {
        self.is_stock() || self.config.contains(&HOST)
    }
}

pub(crate) fn flavour(name: &str) -> Option<&'static Flavour> {
    FLAVOURS.iter().find(|flavour| flavour.name == name)
}

pub(crate) fn all() -> impl Iterator<Item = &'static Flavour> {
    FLAVOURS.iter()
}

pub(crate) fn of(arch: Arch) -> impl Iterator<Item = &'static str> {
    FLAVOURS
        .iter()
        .filter(move |flavour| flavour.arch == arch)
        .map(|flavour| flavour.name)
}

/// Returns the kernels on which `make test-all` repeats runs of the suite.
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
    fn inputs_of_all_flavours_exist() {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel");
        for flavour in FLAVOURS {
            let name = flavour.name;
            for fragment in flavour.config {
                let file = ours.join("config").join(fragment);
                assert!(file.is_file(), "{name}: no {}", file.display());
            }
            for directory in flavour.patches {
                let file = ours.join("patches").join(directory).join("series");
                assert!(file.is_file(), "{name}: no {}", file.display());
            }
            let source = flavour.source();
            assert!(
                FLAVOURS.iter().any(|other| other.name == source),
                "{name}: no kernel {source}"
            );
        }
    }
}
