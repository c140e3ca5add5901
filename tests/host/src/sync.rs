// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Locks and threads of `std` for the fakes. `tests/loom` has the same names.

use std::sync::{PoisonError, RwLockReadGuard, RwLockWriteGuard};

pub(crate) use std::sync::{atomic, Condvar, Mutex, MutexGuard, RwLock};
pub(crate) use std::thread;

/// `true` if the tests decide when nvidia.ko and ib_core act. Here the tests decide, and the first
/// call of `world()` in a test creates the test's world.
pub(crate) const SCRIPTED: bool = true;

/// A `std::cell::Cell` for several threads.
#[derive(Default)]
pub(crate) struct Cell<T>(Mutex<T>);

impl<T> Cell<T> {
    pub(crate) fn new(value: T) -> Self {
        Cell(Mutex::new(value))
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self) -> T
    where
        T: Copy,
    {
        *self.lock()
    }

    pub(crate) fn replace(&self, value: T) -> T {
        std::mem::replace(&mut *self.lock(), value)
    }

    pub(crate) fn set(&self, value: T) {
        drop(self.replace(value));
    }

    pub(crate) fn take(&self) -> T
    where
        T: Default,
    {
        self.replace(T::default())
    }
}

/// A `std::cell::RefCell` for several threads. This type waits where the original panics.
#[derive(Default)]
pub(crate) struct RefCell<T>(RwLock<T>);

impl<T> RefCell<T> {
    pub(crate) fn new(value: T) -> Self {
        RefCell(RwLock::new(value))
    }

    pub(crate) fn borrow(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn borrow_mut(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn replace(&self, value: T) -> T {
        std::mem::replace(&mut *self.borrow_mut(), value)
    }

    pub(crate) fn take(&self) -> T
    where
        T: Default,
    {
        self.replace(T::default())
    }
}

/// Detects uses that overlap in time. loom's version detects uses that no lock orders.
pub(crate) struct UnsafeCell<T>(RwLock<T>);

impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        UnsafeCell(RwLock::new(value))
    }

    pub(crate) fn with(&self, f: impl FnOnce(&T)) {
        f(&self.0.try_read().expect("nobody writes"));
    }

    pub(crate) fn with_mut(&self, f: impl FnOnce(&mut T)) {
        f(&mut self.0.try_write().expect("nobody reads or writes"));
    }
}

/// Takes the lock for writing. Panics if another thread holds the lock.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.try_write()
        .expect("put_rwsem is not taken where it may have to wait")
}
