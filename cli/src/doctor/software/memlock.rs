// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Limits on locked memory.
//!
//! ib_core charges registered memory to `RLIMIT_MEMLOCK` before it asks any module. GPU memory that
//! is registered through nvidia_peermem is charged like host memory. A process with `CAP_IPC_LOCK`
//! is exempt. dma-buf is not charged (Linux 7.3, `drivers/infiniband/core/umem.c`).

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::{facts, field, Fact, Seen, Unseen};

check! {
    "memlock": "how much memory this shell and the jobs of batch systems and containers may lock",
    |scan| scan.has_both(), check, OfSoftware(tests::FAULTS)
}

/// `CAP_IPC_LOCK` in the masks of `/proc/PID/status`.
const IPC_LOCK: u64 = 1 << 14;
/// The first user namespace: the kernel's `PROC_USER_INIT_INO`.
const FIRST_USERS: &str = "user:[4026531837]";

/// Batch services, whose jobs cannot exceed the service's own limit. A container can have its own
/// limit: `--ulimit memlock=-1`.
const BATCH: [&str; 4] = ["pbs_mom", "sge_execd", "slurmd", "slurmstepd"];

/// Parses a limit in bytes. The greatest number means unlimited.
fn bytes(word: &str) -> Option<u64> {
    match word {
        "unlimited" => Some(u64::MAX),
        _ => word.parse().ok(),
    }
}

/// Parses the soft and hard limit, in bytes.
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

/// Returns the memory of the largest GPU in bytes, if known.
fn largest(scan: &Scan<'_>) -> Option<u64> {
    let nvml = scan.software().nvml.as_ref().ok();
    let of = |gpu: &crate::machine::Gpu| {
        nvml.and_then(|nvml| nvml.gpu(gpu.at)?.memory_total_bytes)
            .or(gpu.bar1.map(|bar| bar.size))
    };
    scan.gpus().filter_map(of).max()
}

/// Returns the charge for registering a GPU's memory with all RDMA devices, in bytes, and the
/// number of devices. Each device charges the full memory again.
fn with_all(scan: &Scan<'_>, memory: u64) -> (u64, u64) {
    let hcas = scan.machine.hcas.iter().filter(|hca| !hca.is_software);
    let count = u64::try_from(hcas.count()).unwrap_or(u64::MAX).max(1);
    (memory.saturating_mul(count), count)
}

/// Describes the memory that a process needs to lock, for a finding about a limit that is too low.
fn needed(memory: u64, (all, count): (u64, u64), limit: u64) -> String {
    match limit < memory {
        true => format!("a GPU has {}", said(memory)),
        false => format!(
            "a GPU's {} count as {} if {count} RDMA devices register them",
            said(memory),
            said(all)
        ),
    }
}

const WHY: &str = "ibv_reg_mr counts GPU memory like host memory against this limit, and fails with ENOMEM beyond it \
(\"Cannot allocate memory\"), before it asks any module";

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let Some(memory) = largest(scan) else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    findings.extend(of_process(scan, memory, "self", "this shell"));
    findings.extend(services(scan, memory));
    findings
}

/// Returns this check's finding about the process `pid`. Returns `None` if the check does not apply
/// to this machine.
pub(crate) fn memory_lock(scan: &Scan<'_>, pid: u32) -> Option<Finding> {
    let memory = largest(scan).filter(|_| (CHECK.applies)(scan))?;
    let finding = of_process(scan, memory, &pid.to_string(), "the process")?;
    let check = CHECK.name;
    Some(Finding { check, ..finding })
}

/// Compares a process's limit on locked memory with the memory of a GPU. The finding calls the
/// process `who`. The process `self` has the limits of the shell that started peermemctl.
fn of_process(scan: &Scan<'_>, memory: u64, process: &str, who: &str) -> Option<Finding> {
    let limit = match scan.host.text(&format!("/proc/{process}/limits")) {
        Ok(text) => text.lines().find_map(facts::memory_lock).and_then(limits),
        Err(why) => {
            let what = format!("the limit on locked memory (/proc/{process}/limits)");
            return Some(Scan::unseen(Subject::Machine, what, &why));
        }
    };
    let (soft, hard) = limit?;
    let capable = scan
        .host
        .text(&format!("/proc/{process}/status"))
        .ok()
        .and_then(|text| u64::from_str_radix(field(&text, "CapEff:")?, 16).ok())
        .is_some_and(|mask| mask & IPC_LOCK != 0);
    let capable = match capable.then(|| in_first_namespace(scan, process)) {
        None => false,
        Some(Ok(is_in)) => is_in,
        Some(Err(why)) => {
            let what = format!(
                "whether CAP_IPC_LOCK lifts the limit on locked memory, which depends on the user namespace \
                 (/proc/{process}/ns/user)"
            );
            return Some(Scan::unseen(Subject::Machine, what, &why));
        }
    };
    if capable {
        return Some(Subject::Machine.ok(format!(
            "{who} may lock {}, but is exempt from this limit (CAP_IPC_LOCK)",
            said(soft)
        )));
    }
    let (all, count) = with_all(scan, memory);
    if soft >= all {
        return Some(Subject::Machine.ok(format!("{who} may lock {}", said(soft))));
    }
    let found = format!(
        "{who} may lock {} (hard limit {}), and {}",
        said(soft),
        said(hard),
        needed(memory, (all, count), soft)
    );
    let fix = if hard >= all {
        "`ulimit -l unlimited` in the shell, or the value that the hard limit allows"
    } else {
        "\"* - memlock unlimited\" in /etc/security/limits.d/rdma.conf and a new login; in containers --ulimit \
        memlock=-1 or the capability IPC_LOCK"
    };
    Some(Subject::Machine.warning(found).why(WHY).fix(fix))
}

