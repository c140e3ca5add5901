// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Collections that return an error when an allocation fails.

use core::ops::{
    Deref,
    DerefMut, //
};

use kernel::{
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNodeReservation, //
    }, //
};

use crate::reason::Reason;

/// A list that usually has one element, but can become long. A single element needs no allocation.
pub(crate) enum SmallVec<T> {
    Inline(Option<T>),
    Heap(KVVec<T>),
}

impl<T> Default for SmallVec<T> {
    fn default() -> Self {
        SmallVec::Inline(None)
    }
}

impl<T> Deref for SmallVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            SmallVec::Inline(one) => one.as_slice(),
            SmallVec::Heap(all) => all,
        }
    }
}

impl<T> DerefMut for SmallVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            SmallVec::Inline(one) => one.as_mut_slice(),
            SmallVec::Heap(all) => all,
        }
    }
}

impl<T> SmallVec<T> {
    /// Appends the value that `make` returns. Reserves the memory before it calls `make`.
    pub(crate) fn push_with(
        &mut self,
        make: impl FnOnce() -> Result<T, Reason>,
    ) -> Result<(), Reason> {
        if let SmallVec::Inline(one @ Some(_)) = self {
            let mut all = KVVec::with_capacity(2, GFP_KERNEL).map_err(|_| Reason::NoMemory)?;
            if let Some(first) = one.take() {
                let _ = all.push_within_capacity(first);
            }
            *self = SmallVec::Heap(all);
        }
        match self {
            SmallVec::Inline(one) => *one = Some(make()?),
            SmallVec::Heap(all) => {
                all.reserve(1, GFP_KERNEL).map_err(|_| Reason::NoMemory)?;
                let _ = all.push_within_capacity(make()?);
            }
        }
        Ok(())
    }

    /// Appends `value`.
    pub(crate) fn push(&mut self, value: T) -> Result<(), Reason> {
        self.push_with(|| Ok(value))
    }
}

/// A map from numbers to values. Adding a value in the memory of an [`IdSlot`] allocates nothing.
pub(crate) type IdMap<T> = RBTree<usize, T>;

/// Memory for one value of an [`IdMap`].
pub(crate) type IdSlot<T> = RBTreeNodeReservation<usize, T>;
