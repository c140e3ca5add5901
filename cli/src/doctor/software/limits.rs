// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! How much memory may be locked, and how many RDMA objects a cgroup may have.
//!
//! ib_core charges what is registered to RLIMIT_MEMLOCK, GPU memory by nvidia_peermem as memory of the host, before it
//! asks any module; who has CAP_IPC_LOCK is not held to it. dma-buf is not charged (Linux 7.3,
//! `drivers/infiniband/core/umem.c`).

use crate::doctor::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::host::{facts, Fact, Unseen};
use crate::shell::{argument, path_argument};

/// The checks' names.
pub(super) const MEMLOCK: &str = "memlock";
pub(super) const CGROUP: &str = "rdma-cgroup";

/// CAP_IPC_LOCK, in the masks of `/proc/self/status`.
const IPC_LOCK: u64 = 1 << 14;

/// Those whose jobs cannot have more than they. Containers can, by their own configuration: `--ulimit memlock=-1`.
const BATCH: [&str; 4] = ["pbs_mom", "sge_execd", "slurmd", "slurmstepd"];

/// A limit in bytes; the greatest number is none.
fn bytes(word: &str) -> Option<u64> {
    match word {
        "unlimited" => Some(u64::MAX),
        _ => word.parse().ok(),
    }
}

/// Soft and hard, in bytes.
fn limits(words: &str) -> Option<(u64, u64)> {
    let mut words = words.split_whitespace().map(bytes);
    Some((words.next()??, words.next()??))
}

fn said(limit: u64) -> String {
    match limit {
        u64::MAX => "unlimited".to_owned(),
        _ if limit < 1 << 20 => format!("{} KiB", limit >> 10),
        _ => format!("{} MiB", limit >> 20),
    }
}

/// The memory of the largest GPU, in bytes, as far as it can be known.
fn largest(scan: &Scan<'_>) -> Option<u64> {
    let nvml = scan.software().nvml.as_ref().ok();
    let of = |gpu: &crate::machine::Gpu| {
        nvml.and_then(|nvml| nvml.gpu(gpu.at)?.memory_total_bytes)
            .or(gpu.bar1.map(|bar| bar.size))
    };
    scan.gpus().filter_map(of).max()
}

/// Returns what a process locks that registers a GPU's memory with all RDMA devices, in bytes, and the number of
/// devices: each of them charges the memory once more.
fn with_all(scan: &Scan<'_>, memory: u64) -> (u64, u64) {
    let hcas = scan.machine.hcas.iter().filter(|hca| !hca.is_software);
    let count = u64::try_from(hcas.count()).unwrap_or(u64::MAX).max(1);
    (memory.saturating_mul(count), count)
}

/// Returns what a process needs, for a limit that is below it.
fn needed(memory: u64, (all, count): (u64, u64), limit: u64) -> String {
    match limit < memory {
        true => format!("a GPU has {}", said(memory)),
        false => format!(
            "a GPU's {} count {} when {count} RDMA devices register them",
            said(memory),
            said(all)
        ),
    }
}

const WHY: &str = "ibv_reg_mr charges what it registers to this limit, GPU memory as memory of the host, and fails \
with ENOMEM beyond it (\"Cannot allocate memory\"), before any module is asked";

pub(super) fn memlock(scan: &Scan<'_>) -> Vec<Finding> {
    let Some(memory) = largest(scan) else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    findings.extend(shell(scan, memory));
    findings.extend(services(scan, memory));
    findings
}

/// Of this process, and so of the shell that it was started from.
fn shell(scan: &Scan<'_>, memory: u64) -> Option<Finding> {
    let at = |level, text: String| Finding::new(MEMLOCK, level, Subject::Machine, text);
    let limit = match scan.host.text("/proc/self/limits") {
        Ok(text) => text.lines().find_map(facts::memory_lock).and_then(limits),
        Err(why) => {
            let what = "the limit on locked memory (/proc/self/limits)";
            return Some(Scan::unseen(MEMLOCK, Subject::Machine, what, &why));
        }
    };
    let (soft, hard) = limit?;
    let capable = scan
        .host
        .text("/proc/self/status")
        .ok()
        .and_then(|text| {
            let mask = text.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(mask.trim(), 16).ok()
        })
        .is_some_and(|mask| mask & IPC_LOCK != 0);
    if capable {
        return Some(at(
            Level::Ok,
            format!(
                "this shell may lock {}, and is not held to it (CAP_IPC_LOCK)",
                said(soft)
            ),
        ));
    }
    let (all, count) = with_all(scan, memory);
    if soft >= all {
        return Some(at(Level::Ok, format!("this shell may lock {}", said(soft))));
    }
    let found = format!(
        "this shell may lock {} (hard limit {}), and {}",
        said(soft),
        said(hard),
        needed(memory, (all, count), soft)
    );
    let fix = if hard >= all {
        "`ulimit -l unlimited` in the shell, or what the hard limit allows"
    } else {
        "\"* - memlock unlimited\" in /etc/security/limits.d/rdma.conf and a new login; in containers --ulimit \
        memlock=-1 or the capability IPC_LOCK"
    };
    Some(at(Level::Warning, found).why(WHY).fix(fix))
}

