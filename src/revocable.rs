// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of one registration whose memory may be freed first: the revocable flavour.
//!
//! ```text
//! acquire    Lease::pin       one pin for each allocation, usually one, kept; the physical addresses
//!                             are copied
//! get_pages  Lease::admit     remembers ib_core's ticket; calls no provider
//! dma_map    Lease::map       maps the copied addresses; calls no provider
//! dma_unmap  Lease::unmap
//! put_pages  (nothing)
//! release    drop(Lease)      no callback after it, unpins, frees the scatter list
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
//!
//! # Rules, and what fails without them
//!
//! - A range over several allocations has as many pins ([`pieces`]), and one of them that goes revokes the
//!   whole: the HCA has one key for all of it. The others stay pinned until `release`.
//! - A callback before [`Lease::admit`] marks the region, and `admit` fails: ib_core would otherwise
//!   get a region that nobody will ever revoke.
//! - A callback without a ticket never calls ib_core. Tickets are small numbers that come round again:
//!   a stale one would revoke a stranger's region. `release` clears the ticket under the lock.
//! - `release` returns only when no callback of this region is inside ib_core or tearing down: ib_core
//!   writes to its own record after `release`, and an invalidation on its way reads it. It waits with
//!   no lock held, and never on the callback's own thread, for OFED 4.9 calls `release` inside the
//!   callback.
//! - The scatter list goes in `release` alone: ib_core writes to its first and last entry before it
//!   calls `dma_unmap`, even after an invalidation.
//! - The provider's `dma_map_pages` is not used. It reads the page table without a lock, and a callback
//!   beside it can neither wait for it (it wants the API lock) nor return (the table would be freed).
//!   The physical addresses are copied while the table is known to live, and mapped here. The price:
//!   the provider's topology check (580 and later) is not made.
//!
//! Uses `core` alone: see [`region`](super::region).

use core::ops::Deref;

use super::account::Charge;
use super::extents::Cut;
use super::extents::PageSize;
use super::extents::Run;
use super::extents::Span;
use super::pieces;
use super::record::Flavour;
use super::refusal::Refusal;
use super::region;
use super::region::Device as _;
use super::region::Lock as _;
use super::region::Table as _;
use super::region::MAX_LEN;
use super::roll;
use super::roll::Gpus;

/// What surrounds a revocable region, beyond what [`region::Env`] has.
pub(crate) trait Env: region::Env {
    /// A sleeping lock that threads can also wait on, with a place on the roll beside what it guards.
    type Monitor<T: Send + Unpin>: Monitor<T> + roll::Place;
    /// A counted reference.
    type Shared<T: Send + Sync + 'static>: Deref<Target = T> + Clone + Send + Sync;
    /// ib_core's name for a registration, with the means to revoke it.
    type Ticket: Ticket;
    /// Memory that the provider has pinned, and may take away.
    type RevocablePin: RevocablePin<Self>;
    /// Ranges of a BAR mapped for a device, until dropped.
    type BarMapping: BarMapping<Device = Self::Device, BarRun = Self::BarRun>;
    /// A range of physical addresses that can be mapped.
    type BarRun: Send + 'static;
    /// What tells one thread from another.
    type Thread: Copy + Eq + Send;

    /// Moves `value` behind a counted reference.
    fn share<T: Send + Sync + 'static>(value: T) -> Result<Self::Shared<T>, Refusal>;

    /// The calling thread.
    fn thread() -> Self::Thread;
}

/// A sleeping lock around `T` that threads can also wait on. Process context only.
pub(crate) trait Monitor<T>: region::Lock<T> {
    /// Sleeps, with the lock released, for as long as `condition` holds.
    fn wait_while(&self, condition: impl FnMut(&mut T) -> bool);

    /// Makes every thread in [`Monitor::wait_while`] look again.
    fn notify_all(&self);
}

/// ib_core's name for a registration, from `get_pages` until `release`.
pub(crate) trait Ticket: Send {
    /// Has ib_core revoke the registration: no HCA uses it afterwards. Sleeps for `mapping_lock`.
    fn revoke(self);
}

