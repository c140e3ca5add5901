// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Steps of `verify` for a GPU and an RDMA device, in order, and the criteria of success.
//!
//! The steps use the devices through the trait [`Bench`]. Tests replace the devices by a fake, and
//! inject failures.

use std::time::Duration;

use anyhow::Context as _;
use peermem_verbs::pattern::{Difference, Pattern};
use peermem_verbs::rdma::{Contact, Part};
use serde::{Deserialize, Serialize};

use super::event::{median, microseconds, speed, Event, Figures, Name, Outcome, Step, Way};
use crate::host::Seen;

/// Reason why a step has no result.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unable {
    /// The machine lacks a requirement.
    #[error("{0}")]
    Impossible(String),
    /// Something failed that should work.
    #[error("{why}")]
    Failed { why: String, errno: Option<i32> },
}

impl Unable {
    /// Prefixes the reason with a place, such as `the server`.
    pub(crate) fn at(self, place: &str) -> Self {
        let at = |why| format!("{place}: {why}");
        match self {
            Self::Impossible(why) => Self::Impossible(at(why)),
            Self::Failed { why, errno } => Self::Failed {
                why: at(why),
                errno,
            },
        }
    }
}

impl From<anyhow::Error> for Unable {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed {
            why: format!("{error:#}"),
            errno: None,
        }
    }
}

/// Operation on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Write,
    Read,
    Send,
}

/// Result of a transfer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Moved {
    /// All bytes have arrived: total number, and duration of the transfer.
    Done { bytes: u64, took: Duration },
    /// The transfer ended with a completion that has this status.
    Refused(String),
}

impl Moved {
    /// Returns the number of bytes and the duration. `what` begins the message of a failure.
    fn done(self, what: &str) -> Result<(u64, Duration), Unable> {
        match self {
            Self::Done { bytes, took } => Ok((bytes, took)),
            Self::Refused(status) => Err(failed(format!("{what}ended with {status}"))),
        }
    }
}

/// Range that a transfer moves: the same offset and length in the source and the target region, in
/// bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Window {
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// Kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Host,
    Gpu,
}

/// Bandwidths of a pair's links, in bytes per second. `None`: unknown, or an emulated device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Links {
    /// PCIe link of the GPU.
    pub(crate) gpu: Option<u64>,
    /// PCIe link of the NIC or rate of the NIC's port, whichever is lower.
    pub(crate) nic: Option<u64>,
}

impl Links {
    /// Returns the bandwidth that the links allow for memory of this kind.
    fn bound(self, kind: Kind) -> Option<u64> {
        let gpu = self.gpu.filter(|_| kind == Kind::Gpu);
        gpu.into_iter().chain(self.nic).min()
    }
}

/// Host on which memory is allocated: the host of this process, or the server of a run between two
/// hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Here,
    Server,
}

/// Expected contents of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Contents {
    /// Bytes that the buffer was filled with.
    filled: Pattern,
    /// Bytes that a transfer has moved into a window of the buffer.
    moved: Option<(Pattern, Window)>,
}

impl From<Pattern> for Contents {
    fn from(filled: Pattern) -> Self {
        Self {
            filled,
            moved: None,
        }
    }
}

impl Contents {
    /// Returns the expected bytes of a buffer of this length.
    pub(crate) fn bytes(&self, len: usize) -> anyhow::Result<Vec<u8>> {
        let mut bytes = self.filled.bytes(0, len);
        if let Some((pattern, Window { at, len })) = self.moved {
            let (first, len) = (usize::try_from(at)?, usize::try_from(len)?);
            let part = first
                .checked_add(len)
                .and_then(|end| bytes.get_mut(first..end))
                .context("the window is outside the buffer")?;
            pattern.fill(at, part);
        }
        Ok(bytes)
    }
}

/// The devices that the steps use, and the state of the kernel module and of BAR1.
pub(crate) trait Bench {
    /// Buffer in host or GPU memory.
    type Memory;
    /// A registered memory region that covers a whole buffer.
    type Region;
    /// A process that holds a registration and moves bytes.
    type Holder;

