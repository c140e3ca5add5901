// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What it costs to register memory and to deregister it: functions, kernel memory, and what the HCA gets.

use std::time::Instant;

use anyhow::{ensure, Result};
use peermem_figures::{Hca, Line, Memory, Registration, Table, What};

use super::pgsz::Form;
use super::probe::{Mapped, Reading, Watch};
use super::{nanoseconds, pgsz, probe, say};
use crate::cases::register::{allocate_aligned, peer_region};
use crate::counters::Counters;
use crate::gpu::GRANULE;
use crate::knobs::Parameter;
use crate::lab::Lab;
use crate::rdma::full_access;
use crate::sys::Span;

/// Registrations of more than this are measured once, and not tried before.
const MANY: u64 = 1 << 30;

/// Measures registrations of `bytes` that lie as `layout` says, and prints.
pub(super) fn measure(lab: &Lab, layout: &str, bytes: u64, repeats: u32) -> Result<()> {
    let _layout = Parameter::set("nvidia", "layout", layout)?;
    let memory = allocate_aligned(lab, bytes, bytes.next_power_of_two().max(GRANULE))?;
    let span = memory.span(0, usize::try_from(bytes)?)?;
    let what = What {
        layout: layout.to_owned(),
        bytes,
    };
    let repeats = if bytes > MANY { 1 } else { repeats };
    if bytes <= MANY {
        // The allocators have what it takes, then.
        drop(lab.near.register(span, full_access())?);
    }
    for _ in 0..repeats {
        say(&Line::Registration(registration(lab, span, what.clone())?))?;
    }
    let (memory, table) = memory_and_table(lab, span, what)?;
    say(&Line::Memory(memory))?;
    say(&Line::Table(table))
}

fn registration(lab: &Lab, span: Span, what: What) -> Result<Registration> {
    let before = Counters::read()?;
    probe::reset()?;
    let begin = Instant::now();
    let region = lab.near.register(span, full_access())?;
    let reg_mr = begin.elapsed();
    let register = Reading::take()?.costs()?;
    let entries = peer_region(&lab.near, &region)?.entries;
    probe::reset()?;
    let begin = Instant::now();
    drop(region);
    let dereg_mr = begin.elapsed();
    let deregister = Reading::take()?.costs()?;
    let activity = Counters::read()?.activity(&before)?;
    Ok(Registration {
        what,
        register,
        deregister,
        pins: activity.pins,
        unpins: activity.unpins,
        maps: activity.maps,
        unmaps: activity.unmaps,
        entries,
        reg_mr_ns: nanoseconds(reg_mr)?,
        dereg_mr_ns: nanoseconds(dereg_mr)?,
    })
}

/// By a registration that is watched, and so not timed.
fn memory_and_table(lab: &Lab, span: Span, what: What) -> Result<(Memory, Table)> {
    probe::take_tables(true)?;
    let watch = Watch::begin()?;
    let region = lab.near.register(span, full_access())?;
    let registered = watch.read()?;
    drop(region);
    let left = watch.read()?.held;
    drop(watch);
    let mapped = Mapped::take()?;
    probe::take_tables(false)?;
    ensure!(
        left == 0,
        "{left} bytes are held after the deregistration: not all that is freed is seen"
    );
    ensure!(
        (mapped.address, mapped.len) == (span.addr(), span.len()),
        "the table is another registration's"
    );
    let memory = Memory {
        what: what.clone(),
        held: registered.held,
        peak: registered.peak,
    };
    Ok((memory, table_of(&mapped, what)?))
}

fn table_of(mapped: &Mapped, what: What) -> Result<Table> {
    let best = |form| {
        pgsz::best(
            form,
            &mapped.entries,
            mapped.address,
            mapped.address,
            mapped.len,
            pgsz::OFFERED,
        )
        .unwrap_or(0)
    };
    let (old_page, new_page) = (best(Form::Old), best(Form::New));
    ensure!(
        new_page == mapped.kernel_page,
        "a page of {new_page:#x} bytes here, and of {:#x} by the kernel's own function",
        mapped.kernel_page
    );
    let pages = |page| match page {
        0 => 0,
        _ => pgsz::pages(mapped.address, mapped.len, page).unwrap_or(0),
    };
    let hca = Hca {
        entries: u64::try_from(mapped.entries.len())?,
        old_page,
        old_pages: pages(old_page),
        new_page,
        new_pages: pages(new_page),
    };
    Ok(Table { what, hca })
}
