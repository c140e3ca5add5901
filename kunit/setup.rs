// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the tests begin with: clients that are registered, and ranges to register.

use kernel::{
    prelude::*,
    str::CStr,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

use crate::{
    clients::{
        self,
        Ready, //
    },
    extents::PageSize,
    fakes::KIB_64,
    ib::{
        self,
        Client,
        Invalidation,
        Registration,
        RevokerCell,
        Ticket, //
    },
    ib_core::Request,
    params,
    pci::PciDevice,
    refusal::Refusal,
    sg::LentTable,
    tally::Statistics, //
};

/// Where the tests' GPU memory begins.
pub(crate) const VA: u64 = 0x7f00_0000_0000;
/// Pages of most ranges.
pub(crate) const PAGES: u64 = 4;

/// A range of whole pages.
pub(crate) fn pages(count: u64) -> Request {
    // CAST: Small.
    Request::new(VA, (count * KIB_64) as usize)
}

/// A client that ib_core knows, in a module that is up.
///
/// The order of the fields is the order in which they are dropped.
pub(crate) struct Up<C: Client> {
    _ready: Ready,
    _registration: Registration<C>,
}

/// The client whose pins nobody takes away, alone.
pub(crate) fn persistent() -> Result<Up<clients::Persistent>> {
    persistent_as(c"nv_mem")
}

pub(crate) fn persistent_as(name: &CStr) -> Result<Up<clients::Persistent>> {
    Ok(Up {
        _registration: Registration::new(name, params::version(), Invalidation::ClientUnmaps)?,
        _ready: Ready::new(),
    })
}

/// The client whose pins go when the memory is freed, alone.
pub(crate) fn revocable(invalidation: Invalidation) -> Result<Up<OfTest>> {
    OfTest::next();
    Ok(Up {
        _registration: Registration::new(c"nv_mem", params::version(), invalidation)?,
        _ready: Ready::new(),
    })
}

/// [`clients::Revocable`], but for the cell: a client that revokes can be registered once, and each
/// test registers one.
pub(crate) struct OfTest;

static CELLS: [RevokerCell; 256] = [const { RevokerCell::new() }; 256];
static CELL: Atomic<usize> = Atomic::new(0);

impl OfTest {
    /// From now on this is another client.
    pub(crate) fn next() {
        CELL.fetch_add(1, Relaxed);
    }
}

impl Client for OfTest {
    type Region = <clients::Revocable as Client>::Region;

    fn acquire(addr: u64, size: u64) -> Result<Self::Region, Refusal> {
        clients::Revocable::acquire(addr, size)
    }

    fn refused(addr: u64, size: u64, refusal: Refusal) {
        clients::Revocable::refused(addr, size, refusal);
    }

    fn get_pages(region: &Self::Region, ticket: Ticket) -> Result {
        clients::Revocable::get_pages(region, ticket)
    }

    fn dma_map(region: &Self::Region, device: Option<&PciDevice>) -> Result<LentTable> {
        clients::Revocable::dma_map(region, device)
    }

    fn dma_unmap(region: &Self::Region) {
        clients::Revocable::dma_unmap(region);
    }

    fn page_size(region: &Self::Region) -> PageSize {
        <clients::Revocable as ib::Client>::page_size(region)
    }

    fn statistics() -> &'static Statistics {
        clients::Revocable::statistics()
    }

    fn revoker() -> Option<&'static RevokerCell> {
        CELLS.get(CELL.load(Relaxed) % CELLS.len())
    }
}
