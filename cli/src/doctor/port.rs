// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Ports of the cards that are near: whether one is up, and whether its cable has all lanes.

use super::look::Check;
use super::look::Look;
use crate::finding::Finding;
use crate::finding::Level;
use crate::finding::Subject;
use crate::machine::Gpu;
use crate::machine::Hca;
use crate::machine::Pair;
use crate::machine::Port;

pub(super) const PORT: Check = Check {
    name: "port",
    looks_at: "whether a port near each GPU is ACTIVE, with all its lanes",
    run: port,
};

/// `4: ACTIVE` in sysfs.
pub(super) fn is_active(port: &Port) -> bool {
    port.state.as_deref() == Some("ACTIVE")
}

fn port(look: &Look<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let any = look
        .machine
        .hcas
        .iter()
        .flat_map(|hca| &hca.ports)
        .any(is_active);
    for gpu in look.gpus() {
        findings.extend(of_gpu(look, gpu, any));
    }
    for hca in look.hcas() {
        for port in &hca.ports {
            findings.extend(of_port(look, hca, port));
        }
    }
    findings
}

/// One good port of the nearest is enough: second ports of cards often have no cable.
fn of_gpu(look: &Look<'_>, gpu: &Gpu, any: bool) -> Option<Finding> {
    let nearest = |pair: &&Pair| pair.gpu == gpu.at && (pair.is_best || look.only.is_some());
    let hcas: Vec<&Hca> = look
        .pairs()
        .filter(nearest)
        .filter_map(|pair| look.hca(&pair.hca))
        .collect();
    let ports = || {
        hcas.iter()
            .flat_map(|hca| hca.ports.iter().map(|port| (*hca, port)))
    };
    if ports().next().is_none() || ports().any(|(_, port)| is_active(port)) {
        return None;
    }
    // Nobody wrote down any.
    if ports().all(|(_, port)| port.state.is_none()) {
        return None;
    }
    let each: Vec<String> = ports().map(|(hca, port)| named(hca, port)).collect();
    let level = match any {
        true => Level::Warning,
        false => Level::Fault,
    };
    let finding = Finding::new(
        PORT.name,
        level,
        Subject::gpu(gpu),
        format!("no port near the GPU is ACTIVE: {}", each.join(", ")),
    )
    .why("A card whose port is not up moves nothing; software takes one farther away, or none.");
    let mut mends: Vec<String> = ports().map(|(_, port)| mend(port)).collect();
    mends.dedup();
    Some(finding.mend(mends.join("\n")))
}

/// `mlx5_0 port 1 is DOWN`.
fn named(hca: &Hca, port: &Port) -> String {
    format!(
        "{} port {} is {}",
        hca.name,
        port.number,
        port.state.as_deref().unwrap_or("not visible")
    )
}

fn mend(port: &Port) -> String {
    let ethernet = port.layer.as_deref() == Some("Ethernet");
    match (port.state.as_deref(), port.netdevs.first()) {
        (Some("INIT" | "ARMED"), _) if !ethernet => {
            "Its link is up and no subnet manager has given it an address: start opensm, or the switch's, on the \
             fabric".to_owned()
        }
        (_, Some(netdev)) if ethernet => format!(
            "ip link set {netdev} up; ethtool {netdev} tells whether the cable has a link"
        ),
        _ => "Look at cable and module: mlxlink -d DEVICE -m".to_owned(),
    }
}

fn of_port(look: &Look<'_>, hca: &Hca, port: &Port) -> Option<Finding> {
    let subject = Subject::hca(hca);
    if !is_active(port) {
        port.state.as_ref()?;
        return Some(Finding::new(
            PORT.name,
            Level::Note,
            subject,
            named(hca, port),
        ));
    }
    let rate = port.rate.as_deref().unwrap_or("unknown rate");
    let found = format!("port {} is ACTIVE, {rate}", port.number);
    // Ethernet's lanes are whatever the speed has; of InfiniBand two are HDR100 and NDR200, one is a cable gone bad.
    let is_narrow = port.layer.as_deref() == Some("InfiniBand") && rate.contains("(1X ");
    if !is_narrow {
        return Some(Finding::new(PORT.name, Level::Well, subject, found));
    }
    Some(
        Finding::new(
            PORT.name,
            look.level_of(hca, Level::Warning),
            subject,
            format!("{found}: one lane of four"),
        )
        .why("Lanes fall out where a cable or module is bad; the link then goes on with those that are left.")
        .costs("Three quarters of the rate.")
        .mend("Look at cable and module: mlxlink -d DEVICE -m; seat it anew, or take another"),
    )
}
