// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `gdr bench`: measures the module's cost in the VM (instructions, kernel memory, and concurrent
//! registrations). `runner bench` runs `gdr bench` with our module and with NVIDIA's
//! nvidia-peermem. The program prints a line `figure NAME VALUE` for each figure.
//!
//! Instruction counts need a machine whose clock counts instructions (`--icount --smp 1`), where
//! one nanosecond is one instruction. Concurrent threads need several processors.

pub(crate) mod alive;
pub(crate) mod datapath;
pub(crate) mod probe;

use std::fs::File;
use std::io::Write;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicU8};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};
use clap::{Args, ValueEnum};

use self::alive::{at_zero, Pages};
use self::probe::{Reading, Watch};
use crate::cases::register::{allocate_aligned, peer_region};
use crate::counters::Counters;
use crate::gpu::{GRANULE, PAGE};
use crate::knobs::Parameter;
use crate::lab::{Lab, PinMode, Setup};
use crate::{counters, sys};

const GIB: u64 = 1 << 30;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Parts to measure
    #[arg(value_enum, required = true)]
    parts: Vec<Part>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Part {
    /// Instructions and kernel memory of one registration, including kernel functions that the
    /// module calls
    Registrations,
    /// Instructions to free an allocation that has many regions
    Revocation,
    /// Threads that register concurrently, compared with the same number of threads that only call
    /// nvidia.ko
    Threads,
}

/// Memory to register. Each row has a name, the stand-in's name of the memory layout, the length in
/// bytes, and the number of samples. The result is the minimum of the samples, because interrupts
/// are not part of the module's cost.
const SHAPES: [(&str, &str, u64, usize); 4] = [
    ("64KiB", "contiguous", PAGE, 16),
    ("1GiB-contiguous", "contiguous", GIB, 3),
    ("1GiB-fragmented", "64k", GIB, 2),
    ("64GiB-contiguous", "contiguous", 64 * GIB, 1),
];

/// Numbers of regions to measure. All regions are on the allocation that is freed.
const REVOKED: [usize; 4] = [1, 100, 1_000, 10_000];

const THREADS: [usize; 2] = [4, 16];

pub(crate) fn run(options: &Options, setup: &Setup) -> Result<()> {
    let lab = Lab::open(setup)?;
    for part in &options.parts {
        match part {
            Part::Registrations => registrations(&lab)?,
            Part::Revocation if setup.mode() == PinMode::Revocable => {
                for regions in REVOKED {
                    figure(&format!("free.{regions}"), free(&lab, regions)?);
                }
            }
            Part::Revocation => {}
            Part::Threads => crowds(&lab)?,
        }
    }
    Ok(())
}

fn figure(name: &str, value: impl std::fmt::Display) {
    println!("figure {name} {value}");
}

/// Reports the module's cost of a registration and its deregistration: instructions and kernel
/// memory. The instructions include the kernel functions that the module calls.
fn registrations(lab: &Lab) -> Result<()> {
    // The module's first registration for a GPU allocates data about the GPU, and is not measured.
    let first = lab.allocate_gpu(usize::try_from(GRANULE)?)?;
    let page = first.span(0, usize::try_from(PAGE)?)?;
    drop(lab.near.reg_mr(page)?);
    for (name, layout, bytes, samples) in SHAPES {
        let _layout = Parameter::set("nvidia", "layout", layout)?;
        let size = bytes.next_power_of_two().max(GRANULE);
        let memory = allocate_aligned(lab, bytes, size)?;
        let span = memory.span(0, usize::try_from(bytes)?)?;
        let before = Counters::read()?;
        let watch = Watch::begin()?;
        let region = lab.near.reg_mr(span)?;
        let held = watch.read()?;
        let entries = peer_region(&lab.near, &region)?.entries;
        drop(region);
        at_zero(&watch)?;
        drop(watch);
        let activity = Counters::read()?.activity(&before)?;
        let mut least = (i64::MAX, u64::MAX);
        for _ in 0..samples {
            probe::reset()?;
            drop(lab.near.reg_mr(span)?);
            let reading = Reading::take()?;
            least = least.min((reading.own()?, reading.mapping()));
        }
        let say = |what: &str, value: u64| figure(&format!("{name}.{what}"), value);
        say("instructions", u64::try_from(least.0)?);
        say("mapping", least.1);
        say("bytes", held.held);
        say("entries", entries);
        say("pins", activity.pins);
        say("unpins", activity.unpins);
    }
    Ok(())
}