/// Returns `false` if a process is in another user namespace than the first. ib_core ignores the
/// capabilities of such a process.
fn in_first_namespace(scan: &Scan<'_>, process: &str) -> Seen<bool> {
    match scan.host.link(&format!("/proc/{process}/ns/user")) {
        Ok(namespace) => Ok(namespace == FIRST_USERS),
        // The kernel has no user namespaces.
        Err(Unseen::Absent) => Ok(true),
        Err(why) => Err(why),
    }
}

/// Compares the limits of services that start other processes with the memory of a GPU.
fn services(scan: &Scan<'_>, memory: u64) -> Vec<Finding> {
    let text = match scan.host.fact(Fact::Services) {
        Ok(text) => text,
        Err(Unseen::Absent) => return Vec::new(),
        Err(why) => {
            let what = "the limits of running services";
            return vec![Scan::unseen(Subject::Machine, what, &why)];
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
        let mut found = format!(
            "processes that {name} starts may lock {} at most",
            said(hard)
        );
        if hard >= memory {
            found = format!("{found}, and {}", needed(memory, of_all, hard));
        }
        let finding = Finding::new(level, Subject::Machine, found)
            .why(WHY)
            .fix(match is_batch {
                true if name.starts_with("slurm") => {
                    "LimitMEMLOCK=infinity in the service's unit (systemctl edit), and a restart of the service; jobs \
                    also take the limit of the shell that submits them, unless slurm.conf has \
                    PropagateResourceLimitsExcept=MEMLOCK"
                }
                true => "LimitMEMLOCK=infinity in the service's unit (systemctl edit), and a restart of the service",
                false => {
                    "for containers --ulimit memlock=-1 or the capability IPC_LOCK; or LimitMEMLOCK=infinity in the \
                    service's unit (systemctl edit), and a restart of the service"
                }
            });
        // A service may run a process for each job, and all these processes cause the same finding.
        if !findings.contains(&finding) {
            findings.push(finding);
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::no_panic;

    use super::super::tests::faults;
    use crate::fixture::software;
    use crate::host::Fact;

    faults! {
        "a shell that may lock little",
            "warning memlock: …may lock 8 MiB (hard limit 8 MiB), and a GPU has 81920 MiB" => |fixture| {
            fixture.file("/proc/self/limits", &software::limits("8388608"));
            fixture.file("/proc/self/status", "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n");
        };
        "a shell in a container without root that may lock little",
            "warning memlock: …may lock 8 MiB (hard limit 8 MiB)" => |fixture| {
            fixture.file("/proc/self/limits", &software::limits("8388608"));
            fixture.file("/proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n");
            fixture.link("/proc/self/ns/user", "user:[4026532500]");
        };
        "a batch system that may lock little",
            "warning memlock: …processes that slurmd starts may lock 8 MiB at most" =>
            |fixture| fixture.fact(Fact::Services, "slurmd 2201 8388608 8388608\nslurmd 2202 8388608 8388608\n");
        "containers that may lock little", "note memlock: …--ulimit memlock=-1" =>
            |fixture| fixture.fact(Fact::Services, "containerd 900 65536 8388608\n");
    }

    #[test]
    fn limits_as_proc_writes_them() {
        assert_eq!(limits("8388608    unlimited"), Some((8_388_608, u64::MAX)));
        assert_eq!(limits("? ?"), None);
        assert_eq!(limits("1"), None);
        assert_eq!(said(8_388_608), "8 MiB");
        assert_eq!(said(65_536), "64 KiB");
    }

    no_panic!(nothing_read_is_a_panic: limits);
}
