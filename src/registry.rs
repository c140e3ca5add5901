// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The registry: which registrations there are at the moment, and what became of how many.
//!
//! ```text
//! acquire    add         a number of its own; `pinned`
//! dma_map    mapped      `mapped`
//! dma_unmap  unmapped    `pinned` again
//! callback   revoked     `revoked`, until it is released
//! release    released    removed; or `orphaned`, until the memory is freed
//! the end    remove      of an orphaned region
//! ```
//!
//! An entry costs no memory of its own: it is a field of the registration (`entries.rs`).
//!
//! One lock guards the entries and the [`Registry`]. It is a leaf, and no other lock is taken with it held: a reader of the
//! registry copies one entry at a time, unlocks, and goes on after its number.
//!
//! What a registration calls is inline: each has two callers, one for each mode, and is given so much that a
//! call would cost more than what it does.
//!
//! Uses `core` alone: see `ranges`. `docs/observe.md` promises the form of the line to programs.

use core::fmt;

use super::{
    device::{
        Gpus,
        PciAddress, //
    },
    history::{
        Comm,
        DisplayCStr,
        PinMode,
        Seconds,
        Task, //
    },
    ranges::{
        PageSize,
        Span, //
    }, //
};

/// The state of a registration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum State {
    /// Its memory is pinned.
    Pinned,
    /// And mapped for an HCA.
    Mapped,
    /// The memory was freed.
    Revoked,
    /// It was released; memory of it stays pinned until it is freed.
    Orphaned,
}

impl State {
    /// A word for it.
    pub(crate) fn name(self) -> &'static core::ffi::CStr {
        match self {
            State::Pinned => c"pinned",
            State::Mapped => c"mapped",
            State::Revoked => c"revoked",
            State::Orphaned => c"orphaned",
        }
    }
}

/// What is known of a registration when it is made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct RegistrationInfo {
    /// Of which client.
    pub(crate) mode: PinMode,
    /// The range, in whole pages.
    pub(crate) span: Span,
    /// The size of the pages.
    pub(crate) page: PageSize,
    /// Of how many pins it consists.
    pub(crate) chunks: usize,
    /// Where its memory is, as far as that is known.
    pub(crate) gpus: Gpus,
    /// Who registers.
    pub(crate) task: Task,
    /// When, in microseconds.
    pub(crate) since: u64,
}

/// A registration in the registry.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Registration {
    /// From 1 on, and not used twice.
    pub(crate) number: u64,
    pub(crate) state: State,
    pub(crate) info: RegistrationInfo,
    /// Of its scatter list; 0 while there is none in use.
    pub(crate) entries: u32,
    /// The device that it is mapped for.
    pub(crate) hca: Option<PciAddress>,
}

/// How many registrations of a mode came to what.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Counts {
    /// Added to the registry.
    pub(crate) registered: u64,
    /// Were mapped.
    pub(crate) mapped: u64,
    /// Lost their memory before they were released.
    pub(crate) revoked: u64,
    /// Were released.
    pub(crate) released: u64,
    /// Are in the registry.
    pub(crate) active: u64,
    /// Bytes of these, in whole pages.
    pub(crate) active_bytes: u64,
}

/// The numbers that entries get, and the counters, under the lock of the entries.
#[derive(Debug)]
pub(crate) struct Registry {
    /// The last number given: 64 bits do not come round.
    last: u64,
    counts: [Counts; PinMode::ALL.len()],
}

impl Default for Registry {
    fn default() -> Self {
        Registry::new()
    }
}

impl Registry {
    /// An empty one.
    pub(crate) const fn new() -> Self {
        const NONE: Counts = Counts {
            registered: 0,
            mapped: 0,
            revoked: 0,
            released: 0,
            active: 0,
            active_bytes: 0,
        };
        Registry {
            last: 0,
            counts: [NONE; PinMode::ALL.len()],
        }
    }

    /// The last number given; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Of each mode, all of one moment.
    pub(crate) fn counts(&self) -> [Counts; PinMode::ALL.len()] {
        self.counts
    }

    /// Counts for the mode of `registration`.
    fn count(&mut self, registration: &Registration, change: impl FnOnce(&mut Counts)) {
        // CAST: A number of a mode.
        if let Some(counts) = self.counts.get_mut(registration.info.mode as usize) {
            change(counts);
        }
    }

    fn uncount(&mut self, registration: &Registration) {
        self.count(registration, |counts| {
            counts.active = counts.active.wrapping_sub(1);
            counts.active_bytes = counts
                .active_bytes
                .wrapping_sub(registration.info.span.len());
        });
    }

