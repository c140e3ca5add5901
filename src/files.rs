// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The files below `/sys/kernel/debug/nvidia_peermem`, or `/proc/driver/nvidia-peermem`: `docs/observe.md` promises their
//! form to programs.

use core::cell::Cell;

use kernel::{
    fmt,
    prelude::*,
    sync::atomic::Relaxed, //
};

use crate::{
    debugfs::{
        Contents,
        Folder,
        Lines, //
    },
    entries::{
        self,
        Cursor, //
    },
    history::{
        self,
        DisplayCStr,
        History,
        PinMode, //
    },
    log,
    params,
    pci,
    reason::{
        Event,
        Reason, //
    },
    registry::{
        Line,
        Registration,
        Registry, //
    }, //
};

/// All of them, until dropped.
pub(crate) struct Files(#[expect(dead_code, reason = "for its drop")] Folder);

impl Files {
    /// All of them.
    pub(crate) fn new() -> Self {
        let folder = Folder::new();
        folder.contents::<Version>(c"version", 0o444);
        folder.contents::<Counters>(c"counters", 0o444);
        // Addresses of processes: for root alone.
        folder.contents::<Refusals<false>>(c"refusals", 0o400);
        folder.contents::<Refusals<true>>(c"non_gpu", 0o400);
        folder.lines::<Registrations>(c"registrations", 0o400);
        Files(folder)
    }
}

/// `version`.
struct Version;

impl Contents for Version {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::writeln!(
            f,
            "format={} module={}",
            history::FORMAT,
            DisplayCStr(params::version())
        )
    }
}

/// `counters`.
struct Counters;

impl Contents for Counters {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (mode, counts) in PinMode::ALL.iter().zip(&log::REFUSED) {
            for (reason, count) in Reason::ALL.iter().zip(counts) {
                core::writeln!(
                    f,
                    "event=refused count={} mode={} reason={}",
                    count.load(Relaxed),
                    DisplayCStr(mode.name()),
                    DisplayCStr(reason.name)
                )?;
            }
        }
        for (info, limit) in Event::ALL.iter().zip(&log::EVENTS) {
            core::writeln!(f, "event={} count={}", info.name, limit.count())?;
        }
        // All of one moment.
        let counts = entries::registry(Registry::counts);
        for (mode, counts) in PinMode::ALL.iter().zip(&counts) {
            for (event, count) in [
                ("registered", counts.registered),
                ("mapped", counts.mapped),
                ("revoked", counts.revoked),
                ("released", counts.released),
                ("active", counts.active),
                ("active_bytes", counts.active_bytes),
            ] {
                core::writeln!(
                    f,
                    "event={event} count={count} mode={}",
                    DisplayCStr(mode.name())
                )?;
            }
        }
        Ok(())
    }
}

/// `refusals`, and `non_gpu`.
struct Refusals<const NON_GPU: bool>;

impl<const NON_GPU: bool> Contents for Refusals<NON_GPU> {
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Locked for each record, never while it is written: who refuses does not wait for who reads.
        let from = |number| log::history(|history| history.from(NON_GPU, number));
        let mut next = 0;
        // Not for ever, however fast they come.
        for _ in 0..History::REFUSALS {
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
    registration: Cell<Option<Registration>>,
}

impl Lines for Registrations {
    fn open() -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Registrations {
            cursor <- Cursor::new(),
            last: Cell::new(0),
            registration: Cell::new(None),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    fn find(&self, number: u64) -> Option<u64> {
        if number == 0 {
            self.last.set(entries::registry(Registry::last));
        }
        let registration = self.cursor.find(number)?;
        self.registration.set(Some(registration));
        Some(registration.number).filter(|number| *number <= self.last.get())
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(registration) = self.registration.get() else {
            return Ok(());
        };
        let line = Line {
            registration: &registration,
            gpu: pci::gpu_address,
        };
        core::write!(f, "{line}")
    }
}
