// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPU memory by dma-buf on an ib_core without peer memory: the driver's export and rxe's regions
//! without the preload library, and programs with the preload library (`preload/`).
//!
//! The library's cases start this program again ([`register`]) with the library and a stand-in for
//! CUDA's library, which knows all memory of the stand-in GPU.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use anyhow::{bail, ensure, Context as _, Result};

use crate::arena::Arena;
use crate::counters::{peer_regions, Counters};
use crate::gpu::{Allocation, GRANULE, PAGE};
use crate::knobs::{fail_next, Parameter};
use crate::ktap::{cases, note, same, Case};
use crate::lab::{Lab, Setup, M2};
use crate::rdma::{full_access, AccessFlags, Op, Refused, Region};
use crate::sys::{Mapping, Placement, Running, Span};
use crate::{ktap, rdma, sys};

/// Unit of exported ranges, in bytes.
const UNIT: u64 = 4096;
/// The kernel's ENOTSUPP, which has no name in user space.
const ENOTSUPP: i32 = 524;

/// Paths of the preload library and of the stand-in for CUDA's library.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Places {
    /// The library that registers GPU memory by dma-buf
    #[arg(long)]
    preload: PathBuf,
    /// The directory of the stand-in for CUDA's library
    #[arg(long)]
    library: PathBuf,
}

struct Bench {
    setup: Setup,
    places: Places,
}

impl Bench {
    fn lab(&self) -> Result<Lab> {
        Lab::open(&self.setup)
    }
}

const CASES: &[Case<Bench>] = cases![
    "dmabuf.bytes_arrive" => |bench| bytes_arrive(&bench.lab()?),
    "dmabuf.parts_of_pages" => |bench| parts_of_pages(&bench.lab()?),
    "dmabuf.export_rules" => |bench| export_rules(&bench.lab()?),
    "dmabuf.memory_outlives_the_free" => |bench| outlives_the_free(&bench.lab()?),
    "dmabuf.descriptor_keeps_the_memory" => |bench| descriptor_keeps(&bench.lab()?),
    "dmabuf.several_regions_of_one" => |bench| several_regions(&bench.lab()?),
    "dmabuf.refusals" => |bench| refusals(&bench.lab()?),
    "dmabuf.host_memory" => |bench| host_memory(bench),
    "dmabuf.without_the_library" => |bench| without(bench),
    "dmabuf.answers" => |bench| answers(bench),
    "dmabuf.many_leave_nothing" => |bench| many(bench),
];

/// Runs the cases whose name begins with a word of `filter`. Returns `true` if no case failed.
pub(crate) fn run(setup: &Setup, places: &Places, filter: &[String]) -> Result<bool> {
    let bench = Bench {
        setup: setup.clone(),
        places: places.clone(),
    };
    let named = CASES.iter().map(|case| (case.name, case));
    ktap::run_named(named, filter, |case| {
        let before = Counters::read()?;
        let result = (case.run)(&bench);
        result.and(ktap::check_rest(&before))
    })
}

/// Exports the first `length` bytes of an allocation of the first GPU.
fn export(lab: &Lab, memory: &Allocation, length: u64) -> Result<OwnedFd> {
    Ok(lab.gpu(0)?.export(memory.mapping().addr(), length)?)
}

/// Registers a part of a dma-buf with the far device.
fn try_register(
    lab: &Lab,
    buffer: &OwnedFd,
    offset: u64,
    span: Span,
) -> Result<std::result::Result<Region, Refused>> {
    lab.far
        .register_dmabuf_by_command(buffer.as_fd(), offset, span, full_access())
}

/// Exports all of an allocation, and registers a part of it.
fn register_part(lab: &Lab, memory: &Allocation, offset: usize, len: usize) -> Result<Region> {
    let all = export(lab, memory, memory.rounded_len())?;
    Ok(try_register(
        lab,
        &all,
        offset as u64,
        memory.span(offset, len)?,
    )??)
}

fn deregister(region: Region) -> Result<()> {
    region.deregister().map_err(|(_, error)| error.into())
}

fn live(what: &str, expected: u64) -> Result<()> {
    same(what, Counters::read()?.get(what)?, expected)
}

/// Writes to and reads from a region that begins at offset `start` of the memory. Compares the
/// bytes, also in the BAR.
fn moves(lab: &Lab, memory: &Allocation, region: &Region, start: usize, len: usize) -> Result<()> {
    let mut host = Arena::on_host(lab, 2 * len, 1)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let remote = region.part(0, len as u64)?;
    let data = host.expected(0, len)?.to_vec();
    connection.transfer(Op::Write, host.part(0, len)?, remote)?;
    connection.transfer(Op::Read, host.part(len, len)?, remote)?;
    ensure!(
        host.bytes(len, len)? == data,
        "the bytes that were read back differ"
    );
    host.expect(len, &data)?;
    let there = memory.bar_view()?.bytes(start, len)?;
    ensure!(there == data, "the BAR has other bytes");
    host.check()
}

