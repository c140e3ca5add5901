// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A VM's kernel and modules before it starts, and its outcome afterwards.

use std::path::PathBuf;
use std::time::Duration;

use crate::arch::Arch;
use crate::index::Index;
use crate::kernel::Signing;

/// Exit statuses of the runner itself, as in `timeout(1)` and `xargs(1)`.
pub(crate) const TIMED_OUT: i32 = 124;

pub(crate) const RUN_FAILED: i32 = 125;

/// Function that gets a line of output, and `true` if the line is from standard error.
pub(crate) type LineSink = Box<dyn FnMut(&str, bool) + Send>;

/// Source of a command's input, and destination of its output.
pub(crate) enum Channels {
    /// The caller's own input and output.
    Caller,
    /// No input. Each line of output goes to this function.
    Lines(LineSink),
}

pub(crate) struct Outcome {
    /// Exit status of the command, if it ended.
    pub(crate) status: Option<i32>,
    /// Reasons why the run failed independently of the command: a timeout, a dead VM, a report in
    /// the log.
    pub(crate) failures: Vec<String>,
    pub(crate) timed_out: bool,
    pub(crate) log: PathBuf,
    pub(crate) elapsed: Duration,
}

impl Outcome {
    /// Returns the exit status for a program that ran this VM.
    pub(crate) fn exit_code(&self) -> i32 {
        match self.status {
            _ if self.timed_out => TIMED_OUT,
            Some(status) if self.failures.is_empty() => status,
            _ => RUN_FAILED,
        }
    }
}

#[derive(Default)]
pub(crate) struct Boot {
    pub(crate) arch: Arch,
    /// Root of the VM, unless its options name one. The default is this machine's own root, if the
    /// VM can run this machine's programs.
    pub(crate) root: PathBuf,
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// Modules that the VM can load, by name.
    pub(crate) modules: Index,
    /// Version of the peer-memory module, for the command's environment.
    pub(crate) peermem_version: String,
    /// NVIDIA's module, available in the VM but not loaded.
    pub(crate) control: Option<PathBuf>,
    /// Further modules that a test loads (drivers, mutants), each in a folder of this name.
    pub(crate) drivers: Vec<(&'static str, PathBuf)>,
    /// Key that signs all modules, and the path of our unsigned module.
    pub(crate) signing: Option<(Signing, PathBuf)>,
    /// `true` if the kernel has detectors, which must show that they work.
    pub(crate) detectors: bool,
    /// `true` if the kernel is one of Debian's own images.
    pub(crate) is_stock: bool,
    /// `true` if the root is a complete host, which loads its modules itself. `modules` then has
    /// only the modules for the host's file systems.
    pub(crate) host: bool,
    /// Libraries that the command and its children preload.
    pub(crate) preloaded: Vec<PathBuf>,
}
