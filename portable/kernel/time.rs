// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Time spans and delays.
//!
//! C header: `include/linux/delay.h`.

/// A span of time, in nanoseconds.
#[derive(Clone, Copy)]
pub struct Delta(i64);

impl Delta {
    /// Returns a span of `millis` milliseconds. A span that does not fit is shortened to the
    /// longest one.
    pub const fn from_millis(millis: i64) -> Delta {
        Delta(millis.saturating_mul(1_000_000))
    }
}

/// Functions that wait.
pub mod delay {
    use super::Delta;
    use crate::bindings;

    /// The longest delay, in microseconds. `fsleep()` has no defined behaviour for a longer delay.
    const MAX_MICROS: u64 = i32::MAX as u64;

    /// Sleeps for at least `delta`, with `fsleep()`. Needs process context, with no spinlock held.
    ///
    /// A negative span, or one of more than `i32::MAX` microseconds (35 minutes), is a bug in the
    /// caller. The function then sleeps for the longest delay.
    pub fn fsleep(delta: Delta) {
        let micros = u64::try_from(delta.0)
            .map_or(MAX_MICROS, |nanos| nanos.div_ceil(1_000))
            .min(MAX_MICROS);
        // SAFETY: `fsleep()` accepts any number in this range. The module calls this crate in
        // process context, with no spinlock held.
        unsafe { bindings::shim_sleep(micros) };
    }
}
