// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Each check of paths and devices: a machine of two sockets with a switch each, a GPU and a card below either, and one
//! fault at a time planted in what was seen of it.

use super::*;
use crate::finding::Level;
use crate::host::recording::Recording;
use crate::host::Unseen;
use crate::machine::config::Acs;
use crate::machine::config::Config;
use crate::machine::pci::Function;
use crate::made;
use crate::made::Pci;
use crate::testing;

/// Where capabilities stand in the config space of the functions that have them ([`Pci::config`]).
const EXPRESS: usize = 0x60;
pub(super) const ACS: usize = 0x148;
const ATS: usize = 0x148;

/// The functions of the socket at a bus: the root port, the switch's ports, GPU and card.
pub(super) struct Socket {
    root_port: Address,
    upstream: Address,
    gpu_port: Address,
    pub(super) card_port: Address,
    pub(super) gpu: Address,
    card: Address,
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
        card_port: at(bus + 2, 1),
        gpu: at(bus + 3, 0),
        card: at(bus + 4, 0),
    }
}

pub(super) const FIRST: u8 = 0x10;
pub(super) const SECOND: u8 = 0x80;

/// What is planted, and where.
pub(super) struct Made {
    pub(super) machine: Machine,
    pub(super) host: Recording,
}

impl Made {
    pub(super) fn well() -> Self {
        let mut made = made::Made::new("two sockets with a switch, a GPU and a card each");
        made.directory("/sys/devices/system/node/node1");
        made.file("/proc/cmdline", "root=/dev/sda ro quiet");
        for (index, bus) in [FIRST, SECOND].into_iter().enumerate() {
            let it = socket(bus);
            let numa = i32::try_from(index).unwrap();
            let ports = made.switch(&format!("pci0000:{bus:02x}"), bus, 2, numa);
            let (gpu, card) = (it.gpu.to_string(), it.card.to_string());
            let h100 = Pci {
                resizable: None,
                ..Pci::h100(numa)
            };
            made.pci(&ports[0], &gpu, &h100);
            made.pci(&ports[1], &card, &Pci::connectx7(numa));
            let rate = "400 Gb/sec (4X NDR)";
            made.hca(
                &format!("mlx5_{index}"),
                &card,
                &format!("ib{index}"),
                "InfiniBand",
                rate,
            );
            for at in [
                it.root_port,
                it.upstream,
                it.gpu_port,
                it.card_port,
                it.gpu,
                it.card,
            ] {
                made.iommu_group(&at.to_string(), u32::from(at.bus), "identity");
            }
        }
        Self {
            machine: Machine::look(&made.recording).unwrap(),
            host: made.recording,
        }
    }

    fn pair_up(&mut self) {
        self.machine.pairs = self.machine.all_pairs();
    }

    pub(super) fn function(&mut self, at: Address) -> &mut Function {
        self.machine.functions.get_mut(&at).unwrap()
    }

