// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Owners of memory regions, and the regions that are GPU memory, as far as can be determined.
//!
//! Every classification is certain: a region counts as GPU memory or as other memory only if
//! nothing else is possible. The kernel does not report the owner of a dma-buf. If only one process
//! uses the attached device, that process is the owner.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::holder::{holders, Devices, Holder, Owner, Part};
use super::sources::{Hidden, PeerMemory};
use crate::debugfs::{Registration, Time};
use crate::host::nldev::Tracked;
use crate::host::recording::Recorded as _;
use crate::host::{Host, Seen, Unseen};
use crate::machine::pci::Address;
use crate::machine::{pci, Machine};
use crate::process::{Process, Processes, State, GPU_PAGE};
use crate::render::counted;
use crate::{dma_buf, registrations, render};

/// Other modules that give GPU memory to RDMA drivers.
const OTHER_MODULES: [&str; 2] = ["nv_peer_mem", "efa_nv_peermem"];

/// Answer to "does this process use GPUDirect RDMA now?".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Yes,
    No,
    Unknown,
}

/// A process with memory regions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct User {
    /// Process ID, or `None` for the kernel or an unknown owner.
    pub(crate) pid: Option<u32>,
    /// Name of the part of the kernel that owns the regions.
    pub(crate) kernel: Option<String>,
    #[serde(flatten)]
    pub(crate) process: Process,
    pub(crate) devices: Vec<String>,
    pub(crate) regions: u64,
    pub(crate) bytes: u64,
    /// GPU memory registered by a peer-memory module.
    pub(crate) peer_memory: Part,
    /// GPU memory registered by dma-buf.
    pub(crate) dma_buf: Part,
    /// Other memory.
    pub(crate) other: Part,
    /// Memory of unknown kind.
    pub(crate) unknown: Part,
    /// Number of GPU memory registrations without a region: by DEVX, or made during the scan.
    pub(crate) without_region: u64,
    /// Verdict, or `None` for the kernel.
    pub(crate) gpudirect: Option<Verdict>,
}

/// Result of a scan.
#[derive(Debug)]
pub(crate) struct Usage {
    pub(crate) now: Option<Time>,
    pub(crate) users: Vec<User>,
    /// Reasons why something is unknown.
    pub(crate) reasons: Vec<String>,
    pub(crate) notes: Vec<String>,
    /// `true` if all regions are visible.
    pub(crate) is_whole: bool,
    /// `true` if some regions are not visible and may be GPU memory of any process.
    pub(crate) is_open: bool,
}

/// State of a scan: the regions, and the classifications so far.
struct Search<'a> {
    host: &'a dyn Host,
    machine: &'a Seen<Machine>,
    hidden: Hidden,
    holders: BTreeMap<Owner, Holder>,
    /// Doubts: reasons why a region may be GPU memory although nothing proves it, each with the
    /// devices whose regions it concerns.
    doubts: Vec<(Devices, String)>,
    notes: Vec<String>,
}

impl Usage {
    /// Scans the host. Returns an error if the kernel's list cannot be read.
    pub(crate) fn scan(host: &dyn Host) -> Seen<Self> {
        // The kernel's list is read first. A region that is registered during the scan then appears
        // at least in the module's list.
        let tracked = Tracked::of(host)?;
        let now = registrations::now(host);
        let processes = Processes::new(host, now);
        let is_elsewhere = processes.is_elsewhere();
        let mut processes = processes.by_own_numbers();
        let machine = Machine::scan(host);
        let mut search = Search {
            host,
            machine: &machine,
            hidden: Hidden::scan(host, &tracked),
            holders: holders(&tracked.devices, &processes),
            doubts: Vec::new(),
            notes: Vec::new(),
        };
        let peer_memory = PeerMemory::scan(host, is_elsewhere);
        if let PeerMemory::Listed(registrations) = &peer_memory {
            search.listed(registrations, &mut processes);
        }
        search.dma_bufs();
        if let PeerMemory::Counted(count, why) = peer_memory {
            search.only_counted(count, &why);
        }
        search.other_ways();
        let is_whole = search.hidden.notes.is_empty();
        let is_open = !is_whole && !search.doubts.is_empty();
        let reasons = search.rest(is_open);
        if is_elsewhere {
            let note = "this program is not in the first PID namespace: PIDs are those of this namespace, and regions \
                        of processes outside this namespace have none";
            search.notes.push(note.to_owned());
        }
        search.notes.append(&mut search.hidden.notes);
        if let Some(nobody) = search
            .holders
            .get(&Owner::Unknown)
            .filter(|nobody| nobody.all.regions > 0)
        {
            search.notes.push(format!(
                "the kernel does not name the process of {}: the thread that registered has ended, or is in another \
                 PID namespace",
                counted(nobody.all.regions, "region")
            ));
        }
        let all = search.holders.into_iter();
        let mut users: Vec<User> = all
            .filter(|(_, holder)| holder.all.regions > 0 || holder.without_region > 0)
            .map(|(owner, holder)| user(owner, holder, is_open, &mut processes))
            .collect();
        users.sort_by(|one, other| (other.bytes, one.pid).cmp(&(one.bytes, other.pid)));
        Ok(Self {
            now,
            users,
            reasons,
            notes: search.notes,
            is_whole,
            is_open,
        })
    }

