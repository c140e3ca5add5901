// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cases from public bug reports: the true cause comes first, and nothing else is a warning or a
//! fault.

use super::{faults, log, nvidias};
use crate::doctor::{examine, Selection};
use crate::finding::Level::Note;
use crate::finding::{Finding, Level};
use crate::fixture::software::{limits, newer_library};
use crate::fixture::Fixture;
use crate::host::Fact;
use crate::testing::{is_like, told, Fault};
use crate::{fixture, testing};

/// An HGX H100 with NVIDIA's nvidia_peermem, on a kernel without memory_peers.
fn machine() -> Fixture {
    let mut fixture = fixture::hgx().with_software();
    nvidias(&mut fixture, "570.86.15");
    fixture
}

/// Removes the user's privileges and sets a limit on locked memory.
fn limited(fixture: &mut Fixture, bytes: u64) {
    fixture.file("/proc/self/limits", &limits(&bytes.to_string()));
    let text = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n";
    fixture.file("/proc/self/status", text);
}

/// Moves RDMA devices to another network namespace (exclusive mode). The NICs keep an empty
/// directory `infiniband`.
fn other_namespace(fixture: &mut Fixture, hcas: &[&str]) {
    for hca in hcas {
        let link = format!("/sys/class/infiniband/{hca}");
        let says = fixture.recording.links[&link].clone();
        fixture.remove(&format!("/sys/{}", says.trim_start_matches("../")));
        fixture.remove(&link);
    }
    fixture.file("/sys/module/mlx5_ib/refcnt", "0\n");
}

const ALL: [&str; 9] = [
    "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8",
];

/// Adds a driver library that is newer than nvidia.ko, and sets the contents of `/proc/modules`.
fn upgraded(fixture: &mut Fixture, modules: &str) {
    newer_library(fixture);
    fixture.file("/proc/modules", modules);
}

