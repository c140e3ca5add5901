// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Locks as the module's logic takes them: around a closure, and around a static.
//!
//! C headers: [`include/linux/rwsem.h`](srctree/include/linux/rwsem.h),
//! [`include/linux/mutex.h`](srctree/include/linux/mutex.h); C side: [`helpers.c`](helpers.c).
//!
//! Process context alone: ib_core and nvidia.ko call this module nowhere else.

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

/// A lock that C has made.
///
/// # Invariants
///
/// Points to a static that is initialized.
pub(crate) struct StaticLock<B: Backend>(*mut B::State);

// INVARIANT: `helpers.c` initializes all of them where it defines them.
pub(crate) const REGISTRY_LOCK: StaticLock<SpinLockBackend> =
    StaticLock(&raw mut c::peermem_registry_lock);
pub(crate) const HISTORY_LOCK: StaticLock<SpinLockBackend> =
    StaticLock(&raw mut c::peermem_history_lock);
pub(crate) const QUOTA_LOCK: StaticLock<MutexBackend> = StaticLock(&raw mut c::peermem_quota_lock);
pub(crate) const CALLBACKS_LOCK: StaticLock<MutexBackend> =
    StaticLock(&raw mut c::peermem_callbacks_lock);
pub(crate) const BARS_LOCK: StaticLock<MutexBackend> = StaticLock(&raw mut c::peermem_bars_lock);

/// A value for a static, and its lock. `global_lock!` would be one that somebody has to initialize first.
///
/// # Invariants
///
/// `value` is accessed with `lock` held alone.
pub(crate) struct Static<T, B: Backend> {
    lock: StaticLock<B>,
    value: UnsafeCell<T>,
}

/// A value behind a mutex.
pub(crate) type StaticMutex<T> = Static<T, MutexBackend>;

/// A value behind a spinlock. Who has it neither sleeps nor calls anybody.
pub(crate) type StaticSpinLock<T> = Static<T, SpinLockBackend>;

// SAFETY: Whoever has the lock has the value, on whatever thread.
unsafe impl<T: Send, B: Backend> Sync for Static<T, B> {}

impl<T, B: Backend> Static<T, B> {
    /// For one value a lock.
    pub(crate) const fn new(lock: StaticLock<B>, value: T) -> Self {
        Static {
            lock,
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `f` with the lock held. `f` does not come here again.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: Initialized by the type invariant of `StaticLock`, and a static.
        let _guard = unsafe { KernelLock::<(), B>::from_raw(self.lock.0) }.lock();
        // SAFETY: The lock is held, which nobody takes twice: this is the only reference.
        f(unsafe { &mut *self.value.get() })
    }
}

/// A [`Mutex`] for what the persistent mode guards.
#[pin_data]
pub(crate) struct Lock<T> {
    #[pin]
    value: Mutex<T>,
}

impl<T: Unpin> Lock<T> {
    /// A lock around `value`.
    pub(crate) fn new(value: T) -> impl PinInit<Self> {
        // A lock class of its own: it is held across calls to nvidia.ko, a `Monitor` never is.
        pin_init!(Lock {
            value <- new_mutex!(value, "peermem_persistent"),
        })
    }

    /// Runs `f` with the lock held.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.value.lock())
    }
}

/// A [`Mutex`] with a place to wait, for what the revocable mode guards.
#[pin_data]
pub(crate) struct Monitor<T> {
    #[pin]
    value: Mutex<T>,
    #[pin]
    changed: CondVar,
}

impl<T: Unpin> Monitor<T> {
    /// A lock around `value`.
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

    /// Sleeps, with the lock released, for as long as `condition` holds.
    pub(crate) fn wait_while(&self, mut condition: impl FnMut(&mut T) -> bool) {
        let mut guard = self.value.lock();
        while condition(&mut *guard) {
            self.changed.wait(&mut guard);
        }
    }

    /// Makes every thread in [`Monitor::wait_while`] look again.
    pub(crate) fn notify_all(&self) {
        self.changed.notify_all();
    }
}

/// A [`Mutex`] around a `bool`, and a value that it does not guard, in one piece of memory. Another lock class than those above: it is
/// taken inside nvidia.ko's callback.
#[pin_data]
pub(crate) struct EntryLock<T> {
    #[pin]
    value: Mutex<bool>,
    pub(crate) of: T,
}

impl<T> EntryLock<T> {
    /// A lock around `value`, with `of` beside it.
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

/// Runs `f` beside other [`put_rwsem_read`]s, and beside no [`put_rwsem_write`]. Not re-entrant.
pub(crate) fn put_rwsem_read<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: `down_read()` wants a context that may sleep, which every caller of this module is in, and no
    // spinlock of ours is ever held. `helpers.c` initializes the semaphore where it defines it.
    unsafe { bindings::down_read(&raw mut c::peermem_put_rwsem) };
    let result = f();
    // SAFETY: Taken above, by this thread.
    unsafe { bindings::up_read(&raw mut c::peermem_put_rwsem) };
    result
}

/// Runs `f` beside no other [`put_rwsem_read`] or [`put_rwsem_write`]. Not re-entrant.
pub(crate) fn put_rwsem_write<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: As in `put_rwsem_read`.
    unsafe { bindings::down_write(&raw mut c::peermem_put_rwsem) };
    let result = f();
    // SAFETY: Taken above, by this thread.
    unsafe { bindings::up_write(&raw mut c::peermem_put_rwsem) };
    result
}
