// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Locks around values.
//!
//! C headers: `include/linux/mutex.h`, `include/linux/spinlock.h`.

use core::{
    cell::UnsafeCell,
    ffi::CStr,
    marker::{
        PhantomData,
        PhantomPinned, //
    },
    ops::{
        Deref,
        DerefMut, //
    },
    ptr::NonNull,
};

use super::{
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

/// A kind of lock of C's.
///
/// # Safety
///
/// From the return of [`lock`](Self::lock) to the call of [`unlock`](Self::unlock) no other thread holds the lock. An `unlock`
/// happens before the next `lock` returns.
pub unsafe trait Backend {
    /// The C structure. Rust code does not know its size.
    type State;

    /// Takes the lock; waits while another thread holds it. The lock is not recursive.
    ///
    /// # Safety
    ///
    /// `state` points to an initialized lock, which the caller does not hold.
    unsafe fn lock(state: *mut Self::State);

    /// Releases the lock.
    ///
    /// # Safety
    ///
    /// `state` points to a lock that the calling thread holds.
    unsafe fn unlock(state: *mut Self::State);
}

/// A lock around a value.
///
/// # Invariants
///
/// `state` has an initialized lock of `B`, and `value` is accessed only while that lock is held, or by an owner of the whole.
pub struct Lock<T, B: Backend> {
    state: Room<20>,
    /// C code links waiters to the address of the lock.
    _pinned: PhantomPinned,
    _backend: PhantomData<B>,
    value: UnsafeCell<T>,
}

// SAFETY: An owner of the lock owns the value. A lock of C's belongs to no thread while nobody holds it.
unsafe impl<T: Send, B: Backend> Send for Lock<T, B> {}
// SAFETY: The threads that share the lock access the value one after the other, each as if the value was sent to it.
unsafe impl<T: Send, B: Backend> Sync for Lock<T, B> {}

impl<T> Lock<T, mutex::MutexBackend> {
    /// Makes an initializer of a mutex around `value`. `name` and `class` are for lockdep.
    pub fn new(value: T, name: &'static CStr, class: &'static LockClassKey) -> impl PinInit<Self> {
        let closure = pin_init::closure(move |place: *mut Self| {
            // SAFETY: `place` is valid for writes by the contract of `PinInit`. The memory for the `struct mutex` is
            // zero, is large enough (`layout.c`), and does not move. `name` and `class` are statics.
            // INVARIANT: `__mutex_init()` initializes the lock.
            unsafe {
                (&raw mut (*place).state).write(Room::new());
                (&raw mut (*place).value).write(UnsafeCell::new(value));
                let state = (*place).state.get().cast();
                bindings::shim_mutex_init(state, name.as_ptr().cast(), class.as_ptr());
                Initialized::new()
            }
        });
        // SAFETY: The closure writes all fields that have a size.
        unsafe { pin_init::from_closure(closure) }
    }
}

impl<T, B: Backend> Lock<T, B> {
    /// Takes the lock; waits while another thread holds it. A thread that holds the lock deadlocks here.
    pub fn lock(&self) -> Guard<'_, T, B> {
        let state = self.state.get().cast();
        // SAFETY: Initialized by the type invariant.
        unsafe { B::lock(state) };
        // INVARIANT: The lock is held, and guards the value by the type invariant of `Lock`.
        Guard {
            state,
            value: &self.value,
            _not_send: PhantomData,
        }
    }
}

impl<B: Backend> Lock<(), B> {
    /// Borrows a lock that C code has made. What the lock guards is up to the caller.
    ///
    /// The result is no `&Lock`: the memory of C's is as large as its kernel's lock, and not as large as a [`Lock`].
    ///
    /// # Safety
    ///
    /// `state` points to a lock that is initialized for the lifetime `'a`.
    pub unsafe fn from_raw<'a>(state: *mut B::State) -> Borrowed<'a, B> {
        // INVARIANT: By the safety requirements.
        Borrowed(state, PhantomData)
    }
}

