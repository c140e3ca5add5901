// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A model of nvidia.ko that behaves as strictly as `tests/gpu/p2p.c`.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;

use crate::fakes::world::{world, Break, Hook, World};
use crate::ranges::{PageSize, Span};
use crate::reason::{Event, PutError, Reason, EINVAL, ENOMEM};
use crate::sync;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread::ThreadId;
use crate::sync::{thread, Cell, Mutex, MutexGuard, RefCell, SCRIPTED};

/// Length of an allocation in the models, in bytes. Each address that a model registers lies in its
/// own allocation.
pub(crate) const ALLOCATION: u64 = 1 << 20;

/// Physical address of the start of the BAR.
pub(crate) const DMA_BASE: u64 = 0x38_0000_0000;

/// An allocation of GPU memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) page: PageSize,
}

impl Allocation {
    pub(crate) fn new(start: u64, len: u64) -> Self {
        let page = PageSize::KIB_64;
        Allocation { start, len, page }
    }
}

/// The contents of a page table, and the GPU memory that it describes.
#[derive(Clone)]
pub(crate) struct Content {
    pub(crate) page: PageSize,
    pub(crate) addresses: Vec<u64>,
    /// Start of the allocation.
    start: u64,
    pub(crate) gpu: usize,
}

/// A page table, as the caller of `get` holds it. nvidia.ko compares only the pointer. The serial
/// number identifies the pin for the checks.
#[derive(Clone, Copy)]
pub(crate) struct PageTable {
    pointer: usize,
    serial: usize,
}

impl PageTable {
    /// Reads the page table.
    pub(crate) fn read(self) -> Content {
        let world = world();
        let tables = world.provider.tables.borrow();
        world.memory(tables[self.serial].memory).read();
        tables[self.serial].content.clone()
    }
}

/// The event that ended a pin.
#[derive(Clone, Copy)]
pub(crate) enum End {
    Put,
    /// The callback has run or is running.
    Callback,
}

/// The record of a pin and its table.
struct Record {
    memory: usize,
    content: Content,
    number: usize,
    by: ThreadId,
    end: Option<End>,
    /// Time at which the callback of the pin returned.
    returned: Option<u64>,
}

struct Pinned {
    table: PageTable,
    /// Start of the allocation that is pinned.
    start: u64,
    process: u32,
    number: usize,
    freed: extern "C" fn(*mut c_void),
}

#[derive(Default)]
pub(crate) struct Provider {
    api: Mutex<()>,
    /// The thread that holds the API lock while it makes callbacks.
    inside: Cell<Option<ThreadId>>,
    /// Pins that were neither put nor called back. Protected by the API lock.
    pins: RefCell<Vec<Pinned>>,
    /// Start address of the GPU memory.
    start: u64,
    /// The allocations that can be pinned. If the list is empty, one allocation covers all
    /// addresses, and a new allocation replaces it as soon as it is freed. Each allocation has its
    /// own memory.
    pub(crate) layout: RefCell<Vec<Allocation>>,
    /// GPU memory of the live allocations that were pinned at least once, by start address.
    gpu: RefCell<BTreeMap<u64, usize>>,
    /// A record of each table that was ever made, indexed by serial number.
    tables: RefCell<Vec<Record>>,
    /// Pointers of the live tables.
    pointers: RefCell<Vec<usize>>,
    /// `true` if nvidia.ko's list of processes is empty. `nvidia_p2p_get_pages()` then fails, and
    /// `nvidia_p2p_put_pages()` finds no pin.
    pub(crate) unlisted: Cell<bool>,
    /// Return values of the next puts, which fail before they do anything.
    pub(crate) failing: RefCell<Vec<i32>>,
    /// Error code of all calls to pin. `None` if the calls succeed.
    pub(crate) refuses: Cell<Option<i32>>,
    /// `true` if calls to pin succeed without returning a page table. A put would need the table.
    pub(crate) no_table: Cell<bool>,
    /// Number of calls to pin so far.
    pub(crate) calls: Cell<u64>,
    /// The range of each call for a persistent pin, even if the call failed.
    pub(crate) spans: RefCell<Vec<Span>>,
    /// The number of the call to pin that must fail, and its error code.
    pub(crate) fail_call: Cell<Option<(u64, i32)>>,
    /// Runs at the start of the next call to pin, before the model takes the API lock.
    pub(crate) on_get: Cell<Option<Hook>>,
    /// Runs at the end of the next pin, before it returns.
    pub(crate) on_pin: Cell<Option<Hook>>,
    /// Runs at the end of the call to pin with this number, before it returns.
    pub(crate) on_call: Cell<Option<(u64, Hook)>>,
    /// Reasons why pins were not put and wait for their callbacks.
    pub(crate) orphaned: RefCell<Vec<PutError>>,
    /// The recorded steps, in order.
    log: RefCell<Vec<String>>,
    /// Number of threads in the module's callback.
    in_text: AtomicUsize,
    unloaded: Cell<bool>,
}

