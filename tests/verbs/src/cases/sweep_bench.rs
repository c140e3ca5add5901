// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! One run of an action ([`Way`]) in which the n-th call or allocation fails, and the checks after
//! the run.

use std::sync::Arc;

use anyhow::{bail, ensure, Context, Result};

use super::chunks::Row;
use crate::arena::Arena;
use crate::counters::Counters;
use crate::faults::Nth;
use crate::gpu::{Allocation, Gpu};
use crate::knobs::{fail_none, fail_nth, Parameter};
use crate::lab::{Lab, PinMode, M2};
use crate::rdma::{full_access, Connection, Hca, Op, Region};
use crate::sys::{Forked, Placement, Span};
use crate::{counters, ktap, rdma};

/// Number of allocations under a registration of [`Shape::Chunks`].
pub(super) const CHUNKS: usize = 3;
/// Upper bound on the calls or allocations of any action.
pub(super) const ENDLESS: u32 = 20_000;

/// Action during which a call to nvidia.ko or an allocation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// A registration and a deregistration.
    Registration,
    /// Memory is freed under a live region, which is then deregistered.
    Free,
    /// A forked child closes the last descriptor of the device, which ends the region. The memory
    /// is then freed.
    Foreign,
}

/// Memory to register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// One allocation of 2 MiB at consecutive physical addresses.
    Run,
    /// One allocation of 16 MiB in physical pages that are never adjacent. The registration has
    /// more scatter-list entries than fit into one page.
    Fragments,
    /// [`CHUNKS`] adjacent allocations of 2 MiB.
    Chunks,
}

impl Shape {
    pub(super) fn len(self) -> usize {
        match self {
            Self::Run => M2,
            Self::Fragments => 8 * M2,
            Self::Chunks => CHUNKS * M2,
        }
    }

