// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The JSON of `peermemctl.topo`. docs/peermemctl.md documents each key.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::host::nvml::Nvml;
use crate::machine::pci::{Address, Link, Rate};
use crate::machine::{Gpu, Hca, Machine, Pair, Segment};
use crate::report::object;

/// Returns the JSON body.
pub(super) fn topology<'a>(
    machine: &'a Machine,
    nvml: Option<&'a Nvml>,
) -> impl Serialize + use<'a> {
    let paths = machine.pairs.iter();
    let paths = paths.flat_map(|pair| [pair, pair.by_own_function()]);
    let bridges: BTreeSet<Address> = paths
        .flat_map(|path| path.bridges.iter().copied().chain(path.meet))
        .collect();
    let gpus = machine.gpus.iter().map(|it| gpu(machine, nvml, it));
    let hcas = machine.hcas.iter().map(|it| hca(machine, it));
    let pairs = machine.pairs.iter().map(|it| pair(machine, it));
    let unassigned = machine.unassigned_data_direct();
    let bridges = bridges.into_iter().filter_map(|at| bridge(machine, at));
    object! {
        virtual_machine: machine.is_virtual,
        numa_nodes: machine.nodes,
        gpus: gpus.collect::<Vec<_>>(),
        hcas: hcas.collect::<Vec<_>>(),
        pairs: pairs.collect::<Vec<_>>(),
        // Data Direct functions whose RDMA device is unknown.
        data_direct_unassigned: unassigned.map(|function| function.at).collect::<Vec<_>>(),
        hca_pairs: each_two(&machine.hcas, |one, other| object! {
            hcas: [&one.name, &other.name],
            class: machine.class_of_hcas(one, other),
        }),
        gpu_pairs: each_two(&machine.gpus, |one, other| {
            let links = nvml.and_then(|nvml| nvml.nvlinks(one.at, other.at));
            object! {
                gpus: [one.index, other.index],
                class: machine.class_of(one.at, other.at),
                // `None`: unknown.
                nvlinks: links.map(|links| links.count),
                nvswitch: links.map(|links| links.is_by_switch),
            }
        }),
        bridges: bridges.collect::<Vec<_>>(),
    }
}

/// Calls a function with each pair of elements.
fn each_two<'a, T, R>(all: &'a [T], each: impl Fn(&'a T, &'a T) -> R) -> Vec<R> {
    let others = |(index, one)| all.iter().skip(index + 1).map(move |other| (one, other));
    let pairs = all.iter().enumerate().flat_map(others);
    pairs.map(|(one, other)| each(one, other)).collect()
}

fn rate(rate: Rate) -> impl Serialize {
    object! {
        // Speed in GT/s.
        speed: (rate.speed != 0).then(|| f64::from(rate.speed) / 10.0),
        lanes: (rate.width != 0).then_some(rate.width),
    }
}

/// Returns the link between `upper` and `lower`. `upper` is `None` if no port is above the device,
/// as in a virtual machine.
fn link(upper: Option<Address>, lower: Address, link: Link) -> impl Serialize {
    object! { upper: upper, lower: lower, now: rate(link.now), most: rate(link.most) }
}

fn first_link(machine: &Machine, at: Option<Address>) -> Option<impl Serialize + use<>> {
    let lower = at?;
    if let Some(first) = machine.links(lower).first() {
        return Some(link(Some(first.upper), first.lower, first.link));
    }
    let own = machine.physical(lower)?.link.as_ref().ok()?;
    Some(link(None, lower, *own))
}

fn gpu<'a>(machine: &'a Machine, nvml: Option<&'a Nvml>, gpu: &'a Gpu) -> impl Serialize + use<'a> {
    let function = machine.functions.get(&gpu.at);
    object! {
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

fn hca<'a>(machine: &'a Machine, hca: &'a Hca) -> impl Serialize + use<'a> {
    let function = hca.at.and_then(|at| machine.functions.get(&at));
    let ports = hca.ports.iter().map(|port| {
        object! {
            number: port.number,
            link_layer: port.layer.as_deref(),
            state: port.state.as_deref(),
            rate: port.rate.as_deref(),
            netdevs: &port.netdevs,
        }
    });
    object! {
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
        ports: ports.collect::<Vec<_>>(),
        link: first_link(machine, hca.at),
    }
}

fn pair<'a>(machine: &'a Machine, pair: &'a Pair) -> impl Serialize + use<'a> {
    object! {
        gpu: machine.gpu(pair.gpu).map_or(0, |gpu| gpu.index),
        gpu_address: pair.gpu,
        hca: &pair.hca,
        best: pair.is_best,
        #[serde(flatten)]
        path: path(machine, pair),
        // Path through the RDMA device's own function, if `path` uses its Data Direct function.
        without_data_direct: pair.own.as_deref().map(|own| path(machine, own)),
    }
}

fn path<'a>(machine: &'a Machine, pair: &'a Pair) -> impl Serialize + use<'a> {
    let crossed = |link: &&Segment| {
        let ends = [Some(pair.gpu), pair.nic];
        pair.bridges.contains(&link.lower) || ends.contains(&Some(link.lower))
    };
    let mut links = machine.links(pair.gpu);
    // Data Direct is on the same chip as the switch above it.
    let nic = pair.nic.filter(|_| !pair.is_data_direct());
    let down = nic.map(|at| machine.links(at)).unwrap_or_default();
    links.extend(down.into_iter().rev());
    let links = links.iter().filter(crossed);
    object! {
        class: pair.class,
        // Best bandwidth of the slower end's link.
        megabits_per_second: (pair.megabits != 0).then_some(pair.megabits),
        meet: pair.meet,
        bridges: &pair.bridges,
        links: links
            .map(|it| link(Some(it.upper), it.lower, it.link))
            .collect::<Vec<_>>(),
    }
}

fn bridge(machine: &Machine, at: Address) -> Option<impl Serialize + use<>> {
    let function = machine.functions.get(&at)?;
    let express = function.express();
    let payload = express.as_ref().ok().copied();
    Some(object! {
        address: at,
        vendor: format!("{:04x}", function.vendor),
        device: format!("{:04x}", function.device),
        numa_node: function.numa,
        // `root_port`, `upstream_port`, `downstream_port` or `bridge`.
        kind: function.kind_of_bridge().replace(' ', "_"),
        payload_bytes: payload.map(|express| express.payload),
        payload_most_bytes: payload.map(|express| express.payload_most),
        // Reason why the payload is missing.
        unseen: express.err().map(|why| why.to_string()),
    })
}
