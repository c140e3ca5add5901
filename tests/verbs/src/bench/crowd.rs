// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Threads and processes that register and deregister at once, and what the provider's own lock allows as many of them.

use std::fs::File;
use std::io::Write;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use anyhow::anyhow;
use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;
use serde::Serialize;

use super::prices;
use super::processes::Processes;
use super::say;
use super::Line;
use crate::gpu::GRANULE;
use crate::gpu::PAGE;
use crate::lab::Flavour;
use crate::lab::Lab;
use crate::lab::Setup;
use crate::rdma::full_access;
use crate::sys;
use crate::sys::SharedWords;

/// For how long the work of all is counted.
const WINDOW: Duration = Duration::from_millis(500);

/// How long it may take until each has done something.
const PATIENCE: Duration = Duration::from_secs(60);

/// What works at once.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Workers {
    /// Each with a device that it has opened.
    Processes,
    /// All with one device.
    Threads,
}

/// What each of them does again and again, with 64 KiB of memory of its own.
#[derive(Debug, Clone, Copy)]
enum Work {
    /// Registers and deregisters.
    Register,
    /// Has the provider do what a registration's life needs of it (`tests/bench/provider.c`).
    Pin(Flavour),
}

/// What all of them got done.
#[derive(Debug, Serialize)]
struct Rate {
    lives: u64,
    elapsed_ns: u64,
}

/// One measurement.
#[derive(Debug, Serialize)]
pub(super) struct Crowd {
    workers: Workers,
    number: usize,
    /// Registrations that began and ended.
    reached: Rate,
    /// As many workers that call the provider and nothing else.
    allowed: Rate,
}

/// Measures with each number of workers, and prints.
pub(super) fn measure(setup: &Setup, numbers: &[usize], repeats: u32) -> Result<()> {
    let _prices = prices()?;
    for workers in [Workers::Processes, Workers::Threads] {
        for &number in numbers {
            for _ in 0..repeats {
                let of = |work| rate(setup, workers, number, work);
                say(&Line::Crowd(Crowd {
                    workers,
                    number,
                    reached: of(Work::Register)?,
                    allowed: of(Work::Pin(setup.flavour()))?,
                }))?;
            }
        }
    }
    Ok(())
}

/// What workers and whoever counts share: whether it is over, and what each has done.
struct Board(SharedWords);

impl Board {
    fn new(number: usize) -> Result<Self> {
        Ok(Self(SharedWords::new(1 + number)?))
    }

    fn end(&self) -> &AtomicU64 {
        &self.0.all()[0]
    }

    fn done(&self) -> &[AtomicU64] {
        &self.0.all()[1..]
    }

    fn sum(&self) -> u64 {
        self.done().iter().map(|done| done.load(Relaxed)).sum()
    }

    /// Counts once all are at work.
    fn watch(&self) -> Result<Rate> {
        let at_work = || Ok(self.done().iter().all(|done| done.load(Relaxed) > 0));
        ensure!(
            sys::wait_until(PATIENCE, at_work)?,
            "not all workers have done something in {} s",
            PATIENCE.as_secs()
        );
        let (begin, before) = (Instant::now(), self.sum());
        thread::sleep(WINDOW);
        let (elapsed, after) = (begin.elapsed(), self.sum());
        Ok(Rate {
            lives: after - before,
            elapsed_ns: u64::try_from(elapsed.as_nanos())?,
        })
    }
}

fn rate(setup: &Setup, workers: Workers, number: usize, work: Work) -> Result<Rate> {
    let board = Board::new(number)?;
    match workers {
        Workers::Processes => {
            let processes = Processes::start(number, |index| {
                toil(&Lab::open(setup)?, work, &board, index)
            })?;
            let rate = board.watch()?;
            board.end().store(1, Relaxed);
            processes.join()?;
            Ok(rate)
        }
        Workers::Threads => {
            let lab = Lab::open(setup)?;
            thread::scope(|scope| {
                let threads: Vec<_> = (0..number)
                    .map(|index| {
                        let (lab, board) = (&lab, &board);
                        scope.spawn(move || toil(lab, work, board, index))
                    })
                    .collect();
                let rate = board.watch();
                board.end().store(1, Relaxed);
                for thread in threads {
                    thread.join().map_err(|_| anyhow!("a thread panicked"))??;
                }
                rate
            })
        }
    }
}

/// Works until it is over.
fn toil(lab: &Lab, work: Work, board: &Board, index: usize) -> Result<()> {
    let memory = lab.allocate_gpu(usize::try_from(GRANULE)?)?;
    let span = memory.span(0, usize::try_from(PAGE)?)?;
    let mut life: Box<dyn FnMut() -> Result<()>> = match work {
        Work::Register => Box::new(|| {
            drop(lab.near.register(span, full_access())?);
            Ok(())
        }),
        Work::Pin(flavour) => {
            let path = format!("/sys/kernel/debug/bench/{flavour}");
            let mut file = File::options()
                .write(true)
                .open(&path)
                .with_context(|| path.clone())?;
            let address = span.addr().to_string();
            Box::new(move || file.write_all(address.as_bytes()).context("pin"))
        }
    };
    while board.end().load(Relaxed) == 0 {
        life()?;
        board.done()[index].fetch_add(1, Relaxed);
    }
    Ok(())
}
