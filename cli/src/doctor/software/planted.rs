// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Each check of software: silent where all is well, and one fault at a time planted.

use super::*;
use crate::doctor::look::Look;
use crate::finding::Finding;
use crate::finding::Level;
use crate::finding::Level::Fault;
use crate::finding::Level::NotVisible;
use crate::finding::Level::Note;
use crate::finding::Level::Warning;
use crate::host::Fact;
use crate::host::Unseen;
use crate::machine::Machine;
use crate::made;
use crate::made::software::driver;
use crate::made::software::limits;
use crate::made::software::nvml;
use crate::made::software::OURS;
use crate::made::Made;
use crate::nvml::Memory;
use crate::nvml::Refused;
use crate::nvml::Virtualization;
use crate::shipped::refusal::Event;
use crate::software::MODULE;
use crate::software::REGISTER;
use crate::testing;

const DEBUG: &str = "/sys/kernel/debug/nvidia_peermem";
const PEERS: &str = "/sys/kernel/mm/memory_peers";

fn well() -> Made {
    let mut made = made::small();
    made.software();
    made
}

/// What the checks of software say, but for what is well.
fn findings(made: &Made) -> Vec<Finding> {
    let machine = Machine::look(&made.recording).unwrap();
    let look = Look::new(&made.recording, &machine);
    let applying = OF_SOFTWARE.iter().filter(|check| (check.applies)(&look));
    let all = applying.flat_map(|check| {
        let found = (check.run)(&look);
        assert!(found.iter().all(|finding| finding.check == check.name));
        found
    });
    all.filter(|finding| finding.level != Level::Well).collect()
}

/// As if the module had never been loaded.
fn unload(made: &mut Made) {
    made.remove(MODULE);
    made.remove(PEERS);
    made.remove(DEBUG);
    made.file(
        "/proc/modules",
        "ib_core 475136 0 - Live 0x0000000000000000 (OE)\n",
    );
}

/// NVIDIA's module in the place of ours, on a kernel where ib_core has no memory_peers.
fn nvidias(made: &mut Made, version: &str) {
    unload(made);
    made.file(&format!("{MODULE}/version"), &format!("{version}\n"));
    made.file(&format!("{MODULE}/refcnt"), "0\n");
    made.file(
        &format!("{MODULE}/parameters/persistent_api_support"),
        "1\n",
    );
    made.file(
        "/proc/modules",
        "nvidia_peermem 16384 0 - Live 0x0000000000000000 (OE)\n",
    );
    made.file(
        "/lib/modules/6.8.0-45-generic/modules.dep",
        "updates/dkms/nvidia-peermem.ko: updates/dkms/nvidia.ko\n",
    );
}

fn proprietary(made: &mut Made) {
    made.file(
        "/proc/driver/nvidia/version",
        &driver("x86_64 Kernel Module"),
    );
}

fn without_function(made: &mut Made, name: &str) {
    let symbols = made.recording.facts[&Fact::KernelSymbols].clone();
    let kept: Vec<&str> = symbols
        .lines()
        .filter(|line| !line.contains(name))
        .collect();
    made.fact(Fact::KernelSymbols, &kept.join("\n"));
}

/// A change of what NVML says of the first GPU.
fn gpu(made: &mut Made, change: fn(&mut crate::nvml::Gpu)) {
    let mut said = nvml(&made.recording);
    change(said.gpus.first_mut().unwrap());
    made.fact(Fact::Nvml, &serde_json::to_string(&said).unwrap());
}

fn log(made: &mut Made, lines: &[&str]) {
    let lines: Vec<String> = lines
        .iter()
        .enumerate()
        .map(|(index, line)| format!("3,{index},1000000{index},-;{line}"))
        .collect();
    made.fact(Fact::KernelLog, &lines.join("\n"));
}

fn refuse(made: &mut Made, last: u32, reason: &str) {
    made.file(
        &format!("{DEBUG}/refusals"),
        &format!(
            "seq=0 first=1.000001 last={last}.500000 times=2 flavour=persistent step=acquire reason={reason} code=-12 \
             addr=0x7f0000000000 len=1048576 tgid=4711 pid=4712 comm=python3 text=\"as it is\"\n"
        ),
    );
}

