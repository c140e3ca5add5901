// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Ranges over several allocations: the search for their borders against a model of allocations, in all small
//! scopes and at random, with its cost; then both flavours of a registration on what it finds.

use std::sync::atomic::AtomicU32;
use std::sync::Arc;
use std::sync::Mutex;

use proptest::prelude::*;

use crate::done;
use crate::extents::Entry;
use crate::extents::PageSize;
use crate::extents::Span;
use crate::fakes::lock;
use crate::fakes::Allocation;
use crate::fakes::FakeDevice;
use crate::fakes::FakeList;
use crate::fakes::FakeTicket;
use crate::fakes::World;
use crate::fakes::KILLED_AFTER;
use crate::fakes::MAX_PIECES;
use crate::mode::Mode;
use crate::pieces::cover;
use crate::pieces::CALLS_A_PIECE;
use crate::pieces::CALLS_MORE;
use crate::pieces::PATIENCE;
use crate::pieces::UNIT;
use crate::refusal::Refusal;
use crate::refusal::EINVAL;
use crate::refusal::ENOMEM;
use crate::region::Region;
use crate::revocable::Lease;

const PAGE: u64 = 1 << 16;
const BASE: u64 = 0x7f00_0000_0000;

/// Allocations side by side, with holes between them.
#[derive(Default)]
struct Model {
    /// Beginning and end of each.
    allocations: Vec<(u64, u64)>,
    seen: Mutex<Seen>,
}

/// What the provider has seen.
#[derive(Default)]
struct Seen {
    calls: u64,
    /// Bytes that pins were tried for.
    tried: u64,
    /// Pins that live.
    live: Vec<(u64, u64)>,
    /// Extents of BAR1, each with the number of pins that share it. Two are never side by side there.
    extents: Vec<((u64, u64), u64)>,
    /// The call that fails, and how.
    failing: Option<(u64, Refusal)>,
}

impl Seen {
    /// Adds a pin to the extents that `range` touches, and makes one of what lies in none, as nvidia.ko
    /// does where BAR1 is handed out at each get. Returns how many there are.
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
    /// Extents that it consists of.
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
    /// Allocations of so many units each, one beside the other from `BASE` on; 0 is a hole of a unit.
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

    fn pin(&self, span: Span) -> Result<Pin<'_>, Refusal> {
        let mut seen = lock(&self.seen);
        seen.calls += 1;
        seen.tried += span.len();
        let range = (span.start(), span.start() + span.len());
        if let Some((_, refusal)) = seen.failing.filter(|(call, _)| *call == seen.calls) {
            return Err(refusal);
        }
        let inside = |&(start, end): &(u64, u64)| range.0 >= start && range.1 <= end;
        if !self.allocations.iter().any(inside) {
            return Err(Refusal::Pin(EINVAL));
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
        go_on: impl Fn() -> Result<(), Refusal>,
    ) -> Result<Vec<(u64, u64)>, Refusal> {
        {
            let mut seen = lock(&self.seen);
            (seen.calls, seen.tried) = (0, 0);
        }
        let span = Span::covering(from, to - from, PageSize::KIB_64, 1 << 50)?;
        let found: Result<FakeList<Pin<'_>>, Refusal> =
            cover(span, limit, |span| self.pin(span), go_on);
        let ranges = found
            .as_ref()
            .map(|pins| pins.iter().map(|pin| pin.range).collect());
        let ranges: Vec<_> = ranges.map_err(|refusal| *refusal).unwrap_or_default();
        let mut live = lock(&self.seen).live.clone();
        live.sort_unstable();
        assert_eq!(
            ranges, live,
            "in the order of addresses, and no other lives"
        );
        for pin in found.iter().flat_map(|pins| pins.iter()) {
            assert_eq!(pin.extents, 1, "made over another pin: {:x?}", pin.range);
        }
        found.map(|_| ranges)
    }

