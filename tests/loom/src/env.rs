// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds the module's logic, with loom's primitives. `src/env.rs` has the kernel's, and says what
//! each name stands for.

use std::cell::Cell;
use std::ops::Deref;
use std::ops::DerefMut;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use loom::sync::Condvar;
use loom::sync::Mutex;
use loom::sync::MutexGuard;
use loom::thread;
use loom::thread::ThreadId;

use crate::account::Account;
use crate::device::Gpus;
use crate::device::PciAddress;
use crate::extents::Cut;
use crate::extents::PageSize;
use crate::extents::Run;
use crate::extents::Span;
use crate::ib_core::Umem;
use crate::ib_core::LEN;
use crate::pin::Directory;
use crate::pin::Held;
use crate::pin::Revoke;
use crate::provider::ALLOCATION;
use crate::record::Task;
use crate::refusal::Refusal;
use crate::registry::Book;
use crate::registry::Event;
use crate::registry::Living;
use crate::world::world;
use crate::world::Break;

pub(crate) use std::sync::Arc as Shared;

pub(crate) use crate::provider::gate_read;
pub(crate) use crate::provider::gate_write;
pub(crate) use crate::provider::get_pages;
pub(crate) use crate::provider::is_exiting;
pub(crate) use crate::provider::kept;
pub(crate) use crate::provider::late_callback;
pub(crate) use crate::provider::process;
pub(crate) use crate::provider::put_pages;
pub(crate) use crate::provider::retry;
pub(crate) use crate::provider::stray_callback;
pub(crate) use crate::provider::ModuleHold;
pub(crate) use crate::provider::PageTable;
pub(crate) use crate::provider::Slots;

/// What one user may have pinned: all that the models pin at once.
pub(crate) const LIMIT: u64 = 8 * LEN;

pub(crate) use NoPin as DmaMapping;
pub(crate) use NoPin as PersistentPin;

pub(crate) use Monitor as Lock;

/// What ib_core gets to see of a scatter list.
pub(crate) type LentTable = usize;
pub(crate) type Process = u32;
pub(crate) type User = u32;

pub(crate) fn share<T>(value: T) -> Result<Shared<T>, Refusal> {
    Ok(Shared::new(value))
}

pub(crate) fn user() -> User {
    0
}

pub(crate) fn user_limit() -> Option<u64> {
    Some(LIMIT)
}

pub(crate) const ACCOUNTS_LOCK: () = ();
pub(crate) const DIRECTORY_LOCK: () = ();

/// A static of the module's: each run of a model has what stands in it for itself.
pub(crate) struct StaticMutex<T>(std::sync::Mutex<T>);

impl<T> StaticMutex<T> {
    pub(crate) const fn new(_lock: (), value: T) -> Self {
        StaticMutex(std::sync::Mutex::new(value))
    }
}

impl StaticMutex<List<Account>> {
    /// The lock of the accounts is a leaf, and the models do not look at its order: a cell that panics when
    /// it is opened twice.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut List<Account>) -> R) -> R {
        let accounts = world().accounts.borrow_mut().take();
        let mut accounts = accounts.expect("nobody calls with the accounts open");
        let result = f(&mut accounts);
        *world().accounts.borrow_mut() = Some(accounts);
        result
    }
}

impl StaticMutex<Option<Directory>> {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Option<Directory>) -> R) -> R {
        f(&mut world().directory.lock().expect("no poison"))
    }
}

/// The provider calls the module by this.
pub(crate) trait Callback {
    fn freed(number: usize);
}

pub(crate) fn caller() -> (Task, u64) {
    let task = Task {
        tgid: world().process() as i32,
        pid: 1,
        comm: [0; 16],
    };
    (task, 0)
}

pub(crate) fn is_killed() -> bool {
    false
}

pub(crate) fn max_pieces() -> u32 {
    1024
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
}

impl<T> Monitor<T> {
    pub(crate) fn new(value: T) -> Self {
        Monitor {
            value: Mutex::new(value),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().expect("no poison")
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut self.lock())
    }

    pub(crate) fn wait_while(&self, mut condition: impl FnMut(&mut T) -> bool) {
        let mut guard = self.lock();
        while !world().is_broken(Break::NoWait) && condition(&mut guard) {
            guard = self.changed.wait(guard).expect("no poison");
        }
    }

    pub(crate) fn notify_all(&self) {
        self.changed.notify_all();
    }
}

/// A registration, with its entry.
pub(crate) struct Registered<T, L> {
    /// First: it leaves the roll before the rest goes.
    pub(crate) entry: Entry,
    pub(crate) state: L,
    pub(crate) of: T,
}

