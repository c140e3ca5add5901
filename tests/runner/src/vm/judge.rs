// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Judges a run by its kernel log, its detectors, and the command's status.

use super::options::Options;
use super::wait::Attended;
use crate::detectors::{self, Detector};
use crate::klog;

const SHOWN_REPORTS: usize = 10;

fn indented<'a>(lines: impl IntoIterator<Item = &'a str>) -> String {
    lines
        .into_iter()
        .map(|line| format!("\n    {line}"))
        .collect()
}

/// Adds the failures shown by the log and by the VM's end. `wanted` are the detectors that must
/// show that they work.
pub(super) fn judge(
    attended: &mut Attended,
    options: &Options,
    text: &str,
    qemu_says: &str,
    wanted: Option<&[Detector]>,
) {
    let failures = &mut attended.failures;
    let is_lost = options.host_2_is_lost && options.host_number == Some(2);
    if is_lost && attended.status.is_some() {
        failures.push("the command ended, but should have powered its VM off".to_owned());
    } else if attended.status.is_none() && failures.is_empty() && !is_lost {
        let lines: Vec<&str> = text.lines().collect();
        let tail = &lines[lines.len().saturating_sub(15)..];
        failures.push(format!(
            "the machine ended before the command reported its status{}{}",
            indented(qemu_says.lines()),
            indented(tail.iter().copied())
        ));
    }
    // Faults that are injected to test the detectors are no failures.
    let (text, injected) = detectors::split(text);
    if let (Some(wanted), Some(_)) = (wanted, attended.status) {
        failures.extend(detectors::judge(text, injected, wanted));
    }
    let verdict = klog::judge(text, &options.expect);
    if verdict.is_clean() {
        return;
    }
    for report in verdict.undeclared.iter().take(SHOWN_REPORTS) {
        failures.push(format!(
            "the kernel reports (line {} of the log):\n{report}",
            report.line
        ));
    }
    if let Some(more) = verdict.undeclared.len().checked_sub(SHOWN_REPORTS + 1) {
        failures.push(format!("the kernel reports {} more times", more + 1));
    }
    failures.extend(verdict.miscounted);
}
