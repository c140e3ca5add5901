// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The JSON of `peermemctl.topo`. docs/peermemctl.md documents each key.

use serde::Serialize;

use crate::machine::pci::{Address, Rate};
use crate::machine::{Class, Gpu, Hca, Machine, Pair, Segment};
use crate::nvml::Nvml;

/// The JSON body.
#[derive(Serialize)]
pub(super) struct Topology<'a> {
    virtual_machine: Option<bool>,
    numa_nodes: Option<usize>,
    gpus: Vec<GpuJson<'a>>,
    hcas: Vec<HcaJson<'a>>,
    pairs: Vec<PairJson<'a>>,
    /// Data Direct functions of unknown RDMA devices.
    data_direct_unassigned: Vec<Address>,
    hca_pairs: Vec<HcaPairJson<'a>>,
    gpu_pairs: Vec<GpuPairJson>,
    bridges: Vec<BridgeJson>,
}

#[derive(Serialize)]
struct GpuJson<'a> {
    index: usize,
    nvml_index: Option<u32>,
    minor: Option<u32>,
    address: Address,
    name: &'a str,
    numa_node: Option<u32>,
    cpus: Option<&'a str>,
    bar1_bytes: Option<u64>,
    stand_in: bool,
    coherent: bool,
    virtual_function_of: Option<Address>,
    driver: Option<&'a str>,
    link: Option<LinkJson>,
}

#[derive(Serialize)]
struct HcaJson<'a> {
    name: &'a str,
    address: Option<Address>,
    numa_node: Option<u32>,
    cpus: Option<&'a str>,
    software: bool,
    driver: Option<&'a str>,
    firmware: Option<&'a str>,
    bond_of: &'a [Address],
    virtual_function_of: Option<Address>,
    data_direct: Option<Address>,
    ports: Vec<PortJson<'a>>,
    link: Option<LinkJson>,
}

#[derive(Serialize)]
struct PortJson<'a> {
    number: u32,
    link_layer: Option<&'a str>,
    state: Option<&'a str>,
    rate: Option<&'a str>,
    netdevs: &'a [String],
}

#[derive(Serialize)]
struct PairJson<'a> {
    gpu: usize,
    gpu_address: Address,
    hca: &'a str,
    best: bool,
    #[serde(flatten)]
    path: PathJson<'a>,
    /// Path through the RDMA device's own function, if `path` uses its Data Direct function.
    without_data_direct: Option<PathJson<'a>>,
}

#[derive(Serialize)]
struct PathJson<'a> {
    class: Option<Class>,
    /// Best bandwidth of the slower end's link.
    megabits_per_second: Option<u64>,
    meet: Option<Address>,
    bridges: &'a [Address],
    links: Vec<LinkJson>,
}

/// Two RDMA devices.
#[derive(Serialize)]
struct HcaPairJson<'a> {
    hcas: [&'a str; 2],
    class: Option<Class>,
}

/// Two GPUs.
#[derive(Serialize)]
struct GpuPairJson {
    gpus: [usize; 2],
    class: Option<Class>,
    /// `None`: NVML reports none.
    nvlinks: Option<u32>,
    nvswitch: Option<bool>,
}

#[derive(Serialize)]
struct BridgeJson {
    address: Address,
    vendor: String,
    device: String,
    numa_node: Option<u32>,
    /// Kind: `root_port`, `upstream_port`, `downstream_port`, `bridge`.
    kind: String,
    payload_bytes: Option<u32>,
    payload_most_bytes: Option<u32>,
    /// Reason why the payload is missing.
    unseen: Option<String>,
}

#[derive(Serialize)]
struct LinkJson {
    /// `None`: no port above it, as in a virtual machine.
    upper: Option<Address>,
    lower: Address,
    now: RateJson,
    most: RateJson,
}

#[derive(Serialize)]
struct RateJson {
    /// Speed in GT/s.
    speed: Option<f64>,
    lanes: Option<u32>,
}

impl RateJson {
    fn of(rate: Rate) -> Self {
        Self {
            speed: (rate.speed != 0).then(|| f64::from(rate.speed) / 10.0),
            lanes: (rate.width != 0).then_some(rate.width),
        }
    }
}

impl LinkJson {
    fn of(link: &Segment) -> Self {
        Self {
            upper: Some(link.upper),
            lower: link.lower,
            now: RateJson::of(link.now),
            most: RateJson::of(link.most),
        }
    }
}

impl<'a> Topology<'a> {
    pub(super) fn of(machine: &'a Machine, nvml: Option<&Nvml>) -> Self {
        let bridges: std::collections::BTreeSet<Address> = machine
            .pairs
            .iter()
            .flat_map(|pair| [pair, pair.by_own_function()])
            .flat_map(|path| path.bridges.iter().copied().chain(path.meet))
            .collect();
        Self {
            virtual_machine: machine.is_virtual,
            numa_nodes: machine.nodes,
            gpus: machine
                .gpus
                .iter()
                .map(|gpu| GpuJson::of(machine, nvml, gpu))
                .collect(),
            hcas: machine
                .hcas
                .iter()
                .map(|hca| HcaJson::of(machine, hca))
                .collect(),
            pairs: machine
                .pairs
                .iter()
                .map(|pair| PairJson::of(machine, pair))
                .collect(),
            data_direct_unassigned: machine
                .unassigned_data_direct()
                .map(|function| function.at)
                .collect(),
            hca_pairs: HcaPairJson::all(machine),
            gpu_pairs: GpuPairJson::all(machine, nvml),
            bridges: bridges
                .into_iter()
                .filter_map(|at| BridgeJson::of(machine, at))
                .collect(),
        }
    }
}

