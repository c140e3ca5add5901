// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Both neighbours of a region as fakes that record what is done to them, in order.
//!
//! A test owns a [`World`] and reaches it through the address that it registers, for the calls of a
//! region carry nothing else: each test has addresses of its own.

use std::collections::BTreeMap;
use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::LazyLock;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::thread;
use std::thread::ThreadId;

use crate::account::Account;
use crate::device::Gpus;
use crate::device::PciAddress;
use crate::extents;
use crate::extents::Cut;
use crate::extents::Entry;
use crate::extents::PageSize;
use crate::extents::Run;
use crate::extents::Span;
use crate::pin::Revoke;
use crate::refusal::Refusal;
use crate::registry::Book;
use crate::registry::Event;
use crate::registry::Living;
use crate::registry::Newcomer;
use crate::revocable;

/// Where the fake BAR begins, as seen by DMA.
pub(crate) const DMA_BASE: u64 = 0x38_0000_0000;
/// Where the HCA is.
pub(crate) const HCA: PciAddress = PciAddress(0x0300 | 5 << 3 | 1);
/// How far DMA addresses are from physical ones in the revocable flavour.
pub(crate) const IOMMU_OFFSET: u64 = 0x100_0000_0000;

static WORLDS: LazyLock<Mutex<BTreeMap<u64, Arc<World>>>> = LazyLock::new(Mutex::default);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test panics with a lock held")
}

type Hook = Box<dyn FnMut(&World) + Send>;

/// An allocation of GPU memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) page: PageSize,
}

/// A revocable pin as the provider knows it.
struct Known {
    number: u64,
    span: Span,
    /// Whom it would call back.
    region: Option<Arc<revocable::Region>>,
    /// The callback has come, or is under way.
    dead: bool,
}

/// What surrounds the registrations of one test.
#[derive(Default)]
pub(crate) struct World {
    start: u64,
    log: Mutex<Vec<&'static str>>,
    pins: Mutex<Vec<Known>>,
    /// Whose callback is under way.
    callback: Mutex<Option<ThreadId>>,
    /// What can be pinned; nothing stands for one allocation over all of the test's addresses. The memory of
    /// each lies apart.
    pub(crate) layout: Mutex<Vec<Allocation>>,
    /// Calls to pin so far.
    pub(crate) calls: Mutex<u64>,
    /// The number of a call to pin that fails, and the provider's code.
    pub(crate) fail_call: Mutex<Option<(u64, i32)>>,
    /// How many calls to map a persistent pin until one fails, once.
    pub(crate) fail_map: Mutex<Option<u64>>,
    /// Run at the end of the call to pin with that number, before it returns.
    pub(crate) on_call: Mutex<Option<(u64, Hook)>>,
    /// Steps that fail.
    pub(crate) failing: Mutex<Vec<&'static str>>,
    /// Run at the end of the provider's pin, before it returns.
    pub(crate) on_pin: Mutex<Option<Hook>>,
    /// Run before a persistent pin is put.
    pub(crate) on_unpin: Mutex<Option<Hook>>,
    /// Run while ib_core revokes.
    pub(crate) on_revoke: Mutex<Option<Hook>>,
}

impl World {
    pub(crate) fn at(start: u64) -> Arc<World> {
        let world = Arc::new(World {
            start,
            ..World::default()
        });
        let old = lock(&WORLDS).insert(start, world.clone());
        assert!(old.is_none(), "each test has addresses of its own");
        world
    }

    fn of(span: &Span) -> Arc<World> {
        lock(&WORLDS)
            .range(..=span.start())
            .next_back()
            .map(|(_, world)| world.clone())
            .expect("registered by the test")
    }

    /// The allocation that `span` lies in, and its number.
    fn allocation(&self, span: &Span) -> Option<(u64, Allocation)> {
        let layout = lock(&self.layout);
        if layout.is_empty() {
            let all = Allocation {
                start: self.start,
                len: 1 << 40,
                page: PageSize::KIB_64,
            };
            return Some((0, all));
        }
        let inside = |a: &Allocation| {
            span.start() >= a.start && span.start() + span.len() <= a.start + a.len
        };
        let (number, found) = layout.iter().enumerate().find(|(_, a)| inside(a))?;
        Some((number as u64, *found))
    }

