// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPUs whose memory is cached by CPUs (Grace). The tests cover two cases.
//!
//! - The driver keeps the memory to itself. `get_user_pages()` refuses the memory, and ib_core asks
//!   our module. The memory is in no BAR and has struct pages, so nvidia.ko maps it, and never
//!   revokes it.
//! - The driver has given the memory to the kernel. The kernel moves registered pages to other
//!   memory and asks no peer-memory module.

use std::collections::BTreeMap;
use std::fs;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::{ensure, Context, Result};

use crate::cases::{dma, moving, reasons};
use crate::counters::{Activity, Counters};
use crate::gpu::{Allocation, Freer};
use crate::knobs::Parameter;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode, Where, M2};
use crate::pattern::Pattern;
use crate::rdma::Op;
use crate::sys::Mapping;
use crate::{counters, knobs, ktap, module_files, rdma, sys};

pub(super) const CASES: &[Case] = cases![
    "coherent.write_gpu_to_gpu" => |lab| moves(lab, Op::Write, Where::Gpu(0), Where::Gpu(1)),
    "coherent.read_gpu_to_host" => |lab| moves(lab, Op::Read, Where::Gpu(0), Where::Host),
    "coherent.mapped_by_the_provider" => mapped,
    "coherent.not_revoked" => not_revoked,
    "coherent.moved_by_the_kernel" => moved,
];

/// Makes later allocations of GPU memory lie in the CPU-cached range, until the result is dropped.
fn coherent(lab: &Lab) -> Result<Parameter> {
    lab.needs_module()?;
    match counters::module_parameter("nvidia", "coherent_mib").as_deref() {
        None | Some("0") => ktap::skip("no memory of a coherent GPU in this machine"),
        Some(_) => Parameter::set("nvidia", "coherent", "1"),
    }
}

fn moves(lab: &Lab, op: Op, from: Where, to: Where) -> Result<()> {
    let _coherent = coherent(lab)?;
    lab.needs_both_clients()?;
    moving::sweep(lab, op, from, to)
}

/// Checks that a registration makes one pin and one mapping by nvidia.ko. In revocable mode, the
/// revocable client first refuses the memory. The reason of this refusal depends on the version of
/// the page tables, because old versions have no flag for cached memory.
fn mapped(lab: &Lab) -> Result<()> {
    let coherent = coherent(lab)?;
    lab.needs_ours()?;
    lab.needs_both_clients()?;
    let memory = lab.allocate_gpu(M2)?;
    drop(coherent);
    let as_it_is = || mapped_by_version(lab, &memory, knobs::table_version()?);
    as_it_is()?;
    if knobs::table_version_is_settable() {
        for version in ["0x00010002", "0x00020000", "0x00020001"] {
            let _other = Parameter::set("nvidia", "table_version", version)?;
            as_it_is()?;
        }
    }
    Ok(())
}

fn mapped_by_version(lab: &Lab, memory: &Allocation, version: u32) -> Result<()> {
    /// First version with flags, including `NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE`.
    const WITH_FLAGS: u32 = 0x0002_0000;
    let reason = if version < WITH_FLAGS {
        "not_in_bar"
    } else {
        "cpu_cacheable"
    };
    mapped_for(lab, memory, reason).with_context(|| format!("page tables {version:#010x}"))
}

fn mapped_for(lab: &Lab, memory: &Allocation, reason: &str) -> Result<()> {
    reasons::begin(lab)?;
    let before = Counters::read()?;
    let region = lab.near.reg_mr(memory.span(0, M2)?)?;
    let now = Counters::read()?;
    let activity = now.activity(&before)?;
    let handed_on = match lab.setup.mode() {
        PinMode::Persistent => BTreeMap::new(),
        PinMode::Revocable => BTreeMap::from([(format!("revocable/{reason}"), 1)]),
    };
    note("pins", activity.pins);
    note("mappings_of_the_provider", activity.maps);
    let expected = Activity {
        pins: 1 + handed_on.len() as u64,
        unpins: handed_on.len() as u64,
        attempts: 1 + handed_on.len() as u64,
        maps: 1,
        ..Activity::default()
    };
    ensure!(activity == expected, "{activity:?}, not {expected:?}");
    let live = ["pins_live", "pins_persistent_live", "bar_bytes_pinned"];
    let live = live.map(|name| now.get(name).unwrap_or(u64::MAX));
    ensure!(live == [0, 1, 0], "pins, and bytes of the BAR: {live:?}");
    module_files::counted(&handed_on)?;
    drop(region);
    counters::pins_are(0)
}

