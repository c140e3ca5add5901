// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! GPU memory that may be freed while it is pinned, and where it is.

use kernel::{
    prelude::*,
    sync::Arc, //
};

use crate::{
    callback_pin::{
        CallbackPin,
        Revoke,
        TableGuard, //
    },
    device::Gpus,
    pci::{
        BarFinder,
        BarRange, //
    },
    ranges::{
        AddrRange,
        PageSize,
        Span, //
    },
    reason::Reason, //
};

/// GPU memory that is pinned until this is dropped, or until it is freed: see [`callback_pin`](crate::callback_pin).
///
/// The drop unpins, unless the callback has run. After it no callback starts, except where the provider would not
/// unpin: then one comes some time, and finds nothing to do. It is neither made nor dropped with the region's lock held:
/// both take the provider's API lock.
pub(crate) struct RevocablePin {
    /// Unpins.
    _pin: CallbackPin,
    page: PageSize,
    gpus: Gpus,
    ranges: KVVec<BarRange>,
}

impl RevocablePin {
    /// `nvidia_p2p_get_pages()`. Takes nvidia.ko's API lock. `region` may be revoked before this
    /// returns.
    pub(crate) fn pin(span: Span, region: Arc<dyn Revoke>) -> Result<Self, Reason> {
        let pin = CallbackPin::new(span, region)?;
        let (page, gpus, ranges) = pin.read(|table| copy(&table, span))?;
        Ok(RevocablePin {
            _pin: pin,
            page,
            gpus,
            ranges,
        })
    }

    /// The size of its pages.
    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    /// In whose BARs they are.
    pub(crate) fn gpus(&self) -> Gpus {
        self.gpus
    }

    /// Where the pages are, in the order of virtual addresses.
    pub(crate) fn ranges(&self) -> &[BarRange] {
        &self.ranges
    }
}

/// So many ranges fit on the stack.
const FEW: usize = 16;

/// The page size of `table`, and where its pages are: on which GPUs, and at which addresses.
fn copy(table: &TableGuard<'_>, span: Span) -> Result<(PageSize, Gpus, KVVec<BarRange>), Reason> {
    // SAFETY: The table lives until `free_callback` returns for it, and that call does not return
    // while there is a `TableGuard`. The borrow ends with this function.
    let checked = unsafe { table.table().check(span) }?;
    if checked.cacheable {
        return Err(Reason::CpuCacheable);
    }
    // Where they are few, one walk finds them.
    let mut few = [AddrRange { addr: 0, len: 0 }; FEW];
    let mut count = 0;
    checked.ranges(|range| {
        if let Some(place) = few.get_mut(count) {
            *place = range;
        }
        count += 1;
    });
    let mut ranges = KVVec::with_capacity(count, GFP_KERNEL).map_err(|_| Reason::NoMemory)?;
    // Tables before 2.0 do not say what kind of memory they are for.
    let mut bars = BarFinder::default();
    let mut found = true;
    let add = |range| {
        if found {
            // Room was made for all.
            found = bars
                .find(range)
                .is_ok_and(|range| ranges.push_within_capacity(range).is_ok());
        }
    };
    match few.get(..count) {
        Some(few) => few.iter().copied().for_each(add),
        None => checked.ranges(add),
    }
    if !found {
        return Err(Reason::NotInBar);
    }
    Ok((checked.page, bars.gpus(), ranges))
}
