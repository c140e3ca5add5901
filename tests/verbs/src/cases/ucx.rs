// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Unmodified UCX by itself: its `ucx_perftest` between two processes with GPU memory at both ends,
//! and its cache of registrations when memory is freed (`tests/cuda/ucp.c`). Both programs also run
//! with memory of several allocations, as with PyTorch's expandable segments.
//!
//! Without a peermem module, UCX moves the same bytes by copies through the host: see
//! [`cuda`](super::cuda). UCX looks for a module's files, or registers dma-bufs itself, so a
//! preloaded library changes nothing.

use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Context, Result};
use serde_json::Value;

use super::buffers::{Parts, ONE};
use super::cuda::{pairs, Consumers, Ends, Pair, Start, PATIENCE};
use super::{consumers, ctl};
use crate::bench::datapath;
use crate::counters::Counters;
use crate::ktap::note;
use crate::lab::{Peermem, PinMode};
use crate::sys;
use crate::sys::Running;

/// TCP port of a `ucx_perftest` server.
const PORT: u16 = 13337;

/// Number of buffers: each end registers one to send from and one to receive into, in every test.
const BUFFERS: usize = 4;

const PAIRS: &[Pair] = pairs![
    "ucx.tag_lat": "ucx_perftest -t tag_lat -s 64 -n 100 -w 5" => [100 << 6, 100 << 6],
    "ucx.tag_lat_8m": "ucx_perftest -t tag_lat -s 8388608 -n 3 -w 1" => [3 << 23, 3 << 23],
    "ucx.tag_bw_64k": "ucx_perftest -t tag_bw -s 65536 -n 100 -w 5" => [100 << 16, 0],
    "ucx.tag_bw_8m": "ucx_perftest -t tag_bw -s 8388608 -n 5 -w 1" => [5 << 23, 0],
    "ucx.put_bw_64k": "ucx_perftest -t ucp_put_bw -s 65536 -n 100 -w 5" => [100 << 16, 0],
    "ucx.put_bw_8m": "ucx_perftest -t ucp_put_bw -s 8388608 -n 5 -w 1" => [5 << 23, 0],
    "ucx.get_64k": "ucx_perftest -t ucp_get -s 65536 -n 20 -w 2" => [0, 20 << 16],
    "ucx.get_8m": "ucx_perftest -t ucp_get -s 8388608 -n 3 -w 1" => [0, 3 << 23],
];

/// Tests that also run with buffers of several allocations, with their names in that case.
const OF_PARTS: &[(&str, &str)] = &[
    ("ucx.tag_bw_8m", "ucx.parts_tag_bw_8m"),
    ("ucx.put_bw_8m", "ucx.parts_put_bw_8m"),
    ("ucx.get_8m", "ucx.parts_get_8m"),
];

/// Size of an allocation in a buffer of several allocations, in bytes.
const PART: u64 = 2 << 20;
const PART_MIB: &str = "2";

/// Parts of a buffer of 8 MiB. There are five parts, because `ucx_perftest` allocates a few bytes
/// more than it sends.
const FIVE: Parts = Parts {
    count: 5,
    refused: 4,
};
const FOUR: Parts = Parts {
    count: 4,
    refused: 3,
};

/// `ucx_perftest`'s message when it cannot register memory.
const REFUSED: &str = "Failed to run test: Out of memory";

/// A case with `ucp.c`.
struct Way {
    name: &'static str,
    registrations: u64,
    /// `true` if UCX may cache registrations.
    is_cached: bool,
    parts: Parts,
    /// Messages that the program prints before it stops itself. Each message comes with the
    /// expected state of the program's memory if UCX caches registrations.
    steps: &'static [(&'static str, Kept)],
}

/// Makes the table of cases with `ucp.c`. A row has the values of the fields of [`Way`], in their
/// order.
macro_rules! ways {
    ($($name:literal, $registrations:expr, $is_cached:expr, $parts:expr, $steps:expr;)+) => {
        &[$(Way {
            name: $name,
            registrations: $registrations,
            is_cached: $is_cached,
            parts: $parts,
            steps: $steps,
        }),+]
    };
}

const WAYS: &[Way] = ways![
    "ucx.cache", 2, true, ONE, STEPS;
    "ucx.no_cache", TIMES + 1, false, ONE, STEPS;
    "ucx.parts_cache", 3, true, FOUR, STEPS_OF_PARTS;
];

