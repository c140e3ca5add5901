// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! nvidia.ko, as awkward as `tests/gpu/p2p.c`, with loom's locks.

use std::cell::Cell;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::HashMap;

use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering;
use loom::sync::Mutex;
use loom::sync::MutexGuard;
use loom::thread;
use loom::thread::ThreadId;

use crate::env::Callback;
use crate::extents::Span;
use crate::pin::freed;
use crate::refusal::Kept;
use crate::refusal::Refusal;
use crate::refusal::EINVAL;
use crate::refusal::ENOMEM;
use crate::world::world;
use crate::world::Break;
use crate::world::World;

/// One allocation for each address that a model registers.
pub(crate) const ALLOCATION: u64 = 1 << 20;

/// What the caller of `get` has. The provider knows the pointer alone; who is meant is for the record.
#[derive(Clone, Copy)]
pub(crate) struct PageTable {
    pointer: usize,
    serial: usize,
}

impl PageTable {
    /// Reads the page table.
    pub(crate) fn read(self) {
        let world = world();
        let memory = world.provider.tables.borrow()[self.serial];
        world.memory(memory).read();
    }
}

struct Pinned {
    table: PageTable,
    allocation: usize,
    process: u32,
    number: usize,
}

pub(crate) struct Provider {
    api: Mutex<()>,
    /// The thread that has the API lock while it makes callbacks.
    inside: Cell<Option<ThreadId>>,
    /// Registered pins; API lock.
    pins: RefCell<Vec<Pinned>>,
    /// The memory of each allocation that was ever looked at.
    allocations: RefCell<BTreeMap<usize, usize>>,
    /// Allocations that are gone.
    gone: RefCell<Vec<usize>>,
    /// The memory of each table, by serial number.
    tables: RefCell<Vec<usize>>,
    /// Pointers of tables that live.
    pointers: RefCell<Vec<usize>>,
    /// When the callback for a table returned, by serial number.
    returned: RefCell<HashMap<usize, u64>>,
    /// No process is found any more.
    pub(crate) unlisted: Cell<bool>,
    /// How many puts say -ENOMEM first.
    pub(crate) short_of_memory: Cell<usize>,
    /// Pins that were left to their callbacks.
    pub(crate) kept: RefCell<Vec<Kept>>,
    /// Threads in the module's callback.
    in_text: AtomicUsize,
    unloaded: Cell<bool>,
}

impl Provider {
    pub(crate) fn new() -> Self {
        Provider {
            api: Mutex::new(()),
            inside: Cell::new(None),
            pins: RefCell::default(),
            allocations: RefCell::default(),
            gone: RefCell::default(),
            tables: RefCell::default(),
            pointers: RefCell::default(),
            returned: RefCell::default(),
            unlisted: Cell::new(false),
            short_of_memory: Cell::new(0),
            kept: RefCell::default(),
            in_text: AtomicUsize::new(0),
            unloaded: Cell::new(false),
        }
    }

    /// The real lock refuses its holder with -EIO, and warns. The module must never come to that.
    fn lock(&self, what: &str) -> MutexGuard<'_, ()> {
        let this = Some(thread::current().id());
        assert_ne!(self.inside.get(), this, "{what} inside a callback");
        self.api.lock().expect("no poison")
    }

    /// The lowest free pointer: one that was freed comes back at once.
    fn pointer(&self) -> usize {
        let mut pointers = self.pointers.borrow_mut();
        let pointer = (1..).find(|p| !pointers.contains(p)).expect("endless");
        pointers.push(pointer);
        pointer
    }

    fn free_table(&self, world: &World, table: PageTable) {
        world.memory(self.tables.borrow()[table.serial]).free();
        self.pointers.borrow_mut().retain(|p| *p != table.pointer);
    }

    fn allocation(&self, allocation: usize) -> usize {
        let mut all = self.allocations.borrow_mut();
        *all.entry(allocation)
            .or_insert_with(|| world().alloc("GPU memory"))
    }

    /// Someone reaches the memory of an allocation, or makes it reachable.
    pub(crate) fn use_memory(&self, allocation: usize) {
        world().memory(self.allocation(allocation)).read();
    }

    /// Frees what a model has left.
    pub(crate) fn free_all(&self) {
        let all: Vec<usize> = self.allocations.borrow().keys().copied().collect();
        for allocation in all {
            if !self.is_gone(allocation) {
                self.free(allocation);
            }
        }
    }

    pub(crate) fn is_gone(&self, allocation: usize) -> bool {
        self.gone.borrow().contains(&allocation)
    }

    /// Frees an allocation: one callback for each pin on it, one after the other.
    pub(crate) fn free(&self, allocation: usize) {
        let world = world();
        let guard = self.lock("a free");
        self.inside.set(Some(thread::current().id()));
        loop {
            let mut pins = self.pins.borrow_mut();
            let Some(at) = pins.iter().position(|pin| pin.allocation == allocation) else {
                break;
            };
            let pin = pins.remove(at);
            drop(pins);
            assert!(
                !self.unloaded.get(),
                "a callback into a module that is gone"
            );
            self.in_text.fetch_add(1, Ordering::SeqCst);
            freed(pin.number);
            world.ib_core.stale_tickets();
            // The last instruction of the module, after it gave up its hold.
            self.in_text.fetch_sub(1, Ordering::SeqCst);
            self.returned
                .borrow_mut()
                .insert(pin.table.serial, world.tick());
            self.free_table(&world, pin.table);
        }
        self.gone.borrow_mut().push(allocation);
        world.memory(self.allocation(allocation)).free();
        self.inside.set(None);
        drop(guard);
    }

    /// Unloads the module, if nothing holds it: what `Callbacks` does in its drop.
    pub(crate) fn unload(&self) {
        let world = world();
        if world.holds.load(Ordering::SeqCst) > 0 {
            return;
        }
        if !world.is_broken(Break::NoFence) {
            drop(self.lock("the fence"));
        }
        let in_text = self.in_text.load(Ordering::SeqCst);
        assert_eq!(in_text, 0, "the module goes with a callback in it");
        self.unloaded.set(true);
    }

    pub(crate) fn check_empty(&self) {
        assert!(self.pins.borrow().is_empty(), "a pin is left");
    }
}

