// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of one registration whose pages nobody takes away: the persistent flavour.
//!
//! ```text
//! acquire    Region::pin     one pin for each allocation, usually one, kept
//! get_pages  (nothing: the pin is there, and no one will need the ticket)
//! dma_map    Region::map     one mapping, one scatter list
//! dma_unmap  Region::unmap
//! put_pages  (nothing)
//! release    drop(Region)    unpins, frees the scatter list
//! ```
//!
//! NVIDIA's module pins twice, in `acquire` and again in `get_pages`. One pin from `acquire` on costs
//! half, and takes the provider's lock out from under ib_core's `mapping_lock`.
//!
//! A range over several allocations has as many pins ([`pieces`]), and one scatter list.
//!
//! What is freed follows from what the region itself holds, never from what ib_core hands back.
//!
//! Uses `core` alone, and names its neighbours by the traits below, so that the very lines that run
//! in the kernel are compiled by cargo on the host (`tests/host`).

use core::ops::DerefMut;

use super::account::Charge;
use super::account::Ledger;
use super::extents;
use super::extents::Cut;
use super::extents::PageSize;
use super::extents::Run;
use super::extents::Span;
use super::pieces;
use super::record::Flavour;
use super::record::Task;
use super::refusal::Refusal;
use super::roll;
use super::roll::Gpus;
use super::roll::Newcomer;
use super::roll::PciAddress;

/// The longest range that is handed to the provider, in bytes.
///
/// nvidia.ko allocates a record for each page *before* it looks at the address: a range of 16 TiB
/// costs it 4 GiB of kernel memory only to be refused. No GPU has 1 TiB of memory.
pub(crate) const MAX_LEN: u64 = 1 << 40;

/// What surrounds a region, in the kernel or in a test.
pub(crate) trait Env: Ledger + Sized {
    /// A sleeping lock, with a place on the roll beside what it guards.
    type Lock<T: Send + Unpin>: Lock<T> + roll::Place;
    /// A growing list.
    type List<T: Send>: List<T>;
    /// The device that does the HCA's DMA.
    type Device: Device;
    /// A scatter list for ib_core.
    type Table: Table;
    /// Memory that the provider has pinned until it is dropped.
    type Pin: Pinned<Mapping = Self::Mapping, Device = Self::Device>;
    /// A [`Env::Pin`] mapped for a device, until dropped.
    type Mapping: Mapping;

    /// Of how many pins a registration may consist.
    fn max_pieces() -> u32;

    /// The calling thread, and the time in microseconds.
    fn caller() -> (Task, u64);

    /// Whether a fatal signal waits for the calling thread.
    fn is_killed() -> bool;
}

/// A sleeping lock around `T`. Process context only.
pub(crate) trait Lock<T>: Sized + Send + Sync {
    /// A lock around `value`.
    fn new(value: T) -> Result<Self, Refusal>;

    /// Runs `f` with the lock held.
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R;
}

/// A growing list that says so when memory is short.
pub(crate) trait List<T>: Default + DerefMut<Target = [T]> + Send {
    /// Appends `value`.
    fn push(&mut self, value: T) -> Result<(), Refusal>;
}

/// The device that does the HCA's DMA.
pub(crate) trait Device: Sync {
    /// The longest segment that it takes, in bytes.
    fn max_segment(&self) -> u32;

    /// Where it is.
    fn address(&self) -> PciAddress;
}

/// A scatter list in the making for ib_core, which may write to its first and last entry until
/// `release`.
pub(crate) trait Table: Sized + Send {
    /// What ib_core gets to see of it.
    type Lent;

    /// Allocates exactly as many entries as `cut` makes of `runs`, and fills them. There is at least one run.
    fn build(runs: impl Iterator<Item = Run>, cut: Cut) -> Result<Self, Refusal>;

    /// How many entries it has.
    fn entries(&self) -> u32;

    /// A copy of the head for ib_core; the entries stay ours.
    fn lend(&self) -> Self::Lent;
}

/// Memory that the provider has pinned, until dropped.
pub(crate) trait Pinned: Sized + Send {
    /// The device to map for.
    type Device;
    /// The pin mapped for a device.
    type Mapping;

    /// Pins `span` in the calling process. May sleep.
    fn pin(span: Span) -> Result<Self, Refusal>;

    /// The size of its pages.
    fn page_size(&self) -> PageSize;

    /// On which GPU it is, as far as the provider shows it.
    fn gpus(&self) -> Gpus;

    /// Maps every page for `device`. May sleep.
    fn map(&self, device: &Self::Device) -> Result<Self::Mapping, Refusal>;
}

/// A pin mapped for a device, until dropped.
pub(crate) trait Mapping: Send {
    /// The DMA address of each page, in the order of virtual addresses.
    fn addresses(&self) -> &[u64];
}

/// A part of a region that lies in one allocation.
///
/// The order of the fields is the order in which they are dropped.
struct Piece<E: Env> {
    mapping: Option<E::Mapping>,
    pin: E::Pin,
}