    /// Sets a word of config space.
    pub(super) fn set(&mut self, at: Address, offset: usize, value: u16) {
        let config = self.function(at).config.as_mut().unwrap();
        config.0[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let look = Look::new(&self.host, &self.machine);
        // Those of software look at what this machine has not.
        run_all(&look, OF_HARDWARE.iter())
    }
}

type Plant = fn(&mut Made);

/// A fault: its name, what plants it, and the check and level of the finding that must come of it.
struct Planted {
    name: &'static str,
    plant: Plant,
    check: &'static str,
    level: Level,
    /// In what it says.
    says: &'static str,
    /// In what mends it.
    mend: &'static str,
}

const PLANTED: &[Planted] = &[
    Planted {
        name: "a GPU without a driver",
        plant: |made| made.function(socket(FIRST).gpu).driver = None,
        check: "gpu-driver",
        level: Level::Fault,
        says: "0000:13:00.0 has no driver",
        mend: "modprobe nvidia",
    },
    Planted {
        name: "nouveau",
        plant: |made| made.function(socket(FIRST).gpu).driver = Some("nouveau".to_owned()),
        check: "gpu-driver",
        level: Level::Fault,
        says: "has the driver nouveau",
        mend: "blacklist nouveau",
    },
    Planted {
        name: "a card without a driver",
        plant: |made| {
            let mut other = made.function(socket(FIRST).card).clone();
            other.at.function = 1;
            other.driver = None;
            made.machine.functions.insert(other.at, other);
        },
        check: "card-driver",
        level: Level::Warning,
        says: "the network card 0000:14:00.1 has no driver",
        mend: "modprobe mlx5_core",
    },
    Planted {
        name: "a port that is down",
        plant: |made| made.machine.hcas[0].ports[0].state = Some("DOWN".to_owned()),
        check: "port",
        level: Level::Warning,
        says: "mlx5_0 port 1 is DOWN",
        mend: "mlxlink -d mlx5_0 -m",
    },
    Planted {
        name: "a port that is down beside one that is as near and up",
        plant: |made| {
            let function = Function {
                at: Address {
                    device: 1,
                    ..socket(FIRST).card
                },
                ..made.function(socket(FIRST).card).clone()
            };
            let mut hca = made.machine.hcas[0].clone();
            hca.name = "mlx5_2".to_owned();
            hca.at = Some(function.at);
            hca.ports[0].state = Some("DOWN".to_owned());
            made.machine.functions.insert(function.at, function);
            made.machine.hcas.push(hca);
            made.pair_up();
        },
        check: "port",
        level: Level::Warning,
        says: "port 1 is DOWN",
        mend: "mlxlink -d mlx5_2 -m",
    },
    Planted {
        name: "no port that is up",
        plant: |made| {
            made.machine.hcas.truncate(1);
            made.machine.gpus.truncate(1);
            made.machine.functions.remove(&socket(SECOND).card);
            made.machine.hcas[0].ports[0].state = Some("INIT".to_owned());
            made.pair_up();
        },
        check: "port",
        level: Level::Fault,
        says: "mlx5_0 port 1 is INIT",
        mend: "opensm",
    },
    Planted {
        name: "an Ethernet port that is down",
        plant: |made| {
            let port = &mut made.machine.hcas[0].ports[0];
            port.state = Some("DOWN".to_owned());
            port.layer = Some("Ethernet".to_owned());
            port.netdevs = vec!["ens1np0".to_owned()];
        },
        check: "port",
        level: Level::Warning,
        says: "mlx5_0 port 1 is DOWN",
        mend: "ip link set ens1np0 up",
    },
    Planted {
        name: "a cable with one lane",
        plant: |made| {
            made.machine.hcas[0].ports[0].rate = Some("100 Gb/sec (1X NDR)".to_owned());
        },
        check: "port",
        level: Level::Warning,
        says: "one lane of four",
        mend: "mlxlink",
    },
    Planted {
        name: "a GPU and no card in its socket",
        plant: |made| {
            made.machine.hcas.remove(0);
            made.machine.functions.remove(&socket(FIRST).card);
            made.pair_up();
        },
        check: "path",
        level: Level::Warning,
        says: "SYS",
        mend: "slot of the GPU's processor",
    },
    Planted {
        name: "requests redirected at the card's port",
        plant: |made| made.set(socket(FIRST).card_port, ACS + 6, Acs::RR),
        check: "acs",
        level: Level::Warning,
        says: "0000:12:01.0 (the card's port) has ReqRedir",
        mend: "setpci -s 0000:12:01.0 ECAP_ACS+0x6.w=0000:002c",
    },
    Planted {
        name: "answers redirected at the GPU's port",
        plant: |made| made.set(socket(SECOND).gpu_port, ACS + 6, Acs::CR),
        check: "acs",
        level: Level::Warning,
        says: "0000:82:00.0 (the GPU's port) has CmpltRedir",
        mend: "setpci -s 0000:82:00.0 ECAP_ACS+0x6.w=0000:002c",
    },
    Planted {
        name: "ACS as firmware turns it on",
        plant: |made| {
            let it = socket(FIRST);
            let all = Acs::SV | Acs::RR | Acs::CR | Acs::UF;
            for port in [it.root_port, it.card_port, it.gpu_port] {
                made.set(port, ACS + 6, all);
            }
        },
        check: "acs",
        level: Level::Warning,
        says: "0000:12:01.0 (the card's port) has ReqRedir, CmpltRedir, 0000:12:00.0 (the GPU's port)",
        mend: "pci=disable_acs_redir=",
    },
    Planted {
        name: "an IOMMU that translates",
        plant: |made| group(made, socket(FIRST).card, "DMA-FQ"),
        check: "iommu",
        level: Level::Warning,
        says: "0000:14:00.0 is in IOMMU group 20 of type DMA-FQ",
        mend: "iommu=pt",
    },
    Planted {
        name: "an IOMMU that translates, though iommu=pt",
        plant: |made| {
            group(made, socket(FIRST).card, "DMA");
            let cmdline = "root=/dev/sda iommu=pt".to_owned();
            made.host.files.insert("/proc/cmdline".to_owned(), cmdline);
        },
        check: "iommu",
        level: Level::Warning,
        says: "type DMA",
        mend: "echo identity > /sys/kernel/iommu_groups/20/type",
    },
    Planted {
        name: "an SMMU that translates",
        plant: |made| {
            group(made, socket(FIRST).card, "DMA");
            let units = vec!["smmu3.0x0000000016000000".to_owned()];
            made.host.directories.insert("/sys/class/iommu".to_owned(), units);
        },
        check: "iommu",
        level: Level::Warning,
        says: "type DMA",
        mend: "iommu.passthrough=1",
    },
    Planted {
        name: "an IOMMU that blocks",
        plant: |made| group(made, socket(FIRST).card, "blocked"),
        check: "iommu",
        level: Level::Fault,
        says: "type blocked",
        mend: "echo identity",
    },
    Planted {
        name: "translated requests dropped",
        plant: |made| {
            let it = socket(FIRST);
            made.set(it.card, ATS + 6, 0x8000);
            made.set(it.card_port, ACS + 6, Acs::TB | Acs::DT);
        },
        check: "ats",
        level: Level::Fault,
        says: "0000:14:00.0 has ATS on, and 0000:12:01.0 drops",
        mend: "setpci -s 0000:12:01.0 ECAP_ACS+0x6.w=0000:0002",
    },
    Planted {
        name: "a GPU that takes smaller packets",
        plant: |made| made.set(socket(FIRST).gpu, EXPRESS + 8, 0x5030),
        check: "max-payload",
        level: Level::Fault,
        says: "0000:13:00.0 256 B, 0000:12:00.0 512 B",
        mend: "pci=pcie_bus_safe",
    },
    Planted {
        name: "a link at half its lanes",
        plant: |made| {
            let it = socket(FIRST);
            for at in [it.card, it.card_port] {
                made.function(at).link.as_mut().unwrap().now.width = 8;
            }
        },
        check: "link",
        level: Level::Warning,
        says: "the link 0000:12:01.0 \u{2013} 0000:14:00.0 is 32.0 GT/s x8; both ends can 32.0 GT/s x16",
        mend: "riser",
    },
    Planted {
        name: "a GPU's link at half its lanes",
        plant: |made| {
            let it = socket(SECOND);
            for at in [it.gpu, it.gpu_port] {
                made.function(at).link.as_mut().unwrap().now.width = 8;
            }
        },
        check: "link",
        level: Level::Warning,
        says: "0000:83:00.0 is 32.0 GT/s x8",
        mend: "riser",
    },
    Planted {
        name: "a card's link at less speed",
        plant: |made| {
            let it = socket(FIRST);
            for at in [it.card, it.card_port] {
                made.function(at).link.as_mut().unwrap().now.speed = 160;
            }
        },
        check: "link",
        level: Level::Warning,
        says: "is 16.0 GT/s x16; both ends can 32.0 GT/s x16",
        mend: "riser",
    },
    Planted {
        name: "a slot that is too slow for the port",
        plant: |made| {
            let it = socket(FIRST);
            let port = made.function(it.card_port).link.as_mut().unwrap();
            port.now.speed = 160;
            port.most.speed = 160;
            made.function(it.card).link.as_mut().unwrap().now.speed = 160;
        },
        check: "slot",
        level: Level::Warning,
        says: "slot and card can 16.0 GT/s x16 (252 Gb/s), and a port is 400 Gb/s",
        mend: "as fast as itself",
    },
    Planted {
        name: "a BAR1 of 256 MiB",
        plant: |made| made.machine.gpus[0].bar1.as_mut().unwrap().size = 256 << 20,
        check: "bar1",
        level: Level::Warning,
        says: "BAR1 is 256 MiB",
        mend: "displaymodeselector",
    },
    Planted {
        name: "a BAR1 of 256 MiB that can be larger",
        plant: |made| {
            made.machine.gpus[0].bar1.as_mut().unwrap().size = 256 << 20;
            // 256 MiB or 32 GiB, of BAR 2; set to 256 MiB.
            let gpu = Pci {
                resizable: Some((2, (1 << 8) | (1 << 15), 8)),
                ..Pci::h100(0)
            };
            made.function(socket(FIRST).gpu).config = Ok(Config(gpu.config()));
        },
        check: "bar1",
        level: Level::Warning,
        says: "BAR1 is 256 MiB, and can be 32 GiB",
        mend: "Re-Size BAR",
    },
    Planted {
        name: "no BAR1",
        plant: |made| made.machine.gpus[0].bar1 = None,
        check: "bar1",
        level: Level::Fault,
        says: "no large BAR",
        mend: "Above 4G Decoding",
    },
    Planted {
        name: "a card without relaxed ordering",
        plant: |made| made.set(socket(FIRST).card, EXPRESS + 8, 0x5040),
        check: "relaxed-ordering",
        level: Level::Warning,
        says: "RlxdOrd-",
        mend: "setpci -s 0000:14:00.0 CAP_EXP+0x8.w=0010:0010",
    },
    Planted {
        name: "a card with short reads",
        plant: |made| made.set(socket(FIRST).card, EXPRESS + 8, 0x1050),
        check: "max-read-request",
        level: Level::Warning,
        says: "MaxReadReq of 0000:14:00.0 is 256 B",
        mend: "setpci -s 0000:14:00.0 CAP_EXP+0x8.w=5000:7000",
    },
];

fn group(made: &mut Made, at: Address, kind: &str) {
    let number = made.function(at).iommu_group.clone().unwrap();
    let file = format!("/sys/kernel/iommu_groups/{number}/type");
    made.host.files.insert(file, format!("{kind}\n"));
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
    let findings = Made::well().findings();
    let said: Vec<&Finding> = findings
        .iter()
        .filter(|finding| finding.level != Level::Well)
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
        let looked = findings.iter().filter(|finding| finding.check == check);
        assert!(looked.count() >= 2, "{check}");
    }
}

