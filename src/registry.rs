// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The roll: which registrations there are at the moment, and what became of how many.
//!
//! ```text
//! acquire    enter       a number of its own; `pinned`
//! dma_map    mapped      `mapped`
//! dma_unmap  unmapped    `pinned` again
//! callback   revoked     `revoked`, until it is released
//! release    released    it leaves; or `kept`, until the memory is freed
//! the end    gone        of a region that was kept: it leaves
//! ```
//!
//! An entry costs no memory of its own: it is a field of the registration (`entries.rs`).
//!
//! One lock guards the entries and the [`Book`]. It is a leaf, and nothing is called with it held: who
//! reads the roll copies one entry at a time, lets go, and goes on behind its number.
//!
//! What a registration calls is inline: each has two callers, one for each flavour, and is given so much that a
//! call would cost more than what it does.
//!
//! Uses `core` alone: see `extents`. `docs/observe.md` promises the form of the line to programs.

use core::fmt;

use super::{
    device::{
        Gpus,
        PciAddress, //
    },
    extents::{
        PageSize,
        Span, //
    },
    record::{
        Comm,
        Flavour,
        Seconds,
        Task,
        Word, //
    }, //
};

/// What is the case with a registration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum State {
    /// Its memory is pinned.
    Pinned,
    /// And mapped for an HCA.
    Mapped,
    /// The memory was freed.
    Revoked,
    /// It was released; memory of it stays pinned until it is freed.
    Kept,
}

impl State {
    /// A word for it.
    pub(crate) fn name(self) -> &'static core::ffi::CStr {
        match self {
            State::Pinned => c"pinned",
            State::Mapped => c"mapped",
            State::Revoked => c"revoked",
            State::Kept => c"kept",
        }
    }
}

/// A registration, as it is when it comes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Newcomer {
    /// Of which client.
    pub(crate) flavour: Flavour,
    /// The range, in whole pages.
    pub(crate) span: Span,
    /// The size of the pages.
    pub(crate) page: PageSize,
    /// Of how many pins it consists.
    pub(crate) pieces: usize,
    /// Where its memory is, as far as that is known.
    pub(crate) gpus: Gpus,
    /// Who registers.
    pub(crate) task: Task,
    /// When, in microseconds.
    pub(crate) since: u64,
}

/// A registration that is there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Living {
    /// From 1 on, and not used twice.
    pub(crate) number: u64,
    pub(crate) state: State,
    pub(crate) new: Newcomer,
    /// Of its scatter list; 0 while there is none in use.
    pub(crate) entries: u32,
    /// The device that it is mapped for.
    pub(crate) hca: Option<PciAddress>,
}

/// How many registrations of a flavour came to what.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Counts {
    /// Entered the roll.
    pub(crate) registered: u64,
    /// Were mapped.
    pub(crate) mapped: u64,
    /// Lost their memory before they were released.
    pub(crate) revoked: u64,
    /// Were released.
    pub(crate) released: u64,
    /// Are on the roll.
    pub(crate) alive: u64,
    /// Bytes of these, in whole pages.
    pub(crate) alive_bytes: u64,
}

/// What is kept beside the entries, under the same lock.
#[derive(Debug)]
pub(crate) struct Book {
    /// The last number given: 64 bits do not come round.
    last: u64,
    counts: [Counts; Flavour::ALL.len()],
}

impl Default for Book {
    fn default() -> Self {
        Book::new()
    }
}

impl Book {
    /// An empty one.
    pub(crate) const fn new() -> Self {
        const NONE: Counts = Counts {
            registered: 0,
            mapped: 0,
            revoked: 0,
            released: 0,
            alive: 0,
            alive_bytes: 0,
        };
        Book {
            last: 0,
            counts: [NONE; Flavour::ALL.len()],
        }
    }

    /// The last number given; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Of each flavour, all of one moment.
    pub(crate) fn counts(&self) -> [Counts; Flavour::ALL.len()] {
        self.counts
    }

    /// Counts for the flavour of `living`.
    fn count(&mut self, living: &Living, change: impl FnOnce(&mut Counts)) {
        // CAST: A number of a flavour.
        if let Some(counts) = self.counts.get_mut(living.new.flavour as usize) {
            change(counts);
        }
    }

