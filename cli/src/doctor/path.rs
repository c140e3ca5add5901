// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Distance from each GPU to the nearest NIC, compared with NCCL's limit.
//!
//! NVIDIA's GPUDirect RDMA guide ("Supported Systems") ranks three kinds of paths. A path through
//! only switches is the best kind. A path through one processor works but is slower, above all for
//! reads. A path between processors is severely limited or unreliable. By default, NCCL uses
//! GPUDirect RDMA only on paths of the best kind ([`nccl`]).

use std::collections::BTreeMap;

use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::machine::pci::Address;
use crate::machine::{Class, Gpu, Hca, Listed, Pair};
use crate::software::nccl;
use crate::software::nccl::{Nccl, Topology};

check! {
    "path": "class of the path to each GPU's nearest RDMA device, and whether NCCL uses GPUDirect RDMA on it",
    super::route::applies, path, OnPaths(tests::FAULTS)
}

fn path(scan: &Scan<'_>) -> Vec<Finding> {
    let nccl = Nccl::scan(scan.host);
    let mut findings = Vec::new();
    // Pairs on which NCCL does not use GPUDirect RDMA, by the PCI address of the GPU.
    let mut refused: BTreeMap<Address, Vec<(&Pair, Class)>> = BTreeMap::new();
    for pair in scan.pairs() {
        let coherent = scan.gpu(pair.gpu).is_some_and(|gpu| gpu.is_coherent);
        let is_by_pci = !coherent || pair.is_data_direct();
        let Some(class) = pair.class.filter(|_| is_by_pci) else {
            continue;
        };
        let is_refused = nccl.topology_is_of_sysfs() && !nccl.takes(class);
        match is_refused && scan.counts(pair) && is_for_nccl(scan, pair) {
            true => refused.entry(pair.gpu).or_default().push((pair, class)),
            false => findings.push(of_pair(scan, &nccl, pair, class)),
        }
    }
    let too_far = |pairs: Vec<(&Pair, Class)>| too_far(scan, &nccl, &pairs);
    findings.extend(refused.into_values().filter_map(too_far));
    findings
}

impl Nccl {
    fn topology_is_of_sysfs(&self) -> bool {
        !matches!(self.topology, Topology::File(_))
    }
}

/// Returns `true` if only the distance keeps NCCL from using GPUDirect RDMA on this pair. NCCL
/// never uses GPUDirect RDMA with rxe or siw, or for a GPU without GPUDirect RDMA. For EFA, NCCL
/// uses the topology file of EFA's plugin.
fn is_for_nccl(scan: &Scan<'_>, pair: &Pair) -> bool {
    let is_gpu = |gpu: &Gpu| !gpu.is_stand_in && gpu.why_no_gpudirect().is_none();
    let is_hca = |hca: &Hca| !hca.is_software && hca.driver.as_deref() != Some("efa");
    scan.gpu(pair.gpu).is_some_and(is_gpu) && scan.hca(&pair.hca).is_some_and(is_hca)
}

