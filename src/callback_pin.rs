// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A pin whose memory may be freed first: between its release and the provider's callback.
//!
//! ```text
//! CallbackPin::new    an entry with a number, then the provider's get
//! CallbackPin::read   the page table, while it is known to be alive
//! drop(CallbackPin)   the provider's put, unless the memory is gone
//! free_callback       the provider's callback, with the number of the entry
//! ```
//!
//! # Locks
//!
//! ```text
//! put_rwsem > provider's API lock > ib_core's mapping_lock > the region's lock
//!                                > an entry's lock
//!                                > the table's lock
//! ```
//!
//! The callback comes with the API lock held. So the locks of an entry and of the table are held
//! across no call that takes another; and `put_rwsem` is never taken on the callback's own thread.
//!
//! nvidia.ko also holds the locks of the GPUs during a callback. An allocation may wait for memory to be reclaimed. If a
//! lock that a callback takes were held meanwhile, every GPU of the machine would wait, too. So none of them is held
//! across an allocation: neither the table's nor an entry's, neither a region's nor that of the users' quota. Memory is
//! allocated first. What was true before is checked again under the lock.
//!
//! # Rules, and what fails without them
//!
//! - What the provider holds of ours is a number, never a pointer: [`free_callback`] looks it up under a
//!   lock, and holds a reference while it works. A callback can come long after the drop of its pin, when
//!   the provider did not unpin.
//! - The page table is read only where it is known to be alive: in [`CallbackPin::read`], with the entry
//!   locked and alive. The callback waits for that lock before it returns, and the table dies with its
//!   return. Later the table is no more than a key.
//! - A pin whose callback has come is never put: its table's address may belong to another pin by now.
//!   Between the check and the put no new pin of ours can be made, of either mode: pins are made
//!   beside each other ([`env::put_rwsem_read`]), check and put are alone ([`env::put_rwsem_write`]). This
//!   semaphore lies outside the API lock. Against pins that another module makes for the same process there
//!   is no such help.
//! - The provider looks for a pin to put among those of the calling process. From another process it
//!   does nothing and says that it did. Then the entry, and all that it holds, stays until the callback.
//! - Nor does it take every pin from the process that made it: see below. Where that is in doubt it is
//!   asked first, and what it would not find is not put, and stays likewise.
//! - Inside a callback, where OFED 4.9 releases, the provider refuses to put; and `put_rwsem` may be held
//!   by a thread that waits for the API lock. The pins of the region that are still alive then keep
//!   their entries, too, until their own callbacks.
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
//! The provider does not say which it is. So a put counts as done, and the entry goes:
//!
//! - while its process runs, for it keeps its client as long as it uses the GPU;
//! - while it exits, which takes its descriptors in any order, if the provider has just pinned the first
//!   page for it once more ([`CallbackPin::ask`]).
//!
//! The first is taken on trust, since to ask costs a get and a put for each pin. It is wrong for a process that
//! closes the GPU and goes on: by hand, by `execve()`, in a thread with descriptors of its own. A callback that
//! comes for a pin that was put shows it to be wrong here: it finds no entry and does no harm, but to a module that
//! was unloaded in between. From then on the provider is asked before every put.
//!
//! The second is right but for two coincidences: the client goes between the question and the put, or the address
//! is other memory's by then, of which the answer tells. Where the provider refuses for another reason, a GPU that
//! is lost or want of memory, nothing is known, and the entry stays.
//!
//! Uses `core` and [`env`] alone.

use core::marker::PhantomData;

use super::{
    env::{
        self,
        EntryLock,
        IdMap,
        IdSlot,
        PageTable,
        Process,
        Shared,
        StaticMutex,
        Thread,
        CALLBACKS_LOCK, //
    },
    ranges::{
        PageSize,
        Span, //
    },
    reason::{
        PutError,
        Reason,
        EINVAL, //
    }, //
};

