// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Memory that may be short.

use core::{
    mem::{self, MaybeUninit},
    ops::{BitOr, Deref, DerefMut},
    pin::Pin,
    ptr::{self, NonNull},
    slice,
};

use crate::{bindings, pin_init::PinInit};

/// There was no memory.
#[derive(Clone, Copy, Debug)]
pub struct AllocError;

/// How to look for memory. Every allocation may sleep.
#[derive(Clone, Copy)]
pub struct Flags {
    /// The kernel logs an allocation that fails.
    warns: bool,
}

/// An allocation that may sleep.
pub const GFP_KERNEL: Flags = Flags { warns: true };

/// An allocation whose failure is not logged.
pub const __GFP_NOWARN: Flags = Flags { warns: false };

impl BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        Flags {
            warns: self.warns && other.warns,
        }
    }
}

/// kmalloc() aligns powers of two to themselves, and everything to this on any 64-bit architecture.
const MIN_ALIGN: usize = 8;

/// Memory for a `T`, uninitialized.
pub(crate) fn place<T>(flags: Flags) -> Result<NonNull<T>, AllocError> {
    const { assert!(mem::size_of::<T>() > 0 && mem::align_of::<T>() <= MIN_ALIGN) };
    // SAFETY: Has no requirements but a context that may sleep.
    NonNull::new(unsafe { bindings::shim_alloc(mem::size_of::<T>(), flags.warns) }.cast()).ok_or(AllocError)
}

/// # Safety
///
/// Was [`place`]'s, and is used no more.
pub(crate) unsafe fn free<T: ?Sized>(place: NonNull<T>) {
    // SAFETY: As promised by the caller.
    unsafe { bindings::shim_free(place.as_ptr().cast()) };
}

/// A value in memory of its own.
///
/// # Invariants
///
/// Owns what it points to.
pub struct KBox<T>(NonNull<T>);

// SAFETY: As its value.
unsafe impl<T: Send> Send for KBox<T> {}
// SAFETY: As its value.
unsafe impl<T: Sync> Sync for KBox<T> {}

impl<T> KBox<T> {
    pub fn new(value: T, flags: Flags) -> Result<Self, AllocError> {
        let place = place::<T>(flags)?;
        // SAFETY: Room for one.
        unsafe { place.write(value) };
        Ok(KBox(place))
    }

    pub fn new_uninit(flags: Flags) -> Result<KBox<MaybeUninit<T>>, AllocError> {
        Ok(KBox(place(flags)?))
    }

    pub fn pin_init(init: impl PinInit<T>, flags: Flags) -> crate::error::Result<Pin<Self>> {
        let place = place::<T>(flags)?;
        // SAFETY: Room for one, which is not moved: it is pinned.
        unsafe {
            init.init(place.as_ptr());
            Ok(Pin::new_unchecked(KBox(place)))
        }
    }

    pub fn into_raw(this: Self) -> *mut T {
        mem::ManuallyDrop::new(this).0.as_ptr()
    }

    /// Frees the memory, and returns the value.
    pub fn into_inner(this: Self) -> T {
        let place = mem::ManuallyDrop::new(this).0;
        // SAFETY: Owned by the type invariant. The value is moved out once, and its memory is used no more.
        unsafe {
            let value = place.read();
            free(place);
            value
        }
    }

    /// # Safety
    ///
    /// The pointer came from [`KBox::into_raw`], and is used no more.
    pub unsafe fn from_raw(raw: *mut T) -> Self {
        // SAFETY: Not NULL, as promised by the caller.
        KBox(unsafe { NonNull::new_unchecked(raw) })
    }
}

impl<T> KBox<MaybeUninit<T>> {
    pub fn write(this: Self, value: T) -> KBox<T> {
        let raw = KBox::into_raw(this).cast::<T>();
        // SAFETY: Room for one.
        unsafe {
            raw.write(value);
            KBox::from_raw(raw)
        }
    }
}