    /// Describes the GPU and the RDMA device.
    fn about(&self) -> String;
    /// Allocates memory.
    fn memory(&mut self, end: End, kind: Kind, len: usize) -> Result<Self::Memory, Unable>;
    /// Allocates one buffer of GPU memory in two adjacent allocations. The first allocation has
    /// `head` bytes.
    fn two_allocations(&mut self, head: usize, len: usize) -> Result<Self::Memory, Unable>;
    /// Fills a whole buffer, through the processor or the GPU's driver.
    fn fill(&mut self, memory: &Self::Memory, pattern: Pattern) -> anyhow::Result<()>;
    /// Compares each byte of a buffer. The processor or the GPU's driver reads the bytes.
    fn compare(
        &mut self,
        memory: &Self::Memory,
        expected: &Contents,
    ) -> anyhow::Result<Option<Difference>>;
    fn free(&mut self, memory: &mut Self::Memory) -> anyhow::Result<()>;
    /// Exports GPU memory as a dma-buf, and returns the length of the dma-buf in bytes.
    fn export(&mut self, memory: &Self::Memory) -> Result<u64, Unable>;
    /// Registers a whole buffer. Host memory can only be registered with `ibv_reg_mr`
    /// ([`Way::PeerMemory`]).
    fn register(&mut self, way: Way, memory: &Self::Memory) -> Result<Self::Region, Unable>;
    fn deregister(&mut self, region: Self::Region) -> anyhow::Result<()>;
    /// Transfers the bytes of the window once, or repeatedly for at least `at_least`, on a new
    /// connection. Between two hosts, the client's device issues the requests.
    fn transfer(
        &mut self,
        verb: Verb,
        from: &Self::Region,
        to: &Self::Region,
        window: Window,
        at_least: Option<Duration>,
    ) -> anyhow::Result<Moved>;
    /// Creates a queue pair that is connected to the client's queue pair `theirs`. Returns the
    /// queue pair and the window of the region, in the form that the client needs.
    fn accept(
        &mut self,
        theirs: &Contact,
        region: &Self::Region,
        window: Window,
    ) -> anyhow::Result<(Contact, Part)>;
    /// Returns the time since an arbitrary moment.
    fn now(&self) -> Duration;
    /// Waits briefly before the state is read again.
    fn pause(&mut self);
    /// Starts a process that registers GPU memory by this method and moves bytes. Returns once
    /// bytes move.
    fn hold(&mut self, way: Way) -> anyhow::Result<Self::Holder>;
    /// Returns the process ID of the holder.
    fn holder(&self, holder: &Self::Holder) -> u32;
    /// Kills the holder, and returns when it has exited.
    fn kill(&mut self, holder: Self::Holder) -> anyhow::Result<()>;
    /// Returns the number of registrations of a process in the module's list.
    fn registrations(&self, process: u32) -> Seen<usize>;
    /// Returns the number of pinned bytes in the GPU's BAR1.
    fn pinned(&self) -> Seen<u64>;
}

/// Devices that take part in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The GPU without an RDMA device.
    GpuOnly,
    /// A GPU and an RDMA device of this host.
    OneHost,
    /// This host's devices and those of a server.
    TwoHosts,
}

/// Parameters of a run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Size of each buffer in bytes, a multiple of [`GRANULE`].
    pub(crate) size: usize,
    pub(crate) scope: Scope,
    /// Links of this host and of the server.
    pub(crate) links: [Links; 2],
    /// Number of registrations from which the median time is computed.
    pub(crate) registrations: usize,
    /// Duration of the bandwidth measurement.
    pub(crate) measure: Duration,
    /// Maximum time for the cleanup after a process was killed.
    pub(crate) patience: Duration,
    /// Seed of the byte patterns.
    pub(crate) seed: u64,
}

