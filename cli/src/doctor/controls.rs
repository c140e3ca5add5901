// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! ACS controls: what the ports of a route have, what they must have, and the kernel's command line for that.
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
//!
//! nvidia.ko gives Data Direct addresses of GPU memory as they are on PCI, past the IOMMU, and only if both functions
//! are in one group (`nv_pci_is_valid_topology_for_direct_pci` and `skip_iommu` of the open driver). Groups follow from
//! ACS, which Linux reads when it finds the devices.

use std::collections::BTreeMap;

use super::route::Route;
use super::scan::Scan;
use crate::finding::Level;
use crate::host::{Seen, Unseen};
use crate::machine::config::{Acs, Config};
use crate::machine::pci::{Address, Function};
use crate::machine::Pair;

/// Bits that send packets between devices up: what `pci=disable_acs_redir` clears.
pub(super) const REDIRECTS: u16 = Acs::RR | Acs::CR | Acs::EC;

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
pub(super) struct Turn<'a> {
    pub(super) nic: Wanted<'a>,
    pub(super) gpu: Wanted<'a>,
    /// What ATS has translated goes straight.
    pub(super) straight: bool,
}

impl<'a> Turn<'a> {
    /// None: they turn round nowhere.
    pub(super) fn of(route: &Route<'a>) -> Option<Seen<Self>> {
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

    pub(super) fn level(&self) -> Level {
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
    pub(super) fn redirecting(self) -> impl Iterator<Item = Wanted<'a>> {
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
        let wanted: Vec<Wanted<'a>> = match (for_data_direct(pair, &route), Turn::of(&route)) {
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

/// What it costs that Data Direct is there and cannot be used.
pub(super) const UNUSED: &str =
    "Half of the bandwidth between the NIC and a GB300's memory, which then goes through the processor \
     (meta-pytorch/torchcomms#3014).";

/// What does by itself what a fix asks for.
pub(super) const WRITES: &str = "`rdma_topo write-grub-acs`, of a new rdma-core, writes the same.";

/// Root ports of Grace, as rdma-core's rdma_topo has them.
const GRACE: [(u16, u16); 3] = [(0x10de, 0x22b1), (0x10de, 0x22b2), (0x10de, 0x22b8)];

/// What Linux turns on by itself.
const ISOLATED: u16 = Acs::SV | Acs::RR | Acs::CR | Acs::UF;

/// What ACS must be for Data Direct below a root port of Grace, by rdma-core's rdma_topo: open to the requests of Data
/// Direct and to the GPU's answers, closed to all else, and without source validation at the root port, so that Linux
/// puts both functions into one IOMMU group. None: this is no such pair.
pub(super) fn for_data_direct<'a>(pair: &Pair, route: &Route<'a>) -> Option<Seen<Vec<Wanted<'a>>>> {
    let bridges = route.bridges();
    let root = *bridges.first()?;
    if !pair.is_data_direct() || !GRACE.contains(&(root.vendor, root.device)) {
        return None;
    }
    let (own, gpu) = route.turn()?;
    let wanted = bridges.into_iter().filter_map(|port| {
        let (what, off) = match port.at {
            at if at == root.at => ("root port", Acs::SV),
            at if at == own.at => ("Data Direct's port", Acs::RR),
            at if at == gpu.at => ("the GPU's port", Acs::CR),
            _ => (port.kind_of_bridge(), 0),
        };
        let set = match port.config().and_then(Config::acs) {
            // Upstream ports.
            Err(Unseen::Absent) => return None,
            set => set,
        };
        Some(set.map(|set| Wanted {
            port,
            what,
            set,
            on: ISOLATED & !off,
            off,
        }))
    });
    Some(wanted.collect())
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
