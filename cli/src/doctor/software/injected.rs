// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Each check of software: silent where all is well, and one fault at a time injected.

use super::*;
use crate::doctor::scan::Scan;
use crate::finding::Level::{Fault, NotVisible, Note, Warning};
use crate::finding::{Finding, Level};
use crate::fixture::software::{driver, limits, module_files, newer_library, nvml, OURS};
use crate::fixture::Fixture;
use crate::host::{Fact, Unseen};
use crate::machine::Machine;
use crate::nvml::{Fabric, FabricState, Memory, Virtualization};
use crate::shipped::reason::Event;
use crate::software::files::{File, Files};
use crate::software::{MODULE, REGISTER};
use crate::{fixture, testing};

const DEBUG: &str = "/sys/kernel/debug/nvidia_peermem";
const PEERS: &str = "/sys/kernel/mm/memory_peers";

fn healthy() -> Fixture {
    let mut fixture = fixture::small();
    fixture.software();
    fixture
}

/// What the checks of software say, but for what is well.
fn findings(fixture: &Fixture) -> Vec<Finding> {
    let machine = Machine::scan(&fixture.recording).unwrap();
    let scan = Scan::new(&fixture.recording, &machine);
    let applying = OF_SOFTWARE.iter().filter(|check| (check.applies)(&scan));
    let all = applying.flat_map(|check| {
        let found = (check.run)(&scan);
        assert!(found.iter().all(|finding| finding.check == check.name));
        found
    });
    all.filter(|finding| finding.level != Level::Ok).collect()
}

/// As if the module had never been loaded.
fn unload(fixture: &mut Fixture) {
    fixture.remove(MODULE);
    fixture.remove(PEERS);
    fixture.remove(DEBUG);
    fixture.file(
        "/proc/modules",
        "ib_core 475136 0 - Live 0x0000000000000000 (OE)\n",
    );
}

/// NVIDIA's module in the place of ours, on a kernel where ib_core has no memory_peers.
fn nvidias(fixture: &mut Fixture, version: &str) {
    unload(fixture);
    fixture.file(&format!("{MODULE}/version"), &format!("{version}\n"));
    fixture.file(&format!("{MODULE}/refcnt"), "0\n");
    fixture.file(
        &format!("{MODULE}/parameters/persistent_api_support"),
        "1\n",
    );
    fixture.file(
        "/proc/modules",
        "nvidia_peermem 16384 0 - Live 0x0000000000000000 (OE)\n",
    );
    fixture.file(
        "/lib/modules/6.8.0-45-generic/modules.dep",
        "updates/dkms/nvidia-peermem.ko: updates/dkms/nvidia.ko\n",
    );
}

/// The file that modprobe would load, and what it says, changed; none is loaded.
fn with_files(fixture: &mut Fixture, module: &str, change: fn(&mut Files)) {
    unload(fixture);
    fixture.file(
        "/lib/modules/6.8.0-45-generic/modules.dep",
        &format!("{module}: updates/dkms/nvidia.ko\n"),
    );
    let mut files = module_files(module);
    change(&mut files);
    fixture.module_files(&files);
}

/// An NVSwitch on PCI.
fn nvswitch(fixture: &mut Fixture) {
    let place = "/sys/devices/pci0000:00/0000:07:00.0";
    fixture.link(
        "/sys/bus/pci/devices/0000:07:00.0",
        "../../../devices/pci0000:00/0000:07:00.0",
    );
    fixture.file(&format!("{place}/class"), "0x068000\n");
    fixture.file(&format!("{place}/vendor"), "0x10de\n");
    fixture.file(&format!("{place}/device"), "0x22a3\n");
}

const NVIDIAS: &str = "updates/dkms/nvidia-peermem.ko";
const OUR_FILE: &str = "updates/peermem-rs/nvidia_peermem.ko";

fn proprietary(fixture: &mut Fixture) {
    fixture.file(
        "/proc/driver/nvidia/version",
        &driver("x86_64 Kernel Module"),
    );
}

fn without_function(fixture: &mut Fixture, name: &str) {
    let symbols = fixture.recording.facts[&Fact::KernelSymbols].clone();
    let kept: Vec<&str> = symbols
        .lines()
        .filter(|line| !line.contains(name))
        .collect();
    fixture.fact(Fact::KernelSymbols, &kept.join("\n"));
}

/// A change of what NVML says of the first GPU.
fn gpu(fixture: &mut Fixture, change: fn(&mut crate::nvml::Gpu)) {
    let mut said = nvml(&fixture.recording);
    change(said.gpus.first_mut().unwrap());
    fixture.fact(Fact::Nvml, &serde_json::to_string(&said).unwrap());
}

fn log(fixture: &mut Fixture, lines: &[&str]) {
    let lines: Vec<String> = lines
        .iter()
        .enumerate()
        .map(|(index, line)| format!("3,{index},1000000{index},-;{line}"))
        .collect();
    fixture.fact(Fact::KernelLog, &lines.join("\n"));
}

fn refuse(fixture: &mut Fixture, last: u32, reason: &str) {
    fixture.file(
        &format!("{DEBUG}/refusals"),
        &format!(
            "seq=0 first=1.000001 last={last}.500000 times=2 mode=persistent step=acquire reason={reason} code=-12 \
             addr=0x7f0000000000 len=1048576 tgid=4711 pid=4712 comm=python3 text=\"as it is\"\n"
        ),
    );
}

/// A fault: what injects it, and all that must be said of it: checks, levels, and words of what was found or of how
/// to fix it.
struct Injected {
    name: &'static str,
    inject: fn(&mut Fixture),
    says: &'static [(&'static str, Level, &'static str)],
}

