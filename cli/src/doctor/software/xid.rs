// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! NVIDIA's Xids in the kernel log: numbered reports of GPU errors by the driver.
//!
//! The level follows the column "Immediate Action" of NVIDIA's Xid catalog
//! (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>). An Xid that asks for a
//! reset or a reboot, or reports a lost GPU, is a fault. An Xid that asks for a restart of the
//! application, or for no action, causes no finding. Any other Xid is a warning. Xid 154 carries
//! its own action, one of NVML's `nvmlDeviceGpuRecoveryAction_t`.

use std::collections::BTreeMap;

use crate::doctor::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::software::log::{addresses, counted, Record};

/// Action that an Xid asks for, mildest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    /// No action, or a restart of the application.
    Nothing,
    /// An inspection by a person.
    Check,
    /// A reset of the GPU.
    Reset,
    /// A reboot of the machine.
    Reboot,
}

impl Action {
    fn level(self) -> Level {
        match self {
            Self::Nothing => Level::Ok,
            Self::Check => Level::Warning,
            Self::Reset | Self::Reboot => Level::Fault,
        }
    }
}

use Action::{Check, Nothing, Reboot, Reset};

/// Xid that reports a change of the action that the GPU needs.
const RECOVERY: u32 = 154;
/// Xid of a GPU that has fallen off the bus.
const OFF_THE_BUS: u32 = 79;

/// Returns `true` for an Xid that needs no action, or a restart of the application. Xid 45 follows
/// another Xid, or the early end of a process, for example by Ctrl-C.
fn is_quiet(number: u32) -> bool {
    matches!(
        number,
        8 | 11 | 13..=14 | 25 | 31..=32 | 37..=41 | 43..=45 | 60 | 66..=72 | 75..=77 | 80 | 82..=86
        | 88..=89 | 92..=94 | 96..=108 | 121 | 126..=135 | 137 | 139 | 141 | 152..=153 | 157 | 160..=162
    )
}

/// Table of Xids that need an action: first number, last number, action, and meaning. Any other Xid
/// needs an inspection by a person, except [`RECOVERY`] and the Xids of [`is_quiet`].
const CODES: &[(u32, u32, Action, &str)] = &[
    (46, 46, Reset, "the GPU stopped processing"),
    (48, 48, Reset, "an uncorrectable ECC error in the GPU's memory"),
    (54, 54, Check, "auxiliary power is not connected to the GPU's board"),
    (62, 62, Reset, "a microcontroller of the GPU halted"),
    (63, 63, Check, "the GPU found bad memory, and puts a spare row in its place at the next reset"),
    (64, 64, Reset, "bad memory of the GPU could not be remapped"),
    (74, 74, Check, "an NVLink of the GPU failed"),
    (78, 78, Check, "a virtual GPU did not start: the driver's or the GPU's firmware is not compatible"),
    (OFF_THE_BUS, OFF_THE_BUS, Reboot, "the GPU has fallen off the bus: nothing reaches it any more"),
    (95, 95, Reset, "an error in the GPU's memory was not contained, and may affect any application"),
    (109, 109, Reset, "the GPU did not switch contexts in time"),
    (110, 110, Reset, "a security fault of the GPU"),
    (119, 119, Reset, "the GPU's system processor (GSP) did not answer the driver: calls into nvidia.ko for this GPU hang or fail"),
    (120, 120, Reset, "the GPU's system processor (GSP) failed"),
    (136, 136, Reset, "an NVLink could not be trained"),
    (140, 140, Reset, "an uncorrectable ECC error in the GPU's memory, which could not be remapped"),
    (143, 143, Reset, "the GPU was not initialized"),
    (144, 150, Check, "an error on NVLink"),
    (151, 151, Reboot, "the keys of confidential computing could not be changed"),
    (155, 155, Reset, "an NVLink was taken down"),
    (156, 156, Reset, "a part of the GPU was retired, which takes effect at a reset"),
    (158, 158, Reset, "a fatal timeout of the GPU"),
    (159, 159, Check, "an error between the GPU and the processor (C2C)"),
    (167, 167, Check, "the GPU waited for PCIe until a timeout"),
    (169, 169, Check, "a microcontroller of the GPU halted"),
    // Xids 171 and 172 appear beside Xid 48.
    (171, 171, Reset, "an uncorrectable ECC error in the GPU's DRAM"),
    (172, 172, Reset, "an uncorrectable ECC error in the GPU's SRAM"),
];

/// Returns the action and the meaning of an Xid.
fn meaning(number: u32, text: &str) -> (Action, &'static str) {
    let known = CODES
        .iter()
        .find(|(first, last, ..)| (*first..=*last).contains(&number));
    match number {
        RECOVERY => recovery(text),
        _ if is_quiet(number) => (Nothing, ""),
        // NVIDIA's catalog asks for a reset if an Xid from 144 to 150 is fatal.
        144..=150 if text.contains(" Fatal ") => (Reset, "a fatal error on NVLink"),
        _ => known.map_or((Check, "an error of the GPU"), |row| (row.2, row.3)),
    }
}

