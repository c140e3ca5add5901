// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds the module's logic, with loom's primitives.

use std::cell::Cell;
use std::ops::Deref;
use std::ops::DerefMut;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use loom::sync::Condvar;
use loom::sync::Mutex;
use loom::sync::MutexGuard;
use loom::thread;
use loom::thread::ThreadId;

use crate::account::Account;
use crate::account::Ledger;
use crate::extents::Cut;
use crate::extents::PageSize;
use crate::extents::Run;
use crate::extents::Span;
use crate::ib_core::Umem;
use crate::ib_core::LEN;
use crate::pin::Held;
use crate::provider::Gpu;
use crate::provider::Owner;
use crate::provider::ALLOCATION;
use crate::record::Task;
use crate::refusal::Refusal;
use crate::region;
use crate::revocable;
use crate::revocable::Region;
use crate::roll;
use crate::roll::Book;
use crate::roll::Event;
use crate::roll::Gpus;
use crate::roll::Living;
use crate::roll::PciAddress;
use crate::world::world;
use crate::world::Break;

/// What one user may have pinned: all that the models pin at once.
pub(crate) const LIMIT: u64 = 8 * LEN;

pub(crate) struct Loom;

/// The lock of the accounts is a leaf, and the models do not look at its order: a cell that panics when
/// it is opened twice.
impl Ledger for Loom {
    type User = u32;
    type Accounts = List<Account<u32>>;

    fn user() -> u32 {
        0
    }

    fn open() -> Option<(u64, impl DerefMut<Target = Self::Accounts>)> {
        let accounts = world().accounts.borrow_mut().take();
        let accounts = accounts.expect("nobody calls with the accounts open");
        Some((LIMIT, Opened(accounts)))
    }
}

/// The accounts, until they are given back.
struct Opened(List<Account<u32>>);

impl Deref for Opened {
    type Target = List<Account<u32>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Opened {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        *world().accounts.borrow_mut() = Some(std::mem::take(&mut self.0));
    }
}

impl region::Env for Loom {
    type Lock<T: Send + Unpin> = Monitor<T>;
    type List<T: Send> = List<T>;
    type Device = Device;
    type Table = Table;
    type Pin = NoPin;
    type Mapping = NoPin;

    fn max_pieces() -> u32 {
        1024
    }

    fn caller() -> (Task, u64) {
        let task = Task {
            tgid: world().process() as i32,
            pid: 1,
            comm: [0; 16],
        };
        (task, 0)
    }

    fn is_killed() -> bool {
        false
    }
}

impl revocable::Env for Loom {
    type Monitor<T: Send + Unpin> = Monitor<T>;
    type Shared<T: Send + Sync + 'static> = Arc<T>;
    type Ticket = Ticket;
    type RevocablePin = Pin;
    type BarMapping = Mapping;
    type BarRun = BarRun;
    type Thread = Thread;

    fn share<T: Send + Sync + 'static>(value: T) -> Result<Arc<T>, Refusal> {
        Ok(Arc::new(value))
    }

    fn thread() -> Thread {
        Thread::current()
    }
}

#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Thread(ThreadId, u64);

impl Thread {
    pub(crate) fn current() -> Thread {
        let world = world();
        let salt = match world.is_broken(Break::Strangers) {
            true => world.tick(),
            false => 0,
        };
        Thread(thread::current().id(), salt)
    }
}

pub(crate) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
    /// On the roll; 0: not there.
    number: AtomicU64,
}

impl<T> Monitor<T> {
    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().expect("no poison")
    }
}

impl<T: Send + Unpin> region::Lock<T> for Monitor<T> {
    fn new(value: T) -> Result<Self, Refusal> {
        Ok(Monitor {
            value: Mutex::new(value),
            changed: Condvar::new(),
            number: AtomicU64::new(0),
        })
    }

    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut self.lock())
    }
}

impl<T: Send + Unpin> revocable::Monitor<T> for Monitor<T> {
    fn wait_while(&self, mut condition: impl FnMut(&mut T) -> bool) {
        let mut guard = self.lock();
        while !world().is_broken(Break::NoWait) && condition(&mut guard) {
            guard = self.changed.wait(guard).expect("no poison");
        }
    }

    fn notify_all(&self) {
        self.changed.notify_all();
    }
}

impl<T> roll::Place for Monitor<T> {
    fn with<R>(&self, f: impl FnOnce(&mut Book, &mut Option<Living>) -> R) -> R {
        world().with_roll(|roll| {
            let number = self.number.load(Ordering::Relaxed);
            let mut slot = roll.living.remove(&number);
            let result = f(&mut roll.book, &mut slot);
            let number = slot.as_ref().map_or(0, |living| living.number);
            self.number.store(number, Ordering::Relaxed);
            if let Some(living) = slot {
                let before = roll.living.insert(number, living);
                assert!(before.is_none(), "a number comes twice on the roll");
            }
            result
        })
    }

    fn tell(&self, _event: Event) {}
}

impl<T> Drop for Monitor<T> {
    fn drop(&mut self) {
        if self.number.load(Ordering::Relaxed) != 0 && !std::thread::panicking() {
            roll::gone(self);
        }
    }
}

pub(crate) struct SlotLock(Mutex<bool>);

impl region::Lock<bool> for SlotLock {
    fn new(value: bool) -> Result<Self, Refusal> {
        Ok(SlotLock(Mutex::new(value)))
    }

