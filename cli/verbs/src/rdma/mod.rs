// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Verbs on the sideway crate. All `unsafe` for it is in this folder.
//!
//! Why posting is safe here: a device reaches memory through a region's key alone, regions are made over a
//! [`Span`](crate::memory::Span), and no Rust object lies in one.

mod connection;
mod device;

pub use connection::*;
pub use device::*;
