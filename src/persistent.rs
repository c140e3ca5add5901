// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of one registration whose pages nobody takes away: the persistent mode.
//!
//! ```text
//! acquire    PersistentMr::pin      one pin for each allocation, usually one, until release
//! get_pages  (nothing: the pin is there, and no one will need the ticket)
//! dma_map    PersistentMr::map      one mapping, one scatter list
//! dma_unmap  PersistentMr::unmap
//! put_pages  (nothing)
//! release    PersistentMr::release  unpins, frees the scatter list
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
        BarMapping,
        Lock,
        MrStats,
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
        Fixed,
        Mr, //
    },
    persistent_mapping,
    ranges::PageSize,
    reason::Reason,
    registry::Registry, //
};

/// The state of a registration. The order of the fields is the order in which they are dropped.
#[derive(Default)]
pub(crate) struct State {
    /// From `map` until `unmap` or `release`, whichever is first, where this module maps.
    mapping: Option<BarMapping>,
    /// Where the provider maps, each pin has its mapping.
    pins: SmallVec<PersistentPin>,
    /// Present from the first `map` on. ib_core writes to its first and last entry before it calls
    /// `dma_unmap`, and may do so after an invalidation: it stays until `release`.
    table: Option<SgTable>,
}

impl State {
    #[inline]
    fn unmap(&mut self) {
        match self.mapping.take() {
            Some(mapping) => drop(mapping),
            None => persistent_mapping::unmap(&mut self.pins),
        }
    }
}

/// A registration that holds its memory until `release`.
///
/// ib_core makes the calls for one region one after another, so the lock is never waited for. It is
/// held across calls to the provider, which never calls back here.
pub(crate) type PersistentMr = Registered<Fixed, Lock<State>>;

impl Mr for PersistentMr {
    const MODE: PinMode = PinMode::Persistent;

    fn pin(stats: MrStats, addr: u64, len: u64) -> Result<Shared<Self>, Reason> {
        let fixed = Fixed::new(stats, addr, len)?;
        let mr = Registered::new(fixed, Lock::new(State::default()))?;
        mr.state.with(|state| {
            state.pins = chunks::cover(
                *mr.of.span(),
                env::max_chunks(),
                PersistentPin::pin,
                mr::check_killed,
            )?;
            let pins = &state.pins;
            let page = PageSize::of_all(pins.iter().map(PersistentPin::page_size));
            let gpus = Gpus::all(pins.iter().map(PersistentPin::gpus));
            let info = mr.of.pinned(Self::MODE, page, pins.len(), gpus);
            mr.entry.update(|registry, slot| registry.add(slot, info));
            Ok(())
        })?;
        Ok(mr)
    }

    /// Nobody will need it.
    #[inline]
    fn set_ticket(&self, _ticket: Ticket) -> Result<(), Reason> {
        Ok(())
    }

    fn map(&self, device: &PciDevice) -> Result<SgTableHead, Reason> {
        self.state.with(|state| {
            if state.table.is_some() {
                return Err(Reason::MappedTwice);
            }
            let (mapping, table) = persistent_mapping::map(&mut state.pins, device, &self.of)?;
            state.mapping = mapping;
            mr::note_large_hca_page(self.of.span(), &table);
            let (entries, hca) = (table.entries(), device.address());
            self.entry
                .update(|registry, slot| registry.mapped(slot, entries, hca));
            Ok(state.table.insert(table).head())
        })
    }

    #[inline]
    fn unmap(&self) {
        self.state.with(|state| {
            state.unmap();
            self.entry.update(Registry::unmapped);
        });
    }

    fn release(this: Shared<Self>) {
        this.state.with(|state| {
            state.unmap();
            state.pins = SmallVec::default();
        });
        // Not before: where unpinning hangs, the registry shows whose.
        this.entry
            .update(|registry, slot| registry.released(slot, false));
    }

    #[inline]
    fn fixed(&self) -> &Fixed {
        &self.of
    }
}