    fn with<R>(&self, f: impl FnOnce(&mut bool) -> R) -> R {
        let mut guard = self.0.lock().expect("no poison");
        let world = world();
        if world.is_broken(Break::OpenSlot) {
            let mut copy = *guard;
            drop(guard);
            let result = f(&mut copy);
            if !copy {
                *self.0.lock().expect("no poison") = false;
            }
            return result;
        }
        *guard |= world.is_broken(Break::Undead);
        f(&mut guard)
    }
}

pub(crate) struct List<T>(Vec<T>);

impl<T> Default for List<T> {
    fn default() -> Self {
        List(Vec::new())
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
        self.0.push(value);
        Ok(())
    }
}

/// The device of one registration.
pub(crate) struct Device(usize);

impl Device {
    pub(crate) fn of(umem: &Umem) -> Device {
        Device(umem.number())
    }
}

impl region::Device for Device {
    fn max_segment(&self) -> u32 {
        1 << 31
    }

    fn address(&self) -> PciAddress {
        PciAddress(0)
    }
}

/// A scatter list: a piece of memory that ib_core writes to.
pub(crate) struct Table(usize);

impl region::Table for Table {
    type Lent = usize;

    fn build(runs: impl Iterator<Item = Run>, cut: Cut) -> Result<Self, Refusal> {
        let mut count = 0;
        cut.entries(runs, |_| count += 1);
        assert_eq!(count, 1);
        Ok(Table(world().alloc("the scatter list")))
    }

    fn entries(&self) -> u32 {
        1
    }

    fn lend(&self) -> usize {
        self.0
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if !world().is_broken(Break::EarlyTable) {
            world().memory(self.0).free();
        }
    }
}

/// The other flavour, which has no callbacks.
pub(crate) struct NoPin;

impl region::Pinned for NoPin {
    type Device = Device;
    type Mapping = NoPin;

    fn pin(_span: Span) -> Result<Self, Refusal> {
        Err(Refusal::Unloading)
    }

    fn page_size(&self) -> PageSize {
        PageSize::KIB_64
    }

    fn gpus(&self) -> Gpus {
        Gpus::default()
    }

    fn map(&self, _device: &Device) -> Result<NoPin, Refusal> {
        Err(Refusal::Unloading)
    }
}

impl region::Mapping for NoPin {
    fn addresses(&self) -> &[u64] {
        &[]
    }
}

/// ib_core's number for a registration, and, for the record, which one that is.
pub(crate) struct Ticket {
    number: usize,
    umem: usize,
    used: Cell<bool>,
}

impl Ticket {
    pub(crate) fn new(number: usize, umem: &Umem) -> Ticket {
        Ticket {
            number,
            umem: umem.number(),
            used: Cell::new(false),
        }
    }
}

impl revocable::Ticket for Ticket {
    fn revoke(self) {
        self.used.set(true);
        let world = world();
        if !world.is_broken(Break::Silent) {
            let umem = world.ib_core.umem(self.umem);
            world.ib_core.invalidate(self.number, &umem);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let world = world();
        if world.is_broken(Break::StaleTicket) && !self.used.get() {
            let (number, umem) = (self.number, self.umem);
            world.ib_core.stale.borrow_mut().push((number, umem));
        }
    }
}

/// Physical addresses, by their allocation.
pub(crate) struct BarRun(usize);

pub(crate) struct Pin {
    _held: Held<Gpu>,
    runs: [BarRun; 1],
}

impl revocable::RevocablePin<Loom> for Pin {
    fn pin(span: Span, region: Arc<Region<Loom>>) -> Result<Self, Refusal> {
        let held = Held::<Gpu>::new(span, Owner::Region(region))?;
        if world().is_broken(Break::LateRead) {
            held.read(|table| Ok(table.table()))?.read();
        }
        held.read(|table| {
            table.table().read();
            Ok(())
        })?;
        Ok(Pin {
            _held: held,
            runs: [BarRun((span.start() / ALLOCATION) as usize)],
        })
    }

    fn page_size(&self) -> PageSize {
        PageSize::KIB_64
    }

    fn gpus(&self) -> Gpus {
        Gpus::default()
    }

    fn runs(&self) -> &[BarRun] {
        &self.runs
    }
}

/// DMA addresses: a piece of memory that the HCA uses until it is stopped.
pub(crate) struct Mapping {
    memory: usize,
    umem: usize,
    runs: [Run; 1],
}

impl revocable::BarMapping for Mapping {
    type Device = Device;
    type BarRun = BarRun;

    fn map<'a>(device: &Device, runs: impl Iterator<Item = &'a BarRun>) -> Result<Self, Refusal> {
        let world = world();
        for BarRun(allocation) in runs {
            world.provider.use_memory(*allocation);
        }
        let memory = world.alloc("a DMA mapping");
        world.ib_core.umem(device.0).mapping.set(Some(memory));
        Ok(Mapping {
            memory,
            umem: device.0,
            runs: [Run { addr: 0, len: LEN }],
        })
    }

    fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let world = world();
        let umem = world.ib_core.umem(self.umem);
        world.provider.use_memory(umem.allocation);
        world.memory(self.memory).free();
        if world.is_broken(Break::EarlyTable) {
            umem.free_table();
        }
    }
}
