// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A pin of memory that may be freed before the pin is released. When the memory is freed,
//! nvidia.ko calls back.
//!
//! ```text
//! CallbackPin::new    adds an entry with a number, then calls nvidia.ko's get
//! CallbackPin::read   reads the page table while it is known to be alive
//! drop(CallbackPin)   calls nvidia.ko's put, unless the memory is gone
//! free_callback       nvidia.ko's callback, with the number of the entry
//! ```
//!
//! # Locks
//!
//! ```text
//! put_rwsem > nvidia.ko's API lock > ib_core's mapping_lock > the region's lock
//!                                  > an entry's lock
//!                                  > the table's lock
//! ```
//!
//! nvidia.ko holds the API lock during the callback. An entry's lock and the table's lock are
//! therefore never held across a call that takes another lock. The callback's thread never takes
//! `put_rwsem`.
//!
//! nvidia.ko also holds the locks of the GPUs during a callback. An allocation may wait for
//! reclaim. If a thread allocated memory while holding a lock that a callback takes, every GPU of
//! the machine would wait for that allocation. Four locks are therefore never held across an
//! allocation: the table's, an entry's, a region's and the quota's. Code allocates first, takes the
//! lock, and then repeats its earlier checks.
//!
//! # Rules, and the failures that they prevent
//!
//! - nvidia.ko gets a number, never a pointer. [`free_callback`] looks up the number under a lock,
//!   and holds a reference while it works. If nvidia.ko did not unpin, the callback can come long
//!   after the drop of its pin.
//! - Only [`CallbackPin::read`] reads the page table, while the entry is locked and its memory is
//!   alive. The callback waits for the entry's lock before it returns, and nvidia.ko frees the
//!   table when the callback returns. Nothing dereferences the address of a freed table.
//! - A pin whose callback has come is never put, because its table's address may belong to another
//!   pin by then. This module makes no new pin of either mode between the check for a callback and
//!   the put. Pins are made with `put_rwsem` held for reading ([`env::put_rwsem_read`]). The check
//!   and the put run together, with `put_rwsem` held for writing ([`env::put_rwsem_write`]).
//!   `put_rwsem` does not protect against pins that another module makes for the same process.
//! - A put finds a pin only among the pins of the calling process. If another process calls put,
//!   nvidia.ko does nothing and reports success. In another process, this module therefore does not
//!   put the pin. The entry, and everything that the entry holds, stays until the callback.
//! - nvidia.ko does not always find the pins of the calling process, as the next section explains.
//!   If this module is not sure that nvidia.ko can find a pin, it asks nvidia.ko first
//!   ([`CallbackPin::ask`]). If the answer is no, this module does not put the pin, and the entry
//!   stays until the callback.
//! - OFED 4.9 calls `release` inside a callback. On the thread of a callback, nvidia.ko refuses
//!   every put. This thread must not wait for `put_rwsem` either: the holder of `put_rwsem` may be
//!   waiting for the API lock, which is held during the callback. The region's other live pins are
//!   therefore not put, and keep their entries until their own callbacks.
//!
//! # Puts that return 0
//!
//! A put returns 0 even if it did not find the pin. nvidia.ko keeps the pins in objects, and each
//! object has a list of processes. A put searches only the objects whose list contains the calling
//! process. The process was on such a list when it made the pin. When the process's
//! resource-manager client is freed, nvidia.ko removes the process from the list, under the API
//! lock. There are two cases:
//!
//! - The object belongs to the process's own client, because the process allocated the memory
//!   itself. The object is freed with the client, after callbacks for all its pins. A put therefore
//!   finds every live pin.
//! - The object belongs to another process, which shares the object with this one (MPS; up to 256
//!   processes). The pin outlives the client. A put no longer finds the pin, and the pin's callback
//!   comes when the other process frees the memory.
//!
//! nvidia.ko does not tell this module which case applies. This module therefore trusts a put that
//! returns 0, and removes the entry, in two situations:
//!
//! - The process is running. A running process keeps its client as long as it uses the GPU.
//! - The process is exiting, and nvidia.ko has just pinned the first page for that process once
//!   more ([`CallbackPin::ask`]). An exiting process closes its descriptors in any order.
//!
//! In the first situation, this module assumes that nvidia.ko found the pin, because asking costs a
//! get and a put for each pin. The assumption is wrong for a process that closes the GPU and keeps
//! running. Such a process closes the GPU explicitly, by `execve()`, or in a thread that has its
//! own descriptor table. A later callback for a pin that was already put reveals such a process.
//! The callback finds no entry and does no harm, unless the module was unloaded in the meantime.
//! After such a callback, this module asks nvidia.ko before every put.
//!
//! In the second situation, nvidia.ko fails to find the pin only in two cases. First, the client
//! may be freed between [`CallbackPin::ask`] and the put. Second, the address may already belong to
//! other memory when nvidia.ko pins the page once more. The answer then concerns that other memory.
//! If nvidia.ko refuses for another reason, such as a lost GPU or lack of memory, the answer is
//! unknown and the entry stays.
//!
//! Uses only `core` and [`env`].

