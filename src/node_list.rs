// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A list whose nodes are fields of other structures. The list allocates nothing, and removes a
//! node in constant time.
//!
//! `kernel::list` holds a counted reference to each node, so a listed node is never freed. A node
//! of this list is freed with its structure, which removes the node first.
//!
//! Links and values are accessed through the list, which is borrowed mutably for each change. The
//! nodes of a list behind a lock therefore need no lock of their own.

use core::{
    cell::UnsafeCell,
    marker::PhantomPinned,
    ptr, //
};

/// A node of a [`NodeList`], with a value.
///
/// # Invariants
///
/// The node is used with one list, and does not move. The node is in that list if and only if
/// `is_linked` is set, and is not in the list when it is dropped. The fields are accessed while the
/// list is borrowed mutably. A caller with exclusive access to the node may also access `is_linked`
/// and `value`.
pub(crate) struct Node<T> {
    links: UnsafeCell<Links<T>>,
    is_linked: UnsafeCell<bool>,
    value: UnsafeCell<T>,
    _pin: PhantomPinned,
}

/// The previous and the next node of a node in a list. A null pointer stands for the end of the
/// list.
struct Links<T> {
    prev: *const Node<T>,
    next: *const Node<T>,
}

// SAFETY: By the type invariant, only one thread at a time accesses the fields. The value is
// `Send`.
unsafe impl<T: Send> Send for Node<T> {}
// SAFETY: By the type invariant, only one thread at a time accesses the fields. The value is
// `Send`.
unsafe impl<T: Send> Sync for Node<T> {}

impl<T> Node<T> {
    /// Makes a node that is in no list.
    ///
    /// # Safety
    ///
    /// The caller must use the node with one list only, and must not swap that list with another.
    /// The caller must not move the node after it was in the list, and must remove it before its
    /// drop.
    pub(crate) const unsafe fn new(value: T) -> Self {
        // INVARIANT: The safety requirements ensure the type invariant.
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

    /// Returns `true` if the node is in its list. The caller has exclusive access, so no other
    /// thread can add or remove the node.
    pub(crate) fn is_linked(&mut self) -> bool {
        *self.is_linked.get_mut()
    }
}

/// A doubly linked list.
///
/// # Invariants
///
/// Following `next` from `first` visits all nodes and ends at `last`. Following `prev` visits them
/// in reverse. Both pointers are null in an empty list. By the invariant of [`Node`], each node is
/// alive and does not move.
pub(crate) struct NodeList<T> {
    first: *const Node<T>,
    last: *const Node<T>,
}

// SAFETY: A list gives access to its nodes, whose values are `Send`.
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
        // SAFETY: The list is borrowed mutably, so nobody else accesses the value.
        unsafe { &mut *node.value.get() }
    }

    /// Returns `true` if `node` is in the list.
    fn has(&self, node: &Node<T>) -> bool {
        // SAFETY: `is_linked` changes only while the list is borrowed mutably.
        unsafe { *node.is_linked.get() }
    }

    /// Sets `is_linked` of `node`.
    fn mark(&mut self, node: &Node<T>, is_linked: bool) {
        // SAFETY: The list is borrowed mutably, so nobody else accesses `is_linked`.
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
            // SAFETY: The list is borrowed mutably, so nobody else accesses the links.
            let Links { prev, next } = unsafe { &*node.links.get() };
            self.link(*prev, *next);
            // INVARIANT: Neither `next` nor `prev` leads to `node` any more.
            self.mark(node, false);
        }
    }

    /// Moves `cursor` forward until `stops` returns `true` for the next value, and returns that
    /// value. Starts at the place of `cursor`, or at the beginning if `anew` is set. If there is no
    /// such value, `cursor` goes to the end.
    pub(crate) fn seek(
        &mut self,
        cursor: &Node<T>,
        anew: bool,
        stops: impl Fn(&T) -> bool,
    ) -> Option<&T> {
        let mut behind = None;
        if !anew && self.has(cursor) {
            // SAFETY: The list is borrowed mutably, so nobody else accesses the links.
            behind = Some(unsafe { (*cursor.links.get()).next });
        }
        self.remove(cursor);
        let mut next = behind.unwrap_or(self.first);
        // SAFETY: `next` is null or a node of the list, which is alive by the type invariant.
        while let Some(node) = unsafe { next.as_ref() } {
            if stops(self.value(node)) {
                break;
            }
            // SAFETY: The list is borrowed mutably, so nobody else accesses the links.
            next = unsafe { (*node.links.get()).next };
        }
        // `next` is not `cursor`, which was removed before the search.
        self.insert(cursor, next);
        // SAFETY: `next` is null or a node of the list, which is alive by the type invariant.
        let node = unsafe { next.as_ref() }?;
        Some(self.value(node))
    }

    /// Adds `node`, which is not in the list, before `next`, which is in the list. Adds `node` at
    /// the end if `next` is null.
    fn insert(&mut self, node: &Node<T>, next: *const Node<T>) {
        // SAFETY: `next` is null or a node of the list, which is alive by the type invariant.
        let prev = match unsafe { next.as_ref() } {
            // SAFETY: The list is borrowed mutably, so nobody else accesses the links.
            Some(next) => unsafe { (*next.links.get()).prev },
            None => self.last,
        };
        // INVARIANT: The links below make both `next` and `prev` lead to `node`.
        self.mark(node, true);
        self.link(prev, node);
        self.link(node, next);
    }

    /// Links `prev` to `next`. Both nodes are in the list, or are being added to the list. A null
    /// pointer stands for the end of the list.
    fn link(&mut self, prev: *const Node<T>, next: *const Node<T>) {
        // SAFETY: `prev` is null, or alive by the type invariant.
        match unsafe { prev.as_ref() } {
            // SAFETY: The list is borrowed mutably, so nobody else accesses the links.
            Some(prev) => unsafe { (*prev.links.get()).next = next },
            None => self.first = next,
        }
        // SAFETY: `next` is null, or alive by the type invariant.
        match unsafe { next.as_ref() } {
            // SAFETY: The list is borrowed mutably, so nobody else accesses the links.
            Some(next) => unsafe { (*next.links.get()).prev = prev },
            None => self.last = prev,
        }
    }
}
