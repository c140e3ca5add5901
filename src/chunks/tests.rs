// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the search for the boundaries of allocations, against a model of allocations: all small
//! cases, and random ones. The tests also check the cost of the search.

use std::sync::{
    atomic::AtomicU32,
    Mutex,
    MutexGuard, //
};

use proptest::prelude::*;

use super::*;
use crate::{
    done,
    ranges::PageSize,
    reason::ENOMEM, //
};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 1 << 16;
const BASE: u64 = 0x7f00_0000_0000;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test panics with a lock held")
}

/// A model of nvidia.ko's allocations. Two allocations are adjacent, or separated by a range
/// without memory (a hole).
#[derive(Default)]
struct Model {
    /// First address of each allocation, and the first address after it.
    allocations: Vec<(u64, u64)>,
    seen: Mutex<Seen>,
}

/// The pins of the modelled nvidia.ko, and the number of calls.
#[derive(Default)]
struct Seen {
    calls: u64,
    /// Number of bytes of all attempted pins.
    tried: u64,
    /// Live pins.
    live: Vec<(u64, u64)>,
    /// Extents of BAR1, each with the number of pins that share it. No two extents are adjacent in
    /// BAR1.
    extents: Vec<((u64, u64), u64)>,
    /// The call that fails, and its error.
    failing: Option<(u64, Reason)>,
}

impl Seen {
    /// Adds a pin to the extents that `range` touches. Adds a new extent for each part of `range`
    /// that no existing extent covers. nvidia.ko does the same if it allocates BAR1 space at each
    /// get. Returns the number of the pin's extents.
    fn map(&mut self, range: (u64, u64)) -> u64 {
        let (mut at, mut count) = (range.0, 0);
        while at < range.1 {
            count += 1;
            let here = |((start, end), _): &&mut ((u64, u64), u64)| (*start..*end).contains(&at);
            at = match self.extents.iter_mut().find(here) {
                Some(((_, end), pins)) => {
                    *pins += 1;
                    *end
                }
                None => {
                    let starts = self.extents.iter().map(|((start, _), _)| *start);
                    let next = starts.filter(|start| *start > at).min();
                    let end = next.unwrap_or(range.1).min(range.1);
                    self.extents.push(((at, end), 1));
                    end
                }
            };
        }
        count
    }

    fn unmap(&mut self, range: (u64, u64)) {
        for ((start, end), pins) in &mut self.extents {
            if *start < range.1 && *end > range.0 {
                *pins -= 1;
            }
        }
        self.extents.retain(|(_, pins)| *pins > 0);
    }
}

struct Pin<'a> {
    model: &'a Model,
    range: (u64, u64),
    /// Number of extents of the pin.
    extents: u64,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        let mut seen = lock(&self.model.seen);
        let place = seen.live.iter().position(|range| *range == self.range);
        seen.live.swap_remove(place.expect("pinned"));
        seen.unmap(self.range);
    }
}

fn log2(n: u64) -> u64 {
    u64::from(n.next_power_of_two().ilog2())
}

impl Model {
    /// Makes one allocation after another from `BASE` on. Each number is the size of an allocation
    /// in units. 0 makes a hole of one unit.
    fn of(units: &[u64]) -> Model {
        let mut at = BASE;
        let mut allocations = Vec::new();
        for &units in units {
            let end = at + units.max(1) * UNIT;
            if units > 0 {
                allocations.push((at, end));
            }
            at = end;
        }
        Model {
            allocations,
            ..Model::default()
        }
    }

    fn end(&self) -> u64 {
        self.allocations.last().map_or(BASE, |(_, end)| *end)
    }

