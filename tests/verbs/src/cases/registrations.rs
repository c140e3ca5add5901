// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Live registrations, as the module reports them in the file `registrations`, its counters and its
//! tracepoints (`docs/observe.md`).
//!
//! Each case reloads the module, so that the numbers of registrations begin at one and the counters
//! at zero.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Context, Result};

use crate::cases::chunks::Row;
use crate::cases::reasons::{begin, read_beside};
use crate::cases::register::peer_region;
use crate::cases::stage::Stage;
use crate::gpu::GRANULE;
use crate::knobs::Parameter;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::module_files::{get, has, lines, lived, number, parse, Line};
use crate::rdma::{Hca, Region};
use crate::sys::Span;
use crate::{counters, ktap, module, module_files, sys};

const FILE: &str = "registrations";
const EVENTS: &str = "/sys/kernel/tracing/events/nvidia_peermem";

pub(super) const CASES: &[Case] = cases![
    "registrations.one_from_register_to_deregister" => one,
    "registrations.over_two_gpus" => over_two_gpus,
    "registrations.revoked_until_it_is_deregistered" => revoked,
    "registrations.orphaned_until_it_is_freed" => kept,
    "registrations.orphaned_on_a_lost_gpu" => lost,
    "registrations.readers_beside_registrations" => readers,
    "registrations.counters_agree" => counters_agree,
    "registrations.tracepoints" => tracepoints,
];

pub(super) fn only() -> Result<Line> {
    module_files::only(FILE)
}

