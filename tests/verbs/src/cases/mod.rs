// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! All cases, group by group.

mod identity;
mod moving;
mod persist;
mod process;
mod provider;
pub(crate) mod register;
mod revoke;

use crate::ktap::Case;

/// In the order in which they run.
pub(crate) fn all() -> Vec<Case> {
    [
        moving::CASES,
        register::CASES,
        provider::CASES,
        process::CASES,
        persist::CASES,
        revoke::CASES,
        identity::CASES,
    ]
    .concat()
}
