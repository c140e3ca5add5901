// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI topology of a VM's GPUs and NICs: the bridges between them, and their sockets.
//!
//! QEMU's root ports have ACS. QEMU's switches (`x3130-upstream`, `xio3130-downstream`) have
//! neither ACS nor `disable-acs`, so ACS on a switch port cannot be tested in a VM. A GPU is
//! `ivshmem-plain`, which is not a PCI Express device, so a GPU has no link.

use clap::ValueEnum;

/// A kind of PCI tree. The names in brackets are the names of `nvidia-smi topo` for the path
/// between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Topology {
    /// All devices on the host bridge itself, without any port
    Flat,
    /// Each device behind a separate root port (PHB)
    RootPorts,
    /// All GPUs and NIC 0 under one switch (PIX), NIC 1 under a second switch below the first (PXB)
    Switch,
    /// Two switches: even GPUs and NIC 0 under one, odd GPUs and NIC 1 under the other (PIX, PHB)
    Switches,
    /// Two sockets: even GPUs and NIC 0 on the first, NIC 1 on the first behind another host
    /// bridge, odd GPUs on the second (PHB, NODE, SYS)
    Sockets,
}

pub(crate) const NICS: usize = 2;

const HOST_BRIDGE: &str = "pcie.0";

/// Bus numbers of the additional host bridges of [`Topology::Sockets`]. The numbers leave enough
/// room for the buses below each bridge.
const BRIDGE_BUSES: [u8; 3] = [0x40, 0x80, 0xc0];

/// QEMU arguments of a topology.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Arguments for bridges, ports and sockets. These arguments come before the devices behind
    /// them.
    pub(crate) arguments: Vec<String>,
    pub(crate) gpus: Vec<String>,
    pub(crate) nics: [String; NICS],
    ports: usize,
}

impl Topology {
    /// Returns the value of `-smp`. Processors of two sockets share no cache.
    pub(crate) fn processors(self, smp: u32) -> String {
        match self {
            Self::Sockets if smp % 2 == 0 => format!("{smp},sockets=2"),
            Self::Sockets => format!("{smp},sockets={smp}"),
            _ => smp.to_string(),
        }
    }

    /// Returns the tree for `gpus` GPUs, in a VM with `smp` processors and `mem` MiB.
    pub(crate) fn layout(self, gpus: u32, smp: u32, mem: u32) -> Layout {
        let mut layout = Layout::default();
        let gpus = 0..gpus as usize;
        match self {
            Self::Flat => {
                layout.nics = [(); NICS].map(|()| HOST_BRIDGE.to_owned());
                layout.gpus = gpus.map(|_| HOST_BRIDGE.to_owned()).collect();
            }
            Self::RootPorts => {
                layout.nics = [(); NICS].map(|()| layout.root_port(HOST_BRIDGE));
                layout.gpus = gpus.map(|_| layout.root_port(HOST_BRIDGE)).collect();
            }
            Self::Switch => {
                let port = layout.root_port(HOST_BRIDGE);
                let switch = layout.switch(&port);
                let near = layout.downstream(&switch);
                let below = layout.downstream(&switch);
                let below = layout.switch(&below);
                layout.nics = [near, layout.downstream(&below)];
                layout.gpus = gpus.map(|_| layout.downstream(&switch)).collect();
            }
            Self::Switches => {
                let switches = [(); 2].map(|()| {
                    let port = layout.root_port(HOST_BRIDGE);
                    layout.switch(&port)
                });
                layout.nics = [0, 1].map(|nic: usize| layout.downstream(&switches[nic]));
                layout.gpus = gpus
                    .map(|gpu| layout.downstream(&switches[gpu % 2]))
                    .collect();
            }
            Self::Sockets => {
                layout.sockets(smp, mem);
                // QEMU lists the last bridge first, and the kernel numbers NICs and GPUs in that
                // order.
                let mut bridges = [(2, 1), (1, 0), (0, 0)]
                    .map(|(number, socket)| layout.host_bridge(number, socket));
                bridges.reverse();
                layout.nics = [0, 1].map(|nic: usize| layout.root_port(&bridges[nic]));
                layout.gpus = gpus
                    .map(|gpu| layout.root_port(&bridges[2 * (gpu % 2)]))
                    .collect();
            }
        }
        layout
    }
}

impl Layout {
    fn device(&mut self, text: String) {
        self.arguments.extend(["-device".to_owned(), text]);
    }

    fn port(&mut self, kind: &str, bus: &str) -> String {
        let number = self.ports;
        self.ports += 1;
        let name = format!("port{number}");
        // Nothing is hot-plugged, so the firmware need not reserve room for new devices. The
        // chassis number distinguishes slots.
        let chassis = number + 1;
        self.device(format!(
            "{kind},id={name},bus={bus},chassis={chassis},hotplug=off"
        ));
        name
    }

    fn root_port(&mut self, bridge: &str) -> String {
        self.port("pcie-root-port", bridge)
    }

