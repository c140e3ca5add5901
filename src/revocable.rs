// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of one registration in revocable mode: the memory may be freed before `release`.
//!
//! ```text
//! acquire    RevocableMr::pin         one pin for each allocation, usually one, until release;
//!                                     copies the physical addresses
//! get_pages  RevocableMr::set_ticket  remembers ib_core's ticket; does not call nvidia.ko
//! dma_map    RevocableMr::map         maps the copied addresses; does not call nvidia.ko
//! dma_unmap  RevocableMr::unmap
//! put_pages  (nothing)
//! release    RevocableMr::release     waits for callbacks, unpins, frees the scatter list
//! ```
//!
//! [`Revoke::revoke`] may run at any time, on the thread that frees the memory.
//!
//! # Locks
//!
//! ```text
//! ib_core's peer_memory_mutex > nvidia.ko's API lock > ib_core's mapping_lock > the region's lock
//! ```
//!
//! `revoke` runs with the API lock held, and calls ib_core, which takes `mapping_lock`. ib_core
//! calls `map` and `unmap` with `mapping_lock` held. Three rules follow:
//!
//! - The region's lock is never held across a call into ib_core, because ib_core may call `unmap`
//!   during such a call, on the same thread or another.
//! - The API lock is never taken under the region's lock, so the holder of the region's lock
//!   neither pins nor unpins. Mapping and unmapping addresses of a BAR take no API lock.
//! - Nothing is allocated, and therefore nothing is mapped, under the region's lock: see
//!   [`callback_pin`](super::callback_pin). Unmapping does not wait for memory.
//!
//! # Rules, and the failures that they prevent
//!
//! - A range over several allocations has one pin for each allocation ([`chunks`]). If one of the
//!   allocations is freed, the whole region is revoked, because the HCA has one key for the whole
//!   region. The other allocations stay pinned until `release`.
//! - A callback before [`RevocableMr::set_ticket`] sets `revoked`, and `set_ticket` then fails.
//!   Otherwise ib_core would get a region that nobody ever revokes.
//! - A callback for a region without a ticket never calls ib_core. Tickets are small numbers that
//!   ib_core reuses, and a stale ticket would revoke another region. `release` clears the ticket
//!   under the lock.
//! - `release` returns only when no callback of this region is inside ib_core or tearing the region
//!   down. ib_core writes to its own structure after `release`, and a running invalidation reads
//!   that structure. `release` waits with no lock held, and never waits for a callback on its own
//!   thread, because OFED 4.9 calls `release` inside the callback.
//! - `map` maps with the region unlocked, and then locks the region again. If a callback has come
//!   by then, `map` unmaps and fails. ib_core, and thus the HCA, never gets an address of memory
//!   that is gone. The callback does not wait for `map`. From OFED 5 on, ib_core holds
//!   `mapping_lock` across `dma_map`, so an invalidation waits for `dma_map`. A client cannot
//!   change this.
//! - Only `release` frees the scatter list. ib_core writes to the list's first and last entry
//!   before it calls `dma_unmap`, even after an invalidation.
//! - This mode does not use nvidia.ko's `dma_map_pages`, which reads the page table without a lock.
//!   A concurrent callback could not wait for `dma_map_pages`, because `dma_map_pages` takes the
//!   API lock, which is held during a callback. The callback could not return either, because
//!   nvidia.ko would then free the table. Instead, the physical addresses are copied while the
//!   table is known to be alive, and this module maps them. The disadvantage is that nvidia.ko's
//!   topology check (driver 580 and later) is skipped. `map` refuses a device only if nvidia.ko
//!   denied the path from the device to one of the region's GPUs during an earlier mapping for the
//!   persistent client.
//!
//! Uses only `core`, [`env`], `revocable_pin`, and files that themselves use only `core` and
//! [`env`]. `tests/fakes` replaces `revocable_pin`.