/// A fault: what plants it, and all that must be said of it: checks, levels, and words of what was found or what mends
/// it.
struct Planted {
    name: &'static str,
    plant: fn(&mut Made),
    says: &'static [(&'static str, Level, &'static str)],
}

const PLANTED: &[Planted] = &[
    Planted {
        name: "installed and not loaded, and dma-buf works",
        plant: unload,
        says: &[("module", Warning, "sudo modprobe nvidia-peermem")],
    },
    Planted {
        name: "not loaded, and only what comes with the driver installed",
        plant: |made| {
            nvidias(made, "570.86.15");
            made.remove(MODULE);
        },
        says: &[("module", Note, "updates/dkms/nvidia-peermem.ko (NVIDIA's)")],
    },
    Planted {
        name: "not loaded, and there is no other way",
        plant: |made| {
            unload(made);
            without_function(made, "mlx5_ib_reg_user_mr_dmabuf");
        },
        says: &[(
            "module",
            Fault,
            "updates/peermem-rs/nvidia_peermem.ko (peermem-rs)",
        )],
    },
    Planted {
        name: "not loaded, and whether there is another way is not visible",
        plant: |made| {
            unload(made);
            made.deny("/proc/driver/nvidia/version");
            // All that is known of the driver is that it is there.
            made.file("/proc/driver/nvidia/version", "NVRM version: x\n");
        },
        says: &[
            ("module", Warning, "modprobe"),
            ("dma-buf", NotVisible, "nvidia.ko's flavour"),
        ],
    },
    Planted {
        name: "not loaded and not installed",
        plant: |made| {
            unload(made);
            made.file(
                "/lib/modules/6.8.0-45-generic/modules.dep",
                "updates/dkms/nvidia.ko:\n",
            );
        },
        says: &[("module", Note, "modprobe has no such module")],
    },
    Planted {
        name: "not loaded, since symbols differ",
        plant: |made| {
            unload(made);
            log(
                made,
                &[
                    "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
                    "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)",
                ],
            );
        },
        says: &[("module", Warning, "disagrees about version")],
    },
    Planted {
        name: "not loaded, since it is not signed",
        plant: |made| {
            unload(made);
            made.file(
                "/sys/kernel/security/lockdown",
                "none [integrity] confidentiality\n",
            );
        },
        says: &[("module", Warning, "Secure Boot")],
    },
    Planted {
        name: "nv_peer_mem in its place",
        plant: |made| {
            unload(made);
            made.file("/sys/module/nv_peer_mem/version", "1.3-0\n");
        },
        says: &[("module", Warning, "rmmod nv_peer_mem")],
    },
    Planted {
        name: "nv_peer_mem beside it",
        plant: |made| made.file("/sys/module/nv_peer_mem/version", "1.3-0\n"),
        says: &[("module", Warning, "beside nvidia_peermem 595.45.04-rs1")],
    },
    Planted {
        name: "NVIDIA's of another driver",
        plant: |made| {
            nvidias(made, "550.54.14");
            made.file(&format!("{PEERS}/nv_mem/version"), "550.54.14\n");
        },
        says: &[(
            "module",
            Warning,
            "550.54.14 (NVIDIA's) is not of the driver that is loaded",
        )],
    },
    Planted {
        name: "an ib_core without peer memory",
        plant: |made| {
            unload(made);
            without_function(made, REGISTER);
        },
        says: &[("peer-memory", Warning, "DOCA-OFED")],
    },
    Planted {
        name: "an ib_core that may have peer memory in a module that is not loaded",
        plant: |made| {
            unload(made);
            without_function(made, REGISTER);
            made.remove("/sys/module/ib_uverbs");
        },
        says: &[("presence", Fault, "sudo modprobe ib_uverbs")],
    },
    Planted {
        name: "an ib_core with peer memory, and no ib_uverbs for programs",
        plant: |made| made.remove("/sys/module/ib_uverbs"),
        says: &[("presence", Fault, "sudo modprobe ib_uverbs")],
    },
    Planted {
        name: "an ib_core without peer memory, and no other way",
        plant: |made| {
            unload(made);
            without_function(made, REGISTER);
            without_function(made, "mlx5_ib_reg_user_mr_dmabuf");
        },
        says: &[("peer-memory", Fault, "no ib_register_peer_memory_client")],
    },
    Planted {
        name: "ours beside the proprietary driver",
        plant: |made| {
            unload(made);
            proprietary(made);
        },
        says: &[("nvidia-driver", Fault, "nvidia-open")],
    },
    Planted {
        name: "ours beside an old driver",
        plant: |made| {
            unload(made);
            let text = driver("Open Kernel Module for x86_64").replace("570.86.15", "525.60.13");
            made.file("/proc/driver/nvidia/version", &text);
        },
        says: &[("nvidia-driver", Fault, "driver 535")],
    },
    Planted {
        name: "NVIDIA's beside the proprietary driver",
        plant: |made| {
            nvidias(made, "570.86.15");
            made.file(&format!("{PEERS}/nv_mem/version"), "570.86.15\n");
            proprietary(made);
        },
        // It works; only dma-buf does not.
        says: &[("dma-buf", Note, "dma-buf takes the open one")],
    },
    Planted {
        name: "a library of another version",
        plant: |made| {
            let mut said = nvml(&made.recording);
            said.gpus.clear();
            said.error = Some(Refused {
                code: 18,
                text: "Driver/library version mismatch".to_owned(),
            });
            made.fact(Fact::Nvml, &serde_json::to_string(&said).unwrap());
        },
        says: &[("nvidia-driver", Fault, "Driver/library version mismatch")],
    },
    Planted {
        name: "no library",
        plant: |made| {
            made.recording.facts.remove(&Fact::Nvml);
            made.recording
                .unseen
                .insert("fact nvml".to_owned(), Unseen::Absent);
        },
        says: &[("nvidia-driver", NotVisible, "libnvidia-ml.so.1")],
    },
    Planted {
        name: "another stack's memory_peers",
        plant: |made| {
            made.remove(&format!("{PEERS}/nv_mem"));
            made.directory(&format!("{PEERS}/other"));
        },
        says: &[(
            "clients",
            Warning,
            "does not show its client nv_mem (there: other)",
        )],
    },
    Planted {
        name: "another module's nv_mem",
        plant: |made| made.file(&format!("{PEERS}/nv_mem/version"), "1.3-0\n"),
        says: &[("clients", Warning, "nv_mem is version 1.3-0")],
    },
    Planted {
        name: "revocable registrations",
        plant: |made| {
            made.file(
                &format!("{MODULE}/parameters/persistent_api_support"),
                "0\n",
            );
            made.file(&format!("{PEERS}/nv_mem_nc/version"), OURS);
        },
        says: &[("clients", Note, "persistent_api_support=0")],
    },
    Planted {
        name: "revocable registrations, and the second client is not there",
        plant: |made| {
            made.file(
                &format!("{MODULE}/parameters/persistent_api_support"),
                "0\n",
            );
        },
        says: &[
            ("clients", Note, "persistent_api_support=0"),
            ("clients", Warning, "does not show its client nv_mem_nc"),
        ],
    },
    Planted {
        name: "memory_peers turned off",
        plant: |made| {
            made.remove(PEERS);
            made.file(&format!("{MODULE}/parameters/memory_peers"), "N\n");
        },
        says: &[("consumers", Note, "memory_peers=1")],
    },
    Planted {
        name: "NVIDIA's module on a kernel without memory_peers, and no dma-buf",
        plant: |made| {
            nvidias(made, "570.86.15");
            proprietary(made);
        },
        says: &[
            ("consumers", Warning, "NCCL to 2.22"),
            ("dma-buf", Note, "does not work here"),
        ],
    },
    Planted {
        name: "MIG",
        plant: |made| gpu(made, |gpu| gpu.mig = Some(true)),
        says: &[("gpu-mode", Note, "MIG is on")],
    },
    Planted {
        name: "a virtual GPU",
        plant: |made| gpu(made, |gpu| gpu.virtualization = Some(Virtualization::Vgpu)),
        says: &[("gpu-mode", Note, "virtual GPU")],
    },
    Planted {
        name: "no persistence mode",
        plant: |made| gpu(made, |gpu| gpu.persistence_mode = Some(false)),
        says: &[("gpu-mode", Note, "nvidia-persistenced")],
    },
    Planted {
        name: "BAR1 nearly full",
        plant: |made| {
            gpu(made, |gpu| {
                gpu.bar1 = Some(Memory {
                    total_bytes: 128 << 30,
                    free_bytes: 5 << 30,
                    used_bytes: 123 << 30,
                });
            });
        },
        says: &[(
            "bar1-free",
            Warning,
            "5120 MiB of 131072 MiB of BAR1 are free, of which 5084 MiB",
        )],
    },
    Planted {
        name: "a shell that may lock little",
        plant: |made| {
            made.file("/proc/self/limits", &limits("8388608"));
            made.file(
                "/proc/self/status",
                "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n",
            );
        },
        says: &[(
            "memlock",
            Warning,
            "may lock 8 MiB (hard limit 8 MiB), and a GPU has 81920 MiB",
        )],
    },
    Planted {
        name: "a batch system that may lock little",
        plant: |made| {
            made.fact(
                Fact::Services,
                "slurmd 2201 8388608 8388608\nslurmd 2202 8388608 8388608\n",
            );
        },
        says: &[(
            "memlock",
            Warning,
            "what slurmd starts may lock 8 MiB at most",
        )],
    },
    Planted {
        name: "containers that may lock little",
        plant: |made| made.fact(Fact::Services, "containerd 900 65536 8388608\n"),
        says: &[("memlock", Note, "--ulimit memlock=-1")],
    },
    Planted {
        name: "a cgroup at its limit",
        plant: |made| {
            let folder = "/sys/fs/cgroup/user.slice";
            made.file(
                &format!("{folder}/rdma.max"),
                "mlx5_0 hca_handle=4 hca_object=2000\n",
            );
            made.file(
                &format!("{folder}/rdma.current"),
                "mlx5_0 hca_handle=1 hca_object=1900\n",
            );
        },
        says: &[("rdma-cgroup", Warning, "1900 RDMA objects of 2000")],
    },
    Planted {
        name: "a refusal of late that lies in the machine",
        plant: |made| refuse(made, 3590, "no_room"),
        says: &[(
            "refusals",
            Warning,
            "refused 2 times, last 10 s ago, to python3: no_room",
        )],
    },
    Planted {
        name: "the same of long ago",
        plant: |made| {
            made.fact(Fact::Monotonic, "90000.0");
            refuse(made, 3590, "no_room");
        },
        says: &[("refusals", Note, "last 24 h ago")],
    },
    Planted {
        name: "a refusal that lies in what was asked for",
        plant: |made| refuse(made, 3590, "not_gpu_memory"),
        says: &[("refusals", Note, "not_gpu_memory")],
    },
    Planted {
        name: "a refusal after which the other client is asked",
        plant: |made| refuse(made, 3590, "not_in_bar"),
        says: &[],
    },
    Planted {
        name: "memory that is lost",
        plant: |made| made.file(&format!("{DEBUG}/counters"), "event=lost count=3\n"),
        says: &[("refusals", Warning, "lost: 3")],
    },
    Planted {
        name: "a GPU that is gone, and its callbacks with it",
        plant: |made| {
            made.file(&format!("{DEBUG}/version"), "format=1 module=1\n");
            made.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=kept gpus=0000:f9:00.0\nid=2 state=kept gpus=0000:19:00.0,0000:f9:00.0\n\
                id=3 state=mapped gpus=0000:9a:00.0\nid=4 state=kept gpus=-\n",
            );
        },
        says: &[(
            "refusals",
            Warning,
            "2 registrations wait for their callbacks from GPU 0000:f9:00.0, which is gone from PCI",
        )],
    },
    Planted {
        name: "a GPU that has fallen off the bus, with a registration that waits for it",
        plant: |made| {
            let config = format!("{}/config", made.place("0000:19:00.0"));
            made.bytes(&config, &[0xff; 64]);
            made.file(&format!("{DEBUG}/version"), "format=1 module=1\n");
            made.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=kept gpus=0000:19:00.0\nid=2 state=mapped gpus=0000:19:00.0\n",
            );
        },
        says: &[(
            "refusals",
            Warning,
            "1 registration waits for its callback from GPU 0000:19:00.0, which has fallen off the bus",
        )],
    },
    Planted {
        name: "files that only root reads",
        plant: |made| {
            made.remove("/sys/kernel/debug");
            made.deny("/sys/kernel/debug");
        },
        says: &[("refusals", NotVisible, "not visible without root")],
    },
    Planted {
        name: "an IOMMU that stops the card",
        plant: |made| {
            log(
                made,
                &["DMAR: [DMA Write NO_PASID] Request device [0000:18:00.0] fault addr 0x3f8000000000 [fault reason \
                0x05] PTE Write access is not set"],
            );
        },
        says: &[("kernel-log", Warning, "once 10 s after boot: DMAR:")],
    },
    Planted {
        name: "an IOMMU that stops somebody else",
        plant: |made| {
            log(
                made,
                &["DMAR: [DMA Write NO_PASID] Request device [0000:f9:00.0] fault addr 0x3f8000000000 [fault reason \
                0x05] x"],
            );
        },
        says: &[],
    },
    Planted {
        name: "a GPU that fell off the bus",
        plant: |made| {
            log(
                made,
                &["NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."],
            );
        },
        says: &[("kernel-log", Fault, "Xid")],
    },
    Planted {
        name: "packets sent again on the path",
        plant: |made| {
            let line =
                "pcieport 0000:16:00.0: AER: Corrected error message received from 0000:17:01.0";
            log(made, &[line, line]);
        },
        says: &[("kernel-log", Note, "2 times, the last")],
    },
    Planted {
        name: "packets lost on the path",
        plant: |made| {
            log(made, &["pcieport 0000:15:01.0: AER: Uncorrectable (Non-Fatal) error message received from \
            0000:18:00.0"]);
        },
        says: &[("kernel-log", Warning, "Uncorrectable")],
    },
    Planted {
        name: "firmware in trouble",
        plant: |made| {
            log(made, &["mlx5_core 0000:18:00.0: poll_health:819:(pid 0): device's health compromised - reached miss \
            count"]);
        },
        says: &[("kernel-log", Warning, "mlxfwmanager")],
    },
    Planted {
        name: "BAR1 without an address",
        plant: |made| log(made, &["NVRM: BAR1 is 0M @ 0x0 (PCI:0000:19:00.0)"]),
        says: &[("kernel-log", Fault, "Above 4G Decoding")],
    },
    Planted {
        name: "memory that is lost, by the log alone",
        plant: |made| {
            let message = Event::ALL[Event::Lost as usize].message;
            let line = format!("nvidia-peermem: GPU memory 0x7f0000000000+0x10000: {message}");
            log(made, &[line.as_str()]);
            made.remove(DEBUG);
        },
        says: &[
            ("refusals", NotVisible, "nvidia_peermem"),
            ("kernel-log", Warning, "is lost until"),
        ],
    },
    Planted {
        name: "NVIDIA's module met freed memory",
        plant: |made| {
            log(made, &["nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further \
            processing"]);
        },
        says: &[("kernel-log", Warning, "driver 560")],
    },
    Planted {
        name: "a module that loaded after it did not",
        plant: |made| {
            log(
                made,
                &["nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)"],
            );
        },
        says: &[],
    },
    Planted {
        name: "a log that only root reads",
        plant: |made| {
            made.recording.facts.remove(&Fact::KernelLog);
            made.recording
                .unseen
                .insert("fact kernel_log".to_owned(), Unseen::Denied);
        },
        says: &[("kernel-log", NotVisible, "not visible without root")],
    },
    Planted {
        name: "nothing that loads it at boot, with openibd",
        plant: |made| {
            made.directory("/etc/systemd/system/multi-user.target.wants");
            made.file("/usr/lib/systemd/system/openibd.service", "[Service]\n");
        },
        says: &[
            ("module-at-boot", Note, "at boot"),
            ("module-at-boot", Note, "openibd is here"),
        ],
    },
    Planted {
        name: "a service that loads it, with openibd",
        plant: |made| {
            for target in ["multi-user.target", "openibd.service"] {
                made.link(
                    &format!("/etc/systemd/system/{target}.wants/peermem-rs.service"),
                    "../peermem-rs.service",
                );
            }
            made.file("/usr/lib/systemd/system/openibd.service", "[Service]\n");
        },
        says: &[],
    },
];