/// Returns a description of a path's class.
fn words(scan: &Scan<'_>, pair: &Pair, class: Class) -> &'static str {
    match class {
        Class::Pix => "PIX: one switch",
        Class::Pxb => "PXB: switches, and no processor",
        Class::Phb => "PHB: through a host bridge",
        Class::Node => "NODE: through several host bridges of a NUMA node",
        Class::Sys if !scan.machine.knows_nodes(pair) => {
            "NODE or SYS: through several host bridges, of NUMA nodes that are not known"
        }
        Class::Sys => "SYS: between NUMA nodes",
    }
}

const VIRTUAL: &str = "A virtual machine cannot see the path between the devices on the host.";
const GUIDE: &str =
    "NVIDIA's GPUDirect RDMA guide: such a path works, but is slower than switches alone, above all for reads. A \
     V100 and a ConnectX-6 of 25 GB/s at an EPYC 7452: 14.3 GB/s into the GPU, 6.1 GB/s out of it \
     (stackoverflow.com/questions/59277346).";
const GUIDE_SYS: &str =
    "NVIDIA's GPUDirect RDMA guide: such a path is severely limited, or not reliable.";
const BETWEEN_PROCESSORS: &str =
    "Every packet crosses the link between the processors, which is made for other traffic.";
const OTHER_SLOT: &str = "Put a NIC into a slot of the GPU's processor, behind its switch if it has one, or give the job \
     a GPU near the NIC.";

/// Reports a path that is not too far for NCCL, or to which NCCL's limit does not apply.
fn of_pair(scan: &Scan<'_>, nccl: &Nccl, pair: &Pair, class: Class) -> Finding {
    let is_virtual = scan.machine.is_virtual == Some(true);
    let is_known = scan.machine.knows_nodes(pair);
    let level = match class {
        Class::Pix | Class::Pxb => Level::Ok,
        Class::Sys if is_known && nccl.topology_is_of_sysfs() => Level::Warning,
        Class::Phb | Class::Node | Class::Sys => Level::Note,
    };
    let words = words(scan, pair, class);
    let finding = Finding::new(
        scan.level(pair, level),
        Subject::pair(pair),
        match pair.nic.filter(|_| pair.is_data_direct()) {
            Some(at) => format!("the path is {words}, by Data Direct ({at})"),
            None => format!("the path is {words}"),
        },
    );
    match (class, &nccl.topology) {
        (Class::Pix | Class::Pxb, _) => finding,
        (_, Topology::File(file)) => finding.why(format!(
            "NCCL does not use this path, but the paths in the topology file {file}."
        )),
        (Class::Sys, _) if is_known && !is_virtual => {
            let costs = match nccl.takes(class) {
                true => GUIDE_SYS.to_owned(),
                false => format!(
                    "{GUIDE_SYS} NCCL does not use GPUDirect RDMA on such a path by default (NCCL_NET_GDR_LEVEL)."
                ),
            };
            finding.why(BETWEEN_PROCESSORS).costs(costs).fix(OTHER_SLOT)
        }
        _ if is_virtual => finding.why(format!("This is the path inside the virtual machine. {VIRTUAL}")),
        _ => finding
            .why("A processor's root complex passes packets between devices less well than a switch does.")
            .costs(GUIDE),
    }
}

/// Reports that the nearest RDMA devices of a GPU are too far for NCCL. The paths in `pairs` all
/// have the same class.
fn too_far(scan: &Scan<'_>, nccl: &Nccl, pairs: &[(&Pair, Class)]) -> Option<Finding> {
    let (first, class) = *pairs.first()?;
    let gpu = scan.gpu(first.gpu)?;
    let is_virtual = scan.machine.is_virtual == Some(true);
    let is_between = class == Class::Sys && scan.machine.knows_nodes(first);
    let is_near = matches!(class, Class::Pix | Class::Pxb);
    let words = words(scan, first, class);
    let names: Vec<&str> = pairs.iter().map(|(pair, _)| pair.hca.as_str()).collect();
    // An RDMA device that could not be read may be nearer to the GPU.
    let mut unread = scan.machine.unread.iter();
    let level = match unread.any(|unread| matches!(unread.device, Listed::Hca(_))) {
        true => Level::Note,
        false => Level::Warning,
    };
    let (subject, found) = match scan.only {
        Some(only) => (Subject::pair(only), format!("the path is {words}")),
        None => (
            Subject::gpu(gpu),
            format!("the nearest RDMA device ({}) is {words}", names.join(", ")),
        ),
    };
    let finding = Finding::new(scan.level(first, level), subject, found);
    let mut why = Vec::new();
    if is_between && !is_virtual {
        why.push(BETWEEN_PROCESSORS.to_owned());
    }
    why.push(match &nccl.level {
        Some(setting) => format!(
            "NCCL_NET_GDR_LEVEL is {} {}: NCCL does not use GPUDirect RDMA beyond this level.",
            setting.value, setting.place
        ),
        None => "NCCL uses GPUDirect RDMA up to PXB, where only switches are between the devices (ncclTopoCheckGdr). \
                 On this path, NCCL copies through the processors' memory instead, and says so in its log only with \
                 NCCL_DEBUG=INFO."
            .to_owned(),
    });
    if let Topology::Missing(setting) = &nccl.topology {
        why.push(format!(
            "NCCL_TOPO_FILE {} names {}, which does not exist.",
            setting.place, setting.value
        ));
    }
    if is_virtual && !is_near {
        why.push(format!(
            "NCCL uses the paths between the PCI devices of this virtual machine. {VIRTUAL}"
        ));
    }
    if let Some((other, hca)) = by_nvlink(scan, nccl, gpu) {
        why.push(format!(
            "NCCL reaches {hca} by NVLink through GPU {} (PXN), and shares {hca} with that GPU; other software does \
             not use this route.",
            other.index
        ));
    }
    let finding = finding.why(why.join(" "));
    let finding = match class {
        Class::Pix | Class::Pxb => finding,
        Class::Sys if is_between && !is_virtual => finding.costs(GUIDE_SYS),
        Class::Phb | Class::Node | Class::Sys if is_virtual => finding,
        Class::Phb | Class::Node | Class::Sys => finding.costs(GUIDE),
    };
    let level = nccl::name_of(class);
    let set = format!("NCCL_NET_GDR_LEVEL={level} in the job's environment or /etc/nccl.conf");
    Some(finding.fix(match is_near {
        true => format!("Unset NCCL_NET_GDR_LEVEL, or {set}."),
        false if is_virtual => format!(
            "Set NCCL_TOPO_FILE to the topology file for this kind of virtual machine, in the job's environment or \
             /etc/nccl.conf: images of clouds have one (Azure's HPC images /opt/microsoft/ndv5-topo.xml and others). \
             It tells NCCL which devices are below one switch of the host.\nWithout such a file, {set} makes NCCL \
             use the path; measure both."
        ),
        false if is_between => format!("{OTHER_SLOT}\n{set} makes NCCL use the path anyway; measure both."),
        false => format!(
            "Put a NIC behind the GPU's switch, if it has one. Otherwise {set} makes NCCL use the path; measure \
             both."
        ),
    }))
}

/// Returns another GPU that NVLink connects to `gpu` and that has a NIC near enough for NCCL. Also
/// returns the name of this NIC.
fn by_nvlink<'a>(scan: &Scan<'a>, nccl: &Nccl, gpu: &Gpu) -> Option<(&'a Gpu, &'a str)> {
    let nvml = scan.software().nvml.as_ref().ok()?;
    let is_joined = |at: Address| {
        nvml.nvlinks(gpu.at, at)
            .is_some_and(|links| links.count > 0)
    };
    let mut pairs = scan.machine.pairs.iter().filter(|pair| pair.is_best);
    let near = pairs.find(|pair| {
        let is_near = pair.class.is_some_and(|class| nccl.takes(class));
        nccl.has_pxn && pair.gpu != gpu.at && is_near && is_joined(pair.gpu)
    })?;
    Some((scan.gpu(near.gpu)?, near.hca.as_str()))
}

#[cfg(test)]
mod tests;
