// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Checks of the software that GPUDirect RDMA takes ([`crate::software`]).
//!
//! Whoever lacks several things is told the first, not what follows from it: without a GPU or an RDMA device nothing
//! here says anything but that; a module is not missed where ib_core could not take it.

mod clients;
mod consumers;
mod dma_buf;
mod driver;
mod fabric;
mod gpu_mode;
mod ibgda;
mod limits;
mod log;
mod module;
mod module_file;
pub(super) mod netns;
mod oops;
mod pci_log;
mod peer_memory;
mod presence;
mod refusals;
mod service;
mod users;
mod verbs;
mod xid;

#[cfg(test)]
mod injected;
#[cfg(test)]
mod reported;

use super::scan::{Check, Scan};

/// Whether a module is loaded, on a machine where something could use it.
fn has_module(scan: &Scan<'_>) -> bool {
    scan.has_both() && scan.software().loaded().is_some()
}

/// In the order in which one takes the other.
pub(super) const OF_SOFTWARE: &[Check] = &[
    Check {
        name: presence::NAME,
        about: "whether there is a GPU, and an RDMA device",
        applies: |_| true,
        run: presence::check,
    },
    Check {
        name: verbs::NAME,
        about: "whether programs can open each RDMA device (/dev/infiniband/uverbs*)",
        applies: verbs::applies,
        run: verbs::check,
    },
    Check {
        name: driver::NAME,
        about: "nvidia.ko: open or proprietary, its version, and the driver's library beside it",
        applies: |scan| scan.has_gpu(),
        run: driver::check,
    },
    Check {
        name: fabric::NAME,
        about: "whether the NVLink fabric of machines with NVSwitches is set up (fabric manager)",
        applies: fabric::applies,
        run: fabric::check,
    },
    Check {
        name: peer_memory::NAME,
        about: "whether the ib_core that is loaded has peer memory, and whose it is",
        applies: |scan| scan.has_both(),
        run: peer_memory::check,
    },
    Check {
        name: module::NAME,
        about: "whether nvidia_peermem is loaded, whose, for this driver, and why not; whether its file would load",
        applies: |scan| scan.has_both(),
        run: module::check,
    },
    Check {
        name: clients::NAME,
        about: "the module's clients at ib_core, their kind, and whose they are",
        applies: has_module,
        run: clients::check,
    },
    Check {
        name: consumers::NAME,
        about: "whether NCCL, UCX, NVSHMEM and others find the module where each of them looks",
        applies: has_module,
        run: consumers::check,
    },
    Check {
        name: refusals::NAME,
        about: "what the module refused of late and what it lost (peermem-rs)",
        applies: refusals::applies,
        run: refusals::check,
    },
    Check {
        name: gpu_mode::BAR1,
        about: "how much of each GPU's BAR1 is free (NVML)",
        applies: gpu_mode::applies,
        run: gpu_mode::bar1,
    },
    Check {
        name: limits::MEMLOCK,
        about: "how much memory this shell and the jobs of batch systems and containers may lock",
        applies: |scan| scan.has_both(),
        run: limits::memlock,
    },
    Check {
        name: limits::CGROUP,
        about: "how near this cgroup is to its limits of RDMA handles and objects",
        applies: |scan| scan.has_both(),
        run: limits::cgroup,
    },
    Check {
        name: log::NAME,
        about: "the kernel's log since boot: the module, NVIDIA's Xids, crashes of drivers, IOMMU faults, PCIe, the NICs' firmware",
        applies: |scan| scan.has_both(),
        run: log::check,
    },
    Check {
        name: gpu_mode::MODE,
        about: "MIG, virtual GPUs, persistence mode (NVML)",
        applies: gpu_mode::applies,
        run: gpu_mode::mode,
    },
    Check {
        name: ibgda::NAME,
        about: "whether GPUs may write to the NICs' doorbells (IBGDA, PeerMappingOverride)",
        applies: ibgda::applies,
        run: ibgda::check,
    },
    Check {
        name: dma_buf::NAME,
        about: "whether GPU memory can be registered by dma-buf, without the module",
        applies: |scan| scan.has_both(),
        run: dma_buf::check,
    },
    Check {
        name: service::NAME,
        about: "whether the module comes back at boot, and after openibd's restart",
        applies: service::applies,
        run: service::check,
    },
];
