// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The software that GPUDirect RDMA takes: read once ([`Software`]), judged by the checks in the files here.
//!
//! Whoever lacks several things is told the first, not what follows from it: without a GPU or an RDMA device nothing
//! here
//! says anything but that; a module is not missed where ib_core could not take it.

pub(super) mod clients;
pub(super) mod consumers;
pub(super) mod dma_buf;
pub(super) mod driver;
pub(super) mod gpu_mode;
pub(super) mod limits;
pub(super) mod log;
pub(super) mod module;
pub(super) mod peer_memory;
pub(super) mod presence;
pub(super) mod refusals;
pub(super) mod service;

#[cfg(test)]
mod made;
#[cfg(test)]
mod planted;

use super::Check;
use crate::host::Fact;
use crate::host::Host;
use crate::host::Seen;
use crate::host::Unseen;
use crate::nvml::Nvml;

/// In the order in which one takes the other.
pub(super) const OF_SOFTWARE: &[Check] = &[
    Check {
        name: presence::NAME,
        looks_at: "whether there is a GPU, and an RDMA device",
        run: presence::check,
    },
    Check {
        name: driver::NAME,
        looks_at: "nvidia.ko: open or proprietary, its version, and the driver's library beside it",
        run: driver::check,
    },
    Check {
        name: peer_memory::NAME,
        looks_at: "whether the ib_core that is loaded has peer memory, and whose it is",
        run: peer_memory::check,
    },
    Check {
        name: module::NAME,
        looks_at: "whether nvidia_peermem is loaded, whose, for this driver, and why not",
        run: module::check,
    },
    Check {
        name: clients::NAME,
        looks_at: "the module's clients at ib_core, their kind, and whose they are",
        run: clients::check,
    },
    Check {
        name: consumers::NAME,
        looks_at: "whether NCCL, UCX, NVSHMEM and others find the module where each of them looks",
        run: consumers::check,
    },
    Check {
        name: refusals::NAME,
        looks_at: "what the module refused of late and what it lost (peermem-rs)",
        run: refusals::check,
    },
    Check {
        name: gpu_mode::BAR1,
        looks_at: "how much of each GPU's BAR1 is free (NVML)",
        run: gpu_mode::bar1,
    },
    Check {
        name: limits::MEMLOCK,
        looks_at: "how much memory this shell and the jobs of batch systems and containers may lock",
        run: limits::memlock,
    },
    Check {
        name: limits::CGROUP,
        looks_at: "how near this cgroup is to its limits of RDMA handles and objects",
        run: limits::cgroup,
    },
    Check {
        name: log::NAME,
        looks_at: "the kernel's log since boot: the module, NVRM, IOMMU faults, PCIe errors, the cards' firmware",
        run: log::check,
    },
    Check {
        name: gpu_mode::MODE,
        looks_at: "MIG, virtual GPUs, persistence mode (NVML)",
        run: gpu_mode::mode,
    },
    Check {
        name: dma_buf::NAME,
        looks_at: "whether GPU memory can be registered by dma-buf, without the module",
        run: dma_buf::check,
    },
    Check {
        name: service::NAME,
        looks_at: "whether the module comes back at boot, and after openibd's restart",
        run: service::check,
    },
];

/// Where the module shows itself.
pub(super) const MODULE: &str = "/sys/module/nvidia_peermem";
/// By which a peer-memory module makes itself known.
pub(super) const REGISTER: &str = "ib_register_peer_memory_client";

/// What of the software was seen.
#[derive(Debug)]
pub(crate) struct Software {
    /// The kernel's release: `6.8.0-45-generic`.
    pub(super) kernel: Seen<String>,
    /// `nvidia_peermem`; none: not loaded.
    pub(super) module: Seen<Option<Module>>,
    /// The file that modprobe would load it from, below the modules' directory; none: there is no such file.
    pub(super) installed: Seen<Option<String>>,
    /// The module before NVIDIA's, nv_peer_mem, is loaded.
    pub(super) has_forerunner: bool,
    /// nvidia.ko; none: not loaded.
    pub(super) driver: Seen<Option<Driver>>,
    pub(super) symbols: Seen<Vec<Symbol>>,
    pub(super) nvml: Seen<Nvml>,
    pub(super) log: Seen<Vec<log::Record>>,
}

/// The peer-memory module that is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Module {
    pub(super) version: Option<String>,
    /// peermem-rs; otherwise NVIDIA's.
    pub(super) is_ours: bool,
}

/// nvidia.ko.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Driver {
    pub(super) version: Option<String>,
    /// None: it could not be told.
    pub(super) is_open: Option<bool>,
}

/// A function of the kernel's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) name: String,
    /// None: it is built in.
    pub(super) module: Option<String>,
}

