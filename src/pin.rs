// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A pin whose memory may be freed first: between its release and the provider's callback.
//!
//! ```text
//! Held::new    a slot with a number, then the provider's get
//! Held::read   the page table, while it is known to live
//! drop(Held)   the provider's put, unless the memory is gone
//! freed        the provider's callback, with the number of the slot
//! ```
//!
//! # Locks
//!
//! ```text
//! the gate > provider's API lock > ib_core's mapping_lock > the region's lock
//!                                > a slot's lock
//!                                > the directory's lock
//! ```
//!
//! The callback comes with the API lock held. So the locks of a slot and of the directory are held
//! across no call that takes another; and the gate is never taken on the callback's own thread.
//!
//! # Rules, and what fails without them
//!
//! - What the provider holds of ours is a number, never a pointer: [`freed`] looks it up under a lock,
//!   and holds a reference while it works. A callback can come long after the drop of its pin, when
//!   the provider did not unpin.
//! - The page table is read only where it is known to live: in [`Held::read`], with the slot locked and
//!   alive. The callback waits for that lock before it returns, and the table dies with its return.
//!   Later the table is no more than a key.
//! - A pin whose callback has come is never put: its table's address may belong to another pin by now.
//!   Between the look and the put no new pin of ours can be made, of either flavour: pins are made
//!   beside each other ([`Provider::gate_read`]), look and put are alone ([`Provider::gate_write`]). The
//!   gate lies outside the API lock. Against pins that another module makes for the same process there
//!   is no such help.
//! - The provider looks for a pin to put among those of the calling process. From another process it
//!   does nothing and says that it did. Then the slot, and all that it holds, stays until the callback.
//! - Inside a callback, where OFED 4.9 releases, the provider refuses to put; and the gate may be held
//!   by a thread that waits for the API lock. The pins of the region that are still alive then keep
//!   their slots, too, until their own callbacks.
//!
//! Uses `core` alone: see [`region`](super::region).

use core::marker::PhantomData;
use core::ops::Deref;

use super::extents::Span;
use super::refusal::Refusal;
use super::region::Lock;
use super::revocable::Revoke;

/// The provider, and what else surrounds its pins.
pub(crate) trait Provider: Sized + 'static {
    /// A sleeping lock.
    type Lock: Lock<bool>;
    /// A counted reference.
    type Shared<T: Send + Sync + 'static>: Deref<Target = T> + Clone + Send + Sync;
    /// Slots by their numbers.
    type Slots: Slots<Self::Shared<Slot<Self>>>;
    /// A reference to whom a callback is for.
    type Region: Deref<Target: Revoke> + Send + Sync;
    /// What must not go while a callback may come.
    type Hold: Send + Sync;
    /// The provider's name for a pin. It comes round again.
    type Table: Copy + Send + Sync;
    /// What tells one process from another.
    type Process: Copy + Eq + Send + Sync;
    /// What tells one thread from another.
    type Thread: Copy + Eq + Send;

    /// Moves `value` behind a counted reference.
    fn share<T: Send + Sync + 'static>(value: T) -> Result<Self::Shared<T>, Refusal>;

    /// Runs `f` with the directory locked.
    fn directory<R>(f: impl FnOnce(&mut Directory<Self>) -> R) -> Result<R, Refusal>;

    /// Runs `f` beside other [`Provider::gate_read`]s, and beside no [`Provider::gate_write`].
    fn gate_read<R>(f: impl FnOnce() -> R) -> R;

    /// Runs `f` beside no other [`Provider::gate_read`] or [`Provider::gate_write`].
    fn gate_write<R>(f: impl FnOnce() -> R) -> R;

    /// Pins `span` in the calling process. Takes the API lock. From then on, and even before the
    /// return, [`freed`] may be called with `number`, at most once, and the table dies with the return
    /// of that call. `None`: pinned, but there is nothing to put it by.
    fn get(span: &Span, number: usize) -> Result<Option<Self::Table>, Refusal>;

    /// Unpins, if `table` is a pin of the calling process. Does not look into the table. Takes the API
    /// lock. 0 if there will be no callback, or the pin is another process's.
    fn put(span: &Span, table: Self::Table) -> i32;

    /// Calls `put` until it returns anything but -ENOMEM, or for long enough.
    fn retry(put: impl FnMut() -> i32) -> i32;

    /// The calling process.
    fn process() -> Self::Process;

    /// The calling thread.
    fn thread() -> Self::Thread;

    /// Tells that the memory stays pinned until it is freed.
    fn kept(span: &Span, why: Kept);

    /// Tells of a callback for nothing.
    fn stray();
}

/// Why a pin was not put.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kept {
    /// Its registration was released by a process that the provider does not take it from.
    OtherProcess,
    /// Its registration was released inside the callback of another of its pins.
    InCallback,
    /// The provider's code.
    Failed(i32),
}

/// References to slots, by their numbers.
pub(crate) trait Slots<S>: Default {
    /// Adds `slot`, whose number is new.
    fn insert(&mut self, number: usize, slot: S) -> Result<(), Refusal>;

    /// The slot with that number.
    fn get(&self, number: usize) -> Option<&S>;

    /// Removes the slot with that number.
    fn remove(&mut self, number: usize) -> Option<S>;
}

