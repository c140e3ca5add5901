// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI Express registers of the functions that send packets.

use super::scan::Scan;
use crate::finding::{Finding, Subject};
use crate::host::{Seen, Unseen};
use crate::machine::config::Express;
use crate::machine::pci::{Function, MELLANOX};
use crate::machine::Hca;

/// Returns the PCI Express capability, or `None` for a conventional PCI function.
pub(super) fn express(function: &Function) -> Seen<Option<Express>> {
    match function.express() {
        Ok(express) => Ok(Some(express)),
        Err(Unseen::Absent) => Ok(None),
        Err(why) => Err(why),
    }
}

/// Device IDs of virtual functions of ConnectX NICs, from the list of PCI IDs.
const VIRTUAL_FUNCTIONS: [u16; 7] = [0x1004, 0x1014, 0x1016, 0x1018, 0x101a, 0x101c, 0x101e];

/// Returns the function whose registers control the packets of `function`. For a virtual function,
/// returns the physical function, because the bits are reserved in a virtual function (Linux's
/// `pci_configure_relaxed_ordering`). Returns `None` if the physical function is not visible.
pub(super) fn counted<'a>(scan: &Scan<'a>, function: &'a Function) -> Option<&'a Function> {
    // In a virtual machine, sysfs does not mark virtual functions. A virtual function is recognized
    // by its device ID, or by a link of width 0. Most virtual functions have such a link.
    let is_by_number = function.vendor == MELLANOX && VIRTUAL_FUNCTIONS.contains(&function.device);
    let is_down = matches!(&function.link, Ok(link) if link.now.width == 0);
    match function.physical {
        Some(at) => scan.machine.functions.get(&at),
        None if scan.machine.is_virtual == Some(true) && (is_down || is_by_number) => None,
        None => Some(function),
    }
}

/// Returns each RDMA device with the function whose registers control its packets, and the PCI
/// Express capability of that function. Adds a finding about each capability that could not be read
/// to `findings`. `what` names the register in the finding.
pub(super) fn nics<'a>(
    scan: &Scan<'a>,
    what: &str,
    findings: &mut Vec<Finding>,
) -> Vec<(&'a Hca, &'a Function, Express)> {
    let mut nics = Vec::new();
    // For Soft RoCE, the processor copies GPU memory. No NIC reads the GPU.
    let hcas = scan.hcas().filter(|hca| !hca.is_software);
    // Data Direct uses its own registers.
    let all = hcas.flat_map(|hca| {
        hca.at
            .into_iter()
            .chain(hca.data_direct)
            .map(move |at| (hca, at))
    });
    for (hca, at) in all {
        let Some(function) = scan.machine.functions.get(&at) else {
            continue;
        };
        let Some(function) = counted(scan, function) else {
            continue;
        };
        match express(function) {
            Ok(Some(express)) => nics.push((hca, function, express)),
            Ok(None) => {}
            Err(why) => findings.push(Scan::unseen(
                Subject::hca(hca),
                format!("{what} of {}", function.at),
                &why,
            )),
        }
    }
    nics
}