/// Receiver of the provider's callback. Keeps the module loaded, since the callback may come after everything else of the
/// registration is gone.
pub(crate) trait Revoke: Send + Sync + 'static {
    /// The pinned memory goes away with the return of this call. Called with the provider's API lock
    /// held, from the thread that frees the memory, or from one of the kernel's.
    fn revoke(&self);

    /// A pin of it was dropped, and its memory stays pinned until it is freed: [`Revoke::revoke`] is still to
    /// come for it, or has just come.
    fn orphaned(&self);
}

/// Entry that a callback finds by its number: the region that it is for, and a `bool`, which is `true` while the memory is
/// alive. The callback clears it before it does anything else.
pub(crate) type CallbackEntry = EntryLock<Shared<dyn Revoke>>;

/// All entries that a callback may come for, by number.
#[derive(Default)]
pub(crate) struct CallbackTable {
    entries: IdMap<Shared<CallbackEntry>>,
    /// The last number given. Numbers are not used twice: 64 bits do not come round.
    last: usize,
    /// The thread on which a callback is under way. The provider makes one callback at a time.
    callback: Option<Thread>,
    /// A callback has come for a pin that was put. Never cleared.
    late: bool,
}

impl CallbackTable {
    fn insert(
        &mut self,
        slot: IdSlot<Shared<CallbackEntry>>,
        entry: Shared<CallbackEntry>,
    ) -> usize {
        self.last = self.last.wrapping_add(1);
        self.entries.insert(slot, self.last, entry);
        self.last
    }
}

static CALLBACKS: StaticMutex<Option<CallbackTable>> = StaticMutex::new(CALLBACKS_LOCK, None);

/// Runs `f` with the table locked.
fn callbacks<R>(f: impl FnOnce(&mut CallbackTable) -> R) -> R {
    CALLBACKS.with(|callbacks| f(callbacks.get_or_insert_with(CallbackTable::default)))
}

fn remove(number: usize) {
    let entry = callbacks(|callbacks| callbacks.entries.remove(number));
    // The last reference to a region may go here: not under the lock.
    drop(entry);
}

/// A page table that is alive for `'a`.
///
/// # Invariants
///
/// Made in [`CallbackPin::read`] alone, from what [`env::get_pages`] gave. During `'a` [`free_callback`] does not
/// return for the number that `get_pages` was called with, and the table is not put.
pub(crate) struct TableGuard<'a>(PageTable, PhantomData<&'a mut bool>);

impl TableGuard<'_> {
    /// The provider's name for the table, which outlives it.
    pub(crate) fn table(&self) -> PageTable {
        self.0
    }
}

/// A pin, and what its callback finds. It stays when this goes.
struct Pinned {
    number: usize,
    entry: Shared<CallbackEntry>,
    table: PageTable,
    span: Span,
}