    /// Covers `[from, to)`, which must be found as it is, at a cost that is within the bounds. Returns the number of
    /// pieces and of calls.
    fn check(&self, from: u64, to: u64, limit: u32) -> Result<(u64, u64), Refusal> {
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
        // Allocations that are touched, and the units of each.
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
        let most = u64::from(limit) * CALLS_A_PIECE + CALLS_MORE;
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
                let pieces = ranges.len() as u64;
                assert!(
                    pieces <= (PATIENCE + 1) * count,
                    "{pieces} pieces: {}",
                    what()
                );
                assert!(pieces <= u64::from(limit));
                if count == 1 {
                    assert_eq!((calls, pieces), (1, 1), "{}", what());
                }
                let bound = 2 + pieces * (4 + 2 * largest);
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
                    assert_eq!(pieces, count, "{}", what());
                    let bound = count + count / PATIENCE + 14 + 4 * largest;
                    assert!(calls <= bound, "{calls} calls, {bound} allowed: {}", what());
                }
            }
            (Err(Refusal::Pin(EINVAL)), _) if limit < 2 => assert_eq!(calls, 1, "{}", what()),
            (Err(Refusal::Pin(EINVAL)), Some(at)) if at / UNIT == from / UNIT => {
                let want = 1 + u64::from(from / UNIT != (to - 1) / UNIT);
                assert_eq!(calls, want, "not GPU memory: {}", what());
            }
            (Err(Refusal::Hole { offset }), Some(at)) => {
                assert_eq!(from + offset, at, "{}", what());
            }
            (Err(Refusal::TooManyPieces { limit: told }), _) => {
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

/// All ways to write `total` as a sum of up to `parts` numbers, 0 included as holes.
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
    println!("figure: cases {cases}");
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
        let Ok((pieces, _)) = model.check(from, to, 1024) else {
            continue;
        };
        for limit in 1..=pieces {
            let found = model.check(from, to, limit as u32);
            match found {
                Ok((found, _)) => assert_eq!(found, pieces),
                Err(refusal) => {
                    assert!(limit < pieces);
                    let off = limit < 2;
                    assert_eq!(refusal == Refusal::Pin(EINVAL), off, "{refusal:?}");
                    // With the search off there is no second call.
                    assert!(!off || lock(&model.seen).calls == 1);
                    refused += 1;
                }
            }
        }
    }
    println!("{refused} refused for the limit");
}

/// What allocators do: many of one size, from some place in the first on to some place in the last.
#[test]
fn neighbours_of_one_size_cost_a_call_each() {
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
            let (pieces, calls) = model.check(from, to, 1024).expect("covered");
            assert_eq!(pieces, count as u64);
            most_calls = most_calls.max(calls);
            most_tried = most_tried.max(lock(&model.seen).tried as f64 / (to - from) as f64);
        }
        println!(
            "figure: search {count} of {} MiB | {most_calls} | {most_tried:.2}",
            units * UNIT / MIB
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
            for refusal in [
                Refusal::Pin(ENOMEM),
                Refusal::Entries { have: 1, want: 2 },
                Refusal::Revoked,
            ] {
                lock(&model.seen).failing = Some((call, refusal));
                // `cover` sees to it that nothing is left.
                assert_eq!(model.cover(from, to, 64, || Ok(())).err(), Some(refusal));
                assert_eq!(lock(&model.seen).calls, call);
            }
            // One that was freed in that moment: another way to find the rest, or a refusal.
            lock(&model.seen).failing = Some((call, Refusal::Pin(EINVAL)));
            if let Err(refusal) = model.cover(from, to, 64, || Ok(())) {
                let known = matches!(refusal, Refusal::Pin(EINVAL) | Refusal::Hole { .. });
                assert!(known, "{refusal:?}");
            }
        }
        lock(&model.seen).failing = None;
        model = Model::of(layout);
        for asked in 0..calls - 1 {
            let left = Mutex::new(asked);
            let go_on = || {
                let mut left = lock(&left);
                *left = left.checked_sub(1).ok_or(Refusal::Revoked)?;
                Ok(())
            };
            let found = model.cover(from, to, 64, go_on);
            assert_eq!(found.err(), Some(Refusal::Revoked));
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
        done(&RANDOM_SIZES_DONE, RANDOM_SIZES);
    }
}

