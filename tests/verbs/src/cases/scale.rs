// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Large scale: many registrations, many processes, much memory in one registration. The cost of a
//! registration must not grow with the number or size of other registrations. The memory of N
//! registrations must be N times the memory of one registration. No allocation may need more than
//! one contiguous page.
//!
//! These cases need a machine that counts instructions, with `tests/bench` loaded. The cases `few`
//! are large enough to show a walk over all registrations. The cases `many` have the numbers that
//! users ask for, and take minutes.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::bench::alive::{at_zero, least, memory_of_one, Life, Pages};
use crate::bench::probe;
use crate::bench::probe::{Held, Mapped, PageOrder, Watch};
use crate::cases::register;
use crate::cases::register::{allocate_aligned, check_entries, ENTRY_BOUNDARY};
use crate::counters::{Activity, Counters};
use crate::gpu::{Allocation, GRANULE, PAGE};
use crate::knobs::Parameter;
use crate::ktap::{cases, note, same, Case};
use crate::lab::{Lab, PinMode};
use crate::pattern::Pattern;
use crate::rdma::{Devices, Op};
use crate::sys::{Ended, Reaped, SharedWords};
use crate::{counters, ktap, rdma, sys};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Number of registrations in the cases `few`. A walk over all registrations exceeds [`MOST_MORE`]
/// if it takes more than one instruction for each.
const FEW: usize = 4_000;

/// Maximum number of extra instructions that a registration may take because other registrations
/// are alive.
///
/// A walk over the other registrations takes at least three instructions for each, 12,000 for
/// [`FEW`]. A look-up in a balanced tree of 100,000 registrations takes at most 34 steps of about
/// ten instructions. Four such look-ups are a third of this limit.
const MOST_MORE: i64 = 4_000;

pub(super) const CASES: &[Case] = cases![
    "scale.few_regions" => |lab| regions(lab, FEW),
    "scale.few_processes" => |lab| processes(lab, 50),
    "scale.few_page_order" => |lab| page_order(lab, &[("contiguous", GIB), ("2m", GIB), ("64k", 64 * MIB)]),
    "scale.many_regions" => |lab| regions(lab, 100_000),
    "scale.many_processes" => |lab| processes(lab, 10_000),
    "scale.many_bytes" => |lab| bytes(lab, &[GIB, 8 * GIB, 80 * GIB]),
    "scale.many_bytes_arrive" => |lab| register::sized(lab, 80 * GIB),
    "scale.many_page_order" => |lab| {
        page_order(
            lab,
            &[
                ("contiguous", 80 * GIB),
                ("2m", 80 * GIB),
                ("64k", 80 * GIB),
            ],
        )
    },
];

/// Skips the case unless the clock counts instructions and the module's functions are measured.
fn needs_measures(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    if !probe::is_there() {
        return ktap::skip("the measuring module is not loaded: --bench");
    }
    if std::env::var_os("TESTVM_ICOUNT").is_none() {
        return ktap::skip("the machine's clock does not count instructions: --icount --smp 1");
    }
    Ok(())
}

fn registered(activity: &Activity, number: u64) -> Result<()> {
    same("calls to pin", activity.attempts, number)?;
    same("pins", activity.pins, number)?;
    same("mappings by nvidia.ko", activity.maps, 0)?;
    same("unpins while registering", activity.unpins, 0)
}

fn deregistered(activity: &Activity, number: u64) -> Result<()> {
    same("unpins", activity.unpins, number)?;
    same("mappings undone by nvidia.ko", activity.unmaps, 0)?;
    same("pins while deregistering", activity.attempts, 0)
}

/// Checks that `number` registrations hold `number` times the memory of one.
fn as_many_times(one: Held, all: Held, number: u64) -> Result<()> {
    note("bytes_of_one", one.held);
    note("allocations_of_one", one.objects);
    note("bytes_of_all", all.held);
    ensure!(one.held > 0, "a registration holds no memory");
    same("bytes held", all.held, number * one.held)?;
    same("allocations held", all.objects, number * one.objects)
}

/// Checks that a registration among others costs about as much as a registration alone.
fn no_more(alone: Life, beside: Life) -> Result<()> {
    for (when, life) in [("none", alone), ("all", beside)] {
        note(&format!("own_beside_{when}"), life.own());
        note(&format!("own_beside_{when}_register"), life.register);
        note(&format!("own_beside_{when}_deregister"), life.deregister);
        note(&format!("reg_mr_beside_{when}"), life.reg_mr_ns);
        note(&format!("dereg_mr_beside_{when}"), life.dereg_mr_ns);
    }
    let more = beside.own() - alone.own();
    ensure!(
        more <= MOST_MORE,
        "a registration among others takes {more} more instructions than a registration alone"
    );
    Ok(())
}

