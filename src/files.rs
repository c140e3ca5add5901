// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The files below `/sys/kernel/debug/nvidia_peermem`: `docs/observe.md` promises their form to programs.

use core::cell::Cell;

use kernel::{
    fmt,
    prelude::*,
    sync::atomic::Relaxed, //
};

use crate::{
    debugfs::{
        Contents,
        Debugfs,
        Lines, //
    },
    entries::{
        self,
        Cursor, //
    },
    log,
    params,
    pci,
    record::{
        self,
        Flavour,
        Journal,
        Word, //
    },
    refusal::{
        Event,
        Refusal, //
    },
    registry::{
        Book,
        Line,
        Living, //
    }, //
};

/// All of them, until dropped.
pub(crate) struct Files(#[expect(dead_code, reason = "for its drop")] Debugfs);

impl Files {
    /// All of them.
    pub(crate) fn new() -> Self {
        let directory = Debugfs::new(c"nvidia_peermem");
        directory.contents::<Version>(c"version", 0o444);
        directory.contents::<Counters>(c"counters", 0o444);
        // Addresses of processes: for root alone.
        directory.contents::<Refusals<false>>(c"refusals", 0o400);
        directory.contents::<Refusals<true>>(c"foreign", 0o400);
        directory.lines::<Registrations>(c"registrations", 0o400);
        Files(directory)
    }
}

/// `version`.
struct Version;

impl Contents for Version {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::writeln!(
            f,
            "format={} module={}",
            record::FORMAT,
            Word(params::version())
        )
    }
}

/// `counters`.
struct Counters;

impl Contents for Counters {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (flavour, counts) in Flavour::ALL.iter().zip(&log::REFUSED) {
            for (reason, count) in Refusal::REASONS.iter().zip(counts) {
                core::writeln!(
                    f,
                    "event=refused count={} flavour={} reason={}",
                    count.load(Relaxed),
                    Word(flavour.name()),
                    Word(reason.name)
                )?;
            }
        }
        for (incident, kind) in Event::ALL.iter().zip(&log::EVENTS) {
            core::writeln!(f, "event={} count={}", incident.name, kind.count())?;
        }
        // All of one moment.
        let counts = entries::book(Book::counts);
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

impl<const FOREIGN: bool> Contents for Refusals<FOREIGN> {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Locked for each record, never while it is written: who refuses does not wait for who reads.
        let from = |number| log::journal(|journal| journal.from(FOREIGN, number));
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

/// `registrations`: who reads it.
#[pin_data]
struct Registrations {
    #[pin]
    cursor: Cursor,
    /// Where to stop: not for ever, however fast they come.
    last: Cell<u64>,
    /// What to write next.
    living: Cell<Option<Living>>,
}

impl Lines for Registrations {
    fn open() -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Registrations {
            cursor <- Cursor::new(),
            last: Cell::new(0),
            living: Cell::new(None),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    fn find(&self, number: u64) -> Option<u64> {
        if number == 0 {
            self.last.set(entries::book(Book::last));
        }
        let living = self.cursor.find(number)?;
        self.living.set(Some(living));
        Some(living.number).filter(|number| *number <= self.last.get())
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(living) = self.living.get() else {
            return Ok(());
        };
        let line = Line {
            living: &living,
            gpu: pci::gpu_address,
        };
        core::write!(f, "{line}")
    }
}
