// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of locks, counted references, cells and atomics.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::from_ref;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use super::fakes::{failing_after, is_held, lock_within, make_lock, until_waiting, without_leaks};
use super::Counted;
use crate::bindings;
use crate::error::code::ENOMEM;
use crate::prelude::*;
use crate::sync::atomic::{Acquire, Atomic, Full, Relaxed, Release};
use crate::sync::lock::spinlock::SpinLockBackend;
use crate::sync::lock::Lock;
use crate::sync::{new_condvar, new_mutex, Arc, CondVar, Mutex, SetOnce};
use crate::types::ForeignOwnable;

#[test]
fn a_mutex_is_held_as_long_as_its_guard() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let mutex = KBox::pin_init(new_mutex!((1, value), "first"), GFP_KERNEL).unwrap();
        let (at, name, class) = lock_within(&*mutex);
        assert_eq!((name.as_str(), is_held(at)), ("first", false));
        let mut guard = mutex.lock();
        assert!(is_held(at));
        guard.0 = 2;
        drop(guard);
        assert!(!is_held(at));
        assert_eq!(mutex.lock().0, 2);
        assert!(!is_held(at));
        let again = catch_unwind(AssertUnwindSafe(|| {
            let _first = mutex.lock();
            drop(mutex.lock());
        }));
        assert!(again.is_err(), "not recursive");
        assert!(!is_held(at), "a guard releases the lock whatever ends it");

        let other = KBox::pin_init(new_mutex!((), "second"), GFP_KERNEL).unwrap();
        assert_ne!(lock_within(&*other).2, class, "two places, two classes");
        drop(mutex);
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn a_spinlock_of_c_is_borrowed() {
    // A `spinlock_t` is smaller than the memory that the crate reserves for a lock.
    let memory = [0_u32; 1];
    let state: *mut bindings::spinlock_t = from_ref(&memory).cast_mut().cast();
    make_lock(state.addr(), "C's", 0);
    // SAFETY: The lock is initialized until the end of the test.
    let lock = unsafe { Lock::<(), SpinLockBackend>::from_raw(state) };
    let guard = lock.lock();
    assert!(is_held(state.addr()));
    drop(guard);
    assert!(!is_held(state.addr()));
}

struct Gate {
    open: Pin<KBox<Mutex<bool>>>,
    changed: Pin<KBox<CondVar>>,
}

fn gate() -> Gate {
    Gate {
        open: KBox::pin_init(new_mutex!(false, "open"), GFP_KERNEL).unwrap(),
        changed: KBox::pin_init(new_condvar!("changed"), GFP_KERNEL).unwrap(),
    }
}

#[test]
fn a_waiting_thread_releases_the_mutex_and_has_it_again() {
    let gate = gate();
    let (at, ..) = lock_within(&*gate.open);
    let passed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut guard = gate.open.lock();
                while !*guard {
                    gate.changed.wait(&mut guard);
                    assert!(is_held(at));
                }
                passed.fetch_add(1, SeqCst);
            });
        }
        until_waiting(&*gate.changed, 3);
        // The gate is still closed at this wake-up, so all three threads wait again.
        gate.changed.notify_all();
        until_waiting(&*gate.changed, 3);
        assert_eq!(passed.load(SeqCst), 0);
        *gate.open.lock() = true;
        gate.changed.notify_all();
    });
    assert_eq!(passed.load(SeqCst), 3);
    assert!(!is_held(at));
}

#[test]
fn the_last_reference_drops_the_value() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let first = Arc::pin_init((5_u8, value), GFP_KERNEL).unwrap();
        let second = first.clone();
        let third = second.clone();
        assert!(std::ptr::eq(&*first, &*third));
        drop(first);
        drop(third);
        assert_eq!((drops.get(), second.0), (0, 5));
        drop(second);
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn c_keeps_a_reference_as_a_pointer() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let first = Arc::pin_init((5_u8, value), GFP_KERNEL).unwrap();
        let pointer = first.clone().into_foreign();
        // SAFETY: The pointer came from a reference, which is taken back after the borrow.
        unsafe {
            let borrow: &(u8, Counted) = <Arc<(u8, Counted)>>::borrow(pointer);
            assert!(std::ptr::eq(borrow, &*first));
            drop(first);
            assert_eq!(drops.get(), 0);
            drop(<Arc<(u8, Counted)>>::from_foreign(pointer));
        }
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn a_reference_without_memory_drops_the_value() {
    let (drops, value) = Counted::new();
    assert!(failing_after(0, || Arc::pin_init(value, GFP_KERNEL)).is_err());
    assert_eq!(drops.get(), 1);
    let error = failing_after(0, || Arc::pin_init(1_u64, GFP_KERNEL).map(drop));
    assert_eq!(error, Err(ENOMEM));
}

/// Sets the count of a reference, which is the first field of its memory.
fn set_count(of: &Arc<u64>, count: i32) {
    // SAFETY: The value is the second field, aligned to 8 bytes. No other thread has a reference.
    unsafe { from_ref(&**of).cast_mut().cast::<i32>().sub(2).write(count) };
}

