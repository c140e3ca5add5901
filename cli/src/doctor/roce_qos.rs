// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Settings that prevent packet loss of RoCE under congestion: PFC, the priority of each DSCP, and
//! ECN. The check compares the settings of a port with each other, and with the settings of other
//! ports of the same kind ([`port::kind`]).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::scan::{check, Scan};
use super::{port, roce};
use crate::finding::{argument, Finding, Level, Subject};
use crate::host::dcb::Dcb;
use crate::host::{dcb, field, Host, Seen, Unseen};
use crate::machine::{netdevs_of, Hca, Port};

check! {
    "roce-qos": "Ethernet ports near a GPU: PFC, DSCP, ECN and traffic class, also compared between ports of one kind",
    |scan| roce::ports(scan).next().is_some(), qos, OwnTest
}

/// Directories of the ECN settings in the driver of MLNX_OFED and DOCA-OFED. `roce_np` sends a CNP
/// (congestion notification packet) to the sender of packets with an ECN mark. `roce_rp` slows down
/// on received CNPs.
const ECN: [&str; 2] = ["roce_np", "roce_rp"];
const PRIORITIES: u8 = 8;

/// A network interface of a port, with its settings.
struct Interface<'a> {
    hca: &'a Hca,
    port: &'a Port,
    name: String,
    dcb: Seen<Dcb>,
    /// Bit mask of the priorities with ECN, for each entry of [`ECN`].
    ecn: Seen<[u8; 2]>,
    /// Traffic class that the driver of MLNX_OFED gives to all queue pairs. `None`: each queue pair
    /// has its own traffic class.
    class: Seen<Option<u8>>,
    /// RDMA CM's traffic class, if its directory exists. 0: not set.
    cm_class: Option<u8>,
    /// `true` if another interface, such as a VLAN, is on top of this one.
    is_below: bool,
}

fn qos(scan: &Scan<'_>) -> Vec<Finding> {
    let said = dcb::scan(scan.host);
    let mut all = Vec::new();
    for (hca, port) in roce::ports(scan) {
        let names = port.netdevs.iter();
        let names: BTreeSet<String> = names
            .flat_map(|name| netdevs_of(scan.host, name, false))
            .collect();
        for name in names {
            // A bond has no QoS settings. Only the interfaces below the bond have QoS settings.
            if scan.host.has(&format!("/sys/class/net/{name}/device")) == Ok(true) {
                all.push(Interface::scan(scan.host, &said, hca, port, name));
            }
        }
    }
    let mut findings = differing(scan, &all);
    for one in &all {
        findings.extend(one.mismarked(scan));
        findings.push(one.finding());
    }
    findings
}

/// Returns the numbers of the bits that are set.
fn bits(mask: u8) -> impl Iterator<Item = u8> {
    (0..PRIORITIES).filter(move |bit| mask >> bit & 1 == 1)
}

/// Formats sorted numbers: `0-2, 5`, or `none`.
fn ranges(numbers: impl Iterator<Item = u8>) -> String {
    let mut ranges: Vec<(u8, u8)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let each = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    let each: Vec<String> = each.collect();
    match each.is_empty() {
        true => "none".to_owned(),
        false => each.join(", "),
    }
}

fn priorities(mask: u8) -> String {
    match mask.count_ones() {
        0 => "no priority".to_owned(),
        1 => format!("priority {}", ranges(bits(mask))),
        _ => format!("priorities {}", ranges(bits(mask))),
    }
}

impl<'a> Interface<'a> {
    fn scan(
        host: &dyn Host,
        said: &Seen<dcb::Interfaces>,
        hca: &'a Hca,
        port: &'a Port,
        name: String,
    ) -> Self {
        let ecn = |side: &str| -> Seen<u8> {
            let mut mask = 0;
            for priority in 0..PRIORITIES {
                let file = format!("/sys/class/net/{name}/ecn/{side}/enable/{priority}");
                mask |= u8::from(host.number(&file)? != 0) << priority;
            }
            Ok(mask)
        };
        let [np, rp] = ECN.map(ecn);
        let number = port.number;
        let class = host.text(&format!(
            "/sys/class/infiniband/{}/tc/{number}/traffic_class",
            hca.name
        ));
        let cm = format!(
            "/sys/kernel/config/rdma_cm/{}/ports/{number}/default_roce_tos",
            hca.name
        );
        Self {
            hca,
            port,
            dcb: match said {
                Ok(said) => said.get(&name).cloned().ok_or(Unseen::Absent),
                Err(why) => Err(why.clone()),
            },
            ecn: np.and_then(|np| Ok([np, rp?])),
            class: class.map(|text| {
                // Lines without this prefix contain rules for single destinations.
                let global = field(&text, "Global tclass=");
                global.and_then(|class| class.parse().ok())
            }),
            cm_class: host
                .number(&cm)
                .ok()
                .and_then(|class| u8::try_from(class).ok()),
            is_below: host
                .names(&format!("/sys/class/net/{name}"))
                .is_ok_and(|names| names.iter().any(|name| name.starts_with("upper_"))),
            name,
        }
    }

