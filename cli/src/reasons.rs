// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What the module's reasons and events mean, from its own tables.

use crate::shipped::reason::{Event, Reason, ReasonInfo};

/// The row of a `reason`. None: a newer module's.
pub(crate) fn reason(name: &str) -> Option<&'static ReasonInfo> {
    Reason::ALL
        .iter()
        .find(|reason| reason.name.to_bytes() == name.as_bytes())
}

/// What a reason or an event means, and what to do about it, if there is something.
pub(crate) fn meaning(name: &str) -> Option<(&'static str, Option<&'static str>)> {
    let (message, advice) = match reason(name) {
        Some(reason) => (reason.message, reason.advice),
        None => Event::ALL
            .iter()
            .find(|event| event.name == name)
            .map(|event| (event.message, event.advice))?,
    };
    Some((message, Some(advice).filter(|advice| !advice.is_empty())))
}
