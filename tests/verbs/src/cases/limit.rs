// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `user_limit_mib`: limit on the GPU memory that one user may have pinned.

use std::cell::RefCell;

use anyhow::{ensure, Context, Result};

use crate::cases::input::in_child;
use crate::gpu::{Allocation, GRANULE};
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Peermem, PinMode, M2};
use crate::rdma::{Hca, Region};
use crate::sys::{KernelLog, Placement, Span};
use crate::{ktap, module, sys};

/// The limit in MiB, enough for two regions of 2 MiB.
const LIMIT_MIB: usize = 4;
const FULL: usize = LIMIT_MIB << 20;
/// ID of a user without an entry in any system file.
const OTHER: u32 = 54_321;

pub(super) const CASES: &[Case] = cases![
    "limit.refused_with_a_reason" => refused_with_a_reason,
    "limit.each_user_has_an_account" => each_user,
    "limit.charge_goes_back_to_the_owner" => goes_back,
    "limit.orphans_stay_charged" => orphans,
];

fn limited(lab: &Lab, body: impl FnOnce() -> Result<()>) -> Result<()> {
    if lab.setup.peermem != Peermem::Ours {
        return ktap::skip("this module has no limit");
    }
    module::loaded_with_also(&format!("user_limit_mib={LIMIT_MIB}"), body)
}

fn register(lab: &Lab, memory: &Allocation, offset: usize, len: usize) -> Result<Region> {
    Ok(lab.near.reg_mr(memory.span(offset, len)?)?)
}

fn over_the_limit(lab: &Lab, memory: &Allocation, offset: usize, len: usize) -> Result<()> {
    match lab.near.reg_mr(memory.span(offset, len)?) {
        Err(refused) if refused.errno() == libc::EFAULT => Ok(()),
        other => anyhow::bail!("beyond the limit: {other:?}"),
    }
}

fn refused_with_a_reason(lab: &Lab) -> Result<()> {
    limited(lab, || {
        let memory = lab.allocate_gpu(2 * FULL)?;
        let log = KernelLog::from_now()?;
        over_the_limit(lab, &memory, 0, FULL + 1)?;
        let reason = log
            .lines()?
            .into_iter()
            .find(|line| line.contains("user_limit_mib"))
            .context("no reason in the kernel log")?;
        let reason = reason
            .split_once("acquire: ")
            .map_or(&*reason, |(_, text)| text);
        note("reason", reason);
        let first = register(lab, &memory, 0, M2)?;
        // Pages that are registered twice are charged twice.
        let second = register(lab, &memory, 0, FULL - M2)?;
        over_the_limit(lab, &memory, 0, 1)?;
        drop(first);
        // The charge is for whole GPU pages of 64 KiB. A range of 2 MiB that begins inside a page
        // is charged one page more than 2 MiB.
        over_the_limit(lab, &memory, 1, M2)?;
        let third = register(lab, &memory, FULL, M2)?;
        drop((second, third));
        // A registration that fails for another reason is not charged.
        let mut freed = lab.allocate_gpu(M2)?;
        let addr = freed.mapping().addr();
        freed.free()?;
        let none = lab.near.reg_mr(Span::anywhere(addr, GRANULE)?);
        ensure!(none.is_err(), "freed memory: {none:?}");
        register(lab, &memory, 0, FULL).map(drop)
    })
}

/// Runs `body` as another user in a child, which opens the HCA itself.
fn as_another_user(lab: &Lab, body: impl FnOnce(&Hca) -> Result<()>) -> Result<()> {
    let status = in_child(lab.near.name(), |hca| {
        // Memory that the HCA locks also counts against the user's RLIMIT_MEMLOCK.
        sys::lock_any_memory()?;
        sys::become_user(OTHER)?;
        body(hca).map(|()| 0)
    });
    status.map(drop).context("as another user")
}

fn each_user(lab: &Lab) -> Result<()> {
    limited(lab, || {
        let memory = lab.allocate_gpu(FULL)?;
        let held = register(lab, &memory, 0, FULL)?;
        let gpu = lab.gpu(0)?.clone();
        as_another_user(lab, |hca| {
            let memory = gpu.allocate(2 * FULL, Placement::Any)?;
            let held = hca.reg_mr(memory.span(0, FULL)?)?;
            let beyond = hca.reg_mr(memory.span(FULL, M2)?);
            ensure!(beyond.is_err(), "beyond the other user's limit: {beyond:?}");
            drop(held);
            Ok(())
        })?;
        drop(held);
        register(lab, &memory, 0, FULL).map(drop)
    })
}

/// Deregisters in a child that runs as another user and has inherited the HCA's descriptor.
fn released_by_another_user(lab: &Lab, region: Region) -> Result<()> {
    let region = RefCell::new(Some(region));
    as_another_user(lab, |_| {
        drop(region.take());
        Ok(())
    })?;
    // The kernel has already removed the region.
    std::mem::forget(region.take());
    Ok(())
}

/// Checks that a deregistration by any process reduces the charge of the user that registered.
fn goes_back(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Persistent)?;
    limited(lab, || {
        let memory = lab.allocate_gpu(FULL)?;
        let region = register(lab, &memory, 0, FULL)?;
        released_by_another_user(lab, region)?;
        register(lab, &memory, 0, FULL).map(drop)
    })
}

/// Checks that a revocable pin that another process releases stays charged until the memory is
/// freed. nvidia.ko does not put the pin for that process.
fn orphans(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    limited(lab, || {
        let mut memory = lab.allocate_gpu(FULL)?;
        let other = lab.allocate_gpu(FULL)?;
        let region = register(lab, &memory, 0, FULL)?;
        released_by_another_user(lab, region)?;
        over_the_limit(lab, &other, 0, 1)?;
        memory.free()?;
        register(lab, &other, 0, FULL).map(drop)
    })
}
