// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The parts of a machine that affect GPUDirect RDMA: GPUs, RDMA devices, and the paths between
//! them.

pub(crate) mod config;
pub(crate) mod counters;
pub(crate) mod data_direct;
pub(crate) mod hca;
pub(crate) mod pci;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use crate::host::{field, Host, Seen, Unseen};
use pci::{Address, Function, Link, Rate};

pub(crate) use hca::{gid_indices, netdevs_of, Hca, Port};

/// Class of the path between two functions, nearest first. The names are those of `nvidia-smi topo
/// -m`. NVML calls the classes `NVML_TOPOLOGY_SINGLE`, `_MULTIPLE`, `_HOSTBRIDGE`, `_NODE` and
/// `_SYSTEM` (`nvml.h`).
///
/// The class is derived from sysfs. Functions that meet below a root port are PIX if only one
/// switch or one bus lies between them, and PXB otherwise. Functions that meet in the same host
/// bridge (`pci0000:00` in the path) are PHB. All other functions are NODE within a NUMA node, and
/// SYS between NUMA nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Class {
    /// Behind one switch, or on one bus.
    Pix,
    /// Behind several switches, but not through a host bridge.
    Pxb,
    /// Through one host bridge: the processor.
    Phb,
    /// Through several host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes.
    Sys,
}

impl Class {
    /// All classes, nearest first.
    pub(crate) const ALL: [Self; 5] = [Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys];

    /// Returns the name in `nvidia-smi topo -m`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }

    /// Returns the meaning in words.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Self::Pix => "behind one PCIe switch, or on one bus",
            Self::Pxb => "behind several PCIe switches, not through the processor",
            Self::Phb => "through one PCIe host bridge of the processor",
            Self::Node => "through several host bridges of one NUMA node",
            Self::Sys => "from one NUMA node to another",
        }
    }
}

/// An NVIDIA GPU, or the stand-in GPU of the test VM.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    /// Index by PCI address, from 0. nvidia-smi uses the same index if it sees all GPUs.
    pub(crate) index: usize,
    /// Minor number of the device file: 3 for `/dev/nvidia3`.
    pub(crate) minor: Option<u32>,
    pub(crate) at: Address,
    /// Product name from nvidia.ko or the list of PCI IDs, or else the numeric IDs.
    pub(crate) name: String,
    /// BAR that RDMA uses. `None`: the GPU has no such BAR, or the BAR has no address.
    pub(crate) bar1: Option<pci::Bar>,
    pub(crate) is_stand_in: bool,
    /// `true` if the GPU's memory is part of the processor's memory (Grace), and thus not only
    /// behind a BAR.
    pub(crate) is_coherent: bool,
}

impl Gpu {
    /// Returns the reason why this kind of GPU does not support GPUDirect RDMA, or `None` for a GPU
    /// that supports GPUDirect RDMA.
    pub(crate) fn why_no_gpudirect(&self) -> Option<&'static str> {
        let name = &self.name;
        if name.contains("GeForce") {
            return Some(
                "NVIDIA only has it in GPUs for data centers and workstations. nvidia_peermem loads, but nvidia.ko \
                refuses each registration.",
            );
        }
        name.split_whitespace().any(|word| word == "GB10").then_some(
            "Devices cannot reach memory that CUDA allocates coherently there, and neither nvidia_peermem nor \
            dma-buf works (NVIDIA on its DGX Spark). Memory of cudaHostAlloc can be registered.",
        )
    }
}

