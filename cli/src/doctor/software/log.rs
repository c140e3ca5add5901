// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What the kernel's log says of the module, the driver, the GPUs and the NICs.
//!
//! The log is a ring: what is told is what it still holds. Lines about loading count only while the module is not
//! loaded ([`super::module`] tells those), lines about devices only for devices that were found, or that are gone.
//!
//! What takes more than one line to tell is in files of its own: [`super::xid`], [`super::oops`], [`super::pci_log`].

use std::collections::BTreeMap;

use super::{oops, pci_log, xid};
use crate::debugfs;
use crate::doctor::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::machine::pci::{Address, DEVICES};
use crate::shipped::reason::{Event, EventInfo, Severity};
use crate::software::log::{is_of_module, Record};

/// The check's name.
pub(super) const NAME: &str = "kernel-log";

/// A kind of line that is told.
struct Pattern {
    level: Level,
    matches: fn(&str) -> bool,
    /// Counts only for devices that the line names.
    of_device: bool,
    why: &'static str,
    fix: Option<&'static str>,
}

const PATTERNS: &[Pattern] = &[
    Pattern {
        level: Level::Warning,
        matches: |line| {
            let is_bad = |it: &&EventInfo| it.severity == Severity::Error;
            is_of_module(line) && Event::ALL.iter().filter(is_bad).any(|it| line.contains(it.message))
        },
        of_device: false,
        why: "nvidia.ko did not give back what the module asked it to",
        fix: None,
    },
    Pattern {
        level: Level::Warning,
        matches: |line| line.contains("ERROR detected invalid context"),
        of_device: false,
        why: "NVIDIA's module met memory that was freed while it was registered; NVIDIA calls it harmless, users saw \
        crashes after it (nv_peer_memory#120)",
        fix: Some("driver 560 or newer, whose module registers memory that cannot be revoked; or peermem-rs"),
    },
    Pattern {
        level: Level::Fault,
        // Not those that the driver calls Non-fatal.
        matches: |line| line.contains("SXid (PCI:") && line.contains(", Fatal,"),
        of_device: false,
        why: "a fatal error of an NVSwitch (SXid): GPUs lose their NVLinks to one another, and CUDA does not start on \
        them (error 802, \"system not yet initialized\") until the fabric manager has set the switches up again",
        fix: Some("`sudo systemctl status nvidia-fabricmanager` says whether it runs, and why not; end what uses the \
        GPUs, `sudo nvidia-smi --gpu-reset` for all GPUs and NVSwitches at once, `sudo systemctl restart \
        nvidia-fabricmanager`, or reboot; if it comes again, report it to the vendor with the line"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            (line.contains("DMAR:") && line.contains("fault addr"))
                || (line.contains("AMD-Vi:") && line.contains("IO_PAGE_FAULT"))
        },
        of_device: true,
        why: "the IOMMU stopped a transfer of this device: the bytes did not arrive, and mostly nobody was told",
        fix: Some("iommu=pt in the kernel's command line, if the machine may do without translation; else report \
        it with the line"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| line.contains("AER:") && line.contains("Uncorrect") && line.contains("error"),
        of_device: true,
        why: "PCIe lost a packet for good: transfers at that moment failed or hang",
        fix: Some("seating, risers and cables of the device; `dmesg | grep AER` has the kind of error"),
    },
    Pattern {
        level: Level::Note,
        matches: |line| line.contains("AER:") && line.contains("Corrected error"),
        of_device: true,
        why: "PCIe sent packets again; many such cost speed, and often come before worse",
        fix: Some("seating, risers and cables of the device, if their number grows"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            line.contains("mlx5_core")
                && [
                    "health compromised",
                    "Health issue observed",
                    "assert_var[",
                    "handling bad device",
                    "unrecoverable hardware error",
                    "Will cause a leak of a command resource",
                ]
                .iter()
                .any(|words| line.contains(words))
        },
        of_device: true,
        why: "the NIC's firmware reported trouble; queues and regions of that time may be gone",
        fix: Some("update the NIC's firmware (`mlxfwmanager`); report it to the vendor with the line if it comes \
        again"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            line.contains("mlx5_core")
                && line.contains(" failed, status ")
                // Queries, and registers that this function may not read: tools and exporters ask for both.
                && ![" ACCESS_REG(", " QUERY_"].iter().any(|words| line.contains(words))
        },
        of_device: true,
        why: "the NIC's firmware refused a command of the driver: the region, queue or other object that it was for was \
        not made or changed, and the program got an error",
        fix: Some("compare the time with that of the program's error; \"bad resource\" and \"limits exceeded\" mean that \
        the NIC has no more of these objects (`rdma resource show`); otherwise update the NIC's firmware \
        (`mlxfwmanager`), and report the syndrome to the vendor"),
    },
];

/// The devices that lines are heeded of, and what they are called.
pub(super) type Devices = BTreeMap<Address, Subject>;

/// Returns how often something is in the log, when it was there last, and its last line.
pub(super) fn seen(count: u64, last: &Record) -> String {
    let times = match count {
        1 => "once".to_owned(),
        count => format!("{count} times, the last"),
    };
    format!("{times} {} s after boot: {}", last.seconds, last.text)
}

/// The PCI addresses that a line names.
pub(super) fn addresses(line: &str) -> Vec<Address> {
    // NVIDIA writes `PCI:0000:3b:00`, without a function, and old drivers leave out `PCI:`.
    let nvidias = line.split_once("Xid (").and_then(|(_, rest)| {
        let (at, _) = rest.split_once(')')?;
        format!("{}.0", at.trim_start_matches("PCI:")).parse().ok()
    });
    let words = line.split(|character: char| {
        !(character.is_ascii_hexdigit() || character == ':' || character == '.')
    });
    words
        .map(|word| word.trim_matches([':', '.']))
        // A time of day, say, has no full stop behind two colons, and a version no colon.
        .filter(|word| word.contains(':') && word.contains('.'))
        .filter_map(|word| word.parse().ok())
        .chain(nvidias)
        .collect()
}

/// Returns the devices that lines are heeded of.
fn devices(scan: &Scan<'_>) -> Devices {
    let mut devices = BTreeMap::new();
    for pair in scan.pairs() {
        for at in &pair.bridges {
            devices.insert(*at, Subject::pair(pair));
        }
    }
    for hca in scan.hcas() {
        for at in hca.functions() {
            devices.insert(at, Subject::hca(hca));
        }
    }
    for gpu in scan.gpus() {
        devices.insert(gpu.at, Subject::gpu(gpu));
    }
    devices
}

/// Returns `true` if a line of a NIC's driver is about a function that is gone from PCI.
fn is_of_gone(scan: &Scan<'_>, line: &str) -> bool {
    let is_gone = |at: &Address| scan.host.has(&format!("{DEVICES}/{at}")) == Ok(false);
    line.contains("mlx5_core ") && addresses(line).first().is_some_and(is_gone)
}

/// Lines of one kind about one subject.
struct Seen<'a> {
    count: u64,
    last: &'a Record,
}

