// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Devices themselves: whose driver has them, and what they are.

use super::scan::{Check, Scan};
use super::software::netns;
use super::{data_direct, started};
use crate::finding::{Finding, Level, Subject};
use crate::machine::pci::{Address, Function};
use crate::machine::{Gpu, MELLANOX};
use crate::shell::argument;

pub(super) const GPU_DRIVER: Check = Check {
    name: "gpu-driver",
    about:
        "whether nvidia.ko has each GPU, and could start it: whether it answers, and NVML lists it",
    applies: |scan| scan.has_gpu(),
    run: gpu_driver,
};

pub(super) const NIC_DRIVER: Check = Check {
    name: "nic-driver",
    about: "InfiniBand and NVIDIA NICs that no driver makes an RDMA device of, and Data Direct functions",
    // One pair has its RDMA device.
    applies: |scan| scan.only.is_none() && scan.machine.functions.values().any(is_nic),
    run: nic_driver,
};

pub(super) const DEVICE_KIND: Check = Check {
    name: "device-kind",
    about: "GPUs that have no GPUDirect RDMA, virtual functions, and GPUs whose memory is the processor's (Grace)",
    applies: |scan| scan.has_gpu() || scan.has_hca(),
    run: device_kind,
};

pub(super) const NUMA: Check = Check {
    name: "numa",
    about: "whether the firmware says which NUMA node devices are near to",
    applies: |scan| scan.machine.nodes.is_some_and(|nodes| nodes > 1),
    run: numa,
};

fn gpu_driver(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for gpu in scan.gpus() {
        let Some(function) = scan.machine.functions.get(&gpu.at) else {
            continue;
        };
        let at = gpu.at;
        let new =
            |level, found: String| Finding::new(GPU_DRIVER.name, level, Subject::gpu(gpu), found);
        if function.is_silent() {
            findings.push(silent(GPU_DRIVER.name, Subject::gpu(gpu), at));
            continue;
        }
        findings.push(match function.driver.as_deref() {
            Some("nvidia") => started::unlisted(scan, GPU_DRIVER.name, gpu)
                .unwrap_or_else(|| new(Level::Ok, format!("nvidia.ko has {at}"))),
            Some("vfio-pci") => new(
                Level::Note,
                format!("{at} is given to a virtual machine (vfio-pci)"),
            )
            .why("It is that machine's to use; peermemctl tells there."),
            Some(other) => new(Level::Fault, format!("{at} has the driver {other}"))
                .why("nvidia.ko alone lends GPU memory to RDMA.")
                .fix(format!(
                    "Keep {0} from loading (blacklist {0} in /etc/modprobe.d), rebuild the initramfs, boot; \
                     then `modprobe nvidia`",
                    argument(other)
                )),
            // The check of BARs says what to do.
            None if !gpu.is_coherent && function.unassigned().next().is_some() => new(
                Level::Note,
                format!("{at} has no driver, and BARs without an address"),
            )
            .why("nvidia.ko takes no GPU whose BARs have no address."),
            None => new(Level::Fault, format!("{at} has no driver"))
                .why("nvidia.ko alone lends GPU memory to RDMA.")
                .fix("`modprobe nvidia`; `dmesg | grep NVRM` says why it does not take the GPU"),
        });
    }
    findings
}

/// Reports a device that PCI lists and that does not answer.
fn silent(check: &'static str, subject: Subject, at: Address) -> Finding {
    let found = format!("{at} does not answer: its config space reads as ones");
    Finding::new(check, Level::Fault, subject, found)
        .why("It has fallen off the bus, and is listed until the next boot. Nothing reaches it.")
        .fix(format!(
            "`dmesg | grep -e Xid -e {at}` says when it went; a cold boot, then its seating and power"
        ))
}

/// The class code of an InfiniBand controller.
const INFINIBAND: u32 = 0x0207;
/// And of an Ethernet one.
const ETHERNET: u32 = 0x0200;

fn is_nic(function: &Function) -> bool {
    match function.class >> 8 {
        _ if function.is_data_direct() => true,
        INFINIBAND => true,
        ETHERNET => function.vendor == MELLANOX,
        _ => false,
    }
}

fn nic_driver(scan: &Scan<'_>) -> Vec<Finding> {
    let is_known = |function: &Function| {
        let mut hcas = scan.machine.hcas.iter();
        hcas.any(|hca| hca.functions().contains(&function.at))
    };
    let mut findings = Vec::new();
    for function in scan.machine.functions.values().filter(|it| is_nic(it)) {
        if function.is_data_direct() {
            findings.extend(data_direct::driver(scan, function));
            continue;
        }
        if function.is_silent() {
            let mut hcas = scan.machine.hcas.iter();
            let own = hcas.find(|hca| hca.functions().contains(&function.at));
            let subject = own.map_or(Subject::Machine, Subject::hca);
            findings.push(silent(NIC_DRIVER.name, subject, function.at));
            continue;
        }
        // Virtual functions wait without a driver for whom they will be given to.
        if is_known(function) || function.physical.is_some() {
            continue;
        }
        let at = function.at;
        let new =
            |level, found: String| Finding::new(NIC_DRIVER.name, level, Subject::Machine, found);
        if netns::is_elsewhere(scan, at) {
            // Without any RDMA device the check of presence tells it.
            if !scan.machine.hcas.is_empty() {
                let found =
                    format!("the RDMA device of the NIC {at} is in another network namespace");
                findings.push(new(Level::Note, found).fix(netns::FIX));
            }
            continue;
        }
        findings.push(match function.driver.as_deref() {
            None if function.unassigned().next().is_some() => new(
                Level::Warning,
                format!("the NIC {at} has no driver, and BARs without an address"),
            )
            .why("Its driver takes no NIC whose BARs have no address. The firmware or the kernel found no room for them.")
            .fix(super::bar1::ROOM),
            None => new(
                Level::Warning,
                format!("the NIC {at} has no driver"),
            )
            .why("It is no RDMA device, and nothing can be registered with it.")
            .fix(
                "`modprobe mlx5_core` (its driver, if it is another's), and see the kernel's log",
            ),
            Some("vfio-pci") => new(
                Level::Note,
                format!("the NIC {at} is given to a virtual machine (vfio-pci)"),
            ),
            Some(driver) => new(
                Level::Note,
                format!("{driver} has the NIC {at}, and makes no RDMA device of it"),
            )
            .fix(match netns::loaded(scan).next() {
                // To load what is loaded changes nothing.
                Some(_) => format!("`devlink dev param show pci/{at} name enable_roce`"),
                None => format!(
                    "`modprobe mlx5_ib`; `devlink dev param show pci/{at} name enable_roce`"
                ),
            }),
        });
    }
    findings
}

