// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Pins for a range that spans several adjacent allocations.
//!
//! nvidia.ko pins only within one allocation. nvidia.ko reports only that a range is not in one
//! allocation, and never where an allocation ends. Allocators that use `cuMemMap` place many
//! allocations in one range (PyTorch's `expandable_segments`: one for each 2 or 20 MiB). The search
//! uses two facts: allocations begin and end at multiples of [`UNIT`], and adjacent allocations
//! often have the same size.
//!
//! ```text
//! 1. pin the whole range            success: done; an error other than -EINVAL: refused
//! 2. pin the first unit             -EINVAL: not GPU memory
//! 3. measure the first allocation
//! 4. at each next place, pin the    success: one chunk, unless a check is due
//!    length of the last allocation  failure, or a check is due: measure the allocation
//! ```
//!
//! # Measuring
//!
//! A pin that begins in the last unit known to belong to the allocation shows whether the
//! allocation extends to the end of that pin. A pin that *begins* after the last known unit proves
//! nothing, because such a pin also succeeds in the next allocation. The search for the end of an
//! allocation therefore uses pins that overlap the known part by one unit. The steps of the search
//! double until a pin fails, and are then halved. The overlapping pins are dropped at once, and the
//! chunk is then pinned as a whole. Each measured chunk is thus one allocation. The memory that the
//! search pins is a small multiple of the range, which matters because the cost of a pin depends on
//! its length.
//!
//! If nvidia.ko allocates BAR1 space at each pin, a pin that overlaps a live pin shares the live
//! pin's extent in BAR1. The rest of the new pin gets another extent, so the memory has one more
//! extent for the lifetime of the new pin. The search therefore keeps a pin only if no other pin of
//! the search overlapped its range when the pin was made.
//!
//! If a pin of the expected length succeeds, its allocation may still be longer. The search checks
//! this for the first chunk of a length, then after 1, 2, 4, … chunks, and finally after every
//! [`PATIENCE`] chunks. A large allocation after many small ones is cut into at most [`PATIENCE`]
//! chunks.
//!
//! # Cost
//!
//! Let the range touch `a` allocations of at most `m` units each. The number of calls to pin is:
//!
//! - One allocation: 1. Not GPU memory: 2, or 1 if the range lies in one unit.
//! - Allocations of one size: `a` chunks, and at most `a + a / 32 + 14 + 4 log2(m + 1)` calls.
//! - Allocations of any sizes: `p` chunks, no more than `33 a`, and at most
//!   `2 + p (4 + 2 log2(m + 1))` calls.
//! - In all cases: at most [`CALLS_PER_CHUNK`] for each allowed chunk, plus [`CALLS_MORE`].
//!
//! Logarithms are rounded up. `tests/host` checks all these limits, and that no search pins more
//! than ten times the bytes of its range.
//!
//! Uses only `core` and [`env`](super::env).

use super::{
    env::SmallVec,
    ranges::Span,
    reason::{
        Reason,
        EINVAL, //
    }, //
};

/// Granularity of the beginning and end of allocations, in bytes. `cuMemCreate()` has this
/// granularity, and so has the memory that `cudaMalloc()` gets from the driver.
pub(crate) const UNIT: u64 = 1 << 21;

/// Maximum number of calls to pin for each allowed chunk.
pub(crate) const CALLS_PER_CHUNK: u64 = 8;
/// Number of calls to pin that a search may make in addition to those of [`CALLS_PER_CHUNK`].
pub(crate) const CALLS_MORE: u64 = 64;

/// Maximum number of chunks of the expected length between two checks for a longer allocation.
pub(crate) const PATIENCE: u64 = 32;

/// Pins all of `span` by calls to `pin`, or nothing. Pins the span as a whole, or in at most
/// `limit` chunks in the order of their addresses. Calls `go_on` before each call of `pin` except
/// the first. May sleep if `pin` or the drop of a pin may sleep.
///
/// Returns the error for the whole span if that error is not -EINVAL, if the span or `limit` allows
/// only one chunk, or if the first unit is refused, too. Once the first unit is pinned, -EINVAL of
/// `pin` can end the search only with [`Reason::Hole`] or [`Reason::TooManyChunks`]. Any other
/// error of `pin`, and any error of `go_on`, ends the search and is returned.
pub(crate) fn cover<P>(
    span: Span,
    limit: u32,
    mut pin: impl FnMut(Span) -> Result<P, Reason>,
    go_on: impl Fn() -> Result<(), Reason>,
) -> Result<SmallVec<P>, Reason> {
    let mut pins = SmallVec::default();
    let whole = match pin(span) {
        Ok(pin) => {
            pins.push(pin)?;
            return Ok(pins);
        }
        Err(reason) => reason,
    };
    let first = span.start() & !(UNIT - 1);
    // The span does not wrap.
    let units = (span.start() - first)
        .saturating_add(span.len())
        .div_ceil(UNIT);
    if whole != Reason::Pin(EINVAL) || units < 2 || limit < 2 {
        return Err(whole);
    }
    let search = Search {
        span,
        first,
        units,
        limit,
        calls: 1,
        pin,
        go_on,
        pins,
    };
    search.run(whole)
}

