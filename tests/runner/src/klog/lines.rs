// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Lines of a kernel log, as the VM writes them to its serial port.

use std::fs;
use std::path::Path;

use anyhow::Result;

/// Message that the kernel prints between a line that another processor cut short and the full
/// line.
const REPLAY: &str = "** replaying previous printk message **";

/// Returns the log that a VM wrote to its serial port, after [`once`].
pub(crate) fn read(log: &Path) -> Result<String> {
    Ok(once(&String::from_utf8_lossy(&fs::read(log)?)))
}

/// Empties the first copy of each line that was written twice, and the message between the copies.
/// All lines keep their numbers.
pub(crate) fn once(log: &str) -> String {
    let mut lines: Vec<&str> = log.lines().collect();
    for at in 0..lines.len() {
        if !lines[at].starts_with(REPLAY) {
            continue;
        }
        lines[at] = "";
        let whole = lines.get(at + 1).copied().unwrap_or_default();
        if let Some(before) = at.checked_sub(1) {
            if whole.starts_with(lines[before]) {
                lines[before] = "";
            }
        }
    }
    lines.iter().flat_map(|line| [line, "\n"]).collect()
}

/// Returns the text of a line without time stamp and caller.
pub(crate) fn message(line: &str) -> &str {
    let mut rest = line.trim_end_matches('\r');
    if let Some(inner) = rest.strip_prefix('[') {
        if let Some((stamp, text)) = inner.split_once(']') {
            let is_stamp = stamp.trim().chars().all(|c| c.is_ascii_digit() || c == '.');
            if is_stamp {
                rest = text.trim_start();
            }
        }
    }
    if let Some(inner) = rest.strip_prefix('[') {
        if let Some((caller, text)) = inner.split_once(']') {
            let caller = caller.trim();
            let is_caller = caller
                .strip_prefix(['T', 'C'])
                .is_some_and(|n| !n.is_empty() && n.chars().all(|c| c.is_ascii_digit()));
            if is_caller {
                rest = text.trim_start();
            }
        }
    }
    rest
}
