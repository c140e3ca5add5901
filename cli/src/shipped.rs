// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's own lines of code: its tables of reasons and events, and for tests what writes the lines that this program
//! reads.

#![allow(dead_code, reason = "as much of them as this program needs")]

#[cfg(test)]
#[path = "../../src/device.rs"]
pub(crate) mod device;
#[cfg(test)]
#[path = "../../src/extents.rs"]
pub(crate) mod extents;
#[cfg(test)]
#[path = "../../src/record.rs"]
pub(crate) mod record;
#[path = "../../src/refusal.rs"]
pub(crate) mod refusal;
#[cfg(test)]
#[path = "../../src/registry.rs"]
pub(crate) mod registry;
