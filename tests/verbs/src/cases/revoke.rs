// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Memory that is freed under a live region, with a callback from nvidia.ko: from then on, the
//! region refuses all traffic.

use std::sync::Arc;

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::cases::register::peer_region;
use crate::counters::Counters;
use crate::gpu::{Allocation, Freer, GRANULE};
use crate::hold::Worker;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Memory, PinMode, M2};
use crate::pattern::Pattern;
use crate::rdma::{Op, Region, Status};
use crate::{counters, rdma};

pub(super) const CASES: &[Case] = cases![
    "revoke.free_by_ioctl" => |lab| freed_under_region(lab, FreeBy::Ioctl),
    "revoke.free_by_munmap" => |lab| freed_under_region(lab, FreeBy::Unmap),
    "revoke.free_by_kernel_thread" => |lab| freed_under_region(lab, FreeBy::KernelThread),
    "revoke.under_traffic" => under_traffic,
    "revoke.local_use_refused" => local_use,
    "revoke.receive_refused" => receive,
    "revoke.all_regions_of_the_allocation" => several_regions,
    "revoke.others_go_on" => others,
    "revoke.new_owner_keeps_its_bytes" => new_owner,
    "revoke.registers_again" => again,
];

#[derive(Debug, Clone, Copy)]
enum FreeBy {
    Ioctl,
    KernelThread,
    Unmap,
}

fn region_over(lab: &Lab, memory: &Allocation) -> Result<Region> {
    Ok(lab.far.reg_mr(memory.span(0, M2)?)?)
}

/// Returns GPU memory, an arena of the same length in host memory, and a region over the GPU
/// memory, on different devices.
fn registered(lab: &Lab) -> Result<(Allocation, Arena, Region)> {
    lab.needs_mode(PinMode::Revocable)?;
    let memory = lab.allocate_gpu(M2)?;
    let local = Arena::on_host(lab, M2, 1)?;
    let region = region_over(lab, &memory)?;
    Ok((memory, local, region))
}

/// Checks that the region refuses remote accesses.
fn all_refused(lab: &Lab, local: &Arena, region: &Region) -> Result<()> {
    let swap = Op::CompareSwap {
        compare: 0,
        swap: 1,
    };
    for op in [Op::Write, Op::Read, Op::FetchAdd { add: 1 }, swap] {
        let status = lab.status(op, local.part(0, 8)?, region.part(0, 8)?)?;
        ensure!(status == Status::RemoteAccessError, "{op}: {status:?}");
    }
    Ok(())
}

fn freed_under_region(lab: &Lab, by: FreeBy) -> Result<()> {
    let (mut memory, local, region) = registered(lab)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    connection.transfer(Op::Write, local.part(0, 4096)?, region.part(0, 4096)?)?;

    let before = Counters::read()?;
    match by {
        FreeBy::Ioctl => memory.free()?,
        FreeBy::KernelThread => memory.free_by(Freer::KernelThread)?,
        FreeBy::Unmap => drop(memory),
    }
    counters::callbacks_are(&before, 1)?;
    let after = Counters::read()?;
    for name in [
        "pins_live",
        "pins_persistent_live",
        "mappings_live",
        "bar_bytes_pinned",
    ] {
        let value = after.get(name)?;
        ensure!(value == 0, "{name} is {value} after the free returned");
    }
    let state = peer_region(&lab.far, &region)?.state;
    ensure!(state == "revoked", "rxe holds the region as {state}");

    // Tests the connection that worked before, and new connections.
    connection
        .near
        .run(Op::Write, local.part(0, 4096)?, region.part(0, 4096)?)?
        .expect(Status::RemoteAccessError)
        .context("WRITE to a revoked region")?;
    all_refused(lab, &local, &region)?;
    drop(region);
    Ok(())
}

