// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The entries of the [`registry`](crate::registry), each a field of its registration, and the places of those who read
//! them.
//!
//! The list is in the order of numbers, since new entries are added at its end. A reader has a [`Cursor`] in it, so that a
//! step costs the same however many entries there are, whatever comes and goes between two steps.

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

/// The registry and its list, behind one lock. A cursor is a node without a registration.
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

/// A registration's entry. It is in the list while it has a [`Registration`].
pub(crate) struct Entry(Node<Option<Registration>>);

impl Entry {
    /// Makes an entry that is not in the list.
    fn new() -> impl PinInit<Self> {
        // SAFETY: There is one list. The entry is pinned, and its drop removes it.
        Entry(unsafe { Node::new(None) })
    }

    /// Runs `f` with the registry locked, then traces what it returns with the registry unlocked. `f` calls nobody, and adds
    /// a registration with the highest number, or removes it, or changes it but for the number.
    #[inline]
    pub(crate) fn update(
        &self,
        f: impl FnOnce(&mut Registry, &mut Option<Registration>) -> Option<Transition>,
    ) {
        let traced = REGISTRY.with(|Locked { registry, list }| {
            let slot = list.value(&self.0);
            // Only looks at the tracepoints.
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
        // Nobody else can add or remove it any more.
        if self.0.is_linked() {
            self.update(Registry::remove);
        }
    }
}

/// A registration: its constant part, the state that its lock guards, and its entry, in one piece of memory.
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

/// A reader's place in the list, for one thread at a time.
pub(crate) struct Cursor {
    node: Node<Option<Registration>>,
    /// The entries before the cursor have lower numbers than this one.
    from: Cell<u64>,
}

impl Cursor {
    /// Makes a cursor that has no place yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        Cursor {
            // SAFETY: There is one list. The cursor is pinned, and its drop removes it.
            node: unsafe { Node::new(None) },
            from: Cell::new(0),
        }
    }

    /// Returns a copy of the first registration with this number or a higher one. Takes as many steps as there are entries
    /// between the number of the last call and this one, or from the beginning, if this number is lower.
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

/// Runs `f` on the counters, locked. `f` does not sleep and calls nobody.
pub(crate) fn registry<R>(f: impl FnOnce(&Registry) -> R) -> R {
    REGISTRY.with(|locked| f(&locked.registry))
}
