// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Code that runs in the child processes of [`super::task`]. A child exits when its parent no
//! longer reads the child's standard output. No child outlives its parent.

use std::io;
use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::{bail, Context as _, Result};
use peermem_verbs::rdma;
use rustix::event::{poll, PollFd, PollFlags};

use super::bench::Real;
use super::event::{Event, Name, Outcome, Step, Way};
use super::peer::{Lines, Peer, Teller};
use super::steps::{Bench as _, End, Kind, Links, Moved, Plan, Scope, Verb, Window};
use super::task::{Role, Task, MOVES};
use super::{bench, peer, steps};

/// Exits this process when the reader of its standard output is gone.
fn end_with_reader() {
    std::thread::spawn(|| {
        let output = io::stdout();
        // No event is requested. poll then returns only on an error.
        let mut waited = [PollFd::new(&output, PollFlags::empty())];
        while poll(&mut waited, None).is_err() {}
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
    end_with_reader();
    match role {
        Role::Gpus { stand_in } => {
            let found = bench::gpus(stand_in).map_err(|error| format!("{error:#}"));
            say(&serde_json::to_string(&found)?)
        }
        Role::Worker(task) => work(task),
        Role::Server(task) => serve(task),
        Role::Holder(task, way) => hold(task, way),
    }
}

/// Receivers of the events: the supervisor, and the server of a run between two hosts.
#[derive(Default)]
struct Audience {
    server: Option<Teller>,
    /// First error from sending an event to the supervisor.
    lost: Option<anyhow::Error>,
}

impl Audience {
    fn tell(&mut self, event: &Event) {
        if let Some(server) = &mut self.server {
            server.tell(event);
        }
        let said = serde_json::to_string(event)
            .map_err(Into::into)
            .and_then(|line| say(&line));
        if let Err(error) = said {
            self.lost.get_or_insert(error);
        }
    }

    fn begins(&mut self, step: Name) {
        self.tell(&Event::Begins { way: None, step });
    }

    fn ended(&mut self, step: Name, why: Option<&anyhow::Error>) {
        let outcome = match why {
            None => Outcome::Passed,
            Some(_) => Outcome::Failed,
        };
        let why = why.map(|error| format!("{error:#}"));
        self.tell(&Event::Ended(Step::new(None, step, outcome, why)));
    }

    /// Sends the last event of a run. Returns the first error from sending, if any.
    fn end(mut self) -> Result<()> {
        self.tell(&Event::Done);
        self.lost.map_or(Ok(()), Err)
    }
}

fn work(task: Task) -> Result<()> {
    let patience = Duration::from_secs(task.limit) / 2;
    rdma::wait_for_completions(patience);
    let mut audience = Audience::default();
    let mut plan = Plan {
        size: task.size,
        scope: match (&task.hca, &task.server) {
            (None, _) => Scope::GpuOnly,
            (Some(_), None) => Scope::OneHost,
            (Some(_), Some(_)) => Scope::TwoHosts,
        },
        links: [task.links, Links::default()],
        registrations: 11,
        measure: Duration::from_millis(250),
        patience,
        seed: seed(),
    };
    let mut peer = None;
    if let Some(server) = &task.server {
        audience.begins(Name::Connect);
        match Peer::connect(server, patience) {
            Ok((connected, devices)) => {
                audience.server = Some(connected.teller()?);
                plan.links[1] = devices.links;
                audience.tell(&Event::Peer(devices.about));
                audience.ended(Name::Connect, None);
                peer = Some(connected);
            }
            Err(error) => {
                audience.ended(Name::Connect, Some(&error));
                return audience.end();
            }
        }
    }
    audience.begins(Name::Open);
    let opened = Real::open(task, peer);
    audience.ended(Name::Open, opened.as_ref().err());
    if let Ok(mut bench) = opened {
        steps::run(&mut bench, &plan, &mut |event| audience.tell(&event));
    }
    audience.end()
}

/// Serves a client. The standard input is the connection to the client.
fn serve(task: Task) -> Result<()> {
    let client = TcpStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // The supervisor waits longer than this process. This process therefore reports a timeout
    // first, with its cause.
    let patience = Duration::from_secs(task.limit) / 4 * 3;
    let mut lines = Lines::of(client, patience)?;
    let mut audience = Audience::default();
    audience.begins(Name::Open);
    let (size, links) = (task.size, task.links);
    match Real::open(task, None) {
        Ok(mut bench) => peer::serve(&mut bench, &mut lines, (size, links), &mut |event| {
            audience.tell(&event);
        }),
        Err(error) => {
            audience.ended(Name::Open, Some(&error));
            peer::refuse(&mut lines, &error)?;
        }
    }
    audience.end()
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
    let mut bench = Real::open(task, None)?;
    let memory = bench.memory(End::Here, Kind::Gpu, size)?;
    let host = bench.memory(End::Here, Kind::Host, size)?;
    let region = bench.register(way, &memory)?;
    let other = bench.register(Way::PeerMemory, &host)?;
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

/// Time for which a holder process moves bytes before it opens a new connection.
const ROUND: Duration = Duration::from_millis(50);
