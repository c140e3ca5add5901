// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Source files of the kernel module that this program shares: the tables of reasons and events.
//! Tests also use the module's code that writes the lines that this program reads.

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

use reason::{Event, Reason, ReasonInfo};

/// Returns the table row of a reason, or `None` for a reason of a newer module.
pub(crate) fn row(name: &str) -> Option<&'static ReasonInfo> {
    Reason::ALL
        .iter()
        .find(|reason| reason.name.to_bytes() == name.as_bytes())
}

/// Returns the meaning of a reason or an event, and advice if there is any.
pub(crate) fn meaning(name: &str) -> Option<(&'static str, Option<&'static str>)> {
    let (message, advice) = match row(name) {
        Some(reason) => (reason.message, reason.advice),
        None => Event::ALL
            .iter()
            .find(|event| event.name == name)
            .map(|event| (event.message, event.advice))?,
    };
    Some((message, Some(advice).filter(|advice| !advice.is_empty())))
}