/// The path between a GPU and an RDMA device.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) gpu: Address,
    /// Name of the RDMA device.
    pub(crate) hca: String,
    /// PCI function at the NIC's end: the RDMA device's own function, or its Data Direct function.
    /// `None`: the device is not on PCI.
    pub(crate) nic: Option<Address>,
    /// `None`: the RDMA device is not on PCI.
    pub(crate) class: Option<Class>,
    /// Bridges on the path, from the GPU's side to the NIC's: switch ports and root ports. Host
    /// bridges and `meet` are not included.
    pub(crate) bridges: Vec<Address>,
    /// Lowest bridge above both ends, usually a switch's upstream port. A transfer goes up to this
    /// bridge at most, and then down to the other end. `None`: the transfer goes up to a host
    /// bridge.
    pub(crate) meet: Option<Address>,
    /// Maximum bandwidth of the slower end's link, in Mb/s. 0: unknown.
    pub(crate) megabits: u64,
    /// `true` if no other pair of this GPU has a nearer class, or the same class and faster links.
    /// Several pairs may be equally good.
    pub(crate) is_best: bool,
    /// Second path of the pair, through the RDMA device's own function. `None` unless the main path
    /// uses the NIC's Data Direct function. Memory registered through nvidia_peermem uses the
    /// device's own function. A dma-buf whose registration does not ask for Data Direct also uses
    /// the device's own function.
    pub(crate) own: Option<Box<Self>>,
}

/// A PCI Express link between two functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Root port or downstream port at the upper end.
    pub(crate) upper: Address,
    pub(crate) lower: Address,
    /// Current rate, and the best speed and width that both ends support.
    pub(crate) link: Link,
}

/// A device that sysfs lists but that could not be read.
#[derive(Debug, Clone)]
pub(crate) struct Unread {
    pub(crate) device: Listed,
    pub(crate) why: Unseen,
}

/// The place where sysfs lists a device.
#[derive(Debug, Clone)]
pub(crate) enum Listed {
    /// Entry of `/sys/bus/pci/devices`.
    Pci(Address),
    /// Entry of `/sys/class/infiniband`.
    Hca(String),
}

/// A machine, as far as it could be read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    /// GPUs, NICs, RDMA devices, Data Direct functions, and the bridges above them.
    pub(crate) functions: BTreeMap<Address, Function>,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) hcas: Vec<Hca>,
    /// Pairs of each GPU and each RDMA device, sorted by GPU, then by RDMA device.
    pub(crate) pairs: Vec<Pair>,
    /// Number of NUMA nodes.
    pub(crate) nodes: Option<usize>,
    /// `true` for a virtual machine, whose PCI tree may differ from the hardware's. `None`:
    /// unknown.
    pub(crate) is_virtual: Option<bool>,
    /// Reason why the RDMA device of a Data Direct function could not be found.
    pub(crate) data_direct_unseen: Option<Unseen>,
    /// Devices that sysfs lists but that could not be read.
    pub(crate) unread: Vec<Unread>,
}

pub(crate) const NVIDIA: u16 = 0x10de;

/// Vendor and device ID of QEMU's `ivshmem`, which is the test VM's stand-in GPU
/// (`tests/gpu/pci.c`).
const STAND_IN: (u16, u16) = (0x1af4, 0x1110);

/// Device IDs of GPUs whose memory is part of the processor's memory (GH200, GB200, GB300), as in
/// Linux's `drivers/vfio/pci/nvgrace-gpu/main.c`.
const COHERENT: [u16; 5] = [0x2342, 0x2345, 0x2348, 0x2941, 0x31c2];

impl Machine {
    /// Reads the whole machine. Fails if PCI cannot be read.
    pub(crate) fn scan(host: &dyn Host) -> Seen<Self> {
        let mut machine = Self {
            nodes: nodes(host),
            is_virtual: is_virtual(host),
            ..Self::default()
        };
        for name in host.names(pci::DEVICES)? {
            if let Ok(at) = name.parse::<Address>() {
                if let Err(why) = machine.look_if_wanted(host, at) {
                    let device = Listed::Pci(at);
                    machine.unread.push(Unread { device, why });
                }
            }
        }
        machine.look_at_gpus(host);
        machine.hcas = hca::scan(host, &mut machine.unread);
        let mut more: BTreeSet<Address> = BTreeSet::new();
        for hca in &machine.hcas {
            more.extend(hca.functions());
        }
        for function in machine.functions.values() {
            more.extend(function.physical);
        }
        for at in more {
            // An error is ignored, because a check that needs the function reports the function as
            // not visible.
            let _ = machine.look_at(host, at);
        }
        let assigned = data_direct::assign(host, &machine.functions, &mut machine.hcas);
        machine.data_direct_unseen = assigned.err();
        let above: BTreeSet<Address> = machine
            .functions
            .values()
            .flat_map(|function| function.above.iter().copied())
            .collect();
        for at in above {
            let _ = machine.look_at(host, at);
        }
        if machine.nodes.is_none_or(|nodes| nodes > 1) {
            // The kernel lists all processors as near to a function whose node is unknown. Such a
            // list is removed.
            for function in machine.functions.values_mut() {
                function.cpus = function.cpus.take().filter(|_| function.numa.is_some());
            }
        }
        machine.pairs = machine.all_pairs();
        Ok(machine)
    }