const INJECTED: &[Injected] = &[
    Injected {
        name: "installed and not loaded, and dma-buf works",
        inject: unload,
        says: &[("module", Warning, "sudo modprobe nvidia-peermem")],
    },
    Injected {
        name: "not loaded, and only what comes with the driver installed",
        inject: |fixture| {
            nvidias(fixture, "570.86.15");
            fixture.remove(MODULE);
        },
        says: &[("module", Note, "updates/dkms/nvidia-peermem.ko (NVIDIA's)")],
    },
    Injected {
        name: "not loaded, and there is no other way",
        inject: |fixture| {
            unload(fixture);
            without_function(fixture, "mlx5_ib_reg_user_mr_dmabuf");
        },
        says: &[(
            "module",
            Fault,
            "updates/peermem-rs/nvidia_peermem.ko (peermem-rs)",
        )],
    },
    Injected {
        name: "not loaded, and whether there is another way is not visible",
        inject: |fixture| {
            unload(fixture);
            fixture.deny("/proc/driver/nvidia/version");
            // All that is known of the driver is that it is there.
            fixture.file("/proc/driver/nvidia/version", "NVRM version: x\n");
        },
        says: &[
            ("module", Warning, "modprobe"),
            ("dma-buf", NotVisible, "nvidia.ko's flavour"),
        ],
    },
    Injected {
        name: "not loaded and not installed",
        inject: |fixture| {
            unload(fixture);
            fixture.file(
                "/lib/modules/6.8.0-45-generic/modules.dep",
                "updates/dkms/nvidia.ko:\n",
            );
        },
        says: &[("module", Note, "modprobe has no such module")],
    },
    Injected {
        name: "not loaded, since symbols differ",
        inject: |fixture| {
            unload(fixture);
            log(
                fixture,
                &[
                    "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
                    "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)",
                ],
            );
        },
        says: &[("module", Warning, "disagrees about version")],
    },
    Injected {
        name: "not loaded, since symbols differed before it was built again",
        inject: |fixture| {
            with_files(fixture, OUR_FILE, |_| ());
            log(fixture, &["nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client"]);
        },
        says: &[("module", Warning, "when it was tried last, the kernel's log said: nvidia_peermem: disagrees")],
    },
    Injected {
        name: "not loaded, since it is not signed",
        inject: |fixture| {
            unload(fixture);
            fixture.file(
                "/sys/kernel/security/lockdown",
                "none [integrity] confidentiality\n",
            );
        },
        says: &[("module", Warning, "Secure Boot")],
    },
    Injected {
        name: "NVIDIA's, built before OFED was installed",
        inject: |fixture| {
            with_files(fixture, NVIDIAS, |files| {
                files.module.needs.retain(|name, _| !name.contains("peer_memory"));
            });
        },
        says: &[("module", Note, "never calls ib_register_peer_memory_client")],
    },
    Injected {
        name: "ours, built against another OFED",
        inject: |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                for crc in files.others[0].exports.values_mut() {
                    *crc = Some(0x1234);
                }
            });
        },
        says: &[(
            "module",
            Warning,
            "another OFED: ib_register_peer_memory_client has the CRC 0x3b6d0a1c in it, and 0x00001234 in \
            updates/dkms/ib_uverbs.ko; 1 more differ",
        )],
    },
    Injected {
        name: "ours, built against another OFED, whose path has the vendor's name in it",
        inject: |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                files.others[0].path = "/lib/modules/6.8.0-45-nvidia/updates/dkms/ib_uverbs.ko".to_owned();
                files.others[0].exports.insert(REGISTER.to_owned(), Some(1));
            });
        },
        says: &[("module", Warning, "built against another OFED")],
    },
    Injected {
        name: "ours, built against another driver",
        inject: |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                files.others[1].exports.insert("nvidia_p2p_put_pages".to_owned(), Some(1));
            });
        },
        says: &[("module", Warning, "another driver: nvidia_p2p_put_pages has the CRC")],
    },
    Injected {
        name: "ours is loaded, and OFED was upgraded under its file",
        inject: |fixture| {
            let mut files = module_files(OUR_FILE);
            files.others[0].exports.insert(REGISTER.to_owned(), Some(1));
            fixture.module_files(&files);
        },
        says: &[("module", Warning, "would not load again: updates/peermem-rs/nvidia_peermem.ko was built against")],
    },
    Injected {
        name: "ours is loaded, and the driver was upgraded without a reboot",
        inject: |fixture| fixture.file("/sys/module/nvidia/srcversion", "F00D\n"),
        says: &[("module", Warning, "the nvidia that is loaded is not the one in updates/dkms/nvidia.ko")],
    },
    Injected {
        name: "of another kernel",
        inject: |fixture| {
            with_files(fixture, NVIDIAS, |files| {
                files.module.vermagic = Some("6.8.0-31-generic SMP mod_unload".to_owned());
                files.module.needs.values_mut().for_each(|crc| *crc = None);
            });
        },
        says: &[("module", Note, "built for Linux 6.8.0-31-generic, and 6.8.0-45-generic runs")],
    },
    Injected {
        name: "a symbol that the driver has not",
        inject: |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                files.others[1].exports.remove("nvidia_p2p_get_pages");
            });
        },
        says: &[("module", Warning, "calls nvidia_p2p_get_pages, and no module that is installed has it")],
    },
    Injected {
        name: "not signed, and the kernel asks for it",
        inject: |fixture| {
            with_files(fixture, OUR_FILE, |files| files.module.is_signed = false);
            fixture.file("/sys/module/module/parameters/sig_enforce", "Y\n");
        },
        says: &[("module", Warning, "is not signed, and this kernel takes signed modules alone")],
    },
    Injected {
        name: "a file that cannot be read",
        inject: |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                files.module = File {
                    path: OUR_FILE.to_owned(),
                    unread: Some("it is compressed (gzip): corrupt deflate stream".to_owned()),
                    ..File::default()
                };
            });
        },
        says: &[("module", Warning, "(peermem-rs), which cannot be read: it is compressed (gzip): ")],
    },
    Injected {
        name: "nv_peer_mem in its place",
        inject: |fixture| {
            unload(fixture);
            fixture.file("/sys/module/nv_peer_mem/version", "1.3-0\n");
        },
        says: &[("module", Warning, "rmmod nv_peer_mem")],
    },
    Injected {
        name: "nv_peer_mem beside it",
        inject: |fixture| fixture.file("/sys/module/nv_peer_mem/version", "1.3-0\n"),
        says: &[("module", Warning, "beside nvidia_peermem 595.45.04-rs1")],
    },
    Injected {
        name: "NVIDIA's of another driver",
        inject: |fixture| {
            nvidias(fixture, "550.54.14");
            fixture.file(&format!("{PEERS}/nv_mem/version"), "550.54.14\n");
        },
        says: &[(
            "module",
            Warning,
            "550.54.14 (NVIDIA's) is not of the driver that is loaded",
        )],
    },
    Injected {
        name: "an ib_core without peer memory",
        inject: |fixture| {
            unload(fixture);
            without_function(fixture, REGISTER);
        },
        says: &[("peer-memory", Warning, "DOCA-OFED")],
    },
    Injected {
        name: "an ib_core that may have peer memory in a module that is not loaded",
        inject: |fixture| {
            unload(fixture);
            without_function(fixture, REGISTER);
            fixture.remove("/sys/module/ib_uverbs");
        },
        says: &[("presence", Fault, "sudo modprobe ib_uverbs")],
    },
    Injected {
        name: "an ib_core with peer memory, and no ib_uverbs for programs",
        inject: |fixture| fixture.remove("/sys/module/ib_uverbs"),
        says: &[("presence", Fault, "sudo modprobe ib_uverbs")],
    },
    Injected {
        name: "an ib_core without peer memory, and no other way",
        inject: |fixture| {
            unload(fixture);
            without_function(fixture, REGISTER);
            without_function(fixture, "mlx5_ib_reg_user_mr_dmabuf");
        },
        says: &[("peer-memory", Fault, "no ib_register_peer_memory_client")],
    },
    Injected {
        name: "ours beside the proprietary driver",
        inject: |fixture| {
            unload(fixture);
            proprietary(fixture);
        },
        says: &[("nvidia-driver", Fault, "nvidia-open")],
    },
    Injected {
        name: "ours, built for the proprietary driver, beside it",
        inject: |fixture| {
            unload(fixture);
            proprietary(fixture);
            let mut files = module_files(OUR_FILE);
            files.module.driver_flavour = Some("proprietary".to_owned());
            fixture.module_files(&files);
        },
        // It would load.
        says: &[("module", Fault, "sudo modprobe nvidia-peermem")],
    },
    Injected {
        name: "ours in a file that cannot be read, beside the proprietary driver",
        inject: |fixture| {
            unload(fixture);
            proprietary(fixture);
            let mut files = module_files(OUR_FILE);
            files.module.unread = Some("it is no ELF file".to_owned());
            fixture.module_files(&files);
        },
        says: &[("module", Fault, "sudo modprobe nvidia-peermem")],
    },
    Injected {
        name: "ours loaded beside the proprietary driver, and the file that is installed is another build",
        inject: proprietary,
        says: &[("dma-buf", Note, "proprietary")],
    },
    Injected {
        name: "ours beside an old driver",
        inject: |fixture| {
            unload(fixture);
            let text = driver("Open Kernel Module for x86_64").replace("570.86.15", "525.60.13");
            fixture.file("/proc/driver/nvidia/version", &text);
        },
        says: &[("nvidia-driver", Fault, "driver 535")],
    },
    Injected {
        name: "NVIDIA's beside the proprietary driver",
        inject: |fixture| {
            nvidias(fixture, "570.86.15");
            fixture.file(&format!("{PEERS}/nv_mem/version"), "570.86.15\n");
            proprietary(fixture);
        },
        // It works; only dma-buf does not.
        says: &[("dma-buf", Note, "dma-buf takes the open one")],
    },
    Injected {
        name: "a library of another version",
        inject: newer_library,
        says: &[("nvidia-driver", Fault, "Driver/library version mismatch")],
    },
    Injected {
        name: "no library",
        inject: |fixture| {
            fixture.recording.facts.remove(&Fact::Nvml);
            fixture.recording
                .unseen
                .insert("fact nvml".to_owned(), Unseen::Absent);
        },
        says: &[("nvidia-driver", NotVisible, "libnvidia-ml.so.1")],
    },
    Injected {
        name: "another stack's memory_peers",
        inject: |fixture| {
            fixture.remove(&format!("{PEERS}/nv_mem"));
            fixture.directory(&format!("{PEERS}/other"));
        },
        says: &[(
            "clients",
            Warning,
            "does not show its client nv_mem (there: other)",
        )],
    },
    Injected {
        name: "another module's nv_mem",
        inject: |fixture| fixture.file(&format!("{PEERS}/nv_mem/version"), "1.3-0\n"),
        says: &[("clients", Warning, "nv_mem is version 1.3-0")],
    },
    Injected {
        name: "revocable registrations",
        inject: |fixture| {
            fixture.file(
                &format!("{MODULE}/parameters/persistent_api_support"),
                "0\n",
            );
            fixture.file(&format!("{PEERS}/nv_mem_nc/version"), OURS);
        },
        says: &[("clients", Note, "persistent_api_support=0")],
    },
    Injected {
        name: "revocable registrations, and the second client is not there",
        inject: |fixture| {
            fixture.file(
                &format!("{MODULE}/parameters/persistent_api_support"),
                "0\n",
            );
        },
        says: &[
            ("clients", Note, "persistent_api_support=0"),
            ("clients", Warning, "does not show its client nv_mem_nc"),
        ],
    },
    Injected {
        name: "memory_peers turned off",
        inject: |fixture| {
            fixture.remove(PEERS);
            fixture.file(&format!("{MODULE}/parameters/memory_peers"), "N\n");
        },
        says: &[("consumers", Note, "memory_peers=1")],
    },
    Injected {
        name: "no memory_peers of the build for the proprietary driver",
        inject: |fixture| {
            fixture.remove(PEERS);
            fixture.remove(&format!("{MODULE}/parameters/memory_peers"));
        },
        says: &[("consumers", Note, "nvidia-open")],
    },
    Injected {
        name: "NVIDIA's module on a kernel without memory_peers, and no dma-buf",
        inject: |fixture| {
            nvidias(fixture, "570.86.15");
            proprietary(fixture);
        },
        says: &[
            ("consumers", Warning, "NCCL to 2.22"),
            ("dma-buf", Note, "does not work here"),
        ],
    },
    Injected {
        name: "MIG",
        inject: |fixture| gpu(fixture, |gpu| gpu.mig = Some(true)),
        says: &[("gpu-mode", Note, "MIG is on")],
    },
    Injected {
        name: "a virtual GPU",
        inject: |fixture| gpu(fixture, |gpu| gpu.virtualization = Some(Virtualization::Vgpu)),
        says: &[("gpu-mode", Note, "virtual GPU")],
    },
    Injected {
        name: "no persistence mode",
        inject: |fixture| gpu(fixture, |gpu| gpu.persistence_mode = Some(false)),
        says: &[("gpu-mode", Note, "nvidia-persistenced")],
    },
    Injected {
        name: "BAR1 nearly full",
        inject: |fixture| {
            gpu(fixture, |gpu| {
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
    Injected {
        name: "a shell that may lock little",
        inject: |fixture| {
            fixture.file("/proc/self/limits", &limits("8388608"));
            fixture.file(
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
    Injected {
        name: "a batch system that may lock little",
        inject: |fixture| {
            fixture.fact(
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
    Injected {
        name: "containers that may lock little",
        inject: |fixture| fixture.fact(Fact::Services, "containerd 900 65536 8388608\n"),
        says: &[("memlock", Note, "--ulimit memlock=-1")],
    },
    Injected {
        name: "a cgroup at its limit",
        inject: |fixture| {
            let folder = "/sys/fs/cgroup/user.slice";
            fixture.file(
                &format!("{folder}/rdma.max"),
                "mlx5_0 hca_handle=4 hca_object=2000\n",
            );
            fixture.file(
                &format!("{folder}/rdma.current"),
                "mlx5_0 hca_handle=1 hca_object=1900\n",
            );
        },
        says: &[("rdma-cgroup", Warning, "1900 RDMA objects of 2000")],
    },
    Injected {
        name: "a refusal of late that lies in the machine",
        inject: |fixture| refuse(fixture, 3590, "no_room"),
        says: &[(
            "refusals",
            Warning,
            "refused 2 times, last 10 s ago, to python3: no_room",
        )],
    },
    Injected {
        name: "the same of long ago",
        inject: |fixture| {
            fixture.fact(Fact::Monotonic, "90000.0");
            refuse(fixture, 3590, "no_room");
        },
        says: &[("refusals", Note, "last 24 h ago")],
    },
    Injected {
        name: "a refusal that lies in what was asked for",
        inject: |fixture| refuse(fixture, 3590, "not_gpu_memory"),
        says: &[("refusals", Note, "not_gpu_memory")],
    },
    Injected {
        name: "a refusal after which the other client is asked",
        inject: |fixture| refuse(fixture, 3590, "not_in_bar"),
        says: &[],
    },
    Injected {
        name: "a refusal of memory with struct pages, after which the other client is asked",
        inject: |fixture| refuse(fixture, 3590, "has_struct_pages"),
        says: &[],
    },
    Injected {
        name: "memory that is lost",
        inject: |fixture| fixture.file(&format!("{DEBUG}/counters"), "event=leaked count=3\n"),
        says: &[("refusals", Warning, "leaked: 3")],
    },
    Injected {
        name: "memory that its process has freed, and a registration that holds it",
        inject: |fixture| {
            fixture.file(&format!("{DEBUG}/version"), "format=3 module=1\n");
            fixture.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=mapped addr=0x10000 len=131072 tgid=77\nid=2 state=revoked addr=0x90000 len=65536 tgid=77\n\
                id=3 state=pinned addr=0x40000 len=65536 tgid=77\nid=4 state=mapped addr=0x40000 len=65536 tgid=78\n",
            );
            fixture.file("/proc/77/status", "Name:\tx\n");
            fixture.file("/proc/77/maps", "10000-20000 ---p 00000000 00:00 0 \n40000-50000 ---p 00000000 00:00 0 \n");
        },
        says: &[(
            "refusals",
            Note,
            "1 registration is of memory that the process has freed, 64 KiB in all",
        )],
    },
    Injected {
        name: "a GPU that is gone, and its callbacks with it",
        inject: |fixture| {
            fixture.file(&format!("{DEBUG}/version"), "format=3 module=1\n");
            fixture.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=orphaned gpus=0000:f9:00.0\nid=2 state=orphaned gpus=0000:19:00.0,0000:f9:00.0\n\
                id=3 state=mapped gpus=0000:9a:00.0\nid=4 state=orphaned gpus=-\n",
            );
        },
        says: &[(
            "refusals",
            Warning,
            "2 registrations wait for their callbacks from GPU 0000:f9:00.0, which is gone from PCI",
        )],
    },
    Injected {
        name: "a GPU that has fallen off the bus, with a registration that waits for it",
        inject: |fixture| {
            let config = format!("{}/config", fixture.place("0000:19:00.0"));
            fixture.bytes(&config, &[0xff; 64]);
            fixture.file(&format!("{DEBUG}/version"), "format=3 module=1\n");
            fixture.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=orphaned gpus=0000:19:00.0\nid=2 state=mapped gpus=0000:19:00.0\n",
            );
        },
        says: &[(
            "refusals",
            Warning,
            "1 registration waits for its callback from GPU 0000:19:00.0, which has fallen off the bus",
        )],
    },
    Injected {
        name: "files that only root reads",
        inject: |fixture| {
            fixture.remove("/sys/kernel/debug");
            fixture.deny("/sys/kernel/debug");
        },
        says: &[("refusals", NotVisible, "not visible without root")],
    },
    Injected {
        name: "an IOMMU that stops the NIC",
        inject: |fixture| {
            log(
                fixture,
                &["DMAR: [DMA Write NO_PASID] Request device [0000:18:00.0] fault addr 0x3f8000000000 [fault reason \
                0x05] PTE Write access is not set"],
            );
        },
        says: &[("kernel-log", Warning, "once 10 s after boot: DMAR:")],
    },
    Injected {
        name: "an IOMMU that stops somebody else",
        inject: |fixture| {
            log(
                fixture,
                &["DMAR: [DMA Write NO_PASID] Request device [0000:f9:00.0] fault addr 0x3f8000000000 [fault reason \
                0x05] x"],
            );
        },
        says: &[],
    },
    Injected {
        name: "a GPU that fell off the bus",
        inject: |fixture| {
            log(
                fixture,
                &["NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."],
            );
        },
        says: &[("kernel-log", Fault, "Xid")],
    },
    Injected {
        name: "device files that are not there",
        inject: |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 absent"),
        says: &[("verbs", Fault, "/dev/infiniband/uverbs0 is not there")],
    },
    Injected {
        name: "a container whose rules forbid the device file",
        inject: |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 denied"),
        says: &[("verbs", Fault, "root may not open /dev/infiniband/uverbs0")],
    },
    Injected {
        name: "a user who may not open the device file",
        inject: |fixture| {
            fixture.fact(Fact::User, "1000");
            fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 denied");
        },
        says: &[("verbs", Warning, "this user may not open")],
    },
    Injected {
        name: "a device file of a device that is gone",
        inject: |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 failed No such device (os error 19)"),
        says: &[("verbs", Fault, "cannot be opened: No such device")],
    },
    Injected {
        name: "an RDMA device without a device file",
        inject: |fixture| fixture.fact(Fact::Verbs, "mlx5_7 uverbs0 ok"),
        says: &[("verbs", Fault, "mlx5_0 has no device file")],
    },
    Injected {
        name: "device files that can be opened",
        inject: |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 ok"),
        says: &[],
    },
    Injected {
        name: "device files that an observer does not have",
        inject: |fixture| {
            let why = Unseen::Failed("not in this container".to_owned());
            fixture.recording.unseen.insert("fact verbs".to_owned(), why);
        },
        says: &[("verbs", NotVisible, "not in this container")],
    },
    Injected {
        name: "a fabric that nobody has set up",
        inject: |fixture| {
            gpu(fixture, |gpu| {
                gpu.fabric = Some(Fabric {
                    state: FabricState::NotStarted,
                    status: 0,
                });
            });
            fixture.fact(Fact::FabricManager, "not running");
        },
        says: &[(
            "fabric",
            Fault,
            "the NVLink fabric is not set up; nv-fabricmanager does not run",
        )],
    },
    Injected {
        name: "a fabric that could not be set up",
        inject: |fixture| {
            gpu(fixture, |gpu| {
                gpu.fabric = Some(Fabric {
                    state: FabricState::Completed,
                    status: 999,
                });
            });
        },
        says: &[("fabric", Fault, "could not be set up (NVML: error 999)")],
    },
    Injected {
        name: "a fabric that is set up",
        inject: |fixture| {
            gpu(fixture, |gpu| {
                gpu.fabric = Some(Fabric {
                    state: FabricState::Completed,
                    status: 0,
                });
            });
            // The switches are another machine's.
            fixture.fact(Fact::FabricManager, "not running");
        },
        says: &[],
    },
    Injected {
        name: "NVSwitches without a fabric manager, before Hopper",
        inject: |fixture| {
            nvswitch(fixture);
            fixture.fact(Fact::FabricManager, "not running");
        },
        says: &[("fabric", Fault, "1 NVSwitches, and nv-fabricmanager does not run")],
    },
    Injected {
        name: "NVSwitches with a fabric manager",
        inject: |fixture| {
            nvswitch(fixture);
            fixture.fact(Fact::FabricManager, "running");
        },
        says: &[],
    },
    Injected {
        name: "no NVSwitches and no fabric manager",
        inject: |fixture| fixture.fact(Fact::FabricManager, "not running"),
        says: &[],
    },
    Injected {
        name: "a driver without PeerMappingOverride",
        inject: |fixture| fixture.file("/proc/driver/nvidia/params", "RegistryDwords: \"\"\n"),
        says: &[("ibgda", Note, "NVreg_RegistryDwords=\"PeerMappingOverride=1;\"")],
    },
    Injected {
        name: "a driver with PeerMappingOverride",
        inject: |fixture| {
            fixture.file(
                "/proc/driver/nvidia/params",
                "RegistryDwords: \"PeerMappingOverride=1;\"\n",
            );
        },
        says: &[],
    },
    Injected {
        name: "GPUs that need a reset or a reboot",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "NVRM: Xid (PCI:0000:19:00): 48, pid=7, An uncorrectable double bit error (DBE) has been detected",
                    "NVRM: Xid (PCI:0000:19:00): 45, pid=7, Ch 00000008",
                    "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot \
                    Required)",
                ],
            );
        },
        says: &[(
            "kernel-log",
            Fault,
            "once 10 s after boot: NVRM: Xid (PCI:0000:19:00): 48, pid=7, An uncorrectable double bit error (DBE) has been \
            detected; also Xid 154 (the GPU needs a reboot of the machine)",
        )],
    },
    Injected {
        name: "a GPU that was reset",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "NVRM: Xid (PCI:0000:19:00): 119, pid=7, Timeout after 45s of waiting for RPC response from GPU0 GSP!",
                    "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset \
                    Required)",
                    "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 \
                    (None)",
                ],
            );
        },
        says: &[],
    },
    Injected {
        name: "Xids of applications",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "NVRM: Xid (PCI:0000:19:00): 13, pid=7, Graphics SM Warp Exception on (GPC 7, TPC 0, SM 0)",
                    "NVRM: Xid (PCI:0000:19:00): 43, pid=7, Ch 00000008",
                    "NVRM: Xid (PCI:0000:19:00): 94, pid=7, Contained: CE User Channel (0x9)",
                ],
            );
        },
        says: &[],
    },
    Injected {
        name: "an NVLink with errors",
        inject: |fixture| {
            log(fixture, &["NVRM: Xid (PCI:0000:19:00): 74, pid='<unknown>', NVLink: fatal error detected on link 6"]);
        },
        says: &[("kernel-log", Warning, "nvidia-smi nvlink -e")],
    },
    Injected {
        name: "an NVLink of Blackwell with a fatal error",
        inject: |fixture| {
            log(fixture, &["NVRM: Xid (PCI:0000:19:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)"]);
        },
        says: &[("kernel-log", Fault, "nvidia-smi --gpu-reset -i 0000:19:00.0")],
    },
    Injected {
        name: "an Xid that nobody knows",
        inject: |fixture| log(fixture, &["NVRM: Xid (PCI:0000:19:00): 999, pid=7, x"]),
        says: &[("kernel-log", Warning, "Xid catalog")],
    },
    Injected {
        name: "a GPU that is gone from PCI",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "NVRM: Xid (PCI:0000:f9:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                    "NVRM: GPU 0000:f9:00.0: GPU has fallen off the bus.",
                ],
            );
        },
        says: &[("kernel-log", Fault, "once 10 s after boot: NVRM: Xid (PCI:0000:f9:00): 79")],
    },
    Injected {
        name: "a GPU that is off the bus, by the driver's plain words",
        inject: |fixture| log(fixture, &["NVRM: GPU 0000:19:00.0: GPU has fallen off the bus."]),
        says: &[("kernel-log", Fault, "power, seating, cooling")],
    },
    Injected {
        name: "a crash of ib_core's",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "BUG: kernel NULL pointer dereference, address: 0000000000000008",
                    "Oops: 0000 [#1] PREEMPT SMP NOPTI",
                    "RIP: 0010:ib_umem_release+0x51/0x3a0 [ib_core]",
                ],
            );
        },
        says: &[("kernel-log", Fault, "10 s after boot: BUG: kernel NULL pointer")],
    },
    Injected {
        name: "a crash of somebody else's",
        inject: |fixture| {
            log(
                fixture,
                &["Oops: 0000 [#1] PREEMPT SMP NOPTI", "RIP: 0010:nvme_queue_rq+0x51/0x3a0 [nvme]"],
            );
        },
        says: &[],
    },
    Injected {
        name: "a link that went down",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "pcieport 0000:17:00.0: DPC: containment event, status:0x1f01 source:0x0000",
                    "pcieport 0000:17:00.0: pciehp: Slot(12): Link Down",
                    "pcieport 0000:17:00.0: pciehp: Slot(12): Card not present",
                ],
            );
        },
        says: &[("kernel-log", Fault, "once 10 s after boot: pcieport 0000:17:00.0: DPC: containment event")],
    },
    Injected {
        name: "a link that went down and came up again",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "pcieport 0000:17:00.0: pciehp: Slot(12): Link Down",
                    "pcieport 0000:17:00.0: pciehp: Slot(12): Link Up",
                ],
            );
        },
        says: &[("kernel-log", Warning, "Slot(12): Link Down")],
    },
    Injected {
        name: "a link of another device that went down",
        inject: |fixture| log(fixture, &["pcieport 0000:f9:00.0: pciehp: Slot(12): Link Down"]),
        says: &[],
    },
    Injected {
        name: "a device that was taken out",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "pcieport 0000:17:00.0: pciehp: Slot(12): Powering off due to button press",
                    "pcieport 0000:17:00.0: pciehp: Slot(12): Card not present",
                ],
            );
        },
        says: &[],
    },
    Injected {
        name: "commands that the NIC refuses",
        inject: |fixture| {
            let line = "mlx5_core 0000:18:00.0: mlx5_cmd_out_err:838:(pid 4711): CREATE_MKEY(0x200) op_mod(0x0) failed, \
                status bad resource(0x5), syndrome (0x5fa1c), err(-22)";
            log(fixture, &[line, line]);
        },
        says: &[("kernel-log", Warning, "2 times, the last")],
    },
    Injected {
        name: "registers that a NIC does not tell exporters",
        inject: |fixture| {
            log(fixture, &["mlx5_core 0000:18:00.0: mlx5_cmd_out_err:838:(pid 268): ACCESS_REG(0x805) op_mod(0x1) failed, \
                status bad resource(0x5), syndrome (0x305684), err(-22)"]);
        },
        says: &[],
    },
    Injected {
        name: "a command that the NIC never answered",
        inject: |fixture| {
            log(fixture, &["mlx5_core 0000:18:00.0: wait_func:1151:(pid 4711): CREATE_MKEY(0x200) timeout. Will cause a \
                leak of a command resource"]);
        },
        says: &[("kernel-log", Warning, "mlxfwmanager")],
    },
    Injected {
        name: "a NIC that is gone from PCI",
        inject: |fixture| {
            log(fixture, &["mlx5_core 0000:f9:00.0: poll_health:819:(pid 0): device's health compromised - reached miss \
                count"]);
        },
        says: &[("kernel-log", Warning, "0000:f9:00.0: poll_health")],
    },
    Injected {
        name: "a BAR of the NIC without a place",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "pci 0000:18:00.0: BAR 0 [mem size 0x02000000 64bit pref]: can't assign; no space",
                    "pci 0000:18:00.0: BAR 0 [mem size 0x02000000 64bit pref]: failed to assign",
                ],
            );
        },
        says: &[("kernel-log", Fault, "2 times, the last 10 s after boot: pci 0000:18:00.0: BAR 0")],
    },
    Injected {
        name: "a BAR that found a place at the second try",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "pci 0000:19:00.0: BAR 2: no space for [mem size 0x2000000000 64bit pref]",
                    "pci 0000:19:00.0: BAR 2: failed to assign [mem size 0x2000000000 64bit pref]",
                    "pci 0000:19:00.0: BAR 2: assigned [mem 0x3a0000000000-0x3a1fffffffff 64bit pref]",
                    "pci 0000:19:00.0: BAR 6: no space for [mem size 0x00080000 pref]",
                ],
            );
        },
        says: &[],
    },
    Injected {
        name: "NVSwitches with a fatal error",
        inject: |fixture| {
            log(
                fixture,
                &[
                    "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 12 LTSSM Fault Up",
                    "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 12 Sub-engine instance 00",
                ],
            );
        },
        says: &[("kernel-log", Fault, "once 10 s after boot: nvidia-nvswitch0: SXid")],
    },
    Injected {
        name: "NVSwitches with an error that is none",
        inject: |fixture| {
            log(
                fixture,
                &["nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error"],
            );
        },
        says: &[],
    },
    Injected {
        name: "packets sent again on the path",
        inject: |fixture| {
            let line =
                "pcieport 0000:16:00.0: AER: Corrected error message received from 0000:17:01.0";
            log(fixture, &[line, line]);
        },
        says: &[("kernel-log", Note, "2 times, the last")],
    },
    Injected {
        name: "packets lost on the path",
        inject: |fixture| {
            log(fixture, &["pcieport 0000:15:01.0: AER: Uncorrectable (Non-Fatal) error message received from \
            0000:18:00.0"]);
        },
        says: &[("kernel-log", Warning, "Uncorrectable")],
    },
    Injected {
        name: "firmware in trouble",
        inject: |fixture| {
            log(fixture, &["mlx5_core 0000:18:00.0: poll_health:819:(pid 0): device's health compromised - reached miss \
            count"]);
        },
        says: &[("kernel-log", Warning, "mlxfwmanager")],
    },
    Injected {
        name: "BAR1 without an address",
        inject: |fixture| log(fixture, &["NVRM: BAR1 is 0M @ 0x0 (PCI:0000:19:00.0)"]),
        says: &[("kernel-log", Fault, "Above 4G Decoding")],
    },
    Injected {
        name: "memory that is lost, by the log alone",
        inject: |fixture| {
            let message = Event::ALL[Event::Leaked as usize].message;
            let line = format!("nvidia-peermem: GPU memory 0x7f0000000000+0x10000: {message}");
            log(fixture, &[line.as_str()]);
            fixture.remove(DEBUG);
        },
        says: &[
            ("refusals", NotVisible, "nvidia_peermem"),
            ("kernel-log", Warning, "is lost until"),
        ],
    },
    Injected {
        name: "NVIDIA's module met freed memory",
        inject: |fixture| {
            log(fixture, &["nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further \
            processing"]);
        },
        says: &[("kernel-log", Warning, "driver 560")],
    },
    Injected {
        name: "a module that loaded after it did not",
        inject: |fixture| {
            log(
                fixture,
                &["nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)"],
            );
        },
        says: &[],
    },
    Injected {
        name: "a log that only root reads",
        inject: |fixture| {
            fixture.recording.facts.remove(&Fact::KernelLog);
            fixture.recording
                .unseen
                .insert("fact kernel_log".to_owned(), Unseen::Denied);
        },
        says: &[("kernel-log", NotVisible, "not visible without root")],
    },
    Injected {
        name: "nothing that loads it at boot, with openibd",
        inject: |fixture| {
            fixture.directory("/etc/systemd/system/multi-user.target.wants");
            fixture.file("/usr/lib/systemd/system/openibd.service", "[Service]\n");
        },
        says: &[
            ("module-at-boot", Note, "at boot"),
            ("module-at-boot", Note, "openibd is here"),
        ],
    },
    Injected {
        name: "a service that loads it, with openibd",
        inject: |fixture| {
            for target in ["multi-user.target", "openibd.service"] {
                fixture.link(
                    &format!("/etc/systemd/system/{target}.wants/peermem-rs.service"),
                    "../peermem-rs.service",
                );
            }
            fixture.file("/usr/lib/systemd/system/openibd.service", "[Service]\n");
        },
        says: &[],
    },
];

