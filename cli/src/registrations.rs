// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's registrations, and the processes, GPUs and RDMA devices to which the registrations
//! belong.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::debugfs::{Missing, Module, Time};
use crate::host::{Fact, Host, Seen};
use crate::machine::config::Config;
use crate::machine::pci::Address;
use crate::machine::{pci, Class, Machine};
use crate::process::{Process, Processes, State};
use crate::report::object;
use crate::{debugfs, render};

/// A GPU of a registration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct GpuId {
    /// Index, or `None` if the GPU is not visible.
    pub(crate) index: Option<usize>,
    pub(crate) address: String,
}

/// The device that does the DMA of a registration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct HcaId {
    pub(crate) address: String,
    /// RDMA devices of this PCI function.
    pub(crate) devices: Vec<String>,
}

impl GpuId {
    /// Returns the index, or else the address.
    pub(crate) fn name(&self) -> String {
        match self.index {
            Some(index) => index.to_string(),
            None => self.address.clone(),
        }
    }
}

impl HcaId {
    /// Returns the RDMA devices, or else the address.
    pub(crate) fn name(&self) -> String {
        match self.devices.is_empty() {
            true => self.address.clone(),
            false => self.devices.join(","),
        }
    }
}

/// A registration, with information about its process and its devices.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Registration {
    /// Line of the module's list.
    pub(crate) line: debugfs::Registration,
    /// Bytes that the process has freed and the registration still holds. `None` if unknown, or if
    /// the registration holds nothing.
    pub(crate) freed_bytes: Option<u64>,
    pub(crate) gpus: Vec<GpuId>,
    pub(crate) hca: Option<HcaId>,
    /// Class of the path between the GPU and the RDMA device. For several GPUs, the class of the
    /// longest path.
    pub(crate) class: Option<Class>,
    pub(crate) process: Process,
    pub(crate) age_seconds: Option<f64>,
}

impl Serialize for Registration {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let line = &self.line;
        let all = object! {
            id: line.id,
            state: &line.state,
            mode: &line.mode,
            // Hexadecimal text, because JSON readers may round 64-bit numbers.
            addr: line.addr.map(|addr| format!("{addr:#x}")),
            len: line.len,
            page: line.page,
            freed_bytes: self.freed_bytes,
            chunks: line.chunks,
            entries: line.entries,
            gpus: &self.gpus,
            hca: &self.hca,
            class: self.class,
            pid: line.tgid,
            thread: line.pid,
            comm: &line.comm,
            #[serde(flatten)]
            process: &self.process,
            since_seconds: line.since.map(Time::seconds),
            age_seconds: self.age_seconds,
            // Keys of a newer module, unknown to this version.
            other: &line.other,
        };
        all.serialize(serializer)
    }
}

impl Registration {
    /// Identity of the process. If a process ID was reused, the old and the new process have
    /// different identities.
    pub(crate) fn owner(&self) -> (Option<u32>, bool) {
        let is_reused = self.process.state == State::Reused;
        (self.line.tgid, is_reused)
    }

    pub(crate) fn is_in(&self, state: &str) -> bool {
        self.line.state.as_deref() == Some(state)
    }
}

/// Registered memory of one GPU, for one process or for all processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Share {
    /// The GPU, or `None` if the module does not know it.
    pub(crate) gpu: Option<GpuId>,
    pub(crate) registrations: u64,
    /// Sum of the lengths.
    pub(crate) bytes: u64,
    /// Sum of the lengths, in which memory that one process registered several times counts once.
    /// nvidia.ko maps such memory into BAR1 once.
    pub(crate) distinct_bytes: u64,
}

/// Registrations of one process.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Holder {
    pub(crate) pid: Option<u32>,
    pub(crate) comm: Option<String>,
    #[serde(flatten)]
    pub(crate) process: Process,
    pub(crate) registrations: u64,
    pub(crate) bytes: u64,
    pub(crate) distinct_bytes: u64,
    /// Number of registrations in each state.
    pub(crate) states: BTreeMap<String, u64>,
    pub(crate) gpus: Vec<Share>,
    /// Age of the oldest registration.
    pub(crate) age_seconds: Option<f64>,
}

/// All registrations.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) module: Module,
    pub(crate) now: Option<Time>,
    pub(crate) machine: Seen<Machine>,
    pub(crate) registrations: Vec<Registration>,
    pub(crate) stranded: Vec<Stranded>,
    pub(crate) unreadable: u64,
}

/// Orphaned registrations on a lost GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stranded {
    pub(crate) gpu: String,
    /// State of the GPU, as text that follows "which".
    how: &'static str,
    pub(crate) registrations: u64,
}