/// A lock that C code has made.
///
/// # Invariants
///
/// The lock is initialized for the lifetime `'a`.
pub struct Borrowed<'a, B: Backend>(*mut B::State, PhantomData<&'a ()>);

impl<'a, B: Backend> Borrowed<'a, B> {
    /// Takes the lock; waits while another thread holds it. A thread that holds the lock deadlocks here.
    pub fn lock(&self) -> Guard<'a, (), B> {
        // SAFETY: Initialized by the type invariant.
        unsafe { B::lock(self.0) };
        // INVARIANT: The lock is held, and `()` is no value that others could access.
        Guard {
            state: self.0,
            // SAFETY: Any aligned pointer that is not null points to a `()`.
            value: unsafe { NonNull::<UnsafeCell<()>>::dangling().as_ref() },
            _not_send: PhantomData,
        }
    }
}

/// Access to the value of a lock that this thread holds. A drop releases the lock.
///
/// # Invariants
///
/// This thread holds the lock `state` for as long as the guard lives, and that lock guards `value`.
#[must_use = "a lock is released when its guard is dropped"]
pub struct Guard<'a, T, B: Backend> {
    state: *mut B::State,
    value: &'a UnsafeCell<T>,
    /// The thread that takes a lock is the one that releases it.
    _not_send: PhantomData<*mut ()>,
}

impl<T, B: Backend> Guard<'_, T, B> {
    /// Returns the C structure of the lock.
    pub(super) fn state(&self) -> *mut B::State {
        self.state
    }
}

impl<T, B: Backend> Deref for Guard<'_, T, B> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: The lock is held by the type invariant, so that no other thread has a reference. The guard is borrowed.
        unsafe { &*self.value.get() }
    }
}

/// Only for values that may move: a pinned lock pins its value.
impl<T: Unpin, B: Backend> DerefMut for Guard<'_, T, B> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: As in `deref`; the guard is borrowed mutably.
        unsafe { &mut *self.value.get() }
    }
}

impl<T, B: Backend> Drop for Guard<'_, T, B> {
    fn drop(&mut self) {
        // SAFETY: The lock is held by the type invariant, and nobody uses the guard after the drop.
        unsafe { B::unlock(self.state) };
    }
}

/// Mutexes: `struct mutex`.
pub mod mutex {
    use super::Backend;
    use crate::bindings;

    /// A sleeping lock. Process context, no spinlock held.
    pub struct MutexBackend;

    // SAFETY: One thread holds a `struct mutex`, and `mutex_unlock()` is a release, `mutex_lock()` an acquire.
    unsafe impl Backend for MutexBackend {
        type State = bindings::mutex;

        unsafe fn lock(state: *mut Self::State) {
            // SAFETY: Initialized by the safety requirements. The module calls this crate in process context.
            unsafe { bindings::shim_mutex_lock(state) };
        }

        unsafe fn unlock(state: *mut Self::State) {
            // SAFETY: Held by the safety requirements.
            unsafe { bindings::shim_mutex_unlock(state) };
        }
    }
}

/// Spinlocks: `spinlock_t`.
pub mod spinlock {
    use super::Backend;
    use crate::bindings;

    /// A lock whose holder does not sleep. Interrupts stay enabled: no interrupt handler takes the lock.
    ///
    /// The module borrows the spinlocks that its C code makes, and makes none.
    pub struct SpinLockBackend;

    // SAFETY: One thread holds a `spinlock_t`, and `spin_unlock()` is a release, `spin_lock()` an acquire.
    unsafe impl Backend for SpinLockBackend {
        type State = bindings::spinlock_t;

        unsafe fn lock(state: *mut Self::State) {
            // SAFETY: Initialized by the safety requirements.
            unsafe { bindings::shim_spin_lock(state) };
        }

        unsafe fn unlock(state: *mut Self::State) {
            // SAFETY: Held by the safety requirements.
            unsafe { bindings::shim_spin_unlock(state) };
        }
    }
}
