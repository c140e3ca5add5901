// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! MIG, virtual GPUs and persistence mode, from NVML.

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::host::nvml;
use crate::host::nvml::Virtualization;
use crate::software::Module;

check! {
    "gpu-mode": "MIG, virtual GPUs, persistence mode (NVML)",
    applies, check, OfSoftware(tests::FAULTS)
}

/// Returns each GPU that NVML knows, NVML's report, and `true` if the GPU has BAR1 and is not
/// coherent. The check `bar1` reports a GPU without BAR1.
pub(super) fn known<'a>(scan: &'a Scan<'_>) -> Vec<(Subject, &'a nvml::GpuReport, bool)> {
    let nvml = scan.software().nvml.as_ref().ok();
    let of = |gpu: &crate::machine::Gpu| {
        let said = nvml?.gpu(gpu.at)?;
        let function = scan.machine.functions.get(&gpu.at);
        let lacks = gpu.bar1.is_none() && function.is_some_and(|function| function.bars.is_ok());
        Some((Subject::gpu(gpu), said, !gpu.is_coherent && !lacks))
    };
    scan.gpus().filter_map(of).collect()
}

/// Returns `true` if NVML knows a GPU. The check `nvidia-driver` reports an NVML that does not
/// answer.
pub(super) fn applies(scan: &Scan<'_>) -> bool {
    !known(scan).is_empty()
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let persistent = Module::parameter(scan.host, "persistent_api_support");
    let pins = match persistent.as_deref() {
        Ok("0") => "persistent_api_support=0 is set, so the module first asks for pins that are not persistent",
        _ => "if registrations are refused (pin_unsupported), load the module with persistent_api_support=0",
    };
    for (subject, gpu, _) in known(scan) {
        let note = |text: &str| subject.clone().note(text);
        if gpu.mig == Some(true) {
            findings.push(
                note("MIG is on")
                    .why(
                        "the header of NVIDIA's interface (nv-p2p.h) says that persistent pins, the module's default, \
                        are not supported on MIG; drivers since 555 have code for persistent pins on MIG",
                    )
                    .fix(pins),
            );
        }
        match gpu.virtualization {
            Some(Virtualization::Vgpu) => findings.push(
                note("this is a virtual GPU")
                    .why(
                        "memory can be pinned if the vGPU's profile on the host allows RDMA; according to nv-p2p.h, \
                        persistent pins, the module's default, are not supported",
                    )
                    .fix(pins),
            ),
            Some(Virtualization::HostVgpu | Virtualization::HostVsga) => findings.push(
                note("this GPU is shared between virtual machines").why("registrations on the host use up the \
                    virtual machines' BAR1"),
            ),
            _ => {}
        }
        if gpu.persistence_mode == Some(false) {
            findings.push(
                note("persistence mode is off")
                    .why("the driver stops the GPU when its last user exits, and each start takes seconds")
                    .fix("`sudo systemctl enable --now nvidia-persistenced`"),
            );
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, gpu};
    use crate::host::nvml::Virtualization;

    faults! {
        "MIG", "note gpu-mode: …MIG is on" => |fixture| gpu(fixture, |gpu| gpu.mig = Some(true));
        "a virtual GPU", "note gpu-mode: …virtual GPU" => |fixture| {
            gpu(fixture, |gpu| {
                gpu.virtualization = Some(Virtualization::Vgpu);
            });
        };
        "no persistence mode", "note gpu-mode: …nvidia-persistenced" =>
            |fixture| gpu(fixture, |gpu| gpu.persistence_mode = Some(false));
    }
}
