// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Ranges over several adjacent allocations, which allocators on `cuMemMap` make (PyTorch's
//! `expandable_segments`). Each range is one registration. The cases compare every byte and check
//! the number of calls to nvidia.ko.
//!
//! NVIDIA's nvidia-peermem refuses all these ranges, so each case only checks for `EFAULT` there.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Error, Result};

use crate::arena::Arena;
use crate::cases::input::errno_of;
use crate::cases::register::{expected_entries, peer_region};
use crate::cases::stage::Stage;
use crate::child::Process;
use crate::counters::{Activity, Counters};
use crate::gpu::{Allocation, GRANULE, PAGE};
use crate::hold::Hold;
use crate::knobs::Parameter;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Peermem, PinMode, M2};
use crate::module::Replaced;
use crate::pattern::{Choice, Pattern};
use crate::rdma::{Hca, Op, Region, Status};
use crate::sys::{KernelLog, Mapping, Placement, Span};
use crate::{counters, ktap, module, rdma, sys};

pub(super) const CASES: &[Case] = cases![
    "chunks.sixteen" => |lab| whole(lab, &[1; 16], 22),
    "chunks.of_6_mib" => |lab| whole(lab, &[3; 5], 12),
    "chunks.two" => |lab| whole(lab, &[1, 1], 3),
    "chunks.one_extent" => one_extent,
    "chunks.from_middle_to_middle" => middle,
    "chunks.random_sizes_and_layouts" => random,
    "chunks.hole_at_each_place" => holes,
    "chunks.not_gpu_memory" => not_gpu_memory,
    "chunks.limit" => limit,
    "chunks.freed_between_pins" => freed_between_pins,
    "chunks.killed_in_the_search" => killed,
    "chunks.freed_before_get_pages" => freed_before_get_pages,
    "chunks.part_freed_revokes_the_whole" => part_freed,
    "chunks.freed_part_stays_with_the_region" => part_stays,
];

/// Adjacent allocations, which are the parts of the row.
pub(super) struct Row {
    addr: u64,
    pub(super) parts: Vec<Allocation>,
}

impl Row {
    /// Allocates a row whose part `i` has `granules[i]` granules. A value of 0 leaves one granule
    /// of addresses free. The parts alternate between two GPUs if there are two.
    pub(super) fn of(lab: &Lab, granules: &[u64]) -> Result<Self> {
        Self::with(lab, granules, &[], 2)
    }

    /// Allocates a row as [`Row::of`] does, but on the first GPU only.
    pub(super) fn on_one_gpu(lab: &Lab, granules: &[u64]) -> Result<Self> {
        Self::with(lab, granules, &[], 1)
    }

    /// Allocates a row on `gpus` GPUs, with a layout of the stand-in for each part.
    fn with(lab: &Lab, granules: &[u64], layouts: &[&str], gpus: usize) -> Result<Self> {
        let all: u64 = granules.iter().map(|&count| count.max(1)).sum();
        let addr = sys::free_address(all * GRANULE, GRANULE)?;
        let mut parts = Vec::new();
        let mut at = addr;
        for (index, &count) in granules.iter().enumerate() {
            if count > 0 {
                let layout = layouts.get(index);
                let _layout = layout
                    .map(|layout| Parameter::set("nvidia", "layout", layout))
                    .transpose()?;
                let len = usize::try_from(count)? * M2;
                parts.push(lab.gpu(index % gpus)?.allocate(len, Placement::At(at))?);
            }
            at += count.max(1) * GRANULE;
        }
        Ok(Self { addr, parts })
    }

    /// Returns the number of bytes from the start of the row to the end of the last allocation.
    pub(super) fn len(&self) -> Result<usize> {
        let last = self.parts.last().context("no allocation")?.mapping();
        Ok(usize::try_from(
            last.addr() + last.len() as u64 - self.addr,
        )?)
    }

    pub(super) fn span(&self, offset: usize, len: usize) -> Result<Span> {
        Span::anywhere(self.addr + offset as u64, len as u64)
    }

    fn write(&self, data: &[u8]) -> Result<()> {
        let mut rest = data;
        for part in &self.parts {
            let (here, behind) = rest.split_at(part.mapping().len());
            part.write(0, here)?;
            rest = behind;
        }
        Ok(())
    }