    fn look_at(&mut self, host: &dyn Host, at: Address) -> Seen<()> {
        if let Entry::Vacant(place) = self.functions.entry(at) {
            place.insert(Function::scan(host, at)?);
        }
        Ok(())
    }

    /// Reads the function at `at` if it may be one end of a path. Skips all other functions,
    /// because reading the config space of every function takes long on large machines. Fails if
    /// the class, or a function that may be an end, cannot be read.
    fn look_if_wanted(&mut self, host: &dyn Host, at: Address) -> Seen<()> {
        let number = |file: &str| host.number(&format!("{}/{at}/{file}", pci::DEVICES));
        let is = |file: &str, wanted: u16| number(file) == Ok(u64::from(wanted));
        let wanted = match number("class")? >> 16 {
            // NICs are network controllers, and GPUs are display controllers.
            0x02 | 0x03 => true,
            // The stand-in GPU is a memory controller.
            0x05 => is("vendor", STAND_IN.0),
            // A Data Direct function may have any class.
            _ => {
                let (vendor, device) = pci::DATA_DIRECT;
                is("vendor", vendor) && is("device", device)
            }
        };
        match wanted {
            true => self.look_at(host, at),
            false => Ok(()),
        }
    }

    fn look_at_gpus(&mut self, host: &dyn Host) {
        let gpus = self.functions.values().filter(|function| {
            // GPUs are VGA controllers or 3D controllers.
            let is_gpu =
                function.vendor == NVIDIA && matches!(function.class >> 8, 0x0300 | 0x0302);
            is_gpu || is_stand_in(function)
        });
        self.gpus = gpus
            .enumerate()
            .map(|(index, function)| (index, function, Information::of(host, function.at)))
            .map(|(index, function, information)| Gpu {
                index,
                minor: information.minor,
                at: function.at,
                name: name_of_gpu(function, information.model),
                bar1: bar1(function).filter(|bar| bar.is_assigned),
                is_stand_in: is_stand_in(function),
                is_coherent: function.vendor == NVIDIA && COHERENT.contains(&function.device),
            })
            .collect();
    }

    /// Returns `true` if the NUMA nodes of both ends of the path are known, or if the machine has
    /// only one node.
    pub(crate) fn knows_nodes(&self, pair: &Pair) -> bool {
        let node = |at: Address| self.functions.get(&at)?.numa;
        self.has_one_node() || node(pair.gpu).is_some() && pair.nic.and_then(node).is_some()
    }

    fn has_one_node(&self) -> bool {
        matches!(self.nodes, Some(0 | 1))
    }

