// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The registry of live registrations, and counters of the registrations of each mode.
//!
//! ```text
//! acquire    add         a new number; `pinned`
//! dma_map    mapped      `mapped`
//! dma_unmap  unmapped    `pinned` again
//! callback   revoked     `revoked`, until the release
//! release    released    removed; or `orphaned`, until the memory is freed
//! drop       remove      removes an orphaned registration
//! ```
//!
//! An entry needs no allocation of its own: it is a field of the registration (`entries.rs`).
//!
//! One lock protects the entries and the [`Registry`]. This lock is a leaf lock: no other lock is
//! taken while it is held. A reader copies one entry at a time, unlocks, and continues after the
//! number of that entry.
//!
//! The functions that a registration calls are inline. Each function has two callers, one for each
//! mode, and so many arguments that a call would cost more than the function's body.
//!
//! Uses only `core`, so cargo also compiles this file on the host. `docs/observe.md` specifies the
//! format of a registration's line for programs.

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
    /// The memory is pinned.
    Pinned,
    /// The memory is pinned, and mapped for an HCA.
    Mapped,
    /// The memory was freed.
    Revoked,
    /// The registration was released, but some of its memory stays pinned until it is freed.
    Orphaned,
}

impl State {
    /// Returns the name of the state.
    pub(crate) fn name(self) -> &'static core::ffi::CStr {
        match self {
            State::Pinned => c"pinned",
            State::Mapped => c"mapped",
            State::Revoked => c"revoked",
            State::Orphaned => c"orphaned",
        }
    }
}

/// The data that is known when a registration is made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct RegistrationInfo {
    /// Mode of the client.
    pub(crate) mode: PinMode,
    /// The range, in whole pages.
    pub(crate) span: Span,
    /// Smallest page size of all pins.
    pub(crate) page: PageSize,
    /// Number of pins.
    pub(crate) chunks: usize,
    /// GPUs to which the memory belongs, as far as they are known.
    pub(crate) gpus: Gpus,
    /// The thread that made the registration.
    pub(crate) task: Task,
    /// Time of the registration, in microseconds since boot.
    pub(crate) since: u64,
}

/// A registration in the registry.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Registration {
    /// Numbers begin with 1, and are not reused.
    pub(crate) number: u64,
    pub(crate) state: State,
    pub(crate) info: RegistrationInfo,
    /// Number of scatter-list entries, or 0 if the memory is not mapped.
    pub(crate) entries: u32,
    /// The device for which the memory is mapped.
    pub(crate) hca: Option<PciAddress>,
}

/// Counters of the registrations of one mode.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Counts {
    /// Registrations that were added to the registry.
    pub(crate) registered: u64,
    /// Registrations that were mapped.
    pub(crate) mapped: u64,
    /// Registrations that lost memory before they were released.
    pub(crate) revoked: u64,
    /// Registrations that were released.
    pub(crate) released: u64,
    /// Registrations that are in the registry now.
    pub(crate) active: u64,
    /// Bytes of the registrations in the registry, in whole pages.
    pub(crate) active_bytes: u64,
}

/// The newest registration's number, and the counters. The lock of the entries protects these
/// fields.
#[derive(Debug)]
pub(crate) struct Registry {
    /// Number of the newest registration. 64 bits do not wrap in practice.
    last: u64,
    counts: [Counts; PinMode::ALL.len()],
}

impl Default for Registry {
    fn default() -> Self {
        Registry::new()
    }
}

impl Registry {
    /// Returns an empty registry.
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

    /// Returns the number of the newest registration, or 0 before the first registration.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Returns the counters of each mode, taken at one moment.
    pub(crate) fn counts(&self) -> [Counts; PinMode::ALL.len()] {
        self.counts
    }

    /// Adds `change` to a counter of the mode of `registration`.
    #[inline(always)]
    fn count(
        &mut self,
        registration: &Registration,
        counter: impl FnOnce(&mut Counts) -> &mut u64,
        change: u64,
    ) {
        // CAST: The number of a mode is an index of `counts`.
        if let Some(counts) = self.counts.get_mut(registration.info.mode as usize) {
            let counter = counter(counts);
            *counter = counter.wrapping_add(change);
        }
    }

    fn uncount(&mut self, registration: &Registration) {
        let bytes = registration.info.span.len().wrapping_neg();
        self.count(registration, |counts| &mut counts.active, u64::MAX);
        self.count(registration, |counts| &mut counts.active_bytes, bytes);
    }

    /// Adds a registration after a successful `acquire`.
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
        let bytes = registration.info.span.len();
        self.count(registration, |counts| &mut counts.registered, 1);
        self.count(registration, |counts| &mut counts.active, 1);
        self.count(registration, |counts| &mut counts.active_bytes, bytes);
        Some(Transition::Registered)
    }

    /// Records a successful `dma_map`: the number of scatter-list entries, and the address of the
    /// device.
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
        self.count(registration, |counts| &mut counts.mapped, 1);
        Some(Transition::Mapped)
    }

    /// Records a `dma_unmap`. A revoked registration stays revoked.
    #[inline]
    pub(crate) fn unmapped(&mut self, slot: &mut Option<Registration>) -> Option<Transition> {
        let registration = slot.as_mut().filter(|r| r.state == State::Mapped)?;
        registration.state = State::Pinned;
        registration.entries = 0;
        registration.hca = None;
        None
    }

    /// Records that memory of the registration is freed. Counts each registration at most once, and
    /// never after its release.
    #[inline]
    pub(crate) fn revoked(&mut self, slot: &mut Option<Registration>) -> Option<Transition> {
        let registration = slot
            .as_mut()
            .filter(|r| matches!(r.state, State::Pinned | State::Mapped))?;
        registration.state = State::Revoked;
        self.count(registration, |counts| &mut counts.revoked, 1);
        Some(Transition::Revoked)
    }

    /// Records the `release`. An `orphaned` registration stays in the registry until
    /// [`remove`](Self::remove).
    #[inline]
    pub(crate) fn released(
        &mut self,
        slot: &mut Option<Registration>,
        orphaned: bool,
    ) -> Option<Transition> {
        let mut registration = slot.take()?;
        self.count(&registration, |counts| &mut counts.released, 1);
        if orphaned {
            registration.state = State::Orphaned;
            registration.entries = 0;
            registration.hca = None;
            *slot = Some(registration);
        } else {
            self.uncount(&registration);
        }
        let Registration { number, state, .. } = registration;
        Some(Transition::Released(number, state))
    }

    /// Removes the registration from the registry when its entry is dropped, unless `released` has
    /// already removed it.
    pub(crate) fn remove(&mut self, slot: &mut Option<Registration>) -> Option<Transition> {
        self.uncount(&slot.take()?);
        None
    }
}

/// A change of a registration's state for which there is a tracepoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Transition {
    Registered,
    Mapped,
    Revoked,
    /// The registration's number, and its last state. The state is [`State::Orphaned`] if the
    /// registration stays in the registry.
    Released(u64, State),
}

/// A registration, printed as one line.
pub(crate) struct Line<'a, N> {
    pub(crate) registration: &'a Registration,
    /// Function that returns the PCI address of a GPU, from the GPU's number.
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
        // The GPUs are printed in the order of their addresses. Each step finds the lowest address
        // above `before`.
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
