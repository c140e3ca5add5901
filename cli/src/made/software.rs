// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The software of a machine that is well: peermem-rs on Ubuntu's kernel 6.8 with OFED and the open driver, by the
//! formats of procfs and sysfs, and what NVML would say of its GPUs.

use super::Made;
use crate::host::recording::Recording;
use crate::host::Fact;
use crate::machine::Machine;
use crate::nvml::Gpu;
use crate::nvml::Memory;
use crate::nvml::Nvml;
use crate::nvml::Virtualization;
use crate::software::MODULE;

pub(crate) const DRIVER: &str = "570.86.15";
pub(crate) const OURS: &str = "595.45.04-rs1";

/// `/proc/driver/nvidia/version`.
pub(crate) fn driver(flavour: &str) -> String {
    format!(
        "NVRM version: NVIDIA UNIX {flavour}  {DRIVER}  Release Build  (dvs-builder@U16-I3-C03-17-1)\n\
         GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"
    )
}

/// `/proc/PID/limits`, as far as it matters.
pub(crate) fn limits(locked: &str) -> String {
    format!(
        "Limit                     Soft Limit           Hard Limit           Units     \n\
         Max processes             1030000              1030000              processes \n\
         Max open files            1024                 1048576              files     \n\
         Max locked memory         {locked:<20} {locked:<20} bytes     \n"
    )
}

/// What NVML says of a recording's GPUs.
pub(crate) fn nvml(recording: &Recording) -> Nvml {
    let gpus = Machine::look(recording).unwrap().gpus;
    Nvml {
        driver: Some(DRIVER.to_owned()),
        error: None,
        gpus: gpus
            .iter()
            .map(|gpu| {
                let total = gpu.bar1.map_or(0, |bar| bar.size);
                Gpu {
                    at: gpu.at.to_string(),
                    name: None,
                    bar1: Some(Memory {
                        total_bytes: total,
                        free_bytes: total - (2 << 20),
                        used_bytes: 2 << 20,
                    }),
                    memory_total_bytes: Some(match gpu.name.contains("GeForce") {
                        true => 24 << 30,
                        false => 80 << 30,
                    }),
                    persistence_mode: Some(true),
                    mig: Some(false),
                    virtualization: Some(Virtualization::None),
                    performance_state: Some(0),
                    utilization_percent: Some(0),
                }
            })
            .collect(),
    }
}

impl Made {
    /// With software that is well, after its devices.
    pub(crate) fn software(&mut self) {
        self.file("/proc/sys/kernel/osrelease", "6.8.0-45-generic\n");
        self.file(
            "/lib/modules/6.8.0-45-generic/modules.dep",
            "updates/peermem-rs/nvidia_peermem.ko: updates/dkms/nvidia.ko updates/dkms/ib_uverbs.ko\n\
             updates/dkms/nvidia.ko:\n",
        );
        self.file(
            "/proc/modules",
            "nvidia_peermem 98304 0 - Live 0x0000000000000000 (OE)\n\
             nvidia 11550720 110 nvidia_peermem, Live 0x0000000000000000 (OE)\n\
             mlx5_ib 458752 0 - Live 0x0000000000000000 (OE)\n\
             ib_uverbs 163840 2 nvidia_peermem,mlx5_ib, Live 0x0000000000000000 (OE)\n\
             ib_core 475136 2 mlx5_ib,ib_uverbs, Live 0x0000000000000000 (OE)\n",
        );
        self.fact(
            Fact::KernelSymbols,
            "T ib_register_peer_memory_client [ib_uverbs]\nT ib_umem_dmabuf_get [ib_uverbs]\n\
             T mlx5_ib_reg_user_mr_dmabuf [mlx5_ib]\nT nvidia_p2p_get_pages [nvidia]\n\
             T nvidia_p2p_get_pages_persistent [nvidia]\n",
        );
        self.fact(Fact::Services, "slurmd 2201 unlimited unlimited\n");
        self.file("/sys/module/ib_uverbs/version", "24.10-0.7.0\n");
        self.file(
            "/proc/driver/nvidia/version",
            &driver("Open Kernel Module for x86_64"),
        );
        self.file("/sys/module/nvidia/version", &format!("{DRIVER}\n"));
        for (name, text) in [
            ("version", OURS),
            ("refcnt", "0"),
            ("parameters/persistent_api_support", "1"),
            ("parameters/peerdirect_support", "0"),
            ("parameters/memory_peers", "Y"),
            ("parameters/max_pieces", "1024"),
            ("parameters/user_limit_mib", "0"),
        ] {
            self.file(&format!("{MODULE}/{name}"), &format!("{text}\n"));
        }
        self.file(
            "/sys/kernel/mm/memory_peers/nv_mem/version",
            &format!("{OURS}\n"),
        );
        self.file("/proc/self/limits", &limits("unlimited"));
        self.file(
            "/proc/self/status",
            "Name:\tpeermemctl\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n",
        );
        self.file("/proc/self/cgroup", "0::/user.slice/user-0.slice\n");
        let said = serde_json::to_string(&nvml(&self.recording)).unwrap();
        self.recording.unseen.remove("fact nvml");
        self.fact(Fact::Nvml, &said);
        // Where debugfs may be entered.
        let debug = "/sys/kernel/debug";
        if !self.recording.unseen.contains_key(debug) {
            self.file(
                &format!("{debug}/nvidia_peermem/version"),
                &format!("format=1 module={OURS}\n"),
            );
            self.file(
                &format!("{debug}/nvidia_peermem/counters"),
                "event=refused count=0 flavour=persistent reason=no_room\nevent=lost count=0\n",
            );
            for name in ["refusals", "foreign", "registrations"] {
                self.file(&format!("{debug}/nvidia_peermem/{name}"), "");
            }
        }
    }
}
