// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Address Translation Services of the NIC, and the switch's handling of translated requests.

use super::controls::control;
use super::iommu::{mode, Mode};
use super::route::Route;
use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::Unseen;
use crate::machine::config::{Acs, Config};

check! {
    "ats": "the NIC's Address Translation Services, and whether switches let them through",
    super::route::applies, ats, OnPaths(tests::FAULTS)
}

fn ats(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for pair in scan.pairs() {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
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
        let new = |level, found: String| {
            Finding::new(scan.level(pair, level), Subject::pair(pair), found)
        };
        findings.push(match (enabled, blocks) {
            (true, true) => new(
                Level::Fault,
                format!(
                    "{} has ATS on, and {} drops what it translated (TransBlk)",
                    route.nic.at, nic_port.at
                ),
            )
            .why("A request whose address the NIC has had translated is dropped by a port with Translation \
                Blocking.")
            .fix(format!(
                "`setpci -s {} ECAP_ACS+0x6.w=0000:0002`",
                nic_port.at
            )),
            (false, _) if translated => new(
                Level::Note,
                format!("{} can ATS, and it is off", route.nic.at),
            )
            .why(
                "With an IOMMU that must translate, as on a host of virtual machines, ATS and DirectTrans of the \
                 NIC's port are what lets packets turn round in the switch.",
            )
            .fix(format!(
                "`mlxconfig -d {} set ATS_ENABLED=true`, and a cold boot (NVIDIA AI Enterprise, \"ATS and ACS \
                 configuration\")",
                route.nic.at
            )),
            (on, _) => new(
                Level::Ok,
                format!(
                    "ATS of {} is {}",
                    route.nic.at,
                    if on { "on" } else { "off, as nothing translates" }
                ),
            ),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, ACS, ATS, FIRST};
    use crate::machine::config::Acs;

    faults! {
        "translated requests dropped",
            "fault ats: …0000:14:00.0 has ATS on, and 0000:12:01.0 drops… fix …setpci -s 0000:12:01.0 \
             ECAP_ACS+0x6.w=0000:0002" => |fixture| {
            let it = socket(FIRST);
            fixture.set(it.nic, ATS + 6, 0x8000);
            fixture.set(it.nic_port, ACS + 6, Acs::TB | Acs::DT);
        };
    }
}
