// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds one test, or one execution of a model: the state of both neighbours, and the record of what is
//! alive.

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

/// What one user may have pinned in a model: all that it pins at once.
const LIMIT: u64 = 8 * LEN;

/// How ib_core invalidates.
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

/// A lock or a rule that is taken away, to see the models fail: see `can_fail`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Break {
    /// `Monitor::wait_while` does not wait.
    NoWait,
    /// `put_rwsem` lets everybody in.
    NoPutRwsem,
    /// The page table is read when its entry's lock has been given back.
    LateRead,
    /// What is done under an entry's lock is done without it.
    UnlockedEntry,
    /// An entry is always alive.
    Undead,
    /// Every process is the owner.
    OneProcess,
    /// No thread is the one that it was.
    Strangers,
    /// A callback uses the ticket that `release` has cleared.
    StaleTicket,
    /// The scatter list goes with the mapping.
    EarlyTable,
    /// A pin is not put, and said to be.
    NoPut,
    /// ib_core is not told of a callback.
    Silent,
    /// An entry does not hold the module.
    NoHold,
    /// Exit does not wait for the API lock.
    NoFence,
    /// A process that exits passes for one that runs.
    NoExit,
}

/// Something that is allocated, used, and freed.
pub(crate) struct Memory {
    what: &'static str,
    freed: Cell<bool>,
    /// Finds uses beside each other that no lock orders.
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

/// Says what it was, where loom says no more than that two uses are in no order.
struct Naming(&'static str);

impl Drop for Naming {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{} is used beside another use, or beside its end", self.0);
        }
    }
}

/// The registry. Its lock is a leaf: one that loom knows is taken where somebody reads beside (`watched`), and
/// elsewhere it would add orders that differ in nothing.
#[derive(Default)]
pub(crate) struct Registry {
    locked: RefCell<Locked>,
    lock: Mutex<()>,
    /// A thread of the model reads the registry.
    pub(crate) watched: Cell<bool>,
    /// Each change that is traced, with the registration after it.
    events: RefCell<Vec<(Transition, Option<Registration>)>>,
}

#[derive(Default)]
pub(crate) struct Locked {
    pub(crate) stats: Counters,
    pub(crate) registrations: BTreeMap<u64, Registration>,
}

thread_local! {
    /// This thread has locked a registry.
    static IN_REGISTRY: StdCell<bool> = const { StdCell::new(false) };
}

/// This thread holds the lock of a registry.
pub(crate) fn in_registry() -> bool {
    IN_REGISTRY.get()
}

impl Registry {
    /// Runs `f` with the registry locked.
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

    /// Changes the registration with that number; 0: there is none.
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
                        "{} comes twice in the registry",
                        slot.number
                    );
                }
                transition.map(|transition| (transition, slot))
            },
        );
        self.events.borrow_mut().extend(traced);
    }

    /// The first with this number or a higher one.
    pub(crate) fn from(&self, number: u64) -> Option<Registration> {
        self.with(|locked| locked.registrations.range(number..).next().map(|(_, l)| *l))
    }

    /// All, as a reader comes by them.
    pub(crate) fn all(&self) -> Vec<Registration> {
        let mut next = 0;
        std::iter::from_fn(|| {
            let registration = self.from(next)?;
            next = registration.number + 1;
            Some(registration)
        })
        .collect()
    }

    /// What is counted.
    pub(crate) fn stats<R>(&self, f: impl FnOnce(&Counters) -> R) -> R {
        self.with(|locked| f(&locked.stats))
    }

    /// What was told since the last call, in order.
    pub(crate) fn take_events(&self) -> Vec<(Transition, Option<Registration>)> {
        self.events.take()
    }
}

/// What a test has done at some place.
pub(crate) type Hook = Box<dyn FnMut(&World) + Send>;

#[derive(Default)]
pub(crate) struct World {
    pub(crate) mode: Mode,
    broken: Option<Break>,
    /// Orders what is recorded.
    clock: Cell<u64>,
    memory: RefCell<Vec<Arc<Memory>>>,
    /// The process of each thread; 1 where nothing is said.
    processes: RefCell<HashMap<ThreadId, u32>>,
    /// The threads that release are on their way out.
    pub(crate) exits: Cell<bool>,
    /// So often no fatal signal waits for the calling thread, then one does.
    pub(crate) killed_after: Cell<Option<u64>>,
    /// The parameter, if it is set.
    pub(crate) max_chunks: Cell<Option<u32>>,
    pub(crate) user: Cell<usize>,
    pub(crate) user_limit: Cell<Option<u64>>,
    /// The lock of the users' bytes is a leaf, and the models do not look at its order.
    pub(crate) usages: RefCell<Usages>,
    /// Locks that callbacks take, by the threads that hold them.
    held: RefCell<Vec<(ThreadId, &'static str)>>,
    /// Entries that hold the module.
    pub(crate) holds: AtomicUsize,
    pub(crate) callbacks: Mutex<Option<CallbackTable>>,
    pub(crate) put_rwsem: RwLock<()>,
    /// When `put_rwsem` was last taken for a put.
    pub(crate) put_rwsem_since: Cell<u64>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) provider: Provider,
    pub(crate) ib_core: Core,
    log: RefCell<Vec<&'static str>>,
    failing: RefCell<Vec<&'static str>>,
    /// How many calls of the provider's to map a pin until one fails, once.
    pub(crate) fail_map: Cell<Option<u64>>,
    /// The provider's code for a call to map that fails; `None`: -EIO.
    pub(crate) map_code: Cell<Option<i32>>,
    /// The parameter.
    pub(crate) provider_maps: Cell<bool>,
    /// How far the provider's DMA addresses are from physical ones.
    pub(crate) provider_offset: Cell<u64>,
    /// Whether those of this module are the physical ones, and whether it knows that nothing translates them.
    pub(crate) is_identity: Cell<bool>,
    pub(crate) is_direct: Cell<bool>,
    /// Whether something is known to translate them.
    pub(crate) is_translated: Cell<bool>,
    /// What the provider answered of each GPU; `None`: that all of them are reached.
    pub(crate) answers: RefCell<Option<Vec<(Gpus, Reach)>>>,
    /// Where a BAR ends.
    pub(crate) bar_end: Cell<Option<u64>>,
    /// Run before a persistent pin is put.
    pub(crate) on_unpin: Cell<Option<Hook>>,
    /// Run while ib_core revokes.
    pub(crate) on_revoke: Cell<Option<Hook>>,
    /// Run while the module maps.
    pub(crate) on_map: Cell<Option<Hook>>,
    /// Run between two batches of a page table.
    pub(crate) on_batch: Cell<Option<Hook>>,
}

