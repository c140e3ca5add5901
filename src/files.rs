// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The files in `/sys/kernel/debug/nvidia_peermem` or `/proc/driver/nvidia-peermem`.
//! `docs/observe.md` specifies the format of these files for programs.

use core::cell::Cell;

use kernel::{
    fmt,
    prelude::*,
    sync::atomic::Relaxed, //
};

use crate::{
    debugfs::{
        Contents,
        Folder, //
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

/// Makes the folder with all files.
pub(crate) fn folder() -> Folder {
    let folder = Folder::new();
    folder.add::<Version>(c"version", 0o444);
    folder.add::<Counters>(c"counters", 0o444);
    // These files show addresses of processes, so only root may read them.
    folder.add::<Refusals<false>>(c"refusals", 0o400);
    folder.add::<Refusals<true>>(c"non_gpu", 0o400);
    folder.add::<Registrations>(c"registrations", 0o400);
    folder
}

/// The file `version`.
struct Version;

impl Contents for Version {
    fn new() -> impl PinInit<Self> {
        Version
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::writeln!(
            f,
            "format={} module={}",
            history::FORMAT,
            DisplayCStr(params::version())
        )
    }
}

/// The file `counters`.
struct Counters;

impl Contents for Counters {
    fn new() -> impl PinInit<Self> {
        Counters
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        // The registry's counters are read under one lock, at one moment.
        let counts = entries::registry(Registry::counts);
        for (mode, counts) in PinMode::ALL.iter().zip(&counts) {
            let mode = DisplayCStr(mode.name());
            for (event, count) in [
                ("registered", counts.registered),
                ("mapped", counts.mapped),
                ("revoked", counts.revoked),
                ("released", counts.released),
                ("active", counts.active),
                ("active_bytes", counts.active_bytes),
            ] {
                core::writeln!(f, "event={event} count={count} mode={mode}")?;
            }
        }
        Ok(())
    }
}

/// The files `refusals` and `non_gpu`.
struct Refusals<const NON_GPU: bool>;

impl<const NON_GPU: bool> Contents for Refusals<NON_GPU> {
    fn new() -> impl PinInit<Self> {
        Refusals
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The history is locked to copy each record, but not while the record is written. A refusal
        // never waits for a reader.
        let from = |number| log::history(|history| history.from(NON_GPU, number));
        let mut next = 0;
        // The limit ends the loop even if new refusals keep coming.
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

/// A reader of the file `registrations`.
#[pin_data]
struct Registrations {
    #[pin]
    cursor: Cursor,
    /// The highest registration number to print. This limit ends the file even if new registrations
    /// keep coming.
    last: Cell<u64>,
    /// The registration to write next.
    registration: Cell<Option<Registration>>,
}

impl Contents for Registrations {
    fn new() -> impl PinInit<Self> {
        pin_init!(Registrations {
            cursor <- Cursor::new(),
            last: Cell::new(0),
            registration: Cell::new(None),
        })
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
        core::writeln!(f, "{line}")
    }
}