    fn pin(&self, span: Span) -> Result<Pin<'_>, Reason> {
        let mut seen = lock(&self.seen);
        seen.calls += 1;
        seen.tried += span.len();
        let range = (span.start(), span.start() + span.len());
        if let Some((_, reason)) = seen.failing.filter(|(call, _)| *call == seen.calls) {
            return Err(reason);
        }
        let inside = |&(start, end): &(u64, u64)| range.0 >= start && range.1 <= end;
        if !self.allocations.iter().any(inside) {
            return Err(Reason::Pin(EINVAL));
        }
        seen.live.push(range);
        let extents = seen.map(range);
        Ok(Pin {
            model: self,
            range,
            extents,
        })
    }

    fn cover(
        &self,
        from: u64,
        to: u64,
        limit: u32,
        go_on: impl Fn() -> Result<(), Reason>,
    ) -> Result<Vec<(u64, u64)>, Reason> {
        {
            let mut seen = lock(&self.seen);
            (seen.calls, seen.tried) = (0, 0);
        }
        let span = Span::covering(from, to - from, PageSize::KIB_64, 1 << 50)?;
        let found: Result<SmallVec<Pin<'_>>, Reason> =
            cover(span, limit, |span| self.pin(span), go_on);
        let ranges = found
            .as_ref()
            .map(|pins| pins.iter().map(|pin| pin.range).collect());
        let ranges: Vec<_> = ranges.map_err(|reason| *reason).unwrap_or_default();
        let mut live = lock(&self.seen).live.clone();
        live.sort_unstable();
        assert_eq!(
            ranges, live,
            "the returned pins are not the live pins, sorted by address"
        );
        for pin in found.iter().flat_map(|pins| pins.iter()) {
            assert_eq!(pin.extents, 1, "made over another pin: {:x?}", pin.range);
        }
        found.map(|_| ranges)
    }

    /// Covers `[from, to)`, and checks that the chunks match the allocations and that the cost is
    /// within the bounds. Returns the number of chunks and of calls.
    fn check(&self, from: u64, to: u64, limit: u32) -> Result<(u64, u64), Reason> {
        let found = self.cover(from, to, limit, || Ok(()));
        let (calls, tried) = {
            let seen = lock(&self.seen);
            (seen.calls, seen.tried)
        };
        let what = || {
            let (some, more) = self.allocations.split_at(self.allocations.len().min(20));
            let more = more.len();
            format!("{some:x?} and {more} more, from {from:#x} to {to:#x}")
        };
        let mut at = from;
        let mut hole = None;
        // The number of units that the range touches in each allocation.
        let mut sizes = Vec::new();
        while at < to && hole.is_none() {
            let here = |&&(start, end): &&(u64, u64)| (start..end).contains(&at);
            match self.allocations.iter().find(here) {
                Some(&(_, end)) => {
                    sizes.push((end.min(to) - at).div_ceil(UNIT));
                    at = end;
                }
                None => hole = Some(at),
            }
        }
        let most = u64::from(limit) * CALLS_PER_CHUNK + CALLS_MORE;
        assert!(calls <= most, "{calls} calls: {}", what());
        let count = sizes.len() as u64;
        let largest = log2(sizes.iter().max().unwrap_or(&0) + 1);
        match (&found, hole) {
            (Ok(ranges), None) => {
                assert_eq!(
                    ranges.first().map(|range| range.0),
                    Some(from),
                    "{}",
                    what()
                );
                assert_eq!(ranges.last().map(|range| range.1), Some(to), "{}", what());
                assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
                let chunks = ranges.len() as u64;
                assert!(
                    chunks <= (PATIENCE + 1) * count,
                    "{chunks} chunks: {}",
                    what()
                );
                assert!(chunks <= u64::from(limit));
                if count == 1 {
                    assert_eq!((calls, chunks), (1, 1), "{}", what());
                }
                let bound = 2 + chunks * (4 + 2 * largest);
                assert!(calls <= bound, "{calls} calls, {bound} allowed: {}", what());
                assert!(
                    tried <= 10 * (to - from),
                    "{tried:#x} bytes tried: {}",
                    what()
                );
                let (middle, equal) = match &sizes[..] {
                    [_, middle @ .., _] => {
                        (middle.first(), middle.windows(2).all(|m| m[0] == m[1]))
                    }
                    _ => (None, false),
                };
                if equal && middle.is_some_and(|m| sizes[0] <= *m && sizes[sizes.len() - 1] <= *m) {
                    assert_eq!(chunks, count, "{}", what());
                    let bound = count + count / PATIENCE + 14 + 4 * largest;
                    assert!(calls <= bound, "{calls} calls, {bound} allowed: {}", what());
                }
            }
            (Err(Reason::Pin(EINVAL)), _) if limit < 2 => assert_eq!(calls, 1, "{}", what()),
            (Err(Reason::Pin(EINVAL)), Some(at)) if at / UNIT == from / UNIT => {
                let want = 1 + u64::from(from / UNIT != (to - 1) / UNIT);
                assert_eq!(calls, want, "not GPU memory: {}", what());
            }
            (Err(Reason::Hole { offset }), Some(at)) => {
                assert_eq!(from + offset, at, "{}", what());
            }
            (Err(Reason::TooManyChunks { limit: told }), _) => {
                assert_eq!(*told, limit);
                let allowed = u64::from(limit);
                assert!(
                    (PATIENCE + 1) * count > allowed || calls == most,
                    "{}",
                    what()
                );
            }
            other => panic!("{other:?}: {}", what()),
        }
        found.map(|ranges| (ranges.len() as u64, calls))
    }
}

