// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! loom's locks and threads for the fakes. `tests/host` has the same names.
//!
//! loom runs its threads one at a time on one thread of the host, and switches only inside its own
//! primitives. A `Cell` or `RefCell` that only records is therefore visible to all threads and adds
//! no interleavings. A `RefCell` that is borrowed across a switch panics.

pub(crate) use std::cell::{Cell, RefCell};

pub(crate) use loom::cell::UnsafeCell;
pub(crate) use loom::sync::{atomic, Condvar, Mutex, MutexGuard, RwLock};
pub(crate) use loom::thread;

use loom::sync::RwLockWriteGuard;

/// `true` if the tests decide when nvidia.ko and ib_core act. Here loom decides, and `World::run`
/// creates a model's world before the model runs.
pub(crate) const SCRIPTED: bool = false;

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().expect("no poison")
}