/// What a callback finds by its number.
pub(crate) struct Slot<P: Provider> {
    /// Cleared by the callback, before it does anything else.
    alive: P::Lock,
    region: P::Region,
    /// The callback may come after everything else of the registration is gone.
    _hold: P::Hold,
}

/// All slots that a callback may come for.
pub(crate) struct Directory<P: Provider> {
    slots: P::Slots,
    /// The last number given. Numbers are not used twice: 64 bits do not come round.
    last: usize,
    /// The thread on which a callback is under way. The provider makes one callback at a time.
    callback: Option<P::Thread>,
}

impl<P: Provider> Default for Directory<P> {
    fn default() -> Self {
        Directory {
            slots: P::Slots::default(),
            last: 0,
            callback: None,
        }
    }
}

impl<P: Provider> Directory<P> {
    fn insert(&mut self, slot: P::Shared<Slot<P>>) -> Result<usize, Refusal> {
        self.last = self.last.wrapping_add(1);
        self.slots.insert(self.last, slot)?;
        Ok(self.last)
    }
}

fn remove<P: Provider>(number: usize) {
    let slot = P::directory(|directory| directory.slots.remove(number));
    // The last reference to a region may go here: not under the lock.
    drop(slot);
}

/// A page table that is alive for `'a`.
///
/// # Invariants
///
/// Made in [`Held::read`] alone, from what [`Provider::get`] gave. During `'a` [`freed`] does not
/// return for the number that `get` was called with, and the table is not put.
pub(crate) struct Alive<'a, T>(T, PhantomData<&'a mut bool>);

impl<T: Copy> Alive<'_, T> {
    /// The provider's name for the table, which outlives it.
    pub(crate) fn table(&self) -> T {
        self.0
    }
}

/// Memory that is pinned until this is dropped, or until it is freed.
pub(crate) struct Held<P: Provider> {
    number: usize,
    slot: P::Shared<Slot<P>>,
    table: P::Table,
    span: Span,
    /// The process that the provider knows as the owner.
    owner: P::Process,
}

impl<P: Provider> Held<P> {
    /// Pins `span`. Takes the API lock. `region` may be revoked before this returns; `hold` is kept for
    /// as long as a callback may come.
    pub(crate) fn new(span: Span, region: P::Region, hold: P::Hold) -> Result<Self, Refusal> {
        let slot = P::share(Slot {
            alive: P::Lock::new(true)?,
            region,
            _hold: hold,
        })?;
        let number = P::directory(|directory| directory.insert(slot.clone()))??;
        let table = P::gate_read(|| P::get(&span, number))
            // No callback comes.
            .inspect_err(|_| remove::<P>(number))?
            // What the callback looks for stays.
            .ok_or(Refusal::Pin(0))?;
        // From here on the drop unpins.
        Ok(Held {
            number,
            slot,
            table,
            span,
            owner: P::process(),
        })
    }

    /// Runs `f` on the page table, unless the memory is gone. A callback waits for the end of `f`,
    /// which must not call the provider.
    pub(crate) fn read<R>(
        &self,
        f: impl FnOnce(Alive<'_, P::Table>) -> Result<R, Refusal>,
    ) -> Result<R, Refusal> {
        self.slot.alive.with(|alive| {
            if !*alive {
                return Err(Refusal::Revoked);
            }
            // INVARIANT: `freed` clears `alive` before it returns: it has not been called, or waits
            // for the lock held here. Only the drop puts.
            f(Alive(self.table, PhantomData))
        })
    }

    fn alive(&self) -> bool {
        self.slot.alive.with(|alive| *alive)
    }

    /// Puts the pin, and takes its slot out of the directory; or says why both stay.
    fn put(&self) -> Result<(), Kept> {
        let this = P::thread();
        if P::directory(|directory| directory.callback) == Ok(Some(this)) {
            return Err(Kept::InCallback);
        }
        if P::process() != self.owner {
            return Err(Kept::OtherProcess);
        }
        // Each try looks again; between tries the gate is open.
        let look_and_put = || match self.alive() {
            true => P::put(&self.span, self.table),
            false => 0,
        };
        match P::retry(|| P::gate_write(look_and_put)) {
            // Found and put, or waited for the callback: either way none will come.
            0 => {
                remove::<P>(self.number);
                Ok(())
            }
            code => Err(Kept::Failed(code)),
        }
    }
}

impl<P: Provider> Drop for Held<P> {
    /// Unpins, unless the callback has come, which removes its number itself. Takes the API lock.
    fn drop(&mut self) {
        if self.alive() {
            if let Err(why) = self.put() {
                self.slot.region.kept();
                P::kept(&self.span, why);
            }
        }
    }
}

/// The provider frees the memory of the pin with that number. To be called with its API lock held.
pub(crate) fn freed<P: Provider>(number: usize) {
    let found = P::directory(|directory| {
        let slot = directory.slots.get(number).cloned()?;
        directory.callback = Some(P::thread());
        Some(slot)
    });
    // A pin that was put has no callback, and any other has its slot.
    let Ok(Some(slot)) = found else {
        return P::stray();
    };
    slot.alive.with(|alive| *alive = false);
    slot.region.revoke();
    let _ = P::directory(|directory| directory.callback = None);
    remove::<P>(number);
}