    fn dcb(&self) -> Option<&Dcb> {
        self.dcb.as_ref().ok()
    }

    fn pfc(&self) -> Option<u8> {
        self.dcb()?.pfc
    }

    /// Formats the name of the interface: `mlx5_0 port 1 (ens1f0np0)`.
    fn named(&self) -> String {
        format!(
            "{} port {} ({})",
            self.hca.name, self.port.number, self.name
        )
    }

    /// Returns a finding with the settings, or a finding that says that the settings are not
    /// visible.
    fn finding(&self) -> Finding {
        let name = &self.name;
        let pfc = match (self.pfc(), &self.dcb) {
            (Some(mask), _) => {
                let dscp = self.dcb().map(|dcb| &dcb.dscp).into_iter().flatten();
                let with = dscp.filter(|(_, priority)| mask >> **priority & 1 == 1);
                let with: Vec<u8> = with.map(|(dscp, _)| *dscp).collect();
                let with = match with.is_empty() {
                    true => String::new(),
                    false => format!(" (DSCP {})", ranges(with.into_iter())),
                };
                format!("PFC on {}{with}", priorities(mask))
            }
            (None, Err(Unseen::Absent) | Ok(_)) => {
                "PFC not visible (the driver does not show it; the driver of a virtual function never does)".to_owned()
            }
            (None, Err(why)) => format!("PFC not visible ({why})"),
        };
        let ecn = match &self.ecn {
            Ok([np, rp]) if np == rp => format!("ECN on {}", priorities(*np)),
            Ok([np, rp]) => {
                let [np, rp] = [np, rp].map(|mask| priorities(*mask));
                format!("ECN: sends CNPs on {np} (roce_np), and slows down on received CNPs on {rp} (roce_rp)")
            }
            Err(Unseen::Absent) => "ECN not visible (OFED's mlx5 driver shows it)".to_owned(),
            Err(why) => format!("ECN not visible ({why})"),
        };
        let class = match self.class {
            Ok(Some(class)) => format!(", traffic class {class}"),
            _ => String::new(),
        };
        let number = self.port.number;
        let found = format!("port {number} ({name}): {pfc}, {ecn}{class}");
        let subject = Subject::hca(self.hca);
        let name = argument(name);
        match (self.pfc(), &self.ecn) {
            (Some(0), Ok([0, 0])) => subject.note(found)
                .why(
                    "Under congestion the fabric drops packets, and RoCE sends them again. Many NICs also send all \
                     later packets again. Some fabrics are built for packet loss (adaptive routing, the NIC's own \
                     congestion control): ask the operator of the switches.",
                )
                .fix(format!(
                    "If the switches have PFC or mark ECN on a priority, set the same here. For priority 3: `sudo \
                     dcb pfc set dev {name} prio-pfc 3:on`; `echo 1 | sudo tee \
                     /sys/class/net/{name}/ecn/roce_np/enable/3`, and the same for roce_rp"
                )),
            (Some(_), Ok([np, rp])) if np != rp => subject.note(found)
                .why(
                    "Every NIC both receives and sends. roce_np sends a CNP to the sender of marked packets, and roce_rp \
                     slows down on received CNPs. If only one of them is on, ECN works in only one direction.",
                )
                .fix(format!(
                    "Set the same for both, for example `echo 1 | sudo tee \
                     /sys/class/net/{name}/ecn/roce_rp/enable/3`"
                )),
            (Some(_), Ok(_)) => subject.ok(found),
            _ => {
                let mut finding = subject.not_visible(found);
                finding.needs_root =
                    [self.dcb.as_ref().err(), self.ecn.as_ref().err()].contains(&Some(&Unseen::Denied));
                finding
            }
        }
    }

