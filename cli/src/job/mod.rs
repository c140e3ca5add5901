// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The command `job`: settings, libraries and NICs that decide about GPUDirect RDMA in the
//! processes of one job.
//!
//! [`members`] finds the processes. [`environment`] and [`libraries`] read one process,
//! [`settings`] and [`nics`] interpret the variables of the process, and [`checks`] makes findings.
//! A value that could not be read is reported as not visible, never as correct.

mod checks;
mod environment;
mod libraries;
mod members;
mod nics;
mod print;
mod settings;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use anyhow::{bail, Context as _};
use serde::Serialize;

use crate::debugfs::Missing;
use crate::doctor::Scan;
use crate::finding::{Finding, Level, Status, Subject};
use crate::host::{Host, Seen, Unseen};
use crate::machine::pci::Address;
use crate::machine::Machine;
use crate::process::{Processes, State};
use crate::regions::{Usage, Verdict};
use crate::registrations::{GpuId, Listing, Share};
use crate::render::by_key;
use crate::report::Out;
use crate::software::nccl::Nccl;
use crate::software::MODULE;
use crate::{args, doctor, registrations};
use environment::{Environment, Source};
use libraries::{Library, Reader};
use members::Identity;
use nics::{Choice, Near};
use settings::Judged;

const SCHEMA: &str = "peermemctl.job";
const VERSION: u32 = 1;

/// Facts that are the same for all processes of the job.
struct Shared<'a> {
    scan: &'a Scan<'a>,
    listing: Result<Listing, Missing>,
    usage: Seen<Usage>,
    /// `true` if nvidia_peermem is loaded.
    has_module: Seen<bool>,
    /// `true` if GPU memory can be registered by dma-buf. `None`: unknown.
    has_dma_buf: Option<bool>,
    /// Findings of `doctor`'s checks of the software that a job uses.
    of_doctor: Vec<Finding>,
}

/// Checks of `doctor` whose findings concern a job.
const OF_DOCTOR: [&str; 3] = ["consumers", "dma-buf", "ibgda"];

impl<'a> Shared<'a> {
    fn scan(scan: &'a Scan<'a>) -> anyhow::Result<Self> {
        let host = scan.host;
        let selection = doctor::Selection {
            only: &OF_DOCTOR.map(str::to_owned),
            skip: &[],
        };
        let of_doctor = doctor::examine(scan, selection)?;
        let has_module = host.has(MODULE);
        let level = of_doctor
            .iter()
            .find(|it| it.check == "dma-buf")
            .map(|it| it.level);
        let applies = doctor::checks_of(scan).any(|check| check.name == "dma-buf");
        Ok(Self {
            scan,
            listing: Listing::scan(host),
            usage: Usage::scan(host),
            has_dma_buf: match level {
                Some(Level::Ok) => Some(true),
                Some(Level::NotVisible) => None,
                Some(_) => Some(false),
                // If dma-buf does not work and no module is loaded, `doctor`'s dma-buf check
                // reports nothing, because the module check reports both.
                None => (applies && has_module == Ok(false)).then_some(false),
            },
            has_module,
            of_doctor,
        })
    }
}

/// Memory that a process has registered.
#[derive(Debug, Clone, Default, Serialize)]
struct Registered {
    /// `Yes` if GPU memory is registered now.
    gpudirect: Option<Verdict>,
    /// Number of registrations in the list of peermem-rs. `None`: unknown.
    registrations: Option<u64>,
    bytes: Option<u64>,
    gpus: Vec<Share>,
    /// Number of memory regions of any kind in the kernel's list. `None`: unknown.
    regions: Option<u64>,
    /// Number of memory regions of GPU memory that were registered by dma-buf.
    dma_buf_regions: Option<u64>,
    /// Number of memory regions that may be GPU memory.
    unknown_regions: Option<u64>,
    /// Reasons why one of the other fields is unknown.
    not_told: Vec<String>,
}

