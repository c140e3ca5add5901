// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Removal of identifying data from a recording.
//!
//! Secrets are removed in two ways. [`part_of`] keeps only known useful lines of files with
//! arbitrary contents. [`PATTERNS`] replaces identifying text everywhere. Names that people chose,
//! for example names of network interfaces, stay. Senders should therefore read a recording before
//! they send it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::dma_buf;
use crate::host::recording::{decode, encode, Recording};
use crate::host::{Fact, Host, Unseen};
use crate::machine::config::Config;
use crate::machine::data_direct;

/// Returns the names of this machine and of its users, which no entry of [`PATTERNS`] matches.
pub(super) fn names_of(host: &dyn Host) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in [
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/domainname",
        "/etc/hostname",
    ] {
        for word in host.text(file).unwrap_or_default().split_whitespace() {
            names.insert(word.to_owned());
            // `node17.example.com` is also known as `node17`.
            names.extend(word.split('.').next().map(str::to_owned));
        }
    }
    for line in host.text("/etc/passwd").unwrap_or_default().lines() {
        let mut fields = line.split(':');
        let (name, user) = (
            fields.next().unwrap_or_default(),
            fields.nth(1).unwrap_or_default(),
        );
        if !is_of_system(user) {
            names.insert(name.to_owned());
        }
    }
    // Shorter names would match everywhere, and common names identify nobody.
    names.retain(|name| name.len() > 2 && !COMMON.contains(&name.to_lowercase().as_str()));
    names
}

/// Names of users and hosts that are also ordinary words in the recorded files, or that a
/// distribution sets by default.
const COMMON: [&str; 18] = [
    "(none)",
    "amd",
    "debian",
    "gpu",
    "host",
    "infiniband",
    "intel",
    "iommu",
    "kernel",
    "linux",
    "localhost",
    "mellanox",
    "nobody",
    "nvidia",
    "pci",
    "rdma",
    "ubuntu",
    "user",
];

/// Returns `true` for the ID of a system user: below 1000, or 65534 (nobody).
fn is_of_system(user: &str) -> bool {
    user.parse::<u32>()
        .is_ok_and(|user| user < 1000 || user == 65_534)
}

/// Patterns of identifying text, and their replacements.
static PATTERNS: LazyLock<Vec<(Regex, &'static str)>> = LazyLock::new(|| {
    let patterns = [
        // UUIDs, with hyphens, or with underscores as in systemd's cgroup names of pods.
        (
            r"(?i)\b[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}\b",
            "00000000-0000-0000-0000-000000000000",
        ),
        // Hardware addresses of Ethernet (6 bytes) and InfiniBand (20 bytes), and GUIDs (8 bytes).
        (
            r"(?i)\b(?:[0-9a-f]{2}[:-]){5,19}[0-9a-f]{2}\b",
            "00:00:00:00:00:00",
        ),
        // GUIDs and GIDs in sysfs format, and IPv6 in full.
        (
            r"(?i)\b(?:[0-9a-f]{4}:){3,7}[0-9a-f]{4}\b",
            "0000:0000:0000:0000",
        ),
        (r"(?i)\b(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}\b", "::"),
        (
            r"(?i)(?:\b[0-9a-f]{1,4}:)*(?:\b[0-9a-f]{1,4})?::(?:[0-9a-f]{1,4}:)*[0-9a-f]{1,4}\b",
            "::",
        ),
        // IPv4, but not versions such as 5.8-1.1.2.1.
        (
            r"(?m)(^|[\s=/(\[,;\x22'@<>:])(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b",
            "${1}0.0.0.0",
        ),
        (
            r"(?i)\b(serial(?:[ _-]?(?:number|no))?|s/n|asset(?:[ _-]?tag)?)(\s*[:=]\s*|\s+)[^\s,;]+",
            "${1}${2}removed",
        ),
        // GUIDs that are written as one hexadecimal number.
        (r"(?i)\b(guid\s*[:=]?\s*)(?:0x)?[0-9a-f]{8,16}\b", "${1}0"),
        // Names of containers and images.
        (r"(?i)\b[0-9a-f]{40,64}\b", "removed"),
    ];
    patterns
        .into_iter()
        .filter_map(|(pattern, instead)| Some((Regex::new(pattern).ok()?, instead)))
        .collect()
});

