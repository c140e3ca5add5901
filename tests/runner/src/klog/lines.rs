// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Lines of a kernel log, as a machine writes them to its serial line.

use std::fs;
use std::path::Path;

use anyhow::Result;

/// What the kernel writes between a line that somebody else cut short and the whole of it.
const REPLAY: &str = "** replaying previous printk message **";

/// What a machine wrote to its serial line, as [`once`] has it.
pub(crate) fn read(log: &Path) -> Result<String> {
    Ok(once(&String::from_utf8_lossy(&fs::read(log)?)))
}

/// A log in which what was written twice stands once. The others' numbers stay: a line that goes leaves an empty one.
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

/// The text of a line without time stamp and caller.
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