fn bytes_arrive(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(2 * M2)?;
    let region = register_part(lab, &memory, 0, 2 * M2)?;
    live("dmabufs_live", 1)?;
    live("dmabuf_maps_live", 1)?;
    let found = peer_regions(&lab.setup.devices[1])?;
    note("entries", found.first().map_or(0, |region| region.entries));
    moves(lab, &memory, &region, 0, 2 * M2)?;
    deregister(region)?;
    live("dmabufs_live", 0)
}

/// Registers ranges that begin and end inside GPU pages and CPU pages.
fn parts_of_pages(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    for (offset, len) in [
        (0, 1),
        (4095, 2),
        (65535, 65538),
        (123, 1_000_000),
        (M2 - 1, 1),
    ] {
        let region = register_part(lab, &memory, offset, len)?;
        moves(lab, &memory, &region, offset, len).with_context(|| format!("{offset}, {len}"))?;
        deregister(region)?;
    }
    Ok(())
}

/// Checks that the stand-in exports exactly the ranges that NVIDIA's driver exported on two H200
/// GPUs.
fn export_rules(lab: &Lab) -> Result<()> {
    let gpu = lab.gpu(0)?;
    let start = sys::free_address(3 * GRANULE, GRANULE)?;
    let first = gpu.allocate(M2, Placement::At(start))?;
    let second = gpu.allocate(M2, Placement::At(start + GRANULE))?;
    let refused = |offset: u64, length: u64| -> Result<()> {
        match gpu.export(start + offset, length) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => bail!("{offset:#x} + {length:#x}: {other:?}"),
        }
    };
    for (offset, length) in [
        (0, UNIT),
        (UNIT, GRANULE - UNIT),
        (0, GRANULE),
        (PAGE - UNIT, 2 * UNIT),
        // Ranges across two allocations.
        (GRANULE - UNIT, 2 * UNIT),
        (0, 2 * GRANULE),
    ] {
        let buffer = gpu
            .export(start + offset, length)
            .with_context(|| format!("{offset:#x} + {length:#x}"))?;
        let span = Span::anywhere(start + offset, length)?;
        let region = try_register(lab, &buffer, 0, span)??;
        deregister(region)?;
        let behind = Span::anywhere(start + offset, length + 1)?;
        let longer = try_register(lab, &buffer, 0, behind)?;
        ensure!(
            longer
                .as_ref()
                .is_err_and(|refused| refused.errno() == libc::EINVAL),
            "{longer:?}"
        );
    }
    for (offset, length) in [
        (0, 0),
        (0, UNIT - 1),
        (1, UNIT),
        (512, UNIT),
        (0, 2 * GRANULE + UNIT),
        (2 * GRANULE, UNIT),
    ] {
        refused(offset, length)?;
    }
    drop(second);
    refused(0, 2 * GRANULE)?;
    drop(first);
    refused(0, GRANULE)
}

/// Frees memory under a live region. The region still reaches its own pages.
fn outlives_the_free(lab: &Lab) -> Result<()> {
    let gpu = lab.gpu(0)?;
    let mut memory = lab.allocate_gpu(M2)?;
    let region = register_part(lab, &memory, 0, M2)?;
    let place = memory.bar_address();
    memory.free()?;
    live("allocs_live", 0)?;
    live("dmabufs_live", 1)?;
    let next = lab.allocate_gpu(M2)?;
    next.write(0, &vec![0x5a; M2])?;
    let host = Arena::on_host(lab, M2, 3)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    connection.transfer(Op::Write, host.part(0, M2)?, region.part(0, M2 as u64)?)?;
    let there = gpu.bar_view(place, M2)?.bytes(0, M2)?;
    ensure!(there == host.expected(0, M2)?, "other pages were written");
    let own = next.bytes(0, M2)?;
    ensure!(own == [0x5a; M2], "another owner's bytes changed");
    deregister(region)?;
    live("dmabufs_live", 0)
}

/// Checks that a dma-buf's descriptor alone, without a region, keeps the memory allocated and its
/// GPU in use.
fn descriptor_keeps(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    let buffer = export(lab, &memory, GRANULE)?;
    live("bar_bytes_pinned", 0)?;
    live("device_refs", 1)?;
    drop(memory);
    live("dmabufs_live", 1)?;
    live("dmabuf_maps_live", 0)?;
    drop(buffer);
    live("device_refs", 0)
}

