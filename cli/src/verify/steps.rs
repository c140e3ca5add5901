// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Steps of `verify` for a GPU and an RDMA device, in order, and the criteria of success.
//!
//! The devices are a [`Bench`], so that tests can inject failures.

use std::time::Duration;

use anyhow::anyhow;
use peermem_verbs::pattern::{difference, Pattern};

use super::event::{Event, Figures, Name, Outcome, Step, Way};
use crate::host::Seen;

/// Reason why a step has no result.
#[derive(Debug)]
pub(crate) enum Unable {
    /// The machine lacks a requirement.
    Impossible(String),
    /// Something failed that should work.
    Failed { why: String, errno: Option<i32> },
}

impl From<anyhow::Error> for Unable {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed {
            why: format!("{error:#}"),
            errno: None,
        }
    }
}

/// Refusal of a registration, as the caller sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// This machine does not support this way of registration. The text gives the reason.
    NoSuchWay(String),
    /// The registration was refused.
    Refused { errno: Option<i32>, why: String },
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Self {
        Self::Refused {
            errno: None,
            why: format!("{error:#}"),
        }
    }
}

impl From<Refusal> for Unable {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::NoSuchWay(why) => Self::Impossible(why),
            Refusal::Refused { errno, why } => Self::Failed { why, errno },
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
    /// All bytes were moved: total number, and duration.
    Done { bytes: u64, took: Duration },
    /// The transfer ended with a completion that has this status.
    Refused(String),
}

/// A part of two regions: the same offset and length in both, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// The devices, and their visible state.
pub(crate) trait Bench {
    /// Host or GPU memory.
    type Memory;
    /// A region that covers all of a memory.
    type Region;
    /// A process that holds a registration and moves bytes.
    type Holder;

    /// Describes the GPU and the RDMA device.
    fn about(&self) -> String;
    fn gpu_memory(&mut self, len: usize) -> anyhow::Result<Self::Memory>;
    fn host_memory(&mut self, len: usize) -> anyhow::Result<Self::Memory>;
    /// Copies into memory, with the processor or with the GPU's driver.
    fn put(&mut self, memory: &Self::Memory, offset: usize, data: &[u8]) -> anyhow::Result<()>;
    /// Copies from memory, in the same way as `put`.
    fn get(&mut self, memory: &Self::Memory, offset: usize, out: &mut [u8]) -> anyhow::Result<()>;
    fn free(&mut self, memory: &mut Self::Memory) -> anyhow::Result<()>;
    /// Exports GPU memory as a dma-buf and returns its length, in bytes.
    fn export(&mut self, memory: &Self::Memory) -> Result<u64, Unable>;
    /// Registers all of a memory. Host memory can be registered in one way only.
    fn register(&mut self, way: Way, memory: &Self::Memory) -> Result<Self::Region, Refusal>;
    fn deregister(&mut self, region: Self::Region) -> anyhow::Result<()>;
    /// Moves the window once, or repeatedly for at least `at_least`, on a new connection.
    fn transfer(
        &mut self,
        verb: Verb,
        from: &Self::Region,
        to: &Self::Region,
        window: Window,
        at_least: Option<Duration>,
    ) -> anyhow::Result<Moved>;
    /// Returns the time since an arbitrary moment.
    fn now(&self) -> Duration;
    /// Waits briefly for a change.
    fn pause(&mut self);
    /// Starts a process that registers GPU memory in this way and moves bytes. Returns once bytes
    /// move.
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

/// Parameters of a run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Size of each buffer in bytes, a multiple of [`GRANULE`].
    pub(crate) size: usize,
    /// Runs only the steps that need no RDMA device.
    pub(crate) gpu_only: bool,
    /// Number of registrations for the median.
    pub(crate) registrations: usize,
    /// Duration of the bandwidth measurement.
    pub(crate) measure: Duration,
    /// Time to wait for the cleanup after a killed process.
    pub(crate) patience: Duration,
    /// Seed of the byte patterns.
    pub(crate) seed: u64,
}