    /// `acquire` has succeeded.
    #[inline]
    pub(crate) fn add(
        &mut self,
        slot: &mut Option<Registration>,
        info: RegistrationInfo,
    ) -> Option<Transition> {
        self.last = self.last.wrapping_add(1);
        let registration = slot.insert(Registration {
            number: self.last,
            state: State::Pinned,
            info,
            entries: 0,
            hca: None,
        });
        self.count(registration, |counts| {
            counts.registered = counts.registered.wrapping_add(1);
            counts.active = counts.active.wrapping_add(1);
            counts.active_bytes = counts
                .active_bytes
                .wrapping_add(registration.info.span.len());
        });
        Some(Transition::Registered)
    }

    /// `dma_map` has succeeded: a scatter list of so many entries, for the device with that address.
    #[inline]
    pub(crate) fn mapped(
        &mut self,
        slot: &mut Option<Registration>,
        entries: u32,
        hca: PciAddress,
    ) -> Option<Transition> {
        let registration = slot.as_mut()?;
        registration.state = State::Mapped;
        registration.entries = entries;
        registration.hca = Some(hca);
        self.count(registration, |counts| {
            counts.mapped = counts.mapped.wrapping_add(1);
        });
        Some(Transition::Mapped)
    }

    /// `dma_unmap`. One that was revoked is still that.
    #[inline]
    pub(crate) fn unmapped(&mut self, slot: &mut Option<Registration>) -> Option<Transition> {
        let registration = slot.as_mut().filter(|r| r.state == State::Mapped)?;
        registration.state = State::Pinned;
        registration.entries = 0;
        registration.hca = None;
        None
    }

    /// The memory, or a part of it, goes. Counts once, and not after the release.
    #[inline]
    pub(crate) fn revoked(&mut self, slot: &mut Option<Registration>) -> Option<Transition> {
        let registration = slot
            .as_mut()
            .filter(|r| matches!(r.state, State::Pinned | State::Mapped))?;
        registration.state = State::Revoked;
        self.count(registration, |counts| {
            counts.revoked = counts.revoked.wrapping_add(1);
        });
        Some(Transition::Revoked)
    }

    /// `release`. What is `orphaned` stays in the registry until it is [removed](Self::remove).
    #[inline]
    pub(crate) fn released(
        &mut self,
        slot: &mut Option<Registration>,
        orphaned: bool,
    ) -> Option<Transition> {
        let mut registration = slot.take()?;
        self.count(&registration, |counts| {
            counts.released = counts.released.wrapping_add(1);
        });
        if orphaned {
            registration.state = State::Orphaned;
            registration.entries = 0;
            registration.hca = None;
            *slot = Some(registration);
        } else {
            self.uncount(&registration);
        }
        Some(Transition::Released(
            registration.number,
            registration.state,
        ))
    }

    /// The end of the entry: removes what is still there.
    pub(crate) fn remove(&mut self, slot: &mut Option<Registration>) -> Option<Transition> {
        self.uncount(&slot.take()?);
        None
    }
}

/// A change of a registration that is traced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Transition {
    Registered,
    Mapped,
    Revoked,
    /// The number of the registration, and the state that it was in, or is in if that is [`State::Orphaned`].
    Released(u64, State),
}

/// A registration as one line.
pub(crate) struct Line<'a, N> {
    pub(crate) registration: &'a Registration,
    /// Where the GPU of a number is.
    pub(crate) gpu: N,
}

impl<N: Fn(u32) -> Option<PciAddress>> fmt::Display for Line<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Registration {
            number,
            state,
            info,
            entries,
            hca,
        } = self.registration;
        write!(
            f,
            "id={number} state={} mode={} addr={:#x} len={} page={} chunks={} entries={entries} gpus=",
            DisplayCStr(state.name()),
            DisplayCStr(info.mode.name()),
            info.span.start(),
            info.span.len(),
            info.page.bytes(),
            info.chunks,
        )?;
        // In the order of their addresses: the next that is higher than the one before.
        let mut before = None;
        let next = |before| {
            let all = info.gpus.numbers().filter_map(&self.gpu);
            all.filter(|gpu| Some(*gpu) > before).min()
        };
        while let Some(gpu) = next(before) {
            let comma = if before.is_some() { "," } else { "" };
            write!(f, "{comma}{gpu}")?;
            before = Some(gpu);
        }
        if before.is_none() {
            f.write_str("-")?;
        }
        f.write_str(" hca=")?;
        match hca {
            Some(hca) => write!(f, "{hca}")?,
            None => f.write_str("-")?,
        }
        write!(
            f,
            " tgid={} pid={} since={} comm={}",
            info.task.tgid,
            info.task.pid,
            Seconds(info.since),
            Comm(&info.task.comm),
        )
    }
}
