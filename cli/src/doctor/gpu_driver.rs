// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPUs that nvidia.ko is not bound to or could not start, and GPUs that do not answer.

use super::scan::{check, Scan};
use crate::finding::{argument, Finding, Subject};
use crate::machine::pci::Address;
use crate::machine::Gpu;
use crate::render::counted;
use crate::software::listed::{is_unlisted, is_withheld};

check! {
    "gpu-driver": "whether nvidia.ko drives each GPU and could start it, and whether the GPU answers and NVML lists \
        it",
    |scan| scan.has_gpu(), gpu_driver, OnPaths(tests::FAULTS)
}

fn gpu_driver(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for gpu in scan.gpus() {
        let Some(function) = scan.machine.functions.get(&gpu.at) else {
            continue;
        };
        let at = gpu.at;
        if function.is_silent() {
            findings.push(silent(Subject::gpu(gpu), at));
            continue;
        }
        findings.push(match function.driver.as_deref() {
            Some("nvidia") => unlisted(scan, gpu)
                .unwrap_or_else(|| Subject::gpu(gpu).ok(format!("nvidia.ko has {at}"))),
            Some("vfio-pci") => Subject::gpu(gpu).note(format!(
                "{at} is given to a virtual machine (vfio-pci)"
            ))
            .why("Only the virtual machine can use it: run peermemctl there."),
            Some(other) => Subject::gpu(gpu).fault(format!("{at} has the driver {other}"))
                .why("Only nvidia.ko gives RDMA access to GPU memory.")
                .fix(format!(
                    "Keep {0} from loading (blacklist {0} in /etc/modprobe.d), rebuild the initramfs, reboot; then \
                     `modprobe nvidia`",
                    argument(other)
                )),
            // The check `bar1` reports the missing addresses and gives the advice.
            None if !gpu.is_coherent && function.unassigned().next().is_some() => Subject::gpu(gpu).note(format!(
                "{at} has no driver, and BARs without an address"
            ))
            .why("nvidia.ko does not drive a GPU whose BARs have no address."),
            None => Subject::gpu(gpu).fault(format!("{at} has no driver"))
                .why("Only nvidia.ko gives RDMA access to GPU memory.")
                .fix("`modprobe nvidia`; `dmesg | grep NVRM` says why nvidia.ko does not drive the GPU"),
        });
    }
    findings
}

/// Reports a device on PCI that does not answer.
pub(super) fn silent(subject: Subject, at: Address) -> Finding {
    let found = format!("{at} does not answer: its config space reads as ones");
    subject.fault(found)
        .why("It has fallen off the bus, but is listed until the next boot. Nothing reaches it.")
        .fix(format!(
            "`dmesg | grep -e Xid -e {at}` says when it disappeared; do a cold boot, then check its seating and power"
        ))
}

/// Reports a GPU that is bound to nvidia.ko but not listed by NVML. Returns `None` if NVML lists
/// the GPU, or does not answer.
fn unlisted(scan: &Scan<'_>, gpu: &Gpu) -> Option<Finding> {
    let software = scan.software();
    if !is_unlisted(scan.machine, &software.nvml, gpu) {
        return None;
    }
    let at = gpu.at;
    let all = counted(scan.machine.gpus.len(), "GPU");
    let listed = software.nvml.as_ref().map_or(0, |nvml| nvml.gpus.len());
    if is_withheld(scan.host, gpu) {
        let found = format!("NVML does not list {at}: NVML has {listed} of the {all} on PCI");
        return Some(Subject::gpu(gpu).note(found).why(
            "In a container or a job, NVML lists only the GPUs that the process may open. To see whether nvidia.ko \
             could start this GPU, run peermemctl outside the container or job.",
        ));
    }
    // If this user may not open the device files, NVML lists no GPU at all.
    if listed == 0 && software.is_root == Some(false) {
        let mut finding = Subject::gpu(gpu).not_visible(format!(
            "NVML lists no GPU, not even {at}: not visible without root"
        ));
        finding.needs_root = true;
        return Some(finding);
    }
    let finding = Subject::gpu(gpu).fault(format!(
        "nvidia.ko is bound to {at}, but could not start it: NVML lists {listed} of the {all} on PCI"
    ));
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
                "`dmesg | grep -e NVRM -e Xid -e {at}` says why; do a cold boot, then check its seating and power; \
                 if it happens again, replace the GPU"
            )),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, FIRST};

    faults! {
        "a GPU without a driver", "fault gpu-driver: …0000:13:00.0 has no driver… fix …modprobe nvidia" =>
            |fixture| fixture.function(socket(FIRST).gpu).driver = None;
        "nouveau", "fault gpu-driver: …has the driver nouveau… fix …blacklist nouveau" =>
            |fixture| fixture.function(socket(FIRST).gpu).driver = Some("nouveau".to_owned());
    }
}
