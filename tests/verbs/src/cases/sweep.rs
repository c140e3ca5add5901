// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Sweeps of failures. In each run, one call to nvidia.ko or one kernel allocation fails during a
//! registration: in the first run the first call, in the second run the second call, and so on. A
//! sweep ends with the first run in which no fault occurs, because run n makes fewer than n calls
//! or allocations. After each failure nothing may be left, and the next registration must work.
//!
//! Counts of the module's own calls and allocations are exact. A changed count means a new or
//! removed call or allocation that nobody has reviewed.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{ensure, Context, Result};

use super::sweep_bench::{Bench, Ended, Fault, Shape, Way, CHUNKS, ENDLESS};
use crate::counters::Counters;
use crate::faults::{Counted, Faults, Symbols};
use crate::gpu::{Allocation, Gpu, GRANULE, PAGE};
use crate::knobs::{fail_next, fail_none, provoke_failing_put, rebind, Parameter};
use crate::ktap::{note, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::sys::KernelLog;
use crate::{counters, ktap, module, sys};

#[derive(Debug, Clone, Copy)]
struct Setting {
    mode: PinMode,
    peerdirect: u8,
}

impl Setting {
    fn parameters(self) -> [String; 2] {
        let persistent = match self.mode {
            PinMode::Persistent => 1,
            PinMode::Revocable => 0,
        };
        [
            format!("persistent_api_support={persistent}"),
            format!("peerdirect_support={}", self.peerdirect),
        ]
    }
}

/// Makes a case for each of the four combinations of module parameters.
macro_rules! in_each_mode {
    ($($name:literal $run:ident),+ $(,)?) => {
        &[$(
            in_each_mode!($name, $run, "persistent", Persistent, 0),
            in_each_mode!($name, $run, "persistent_peerdirect", Persistent, 1),
            in_each_mode!($name, $run, "revocable", Revocable, 0),
            in_each_mode!($name, $run, "revocable_peerdirect", Revocable, 1),
        )+]
    };
    ($name:literal, $run:ident, $setting:literal, $mode:ident, $peerdirect:literal) => {
        Case {
            name: concat!("sweep.", $name, "_", $setting),
            run: |lab| {
                let mode = PinMode::$mode;
                with_setting(lab, Setting { mode, peerdirect: $peerdirect }, $run)
            },
        }
    };
}

pub(super) const CASES: &[Case] = in_each_mode![
    "calls" calls,
    "calls_lost_puts" lost_puts,
    "allocations" allocations,
    "allocations_own" own_objects,
    "allocations_lasting" lasting,
    "allocations_loading" loading,
];

/// Runs `run` with the module loaded as in `setting`.
fn with_setting(lab: &Lab, setting: Setting, run: fn(&Lab, Setting) -> Result<()>) -> Result<()> {
    lab.needs_module()?;
    lab.needs_ours()?;
    module::loaded_with(&setting.parameters(), || run(lab, setting))
}

/// The kernel's internal errno, which applications do not know.
const ENOTSUPP: i32 = 524;

/// A failure point of the stand-in, with the errnos that the real driver can return there.
struct Place {
    name: &'static str,
    errnos: &'static [i32],
    /// Result in the application.
    seen: Seen,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// ib_core's errno for an address that no client takes.
    Refused,
    /// nvidia.ko's errno, if applications know it.
    Same,
    /// Success: failures at the end are not reported to the application.
    Nothing,
}

const PINNING: &[i32] = &[
    libc::EINVAL,
    libc::ENOMEM,
    libc::EIO,
    libc::EBUSY,
    libc::ENODEV,
    ENOTSUPP,
];

const fn place(name: &'static str, errnos: &'static [i32], seen: Seen) -> Place {
    Place { name, errnos, seen }
}

const EIO: &[i32] = &[libc::EIO];
const REGISTER: &[i32] = &[libc::EINVAL, libc::ENOMEM, libc::EIO];
const MAP: &[i32] = &[libc::EINVAL, libc::ENOMEM, libc::EIO, ENOTSUPP];

/// Failure points of the calls in [`calls`]. [`lost_puts`] tests the puts whose failure loses a
/// pin.
const PLACES: &[Place] = &[
    place("get_pages", PINNING, Seen::Refused),
    place("get_pages_register", REGISTER, Seen::Refused),
    place("put_pages", &[libc::ENOMEM], Seen::Nothing),
    place("get_pages_persistent", PINNING, Seen::Refused),
    place("dma_map", MAP, Seen::Same),
    place("dma_map_page", EIO, Seen::Same),
    place("dma_unmap", &[libc::EINVAL], Seen::Nothing),
    place("free_page_table", EIO, Seen::Nothing),
    place("free_dma_mapping", EIO, Seen::Nothing),
];

/// Returns the number of the module's calls to nvidia.ko at `place` during one run of action `way`.
/// The memory has [`Shape::Run`], and the client of mode `serving` registers the memory.
fn calls_made(serving: PinMode, way: Way, place: &str) -> u32 {
    match (serving, way, place) {
        (PinMode::Persistent, Way::Registration, "get_pages_persistent" | "dma_map") => 1,
        (PinMode::Persistent, Way::Registration, "dma_map_page") => (GRANULE / PAGE) as u32,
        (PinMode::Persistent, _, "dma_unmap") => 1,
        (PinMode::Revocable, Way::Registration, "get_pages" | "get_pages_register") => 1,
        (PinMode::Revocable, Way::Registration, "put_pages") => 1,
        // The memory was freed, or is released by a process for which nvidia.ko puts no pin, so the
        // module makes no call.
        _ => 0,
    }
}

/// Makes each call to nvidia.ko fail in turn, for each [`Way`].
fn calls(lab: &Lab, setting: Setting) -> Result<()> {
    // Without `PROVIDER_MAPS`, nvidia.ko maps only one page, for the first registration.
    module::unload()?;
    let [mode, peerdirect] = setting.parameters();
    module::load(&[mode, peerdirect, module::PROVIDER_MAPS.to_owned()])?;
    let mut bench = Bench::new(lab)?;
    let mut hits = 0;
    let mut sweeps = 0;
    let mut by_place: BTreeMap<&str, u32> = BTreeMap::new();
    // If the HCA cannot revoke its regions, ib_core uses the second client.
    let both = [PinMode::Persistent, PinMode::Revocable];
    let clients = match setting.mode {
        PinMode::Persistent => &both[..1],
        PinMode::Revocable => &both[..],
    };
    for &serving in clients {
        let _cannot_lose = (serving != setting.mode)
            .then(|| Parameter::set("rdma_rxe", "peer_inval", "N"))
            .transpose()?;
        for place in PLACES {
            for &errno in place.errnos {
                for way in [Way::Registration, Way::Free, Way::Foreign] {
                    if serving != setting.mode && way != Way::Registration {
                        continue;
                    }
                    let Place {
                        name: place, seen, ..
                    } = *place;
                    let fault = Fault::Call { place, errno };
                    let expected = match seen {
                        Seen::Refused => libc::EFAULT,
                        Seen::Same if errno == ENOTSUPP => libc::EOPNOTSUPP,
                        Seen::Same => errno,
                        Seen::Nothing => 0,
                    };
                    let found = bench.sweep(way, Shape::Run, fault, |ended| {
                        ensure!((ended.registration, ended.end) == (expected, 0));
                        match place {
                            "put_pages" => provoke_failing_put(),
                            _ => Ok(()),
                        }
                    })?;
                    let made = calls_made(serving, way, place);
                    ensure!(found == made, "{way:?} {place}: {found}, not {made}");
                    hits += found;
                    sweeps += 1;
                    *by_place.entry(place).or_default() += found;
                }
            }
        }
    }
    for (place, count) in by_place {
        note(&format!("failed_{place}"), count);
    }
    note("sweeps", sweeps);
    note("failed_calls", hits);
    note("registrations_that_worked", bench.rounds);
    Ok(())
}

/// Checks that the module has written one line, with these words.
fn one_line(log: &KernelLog, words: &str) -> Result<()> {
    let lines = log.of_module()?;
    ensure!(lines.len() == 1 && lines[0].contains(words), "{lines:?}");
    Ok(())
}

/// Tests puts that fail permanently. The pin is lost, or stays until its memory is freed. The
/// module must log each of the two results.
fn lost_puts(lab: &Lab, setting: Setting) -> Result<()> {
    if lab.gpus().len() < 2 {
        return ktap::skip("needs two GPUs, one of which is unbound");
    }
    let mut bench = Bench::new(lab)?;
    let errnos: &[i32] = match setting.mode {
        PinMode::Persistent => &[libc::ENOMEM, libc::EIO, libc::EINVAL],
        // A revocable put is repeated after -ENOMEM.
        PinMode::Revocable => &[libc::EIO, libc::EINVAL],
    };
    for &errno in errnos {
        // The module is reloaded, so that it has logged nothing similar before.
        module::unload()?;
        module::load(&setting.parameters())?;
        let log = KernelLog::from_now()?;
        match setting.mode {
            PinMode::Persistent => lost_for_good(&mut bench, &log, errno),
            PinMode::Revocable => lost_until_freed(&mut bench, &log, errno),
        }
        .with_context(|| format!("a put that fails with {errno}"))?;
        bench.at_rest()?;
        bench.works()?;
    }
    if setting.mode == PinMode::Revocable {
        // At its unload, the module makes a last put to wait for its callbacks.
        for (errno, words) in [
            (libc::ENOMEM, None),
            (
                libc::EIO,
                Some("cannot wait for the end of nvidia.ko's callbacks (error -5)"),
            ),
        ] {
            let log = KernelLog::from_now()?;
            provoke_failing_put()?;
            fail_next("put_pages", errno)?;
            module::unload()?;
            ensure!(
                fail_none("put_pages")?,
                "the module was unloaded without a wait"
            );
            match words {
                Some(words) => one_line(&log, words)?,
                None => ensure!(log.of_module()?.is_empty(), "a retry was logged"),
            }
            module::load(&setting.parameters())?;
            bench.works()?;
        }
    }
    note("registrations_that_worked", bench.rounds);
    Ok(())
}

/// Makes a put fail at failure point `place` during a deregistration. The application must not
/// notice.
fn failing_put(
    bench: &Bench<'_>,
    memory: &Allocation,
    place: &'static str,
    errno: i32,
) -> Result<()> {
    provoke_failing_put()?;
    let fault = Fault::Call { place, errno };
    let ended = bench.registration(memory.span(0, M2)?, fault, 1)?;
    let felt = ended.registration != 0 || ended.end != 0;
    ensure!(ended.hit && !felt, "{ended:?}");
    Ok(())
}

/// Checks a lost pin: nvidia.ko no longer knows the pin, and nobody can use its pages until the GPU
/// is unbound.
fn lost_for_good(bench: &mut Bench<'_>, log: &KernelLog, errno: i32) -> Result<()> {
    let memory = bench.allocate(Shape::Run)?;
    failing_put(bench, &memory, "put_pages_persistent", errno)?;
    drop(memory);
    one_line(
        log,
        &format!(
            "its memory is lost until the GPU is reset or unbound (nvidia.ko: error -{errno})"
        ),
    )?;
    let now = Counters::read()?;
    for (name, expected) in [
        ("pins_persistent_live", 1),
        ("pins_live", 0),
        ("misuse", bench.before.get("misuse")?),
        ("mappings_live", 0),
        ("device_refs", 0),
        ("bar_bytes_pinned", GRANULE),
    ] {
        let value = now.get(name)?;
        ensure!(value == expected, "{name} is {value}, not {expected}");
    }
    module::references_are(0).context("after a lost pin")?;
    bench.works()?;
    rebind(bench.gpu.bdf())?;
    bench.gpu = Gpu::all()?
        .into_iter()
        .find(|gpu| gpu.bdf() == bench.gpu.bdf())
        .context("the GPU has not come back")?;
    Ok(())
}

/// Checks that the pin and the reference to the module stay until the callback.
fn lost_until_freed(bench: &mut Bench<'_>, log: &KernelLog, errno: i32) -> Result<()> {
    let mut memory = bench.allocate(Shape::Run)?;
    failing_put(bench, &memory, "put_pages", errno)?;
    one_line(
        log,
        &format!("it stays until the memory is freed (nvidia.ko: error -{errno})"),
    )?;
    let live = Counters::read()?.get("pins_live")?;
    let held = counters::module_references(module::NAME)?;
    ensure!(
        live == 1 && held > 0,
        "{live} pins, {held} references to the module"
    );
    bench.works()?;
    let before = Counters::read()?;
    memory.free()?;
    counters::callbacks_are(&before, 1)
}

/// Results of the runs with a failing allocation.
#[derive(Debug, Default)]
struct Outcomes {
    passed: u32,
    refused: BTreeMap<i32, u32>,
    ends: BTreeMap<i32, u32>,
}

impl Outcomes {
    fn add(&mut self, ended: &Ended) -> Result<()> {
        const EXPECTED: [i32; 2] = [libc::ENOMEM, libc::EFAULT];
        for errno in [ended.registration, ended.end] {
            ensure!(errno == 0 || EXPECTED.contains(&errno), "{ended:?}");
        }
        match (ended.registration, ended.end) {
            (0, 0) => self.passed += 1,
            (0, errno) => *self.ends.entry(errno).or_default() += 1,
            (errno, _) => *self.refused.entry(errno).or_default() += 1,
        }
        Ok(())
    }

    fn tell(&self, name: &str) {
        let list = |errnos: &BTreeMap<i32, u32>| {
            let words: Vec<_> = errnos
                .iter()
                .map(|(errno, count)| format!("errno {errno}: {count}"))
                .collect();
            words.join(", ")
        };
        note(
            name,
            format_args!(
                "succeeded despite the failure: {}; refused: {}; ended at the second try: {}",
                self.passed,
                list(&self.refused),
                list(&self.ends)
            ),
        );
    }
}

/// Actions to sweep, each with the memory that the action uses.
const WAYS: [(Way, Shape); 6] = [
    (Way::Registration, Shape::Run),
    (Way::Registration, Shape::Fragments),
    (Way::Registration, Shape::Chunks),
    (Way::Free, Shape::Run),
    (Way::Free, Shape::Fragments),
    (Way::Foreign, Shape::Run),
];

/// Makes each allocation of the thread fail in turn: for verbs, ib_core, rxe, the stand-in, the
/// module and page tables. For fragments and chunks, only allocations by ib_core and its callees
/// count, because rxe maps each fragment separately and makes a thousand allocations.
fn allocations(lab: &Lab, _mode: Setting) -> Result<()> {
    let symbols = Symbols::read()?;
    let mut bench = Bench::new(lab)?;
    let mut all = 0;
    for (way, shape) in WAYS {
        let counted = match shape {
            Shape::Run => Counted::All,
            Shape::Fragments | Shape::Chunks => Counted::Every {
                below: symbols.function("ib_peer_umem_get")?,
            },
        };
        let _faults = Faults::new(&counted)?;
        // This run without a fault makes the allocations that are made once and kept. The sweep
        // must not count these allocations.
        bench.run(way, shape, Fault::Allocation, ENDLESS)?;
        let mut outcomes = Outcomes::default();
        let found = bench.sweep(way, shape, Fault::Allocation, |ended| outcomes.add(ended))?;
        let name = format!("{way:?}_{shape:?}").to_lowercase();
        note(&format!("{name}_allocations"), found);
        outcomes.tell(&name);
        ensure!(found > 0 || way != Way::Registration, "{name}");
        all += found;
    }
    note("failed_allocations", all);
    note("registrations_that_worked", bench.rounds);
    Ok(())
}

/// Returns the number of the module's own slab allocations, including allocations of kernel
/// functions that the module calls, but not nvidia.ko's allocations. The first number counts
/// allocations whose failure makes the registration fail. The second number counts allocations by
/// `kvrealloc()`, whose failure is harmless because `kvrealloc()` tries again.
fn objects_made(mode: PinMode, way: Way, shape: Shape) -> (u32, u32) {
    // The chunks are on two GPUs. The list of pins grows twice, and the list of DMA ranges, which
    // has its own scatter list, also grows twice.
    let lists = 4;
    match (mode, way, shape) {
        // Allocates the context and its counters, a pin for each chunk, the region, and two scatter
        // lists.
        (PinMode::Persistent, Way::Registration, Shape::Chunks) => (5 + CHUNKS as u32, lists),
        // Allocates the context and its counters, the region, and two scatter lists. Each attempted
        // pin also allocates the callback's entry, its lock and its place in the table. The
        // attempts are one for the whole range, one for each chunk, and two for chunks that may
        // continue.
        (PinMode::Revocable, Way::Registration, Shape::Chunks) => {
            (5 + 3 * (1 + CHUNKS as u32 + 2), lists)
        }
        // Allocates the context and its counters, the pin, the region, and the scatter list.
        (PinMode::Persistent, Way::Registration, _) => (5, 0),
        // Allocates the context and its counters, the region, the callback's entry, its lock and
        // its place in the table, and the scatter list.
        (PinMode::Revocable, Way::Registration, _) => (7, 0),
        // The end of a registration must not need memory.
        (_, Way::Free | Way::Foreign, _) => (0, 0),
    }
}

/// Makes each of the module's own allocations fail in turn, and no other allocation.
fn own_objects(lab: &Lab, setting: Setting) -> Result<()> {
    let symbols = Symbols::read()?;
    let mut bench = Bench::new(lab)?;
    for (way, shape) in WAYS {
        // A free calls nvidia.ko, which calls the module. In all other actions, the module calls
        // nvidia.ko, so nvidia.ko's allocations must be excluded.
        let except = match way {
            Way::Registration | Way::Foreign => Some(symbols.module("nvidia")?),
            Way::Free => None,
        };
        let _faults = Faults::new(&Counted::Objects {
            below: symbols.module(module::NAME)?,
            except,
        })?;
        bench.run(way, shape, Fault::Allocation, ENDLESS)?;
        let mut felt = 0;
        let mut outcomes = Outcomes::default();
        let found = bench.sweep(way, shape, Fault::Allocation, |ended| {
            felt += u32::from(ended.registration != 0 || ended.end != 0);
            outcomes.add(ended)
        })?;
        let name = format!("{way:?}_{shape:?}").to_lowercase();
        note(&format!("{name}_felt"), felt);
        note(&format!("{name}_not_felt"), found - felt);
        outcomes.tell(&name);
        let (expected, more) = objects_made(setting.mode, way, shape);
        ensure!(
            felt == expected && found == expected + more,
            "{name}: {found} allocations by the module, {felt} of which failed a call, where {} and {expected} were \
             expected",
            expected + more
        );
    }
    note("registrations_that_worked", bench.rounds);
    Ok(())
}

/// Makes all allocations by a function and its callees fail during a registration.
fn lasting(lab: &Lab, setting: Setting) -> Result<()> {
    let symbols = Symbols::read()?;
    let mut bench = Bench::new(lab)?;
    // Once the revocable client has taken the memory, it needs no more allocations, because no
    // IOMMU translates here.
    let (client, unmapped) = match setting.mode {
        PinMode::Persistent => ("PersistentMr", libc::ENOMEM),
        PinMode::Revocable => ("RevocableMr", 0),
    };
    for (name, expected, is_needed) in [
        ("acquire", libc::EFAULT, true),
        ("dma_map", unmapped, setting.mode == PinMode::Persistent),
    ] {
        let below = symbols.method(module::NAME, client, &format!("{name}_callback"))?;
        for shape in [Shape::Run, Shape::Fragments] {
            let memory = bench.allocate(shape)?;
            let span = memory.span(0, shape.len())?;
            let faults = Faults::new(&Counted::Every {
                below: below.clone(),
            })?;
            let all = faults.all()?;
            let result = bench.lab.near.reg_mr(span);
            let failures = all.end()?;
            let errno = match result {
                Ok(region) => {
                    drop(region);
                    0
                }
                Err(refused) => refused.errno(),
            };
            drop(faults);
            drop(memory);
            let name = format!("{name}_{shape:?}").to_lowercase();
            note(&format!("{name}_failures"), failures);
            ensure!((failures > 0) == is_needed, "{name}: {failures} failures");
            ensure!(errno == expected, "{name}: {errno}, not {expected}");
            bench
                .at_rest()
                .and_then(|()| bench.works())
                .with_context(|| name)?;
        }
    }
    note("registrations_that_worked", bench.rounds);
    Ok(())
}

/// Makes each slab allocation during the module's start or end fail in turn.
fn loading(lab: &Lab, setting: Setting) -> Result<()> {
    let symbols = Symbols::read()?;
    let file = fs::File::open(module::file()?)?;
    let parameters = setting.parameters().join(" ");
    let mut bench = Bench::new(lab)?;

    for (name, function) in [
        ("start", "do_one_initcall"),
        ("end", "__x64_sys_delete_module"),
    ] {
        let _faults = Faults::new(&Counted::Objects {
            below: symbols.function(function)?,
            except: None,
        })?;
        let mut refused = 0;
        let mut nth = 1;
        loop {
            if name == "start" {
                sys::unload_module(module::NAME)?;
            }
            let armed = Fault::Allocation.arm(nth)?;
            let result = if name == "start" {
                sys::load_module(&file, &parameters)
            } else {
                sys::unload_module(module::NAME)
            };
            let hit = armed.disarm()?;
            if let Err(error) = &result {
                ensure!(hit, "{name}: {error}, but no allocation failed");
                ensure!(
                    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EINVAL)),
                    "{name}: {error} after allocation {nth} failed"
                );
                refused += 1;
            }
            let should_be = (name == "start") == result.is_ok();
            ensure!(module::is_loaded() == should_be, "{name}: {result:?}");
            if !module::is_loaded() {
                sys::load_module(&file, &parameters)?;
            }
            bench
                .at_rest()
                .and_then(|()| bench.works())
                .with_context(|| format!("{name} with allocation {nth} failing"))?;
            if !hit {
                break;
            }
            nth += 1;
            ensure!(
                nth < ENDLESS,
                "{name}: the fault still occurs in run {ENDLESS}"
            );
        }
        note(&format!("{name}_objects"), nth - 1);
        note(&format!("{name}_refused"), refused);
        // The module's start makes allocations, so a sweep that finds none has not worked.
        ensure!(name == "end" || nth > 1, "no allocation in the start");
    }
    note("registrations_that_worked", bench.rounds);
    Ok(())
}
