// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `doctor`: what makes GPUDirect RDMA slow or impossible on a machine, and how to fix it.
//!
//! A check is a function from what was seen to findings, in a file of its own, with its documentation and the faults
//! that the tests inject ([`Check`]). It says nothing where nothing is wrong, or `Level::Ok` with what it saw; it does not guess at what it could not see ([`Scan::unseen`]). Of the
//! pairs of GPU and RDMA device it judges those that [`Scan::pairs`] gives, and no others: the best of each GPU, as
//! no machine is built so that all are good.

mod acs;
mod ats;
mod bar1;
mod baseline;
mod controls;
mod counters;
mod device_kind;
mod expect;
mod expected;
mod gpu_driver;
mod hops;
mod iommu;
mod link;
mod max_payload;
mod max_read_request;
mod nccl;
mod nic_driver;
mod numa;
mod packets;
mod path;
mod port;
mod print;
mod relaxed_ordering;
mod roce;
mod roce_qos;
mod route;
mod scan;
mod slot;
mod software;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{bail, Context as _};

use crate::args;
use crate::finding::{Finding, Level, Plugin, Status};
use crate::host::Host;
use crate::machine::counters::Counters;
use crate::machine::pci::{Address, DEVICES};
use crate::machine::{Gpu, Machine, Pair};
use crate::report::Out;
use expected::Expected;
use scan::{Baseline, Check};

pub(crate) use scan::Scan;

/// The check of counters.
pub(crate) const COUNTERS: &str = counters::CHECK.name;

/// All checks, in the order in which they matter where their findings are as bad: whether it works at all, then the
/// path, then speed.
pub(crate) fn checks() -> impl Iterator<Item = &'static Check> {
    software::OF_SOFTWARE.iter().chain(OF_HARDWARE)
}

/// Those that have something to look at.
pub(crate) fn checks_of<'a>(scan: &'a Scan<'a>) -> impl Iterator<Item = &'static Check> + 'a {
    checks().filter(|check| (check.applies)(scan))
}

/// Paths and devices.
const OF_HARDWARE: &[Check] = &[
    baseline::CHECK,
    expect::CHECK,
    gpu_driver::CHECK,
    nic_driver::CHECK,
    port::CHECK,
    counters::CHECK,
    roce::CHECK,
    roce_qos::CHECK,
    path::CHECK,
    acs::CHECK,
    iommu::CHECK,
    ats::CHECK,
    max_payload::CHECK,
    link::CHECK,
    slot::CHECK,
    bar1::CHECK,
    relaxed_ordering::CHECK,
    max_read_request::CHECK,
    numa::CHECK,
    device_kind::CHECK,
];

/// Which checks to run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Selection<'a> {
    /// These alone; empty: all.
    pub(crate) only: &'a [String],
    pub(crate) skip: &'a [String],
}

/// What the selected checks say, the worst first.
///
/// # Errors
/// A name that no check has.
pub(crate) fn examine(scan: &Scan<'_>, selection: Selection<'_>) -> anyhow::Result<Vec<Finding>> {
    let Selection { only, skip } = selection;
    if let Some(unknown) = only
        .iter()
        .chain(skip)
        .find(|name| !checks().any(|check| check.name == **name))
    {
        bail!("there is no check {unknown:?}; `peermemctl doctor --list-checks` names them");
    }
    let is_in = |names: &[String], check: &Check| names.iter().any(|name| name == check.name);
    let wanted =
        checks().filter(|check| (only.is_empty() || is_in(only, check)) && !is_in(skip, check));
    Ok(run_all(scan, wanted))
}

/// What these say, the worst first.
fn run_all<'c>(scan: &Scan<'_>, checks: impl Iterator<Item = &'c Check>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for check in checks.filter(|check| (check.applies)(scan)) {
        let of_check = check.findings(scan);
        // Two paths may share a bridge that both tell of.
        let mut seen = HashSet::new();
        let is_first: Vec<bool> = of_check.iter().map(|it| seen.insert(it)).collect();
        let with = of_check.iter().cloned().zip(is_first);
        findings.extend(with.filter_map(|(finding, is_first)| is_first.then_some(finding)));
    }
    // Stable: checks stay in their order.
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

