// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The locks that the module's logic uses: functions that run a closure with a lock held, and locks
//! that protect a static.
//!
//! C headers: [`include/linux/rwsem.h`](srctree/include/linux/rwsem.h),
//! [`include/linux/mutex.h`](srctree/include/linux/mutex.h); C side: [`helpers.c`](helpers.c).
//!
//! Everything in this file may be used only in process context. ib_core and nvidia.ko call this
//! module in no other context.

use core::cell::UnsafeCell;

use kernel::{
    bindings,
    prelude::*,
    sync::{
        lock::{
            mutex::MutexBackend,
            spinlock::SpinLockBackend,
            Backend,
            Lock as KernelLock, //
        },
        new_condvar,
        new_mutex,
        Arc,
        CondVar,
        Mutex, //
    }, //
};

use crate::{
    c,
    reason::Reason, //
};

/// A lock that C code defines.
///
/// # Invariants
///
/// The pointer is that of an initialized static.
pub(crate) struct StaticLock<B: Backend>(*mut B::State);

// INVARIANT: `helpers.c` defines all of these locks with static initializers.
pub(crate) const REGISTRY_LOCK: StaticLock<SpinLockBackend> =
    StaticLock(&raw mut c::peermem_registry_lock);
pub(crate) const HISTORY_LOCK: StaticLock<SpinLockBackend> =
    StaticLock(&raw mut c::peermem_history_lock);
pub(crate) const QUOTA_LOCK: StaticLock<MutexBackend> = StaticLock(&raw mut c::peermem_quota_lock);
pub(crate) const CALLBACKS_LOCK: StaticLock<MutexBackend> =
    StaticLock(&raw mut c::peermem_callbacks_lock);
pub(crate) const BARS_LOCK: StaticLock<MutexBackend> = StaticLock(&raw mut c::peermem_bars_lock);

/// A static value and its lock. A lock of `global_lock!` would need initialization at run time.
///
/// # Invariants
///
/// `value` is accessed only with `lock` held.
pub(crate) struct Static<T, B: Backend> {
    lock: StaticLock<B>,
    value: UnsafeCell<T>,
}

/// A static value protected by a mutex.
pub(crate) type StaticMutex<T> = Static<T, MutexBackend>;

/// A static value protected by a spinlock. The holder must not sleep or call other parts of the
/// module.
pub(crate) type StaticSpinLock<T> = Static<T, SpinLockBackend>;

// SAFETY: The lock lets one thread at a time access the value, which is `Send`.
unsafe impl<T: Send, B: Backend> Sync for Static<T, B> {}

impl<T, B: Backend> Static<T, B> {
    /// Makes a static. Each value needs its own lock.
    pub(crate) const fn new(lock: StaticLock<B>, value: T) -> Self {
        Static {
            lock,
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `f` with the lock held. `f` must not take the same lock.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: The lock is an initialized static by the type invariant of `StaticLock`.
        let _guard = unsafe { KernelLock::<(), B>::from_raw(self.lock.0) }.lock();
        // SAFETY: The lock is held and not re-entrant, so this is the only reference.
        f(unsafe { &mut *self.value.get() })
    }
}

/// A [`Mutex`] for the state of the persistent mode.
#[pin_data]
pub(crate) struct Lock<T> {
    #[pin]
    value: Mutex<T>,
}

impl<T: Unpin> Lock<T> {
    /// Makes a lock around `value`.
    pub(crate) fn new(value: T) -> impl PinInit<Self> {
        // This mutex has its own lock class, because it is held across calls to nvidia.ko, unlike
        // the mutex of a `Monitor`.
        pin_init!(Lock {
            value <- new_mutex!(value, "peermem_persistent"),
        })
    }

    /// Runs `f` with the lock held.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.value.lock())
    }
}

/// A [`Mutex`] with a condition variable, for the state of the revocable mode.
#[pin_data]
pub(crate) struct Monitor<T> {
    #[pin]
    value: Mutex<T>,
    #[pin]
    changed: CondVar,
}

impl<T: Unpin> Monitor<T> {
    /// Makes a lock around `value`.
    pub(crate) fn new(value: T) -> impl PinInit<Self> {
        pin_init!(Monitor {
            value <- new_mutex!(value, "peermem_revocable"),
            changed <- new_condvar!("peermem_revocable"),
        })
    }

    /// Runs `f` with the lock held.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.value.lock())
    }

    /// Sleeps with the lock released while `condition` is true.
    pub(crate) fn wait_while(&self, mut condition: impl FnMut(&mut T) -> bool) {
        let mut guard = self.value.lock();
        while condition(&mut *guard) {
            self.changed.wait(&mut guard);
        }
    }

    /// Makes every thread in [`Monitor::wait_while`] check its condition again.
    pub(crate) fn notify_all(&self) {
        self.changed.notify_all();
    }
}

/// A [`Mutex`] around a `bool`, and an unprotected value, in one allocation. This mutex has its own
/// lock class, because nvidia.ko's callback takes it.
#[pin_data]
pub(crate) struct EntryLock<T> {
    #[pin]
    value: Mutex<bool>,
    pub(crate) of: T,
}

impl<T> EntryLock<T> {
    /// Makes a lock around `value`, with `of` beside it.
    pub(crate) fn new(value: bool, of: T) -> Result<Arc<Self>, Reason> {
        let init = pin_init!(EntryLock {
            value <- new_mutex!(value, "peermem_callback_entry"),
            of,
        });
        Arc::pin_init(init, GFP_KERNEL).map_err(|_| Reason::NoMemory)
    }

    /// Runs `f` with the lock held.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut bool) -> R) -> R {
        f(&mut self.value.lock())
    }
}

/// Runs `f` with `put_rwsem` held for reading: concurrent with other [`put_rwsem_read`]s, but not
/// with [`put_rwsem_write`]. Not re-entrant.
pub(crate) fn put_rwsem_read<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: `down_read()` needs a context that may sleep. All callers are in process context, and
    // this module holds no spinlock here. `helpers.c` initializes the semaphore statically.
    unsafe { bindings::down_read(&raw mut c::peermem_put_rwsem) };
    let result = f();
    // SAFETY: This thread took the semaphore above.
    unsafe { bindings::up_read(&raw mut c::peermem_put_rwsem) };
    result
}

/// Runs `f` with `put_rwsem` held for writing: not concurrent with any other [`put_rwsem_read`] or
/// [`put_rwsem_write`]. Not re-entrant.
pub(crate) fn put_rwsem_write<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: The argument in `put_rwsem_read` applies here, too.
    unsafe { bindings::down_write(&raw mut c::peermem_put_rwsem) };
    let result = f();
    // SAFETY: This thread took the semaphore above.
    unsafe { bindings::up_write(&raw mut c::peermem_put_rwsem) };
    result
}
