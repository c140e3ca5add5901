// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the findings about paths that are too far for NCCL.

use super::*;
use crate::doctor::tests::paths::{faults, socket, FIRST};
use crate::finding::Level;
use crate::fixture::Fixture;
use crate::host::Fact;
use crate::{fixture, testing};

faults! {
    "a GPU and no NIC in its socket", "warning path: …SYS… fix …slot of the GPU's processor" => |fixture| {
        fixture.machine.hcas.remove(0);
        fixture.machine.functions.remove(&socket(FIRST).nic);
        fixture.pair_up();
    };
}

const CONF: &str = "/etc/nccl.conf";

/// Returns the findings about the nearest paths of each GPU that are worse than ok.
fn findings(fixture: &Fixture) -> Vec<Finding> {
    let findings = fixture.scanned(path).into_iter();
    let findings: Vec<Finding> = findings.filter(|it| it.level != Level::Ok).collect();
    findings.iter().for_each(testing::commands_are_marked);
    findings
}

fn levels(fixture: &Fixture) -> Vec<Level> {
    findings(fixture).iter().map(|it| it.level).collect()
}

fn warnings(fixture: &Fixture) -> Vec<Finding> {
    let findings = findings(fixture).into_iter();
    findings.filter(|it| it.level == Level::Warning).collect()
}

#[track_caller]
fn has(text: Option<&String>, words: &str) {
    let text = text.unwrap();
    assert!(text.contains(words), "{words}: {text}");
}

#[test]
fn a_virtual_machine_with_a_domain_for_each_device_lacks_its_topology_file() {
    fixture::domains(0).session("1$ doctor
         ^ warning path
         GPU 0, GPU 1, GPU 2, GPU 3: the nearest RDMA device (mlx5_0, mlx5_1, mlx5_2, mlx5_3) is NODE:
         NCCL uses GPUDirect RDMA up to PXB
         NCCL_TOPO_FILE
         8 warnings
         ! slot
         ! SYS",
    );
}

/// NUMA node -1 means an unknown node.
#[test]
fn unknown_nodes_are_not_reported_as_different() {
    let mut fixture = fixture::domains(-1);
    fixture.session(
        "1$ doctor
         is NODE or SYS: through several host bridges, of NUMA nodes that are not known
         NCCL_TOPO_FILE
         8 warnings
         ! slot
         ! link between the processors
         ! between NUMA nodes",
    );
    // NCCL uses the topology file.
    fixture.file(CONF, "NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml\n");
    fixture.file("/opt/microsoft/ndv5-topo.xml", "<system/>\n");
    assert!(warnings(&fixture).is_empty());
    let told = "$ doctor --all --only numa\nthe hypervisor does not say";
    fixture.session(told);
}

#[test]
fn a_topology_file_overrides_sysfs() {
    let mut fixture = fixture::domains(0);
    let text = "NCCL_IB_PCI_RELAXED_ORDERING=1\nNCCL_TOPO_FILE=/opt/topo.xml\n";
    fixture.file(CONF, text);
    let missing = warnings(&fixture);
    assert_eq!(missing.len(), 8);
    let why = "NCCL_TOPO_FILE in /etc/nccl.conf names /opt/topo.xml, which does not exist";
    has(missing[0].why.as_ref(), why);
    fixture.file("/opt/topo.xml", "<system/>\n");
    let notes = findings(&fixture);
    assert!(notes.iter().all(|it| it.level == Level::Note), "{notes:#?}");
    fixture.session("0$ doctor");
    let mut fixture = fixture::domains(-1);
    fixture.file(
        "/var/run/nvidia-topologyd/virtualTopology.xml",
        "<system/>\n",
    );
    assert!(warnings(&fixture).is_empty());
}

#[test]
fn host_bridges_of_bare_metal_are_too_far() {
    let mut fixture = fixture::two_sockets().with_software();
    assert_eq!(warnings(&fixture).len(), 2);
    // The user has chosen this level. The slower path is therefore only a note.
    fixture.file(CONF, "NCCL_NET_GDR_LEVEL=PHB\n");
    assert_eq!(levels(&fixture), [Level::Note, Level::Note]);
    fixture.session("0$ doctor");
    fixture.file("/proc/self/environ", "A=b\0NCCL_NET_GDR_LEVEL=PIX\0");
    let why = "NCCL_NET_GDR_LEVEL is PIX in this shell's environment";
    has(warnings(&fixture)[0].why.as_ref(), why);
}

