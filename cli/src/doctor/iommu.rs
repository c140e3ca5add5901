// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! IOMMU translation between NIC and GPU.
//!
//! If the IOMMU translates, the NIC uses addresses that switches cannot route to the GPU. Each
//! packet goes up to the root complex to be translated, even if the GPU is below the same switch.
//! The type of the NIC's IOMMU group decides about translation, because the NIC sends the requests
//! and the GPU only answers.

use super::controls::{
    at_boot, command_line, control, for_data_direct, translates, Wanted, UNUSED, WRITES,
};
use super::route::Route;
use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::{Seen, Unseen};
use crate::machine::config::Acs;
use crate::machine::pci::Function;
use crate::machine::{Hca, Pair};

check! {
    "iommu": "whether an IOMMU translates the NIC's addresses",
    |scan| scan.has_hca(), iommu, OnPaths(tests::FAULTS)
}

/// IOMMU mode of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    /// No IOMMU, or the IOMMU is off.
    None,
    /// Addresses pass through unchanged.
    Identity,
    /// `DMA` or `DMA-FQ`: addresses are translated.
    Translates(String),
    /// All accesses are blocked.
    Blocked,
    /// Any other mode, such as `unmanaged`, which VFIO uses.
    Other(String),
}

/// Returns the mode and the number of the function's IOMMU group. The group's type gives the mode
/// (`Documentation/ABI/testing/sysfs-kernel-iommu_groups`).
pub(super) fn mode(scan: &Scan<'_>, function: &Function) -> Seen<(Mode, u32)> {
    let group = match &function.iommu_group {
        Ok(group) => *group,
        Err(Unseen::Absent) => return Ok((Mode::None, 0)),
        Err(why) => return Err(why.clone()),
    };
    let kind = scan
        .host
        .text(&format!("/sys/kernel/iommu_groups/{group}/type"))?;
    let mode = match kind.as_str() {
        "identity" => Mode::Identity,
        "blocked" => Mode::Blocked,
        "DMA" | "DMA-FQ" => Mode::Translates(kind),
        _ => Mode::Other(kind),
    };
    Ok((mode, group))
}

/// Returns the functions that do the RDMA device's DMA, without Data Direct and without duplicates.
fn functions<'a>(scan: &Scan<'a>, hca: &Hca) -> Vec<&'a Function> {
    let all = hca.functions().into_iter();
    all.filter(|at| hca.data_direct != Some(*at))
        .filter_map(|at| scan.machine.functions.get(&at))
        .collect()
}

fn iommu(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for hca in scan.hcas() {
        for function in functions(scan, hca) {
            findings.push(of_nic(scan, hca, function));
        }
    }
    for pair in scan.pairs().filter(|pair| pair.is_data_direct()) {
        findings.extend(group(scan, pair));
    }
    for gpu in scan.gpus() {
        let Some(function) = scan.machine.functions.get(&gpu.at) else {
            continue;
        };
        if let Ok((Mode::Translates(kind), group)) = mode(scan, function) {
            findings.push(
                Subject::gpu(gpu).note(format!("the GPU is in IOMMU group {group} of type {kind}"))
                .why("The GPU's own requests to host memory or to a NIC are translated; the NIC's transfers are not."),
            );
        }
    }
    findings
}