/// Frees memory under a live registration, in either mode. Expects that no callback comes and that
/// the HCA can still access the memory.
fn not_revoked(lab: &Lab) -> Result<()> {
    let coherent = coherent(lab)?;
    lab.needs_ours()?;
    lab.needs_both_clients()?;
    let memory = lab.allocate_gpu(M2)?;
    drop(coherent);
    let bytes = Pattern::new(lab.setup.seed, 1).bytes(0, M2);
    memory.write(0, &bytes)?;
    let region = lab.near.reg_mr(memory.span(0, M2)?)?;
    let before = Counters::read()?;
    lab.gpu(0)?.free(memory.mapping().addr(), Freer::Caller)?;
    counters::callbacks_are(&before, 0)?;
    dma::arrives(&lab.near, &region, &lab.far, &bytes)?;
    drop(region);
    counters::pins_are(0)
}

/// Returns the range of page frames of `ZONE_MOVABLE`, or `None` if the zone is empty. This zone
/// also contains the GPU memory that the driver has given to the kernel.
fn movable_zone() -> Result<Option<Range<u64>>> {
    let text = fs::read_to_string("/proc/zoneinfo")?;
    let zone = text.split("\nNode ").find(|zone| {
        zone.lines()
            .next()
            .is_some_and(|line| line.ends_with("Movable"))
    });
    let Some(zone) = zone else {
        return Ok(None);
    };
    let number = |name: &str| -> Option<u64> {
        zone.lines()
            .find_map(|line| line.trim().strip_prefix(name)?.trim().parse().ok())
    };
    let spanned = number("spanned").context("a zone without a length")?;
    if spanned == 0 {
        return Ok(None);
    }
    let start = number("start_pfn:").context("a zone without a start")?;
    Ok(Some(start..start + spanned))
}

/// Returns the number of the memory's pages in `zone`.
fn pages_in(memory: &Mapping, zone: &Range<u64>) -> Result<usize> {
    /// Mask of the page frame number in a pagemap entry.
    const FRAME: u64 = (1 << 55) - 1;
    let page = sys::page_size();
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut entry = [0; 8];
    let mut count = 0;
    for number in 0..memory.len() as u64 / page {
        pagemap.read_exact_at(&mut entry, (memory.addr() / page + number) * 8)?;
        count += usize::from(zone.contains(&(u64::from_ne_bytes(entry) & FRAME)));
    }
    Ok(count)
}

fn moved(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let Some(zone) = movable_zone()? else {
        return ktap::skip("no ZONE_MOVABLE in this machine");
    };
    // The page cache also uses pages of this zone.
    fs::write("/proc/sys/vm/drop_caches", "1")?;
    let [near, far] = [Mapping::anonymous(M2)?, Mapping::anonymous(M2)?];
    let bytes = Pattern::new(lab.setup.seed, 1).bytes(0, M2);
    near.write(0, &bytes)?;
    far.write(0, &vec![0; M2])?;
    let all = M2 / usize::try_from(sys::page_size())?;
    let in_zone = [pages_in(&near, &zone)?, pages_in(&far, &zone)?];
    note("pages_movable_before", in_zone[0] + in_zone[1]);
    ensure!(in_zone == [all; 2]);

    let before = Counters::read()?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let source = lab.near.reg_mr(near.span(0, M2)?)?;
    let target = lab.far.reg_mr(far.span(0, M2)?)?;
    let in_zone = [pages_in(&near, &zone)?, pages_in(&far, &zone)?];
    note("pages_movable_after", in_zone[0] + in_zone[1]);
    ensure!(in_zone == [0; 2]);
    let part = |region: &rdma::Region| region.part(0, M2 as u64);
    connection.transfer(Op::Write, part(&source)?, part(&target)?)?;
    dma::same(&far, &bytes)?;
    let asked = Counters::read()?.activity(&before)?;
    ensure!(asked == Activity::default(), "asked: {asked:?}");
    for hca in [&lab.near, &lab.far] {
        let regions = counters::peer_regions(hca.name())?;
        ensure!(regions.is_empty(), "peer-memory regions: {regions:?}");
    }
    Ok(())
}
