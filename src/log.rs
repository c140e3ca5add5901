// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Log messages and counters. `docs/observe.md` describes all of them.
//!
//! Each kind of message is logged when it first occurs, and then at most once a minute with the
//! total count. Any process can ask for any address, and must not be able to fill the log. Two
//! kinds of refusals are logged only once: refusals of ranges that were never meant for a GPU, and
//! refusals by which the revocable client leaves a range to the persistent one. Refusals of the
//! second kind are not failures.
//!
//! Each refusal is counted, traced, and kept for a while. The history's lock is released before
//! anything else is called.
//!
//! ib_core asks its clients in turn, and does not tell a client what the next one answers. A range
//! that this module refuses in `acquire` may belong to another module (for an AMD GPU or an FPGA).
//! If that module's client accepts the range, the system call succeeds. A refusal in `acquire` is
//! therefore recorded only when the system call returns. All clients have answered by then, and the
//! application cannot see the result earlier.

use kernel::{
    fmt,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

use crate::{
    history::{
        DisplayCStr,
        History,
        PinMode,
        Refusal,
        Step, //
    },
    ranges::Span,
    reason::{
        Event,
        PutError,
        Reason,
        Severity, //
    },
    sync::{
        StaticSpinLock,
        HISTORY_LOCK, //
    },
    task,
    trace, //
};

/// Minimum time between two messages of one kind, in microseconds.
const SILENCE: u64 = 60_000_000;

/// Rate limit for one kind of message: the time of the last message, and the number of occurrences.
pub(crate) struct RatelimitState {
    /// Time of the last message, in microseconds since boot plus one; 0 means never.
    last: Atomic<u64>,
    /// Number of occurrences.
    count: Atomic<u64>,
}

impl RatelimitState {
    const fn new() -> Self {
        RatelimitState {
            last: Atomic::new(0),
            count: Atomic::new(0),
        }
    }

    /// Counts an occurrence. If a message is due, returns the end of its text: the number of
    /// occurrences, or nothing for the first occurrence. A message is due if none was
    /// logged in the last `silence` microseconds.
    fn pass(
        &self,
        silence: u64,
    ) -> Option<Written<impl Fn(&mut fmt::Formatter<'_>) -> fmt::Result>> {
        let count = self.count.fetch_add(1, Relaxed).wrapping_add(1);
        let now = task::microseconds().saturating_add(1);
        let last = self.last.load(Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= silence;
        // If several threads get here at once, only one of them logs.
        let is_next = due && self.last.cmpxchg(last, now, Relaxed).is_ok();
        is_next.then_some(Written(move |f: &mut fmt::Formatter<'_>| match count {
            0 | 1 => Ok(()),
            count => core::write!(f, " ({count} times so far)"),
        }))
    }

    /// Returns the number of occurrences.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }
}

/// Adapter that prints by calling a function, for the kernel's formatting.
pub(crate) struct Written<F>(pub(crate) F);

impl<F: Fn(&mut fmt::Formatter<'_>) -> fmt::Result> fmt::Display for Written<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.0)(f)
    }
}

/// Number of refusals for each mode and reason.
pub(crate) static REFUSED: [[Atomic<u64>; REASONS]; PinMode::ALL.len()] =
    [const { [const { Atomic::new(0) }; REASONS] }; PinMode::ALL.len()];

const REASONS: usize = Reason::ALL.len();

static HISTORY: StaticSpinLock<History> = StaticSpinLock::new(HISTORY_LOCK, History::new());

/// Runs `f` on the history with its lock held. `f` must not sleep or call other parts of the
/// module.
pub(crate) fn history<R>(f: impl FnOnce(&mut History) -> R) -> R {
    HISTORY.with(f)
}

