// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Reasons of refused registrations, as the module reports them in its files, its counters and its
//! tracepoint (`docs/observe.md`).
//!
//! Each case reloads the module, so that all counters begin at zero.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, thread};

use anyhow::{bail, ensure, Context, Result};

use crate::cases::chunks::Row;
use crate::cases::identity::{gone, lives_beside_readers, unreadable};
use crate::cases::input::{errno_of, in_child};
use crate::cases::registrations::{event_fields, events};
use crate::counters::Counters;
use crate::gpu::GRANULE;
use crate::knobs::{fail_next, Parameter};
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::module::Replaced;
use crate::module_files::{
    counted, folder, get, has, in_proc, lines, no_refusals, number, only, Line, DEBUGFS,
};
use crate::rdma::Hca;
use crate::sys::{KernelLog, Mapping, Placement, Span};
use crate::{ktap, module, module_files, sys};

const EVENT: &str = "/sys/kernel/tracing/events/nvidia_peermem/refused";
/// Number of refusals that the module keeps in `refusals`. [`NON_GPU`] is the number of refusals
/// that the module keeps in `non_gpu`.
const REFUSALS: usize = 128;
const NON_GPU: usize = 32;

pub(super) const CASES: &[Case] = cases![
    "reasons.no_room" => |lab| one(lab, Expected::acquire("no_room", -libc::ENOMEM), no_room),
    "reasons.hole" => |lab| one(lab, Expected::acquire("hole", -libc::EINVAL), hole),
    "reasons.too_many_chunks" => too_many_chunks,
    "reasons.freed" => |lab| one(lab, Expected::acquire("not_gpu_memory", -libc::EINVAL), freed),
    "reasons.parents_memory" =>
        |lab| one(lab, Expected::acquire("non_gpu_unmapped", -libc::EINVAL), parents_memory),
    "reasons.addresses_without_memory" =>
        |lab| one(lab, Expected::acquire("not_gpu_memory", -libc::EINVAL), without_memory),
    "reasons.memory_of_the_cpu" =>
        |lab| one(lab, Expected::acquire("non_gpu_host", -libc::EINVAL), memory_of_the_cpu),
    "reasons.addresses_of_the_kernel" =>
        |lab| one(lab, Expected::acquire("non_gpu_invalid", -libc::EINVAL), of_the_kernel),
    "reasons.pin_unsupported" => |lab| one(lab, Expected::acquire("pin_unsupported", -524), failing_pin(524)),
    "reasons.pin_failed" => |lab| one(lab, Expected::acquire("pin_failed", -libc::EIO), failing_pin(libc::EIO)),
    "reasons.other_page_sizes" =>
        |lab| one(lab, Expected::acquire("table_page_size", 0), with("table_page_size", "0")),
    "reasons.table_version" =>
        |lab| one(lab, Expected::acquire("table_version", 0), with("table_version", "0x00030000")),
    "reasons.page_count" => |lab| one(lab, Expected::acquire("page_count", 0), with("table_entries_delta", "-1")),
    "reasons.mapping_version" => |lab| {
        let expected = Expected::dma_map("mapping_version", 0, libc::EINVAL);
        of_a_mapping(lab, expected, with("dma_mapping_version", "0x00030000"))
    },
    "reasons.mapping_page_count" => |lab| {
        let expected = Expected::dma_map("page_count", 0, libc::EINVAL);
        of_a_mapping(lab, expected, with("dma_entries_delta", "-1"))
    },
    "reasons.unreachable" => |lab| {
        let expected = Expected::dma_map("unreachable", -524, libc::EOPNOTSUPP);
        of_a_mapping(lab, expected, with("topology_deny", "1"))
    },
    "reasons.denied_before" => denied_before,
    "reasons.map_failed" => map_failed,
    "reasons.another_clients_memory" => another_clients_memory,
    "reasons.success_leaves_no_trace" => success,
    "reasons.the_same_is_one_line" => same,
    "reasons.a_bounded_number" => bounded,
    "reasons.non_gpu_ones_push_out_no_others" => non_gpu,
    "reasons.readers_beside_refusals" => readers,
    "reasons.files" => files,
    "reasons.unload_with_a_file_open" => unload,
    "reasons.tracepoint" => tracepoint,
];