    fn downstream(&mut self, switch: &str) -> String {
        self.port("xio3130-downstream", switch)
    }

    fn switch(&mut self, port: &str) -> String {
        let name = format!("switch-{port}");
        self.device(format!("x3130-upstream,id={name},bus={port}"));
        name
    }

    fn host_bridge(&mut self, number: usize, socket: usize) -> String {
        let name = format!("bridge{number}");
        let bus = BRIDGE_BUSES[number];
        self.device(format!(
            "pxb-pcie,id={name},bus={HOST_BRIDGE},bus_nr={bus},numa_node={socket}"
        ));
        name
    }

    /// Adds two sockets, each with half of the processors and of the memory.
    fn sockets(&mut self, smp: u32, mem: u32) {
        let first = smp.div_ceil(2);
        let processors = [0..first, first..smp];
        let memory = [mem - mem / 2, mem / 2];
        for (socket, (processors, memory)) in processors.into_iter().zip(memory).enumerate() {
            let mut node = format!("node,nodeid={socket},memdev=socket{socket}");
            // In a VM with one processor, the second socket has only memory.
            if !processors.is_empty() {
                node.push_str(&format!(
                    ",cpus={}-{}",
                    processors.start,
                    processors.end - 1
                ));
            }
            self.arguments.extend([
                "-object".to_owned(),
                format!("memory-backend-ram,id=socket{socket},size={memory}M"),
                "-numa".to_owned(),
                node,
            ]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Returns the value of a word `name=value` of an argument.
    fn word<'a>(argument: &'a str, name: &str) -> Option<&'a str> {
        let mut words = argument.split(',');
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }

    /// Returns the paths up to the host bridge: first those of the NICs, then those of the GPUs. A
    /// switch port is named by its kind, and any other bridge by its bus.
    fn ways(topology: Topology) -> String {
        let layout = topology.layout(3, 2, 2048);
        let device = |argument: &'_ String| {
            let kind = argument.split(',').next()?.to_owned();
            Some((
                word(argument, "id")?.to_owned(),
                (kind, word(argument, "bus")?.to_owned()),
            ))
        };
        let devices: BTreeMap<String, (String, String)> =
            layout.arguments.iter().filter_map(device).collect();
        let way = |place: &String| {
            let (mut bus, mut way) = (place, Vec::new());
            while let Some((kind, above)) = devices.get(bus) {
                way.push(match kind.as_str() {
                    "pcie-root-port" => bus,
                    "xio3130-downstream" => "down",
                    "x3130-upstream" => "up",
                    _ => bus,
                });
                bus = above;
            }
            assert_eq!(bus, HOST_BRIDGE);
            way.join(" ")
        };
        let ways: Vec<String> = layout.nics.iter().chain(&layout.gpus).map(way).collect();
        ways.join(", ")
    }

    #[test]
    fn each_device_has_its_place() {
        for (topology, expected) in [
            (Topology::Flat, ", , , , "),
            (Topology::RootPorts, "port0, port1, port2, port3, port4"),
            (Topology::Switch, "NEAR, down up NEAR, NEAR, NEAR, NEAR"),
            (Topology::Switches, "NEAR, FAR, NEAR, FAR, NEAR"),
            (
                Topology::Sockets,
                "port0 bridge0, port1 bridge1, port2 bridge0, port3 bridge2, port4 bridge0",
            ),
        ] {
            let expected = expected
                .replace("NEAR", "down up port0")
                .replace("FAR", "down up port1");
            assert_eq!(ways(topology), expected);
        }
    }

    #[test]
    fn sockets_share_processors_and_memory() {
        let of = |prefix: &str, smp, mem| {
            let arguments = Topology::Sockets.layout(0, smp, mem).arguments;
            let found = arguments
                .into_iter()
                .filter(|word| word.starts_with(prefix));
            found.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            of("memory-", 3, 2049),
            "memory-backend-ram,id=socket0,size=1025M memory-backend-ram,id=socket1,size=1024M"
        );
        assert_eq!(
            of("node,", 3, 2049),
            "node,nodeid=0,memdev=socket0,cpus=0-1 node,nodeid=1,memdev=socket1,cpus=2-2"
        );
        assert!(of("node,", 1, 512).ends_with("node,nodeid=1,memdev=socket1"));
        let processors = [2, 3].map(|smp| Topology::Sockets.processors(smp));
        assert_eq!(processors, ["2,sockets=2", "3,sockets=3"]);
        assert_eq!(Topology::Switch.processors(3), "3");
        assert_eq!(
            of("pxb-pcie", 2, 512),
            "pxb-pcie,id=bridge2,bus=pcie.0,bus_nr=192,numa_node=1 \
             pxb-pcie,id=bridge1,bus=pcie.0,bus_nr=128,numa_node=0 \
             pxb-pcie,id=bridge0,bus=pcie.0,bus_nr=64,numa_node=0"
        );
    }
}
