// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The kernel log: its records, and why the module was not loaded.

use crate::machine::pci::Address;

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    /// Time in seconds since boot.
    pub(crate) seconds: u64,
    pub(crate) text: String,
}

/// Returns the number of similar lines, and the time and text of the last one.
pub(crate) fn counted(lines: &[&Record]) -> String {
    let (times, last) = match lines {
        [] => return String::new(),
        [once] => ("once".to_owned(), once),
        [.., last] => (format!("{} times, the last", lines.len()), last),
    };
    format!("{times} {} s after boot: {}", last.seconds, last.text)
}

/// Parses records of `/dev/kmsg`: `priority,sequence,microseconds,flags;text`.
pub(crate) fn parse(text: &str) -> Vec<Record> {
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

/// Returns the PCI addresses in a line.
pub(crate) fn addresses(line: &str) -> Vec<Address> {
    // NVIDIA writes `PCI:0000:3b:00`, without a function. Old drivers leave out `PCI:`.
    let nvidias = line.split_once("Xid (").and_then(|(_, rest)| {
        let (at, _) = rest.split_once(')')?;
        format!("{}.0", at.trim_start_matches("PCI:")).parse().ok()
    });
    let words = line.split(|character: char| {
        !(character.is_ascii_hexdigit() || character == ':' || character == '.')
    });
    words
        .map(|word| word.trim_matches([':', '.']))
        // A PCI address has a colon and a full stop. A time such as 12:34:56 has no full stop, and
        // a version has no colon.
        .filter(|word| word.contains(':') && word.contains('.'))
        .filter_map(|word| word.parse().ok())
        .chain(nvidias)
        .collect()
}

/// Returns `true` if a line is about the peer-memory module. The line may come from the module or
/// the kernel.
pub(crate) fn is_of_module(line: &str) -> bool {
    line.starts_with("nvidia_peermem:") || line.starts_with("nvidia-peermem:")
}

/// Reason why the last attempt to load the module failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotLoaded<'a> {
    pub(crate) line: &'a str,
    pub(crate) advice: &'static str,
    /// `true` if the module's file was the cause. The file may have been replaced since the
    /// attempt.
    pub(crate) is_of_file: bool,
}

/// Maximum time between lines from one attempt, in seconds.
const ONE_TRY: u64 = 2;

/// Returns the line that best explains why the last attempt failed. The last line of an attempt may
/// be "Unknown symbol", which explains less than the lines before.
pub(crate) fn not_loaded(records: &[Record]) -> Option<NotLoaded<'_>> {
    let reported =
        |record: &'_ Record| why_not_loaded(&record.text).map(|(rank, _)| (record.seconds, rank));
    let (last, _) = records.iter().rev().find_map(reported)?;
    let of_last = records
        .iter()
        .filter(|record| record.seconds.saturating_add(ONE_TRY) >= last);
    let all = of_last.filter_map(|record| {
        let (rank, advice) = why_not_loaded(&record.text)?;
        Some((
            rank,
            NotLoaded {
                line: &record.text,
                advice,
                is_of_file: OF_FILE.iter().any(|words| record.text.contains(words)),
            },
        ))
    });
    all.min_by_key(|(rank, _)| *rank)
        .map(|(_, reported)| reported)
}

/// Returns the rank of a line and the fix, if the line says why the module is not loaded. The line
/// with the lowest rank explains most.
fn why_not_loaded(line: &str) -> Option<(usize, &'static str)> {
    // The kernel's lines about unsigned modules do not name the module.
    let unsigned = (line.contains("Loading of") && line.contains("is rejected"))
        || (line.contains("Lockdown:") && line.contains("unsigned module loading is restricted"));
    if unsigned {
        return Some((OF_LOADING.len(), UNSIGNED));
    }
    // These two lines also appear when the module loads successfully. Linux logs the first line if
    // nvidia.ko is proprietary, and the module logs the second line in revocable mode.
    let is_loaded = ["inheriting taint", "revocable mode needs"].map(|words| line.contains(words));
    if !is_of_module(line) || is_loaded.contains(&true) {
        return None;
    }
    let mut of_loading = OF_LOADING.iter().enumerate();
    let (rank, (_, advice)) = of_loading.find(|(_, (words, _))| line.contains(words))?;
    Some((rank, advice))
}

const UNSIGNED: &str =
    "if that was nvidia_peermem: sign it with a key that the machine knows (docs/install.md, Secure Boot)";

const PROPRIETARY: &str =
    "build peermem-rs again beside this driver (x86-64), install NVIDIA's open kernel modules \
    (nvidia-open), or use NVIDIA's own nvidia-peermem";

/// Parts of log lines that report a fault of the module's file.
const OF_FILE: [&str; 2] = ["disagrees about version of symbol", "Unknown symbol"];

