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
//!   beside each other ([`env::gate_read`]), look and put are alone ([`env::gate_write`]). The
//!   gate lies outside the API lock. Against pins that another module makes for the same process there
//!   is no such help.
//! - The provider looks for a pin to put among those of the calling process. From another process it
//!   does nothing and says that it did. Then the slot, and all that it holds, stays until the callback.
//! - Nor does it take every pin from the process that made it: see below. Where that is in doubt it is
//!   asked first, and what it would not find is not put, and stays likewise.
//! - Inside a callback, where OFED 4.9 releases, the provider refuses to put; and the gate may be held
//!   by a thread that waits for the API lock. The pins of the region that are still alive then keep
//!   their slots, too, until their own callbacks.
//!
//! # Which puts count as done
//!
//! A put says 0 whether it found the pin or not. The provider looks for it in the objects in whose list the
//! calling process is. It was in that list when the pin was made, and leaves it with the client of the
//! resource manager that it was put there for, under the API lock. Two cases:
//!
//! - The object is that client's own, as a process has it that allocates for itself. It goes with its
//!   client, after all that was in it was called back. A pin that is alive is found.
//! - The object is another process's, which let this one in (256 have room; MPS). The pin outlives the
//!   client, no put finds it any more, and its callback comes when the other process frees.
//!
//! The provider does not say which it is. So a put counts as done, and the slot goes:
//!
//! - while its process runs, for it keeps its client as long as it uses the GPU;
//! - while it exits, which takes its descriptors in any order, if the provider has just pinned the first
//!   page for it once more ([`Held::ask`]).
//!
//! The first is taken on trust, since to ask costs a get and a put for each pin. It is wrong for a process that
//! closes the GPU and goes on: by hand, by `execve()`, in a thread with descriptors of its own. A callback that
//! comes for a pin that was put shows it to be wrong here: it finds no slot and does no harm, but to a module that
//! was unloaded in between. From then on the provider is asked before every put.
//!
//! The second is right but for two coincidences: the client goes between the question and the put, or the address
//! is other memory's by then, of which the answer tells. Where the provider refuses for another reason, a GPU that
//! is lost or want of memory, nothing is known, and the slot stays.
//!
//! Uses `core` and [`env`] alone.

use core::marker::PhantomData;

use super::{
    env::{
        self,
        ModuleHold,
        PageTable,
        Process,
        Shared,
        SlotLock,
        Slots,
        StaticMutex,
        Thread,
        DIRECTORY_LOCK, //
    },
    extents::{
        PageSize,
        Span, //
    },
    refusal::{
        Kept,
        Refusal,
        EINVAL, //
    }, //
};

/// Whom the provider's callback is for.
pub(crate) trait Revoke: Send + Sync + 'static {
    /// The pinned memory goes away with the return of this call. Called with the provider's API lock
    /// held, from the thread that frees the memory, or from one of the kernel's.
    fn revoke(&self);

    /// A pin of it was dropped, and its memory stays pinned until it is freed: [`Revoke::revoke`] is still to
    /// come for it, or has just come.
    fn kept(&self);
}

/// What a callback finds by its number.
pub(crate) struct Slot {
    /// Cleared by the callback, before it does anything else.
    alive: SlotLock,
    /// Whom the callback is for.
    region: Shared<dyn Revoke>,
    /// The callback may come after everything else of the registration is gone.
    _hold: ModuleHold,
}

/// All slots that a callback may come for.
#[derive(Default)]
pub(crate) struct Directory {
    slots: Slots<Shared<Slot>>,
    /// The last number given. Numbers are not used twice: 64 bits do not come round.
    last: usize,
    /// The thread on which a callback is under way. The provider makes one callback at a time.
    callback: Option<Thread>,
    /// A callback has come for a pin that was put. Never cleared.
    late: bool,
}

impl Directory {
    fn insert(&mut self, slot: Shared<Slot>) -> Result<usize, Refusal> {
        self.last = self.last.wrapping_add(1);
        self.slots.insert(self.last, slot)?;
        Ok(self.last)
    }
}

static DIRECTORY: StaticMutex<Option<Directory>> = StaticMutex::new(DIRECTORY_LOCK, None);

/// Runs `f` with the directory locked.
fn directory<R>(f: impl FnOnce(&mut Directory) -> R) -> R {
    DIRECTORY.with(|directory| f(directory.get_or_insert_with(Directory::default)))
}

fn remove(number: usize) {
    let slot = directory(|directory| directory.slots.remove(number));
    // The last reference to a region may go here: not under the lock.
    drop(slot);
}

/// A page table that is alive for `'a`.
///
/// # Invariants
///
/// Made in [`Held::read`] alone, from what [`env::get_pages`] gave. During `'a` [`freed`] does not
/// return for the number that `get_pages` was called with, and the table is not put.
pub(crate) struct Alive<'a>(PageTable, PhantomData<&'a mut bool>);

impl Alive<'_> {
    /// The provider's name for the table, which outlives it.
    pub(crate) fn table(&self) -> PageTable {
        self.0
    }
}

/// A pin, and what its callback finds. It stays when this goes.
struct Pin {
    number: usize,
    slot: Shared<Slot>,
    table: PageTable,
    span: Span,
}