/// Posts requests whose local buffer is the revoked region. Each request must fail with a local
/// protection error.
fn local_use(lab: &Lab) -> Result<()> {
    let (mut memory, remote, region) = registered(lab)?;
    memory.free()?;
    for op in [Op::Write, Op::Send, Op::Read] {
        let mut connection = rdma::connect(&lab.far, &lab.near)?;
        if op == Op::Send {
            connection.far.post_receive(remote.part(0, 4096)?)?;
        }
        let status = connection.status(op, region.part(0, 4096)?, remote.part(0, 4096)?)?;
        note(&format!("status_{op}"), format_args!("{status:?}"));
        ensure!(status == Status::LocalProtectionError, "{op}: {status:?}");
    }
    remote.check()
}

/// Sends to a receive buffer that was revoked after it was posted.
fn receive(lab: &Lab) -> Result<()> {
    let (mut memory, local, region) = registered(lab)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    connection.far.post_receive(region.part(0, 4096)?)?;
    memory.free()?;
    connection
        .near
        .post(Op::Send, local.part(0, 4096)?, region.part(0, 4096)?)?;
    let sent = connection.near.sent()?.status;
    let received = connection.far.received()?.status;
    note("status_sender", format_args!("{sent:?}"));
    note("status_receiver", format_args!("{received:?}"));
    ensure!(sent == Status::RemoteOperationError);
    ensure!(received == Status::LocalProtectionError);
    Ok(())
}

fn several_regions(lab: &Lab) -> Result<()> {
    const COUNT: usize = 16;
    lab.needs_mode(PinMode::Revocable)?;
    let mut memory = lab.allocate_gpu(M2)?;
    let local = Arena::on_host(lab, M2, 1)?;
    let regions = (0..COUNT)
        .map(|index| Ok(lab.far.reg_mr(memory.span(index * 65536, 131_072)?)?))
        .collect::<Result<Vec<_>>>()?;
    let before = Counters::read()?;
    memory.free()?;
    counters::callbacks_are(&before, COUNT as u64)?;
    for region in &regions {
        all_refused(lab, &local, region)?;
    }
    Ok(())
}

fn others(lab: &Lab) -> Result<()> {
    let (mut memory, local, gone) = registered(lab)?;
    let mut stays = Arena::whole(
        &lab.far,
        Memory::Gpu(lab.allocate_gpu(M2)?),
        Pattern::new(lab.setup.seed, 2),
    )?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    memory.free()?;
    for at in [0, 4097, M2 - 65537] {
        connection.transfer(Op::Write, local.part(at, 65537)?, stays.part(at, 65537)?)?;
        stays.expect(at, local.expected(at, 65537)?)?;
    }
    all_refused(lab, &local, &gone)?;
    stays.check()?;
    local.check()
}

/// Gives the freed memory to another owner while the old region is still registered.
fn new_owner(lab: &Lab) -> Result<()> {
    let (mut memory, local, region) = registered(lab)?;
    let old_place = memory.bar_address();
    memory.free()?;
    // The next allocation is pinned, because memory has a place in BAR1 only while it is pinned.
    let (next, _theirs) = lab
        .gpu(0)?
        .allocate_there(M2, old_place, |next| {
            Ok(lab.near.reg_mr(next.span(0, M2)?)?)
        })?
        .context("no other allocation got the freed place, so something still holds it")?;
    let view = next.bar_view()?;
    let pattern = Pattern::new(lab.setup.seed, 3).bytes(0, M2);
    next.write(0, &pattern)?;
    all_refused(lab, &local, &region)?;
    let found = view.bytes(0, M2)?;
    ensure!(found == pattern, "the new owner's bytes changed");
    note("differing_bytes", 0);
    Ok(())
}

