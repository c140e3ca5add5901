// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Present and required ACS settings of the ports on a route, and the kernel options for these
//! settings.
//!
//! In a switch above two devices, packets between the devices can turn round: they go straight
//! across, and do not pass the root complex. A switch port with ACS (Access Control Services) can
//! redirect such packets up to the root complex. A switch above only one of the devices sends all
//! packets up. Ports above the common switch do not see packets that turn round. Packets between
//! root ports are already in the root complex, where redirection costs nothing. Each ACS bit acts
//! on certain packets (PCI Express 7.0, 6.12.3):
//!
//! - Request Redirect acts on incoming requests: the NIC's at the NIC's port, the GPU's at the
//!   GPU's port.
//! - Completion Redirect acts on completions: the GPU's answers to the NIC's reads, at the GPU's
//!   port. Completions marked as relaxed ordered are exempt.
//! - Egress Control blocks requests to a list of ports, or redirects them if Request Redirect is
//!   on.
//! - Upstream Forwarding (packets that a lower port redirected) and Source Validation (forged
//!   requesters) do not matter here.
//! - Direct Translated lets requests with an address that the IOMMU has translated (ATS) go
//!   straight, despite redirection. Translation Blocking drops such requests.
//!
//! The PCI addresses of GPU memory bypass the IOMMU. nvidia.ko gives Data Direct these addresses
//! only if Data Direct and the GPU are in one IOMMU group. The open driver's
//! `nv_pci_is_valid_topology_for_direct_pci` and `skip_iommu` decide. Linux forms the groups when
//! it enumerates the devices, from the ACS settings at that time.

use std::collections::BTreeMap;

use super::route::Route;
use super::scan::Scan;
use crate::finding::Level;
use crate::host::{Seen, Unseen};
use crate::machine::config::{Acs, Config};
use crate::machine::pci::{Address, Function};
use crate::machine::Pair;

/// ACS bits that send packets between devices up to the root complex. `pci=disable_acs_redir`
/// clears the same bits.
pub(super) const REDIRECTS: u16 = Acs::RR | Acs::CR | Acs::EC;

/// Returns the ACS bits that are on at a port, or 0 for a port without ACS.
pub(super) fn control(port: &Function) -> Seen<u16> {
    match port.config()?.acs() {
        Err(Unseen::Absent) => Ok(0),
        other => other,
    }
}

/// Returns `true` if the NIC asks the IOMMU for translations itself (ATS).
pub(super) fn translates(nic: &Function) -> Seen<bool> {
    match nic.config()?.ats() {
        Err(Unseen::Absent) => Ok(false),
        other => other,
    }
}

/// Present and required ACS bits of a port. A bit in neither `on` nor `off` may have any value.
pub(super) struct Wanted<'a> {
    pub(super) port: &'a Function,
    /// Description of the port.
    pub(super) what: &'static str,
    /// Bits that are on now.
    pub(super) set: u16,
    pub(super) on: u16,
    pub(super) off: u16,
}

impl Wanted<'_> {
    /// Returns the bits that must be turned on, and the bits that must be turned off.
    pub(super) fn wrong(&self) -> (u16, u16) {
        (self.on & !self.set, self.off & self.set)
    }

    pub(super) fn is_met(&self) -> bool {
        self.wrong() == (0, 0)
    }

    /// Returns the flags in the format of `pci=config_acs=`: one character for each bit, highest
    /// first.
    pub(super) fn flags(&self) -> String {
        let bits = (0..7).rev().map(|bit| 1_u16 << bit);
        bits.map(|bit| match (self.on & bit, self.off & bit) {
            (0, 0) => 'x',
            (0, _) => '0',
            _ => '1',
        })
        .collect()
    }

    /// Returns the command that changes these controls and no others.
    pub(super) fn command(&self) -> String {
        let mask = self.on | self.off;
        format!(
            "`setpci -s {} ECAP_ACS+0x6.w={:04x}:{mask:04x}`",
            self.port.at, self.on
        )
    }
}

/// ACS bits of the two switch ports between which packets of a GPU and a NIC turn round.
pub(super) struct Turn<'a> {
    pub(super) nic: Wanted<'a>,
    pub(super) gpu: Wanted<'a>,
    /// `true` if requests that ATS has translated go straight across, despite redirection.
    pub(super) straight: bool,
}