/// Granularity of sizes: a page of the GPU.
pub(crate) const GRANULE: u64 = 64 << 10;
/// Number of bytes on both sides of the moved part that must not change.
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

fn failed(why: impl Into<String>) -> Unable {
    Unable::Failed {
        why: why.into(),
        errno: None,
    }
}

pub(crate) fn median(mut values: Vec<Duration>) -> Option<Duration> {
    values.sort();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

fn microseconds(time: Duration) -> f64 {
    // The clock is accurate to tenths of a microsecond at best.
    (time.as_secs_f64() * 1e7).round() / 10.0
}

/// Returns bytes per second, or `None` if no time passed.
fn speed(bytes: u64, took: Duration) -> Option<u64> {
    let nanoseconds = took.as_nanos();
    let speed = u128::from(bytes)
        .checked_mul(1_000_000_000)?
        .checked_div(nanoseconds)?;
    u64::try_from(speed).ok()
}

/// Runs all steps, and reports the start and the end of each.
pub(crate) fn run<B: Bench>(bench: &mut B, plan: &Plan, tell: &mut dyn FnMut(Event)) {
    let mut run = Run {
        bench,
        plan,
        tell,
        streams: 0,
    };
    run.all();
    (run.tell)(Event::Done);
}

struct Run<'a, B: Bench> {
    bench: &'a mut B,
    plan: &'a Plan,
    tell: &'a mut dyn FnMut(Event),
    /// Number of patterns that were generated.
    streams: u64,
}

/// Memory and regions for the transfers.
struct Ends<'a, B: Bench> {
    gpu: (&'a B::Memory, &'a B::Region),
    other: (&'a B::Memory, &'a B::Region),
    host: (&'a B::Memory, &'a B::Region),
}

