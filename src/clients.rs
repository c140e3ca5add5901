// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The two clients that ib_core sees, one for each flavour of region.

use kernel::prelude::*;
use kernel::sync::atomic::Acquire;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Release;

use crate::extents::PageSize;
use crate::extents::Span;
use crate::ib;
use crate::ib::RevokerCell;
use crate::ib::Ticket;
use crate::observe;
use crate::record::Flavour;
use crate::record::Step;
use crate::refusal::Refusal;
use crate::region::Region;
use crate::revocable::Lease;
use crate::sys::LentTable;
use crate::sys::PciDevice;
use crate::tally::Statistics;

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

/// Takes a range with `pin`, once the module is complete.
fn acquire<R>(pin: impl FnOnce() -> Result<R, Refusal>) -> Result<R, Refusal> {
    match READY.load(Acquire) {
        true => pin(),
        false => Err(Refusal::Unloading),
    }
}

/// Turns the refusal of a later step into what ib_core returns to the application.
fn step<R>(flavour: Flavour, step: Step, span: &Span, result: Result<R, Refusal>) -> Result<R> {
    result.map_err(|refusal| {
        observe::refused(flavour, step, span.start(), span.len(), refusal);
        Error::from_errno(refusal.errno())
    })
}

/// Maps with `map`, if there is a device to map for.
fn dma_map(
    flavour: Flavour,
    span: &Span,
    device: Option<&PciDevice>,
    map: impl FnOnce(&PciDevice) -> Result<LentTable, Refusal>,
) -> Result<LentTable> {
    let result = device.ok_or(Refusal::NotPci).and_then(map);
    step(flavour, Step::DmaMap, span, result)
}

/// The client whose pins nobody takes away.
pub(crate) struct Persistent;

impl ib::Client for Persistent {
    type Region = Region;

    fn acquire(addr: u64, size: u64) -> Result<Self::Region, Refusal> {
        acquire(|| Region::pin(addr, size))
    }

    fn refused(addr: u64, size: u64, refusal: Refusal) {
        observe::refused(Flavour::Persistent, Step::Acquire, addr, size, refusal);
    }

    fn get_pages(_region: &Self::Region, _ticket: Ticket) -> Result {
        Ok(())
    }

    fn dma_map(region: &Self::Region, device: Option<&PciDevice>) -> Result<LentTable> {
        dma_map(Flavour::Persistent, region.span(), device, |device| {
            region.map(device)
        })
    }

    fn dma_unmap(region: &Self::Region) {
        region.unmap();
    }

    fn page_size(region: &Self::Region) -> PageSize {
        region.page_size()
    }

    fn statistics() -> &'static Statistics {
        static STATISTICS: Statistics = Statistics::new();
        &STATISTICS
    }
}

/// The client whose pins go when the memory is freed.
pub(crate) struct Revocable;

impl ib::Client for Revocable {
    type Region = Lease;

    fn acquire(addr: u64, size: u64) -> Result<Self::Region, Refusal> {
        acquire(|| Lease::pin(addr, size))
    }

    fn refused(addr: u64, size: u64, refusal: Refusal) {
        observe::refused(Flavour::Revocable, Step::Acquire, addr, size, refusal);
    }

    fn get_pages(region: &Self::Region, ticket: Ticket) -> Result {
        let result = region.admit(ticket);
        step(Flavour::Revocable, Step::GetPages, region.span(), result)
    }

    fn dma_map(region: &Self::Region, device: Option<&PciDevice>) -> Result<LentTable> {
        dma_map(Flavour::Revocable, region.span(), device, |device| {
            region.map(device)
        })
    }

    fn dma_unmap(region: &Self::Region) {
        region.unmap();
    }

    fn page_size(region: &Self::Region) -> PageSize {
        region.page_size()
    }

    fn statistics() -> &'static Statistics {
        static STATISTICS: Statistics = Statistics::new();
        &STATISTICS
    }

    fn revoker() -> Option<&'static RevokerCell> {
        static REVOKER: RevokerCell = RevokerCell::new();
        Some(&REVOKER)
    }
}
