// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The processes of a job, found by process ID or by the names in their control groups' paths.

use anyhow::bail;

use crate::args;
use crate::host::{Host, Seen, Unseen};
use crate::process;

/// Identity of a process. A later process with the same ID has another identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) pid: u32,
    /// Start time, field 22 of `/proc/PID/stat`, unchanged.
    start: Option<String>,
}

impl Identity {
    pub(super) fn of(host: &dyn Host, pid: u32) -> Seen<Self> {
        let stat = host.text(&format!("/proc/{pid}/stat"));
        let stat = stat.map_err(|why| match why {
            // ESRCH: the process ended between the open and the read.
            Unseen::Failed(text) if text.contains("os error 3") => Unseen::Absent,
            why => why,
        })?;
        let start = process::start_ticks(&stat).map(str::to_owned);
        Ok(Self { pid, start })
    }

    /// Returns `true` if the process has ended, or if another process has its ID now.
    pub(super) fn has_ended(&self, host: &dyn Host) -> bool {
        match Self::of(host, self.pid) {
            Ok(now) => now != *self,
            Err(why) => why == Unseen::Absent,
        }
    }
}

/// Selection of processes by the path of their control group.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Group {
    /// This control group, and all control groups below it.
    Path(String),
    /// A Slurm job: a component `job_NUMBER`.
    Slurm(String),
    /// A pod: a component `podUID` (cgroupfs), or a component that ends with `-podUID.slice`
    /// (systemd).
    Pod(String),
}

impl Group {
    fn named(&self) -> String {
        match self {
            Self::Path(path) => format!("control group {path}"),
            Self::Slurm(job) => format!("Slurm job {job}"),
            Self::Pod(uid) => format!("pod {uid}"),
        }
    }

    /// Returns `true` if a control group belongs to the job.
    fn holds(&self, path: &str) -> bool {
        let mut names = path.split('/');
        match self {
            Self::Path(own) => {
                let below = path.strip_prefix(own.trim_end_matches('/'));
                below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
            }
            Self::Slurm(job) => names.any(|name| name.strip_prefix("job_") == Some(job)),
            Self::Pod(uid) => names.any(|name| {
                // systemd's names have `_` in place of `-`.
                let name = name.strip_suffix(".slice").unwrap_or(name);
                let of_pod = name
                    .strip_prefix("pod")
                    .or(name.split_once("-pod").map(|(_, behind)| behind));
                of_pod.is_some_and(|name| name.replace('_', "-") == *uid)
            }),
        }
    }
}

/// Returns the paths in a `/proc/PID/cgroup`: the path of cgroup version 2, and all paths of
/// version 1.
pub(super) fn groups(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

/// Returns the processes that the command line selects. Returns an error if no visible process
/// matches.
pub(super) fn find(host: &dyn Host, wanted: &args::Processes) -> anyhow::Result<Vec<u32>> {
    let group = match (&wanted.pid, &wanted.slurm, &wanted.pod, &wanted.cgroup) {
        (Some(pid), ..) => return Ok(vec![of_thread(host, *pid)?]),
        (_, Some(job), ..) => Group::Slurm(job.clone()),
        (_, _, Some(uid), _) => Group::Pod(uid.to_ascii_lowercase().replace('_', "-")),
        (_, _, _, Some(path)) => {
            let below = path.strip_prefix("/sys/fs/cgroup").unwrap_or(path);
            Group::Path(format!("/{}", below.trim_matches('/')))
        }
        _ => bail!("no process is named"),
    };
    let mut found = match host.processes() {
        Ok(all) => all,
        Err(why) => bail!("the processes of this machine: {why}"),
    };
    let mut denied = 0_usize;
    found.retain(|pid| match host.text(&format!("/proc/{pid}/cgroup")) {
        Ok(text) => groups(&text).any(|path| group.holds(path)),
        Err(Unseen::Denied) => {
            denied = denied.saturating_add(1);
            false
        }
        // The process has ended.
        Err(_) => false,
    });
    found.sort_unstable();
    let name = group.named();
    match (found.is_empty(), denied) {
        (true, 0) => bail!("no process that is visible here belongs to {name}"),
        (true, _) => bail!("no process that is visible without root belongs to {name}"),
        _ => Ok(found),
    }
}

/// Returns the process with this ID. For the ID of a thread, returns the thread's process.
fn of_thread(host: &dyn Host, pid: u32) -> anyhow::Result<u32> {
    match host.text(&format!("/proc/{pid}/status")) {
        Ok(status) => Ok(process::of_status(&status, pid)),
        Err(Unseen::Absent) => bail!("there is no process {pid}"),
        Err(Unseen::NotRecorded) => bail!(
            "the recording does not have process {pid}: `peermemctl record` keeps no maps and no environment; run this \
             command on the machine itself"
        ),
        Err(why) => bail!("process {pid}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_and_pods_by_the_names_of_their_groups() {
        let slurm = Group::Slurm("71".to_owned());
        assert!(slurm.holds("/system.slice/slurmstepd.scope/job_71/step_0/user/task_0"));
        assert!(slurm.holds("/slurm/uid_1000/job_71"));
        assert!(!slurm.holds("/system.slice/slurmstepd.scope/job_712/step_0"));
        let uid = "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0";
        let pod = Group::Pod(uid.to_owned());
        assert!(pod.holds(&format!("/kubepods/burstable/pod{uid}/1f2e")));
        assert!(pod.holds(
            "/kubepods.slice/kubepods-besteffort.slice/\
             kubepods-besteffort-pod0b1c2d3e_4f50_6172_8394_a5b6c7d8e9f0.slice/cri-containerd-1.scope"
        ));
        assert!(!pod.holds("/kubepods/burstable/pod0b1c2d3e"));
        let path = Group::Path("/user.slice/a".to_owned());
        assert!(path.holds("/user.slice/a") && path.holds("/user.slice/a/b"));
        assert!(!path.holds("/user.slice/ab"));
        assert!(Group::Path("/".to_owned()).holds("/user.slice"));
        let both: Vec<&str> = groups("12:memory:/a\n0::/b:c\nx\n").collect();
        assert_eq!(both, ["/a", "/b:c"]);
    }
}
