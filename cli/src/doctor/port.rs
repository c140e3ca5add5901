// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Ports of the RDMA devices nearest to each GPU: state, number of lanes, and rate compared with
//! ports of the same kind.

use super::scan::{check, Scan};
use crate::finding::{argument, Finding, Level, Subject};
use crate::machine::hca::gigabits;
use crate::machine::pci::Address;
use crate::machine::{Class, Gpu, Hca, Pair, Port};
use crate::render::unique;

check! {
    "port": "whether the ports near each GPU are ACTIVE, with all their lanes, and as fast as others of their kind",
    |scan| scan.has_hca(), port, OnPaths(tests::FAULTS)
}

fn port(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let any = scan
        .machine
        .hcas
        .iter()
        .flat_map(|hca| &hca.ports)
        .any(Port::is_active);
    for gpu in scan.gpus() {
        findings.extend(of_gpu(scan, gpu, any));
    }
    for hca in scan.hcas() {
        for port in &hca.ports {
            findings.extend(of_port(scan, hca, port));
        }
    }
    findings
}

/// Returns the ports of the RDMA devices nearest to a GPU, if none of these ports is up.
fn all_down<'a>(scan: &Scan<'a>, gpu: &Gpu) -> Option<Vec<(&'a Hca, &'a Port)>> {
    let nearest = |pair: &&Pair| match scan.only {
        Some(only) => pair.hca == only.hca,
        None => pair.is_best,
    };
    let ports: Vec<(&Hca, &Port)> = scan
        .machine
        .pairs_of(gpu.at)
        .iter()
        .filter(nearest)
        .filter_map(|pair| scan.hca(&pair.hca))
        .flat_map(|hca| hca.ports.iter().map(move |port| (hca, port)))
        .collect();
    let is_up = ports.iter().any(|(_, port)| port.is_active());
    // If the state of every port is unknown, the GPU gets no finding.
    let is_known = ports.iter().any(|(_, port)| port.state.is_some());
    (is_known && !is_up).then_some(ports)
}

fn of_gpu(scan: &Scan<'_>, gpu: &Gpu, any: bool) -> Option<Finding> {
    let ports = all_down(scan, gpu)?;
    let each: Vec<String> = ports.iter().map(|(hca, port)| named(hca, port)).collect();
    let level = match any {
        true => Level::Warning,
        false => Level::Fault,
    };
    let finding = Finding::new(
        level,
        Subject::gpu(gpu),
        format!("no port near the GPU is ACTIVE: {}", each.join(", ")),
    )
    .why(
        "A port that is not up transfers nothing; software uses an RDMA device farther away, or none.",
    );
    Some(finding.fix(fixes(&ports)))
}

/// Returns the fixes for all ports. A fix that several ports need appears once.
fn fixes(ports: &[(&Hca, &Port)]) -> String {
    let all: Vec<String> = ports.iter().map(|(hca, port)| fix(hca, port)).collect();
    unique(all.iter().map(String::as_str)).join("\n")
}

/// Describes a port and its state: `mlx5_0 port 1 is DOWN`.
fn named(hca: &Hca, port: &Port) -> String {
    format!(
        "{} port {} is {}",
        hca.name,
        port.number,
        port.state.as_deref().unwrap_or("not visible")
    )
}

pub(super) fn fix(hca: &Hca, port: &Port) -> String {
    let ethernet = port.layer.as_deref() == Some("Ethernet");
    match (port.state.as_deref(), port.netdevs.first()) {
        (Some("INIT" | "ARMED"), _) if !ethernet => {
            "The port's link is up, but no subnet manager has given the port an address: start opensm on the fabric, or the \
             switch's subnet manager"
                .to_owned()
        }
        (_, Some(netdev)) if ethernet => {
            let netdev = argument(netdev);
            format!("`ip link set {netdev} up`; `ethtool {netdev}` shows whether the cable has a link")
        }
        _ => cable(hca),
    }
}

