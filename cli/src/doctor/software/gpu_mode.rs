// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What NVML tells of each GPU: how much of BAR1 is free, MIG, virtual GPUs, persistence mode.

use crate::doctor::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::nvml;
use crate::nvml::Virtualization;
use crate::software::Module;

/// The checks' names.
pub(super) const BAR1: &str = "bar1-free";
pub(super) const MODE: &str = "gpu-mode";

/// Of BAR1 nvidia.ko pins nothing in (`_isSpaceAvailableForBar1P2PMapping` of 595.45.04), in bytes.
const RESERVE: u64 = 36 << 20;

/// A share of BAR1, below which little is left.
const TENTH: u64 = 10;

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Each GPU that NVML knows, with what it says, and whether its memory is reached through BAR1. Processors share that of a
/// coherent one, and the check of BAR1 tells of one without.
fn known<'a>(scan: &'a Scan<'_>) -> Vec<(Subject, &'a nvml::Gpu, bool)> {
    let nvml = scan.software().nvml.as_ref().ok();
    let of = |gpu: &crate::machine::Gpu| {
        let said = nvml?.gpu(gpu.at)?;
        let function = scan.machine.functions.get(&gpu.at);
        let lacks = gpu.bar1.is_none() && function.is_some_and(|function| function.bars.is_ok());
        Some((Subject::gpu(gpu), said, !gpu.is_coherent && !lacks))
    };
    scan.gpus().filter_map(of).collect()
}

/// That NVML cannot be asked is told by the check of the driver.
pub(super) fn applies(scan: &Scan<'_>) -> bool {
    !known(scan).is_empty()
}

pub(super) fn bar1(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (subject, gpu, has_bar1) in known(scan) {
        let Some(bar1) = gpu.bar1.filter(|_| has_bar1) else {
            continue;
        };
        let usable = bar1.free_bytes.saturating_sub(RESERVE);
        let found = format!(
            "{} of {} of BAR1 are free, of which {} can be pinned",
            mib(bar1.free_bytes),
            mib(bar1.total_bytes),
            mib(usable)
        );
        let is_low = bar1.total_bytes > 0 && usable < bar1.total_bytes / TENTH;
        let level = if is_low { Level::Warning } else { Level::Ok };
        let mut finding = Finding::new(BAR1, level, subject, found);
        if is_low {
            finding = finding
                .why(
                    "what is registered takes its own size of BAR1, and nvidia.ko keeps 36 MiB; more is refused \
                    (no_room, EFAULT to the application)",
                )
                .fix(
                    "`peermemctl list --by-process` says who holds it (peermem-rs); end those, or register less; \
                    where BAR1 is smaller than the memory: Resizable BAR, Above 4G Decoding in the BIOS",
                );
        }
        findings.push(finding);
    }
    findings
}

pub(super) fn mode(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let persistent = Module::parameter(scan.host, "persistent_api_support");
    let pins = match persistent.as_deref() {
        Ok("0") => "persistent_api_support=0 is set, which asks for other pins first",
        _ => "where registrations are refused (pin_unsupported), load the module with persistent_api_support=0",
    };
    for (subject, gpu, _) in known(scan) {
        let note = |text: &str| Finding::new(MODE, Level::Note, subject.clone(), text);
        if gpu.mig == Some(true) {
            findings.push(
                note("MIG is on")
                    .why(
                        "the header of NVIDIA's interface (nv-p2p.h) says that persistent pins, the module's default, \
                        are not supported on MIG; drivers since 555 have code for it",
                    )
                    .fix(pins),
            );
        }
        match gpu.virtualization {
            Some(Virtualization::Vgpu) => findings.push(
                note("this is a virtual GPU")
                    .why(
                        "memory is pinned where the vGPU has RDMA, which its profile on the host decides; persistent \
                        pins, the module's default, are said not to be supported (nv-p2p.h)",
                    )
                    .fix(pins),
            ),
            Some(Virtualization::HostVgpu | Virtualization::HostVsga) => findings.push(
                note("this GPU is shared out to virtual machines").why("what is registered here takes from their BAR1"),
            ),
            _ => {}
        }
        if gpu.persistence_mode == Some(false) {
            findings.push(
                note("persistence mode is off")
                    .why("the driver stops the GPU when its last user goes, and starting it takes seconds each time")
                    .fix("`sudo systemctl enable --now nvidia-persistenced`"),
            );
        }
    }
    findings
}
