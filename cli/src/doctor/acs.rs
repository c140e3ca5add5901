// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Access Control Services, where packets could turn round.
//!
//! A port with ACS can send packets between devices up to the root complex in place of straight across. That is a
//! choice only where there are two ways: at the ports of the switch that both devices hang under. Below, in a switch
//! that only one of them hangs under, up is the only way; above, packets do not come; and between root ports they are
//! in the root complex already, so that redirection takes nothing from them. What each bit does to which packets (PCI
//! Express 7.0, 6.12.3):
//!
//! - Request Redirect acts where requests come in: those of the NIC at the NIC's port, those of the GPU at the
//!   GPU's.
//! - Completion Redirect acts on answers: the GPU's to the NIC's reads, at the GPU's port, unless they are marked as
//!   relaxed.
//! - Egress Control blocks requests to ports of a list, or redirects them with Request Redirect.
//! - Upstream Forwarding is about packets that were redirected below, and Source Validation about false senders:
//!   neither matters here.
//! - Direct Translated lets requests whose address the IOMMU has translated (ATS) go straight in spite of all
//!   redirection; Translation Blocking drops them.

use std::collections::BTreeMap;

use super::data_direct;
use super::route::Route;
use super::scan::{Check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::{Seen, Unseen};
use crate::machine::config::Acs;
use crate::machine::pci::{Address, Function};
use crate::machine::Pair;

pub(super) const ACS: Check = Check {
    name: "acs",
    about: "ACS redirection where packets between GPU and NIC can turn round",
    applies: super::route::applies,
    run: acs,
};

/// Bits that send packets between devices up: what `pci=disable_acs_redir` clears.
const REDIRECTS: u16 = Acs::RR | Acs::CR | Acs::EC;

/// What of ACS is on at a port. A port without ACS has nothing on.
pub(super) fn control(port: &Function) -> Seen<u16> {
    match port.config()?.acs() {
        Err(Unseen::Absent) => Ok(0),
        other => other,
    }
}

/// Whether the NIC asks the IOMMU for translations itself.
pub(super) fn translates(nic: &Function) -> Seen<bool> {
    match nic.config()?.ats() {
        Err(Unseen::Absent) => Ok(false),
        other => other,
    }
}

/// What a port's controls must be; those that are neither in `on` nor in `off` may be either.
pub(super) struct Wanted<'a> {
    pub(super) port: &'a Function,
    /// What the port is in words.
    pub(super) what: &'static str,
    /// As it is.
    pub(super) set: u16,
    pub(super) on: u16,
    pub(super) off: u16,
}

impl Wanted<'_> {
    /// What is off and must be on, and what is on and must be off.
    pub(super) fn wrong(&self) -> (u16, u16) {
        (self.on & !self.set, self.off & self.set)
    }

    pub(super) fn is_met(&self) -> bool {
        self.wrong() == (0, 0)
    }

    /// As `pci=config_acs=` has it: a character a bit, the highest first.
    pub(super) fn flags(&self) -> String {
        let bits = (0..7).rev().map(|bit| 1_u16 << bit);
        bits.map(|bit| match (self.on & bit, self.off & bit) {
            (0, 0) => 'x',
            (0, _) => '0',
            _ => '1',
        })
        .collect()
    }

    /// The command that changes these controls and no others.
    pub(super) fn command(&self) -> String {
        let mask = self.on | self.off;
        format!(
            "`setpci -s {} ECAP_ACS+0x6.w={:04x}:{mask:04x}`",
            self.port.at, self.on
        )
    }
}

/// What is set where packets of a pair turn round in a switch.
struct Turn<'a> {
    nic: Wanted<'a>,
    gpu: Wanted<'a>,
    /// What ATS has translated goes straight.
    straight: bool,
}

impl<'a> Turn<'a> {
    /// None: they turn round nowhere.
    fn of(route: &Route<'a>) -> Option<Seen<Self>> {
        let (nic_port, gpu_port) = route.turn()?;
        let wanted = |port: &'a Function, what| -> Seen<Wanted<'a>> {
            Ok(Wanted {
                port,
                what,
                set: control(port)?,
                on: 0,
                off: REDIRECTS,
            })
        };
        let both = || {
            Ok((
                wanted(nic_port, "the NIC's port")?,
                wanted(gpu_port, "the GPU's port")?,
            ))
        };
        Some(both().map(|(nic, gpu)| Self {
            // Where it cannot be seen, it is not counted on.
            straight: nic.set & (Acs::DT | Acs::TB) == Acs::DT
                && translates(route.nic).unwrap_or(false),
            nic,
            gpu,
        }))
    }

