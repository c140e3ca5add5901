// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the module logs and counts: `docs/observe.md` describes all of it.
//!
//! Each kind of message is logged when it first comes up, and again at most once a minute, with the
//! number of times that it came up in all: any process can ask for any address, and must not be able
//! to fill the log. For that reason, what was never meant for a GPU is logged once; and so is what the revocable client
//! leaves to the persistent one, which is no failure.
//!
//! Each refusal is counted, traced, and kept for a while. The one lock is let go before anything else is called.
//!
//! ib_core asks its clients in turn and tells none of them what the next one answers. If this module refuses a range in
//! `acquire`, the range may be another module's (an AMD GPU's, an FPGA's), and its client may take it. The system call then
//! succeeds. So such a refusal waits for the return of the system call, which is later than the answers of all clients
//! and earlier than anything that the application can see.

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
        EventInfo,
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

/// How long a kind of message stays silent after it was logged, in microseconds.
const SILENCE: u64 = 60_000_000;

/// When one kind of message was last logged, and how often it came up.
pub(crate) struct RatelimitState {
    /// When it was last logged: microseconds since boot, plus one; 0 is never.
    last: Atomic<u64>,
    /// How often it came up.
    count: Atomic<u64>,
}

impl RatelimitState {
    const fn new() -> Self {
        RatelimitState {
            last: Atomic::new(0),
            count: Atomic::new(0),
        }
    }

    /// Counts, and says whether it is time to log.
    fn pass(&self) -> Option<Times> {
        self.pass_after(SILENCE)
    }

    fn pass_after(&self, silence: u64) -> Option<Times> {
        let count = self.count.fetch_add(1, Relaxed).wrapping_add(1);
        let now = task::microseconds().saturating_add(1);
        let last = self.last.load(Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= silence;
        // Of several threads at once, one logs.
        (due && self.last.cmpxchg(last, now, Relaxed).is_ok()).then_some(Times(count))
    }

    /// How often it came up.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
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

/// What formats with `core` alone, for the kernel's formatting.
struct Plain<T>(T);

impl<T: core::fmt::Display> fmt::Display for Plain<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How often the client of each mode refused for each reason.
pub(crate) static REFUSED: [[Atomic<u64>; REASONS]; PinMode::ALL.len()] =
    [const { [const { Atomic::new(0) }; REASONS] }; PinMode::ALL.len()];

const REASONS: usize = Reason::ALL.len();

static HISTORY: StaticSpinLock<History> = StaticSpinLock::new(HISTORY_LOCK, History::new());

/// Runs `f` on the history, locked. `f` does not sleep and calls nobody.
pub(crate) fn history<R>(f: impl FnOnce(&mut History) -> R) -> R {
    HISTORY.with(f)
}

/// The client of that mode refused a registration. May sleep.
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
    // After `acquire` nobody else is asked; and what is handed on to this module's other client is no failure.
    let is_final = step != Step::Acquire || reason.is_handed_on();
    if is_final || !task::settle_at_return(&refusal, settled) {
        record(&refusal);
    }
}

/// The system call of a refusal returns, with success if another module's client took the range.
fn settled(refusal: &Refusal, is_taken: bool) {
    if !is_taken {
        record(refusal);
    } else if let Some(limit) = EVENTS.get(Event::OtherClient as usize) {
        limit.count.fetch_add(1, Relaxed);
    }
}

/// Counts, traces and keeps a refusal, and logs it if it is time.
fn record(refusal: &Refusal) {
    static LIMITS: [RatelimitState; REASONS] = [const { RatelimitState::new() }; REASONS];

    let reason = refusal.reason;
    let at = reason.index();
    // CAST: A number of a mode.
    if let Some(count) = REFUSED
        .get(refusal.mode as usize)
        .and_then(|all| all.get(at))
    {
        count.fetch_add(1, Relaxed);
    }
    trace::refused(refusal);
    // CAST: Not negative.
    let now = task::microseconds();
    history(|history| history.add(now, *refusal));

    let silence = match reason.is_logged_once() {
        true => u64::MAX,
        false => SILENCE,
    };
    if let Some(times) = LIMITS.get(at).and_then(|limit| limit.pass_after(silence)) {
        pr_notice!(
            "refused {:#x}+{:#x} of process {} in {}: {}{}\n",
            refusal.addr,
            refusal.len,
            refusal.task.tgid,
            Plain(DisplayCStr(refusal.step.name())),
            Plain(reason),
            times
        );
    }
}

/// What goes wrong beside refusals, by [`Event`].
pub(crate) static EVENTS: [RatelimitState; Event::ALL.len()] =
    [const { RatelimitState::new() }; Event::ALL.len()];

/// The line of an event: the memory and nvidia.ko's code, where there are such.
struct Line<'a> {
    span: Option<&'a Span>,
    info: &'a EventInfo,
    code: Option<c_int>,
    times: Times,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(span) = self.span {
            core::write!(f, "GPU memory {:#x}+{:#x}: ", span.start(), span.len())?;
        }
        f.write_str(self.info.message)?;
        if let Some(code) = self.code {
            core::write!(f, " (nvidia.ko: error {code})")?;
        }
        if !self.info.advice.is_empty() {
            core::write!(f, "; {}", self.info.advice)?;
        }
        self.times.fmt(f)
    }
}

/// Counts an event, and logs it if it is time.
fn report(event: Event, span: Option<&Span>, code: Option<c_int>) {
    // CAST: The number of a row.
    let at = event as usize;
    let (Some(limit), Some(info)) = (EVENTS.get(at), Event::ALL.get(at)) else {
        return;
    };
    let Some(times) = limit.pass() else {
        return;
    };
    let line = Line {
        span,
        info,
        code,
        times,
    };
    match info.severity {
        Severity::Info => pr_info!("{line}\n"),
        Severity::Warning => pr_warn!("{line}\n"),
        Severity::Error => pr_err!("{line}\n"),
    }
}

/// A persistent pin could not be put, and never will be.
pub(crate) fn leaked(span: &Span, ret: c_int) {
    report(Event::Leaked, Some(span), Some(ret));
}

/// A revocable pin was not put.
pub(crate) fn orphaned(span: &Span, why: PutError) {
    let (event, code) = match why {
        PutError::OtherProcess => (Event::OrphanedOtherProcess, None),
        PutError::Unlisted => (Event::OrphanedUnlisted, None),
        PutError::InCallback => (Event::OrphanedInCallback, None),
        PutError::Failed(ret) => (Event::OrphanedFailed, Some(ret)),
    };
    report(event, Some(span), code);
}

/// A DMA mapping could not be undone.
pub(crate) fn not_unmapped(span: &Span, ret: c_int) {
    report(Event::NotUnmapped, Some(span), Some(ret));
}

/// The module goes without knowing that the last callback has returned.
pub(crate) fn not_fenced(ret: c_int) {
    pr_err!(
        "nvidia.ko did not let its callbacks be waited for (error {})\n",
        ret
    );
}

/// nvidia.ko freed what it had said to have unpinned.
pub(crate) fn late_callback() {
    report(Event::LateCallback, None, None);
}

/// nvidia.ko freed what this module does not know.
pub(crate) fn spurious_callback() {
    report(Event::SpuriousCallback, None, None);
}

/// The scatter list of this memory may get an HCA page that is larger than 2 GiB.
pub(crate) fn large_hca_page(span: &Span) {
    report(Event::LargeHcaPage, Some(span), None);
}
