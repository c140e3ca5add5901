// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Maximum read request of the NIC.

use super::packets::nics;
use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};

check! {
    "max-read-request": "the NIC's MaxReadReq",
    |scan| scan.has_hardware_hca(), max_read, OnPaths(tests::FAULTS)
}

fn max_read(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (hca, function, express) in nics(scan, "MaxReadReq", &mut findings) {
        let (at, bytes) = (function.at, express.read_request);
        let level = match bytes {
            // 0 stands for a reserved code.
            0 => continue,
            1..512 => Level::Warning,
            512..4096 => Level::Note,
            _ => Level::Ok,
        };
        let finding = Finding::new(
            scan.level_of(hca, level),
            Subject::hca(hca),
            format!("MaxReadReq of {at} is {bytes} B"),
        );
        findings.push(match level {
            Level::Ok => finding,
            _ => finding
                .why("To send GPU memory, the NIC reads it in requests of this length. Short requests keep fewer \
                    bytes in flight.")
                .fix(format!(
                    "`setpci -s {at} CAP_EXP+0x8.w=5000:7000` (4096 B; until the next boot), or \"Max Read Request \
                     Size\" in the firmware's setup"
                )),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, EXPRESS, FIRST};

    faults! {
        "a NIC with short reads",
            "warning max-read-request: …MaxReadReq of 0000:14:00.0 is 256 B… fix …setpci -s 0000:14:00.0 \
             CAP_EXP+0x8.w=5000:7000" => |fixture| fixture.set(socket(FIRST).nic, EXPRESS + 8, 0x1050);
    }
}