#[test]
fn unknown_nodes_are_not_reported_as_another_processor() {
    let mut fixture = fixture::two_sockets().with_software();
    for at in ["0000:98:00.0", "0000:c8:00.0"] {
        let own = fixture.place(at);
        fixture.file(&format!("{own}/numa_node"), "-1\n");
    }
    let said = warnings(&fixture);
    assert_eq!(said.len(), 2, "{said:#?}");
    assert!(said[1].found.contains("not known"), "{said:#?}");
    let fix = said[1].fix.as_deref().unwrap();
    assert!(!fix.contains("slot of the GPU's processor"), "{fix}");
}

#[test]
fn a_level_that_forbids_near_paths_is_reported() {
    let mut fixture = fixture::all().remove("hgx").unwrap();
    fixture.file(CONF, "NCCL_NET_GDR_LEVEL=LOC\n");
    let said = warnings(&fixture);
    assert_eq!(said.len(), 8, "{said:#?}");
    let why = "NCCL_NET_GDR_LEVEL is LOC in /etc/nccl.conf";
    has(said[0].why.as_ref(), why);
    has(said[0].fix.as_ref(), "Unset NCCL_NET_GDR_LEVEL");
}

/// A GPU without a near NIC reaches the near NIC of another GPU through NVLink.
#[test]
fn nvlink_is_reported_where_nccl_uses_it() {
    let mut fixture = fixture::all().remove("hgx").unwrap();
    fixture.unplug("0000:18:00.0");
    fixture.unplug("0000:1a:00.0");
    let said = warnings(&fixture);
    assert_eq!(said.len(), 2, "{said:#?}");
    let pxn = "NCCL reaches mlx5_2 by NVLink through GPU 2 (PXN)";
    for finding in &said {
        assert!(finding.found.contains("(mlx5_2, mlx5_3) is NODE"));
        has(finding.why.as_ref(), pxn);
    }
    fixture.file(CONF, "NCCL_PXN_DISABLE=1\n");
    // NCCL uses no other GPU's NIC if PXN is turned off, or if all GPUs are far from a NIC.
    for fixture in [fixture, fixture::domains(0)] {
        let why = warnings(&fixture)[0].why.clone().unwrap();
        assert!(!why.contains("PXN"), "{why}");
    }
}

#[test]
fn devices_without_gpudirect_rdma_are_not_reported_as_too_far() {
    let fixture = fixture::all().remove("soft_roce").unwrap();
    assert_eq!(levels(&fixture), [Level::Note]);
    let mut games = fixture::two_sockets().with_software();
    for at in ["0000:17:00.0", "0000:98:00.0"] {
        games.gpu(at, "NVIDIA GeForce RTX 4090");
    }
    assert_eq!(levels(&games), [Level::Note, Level::Note]);
    // EFA's plugin brings a topology file for NCCL.
    let mut efa = fixture::virtual_machine().with_software();
    let own = efa.place("0000:00:06.0");
    efa.link(&format!("{own}/driver"), "../../../bus/pci/drivers/efa");
    assert_eq!(levels(&efa), [Level::Note]);
    // Transfers reach the memory of Grace's GPUs through NVLink-C2C, not through PCIe.
    assert_eq!(levels(&fixture::all().remove("grace").unwrap()), []);
}

/// The checks ignore the registers of virtual functions, because their bits are reserved.
#[test]
fn registers_of_virtual_functions_are_not_judged() {
    let mut fixture = fixture::domains(0);
    for number in 0x101..0x109 {
        let function = fixture::Pci {
            device: 0x101e,
            payload: (2, 0),
            read_request: 0,
            relaxed_ordering: false,
            ..fixture::Pci::connectx7(0)
        };
        fixture.set_config(&format!("{number:04x}:00:00.0"), &function);
    }
    fixture.session("$ doctor\n8 warnings\n! relaxed-ordering");
}

/// A recording contains the NCCL variables of the shell's environment, and no other variables.
#[test]
fn a_recording_has_only_variables_of_nccl() {
    let mut fixture = fixture::two_sockets().with_software();
    fixture.file("/proc/self/environ", "SECRET=x\0NCCL_NET_GDR_LEVEL=PHB\0");
    let (json, _) = fixture.says("record");
    assert!(json.contains("NCCL_NET_GDR_LEVEL=PHB"), "{json}");
    fixture.fact(Fact::User, "0");
    let again = crate::host::recording::Recording::parse(&json).unwrap();
    testing::session(&again, "$ doctor --only path\n^ Nothing wrong was seen");
}
