// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The functions of `portable/shim.c`, on loom's locks. The memory of a lock or wait queue holds a
//! pointer to a loom object.

#![allow(non_camel_case_types, reason = "names of C")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use loom::sync::{Condvar, Mutex, MutexGuard};

use crate::ffi::{c_char, c_void};

pub struct lock_class_key;
pub struct mutex(*const Lock);
pub struct spinlock_t;
pub struct wait_queue_head(*const Queue);

/// Number of allocations that are not freed.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Memory for any value of the models.
type Memory = [u64; 64];

pub unsafe fn shim_alloc(size: usize, _: bool) -> *mut c_void {
    assert!(size <= size_of::<Memory>());
    LIVE.fetch_add(1, Relaxed);
    Box::into_raw(Box::new([0_u64; 64])).cast()
}

pub unsafe fn shim_free(memory: *mut c_void) {
    LIVE.fetch_sub(1, Relaxed);
    // SAFETY: `shim_alloc()` allocated the memory.
    drop(unsafe { Box::from_raw(memory.cast::<Memory>()) });
}

pub unsafe fn shim_valloc(_: usize, _: bool) -> *mut c_void {
    std::ptr::null_mut()
}

pub unsafe fn shim_vfree(_: *mut c_void) {}

#[derive(Default)]
struct Lock {
    lock: Mutex<()>,
    guard: RefCell<Option<MutexGuard<'static, ()>>>,
}

/// A wait queue, with its spinlock.
#[derive(Default)]
struct Queue(Mutex<Vec<Rc<Waiter>>>);

/// A thread that waits.
#[derive(Default)]
struct Waiter {
    is_running: Mutex<bool>,
    changed: Condvar,
}

pub unsafe fn shim_mutex_init(lock: *mut mutex, _: *const c_char, _: *mut lock_class_key) {
    // SAFETY: The caller provides memory for a lock.
    unsafe { lock.write(mutex(Box::leak(Box::default()))) };
}

pub unsafe fn shim_mutex_lock(lock: *mut mutex) {
    // SAFETY: `shim_mutex_init()` initialized the lock.
    let lock: &'static Lock = unsafe { &*(*lock).0 };
    let guard = lock.lock.lock().expect("no poison");
    let old = lock.guard.replace(Some(guard));
    assert!(old.is_none());
}

pub unsafe fn shim_mutex_unlock(lock: *mut mutex) {
    // SAFETY: `shim_mutex_init()` initialized the lock.
    let guard = unsafe { &*(*lock).0 }.guard.take();
    drop(guard.expect("a lock that is held"));
}

pub unsafe fn shim_spin_lock(_: *mut spinlock_t) {}

pub unsafe fn shim_spin_unlock(_: *mut spinlock_t) {}

pub unsafe fn shim_wait_init(
    queue: *mut wait_queue_head,
    _: *const c_char,
    _: *mut lock_class_key,
) {
    // SAFETY: The caller provides memory for a queue.
    unsafe { queue.write(wait_queue_head(Box::leak(Box::default()))) };
}

/// Waits as `shim_wait()` in C does. Each step takes the same lock as in C.
pub unsafe fn shim_wait(queue: *mut wait_queue_head, lock: *mut mutex) {
    // SAFETY: `shim_wait_init()` initialized the queue.
    let queue = unsafe { &*(*queue).0 };
    let waiter = Rc::<Waiter>::default();
    // prepare_to_wait_exclusive()
    queue.0.lock().expect("no poison").push(waiter.clone());
    // SAFETY: The caller holds the lock.
    unsafe { shim_mutex_unlock(lock) };
    // schedule()
    let mut is_running = waiter.is_running.lock().expect("no poison");
    while !*is_running {
        is_running = waiter.changed.wait(is_running).expect("no poison");
    }
    drop(is_running);
    // finish_wait()
    queue
        .0
        .lock()
        .expect("no poison")
        .retain(|other| !Rc::ptr_eq(other, &waiter));
    // SAFETY: The lock is initialized, and not held by this thread.
    unsafe { shim_mutex_lock(lock) };
}

pub unsafe fn shim_wake_all(queue: *mut wait_queue_head) {
    // SAFETY: `shim_wait_init()` initialized the queue.
    let mut waiters = unsafe { &*(*queue).0 }.0.lock().expect("no poison");
    for waiter in waiters.drain(..) {
        *waiter.is_running.lock().expect("no poison") = true;
        waiter.changed.notify_all();
    }
}
