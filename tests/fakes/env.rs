// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! User-space stand-ins for the kernel services that the module's logic uses. `src/env.rs` has the
//! kernel's versions and documents each name.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex as StdMutex, OnceLock, PoisonError};

use crate::callback_pin::{CallbackPin, CallbackTable, Revoke};
use crate::device::{Gpus, PciAddress, Reach};
use crate::fakes::provider::{Content, End, DMA_BASE};
use crate::fakes::world::{world, Break};
use crate::history::Task;
use crate::mr::Mr;
use crate::quota::Usages;
use crate::ranges::{AddrRange, PageSize, SgLayout, Span};
use crate::reason::Reason;
use crate::registry::{Registration, RegistrationInfo, Registry, Transition};
use crate::sync::thread::ThreadId;
use crate::sync::{thread, Condvar, Mutex, MutexGuard, SCRIPTED};

pub(crate) use std::sync::Arc as Shared;

pub(crate) use crate::fakes::ib_core::Ticket;
pub(crate) use crate::fakes::provider::{
    get_pages, orphaned, put_pages, put_rwsem_read, put_rwsem_write, report, retry, ModuleRef,
    PageTable,
};

pub(crate) type Process = u32;
pub(crate) type User = usize;

/// PCI address of the HCA.
pub(crate) const HCA: PciAddress = PciAddress(0x0300 | 5 << 3 | 1);

/// Difference between DMA addresses and physical addresses in mappings that this module makes.
pub(crate) const IOMMU_OFFSET: u64 = 0x100_0000_0000;

fn share<T>(value: T) -> Result<Shared<T>, Reason> {
    world().may_allocate();
    Ok(Shared::new(value))
}

pub(crate) fn user() -> User {
    world().user.get()
}

pub(crate) fn user_limit() -> Option<u64> {
    world().user_limit.get()
}

pub(crate) const QUOTA_LOCK: () = ();
pub(crate) const CALLBACKS_LOCK: () = ();

/// A value that is set once. The module sets the value before other threads can see the containing
/// object, so the models need not explore the order of the accesses.
pub(crate) struct SetOnce<T>(OnceLock<T>);

impl<T: Copy> SetOnce<T> {
    pub(crate) const fn new() -> Self {
        SetOnce(OnceLock::new())
    }

    pub(crate) fn populate(&self, value: T) -> bool {
        self.0.set(value).is_ok()
    }

    pub(crate) fn copy(&self) -> Option<T> {
        self.0.get().copied()
    }
}

/// Empty stand-in for a registration's statistics in ib_core.
pub(crate) struct MrStats;

/// ib_core's reference to a registration. Dropping the reference calls `release`.
pub(crate) struct Held<M: Mr>(Option<Shared<M>>);

impl<M: Mr> Held<M> {
    /// Calls `acquire`.
    pub(crate) fn pin(addr: u64, len: u64) -> Result<Self, Reason> {
        M::pin(MrStats, addr, len).map(|mr| Held(Some(mr)))
    }
}

impl<M: Mr> Deref for Held<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.0.as_ref().expect("not released")
    }
}

impl<M: Mr> Drop for Held<M> {
    fn drop(&mut self) {
        M::release(self.0.take().expect("not released"));
    }
}

/// A static variable of the module with a lock. Each world has its
/// own value.
pub(crate) struct StaticMutex<T>(StdMutex<T>);

impl<T> StaticMutex<T> {
    pub(crate) const fn new(_lock: (), value: T) -> Self {
        StaticMutex(StdMutex::new(value))
    }
}

impl StaticMutex<Usages> {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Usages) -> R) -> R {
        let world = world();
        let mut usages = world.usages.borrow_mut();
        let _locked = world.locked("the users' lock");
        f(&mut usages)
    }
}

impl StaticMutex<Option<CallbackTable>> {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Option<CallbackTable>) -> R) -> R {
        let world = world();
        let mut callbacks = world.callbacks.lock().expect("no poison");
        let _locked = world.locked("the table's lock");
        f(&mut callbacks)
    }
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

pub(crate) fn max_chunks() -> u32 {
    world().max_chunks.get().unwrap_or(1024)
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

/// The lock of a persistent registration. No callback takes this lock.
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Lock(Mutex::new(value))
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut self.0.lock().expect("no poison"))
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

    /// Locks the value. Ignores poison, so a test that fails with the lock held can still drop its
    /// objects.
    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let mut guard = self.lock();
        let world = world();
        let _locked = world.locked("the region's lock");
        f(&mut guard)
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

/// A registration, and its entry in the registry. The order of the fields is that of the kernel's
/// version.
pub(crate) struct Registered<T, L> {
    pub(crate) state: L,
    pub(crate) entry: Entry,
    pub(crate) of: T,
}

