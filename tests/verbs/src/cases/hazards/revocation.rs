// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Hazards A to F and O: memory that is freed, or released by another process, while the module
//! works.

use std::path::Path;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::cases::register::peer_region;
use crate::cases::stage::Registered;
use crate::gpu::Allocation;
use crate::hold::{Fate, Hold, Worker};
use crate::knobs::Parameter;
use crate::ktap::cases;
use crate::lab::PinMode;
use crate::pattern::Pattern;
use crate::rdma::{errno_name, Op, Region, Status};
use crate::{module, rdma, sys};

use super::{interpose, look_at_freed_memory, Bench, Case, M2};

pub(super) const CASES: &[Case] = cases![
    "A.foreign_last_close" => foreign_last_close,
    "B.unmap_after_callback" => unmap_after_callback,
    "C.stale_put" => stale_put,
    "D.freed_before_map" => freed_before_map,
    "D.freed_during_map" => freed_during_map,
    "D.freed_before_ticket" => freed_before_ticket,
    "E.released_before_callback_ends" => |bench| released_beside_callback(bench, "ib_peer_mem/invalidate_unlocked"),
    "E.released_inside_invalidation" => |bench| released_beside_callback(bench, "ib_peer_mem/invalidate_got_ref"),
    "F.put_under_mapping_lock" => put_under_mapping_lock,
    "O.unloaded_under_callback" => unloaded_under_callback,
    "driver_holds_lock" => driver_holds_lock,
    "core_locks_twice" => core_locks_twice,
];

/// Lets a child close the last descriptor of the HCA. nvidia.ko does not put the pin for the child.
/// Then tries to unload the module, and frees the memory.
fn foreign_last_close(bench: &Bench) -> Result<()> {
    let memory = bench.allocate()?;
    bench.orphan(&memory)?;
    let (pins, references) = (bench.pins()?, bench.module_references()?);
    if pins == 0 {
        bench.saw("unpinned by the child");
    } else {
        bench.check(
            references > 0,
            "the pin stays, and holds the module",
            "the pin stays, nothing holds the module",
        );
    }
    let parameters = module::parameters();
    let unload = Worker::start("unload", || sys::unload_module(module::NAME))?;
    let Some(unloaded) = bench.fate("rmmod", unload.finish()?) else {
        return Ok(());
    };
    if pins > 0 {
        bench.check(
            unloaded.is_err(),
            "rmmod is refused",
            "rmmod succeeds before the callback comes",
        );
    }
    let free = bench.start_free(&memory)?;
    let Some(freed) = bench.fate("the free", free.finish()?) else {
        std::mem::forget(memory);
        return Ok(());
    };
    freed?;
    if pins > 0 {
        ensure!(bench.counted("callbacks")? == 1, "no callback came");
        bench.saw("the callback comes at the free");
    }
    bench.check_nothing_left()?;
    let references = bench.module_references().unwrap_or(0);
    bench.check(
        references == 0,
        "no reference to the module is left",
        &format!("{references} references to the module are left"),
    );
    if unloaded.is_ok() {
        module::load(&parameters)?;
    }
    Ok(())
}

/// Stops a deregistration before `dma_unmap`, frees the memory with its callback, and continues.
fn unmap_after_callback(bench: &Bench) -> Result<()> {
    let (memory, region) = bench.registered()?;
    let (hold, deregistration) = bench.deregister_until(region, "ib_peer_mem/before_dma_unmap")?;
    bench.free(&memory)?;
    hold.finish(deregistration)?;
    bench.check_end()
}

/// Gives the memory of `region` to another owner and writes through the region. Returns `true` if
/// the write reaches the new owner.
fn reaches_next_owner(bench: &Bench, memory: &Allocation, region: &Region) -> Result<bool> {
    reaches_next_owner_or_none(bench, memory, region)?
        .context("no other allocation got the freed place")
}