    fn check(&self, expected: &[u8]) -> Result<()> {
        let mut rest = expected;
        for (index, part) in self.parts.iter().enumerate() {
            let (here, behind) = rest.split_at(part.mapping().len());
            let found = part.bytes(0, here.len())?;
            if let Some(wrong) = crate::pattern::difference(here, &found) {
                bail!(
                    "part {index}: {} bytes differ, the first at {:#x}",
                    wrong.count,
                    wrong.first
                );
            }
            rest = behind;
        }
        Ok(())
    }
}

/// Registers `span`. Returns `None` if NVIDIA's nvidia-peermem refuses `span`, as expected.
fn register(lab: &Lab, hca: &Hca, span: Span) -> Result<Option<Region>> {
    match (hca.reg_mr(span), lab.setup.peermem) {
        (Err(refused), Peermem::Nvidia) => {
            note("application", refused.errno());
            ensure!(refused.errno() == libc::EFAULT, "{refused}");
            Ok(None)
        }
        (Ok(_), Peermem::Nvidia) => bail!("NVIDIA's module registers this"),
        (result, _) => Ok(Some(result?)),
    }
}

/// Runs `body`, and also returns the number of calls to nvidia.ko during `body`.
fn counted<R>(body: impl FnOnce() -> Result<R>) -> Result<(R, Activity)> {
    let before = Counters::read()?;
    let result = body()?;
    let activity = Counters::read()?.activity(&before)?;
    note("calls_to_pin", activity.attempts);
    note("pins_made", activity.pins);
    note("unpinned_meanwhile", activity.unpins);
    Ok((result, activity))
}

/// Reads and writes all of the region in messages that cross the borders between allocations. Then
/// compares every byte of the row, inside and outside the region.
fn every_byte(lab: &Lab, row: &Row, region: &Region, offset: usize, len: usize) -> Result<()> {
    const STEP: usize = 3 * M2 / 4 + 4097;
    let all = row.len()?;
    let mut expected = Pattern::new(lab.setup.seed, 11).bytes(0, all);
    row.write(&expected)?;
    let mut local = Arena::on_host(lab, STEP, 12)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let mut at = 0;
    while at < len {
        let size = STEP.min(len - at);
        let remote = region.part(at as u64, size as u64)?;
        let here = offset + at..offset + at + size;
        connection.transfer(Op::Read, local.part(0, size)?, remote)?;
        local.expect(0, &expected[here.clone()])?;
        local.check().with_context(|| format!("READ at {at:#x}"))?;
        let new = Pattern::new(lab.setup.seed, 13).bytes(at as u64, size);
        local.put(0, &new)?;
        connection.transfer(Op::Write, local.part(0, size)?, remote)?;
        expected[here].copy_from_slice(&new);
        at += size;
    }
    row.check(&expected)
}

/// Registers a part of `row`, compares every byte, and deregisters. Returns nvidia.ko's activity
/// and the number of entries in the scatter list.
fn registers(lab: &Lab, row: &Row, offset: usize, len: usize) -> Result<Option<(Activity, u64)>> {
    let span = row.span(offset, len)?;
    let (region, activity) = counted(|| register(lab, &lab.far, span))?;
    let Some(region) = region else {
        return Ok(None);
    };
    let entries = peer_region(&lab.far, &region)?.entries;
    note("entries", entries);
    every_byte(lab, row, &region, offset, len)?;
    let before = Counters::read()?;
    drop(region);
    let unpins = Counters::read()?.activity(&before)?.unpins;
    let kept = activity.pins - activity.unpins;
    note("chunks", kept);
    ensure!(unpins == kept, "{unpins} of {kept} pins were unpinned");
    Ok(Some((activity, entries)))
}

/// Registers a whole row of allocations of `granules[i]` granules each. Expects `calls` calls to
/// pin.
fn whole(lab: &Lab, granules: &[u64], calls: u64) -> Result<()> {
    lab.needs_module()?;
    whole_row(lab, &Row::of(lab, granules)?, calls)
}

