// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Boots a virtual machine, runs one command in it, and tells how both fared.
//!
//! [`Options`] says how the machine is to be, [`Boot`] what it boots, [`Channels`] where output goes, and [`Outcome`] how the
//! run ended. [`run`] does all of it, and [`run_with`] gathers the output.

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
pub(crate) use self::options::{Build, Iommu, Options, Peermem, Provider, Rdma};
pub(crate) use crate::command::system_path;
pub(crate) use crate::guest::SYSTEM_PROGRAMS;
use crate::paths::Paths;

/// Boots, runs, waits: one machine, or a pair. An error is one of the host's; whatever the machine does is an outcome.
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

/// As [`run`], with no input. `take` is given each line of output, and whether it is one of standard error; what it makes
/// of them in `state` is returned.
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
