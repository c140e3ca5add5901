// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Child processes of `verify`.
//!
//! A child executes this program again, because a CUDA context does not survive a fork. A worker
//! runs the steps of one pair and writes each step as a line of JSON. A holder keeps GPU memory
//! registered and moves bytes until the holder is killed. A child that hangs or dies is reported as
//! a result, and does not end the parent.
//!
//! This file defines the tasks of the child processes and starts the processes. [`super::worker`]
//! contains the code of the processes.

use std::io;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use anyhow::{ensure, Context as _, Result};
use serde::{Deserialize, Serialize};

use super::event::Way;
use super::peer::Hello;
use super::steps::Links;
use crate::args;

/// Source of GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    Cuda,
    /// The stand-in of the project's test VM.
    StandIn,
    /// No GPU memory: this host uses only host memory.
    None,
}

/// A GPU that can allocate memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// PCI address.
    pub(crate) pci: String,
    pub(crate) name: String,
    pub(crate) source: Source,
}

impl Found {
    /// Returns the entry for a host that uses only host memory.
    pub(crate) fn none() -> Self {
        Self {
            pci: "none".to_owned(),
            name: "no GPU".to_owned(),
            source: Source::None,
        }
    }
}

/// The server that a client's worker connects to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Server {
    /// Address as the user gave it.
    pub(crate) name: String,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) hello: Hello,
}

/// Parameters of a child process that opens a GPU and an RDMA device. The parent passes the
/// parameters as JSON in one argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    /// PCI address.
    pub(crate) gpu: String,
    pub(crate) source: Source,
    /// RDMA device, or `None` to run only the steps that need no RDMA device.
    pub(crate) hca: Option<String>,
    /// Port number, from 1.
    pub(crate) port: u8,
    /// Size of each buffer, in bytes.
    pub(crate) size: usize,
    /// Time limit of a step, in seconds.
    pub(crate) limit: u64,
    /// The server of a run between two hosts.
    pub(crate) server: Option<Server>,
    pub(crate) links: Links,
}

/// Purpose of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// Lists the GPUs that can allocate memory.
    Gpus { stand_in: bool },
    /// Runs the steps.
    Worker(Task),
    /// Serves the steps of a client. The standard input is the connection to the client.
    Server(Task),
    /// Keeps GPU memory registered, and moves bytes until the process is killed.
    Holder(Task, Way),
}

/// Returns a command that runs this program in a role.
pub(crate) fn command(role: &Role) -> Result<Command> {
    // The program's file may have been replaced since the program started. `/proc/self/exe` still
    // leads to the running program.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(args::VERIFY_PART)
        .arg(serde_json::to_string(role)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    Ok(command)
}

/// Line that a holder process prints after each transfer.
pub(super) const MOVES: &str = "moves";

/// Handle of a holder process ([`Role::Holder`]) in the worker that started the process. Dropping
/// the handle kills the process.
#[derive(Debug)]
pub(crate) struct Holder {
    child: Child,
}

impl Holder {
    /// Starts a holder, and waits until bytes move.
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
        // The holder keeps writing, and must not wait for a reader.
        std::thread::spawn(move || io::copy(&mut lines, &mut io::sink()));
        Ok(holder)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the holder by SIGKILL. Returns an error if the holder had already exited.
    pub(crate) fn kill(mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(
            ended.is_none(),
            "the process that held a registration had already ended: {ended:?}"
        );
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // An error means that the process has exited and was reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