/// Registers all of `row` and expects `calls` calls to pin. Checks that each allocation is one
/// extent of BAR1. The final pin of an allocation gets one extent only if no unit of the allocation
/// is pinned already.
fn whole_row(lab: &Lab, row: &Row, calls: u64) -> Result<()> {
    let Some((activity, entries)) = registers(lab, row, 0, row.len()?)? else {
        return Ok(());
    };
    let mut most = 0;
    for part in &row.parts {
        let memory = part.mapping();
        most += expected_entries(lab, memory.addr(), memory.len() as u64).end();
    }
    ensure!(
        entries <= most,
        "{entries} entries, but at most {most} are expected"
    );
    ktap::same("calls to pin", activity.attempts, calls)?;
    let kept = activity.pins - activity.unpins;
    ensure!(kept == row.parts.len() as u64, "{kept} pieces");
    Ok(())
}

/// Tests an allocation of which only the first unit fits into a free gap of BAR1. The search pins
/// this unit in the gap, so the module must at the end make a new pin of the whole allocation.
fn one_extent(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let hole = lab.allocate_gpu(M2)?;
    let behind = lab.allocate_gpu(M2)?;
    let register = |memory: &Allocation| -> Result<_> { Ok(lab.near.reg_mr(memory.span(0, M2)?)?) };
    let (region, _stays) = (register(&hole)?, register(&behind)?);
    drop(region);
    // The layout `2m` puts the second allocation at a place apart from the first.
    let row = Row::with(lab, &[2, 1], &["contiguous", "2m"], 2)?;
    whole_row(lab, &row, 5)
}

fn middle(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let row = Row::of(lab, &[4, 4, 4, 4])?;
    let all = row.len()?;
    for (front, back, calls) in [
        (M2 + 3 * PAGE as usize + 5, 4097, 14),
        (3 * M2 + M2 / 2, 3 * M2 + 1, 13),
        (2 * M2 - 1, M2, 14),
    ] {
        let Some((activity, _)) = registers(lab, &row, front, all - front - back)? else {
            return Ok(());
        };
        ensure!(activity.attempts == calls);
    }
    Ok(())
}

fn random(lab: &Lab) -> Result<()> {
    const LAYOUTS: [&str; 4] = ["contiguous", "64k", "random", "descending"];
    lab.needs_module()?;
    let mut random = Choice::new(lab.setup.seed);
    for _ in 0..3 {
        let granules: Vec<u64> = (0..8).map(|_| 1 + random.below(4)).collect();
        let mut layouts = Vec::new();
        for _ in 0..granules.len() {
            layouts.push(LAYOUTS[usize::try_from(random.below(4))?]);
        }
        note("granules", format_args!("{granules:?}"));
        note("layouts", layouts.join(" "));
        let row = Row::with(lab, &granules, &layouts, 2)?;
        let offset = usize::try_from(random.below(GRANULE))?;
        let len = row.len()? - offset - usize::try_from(random.below(GRANULE))?;
        let Some((activity, _)) = registers(lab, &row, offset, len)? else {
            return Ok(());
        };
        // `src/chunks.rs` explains this bound on the calls, here for allocations of at most 4
        // units.
        let kept = activity.pins - activity.unpins;
        let bound = 2 + kept * (4 + 2 * 3);
        ensure!(activity.attempts <= bound, "{} calls", activity.attempts);
    }
    Ok(())
}

/// Expects `EFAULT` and no pin left, and exactly `calls` calls to pin by our module.
fn refused(lab: &Lab, span: Span, calls: u64) -> Result<()> {
    let (errno, activity) = counted(|| Ok(errno_of(lab.far.reg_mr(span))))?;
    ensure!(errno == libc::EFAULT);
    counters::pins_are(0)?;
    if lab.setup.peermem == Peermem::Ours {
        ktap::same("calls to pin", activity.attempts, calls)?;
    }
    Ok(())
}

fn holes(lab: &Lab) -> Result<()> {
    const PARTS: usize = 5;
    lab.needs_module()?;
    let mut seen = Vec::new();
    // The freed part is a hole in the range. If the first part is the hole, the start of the range
    // is not GPU memory.
    for (place, calls) in [2, 4, 6, 7, 9].into_iter().enumerate() {
        let mut row = Row::of(lab, &[1; PARTS])?;
        row.parts.get_mut(place).context("a part")?.free()?;
        refused(lab, row.span(0, PARTS * M2)?, calls)?;
        seen.push(calls);
        // The parts after the hole still work.
        if place + 2 < PARTS {
            let behind = row.span((place + 1) * M2, (PARTS - place - 1) * M2)?;
            drop(register(lab, &lab.far, behind)?);
        }
    }
    note("calls_to_pin_for_each_hole", format_args!("{seen:?}"));
    Ok(())
}

