// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! RoCE: MTU and GIDs of the ports.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use super::scan::{check, Scan};
use crate::finding::{argument, Finding, Level, Subject};
use crate::host::Unseen;
use crate::machine::{gid_indices, Hca, Port};

check! {
    "roce": "Ethernet ports near a GPU: the RDMA MTU that the network interface allows, and the GIDs of RoCE v2",
    |scan| ports(scan).next().is_some(), roce, OwnTest
}

/// Returns the RoCE ports that are up.
pub(super) fn ports<'a>(scan: &'a Scan<'_>) -> impl Iterator<Item = (&'a Hca, &'a Port)> + 'a {
    let hcas = scan.hcas().filter(|hca| !hca.is_software);
    let ports = hcas.flat_map(|hca| hca.ports.iter().map(move |port| (hca, port)));
    ports.filter(|(_, port)| port.is_active() && port.layer.as_deref() == Some("Ethernet"))
}

fn roce(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Ports by the index of their first routable GID.
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
            Subject::Machine.warning(format!(
                "the first GID of RoCE v2 with an IP address is at index {}", each.join("; ")
            ))
            .why(
                "NCCL_IB_GID_INDEX and similar settings are one number for all ports. On a port where this number \
                 names another GID, or none, connections fail or do not pass a router.",
            )
            .fix(
                "Do not set NCCL_IB_GID_INDEX (NCCL since 2.21 finds the index for each port), or give all ports \
                 addresses in the same order",
            ),
        );
    }
    findings
}

