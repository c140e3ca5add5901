// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's own lines of code: its tables of reasons and events, and for tests what writes the lines that this program
//! reads.

#![allow(dead_code, reason = "as much of them as this program needs")]

#[cfg(test)]
#[path = "../../src/device.rs"]
pub(crate) mod device;
#[cfg(test)]
#[path = "../../src/history.rs"]
pub(crate) mod history;
#[cfg(test)]
#[path = "../../src/ranges.rs"]
pub(crate) mod ranges;
#[path = "../../src/reason.rs"]
pub(crate) mod reason;
#[cfg(test)]
#[path = "../../src/registry.rs"]
pub(crate) mod registry;
