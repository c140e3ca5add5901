// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Counted references.

use core::{
    marker::PhantomData,
    mem::ManuallyDrop,
    ops::Deref,
    ptr::{
        self,
        NonNull, //
    },
};

use super::atomic::{
    Acquire,
    Atomic,
    Relaxed,
    Release, //
};
use crate::{
    alloc::{
        self,
        Flags, //
    },
    error,
    ffi::c_void,
    pin_init::PinInit,
    types::ForeignOwnable,
};

/// Value of a saturated count: `REFCOUNT_SATURATED`. The value is halfway between `i32::MIN` and 0.
const SATURATED: i32 = i32::MIN / 2;

/// A value and the number of its references.
#[repr(C)]
struct Counted<T: ?Sized> {
    count: Atomic<i32>,
    value: T,
}

/// A counted reference to a value in memory from `kmalloc()`. The value is pinned, and is dropped
/// with its last reference.
///
/// The count behaves like a `refcount_t`: a count that overflows is saturated, and its value is
/// never freed. The kernel's own `Arc` also logs a warning at the overflow.
///
/// # Invariants
///
/// The pointer is a result of [`alloc::place`], and leads to an initialized value. The count
/// includes this reference.
pub struct Arc<T: ?Sized>(NonNull<Counted<T>>, PhantomData<Counted<T>>);

// SAFETY: The receiver shares the value, so `T` must be `Sync`. The receiver may drop the value, so
// `T` must be `Send`. The count is atomic.
unsafe impl<T: ?Sized + Send + Sync> Send for Arc<T> {}
// SAFETY: A thread with a shared `Arc` can clone it, so the requirements are those of `Send`.
unsafe impl<T: ?Sized + Send + Sync> Sync for Arc<T> {}

// A reference may move, because its value stays where it is.
impl<T: ?Sized> Unpin for Arc<T> {}

// The compiler of the host tests has no coercion for custom pointer types.
#[cfg(not(test))]
impl<T: ?Sized + core::marker::Unsize<U>, U: ?Sized> core::ops::CoerceUnsized<Arc<U>> for Arc<T> {}

impl<T> Arc<T> {
    /// Allocates memory and initializes a value there, with a count of one. May sleep.
    ///
    /// Returns `ENOMEM` if there is no memory. `init` does not run in that case.
    pub fn pin_init(init: impl PinInit<T>, flags: Flags) -> error::Result<Self> {
        let place = alloc::place::<Counted<T>>(flags)?;
        let raw = place.as_ptr();
        // SAFETY: `place` is new memory for a `Counted<T>`. The value does not move, because a
        // reference gives out no `&mut T`.
        unsafe {
            (&raw mut (*raw).count).write(Atomic::new(1));
            init.__pinned_init(&raw mut (*raw).value);
        }
        // INVARIANT: `init` has written the value. The count of one stands for the new reference.
        Ok(Arc(place, PhantomData))
    }
}

impl<T: ?Sized> Arc<T> {
    /// Returns the count.
    fn count(&self) -> &Atomic<i32> {
        // SAFETY: The value and its count are alive by the type invariant.
        unsafe { &self.0.as_ref().count }
    }
}

impl<T: ?Sized> Deref for Arc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: The value is alive by the type invariant, and this reference is borrowed.
        unsafe { &self.0.as_ref().value }
    }
}

impl<T: ?Sized> Clone for Arc<T> {
    fn clone(&self) -> Self {
        // Relaxed: this thread has a reference already, and so sees the value.
        let old = self.count().fetch_add(1, Relaxed);
        if old <= 0 || old == i32::MAX {
            self.count().store(SATURATED, Relaxed);
        }
        // INVARIANT: The count includes the new reference, or is saturated.
        Arc(self.0, PhantomData)
    }
}

impl<T: ?Sized> Drop for Arc<T> {
    fn drop(&mut self) {
        // Release: this thread's accesses to the value come before the drop of the value by another
        // thread.
        let old = self.count().fetch_add(-1, Release);
        if old <= 0 {
            self.count().store(SATURATED, Relaxed);
        }
        if old != 1 {
            return;
        }
        // Acquire: the other threads' accesses to the value come before the drop.
        self.count().load(Acquire);
        // SAFETY: The count was one, so this was the only reference, and no other thread can clone
        // it. By the type invariant the value is initialized, and its memory is the result of
        // `place`.
        unsafe {
            ptr::drop_in_place(self.0.as_ptr());
            alloc::free(self.0);
        }
    }
}

// SAFETY: The pointer of a reference is not null.
unsafe impl<T: 'static> ForeignOwnable for Arc<T> {
    type Borrowed<'a> = &'a T;

    fn into_foreign(self) -> *mut c_void {
        ManuallyDrop::new(self).0.as_ptr().cast()
    }

    unsafe fn from_foreign(ptr: *mut c_void) -> Self {
        // SAFETY: By the safety requirements, `ptr` came from `into_foreign`, which never returns
        // null.
        // INVARIANT: The caller gives up the reference that `into_foreign` gave to C.
        Arc(unsafe { NonNull::new_unchecked(ptr.cast()) }, PhantomData)
    }

    unsafe fn borrow<'a>(ptr: *mut c_void) -> &'a T {
        // SAFETY: By the safety requirements, `ptr` came from `into_foreign`, and C holds that
        // reference during `'a`. The value is therefore alive.
        unsafe { &(*ptr.cast::<Counted<T>>()).value }
    }
}
