// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the arithmetic in `ranges`.

use std::sync::atomic::AtomicU32;

use proptest::prelude::*;

use super::*;
use crate::{
    done,
    fakes::ib_core::trim, //
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const KERNEL_PAGES: [u64; 3] = [4 * KIB, 16 * KIB, 64 * KIB];

fn span(addr: u64, len: u64) -> Result<Span, Reason> {
    Span::covering(addr, len, PageSize::KIB_64, 1 << 40)
}

/// Returns the entries for the pages of these pins, and checks that reading in batches gives the
/// same entries.
fn entries_of_pins(
    pins: &[(&[u64], PageSize)],
    va: u64,
    page: PageSize,
    max_segment: u32,
) -> Vec<AddrRange> {
    let read = |batch: usize| {
        let (mut layout, mut entries) = (SgLayout::new(va, page, max_segment), Vec::new());
        for (mut rest, page) in pins.iter().copied() {
            while !rest.is_empty() {
                let mut room = batch;
                let push = |entry| {
                    assert!(room > 0, "called after `false`");
                    room -= 1;
                    entries.push(entry);
                    room > 0
                };
                rest = layout.pages(rest, |addr| *addr, page, push);
                assert!(rest.is_empty() || room == 0, "stopped for nothing");
            }
        }
        entries.extend(layout.finish());
        entries
    };
    let entries = read(usize::MAX);
    for batch in 1..4 {
        assert_eq!(read(batch), entries, "{batch} entries a batch");
    }
    entries
}

/// Returns the entries for these pages, and checks that one pin, two pins and ranges give the same
/// entries.
fn list(addrs: &[u64], va: u64, page: PageSize, max_segment: u32) -> Vec<AddrRange> {
    let entries = entries_of_pins(&[(addrs, page)], va, page, max_segment);
    let (first, second) = addrs.split_at(addrs.len() / 2);
    let pins = [(first, page), (second, page)];
    assert_eq!(entries_of_pins(&pins, va, page, max_segment), entries);
    let layout = SgLayout::new(va, page, max_segment);
    let ranges = entries_of(pages(addrs, page), layout);
    assert_eq!(ranges, entries, "by ranges, max_segment {max_segment}");
    entries
}

fn pages(addrs: &[u64], page: PageSize) -> impl Iterator<Item = AddrRange> + '_ {
    let len = page.bytes();
    addrs.iter().map(move |&addr| AddrRange { addr, len })
}

fn entries_of(ranges: impl Iterator<Item = AddrRange>, mut layout: SgLayout) -> Vec<AddrRange> {
    let mut entries = Vec::new();
    for range in ranges {
        layout.range(range, |entry| {
            entries.push(entry);
            true
        });
    }
    entries.extend(layout.finish());
    entries
}

/// Joins contiguous ranges.
fn join(ranges: impl Iterator<Item = AddrRange>) -> Vec<AddrRange> {
    let ranges: Vec<AddrRange> = ranges.collect();
    clip(&ranges, 0, u64::MAX)
}

/// Returns the address of every `step` bytes of the entries.
fn expand(entries: &[AddrRange], step: u64) -> Vec<u64> {
    entries
        .iter()
        .flat_map(|e| (0..e.len / step).map(move |i| e.addr + i * step))
        .collect()
}

#[test]
fn a_range_is_mapped_in_steps_that_end_at_round_addresses() {
    for addr in [0, 4 * GIB + KIB, 5 * GIB - KIB, u64::MAX - 5 * GIB] {
        for len in [0, 1, KIB, GIB - 1, GIB, GIB + 1, 2 * GIB, 5 * GIB] {
            let steps: Vec<AddrRange> = steps(AddrRange { addr, len }).collect();
            let longest = steps.iter().map(|step| step.len).max().unwrap_or(0);
            assert!(longest <= GIB, "{longest:#x} bytes are mapped at once");
            // A page of the IOMMU that begins at a multiple of its size lies in one step.
            for step in steps.iter().skip(1) {
                assert_eq!(step.addr % GIB, 0, "a step begins at {:#x}", step.addr);
            }
            // The steps are in order and complete.
            let whole = (len > 0).then_some(AddrRange { addr, len });
            assert!(join(steps.into_iter()).into_iter().eq(whole));
        }
    }
}

