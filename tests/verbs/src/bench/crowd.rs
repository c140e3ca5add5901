// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Threads and processes that register and deregister at once, and what the provider's own lock allows as many of them.

use std::fs::File;
use std::io::Write;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};
use peermem_figures::{Crowd, Line, Rate, Workers};

use super::processes::Processes;
use super::{nanoseconds, prices, say};
use crate::gpu::{GRANULE, PAGE};
use crate::lab::{Lab, Setup};
use crate::rdma::full_access;
use crate::sys;
use crate::sys::SharedWords;

/// For how long the work of all is counted.
const WINDOW: Duration = Duration::from_millis(400);

/// How long it may take until each has done something.
const PATIENCE: Duration = Duration::from_secs(60);

/// What each of them does again and again, with 64 KiB of memory of its own, until told otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Work {
    /// Registers and deregisters.
    Register,
    /// Has the provider do what a registration's life needs of it (`tests/bench/provider.c`).
    Pin,
    /// Nothing any more.
    End,
}

/// Measures with each number of workers, and prints.
pub(super) fn measure(setup: &Setup, numbers: &[usize], repeats: u32) -> Result<()> {
    let _prices = prices()?;
    for workers in Workers::ALL {
        for &number in numbers {
            let board = Board::new(number)?;
            let watch = || {
                (0..repeats).try_for_each(|_| {
                    say(&Line::Crowd(Crowd {
                        workers,
                        number: u64::try_from(number)?,
                        reached: board.watch(Work::Register)?,
                        allowed: board.watch(Work::Pin)?,
                    }))
                })
            };
            match workers {
                Workers::Processes => {
                    let toil = |index| toil(&Lab::open(setup)?, &board, index);
                    let processes = Processes::start(number, toil)?;
                    watch()?;
                    board.order(Work::End);
                    processes.join()?;
                }
                Workers::Threads => {
                    let lab = Lab::open(setup)?;
                    thread::scope(|scope| {
                        let (lab, board) = (&lab, &board);
                        let threads: Vec<_> = (0..number)
                            .map(|index| scope.spawn(move || toil(lab, board, index)))
                            .collect();
                        let watched = watch();
                        board.order(Work::End);
                        for thread in threads {
                            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
                        }
                        watched
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// What workers and whoever counts share: what is to be done, and how often each has done something.
struct Board(SharedWords);

impl Board {
    fn new(number: usize) -> Result<Self> {
        Ok(Self(SharedWords::new(1 + number)?))
    }

    fn order(&self, work: Work) {
        self.0.all()[0].store(work as u64, Relaxed);
    }

    fn is_ordered(&self, work: Work) -> bool {
        self.0.all()[0].load(Relaxed) == work as u64
    }

    fn done(&self) -> &[AtomicU64] {
        &self.0.all()[1..]
    }

    fn read(&self) -> Vec<u64> {
        self.done().iter().map(|done| done.load(Relaxed)).collect()
    }

    /// Has all do that, and counts once all are at it.
    fn watch(&self, work: Work) -> Result<Rate> {
        self.order(work);
        let begun = self.read();
        let at_it = || {
            Ok(begun
                .iter()
                .zip(self.read())
                .all(|(begun, now)| now > *begun))
        };
        ensure!(
            sys::wait_until(PATIENCE, at_it)?,
            "not all workers have done something in {} s",
            PATIENCE.as_secs()
        );
        let sum = || self.read().into_iter().sum::<u64>();
        let (begin, before) = (Instant::now(), sum());
        thread::sleep(WINDOW);
        let (elapsed, after) = (begin.elapsed(), sum());
        Ok(Rate {
            lives: after - before,
            elapsed_ns: nanoseconds(elapsed)?,
        })
    }
}

/// A worker's part.
fn toil(lab: &Lab, board: &Board, index: usize) -> Result<()> {
    let memory = lab.allocate_gpu(usize::try_from(GRANULE)?)?;
    let span = memory.span(0, usize::try_from(PAGE)?)?;
    let address = span.addr().to_string();
    let path = format!("/sys/kernel/debug/bench/{}", lab.setup.mode());
    let mut provider = File::options()
        .write(true)
        .open(&path)
        .with_context(|| path.clone())?;
    while !board.is_ordered(Work::End) {
        if board.is_ordered(Work::Register) {
            drop(lab.near.register(span, full_access())?);
        } else {
            provider.write_all(address.as_bytes()).context("pin")?;
        }
        board.done()[index].fetch_add(1, Relaxed);
    }
    Ok(())
}
