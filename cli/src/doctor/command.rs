// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The command `doctor`.

use anyhow::Context as _;

use super::examine;
use super::tell;
use super::Look;
use crate::args;
use crate::finding::Plugin;
use crate::finding::Status;
use crate::host::Host;
use crate::machine::pci::Address;
use crate::machine::Gpu;
use crate::machine::Machine;
use crate::machine::Pair;
use crate::report::Out;

/// The command.
///
/// # Errors
/// Names that nothing has: of a check, of a pair. With `--nagios` none: it says so in its line.
pub(crate) fn run(host: &dyn Host, args: &args::Doctor, out: &mut Out) -> anyhow::Result<Status> {
    if args.list_checks {
        return tell::list(out);
    }
    let seen = Machine::look(host).map_err(|why| anyhow::anyhow!("/sys/bus/pci/devices: {why}"));
    let examined = seen.and_then(|machine| {
        let only = args.pair.as_deref().map(|name| pair_named(&machine, name));
        let look = Look {
            only: only.transpose()?,
            all: args.all,
            ..Look::new(host, &machine)
        };
        let findings = examine(&look, &args.skip)?;
        if args.nagios {
            return Ok(tell::nagios(&findings, out));
        }
        tell::all(&look, &findings, args.all, out)
    });
    match examined {
        Err(why) if args.nagios => {
            out.line(format!("GPUDIRECT UNKNOWN - {why:#}"));
            Ok(Status::Plugin(Plugin::Unknown))
        }
        other => other,
    }
}

/// A GPU by index or PCI address.
fn gpu_named<'a>(machine: &'a Machine, name: &str) -> Option<&'a Gpu> {
    let index: Option<usize> = name.parse().ok();
    let at: Option<Address> = name.parse().ok();
    let mut gpus = machine.gpus.iter();
    gpus.find(|gpu| Some(gpu.index) == index || Some(gpu.at) == at)
}

/// A pair as `--pair` names it: a GPU by index or PCI address, a comma, an RDMA device.
pub(super) fn pair_named<'a>(machine: &'a Machine, name: &str) -> anyhow::Result<&'a Pair> {
    let (gpu, hca) = name
        .split_once(',')
        .with_context(|| format!("--pair wants GPU,HCA such as 0,mlx5_0, not {name:?}"))?;
    let (gpu, hca) = (gpu.trim(), hca.trim());
    let gpu = gpu_named(machine, gpu).with_context(|| format!("there is no GPU {gpu:?}"))?;
    machine
        .pairs
        .iter()
        .find(|pair| pair.gpu == gpu.at && pair.hca == hca)
        .with_context(|| format!("there is no RDMA device {hca:?}"))
}