/// Whom the provider's callback is for.
pub(crate) trait Revoke: Send + Sync + 'static {
    /// The pinned memory goes away with the return of this call. Called with the provider's API lock
    /// held, from the thread that frees the memory, or from one of the kernel's.
    fn revoke(&self);

    /// A pin of it was dropped, and its memory stays pinned until it is freed: [`Revoke::revoke`] is still to
    /// come for it, or has just come.
    fn kept(&self);
}

/// Memory that the provider has pinned, until dropped, and may take away before.
///
/// The drop unpins, unless the callback has run. After it no callback starts, except where the
/// provider would not unpin: then one comes some time, and finds nothing to do. Neither `pin` nor the
/// drop may happen with the region's lock held: they take the provider's API lock.
pub(crate) trait RevocablePin<E: Env>: Sized + Send {
    /// Pins `span` in the calling process, and copies the physical addresses. From then on, and
    /// even before the return, `region` may be revoked.
    fn pin(span: Span, region: E::Shared<Region<E>>) -> Result<Self, Refusal>;

    /// The size of its pages.
    fn page_size(&self) -> PageSize;

    /// On which GPU it is, as far as its addresses show it.
    fn gpus(&self) -> Gpus;

    /// Where the pages are, in the order of virtual addresses.
    fn runs(&self) -> &[E::BarRun];
}

/// Ranges of a BAR mapped for a device, until dropped. Takes no lock of the provider's.
pub(crate) trait BarMapping: Sized + Send {
    /// The device to map for.
    type Device;
    /// A range of physical addresses that can be mapped.
    type BarRun: 'static;

    /// Maps each of `runs` for `device`.
    fn map<'a>(
        device: &Self::Device,
        runs: impl Iterator<Item = &'a Self::BarRun>,
    ) -> Result<Self, Refusal>;

    /// The DMA addresses, in the order of `runs`.
    fn runs(&self) -> &[Run];
}

struct State<E: Env> {
    /// From `admit` until a callback takes it, or `release` clears it.
    ticket: Option<E::Ticket>,
    /// A callback has come. Never cleared.
    revoked: bool,
    /// The provider did not take back every pin. Never cleared.
    kept: bool,
    /// The thread on which a callback of this region is under way. The provider makes one callback
    /// at a time.
    callback: Option<E::Thread>,
    /// From `map` until `unmap`, a callback or `release`, whichever is first.
    mapping: Option<E::BarMapping>,
    /// From `map` until `release`.
    table: Option<E::Table>,
    /// From `pin` until `release`.
    pins: E::List<E::RevocablePin>,
}

// A state is moved in and out of its lock, and nothing points into it.
impl<E: Env> Unpin for State<E> {}

/// A registration whose memory may go away. Held through a [`Lease`].
pub(crate) struct Region<E: Env> {
    span: Span,
    state: E::Monitor<State<E>>,
    /// For as long as a callback may come, for so long the memory may be pinned.
    _charge: Charge<E>,
}

/// ib_core's hold on a region, from `acquire` to `release`, which is its drop.
///
/// The region itself may live longer: until the last callback for it has returned.
pub(crate) struct Lease<E: Env> {
    region: E::Shared<Region<E>>,
    page: PageSize,
}

impl<E: Env> Lease<E> {
    /// `acquire`: pins the pages of `[addr, addr + len)`, once: all of them, or none. May sleep.
    pub(crate) fn pin(addr: u64, len: u64) -> Result<Self, Refusal> {
        let span = Span::covering(addr, len, PageSize::KIB_64, MAX_LEN)?;
        let region = E::share(Region {
            span,
            state: E::Monitor::new(State::new())?,
            _charge: Charge::new(span.len())?,
        })?;
        let pins: E::List<E::RevocablePin> = pieces::cover(
            span,
            E::max_pieces(),
            |span| E::RevocablePin::pin(span, region.clone()),
            // Once a part is gone, the rest is not worth its pins.
            || region::survives::<E>().and_then(|()| region.state.with(|state| state.check())),
        )?;
        let page = PageSize::of_all(pins.iter().map(|pin| pin.page_size()));
        // From here on an early return is a release. It may wait for a callback with ib_core's global
        // mutex held: a callback for a region without a ticket calls nobody.
        let lease = Self { region, page };
        let new = region::newcomer::<E>(
            Flavour::Revocable,
            span,
            page,
            pins.iter().map(|pin| pin.gpus()),
        );
        lease.region.state.with(|state| {
            state.pins = pins;
            state.check()?;
            // Under the lock: the callback that comes next finds it on the roll.
            roll::enter(&lease.region.state, new);
            Ok::<_, Refusal>(())
        })?;
        Ok(lease)
    }

