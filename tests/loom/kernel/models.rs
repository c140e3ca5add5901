// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Models of threads that use the crate concurrently. Plain memory is a `loom::cell::UnsafeCell`,
//! which panics if two accesses are not ordered.

use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::alloc::{KBox, GFP_KERNEL};
use crate::bindings::LIVE;
use crate::pin_init;
use crate::pin_init::PinInit;
use crate::sync::{Arc, CondVar, LockClassKey, Mutex, SetOnce};

static CLASS: LockClassKey = LockClassKey;

/// Runs `f`, described by `model`, once for every interleaving of its threads. Checks that each run
/// frees its memory. Prints the figures that the test runner writes to `docs/verification.md`.
///
/// The models share the allocation counter, so only one runs at a time.
fn explore(model: &str, threads: usize, f: impl Fn() + Send + Sync + 'static) {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    static RUNS: AtomicUsize = AtomicUsize::new(0);

    let _one = ONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    LIVE.store(0, Relaxed);
    RUNS.store(0, Relaxed);
    loom::model(move || {
        RUNS.fetch_add(1, Relaxed);
        f();
        assert_eq!(LIVE.load(Relaxed), 0, "memory that is not freed");
    });
    println!("figure: model {model}");
    println!("figure: threads {threads}, all");
    println!("figure: mode portable build");
    println!("figure: interleavings {}", RUNS.load(Relaxed));
}

/// A cell of plain memory for each thread. The drop reads all cells.
struct Memory {
    of: [UnsafeCell<usize>; 3],
    drops: &'static AtomicUsize,
}

// SAFETY: loom finds accesses that are not ordered.
unsafe impl Send for Memory {}
// SAFETY: loom finds accesses that are not ordered.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(drops: &'static AtomicUsize) -> Self {
        let of = Default::default();
        Memory { of, drops }
    }

    fn write(&self, thread: usize) {
        // SAFETY: loom finds accesses that are not ordered.
        self.of[thread].with_mut(|at| unsafe { *at = thread });
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for (thread, memory) in self.of.iter().enumerate() {
            // SAFETY: loom finds accesses that are not ordered.
            memory.with(|at| assert_eq!(unsafe { *at }, thread));
        }
        self.drops.fetch_add(1, Relaxed);
    }
}

#[test]
fn the_last_of_three_references_drops_the_value_after_all_uses() {
    static DROPS: AtomicUsize = AtomicUsize::new(0);

    explore("drops of three references to one value", 3, || {
        DROPS.store(0, Relaxed);
        let first = Arc::pin_init(Memory::new(&DROPS), GFP_KERNEL).unwrap();
        let threads = [1, 2].map(|number| {
            let mine = first.clone();
            thread::spawn(move || {
                mine.write(number);
                drop(mine);
            })
        });
        first.write(0);
        drop(first);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(DROPS.load(Relaxed), 1);
    });
}

#[test]
fn a_reference_can_be_cloned_beside_the_drop_of_another() {
    static DROPS: AtomicUsize = AtomicUsize::new(0);

    explore(
        "a clone of a reference during the drop of another",
        2,
        || {
            DROPS.store(0, Relaxed);
            let first = Arc::pin_init(Memory::new(&DROPS), GFP_KERNEL).unwrap();
            let second = first.clone();
            let other = thread::spawn(move || {
                let third = second.clone();
                drop(second);
                third.write(1);
                third.write(2);
            });
            drop(first);
            other.join().unwrap();
            assert_eq!(DROPS.load(Relaxed), 1);
        },
    );
}

#[test]
fn one_of_two_fills_a_cell_and_a_reader_sees_all_of_it() {
    struct Value(UnsafeCell<usize>);
    // SAFETY: loom finds accesses that are not ordered.
    unsafe impl Send for Value {}
    // SAFETY: loom finds accesses that are not ordered.
    unsafe impl Sync for Value {}

    explore("two threads that fill a cell, and a reader", 3, || {
        let cell = std::sync::Arc::new(SetOnce::<Value>::new());
        assert!(SetOnce::as_ref(&cell).is_none());
        let threads = [1, 2].map(|number| {
            let cell = cell.clone();
            thread::spawn(move || {
                let value = Value(UnsafeCell::new(0));
                // SAFETY: loom finds accesses that are not ordered.
                value.0.with_mut(|at| unsafe { *at = number });
                cell.populate(value).then_some(number)
            })
        });
        let read = |cell: &SetOnce<Value>| {
            // SAFETY: loom finds accesses that are not ordered.
            cell.as_ref().map(|value| value.0.with(|at| unsafe { *at }))
        };
        let early = read(&cell);
        let [first, second] = threads.map(|thread| thread.join().unwrap());
        assert!(
            first.is_some() != second.is_some(),
            "one of the two fills it"
        );
        let filled = first.or(second);
        assert!(early.is_none() || early == filled);
        assert_eq!(read(&cell), filled);
    });
}

struct Gate {
    /// Number of threads that passed, and a flag that opens the gate.
    state: Mutex<State>,
    changed: CondVar,
}

struct State {
    is_open: bool,
    passed: UnsafeCell<usize>,
}

// SAFETY: loom finds accesses that are not ordered.
unsafe impl Send for State {}

impl Gate {
    fn new() -> impl PinInit<Self> {
        let state = State {
            is_open: false,
            passed: UnsafeCell::new(0),
        };
        pin_init!(Gate {
            state <- Mutex::new(state, c"gate", &CLASS),
            changed <- CondVar::new(c"gate", &CLASS),
        })
    }

    fn pass(&self) {
        let mut state = self.state.lock();
        while !state.is_open {
            self.changed.wait(&mut state);
        }
        // SAFETY: loom finds accesses that are not ordered.
        state.passed.with_mut(|at| unsafe { *at += 1 });
    }
}

/// Makes two threads wait for a third thread. The third thread opens the gate and then wakes both,
/// with or without the mutex held.
fn gate(model: &str, holds_the_mutex: bool) {
    explore(model, 3, move || {
        let gate: Pin<KBox<Gate>> = KBox::pin_init(Gate::new(), GFP_KERNEL).unwrap();
        let gate = std::sync::Arc::new(gate);
        let threads = [1, 2].map(|_| {
            let gate = gate.clone();
            thread::spawn(move || gate.pass())
        });
        let mut state = gate.state.lock();
        state.is_open = true;
        if holds_the_mutex {
            gate.changed.notify_all();
            drop(state);
        } else {
            drop(state);
            gate.changed.notify_all();
        }
        for thread in threads {
            thread.join().unwrap();
        }
        // SAFETY: loom finds accesses that are not ordered.
        gate.state
            .lock()
            .passed
            .with(|at| assert_eq!(unsafe { *at }, 2));
    });
}

#[test]
fn no_wake_up_is_lost_with_the_mutex_held() {
    gate("a wake-up of two threads, with the mutex held", true);
}

#[test]
fn no_wake_up_is_lost_without_the_mutex() {
    gate("a wake-up of two threads, without the mutex", false);
}
