// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Common parts of the schedules for rules and hazards: an HCA and a GPU that threads share, and
//! the counters and log from before the schedule.

use std::cell::RefCell;
use std::sync::Arc;

use anyhow::Result;

use crate::counters::Counters;
use crate::gpu::{Allocation, Freer, Gpu};
use crate::hold::{Hold, Worker};
use crate::lab::{Lab, M2};
use crate::rdma::{Hca, Refused, Region};
use crate::sys::{KernelLog, Placement, Span};
use crate::{rdma, sys};

/// Result of a registration in a thread.
pub(super) type Registered = std::result::Result<Region, Refused>;

/// An HCA and a GPU that a schedule shares with threads that may never return. A registration has 2
/// MiB by default.
pub(super) struct Stage {
    pub(super) hca: Arc<Hca>,
    pub(super) gpu: Arc<Gpu>,
    pub(super) before: Counters,
    log: KernelLog,
    logged: RefCell<Vec<String>>,
}

impl Stage {
    pub(super) fn open(lab: &Lab) -> Result<Self> {
        Ok(Self {
            hca: Arc::new(Hca::open(lab.far.name())?),
            gpu: Arc::clone(lab.gpu(0)?),
            before: Counters::read()?,
            log: KernelLog::from_now()?,
            logged: RefCell::default(),
        })
    }

    pub(super) fn allocate(&self) -> Result<Allocation> {
        self.gpu.allocate(M2, Placement::Any)
    }

    /// Allocates and registers memory.
    pub(super) fn registered(&self) -> Result<(Allocation, Region)> {
        let memory = self.allocate()?;
        let region = self.register(&memory)?;
        Ok((memory, region))
    }

    pub(super) fn register(&self, memory: &Allocation) -> Result<Region> {
        Ok(self.hca.reg_mr(memory.span(0, M2)?)?)
    }

    /// Registers the first 2 MiB of an allocation in a separate thread.
    pub(super) fn start_register(&self, memory: &Allocation) -> Result<Worker<Registered>> {
        self.start_register_span(memory.span(0, M2)?)
    }

    pub(super) fn start_register_span(&self, span: Span) -> Result<Worker<Registered>> {
        let hca = Arc::clone(&self.hca);
        Worker::start("registration", move || hca.reg_mr(span))
    }

    /// Registers like [`Stage::start_register`], and waits until the thread stops at `place`: see
    /// [`Hold::arm`].
    pub(super) fn register_until(
        &self,
        memory: &Allocation,
        place: &str,
    ) -> Result<(Hold, Worker<Registered>)> {
        Hold::catch(place, || self.start_register(memory))
    }

    pub(super) fn start_deregister(&self, region: Region) -> Result<Worker<()>> {
        Worker::start("deregistration", move || drop(region))
    }

    /// Deregisters like [`Stage::start_deregister`], and waits until the thread stops at `place`:
    /// see [`Hold::arm`].
    pub(super) fn deregister_until(
        &self,
        region: Region,
        place: &str,
    ) -> Result<(Hold, Worker<()>)> {
        Hold::catch(place, || self.start_deregister(region))
    }

    /// Frees an allocation in a separate thread. The addresses stay occupied.
    pub(super) fn start_free(&self, memory: &Allocation) -> Result<Worker<std::io::Result<()>>> {
        let (gpu, addr) = (Arc::clone(&self.gpu), memory.mapping().addr());
        // Makes `memory` store its place in the BAR. A case needs this place to find the next
        // owner.
        memory.bar_address();
        Worker::start("free", move || gpu.free(addr, Freer::Caller))
    }

    /// Frees like [`Stage::start_free`], and waits for the end.
    pub(super) fn free(&self, memory: &Allocation) -> Result<()> {
        Ok(self.start_free(memory)?.done()??)
    }

    /// Registers `memory`, and lets a forked child close the last descriptor of the HCA. The memory
    /// stays allocated, and this process keeps running.
    pub(super) fn orphan(&self, memory: &Allocation) -> Result<()> {
        let hca = Hca::open(self.hca.name())?;
        let region = hca.reg_mr(memory.span(0, M2)?)?;
        sys::beside_forked_child(|| {
            rdma::abandon(hca, region);
            Ok(())
        })
    }

    /// Returns the change of a counter since the stage was opened.
    pub(super) fn counted(&self, name: &str) -> Result<u64> {
        Counters::read()?.since(&self.before, name)
    }

    /// Returns the kernel's log lines with `text` since the stage was opened.
    pub(super) fn logged(&self, text: &str) -> Result<Vec<String>> {
        let mut all = self.logged.borrow_mut();
        all.extend(self.log.lines()?);
        let found = all.iter().filter(|line| line.contains(text));
        Ok(found.cloned().collect())
    }
}
