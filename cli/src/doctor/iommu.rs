// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Whether an IOMMU stands between NIC and GPU.
//!
//! Where it translates, the NIC is given addresses that no switch knows: every packet goes up to the root complex to
//! be translated, though the GPU hang on the same switch. The NIC's group counts: the GPU's memory is only answered
//! from.

use super::route::Route;
use super::scan::{Check, Scan};
use super::{acs, data_direct};
use crate::finding::{Finding, Level, Subject};
use crate::host::{Seen, Unseen};
use crate::machine::config::{Acs, Config};
use crate::machine::pci::Function;
use crate::machine::Hca;

pub(super) const IOMMU: Check = Check {
    name: "iommu",
    about: "whether an IOMMU translates the NIC's addresses",
    applies: |scan| scan.has_hca(),
    run: iommu,
};

pub(super) const ATS: Check = Check {
    name: "ats",
    about: "the NIC's Address Translation Services, and whether switches let them through",
    applies: super::route::applies,
    run: ats,
};

/// How an IOMMU treats a function.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mode {
    /// There is none, or it is off.
    None,
    /// It lets addresses through as they are.
    Identity,
    /// `DMA`, `DMA-FQ`: it translates.
    Translates(String),
    /// It lets nothing through.
    Blocked,
    /// Somebody else's: `unmanaged` is VFIO's.
    Other(String),
}

/// By the type of the function's group (`Documentation/ABI/testing/sysfs-kernel-iommu_groups`), and the group.
fn mode(scan: &Scan<'_>, function: &Function) -> Seen<(Mode, u32)> {
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

/// Of an RDMA device: each function that does its DMA, once, but for Data Direct.
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
        findings.extend(data_direct::group(scan, pair));
    }
    for gpu in scan.gpus() {
        let Some(function) = scan.machine.functions.get(&gpu.at) else {
            continue;
        };
        if let Ok((Mode::Translates(kind), group)) = mode(scan, function) {
            findings.push(
                Finding::new(
                    IOMMU.name,
                    Level::Note,
                    Subject::gpu(gpu),
                    format!("the GPU is in IOMMU group {group} of type {kind}"),
                )
                .why("What the GPU itself asks of host memory or of a NIC is translated; the NIC's transfers are \
                    not."),
            );
        }
    }
    findings
}

fn of_nic(scan: &Scan<'_>, hca: &Hca, function: &Function) -> Finding {
    let at = function.at;
    let new = |level, found: String| {
        Finding::new(
            IOMMU.name,
            scan.level_of(hca, level),
            Subject::hca(hca),
            found,
        )
    };
    match mode(scan, function) {
        Err(why) => Scan::unseen(
            IOMMU.name,
            Subject::hca(hca),
            format!("IOMMU mode of {at}"),
            &why,
        ),
        Ok((Mode::None, _)) => new(Level::Ok, format!("no IOMMU is before {at}")),
        Ok((Mode::Identity, group)) => new(
            Level::Ok,
            format!("{at} is in IOMMU group {group} of type identity"),
        ),
        Ok((Mode::Blocked, group)) => new(
            Level::Fault,
            format!("{at} is in IOMMU group {group} of type blocked"),
        )
        .why("The IOMMU lets none of its transfers through.")
        .fix(format!(
            "`echo identity > /sys/kernel/iommu_groups/{group}/type`, with the drivers of all its devices unbound"
        )),
        Ok((Mode::Other(kind), group)) => new(
            Level::Note,
            format!("{at} is in IOMMU group {group} of type {kind:?}"),
        ),
        Ok((Mode::Translates(kind), group)) => {
            let found = format!("{at} is in IOMMU group {group} of type {kind}: its addresses are translated");
            if all_straight(scan, hca) {
                return new(
                    Level::Ok,
                    format!("{found}; ATS is on, and switches let translated requests straight through"),
                );
            }
            if scan.is_by_data_direct(hca) {
                return new(
                    Level::Ok,
                    format!("{found}; GPU memory goes by Data Direct"),
                );
            }
            // With memory of the processor's own there is no switch to turn round in.
            let mut gpus = scan
                .pairs()
                .filter(|pair| pair.hca == hca.name)
                .filter_map(|pair| scan.gpu(pair.gpu));
            let level = match gpus.all(|gpu| gpu.is_coherent) {
                true => Level::Note,
                false => Level::Warning,
            };
            new(level, found)
                .why(
                    "The NIC is given addresses that no switch knows, so each of its packets goes up to the root \
                     complex to be translated, and waits where the translation is not at hand.",
                )
                .costs(
                    "NVIDIA's GPUDirect RDMA guide asks for addresses that are passed through; reports of slow or \
                     hanging transfers: nccl#1737, nccl#949.",
                )
                .fix(fix(scan, group))
        }
    }
}

