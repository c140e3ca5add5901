// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! GPU memory that may be freed while it is pinned, and its physical addresses.

use kernel::sync::Arc;

use crate::{
    callback_pin::{
        CallbackPin,
        Revoke, //
    },
    device::Gpus,
    phys::PhysRanges,
    ranges::{
        PageSize,
        Span, //
    },
    reason::Reason, //
};

/// GPU memory that is pinned until this value is dropped, or until the memory is freed: see
/// [`callback_pin`](crate::callback_pin).
///
/// The drop unpins, unless the callback has run. No callback starts after the drop, except if
/// nvidia.ko did not unpin. In that case the callback comes later and has nothing to do. Making and
/// dropping this value takes nvidia.ko's API lock, so the region's lock must not be held.
pub(crate) struct RevocablePin {
    held: CallbackPin,
    span: Span,
}

impl RevocablePin {
    /// Pins `span`: `nvidia_p2p_get_pages()`. Takes nvidia.ko's API lock. `region` may be revoked
    /// before this function returns.
    pub(crate) fn pin(span: Span, region: Arc<dyn Revoke>) -> Result<Self, Reason> {
        let held = CallbackPin::new(span, region)?;
        Ok(RevocablePin { held, span })
    }

    /// Returns the physical ranges of `pins`, the size of their smallest pages, and their GPUs.
    /// `pins` back the virtual addresses from `va` on. Fails if the memory is gone, or if this
    /// module cannot map it. Reads in batches, because a callback waits for the current batch.
    pub(crate) fn read_all(pins: &[Self], va: u64) -> Result<(PhysRanges, PageSize, Gpus), Reason> {
        let mut page = PageSize::KIB_128;
        let (memory, gpus) = PhysRanges::read(va, |reader| {
            pins.iter().try_for_each(|pin| {
                reader.batches(|reader, from| {
                    pin.held.read(|table| {
                        // SAFETY: The table lives until `free_callback` returns for it, and that
                        // call does not return while a `TableGuard` exists. The borrow ends with
                        // this closure.
                        let checked = unsafe { table.table().check(pin.span) }?;
                        if checked.cacheable {
                            return Err(Reason::CpuCacheable);
                        }
                        page = page.min(checked.page);
                        Ok(checked.read(from, reader))
                    })
                })
            })
        })?;
        Ok((memory, page, gpus))
    }
}
