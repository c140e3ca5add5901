// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Free BAR1 of each GPU, from NVML.

use super::gpu_mode::known;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level};

check! {
    "bar1-free": "how much of each GPU's BAR1 is free (NVML)",
    super::gpu_mode::applies, check, OfSoftware(tests::FAULTS)
}

/// Part of BAR1 in which nvidia.ko pins nothing (`_isSpaceAvailableForBar1P2PMapping` of
/// 595.45.04), in bytes.
const RESERVE: u64 = 36 << 20;

/// Divisor of the size of BAR1. The check warns if less than a tenth of BAR1 can be pinned.
const TENTH: u64 = 10;

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (subject, gpu, has_bar1) in known(scan) {
        let Some(bar1) = gpu.bar1.filter(|_| has_bar1) else {
            continue;
        };
        let usable = bar1.free_bytes.saturating_sub(RESERVE);
        let found = format!(
            "{} of {} of BAR1 are free, of which {} can be pinned",
            mib(bar1.free_bytes),
            mib(bar1.total_bytes),
            mib(usable)
        );
        let is_low = bar1.total_bytes > 0 && usable < bar1.total_bytes / TENTH;
        let level = if is_low { Level::Warning } else { Level::Ok };
        let mut finding = Finding::new(level, subject, found);
        if is_low {
            finding = finding
                .why(
                    "each registration occupies as much of BAR1 as its own size, and nvidia.ko keeps 36 MiB; further \
                    registrations are refused (no_room, EFAULT to the application)",
                )
                .fix(
                    "`peermemctl list --by-process` shows which processes hold BAR1 (only with peermem-rs); end these \
                    processes, or register less; if BAR1 is smaller than the memory, turn on Resizable BAR and Above \
                    4G Decoding in the BIOS",
                );
        }
        findings.push(finding);
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, gpu};
    use crate::host::nvml::Memory;

    faults! {
        "BAR1 nearly full", "warning bar1-free: …5120 MiB of 131072 MiB of BAR1 are free, of which 5084 MiB" =>
            |fixture| {
                gpu(fixture, |gpu| {
                    gpu.bar1 = Some(Memory {
                        total_bytes: 128 << 30,
                        free_bytes: 5 << 30,
                        used_bytes: 123 << 30,
                    });
                });
            };
    }
}