    pub(crate) fn gpu(&self, at: Address) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.at == at)
    }

    /// Returns the RDMA device of this name.
    pub(crate) fn hca(&self, name: &str) -> Option<&Hca> {
        self.hcas.iter().find(|hca| hca.name == name)
    }

    /// Returns this machine's counterpart of an RDMA device from another machine, or from an
    /// earlier recording. Names may change at a boot, but addresses do not.
    pub(crate) fn same_hca(&self, hca: &Hca) -> Option<&Hca> {
        let mut hcas = self.hcas.iter();
        let is_it = |other: &&Hca| (other.at, &other.name) == (hca.at, &hca.name);
        hcas.clone().find(is_it).or_else(|| match hca.at {
            Some(at) => hcas.find(|other| other.at == Some(at)),
            None => self.hca(&hca.name),
        })
    }

    /// Returns the pair of a GPU and an RDMA device.
    pub(crate) fn pair_of(&self, gpu: Address, hca: &str) -> Option<&Pair> {
        self.pairs
            .iter()
            .find(|pair| pair.gpu == gpu && pair.hca == hca)
    }

    /// Returns the pairs of a GPU, which are adjacent in `pairs`.
    pub(crate) fn pairs_of(&self, gpu: Address) -> &[Pair] {
        let first = self.pairs.partition_point(|pair| pair.gpu < gpu);
        let rest = self.pairs.get(first..).unwrap_or_default();
        let count = rest.partition_point(|pair| pair.gpu == gpu);
        rest.get(..count).unwrap_or_default()
    }

    /// Returns the GPUs and RDMA devices that are virtual functions, by name, each with its
    /// physical function.
    pub(crate) fn virtual_functions(&self) -> Vec<(String, Address)> {
        let physical = |at: Address| self.functions.get(&at)?.physical;
        let gpus = self
            .gpus
            .iter()
            .map(|gpu| (format!("GPU {}", gpu.index), Some(gpu.at)));
        let hcas = self.hcas.iter().map(|hca| (hca.name.clone(), hca.at));
        gpus.chain(hcas)
            .filter_map(|(name, at)| Some((name, physical(at?)?)))
            .collect()
    }

    /// Returns the NICs that have several RDMA devices or several ports, as PCI addresses without
    /// the function number. Virtual functions are not counted.
    pub(crate) fn nics_of_several(&self) -> Vec<String> {
        let mut nics: BTreeMap<String, usize> = BTreeMap::new();
        for hca in &self.hcas {
            let own = hca.at.and_then(|at| self.functions.get(&at));
            if let Some(function) = own.filter(|function| function.physical.is_none()) {
                let text = function.at.to_string();
                let nic = text.rsplit_once('.').map_or(text.as_str(), |(nic, _)| nic);
                let ports = nics.entry(nic.to_owned()).or_default();
                *ports = ports.saturating_add(hca.ports.len().max(1));
            }
        }
        nics.retain(|_, ports| *ports > 1);
        nics.into_keys().collect()
    }

    /// Returns the function at an address. For a virtual function, returns the physical function.
    pub(crate) fn physical(&self, at: Address) -> Option<&Function> {
        let function = self.functions.get(&at)?;
        match function.physical {
            Some(physical) => self.functions.get(&physical),
            None => Some(function),
        }
    }

    /// Returns the best bandwidth of a function's link, in Mb/s, or 0 if unknown. A virtual
    /// function has the link of its physical function.
    fn megabits(&self, at: Address) -> u64 {
        let link = self
            .physical(at)
            .and_then(|function| function.link.as_ref().ok());
        link.map_or(0, |link| link.most.megabits())
    }

    /// Returns the links from a function up to its root port, starting with the function's own
    /// link.
    pub(crate) fn links(&self, at: Address) -> Vec<Segment> {
        let Some(function) = self.physical(at) else {
            return Vec::new();
        };
        let mut way = function.above.clone();
        way.push(function.at);
        // Links join a root port or downstream port with the function below it. Ports inside a
        // switch have no link.
        let mut segments: Vec<Segment> = way
            .chunks_exact(2)
            .filter_map(|ends| match ends {
                [upper, lower] => self.segment(*upper, *lower),
                _ => None,
            })
            .collect();
        segments.reverse();
        segments
    }

    /// Returns the link between a device and the port above it. Returns the link that the device
    /// itself reports if no port is above the device, as in a virtual machine.
    pub(crate) fn link(&self, at: Address) -> Option<Link> {
        match self.links(at).first() {
            Some(segment) => Some(segment.link),
            None => self.physical(at)?.link.clone().ok(),
        }
    }

    fn segment(&self, upper: Address, lower: Address) -> Option<Segment> {
        let link = |at: Address| self.functions.get(&at)?.link.clone().ok();
        let (above, below) = (link(upper), link(lower));
        let least = |one: u32, other: u32| match (one, other) {
            (0, known) | (known, 0) => known,
            (one, other) => one.min(other),
        };
        let now = below.or(above)?.now;
        let most = match (above, below) {
            (Some(above), Some(below)) => Rate {
                speed: least(above.most.speed, below.most.speed),
                width: least(above.most.width, below.most.width),
            },
            (one, other) => one.or(other)?.most,
        };
        let link = Link { now, most };
        Some(Segment { upper, lower, link })
    }

    pub(crate) fn all_pairs(&self) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for gpu in &self.gpus {
            let first = pairs.len();
            for hca in &self.hcas {
                pairs.push(self.pair(gpu, hca));
            }
            let own = pairs.get_mut(first..).unwrap_or_default();
            let good = |pair: &Pair| pair.class.map(|class| (class, u64::MAX - pair.megabits));
            let best = own.iter().filter_map(good).min();
            for pair in own {
                pair.is_best = best.is_some() && good(pair) == best;
            }
        }
        pairs
    }

    /// Returns the class of the path between two functions.
    pub(crate) fn class(&self, one: &Function, other: &Function) -> Class {
        let alike = one.shared(other);
        let below = |function: &Function| function.above.len().saturating_sub(alike);
        match alike {
            0 if one.root == other.root => Class::Phb,
            0 => match (one.numa, other.numa) {
                (Some(a), Some(b)) if a == b => Class::Node,
                // On a machine with one node, the firmware may report no node.
                _ if self.has_one_node() => Class::Node,
                _ => Class::Sys,
            },
            _ if below(one) <= 1 && below(other) <= 1 => Class::Pix,
            _ => Class::Pxb,
        }
    }

    /// Returns the class of the path between two RDMA devices, or `None` if one of them is not on
    /// PCI.
    pub(crate) fn class_of_hcas(&self, one: &Hca, other: &Hca) -> Option<Class> {
        self.class_of(one.at?, other.at?)
    }

    /// Returns the class of the path between two functions, or `None` if one of them was not read.
    pub(crate) fn class_of(&self, one: Address, other: Address) -> Option<Class> {
        let function = |at: Address| self.functions.get(&at);
        Some(self.class(function(one)?, function(other)?))
    }

    fn pair(&self, gpu: &Gpu, hca: &Hca) -> Pair {
        let own = self.pair_by(gpu, hca, hca.at);
        // Data Direct needs a common switch. Without a common switch, nvidia.ko provides no PCI
        // address of the memory (nv-dmabuf.c).
        let direct = hca.data_direct.map(|at| Pair {
            own: Some(Box::new(own.clone())),
            ..self.pair_by(gpu, hca, Some(at))
        });
        direct.filter(|pair| pair.meet.is_some()).unwrap_or(own)
    }

    /// Returns the pair for the path that ends at `nic`, one of the RDMA device's functions.
    fn pair_by(&self, gpu: &Gpu, hca: &Hca, nic: Option<Address>) -> Pair {
        let mut pair = Pair {
            gpu: gpu.at,
            hca: hca.name.clone(),
            nic,
            class: None,
            bridges: Vec::new(),
            meet: None,
            megabits: 0,
            is_best: false,
            own: None,
        };
        let ends = nic.and_then(|at| {
            let nic = self.functions.get(&at)?;
            Some((self.functions.get(&gpu.at)?, nic))
        });
        let Some((one, other)) = ends else {
            return pair;
        };
        let alike = one.shared(other);
        let below = |function: &Function| function.above.get(alike..).unwrap_or_default().to_vec();
        let (up, down) = (below(one), below(other));
        pair.meet = alike
            .checked_sub(1)
            .and_then(|last| one.above.get(last).copied());
        pair.class = Some(self.class(one, other));
        pair.bridges = up.into_iter().rev().chain(down).collect();
        pair.megabits = match other.is_data_direct() {
            // The Data Direct function is on the same chip as the switch, so there is no link
            // between them.
            true => self.megabits(gpu.at),
            false => self.megabits(gpu.at).min(self.megabits(other.at)),
        };
        pair
    }
}

