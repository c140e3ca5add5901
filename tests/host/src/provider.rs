// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The provider of revocable pins, and what else surrounds them, as fakes that record what is done to them.
//!
//! Each test has a thread, and each thread a [`World`].

use std::cell::Cell;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::RwLock;

use crate::env::Callback;
use crate::extents::Span;
use crate::fakes::lock;
use crate::pin::Directory;
use crate::refusal::Kept;
use crate::refusal::Refusal;
use crate::refusal::EINVAL;
use crate::refusal::ENOMEM;

/// What surrounds the pins of one test.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) directory: Mutex<Option<Directory>>,
    gate: RwLock<()>,
    log: Mutex<Vec<String>>,
    /// What the next puts return before they do anything.
    pub(crate) failing: Mutex<Vec<i32>>,
    /// The provider does not know the process any more.
    pub(crate) unlisted: Mutex<bool>,
    /// The first pin is called back during the next get, which ends so.
    pub(crate) frees: Mutex<Option<Result<u64, Refusal>>>,
    /// Each call to get fails with this.
    pub(crate) refuses: Mutex<Option<i32>>,
}

thread_local! {
    pub(crate) static WORLD: RefCell<Arc<World>> = RefCell::default();
    pub(crate) static PROCESS: Cell<u32> = const { Cell::new(1) };
    pub(crate) static EXITING: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn world() -> Arc<World> {
    WORLD.with_borrow(Clone::clone)
}

pub(crate) fn record(what: impl Into<String>) {
    lock(&world().log).push(what.into());
}

/// What was done since the last call, in order.
pub(crate) fn take_log() -> Vec<String> {
    std::mem::take(&mut *lock(&world().log))
}

/// Addresses at which a get does what it is asked for, and others at which it does not.
pub(crate) const PLAIN: u64 = 0x10_0000;
pub(crate) const OTHER: u64 = 0x20_0000;
pub(crate) const NO_PIN: u64 = 0x30_0000;
pub(crate) const NO_TABLE: u64 = 0x40_0000;
pub(crate) const FREED_AT_ONCE: u64 = 0x50_0000;

/// What a slot holds: says when it goes.
pub(crate) struct ModuleHold;

impl ModuleHold {
    pub(crate) fn try_new() -> Option<Self> {
        Some(ModuleHold)
    }
}

impl Drop for ModuleHold {
    fn drop(&mut self) {
        record("let go");
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

pub(crate) fn gate_read<R>(f: impl FnOnce() -> R) -> R {
    let world = world();
    let _guard = world.gate.read().expect("no test panics in the gate");
    f()
}

pub(crate) fn gate_write<R>(f: impl FnOnce() -> R) -> R {
    let world = world();
    let _guard = world
        .gate
        .try_write()
        .expect("the gate is not taken where it may have to wait");
    record("alone");
    f()
}

pub(crate) fn get_pages<C: Callback>(span: &Span, number: usize) -> Result<Option<u64>, Refusal> {
    record(format!("get {number}"));
    let frees = lock(&world().frees).take();
    if let Some(then) = frees {
        C::freed(1);
        return then.map(Some);
    }
    if *lock(&world().unlisted) {
        return Err(Refusal::Pin(EINVAL));
    }
    if let Some(code) = *lock(&world().refuses) {
        return Err(Refusal::Pin(code));
    }
    match span.start() {
        NO_PIN => Err(Refusal::Pin(ENOMEM)),
        NO_TABLE => Ok(None),
        FREED_AT_ONCE => {
            C::freed(number);
            Ok(Some(span.start()))
        }
        start => Ok(Some(start)),
    }
}

pub(crate) fn put_pages(_span: &Span, table: u64) -> i32 {
    let failing = lock(&world().failing).pop();
    record(format!("put {table:#x}"));
    failing.unwrap_or(0)
}

pub(crate) fn retry(mut put: impl FnMut() -> i32) -> i32 {
    loop {
        match put() {
            ENOMEM => record("again"),
            ret => return ret,
        }
    }
}

pub(crate) fn process() -> u32 {
    PROCESS.get()
}

pub(crate) fn is_exiting() -> bool {
    EXITING.get()
}

pub(crate) fn kept(_span: &Span, why: Kept) {
    record(format!("{why:?}"));
}

pub(crate) fn late_callback() {
    record("late");
}

pub(crate) fn stray_callback() {
    record("stray");
}