    /// The answer to a call to pin: the number of the call, and where the pages are.
    fn answer(&self, span: &Span) -> Result<(u64, Vec<u64>, PageSize), Refusal> {
        self.record("pin");
        let number = {
            let mut calls = lock(&self.calls);
            *calls += 1;
            *calls
        };
        if let Some((_, code)) = lock(&self.fail_call).filter(|(call, _)| *call == number) {
            return Err(Refusal::Pin(code));
        }
        if self.fails("pin") {
            return Err(Refusal::Pin(crate::refusal::ENOMEM));
        }
        let (allocation, found) = self
            .allocation(span)
            .ok_or(Refusal::Pin(crate::refusal::EINVAL))?;
        let base = DMA_BASE + (allocation << 36) + (span.start() - self.start);
        let page = found.page;
        let count = span.pages(page).expect("whole pages");
        Ok((
            number,
            (0..count).map(|i| base + i * page.bytes()).collect(),
            page,
        ))
    }

    fn map_is_to_fail(&self) -> bool {
        let mut left = lock(&self.fail_map);
        *left = left.and_then(|left| left.checked_sub(1));
        left.take_if(|left| *left == 0).is_some()
    }

    fn called(&self, number: u64) {
        let hook = lock(&self.on_call).take_if(|(call, _)| *call == number);
        if let Some((_, mut hook)) = hook {
            hook(self);
        }
    }

    pub(crate) fn record(&self, what: &'static str) {
        lock(&self.log).push(what);
    }

    /// What was done since the last call, in order.
    pub(crate) fn take_log(&self) -> Vec<&'static str> {
        std::mem::take(&mut *lock(&self.log))
    }

    pub(crate) fn fail(&self, what: &'static str) {
        lock(&self.failing).push(what);
    }

    fn fails(&self, what: &str) -> bool {
        lock(&self.failing).contains(&what)
    }

    /// The provider frees all of the memory.
    pub(crate) fn free(&self) {
        self.free_part(0, u64::MAX);
    }

    /// The provider frees what lies in `[from, to)`: a callback for each pin there, one after the other.
    pub(crate) fn free_part(&self, from: u64, to: u64) {
        lock(&self.layout).retain(|a| a.start < from || a.start >= to);
        loop {
            let region = lock(&self.pins)
                .iter_mut()
                .find(|pin| !pin.dead && (from..to).contains(&pin.span.start()))
                .map(|pin| {
                    pin.dead = true;
                    pin.region.take()
                });
            let Some(region) = region else { return };
            *lock(&self.callback) = Some(thread::current().id());
            if let Some(region) = region {
                self.record("callback");
                region.revoke();
                self.record("callback returns");
            }
            *lock(&self.callback) = None;
        }
    }

    /// How many pins nobody has put or lost.
    pub(crate) fn live(&self) -> usize {
        lock(&self.pins).iter().filter(|pin| !pin.dead).count()
    }

    fn run(&self, hook: &Mutex<Option<Hook>>) {
        let taken = lock(hook).take();
        if let Some(mut hook) = taken {
            hook(self);
        }
    }
}

/// A limit, if there is one, and accounts.
pub(crate) type Ledger = (Option<u64>, &'static Mutex<FakeList<Account>>);

thread_local! {
    /// So often no fatal signal waits for this thread, then one does.
    pub(crate) static KILLED_AFTER: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };

    /// The limit for each user and the accounts, in this thread's test. Without them nothing is counted.
    pub(crate) static LEDGER: std::cell::Cell<Option<Ledger>> = const { std::cell::Cell::new(None) };

    /// The user of the calling process.
    pub(crate) static USER: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };

    /// The parameter, in this thread's test.
    pub(crate) static MAX_PIECES: std::cell::Cell<u32> = const { std::cell::Cell::new(1024) };
}

pub(crate) struct FakeLock<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> FakeLock<T> {
    pub(crate) fn new(value: T) -> Self {
        FakeLock {
            value: Mutex::new(value),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut lock(&self.value))
    }

    pub(crate) fn wait_while(&self, condition: impl FnMut(&mut T) -> bool) {
        let guard = self.changed.wait_while(lock(&self.value), condition);
        drop(guard.expect("no test panics with a lock held"));
    }

    pub(crate) fn notify_all(&self) {
        self.changed.notify_all();
    }
}

/// A registration, with its entry.
pub(crate) struct Registered<T, L> {
    pub(crate) state: L,
    pub(crate) entry: Stand,
    pub(crate) of: T,
}

impl<T, L> Registered<T, L> {
    pub(crate) fn new(of: T, state: L) -> Result<Arc<Self>, Refusal> {
        Ok(Arc::new(Registered {
            state,
            entry: Stand::default(),
            of,
        }))
    }
}

/// The roll of one test: what is made on a test's thread stands on its own.
#[derive(Default)]
pub(crate) struct Roll {
    locked: Mutex<Locked>,
    events: Mutex<Vec<Event>>,
}

#[derive(Default)]
struct Locked {
    book: Book,
    living: BTreeMap<u64, Living>,
}