impl Registered {
    fn of(shared: &Shared<'_>, pid: u32) -> Self {
        let mut it = Self::default();
        match &shared.listing {
            Ok(listing)
                if listing
                    .registrations
                    .iter()
                    .any(|one| one.process.state == State::Elsewhere) =>
            {
                let why = "the module uses the process IDs of the first PID namespace, but this program runs in \
                           another one";
                it.not_told.push(why.to_owned());
            }
            Ok(listing) => {
                let holders = listing.holders().into_iter();
                // An entry of an earlier process with the same ID is ignored.
                let mut own = holders
                    .filter(|one| one.pid == Some(pid) && one.process.state != State::Reused);
                let own = own.next();
                it.registrations = Some(own.as_ref().map_or(0, |own| own.registrations));
                it.bytes = Some(own.as_ref().map_or(0, |own| own.bytes));
                it.gpus = own.map(|own| own.gpus).unwrap_or_default();
            }
            Err(Missing::NotLoaded) => it.registrations = Some(0),
            Err(why) => it.not_told.push(why.to_string()),
        }
        match &shared.usage {
            Ok(usage) => {
                let verdict = usage.verdict(pid);
                let own = usage.users.iter().find(|user| user.pid == Some(pid));
                it.gpudirect = Some(verdict);
                let is_known = usage.is_whole || own.is_some();
                let count = |count: Option<u64>| count.or(is_known.then_some(0));
                it.regions = count(own.map(|own| own.regions));
                it.dma_buf_regions = count(own.map(|own| own.dma_buf.regions));
                it.unknown_regions = count(own.map(|own| own.unknown.regions));
                if verdict == Verdict::Unknown {
                    it.not_told.extend(usage.reasons.iter().cloned());
                }
            }
            Err(why) => {
                it.gpudirect = Some(Verdict::Unknown);
                it.not_told
                    .push(format!("the kernel's list of memory regions: {why}"));
            }
        }
        let are_elsewhere = shared.listing.is_ok() && it.registrations.is_none();
        match it.registrations {
            // A registration in the module's list proves that the process uses GPUDirect RDMA.
            Some(1..) => it.gpudirect = Some(Verdict::Yes),
            None if are_elsewhere && it.gpudirect == Some(Verdict::No) => {
                it.gpudirect = Some(Verdict::Unknown);
            }
            _ => {}
        }
        it
    }
}

/// A process of the job.
#[derive(Serialize)]
struct Member {
    pid: u32,
    command: Option<String>,
    uid: Option<u32>,
    user: Option<String>,
    cgroups: Vec<String>,
    /// `true` if the process has another mount namespace than this program, as in a container.
    has_own_mounts: Option<bool>,
    registered: Registered,
    /// GPUs whose device files are open. CUDA opens each GPU that it may use.
    #[serde(serialize_with = "seen")]
    gpus: Seen<Vec<GpuId>>,
    /// RDMA devices whose device files are open.
    #[serde(serialize_with = "seen")]
    hcas: Seen<Vec<String>>,
    #[serde(serialize_with = "seen")]
    libraries: Seen<Vec<Library>>,
    /// Text about the limit on locked memory.
    memory_lock: Option<String>,
    environment: Vec<Source>,
    settings: Vec<Judged>,
    nics: Vec<Choice>,
    /// For each GPU: the nearest RDMA devices, and the nearest devices that NCCL may use.
    near: Vec<Near>,
    #[serde(skip)]
    nccl: Nccl,
    #[serde(skip)]
    lock: Option<Finding>,
}

/// Serializes a value, or null if the value could not be read.
fn seen<T: Serialize, S: serde::Serializer>(
    it: &Seen<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    it.as_ref().ok().serialize(serializer)
}