impl<E: Env> Piece<E> {
    /// The DMA addresses, a run for each page.
    fn pages(&self) -> impl Iterator<Item = Run> + '_ {
        let addresses = self
            .mapping
            .iter()
            .flat_map(|m| m.addresses().iter().copied());
        extents::pages(addresses, self.pin.page_size())
    }
}

/// The order of the fields is the order in which they are dropped.
struct State<E: Env> {
    pieces: E::List<Piece<E>>,
    /// Present from the first `map` on. ib_core writes to its first and last entry before it calls
    /// `dma_unmap`, and may do so after an invalidation: it stays until `release`.
    table: Option<E::Table>,
}

// A state is moved in and out of its lock, and nothing points into it.
impl<E: Env> Unpin for State<E> {}

/// A registration that holds its memory until `release`.
///
/// ib_core makes the calls for one region one after another, so the lock is never waited for. It is
/// held across calls to the provider, which never calls back here.
pub(crate) struct Region<E: Env> {
    span: Span,
    page: PageSize,
    state: E::Lock<State<E>>,
    /// After the pins: they are dropped before.
    _charge: Charge<E>,
}

impl<E: Env> Region<E> {
    /// `acquire`: pins the pages of `[addr, addr + len)`, once: all of them, or none. May sleep.
    pub(crate) fn pin(addr: u64, len: u64) -> Result<Self, Refusal> {
        let span = Span::covering(addr, len, PageSize::KIB_64, MAX_LEN)?;
        let charge = Charge::new(span.len())?;
        let pin = |span| {
            let pin = E::Pin::pin(span)?;
            Ok(Piece { mapping: None, pin })
        };
        let pieces: E::List<Piece<E>> = pieces::cover(span, E::max_pieces(), pin, survives::<E>)?;
        let page = PageSize::of_all(pieces.iter().map(|piece| piece.pin.page_size()));
        let new = newcomer::<E>(
            Flavour::Persistent,
            span,
            page,
            pieces.iter().map(|piece| piece.pin.gpus()),
        );
        let region = Region {
            span,
            page,
            state: E::Lock::new(State {
                pieces,
                table: None,
            })?,
            _charge: charge,
        };
        roll::enter(&region.state, new);
        Ok(region)
    }

    /// The pinned range of virtual addresses.
    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    /// `get_page_size`.
    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    /// `dma_map`: maps every piece for `device`, or none. May sleep.
    pub(crate) fn map(&self, device: &E::Device) -> Result<<E::Table as Table>::Lent, Refusal> {
        self.state.with(|state| {
            if state.table.is_some() {
                return Err(Refusal::MappedTwice);
            }
            let table = self
                .build(&mut state.pieces, device)
                .inspect_err(|_| unmap_all(&mut state.pieces))?;
            roll::mapped(&self.state, table.entries(), device.address());
            Ok(state.table.insert(table).lend())
        })
    }

    fn build(&self, pieces: &mut [Piece<E>], device: &E::Device) -> Result<E::Table, Refusal> {
        for piece in pieces.iter_mut() {
            piece.mapping = Some(piece.pin.map(device)?);
        }
        let cut = Cut::new(self.span.start(), self.page, device.max_segment());
        E::Table::build(pieces.iter().flat_map(Piece::pages), cut)
    }

    /// `dma_unmap`: undoes [`Region::map`]; the scatter list stays. May sleep.
    pub(crate) fn unmap(&self) {
        self.state.with(|state| {
            unmap_all(&mut state.pieces);
            roll::unmapped(&self.state);
        });
    }
}

impl<E: Env> Drop for Region<E> {
    /// `release`.
    fn drop(&mut self) {
        let pieces = self.state.with(|state| core::mem::take(&mut state.pieces));
        drop(pieces);
        // Not before: where unpinning hangs, the roll shows whose.
        roll::released(&self.state, false);
    }
}

/// Refuses to go on with a search over several allocations for a process that was killed, as
/// `get_user_pages()` does. The search can have thousands of calls ahead of it.
pub(crate) fn survives<E: Env>() -> Result<(), Refusal> {
    if E::is_killed() {
        return Err(Refusal::Killed);
    }
    Ok(())
}

/// What a registration by the calling thread puts on the roll; `gpus` has an element for each pin.
pub(crate) fn newcomer<E: Env>(
    flavour: Flavour,
    span: Span,
    page: PageSize,
    gpus: impl ExactSizeIterator<Item = Gpus>,
) -> Newcomer {
    let (task, since) = E::caller();
    Newcomer {
        flavour,
        span,
        page,
        pieces: gpus.len(),
        gpus: Gpus::all(gpus),
        task,
        since,
    }
}

fn unmap_all<E: Env>(pieces: &mut [Piece<E>]) {
    for piece in pieces {
        piece.mapping = None;
    }
}
