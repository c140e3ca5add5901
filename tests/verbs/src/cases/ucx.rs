// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! UCX by itself, as NVIDIA gave it out: its `ucx_perftest` between two processes with GPU memory at both ends, and what its
//! cache of registrations keeps when memory is freed (`tests/cuda/ucp.c`).
//!
//! Where UCX finds no peermem module it moves the same bytes by copies through the host: see [`cuda`](super::cuda).

use std::path::Path;
use std::process::Command;

use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;
use serde_json::Value;

use super::consumers;
use super::ctl;
use super::cuda::Consumers;
use super::cuda::Ends;
use super::cuda::Pair;
use super::cuda::Start;
use super::cuda::PATIENCE;
use crate::bench::datapath;
use crate::counters::Counters;
use crate::ktap::note;
use crate::lab::Peermem;
use crate::lab::PinMode;
use crate::sys;
use crate::sys::Running;

/// Where a server of `ucx_perftest` listens.
const PORT: u16 = 13337;

/// Each end registers one buffer to send from and one to receive into, whatever the test uses.
const BUFFERS: usize = 4;

const PAIRS: &[Pair] = &[
    Pair {
        name: "ucx.tag_lat",
        program: "ucx_perftest -t tag_lat -s 64 -n 100 -w 5",
        sent: [100 << 6, 100 << 6],
    },
    Pair {
        name: "ucx.tag_lat_8m",
        program: "ucx_perftest -t tag_lat -s 8388608 -n 3 -w 1",
        sent: [3 << 23, 3 << 23],
    },
    Pair {
        name: "ucx.tag_bw_64k",
        program: "ucx_perftest -t tag_bw -s 65536 -n 100 -w 5",
        sent: [100 << 16, 0],
    },
    Pair {
        name: "ucx.tag_bw_8m",
        program: "ucx_perftest -t tag_bw -s 8388608 -n 5 -w 1",
        sent: [5 << 23, 0],
    },
    Pair {
        name: "ucx.put_bw_64k",
        program: "ucx_perftest -t ucp_put_bw -s 65536 -n 100 -w 5",
        sent: [100 << 16, 0],
    },
    Pair {
        name: "ucx.put_bw_8m",
        program: "ucx_perftest -t ucp_put_bw -s 8388608 -n 5 -w 1",
        sent: [5 << 23, 0],
    },
    Pair {
        name: "ucx.get_64k",
        program: "ucx_perftest -t ucp_get -s 65536 -n 20 -w 2",
        sent: [0, 20 << 16],
    },
    Pair {
        name: "ucx.get_8m",
        program: "ucx_perftest -t ucp_get -s 8388608 -n 3 -w 1",
        sent: [0, 3 << 23],
    },
];

const CACHE: &str = "ucx.cache";
const NO_CACHE: &str = "ucx.no_cache";

/// What `ucp.c` registers, and how often it sends before it frees.
const CACHED: u64 = 8 << 20;
const TIMES: u64 = 10;

/// What it says before it stops, and what of its memory is registered then where there is a cache.
const STEPS: &[(&str, Kept)] = &[
    ("sent ten times", Kept::InUse),
    ("freed", Kept::Freed),
    ("looked for work", Kept::Freed),
    ("sent other memory", Kept::InUse),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    InUse,
    Freed,
}

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    PAIRS.iter().map(|pair| pair.name).chain([CACHE, NO_CACHE])
}

impl Consumers {
    pub(super) fn ucx(&self, name: &str) -> Result<()> {
        match name {
            CACHE => self.cache(true),
            NO_CACHE => self.cache(false),
            name => PAIRS
                .iter()
                .filter(|pair| pair.name == name)
                .try_for_each(|pair| self.ucx_perftest(pair)),
        }
    }

    /// A program of UCX's directory, which takes this device.
    fn ucx_command(&self, program: &str, device: &str) -> Result<Command> {
        let ucx = self.places.ucx.as_deref().context("no UCX")?;
        let mut command = self
            .places
            .over_ucx(&ucx.join("bin").join(program), device, None)?;
        command.env("UCX_LOG_LEVEL", "debug");
        Ok(command)
    }