/// Whether on each of the pairs that count translated requests go straight through the switch.
fn all_straight(scan: &Scan<'_>, hca: &Hca) -> bool {
    let mut pairs = scan.pairs().filter(|pair| pair.hca == hca.name).peekable();
    pairs.peek().is_some()
        && pairs.all(|pair| {
            Route::of(scan, pair).is_some_and(|route| {
                route.turn().is_some_and(|(nic_port, _)| {
                    let set = acs::control(nic_port).unwrap_or(0);
                    set & (Acs::DT | Acs::TB) == Acs::DT
                        && acs::translates(route.nic).unwrap_or(false)
                })
            })
        })
}

/// By whose IOMMU it is.
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
            "The kernel's command line asks for pass-through already, and this group has it not: `echo identity > \
             /sys/kernel/iommu_groups/{group}/type`, with the drivers of all its devices unbound"
        );
    }
    format!(
        "{option} on the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub), or the IOMMU off in the \
         firmware's setup (\"Intel VT-d\", \"AMD IOMMU\", \"SMMU\")"
    )
}

fn ats(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for pair in scan.pairs() {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
        let Some((nic_port, _)) = route.turn() else {
            continue;
        };
        let enabled = match route.nic.config().and_then(Config::ats) {
            Ok(enabled) => enabled,
            Err(Unseen::Absent) => continue,
            Err(why) => {
                let what = format!("ATS of {}", route.nic.at);
                findings.push(Scan::unseen(ATS.name, Subject::pair(pair), what, &why));
                continue;
            }
        };
        let blocks = acs::control(nic_port).is_ok_and(|set| set & Acs::TB != 0);
        let translated = matches!(mode(scan, route.nic), Ok((Mode::Translates(_), _)));
        let new = |level, found: String| {
            Finding::new(
                ATS.name,
                scan.level(pair, level),
                Subject::pair(pair),
                found,
            )
        };
        findings.push(match (enabled, blocks) {
            (true, true) => new(
                Level::Fault,
                format!(
                    "{} has ATS on, and {} drops what it translated (TransBlk)",
                    route.nic.at, nic_port.at
                ),
            )
            .why("A request whose address the NIC has had translated is dropped by a port with Translation \
                Blocking.")
            .fix(format!(
                "`setpci -s {} ECAP_ACS+0x6.w=0000:0002`",
                nic_port.at
            )),
            (false, _) if translated => new(
                Level::Note,
                format!("{} can ATS, and it is off", route.nic.at),
            )
            .why(
                "With an IOMMU that must translate, as on a host of virtual machines, ATS and DirectTrans of the \
                 NIC's port are what lets packets turn round in the switch.",
            )
            .fix(format!(
                "`mlxconfig -d {} set ATS_ENABLED=true`, and a cold boot (NVIDIA AI Enterprise, \"ATS and ACS \
                 configuration\")",
                route.nic.at
            )),
            (on, _) => new(
                Level::Ok,
                format!(
                    "ATS of {} is {}",
                    route.nic.at,
                    if on { "on" } else { "off, as nothing translates" }
                ),
            ),
        });
    }
    findings
}