/// What the machine is compared with.
#[derive(Default)]
pub(crate) struct Expectation {
    baseline: Option<Baseline>,
    expected: Option<Expected>,
}

impl Expectation {
    /// By the files of the command line.
    ///
    /// # Errors
    /// One cannot be read, or is not what it should be.
    pub(crate) fn load(args: &args::Expectation) -> anyhow::Result<Self> {
        Ok(Self {
            baseline: args.baseline.as_deref().map(Baseline::load).transpose()?,
            expected: args.expect.as_deref().map(Expected::load).transpose()?,
        })
    }

    /// For the checks of a scan.
    pub(crate) fn of<'a>(&'a self, scan: &mut Scan<'a>) {
        scan.baseline = self.baseline.as_ref();
        scan.expected = self.expected.as_ref();
    }
}

/// The command.
///
/// # Errors
/// Names that nothing has: of a check, of a pair. With `--nagios` none: it says so in its line.
pub(crate) fn run(host: &dyn Host, args: &args::Doctor, out: &mut Out) -> anyhow::Result<Status> {
    if args.list_checks {
        return print::list(checks(), out);
    }
    let seen = Machine::scan(host).map_err(|why| anyhow::anyhow!("{DEVICES}: {why}"));
    if args.write_expect {
        let expected = Expected::of(host, &seen?);
        out.raw(&format!("{}\n", serde_json::to_string_pretty(&expected)?));
        return Ok(Status::Ok);
    }
    let examined = seen.and_then(|machine| {
        let expectation = Expectation::load(&args.expectation)?;
        let only = args.pair.as_deref().map(|name| pair_named(&machine, name));
        let mut scan = Scan::new(host, &machine);
        scan.only = only.transpose()?;
        scan.all = args.all;
        expectation.of(&mut scan);
        if let Some(seconds) = args.interval {
            scan.earlier = Some(Counters::scan(host, &machine));
            std::thread::sleep(Duration::from_secs(seconds));
        }
        let selection = Selection {
            only: &args.only,
            skip: &args.skip,
        };
        let findings = examine(&scan, selection)?;
        if args.nagios {
            return Ok(print::nagios(&findings, out));
        }
        let fail_on = match args.fail_on {
            args::FailOn::Fault => Level::Fault,
            args::FailOn::Warning => Level::Warning,
        };
        print::all(&scan, &findings, args.all, out)?;
        Ok(print::status(&findings, fail_on))
    });
    match examined {
        Err(why) if args.nagios => Ok(unknown(&why, out)),
        other => other,
    }
}

/// Says to a monitoring system why nothing could be looked at.
pub(crate) fn unknown(why: &anyhow::Error, out: &mut Out) -> Status {
    out.line(format!("GPUDIRECT UNKNOWN - {why:#}"));
    Status::Plugin(Plugin::Unknown)
}

/// A GPU by index or PCI address.
fn gpu_named<'a>(machine: &'a Machine, name: &str) -> Option<&'a Gpu> {
    let index: Option<usize> = name.parse().ok();
    let at: Option<Address> = name.parse().ok();
    let mut gpus = machine.gpus.iter();
    gpus.find(|gpu| Some(gpu.index) == index || Some(gpu.at) == at)
}

/// A pair as `--pair` names it: a GPU by index or PCI address, a comma, an RDMA device.
fn pair_named<'a>(machine: &'a Machine, name: &str) -> anyhow::Result<&'a Pair> {
    let (gpu, hca) = name
        .split_once(',')
        .with_context(|| format!("--pair wants GPU,HCA such as 0,mlx5_0, not {name:?}"))?;
    let (gpu, hca) = (gpu.trim(), hca.trim());
    let gpu = gpu_named(machine, gpu).with_context(|| format!("there is no GPU {gpu:?}"))?;
    machine
        .pair_of(gpu.at, hca)
        .with_context(|| format!("there is no RDMA device {hca:?}"))
}
