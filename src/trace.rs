// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The tracepoints `nvidia_peermem:*`.
//!
//! C side: [`trace.c`](trace.c).

use kernel::prelude::*;

use crate::{
    c,
    record::Refused,
    registry::{
        Event,
        Living, //
    }, //
};

/// The tracepoint `nvidia_peermem:refused`.
pub(crate) fn refused(refused: &Refused) {
    // SAFETY: The strings are NUL-terminated, and read during the call alone.
    unsafe {
        c::peermem_trace_refused(
            refused.flavour.name().as_char_ptr(),
            refused.step.name().as_char_ptr(),
            refused.refusal.name().as_char_ptr(),
            refused.refusal.code(),
            refused.addr,
            refused.len,
            refused.task.tgid,
        );
    }
}

/// The tracepoints of a registration's life.
pub(crate) fn life(event: Event) {
    // SAFETY: The strings are NUL-terminated, and read during the call alone.
    unsafe {
        match event {
            Event::Registered(Living { number, new, .. }) => c::peermem_trace_registered(
                number,
                new.flavour.name().as_char_ptr(),
                new.span.start(),
                new.span.len(),
                new.page.bytes(),
                // CAST: No narrower.
                new.pieces as u64,
                new.task.tgid,
            ),
            Event::Mapped(living) => {
                let hca = living.hca.map_or(0, |hca| hca.0);
                c::peermem_trace_mapped(living.number, living.entries, hca);
            }
            Event::Revoked(number) => c::peermem_trace_revoked(number),
            Event::Released(number, state) => {
                c::peermem_trace_released(number, state.name().as_char_ptr());
            }
        }
    }
}