#[test]
fn each_planted_fault_makes_its_finding_and_no_other() {
    for planted in PLANTED {
        let mut made = Made::well();
        (planted.plant)(&mut made);
        let findings = made.findings();
        let bad = bad(&findings);
        let name = planted.name;
        assert_eq!(bad.len(), 1, "{name}: {bad:#?}");
        let finding = bad[0];
        assert_eq!(
            (finding.check, finding.level),
            (planted.check, planted.level),
            "{name}: {finding:#?}"
        );
        assert!(finding.found.contains(planted.says), "{name}: {finding:#?}");
        let mend = finding.mend.as_deref().unwrap_or_default();
        assert!(mend.contains(planted.mend), "{name}: {finding:#?}");
        testing::commands_are_marked(finding);
        println!("{name}: {}", finding.found);
    }
}

/// Every check of hardware has a fault planted, or never says worse than a note.
#[test]
fn no_check_goes_untried() {
    // Or has a test of its own.
    let only_notes = ["numa", "device-kind", "baseline"];
    for check in OF_HARDWARE {
        let tried = PLANTED.iter().any(|planted| planted.check == check.name);
        assert!(tried != only_notes.contains(&check.name), "{}", check.name);
    }
}

/// Settings that look like faults, and are none here.
#[test]
fn what_is_no_fault_is_none() {
    let well: &[(&str, Plant)] = &[
        ("redirection at root ports, without a switch", |made| {
            made.machine.hcas.remove(0);
            made.machine.gpus.remove(0);
            made.pair_up();
            let it = socket(SECOND);
            for end in [it.gpu, it.card] {
                let above = &mut made.function(end).above;
                above.truncate(1);
                above[0].device = end.bus & 0xf;
                let port = above[0];
                let mut own = made.function(it.root_port).clone();
                own.at = port;
                made.machine.functions.insert(port, own);
                made.set(port, ACS + 6, 0x1d);
            }
            made.pair_up();
            let look = Look::new(&made.host, &made.machine);
            let acs = (acs::ACS.run)(&look);
            assert_eq!(acs.len(), 1);
            assert_eq!(acs[0].level, Level::Note);
        }),
        ("redirection above both, at the root port", |made| {
            made.set(socket(FIRST).root_port, ACS + 6, 0x1d);
        }),
        ("source validation and forwarding", |made| {
            let bits = Acs::SV | Acs::UF;
            made.set(socket(FIRST).card_port, ACS + 6, bits);
        }),
        ("only what the GPU asks for is redirected", |made| {
            made.set(socket(FIRST).gpu_port, ACS + 6, Acs::RR);
            made.set(socket(FIRST).card_port, ACS + 6, Acs::CR);
        }),
        ("redirection, with ATS and DirectTrans", |made| {
            let it = socket(FIRST);
            let bits = Acs::RR | Acs::CR | Acs::DT;
            made.set(it.card, ATS + 6, 0x8000);
            made.set(it.card_port, ACS + 6, bits);
            made.set(it.gpu_port, ACS + 6, bits);
            group(made, it.card, "DMA");
        }),
        ("a GPU's link at less speed: idle", |made| {
            let it = socket(FIRST);
            for at in [it.gpu, it.gpu_port] {
                made.function(at).link.as_mut().unwrap().now.speed = 25;
            }
        }),
        (
            "no relaxed ordering below a root port with an erratum",
            |made| {
                let it = socket(FIRST);
                made.function(it.root_port).vendor = 0x8086;
                made.function(it.root_port).device = 0x6f02;
                made.set(it.card, EXPRESS + 8, 0x5040);
            },
        ),
        ("a GPU given to a virtual machine", |made| {
            made.function(socket(FIRST).gpu).driver = Some("vfio-pci".to_owned());
        }),
        ("the second port of a card without a cable", |made| {
            let mut port = made.machine.hcas[0].ports[0].clone();
            port.number = 2;
            port.state = Some("DOWN".to_owned());
            made.machine.hcas[0].ports.push(port);
        }),
        (
            "the second port of a NIC, with a function of its own",
            |made| {
                let mut function = made.function(socket(FIRST).card).clone();
                function.at.function = 1;
                let mut hca = made.machine.hcas[0].clone();
                hca.name = "mlx5_2".to_owned();
                hca.at = Some(function.at);
                hca.ports[0].state = Some("DOWN".to_owned());
                made.machine.functions.insert(function.at, function);
                made.machine.hcas.push(hca);
                made.pair_up();
            },
        ),
        ("no IOMMU", |made| {
            for function in made.machine.functions.values_mut() {
                function.iommu_group = Err(Unseen::Absent);
            }
        }),
        ("the GPU's group translates", |made| {
            group(made, socket(FIRST).gpu, "DMA-FQ");
        }),
        ("coherent GPUs", |made| {
            for gpu in &mut made.machine.gpus {
                gpu.is_coherent = true;
                gpu.bar1 = None;
            }
            made.set(socket(FIRST).card_port, ACS + 6, 0x1d);
        }),
    ];
    for (name, plant) in well {
        let mut made = Made::well();
        plant(&mut made);
        let findings = made.findings();
        assert!(bad(&findings).is_empty(), "{name}: {:#?}", bad(&findings));
        assert!(
            findings.iter().any(|finding| finding.level <= Level::Note),
            "{name}"
        );
    }
}
