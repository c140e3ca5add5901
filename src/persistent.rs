// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of one registration whose pages nobody takes away: the persistent mode.
//!
//! ```text
//! acquire    PersistentMr::pin     one pin for each allocation, usually one, until release
//! get_pages  (nothing: the pin is there, and no one will need the ticket)
//! dma_map    PersistentMr::map     one mapping, one scatter list
//! dma_unmap  PersistentMr::unmap
//! put_pages  (nothing)
//! release    drop(PersistentMr)    unpins, frees the scatter list
//! ```
//!
//! NVIDIA's module pins twice, in `acquire` and again in `get_pages`. One pin from `acquire` on costs
//! half, and takes the provider's lock out from under ib_core's `mapping_lock`.
//!
//! A range over several allocations has as many pins ([`chunks`]), and one scatter list.
//!
//! What is freed follows from what the region itself holds, never from what ib_core hands back.
//!
//! Uses `core` and [`env`] alone.

use super::{
    chunks,
    device::Gpus,
    env::{
        self,
        Lock,
        PciDevice,
        PersistentPin,
        Registered,
        SgTable,
        SgTableHead,
        Shared,
        SmallVec,
        Ticket, //
    },
    history::PinMode,
    mr::{
        self,
        Mr,
        MAX_LEN, //
    },
    persistent_mapping::PersistentMapping,
    quota::Charge,
    ranges::{
        PageSize,
        Span, //
    },
    reason::Reason,
    registry::RegistryStats, //
};

/// The order of the fields is the order in which they are dropped.
struct State {
    /// From `map` until `unmap` or `release`, whichever is first.
    mapping: Option<PersistentMapping>,
    pins: SmallVec<PersistentPin>,
    /// Present from the first `map` on. ib_core writes to its first and last entry before it calls
    /// `dma_unmap`, and may do so after an invalidation: it stays until `release`.
    table: Option<SgTable>,
}

/// A registration that holds its memory until `release`.
///
/// ib_core makes the calls for one region one after another, so the lock is never waited for. It is
/// held across calls to the provider, which never calls back here.
pub(crate) struct PersistentMr {
    inner: Shared<Registered<Fixed, Lock<State>>>,
    page: PageSize,
}

/// What of a region does not change.
struct Fixed {
    span: Span,
    /// Goes after the pins.
    _charge: Charge,
}

impl Mr for PersistentMr {
    const MODE: PinMode = PinMode::Persistent;

    fn pin(addr: u64, len: u64) -> Result<Self, Reason> {
        let span = Span::covering(addr, len, PageSize::KIB_64, MAX_LEN)?;
        let charge = Charge::new(span.len())?;
        let pins = chunks::cover(
            span,
            env::max_chunks(),
            PersistentPin::pin,
            mr::check_killed,
        )?;
        let page = PageSize::of_all(pins.iter().map(PersistentPin::page_size));
        let gpus = Gpus::all(pins.iter().map(PersistentPin::gpus));
        let info = mr::registration_info(Self::MODE, span, page, pins.len(), gpus);
        let fixed = Fixed {
            span,
            _charge: charge,
        };
        let state = State {
            mapping: None,
            pins,
            table: None,
        };
        let inner = Registered::new(fixed, Lock::new(state))?;
        inner.entry.update(|stats, slot| stats.add(slot, info));
        Ok(PersistentMr { inner, page })
    }

    /// Nobody will need it.
    #[inline]
    fn set_ticket(&self, _ticket: Ticket) -> Result<(), Reason> {
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

    fn map(&self, device: &PciDevice) -> Result<SgTableHead, Reason> {
        self.inner.state.with(|state| {
            if state.table.is_some() {
                return Err(Reason::MappedTwice);
            }
            let va = self.inner.of.span.start();
            let (mapping, table) = PersistentMapping::map(&state.pins, device, va, self.page)?;
            state.mapping = Some(mapping);
            mr::note_large_hca_page(self.span(), &table);
            let (entries, hca) = (table.entries(), device.address());
            let entry = &self.inner.entry;
            entry.update(|stats, slot| stats.mapped(slot, entries, hca));
            Ok(state.table.insert(table).head())
        })
    }

    #[inline]
    fn unmap(&self) {
        self.inner.state.with(|state| {
            state.mapping = None;
            self.inner.entry.update(RegistryStats::unmapped);
        });
    }
}

impl Drop for PersistentMr {
    /// `release`.
    #[inline]
    fn drop(&mut self) {
        let state = &self.inner.state;
        let (mapping, pins) = state.with(|state| {
            let pins = core::mem::take(&mut state.pins);
            (state.mapping.take(), pins)
        });
        drop(mapping);
        drop(pins);
        // Not before: where unpinning hangs, the registry shows whose.
        let entry = &self.inner.entry;
        entry.update(|stats, slot| stats.released(slot, false));
    }
}
