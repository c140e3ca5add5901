// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Code that `peermemctl` and the test VM's `gdr` share. The crate handles memory that a device may
//! write, and registrations of such memory. It also has connections that move bytes, and patterns
//! that identify the position of each byte.
//!
//! No program links against libibverbs or libcuda. Both libraries are looked up at run time, so
//! that a program that uses this crate starts on a host without them.

#![expect(
    clippy::len_without_is_empty,
    reason = "no caller asks whether memory is empty"
)]

pub mod cuda;
pub mod memory;
pub mod patience;
pub mod pattern;
pub mod rdma;
pub mod standin;

/// Returns the loader's own error message.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
