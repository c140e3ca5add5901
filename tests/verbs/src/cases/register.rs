// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Costs and limits of registrations, and refusals.

use std::io;
use std::ops::RangeInclusive;

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::counters::{Counters, PeerRegion};
use crate::gpu::{Allocation, GRANULE};
use crate::ktap::{cases, expect, note, Case};
use crate::lab::{Lab, Memory, Peermem, Where, M2};
use crate::pattern::Pattern;
use crate::rdma::{full_access, AccessFlags, Hca, Op, Region, Status};
use crate::sys::{Placement, Span};
use crate::{counters, gpu, ktap, rdma, sys};

const GIB: u64 = 1 << 30;
/// Boundary at which our scatter-list entries end, because an entry's length has 32 bits.
pub(super) const ENTRY_BOUNDARY: u64 = 2 * GIB;
/// Part of the BAR that nvidia.ko reserves, in bytes.
const RESERVE: u64 = 36 << 20;

pub(super) const CASES: &[Case] = cases![
    "register.one_pin_one_unpin" => one_pin,
    "register.1gib_aligned" => |lab| sized(lab, GIB),
    "register.3gib" => |lab| sized(lab, 3 * GIB),
    "register.16gib" => |lab| sized(lab, 16 * GIB),
    "register.64gib" => |lab| sized(lab, 64 * GIB),
    "register.entry_boundary" => entry_boundary,
    "register.unaligned_entries" => unaligned,
    "register.rounded_allocation" => rounded_allocation,
    "register.overlapping" => overlapping,
    "register.many_on_one_allocation" => many,
    "register.no_module_refuses" => no_module,
    "register.cpu_memory_takes_no_pin" => cpu_memory,
    "register.rights_hold" => rights,
    "register.rereg_changes_rights" => rereg,
];

pub(crate) fn peer_region(hca: &Hca, region: &Region) -> Result<PeerRegion> {
    let key = region.lkey();
    counters::peer_regions(hca.name())?
        .into_iter()
        .find(|found| found.lkey == u64::from(key))
        .with_context(|| format!("{} has no peer region with key {key:#x}", hca.name()))
}

/// Returns the number of scatter-list entries that the module under test makes for contiguous
/// memory. The number is exact unless an IOMMU chooses the addresses.
pub(crate) fn expected_entries(lab: &Lab, addr: u64, len: u64) -> RangeInclusive<u64> {
    let first = addr / gpu::PAGE * gpu::PAGE;
    let end = (addr + len).next_multiple_of(gpu::PAGE);
    let pages = (end - first) / gpu::PAGE;
    if lab.setup.peermem == Peermem::Nvidia {
        return pages..=pages;
    }
    let limit = lab.setup.entry_limit() / gpu::PAGE * gpu::PAGE;
    let mut entries = 0;
    let mut at = first;
    while at < end {
        let boundary = (at / ENTRY_BOUNDARY + 1) * ENTRY_BOUNDARY;
        at = end.min(boundary).min(at + limit);
        entries += 1;
    }
    // Behind a translating IOMMU, each GPU page has its own DMA address, which may or may not
    // follow the previous one.
    if lab.setup.translating_iommu {
        entries..=pages
    } else {
        entries..=entries
    }
}

/// Returns the number of nvidia.ko's pins in one registration.
pub(crate) fn expected_pins(peermem: Peermem) -> u64 {
    match peermem {
        Peermem::Ours => 1,
        Peermem::Nvidia => 2,
        Peermem::Preload | Peermem::None => 0,
    }
}

/// Allocates `len` bytes at a multiple of `align`. Skips the case if the BAR is too small.
pub(crate) fn allocate_aligned(lab: &Lab, len: u64, align: u64) -> Result<Allocation> {
    let gpu = lab.gpu(0)?;
    if len + RESERVE > gpu.bar_len() {
        return ktap::skip(format_args!(
            "the BAR of {} MiB has no room for {} MiB",
            gpu.bar_len() >> 20,
            len >> 20
        ));
    }
    let addr = sys::free_address(len, align)?;
    gpu.allocate(usize::try_from(len)?, Placement::At(addr))
}

fn one_pin(lab: &Lab) -> Result<()> {
    lab.needs_pins()?;
    let memory = lab.allocate_gpu(M2)?;
    for _ in 0..3 {
        let before = Counters::read()?;
        let region = lab.near.reg_mr(memory.span(0, M2)?)?;
        let registered = Counters::read()?;
        let entries = check_entries(lab, &lab.near, &region)?;
        drop(region);
        let after = Counters::read()?;

        let (on, off) = (registered.activity(&before)?, after.activity(&registered)?);
        note("pins", on.pins);
        note("unpins", on.unpins + off.unpins);
        note("entries", entries);
        let pins = expected_pins(lab.setup.peermem);
        ensure!(on.pins == pins);
        ensure!(on.unpins + off.unpins == pins);
        ensure!(off.unpins == 1 && off.pins == 0, "deregistration: {off:?}");
        ktap::same("live pins", registered.live_pins()?, 1)?;
    }
    Ok(())
}

