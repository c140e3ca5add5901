// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds the module's logic. `src/env.rs` has the kernel's, and says what each name stands for.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::ops::DerefMut;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Mutex as StdMutex;

use crate::account::Account;
use crate::device::Gpus;
use crate::device::PciAddress;
use crate::extents::Cut;
use crate::extents::Entry;
use crate::extents::PageSize;
use crate::extents::Run;
use crate::extents::Span;
use crate::fakes::provider::Content;
use crate::fakes::provider::End;
use crate::fakes::provider::DMA_BASE;
use crate::fakes::world::world;
use crate::fakes::world::Break;
use crate::pin::Directory;
use crate::pin::Held;
use crate::pin::Revoke;
use crate::record::Task;
use crate::refusal::Refusal;
use crate::registry::Book;
use crate::registry::Event;
use crate::registry::Living;
use crate::registry::Newcomer;
use crate::sync::thread;
use crate::sync::thread::ThreadId;
use crate::sync::Condvar;
use crate::sync::Mutex;
use crate::sync::MutexGuard;

pub(crate) use std::sync::Arc as Shared;

pub(crate) use crate::fakes::ib_core::Ticket;
pub(crate) use crate::fakes::provider::gate_read;
pub(crate) use crate::fakes::provider::gate_write;
pub(crate) use crate::fakes::provider::get_pages;
pub(crate) use crate::fakes::provider::kept;
pub(crate) use crate::fakes::provider::late_callback;
pub(crate) use crate::fakes::provider::put_pages;
pub(crate) use crate::fakes::provider::retry;
pub(crate) use crate::fakes::provider::stray_callback;
pub(crate) use crate::fakes::provider::ModuleHold;
pub(crate) use crate::fakes::provider::PageTable;

pub(crate) use Monitor as Lock;

pub(crate) type Process = u32;
pub(crate) type User = u32;

/// Where the HCA is.
pub(crate) const HCA: PciAddress = PciAddress(0x0300 | 5 << 3 | 1);

/// How far DMA addresses are from physical ones in the revocable flavour.
pub(crate) const IOMMU_OFFSET: u64 = 0x100_0000_0000;

pub(crate) fn share<T>(value: T) -> Result<Shared<T>, Refusal> {
    Ok(Shared::new(value))
}

pub(crate) fn user() -> User {
    world().user.get()
}

pub(crate) fn user_limit() -> Option<u64> {
    world().user_limit.get()
}

pub(crate) const ACCOUNTS_LOCK: () = ();
pub(crate) const DIRECTORY_LOCK: () = ();

/// A static of the module's: each world has what stands in it for itself.
pub(crate) struct StaticMutex<T>(StdMutex<T>);

impl<T> StaticMutex<T> {
    pub(crate) const fn new(_lock: (), value: T) -> Self {
        StaticMutex(StdMutex::new(value))
    }
}

impl StaticMutex<List<Account>> {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut List<Account>) -> R) -> R {
        f(&mut world().accounts.borrow_mut())
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
        tgid: 154,
        pid: 155,
        comm: *b"a test=\0\0\0\0\0\0\0\0\0",
    };
    (task, 6_119_592)
}

pub(crate) fn process() -> Process {
    let world = world();
    match world.is_broken(Break::OneProcess) {
        true => 1,
        false => world.process(),
    }
}

pub(crate) fn is_exiting() -> bool {
    let world = world();
    world.exits.get() && !world.is_broken(Break::NoExit)
}

pub(crate) fn is_killed() -> bool {
    let world = world();
    let left = world.killed_after.get();
    world
        .killed_after
        .set(left.map(|left| left.saturating_sub(1)));
    left == Some(0)
}