impl Member {
    /// Reads a process. Returns `None` if the process has ended.
    fn scan(
        shared: &Shared<'_>,
        pid: u32,
        reader: &Reader<'_>,
        processes: &mut Processes<'_>,
    ) -> Option<Self> {
        let host = shared.scan.host;
        let machine = shared.scan.machine;
        let identity = match Identity::of(host, pid) {
            Err(Unseen::Absent) => return None,
            other => other.ok(),
        };
        let process = processes.of(Some(pid), None);
        let environment = Environment::scan(host, pid, process.uid);
        let cgroup = host
            .text(&format!("/proc/{pid}/cgroup"))
            .unwrap_or_default();
        let choices = Choice::all(&environment, machine);
        let gpus_open = open_gpus(host, machine, pid);
        let registered = Registered::of(shared, pid);
        let lock = doctor::memory_lock(shared.scan, pid);
        let own = registered.gpus.iter();
        let own = own.filter_map(|share| share.gpu.as_ref());
        let gpus = gpus_open.iter().flatten().chain(own);
        let gpus: BTreeSet<Address> = gpus.filter_map(address).collect();
        let near = |choice: &Choice| -> Vec<Near> {
            let gpus = gpus.iter();
            gpus.filter_map(|gpu| Near::of(machine, *gpu, choice))
                .collect()
        };
        let member = Self {
            pid,
            command: process
                .command
                .or_else(|| host.text(&format!("/proc/{pid}/comm")).ok()),
            uid: process.uid,
            user: process.user,
            cgroups: members::groups(&cgroup).map(str::to_owned).collect(),
            has_own_mounts: has_own_mounts(host, pid),
            registered,
            gpus: gpus_open,
            hcas: open_hcas(host, pid),
            libraries: reader.scan(pid),
            memory_lock: lock.as_ref().map(|finding| finding.found.clone()),
            settings: settings::judged(&environment.all()),
            near: choices.first().map(near).unwrap_or_default(),
            nics: choices,
            nccl: Nccl::of(&environment),
            environment: environment.sources,
            lock,
        };
        let has_ended = identity.is_some_and(|identity| identity.has_ended(host));
        (!has_ended).then_some(member)
    }

    /// Returns `true` if the process may use a GPU or an RDMA device.
    fn is_concerned(&self) -> bool {
        fn has<T>(seen: &Seen<Vec<T>>) -> bool {
            match seen {
                Ok(list) => !list.is_empty(),
                // A process that is exiting has neither maps nor open files.
                Err(why) => matches!(why, Unseen::Denied | Unseen::NotRecorded),
            }
        }
        has(&self.libraries)
            || has(&self.gpus)
            || has(&self.hcas)
            || self.registered.registrations.is_some_and(|count| count > 0)
            || self.registered.regions.is_some_and(|count| count > 0)
    }

    /// Returns the mapped libraries of this name.
    fn mapped<'m>(&'m self, name: &'m str) -> impl Iterator<Item = &'m Library> {
        let all = self.libraries.iter().flatten();
        all.filter(move |library| library.name == name)
    }

    /// Returns `true` if the process may have mapped the library.
    fn may_use(&self, name: &str) -> bool {
        self.libraries.is_err() || self.mapped(name).next().is_some()
    }

    fn setting(&self, name: &str) -> Option<&Judged> {
        self.settings.iter().find(|setting| setting.name == name)
    }
}

fn address(gpu: &GpuId) -> Option<Address> {
    gpu.address.parse().ok()
}

/// Returns `true` if a process has another mount namespace, or another root directory, than this
/// program.
fn has_own_mounts(host: &dyn Host, pid: u32) -> Option<bool> {
    let differs = |what: &str| {
        let link = |process: &str| host.link(&format!("/proc/{process}/{what}")).ok();
        Some(link(&pid.to_string())? != link("self")?)
    };
    Some(differs("ns/mnt")? || differs("root")?)
}

/// Returns the targets of a process's file descriptors below a directory.
fn open_files(host: &dyn Host, pid: u32, directory: &str) -> Seen<BTreeSet<String>> {
    let descriptors = format!("/proc/{pid}/fd");
    let mut found = BTreeSet::new();
    for name in host.names(&descriptors)? {
        match host.link(&format!("{descriptors}/{name}")) {
            Ok(target) => {
                // The device file may have been deleted and created again after the process opened
                // the file.
                let path = target.strip_suffix(" (deleted)").unwrap_or(&target);
                found.extend(path.strip_prefix(directory).map(str::to_owned));
            }
            Err(Unseen::Denied) => return Err(Unseen::Denied),
            // The descriptor was closed.
            Err(_) => {}
        }
    }
    Ok(found)
}

/// Returns the GPUs that a process has open: `/dev/nvidia0`, by minor number.
fn open_gpus(host: &dyn Host, machine: &Machine, pid: u32) -> Seen<Vec<GpuId>> {
    let files = open_files(host, pid, "/dev/nvidia")?;
    let minors: BTreeSet<u32> = files.iter().filter_map(|name| name.parse().ok()).collect();
    let gpus = machine.gpus.iter();
    let open = gpus.filter(|gpu| gpu.minor.is_some_and(|minor| minors.contains(&minor)));
    Ok(open
        .map(|gpu| GpuId {
            index: Some(gpu.index),
            address: gpu.at.to_string(),
        })
        .collect())
}

