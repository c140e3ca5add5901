// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Is there a GPU, and an RDMA device?

use crate::doctor::look::Look;
use crate::finding::Finding;
use crate::finding::Level;
use crate::finding::Subject;
use crate::host::Unseen;

/// The check's name.
pub(super) const NAME: &str = "presence";

const DEVICES: &str = "/sys/class/infiniband";

pub(super) fn check(look: &Look<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let fault = |text: &str| Finding::new(NAME, Level::Fault, Subject::Machine, text);
    if look.machine.gpus.is_empty() {
        findings.push(
            fault("no NVIDIA GPU on PCI")
                .why("GPUDirect RDMA moves bytes between a GPU's memory and an RDMA device")
                .mend("in a virtual machine or a container, give it the GPU; `lspci -d 10de:` lists those that PCI \
                knows"),
        );
    }
    if look.machine.hcas.is_empty() {
        let found = match look.host.names(DEVICES) {
            Err(Unseen::Absent) => "no RDMA device: ib_core is not loaded",
            Ok(_) => "no RDMA device in /sys/class/infiniband",
            Err(why) => {
                findings.push(Look::unseen(NAME, Subject::Machine, DEVICES, &why));
                return findings;
            }
        };
        findings.push(
            fault(found)
                .why("ibv_reg_mr is a call to an RDMA device")
                .mend(
                    "load the RDMA driver of the card, as `modprobe mlx5_ib`, `bnxt_re`, `irdma` or `efa`; in a \
                    virtual machine or a container, give it the card",
                ),
        );
    } else if look.machine.hcas.iter().all(|hca| hca.is_software) {
        findings.push(
            Finding::new(
                NAME,
                Level::Note,
                Subject::Machine,
                "all RDMA devices are software (rxe, siw)",
            )
            .why(
                "they copy by the processor, and mainline's take no GPU memory: what is said of them tests programs, \
                not GPUDirect RDMA",
            ),
        );
    } else {
        findings.push(Finding::new(
            NAME,
            Level::Well,
            Subject::Machine,
            format!(
                "{} GPUs, {} RDMA devices",
                look.machine.gpus.len(),
                look.machine.hcas.len()
            ),
        ));
    }
    findings
}