fn regions(lab: &Lab, number: usize) -> Result<()> {
    needs_measures(lab)?;
    let count = u64::try_from(number)?;
    note("regions", count);
    let mut pages = Pages::of(lab, number)?;
    let span = pages.one_more()?;
    let one = memory_of_one(lab, span)?;
    let alone = least(lab, span)?;

    let watch = Watch::begin()?;
    let before = Counters::read()?;
    let mut regions = pages.register(lab)?;
    let alive = Counters::read()?;
    registered(&alive.activity(&before)?, count)?;
    same("live pins", alive.live_pins()?, count)?;
    as_many_times(one, watch.read()?, count)?;
    let known = counters::peer_regions(lab.near.name())?;
    same("rxe's regions", u64::try_from(known.len())?, count)?;
    let entries = known.iter().map(|region| region.entries).sum();
    same("scatter-list entries of all regions", entries, count)?;

    let beside = watch.looking_away(|| least(lab, span))?;
    no_more(alone, beside)?;

    // Half of the regions are deregistered. The other half is revoked first, if the mode can
    // revoke.
    let before = Counters::read()?;
    let half = number / 2;
    drop(regions.drain(..half));
    let gone = Counters::read()?;
    deregistered(&gone.activity(&before)?, u64::try_from(half)?)?;
    let rest = count - u64::try_from(half)?;
    same("live pins", gone.live_pins()?, rest)?;
    let mut to_unpin = rest;
    if lab.setup.mode() == PinMode::Revocable {
        pages.memory.free()?;
        let freed = Counters::read()?.activity(&gone)?;
        same("callbacks", freed.callbacks, rest)?;
        let valid = counters::peer_regions(lab.near.name())?
            .iter()
            .filter(|region| region.state == "valid")
            .count();
        same("regions that are still valid", u64::try_from(valid)?, 0)?;
        to_unpin = 0;
    }
    let before = Counters::read()?;
    drop(regions);
    deregistered(&Counters::read()?.activity(&before)?, to_unpin)?;
    at_zero(&watch)
}

/// Number of processes that end at the same time. With more processes, the last process would wait
/// for longer than the kernel tolerates.
const AT_ONCE: usize = 64;

/// Time limit until a process has a region.
const PATIENCE: Duration = Duration::from_secs(600);

/// Indices of the counts that the processes report to their parent.
const READY: usize = 0;
const FAILED: usize = 1;

fn available_kib() -> Result<i64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .context("no MemAvailable")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn processes(lab: &Lab, number: usize) -> Result<()> {
    needs_measures(lab)?;
    let count = u64::try_from(number)?;
    note("processes", count);
    let devices = Devices::find()?;
    let page = usize::try_from(PAGE)?;
    let own = Pages::of(lab, 0)?;
    let one = memory_of_one(lab, own.one_more()?)?;
    let alone = least(lab, own.one_more()?)?;
    let words = SharedWords::new(2)?;
    let said = |word: usize| words.all()[word].load(std::sync::atomic::Ordering::SeqCst);
    let say = |word: usize| words.all()[word].fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    // The processes wait for a byte of this pipe, because such a wait is interruptible.
    let (mut word, mut end) = sys::pipe()?;

    let memory = available_kib()?;
    let watch = Watch::begin()?;
    let before = Counters::read()?;
    // The processes register one after the other, because the measurement attributes allocations to
    // the only thread in the module.
    for index in 0..number {
        let mut life = || -> Result<()> {
            let hca = devices.open(lab.near.name(), 1)?;
            let memory = lab.allocate_gpu(page)?;
            let region = hca.reg_mr(memory.span(0, page)?)?;
            say(READY);
            word.read_exact(&mut [0])?;
            // The kernel cleans up after a process that ends.
            std::mem::forget((region, memory, hca));
            Ok(())
        };
        sys::fork(|| match life() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("gdr: process {index}: {error:#}");
                say(FAILED);
                1
            }
        })?;
        let expected = u64::try_from(index + 1)?;
        let is_ready = sys::wait_until(PATIENCE, || {
            ensure!(said(FAILED) == 0, "process {index} has failed");
            Ok(said(READY) == expected)
        })?;
        ensure!(is_ready, "process {index} did not get ready");
    }
    let alive = Counters::read()?;
    registered(&alive.activity(&before)?, count)?;
    same("live pins", alive.live_pins()?, count)?;
    as_many_times(one, watch.read()?, count)?;
    let taken = memory - available_kib()?;
    note("kib_of_the_machine_each", taken / i64::try_from(number)?);

    let beside = watch.looking_away(|| least(lab, own.one_more()?))?;
    no_more(alone, beside)?;

    let before = Counters::read()?;
    let mut left = number;
    while left > 0 {
        let now = left.min(AT_ONCE);
        end.write_all(&vec![0; now])?;
        for _ in 0..now {
            let reaped = sys::reap(None, true)?;
            ensure!(
                matches!(reaped, Reaped::Child(_, Ended::Exited(0))),
                "a process failed: {reaped:?}"
            );
        }
        left -= now;
    }
    let after = Counters::read()?;
    same("live pins", after.live_pins()?, 0)?;
    let activity = after.activity(&before)?;
    // Each region ends with its process. The memory may be freed before the region, which causes a
    // callback instead of an unpin.
    same(
        "unpins and callbacks",
        activity.unpins + activity.callbacks,
        count,
    )?;
    same("mappings undone by nvidia.ko", activity.unmaps, 0)?;
    at_zero(&watch)
}