/// Returns the RDMA devices that a process has open: `/dev/infiniband/uverbs0`.
fn open_hcas(host: &dyn Host, pid: u32) -> Seen<Vec<String>> {
    let files = open_files(host, pid, "/dev/infiniband/")?;
    let files = files.iter().filter(|name| name.starts_with("uverbs"));
    let name = |file: &String| {
        let name = host.text(&format!("/sys/class/infiniband_verbs/{file}/ibdev"));
        name.unwrap_or_else(|_| file.clone())
    };
    Ok(files.map(name).collect())
}

/// A finding about processes of the job.
#[derive(Debug, Serialize)]
struct Found {
    #[serde(flatten)]
    finding: Finding,
    pids: Vec<u32>,
}

/// A process of the job that has mapped none of the known libraries, and has no GPU and no RDMA
/// device open.
#[derive(Debug, Serialize)]
struct Other {
    pid: u32,
    command: Option<String>,
}

/// The job.
#[derive(Default, Serialize)]
struct Job {
    processes: Vec<Member>,
    others: Vec<Other>,
    /// Processes that ended while `job` read them.
    ended: Vec<u32>,
    /// Value of `NCCL_IB_HCA` for the GPUs that the job has open.
    suggested_nccl_ib_hca: Option<String>,
    findings: Vec<Found>,
    notes: Vec<String>,
}

impl Job {
    fn scan(shared: &Shared<'_>, pids: &[u32], is_one: bool) -> Self {
        let host = shared.scan.host;
        let reader = Reader::new(host);
        let now = registrations::now(host);
        let mut processes = Processes::new(host, now).by_own_numbers();
        let mut job = Self::default();
        for pid in pids {
            match Member::scan(shared, *pid, &reader, &mut processes) {
                Some(member) if is_one || member.is_concerned() => job.processes.push(member),
                Some(Member { pid, command, .. }) => job.others.push(Other { pid, command }),
                None => job.ended.push(*pid),
            }
        }
        let open = job
            .processes
            .iter()
            .flat_map(|member| member.gpus.iter().flatten());
        let gpus: BTreeSet<Address> = open.filter_map(address).collect();
        job.suggested_nccl_ib_hca = nics::suggested(shared.scan.machine, &gpus);
        job.judge(shared);
        job.notes.push(print::FIRST_ENVIRONMENT.to_owned());
        job
    }

    /// Stores the findings of all processes. A finding that several processes share is stored once.
    fn judge(&mut self, shared: &Shared<'_>) {
        let suggested = self.suggested_nccl_ib_hca.as_deref();
        let of = |member: &Member| {
            let pid = member.pid;
            let findings = checks::findings(shared, member, suggested).into_iter();
            findings.map(move |it| ((it.found.clone(), it.check), (it, pid)))
        };
        let all = by_key(self.processes.iter().flat_map(of)).into_iter();
        let all = all.filter_map(|(_, same)| {
            let pids = same.iter().map(|(_, pid)| *pid).collect();
            let (first, _) = same.into_iter().next()?;
            let subject = Subject::Job;
            let finding = Finding { subject, ..first };
            Some(Found { finding, pids })
        });
        let mut found: Vec<Found> = all.collect();
        found.sort_by_key(|found| std::cmp::Reverse(found.finding.level));
        self.findings = found;
    }

    fn status(&self) -> Status {
        let mut findings = self.findings.iter();
        match findings.any(|found| found.finding.level.is_finding()) {
            true => Status::Findings,
            false => Status::Ok,
        }
    }
}

/// Runs the command. Returns an error if no process matches, or if all processes ended while `job`
/// read them.
pub(crate) fn run(host: &dyn Host, args: &args::Job, out: &mut Out) -> anyhow::Result<Status> {
    let pids = members::find(host, &args.processes)?;
    let machine = Machine::scan(host).context("the machine's PCI devices")?;
    let scan = Scan::new(host, &machine);
    let shared = Shared::scan(&scan)?;
    let job = Job::scan(&shared, &pids, args.processes.pid.is_some());
    if job.processes.is_empty() && job.others.is_empty() {
        match pids[..] {
            [pid] => bail!("process {pid} ended while it was read"),
            _ => bail!("all processes ended while they were read"),
        }
    }
    match out.is_json() {
        true => out.json(SCHEMA, VERSION, &job)?,
        false => print::job(&job, args.all, out),
    }
    Ok(job.status())
}