/// Returns the same as [`reaches_next_owner`], or `None` if no other owner gets the place.
fn reaches_next_owner_or_none(
    bench: &Bench,
    memory: &Allocation,
    region: &Region,
) -> Result<Option<bool>> {
    let pin = |next: &Allocation| bench.register(next);
    let there = bench.gpu.allocate_there(M2, memory.bar_address(), pin)?;
    let Some((next, _own)) = there else {
        return Ok(None);
    };
    let own = Pattern::new(bench.lab.setup.seed, 2).bytes(0, 4096);
    next.write(0, &own)?;
    let written = write_through(bench, region)?;
    let found = next.bytes(0, 4096)?;
    Ok(Some(written && found != own))
}

/// Writes through `region`. The written bytes occur nowhere else in the memory of the schedule.
/// Returns `true` if the write succeeds.
fn write_through(bench: &Bench, region: &Region) -> Result<bool> {
    let source = Arena::on_host(&bench.lab, M2, 1)?;
    let mut connection = rdma::connect(&bench.lab.near, &bench.hca)?;
    let done = connection
        .near
        .run(Op::Write, source.part(0, 4096)?, region.part(0, 4096)?)?;
    Ok(done.status == Status::Success)
}

/// Stops a deregistration before its put and frees the memory. The next pin then gets the address
/// of the freed page table.
fn stale_put(bench: &Bench) -> Result<()> {
    let _reuse = Parameter::set("nvidia", "table_reuse", "1")?;
    let (memory, region) = bench.registered()?;
    let (hold, deregistration) = bench.deregister_until(region, "ib_peer_mem/before_put_pages")?;
    bench.free(&memory)?;
    let mut next = bench.allocate()?;
    let live = bench.start_register(&next)?.done()??;
    hold.finish(deregistration)?;

    let pins = bench.pins()?;
    bench.check(
        pins == 1,
        "another region keeps its pin",
        "the pin of another, live region is put",
    );
    if bench.is_revocable() {
        next.free()?;
        let state = peer_region(&bench.hca, &live)?.state;
        bench.check(
            state == "revoked",
            "and is revoked when its memory is freed",
            "that region survives the end of its memory",
        );
        if reaches_next_owner(bench, &next, &live)? {
            bench.wrong("and RDMA through it overwrites the next owner's bytes");
        }
    }
    drop(live);
    bench.check_nothing_left()
}

/// Checks the result of a registration whose memory was freed meanwhile: there must be no live
/// region.
fn judge(bench: &Bench, memory: &Allocation, registered: Registered) -> Result<()> {
    match registered {
        Err(refused) => {
            let errno = refused.errno();
            ensure!(
                [libc::EINVAL, libc::EIO, libc::EFAULT].contains(&errno),
                "{refused}"
            );
            bench.saw(&format!(
                "the registration fails with {}",
                errno_name(errno)
            ));
        }
        Ok(region) if bench.is_revocable() => {
            let state = peer_region(&bench.hca, &region)?.state;
            bench.check(
                state == "revoked",
                "the region is revoked",
                "a region over freed memory is live",
            );
        }
        Ok(region) => {
            let owner = reaches_next_owner_or_none(bench, memory, &region)?.unwrap_or(false);
            bench.check(
                !owner,
                "registered; the pages are kept for it",
                "RDMA reaches the next owner of the pages",
            );
        }
    }
    Ok(())
}

/// Frees the memory of a registration that is pinned but not mapped.
fn freed_before_map(bench: &Bench) -> Result<()> {
    // Page-size field of a freed page table, after slab poisoning has overwritten the table.
    const POISON: u32 = 0x6b6b_6b6b;
    let memory = bench.allocate()?;
    let (hold, registration) = bench.register_until(&memory, "ib_peer_mem/before_dma_map")?;
    let mut free = bench.start_free(&memory)?;
    // Waits until the free has ended, or its callback waits in ib_core for the end of the
    // registration.
    if !free.ended_or_in(&["ib_invalidate_peer_memory"])? {
        bench.saw("the callback waits for the registration");
    }
    let registered = hold.finish(registration)?;
    free.done()??;
    judge(bench, &memory, registered)?;
    if !bench.logged(&format!("size_id={POISON}"))?.is_empty() {
        bench.wrong("a page table that is gone is read");
    }
    bench.check_end()
}

