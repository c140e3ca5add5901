// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! NUMA nodes of devices.

use super::scan::{check, Scan};
use crate::finding::{Finding, Subject};

check! {
    "numa": "whether the firmware gives the NUMA node of each device",
    |scan| scan.machine.nodes.is_some_and(|nodes| nodes > 1), numa, OwnTest
}

fn numa(scan: &Scan<'_>) -> Vec<Finding> {
    let (who, fix) = match scan.machine.is_virtual {
        Some(true) => (
            "hypervisor",
            "In the virtual machine's settings, assign each device to a NUMA node of the guest",
        ),
        _ => (
            "firmware",
            "Update the firmware, or check its setup (\"NUMA\", \"ACPI SRAT\")",
        ),
    };
    let new =
        |subject: Subject, at| {
            subject.note(format!("the {who} does not say which NUMA node {at} is near to"))
        .why("Neither this program nor NCCL can tell whether a path stays within a processor.")
        .fix(fix)
        };
    let is_unsaid = |at| {
        let function = scan.machine.functions.get(&at);
        function.is_some_and(|function| function.numa.is_none())
    };
    let gpus = scan.gpus().filter(|gpu| is_unsaid(gpu.at));
    let mut findings: Vec<Finding> = gpus.map(|gpu| new(Subject::gpu(gpu), gpu.at)).collect();
    for hca in scan.hcas() {
        if let Some(at) = hca.at.filter(|at| is_unsaid(*at)) {
            findings.push(new(Subject::hca(hca), at));
        }
    }
    findings
}
