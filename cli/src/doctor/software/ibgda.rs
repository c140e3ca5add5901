// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPU-initiated communication (IBGDA): permission for CUDA to map a NIC's doorbells into a GPU.

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Subject};

check! {
    "ibgda": "whether GPUs may write to the NICs' doorbells (IBGDA, PeerMappingOverride)",
    applies, check, OfSoftware(tests::FAULTS)
}

/// Current parameters of nvidia.ko.
const PARAMETERS: &str = "/proc/driver/nvidia/params";

fn applies(scan: &Scan<'_>) -> bool {
    scan.has_both() && scan.host.text(PARAMETERS).is_ok()
}

/// Returns `true` if the driver's settings allow the mapping: `RegistryDwords:
/// "PeerMappingOverride=1;"`.
fn is_allowed(parameters: &str) -> bool {
    let mut settings = parameters
        .lines()
        .filter_map(|line| line.strip_prefix("RegistryDwords:"))
        .flat_map(|line| line.trim().trim_matches('"').split(';'));
    settings.any(|setting| {
        setting.split_once('=').is_some_and(|(name, value)| {
            let value = value.trim();
            name.trim() == "PeerMappingOverride" && !matches!(value, "" | "0" | "0x0")
        })
    })
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let Ok(parameters) = scan.host.text(PARAMETERS) else {
        return Vec::new();
    };
    if is_allowed(&parameters) {
        return vec![Subject::Machine.ok("nvidia.ko runs with PeerMappingOverride=1")];
    }
    vec![Subject::Machine.note("nvidia.ko runs without PeerMappingOverride=1")
        .why(
            "kernels on the GPU that drive the NIC themselves (IBGDA of NVSHMEM and DeepEP, NCCL's GIN) map the \
            NIC's doorbells into the GPU, which needs this setting: without it, they report \"GPU cannot map UAR\", \
            or cuMemHostRegister or cudaHostRegister fails with an I/O address; no other software needs it",
        )
        .fix(
            "for IBGDA only: 'options nvidia NVreg_EnableStreamMemOPs=1 \
            NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' in /etc/modprobe.d/nvidia.conf, rebuild the initramfs, \
            reboot; with NVSHMEM_IBGDA_NIC_HANDLER=cpu it is not needed",
        )]
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::super::tests::faults;
    use crate::testing::no_panic;

    faults! {
        "a driver without PeerMappingOverride", "note ibgda: …NVreg_RegistryDwords=\"PeerMappingOverride=1;\"" =>
            |fixture| fixture.file("/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
        "a driver with PeerMappingOverride" =>
            |fixture| fixture.file("/proc/driver/nvidia/params", "RegistryDwords: \"PeerMappingOverride=1;\"\n");
    }

    #[test]
    fn the_setting_among_others() {
        for (line, expected) in [
            ("RegistryDwords: \"PeerMappingOverride=1;\"", true),
            (
                "RegistryDwords: \"RMForceStaticBar1=1; PeerMappingOverride=0x1\"",
                true,
            ),
            ("RegistryDwords: \"PeerMappingOverride=0;\"", false),
            ("RegistryDwords: \"NoPeerMappingOverride=1;\"", false),
            ("RegistryDwords: \"\"", false),
            ("RegistryDwordsPerDevice: \"PeerMappingOverride=1\"", false),
            ("", false),
        ] {
            assert_eq!(
                is_allowed(&format!("EnableStreamMemOPs: 0\n{line}\n")),
                expected,
                "{line}"
            );
        }
    }

    no_panic!(no_parameters_are_a_panic: is_allowed, |it: &str| is_allowed(&format!("RegistryDwords:{it}")));
}
