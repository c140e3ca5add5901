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

/// A kind of C lock.
///
/// # Safety
///
/// From the return of [`lock`](Self::lock) to the call of [`unlock`](Self::unlock), no other thread
/// may hold the lock. An `unlock` must happen before the next `lock` returns.
pub unsafe trait Backend {
    /// The C structure, whose size Rust code does not know.
    type State;

    /// Takes the lock, or waits while another thread holds it. The lock is not recursive.
    ///
    /// # Safety
    ///
    /// `state` must point to an initialized lock that the caller does not hold.
    unsafe fn lock(state: *mut Self::State);

    /// Releases the lock.
    ///
    /// # Safety
    ///
    /// `state` must point to a lock that the calling thread holds.
    unsafe fn unlock(state: *mut Self::State);
}

/// A lock around a value.
///
/// # Invariants
///
/// `state` holds an initialized lock of `B`. `value` is accessed only while that lock is held, or
/// by an owner of the `Lock`.
pub struct Lock<T, B: Backend> {
    state: Room<20>,
    /// C code links waiters to the address of the lock.
    _pinned: PhantomPinned,
    _backend: PhantomData<B>,
    value: UnsafeCell<T>,
}

// SAFETY: An owner of the lock owns the value. A C lock is not tied to a thread while no thread
// holds it.
unsafe impl<T: Send, B: Backend> Send for Lock<T, B> {}
// SAFETY: The threads that share the lock access the value one after another, as if the value were
// sent from thread to thread.
unsafe impl<T: Send, B: Backend> Sync for Lock<T, B> {}

impl<T> Lock<T, mutex::MutexBackend> {
    /// Returns an initializer of a mutex around `value`. `name` and `class` are for lockdep.
    pub fn new(value: T, name: &'static CStr, class: &'static LockClassKey) -> impl PinInit<Self> {
        let closure = pin_init::closure(move |place: *mut Self| {
            // SAFETY: `place` is valid for writes by the contract of `PinInit`. The memory for the
            // `struct mutex` is zero, is large enough (`layout.c`), and does not move. `name` and
            // `class` are statics.
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
    /// Takes the lock, or waits while another thread holds it. A recursive call deadlocks.
    pub fn lock(&self) -> Guard<'_, T, B> {
        let state = self.state.get().cast();
        // SAFETY: The lock is initialized by the type invariant.
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
    /// Borrows a lock that C code has made. The caller decides what the lock guards.
    ///
    /// The result is not a `&Lock`. A [`Lock`] has room for the lock of any kernel, and is larger
    /// than the C structure.
    ///
    /// # Safety
    ///
    /// `state` must point to a lock that is initialized for the lifetime `'a`.
    pub unsafe fn from_raw<'a>(state: *mut B::State) -> Borrowed<'a, B> {
        // INVARIANT: The lock is initialized for `'a` by the safety requirements.
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
    /// Takes the lock, or waits while another thread holds it. A recursive call deadlocks.
    pub fn lock(&self) -> Guard<'a, (), B> {
        // SAFETY: The lock is initialized by the type invariant.
        unsafe { B::lock(self.0) };
        // INVARIANT: The lock is held, and `()` has no contents that other threads could access.
        Guard {
            state: self.0,
            // SAFETY: Any aligned pointer that is not null points to a `()`.
            value: unsafe { NonNull::<UnsafeCell<()>>::dangling().as_ref() },
            _not_send: PhantomData,
        }
    }
}

/// Access to the value of a lock that this thread holds. The guard's drop releases the lock.
///
/// # Invariants
///
/// This thread holds the lock `state` while the guard lives, and that lock guards `value`.
#[must_use = "a lock is released when its guard is dropped"]
pub struct Guard<'a, T, B: Backend> {
    state: *mut B::State,
    value: &'a UnsafeCell<T>,
    /// The thread that takes a lock must release it.
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
        // SAFETY: The lock is held by the type invariant, so no other thread has a reference. The
        // guard is borrowed.
        unsafe { &*self.value.get() }
    }
}

/// Implemented only for values that may move, because a pinned lock pins its value.
impl<T: Unpin, B: Backend> DerefMut for Guard<'_, T, B> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: The lock is held by the type invariant, so no other thread has a reference. The
        // guard is borrowed mutably.
        unsafe { &mut *self.value.get() }
    }
}

impl<T, B: Backend> Drop for Guard<'_, T, B> {
    fn drop(&mut self) {
        // SAFETY: The lock is held by the type invariant. No code uses the guard after the drop.
        unsafe { B::unlock(self.state) };
    }
}

/// Mutexes: `struct mutex`.
pub mod mutex {
    use super::Backend;
    use crate::bindings;

    /// A sleeping lock. Needs process context, with no spinlock held.
    pub struct MutexBackend;

    // SAFETY: Only one thread at a time holds a `struct mutex`. `mutex_lock()` is an acquire, and
    // `mutex_unlock()` is a release.
    unsafe impl Backend for MutexBackend {
        type State = bindings::mutex;

        unsafe fn lock(state: *mut Self::State) {
            // SAFETY: The lock is initialized by the safety requirements. The module calls this
            // crate in process context.
            unsafe { bindings::shim_mutex_lock(state) };
        }

        unsafe fn unlock(state: *mut Self::State) {
            // SAFETY: The lock is held by the safety requirements.
            unsafe { bindings::shim_mutex_unlock(state) };
        }
    }
}

/// Spinlocks: `spinlock_t`.
pub mod spinlock {
    use super::Backend;
    use crate::bindings;

    /// A lock whose holder does not sleep. Interrupts stay enabled, because no interrupt handler
    /// takes the lock.
    ///
    /// The module only borrows spinlocks that its C code makes.
    pub struct SpinLockBackend;

    // SAFETY: Only one thread at a time holds a `spinlock_t`. `spin_lock()` is an acquire, and
    // `spin_unlock()` is a release.
    unsafe impl Backend for SpinLockBackend {
        type State = bindings::spinlock_t;

        unsafe fn lock(state: *mut Self::State) {
            // SAFETY: The lock is initialized by the safety requirements.
            unsafe { bindings::shim_spin_lock(state) };
        }

        unsafe fn unlock(state: *mut Self::State) {
            // SAFETY: The lock is held by the safety requirements.
            unsafe { bindings::shim_spin_unlock(state) };
        }
    }
}
