// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Small buffers that are registered for one transfer each, as programs do that call procedures over RDMA.

use std::time::Instant;

use anyhow::Result;
use peermem_figures::{Line, Small};

use super::{nanoseconds, prices, say};
use crate::gpu::GRANULE;
use crate::lab::{Lab, Setup};
use crate::rdma;
use crate::rdma::{full_access, Op};

const LOOPS: u64 = 100;

/// Measures with each length, and prints.
pub(super) fn measure(setup: &Setup, repeats: u32) -> Result<()> {
    let _prices = prices()?;
    let lab = Lab::open(setup)?;
    let granule = usize::try_from(GRANULE)?;
    let (memory, far) = (lab.allocate_gpu(granule)?, lab.allocate_gpu(granule)?);
    let target = lab.far.register(far.span(0, granule)?, full_access())?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    for bytes in [4 << 10, 64 << 10] {
        let into = target.part(0, u64::try_from(bytes)?)?;
        for _ in 0..repeats {
            let begin = Instant::now();
            for index in 0..LOOPS {
                let at = usize::try_from(index)? * bytes % granule;
                let region = lab.near.register(memory.span(at, bytes)?, full_access())?;
                connection
                    .near
                    .transfer(Op::Write, region.part(0, region.len())?, into)?;
            }
            let elapsed = begin.elapsed();
            let region = lab.near.register(memory.span(0, bytes)?, full_access())?;
            let begin = Instant::now();
            for _ in 0..LOOPS {
                connection
                    .near
                    .transfer(Op::Write, region.part(0, region.len())?, into)?;
            }
            let transfers = begin.elapsed();
            say(&Line::Small(Small {
                bytes: u64::try_from(bytes)?,
                loops: LOOPS,
                elapsed_ns: nanoseconds(elapsed)?,
                transfers_ns: nanoseconds(transfers)?,
            }))?;
        }
    }
    Ok(())
}
