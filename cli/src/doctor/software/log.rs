// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What the kernel's log says of the module, the driver, the GPUs and the cards.
//!
//! The log is a ring: what is told is what it still holds. Lines about loading count only while the module is not
//! loaded
//! ([`super::module`] tells those), lines about devices only for devices that were found.

use std::collections::BTreeMap;

use crate::doctor::Look;
use crate::finding::Finding;
use crate::finding::Level;
use crate::finding::Subject;
use crate::machine::pci::Address;
use crate::shipped::refusal::Event;
use crate::shipped::refusal::Incident;
use crate::shipped::refusal::Severity;

/// The check's name.
pub(in crate::doctor) const NAME: &str = "kernel-log";

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::doctor) struct Record {
    /// Since boot, in seconds.
    pub(super) seconds: u64,
    pub(super) text: String,
}

/// The records of `/dev/kmsg`: `priority,sequence,microseconds,flags;text`.
pub(super) fn parse(text: &str) -> Vec<Record> {
    let record = |line: &str| {
        let (front, text) = line.split_once(';')?;
        let microseconds: u64 = front.split(',').nth(2)?.parse().ok()?;
        Some(Record {
            seconds: microseconds / 1_000_000,
            text: text.to_owned(),
        })
    };
    text.lines().filter_map(record).collect()
}

/// Whether a line is about the peer-memory module, its own or the kernel's about it.
fn is_of_module(line: &str) -> bool {
    line.starts_with("nvidia_peermem:") || line.starts_with("nvidia-peermem:")
}

/// Why the module was not loaded at the last try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotLoaded<'a> {
    pub(super) line: &'a str,
    pub(super) mend: &'static str,
}

/// In seconds: what belongs to one try.
const ONE_TRY: u64 = 2;

/// The line that tells it best: the kernel ends each of its own with "Unknown symbol".
pub(super) fn not_loaded(records: &[Record]) -> Option<NotLoaded<'_>> {
    let told =
        |record: &'_ Record| why_not_loaded(&record.text).map(|(rank, _)| (record.seconds, rank));
    let (last, _) = records.iter().rev().find_map(told)?;
    let of_last = records
        .iter()
        .filter(|record| record.seconds.saturating_add(ONE_TRY) >= last);
    let all = of_last.filter_map(|record| {
        let (rank, mend) = why_not_loaded(&record.text)?;
        Some((
            rank,
            NotLoaded {
                line: &record.text,
                mend,
            },
        ))
    });
    all.min_by_key(|(rank, _)| *rank).map(|(_, told)| told)
}

/// If the line is about what keeps the module from being loaded: how little it says, and what mends it.
fn why_not_loaded(line: &str) -> Option<(usize, &'static str)> {
    // These name no module.
    let unsigned = (line.contains("Loading of") && line.contains("is rejected"))
        || (line.contains("Lockdown:") && line.contains("unsigned module loading is restricted"));
    if unsigned {
        return Some((OF_LOADING.len(), UNSIGNED));
    }
    if !is_of_module(line) {
        return None;
    }
    let mut of_loading = OF_LOADING.iter().enumerate();
    let (rank, (_, mend)) = of_loading.find(|(_, (words, _))| line.contains(words))?;
    Some((rank, mend))
}

const UNSIGNED: &str =
    "if that was nvidia_peermem: sign it with a key that the machine knows (docs/install.md, \
Secure Boot)";

/// Words of such a line, and what mends it.
const OF_LOADING: [(&str, &str); 9] = [
    // Peer memory is in the one or in the other, and the second brings the first.
    ("no ib_core is", "`sudo modprobe ib_uverbs`, then `sudo modprobe nvidia-peermem`"),
    ("no ib_uverbs is", "`sudo modprobe ib_uverbs`, then `sudo modprobe nvidia-peermem`"),
    (
        "has no peer memory",
        "install MLNX_OFED or DOCA-OFED for this kernel and load its modules, then `sudo modprobe nvidia-peermem`",
    ),
    ("no nvidia.ko is", "`sudo modprobe nvidia`, then `sudo modprobe nvidia-peermem`"),
    (
        "proprietary",
        "install NVIDIA's open kernel modules (nvidia-open), or use NVIDIA's own nvidia-peermem",
    ),
    (
        "not loaded: nv_peer_mem is",
        "`rmmod nv_peer_mem`, remove its package (nvidia-peer-memory), `sudo modprobe nvidia-peermem`",
    ),
    (
        "disagrees about version of symbol",
        "ib_core or the driver was upgraded after it was built: build it again (peermem-rs: `dkms unbuild`, `dkms \
        install`; \
         NVIDIA's: install the driver again)",
    ),
    (
        "Unknown symbol",
        "ib_core or the driver was changed after it was built: build it again (peermem-rs: `dkms unbuild`, `dkms \
        install`; \
         NVIDIA's: install the driver again, after OFED)",
    ),
    ("not loaded:", "as it says; docs/observe.md has each of these lines"),
];

