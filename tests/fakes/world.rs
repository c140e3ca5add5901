// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A "world" is the environment of the module in one test, or in one execution of a model: the
//! state of nvidia.ko and ib_core, and the record of live objects.

use std::cell::{Cell as StdCell, RefCell as StdRefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use crate::callback_pin::CallbackTable;
use crate::device::{Gpus, Reach};
use crate::fakes::ib_core::{Core, LEN};
use crate::fakes::provider::{Allocation, Provider, ALLOCATION};
use crate::quota::{Charge, Usages};
use crate::registry::{Registration, Registry as Counters, State, Transition};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread::ThreadId;
use crate::sync::{thread, Cell, Mutex, RefCell, RwLock, UnsafeCell, SCRIPTED};

/// Upper bound on the bytes that one user may pin in a model, enough for all pins of the model at
/// once.
const LIMIT: u64 = 8 * LEN;

/// The way in which ib_core invalidates.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Mode {
    /// The client unmaps: `peerdirect_support=0`.
    #[default]
    Unmaps,
    /// ib_core unmaps, with `mapping_lock` held: `peerdirect_support=1`.
    Legacy,
    /// ib_core unmaps and releases inside the invalidation: OFED 4.9.
    Ofed49,
}

/// A lock or a rule that is disabled in order to make a model fail. See `can_fail`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Break {
    /// `Monitor::wait_while` does not wait.
    NoWait,
    /// `put_rwsem` excludes no thread.
    NoPutRwsem,
    /// The module reads the page table after it has released the lock of the pin's entry.
    LateRead,
    /// Code that should run under an entry's lock runs without the lock.
    UnlockedEntry,
    /// An entry always says that its memory is alive, even after the callback.
    Undead,
    /// Every process counts as the owner of a pin.
    OneProcess,
    /// Two results of `Thread::current()` are never equal, even on one thread.
    Strangers,
    /// A callback uses the ticket that `release` has cleared.
    StaleTicket,
    /// The scatter list is freed together with the DMA mapping, before `release`.
    EarlyTable,
    /// A put does nothing and reports success.
    NoPut,
    /// The client does not pass a callback on to ib_core.
    Silent,
    /// An entry does not hold a reference to the module.
    NoHold,
    /// The module's exit does not wait for the API lock.
    NoFence,
    /// A process that is exiting counts as running.
    NoExit,
}

/// An object that is allocated, used, and freed.
pub(crate) struct Memory {
    what: &'static str,
    freed: Cell<bool>,
    /// Detects concurrent uses that no lock orders.
    cell: UnsafeCell<()>,
}

impl Memory {
    pub(crate) fn read(&self) {
        let what = self.what;
        assert!(!self.freed.get(), "{what} is read after it was freed");
        let _naming = Naming(what);
        self.cell.with(|_| ());
    }

    pub(crate) fn write(&self) {
        let what = self.what;
        assert!(!self.freed.get(), "{what} is written after it was freed");
        let _naming = Naming(what);
        self.cell.with_mut(|_| ());
    }

    pub(crate) fn free(&self) {
        let what = self.what;
        assert!(!self.freed.get(), "{what} is freed twice");
        let _naming = Naming(what);
        self.cell.with_mut(|_| ());
        self.freed.set(true);
    }
}

/// Prints the name of the object if a use panics. loom says only that two uses are not ordered.
struct Naming(&'static str);

impl Drop for Naming {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{} is used during another use, or during its end", self.0);
        }
    }
}

/// The registry. The registry's lock is a leaf. Models with a concurrent reader (`watched`) use a
/// lock that loom knows. In other models such a lock would only add equivalent interleavings.
#[derive(Default)]
pub(crate) struct Registry {
    locked: RefCell<Locked>,
    lock: Mutex<()>,
    /// `true` if a thread of the model reads the registry.
    pub(crate) watched: Cell<bool>,
    /// Each traced transition, with the state of the registration after the transition.
    events: RefCell<Vec<(Transition, Option<Registration>)>>,
}

#[derive(Default)]
pub(crate) struct Locked {
    pub(crate) stats: Counters,
    pub(crate) registrations: BTreeMap<u64, Registration>,
}

thread_local! {
    /// `true` while this thread holds the lock of a registry.
    static IN_REGISTRY: StdCell<bool> = const { StdCell::new(false) };
}

