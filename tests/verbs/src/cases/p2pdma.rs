// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPUs whose BAR nvidia-uvm has made peer-to-peer DMA memory, as GPUDirect Storage needs on x86.
//! All of the BAR has struct pages. Registrations work as on any other BAR, even if nvidia-uvm
//! removes the struct pages meanwhile.

use std::collections::BTreeMap;

use anyhow::{ensure, Result};

use crate::cases::registrations::{gpus_of_the_machine, only};
use crate::cases::stage::Stage;
use crate::cases::{dma, reasons};
use crate::counters::{Activity, Counters};
use crate::gpu::{Allocation, Freer};
use crate::knobs::Parameter;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::module_files::{get, has};
use crate::pattern::Pattern;
use crate::rdma::Region;
use crate::{counters, ktap, module_files};

pub(super) const CASES: &[Case] = cases![
    "p2pdma.mapped_by_the_module" => mapped,
    "p2pdma.pagemap_vanishes" => vanishes,
];

fn needs_p2pdma(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    match counters::module_parameter("nvidia", "p2pdma").as_deref() {
        Some("Y") => lab.needs_ours(),
        _ => ktap::skip("no BAR here has struct pages"),
    }
}

/// Checks that the client of the current mode registers the memory, that the module maps the
/// memory, and that the registration names the GPU.
fn mapped(lab: &Lab) -> Result<()> {
    needs_p2pdma(lab)?;
    reasons::begin(lab)?;
    // The module was reloaded, so its first registrations must be made again.
    lab.first_registrations()?;
    let memory = lab.allocate_gpu(M2)?;
    let before = Counters::read()?;
    let region = lab.near.reg_mr(memory.span(0, M2)?)?;
    let activity = Counters::read()?.activity(&before)?;
    note("pins", activity.pins);
    note("mappings_of_the_provider", activity.maps);
    let expected = Activity {
        pins: 1,
        attempts: 1,
        ..Activity::default()
    };
    ensure!(activity == expected, "{activity:?}, not {expected:?}");
    module_files::counted(&BTreeMap::new())?;
    let line = only()?;
    let mode = lab.setup.mode();
    has(&line, &format!("mode={mode} state=mapped"))?;
    let (gpu, gpus) = (get(&line, "gpus")?, gpus_of_the_machine()?);
    ensure!(gpus.contains(gpu), "GPU {gpu} is not one of {gpus:?}");

    lab.gpu(0)?.free(memory.mapping().addr(), Freer::Caller)?;
    counters::callbacks_are(&before, u64::from(mode == PinMode::Revocable))?;
    drop(region);
    counters::pins_are(0)
}

/// Checks that new bytes of `memory` arrive in host memory.
fn moves(lab: &Lab, stage: &Stage, memory: &Allocation, region: &Region, seed: u64) -> Result<()> {
    let bytes = Pattern::new(lab.setup.seed, seed).bytes(0, M2);
    memory.write(0, &bytes)?;
    dma::arrives(&stage.hca, region, &lab.near, &bytes)
}

/// Removes the struct pages between pin and map, restores them, and removes them again under the
/// registration. A removal waits for every reference to the pagemap, so the module must hold no
/// reference.
fn vanishes(lab: &Lab) -> Result<()> {
    needs_p2pdma(lab)?;
    let stage = Stage::open(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let (hold, registration) = stage.register_until(&memory, "ib_peer_mem/before_dma_map")?;
    let gone = Parameter::set("nvidia", "p2pdma", "N")?;
    let region = hold.finish(registration)??;
    moves(lab, &stage, &memory, &region, 1)?;
    drop(gone);
    moves(lab, &stage, &memory, &region, 2)?;
    let gone = Parameter::set("nvidia", "p2pdma", "N")?;
    moves(lab, &stage, &memory, &region, 3)?;
    drop(region);
    drop(gone);
    counters::pins_are(0)
}