fn not_gpu_memory(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let reserved = Mapping::reserve(4 * M2)?;
    let first = reserved.addr().next_multiple_of(GRANULE) - reserved.addr();
    for (offset, len, calls) in [
        (0, GRANULE, 1),
        (PAGE, GRANULE - PAGE, 1),
        (0, GRANULE + 1, 2),
        (PAGE, GRANULE, 2),
        (0, 2 * GRANULE, 2),
    ] {
        let span = reserved.span(usize::try_from(first + offset)?, usize::try_from(len)?)?;
        refused(lab, span, calls)?;
    }
    Ok(())
}

fn limit(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    lab.needs_ours()?;
    let row = Row::of(lab, &[2; 5])?;
    module::loaded_with_also("max_chunks=4", || {
        registers(lab, &row, 0, 8 * M2)?;
        registers(lab, &row, M2, 7 * M2)?;
        let log = KernelLog::from_now()?;
        refused(lab, row.span(0, 10 * M2)?, 11)?;
        let lines = log.lines()?;
        let said = lines.iter().filter(|line| line.contains("max_chunks=4"));
        ensure!(said.count() == 1, "{lines:?}");
        Ok(())
    })?;
    module::loaded_with_also("max_chunks=1", || {
        refused(lab, row.span(0, 10 * M2)?, 1)?;
        registers(lab, &row, 0, 2 * M2).map(drop)
    })?;
    let replaced = Replaced::begin()?;
    let loaded = module::load(&["max_chunks=0".to_owned()]);
    ensure!(loaded.is_err(), "loaded with max_chunks=0");
    replaced.end()
}

/// Frees a part while the search is stopped at its first pin. If the freed part is the pinned part,
/// the search ends at this part.
fn freed_between_pins(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    lab.needs_ours()?;
    const PARTS: usize = 4;
    let stage = Stage::open(lab)?;
    for (gone, calls) in [2, 4, 6, 7].into_iter().enumerate() {
        let mut row = Row::of(lab, &[1; PARTS])?;
        let span = row.span(0, PARTS * M2)?;
        let before = Counters::read()?;
        let (hold, registration) = Hold::catch("nvidia/get_after_register", || {
            stage.start_register_span(span)
        })?;
        row.parts.get_mut(gone).context("a part")?.free()?;
        let registered = hold.finish(registration)?;
        ensure!(
            errno_of(registered) == libc::EFAULT,
            "errno after part {gone} was freed"
        );
        let activity = Counters::read()?.activity(&before)?;
        note(
            &format!("part_{gone}"),
            format_args!(
                "{} calls to pin, {} callbacks",
                activity.attempts, activity.callbacks
            ),
        );
        ensure!(activity.attempts == calls, "{} calls", activity.attempts);
        ensure!(activity.callbacks == u64::from(gone == 0));
        counters::pins_are(0)?;
    }
    Ok(())
}

/// Checks that a search of several seconds ends when its process is killed.
fn killed(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    let before = Counters::read()?;
    let calls = || Ok::<_, Error>(Counters::read()?.activity(&before)?.attempts);
    let _slow = Parameter::set("nvidia", "pin_us", "200000")?;
    let mut child = Process::start(&lab.setup, lab.setup.seed, &["search", "24"])?;
    child.go();
    let searches = sys::wait_until(Duration::from_secs(60), || Ok(calls()? >= 5))?;
    ensure!(searches, "the child does not search");
    let made = calls()?;
    child.kill()?;
    let more = calls()?.saturating_sub(made);
    note("calls_to_pin_after_the_kill", more);
    // At most two calls may be made after `made` was read: one before the kill, and one that was
    // about to start at the kill.
    ensure!(
        more <= 2,
        "{more} calls to pin for a process that was killed"
    );
    ktap::check_rest(&before)
}