/// Transfers, with their verbs.
const MOVES: [(Name, Verb); 5] = [
    (Name::WriteFromGpu, Verb::Write),
    (Name::WriteToGpu, Verb::Write),
    (Name::GpuToGpu, Verb::Write),
    (Name::ReadFromGpu, Verb::Read),
    (Name::SendToGpu, Verb::Send),
];

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

    /// Reports a step as not possible.
    fn leave_out(&mut self, way: Option<Way>, step: Name, why: &str) {
        let _: Option<()> = self.step(way, step, |_| Err(Unable::Impossible(why.to_owned())));
    }

    fn pattern(&mut self) -> Pattern {
        self.streams = self.streams.wrapping_add(1);
        Pattern::new(self.plan.seed, self.streams)
    }

    /// Fills memory with fresh bytes, and returns them.
    fn fill(&mut self, memory: &B::Memory) -> anyhow::Result<Vec<u8>> {
        let bytes = self.pattern().bytes(0, self.plan.size);
        self.bench.put(memory, 0, &bytes)?;
        Ok(bytes)
    }

    fn contents(&mut self, memory: &B::Memory) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; self.plan.size];
        self.bench.get(memory, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn compare(&mut self, memory: &B::Memory, expected: &[u8], what: &str) -> Result<(), Unable> {
        let found = self.contents(memory)?;
        match difference(expected, &found) {
            None => Ok(()),
            Some(wrong) => Err(failed(format!(
                "{what}: {} of {} bytes differ, the first at {:#x}",
                wrong.count,
                expected.len(),
                wrong.first
            ))),
        }
    }

    fn all(&mut self) {
        let about = self.bench.about();
        (self.tell)(Event::About(about));
        let size = self.plan.size;
        let memory = self.step(None, Name::Allocate, |run| {
            Ok((run.bench.gpu_memory(size)?, run.of_size()))
        });
        let Some(memory) = memory else {
            for step in [Name::Copies, Name::Export] {
                self.leave_out(None, step, "no GPU memory");
            }
            return;
        };
        let copied = self.step(None, Name::Copies, |run| {
            let bytes = run.fill(&memory)?;
            run.compare(&memory, &bytes, "copied to the GPU and back")?;
            Ok(((), run.of_size()))
        });
        let _: Option<()> = self.step(None, Name::Export, |run| {
            let bytes = run.bench.export(&memory)?;
            if bytes < size as u64 {
                return Err(failed(format!("a dma-buf of {bytes} bytes for {size}")));
            }
            Ok(((), Found::text(format!("a dma-buf of {bytes} bytes"))))
        });
        if self.plan.gpu_only {
            return;
        }
        if copied.is_none() {
            self.leave_out(None, Name::HostMemory, "GPU memory does not keep bytes");
            return;
        }
        let host = self.step(None, Name::HostMemory, |run| {
            let host = run.bench.host_memory(size)?;
            let region = run.bench.register(Way::PeerMemory, &host)?;
            Ok(((host, region), run.of_size()))
        });
        let Some(host) = host else {
            return;
        };
        let working: Vec<_> = Way::ALL
            .into_iter()
            .filter(|&way| self.one_way(way, &memory, &host))
            .collect();
        let _: Option<()> = self.step(None, Name::AnyWay, |_| {
            if working.is_empty() {
                return Err(failed(
                    "GPU memory can be registered in no way, or no bytes move",
                ));
            }
            let calls: Vec<_> = working.iter().map(|way| way.call()).collect();
            Ok(((), Found::text(calls.join(", "))))
        });
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

    /// Runs the steps of one way. Returns `true` if bytes moved.
    fn one_way(&mut self, way: Way, memory: &B::Memory, host: &(B::Memory, B::Region)) -> bool {
        let region = self.step(Some(way), Name::Register, |run| run.register(way, memory));
        let Some(region) = region else {
            let why = format!("{way} of GPU memory did not work");
            for (step, _) in MOVES {
                self.leave_out(Some(way), step, &why);
            }
            for step in [
                Name::Deregister,
                Name::FreeWhileRegistered,
                Name::KilledHolder,
            ] {
                self.leave_out(Some(way), step, &why);
            }
            return false;
        };
        let moved = self.moves(way, (memory, &region), (&host.0, &host.1));
        let _: Option<()> = self.step(Some(way), Name::Deregister, |run| {
            run.bench.deregister(region)?;
            Ok(((), Found::default()))
        });
        let _: Option<()> = self.step(Some(way), Name::FreeWhileRegistered, |run| {
            Ok(((), run.free_while_registered(way, (&host.0, &host.1))?))
        });
        let _: Option<()> = self.step(Some(way), Name::KilledHolder, |run| {
            Ok(((), run.killed_holder(way)?))
        });
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
    fn moves(
        &mut self,
        way: Way,
        gpu: (&B::Memory, &B::Region),
        host: (&B::Memory, &B::Region),
    ) -> bool {
        let size = self.plan.size;
        let mut other = None;
        let mut all = true;
        for (name, verb) in MOVES {
            let passed = self.step(Some(way), name, |run| {
                if name == Name::GpuToGpu {
                    let memory = run.bench.gpu_memory(size)?;
                    let region = run.bench.register(way, &memory)?;
                    other = Some((memory, region));
                }
                let ends = Ends {
                    gpu,
                    other: other
                        .as_ref()
                        .map_or(gpu, |(memory, region)| (memory, region)),
                    host,
                };
                Ok(((), run.one_move(name, verb, &ends)?))
            });
            all &= passed.is_some();
            if let Some((memory, region)) = other.take() {
                if let Err(error) = self.bench.deregister(region) {
                    let _: Option<()> = self.step(Some(way), Name::Deregister, |_| {
                        Err(error.context("the second region").into())
                    });
                    all = false;
                }
                drop(memory);
            }
        }
        all
    }

    fn one_move(&mut self, name: Name, verb: Verb, ends: &Ends<'_, B>) -> Result<Found, Unable> {
        let (from, to) = match name {
            Name::WriteFromGpu | Name::ReadFromGpu => (ends.gpu, ends.host),
            Name::GpuToGpu => (ends.gpu, ends.other),
            _ => (ends.host, ends.gpu),
        };
        let window = Window {
            at: EDGE,
            len: (self.plan.size as u64).saturating_sub(2 * EDGE),
        };
        let source = self.fill(from.0)?;
        let mut target = self.fill(to.0)?;
        let range = window.at as usize..(window.at + window.len) as usize;
        let moved = self
            .bench
            .transfer(verb, from.1, to.1, window, None)
            .map_err(|error| error.context("the first transfer"))?;
        if let Moved::Refused(status) = moved {
            return Err(failed(format!("ended with {status}")));
        }
        match (target.get_mut(range.clone()), source.get(range)) {
            (Some(into), Some(of)) => into.copy_from_slice(of),
            _ => return Err(anyhow!("the window is outside the buffer").into()),
        }
        self.compare(to.0, &target, "where the bytes went")?;
        self.compare(from.0, &source, "where the bytes came from")?;
        let moved = self
            .bench
            .transfer(verb, from.1, to.1, window, Some(self.plan.measure))?;
        let (bytes, took) = match moved {
            Moved::Done { bytes, took } => (bytes, took),
            Moved::Refused(status) => {
                return Err(failed(format!("repeated, it ended with {status}")))
            }
        };
        self.compare(to.0, &target, "where the bytes went, after many times")?;
        Ok(Found {
            text: None,
            figures: Figures {
                bytes: Some(window.len),
                timed_bytes: Some(bytes),
                bytes_per_second: speed(bytes, took),
                ..Figures::default()
            },
        })
    }

    /// Checks that the device sees freed memory unchanged, or does not reach the memory at all. The
    /// step only reads: if the check fails, the memory may belong to another process.
    fn free_while_registered(
        &mut self,
        way: Way,
        host: (&B::Memory, &B::Region),
    ) -> Result<Found, Unable> {
        let window = Window {
            at: 0,
            len: self.plan.size as u64,
        };
        let mut memory = self.bench.gpu_memory(self.plan.size)?;
        let kept = self.fill(&memory)?;
        let region = self.bench.register(way, &memory)?;
        let before = self
            .bench
            .transfer(Verb::Read, &region, host.1, window, None)?;
        if let Moved::Refused(status) = before {
            return Err(failed(format!(
                "a READ before the free ended with {status}"
            )));
        }
        self.compare(host.0, &kept, "a READ before the free")?;
        self.bench.free(&mut memory)?;
        // If the memory was given back, this allocation replaces it. A failure to allocate is
        // acceptable, too.
        let next = match self.bench.gpu_memory(self.plan.size) {
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
                let seen = self.contents(host.0)?;
                let is_next = next
                    .as_ref()
                    .is_some_and(|(_, bytes)| difference(bytes, &seen).is_none());
                if difference(&kept, &seen).is_none() {
                    Ok("held: the memory and its bytes stay until it is deregistered".to_owned())
                } else if is_next {
                    Err(failed(
                        "the device still reaches freed memory, which another allocation has by now",
                    ))
                } else {
                    Err(failed(
                        "the device still reaches freed memory, which has other bytes by now",
                    ))
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
            let still = self.bench.registrations(process);
            let pinned = self.bench.pinned();
            let listed_still = listed && still.as_ref().is_ok_and(|&count| count > 0);
            let pinned_still = match (&before, &pinned) {
                (Ok(before), Ok(now)) => now > before,
                _ => false,
            };
            if !listed_still && !pinned_still {
                break;
            }
            if self.bench.now() > deadline {
                let mut left = Vec::new();
                if let (true, Ok(count)) = (listed_still, still) {
                    left.push(format!(
                        "{count} registrations of process {process} are listed"
                    ));
                }
                if let (true, Ok(before), Ok(now)) = (pinned_still, &before, pinned) {
                    left.push(format!(
                        "{now} bytes of BAR1 are pinned, {before} were before"
                    ));
                }
                return Err(failed(format!("after the kill {}", left.join(", "))));
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
        // The resources of the killed holder are available again.
        let memory = self.bench.gpu_memory(self.plan.size)?;
        let region = self.bench.register(way, &memory)?;
        self.bench.deregister(region)?;
        Ok(Found::text(reported.join("; ")))
    }
}

#[cfg(test)]
mod tests;