/// The mean cost where sizes follow no rule.
#[test]
fn the_cost_of_random_sizes() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for most in [2, 8, 64, 512] {
        let (mut allocations, mut all_pieces, mut all_calls, mut tried, mut bytes) =
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
            let (pieces, calls) = model.check(BASE, model.end(), u32::MAX).expect("covered");
            allocations += units.len();
            all_pieces += pieces;
            all_calls += calls;
            tried += lock(&model.seen).tried;
            bytes += model.end() - BASE;
        }
        println!(
            "{:.2} pieces an allocation",
            all_pieces as f64 / allocations as f64
        );
        println!(
            "figure: search {allocations} of 2 to {} MiB, at random | {all_calls} | {:.2}",
            most * UNIT / MIB,
            tried as f64 / bytes as f64
        );
    }
}

const MIB: u64 = 1 << 20;

/// A world whose memory is allocations of these lengths in MiB side by side; 0 is a hole of 2 MiB.
fn world(start: u64, mib: &[u64]) -> (Arc<World>, u64) {
    let world = World::at(start);
    let mut at = start;
    for &mib in mib {
        let len = mib.max(2) * MIB;
        if mib > 0 {
            lock(&world.layout).push(Allocation {
                start: at,
                len,
                page: PageSize::KIB_64,
            });
        }
        at += len;
    }
    (world, at - start)
}

fn device(world: &Arc<World>) -> FakeDevice {
    FakeDevice {
        world: world.clone(),
    }
}

fn count(log: &[&str], what: &str) -> usize {
    log.iter().filter(|&&w| w == what).count()
}

/// What comes first is where the range begins, and so on; nothing is there twice, nothing is left out.
fn check_entries(entries: &[Entry], offset: u64, lengths: &[u64]) {
    use crate::fakes::DMA_BASE;

    assert_eq!(entries.len(), lengths.len());
    let mut at = offset;
    for (number, (entry, len)) in entries.iter().zip(lengths).enumerate() {
        let memory = entry.addr % crate::fakes::IOMMU_OFFSET - DMA_BASE;
        assert_eq!(memory, ((number as u64) << 36) + at, "entry {number}");
        assert_eq!(u64::from(entry.len), *len, "entry {number}");
        at += len;
    }
}

#[test]
fn persistent_over_several() {
    let start = 0x30_0000_0000;
    let (world, len) = world(start, &[2, 20, 6]);
    let region = Region::pin(start + 64 * 1024, len - 128 * 1024).expect("pinned");
    let table = region.map(&device(&world)).expect("mapped");
    let edge = 64 * 1024;
    check_entries(&table, edge, &[2 * MIB - edge, 20 * MIB, 6 * MIB - edge]);
    let log = world.take_log();
    assert_eq!(count(&log, "map"), 3);
    region.unmap();
    assert_eq!(world.take_log(), ["unmap"; 3]);
    drop(region);
    assert_eq!(world.take_log(), ["unpin", "unpin", "unpin", "table freed"]);
}

#[test]
fn a_failed_map_of_one_piece_undoes_the_others() {
    let start = 0x31_0000_0000;
    let (world, len) = world(start, &[2, 2, 2]);
    let region = Region::pin(start, len).expect("pinned");
    world.take_log();
    *lock(&world.fail_map) = Some(3);
    assert_eq!(region.map(&device(&world)).err(), Some(Refusal::Map(-5)));
    assert_eq!(world.take_log(), ["map", "map", "map", "unmap", "unmap"]);
    region.map(&device(&world)).expect("mapped");
    drop(region);
}

