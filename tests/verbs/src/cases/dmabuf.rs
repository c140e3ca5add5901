// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPU memory by dma-buf on an ib_core without peer memory: the driver's export and rxe's regions by
//! themselves, and the library that a program preloads (`preload/`).
//!
//! The library's cases start this program again ([`register`]) with the library and a stand-in for
//! CUDA's library, which knows all memory of the stand-in GPU.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use anyhow::{bail, ensure, Context as _, Result};

use crate::arena::Arena;
use crate::counters::{peer_regions, Counters};
use crate::gpu::{Allocation, GRANULE, PAGE};
use crate::knobs::{fail_next, Parameter};
use crate::ktap::{cases, note, same, Case};
use crate::lab::{Lab, Setup};
use crate::rdma::{full_access, AccessFlags, FragileRegion, Op, Refused};
use crate::sys::{Finished, Mapping, Placement, Running, Span};
use crate::{ktap, rdma, sys};

const M2: usize = GRANULE as usize;
/// Unit of exported ranges, in bytes.
const UNIT: u64 = 4096;
/// ENOTSUPP of the kernel, which is not an error of user space.
const ENOTSUPP: i32 = 524;

/// Where the library and its neighbour lie.
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
    let chosen: Vec<_> = CASES
        .iter()
        .filter(|case| filter.is_empty() || filter.iter().any(|word| case.name.starts_with(word)))
        .map(|case| (case.name, case))
        .collect();
    ensure!(!chosen.is_empty(), "no case has such a name");
    println!("KTAP version 1");
    Ok(ktap::tell(chosen.into_iter(), |case| {
        let before = Counters::read()?;
        let result = (case.run)(&bench);
        result.and(ktap::check_rest(&before))
    }))
}

/// Exports the first bytes of memory of the first GPU.
fn export(lab: &Lab, memory: &Allocation, length: u64) -> Result<OwnedFd> {
    Ok(lab.gpu(0)?.export(memory.mapping().addr(), length)?)
}

/// Registers a part of a dma-buf with the far device.
fn try_register(
    lab: &Lab,
    buffer: &OwnedFd,
    offset: u64,
    span: Span,
) -> Result<std::result::Result<FragileRegion, Refused>> {
    lab.far
        .register_dmabuf_by_command(buffer.as_fd(), offset, span, full_access())
}

/// Registers a part of memory, all of which is exported.
fn register_part(
    lab: &Lab,
    memory: &Allocation,
    offset: usize,
    len: usize,
) -> Result<FragileRegion> {
    let all = export(lab, memory, memory.rounded_len())?;
    Ok(try_register(
        lab,
        &all,
        offset as u64,
        memory.span(offset, len)?,
    )??)
}

fn deregister(region: FragileRegion) -> Result<()> {
    region.deregister().map_err(|(_, error)| error.into())
}

fn live(what: &str, expected: u64) -> Result<()> {
    same(what, Counters::read()?.get(what)?, expected)
}

/// Writes to and reads from a region that begins at `start` of the memory, and looks at the bytes in
/// the BAR.
fn moves(
    lab: &Lab,
    memory: &Allocation,
    region: &FragileRegion,
    start: usize,
    len: usize,
) -> Result<()> {
    let mut host = Arena::on_host(lab, 2 * len, 1)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let remote = region.part(0, len as u64)?;
    let data = host.expected(0, len)?.to_vec();
    connection
        .near
        .transfer(Op::Write, host.part(0, len)?, remote)?;
    connection
        .near
        .transfer(Op::Read, host.part(len, len)?, remote)?;
    ensure!(host.bytes(len, len)? == data, "other bytes came back");
    host.expect(len, &data)?;
    let mut there = vec![0; len];
    memory.bar_view()?.read(start, &mut there)?;
    ensure!(there == data, "other bytes are in the BAR");
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

/// Registers ranges that begin and end inside pages, of NVIDIA's size and the kernel's.
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

/// Exports what two H200 export, and nothing else.
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
        // Across two allocations.
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
    connection
        .near
        .transfer(Op::Write, host.part(0, M2)?, region.part(0, M2 as u64)?)?;
    let mut there = vec![0; M2];
    gpu.bar_view(place, M2)?.read(0, &mut there)?;
    ensure!(there == host.expected(0, M2)?, "the bytes went elsewhere");
    let mut own = vec![0; M2];
    next.read(0, &mut own)?;
    ensure!(
        own.iter().all(|byte| *byte == 0x5a),
        "another owner's bytes changed"
    );
    deregister(region)?;
    live("dmabufs_live", 0)
}