/// Kernel parameters to keep. Other parameters may name disks, addresses and machines.
const PARAMETERS: [&str; 16] = [
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "arm-smmu",
    "pci=",
    "pcie_",
    "pcie_acs",
    "nvidia",
    "nouveau",
    "modprobe.",
    "module_blacklist",
    "module.",
    "lockdown",
    "hugepages",
    "debugfs",
    "numa",
];

/// Lines of the kernel log that contain one of these words are kept.
const LOG: [&str; 28] = [
    "nvidia",
    "nvrm",
    "nv_",
    "mlx",
    "bnxt",
    "irdma",
    "efa",
    "infiniband",
    "rdma",
    "ib_",
    "dmar",
    "iommu",
    "amd-vi",
    "pcieport",
    "aer:",
    "peer",
    "symbol",
    "key was rejected",
    "lockdown",
    // The following words occur in lines about BARs, and in crash reports and their call traces.
    ": bar ",
    "rip: 0010:",
    "pc : ",
    "+0x",
    "oops",
    "bug: ",
    "bug at",
    "general protection fault",
    "unable to handle",
];

/// Names of files that contain only an identity.
const IDENTITIES: [&str; 13] = [
    "node_guid",
    "sys_image_guid",
    "address",
    "permaddr",
    "broadcast",
    "serial",
    "serial_number",
    "uuid",
    "product_uuid",
    "product_serial",
    "board_serial",
    "chassis_serial",
    "environ",
];

/// Removes data that identifies the machine and its users.
pub(super) fn scrub(recording: &mut Recording, names: &BTreeSet<String>) {
    let own = own_names(names);
    let mut others = Others::default();
    let mut files = BTreeMap::new();
    for (path, text) in std::mem::take(&mut recording.files) {
        let text = scrub_file(&path, &text, &own, &mut others);
        files.insert(others.path(&path), text);
    }
    recording.files = files;

    let directories = std::mem::take(&mut recording.directories);
    recording.directories = directories
        .into_iter()
        .map(|(path, names)| {
            let inside = |name: String, others: &mut Others| {
                let whole = others.path(&format!("{}/{name}", path.trim_end_matches('/')));
                whole.rsplit('/').next().unwrap_or_default().to_owned()
            };
            let mut names: Vec<String> = names
                .into_iter()
                .map(|name| inside(name, &mut others))
                .collect();
            names.sort();
            names.dedup();
            (others.path(&path), names)
        })
        .collect();

    let links = std::mem::take(&mut recording.links);
    recording.links = links
        .into_iter()
        .map(|(path, says)| (others.path(&path), others.path(&says)))
        .collect();
    let there = std::mem::take(&mut recording.there);
    recording.there = there.iter().map(|path| others.path(path)).collect();
    for (fact, text) in &mut recording.facts {
        *text = match fact {
            Fact::KernelLog => text_of(&log_of(text), &own),
            _ => text_of(text, &own),
        };
    }
    let unseen = std::mem::take(&mut recording.unseen);
    recording.unseen = unseen
        .into_iter()
        .map(|(path, why)| {
            let why = match why {
                Unseen::Failed(text) => Unseen::Failed(text_of(&text, &own)),
                other => other,
            };
            (others.path(&path), why)
        })
        .collect();
}

/// Returns a pattern that matches the machine's own names as whole words.
fn own_names(names: &BTreeSet<String>) -> Option<Regex> {
    if names.is_empty() {
        return None;
    }
    // Longest first: `node17.example.com` before `node17`.
    let mut names: Vec<&String> = names.iter().collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    let any: Vec<String> = names.iter().map(|name| regex::escape(name)).collect();
    Regex::new(&format!(r"\b(?:{})\b", any.join("|"))).ok()
}

