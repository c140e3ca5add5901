// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The tracepoints `nvidia_peermem:*`.
//!
//! C side: [`trace.c`](trace.c).

use kernel::prelude::*;

use crate::{
    c,
    history::Refusal,
    registry::{
        Registration,
        Transition, //
    }, //
};

/// Calls the tracepoint `nvidia_peermem:refused`.
pub(crate) fn refused(refusal: &Refusal) {
    // SAFETY: The strings are NUL-terminated, and C reads them only during the call.
    unsafe {
        c::peermem_trace_refused(
            refusal.mode.name().as_char_ptr(),
            refusal.step.name().as_char_ptr(),
            refusal.reason.name().as_char_ptr(),
            refusal.reason.code(),
            refusal.addr,
            refusal.len,
            refusal.task.tgid,
        );
    }
}

/// Returns `true` if any of the tracepoints `registered`, `mapped`, `revoked` and `released` is
/// enabled.
pub(crate) fn is_enabled() -> bool {
    // SAFETY: The function has no preconditions.
    unsafe { c::peermem_trace_is_enabled() }
}

/// Calls the tracepoint of `transition`. `registration` is the registration after the transition.
pub(crate) fn life(transition: Transition, registration: Option<Registration>) {
    // SAFETY: The strings are NUL-terminated, and C reads them only during the call.
    unsafe {
        match (transition, registration) {
            (Transition::Registered, Some(Registration { number, info, .. })) => {
                c::peermem_trace_registered(
                    number,
                    info.mode.name().as_char_ptr(),
                    info.span.start(),
                    info.span.len(),
                    info.page.bytes(),
                    // CAST: `u64` is not narrower than `usize`.
                    info.chunks as u64,
                    info.task.tgid,
                )
            }
            (Transition::Mapped, Some(mapped)) => {
                let hca = mapped.hca.map_or(0, |hca| hca.0);
                c::peermem_trace_mapped(mapped.number, mapped.entries, hca);
            }
            (Transition::Revoked, Some(revoked)) => c::peermem_trace_revoked(revoked.number),
            (Transition::Released(number, state), _) => {
                c::peermem_trace_released(number, state.name().as_char_ptr());
            }
            (_, None) => {}
        }
    }
}
