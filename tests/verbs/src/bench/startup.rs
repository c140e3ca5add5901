// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The start of a job as NCCL's: processes, one for each GPU of a host, that register all their buffers at once and keep them.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use peermem_figures::{Line, Startup};

use super::processes::Processes;
use super::{nanoseconds, prices, say};
use crate::gpu::PAGE;
use crate::lab::{Lab, Setup};
use crate::rdma::full_access;
use crate::sys;
use crate::sys::SharedWords;

const PROCESSES: usize = 8;

/// A connection has a buffer of 4 MiB, and 64 KiB by which its ends tell each other how far they are.
const BUFFER: usize = 4 << 20;
const FLAGS: usize = PAGE as usize;

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Steps that all take together.
struct Steps(SharedWords);

/// A step, and who has come to its end.
const READY: usize = 0;
const REGISTERED: usize = 1;
const DEREGISTERED: usize = 2;
const STEPS: usize = 3;

impl Steps {
    fn new() -> Result<Self> {
        Ok(Self(SharedWords::new(STEPS + 1)?))
    }

    /// The step that may be taken.
    fn now(&self) -> &AtomicU64 {
        &self.0.all()[STEPS]
    }

    /// Comes to the end of a step, and waits until the next may be taken.
    fn end(&self, step: usize) -> Result<()> {
        self.0.all()[step].fetch_add(1, SeqCst);
        let next = u64::try_from(step + 1)?;
        let may = || Ok(self.now().load(SeqCst) >= next);
        ensure!(sys::wait_until(PATIENCE, may)?, "step {next} never came");
        Ok(())
    }

    /// Lets all take a step; for how long they took it.
    fn take(&self, step: usize) -> Result<u64> {
        let begin = Instant::now();
        self.now().store(u64::try_from(step)?, SeqCst);
        let all = || Ok(self.0.all()[step].load(SeqCst) == PROCESSES as u64);
        ensure!(
            sys::wait_until(PATIENCE, all)?,
            "not all processes came to the end of step {step}"
        );
        nanoseconds(begin.elapsed())
    }
}

/// Measures once with so many connections of each process, and prints.
pub(super) fn measure(setup: &Setup, connections: usize) -> Result<()> {
    let _prices = prices()?;
    let steps = Steps::new()?;
    let processes = Processes::start(PROCESSES, |_| start_and_end(setup, connections, &steps))?;
    steps.take(READY)?;
    let register_ns = steps.take(REGISTERED)?;
    let deregister_ns = steps.take(DEREGISTERED)?;
    steps.now().store(u64::MAX, SeqCst);
    processes.join()?;
    say(&Line::Startup(Startup {
        processes: u64::try_from(PROCESSES)?,
        regions: u64::try_from(PROCESSES * connections * 2)?,
        register_ns,
        deregister_ns,
    }))
}

fn start_and_end(setup: &Setup, connections: usize, steps: &Steps) -> Result<()> {
    let lab = Lab::open(setup)?;
    let memory = lab.allocate_gpu(connections * (BUFFER + FLAGS))?;
    steps.end(READY)?;
    let mut regions = Vec::with_capacity(2 * connections);
    for index in 0..connections {
        for (at, len) in [
            (index * BUFFER, BUFFER),
            (connections * BUFFER + index * FLAGS, FLAGS),
        ] {
            regions.push(lab.near.register(memory.span(at, len)?, full_access())?);
        }
    }
    steps.end(REGISTERED)?;
    drop(regions);
    steps.end(DEREGISTERED)
}
