// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Checks, and the data that they examine.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use super::expected::Expected;
use crate::finding::{Finding, Level, Subject};
use crate::host::module_files::Files;
use crate::host::recording::Recording;
use crate::host::{Host, Seen, Unseen};
use crate::machine::counters::Counters;
use crate::machine::pci::{Address, DEVICES};
use crate::machine::{Class, Gpu, Hca, Machine, Pair};
use crate::software::Software;

/// Recording of this machine, or of a similar one, in its healthy state.
pub(crate) struct Baseline {
    pub(super) recording: Recording,
    pub(super) machine: Machine,
}

impl Baseline {
    /// Loads a recording. Returns an error if the file is not a recording, or has no PCI functions.
    pub(crate) fn load(file: &Path) -> anyhow::Result<Self> {
        let recording = Recording::load(file)?;
        let machine = Machine::scan(&recording)
            .map_err(|why| anyhow::anyhow!("{}: {DEVICES}: {why}", file.display()))?;
        Ok(Self { recording, machine })
    }
}

/// Subjects of findings about PCI functions, by the PCI address of the function.
pub(super) type Devices = BTreeMap<Address, Subject>;

/// Data that a check examines.
pub(crate) struct Scan<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) machine: &'a Machine,
    /// Pair that `--pair` selects, if any.
    pub(super) only: Option<&'a Pair>,
    /// `true` if the checks also examine pairs for which `Pair::is_best` is false (`--all`).
    pub(super) all: bool,
    /// Recording that the machine is compared with.
    pub(crate) baseline: Option<&'a Baseline>,
    /// Expected state of the machine.
    pub(crate) expected: Option<&'a Expected>,
    /// Earlier values of the counters.
    pub(super) earlier: Option<Counters>,
    software: OnceCell<Software>,
    module_files: OnceCell<Seen<Option<Files>>>,
    nearest: OnceCell<HashMap<String, Class>>,
}

impl<'a> Scan<'a> {
    /// Makes a scan of a machine. By default, the checks examine the best pairs of each GPU
    /// ([`Self::pairs`]).
    pub(crate) fn new(host: &'a dyn Host, machine: &'a Machine) -> Self {
        Self {
            host,
            machine,
            only: None,
            all: false,
            baseline: None,
            expected: None,
            earlier: None,
            software: OnceCell::new(),
            module_files: OnceCell::new(),
            nearest: OnceCell::new(),
        }
    }

    /// Returns the nearest class among the pairs in which the RDMA device is the best for a GPU
    /// (`Pair::is_best`). Returns `None` if there is no such pair.
    pub(super) fn nearest(&self, hca: &Hca) -> Option<Class> {
        let nearest = self.nearest.get_or_init(|| {
            let mut nearest: HashMap<String, Class> = HashMap::new();
            for pair in self.machine.pairs.iter().filter(|pair| pair.is_best) {
                let Some(class) = pair.class else {
                    continue;
                };
                let least = nearest.entry(pair.hca.clone()).or_insert(class);
                *least = class.min(*least);
            }
            nearest
        });
        nearest.get(hca.name.as_str()).copied()
    }

    /// Returns the machine's software, which is read on first use.
    pub(super) fn software(&self) -> &Software {
        self.software.get_or_init(|| Software::scan(self.host))
    }

    /// Returns the contents of the files of the peer-memory module and the modules that it needs.
    /// Returns `None` if modprobe knows no peer-memory module. The files are read on first use,
    /// because decompressing nvidia.ko takes half a second.
    pub(super) fn module_files(&self) -> &Seen<Option<Files>> {
        self.module_files.get_or_init(|| Files::scan(self.host))
    }

    /// Returns `true` if modprobe would load peermem-rs, but peermem-rs does not load beside the
    /// present nvidia.ko. Such an nvidia.ko is older than version 535, or is proprietary while
    /// peermem-rs is built for the open nvidia.ko.
    pub(super) fn is_closed_to_ours(&self) -> bool {
        let software = self.software();
        let is_built_for_open = || {
            let files = self.module_files().as_ref().ok().and_then(Option::as_ref);
            files.is_some_and(|files| files.module.is_for_proprietary() == Some(false))
        };
        let is_loaded = matches!(&software.module, Ok(Some(module)) if module.is_ours);
        software.would_load_ours()
            && !is_loaded
            && software.nvidia().is_some_and(|driver| {
                driver.is_old() || driver.is_open == Some(false) && is_built_for_open()
            })
    }

