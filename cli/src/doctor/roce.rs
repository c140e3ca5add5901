// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! RoCE: whether a port's MTU and its GIDs are what RDMA between machines wants.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use super::scan::{Check, Scan};
use crate::finding::{argument, Finding, Level, Subject};
use crate::host::Unseen;
use crate::machine::{gid_indices, Hca, Port};

pub(super) const CHECK: Check = Check {
    name: "roce",
    about: "Ethernet ports near a GPU: the MTU that RDMA gets of the network interface's, and the GIDs of RoCE v2",
    #[cfg(test)]
    row: [
        "Ethernet ports of the nearest RDMA devices: MTU of the network interface, GIDs",
        "warning: RDMA's MTU is below 4096, which takes an MTU of 4192; no GID of RoCE v2, or only a \
         link-local one; the first one with an IP address has different indices on different ports",
        "`ip link set … mtu`, IP addresses, NCCL_IB_GID_INDEX unset",
    ],
    applies: |scan| ports(scan).next().is_some(),
    run: roce,
    #[cfg(test)]
    faults: super::tests::Faults::OwnTest,
};

/// The ports that use RoCE, and are up.
pub(super) fn ports<'a>(scan: &'a Scan<'_>) -> impl Iterator<Item = (&'a Hca, &'a Port)> + 'a {
    let hcas = scan.hcas().filter(|hca| !hca.is_software);
    let ports = hcas.flat_map(|hca| hca.ports.iter().map(move |port| (hca, port)));
    ports.filter(|(_, port)| port.is_active() && port.layer.as_deref() == Some("Ethernet"))
}

fn roce(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Which ports have their first GID that can be routed at an index.
    let mut indices: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (hca, port) in ports(scan) {
        findings.extend(mtu(scan, hca, port));
        let (finding, index) = gids(scan, hca, port);
        findings.extend(finding);
        if let Some(index) = index {
            let name = format!("{} port {}", hca.name, port.number);
            indices.entry(index).or_default().push(name);
        }
    }
    if indices.len() > 1 {
        let each: Vec<String> = indices
            .iter()
            .map(|(index, ports)| format!("{index} on {}", ports.join(", ")))
            .collect();
        findings.push(
            new(
                Level::Warning,
                Subject::Machine,
                format!("the first GID of RoCE v2 with an IP address is at index {}", each.join("; ")),
            )
            .why(
                "NCCL_IB_GID_INDEX and its like are one number for all ports. On those where it names another GID, or \
                 none, connections fail or do not pass a router.",
            )
            .fix(
                "Do not set NCCL_IB_GID_INDEX (NCCL since 2.21 finds the index for each port), or give all ports \
                 addresses in the same order",
            ),
        );
    }
    findings
}

fn new(level: Level, subject: Subject, found: String) -> Finding {
    Finding::new(level, subject, found)
}

/// Of Linux's `iboe_get_mtu()`: the headers that it leaves room for, and what RDMA then has to choose from.
const HEADERS: u64 = 96;
const MTUS: [u64; 5] = [4096, 2048, 1024, 512, 256];
/// Bytes of a packet of RoCE v2 that are no payload: preamble and gap, Ethernet, IPv4, UDP, BTH, both checksums.
const OVERHEAD: u64 = 20 + 14 + 20 + 8 + 12 + 4 + 4;

