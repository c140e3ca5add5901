// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The two clients that ib_core sees: each joins a flavour of region to the kernel.

use kernel::prelude::*;
use kernel::sync::atomic::Acquire;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Release;
use kernel::sync::Arc;
use kernel::task::Task;

use crate::extents::PageSize;
use crate::extents::Span;
use crate::ib;
use crate::ib::RevokerCell;
use crate::ib::Ticket;
use crate::nv;
use crate::observe;
use crate::refusal::Refusal;
use crate::region;
use crate::region::Region;
use crate::revocable;
use crate::revocable::Lease;
use crate::sys;
use crate::sys::BarRun;
use crate::sys::LentTable;
use crate::sys::PciDevice;

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

/// Takes the range with `pin`, or says why not.
fn acquire<R>(addr: u64, size: u64, pin: impl FnOnce() -> Result<R, Refusal>) -> Option<R> {
    if !READY.load(Acquire) {
        return None;
    }
    pin()
        .inspect_err(|refusal| observe::refused("acquire", addr, size, refusal))
        .ok()
}

/// Turns the refusal of a later step into what ib_core returns to the application.
fn step<R>(name: &str, span: &Span, result: Result<R, Refusal>) -> Result<R> {
    result.map_err(|refusal| {
        observe::refused(name, span.start(), span.len(), &refusal);
        Error::from_errno(refusal.errno())
    })
}

/// Maps with `map`, if there is a device to map for.
fn dma_map(
    span: &Span,
    device: Option<&PciDevice>,
    map: impl FnOnce(&PciDevice) -> Result<LentTable, Refusal>,
) -> Result<LentTable> {
    step("dma_map", span, device.ok_or(Refusal::NotPci).and_then(map))
}

/// The client whose pins nobody takes away.
pub(crate) struct Persistent;

impl ib::Client for Persistent {
    type Region = Region<Kernel>;

    fn acquire(addr: u64, size: u64) -> Option<Self::Region> {
        acquire(addr, size, || Region::pin(addr, size))
    }

    fn get_pages(_region: &Self::Region, _ticket: Ticket) -> Result {
        Ok(())
    }

    fn dma_map(region: &Self::Region, device: Option<&PciDevice>) -> Result<LentTable> {
        dma_map(region.span(), device, |device| region.map(device))
    }

    fn dma_unmap(region: &Self::Region) {
        region.unmap();
    }

    fn page_size(region: &Self::Region) -> PageSize {
        region.page_size()
    }
}

/// The client whose pins go when the memory is freed.
pub(crate) struct Revocable;

impl ib::Client for Revocable {
    type Region = Lease<Kernel>;

    fn acquire(addr: u64, size: u64) -> Option<Self::Region> {
        acquire(addr, size, || Lease::pin(addr, size))
    }

    fn get_pages(region: &Self::Region, ticket: Ticket) -> Result {
        step("get_pages", region.span(), region.admit(ticket))
    }

    fn dma_map(region: &Self::Region, device: Option<&PciDevice>) -> Result<LentTable> {
        dma_map(region.span(), device, |device| region.map(device))
    }

    fn dma_unmap(region: &Self::Region) {
        region.unmap();
    }

    fn page_size(region: &Self::Region) -> PageSize {
        region.page_size()
    }

    fn revoker() -> Option<&'static RevokerCell> {
        static REVOKER: RevokerCell = RevokerCell::new();
        Some(&REVOKER)
    }
}

/// The surroundings of a region in the kernel.
pub(crate) struct Kernel;

impl region::Env for Kernel {
    type Lock<T: Send + Unpin> = sys::Lock<T>;
    type List<T: Send> = sys::List<T>;
    type Device = PciDevice;
    type Table = sys::Table;
    type Pin = nv::PersistentPin;
    type Mapping = nv::DmaMapping;
}

impl revocable::Env for Kernel {
    type Monitor<T: Send + Unpin> = sys::Monitor<T>;
    type Shared<T: Send + Sync + 'static> = Arc<T>;
    type Ticket = Ticket;
    type RevocablePin = nv::RevocablePin;
    type BarMapping = sys::BarMapping;
    type BarRun = BarRun;
    type Thread = Thread;

    fn share<T: Send + Sync + 'static>(value: T) -> Result<Arc<T>, Refusal> {
        Arc::new(value, GFP_KERNEL).map_err(|_| Refusal::NoMemory)
    }

    fn thread() -> Thread {
        Thread(Task::current_raw().addr())
    }
}

/// The address of a task, to compare with that of another that is alive.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Thread(usize);

impl revocable::Ticket for Ticket {
    fn revoke(self) {
        self.revoke();
    }
}

impl revocable::RevocablePin<Kernel> for nv::RevocablePin {
    fn pin(span: Span, region: Arc<revocable::Region<Kernel>>) -> Result<Self, Refusal> {
        nv::RevocablePin::pin(span, region)
    }

    fn page_size(&self) -> PageSize {
        self.page_size()
    }

    fn runs(&self) -> &[BarRun] {
        self.runs()
    }
}
