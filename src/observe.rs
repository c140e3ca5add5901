// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the module says about itself: `docs/observe.md` describes all of it.
//!
//! Each kind of message is logged when it first comes up, and again at most once a minute, with the
//! number of times that it came up in all: any process can ask for any address, and must not be able
//! to fill the log. For that reason, what was never meant for a GPU is logged once.
//!
//! Each refusal is counted, traced, and kept for a while; nothing is allocated for it, and the one lock
//! is let go before anything else is called.

use kernel::fmt;
use kernel::prelude::*;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Relaxed;

use crate::extents::Span;
use crate::pin::Kept;
use crate::record;
use crate::record::Flavour;
use crate::record::Journal;
use crate::record::Refused;
use crate::record::Step;
use crate::record::Word;
use crate::refusal::Refusal;
use crate::roll;
use crate::roll::Living;
use crate::sys;

/// How long a kind of message stays silent after it was logged, in microseconds.
const SILENCE: i64 = 60_000_000;

/// One kind of message.
struct Kind {
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
        let now = sys::microseconds().saturating_add(1);
        let last = self.last.load(Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= silence;
        // Of several threads at once, one logs.
        (due && self.last.cmpxchg(last, now, Relaxed).is_ok()).then_some(Times(count))
    }

    fn count(&self) -> u64 {
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
static REFUSED: [[Atomic<u64>; Refusal::KINDS]; Flavour::ALL.len()] =
    [const { [const { Atomic::new(0) }; Refusal::KINDS] }; Flavour::ALL.len()];

/// The client of that flavour refused a registration.
pub(crate) fn refused(flavour: Flavour, step: Step, addr: u64, len: u64, refusal: Refusal) {
    static KINDS: [Kind; Refusal::KINDS] = [const { Kind::new() }; Refusal::KINDS];

    let refusal = refusal.seen(|| sys::place(addr));
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
        task: sys::task(),
    };
    sys::trace_refused(&refused);
    // CAST: Not negative.
    let now = sys::microseconds() as u64;
    sys::journal(|journal| journal.add(now, refused));

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

static LOST: Kind = Kind::new();
static KEPT_OTHER_PROCESS: Kind = Kind::new();
static KEPT_UNLISTED: Kind = Kind::new();
static KEPT_IN_CALLBACK: Kind = Kind::new();
static KEPT_FAILED: Kind = Kind::new();
static NOT_UNMAPPED: Kind = Kind::new();
static LATE_CALLBACK: Kind = Kind::new();
static STRAY_CALLBACK: Kind = Kind::new();

/// What is counted beside refusals.
static EVENTS: [(&str, &Kind); 8] = [
    ("lost", &LOST),
    ("kept_other_process", &KEPT_OTHER_PROCESS),
    ("kept_unlisted", &KEPT_UNLISTED),
    ("kept_in_callback", &KEPT_IN_CALLBACK),
    ("kept_failed", &KEPT_FAILED),
    ("not_unmapped", &NOT_UNMAPPED),
    ("late_callback", &LATE_CALLBACK),
    ("stray_callback", &STRAY_CALLBACK),
];

/// A persistent pin could not be put, and never will be.
pub(crate) fn leaked(span: &Span, ret: c_int) {
    if let Some(times) = LOST.pass() {
        pr_err!(
            "GPU memory {:#x}+{:#x} is lost: nvidia.ko could not unpin (error {}){}\n",
            span.start(),
            span.len(),
            ret,
            times
        );
    }
}

/// A revocable pin was not put.
pub(crate) fn kept(span: &Span, why: Kept) {
    let kind = match why {
        Kept::OtherProcess => &KEPT_OTHER_PROCESS,
        Kept::Unlisted => &KEPT_UNLISTED,
        Kept::InCallback => &KEPT_IN_CALLBACK,
        Kept::Failed(_) => &KEPT_FAILED,
    };
    let Some(times) = kind.pass() else {
        return;
    };
    let (start, len) = (span.start(), span.len());
    match why {
        Kept::OtherProcess => pr_info!(
            "GPU memory {:#x}+{:#x} stays pinned until it is freed: another process released it{}\n",
            start,
            len,
            times
        ),
        Kept::Unlisted => pr_info!(
            "GPU memory {:#x}+{:#x} stays pinned until it is freed: nvidia.ko does not take it from process {} any more{}\n",
            start,
            len,
            sys::task().tgid,
            times
        ),
        Kept::InCallback => pr_info!(
            "GPU memory {:#x}+{:#x} stays pinned until it is freed: released while other memory of its registration was being freed{}\n",
            start,
            len,
            times
        ),
        Kept::Failed(ret) => pr_err!(
            "GPU memory {:#x}+{:#x} stays pinned until it is freed: nvidia.ko could not unpin (error {}){}\n",
            start,
            len,
            ret,
            times
        ),
    }
}

/// A DMA mapping could not be undone.
pub(crate) fn not_unmapped(span: &Span, ret: c_int) {
    if let Some(times) = NOT_UNMAPPED.pass() {
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

/// nvidia.ko freed what it had said to have unpinned.
pub(crate) fn late_callback() {
    if let Some(times) = LATE_CALLBACK.pass() {
        pr_warn!(
            "nvidia.ko revoked a pin that it had reported as unpinned: each unpin is checked first from now on{}\n",
            times
        );
    }
}

/// nvidia.ko freed what this module does not know.
pub(crate) fn stray_callback() {
    if let Some(times) = STRAY_CALLBACK.pass() {
        pr_err!("nvidia.ko revoked a pin that does not exist{}\n", times);
    }
}

/// The files below `/sys/kernel/debug/nvidia_peermem`, until dropped.
pub(crate) struct Files(#[expect(dead_code, reason = "for its drop")] sys::Debugfs);

impl Files {
    /// From here on refusals are kept, too.
    pub(crate) fn new() -> Self {
        sys::begin_journal();
        let directory = sys::Debugfs::new();
        directory.file::<Version>(c"version", 0o444);
        directory.file::<Counters>(c"counters", 0o444);
        // Addresses of processes: for root alone.
        directory.file::<Refusals<false>>(c"refusals", 0o400);
        directory.file::<Refusals<true>>(c"foreign", 0o400);
        directory.lines::<Registrations>(c"registrations", 0o400);
        Files(directory)
    }
}

/// `version`.
struct Version;

impl sys::Contents for Version {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::writeln!(
            f,
            "format={} module={}",
            record::FORMAT,
            Word(sys::version())
        )
    }
}

/// `counters`.
struct Counters;

impl sys::Contents for Counters {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (flavour, counts) in Flavour::ALL.iter().zip(&REFUSED) {
            for (reason, count) in Refusal::NAMES.iter().zip(counts) {
                core::writeln!(
                    f,
                    "event=refused count={} flavour={} reason={}",
                    count.load(Relaxed),
                    Word(flavour.name()),
                    Word(reason)
                )?;
            }
        }
        for (event, kind) in EVENTS {
            core::writeln!(f, "event={event} count={}", kind.count())?;
        }
        // All of one moment.
        let counts = sys::roll_book(|book| book.counts());
        for (flavour, counts) in Flavour::ALL.iter().zip(&counts) {
            for (event, count) in [
                ("registered", counts.registered),
                ("mapped", counts.mapped),
                ("revoked", counts.revoked),
                ("released", counts.released),
                ("alive", counts.alive),
                ("alive_bytes", counts.alive_bytes),
            ] {
                core::writeln!(
                    f,
                    "event={event} count={count} flavour={}",
                    Word(flavour.name())
                )?;
            }
        }
        Ok(())
    }
}

/// `refusals`, and `foreign`.
struct Refusals<const FOREIGN: bool>;

impl<const FOREIGN: bool> sys::Contents for Refusals<FOREIGN> {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Locked for each record, never while it is written: who refuses does not wait for who reads.
        let from = |number| sys::journal(|journal| journal.from(FOREIGN, number)).flatten();
        let mut next = 0;
        // Not for ever, however fast they come.
        for _ in 0..Journal::REFUSALS {
            let Some((record, number)) = from(next) else {
                break;
            };
            core::writeln!(f, "{record}")?;
            next = number;
        }
        Ok(())
    }
}

/// `registrations`.
struct Registrations;

impl sys::Lines for Registrations {
    type Record = Registration;

    fn last() -> u64 {
        sys::roll_book(|book| book.last())
    }

    fn from(number: u64) -> Option<(u64, Registration)> {
        let living = sys::roll_from(number)?;
        Some((living.number, Registration(living)))
    }
}

/// A line of `registrations`.
#[derive(Clone, Copy)]
struct Registration(Living);

impl fmt::Display for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = roll::Line {
            living: &self.0,
            gpu: sys::gpu_address,
        };
        core::fmt::Display::fmt(&line, f)
    }
}