use super::{
    callback_pin::Revoke,
    chunks,
    device::{
        Gpus,
        Reach, //
    },
    env::{self, *},
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

/// The part of a region that its lock protects.
#[derive(Default)]
pub(crate) struct State {
    /// ib_core's ticket. `set_ticket` sets this field, a callback takes it, and `release` clears
    /// it.
    ticket: Option<Ticket>,
    /// `true` once a callback has come. Never cleared.
    revoked: bool,
    /// `true` if nvidia.ko did not unpin every pin. Never cleared.
    orphaned: bool,
    /// The thread that is running a callback of this region. nvidia.ko makes one callback at a
    /// time.
    callback: Option<Thread>,
    /// Set from `map` until `unmap`, a callback or `release`, whichever comes first.
    mapping: Option<BarMapping>,
    /// Set from `map` until `release`.
    table: Option<SgTable>,
    /// Set from `pin` until `release`.
    pins: SmallVec<RevocablePin>,
    /// The physical ranges of the memory, and its GPUs. Set from `pin` until `map` or `release`,
    /// whichever comes first. ib_core does not call `map` again after a failure.
    memory: Option<(PhysRanges, Gpus)>,
}

impl State {
    fn check(&self) -> Result<(), Reason> {
        (!self.revoked).then_some(()).ok_or(Reason::Revoked)
    }
}

/// A registration whose memory may be freed. ib_core holds the registration from `acquire` to
/// `release`. The registration lives until its last callback has returned.
pub(crate) type RevocableMr = Registered<Fixed, Monitor<State>>;

/// Pins the whole region, and adds it to the registry.
// Not inlined: the combined stack frame with the caller would exceed 1 KiB.
#[inline(never)]
fn pin(mr: &Shared<RevocableMr>) -> Result<(), Reason> {
    let span = mr.of.span;
    let pins = chunks::cover(
        span,
        env::max_chunks(),
        |span| RevocablePin::pin(span, mr.clone()),
        // If one allocation is gone, pinning the rest is pointless.
        || mr::check_killed().and_then(|()| mr.state.with(|state| state.check())),
    )?;
    let (memory, page, gpus) = RevocablePin::read_all(&pins, span.start())?;
    let info = mr.of.pinned(RevocableMr::MODE, page, pins.len(), gpus);
    mr.state.with(|state| {
        state.pins = pins;
        state.memory = Some((memory, gpus));
        state.check()?;
        // The entry is added under the lock, so the next callback finds it in the registry.
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
                // The release may wait for a callback while ib_core's global mutex is held. The
                // wait ends, because a callback for a region without a ticket does not call
                // ib_core.
                Self::release(mr);
                Err(reason)
            }
        }
    }

    /// Stores the ticket. From now on, a callback revokes the registration.
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
        // The region is unlocked here, because `recall` may wait for a scan of the machine's PCI
        // devices.
        let denied = |number| env::recall(Gpus::one(number), device) == Some(Reach::Denied);
        if gpus.numbers().any(denied) {
            return Err(DENIED);
        }
        let (span, page) = (&self.of.span, self.of.page_size());
        let (mapping, table) = BarMapping::map(device, memory, span.start(), page)?;
        mr::note_large_hca_page(span, &table);
        let (entries, hca) = (table.entries(), device.address());
        let mapped = self.state.with(move |state| {
            // A callback may have come in the meantime. A later callback waits for the lock, and
            // tears down this mapping.
            if let Err(reason) = state.check() {
                return Err((reason, mapping, table));
            }
            state.mapping = Some(mapping);
            self.entry
                .update(|registry, slot| registry.mapped(slot, entries, hca));
            Ok(state.table.insert(table).head())
        });
        // On error, the mapping is dropped here, with the region unlocked. The drop unmaps.
        mapped.map_err(|(reason, ..)| reason)
    }

    #[inline]
    fn unmap(&self) {
        self.state.with(|state| {
            state.mapping = None;
            self.entry.update(Registry::unmapped);
        });
    }

    /// Releases the region. ib_core holds no lock here that an invalidation takes.
    fn release(this: Shared<Self>) {
        let state = &this.state;
        let pins = state.with(|state| {
            state.ticket = None;
            core::mem::take(&mut state.pins)
        });
        // For a pin that is not revoked, the drop takes the API lock. The drop therefore waits for
        // a running callback, which holds the API lock.
        drop(pins);
        // The drop above does not call nvidia.ko for a pin that is already revoked, so the callback
        // for that pin may still be running.
        let thread = Thread::current();
        state.wait_while(|state| state.callback.is_some_and(|callback| callback != thread));
        // A pending callback may keep the region alive after this function returns. The region's
        // resources are freed now.
        let held = state.with(|own| {
            // Every pin has been put or orphaned by now. If any pin is orphaned, the region stays
            // in the registry.
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
        // ib_core stops the HCA first, and the mapping is dropped afterwards. No lock of this
        // module is held while ib_core stops the HCA.
        if let Some(ticket) = ticket {
            ticket.invalidate(&self.of.stats);
        }
        self.state.with(|state| {
            state.mapping = None;
            state.callback = None;
        });
        // `release` may have returned by now. The callback's reference to its entry keeps the
        // region alive.
        self.state.notify_all();
    }

    fn orphaned(&self) {
        self.state.with(|state| state.orphaned = true);
    }
}