fn first_link(machine: &Machine, at: Option<Address>) -> Option<LinkJson> {
    let lower = at?;
    if let Some(link) = machine.links(lower).first() {
        return Some(LinkJson::of(link));
    }
    let own = machine.physical(lower)?.link.as_ref().ok()?;
    Some(LinkJson {
        upper: None,
        lower,
        now: RateJson::of(own.now),
        most: RateJson::of(own.most),
    })
}

impl<'a> GpuJson<'a> {
    fn of(machine: &'a Machine, nvml: Option<&Nvml>, gpu: &'a Gpu) -> Self {
        let function = machine.functions.get(&gpu.at);
        Self {
            index: gpu.index,
            nvml_index: nvml.and_then(|nvml| nvml.gpu(gpu.at)?.index),
            minor: gpu.minor,
            address: gpu.at,
            name: &gpu.name,
            numa_node: function.and_then(|function| function.numa),
            cpus: function.and_then(|function| function.cpus.as_deref()),
            bar1_bytes: gpu.bar1.map(|bar| bar.size),
            stand_in: gpu.is_stand_in,
            coherent: gpu.is_coherent,
            virtual_function_of: function.and_then(|function| function.physical),
            driver: function.and_then(|function| function.driver.as_deref()),
            link: first_link(machine, Some(gpu.at)),
        }
    }
}

impl<'a> HcaJson<'a> {
    fn of(machine: &'a Machine, hca: &'a Hca) -> Self {
        let function = hca.at.and_then(|at| machine.functions.get(&at));
        Self {
            name: &hca.name,
            address: hca.at,
            numa_node: function.and_then(|function| function.numa),
            cpus: function.and_then(|function| function.cpus.as_deref()),
            software: hca.is_software,
            driver: hca.driver.as_deref(),
            firmware: hca.firmware.as_deref(),
            bond_of: &hca.members,
            virtual_function_of: function.and_then(|function| function.physical),
            data_direct: hca.data_direct,
            ports: hca
                .ports
                .iter()
                .map(|port| PortJson {
                    number: port.number,
                    link_layer: port.layer.as_deref(),
                    state: port.state.as_deref(),
                    rate: port.rate.as_deref(),
                    netdevs: &port.netdevs,
                })
                .collect(),
            link: first_link(machine, hca.at),
        }
    }
}

impl<'a> PairJson<'a> {
    fn of(machine: &'a Machine, pair: &'a Pair) -> Self {
        let own = pair.own.as_deref();
        Self {
            gpu: machine.gpu(pair.gpu).map_or(0, |gpu| gpu.index),
            gpu_address: pair.gpu,
            hca: &pair.hca,
            best: pair.is_best,
            path: PathJson::of(machine, pair),
            without_data_direct: own.map(|own| PathJson::of(machine, own)),
        }
    }
}

impl<'a> PathJson<'a> {
    fn of(machine: &'a Machine, pair: &'a Pair) -> Self {
        let crossed = |link: &Segment| {
            let ends = [Some(pair.gpu), pair.nic];
            pair.bridges.contains(&link.lower) || ends.contains(&Some(link.lower))
        };
        let mut links = machine.links(pair.gpu);
        // Data Direct is on the same chip as the switch above it.
        let nic = pair.nic.filter(|_| !pair.is_data_direct());
        links.extend(
            nic.map(|at| machine.links(at))
                .unwrap_or_default()
                .into_iter()
                .rev(),
        );
        Self {
            class: pair.class,
            megabits_per_second: (pair.megabits != 0).then_some(pair.megabits),
            meet: pair.meet,
            bridges: &pair.bridges,
            links: links
                .iter()
                .filter(|link| crossed(link))
                .map(LinkJson::of)
                .collect(),
        }
    }
}

impl<'a> HcaPairJson<'a> {
    fn all(machine: &'a Machine) -> Vec<Self> {
        let mut pairs = Vec::new();
        let mut hcas = machine.hcas.iter();
        while let Some(one) = hcas.next() {
            pairs.extend(hcas.clone().map(|other| Self {
                hcas: [&one.name, &other.name],
                class: machine.class_of_hcas(one, other),
            }));
        }
        pairs
    }
}

impl GpuPairJson {
    fn all(machine: &Machine, nvml: Option<&Nvml>) -> Vec<Self> {
        let mut pairs = Vec::new();
        let mut gpus = machine.gpus.iter();
        while let Some(one) = gpus.next() {
            pairs.extend(gpus.clone().map(|other| {
                let links = nvml.and_then(|nvml| nvml.nvlinks(one.at, other.at));
                Self {
                    gpus: [one.index, other.index],
                    class: machine.class_of(one.at, other.at),
                    nvlinks: links.map(|links| links.count),
                    nvswitch: links.map(|links| links.is_by_switch),
                }
            }));
        }
        pairs
    }
}

impl BridgeJson {
    fn of(machine: &Machine, at: Address) -> Option<Self> {
        let function = machine.functions.get(&at)?;
        let express = function.express();
        let payload = express.as_ref().ok().copied();
        Some(Self {
            address: at,
            vendor: format!("{:04x}", function.vendor),
            device: format!("{:04x}", function.device),
            numa_node: function.numa,
            kind: function.kind_of_bridge().replace(' ', "_"),
            payload_bytes: payload.map(|express| express.payload),
            payload_most_bytes: payload.map(|express| express.payload_most),
            unseen: express.err().map(|why| why.to_string()),
        })
    }
}