impl Provider {
    /// Creates a model whose memory begins at `start`.
    pub(crate) fn new(start: u64) -> Self {
        Provider {
            start,
            ..Provider::default()
        }
    }

    pub(crate) fn record(&self, what: impl Into<String>) {
        self.log.borrow_mut().push(what.into());
    }

    /// Returns the steps since the last call, in order.
    pub(crate) fn take_log(&self) -> Vec<String> {
        self.log.take()
    }

    /// Checks that the steps since the last call are those in `want`, separated by commas.
    #[track_caller]
    pub(crate) fn took(&self, want: &str) {
        assert_eq!(self.take_log(), want.split(", ").collect::<Vec<_>>());
    }

    /// Returns the allocation that contains `span`, and the allocation's index in `layout`.
    fn allocation(&self, span: &Span) -> Option<(usize, Allocation)> {
        let layout = self.layout.borrow();
        if layout.is_empty() && SCRIPTED {
            return Some((0, Allocation::new(self.start, 1 << 40)));
        }
        let inside = |a: &Allocation| {
            span.start() >= a.start && span.start() + span.len() <= a.start + a.len
        };
        let (number, found) = layout.iter().enumerate().find(|(_, a)| inside(a))?;
        Some((number, *found))
    }

    /// Handles a call to pin. Returns the number of the call, and the pinned contents. The caller
    /// holds the API lock.
    fn answer(&self, world: &World, span: &Span) -> Result<(u64, Content), Reason> {
        world.record("pin");
        let call = self.calls.get() + 1;
        self.calls.set(call);
        let fails = self.fail_call.get().filter(|(at, _)| *at == call);
        if let Some(code) = fails.map(|(_, code)| code).or(self.refuses.get()) {
            return Err(Reason::Pin(code));
        }
        let (number, found) = self.allocation(span).ok_or(Reason::Pin(EINVAL))?;
        let page = found.page;
        let base = DMA_BASE + ((number as u64) << 36) + (span.start() - self.start);
        let count = span.pages(page).expect("whole pages");
        let mut gpu = self.gpu.borrow_mut();
        let content = Content {
            page,
            addresses: (0..count).map(|i| base + i * page.bytes()).collect(),
            start: found.start,
            gpu: *gpu
                .entry(found.start)
                .or_insert_with(|| world.alloc("GPU memory")),
        };
        Ok((call, content))
    }

    /// Pins memory for a persistent registration, which gets no callback.
    pub(crate) fn get_persistent(&self, span: &Span) -> Result<Content, Reason> {
        let _guard = self.lock("a get");
        self.spans.borrow_mut().push(*span);
        let (_, content) = self.answer(&world(), span)?;
        Ok(content)
    }

    pub(crate) fn put_persistent(&self) {
        let _guard = self.lock("a put");
        world().record("unpin");
    }

    /// Returns the table that the calling thread got last.
    pub(crate) fn newest(&self) -> PageTable {
        let this = thread::current().id();
        let tables = self.tables.borrow();
        let serial = tables.iter().rposition(|table| table.by == this);
        PageTable {
            pointer: 0,
            serial: serial.expect("a table of this thread"),
        }
    }

    pub(crate) fn end(&self, table: PageTable) -> Option<End> {
        self.tables.borrow()[table.serial].end
    }