/// A kind of line that is told.
struct Pattern {
    level: Level,
    matches: fn(&str) -> bool,
    /// Counts only for devices that the line names.
    of_device: bool,
    why: &'static str,
    mend: Option<&'static str>,
}

const PATTERNS: &[Pattern] = &[
    Pattern {
        level: Level::Warning,
        matches: |line| {
            let is_bad = |it: &&Incident| it.severity == Severity::Error;
            is_of_module(line) && Event::ALL.iter().filter(is_bad).any(|it| line.contains(it.message))
        },
        of_device: false,
        why: "nvidia.ko did not give back what the module asked it to",
        mend: None,
    },
    Pattern {
        level: Level::Warning,
        matches: |line| line.contains("ERROR detected invalid context"),
        of_device: false,
        why: "NVIDIA's module met memory that was freed while it was registered; NVIDIA calls it harmless, users saw \
        crashes after \
              it (nv_peer_memory#120)",
        mend: Some("driver 560 or newer, whose module registers memory that cannot be revoked; or peermem-rs"),
    },
    Pattern {
        level: Level::Fault,
        matches: |line| line.contains("NVRM:") && line.contains("BAR1 is 0M"),
        of_device: false,
        why: "the firmware gave a GPU no address space for BAR1: nothing of its memory can be reached over PCIe",
        mend: Some("in the BIOS: Above 4G Decoding, Resizable BAR, a larger MMIO window; or boot with `pci=realloc`"),
    },
    Pattern {
        level: Level::Fault,
        matches: |line| line.contains("NVRM: Xid") && line.contains("): 79,"),
        of_device: true,
        why: "the GPU has fallen off the bus (Xid 79): nothing reaches it any more",
        mend: Some("reboot; if it comes again: power, seating, cooling of the GPU"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            (line.contains("DMAR:") && line.contains("fault addr"))
                || (line.contains("AMD-Vi:") && line.contains("IO_PAGE_FAULT"))
        },
        of_device: true,
        why: "the IOMMU stopped a transfer of this device: the bytes did not arrive, and mostly nobody was told",
        mend: Some("`iommu=pt` in the kernel's command line, if the machine may do without translation; else report \
        it with the line"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| line.contains("AER:") && line.contains("Uncorrect") && line.contains("error"),
        of_device: true,
        why: "PCIe lost a packet for good: transfers at that moment failed or hang",
        mend: Some("seating, risers and cables of the device; `dmesg | grep AER` has the kind of error"),
    },
    Pattern {
        level: Level::Note,
        matches: |line| line.contains("AER:") && line.contains("Corrected error"),
        of_device: true,
        why: "PCIe sent packets again; many such cost speed, and often come before worse",
        mend: Some("seating, risers and cables of the device, if their number grows"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            line.contains("mlx5_core")
                && ["health compromised", "Health issue observed", "assert_var[", "handling bad device"]
                    .iter()
                    .any(|words| line.contains(words))
        },
        of_device: true,
        why: "the card's firmware reported trouble; queues and regions of that time may be gone",
        mend: Some("update the card's firmware (`mlxfwmanager`); report it to the vendor with the line if it comes \
        again"),
    },
];

/// The PCI addresses that a line names.
fn addresses(line: &str) -> Vec<Address> {
    // NVIDIA writes `PCI:0000:3b:00`, without a function.
    let nvidias = line.split_once("(PCI:").and_then(|(_, rest)| {
        let (at, _) = rest.split_once(')')?;
        format!("{at}.0").parse().ok()
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

/// The devices that lines are heeded of, and what they are called.
fn devices(look: &Look<'_>) -> BTreeMap<Address, Subject> {
    let mut devices = BTreeMap::new();
    for pair in look.pairs() {
        for at in &pair.bridges {
            devices.insert(*at, Subject::pair(pair));
        }
    }
    for hca in look.hcas() {
        for at in hca.at.iter().chain(&hca.members) {
            devices.insert(*at, Subject::hca(hca));
        }
    }
    for gpu in look.gpus() {
        devices.insert(gpu.at, Subject::gpu(gpu));
    }
    devices
}

/// Lines of one kind about one subject.
struct Seen<'a> {
    count: u64,
    last: &'a Record,
}

pub(in crate::doctor) fn check(look: &Look<'_>) -> Vec<Finding> {
    if !look.has_both() {
        return Vec::new();
    }
    let records = match &look.software().log {
        Ok(records) => records,
        Err(why) => {
            return vec![Look::unseen(
                NAME,
                Subject::Machine,
                "the kernel's log (/dev/kmsg)",
                why,
            )]
        }
    };
    let devices = devices(look);
    let mut seen: BTreeMap<(usize, Subject), Seen<'_>> = BTreeMap::new();
    // What the module counts it tells better there, and since it was loaded.
    let has_counters = look.host.text(super::refusals::COUNTERS).is_ok();
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
                    .find_map(|at| devices.get(at).cloned()),
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
    let told = seen.into_iter().filter_map(|((index, subject), seen)| {
        let pattern = PATTERNS.get(index)?;
        let times = match seen.count {
            1 => "once".to_owned(),
            count => format!("{count} times, the last"),
        };
        let found = format!(
            "{times} {} s after boot: {}",
            seen.last.seconds, seen.last.text
        );
        let finding = Finding::new(NAME, pattern.level, subject, found).why(pattern.why);
        Some(match pattern.mend {
            Some(mend) => finding.mend(mend),
            None => finding,
        })
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn a_record_of_the_log() {
        let records = parse("6,339,5140900,-;NET: Registered\n SUBSYSTEM=x\n3,1,9,-;a;b\nx;y\n");
        assert_eq!(
            records,
            [
                Record {
                    seconds: 5,
                    text: "NET: Registered".to_owned()
                },
                Record {
                    seconds: 0,
                    text: "a;b".to_owned()
                },
            ]
        );
    }

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
        assert_eq!(named("at 12:34:56 version 1.2.3"), [""; 0]);
    }

    #[test]
    fn of_one_try_the_line_that_says_most() {
        let records = parse(
            "3,1,1000000,-;nvidia-peermem: not loaded: no ib_core is, and so there is no x\n\
             3,2,90000000,-;nvidia_peermem: module using GPL-only symbols uses symbols nvidia_p2p_put_pages from \
             proprietary module nvidia.\n\
             3,3,90000100,-;nvidia_peermem: Unknown symbol nvidia_p2p_put_pages (err -22)\n",
        );
        let told = not_loaded(&records).expect("it is told");
        assert!(told.line.contains("proprietary"), "{told:?}");
        assert_eq!(not_loaded(&[]), None);
    }

    #[test]
    fn why_it_was_not_loaded() {
        for line in [
            "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
            "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)",
            "nvidia_peermem: module using GPL-only symbols uses symbols nvidia_p2p_get_pages from proprietary module \
            nvidia.",
            "nvidia-peermem: not loaded: no ib_core is, and so there is no ib_register_peer_memory_client: modprobe \
            loads it first, insmod does not",
            "nvidia-peermem: not loaded: no ib_uverbs is, and OFED since 5.5 has peer memory there (no \
            ib_register_peer_memory_client): modprobe ib_uverbs, then this module again",
            "Loading of unsigned module is rejected",
            "Lockdown: modprobe: unsigned module loading is restricted; see man kernel_lockdown.7",
        ] {
            assert!(why_not_loaded(line).is_some(), "{line}");
        }
        for line in [
            "nvidia_peermem: loading out-of-tree module taints kernel.",
            "i915: disagrees about version of symbol drm_init",
            "nvidia-peermem: refused 0x7f+0x1 of process 1 in acquire: no room",
        ] {
            assert_eq!(why_not_loaded(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(text in any::<String>(), log in "([0-9]{0,3},){0,4}[-;a-z:.()0-9PCI]{0,80}") {
            for text in [&text, &log] {
                parse(text);
                addresses(text);
                why_not_loaded(text);
                for pattern in PATTERNS {
                    (pattern.matches)(text);
                }
            }
        }
    }
}
