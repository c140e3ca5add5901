// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Memory that is freed under a live region when nobody revokes. The pages of the memory stay until
//! the deregistration.

use anyhow::{ensure, Result};

use crate::arena::Arena;
use crate::counters::Counters;
use crate::gpu::GRANULE;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode};
use crate::pattern::Pattern;
use crate::rdma::{full_access, Op};
use crate::sys::Placement;
use crate::{rdma, sys};

const M2: usize = GRANULE as usize;

pub(super) const CASES: &[Case] = cases![
    "persist.pages_outlive_the_free" => outlive,
    "persist.reused_addresses_are_other_pages" => reused,
];

/// Checks that traffic continues into pages that have no virtual addresses any more, and that the
/// deregistration frees the pages.
fn outlive(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Persistent)?;
    let local = Arena::on_host(lab, M2, 1)?;
    for by_ioctl in [true, false] {
        let mut memory = lab.allocate_gpu(M2)?;
        let region = lab.far.register(memory.span(0, M2)?, full_access())?;
        let view = memory.bar_view()?;
        let before = Counters::read()?;
        if by_ioctl {
            memory.free()?;
        }
        drop(memory);
        let after = Counters::read()?;
        let callbacks = after.activity(&before)?.callbacks;
        let live = after.live_pins()?;
        note("callbacks", callbacks);
        note("pins_persistent_live", live);
        ensure!(callbacks == 0, "{callbacks} callbacks");
        ensure!(live == 1, "{live} pins are live under one region");
        ensure!(
            after.get("device_refs")? == 1,
            "the region holds no reference on the GPU"
        );

        let mut connection = rdma::connect(&lab.near, &lab.far)?;
        connection
            .near
            .transfer(Op::Write, local.part(0, M2)?, region.part(0, M2 as u64)?)?;
        let mut found = vec![0; M2];
        view.read(0, &mut found)?;
        ensure!(
            found == local.expected(0, M2)?,
            "the bytes behind the BAR are not those that were written"
        );
        drop(region);
        let live = Counters::read()?.live_pins()?;
        ensure!(live == 0, "{live} pins are live after deregistration");
    }
    Ok(())
}

/// Checks that a new allocation at the old addresses gets other pages, which the old region does
/// not reach.
fn reused(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Persistent)?;
    let local = Arena::on_host(lab, M2, 1)?;
    let gpu = lab.gpu(0)?;
    let addr = sys::free_address(GRANULE, GRANULE)?;

    let first = gpu.allocate(M2, Placement::At(addr))?;
    let first_region = lab.far.register(first.span(0, M2)?, full_access())?;
    let (first_place, first_view) = (first.bar_address(), first.bar_view()?);
    drop(first);
    let second = gpu.allocate(M2, Placement::At(addr))?;
    note("old_page", format_args!("{first_place:#x}"));
    note("new_page", format_args!("{:#x}", second.bar_address()));
    ensure!(
        second.bar_address() != first_place,
        "pages that are pinned were handed out again"
    );
    let kept = Pattern::new(lab.setup.seed, 2).bytes(0, M2);
    second.write(0, &kept)?;

    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    connection.near.transfer(
        Op::Write,
        local.part(0, 65537)?,
        first_region.part(4097, 65537)?,
    )?;
    let mut found = vec![0; M2];
    second.read(0, &mut found)?;
    ensure!(found == kept, "the old region wrote to the new allocation");
    let mut old = vec![0; 65537];
    first_view.read(4097, &mut old)?;
    ensure!(
        old == local.expected(0, 65537)?,
        "the old region lost its bytes"
    );

    // Both regions over the same addresses live at the same time.
    let second_region = lab.far.register(second.span(0, M2)?, full_access())?;
    connection.near.transfer(
        Op::Write,
        local.part(1, 4096)?,
        second_region.part(0, 4096)?,
    )?;
    second.read(0, &mut found)?;
    ensure!(
        found[..4096] == *local.expected(1, 4096)?,
        "the new region's bytes"
    );
    ensure!(
        found[4096..] == kept[4096..],
        "bytes behind the new region's write"
    );
    first_view.read(4097, &mut old)?;
    ensure!(
        old == local.expected(0, 65537)?,
        "the new region wrote to the old pages"
    );
    Ok(())
}
