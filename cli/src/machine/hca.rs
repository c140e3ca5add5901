// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! RDMA devices, and the PCI functions that do their DMA
//! (`Documentation/ABI/stable/sysfs-class-infiniband`).

use std::collections::{BTreeMap, BTreeSet};

use super::pci::Address;
use super::{pci, Listed, Unread};
use crate::host::dcb::NET;
use crate::host::nldev::CLASS;
use crate::host::Host;

/// Upper bound on the network interfaces below one interface. Bonds, VLANs and bridges do not nest
/// this deeply.
const MOST_NETDEVS: usize = 64;

/// Number of GIDs to read for each port if the directory of the GIDs cannot be listed, as in an old
/// recording.
const FIRST_GIDS: u32 = 16;

/// A port of an RDMA device.
#[derive(Debug, Clone)]
pub(crate) struct Port {
    pub(crate) number: u32,
    /// Link layer: `InfiniBand` or `Ethernet`.
    pub(crate) layer: Option<String>,
    /// State: `ACTIVE`, `DOWN`, …
    pub(crate) state: Option<String>,
    /// Rate as in sysfs: `400 Gb/sec (4X NDR)`.
    pub(crate) rate: Option<String>,
    /// Network interfaces of the port.
    pub(crate) netdevs: Vec<String>,
}

impl Port {
    /// Returns `true` if the port is active (`4: ACTIVE` in sysfs).
    pub(crate) fn is_active(&self) -> bool {
        self.state.as_deref() == Some("ACTIVE")
    }

    /// Returns the rate in Mb/s.
    pub(crate) fn megabits(&self) -> Option<u64> {
        rate_of(self.rate.as_deref()?)
    }
}

/// Formats a rate in Gb/s, to one decimal.
pub(crate) fn gigabits(megabits: u64) -> String {
    match megabits / 100 {
        tenths if tenths % 10 == 0 => format!("{}", tenths / 10),
        tenths => format!("{}.{}", tenths / 10, tenths % 10),
    }
}

/// Parses a rate such as `400 Gb/sec (4X NDR)`, and returns it in Mb/s.
pub(crate) fn rate_of(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ')?;
    if !unit.starts_with("Gb/sec") {
        return None;
    }
    // A rate such as `2.5` has at most one decimal.
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    let whole: u64 = whole.parse().ok()?;
    let tenth: u64 = tenth.parse().ok().filter(|tenth| *tenth < 10)?;
    whole.checked_mul(1000)?.checked_add(tenth * 100)
}

/// An RDMA device: an entry of `/sys/class/infiniband`.
#[derive(Debug, Clone)]
pub(crate) struct Hca {
    /// Name: `mlx5_0`, `rxe0`.
    pub(crate) name: String,
    /// PCI function that does the device's DMA: the device's own function, or the function of the
    /// NIC below a software device.
    pub(crate) at: Option<Address>,
    /// `true` for rxe and siw, which do the work of a NIC in software.
    pub(crate) is_software: bool,
    pub(crate) driver: Option<String>,
    pub(crate) firmware: Option<String>,
    /// All functions that a bond's traffic may use, including `at`.
    pub(crate) members: Vec<Address>,
    /// Data Direct function of the NIC.
    pub(crate) data_direct: Option<Address>,
    pub(crate) ports: Vec<Port>,
}

impl Hca {
    /// Returns all functions that the device's traffic may use.
    pub(crate) fn functions(&self) -> BTreeSet<Address> {
        let own = self.at.iter().chain(&self.members);
        own.chain(&self.data_direct).copied().collect()
    }
}

