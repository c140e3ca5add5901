// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the module says about itself.
//!
//! Each kind of message is logged when it first comes up, and again at most once a minute, with the
//! number of times that it came up in all: any process can ask for any address, and must not be able
//! to fill the log.

use core::fmt::Display as _;

use kernel::fmt;
use kernel::prelude::*;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Relaxed;

use crate::extents::Span;
use crate::refusal::Refusal;
use crate::sys;

/// How long a kind of message stays silent after it was logged, in seconds.
const SILENCE: i64 = 60;

/// One kind of message.
struct Kind {
    /// When it was last logged: seconds since boot, plus one; 0 is never.
    last: Atomic<i64>,
    /// How often it came up.
    count: Atomic<u64>,
}

impl Kind {
    const fn new() -> Self {
        Kind {
            last: Atomic::new(0),
            count: Atomic::new(0),
        }
    }

    /// Counts, and says whether it is time to log.
    fn pass(&self) -> Option<Times> {
        let count = self.count.fetch_add(1, Relaxed).wrapping_add(1);
        let now = sys::seconds().saturating_add(1);
        let last = self.last.load(Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= SILENCE;
        // Of several threads at once, one logs.
        (due && self.last.cmpxchg(last, now, Relaxed).is_ok()).then_some(Times(count))
    }
}

/// The tail of a message that came up before.
struct Times(u64);

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 | 1 => Ok(()),
            count => core::write!(f, " ({count} times so far)"),
        }
    }
}

/// [`Refusal`] for the kernel's formatting.
struct Words<'a>(&'a Refusal);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A registration was refused in `step`.
pub(crate) fn refused(step: &str, addr: u64, len: u64, refusal: &Refusal) {
    static KINDS: [Kind; Refusal::KINDS] = [const { Kind::new() }; Refusal::KINDS];

    if let Some(times) = KINDS.get(refusal.kind()).and_then(Kind::pass) {
        pr_notice!(
            "refused {:#x}+{:#x} of process {} in {}: {}{}\n",
            addr,
            len,
            current!().tgid(),
            step,
            Words(refusal),
            times
        );
    }
}

/// A persistent pin could not be put, and never will be.
pub(crate) fn leaked(span: &Span, ret: c_int) {
    static KIND: Kind = Kind::new();

    if let Some(times) = KIND.pass() {
        pr_err!(
            "GPU memory {:#x}+{:#x} is lost: nvidia.ko could not unpin (error {}){}\n",
            span.start(),
            span.len(),
            ret,
            times
        );
    }
}

/// A revocable pin could not be put.
pub(crate) fn not_unpinned(span: &Span, ret: c_int) {
    static KIND: Kind = Kind::new();

    if let Some(times) = KIND.pass() {
        pr_err!(
            "GPU memory {:#x}+{:#x} stays pinned until it is freed: nvidia.ko could not unpin (error {}){}\n",
            span.start(),
            span.len(),
            ret,
            times
        );
    }
}

/// A revocable pin was released by a process that nvidia.ko does not take it from.
pub(crate) fn orphaned(span: &Span) {
    static KIND: Kind = Kind::new();

    if let Some(times) = KIND.pass() {
        pr_info!(
            "GPU memory {:#x}+{:#x} stays pinned until it is freed: another process released it{}\n",
            span.start(),
            span.len(),
            times
        );
    }
}

/// A DMA mapping could not be undone.
pub(crate) fn not_unmapped(span: &Span, ret: c_int) {
    static KIND: Kind = Kind::new();

    if let Some(times) = KIND.pass() {
        pr_err!(
            "GPU memory {:#x}+{:#x} stays mapped until it is unpinned: nvidia.ko could not unmap (error {}){}\n",
            span.start(),
            span.len(),
            ret,
            times
        );
    }
}

/// The module goes without knowing that the last callback has returned.
pub(crate) fn not_fenced(ret: c_int) {
    pr_err!(
        "nvidia.ko did not let its callbacks be waited for (error {})\n",
        ret
    );
}

/// nvidia.ko freed what this module does not know.
pub(crate) fn stray_callback() {
    pr_err!("nvidia.ko revoked a pin that does not exist\n");
}