    fn layout(self) -> &'static str {
        match self {
            Self::Run | Self::Chunks => "contiguous",
            Self::Fragments => "64k",
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    /// A call to nvidia.ko at `place` fails with `errno`.
    Call { place: &'static str, errno: i32 },
    /// An allocation of the thread fails.
    Allocation,
}

pub(super) enum Armed {
    Call(&'static str),
    Allocation(Nth),
}

impl Fault {
    pub(super) fn arm(self, nth: u32) -> Result<Armed> {
        match self {
            Self::Call { place, errno } => {
                fail_nth(place, nth, errno)?;
                Ok(Armed::Call(place))
            }
            Self::Allocation => Ok(Armed::Allocation(Nth::arm(nth)?)),
        }
    }
}

impl Armed {
    pub(super) fn disarm(self) -> Result<bool> {
        match self {
            Self::Call(place) => fail_none(place),
            Self::Allocation(nth) => nth.disarm(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Ended {
    /// `true` if the fault occurred.
    pub(super) hit: bool,
    /// errno of `ibv_reg_mr` in the application; 0 is success.
    pub(super) registration: i32,
    /// errno of the first `ibv_dereg_mr` or free in the application, before it tried again; 0 is
    /// success.
    pub(super) end: i32,
}

impl Ended {
    /// Records the result of a deregistration. A deregistration that failed is repeated.
    fn deregistered(
        &mut self,
        result: std::result::Result<(), (Region, std::io::Error)>,
    ) -> Result<()> {
        if let Err((region, error)) = result {
            self.end = error.raw_os_error().unwrap_or(-1);
            if let Err((_, error)) = region.deregister() {
                bail!("the region cannot be deregistered: {error}");
            }
        }
        Ok(())
    }
}

pub(super) struct Bench<'a> {
    pub(super) lab: &'a Lab,
    /// The GPU whose memory is registered under faults.
    pub(super) gpu: Arc<Gpu>,
    /// Host memory, GPU memory and a connection for [`Bench::works`].
    source: Arena,
    target: Allocation,
    connection: Connection,
    pub(super) before: Counters,
    pub(super) rounds: u64,
}

impl<'a> Bench<'a> {
    pub(super) fn new(lab: &'a Lab) -> Result<Self> {
        Ok(Self {
            gpu: Arc::clone(lab.gpu(1)?),
            source: Arena::on_host(lab, M2, 1)?,
            target: lab.allocate_gpu(M2)?,
            connection: rdma::connect(&lab.near, &lab.far)?,
            before: Counters::read()?,
            lab,
            rounds: 0,
        })
    }

    pub(super) fn allocate(&self, shape: Shape) -> Result<Allocation> {
        let _layout = Parameter::set("nvidia", "layout", shape.layout())?;
        self.gpu.allocate(shape.len(), Placement::Any)
    }

    /// Registers, moves bytes and deregisters without a fault.
    pub(super) fn works(&mut self) -> Result<()> {
        const LEN: usize = 4096;
        self.rounds += 1;
        let at = usize::try_from(self.rounds)? * 8 % (M2 - LEN);
        let region = self
            .lab
            .far
            .reg_mr(self.target.span(0, M2)?)
            .context("the next registration")?;
        self.connection
            .transfer(
                Op::Write,
                self.source.part(at, LEN)?,
                region.part(at as u64, LEN as u64)?,
            )
            .context("the next registration")?;
        let found = self.target.bytes(at, LEN)?;
        ensure!(
            found == self.source.expected(at, LEN)?,
            "the transferred bytes differ"
        );
        Ok(())
    }

    /// Checks that nothing is left: no pin, no mapping, no region of rxe, no reference to the
    /// module.
    pub(super) fn at_rest(&self) -> Result<()> {
        let allocations = self.before.get("allocs_live")?;
        let devices = &self.lab.setup.devices;
        ktap::settled(|| counters::all_left(&self.before, allocations, devices))
    }

    /// Runs action `way` once, and makes the `nth` call or allocation fail.
    pub(super) fn run(&self, way: Way, shape: Shape, fault: Fault, nth: u32) -> Result<Ended> {
        if shape == Shape::Chunks {
            ensure!(
                way == Way::Registration,
                "{way:?} supports only one allocation"
            );
            let row = Row::of(self.lab, &[1; CHUNKS])?;
            return self.registration(row.span(0, row.len()?)?, fault, nth);
        }
        let memory = self.allocate(shape)?;
        match way {
            Way::Registration => self.registration(memory.span(0, shape.len())?, fault, nth),
            Way::Free => self.free(memory, fault, nth),
            Way::Foreign => self.foreign(memory, fault, nth),
        }
    }

    pub(super) fn registration(&self, span: Span, fault: Fault, nth: u32) -> Result<Ended> {
        let mut ended = Ended::default();
        let armed = fault.arm(nth)?;
        let registered = self.lab.near.register(span, full_access());
        // The fault stays armed during the deregistration.
        let result = registered.map(|region| region.deregister());
        ended.hit = armed.disarm()?;
        match result {
            Err(refused) => ended.registration = refused.errno(),
            Ok(result) => ended.deregistered(result)?,
        }
        Ok(ended)
    }

    fn free(&self, mut memory: Allocation, fault: Fault, nth: u32) -> Result<Ended> {
        let span = memory.span(0, memory.mapping().len())?;
        let mut ended = Ended::default();
        let region = self.lab.near.register(span, full_access())?;
        let armed = fault.arm(nth)?;
        let freed = memory.free();
        let result = region.deregister();
        ended.hit = armed.disarm()?;
        if let Err(error) = freed {
            ended.end = errno_of(&error);
            memory.free().context("the memory cannot be freed")?;
        }
        ended.deregistered(result)?;
        Ok(ended)
    }

    fn foreign(&self, mut memory: Allocation, fault: Fault, nth: u32) -> Result<Ended> {
        const HIT: i32 = 1;
        const FAILED: i32 = 2;
        let span = memory.span(0, memory.mapping().len())?;
        let hca = Hca::open(self.lab.near.name())?;
        std::mem::forget(hca.register(span, full_access())?);
        let file = hca.abandon();
        let mut child = Forked::start(move || {
            let end = || -> Result<bool> {
                let armed = fault.arm(nth)?;
                file.close();
                let hit = armed.disarm()?;
                Ok(hit)
            };
            match end() {
                Ok(hit) => i32::from(hit) * HIT,
                Err(error) => {
                    eprintln!("forked child: {error:#}");
                    FAILED
                }
            }
        })?;
        file.close();
        child.go();
        let status = child.wait()?;
        ensure!(status <= HIT, "the forked child ended with {status}");
        // nvidia.ko puts a revocable pin only for its owner, so the pin stays until the memory is
        // freed.
        let expected = match self.lab.setup.mode() {
            PinMode::Persistent => 0,
            PinMode::Revocable => 1,
        };
        counters::pins_are(expected).context("after a foreign release")?;
        memory.free()?;
        Ok(Ended {
            hit: status == HIT,
            ..Ended::default()
        })
    }

    /// Runs action `way` repeatedly. In run n, the n-th call or allocation fails. The sweep ends
    /// with the first run in which no fault occurs. Returns the number of faults. `check` checks
    /// each run in which a fault occurred.
    pub(super) fn sweep(
        &mut self,
        way: Way,
        shape: Shape,
        fault: Fault,
        mut check: impl FnMut(&Ended) -> Result<()>,
    ) -> Result<u32> {
        for nth in 1..ENDLESS {
            let context = || format!("{way:?} of {shape:?}, {fault:?} number {nth}");
            let ended = self.run(way, shape, fault, nth).with_context(context)?;
            self.at_rest().with_context(context)?;
            self.works().with_context(context)?;
            if !ended.hit {
                ensure!(
                    ended.registration == 0 && ended.end == 0,
                    "{}: failed without an injected failure: {ended:?}",
                    context()
                );
                return Ok(nth - 1);
            }
            check(&ended).with_context(context)?;
        }
        bail!("{way:?} of {shape:?}, {fault:?}: the fault still occurs in run {ENDLESS}");
    }
}

fn errno_of(error: &anyhow::Error) -> i32 {
    error
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::raw_os_error)
        .unwrap_or(-1)
}