use core::marker::PhantomData;

use super::{
    env::{self, *},
    ranges::{
        PageSize,
        Span, //
    },
    reason::{
        Event,
        PutError,
        Reason,
        EINVAL, //
    }, //
};

/// Receiver of nvidia.ko's callback. Keeps the module loaded, because the callback may come after
/// the rest of the registration is gone.
pub(crate) trait Revoke: Send + Sync + 'static {
    /// Handles the loss of the pinned memory, which is gone when this function returns. Called with
    /// nvidia.ko's API lock held, from the thread that frees the memory or from a kernel thread.
    fn revoke(&self);

    /// Records that a pin was dropped but its memory stays pinned until it is freed.
    /// [`Revoke::revoke`] is called for that pin later, or was called just before.
    fn orphaned(&self);
}

/// Entry that a callback finds by its number. The entry holds the region, and a `bool` that is
/// `true` while the memory is alive. The callback clears the `bool` first.
pub(crate) type CallbackEntry = EntryLock<Shared<dyn Revoke>>;

/// All entries that are waiting for a callback, by number.
#[derive(Default)]
pub(crate) struct CallbackTable {
    entries: IdMap<Shared<CallbackEntry>>,
    /// Number of the newest entry. Numbers are not reused: 64 bits do not wrap in practice.
    last: usize,
    /// The thread that is running a callback. nvidia.ko makes one callback at a time.
    callback: Option<Thread>,
    /// `true` once a callback has come for a pin that was put. Never cleared.
    late: bool,
}

impl CallbackTable {
    fn insert(
        &mut self,
        slot: IdSlot<Shared<CallbackEntry>>,
        entry: Shared<CallbackEntry>,
    ) -> usize {
        self.last = self.last.wrapping_add(1);
        self.entries.insert(slot.into_node(self.last, entry));
        self.last
    }
}

static CALLBACKS: StaticMutex<Option<CallbackTable>> = StaticMutex::new(CALLBACKS_LOCK, None);

/// Runs `f` with the table of callbacks locked.
fn callbacks<R>(f: impl FnOnce(&mut CallbackTable) -> R) -> R {
    CALLBACKS.with(|callbacks| f(callbacks.get_or_insert_with(CallbackTable::default)))
}

fn remove(number: usize) {
    let entry = callbacks(|callbacks| callbacks.entries.remove(&number));
    // The entry may hold the last reference to a region, and the drop of a region takes locks. The
    // table is therefore not locked here.
    drop(entry);
}

/// A page table that is alive for `'a`.
///
/// # Invariants
///
/// Only [`CallbackPin::read`] makes this type, from the result of [`env::get_pages`]. During `'a`,
/// [`free_callback`] does not return for the number that was passed to `get_pages`, and nothing
/// puts the table.
pub(crate) struct TableGuard<'a>(PageTable, PhantomData<&'a mut bool>);

impl TableGuard<'_> {
    /// Returns nvidia.ko's handle for the table. The handle may outlive the table.
    pub(crate) fn table(&self) -> PageTable {
        self.0
    }
}