/// Returns `true` if this thread holds the lock of a registry.
pub(crate) fn in_registry() -> bool {
    IN_REGISTRY.get()
}

impl Registry {
    /// Calls `f` with the registry locked.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Locked) -> R) -> R {
        assert!(!in_registry(), "the registry is locked twice");
        let watched = self.watched.get();
        let _guard = watched.then(|| self.lock.lock().expect("no poison"));
        let mut locked = self.locked.borrow_mut();
        IN_REGISTRY.set(true);
        let result = f(&mut locked);
        IN_REGISTRY.set(false);
        result
    }

    /// Changes the registration with this number. 0 means no registration.
    pub(crate) fn update(
        &self,
        number: &AtomicU64,
        f: impl FnOnce(&mut Counters, &mut Option<Registration>) -> Option<Transition>,
    ) {
        let traced = self.with(
            |Locked {
                 stats,
                 registrations,
             }| {
                let mut slot = registrations.remove(&number.load(Relaxed));
                let transition = f(stats, &mut slot);
                number.store(slot.map_or(0, |slot| slot.number), Relaxed);
                if let Some(slot) = slot {
                    let before = registrations.insert(slot.number, slot);
                    assert!(
                        before.is_none(),
                        "registration {} is in the registry twice",
                        slot.number
                    );
                }
                transition.map(|transition| (transition, slot))
            },
        );
        self.events.borrow_mut().extend(traced);
    }

    /// Returns all registrations in the order of their numbers.
    pub(crate) fn all(&self) -> Vec<Registration> {
        self.with(|locked| locked.registrations.values().copied().collect())
    }

    /// Returns the traced events since the last call, in order.
    pub(crate) fn take_events(&self) -> Vec<(Transition, Option<Registration>)> {
        self.events.take()
    }
}

/// Code that a test runs at a chosen place in the module or in nvidia.ko.
pub(crate) type Hook = Box<dyn FnMut(&World) + Send>;

#[derive(Default)]
pub(crate) struct World {
    pub(crate) mode: Mode,
    broken: Option<Break>,
    /// The last time stamp. Time stamps give the order of puts and callbacks.
    clock: Cell<u64>,
    memory: RefCell<Vec<Arc<Memory>>>,
    /// The process of each thread. A thread without an entry belongs to process 1.
    processes: RefCell<HashMap<ThreadId, u32>>,
    /// `true` if every thread counts as exiting when it releases a registration.
    pub(crate) exits: Cell<bool>,
    /// Number of checks that find no fatal signal. All later checks find one. `None` means that no
    /// check finds a fatal signal.
    pub(crate) killed_after: Cell<Option<u64>>,
    /// Value of the module parameter `max_chunks`, or `None` if the parameter is not set.
    pub(crate) max_chunks: Cell<Option<u32>>,
    pub(crate) user: Cell<usize>,
    pub(crate) user_limit: Cell<Option<u64>>,
    /// The number of bytes that each user has pinned. The lock that protects these numbers is a
    /// leaf, so the models do not explore the order in which threads take it.
    pub(crate) usages: RefCell<Usages>,
    /// Locks that callbacks take, and the threads that hold them.
    held: RefCell<Vec<(ThreadId, &'static str)>>,
    /// Number of entries that hold a reference to the module.
    pub(crate) holds: AtomicUsize,
    pub(crate) callbacks: Mutex<Option<CallbackTable>>,
    pub(crate) put_rwsem: RwLock<()>,
    /// Time at which `put_rwsem` was last taken for a put.
    pub(crate) put_rwsem_since: Cell<u64>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) provider: Provider,
    pub(crate) ib_core: Core,
    log: RefCell<Vec<&'static str>>,
    failing: RefCell<Vec<&'static str>>,
    /// Number of calls to nvidia.ko's `dma_map_pages()`, up to and including the call that must
    /// fail. `None` if every call succeeds.
    pub(crate) fail_map: Cell<Option<u64>>,
    /// Error code of each call to nvidia.ko's `dma_map_pages()` that must fail. `None` means -EIO.
    pub(crate) map_code: Cell<Option<i32>>,
    /// Value of the module parameter `provider_maps`.
    pub(crate) provider_maps: Cell<bool>,
    /// Difference between nvidia.ko's DMA addresses and physical addresses.
    pub(crate) provider_offset: Cell<u64>,
    /// `true` if the DMA addresses of this module's mappings are physical addresses.
    pub(crate) is_identity: Cell<bool>,
    /// `true` if the module knows that nothing translates DMA addresses.
    pub(crate) is_direct: Cell<bool>,
    /// `true` if the module knows that something translates DMA addresses.
    pub(crate) is_translated: Cell<bool>,
    /// Remembered answers of nvidia.ko about the path from the HCA to each GPU. `None` means that
    /// the HCA reaches all GPUs.
    pub(crate) answers: RefCell<Option<Vec<(Gpus, Reach)>>>,
    /// End address of a BAR. `None` means that no page is the last page of a BAR.
    pub(crate) bar_end: Cell<Option<u64>>,
    /// Runs before a persistent pin is put.
    pub(crate) on_unpin: Cell<Option<Hook>>,
    /// Runs while ib_core revokes a registration.
    pub(crate) on_revoke: Cell<Option<Hook>>,
    /// Runs while the module maps memory.
    pub(crate) on_map: Cell<Option<Hook>>,
    /// Runs between the reads of two batches of a page table.
    pub(crate) on_batch: Cell<Option<Hook>>,
}