impl<'a> Turn<'a> {
    /// Returns the settings, or `None` if packets do not turn round in a switch.
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
            // ATS that is not visible is treated as off.
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
            // Only the GPU's requests to the NIC, or the NIC's answers to these requests, are
            // redirected.
            (0, _) => Level::Note,
            _ => Level::Warning,
        }
    }

    /// Returns the ports that redirect packets.
    pub(super) fn redirecting(self) -> impl Iterator<Item = Wanted<'a>> {
        [self.nic, self.gpu]
            .into_iter()
            .filter(|port| !port.is_met())
    }
}

/// Returns the ACS settings for the kernel's command line, by port address. The settings cover all
/// pairs for which [`Scan::counts`] is true.
pub(super) fn at_boot<'a>(scan: &Scan<'a>) -> BTreeMap<Address, Wanted<'a>> {
    let mut ports = BTreeMap::new();
    let pairs = scan.machine.pairs.iter();
    for pair in pairs.filter(|pair| scan.counts(pair)) {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
        let wanted: Vec<Wanted<'a>> = match (for_data_direct(pair, &route), Turn::of(&route)) {
            // By default, Linux sets the right bits on a port whose `off` is 0.
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

/// Cost of a Data Direct function that cannot be used.
pub(super) const UNUSED: &str =
    "Half of the bandwidth between the NIC and a GB300's memory, which then goes through the processor \
     (meta-pytorch/torchcomms#3014).";

/// Advice about a tool that writes the same settings.
pub(super) const WRITES: &str =
    "`rdma_topo write-grub-acs` of a recent rdma-core writes the same options.";

/// Root ports of Grace, as in rdma-core's rdma_topo.
const GRACE: [(u16, u16); 3] = [(0x10de, 0x22b1), (0x10de, 0x22b2), (0x10de, 0x22b8)];

/// ACS bits that Linux turns on by default.
const ISOLATED: u16 = Acs::SV | Acs::RR | Acs::CR | Acs::UF;

/// Returns the required ACS for Data Direct below a root port of Grace, as in rdma-core's
/// rdma_topo. The ports let Data Direct's requests and the GPU's completions go straight across,
/// and redirect everything else. Source validation is off at the root port. Linux therefore puts
/// both functions into one IOMMU group. Returns `None` for any other pair.
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
            // Upstream ports have no ACS.
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

/// Kernel parameter that [`fixture::data_direct_acs`](crate::fixture::data_direct_acs) needs.
#[cfg(test)]
pub(super) const DATA_DIRECT_ACS: &str =
    "pci=config_acs=xx111x0@0008:00:00.0;xx110x1@0008:02:00.0;xx101x1@0008:02:02.0;\
     xx111x0@0009:00:00.0;xx110x1@0009:02:00.0;xx101x1@0009:02:02.0";

/// Returns the options for the kernel's command line. Each option lists all ports of the machine,
/// because the kernel uses only the last list of a repeated option.
pub(super) fn command_line(at_boot: &BTreeMap<Address, Wanted<'_>>) -> Vec<String> {
    let each = at_boot.values();
    let each = each.map(|port| format!("{}@{}", port.flags(), port.port.at));
    let list = each.collect::<Vec<_>>().join(";");
    let is_long = at_boot.len() > 1;
    // Kernels without commit 9cf8a952d57b apply only the first port of the list.
    let several = if is_long {
        "; for several ports, since 6.12.23, 6.13.11, 6.14.2 or 6.15"
    } else {
        ""
    };
    let mut lines = vec![format!("pci=config_acs={list} (since Linux 6.11{several})")];
    // `pci=disable_acs_redir` can only clear redirection.
    if at_boot.values().all(|port| port.on == 0) {
        let each: Vec<String> = at_boot.keys().map(Address::to_string).collect();
        lines.push(format!(
            "pci=disable_acs_redir={} (Linux 4.19 to 6.10)",
            each.join(";")
        ));
    }
    if is_long {
        lines.push(
            r#"In /etc/default/grub quote the list, \"…\", because GRUB takes a semicolon for the end of a command."#
                .to_owned(),
        );
    }
    lines
}
