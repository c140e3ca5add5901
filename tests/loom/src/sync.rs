// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Locks and threads for the fakes: loom's. `tests/host` has the same names.
//!
//! loom runs its threads one at a time on one thread of the host, and switches between them only inside
//! its own primitives. So what merely records (a `Cell`, a `RefCell`) is seen by all threads, adds no
//! interleavings, and panics if it is borrowed across a switch.

pub(crate) use std::cell::{Cell, RefCell};

pub(crate) use loom::cell::UnsafeCell;
pub(crate) use loom::sync::{atomic, Condvar, Mutex, MutexGuard, RwLock};
pub(crate) use loom::thread;

use loom::sync::RwLockWriteGuard;

/// What the neighbours do follows from the model, which runs in a world of its own.
pub(crate) const SCRIPTED: bool = false;

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().expect("no poison")
}
