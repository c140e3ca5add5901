// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Locks around values.

use core::{
    cell::UnsafeCell,
    ffi::CStr,
    marker::{PhantomData, PhantomPinned},
    mem::MaybeUninit,
    ops::{Deref, DerefMut},
};

use super::LockClassKey;
use crate::pin_init::{self, PinInit};

/// A kind of lock of C's.
///
/// # Safety
///
/// One thread has it at a time.
pub unsafe trait Backend {
    type State;

    /// # Safety
    ///
    /// There is room at `state`, which does not move from then on.
    unsafe fn init(state: *mut Self::State, name: &'static CStr, class: &'static LockClassKey);

    /// # Safety
    ///
    /// It is initialized.
    unsafe fn lock(state: *mut Self::State);

    /// # Safety
    ///
    /// The caller has it.
    unsafe fn unlock(state: *mut Self::State);
}

/// A lock around a value.
#[repr(C)]
pub struct Lock<T, B: Backend> {
    state: UnsafeCell<MaybeUninit<B::State>>,
    _pinned: PhantomPinned,
    value: UnsafeCell<T>,
}

// SAFETY: Whoever has the lock has the value.
unsafe impl<T: Send, B: Backend> Send for Lock<T, B> {}
// SAFETY: As above.
unsafe impl<T: Send, B: Backend> Sync for Lock<T, B> {}

impl<T, B: Backend> Lock<T, B> {
    pub fn new(
        value: T,
        name: &'static CStr,
        class: &'static LockClassKey,
    ) -> impl PinInit<Self> {
        // SAFETY: Writes all that is to be written.
        unsafe {
            pin_init::from_closure(move |place: *mut Self| {
                B::init((&raw mut (*place).state).cast(), name, class);
                (&raw mut (*place).value).cast::<T>().write(value);
            })
        }
    }

    /// Takes it.
    pub fn lock(&self) -> Guard<'_, T, B> {
        // SAFETY: Initialized when it was made.
        unsafe { B::lock(self.state.get().cast()) };
        Guard {
            lock: self,
            _not_send: PhantomData,
        }
    }
}

impl<B: Backend> Lock<(), B> {
    /// One of C's.
    ///
    /// # Safety
    ///
    /// It is initialized, and stays so while it is borrowed.
    pub unsafe fn from_raw<'a>(state: *mut B::State) -> &'a Self {
        // SAFETY: Begins with its state, and has nothing else.
        unsafe { &*state.cast() }
    }
}

/// The value, while the lock is held.
pub struct Guard<'a, T, B: Backend> {
    pub(super) lock: &'a Lock<T, B>,
    _not_send: PhantomData<*mut ()>,
}

impl<T, B: Backend> Guard<'_, T, B> {
    pub(super) fn raw(&self) -> *mut B::State {
        self.lock.state.get().cast()
    }
}

impl<T, B: Backend> Deref for Guard<'_, T, B> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: The lock is held.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T, B: Backend> DerefMut for Guard<'_, T, B> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: As above.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T, B: Backend> Drop for Guard<'_, T, B> {
    fn drop(&mut self) {
        // SAFETY: The lock is held.
        unsafe { B::unlock(self.raw()) };
    }
}

pub mod mutex {
    use super::{Backend, CStr, LockClassKey};
    use crate::bindings;

    pub struct MutexBackend;

    // SAFETY: A `struct mutex`.
    unsafe impl Backend for MutexBackend {
        type State = bindings::mutex;

        unsafe fn init(state: *mut Self::State, name: &'static CStr, class: &'static LockClassKey) {
            // SAFETY: As promised by the caller.
            unsafe { bindings::shim_mutex_init(state, name.as_ptr(), class.as_raw()) };
        }

        unsafe fn lock(state: *mut Self::State) {
            // SAFETY: As promised by the caller.
            unsafe { bindings::shim_mutex_lock(state) };
        }

        unsafe fn unlock(state: *mut Self::State) {
            // SAFETY: As promised by the caller.
            unsafe { bindings::shim_mutex_unlock(state) };
        }
    }
}

pub mod spinlock {
    use super::{Backend, CStr, LockClassKey};
    use crate::bindings;

    pub struct SpinLockBackend;

    // SAFETY: A `spinlock_t`.
    unsafe impl Backend for SpinLockBackend {
        type State = bindings::spinlock_t;

        /// Those of `src/` are all made by C.
        unsafe fn init(_: *mut Self::State, _: &'static CStr, _: &'static LockClassKey) {
            unreachable!()
        }

        unsafe fn lock(state: *mut Self::State) {
            // SAFETY: As promised by the caller.
            unsafe { bindings::shim_spin_lock(state) };
        }

        unsafe fn unlock(state: *mut Self::State) {
            // SAFETY: As promised by the caller.
            unsafe { bindings::shim_spin_unlock(state) };
        }
    }
}