#[test]
fn a_machine_that_is_well_is_told_nothing() {
    assert_eq!(findings(&well()), []);
    let mut hgx = made::hgx();
    hgx.software();
    assert_eq!(findings(&hgx), []);
}

#[test]
fn each_fault_is_told_and_nothing_else() {
    let mut wrong = Vec::new();
    for planted in PLANTED {
        let mut made = well();
        (planted.plant)(&mut made);
        let found = findings(&made);
        // The module's table has its own words for logs, too.
        let own = found
            .iter()
            .filter(|finding| finding.check != refusals::NAME);
        own.for_each(testing::commands_are_marked);
        let as_told = found.len() == planted.says.len()
            && found
                .iter()
                .zip(planted.says)
                .all(|(finding, (check, level, words))| {
                    let said = format!(
                        "{} {}",
                        finding.found,
                        finding.mend.as_deref().unwrap_or("")
                    );
                    finding.check == *check && finding.level == *level && said.contains(words)
                });
        if !as_told {
            wrong.push(format!("{}: {found:#?}", planted.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn each_check_has_a_fault_that_it_tells() {
    let told: Vec<&str> = PLANTED
        .iter()
        .flat_map(|planted| planted.says)
        .map(|(check, _, _)| *check)
        .collect();
    for check in OF_SOFTWARE {
        assert!(
            told.contains(&check.name) || check.name == presence::NAME,
            "{} has none",
            check.name
        );
    }
}

/// Without a GPU, or a card, that is said once, and nothing that follows from it.
#[test]
fn without_a_device_that_alone_is_told() {
    for (mut made, words) in [
        (made::no_gpu(), "no NVIDIA GPU"),
        (made::no_hca(), "no RDMA device"),
    ] {
        made.software();
        unload(&mut made);
        without_function(&mut made, REGISTER);
        made.file("/proc/self/limits", &limits("65536"));
        let found = findings(&made);
        assert_eq!(found.len(), 1, "{found:#?}");
        let finding = found.first().unwrap();
        assert_eq!((finding.check, finding.level), ("presence", Fault));
        assert!(finding.found.contains(words), "{finding:#?}");
    }
}

/// As it is after `rmmod ib_uverbs`, which takes the drivers of RDMA devices with it.
#[test]
fn without_ib_uverbs_its_modprobe_is_the_advice() {
    let mut made = made::no_hca();
    made.software();
    made.remove("/sys/module/ib_uverbs");
    let found = findings(&made);
    let mend = found.first().and_then(|finding| finding.mend.as_deref());
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(
        mend.is_some_and(|mend| mend.starts_with("`sudo modprobe ib_uverbs`")),
        "{found:#?}"
    );
}

#[test]
fn all_consumers_find_the_module_where_it_shows_itself() {
    let made = well();
    let machine = Machine::look(&made.recording).unwrap();
    let told = consumers::check(&Look::new(&made.recording, &machine));
    let not: Vec<&str> = told
        .iter()
        .filter(|finding| finding.found.contains("does not find it"))
        .map(|finding| finding.found.as_str())
        .collect();
    // Where OFED has peer memory in ib_uverbs it never does.
    assert!(
        matches!(not[..], [gpud] if gpud.starts_with("gpud:")),
        "{not:#?}"
    );
    assert_eq!(told.len(), 22);
}

/// Soft RoCE beside a real GPU moves no byte of its memory.
#[test]
fn soft_roce_alone_is_a_fault() {
    let mut made = made::soft_roce();
    made.software();
    let faults: Vec<Finding> = findings(&made)
        .into_iter()
        .filter(|finding| finding.level > Note)
        .collect();
    assert_eq!(faults.len(), 1, "{faults:#?}");
    let fault = faults.first().unwrap();
    assert_eq!((fault.check, fault.level), ("presence", Fault));
    assert!(fault.found.contains("software (rxe, siw)"), "{fault:#?}");
}

#[test]
fn the_test_rigs_machine_has_notes_alone() {
    // What the rig has not: NVML, a card, dma-buf.
    let mut made = made::soft_roce();
    let gpu = made.place("0000:01:00.0");
    for (file, text) in [
        ("vendor", "0x1af4"),
        ("device", "0x1110"),
        ("class", "0x050000"),
    ] {
        made.file(&format!("{gpu}/{file}"), &format!("{text}\n"));
    }
    made.software();
    made.recording.facts.remove(&Fact::Nvml);
    made.recording
        .unseen
        .insert("fact nvml".to_owned(), Unseen::Absent);
    let found = findings(&made);
    assert!(
        found.iter().all(|finding| finding.level <= Note),
        "{found:#?}"
    );
}