impl Stranded {
    /// Finds lost GPUs among the GPUs of orphaned registrations. A GPU is lost if PCI does not list
    /// the GPU, or if the GPU does not answer. Returns nothing if PCI is not visible.
    pub(crate) fn among(host: &dyn Host, all: &[debugfs::Registration]) -> Vec<Self> {
        let mut count: BTreeMap<&str, u64> = BTreeMap::new();
        for one in all
            .iter()
            .filter(|one| one.state.as_deref() == Some("orphaned"))
        {
            for gpu in &one.gpus {
                let count = count.entry(gpu).or_default();
                *count = count.saturating_add(1);
            }
        }
        if count.is_empty() {
            return Vec::new();
        }
        let Ok(devices) = host.names(pci::DEVICES) else {
            return Vec::new();
        };
        let lost = |gpu: &str| {
            if !devices.iter().any(|device| device == gpu) {
                return Some("is gone from PCI");
            }
            let config = host.bytes(&format!("{}/{gpu}/config", pci::DEVICES));
            let silent = config.is_ok_and(|bytes| Config(bytes).is_silent());
            silent.then_some("has fallen off the bus")
        };
        count
            .into_iter()
            .filter_map(|(gpu, registrations)| {
                Some(Self {
                    gpu: gpu.to_owned(),
                    how: lost(gpu)?,
                    registrations,
                })
            })
            .collect()
    }

    pub(crate) fn found(&self) -> String {
        let (registrations, come) = match self.registrations {
            1 => ("1 registration waits".to_owned(), "its callback"),
            more => (format!("{more} registrations wait"), "their callbacks"),
        };
        format!(
            "{registrations} for {come} from GPU {}, which {}: nvidia.ko may never call",
            self.gpu, self.how
        )
    }

    /// Consequence of a lost GPU. There is no fix.
    pub(crate) const WHY: &'static str =
        "a callback would run in nvidia_peermem, which uses functions of nvidia.ko; without the callback, neither \
        module can be unloaded until the machine restarts";
}

/// Selects registrations that hold memory of their process. Revoked registrations hold no memory,
/// and orphaned registrations no longer belong to the process.
fn holding(all: &[debugfs::Registration]) -> impl Iterator<Item = &debugfs::Registration> {
    let holds = |state: &str| matches!(state, "pinned" | "mapped");
    all.iter()
        .filter(move |one| one.state.as_deref().is_some_and(holds))
}

/// Memory that processes have freed but registrations still hold. The map has the number of bytes
/// for each registration ID. A registration for which the number is unknown is missing.
#[derive(Debug, Default)]
pub(crate) struct Freed(BTreeMap<u64, u64>);

impl Freed {
    /// Computes the freed memory of `all`. The caller must have read `all` before this call. Memory
    /// counts as freed if its process no longer maps the addresses.
    pub(crate) fn among(
        host: &dyn Host,
        module: &Module,
        all: &[debugfs::Registration],
        processes: &mut Processes<'_>,
    ) -> Self {
        let lacks = |one: &debugfs::Registration| {
            let bytes = processes.lacks(one.tgid?, one.since, one.addr?, one.len?)?;
            Some((one.id, bytes))
        };
        let mut freed = Self(holding(all).filter_map(lacks).collect());
        if freed.bytes().any(|bytes| bytes > 0) {
            let now = module.registrations(host).map(|read| read.records);
            freed.keep_held(&now.unwrap_or_default());
        }
        freed
    }

    /// Removes registrations that no longer exist in `now`. Software that deregisters memory
    /// shortly after it frees the memory therefore causes no finding.
    fn keep_held(&mut self, now: &[debugfs::Registration]) {
        let held: BTreeSet<u64> = holding(now).map(|one| one.id).collect();
        self.0.retain(|id, bytes| *bytes == 0 || held.contains(id));
    }

    fn of(&self, id: u64) -> Option<u64> {
        self.0.get(&id).copied()
    }

    /// Returns text about the registrations with freed memory, or `None` if there are none. `bytes`
    /// are the freed bytes of each registration.
    pub(crate) fn found(bytes: impl Iterator<Item = u64>) -> Option<String> {
        let freed: Vec<u64> = bytes.filter(|bytes| *bytes > 0).collect();
        let who = match freed.len() {
            0 => return None,
            1 => "1 registration is".to_owned(),
            more => format!("{more} registrations are"),
        };
        let bytes = render::bytes(sum(freed.into_iter()));
        Some(format!(
            "{who} of memory that the process has freed, {bytes} in all"
        ))
    }