/// Tests every pair of ranges within sixteen addresses.
#[test]
fn ranges_contain_widen_and_have_a_bounding_range() {
    let all =
        || (0..16u64).flat_map(|addr| (1..=16 - addr).map(move |len| AddrRange { addr, len }));
    let places = |range: &AddrRange| range.addr..range.addr + range.len;
    for one in all() {
        for other in all() {
            let inside = places(&other).all(|place| places(&one).contains(&place));
            assert_eq!(one.contains(&other), inside, "{one:?} {other:?}");
            if places(&one).contains(&other.addr) {
                let both = other.addr..places(&one).end.min(places(&other).end);
                assert_eq!(places(&other.start_in(&one)), both, "{one:?} {other:?}");
            }
            let bounds = one.bounding(&other);
            assert_eq!(bounds.addr, one.addr.min(other.addr));
            assert_eq!(
                places(&bounds).end,
                places(&one).end.max(places(&other).end)
            );
            for round in [1, 2, 4, 8, 16].into_iter().filter(|_| inside) {
                let from = other.addr / round * round;
                let to = places(&other).end.next_multiple_of(round);
                let want = from.max(one.addr)..to.min(places(&one).end);
                assert_eq!(
                    places(&other.widened(round, &one)),
                    want,
                    "{one:?} {other:?}"
                );
            }
        }
    }
}

#[test]
fn ranges_at_the_end_of_the_address_space() {
    let last = 0u64.wrapping_sub(KIB);
    let end = AddrRange {
        addr: last,
        len: KIB,
    };
    let all = AddrRange {
        addr: 0,
        len: u64::MAX,
    };
    assert!(end.contains(&end) && !end.contains(&AddrRange { addr: 0, len: 1 }));
    assert!(!end.contains(&AddrRange {
        addr: last,
        len: u64::MAX
    }));
    assert_eq!(end.widened(4 * KIB, &end), end);
    assert_eq!(all.widened(1, &all), all);
    let below = AddrRange {
        addr: last - KIB,
        len: KIB,
    };
    assert_eq!(below.bounding(&end).len, 2 * KIB);
    assert_eq!(all.start_in(&all), all);
    assert_eq!(end.start_in(&all).len, KIB - 1);
}

/// A range of DMA addresses may begin at any page of the IOMMU. The memory lies within that range
/// of DMA addresses. An HCA can use large pages for memory of 2 MiB and more, so DMA addresses of
/// such memory are congruent to virtual addresses.
#[test]
fn dma_addresses_are_congruent_to_virtual_ones_from_two_mib_on() {
    for len in [
        64 * KIB,
        2 * MIB - 64 * KIB,
        2 * MIB,
        3 * MIB,
        GIB,
        2 * GIB,
        5 * GIB,
    ] {
        let slack = iova_slack(len);
        let want = [2 * MIB, GIB, 2 * GIB]
            .into_iter()
            .filter(|size| *size <= len);
        assert_eq!(slack, want.max().unwrap_or(0), "{len:#x}");
        for base in [4 * KIB, 64 * KIB, 0xffff_0000, 5 * GIB - 4 * KIB] {
            for va in [0x7f00_0000_0000, 0x7f00_0001_0000, 0x7f7f_ffff_0000] {
                let offset = iova_offset(base, va, slack);
                assert!(offset <= slack, "{offset:#x} of {slack:#x}");
                assert_eq!(offset % (4 * KIB), 0);
                let apart = va - (base + offset);
                assert!(slack == 0 || apart % slack == 0, "{apart:#x} apart");
            }
        }
    }
}