/// Parts of log lines about a failed load, each with the fix.
const OF_LOADING: [(&str, &str); 12] = [
    // Peer memory is in ib_core or in ib_uverbs, and ib_uverbs loads ib_core.
    ("ib_core is not loaded, and", "`sudo modprobe ib_uverbs`, then `sudo modprobe nvidia-peermem`"),
    ("ib_uverbs is not loaded, and", "`sudo modprobe ib_uverbs`, then `sudo modprobe nvidia-peermem`"),
    (
        "neither ib_core nor ib_uverbs is loaded with peer memory",
        "`sudo modprobe ib_uverbs`, then `sudo modprobe nvidia-peermem`; if that changes nothing, install MLNX_OFED \
        or DOCA-OFED for this kernel and load its modules",
    ),
    (
        "has no peer memory",
        "install MLNX_OFED or DOCA-OFED for this kernel and load its modules, then `sudo modprobe nvidia-peermem`",
    ),
    ("nvidia.ko is not loaded, and", "`sudo modprobe nvidia`, then `sudo modprobe nvidia-peermem`"),
    (
        "nvidia.ko is not loaded, or has no",
        "`sudo modprobe nvidia`, then `sudo modprobe nvidia-peermem`; if that changes nothing, install driver 535 or \
         newer",
    ),
    ("is the proprietary flavour", PROPRIETARY),
    ("from proprietary module", PROPRIETARY),
    (
        "not loaded: nv_peer_mem is",
        "`rmmod nv_peer_mem`, remove its package (nvidia-peer-memory), `sudo modprobe nvidia-peermem`",
    ),
    (
        OF_FILE[0],
        "ib_core or the driver was upgraded after it was built: build it again (peermem-rs: dkms unbuild, then \
        dkms install; NVIDIA's: install the driver again)",
    ),
    (
        OF_FILE[1],
        "ib_core or the driver was changed after it was built: build it again (peermem-rs: dkms unbuild, then \
        dkms install; NVIDIA's: install the driver again, after OFED)",
    ),
    ("not loaded:", "do what the line says; docs/observe.md explains each of these lines"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    use proptest::prelude::*;

    #[test]
    fn devices_that_lines_name() {
        for [line, named] in testing::table(
            "DMAR: [DMA Write NO_PASID] Request device [0000:3b:00.0] fault addr 0x3f8000000000 [fault reason 0x05] | 0000:3b:00.0
             DMAR: [DMA Write] Request device [3b:00.0] fault addr ff000 [fault reason 05] | 0000:3b:00.0
             mlx5_core 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x1 flags=0x0030] | 0000:41:00.0
             AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:41:00.1 domain=0x0021 address=0x1 flags=0x0030] | 0000:41:00.1
             pcieport 0000:17:00.0: AER: Corrected error message received from 0000:18:00.0 | 0000:17:00.0 0000:18:00.0
             NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus. | 0000:3b:00.0
             NVRM: Xid (0000:3b:00): 79, pid=1 | 0000:3b:00.0
             NVRM: BAR1 is 0M @ 0x0 (PCI:0000:3b:00.0) | 0000:3b:00.0
             at 12:34:56 version 1.2.3 | ",
        ) {
            let all: Vec<String> = addresses(line).iter().map(Address::to_string).collect();
            assert_eq!(all.join(" "), named, "{line}");
        }
    }

    #[test]
    fn a_record_of_the_log() {
        let records = parse("6,339,5140900,-;NET: Registered\n SUBSYSTEM=x\n3,1,9,-;a;b\nx;y\n");
        let records: Vec<(u64, &str)> = records
            .iter()
            .map(|one| (one.seconds, one.text.as_str()))
            .collect();
        assert_eq!(records, [(5, "NET: Registered"), (0, "a;b")]);
    }

    #[test]
    fn the_line_that_explains_most_is_reported() {
        let records = parse(
            "3,1,1000000,-;nvidia-peermem: not loaded: ib_core is not loaded, and so there is no x\n\
             3,2,90000000,-;nvidia_peermem: module using GPL-only symbols uses symbols nvidia_p2p_put_pages from \
             proprietary module nvidia.\n\
             3,3,90000100,-;nvidia_peermem: Unknown symbol nvidia_p2p_put_pages (err -22)\n",
        );
        let reported = not_loaded(&records).expect("it is told");
        assert!(reported.line.contains("proprietary"), "{reported:?}");
        assert_eq!(not_loaded(&[]), None);
    }

    #[test]
    fn why_it_was_not_loaded() {
        for line in [
            "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
            "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)",
            "nvidia_peermem: module using GPL-only symbols uses symbols nvidia_p2p_get_pages from proprietary module \
            nvidia.",
            "nvidia-peermem: not loaded: ib_core is not loaded, and so there is no ib_register_peer_memory_client: modprobe \
            loads it first, insmod does not",
            "nvidia-peermem: not loaded: ib_uverbs is not loaded, and OFED since 5.5 has peer memory there (no \
            ib_register_peer_memory_client): modprobe ib_uverbs, then this module again",
            "nvidia-peermem: not loaded: neither ib_core nor ib_uverbs is loaded with peer memory (no \
            ib_register_peer_memory_client): modprobe ib_uverbs, then this module again; or load the ib_core and ib_uverbs of \
            MLNX_OFED or DOCA-OFED",
            "nvidia-peermem: not loaded: nvidia.ko is not loaded, or has no nvidia_p2p_get_pages_persistent: modprobe nvidia, or \
            install driver 535 or newer",
            "Loading of unsigned module is rejected",
            "Lockdown: modprobe: unsigned module loading is restricted; see man kernel_lockdown.7",
        ] {
            let (rank, _) = why_not_loaded(line).expect(line);
            // The last entry matches any line about a failed load of the module.
            assert_ne!(rank, OF_LOADING.len() - 1, "{line}");
        }
        for line in [
            "nvidia_peermem: loading out-of-tree module taints kernel.",
            // Linux logs this line when it loads a module that uses symbols of the proprietary
            // nvidia.ko.
            "nvidia_peermem: module uses symbols nvidia_p2p_get_pages from proprietary module nvidia, inheriting taint.",
            "nvidia-peermem: revocable mode needs OFED 25.04 or newer, and this module, built for the proprietary nvidia.ko, cannot \
            see of which OFED ib_core is",
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
                why_not_loaded(text);
            }
        }
    }
}