impl<T, L> Registered<T, L> {
    pub(crate) fn new(of: T, state: L) -> Result<Shared<Self>, Refusal> {
        share(Registered {
            entry: Entry(AtomicU64::new(0)),
            state,
            of,
        })
    }
}

/// The number on the roll; 0: not there.
pub(crate) struct Entry(AtomicU64);

impl Entry {
    pub(crate) fn update(&self, f: impl FnOnce(&mut Book, &mut Option<Living>) -> Option<Event>) {
        world().with_roll(|roll| {
            let number = self.0.load(Ordering::Relaxed);
            let mut slot = roll.living.remove(&number);
            f(&mut roll.book, &mut slot);
            let number = slot.as_ref().map_or(0, |living| living.number);
            self.0.store(number, Ordering::Relaxed);
            if let Some(living) = slot {
                let before = roll.living.insert(number, living);
                assert!(before.is_none(), "a number comes twice on the roll");
            }
        });
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.0.load(Ordering::Relaxed) != 0 && !std::thread::panicking() {
            self.update(Book::gone);
        }
    }
}

pub(crate) struct SlotLock(Mutex<bool>);

impl SlotLock {
    pub(crate) fn new(value: bool) -> Result<Self, Refusal> {
        Ok(SlotLock(Mutex::new(value)))
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut bool) -> R) -> R {
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

impl<T> List<T> {
    pub(crate) const fn new() -> Self {
        List(Vec::new())
    }
}

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

impl<T> List<T> {
    pub(crate) fn push(&mut self, value: T) -> Result<(), Refusal> {
        self.0.push(value);
        Ok(())
    }
}

/// The device of one registration.
pub(crate) struct PciDevice(usize);

impl PciDevice {
    pub(crate) fn of(umem: &Umem) -> PciDevice {
        PciDevice(umem.number())
    }

    pub(crate) fn max_segment(&self) -> u32 {
        1 << 31
    }

    pub(crate) fn address(&self) -> PciAddress {
        PciAddress(0)
    }
}

/// A scatter list: a piece of memory that ib_core writes to.
pub(crate) struct Table(usize);

impl Table {
    pub(crate) fn build(runs: impl Iterator<Item = Run>, cut: Cut) -> Result<Self, Refusal> {
        let mut count = 0;
        cut.entries(runs, |_| count += 1);
        assert_eq!(count, 1);
        Ok(Table(world().alloc("the scatter list")))
    }

    pub(crate) fn entries(&self) -> u32 {
        1
    }

    pub(crate) fn lend(&self) -> LentTable {
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

/// A pin or a mapping of the other flavour, which has no callbacks: there is none.
pub(crate) struct NoPin;

impl NoPin {
    pub(crate) fn pin(_span: Span) -> Result<Self, Refusal> {
        Err(Refusal::Unloading)
    }

    pub(crate) fn page_size(&self) -> PageSize {
        PageSize::KIB_64
    }

    pub(crate) fn gpus(&self) -> Gpus {
        Gpus::default()
    }

    pub(crate) fn map(&self, _device: &PciDevice) -> Result<NoPin, Refusal> {
        Err(Refusal::Unloading)
    }

    pub(crate) fn addresses(&self) -> &[u64] {
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

    pub(crate) fn invalidate(self) {
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

pub(crate) struct RevocablePin {
    _held: Held,
    runs: [BarRun; 1],
}

impl RevocablePin {
    pub(crate) fn pin(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Refusal> {
        let held = Held::new(span, region)?;
        if world().is_broken(Break::LateRead) {
            held.read(|table| Ok(table.table()))?.read();
        }
        held.read(|table| {
            table.table().read();
            Ok(())
        })?;
        Ok(RevocablePin {
            _held: held,
            runs: [BarRun((span.start() / ALLOCATION) as usize)],
        })
    }

    pub(crate) fn page_size(&self) -> PageSize {
        PageSize::KIB_64
    }

    pub(crate) fn gpus(&self) -> Gpus {
        Gpus::default()
    }

    pub(crate) fn runs(&self) -> &[BarRun] {
        &self.runs
    }
}

/// DMA addresses: a piece of memory that the HCA uses until it is stopped.
pub(crate) struct BarMapping {
    memory: usize,
    umem: usize,
    runs: [Run; 1],
}

impl BarMapping {
    pub(crate) fn map<'a>(
        device: &PciDevice,
        runs: impl Iterator<Item = &'a BarRun>,
    ) -> Result<Self, Refusal> {
        let world = world();
        for BarRun(allocation) in runs {
            world.provider.use_memory(*allocation);
        }
        let memory = world.alloc("a DMA mapping");
        world.ib_core.umem(device.0).mapping.set(Some(memory));
        Ok(BarMapping {
            memory,
            umem: device.0,
            runs: [Run { addr: 0, len: LEN }],
        })
    }

    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Drop for BarMapping {
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