// Only the first finding of a case may be a warning or a fault. The expected text also contains
// words of the finding's reason.
faults! {
    "Xid 119", "fault kernel-log: …119…GSP…nvidia-smi --gpu-reset -i 0000:3b:00.0" => |fixture| {
        log(fixture, &["NVRM: Xid (PCI:0000:3b:00): 119, pid=4711, Timeout after 45s of waiting for RPC response from \
            GPU2 GSP!"]);
    };
    "Xid 63", "warning kernel-log: …63…bad memory…ROW_REMAPPER" =>
        |fixture| log(fixture, &["NVRM: Xid (PCI:0000:3b:00): 63, pid=4711, row remapper"]);
    "Xid 31" => |fixture| log(fixture, &["NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, MMU Fault"]);
    "a crash in nvidia_uvm", "fault kernel-log: …uvm_hmm_unregister_gpu…nvidia_uvm…reboot" => |fixture| {
        log(fixture, &[
            "BUG: kernel NULL pointer dereference, address: 00000000000000a8",
            "#PF: supervisor read access in kernel mode",
            "Oops: 0000 [#1] PREEMPT SMP NOPTI",
            "CPU: 3 PID: 4711 Comm: python3 Tainted: P           OE",
            "RIP: 0010:uvm_hmm_unregister_gpu+0x51/0x3a0 [nvidia_uvm]",
        ]);
    };
    "no fabric manager", "fault kernel-log: …20034…802…nvidia-fabricmanager" => |fixture| {
        log(fixture, &[
            "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 12 LTSSM Fault Up",
            "NVRM: GPU0 nvAssertFailedNoLog",
        ]);
    };
    "IBGDA without PeerMappingOverride", "note ibgda: …PeerMappingOverride=1…GPU cannot map UAR" => |fixture| {
        fixture.file(
            "/proc/driver/nvidia/params",
            "EnableStreamMemOPs: 0\nRegistryDwords: \"\"\nGrdmaPciTopoCheckOverride: 0\n",
        );
    };
    "128 GiB of locked memory for 80 GiB with several NICs",
        "warning memlock: …may lock 131072 MiB…a GPU's 81920 MiB count as 737280 MiB if 9 RDMA devices register them" =>
        |fixture| limited(fixture, 128 << 30);
    "locked memory for all NICs" => |fixture| limited(fixture, 9 * (80 << 30));
    "slurmd with locked memory for one NIC",
        "warning memlock: …processes that slurmd starts may lock 131072 MiB at most…9 RDMA devices" =>
        |fixture| fixture.fact(Fact::Services, "slurmd 2201 137438953472 137438953472\n");
    "RDMA devices of another network namespace",
        "fault presence: …9 NICs…network namespace…hostNetwork…rdma dev set" =>
        |fixture| other_namespace(fixture, &ALL);
    "one RDMA device of another network namespace",
        "note nic-driver: …the RDMA device of the NIC 0000:01:00.0 is in another network namespace" =>
        |fixture| other_namespace(fixture, &ALL[8..]);
    "a NIC whose RDMA driver is missing beside another vendor's",
        "note nic-driver: …driver mlx5_core, which makes no RDMA device… fix `modprobe mlx5_ib`" => |fixture| {
        other_namespace(fixture, &ALL[8..]);
        let device = fixture.place("0000:01:00.0");
        fixture.remove(&format!("{device}/infiniband"));
        fixture.remove("/sys/module/mlx5_ib");
        fixture.directory("/sys/module/bnxt_re");
    };
    "an RDMA driver that makes no device", "fault presence: …although mlx5_ib is loaded…enable_roce" => |fixture| {
        other_namespace(fixture, &ALL);
        let empty: Vec<String> = fixture
            .recording
            .directories
            .keys()
            .filter(|path| path.ends_with("/infiniband") && path.contains("/pci"))
            .cloned()
            .collect();
        for path in empty {
            fixture.remove(&path);
        }
    };
    "modules that hold nvidia.ko",
        "fault nvidia-driver: …`sudo rmmod nvidia_fs gdrdrv nvidia_peermem nvidia_uvm nvidia_modeset nvidia`" =>
        |fixture| {
            upgraded(
                fixture,
                "nvidia_fs 323584 0 - Live 0x0 (OE)\ngdrdrv 24576 0 - Live 0x0 (OE)\n\
                 nvidia_peermem 16384 0 - Live 0x0 (OE)\nnvidia_uvm 1523712 0 - Live 0x0 (OE)\n\
                 nvidia_modeset 1306624 0 - Live 0x0\n\
                 nvidia 56598528 110 nvidia_fs,gdrdrv,nvidia_peermem,nvidia_uvm,nvidia_modeset, Live 0x0 (OE)\n",
            );
        };
    "a module that uses a user of nvidia.ko",
        "fault nvidia-driver: …`sudo rmmod nvidia_drm nvidia_modeset nvidia`…`sudo modprobe -a nvidia nvidia_modeset \
         nvidia_drm`" => |fixture| {
        upgraded(
            fixture,
            "nvidia_drm 131072 0 - Live 0x0\nnvidia_modeset 1306624 1 nvidia_drm, Live 0x0\n\
             nvidia 56598528 1 nvidia_modeset, Live 0x0 (OE)\n",
        );
    };
    "a port below the switch of a GPU that leads to nothing any more",
        "fault kernel-log: …0000:39:01.0: DPC: containment event" => |fixture| {
        let port = "0000:39:01.0";
        fixture.unplug("0000:3b:00.0");
        fixture.change_nvml(|nvml| nvml.gpus.retain(|gpu| gpu.at != "0000:3b:00.0"));
        log(fixture, &[
            &format!("pcieport {port}: DPC: containment event, status:0x1f01 source:0x0000"),
            &format!("pcieport {port}: pciehp: Slot(3): Link Down"),
        ]);
    };
}

fn examined(fixture: &Fixture) -> Vec<Finding> {
    let examined = fixture.scanned(|scan| examine(scan, Selection::default()));
    let mut findings = examined.unwrap();
    // Findings of these levels occur with any fault.
    findings.retain(|finding| !matches!(finding.level, Level::Ok | Level::NotVisible));
    findings
}

#[test]
fn the_true_cause_comes_first_and_is_the_only_one() {
    let before: Vec<Finding> = examined(&machine());
    assert!(
        before.iter().all(|finding| finding.level == Note),
        "{before:#?}"
    );
    let mut wrong = Vec::new();
    for Fault { name, inject, says } in FAULTS {
        let mut fixture = machine();
        inject(&mut fixture);
        let mut found = examined(&fixture);
        found.retain(|finding| !before.contains(finding));
        found.iter().for_each(testing::commands_are_marked);
        let bad = found.iter().filter(|it| it.level.is_finding()).count();
        let as_told = match (found.first(), says) {
            (first, []) => first.is_none(),
            (Some(first), [says, ..]) => {
                let why = first.why.as_deref().unwrap_or("");
                let text = told(first).replacen(" fix ", &format!(" {why} fix "), 1);
                is_like(&text, says) && bad == usize::from(first.level.is_finding())
            }
            _ => false,
        };
        if !as_told {
            wrong.push(format!("{name}: {found:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