/// A pin, and the entry that its callback finds. Dropping this value does not unpin.
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
        let slot = IdSlot::new(GFP_KERNEL).map_err(|_| Reason::NoMemory)?;
        let number = callbacks(|callbacks| callbacks.insert(slot, entry.clone()));
        let table = env::put_rwsem_read(|| env::get_pages(&span, number, on_free))
            // If the get fails, nvidia.ko does not call back.
            .inspect_err(|_| remove(number))?
            // nvidia.ko returned no table, but pinned the memory. The entry stays, because the
            // callback will look for the entry.
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

    /// Puts the pin and removes its entry from the table. On failure, both the pin and the entry
    /// stay, and this function returns the reason.
    fn put(&self) -> Result<(), PutError> {
        // Each try checks for a callback again, since `put_rwsem` is released between tries.
        let check_and_put = || match self.alive() {
            true => env::put_pages(&self.span, self.table),
            false => 0,
        };
        match env::retry(|| env::put_rwsem_write(check_and_put)) {
            // Either nvidia.ko put the pin, or the callback has come. No further callback comes.
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

/// Memory that is pinned until this value is dropped, or until the memory is freed.
pub(crate) struct CallbackPin {
    pin: Pinned,
    /// The process that nvidia.ko knows as the owner.
    owner: Process,
}

impl CallbackPin {
    /// Pins `span`. Takes the API lock. `region` may be revoked before this function returns.
    pub(crate) fn new(span: Span, region: Shared<dyn Revoke>) -> Result<Self, Reason> {
        Ok(CallbackPin {
            // From here on, dropping the pin unpins.
            pin: Pinned::new(span, region)?,
            owner: env::process(),
        })
    }

    /// Runs `f` on the page table. Fails if the memory is gone. A callback waits until `f` ends.
    /// `f` must not call nvidia.ko, allocate, or take a lock. Long tables are read in several
    /// calls. The memory may be freed between two calls, so `f` must not keep a reference to the
    /// table.
    pub(crate) fn read<R>(
        &self,
        f: impl FnOnce(TableGuard<'_>) -> Result<R, Reason>,
    ) -> Result<R, Reason> {
        self.pin.entry.with(|alive| {
            if !*alive {
                return Err(Reason::Revoked);
            }
            // INVARIANT: `free_callback` clears `alive` before it returns. `alive` is set, so the
            // callback has not started, or is waiting for the lock that is held here. Only the drop
            // puts the table.
            f(TableGuard(self.pin.table, PhantomData))
        })
    }

    /// Puts the pin. Returns an error without a put if nvidia.ko would refuse, or would not find
    /// the pin.
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
            // Once the memory is gone, there is nothing to put and no entry to keep.
            self.ask().or_else(|why| match self.pin.alive() {
                true => Err(why),
                false => Ok(()),
            })?;
        }
        self.pin.put()
    }

    /// Asks nvidia.ko whether a put would find the pin, by pinning the first page once more for the
    /// calling process. The page may belong to other memory by now, so the new pin has its own
    /// entry.
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
            // nvidia.ko returned no table to put, so the page stays pinned.
            Err(Reason::Pin(0)) => Ok(()),
            Err(reason) => Err(failed(reason)),
        }
    }
}

impl Drop for CallbackPin {
    /// Unpins, unless the callback has come. The callback removes the entry itself. Takes the API
    /// lock.
    fn drop(&mut self) {
        if self.pin.alive() {
            if let Err(why) = self.put() {
                self.pin.orphaned(why);
            }
        }
    }
}

/// The callback that is passed to nvidia.ko. `data` is the number of a pin.
extern "C" fn on_free(data: *mut core::ffi::c_void) {
    free_callback(data.addr());
}

/// Handles the callback for pin `number`, whose memory nvidia.ko is freeing. Called with
/// nvidia.ko's API lock held.
pub(crate) fn free_callback(number: usize) {
    let found = callbacks(|callbacks| {
        let Some(entry) = callbacks.entries.get(&number).cloned() else {
            let given = (1..=callbacks.last).contains(&number);
            callbacks.late |= given;
            return Err(given);
        };
        callbacks.callback = Some(Thread::current());
        Ok(entry)
    });
    let entry = match found {
        Ok(entry) => entry,
        Err(true) => return env::report(Event::LateCallback, None, None),
        Err(false) => return env::report(Event::SpuriousCallback, None, None),
    };
    entry.with(|alive| *alive = false);
    entry.of.revoke();
    callbacks(|callbacks| callbacks.callback = None);
    remove(number);
}
