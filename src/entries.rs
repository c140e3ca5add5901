// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The entries of the [`registry`](crate::registry), each a field of its registration, and the places of
//! those who read them.
//!
//! A list in the order of numbers, since new ones are added at its end. A reader has a [`Cursor`] in it, so that a step
//! costs the same however many there are, whatever comes and goes between two of them.
//!
//! `kernel::list` owns what it lists, by a reference to each: none would end while it is listed. An entry here ends
//! with its registration, and takes itself out. Hence links by hand.

use core::{
    cell::UnsafeCell,
    marker::PhantomPinned,
    ptr, //
};

use kernel::{
    prelude::*,
    sync::Arc, //
};

use crate::{
    reason::Reason,
    registry::{
        Registration,
        RegistryStats,
        Transition, //
    },
    sync::{
        StaticSpinLock,
        REGISTRY_LOCK, //
    },
    trace, //
};

/// What is linked; its pointers are NULL at the ends.
struct Node {
    prev: *mut Node,
    next: *mut Node,
    /// `None` in a cursor, and outside the list.
    registration: Option<Registration>,
}

impl Node {
    const fn new() -> Self {
        Node {
            prev: ptr::null_mut(),
            next: ptr::null_mut(),
            registration: None,
        }
    }
}

/// # Invariants
///
/// From `first` on, `next` leads over all nodes to `last`, and `prev` back. All of them are there, and not moved:
/// each takes itself out in its drop. The numbers grow.
struct List {
    first: *mut Node,
    last: *mut Node,
}

// SAFETY: Whoever has the list, has its nodes.
unsafe impl Send for List {}

impl List {
    /// Adds `node` before `next`, or at the end if that is NULL.
    ///
    /// # Safety
    ///
    /// `node` is not in the list, and `next` is; the numbers then grow. `node` is not moved, and there until it is
    /// removed.
    unsafe fn insert(&mut self, node: *mut Node, next: *mut Node) {
        let prev = if next.is_null() {
            self.last
        } else {
            // SAFETY: In the list, and so it is there.
            unsafe { (*next).prev }
        };
        // SAFETY: As promised by the caller, and nobody has a reference to what is in a node.
        unsafe { ((*node).prev, (*node).next) = (prev, next) };
        // INVARIANT: Both ways lead over `node` now.
        // SAFETY: What `node` points to is in the list.
        unsafe { self.link(prev, node) };
        // SAFETY: As above.
        unsafe { self.link(node, next) };
    }

    /// # Safety
    ///
    /// `node` is in the list.
    unsafe fn remove(&mut self, node: *mut Node) {
        // SAFETY: As promised by the caller.
        let (prev, next) = unsafe { ((*node).prev, (*node).next) };
        // INVARIANT: No way leads over `node` any more.
        // SAFETY: Its neighbours are in the list.
        unsafe { self.link(prev, next) };
    }

    /// Has `next` follow on `prev`; NULL are the ends.
    ///
    /// # Safety
    ///
    /// Both are in the list, or to be in it.
    unsafe fn link(&mut self, prev: *mut Node, next: *mut Node) {
        let from = if prev.is_null() {
            &raw mut self.first
        } else {
            // SAFETY: As promised by the caller.
            unsafe { &raw mut (*prev).next }
        };
        let to = if next.is_null() {
            &raw mut self.last
        } else {
            // SAFETY: As promised by the caller.
            unsafe { &raw mut (*next).prev }
        };
        // SAFETY: Parts of `self`, or of nodes that are there.
        unsafe { (*from, *to) = (next, prev) };
    }
}

/// All that the lock guards, but for what is in the nodes.
struct Registry {
    stats: RegistryStats,
    list: List,
}

static REGISTRY: StaticSpinLock<Registry> = StaticSpinLock::new(
    REGISTRY_LOCK,
    Registry {
        stats: RegistryStats::new(),
        list: List {
            first: ptr::null_mut(),
            last: ptr::null_mut(),
        },
    },
);

/// A registration's entry.
///
/// # Invariants
///
/// Lies where it does until it is dropped. The node is accessed with the lock held alone, but for a look at
/// `registration` in the drop; and then, but for a moment, it is in the list if and only if `registration` is not
/// `None`.
pub(crate) struct Entry(UnsafeCell<Node>, PhantomPinned);

// SAFETY: What is in it is plain, and is accessed with the lock held.
unsafe impl Send for Entry {}
// SAFETY: As above.
unsafe impl Sync for Entry {}

impl Entry {
    /// One that is not in the list.
    fn new() -> impl PinInit<Self> {
        // INVARIANT: Who has one has pinned it.
        Entry(UnsafeCell::new(Node::new()), PhantomPinned)
    }