/// Keeps the memory and its GPU by a descriptor without a region.
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

/// A way to make registrations of GPU memory fail.
struct Obstacle {
    name: &'static str,
    /// Module, parameter and value.
    knob: Option<[&'static str; 3]>,
    /// Error of the export or of `ibv_cmd_reg_dmabuf_mr`.
    error: i32,
    /// Words of the library's line.
    words: &'static str,
}

/// The library's program gets EFAULT, whatever the error is.
const OBSTACLES: &[Obstacle] = &[
    Obstacle {
        name: "an older driver",
        knob: Some(["nvidia", "dmabuf", "N"]),
        error: libc::EOPNOTSUPP,
        words: "cannot export a dma-buf",
    },
    Obstacle {
        name: "topology",
        knob: Some(["nvidia", "dmabuf_topology_deny", "Y"]),
        error: ENOTSUPP,
        words: "reach each other",
    },
    Obstacle {
        name: "a NIC's driver without dma-buf regions",
        knob: Some(["rdma_rxe", "peer_dmabuf", "N"]),
        error: libc::EOPNOTSUPP,
        words: "the NIC's driver does not support dma-buf regions",
    },
    Obstacle {
        name: "no room in BAR1",
        knob: Some(["nvidia", "bar1_reserve_mib", "1000000"]),
        error: libc::ENOMEM,
        words: "BAR1 full?",
    },
    Obstacle {
        name: "a NIC without a PCI device",
        knob: Some(["rdma_rxe", "peer_dma_dev", "none"]),
        error: libc::EOPNOTSUPP,
        words: "the NIC's driver does not support dma-buf regions",
    },
    Obstacle {
        name: "the NIC's firmware",
        knob: Some(["rdma_rxe", "peer_fail_create", "1"]),
        error: libc::EIO,
        words: "",
    },
];

impl Obstacle {
    fn put(&self) -> Result<Option<Parameter>> {
        let set = |[module, name, value]: [&str; 3]| Parameter::set(module, name, value);
        self.knob.map(set).transpose()
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
    // The offset in the dma-buf and the I/O address must agree below a page.
    let buffer = export(lab, &memory, GRANULE)?;
    let apart = memory.span(1, 4096)?;
    let found = try_register(lab, &buffer, 0, apart)?;
    ensure!(
        found.is_err_and(|refused| refused.errno() == libc::EINVAL),
        "an offset of its own"
    );
    deregister(register_part(lab, &memory, 0, M2)?)
}

/// Kind of memory that the child registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    Gpu,
    Host,
    /// GPU memory, with a flag that dma-buf regions do not take.
    Bind,
    /// GPU memory and some bytes behind it.
    Behind,
}

/// Registers memory with `ibv_reg_mr` as often as given, and prints what came of it: `ok`, or the
/// number of the error. Fails if a registration leaves a descriptor or memory behind.
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
        match lab.far.register_fragile(span, access) {
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

/// Runs the child. Returns its outcome, and the library's lines.
fn ask(
    bench: &Bench,
    kind: &str,
    shim: Option<&str>,
    preload: bool,
    times: u32,
) -> Result<(String, Vec<String>)> {
    let mut command = Command::new(env::current_exe()?);
    let cuda = bench.places.library.join("libcuda.so.1");
    let mut libraries: Vec<&Path> = vec![&cuda];
    if preload {
        libraries.insert(0, &bench.places.preload);
    }
    command
        .env("LD_PRELOAD", env::join_paths(libraries)?)
        .env("CUDA_KNOWS_ALL", "1")
        .env_remove("PEERMEM_SHIM")
        .args(["register", kind, &times.to_string()]);
    if let Some(mode) = shim {
        command.env("PEERMEM_SHIM", mode);
    }
    let finished: Finished = Running::start(&mut command)?.finish(Duration::from_secs(900))?;
    ensure!(finished.success(), "{}", finished.tail(10));
    let lines = finished.output.lines().map(str::to_owned);
    let (said, rest): (Vec<_>, Vec<_>) =
        lines.partition(|line| line.starts_with("libpeermem_preload: "));
    ensure!(rest.len() == 1, "{}", finished.tail(10));
    Ok((rest.concat(), said))
}

fn expect(what: &str, found: &(String, Vec<String>), outcome: &str, words: &[&str]) -> Result<()> {
    let (came, lines) = found;
    for line in lines {
        note("line", line);
    }
    let said = lines.len() == words.len()
        && lines
            .iter()
            .zip(words)
            .all(|(line, words)| line.contains(words));
    ensure!(came == outcome && said, "{what}: {found:?}");
    Ok(())
}

/// EFAULT as the child prints it.
fn efault() -> String {
    libc::EFAULT.to_string()
}

fn without(bench: &Bench) -> Result<()> {
    expect(
        "GPU memory",
        &ask(bench, "gpu", None, false, 1)?,
        &efault(),
        &[],
    )
}

fn host_memory(bench: &Bench) -> Result<()> {
    for (preload, shim) in [
        (false, None),
        (true, None),
        (true, Some("log")),
        (true, Some("force")),
    ] {
        let before = Counters::read()?;
        expect(
            "host memory",
            &ask(bench, "host", shim, preload, 2)?,
            "ok",
            &[],
        )?;
        same(
            "exports",
            Counters::read()?.since(&before, "dmabuf_export")?,
            0,
        )?;
    }
    Ok(())
}

/// Compares each answer of the library with the expected one.
fn answers(bench: &Bench) -> Result<()> {
    let efault = efault();
    expect("served", &ask(bench, "gpu", None, true, 2)?, "ok", &[])?;
    expect(
        "log",
        &ask(bench, "gpu", Some("log"), true, 1)?,
        "ok",
        &["by dma-buf"],
    )?;
    expect(
        "force",
        &ask(bench, "gpu", Some("force"), true, 1)?,
        "ok",
        &[],
    )?;
    expect(
        "off",
        &ask(bench, "gpu", Some("off"), true, 1)?,
        &efault,
        &[],
    )?;
    expect(
        "flags",
        &ask(bench, "bind", None, true, 1)?,
        &efault,
        &["MW_BIND"],
    )?;
    expect(
        "end",
        &ask(bench, "behind", None, true, 1)?,
        &efault,
        &["extends past the end of the GPU memory"],
    )?;
    for obstacle in OBSTACLES {
        // One failure: the library's second try would succeed.
        if obstacle.words.is_empty() {
            continue;
        }
        let put = obstacle.put()?;
        let answer = ask(bench, "gpu", None, true, 1)?;
        expect(obstacle.name, &answer, &efault, &[obstacle.words])?;
        drop(put);
    }
    Ok(())
}

/// Number of registrations, each with an export, after which the child counts its descriptors.
const MANY: u32 = 100_000;

fn many(bench: &Bench) -> Result<()> {
    let before = Counters::read()?;
    expect("many", &ask(bench, "gpu", None, true, MANY)?, "ok", &[])?;
    let exports = Counters::read()?.since(&before, "dmabuf_export")?;
    same("exports", exports, u64::from(MANY))
}
