// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! GPU memory that may be freed while it is pinned, and where it is.

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

/// GPU memory that is pinned until this is dropped, or until it is freed: see [`callback_pin`](crate::callback_pin).
///
/// The drop unpins, unless the callback has run. After it no callback starts, except where the provider would not
/// unpin: then one comes some time, and finds nothing to do. It is neither made nor dropped with the region's lock held:
/// both take the provider's API lock.
pub(crate) struct RevocablePin {
    /// Unpins.
    held: CallbackPin,
    span: Span,
}

impl RevocablePin {
    /// `nvidia_p2p_get_pages()`. Takes nvidia.ko's API lock. `region` may be revoked before this
    /// returns.
    pub(crate) fn pin(span: Span, region: Arc<dyn Revoke>) -> Result<Self, Reason> {
        let held = CallbackPin::new(span, region)?;
        Ok(RevocablePin { held, span })
    }

    /// Returns where the memory of `pins` is, which backs the virtual addresses from `va` on, the size of its pages, and in whose
    /// BARs it is. Refused where it is gone, or nothing that this module can map. Read in batches, since a callback waits
    /// for the one under way.
    pub(crate) fn read_all(pins: &[Self], va: u64) -> Result<(PhysRanges, PageSize, Gpus), Reason> {
        let mut page = PageSize::KIB_128;
        let (memory, gpus) = PhysRanges::read(va, |reader| {
            pins.iter().try_for_each(|pin| {
                reader.batches(|reader, from| {
                    pin.held.read(|table| {
                        // SAFETY: The table lives until `free_callback` returns for it, and that call does not return
                        // while there is a `TableGuard`. The borrow ends with this function.
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