    /// Reports a traffic class whose priority has no PFC while another priority has PFC.
    fn mismarked(&self, scan: &Scan<'_>) -> Vec<Finding> {
        let (Some(mask @ 1..), Some(dcb)) = (self.pfc(), self.dcb()) else {
            return Vec::new();
        };
        let name = &self.name;
        let of_all = self.class.as_ref().ok().copied().flatten();
        let all = [
            ("the traffic class of all queue pairs", of_all),
            (
                "RDMA CM's default TOS",
                self.cm_class.filter(|class| *class != 0),
            ),
        ];
        let judge = |(what, class): (&str, Option<u8>)| {
            let class = class?;
            let dscp = class >> 2;
            let (level, gets) = match dcb.dscp.get(&dscp) {
                Some(priority) if mask >> priority & 1 == 1 => return None,
                Some(priority) => (
                    Level::Warning,
                    format!("{name} gives that priority {priority}"),
                ),
                // If mlx5 lists no priority for any DSCP, it takes the priority from the VLAN tag,
                // if any.
                None if dcb.dscp.is_empty() && self.hca.driver.as_deref() == Some("mlx5_core") => (
                    match self.is_below {
                        true => Level::Note,
                        false => Level::Warning,
                    },
                    format!(
                        "{name} does not use DSCP (trust state pcp: the tag of a VLAN decides)"
                    ),
                ),
                None => return None,
            };
            let best = bits(mask).next().unwrap_or(0);
            let word = argument(name);
            let fix = match dcb.dscp.is_empty() {
                true => format!("`sudo mlnx_qos -i {word} --trust dscp`, or "),
                false => String::new(),
            };
            let found = format!(
                "port {}: {what} is {class} (DSCP {dscp}), and {gets}; PFC is on {}",
                self.port.number,
                priorities(mask)
            );
            Some(
                Finding::new(scan.level_of(self.hca, level), Subject::hca(self.hca), found)
                    .why(
                        "Under congestion, the fabric may then drop RDMA's packets, and the priority with PFC stays \
                         unused.",
                    )
                    .fix(format!(
                        "{fix}`sudo dcb app replace dev {word} dscp-prio {dscp}:{best}`, as the switches have it; or \
                         set another traffic class: four times the switches' DSCP, plus 2",
                    )),
            )
        };
        all.into_iter().filter_map(judge).collect()
    }
}