/// Replaces identifying text.
fn text_of(text: &str, own: &Option<Regex>) -> String {
    let mut text = text.to_owned();
    for (pattern, instead) in PATTERNS.iter() {
        if let std::borrow::Cow::Owned(changed) = pattern.replace_all(&text, *instead) {
            text = changed;
        }
    }
    match own {
        Some(own) => own.replace_all(&text, "removed").into_owned(),
        None => text,
    }
}

/// Replacement names. The same name always gets the same replacement.
#[derive(Default)]
struct Others {
    groups: BTreeMap<String, String>,
    commands: BTreeMap<String, String>,
    chips: BTreeMap<String, String>,
}

/// Returns the replacement of a name: `kind` and a number.
fn replacement(known: &mut BTreeMap<String, String>, name: &str, kind: &str) -> String {
    let next = format!("{kind}{}", known.len().saturating_add(1));
    known.entry(name.to_owned()).or_insert(next).clone()
}

impl Others {
    /// Replaces the name of a control group, which may name a user, job or container.
    fn group(&mut self, name: &str) -> String {
        const KNOWN: [&str; 4] = ["system.slice", "user.slice", "init.scope", ""];
        // Names that start with `rdma.` or `cgroup.` are files of the kernel.
        if KNOWN.contains(&name) || name.starts_with("rdma.") || name.starts_with("cgroup.") {
            return name.to_owned();
        }
        // `doctor` recognises containers and jobs by these words.
        const SIGNS: [&str; 7] = [
            "kubepods",
            "cri-containerd",
            "crio-",
            "docker",
            "libpod",
            "lxc",
            "job_",
        ];
        let sign = SIGNS.iter().find(|sign| name.contains(**sign));
        let sign = sign.map_or(String::new(), |sign| format!("{sign}-"));
        replacement(&mut self.groups, name, &format!("{sign}group"))
    }

    /// Replaces the name of a process.
    fn command(&mut self, name: &str) -> String {
        replacement(&mut self.commands, name, "process")
    }

    /// Replaces the chip number in the VPD of a NIC.
    fn chip(&mut self, number: &str) -> String {
        replacement(&mut self.chips, number, "chip")
    }

    /// Replaces names in a path. Only paths below `/sys/fs/cgroup` contain names that people
    /// choose. The kernel chooses all other paths, even if a part equals a name of the machine.
    fn path(&mut self, path: &str) -> String {
        const GROUPS: &str = "/sys/fs/cgroup/";
        match path.split_once(GROUPS) {
            Some((before, below)) => {
                let names: Vec<String> = below.split('/').map(|name| self.group(name)).collect();
                format!("{before}{GROUPS}{}", names.join("/"))
            }
            None => text_of(path, &None),
        }
    }
}

/// Replaces the identifying contents of a file.
fn scrub_file(path: &str, text: &str, own: &Option<Regex>, others: &mut Others) -> String {
    let name = path.rsplit('/').next().unwrap_or_default();
    if path.contains("/gids/") {
        return gid_of(text);
    }
    if IDENTITIES.contains(&name) {
        return "removed\n".to_owned();
    }
    if name == "config" && path.contains("/pci") {
        return match decode(text) {
            // The serial number of a NIC is its hardware address.
            Ok(bytes) => encode(&Config(bytes).known()),
            Err(_) => String::new(),
        };
    }
    let Ok(bytes) = decode(text) else {
        return String::new();
    };
    if name == "vpd" {
        // The chip's number contains a hardware address. Readers of a recording only need to know
        // which functions share a chip.
        let chip = data_direct::v3(&bytes).map(|chip| others.chip(&chip));
        return encode(
            &chip
                .and_then(|chip| data_direct::vpd_of(&chip))
                .unwrap_or_default(),
        );
    }
    let Ok(text) = String::from_utf8(bytes) else {
        // No command reads any other binary file.
        return "removed\n".to_owned();
    };
    // In these files, four numbers with dots are a version. In all other files, they may be an IP
    // address.
    if matches!(name, "fw_ver" | "version" | "srcversion" | "hw_rev") {
        return text;
    }
    let part = part_of(path, name, &text, others);
    encode(text_of(part.as_deref().unwrap_or(&text), own).as_bytes())
}

