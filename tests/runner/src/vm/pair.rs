// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Two VMs on one wire, each with its own kernel, GPU and NIC.

use std::io::Write as _;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{anyhow, bail, Result};

use super::boot::{Boot, Channels, LineSink, Outcome};
use super::machine;
use super::options::Options;
use crate::paths::Paths;

/// Boots two VMs, runs the command in both, and waits for both. A [`LineSink`] gets the lines of
/// host 1 unchanged. The sink gets the lines of host 2 as lines of standard error that begin with
/// the host's name.
pub(crate) fn run(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    channels: Channels,
) -> Result<Outcome> {
    if command.is_empty() {
        bail!("a pair has no terminal and no input: give a command with --pair");
    }
    // A connected pair of sockets queues some hundred packets before a sender has to wait.
    let wires = UnixDatagram::pair()?;
    let log = match &options.log {
        Some(file) => file.clone(),
        None => paths.new_log()?,
    };
    let (sink, names_both) = match channels {
        Channels::Caller => (Box::new(print) as LineSink, true),
        Channels::Lines(sink) => (sink, false),
    };
    let sink = Arc::new(Mutex::new(sink));
    let one = |number: u32, wire: UnixDatagram| {
        let mut options = options.clone();
        options.log = Some(match number {
            1 => log.clone(),
            _ => log.with_extension("host2.log"),
        });
        options.host_number = Some(number);
        let sink = sink.clone();
        let say = move |line: &str, is_error| {
            let Ok(mut sink) = sink.lock() else {
                return;
            };
            if number == 1 && !names_both {
                sink(line, is_error);
            } else {
                sink(&format!("host{number}: {line}"), is_error || !names_both);
            }
        };
        let lines = Channels::Lines(Box::new(say.clone()));
        let outcome = machine::run(paths, &options, boot, command, lines, Some(wire))?;
        if let Some(status @ 1..) = outcome.status {
            say(&format!("the command's status is {status}"), true);
        }
        Ok(outcome)
    };
    let [first, second] = thread::scope(|scope| {
        [(1, wires.0), (2, wires.1)]
            .map(|(number, wire)| {
                let one = &one;
                scope.spawn(move || one(number, wire))
            })
            .map(|host| {
                host.join()
                    .unwrap_or_else(|_| Err(anyhow!("a host's thread panicked")))
            })
    });
    Ok(together(first?, &second?, options.host_2_is_lost))
}

/// Prints a line. Ignores write errors: if the reader is gone, nobody misses the line.
fn print(line: &str, is_error: bool) {
    let _ = if is_error {
        writeln!(std::io::stderr(), "{line}")
    } else {
        writeln!(std::io::stdout(), "{line}")
    };
}

/// Combines both outcomes: the status of the first failure, and the failures of each host under its
/// name.
fn together(first: Outcome, second: &Outcome, second_is_lost: bool) -> Outcome {
    let of_second = match second.status {
        None if second_is_lost => Some(0),
        status => status,
    };
    let status = match (first.status, of_second) {
        (Some(0), status) => status,
        (status, Some(_)) => status,
        (_, None) => None,
    };
    let named = |number: u32, outcome: &Outcome| -> Vec<String> {
        let log = outcome.log.display();
        outcome
            .failures
            .iter()
            .map(|failure| {
                format!(
                    "host{number}: {}\n    its kernel log: {log}",
                    failure.trim_end()
                )
            })
            .collect()
    };
    Outcome {
        status,
        failures: [named(1, &first), named(2, second)].concat(),
        timed_out: first.timed_out || second.timed_out,
        elapsed: first.elapsed.max(second.elapsed),
        log: first.log,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::super::boot::RUN_FAILED;
    use super::*;

    fn outcome(status: Option<i32>, failures: &[&str]) -> Outcome {
        Outcome {
            status,
            failures: failures.iter().map(|text| (*text).to_owned()).collect(),
            timed_out: false,
            log: PathBuf::from("log"),
            elapsed: Duration::from_secs(1),
        }
    }

    #[test]
    fn a_pair_fails_if_either_host_does() {
        let code = |first, second, is_lost| {
            together(outcome(first, &[]), &outcome(second, &[]), is_lost).exit_code()
        };
        assert_eq!(code(Some(0), Some(0), false), 0);
        assert_eq!(code(Some(3), Some(0), false), 3);
        assert_eq!(code(Some(0), Some(4), false), 4);
        assert_eq!(code(Some(3), Some(4), false), 3);
        for (first, second) in [(Some(0), None), (None, Some(0)), (Some(3), None)] {
            assert_eq!(code(first, second, false), RUN_FAILED);
        }
        assert_eq!(code(Some(0), None, true), 0);
        assert_eq!(code(Some(3), None, true), 3);
        assert_eq!(code(None, None, true), RUN_FAILED);
        let both = together(outcome(Some(0), &["a"]), &outcome(Some(0), &["b\n"]), false);
        assert_eq!(both.exit_code(), RUN_FAILED);
        assert_eq!(
            both.failures,
            [
                "host1: a\n    its kernel log: log",
                "host2: b\n    its kernel log: log"
            ]
        );
    }
}
