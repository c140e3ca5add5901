// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Where threads wait.

use core::{cell::UnsafeCell, ffi::CStr, marker::PhantomPinned, mem::MaybeUninit};

use super::{
    lock::{mutex::MutexBackend, Guard},
    LockClassKey,
};
use crate::{
    bindings,
    pin_init::{self, PinInit},
};

/// A place to wait, beside a mutex.
pub struct CondVar(UnsafeCell<MaybeUninit<bindings::wait_queue_head_t>>, PhantomPinned);

// SAFETY: It has a lock of its own.
unsafe impl Send for CondVar {}
// SAFETY: As above.
unsafe impl Sync for CondVar {}

impl CondVar {
    pub fn new(name: &'static CStr, class: &'static LockClassKey) -> impl PinInit<Self> {
        // SAFETY: Writes all that is to be written.
        unsafe {
            pin_init::from_closure(move |place: *mut Self| {
                bindings::shim_wait_init(place.cast(), name.as_ptr(), class.as_raw());
            })
        }
    }

    /// Sleeps until it is woken, with the lock released meanwhile. May wake up for nothing.
    pub fn wait<T>(&self, guard: &mut Guard<'_, T, MutexBackend>) {
        // SAFETY: Initialized when it was made; the lock is held, and is again.
        unsafe { bindings::shim_wait(self.0.get().cast(), guard.raw()) };
    }

    pub fn notify_all(&self) {
        // SAFETY: Initialized when it was made.
        unsafe { bindings::shim_wake_all(self.0.get().cast()) };
    }
}