    /// Returns the verdict on a process.
    pub(crate) fn verdict(&self, pid: u32) -> Verdict {
        let its = self.users.iter().find(|user| user.pid == Some(pid));
        // Unowned regions may belong to a process without regions.
        let is_nobodys = |user: &&User| user.pid.is_none() && user.kernel.is_none();
        let nobody = self.users.iter().find(is_nobodys);
        let without = match (self.is_open, nobody.and_then(|user| user.gpudirect)) {
            (false, None | Some(Verdict::No)) => Verdict::No,
            _ => Verdict::Unknown,
        };
        its.and_then(|user| user.gpudirect).unwrap_or(without)
    }
}

impl Search<'_> {
    /// Adds a doubt that concerns the regions of all devices.
    fn doubt(&mut self, text: String) {
        self.doubts.push((None, text));
    }

    /// Returns the RDMA devices that do their DMA through this PCI function, or an empty set if no
    /// such device is visible.
    fn devices_of(&self, function: &str) -> BTreeSet<String> {
        let at: Option<Address> = function.parse().ok();
        let hcas = self.machine.as_ref().map(|machine| machine.hcas.as_slice());
        let its = hcas.unwrap_or_default().iter();
        its.filter(|hca| at.is_some_and(|at| hca.functions().contains(&at)))
            .map(|hca| hca.name.clone())
            .collect()
    }

    /// Returns the owners that use one of these devices.
    fn users_of(&self, devices: &Devices) -> Vec<&Owner> {
        let uses = |holder: &Holder| match devices {
            Some(devices) => holder.uses.intersection(devices).next().is_some(),
            None => !holder.uses.is_empty(),
        };
        let all = self.holders.iter();
        all.filter(|(owner, holder)| !matches!(owner, Owner::Kernel(_)) && uses(holder))
            .map(|(owner, _)| owner)
            .collect()
    }

    /// Returns the only process that uses these devices, or `None` if several processes or hidden
    /// processes may use the devices.
    fn only_user_of(&self, devices: &Devices) -> Option<Owner> {
        match self.users_of(devices).as_slice() {
            [Owner::Process(pid)] if !self.hidden.may_use(devices) => Some(Owner::Process(*pid)),
            _ => None,
        }
    }

    /// Classifies the regions that belong to registrations in peermem-rs' list.
    fn listed(&mut self, registrations: &[Registration], processes: &mut Processes<'_>) {
        for one in registrations {
            let (is_mapped, pid, len) = match (one.state.as_deref(), one.tgid, one.len) {
                (Some("mapped"), Some(pid), Some(len)) => (true, pid, len),
                (Some("revoked"), Some(pid), Some(len)) => (false, pid, len),
                // There is no region, because the registration is not mapped yet or is already
                // deregistered.
                (Some("pinned" | "orphaned"), ..) => continue,
                _ => {
                    self.doubt(format!(
                        "registration {} of the module's list is not understood",
                        one.id
                    ));
                    continue;
                }
            };
            let function = one.hca.as_deref().unwrap_or_default();
            let devices = Some(self.devices_of(function)).filter(|devices| !devices.is_empty());
            // The module pins whole pages. Not every line contains the page size.
            let pages = one.page.unwrap_or(GPU_PAGE).saturating_mul(2);
            let lengths = len.saturating_sub(pages)..=len;
            let owner = match processes.of(Some(pid), one.since).state {
                State::Reused => Owner::Unknown,
                _ => Owner::Process(pid),
            };
            let mut holder = self.holders.remove(&owner).unwrap_or_default();
            let region = holder.take(&devices, lengths.clone()).or_else(|| {
                // The kernel does not report the owner of the region, but the module does.
                let nobody = self.holders.get_mut(&Owner::Unknown)?;
                let (device, bytes) = nobody.give(&devices, lengths)?;
                holder.add(&device, bytes, 1);
                holder.take(&devices, bytes..=bytes)
            });
            match region {
                region if is_mapped => holder.is_gpu(|holder| &mut holder.peer_memory, region),
                // The memory was revoked, so the region gives no access to GPU memory.
                Some(bytes) => holder.other.add(1, bytes),
                None => {}
            }
            self.holders.insert(owner, holder);
        }
    }

    /// Classifies regions by the devices that are attached to GPU dma-bufs.
    fn dma_bufs(&mut self) {
        let buffers = match dma_buf::scan(self.host) {
            Ok(buffers) => buffers,
            Err(why) => {
                let file = match &why {
                    Unseen::Failed(_) => String::new(),
                    _ => format!("{} is ", dma_buf::FILE),
                };
                return self.doubt(format!(
                    "GPU memory by dma-buf cannot be distinguished from other memory: {file}{why}"
                ));
            }
        };
        let mut shared: BTreeMap<Devices, Part> = BTreeMap::new();
        let mut others: BTreeMap<(String, String), u64> = BTreeMap::new();
        for buffer in &buffers {
            for function in &buffer.attached {
                let of_function = self.devices_of(function);
                if !buffer.is_gpu() {
                    for device in of_function {
                        let count = others.entry((buffer.exporter.clone(), device)).or_default();
                        *count = count.saturating_add(1);
                    }
                    continue;
                }
                let devices = match of_function.is_empty() {
                    true if self.is_another_function(function) => continue,
                    true => None,
                    false => Some(of_function),
                };
                let holder = self
                    .only_user_of(&devices)
                    .and_then(|user| self.holders.get_mut(&user));
                match holder {
                    Some(holder) => {
                        let region = holder.take(&devices, 0..=buffer.bytes);
                        holder.is_gpu(|holder| &mut holder.dma_buf, region);
                    }
                    None => shared.entry(devices).or_default().add(1, buffer.bytes),
                }
            }
        }
        for (devices, part) in shared {
            let names = devices.as_ref().map_or_else(
                || "a function of a NIC that is not an RDMA device (Data Direct)".to_owned(),
                |devices| devices.iter().cloned().collect::<Vec<_>>().join(", "),
            );
            let (are, whose) = match part.regions {
                1 => ("is", "whose it is"),
                _ => ("are", "whose they are"),
            };
            let text = format!(
                "{} of GPU memory ({}) {are} attached to {names}, which {}: the kernel does not say {whose}",
                counted(part.regions, "dma-buf"),
                part.bytes.map(render::bytes).unwrap_or_default(),
                self.who_uses(&devices),
            );
            self.doubts.push((devices, text));
        }
        for ((exporter, device), count) in others {
            self.notes.push(format!(
                "{} of {exporter} attached to {device}: not memory of an NVIDIA GPU, and counted under OTHER",
                counted(count, "dma-buf")
            ));
        }
    }

    /// Returns `true` if a device attached to a dma-buf is unrelated to RDMA, such as another GPU
    /// or a disk.
    fn is_another_function(&self, name: &str) -> bool {
        if self.machine.is_err() {
            return false;
        }
        match self.host.number(&format!("{}/{name}/vendor", pci::DEVICES)) {
            // A Mellanox function that is not an RDMA device may be a Data Direct function, which
            // does the DMA of an RDMA device.
            Ok(vendor) => vendor != u64::from(pci::MELLANOX),
            Err(Unseen::Absent) => true,
            Err(_) => false,
        }
    }

    /// Returns text about the users of these devices, including the verb.
    fn who_uses(&self, devices: &Devices) -> String {
        let users = self.users_of(devices);
        let numbers = users.iter().filter_map(|user| match user {
            Owner::Process(pid) => Some(pid.to_string()),
            _ => None,
        });
        let mut names: Vec<String> = numbers.take(8).collect();
        let more = users.len().saturating_sub(names.len());
        if more > 0 {
            names.push(format!("{more} more"));
        }
        match names.as_slice() {
            [one] => format!("process {one} uses"),
            names => format!("processes {} use", names.join(", ")),
        }
    }

    /// Classifies the registrations of a module that does not report their owners.
    fn only_counted(&mut self, count: Option<u64>, why: &str) {
        let user = self
            .only_user_of(&None)
            .and_then(|user| self.holders.get_mut(&user));
        let text = match (count, user) {
            (Some(count), Some(holder)) => {
                let left = holder.left();
                let its = count.min(left.regions);
                holder.without_region = holder
                    .without_region
                    .saturating_add(count.saturating_sub(its));
                holder.peer_memory = Part {
                    regions: its,
                    // The size is known only if all remaining regions are GPU memory.
                    bytes: left.bytes.filter(|_| its == left.regions),
                };
                let rest = left.regions.saturating_sub(its);
                holder.left.clear();
                if rest > 0 {
                    holder.other = Part {
                        regions: holder.other.regions.saturating_add(rest),
                        bytes: None,
                    };
                }
                return;
            }
            (Some(count), None) => format!(
                "nvidia_peermem has {} of GPU memory, but their processes are not known: {why}",
                counted(count, "registration")
            ),
            (None, _) => format!("the registrations of nvidia_peermem are not visible: {why}"),
        };
        self.doubt(text);
    }

    /// Adds a doubt for each loaded module that registers GPU memory without reporting it. Also
    /// adds a doubt if there are coherent GPUs, whose memory is registered like processor memory.
    fn other_ways(&mut self) {
        for module in OTHER_MODULES {
            if self.host.has(&format!("/sys/module/{module}")) == Ok(true) {
                self.doubt(format!(
                    "{module} is loaded, and does not report its registrations"
                ));
            }
        }
        let gpus = self.machine.as_ref().map(|machine| machine.gpus.as_slice());
        if gpus.unwrap_or_default().iter().any(|gpu| gpu.is_coherent) {
            let text = "the memory of a GPU is part of the processor's here (Grace), and is registered like \
                processor memory";
            self.doubt(text.to_owned());
        }
    }

    /// Classifies each remaining region as other memory, or as unknown memory if there is a doubt
    /// about the region's device. Returns the texts of the doubts that concern a region, or of all
    /// doubts if `is_open` is set.
    fn rest(&mut self, is_open: bool) -> Vec<String> {
        let mut reasons = BTreeSet::new();
        for (owner, holder) in &mut self.holders {
            if matches!(owner, Owner::Kernel(_)) {
                continue;
            }
            for (device, regions) in std::mem::take(&mut holder.left) {
                let doubts = self.doubts.iter().enumerate().filter(|(_, (devices, _))| {
                    let devices = devices.as_ref();
                    devices.is_none_or(|devices| devices.contains(&device))
                });
                let doubts: Vec<usize> = doubts.map(|(index, _)| index).collect();
                let part = match doubts.is_empty() {
                    true => &mut holder.other,
                    false => &mut holder.unknown,
                };
                for (bytes, count) in &regions {
                    part.add(*count, bytes.saturating_mul(*count));
                }
                if !regions.is_empty() {
                    reasons.extend(doubts);
                }
            }
        }
        let all = self.doubts.iter().enumerate();
        all.filter(|(index, _)| is_open || reasons.contains(index))
            .map(|(_, (_, text))| text.clone())
            .collect()
    }
}

fn user(owner: Owner, holder: Holder, is_open: bool, processes: &mut Processes<'_>) -> User {
    let (pid, kernel) = match owner {
        Owner::Process(pid) => (Some(pid), None),
        Owner::Kernel(name) => (None, Some(name)),
        Owner::Unknown => (None, None),
    };
    let gpu = holder
        .peer_memory
        .regions
        .saturating_add(holder.dma_buf.regions)
        .saturating_add(holder.without_region);
    let verdict = match (gpu, holder.unknown.regions) {
        (0, 0) if !is_open => Verdict::No,
        (0, _) => Verdict::Unknown,
        _ => Verdict::Yes,
    };
    User {
        pid,
        gpudirect: kernel.is_none().then_some(verdict),
        kernel,
        process: processes.of(pid, None),
        devices: holder.devices.into_iter().collect(),
        regions: holder.all.regions,
        bytes: holder.all.bytes.unwrap_or(u64::MAX),
        peer_memory: holder.peer_memory,
        dma_buf: holder.dma_buf,
        other: holder.other,
        unknown: holder.unknown,
        without_region: holder.without_region,
    }
}