    /// Returns the pairs that the checks examine: the pair of `--pair`, all pairs if `--all` is
    /// set, or the best pairs of each GPU (`Pair::is_best`).
    pub(crate) fn pairs(&self) -> impl Iterator<Item = &'a Pair> + '_ {
        let (only, all) = (self.only, self.all);
        self.machine.pairs.iter().filter(move |pair| match only {
            Some(only) => pair.gpu == only.gpu && pair.hca == only.hca,
            None => pair.is_best || all,
        })
    }

    /// Returns the GPUs that the checks examine: all GPUs, or the GPU of `--pair`.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &'a Gpu> + '_ {
        let only = self.only;
        let asked = move |gpu: &&Gpu| only.is_none_or(|pair| pair.gpu == gpu.at);
        self.machine.gpus.iter().filter(asked)
    }

    /// Returns `true` if there is an RDMA device, and a GPU with GPUDirect RDMA. If the RDMA device
    /// or the GPU is missing, only the checks of presence apply.
    pub(super) fn has_both(&self) -> bool {
        let mut gpus = self.machine.gpus.iter();
        gpus.any(|gpu| gpu.why_no_gpudirect().is_none()) && !self.machine.hcas.is_empty()
    }

    /// Returns `true` if [`Self::gpus`] returns any GPU.
    pub(super) fn has_gpu(&self) -> bool {
        self.gpus().next().is_some()
    }

    /// Returns `true` if [`Self::pci_gpus`] returns any GPU.
    pub(super) fn has_pci_gpu(&self) -> bool {
        self.pci_gpus().next().is_some()
    }

    /// Returns the GPUs of [`Self::gpus`] with memory that RDMA devices access through PCI: GPUs
    /// that are not coherent, and coherent GPUs with Data Direct.
    pub(super) fn pci_gpus(&self) -> impl Iterator<Item = &'a Gpu> + '_ {
        let is_direct = |gpu: &Gpu| {
            let mut pairs = self.machine.pairs.iter();
            pairs.any(|pair| pair.gpu == gpu.at && pair.is_data_direct())
        };
        self.gpus()
            .filter(move |gpu| !gpu.is_coherent || is_direct(gpu))
    }

    /// Returns `true` if [`Self::hcas`] returns any RDMA device.
    pub(super) fn has_hca(&self) -> bool {
        self.hcas().next().is_some()
    }

    /// Returns `true` if there is an RDMA device that does its DMA in hardware.
    pub(super) fn has_hardware_hca(&self) -> bool {
        self.hcas().any(|hca| !hca.is_software)
    }

    /// Returns the RDMA devices of [`Self::pairs`].
    pub(crate) fn hcas(&self) -> impl Iterator<Item = &'a Hca> + '_ {
        let near: HashSet<&str> = self.pairs().map(|pair| pair.hca.as_str()).collect();
        let hcas = self.machine.hcas.iter();
        hcas.filter(move |hca| near.contains(hca.name.as_str()))
    }

    /// Returns the PCI functions whose lines in the kernel log cause findings, with the subject of
    /// these findings.
    pub(super) fn devices(&self) -> Devices {
        let mut devices = BTreeMap::new();
        for pair in self.pairs() {
            for at in &pair.bridges {
                devices.insert(*at, Subject::pair(pair));
            }
        }
        for hca in self.hcas() {
            for at in hca.functions() {
                devices.insert(at, Subject::hca(hca));
            }
        }
        for gpu in self.gpus() {
            devices.insert(gpu.at, Subject::gpu(gpu));
        }
        devices
    }

    /// Returns `true` if a finding about this pair may be worse than a note. This applies to the
    /// best pairs of each GPU, and to the pair of `--pair`.
    pub(crate) fn counts(&self, pair: &Pair) -> bool {
        let is_asked_for = |only: &Pair| only.gpu == pair.gpu && only.hca == pair.hca;
        pair.is_best || self.only.is_some_and(is_asked_for)
    }

    /// Returns `true` if the RDMA device has pairs for which [`Self::counts`] is true, and all
    /// these pairs use its Data Direct function.
    pub(super) fn is_by_data_direct(&self, hca: &Hca) -> bool {
        let mut pairs = self
            .pairs()
            .filter(|pair| pair.hca == hca.name && self.counts(pair))
            .peekable();
        pairs.peek().is_some() && pairs.all(Pair::is_data_direct)
    }

    /// Limits a level to a note if [`Self::counts`] is false for the pair.
    pub(crate) fn level(&self, pair: &Pair, level: Level) -> Level {
        match self.counts(pair) {
            true => level,
            false => level.min(Level::Note),
        }
    }

    /// Limits the level of a finding to a note if [`Self::counts`] is false for the pair.
    pub(crate) fn judged(&self, pair: &Pair, finding: Finding) -> Finding {
        Finding {
            level: self.level(pair, finding.level),
            ..finding
        }
    }

    /// Limits a level to a note if [`Self::counts`] is false for all pairs of the RDMA device.
    pub(crate) fn level_of(&self, hca: &Hca, level: Level) -> Level {
        let mut pairs = self.pairs().filter(|pair| pair.hca == hca.name);
        match pairs.any(|pair| pair.is_best || self.only.is_some()) {
            true => level,
            false => level.min(Level::Note),
        }
    }

    pub(crate) fn gpu(&self, at: Address) -> Option<&'a Gpu> {
        self.machine.gpu(at)
    }

    /// Returns the RDMA device of this name.
    pub(crate) fn hca(&self, name: &str) -> Option<&'a Hca> {
        self.machine.hca(name)
    }

    /// Reports a value that could not be read. `what` names the value, such as `ACS of
    /// 0000:18:01.0`.
    pub(crate) fn unseen(subject: Subject, what: impl AsRef<str>, why: &Unseen) -> Finding {
        let found = format!("{}: {why}", what.as_ref());
        let mut finding = subject.not_visible(found);
        finding.needs_root = *why == Unseen::Denied;
        finding
    }
}