/// Returns all RDMA devices in natural order: `mlx5_2` before `mlx5_10`. Entries that cannot be
/// resolved go to `unread`.
pub(super) fn scan(host: &dyn Host, unread: &mut Vec<Unread>) -> Vec<Hca> {
    let mut names = host.names(CLASS).unwrap_or_default();
    names.sort_by_key(|name| natural(name));
    names.retain(|name| match host.resolved(&format!("{CLASS}/{name}")) {
        Ok(_) => true,
        Err(why) => {
            let device = Listed::Hca(name.clone());
            unread.push(Unread { device, why });
            false
        }
    });
    let mut hcas: Vec<Hca> = names.into_iter().map(|name| look_at(host, name)).collect();
    // A function with its own RDMA device is not a member of another device.
    let own: BTreeMap<String, Address> = hcas
        .iter()
        .filter(|hca| !hca.is_software)
        .filter_map(|hca| Some((hca.name.clone(), hca.at?)))
        .collect();
    for hca in &mut hcas {
        let mine = hca.at;
        hca.members.retain(|at| {
            Some(*at) == mine || hca.is_software || !own.values().any(|other| other == at)
        });
        if hca.members.len() < 2 {
            hca.members.clear();
        }
    }
    hcas
}

/// Splits a name into pairs: letters, and the number that follows them.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digit = rest
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (word, tail) = rest.split_at(digit);
        let end = tail
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        parts.push((word.to_owned(), number.parse().unwrap_or(0)));
        rest = tail;
    }
    parts
}

fn look_at(host: &dyn Host, name: String) -> Hca {
    let own = format!("{CLASS}/{name}");
    // The device is below its PCI function, or below an auxiliary device of that function.
    let real = host.resolved(&own).ok();
    let mut at = real.as_deref().and_then(last_address);
    if at.is_none() {
        let device = host.resolved(&format!("{own}/device")).ok();
        at = device.as_deref().and_then(last_address);
    }
    let is_software = at.is_none();
    let device = format!("{own}/device");
    let netdevs = host.names(&format!("{device}/net")).unwrap_or_default();
    let mut ports: Vec<Port> = host
        .names(&format!("{own}/ports"))
        .unwrap_or_default()
        .iter()
        .filter_map(|number| number.parse().ok())
        .map(|number| port(host, &own, number))
        .collect();
    ports.sort_by_key(|port| port.number);
    share_out(host, &mut ports, &netdevs);
    // rxe and siw have a file with the name of their network interface.
    let parent = host.text(&format!("{own}/parent")).ok();
    if let (Some(parent), Some(first)) = (parent, ports.first_mut()) {
        if is_software && !parent.is_empty() && first.netdevs.is_empty() {
            first.netdevs.push(parent);
        }
    }
    for port in &mut ports {
        if port.netdevs.is_empty() {
            port.netdevs = of_gids(host, &own, port.number);
        }
    }
    let mut members = BTreeSet::new();
    for netdev in ports.iter().flat_map(|port| &port.netdevs) {
        members.extend(functions_of(host, netdev, is_software));
    }
    if is_software {
        at = members.first().copied();
    }
    members.extend(at);
    let driver = |path: String| {
        let says = host.link(&path).ok()?;
        says.rsplit('/').next().map(str::to_owned)
    };
    Hca {
        at,
        is_software,
        // For an auxiliary device (`mlx5_ib.rdma`), the driver is that of the PCI function.
        driver: match at {
            Some(at) if !is_software => driver(format!("{}/{at}/driver", pci::DEVICES)),
            _ => None,
        },
        firmware: host
            .text(&format!("{own}/fw_ver"))
            .ok()
            .filter(|version| !version.is_empty()),
        members: members.into_iter().collect(),
        data_direct: None,
        ports,
        name,
    }
}

fn last_address(path: &str) -> Option<Address> {
    pci::way(path)?.1.pop()
}

fn port(host: &dyn Host, own: &str, number: u32) -> Port {
    let text = |file: &str| host.text(&format!("{own}/ports/{number}/{file}")).ok();
    Port {
        number,
        layer: text("link_layer"),
        // The file contains `4: ACTIVE`.
        state: text("state").map(|state| match state.split_once(": ") {
            Some((_, word)) => word.to_owned(),
            None => state,
        }),
        rate: text("rate"),
        netdevs: Vec::new(),
    }
}