    fn level(&self) -> Level {
        let (nic, gpu) = (self.nic.set, self.gpu.set);
        let requests = nic & (Acs::RR | Acs::EC);
        let answers = gpu & Acs::CR;
        let of_gpu = (gpu & (Acs::RR | Acs::EC)) | (nic & Acs::CR);
        match (requests | answers, of_gpu) {
            (0, 0) => Level::Ok,
            _ if self.straight => Level::Ok,
            // Only what the GPU itself asks of the NIC.
            (0, _) => Level::Note,
            _ => Level::Warning,
        }
    }

    /// The ports that redirect.
    fn redirecting(self) -> impl Iterator<Item = Wanted<'a>> {
        [self.nic, self.gpu]
            .into_iter()
            .filter(|port| !port.is_met())
    }
}

/// All ports of the machine that the kernel's command line must name, by address: those of each pair that counts.
pub(super) fn at_boot<'a>(scan: &Scan<'a>) -> BTreeMap<Address, Wanted<'a>> {
    let mut ports = BTreeMap::new();
    let pairs = scan.machine.pairs.iter();
    for pair in pairs.filter(|pair| scan.counts(pair)) {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
        let wanted: Vec<Wanted<'a>> = match (data_direct::wanted(pair, &route), Turn::of(&route)) {
            // The others are as Linux has them by itself.
            (Some(Ok(wanted)), _) => wanted.into_iter().filter(|it| it.off != 0).collect(),
            (None, Some(Ok(turn))) if turn.level() == Level::Warning => {
                turn.redirecting().collect()
            }
            _ => Vec::new(),
        };
        ports.extend(wanted.into_iter().map(|port| (port.port.at, port)));
    }
    ports
}

fn acs(scan: &Scan<'_>) -> Vec<Finding> {
    let at_boot = at_boot(scan);
    let mut findings = Vec::new();
    for pair in scan.pairs() {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
        match (data_direct::wanted(pair, &route), Turn::of(&route)) {
            (Some(Err(why)), _) | (None, Some(Err(why))) => {
                let ports = route.turn().map(|(nic, gpu)| [nic.at, gpu.at]);
                let ports = ports.iter().flatten().map(Address::to_string);
                let what = format!("ACS of {}", ports.collect::<Vec<_>>().join(" and "));
                findings.push(Scan::unseen(ACS.name, Subject::pair(pair), what, &why));
            }
            (Some(Ok(wanted)), _) => {
                findings.push(data_direct::acs(scan, pair, &wanted, &at_boot));
            }
            (None, Some(Ok(turn))) => findings.push(of_switch(scan, pair, turn, &at_boot)),
            (None, None) => findings.extend(at_root(pair, &route)),
        }
    }
    findings
}

/// Where NIC and GPU meet in a switch.
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
    let finding = Finding::new(
        ACS.name,
        scan.level(pair, level),
        Subject::pair(pair),
        found,
    );
    match level {
        Level::Ok => finding,
        Level::Note => finding.why(
            "What a GPU asks of the NIC, as in GPU-initiated networking, goes up to the root complex in place of \
             straight through the switch. The NIC's own transfers do not.",
        ),
        _ => finding
            .why(
                "NIC and GPU hang under one switch, where packets can turn round. With redirection each goes up to the \
                 root complex and comes down again, if that lets it through at all.",
            )
            .costs(
                "Half of the bandwidth, by NCCL's maintainers (nccl-tests#112), or transfers that hang (NCCL's \
                 troubleshooting page).",
            )
            .fix(fix(&bad, at_boot)),
    }
}

/// Between root ports, without a common switch: worth knowing, and no fault.
fn at_root(pair: &Pair, route: &Route<'_>) -> Option<Finding> {
    if !route.is_through_root() {
        return None;
    }
    // The end itself is no port, where it hangs on the host bridge.
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
    Some(Finding::new(
        ACS.name,
        Level::Note,
        Subject::pair(pair),
        found,
    ))
}

