// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the module logs and counts: `docs/observe.md` describes all of it.
//!
//! Each kind of message is logged when it first comes up, and again at most once a minute, with the
//! number of times that it came up in all: any process can ask for any address, and must not be able
//! to fill the log. For that reason, what was never meant for a GPU is logged once.
//!
//! Each refusal is counted, traced, and kept for a while; nothing is allocated for it, and the one lock
//! is let go before anything else is called.

use kernel::{
    fmt,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

use crate::{
    extents::Span,
    record::{
        Flavour,
        Journal,
        Refused,
        Step,
        Word, //
    },
    refusal::{
        Event,
        Incident,
        Kept,
        Refusal,
        Severity, //
    },
    sync::{
        StaticSpinLock,
        JOURNAL_LOCK, //
    },
    task,
    trace, //
};

/// How long a kind of message stays silent after it was logged, in microseconds.
const SILENCE: i64 = 60_000_000;

/// One kind of message.
pub(crate) struct Kind {
    /// When it was last logged: microseconds since boot, plus one; 0 is never.
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
        self.pass_after(SILENCE)
    }

    fn pass_after(&self, silence: i64) -> Option<Times> {
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

/// How often each flavour refused for each kind of reason.
pub(crate) static REFUSED: [[Atomic<u64>; REASONS]; Flavour::ALL.len()] =
    [const { [const { Atomic::new(0) }; REASONS] }; Flavour::ALL.len()];

const REASONS: usize = Refusal::REASONS.len();

static JOURNAL: StaticSpinLock<Journal> = StaticSpinLock::new(JOURNAL_LOCK, Journal::new());

/// Runs `f` on the journal, locked. `f` does not sleep and calls nobody.
pub(crate) fn journal<R>(f: impl FnOnce(&mut Journal) -> R) -> R {
    JOURNAL.with(f)
}

/// The client of that flavour refused a registration.
pub(crate) fn refused(flavour: Flavour, step: Step, addr: u64, len: u64, refusal: Refusal) {
    static KINDS: [Kind; REASONS] = [const { Kind::new() }; REASONS];

    let refusal = refusal.seen(|| task::place(addr));
    let kind = refusal.kind();
    // CAST: A number of a flavour.
    if let Some(count) = REFUSED.get(flavour as usize).and_then(|all| all.get(kind)) {
        count.fetch_add(1, Relaxed);
    }
    let refused = Refused {
        flavour,
        step,
        refusal,
        addr,
        len,
        task: task::task(),
    };
    trace::refused(&refused);
    // CAST: Not negative.
    let now = task::microseconds() as u64;
    journal(|journal| journal.add(now, refused));

    let silence = match refusal.is_foreign() {
        true => i64::MAX,
        false => SILENCE,
    };
    if let Some(times) = KINDS.get(kind).and_then(|kind| kind.pass_after(silence)) {
        pr_notice!(
            "refused {:#x}+{:#x} of process {} in {}: {}{}\n",
            addr,
            len,
            refused.task.tgid,
            Plain(Word(step.name())),
            Plain(refusal),
            times
        );
    }
}

/// What goes wrong beside refusals, by [`Event`].
pub(crate) static EVENTS: [Kind; Event::ALL.len()] = [const { Kind::new() }; Event::ALL.len()];

/// The line of an event: the memory and nvidia.ko's code, where there are such.
struct Line<'a> {
    span: Option<&'a Span>,
    incident: &'a Incident,
    code: Option<c_int>,
    times: Times,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(span) = self.span {
            core::write!(f, "GPU memory {:#x}+{:#x}: ", span.start(), span.len())?;
        }
        f.write_str(self.incident.message)?;
        if let Some(code) = self.code {
            core::write!(f, " (nvidia.ko: error {code})")?;
        }
        if !self.incident.advice.is_empty() {
            core::write!(f, "; {}", self.incident.advice)?;
        }
        self.times.fmt(f)
    }
}

/// Counts an event, and logs it if it is time.
fn tell(event: Event, span: Option<&Span>, code: Option<c_int>) {
    // CAST: The number of a row.
    let at = event as usize;
    let (Some(kind), Some(incident)) = (EVENTS.get(at), Event::ALL.get(at)) else {
        return;
    };
    let Some(times) = kind.pass() else {
        return;
    };
    let line = Line {
        span,
        incident,
        code,
        times,
    };
    match incident.severity {
        Severity::Info => pr_info!("{line}\n"),
        Severity::Warning => pr_warn!("{line}\n"),
        Severity::Error => pr_err!("{line}\n"),
    }
}

/// A persistent pin could not be put, and never will be.
pub(crate) fn leaked(span: &Span, ret: c_int) {
    tell(Event::Lost, Some(span), Some(ret));
}

/// A revocable pin was not put.
pub(crate) fn kept(span: &Span, why: Kept) {
    let (event, code) = match why {
        Kept::OtherProcess => (Event::KeptOtherProcess, None),
        Kept::Unlisted => (Event::KeptUnlisted, None),
        Kept::InCallback => (Event::KeptInCallback, None),
        Kept::Failed(ret) => (Event::KeptFailed, Some(ret)),
    };
    tell(event, Some(span), code);
}

/// A DMA mapping could not be undone.
pub(crate) fn not_unmapped(span: &Span, ret: c_int) {
    tell(Event::NotUnmapped, Some(span), Some(ret));
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
    tell(Event::LateCallback, None, None);
}

/// nvidia.ko freed what this module does not know.
pub(crate) fn stray_callback() {
    tell(Event::StrayCallback, None, None);
}