/// Number of bytes that `ucp.c` registers. `ucp.c` sends the memory [`TIMES`] times before it frees
/// the memory.
const CACHED: u64 = 8 << 20;
const TIMES: u64 = 10;

const STEPS: &[(&str, Kept)] = &[
    ("sent ten times", Kept::InUse),
    ("freed", Kept::Freed),
    ("looked for work", Kept::Freed),
    ("sent other memory", Kept::InUse),
];

const STEPS_OF_PARTS: &[(&str, Kept)] = &[
    ("sent ten times", Kept::InUse),
    ("unmapped a part", Kept::PartFreed),
    ("sent with another part", Kept::InUse),
    ("freed", Kept::Freed),
    ("looked for work", Kept::Freed),
    ("sent other memory", Kept::InUse),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    InUse,
    /// One part is freed, and its addresses stay reserved.
    PartFreed,
    Freed,
}

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let pairs = PAIRS.iter().map(|pair| pair.name);
    let of_parts = OF_PARTS.iter().map(|(_, name)| *name);
    pairs.chain(of_parts).chain(WAYS.iter().map(|way| way.name))
}

impl Consumers {
    pub(super) fn ucx(&self, name: &str) -> Result<()> {
        let of_parts = OF_PARTS.iter().find(|(_, own)| *own == name);
        let (called, parts) = of_parts.map_or((name, ONE), |(pair, _)| (*pair, FIVE));
        PAIRS
            .iter()
            .filter(|pair| pair.name == called)
            .try_for_each(|pair| self.ucx_perftest(pair, parts))?;
        WAYS.iter()
            .filter(|way| way.name == name)
            .try_for_each(|way| self.cache(way))
    }

    /// Returns the command for a program of UCX's directory that uses `device`.
    fn ucx_command(&self, program: &str, device: &str) -> Result<Command> {
        let ucx = self.places.ucx.as_deref().context("no UCX")?;
        let mut command = self
            .places
            .over_ucx(&ucx.join("bin").join(program), device, None)?;
        command.env("UCX_LOG_LEVEL", "debug");
        Ok(command)
    }

    fn ucx_perftest(&self, pair: &Pair, parts: Parts) -> Result<()> {
        let [near, far] = &self.setup.devices;
        let mut words = pair.program.split(' ');
        let program = words.next().unwrap_or_default();
        let words: Vec<&str> = words.collect();
        let end = |device: &str, server: &[&str]| {
            let mut command = self.ucx_command(program, device)?;
            if parts.count > 1 {
                command.env("CUDA_PART_MIB", PART_MIB);
            }
            Running::start(command.args(&words).args(["-m", "cuda"]).args(server))
        };
        let start = Start::now()?;
        let mut server = end(far, &[])?;
        sys::wait_until(PATIENCE, || {
            Ok(datapath::listens(PORT)? || !server.is_running()?)
        })?;
        let ends = Ends {
            program,
            client: end(near, &["127.0.0.1"])?,
            server,
            // UCX's cache deregisters freed memory when the cache is next used or destroyed.
            frees_first: true,
            parts,
        };
        let seen = self.see(ends, &start, BUFFERS)?;
        for (device, end) in [(near, &seen.client), (far, &seen.server)] {
            self.detected(device, &end.output)?;
        }
        // `ucx_perftest` registers its memory before it sends anything.
        if self.setup.peermem == Peermem::Nvidia && parts.count > 1 {
            return seen.refused(REFUSED);
        }
        seen.moved(&pair.sent)?;
        let end = seen.client.output.lines().rev();
        let figures = end.filter_map(|line| line.strip_prefix("Final:")).next();
        note("figure", figures.context("no result")?.trim());
        Ok(())
    }

    /// Checks that UCX's message names the file by which UCX detects GPUDirect RDMA for the device,
    /// or says that UCX detects nothing.
    fn detected(&self, device: &str, said: &str) -> Result<()> {
        let by = |verdict: &str| {
            let words = format!(" {device}: cuda GPUDirect RDMA {verdict} by checking ");
            said.lines()
                .find_map(|line| Some(line.split_once(&words)?.1.trim().to_owned()))
        };
        let (found, missed) = (by("is detected"), by("is not detected"));
        let expected = [consumers::NV_MEM, consumers::MODULE]
            .into_iter()
            .find(|path| Path::new(path).exists());
        let is_there = self.setup.peermem.is_module();
        ensure!(
            found.as_deref() == expected
                && found.is_some() == is_there
                && (is_there || missed.is_some()),
            "{device}: UCX detected GPUDirect RDMA by {found:?} (expected {expected:?}), and reported no detection by \
             {missed:?}"
        );
        note("detected_by", found.as_deref().unwrap_or("nothing"));
        Ok(())
    }

