// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the module says about itself.
//!
//! A refusal is logged once for each cause, and again at most once a minute with the number of those
//! that were not: any process can ask for any address, and must not be able to fill the log.

use core::fmt::Display as _;

use kernel::fmt;
use kernel::prelude::*;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Relaxed;

use crate::extents::Span;
use crate::refusal::Refusal;
use crate::sys;

/// How long a cause stays silent after it was logged, in seconds.
const SILENCE: i64 = 60;

/// When something was last logged, and how often it was not since.
struct Limit {
    /// Seconds since boot, plus one; 0 is never.
    last: Atomic<i64>,
    suppressed: Atomic<u64>,
}

impl Limit {
    const fn new() -> Self {
        Limit {
            last: Atomic::new(0),
            suppressed: Atomic::new(0),
        }
    }

    /// If it is time to log, the number of times that it was not before.
    fn pass(&self) -> Option<u64> {
        let now = sys::seconds().saturating_add(1);
        let last = self.last.load(Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= SILENCE;
        // Of several threads at once, one logs.
        if due && self.last.cmpxchg(last, now, Relaxed).is_ok() {
            return Some(self.suppressed.xchg(0, Relaxed));
        }
        self.suppressed.add(1, Relaxed);
        None
    }
}

static REFUSALS: [Limit; Refusal::KINDS] = [const { Limit::new() }; Refusal::KINDS];
static LEAKED: Limit = Limit::new();
static ORPHANED: Limit = Limit::new();
static NOT_UNMAPPED: Limit = Limit::new();

/// [`Refusal`] for the kernel's formatting.
struct Words<'a>(&'a Refusal);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A registration was refused in `step`.
pub(crate) fn refused(step: &str, addr: u64, len: u64, refusal: &Refusal) {
    let Some(suppressed) = REFUSALS.get(refusal.kind()).and_then(Limit::pass) else {
        return;
    };
    pr_notice!(
        "refused {:#x}+{:#x} of process {} in {}: {}{}\n",
        addr,
        len,
        current!().tgid(),
        step,
        Words(refusal),
        Suppressed(suppressed)
    );
}

/// An unpin failed: the memory stays pinned for good.
pub(crate) fn leaked(span: &Span, ret: c_int) {
    if let Some(suppressed) = LEAKED.pass() {
        pr_err!(
            "GPU memory {:#x}+{:#x} stays pinned: nvidia.ko could not unpin (error {}){}\n",
            span.start(),
            span.len(),
            ret,
            Suppressed(suppressed)
        );
    }
}

/// A revocable pin was released by a process that nvidia.ko does not take it from.
pub(crate) fn orphaned(span: &Span) {
    if let Some(suppressed) = ORPHANED.pass() {
        pr_info!(
            "GPU memory {:#x}+{:#x} stays pinned until it is freed: another process released it{}\n",
            span.start(),
            span.len(),
            Suppressed(suppressed)
        );
    }
}

/// A DMA mapping could not be undone.
pub(crate) fn not_unmapped(span: &Span, ret: c_int) {
    if let Some(suppressed) = NOT_UNMAPPED.pass() {
        pr_err!(
            "GPU memory {:#x}+{:#x} stays mapped: nvidia.ko could not unmap (error {}){}\n",
            span.start(),
            span.len(),
            ret,
            Suppressed(suppressed)
        );
    }
}

/// nvidia.ko freed what this module does not know.
pub(crate) fn stray_callback() {
    pr_err!("nvidia.ko revoked a pin that does not exist\n");
}

/// The tail of a message.
struct Suppressed(u64);

impl fmt::Display for Suppressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => core::write!(f, " ({count} more since the last such message)"),
        }
    }
}