/// Returns the entries of memory behind an IOMMU that has allocated addresses from `base` on.
fn behind_an_iommu(base: u64, va: u64, len: u64) -> Vec<AddrRange> {
    let start = base + iova_offset(base, va, iova_slack(len));
    let runs = IovaLayout::new(va, len).runs(start, len);
    entries_of(
        runs.into_iter(),
        SgLayout::new(va, PageSize::KIB_64, 1 << 31),
    )
}

/// Entries end only at multiples of 2 GiB, even for fragmented memory.
#[test]
fn memory_behind_an_iommu_has_an_entry_for_each_two_gib() {
    let got = behind_an_iommu(0xffff_f000, 0x7f00_0000_0000, 80 * GIB);
    assert_eq!(got.len(), 40);
    assert!(got.iter().all(|entry| entry.addr % (2 * GIB) == 0));
}

/// Start addresses near the boundaries of a window and of 4 GiB, and away from these boundaries.
const BEGINNINGS: [u64; 7] = [
    0x7f00_0000_0000,
    0x7f00_0001_0000,
    0x7f00_7fff_0000,
    0x7f00_8000_0000,
    0x7f00_c000_0000,
    0x7f00_ffff_0000,
    0x7f7f_ffe0_0000,
];
const LENGTHS: [u64; 12] = [
    64 * KIB,
    2 * GIB - 64 * KIB,
    2 * GIB,
    3 * GIB,
    4 * GIB - 64 * KIB,
    4 * GIB,
    4 * GIB + 64 * KIB,
    5 * GIB,
    6 * GIB,
    8 * GIB,
    64 * GIB + 2 * MIB,
    1 << 40,
];

/// Because of the hole, no HCA page is larger than 2 GiB, for any `iova` of the application.
#[test]
fn bit_31_differs_between_the_runs_of_more_than_four_gib() {
    for base in [0x1000, 0x10_0000, 2 * GIB, 4 * GIB, 0x1_2345_6000] {
        for va in BEGINNINGS {
            for len in LENGTHS {
                let entries = behind_an_iommu(base, va, len);
                let ranges = || entries.iter().copied();
                let total: u64 = ranges().map(|range| range.len).sum();
                assert_eq!(total, len);
                let mut at = va;
                let distances: Vec<u64> = ranges()
                    .map(|range| {
                        let distance = range.addr.wrapping_sub(at) % (4 * GIB);
                        at += range.len;
                        distance
                    })
                    .collect();
                let first = distances[0];
                let differ = distances.iter().any(|distance| distance ^ first == 2 * GIB);
                assert_eq!(
                    differ,
                    len > 4 * GIB,
                    "{len:#x} bytes at {va:#x} behind {base:#x}: bit 31 is the same in all runs"
                );
                assert!(distances
                    .iter()
                    .all(|distance| (distance ^ first) % (2 * GIB) == 0));
                if len > 4 * GIB {
                    assert_eq!(common_distance(va, ranges()), None);
                }
                // All memory lies in the range that is requested from the IOMMU.
                let end = base + len + iova_slack(len) + IovaLayout::new(va, len).hole();
                assert!(ranges().all(|range| range.addr >= base && range.addr + range.len <= end));
            }
        }
    }
}

/// The drop of a partial mapping unmaps the runs of the mapped part.
#[test]
fn the_runs_of_a_part_contain_its_bytes() {
    for va in BEGINNINGS {
        for len in LENGTHS {
            let layout = IovaLayout::new(va, len);
            for part in LENGTHS.into_iter().filter(|part| *part <= len) {
                let runs = layout.runs(4096, part);
                assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), part);
                let mut nth = 0;
                for run in runs.into_iter().filter(|run| run.len > 0) {
                    assert_eq!(run.addr, 4096 + layout.offset(nth));
                    let last = nth + run.len - 1;
                    assert_eq!(run.addr + run.len - 1, 4096 + layout.offset(last));
                    nth += run.len;
                }
            }
        }
    }
}