pub(crate) fn max_pieces() -> u32 {
    world().max_pieces.get().unwrap_or(1024)
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
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

/// A registration, with its entry. The order of the fields is the kernel's.
pub(crate) struct Registered<T, L> {
    pub(crate) state: L,
    pub(crate) entry: Stand,
    pub(crate) of: T,
}

impl<T, L> Registered<T, L> {
    pub(crate) fn new(of: T, state: L) -> Result<Shared<Self>, Refusal> {
        share(Registered {
            state,
            entry: Stand::default(),
            of,
        })
    }
}

/// The number on the roll; 0: not there.
#[derive(Default)]
pub(crate) struct Stand(AtomicU64);

impl Stand {
    pub(crate) fn update(&self, f: impl FnOnce(&mut Book, &mut Option<Living>) -> Option<Event>) {
        world().roll.update(&self.0, f);
    }

    pub(crate) fn enter(&self, new: Newcomer) {
        self.update(|book, slot| book.enter(slot, new));
    }

    pub(crate) fn released(&self, kept: bool) {
        self.update(|book, slot| book.released(slot, kept));
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        if self.0.load(Relaxed) != 0 && !thread::panicking() {
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

    pub(crate) fn push(&mut self, value: T) -> Result<(), Refusal> {
        self.0.push(value);
        Ok(())
    }
}

impl<T> Default for List<T> {
    fn default() -> Self {
        List::new()
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

pub(crate) struct Slots<T>(BTreeMap<usize, T>);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Slots(BTreeMap::new())
    }
}

impl<T> Slots<T> {
    pub(crate) fn insert(&mut self, number: usize, slot: T) -> Result<(), Refusal> {
        assert!(self.0.insert(number, slot).is_none());
        Ok(())
    }

    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        self.0.get(&number)
    }

    pub(crate) fn remove(&mut self, number: usize) -> Option<T> {
        self.0.remove(&number)
    }
}

/// What maps for the HCA; in ib_core, the device of one registration.
#[derive(Default)]
pub(crate) struct PciDevice(pub(crate) Option<usize>);

impl PciDevice {
    pub(crate) fn max_segment(&self) -> u32 {
        1 << 31
    }

    pub(crate) fn address(&self) -> PciAddress {
        HCA
    }
}

/// A scatter list: a piece of memory that ib_core writes to.
pub(crate) struct Table {
    entries: Vec<Entry>,
    memory: usize,
}

/// What ib_core gets to see of a scatter list.
pub(crate) struct LentTable {
    pub(crate) entries: Vec<Entry>,
    pub(crate) memory: usize,
}

impl Deref for LentTable {
    type Target = [Entry];

    fn deref(&self) -> &[Entry] {
        &self.entries
    }
}

impl Table {
    pub(crate) fn build(runs: impl Iterator<Item = Run>, cut: Cut) -> Result<Self, Refusal> {
        let world = world();
        if world.fails("table") {
            return Err(Refusal::NoMemory);
        }
        let mut entries = Vec::new();
        cut.entries(runs, |entry| entries.push(entry));
        let memory = world.alloc("the scatter list");
        Ok(Table { entries, memory })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries.len() as u32
    }

    pub(crate) fn lend(&self) -> LentTable {
        LentTable {
            entries: self.entries.clone(),
            memory: self.memory,
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let world = world();
        if !world.is_broken(Break::EarlyTable) {
            world.memory(self.memory).free();
        }
        world.record("table freed");
    }
}

/// Two allocations share a GPU, as their addresses tell.
fn gpus(addresses: impl Iterator<Item = u64>) -> Gpus {
    Gpus::all(addresses.map(|addr| Gpus::one(((addr - DMA_BASE) >> 37) as u32)))
}

pub(crate) struct PersistentPin(Content);

impl PersistentPin {
    pub(crate) fn pin(span: Span) -> Result<Self, Refusal> {
        world().provider.get_persistent(&span).map(PersistentPin)
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.0.page
    }

    pub(crate) fn gpus(&self) -> Gpus {
        gpus(self.0.addresses.iter().copied())
    }

    pub(crate) fn map(&self, _device: &PciDevice) -> Result<DmaMapping, Refusal> {
        let world = world();
        world.record("map");
        if world.fails("map") || world.map_is_to_fail() {
            return Err(Refusal::Map(-5));
        }
        Ok(DmaMapping(self.0.addresses.clone()))
    }
}

impl Drop for PersistentPin {
    fn drop(&mut self) {
        let world = world();
        world.hook(&world.on_unpin);
        world.provider.put_persistent();
    }
}

pub(crate) struct DmaMapping(Vec<u64>);

impl DmaMapping {
    pub(crate) fn addresses(&self) -> &[u64] {
        &self.0
    }
}

impl Drop for DmaMapping {
    fn drop(&mut self) {
        world().record("unmap");
    }
}

/// Physical addresses, and the GPU's memory there.
pub(crate) struct BarRun {
    run: Run,
    gpu: usize,
}

pub(crate) struct RevocablePin {
    /// Until the drop.
    held: Option<Held>,
    table: PageTable,
    page: PageSize,
    runs: Vec<BarRun>,
}

impl RevocablePin {
    pub(crate) fn pin(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Refusal> {
        let held = Held::new(span, region)?;
        let world = world();
        let mut this = RevocablePin {
            held: None,
            table: world.provider.newest(),
            page: PageSize::KIB_64,
            runs: Vec::new(),
        };
        let held = this.held.insert(held);
        if world.is_broken(Break::LateRead) {
            held.read(|table| Ok(table.table()))?.read();
        }
        let content = held.read(|table| Ok(table.table().read()))?;
        this.page = content.page;
        crate::extents::steps(content.runs(), |run| {
            this.runs.push(BarRun {
                run,
                gpu: content.gpu,
            });
        });
        Ok(this)
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    pub(crate) fn gpus(&self) -> Gpus {
        gpus(self.runs.iter().map(|bar| bar.run.addr))
    }

    pub(crate) fn runs(&self) -> &[BarRun] {
        &self.runs
    }
}

impl Drop for RevocablePin {
    fn drop(&mut self) {
        drop(self.held.take());
        let world = world();
        world.record(match world.provider.end(self.table) {
            Some(End::Put) => "unpin",
            Some(End::Callback) => "no unpin",
            None => "kept",
        });
    }
}

/// DMA addresses: a piece of memory that the HCA uses until it is stopped.
pub(crate) struct BarMapping {
    memory: usize,
    umem: Option<usize>,
    /// The GPU's memory behind them.
    gpus: Vec<usize>,
    runs: Vec<Run>,
}

impl BarMapping {
    pub(crate) fn map<'a>(
        device: &PciDevice,
        runs: impl Iterator<Item = &'a BarRun>,
    ) -> Result<Self, Refusal> {
        let world = world();
        world.record("map");
        if world.fails("map") {
            return Err(Refusal::MapResource { mapped: 0 });
        }
        let (mut gpus, mut mapped) = (Vec::new(), Vec::new());
        for BarRun { run, gpu } in runs {
            world.memory(*gpu).read();
            gpus.push(*gpu);
            mapped.push(Run {
                addr: run.addr + IOMMU_OFFSET,
                len: run.len,
            });
        }
        let memory = world.alloc("a DMA mapping");
        if let Some(umem) = device.0 {
            world.ib_core.umem(umem).mapped(memory, &gpus);
        }
        Ok(BarMapping {
            memory,
            umem: device.0,
            gpus,
            runs: mapped,
        })
    }

    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Drop for BarMapping {
    fn drop(&mut self) {
        let world = world();
        world.record("unmap");
        // ib_core unmaps before it releases, which tests do without.
        let umem = self.umem.map(|umem| world.ib_core.umem(umem));
        for gpu in self.gpus.iter().filter(|_| umem.is_some()) {
            world.memory(*gpu).read();
        }
        world.memory(self.memory).free();
        if let Some(umem) = umem.filter(|_| world.is_broken(Break::EarlyTable)) {
            umem.free_table();
        }
    }
}