/// Granularity of sizes: a page of the GPU.
pub(crate) const GRANULE: u64 = 64 << 10;
/// Number of bytes before and after the window of a transfer. A transfer must not change these
/// bytes.
const EDGE: u64 = 4 << 10;

/// Result of a step that passed.
#[derive(Debug, Default)]
struct Found {
    text: Option<String>,
    figures: Figures,
}

impl Found {
    fn text(text: impl Into<String>) -> Self {
        Self {
            text: Some(text.into()),
            figures: Figures::default(),
        }
    }
}

/// Reasons why steps are skipped.
const NO_MEMORY: &str = "no GPU memory";
const NO_NETWORK: &str = "bytes of host memory do not arrive: the network fails";
const NOT_REGISTERED: &str = "GPU memory is not registered";

/// Returns the verbs calls that applications make for `ways`, separated by commas.
fn calls(ways: Vec<Way>) -> String {
    let calls: Vec<_> = ways.into_iter().map(Way::call).collect();
    calls.join(", ")
}

fn failed(why: impl Into<String>) -> Unable {
    Unable::Failed {
        why: why.into(),
        errno: None,
    }
}

/// Runs all steps, and reports the start and the end of each.
pub(crate) fn run<B: Bench>(bench: &mut B, plan: &Plan, tell: &mut dyn FnMut(Event)) {
    let mut run = Run {
        bench,
        plan,
        tell,
        streams: 0,
    };
    let about = run.bench.about();
    (run.tell)(Event::About(about));
    match plan.scope {
        Scope::TwoHosts => run.between_hosts(),
        Scope::GpuOnly | Scope::OneHost => run.on_one_host(),
    }
}

struct Run<'a, B: Bench> {
    bench: &'a mut B,
    plan: &'a Plan,
    tell: &'a mut dyn FnMut(Event),
    /// Number of patterns that were generated.
    streams: u64,
}

/// A buffer and its registered region.
type Registered<'a, B> = (&'a <B as Bench>::Memory, &'a <B as Bench>::Region);

/// Transfers on one host, with their verbs.
const MOVES: [(Name, Verb); 5] = [
    (Name::WriteFromGpu, Verb::Write),
    (Name::WriteToGpu, Verb::Write),
    (Name::GpuToGpu, Verb::Write),
    (Name::ReadFromGpu, Verb::Read),
    (Name::SendToGpu, Verb::Send),
];

/// Transfers between two hosts: their verbs, and the kinds of memory of the client and the server.
/// The transfers that use only host memory come first: they show that the network works.
const BETWEEN_HOSTS: [(Name, Verb, [Kind; 2]); 8] = {
    use Kind::{Gpu, Host};
    use Verb::{Read, Write};
    [
        (Name::WriteClientHostToServerHost, Write, [Host, Host]),
        (Name::ReadServerHostToClientHost, Read, [Host, Host]),
        (Name::WriteClientGpuToServerHost, Write, [Gpu, Host]),
        (Name::ReadServerHostToClientGpu, Read, [Gpu, Host]),
        (Name::WriteClientHostToServerGpu, Write, [Host, Gpu]),
        (Name::ReadServerGpuToClientHost, Read, [Host, Gpu]),
        (Name::WriteClientGpuToServerGpu, Write, [Gpu, Gpu]),
        (Name::ReadServerGpuToClientGpu, Read, [Gpu, Gpu]),
    ]
};

