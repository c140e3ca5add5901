// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Access Control Services, where packets could turn round.
//!
//! A port with ACS can send packets between devices up to the root complex in place of straight across. That is a
//! choice only where there are two ways: at the ports of the switch that both devices hang under. Below, in a switch
//! that only one of them hangs under, up is the only way; above, packets do not come; and between root ports they are
//! in the root complex already, so that redirection takes nothing from them. What each bit does to which packets (PCI
//! Express 7.0, 6.12.3):
//!
//! - Request Redirect acts where requests come in: those of the NIC at the NIC's port, those of the GPU at the
//!   GPU's.
//! - Completion Redirect acts on answers: the GPU's to the NIC's reads, at the GPU's port, unless they are marked as
//!   relaxed.
//! - Egress Control blocks requests to ports of a list, or redirects them with Request Redirect.
//! - Upstream Forwarding is about packets that were redirected below, and Source Validation about false senders:
//!   neither matters here.
//! - Direct Translated lets requests whose address the IOMMU has translated (ATS) go straight in spite of all
//!   redirection; Translation Blocking drops them.

use super::route::Route;
use super::scan::Check;
use super::scan::Scan;
use crate::finding::Finding;
use crate::finding::Level;
use crate::finding::Subject;
use crate::host::Seen;
use crate::host::Unseen;
use crate::machine::config::Acs;
use crate::machine::pci::Function;
use crate::machine::Pair;

pub(super) const ACS: Check = Check {
    name: "acs",
    about: "ACS redirection where packets between GPU and NIC can turn round",
    applies: super::route::applies,
    run: acs,
};

/// Bits that send packets between devices up: what `pci=disable_acs_redir` clears.
const REDIRECTS: u16 = Acs::RR | Acs::CR | Acs::EC;

/// What of ACS is on at a port. A port without ACS has nothing on.
pub(super) fn control(port: &Function) -> Seen<u16> {
    match port.config()?.acs() {
        Err(Unseen::Absent) => Ok(0),
        other => other,
    }
}

/// Whether the NIC asks the IOMMU for translations itself.
pub(super) fn translates(nic: &Function) -> Seen<bool> {
    match nic.config()?.ats() {
        Err(Unseen::Absent) => Ok(false),
        other => other,
    }
}

fn acs(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for pair in scan.pairs() {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
        let Some((nic_port, gpu_port)) = route.turn() else {
            findings.extend(at_root(pair, &route));
            continue;
        };
        let subject = Subject::pair(pair);
        let (nic_set, gpu_set) = match (control(nic_port), control(gpu_port)) {
            (Ok(nic), Ok(gpu)) => (nic, gpu),
            (Err(why), _) | (_, Err(why)) => {
                let what = format!("ACS of {} and {}", nic_port.at, gpu_port.at);
                findings.push(Scan::unseen(ACS.name, subject, what, &why));
                continue;
            }
        };
        // What ATS has translated goes straight. Where it cannot be seen, it is not counted on.
        let straight =
            nic_set & (Acs::DT | Acs::TB) == Acs::DT && translates(route.nic).unwrap_or(false);
        let requests = nic_set & (Acs::RR | Acs::EC);
        let answers = gpu_set & Acs::CR;
        let of_gpu = (gpu_set & (Acs::RR | Acs::EC)) | (nic_set & Acs::CR);
        let level = match (requests | answers, of_gpu) {
            (0, 0) => Level::Ok,
            _ if straight => Level::Ok,
            // Only what the GPU itself asks of the NIC.
            (0, _) => Level::Note,
            _ => Level::Warning,
        };
        let mut parts = Vec::new();
        for (port, whose, set) in [(nic_port, "NIC", nic_set), (gpu_port, "GPU", gpu_set)] {
            let on = Acs::names(set & REDIRECTS);
            if !on.is_empty() {
                parts.push(format!(
                    "{} (the {whose}'s port) has {}",
                    port.at,
                    on.join(", ")
                ));
            }
        }
        let found = match parts.is_empty() {
            true => format!(
                "no redirection at {} and {}, the switch ports of NIC and GPU",
                nic_port.at, gpu_port.at
            ),
            false if straight => format!(
                "{}; the NIC's ATS is on and {} lets translated requests straight through",
                parts.join(", "),
                nic_port.at
            ),
            false => parts.join(", "),
        };
        let finding = Finding::new(ACS.name, scan.level(pair, level), subject, found);
        findings.push(match level {
            Level::Ok => finding,
            Level::Note => finding.why(
                "What a GPU asks of the NIC, as in GPU-initiated networking, goes up to the root complex in place \
                 of straight through the switch. The NIC's own transfers do not.",
            ),
            _ => finding
                .why(
                    "NIC and GPU hang under one switch, where packets can turn round. With redirection each goes \
                     up to the root complex and comes down again, if that lets it through at all.",
                )
                .costs(
                    "Half of the bandwidth, by NCCL's maintainers (nccl-tests#112), or transfers that hang (NCCL's \
                     troubleshooting page).",
                )
                .fix(fix(&[(nic_port, nic_set), (gpu_port, gpu_set)])),
        });
    }
    findings
}

/// Between root ports, without a common switch: worth knowing, and no fault.
fn at_root(pair: &Pair, route: &Route<'_>) -> Option<Finding> {
    if !route.is_through_root() {
        return None;
    }
    // The end itself is no port, where it hangs on the host bridge.
    let highest = |end| route.down_to(end).first().copied();
    let on: Vec<String> = [highest(route.nic), highest(route.gpu)]
        .into_iter()
        .flatten()
        .filter(|port| port.at != route.nic.at && port.at != route.gpu.at)
        .filter_map(|port| {
            let set = control(port).ok()? & REDIRECTS;
            (set != 0).then(|| format!("{} has {}", port.at, Acs::names(set).join(", ")))
        })
        .collect();
    if on.is_empty() {
        return None;
    }
    let found = format!(
        "{}: root ports, so packets are in the root complex anyway",
        on.join(", ")
    );
    Some(Finding::new(
        ACS.name,
        Level::Note,
        Subject::pair(pair),
        found,
    ))
}

/// Clears what redirects, and nothing else.
fn fix(ports: &[(&Function, u16)]) -> String {
    let bad: Vec<&Function> = ports
        .iter()
        .filter(|(_, set)| set & REDIRECTS != 0)
        .map(|(port, _)| *port)
        .collect();
    let mut lines: Vec<String> = bad
        .iter()
        .map(|port| {
            format!(
                "`setpci -s {} ECAP_ACS+0x6.w=0000:{REDIRECTS:04x}`",
                port.at
            )
        })
        .collect();
    lines.push(
        "That lasts until the next boot. For good: ACS off in the firmware's setup (\"ACS Enable\", \"ACS \
         Control\"), or pci=disable_acs_redir=ADDRESS;ADDRESS on the kernel's command line."
            .to_owned(),
    );
    lines.push(
        "Not on a host whose GPUs or NICs are given to virtual machines: ACS keeps these apart. There set the \
         NIC's ATS_ENABLED with mlxconfig and DirectTrans (0x40) at its port."
            .to_owned(),
    );
    lines.join("\n")
}
