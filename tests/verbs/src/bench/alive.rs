// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What a registration costs beside others that are alive.

use std::time::Instant;

use anyhow::{ensure, Result};

use super::probe;
use super::probe::{Held, Reading, Watch};
use crate::gpu::{Allocation, PAGE};
use crate::lab::Lab;
use crate::rdma::{full_access, Region};
use crate::sys::Span;

/// How often the one is registered. The least counts: what a timer's interrupt or a refill of the allocator's adds to some is not
/// the module's.
pub(crate) const SAMPLES: u64 = 16;

/// One registration's life.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Life {
    /// The module's part, in cycles.
    pub(crate) register: i64,
    pub(crate) deregister: i64,
    /// As the application sees it.
    pub(crate) reg_mr_ns: u64,
    pub(crate) dereg_mr_ns: u64,
}

impl Life {
    /// The module's part of all of it.
    pub(crate) fn own(&self) -> i64 {
        self.register + self.deregister
    }

    /// The least of each.
    fn or_less(self, other: Self) -> Self {
        Self {
            register: self.register.min(other.register),
            deregister: self.deregister.min(other.deregister),
            reg_mr_ns: self.reg_mr_ns.min(other.reg_mr_ns),
            dereg_mr_ns: self.dereg_mr_ns.min(other.dereg_mr_ns),
        }
    }
}

fn life(lab: &Lab, span: Span) -> Result<Life> {
    probe::reset()?;
    let begin = Instant::now();
    let region = lab.near.register(span, full_access())?;
    let reg_mr_ns = u64::try_from(begin.elapsed().as_nanos())?;
    let register = Reading::take()?.own()?;
    probe::reset()?;
    let begin = Instant::now();
    drop(region);
    let dereg_mr_ns = u64::try_from(begin.elapsed().as_nanos())?;
    Ok(Life {
        register,
        deregister: Reading::take()?.own()?,
        reg_mr_ns,
        dereg_mr_ns,
    })
}

/// Registers and deregisters `span` for [`SAMPLES`] times; the least of each.
pub(crate) fn least(lab: &Lab, span: Span) -> Result<Life> {
    let mut least = life(lab, span)?;
    for _ in 1..SAMPLES {
        least = least.or_less(life(lab, span)?);
    }
    Ok(least)
}

/// GPU memory with a page for each of so many regions, and one more. Each has its own: of one page's mappings the kernel looks
/// through all before rxe gives one back.
pub(crate) struct Pages {
    pub(crate) memory: Allocation,
    number: usize,
}

impl Pages {
    pub(crate) fn of(lab: &Lab, number: usize) -> Result<Self> {
        let memory = lab.allocate_gpu((number + 1) * usize::try_from(PAGE)?)?;
        Ok(Self { memory, number })
    }

    fn page(&self, index: usize) -> Result<Span> {
        let page = usize::try_from(PAGE)?;
        self.memory.span(index * page, page)
    }

    /// That of the one more.
    pub(crate) fn one_more(&self) -> Result<Span> {
        self.page(self.number)
    }

    /// Registers all but that.
    pub(crate) fn register(&self, lab: &Lab) -> Result<Vec<Region>> {
        (0..self.number)
            .map(|index| Ok(lab.near.register(self.page(index)?, full_access())?))
            .collect()
    }
}

/// Kernel memory of one registration, which is gone with it.
pub(crate) fn memory_of_one(lab: &Lab, span: Span) -> Result<Held> {
    // The allocators have what it takes, then.
    drop(lab.near.register(span, full_access())?);
    let watch = Watch::begin()?;
    let region = lab.near.register(span, full_access())?;
    let held = watch.read()?;
    drop(region);
    at_zero(&watch)?;
    Ok(held)
}

/// Nothing of the module's may be left.
pub(crate) fn at_zero(watch: &Watch) -> Result<()> {
    let left = watch.read()?;
    ensure!(
        left.held == 0 && left.objects == 0,
        "{} bytes in {} allocations of the module's are left",
        left.held,
        left.objects
    );
    Ok(())
}