/// A lock that callbacks take is held by a thread.
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

/// The world of this thread, which each test has for itself.
pub(crate) fn world() -> Arc<World> {
    WORLD
        .with_borrow(Clone::clone)
        .or_else(|| {
            // Others than the test's own have no name.
            let own = SCRIPTED && thread::current().name().is_some();
            own.then(|| World::of_a_test(0, Arc::default()))
        })
        .expect("inside World::run, or entered")
}

impl World {
    /// Runs `f` in a world of its own, after which nothing may be left. `tickets` is how many numbers
    /// ib_core has before they come round.
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
        // What is still pinned was left to its callback.
        world.free();
        world.check_empty();
        WORLD.set(None);
    }

    /// For a test that says what happens when.
    fn of_a_test(start: u64, registry: Arc<Registry>) -> Arc<World> {
        let world = Arc::new(World {
            provider: Provider::new(start),
            registry,
            ..World::default()
        });
        world.add();
        // What a test that fails leaves in it cannot be dropped when its thread is gone.
        std::mem::forget(world.clone());
        world
    }

    /// A new one, with memory from `start` on. The registry is that of the test.
    pub(crate) fn at(start: u64) -> Arc<World> {
        Self::of_a_test(start, world().registry.clone())
    }

    /// This is the calling thread's world.
    pub(crate) fn add(self: &Arc<Self>) {
        WORLD.set(Some(self.clone()));
    }

    /// The provider frees all of its memory.
    pub(crate) fn free(&self) {
        self.provider.free_part(0, u64::MAX);
    }

    pub(crate) fn record(&self, what: &'static str) {
        self.log.borrow_mut().push(what);
    }

    /// What was done since the last call, in order.
    pub(crate) fn take_log(&self) -> Vec<&'static str> {
        self.log.take()
    }

    /// From now on that step fails.
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

    /// Allocates; the number stands for the memory where a value must be `Send`.
    pub(crate) fn alloc(&self, what: &'static str) -> usize {
        let mut memory = self.memory.borrow_mut();
        memory.push(Arc::new(Memory {
            what,
            freed: Cell::new(false),
            cell: UnsafeCell::new(()),
        }));
        memory.len() - 1
    }

    /// How much that is called so was not freed.
    pub(crate) fn alive(&self, what: &str) -> usize {
        let memory = self.memory.borrow();
        let alive = |memory: &&Arc<Memory>| memory.what == what && !memory.freed.get();
        memory.iter().filter(alive).count()
    }

    pub(crate) fn memory(&self, number: usize) -> Arc<Memory> {
        self.memory.borrow()[number].clone()
    }

    /// The calling thread holds a lock that callbacks take, until the drop of what is returned.
    pub(crate) fn locked(self: &Arc<Self>, what: &'static str) -> Held {
        let this = thread::current().id();
        self.held.borrow_mut().push((this, what));
        Held(self.clone(), this)
    }

    /// The calling thread may wait for memory.
    pub(crate) fn may_allocate(&self) {
        let this = thread::current().id();
        let held = self.held.borrow();
        let found = held.iter().find(|(thread, _)| *thread == this);
        assert!(
            found.is_none(),
            "{} is held across an allocation, and a callback waits for it",
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

    /// From here on the calling thread runs for another process.
    pub(crate) fn become_process(&self, process: u32) {
        let this = thread::current().id();
        self.processes.borrow_mut().insert(this, process);
    }

    /// The state of an allocation's registration in the registry. Each life of a model has its own.
    pub(crate) fn state(&self, allocation: u64) -> Option<State> {
        let start = allocation * ALLOCATION;
        let registry = self.registry.locked.borrow();
        let mut found = registry
            .registrations
            .values()
            .filter(|l| l.info.span.start() == start);
        let state = found.next().map(|registration| registration.state);
        assert!(found.next().is_none(), "a registration is there twice");
        state
    }

    fn check_empty(&self) {
        let registry = self.registry.locked.borrow();
        assert!(
            registry.registrations.is_empty(),
            "somebody is left in the registry"
        );
        for counts in registry.stats.counts() {
            let left = (counts.active, counts.active_bytes);
            assert_eq!(left, (0, 0), "somebody is still counted as alive");
            assert_eq!(counts.registered, counts.released);
        }
        self.provider.check_empty();
        self.ib_core.check_empty();
        for memory in self.memory.borrow().iter() {
            assert!(memory.freed.get(), "{} is never freed", memory.what);
        }
        assert_eq!(self.holds.load(Ordering::SeqCst), 0, "an entry is left");
        drop(Charge::new(LIMIT).expect("nobody is charged any more"));
    }
}
