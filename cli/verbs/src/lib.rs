// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What `peermemctl` and the test VM's `gdr` share: memory that a device may write, registrations of it, connections that
//! move bytes, and patterns that tell where bytes belong.
//!
//! Nothing here is linked against libibverbs or libcuda: both are looked up when they are asked for, so a program that
//! uses this crate starts on a host without them.

#![expect(
    clippy::len_without_is_empty,
    reason = "lengths of memory, which nobody asks whether there is any"
)]

pub mod cuda;
pub mod memory;
pub mod patience;
pub mod pattern;
pub mod rdma;
pub mod standin;

/// The loader's own words about a library.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