/// Number of bytes that Linux's `iboe_get_mtu()` reserves for headers.
const HEADERS: u64 = 96;
/// The possible MTUs of RDMA, in bytes.
const MTUS: [u64; 5] = [4096, 2048, 1024, 512, 256];
/// Bytes of a RoCE v2 packet that are not payload: preamble and gap, Ethernet, IPv4, UDP, BTH, both
/// checksums.
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
        Some(size) => {
            format!("port {number}: the MTU of {netdev} is {mtu}, and the RDMA MTU is {size}")
        }
        None => format!("port {number}: the MTU of {netdev} is {mtu}, too small for RDMA"),
    };
    let most = MTUS[0];
    let share = |size: u64| size * 100 / (size + OVERHEAD);
    match rdma {
        Some(size) if size == most => Some(subject.ok(found)),
        _ => Some(
            Finding::new(scan.level_of(hca, Level::Warning), subject, found)
                .why("RDMA packets are no larger than the interface's MTU allows, and the NIC handles a limited \
                    number of packets per second.")
                .costs(match rdma {
                    Some(size) => format!(
                        "Payload is at most {} % of the bytes on the wire; with {most} bytes per packet, it would be \
                         {} %. Each packet has {OVERHEAD} B of headers and gaps.",
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

/// Returns a finding about the GIDs, and the index of the first routable GID of RoCE v2.
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
            // Reading an index without a GID fails with `EINVAL`.
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
        return (Some(Subject::hca(hca).ok(found)), Some(index));
    }
    // If no GID was readable, nothing is reported.
    if !any {
        return (None, None);
    }
    let number = port.number;
    // If the directory of GIDs cannot be listed, there may be more GIDs than the scan has read.
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
            format!("port {number} has only a link-local GID of RoCE v2, at index {index}")
        }
        None => format!("port {number} has no GID of RoCE v2"),
    };
    let fix = match port.netdevs.first() {
        Some(netdev) => format!(
            "`ip address show {}` shows no address that others can reach: configure an address for each port",
            argument(netdev)
        ),
        None => "Configure an IP address for each port".to_owned(),
    };
    let finding = Finding::new(scan.level_of(hca, Level::Warning), Subject::hca(hca), found)
        .why(
            "Each IP address of the interface adds a GID of RoCE v2. Without such a GID, RDMA does not leave the \
             subnet, and software that uses a fixed index (NCCL_IB_GID_INDEX=3) finds no GID there.",
        )
        .fix(fix);
    (Some(finding), None)
}

#[cfg(test)]
mod tests {
    use super::super::tests::each_is_told;
    use super::*;
    use crate::fixture;
    use crate::fixture::{ADDRESS, LINK_LOCAL};
    use crate::testing::faults_of;

    faults_of! {
        fixture::Fixture;
        "a machine that is well" => |_| {};
        "an MTU of 1500", "warning roce: port 1: the MTU of ibp24s0 is 1500, and the RDMA MTU is 1024" =>
            |fixture| fixture.roce("mlx5_0", "ibp24s0", 1500, &[LINK_LOCAL, ADDRESS]);
        "an MTU one too small", "warning roce: port 1: the MTU of ibp24s0 is 4191, and the RDMA MTU is 2048" =>
            |fixture| fixture.roce("mlx5_0", "ibp24s0", 4191, &[LINK_LOCAL, ADDRESS]);
        "a link-local GID", "warning roce: port 1 has only a link-local GID of RoCE v2, at index 1" =>
            |fixture| fixture.hca_file("mlx5_1", "ports/1/gid_attrs/types/3", "IB/RoCE v1\n");
        "no GID of RoCE v2", "warning roce: port 1 has no GID of RoCE v2" => |fixture| {
            for index in [1, 3] {
                fixture.hca_file("mlx5_1", &format!("ports/1/gid_attrs/types/{index}"), "IB/RoCE v1\n");
            }
        };
        "an interface that got another address first",
            "warning roce: the first GID of RoCE v2 with an IP address is at index 3 on mlx5_0 port 1; 5 on mlx5_1 \
             port 1" => |fixture| fixture.roce("mlx5_1", "ibp200s0", 9000, &[LINK_LOCAL, LINK_LOCAL, ADDRESS]);
        "an old recording, without GIDs" => |fixture| {
            for index in 0..4 {
                fixture.hca_file("mlx5_0", &format!("ports/1/gids/{index}"), "removed\n");
            }
        };
    }

    /// Both NICs of the healthy machine have an MTU and GIDs that suffice for RoCE.
    #[test]
    fn roce_has_its_mtu_and_gids() {
        let healthy = || {
            let mut fixture = fixture::two_sockets();
            fixture.roce("mlx5_0", "ibp24s0", 4200, &[LINK_LOCAL, ADDRESS]);
            fixture.roce("mlx5_1", "ibp200s0", 9000, &[LINK_LOCAL, ADDRESS]);
            fixture
        };
        each_is_told(FAULTS, healthy, |fixture| fixture.findings(&CHECK));
    }

    /// The port has 16 link-local GIDs, two for each of eight addresses. The two GIDs with an IPv4
    /// address follow.
    #[test]
    fn gids_are_read_to_the_end() {
        let mut fixture = fixture::two_sockets();
        let local = |number| format!("fe80:0000:0000:0000:ba3f:d2ff:feaa:000{number}");
        let gids: Vec<String> = (0..8).map(local).chain([ADDRESS.to_owned()]).collect();
        let gids: Vec<&str> = gids.iter().map(String::as_str).collect();
        fixture.roce("mlx5_0", "ibp24s0", 9000, &gids);
        fixture.roce("mlx5_1", "ibp200s0", 9000, &gids);
        fixture.software();
        fixture.session("0$ doctor --all --only roce\nGID 17 is of RoCE v2, with an IP address");
        // An old recording has no directory of GID types. The check then reads only the first 16
        // GIDs.
        let own = fixture.place("0000:18:00.0");
        let types = format!("{own}/infiniband/mlx5_0/ports/1/gid_attrs/types");
        fixture.recording.directories.remove(&types);
        fixture.session(
            "$ doctor --all --only roce
             not visible roce mlx5_0: GIDs of port 1: not in the recording",
        );
        // GID 17 is unreadable, and all other GIDs of RoCE v2 are link-local.
        fixture.roce("mlx5_0", "ibp24s0", 9000, &gids);
        fixture.deny(&format!("{own}/infiniband/mlx5_0/ports/1/gids/17"));
        fixture.session("0$ doctor --all --only roce\nGIDs of port 1: not visible without root");
    }
}