fn of_nic(scan: &Scan<'_>, hca: &Hca, function: &Function) -> Finding {
    let (at, subject) = (function.at, Subject::hca(hca));
    let new =
        |level, found: String| Finding::new(scan.level_of(hca, level), Subject::hca(hca), found);
    let in_group =
        |group: u32, kind: &str| format!("{at} is in IOMMU group {group} of type {kind}");
    match mode(scan, function) {
        Err(why) => Scan::unseen(subject, format!("IOMMU mode of {at}"), &why),
        Ok((Mode::None, _)) => subject.ok(format!("{at} is not behind an IOMMU")),
        Ok((Mode::Identity, group)) => subject.ok(in_group(group, "identity")),
        Ok((Mode::Blocked, group)) => new(Level::Fault, in_group(group, "blocked"))
        .why("The IOMMU lets none of the NIC's transfers through.")
        .fix(format!(
            "Unbind the drivers of the group's devices, then `echo identity > /sys/kernel/iommu_groups/{group}/type`"
        )),
        Ok((Mode::Other(kind), group)) => subject.note(in_group(group, &format!("{kind:?}"))),
        Ok((Mode::Translates(kind), group)) => {
            let found = format!("{at} is in IOMMU group {group} of type {kind}: its addresses are translated");
            if all_straight(scan, hca) {
                return subject
                    .ok(format!("{found}; ATS is on, and switches let translated requests straight through"));
            }
            if scan.is_by_data_direct(hca) {
                return subject.ok(format!("{found}; GPU memory goes through Data Direct"));
            }
            // Packets to the memory of a coherent GPU do not turn round in a switch.
            let pairs = scan.pairs().filter(|pair| pair.hca == hca.name);
            let mut gpus = pairs.filter_map(|pair| scan.gpu(pair.gpu));
            let level = match gpus.all(|gpu| gpu.is_coherent) {
                true => Level::Note,
                false => Level::Warning,
            };
            new(level, found)
                .why(
                    "The NIC gets addresses that no switch knows. Each of its packets therefore goes up to the root \
                     complex to be translated, and waits if the translation is not cached.",
                )
                .costs(
                    "NVIDIA's GPUDirect RDMA guide asks for addresses that are passed through; reports of slow or \
                     hanging transfers: nccl#1737, nccl#949.",
                )
                .fix(fix(scan, group))
        }
    }
}

/// Returns `true` if translated requests go straight through the switch on each examined pair
/// ([`Scan::pairs`]) of the RDMA device.
fn all_straight(scan: &Scan<'_>, hca: &Hca) -> bool {
    let mut pairs = scan.pairs().filter(|pair| pair.hca == hca.name).peekable();
    pairs.peek().is_some()
        && pairs.all(|pair| {
            Route::of(scan, pair).is_some_and(|route| {
                route.turn().is_some_and(|(nic_port, _)| {
                    let set = control(nic_port).unwrap_or(0);
                    set & (Acs::DT | Acs::TB) == Acs::DT && translates(route.nic).unwrap_or(false)
                })
            })
        })
}

/// Returns the fix for an IOMMU that translates the addresses of this group.
fn fix(scan: &Scan<'_>, group: u32) -> String {
    let units = scan.host.names("/sys/class/iommu").unwrap_or_default();
    let has = |prefix: &str| units.iter().any(|unit| unit.starts_with(prefix));
    let arm = has("smmu") || has("arm-smmu");
    let option = match arm {
        true => "iommu.passthrough=1",
        false => "iommu=pt",
    };
    let cmdline = scan.host.text("/proc/cmdline").unwrap_or_default();
    let mut given = cmdline.split_whitespace();
    if given.any(|word| {
        matches!(
            word,
            "iommu=pt" | "iommu.passthrough=1" | "iommu.passthrough=y"
        )
    }) {
        return format!(
            "The kernel's command line already asks for pass-through, but this group has another mode: unbind the \
             drivers of the group's devices, then `echo identity > /sys/kernel/iommu_groups/{group}/type`"
        );
    }
    format!(
        "Put {option} on the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub), or turn the IOMMU off \
         in the firmware's setup (\"Intel VT-d\", \"AMD IOMMU\", \"SMMU\")"
    )
}

/// File with the parameters of nvidia.ko. The parameter `GrdmaPciTopoCheckOverride` turns off
/// nvidia.ko's check of IOMMU groups.
const PARAMETERS: &str = "/proc/driver/nvidia/params";