/// Checks that the cost of a large registration grows in proportion to its memory.
fn bytes(lab: &Lab, lengths: &[u64]) -> Result<()> {
    needs_measures(lab)?;
    let mut last: Option<(u64, i64)> = None;
    for &len in lengths {
        let memory = allocate_aligned(lab, len, ENTRY_BOUNDARY)?;
        ensure!(memory.is_contiguous()?, "the memory is not contiguous");
        let span = memory.span(0, usize::try_from(len)?)?;
        let before = Counters::read()?;
        let watch = Watch::begin()?;
        let region = lab.near.reg_mr(span)?;
        let held = watch.read()?;
        registered(&Counters::read()?.activity(&before)?, 1)?;
        let entries = check_entries(lab, &lab.near, &region)?;
        drop(region);
        at_zero(&watch)?;
        drop(watch);
        let own = least(lab, span)?.own();
        let gib = len / GIB;
        note(&format!("entries_{gib}_gib"), entries);
        note(&format!("bytes_held_{gib}_gib"), held.held);
        note(&format!("bytes_at_most_{gib}_gib"), held.peak);
        note(&format!("own_{gib}_gib"), own);
        // A margin of a quarter allows for interrupts, but not for a cost that grows faster than
        // the memory.
        if let Some((shorter, cost)) = last {
            let most = i128::from(cost) * i128::from(len) / i128::from(shorter) * 5 / 4;
            ensure!(
                i128::from(own) <= most,
                "{gib} GiB: {own} instructions, more than {most}"
            );
        }
        // Half a page of kernel memory for each scatter-list entry is enough if the module stores
        // entries. It is too little if the module stores pages of 64 KiB.
        let most = 2 * 4096 + entries * 2048;
        ensure!(held.held <= most, "{gib} GiB: {} bytes are held", held.held);
        last = Some((len, own));
    }
    Ok(())
}

/// Returns the expected entries of `memory` at its current place, split at each
/// [`ENTRY_BOUNDARY`].
fn entries_of(memory: &Allocation) -> Result<Vec<(u64, u64)>> {
    let len = u64::try_from(memory.mapping().len())?;
    let addr = memory.mapping().addr();
    let mut entries: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    while at < len {
        let place = memory.place(usize::try_from(at)?)?;
        let boundary = ENTRY_BOUNDARY - (addr + at) % ENTRY_BOUNDARY;
        let run = place.run.min(len - at).min(boundary);
        entries.push((place.bar_address, run));
        at += run;
    }
    Ok(entries)
}

/// Number of places that are written and read in each region, including the first and the last
/// byte.
const PLACES: u64 = 64;

/// Registers while the page allocator refuses adjacent pages, as on a host with fragmented memory.
/// Every scatter-list entry must be correct, and written bytes must arrive.
fn page_order(lab: &Lab, kinds: &[(&str, u64)]) -> Result<()> {
    needs_measures(lab)?;
    for &(layout, len) in kinds {
        let _layout = Parameter::set("nvidia", "layout", layout)?;
        let memory = allocate_aligned(lab, len, GRANULE)?;
        let size = usize::try_from(len)?;
        probe::take_tables(true)?;
        let large = PageOrder::begin()?;
        let region = lab.far.reg_mr(memory.span(0, size)?)?;
        let mapped = Mapped::take()?;
        probe::take_tables(false)?;
        // The pin may have moved the memory in the BAR, so the expected entries are computed only
        // now.
        let expected = entries_of(&memory)?;

        let mut source = Arena::on_host(lab, usize::try_from(GRANULE)?, 1)?;
        let mut connection = rdma::connect(&lab.near, &lab.far)?;
        for index in 0..=PLACES {
            let end = (len / PLACES * index).clamp(2048, len - 2049) + 2049;
            let at = usize::try_from(end - 4097)?;
            let data = Pattern::new(lab.setup.seed, index).bytes(0, 4097);
            source.put(0, &data)?;
            let remote = region.part(u64::try_from(at)?, 4097)?;
            connection.transfer(Op::Write, source.part(0, 4097)?, remote)?;
            ensure!(memory.bytes(at, 4097)? == data, "at {at:#x}");
        }
        drop(region);
        let found = large.read()?;
        drop(large);
        let what = format!("{layout}_{}_mib", len / MIB);
        note(&format!("entries_{what}"), mapped.entries.len());
        note(&format!("refused_{what}"), found.refused);
        note(&format!("given_{what}"), found.given);
        same("allocations of more than a page", found.given, 0)?;
        ensure!(
            (mapped.address, mapped.len) == (memory.mapping().addr(), len),
            "the recorded scatter list belongs to another registration"
        );
        same(
            "entries",
            u64::try_from(mapped.entries.len())?,
            u64::try_from(expected.len())?,
        )?;
        let wrong = mapped
            .entries
            .iter()
            .zip(&expected)
            .position(|(a, b)| a != b);
        ensure!(wrong.is_none(), "{layout}: entry {wrong:?} is wrong");
    }
    Ok(())
}