impl<T, L> Registered<T, L> {
    pub(crate) fn new(of: T, state: L) -> Result<Shared<Self>, Reason> {
        share(Registered {
            state,
            entry: Entry::default(),
            of,
        })
    }
}

/// Number of the registration in the registry, or 0 if it is not there.
#[derive(Default)]
pub(crate) struct Entry(AtomicU64);

impl Entry {
    pub(crate) fn update(
        &self,
        f: impl FnOnce(&mut Registry, &mut Option<Registration>) -> Option<Transition>,
    ) {
        world().registry.update(&self.0, f);
    }

    pub(crate) fn add(&self, info: RegistrationInfo) {
        self.update(|stats, slot| stats.add(slot, info));
    }

    pub(crate) fn released(&self, orphaned: bool) {
        self.update(|stats, slot| stats.released(slot, orphaned));
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.0.load(Relaxed) != 0 && !thread::panicking() {
            self.update(Registry::remove);
        }
    }
}

pub(crate) struct EntryLock<T> {
    value: Mutex<bool>,
    pub(crate) of: T,
}

impl<T> EntryLock<T> {
    pub(crate) fn new(value: bool, of: T) -> Result<Shared<Self>, Reason> {
        let value = Mutex::new(value);
        share(EntryLock { value, of })
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut bool) -> R) -> R {
        let mut guard = self.value.lock().expect("no poison");
        let world = world();
        let _locked = world.locked("an entry's lock");
        if world.is_broken(Break::UnlockedEntry) {
            let mut copy = *guard;
            drop(guard);
            let result = f(&mut copy);
            if !copy {
                *self.value.lock().expect("no poison") = false;
            }
            return result;
        }
        *guard |= world.is_broken(Break::Undead);
        f(&mut guard)
    }
}

impl<T> Drop for EntryLock<T> {
    fn drop(&mut self) {
        world().provider.record("let go");
    }
}

pub(crate) struct SmallVec<T>(Vec<T>);

impl<T> SmallVec<T> {
    pub(crate) fn push(&mut self, value: T) -> Result<(), Reason> {
        world().may_allocate();
        self.0.push(value);
        Ok(())
    }
}

impl<T> Default for SmallVec<T> {
    fn default() -> Self {
        SmallVec(Vec::new())
    }
}

impl<T> Deref for SmallVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for SmallVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

/// A map from numbers to values. The kernel's version is a red-black tree.
pub(crate) struct IdMap<T>(BTreeMap<usize, T>);

impl<T> Default for IdMap<T> {
    fn default() -> Self {
        IdMap(BTreeMap::new())
    }
}

impl<T> IdMap<T> {
    pub(crate) fn insert(&mut self, (number, value): (usize, T)) -> Option<(usize, T)> {
        assert!(self.0.insert(number, value).is_none());
        None
    }

    pub(crate) fn get(&self, number: &usize) -> Option<&T> {
        self.0.get(number)
    }

    pub(crate) fn get_mut(&mut self, number: &usize) -> Option<&mut T> {
        self.0.get_mut(number)
    }