impl<T> Deref for KBox<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: Owned by the type invariant.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for KBox<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: As above.
        unsafe { self.0.as_mut() }
    }
}

impl<T> Drop for KBox<T> {
    fn drop(&mut self) {
        // SAFETY: Owned by the type invariant, and gone with this.
        unsafe {
            ptr::drop_in_place(self.0.as_ptr());
            free(self.0);
        }
    }
}

/// A list that grows; long ones need not be contiguous in physical memory.
///
/// # Invariants
///
/// The first `len` of `room` are values. `start` is dangling while `room` is 0, and owned otherwise.
pub struct KVVec<T> {
    start: NonNull<T>,
    len: usize,
    room: usize,
}

// SAFETY: As its values.
unsafe impl<T: Send> Send for KVVec<T> {}
// SAFETY: As its values.
unsafe impl<T: Sync> Sync for KVVec<T> {}

impl<T> KVVec<T> {
    pub const fn new() -> Self {
        const { assert!(mem::size_of::<T>() > 0 && mem::align_of::<T>() <= MIN_ALIGN) };
        KVVec {
            start: NonNull::dangling(),
            len: 0,
            room: 0,
        }
    }

    pub fn with_capacity(room: usize, flags: Flags) -> Result<Self, AllocError> {
        let mut new = KVVec::new();
        new.reserve(room, flags)?;
        Ok(new)
    }

    /// Returns the number of values for which there is memory.
    pub fn capacity(&self) -> usize {
        self.room
    }

    /// Makes room for so many more.
    pub fn reserve(&mut self, more: usize, _: Flags) -> Result<(), AllocError> {
        let want = self.len.checked_add(more).ok_or(AllocError)?;
        if want <= self.room {
            return Ok(());
        }
        let room = want.max(self.room.saturating_mul(2));
        let bytes = room.checked_mul(mem::size_of::<T>()).ok_or(AllocError)?;
        let bytes = Some(bytes).filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or(AllocError)?;
        // SAFETY: Has no requirements but a context that may sleep.
        let start = NonNull::new(unsafe { bindings::shim_valloc(bytes) }.cast()).ok_or(AllocError)?;
        // SAFETY: Values by the type invariant; the new room is larger.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr(), start.as_ptr(), self.len) };
        self.free();
        (self.start, self.room) = (start, room);
        Ok(())
    }

    fn free(&mut self) {
        if self.room > 0 {
            // SAFETY: Owned by the type invariant.
            unsafe { bindings::shim_vfree(self.start.as_ptr().cast()) };
        }
    }

    /// Gives `value` back where there is no room.
    pub fn push_within_capacity(&mut self, value: T) -> Result<(), T> {
        if self.len == self.room {
            return Err(value);
        }
        // SAFETY: There is room by the type invariant.
        unsafe { self.start.add(self.len).write(value) };
        self.len += 1;
        Ok(())
    }
}

impl<T> Deref for KVVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: Values by the type invariant.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for KVVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: As above.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for KVVec<T> {
    fn drop(&mut self) {
        // SAFETY: Values by the type invariant, and gone with this.
        unsafe { ptr::drop_in_place(&raw mut **self) };
        self.free();
    }
}

impl<T> IntoIterator for KVVec<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter {
            list: mem::ManuallyDrop::new(self),
            next: 0,
        }
    }
}

/// The values of a list, in their order.
///
/// # Invariants
///
/// The values of `list` from `next` on were not given out.
pub struct IntoIter<T> {
    list: mem::ManuallyDrop<KVVec<T>>,
    next: usize,
}

impl<T> Iterator for IntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.next == self.list.len {
            return None;
        }
        // SAFETY: One of the first `len`, and not given out, by the type invariants.
        // INVARIANT: It is now.
        let value = unsafe { self.list.start.add(self.next).read() };
        self.next += 1;
        Some(value)
    }
}

impl<T> Drop for IntoIter<T> {
    fn drop(&mut self) {
        for value in &mut *self {
            drop(value);
        }
        self.list.free();
    }
}
