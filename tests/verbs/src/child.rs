// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Roles that this program has as a child process, for cases with several processes.
//!
//! A child prints `ready` to standard output once it is set up. In every role except
//! [`Role::Busy`], the child then waits for the end of standard input before it continues.

use std::io;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use anyhow::{bail, ensure, Context, Result};
use clap::{Subcommand, ValueEnum};

use crate::arena::Arena;
use crate::gpu::{Gpu, GRANULE};
use crate::lab::{Lab, Setup, Where, M2};
use crate::pattern::Choice;
use crate::rdma::Op;
use crate::sys::{Placement, Span};
use crate::{rdma, sys};

#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Role {
    /// Register, transfer, verify and deregister this many times
    Exercise { rounds: u64 },
    /// Hold this many regions and exit without deregistering
    Hold { regions: usize },
    /// Hold GPU memory at this address
    Own { addr: u64 },
    /// Register a range over this many allocations
    Search { parts: u64 },
    /// Register 2 MiB of another process's GPU memory, at this address
    Guest { addr: u64, gives_up: GivesUp },
    /// Hold this many regions, and transfer until killed
    Busy { regions: usize },
}

/// Time at which a guest closes the GPU. A guest is a process that another process has admitted to
/// its GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GivesUp {
    /// The guest closes the GPU, deregisters, and then exits
    Early,
    /// The guest's exit closes the GPU, and then the HCA, which deregisters. At an exit, the kernel
    /// closes the most recently opened file first
    First,
    /// The guest's exit closes the HCA, which deregisters, and then the GPU
    Last,
}

/// Number of requests that a busy child keeps in flight.
const UNDER_WAY: usize = 8;
/// Maximum number of completions that a busy child reports, in one line each. The pipe has room for
/// all these lines, so the child never waits for a reader.
const TOLD: usize = 64;
const MOVED: &str = "moved";

pub(crate) fn run(role: &Role, setup: &Setup) -> Result<()> {
    if let Role::Guest { addr, gives_up } = role {
        return guest(*addr, *gives_up, setup);
    }
    let lab = Lab::open(setup)?;
    match role {
        Role::Guest { .. } => Ok(()),
        Role::Exercise { rounds } => {
            announce()?;
            exercise(&lab, *rounds)
        }
        Role::Hold { regions } => {
            let memory = lab.allocate(Where::Gpu(0), M2 * regions.max(&1))?;
            let held = (0..*regions)
                .map(|index| Ok(lab.near.reg_mr(memory.span(index * M2, M2)?)?))
                .collect::<Result<Vec<_>>>()?;
            announce()?;
            // The kernel must clean up these objects, so the child exits without dropping them.
            std::mem::forget((held, memory, lab));
            std::process::exit(0);
        }
        Role::Own { addr } => {
            let memory = lab.gpu(0)?.allocate(M2, Placement::At(*addr))?;
            announce()?;
            drop(memory);
            Ok(())
        }
        Role::Search { parts } => {
            let addr = sys::free_address(parts * GRANULE, GRANULE)?;
            let memory = (0..*parts)
                .map(|part| {
                    lab.gpu(0)?
                        .allocate(M2, Placement::At(addr + part * GRANULE))
                })
                .collect::<Result<Vec<_>>>()?;
            announce()?;
            let span = Span::anywhere(addr, parts * GRANULE)?;
            let region = lab.near.reg_mr(span)?;
            drop((region, memory));
            Ok(())
        }
        Role::Busy { regions } => {
            let source = Arena::near(&lab, Where::Gpu(0), M2, 1)?;
            let targets = (0..*regions)
                .map(|_| Arena::far(&lab, Where::Gpu(1), M2, 2))
                .collect::<Result<Vec<_>>>()?;
            let mut connection = rdma::connect(&lab.near, &lab.far)?;
            say("ready")?;
            for (moved, target) in targets.iter().cycle().enumerate() {
                connection
                    .near
                    .post(Op::Write, source.part(0, M2)?, target.part(0, M2)?)?;
                if moved < UNDER_WAY {
                    continue;
                }
                connection.near.sent()?.expect(rdma::Status::Success)?;
                if moved - UNDER_WAY < TOLD {
                    say(MOVED)?;
                }
            }
            bail!("a busy child needs a region");
        }
    }
}