/// Returns the command that examines the cable of a port.
pub(super) fn cable(hca: &Hca) -> String {
    format!(
        "`mlxlink -d {} -m -c`\nIt shows the cable and the transceivers; check the switch's port, too.",
        argument(&hca.name)
    )
}

/// Returns `true` if an earlier port of the same NIC is up. A later port may be down on purpose: a
/// second port often has no cable, and a virtual function may be meant for a virtual machine.
fn is_spare(scan: &Scan<'_>, hca: &Hca, port: &Port) -> bool {
    // The physical function identifies the NIC, and orders its ports.
    let place = |hca: &Hca, port: &Port| {
        let at = hca.at?;
        let physical = scan.machine.functions.get(&at)?.physical.unwrap_or(at);
        let nic = Address {
            function: 0,
            ..physical
        };
        Some((nic, (physical, hca.is_software, at, port.number)))
    };
    let Some((nic, own)) = place(hca, port) else {
        return false;
    };
    let mut ports = scan
        .machine
        .hcas
        .iter()
        .flat_map(|hca| hca.ports.iter().map(move |port| (hca, port)));
    ports.any(|(hca, port)| {
        port.is_active() && place(hca, port).is_some_and(|(its, place)| its == nic && place < own)
    })
}

/// Returns `true` if each GPU nearest to this RDMA device already has a finding that no port near
/// the GPU is up.
fn is_told(scan: &Scan<'_>, hca: &Hca) -> bool {
    let mut gpus = scan
        .pairs()
        .filter(|pair| pair.hca == hca.name && (pair.is_best || scan.only.is_some()))
        .filter_map(|pair| scan.gpu(pair.gpu));
    gpus.all(|gpu| all_down(scan, gpu).is_some())
}

fn of_port(scan: &Scan<'_>, hca: &Hca, port: &Port) -> Option<Finding> {
    let subject = Subject::hca(hca);
    if !port.is_active() {
        let state = port.state.as_deref()?;
        let found = format!("port {} is {state}", port.number);
        let level = match is_spare(scan, hca, port) || is_told(scan, hca) {
            true => Level::Note,
            false => scan.level_of(hca, Level::Warning),
        };
        let finding = Finding::new(level, subject, found);
        return Some(match level {
            Level::Warning => finding
                .why(
                    "This RDMA device is the nearest to a GPU. Software fails, or uses another RDMA device and shares \
                     its bandwidth.",
                )
                .fix(fix(hca, port)),
            _ => finding,
        });
    }
    let rate = port.rate.as_deref().unwrap_or("unknown rate");
    let found = format!("port {} is ACTIVE, {rate}", port.number);
    // The number of Ethernet lanes depends on the speed. On InfiniBand, two lanes mean HDR100 or
    // NDR200, and one lane means a bad cable.
    let is_narrow = port.layer.as_deref() == Some("InfiniBand") && rate.contains("(1X ");
    if !is_narrow {
        return Some(match faster(scan, hca, port) {
            Some(peers) => slow(scan, hca, &found, port, &peers),
            None => subject.ok(found),
        });
    }
    Some(
        Finding::new(
            scan.level_of(hca, Level::Warning),
            subject,
            format!("{found}: one lane of four"),
        )
        .why("A bad cable or module loses lanes; the link then continues with the remaining lanes.")
        .costs("Three quarters of the rate.")
        .fix(cable(hca)),
    )
}

/// Faster ports of the same kind.
struct Faster {
    /// Highest rate, in Mb/s.
    most: u64,
    /// Highest rate, in the format of sysfs.
    rate: String,
    count: usize,
}

/// Returns the properties that RDMA devices of one kind share: the NIC's model and function number,
/// and the class of the path to the nearest GPU. Devices of one kind should have equal rates. A
/// storage NIC of the same model is farther away from the GPUs, and thus of another kind.
pub(super) fn kind(scan: &Scan<'_>, hca: &Hca) -> Option<(u16, u16, u8, Class)> {
    let function = scan.machine.functions.get(&hca.at?)?;
    let class = scan.nearest(hca)?;
    Some((
        function.vendor,
        function.device,
        function.at.function,
        class,
    ))
}