#[test]
fn a_common_distance_needs_a_long_run_and_equal_distances() {
    let va = 0x7f00_0000_0000;
    let of = |ranges: &[(u64, u64)]| {
        let ranges = ranges.iter().map(|&(addr, len)| AddrRange { addr, len });
        common_distance(va, ranges)
    };
    assert_eq!(of(&[]), None);
    // One range, adjacent ranges, and distances other than 0.
    assert_eq!(of(&[(0, 4 * GIB)]), Some(0));
    assert_eq!(of(&[(0, 4 * GIB - KIB)]), None);
    assert_eq!(of(&[(0, 2 * GIB), (2 * GIB, 2 * GIB)]), Some(0));
    assert_eq!(of(&[(GIB, 2 * GIB), (3 * GIB, 2 * GIB)]), Some(GIB));
    assert_eq!(of(&[(1 << 40, 8 * GIB)]), Some(0));
    // A short run before or after a long one.
    assert_eq!(of(&[(8 * GIB, GIB), (GIB, 4 * GIB)]), Some(0));
    assert_eq!(of(&[(0, 4 * GIB), (8 * GIB, GIB)]), Some(0));
    assert_eq!(of(&[(9 * GIB, GIB), (GIB, 4 * GIB)]), None);
    assert_eq!(of(&[(0, 4 * GIB), (9 * GIB, GIB)]), None);
    // A range at the end of the address space causes no overflow.
    assert_eq!(of(&[(u64::MAX - GIB + 1, GIB)]), None);
}

#[test]
fn a_span_covers_whole_pages() {
    let covers = |addr, len| span(addr, len).map(|s| (s.start(), s.len()));
    assert_eq!(covers(0x10000, 0x10000), Ok((0x10000, 0x10000)));
    assert_eq!(covers(0x1ffff, 1), Ok((0x10000, 0x10000)));
    assert_eq!(covers(0x1ffff, 2), Ok((0x10000, 0x20000)));
    assert_eq!(covers(0x20000, 1), Ok((0x20000, 0x10000)));
}

#[test]
fn a_span_that_wraps_is_refused() {
    assert_eq!(span(0x1000, 0), Err(Reason::Empty));
    assert_eq!(span(u64::MAX, 1), Err(Reason::Wraps));
    assert_eq!(span(u64::MAX - 0xffff, 0xffff), Err(Reason::Wraps));
    assert_eq!(span(0x1000, u64::MAX), Err(Reason::Wraps));
    assert_eq!(span(0, (1 << 40) + 1), Err(Reason::TooLong));
    assert_eq!(span(0, 1 << 40).map(|s| s.len()), Ok(1 << 40));
}

#[test]
fn only_aligned_spans_have_a_number_of_pages() {
    let s = span(0x10000, 0x30000);
    assert_eq!(s.map(|s| s.pages(PageSize::KIB_64)), Ok(Some(3)));
    assert_eq!(s.map(|s| s.pages(PageSize::KIB_128)), Ok(None));
    let s = span(0x20000, 0x40000);
    assert_eq!(s.map(|s| s.pages(PageSize::KIB_128)), Ok(Some(2)));
}

#[test]
fn contiguous_memory_is_one_entry_per_window() {
    for (gib, want) in [(1, 1), (2, 1), (4, 2), (80, 40)] {
        let pages: Vec<u64> = (0..gib * GIB / (64 * KIB)).map(|i| i * 64 * KIB).collect();
        let got = list(&pages, 0x7f00_0000_0000, PageSize::KIB_64, 1 << 31);
        println!("{gib} GiB contiguous, aligned: {} entries", got.len());
        assert_eq!(got.len(), want);
    }
}