thread_local! {
    static ROLL: Arc<Roll> = Arc::default();
    /// This thread has locked a roll.
    static IN_ROLL: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The roll of this thread.
pub(crate) fn roll() -> Arc<Roll> {
    ROLL.with(Clone::clone)
}

/// This thread holds the lock of a roll.
pub(crate) fn in_roll() -> bool {
    IN_ROLL.get()
}

impl Roll {
    fn locked<R>(&self, f: impl FnOnce(&mut Locked) -> R) -> R {
        assert!(!IN_ROLL.replace(true), "the roll is locked twice");
        let result = f(&mut lock(&self.locked));
        IN_ROLL.set(false);
        result
    }

    /// The first that stands there with this number or a higher one.
    pub(crate) fn from(&self, number: u64) -> Option<Living> {
        self.locked(|locked| locked.living.range(number..).next().map(|(_, l)| *l))
    }

    /// All, as a reader comes by them.
    pub(crate) fn all(&self) -> Vec<Living> {
        let mut next = 0;
        std::iter::from_fn(|| {
            let living = self.from(next)?;
            next = living.number + 1;
            Some(living)
        })
        .collect()
    }

    /// What is counted.
    pub(crate) fn book<R>(&self, f: impl FnOnce(&Book) -> R) -> R {
        self.locked(|locked| f(&locked.book))
    }

    /// What was told since the last call, in order.
    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *lock(&self.events))
    }
}

/// A place on the roll of the thread that made it.
pub(crate) struct Stand {
    roll: Arc<Roll>,
    number: Mutex<Option<u64>>,
}

impl Default for Stand {
    fn default() -> Self {
        Stand {
            roll: roll(),
            number: Mutex::default(),
        }
    }
}

impl Stand {
    pub(crate) fn update(&self, f: impl FnOnce(&mut Book, &mut Option<Living>) -> Option<Event>) {
        let event = self.roll.locked(|Locked { book, living }| {
            let mut number = lock(&self.number);
            let mut slot = number.take().and_then(|number| living.remove(&number));
            let event = f(book, &mut slot);
            *number = slot.map(|slot| slot.number);
            if let Some(slot) = slot {
                let before = living.insert(slot.number, slot);
                assert!(before.is_none(), "{} twice", slot.number);
            }
            event
        });
        lock(&self.roll.events).extend(event);
    }
}

pub(crate) fn enter(stand: &Stand, new: Newcomer) {
    stand.update(|book, slot| book.enter(slot, new));
}

pub(crate) fn released(stand: &Stand, kept: bool) {
    stand.update(|book, slot| book.released(slot, kept));
}

pub(crate) fn gone(stand: &Stand) {
    stand.update(Book::gone);
}

impl Drop for Stand {
    fn drop(&mut self) {
        gone(self);
    }
}

pub(crate) struct FakeList<T>(Vec<T>);

impl<T> FakeList<T> {
    pub(crate) const fn new() -> Self {
        FakeList(Vec::new())
    }
}

impl<T> Default for FakeList<T> {
    fn default() -> Self {
        FakeList(Vec::new())
    }
}

impl<T> std::ops::Deref for FakeList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for FakeList<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T> FakeList<T> {
    pub(crate) fn push(&mut self, value: T) -> Result<(), Refusal> {
        self.0.push(value);
        Ok(())
    }
}

pub(crate) struct FakeDevice {
    pub(crate) world: Arc<World>,
}

impl FakeDevice {
    pub(crate) fn max_segment(&self) -> u32 {
        1 << 31
    }

    pub(crate) fn address(&self) -> PciAddress {
        HCA
    }
}

/// Records its end, so that a test sees when the entries go. Tables are told by their world through
/// the test's thread: the builder of a table knows no span.
pub(crate) struct FakeTable {
    entries: Vec<Entry>,
    world: Option<Arc<World>>,
}

thread_local! {
    static TABLES_GO_TO: std::cell::RefCell<Option<Arc<World>>> = const {
        std::cell::RefCell::new(None)
    };
}

impl FakeTable {
    pub(crate) fn build(runs: impl Iterator<Item = Run>, cut: Cut) -> Result<Self, Refusal> {
        let world = TABLES_GO_TO.with_borrow(Clone::clone);
        if world.as_ref().is_some_and(|w| w.fails("table")) {
            return Err(Refusal::NoMemory);
        }
        let mut entries = Vec::new();
        cut.entries(runs, |entry| entries.push(entry));
        Ok(FakeTable { entries, world })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries.len() as u32
    }

    pub(crate) fn lend(&self) -> Vec<Entry> {
        self.entries.clone()
    }
}

impl Drop for FakeTable {
    fn drop(&mut self) {
        if let Some(world) = &self.world {
            world.record("table freed");
        }
    }
}

