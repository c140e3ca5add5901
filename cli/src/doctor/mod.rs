// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The command `doctor`: finds the causes of slow or impossible GPUDirect RDMA on a machine, and
//! their fixes.
//!
//! A check is a function that examines a [`Scan`] of the machine and returns findings. Each check
//! has its own file, with its description and the faults that its tests inject ([`Check`]). If
//! nothing is wrong, a check returns no finding, or a finding of level `Level::Ok` that describes
//! the state. A check reports a value that it could not read as not visible ([`Scan::unseen`]). The
//! checks examine only the pairs of a GPU and an RDMA device in [`Scan::pairs`]. By default, these
//! are the best pairs of each GPU: the nearest RDMA devices with the fastest links. On most
//! machines, all other pairs have slow paths.

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
mod nic_driver;
mod numa;
mod packets;
mod path;
mod port;
pub(crate) mod print;
mod relaxed_ordering;
mod roce;
mod roce_qos;
mod route;
mod scan;
mod slot;
mod software;
#[cfg(test)]
mod tests;

use std::time::Duration;

use anyhow::{bail, Context as _};

use crate::args;
use crate::finding::{Finding, Level, Plugin, Status};
use crate::host::Host;
use crate::machine::counters::Counters;
use crate::machine::pci::{Address, DEVICES};
use crate::machine::{Gpu, Machine, Pair};
use crate::render::unique;
use crate::report::Out;
use expected::Expected;
use scan::{Baseline, Check};

pub(crate) use scan::Scan;
pub(crate) use software::memory_lock;

pub(crate) const COUNTERS: &str = counters::CHECK.name;
/// Name of the check that reads the mapped files of all processes.
pub(crate) const PRELOAD: &str = software::PRELOAD;

/// Returns all checks: first the checks of software, then the checks of paths and devices. Findings
/// of the same level have this order, too.
pub(crate) fn checks() -> impl Iterator<Item = &'static Check> {
    software::OF_SOFTWARE.iter().chain(OF_HARDWARE)
}

/// Returns the checks that apply to this machine.
pub(crate) fn checks_of<'a>(scan: &'a Scan<'a>) -> impl Iterator<Item = &'static Check> + 'a {
    checks().filter(|check| (check.applies)(scan))
}

/// Checks of paths and devices.
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

/// Checks to run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Selection<'a> {
    /// Names of the checks to run. If empty, all checks run.
    pub(crate) only: &'a [String],
    pub(crate) skip: &'a [String],
}

/// Runs the selected checks and returns their findings, worst first. Returns an error if a selected
/// name is not the name of a check.
pub(crate) fn examine(scan: &Scan<'_>, selection: Selection<'_>) -> anyhow::Result<Vec<Finding>> {
    let Selection { only, skip } = selection;
    if let Some(unknown) = only
        .iter()
        .chain(skip)
        .find(|name| !checks().any(|check| check.name == **name))
    {
        bail!("there is no check {unknown:?}; `peermemctl doctor --list-checks` lists the checks");
    }
    let is_in = |names: &[String], check: &Check| names.iter().any(|name| name == check.name);
    let wanted =
        checks().filter(|check| (only.is_empty() || is_in(only, check)) && !is_in(skip, check));
    Ok(run_all(scan, wanted))
}

/// Runs `checks` and returns their findings, worst first.
fn run_all<'c>(scan: &Scan<'_>, checks: impl Iterator<Item = &'c Check>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for check in checks.filter(|check| (check.applies)(scan)) {
        let of_check = check.findings(scan);
        // If two paths share a bridge, both report the same finding about the bridge.
        findings.extend(unique(&of_check).into_iter().cloned());
    }
    // The sort is stable. Findings of the same level stay in the order of the checks.
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

/// The loaded files of `--baseline` and `--expect`, which the machine is compared with.
#[derive(Default)]
pub(crate) struct Expectation {
    baseline: Option<Baseline>,
    expected: Option<Expected>,
}

impl Expectation {
    /// Loads the files of the command line. Returns an error if a file cannot be read or is
    /// invalid.
    pub(crate) fn load(args: &args::Expectation) -> anyhow::Result<Self> {
        Ok(Self {
            baseline: args.baseline.as_deref().map(Baseline::load).transpose()?,
            expected: args.expect.as_deref().map(Expected::load).transpose()?,
        })
    }

    /// Makes the loaded files available to the checks of a scan.
    pub(crate) fn of<'a>(&'a self, scan: &mut Scan<'a>) {
        scan.baseline = self.baseline.as_ref();
        scan.expected = self.expected.as_ref();
    }
}

/// Runs the command. Returns an error if the command line names a check or a pair that does not
/// exist. If `--nagios` is set, prints the error as a monitoring plugin's line instead.
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

/// Prints a monitoring plugin's line with the reason why the machine could not be examined.
pub(crate) fn unknown(why: &anyhow::Error, out: &mut Out) -> Status {
    out.line(format!("GPUDIRECT UNKNOWN - {why:#}"));
    Status::Plugin(Plugin::Unknown)
}

/// Returns a GPU by index or PCI address.
fn gpu_named<'a>(machine: &'a Machine, name: &str) -> Option<&'a Gpu> {
    let index: Option<usize> = name.parse().ok();
    let at: Option<Address> = name.parse().ok();
    let mut gpus = machine.gpus.iter();
    gpus.find(|gpu| Some(gpu.index) == index || Some(gpu.at) == at)
}

/// Parses the argument of `--pair`: a GPU by index or PCI address, a comma, and an RDMA device.
fn pair_named<'a>(machine: &'a Machine, name: &str) -> anyhow::Result<&'a Pair> {
    let (gpu, hca) = name
        .split_once(',')
        .with_context(|| format!("--pair needs GPU,HCA such as 0,mlx5_0, not {name:?}"))?;
    let (gpu, hca) = (gpu.trim(), hca.trim());
    let gpu = gpu_named(machine, gpu).with_context(|| format!("there is no GPU {gpu:?}"))?;
    machine
        .pair_of(gpu.at, hca)
        .with_context(|| format!("there is no RDMA device {hca:?}"))
}