#[test]
fn entries_end_at_two_gib_of_virtual_addresses() {
    let page = PageSize::KIB_64;
    let pages: Vec<u64> = (0..3 * GIB / page.bytes())
        .map(|i| i * page.bytes())
        .collect();
    let got = list(&pages, 0x7f00_4000_0000, page, u32::MAX);
    let lens: Vec<u64> = got.iter().map(|e| e.len).collect();
    assert_eq!(lens, [GIB, 2 * GIB]);
    assert!(SgLayout::new(0x7f00_4000_0000, page, u32::MAX).is_whole());
}

#[test]
fn a_small_segment_limit_is_kept_down_to_a_page() {
    let page = PageSize::KIB_64;
    let pages: Vec<u64> = (0..64).map(|i| i * page.bytes()).collect();
    for (max, want) in [
        (65536, 64),
        (131_071, 64),
        (131_072, 32),
        (65535, 64),
        (0, 64),
    ] {
        assert_eq!(list(&pages, 0, page, max).len(), want, "max_segment {max}");
        assert!(!SgLayout::new(0, page, max).is_whole());
    }
}

/// One pin has pages of 64 KiB, the other of 128 KiB. The registration has the smaller page size.
#[test]
fn a_small_segment_limit_is_kept_for_larger_pages_of_another_pin() {
    let pins = [
        (&[0, 2 * MIB][..], PageSize::KIB_64),
        (&[4 * MIB, 4 * MIB + 128 * KIB], PageSize::KIB_128),
    ];
    for (max, want) in [(65536, 6), (131_072, 4), (1 << 31, 3)] {
        let entries = entries_of_pins(&pins, 0, PageSize::KIB_64, max);
        let longest = entries.iter().map(|entry| entry.len).max();
        assert!(longest <= Some(u64::from(max)), "{longest:?} of {max}");
        assert_eq!(entries.len(), want, "max_segment {max}");
    }
}

#[test]
fn a_page_across_the_end_of_a_window_ends_two_entries() {
    let pins = [
        (&[0][..], PageSize::KIB_64),
        (&[4 * MIB, 8 * MIB], PageSize::KIB_128),
    ];
    let entries = entries_of_pins(&pins, 2 * GIB - 128 * KIB, PageSize::KIB_64, 1 << 31);
    let lens = entries.iter().map(|entry| entry.len / KIB);
    assert_eq!(lens.collect::<Vec<_>>(), [64, 64, 64, 128]);
}

#[test]
fn descending_and_scattered_pages_stay_apart() {
    let page = PageSize::KIB_64;
    let descending: Vec<u64> = (0..100).rev().map(|i| i * page.bytes()).collect();
    assert_eq!(list(&descending, 0, page, 1 << 31).len(), 100);
    let same = vec![7 * page.bytes(); 10];
    assert_eq!(list(&same, 0, page, 1 << 31).len(), 10);
}

#[test]
fn ranges_join_across_chunks() {
    let chunks = [(0, 10), (10, 5), (20, 1), (21, 9)].map(|(addr, len)| AddrRange { addr, len });
    let layout = SgLayout::new(0, PageSize::KIB_64, 1 << 31);
    let want = [(0, 15), (20, 10)].map(|(addr, len)| AddrRange { addr, len });
    assert_eq!(entries_of(chunks.into_iter(), layout), want);
}

#[test]
fn entries_at_the_end_of_the_address_space() {
    let page = PageSize::KIB_64;
    let last = 0u64.wrapping_sub(page.bytes());
    assert_eq!(list(&[last], last, page, 1 << 31).len(), 1);
    // Addresses are added with wrap-around here, as everywhere: the first address follows the last
    // one.
    assert_eq!(list(&[last, 0], 0, page, 1 << 31).len(), 1);
    assert_eq!(list(&[last, 0, last], 0, page, 1 << 31).len(), 2);
    assert_eq!(list(&[0], 0, page, 1 << 31).len(), 1);
}

