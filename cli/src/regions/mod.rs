// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl list --all`: the memory regions of all processes, whatever registered them, and which processes use
//! GPUDirect RDMA.
//!
//! The kernel tracks regions by process and device, and not what memory they are ([`crate::host::nldev`]). That is put together from
//! what peermem-rs lists, what NVIDIA's module counts, and the devices that are attached to GPUs' dma-bufs ([`usage`]).

mod holder;
mod print;
mod sources;
mod usage;

#[cfg(test)]
mod tests;

pub(crate) use print::run;