/// Why GPUs of a kind have no GPUDirect RDMA.
pub(super) fn why_none(gpu: &Gpu) -> Option<&'static str> {
    let name = &gpu.name;
    if name.contains("GeForce") {
        return Some(
            "NVIDIA has it in GPUs for data centers and workstations alone. nvidia_peermem loads, and nvidia.ko refuses \
            each registration.",
        );
    }
    name.split_whitespace().any(|word| word == "GB10").then_some(
        "Devices cannot reach what CUDA allocates there coherently, and neither nvidia_peermem nor dma-buf works (NVIDIA \
        on its DGX Spark). Memory of cudaHostAlloc can be registered.",
    )
}

fn device_kind(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    // One for the display beside others that have it is no fault of the machine.
    let of_none = match scan.gpus().all(|gpu| why_none(gpu).is_some()) {
        true => Level::Fault,
        false => Level::Note,
    };
    for gpu in scan.gpus() {
        let function = scan.machine.functions.get(&gpu.at);
        let new =
            |found: String| Finding::new(DEVICE_KIND.name, Level::Note, Subject::gpu(gpu), found);
        if let Some(why) = why_none(gpu) {
            let found = format!("{} has no GPUDirect RDMA: {}", gpu.at, gpu.name);
            findings.push(
                Finding::new(DEVICE_KIND.name, of_none, Subject::gpu(gpu), found)
                    .why(why)
                    .fix("Copy through memory of the host, as NCCL does by itself (NCCL_NET_GDR_LEVEL=LOC asks for it)"),
            );
        }
        if gpu.is_coherent {
            // Where Data Direct reaches it, that is judged.
            let judged = match scan.pci_gpus().any(|it| it.at == gpu.at) {
                true => "The path to it is not a BAR behind bridges, but for Data Direct, whose path is judged.",
                false => "The path to it is not a BAR behind bridges, so the checks of paths say nothing.",
            };
            findings.push(
                new(format!("the memory of {} is coherent with the processor's (Grace)", gpu.at))
                    .why(format!(
                        "{judged} The persistent client takes such memory; a revocable one refuses what processors \
                         cache. NVIDIA recommends dma-buf (docs/dma-buf.md).",
                    )),
            );
        }
        if let Some(physical) = function.and_then(|function| function.physical) {
            findings.push(
                new(format!("{} is a virtual function of {physical}", gpu.at)).why(
                    "nv-p2p.h says that vGPUs have no persistent pins: persistent_api_support=0 where registrations \
                     are refused.",
                ),
            );
        }
    }
    for hca in scan.hcas().filter(|hca| !hca.is_software) {
        let function = hca.at.and_then(|at| scan.machine.functions.get(&at));
        if let Some(function) = function {
            if let Some(physical) = function.physical {
                findings.push(
                    Finding::new(
                        DEVICE_KIND.name,
                        Level::Note,
                        Subject::hca(hca),
                        format!("{} is a virtual function of {physical}", function.at),
                    )
                    .why("Its link, packets and order are the physical function's, and its bandwidth is shared."),
                );
            }
        }
    }
    findings
}

fn numa(scan: &Scan<'_>) -> Vec<Finding> {
    let (who, fix) = match scan.machine.is_virtual {
        Some(true) => (
            "hypervisor",
            "The virtual machine's settings: which NUMA node of the guest a device belongs to",
        ),
        _ => (
            "firmware",
            "An update of the firmware, or its setup (\"NUMA\", \"ACPI SRAT\")",
        ),
    };
    let new = |subject, at| {
        Finding::new(
            NUMA.name,
            Level::Note,
            subject,
            format!("the {who} does not say which NUMA node {at} is near to"),
        )
        .why("Whether a path stays within a processor cannot be told, by this program or by NCCL.")
        .fix(fix)
    };
    let is_unsaid = |at| {
        let function = scan.machine.functions.get(&at);
        function.is_some_and(|function| function.numa.is_none())
    };
    let gpus = scan.gpus().filter(|gpu| is_unsaid(gpu.at));
    let mut findings: Vec<Finding> = gpus.map(|gpu| new(Subject::gpu(gpu), gpu.at)).collect();
    for hca in scan.hcas() {
        if let Some(at) = hca.at.filter(|at| is_unsaid(*at)) {
            findings.push(new(Subject::hca(hca), at));
        }
    }
    findings
}
