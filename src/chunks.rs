// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Pins for a range that lies over several allocations, one beside the other.
//!
//! The provider pins within one allocation, says no more than that a range is not in one, and tells
//! nobody where one ends. Allocators on `cuMemMap` lay ranges over many (PyTorch's
//! `expandable_segments`: one each 2 or 20 MiB). Two things help: allocations begin and end at multiples
//! of [`UNIT`], and neighbours tend to have one size.
//!
//! ```text
//! the whole                     pinned, and that is all; or refused as invalid
//! the first unit                refused as invalid: not GPU memory at all
//! the first allocation's end    measured
//! from there, at each place     as much as the allocation before had; pinned: one chunk
//!   refused, or every so often  the allocation's end is measured
//! ```
//!
//! # Measuring
//!
//! A pin that ends with the last unit known to belong to an allocation and begins there, or one unit
//! before, tells whether the allocation goes on. One that *begins* behind that unit does not: it succeeds
//! in the next allocation, too. So a border is looked for by pins that overlap with what is known by a
//! unit, in jumps that double and then halves; these are dropped at once, and the chunk is pinned whole.
//! That way a chunk measured is an allocation, and the memory tried is a small multiple of what is there,
//! which counts, too: a pin costs by its length.
//!
//! Where nvidia.ko hands BAR1 out at each pin, one that is made over a live one shares that one's
//! extent, and gets another for the rest, elsewhere: a range more for as long as it lives. So a pin is kept
//! only if it was made with no other of the search beneath.
//!
//! That a pin of the expected length succeeds does not say that its allocation ends there. This is
//! looked at for the first one of a length, then after 1, 2, 4, … of them, at last after each
//! [`PATIENCE`]: a large allocation behind many small ones is cut into no more chunks than that.
//!
//! # Cost
//!
//! In calls to pin, for `a` allocations of at most `m` units, of which the range has a part:
//!
//! - one allocation: 1. Not GPU memory: 2, or 1 where the range lies in one unit.
//! - of one size: `a` chunks, and at most `a + a / 32 + 14 + 4 log2(m + 1)` calls.
//! - of any sizes: `p` chunks, no more than `33 a`, and at most `2 + p (4 + 2 log2(m + 1))` calls.
//! - and never more than [`CALLS_PER_CHUNK`] for each chunk that is allowed, and [`CALLS_MORE`].
//!
//! Logarithms are rounded up. `tests/host` checks all of that, and that no search tries more than ten
//! times the bytes of its range.
//!
//! Uses `core` and [`env`](super::env) alone.

use super::{
    env::SmallVec,
    ranges::Span,
    reason::{
        Reason,
        EINVAL, //
    }, //
};

/// Where allocations can begin and end, in bytes: the granularity of `cuMemCreate()` and of what
/// `cudaMalloc()` takes from the driver.
pub(crate) const UNIT: u64 = 1 << 21;

/// How many calls to pin a search may make for each chunk that is allowed.
pub(crate) const CALLS_PER_CHUNK: u64 = 8;
/// How many it may make beyond.
pub(crate) const CALLS_MORE: u64 = 64;

/// At the latest after so many chunks of the expected length it is seen whether one goes on.
pub(crate) const PATIENCE: u64 = 32;

/// Pins `span` by calls to `pin`, as a whole or in chunks in the order of their addresses, at most
/// `limit` of them, or not at all. Before each call but the first `go_on` is asked. May sleep, where
/// `pin` or the drop of a pin does.
///
/// The refusal of the whole is returned where that is not -EINVAL, or where the first unit is refused,
/// too; [`Reason::Hole`] and [`Reason::TooManyChunks`] stand for what was found later; any other refusal
/// ends the search.
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

/// A search under way. Places and lengths are in units, counted from the one that the span begins in.
struct Search<P, F, G> {
    span: Span,
    /// The address of the first unit.
    first: u64,
    /// Units that the span touches.
    units: u64,
    limit: u32,
    calls: u64,
    pin: F,
    go_on: G,
    pins: SmallVec<P>,
}

/// A pin of so many units from the beginning of an allocation on.
struct Chunk<P> {
    len: u64,
    pin: P,
}

impl<P, F, G> Search<P, F, G>
where
    F: FnMut(Span) -> Result<P, Reason>,
    G: Fn() -> Result<(), Reason>,
{
    fn run(mut self, whole: Reason) -> Result<SmallVec<P>, Reason> {
        let pin = self.try_at(0, 1)?.ok_or(whole)?;
        let units = self.units;
        let mut at = self.measure(0, Some(Chunk { len: 1, pin }), units)?;
        // The length to expect; after how many chunks of it to look whether an allocation is longer; and
        // how many there were since.
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
                    let found = self.measure(at, Some(Chunk { len, pin }), rest + 1)?;
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

    /// Pins `len` units from `at` on, or the part of them that belongs to the span; `None` if they are
    /// not in one allocation.
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
        // Never `None`: at least a unit that the span touches.
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

    /// Finds how far the allocation goes on that `at` lies in, and keeps a pin of all of that. `known`
    /// begins at `at`; without it not even the first unit is known to be GPU memory. `high` units from
    /// `at` on are known not to lie in one allocation, or are more than there are.
    fn measure(
        &mut self,
        at: u64,
        mut known: Option<Chunk<P>>,
        mut high: u64,
    ) -> Result<u64, Reason> {
        let mut low = known.as_ref().map_or(0, |chunk| chunk.len);
        let mut jump = known.as_ref().map(|_| 1_u64);
        while high - low > 1 {
            let len = match jump {
                Some(jump) => high.min(low.saturating_add(jump).saturating_add(1)) - 1,
                None => low + (high - low) / 2,
            };
            // From the last unit of what is known on.
            let overlap = low.min(1);
            let from = low - overlap;
            match self.try_at(at + from, len - from)? {
                Some(pin) => {
                    // The shorter one goes; what was pinned over it is not one extent.
                    known = (low == 0).then_some(Chunk { len, pin });
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
            Some(chunk) if chunk.len == low => chunk.pin,
            // Refused if it was freed meanwhile.
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
