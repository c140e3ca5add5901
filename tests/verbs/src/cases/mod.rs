// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! All cases, in groups.

mod buffers;
mod chunks;
mod coherent;
pub(crate) mod consumers;
pub(crate) mod ctl;
pub(crate) mod cuda;
mod dma;
pub(crate) mod dmabuf;
pub(crate) mod hazards;
mod hca;
mod identity;
mod input;
mod limit;
pub(crate) mod loading;
mod machine;
mod moving;
mod p2pdma;
pub(crate) mod pair;
mod persist;
mod process;
mod provider;
mod reasons;
pub(crate) mod register;
mod registrations;
mod revoke;
mod rules;
mod scale;
mod stage;
mod sweep;
mod sweep_bench;
mod ucx;
mod verify;

use crate::ktap::Case;

/// Returns the cases in the order in which they run. Some groups run only if a filter names them:
/// sweeps take long, `scale`, `coherent` and `p2pdma` need their own machines, and `verify` tests
/// another program.
pub(crate) fn all(filters: &[String]) -> Vec<&'static Case> {
    let if_asked = |name: &str, cases: &'static [Case]| {
        let asked = filters.iter().any(|filter| filter.starts_with(name));
        if asked {
            cases
        } else {
            &[]
        }
    };
    [
        moving::CASES,
        register::CASES,
        provider::CASES,
        input::CASES,
        reasons::CASES,
        registrations::CASES,
        process::CASES,
        persist::CASES,
        chunks::CASES,
        revoke::CASES,
        hca::CASES,
        rules::CASES,
        limit::CASES,
        identity::CASES,
        consumers::CASES,
        dma::CASES,
        if_asked("coherent", coherent::CASES),
        if_asked("p2pdma", p2pdma::CASES),
        if_asked("machine", machine::CASES),
        if_asked("sweep", sweep::CASES),
        if_asked("scale", scale::CASES),
        if_asked("verify", verify::CASES),
    ]
    .into_iter()
    .flatten()
    .collect()
}