/// A setting that should be the same on ports of one kind.
struct Aspect {
    what: &'static str,
    /// Returns the setting of an interface, or `None` if not visible. `mask` contains the
    /// priorities with PFC on any port.
    of: fn(one: &Interface<'_>, mask: u8) -> Option<String>,
    /// Returns how to copy a setting from one interface to another, if there is a command.
    fix: fn(like: &Interface<'_>, odd: &Interface<'_>, mask: u8) -> Option<String>,
}

const ASPECTS: &[Aspect] = &[
    Aspect {
        what: "PFC",
        of: |one, _| Some(priorities(one.pfc()?)),
        fix: |like, odd, _| {
            let on: String = bits(like.pfc()?).map(|bit| format!(" {bit}:on")).collect();
            Some(format!(
                "`sudo dcb pfc set dev {} prio-pfc all:off{on}`",
                argument(&odd.name)
            ))
        },
    },
    Aspect {
        what: "the priority by DSCP",
        of: |one, mask| {
            let dscp = &one.dcb()?.dscp;
            let of = |bit| {
                let with = dscp.iter().filter(move |(_, priority)| **priority == bit);
                format!("{bit} for DSCP {}", ranges(with.map(|(dscp, _)| *dscp)))
            };
            let each: Vec<String> = bits(mask).map(of).collect();
            Some(match dscp.is_empty() {
                true => "not by DSCP".to_owned(),
                false => each.join(", "),
            })
        },
        fix: |like, odd, mask| {
            let (like, of_odd) = (&like.dcb()?.dscp, &odd.dcb()?.dscp);
            let name = argument(&odd.name);
            if like.is_empty() {
                return Some(format!("`sudo dcb app flush dev {name} dscp-prio`"));
            }
            let counts = |priority: Option<&u8>| priority.is_some_and(|it| mask >> it & 1 == 1);
            let other = like.iter().filter(|(dscp, priority)| {
                let of_odd = of_odd.get(dscp);
                of_odd != Some(priority) && (counts(of_odd) || counts(Some(priority)))
            });
            let map: String = other
                .map(|(dscp, priority)| format!(" {dscp}:{priority}"))
                .collect();
            Some(format!("`sudo dcb app replace dev {name} dscp-prio{map}`"))
        },
    },
    Aspect {
        what: "ECN",
        of: |one, _| {
            let [np, rp] = one.ecn.as_ref().ok()?.map(priorities);
            Some(match np == rp {
                true => np,
                false => format!("{np} (roce_np), {rp} (roce_rp)"),
            })
        },
        fix: |like, odd, _| {
            let both = like.ecn.as_ref().ok()?.iter().zip(odd.ecn.as_ref().ok()?);
            let command = |(side, (like, of_odd)): (&str, (&u8, &u8))| {
                let (like, name) = (*like, argument(&odd.name));
                let side = side.to_owned();
                bits(like ^ of_odd).map(move |bit| {
                    let file = format!("/sys/class/net/{name}/ecn/{side}/enable/{bit}");
                    format!("`echo {} | sudo tee {file}`", like >> bit & 1)
                })
            };
            let commands: Vec<String> = ECN.into_iter().zip(both).flat_map(command).collect();
            Some(commands.join("\n"))
        },
    },
    Aspect {
        what: "the traffic class of all queue pairs",
        of: |one, _| {
            let class = *one.class.as_ref().ok()?;
            Some(class.map_or("not set".to_owned(), |class| class.to_string()))
        },
        fix: |like, odd, _| {
            let class = like.class.as_ref().ok()?.as_ref()?;
            let (hca, port) = (argument(&odd.hca.name), odd.port.number);
            Some(format!(
                "`echo {class} | sudo tee /sys/class/infiniband/{hca}/tc/{port}/traffic_class`"
            ))
        },
    },
];

/// Reports settings that differ between ports of one kind. Ports of one kind usually carry the same
/// collective operation.
fn differing(scan: &Scan<'_>, all: &[Interface<'_>]) -> Vec<Finding> {
    let mut kinds: BTreeMap<_, Vec<&Interface<'_>>> = BTreeMap::new();
    for one in all {
        if let Some(kind) = port::kind(scan, one.hca) {
            kinds.entry((kind, one.port.number)).or_default().push(one);
        }
    }
    let both = kinds
        .values()
        .flat_map(|of_kind| ASPECTS.iter().map(move |aspect| (of_kind, aspect)));
    both.filter_map(|(of_kind, aspect)| differs(of_kind, aspect))
        .collect()
}

fn differs(of_kind: &[&Interface<'_>], aspect: &Aspect) -> Option<Finding> {
    let mask = of_kind.iter().filter_map(|one| one.pfc());
    let mask = mask.fold(0, |all, mask| all | mask);
    let mut values: BTreeMap<String, Vec<&Interface<'_>>> = BTreeMap::new();
    for one in of_kind {
        if let Some(value) = (aspect.of)(one, mask) {
            values.entry(value).or_default().push(one);
        }
    }
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by_key(|(_, with)| Reverse(with.len()));
    let [(most, like), odd @ ..] = values.as_slice() else {
        return None;
    };
    let second = odd.first()?.1.len();
    let names = |with: &[&Interface<'_>]| {
        let names: Vec<String> = with.iter().map(|one| one.named()).collect();
        names.join(", ")
    };
    let mut each: Vec<String> = odd
        .iter()
        .map(|(value, with)| format!("{value} on {}", names(with)))
        .collect();
    let mut commands = Vec::new();
    match like.first().filter(|_| like.len() > second) {
        Some(first) => {
            each.push(match like.len() {
                3.. => format!("{most} on the {} others", like.len()),
                _ => format!("{most} on {}", names(like)),
            });
            let odd = odd.iter().flat_map(|(_, with)| with);
            commands.extend(odd.filter_map(|odd| (aspect.fix)(first, odd, mask)));
        }
        None => each.insert(0, format!("{most} on {}", names(like))),
    }
    let fix = match commands.is_empty() {
        true => "Set all ports as their switches are set.".to_owned(),
        false => format!("To match the others:\n{}", commands.join("\n")),
    };
    Some(
        Subject::Machine.warning(format!(
            "{} is not the same on ports of one kind: {}",
            aspect.what,
            each.join("; ")
        ))
        .why(
            "A rail whose settings differ from those of its peers drops packets, or is paused when its peers are not. \
             A collective over all rails runs at the pace of the slowest rail.",
        )
        .fix(format!(
            "{fix}\nIf the switch distributes this setting (DCBX), check the switch's port first."
        )),
    )
}

#[cfg(test)]
mod tests;
