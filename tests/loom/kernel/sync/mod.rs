// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! `portable/kernel/sync`, with loom's atomics.

use std::cell::UnsafeCell;

use crate::bindings;

#[path = "../../../../portable/kernel/sync/arc.rs"]
mod arc;
pub mod atomic;
#[path = "../../../../portable/kernel/sync/condvar.rs"]
mod condvar;
#[path = "../../../../portable/kernel/sync/lock.rs"]
pub mod lock;
#[path = "../../../../portable/kernel/sync/set_once.rs"]
mod set_once;

pub use arc::Arc;
pub use condvar::CondVar;
pub use set_once::SetOnce;

pub type Mutex<T> = lock::Lock<T, lock::mutex::MutexBackend>;

/// Memory for a C structure.
pub struct Room<const N: usize>(UnsafeCell<[u64; N]>);

impl<const N: usize> Room<N> {
    pub const fn new() -> Self {
        Room(UnsafeCell::new([0; N]))
    }

    pub const fn get(&self) -> *mut [u64; N] {
        self.0.get()
    }
}

/// Stand-in for a lock class. Nothing reads it.
pub struct LockClassKey;

impl LockClassKey {
    pub fn as_ptr(&'static self) -> *mut bindings::lock_class_key {
        std::ptr::null_mut()
    }
}
