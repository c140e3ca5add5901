// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The last refusals: a bounded list, and a line of text for each.
//!
//! `docs/observe.md` promises the form of the line to programs.
//!
//! Uses `core` alone: see `ranges`.

use core::{
    ffi::CStr,
    fmt, //
};

use super::reason::Reason;

/// The version of the form of all lines. Keys may be added at the end, before `text`, without a new
/// one.
pub(crate) const FORMAT: u32 = 3;

/// The mode of a pin, and with it the client that has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PinMode {
    /// Nobody takes the pages away.
    Persistent,
    /// The pin goes when the memory is freed.
    Revocable,
}

impl PinMode {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [PinMode; 2] = [PinMode::Persistent, PinMode::Revocable];

    /// A word for it.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            PinMode::Persistent => c"persistent",
            PinMode::Revocable => c"revocable",
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

/// Shows one of the names above.
pub(crate) struct DisplayCStr(pub(crate) &'static CStr);

impl fmt::Display for DisplayCStr {
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

/// A refusal, with all that is known of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Refusal {
    /// By which client.
    pub(crate) mode: PinMode,
    /// When.
    pub(crate) step: Step,
    /// Why.
    pub(crate) reason: Reason,
    /// What: in `acquire` as it was asked for, later in whole pages of the GPU.
    pub(crate) addr: u64,
    /// How much.
    pub(crate) len: u64,
    /// By whom.
    pub(crate) task: Task,
}

impl Refusal {
    /// The same process was refused the same again.
    fn repeats(&self, other: &Refusal) -> bool {
        self.reason.index() == other.reason.index()
            && self.mode == other.mode
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
    refusal: Refusal,
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
        let Refusal {
            mode,
            step,
            reason,
            addr,
            len,
            task,
        } = &self.refusal;
        write!(
            f,
            "seq={} first={} last={} times={} mode={} step={} reason={} code={} addr={addr:#x} \
             len={len} tgid={} pid={} comm={} text=\"{reason}\"",
            self.number,
            Seconds(self.first),
            Seconds(self.last),
            self.times,
            DisplayCStr(mode.name()),
            DisplayCStr(step.name()),
            DisplayCStr(reason.name()),
            reason.code(),
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
    pub(crate) fn add(&mut self, now: u64, refusal: Refusal) {
        let known = self
            .records
            .iter_mut()
            .flatten()
            .find(|record| record.refusal.repeats(&refusal));
        if let Some(record) = known {
            record.last = now;
            record.times = record.times.saturating_add(1);
            record.refusal = refusal;
        } else if let Some(place) = self.records.get_mut(Self::place(self.next)) {
            *place = Some(Record {
                number: self.next,
                first: now,
                last: now,
                times: 1,
                refusal,
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

/// The last refusals. What was never meant for a GPU has a list of its own: any process can make any
/// number of these, and must not push out what somebody looks for.
pub(crate) struct History {
    refusals: Ring<{ History::REFUSALS }>,
    non_gpu: Ring<{ History::NON_GPU }>,
}

impl History {
    /// How many refusals are kept.
    pub(crate) const REFUSALS: usize = 128;
    /// How many of those that were not meant for a GPU.
    pub(crate) const NON_GPU: usize = 32;

    /// An empty one.
    pub(crate) const fn new() -> Self {
        History {
            refusals: Ring::new(),
            non_gpu: Ring::new(),
        }
    }

    /// Adds a record to its list. `now` is in microseconds.
    pub(crate) fn add(&mut self, now: u64, refusal: Refusal) {
        if refusal.reason.is_non_gpu() {
            self.non_gpu.add(now, refusal);
        } else {
            self.refusals.add(now, refusal);
        }
    }

    /// As [`Ring::from`], of one of the lists.
    pub(crate) fn from(&self, non_gpu: bool, number: u64) -> Option<(Record, u64)> {
        if non_gpu {
            self.non_gpu.from(number)
        } else {
            self.refusals.from(number)
        }
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "history/tests.rs"]
mod tests;
