// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl list --all`: memory regions of all processes, and the processes that use GPUDirect
//! RDMA.
//!
//! The kernel tracks regions by process and device, but not their kind of memory
//! ([`crate::host::nldev`]). [`usage`] derives the kind from peermem-rs' list of registrations, the
//! number of registrations of NVIDIA's module, and the devices attached to GPU dma-bufs.

mod holder;
mod print;
mod sources;
mod usage;

#[cfg(test)]
mod tests;

pub(crate) use print::run;
pub(crate) use usage::{Usage, Verdict};
