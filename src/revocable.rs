// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of one registration whose memory may be freed first: the revocable mode.
//!
//! ```text
//! acquire    RevocableMr::pin         one pin for each allocation, usually one, until release; the
//!                                     physical addresses are copied
//! get_pages  RevocableMr::set_ticket  remembers ib_core's ticket; calls no provider
//! dma_map    RevocableMr::map         maps the copied addresses; calls no provider
//! dma_unmap  RevocableMr::unmap
//! put_pages  (nothing)
//! release    RevocableMr::release     no callback after it, unpins, frees the scatter list
//! ```
//!
//! and at any time, from the thread that frees the memory, [`Revoke::revoke`].
//!
//! # Locks
//!
//! ```text
//! ib_core's peer_memory_mutex > provider's API lock > ib_core's mapping_lock > the region's lock
//! ```
//!
//! `revoke` runs with the API lock held and calls ib_core, which takes `mapping_lock`; ib_core calls
//! `map` and `unmap` with `mapping_lock` held. So:
//!
//! - The region's lock is held across no call into ib_core, which may call `unmap` from there, on
//!   the same thread or another.
//! - Under the region's lock nothing takes the API lock: neither pin nor unpin. Mapping and unmapping
//!   addresses of a BAR take none.
//! - Under the region's lock nothing is allocated, and so nothing is mapped: see
//!   [`callback_pin`](super::callback_pin). Unmapping waits for no memory.
//!
//! # Rules, and what fails without them
//!
//! - A range over several allocations has as many pins ([`chunks`]), and one of them that goes revokes the
//!   whole: the HCA has one key for all of it. The others stay pinned until `release`.
//! - A callback before [`RevocableMr::set_ticket`] marks the region, and `set_ticket` fails: ib_core would
//!   otherwise get a region that nobody will ever revoke.
//! - A callback without a ticket never calls ib_core. Tickets are small numbers that come round again:
//!   a stale one would revoke a stranger's region. `release` clears the ticket under the lock.
//! - `release` returns only when no callback of this region is inside ib_core or tearing down: ib_core
//!   writes to its own record after `release`, and an invalidation on its way reads it. It waits with
//!   no lock held, and never on the callback's own thread, for OFED 4.9 calls `release` inside the
//!   callback.
//! - `map` maps with the region unlocked. If a callback has come when it locks the region again, it unmaps and fails:
//!   ib_core, and so the HCA, never gets an address of memory that is gone. The callback does not wait for that. From
//!   OFED 5 on, ib_core holds `mapping_lock` over `dma_map`, so there an invalidation waits for it; a client cannot change
//!   that.
//! - The scatter list goes in `release` alone: ib_core writes to its first and last entry before it
//!   calls `dma_unmap`, even after an invalidation.
//! - The provider's `dma_map_pages` is not used. It reads the page table without a lock, and a callback
//!   beside it can neither wait for it (it wants the API lock) nor return (the table would be freed).
//!   The physical addresses are copied while the table is known to live, and mapped here. The price:
//!   the provider's topology check (580 and later) is not made. A device that the provider has denied one
//!   of the GPUs before, when it mapped for the persistent client, is refused.
//!
//! Uses `core`, [`env`], and what uses no more.

use super::{
    callback_pin::Revoke,
    chunks,
    device::{
        Gpus,
        Reach, //
    },
    env::{
        self,
        BarMapping,
        Monitor,
        MrStats,
        PciDevice,
        PhysRanges,
        Registered,
        SgTable,
        SgTableHead,
        Shared,
        SmallVec,
        Thread,
        Ticket, //
    },
    history::PinMode,
    mr::{
        self,
        Fixed,
        Mr, //
    },
    persistent_mapping::DENIED,
    reason::Reason,
    registry::Registry,
    revocable_pin::RevocablePin, //
};

/// The part of a region that its lock guards.
#[derive(Default)]
pub(crate) struct State {
    /// From `set_ticket` until a callback takes it, or `release` clears it.
    ticket: Option<Ticket>,
    /// A callback has come. Never cleared.
    revoked: bool,
    /// The provider did not take back every pin. Never cleared.
    orphaned: bool,
    /// The thread on which a callback of this region is under way. The provider makes one callback
    /// at a time.
    callback: Option<Thread>,
    /// From `map` until `unmap`, a callback or `release`, whichever is first.
    mapping: Option<BarMapping>,
    /// From `map` until `release`.
    table: Option<SgTable>,
    /// From `pin` until `release`.
    pins: SmallVec<RevocablePin>,
    /// Where the memory is, and on which GPUs, from `pin` until `map` or `release`, whichever is first. ib_core does not map
    /// again after a `map` that failed.
    memory: Option<(PhysRanges, Gpus)>,
}

impl State {
    fn check(&self) -> Result<(), Reason> {
        if self.revoked {
            Err(Reason::Revoked)
        } else {
            Ok(())
        }
    }
}

/// A registration whose memory may go away. ib_core holds it from `acquire` to `release`; it lives until the last callback
/// for it has returned.
pub(crate) type RevocableMr = Registered<Fixed, Monitor<State>>;