fn several_regions(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    let buffer = export(lab, &memory, GRANULE)?;
    let span = memory.span(0, M2)?;
    let one = try_register(lab, &buffer, 0, span)??;
    let near = &lab.near;
    let other = near.register_dmabuf_by_command(buffer.as_fd(), 0, span, full_access())??;
    drop(buffer);
    live("dmabufs_live", 1)?;
    live("dmabuf_maps_live", 2)?;
    live("bar_bytes_pinned", GRANULE)?;
    moves(lab, &memory, &one, 0, M2)?;
    deregister(one)?;
    live("bar_bytes_pinned", GRANULE)?;
    deregister(other)
}

/// A parameter that makes registrations of GPU memory fail.
struct Obstacle {
    name: &'static str,
    /// Module, parameter and value.
    knob: [&'static str; 3],
    /// Error of the export or of `ibv_cmd_reg_dmabuf_mr`.
    error: i32,
    /// Words that the library must log.
    words: &'static str,
}

/// Makes the table of obstacles: name, parameter, error, and words.
macro_rules! obstacles {
    ($($name:literal: $knob:expr => $error:expr, $words:literal;)+) => {
        &[$(Obstacle { name: $name, knob: $knob, error: $error, words: $words }),+]
    };
}

/// The obstacles to a dma-buf registration. A program with the preload library gets EFAULT for each
/// of them.
const OBSTACLES: &[Obstacle] = obstacles![
    "an older driver": ["nvidia", "dmabuf", "N"]
        => libc::EOPNOTSUPP, "cannot export a dma-buf";
    "topology": ["nvidia", "dmabuf_topology_deny", "Y"]
        => ENOTSUPP, "reach each other";
    "a NIC's driver without dma-buf regions": ["rdma_rxe", "peer_dmabuf", "N"]
        => libc::EOPNOTSUPP, "the NIC's driver does not support dma-buf regions";
    "no room in BAR1": ["nvidia", "bar1_reserve_mib", "1000000"]
        => libc::ENOMEM, "BAR1 full?";
    "a NIC without a PCI device": ["rdma_rxe", "peer_dma_dev", "none"]
        => libc::EOPNOTSUPP, "the NIC's driver does not support dma-buf regions";
    "the NIC's firmware": ["rdma_rxe", "peer_fail_create", "1"]
        => libc::EIO, "";
];

impl Obstacle {
    fn put(&self) -> Result<Parameter> {
        let [module, name, value] = self.knob;
        Parameter::set(module, name, value)
    }
}

fn refusals(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    let span = memory.span(0, M2)?;
    for obstacle in OBSTACLES {
        let put = obstacle.put()?;
        let found = match lab.gpu(0)?.export(span.addr(), GRANULE) {
            Err(error) => error.raw_os_error(),
            Ok(buffer) => try_register(lab, &buffer, 0, span)?
                .err()
                .map(|refused| refused.errno()),
        };
        ensure!(
            found == Some(obstacle.error),
            "{}: {found:?}",
            obstacle.name
        );
        drop(put);
        live("dmabufs_live", 0)?;
        live("bar_bytes_pinned", 0)?;
    }
    for (place, errno) in [
        ("dmabuf_export", libc::ENOMEM),
        ("dmabuf_map", libc::ENOMEM),
    ] {
        fail_next(place, errno)?;
        let found = export(lab, &memory, GRANULE)
            .and_then(|buffer| Ok(try_register(lab, &buffer, 0, span)??));
        ensure!(found.is_err(), "{place}: {found:?}");
        live("dmabufs_live", 0)?;
    }
    // The offset in the dma-buf and the I/O address must be equal modulo the page size.
    let buffer = export(lab, &memory, GRANULE)?;
    let apart = memory.span(1, 4096)?;
    let found = try_register(lab, &buffer, 0, apart)?;
    ensure!(
        found.is_err_and(|refused| refused.errno() == libc::EINVAL),
        "registered at an offset that does not fit the address"
    );
    deregister(register_part(lab, &memory, 0, M2)?)
}

/// Kind of memory that the child registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    Gpu,
    Host,
    /// GPU memory, with a flag that dma-buf regions do not support.
    Bind,
    /// GPU memory and some bytes after it.
    Behind,
}