fn faster(scan: &Scan<'_>, hca: &Hca, port: &Port) -> Option<Faster> {
    let own = kind(scan, hca).filter(|_| !hca.is_software)?;
    let rate = port.megabits()?;
    let peers: Vec<(u64, &Port)> = scan
        .machine
        .hcas
        .iter()
        .filter(|peer| !peer.is_software && kind(scan, peer) == Some(own))
        .flat_map(|peer| &peer.ports)
        .filter(|peer| peer.is_active() && (peer.number, &peer.layer) == (port.number, &port.layer))
        .filter_map(|peer| Some((peer.megabits()?, peer)))
        .collect();
    let (most, fastest) = peers.iter().max_by_key(|(rate, _)| *rate)?;
    (*most > rate).then(|| Faster {
        most: *most,
        rate: fastest.rate.clone().unwrap_or_default(),
        count: peers.iter().filter(|(rate, _)| rate == most).count(),
    })
}

fn slow(scan: &Scan<'_>, hca: &Hca, found: &str, port: &Port, peers: &Faster) -> Finding {
    let others = match peers.count {
        1 => "another of its kind has".to_owned(),
        count => format!("{count} others of its kind have"),
    };
    Finding::new(scan.level_of(hca, Level::Warning),
        Subject::hca(hca),
        format!("{found}; {others} {}", peers.rate),
    )
    .why(
        "NICs of one model at the same distance from their GPUs usually have equal ports. A cable may be of a slower \
         kind or have lost lanes, or the switch's port may be split or set to a lower speed.",
    )
    .costs(format!(
        "{} of {} Gb/s; a collective over all of them runs at the pace of the slowest.",
        gigabits(port.megabits().unwrap_or(0)),
        gigabits(peers.most)
    ))
    .fix(cable(hca))
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, TwoSockets, FIRST, SECOND};
    use super::{fix, fixes, Port};
    use crate::machine::pci::Address;

    faults! {
        "a port that is down", "warning port: …mlx5_0 port 1 is DOWN… fix …mlxlink -d mlx5_0 -m" =>
            |fixture| fixture.machine.hcas[0].ports[0].state = Some("DOWN".to_owned());
        "a port that is down beside one that is as near and up",
            "warning port: …port 1 is DOWN… fix …mlxlink -d mlx5_2 -m" => |fixture| {
            fixture.nic_that_is_down(Address {
                device: 1,
                ..socket(FIRST).nic
            });
        };
        "no port that is up", "fault port: …mlx5_0 port 1 is INIT… fix …opensm" => |fixture| {
            fixture.machine.hcas.truncate(1);
            fixture.machine.gpus.truncate(1);
            fixture.machine.functions.remove(&socket(SECOND).nic);
            fixture.machine.hcas[0].ports[0].state = Some("INIT".to_owned());
            fixture.pair_up();
        };
        "an Ethernet port that is down", "warning port: …mlx5_0 port 1 is DOWN… fix …ip link set ens1np0 up" =>
            |fixture| {
                let port = &mut fixture.machine.hcas[0].ports[0];
                port.state = Some("DOWN".to_owned());
                port.layer = Some("Ethernet".to_owned());
                port.netdevs = vec!["ens1np0".to_owned()];
            };
        "a cable with one lane", "warning port: …one lane of four… fix …mlxlink" =>
            |fixture| fixture.machine.hcas[0].ports[0].rate = Some("100 Gb/sec (1X NDR)".to_owned());
    }

    #[test]
    fn ports_that_need_the_same_fix_show_the_fix_once() {
        let fixture = TwoSockets::healthy();
        let hca = &fixture.machine.hcas[0];
        let in_state = |state: &str| Port {
            state: Some(state.to_owned()),
            ..hca.ports[0].clone()
        };
        let ports = ["INIT", "DOWN", "INIT"].map(in_state);
        let shown = fixes(&ports.each_ref().map(|port| (hca, port)));
        assert_eq!(
            shown,
            format!("{}\n{}", fix(hca, &ports[0]), fix(hca, &ports[1]))
        );
    }
}