#[test]
fn a_machine_that_is_well_is_told_nothing() {
    assert_eq!(findings(&healthy()), []);
    let mut hgx = fixture::hgx();
    hgx.software();
    assert_eq!(findings(&hgx), []);
}

#[test]
fn each_fault_is_told_and_nothing_else() {
    let mut wrong = Vec::new();
    for injected in INJECTED {
        let mut fixture = healthy();
        (injected.inject)(&mut fixture);
        let found = findings(&fixture);
        // The module's table has its own words for logs, too.
        let own = found
            .iter()
            .filter(|finding| finding.check != refusals::NAME);
        own.for_each(testing::commands_are_marked);
        let as_told = found.len() == injected.says.len()
            && found
                .iter()
                .zip(injected.says)
                .all(|(finding, (check, level, words))| {
                    let said =
                        format!("{} {}", finding.found, finding.fix.as_deref().unwrap_or(""));
                    finding.check == *check && finding.level == *level && said.contains(words)
                });
        if !as_told {
            wrong.push(format!("{}: {found:#?}", injected.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn each_check_has_a_fault_that_it_tells() {
    let reported: Vec<&str> = INJECTED
        .iter()
        .flat_map(|injected| injected.says)
        .map(|(check, _, _)| *check)
        .collect();
    for check in OF_SOFTWARE {
        assert!(
            reported.contains(&check.name) || check.name == presence::NAME,
            "{} has none",
            check.name
        );
    }
}

/// Without a GPU, or a NIC, that is said once, and nothing that follows from it.
#[test]
fn without_a_device_that_alone_is_told() {
    for (mut fixture, words) in [
        (fixture::no_gpu(), "no NVIDIA GPU"),
        (fixture::no_hca(), "no RDMA device"),
    ] {
        fixture.software();
        unload(&mut fixture);
        without_function(&mut fixture, REGISTER);
        fixture.file("/proc/self/limits", &limits("65536"));
        let found = findings(&fixture);
        assert_eq!(found.len(), 1, "{found:#?}");
        let finding = found.first().unwrap();
        assert_eq!((finding.check, finding.level), ("presence", Fault));
        assert!(finding.found.contains(words), "{finding:#?}");
    }
}

/// Neither OFED nor the module would help there, and dma-buf does not work either.
#[test]
fn gpus_without_gpudirect_rdma_lack_no_software() {
    for name in ["NVIDIA GB10", "NVIDIA GeForce RTX 5090"] {
        let mut fixture = healthy();
        fixture.gpu("0000:19:00.0", name);
        unload(&mut fixture);
        assert_eq!(findings(&fixture), [], "{name}");
        without_function(&mut fixture, REGISTER);
        assert_eq!(findings(&fixture), [], "{name}");
    }
}

/// As it is after `rmmod ib_uverbs`, which takes the drivers of RDMA devices with it.
#[test]
fn without_ib_uverbs_its_modprobe_is_the_advice() {
    let mut fixture = fixture::no_hca();
    fixture.software();
    fixture.remove("/sys/module/ib_uverbs");
    let found = findings(&fixture);
    let fix = found.first().and_then(|finding| finding.fix.as_deref());
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(
        fix.is_some_and(|fix| fix.starts_with("`sudo modprobe ib_uverbs`")),
        "{found:#?}"
    );
}

#[test]
fn all_consumers_find_the_module_where_it_shows_itself() {
    let fixture = healthy();
    let machine = Machine::scan(&fixture.recording).unwrap();
    let reported = consumers::check(&Scan::new(&fixture.recording, &machine));
    let not: Vec<&str> = reported
        .iter()
        .filter(|finding| finding.found.contains("does not find it"))
        .map(|finding| finding.found.as_str())
        .collect();
    // Where OFED has peer memory in ib_uverbs it never does.
    assert!(
        matches!(not[..], [gpud] if gpud.starts_with("gpud:")),
        "{not:#?}"
    );
    assert_eq!(reported.len(), 22);
}

/// Soft RoCE beside a real GPU moves no byte of its memory.
#[test]
fn soft_roce_alone_is_a_fault() {
    let mut fixture = fixture::soft_roce();
    fixture.software();
    let faults: Vec<Finding> = findings(&fixture)
        .into_iter()
        .filter(|finding| finding.level > Note)
        .collect();
    assert_eq!(faults.len(), 1, "{faults:#?}");
    let fault = faults.first().unwrap();
    assert_eq!((fault.check, fault.level), ("presence", Fault));
    assert!(fault.found.contains("software (rxe, siw)"), "{fault:#?}");
}

#[test]
fn the_test_vms_machine_has_notes_alone() {
    // What the test VM has not: NVML, a NIC, dma-buf.
    let mut fixture = fixture::soft_roce();
    let gpu = fixture.place("0000:01:00.0");
    for (file, text) in [
        ("vendor", "0x1af4"),
        ("device", "0x1110"),
        ("class", "0x050000"),
    ] {
        fixture.file(&format!("{gpu}/{file}"), &format!("{text}\n"));
    }
    fixture.software();
    fixture.recording.facts.remove(&Fact::Nvml);
    fixture
        .recording
        .unseen
        .insert("fact nvml".to_owned(), Unseen::Absent);
    let found = findings(&fixture);
    assert!(
        found.iter().all(|finding| finding.level <= Note),
        "{found:#?}"
    );
}