/// Returns the BAR that NVIDIA calls BAR1, assigned or not. BAR 0 contains the registers. A 64-bit
/// BAR 0 takes two numbers, which makes BAR1 number 2 instead of 1. Later BARs are not GPU memory.
fn bar1(function: &Function) -> Option<pci::Bar> {
    let bars = function.bars.iter().flatten();
    let mut large = bars.filter(|bar| bar.is_64_bit && bar.is_prefetchable);
    large.find(|bar| is_bar1(bar)).copied()
}

/// Returns `true` if BAR1 may have this number.
pub(crate) fn is_bar1(bar: &pci::Bar) -> bool {
    matches!(bar.index, 1 | 2)
}

fn is_stand_in(function: &Function) -> bool {
    // An ivshmem device that serves another purpose has another driver, or none.
    (function.vendor, function.device) == STAND_IN && function.driver.as_deref() == Some("nvidia")
}

/// nvidia.ko's information about a GPU.
#[derive(Default)]
struct Information {
    model: Option<String>,
    minor: Option<u32>,
}

impl Information {
    fn of(host: &dyn Host, at: Address) -> Self {
        let Ok(text) = host.text(&format!("/proc/driver/nvidia/gpus/{at}/information")) else {
            return Self::default();
        };
        let value = |key| field(&text, key).filter(|value| !value.is_empty());
        let model = value("Model:").filter(|model| *model != "Unknown");
        Self {
            model: model.map(str::to_owned),
            minor: value("Device Minor:").and_then(|minor| minor.parse().ok()),
        }
    }
}

