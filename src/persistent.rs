// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of one registration in persistent mode: the pages stay pinned until `release`.
//!
//! ```text
//! acquire    PersistentMr::pin      one pin for each allocation, usually one, until release
//! get_pages  (nothing: the pin exists, and no one needs the ticket)
//! dma_map    PersistentMr::map      one mapping, one scatter list
//! dma_unmap  PersistentMr::unmap
//! put_pages  (nothing)
//! release    PersistentMr::release  unpins, frees the scatter list
//! ```
//!
//! NVIDIA's nvidia-peermem pins twice, in `acquire` and again in `get_pages`. A single pin in
//! `acquire` costs half as much, and avoids taking nvidia.ko's lock under ib_core's `mapping_lock`.
//!
//! A range over several allocations has one pin for each allocation ([`chunks`]), and one scatter
//! list.
//!
//! The region frees all of its own resources, and never relies on pointers that ib_core passes
//! back.
//!
//! Uses only `core` and [`env`].

use super::{
    chunks,
    device::Gpus,
    env::{self, *},
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

/// The state of a registration. The fields are dropped in the order of their declaration.
#[derive(Default)]
pub(crate) struct State {
    /// Set while this module maps the pins: from `map` until `unmap` or `release`, whichever comes
    /// first.
    mapping: Option<BarMapping>,
    /// If nvidia.ko maps the pins, each pin holds its own mapping.
    pins: SmallVec<PersistentPin>,
    /// Set from the first `map` on. ib_core writes to the first and last entry of the table before
    /// it calls `dma_unmap`, even after an invalidation. The table therefore stays until `release`.
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
/// ib_core makes the calls for one region one after another, so the lock is never contended. The
/// lock is held across calls to nvidia.ko, which never calls back in this mode.
pub(crate) type PersistentMr = Registered<Fixed, Lock<State>>;

impl Mr for PersistentMr {
    const MODE: PinMode = PinMode::Persistent;

    fn pin(stats: MrStats, addr: u64, len: u64) -> Result<Shared<Self>, Reason> {
        let fixed = Fixed::new(stats, addr, len)?;
        let mr = Registered::new(fixed, Lock::new(State::default()))?;
        mr.state.with(|state| {
            state.pins = chunks::cover(
                mr.of.span,
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

    /// Ignores the ticket, because this mode never revokes.
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
            mr::note_large_hca_page(&self.of.span, &table);
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
        // The entry is released only now. If unpinning hangs, the registry still shows the owner.
        this.entry
            .update(|registry, slot| registry.released(slot, false));
    }

    #[inline]
    fn fixed(&self) -> &Fixed {
        &self.of
    }
}
