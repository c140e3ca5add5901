// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The peer-memory clients that the module has registered in ib_core: persistent or revocable, and
//! their names.

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::host::Unseen;
use crate::software::Module;

check! {
    "clients": "the module's clients in ib_core, their kind, and whether they belong to this module",
    super::has_module, check, OfSoftware(tests::FAULTS)
}

pub(super) const MEMORY_PEERS: &str = "/sys/kernel/mm/memory_peers";

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let Some(module) = scan.software().loaded() else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    let is_revocable = match Module::parameter(scan.host, "persistent_api_support") {
        Ok(value) => value == "0",
        // NVIDIA's nvidia_peermem before version 560 lacks this parameter, and registers two
        // clients: nv_mem and nv_mem_nc.
        Err(Unseen::Absent) => !module.is_ours,
        Err(why) => {
            let what = "the parameter persistent_api_support";
            findings.push(Scan::unseen(Subject::Machine, what, &why));
            return findings;
        }
    };
    if is_revocable && module.is_ours {
        findings.push(
            Subject::Machine.note("persistent_api_support=0: registrations are revoked when their memory is freed, \
            if the NIC supports that")
            .why(
                "a forgotten registration cannot hold memory; and the second client, nv_mem_nc, serves a NIC whose \
                driver does not support revocation",
            ),
        );
    }
    let second = is_revocable.then_some("nv_mem_nc");
    let wanted: Vec<&str> = std::iter::once("nv_mem").chain(second).collect();
    match scan.host.names(MEMORY_PEERS) {
        Ok(names) => findings.extend(shown(scan, module, &wanted, &names)),
        // The check `consumers` reports software that looks only at this directory.
        Err(Unseen::Absent) => {}
        Err(why) => findings.push(Scan::unseen(Subject::Machine, MEMORY_PEERS, &why)),
    }
    findings
}

/// Compares the clients in [`MEMORY_PEERS`] with the clients that the loaded module should have.
fn shown(scan: &Scan<'_>, module: &Module, wanted: &[&str], names: &[String]) -> Option<Finding> {
    let there = |name: &&&str| names.iter().any(|known| known == **name);
    if let Some(lacking) = wanted.iter().find(|name| !there(name)) {
        return Some(
            Subject::Machine.warning(format!(
                "{} is loaded, but {MEMORY_PEERS} does not show its client {lacking} (it shows {})",
                module.named(),
                listed(names)
            ))
            .why(
                "the directory belongs to another stack, or the client is not registered; software that only looks \
                there does not find the module",
            )
            .fix("look for two stacks with peer memory (`dmesg | grep memory_peers`), and load the module again \
            after the other stack is gone"),
        );
    }
    let version = scan
        .host
        .text(&format!("{MEMORY_PEERS}/nv_mem/version"))
        .ok();
    match (&version, &module.version) {
        (Some(shown), Some(own)) if shown != own => Some(
            Subject::Machine
                .warning(format!(
                    "the client nv_mem is version {shown}, but the loaded module is version {own}"
                ))
                .why("the client of that name in ib_core belongs to another module")
                .fix(
                    "`lsmod | grep -i peer` shows both modules; unload the one that is not wanted",
                ),
        ),
        _ => {
            Some(Subject::Machine.ok(format!("ib_core has the client {}", wanted.join(", then "))))
        }
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() {
        "nothing".to_owned()
    } else {
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, PEERS};
    use crate::fixture::software::OURS;
    use crate::software::MODULE;

    faults! {
        "another stack's memory_peers", "warning clients: …does not show its client nv_mem (it shows other)" =>
            |fixture| {
                fixture.remove(&format!("{PEERS}/nv_mem"));
                fixture.directory(&format!("{PEERS}/other"));
            };
        "another module's nv_mem", "warning clients: …nv_mem is version 1.3-0" =>
            |fixture| fixture.file(&format!("{PEERS}/nv_mem/version"), "1.3-0\n");
        "revocable registrations", "note clients: …persistent_api_support=0" => |fixture| {
            fixture.file(&format!("{MODULE}/parameters/persistent_api_support"), "0\n");
            fixture.file(&format!("{PEERS}/nv_mem_nc/version"), OURS);
        };
        "revocable registrations, and the second client is missing",
            "note clients: …persistent_api_support=0", "warning clients: …does not show its client nv_mem_nc" =>
            |fixture| fixture.file(&format!("{MODULE}/parameters/persistent_api_support"), "0\n");
    }
}
