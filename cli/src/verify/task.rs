// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The processes that `verify` starts: itself again, by exec, for a CUDA context does not survive a fork. A worker goes
//! through the steps for one pair and writes each as a line of JSON; a holder holds a registration until it is killed.
//! A process that hangs or dies is then a result of the program, not its end.
//!
//! Here is what they are told and how they are started; what they do is in [`super::worker`].

use std::io;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{ensure, Context as _, Result};
use serde::{Deserialize, Serialize};

use super::event::Way;
use crate::args;

/// Who gives GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    Cuda,
    /// The stand-in of the project's test VM.
    StandIn,
}

/// A GPU that memory can be had of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Its PCI address.
    pub(crate) pci: String,
    pub(crate) name: String,
    pub(crate) source: Source,
}

/// What a worker or a holder is told, in one argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    /// A PCI address.
    pub(crate) gpu: String,
    pub(crate) source: Source,
    /// The RDMA device; none: what needs none, alone.
    pub(crate) hca: Option<String>,
    /// Its port, from 1 on.
    pub(crate) port: u8,
    /// Bytes of each buffer.
    pub(crate) size: usize,
    /// Seconds that a step may take.
    pub(crate) limit: u64,
}

/// What a process is started for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// Lists the GPUs that memory can be had of.
    Gpus { stand_in: bool },
    /// Goes through the steps.
    Worker(Task),
    /// Holds a registration.
    Holder(Task, Way),
}

/// A command that becomes this program in a role.
pub(crate) fn command(role: &Role) -> Result<Command> {
    // Not by its path: it may have been replaced by now.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(args::VERIFY_PART)
        .arg(serde_json::to_string(role)?)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    Ok(command)
}

/// What a holder says between two transfers.
pub(super) const MOVES: &str = "moves";

/// A holder, from the side of the worker that started it. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Holder {
    child: Child,
}

impl Holder {
    /// Starts one, and waits until bytes move.
    pub(crate) fn start(task: &Task, way: Way) -> Result<Self> {
        let child = command(&Role::Holder(task.clone(), way))?
            .spawn()
            .context("start a process that holds a registration")?;
        let mut holder = Self { child };
        let output = holder.child.stdout.take().context("no pipe")?;
        let mut lines = BufReader::new(output);
        let mut line = String::new();
        lines.read_line(&mut line)?;
        ensure!(
            line.trim_end() == MOVES,
            "the process that was to hold a registration moved no bytes"
        );
        // It goes on writing, and must not wait for a reader.
        std::thread::spawn(move || io::copy(&mut lines, &mut io::sink()));
        Ok(holder)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL; it must have been alive until then.
    pub(crate) fn kill(mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(
            ended.is_none(),
            "the process that held a registration ended by itself: {ended:?}"
        );
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Errors mean that it has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