    /// Runs `f` with the registry locked, then traces what it returns with the registry unlocked. `f` calls nobody,
    /// and adds a registration with the highest number, or removes it, or changes it but for the number.
    #[inline]
    pub(crate) fn update(
        &self,
        f: impl FnOnce(&mut RegistryStats, &mut Option<Registration>) -> Option<Transition>,
    ) {
        let transition = REGISTRY.with(|Registry { stats, list }| {
            let node = self.0.get();
            // SAFETY: The lock is held.
            let registration = unsafe { &mut (*node).registration };
            let was = registration.is_some();
            let transition = f(stats, registration);
            match (was, registration.is_some()) {
                // SAFETY: Not in the list by the type invariant, and not moved until the drop, which removes it. Numbers
                // grow.
                (false, true) => unsafe { list.insert(node, ptr::null_mut()) },
                // SAFETY: In the list by the type invariant.
                (true, false) => unsafe { list.remove(node) },
                _ => {}
            }
            transition
        });
        if let Some(transition) = transition {
            trace::life(transition);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // SAFETY: What is in it only [`Entry::update`] changes, and nobody is there any more to call that. The links
        // are others', who may hold the lock.
        if unsafe { (*self.0.get()).registration.is_some() } {
            self.update(RegistryStats::remove);
        }
    }
}

/// A registration: what is fixed of it, what its lock guards, and its entry, in one piece of memory.
///
/// The order of the fields is the order in which they are dropped.
#[pin_data]
pub(crate) struct Registered<T, L> {
    #[pin]
    pub(crate) state: L,
    #[pin]
    pub(crate) entry: Entry,
    pub(crate) of: T,
}

impl<T, L> Registered<T, L> {
    /// Not in the registry yet.
    pub(crate) fn new(of: T, state: impl PinInit<L>) -> Result<Arc<Self>, Reason> {
        let init = pin_init!(Registered {
            state <- state,
            entry <- Entry::new(),
            of,
        });
        Arc::pin_init(init, GFP_KERNEL).map_err(|_| Reason::NoMemory)
    }
}

/// A reader's place in the list.
///
/// # Invariants
///
/// Lies where it does until it is dropped. It is accessed with the lock held alone. If `from` is not `None`, the node
/// is in the list; those before it have lower numbers, and those behind it have that number or higher ones.
pub(crate) struct Cursor(UnsafeCell<Position>, PhantomPinned);

struct Position {
    node: Node,
    from: Option<u64>,
}

// SAFETY: As of `Entry`.
unsafe impl Send for Cursor {}
// SAFETY: As above.
unsafe impl Sync for Cursor {}

impl Cursor {
    /// One that is nowhere yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        let position = Position {
            node: Node::new(),
            from: None,
        };
        // INVARIANT: Who has one has pinned it.
        Cursor(UnsafeCell::new(position), PhantomPinned)
    }

    /// A copy of the first with this number or a higher one. Takes as many steps as there are entries between the
    /// number of the last call and this one; from the beginning, where this one is lower.
    pub(crate) fn find(&self, number: u64) -> Option<Registration> {
        REGISTRY.with(|Registry { list, .. }| {
            let position = self.0.get();
            // SAFETY: The lock is held. No reference to the node: its neighbours have pointers to it.
            let (node, from) = unsafe { (&raw mut (*position).node, &mut (*position).from) };
            let mut next = match from {
                // SAFETY: In the list by the type invariant.
                Some(from) if *from <= number => unsafe { (*node).next },
                _ => list.first,
            };
            // SAFETY: What is in the list is there. This cursor is passed over, as others are.
            while let Some(at) = unsafe { next.as_ref() } {
                let registration = at.registration.as_ref();
                if registration.is_some_and(|registration| registration.number >= number) {
                    break;
                }
                next = at.next;
            }
            if from.is_some() {
                // SAFETY: In the list by the type invariant.
                unsafe { list.remove(node) };
            }
            // INVARIANT: All that was passed over is before it, and has a lower number.
            // SAFETY: Not in the list, and `next` is, or is its end: a cursor never is what was found. Not moved until
            // the drop, which removes it.
            unsafe { list.insert(node, next) };
            *from = Some(number);
            // SAFETY: As above.
            unsafe { next.as_ref() }.and_then(|found| found.registration)
        })
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        let position = self.0.get();
        // No reference to the node, which others change until the lock is held.
        REGISTRY.with(|Registry { list, .. }| {
            // SAFETY: The lock is held.
            if unsafe { (*position).from.is_some() } {
                // SAFETY: In the list by the type invariant.
                unsafe { list.remove(&raw mut (*position).node) };
            }
        });
    }
}

/// Runs `f` on the counters, locked. `f` does not sleep and calls nobody.
pub(crate) fn stats<R>(f: impl FnOnce(&RegistryStats) -> R) -> R {
    REGISTRY.with(|registry| f(&registry.stats))
}