/// Parses the action of Xid 154, as in `GPU recovery action changed from 0x0 (None) to 0x2 (Node
/// Reboot Required)`.
fn recovery(text: &str) -> (Action, &'static str) {
    let to = text.rsplit_once(" to 0x").map(|(_, to)| to);
    let digits = to.map(|to| {
        let end = to.find(|digit: char| !digit.is_ascii_hexdigit());
        to.get(..end.unwrap_or(to.len())).unwrap_or_default()
    });
    match digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()) {
        Some(0) => (Nothing, "the GPU needs nothing"),
        Some(1) => (Reset, "the GPU needs a reset"),
        Some(2 | 7) => (Reboot, "the GPU needs a reboot of the machine"),
        Some(3) => (Check, "the GPU's peer-to-peer traffic has to end"),
        Some(4) => (
            Reset,
            "the GPU needs a reset, after its peer-to-peer traffic has ended",
        ),
        Some(5) => (Check, "the IMEX domain of the GPU has to recover"),
        Some(6) => (Reset, "the GPU needs a reset of its PCIe bus"),
        _ => (
            Check,
            "the GPU needs an action that this program does not know",
        ),
    }
}

/// Parses the number of an Xid, as in `NVRM: Xid (PCI:0000:3b:00): 119, pid=4711, …`.
fn number(text: &str) -> Option<u32> {
    let (_, rest) = text.split_once("NVRM: Xid (")?;
    let (_, rest) = rest.split_once("): ")?;
    let end = rest.find(|digit: char| !digit.is_ascii_digit());
    rest.get(..end.unwrap_or(rest.len()))?.parse().ok()
}

/// Returns `true` if the driver reports a lost GPU without an Xid.
fn is_lost(text: &str) -> bool {
    text.contains("NVRM: GPU") && text.contains("has fallen off the bus")
}

/// Reports with the same Xid about one GPU.
struct Reports<'a> {
    number: u32,
    action: Action,
    what: &'static str,
    lines: Vec<&'a Record>,
}

/// Returns the subject of a line: the GPU, or the machine if the GPU is gone from PCI. Returns
/// `None` for a GPU that `--pair` excludes.
fn subject(scan: &Scan<'_>, text: &str) -> Option<Subject> {
    let at = addresses(text).into_iter().next();
    let Some(gpu) = at.and_then(|at| scan.gpu(at)) else {
        return Some(Subject::Machine);
    };
    let is_judged = scan.gpus().any(|judged| judged.at == gpu.at);
    is_judged.then(|| Subject::gpu(gpu))
}

