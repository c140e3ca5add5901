// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The software that affects GPUDirect RDMA: modules, driver, and their lines in the kernel log.

pub(crate) mod listed;
pub(crate) mod log;
pub(crate) mod nccl;

use crate::host::module_files::is_peermem;
use crate::host::nvml::Nvml;
use crate::host::{field, Fact, Host, Seen, Unseen};

pub(crate) use crate::host::facts::REGISTER;

/// Directory of the module in sysfs.
pub(crate) const MODULE: &str = "/sys/module/nvidia_peermem";

/// The software of a machine, as far as it could be read.
#[derive(Debug)]
pub(crate) struct Software {
    /// Release of the kernel: `6.8.0-45-generic`.
    pub(crate) kernel: Seen<String>,
    /// The module `nvidia_peermem`. `None`: the module is not loaded.
    pub(crate) module: Seen<Option<Module>>,
    /// File that modprobe would load, below the modules' directory. `None`: there is no such file.
    pub(crate) installed: Seen<Option<String>>,
    /// `true` if nv_peer_mem, the predecessor of NVIDIA's module, is loaded.
    pub(crate) has_forerunner: bool,
    /// The module nvidia.ko. `None`: the module is not loaded.
    pub(crate) driver: Seen<Option<Driver>>,
    pub(crate) symbols: Seen<Vec<Symbol>>,
    pub(crate) nvml: Seen<Nvml>,
    pub(crate) log: Seen<Vec<log::Record>>,
    /// `true` if this process runs as root. `None`: unknown.
    pub(crate) is_root: Option<bool>,
}

/// The loaded peer-memory module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    pub(crate) version: Option<String>,
    /// `true` for peermem-rs, `false` for NVIDIA's module.
    pub(crate) is_ours: bool,
}

/// nvidia.ko.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Driver {
    pub(crate) version: Option<String>,
    /// `None`: unknown.
    pub(crate) is_open: Option<bool>,
}

/// A function of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Symbol {
    pub(crate) name: String,
    /// `None`: built into the kernel.
    pub(crate) module: Option<String>,
}

impl Software {
    /// Reads all software except the modules' files ([`Files`](crate::host::module_files::Files)),
    /// which take long to read and which few callers need.
    pub(crate) fn scan(host: &dyn Host) -> Self {
        let kernel = host.text("/proc/sys/kernel/osrelease");
        Self {
            module: Module::scan(host),
            installed: installed(host, &kernel),
            has_forerunner: host.has("/sys/module/nv_peer_mem") == Ok(true),
            driver: Driver::scan(host),
            symbols: host.fact(Fact::KernelSymbols).map(|text| symbols(&text)),
            nvml: Nvml::scan(host),
            log: host.fact(Fact::KernelLog).map(|text| log::parse(&text)),
            is_root: host.fact(Fact::User).ok().map(|user| user.trim() == "0"),
            kernel,
        }
    }

    /// Returns the loaded module, if known.
    pub(crate) fn loaded(&self) -> Option<&Module> {
        self.module.as_ref().ok().and_then(Option::as_ref)
    }

    /// Returns nvidia.ko, if known.
    pub(crate) fn nvidia(&self) -> Option<&Driver> {
        self.driver.as_ref().ok().and_then(Option::as_ref)
    }

    /// Returns `true` if modprobe would load peermem-rs. The file name of peermem-rs contains an
    /// underscore. The file name of NVIDIA's module contains dashes.
    pub(crate) fn would_load_ours(&self) -> bool {
        let file = self.installed.as_ref().ok().and_then(Option::as_ref);
        file.is_some_and(|file| is_ours(file))
    }

    /// Returns `true` if an administrator seems to want the module: peermem-rs is installed, or an
    /// attempt to load a module was made. NVIDIA's module proves nothing, because it comes with
    /// every driver.
    pub(crate) fn is_wanted(&self) -> bool {
        let log = self.log.as_deref().unwrap_or_default();
        self.would_load_ours() || log::not_loaded(log).is_some()
    }

    /// Returns the function that registers clients, or `None` if ib_core has none. Returns an error
    /// if the kernel's symbols cannot be read.
    pub(crate) fn register(&self) -> Seen<Option<&Symbol>> {
        let symbols = self.symbols.as_ref().map_err(Unseen::clone)?;
        Ok(symbols.iter().find(|symbol| symbol.name == REGISTER))
    }

    /// Returns `true` if ib_core is known to have no peer memory.
    pub(crate) fn lacks_peer_memory(&self) -> bool {
        self.register() == Ok(None)
    }
}

