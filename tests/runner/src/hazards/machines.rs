// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The VMs that run the schedules of the hazards.

use std::sync::LazyLock;

use anyhow::{Error, Result};
use clap::ValueEnum as _;

use crate::vm::{Options, Peermem};

/// Time limit of a VM, in seconds. A VM that crashes does so in a small fraction of this time.
const HANGS: u64 = 180;

/// A VM and the schedules that run in it, in order. A schedule that kills the VM comes last.
pub(super) struct Machine {
    pub(super) module: Peermem,
    /// The mode, or another difference from the other VMs of the same module.
    pub(super) name: &'static str,
    options: &'static str,
    pub(super) schedules: Vec<&'static str>,
}

/// Peer-memory module, name, options and schedules of each VM.
const TABLE: &str = "\
nvidia | revocable | | B. C. D.freed_before E. J. K. L. M. N. P.put two G. H.
nvidia | revocable | | D.freed_during
nvidia | revocable, on the stand-in's p2p.c | --provider ours | P.strange
nvidia | revocable | | A.
nvidia | revocable | | O. I.
nvidia | revocable | | driver_holds_lock
nvidia | revocable | | core_locks_twice
nvidia | revocable, peerdirect_support=1 | --param peerdirect_support=1 | F.
nvidia | persistent | --rxe-param peer_inval=0 | A. J. K. L. M. N. P.put two G. H.
nvidia | persistent, on the stand-in's p2p.c | --rxe-param peer_inval=0 --provider ours | P.strange
ours | persistent | | A. B. C. D. E. G. H. I. J. K. L. M. N. O. P.put two
ours | persistent, on the stand-in's p2p.c | --provider ours | P.strange
ours | revocable | --param persistent_api_support=0 | A. B. C. D. E. G. H. I. J. K. L. M. N. O. P.put two
ours | revocable | --param persistent_api_support=0 | driver_holds_lock
ours | revocable | --param persistent_api_support=0 | core_locks_twice
ours | revocable, on the stand-in's p2p.c | --param persistent_api_support=0 --provider ours | P.strange
ours | revocable, peerdirect_support=1 | --param persistent_api_support=0 --param peerdirect_support=1 | F.
";

pub(super) static MACHINES: LazyLock<Vec<Machine>> =
    LazyLock::new(|| TABLE.lines().filter_map(Machine::parse).collect());

impl Machine {
    fn parse(line: &'static str) -> Option<Self> {
        let mut columns = line.split('|').map(str::trim);
        Some(Self {
            module: Peermem::from_str(columns.next()?, false).ok()?,
            name: columns.next()?,
            options: columns.next()?,
            schedules: columns.next()?.split(' ').collect(),
        })
    }

    /// Returns `true` if the only schedule takes a lock in freed memory. The contents of the freed
    /// memory decide whether the access faults or the wait never ends. An oops therefore stops the
    /// VM, a timeout after [`HANGS`] does not fail the run, and the page only reports the VM's
    /// death.
    pub(super) fn is_fatal(&self) -> bool {
        self.schedules == ["D.freed_during"]
    }

    /// Returns the options of the VM. The allocator fills freed memory with a pattern, and checks
    /// the pattern.
    pub(super) fn options(&self, kernel: &str) -> Result<Options> {
        let fatal = match self.is_fatal() {
            true => format!("--append oops=panic --timeout {HANGS}"),
            false => "--timeout 1200".to_owned(),
        };
        let words = format!(
            "runner --kernel {kernel} --gpus 1 --interpose --append slub_debug=FP,kmalloc-* {fatal} {}",
            self.options
        );
        let mut options = Options::parse(words.split_whitespace()).map_err(Error::new)?;
        options.peermem = self.module;
        Ok(options)
    }
}
