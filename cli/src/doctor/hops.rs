// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Path of the pair that `--pair` selects, with the settings of each hop.

use serde::Serialize;

use super::scan::Scan;
use crate::machine::config::{Acs, PortType};
use crate::machine::pci::Address;
use crate::machine::{Class, Pair};
use crate::render::Table;
use crate::report::Out;

/// A hop of the path: a PCI function, or a host bridge.
#[derive(Debug, Default, Serialize)]
pub(super) struct Hop {
    at: String,
    /// Kind or name: `GPU 0`, `bridge`, `mlx5_0`.
    what: String,
    /// Current link above the function. `None`: not visible, or no link.
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    /// Best link that the function supports.
    #[serde(skip_serializing_if = "Option::is_none")]
    link_most: Option<String>,
    /// Configured maximum payload, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_payload: Option<u32>,
    /// ACS controls that are on, with lspci's names. Empty: none are on, or the function has no
    /// ACS.
    #[serde(skip_serializing_if = "Option::is_none")]
    acs: Option<Vec<&'static str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    iommu_group: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
}

/// A path from the GPU to the RDMA device.
#[derive(Debug, Serialize)]
pub(super) struct Path {
    class: Option<Class>,
    hops: Vec<Hop>,
}

impl Path {
    pub(super) fn of(scan: &Scan<'_>, pair: &Pair) -> Self {
        let gpu = match scan.gpu(pair.gpu) {
            Some(gpu) => format!("GPU {}", gpu.index),
            None => "GPU".to_owned(),
        };
        let hca = pair.nic;
        let mut hops = vec![Hop::of(scan, pair.gpu, gpu)];
        let above = |at: Option<Address>| {
            let function = at.and_then(|at| scan.machine.functions.get(&at));
            function.map(|function| (function.above.as_slice(), function.root.as_str()))
        };
        let (to_gpu, gpu_root) = above(Some(pair.gpu)).unwrap_or_default();
        let nic_root = above(hca).map_or(gpu_root, |(_, root)| root);
        // The path goes up on the GPU's side, turns round, and goes down on the NIC's side.
        let (up, down): (Vec<Address>, Vec<Address>) =
            pair.bridges.iter().partition(|at| to_gpu.contains(at));
        hops.extend(up.iter().map(|at| Hop::port(scan, *at)));
        match pair.meet {
            Some(meet) => hops.push(Hop::port(scan, meet)),
            None if hca.is_none() => {}
            None => {
                hops.push(Hop::host_bridge(gpu_root));
                if nic_root != gpu_root {
                    hops.push(Hop::host_bridge(nic_root));
                }
            }
        }
        hops.extend(down.iter().map(|at| Hop::port(scan, *at)));
        if let Some(at) = hca {
            let direct = if pair.is_data_direct() {
                ", Data Direct"
            } else {
                ""
            };
            hops.push(Hop::of(scan, at, format!("{}{direct}", pair.hca)));
        }
        Self {
            class: pair.class,
            hops,
        }
    }
}

impl Hop {
    fn port(scan: &Scan<'_>, at: Address) -> Self {
        Self::of(scan, at, what_port(scan, at).to_owned())
    }

    fn host_bridge(name: &str) -> Self {
        Self {
            at: name.to_owned(),
            what: "host bridge".to_owned(),
            ..Self::default()
        }
    }

    fn of(scan: &Scan<'_>, at: Address, what: String) -> Self {
        let function = scan.machine.functions.get(&at);
        let link = function.and_then(|function| function.link.as_ref().ok());
        let express = function.and_then(|function| function.express().ok());
        Self {
            at: at.to_string(),
            what,
            link: link.map(|link| link.now.to_string()),
            link_most: link.map(|link| link.most.to_string()),
            max_payload: express.map(|express| express.payload),
            acs: function
                .and_then(|function| super::controls::control(function).ok())
                .map(Acs::names),
            iommu_group: function.and_then(|function| function.iommu_group.as_ref().ok().copied()),
            numa: function.and_then(|function| function.numa),
            driver: function.and_then(|function| function.driver.clone()),
        }
    }
}

/// Returns the kind of a bridge, or `bridge` if the kind is unknown.
fn what_port(scan: &Scan<'_>, at: Address) -> &'static str {
    let function = scan.machine.functions.get(&at);
    match function.and_then(|function| Some(function.express().ok()?.port)) {
        Some(PortType::RootPort) => "root port",
        Some(PortType::Upstream) => "switch, upstream",
        Some(PortType::Downstream) => "switch, downstream",
        _ => "bridge",
    }
}

/// Prints the path as a table.
pub(super) fn tell(scan: &Scan<'_>, pair: &Pair, out: &mut Out) {
    let path = Path::of(scan, pair);
    let class = path.class.map_or("not on PCI", Class::name);
    out.line(format!("{class}, from the GPU to {}:", pair.hca));
    out.gap();
    let mut table = Table::of("HOP||LINK|AT MOST|PAYLOAD|ACS|IOMMU|NUMA");
    for hop in path.hops {
        let number = |number: Option<u32>| number.map(|it| it.to_string()).unwrap_or_default();
        let payload = hop.max_payload.map(|bytes| format!("{bytes} B"));
        let acs = match hop.acs {
            None if hop.what == "host bridge" => String::new(),
            None => "not visible".to_owned(),
            Some(on) if on.is_empty() => "none on".to_owned(),
            Some(on) => on.join(" "),
        };
        table.row([
            hop.at,
            hop.what,
            hop.link.unwrap_or_default(),
            hop.link_most.unwrap_or_default(),
            payload.unwrap_or_default(),
            acs,
            number(hop.iommu_group),
            number(hop.numa),
        ]);
    }
    out.table(&table);
    out.gap();
}