/// Checks that a live region has the expected number of scatter-list entries. Returns the number.
pub(super) fn check_entries(lab: &Lab, hca: &Hca, region: &Region) -> Result<u64> {
    let entries = peer_region(hca, region)?.entries;
    let expected = expected_entries(lab, region.addr(), region.len());
    ensure!(
        expected.contains(&entries),
        "{entries} scatter-list entries, not {expected:?}"
    );
    Ok(entries)
}

/// Tests a large contiguous region: its entries, and the bytes at its ends and wherever an entry
/// may end.
pub(super) fn sized(lab: &Lab, len: u64) -> Result<()> {
    lab.needs_module()?;
    let align = if len == GIB { GIB } else { ENTRY_BOUNDARY };
    let memory = allocate_aligned(lab, len, align)?;
    ensure!(memory.is_contiguous()?, "the memory is not contiguous");
    let size = usize::try_from(len)?;
    let started = std::time::Instant::now();
    let region = lab.far.reg_mr(memory.span(0, size)?)?;
    note("milliseconds", started.elapsed().as_millis());
    note("entries", check_entries(lab, &lab.far, &region)?);

    let mut source = Arena::on_host(lab, M2, 1)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let mut places: Vec<usize> = vec![0, size - 4097];
    // Adds a place across each multiple of 1 GiB, because entries may end at some multiples.
    places.extend((1..len / GIB).map(|gib| (gib * GIB) as usize - 2048));
    for (index, at) in places.iter().copied().enumerate() {
        let data = Pattern::new(lab.setup.seed, 10 + index as u64).bytes(0, 4097);
        source.put(0, &data)?;
        let remote = region.part(at as u64, 4097)?;
        connection.transfer(Op::Write, source.part(0, 4097)?, remote)?;
        ensure!(memory.bytes(at, 4097)? == data, "at {at:#x}");
        connection.transfer(Op::Read, source.part(8192, 4097)?, remote)?;
        source.expect(8192, &data)?;
        source.check_around(8192, 4097)?;
    }
    note("places_written_and_read", places.len());
    Ok(())
}

/// Registers a region that crosses a multiple of 2 GiB. Checks that the region has an entry on each
/// side of this multiple.
fn entry_boundary(lab: &Lab) -> Result<()> {
    lab.needs_pins()?;
    let gpu = lab.gpu(0)?;
    let boundary = sys::free_address(2 * ENTRY_BOUNDARY, ENTRY_BOUNDARY)? + ENTRY_BOUNDARY;
    let len = 4 * M2;
    let memory = Memory::Gpu(gpu.allocate(len, Placement::At(boundary - 2 * GRANULE))?);
    let mut target = Arena::whole(&lab.far, memory, Pattern::new(lab.setup.seed, 1))?;
    note("entries", check_entries(lab, &lab.far, target.region())?);

    let source = Arena::on_host(lab, len, 2)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    for (at, size) in [(2 * M2 - 1, 2), (2 * M2 - 4096, 8192), (M2 + 1, 2 * M2 + 1)] {
        let data = source.expected(at, size)?.to_vec();
        connection.transfer(Op::Write, source.part(at, size)?, target.part(at, size)?)?;
        target.expect(at, &data)?;
    }
    target.check()
}

fn unaligned(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let memory = lab.allocate_gpu(2 * M2)?;
    for (offset, len) in [
        (1, 1),
        (4095, 2),
        (65535, 2),
        (65536, 65537),
        (4097, M2),
        (M2 - 1, M2 + 1),
    ] {
        let region = lab.near.reg_mr(memory.span(offset, len)?)?;
        let entries =
            check_entries(lab, &lab.near, &region).with_context(|| format!("{offset}+{len}"))?;
        note(&format!("entries_{offset}_{len}"), entries);
    }
    Ok(())
}

/// Tests overlapping regions. Each region has its own pin and works independently of the other
/// regions.
fn overlapping(lab: &Lab) -> Result<()> {
    let memory = lab.allocate(Where::Gpu(0), 3 * M2)?;
    let source = Arena::on_host(lab, M2, 1)?;
    let ranges = [
        (0, 3 * M2),
        (M2 / 2, M2),
        (M2 - 1, M2 + 2),
        (0, 3 * M2),
        (2 * M2 - 65537, 65537),
    ];
    let mut regions = Vec::new();
    for (offset, len) in ranges {
        regions.push(Some((offset, lab.far.reg_mr(memory.span(offset, len)?)?)));
    }
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    // Deregisters from the middle outwards.
    for gone in [2, 0, 4, 1, 3] {
        for (offset, region) in regions.iter().flatten() {
            for at in [0, region.len() - 5] {
                let from = at as usize % 4096;
                connection.transfer(Op::Write, source.part(from, 5)?, region.part(at, 5)?)?;
                let found = memory.bytes(offset + at as usize, 5)?;
                ensure!(found == source.expected(from, 5)?);
            }
        }
        regions[gone] = None;
    }
    note("regions", ranges.len());
    Ok(())
}