/// Tests every placement of up to six pages in seven places, at every start within two windows, for
/// small pages and windows. The entries contain the pages, are as long as possible, and are cut
/// only where necessary.
#[test]
fn small_scopes_exhaustively() {
    const PAGE: PageSize = PageSize::of_shift(2);
    let mut cases = 0u64;
    for pages in 1..=6u32 {
        for code in 0..7u64.pow(pages) {
            let addrs: Vec<u64> = (0..pages).map(|i| code / 7u64.pow(i) % 7 * 4).collect();
            for window in [4u64, 8, 16] {
                for start in (0..2 * window).step_by(4) {
                    let got = list(&addrs, start, PAGE, window as u32);
                    check(&got, &addrs, start, PAGE, window);
                    cases += 1;
                }
            }
        }
    }
    println!(
        "figure: cases | up to six pages on seven places, at every start within two windows | {cases} |"
    );
}

fn check(got: &[AddrRange], addrs: &[u64], start: u64, page: PageSize, window: u64) {
    assert_eq!(expand(got, page.bytes()), addrs);
    let mut va = start;
    for (i, entry) in got.iter().enumerate() {
        let end = va + entry.len;
        assert!(
            entry.len > 0 && va / window == (end - 1) / window,
            "crosses a window"
        );
        if let Some(next) = got.get(i + 1) {
            let breaks = entry.addr + entry.len != next.addr;
            assert!(breaks || end % window == 0, "ends without a reason");
        }
        va = end;
    }
}

/// Segment limits: the default of PCI, the limit of mlx5, and values next to powers of two.
const MAX_SEGMENTS: [u32; 14] = [
    0,
    4095,
    (64 << 10) - 1,
    64 << 10,
    (64 << 10) + 1,
    96 << 10,
    128 << 10,
    (1 << 20) + 4096,
    3 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 31) + 1,
    3 << 30,
    u32::MAX,
];

/// Returns the window size, computed differently from `SgLayout`.
fn window(page: PageSize, max_segment: u32) -> u64 {
    let segment = (0..32)
        .map(|shift| 1u64 << shift)
        .take_while(|&segment| segment <= u64::from(max_segment));
    segment.max().unwrap_or(0).clamp(page.bytes(), MAX_ENTRY)
}

/// Returns the bytes `[from, to)` of `ranges`, with contiguous parts joined.
fn clip(ranges: &[AddrRange], from: u64, to: u64) -> Vec<AddrRange> {
    let mut at = 0;
    let mut clipped = Vec::<AddrRange>::new();
    for range in ranges {
        let (start, end) = (at.max(from), (at + range.len).min(to));
        if start < end {
            let addr = range.addr + (start - at);
            match clipped.last_mut() {
                Some(last) if last.addr + last.len == addr => last.len += end - start,
                _ => clipped.push(AddrRange {
                    addr,
                    len: end - start,
                }),
            }
        }
        at += range.len;
    }
    clipped
}

/// Checks everything that an HCA requires of the entries for `[addr, addr + len)`, before and after
/// ib_core has trimmed them.
fn check_registration(
    ranges: &[AddrRange],
    addr: u64,
    len: u64,
    page: PageSize,
    kernel: u64,
    max_segment: u32,
) {
    let span = Span::covering(addr, len, page, 1 << 40).expect("in range");
    let layout = SgLayout::new(span.start(), page, max_segment);
    let whole = entries_of(ranges.iter().copied(), layout);
    let window = window(page, max_segment);
    let mut va = span.start();
    for (i, entry) in whole.iter().enumerate() {
        let end = va + entry.len;
        assert!(entry.len > 0 && va / window == (end - 1) / window);
        let follows = |next: &AddrRange| entry.addr + entry.len == next.addr;
        assert!(!whole.get(i + 1).is_some_and(follows) || end % window == 0);
        va = end;
    }
    assert_eq!(va, span.start() + span.len());

    let mut trimmed = whole;
    trim(&mut trimmed, addr, len, page.bytes(), kernel).expect("can be trimmed");
    let from = addr / kernel * kernel;
    let to = (addr + len).div_ceil(kernel) * kernel;
    let total: u64 = trimmed.iter().map(|range| range.len).sum();
    assert_eq!(total, to - from);
    assert_eq!(
        clip(&trimmed, 0, total),
        clip(ranges, from - span.start(), to - span.start())
    );
}