/// Registers memory `times` times with `ibv_reg_mr`. Prints `ok`, or the number of the first error.
/// Fails if registrations leave descriptors or memory behind.
pub(crate) fn register(setup: &Setup, kind: Kind, times: u32) -> Result<()> {
    let lab = Lab::open(setup)?;
    let memory = lab.allocate_gpu(2 * M2)?;
    let host = Mapping::anonymous(M2)?;
    let span = match kind {
        Kind::Host => host.span(0, M2)?,
        Kind::Behind => Span::anywhere(memory.mapping().addr() + 123, 2 * GRANULE)?,
        _ => memory.span(123, M2)?,
    };
    let access = match kind {
        Kind::Bind => full_access() | AccessFlags::MemoryWindowBind,
        _ => full_access(),
    };
    let state = || -> Result<(usize, u64)> {
        let text = fs::read_to_string("/proc/self/statm")?;
        let pages = text.split(' ').nth(1).context("no resident pages")?;
        Ok((fs::read_dir("/proc/self/fd")?.count(), pages.parse()?))
    };
    let mut before = None;
    for time in 0..times {
        match lab.far.register(span, access) {
            Ok(region) => deregister(region)?,
            Err(refused) => {
                println!("{}", refused.errno());
                return Ok(());
            }
        }
        // The first tenth of the repetitions fills caches.
        if time == times / 10 {
            before = Some(state()?);
        }
    }
    if let Some((descriptors, pages)) = before {
        let now = state()?;
        ensure!(
            now.0 == descriptors,
            "{} descriptors, {} before",
            now.0,
            descriptors
        );
        ensure!(now.1 <= pages + 16, "{} pages, {pages} before", now.1);
    }
    println!("ok");
    Ok(())
}

/// Runs the child. `library` is the mode of the preload library. `None` means no library, and an
/// empty string means the library's default mode. Checks the child's first error (0: no error), and
/// the lines that the library logs.
fn expect(
    bench: &Bench,
    kind: &str,
    library: Option<&str>,
    times: u32,
    errno: i32,
    words: &[&str],
) -> Result<()> {
    let mut command = Command::new(env::current_exe()?);
    let cuda = bench.places.library.join("libcuda.so.1");
    let preload = library.map(|_| &bench.places.preload);
    command
        .env(
            "LD_PRELOAD",
            env::join_paths(preload.into_iter().chain([&cuda]))?,
        )
        .env("CUDA_KNOWS_ALL", "1")
        .env_remove("PEERMEM_SHIM")
        .args(["register", kind, &times.to_string()])
        .envs(
            library
                .filter(|mode| !mode.is_empty())
                .map(|mode| ("PEERMEM_SHIM", mode)),
        );
    let finished = Running::start(&mut command)?.finish(Duration::from_secs(900))?;
    ensure!(finished.success(), "{}", finished.tail(10));
    let lines = finished.output.lines();
    let (logged, printed): (Vec<_>, Vec<_>) =
        lines.partition(|line| line.starts_with("libpeermem_preload: "));
    for line in &logged {
        note("line", line);
    }
    let outcome = match errno {
        0 => "ok".to_owned(),
        errno => errno.to_string(),
    };
    let agrees = logged.len() == words.len()
        && logged
            .iter()
            .zip(words)
            .all(|(line, words)| line.contains(words));
    ensure!(
        printed == [outcome] && agrees,
        "{kind} memory, library {library:?}: {printed:?}, {logged:?}"
    );
    Ok(())
}

fn without(bench: &Bench) -> Result<()> {
    expect(bench, "gpu", None, 1, libc::EFAULT, &[])
}

fn host_memory(bench: &Bench) -> Result<()> {
    for library in [None, Some(""), Some("log"), Some("force")] {
        let before = Counters::read()?;
        expect(bench, "host", library, 2, 0, &[])?;
        let exports = Counters::read()?.since(&before, "dmabuf_export")?;
        same("exports", exports, 0)?;
    }
    Ok(())
}

/// Checks the outcome and the library's lines in each mode of the library, and for each obstacle.
fn answers(bench: &Bench) -> Result<()> {
    let past_the_end = "extends past the end of the GPU memory";
    expect(bench, "gpu", Some(""), 2, 0, &[])?;
    expect(bench, "gpu", Some("log"), 1, 0, &["by dma-buf"])?;
    expect(bench, "gpu", Some("force"), 1, 0, &[])?;
    expect(bench, "gpu", Some("off"), 1, libc::EFAULT, &[])?;
    expect(bench, "bind", Some(""), 1, libc::EFAULT, &["MW_BIND"])?;
    expect(bench, "behind", Some(""), 1, libc::EFAULT, &[past_the_end])?;
    // The last obstacle makes only one registration fail, so the library's second attempt would
    // succeed.
    for obstacle in OBSTACLES
        .iter()
        .filter(|obstacle| !obstacle.words.is_empty())
    {
        let put = obstacle.put()?;
        expect(bench, "gpu", Some(""), 1, libc::EFAULT, &[obstacle.words])
            .context(obstacle.name)?;
        drop(put);
    }
    Ok(())
}

/// Number of registrations, each with an export, after which the child counts its descriptors.
const MANY: u32 = 100_000;

fn many(bench: &Bench) -> Result<()> {
    let before = Counters::read()?;
    expect(bench, "gpu", Some(""), MANY, 0, &[])?;
    let exports = Counters::read()?.since(&before, "dmabuf_export")?;
    same("exports", exports, u64::from(MANY))
}