/// Record of a thread that holds a lock that callbacks take. The drop ends the record.
pub(crate) struct Held(Arc<World>, ThreadId);

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = self.0.held.borrow_mut();
        let last = held.iter().rposition(|(thread, _)| *thread == self.1);
        held.remove(last.expect("held"));
    }
}

thread_local! {
    static WORLD: StdRefCell<Option<Arc<World>>> = const { StdRefCell::new(None) };
}

/// Returns the world of this thread. Each test has its own world.
pub(crate) fn world() -> Arc<World> {
    WORLD
        .with_borrow(Clone::clone)
        .or_else(|| {
            // Only the thread of the test itself has a name.
            let own = SCRIPTED && thread::current().name().is_some();
            own.then(|| World::of_a_test(0, Arc::default()))
        })
        .expect("a world that this thread runs in or has entered")
}

impl World {
    /// Runs `f` in a new world, and checks that nothing is left afterwards. ib_core has only
    /// `tickets` ticket numbers, and reuses them.
    pub(crate) fn run(mode: Mode, broken: Option<Break>, tickets: usize, f: impl FnOnce()) {
        let allocation = |number| Allocation::new(number * ALLOCATION, ALLOCATION);
        let world = Arc::new(World {
            mode,
            broken,
            user_limit: Cell::new(Some(LIMIT)),
            ib_core: Core::new(tickets),
            ..World::default()
        });
        world
            .provider
            .layout
            .replace((1..=3).map(allocation).collect());
        world.add();
        f();
        // Only pins that wait for their callbacks can be left here.
        world.free();
        world.check_empty();
        WORLD.set(None);
    }

    /// Creates a world for a test that controls the order of events.
    fn of_a_test(start: u64, registry: Arc<Registry>) -> Arc<World> {
        let world = Arc::new(World {
            provider: Provider::new(start),
            registry,
            ..World::default()
        });
        world.add();
        // If a test fails, the objects left in its world cannot be dropped after the thread's end.
        std::mem::forget(world.clone());
        world
    }

    /// Creates a world with memory from `start` on and the registry of the test.
    pub(crate) fn at(start: u64) -> Arc<World> {
        Self::of_a_test(start, world().registry.clone())
    }

    /// Creates a world like [`World::at`] with `count` adjacent allocations of `len` bytes.
    pub(crate) fn of_parts(start: u64, count: u64, len: u64) -> Arc<World> {
        let world = Self::at(start);
        let part = |number| Allocation::new(start + number * len, len);
        world
            .provider
            .layout
            .replace((0..count).map(part).collect());
        world
    }

    /// Makes the calling thread use this world.
    pub(crate) fn add(self: &Arc<Self>) {
        WORLD.set(Some(self.clone()));
    }

    /// Frees all of nvidia.ko's memory.
    pub(crate) fn free(&self) {
        self.provider.free_part(0, u64::MAX);
    }

    pub(crate) fn record(&self, what: &'static str) {
        self.log.borrow_mut().push(what);
    }