impl<B: Bench> Run<'_, B> {
    fn step<T>(
        &mut self,
        way: Option<Way>,
        step: Name,
        body: impl FnOnce(&mut Self) -> Result<(T, Found), Unable>,
    ) -> Option<T> {
        (self.tell)(Event::Begins { way, step });
        let (value, outcome, found, errno) = match body(self) {
            Ok((value, found)) => (Some(value), Outcome::Passed, found, None),
            Err(Unable::Impossible(why)) => {
                (None, Outcome::NotPossibleHere, Found::text(why), None)
            }
            Err(Unable::Failed { why, errno }) => (None, Outcome::Failed, Found::text(why), errno),
        };
        (self.tell)(Event::Ended(Step {
            way,
            step,
            outcome,
            found: found.text,
            errno,
            figures: found.figures,
        }));
        value
    }

    /// Runs a step without a value. Returns `true` if the step passed.
    fn passes(
        &mut self,
        way: Option<Way>,
        step: Name,
        body: impl FnOnce(&mut Self) -> Result<Found, Unable>,
    ) -> bool {
        self.step(way, step, |run| Ok(((), body(run)?))).is_some()
    }

    /// Reports a step as not possible.
    fn leave_out(&mut self, way: Option<Way>, step: Name, why: &str) {
        self.passes(way, step, |_| Err(Unable::Impossible(why.to_owned())));
    }

    fn pattern(&mut self) -> Pattern {
        self.streams = self.streams.wrapping_add(1);
        Pattern::new(self.plan.seed, self.streams)
    }

    /// Fills memory with fresh bytes, and returns their pattern.
    fn fill(&mut self, memory: &B::Memory) -> anyhow::Result<Pattern> {
        let pattern = self.pattern();
        self.bench.fill(memory, pattern)?;
        Ok(pattern)
    }

    fn compare(
        &mut self,
        memory: &B::Memory,
        expected: impl Into<Contents>,
        what: &str,
    ) -> Result<(), Unable> {
        match self.bench.compare(memory, &expected.into())? {
            None => Ok(()),
            Some(wrong) => Err(failed(format!(
                "{what}: {} of {} bytes differ, the first at {:#x}",
                wrong.count, self.plan.size, wrong.first
            ))),
        }
    }

    fn allocate(&mut self, end: End, step: Name) -> Option<B::Memory> {
        self.step(None, step, |run| {
            let memory = run.bench.memory(end, Kind::Gpu, run.plan.size)?;
            Ok((memory, run.of_size()))
        })
    }

    /// Checks that GPU memory keeps bytes.
    fn copies(&mut self, step: Name, memory: &B::Memory) -> bool {
        self.passes(None, step, |run| {
            run.keeps_bytes(memory)?;
            Ok(run.of_size())
        })
    }

    fn keeps_bytes(&mut self, memory: &B::Memory) -> Result<(), Unable> {
        let bytes = self.fill(memory)?;
        self.compare(memory, bytes, "copied to the GPU and back")
    }

    /// Exports GPU memory as a dma-buf.
    fn export(&mut self, memory: &B::Memory) -> Result<Found, Unable> {
        let (bytes, size) = (self.bench.export(memory)?, self.plan.size);
        if bytes < size as u64 {
            return Err(failed(format!("a dma-buf of {bytes} bytes for {size}")));
        }
        Ok(Found::text(format!("a dma-buf of {bytes} bytes")))
    }

    /// Allocates memory that spans two allocations of about equal size. Each allocation has whole
    /// pages of the GPU.
    fn two_allocations(&mut self) -> Result<B::Memory, Unable> {
        let size = self.plan.size;
        let half = size / 2;
        match half - half % GRANULE as usize {
            0 => Err(Unable::Impossible(format!(
                "one page of the GPU has {size} bytes: use a larger --size"
            ))),
            head => self.bench.two_allocations(head, size),
        }
    }

    fn host_memory(&mut self, end: End) -> Result<(B::Memory, B::Region), Unable> {
        let host = self.bench.memory(end, Kind::Host, self.plan.size)?;
        let region = self.bench.register(Way::PeerMemory, &host)?;
        Ok((host, region))
    }

    fn on_one_host(&mut self) {
        let Some(memory) = self.allocate(End::Here, Name::Allocate) else {
            for step in [Name::Copies, Name::Export, Name::ExportTwoAllocations] {
                self.leave_out(None, step, NO_MEMORY);
            }
            return;
        };
        let copied = self.copies(Name::Copies, &memory);
        self.passes(None, Name::Export, |run| run.export(&memory));
        self.passes(None, Name::ExportTwoAllocations, |run| {
            let memory = run.two_allocations()?;
            run.keeps_bytes(&memory)?;
            run.export(&memory)
        });
        if self.plan.scope == Scope::GpuOnly {
            return;
        }
        if !copied {
            self.leave_out(None, Name::HostMemory, "GPU memory does not keep bytes");
            return;
        }
        let host = self.step(None, Name::HostMemory, |run| {
            Ok((run.host_memory(End::Here)?, run.of_size()))
        });
        let Some(host) = host else {
            return;
        };
        let working: Vec<_> = Way::ALL
            .into_iter()
            .filter(|&way| self.one_way(way, &memory, (&host.0, &host.1)))
            .collect();
        self.passes(None, Name::AnyWay, |_| match working.is_empty() {
            true => Err(failed("GPU memory cannot be registered, or no bytes move")),
            false => Ok(Found::text(calls(working))),
        });
    }

    fn between_hosts(&mut self) {
        let ends = [
            (End::Here, Name::Allocate, Name::Copies),
            (End::Server, Name::AllocateOnServer, Name::CopiesOnServer),
        ];
        let gpus = ends.map(|(end, allocate, copies)| {
            let Some(memory) = self.allocate(end, allocate) else {
                self.leave_out(None, copies, NO_MEMORY);
                return None;
            };
            self.copies(copies, &memory).then_some(memory)
        });
        let hosts = self.step(None, Name::HostMemory, |run| {
            let hosts = [run.host_memory(End::Here)?, run.host_memory(End::Server)?];
            Ok((hosts, run.of_size()))
        });
        let Some(hosts) = hosts else {
            return;
        };
        let hosts = hosts.each_ref().map(|(memory, region)| (memory, region));
        let mut network_works = true;
        for (name, verb, kinds) in BETWEEN_HOSTS {
            if kinds == [Kind::Host, Kind::Host] {
                let passed = self.between(None, name, (verb, kinds), hosts);
                network_works &= passed;
            }
        }
        let ends = gpus.each_ref().map(|gpu| match gpu {
            _ if !network_works => Err(NO_NETWORK),
            Some(memory) => Ok(memory),
            None => Err(NO_MEMORY),
        });
        let working = Way::ALL.map(|way| (way, self.one_way_between(way, ends, hosts)));
        if !network_works {
            self.leave_out(None, Name::AnyWay, NO_NETWORK);
            return;
        }
        self.passes(None, Name::AnyWay, |_| {
            let mut found = Vec::new();
            for (end, host) in ["client", "server"].into_iter().enumerate() {
                if ends[end].is_err() {
                    continue;
                }
                let ways = working.iter().filter(|(_, works)| works[end]);
                let ways: Vec<_> = ways.map(|(way, _)| *way).collect();
                if ways.is_empty() {
                    return Err(failed(format!(
                        "GPU memory of the {host} cannot be registered, or no bytes move"
                    )));
                }
                found.push(format!("{host}: {}", calls(ways)));
            }
            if found.is_empty() {
                return Err(failed("neither host has GPU memory"));
            }
            Ok(Found::text(found.join("; ")))
        });
    }

    /// Runs the steps for one method of registration between two hosts. `gpus` has the GPU memory
    /// of the client and the server, or the reason why a host has no GPU memory. Returns for each
    /// host `true` if all transfers with the host's GPU memory passed.
    fn one_way_between(
        &mut self,
        way: Way,
        gpus: [Result<&B::Memory, &str>; 2],
        hosts: [Registered<'_, B>; 2],
    ) -> [bool; 2] {
        let [client, server] = gpus;
        let known = |gpu: Result<_, &str>| gpu.map_err(|why| Unable::Impossible(why.to_owned()));
        let regions = [
            self.step(Some(way), Name::Register, |run| {
                run.register(way, known(client)?)
            }),
            self.step(Some(way), Name::RegisterOnServer, |run| {
                // The registration on the server is not timed, because the time of a request
                // includes the network.
                let region = run.bench.register(way, known(server)?)?;
                Ok((region, run.of_size()))
            }),
        ];
        let mut works = regions.each_ref().map(Option::is_some);
        let registered = [
            client.ok().zip(regions[0].as_ref()),
            server.ok().zip(regions[1].as_ref()),
        ];
        for (name, verb, kinds) in BETWEEN_HOSTS {
            if kinds == [Kind::Host, Kind::Host] {
                continue;
            }
            let side = |end: usize| match kinds[end] {
                Kind::Host => Some(hosts[end]),
                Kind::Gpu => registered[end],
            };
            let (Some(client), Some(server)) = (side(0), side(1)) else {
                self.leave_out(Some(way), name, NOT_REGISTERED);
                continue;
            };
            let passed = self.between(Some(way), name, (verb, kinds), [client, server]);
            for (works, kind) in works.iter_mut().zip(kinds) {
                *works &= passed || kind == Kind::Host;
            }
        }
        let regions: Vec<_> = regions.into_iter().flatten().collect();
        self.passes(Some(way), Name::Deregister, |run| {
            if regions.is_empty() {
                return Err(Unable::Impossible(NOT_REGISTERED.to_owned()));
            }
            for region in regions {
                run.bench.deregister(region)?;
            }
            Ok(Found::default())
        });
        works
    }

    /// Runs one transfer between the client and the server. Returns `true` if the transfer passed.
    fn between(
        &mut self,
        way: Option<Way>,
        name: Name,
        (verb, kinds): (Verb, [Kind; 2]),
        [client, server]: [Registered<'_, B>; 2],
    ) -> bool {
        let (from, to) = match verb {
            Verb::Read => (server, client),
            Verb::Write | Verb::Send => (client, server),
        };
        let links = self.plan.links.into_iter().zip(kinds);
        let bound = links.filter_map(|(links, kind)| links.bound(kind)).min();
        self.passes(way, name, |run| run.one_move(verb, from, to, bound))
    }

    fn of_size(&self) -> Found {
        Found {
            text: None,
            figures: Figures {
                bytes: Some(self.plan.size as u64),
                ..Figures::default()
            },
        }
    }

    /// Runs the steps for one method of registration. Returns `true` if all transfers passed.
    fn one_way(&mut self, way: Way, memory: &B::Memory, host: Registered<'_, B>) -> bool {
        let region = self.step(Some(way), Name::Register, |run| run.register(way, memory));
        let Some(region) = region else {
            let why = format!("{way} of GPU memory did not work");
            let rest = [
                Name::Deregister,
                Name::TwoAllocations,
                Name::FreeWhileRegistered,
                Name::KilledHolder,
            ];
            for step in MOVES.map(|(step, _)| step).into_iter().chain(rest) {
                self.leave_out(Some(way), step, &why);
            }
            return false;
        };
        let moved = self.moves(way, (memory, &region), host);
        self.passes(Some(way), Name::Deregister, |run| {
            run.bench.deregister(region)?;
            Ok(Found::default())
        });
        self.passes(Some(way), Name::TwoAllocations, |run| {
            run.over_the_border(way, host)
        });
        self.passes(Some(way), Name::FreeWhileRegistered, |run| {
            run.free_while_registered(way, host)
        });
        self.passes(Some(way), Name::KilledHolder, |run| run.killed_holder(way));
        moved
    }

    /// Registers and deregisters the memory several times, then registers it once more and returns
    /// the region.
    fn register(&mut self, way: Way, memory: &B::Memory) -> Result<(B::Region, Found), Unable> {
        let (mut registered, mut deregistered) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.registrations {
            let begun = self.bench.now();
            let region = self.bench.register(way, memory)?;
            let between = self.bench.now();
            self.bench.deregister(region)?;
            registered.push(between.saturating_sub(begun));
            deregistered.push(self.bench.now().saturating_sub(between));
        }
        let region = self.bench.register(way, memory)?;
        let mut found = self.of_size();
        found.figures.registrations = Some(registered.len());
        found.figures.registration_us = median(registered).map(microseconds);
        found.figures.deregistration_us = median(deregistered).map(microseconds);
        Ok((region, found))
    }

    /// Runs the transfers. Returns `true` if all passed.
    fn moves(&mut self, way: Way, gpu: Registered<'_, B>, host: Registered<'_, B>) -> bool {
        let size = self.plan.size;
        let mut other = None;
        let mut all = true;
        for (name, verb) in MOVES {
            all &= self.passes(Some(way), name, |run| {
                if name == Name::GpuToGpu {
                    let memory = run.bench.memory(End::Here, Kind::Gpu, size)?;
                    let region = run.bench.register(way, &memory)?;
                    other = Some((memory, region));
                }
                let (from, to) = match (name, &other) {
                    (Name::WriteFromGpu | Name::ReadFromGpu, _) => (gpu, host),
                    (_, Some((memory, region))) => (gpu, (memory, region)),
                    (_, None) => (host, gpu),
                };
                let bound = run.plan.links[0].bound(Kind::Gpu);
                run.one_move(verb, from, to, bound)
            });
            if let Some((memory, region)) = other.take() {
                if let Err(error) = self.bench.deregister(region) {
                    all &= self.passes(Some(way), Name::Deregister, |_| {
                        Err(error.context("the second region").into())
                    });
                }
                drop(memory);
            }
        }
        all
    }

    /// Moves and compares bytes, then measures the bandwidth. `bound` is the bandwidth of the
    /// links.
    fn one_move(
        &mut self,
        verb: Verb,
        from: Registered<'_, B>,
        to: Registered<'_, B>,
        bound: Option<u64>,
    ) -> Result<Found, Unable> {
        let window = Window {
            at: EDGE,
            len: (self.plan.size as u64).saturating_sub(2 * EDGE),
        };
        let source = self.fill(from.0)?;
        let filled = self.fill(to.0)?;
        self.bench
            .transfer(verb, from.1, to.1, window, None)
            .map_err(|error| error.context("the first transfer"))?
            .done("the transfer ")?;
        let target = Contents {
            filled,
            moved: Some((source, window)),
        };
        self.compare(to.0, target, "in the destination memory")?;
        self.compare(from.0, source, "in the source memory")?;
        let (bytes, took) = self
            .bench
            .transfer(verb, from.1, to.1, window, Some(self.plan.measure))?
            .done("the repeated transfer ")?;
        self.compare(
            to.0,
            target,
            "in the destination memory, after many transfers",
        )?;
        Ok(Found {
            text: None,
            figures: Figures {
                bytes: Some(window.len),
                timed_bytes: Some(bytes),
                bytes_per_second: speed(bytes, took),
                link_bytes_per_second: bound,
                ..Figures::default()
            },
        })
    }

    /// Registers one region over two allocations, and moves bytes from and to the region. The
    /// window of each transfer contains the border between the allocations.
    fn over_the_border(&mut self, way: Way, host: Registered<'_, B>) -> Result<Found, Unable> {
        let memory = self.two_allocations()?;
        let region = self.bench.register(way, &memory)?;
        let (gpu, bound) = ((&memory, &region), self.plan.links[0].bound(Kind::Gpu));
        let mut moves = |from, to, what| {
            let moved = self.one_move(Verb::Write, from, to, bound);
            moved.map_err(|unable| unable.at(what))
        };
        let moved = moves(gpu, host, "from the GPU").and_then(|_| moves(host, gpu, "to the GPU"));
        // The region is deregistered in any case.
        let gone = self.bench.deregister(region);
        moved?;
        gone?;
        Ok(self.of_size())
    }

    /// Checks that the device sees freed memory unchanged, or does not reach the memory at all. The
    /// step only reads: if the check fails, the memory may belong to another process.
    fn free_while_registered(
        &mut self,
        way: Way,
        host: Registered<'_, B>,
    ) -> Result<Found, Unable> {
        let window = Window {
            at: 0,
            len: self.plan.size as u64,
        };
        let mut memory = self.bench.memory(End::Here, Kind::Gpu, self.plan.size)?;
        let kept = self.fill(&memory)?;
        let region = self.bench.register(way, &memory)?;
        self.bench
            .transfer(Verb::Read, &region, host.1, window, None)?
            .done("a READ before the free ")?;
        self.compare(host.0, kept, "a READ before the free")?;
        self.bench.free(&mut memory)?;
        // If the driver has released the freed memory, this allocation can get the same memory. A
        // failure to allocate is acceptable, too.
        let next = match self.bench.memory(End::Here, Kind::Gpu, self.plan.size) {
            Ok(next) => {
                let bytes = self.fill(&next)?;
                Some((next, bytes))
            }
            Err(_) => None,
        };
        self.fill(host.0)?;
        let after = self
            .bench
            .transfer(Verb::Read, &region, host.1, window, None);
        let found = match after {
            Ok(Moved::Done { .. }) => {
                let mut is = |bytes: Pattern| -> anyhow::Result<bool> {
                    Ok(self.bench.compare(host.0, &bytes.into())?.is_none())
                };
                if is(kept)? {
                    Ok("held: the memory and its bytes stay until the deregistration".to_owned())
                } else {
                    let has = match &next {
                        Some((_, bytes)) if is(*bytes)? => "now belongs to another allocation",
                        _ => "now has other bytes",
                    };
                    Err(failed(format!(
                        "the device still reaches freed memory, which {has}"
                    )))
                }
            }
            Ok(Moved::Refused(status)) => Ok(format!("revoked: a READ ends with {status}")),
            Err(error) => Err(error.context("a READ after the free").into()),
        };
        // The region is deregistered in any case.
        let gone = self.bench.deregister(region);
        let found = found?;
        gone.map_err(|error| error.context("after the free"))?;
        Ok(Found::text(found))
    }

    fn killed_holder(&mut self, way: Way) -> Result<Found, Unable> {
        let before = self.bench.pinned();
        let holder = self.bench.hold(way)?;
        let process = self.bench.holder(&holder);
        let held = self.bench.registrations(process);
        let during = self.bench.pinned();
        self.bench.kill(holder)?;
        let listed = matches!(way, Way::PeerMemory) && held.as_ref().is_ok_and(|&count| count > 0);
        let deadline = self.bench.now() + self.plan.patience;
        let mut reported = vec!["killed while bytes moved".to_owned()];
        loop {
            let mut left = Vec::new();
            match self.bench.registrations(process) {
                Ok(count) if listed && count > 0 => left.push(format!(
                    "registrations of process {process} in the module's list: {count}"
                )),
                _ => {}
            }
            match (&before, self.bench.pinned()) {
                (Ok(before), Ok(now)) if now > *before => left.push(format!(
                    "{now} bytes of BAR1 are pinned, {before} were before"
                )),
                _ => {}
            }
            if left.is_empty() {
                break;
            }
            if self.bench.now() > deadline {
                return Err(failed(format!("after the kill: {}", left.join(", "))));
            }
            self.bench.pause();
        }
        match held {
            _ if way == Way::DmaBuf => {}
            Ok(0) => {
                return Err(failed(format!(
                    "the module listed no registration of process {process}, which had one"
                )))
            }
            Ok(count) => reported.push(format!("registrations listed: {count}, then 0")),
            Err(why) => reported.push(format!("the module's list is {why}")),
        }
        if let (Ok(before), Ok(during)) = (&before, &during) {
            reported.push(format!(
                "bytes pinned in BAR1: {before}, {during}, {before}"
            ));
        }
        // The resources of the killed process must be available again.
        let memory = self.bench.memory(End::Here, Kind::Gpu, self.plan.size)?;
        let region = self.bench.register(way, &memory)?;
        self.bench.deregister(region)?;
        Ok(Found::text(reported.join("; ")))
    }
}

#[cfg(test)]
pub(crate) mod tests;