    pub(crate) fn bytes(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.values().copied()
    }

    /// Consequence of memory that is freed but still registered.
    pub(crate) const WHY: &'static str =
        "GPU memory stays allocated, and in BAR1, while a persistent registration holds it; a cache of \
        registrations, such as UCX's, may deregister it much later";
    pub(crate) const FIX: &'static str =
        "set UCX_RCACHE_ENABLE=n in the job's environment, if each transfer may register again; or load the module \
        with persistent_api_support=0: if the NIC allows it, freed memory is then taken from its registrations";
}

/// Reads the monotonic clock.
pub(crate) fn now(host: &dyn Host) -> Option<Time> {
    let text = host.fact(Fact::Monotonic).ok()?;
    Time::parse(text.trim())
}

impl Listing {
    pub(crate) fn scan(host: &dyn Host) -> Result<Self, Missing> {
        let module = Module::scan(host)?;
        let read = module.registrations(host)?;
        // The clock is read after the registrations, so that no registration has a negative age.
        let now = now(host);
        let machine = Machine::scan(host);
        let stranded = Stranded::among(host, &read.records);
        let names = PciNames(machine.as_ref().ok());
        let mut processes = Processes::new(host, now);
        let freed = Freed::among(host, &module, &read.records, &mut processes);
        let registrations = read
            .records
            .into_iter()
            .map(|one| registration(one, now, &names, &mut processes, &freed))
            .collect();
        Ok(Self {
            module,
            now,
            machine,
            registrations,
            stranded,
            unreadable: read.unreadable,
        })
    }

    /// Returns the registered memory of each GPU, sorted by GPU.
    pub(crate) fn shares(&self) -> Vec<Share> {
        shares(self.registrations.iter())
    }

    /// Returns the processes with their registrations, largest first.
    pub(crate) fn holders(&self) -> Vec<Holder> {
        let mut by_process: BTreeMap<_, Vec<&Registration>> = BTreeMap::new();
        for one in &self.registrations {
            by_process.entry(one.owner()).or_default().push(one);
        }
        let mut holders: Vec<Holder> = by_process
            .values()
            .filter_map(|all| {
                let last = all.last()?;
                let gpus = shares(all.iter().copied());
                let mut states = BTreeMap::new();
                for one in all {
                    let state = one.line.state.as_deref().unwrap_or("unknown").to_owned();
                    let count: &mut u64 = states.entry(state).or_default();
                    *count = count.saturating_add(1);
                }
                Some(Holder {
                    pid: last.line.tgid,
                    comm: last.line.comm.clone(),
                    process: last.process.clone(),
                    registrations: count(all.len()),
                    bytes: sum(all.iter().filter_map(|one| one.line.len)),
                    distinct_bytes: distinct(all.iter().copied()),
                    states,
                    gpus,
                    age_seconds: all
                        .iter()
                        .filter_map(|one| one.age_seconds)
                        .reduce(f64::max),
                })
            })
            .collect();
        holders.sort_by(|one, other| (other.bytes, one.pid).cmp(&(one.bytes, other.pid)));
        holders
    }
}

/// Names of GPUs and RDMA devices for the PCI addresses in a registration.
struct PciNames<'a>(Option<&'a Machine>);

impl PciNames<'_> {
    fn gpu(&self, address: &str) -> GpuId {
        let gpu = address.parse().ok().and_then(|at| self.0?.gpu(at));
        GpuId {
            index: gpu.map(|gpu| gpu.index),
            address: address.to_owned(),
        }
    }

    fn hca(&self, address: &str) -> HcaId {
        let at: Option<Address> = address.parse().ok();
        let all = self.0.into_iter().flat_map(|machine| &machine.hcas);
        let its = all.filter(|hca| at.is_some_and(|at| hca.functions().contains(&at)));
        HcaId {
            address: address.to_owned(),
            devices: its.map(|hca| hca.name.clone()).collect(),
        }
    }

    fn class(&self, gpus: &[GpuId], hca: &HcaId) -> Option<Class> {
        let device = hca.devices.first()?;
        // The module maps GPU memory for the RDMA device's own function.
        let class = |gpu: &GpuId| {
            let pair = self.0?.pair_of(gpu.address.parse().ok()?, device)?;
            pair.by_own_function().class
        };
        // If one class is unknown, the result is unknown.
        let classes = gpus.iter().map(class).collect::<Option<Vec<Class>>>()?;
        classes.into_iter().max()
    }
}

