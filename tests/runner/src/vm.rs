// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Boots a VM, runs one command in it, and reports how the command and the VM ended.
//!
//! [`Options`] has the VM's settings, [`Boot`] its kernel and modules, [`Channels`] the destination
//! of its output, and [`Outcome`] the result. [`run`] does everything, and [`run_with`] also
//! collects the output.

mod boot;
mod cpio;
mod initramfs;
mod judge;
mod machine;
mod options;
mod pair;
mod plan;
mod qemu;
mod wait;

use std::sync::{Arc, Mutex};

use anyhow::{anyhow, Context as _, Result};

pub(crate) use self::boot::{Boot, Channels, Outcome};
pub(crate) use self::options::{Build, Iommu, Named, Options, Peermem, Provider, Rdma};
use crate::paths::Paths;

/// Boots one VM or a pair, runs the command, and waits for its end. An error is a failure of this
/// machine. Any failure of the VM is part of the outcome.
pub(crate) fn run(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    channels: Channels,
) -> Result<Outcome> {
    if options.pair {
        pair::run(paths, options, boot, command, channels)
    } else {
        machine::run(paths, options, boot, command, channels, None)
    }
}

/// Boots one VM or a pair like [`run`], and runs the command without input. Calls `take` for each
/// line of output, with a flag for standard error. `take` collects the results in `state`, which is
/// returned.
pub(crate) fn run_with<T: Send + 'static>(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    state: T,
    mut take: impl FnMut(&mut T, &str, bool) + Send + 'static,
) -> Result<(Outcome, T)> {
    let state = Arc::new(Mutex::new(state));
    let sink = state.clone();
    let lines = Channels::Lines(Box::new(move |line, is_error| {
        if let Ok(mut state) = sink.lock() {
            take(&mut state, line, is_error);
        }
    }));
    let outcome = run(paths, options, boot, command, lines)?;
    let state = Arc::into_inner(state)
        .context("the machine's output is still being read")?
        .into_inner()
        .map_err(|_| anyhow!("reading the machine's output failed"))?;
    Ok((outcome, state))
}