fn mtu(scan: &Scan<'_>, hca: &Hca, port: &Port) -> Option<Finding> {
    let netdev = port.netdevs.first()?;
    let subject = Subject::hca(hca);
    let mtu = match scan.host.number(&format!("/sys/class/net/{netdev}/mtu")) {
        Ok(mtu) => mtu,
        Err(Unseen::Absent) => return None,
        Err(why) => {
            let what = format!("the MTU of {netdev}");
            return Some(Scan::unseen(subject, what, &why));
        }
    };
    let number = port.number;
    let rdma = MTUS.into_iter().find(|size| mtu >= size + HEADERS);
    let found = match rdma {
        Some(size) => format!("port {number}: the MTU of {netdev} is {mtu}, that of RDMA {size}"),
        None => format!("port {number}: the MTU of {netdev} is {mtu}, too small for RDMA"),
    };
    let most = MTUS[0];
    let share = |size: u64| size * 100 / (size + OVERHEAD);
    match rdma {
        Some(size) if size == most => Some(new(Level::Ok, subject, found)),
        _ => Some(
            new(scan.level_of(hca, Level::Warning), subject, found)
                .why("RDMA packets are no larger than the interface's allows, and the NIC handles so many a second.")
                .costs(match rdma {
                    Some(size) => format!(
                        "Payload is at most {} % of what is on the wire, with {most} bytes {} %: {OVERHEAD} B of \
                         headers and gaps a packet.",
                        share(size),
                        share(most)
                    ),
                    None => "No transfer is possible.".to_owned(),
                })
                .fix(format!(
                    "`ip link set {} mtu 9000`, on each machine and switch of the fabric, and in the configuration of \
                     the network",
                    argument(netdev)
                )),
        ),
    }
}

/// What there is to say of the GIDs, and the index of the first of RoCE v2 that a router would pass.
fn gids(scan: &Scan<'_>, hca: &Hca, port: &Port) -> (Option<Finding>, Option<u32>) {
    let own = format!("/sys/class/infiniband/{}/ports/{}", hca.name, port.number);
    if scan.host.has(&format!("{own}/gid_attrs/types")) != Ok(true) {
        return (None, None);
    }
    let (mut any, mut link_local, mut unseen) = (false, None, None);
    let types = format!("{own}/gid_attrs/types");
    let mut is_full = true;
    for index in gid_indices(scan.host, &types) {
        let kind = scan.host.text(&format!("{types}/{index}"));
        let gid = scan.host.text(&format!("{own}/gids/{index}"));
        let (kind, gid) = match (kind, gid) {
            (Ok(kind), Ok(gid)) => (kind, gid),
            // An index without a GID is EINVAL.
            (Err(Unseen::Failed(_) | Unseen::Absent), _) => {
                is_full = false;
                continue;
            }
            (Err(why), _) | (_, Err(why)) => {
                unseen = Some(why);
                continue;
            }
        };
        let Ok(gid) = gid.parse::<Ipv6Addr>() else {
            continue;
        };
        if gid.is_unspecified() {
            is_full = false;
            continue;
        }
        any = true;
        if kind != "RoCE v2" {
            continue;
        }
        if gid.is_unicast_link_local() {
            link_local = link_local.or(Some(index));
            continue;
        }
        let found = format!(
            "port {}: GID {index} is of RoCE v2, with an IP address",
            port.number
        );
        return (Some(new(Level::Ok, Subject::hca(hca), found)), Some(index));
    }
    // None was readable: nothing is known of them.
    if !any {
        return (None, None);
    }
    let number = port.number;
    // There may be more GIDs than those that were seen.
    if let Err(why) = scan.host.names(&types) {
        unseen = unseen.or(Some(why).filter(|_| is_full));
    }
    if let Some(why) = unseen {
        let what = format!("GIDs of port {number}");
        let finding = Scan::unseen(Subject::hca(hca), what, &why);
        return (Some(finding), None);
    }
    let found = match link_local {
        Some(index) => {
            format!("port {number}: of RoCE v2 there is only a link-local GID, at index {index}")
        }
        None => format!("port {number} has no GID of RoCE v2"),
    };
    let fix = match port.netdevs.first() {
        Some(netdev) => format!(
            "`ip address show {}` has no address that others can reach: configure one for each port",
            argument(netdev)
        ),
        None => "An IP address for each port".to_owned(),
    };
    let finding = new(scan.level_of(hca, Level::Warning), Subject::hca(hca), found)
        .why(
            "A GID of RoCE v2 comes with each IP address of the interface. Without one RDMA does not leave the subnet, \
             and software that takes a fixed index (NCCL_IB_GID_INDEX=3) finds none there.",
        )
        .fix(fix);
    (Some(finding), None)
}
