// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The list of [`registry`](crate::registry) entries, and the cursors of its readers. Each entry is
//! a field of its registration.
//!
//! The list is sorted by number, because new entries are added at its end. A reader has a
//! [`Cursor`] in the list. A step of the reader therefore takes the same time for any number of
//! entries, even if entries come and go between two steps.

use core::cell::Cell;

use kernel::{
    prelude::*,
    sync::Arc, //
};

use crate::{
    node_list::{
        Node,
        NodeList, //
    },
    reason::Reason,
    registry::{
        Registration,
        Registry,
        Transition, //
    },
    sync::{
        StaticSpinLock,
        REGISTRY_LOCK, //
    },
    trace, //
};

/// The registry and its list, protected by one lock. A cursor is a node without a registration.
struct Locked {
    registry: Registry,
    list: NodeList<Option<Registration>>,
}

static REGISTRY: StaticSpinLock<Locked> = StaticSpinLock::new(
    REGISTRY_LOCK,
    Locked {
        registry: Registry::new(),
        list: NodeList::new(),
    },
);

/// A registration's entry. The entry is in the list while it has a [`Registration`].
pub(crate) struct Entry(Node<Option<Registration>>);

impl Entry {
    /// Makes an entry that is not in the list.
    fn new() -> impl PinInit<Self> {
        // SAFETY: There is only one list. The entry is pinned, and its drop removes it.
        Entry(unsafe { Node::new(None) })
    }

    /// Runs `f` with the registry locked, and traces the returned transition after unlocking. `f`
    /// must not call other parts of the module. `f` may add a registration with a new highest
    /// number, remove the registration, or change any of its fields except the number.
    #[inline]
    pub(crate) fn update(
        &self,
        f: impl FnOnce(&mut Registry, &mut Option<Registration>) -> Option<Transition>,
    ) {
        let traced = REGISTRY.with(|Locked { registry, list }| {
            let slot = list.value(&self.0);
            // `is_enabled` only reads the state of the tracepoints, so it may run under the
            // spinlock.
            let transition = f(registry, slot).filter(|_| trace::is_enabled());
            let copy = transition.map(|transition| (transition, *slot));
            match slot.is_some() {
                true => list.push(&self.0),
                false => list.remove(&self.0),
            }
            copy
        });
        if let Some((transition, registration)) = traced {
            trace::life(transition, registration);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // No other thread can add or remove the entry any more.
        if self.0.is_linked() {
            self.update(Registry::remove);
        }
    }
}

/// A registration: its constant part, its state under a lock, and its entry, in one allocation.
///
/// The fields are dropped in the order of their declaration.
#[pin_data]
pub(crate) struct Registered<T, L> {
    #[pin]
    pub(crate) state: L,
    #[pin]
    pub(crate) entry: Entry,
    pub(crate) of: T,
}

impl<T, L> Registered<T, L> {
    /// Makes a registration that is not in the registry yet.
    pub(crate) fn new(of: T, state: impl PinInit<L>) -> Result<Arc<Self>, Reason> {
        let init = pin_init!(Registered {
            state <- state,
            entry <- Entry::new(),
            of,
        });
        Arc::pin_init(init, GFP_KERNEL).map_err(|_| Reason::NoMemory)
    }
}

/// A reader's place in the list, used by one thread at a time.
pub(crate) struct Cursor {
    node: Node<Option<Registration>>,
    /// Number from which the last search began. All entries before the cursor have lower numbers.
    from: Cell<u64>,
}

impl Cursor {
    /// Makes a cursor that is not in the list yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        Cursor {
            // SAFETY: There is only one list. The cursor is pinned, and its drop removes it.
            node: unsafe { Node::new(None) },
            from: Cell::new(0),
        }
    }

    /// Returns a copy of the first registration whose number is at least `number`. Steps over the
    /// entries from the number of the previous call to `number`. If `number` is lower than the
    /// previous call's number, the search starts at the beginning.
    pub(crate) fn find(&self, number: u64) -> Option<Registration> {
        let anew = number < self.from.replace(number);
        let is_found = |slot: &Option<Registration>| slot.is_some_and(|at| at.number >= number);
        REGISTRY.with(|locked| *locked.list.seek(&self.node, anew, is_found)?)
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        REGISTRY.with(|locked| locked.list.remove(&self.node));
    }
}

/// Runs `f` on the counters with the registry locked. `f` must not sleep or call other parts of the
/// module.
pub(crate) fn registry<R>(f: impl FnOnce(&Registry) -> R) -> R {
    REGISTRY.with(|locked| f(&locked.registry))
}
