// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! How large packets are, how long reads, and in what order they must stay.

use super::route::Route;
use super::scan::{Check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::{Seen, Unseen};
use crate::machine::config::{Express, PortType};
use crate::machine::pci::Function;
use crate::machine::{Hca, MELLANOX};

pub(super) const MAX_PAYLOAD: Check = Check {
    name: "max-payload",
    about: "MaxPayload of both ends and of each bridge between",
    applies: super::route::applies,
    run: max_payload,
};

pub(super) const MAX_READ: Check = Check {
    name: "max-read-request",
    about: "the NIC's MaxReadReq",
    applies: |scan| scan.has_hardware_hca(),
    run: max_read,
};

pub(super) const RELAXED_ORDERING: Check = Check {
    name: "relaxed-ordering",
    about: "whether the NIC, and the GPU, may send with relaxed ordering",
    applies: |scan| scan.has_pci_gpu() || scan.has_hardware_hca(),
    run: relaxed_ordering,
};

/// None: conventional PCI, which has nothing of this.
fn express(function: &Function) -> Seen<Option<Express>> {
    match function.express() {
        Ok(express) => Ok(Some(express)),
        Err(Unseen::Absent) => Ok(None),
        Err(why) => Err(why),
    }
}

/// One function of a path, and its payload in bytes: as it is set, and at most.
struct Payload<'a> {
    function: &'a Function,
    set: u32,
    most: u32,
}

/// Virtual functions of ConnectX NICs, by the list of PCI ids.
const VIRTUAL_FUNCTIONS: [u16; 7] = [0x1004, 0x1014, 0x1016, 0x1018, 0x101a, 0x101c, 0x101e];

/// Whose registers count for a function: its own, or of a virtual function, where these bits are reserved (Linux's
/// `pci_configure_relaxed_ordering`), the physical one's. None: that one is not visible.
fn counted<'a>(scan: &Scan<'a>, function: &'a Function) -> Option<&'a Function> {
    // In a virtual machine nothing but its number calls it a virtual function. Its link is never up on most.
    let is_by_number = function.vendor == MELLANOX && VIRTUAL_FUNCTIONS.contains(&function.device);
    let is_down = matches!(&function.link, Ok(link) if link.now.width == 0);
    match function.physical {
        Some(at) => scan.machine.functions.get(&at),
        None if scan.machine.is_virtual == Some(true) && (is_down || is_by_number) => None,
        None => Some(function),
    }
}

/// From the top down.
fn payloads<'a>(scan: &Scan<'a>, chain: &[&'a Function]) -> Seen<Vec<Payload<'a>>> {
    let mut all = Vec::new();
    for function in chain {
        let Some(function) = counted(scan, function) else {
            continue;
        };
        if let Some(express) = express(function)? {
            // A code that the specification keeps for later.
            if express.payload > 0 && express.payload_most > 0 {
                all.push(Payload {
                    function,
                    set: express.payload,
                    most: express.payload_most,
                });
            }
        }
    }
    Ok(all)
}

const MISMATCH: &str =
    "A packet that is larger than the next function takes is dropped as malformed, and the sender's link may go \
     down.";

fn max_payload(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for pair in scan.pairs() {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
        let subject = Subject::pair(pair);
        let sides = [route.gpu, route.nic].map(|end| payloads(scan, &route.down_to(end)));
        let (gpu_side, nic_side) = match sides {
            [Ok(gpu), Ok(nic)] => (gpu, nic),
            [Err(why), _] | [_, Err(why)] => {
                findings.push(Scan::unseen(
                    MAX_PAYLOAD.name,
                    subject,
                    "MaxPayload along the path",
                    &why,
                ));
                continue;
            }
        };
        let new = |level, found: String| {
            Finding::new(
                MAX_PAYLOAD.name,
                scan.level(pair, level),
                subject.clone(),
                found,
            )
        };
        let reported = |all: &[&Payload<'_>]| -> String {
            let each = all
                .iter()
                .map(|it| format!("{} {} B", it.function.at, it.set));
            each.collect::<Vec<_>>().join(", ")
        };
        // Down from the one end, and up to the other, as a packet goes.
        let all: Vec<&Payload<'_>> = gpu_side.iter().rev().chain(&nic_side).collect();
        let sets = || all.iter().map(|it| it.set);
        let (Some(least), Some(largest)) = (sets().min(), sets().max()) else {
            continue;
        };
        let steps = |side: &[Payload<'_>]| {
            let pairs = side.iter().zip(side.iter().skip(1));
            pairs.fold((false, false), |(smaller, larger), (upper, lower)| {
                (
                    smaller || upper.set < lower.set,
                    larger || upper.set > lower.set,
                )
            })
        };
        let (gpu_bad, gpu_odd) = steps(&gpu_side);
        let (nic_bad, nic_odd) = steps(&nic_side);
        let across = !route.is_through_root() && least != largest;
        if across || gpu_bad || nic_bad {
            findings.push(
                new(Level::Fault, format!("MaxPayload differs along the path: {}", reported(&all)))
                    .why(MISMATCH)
                    .fix("pci=pcie_bus_safe on the kernel's command line, which sets all to what all can; or \
                        pci=pcie_bus_peer2peer (128 B)"),
            );
            continue;
        }
        if gpu_odd || nic_odd {
            // pci=pcie_bus_perf sets it so on purpose, and keeps reads so short that answers fit.
            let cmdline = scan.host.text("/proc/cmdline").unwrap_or_default();
            let level = match cmdline.contains("pcie_bus_perf") {
                true => Level::Note,
                false => Level::Warning,
            };
            findings.push(
                new(
                    level,
                    format!("a bridge sends larger packets than the device below is set to take: {}", reported(&all)),
                )
                .why(MISMATCH)
                .fix("pci=pcie_bus_safe on the kernel's command line, which sets all to what all can"),
            );
            continue;
        }
        let most = all.iter().map(|it| it.most).min().unwrap_or(least);
        findings.push(match least < most.min(256) {
            true => new(
                Level::Note,
                format!("MaxPayload is {least} B along the path, and all of it can {most} B"),
            )
            .why("Each packet has some 20 to 30 bytes of its own beside the payload.")
            .costs("At 128 B headers are 14 to 19 % of what goes over the link, at 256 B 7 to 10 %.")
            .fix("\"Max Payload Size\" in the firmware's setup, or pci=pcie_bus_safe on the kernel's command line"),
            false => new(
                Level::Ok,
                format!("MaxPayload is {least} B and more along the path"),
            ),
        });
    }
    findings
}

/// Each RDMA device that a NIC's own registers count for: with the function and its PCI Express capability.
fn nics<'a>(
    scan: &Scan<'a>,
    check: &'static str,
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
                check,
                Subject::hca(hca),
                format!("{what} of {}", function.at),
                &why,
            )),
        }
    }
    nics
}

