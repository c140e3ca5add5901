// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What a check is, and what it looks at.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use super::expected::Expected;
use crate::finding::{Finding, Level, Subject};
use crate::host::recording::Recording;
use crate::host::{Host, Seen, Unseen};
use crate::machine::counters::Counters;
use crate::machine::pci::{Address, DEVICES};
use crate::machine::{Class, Gpu, Hca, Machine, Pair};
use crate::software::files::Files;
use crate::software::Software;

/// The machine, or one like it, as it was when all was well.
pub(crate) struct Baseline {
    pub(super) recording: Recording,
    pub(super) machine: Machine,
}

impl Baseline {
    /// From a recording's file.
    ///
    /// # Errors
    /// It is no recording, or none of PCI.
    pub(crate) fn load(file: &Path) -> anyhow::Result<Self> {
        let recording = Recording::load(file)?;
        let machine = Machine::scan(&recording)
            .map_err(|why| anyhow::anyhow!("{}: {DEVICES}: {why}", file.display()))?;
        Ok(Self { recording, machine })
    }
}

/// PCI addresses of the devices that are judged, and what findings call them.
pub(super) type Devices = BTreeMap<Address, Subject>;

/// What a check looks at.
pub(crate) struct Scan<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) machine: &'a Machine,
    /// The one pair that was asked for.
    pub(super) only: Option<&'a Pair>,
    /// Pairs that are not the best of their GPU, too.
    pub(super) all: bool,
    /// What the machine is compared with.
    pub(crate) baseline: Option<&'a Baseline>,
    /// What it should have.
    pub(crate) expected: Option<&'a Expected>,
    /// What was counted a while ago.
    pub(super) earlier: Option<Counters>,
    software: OnceCell<Software>,
    module_files: OnceCell<Seen<Option<Files>>>,
    nearest: OnceCell<HashMap<String, Class>>,
}

impl<'a> Scan<'a> {
    /// All of a machine, by the best pairs of each GPU.
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

    /// The nearest class of the pairs in which an RDMA device is the best of a GPU. `None`: there is no such pair.
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

    /// The machine's software, looked at once.
    pub(super) fn software(&self) -> &Software {
        self.software.get_or_init(|| Software::scan(self.host))
    }

    /// What the modules' files say, read at the first question: a compressed nvidia.ko takes half a second. None: modprobe
    /// has no such module.
    pub(super) fn module_files(&self) -> &Seen<Option<Files>> {
        self.module_files.get_or_init(|| Files::scan(self.host))
    }

    /// Returns `true` if modprobe would load peermem-rs, and nvidia.ko is known to be of a kind that it does not load beside:
    /// one before 535, or the proprietary one if the module was not built for that.
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

    /// The pairs to judge: the best of each GPU, or the one that was asked for; with `--all` every one.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = &'a Pair> + '_ {
        let (only, all) = (self.only, self.all);
        self.machine.pairs.iter().filter(move |pair| match only {
            Some(only) => pair.gpu == only.gpu && pair.hca == only.hca,
            None => pair.is_best || all,
        })
    }

    /// The GPUs to judge.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &'a Gpu> + '_ {
        let only = self.only;
        let asked = move |gpu: &&Gpu| only.is_none_or(|pair| pair.gpu == gpu.at);
        self.machine.gpus.iter().filter(asked)
    }

    /// Whether there is anything between which RDMA could go: without, only the checks of that have something to say.
    pub(super) fn has_both(&self) -> bool {
        let mut gpus = self.machine.gpus.iter();
        gpus.any(|gpu| gpu.why_no_gpudirect().is_none()) && !self.machine.hcas.is_empty()
    }

    /// Whether there is a GPU to judge.
    pub(super) fn has_gpu(&self) -> bool {
        self.gpus().next().is_some()
    }

    /// Whether there is a GPU whose memory is reached through PCI.
    pub(super) fn has_pci_gpu(&self) -> bool {
        self.pci_gpus().next().is_some()
    }

    /// The GPUs whose memory is reached through PCI: those that have nothing else, and those with Data Direct.
    pub(super) fn pci_gpus(&self) -> impl Iterator<Item = &'a Gpu> + '_ {
        let is_direct = |gpu: &Gpu| {
            let mut pairs = self.machine.pairs.iter();
            pairs.any(|pair| pair.gpu == gpu.at && pair.is_data_direct())
        };
        self.gpus()
            .filter(move |gpu| !gpu.is_coherent || is_direct(gpu))
    }

    /// Whether there is an RDMA device to judge.
    pub(super) fn has_hca(&self) -> bool {
        self.hcas().next().is_some()
    }

    /// Whether there is one that does its DMA itself.
    pub(super) fn has_hardware_hca(&self) -> bool {
        self.hcas().any(|hca| !hca.is_software)
    }

    /// The RDMA devices to judge: those that are in one of [`Self::pairs`].
    pub(crate) fn hcas(&self) -> impl Iterator<Item = &'a Hca> + '_ {
        let near: HashSet<&str> = self.pairs().map(|pair| pair.hca.as_str()).collect();
        let hcas = self.machine.hcas.iter();
        hcas.filter(move |hca| near.contains(hca.name.as_str()))
    }

    /// The devices that lines of the log are heeded of.
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

    /// Whether what is wrong with this pair counts: it is the best of its GPU, or somebody asked for it.
    pub(crate) fn counts(&self, pair: &Pair) -> bool {
        let is_asked_for = |only: &Pair| only.gpu == pair.gpu && only.hca == pair.hca;
        pair.is_best || self.only.is_some_and(is_asked_for)
    }

    /// Whether all pairs of an RDMA device that count, and there is one, go by its Data Direct function.
    pub(super) fn is_by_data_direct(&self, hca: &Hca) -> bool {
        let mut pairs = self
            .pairs()
            .filter(|pair| pair.hca == hca.name && self.counts(pair))
            .peekable();
        pairs.peek().is_some() && pairs.all(Pair::is_data_direct)
    }

    /// A level, for this pair: at most a note where it does not count.
    pub(crate) fn level(&self, pair: &Pair, level: Level) -> Level {
        match self.counts(pair) {
            true => level,
            false => level.min(Level::Note),
        }
    }

    /// A level, for this RDMA device: at most a note where it is in no pair that counts.
    pub(crate) fn level_of(&self, hca: &Hca, level: Level) -> Level {
        let mut pairs = self.pairs().filter(|pair| pair.hca == hca.name);
        match pairs.any(|pair| pair.is_best || self.only.is_some()) {
            true => level,
            false => level.min(Level::Note),
        }
    }

    /// The GPU at an address.
    pub(crate) fn gpu(&self, at: Address) -> Option<&'a Gpu> {
        self.machine.gpu(at)
    }

    /// The RDMA device of a name.
    pub(crate) fn hca(&self, name: &str) -> Option<&'a Hca> {
        self.machine.hca(name)
    }

    /// What could not be seen, and why. `what` begins a sentence: `ACS of 0000:18:01.0`.
    pub(crate) fn unseen(subject: Subject, what: impl AsRef<str>, why: &Unseen) -> Finding {
        let found = format!("{}: {why}", what.as_ref());
        let mut finding = Finding::new(Level::NotVisible, subject, found);
        finding.needs_root = *why == Unseen::Denied;
        finding
    }
}