/// Tests every range of up to four pages, at every byte of the first page, in memory with and
/// without a break after each page. Covers seven pairs of GPU page size and kernel page size, and
/// every segment limit from 0 to eight GPU pages.
#[test]
fn small_scopes_with_trimming_exhaustively() {
    let mut cases = 0u64;
    for (shift, kernel) in [(2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4), (4, 1)] {
        let page = PageSize::of_shift(shift);
        for addr in page.bytes()..2 * page.bytes() {
            for len in 1..=4 * page.bytes() - (addr - page.bytes()) {
                let span = Span::covering(addr, len, page, 1 << 40).expect("in range");
                let pages = span.pages(page).expect("whole pages");
                for breaks in 0..1u64 << (pages - 1) {
                    let ranges = join((0..pages).map(|i| {
                        let gaps = (breaks & ((1 << i) - 1)).count_ones();
                        AddrRange {
                            addr: (i + u64::from(gaps)) * page.bytes(),
                            len: page.bytes(),
                        }
                    }));
                    for max_segment in 0..=8 * page.bytes() as u32 {
                        check_registration(&ranges, addr, len, page, kernel, max_segment);
                        cases += 1;
                    }
                }
            }
        }
    }
    println!(
        "figure: cases | every range of up to four pages, every break, every limit, seven ratios of the GPU's page to \
         the kernel's, trimmed as ib_core does | {cases} |"
    );
}

const REAL_LIMITS: u32 = 2000;
static REAL_LIMITS_DONE: AtomicU32 = AtomicU32::new(0);