/// Frees an allocation that has `number` regions. Returns the duration, in nanoseconds of the
/// machine's clock.
fn free(lab: &Lab, number: usize) -> Result<u128> {
    let mut pages = Pages::of(lab, number)?;
    let regions = pages.register(lab)?;
    let before = Counters::read()?;
    let begin = Instant::now();
    pages.memory.free()?;
    let elapsed = begin.elapsed();
    counters::callbacks_are(&before, number as u64)?;
    let alive = counters::peer_regions(lab.near.name())?
        .iter()
        .filter(|region| region.state == "valid")
        .count();
    ensure!(alive == 0, "{alive} of {number} regions are still valid");
    drop(regions);
    Ok(elapsed.as_nanos())
}

/// Length of a window in which the rounds of all threads are counted. Windows of
/// [`Work::Register`] and [`Work::Pin`] alternate.
const WINDOW: Duration = Duration::from_millis(400);
const WINDOWS: usize = 5;

/// Time limit until each thread has done a round.
const PATIENCE: Duration = Duration::from_secs(60);

/// Duration of the stand-in's pin and unpin, which sleep with the stand-in's lock held. The values
/// are 20 times the published 70 and 38 µs of a V100, because an emulated processor is about 20
/// times slower.
const PRICES: [(&str, &str); 2] = [("pin_us", "1400"), ("unpin_us", "760")];

/// Work that a thread repeats on its own 64 KiB of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Work {
    Register,
    /// Calls each nvidia.ko function of a registration once, without a client, ib_core or NIC
    /// (`tests/bench/provider.c`).
    Pin,
    End,
}

/// Number of rounds of work, and the time that these rounds took.
#[derive(Default)]
struct Rate {
    rounds: u64,
    elapsed: Duration,
}

impl Rate {
    fn add(&mut self, (rounds, elapsed): (u64, Duration)) {
        self.rounds += rounds;
        self.elapsed += elapsed;
    }

    /// Returns the number of rounds in 1,000 seconds.
    fn get(&self) -> u128 {
        u128::from(self.rounds) * 1_000_000 / self.elapsed.as_millis().max(1)
    }
}

/// The work that all threads must do now, and the number of rounds that each thread has done.
struct Board {
    order: AtomicU8,
    done: Vec<AtomicU64>,
}

impl Board {
    fn order(&self, work: Work) {
        self.order.store(work as u8, Relaxed);
    }

    fn is_ordered(&self, work: Work) -> bool {
        self.order.load(Relaxed) == work as u8
    }

    fn read(&self) -> Vec<u64> {
        self.done.iter().map(|done| done.load(Relaxed)).collect()
    }

    /// Counts the rounds of all threads during [`WINDOW`], which begins once every thread does
    /// `work`. Also returns the measured length of the window, because the sleep lasts longer on a
    /// busy host.
    fn rounds(&self, work: Work) -> Result<(u64, Duration)> {
        self.order(work);
        let begun = self.read();
        let all_at_it = || Ok(self.read().iter().zip(&begun).all(|(now, then)| now > then));
        ensure!(sys::wait_until(PATIENCE, all_at_it)?, "a thread is idle");
        let sum = || self.read().into_iter().sum::<u64>();
        let (begin, before) = (Instant::now(), sum());
        thread::sleep(WINDOW);
        let (elapsed, after) = (begin.elapsed(), sum());
        Ok((after - before, elapsed))
    }
}

/// Reports the rates of threads that register and of threads that only call nvidia.ko, in rounds in
/// 1,000 seconds. The two rates should be close, because a registering thread should wait only for
/// nvidia.ko's lock.
fn crowds(lab: &Lab) -> Result<()> {
    let _prices = PRICES
        .iter()
        .map(|(name, value)| Parameter::set("nvidia", name, value))
        .collect::<Result<Vec<_>>>()?;
    for number in THREADS {
        let board = Board {
            order: AtomicU8::new(Work::Register as u8),
            done: (0..number).map(|_| AtomicU64::new(0)).collect(),
        };
        let (mut registered, mut allowed) = (Rate::default(), Rate::default());
        thread::scope(|scope| {
            let threads: Vec<_> = board
                .done
                .iter()
                .map(|done| scope.spawn(|| toil(lab, &board, done)))
                .collect();
            let watched: Result<()> = (0..WINDOWS).try_for_each(|_| {
                registered.add(board.rounds(Work::Register)?);
                allowed.add(board.rounds(Work::Pin)?);
                Ok(())
            });
            board.order(Work::End);
            for thread in threads {
                thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            }
            watched
        })?;
        figure(&format!("threads.{number}.registered"), registered.get());
        figure(&format!("threads.{number}.allowed"), allowed.get());
    }
    Ok(())
}

/// Runs the rounds of one thread.
fn toil(lab: &Lab, board: &Board, done: &AtomicU64) -> Result<()> {
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
            drop(lab.near.reg_mr(span)?);
        } else {
            provider.write_all(address.as_bytes()).context("pin")?;
        }
        done.fetch_add(1, Relaxed);
    }
    Ok(())
}
