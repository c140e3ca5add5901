// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Boxes and vectors whose allocations return errors instead of panicking.
//!
//! C header: `include/linux/slab.h`. All allocations may sleep: they need process context, with no
//! spinlock held.

use core::{
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ops::{
        BitOr,
        Deref,
        DerefMut, //
    },
    pin::Pin,
    ptr::{
        self,
        NonNull, //
    },
    slice,
};

use crate::{
    bindings,
    error,
    pin_init::PinInit, //
};

/// Error of an allocation that found no memory.
#[derive(Clone, Copy, Debug)]
pub struct AllocError;

/// Flags of an allocation: `gfp_t`.
#[derive(Clone, Copy)]
pub struct Flags {
    /// `true` if the kernel logs a failed allocation.
    warns: bool,
}

/// Flags of an ordinary allocation, which may sleep and reclaim memory.
pub const GFP_KERNEL: Flags = Flags { warns: true };

/// Flag for [`GFP_KERNEL`] that keeps the kernel from logging a failed allocation.
pub const __GFP_NOWARN: Flags = Flags { warns: false };

impl BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        Flags {
            warns: self.warns && other.warns,
        }
    }
}

/// Minimum alignment of the results of `kmalloc()` and `kvmalloc()`, in bytes. `layout.c` asserts
/// it.
const MIN_ALIGN: usize = 8;

/// Allocates uninitialized memory for a `T` with `kmalloc()`. May sleep.
///
/// A `T` with a larger alignment than `MIN_ALIGN` does not compile. For a zero-sized type,
/// `kmalloc()` returns `ZERO_SIZE_PTR`, which is aligned, not null, and accepted by `kfree()`.
pub(crate) fn place<T>(flags: Flags) -> Result<NonNull<T>, AllocError> {
    const { assert!(align_of::<T>() <= MIN_ALIGN) };
    // SAFETY: `kmalloc()` accepts any size. The module calls this crate in process context, with no
    // spinlock held.
    let memory = unsafe { bindings::shim_alloc(size_of::<T>(), flags.warns) };
    NonNull::new(memory.cast()).ok_or(AllocError)
}

/// Frees memory with `kfree()`. Does not drop the value.
///
/// # Safety
///
/// `place` must be a result of [`place`], and no code may use the memory again.
pub(crate) unsafe fn free<T: ?Sized>(place: NonNull<T>) {
    // SAFETY: By the safety requirements, this is the result of a `kmalloc()` that was not freed
    // yet.
    unsafe { bindings::shim_free(place.as_ptr().cast()) };
}

/// A value in its own memory from `kmalloc()`.
///
/// # Invariants
///
/// The pointer is a result of [`place`]. The box owns that memory and the value in it.
pub struct KBox<T: ?Sized>(NonNull<T>);

// SAFETY: A box owns its value, so sending the box sends the value.
unsafe impl<T: ?Sized + Send> Send for KBox<T> {}
// SAFETY: A shared box only gives out shared references to its value.
unsafe impl<T: ?Sized + Sync> Sync for KBox<T> {}

impl<T> KBox<T> {
    /// Allocates memory and moves `value` into it. May sleep. Drops `value` on an error.
    pub fn new(value: T, flags: Flags) -> Result<Self, AllocError> {
        Ok(KBox::write(KBox::new_uninit(flags)?, value))
    }

    /// Allocates uninitialized memory for a `T`. May sleep.
    pub fn new_uninit(flags: Flags) -> Result<KBox<MaybeUninit<T>>, AllocError> {
        // INVARIANT: The memory is new, and any contents are a valid `MaybeUninit`.
        Ok(KBox(place(flags)?))
    }

