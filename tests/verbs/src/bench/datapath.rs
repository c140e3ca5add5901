// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Port and results of perftest's programs, which the cases run unmodified.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// TCP port at which perftest's programs listen.
pub(crate) const PORT: u16 = 18515;

/// Returns `true` if a program listens at TCP port `port`.
pub(crate) fn listens(port: u16) -> Result<bool> {
    const LISTENING: &str = "0A";
    let port = format!(":{port:04X}");
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        // The default kernel has no IPv6.
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

/// Returns the average bandwidth or the typical latency from perftest's output. A bandwidth line
/// has 5 numbers: bytes, iterations, peak, average, message rate. A latency line has at least 7:
/// bytes, iterations, minimum, maximum, typical, and more. For several sizes, returns the result of
/// the largest size, which is on the last line.
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