#[test]
fn the_smallest_page_is_that_of_the_region() {
    let (start, half) = (0x32_0000_0000, 2 * MIB);
    for (place, pages) in [
        [PageSize::KIB_64, PageSize::KIB_128],
        [PageSize::KIB_128, PageSize::KIB_64],
    ]
    .into_iter()
    .enumerate()
    {
        let start = start + place as u64 * 0x1000_0000;
        let (world, len) = world(start, &[2, 2]);
        for (allocation, page) in lock(&world.layout).iter_mut().zip(pages) {
            allocation.page = page;
        }
        let region = Region::pin(start, len).expect("pinned");
        assert_eq!(region.page_size(), PageSize::KIB_64);
        let table = region.map(&device(&world)).expect("mapped");
        check_entries(&table, 0, &[half, half]);
        let lease = Lease::pin(start, len).expect("pinned");
        assert_eq!(lease.page_size(), PageSize::KIB_64);
        lease.admit(FakeTicket(world.clone())).expect("admitted");
        let table = lease.map(&device(&world)).expect("mapped");
        check_entries(&table, 0, &[half, half]);
    }
}

/// The provider fails at each call; and a limit that is too low. Neither flavour leaves a pin.
#[test]
fn all_or_nothing_in_both_flavours() {
    let start = 0x33_0000_0000;
    let (world, len) = world(start, &[4, 4, 2, 8, 2]);
    drop(Region::pin(start, len).expect("pinned"));
    let calls = std::mem::take(&mut *lock(&world.calls));
    drop(Lease::pin(start, len).expect("pinned"));
    assert_eq!(*lock(&world.calls), calls, "both flavours search alike");
    let left = |refused: Option<Refusal>, revoked: Option<Refusal>, want: Refusal| {
        assert_eq!((refused, revoked), (Some(want), Some(want)));
        let log = world.take_log();
        assert_eq!(world.live(), 0);
        count(&log, "unpin")
    };
    for call in 1..=calls {
        let attempt = |pin: &dyn Fn() -> Option<Refusal>| {
            *lock(&world.calls) = 0;
            *lock(&world.fail_call) = Some((call, ENOMEM));
            let refusal = pin();
            assert_eq!(*lock(&world.calls), call, "no call after a refusal");
            refusal
        };
        let persistent = attempt(&|| Region::pin(start, len).err());
        let revocable = attempt(&|| Lease::pin(start, len).err());
        left(persistent, revocable, Refusal::Pin(ENOMEM));
    }
    *lock(&world.fail_call) = None;
    MAX_PIECES.set(3);
    let unpins = left(
        Region::pin(start, len).err(),
        Lease::pin(start, len).err(),
        Refusal::TooManyPieces { limit: 3 },
    );
    assert!(unpins >= 6, "three pins of each were undone");
    MAX_PIECES.set(1);
    left(
        Region::pin(start, len).err(),
        Lease::pin(start, len).err(),
        Refusal::Pin(EINVAL),
    );
}

/// The signal comes during each call to pin but the last, after which there is nothing left to do.
#[test]
fn a_fatal_signal_ends_the_search_in_both_flavours() {
    let start = 0x37_0000_0000;
    let (world, len) = world(start, &[4, 4, 2, 8, 2]);
    drop(Region::pin(start, len).expect("pinned"));
    let calls = *lock(&world.calls);
    for call in 1..calls {
        let attempt = |pin: &dyn Fn() -> Option<Refusal>| {
            *lock(&world.calls) = 0;
            KILLED_AFTER.set(call - 1);
            let refusal = pin();
            KILLED_AFTER.set(u64::MAX);
            assert!(
                *lock(&world.calls) == call,
                "the search goes on for a process that was killed"
            );
            assert_eq!(refusal, Some(Refusal::Killed));
            assert_eq!(world.live(), 0);
        };
        attempt(&|| Region::pin(start, len).err());
        attempt(&|| Lease::pin(start, len).err());
    }
}