/// Keeps the module loaded.
pub(crate) struct ModuleHold(usize);

impl ModuleHold {
    pub(crate) fn try_new() -> Option<Self> {
        let world = world();
        let count = usize::from(!world.is_broken(Break::NoHold));
        world.holds.fetch_add(count, Ordering::SeqCst);
        Some(ModuleHold(count))
    }
}

impl Drop for ModuleHold {
    fn drop(&mut self) {
        world().holds.fetch_sub(self.0, Ordering::SeqCst);
    }
}

/// Slots by their numbers.
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

pub(crate) fn gate_read<R>(f: impl FnOnce() -> R) -> R {
    let world = world();
    if world.is_broken(Break::NoGate) {
        return f();
    }
    let _guard = world.gate.read().expect("no poison");
    f()
}

pub(crate) fn gate_write<R>(f: impl FnOnce() -> R) -> R {
    let world = world();
    if world.is_broken(Break::NoGate) {
        return f();
    }
    let _guard = world.gate.write().expect("no poison");
    world.gate_since.set(world.tick());
    f()
}

pub(crate) fn get_pages<C: Callback>(
    span: &Span,
    number: usize,
) -> Result<Option<PageTable>, Refusal> {
    let world = world();
    let provider = &world.provider;
    let guard = provider.lock("a get");
    let allocation = (span.start() / ALLOCATION) as usize;
    provider.allocation(allocation);
    if provider.is_gone(allocation) || provider.unlisted.get() {
        return Err(Refusal::Pin(EINVAL));
    }
    let memory = world.alloc("a page table");
    let mut tables = provider.tables.borrow_mut();
    tables.push(memory);
    let table = PageTable {
        pointer: provider.pointer(),
        serial: tables.len() - 1,
    };
    provider.pins.borrow_mut().push(Pinned {
        table,
        allocation,
        process: world.process(),
        number,
    });
    drop(tables);
    // From here on the callback may come, though nobody knows the table yet.
    drop(guard);
    Ok(Some(table))
}

pub(crate) fn put_pages(_span: &Span, table: PageTable) -> i32 {
    let world = world();
    let provider = &world.provider;
    if world.is_broken(Break::NoPut) {
        return 0;
    }
    let guard = provider.lock("a put");
    if let Some(left) = provider.short_of_memory.get().checked_sub(1) {
        provider.short_of_memory.set(left);
        return ENOMEM;
    }
    let process = world.process();
    let listed = !provider.unlisted.get();
    let mut pins = provider.pins.borrow_mut();
    let found = pins
        .iter()
        .position(|pin| listed && pin.table.pointer == table.pointer && pin.process == process);
    if let Some(at) = found {
        let pin = pins.remove(at);
        assert_eq!(pin.table.serial, table.serial, "somebody else's pin is put");
        provider.free_table(&world, table);
    } else {
        let foreign = pins.iter().any(|pin| pin.table.serial == table.serial);
        let returned = provider.returned.borrow().get(&table.serial).copied();
        match returned {
            // Between the look and the put.
            Some(when) => assert!(
                when > world.gate_since.get(),
                "a pin is put whose callback had returned before"
            ),
            None => assert!(foreign, "a pin is put twice"),
        }
    }
    drop(pins);
    drop(guard);
    0
}

pub(crate) fn retry(mut put: impl FnMut() -> i32) -> i32 {
    loop {
        match put() {
            ENOMEM => thread::yield_now(),
            ret => return ret,
        }
    }
}

pub(crate) fn process() -> u32 {
    let world = world();
    if world.is_broken(Break::OneProcess) {
        return 1;
    }
    world.process()
}

pub(crate) fn is_exiting() -> bool {
    let world = world();
    world.exits.get() && !world.is_broken(Break::NoExit)
}

pub(crate) fn kept(_span: &Span, why: Kept) {
    world().provider.kept.borrow_mut().push(why);
}

pub(crate) fn late_callback() {
    panic!("a callback finds no slot");
}

pub(crate) fn stray_callback() {
    panic!("a callback finds no slot");
}