impl Pinned {
    /// Pins `span` in the calling process. Takes the API lock.
    fn new(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Reason> {
        let entry = CallbackEntry::new(true, region)?;
        let slot = IdSlot::new()?;
        let number = callbacks(|callbacks| callbacks.insert(slot, entry.clone()));
        let table = env::put_rwsem_read(|| env::get_pages::<OnFree>(&span, number))
            // No callback comes.
            .inspect_err(|_| remove(number))?
            // What the callback looks for stays.
            .ok_or(Reason::Pin(0))?;
        Ok(Pinned {
            number,
            entry,
            table,
            span,
        })
    }

    fn alive(&self) -> bool {
        self.entry.with(|alive| *alive)
    }

    /// Puts it, and removes its entry from the table; or returns why both stay.
    fn put(&self) -> Result<(), PutError> {
        // Each try checks again; between tries `put_rwsem` is free.
        let check_and_put = || match self.alive() {
            true => env::put_pages(&self.span, self.table),
            false => 0,
        };
        match env::retry(|| env::put_rwsem_write(check_and_put)) {
            // Found and put, or waited for the callback: either way none will come.
            0 => {
                remove(self.number);
                Ok(())
            }
            code => Err(PutError::Failed(code)),
        }
    }

    fn orphaned(&self, why: PutError) {
        self.entry.of.orphaned();
        env::orphaned(&self.span, why);
    }
}

/// Memory that is pinned until this is dropped, or until it is freed.
pub(crate) struct CallbackPin {
    pin: Pinned,
    /// The process that the provider knows as the owner.
    owner: Process,
}

impl CallbackPin {
    /// Pins `span`. Takes the API lock. `region` may be revoked before this returns.
    pub(crate) fn new(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Reason> {
        Ok(CallbackPin {
            // From here on the drop unpins.
            pin: Pinned::new(span, region)?,
            owner: env::process(),
        })
    }

    /// Runs `f` on the page table, unless the memory is gone. A callback waits for the end of `f`, which must neither
    /// call the provider, nor allocate, nor take a lock. A long table is read in several calls. The memory may go away
    /// between two of them, so `f` keeps no reference to the table.
    pub(crate) fn read<R>(
        &self,
        f: impl FnOnce(TableGuard<'_>) -> Result<R, Reason>,
    ) -> Result<R, Reason> {
        self.pin.entry.with(|alive| {
            if !*alive {
                return Err(Reason::Revoked);
            }
            // INVARIANT: `free_callback` clears `alive` before it returns: it has not been called, or waits
            // for the lock held here. Only the drop puts.
            f(TableGuard(self.pin.table, PhantomData))
        })
    }

    /// Puts the pin, unless the provider would not find it.
    fn put(&self) -> Result<(), PutError> {
        let this = Thread::current();
        let (callback, late) = callbacks(|callbacks| (callbacks.callback, callbacks.late));
        if callback == Some(this) {
            return Err(PutError::InCallback);
        }
        if env::process() != self.owner {
            return Err(PutError::OtherProcess);
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
    /// the calling process. That page may be other memory's by now, so its pin has an entry of its own.
    fn ask(&self) -> Result<(), PutError> {
        let failed = |reason: Reason| match reason {
            Reason::Pin(EINVAL) => PutError::Unlisted,
            other => PutError::Failed(other.errno()),
        };
        let start = self.pin.span.start();
        let page = Span::covering(start, 1, PageSize::KIB_64, u64::MAX);
        let page = page.map_err(|_| PutError::Failed(EINVAL))?;
        match Pinned::new(page, self.pin.entry.of.clone()) {
            Ok(pin) => {
                if let Err(why) = pin.put() {
                    pin.orphaned(why);
                }
                Ok(())
            }
            // Pinned, and it stays.
            Err(Reason::Pin(0)) => Ok(()),
            Err(reason) => Err(failed(reason)),
        }
    }
}

impl Drop for CallbackPin {
    /// Unpins, unless the callback has come, which removes its number itself. Takes the API lock.
    fn drop(&mut self) {
        if self.pin.alive() {
            if let Err(why) = self.put() {
                self.pin.orphaned(why);
            }
        }
    }
}

/// What the provider calls.
struct OnFree;

impl env::Callback for OnFree {
    fn free_callback(number: usize) {
        free_callback(number);
    }
}

/// The provider frees the memory of the pin with that number. To be called with its API lock held.
pub(crate) fn free_callback(number: usize) {
    let found = callbacks(|callbacks| {
        let Some(entry) = callbacks.entries.get(number).cloned() else {
            let given = (1..=callbacks.last).contains(&number);
            callbacks.late |= given;
            return Err(given);
        };
        callbacks.callback = Some(Thread::current());
        Ok(entry)
    });
    let entry = match found {
        Ok(entry) => entry,
        Err(true) => return env::late_callback(),
        Err(false) => return env::spurious_callback(),
    };
    entry.with(|alive| *alive = false);
    entry.of.revoke();
    callbacks(|callbacks| callbacks.callback = None);
    remove(number);
}