    /// Allocates memory and initializes a pinned value there. May sleep.
    ///
    /// Returns `ENOMEM` if there is no memory. `init` does not run in that case.
    pub fn pin_init(init: impl PinInit<T>, flags: Flags) -> error::Result<Pin<Self>> {
        let place = place::<T>(flags)?;
        // SAFETY: `place` is new memory for a `T`. The box is pinned below, so the value stays
        // there until it is dropped.
        unsafe { init.__pinned_init(place.as_ptr()) };
        // INVARIANT: `init` has written the value.
        let this = KBox(place);
        // SAFETY: The box owns its value. `Pin` gives out no `&mut T` unless `T` is `Unpin`.
        Ok(unsafe { Pin::new_unchecked(this) })
    }

    /// Returns the pointer to the value. The caller becomes the owner of the value and its memory.
    pub fn into_raw(this: Self) -> *mut T {
        ManuallyDrop::new(this).0.as_ptr()
    }

    /// Turns a pointer back into a box.
    ///
    /// # Safety
    ///
    /// `raw` must come from [`KBox::into_raw`], and no code may use it again.
    pub unsafe fn from_raw(raw: *mut T) -> Self {
        // SAFETY: By the safety requirements, `raw` came from `into_raw`, which never returns null.
        // INVARIANT: The caller gives up the ownership that `into_raw` passed to it.
        KBox(unsafe { NonNull::new_unchecked(raw) })
    }

    /// Returns the value and frees its memory.
    pub fn into_inner(this: Self) -> T {
        let place = ManuallyDrop::new(this).0;
        // SAFETY: By the type invariant, `place` holds a value and is a result of `place()`. `this`
        // is not dropped, so the value is moved out once, and the memory is freed once.
        unsafe {
            let value = place.read();
            free(place);
            value
        }
    }
}

impl<T> KBox<MaybeUninit<T>> {
    /// Moves `value` into the memory.
    pub fn write(mut this: Self, value: T) -> KBox<T> {
        MaybeUninit::write(&mut this, value);
        let raw = KBox::into_raw(this);
        // SAFETY: `raw` came from `into_raw`. `MaybeUninit<T>` has the layout of `T`, and the line
        // above initialized the value.
        unsafe { KBox::from_raw(raw.cast()) }
    }
}

impl<T: ?Sized> Deref for KBox<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: The box owns a value by the type invariant, and is borrowed.
        unsafe { self.0.as_ref() }
    }
}

impl<T: ?Sized> DerefMut for KBox<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: The box owns a value by the type invariant, and is borrowed mutably.
        unsafe { self.0.as_mut() }
    }
}

impl<T: ?Sized> Drop for KBox<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant, the box owns the value and its memory. No code uses the
        // box after the drop.
        unsafe {
            ptr::drop_in_place(self.0.as_ptr());
            free(self.0);
        }
    }
}

/// A vector in memory from `kvmalloc()`, which need not be physically contiguous.
///
/// # Invariants
///
/// - `len <= capacity`, and the first `len` elements at `start` are values that this vector owns.
/// - If `capacity` is 0, `start` is dangling. Otherwise `start` is the result of a `kvmalloc()` of
///   `capacity` elements, and this vector owns that memory.
pub struct KVVec<T> {
    start: NonNull<T>,
    pub(crate) len: usize,
    capacity: usize,
}

// SAFETY: A vector owns its values, so sending the vector sends the values.
unsafe impl<T: Send> Send for KVVec<T> {}
// SAFETY: A shared vector only gives out shared references to its values.
unsafe impl<T: Sync> Sync for KVVec<T> {}

