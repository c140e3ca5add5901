// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Collections that say so when memory is short.

use core::ops::{
    Deref,
    DerefMut, //
};

use kernel::{
    prelude::*,
    rbtree::RBTree, //
};

use crate::refusal::Refusal;

/// A list that may become long, and mostly has one element, which then needs no memory of its own.
pub(crate) enum List<T> {
    Short(Option<T>),
    Long(KVVec<T>),
}

impl<T> List<T> {
    /// An empty one.
    pub(crate) const fn new() -> Self {
        List::Short(None)
    }
}

impl<T> Default for List<T> {
    fn default() -> Self {
        List::new()
    }
}

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            List::Short(one) => one.as_slice(),
            List::Long(all) => all,
        }
    }
}

impl<T> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            List::Short(one) => one.as_mut_slice(),
            List::Long(all) => all,
        }
    }
}

impl<T> List<T> {
    /// Appends `value`.
    pub(crate) fn push(&mut self, value: T) -> Result<(), Refusal> {
        match self {
            List::Short(None) => *self = List::Short(Some(value)),
            List::Short(one) => {
                let mut all = KVVec::with_capacity(2, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
                // Room was made for both.
                if let Some(first) = one.take() {
                    let _ = all.push_within_capacity(first);
                }
                let _ = all.push_within_capacity(value);
                *self = List::Long(all);
            }
            List::Long(all) => all.push(value, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?,
        }
        Ok(())
    }
}

/// Values by their numbers.
pub(crate) struct Slots<T>(RBTree<usize, T>);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Slots(RBTree::new())
    }
}

impl<T> Slots<T> {
    /// Adds `value`, whose number is new.
    pub(crate) fn insert(&mut self, number: usize, value: T) -> Result<(), Refusal> {
        self.0
            .try_create_and_insert(number, value, GFP_KERNEL)
            .map(drop)
            .map_err(|_| Refusal::NoMemory)
    }

    /// That with the number.
    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        self.0.get(&number)
    }

    /// Removes that with the number.
    pub(crate) fn remove(&mut self, number: usize) -> Option<T> {
        self.0.remove(&number)
    }
}
