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
//! Uses `core` and [`env`] alone.

use super::account::Charge;
use super::env;
use super::env::DmaMapping;
use super::env::LentTable;
use super::env::List;
use super::env::Lock;
use super::env::PciDevice;
use super::env::PersistentPin;
use super::env::Table;
use super::extents;
use super::extents::Cut;
use super::extents::PageSize;
use super::extents::Run;
use super::extents::Span;
use super::pieces;
use super::record::Flavour;
use super::refusal::Refusal;
use super::roll;
use super::roll::Gpus;
use super::roll::Newcomer;

/// The longest range that is handed to the provider, in bytes.
///
/// nvidia.ko allocates a record for each page *before* it looks at the address: a range of 16 TiB
/// costs it 4 GiB of kernel memory only to be refused. No GPU has 1 TiB of memory.
pub(crate) const MAX_LEN: u64 = 1 << 40;

/// A part of a region that lies in one allocation.
///
/// The order of the fields is the order in which they are dropped.
struct Piece {
    mapping: Option<DmaMapping>,
    pin: PersistentPin,
}

impl Piece {
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
struct State {
    pieces: List<Piece>,
    /// Present from the first `map` on. ib_core writes to its first and last entry before it calls
    /// `dma_unmap`, and may do so after an invalidation: it stays until `release`.
    table: Option<Table>,
}

/// A registration that holds its memory until `release`.
///
/// ib_core makes the calls for one region one after another, so the lock is never waited for. It is
/// held across calls to the provider, which never calls back here.
pub(crate) struct Region {
    span: Span,
    page: PageSize,
    state: Lock<State>,
    /// After the pins: they are dropped before.
    _charge: Charge,
}

impl Region {
    /// `acquire`: pins the pages of `[addr, addr + len)`, once: all of them, or none. May sleep.
    pub(crate) fn pin(addr: u64, len: u64) -> Result<Self, Refusal> {
        let span = Span::covering(addr, len, PageSize::KIB_64, MAX_LEN)?;
        let charge = Charge::new(span.len())?;
        let pin = |span| {
            let pin = PersistentPin::pin(span)?;
            Ok(Piece { mapping: None, pin })
        };
        let pieces = pieces::cover(span, env::max_pieces(), pin, survives)?;
        let page = PageSize::of_all(pieces.iter().map(|piece| piece.pin.page_size()));
        let new = newcomer(
            Flavour::Persistent,
            span,
            page,
            pieces.iter().map(|piece| piece.pin.gpus()),
        );
        let region = Region {
            span,
            page,
            state: Lock::new(State {
                pieces,
                table: None,
            })?,
            _charge: charge,
        };
        roll::enter(region.state.place(), new);
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
    pub(crate) fn map(&self, device: &PciDevice) -> Result<LentTable, Refusal> {
        self.state.with(|state| {
            if state.table.is_some() {
                return Err(Refusal::MappedTwice);
            }
            let table = self
                .build(&mut state.pieces, device)
                .inspect_err(|_| unmap_all(&mut state.pieces))?;
            roll::mapped(self.state.place(), table.entries(), device.address());
            Ok(state.table.insert(table).lend())
        })
    }

    fn build(&self, pieces: &mut [Piece], device: &PciDevice) -> Result<Table, Refusal> {
        for piece in pieces.iter_mut() {
            piece.mapping = Some(piece.pin.map(device)?);
        }
        let cut = Cut::new(self.span.start(), self.page, device.max_segment());
        Table::build(pieces.iter().flat_map(Piece::pages), cut)
    }

    /// `dma_unmap`: undoes [`Region::map`]; the scatter list stays. May sleep.
    pub(crate) fn unmap(&self) {
        self.state.with(|state| {
            unmap_all(&mut state.pieces);
            roll::unmapped(self.state.place());
        });
    }
}

impl Drop for Region {
    /// `release`.
    #[inline]
    fn drop(&mut self) {
        let pieces = self.state.with(|state| core::mem::take(&mut state.pieces));
        drop(pieces);
        // Not before: where unpinning hangs, the roll shows whose.
        roll::released(self.state.place(), false);
    }
}

/// Refuses to go on with a search over several allocations for a process that was killed, as
/// `get_user_pages()` does. The search can have thousands of calls ahead of it.
pub(crate) fn survives() -> Result<(), Refusal> {
    if env::is_killed() {
        return Err(Refusal::Killed);
    }
    Ok(())
}

/// What a registration by the calling thread puts on the roll; `gpus` has an element for each pin.
pub(crate) fn newcomer(
    flavour: Flavour,
    span: Span,
    page: PageSize,
    gpus: impl ExactSizeIterator<Item = Gpus>,
) -> Newcomer {
    let (task, since) = env::caller();
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

fn unmap_all(pieces: &mut [Piece]) {
    for piece in pieces {
        piece.mapping = None;
    }
}
