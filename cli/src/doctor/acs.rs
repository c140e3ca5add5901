// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCIe Access Control Services (ACS) on the path between a GPU and a NIC. In a switch above both
//! devices, packets can turn round and go straight across, unless ACS redirects the packets upward
//! ([`super::controls`]).

use std::collections::BTreeMap;

use super::controls::{
    at_boot, command_line, control, for_data_direct, Turn, Wanted, REDIRECTS, UNUSED, WRITES,
};
use super::route::{routes, Route};
use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::machine::config::Acs;
use crate::machine::pci::Address;
use crate::machine::Pair;

check! {
    "acs": "ACS redirection where packets between GPU and NIC can turn round",
    super::route::applies, acs, OnPaths(tests::FAULTS)
}

fn acs(scan: &Scan<'_>) -> Vec<Finding> {
    let at_boot = at_boot(scan);
    let mut findings = Vec::new();
    for (pair, route) in routes(scan) {
        match (for_data_direct(pair, &route), Turn::of(&route)) {
            (Some(Err(why)), _) | (None, Some(Err(why))) => {
                let ports = route.turn().map(|(nic, gpu)| [nic.at, gpu.at]);
                let ports = ports.iter().flatten().map(Address::to_string);
                let what = format!("ACS of {}", ports.collect::<Vec<_>>().join(" and "));
                findings.push(Scan::unseen(Subject::pair(pair), what, &why));
            }
            (Some(Ok(wanted)), _) => {
                findings.push(of_data_direct(scan, pair, &wanted, &at_boot));
            }
            (None, Some(Ok(turn))) => findings.push(of_switch(scan, pair, turn, &at_boot)),
            (None, None) => findings.extend(at_root(pair, &route)),
        }
    }
    findings
}

/// Reports the ACS bits of the two switch ports between a NIC and a GPU below one switch.
fn of_switch(
    scan: &Scan<'_>,
    pair: &Pair,
    turn: Turn<'_>,
    at_boot: &BTreeMap<Address, Wanted<'_>>,
) -> Finding {
    let (level, straight) = (turn.level(), turn.straight);
    let (nic_port, gpu_port) = (turn.nic.port.at, turn.gpu.port.at);
    let bad: Vec<Wanted<'_>> = turn.redirecting().collect();
    let each = bad.iter().map(|port| {
        let on = Acs::names(port.wrong().1).join(", ");
        format!("{} ({}) has {on}", port.port.at, port.what)
    });
    let parts = each.collect::<Vec<_>>().join(", ");
    let found = match parts.is_empty() {
        true => {
            format!("no redirection at {nic_port} and {gpu_port}, the switch ports of NIC and GPU")
        }
        false if straight => format!(
            "{parts}; the NIC's ATS is on and {nic_port} lets translated requests straight through"
        ),
        false => parts,
    };
    let finding = Finding::new(scan.level(pair, level), Subject::pair(pair), found);
    match level {
        Level::Ok => finding,
        Level::Note => finding.why(
            "A GPU's own requests to the NIC, as in GPU-initiated networking, go up to the root complex instead of \
             straight through the switch. The NIC's own transfers do not.",
        ),
        _ => finding
            .why(
                "The NIC and the GPU are below one switch, where packets can turn round. With redirection, each \
                 packet goes up to the root complex and comes down again, if the root complex lets it through at \
                 all.",
            )
            .costs(
                "Half of the bandwidth, according to NCCL's maintainers (nccl-tests#112), or transfers that hang \
                 (NCCL's troubleshooting page).",
            )
            .fix(fix(&bad, at_boot)),
    }
}

