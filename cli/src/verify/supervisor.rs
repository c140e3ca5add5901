// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Starts a worker and follows it. Turns a step that takes too long, or a worker that dies, into a
//! result.

use std::io;
use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::process::Child;
use std::sync::mpsc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{anyhow, Context as _, Result};

use super::event::{Event, Name, Outcome, Step, Way};
use super::task;
use super::task::{Found, Role};

/// Line of a worker's output. An error is a timeout, or the end of the output.
type Received = Result<String, RecvTimeoutError>;

/// Results of a worker.
#[derive(Debug, Default)]
pub(crate) struct Followed {
    /// Description of the GPU and the RDMA device.
    pub(crate) about: Option<String>,
    /// Description of the other host's GPU and RDMA device.
    pub(crate) peer: Option<String>,
    pub(crate) steps: Vec<Step>,
}

impl Followed {
    /// Adds a failure for a step that did not end.
    fn lost(&mut self, (way, step): (Option<Way>, Name), why: String) {
        self.steps
            .push(Step::new(way, step, Outcome::Failed, Some(why)));
    }
}

/// Collects the messages of a worker. `limit` applies to one step. Returns the results, the reason
/// why the messages ended early, and the last step that began.
fn follow(
    limit: Duration,
    mut next: impl FnMut(Duration) -> Received,
) -> (Followed, Result<(), RecvTimeoutError>, (Option<Way>, Name)) {
    let mut followed = Followed::default();
    let mut now = (None, Name::Open);
    let end = loop {
        match next(limit) {
            Err(why) => break Err(why),
            Ok(line) => match serde_json::from_str(&line) {
                Ok(Event::Begins { way, step }) => now = (way, step),
                Ok(Event::Ended(step)) => followed.steps.push(step),
                Ok(Event::About(about)) => followed.about = Some(about),
                Ok(Event::Peer(about)) => followed.peer = Some(about),
                Ok(Event::Done) => break Ok(()),
                // The line is not an event, but output of a library.
                Err(_) => {}
            },
        }
    };
    (followed, end, now)
}

/// Returns the lines of a child as they arrive.
fn lines_of(child: &mut Child) -> Result<impl FnMut(Duration) -> Received> {
    let output = child.stdout.take().context("no pipe")?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines() {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    Ok(move |limit| receiver.recv_timeout(limit))
}

/// Time limit for a killed process to exit.
const LAST: Duration = Duration::from_secs(30);

/// Kills a child, and describes how it ended.
fn end(mut child: Child) -> io::Result<String> {
    child.kill()?;
    let begun = Instant::now();
    while begun.elapsed() < LAST {
        if let Some(status) = child.try_wait()? {
            return Ok(status.to_string());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok("it cannot be killed: it hangs in the kernel".to_owned())
}

/// Runs a worker through the steps of one pair. `limit` applies to one step. `client` is the
/// connection to the client that the worker serves.
///
/// # Errors
/// The worker cannot be started.
pub(crate) fn oversee(role: &Role, limit: Duration, client: Option<TcpStream>) -> Result<Followed> {
    let mut command = task::command(role)?;
    if let Some(client) = client {
        command.stdin(OwnedFd::from(client));
    }
    let mut child = command.spawn().context("start a worker")?;
    // `command` holds a copy of the connection. Without this drop, the connection would stay open
    // after the worker ends.
    drop(command);
    let next = lines_of(&mut child)?;
    let (mut followed, how, now) = follow(limit, next);
    match how {
        Ok(()) => {
            end(child)?;
        }
        Err(RecvTimeoutError::Timeout) => {
            let status = end(child)?;
            followed.lost(
                now,
                format!("not done after {} s; {status}", limit.as_secs()),
            );
        }
        Err(RecvTimeoutError::Disconnected) => {
            let status = match child.wait() {
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            followed.lost(now, format!("the worker process ended: {status}"));
        }
    }
    Ok(followed)
}

/// Returns the GPUs that can allocate memory. A separate process finds the GPUs, because the
/// effects of CUDA on a process cannot be undone.
///
/// # Errors
/// There is neither CUDA nor a stand-in, or the process fails or hangs.
pub(crate) fn gpus(stand_in: bool, limit: Duration) -> Result<Vec<Found>> {
    let mut child = task::command(&Role::Gpus { stand_in })?
        .spawn()
        .context("start a worker")?;
    let mut next = lines_of(&mut child)?;
    let found = loop {
        match next(limit) {
            Err(RecvTimeoutError::Timeout) => {
                break Err(anyhow!(
                    "CUDA did not list the GPUs within {} s",
                    limit.as_secs()
                ))
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.wait()?;
                return Err(anyhow!(
                    "the process that asks CUDA for GPUs ended: {status}"
                ));
            }
            Ok(line) => {
                if let Ok(found) = serde_json::from_str::<Result<Vec<Found>, String>>(&line) {
                    break found.map_err(|why| anyhow!(why));
                }
            }
        }
    };
    end(child)?;
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(event: &Event) -> Received {
        Ok(serde_json::to_string(event).unwrap_or_default())
    }

    fn passed(way: Option<Way>, step: Name) -> Step {
        Step::new(way, step, Outcome::Passed, None)
    }

    fn followed(
        said: Vec<Received>,
    ) -> (Followed, Result<(), RecvTimeoutError>, (Option<Way>, Name)) {
        let mut said = said.into_iter();
        follow(Duration::from_secs(7), |limit| {
            assert_eq!(limit, Duration::from_secs(7));
            said.next().unwrap_or(Err(RecvTimeoutError::Timeout))
        })
    }

    fn begins(way: Option<Way>, step: Name) -> Event {
        Event::Begins { way, step }
    }

    #[test]
    fn events_are_collected() {
        let step = passed(Some(Way::DmaBuf), Name::Register);
        let (found, end, _) = followed(vec![
            line(&begins(None, Name::Open)),
            Ok("libfoo: warning: {}".to_owned()),
            line(&Event::About("a GPU".to_owned())),
            line(&Event::Ended(step.clone())),
            line(&Event::Done),
            line(&Event::About("never read".to_owned())),
        ]);
        assert_eq!(found.about.as_deref(), Some("a GPU"));
        assert_eq!(found.steps, [step]);
        assert_eq!(end, Ok(()));
    }

    #[test]
    fn a_hanging_step_is_known_by_its_name() {
        let (found, end, now) = followed(vec![
            line(&begins(None, Name::Open)),
            line(&Event::Ended(passed(None, Name::Open))),
            line(&begins(Some(Way::PeerMemory), Name::Deregister)),
        ]);
        assert_eq!(found.steps.len(), 1);
        assert_eq!(end, Err(RecvTimeoutError::Timeout));
        assert_eq!(now, (Some(Way::PeerMemory), Name::Deregister));
    }

    #[test]
    fn a_worker_that_dies_is_noticed() {
        let (_, end, now) = followed(vec![
            line(&begins(Some(Way::DmaBuf), Name::GpuToGpu)),
            Err(RecvTimeoutError::Disconnected),
        ]);
        assert_eq!(end, Err(RecvTimeoutError::Disconnected));
        assert_eq!(now, (Some(Way::DmaBuf), Name::GpuToGpu));
    }
}
