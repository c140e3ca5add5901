// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `gdr bench`: what the module that is loaded costs. Prints one line of JSON for each thing measured; `tests/runner` runs it with
//! each module in turn, and compares.
//!
//! Registrations, revocations and the data path belong into a machine whose clock counts instructions (`-icount`): there they
//! repeat. The other parts are about several processors, and wall time.

pub(crate) mod alive;
mod cost;
mod crowd;
pub(crate) mod datapath;
mod pgsz;
pub(crate) mod probe;
mod processes;
mod revocation;
mod small;
mod startup;

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use peermem_figures::{Line, Part, Prices};

use crate::knobs::Parameter;
use crate::lab::{Lab, PinMode, Setup};
use crate::measure::parse_length;

/// The order of memory in which no two pages lie side by side.
const FRAGMENTED: &str = "64k";

/// What is measured.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What to measure
    #[arg(value_enum, required = true)]
    parts: Vec<Part>,
    /// Lengths to register: 64K, 1GiB, …
    #[arg(long, value_delimiter = ',', value_parser = parse_length, default_value = "64K,1M,16M,256M,1G,8G,64G")]
    lengths: Vec<u64>,
    /// Orders of the memory behind them, as the stand-in GPU names them
    #[arg(long, value_delimiter = ',', default_value = "contiguous,2m,64k")]
    layouts: Vec<String>,
    /// The longest that is registered where no two pages of the memory lie side by side: rxe takes long for those
    #[arg(long, value_parser = parse_length, default_value = "8G")]
    longest_fragmented: u64,
    /// Regions on one allocation that is then freed, if the module revokes
    #[arg(long, value_delimiter = ',', default_value = "1,10,100,1000,10000")]
    regions: Vec<usize>,
    /// Regions that are alive while one more is registered and deregistered
    #[arg(long, value_delimiter = ',', default_value = "0,1000,10000,100000")]
    alive: Vec<usize>,
    /// Threads, and processes, that register at once
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64")]
    threads: Vec<usize>,
    /// Connections of each process of a start-up, two regions each
    #[arg(long, default_value_t = 128)]
    connections: usize,
    /// How often each is measured; registrations of more than 1 GiB, and start-ups, are once
    #[arg(long, default_value_t = 5)]
    repeats: u32,
}

/// What a V100's provider takes for a pin and an unpin, in µs, and how many times that the stand-in is given: all else is
/// emulated (13 ns an instruction, where this was chosen), and so about as many times slower.
const PIN: u64 = 70;
const UNPIN: u64 = 38;
const SLOWER: u64 = 20;

/// For what is measured in wall time: what the stand-in is told to take for pins and unpins. Says it.
fn prices() -> Result<[Parameter; 2]> {
    let (pin_us, unpin_us) = (PIN * SLOWER, UNPIN * SLOWER);
    say(&Line::Prices(Prices { pin_us, unpin_us }))?;
    Ok([
        Parameter::set("nvidia", "pin_us", &pin_us.to_string())?,
        Parameter::set("nvidia", "unpin_us", &unpin_us.to_string())?,
    ])
}

fn say(line: &Line) -> Result<()> {
    println!("{}", serde_json::to_string(line)?);
    Ok(())
}

fn nanoseconds(time: Duration) -> Result<u64> {
    Ok(u64::try_from(time.as_nanos())?)
}

/// Measures, and prints.
pub(crate) fn run(options: &Options, setup: &Setup) -> Result<()> {
    for part in &options.parts {
        match part {
            Part::Registrations => registrations(options, setup)?,
            Part::Revocation if setup.mode() == PinMode::Revocable => {
                revocation::measure(&Lab::open(setup)?, &options.regions, options.repeats)?;
            }
            Part::Revocation => {}
            Part::Alive => alive::measure(&Lab::open(setup)?, &options.alive)?,
            Part::Threads => crowd::measure(setup, &options.threads, options.repeats)?,
            Part::Small => small::measure(setup, options.repeats)?,
            Part::Startup => startup::measure(setup, options.connections)?,
            Part::Datapath => datapath::measure(setup, options.repeats)?,
        }
    }
    Ok(())
}

fn registrations(options: &Options, setup: &Setup) -> Result<()> {
    let lab = Lab::open(setup)?;
    say(&Line::Calibration(probe::Reading::take()?.calibration()?))?;
    for layout in &options.layouts {
        for &bytes in &options.lengths {
            if layout == FRAGMENTED && bytes > options.longest_fragmented {
                continue;
            }
            cost::measure(&lab, layout, bytes, options.repeats)?;
        }
    }
    Ok(())
}
