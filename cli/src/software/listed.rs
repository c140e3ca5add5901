// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPUs that PCI lists and NVML does not list. nvidia.ko is bound to such a GPU but could not start
//! the GPU. In a container, NVML lists only the GPUs that the container may open.

use crate::host::nvml::Nvml;
use crate::host::{Host, Seen};
use crate::machine::{Gpu, Machine};
use crate::process::FIRST_NAMESPACE;

/// Initial cgroup namespace: `PROC_CGROUP_INIT_INO`.
const FIRST_CGROUPS: &str = "cgroup:[4026531835]";
/// Files and directories that container runtimes create.
const MARKS: [&str; 4] = [
    "/.dockerenv",
    "/run/.containerenv",
    "/run/systemd/container",
    "/var/run/secrets/kubernetes.io",
];
/// Parts of the cgroup path of containers, and of Slurm's jobs. Slurm makes the kernel deny a job
/// access to GPUs that are not allocated to the job.
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

/// Returns `true` if this process is known to run in a container, or in a job with a limited set of
/// devices.
fn is_confined(host: &dyn Host) -> bool {
    let is_other = |link: &str, first: &str| host.link(link).is_ok_and(|says| says != first);
    let is_in_cgroup = |process: &str| {
        let path = host.text(&format!("/proc/{process}/cgroup"));
        path.is_ok_and(|path| CGROUPS.iter().any(|part| path.contains(part)))
    };
    // Container runtimes set this variable for the first process.
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

/// Returns `true` if NVML may omit the GPU because this process may not open it.
pub(crate) fn is_withheld(host: &dyn Host, gpu: &Gpu) -> bool {
    let has = |name: &str| host.has(&format!("/dev/nvidia{name}"));
    // A container has the device files of its GPUs, and the device file of the driver.
    let lacks_file = |minor: u32| has(&minor.to_string()) == Ok(false) && has("ctl") == Ok(true);
    is_confined(host) || gpu.minor.is_some_and(lacks_file)
}

/// Returns `true` if NVML answers and does not list the GPU. NVML never lists GPUs that are passed
/// to virtual machines.
pub(crate) fn is_unlisted(machine: &Machine, nvml: &Seen<Nvml>, gpu: &Gpu) -> bool {
    let function = machine.functions.get(&gpu.at);
    let driver = function.and_then(|function| function.driver.as_deref());
    let lacks = nvml.as_ref().is_ok_and(|nvml| nvml.lacks(gpu.at));
    lacks && !gpu.is_stand_in && driver != Some("vfio-pci")
}
