// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The two clients that ib_core sees, one for each flavour of region.

use core::marker::PhantomData;

use kernel::{
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic,
        Release, //
    }, //
};

use crate::{
    extents::PageSize,
    ib::{
        self,
        RevokerCell,
        Ticket, //
    },
    log,
    mode::Mode,
    pci::PciDevice,
    record::{
        Flavour,
        Step, //
    },
    refusal::Refusal,
    region::Region,
    revocable::Lease,
    sg::LentTable,
    tally::Statistics, //
};

/// Until this exists, and after its drop, no range is taken: `acquire` says "not mine".
///
/// ib_core may ask as soon as the first client is registered, when the module is not complete yet.
pub(crate) struct Ready(());

static READY: Atomic<bool> = Atomic::new(false);

impl Ready {
    pub(crate) fn new() -> Self {
        READY.store(true, Release);
        Ready(())
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        READY.store(false, Release);
    }
}

/// Turns the refusal of a later step into what ib_core returns to the application.
fn step<M: Mode, R>(region: &M, step: Step, result: Result<R, Refusal>) -> Result<R> {
    result.map_err(|refusal| {
        let span = region.span();
        log::refused(M::FLAVOUR, step, span.start(), span.len(), refusal);
        Error::from_errno(refusal.errno())
    })
}

/// The client of a flavour.
pub(crate) struct Of<M>(PhantomData<M>);

/// The client whose pins nobody takes away.
pub(crate) type Persistent = Of<Region>;

/// The client whose pins go when the memory is freed.
pub(crate) type Revocable = Of<Lease>;

impl<M: Mode> ib::Client for Of<M> {
    type Region = M;

    fn acquire(addr: u64, size: u64) -> Result<M, Refusal> {
        match READY.load(Acquire) {
            true => M::pin(addr, size),
            false => Err(Refusal::Unloading),
        }
    }

    fn refused(addr: u64, size: u64, refusal: Refusal) {
        log::refused(M::FLAVOUR, Step::Acquire, addr, size, refusal);
    }

    fn get_pages(region: &M, ticket: Ticket) -> Result {
        step(region, Step::GetPages, region.admit(ticket))
    }

    fn dma_map(region: &M, device: Option<&PciDevice>) -> Result<LentTable> {
        let result = device.ok_or(Refusal::NotPci);
        let result = result.and_then(|device| region.map(device));
        step(region, Step::DmaMap, result)
    }

    fn dma_unmap(region: &M) {
        region.unmap();
    }

    fn page_size(region: &M) -> PageSize {
        region.page_size()
    }

    fn statistics() -> &'static Statistics {
        static PERSISTENT: Statistics = Statistics::new();
        static REVOCABLE: Statistics = Statistics::new();
        match M::FLAVOUR {
            Flavour::Persistent => &PERSISTENT,
            Flavour::Revocable => &REVOCABLE,
        }
    }

    fn revoker() -> Option<&'static RevokerCell> {
        static REVOKER: RevokerCell = RevokerCell::new();
        (M::FLAVOUR == Flavour::Revocable).then_some(&REVOKER)
    }
}
