// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Condition variables.
//!
//! C header: `include/linux/wait.h`.

use core::{
    ffi::CStr,
    marker::PhantomPinned, //
};

use super::{
    lock::{
        mutex::MutexBackend,
        Guard, //
    },
    LockClassKey,
    Room, //
};
use crate::{
    bindings,
    pin_init::{
        self,
        Initialized,
        PinInit, //
    }, //
};

/// A condition variable: a `wait_queue_head_t`. Needs process context.
///
/// # Invariants
///
/// `queue` holds an initialized wait queue.
pub struct CondVar {
    queue: Room<12>,
    /// C code links waiters to the address of the queue.
    _pinned: PhantomPinned,
}

// SAFETY: A wait queue is not tied to a thread.
unsafe impl Send for CondVar {}
// SAFETY: A wait queue has its own lock.
unsafe impl Sync for CondVar {}

impl CondVar {
    /// Returns an initializer of a condition variable. `name` and `class` are for lockdep.
    pub fn new(name: &'static CStr, class: &'static LockClassKey) -> impl PinInit<Self> {
        let closure = pin_init::closure(move |place: *mut Self| {
            // SAFETY: `place` is valid for writes by the contract of `PinInit`. The memory for the
            // wait queue is zero, is large enough (`layout.c`), and does not move. `name` and
            // `class` are statics.
            // INVARIANT: `__init_waitqueue_head()` initializes the queue.
            unsafe {
                (&raw mut (*place).queue).write(Room::new());
                let queue = (*place).queue.get().cast();
                bindings::shim_wait_init(queue, name.as_ptr().cast(), class.as_ptr());
                Initialized::new()
            }
        });
        // SAFETY: The closure writes all fields that have a size.
        unsafe { pin_init::from_closure(closure) }
    }

    /// Releases the mutex of `guard`, sleeps until the next [`notify_all`](Self::notify_all), and
    /// takes the mutex again.
    ///
    /// The thread enters the queue before it releases the mutex. A notification by a thread that
    /// takes the mutex later is therefore not lost. The sleep is uninterruptible, and may end
    /// without a notification, so the caller must check its condition again.
    pub fn wait<T>(&self, guard: &mut Guard<'_, T, MutexBackend>) {
        // SAFETY: The queue is initialized by the type invariant. This thread holds the mutex by
        // the invariant of `Guard`, and holds it again when the function returns. `guard` is
        // borrowed mutably, so no code has a reference to the value.
        unsafe { bindings::shim_wait(self.queue.get().cast(), guard.state()) };
    }

    /// Wakes all waiting threads. Threads that come later wait for the next notification.
    pub fn notify_all(&self) {
        // SAFETY: The queue is initialized by the type invariant.
        unsafe { bindings::shim_wake_all(self.queue.get().cast()) };
    }
}