/// Frees a part after all parts are pinned but before ib_core calls `get_pages`.
fn freed_before_get_pages(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    lab.needs_ours()?;
    const PARTS: usize = 3;
    let stage = Stage::open(lab)?;
    for gone in 0..PARTS {
        let mut row = Row::of(lab, &[1; PARTS])?;
        let span = row.span(0, PARTS * M2)?;
        let (hold, registration) = Hold::catch("ib_peer_mem/before_get_pages", || {
            stage.start_register_span(span)
        })?;
        let before = Counters::read()?;
        counters::pins_are(PARTS as u64)?;
        row.parts.get_mut(gone).context("a part")?.free()?;
        let registered = hold.finish(registration)?;
        ensure!(
            errno_of(registered) == libc::EINVAL,
            "errno after part {gone} was freed"
        );
        let activity = Counters::read()?.activity(&before)?;
        ensure!(activity.callbacks == 1);
        ensure!(activity.unpins == PARTS as u64 - 1, "{activity:?}");
    }
    Ok(())
}

/// Checks that accesses to each part of the region fail. Each part has 2 MiB.
fn all_refused(lab: &Lab, local: &Arena, region: &Region, parts: usize) -> Result<()> {
    for part in 0..parts {
        for op in [Op::Write, Op::Read] {
            let remote = region.part((part * M2) as u64, 64)?;
            let status = lab.status(op, local.part(0, 64)?, remote)?;
            ensure!(
                status == Status::RemoteAccessError,
                "{op} to part {part}: {status:?}"
            );
        }
    }
    Ok(())
}

/// Frees one part. The whole region must be revoked before the free returns, and the next owner's
/// bytes must not change.
fn part_freed(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    const PARTS: usize = 3;
    let local = Arena::on_host(lab, M2, 1)?;
    for gone in 0..PARTS {
        let mut row = Row::of(lab, &[1; PARTS])?;
        let Some(region) = register(lab, &lab.far, row.span(0, PARTS * M2)?)? else {
            return Ok(());
        };
        let place = row.parts[gone].bar_address();
        let before = Counters::read()?;
        row.parts[gone].free()?;
        counters::callbacks_are(&before, 1)?;
        let state = peer_region(&lab.far, &region)?.state;
        ensure!(state == "revoked", "rxe holds the region as {state}");

        // The next allocation is pinned, because memory has a place in BAR1 only while it is
        // pinned.
        let (stranger, theirs_too) = lab
            .gpu(gone % 2)?
            .allocate_there(M2, place, |next| Ok(lab.near.reg_mr(next.span(0, M2)?)?))?
            .context("no other allocation got the freed place, so something still holds it")?;
        let theirs = Pattern::new(lab.setup.seed, 3).bytes(0, M2);
        stranger.write(0, &theirs)?;
        all_refused(lab, &local, &region, PARTS)?;
        ensure!(
            stranger.bytes(0, M2)? == theirs,
            "the new owner's bytes changed"
        );
        drop(theirs_too);
        // The region still pins the other two parts. One of them is freed with a callback, and the
        // deregistration unpins the last one.
        counters::pins_are(PARTS as u64 - 1)?;
        row.parts[(gone + 1) % PARTS].free()?;
        counters::pins_are(PARTS as u64 - 2)?;
        drop(region);
        counters::pins_are(0)?;
    }
    Ok(())
}

/// Checks that freed parts stay with the region in persistent mode, and nobody else gets them.
fn part_stays(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Persistent)?;
    const PARTS: usize = 4;
    let mut row = Row::of(lab, &[1; PARTS])?;
    let Some(region) = register(lab, &lab.far, row.span(0, PARTS * M2)?)? else {
        return Ok(());
    };
    let views = row
        .parts
        .iter()
        .map(Allocation::bar_view)
        .collect::<Result<Vec<_>>>()?;
    let places: Vec<u64> = row.parts.iter().map(Allocation::bar_address).collect();
    for gone in [1, 3] {
        row.parts[gone].free()?;
    }
    let local = Arena::on_host(lab, M2, 1)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    for (part, view) in views.iter().enumerate() {
        let next = lab.gpu(part % 2)?.allocate(M2, Placement::Any)?;
        ensure!(
            !places.contains(&next.bar_address()),
            "pages in use were given away"
        );
        let remote = region.part((part * M2) as u64, M2 as u64)?;
        connection.transfer(Op::Write, local.part(0, M2)?, remote)?;
        ensure!(view.bytes(0, M2)? == local.expected(0, M2)?, "part {part}");
    }
    drop(region);
    Ok(())
}