    /// Returns the number of pins that were neither put nor called back.
    pub(crate) fn live(&self) -> usize {
        self.pins.borrow().len()
    }

    /// Takes the API lock. If the caller already holds the lock, the real nvidia.ko fails with -EIO
    /// and a warning. The module must never cause this failure.
    fn lock(&self, what: &str) -> MutexGuard<'_, ()> {
        let this = Some(thread::current().id());
        assert_ne!(self.inside.get(), this, "{what} inside a callback");
        self.api.lock().expect("no poison")
    }

    /// Returns `true` if `thread` is making callbacks.
    pub(crate) fn is_inside(&self, thread: ThreadId) -> bool {
        self.inside.get() == Some(thread)
    }

    /// Returns the lowest free pointer. The pointer of a freed table is reused at once.
    fn pointer(&self) -> usize {
        let mut pointers = self.pointers.borrow_mut();
        let pointer = (1..).find(|p| !pointers.contains(p)).expect("endless");
        pointers.push(pointer);
        pointer
    }

    fn free_table(&self, world: &World, table: PageTable) {
        let memory = self.tables.borrow()[table.serial].memory;
        world.memory(memory).free();
        self.pointers.borrow_mut().retain(|p| *p != table.pointer);
    }

    /// Returns `true` if no allocation starts at `start` any more.
    pub(crate) fn is_gone(&self, start: u64) -> bool {
        self.layout.borrow().iter().all(|a| a.start != start)
    }

    /// Frees the allocations that start in `[from, to)`. Makes one callback for each pin of these
    /// allocations, one after another.
    pub(crate) fn free_part(&self, from: u64, to: u64) {
        let world = world();
        let guard = self.lock("a free");
        self.inside.set(Some(thread::current().id()));
        loop {
            let mut pins = self.pins.borrow_mut();
            let Some(at) = pins.iter().position(|pin| (from..to).contains(&pin.start)) else {
                break;
            };
            let pin = pins.remove(at);
            drop(pins);
            assert!(!self.unloaded.get(), "a callback into an unloaded module");
            self.tables.borrow_mut()[pin.table.serial].end = Some(End::Callback);
            world.record("callback");
            self.in_text.fetch_add(1, Ordering::SeqCst);
            (pin.freed)(ptr::without_provenance_mut(pin.number));
            world.ib_core.stale_tickets();
            // Here, the callback executes its last instruction. It has already dropped its
            // reference to the module.
            self.in_text.fetch_sub(1, Ordering::SeqCst);
            world.record("callback returns");
            self.tables.borrow_mut()[pin.table.serial].returned = Some(world.tick());
            self.free_table(&world, pin.table);
        }
        let orphaned = |a: &Allocation| a.start < from || a.start >= to;
        self.layout.borrow_mut().retain(orphaned);
        let mut gpu = self.gpu.borrow_mut();
        gpu.retain(|start, memory| {
            let gone = (from..to).contains(start);
            if gone {
                world.memory(*memory).free();
            }
            !gone
        });
        self.inside.set(None);
        drop(guard);
    }

    /// Unloads the module if there is no reference to it. Stand-in for the drop of `Callbacks`.
    pub(crate) fn unload(&self) {
        let world = world();
        if world.holds.load(Ordering::SeqCst) > 0 {
            return;
        }
        if !world.is_broken(Break::NoFence) {
            drop(self.lock("the fence"));
        }
        let in_text = self.in_text.load(Ordering::SeqCst);
        assert_eq!(in_text, 0, "the module is unloaded during a callback");
        self.unloaded.set(true);
    }

    pub(crate) fn check_empty(&self) {
        assert!(self.pins.borrow().is_empty(), "a pin is left");
    }
}

/// A reference that keeps the module loaded.
pub(crate) struct ModuleRef(usize);

impl ModuleRef {
    pub(crate) fn try_new() -> Option<Self> {
        let world = world();
        let count = usize::from(!world.is_broken(Break::NoHold));
        world.holds.fetch_add(count, Ordering::SeqCst);
        Some(ModuleRef(count))
    }
}

impl Drop for ModuleRef {
    fn drop(&mut self) {
        let world = world();
        world.holds.fetch_sub(self.0, Ordering::SeqCst);
    }
}

