// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A machine of two sockets with a switch each, a GPU and a card below either; and one fault at a time planted in it.

use super::*;
use crate::finding::Status;
use crate::host::recording::Recording;
use crate::machine::pci::Acs;
use crate::machine::pci::Bar;
use crate::machine::pci::Config;
use crate::machine::pci::Function;
use crate::machine::pci::Link;
use crate::machine::pci::Rate;
use crate::machine::Class;
use crate::machine::Port;
use crate::made;
use crate::report::Out;

/// Where things stand in the config space that is made here.
const EXPRESS: usize = 0x40;
const ACS: usize = 0x100;
const ATS: usize = 0x140;
const RESIZABLE: usize = 0x180;

const GEN5: Rate = Rate {
    speed: 320,
    width: 16,
};

/// The functions of the socket at a bus: the root port, the switch's ports, GPU and card.
struct Socket {
    root_port: Address,
    upstream: Address,
    gpu_port: Address,
    card_port: Address,
    gpu: Address,
    card: Address,
}

fn socket(bus: u8) -> Socket {
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

const FIRST: u8 = 0x10;
const SECOND: u8 = 0x80;

fn put(config: &mut Config, at: usize, value: u32, bytes: usize) {
    config.0[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
}

/// With a PCI Express capability of this port type: 512 B can and are set, reads of 4096 B, relaxed ordering.
fn config(port: u32) -> Config {
    let mut config = Config(vec![0; 4096]);
    put(&mut config, 0x00, 0x0001_8086, 4);
    put(&mut config, 0x06, 0x0010, 2);
    put(&mut config, 0x34, 0x40, 1);
    put(&mut config, EXPRESS, 0x10, 1);
    put(&mut config, EXPRESS + 2, (port << 4) | 2, 2);
    put(&mut config, EXPRESS + 4, 2, 2);
    put(&mut config, EXPRESS + 8, 0x5050, 2);
    // ACS, then ATS, then resizable BARs, none of them on.
    put(&mut config, ACS, 0x1401_000d, 4);
    put(&mut config, ACS + 4, 0x5f, 2);
    put(&mut config, ATS, 0x1801_000f, 4);
    put(&mut config, RESIZABLE, 0x0001_0015, 4);
    config
}

fn function(at: Address, root: &str, above: &[Address], port: u32, numa: u32) -> Function {
    Function {
        at,
        vendor: 0x1000,
        device: 0xc030,
        class: 0x06_0400,
        root: root.to_owned(),
        above: above.to_vec(),
        numa: Some(numa),
        driver: Some("pcieport".to_owned()),
        link: Ok(Link {
            now: GEN5,
            most: GEN5,
        }),
        bars: Vec::new(),
        config: Ok(config(port)),
        iommu_group: Ok(u32::from(at.bus)),
        physical: None,
    }
}

/// What is planted, and where.
struct Made {
    machine: Machine,
    host: Recording,
}

impl Made {
    fn well() -> Self {
        let mut machine = Machine {
            nodes: Some(2),
            is_virtual: Some(false),
            ..Machine::default()
        };
        let mut host = Recording::new("made by hand");
        for (index, bus) in [FIRST, SECOND].into_iter().enumerate() {
            let it = socket(bus);
            let root = format!("pci0000:{bus:02x}");
            let numa = u32::try_from(index).unwrap();
            let to_gpu = [it.root_port, it.upstream, it.gpu_port];
            let to_card = [it.root_port, it.upstream, it.card_port];
            let mut functions = vec![
                function(it.root_port, &root, &[], 4, numa),
                function(it.upstream, &root, &to_gpu[..1], 5, numa),
                function(it.gpu_port, &root, &to_gpu[..2], 6, numa),
                function(it.card_port, &root, &to_card[..2], 6, numa),
                function(it.gpu, &root, &to_gpu, 0, numa),
                function(it.card, &root, &to_card, 0, numa),
            ];
            functions[4].driver = Some("nvidia".to_owned());
            functions[4].vendor = 0x10de;
            functions[4].class = 0x03_0200;
            functions[5].driver = Some("mlx5_core".to_owned());
            functions[5].vendor = 0x15b3;
            functions[5].class = 0x02_0700;
            for function in functions {
                let group = function.iommu_group.clone().unwrap();
                let file = format!("/sys/kernel/iommu_groups/{group}/type");
                host.files.insert(file, "identity\n".to_owned());
                machine.functions.insert(function.at, function);
            }
            machine.gpus.push(Gpu {
                index,
                at: it.gpu,
                name: "made".to_owned(),
                bar1: Some(Bar {
                    index: 2,
                    start: 1 << 40,
                    size: 128 << 30,
                    is_64_bit: true,
                    is_prefetchable: true,
                }),
                is_stand_in: false,
                is_coherent: false,
            });
            machine.hcas.push(Hca {
                name: format!("mlx5_{index}"),
                at: Some(it.card),
                is_software: false,
                driver: Some("mlx5_core".to_owned()),
                firmware: None,
                members: Vec::new(),
                ports: vec![Port {
                    number: 1,
                    layer: Some("InfiniBand".to_owned()),
                    state: Some("ACTIVE".to_owned()),
                    rate: Some("400 Gb/sec (4X NDR)".to_owned()),
                    netdevs: Vec::new(),
                }],
            });
        }
        host.files.insert(
            "/proc/cmdline".to_owned(),
            "root=/dev/sda ro quiet".to_owned(),
        );
        host.directories
            .insert("/sys/class/iommu".to_owned(), vec!["dmar0".to_owned()]);
        let mut made = Self { machine, host };
        made.pair_up();
        made
    }

    fn pair_up(&mut self) {
        self.machine.pairs = self.machine.all_pairs();
    }

    fn function(&mut self, at: Address) -> &mut Function {
        self.machine.functions.get_mut(&at).unwrap()
    }

    /// Sets bytes of config space.
    fn set(&mut self, at: Address, offset: usize, value: u32, bytes: usize) {
        put(
            self.function(at).config.as_mut().unwrap(),
            offset,
            value,
            bytes,
        );
    }

    fn findings(&self) -> Vec<Finding> {
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
        mend: "mlxlink",
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
        plant: |made| made.set(socket(FIRST).card_port, ACS + 6, Acs::RR.into(), 2),
        check: "acs",
        level: Level::Warning,
        says: "0000:12:01.0 (the card's port) has ReqRedir",
        mend: "setpci -s 0000:12:01.0 ECAP_ACS+0x6.w=0000:002c",
    },
    Planted {
        name: "answers redirected at the GPU's port",
        plant: |made| made.set(socket(SECOND).gpu_port, ACS + 6, Acs::CR.into(), 2),
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
                made.set(port, ACS + 6, all.into(), 2);
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
            made.set(it.card, ATS + 6, 0x8000, 2);
            made.set(it.card_port, ACS + 6, (Acs::TB | Acs::DT).into(), 2);
        },
        check: "ats",
        level: Level::Fault,
        says: "0000:14:00.0 has ATS on, and 0000:12:01.0 drops",
        mend: "setpci -s 0000:12:01.0 ECAP_ACS+0x6.w=0000:0002",
    },
    Planted {
        name: "a GPU that takes smaller packets",
        plant: |made| made.set(socket(FIRST).gpu, EXPRESS + 8, 0x5030, 2),
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
            let gpu = socket(FIRST).gpu;
            made.machine.gpus[0].bar1.as_mut().unwrap().size = 256 << 20;
            // 256 MiB or 32 GiB, of BAR 2, the only one; set to 256 MiB.
            made.set(gpu, RESIZABLE + 4, (1 << 12) | (1 << 19), 4);
            made.set(gpu, RESIZABLE + 8, (8 << 8) | (1 << 5) | 2, 4);
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
        plant: |made| made.set(socket(FIRST).card, EXPRESS + 8, 0x5040, 2),
        check: "relaxed-ordering",
        level: Level::Warning,
        says: "RlxdOrd-",
        mend: "setpci -s 0000:14:00.0 CAP_EXP+0x8.w=0010:0010",
    },
    Planted {
        name: "a card with short reads",
        plant: |made| made.set(socket(FIRST).card, EXPRESS + 8, 0x1050, 2),
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
fn bad(findings: &[Finding]) -> Vec<&Finding> {
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
        println!("{name}: {}", finding.found);
    }
}

/// Every check of hardware has a fault planted, or never says worse than a note.
#[test]
fn no_check_goes_untried() {
    let only_notes = ["numa", "device-kind"];
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
                made.set(port, ACS + 6, 0x1d, 2);
            }
            made.pair_up();
            let look = Look::new(&made.host, &made.machine);
            let acs = (acs::ACS.run)(&look);
            assert_eq!(acs.len(), 1);
            assert_eq!(acs[0].level, Level::Note);
        }),
        ("redirection above both, at the root port", |made| {
            made.set(socket(FIRST).root_port, ACS + 6, 0x1d, 2);
        }),
        ("source validation and forwarding", |made| {
            let bits = Acs::SV | Acs::UF;
            made.set(socket(FIRST).card_port, ACS + 6, bits.into(), 2);
        }),
        ("only what the GPU asks for is redirected", |made| {
            made.set(socket(FIRST).gpu_port, ACS + 6, Acs::RR.into(), 2);
            made.set(socket(FIRST).card_port, ACS + 6, Acs::CR.into(), 2);
        }),
        ("redirection, with ATS and DirectTrans", |made| {
            let it = socket(FIRST);
            let bits = Acs::RR | Acs::CR | Acs::DT;
            made.set(it.card, ATS + 6, 0x8000, 2);
            made.set(it.card_port, ACS + 6, bits.into(), 2);
            made.set(it.gpu_port, ACS + 6, bits.into(), 2);
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
                made.set(it.card, EXPRESS + 8, 0x5040, 2);
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
            made.set(socket(FIRST).card_port, ACS + 6, 0x1d, 2);
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

#[test]
fn what_root_alone_sees_is_said_and_is_not_well() {
    let mut made = Made::well();
    for function in made.machine.functions.values_mut() {
        function.config.as_mut().unwrap().0.truncate(64);
    }
    let findings = made.findings();
    for check in [
        "acs",
        "ats",
        "max-payload",
        "relaxed-ordering",
        "max-read-request",
    ] {
        let of_check: Vec<&Finding> = findings.iter().filter(|it| it.check == check).collect();
        assert!(!of_check.is_empty(), "{check}");
        for finding in of_check {
            assert_eq!(finding.level, Level::NotVisible, "{finding:#?}");
            assert!(finding.needs_root, "{finding:#?}");
        }
    }
    // What stands in sysfs is seen all the same.
    assert!(bad(&findings)
        .iter()
        .all(|it| it.level == Level::NotVisible));
    let mut out = Out::gather(false);
    let status = tell::nagios(&findings, &mut out);
    assert_eq!(status.code(), 3);
    assert!(out
        .into_text()
        .starts_with("GPUDIRECT UNKNOWN - nothing wrong was seen; "));
}

#[test]
fn a_pair_that_is_not_the_best_is_worth_a_note_unless_it_is_asked_for() {
    let made = Made::well();
    let far = made
        .machine
        .pairs
        .iter()
        .find(|pair| !pair.is_best)
        .unwrap();
    assert_eq!(far.class, Some(Class::Sys));
    let levels = |look: &Look<'_>| -> Vec<Level> {
        let findings = examine(look, &[]).unwrap();
        let path = findings.into_iter().filter(|it| it.check == "path");
        path.map(|finding| finding.level).collect()
    };
    let mut look = Look::new(&made.host, &made.machine);
    assert_eq!(levels(&look), [Level::Well, Level::Well]);
    look.all = true;
    assert_eq!(
        levels(&look),
        [Level::Note, Level::Note, Level::Well, Level::Well]
    );
    look.only = Some(far);
    assert_eq!(levels(&look), [Level::Warning]);
}

#[test]
fn findings_of_one_kind_are_told_under_one_head() {
    let mut made = Made::well();
    for bus in [FIRST, SECOND] {
        made.set(socket(bus).card_port, ACS + 6, Acs::RR.into(), 2);
        made.machine.gpus[usize::from(bus == SECOND)]
            .bar1
            .as_mut()
            .unwrap()
            .size = 256 << 20;
    }
    let look = Look::new(&made.host, &made.machine);
    let findings: Vec<Finding> = made
        .findings()
        .into_iter()
        .filter(|finding| finding.level.is_finding())
        .collect();
    assert_eq!(findings.len(), 4);
    let mut out = Out::gather(false);
    let status = tell::all(&look, &findings, false, &mut out).unwrap();
    assert_eq!(status, Status::Findings);
    let text = out.into_text();
    println!("{text}");
    let count = |what: &str| text.matches(what).count();
    // One head for each kind.
    assert_eq!((count("warning acs"), count("warning bar1")), (1, 1));
    assert_eq!(
        (count("  why"), count("  costs"), count("  mend")),
        (2, 2, 2)
    );
    // What is the same of both is said once of both, what is not once of each.
    assert_eq!(count("GPU 0, GPU 1: BAR1 is 256 MiB"), 1);
    assert_eq!(count("setpci -s 0000:12:01.0 "), 1);
    assert_eq!(count("setpci -s 0000:82:01.0 "), 1);
    assert!(text.ends_with("4 warnings.\n"), "{text}");
}

#[test]
fn monitoring_gets_one_line_and_its_own_status() {
    let mut made = Made::well();
    let nagios = |made: &Made| {
        let mut out = Out::gather(false);
        let status = tell::nagios(&made.findings(), &mut out);
        (status.code(), out.into_text())
    };
    assert_eq!(
        nagios(&made),
        (
            0,
            "GPUDIRECT OK - nothing wrong was seen | faults=0 warnings=0 notes=0 not_visible=0\n"
                .to_owned()
        )
    );
    made.set(socket(FIRST).card_port, ACS + 6, Acs::RR.into(), 2);
    assert_eq!(
        nagios(&made),
        (
            1,
            "GPUDIRECT WARNING - 1 warning: acs | faults=0 warnings=1 notes=0 not_visible=0\n"
                .to_owned()
        )
    );
    made.function(socket(FIRST).gpu).driver = None;
    assert_eq!(nagios(&made).0, 2);
    assert!(nagios(&made)
        .1
        .starts_with("GPUDIRECT CRITICAL - 1 fault, 1 warning: "));
}

#[test]
fn a_check_or_a_pair_that_is_not_there_is_an_error() {
    let made = Made::well();
    let look = Look::new(&made.host, &made.machine);
    assert!(examine(&look, &["no-such-check".to_owned()]).is_err());
    let skipped = examine(&look, &["acs".to_owned()]).unwrap();
    assert!(!skipped.iter().any(|finding| finding.check == "acs"));
    for (name, is_there) in [
        ("0,mlx5_0", true),
        ("1, mlx5_0", true),
        ("0000:13:00.0,mlx5_1", true),
        ("13:00.0,mlx5_1", true),
        ("2,mlx5_0", false),
        ("0,mlx5_2", false),
        ("0", false),
        (",", false),
    ] {
        let found = command::pair_named(&made.machine, name);
        assert_eq!(found.is_ok(), is_there, "{name}");
    }
}

#[test]
fn one_pair_is_told_hop_by_hop() {
    let made = Made::well();
    let mut look = Look::new(&made.host, &made.machine);
    look.only = made.machine.pairs.first();
    let findings = made.findings();
    let mut out = Out::gather(false);
    tell::all(&look, &findings, false, &mut out).unwrap();
    let text = out.into_text();
    println!("{text}");
    let places: Vec<usize> = [
        "0000:13:00.0",
        "0000:12:00.0",
        "0000:12:01.0",
        "0000:14:00.0",
    ]
    .iter()
    .map(|at| text.find(at).unwrap())
    .collect();
    assert!(places.is_sorted(), "{text}");
    let mut out = Out::gather(true);
    tell::all(&look, &findings, false, &mut out).unwrap();
    let json: serde_json::Value = serde_json::from_str(&out.into_text()).unwrap();
    assert_eq!(json["schema"], "peermemctl.doctor");
    assert_eq!(json["path"]["class"], "PIX");
    assert_eq!(json["path"]["hops"].as_array().unwrap().len(), 5);
    assert_eq!(json["path"]["hops"][1]["max_payload"], 512);
    assert_eq!(json["findings"].as_array().unwrap().len(), 0);
}

/// What the checks of paths and devices say of a made-up machine, as `doctor` tells it.
fn told(made: &made::Made, all: bool) -> (String, Status, Vec<Finding>) {
    let host = &made.recording;
    let machine = Machine::look(host).unwrap();
    let mut look = Look::new(host, &machine);
    look.all = all;
    let findings = run_all(&look, OF_HARDWARE.iter());
    let mut out = Out::gather(false);
    let status = tell::all(&look, &findings, all, &mut out).unwrap();
    (out.into_text(), status, findings)
}

#[test]
fn every_machine_is_told_of_as_before() {
    for (name, made) in made::all() {
        let (brief, ..) = told(&made, false);
        let mut text = format!("$ peermemctl doctor\n{brief}\n");
        // All pairs of eight GPUs are nothing to read again.
        if name != "hgx" {
            text.push_str(&format!(
                "$ peermemctl doctor --all\n{}",
                told(&made, true).0
            ));
        }
        made::golden(&format!("golden/paths-{name}.txt"), &text);
    }
}

/// The JSON of a machine with one fault, and of its one pair in full.
#[test]
fn json_is_as_before() {
    let made = made::acs();
    let host = &made.recording;
    let machine = Machine::look(host).unwrap();
    let mut text = String::new();
    for only in [None, machine.pairs.first()] {
        let mut look = Look::new(host, &machine);
        look.only = only;
        let findings = run_all(&look, OF_HARDWARE.iter());
        let mut out = Out::gather(true);
        tell::all(&look, &findings, false, &mut out).unwrap();
        text.push_str(&out.into_text());
    }
    made::golden("golden/paths-acs.json.txt", &text);
    let (checks, status) = made::says(host, &["doctor", "--list-checks"]);
    assert_eq!(status, Status::Well);
    assert!(
        OF_HARDWARE.iter().all(|check| checks.contains(check.name)),
        "{checks}"
    );
}

/// The machines that have a fault have that fault, and the others have none.
#[test]
fn made_up_machines_have_what_was_made_in_them() {
    for (name, made) in made::all() {
        let (text, status, findings) = told(&made, false);
        let mut checks: Vec<&str> = findings
            .iter()
            .filter(|finding| finding.level.is_finding())
            .map(|finding| finding.check)
            .collect();
        checks.dedup();
        let wanted: &[&str] = match name {
            "acs" => &["acs"],
            "iommu" => &["iommu"],
            "trained_down" => &["link"],
            "small_bar1" => &["bar1"],
            _ => &[],
        };
        assert_eq!(checks, wanted, "{name}: {text}");
        let wanted_status = match wanted {
            [] => Status::Well,
            _ => Status::Findings,
        };
        assert_eq!(status, wanted_status, "{name}");
        println!("{name}: {checks:?}");
    }
}

/// Sixteen good pairs, all redirected: one reason, a line for each pair, a command for each port.
#[test]
fn a_large_machine_is_told_of_in_little() {
    let mut made = made::hgx();
    let machine = Machine::look(&made.recording).unwrap();
    let redirecting = made::Pci {
        acs: Some((made::ACS_ALL, made::ACS_LINUX)),
        ..made::Pci::switch_port(6, 0)
    };
    let mut ports = std::collections::BTreeSet::new();
    for gpu in &machine.gpus {
        let function = &machine.functions[&gpu.at];
        let up = function.above[function.above.len() - 2];
        let below = |it: &&Function| it.above.last() == Some(&up);
        ports.extend(machine.functions.values().filter(below).map(|it| it.at));
    }
    assert_eq!(ports.len(), 16);
    for port in &ports {
        made.set_config(&port.to_string(), &redirecting);
    }
    let (text, status, findings) = told(&made, false);
    println!("{text}");
    assert_eq!(status, Status::Findings);
    assert_eq!(
        findings.iter().filter(|it| it.level.is_finding()).count(),
        16
    );
    assert_eq!(text.matches("warning acs").count(), 1);
    assert_eq!(text.matches("  why").count(), 1);
    for port in &ports {
        assert_eq!(
            text.matches(&format!("setpci -s {port} ")).count(),
            1,
            "{port}"
        );
    }
}

/// docs/doctor.md has a row for each check, and for nothing else.
#[test]
fn the_documentation_has_each_check() {
    let document = include_str!("../../../docs/doctor.md");
    let mut rows = Vec::new();
    let mut is_of_checks = false;
    for line in document.lines() {
        is_of_checks = line.starts_with("| check |") || is_of_checks && line.starts_with('|');
        let name = line
            .strip_prefix("| `")
            .and_then(|rest| rest.split('`').next());
        rows.extend(name.filter(|_| is_of_checks));
    }
    rows.sort_unstable();
    let mut names: Vec<&str> = checks().map(|check| check.name).collect();
    names.sort_unstable();
    assert_eq!(rows, names);
}