/// Returns the expected counts: `times` refusals by the client that serves the HCA, and none by
/// another client.
pub(super) fn expected_counts(lab: &Lab, reason: &str, times: u64) -> BTreeMap<String, u64> {
    BTreeMap::from([(format!("{}/{reason}", lab.setup.mode()), times)])
}

/// Reloads the module under test.
pub(super) fn begin(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    lab.needs_ours()?;
    Replaced::begin()?.end()?;
    counted(&BTreeMap::new()).context("loaded anew")?;
    no_refusals().context("loaded anew")
}

/// Result of a registration that should be refused.
pub(super) struct Attempt {
    errno: i32,
    span: Span,
    /// `true` if a child, whose process number is unknown, made the attempt.
    by_child: bool,
}

pub(super) fn attempt(hca: &Hca, span: Span) -> Result<Attempt> {
    Ok(Attempt {
        errno: errno_of(hca.reg_mr(span)),
        span,
        by_child: false,
    })
}

/// Expected data about one refused registration.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    step: &'static str,
    reason: &'static str,
    code: i32,
    errno: i32,
}

impl Expected {
    fn acquire(reason: &'static str, code: i32) -> Self {
        Self {
            step: "acquire",
            ..Self::dma_map(reason, code, libc::EFAULT)
        }
    }

    pub(super) fn dma_map(reason: &'static str, code: i32, errno: i32) -> Self {
        Self {
            step: "dma_map",
            reason,
            code,
            errno,
        }
    }
}

/// Checks that one refused registration leaves its line, its count and its log line, and nothing
/// else.
pub(super) fn one(
    lab: &Lab,
    expected: Expected,
    provoke: impl FnOnce(&Lab) -> Result<Attempt>,
) -> Result<()> {
    begin(lab)?;
    one_loaded(lab, expected, provoke)
}

/// Checks the same as [`one`] without a reload of the module.
fn one_loaded(
    lab: &Lab,
    expected: Expected,
    provoke: impl FnOnce(&Lab) -> Result<Attempt>,
) -> Result<()> {
    let log = KernelLog::from_now()?;
    let attempt = provoke(lab)?;
    ensure!(attempt.errno == expected.errno);
    let (file, other) = match expected.reason.starts_with("non_gpu_") {
        true => ("non_gpu", "refusals"),
        false => ("refusals", "non_gpu"),
    };
    let line = only(file)?;
    ensure!(lines(other)?.is_empty(), "{:?}", lines(other)?);
    let (mode, addr, len) = (lab.setup.mode(), attempt.span.addr(), attempt.span.len());
    let Expected {
        step, reason, code, ..
    } = expected;
    let fields = format!("mode={mode} step={step} reason={reason} code={code} addr={addr:#x}");
    has(&line, &format!("seq=0 times=1 {fields} len={len}"))?;
    ensure!(get(&line, "first")? == get(&line, "last")?, "{line:?}");
    let (own, thread) = (std::process::id(), sys::thread_id());
    if attempt.by_child {
        ensure!(get(&line, "tgid")? != own.to_string(), "{line:?}");
    } else {
        has(&line, &format!("tgid={own} pid={thread} comm=gdr"))?;
    }
    let text = get(&line, "text")?;
    note("text", text);
    counted(&expected_counts(lab, expected.reason, 1))?;
    let mut logged = log.lines()?;
    logged.retain(|line| line.contains("refused"));
    let end = format!(" in {}: {text}", expected.step);
    ensure!(logged.len() == 1 && logged[0].ends_with(&end), "{logged:?}");
    Ok(())
}

/// Checks that the revocable client refuses a device that nvidia.ko has refused before, when
/// nvidia.ko mapped for the persistent client. The revocable client itself does not ask nvidia.ko
/// whether a device reaches the GPU.
fn denied_before(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    begin(lab)?;
    let deny = Parameter::set("nvidia", "topology_deny", "1")?;
    let memory = lab.allocate_gpu(M2)?;
    let try_with = |hca: &Hca, want: i32| -> Result<()> {
        let errno = attempt(hca, memory.span(0, M2)?)?.errno;
        ensure!(errno == want, "errno {errno} where {want} was expected");
        Ok(())
    };
    try_with(&lab.near, 0)?;
    {
        let _cannot_lose = Parameter::set("rdma_rxe", "peer_inval", "N")?;
        try_with(&lab.near, libc::EOPNOTSUPP)?;
    }
    let before = Counters::read()?;
    try_with(&lab.near, libc::EOPNOTSUPP)?;
    // nvidia.ko has refused only `lab.near`, so a registration with `lab.far` must succeed.
    try_with(&lab.far, 0)?;
    let after = Counters::read()?;
    let asked = after.since(&before, "get_pages_persistent")? + after.since(&before, "dma_map")?;
    ensure!(asked == 0, "nvidia.ko was asked {asked} times");
    let refusals = lines("refusals")?;
    let [persistent, revocable] = &refusals[..] else {
        bail!("{refusals:?}");
    };
    let text = get(persistent, "text")?;
    let fields = format!("step=dma_map reason=unreachable code=-524 text=\"{text}\"");
    has(persistent, &format!("mode=persistent {fields}"))?;
    has(revocable, &format!("mode=revocable {fields}"))?;
    drop(deny);
    Replaced::begin()?.end()?;
    try_with(&lab.near, 0)
}

