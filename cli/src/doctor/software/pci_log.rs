// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI faults in the kernel log: BARs without an address, and links that went down.
//!
//! A later line may end the fault: the kernel assigns an address at a second attempt, or the link
//! comes up again.

use std::collections::BTreeMap;

use crate::doctor::scan::{Devices, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::machine::pci;
use crate::machine::pci::Address;
use crate::software::log::{addresses, counted, Record};

const NO_PLACE: &str =
    "the firmware gave the device no address space of that size: a BAR without an address cannot \
be reached over PCIe";
const PLACE: &str = "in the firmware's setup: Above 4G Decoding, Resizable BAR, a larger MMIO window; or boot with \
pci=realloc; in a virtual machine: UEFI firmware, and a larger 64-bit window for PCI";

/// Result of the kernel's attempt to give a BAR an address, from a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    None,
    Given,
}

/// Returns the number of the BAR that a line names, and the result of the attempt. Skips option
/// ROMs, I/O ports and BARs of virtual functions, because no transfer uses them.
fn bar(text: &str) -> Option<(u32, Place)> {
    let (front, rest) = text.split_once("BAR ")?;
    if front.ends_with("VF ") || text.contains("[io ") {
        return None;
    }
    let number = rest.get(..1)?.parse().ok().filter(|bar| *bar <= 5)?;
    // BAR 10, for example, belongs to a virtual function.
    if rest.get(1..2)?.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let has = |words: &[&str]| words.iter().any(|words| rest.contains(words));
    if has(&[
        "no space for",
        "can't assign; no space",
        "failed to assign",
        "can't claim",
        "can't assign; bogus",
    ]) {
        Some((number, Place::None))
    } else if has(&["]: assigned", ": assigned ["]) {
        Some((number, Place::Given))
    } else {
        None
    }
}

/// Returns `true` for NVRM's line about an unusable BAR: `NVRM: BAR1 is 0M @ 0x0
/// (PCI:0000:19:00.0)`.
fn is_nvrms(text: &str) -> bool {
    text.split_once("NVRM: BAR").is_some_and(|(_, rest)| {
        let rest = rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
        rest.starts_with(" is ") && rest.contains("M @ 0x")
    })
}

/// Returns findings about BARs without an address.
fn bars(scan: &Scan<'_>, devices: &Devices, records: &[Record]) -> Vec<Finding> {
    let mut without: BTreeMap<(Subject, Option<Address>, u32), Vec<&Record>> = BTreeMap::new();
    for record in records {
        let named = addresses(&record.text);
        let known = named
            .iter()
            .find_map(|at| Some((*at, devices.get(at)?.clone())));
        if is_nvrms(&record.text) {
            let (at, subject) = match known {
                Some((at, subject)) => (Some(at), subject),
                None => (None, Subject::Machine),
            };
            let lines = without.entry((subject, at, u32::MAX)).or_default();
            lines.push(record);
            continue;
        }
        let (Some((at, subject)), Some((bar, place))) = (known, bar(&record.text)) else {
            continue;
        };
        let key = (subject, Some(at), bar);
        match place {
            Place::Given => drop(without.remove(&key)),
            Place::None => without.entry(key).or_default().push(record),
        }
    }
    // The check `bar1` reports GPUs without BAR1.
    let is_told = |at: &Option<Address>| {
        at.and_then(|at| scan.gpu(at))
            .is_some_and(|gpu| gpu.bar1.is_none())
    };
    without
        .into_iter()
        .filter(|((_, at, _), _)| !is_told(at))
        .map(|((subject, ..), lines)| subject.fault(counted(&lines)).why(NO_PLACE).fix(PLACE))
        .collect()
}

/// Event on the link below a port, from a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Down,
    Up,
    /// The device was powered off on request.
    Removed,
}

fn link(text: &str) -> Option<Link> {
    let has = |words: &str| text.contains(words);
    if has("DPC: containment event") {
        return Some(Link::Down);
    }
    if has("AER: device recovery successful") {
        return Some(Link::Up);
    }
    if !has("pciehp: Slot(") {
        return None;
    }
    if has("Link Down") || has("Card not present") {
        Some(Link::Down)
    } else if has("Link Up") || has("Card present") {
        Some(Link::Up)
    } else if has("owering off due to button press") {
        Some(Link::Removed)
    } else {
        None
    }
}

/// Returns the subject of a port: the pair with a path through the port. Returns the machine if no
/// GPU or NIC is below the port, but a bridge above the port leads to a GPU or NIC. Returns `None`
/// for any other port.
fn subject_of_port(scan: &Scan<'_>, devices: &Devices, port: Address) -> Option<Subject> {
    if let Some(subject) = devices.get(&port) {
        return Some(subject.clone());
    }
    let path = scan
        .host
        .resolved(&format!("{}/{port}", pci::DEVICES))
        .ok()?;
    let (_, way) = pci::way(&path)?;
    let is_empty = !scan
        .machine
        .functions
        .values()
        .any(|function| function.above.contains(&port));
    // All bridges of the scan are above a GPU or a NIC.
    let is_near = way
        .iter()
        .any(|above| *above != port && scan.machine.functions.contains_key(above));
    (is_empty && is_near).then_some(Subject::Machine)
}

/// State of the link below a port.
struct Seen<'a> {
    /// Lines about losses of the link.
    losses: Vec<&'a Record>,
    is_up: bool,
    is_wanted: bool,
}

