// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Relaxed ordering of packets.

use super::packets::{counted, express, nics};
use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::machine::config::PortType;
use crate::machine::pci::Function;

check! {
    "relaxed-ordering": "whether the NIC and the GPU are allowed to send with relaxed ordering",
    |scan| scan.has_pci_gpu() || scan.has_hardware_hca(), relaxed_ordering, OnPaths(tests::FAULTS)
}

/// Returns `true` for root ports below which Linux turns off relaxed ordering:
/// `quirk_relaxedordering_disable` in `drivers/pci/quirks.c`, for errata of Intel's Haswell and
/// Broadwell Xeons and AMD's Seattle.
fn has_erratum(root_port: &Function) -> bool {
    match root_port.vendor {
        0x8086 => matches!(root_port.device, 0x6f01..=0x6f0e | 0x2f01..=0x2f0e),
        0x1022 => matches!(root_port.device, 0x1a00..=0x1a02),
        _ => false,
    }
}

fn relaxed_ordering(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (hca, function, express) in nics(scan, "relaxed ordering", &mut findings) {
        if express.port != PortType::Endpoint {
            continue;
        }
        let at = function.at;
        let root_port = function
            .above
            .first()
            .and_then(|at| scan.machine.functions.get(at));
        let erratum = root_port.filter(|port| has_erratum(port));
        findings.push(match (express.relaxed_ordering, erratum) {
            (true, _) => Subject::hca(hca).ok(format!("{at} is allowed to send with relaxed ordering")),
            (false, Some(port)) => Subject::hca(hca).note(format!(
                "{at} is not allowed to send with relaxed ordering; Linux turns it off below root ports such as {} \
                 ({:04x}:{:04x}), for an erratum",
                port.at, port.vendor, port.device
            )),
            (false, None) => Finding::new(scan.level_of(hca, Level::Warning),
                Subject::hca(hca),
                format!("{at} is not allowed to send with relaxed ordering (RlxdOrd-)"),
            )
            .why("On its way through the root complex, each write of the NIC waits for the NIC's earlier writes.")
            .costs(
                "Reported by others: 150 in place of 200 Gb/s on AMD (UCX#8062), 16 in place of more than 40 GB/s \
                 on Emerald Rapids (UCX#10955).",
            )
            .fix(format!(
                "`setpci -s {at} CAP_EXP+0x8.w=0010:0010` (until the next boot), and turn on \"Relaxed Ordering\" in \
                 the firmware's setup"
            )),
        });
    }
    for gpu in scan.gpus().filter(|gpu| !gpu.is_coherent) {
        let function = scan.machine.functions.get(&gpu.at);
        let Some(function) = function.and_then(|function| counted(scan, function)) else {
            continue;
        };
        match express(function) {
            Ok(Some(express)) if !express.relaxed_ordering => findings.push(
                Subject::gpu(gpu).note(format!(
                    "{} is not allowed to send with relaxed ordering (RlxdOrd-)", gpu.at
                ))
                .why("The NIC's bit decides about the NIC's transfers. The GPU's bit only affects packets that the \
                    GPU itself sends."),
            ),
            Ok(_) => {}
            Err(why) => findings.push(Scan::unseen(Subject::gpu(gpu),
                format!("relaxed ordering of {}", gpu.at),
                &why,
            )),
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, EXPRESS, FIRST};

    faults! {
        "a NIC without relaxed ordering",
            "warning relaxed-ordering: …RlxdOrd-… fix …setpci -s 0000:14:00.0 CAP_EXP+0x8.w=0010:0010" =>
            |fixture| fixture.set(socket(FIRST).nic, EXPRESS + 8, 0x5040);
    }
}