/// Two allocations share a GPU, as their addresses tell.
fn gpus(addresses: &[u64]) -> Gpus {
    let gpu = |addr: &u64| Gpus::one(((addr - DMA_BASE) >> 37) as u32);
    Gpus::all(addresses.iter().map(gpu))
}

pub(crate) struct FakePin {
    addresses: Vec<u64>,
    page: PageSize,
    world: Arc<World>,
}

impl FakePin {
    pub(crate) fn pin(span: Span) -> Result<Self, Refusal> {
        let world = World::of(&span);
        let (_, addresses, page) = world.answer(&span)?;
        Ok(FakePin {
            addresses,
            page,
            world,
        })
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    pub(crate) fn gpus(&self) -> Gpus {
        gpus(&self.addresses)
    }

    pub(crate) fn map(&self, device: &FakeDevice) -> Result<FakeMapping, Refusal> {
        device.world.record("map");
        TABLES_GO_TO.set(Some(device.world.clone()));
        if device.world.fails("map") || device.world.map_is_to_fail() {
            return Err(Refusal::Map(-5));
        }
        Ok(FakeMapping {
            addresses: self.addresses.clone(),
            world: self.world.clone(),
        })
    }
}

impl Drop for FakePin {
    fn drop(&mut self) {
        self.world.run(&self.world.on_unpin);
        self.world.record("unpin");
    }
}

pub(crate) struct FakeMapping {
    addresses: Vec<u64>,
    world: Arc<World>,
}

impl FakeMapping {
    pub(crate) fn addresses(&self) -> &[u64] {
        &self.addresses
    }
}

impl Drop for FakeMapping {
    fn drop(&mut self) {
        self.world.record("unmap");
    }
}

/// ib_core's side of a ticket.
pub(crate) struct FakeTicket(pub(crate) Arc<World>);

impl FakeTicket {
    pub(crate) fn invalidate(self) {
        self.0.record("ib_core revokes");
        self.0.run(&self.0.on_revoke);
        self.0.record("ib_core revoked");
    }
}

pub(crate) struct FakeRevocablePin {
    number: u64,
    runs: Vec<Run>,
    page: PageSize,
    world: Arc<World>,
}

impl FakeRevocablePin {
    pub(crate) fn pin(span: Span, region: Arc<revocable::Region>) -> Result<Self, Refusal> {
        let world = World::of(&span);
        let (number, addresses, page) = world.answer(&span)?;
        lock(&world.pins).push(Known {
            number,
            span,
            region: Some(region),
            dead: false,
        });
        let mut runs = Vec::new();
        extents::steps(extents::pages(addresses.into_iter(), page), |run| {
            runs.push(run);
        });
        world.run(&world.on_pin);
        world.called(number);
        Ok(FakeRevocablePin {
            number,
            runs,
            page,
            world,
        })
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    pub(crate) fn gpus(&self) -> Gpus {
        let first: Vec<u64> = self.runs.iter().map(|run| run.addr).collect();
        gpus(&first)
    }

    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Drop for FakeRevocablePin {
    fn drop(&mut self) {
        let world = &self.world;
        let mut pins = lock(&world.pins);
        let place = pins.iter().position(|pin| pin.number == self.number);
        let place = place.expect("known since it was pinned");
        if pins[place].dead {
            world.record("no unpin");
            pins.swap_remove(place);
            return;
        }
        let kept = match *lock(&world.callback) {
            Some(thread) if thread == thread::current().id() => Some("kept"),
            // The callback may still come.
            _ if world.fails("unpin") => Some("unpin by a stranger"),
            _ => None,
        };
        if let Some(how) = kept {
            let region = pins[place].region.clone();
            drop(pins);
            if let Some(region) = region {
                region.kept();
            }
            return world.record(how);
        }
        world.record("unpin");
        // The region may go with it.
        let known = pins.swap_remove(place);
        drop(pins);
        drop(known);
    }
}

pub(crate) struct FakeBarMapping {
    runs: Vec<Run>,
    world: Arc<World>,
}

impl FakeBarMapping {
    pub(crate) fn map<'a>(
        device: &FakeDevice,
        runs: impl Iterator<Item = &'a Run>,
    ) -> Result<Self, Refusal> {
        device.world.record("map");
        TABLES_GO_TO.set(Some(device.world.clone()));
        if device.world.fails("map") {
            return Err(Refusal::MapResource { mapped: 0 });
        }
        Ok(FakeBarMapping {
            runs: runs
                .map(|run| Run {
                    addr: run.addr + IOMMU_OFFSET,
                    len: run.len,
                })
                .collect(),
            world: device.world.clone(),
        })
    }

    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Drop for FakeBarMapping {
    fn drop(&mut self) {
        self.world.record("unmap");
    }
}
