// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A list of nodes that lie in other structures: it allocates nothing, and a node leaves it in constant time.
//!
//! `kernel::list` owns its nodes by a counted reference to each, so that no node ends while it is listed. A node here ends
//! with the structure that it lies in, which removes it first.
//!
//! Links and values are accessed through the list, which is borrowed mutably for each change. A list behind a lock
//! therefore needs no lock in its nodes.

use core::{
    cell::UnsafeCell,
    marker::PhantomPinned,
    ptr, //
};

/// A node of a [`NodeList`], with a value.
///
/// # Invariants
///
/// The node is used with one list, and is not moved. It is in that list if and only if `is_linked` is set. It is not in the
/// list when it is dropped. The fields are accessed while the list is borrowed mutably; a caller who is alone with the node
/// also accesses `is_linked` and `value`.
pub(crate) struct Node<T> {
    links: UnsafeCell<Links<T>>,
    is_linked: UnsafeCell<bool>,
    value: UnsafeCell<T>,
    _pin: PhantomPinned,
}

/// The neighbours of a node that is in a list; NULL at the ends.
struct Links<T> {
    prev: *const Node<T>,
    next: *const Node<T>,
}

// SAFETY: By the type invariant one thread at a time accesses the fields, and the value can be sent.
unsafe impl<T: Send> Send for Node<T> {}
// SAFETY: By the type invariant one thread at a time accesses the fields, and the value can be sent.
unsafe impl<T: Send> Sync for Node<T> {}

impl<T> Node<T> {
    /// Makes a node that is in no list.
    ///
    /// # Safety
    ///
    /// The caller uses the node with one list, which changes places with no other list, does not move the node once it was in
    /// the list, and removes it before its drop.
    pub(crate) const unsafe fn new(value: T) -> Self {
        // INVARIANT: By the safety requirements.
        Node {
            links: UnsafeCell::new(Links {
                prev: ptr::null(),
                next: ptr::null(),
            }),
            is_linked: UnsafeCell::new(false),
            value: UnsafeCell::new(value),
            _pin: PhantomPinned,
        }
    }

    /// Returns `true` if the node is in its list, which nobody else can change any more.
    pub(crate) fn is_linked(&mut self) -> bool {
        *self.is_linked.get_mut()
    }
}

/// The list.
///
/// # Invariants
///
/// From `first` on, `next` leads over all nodes to `last`, and `prev` leads back. Both are NULL in an empty list. By the
/// invariant of [`Node`] each of the nodes is alive and stays where it is.
pub(crate) struct NodeList<T> {
    first: *const Node<T>,
    last: *const Node<T>,
}

// SAFETY: A list gives access to its nodes, whose values can be sent.
unsafe impl<T: Send> Send for NodeList<T> {}

impl<T> NodeList<T> {
    /// Makes an empty list.
    pub(crate) const fn new() -> Self {
        NodeList {
            first: ptr::null(),
            last: ptr::null(),
        }
    }

    /// Returns the value of `node`, which is used with this list.
    pub(crate) fn value<'a>(&'a mut self, node: &'a Node<T>) -> &'a mut T {
        // SAFETY: The list is borrowed mutably, and so nobody else accesses the value.
        unsafe { &mut *node.value.get() }
    }

    /// Returns `true` if `node` is in the list.
    fn has(&self, node: &Node<T>) -> bool {
        // SAFETY: Only the list changes it, and only while it is borrowed mutably.
        unsafe { *node.is_linked.get() }
    }

    /// Records whether `node` is in the list.
    fn mark(&mut self, node: &Node<T>, is_linked: bool) {
        // SAFETY: The list is borrowed mutably, and so nobody else accesses it.
        unsafe { *node.is_linked.get() = is_linked };
    }

    /// Adds `node` at the end, unless it is in the list.
    #[inline]
    pub(crate) fn push(&mut self, node: &Node<T>) {
        if !self.has(node) {
            self.insert(node, ptr::null());
        }
    }

    /// Removes `node`, if it is in the list.
    #[inline]
    pub(crate) fn remove(&mut self, node: &Node<T>) {
        if self.has(node) {
            // SAFETY: The list is borrowed mutably, and so nobody else accesses the links.
            let Links { prev, next } = unsafe { &*node.links.get() };
            self.link(*prev, *next);
            // INVARIANT: Neither way leads over `node` any more.
            self.mark(node, false);
        }
    }

    /// Moves `cursor` forward, from its place or, with `anew`, from the beginning, until the next value is one that `stops`.
    /// Returns that value. `cursor` goes to the end where there is none.
    pub(crate) fn seek(
        &mut self,
        cursor: &Node<T>,
        anew: bool,
        stops: impl Fn(&T) -> bool,
    ) -> Option<&T> {
        let mut behind = None;
        if !anew && self.has(cursor) {
            // SAFETY: The list is borrowed mutably, and so nobody else accesses the links.
            behind = Some(unsafe { (*cursor.links.get()).next });
        }
        self.remove(cursor);
        let mut next = behind.unwrap_or(self.first);
        // SAFETY: A node of the list, which is alive by the type invariant.
        while let Some(node) = unsafe { next.as_ref() } {
            if stops(self.value(node)) {
                break;
            }
            // SAFETY: The list is borrowed mutably, and so nobody else accesses the links.
            next = unsafe { (*node.links.get()).next };
        }
        // `next` is not `cursor`, which was removed before the search.
        self.insert(cursor, next);
        // SAFETY: NULL, or a node of the list, which is alive by the type invariant.
        let node = unsafe { next.as_ref() }?;
        Some(self.value(node))
    }

    /// Adds `node`, which is not in the list, before `next`, which is, or at the end if `next` is NULL.
    fn insert(&mut self, node: &Node<T>, next: *const Node<T>) {
        // SAFETY: NULL, or a node of the list, which is alive by the type invariant.
        let prev = match unsafe { next.as_ref() } {
            // SAFETY: The list is borrowed mutably, and so nobody else accesses the links.
            Some(next) => unsafe { (*next.links.get()).prev },
            None => self.last,
        };
        // INVARIANT: Both ways lead over `node` now.
        self.mark(node, true);
        self.link(prev, node);
        self.link(node, next);
    }

    /// Links `prev` to `next`. Both are in the list, or are being added to it. A null pointer stands for the end of the list.
    fn link(&mut self, prev: *const Node<T>, next: *const Node<T>) {
        // SAFETY: NULL, or alive by the type invariant.
        match unsafe { prev.as_ref() } {
            // SAFETY: The list is borrowed mutably, and so nobody else accesses the links.
            Some(prev) => unsafe { (*prev.links.get()).next = next },
            None => self.first = next,
        }
        // SAFETY: NULL, or alive by the type invariant.
        match unsafe { next.as_ref() } {
            // SAFETY: The list is borrowed mutably, and so nobody else accesses the links.
            Some(next) => unsafe { (*next.links.get()).prev = prev },
            None => self.last = prev,
        }
    }
}
