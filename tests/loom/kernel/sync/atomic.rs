// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The names of `portable/kernel/sync/atomic.rs`, on atomics of loom.

use std::sync::OnceLock;

use loom::sync::atomic::{AtomicI32, AtomicU32, Ordering};

pub trait Order {
    const ORDER: Ordering;
}

pub struct Acquire;
pub struct Relaxed;
pub struct Release;

impl Order for Acquire {
    const ORDER: Ordering = Ordering::Acquire;
}
impl Order for Relaxed {
    const ORDER: Ordering = Ordering::Relaxed;
}
impl Order for Release {
    const ORDER: Ordering = Ordering::Release;
}

pub trait AtomicType: Copy {
    type Atomic;

    fn atomic(value: Self) -> Self::Atomic;
}

/// An atomic that can be created in a constant. The inner loom atomic is created at the first
/// access.
pub struct Atomic<T: AtomicType>(T, OnceLock<T::Atomic>);

macro_rules! atomic {
    ($type:ty, $atomic:ty) => {
        impl AtomicType for $type {
            type Atomic = $atomic;

            fn atomic(value: Self) -> $atomic {
                <$atomic>::new(value)
            }
        }

        impl Atomic<$type> {
            pub fn load<O: Order>(&self, _: O) -> $type {
                self.get().load(O::ORDER)
            }

            pub fn store<O: Order>(&self, value: $type, _: O) {
                self.get().store(value, O::ORDER);
            }

            pub fn fetch_add<O: Order>(&self, value: $type, _: O) -> $type {
                self.get().fetch_add(value, O::ORDER)
            }

            pub fn cmpxchg<O: Order>(&self, old: $type, new: $type, _: O) -> Result<$type, $type> {
                self.get()
                    .compare_exchange(old, new, O::ORDER, Ordering::Relaxed)
            }
        }
    };
}

atomic!(i32, AtomicI32);
atomic!(u32, AtomicU32);

impl<T: AtomicType> Atomic<T> {
    pub const fn new(value: T) -> Self {
        Atomic(value, OnceLock::new())
    }

    fn get(&self) -> &T::Atomic {
        self.1.get_or_init(|| T::atomic(self.0))
    }
}