    fn ucx_perftest(&self, pair: &Pair) -> Result<()> {
        let [near, far] = &self.setup.devices;
        let mut words = pair.program.split(' ');
        let program = words.next().unwrap_or_default();
        let words: Vec<&str> = words.collect();
        let end = |device: &str, server: &[&str]| {
            let mut command = self.ucx_command(program, device)?;
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
            // Its cache deregisters what it is told that is freed, once it is used again or goes.
            frees_first: true,
        };
        let seen = self.see(ends, &start, BUFFERS)?;
        seen.moved(&pair.sent)?;
        for (device, end) in [(near, &seen.client), (far, &seen.server)] {
            self.detected(device, &end.output)?;
        }
        let end = seen.client.output.lines().rev();
        let figures = end.filter_map(|line| line.strip_prefix("Final:")).next();
        note("figure", figures.context("no result")?.trim());
        Ok(())
    }

    /// UCX says by what it knows that it may register GPU memory with the device, or that it knows of nothing.
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
        let is_there = self.setup.peermem != Peermem::None;
        ensure!(
            found.as_deref() == expected
                && found.is_some() == is_there
                && (is_there || missed.is_some()),
            "{device}: detected by {found:?}, not by {missed:?}, where {expected:?} was expected"
        );
        note("detected_by", found.as_deref().unwrap_or("nothing"));
        Ok(())
    }

    /// One process sends GPU memory to itself, frees it, is idle, and sends other memory. Its functions of CUDA's begin with
    /// what UCX can patch, or there would be no cache.
    fn cache(&self, wanted: bool) -> Result<()> {
        let mut command = self.ucx_command("ucp", &self.setup.devices[0])?;
        if !wanted {
            command.env("UCX_RCACHE_ENABLE", "n");
        }
        let start = Start::now()?;
        let mut program = Running::start(&mut command)?;
        for (step, kept) in STEPS {
            stops(&mut program, step)?;
            let halted = sys::Stopped::stop(program.id())?;
            self.kept(&start, wanted.then_some(*kept))
                .with_context(|| (*step).to_owned())?;
            drop(halted);
        }
        let ended = program.finish(PATIENCE)?;
        ensure!(ended.success(), "{}", ended.tail(10));
        let activity = Counters::read()?.activity(&start.counters)?;
        note("pins", activity.pins);
        note("callbacks", activity.callbacks);

        let registrations = if wanted { 2 } else { TIMES + 1 };
        let pins = match self.setup.peermem {
            Peermem::None => 0,
            // It pins each twice.
            Peermem::Nvidia => 2 * registrations,
            Peermem::Ours => registrations,
        };
        let revoked = wanted && self.setup.peermem != Peermem::None && !self.is_persistent();
        ensure!(
            activity.pins == pins && activity.callbacks == u64::from(revoked),
            "{activity:?}, where {pins} pins were expected"
        );
        Ok(())
    }

    fn is_persistent(&self) -> bool {
        self.setup.mode() == PinMode::Persistent
    }

    /// What is pinned and listed of the program's memory, of which the cache has a registration or not.
    fn kept(&self, start: &Start, kept: Option<Kept>) -> Result<()> {
        let pinned = Counters::read()?.since(&start.counters, "bar_bytes_pinned")?;
        let registered = kept.filter(|_| self.setup.peermem != Peermem::None);
        let expected = match registered {
            Some(Kept::Freed) if !self.is_persistent() => 0,
            Some(_) => CACHED,
            None => 0,
        };
        ensure!(
            pinned == expected,
            "{pinned} bytes are pinned, where {expected} were expected"
        );
        if self.setup.peermem != Peermem::Ours {
            return Ok(());
        }
        let listed: Vec<(Value, Value)> = ctl::registrations(&[])?
            .iter()
            .map(|one| (one["state"].clone(), one["freed_bytes"].clone()))
            .collect();
        let expected = registered.map(|kept| match kept {
            Kept::InUse => ("mapped".into(), 0.into()),
            Kept::Freed if self.is_persistent() => ("mapped".into(), CACHED.into()),
            Kept::Freed => ("revoked".into(), Value::Null),
        });
        note("listed", format_args!("{listed:?}"));
        ensure!(
            listed == Vec::from_iter(expected.clone()),
            "{listed:?}, where {expected:?} was expected"
        );
        Ok(())
    }
}

/// Waits until a program has said this last, and has stopped itself.
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
        "it never came to {said:?}:\n{}",
        program.so_far()?
    );
    Ok(())
}
