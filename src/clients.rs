// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The two clients that ib_core sees: each joins a flavour of region to the kernel.

use core::ops::Deref;
use core::ops::DerefMut;

use kernel::prelude::*;
use kernel::sync::atomic::Acquire;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Release;
use kernel::sync::Arc;
use kernel::task::Task;

use crate::extents::Entry;
use crate::extents::PageSize;
use crate::extents::Run;
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

/// CAST: A page is at most 2 GiB.
fn bytes(page: PageSize) -> usize {
    page.bytes() as usize
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
        let table = device.ok_or(Refusal::NotPci).and_then(|d| region.map(d));
        step("dma_map", region.span(), table)
    }

    fn dma_unmap(region: &Self::Region) {
        region.unmap();
    }

    fn page_size(region: &Self::Region) -> usize {
        bytes(region.page_size())
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
        let table = device.ok_or(Refusal::NotPci).and_then(|d| region.map(d));
        step("dma_map", region.span(), table)
    }

    fn dma_unmap(region: &Self::Region) {
        region.unmap();
    }

    fn page_size(region: &Self::Region) -> usize {
        bytes(region.page_size())
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
    type List<T: Send> = List<T>;
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
    type Thread = Thread;

    fn share<T: Send + Sync + 'static>(value: T) -> Result<Arc<T>, Refusal> {
        Arc::new(value, GFP_KERNEL).map_err(|_| Refusal::NoMemory)
    }

    fn thread() -> Thread {
        // A number, to compare with: a task that ended and one in its place are never in a
        // callback of one region at once.
        Thread(Task::current_raw().addr())
    }
}

/// The address of a task, to compare with others.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Thread(usize);

impl<T: Send + Unpin> region::Lock<T> for sys::Lock<T> {
    fn new(value: T) -> Result<Self, Refusal> {
        sys::Lock::new(value).map_err(|_| Refusal::NoMemory)
    }

    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        self.with(f)
    }
}

impl<T: Send + Unpin> region::Lock<T> for sys::Monitor<T> {
    fn new(value: T) -> Result<Self, Refusal> {
        sys::Monitor::new(value).map_err(|_| Refusal::NoMemory)
    }

    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        self.with(f)
    }
}

impl<T: Send + Unpin> revocable::Monitor<T> for sys::Monitor<T> {
    fn wait_while(&self, condition: impl FnMut(&mut T) -> bool) {
        self.wait_while(condition);
    }

    fn notify_all(&self) {
        self.notify_all();
    }
}

/// [`KVec`] as a [`region::List`].
pub(crate) struct List<T>(KVec<T>);

impl<T> Default for List<T> {
    fn default() -> Self {
        List(KVec::new())
    }
}

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T: Send> region::List<T> for List<T> {
    fn push(&mut self, value: T) -> Result<(), Refusal> {
        self.0
            .push(value, GFP_KERNEL)
            .map_err(|_| Refusal::NoMemory)
    }
}

impl region::Device for PciDevice {
    fn max_segment(&self) -> u32 {
        self.max_segment()
    }
}

impl region::Table for sys::Table {
    type Lent = LentTable;

    fn build(entries: impl Iterator<Item = Entry> + Clone) -> Result<Self, Refusal> {
        sys::Table::build(entries)
    }

    fn lend(&self) -> LentTable {
        self.lend()
    }
}

impl region::Pinned for nv::PersistentPin {
    type Device = PciDevice;
    type Mapping = nv::DmaMapping;

    fn pin(span: Span) -> Result<Self, Refusal> {
        nv::PersistentPin::pin(span)
    }

    fn page_size(&self) -> PageSize {
        self.page_size()
    }

    fn map(&self, device: &PciDevice) -> Result<nv::DmaMapping, Refusal> {
        self.map(device)
    }
}

impl region::Mapping for nv::DmaMapping {
    fn addresses(&self) -> &[u64] {
        self.addresses()
    }
}

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

    fn runs(&self) -> &[Run] {
        self.runs()
    }
}

impl revocable::BarMapping for sys::BarMapping {
    type Device = PciDevice;

    fn map<'a>(device: &PciDevice, runs: impl Iterator<Item = &'a Run>) -> Result<Self, Refusal> {
        sys::BarMapping::map(device, runs)
    }

    fn runs(&self) -> &[Run] {
        self.runs()
    }
}