/// Checks that the same addresses can be registered and used again after a revocation.
fn again(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    let local = Arena::on_host(lab, M2, 1)?;
    let addr = crate::sys::free_address(GRANULE, GRANULE)?;
    let mut old = Vec::new();
    for round in 0..4 {
        let memory = lab.gpu(0)?.allocate(M2, crate::sys::Placement::At(addr))?;
        let region = region_over(lab, &memory)?;
        let mut connection = rdma::connect(&lab.near, &lab.far)?;
        connection.transfer(Op::Write, local.part(round, 4096)?, region.part(0, 4096)?)?;
        let sent = local.expected(round, 4096)?;
        ensure!(memory.bytes(0, 4096)? == sent, "round {round}");
        old.push(region);
        drop(memory);
    }
    for region in &old {
        all_refused(lab, &local, region)?;
    }
    Ok(())
}

/// Frees memory during a stream of WRITEs or READs. One request fails because of the revocation. No
/// request that is posted after the free may succeed, and no request may reach bytes that are
/// written to the memory later.
fn under_traffic(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    let mut done = 0;
    for before in [0, 1, 4, 16] {
        for op in [Op::Write, Op::Read] {
            done += freed_after(lab, op, before)
                .with_context(|| format!("freed when {before} of the {op}s were done"))?;
        }
    }
    note("requests_done", done);
    Ok(())
}

/// Frees the memory once `before` requests are done. Returns the number of requests that succeeded
/// in total.
fn freed_after(lab: &Lab, op: Op, before: usize) -> Result<usize> {
    const UNDER_WAY: usize = 16;
    let memory = lab.allocate_gpu(M2)?;
    // The memory may still have the bytes of an earlier owner.
    memory.write(0, &Pattern::new(lab.setup.seed, 5).bytes(0, M2))?;
    let local = Arena::on_host(lab, M2, 1)?;
    let region = region_over(lab, &memory)?;
    let view = memory.bar_view()?;
    let mut near = rdma::connect(&lab.near, &lab.far)?;
    let near = &mut near.near;
    let (from, to) = (local.part(0, M2)?, region.part(0, M2 as u64)?);
    for _ in 0..UNDER_WAY {
        near.post(op, from, to)?;
    }
    for _ in 0..before {
        near.sent()?.expect(Status::Success)?;
        near.post(op, from, to)?;
    }

    // Bytes that differ from all bytes in flight.
    let theirs = Pattern::new(lab.setup.seed, 7).bytes(0, M2);
    let (gpu, addr) = (Arc::clone(lab.gpu(0)?), memory.mapping().addr());
    let mut free = Worker::start("free", move || -> Result<_> {
        gpu.free(addr, Freer::Caller)?;
        view.write(0, &theirs)?;
        Ok((view, theirs))
    })?;
    // Number of the first request that was posted after the free had returned.
    let mut late = None;
    let mut done = before;
    let first = loop {
        let completion = near.sent()?;
        if completion.status != Status::Success {
            break completion.status;
        }
        ensure!(
            late.is_none_or(|late| completion.id < late),
            "a request that was posted after the free has succeeded"
        );
        done += 1;
        let freed = free.has_ended()?;
        let id = near.post(op, from, to)?;
        if freed {
            late.get_or_insert(id);
        }
    };
    ensure!(first == Status::RemoteAccessError, "{op}: {first:?}");
    for _ in 1..UNDER_WAY {
        near.sent()?
            .expect(Status::WorkRequestFlushedError)
            .with_context(|| format!("{op} after the one that was refused"))?;
    }

    let (view, theirs) = free.done()??;
    ensure!(view.bytes(0, M2)? == theirs, "bytes changed after the free");
    if op == Op::Read {
        const PIECE: usize = 64;
        let got = local.bytes(0, M2)?;
        let leaked = got
            .chunks(PIECE)
            .zip(theirs.chunks(PIECE))
            .filter(|(got, theirs)| got == theirs)
            .count();
        ensure!(
            leaked == 0,
            "a READ returned {leaked} pieces of the next owner's bytes"
        );
    }
    all_refused(lab, &local, &region)?;
    Ok(done)
}
