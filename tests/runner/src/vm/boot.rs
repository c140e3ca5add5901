// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A machine's kernel and modules before it starts, and its outcome afterwards.

use std::path::PathBuf;
use std::time::Duration;

use crate::arch::Arch;
use crate::index::Index;
use crate::kernel::Signing;

/// Exit statuses of the runner's own, as `timeout(1)` and `xargs(1)` have them.
pub(crate) const TIMED_OUT: i32 = 124;

pub(crate) const RUN_FAILED: i32 = 125;

/// Takes a line of output and whether it is one of standard error.
pub(crate) type LineSink = Box<dyn FnMut(&str, bool) + Send>;

/// Where a command's input comes from and its output goes to.
pub(crate) enum Channels {
    /// To the caller's own.
    Caller,
    /// No input; each line of output to this.
    Lines(LineSink),
}

/// How a run ended.
pub(crate) struct Outcome {
    /// The command's own status, if it came to have one.
    pub(crate) status: Option<i32>,
    /// Why the run failed whatever the command says: time-out, a dead machine, a report in the log.
    pub(crate) failures: Vec<String>,
    pub(crate) timed_out: bool,
    pub(crate) log: PathBuf,
    pub(crate) elapsed: Duration,
}

impl Outcome {
    /// The status that a program which ran this machine exits with.
    pub(crate) fn exit_code(&self) -> i32 {
        match self.status {
            _ if self.timed_out => TIMED_OUT,
            Some(status) if self.failures.is_empty() => status,
            _ => RUN_FAILED,
        }
    }
}

/// What a machine boots and what it finds its modules in.
pub(crate) struct Boot {
    pub(crate) arch: Arch,
    /// Its root, where its options name none: the host's own, if the host's programs run on it.
    pub(crate) root: PathBuf,
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// Modules by name; what was put in first wins.
    pub(crate) modules: Index,
    /// Version of the peer-memory module, for the command's environment.
    pub(crate) peermem_version: String,
    /// NVIDIA's module, to be had in the machine though not loaded.
    pub(crate) control: Option<PathBuf>,
    /// Neighbours of other kinds, each in a folder of the name that it has here.
    pub(crate) drivers: Vec<(&'static str, PathBuf)>,
    /// All modules are to be signed with this; and our module as it is without.
    pub(crate) signing: Option<(Signing, PathBuf)>,
    /// The kernel's detectors, each of which must show that it lives.
    pub(crate) detectors: bool,
    /// One of Debian's own images.
    pub(crate) is_stock: bool,
    /// The root is a whole host, which loads its modules itself; here are only those that its file systems need.
    pub(crate) host: bool,
}