fn max_read(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (hca, function, express) in nics(scan, MAX_READ.name, "MaxReadReq", &mut findings) {
        let (at, bytes) = (function.at, express.read_request);
        let level = match bytes {
            // A code that the specification keeps for later.
            0 => continue,
            1..512 => Level::Warning,
            512..4096 => Level::Note,
            _ => Level::Ok,
        };
        let finding = Finding::new(
            MAX_READ.name,
            scan.level_of(hca, level),
            Subject::hca(hca),
            format!("MaxReadReq of {at} is {bytes} B"),
        );
        findings.push(match level {
            Level::Ok => finding,
            _ => finding
                .why("What is sent from GPU memory the NIC reads, in requests of this length; short ones keep \
                    fewer bytes on their way.")
                .fix(format!(
                    "`setpci -s {at} CAP_EXP+0x8.w=5000:7000` (4096 B; until the next boot), or \"Max Read Request \
                     Size\" in the firmware's setup"
                )),
        });
    }
    findings
}

/// Root ports for which Linux turns relaxed ordering off below them: `quirk_relaxedordering_disable` of
/// `drivers/pci/quirks.c`, for errata of Intel's Haswell and Broadwell Xeons and AMD's Seattle.
fn has_erratum(root_port: &Function) -> bool {
    match root_port.vendor {
        0x8086 => matches!(root_port.device, 0x6f01..=0x6f0e | 0x2f01..=0x2f0e),
        0x1022 => matches!(root_port.device, 0x1a00..=0x1a02),
        _ => false,
    }
}

fn relaxed_ordering(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let name = RELAXED_ORDERING.name;
    for (hca, function, express) in nics(scan, name, "relaxed ordering", &mut findings) {
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
            (true, _) => Finding::new(
                name,
                Level::Ok,
                Subject::hca(hca),
                format!("{at} may send with relaxed ordering"),
            ),
            (false, Some(port)) => Finding::new(
                name,
                Level::Note,
                Subject::hca(hca),
                format!(
                    "{at} may not send with relaxed ordering; Linux turns it off below root ports such as {} \
                     ({:04x}:{:04x}), for an erratum",
                    port.at, port.vendor, port.device
                ),
            ),
            (false, None) => Finding::new(
                name,
                scan.level_of(hca, Level::Warning),
                Subject::hca(hca),
                format!("{at} may not send with relaxed ordering (RlxdOrd-)"),
            )
            .why("Every write of the NIC waits for those before it on the way through the root complex.")
            .costs(
                "Reported by others: 150 in place of 200 Gb/s on AMD (UCX#8062), 16 in place of more than 40 GB/s \
                 on Emerald Rapids (UCX#10955).",
            )
            .fix(format!(
                "`setpci -s {at} CAP_EXP+0x8.w=0010:0010` (until the next boot), and \"Relaxed Ordering\" in the \
                 firmware's setup"
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
                Finding::new(
                    name,
                    Level::Note,
                    Subject::gpu(gpu),
                    format!("{} may not send with relaxed ordering (RlxdOrd-)", gpu.at),
                )
                .why("It is the NIC's bit that counts for the NIC's transfers; this one is for what the GPU \
                    itself sends."),
            ),
            Ok(_) => {}
            Err(why) => findings.push(Scan::unseen(
                name,
                Subject::gpu(gpu),
                format!("relaxed ordering of {}", gpu.at),
                &why,
            )),
        }
    }
    findings
}
