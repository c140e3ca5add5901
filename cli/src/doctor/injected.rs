// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Each check of paths and devices: a machine of two sockets with a switch each, a GPU and a NIC below either, and one
//! fault at a time injected in what was seen of it.

use super::*;
use crate::finding::Level;
use crate::fixture::Pci;
use crate::host::recording::Recording;
use crate::host::Unseen;
use crate::machine::config::{Acs, Config};
use crate::machine::pci::Function;
use crate::{fixture, testing};

/// Where capabilities stand in the config space of the functions that have them ([`Pci::config`]).
const EXPRESS: usize = 0x60;
pub(super) const ACS: usize = 0x148;
const ATS: usize = 0x148;

/// The functions of the socket at a bus: the root port, the switch's ports, GPU and NIC.
pub(super) struct Socket {
    root_port: Address,
    upstream: Address,
    gpu_port: Address,
    pub(super) nic_port: Address,
    pub(super) gpu: Address,
    nic: Address,
}

pub(super) fn socket(bus: u8) -> Socket {
    let at = |bus, device| Address {
        domain: 0,
        bus,
        device,
        function: 0,
    };
    Socket {
        root_port: at(bus, 1),
        upstream: at(bus + 1, 0),
        gpu_port: at(bus + 2, 0),
        nic_port: at(bus + 2, 1),
        gpu: at(bus + 3, 0),
        nic: at(bus + 4, 0),
    }
}

pub(super) const FIRST: u8 = 0x10;
pub(super) const SECOND: u8 = 0x80;

/// What is injected, and where.
pub(super) struct Fixture {
    pub(super) machine: Machine,
    pub(super) host: Recording,
}

impl Fixture {
    pub(super) fn healthy() -> Self {
        let mut fixture = fixture::Fixture::new("two sockets with a switch, a GPU and a NIC each");
        fixture.directory("/sys/devices/system/node/node1");
        fixture.file("/proc/cmdline", "root=/dev/sda ro quiet");
        for (index, bus) in [FIRST, SECOND].into_iter().enumerate() {
            let it = socket(bus);
            let numa = i32::try_from(index).unwrap();
            let ports = fixture.switch(&format!("pci0000:{bus:02x}"), bus, 2, numa);
            let (gpu, nic) = (it.gpu.to_string(), it.nic.to_string());
            let h100 = Pci {
                resizable: None,
                ..Pci::h100(numa)
            };
            fixture.pci(&ports[0], &gpu, &h100);
            fixture.pci(&ports[1], &nic, &Pci::connectx7(numa));
            let rate = "400 Gb/sec (4X NDR)";
            fixture.hca(
                &format!("mlx5_{index}"),
                &nic,
                &format!("ib{index}"),
                "InfiniBand",
                rate,
            );
            for at in [
                it.root_port,
                it.upstream,
                it.gpu_port,
                it.nic_port,
                it.gpu,
                it.nic,
            ] {
                fixture.iommu_group(&at.to_string(), u32::from(at.bus), "identity");
            }
        }
        Self {
            machine: Machine::scan(&fixture.recording).unwrap(),
            host: fixture.recording,
        }
    }

    /// Without the second socket's devices.
    fn only_gpu_is(&mut self, name: &str) {
        self.machine.gpus.truncate(1);
        self.machine.hcas.truncate(1);
        name.clone_into(&mut self.machine.gpus[0].name);
        self.pair_up();
    }

    fn pair_up(&mut self) {
        self.machine.pairs = self.machine.all_pairs();
    }

    pub(super) fn function(&mut self, at: Address) -> &mut Function {
        self.machine.functions.get_mut(&at).unwrap()
    }

    /// The first socket's NIC once more at another address, as `mlx5_2`, with its port down.
    fn nic_that_is_down(&mut self, at: Address) {
        let mut function = self.function(socket(FIRST).nic).clone();
        function.at = at;
        let mut hca = self.machine.hcas[0].clone();
        hca.name = "mlx5_2".to_owned();
        hca.at = Some(at);
        hca.ports[0].state = Some("DOWN".to_owned());
        self.machine.functions.insert(at, function);
        self.machine.hcas.push(hca);
        self.pair_up();
    }