/// Reports the ACS bits of the ports between a Data Direct function and a GPU.
fn of_data_direct(
    scan: &Scan<'_>,
    pair: &Pair,
    wanted: &[Wanted<'_>],
    at_boot: &BTreeMap<Address, Wanted<'_>>,
) -> Finding {
    let wrong: Vec<&Wanted<'_>> = wanted.iter().filter(|port| !port.is_met()).collect();
    if wrong.is_empty() {
        let each = wanted.iter();
        let each = each.map(|port| format!("{} {}", port.port.at, port.flags()));
        let found = format!(
            "as Data Direct requires: {}",
            each.collect::<Vec<_>>().join(", ")
        );
        return Subject::pair(pair).ok(found);
    }
    let each = wrong.iter().map(|port| {
        let (off, on) = port.wrong();
        let says = [(on, "on"), (off, "off")];
        let says = says.into_iter().filter(|(bits, _)| *bits != 0);
        let says = says.map(|(bits, word)| format!("{} {word}", Acs::names(bits).join(", ")));
        let says: Vec<String> = says.collect();
        format!(
            "{} ({}) has {}",
            port.port.at,
            port.what,
            says.join(" and ")
        )
    });
    let found = each.collect::<Vec<_>>().join("; ");
    let mut lines: Vec<String> = wrong.iter().map(|port| port.command()).collect();
    lines.push(
        "These commands last until the next boot. They do not change IOMMU groups, so nvidia.ko then needs \
         NVreg_GrdmaPciTopoCheckOverride=1, and unprivileged programs can cause platform errors (rdma_topo). For a \
         permanent change, put this on the kernel's command line:"
            .to_owned(),
    );
    lines.extend(command_line(at_boot));
    lines.push(WRITES.to_owned());
    Finding::new(scan.level(pair, Level::Warning),
        Subject::pair(pair),
        found,
    )
    .why(
        "Data Direct and the GPU meet in the NIC's switch. According to rdma-core's rdma_topo, requests of Data \
         Direct and answers of the GPU must go straight through the switch, nothing else may, and both functions \
         must be in one IOMMU group. Otherwise nvidia.ko refuses Data Direct, or packets go up to the processor.",
    )
    .costs(UNUSED)
    .fix(lines.join("\n"))
}

/// Reports redirection at root ports as a note, if the NIC and the GPU have no common switch.
/// Packets between root ports are in the root complex anyway.
fn at_root(pair: &Pair, route: &Route<'_>) -> Option<Finding> {
    if !route.is_through_root() {
        return None;
    }
    // If a device is directly below the host bridge, `highest` returns the device itself.
    let highest = |end| route.down_to(end).first().copied();
    let on: Vec<String> = [highest(route.nic), highest(route.gpu)]
        .into_iter()
        .flatten()
        .filter(|port| port.at != route.nic.at && port.at != route.gpu.at)
        .filter_map(|port| {
            let set = control(port).ok()? & REDIRECTS;
            (set != 0).then(|| format!("{} has {}", port.at, Acs::names(set).join(", ")))
        })
        .collect();
    if on.is_empty() {
        return None;
    }
    let found = format!(
        "{}: root ports, so packets are in the root complex anyway",
        on.join(", ")
    );
    Some(Subject::pair(pair).note(found))
}

/// Returns the fix: commands that clear only the redirecting bits, and options for the kernel's
/// command line.
fn fix(bad: &[Wanted<'_>], at_boot: &BTreeMap<Address, Wanted<'_>>) -> String {
    let mut lines: Vec<String> = bad.iter().map(Wanted::command).collect();
    lines.push(
        "These commands last until the next boot. For a permanent change, turn ACS off in the firmware's setup \
         (\"ACS Enable\", \"ACS Control\"), or on the kernel's command line:"
            .to_owned(),
    );
    lines.extend(command_line(at_boot));
    lines.push(
        "Do not do this on a host that gives its GPUs or NICs to virtual machines: ACS keeps virtual machines apart. \
         On such a host, set the NIC's ATS_ENABLED with mlxconfig, and DirectTrans (0x40) at the NIC's port."
            .to_owned(),
    );
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::controls::DATA_DIRECT_ACS;
    use super::super::tests::paths::{faults, socket, ACS, FIRST, SECOND};
    use crate::fixture;
    use crate::fixture::Pci;
    use crate::machine::config::Acs;

    faults! {
        "requests redirected at the NIC's port",
            "warning acs: …0000:12:01.0 (the NIC's port) has ReqRedir… fix …setpci -s 0000:12:01.0 \
             ECAP_ACS+0x6.w=0000:002c" => |fixture| fixture.set(socket(FIRST).nic_port, ACS + 6, Acs::RR);
        "answers redirected at the GPU's port",
            "warning acs: …0000:82:00.0 (the GPU's port) has CmpltRedir… fix …setpci -s 0000:82:00.0 \
             ECAP_ACS+0x6.w=0000:002c" => |fixture| fixture.set(socket(SECOND).gpu_port, ACS + 6, Acs::CR);
        "ACS as firmware turns it on",
            "warning acs: …0000:12:01.0 (the NIC's port) has ReqRedir, CmpltRedir, 0000:12:00.0 (the GPU's port)… \
             fix …pci=disable_acs_redir=" => |fixture| {
            let it = socket(FIRST);
            let all = Acs::SV | Acs::RR | Acs::CR | Acs::UF;
            for port in [it.root_port, it.nic_port, it.gpu_port] {
                fixture.set(port, ACS + 6, all);
            }
        };
    }

    #[test]
    fn each_bit_of_data_direct_counts() {
        let rows = "0009:02:00.0 1d (Data Direct's port) has ReqRedir on
            0009:02:00.0 11 (Data Direct's port) has CmpltRedir off
            0009:02:00.0 18 (Data Direct's port) has SrcValid off
            0009:02:00.0 00 (Data Direct's port) has SrcValid, CmpltRedir, UpstreamFwd off
            0009:02:02.0 1d (the GPU's port) has CmpltRedir on
            0009:02:02.0 11 (the GPU's port) has ReqRedir off
            0009:00:00.0 1d (root port) has SrcValid on
            0009:00:00.0 0c (root port) has UpstreamFwd off
            0009:05:00.0 19 (downstream port) has ReqRedir off";
        for row in rows.lines().map(str::trim) {
            let [at, set, words] = row.splitn(3, ' ').collect::<Vec<_>>()[..] else {
                panic!("{row}");
            };
            let set = u16::from_str_radix(set, 16).unwrap();
            let mut fixture = fixture::data_direct();
            let port = match at {
                "0009:00:00.0" => Pci::grace_port(set, 0),
                _ => Pci::connectx8_port(6, set, 0),
            };
            fixture.set_config(at, &port);
            let told = format!("1$ doctor --only acs\n{at} {words}\n`setpci -s {at} \n= setpci -s");
            fixture.session(&format!("{told}\n{DATA_DIRECT_ACS}"));
        }
        // Irrelevant bits on the ports of the route, and cleared bits on a port outside the route,
        // are not faults.
        let mut fixture = fixture::data_direct();
        fixture.set_config("0009:02:00.0", &Pci::connectx8_port(6, 0x19 | 0x62, 0));
        fixture.set_config("0000:02:00.0", &Pci::connectx8_port(6, 0, 0));
        fixture.session("0$ doctor --only acs");
    }

    #[test]
    fn other_machines_get_one_line_for_all_ports_that_redirect() {
        let mut fixture = fixture::hgx();
        for port in [
            "0000:17:00.0",
            "0000:17:01.0",
            "0000:bf:01.0",
            "0000:c1:03.0",
        ] {
            fixture.set_config(port, &redirecting());
        }
        fixture.session(
            "1$ doctor --only acs
             = pci=config_acs=x0x00xx@0000:17:00.0;x0x00xx@0000:17:01.0;x0x00xx@0000:c1:03.0 (
             = pci=disable_acs_redir=0000:17:00.0;0000:17:01.0;0000:c1:03.0 (",
        );
    }

    fn redirecting() -> Pci {
        Pci {
            acs: Some((fixture::ACS_ALL, fixture::ACS_LINUX)),
            ..Pci::switch_port(6, 0)
        }
    }

    /// The options for the kernel's command line do not name the port of a distant NIC, because the
    /// NIC is nearest to no GPU.
    #[test]
    fn ports_of_pairs_that_do_not_count_are_not_named() {
        let mut fixture = fixture::acs();
        fixture.pci("0000:16:00.0", "0000:17:02.0", &redirecting());
        fixture.pci("0000:17:02.0", "0000:30:00.0", &Pci::switch_port(5, 0));
        fixture.pci("0000:30:00.0", "0000:31:00.0", &Pci::switch_port(6, 0));
        fixture.pci("0000:31:00.0", "0000:32:00.0", &Pci::connectx7(0));
        fixture.hca("mlx5_9", "0000:32:00.0", "ibp50s0", "InfiniBand", "?");
        // If `--pair` selects the distant NIC, the options name its port.
        fixture.session(
            "$ doctor --only acs --all
             0000:17:02.0 (the NIC's port) has ReqRedir, CmpltRedir
             pci=config_acs=x0x00xx@0000:17:00.0;x0x00xx@0000:17:01.0 (
             $ doctor --only acs --pair 0,mlx5_9
             x0x00xx@0000:17:02.0",
        );
    }
}
