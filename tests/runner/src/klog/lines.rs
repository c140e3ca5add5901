// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Lines of a kernel log, as the VM writes them to its serial port.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use anyhow::Result;
use regex::Regex;

use crate::results::pattern;

/// Message that the kernel prints between a line that another processor cut short and the full
/// line.
const REPLAY: &str = "** replaying previous printk message **";

/// Returns the log that a VM wrote to its serial port, without the lines that [`once`] removes.
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

static STAMP: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^(?:\[[ 0-9.]*\]\s*)?(?:\[\s*[TC][0-9]+\s*\]\s*)?"));

/// Returns the text of a line without time stamp and caller.
pub(crate) fn message(line: &str) -> &str {
    let line = line.trim_end_matches('\r');
    &line[STAMP.find(line).map_or(0, |stamp| stamp.end())..]
}