/// Checks that Data Direct and a coherent GPU are in one IOMMU group. Linux forms the groups from
/// the ACS settings. If ACS is wrong, returns `None`, and the check `acs` reports the fault.
fn group(scan: &Scan<'_>, pair: &Pair) -> Option<Finding> {
    // If a GPU is not coherent, nvidia.ko gives its PCI addresses to functions of any group.
    scan.gpu(pair.gpu).filter(|gpu| gpu.is_coherent)?;
    let route = Route::of(scan, pair)?;
    if let Some(Ok(ports)) = for_data_direct(pair, &route) {
        if !ports.iter().all(Wanted::is_met) {
            return None;
        }
    }
    let new = |level, found: String| {
        let level = scan.level(pair, level);
        Finding::new(level, Subject::pair(pair), found)
    };
    let (direct, gpu) = (route.nic.at, route.gpu.at);
    Some(match (&route.nic.iommu_group, &route.gpu.iommu_group) {
        (Ok(own), Ok(other)) if own == other => new(
            Level::Ok,
            format!("Data Direct {direct} and the GPU {gpu} are in IOMMU group {own}"),
        ),
        (Err(Unseen::Absent), Err(Unseen::Absent)) => new(
            Level::Ok,
            format!("Data Direct {direct} and the GPU {gpu} are in no IOMMU group"),
        ),
        (Err(why), _) | (_, Err(why)) if *why != Unseen::Absent => Scan::unseen(
            Subject::pair(pair),
            format!("the IOMMU groups of {direct} and {gpu}"),
            why,
        ),
        (own, other) => {
            let named =
                |group: &Seen<u32>| group.as_ref().map_or("none".to_owned(), u32::to_string);
            let found = format!(
                "Data Direct {direct} is in IOMMU group {}, but the GPU {gpu} is in {}",
                named(own),
                named(other)
            );
            let parameters = scan.host.text(PARAMETERS).unwrap_or_default();
            let is_overridden = |line: &str| line.trim() == "GrdmaPciTopoCheckOverride: 1";
            if parameters.lines().any(is_overridden) {
                return Some(new(
                    Level::Note,
                    format!("{found}; NVreg_GrdmaPciTopoCheckOverride=1 makes nvidia.ko continue anyway"),
                ));
            }
            new(Level::Warning, found)
                .why(
                    "nvidia.ko gives addresses of GPU memory only to functions of the GPU's own group, and refuses a \
                     dma-buf for Data Direct (ENOTSUPP).",
                )
                .costs(UNUSED)
                .fix(group_fix(scan))
        }
    })
}

/// Returns the fix for Data Direct and a GPU in different IOMMU groups, if no wrong ACS setting was
/// found.
fn group_fix(scan: &Scan<'_>) -> String {
    let at_boot = at_boot(scan);
    if at_boot.is_empty() {
        return "Load nvidia.ko with NVreg_GrdmaPciTopoCheckOverride=1: nvidia.ko then accepts different groups."
            .to_owned();
    }
    let mut lines = vec![
        "Groups are formed at boot, but ACS was set later. Put this on the kernel's command line, and reboot:"
            .to_owned(),
    ];
    lines.extend(command_line(&at_boot));
    lines.push(WRITES.to_owned());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::controls::DATA_DIRECT_ACS;
    use super::super::tests::paths::{faults, group, socket, FIRST};
    use crate::fixture;

    faults! {
        "an IOMMU that translates",
            "warning iommu: …0000:14:00.0 is in IOMMU group 20 of type DMA-FQ… fix …iommu=pt" =>
            |fixture| group(fixture, socket(FIRST).nic, "DMA-FQ");
        "an IOMMU that translates, though iommu=pt",
            "warning iommu: …type DMA… fix …echo identity > /sys/kernel/iommu_groups/20/type" => |fixture| {
            group(fixture, socket(FIRST).nic, "DMA");
            let cmdline = "root=/dev/sda iommu=pt".to_owned();
            fixture.host.files.insert("/proc/cmdline".to_owned(), cmdline);
        };
        "an SMMU that translates", "warning iommu: …type DMA… fix …iommu.passthrough=1" => |fixture| {
            group(fixture, socket(FIRST).nic, "DMA");
            let units = vec!["smmu3.0x0000000016000000".to_owned()];
            fixture.host.directories.insert("/sys/class/iommu".to_owned(), units);
        };
        "an IOMMU that blocks", "fault iommu: …type blocked… fix …echo identity" =>
            |fixture| group(fixture, socket(FIRST).nic, "blocked");
    }

    #[test]
    fn data_direct_and_gpu_must_be_in_one_group() {
        let mut fixture = fixture::data_direct();
        fixture.iommu_group("0009:06:00.0", 50, "DMA-FQ");
        let told = "1$ doctor --only iommu
            Data Direct 0009:03:00.0 is in IOMMU group 30, but the GPU 0009:06:00.0 is in 50";
        fixture.session(&format!("{told}\n{DATA_DIRECT_ACS}"));
        let parameters = "DmaRemapPeerMmio: 1\nGrdmaPciTopoCheckOverride: 1\n";
        fixture.file("/proc/driver/nvidia/params", parameters);
        let told = "0$ doctor --only iommu --all\nGrdmaPciTopoCheckOverride=1";
        fixture.session(told);
        // If ACS is wrong, only the check `acs` reports the fault.
        let fixture = fixture::data_direct_acs();
        fixture.session("0$ doctor --only iommu");
    }
}
