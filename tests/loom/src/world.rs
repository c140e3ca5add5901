// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! One execution of a model: the state of both neighbours, and the record of what is alive.
//!
//! loom runs its threads one at a time on one thread of the host, and switches between them only inside
//! its own primitives. So what merely records (a `Cell`, a `RefCell`) is seen by all threads, adds no
//! interleavings, and panics if it is borrowed across a switch.

use std::cell::Cell;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering;
use loom::sync::Mutex;
use loom::sync::RwLock;
use loom::thread;
use loom::thread::ThreadId;

use crate::account::Account;
use crate::account::Charge;
use crate::env::List;
use crate::env::LIMIT;
use crate::ib_core::Core;
use crate::pin::Directory;
use crate::provider::Provider;
use crate::provider::ALLOCATION;
use crate::registry::Book;
use crate::registry::Living;
use crate::registry::State;

/// How ib_core invalidates.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mode {
    /// The client unmaps: `peerdirect_support=0`.
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
    /// The gate lets everybody in.
    NoGate,
    /// The page table is read when its slot's lock has been given back.
    LateRead,
    /// What is done under a slot's lock is done without it.
    OpenSlot,
    /// A slot is always alive.
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
    /// A slot does not hold the module.
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

/// The roll. Its lock is a leaf: one that loom knows is taken where somebody reads beside (`watched`), and
/// elsewhere it would add orders that differ in nothing.
#[derive(Default)]
pub(crate) struct Roll {
    pub(crate) book: Book,
    pub(crate) living: BTreeMap<u64, Living>,
}

pub(crate) struct World {
    pub(crate) mode: Mode,
    broken: Option<Break>,
    /// Orders what is recorded.
    clock: Cell<u64>,
    memory: RefCell<Vec<Rc<Memory>>>,
    /// The process of each thread; 1 where nothing is said.
    processes: RefCell<HashMap<ThreadId, u32>>,
    /// The threads that release are on their way out.
    pub(crate) exits: Cell<bool>,
    pub(crate) accounts: RefCell<Option<List<Account>>>,
    /// Slots that hold the module.
    pub(crate) holds: AtomicUsize,
    pub(crate) directory: Mutex<Option<Directory>>,
    pub(crate) gate: RwLock<()>,
    /// When the gate was last closed.
    pub(crate) gate_since: Cell<u64>,
    roll: RefCell<Roll>,
    roll_lock: Mutex<()>,
    /// A thread of the model reads the roll.
    pub(crate) watched: Cell<bool>,
    pub(crate) provider: Provider,
    pub(crate) ib_core: Core,
}

thread_local! {
    static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
}

pub(crate) fn world() -> Rc<World> {
    WORLD.with_borrow(Clone::clone).expect("inside World::run")
}

impl World {
    /// Runs `f` in a world of its own, after which nothing may be left. `tickets` is how many numbers
    /// ib_core has before they come round.
    pub(crate) fn run(mode: Mode, broken: Option<Break>, tickets: usize, f: impl FnOnce()) {
        let world = Rc::new(World {
            mode,
            broken,
            clock: Cell::new(0),
            memory: RefCell::default(),
            processes: RefCell::default(),
            exits: Cell::new(false),
            accounts: RefCell::new(Some(List::default())),
            holds: AtomicUsize::new(0),
            directory: Mutex::new(None),
            gate: RwLock::new(()),
            gate_since: Cell::new(0),
            roll: RefCell::default(),
            roll_lock: Mutex::new(()),
            watched: Cell::new(false),
            provider: Provider::new(),
            ib_core: Core::new(tickets),
        });
        WORLD.set(Some(world.clone()));
        f();
        // What is still pinned was left to its callback.
        world.provider.free_all();
        world.check_empty();
        WORLD.set(None);
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
        memory.push(Rc::new(Memory {
            what,
            freed: Cell::new(false),
            cell: UnsafeCell::new(()),
        }));
        memory.len() - 1
    }

    pub(crate) fn memory(&self, number: usize) -> Rc<Memory> {
        self.memory.borrow()[number].clone()
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

    /// Runs `f` with the roll locked.
    pub(crate) fn with_roll<R>(&self, f: impl FnOnce(&mut Roll) -> R) -> R {
        let watched = self.watched.get();
        let _guard = watched.then(|| self.roll_lock.lock().expect("no poison"));
        f(&mut self.roll.borrow_mut())
    }

    /// What the registration of an allocation is on the roll. Each life of a model has its own.
    pub(crate) fn stands(&self, allocation: usize) -> Option<State> {
        let start = allocation as u64 * ALLOCATION;
        let roll = self.roll.borrow();
        let mut found = roll.living.values().filter(|l| l.new.span.start() == start);
        let state = found.next().map(|living| living.state);
        assert!(found.next().is_none(), "a registration is there twice");
        state
    }

    fn check_empty(&self) {
        let roll = self.roll.borrow();
        assert!(roll.living.is_empty(), "somebody is left on the roll");
        for counts in roll.book.counts() {
            let left = (counts.alive, counts.alive_bytes);
            assert_eq!(left, (0, 0), "somebody is still counted as alive");
            assert_eq!(counts.registered, counts.released);
        }
        self.provider.check_empty();
        self.ib_core.check_empty();
        for memory in self.memory.borrow().iter() {
            assert!(memory.freed.get(), "{} is never freed", memory.what);
        }
        assert_eq!(self.holds.load(Ordering::SeqCst), 0, "a slot is left");
        drop(Charge::new(LIMIT).expect("nobody is charged any more"));
    }
}