    /// `get_pages`: from now on a callback revokes `ticket`.
    pub(crate) fn admit(&self, ticket: E::Ticket) -> Result<(), Refusal> {
        self.region.state.with(|state| {
            state.check()?;
            state.ticket = Some(ticket);
            Ok(())
        })
    }

    /// `dma_map`: maps the whole region for `device`, or nothing. May sleep.
    pub(crate) fn map(
        &self,
        device: &E::Device,
    ) -> Result<<E::Table as region::Table>::Lent, Refusal> {
        self.region.state.with(|state| {
            // A callback that comes later waits for the lock, and tears down what is built here.
            state.check()?;
            if state.table.is_some() {
                return Err(Refusal::MappedTwice);
            }
            let mapping = E::BarMapping::map(device, state.pins.iter().flat_map(|pin| pin.runs()))?;
            let cut = Cut::new(self.region.span.start(), self.page, device.max_segment());
            let table = E::Table::build(mapping.runs().iter().copied(), cut)?;
            state.mapping = Some(mapping);
            roll::mapped(&self.region.state, table.entries(), device.address());
            Ok(state.table.insert(table).lend())
        })
    }

    /// `dma_unmap`: undoes [`Lease::map`], unless a callback has. The scatter list stays. May sleep.
    pub(crate) fn unmap(&self) {
        self.region.state.with(|state| {
            state.mapping = None;
            roll::unmapped(&self.region.state);
        });
    }

    /// The pinned range of virtual addresses.
    pub(crate) fn span(&self) -> &Span {
        &self.region.span
    }

    /// `get_page_size`.
    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }
}

impl<E: Env> Drop for Lease<E> {
    /// `release`. ib_core holds no lock here that an invalidation takes.
    fn drop(&mut self) {
        let state = &self.region.state;
        let pins = state.with(|state| {
            state.ticket = None;
            core::mem::take(&mut state.pins)
        });
        // Blocks while a callback of one of these pins runs, for the callback holds the API lock.
        drop(pins);
        // A callback that had marked its pin before the drop above looked is still on its way.
        let this = E::thread();
        state.wait_while(|state| state.callback.is_some_and(|thread| thread != this));
        // The region may outlive this, for a callback that is yet to come. What it holds does not.
        let held = state.with(|own| {
            // The provider was asked for each pin by now: what it keeps stays on the roll with the region.
            roll::released(state, own.kept);
            (own.mapping.take(), own.table.take())
        });
        drop(held);
    }
}

impl<E: Env> Revoke for Region<E> {
    fn revoke(&self) {
        let ticket = self.state.with(|state| {
            state.revoked = true;
            state.callback = Some(E::thread());
            roll::revoked(&self.state);
            state.ticket.take()
        });
        // The HCA first, then the mapping: no lock of ours is held while ib_core stops the HCA.
        if let Some(ticket) = ticket {
            ticket.revoke();
        }
        self.state.with(|state| {
            state.mapping = None;
            state.callback = None;
        });
        // `release` may have returned by now: the callback's reference to its slot keeps the region.
        self.state.notify_all();
    }

    fn kept(&self) {
        self.state.with(|state| state.kept = true);
    }
}

impl<E: Env> State<E> {
    fn new() -> Self {
        State {
            ticket: None,
            revoked: false,
            kept: false,
            callback: None,
            mapping: None,
            table: None,
            pins: E::List::default(),
        }
    }

    fn check(&self) -> Result<(), Refusal> {
        if self.revoked {
            Err(Refusal::Revoked)
        } else {
            Ok(())
        }
    }
}