/// Frees the memory while nvidia.ko maps it, before nvidia.ko adds the mapping to the page table's
/// list.
fn freed_during_map(bench: &Bench) -> Result<()> {
    let memory = bench.allocate()?;
    let hold = Hold::arm("nvidia/dma_map_before_insert")?;
    let mut registration = bench.start_register(&memory)?;
    if !hold.caught(&mut registration)? {
        bench.saw("nvidia.ko's dma_map is not called");
    }
    bench.free(&memory)?;
    let registered = hold.finish(registration)?;
    judge(bench, &memory, registered)?;
    bench.check_end()
}

/// Frees the memory after acquire, before ib_core has issued a ticket.
fn freed_before_ticket(bench: &Bench) -> Result<()> {
    let memory = bench.allocate()?;
    let (hold, registration) = bench.register_until(&memory, "ib_peer_mem/before_get_pages")?;
    bench.free(&memory)?;
    let registered = hold.finish(registration)?;
    judge(bench, &memory, registered)?;
    bench.check_end()
}

/// Stops a callback in ib_core's invalidation while the region is deregistered. The module must
/// wait for the callback: it must not free memory that the callback still uses, and must not return
/// to ib_core.
fn released_beside_callback(bench: &Bench, place: &str) -> Result<()> {
    let (memory, region) = bench.registered()?;
    let hold = Hold::arm(place)?;
    let mut free = bench.start_free(&memory)?;
    let caught = hold.caught(&mut free)?;
    ensure!(caught == bench.is_revocable());
    let mut deregistration = bench.start_deregister(region)?;
    // NVIDIA's nvidia-peermem has no stack frame if it tail-calls nvidia.ko, so nvidia.ko's
    // function is also accepted.
    let ended = deregistration.ended_or_in(&["[nvidia_peermem]", "nvidia_p2p_put_pages"])?;
    if caught {
        bench.check(
            !ended,
            "the deregistration waits for the callback",
            "the deregistration ends during the callback",
        );
    } else {
        bench.saw("no callback");
    }
    hold.finish(free)??;
    deregistration.done()?;
    look_at_freed_memory()?;
    bench.check(
        bench.logged("overwritten")?.is_empty(),
        "nothing freed is written to",
        "freed memory is written to",
    );
    bench.check_end()
}

/// Tests two locks that two threads take in opposite order. A deregistration calls `put_pages` with
/// ib_core's `mapping_lock` held. A callback waits for `mapping_lock` with nvidia.ko's lock held.
fn put_under_mapping_lock(bench: &Bench) -> Result<()> {
    let (memory, region) = bench.registered()?;
    let (hold, mut deregistration) =
        bench.deregister_until(region, "ib_peer_mem/before_put_pages")?;
    let mut free = bench.start_free(&memory)?;
    let ended = free.ended_or_in(&["ib_invalidate_peer_memory"])?;
    if !ended {
        bench.saw("the callback waits for ib_core's lock");
    }
    hold.release();
    // In a deadlock, each side waits for the lock of the other side, and neither side ends.
    let deadlock = !deregistration.ended_or_in(&["nvidia_p2p_put_pages[nvidia]"])?
        && free.place().contains("ib_invalidate_peer_memory");
    if deadlock {
        let free = Fate::<()>::Stuck(free.place());
        bench.fate("the free", free);
        bench.fate(
            "the deregistration",
            Fate::<()>::Stuck(deregistration.place()),
        );
        std::mem::forget(memory);
        return Ok(());
    }
    free.done()??;
    deregistration.done()?;
    bench.check_nothing_left()
}