const REAL_SIZES: u32 = 256;
static REAL_SIZES_DONE: AtomicU32 = AtomicU32::new(0);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(REAL_LIMITS))]

    /// Tests registrations that can span many windows of 2 GiB, for each page size of the GPU and
    /// of the kernel.
    #[test]
    fn real_limits(
        start in (0u64..1 << 40).prop_map(|n| 0x7000_0000_0000u64 + n),
        lens in proptest::collection::vec(
            prop_oneof![1u64..4, 1u64..1 << 10, 1u64 << 14..1 << 16],
            1..12,
        ),
        tail in 1u64..=64 * KIB,
        joined in any::<u16>(),
        page in prop_oneof![Just(PageSize::KIB_64), Just(PageSize::KIB_128)],
        kernel in prop::sample::select(&KERNEL_PAGES[..]),
        max_segment in prop_oneof![
            3 => prop::sample::select(&MAX_SEGMENTS[..]),
            1 => any::<u32>(),
        ],
    ) {
        // Limits the length of the list.
        let most = lens.iter().sum::<u64>() * page.bytes() / window(page, max_segment);
        prop_assume!(most < 20_000);
        let mut next = 0x38_0000_0000;
        let ranges: Vec<AddrRange> = lens
            .iter()
            .enumerate()
            .map(|(i, pages)| {
                let gap = if joined >> i & 1 == 1 { 0 } else { 3 * page.bytes() };
                let range = AddrRange { addr: next + gap, len: pages * page.bytes() };
                next = range.addr + range.len;
                range
            })
            .collect();
        let ranges = join(ranges.into_iter());
        let total: u64 = ranges.iter().map(|range| range.len).sum();
        // The range ends anywhere in the last page.
        let first = start & !(page.bytes() - 1);
        let end = first + total - tail.min(page.bytes()) + 1;
        prop_assume!(start < end);
        check_registration(&ranges, start, end - start, page, kernel, max_segment);
        let what = "real sizes, limits of any value, up to eleven runs of up to 4 GiB (8 GiB at 128 KiB pages)";
        done(&REAL_LIMITS_DONE, REAL_LIMITS, what);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(REAL_SIZES))]

    /// Tests registrations of up to 24 MiB with the page sizes of real GPUs. Then trims the list
    /// to whole kernel pages, as ib_core does, for each kernel page size.
    #[test]
    fn real_sizes(
        start in (0u64..1 << 30).prop_map(|n| 0x7f00_0000_0000u64 + n * 512),
        len in 1u64..(24 << 20),
        breaks in proptest::collection::vec(any::<bool>(), 400),
        shift in 16u32..=31,
        page in prop_oneof![Just(PageSize::KIB_64), Just(PageSize::KIB_128)],
        kernel in prop::sample::select(&KERNEL_PAGES[..]),
    ) {
        let span = Span::covering(start, len, page, 1 << 40).expect("in range");
        let pages = span.pages(page).expect("whole pages");
        let mut next = 0x38_0000_0000;
        let addrs: Vec<u64> = (0..pages as usize)
            .map(|i| {
                next += if breaks[i % breaks.len()] { 5 * page.bytes() } else { page.bytes() };
                next
            })
            .collect();
        let mut got = list(&addrs, span.start(), page, 1 << shift);
        check(&got, &addrs, span.start(), page, (1u64 << shift).max(page.bytes()));

        trim(&mut got, start, len, page.bytes(), kernel).expect("can be trimmed");
        let first = start / kernel * kernel;
        let end = (start + len).div_ceil(kernel) * kernel;
        let total: u64 = got.iter().map(|e| e.len).sum();
        prop_assert_eq!(total, end - first);
        let whole = expand(&list(&addrs, span.start(), page, 1 << shift), kernel);
        let skip = ((first - span.start()) / kernel) as usize;
        let want = &whole[skip..skip + (total / kernel) as usize];
        prop_assert_eq!(&expand(&got, kernel)[..], want);
        let what = "real sizes to 24 MiB, compared page by page";
        done(&REAL_SIZES_DONE, REAL_SIZES, what);
    }

    #[test]
    fn every_input_makes_a_correct_span_or_an_error(addr: u64, len: u64, max: u64, shift in 12u32..=31) {
        let page = [
            PageSize::of_shift(12), PageSize::of_shift(14), PageSize::KIB_64, PageSize::KIB_128,
        ][shift as usize % 4];
        match Span::covering(addr, len, page, max) {
            Ok(span) => {
                let end = addr.checked_add(len).expect("was checked");
                prop_assert!(span.start() <= addr && addr - span.start() < page.bytes());
                let span_end = span.start().checked_add(span.len()).expect("an invariant");
                prop_assert!(span_end >= end && span_end - end < page.bytes());
                prop_assert!(span.len() > 0 && span.len() <= max);
                prop_assert_eq!(span.pages(page), Some(span.len() / page.bytes()));
            }
            Err(Reason::Empty) => prop_assert_eq!(len, 0),
            Err(Reason::Wraps) => {
                prop_assert!(u128::from(addr) + u128::from(len) + u128::from(page.bytes() - 1)
                    > u128::from(u64::MAX));
            }
            Err(Reason::TooLong) => {
                prop_assert!(u128::from(len) + 2 * u128::from(page.bytes()) > u128::from(max));
            }
            Err(other) => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn no_entry_is_longer_than_its_field(
        ranges in proptest::collection::vec((any::<u64>(), 1u64..1 << 36), 1..20),
        va: u64,
        max_segment: u32,
    ) {
        let ranges = ranges.into_iter().map(|(addr, len)| AddrRange { addr, len });
        let want: u128 = ranges.clone().map(|r| u128::from(r.len)).sum();
        let layout = SgLayout::new(va, PageSize::KIB_64, max_segment.max(1 << 25));
        let got = entries_of(ranges, layout);
        prop_assert!(got.iter().all(|e| e.len <= MAX_ENTRY && e.len > 0));
        prop_assert_eq!(got.iter().map(|e| u128::from(e.len)).sum::<u128>(), want);
    }
}
