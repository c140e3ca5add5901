// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What of a machine matters to GPUDirect RDMA: its GPUs, its RDMA devices, and the paths between them.

pub(crate) mod pci;

use std::collections::BTreeMap;

use crate::host::Host;
use crate::host::Seen;
use pci::Address;
use pci::Function;

/// How two functions are joined, nearest first, by the names of `nvidia-smi topo -m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Class {
    /// At most one bridge between: one switch.
    Pix,
    /// Several bridges, and not the host's.
    Pxb,
    /// Through a host bridge: the processor.
    Phb,
    /// Through several host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes.
    Sys,
}

/// A GPU of NVIDIA's, or the rig's stand-in.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    /// By PCI address, from 0, as nvidia-smi counts.
    pub(crate) index: usize,
    pub(crate) at: Address,
    /// The product, as far as the PCI ids or the driver name it.
    pub(crate) name: String,
    /// Through which RDMA goes: the largest prefetchable 64-bit BAR.
    pub(crate) bar1: Option<pci::Bar>,
    pub(crate) is_stand_in: bool,
    /// Part of another processor (Grace), so that its memory is not behind a BAR alone.
    pub(crate) is_coherent: bool,
}

/// A port of an RDMA device.
#[derive(Debug, Clone)]
pub(crate) struct Port {
    pub(crate) number: u32,
    /// `InfiniBand` or `Ethernet`.
    pub(crate) layer: Option<String>,
    /// `ACTIVE`, `DOWN`, …
    pub(crate) state: Option<String>,
    /// As sysfs says it: `400 Gb/sec (4X NDR)`.
    pub(crate) rate: Option<String>,
    /// Its network interfaces.
    pub(crate) netdevs: Vec<String>,
}

/// An RDMA device: an entry of `/sys/class/infiniband`.
#[derive(Debug, Clone)]
pub(crate) struct Hca {
    /// `mlx5_0`, `rxe0`.
    pub(crate) name: String,
    /// The PCI function that does its DMA: its own, or its network card's.
    pub(crate) at: Option<Address>,
    /// Not a card's own: rxe, siw, which do by software what a card does.
    pub(crate) is_software: bool,
    pub(crate) driver: Option<String>,
    pub(crate) firmware: Option<String>,
    /// Of a bond: all functions that its traffic may go through, `at` among them.
    pub(crate) members: Vec<Address>,
    pub(crate) ports: Vec<Port>,
}

/// The path between a GPU and an RDMA device.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) gpu: Address,
    /// The RDMA device's name.
    pub(crate) hca: String,
    /// None: the RDMA device is not on PCI.
    pub(crate) class: Option<Class>,
    /// The bridges that a transfer goes through, from the GPU's side to the card's; host bridges are not among them.
    pub(crate) bridges: Vec<Address>,
    /// The nearest of this GPU's (of several as near, each).
    pub(crate) is_best: bool,
}

/// What was seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    pub(crate) functions: BTreeMap<Address, Function>,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) hcas: Vec<Hca>,
    /// Each GPU with each RDMA device, in that order.
    pub(crate) pairs: Vec<Pair>,
}

impl Machine {
    /// Looks at all of it. Fails where PCI itself cannot be seen.
    pub(crate) fn look(host: &dyn Host) -> Seen<Self> {
        host.names("/sys/bus/pci/devices")?;
        Ok(Self::default())
    }
}