impl Subject {
    pub(crate) fn gpu(gpu: &Gpu) -> Self {
        Self::Gpu {
            gpu: gpu.at.to_string(),
        }
    }

    /// Returns the subject of an RDMA device.
    pub(crate) fn hca(hca: &Hca) -> Self {
        Self::Hca {
            hca: hca.name.clone(),
        }
    }

    pub(crate) fn pair(pair: &Pair) -> Self {
        Self::Pair {
            gpu: pair.gpu.to_string(),
            hca: pair.hca.clone(),
        }
    }
}

/// Defines the constant `CHECK` of a file. The arguments are the fields of [`Check`]: name,
/// description, condition, function, and faults for the tests.
macro_rules! check {
    ($name:literal: $about:literal, $applies:expr, $run:expr, $faults:expr) => {
        pub(in crate::doctor) const CHECK: $crate::doctor::scan::Check =
            $crate::doctor::scan::Check {
                name: $name,
                about: $about,
                applies: $applies,
                run: $run,
                #[cfg(test)]
                faults: {
                    use $crate::doctor::tests::Faults::*;
                    $faults
                },
            };
    };
}
pub(super) use check;

/// A check of the machine.
pub(crate) struct Check {
    /// Stable name, used by `--skip` and the findings.
    pub(crate) name: &'static str,
    /// Short description for `--list-checks`.
    pub(crate) about: &'static str,
    /// Returns `true` if the machine has anything that the check examines.
    pub(crate) applies: fn(&Scan<'_>) -> bool,
    pub(super) run: fn(&Scan<'_>) -> Vec<Finding>,
    /// Faults that the tests inject.
    #[cfg(test)]
    pub(super) faults: super::tests::Faults,
}

impl Check {
    /// Runs the check and enters its name in the findings.
    pub(super) fn findings(&self, scan: &Scan<'_>) -> Vec<Finding> {
        let check = self.name;
        let findings = (self.run)(scan).into_iter();
        findings.map(|it| Finding { check, ..it }).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use crate::host::Fact;
    use crate::{fixture, testing};

    /// Commands that need no module file do not spend half a second on decompressing nvidia.ko.
    #[test]
    fn module_files_are_read_once_and_only_if_needed() {
        let (one, without) = (fixture::small(), fixture::no_hca());
        for (mut fixture, line, reads) in [
            (one.clone(), "topo --verbose", 0),
            (one.clone(), "doctor --only link,nvidia-driver", 0),
            (one.clone(), "export --no-doctor", 0),
            (one.clone(), "doctor", 1),
            (one, "export", 1),
            // Without an RDMA device, no module is needed.
            (without.clone(), "doctor", 0),
            (without, "export", 0),
        ] {
            fixture.software();
            let asked = Cell::new(0);
            let host = testing::Watched {
                machine: &fixture.recording,
                fact: &|fact| asked.set(asked.get() + i32::from(fact == Fact::ModuleFiles)),
                file: &|_| None,
            };
            let (text, _) = testing::says(&host, line);
            assert_eq!(asked.get(), reads, "{line:?}: {text}");
        }
    }
}
