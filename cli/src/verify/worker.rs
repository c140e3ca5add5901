// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The processes that `verify` starts: itself again, by exec, for a CUDA context does not survive a fork. A worker goes
//! through the steps for one pair and writes each as a line of JSON; a holder holds a registration until it is killed.
//! A process that hangs or dies is then a result of the program, not its end.
//!
//! Both end when their standard input does, so that none is left when whoever started them has gone.

use std::io;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read as _;
use std::io::Write as _;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;

use anyhow::ensure;
use anyhow::Context as _;
use anyhow::Result;
use peermem_verbs::rdma;
use serde::Deserialize;
use serde::Serialize;

use super::bench;
use super::bench::Real;
use super::bench::Source;
use super::steps;
use super::steps::Event;
use super::steps::Figures;
use super::steps::Name;
use super::steps::Outcome;
use super::steps::Plan;
use super::steps::Step;
use super::steps::Way;

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

/// The name of the hidden command.
pub(crate) const COMMAND: &str = "verify-part";

/// A command that becomes this program in a role.
pub(crate) fn command(role: &Role) -> Result<Command> {
    // Not by its path: it may have been replaced by now.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(COMMAND)
        .arg(serde_json::to_string(role)?)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    Ok(command)
}

/// Ends this process when standard input ends.
fn end_with_input() {
    std::thread::spawn(|| {
        let mut bytes = [0; 16];
        while matches!(io::stdin().read(&mut bytes), Ok(got) if got > 0) {}
        std::process::exit(3);
    });
}

fn say(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Between two transfers of the holder.
const MOVES: &str = "moves";

/// The body of such a process.
pub(crate) fn run(role: &str) -> Result<()> {
    let role: Role = serde_json::from_str(role).context("the task")?;
    end_with_input();
    match role {
        Role::Gpus { stand_in } => {
            let found = bench::gpus(stand_in).map_err(|error| format!("{error:#}"));
            say(&serde_json::to_string(&found)?)
        }
        Role::Worker(task) => work(task),
        Role::Holder(task, way) => bench::hold(task, way, || say(MOVES)),
    }
}

fn work(task: Task) -> Result<()> {
    let patience = Duration::from_secs(task.limit) / 2;
    rdma::wait_for_completions(patience);
    let mut lost = None;
    let mut tell = |event: Event| {
        let said = serde_json::to_string(&event)
            .map_err(Into::into)
            .and_then(|line| say(&line));
        if let Err(error) = said {
            lost = Some(error);
        }
    };
    let plan = Plan {
        size: task.size,
        gpu_only: task.hca.is_none(),
        registrations: 11,
        measure: Duration::from_millis(250),
        patience,
        seed: seed(),
    };
    tell(Event::Begins {
        way: None,
        step: Name::Open,
    });
    let opened = Real::open(task);
    let (outcome, found) = match &opened {
        Ok(_) => (Outcome::Passed, None),
        Err(error) => (Outcome::Failed, Some(format!("{error:#}"))),
    };
    tell(Event::Ended(Step {
        way: None,
        step: Name::Open,
        outcome,
        found,
        errno: None,
        figures: Figures::default(),
    }));
    match opened {
        Ok(mut bench) => steps::run(&mut bench, &plan, &mut tell),
        Err(_) => tell(Event::Done),
    }
    lost.map_or(Ok(()), Err)
}

/// Another one each time, so that bytes of an earlier run are not taken for this one's.
fn seed() -> u64 {
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64);
    time ^ (u64::from(std::process::id()) << 40)
}

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
