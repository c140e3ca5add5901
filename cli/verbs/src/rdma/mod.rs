// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Verbs on the sideway crate. All `unsafe` code for the crate is in this folder.
//!
//! Posting a work request is safe, because a device reaches memory only through a region's key. A
//! region covers a [`Span`](crate::memory::Span), and no Rust object lies in a span.

mod connection;
mod device;

pub use connection::*;
pub use device::*;
