// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! How long it takes until memory that is freed is registered no more.

use std::time::Instant;

use anyhow::{ensure, Result};
use peermem_figures::{Line, Revocation};

use super::{nanoseconds, say};
use crate::counters;
use crate::counters::Counters;
use crate::gpu::PAGE;
use crate::lab::Lab;
use crate::rdma::full_access;

/// Measures with each number of regions on one allocation, and prints.
pub(super) fn measure(lab: &Lab, numbers: &[usize], repeats: u32) -> Result<()> {
    for &regions in numbers {
        for _ in 0..repeats {
            let free_ns = free(lab, regions)?;
            say(&Line::Revocation(Revocation {
                regions: u64::try_from(regions)?,
                free_ns,
            }))?;
        }
    }
    Ok(())
}

fn free(lab: &Lab, number: usize) -> Result<u64> {
    let page = usize::try_from(PAGE)?;
    let mut memory = lab.allocate_gpu(number * page)?;
    let mut regions = Vec::with_capacity(number);
    // A page for each: of one page's mappings the kernel looks through all before rxe gives one back.
    for index in 0..number {
        let span = memory.span(index * page, page)?;
        regions.push(lab.near.register(span, full_access())?);
    }
    let before = Counters::read()?;
    let begin = Instant::now();
    memory.free()?;
    let elapsed = begin.elapsed();
    let callbacks = Counters::read()?.activity(&before)?.callbacks;
    ensure!(
        usize::try_from(callbacks)? == number,
        "{callbacks} callbacks for {number} regions"
    );
    let alive = counters::peer_regions(lab.near.name())?
        .iter()
        .filter(|region| region.state == "valid")
        .count();
    ensure!(alive == 0, "{alive} of {number} regions live on");
    drop(regions);
    nanoseconds(elapsed)
}
