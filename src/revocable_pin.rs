// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! GPU memory that may be freed while it is pinned, and where it is.

use kernel::{
    prelude::*,
    sync::Arc, //
};

use crate::{
    device::Gpus,
    extents::{
        PageSize,
        Run,
        Span, //
    },
    pci::{
        BarFinder,
        BarRun, //
    },
    pin::{
        Alive,
        Held,
        Revoke, //
    },
    refusal::Refusal, //
};

/// GPU memory that is pinned until this is dropped, or until it is freed: see [`pin`](crate::pin).
///
/// The drop unpins, unless the callback has run. After it no callback starts, except where the provider would not
/// unpin: then one comes some time, and finds nothing to do. It is neither made nor dropped with the region's lock held:
/// both take the provider's API lock.
pub(crate) struct RevocablePin {
    /// Unpins.
    _held: Held,
    page: PageSize,
    gpus: Gpus,
    runs: KVVec<BarRun>,
}

impl RevocablePin {
    /// `nvidia_p2p_get_pages()`. Takes nvidia.ko's API lock. `region` may be revoked before this
    /// returns.
    pub(crate) fn pin(span: Span, region: Arc<dyn Revoke>) -> Result<Self, Refusal> {
        let held = Held::new(span, region)?;
        let (page, gpus, runs) = held.read(|table| copy(&table, span))?;
        Ok(RevocablePin {
            _held: held,
            page,
            gpus,
            runs,
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
    pub(crate) fn runs(&self) -> &[BarRun] {
        &self.runs
    }
}

/// So many runs are kept on the stack.
const FEW: usize = 16;

/// The page size of `table`, and where its pages are: on which GPUs, and at which addresses.
fn copy(table: &Alive<'_>, span: Span) -> Result<(PageSize, Gpus, KVVec<BarRun>), Refusal> {
    // SAFETY: The table lives until `free_callback` returns for it, and that call does not return
    // while there is an `Alive`. The borrow ends with this function.
    let checked = unsafe { table.table().check(span) }?;
    if checked.cacheable {
        return Err(Refusal::CpuCacheable);
    }
    // Where they are few, one walk finds them.
    let mut few = [Run { addr: 0, len: 0 }; FEW];
    let mut count = 0;
    checked.runs(|run| {
        if let Some(place) = few.get_mut(count) {
            *place = run;
        }
        count += 1;
    });
    let mut runs = KVVec::with_capacity(count, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
    // Tables before 2.0 do not say what kind of memory they are for.
    let mut bars = BarFinder::default();
    let mut found = true;
    let add = |run| {
        if found {
            // Room was made for all.
            found = bars
                .find(run)
                .is_ok_and(|run| runs.push_within_capacity(run).is_ok());
        }
    };
    match few.get(..count) {
        Some(few) => few.iter().copied().for_each(add),
        None => checked.runs(add),
    }
    if !found {
        return Err(Refusal::NotInBar);
    }
    Ok((checked.page, bars.gpus(), runs))
}