impl Software {
    /// Looks at all of it.
    pub(super) fn look(host: &dyn Host) -> Self {
        let kernel = host.text("/proc/sys/kernel/osrelease");
        Self {
            module: Module::look(host),
            installed: installed(host, &kernel),
            has_forerunner: host.has("/sys/module/nv_peer_mem") == Ok(true),
            driver: Driver::look(host),
            symbols: host.fact(Fact::KernelSymbols).map(|text| symbols(&text)),
            nvml: Nvml::look(host),
            log: host.fact(Fact::KernelLog).map(|text| log::parse(&text)),
            kernel,
        }
    }

    /// The module that is loaded, where that is known.
    pub(super) fn loaded(&self) -> Option<&Module> {
        self.module.as_ref().ok().and_then(Option::as_ref)
    }

    /// nvidia.ko, where that is known.
    pub(super) fn nvidia(&self) -> Option<&Driver> {
        self.driver.as_ref().ok().and_then(Option::as_ref)
    }

    /// Whether modprobe would load peermem-rs: its file is called with an underscore, NVIDIA's with dashes.
    pub(super) fn would_load_ours(&self) -> bool {
        let file = self.installed.as_ref().ok().and_then(Option::as_ref);
        file.is_some_and(|file| is_ours(file))
    }

    /// Whether somebody wants the module here: peermem-rs is installed (NVIDIA's comes with every driver), or loading
    /// one was tried.
    pub(super) fn is_wanted(&self) -> bool {
        let log = self.log.as_deref().unwrap_or_default();
        self.would_load_ours() || log::not_loaded(log).is_some()
    }

    /// The function by which modules become clients. None: ib_core has none. An error: it cannot be told.
    pub(super) fn register(&self) -> Seen<Option<&Symbol>> {
        let symbols = self.symbols.as_ref().map_err(Unseen::clone)?;
        Ok(symbols.iter().find(|symbol| symbol.name == REGISTER))
    }

    /// Whether it is known that ib_core has no peer memory.
    pub(super) fn lacks_peer_memory(&self) -> bool {
        self.register() == Ok(None)
    }

    /// Whether nvidia.ko is known to be of a kind that peermem-rs does not load beside, and that is what would be
    /// loaded.
    pub(super) fn is_closed_to_ours(&self) -> bool {
        let is_closed = |driver: &Driver| driver.is_open == Some(false) || driver.is_old();
        self.would_load_ours() && self.nvidia().is_some_and(is_closed)
    }
}

impl Module {
    fn look(host: &dyn Host) -> Seen<Option<Self>> {
        if !host.has(MODULE)? {
            return Ok(None);
        }
        let version = host.text(&format!("{MODULE}/version")).ok();
        // Its version says so, and so does a parameter that NVIDIA's has not.
        let says = version
            .as_ref()
            .is_some_and(|version| version.contains("-rs"));
        let has = || host.has(&format!("{MODULE}/parameters/max_pieces")) == Ok(true);
        Ok(Some(Self {
            is_ours: says || has(),
            version,
        }))
    }

    /// `nvidia_peermem 595.45.04-rs1 (peermem-rs)`.
    pub(super) fn named(&self) -> String {
        let version = self.version.as_deref().unwrap_or("of unknown version");
        let whose = match self.is_ours {
            true => "peermem-rs",
            false => "NVIDIA's",
        };
        format!("nvidia_peermem {version} ({whose})")
    }

    /// A parameter's value.
    pub(super) fn parameter(host: &dyn Host, name: &str) -> Seen<String> {
        host.text(&format!("{MODULE}/parameters/{name}"))
    }
}

impl Driver {
    fn look(host: &dyn Host) -> Seen<Option<Self>> {
        match host.text("/proc/driver/nvidia/version") {
            Ok(text) => Ok(Some(Self::parse(&text))),
            Err(Unseen::Absent) if !host.has("/sys/module/nvidia")? => Ok(None),
            // Without its files in /proc, as in some containers.
            Err(Unseen::Absent) => Ok(Some(Self {
                version: host.text("/sys/module/nvidia/version").ok(),
                // TAINT_PROPRIETARY_MODULE.
                is_open: host
                    .text("/sys/module/nvidia/taint")
                    .ok()
                    .map(|taint| !taint.contains('P')),
            })),
            Err(why) => Err(why),
        }
    }

