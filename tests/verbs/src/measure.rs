// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cost of one registration with the loaded module.

use anyhow::{ensure, Result};
use serde::{Deserialize, Serialize};

use crate::cases::register::{allocate_aligned, peer_region};
use crate::counters::Counters;
use crate::lab::Lab;
use crate::module;

const GIB: u64 = 1 << 30;

/// A measurement, printed as JSON by `gdr measure`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) version: String,
    pub(crate) bytes: u64,
    pub(crate) address: u64,
    /// nvidia.ko's pins and unpins from before the registration to after the deregistration.
    pub(crate) pins: u64,
    pub(crate) unpins: u64,
    /// Scatter-list entries that rxe received.
    pub(crate) entries: u64,
}

/// Returns the largest power of two, up to 1 GiB, for which the first GPU's BAR has room beside
/// other memory.
fn usual_length(lab: &Lab) -> Result<u64> {
    let room = lab.gpu(0)?.bar_len() / 2;
    ensure!(room > 0, "the BAR is empty");
    Ok((1 << room.ilog2()).min(GIB))
}

/// Registers contiguous GPU memory of the usual length at an address that is aligned to the length,
/// and deregisters it.
pub(crate) fn measure(lab: &Lab) -> Result<Measurement> {
    let bytes = usual_length(lab)?;
    let memory = allocate_aligned(lab, bytes, bytes)?;
    ensure!(memory.is_contiguous()?, "the memory is not contiguous");
    let before = Counters::read()?;
    let region = lab.near.reg_mr(memory.span(0, usize::try_from(bytes)?)?)?;
    let entries = peer_region(&lab.near, &region)?.entries;
    drop(region);
    let activity = Counters::read()?.activity(&before)?;
    Ok(Measurement {
        version: module::version()?,
        bytes,
        address: memory.mapping().addr(),
        pins: activity.pins,
        unpins: activity.unpins,
        entries,
    })
}