fn registration(
    line: debugfs::Registration,
    now: Option<Time>,
    names: &PciNames<'_>,
    processes: &mut Processes<'_>,
    freed: &Freed,
) -> Registration {
    let gpus: Vec<GpuId> = line.gpus.iter().map(|gpu| names.gpu(gpu)).collect();
    let hca = line.hca.as_deref().map(|hca| names.hca(hca));
    let age = |(since, now): (Time, Time)| debugfs::seconds(since.until(now));
    Registration {
        freed_bytes: freed.of(line.id),
        class: hca.as_ref().and_then(|hca| names.class(&gpus, hca)),
        gpus,
        hca,
        process: processes.of(line.tgid, line.since),
        age_seconds: line.since.zip(now).map(age),
        line,
    }
}

/// Converts a length to `u64`.
pub(crate) fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

/// Returns the registered memory by GPU. A registration over several GPUs counts fully for each,
/// because the module does not report how much memory lies on each GPU.
fn shares<'a>(all: impl Iterator<Item = &'a Registration>) -> Vec<Share> {
    let mut by_gpu: BTreeMap<Option<&GpuId>, Vec<&Registration>> = BTreeMap::new();
    for one in all {
        if one.gpus.is_empty() {
            by_gpu.entry(None).or_default().push(one);
        }
        for gpu in &one.gpus {
            by_gpu.entry(Some(gpu)).or_default().push(one);
        }
    }
    by_gpu
        .into_iter()
        .map(|(gpu, all)| Share {
            gpu: gpu.cloned(),
            registrations: count(all.len()),
            bytes: sum(all.iter().filter_map(|one| one.line.len)),
            distinct_bytes: distinct(all.into_iter()),
        })
        .collect()
}

/// Returns the number of bytes, where memory that one process registered several times counts once.
fn distinct<'a>(all: impl Iterator<Item = &'a Registration>) -> u64 {
    let mut ranges: Vec<_> = all
        .filter_map(|one| {
            let (addr, len) = (one.line.addr?, one.line.len?);
            // A revoked registration uses no BAR1.
            (!one.is_in("revoked")).then(|| (one.owner(), addr, addr.saturating_add(len)))
        })
        .collect();
    ranges.sort_unstable();
    let mut bytes = 0_u64;
    let mut last = None;
    for (key, start, end) in ranges {
        let from = match last {
            Some((known, seen)) if known == key => start.max(seen),
            _ => start,
        };
        bytes = bytes.saturating_add(end.saturating_sub(from));
        last = Some((key, end.max(from)));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    fn one(pid: u32, addr: u64, len: u64) -> Registration {
        let read = debugfs::Registration {
            id: 1,
            state: Some("mapped".to_owned()),
            addr: Some(addr),
            len: Some(len),
            tgid: Some(pid),
            ..Default::default()
        };
        let host = crate::host::recording::Recording::default();
        let mut processes = Processes::new(&host, None);
        registration(
            read,
            None,
            &PciNames(None),
            &mut processes,
            &Freed::default(),
        )
    }

    /// The class of a registration is that of the path through the RDMA device's own function, even
    /// if dma-bufs use the Data Direct function.
    #[test]
    fn the_path_of_a_registration_uses_the_own_function() {
        let machine = Machine::scan(&crate::fixture::data_direct().recording).unwrap();
        let names = PciNames(Some(&machine));
        let gpu = names.gpu("0009:06:00.0");
        let hca = names.hca("0000:03:00.0");
        assert_eq!(hca.devices, ["mlx5_0"]);
        assert_eq!(names.class(&[gpu], &hca), Some(Class::Node));
    }

    #[test]
    fn memory_that_is_deregistered_during_the_scan_is_not_reported() {
        let one = |id, state: &str| debugfs::Registration {
            id,
            state: Some(state.to_owned()),
            ..Default::default()
        };
        let mut freed = Freed([(1, 64), (2, 64), (3, 64), (4, 0)].into());
        freed.keep_held(&[one(1, "mapped"), one(2, "revoked")]);
        assert_eq!(freed.0, [(1, 64), (4, 0)].into());
    }

    proptest! {
        /// Compares the result with that of a count of single bytes.
        #[test]
        fn memory_that_is_registered_twice_counts_once(
            ranges in prop::collection::vec((0..3_u32, 0..64_u64, 0..32_u64), 0..12)
        ) {
            let all: Vec<Registration> = ranges.iter().map(|&(pid, addr, len)| one(pid, addr, len)).collect();
            let bytes: BTreeSet<(u32, u64)> = ranges
                .iter()
                .flat_map(|&(pid, addr, len)| (addr..addr + len).map(move |byte| (pid, byte)))
                .collect();
            prop_assert_eq!(distinct(all.iter()), count(bytes.len()));
        }
    }
}
