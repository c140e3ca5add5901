// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Kernel crashes in the code of GPU or NIC drivers, from the kernel log.
//!
//! A report begins with a headline, and contains a line with the failed instruction: `RIP: 0010:`
//! on x86, `pc :` on Arm. If the instruction is in the kernel itself, the report belongs to the
//! first module in the call trace.

use crate::finding::{Finding, Level, Subject};
use crate::software::log::Record;

/// Words in the headline of a crash, after which the code does not continue.
const CRASHES: [&str; 10] = [
    "Oops: ",
    "Oops - ",
    "BUG: kernel NULL pointer",
    "BUG: unable to handle",
    "Unable to handle kernel",
    "general protection fault",
    "kernel BUG at",
    "Internal error: ",
    "invalid opcode: ",
    "Kernel panic",
];
/// Words in the headline of a report about a processor without progress.
const LOCKUPS: [&str; 3] = [
    "BUG: soft lockup",
    "hard LOCKUP",
    "self-detected stall on CPU",
];
/// Words in lines that end the current report.
const OTHERS: [&str; 3] = ["WARNING: ", "---[ end trace", "cut here ]"];

/// Prefixes of modules and functions on the path of GPUDirect RDMA.
const OURS: [&str; 10] = [
    "nvidia",
    "nv_peer_mem",
    "gdrdrv",
    "mlx5",
    "ib_",
    "rdma_",
    "iw_cm",
    "bnxt_re",
    "irdma",
    "efa",
];

fn is_ours(name: &str) -> bool {
    OURS.iter().any(|begin| name.starts_with(begin))
}

fn has(text: &str, words: &[&str]) -> bool {
    words.iter().any(|words| text.contains(words))
}

/// Returns the instruction in a line, after `RIP: 0010:` or `pc :`. A user-space instruction has
/// another segment than `0010`.
fn instruction(text: &str) -> Option<&str> {
    let (_, rest) = text
        .split_once("RIP: 0010:")
        .or_else(|| text.split_once("pc : "))?;
    Some(rest.trim())
}

/// Parses the module in `function+0x51/0x3a0 [nvidia_uvm]`. Returns `None` for code of the kernel
/// itself.
fn module(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("+0x")?;
    let (_, rest) = rest.split_once('[')?;
    // A build ID or flags may follow the name.
    rest.split([']', ' ', '('])
        .next()
        .filter(|name| !name.is_empty())
}

/// A report whose module is not yet known.
struct Open<'a> {
    headline: &'a Record,
    is_crash: bool,
    /// The failed instruction, if it is known and lies in the kernel itself.
    instruction: Option<&'a str>,
}

/// A report about one of the drivers.
struct Report<'a> {
    record: &'a Record,
    headline: &'a str,
    module: &'a str,
    is_crash: bool,
}

fn reports(records: &[Record]) -> Vec<Report<'_>> {
    let mut reports = Vec::new();
    let mut open: Option<Open<'_>> = None;
    for record in records {
        let text = record.text.as_str();
        if has(text, &OTHERS) {
            open = None;
            continue;
        }
        let is_crash = has(text, &CRASHES);
        if is_crash || has(text, &LOCKUPS) {
            // The kernel writes several headlines for one crash.
            if open.as_ref().is_none_or(|open| is_crash && !open.is_crash) {
                open = Some(Open {
                    headline: record,
                    is_crash,
                    instruction: None,
                });
            }
            continue;
        }
        let Some(begun) = &mut open else {
            continue;
        };
        let named = match instruction(text) {
            Some(at) if begun.instruction.is_none() => {
                begun.instruction = Some(at);
                let function = at.split('+').next().unwrap_or_default();
                module(at).or(Some(function).filter(|name| is_ours(name)))
            }
            Some(_) => None,
            // A question mark stands for an unreliable entry of the stack.
            None if begun.instruction.is_some() && !text.trim_start().starts_with('?') => {
                module(text)
            }
            None => None,
        };
        if let Some(module) = named {
            if is_ours(module) {
                reports.push(Report {
                    record,
                    headline: &begun.headline.text,
                    module,
                    is_crash: begun.is_crash,
                });
            }
            open = None;
        }
    }
    reports
}