impl Subject {
    /// Of a GPU.
    pub(crate) fn gpu(gpu: &Gpu) -> Self {
        Self::Gpu {
            gpu: gpu.at.to_string(),
        }
    }

    /// Of an RDMA device.
    pub(crate) fn hca(hca: &Hca) -> Self {
        Self::Hca {
            hca: hca.name.clone(),
        }
    }

    /// Of a pair.
    pub(crate) fn pair(pair: &Pair) -> Self {
        Self::Pair {
            gpu: pair.gpu.to_string(),
            hca: pair.hca.clone(),
        }
    }
}

/// One thing to look for.
pub(crate) struct Check {
    /// Stable: `--skip` and the findings name it.
    pub(crate) name: &'static str,
    /// What it looks at, in some words, for `--list-checks`.
    pub(crate) about: &'static str,
    /// The other columns of the check's row in `docs/doctor.md`.
    #[cfg(test)]
    pub(super) row: [&'static str; 3],
    /// Whether this machine has anything that it looks at.
    pub(crate) applies: fn(&Scan<'_>) -> bool,
    pub(super) run: fn(&Scan<'_>) -> Vec<Finding>,
    /// Faults that the tests inject.
    #[cfg(test)]
    pub(super) faults: super::tests::Faults,
}

impl Check {
    /// Runs the check, and sets its name in the findings.
    pub(super) fn findings(&self, scan: &Scan<'_>) -> Vec<Finding> {
        let check = self.name;
        let findings = (self.run)(scan).into_iter();
        findings.map(|it| Finding { check, ..it }).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::host::Fact;
    use crate::{fixture, testing};

    /// A machine that counts how often it is asked what the modules' files say.
    struct Counting {
        machine: Recording,
        reads: Cell<usize>,
    }

    impl Host for Counting {
        fn bytes(&self, path: &str) -> Seen<Vec<u8>> {
            self.machine.bytes(path)
        }
        fn names(&self, path: &str) -> Seen<Vec<String>> {
            self.machine.names(path)
        }
        fn link(&self, path: &str) -> Seen<String> {
            self.machine.link(path)
        }
        fn resolved(&self, path: &str) -> Seen<String> {
            self.machine.resolved(path)
        }
        fn matching(&self, path: &str, word: &str) -> Seen<String> {
            self.machine.matching(path, word)
        }
        fn fact(&self, fact: Fact) -> Seen<String> {
            if fact == Fact::ModuleFiles {
                self.reads.set(self.reads.get() + 1);
            }
            self.machine.fact(fact)
        }
    }

    /// To unpack nvidia.ko takes half a second.
    #[test]
    fn the_modules_files_are_read_once_and_only_for_who_asks() {
        let (one, without) = (fixture::small(), fixture::no_hca());
        for (mut fixture, line, reads) in [
            (one.clone(), &["topo", "--verbose"][..], 0),
            (one.clone(), &["doctor", "--only", "link,nvidia-driver"], 0),
            (one.clone(), &["export", "--no-doctor"], 0),
            (one.clone(), &["doctor"], 1),
            (one, &["export"], 1),
            // Without an RDMA device no module is missed.
            (without.clone(), &["doctor"], 0),
            (without, &["export"], 0),
        ] {
            fixture.software();
            let host = Counting {
                machine: fixture.recording,
                reads: Cell::new(0),
            };
            let (text, _) = testing::says(&host, line);
            assert_eq!(host.reads.get(), reads, "{line:?}: {text}");
        }
    }
}