    fn leaves(&mut self, living: &Living) {
        self.count(living, |counts| {
            counts.alive = counts.alive.wrapping_sub(1);
            counts.alive_bytes = counts.alive_bytes.wrapping_sub(living.new.span.len());
        });
    }

    /// `acquire` has succeeded.
    #[inline]
    pub(crate) fn enter(&mut self, slot: &mut Option<Living>, new: Newcomer) -> Option<Event> {
        self.last = self.last.wrapping_add(1);
        let living = Living {
            number: self.last,
            state: State::Pinned,
            new,
            entries: 0,
            hca: None,
        };
        self.count(&living, |counts| {
            counts.registered = counts.registered.wrapping_add(1);
            counts.alive = counts.alive.wrapping_add(1);
            counts.alive_bytes = counts.alive_bytes.wrapping_add(new.span.len());
        });
        *slot = Some(living);
        Some(Event::Registered(living))
    }

    /// `dma_map` has succeeded: a scatter list of so many entries, for the device with that address.
    #[inline]
    pub(crate) fn mapped(
        &mut self,
        slot: &mut Option<Living>,
        entries: u32,
        hca: PciAddress,
    ) -> Option<Event> {
        let living = slot.as_mut()?;
        living.state = State::Mapped;
        living.entries = entries;
        living.hca = Some(hca);
        self.count(living, |counts| {
            counts.mapped = counts.mapped.wrapping_add(1);
        });
        Some(Event::Mapped(*living))
    }

    /// `dma_unmap`. One that was revoked is still that.
    #[inline]
    pub(crate) fn unmapped(&mut self, slot: &mut Option<Living>) -> Option<Event> {
        let living = slot.as_mut().filter(|l| l.state == State::Mapped)?;
        living.state = State::Pinned;
        living.entries = 0;
        living.hca = None;
        None
    }

    /// The memory, or a part of it, goes. Counts once, and not after the release.
    #[inline]
    pub(crate) fn revoked(&mut self, slot: &mut Option<Living>) -> Option<Event> {
        let living = slot
            .as_mut()
            .filter(|l| matches!(l.state, State::Pinned | State::Mapped))?;
        living.state = State::Revoked;
        self.count(living, |counts| {
            counts.revoked = counts.revoked.wrapping_add(1);
        });
        Some(Event::Revoked(living.number))
    }

    /// `release`. What is `kept` stays on the roll until it is [`gone`](Self::gone).
    #[inline]
    pub(crate) fn released(&mut self, slot: &mut Option<Living>, kept: bool) -> Option<Event> {
        let mut living = slot.take()?;
        self.count(&living, |counts| {
            counts.released = counts.released.wrapping_add(1);
        });
        if kept {
            living.state = State::Kept;
            living.entries = 0;
            living.hca = None;
            *slot = Some(living);
        } else {
            self.leaves(&living);
        }
        Some(Event::Released(living.number, living.state))
    }

    /// The end of the entry: whoever still stands there leaves.
    pub(crate) fn gone(&mut self, slot: &mut Option<Living>) -> Option<Event> {
        self.leaves(&slot.take()?);
        None
    }
}

/// What is told of a life, with nothing locked that is the roll's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    /// It has entered.
    Registered(Living),
    /// It was mapped.
    Mapped(Living),
    /// Its memory was freed; its number.
    Revoked(u64),
    /// It was released; its number, and what it was then, or is now if that is [`State::Kept`].
    Released(u64, State),
}

/// A registration as one line.
pub(crate) struct Line<'a, N> {
    pub(crate) living: &'a Living,
    /// Where the GPU of a number is.
    pub(crate) gpu: N,
}

impl<N: Fn(u32) -> Option<PciAddress>> fmt::Display for Line<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Living {
            number,
            state,
            new,
            entries,
            hca,
        } = self.living;
        write!(
            f,
            "id={number} state={} flavour={} addr={:#x} len={} page={} pieces={} entries={entries} gpus=",
            Word(state.name()),
            Word(new.flavour.name()),
            new.span.start(),
            new.span.len(),
            new.page.bytes(),
            new.pieces,
        )?;
        // In the order of their addresses: the next that is higher than the one before.
        let mut before = None;
        let next = |before| {
            let all = new.gpus.numbers().filter_map(&self.gpu);
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
            new.task.tgid,
            new.task.pid,
            Seconds(new.since),
            Comm(&new.task.comm),
        )
    }
}