/// The state of a search. Places and lengths are in units, counted from the unit in which the span
/// begins.
struct Search<P, F, G> {
    span: Span,
    /// Address of the first unit.
    first: u64,
    /// Number of units that the span touches.
    units: u64,
    limit: u32,
    calls: u64,
    pin: F,
    go_on: G,
    pins: SmallVec<P>,
}

impl<P, F, G> Search<P, F, G>
where
    F: FnMut(Span) -> Result<P, Reason>,
    G: Fn() -> Result<(), Reason>,
{
    fn run(mut self, whole: Reason) -> Result<SmallVec<P>, Reason> {
        let pin = self.try_at(0, 1)?.ok_or(whole)?;
        let units = self.units;
        let mut at = self.measure(0, Some((1, pin)), units)?;
        // The expected length, the number of chunks to pin before the next check for a longer
        // allocation, and the number of chunks since the last check.
        let (mut expected, mut patience, mut passed) = (at, 0_u64, 0_u64);
        while at < units {
            if self.pins.len() as u64 >= u64::from(self.limit) {
                return Err(self.too_many());
            }
            let rest = units - at;
            let len = expected.min(rest);
            at += match self.try_at(at, len)? {
                Some(pin) if len == rest || passed < patience => {
                    passed += 1;
                    self.pins.push(pin)?;
                    len
                }
                Some(pin) => {
                    let found = self.measure(at, Some((len, pin)), rest + 1)?;
                    patience = match found == len {
                        true => patience.saturating_mul(2).clamp(1, PATIENCE),
                        false => 0,
                    };
                    (expected, passed) = (found, 0);
                    found
                }
                None => {
                    let found = self.measure(at, None, len)?;
                    (expected, patience, passed) = (found, 0, 0);
                    found
                }
            };
        }
        Ok(self.pins)
    }

    /// Pins the part of the span that lies in the `len` units from `at` on. Returns `None` if this
    /// part is not in one allocation.
    fn try_at(&mut self, at: u64, len: u64) -> Result<Option<P>, Reason> {
        let most = u64::from(self.limit)
            .saturating_mul(CALLS_PER_CHUNK)
            .saturating_add(CALLS_MORE);
        if self.calls >= most {
            return Err(self.too_many());
        }
        (self.go_on)()?;
        self.calls += 1;
        let from = self.address(at);
        let to = self.address(at.saturating_add(len));
        // The part is never `None`, because the span touches at least one of the units.
        let part = self.span.part(from, to).ok_or(self.hole(at))?;
        match (self.pin)(part) {
            Ok(pin) => Ok(Some(pin)),
            Err(Reason::Pin(EINVAL)) => Ok(None),
            Err(reason) => Err(reason),
        }
    }

    fn address(&self, at: u64) -> u64 {
        self.first.saturating_add(at.saturating_mul(UNIT))
    }

    /// Finds the end of the allocation at `at`, and keeps a pin of the whole allocation. `known` is
    /// the length, in units, of a pin from `at` on, and the pin itself. If `known` is `None`, even
    /// the first unit may not be GPU memory. The caller knows that `high` units from `at` on are
    /// not in one allocation, or exceed the span.
    fn measure(
        &mut self,
        at: u64,
        mut known: Option<(u64, P)>,
        mut high: u64,
    ) -> Result<u64, Reason> {
        let mut low = known.as_ref().map_or(0, |(len, _)| *len);
        let mut jump = known.as_ref().map(|_| 1_u64);
        while high - low > 1 {
            let len = match jump {
                Some(jump) => high.min(low.saturating_add(jump).saturating_add(1)) - 1,
                None => low + (high - low) / 2,
            };
            // The pin begins in the last unit of the known part.
            let overlap = low.min(1);
            let from = low - overlap;
            match self.try_at(at + from, len - from)? {
                Some(pin) => {
                    // Drops the known pin and the new pin. The pins overlap, so the new pin may
                    // have two extents. Only a pin that overlaps no other pin is kept.
                    known = (low == 0).then_some((len, pin));
                    low = len;
                    jump = jump.map(|jump| jump.saturating_mul(2));
                }
                None => {
                    high = len;
                    jump = None;
                }
            }
        }
        if low == 0 {
            return Err(self.hole(at));
        }
        let pin = match known {
            Some((len, pin)) if len == low => pin,
            // The pin fails if the memory was freed in the meantime.
            _ => self.try_at(at, low)?.ok_or(self.hole(at))?,
        };
        self.pins.push(pin)?;
        Ok(low)
    }

    fn too_many(&self) -> Reason {
        Reason::TooManyChunks { limit: self.limit }
    }

    fn hole(&self, at: u64) -> Reason {
        Reason::Hole {
            offset: self.address(at).saturating_sub(self.span.start()),
        }
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "chunks/tests.rs"]
mod tests;
