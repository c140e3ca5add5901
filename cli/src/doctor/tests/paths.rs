// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the checks of paths and devices. The machine has two sockets, each with a switch, a GPU
//! and a NIC. One fault at a time is injected into the scan.

use super::*;
use crate::finding::Level;
use crate::fixture::Pci;
use crate::host::recording::Recording;
use crate::host::Unseen;
use crate::machine::config::Acs;
use crate::machine::pci::Function;
use crate::testing;
use crate::testing::{is_like, told};

/// Offsets of PCI capabilities in the synthetic config space ([`Pci::config`]).
pub(in crate::doctor) const EXPRESS: usize = 0x60;
pub(in crate::doctor) const ACS: usize = 0x148;
pub(in crate::doctor) const ATS: usize = 0x148;

/// PCI functions of one socket: root port, switch ports, GPU and NIC.
pub(in crate::doctor) struct Socket {
    pub(in crate::doctor) root_port: Address,
    pub(in crate::doctor) upstream: Address,
    pub(in crate::doctor) gpu_port: Address,
    pub(in crate::doctor) nic_port: Address,
    pub(in crate::doctor) gpu: Address,
    pub(in crate::doctor) nic: Address,
}

pub(in crate::doctor) fn socket(bus: u8) -> Socket {
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

pub(in crate::doctor) const FIRST: u8 = 0x10;
pub(in crate::doctor) const SECOND: u8 = 0x80;

/// A machine with two sockets, as a scan and as a recording. Faults are injected into the scan or
/// into the recording.
pub(in crate::doctor) struct TwoSockets {
    pub(in crate::doctor) machine: Machine,
    pub(in crate::doctor) host: Recording,
}

impl TwoSockets {
    pub(in crate::doctor) fn healthy() -> Self {
        let mut fixture = Fixture::new("two sockets with a switch, a GPU and a NIC each");
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
            let (hca, netdev) = (format!("mlx5_{index}"), format!("ib{index}"));
            let rate = "400 Gb/sec (4X NDR)";
            fixture.hca(&hca, &nic, &netdev, "InfiniBand", rate);
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

    /// Removes the devices of the second socket, and renames the remaining GPU.
    pub(in crate::doctor) fn only_gpu_is(&mut self, name: &str) {
        self.machine.gpus.truncate(1);
        self.machine.hcas.truncate(1);
        name.clone_into(&mut self.machine.gpus[0].name);
        self.pair_up();
    }

    pub(in crate::doctor) fn pair_up(&mut self) {
        self.machine.pairs = self.machine.all_pairs();
    }

    pub(in crate::doctor) fn function(&mut self, at: Address) -> &mut Function {
        self.machine.functions.get_mut(&at).unwrap()
    }

    /// Adds a copy of the first socket's NIC at another address, as `mlx5_2`, with its port down.
    pub(in crate::doctor) fn nic_that_is_down(&mut self, at: Address) {
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
    pub(in crate::doctor) fn set(&mut self, at: Address, offset: usize, value: u16) {
        let config = self.function(at).config.as_mut().unwrap();
        config.0[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
    }

    pub(in crate::doctor) fn findings(&self) -> Vec<Finding> {
        let scan = Scan::new(&self.host, &self.machine);
        // Checks of software need data that this machine lacks.
        run_all(&scan, OF_HARDWARE.iter())
    }
}

/// Defines a check's faults, which are injected into [`TwoSockets`].
macro_rules! faults {
    ($($faults:tt)*) => {
        $crate::testing::faults_of! { $crate::doctor::tests::paths::TwoSockets; $($faults)* }
    };
}
pub(in crate::doctor) use faults;

pub(in crate::doctor) fn group(fixture: &mut TwoSockets, at: Address, kind: &str) {
    let number = fixture.function(at).iommu_group.clone().unwrap();
    let file = format!("/sys/kernel/iommu_groups/{number}/type");
    fixture.host.files.insert(file, format!("{kind}\n"));
}

/// Returns the findings worse than a note.
pub(in crate::doctor) fn bad(findings: &[Finding]) -> Vec<&Finding> {
    let bad = findings
        .iter()
        .filter(|finding| finding.level > Level::Note);
    bad.collect()
}

#[test]
fn a_healthy_machine_has_no_findings() {
    let findings = TwoSockets::healthy().findings();
    let said: Vec<&Finding> = findings
        .iter()
        .filter(|finding| finding.level != Level::Ok)
        .collect();
    assert!(said.is_empty(), "{said:#?}");
    // The checks have run: each reports both pairs as ok.
    for check in "gpu-driver port path acs iommu ats max-payload link slot bar1".split(' ') {
        let scanned = findings.iter().filter(|finding| finding.check == check);
        assert!(scanned.count() >= 2, "{check}");
    }
}

#[test]
fn each_injected_fault_makes_its_finding_and_no_other() {
    for check in OF_HARDWARE {
        let Faults::OnPaths(faults) = check.faults else {
            continue;
        };
        for fault in faults {
            let mut fixture = TwoSockets::healthy();
            (fault.inject)(&mut fixture);
            let findings = fixture.findings();
            let bad = bad(&findings);
            let name = fault.name;
            assert_eq!(bad.len(), 1, "{name}: {bad:#?}");
            let finding = bad[0];
            assert_eq!(finding.check, check.name, "{name}");
            assert!(
                is_like(&told(finding), fault.says[0]),
                "{name}: {finding:#?}"
            );
            testing::commands_are_marked(finding);
            println!("{name}: {}", finding.found);
        }
    }
}

// Settings that look like faults but are not.
faults! {
    "redirection at root ports, without a switch" => |fixture| {
        // NCCL is configured to use paths through host bridges.
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
        let acs = acs::CHECK.findings(&scan);
        assert_eq!(acs.len(), 1);
        assert_eq!(acs[0].level, Level::Note);
    };
    "redirection above both, at the root port" =>
        |fixture| fixture.set(socket(FIRST).root_port, ACS + 6, 0x1d);
    "source validation and forwarding" => |fixture| {
        let bits = Acs::SV | Acs::UF;
        fixture.set(socket(FIRST).nic_port, ACS + 6, bits);
    };
    "redirection of only the GPU's requests" => |fixture| {
        fixture.set(socket(FIRST).gpu_port, ACS + 6, Acs::RR);
        fixture.set(socket(FIRST).nic_port, ACS + 6, Acs::CR);
    };
    "redirection, with ATS and DirectTrans" => |fixture| {
        let it = socket(FIRST);
        let bits = Acs::RR | Acs::CR | Acs::DT;
        fixture.set(it.nic, ATS + 6, 0x8000);
        fixture.set(it.nic_port, ACS + 6, bits);
        fixture.set(it.gpu_port, ACS + 6, bits);
        group(fixture, it.nic, "DMA");
    };
    "a GPU's link at less speed: idle" => |fixture| {
        let it = socket(FIRST);
        for at in [it.gpu, it.gpu_port] {
            fixture.function(at).link.as_mut().unwrap().now.speed = 25;
        }
    };
    "no relaxed ordering below a root port with an erratum" => |fixture| {
        let it = socket(FIRST);
        fixture.function(it.root_port).vendor = 0x8086;
        fixture.function(it.root_port).device = 0x6f02;
        fixture.set(it.nic, EXPRESS + 8, 0x5040);
    };
    "a GPU for a display beside one for computing" =>
        |fixture| fixture.machine.gpus[0].name = "NVIDIA GeForce RTX 4090".to_owned();
    "a GPU given to a virtual machine" =>
        |fixture| fixture.function(socket(FIRST).gpu).driver = Some("vfio-pci".to_owned());
    "the second port of a NIC without a cable" => |fixture| {
        let mut port = fixture.machine.hcas[0].ports[0].clone();
        port.number = 2;
        port.state = Some("DOWN".to_owned());
        fixture.machine.hcas[0].ports.push(port);
    };
    "the second port of a NIC, with a function of its own" => |fixture| {
        fixture.nic_that_is_down(Address {
            function: 1,
            ..socket(FIRST).nic
        });
    };
    "no IOMMU" => |fixture| {
        for function in fixture.machine.functions.values_mut() {
            function.iommu_group = Err(Unseen::Absent);
        }
    };
    "the GPU's group translates" => |fixture| group(fixture, socket(FIRST).gpu, "DMA-FQ");
    "coherent GPUs" => |fixture| {
        for gpu in &mut fixture.machine.gpus {
            gpu.is_coherent = true;
            gpu.bar1 = None;
        }
        fixture.set(socket(FIRST).nic_port, ACS + 6, 0x1d);
    };
}

#[test]
fn harmless_settings_cause_no_warning() {
    for Fault { name, inject, .. } in FAULTS {
        let mut fixture = TwoSockets::healthy();
        inject(&mut fixture);
        let findings = fixture.findings();
        assert!(bad(&findings).is_empty(), "{name}: {:#?}", bad(&findings));
        assert!(findings.iter().any(|finding| finding.level <= Level::Note));
    }
}