/// Returns findings about links that went down.
fn links(scan: &Scan<'_>, devices: &Devices, records: &[Record]) -> Vec<Finding> {
    let mut ports: BTreeMap<Address, Seen<'_>> = BTreeMap::new();
    for record in records {
        let Some(link) = link(&record.text) else {
            continue;
        };
        let Some(port) = addresses(&record.text).into_iter().next() else {
            continue;
        };
        let seen = ports.entry(port).or_insert(Seen {
            losses: Vec::new(),
            is_up: true,
            is_wanted: false,
        });
        match link {
            Link::Removed => seen.is_wanted = true,
            Link::Up => (seen.is_up, seen.is_wanted) = (true, false),
            Link::Down if seen.is_wanted => {}
            Link::Down => {
                // A port reports one event in several lines.
                if seen.is_up {
                    seen.losses.push(record);
                }
                seen.is_up = false;
            }
        }
    }
    let mut findings = Vec::new();
    for (port, seen) in ports {
        if seen.losses.is_empty() {
            continue;
        }
        let Some(subject) = subject_of_port(scan, devices, port) else {
            continue;
        };
        let (level, state) = match seen.is_up {
            true => (Level::Warning, "The link came up again."),
            false => (
                Level::Fault,
                "The log does not say that the link came up again.",
            ),
        };
        findings.push(
            Finding::new(level, subject, counted(&seen.losses))
                .why(format!(
                    "the port cut off the device below it: transfers failed, and a driver rarely recovers from a lost \
                     link. {state}"
                ))
                .fix(
                    "reboot if the device is gone; check seating, riser, cable and power of the device; `dmesg | \
                     grep -e AER -e DPC -e pciehp` shows the earlier messages",
                ),
        );
    }
    findings
}

/// Returns findings about BARs without an address, and about links that went down.
pub(super) fn findings(scan: &Scan<'_>, devices: &Devices, records: &[Record]) -> Vec<Finding> {
    let mut findings = links(scan, devices, records);
    findings.extend(bars(scan, devices, records));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    use proptest::prelude::*;

    #[test]
    fn lines_about_bars() {
        for (line, expected) in [
            ("pci 0000:19:00.0: BAR 2: no space for [mem size 0x2000000000 64bit pref]", Some((2, Place::None))),
            ("pci 0000:19:00.0: BAR 2: failed to assign [mem size 0x2000000000 64bit pref]", Some((2, Place::None))),
            ("pci 0000:19:00.0: BAR 1 [mem size 0x10000000 64bit pref]: can't assign; no space", Some((1, Place::None))),
            ("pci 0000:19:00.0: BAR 2 [mem size 0x2000000000 64bit pref]: failed to assign", Some((2, Place::None))),
            ("pci 0000:19:00.0: BAR 2: assigned [mem 0x380000000000-0x381fffffffff 64bit pref]", Some((2, Place::Given))),
            ("pci 0000:19:00.0: BAR 2 [mem 0x380000000000-0x381fffffffff 64bit pref]: assigned", Some((2, Place::Given))),
            // No transfer uses I/O ports, option ROMs, or BARs of virtual functions.
            ("pci 0000:19:00.0: BAR 5: no space for [io  size 0x0080]", None),
            ("pci 0000:19:00.0: BAR 6: no space for [mem size 0x00080000 pref]", None),
            ("pci 0000:19:00.0: BAR 10: no space for [mem size 0x00080000 pref]", None),
            ("pci 0000:19:00.0: VF BAR 0 [mem size 0x02000000 64bit pref]: can't assign; no space", None),
            ("pci 0000:19:00.0: ROM [mem size 0x00080000 pref]: can't assign; no space", None),
            ("pci 0000:19:00.0: BAR 0 [mem 0x90000000-0x90ffffff]", None),
            ("BAR ", None),
            ("BAR 1", None),
        ] {
            assert_eq!(bar(line), expected, "{line}");
        }
        assert!(is_nvrms("NVRM: BAR1 is 0M @ 0x0 (PCI:0000:19:00.0)"));
        assert!(is_nvrms("NVRM: BAR1 is 256M @ 0x0 (PCI:0000:19:00.0)"));
        assert!(!is_nvrms("NVRM: BAR1 is fine"));
    }

    #[test]
    fn lines_about_links() {
        for [line, expected] in testing::table(
            "pcieport 0000:17:01.0: DPC: containment event, status:0x1f01 source:0x0000 | Some(Down)
             pcieport 0000:17:01.0: pciehp: Slot(12): Link Down | Some(Down)
             pcieport 0000:17:01.0: pciehp: Slot(12): Card not present | Some(Down)
             pcieport 0000:17:01.0: pciehp: Slot(12): Link Up | Some(Up)
             pcieport 0000:17:01.0: AER: device recovery successful | Some(Up)
             pcieport 0000:17:01.0: pciehp: Slot(12): Powering off due to button press | Some(Removed)
             pcieport 0000:17:01.0: DPC: error containment capabilities: Int Msg #0 | None
             e1000e 0000:00:1f.6 eth0: NIC Link is Down | None",
        ) {
            assert_eq!(format!("{:?}", link(line)), expected, "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(text in any::<String>(), bars in "(NVRM: )?BAR ?[0-9]{0,3}.{0,20}") {
            for line in [&text, &bars] {
                bar(line);
                is_nvrms(line);
                link(line);
            }
        }
    }
}
