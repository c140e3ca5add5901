// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Does the module come back: at the next boot, and after openibd's restart?

use crate::doctor::look::Look;
use crate::finding::Finding;
use crate::finding::Level;
use crate::finding::Subject;
use crate::software::Module;

/// The check's name.
pub(super) const NAME: &str = "module-at-boot";

/// Where systemd and its modules-load look, in `/etc` and in the distribution's own.
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

/// Without systemd's folder this is a container, or something that boots in another way.
pub(super) fn applies(look: &Look<'_>) -> bool {
    super::has_module(look) && look.host.names("/etc/systemd/system").is_ok()
}

pub(super) fn check(look: &Look<'_>) -> Vec<Finding> {
    let Some(module) = look.software().loaded() else {
        return Vec::new();
    };
    let note = |text: &str| Finding::new(NAME, Level::Note, Subject::Machine, text);
    let mut findings = Vec::new();
    if !comes_at_boot(look) {
        findings.push(
            note("nothing was found that loads nvidia_peermem at boot")
                .why("it is loaded now, and may not be after the next start of the machine")
                .mend(if module.is_ours {
                    "`sudo systemctl enable peermem-rs`"
                } else {
                    "`echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf`"
                }),
        );
    }
    if has_openibd(look) && !comes_after_openibd(look, module) {
        findings.push(
            note("openibd is here, and nothing was found that loads nvidia_peermem after its restart")
                .why(
                    "openibd knows nothing of the module: its restart fails while the module is loaded, or throws it \
                    out, and does not load it again (packaging/peermem-rs.service)",
                )
                .mend(if module.is_ours {
                    "`sudo systemctl enable peermem-rs`, which hangs itself on openibd"
                } else {
                    "a drop-in of openibd.service with \"ExecStartPost=/sbin/modprobe nvidia-peermem\"; peermem-rs \
                    brings a service"
                }),
        );
    }
    findings
}

/// A name in the folder that speaks of the module.
fn speaks(look: &Look<'_>, folder: &str) -> bool {
    let names = look.host.names(folder).unwrap_or_default();
    names.iter().any(|name| name.contains("peermem"))
}

fn comes_at_boot(look: &Look<'_>) -> bool {
    let wanted = |target: &str| {
        UNITS
            .iter()
            .any(|units| speaks(look, &format!("{units}/{target}.target.wants")))
    };
    let named = |file: &str| {
        let text = look.host.text(file).unwrap_or_default();
        text.lines()
            .any(|line| matches!(line.trim(), "nvidia-peermem" | "nvidia_peermem"))
    };
    let listed = MODULES_LOAD.iter().any(|folder| {
        let names = look.host.names(folder).unwrap_or_default();
        names.iter().any(|name| named(&format!("{folder}/{name}")))
    });
    wanted("multi-user") || wanted("sysinit") || listed || named("/etc/modules")
}

fn has_openibd(look: &Look<'_>) -> bool {
    let there = |path: String| look.host.has(&path) == Ok(true);
    there("/etc/init.d/openibd".to_owned())
        || UNITS
            .iter()
            .any(|units| there(format!("{units}/openibd.service")))
}

fn comes_after_openibd(look: &Look<'_>, module: &Module) -> bool {
    let wants = UNITS
        .iter()
        .any(|units| speaks(look, &format!("{units}/openibd.service.wants")));
    if wants || module.is_ours {
        return wants;
    }
    UNITS.iter().any(|units| {
        let folder = format!("{units}/openibd.service.d");
        let names = look.host.names(&folder).unwrap_or_default();
        names.iter().any(|name| {
            look.host
                .text(&format!("{folder}/{name}"))
                .is_ok_and(|text| text.contains("peermem"))
        })
    })
}
