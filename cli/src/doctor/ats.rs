// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Address Translation Services of the NIC, and the switch's handling of translated requests.

use super::controls::control;
use super::iommu::{mode, Mode};
use super::route::routes;
use super::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::host::Unseen;
use crate::machine::config::{Acs, Config};

check! {
    "ats": "the NIC's Address Translation Services, and whether switches let them through",
    super::route::applies, ats, OnPaths(tests::FAULTS)
}

fn ats(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (pair, route) in routes(scan) {
        let Some((nic_port, _)) = route.turn() else {
            continue;
        };
        let enabled = match route.nic.config().and_then(Config::ats) {
            Ok(enabled) => enabled,
            Err(Unseen::Absent) => continue,
            Err(why) => {
                let what = format!("ATS of {}", route.nic.at);
                findings.push(Scan::unseen(Subject::pair(pair), what, &why));
                continue;
            }
        };
        let blocks = control(nic_port).is_ok_and(|set| set & Acs::TB != 0);
        let translated = matches!(mode(scan, route.nic), Ok((Mode::Translates(_), _)));
        let (subject, nic) = (Subject::pair(pair), route.nic.at);
        let finding = match (enabled, blocks) {
            (true, true) => subject
                .fault(format!(
                    "{nic} has ATS on, but {} drops translated requests (TransBlk)",
                    nic_port.at
                ))
                .why(
                    "A port with Translation Blocking drops requests with addresses that ATS has already translated.",
                )
                .fix(format!("`setpci -s {} ECAP_ACS+0x6.w=0000:0002`", nic_port.at)),
            (false, _) if translated => subject
                .note(format!("{nic} supports ATS, which is off"))
                .why(
                    "If an IOMMU must translate, as on a host of virtual machines, packets turn round in the switch \
                     only with ATS, and with DirectTrans at the NIC's port.",
                )
                .fix(format!(
                    "`mlxconfig -d {nic} set ATS_ENABLED=true`, and a cold boot (NVIDIA AI Enterprise, \"ATS and ACS \
                     configuration\")"
                )),
            (true, _) => subject.ok(format!("ATS of {nic} is on")),
            (false, _) => subject.ok(format!("ATS of {nic} is off, and no IOMMU is known to translate")),
        };
        findings.push(scan.judged(pair, finding));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, ACS, ATS, FIRST};
    use crate::machine::config::Acs;

    faults! {
        "translated requests dropped",
            "fault ats: …0000:14:00.0 has ATS on, but 0000:12:01.0 drops… fix …setpci -s 0000:12:01.0 \
             ECAP_ACS+0x6.w=0000:0002" => |fixture| {
            let it = socket(FIRST);
            fixture.set(it.nic, ATS + 6, 0x8000);
            fixture.set(it.nic_port, ACS + 6, Acs::TB | Acs::DT);
        };
    }
}