    /// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build …`.
    fn parse(text: &str) -> Self {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("NVRM version:"));
        let Some((front, behind)) = line.and_then(|line| line.split_once("Kernel Module")) else {
            return Self {
                version: None,
                is_open: None,
            };
        };
        Self {
            version: behind
                .split_whitespace()
                .find(|word| is_version(word))
                .map(str::to_owned),
            is_open: Some(front.trim_end().ends_with("Open")),
        }
    }

    /// The first number of the version: 570.
    pub(super) fn major(&self) -> Option<u32> {
        let version = self.version.as_deref()?;
        version.split('.').next()?.parse().ok()
    }

    /// Before 535, when `nvidia_p2p_get_pages_persistent()` came, which peermem-rs calls (docs/compatibility.md).
    pub(super) fn is_old(&self) -> bool {
        self.major().is_some_and(|major| major < 535)
    }

    /// `nvidia.ko 570.86.15, open`.
    pub(super) fn named(&self) -> String {
        let version = self.version.as_deref().unwrap_or("of unknown version");
        let flavour = match self.is_open {
            Some(true) => "open",
            Some(false) => "proprietary",
            None => "open or proprietary",
        };
        format!("nvidia.ko {version}, {flavour}")
    }
}

/// Numbers and dots: `570.86.15`.
fn is_version(word: &str) -> bool {
    let mut parts = word.split('.');
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    parts.clone().count() > 1 && parts.all(number)
}

/// The lines of [`Fact::KernelSymbols`].
fn symbols(text: &str) -> Vec<Symbol> {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let _kind = words.next()?;
        let name = words.next()?.to_owned();
        let module = words.next().and_then(|word| {
            let module = word.strip_prefix('[')?.strip_suffix(']')?;
            Some(module.to_owned())
        });
        Some(Symbol { name, module })
    };
    text.lines().filter_map(parse).collect()
}

/// What modprobe would load, by `modules.dep`. Debian's driver packages put their flavour into the name.
fn installed(host: &dyn Host, kernel: &Seen<String>) -> Seen<Option<String>> {
    let kernel = kernel.as_ref().map_err(Unseen::clone)?;
    let lines = host.matching(&format!("/lib/modules/{kernel}/modules.dep"), "peermem")?;
    let file = lines.lines().find_map(|line| {
        let (path, _) = line.split_once(':')?;
        let name = path.rsplit('/').next()?;
        let (stem, _) = name.split_once(".ko")?;
        (stem.starts_with("nvidia") && stem.ends_with("peermem")).then(|| path.to_owned())
    });
    Ok(file)
}

fn is_ours(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.starts_with("nvidia_peermem.ko")
}

/// The first two numbers of a kernel's release.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn both_flavours_and_the_stand_in() {
        let said = |text: &str| Driver::parse(text);
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  \
        (dvs-builder@U16)\nGCC version:  gcc 13.3.0";
        assert_eq!(said(open).named(), "nvidia.ko 570.86.15, open");
        assert_eq!(said(open).major(), Some(570));
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023";
        assert_eq!(said(closed).named(), "nvidia.ko 535.54.03, proprietary");
        let stand_in = "NVRM version: stand-in GPU, UNIX Open Kernel Module for x86_64  595.45.04";
        assert_eq!(said(stand_in).named(), "nvidia.ko 595.45.04, open");
        assert_eq!(
            said("").named(),
            "nvidia.ko of unknown version, open or proprietary"
        );
    }

    #[test]
    fn whose_file_it_is() {
        assert!(is_ours("updates/peermem-rs/nvidia_peermem.ko"));
        assert!(is_ours("updates/dkms/nvidia_peermem.ko.xz"));
        assert!(!is_ours("kernel/drivers/video/nvidia-peermem.ko"));
        assert!(!is_ours("updates/dkms/nvidia-current-open-peermem.ko"));
    }

    #[test]
    fn releases() {
        assert_eq!(release("6.8.0-45-generic"), Some((6, 8)));
        assert_eq!(release("7.3.4+deb13-amd64"), Some((7, 3)));
        assert_eq!(release("7.3-rc1"), Some((7, 3)));
        assert_eq!(release("7"), None);
        assert_eq!(release(""), None);
    }

    #[test]
    fn functions_and_their_modules() {
        let found =
            symbols("T ib_register_peer_memory_client [ib_uverbs]\nt a_reg_user_mr_dmabuf\n\nx");
        assert_eq!(found.len(), 2);
        assert_eq!(
            found.first().and_then(|symbol| symbol.module.as_deref()),
            Some("ib_uverbs")
        );
        assert_eq!(found.get(1).and_then(|symbol| symbol.module.as_ref()), None);
    }

    proptest! {
        #[test]
        fn nothing_read_is_a_panic(text in any::<String>()) {
            Driver::parse(&text);
            Driver::parse(&format!("NVRM version: {text} Kernel Module {text}"));
            symbols(&text);
            release(&text);
            is_ours(&text);
        }
    }
}