/// Returns all sequences of up to `parts` numbers from 0 to `most`. 0 stands for a hole: see
/// [`Model::of`].
fn layouts(parts: usize, most: u64) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new()];
    let mut last = all.clone();
    for _ in 0..parts {
        last = last
            .iter()
            .flat_map(|layout: &Vec<u64>| (0..=most).map(|units| [&layout[..], &[units]].concat()))
            .collect();
        all.extend(last.clone());
    }
    all
}

#[test]
fn all_layouts_of_up_to_five_allocations() {
    let (mut cases, mut worst) = (0_u64, 0);
    for layout in layouts(5, 5) {
        let model = Model::of(&layout);
        let end = BASE
            + layout
                .iter()
                .map(|units| (*units).max(1) * UNIT)
                .sum::<u64>();
        for from in [
            BASE,
            BASE + PAGE,
            BASE + UNIT - PAGE,
            BASE + UNIT,
            BASE + 3 * UNIT,
        ] {
            for to in [
                end,
                end - PAGE,
                end - UNIT + PAGE,
                end - UNIT,
                end - 3 * UNIT,
            ] {
                if from < to {
                    let found = model.check(from, to, 1024);
                    worst = worst.max(found.map_or(0, |(_, calls)| calls));
                    cases += 1;
                }
            }
        }
    }
    println!(
        "figure: cases | up to five allocations of up to 5 units of 2 MiB, or holes, with up to five starts and five \
         ends each | {cases} |"
    );
    println!("{worst} calls at most");
}

#[test]
fn all_limits() {
    let mut refused = 0;
    for layout in layouts(4, 4) {
        let model = Model::of(&layout);
        if model.allocations.is_empty() {
            continue;
        }
        let (from, to) = (BASE, model.end());
        let Ok((chunks, _)) = model.check(from, to, 1024) else {
            continue;
        };
        for limit in 1..=chunks {
            let found = model.check(from, to, limit as u32);
            match found {
                Ok((found, _)) => assert_eq!(found, chunks),
                Err(reason) => {
                    assert!(limit < chunks);
                    let off = limit < 2;
                    assert_eq!(reason == Reason::Pin(EINVAL), off, "{reason:?}");
                    // A limit of 1 allows no search, so `pin` is called only once.
                    assert!(!off || lock(&model.seen).calls == 1);
                    refused += 1;
                }
            }
        }
    }
    println!("{refused} refused for the limit");
}

/// The usual layouts of allocators: many allocations of one size. The range begins anywhere in the
/// first allocation and ends anywhere in the last one.
#[test]
fn allocations_of_one_size_cost_about_one_call_each() {
    for (units, count) in [
        (1, 1024),
        (1, 2),
        (10, 16),
        (10, 205),
        (10, 1024),
        (64, 100),
        (20480, 2),
    ] {
        let (mut most_calls, mut most_tried) = (0, 0.0_f64);
        for from in [BASE, BASE + 3 * PAGE, BASE + (units - 1) * UNIT + PAGE] {
            let model = Model::of(&vec![units; count]);
            let to = model.end() - PAGE;
            let (chunks, calls) = model.check(from, to, 1024).expect("covered");
            assert_eq!(chunks, count as u64);
            most_calls = most_calls.max(calls);
            most_tried = most_tried.max(lock(&model.seen).tried as f64 / (to - from) as f64);
        }
        println!(
            "figure: search | {count} of {} MiB | {most_calls} | {:.2} | {most_tried:.2} |",
            units * UNIT / MIB,
            most_calls as f64 / count as f64
        );
    }
}