impl Module {
    fn scan(host: &dyn Host) -> Seen<Option<Self>> {
        if !host.has(MODULE)? {
            return Ok(None);
        }
        let version = host.text(&format!("{MODULE}/version")).ok();
        // The version identifies peermem-rs. A parameter that NVIDIA's module lacks identifies
        // peermem-rs, too.
        let says = version
            .as_ref()
            .is_some_and(|version| version.contains("-rs"));
        let has = || host.has(&format!("{MODULE}/parameters/max_chunks")) == Ok(true);
        Ok(Some(Self {
            is_ours: says || has(),
            version,
        }))
    }

    /// Returns the name with the version, such as `nvidia_peermem 595.45.04-rs1 (peermem-rs)`.
    pub(crate) fn named(&self) -> String {
        let version = self.version.as_deref().unwrap_or("of unknown version");
        let whose = match self.is_ours {
            true => "peermem-rs",
            false => "NVIDIA's",
        };
        format!("nvidia_peermem {version} ({whose})")
    }

    pub(crate) fn parameter(host: &dyn Host, name: &str) -> Seen<String> {
        host.text(&format!("{MODULE}/parameters/{name}"))
    }
}

impl Driver {
    fn scan(host: &dyn Host) -> Seen<Option<Self>> {
        match host.text("/proc/driver/nvidia/version") {
            Ok(text) => Ok(Some(Self::parse(&text))),
            Err(Unseen::Absent) if !host.has("/sys/module/nvidia")? => Ok(None),
            // Some containers lack the driver's files in /proc.
            Err(Unseen::Absent) => Ok(Some(Self {
                version: host.text("/sys/module/nvidia/version").ok(),
                // `TAINT_PROPRIETARY_MODULE`.
                is_open: host
                    .text("/sys/module/nvidia/taint")
                    .ok()
                    .map(|taint| !taint.contains('P')),
            })),
            Err(why) => Err(why),
        }
    }

    /// Parses `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build
    /// …`.
    fn parse(text: &str) -> Self {
        let line = field(text, "NVRM version:");
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

    /// Returns the first number of the version: 570.
    pub(crate) fn major(&self) -> Option<u32> {
        let version = self.version.as_deref()?;
        version.split('.').next()?.parse().ok()
    }

    /// Returns `true` for drivers before version 535, which introduced
    /// `nvidia_p2p_get_pages_persistent()`. The module peermem-rs calls this function
    /// (docs/compatibility.md).
    pub(crate) fn is_old(&self) -> bool {
        self.major().is_some_and(|major| major < 535)
    }

    /// Returns the name with version and flavour, such as `nvidia.ko 570.86.15, open`.
    pub(crate) fn named(&self) -> String {
        let version = self.version.as_deref().unwrap_or("of unknown version");
        let flavour = match self.is_open {
            Some(true) => "open",
            Some(false) => "proprietary",
            None => "open or proprietary",
        };
        format!("nvidia.ko {version}, {flavour}")
    }
}

/// Returns `true` if the word consists of numbers and dots, such as `570.86.15`.
fn is_version(word: &str) -> bool {
    let mut parts = word.split('.');
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    parts.clone().count() > 1 && parts.all(number)
}

/// Parses the lines of [`Fact::KernelSymbols`].
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

/// Returns the file that modprobe would load, from `modules.dep`. Debian's driver packages add
/// their flavour to the name.
fn installed(host: &dyn Host, kernel: &Seen<String>) -> Seen<Option<String>> {
    let kernel = kernel.as_ref().map_err(Unseen::clone)?;
    let lines = host.matching(&format!("/lib/modules/{kernel}/modules.dep"), "peermem")?;
    let file = lines.lines().find_map(|line| {
        let (path, _) = line.split_once(':')?;
        is_peermem(path).then(|| path.to_owned())
    });
    Ok(file)
}

/// Returns `true` if the file name is that of peermem-rs. The name of NVIDIA's file has dashes.
pub(crate) fn is_ours(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.starts_with("nvidia_peermem.ko")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::no_panic;

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
    fn the_owner_of_a_module_file() {
        assert!(is_ours("updates/peermem-rs/nvidia_peermem.ko"));
        assert!(is_ours("updates/dkms/nvidia_peermem.ko.xz"));
        assert!(!is_ours("kernel/drivers/video/nvidia-peermem.ko"));
        assert!(!is_ours("updates/dkms/nvidia-current-open-peermem.ko"));
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

    no_panic!(
        nothing_read_is_a_panic: Driver::parse,
        |it: &str| Driver::parse(&format!("NVRM version: {it} Kernel Module {it}")),
        symbols,
        is_ours
    );
}