/// Returns a finding for the first crash and one for the first lockup of each driver. Later reports
/// usually follow from the first.
pub(super) fn findings(records: &[Record]) -> Vec<Finding> {
    let mut told: Vec<(&str, bool)> = Vec::new();
    let mut findings = Vec::new();
    for report in reports(records) {
        let key = (report.module, report.is_crash);
        if told.contains(&key) {
            continue;
        }
        told.push(key);
        let Report {
            record,
            headline,
            module,
            is_crash,
        } = report;
        let found = format!("{}: {}", headline.trim_end_matches(':'), record.text.trim());
        let found = format!("{} s after boot: {found}", record.seconds);
        let (level, why) = match is_crash {
            true => (
                Level::Fault,
                format!(
                    "the kernel crashed in {module}, and ended the running process: the locks of the process stay held, so \
                     programs that use the driver afterwards may hang (state D) and cannot be killed; unloading does \
                     not help"
                ),
            ),
            false => (
                Level::Warning,
                format!("a processor was stuck in {module} for many seconds, and all programs that waited for it were \
                    blocked"),
            ),
        };
        findings.push(
            Finding::new(level, Subject::Machine, found)
                .why(why)
                .fix(
                    "reboot; a newer version of the driver may have the fix: report it to the driver's vendor with all \
                     lines of the report (`dmesg`)",
                ),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    fn told(lines: &[&str]) -> Vec<(String, Level)> {
        let records: Vec<Record> = lines
            .iter()
            .map(|line| Record {
                seconds: 7,
                text: (*line).to_owned(),
            })
            .collect();
        let module = |finding: &Finding| {
            let why = finding.why.clone().unwrap_or_default();
            let words: Vec<&str> = why.split([' ', ',']).collect();
            let place = words.iter().position(|word| *word == "in").unwrap();
            (words[place + 1].to_owned(), finding.level)
        };
        findings(&records).iter().map(module).collect()
    }

    #[test]
    fn a_crash_in_a_driver() {
        let fault = |module: &str| vec![(module.to_owned(), Level::Fault)];
        assert_eq!(
            told(&[
                "BUG: kernel NULL pointer dereference, address: 00000000000000a8",
                "#PF: supervisor read access in kernel mode",
                "Oops: 0000 [#1] PREEMPT SMP NOPTI",
                "CPU: 3 PID: 4711 Comm: python3 Tainted: P           OE",
                "RIP: 0010:uvm_hmm_unregister_gpu+0x51/0x3a0 [nvidia_uvm]",
                "RIP: 0033:0x7f0000000000",
            ]),
            fault("nvidia_uvm")
        );
        assert_eq!(
            told(&[
                "general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1] SMP",
                "RIP: 0010:mlx5_ib_dereg_mr+0x1b/0x6c0 [mlx5_ib 5d2f0c]",
            ]),
            fault("mlx5_ib")
        );
        assert_eq!(
            told(&[
                "Unable to handle kernel paging request at virtual address dead000000000108",
                "Internal error: Oops: 0000000096000044 [#1] SMP",
                "pc : ib_umem_release+0x48/0x110 [ib_uverbs]",
                "lr : mlx5_ib_dereg_mr+0x90/0x280 [mlx5_ib]",
            ]),
            fault("ib_uverbs")
        );
        // The driver is built into the kernel.
        assert_eq!(
            told(&[
                "kernel BUG at drivers/infiniband/core/cma.c:100!",
                "RIP: 0010:rdma_destroy_id+0x51/0x3a0"
            ]),
            fault("rdma_destroy_id")
        );
    }

    #[test]
    fn a_crash_in_a_function_that_a_driver_called() {
        let lines = [
            "Oops: 0002 [#1] SMP",
            "RIP: 0010:mutex_lock+0x1c/0x30",
            "Call Trace:",
            " <TASK>",
            " ? xfs_read+0x1/0x2 [xfs]",
            " down_write+0x1/0x2",
            " nvidia_p2p_put_pages+0x51/0x3a0 [nvidia]",
            " mlx5_ib_dereg_mr+0x90/0x280 [mlx5_ib]",
        ];
        assert_eq!(told(&lines), [("nvidia".to_owned(), Level::Fault)]);
    }

    #[test]
    fn a_processor_that_is_stuck() {
        let lines = [
            "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [python3:4711]",
            "RIP: 0010:os_acquire_mutex+0x12/0x20 [nvidia]",
        ];
        assert_eq!(told(&lines), [("nvidia".to_owned(), Level::Warning)]);
    }

    #[test]
    fn other_reports_cause_no_finding() {
        for lines in [
            // The code continues after a warning.
            &[
                "WARNING: CPU: 3 PID: 1 at drivers/x.c:7 uvm_x+0x1/0x2 [nvidia_uvm]",
                "RIP: 0010:uvm_x+0x51/0x3a0 [nvidia_uvm]",
            ][..],
            &[
                "Oops: 0000 [#1] SMP",
                "RIP: 0010:nvme_queue_rq+0x51/0x3a0 [nvme]",
                " ib_x+0x1/0x2 [ib_core]",
            ],
            &[
                "Oops: 0000 [#1] SMP",
                "---[ end trace 0000000000000000 ]---",
                "RIP: 0010:x+0x1/0x2 [nvidia]",
            ],
            &["RIP: 0010:uvm_x+0x51/0x3a0 [nvidia_uvm]"],
            &["Oops: 0000 [#1] SMP"],
        ] {
            assert_eq!(told(lines), [], "{lines:?}");
        }
    }

    /// The second crash of a driver usually follows from the first.
    #[test]
    fn each_driver_is_reported_once() {
        let one = ["Oops: 0000 [#1] SMP", "RIP: 0010:a+0x1/0x2 [nvidia]"];
        let other = ["Oops: 0000 [#2] SMP", "RIP: 0010:b+0x1/0x2 [nvidia]"];
        assert_eq!(told(&[one, other].concat()).len(), 1);
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(texts in prop::collection::vec("(Oops: |RIP: 0010:|pc : )?[a-z+0-9x\\[\\]? ]{0,30}", 0..9)) {
            let records: Vec<Record> = texts.into_iter().map(|text| Record { seconds: 0, text }).collect();
            findings(&records);
        }
    }
}