#[test]
fn each_call_may_fail() {
    for layout in [&[1_u64, 1][..], &[3, 3, 3, 3], &[2, 5, 1, 7, 7, 7, 3]] {
        let mut model = Model::of(layout);
        let (from, to) = (BASE + PAGE, model.end() - PAGE);
        let (_, calls) = model.check(from, to, 64).expect("covered");
        for call in 1..=calls {
            for reason in [
                Reason::Pin(ENOMEM),
                Reason::Entries { have: 1, want: 2 },
                Reason::Revoked,
            ] {
                lock(&model.seen).failing = Some((call, reason));
                // `cover` checks that no pin is left.
                assert_eq!(model.cover(from, to, 64, || Ok(())).err(), Some(reason));
                assert_eq!(lock(&model.seen).calls, call);
            }
            // Call number `call` fails as if an allocation had been freed. The search then covers
            // the range with other pins, or returns an error.
            lock(&model.seen).failing = Some((call, Reason::Pin(EINVAL)));
            if let Err(reason) = model.cover(from, to, 64, || Ok(())) {
                let known = matches!(reason, Reason::Pin(EINVAL) | Reason::Hole { .. });
                assert!(known, "{reason:?}");
            }
        }
        lock(&model.seen).failing = None;
        model = Model::of(layout);
        for asked in 0..calls - 1 {
            let left = Mutex::new(asked);
            let go_on = || {
                let mut left = lock(&left);
                *left = left.checked_sub(1).ok_or(Reason::Revoked)?;
                Ok(())
            };
            let found = model.cover(from, to, 64, go_on);
            assert_eq!(found.err(), Some(Reason::Revoked));
            assert_eq!(lock(&model.seen).calls, asked + 1);
        }
    }
}

const RANDOM_SIZES: u32 = 4_000;
static RANDOM_SIZES_DONE: AtomicU32 = AtomicU32::new(0);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(RANDOM_SIZES))]

    #[test]
    fn random_sizes(
        units in prop::collection::vec(prop_oneof![1_u64..4, 1_u64..40, Just(10_u64)], 1..60),
        hole in prop::option::of(0_usize..60),
        from in 0_u64..200,
        to in 1_u64..200,
        limit in prop_oneof![Just(1024_u32), 1_u32..60],
    ) {
        let mut units = units;
        if let Some(place) = hole.filter(|place| *place < units.len()) {
            units[place] = 0;
        }
        let model = Model::of(&units);
        let all = BASE + units.iter().map(|units| (*units).max(1) * UNIT).sum::<u64>();
        let (from, to) = (BASE + from * PAGE, all - to.min((all - BASE) / PAGE - 1) * PAGE);
        if from < to {
            let _ = model.check(from, to, limit);
        }
        let what = "sizes and holes at random, up to 59 allocations, any limit";
        done(&RANDOM_SIZES_DONE, RANDOM_SIZES, what);
    }
}

/// Measures the mean cost for irregular sizes.
#[test]
fn the_cost_of_random_sizes() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for most in [2, 8, 64, 512] {
        let (mut allocations, mut all_chunks, mut all_calls, mut tried, mut bytes) =
            (0, 0, 0, 0, 0);
        for _ in 0..200 {
            let units: Vec<u64> = (0..100)
                .map(|_| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    1 + random % most
                })
                .collect();
            let model = Model::of(&units);
            let (chunks, calls) = model.check(BASE, model.end(), u32::MAX).expect("covered");
            allocations += units.len();
            all_chunks += chunks;
            all_calls += calls;
            tried += lock(&model.seen).tried;
            bytes += model.end() - BASE;
        }
        println!(
            "{:.2} chunks an allocation",
            all_chunks as f64 / allocations as f64
        );
        println!(
            "figure: search | {allocations} of 2 to {} MiB, at random | {all_calls} | {:.2} | {:.2} |",
            most * UNIT / MIB,
            all_calls as f64 / allocations as f64,
            tried as f64 / bytes as f64
        );
    }
}