pub(crate) fn put_rwsem_read<R>(f: impl FnOnce() -> R) -> R {
    let world = world();
    if world.is_broken(Break::NoPutRwsem) {
        return f();
    }
    let _guard = world.put_rwsem.read().expect("no poison");
    f()
}

pub(crate) fn put_rwsem_write<R>(f: impl FnOnce() -> R) -> R {
    let world = world();
    if world.is_broken(Break::NoPutRwsem) {
        return f();
    }
    let _guard = sync::write(&world.put_rwsem);
    world.put_rwsem_since.set(world.tick());
    world.provider.record("alone");
    f()
}

pub(crate) fn get_pages(
    span: &Span,
    number: usize,
    callback: extern "C" fn(*mut c_void),
) -> Result<Option<PageTable>, Reason> {
    let world = world();
    let provider = &world.provider;
    provider.record(format!("get {number}"));
    world.may_allocate();
    world.hook(&provider.on_get);
    let guard = provider.lock("a get");
    if provider.unlisted.get() {
        return Err(Reason::Pin(EINVAL));
    }
    let (call, content) = provider.answer(&world, span)?;
    let mut tables = provider.tables.borrow_mut();
    let table = PageTable {
        pointer: provider.pointer(),
        serial: tables.len(),
    };
    provider.pins.borrow_mut().push(Pinned {
        table,
        start: content.start,
        process: world.process(),
        number,
        freed: callback,
    });
    tables.push(Record {
        memory: world.alloc("a page table"),
        content,
        number,
        by: thread::current().id(),
        end: None,
        returned: None,
    });
    drop(tables);
    // The callback may come from here on, although no caller knows the table yet.
    drop(guard);
    world.hook(&provider.on_pin);
    match provider.on_call.take() {
        Some((at, mut hook)) if at == call => hook(&world),
        other => provider.on_call.set(other),
    }
    Ok((!provider.no_table.get()).then_some(table))
}

pub(crate) fn put_pages(_span: &Span, table: PageTable) -> i32 {
    let world = world();
    let provider = &world.provider;
    if world.is_broken(Break::NoPut) {
        return 0;
    }
    let _guard = provider.lock("a put");
    let mut tables = provider.tables.borrow_mut();
    let of = &mut tables[table.serial];
    provider.record(format!("put {}", of.number));
    if let Some(code) = provider.failing.borrow_mut().pop() {
        return code;
    }
    let process = world.process();
    let listed = !provider.unlisted.get();
    let mut pins = provider.pins.borrow_mut();
    let found = pins
        .iter()
        .position(|pin| listed && pin.table.pointer == table.pointer && pin.process == process);
    if let Some(at) = found {
        let pin = pins.remove(at);
        assert_eq!(pin.table.serial, table.serial, "another owner's pin is put");
        of.end = Some(End::Put);
        drop(tables);
        provider.free_table(&world, table);
    } else {
        let foreign = pins.iter().any(|pin| pin.table.serial == table.serial);
        match of.returned {
            // The callback came between the check and the put.
            Some(when) => assert!(
                when > world.put_rwsem_since.get(),
                "a pin is put after its callback has returned"
            ),
            None => assert!(foreign, "a pin is put twice"),
        }
    }
    0
}

pub(crate) fn retry(mut put: impl FnMut() -> i32) -> i32 {
    loop {
        match put() {
            ENOMEM => {
                world().provider.record("again");
                thread::yield_now();
            }
            ret => return ret,
        }
    }
}

pub(crate) fn orphaned(_span: &Span, why: PutError) {
    let world = world();
    world.provider.record(format!("{why:?}"));
    world.provider.orphaned.borrow_mut().push(why);
}

/// Records an event. Only a test or an injected fault causes a callback that finds no entry.
pub(crate) fn report(event: Event, _span: Option<&Span>, _code: Option<i32>) {
    match event {
        Event::LargeHcaPage => world().record("large HCA page"),
        Event::LateCallback if SCRIPTED => world().provider.record("late"),
        Event::SpuriousCallback if SCRIPTED => world().provider.record("spurious"),
        _ => panic!("a callback finds no entry: {event:?}"),
    }
}