    /// Returns the steps since the last call, in order.
    pub(crate) fn take_log(&self) -> Vec<&'static str> {
        self.log.take()
    }

    /// Checks that the steps since the last call are those in `want`, separated by commas.
    #[track_caller]
    pub(crate) fn took(&self, want: &str) {
        assert_eq!(self.take_log(), want.split(", ").collect::<Vec<_>>());
    }

    /// Makes the step `what` fail from now on.
    pub(crate) fn fail(&self, what: &'static str) {
        self.failing.borrow_mut().push(what);
    }

    pub(crate) fn fails(&self, what: &str) -> bool {
        self.failing.borrow().contains(&what)
    }

    pub(crate) fn map_is_to_fail(&self) -> bool {
        let left = self.fail_map.get().and_then(|left| left.checked_sub(1));
        self.fail_map.set(left.filter(|left| *left > 0));
        left == Some(0)
    }

    pub(crate) fn hook(&self, hook: &Cell<Option<Hook>>) {
        if let Some(mut hook) = hook.take() {
            hook(self);
        }
    }

    pub(crate) fn is_broken(&self, how: Break) -> bool {
        self.broken == Some(how)
    }

    pub(crate) fn tick(&self) -> u64 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    /// Allocates an object and returns its number. A value that must be `Send` stores the number
    /// instead of a reference.
    pub(crate) fn alloc(&self, what: &'static str) -> usize {
        let mut memory = self.memory.borrow_mut();
        memory.push(Arc::new(Memory {
            what,
            freed: Cell::new(false),
            cell: UnsafeCell::new(()),
        }));
        memory.len() - 1
    }

    /// Returns the number of objects with this name that were not freed.
    pub(crate) fn alive(&self, what: &str) -> usize {
        let memory = self.memory.borrow();
        let alive = |memory: &&Arc<Memory>| memory.what == what && !memory.freed.get();
        memory.iter().filter(alive).count()
    }

    pub(crate) fn memory(&self, number: usize) -> Arc<Memory> {
        self.memory.borrow()[number].clone()
    }

    /// Records that the calling thread holds a lock that callbacks take, until the returned value
    /// is dropped.
    pub(crate) fn locked(self: &Arc<Self>, what: &'static str) -> Held {
        let this = thread::current().id();
        self.held.borrow_mut().push((this, what));
        Held(self.clone(), this)
    }

    /// Checks that the calling thread may wait for memory.
    pub(crate) fn may_allocate(&self) {
        let this = thread::current().id();
        let held = self.held.borrow();
        let found = held.iter().find(|(thread, _)| *thread == this);
        assert!(
            found.is_none(),
            "{} is held across an allocation, and a callback may wait for this lock",
            found.map_or("", |(_, what)| what)
        );
        drop(held);
        assert!(
            !self.provider.is_inside(this),
            "a callback waits for memory"
        );
    }

    pub(crate) fn process(&self) -> u32 {
        let this = thread::current().id();
        self.processes.borrow().get(&this).copied().unwrap_or(1)
    }

    /// Makes the calling thread part of another process.
    pub(crate) fn become_process(&self, process: u32) {
        let this = thread::current().id();
        self.processes.borrow_mut().insert(this, process);
    }

    /// Returns the state of an allocation's registration. Each registration of a model has its own
    /// allocation.
    pub(crate) fn state(&self, allocation: u64) -> Option<State> {
        let start = allocation * ALLOCATION;
        let registry = self.registry.locked.borrow();
        let mut found = registry
            .registrations
            .values()
            .filter(|l| l.info.span.start() == start);
        let state = found.next().map(|registration| registration.state);
        assert!(found.next().is_none(), "a registration is listed twice");
        state
    }

    fn check_empty(&self) {
        let registry = self.registry.locked.borrow();
        assert!(
            registry.registrations.is_empty(),
            "a registration is left in the registry"
        );
        for counts in registry.stats.counts() {
            let left = (counts.active, counts.active_bytes);
            assert_eq!(left, (0, 0), "a registration is still counted as active");
            assert_eq!(counts.registered, counts.released);
        }
        self.provider.check_empty();
        self.ib_core.check_empty();
        for memory in self.memory.borrow().iter() {
            assert!(memory.freed.get(), "{} is never freed", memory.what);
        }
        assert_eq!(self.holds.load(Ordering::SeqCst), 0, "an entry is left");
        drop(Charge::new(LIMIT).expect("no user is charged any more"));
    }
}
