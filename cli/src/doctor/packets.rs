// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI Express registers of the functions that send: whose count, and those of each NIC.

use super::scan::Scan;
use crate::finding::{Finding, Subject};
use crate::host::{Seen, Unseen};
use crate::machine::config::Express;
use crate::machine::pci::{Function, MELLANOX};
use crate::machine::Hca;

/// None: conventional PCI, which has nothing of this.
pub(super) fn express(function: &Function) -> Seen<Option<Express>> {
    match function.express() {
        Ok(express) => Ok(Some(express)),
        Err(Unseen::Absent) => Ok(None),
        Err(why) => Err(why),
    }
}

/// Virtual functions of ConnectX NICs, by the list of PCI ids.
const VIRTUAL_FUNCTIONS: [u16; 7] = [0x1004, 0x1014, 0x1016, 0x1018, 0x101a, 0x101c, 0x101e];

/// Whose registers count for a function: its own, or of a virtual function, where these bits are reserved (Linux's
/// `pci_configure_relaxed_ordering`), the physical one's. None: that one is not visible.
pub(super) fn counted<'a>(scan: &Scan<'a>, function: &'a Function) -> Option<&'a Function> {
    // In a virtual machine nothing but its number calls it a virtual function. Its link is never up on most.
    let is_by_number = function.vendor == MELLANOX && VIRTUAL_FUNCTIONS.contains(&function.device);
    let is_down = matches!(&function.link, Ok(link) if link.now.width == 0);
    match function.physical {
        Some(at) => scan.machine.functions.get(&at),
        None if scan.machine.is_virtual == Some(true) && (is_down || is_by_number) => None,
        None => Some(function),
    }
}

/// Each RDMA device that a NIC's own registers count for: with the function and its PCI Express capability.
pub(super) fn nics<'a>(
    scan: &Scan<'a>,
    what: &str,
    findings: &mut Vec<Finding>,
) -> Vec<(&'a Hca, &'a Function, Express)> {
    let mut nics = Vec::new();
    // What soft RoCE sends from GPU memory the processor has copied.
    let hcas = scan.hcas().filter(|hca| !hca.is_software);
    // Data Direct sends by its own registers.
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
