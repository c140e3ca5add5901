// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Refusals as they are kept and read: a bounded list of the last ones, and a line of text for each.
//!
//! `docs/observe.md` promises the form of the line to programs.
//!
//! Uses `core` alone: see `extents`.

use core::{
    ffi::CStr,
    fmt, //
};

use super::refusal::Refusal;

/// The version of the form of all lines. Keys may be added at the end, before `text`, without a new
/// one.
pub(crate) const FORMAT: u32 = 1;

/// Whose registration it was.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Flavour {
    /// The client whose pins nobody takes away.
    Persistent,
    /// The client whose pins go when the memory is freed.
    Revocable,
}

impl Flavour {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [Flavour; 2] = [Flavour::Persistent, Flavour::Revocable];

    /// A word for it.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Flavour::Persistent => c"persistent",
            Flavour::Revocable => c"revocable",
        }
    }
}

/// What ib_core wanted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Step {
    /// To know whether the range is ours.
    Acquire,
    /// Pages that can be revoked.
    GetPages,
    /// Addresses for a device.
    DmaMap,
}

impl Step {
    /// ib_core's name for it.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Step::Acquire => c"acquire",
            Step::GetPages => c"get_pages",
            Step::DmaMap => c"dma_map",
        }
    }
}

/// One of the names above.
pub(crate) struct Word(pub(crate) &'static CStr);

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.to_str().unwrap_or_default())
    }
}

/// Bytes in the name of a thread, the NUL included.
pub(crate) const COMM_LEN: usize = 16;

/// The thread that asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Task {
    /// Its process.
    pub(crate) tgid: i32,
    /// Itself.
    pub(crate) pid: i32,
    /// Its name, which it can choose, up to the first NUL.
    pub(crate) comm: [u8; COMM_LEN],
}

/// A thread's name as one word: what could be taken for something else is written as `\xNN`.
pub(crate) struct Comm<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Comm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.iter().take_while(|byte| **byte != 0) {
            match byte {
                b'"' | b'\\' | b'=' => write!(f, "\\x{byte:02x}")?,
                0x21..=0x7e => write!(f, "{}", char::from(*byte))?,
                _ => write!(f, "\\x{byte:02x}")?,
            }
        }
        Ok(())
    }
}

/// A refusal.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Refused {
    /// Of which client.
    pub(crate) flavour: Flavour,
    /// When.
    pub(crate) step: Step,
    /// Why.
    pub(crate) refusal: Refusal,
    /// What: in `acquire` as it was asked for, later in whole pages of the GPU.
    pub(crate) addr: u64,
    /// How much.
    pub(crate) len: u64,
    /// By whom.
    pub(crate) task: Task,
}

impl Refused {
    /// The same process was refused the same again.
    fn repeats(&self, other: &Refused) -> bool {
        self.refusal.kind() == other.refusal.kind()
            && self.flavour == other.flavour
            && self.step == other.step
            && (self.addr, self.len) == (other.addr, other.len)
            && self.task.tgid == other.task.tgid
    }
}

/// A refusal, and its repetitions. Its `Display` is the line that `docs/observe.md` describes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Record {
    number: u64,
    first: u64,
    last: u64,
    times: u64,
    /// As it was the last time.
    refused: Refused,
}

/// Microseconds, as seconds.
pub(crate) struct Seconds(pub(crate) u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused {
            flavour,
            step,
            refusal,
            addr,
            len,
            task,
        } = &self.refused;
        write!(
            f,
            "seq={} first={} last={} times={} flavour={} step={} reason={} code={} addr={addr:#x} \
             len={len} tgid={} pid={} comm={} text=\"{refusal}\"",
            self.number,
            Seconds(self.first),
            Seconds(self.last),
            self.times,
            Word(flavour.name()),
            Word(step.name()),
            Word(refusal.name()),
            refusal.code(),
            task.tgid,
            task.pid,
            Comm(&task.comm),
        )
    }
}

/// The last `N` records. The caller locks it.
pub(crate) struct Ring<const N: usize> {
    records: [Option<Record>; N],
    /// The number of the next record. Numbers begin with 0 and are not used twice.
    next: u64,
}

impl<const N: usize> Ring<N> {
    /// An empty one.
    pub(crate) const fn new() -> Self {
        Ring {
            records: [None; N],
            next: 0,
        }
    }

    fn place(number: u64) -> usize {
        // CAST: Less than `N`; and an empty ring has no places.
        number.checked_rem(N as u64).unwrap_or(0) as usize
    }

    /// Adds a record in the place of the oldest, unless it repeats one that is there.
    pub(crate) fn add(&mut self, now: u64, refused: Refused) {
        let known = self
            .records
            .iter_mut()
            .flatten()
            .find(|record| record.refused.repeats(&refused));
        if let Some(record) = known {
            record.last = now;
            record.times = record.times.saturating_add(1);
            record.refused = refused;
        } else if let Some(place) = self.records.get_mut(Self::place(self.next)) {
            *place = Some(Record {
                number: self.next,
                first: now,
                last: now,
                times: 1,
                refused,
            });
            self.next = self.next.saturating_add(1);
        }
    }

    /// The oldest record that is still there of those with this number or a higher one, and the number
    /// to go on with. A reader that lets go of the lock between two calls meets each record at most
    /// once, in their order, and none half written.
    pub(crate) fn from(&self, number: u64) -> Option<(Record, u64)> {
        let number = number.max(self.next.saturating_sub(N as u64));
        let record = (*self.records.get(Self::place(number))?)?;
        (record.number == number).then(|| (record, number.saturating_add(1)))
    }
}

/// All that is kept. What was never meant for a GPU has a list of its own: any process can make any
/// number of these, and must not push out what somebody looks for.
pub(crate) struct Journal {
    refusals: Ring<{ Journal::REFUSALS }>,
    foreign: Ring<{ Journal::FOREIGN }>,
}

impl Journal {
    /// How many refusals are kept.
    pub(crate) const REFUSALS: usize = 128;
    /// How many that are foreign.
    pub(crate) const FOREIGN: usize = 32;

    /// An empty one.
    pub(crate) const fn new() -> Self {
        Journal {
            refusals: Ring::new(),
            foreign: Ring::new(),
        }
    }

    /// Adds a record to its list. `now` is in microseconds.
    pub(crate) fn add(&mut self, now: u64, refused: Refused) {
        if refused.refusal.is_foreign() {
            self.foreign.add(now, refused);
        } else {
            self.refusals.add(now, refused);
        }
    }

    /// As [`Ring::from`], of one of the lists.
    pub(crate) fn from(&self, foreign: bool, number: u64) -> Option<(Record, u64)> {
        if foreign {
            self.foreign.from(number)
        } else {
            self.refusals.from(number)
        }
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "record/tests.rs"]
mod tests;