    /// Runs a process that sends GPU memory to itself, frees the memory, is idle, and sends other
    /// memory. The stand-in's CUDA functions begin with code that UCX can patch, because UCX would
    /// not use its cache otherwise.
    fn cache(&self, way: &Way) -> Result<()> {
        let mut command = self.ucx_command("ucp", &self.setup.devices[0])?;
        if way.parts.count > 1 {
            command.arg(PART_MIB);
        }
        if !way.is_cached {
            command.env("UCX_RCACHE_ENABLE", "n");
        }
        let start = Start::now()?;
        let mut program = Running::start(&mut command)?;
        for (step, kept) in way.steps {
            stops(&mut program, step)?;
            let halted = sys::Stopped::stop(program.id())?;
            self.kept(&start, way, *kept)
                .with_context(|| (*step).to_owned())?;
            drop(halted);
        }
        let ended = program.finish(PATIENCE)?;
        ensure!(ended.success(), "{}", ended.tail(10));
        let activity = Counters::read()?.activity(&start.counters)?;
        note("pins", activity.pins);
        note("callbacks", activity.callbacks);

        let count = way.parts.count;
        let [pins, attempts] = way
            .parts
            .calls(self.setup.peermem, way.registrations, &activity);
        let is_revoked =
            way.is_cached && way.parts.are_registered(self.setup.peermem) && !self.is_persistent();
        // One part is freed under the first registration, and all parts are freed under the next
        // registration.
        let early = way.steps.iter().any(|(_, kept)| *kept == Kept::PartFreed);
        let callbacks = u64::from(is_revoked) * (u64::from(early) + count);
        let found = [activity.pins, activity.attempts, activity.callbacks];
        ensure!(found == [pins, attempts, callbacks]);
        Ok(())
    }

    fn is_persistent(&self) -> bool {
        self.setup.mode() == PinMode::Persistent
    }

    /// Checks the pins and the listed registrations of the program's memory.
    fn kept(&self, start: &Start, way: &Way, kept: Kept) -> Result<()> {
        let peermem = self.setup.peermem;
        let is_registered =
            peermem.is_module() && way.is_cached && way.parts.are_registered(peermem);
        let count = way.parts.count;
        // In revocable mode, freed memory is unpinned at once. All other memory stays pinned until
        // the deregistration.
        let (pins, pinned) = match kept {
            _ if !is_registered => (0, 0),
            Kept::Freed if !self.is_persistent() => (0, 0),
            Kept::PartFreed if !self.is_persistent() => (count - 1, CACHED - PART),
            _ => (count, CACHED),
        };
        let counters = Counters::read()?;
        let found = (
            counters.live_pins()?,
            counters.since(&start.counters, "bar_bytes_pinned")?,
        );
        ensure!(found == (pins, pinned));
        if self.setup.peermem != Peermem::Ours {
            return Ok(());
        }
        let listed: Vec<[Value; 3]> = ctl::registrations(&[])?
            .iter()
            .map(|one| ["chunks", "state", "freed_bytes"].map(|key| one[key].clone()))
            .collect();
        let (state, freed): (&str, Value) = match kept {
            Kept::Freed | Kept::PartFreed if !self.is_persistent() => ("revoked", Value::Null),
            Kept::Freed => ("mapped", CACHED.into()),
            // An unmapped part's addresses still belong to the process, so the module cannot detect
            // the free.
            Kept::InUse | Kept::PartFreed => ("mapped", 0.into()),
        };
        let expected = is_registered.then(|| [count.into(), state.into(), freed]);
        note("listed", format_args!("{listed:?}"));
        ensure!(listed == Vec::from_iter(expected), "{listed:?}");
        Ok(())
    }
}

/// Waits until a program has printed `said` and stopped itself.
fn stops(program: &mut Running, said: &str) -> Result<()> {
    let folder = format!("/proc/{}", program.id());
    let stopped = sys::wait_until(PATIENCE, || {
        if !program.is_running()? {
            return Ok(true);
        }
        Ok(sys::state(&folder) == Some('T') && program.so_far()?.lines().any(|line| line == said))
    })?;
    ensure!(
        stopped && program.is_running()?,
        "the program did not print {said:?} and stop:\n{}",
        program.so_far()?
    );
    Ok(())
}