/// Returns the name from nvidia.ko, else from the list of PCI IDs, else the numeric IDs.
fn name_of_gpu(function: &Function, model: Option<String>) -> String {
    let (vendor, device) = (function.vendor, function.device);
    if is_stand_in(function) {
        return "stand-in of the test VM".to_owned();
    }
    let listed =
        || pci_ids::Device::from_vid_pid(vendor, device).map(|known| known.name().to_owned());
    model
        .or_else(listed)
        .unwrap_or_else(|| format!("{vendor:04x}:{device:04x}"))
}

/// Returns the number of NUMA nodes.
fn nodes(host: &dyn Host) -> Option<usize> {
    let is_node = |name: &&String| {
        let number = name.strip_prefix("node");
        number.is_some_and(|digits| digits.parse::<u32>().is_ok())
    };
    match host.names("/sys/devices/system/node") {
        Ok(names) => Some(names.iter().filter(is_node).count()),
        // A kernel without NUMA does not have this directory.
        Err(Unseen::Absent) => Some(1),
        Err(_) => None,
    }
}

/// Returns `true` if a hypervisor announces itself: by a processor flag on x86, by the firmware's
/// name elsewhere.
fn is_virtual(host: &dyn Host) -> Option<bool> {
    const HYPERVISORS: [&str; 9] = [
        "QEMU",
        "Xen",
        "VMware",
        "innotek",
        "Amazon EC2",
        "Google",
        "Microsoft Corporation",
        "KubeVirt",
        "OpenStack",
    ];
    let processor = host.matching("/proc/cpuinfo", "flags");
    if let Ok(lines) = &processor {
        if let Some(flags) = lines.lines().next() {
            return Some(flags.split_whitespace().any(|flag| flag == "hypervisor"));
        }
    }
    let vendor = host.text("/sys/class/dmi/id/sys_vendor").ok()?;
    Some(HYPERVISORS.iter().any(|name| vendor.starts_with(name)))
}
