// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Memory that is freed under a live region in persistent mode. The pages of the memory stay until
//! the deregistration.

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::counters::Counters;
use crate::gpu::GRANULE;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::pattern::Pattern;
use crate::rdma::Op;
use crate::sys::Placement;
use crate::{counters, rdma, sys};

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
        let region = lab.far.reg_mr(memory.span(0, M2)?)?;
        let view = memory.bar_view()?;
        let before = Counters::read()?;
        if by_ioctl {
            memory.free()?;
        }
        drop(memory);
        counters::callbacks_are(&before, 0)?;
        counters::pins_are(1)?;
        ensure!(Counters::read()?.get("device_refs")? == 1);

        let mut connection = rdma::connect(&lab.near, &lab.far)?;
        connection.transfer(Op::Write, local.part(0, M2)?, region.part(0, M2 as u64)?)?;
        ensure!(
            view.bytes(0, M2)? == local.expected(0, M2)?,
            "the pages have other bytes"
        );
        drop(region);
        counters::pins_are(0).context("after deregistration")?;
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
    let first_region = lab.far.reg_mr(first.span(0, M2)?)?;
    let (first_place, first_view) = (first.bar_address(), first.bar_view()?);
    drop(first);
    let second = gpu.allocate(M2, Placement::At(addr))?;
    note("old_page", format_args!("{first_place:#x}"));
    note("new_page", format_args!("{:#x}", second.bar_address()));
    ensure!(second.bar_address() != first_place);
    let kept = Pattern::new(lab.setup.seed, 2).bytes(0, M2);
    second.write(0, &kept)?;

    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let (from, to) = (local.part(0, 65537)?, first_region.part(4097, 65537)?);
    connection.transfer(Op::Write, from, to)?;
    ensure!(second.bytes(0, M2)? == kept, "the new allocation changed");
    let old = local.expected(0, 65537)?;
    ensure!(
        first_view.bytes(4097, 65537)? == old,
        "the WRITE did not reach the old pages"
    );

    // Registers the same addresses while their old region is still live.
    let second_region = lab.far.reg_mr(second.span(0, M2)?)?;
    let (from, to) = (local.part(1, 4096)?, second_region.part(0, 4096)?);
    connection.transfer(Op::Write, from, to)?;
    let found = second.bytes(0, M2)?;
    ensure!(
        found[..4096] == *local.expected(1, 4096)?,
        "the WRITE did not reach the new pages"
    );
    ensure!(
        found[4096..] == kept[4096..],
        "the bytes after the written ones changed"
    );
    ensure!(first_view.bytes(4097, 65537)? == old, "old pages changed");
    Ok(())
}
