// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Calls of the provider's that fail: an error, never a guess, and nothing left behind. NVIDIA's module checks little of
//! this, and loses the pin where an unpin fails. What the provider can return wrongly is among the bad input (`input`), and
//! a failure of each call in turn among the sweeps (`sweep`).

use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;

use crate::cases::register::refused;
use crate::counters::Counters;
use crate::gpu::GRANULE;
use crate::knobs::fail_next;
use crate::ktap;
use crate::ktap::Case;
use crate::lab::Flavour;
use crate::lab::Lab;
use crate::rdma::full_access;

const M2: usize = GRANULE as usize;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "provider.unpin_out_of_memory",
        run: unpin_out_of_memory,
    },
    Case {
        name: "provider.failing_calls",
        run: failing_calls,
    },
];

/// `register()` fails with one of `errnos`, and works again afterwards.
fn refused_once(lab: &Lab, errnos: &[i32]) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    refused(lab, memory.span(0, M2)?, errnos)
}

fn works_again(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    lab.near.register(memory.span(0, M2)?, full_access())?;
    Ok(())
}

/// A put that fails with -ENOMEM has done nothing: it is made again.
fn unpin_out_of_memory(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    let place = match lab.setup.flavour() {
        Flavour::Persistent => "put_pages_persistent",
        Flavour::Revocable => "put_pages",
    };
    let memory = lab.allocate_gpu(M2)?;
    let region = lab.near.register(memory.span(0, M2)?, full_access())?;
    fail_next(place, libc::ENOMEM)?;
    drop(region);
    let live = Counters::read()?.live_pins()?;
    ktap::note("pins_left", live);
    ensure!(live == 0, "{live} pins are left");
    Ok(())
}

fn failing_calls(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    lab.needs_flavour(Flavour::Persistent)?;
    for (place, errno, seen) in [
        ("get_pages_persistent", libc::EIO, libc::EFAULT),
        ("get_pages_persistent", libc::ENOMEM, libc::EFAULT),
        ("dma_map", libc::EIO, libc::EIO),
        ("dma_map", libc::ENOMEM, libc::ENOMEM),
        ("dma_map_page", libc::EIO, libc::EIO),
    ] {
        fail_next(place, errno)?;
        refused_once(lab, &[seen]).with_context(|| format!("{place} fails with {errno}"))?;
        works_again(lab)?;
    }
    Ok(())
}