/// Clears what redirects, and nothing else.
fn fix(bad: &[Wanted<'_>], at_boot: &BTreeMap<Address, Wanted<'_>>) -> String {
    let mut lines: Vec<String> = bad.iter().map(Wanted::command).collect();
    lines.push(
        "That lasts until the next boot. For good: ACS off in the firmware's setup (\"ACS Enable\", \"ACS Control\"), \
         or on the kernel's command line:"
            .to_owned(),
    );
    lines.extend(command_line(at_boot));
    lines.push(
        "Not on a host whose GPUs or NICs are given to virtual machines: ACS keeps these apart. There set the \
         NIC's ATS_ENABLED with mlxconfig and DirectTrans (0x40) at its port."
            .to_owned(),
    );
    lines.join("\n")
}

/// What belongs on the kernel's command line, for all ports of the machine: of several such lists it takes the last.
pub(super) fn command_line(at_boot: &BTreeMap<Address, Wanted<'_>>) -> Vec<String> {
    let each = at_boot.values();
    let each = each.map(|port| format!("{}@{}", port.flags(), port.port.at));
    let list = each.collect::<Vec<_>>().join(";");
    let is_long = at_boot.len() > 1;
    // Before, only the first was heeded (Linux's 9cf8a952d57b).
    let several = if is_long {
        "; for several ports 6.12.23, 6.13.11, 6.14.2 or 6.15"
    } else {
        ""
    };
    let mut lines = vec![format!("pci=config_acs={list} (since Linux 6.11{several})")];
    // It clears what redirects, and can do nothing else.
    if at_boot.values().all(|port| port.on == 0) {
        let each: Vec<String> = at_boot.keys().map(Address::to_string).collect();
        lines.push(format!(
            "pci=disable_acs_redir={} (Linux 4.19 to 6.10)",
            each.join(";")
        ));
    }
    if is_long {
        lines.push(
            r#"In /etc/default/grub quote the list, \"…\", as GRUB takes a semicolon for the end of a command."#
                .to_owned(),
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use crate::finding::Status;
    use crate::fixture::{Fixture, Pci};
    use crate::{fixture, testing};

    /// What `doctor` says of ACS.
    fn says(fixture: &Fixture, more: &[&str]) -> (String, Status) {
        let line = [&["doctor", "--only", "acs"], more].concat();
        testing::says_in_one_line(&fixture.recording, &line)
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
            let redirecting = Pci {
                acs: Some((fixture::ACS_ALL, fixture::ACS_LINUX)),
                ..Pci::switch_port(6, 0)
            };
            fixture.set_config(port, &redirecting);
        }
        let (text, status) = says(&fixture, &[]);
        assert_eq!(status, Status::Findings, "{text}");
        let line = "pci=config_acs=x0x00xx@0000:17:00.0;x0x00xx@0000:17:01.0;x0x00xx@0000:c1:03.0 ";
        assert_eq!(text.matches(line).count(), 1, "{text}");
        let before = "pci=disable_acs_redir=0000:17:00.0;0000:17:01.0;0000:c1:03.0 ";
        assert_eq!(text.matches(before).count(), 1, "{text}");
    }

    /// A NIC farther away is nobody's best, and its port is left as it is.
    #[test]
    fn ports_of_pairs_that_do_not_count_are_not_named() {
        let mut fixture = fixture::acs();
        let redirecting = Pci {
            acs: Some((fixture::ACS_ALL, fixture::ACS_LINUX)),
            ..Pci::switch_port(6, 0)
        };
        fixture.pci("0000:16:00.0", "0000:17:02.0", &redirecting);
        fixture.pci("0000:17:02.0", "0000:30:00.0", &Pci::switch_port(5, 0));
        fixture.pci("0000:30:00.0", "0000:31:00.0", &Pci::switch_port(6, 0));
        fixture.pci("0000:31:00.0", "0000:32:00.0", &Pci::connectx7(0));
        fixture.hca("mlx5_9", "0000:32:00.0", "ibp50s0", "InfiniBand", "?");
        let (text, _) = says(&fixture, &["--all"]);
        let far = "0000:17:02.0 (the NIC's port) has ReqRedir, CmpltRedir";
        assert!(text.contains(far), "{text}");
        let line = "pci=config_acs=x0x00xx@0000:17:00.0;x0x00xx@0000:17:01.0 (";
        assert!(text.contains(line), "{text}");
        // Unless it is what was asked for.
        let (text, _) = says(&fixture, &["--pair", "0,mlx5_9"]);
        assert!(text.contains("x0x00xx@0000:17:02.0"), "{text}");
    }
}