fn no_room(lab: &Lab) -> Result<Attempt> {
    let gpu = lab.gpu(0)?;
    let kept = (gpu.bar_len() >> 20) - 4;
    let _reserve = Parameter::set("nvidia", "bar1_reserve_mib", &kept.to_string())?;
    let memory = gpu.allocate(3 * M2, Placement::Any)?;
    attempt(&lab.near, memory.span(0, 3 * M2)?)
}

/// Registers two adjacent allocations, the second of which is freed.
fn hole(lab: &Lab) -> Result<Attempt> {
    let mut row = Row::on_one_gpu(lab, &[1, 1])?;
    row.parts[1].free()?;
    attempt(&lab.near, row.span(0, 2 * M2)?)
}

/// Registers a range over three allocations, although a registration is limited to two.
fn too_many_chunks(lab: &Lab) -> Result<()> {
    begin(lab)?;
    module::loaded_with_also("max_chunks=2", || {
        let row = Row::on_one_gpu(lab, &[1; 3])?;
        lab.near.reg_mr(row.span(0, 2 * M2)?)?;
        let seen = attempt(&lab.near, row.span(0, 3 * M2)?)?;
        ensure!(seen.errno == libc::EFAULT, "errno {}", seen.errno);
        let line = only("refusals")?;
        has(&line, "reason=too_many_chunks code=0")?;
        ensure!(get(&line, "text")?.contains("max_chunks=2"), "{line:?}");
        counted(&expected_counts(lab, "too_many_chunks", 1))
    })
}

fn freed(lab: &Lab) -> Result<Attempt> {
    let mut memory = lab.allocate_gpu(M2)?;
    memory.free()?;
    attempt(&lab.near, memory.span(0, M2)?)
}

fn parents_memory(lab: &Lab) -> Result<Attempt> {
    let memory = lab.allocate_gpu(M2)?;
    let span = memory.span(0, M2)?;
    let errno = in_child(lab.near.name(), |hca| {
        Ok(attempt(hca, Span::anywhere(span.addr(), span.len())?)?.errno)
    })?;
    Ok(Attempt {
        errno,
        span,
        by_child: true,
    })
}

fn without_memory(lab: &Lab) -> Result<Attempt> {
    let memory = Mapping::reserve(M2)?;
    attempt(&lab.near, memory.span(0, M2)?)
}

fn memory_of_the_cpu(lab: &Lab) -> Result<Attempt> {
    let memory = Mapping::read_only(M2)?;
    attempt(&lab.near, memory.span(0, M2)?)
}

fn of_the_kernel(lab: &Lab) -> Result<Attempt> {
    attempt(&lab.near, Span::anywhere(0xffff_8880_0000_0000, GRANULE)?)
}

fn failing_pin(errno: i32) -> impl FnOnce(&Lab) -> Result<Attempt> {
    move |lab| {
        let place = match lab.setup.mode() {
            PinMode::Persistent => "get_pages_persistent",
            PinMode::Revocable => "get_pages",
        };
        fail_next(place, errno)?;
        of_gpu_memory(lab)
    }
}

fn with(name: &'static str, value: &'static str) -> impl FnOnce(&Lab) -> Result<Attempt> {
    move |lab| {
        let memory = lab.allocate_gpu(M2)?;
        let _parameter = Parameter::set("nvidia", name, value)?;
        attempt(&lab.near, memory.span(0, M2)?)
    }
}

pub(super) fn of_gpu_memory(lab: &Lab) -> Result<Attempt> {
    let memory = lab.allocate_gpu(M2)?;
    attempt(&lab.near, memory.span(0, M2)?)
}