/// Returns one finding for each GPU with an Xid that needs an action.
pub(super) fn findings(scan: &Scan<'_>, records: &[Record]) -> Vec<Finding> {
    let mut gpus: BTreeMap<Subject, Vec<Reports<'_>>> = BTreeMap::new();
    for record in records {
        let number = match number(&record.text) {
            Some(number) => number,
            None if is_lost(&record.text) => OFF_THE_BUS,
            None => continue,
        };
        let Some(subject) = subject(scan, &record.text) else {
            continue;
        };
        let of_gpu = gpus.entry(subject).or_default();
        let (action, what) = meaning(number, &record.text);
        if action == Nothing {
            // The driver says that the GPU needs no action any more. The earlier Xids are obsolete.
            if number == RECOVERY {
                of_gpu.clear();
            }
            continue;
        }
        match of_gpu.iter_mut().find(|seen| seen.number == number) {
            // The line about a lost GPU repeats the line of Xid 79.
            Some(_) if is_lost(&record.text) && self::number(&record.text).is_none() => {}
            Some(seen) => {
                seen.lines.push(record);
                if action >= seen.action {
                    (seen.action, seen.what) = (action, what);
                }
            }
            None => of_gpu.push(Reports {
                number,
                action,
                what,
                lines: vec![record],
            }),
        }
    }
    let mut findings: Vec<Finding> = gpus
        .into_iter()
        .filter_map(|(subject, reports)| finding(&subject, &reports))
        .collect();
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

/// Returns the finding for one GPU: the first Xid of the worst level, and all other Xids.
fn finding(subject: &Subject, reports: &[Reports<'_>]) -> Option<Finding> {
    let worst = reports.iter().map(|seen| seen.action).max()?;
    let level = worst.level();
    let mut of_level = reports.iter().filter(|seen| seen.action.level() == level);
    let cause = of_level
        .clone()
        .find(|seen| seen.number != RECOVERY)
        .or_else(|| of_level.next())?;
    let mut found = counted(&cause.lines);
    let others: Vec<String> = reports
        .iter()
        .filter(|seen| seen.number != cause.number)
        .map(|seen| format!("Xid {} ({})", seen.number, seen.what))
        .collect();
    if !others.is_empty() {
        found = format!("{found}; also {}", others.join(", "));
    }
    Some(
        Finding::new(level, subject.clone(), found)
            .why(format!("Xid {}: {}", cause.number, cause.what))
            .fix(fix(worst, cause.number, subject)),
    )
}

/// Returns the fix for the action that NVIDIA's catalog demands.
fn fix(action: Action, number: u32, subject: &Subject) -> String {
    let gpu = match subject {
        Subject::Gpu { gpu } => format!(" -i {gpu}"),
        _ => String::new(),
    };
    let reset = format!(
        "end the programs that use the GPU, then `sudo nvidia-smi --gpu-reset{gpu}` (with NVSwitches all GPUs at \
         once, without -i), or reboot"
    );
    match (action, number) {
        (Reboot, OFF_THE_BUS) => {
            "reboot; if it happens again, check power, seating and cooling of the GPU".to_owned()
        }
        (Reboot, _) => {
            "reboot; if it happens again, report it to the vendor with the log line".to_owned()
        }
        (Reset, 48 | 64 | 95 | 140 | 171 | 172) => format!(
            "{reset}; `nvidia-smi -q -d ECC,ROW_REMAPPER` says whether memory is worn out; if it is, replace the GPU"
        ),
        (Reset, _) => {
            format!("{reset}; if it happens again, update the driver, and report it to the vendor with the log line")
        }
        (_, 63) => format!("at the next opportunity {reset}; `nvidia-smi -q -d ROW_REMAPPER` shows what is pending"),
        (_, 74 | 144..=150) => "`nvidia-smi nvlink -e` counts the errors of each link; if it happens again, reset \
            the GPUs or reboot, and report it to the vendor"
            .to_owned(),
        _ => "look the number up in NVIDIA's Xid catalog \
            (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html)"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    use proptest::prelude::*;

    #[test]
    fn the_number_of_an_xid() {
        for [line, expected] in testing::table(
            "NVRM: Xid (PCI:0000:3b:00): 119, pid=4711, name=x, Timeout | Some(119)
             NVRM: Xid (PCI:0000:3b:00.0): 79, GPU has fallen off the bus. | Some(79)
             NVRM: Xid (0000:03:00): 31, Ch 00000006 | Some(31)
             NVRM: Xid (PCI:0000:3b:00): , x | None
             NVRM: Xid (PCI:0000:3b:00): 99999999999999, x | None
             nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 12 LTSSM Fault Up | None
             NVRM: loading NVIDIA UNIX Open Kernel Module | None",
        ) {
            assert_eq!(format!("{:?}", number(line)), expected, "{line}");
        }
    }

    #[test]
    fn each_number_is_in_one_row() {
        for (first, last, action, what) in CODES {
            assert!(first <= last && !what.is_empty(), "{first}");
            assert!(*action != Nothing, "{first}");
            assert!(!(*first..=*last).any(is_quiet), "{first}");
        }
        assert!(CODES.windows(2).all(|rows| rows[0].1 < rows[1].0));
    }

    #[test]
    fn actions_are_those_of_the_catalog() {
        let action = |number| meaning(number, "").0;
        for number in [
            46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158,
        ] {
            assert_eq!(action(number), Reset, "{number}");
        }
        for number in [79, 151] {
            assert_eq!(action(number), Reboot, "{number}");
        }
        for number in [8, 13, 31, 43, 45, 68, 72, 80, 94, 100, 121, 126, 137, 141] {
            assert_eq!(action(number), Nothing, "{number}");
        }
        for number in [1, 54, 61, 63, 74, 78, 142, 145, 159, 999] {
            assert_eq!(action(number), Check, "{number}");
        }
    }

    #[test]
    fn the_action_of_154() {
        let to = |to: &str| {
            let line = format!("154, GPU recovery action changed from 0x0 (None) to {to}");
            recovery(&line).0
        };
        assert_eq!(to("0x0 (None)"), Nothing);
        assert_eq!(to("0x1 (GPU Reset Required)"), Reset);
        assert_eq!(to("0x2 (Node Reboot Required)"), Reboot);
        assert_eq!(to("0x2 (OS Reboot)"), Reboot);
        assert_eq!(to("0x3 (Drain P2P)"), Check);
        assert_eq!(to("0x4 (Drain and Reset)"), Reset);
        assert_eq!(to("0x7"), Reboot);
        for odd in ["0xff (Other)", "0x", "nothing", "0x99999999999"] {
            assert_eq!(to(odd), Check, "{odd}");
        }
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(text in any::<String>(), digits in "[0-9a-f]{0,12}") {
            let xid = format!("NVRM: Xid (PCI:{text}): {digits}{text}");
            for line in [&text, &xid] {
                if let Some(number) = number(line) {
                    meaning(number, line);
                }
            }
            recovery(&format!(" to 0x{digits}{text}"));
        }
    }
}
