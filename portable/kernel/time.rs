// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Time to wait.

/// A span of time, in nanoseconds.
#[derive(Clone, Copy)]
pub struct Delta(i64);

impl Delta {
    pub const fn from_millis(millis: i64) -> Delta {
        Delta(millis.saturating_mul(1_000_000))
    }
}

pub mod delay {
    use super::Delta;

    /// Sleeps for at least so long.
    pub fn fsleep(delta: Delta) {
        // CAST: Not negative.
        let micros = delta.0.max(0) as u64 / 1_000;
        // SAFETY: Process context without a spinlock, as in all that sleeps.
        unsafe { crate::bindings::shim_sleep(micros) };
    }
}
