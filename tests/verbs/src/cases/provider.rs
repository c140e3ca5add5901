// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Failing calls to nvidia.ko: the module must return an error and leave nothing behind. NVIDIA's
//! nvidia-peermem checks few of these errors, and loses the pin if an unpin fails. `input` tests
//! wrong results of nvidia.ko, and `sweep` makes each call fail in turn.

use anyhow::{ensure, Context, Result};

use crate::cases::register::refused;
use crate::counters::Counters;
use crate::gpu::Allocation;
use crate::knobs::{
    fail_next, has_nvidias_upper_half, lose_next_put, provoke_failing_put, rebind, Parameter,
};
use crate::ktap::{cases, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::pattern::Pattern;
use crate::{counters, ktap, module, module_files};

pub(super) const CASES: &[Case] = cases![
    "provider.unpin_out_of_memory" => unpin_out_of_memory,
    "provider.failing_calls" => failing_calls,
    "bar1.given_to_others" => given_to_others,
];

/// Checks that one registration fails with one of `errnos`.
fn refused_once(lab: &Lab, errnos: &[i32]) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    refused(lab, memory.span(0, M2)?, errnos)
}

fn works_again(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    lab.near.reg_mr(memory.span(0, M2)?)?;
    Ok(())
}

fn unpin_out_of_memory(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    if lab.setup.mode() == PinMode::Revocable {
        unpinned_again(lab)?;
    }
    unpinned_once(lab)
}

/// Checks that the module repeats a revocable put that fails with -ENOMEM, because the failed put
/// has done nothing.
fn unpinned_again(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    let region = lab.near.reg_mr(memory.span(0, M2)?)?;
    provoke_failing_put()?;
    fail_next("put_pages", libc::ENOMEM)?;
    drop(region);
    counters::pins_are(0)
}

/// Checks that the module does not repeat a persistent put that fails with -ENOMEM. The failed put
/// has lost the pin, and has decremented the GPU's usage count. A second put would decrement the
/// count again, at the expense of another registration.
fn unpinned_once(lab: &Lab) -> Result<()> {
    let mine = lab.allocate_gpu(M2)?;
    let other = lab.allocate_gpu(M2)?;
    let register = |memory: &Allocation| -> Result<_> { Ok(lab.near.reg_mr(memory.span(0, M2)?)?) };
    let (region, beside) = {
        let _cannot_lose = Parameter::set("rdma_rxe", "peer_inval", "N")?;
        (register(&mine)?, register(&other)?)
    };
    let before = Counters::read()?;
    let lost = || module_files::event("leaked");
    let lost_before = lost()?;
    lose_next_put(libc::ENOMEM)?;
    drop(region);
    let after = Counters::read()?;
    let puts = after.since(&before, "put_pages_persistent")?;
    let uses = after.get("device_refs")?;
    ktap::note("uses_left", uses);
    ensure!(
        puts == 1 && uses == 1,
        "{puts} puts, and a usage count of {uses} for the GPU, instead of 1 and 1"
    );
    let lost = lost()?.saturating_sub(lost_before);
    ensure!(lost == 1, "{lost} pins were counted as lost");
    drop((beside, mine, other));
    rebind(lab.gpu(0)?.bdf())
}

fn failing_calls(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    lab.needs_mode(PinMode::Persistent)?;
    // `dup_object` exists only in the stand-in with NVIDIA's upper half.
    let duplicated = has_nvidias_upper_half().then_some(("dup_object", libc::EIO, libc::EFAULT));
    for (place, errno, seen) in duplicated.into_iter().chain([
        ("get_pages_persistent", libc::EIO, libc::EFAULT),
        ("get_pages_persistent", libc::ENOMEM, libc::EFAULT),
    ]) {
        fails(lab, place, errno, seen)?;
    }
    module::loaded_with_also(module::PROVIDER_MAPS, || {
        for (place, errno) in [
            ("dma_map", libc::EIO),
            ("dma_map", libc::ENOMEM),
            ("dma_map_page", libc::EIO),
        ] {
            fails(lab, place, errno, errno)?;
        }
        Ok(())
    })
}

/// Makes one call at `place` fail with `errno`. The application must see `seen`, and the next
/// registration must work.
fn fails(lab: &Lab, place: &str, errno: i32, seen: i32) -> Result<()> {
    fail_next(place, errno)?;
    refused_once(lab, &[seen]).with_context(|| format!("{place} fails with {errno}"))?;
    works_again(lab)
}

/// Checks the bytes of two allocations that use the same range of BAR1 in turn. An unpinned
/// allocation keeps its bytes but leaves its range to the next pin. If a module unpins too early,
/// transfers reach another owner's bytes.
fn given_to_others(lab: &Lab) -> Result<()> {
    if !has_nvidias_upper_half() {
        return ktap::skip("memory never changes its place in the BAR here");
    }
    lab.needs_module()?;
    let allocate = |salt| -> Result<_> {
        let memory = lab.allocate_gpu(M2)?;
        let bytes = Pattern::new(lab.setup.seed, salt).bytes(0, M2);
        memory.write(0, &bytes)?;
        Ok((memory, bytes))
    };
    let holds = |memory: &Allocation, bytes: &[u8]| -> Result<()> {
        ensure!(
            memory.bytes(0, M2)? == bytes,
            "the CPU's mapping has other bytes"
        );
        let found = memory.bar_view()?.bytes(0, M2)?;
        ensure!(found == bytes, "the BAR shows other bytes");
        Ok(())
    };
    let (one, ones) = allocate(1)?;
    let (other, others) = allocate(2)?;
    let before = one.bar_address();

    let region = lab.near.reg_mr(one.span(0, M2)?)?;
    let place = one.bar_address();
    ensure!(place != before, "the pin did not move the memory");
    holds(&one, &ones)?;
    drop(region);

    let _region = lab.near.reg_mr(other.span(0, M2)?)?;
    ensure!(other.bar_address() == place);
    holds(&other, &others)?;
    holds(&one, &ones)?;
    ensure!(
        one.bar_address() != place,
        "both allocations have the same place"
    );

    let _again = lab.near.reg_mr(one.span(0, M2)?)?;
    holds(&one, &ones)?;
    holds(&other, &others)
}