fn none() -> Result<()> {
    let found = lines(FILE)?;
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

/// Counts of registrations, in the order of [`EVENTS_OF_A_LIFE`].
type Lives = [u64; EVENTS_OF_A_LIFE.len()];

const EVENTS_OF_A_LIFE: [&str; 6] = [
    "registered",
    "mapped",
    "revoked",
    "released",
    "active",
    "active_bytes",
];

/// Checks that the module's counts of registrations are exactly these.
fn lived_in(mode: PinMode, counts: Lives) -> Result<()> {
    let counts = EVENTS_OF_A_LIFE.into_iter().zip(counts);
    let counts = counts.filter(|(_, count)| *count > 0);
    lived(
        &counts
            .map(|(event, count)| (format!("{event}/{mode}"), count))
            .collect(),
    )
}

/// Returns the PCI addresses of the devices that are bound to the GPU driver.
pub(super) fn gpus_of_the_machine() -> Result<BTreeSet<String>> {
    let mut found = sys::names("/sys/bus/pci/drivers/nvidia")?;
    found.retain(|name| Path::new("/sys/bus/pci/devices").join(name).exists());
    ensure!(!found.is_empty(), "no device has the GPU driver");
    Ok(found)
}

/// Checks that `address` is the sysfs name of a NIC.
fn is_nic(address: &str) -> Result<()> {
    let class = sys::read_line(&format!("/sys/bus/pci/devices/{address}/class"))?;
    // Class 0x02 is a network controller.
    ensure!(class.starts_with("0x02"), "{address} has class {class}");
    Ok(())
}

fn one(lab: &Lab) -> Result<()> {
    begin(lab)?;
    let memory = lab.allocate_gpu(2 * M2)?;
    let gpus = gpus_of_the_machine()?;
    none()?;
    let mut since = 0.0;
    for (round, len) in [(1, M2), (2, 2 * M2), (3, M2)] {
        let span = memory.span(0, len)?;
        let region = lab.near.reg_mr(span)?;
        let line = only()?;
        let (mode, addr) = (lab.setup.mode(), region.addr());
        let entries = peer_region(&lab.near, &region)?.entries;
        let (own, thread) = (std::process::id(), sys::thread_id());
        let range = format!("addr={addr:#x} len={len} page=65536 chunks=1 entries={entries}");
        let task = format!("tgid={own} pid={thread} comm=gdr");
        has(
            &line,
            &format!("id={round} state=mapped mode={mode} {range} {task}"),
        )?;
        ensure!(gpus.contains(get(&line, "gpus")?), "{line:?}, {gpus:?}");
        is_nic(get(&line, "hca")?)?;
        let at: f64 = get(&line, "since")?.parse()?;
        ensure!(at >= since, "{at} after {since}");
        since = at;
        drop(region);
        none()?;
        note("line", format_args!("{line:?}"));
    }
    // The region begins and ends inside a page. The list shows the range of the pinned pages.
    let region = lab.near.reg_mr(memory.span(100, M2)?)?;
    let (start, len) = (memory.mapping().addr(), M2 + 0x1_0000);
    has(&only()?, &format!("addr={start:#x} len={len}"))?;
    drop(region);
    // Refused registrations are never listed.
    let far = Span::anywhere(sys::free_address(GRANULE, GRANULE)?, GRANULE)?;
    ensure!(lab.near.reg_mr(far).is_err());
    none()?;
    lived_in(lab.setup.mode(), [4, 4, 0, 4, 0, 0])
}

/// Registers two adjacent allocations, on two GPUs if there are two.
fn over_two_gpus(lab: &Lab) -> Result<()> {
    begin(lab)?;
    let row = Row::of(lab, &[1, 1])?;
    let region = lab.near.reg_mr(row.span(0, 2 * M2)?)?;
    let line = only()?;
    has(&line, "chunks=2 state=mapped")?;
    let shown: Vec<&str> = get(&line, "gpus")?.split(',').collect();
    note("gpus", get(&line, "gpus")?);
    let want = lab.gpus().len().min(2);
    ensure!(shown.len() == want, "{shown:?}: {want} were expected");
    ensure!(shown.is_sorted(), "{shown:?}");
    let gpus = gpus_of_the_machine()?;
    for gpu in shown {
        ensure!(gpus.contains(gpu), "GPU {gpu} is not one of {gpus:?}");
    }
    drop(region);
    none()
}

fn revoked(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    begin(lab)?;
    let stage = Stage::open(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let other = lab.allocate_gpu(M2)?;
    let region = stage.register(&memory)?;
    let stays = stage.register(&other)?;
    let before = lines(FILE)?;
    stage.free(&memory)?;
    let after = lines(FILE)?;
    ensure!(after.len() == 2, "{after:?}");
    has(&after[0], "id=1 state=revoked")?;
    // All fields except `state` are unchanged.
    for (key, value) in &before[0] {
        if key != "state" {
            has(&after[0], &format!("{key}={value}"))?;
        }
    }
    ensure!(after[1] == before[1], "{after:?}, {before:?}");
    lived_in(PinMode::Revocable, [2, 2, 1, 0, 2, 2 * GRANULE])?;
    drop(region);
    has(&only()?, "id=2 state=mapped")?;
    drop(stays);
    none()
}

/// Tests a registration that another process releases. nvidia.ko does not put the pin for that
/// process.
fn kept(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    begin(lab)?;
    let stage = Stage::open(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    stage.orphan(&memory)?;
    let own = std::process::id();
    has(
        &only()?,
        &format!("id=1 state=orphaned entries=0 hca=- tgid={own}"),
    )?;
    lived_in(PinMode::Revocable, [1, 1, 0, 1, 1, GRANULE])?;
    stage.free(&memory)?;
    note("callbacks", stage.counted("callbacks")?);
    none()?;
    lived_in(PinMode::Revocable, [1, 1, 0, 1, 0, 0])
}

/// Returns the output of `peermemctl` in one line.
fn peermemctl(command: &str) -> Result<String> {
    let output = Command::new("peermemctl").arg(command).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Tests a lost GPU, whose memory is freed without a callback. The module waits for the callback
/// and stays loaded. The tools report the wait once PCI has removed the device.
fn lost(lab: &Lab) -> Result<()> {
    const PCI: &str = "/sys/bus/pci";
    lab.needs_mode(PinMode::Revocable)?;
    begin(lab)?;
    let stage = Stage::open(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let bdf = stage.gpu.bdf();
    stage.orphan(&memory)?;
    let gone = Parameter::set("nvidia", "gpu_lost", "Y")?;
    stage.free(&memory)?;
    counters::callbacks_are(&stage.before, 0)?;
    has(&only()?, &format!("state=orphaned gpus={bdf}"))?;
    module::must_stay()?;

    fs::write(format!("{PCI}/devices/{bdf}/remove"), "1")?;
    let answers = ["list", "stats", "doctor"].map(|command| (command, peermemctl(command)));
    fs::write(format!("{PCI}/rescan"), "1")?;
    for (command, answer) in answers {
        let said =
            format!("1 registration waits for its callback from GPU {bdf}, which is gone from PCI");
        let answer = answer?;
        ensure!(answer.contains(&said), "{command} says {answer}");
    }
    ensure!(gpus_of_the_machine()?.contains(bdf));

    drop(gone);
    note("callbacks", stage.counted("callbacks")?);
    none()
}

/// Reads in two threads while two other threads register and deregister. Readers must see whole
/// lines in order, each number once, and every registration that stays.
fn readers(lab: &Lab) -> Result<()> {
    const STAY: u64 = 60;
    const LIVES: u64 = 60;
    begin(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let span = memory.span(0, M2)?;
    let register = |hca: &Hca| -> Result<Region> { Ok(hca.reg_mr(span)?) };
    // The lines of these registrations do not fit into a reader's buffer.
    let stay = (0..STAY)
        .map(|_| register(&lab.near))
        .collect::<Result<Vec<_>>>()?;
    let read = || -> Result<u64> {
        let found = lines(FILE)?;
        let ids = found
            .iter()
            .map(|line| number(line, "id"))
            .collect::<Result<Vec<_>>>()?;
        ensure!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
        ensure!(
            ids.iter().take(STAY as usize).copied().eq(1..=STAY),
            "a registration that stays was not listed: {ids:?}"
        );
        // Each of the two threads has one registration at a time, but a slow read may see several
        // of them.
        ensure!(ids.iter().all(|id| *id <= STAY + 2 * LIVES), "{ids:?}");
        for line in &found {
            let state = get(line, "state")?;
            ensure!(matches!(state, "pinned" | "mapped"), "{line:?}");
            let mapped = state == "mapped";
            ensure!((number(line, "entries")? > 0) == mapped, "{line:?}");
            ensure!((get(line, "hca")? != "-") == mapped, "{line:?}");
        }
        Ok(ids.len() as u64 - STAY)
    };
    let lives = [&lab.near, &lab.far]
        .map(|hca| move || (0..LIVES).try_for_each(|_| register(hca).map(drop)));
    let (looks, met) = read_beside(read, lives)?;
    note("looks", looks);
    note("met_beside", met);
    let all = STAY + 2 * LIVES;
    let counts = [all, all, 0, 2 * LIVES, STAY, STAY * GRANULE];
    lived_in(lab.setup.mode(), counts)?;
    drop(stay);
    none()
}

/// Checks that the count of live registrations matches the list after every change.
fn counters_agree(lab: &Lab) -> Result<()> {
    const MOST: usize = 8;
    begin(lab)?;
    let mode = lab.setup.mode();
    let memory = lab.allocate_gpu(MOST * M2)?;
    let agree = |registered: u64, released: u64| -> Result<()> {
        let found = lines(FILE)?;
        let bytes = found
            .iter()
            .map(|line| number(line, "len"))
            .sum::<Result<u64>>()?;
        let active = found.len() as u64;
        lived_in(mode, [registered, registered, 0, released, active, bytes])?;
        ensure!(found.len() as u64 == registered - released, "{found:?}");
        Ok(())
    };
    agree(0, 0)?;
    let mut regions = Vec::new();
    for count in 1..=MOST {
        let span = memory.span(0, count * M2)?;
        regions.push(lab.near.reg_mr(span)?);
        agree(count as u64, 0)?;
    }
    let mut released = 0;
    while !regions.is_empty() {
        // The dropped registration is in the middle of the list.
        drop(regions.remove(regions.len() / 2));
        released += 1;
        agree(MOST as u64, released)?;
    }
    note("registrations", MOST);
    Ok(())
}

/// Returns the types and names of a tracepoint's fields, without the fields that all tracepoints
/// have.
pub(super) fn event_fields(event: &str) -> Result<Vec<String>> {
    let format = fs::read_to_string(format!("{EVENTS}/{event}/format"))?;
    Ok(format
        .lines()
        .filter_map(|line| line.trim().strip_prefix("field:")?.split_once(';'))
        .map(|(field, _)| field.to_owned())
        .filter(|field| !field.contains(" common_"))
        .collect())
}

fn tracepoints(lab: &Lab) -> Result<()> {
    const TRACE: &str = "/sys/kernel/tracing/instances/registrations";
    begin(lab)?;
    if !Path::new(EVENTS).join("registered").exists() {
        return ktap::skip("this kernel has no tracepoints");
    }
    // The fields that `docs/observe.md` documents.
    let range = "u64 addr, u64 len, u64 page, u64 chunks";
    let registered = format!("u64 id, {range}, pid_t tgid, __data_loc char[] mode");
    let documented: [(&str, &str); 4] = [
        ("registered", &registered),
        ("mapped", "u64 id, u32 entries, char hca[20]"),
        ("revoked", "u64 id"),
        ("released", "u64 id, __data_loc char[] state"),
    ];
    for (event, expected) in documented {
        let found = event_fields(event)?.join(", ");
        ensure!(found == expected, "{event}: {found}");
    }
    fs::create_dir_all(TRACE)?;
    let result = traced(lab, TRACE, &documented.map(|(event, _)| event));
    fs::remove_dir(TRACE)?;
    result
}

/// Returns the name and the line of each event in the trace.
pub(super) fn events(trace: &str) -> Result<Vec<(String, Line)>> {
    fs::read_to_string(format!("{trace}/trace"))?
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            // After the time, a line has the form "NAME: KEY=VALUE …".
            let (head, keys) = line.rsplit_once(": ").context(line.to_owned())?;
            let (_, event) = head.rsplit_once(' ').context(line.to_owned())?;
            Ok((event.to_owned(), parse(keys)?))
        })
        .collect()
}

fn traced(lab: &Lab, trace: &str, all: &[&str]) -> Result<()> {
    let mode = lab.setup.mode();
    let stage = Stage::open(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    // Disabled tracepoints write nothing.
    drop(stage.register(&memory)?);
    ensure!(events(trace)?.is_empty(), "{:?}", events(trace)?);
    for event in all {
        fs::write(format!("{trace}/events/nvidia_peermem/{event}/enable"), "1")?;
    }
    let region = stage.register(&memory)?;
    let line = only()?;
    if mode == PinMode::Revocable {
        stage.free(&memory)?;
    }
    drop(region);
    let seen = events(trace)?;
    let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
    note("events", names.join(" "));
    let (want, last): (&[&str], _) = match mode {
        PinMode::Persistent => (&["registered", "mapped", "released"], "pinned"),
        PinMode::Revocable => (&["registered", "mapped", "revoked", "released"], "revoked"),
    };
    ensure!(names == want, "{names:?}");
    for (name, keys) in &seen {
        has(keys, &format!("id={}", get(&line, "id")?))?;
        // Fields that the event and the list share have the same value.
        for (key, value) in keys.iter().filter(|(key, _)| *key != "state") {
            has(&line, &format!("{key}={value}")).with_context(|| name.clone())?;
        }
    }
    has(&seen[want.len() - 1].1, &format!("state={last}"))?;
    // Disables the tracepoints again.
    for event in all {
        fs::write(format!("{trace}/events/nvidia_peermem/{event}/enable"), "0")?;
    }
    drop(stage.register(&lab.allocate_gpu(M2)?)?);
    ensure!(events(trace)?.len() == want.len());
    Ok(())
}