/// Returns a GID of the same kind that identifies no machine.
fn gid_of(text: &str) -> String {
    let of_kind = match text.trim().parse::<Ipv6Addr>() {
        Ok(gid) if gid.is_unspecified() => "0000:0000:0000:0000:0000:0000:0000:0000",
        Ok(gid) if gid.is_unicast_link_local() => "fe80:0000:0000:0000:0000:0000:0000:0000",
        Ok(gid) if gid.to_ipv4_mapped().is_some() => "0000:0000:0000:0000:0000:ffff:0000:0000",
        // An address reserved for documentation.
        Ok(_) => "2001:0db8:0000:0000:0000:0000:0000:0000",
        Err(_) => "removed",
    };
    format!("{of_kind}\n")
}

/// Returns the part to keep of a file with arbitrary contents, or `None` to keep all.
fn part_of(path: &str, name: &str, text: &str, others: &mut Others) -> Option<String> {
    if path == "/proc/cmdline" {
        let words = text.split_whitespace();
        let kept: Vec<&str> = words
            .filter(|word| PARAMETERS.iter().any(|known| word.starts_with(known)))
            .collect();
        return Some(format!("{}\n", kept.join(" ")));
    }
    if path == "/etc/passwd" {
        let users = text.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, user) = (fields.next()?, fields.nth(1)?);
            let name = if is_of_system(user) {
                name.to_owned()
            } else {
                format!("user{user}")
            };
            Some(format!("{name}:x:{user}:{user}::/:\n"))
        });
        return Some(users.collect());
    }
    if path.starts_with("/proc/") && name == "cgroup" {
        let lines = text.lines().map(|line| {
            let (front, group) = line.rsplit_once(':').unwrap_or((line, ""));
            let names: Vec<String> = group.split('/').map(|name| others.group(name)).collect();
            format!("{front}:{}\n", names.join("/"))
        });
        return Some(lines.collect());
    }
    if path.starts_with("/proc/") && matches!(name, "comm" | "cmdline") {
        let command = text.trim_end().rsplit('/').next().unwrap_or_default();
        return Some(match name {
            "comm" => format!("{}\n", others.command(command)),
            _ => "removed\0".to_owned(),
        });
    }
    if path.starts_with("/proc/") && name == "status" {
        let kept = text.lines().filter(|line| {
            ["Tgid:", "Uid:", "NSpid:", "CapEff:"]
                .iter()
                .any(|key| line.starts_with(key))
        });
        return Some(kept.map(|line| format!("{line}\n")).collect());
    }
    if path == dma_buf::FILE {
        return Some(dma_buf::without_names(text));
    }
    if path.contains("/nvidia_peermem/") {
        // In a line, the key `comm` is the last key, or only the key `text` follows.
        static COMM: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\bcomm=(\S*)").ok());
        let comm = COMM.as_ref()?;
        let renamed = comm.replace_all(text, |found: &Captures<'_>| {
            let name = found.get(1).map_or("", |name| name.as_str());
            format!("comm={}", others.command(name))
        });
        return Some(renamed.into_owned());
    }
    None
}

/// Keeps the lines of the kernel log that concern RDMA, GPUs, PCI and the IOMMU.
fn log_of(log: &str) -> String {
    let lines = log.lines().filter(|line| {
        let line = line.to_lowercase();
        LOG.iter().any(|word| line.contains(word))
    });
    lines.map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_pci_addresses_are_kept() {
        for text in [
            "0000:18:00.0",
            "MLNX_OFED_LINUX-5.8-1.1.2.1:",
            "28.39.1002",
            "0x0000380000000000 0x0000381fffffffff 0x000000000014220c",
            "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04",
            "6,1234,5678901,-;nvidia-peermem: refused 0x7f0000000000+0x100000 of process 4711",
        ] {
            assert_eq!(text_of(text, &None), text);
        }
    }
}