/// Unloads the module after a callback has dropped the last reference to the module, but before the
/// callback has returned.
fn unloaded_under_callback(bench: &Bench) -> Result<()> {
    let memory = bench.allocate()?;
    bench.orphan(&memory)?;
    if bench.pins()? == 0 {
        bench.saw("no callback");
        return Ok(());
    }
    let hold = Hold::arm("interpose/module_put_done")?;
    interpose("module_put", "1")?;
    let mut free = bench.start_free(&memory)?;
    ensure!(
        hold.caught(&mut free)?,
        "the callback does not call module_put"
    );
    interpose("module_put", "0")?;
    let references = bench.module_references()?;
    ensure!(references == 0);
    let parameters = module::parameters();
    let mut unload = Worker::start("unload", || sys::unload_module(module::NAME))?;
    let ended = unload.ended_or_in(&["nvidia_p2p_put_pages[nvidia]"])?;
    bench.check(
        !ended,
        "unloading waits for the callback to return",
        "the module is unloaded during its callback",
    );
    hold.release();
    let Some(freed) = bench.fate("the free", free.finish()?) else {
        std::mem::forget(memory);
        return Ok(());
    };
    freed?;
    unload.done()?.context("rmmod fails without a reference")?;
    module::load(&parameters)?;
    bench.check_nothing_left()
}

/// Frees the memory while the HCA's driver aborts a registration, and releases the umem with
/// ib_core's lock held.
fn driver_holds_lock(bench: &Bench) -> Result<()> {
    bench.lab.needs_mode(PinMode::Revocable)?;
    let memory = bench.allocate()?;
    let failing = Parameter::set("rdma_rxe", "peer_fail_setup", "1")?;
    let (hold, mut release) = bench.register_until(&memory, "ib_peer_mem/before_put_pages")?;
    drop(failing);
    let mut free = bench.start_free(&memory)?;
    ensure!(!free.ended_or_in(&["ib_invalidate_peer_memory"])?);
    // Whatever the result, the objects of this schedule cannot be released any more.
    bench.lose();
    std::mem::forget(memory);
    hold.release();
    // A stuck release sleeps in its put, or waits for the callback.
    if release.ended_or_in(&["api_lock", "[nvidia_peermem]"])? {
        bench.saw("the release returns");
        return Ok(());
    }
    std::thread::sleep(Duration::from_secs(1));
    let (release, free) = (release.place(), free.place());
    ensure!(
        release.contains("ib_peer_umem_release") && free.contains("ib_invalidate_peer_memory"),
        "the release is in {release:?}, the free in {free:?}"
    );
    bench.wrong("the free and the release wait for each other");
    Ok(())
}

/// Makes the HCA's driver abort a registration before it has activated the notifier. The driver
/// then stops the notifier, as with an ib_core of OFED before 25.04. Then frees the memory.
fn core_locks_twice(bench: &Bench) -> Result<()> {
    bench.lab.needs_mode(PinMode::Revocable)?;
    let memory = bench.allocate()?;
    // Up to Linux 6.12, umem.c belongs to ib_uverbs, so the parameter does too.
    let modules = ["ib_core", "ib_uverbs"];
    let mut files = modules
        .map(|name| format!("/sys/module/{name}/parameters/peer_old_stop"))
        .into_iter();
    let file = files
        .find(|file| Path::new(file).exists())
        .context("no peer_old_stop")?;
    let _old = Parameter::set_file(&file, "1")?;
    let failing = Parameter::set("rdma_rxe", "peer_fail_create", "1")?;
    let mut registration = bench.start_register(&memory)?;
    let ended = registration.ended_or_in(&["ib_umem_stop_invalidation_notifier"])?;
    drop(failing);
    if ended {
        bench.saw("the registration returns");
        return bench.check_nothing_left();
    }
    // The objects of this schedule cannot be released any more.
    bench.lose();
    let mut free = bench.start_free(&memory)?;
    std::mem::forget(memory);
    if free.ended_or_in(&["ib_invalidate_peer_memory"])? {
        bench.saw("the free returns");
    }
    std::thread::sleep(Duration::from_secs(1));
    let (registration, free) = (registration.place(), free.place());
    ensure!(
        registration.contains("ib_umem_stop_invalidation_notifier")
            && free.contains("ib_invalidate_peer_memory"),
        "the registration is in {registration:?}, the free in {free:?}"
    );
    bench.wrong("the registration waits for its own lock, and the free for the registration");
    Ok(())
}
