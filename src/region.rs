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

use super::{
    account::Charge,
    env::{
        self,
        DmaMapping,
        LentTable,
        List,
        Lock,
        PciDevice,
        PersistentPin,
        Registered,
        Shared,
        Table,
        Ticket, //
    },
    extents::{
        self,
        Cut,
        PageSize,
        Run,
        Span, //
    },
    mode::{
        self,
        Mode,
        MAX_LEN, //
    },
    pieces,
    record::Flavour,
    refusal::Refusal,
    registry::Book, //
};

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
        let mapping = self.mapping.as_ref();
        let addresses = mapping.map_or(&[][..], |mapping| mapping.addresses());
        extents::pages(addresses.iter().copied(), self.pin.page_size())
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
    inner: Shared<Registered<Fixed, Lock<State>>>,
    page: PageSize,
}

/// What of a region does not change.
struct Fixed {
    span: Span,
    /// Goes after the pins.
    _charge: Charge,
}

impl Mode for Region {
    const FLAVOUR: Flavour = Flavour::Persistent;

    fn pin(addr: u64, len: u64) -> Result<Self, Refusal> {
        let span = Span::covering(addr, len, PageSize::KIB_64, MAX_LEN)?;
        let charge = Charge::new(span.len())?;
        let pin = |span| {
            let pin = PersistentPin::pin(span)?;
            Ok(Piece { mapping: None, pin })
        };
        let pieces = pieces::cover(span, env::max_pieces(), pin, mode::survives)?;
        let page = PageSize::of_all(pieces.iter().map(|piece| piece.pin.page_size()));
        let new = mode::newcomer(
            Self::FLAVOUR,
            span,
            page,
            pieces.iter().map(|piece| piece.pin.gpus()),
        );
        let fixed = Fixed {
            span,
            _charge: charge,
        };
        let table = None;
        let inner = Registered::new(fixed, Lock::new(State { pieces, table }))?;
        inner.entry.update(|book, slot| book.enter(slot, new));
        Ok(Region { inner, page })
    }

    /// Nobody will need it.
    #[inline]
    fn admit(&self, _ticket: Ticket) -> Result<(), Refusal> {
        Ok(())
    }

    #[inline]
    fn span(&self) -> &Span {
        &self.inner.of.span
    }

    #[inline]
    fn page_size(&self) -> PageSize {
        self.page
    }

    fn map(&self, device: &PciDevice) -> Result<LentTable, Refusal> {
        self.inner.state.with(|state| {
            if state.table.is_some() {
                return Err(Refusal::MappedTwice);
            }
            let cut = Cut::new(self.inner.of.span.start(), self.page, device.max_segment());
            let table = build(&mut state.pieces, device, cut)
                .inspect_err(|_| unmap_all(&mut state.pieces))?;
            let (entries, hca) = (table.entries(), device.address());
            let entry = &self.inner.entry;
            entry.update(|book, slot| book.mapped(slot, entries, hca));
            Ok(state.table.insert(table).lend())
        })
    }

    #[inline]
    fn unmap(&self) {
        self.inner.state.with(|state| {
            unmap_all(&mut state.pieces);
            self.inner.entry.update(Book::unmapped);
        });
    }
}

impl Drop for Region {
    /// `release`.
    #[inline]
    fn drop(&mut self) {
        let state = &self.inner.state;
        let pieces = state.with(|state| core::mem::take(&mut state.pieces));
        drop(pieces);
        // Not before: where unpinning hangs, the roll shows whose.
        let entry = &self.inner.entry;
        entry.update(|book, slot| book.released(slot, false));
    }
}

fn build(pieces: &mut [Piece], device: &PciDevice, cut: Cut) -> Result<Table, Refusal> {
    for piece in pieces.iter_mut() {
        piece.mapping = Some(piece.pin.map(device)?);
    }
    Table::build(pieces.iter().flat_map(Piece::pages), cut)
}

fn unmap_all(pieces: &mut [Piece]) {
    for piece in pieces {
        piece.mapping = None;
    }
}
