// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The last refusals: a list of limited length, and one line of text for each refusal.
//!
//! `docs/observe.md` specifies the format of these lines for programs.
//!
//! Uses only `core`, so cargo also compiles this file on the host.

use core::{
    ffi::CStr,
    fmt, //
};

use super::reason::Reason;

/// Version of the format of all lines. New keys may be added before the last key, `text`, without a
/// new version.
pub(crate) const FORMAT: u32 = 3;

/// The mode of a pin, and of the client that makes it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PinMode {
    /// The pages stay pinned until `release`.
    Persistent,
    /// The pin ends when the memory is freed.
    Revocable,
}

impl PinMode {
    /// All modes, in the order of their numbers.
    pub(crate) const ALL: [PinMode; 2] = [PinMode::Persistent, PinMode::Revocable];

    /// Returns the name of the mode.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            PinMode::Persistent => c"persistent",
            PinMode::Revocable => c"revocable",
        }
    }
}

/// The call of ib_core that was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Step {
    /// ib_core asked whether the range belongs to the client.
    Acquire,
    /// ib_core asked for pages that can be revoked.
    GetPages,
    /// ib_core asked for DMA addresses for a device.
    DmaMap,
}

impl Step {
    /// Returns ib_core's name for the call.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Step::Acquire => c"acquire",
            Step::GetPages => c"get_pages",
            Step::DmaMap => c"dma_map",
        }
    }
}

/// Prints a name, such as that of a mode or a step.
pub(crate) struct DisplayCStr(pub(crate) &'static CStr);

impl fmt::Display for DisplayCStr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.to_str().unwrap_or_default())
    }
}

/// Size of a thread's name in bytes, including the NUL.
pub(crate) const COMM_LEN: usize = 16;

/// A thread that calls the module.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Task {
    /// Process ID.
    pub(crate) tgid: i32,
    /// Thread ID.
    pub(crate) pid: i32,
    /// The thread's name, up to the first NUL. The thread can choose its name.
    pub(crate) comm: [u8; COMM_LEN],
}

/// A thread's name as one word. Bytes that could be misread are printed as `\xNN`.
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

/// A refusal and its details.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Refusal {
    /// Client that refused.
    pub(crate) mode: PinMode,
    /// Call that was refused.
    pub(crate) step: Step,
    /// Reason for the refusal.
    pub(crate) reason: Reason,
    /// First address: as requested for a refusal in `acquire`, rounded down to a GPU page for a
    /// later step.
    pub(crate) addr: u64,
    /// Length in bytes, rounded like `addr`.
    pub(crate) len: u64,
    /// Thread that made the call.
    pub(crate) task: Task,
}

impl Refusal {
    /// Returns `true` if `other` has the same reason, client, call, range and process.
    fn repeats(&self, other: &Refusal) -> bool {
        self.reason.index() == other.reason.index()
            && self.mode == other.mode
            && self.step == other.step
            && (self.addr, self.len) == (other.addr, other.len)
            && self.task.tgid == other.task.tgid
    }
}

/// A refusal, and the number of times that it occurred. `Display` prints the line that
/// `docs/observe.md` describes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Record {
    number: u64,
    first: u64,
    last: u64,
    times: u64,
    /// The latest occurrence.
    refusal: Refusal,
}

/// A time in microseconds, printed in seconds.
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
        // An option such as `:#x` makes the stack frame larger for each argument of its `write!`.
        write!(
            f,
            "seq={} first={} last={} times={} mode={} step={} reason={} code={}",
            self.number,
            Seconds(self.first),
            Seconds(self.last),
            self.times,
            DisplayCStr(mode.name()),
            DisplayCStr(step.name()),
            DisplayCStr(reason.name()),
            reason.code(),
        )?;
        write!(f, " addr={addr:#x}")?;
        write!(
            f,
            " len={len} tgid={} pid={} comm={} text=\"{reason}\"",
            task.tgid,
            task.pid,
            Comm(&task.comm),
        )
    }
}

/// The last `N` records. The caller holds a lock.
pub(crate) struct Ring<const N: usize> {
    records: [Option<Record>; N],
    /// Number of the next record. Numbers begin with 0 and are not reused.
    next: u64,
}

impl<const N: usize> Ring<N> {
    /// Returns an empty ring.
    pub(crate) const fn new() -> Self {
        Ring {
            records: [None; N],
            next: 0,
        }
    }

    fn place(number: u64) -> usize {
        // CAST: The result is less than `N`, or 0 if `N` is 0.
        number.checked_rem(N as u64).unwrap_or(0) as usize
    }

    /// Adds a record of `refusal` in place of the oldest record. If `refusal` repeats a record of
    /// the ring, updates that record instead.
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

    /// Returns the oldest record whose number is at least `number`, and the number for the next
    /// call. A reader that releases the lock between two calls gets each record at most once, in
    /// order, and complete.
    pub(crate) fn from(&self, number: u64) -> Option<(Record, u64)> {
        let number = number.max(self.next.saturating_sub(N as u64));
        let record = (*self.records.get(Self::place(number))?)?;
        (record.number == number).then(|| (record, number.saturating_add(1)))
    }
}

/// The last refusals. Refusals of ranges that were never meant for a GPU have their own list. Any
/// process can cause any number of such refusals, and they must not displace the other refusals.
pub(crate) struct History {
    refusals: Ring<{ History::REFUSALS }>,
    non_gpu: Ring<{ History::NON_GPU }>,
}

impl History {
    /// Number of refusals that are kept, apart from those of [`History::NON_GPU`].
    pub(crate) const REFUSALS: usize = 128;
    /// Number of kept refusals of ranges that were never meant for a GPU.
    pub(crate) const NON_GPU: usize = 32;

    /// Returns an empty history.
    pub(crate) const fn new() -> Self {
        History {
            refusals: Ring::new(),
            non_gpu: Ring::new(),
        }
    }

    /// Adds `refusal` to its list. `now` is in microseconds.
    pub(crate) fn add(&mut self, now: u64, refusal: Refusal) {
        if refusal.reason.is_non_gpu() {
            self.non_gpu.add(now, refusal);
        } else {
            self.refusals.add(now, refusal);
        }
    }

    /// Like [`Ring::from`], for one of the lists.
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
