// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Checks of the software that GPUDirect RDMA needs ([`crate::software`]).
//!
//! If several things are missing, only the first is reported, not its consequences. If the machine
//! has no GPU or no RDMA device, these checks report only the lack of the GPU or the RDMA device. A
//! missing module is not reported if ib_core could not use the module.

mod bar1_free;
mod clients;
mod consumers;
mod dma_buf;
mod fabric;
mod gpu_mode;
mod ibgda;
mod kernel_log;
mod memlock;
mod module;
mod module_at_boot;
mod module_file;
pub(super) mod netns;
mod nvidia_driver;
mod oops;
mod pci_log;
mod peer_memory;
mod preload;
mod presence;
mod rdma_cgroup;
mod refusals;
#[cfg(test)]
pub(super) mod tests;
mod users;
mod verbs;
mod xid;

use super::scan::{Check, Scan};

pub(crate) use memlock::memory_lock;
/// Name of the check that reads the mapped files of all processes.
pub(super) const PRELOAD: &str = preload::CHECK.name;

/// Returns `true` if a peer-memory module is loaded, and the machine has an RDMA device and a GPU
/// with GPUDirect RDMA.
fn has_module(scan: &Scan<'_>) -> bool {
    scan.has_both() && scan.software().loaded().is_some()
}

/// Checks of software, in the order of their dependencies.
pub(super) const OF_SOFTWARE: &[Check] = &[
    presence::CHECK,
    verbs::CHECK,
    nvidia_driver::CHECK,
    fabric::CHECK,
    peer_memory::CHECK,
    module::CHECK,
    clients::CHECK,
    consumers::CHECK,
    refusals::CHECK,
    bar1_free::CHECK,
    memlock::CHECK,
    rdma_cgroup::CHECK,
    kernel_log::CHECK,
    gpu_mode::CHECK,
    ibgda::CHECK,
    dma_buf::CHECK,
    preload::CHECK,
    module_at_boot::CHECK,
];
