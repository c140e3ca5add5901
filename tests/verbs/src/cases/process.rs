// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Several processes, and processes that do not clean up.

use anyhow::{ensure, Context, Result};

use crate::child::Process;
use crate::counters::Counters;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode};
use crate::{counters, ktap};

pub(super) const CASES: &[Case] = cases![
    "process.side_by_side" => side_by_side,
    "process.exit_with_live_regions" => exit_with_regions,
    "process.killed_with_live_regions" => killed,
    "process.killed_in_traffic" => killed_in_traffic,
    "process.one_dies_others_go_on" => one_dies,
];

fn side_by_side(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    const COUNT: u64 = 4;
    let mut children = (0..COUNT)
        .map(|index| Process::start(&lab.setup, lab.setup.seed + index, &["exercise", "4"]))
        .collect::<Result<Vec<_>>>()?;
    children.iter_mut().for_each(Process::go);
    for child in children {
        child.join()?;
    }
    note("processes", COUNT);
    Ok(())
}

/// Checks that the end of a process removes its registrations. In revocable mode, the memory is
/// freed before the registrations end, so callbacks come.
fn ends(lab: &Lab, regions: u64, end: impl FnOnce(Process) -> Result<()>) -> Result<()> {
    lab.needs_module()?;
    let before = Counters::read()?;
    let child = Process::start(&lab.setup, lab.setup.seed, &["hold", &regions.to_string()])?;
    counters::pins_are(regions).context("under the regions of the child")?;
    end(child)?;
    // Leaks are also detected after the case. This check distinguishes leaks from the objects that
    // the case itself holds.
    ktap::check_rest(&before)?;
    let is_revocable = lab.setup.mode() == PinMode::Revocable;
    counters::callbacks_are(&before, u64::from(is_revocable) * regions)
}

fn exit_with_regions(lab: &Lab) -> Result<()> {
    ends(lab, 8, |child| {
        let status = child.wait()?;
        ensure!(status.success(), "the child ended with {status}");
        Ok(())
    })
}

fn killed(lab: &Lab) -> Result<()> {
    for _ in 0..3 {
        ends(lab, 8, Process::kill)?;
    }
    Ok(())
}

fn killed_in_traffic(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let before = Counters::read()?;
    for requests in [1, 5, 25] {
        let mut child = Process::start(&lab.setup, lab.setup.seed, &["busy", "3"])?;
        child.has_moved(requests)?;
        child.kill()?;
        ktap::check_rest(&before).with_context(|| format!("killed after {requests} requests"))?;
    }
    Ok(())
}

fn one_dies(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let mut worker = Process::start(&lab.setup, lab.setup.seed, &["exercise", "6"])?;
    let held = Process::start(&lab.setup, lab.setup.seed + 1, &["hold", "4"])?;
    let mut busy = Process::start(&lab.setup, lab.setup.seed + 2, &["busy", "2"])?;
    worker.go();
    busy.has_moved(3)?;
    held.kill()?;
    busy.kill()?;
    worker.join()
}