/// Of the services that start others.
fn services(scan: &Scan<'_>, memory: u64) -> Vec<Finding> {
    let text = match scan.host.fact(Fact::Services) {
        Ok(text) => text,
        Err(Unseen::Absent) => return Vec::new(),
        Err(why) => {
            let what = "the limits of running services";
            return vec![Scan::unseen(MEMLOCK, Subject::Machine, what, &why)];
        }
    };
    let of_all = with_all(scan, memory);
    let mut findings: Vec<Finding> = Vec::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let (Some(name), Some(_pid), Some(limit)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let Some((_, hard)) = limits(limit).filter(|(_, hard)| *hard < of_all.0) else {
            continue;
        };
        let is_batch = BATCH.contains(&name);
        let level = if is_batch {
            Level::Warning
        } else {
            Level::Note
        };
        let mut found = format!("what {name} starts may lock {} at most", said(hard));
        if hard >= memory {
            found = format!("{found}, and {}", needed(memory, of_all, hard));
        }
        let finding = Finding::new(MEMLOCK, level, Subject::Machine, found)
            .why(WHY)
            .fix(match is_batch {
                true if name.starts_with("slurm") => {
                    "LimitMEMLOCK=infinity in its unit (systemctl edit), and restart it; jobs also take the limit of the \
                    shell that submits them, unless slurm.conf has PropagateResourceLimitsExcept=MEMLOCK"
                }
                true => "LimitMEMLOCK=infinity in its unit (systemctl edit), and restart it",
                false => {
                    "for containers --ulimit memlock=-1 or the capability IPC_LOCK; or LimitMEMLOCK=infinity in its \
                    unit (systemctl edit), and restart it"
                }
            });
        // A process of it for each job.
        if !findings.contains(&finding) {
            findings.push(finding);
        }
    }
    findings
}

/// Of a line of `rdma.max` or `rdma.current`: the device, its handles, its objects. `max` is the greatest number.
fn rdma(line: &str) -> Option<(&str, u64, u64)> {
    let mut words = line.split_whitespace();
    let device = words.next()?;
    let (mut handles, mut objects) = (None, None);
    for word in words {
        let (key, value) = word.split_once('=')?;
        let value = match value {
            "max" => u64::MAX,
            _ => value.parse().ok()?,
        };
        match key {
            "hca_handle" => handles = Some(value),
            "hca_object" => objects = Some(value),
            _ => {}
        }
    }
    Some((device, handles?, objects?))
}

/// The folders of this process' cgroup with an RDMA controller, and of those above it.
fn cgroups(scan: &Scan<'_>) -> Vec<String> {
    let text = scan.host.text("/proc/self/cgroup").unwrap_or_default();
    let mut folders = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            _ if controllers.split(',').any(|name| name == "rdma") => "/sys/fs/cgroup/rdma",
            _ => continue,
        };
        // `/../..` is seen from inside a namespace of cgroups: what lies above is not visible.
        if path.split('/').any(|part| part == "..") {
            continue;
        }
        let mut path = path.trim_end_matches('/');
        while !path.is_empty() {
            folders.push(format!("{root}{path}"));
            path = path.rsplit_once('/').map_or("", |(above, _)| above);
        }
    }
    folders
}

pub(super) fn cgroup(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for folder in cgroups(scan) {
        let file = |name: &str| scan.host.text(&format!("{folder}/rdma.{name}"));
        let (Ok(most), Ok(current)) = (file("max"), file("current")) else {
            continue;
        };
        for (device, most_handles, most_objects) in most.lines().filter_map(rdma) {
            let Some((_, handles, objects)) = current
                .lines()
                .filter_map(rdma)
                .find(|(name, _, _)| *name == device)
            else {
                continue;
            };
            if !scan.machine.hcas.iter().any(|hca| hca.name == device) {
                continue;
            }
            for (what, now, most) in [
                ("handles", handles, most_handles),
                ("objects", objects, most_objects),
            ] {
                // Less than a tenth is left.
                if most == u64::MAX || now < most.saturating_sub(most / 10) {
                    continue;
                }
                let subject = Subject::Hca {
                    hca: device.to_owned(),
                };
                findings.push(
                    Finding::new(
                        CGROUP,
                        Level::Warning,
                        subject,
                        format!("the cgroup {folder} has {now} RDMA {what} of {most} that it may have"),
                    )
                    .why(
                        "an open device is a handle; a memory region, a queue pair, a completion queue each an \
                        object; beyond the limit making one fails with EAGAIN",
                    )
                    .fix(format!(
                        "`echo '{} hca_handle=max hca_object=max' | sudo tee {}/rdma.max`",
                        argument(device),
                        path_argument(&folder)
                    )),
                );
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn limits_as_proc_writes_them() {
        assert_eq!(limits("8388608    unlimited"), Some((8_388_608, u64::MAX)));
        assert_eq!(limits("? ?"), None);
        assert_eq!(limits("1"), None);
        assert_eq!(said(8_388_608), "8 MiB");
        assert_eq!(said(65_536), "64 KiB");
    }

    #[test]
    fn lines_of_the_rdma_controller() {
        assert_eq!(
            rdma("mlx5_0 hca_handle=2 hca_object=max"),
            Some(("mlx5_0", 2, u64::MAX))
        );
        assert_eq!(rdma("mlx5_0 hca_handle=2"), None);
        assert_eq!(rdma("mlx5_0 hca_handle"), None);
        assert_eq!(rdma(""), None);
    }

    proptest! {
        #[test]
        fn nothing_read_is_a_panic(text in any::<String>()) {
            limits(&text);
            rdma(&text);
        }
    }
}