    pub(crate) fn remove(&mut self, number: &usize) -> Option<T> {
        self.0.remove(number)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

pub(crate) const GFP_KERNEL: () = ();

pub(crate) struct IdSlot<T>(PhantomData<T>);

impl<T> IdSlot<T> {
    pub(crate) fn new(_flags: ()) -> Result<Self, Reason> {
        world().may_allocate();
        Ok(IdSlot(PhantomData))
    }

    pub(crate) fn into_node(self, number: usize, value: T) -> (usize, T) {
        (number, value)
    }
}

/// The HCA's PCI device. In calls from the model of ib_core, the field is the number of the
/// registration.
#[derive(Default)]
pub(crate) struct PciDevice(pub(crate) Option<usize>);

impl PciDevice {
    pub(crate) fn max_segment(&self) -> u32 {
        1 << 31
    }

    pub(crate) fn address(&self) -> PciAddress {
        HCA
    }

    pub(crate) fn is_direct(&self) -> bool {
        world().is_direct.get()
    }

    pub(crate) fn is_translated(&self) -> bool {
        world().is_translated.get()
    }
}

pub(crate) fn provider_maps() -> bool {
    world().provider_maps.get()
}

pub(crate) fn recall(gpu: Gpus, _device: &PciDevice) -> Option<Reach> {
    match &*world().answers.borrow() {
        Some(answers) => answers
            .iter()
            .find(|(of, _)| *of == gpu)
            .map(|(_, answer)| *answer),
        None => Some(Reach::AsOurs),
    }
}

pub(crate) fn remember(gpu: Gpus, _device: &PciDevice, answer: Reach) {
    let world = world();
    let mut answers = world.answers.borrow_mut();
    answers.as_mut().expect("asked").push((gpu, answer));
}

pub(crate) fn ends_bar(page: &AddrRange) -> bool {
    world().bar_end.get() == Some(page.addr + page.len)
}

/// A scatter list. ib_core writes to its memory.
pub(crate) struct SgTable {
    entries: Vec<AddrRange>,
    memory: usize,
}

/// The part of the scatter list that ib_core receives.
pub(crate) struct SgTableHead {
    pub(crate) entries: Vec<AddrRange>,
    pub(crate) memory: usize,
}

impl Deref for SgTableHead {
    type Target = [AddrRange];

    fn deref(&self) -> &[AddrRange] {
        &self.entries
    }
}

impl SgTable {
    pub(crate) fn build<R>(
        fill: impl FnOnce(&mut Vec<AddrRange>) -> Result<R, Reason>,
    ) -> Result<(Self, R), Reason> {
        let world = world();
        world.may_allocate();
        if world.fails("table") {
            return Err(Reason::NoMemory);
        }
        let mut entries = Vec::new();
        let filled = fill(&mut entries)?;
        let memory = world.alloc("the scatter list");
        Ok((SgTable { entries, memory }, filled))
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries.len() as u32
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = AddrRange> + '_ {
        self.entries.iter().copied()
    }

    pub(crate) fn head(&self) -> SgTableHead {
        SgTableHead {
            entries: self.entries.clone(),
            memory: self.memory,
        }
    }
}

impl Drop for SgTable {
    fn drop(&mut self) {
        let world = world();
        if !world.is_broken(Break::EarlyTable) {
            world.memory(self.memory).free();
        }
        world.record("table freed");
    }
}

/// Returns the GPUs to which these physical addresses belong. Each GPU has two allocations. Returns
/// the default if the "gpus" step fails, as the module does for too many GPUs.
fn gpus(addresses: impl Iterator<Item = u64>) -> Gpus {
    match world().fails("gpus") {
        true => Gpus::default(),
        false => Gpus::all(addresses.map(|addr| Gpus::one(((addr - DMA_BASE) >> 37) as u32))),
    }
}

pub(crate) struct PersistentPin {
    span: Span,
    content: Content,
    /// DMA addresses while nvidia.ko maps the pin. Empty otherwise.
    addresses: Vec<u64>,
}

impl PersistentPin {
    pub(crate) fn pin(span: Span) -> Result<Self, Reason> {
        let content = world().provider.get_persistent(&span)?;
        Ok(PersistentPin {
            span,
            content,
            addresses: Vec::new(),
        })
    }

    pub(crate) fn span(&self) -> Span {
        self.span
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.content.page
    }

    pub(crate) fn page(&self, number: usize) -> Option<AddrRange> {
        self.content.addresses.get(number).map(|addr| AddrRange {
            addr: *addr,
            len: self.content.page.bytes(),
        })
    }

    pub(crate) fn gpus(&self) -> Gpus {
        gpus(self.content.addresses.iter().take(1).copied())
    }

    pub(crate) fn read(&self, reader: &mut Reader) -> Result<(), Reason> {
        if world().fails("cacheable") {
            return Err(Reason::CpuCacheable);
        }
        reader.0.push(self.content.clone());
        Ok(())
    }

    pub(crate) fn map(&mut self, _device: &PciDevice) -> Result<(), Reason> {
        let world = world();
        world.record("provider maps");
        if world.fails("provider maps") || world.map_is_to_fail() {
            return Err(Reason::Map(world.map_code.get().unwrap_or(-5)));
        }
        let offset = world.provider_offset.get();
        assert!(self.addresses.is_empty(), "a pin is mapped twice");
        let mapped = self.content.addresses.iter().map(|addr| addr + offset);
        self.addresses = mapped.collect();
        Ok(())
    }

    pub(crate) fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    pub(crate) fn unmap(&mut self) {
        if !std::mem::take(&mut self.addresses).is_empty() {
            world().record("provider unmaps");
        }
    }
}

impl Drop for PersistentPin {
    fn drop(&mut self) {
        self.unmap();
        let world = world();
        world.hook(&world.on_unpin);
        world.provider.put_persistent();
    }
}

/// The physical addresses of a region, copied from its page tables.
pub(crate) struct PhysRanges {
    all: Vec<Content>,
    memory: usize,
}

pub(crate) struct Reader(Vec<Content>);

impl PhysRanges {
    pub(crate) fn read(
        _va: u64,
        read: impl FnOnce(&mut Reader) -> Result<(), Reason>,
    ) -> Result<(Self, Gpus), Reason> {
        let world = world();
        world.may_allocate();
        let mut reader = Reader(Vec::new());
        read(&mut reader)?;
        for (what, reason) in [
            ("bars", Reason::NotInBar),
            ("struct pages", Reason::HasStructPages),
            ("list", Reason::NoMemory),
        ] {
            if world.fails(what) {
                return Err(reason);
            }
        }
        let all = reader.0;
        let gpus = gpus(
            all.iter()
                .flat_map(|content| content.addresses.iter().copied()),
        );
        let memory = world.alloc("the list of addresses");
        Ok((PhysRanges { all, memory }, gpus))
    }
}

impl Drop for PhysRanges {
    fn drop(&mut self) {
        world().memory(self.memory).free();
    }
}

pub(crate) struct RevocablePin {
    /// The held pin. `None` only during the drop.
    held: Option<CallbackPin>,
    table: PageTable,
}

impl RevocablePin {
    pub(crate) fn pin(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Reason> {
        let held = CallbackPin::new(span, region)?;
        Ok(RevocablePin {
            held: Some(held),
            table: world().provider.newest(),
        })
    }

    pub(crate) fn read_all(pins: &[Self], va: u64) -> Result<(PhysRanges, PageSize, Gpus), Reason> {
        let (memory, gpus) = PhysRanges::read(va, |reader| {
            let world = world();
            for held in pins.iter().filter_map(|pin| pin.held.as_ref()) {
                if world.is_broken(Break::LateRead) {
                    held.read(|table| Ok(table.table()))?.read();
                }
                let first = held.read(|table| Ok(table.table().read()))?;
                // The hook runs between the reads of two batches of one page table.
                world.may_allocate();
                world.hook(&world.on_batch);
                // A loom model reads the table once. A second read would only add interleavings.
                if SCRIPTED {
                    held.read(|table| Ok(table.table().read()))?;
                }
                reader.0.push(first);
            }
            Ok(())
        })?;
        let page = PageSize::of_all(memory.all.iter().map(|content| content.page));
        Ok((memory, page, gpus))
    }
}

impl Drop for RevocablePin {
    fn drop(&mut self) {
        drop(self.held.take());
        let world = world();
        world.record(match world.provider.end(self.table) {
            Some(End::Put) => "unpin",
            Some(End::Callback) => "no unpin",
            None => "orphaned",
        });
    }
}

/// A DMA mapping. The HCA uses the mapped memory until the HCA is stopped.
pub(crate) struct BarMapping {
    memory: usize,
    umem: Option<usize>,
    /// The GPU memory behind the DMA addresses.
    gpus: Vec<usize>,
}

impl BarMapping {
    pub(crate) fn map(
        device: &PciDevice,
        memory: PhysRanges,
        va: u64,
        page: PageSize,
    ) -> Result<(Self, SgTable), Reason> {
        let world = world();
        world.record("map");
        world.may_allocate();
        if world.fails("map") {
            return Err(Reason::MapResource { mapped: 0 });
        }
        let gpus: Vec<usize> = memory.all.iter().map(|content| content.gpu).collect();
        gpus.iter().for_each(|gpu| world.memory(*gpu).read());
        let mapping = BarMapping {
            memory: world.alloc("a DMA mapping"),
            umem: device.0,
            gpus,
        };
        if let Some(umem) = device.0 {
            let umem = world.ib_core.umem(umem);
            umem.mapped(mapping.memory, &mapping.gpus);
        }
        world.hook(&world.on_map);
        let (table, ()) = SgTable::build(|table| {
            let mut layout = SgLayout::new(va, page, device.max_segment());
            let mut push = |entry| {
                table.push(entry);
                true
            };
            for content in &memory.all {
                let offset = if world.is_identity.get() {
                    0
                } else {
                    IOMMU_OFFSET
                };
                let dma = |addr: &u64| addr + offset;
                layout.pages(&content.addresses, dma, content.page, &mut push);
            }
            layout.finish().map(push);
            Ok(())
        })?;
        drop(memory);
        Ok((mapping, table))
    }

    pub(crate) fn translates(_device: &PciDevice, _page: &AddrRange) -> Option<bool> {
        let world = world();
        world.record("map");
        if world.fails("map") {
            return None;
        }
        world.record("unmap");
        Some(!world.is_identity.get())
    }
}

impl Drop for BarMapping {
    fn drop(&mut self) {
        let world = world();
        world.record("unmap");
        // ib_core calls `unmap` before `release`, while the GPU memory exists. A test that acts as
        // ib_core (`umem` is `None`) may skip `unmap`, so this check is only for ib_core.
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
