// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Loading of the module at the next boot, and after a restart of openibd.

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::software::Module;

check! {
    "module-at-boot": "whether the module comes back at boot, and after openibd's restart",
    applies, check, OfSoftware(tests::FAULTS)
}

/// Directories that contain systemd's units from the administrator and from the distribution.
const UNITS: [&str; 3] = [
    "/etc/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
const MODULES_LOAD: [&str; 4] = [
    "/etc/modules-load.d",
    "/run/modules-load.d",
    "/usr/lib/modules-load.d",
    "/lib/modules-load.d",
];

/// Returns `true` if a module is loaded and systemd's directory exists. A system without the
/// directory is a container, or does not boot with systemd.
fn applies(scan: &Scan<'_>) -> bool {
    super::has_module(scan) && scan.host.names("/etc/systemd/system").is_ok()
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let Some(module) = scan.software().loaded() else {
        return Vec::new();
    };
    let note = |text: &str| Subject::Machine.note(text);
    let mut findings = Vec::new();
    if !comes_at_boot(scan) {
        findings.push(
            note("nothing was found that loads nvidia_peermem at boot")
                .why("it is loaded now, but may not be after the next boot")
                .fix(if module.is_ours {
                    "`sudo systemctl enable peermem-rs`"
                } else {
                    "`echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf`"
                }),
        );
    }
    if has_openibd(scan) && !comes_after_openibd(scan, module) {
        findings.push(
            note("openibd is installed, but nothing was found that loads nvidia_peermem after openibd restarts")
                .why(
                    "openibd does not know the module: a restart of openibd fails while the module is loaded, or \
                    unloads the module and does not load it again (packaging/peermem-rs.service)",
                )
                .fix(if module.is_ours {
                    "`sudo systemctl enable peermem-rs`, which starts and stops with openibd"
                } else {
                    "a drop-in of openibd.service with \"ExecStartPost=/sbin/modprobe nvidia-peermem\"; peermem-rs \
                    includes a service"
                }),
        );
    }
    findings
}

/// Returns `true` if a file in the directory is named after the module.
fn speaks(scan: &Scan<'_>, folder: &str) -> bool {
    let names = scan.host.names(folder).unwrap_or_default();
    names.iter().any(|name| name.contains("peermem"))
}

fn comes_at_boot(scan: &Scan<'_>) -> bool {
    let wanted = |target: &str| {
        UNITS
            .iter()
            .any(|units| speaks(scan, &format!("{units}/{target}.target.wants")))
    };
    let named = |file: &str| {
        let text = scan.host.text(file).unwrap_or_default();
        text.lines()
            .any(|line| matches!(line.trim(), "nvidia-peermem" | "nvidia_peermem"))
    };
    let listed = MODULES_LOAD.iter().any(|folder| {
        let names = scan.host.names(folder).unwrap_or_default();
        names.iter().any(|name| named(&format!("{folder}/{name}")))
    });
    wanted("multi-user") || wanted("sysinit") || listed || named("/etc/modules")
}

fn has_openibd(scan: &Scan<'_>) -> bool {
    let there = |path: String| scan.host.has(&path) == Ok(true);
    there("/etc/init.d/openibd".to_owned())
        || UNITS
            .iter()
            .any(|units| there(format!("{units}/openibd.service")))
}

fn comes_after_openibd(scan: &Scan<'_>, module: &Module) -> bool {
    let wants = UNITS
        .iter()
        .any(|units| speaks(scan, &format!("{units}/openibd.service.wants")));
    if wants || module.is_ours {
        return wants;
    }
    UNITS.iter().any(|units| {
        let folder = format!("{units}/openibd.service.d");
        let names = scan.host.names(&folder).unwrap_or_default();
        names.iter().any(|name| {
            scan.host
                .text(&format!("{folder}/{name}"))
                .is_ok_and(|text| text.contains("peermem"))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::faults;

    faults! {
        "nothing that loads it at boot, with openibd",
            "note module-at-boot: …at boot", "note module-at-boot: …openibd is installed" => |fixture| {
            fixture.directory("/etc/systemd/system/multi-user.target.wants");
            fixture.file("/usr/lib/systemd/system/openibd.service", "[Service]\n");
        };
        "a service that loads it, with openibd" => |fixture| {
            for target in ["multi-user.target", "openibd.service"] {
                fixture.link(
                    &format!("/etc/systemd/system/{target}.wants/peermem-rs.service"),
                    "../peermem-rs.service",
                );
            }
            fixture.file("/usr/lib/systemd/system/openibd.service", "[Service]\n");
        };
    }
}
