// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPUs that PCI lists and NVML does not: nvidia.ko has such a GPU, and could not start it. In a container NVML lists what
//! the container may open, and no more.

use super::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::host::{Host, Seen};
use crate::machine::{Gpu, Machine};
use crate::nvml::Nvml;
use crate::process::FIRST_NAMESPACE;
use crate::render::counted;

/// The cgroup namespace that a machine boots with: `PROC_CGROUP_INIT_INO`.
const FIRST_CGROUPS: &str = "cgroup:[4026531835]";
/// Files and directories that container runtimes put there.
const MARKS: [&str; 4] = [
    "/.dockerenv",
    "/run/.containerenv",
    "/run/systemd/container",
    "/var/run/secrets/kubernetes.io",
];
/// Parts of a cgroup's path: containers, and jobs of Slurm's, which has the kernel deny them other GPUs.
const CGROUPS: [&str; 8] = [
    "/docker/",
    "docker-",
    "kubepods",
    "cri-containerd",
    "crio-",
    "libpod",
    "/lxc",
    "/job_",
];

/// Returns `true` if this process is seen to be in a container, or in a job whose devices are limited.
fn is_confined(host: &dyn Host) -> bool {
    let is_other = |link: &str, first: &str| host.link(link).is_ok_and(|says| says != first);
    let is_in_cgroup = |process: &str| {
        let path = host.text(&format!("/proc/{process}/cgroup"));
        path.is_ok_and(|path| CGROUPS.iter().any(|part| path.contains(part)))
    };
    // Container runtimes tell the first process.
    let of_first = host.matching("/proc/1/environ", "container=");
    let is_told = |variables: String| {
        let mut variables = variables.split(['\0', '\n']);
        variables.any(|variable| variable.starts_with("container="))
    };
    MARKS.iter().any(|mark| host.has(mark) == Ok(true))
        || is_other("/proc/self/ns/pid", FIRST_NAMESPACE)
        || is_other("/proc/self/ns/cgroup", FIRST_CGROUPS)
        || ["self", "1"].into_iter().any(is_in_cgroup)
        || of_first.is_ok_and(is_told)
}

/// Returns `true` if NVML may not list the GPU because this process may not open it.
pub(super) fn is_withheld(host: &dyn Host, gpu: &Gpu) -> bool {
    let has = |name: &str| host.has(&format!("/dev/nvidia{name}"));
    // A container has the device files of its GPUs, and that of the driver.
    let lacks_file = |minor: u32| has(&minor.to_string()) == Ok(false) && has("ctl") == Ok(true);
    is_confined(host) || gpu.minor.is_some_and(lacks_file)
}

/// Returns `true` if NVML answers and does not list the GPU. GPUs that are given to virtual machines are not NVML's.
pub(super) fn is_unlisted(machine: &Machine, nvml: &Seen<Nvml>, gpu: &Gpu) -> bool {
    let function = machine.functions.get(&gpu.at);
    let driver = function.and_then(|function| function.driver.as_deref());
    let lacks = nvml.as_ref().is_ok_and(|nvml| nvml.lacks(gpu.at));
    lacks && !gpu.is_stand_in && driver != Some("vfio-pci")
}

/// Reports a GPU that nvidia.ko has and NVML does not list. None: NVML lists it, or does not tell.
pub(super) fn unlisted(scan: &Scan<'_>, check: &'static str, gpu: &Gpu) -> Option<Finding> {
    let software = scan.software();
    if !is_unlisted(scan.machine, &software.nvml, gpu) {
        return None;
    }
    let at = gpu.at;
    let all = counted(scan.machine.gpus.len(), "GPU");
    let listed = software.nvml.as_ref().map_or(0, |nvml| nvml.gpus.len());
    let new = |level, found: String| Finding::new(check, level, Subject::gpu(gpu), found);
    if is_withheld(scan.host, gpu) {
        let found = format!("NVML does not list {at}: it has {listed} of the {all} on PCI");
        return Some(new(Level::Note, found).why(
            "In a container or a job NVML lists the GPUs that it may open. Whether nvidia.ko could start this one is seen \
             outside alone.",
        ));
    }
    // Where the device files are for some users alone, NVML lists none at all.
    if listed == 0 && software.is_root == Some(false) {
        let mut finding = new(
            Level::NotVisible,
            format!("NVML lists no GPU, {at} among them: not visible without root"),
        );
        finding.needs_root = true;
        return Some(finding);
    }
    let finding = new(
        Level::Fault,
        format!(
            "nvidia.ko has {at} and could not start it: NVML lists {listed} of the {all} on PCI"
        ),
    );
    let log = software.log.iter().flatten();
    let mut lines = log.map(|record| record.text.as_str());
    let names = format!("{at}");
    let line = lines.rfind(|line| line.contains(&names) && line.contains("RmInitAdapter failed"));
    let says = match line {
        Some(line) => format!(" The kernel's log: {line}"),
        None => String::new(),
    };
    Some(
        finding
            .why(format!(
                "CUDA does not see the GPU, and none of its memory can be registered.{says}"
            ))
            .fix(format!(
                "`dmesg | grep -e NVRM -e Xid -e {at}` says why; a cold boot, then its seating and power; if it comes \
                 again, another GPU"
            )),
    )
}
