// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! How near each GPU has a NIC.
//!
//! NVIDIA's GPUDirect RDMA guide ("Supported Systems") ranks three: switches alone are best; through one processor
//! works and is slower, reads above all; between processors it is severely limited, or not reliable.

use super::scan::Check;
use super::scan::Scan;
use crate::finding::Finding;
use crate::finding::Level;
use crate::finding::Subject;
use crate::machine::Class;

pub(super) const PATH: Check = Check {
    name: "path",
    about: "class of the path to each GPU's nearest RDMA device",
    applies: super::route::applies,
    run: path,
};

fn path(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for pair in scan.pairs() {
        let coherent = scan.gpu(pair.gpu).is_some_and(|gpu| gpu.is_coherent);
        let is_by_pci = !coherent || pair.is_data_direct();
        let Some(class) = pair.class.filter(|_| is_by_pci) else {
            continue;
        };
        let (level, words) = match class {
            Class::Pix => (Level::Ok, "PIX: one switch"),
            Class::Pxb => (Level::Ok, "PXB: switches, and no processor"),
            Class::Phb => (Level::Note, "PHB: through a host bridge"),
            Class::Node => (
                Level::Note,
                "NODE: through several host bridges of a NUMA node",
            ),
            Class::Sys => (Level::Warning, "SYS: between NUMA nodes"),
        };
        let subject = Subject::pair(pair);
        let finding = Finding::new(
            PATH.name,
            scan.level(pair, level),
            subject,
            match pair.nic.filter(|_| pair.is_data_direct()) {
                Some(at) => format!("the path is {words}, by Data Direct ({at})"),
                None => format!("the path is {words}"),
            },
        );
        findings.push(match class {
            Class::Pix | Class::Pxb => finding,
            Class::Phb | Class::Node if scan.machine.is_virtual == Some(true) => finding.why(
                "So it is in this virtual machine. What lies between on the host cannot be seen from inside.",
            ),
            Class::Phb | Class::Node => finding
                .why("A processor's root complex passes packets between devices worse than a switch does.")
                .costs(
                    "NVIDIA's GPUDirect RDMA guide: works, and is slower than switches alone, reads above all. A \
                     V100 and a ConnectX-6 of 25 GB/s at an EPYC 7452: 14.3 GB/s into the GPU, 6.1 GB/s out of it \
                     (stackoverflow.com/questions/59277346).",
                ),
            Class::Sys => finding
                .why("Every packet crosses the link between the processors, which is made for other traffic.")
                .costs(
                    "NVIDIA's GPUDirect RDMA guide: severely limited, or not reliable. NCCL does not use GPUDirect \
                     RDMA on such a path by default (NCCL_NET_GDR_LEVEL).",
                )
                .fix("Put a NIC into a slot of the GPU's processor, behind its switch if it has one, or give the \
                    job a GPU near the NIC."),
        });
    }
    findings
}
