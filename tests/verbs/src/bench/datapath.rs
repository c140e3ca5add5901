// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! perftest, unmodified, over GPU memory and over host memory, with the same devices.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use peermem_figures::{Datapath, Line};

use super::say;
use crate::lab::Setup;
use crate::sys;
use crate::sys::Running;

/// Those of which one end alone polls: two that do leave an emulated machine no processor for the work.
const PROGRAMS: [&str; 3] = [
    "ib_write_bw -s 65536 -n 500",
    "ib_read_bw -s 65536 -n 500",
    "ib_read_lat -s 64 -n 500",
];

/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where it listens.
pub(crate) const PORT: u16 = 18515;

/// Runs each program with both kinds of memory in turn, and prints.
pub(super) fn measure(setup: &Setup, repeats: u32) -> Result<()> {
    for program in PROGRAMS {
        for _ in 0..repeats {
            for memory in ["host", "gpu"] {
                let figure = pair(setup, program, memory)
                    .with_context(|| format!("{program}, {memory} memory"))?;
                say(&Line::Datapath(Datapath {
                    program: program.to_owned(),
                    memory: memory.to_owned(),
                    figure,
                }))?;
            }
        }
    }
    Ok(())
}

/// The average bandwidth, or the typical latency.
fn pair(setup: &Setup, program: &str, memory: &str) -> Result<f64> {
    let end = |device: &str, address: &[&str]| {
        let mut words = program.split(' ');
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).args(["-d", device, "-x", "1"]);
        if memory == "gpu" {
            command.arg("--mmap=/dev/nvidia0");
        }
        Running::start(command.args(address))
    };
    let mut server = end(&setup.devices[1], &[])?;
    sys::wait_until(PATIENCE, || Ok(listens(PORT)? || !server.is_running()?))?;
    let client = end(&setup.devices[0], &["127.0.0.1"])?.finish(PATIENCE)?;
    let server = server.finish(PATIENCE)?;
    ensure!(
        client.success() && server.success(),
        "failed:\n{}\n{}",
        server.tail(10),
        client.tail(10)
    );
    result(&client.output).with_context(|| client.tail(10))
}

/// Whether a program waits for its other end at a port of TCP's.
pub(crate) fn listens(port: u16) -> Result<bool> {
    const LISTENING: &str = "0A";
    let port = format!(":{port:04X}");
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        // The usual kernel has no IPv6.
        if !Path::new(table).exists() {
            continue;
        }
        let found = fs::read_to_string(table)?.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|local| local.ends_with(&port))
                && words.nth(1) == Some(LISTENING)
        });
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Bytes, iterations, then peak and average bandwidth and a rate; or least, most and typical time, and more. Of several
/// sizes, the largest's.
pub(crate) fn result(output: &str) -> Result<f64> {
    let numbers = |line: &str| {
        line.split_whitespace()
            .map(|word| word.parse().ok())
            .collect::<Option<Vec<f64>>>()
    };
    let found = output
        .lines()
        .rev()
        .filter_map(numbers)
        .find_map(|numbers| match numbers.len() {
            5 => Some(numbers[3]),
            7.. => Some(numbers[4]),
            _ => None,
        });
    found.context("no result")
}

#[cfg(test)]
mod tests {
    use super::result;

    #[test]
    fn results() {
        let bandwidth = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                         65536      500              26.86              26.05              0.000417\n";
        assert_eq!(result(bandwidth).expect("a result"), 26.05);
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n \
                       64      1000          210.1          990.2        250.5            260.1           31.0            400.0     900.0\n";
        assert_eq!(result(latency).expect("a result"), 250.5);
        assert!(result("Couldn't allocate MR\n 1 2 3\n").is_err());
    }
}
