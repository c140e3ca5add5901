// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `gdr bench`: what the module that is loaded costs. Prints one line of JSON for each thing measured; `tests/rig` runs it with
//! each module in turn, and compares.
//!
//! Costs are taken by `tests/bench` around the module's functions. They are instructions in a machine that counts those
//! (`-icount`), and cycles of the host elsewhere.

mod cost;
mod pgsz;
mod probe;
mod revocation;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::lab::Flavour;
use crate::lab::Lab;
use crate::lab::Setup;
use crate::measure::parse_length;

/// The order of memory in which no two pages lie side by side.
const FRAGMENTED: &str = "64k";

/// What is measured.
#[derive(Debug, Args)]
pub(crate) struct Options {
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
    /// Registrations of up to 1 GiB that are measured; larger ones are once
    #[arg(long, default_value_t = 5)]
    repeats: u32,
}

/// A line of the output.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line {
    Calibration(probe::Calibration),
    Registration(cost::Registration),
    Memory(cost::Memory),
    Table(cost::Table),
    Revocation(revocation::Revocation),
}

fn say(line: &Line) -> Result<()> {
    println!("{}", serde_json::to_string(line)?);
    Ok(())
}

/// Measures, and prints.
pub(crate) fn run(options: &Options, setup: &Setup) -> Result<()> {
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
    if setup.flavour() == Flavour::Revocable {
        revocation::measure(&lab, &options.regions, options.repeats)?;
    }
    Ok(())
}
