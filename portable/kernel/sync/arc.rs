// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Counted references.

use core::{
    marker::{PhantomData, Unsize},
    ops::{CoerceUnsized, Deref, DispatchFromDyn},
    ptr::{self, NonNull},
    sync::atomic::{AtomicI32, Ordering},
};

use crate::{
    alloc::{self, AllocError, Flags},
    error::Result,
    pin_init::PinInit,
};

#[repr(C)]
struct Counted<T: ?Sized> {
    count: AtomicI32,
    value: T,
}

/// A counted reference.
///
/// # Invariants
///
/// Owns one of the counts of what it points to.
pub struct Arc<T: ?Sized>(NonNull<Counted<T>>, PhantomData<Counted<T>>);

// SAFETY: Shares its value, and may be the one that drops it.
unsafe impl<T: ?Sized + Send + Sync> Send for Arc<T> {}
// SAFETY: As above.
unsafe impl<T: ?Sized + Send + Sync> Sync for Arc<T> {}

// What it points to stays where it is.
impl<T: ?Sized> Unpin for Arc<T> {}

impl<T: ?Sized + Unsize<U>, U: ?Sized> CoerceUnsized<Arc<U>> for Arc<T> {}
impl<T: ?Sized + Unsize<U>, U: ?Sized> DispatchFromDyn<Arc<U>> for Arc<T> {}

impl<T> Arc<T> {
    pub fn new(value: T, flags: Flags) -> core::result::Result<Self, AllocError> {
        let place = alloc::place::<Counted<T>>(flags)?;
        let count = AtomicI32::new(1);
        // SAFETY: Room for one.
        unsafe { place.write(Counted { count, value }) };
        Ok(Arc(place, PhantomData))
    }

    /// It is not moved: nobody has more than a shared reference to it.
    pub fn pin_init(init: impl PinInit<T>, flags: Flags) -> Result<Self> {
        let place = alloc::place::<Counted<T>>(flags)?;
        // SAFETY: Room for one.
        unsafe {
            let raw = place.as_ptr();
            (&raw mut (*raw).count).write(AtomicI32::new(1));
            init.init(&raw mut (*raw).value);
        }
        Ok(Arc(place, PhantomData))
    }
}

impl<T: ?Sized> Deref for Arc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: Alive by the type invariant.
        unsafe { &self.0.as_ref().value }
    }
}

impl<T: ?Sized> Clone for Arc<T> {
    fn clone(&self) -> Self {
        // SAFETY: Alive by the type invariant.
        let count = unsafe { &self.0.as_ref().count };
        // As refcount_t: one that is too high stays so, and what it counts is never freed.
        if count.fetch_add(1, Ordering::Relaxed) <= 0 {
            count.store(i32::MIN / 2, Ordering::Relaxed);
        }
        Arc(self.0, PhantomData)
    }
}

impl<T: ?Sized> Drop for Arc<T> {
    fn drop(&mut self) {
        // SAFETY: Alive by the type invariant.
        if unsafe { &self.0.as_ref().count }.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: This was the last.
            unsafe {
                ptr::drop_in_place(self.0.as_ptr());
                alloc::free(self.0);
            }
        }
    }
}
