// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cost of a registration while other registrations are alive.

use std::time::Instant;

use anyhow::{ensure, Result};

use super::probe;
use super::probe::{Held, Reading, Watch};
use crate::gpu::{Allocation, PAGE};
use crate::lab::Lab;
use crate::rdma::Region;
use crate::sys::Span;

/// Number of samples. The minimum is the result, because timer interrupts and refills of the
/// allocator increase some samples.
pub(crate) const SAMPLES: u64 = 16;

/// Costs of one registration and its deregistration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Life {
    /// Cycles in the module during the registration. `deregister` is the cost of the
    /// deregistration.
    pub(crate) register: i64,
    pub(crate) deregister: i64,
    /// Duration of `ibv_reg_mr` in nanoseconds. `dereg_mr_ns` is the duration of `ibv_dereg_mr`.
    pub(crate) reg_mr_ns: u64,
    pub(crate) dereg_mr_ns: u64,
}

impl Life {
    /// Returns the module's total cost, in cycles.
    pub(crate) fn own(&self) -> i64 {
        self.register + self.deregister
    }

    /// Returns the minimum of each field.
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
    let region = lab.near.reg_mr(span)?;
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

/// Registers and deregisters `span` [`SAMPLES`] times. Returns the minimum of each field.
pub(crate) fn least(lab: &Lab, span: Span) -> Result<Life> {
    let mut least = life(lab, span)?;
    for _ in 1..SAMPLES {
        least = least.or_less(life(lab, span)?);
    }
    Ok(least)
}

/// GPU memory with one page for each of `number` regions, and one more page. Regions do not share a
/// page, because for each unmapping by rxe the kernel searches all mappings of the page.
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

    pub(crate) fn one_more(&self) -> Result<Span> {
        self.page(self.number)
    }

    /// Registers a region on each page except the extra page.
    pub(crate) fn register(&self, lab: &Lab) -> Result<Vec<Region>> {
        (0..self.number)
            .map(|index| Ok(lab.near.reg_mr(self.page(index)?)?))
            .collect()
    }
}

/// Returns the kernel memory of one registration. Fails if the deregistration does not free all of
/// this memory.
pub(crate) fn memory_of_one(lab: &Lab, span: Span) -> Result<Held> {
    // This registration fills the caches of the kernel's allocators, and is not measured.
    drop(lab.near.reg_mr(span)?);
    let watch = Watch::begin()?;
    let region = lab.near.reg_mr(span)?;
    let held = watch.read()?;
    drop(region);
    at_zero(&watch)?;
    Ok(held)
}

/// Fails if the module still holds memory.
pub(crate) fn at_zero(watch: &Watch) -> Result<()> {
    let left = watch.read()?;
    ensure!((left.held, left.objects) == (0, 0));
    Ok(())
}