impl<T> KVVec<T> {
    /// Returns an empty vector without allocating. A zero-sized `T`, or a `T` with a larger
    /// alignment than `MIN_ALIGN`, does not compile.
    pub const fn new() -> Self {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= MIN_ALIGN) };
        // INVARIANT: There are no values and no memory.
        KVVec {
            start: NonNull::dangling(),
            len: 0,
            capacity: 0,
        }
    }

    /// Returns an empty vector with memory for at least `capacity` values. May sleep.
    pub fn with_capacity(capacity: usize, flags: Flags) -> Result<Self, AllocError> {
        let mut new = KVVec::new();
        new.reserve(capacity, flags)?;
        Ok(new)
    }

    /// Returns the number of values that fit into the memory.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes room for at least `additional` more values. May sleep.
    ///
    /// Moves the values if the memory was too small. In that case the capacity at least doubles. On
    /// an error the vector is unchanged.
    pub fn reserve(&mut self, additional: usize, flags: Flags) -> Result<(), AllocError> {
        let needed = self.len.checked_add(additional).ok_or(AllocError)?;
        if needed <= self.capacity {
            return Ok(());
        }
        let capacity = needed.max(self.capacity.saturating_mul(2));
        let bytes = capacity
            .checked_mul(size_of::<T>())
            // Rust forbids objects of more than `isize::MAX` bytes.
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or(AllocError)?;
        // SAFETY: `kvmalloc()` accepts any size. The module calls this crate in process context,
        // with no spinlock held.
        let memory = unsafe { bindings::shim_valloc(bytes, flags.warns) };
        let start = NonNull::new(memory.cast::<T>()).ok_or(AllocError)?;
        // SAFETY: By the type invariant, the first `len` elements are initialized. The new memory
        // has room for more. The values move to the new memory. Only the old memory is freed below.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr(), start.as_ptr(), self.len) };
        // SAFETY: `start` and `capacity` are overwritten next.
        unsafe { self.free() };
        // INVARIANT: The first `len` elements are the values, and the memory was allocated for
        // `capacity`.
        self.start = start;
        self.capacity = capacity;
        Ok(())
    }

    /// Frees the memory without dropping the values.
    ///
    /// # Safety
    ///
    /// No code may use `start` and `capacity` again.
    unsafe fn free(&mut self) {
        if self.capacity > 0 {
            // SAFETY: By the type invariant, `start` is the result of a `kvmalloc()`. By the safety
            // requirements, this memory is not freed twice.
            unsafe { bindings::shim_vfree(self.start.as_ptr().cast()) };
        }
    }

    /// Appends `value` without allocating. Returns `value` as the error if there is no room.
    pub fn push_within_capacity(&mut self, value: T) -> Result<(), T> {
        if self.len == self.capacity {
            return Err(value);
        }
        // SAFETY: By the type invariant, there is memory for `capacity` elements, and `len` is
        // smaller.
        unsafe { self.start.add(self.len).write(value) };
        // INVARIANT: The element at `len` is a value now. `len` was smaller than `capacity`, so the
        // sum cannot overflow.
        self.len += 1;
        Ok(())
    }
}

impl<T> Deref for KVVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: The first `len` elements are values by the type invariant, and the vector is
        // borrowed. `start` is aligned and not null, even if it is dangling.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for KVVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: The first `len` elements are values by the type invariant, and the vector is
        // borrowed mutably. `start` is aligned and not null, even if it is dangling.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for KVVec<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant, the vector owns its values and its memory. No code uses
        // the vector after the drop.
        unsafe {
            ptr::drop_in_place(&raw mut **self);
            self.free();
        }
    }
}

impl<T> IntoIterator for KVVec<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        // INVARIANT: All values are in the vector.
        IntoIter {
            vector: ManuallyDrop::new(self),
            next: 0,
        }
    }
}

/// An iterator over the values of a [`KVVec`], in their order.
///
/// # Invariants
///
/// `next <= vector.len`. The values of `vector` before `next` were moved out. The values from
/// `next` on are still in `vector`.
pub struct IntoIter<T> {
    vector: ManuallyDrop<KVVec<T>>,
    next: usize,
}

impl<T> Iterator for IntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.next == self.vector.len {
            return None;
        }
        // SAFETY: `next` is smaller than `len`, so this element is a value that was not moved out.
        let value = unsafe { self.vector.start.add(self.next).read() };
        // INVARIANT: The value was moved out.
        self.next += 1;
        Some(value)
    }
}

impl<T> Drop for IntoIter<T> {
    fn drop(&mut self) {
        for value in &mut *self {
            drop(value);
        }
        // SAFETY: All values were moved out or dropped. The vector is not dropped, and is not used
        // any more.
        unsafe { self.vector.free() };
    }
}