fn guest(addr: u64, gives_up: GivesUp, setup: &Setup) -> Result<()> {
    let mut gpus = Vec::new();
    if gives_up != GivesUp::First {
        gpus = Gpu::all()?;
    }
    let hca = rdma::Hca::open(&setup.devices[1])?;
    if gives_up == GivesUp::First {
        gpus = Gpu::all()?;
    }
    announce()?;
    let region = hca.reg_mr(Span::anywhere(addr, GRANULE)?)?;
    if gives_up == GivesUp::Early {
        drop(gpus);
        drop(region);
        return Ok(());
    }
    std::mem::forget((region, hca, gpus));
    std::process::exit(0);
}

fn say(line: &str) -> Result<()> {
    println!("{line}");
    Ok(io::stdout().flush()?)
}

/// Reports that the setup is done, and waits for the parent.
fn announce() -> Result<()> {
    say("ready")?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn exercise(lab: &Lab, rounds: u64) -> Result<()> {
    let seed = lab.setup.seed;
    let mut choice = Choice::new(seed);
    for round in 0..rounds {
        let mut source = Arena::near(lab, Where::Gpu(0), M2, 3 * round)?;
        let mut target = Arena::far(lab, Where::Gpu(1), M2, 3 * round + 1)?;
        let mut connection = rdma::connect(&lab.near, &lab.far)?;
        for _ in 0..4 {
            let len = 1 + choice.below(100_000) as usize;
            let (from, to) = (
                choice.below((M2 - len) as u64) as usize,
                choice.below((M2 - len) as u64) as usize,
            );
            connection.transfer(Op::Write, source.part(from, len)?, target.part(to, len)?)?;
            let data = source.expected(from, len)?.to_vec();
            target.expect(to, &data)?;
            let back = choice.below((M2 - len) as u64) as usize;
            connection.transfer(Op::Read, source.part(back, len)?, target.part(to, len)?)?;
            source.expect(back, &data)?;
        }
        source.check().context("source")?;
        target.check().context("target")?;
    }
    Ok(())
}

/// A child process, which is killed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts this program as a child in a role, and waits until the child is ready.
    pub(crate) fn start(setup: &Setup, seed: u64, role: &[&str]) -> Result<Self> {
        let command = Command::new(std::env::current_exe()?);
        Self::start_as(command, setup, seed, role)
    }

    /// Starts a role as [`Process::start`] does, through `command`, which must run this program
    /// with the arguments that are appended here.
    pub(crate) fn start_as(
        mut command: Command,
        setup: &Setup,
        seed: u64,
        role: &[&str],
    ) -> Result<Self> {
        command
            .args([
                "--peermem",
                &setup.peermem.to_string(),
                "--seed",
                &seed.to_string(),
            ])
            .args([
                "--near",
                &setup.devices[0],
                "--far",
                &setup.devices[1],
                "child",
            ])
            .args(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("start a child")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("no pipe")?;
        let mut process = Self {
            child,
            stdin,
            output: BufReader::new(stdout),
        };
        process
            .hear("ready")
            .with_context(|| format!("role {role:?}"))?;
        Ok(process)
    }

    fn hear(&mut self, expected: &str) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(line.strip_suffix('\n') == Some(expected), "{line:?}");
        Ok(())
    }

    /// Waits until a busy child has completed `count` more requests. At that time, other requests
    /// are in flight.
    pub(crate) fn has_moved(&mut self, count: usize) -> Result<()> {
        (0..count).try_for_each(|_| self.hear(MOVED))
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells the child to continue.
    pub(crate) fn go(&mut self) {
        self.stdin = None;
    }

    pub(crate) fn wait(mut self) -> Result<ExitStatus> {
        self.go();
        Ok(self.child.wait()?)
    }

    /// Waits for the child as [`Process::wait`] does. Fails if the child failed.
    pub(crate) fn join(self) -> Result<()> {
        let status = self.wait()?;
        if !status.success() {
            bail!("a child failed: {status}");
        }
        Ok(())
    }

    /// Sends SIGKILL and waits until the child has ended.
    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that the child has ended and was already waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
