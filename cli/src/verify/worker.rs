// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Code of the processes of [`super::task`]. A process exits at the end of its standard input, so
//! that no process outlives its parent.

use std::io;
use std::io::{Read as _, Write as _};
use std::time::Duration;

use anyhow::{anyhow, bail, Context as _, Result};
use peermem_verbs::rdma;

use super::bench::Real;
use super::event::{Event, Name, Outcome, Step, Way};
use super::steps::{Bench as _, Moved, Plan, Refusal, Verb, Window};
use super::task::{Role, Task, MOVES};
use super::{bench, steps};

/// Exits this process at the end of standard input.
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

/// Runs a process in its role.
pub(crate) fn run(role: &str) -> Result<()> {
    let role: Role = serde_json::from_str(role).context("the task")?;
    end_with_input();
    match role {
        Role::Gpus { stand_in } => {
            let found = bench::gpus(stand_in).map_err(|error| format!("{error:#}"));
            say(&serde_json::to_string(&found)?)
        }
        Role::Worker(task) => work(task),
        Role::Holder(task, way) => hold(task, way),
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
    tell(Event::Ended(Step::new(None, Name::Open, outcome, found)));
    match opened {
        Ok(mut bench) => steps::run(&mut bench, &plan, &mut tell),
        Err(_) => tell(Event::Done),
    }
    lost.map_or(Ok(()), Err)
}

/// Returns a new seed each time, so that bytes of an earlier run are not mistaken for new ones.
fn seed() -> u64 {
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64);
    time ^ (u64::from(std::process::id()) << 40)
}

/// Registers memory, reports that bytes move, and moves bytes until this process is killed.
fn hold(task: Task, way: Way) -> Result<()> {
    let size = task.size;
    let mut bench = Real::open(task)?;
    let memory = bench.gpu_memory(size)?;
    let host = bench.host_memory(size)?;
    let refused = |refusal| match refusal {
        Refusal::NoSuchWay(why) | Refusal::Refused { why, .. } => anyhow!(why),
    };
    let region = bench.register(way, &memory).map_err(refused)?;
    let other = bench.register(Way::PeerMemory, &host).map_err(refused)?;
    let window = Window {
        at: 0,
        len: size as u64,
    };
    loop {
        let moved = bench.transfer(Verb::Write, &other, &region, window, Some(ROUND))?;
        if let Moved::Refused(status) = moved {
            bail!("a WRITE ended with {status}");
        }
        say(MOVES)?;
    }
}

/// Time for which the process to be killed moves bytes on one connection.
const ROUND: Duration = Duration::from_millis(50);