/// Each part in turn, and two of them, is freed at each call to pin: before it returns, so that the callback
/// meets a region that is still being pinned.
#[test]
fn a_callback_at_each_place_of_the_search() {
    let start = 0x34_0000_0000;
    let layout = [2, 2, 6, 2];
    let (world, len) = world(start, &layout);
    drop(Lease::pin(start, len).expect("pinned"));
    let calls = *lock(&world.calls);
    let whole = lock(&world.layout).clone();
    let mut revoked = 0;
    for call in 1..=calls {
        for gone in 0..whole.len() {
            for last in gone..(gone + 2).min(whole.len()) {
                *lock(&world.layout) = whole.clone();
                *lock(&world.calls) = 0;
                world.take_log();
                let (from, to) = (whole[gone].start, whole[last].start + 1);
                *lock(&world.on_call) =
                    Some((call, Box::new(move |world| world.free_part(from, to))));
                let found = Lease::pin(start, len);
                let came = count(&world.take_log(), "callback") > 0;
                let done = *lock(&world.calls);
                *lock(&world.on_call) = None;
                match found {
                    Err(Refusal::Revoked) => {
                        assert!(came, "call {call}");
                        assert_eq!(done, call, "the search goes on without a part");
                        revoked += 1;
                    }
                    // Freed before it was pinned, or the call with that number was refused.
                    Err(Refusal::Hole { .. } | Refusal::Pin(EINVAL)) => assert!(!came),
                    Ok(lease) => {
                        assert!(!came);
                        drop(lease);
                    }
                    Err(refusal) => panic!("{refusal:?}"),
                }
                assert_eq!(world.live(), 0, "call {call}, {gone} to {last}");
            }
        }
    }
    println!("{revoked} of them met the region");
    assert!(revoked > 10);
}

/// Whichever part goes, the HCA is stopped and the whole is unmapped, once; the others stay pinned until `release`.
#[test]
fn the_loss_of_a_part_revokes_the_whole() {
    for gone in 0..3 {
        let start = 0x35_0000_0000 + gone as u64 * 0x1000_0000;
        let (world, len) = world(start, &[2, 4, 2]);
        let lease = Lease::pin(start, len).expect("pinned");
        lease.admit(FakeTicket(world.clone())).expect("admitted");
        let table = lease.map(&device(&world)).expect("mapped");
        check_entries(&table, 0, &[2 * MIB, 4 * MIB, 2 * MIB]);
        world.take_log();
        let lost = lock(&world.layout)[gone];
        world.free_part(lost.start, lost.start + 1);
        let revocation = ["ib_core revokes", "ib_core revoked", "unmap"];
        let want = [&["callback"][..], &revocation, &["callback returns"]].concat();
        assert_eq!(world.take_log(), want);
        assert_eq!(world.live(), 2);
        // The next ones find nothing to do.
        let next = lock(&world.layout)[0];
        world.free_part(next.start, next.start + 1);
        assert_eq!(world.take_log(), ["callback", "callback returns"]);
        assert_eq!(lease.map(&device(&world)).err(), Some(Refusal::Revoked));
        drop(lease);
        let log = world.take_log();
        assert_eq!((count(&log, "unpin"), count(&log, "no unpin")), (1, 2));
        assert_eq!(log.last(), Some(&"table freed"));
        assert_eq!(world.live(), 0);
    }
}

/// OFED 4.9 releases inside the callback: what still lives is left to its own callbacks, which call nobody.
#[test]
fn release_inside_the_callback_of_a_part() {
    let start = 0x36_0000_0000;
    let (world, len) = world(start, &[2, 4, 2]);
    let lease = Lease::pin(start, len).expect("pinned");
    lease.admit(FakeTicket(world.clone())).expect("admitted");
    lease.map(&device(&world)).expect("mapped");
    let parts = lock(&world.layout).clone();
    let mut lease = Some(lease);
    *lock(&world.on_revoke) = Some(Box::new(move |_| drop(lease.take())));
    world.take_log();
    world.free_part(parts[1].start, parts[1].start + 1);
    let want = [
        "callback",
        "ib_core revokes",
        "kept",
        "no unpin",
        "kept",
        "unmap",
        "table freed",
        "ib_core revoked",
        "callback returns",
    ];
    assert_eq!(world.take_log(), want);
    assert_eq!(world.live(), 2);
    world.free();
    assert_eq!(
        world.take_log(),
        [
            "callback",
            "callback returns",
            "callback",
            "callback returns"
        ]
    );
}