/// Checks the same as [`one`] for a mapping by nvidia.ko, which only persistent mode uses.
fn of_a_mapping(
    lab: &Lab,
    expected: Expected,
    provoke: impl FnOnce(&Lab) -> Result<Attempt>,
) -> Result<()> {
    lab.needs_mode(PinMode::Persistent)?;
    one(lab, expected, provoke)
}

fn map_failed(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Persistent)?;
    let expected = Expected::dma_map("map_failed", -libc::EIO, libc::EIO);
    begin(lab)?;
    module::loaded_with_also(module::PROVIDER_MAPS, || {
        one_loaded(lab, expected, |lab| {
            fail_next("dma_map", libc::EIO)?;
            of_gpu_memory(lab)
        })
    })
}

fn success(lab: &Lab) -> Result<()> {
    begin(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    lab.near.reg_mr(memory.span(0, M2)?)?;
    let host = Mapping::anonymous(M2)?;
    lab.near.reg_mr(host.span(0, M2)?)?;
    counted(&BTreeMap::new())?;
    no_refusals()
}

/// Tests another driver's client, which takes ranges that nvidia.ko does not know. The other client
/// is loaded before or after this module. The module must count these ranges separately and leave
/// no other trace. A range that neither client takes must be refused as usual.
fn another_clients_memory(lab: &Lab) -> Result<()> {
    const OTHER: &str = "other_client";
    const TIMES: u64 = 3;
    begin(lab)?;
    if !sys::run("modinfo", [OTHER])?.success() {
        return ktap::skip("no other client in this machine");
    }
    for is_first in [false, true] {
        for (space, reason) in [
            (reserved(2)?, "not_gpu_memory"),
            (Mapping::read_only(2 * M2)?, "non_gpu_host"),
        ] {
            let theirs = space.span(0, M2)?;
            let words = [
                OTHER.to_owned(),
                format!("start={}", theirs.addr()),
                format!("end={}", theirs.addr() + theirs.len()),
                format!("phys={}", lab.gpu(0)?.bar_start()),
            ];
            let replaced = Replaced::begin()?;
            if is_first {
                sys::succeed("modprobe", &words)?;
            }
            replaced.end()?;
            if !is_first {
                sys::succeed("modprobe", &words)?;
            }
            let log = KernelLog::from_now()?;
            let result = (|| {
                for _ in 0..TIMES {
                    lab.near.reg_mr(theirs)?;
                }
                // A module that is asked second does not see the other client's ranges.
                let mut expected = BTreeMap::new();
                if !is_first {
                    expected.insert(OTHER.to_owned(), TIMES);
                }
                counted(&expected)?;
                no_refusals()?;
                let said = log.of_module()?;
                ensure!(said.is_empty(), "{said:?}");

                refuse(&lab.near, &space, 1)?;
                expected.append(&mut expected_counts(lab, reason, 1));
                counted(&expected)?;
                ensure!(lines("refusals")?.len() + lines("non_gpu")?.len() == 1);
                ktap::same(
                    "log lines about a refusal",
                    log.of_module()?.len() as u64,
                    1,
                )
            })();
            sys::unload_module(OTHER)?;
            result.with_context(|| format!("{reason}, the other client first: {is_first}"))?;
        }
    }
    Ok(())
}

/// Reserves address space that is never GPU memory, but looks like GPU memory to the module.
fn reserved(ranges: usize) -> Result<Mapping> {
    Ok(Mapping::reserve(ranges * M2)?)
}

/// Checks that range number `range` of `space` is refused.
fn refuse(hca: &Hca, space: &Mapping, range: usize) -> Result<()> {
    refuse_span(hca, space.span(range * M2, M2)?)
}

fn refuse_span(hca: &Hca, span: Span) -> Result<()> {
    let seen = attempt(hca, span)?.errno;
    ensure!(seen == libc::EFAULT, "errno {seen}");
    Ok(())
}

fn same(lab: &Lab) -> Result<()> {
    const TIMES: u64 = 20;
    begin(lab)?;
    let space = reserved(2)?;
    for _ in 0..TIMES {
        refuse(&lab.near, &space, 0)?;
        refuse(&lab.near, &space, 1)?;
    }
    let found = lines("refusals")?;
    ensure!(found.len() == 2, "{found:?}");
    for line in &found {
        has(line, &format!("times={TIMES}"))?;
        let at = |key| Ok::<f64, anyhow::Error>(get(line, key)?.parse()?);
        ensure!(at("first")? < at("last")?, "{line:?}");
    }
    counted(&expected_counts(lab, "not_gpu_memory", 2 * TIMES))
}

fn numbers(found: &[Line]) -> Result<Vec<u64>> {
    found.iter().map(|line| number(line, "seq")).collect()
}

fn bounded(lab: &Lab) -> Result<()> {
    const RANGES: usize = REFUSALS + 10;
    begin(lab)?;
    let space = reserved(RANGES)?;
    for range in 0..RANGES {
        refuse(&lab.near, &space, range)?;
    }
    let all = RANGES as u64;
    let found = numbers(&lines("refusals")?)?;
    let expected: Vec<u64> = (all - REFUSALS as u64..all).collect();
    ensure!(found == expected, "{found:?}");
    counted(&expected_counts(lab, "not_gpu_memory", RANGES as u64))
}

fn non_gpu(lab: &Lab) -> Result<()> {
    const ADDRESSES: u64 = 200;
    begin(lab)?;
    let space = reserved(1)?;
    refuse(&lab.near, &space, 0)?;
    let before = lines("refusals")?;
    let log = KernelLog::from_now()?;
    let addr = sys::free_address(ADDRESSES << 12, 4096)?;
    for page in 0..ADDRESSES {
        refuse_span(&lab.near, Span::anywhere(addr + (page << 12), 4096)?)?;
    }
    ensure!(lines("refusals")? == before, "{:?}", lines("refusals")?);
    ensure!(lines("non_gpu")?.len() == NON_GPU);
    let mut expected = expected_counts(lab, "non_gpu_unmapped", ADDRESSES);
    expected.extend(expected_counts(lab, "not_gpu_memory", 1));
    counted(&expected)?;
    let mut logged = log.lines()?;
    logged.retain(|line| line.contains("refused"));
    let logged = logged.len();
    ensure!(logged == 1, "{logged} lines in the log");
    Ok(())
}

/// Repeats `read` in two threads until both `works` have ended in two other threads. Returns the
/// number of calls of `read`, and the sum of their results.
pub(super) fn read_beside<Work: FnOnce() -> Result<()> + Send>(
    read: impl Fn() -> Result<u64> + Sync,
    works: [Work; 2],
) -> Result<(u64, u64)> {
    let done = AtomicBool::new(false);
    let repeat = || -> Result<(u64, u64)> {
        let (mut looks, mut sum) = (0, 0);
        while !done.load(Ordering::Relaxed) || looks == 0 {
            sum += read()?;
            looks += 1;
        }
        Ok((looks, sum))
    };
    thread::scope(|scope| {
        let readers = [scope.spawn(repeat), scope.spawn(repeat)];
        let works = works.map(|work| scope.spawn(work));
        let works = works.map(thread::ScopedJoinHandle::join);
        done.store(true, Ordering::Relaxed);
        let (mut looks, mut sum) = (0, 0);
        for reader in readers {
            let seen = reader.join().ok().context("a reader panicked")??;
            (looks, sum) = (looks + seen.0, sum + seen.1);
        }
        for work in works {
            work.ok().context("a thread panicked")??;
        }
        Ok((looks, sum))
    })
}

/// Reads in two threads while two other threads get refusals. Readers must see whole lines in
/// order, and no refusal may be lost.
fn readers(lab: &Lab) -> Result<()> {
    const RANGES: usize = 70;
    begin(lab)?;
    // Both spaces live until the end. If one were freed before the other is reserved, both could
    // get the same addresses, and a repeated refusal adds no line.
    let spaces = [reserved(RANGES)?, reserved(RANGES)?];
    let ranges_of = |space: &Mapping| -> Result<Vec<Span>> {
        (0..RANGES)
            .map(|range| space.span(range * M2, M2))
            .collect()
    };
    let ranges = [ranges_of(&spaces[0])?, ranges_of(&spaces[1])?];
    let read = || -> Result<u64> {
        let found = numbers(&lines("refusals")?)?;
        ensure!(found.len() <= REFUSALS, "{} lines", found.len());
        ensure!(found.windows(2).all(|pair| pair[0] < pair[1]), "{found:?}");
        module_files::counts()?;
        Ok(0)
    };
    let refuse_all = [(&lab.near, &ranges[0]), (&lab.far, &ranges[1])]
        .map(|(hca, ranges)| move || ranges.iter().try_for_each(|span| refuse_span(hca, *span)));
    let (looks, _) = read_beside(read, refuse_all)?;
    note("looks", looks);
    counted(&expected_counts(lab, "not_gpu_memory", 2 * RANGES as u64))?;
    let found = numbers(&lines("refusals")?)?;
    let all = 2 * RANGES as u64;
    ensure!(found == (all - REFUSALS as u64..all).collect::<Vec<_>>());
    Ok(())
}

fn files(lab: &Lab) -> Result<()> {
    begin(lab)?;
    let version = module::version()?;
    has(&only("version")?, &format!("format=3 module={version}"))?;
    let modes = [
        ("version", 0o444),
        ("counters", 0o444),
        ("refusals", 0o400),
        ("non_gpu", 0o400),
        ("registrations", 0o400),
    ];
    let expected: BTreeSet<_> = modes.iter().map(|(name, _)| (*name).to_owned()).collect();
    ensure!(sys::names(folder())? == expected);
    for (name, mode) in modes {
        let path = format!("{}/{name}", folder());
        let found = fs::metadata(path)?.permissions().mode() & 0o7777;
        let expected = in_proc().map_or(mode, |_| 0o400);
        ensure!(found == expected, "{name}: {found:o}");
        opened_by_root(name)?;
    }
    // Each counter has a line as soon as the module is loaded.
    let all = lines("counters")?;
    let refused = all.iter().filter(|line| line.contains_key("reason"));
    let refused = refused.count();
    ensure!(refused % 2 == 0 && refused > 40, "{refused} lines");
    note("counters", all.len());
    Ok(())
}

/// Checks that only root can open a file. In `/proc`, root also needs `CAP_SYS_ADMIN` in the
/// initial user namespace, because every container has a `/proc`.
fn opened_by_root(name: &str) -> Result<()> {
    let path = format!("{}/{name}", folder());
    let refused = in_proc().map(|_| "Operation not permitted");
    let mut callers: Vec<(&[&str], Option<&str>)> = vec![
        (&["env"], None),
        (&["setpriv", "--bounding-set=-sys_admin"], refused),
        (
            &["setpriv", "--reuid=65534", "--clear-groups"],
            Some("Permission denied"),
        ),
    ];
    // debugfs lets root of another user namespace in, but no container has a debugfs by default.
    if refused.is_some() && Path::new("/proc/self/ns/user").exists() {
        callers.push((&["unshare", "-Ur"], refused));
    }
    for (words, error) in callers {
        let caller = [words, &["cat", &path]].concat();
        let finished = sys::run(caller[0], &caller[1..])?;
        match error {
            Some(error) => finished.failed_with(error),
            None if finished.success() => Ok(()),
            None => bail!("{}", finished.tail(5)),
        }
        .with_context(|| caller.join(" "))?;
    }
    Ok(())
}

/// Checks that an open file keeps the module loaded, and that a close during `rmmod` is safe.
///
/// The case opens no file during an unload. An unload first refuses new references to the module,
/// and then sets `MODULE_STATE_GOING`. debugfs warns about an open between these two steps.
fn unload(lab: &Lab) -> Result<()> {
    const ROUNDS: usize = 5;
    begin(lab)?;
    if let Some(folder) = in_proc() {
        return unload_under_readers(lab, folder);
    }
    let space = reserved(REFUSALS)?;
    for range in 0..REFUSALS {
        refuse(&lab.near, &space, range)?;
    }
    // Reads a small part of the file, so that the rest must be read later.
    let mut file = File::open(format!("{DEBUGFS}/refusals"))?;
    let mut head = [0; 100];
    file.read_exact(&mut head)?;
    ensure!(
        !module::unloaded(module::NAME)?,
        "the module was unloaded while its file was open"
    );
    // Checks that the module still works.
    let memory = lab.allocate_gpu(M2)?;
    lab.near.reg_mr(memory.span(0, M2)?)?;
    let mut rest = String::new();
    file.read_to_string(&mut rest)?;
    let text = [std::str::from_utf8(&head)?, &rest].concat();
    let count = text.lines().count();
    ensure!(count == REFUSALS, "{count} lines");
    drop(file);

    let parameters = module::parameters();
    let mut busy = 0;
    for round in 0..ROUNDS {
        let mut file = File::open(format!("{DEBUGFS}/counters"))?;
        busy += thread::scope(|scope| -> Result<usize> {
            let reader = scope.spawn(move || -> Result<()> {
                for _ in 0..=round {
                    file.read_exact(&mut [0; 16])?;
                }
                Ok(())
            });
            let mut busy = 0;
            while !module::unloaded(module::NAME)? {
                busy += 1;
            }
            reader.join().ok().context("the reader panicked")??;
            Ok(busy)
        })?;
        module::load(&parameters)?;
    }
    note("busy", busy);
    Ok(())
}

/// Checks that an open file in `/proc` does not keep the module loaded, and that reads fail once
/// the module is unloaded.
fn unload_under_readers(lab: &Lab, folder: &str) -> Result<()> {
    let names = sys::names(folder)?;
    note("files", format_args!("{names:?}"));

    // Some files are unread, some are partly read, and one reader has stopped in the middle of the
    // registrations.
    let memory = lab.allocate_gpu(M2)?;
    let region = lab.near.reg_mr(memory.span(0, M2)?)?;
    let open = |name: &str| File::open(format!("{folder}/{name}"));
    let mut files = names
        .iter()
        .map(|name| open(name))
        .collect::<Result<Vec<_>, _>>()?;
    for name in ["counters", "registrations"] {
        let mut file = open(name)?;
        file.read_exact(&mut [0; 16])?;
        files.push(file);
    }
    drop(region);
    let replaced = Replaced::begin()?;
    gone(folder)?;
    unreadable(&files, libc::EIO).context("after the unload")?;
    replaced.end()?;
    unreadable(&files, libc::EIO).context("after the reload")?;
    drop(files);

    lives_beside_readers(|| {
        let whole = |name: &&String| fs::read(format!("{folder}/{name}")).is_ok();
        names.iter().filter(whole).count()
    })
}

fn tracepoint(lab: &Lab) -> Result<()> {
    const TIMES: usize = 7;
    const TRACE: &str = "/sys/kernel/tracing/instances/reasons";
    begin(lab)?;
    if !Path::new(EVENT).exists() {
        return ktap::skip("this kernel has no tracepoints");
    }
    // Checks the documented fields.
    let fields = event_fields("refused")?.join(", ");
    let words = "__data_loc char[]";
    let expected = format!(
        "u64 addr, u64 len, int code, pid_t tgid, {words} mode, {words} step, {words} reason"
    );
    ensure!(fields == expected, "{fields}");

    let space = reserved(1)?;
    // A disabled tracepoint writes nothing. An enabled tracepoint writes each refusal, or only the
    // matching refusals if it has a filter.
    fs::create_dir_all(TRACE)?;
    let traced =
        || -> Result<Vec<Line>> { Ok(events(TRACE)?.into_iter().map(|(_, line)| line).collect()) };
    let result = || -> Result<()> {
        let event = format!("{TRACE}/events/nvidia_peermem/refused");
        refuse(&lab.near, &space, 0)?;
        ensure!(traced()?.is_empty(), "{:?}", traced()?);
        fs::write(format!("{event}/enable"), "1")?;
        for _ in 0..TIMES {
            refuse(&lab.near, &space, 0)?;
        }
        let lines = traced()?;
        ensure!(lines.len() == TIMES, "{lines:?}");
        let span = space.span(0, M2)?;
        let (mode, own) = (lab.setup.mode(), std::process::id());
        let place = format!("addr={:#x} len={}", span.addr(), span.len());
        let fields = format!("mode={mode} step=acquire reason=not_gpu_memory code=-22 {place}");
        let fields = format!("{fields} tgid={own}");
        lines.iter().try_for_each(|line| has(line, &fields))?;
        fs::write(format!("{TRACE}/trace"), "")?;
        fs::write(format!("{event}/filter"), "reason == \"non_gpu_unmapped\"")?;
        refuse(&lab.near, &space, 0)?;
        let addr = sys::free_address(GRANULE, GRANULE)?;
        attempt(&lab.near, Span::anywhere(addr, GRANULE)?)?;
        let lines = traced()?;
        ensure!(lines.len() == 1, "{lines:?}");
        has(&lines[0], "reason=non_gpu_unmapped")?;
        fs::write(format!("{event}/enable"), "0")?;
        Ok(())
    }();
    fs::remove_dir(TRACE)?;
    result
}