    /// Sets a word of config space.
    pub(super) fn set(&mut self, at: Address, offset: usize, value: u16) {
        let config = self.function(at).config.as_mut().unwrap();
        config.0[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let scan = Scan::new(&self.host, &self.machine);
        // Those of software look at what this machine has not.
        run_all(&scan, OF_HARDWARE.iter())
    }
}

type Inject = fn(&mut Fixture);

/// A fault: its name, what injects it, and the check and level of the finding that must come of it.
struct Injected {
    name: &'static str,
    inject: Inject,
    check: &'static str,
    level: Level,
    /// In what it says.
    says: &'static str,
    /// In how to fix it.
    fix: &'static str,
}

const INJECTED: &[Injected] = &[
    Injected {
        name: "a GPU for games",
        inject: |fixture| fixture.only_gpu_is("NVIDIA GeForce RTX 4090"),
        check: "device-kind",
        level: Level::Fault,
        says: "0000:13:00.0 has no GPUDirect RDMA: NVIDIA GeForce RTX 4090",
        fix: "Copy through memory of the host",
    },
    Injected {
        name: "a GPU of a DGX Spark",
        inject: |fixture| fixture.only_gpu_is("NVIDIA GB10"),
        check: "device-kind",
        level: Level::Fault,
        says: "0000:13:00.0 has no GPUDirect RDMA: NVIDIA GB10",
        fix: "Copy through memory of the host",
    },
    Injected {
        name: "a GPU without a driver",
        inject: |fixture| fixture.function(socket(FIRST).gpu).driver = None,
        check: "gpu-driver",
        level: Level::Fault,
        says: "0000:13:00.0 has no driver",
        fix: "modprobe nvidia",
    },
    Injected {
        name: "nouveau",
        inject: |fixture| fixture.function(socket(FIRST).gpu).driver = Some("nouveau".to_owned()),
        check: "gpu-driver",
        level: Level::Fault,
        says: "has the driver nouveau",
        fix: "blacklist nouveau",
    },
    Injected {
        name: "a NIC without a driver",
        inject: |fixture| {
            let mut other = fixture.function(socket(FIRST).nic).clone();
            other.at.function = 1;
            other.driver = None;
            fixture.machine.functions.insert(other.at, other);
        },
        check: "nic-driver",
        level: Level::Warning,
        says: "the NIC 0000:14:00.1 has no driver",
        fix: "modprobe mlx5_core",
    },
    Injected {
        name: "a port that is down",
        inject: |fixture| fixture.machine.hcas[0].ports[0].state = Some("DOWN".to_owned()),
        check: "port",
        level: Level::Warning,
        says: "mlx5_0 port 1 is DOWN",
        fix: "mlxlink -d mlx5_0 -m",
    },
    Injected {
        name: "a port that is down beside one that is as near and up",
        inject: |fixture| {
            fixture.nic_that_is_down(Address {
                device: 1,
                ..socket(FIRST).nic
            });
        },
        check: "port",
        level: Level::Warning,
        says: "port 1 is DOWN",
        fix: "mlxlink -d mlx5_2 -m",
    },
    Injected {
        name: "no port that is up",
        inject: |fixture| {
            fixture.machine.hcas.truncate(1);
            fixture.machine.gpus.truncate(1);
            fixture.machine.functions.remove(&socket(SECOND).nic);
            fixture.machine.hcas[0].ports[0].state = Some("INIT".to_owned());
            fixture.pair_up();
        },
        check: "port",
        level: Level::Fault,
        says: "mlx5_0 port 1 is INIT",
        fix: "opensm",
    },
    Injected {
        name: "an Ethernet port that is down",
        inject: |fixture| {
            let port = &mut fixture.machine.hcas[0].ports[0];
            port.state = Some("DOWN".to_owned());
            port.layer = Some("Ethernet".to_owned());
            port.netdevs = vec!["ens1np0".to_owned()];
        },
        check: "port",
        level: Level::Warning,
        says: "mlx5_0 port 1 is DOWN",
        fix: "ip link set ens1np0 up",
    },
    Injected {
        name: "a cable with one lane",
        inject: |fixture| {
            fixture.machine.hcas[0].ports[0].rate = Some("100 Gb/sec (1X NDR)".to_owned());
        },
        check: "port",
        level: Level::Warning,
        says: "one lane of four",
        fix: "mlxlink",
    },
    Injected {
        name: "a GPU and no NIC in its socket",
        inject: |fixture| {
            fixture.machine.hcas.remove(0);
            fixture.machine.functions.remove(&socket(FIRST).nic);
            fixture.pair_up();
        },
        check: "path",
        level: Level::Warning,
        says: "SYS",
        fix: "slot of the GPU's processor",
    },
    Injected {
        name: "requests redirected at the NIC's port",
        inject: |fixture| fixture.set(socket(FIRST).nic_port, ACS + 6, Acs::RR),
        check: "acs",
        level: Level::Warning,
        says: "0000:12:01.0 (the NIC's port) has ReqRedir",
        fix: "setpci -s 0000:12:01.0 ECAP_ACS+0x6.w=0000:002c",
    },
    Injected {
        name: "answers redirected at the GPU's port",
        inject: |fixture| fixture.set(socket(SECOND).gpu_port, ACS + 6, Acs::CR),
        check: "acs",
        level: Level::Warning,
        says: "0000:82:00.0 (the GPU's port) has CmpltRedir",
        fix: "setpci -s 0000:82:00.0 ECAP_ACS+0x6.w=0000:002c",
    },
    Injected {
        name: "ACS as firmware turns it on",
        inject: |fixture| {
            let it = socket(FIRST);
            let all = Acs::SV | Acs::RR | Acs::CR | Acs::UF;
            for port in [it.root_port, it.nic_port, it.gpu_port] {
                fixture.set(port, ACS + 6, all);
            }
        },
        check: "acs",
        level: Level::Warning,
        says: "0000:12:01.0 (the NIC's port) has ReqRedir, CmpltRedir, 0000:12:00.0 (the GPU's port)",
        fix: "pci=disable_acs_redir=",
    },
    Injected {
        name: "an IOMMU that translates",
        inject: |fixture| group(fixture, socket(FIRST).nic, "DMA-FQ"),
        check: "iommu",
        level: Level::Warning,
        says: "0000:14:00.0 is in IOMMU group 20 of type DMA-FQ",
        fix: "iommu=pt",
    },
    Injected {
        name: "an IOMMU that translates, though iommu=pt",
        inject: |fixture| {
            group(fixture, socket(FIRST).nic, "DMA");
            let cmdline = "root=/dev/sda iommu=pt".to_owned();
            fixture.host.files.insert("/proc/cmdline".to_owned(), cmdline);
        },
        check: "iommu",
        level: Level::Warning,
        says: "type DMA",
        fix: "echo identity > /sys/kernel/iommu_groups/20/type",
    },
    Injected {
        name: "an SMMU that translates",
        inject: |fixture| {
            group(fixture, socket(FIRST).nic, "DMA");
            let units = vec!["smmu3.0x0000000016000000".to_owned()];
            fixture.host.directories.insert("/sys/class/iommu".to_owned(), units);
        },
        check: "iommu",
        level: Level::Warning,
        says: "type DMA",
        fix: "iommu.passthrough=1",
    },
    Injected {
        name: "an IOMMU that blocks",
        inject: |fixture| group(fixture, socket(FIRST).nic, "blocked"),
        check: "iommu",
        level: Level::Fault,
        says: "type blocked",
        fix: "echo identity",
    },
    Injected {
        name: "translated requests dropped",
        inject: |fixture| {
            let it = socket(FIRST);
            fixture.set(it.nic, ATS + 6, 0x8000);
            fixture.set(it.nic_port, ACS + 6, Acs::TB | Acs::DT);
        },
        check: "ats",
        level: Level::Fault,
        says: "0000:14:00.0 has ATS on, and 0000:12:01.0 drops",
        fix: "setpci -s 0000:12:01.0 ECAP_ACS+0x6.w=0000:0002",
    },
    Injected {
        name: "a GPU that takes smaller packets",
        inject: |fixture| fixture.set(socket(FIRST).gpu, EXPRESS + 8, 0x5030),
        check: "max-payload",
        level: Level::Fault,
        says: "0000:13:00.0 256 B, 0000:12:00.0 512 B",
        fix: "pci=pcie_bus_safe",
    },
    Injected {
        name: "a link at half its lanes",
        inject: |fixture| {
            let it = socket(FIRST);
            for at in [it.nic, it.nic_port] {
                fixture.function(at).link.as_mut().unwrap().now.width = 8;
            }
        },
        check: "link",
        level: Level::Warning,
        says: "the link 0000:12:01.0 \u{2013} 0000:14:00.0 is 32.0 GT/s x8; both ends can 32.0 GT/s x16",
        fix: "riser",
    },
    Injected {
        name: "a GPU's link at half its lanes",
        inject: |fixture| {
            let it = socket(SECOND);
            for at in [it.gpu, it.gpu_port] {
                fixture.function(at).link.as_mut().unwrap().now.width = 8;
            }
        },
        check: "link",
        level: Level::Warning,
        says: "0000:83:00.0 is 32.0 GT/s x8",
        fix: "riser",
    },
    Injected {
        name: "a NIC's link at less speed",
        inject: |fixture| {
            let it = socket(FIRST);
            for at in [it.nic, it.nic_port] {
                fixture.function(at).link.as_mut().unwrap().now.speed = 160;
            }
        },
        check: "link",
        level: Level::Warning,
        says: "is 16.0 GT/s x16; both ends can 32.0 GT/s x16",
        fix: "riser",
    },
    Injected {
        name: "a slot that is too slow for the port",
        inject: |fixture| {
            let it = socket(FIRST);
            let port = fixture.function(it.nic_port).link.as_mut().unwrap();
            port.now.speed = 160;
            port.most.speed = 160;
            fixture.function(it.nic).link.as_mut().unwrap().now.speed = 160;
        },
        check: "slot",
        level: Level::Warning,
        says: "slot and NIC can 16.0 GT/s x16 (252 Gb/s), and a port is 400 Gb/s",
        fix: "as fast as itself",
    },
    Injected {
        name: "a BAR1 of 256 MiB",
        inject: |fixture| fixture.machine.gpus[0].bar1.as_mut().unwrap().size = 256 << 20,
        check: "bar1",
        level: Level::Warning,
        says: "BAR1 is 256 MiB",
        fix: "displaymodeselector",
    },
    Injected {
        name: "a BAR1 of 256 MiB that can be larger",
        inject: |fixture| {
            fixture.machine.gpus[0].bar1.as_mut().unwrap().size = 256 << 20;
            // 256 MiB or 32 GiB, of BAR 2; set to 256 MiB.
            let gpu = Pci {
                resizable: Some((2, (1 << 8) | (1 << 15), 8)),
                ..Pci::h100(0)
            };
            fixture.function(socket(FIRST).gpu).config = Ok(Config(gpu.config()));
        },
        check: "bar1",
        level: Level::Warning,
        says: "BAR1 is 256 MiB, and can be 32 GiB",
        fix: "Re-Size BAR",
    },
    Injected {
        name: "no BAR1",
        inject: |fixture| fixture.machine.gpus[0].bar1 = None,
        check: "bar1",
        level: Level::Fault,
        says: "has no BAR1",
        fix: "Above 4G Decoding",
    },
    Injected {
        name: "a NIC without relaxed ordering",
        inject: |fixture| fixture.set(socket(FIRST).nic, EXPRESS + 8, 0x5040),
        check: "relaxed-ordering",
        level: Level::Warning,
        says: "RlxdOrd-",
        fix: "setpci -s 0000:14:00.0 CAP_EXP+0x8.w=0010:0010",
    },
    Injected {
        name: "a NIC with short reads",
        inject: |fixture| fixture.set(socket(FIRST).nic, EXPRESS + 8, 0x1050),
        check: "max-read-request",
        level: Level::Warning,
        says: "MaxReadReq of 0000:14:00.0 is 256 B",
        fix: "setpci -s 0000:14:00.0 CAP_EXP+0x8.w=5000:7000",
    },
];

fn group(fixture: &mut Fixture, at: Address, kind: &str) {
    let number = fixture.function(at).iommu_group.clone().unwrap();
    let file = format!("/sys/kernel/iommu_groups/{number}/type");
    fixture.host.files.insert(file, format!("{kind}\n"));
}

/// What is worse than a note.
pub(super) fn bad(findings: &[Finding]) -> Vec<&Finding> {
    let bad = findings
        .iter()
        .filter(|finding| finding.level > Level::Note);
    bad.collect()
}

#[test]
fn nothing_is_said_of_a_machine_that_is_well() {
    let findings = Fixture::healthy().findings();
    let said: Vec<&Finding> = findings
        .iter()
        .filter(|finding| finding.level != Level::Ok)
        .collect();
    assert!(said.is_empty(), "{said:#?}");
    // And it looked: both pairs, by each check that tells what is well.
    for check in [
        "gpu-driver",
        "port",
        "path",
        "acs",
        "iommu",
        "ats",
        "max-payload",
        "link",
        "slot",
        "bar1",
    ] {
        let scanned = findings.iter().filter(|finding| finding.check == check);
        assert!(scanned.count() >= 2, "{check}");
    }
}

#[test]
fn each_injected_fault_makes_its_finding_and_no_other() {
    for injected in INJECTED {
        let mut fixture = Fixture::healthy();
        (injected.inject)(&mut fixture);
        let findings = fixture.findings();
        let bad = bad(&findings);
        let name = injected.name;
        assert_eq!(bad.len(), 1, "{name}: {bad:#?}");
        let finding = bad[0];
        assert_eq!(
            (finding.check, finding.level),
            (injected.check, injected.level),
            "{name}: {finding:#?}"
        );
        assert!(
            finding.found.contains(injected.says),
            "{name}: {finding:#?}"
        );
        let fix = finding.fix.as_deref().unwrap_or_default();
        assert!(fix.contains(injected.fix), "{name}: {finding:#?}");
        testing::commands_are_marked(finding);
        println!("{name}: {}", finding.found);
    }
}

/// Every check of hardware has a fault injected, or never says worse than a note.
#[test]
fn no_check_goes_untried() {
    // Or has a test of its own.
    let only_notes = ["numa", "baseline", "expect", "counters", "roce", "roce-qos"];
    for check in OF_HARDWARE {
        let tried = INJECTED.iter().any(|injected| injected.check == check.name);
        assert!(tried != only_notes.contains(&check.name), "{}", check.name);
    }
}

/// Settings that look like faults, and are none here.
#[test]
fn what_is_no_fault_is_none() {
    let healthy: &[(&str, Inject)] = &[
        ("redirection at root ports, without a switch", |fixture| {
            // Where NCCL is told to go that way.
            let conf = "NCCL_NET_GDR_LEVEL=PHB\n".to_owned();
            fixture.host.files.insert("/etc/nccl.conf".to_owned(), conf);
            fixture.machine.hcas.remove(0);
            fixture.machine.gpus.remove(0);
            fixture.pair_up();
            let it = socket(SECOND);
            for end in [it.gpu, it.nic] {
                let above = &mut fixture.function(end).above;
                above.truncate(1);
                above[0].device = end.bus & 0xf;
                let port = above[0];
                let mut own = fixture.function(it.root_port).clone();
                own.at = port;
                fixture.machine.functions.insert(port, own);
                fixture.set(port, ACS + 6, 0x1d);
            }
            fixture.pair_up();
            let scan = Scan::new(&fixture.host, &fixture.machine);
            let acs = (acs::ACS.run)(&scan);
            assert_eq!(acs.len(), 1);
            assert_eq!(acs[0].level, Level::Note);
        }),
        ("redirection above both, at the root port", |fixture| {
            fixture.set(socket(FIRST).root_port, ACS + 6, 0x1d);
        }),
        ("source validation and forwarding", |fixture| {
            let bits = Acs::SV | Acs::UF;
            fixture.set(socket(FIRST).nic_port, ACS + 6, bits);
        }),
        ("only what the GPU asks for is redirected", |fixture| {
            fixture.set(socket(FIRST).gpu_port, ACS + 6, Acs::RR);
            fixture.set(socket(FIRST).nic_port, ACS + 6, Acs::CR);
        }),
        ("redirection, with ATS and DirectTrans", |fixture| {
            let it = socket(FIRST);
            let bits = Acs::RR | Acs::CR | Acs::DT;
            fixture.set(it.nic, ATS + 6, 0x8000);
            fixture.set(it.nic_port, ACS + 6, bits);
            fixture.set(it.gpu_port, ACS + 6, bits);
            group(fixture, it.nic, "DMA");
        }),
        ("a GPU's link at less speed: idle", |fixture| {
            let it = socket(FIRST);
            for at in [it.gpu, it.gpu_port] {
                fixture.function(at).link.as_mut().unwrap().now.speed = 25;
            }
        }),
        (
            "no relaxed ordering below a root port with an erratum",
            |fixture| {
                let it = socket(FIRST);
                fixture.function(it.root_port).vendor = 0x8086;
                fixture.function(it.root_port).device = 0x6f02;
                fixture.set(it.nic, EXPRESS + 8, 0x5040);
            },
        ),
        ("a GPU for a display beside one for computing", |fixture| {
            fixture.machine.gpus[0].name = "NVIDIA GeForce RTX 4090".to_owned();
        }),
        ("a GPU given to a virtual machine", |fixture| {
            fixture.function(socket(FIRST).gpu).driver = Some("vfio-pci".to_owned());
        }),
        ("the second port of a NIC without a cable", |fixture| {
            let mut port = fixture.machine.hcas[0].ports[0].clone();
            port.number = 2;
            port.state = Some("DOWN".to_owned());
            fixture.machine.hcas[0].ports.push(port);
        }),
        (
            "the second port of a NIC, with a function of its own",
            |fixture| {
                fixture.nic_that_is_down(Address {
                    function: 1,
                    ..socket(FIRST).nic
                });
            },
        ),
        ("no IOMMU", |fixture| {
            for function in fixture.machine.functions.values_mut() {
                function.iommu_group = Err(Unseen::Absent);
            }
        }),
        ("the GPU's group translates", |fixture| {
            group(fixture, socket(FIRST).gpu, "DMA-FQ");
        }),
        ("coherent GPUs", |fixture| {
            for gpu in &mut fixture.machine.gpus {
                gpu.is_coherent = true;
                gpu.bar1 = None;
            }
            fixture.set(socket(FIRST).nic_port, ACS + 6, 0x1d);
        }),
    ];
    for (name, inject) in healthy {
        let mut fixture = Fixture::healthy();
        inject(&mut fixture);
        let findings = fixture.findings();
        assert!(bad(&findings).is_empty(), "{name}: {:#?}", bad(&findings));
        assert!(
            findings.iter().any(|finding| finding.level <= Level::Note),
            "{name}"
        );
    }
}