fn many(lab: &Lab) -> Result<()> {
    const COUNT: usize = 256;
    let memory = lab.allocate(Where::Gpu(0), 2 * M2)?;
    let before = Counters::read()?;
    let mut regions = Vec::new();
    for index in 0..COUNT {
        regions.push(lab.near.reg_mr(memory.span(index * 4099, 65537)?)?);
    }
    let keys: std::collections::BTreeSet<_> = regions.iter().map(Region::lkey).collect();
    ensure!(keys.len() == COUNT);
    counters::pins_are(COUNT as u64)?;
    let pins = Counters::read()?.activity(&before)?.pins;
    note("pins", pins);
    ensure!(pins == COUNT as u64 * expected_pins(lab.setup.peermem));
    Ok(())
}

/// Checks that the registration fails with one of `errnos` and leaves no pin.
pub(crate) fn refused(lab: &Lab, span: Span, errnos: &[i32]) -> Result<()> {
    let before = Counters::read()?;
    match lab.near.reg_mr(span) {
        Ok(_) => anyhow::bail!("{:#x}+{:#x} registered", span.addr(), span.len()),
        Err(error) => {
            note("errno", error.errno());
            ensure!(errnos.contains(&error.errno()), "{error}, not {errnos:?}");
        }
    }
    counters::pins_are(0).context("after a refusal")?;
    let activity = Counters::read()?.activity(&before)?;
    ensure!(activity.pins == activity.unpins, "{activity:?}");
    Ok(())
}

fn no_module(lab: &Lab) -> Result<()> {
    if lab.setup.peermem != Peermem::None {
        return ktap::skip(format_args!("a module is loaded: {}", lab.setup.peermem));
    }
    let memory = lab.allocate_gpu(8 * M2)?;
    for (offset, len) in [(0, 1), (0, 4096), (4097, 65537), (0, M2), (M2 - 1, 6 * M2)] {
        refused(lab, memory.span(offset, len)?, &[libc::EFAULT])?;
    }
    Ok(())
}

/// Registers small buffers. The GPU driver rounds allocations up to granules, so all GPU pages of a
/// small buffer exist in full.
fn rounded_allocation(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    for len in [4096, 65536, M2 + 4096] {
        let memory = lab.allocate_gpu(len)?;
        let rounded = memory.rounded_len();
        ensure!(rounded == (len as u64).next_multiple_of(GRANULE));
        lab.near.reg_mr(memory.span(0, len)?)?;
        lab.near.reg_mr(memory.span(len - 1, 1)?)?;
    }
    Ok(())
}

/// Checks that host memory never reaches the peer-memory clients.
fn cpu_memory(lab: &Lab) -> Result<()> {
    let before = Counters::read()?;
    let arena = Arena::on_host(lab, M2, 1)?;
    arena.check()?;
    let calls = Counters::read()?.activity(&before)?.attempts;
    expect("provider_calls", calls, 0)
}

fn rights(lab: &Lab) -> Result<()> {
    let memory = lab.allocate(Where::Gpu(0), M2)?;
    let local = Arena::on_host(lab, M2, 1)?;
    let all = [Op::Write, Op::Read, Op::FetchAdd { add: 1 }];
    let local_write = AccessFlags::LocalWrite;
    let combinations = [
        (AccessFlags::none(), [false; 3]),
        (AccessFlags::RemoteRead, [false, true, false]),
        (local_write | AccessFlags::RemoteWrite, [true, false, false]),
        (
            local_write | AccessFlags::RemoteAtomic,
            [false, false, true],
        ),
        (full_access(), [true; 3]),
    ];
    for (access, allowed) in combinations {
        let region = lab.far.register(memory.span(0, M2)?, access)?;
        for (op, allowed) in all.into_iter().zip(allowed) {
            let status = lab.status(op, local.part(0, 8)?, region.part(0, 8)?)?;
            let expected = match allowed {
                true => Status::Success,
                false => Status::RemoteAccessError,
            };
            ensure!(status == expected, "{op} with {access:?}: {status:?}");
        }
    }
    note("combinations", combinations.len());
    Ok(())
}

fn rereg(lab: &Lab) -> Result<()> {
    // A region of host memory shows whether this kernel's rxe supports REREG_MR at all.
    let plain = lab.allocate(Where::Host, M2)?;
    let plain = lab.far.reg_mr(plain.span(0, M2)?)?;
    if let Err(error) = plain.change_access(AccessFlags::LocalWrite | AccessFlags::RemoteRead) {
        let errno = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error);
        ensure!(errno == Some(libc::EOPNOTSUPP), "{error:#}");
        return ktap::skip("this kernel's rxe changes no region (REREG_MR)");
    }
    drop(plain);
    let memory = lab.allocate(Where::Gpu(0), M2)?;
    let local = Arena::on_host(lab, M2, 1)?;
    let region = lab.far.reg_mr(memory.span(0, M2)?)?;
    let status = |op| lab.status(op, local.part(0, 8)?, region.part(0, 8)?);
    ensure!(status(Op::Write)? == Status::Success);
    region.change_access(AccessFlags::LocalWrite | AccessFlags::RemoteRead)?;
    ensure!(status(Op::Write)? == Status::RemoteAccessError);
    ensure!(status(Op::Read)? == Status::Success);
    Ok(())
}
