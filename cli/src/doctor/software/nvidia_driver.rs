// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Flavour (open or proprietary) and version of nvidia.ko, and a comparison with the version of the
//! driver's library.
//!
//! If nvidia.ko is not loaded, the check `gpu-driver` reports each GPU.

use super::users;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::host::nvml::VERSION_MISMATCH;

check! {
    "nvidia-driver": "nvidia.ko: open or proprietary, its version, and the driver's library beside it",
    |scan| scan.has_gpu(), check, OfSoftware(tests::FAULTS)
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let software = scan.software();
    match &software.driver {
        Err(why) => findings.push(Scan::unseen(
            Subject::Machine,
            "/proc/driver/nvidia/version",
            why,
        )),
        Ok(None) => return findings,
        Ok(Some(driver)) => {
            let is_old = driver.is_old();
            if scan.is_closed_to_ours() && !is_old {
                findings.push(
                    Subject::Machine.fault(format!(
                        "{}, but the installed nvidia_peermem is peermem-rs", driver.named()
                    ))
                    .why(
                        "Linux gives no symbols of a proprietary module to a module that uses functions for GPL \
                        modules only; this peermem-rs was built to use such functions, so it does not load",
                    )
                    .fix(
                        "build peermem-rs again beside this driver (x86-64); or install NVIDIA's open \
                        kernel modules (nvidia-open), for Turing and newer GPUs; or remove peermem-rs, and use NVIDIA's \
                        nvidia-peermem",
                    ),
                );
            } else if scan.is_closed_to_ours() {
                findings.push(
                    Subject::Machine.fault(format!(
                        "{}, but the installed nvidia_peermem is peermem-rs",
                        driver.named()
                    ))
                    .why(
                        "drivers before 535 lack nvidia_p2p_get_pages_persistent, so peermem-rs does not load",
                    )
                    .fix("install driver 535 or newer, with its open kernel modules"),
                );
            } else if is_old {
                findings.push(
                    Subject::Machine.note(format!("{}, older than 535", driver.named())).why(
                        "all pins of GPU memory by this driver can be revoked at any time, and the driver is too old \
                        for peermem-rs",
                    ),
                );
            } else {
                findings.push(Subject::Machine.ok(driver.named()));
            }
        }
    }
    findings.extend(library(scan));
    findings
}

/// Returns how to reload nvidia.ko and the modules that use nvidia.ko.
fn reload(scan: &Scan<'_>) -> String {
    let services = "reboot; or end everything that uses the GPUs (nvidia-persistenced, nvidia-fabricmanager and \
        monitoring, too)";
    let Some(order) = users::removal_order(scan.host, "nvidia") else {
        return format!(
            "{services}, unload nvidia.ko and the modules that use it (`lsmod | grep nvidia` names them), `sudo modprobe \
             nvidia`"
        );
    };
    let again: Vec<&str> = order.iter().rev().map(String::as_str).collect();
    format!(
        "{services}, `sudo rmmod {}`, `sudo modprobe -a {}`",
        order.join(" "),
        again.join(" ")
    )
}

/// Reports a driver library (NVML) that is missing, does not start, or has another version than
/// nvidia.ko.
fn library(scan: &Scan<'_>) -> Option<Finding> {
    let nvml = match &scan.software().nvml {
        Ok(nvml) => nvml,
        Err(_) if scan.machine.gpus.iter().all(|gpu| gpu.is_stand_in) => {
            return Some(Subject::Machine.note(
                "no NVML: the GPU is the test VM's stand-in, so values that only NVML reports are not judged".to_owned()
            ));
        }
        Err(why) => {
            let what =
                "NVML, the driver's library libnvidia-ml.so.1 (BAR1 in use, MIG, persistence mode)";
            return Some(Scan::unseen(Subject::Machine, what, why));
        }
    };
    let error = nvml.error.as_ref()?;
    if error.code == VERSION_MISMATCH {
        let library = "the driver's library and nvidia.ko are of different versions";
        return Some(
            Subject::Machine.fault(format!("{library} (NVML: {})", error.text))
                .why("the driver was upgraded while the old nvidia.ko stayed loaded: CUDA does not start until the library \
                    and nvidia.ko have the same version")
                .fix(reload(scan)),
        );
    }
    if error.is_denied() {
        let mut finding = Subject::Machine.not_visible("NVML: not visible without root".to_owned());
        finding.needs_root = true;
        return Some(finding);
    }
    Some(
        Subject::Machine
            .warning(format!(
                "NVML does not start: {} ({})",
                error.text, error.code
            ))
            .why("CUDA's library comes from the same driver, so CUDA may not start either")
            .fix("read nvidia.ko's lines in the kernel's log (`dmesg | grep NVRM`)"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, proprietary, unload};
    use crate::fixture::software::{driver, newer_library};
    use crate::fixture::Fixture;

    faults! {
        "ours beside the proprietary driver", "fault nvidia-driver: …nvidia-open" => |fixture| {
            unload(fixture);
            proprietary(fixture);
        };
        "ours beside an old driver", "fault nvidia-driver: …driver 535" => |fixture| {
            unload(fixture);
            let text =
                driver("Open Kernel Module for x86_64").replace("570.86.15", "525.60.13");
            fixture.file("/proc/driver/nvidia/version", &text);
        };
        "a library of another version", "fault nvidia-driver: …Driver/library version mismatch" => newer_library;
        "no library", "not_visible nvidia-driver: …libnvidia-ml.so.1" => Fixture::no_nvml;
    }
}
