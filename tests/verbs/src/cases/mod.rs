// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! All cases, group by group.

mod consumers;
mod dma;
pub(crate) mod hazards;
mod identity;
mod input;
mod limit;
pub(crate) mod loading;
mod moving;
mod persist;
mod pieces;
mod process;
mod provider;
mod reasons;
pub(crate) mod register;
mod revoke;
mod rules;
mod stage;
mod sweep;

use crate::ktap::Case;

/// In the order in which they run. Sweeps take long, and come only when they are asked for by name.
pub(crate) fn all(filters: &[String]) -> Vec<Case> {
    let sweeps = if filters.iter().any(|filter| filter.starts_with("sweep")) {
        sweep::CASES
    } else {
        &[]
    };
    [
        moving::CASES,
        register::CASES,
        provider::CASES,
        input::CASES,
        reasons::CASES,
        process::CASES,
        persist::CASES,
        pieces::CASES,
        revoke::CASES,
        rules::CASES,
        limit::CASES,
        identity::CASES,
        consumers::CASES,
        dma::CASES,
        sweeps,
    ]
    .concat()
}