impl Pin {
    /// Pins `span` in the calling process. Takes the API lock.
    fn new(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Refusal> {
        let slot = env::share(Slot {
            alive: SlotLock::new(true)?,
            region,
            _hold: ModuleHold::try_new().ok_or(Refusal::Unloading)?,
        })?;
        let number = directory(|directory| directory.insert(slot.clone()))?;
        let table = env::gate_read(|| env::get_pages::<Freed>(&span, number))
            // No callback comes.
            .inspect_err(|_| remove(number))?
            // What the callback looks for stays.
            .ok_or(Refusal::Pin(0))?;
        Ok(Pin {
            number,
            slot,
            table,
            span,
        })
    }

    fn alive(&self) -> bool {
        self.slot.alive.with(|alive| *alive)
    }

    /// Puts it, and takes its slot out of the directory; or says why both stay.
    fn put(&self) -> Result<(), Kept> {
        // Each try looks again; between tries the gate is open.
        let look_and_put = || match self.alive() {
            true => env::put_pages(&self.span, self.table),
            false => 0,
        };
        match env::retry(|| env::gate_write(look_and_put)) {
            // Found and put, or waited for the callback: either way none will come.
            0 => {
                remove(self.number);
                Ok(())
            }
            code => Err(Kept::Failed(code)),
        }
    }

    fn kept(&self, why: Kept) {
        self.slot.region.kept();
        env::kept(&self.span, why);
    }
}

/// Memory that is pinned until this is dropped, or until it is freed.
pub(crate) struct Held {
    pin: Pin,
    /// The process that the provider knows as the owner.
    owner: Process,
}

impl Held {
    /// Pins `span`. Takes the API lock. `region` may be revoked before this returns.
    pub(crate) fn new(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Refusal> {
        Ok(Held {
            // From here on the drop unpins.
            pin: Pin::new(span, region)?,
            owner: env::process(),
        })
    }

    /// Runs `f` on the page table, unless the memory is gone. A callback waits for the end of `f`,
    /// which must not call the provider.
    pub(crate) fn read<R>(
        &self,
        f: impl FnOnce(Alive<'_>) -> Result<R, Refusal>,
    ) -> Result<R, Refusal> {
        self.pin.slot.alive.with(|alive| {
            if !*alive {
                return Err(Refusal::Revoked);
            }
            // INVARIANT: `freed` clears `alive` before it returns: it has not been called, or waits
            // for the lock held here. Only the drop puts.
            f(Alive(self.pin.table, PhantomData))
        })
    }

    /// Puts the pin, unless the provider would not find it.
    fn put(&self) -> Result<(), Kept> {
        let this = Thread::current();
        let (callback, late) = directory(|directory| (directory.callback, directory.late));
        if callback == Some(this) {
            return Err(Kept::InCallback);
        }
        if env::process() != self.owner {
            return Err(Kept::OtherProcess);
        }
        if late || env::is_exiting() {
            // Once the memory is gone there is nothing to put, and nothing to keep.
            self.ask().or_else(|why| match self.pin.alive() {
                true => Err(why),
                false => Ok(()),
            })?;
        }
        self.pin.put()
    }

    /// Asks the provider whether it would find the pin, that is, whether it pins the first page once more for
    /// the calling process. That page may be other memory's by now, so its pin has a slot of its own.
    fn ask(&self) -> Result<(), Kept> {
        let failed = |refusal: Refusal| match refusal {
            Refusal::Pin(EINVAL) => Kept::Unlisted,
            other => Kept::Failed(other.errno()),
        };
        let start = self.pin.span.start();
        let page = Span::covering(start, 1, PageSize::KIB_64, u64::MAX);
        let page = page.map_err(|_| Kept::Failed(EINVAL))?;
        match Pin::new(page, self.pin.slot.region.clone()) {
            Ok(pin) => {
                if let Err(why) = pin.put() {
                    pin.kept(why);
                }
                Ok(())
            }
            // Pinned, and it stays.
            Err(Refusal::Pin(0)) => Ok(()),
            Err(refusal) => Err(failed(refusal)),
        }
    }
}

impl Drop for Held {
    /// Unpins, unless the callback has come, which removes its number itself. Takes the API lock.
    fn drop(&mut self) {
        if self.pin.alive() {
            if let Err(why) = self.put() {
                self.pin.kept(why);
            }
        }
    }
}

/// What the provider calls.
struct Freed;

impl env::Callback for Freed {
    fn freed(number: usize) {
        freed(number);
    }
}

/// The provider frees the memory of the pin with that number. To be called with its API lock held.
pub(crate) fn freed(number: usize) {
    let found = directory(|directory| {
        let Some(slot) = directory.slots.get(number).cloned() else {
            let given = (1..=directory.last).contains(&number);
            directory.late |= given;
            return Err(given);
        };
        directory.callback = Some(Thread::current());
        Ok(slot)
    });
    let slot = match found {
        Ok(slot) => slot,
        Err(true) => return env::late_callback(),
        Err(false) => return env::stray_callback(),
    };
    slot.alive.with(|alive| *alive = false);
    slot.region.revoke();
    directory(|directory| directory.callback = None);
    remove(number);
}