fn count(of: &Arc<u64>) -> i32 {
    // SAFETY: The value is the second field, aligned to 8 bytes. No other thread has a reference.
    unsafe { from_ref(&**of).cast::<i32>().sub(2).read() }
}

#[test]
fn a_count_that_overflows_is_never_zero_again() {
    const SATURATED: i32 = i32::MIN / 2;
    let one = Arc::pin_init(1_u64, GFP_KERNEL).unwrap();
    assert_eq!(count(&one), 1);
    set_count(&one, i32::MAX - 1);
    let mut more = vec![one.clone()];
    assert_eq!(count(&one), i32::MAX);
    more.push(one.clone());
    assert_eq!(count(&one), SATURATED);
    more.push(one.clone());
    assert_eq!(count(&one), SATURATED);
    drop(more);
    assert_eq!(count(&one), SATURATED);
    // A count that fell below zero does not recover either.
    set_count(&one, i32::MIN);
    drop(one.clone());
    assert_eq!(count(&one), SATURATED);
    // A count of zero means a reference to freed memory.
    set_count(&one, 0);
    std::mem::forget(one.clone());
    assert_eq!(count(&one), SATURATED);
    set_count(&one, 1);
}

#[test]
fn a_cell_is_filled_once() {
    let (drops, value) = Counted::new();
    let cell = SetOnce::new();
    assert!(cell.as_ref().is_none());
    assert!(cell.populate((1, value.clone())));
    assert!(!cell.populate((2, value)));
    assert_eq!(drops.get(), 1, "the second value");
    assert_eq!(cell.as_ref().unwrap().0, 1);
    drop(cell);
    assert_eq!(drops.get(), 2);

    let numbers = SetOnce::new();
    assert_eq!(numbers.copy(), None);
    assert!(numbers.populate(7));
    assert_eq!(numbers.copy(), Some(7));
    drop(SetOnce::<Counted>::new());
}

#[test]
fn atomics_have_the_operations_of_their_names() {
    let number = Atomic::new(5_u64);
    assert_eq!(number.load(Relaxed), 5);
    number.store(6, Release);
    assert_eq!(number.fetch_add(2, Full), 6);
    number.add(u64::MAX, Relaxed);
    assert_eq!(number.load(Acquire), 7);
    assert_eq!(number.xchg(9, Full), 7);
    assert_eq!(number.cmpxchg(8, 1, Relaxed), Err(9));
    assert_eq!(number.cmpxchg(9, 1, Relaxed), Ok(9));
    assert_eq!(number.load(Relaxed), 1);
    let wraps = Atomic::new(i32::MAX);
    assert_eq!(wraps.fetch_add(1, Relaxed), i32::MAX);
    assert_eq!(wraps.load(Relaxed), i32::MIN);
    let small = Atomic::new(u32::MAX);
    small.add(1, Relaxed);
    assert_eq!(small.load(Relaxed), 0);
    let flag = Atomic::new(false);
    assert!(!flag.xchg(true, Full) && flag.load(Acquire));
}

#[test]
fn orders_are_those_of_their_names() {
    use std::sync::atomic::Ordering;

    use crate::sync::atomic::Order;

    // The processor that runs the tests may give more order than requested, and hide a wrong order.
    // The test therefore compares the constants.
    let orders = [Relaxed::ORDER, Acquire::ORDER, Release::ORDER, Full::ORDER];
    let want = [
        Ordering::Relaxed,
        Ordering::Acquire,
        Ordering::Release,
        SeqCst,
    ];
    assert_eq!(orders, want);
}

/// Checks that some types are not `Send`, `Sync` or `Unpin`. In the module, statics and trait
/// bounds check that the types that threads share are `Send` and `Sync`.
#[test]
fn what_belongs_to_a_thread_stays_there() {
    use std::cell::Cell;

    use crate::sync::lock::mutex::MutexBackend;
    use crate::sync::lock::Guard;

    trait Answer {
        const IS: bool = false;
    }
    macro_rules! is {
        ($type:ty: $bound:path) => {{
            struct Of<T: ?Sized>(std::marker::PhantomData<T>);
            impl<T: ?Sized> Answer for Of<T> {}
            #[allow(dead_code)]
            impl<T: ?Sized + $bound> Of<T> {
                const IS: bool = true;
            }
            <Of<$type>>::IS
        }};
    }

    assert!(!is!(Guard<'static, u8, MutexBackend>: Send));
    assert!(!is!(KBox<*mut u8>: Send));
    assert!(!is!(KVVec<*mut u8>: Send));
    assert!(!is!(Arc<Cell<u8>>: Send));
    assert!(!is!(Arc<std::sync::MutexGuard<'static, u8>>: Send));
    assert!(!is!(Mutex<*mut u8>: Sync));
    assert!(!is!(SetOnce<Cell<u8>>: Sync));
    assert!(!is!(SetOnce<std::sync::MutexGuard<'static, u8>>: Sync));
    assert!(!is!(Mutex<u8>: Unpin));
    assert!(!is!(CondVar: Unpin));
    assert!(is!(KBox<u8>: Send));
    assert!(is!(Mutex<Cell<u8>>: Sync));
    assert!(is!(Arc<u8>: Sync));
    assert!(is!(SetOnce<u8>: Sync));
}
