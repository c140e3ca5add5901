// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Registrations under special conditions of the machine: forced bounce buffers, a GPU that is
//! unbound from its driver, and suspend.

use std::fs;
use std::path::Path;

use anyhow::{ensure, Context as _, Result};

use crate::cases::dma;
use crate::cases::reasons::{of_gpu_memory, one, Expected};
use crate::cases::stage::Stage;
use crate::child::Process;
use crate::hold::Worker;
use crate::knobs::{rebind, Parameter};
use crate::ktap::{cases, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::pattern::Pattern;
use crate::{counters, ktap, sys};

pub(super) const CASES: &[Case] = cases![
    "machine.bounce_buffers_forced" => bounce_buffers_forced,
    "machine.gpu_taken_while_registered" => gpu_taken_while_registered,
    "machine.suspended_in_traffic" => suspended_in_traffic,
];

/// Checks that with forced bounce buffers, registrations are refused with a reason and leave
/// nothing behind. The kernel then maps no BAR (`dma_direct_map_phys()`).
fn bounce_buffers_forced(lab: &Lab) -> Result<()> {
    let parameters = sys::read_line("/proc/cmdline")?;
    if !parameters.split(' ').any(|word| word == "swiotlb=force") {
        return ktap::skip("bounce buffers are not forced");
    }
    let expected = match lab.setup.mode() {
        // If the module cannot map, it asks nvidia.ko to map.
        PinMode::Persistent => Expected::dma_map("map_failed", -libc::EIO, libc::EIO),
        PinMode::Revocable => Expected::dma_map("map_resource", 0, libc::EINVAL),
    };
    one(lab, expected, of_gpu_memory)?;
    counters::pins_are(0)
}

/// Unbinds a GPU under a persistent pin. nvidia.ko counts the pin as a use of the GPU, so the
/// unbind waits for the end of the use, and `nvidia-smi --gpu-reset` is refused. During the wait,
/// transfers still reach the memory.
fn gpu_taken_while_registered(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Persistent)?;
    let stage = Stage::open(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let bytes = Pattern::new(lab.setup.seed, 1).bytes(0, M2);
    memory.write(0, &bytes)?;
    let region = stage.register(&memory)?;
    let bdf = lab.gpu(0)?.bdf().to_owned();
    let mut taking = Worker::start("unbind", move || rebind(&bdf))?;
    let is_taken = taking.ended_or_in(&["remove[nvidia]"])?;
    ensure!(
        !is_taken,
        "the GPU was unbound while a registration was alive"
    );
    dma::arrives(&stage.hca, &region, &lab.near, &bytes)?;
    drop(region);
    taking.done()?
}

/// Suspends the machine while processes register and transfer. The suspend freezes these processes.
/// After the suspend, no process may get an error or a wrong byte.
///
/// The suspend ends once all processes are frozen, because the devices of the test VM would not
/// survive a full suspend.
fn suspended_in_traffic(lab: &Lab) -> Result<()> {
    const LEVEL: &str = "/sys/power/pm_test";
    lab.needs_module()?;
    if !Path::new(LEVEL).exists() {
        return ktap::skip("this kernel cannot be suspended");
    }
    let _seconds = Parameter::set("suspend", "pm_test_delay", "1")?;
    let mut children = (0..3)
        .map(|index| Process::start(&lab.setup, lab.setup.seed + index, &["exercise", "12"]))
        .collect::<Result<Vec<_>>>()?;
    children.iter_mut().for_each(Process::go);
    fs::write(LEVEL, "freezer").context(LEVEL)?;
    let frozen = (0..3).try_for_each(|_| fs::write("/sys/power/state", "freeze"));
    fs::write(LEVEL, "none").context(LEVEL)?;
    frozen.context("the machine cannot be suspended")?;
    for child in children {
        child.join()?;
    }
    Ok(())
}