pub(super) fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let records = match &scan.software().log {
        Ok(records) => records,
        Err(why) => {
            return vec![Scan::unseen(
                NAME,
                Subject::Machine,
                "the kernel's log (/dev/kmsg)",
                why,
            )]
        }
    };
    let devices = devices(scan);
    let mut seen: BTreeMap<(usize, Subject), Seen<'_>> = BTreeMap::new();
    // What the module counts it tells better there, and since it was loaded.
    let has_counters = scan
        .host
        .text(&debugfs::path(scan.host, super::refusals::COUNTERS))
        .is_ok();
    for record in records {
        if has_counters && is_of_module(&record.text) {
            continue;
        }
        for (index, pattern) in PATTERNS.iter().enumerate() {
            if !(pattern.matches)(&record.text) {
                continue;
            }
            let subject = match pattern.of_device {
                true => addresses(&record.text)
                    .iter()
                    // Who reports an error comes first, whose it is last.
                    .rev()
                    .find_map(|at| devices.get(at).cloned())
                    .or_else(|| is_of_gone(scan, &record.text).then_some(Subject::Machine)),
                false => Some(Subject::Machine),
            };
            let Some(subject) = subject else {
                continue;
            };
            let entry = seen.entry((index, subject)).or_insert(Seen {
                count: 0,
                last: record,
            });
            entry.count = entry.count.saturating_add(1);
            entry.last = record;
        }
    }
    let reported = seen.into_iter().filter_map(|((index, subject), seen)| {
        let pattern = PATTERNS.get(index)?;
        let found = self::seen(seen.count, seen.last);
        let mut finding = Finding::new(NAME, pattern.level, subject, found).why(pattern.why);
        finding.fix = pattern.fix.map(str::to_owned);
        Some(finding)
    });
    let mut findings = xid::findings(scan, records);
    findings.extend(oops::findings(records));
    findings.extend(pci_log::findings(scan, &devices, records));
    findings.extend(reported);
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn devices_that_lines_name() {
        let named = |line: &str| -> Vec<String> {
            addresses(line).iter().map(Address::to_string).collect()
        };
        assert_eq!(
            named("DMAR: [DMA Write NO_PASID] Request device [0000:3b:00.0] fault addr 0x3f8000000000 [fault reason \
            0x05] PTE Write"),
            ["0000:3b:00.0"]
        );
        assert_eq!(
            named("DMAR: [DMA Write] Request device [3b:00.0] fault addr ff000 [fault reason 05]"),
            ["0000:3b:00.0"]
        );
        assert_eq!(
            named("mlx5_core 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x1 \
            flags=0x0030]"),
            ["0000:41:00.0"]
        );
        assert_eq!(
            named("AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:41:00.1 domain=0x0021 address=0x1 flags=0x0030]"),
            ["0000:41:00.1"]
        );
        assert_eq!(
            named("pcieport 0000:17:00.0: AER: Corrected error message received from 0000:18:00.0"),
            ["0000:17:00.0", "0000:18:00.0"]
        );
        assert_eq!(
            named("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
            ["0000:3b:00.0"]
        );
        assert_eq!(named("NVRM: Xid (0000:3b:00): 79, pid=1"), ["0000:3b:00.0"]);
        assert_eq!(
            named("NVRM: BAR1 is 0M @ 0x0 (PCI:0000:3b:00.0)"),
            ["0000:3b:00.0"]
        );
        assert_eq!(named("at 12:34:56 version 1.2.3"), [""; 0]);
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(text in any::<String>(), log in "([0-9]{0,3},){0,4}[-;a-z:.()0-9PCI]{0,80}") {
            for text in [&text, &log] {
                addresses(text);
                for pattern in PATTERNS {
                    (pattern.matches)(text);
                }
            }
        }
    }
}