/// Records a refusal by the client of `mode`, or defers the record to the return of the system
/// call. May sleep.
///
/// Not inlined, because the caller's stack frame would otherwise hold the refusal, too.
#[cold]
#[inline(never)]
pub(crate) fn refused(mode: PinMode, step: Step, addr: u64, len: u64, reason: Reason) {
    let reason = reason.refine(|| task::vma_kind(addr));
    let refusal = Refusal {
        mode,
        step,
        reason,
        addr,
        len,
        task: task::task(),
    };
    // After `acquire`, no other client is asked. A refusal that leaves the range to this module's
    // other client is not a failure. Both kinds of refusals are recorded at once.
    let is_final = step != Step::Acquire || reason.is_handed_on();
    if is_final || !task::settle_at_return(&refusal, settled) {
        record(&refusal);
    }
}

/// Records the refusal when its system call returns. `is_taken` is `true` if the system call
/// succeeded, because another module's client accepted the range.
fn settled(refusal: &Refusal, is_taken: bool) {
    if !is_taken {
        record(refusal);
    } else if let Some(limit) = EVENTS.get(Event::OtherClient as usize) {
        limit.count.fetch_add(1, Relaxed);
    }
}

/// Counts, traces and keeps a refusal, and logs it if a message is due.
fn record(refusal: &Refusal) {
    static LIMITS: [RatelimitState; REASONS] = [const { RatelimitState::new() }; REASONS];

    let reason = refusal.reason;
    let at = reason.index();
    // CAST: The number of a mode is an index of `REFUSED`.
    if let Some(count) = REFUSED
        .get(refusal.mode as usize)
        .and_then(|all| all.get(at))
    {
        count.fetch_add(1, Relaxed);
    }
    trace::refused(refusal);
    let now = task::microseconds();
    history(|history| history.add(now, *refusal));

    let silence = match reason.is_logged_once() {
        true => u64::MAX,
        false => SILENCE,
    };
    if let Some(times) = LIMITS.get(at).and_then(|limit| limit.pass(silence)) {
        let step = DisplayCStr(refusal.step.name());
        let what = Written(|f: &mut fmt::Formatter<'_>| core::write!(f, "{step}: {reason}"));
        pr_notice!(
            "refused {:#x}+{:#x} of process {} in {}{}\n",
            refusal.addr,
            refusal.len,
            refusal.task.tgid,
            what,
            times
        );
    }
}

/// Counters of events other than refusals, indexed by [`Event`].
pub(crate) static EVENTS: [RatelimitState; Event::ALL.len()] =
    [const { RatelimitState::new() }; Event::ALL.len()];

/// Counts an event, and logs it with the memory and nvidia.ko's code if a message is due.
pub(crate) fn report(event: Event, span: Option<&Span>, code: Option<c_int>) {
    // CAST: The number of an event is the number of its row.
    let at = event as usize;
    let (Some(limit), Some(info)) = (EVENTS.get(at), Event::ALL.get(at)) else {
        return;
    };
    let Some(times) = limit.pass(SILENCE) else {
        return;
    };
    let line = Written(|f: &mut fmt::Formatter<'_>| {
        if let Some(span) = span {
            core::write!(f, "GPU memory {:#x}+{:#x}: ", span.start(), span.len())?;
        }
        f.write_str(info.message)?;
        if let Some(code) = code {
            core::write!(f, " (nvidia.ko: error {code})")?;
        }
        if !info.advice.is_empty() {
            core::write!(f, "; {}", info.advice)?;
        }
        (times.0)(f)
    });
    match info.severity {
        Severity::Info => pr_info!("{line}\n"),
        Severity::Warning => pr_warn!("{line}\n"),
        Severity::Error => pr_err!("{line}\n"),
    }
}

/// Reports that a revocable pin was not put.
pub(crate) fn orphaned(span: &Span, why: PutError) {
    let (event, code) = match why {
        PutError::OtherProcess => (Event::OrphanedOtherProcess, None),
        PutError::Unlisted => (Event::OrphanedUnlisted, None),
        PutError::InCallback => (Event::OrphanedInCallback, None),
        PutError::Failed(ret) => (Event::OrphanedFailed, Some(ret)),
    };
    report(event, Some(span), code);
}