/// Assigns each network interface to a port, by `dev_port` if the function has several ports.
fn share_out(host: &dyn Host, ports: &mut [Port], netdevs: &[String]) {
    let several = ports.len() > 1;
    for netdev in netdevs {
        // A representor of a virtual function carries no traffic of this device.
        let representor = host.text(&format!("{NET}/{netdev}/phys_port_name"));
        if representor.is_ok_and(|name| name.contains("vf") || name.contains("sf")) {
            continue;
        }
        let index = match several {
            // `dev_port` starts at 0, and port numbers start at 1.
            true => host
                .number(&format!("{NET}/{netdev}/dev_port"))
                .unwrap_or(0),
            false => 0,
        };
        let port = usize::try_from(index)
            .ok()
            .and_then(|index| ports.get_mut(index));
        if let Some(port) = port {
            port.netdevs.push(netdev.clone());
        }
    }
}

/// Returns the indices of a port's GIDs in ascending order. `directory` has one file for each GID.
pub(crate) fn gid_indices(host: &dyn Host, directory: &str) -> Vec<u32> {
    let Ok(names) = host.names(directory) else {
        return (0..FIRST_GIDS).collect();
    };
    let indices = names.iter().filter_map(|name| name.parse().ok());
    let mut indices: Vec<u32> = indices.collect();
    indices.sort_unstable();
    indices
}

/// Returns the network interfaces of a port's GIDs.
fn of_gids(host: &dyn Host, own: &str, port: u32) -> Vec<String> {
    let mut netdevs = Vec::new();
    let directory = format!("{own}/ports/{port}/gid_attrs/ndevs");
    for gid in gid_indices(host, &directory) {
        match host.text(&format!("{directory}/{gid}")) {
            Ok(name) if !name.is_empty() && !netdevs.contains(&name) => netdevs.push(name),
            _ => {}
        }
    }
    netdevs
}

/// Returns the PCI functions that a network interface's traffic may use.
fn functions_of(host: &dyn Host, netdev: &str, with_lower: bool) -> BTreeSet<Address> {
    let netdevs = netdevs_of(host, netdev, with_lower).into_iter();
    let device = |name: String| host.resolved(&format!("{NET}/{name}/device")).ok();
    netdevs
        .filter_map(device)
        .filter_map(|path| last_address(&path))
        .collect()
}

/// Returns the network interfaces that the traffic of `netdev` may use: itself, and the other
/// members of its bond. The caller sets `with_lower` for an interface that belongs to no NIC. The
/// result then includes all interfaces below `netdev`.
pub(crate) fn netdevs_of(host: &dyn Host, netdev: &str, with_lower: bool) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    let mut todo = vec![netdev.to_owned()];
    while let Some(name) = todo.pop() {
        // The name comes from a file and becomes part of a path.
        if seen.len() >= MOST_NETDEVS
            || name.contains('/')
            || name.is_empty()
            || !seen.insert(name.clone())
        {
            continue;
        }
        let own = format!("{NET}/{name}");
        if let Ok(master) = host.link(&format!("{own}/master")) {
            let master = master.rsplit('/').next().unwrap_or_default();
            if let Ok(slaves) = host.text(&format!("{NET}/{master}/bonding/slaves")) {
                todo.extend(slaves.split_whitespace().map(str::to_owned));
            }
        }
        if let Ok(slaves) = host.text(&format!("{own}/bonding/slaves")) {
            todo.extend(slaves.split_whitespace().map(str::to_owned));
        } else if with_lower {
            let names = host.names(&own).unwrap_or_default();
            let lower = names.iter().filter_map(|name| name.strip_prefix("lower_"));
            todo.extend(lower.map(str::to_owned));
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_the_order_of_their_numbers() {
        let mut names = ["mlx5_10", "mlx5_2", "bnxt_re0", "mlx5_bond_0", "mlx5_0"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(
            names,
            ["bnxt_re0", "mlx5_0", "mlx5_2", "mlx5_10", "mlx5_bond_0"]
        );
    }
}