/// Pins all of the region, and adds it to the registry.
// Not inlined: with those of its caller the frame would exceed 1 KiB.
#[inline(never)]
fn pin(mr: &Shared<RevocableMr>) -> Result<(), Reason> {
    let span = *mr.of.span();
    let pins = chunks::cover(
        span,
        env::max_chunks(),
        |span| RevocablePin::pin(span, mr.clone()),
        // Once a part is gone, the rest is not worth its pins.
        || mr::check_killed().and_then(|()| mr.state.with(|state| state.check())),
    )?;
    let (memory, page, gpus) = RevocablePin::read_all(&pins, span.start())?;
    let info = mr.of.pinned(RevocableMr::MODE, page, pins.len(), gpus);
    mr.state.with(|state| {
        state.pins = pins;
        state.memory = Some((memory, gpus));
        state.check()?;
        // Under the lock: the callback that comes next finds it in the registry.
        mr.entry.update(|registry, slot| registry.add(slot, info));
        Ok(())
    })
}

impl Mr for RevocableMr {
    const MODE: PinMode = PinMode::Revocable;

    fn pin(stats: MrStats, addr: u64, len: u64) -> Result<Shared<Self>, Reason> {
        let fixed = Fixed::new(stats, addr, len)?;
        let mr = Registered::new(fixed, Monitor::new(State::default()))?;
        match pin(&mr) {
            Ok(()) => Ok(mr),
            Err(reason) => {
                // May wait for a callback with ib_core's global mutex held: a callback for a region without a ticket calls
                // nobody.
                Self::release(mr);
                Err(reason)
            }
        }
    }

    /// From now on a callback revokes `ticket`.
    #[inline]
    fn set_ticket(&self, ticket: Ticket) -> Result<(), Reason> {
        self.state.with(|state| {
            state.check()?;
            state.ticket = Some(ticket);
            Ok(())
        })
    }

    fn map(&self, device: &PciDevice) -> Result<SgTableHead, Reason> {
        let (memory, gpus) = self.state.with(|state| {
            state.check()?;
            state.memory.take().ok_or(Reason::MappedTwice)
        })?;
        // Without the region's lock: this may wait for a search of the machine.
        let denied = |number| env::recall(Gpus::one(number), device) == Some(Reach::Denied);
        if gpus.numbers().any(denied) {
            return Err(DENIED);
        }
        let (span, page) = (self.of.span(), self.of.page_size());
        let (mapping, table) = BarMapping::map(device, memory, span.start(), page)?;
        mr::note_large_hca_page(span, &table);
        let (entries, hca) = (table.entries(), device.address());
        let mapped = self.state.with(move |state| {
            // A callback may have come since. A later one waits for the lock, and tears down what was built here.
            if let Err(reason) = state.check() {
                return Err((reason, mapping, table));
            }
            state.mapping = Some(mapping);
            self.entry
                .update(|registry, slot| registry.mapped(slot, entries, hca));
            Ok(state.table.insert(table).head())
        });
        // A refused mapping is dropped here, and so unmapped, with the region unlocked.
        mapped.map_err(|(reason, ..)| reason)
    }

    #[inline]
    fn unmap(&self) {
        self.state.with(|state| {
            state.mapping = None;
            self.entry.update(Registry::unmapped);
        });
    }

    /// ib_core holds no lock here that an invalidation takes.
    fn release(this: Shared<Self>) {
        let state = &this.state;
        let pins = state.with(|state| {
            state.ticket = None;
            core::mem::take(&mut state.pins)
        });
        // Blocks while a callback of one of these pins runs, for the callback holds the API lock.
        drop(pins);
        // A callback that had marked its pin before the drop above looked is still on its way.
        let thread = Thread::current();
        state.wait_while(|state| state.callback.is_some_and(|callback| callback != thread));
        // The region may outlive this, for a callback that is yet to come. What it holds does not.
        let held = state.with(|own| {
            // The provider was asked for each pin by now: what it did not put stays in the registry with the region.
            this.entry
                .update(|registry, slot| registry.released(slot, own.orphaned));
            (own.mapping.take(), own.table.take(), own.memory.take())
        });
        drop(held);
    }

    #[inline]
    fn fixed(&self) -> &Fixed {
        &self.of
    }
}

impl Revoke for RevocableMr {
    fn revoke(&self) {
        let ticket = self.state.with(|state| {
            state.revoked = true;
            state.callback = Some(Thread::current());
            self.entry.update(Registry::revoked);
            state.ticket.take()
        });
        // The HCA first, then the mapping: no lock of ours is held while ib_core stops the HCA.
        if let Some(ticket) = ticket {
            ticket.invalidate(self.of.stats());
        }
        self.state.with(|state| {
            state.mapping = None;
            state.callback = None;
        });
        // `release` may have returned by now: the callback's reference to its entry keeps the region.
        self.state.notify_all();
    }

    fn orphaned(&self) {
        self.state.with(|state| state.orphaned = true);
    }
}
