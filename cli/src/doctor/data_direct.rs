// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What Data Direct takes: its driver, ACS that is other at each port, and one IOMMU group with the GPU.
//!
//! nvidia.ko gives Data Direct addresses of GPU memory as they are on PCI, past the IOMMU, and only if both functions
//! are in one group (`nv_pci_is_valid_topology_for_direct_pci` and `skip_iommu` of the open driver). Groups follow from
//! ACS, which Linux reads when it finds the devices.

use std::collections::BTreeMap;

use super::acs::{at_boot, command_line, Wanted, ACS};
use super::devices::NIC_DRIVER;
use super::iommu::IOMMU;
use super::route::Route;
use super::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::host::{Seen, Unseen};
use crate::machine::config::{Acs, Config};
use crate::machine::pci::{Address, Function};
use crate::machine::Pair;

/// What it costs that Data Direct is there and cannot be used.
const UNUSED: &str =
    "Half of the bandwidth between the NIC and a GB300's memory, which then goes through the processor \
     (meta-pytorch/torchcomms#3014).";

/// What does by itself what a fix asks for.
const WRITES: &str = "`rdma_topo write-grub-acs`, of a new rdma-core, writes the same.";

/// Root ports of Grace, as rdma-core's rdma_topo has them.
const GRACE: [(u16, u16); 3] = [(0x10de, 0x22b1), (0x10de, 0x22b2), (0x10de, 0x22b8)];

/// What Linux turns on by itself.
const ISOLATED: u16 = Acs::SV | Acs::RR | Acs::CR | Acs::UF;

/// What ACS must be for Data Direct below a root port of Grace, by rdma-core's rdma_topo: open to the requests of Data
/// Direct and to the GPU's answers, closed to all else, and without source validation at the root port, so that Linux
/// puts both functions into one IOMMU group. None: this is no such pair.
pub(super) fn wanted<'a>(pair: &Pair, route: &Route<'a>) -> Option<Seen<Vec<Wanted<'a>>>> {
    let bridges = route.bridges();
    let root = *bridges.first()?;
    if !pair.is_data_direct() || !GRACE.contains(&(root.vendor, root.device)) {
        return None;
    }
    let (own, gpu) = route.turn()?;
    let wanted = bridges.into_iter().filter_map(|port| {
        let (what, off) = match port.at {
            at if at == root.at => ("root port", Acs::SV),
            at if at == own.at => ("Data Direct's port", Acs::RR),
            at if at == gpu.at => ("the GPU's port", Acs::CR),
            _ => (port.kind_of_bridge(), 0),
        };
        let set = match port.config().and_then(Config::acs) {
            // Upstream ports.
            Err(Unseen::Absent) => return None,
            set => set,
        };
        Some(set.map(|set| Wanted {
            port,
            what,
            set,
            on: ISOLATED & !off,
            off,
        }))
    });
    Some(wanted.collect())
}

/// ACS where Data Direct and the GPU meet.
pub(super) fn acs(
    scan: &Scan<'_>,
    pair: &Pair,
    wanted: &[Wanted<'_>],
    at_boot: &BTreeMap<Address, Wanted<'_>>,
) -> Finding {
    let wrong: Vec<&Wanted<'_>> = wanted.iter().filter(|port| !port.is_met()).collect();
    if wrong.is_empty() {
        let each = wanted.iter();
        let each = each.map(|port| format!("{} {}", port.port.at, port.flags()));
        let found = format!(
            "as Data Direct wants it: {}",
            each.collect::<Vec<_>>().join(", ")
        );
        return Finding::new(ACS.name, Level::Ok, Subject::pair(pair), found);
    }
    let each = wrong.iter().map(|port| {
        let (off, on) = port.wrong();
        let says = [(on, "on"), (off, "off")];
        let says = says.into_iter().filter(|(bits, _)| *bits != 0);
        let says = says.map(|(bits, word)| format!("{} {word}", Acs::names(bits).join(", ")));
        let says: Vec<String> = says.collect();
        format!(
            "{} ({}) has {}",
            port.port.at,
            port.what,
            says.join(" and ")
        )
    });
    let found = each.collect::<Vec<_>>().join("; ");
    let mut lines: Vec<String> = wrong.iter().map(|port| port.command()).collect();
    lines.push(
        "That lasts until the next boot and leaves IOMMU groups as they are, for which nvidia.ko then needs \
         NVreg_GrdmaPciTopoCheckOverride=1; and unprivileged programs can cause platform errors (rdma_topo). For good, \
         on the kernel's command line:"
            .to_owned(),
    );
    lines.extend(command_line(at_boot));
    lines.push(WRITES.to_owned());
    Finding::new(
        ACS.name,
        scan.level(pair, Level::Warning),
        Subject::pair(pair),
        found,
    )
    .why(
        "Data Direct and the GPU meet in the switch of the NIC. Requests of the one and answers of the other must go \
         straight there, nothing else may, and both must be in one IOMMU group: so rdma-core's rdma_topo has it. \
         Otherwise nvidia.ko refuses Data Direct, or packets go up to the processor.",
    )
    .costs(UNUSED)
    .fix(lines.join("\n"))
}

/// What overrides nvidia.ko's check of groups.
const PARAMETERS: &str = "/proc/driver/nvidia/params";

/// Whether Data Direct and the GPU are in one group. None: it is told of ACS already, which groups follow from.
pub(super) fn group(scan: &Scan<'_>, pair: &Pair) -> Option<Finding> {
    // Of other GPUs nvidia.ko gives addresses for PCI to whoever asks.
    scan.gpu(pair.gpu).filter(|gpu| gpu.is_coherent)?;
    let route = Route::of(scan, pair)?;
    if let Some(Ok(ports)) = wanted(pair, &route) {
        if !ports.iter().all(Wanted::is_met) {
            return None;
        }
    }
    let new = |level, found: String| {
        let level = scan.level(pair, level);
        Finding::new(IOMMU.name, level, Subject::pair(pair), found)
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
            IOMMU.name,
            Subject::pair(pair),
            format!("the IOMMU groups of {direct} and {gpu}"),
            why,
        ),
        (own, other) => {
            let named =
                |group: &Seen<u32>| group.as_ref().map_or("none".to_owned(), u32::to_string);
            let found = format!(
                "Data Direct {direct} is in IOMMU group {}, the GPU {gpu} in {}",
                named(own),
                named(other)
            );
            let parameters = scan.host.text(PARAMETERS).unwrap_or_default();
            let is_overridden = |line: &str| line.trim() == "GrdmaPciTopoCheckOverride: 1";
            if parameters.lines().any(is_overridden) {
                return Some(new(
                    Level::Note,
                    format!("{found}; NVreg_GrdmaPciTopoCheckOverride=1 has nvidia.ko go on all the same"),
                ));
            }
            new(Level::Warning, found)
                .why(
                    "nvidia.ko gives addresses of GPU memory to functions of the GPU's own group alone, and refuses a \
                     dma-buf for Data Direct (ENOTSUPP).",
                )
                .costs(UNUSED)
                .fix(group_fix(scan))
        }
    })
}

/// How both get into one group, where ACS is right or nobody knows what is.
fn group_fix(scan: &Scan<'_>) -> String {
    let at_boot = at_boot(scan);
    if at_boot.is_empty() {
        return "NVreg_GrdmaPciTopoCheckOverride=1 for nvidia.ko has it go on all the same."
            .to_owned();
    }
    let mut lines = vec![
        "Groups are formed at boot, and ACS was set later. On the kernel's command line, and boot:"
            .to_owned(),
    ];
    lines.extend(command_line(&at_boot));
    lines.push(WRITES.to_owned());
    lines.join("\n")
}

/// Of a Data Direct function: whether it can be used, and for which RDMA device.
pub(super) fn driver(scan: &Scan<'_>, function: &Function) -> Option<Finding> {
    let at = function.at;
    let new = |level, found| Finding::new(NIC_DRIVER.name, level, Subject::Machine, found);
    if function.driver.is_none() {
        return Some(
            new(Level::Warning, format!("the Data Direct function {at} has no driver"))
                .why(
                    "mlx5_ib drives it, that of Linux 6.12 or newer, or of OFED. Without, software finds no Data \
                     Direct.",
                )
                .costs(UNUSED)
                .fix("`modprobe mlx5_ib`, of a newer kernel or OFED; `dmesg | grep mlx5` says why it does not take it"),
        );
    }
    if !scan.machine.unassigned_data_direct().any(|it| it.at == at) {
        return None;
    }
    let what = format!("which RDMA device the Data Direct function {at} belongs to");
    Some(match &scan.machine.data_direct_unseen {
        Some(why) => Scan::unseen(NIC_DRIVER.name, Subject::Machine, what, why),
        None => new(
            Level::Note,
            format!("{what} is not known: no RDMA device's VPD has the same V3"),
        )
        .why("Its paths are not judged then, and those of the RDMA devices' own functions are."),
    })
}

#[cfg(test)]
mod tests {
    use crate::finding::Status;
    use crate::fixture::{Fixture, Pci};
    use crate::{fixture, testing};

    /// What one check says.
    fn of_check(fixture: &Fixture, check: &str, more: &[&str]) -> (String, Status) {
        let line = [&["doctor", "--only", check], more].concat();
        testing::says_in_one_line(&fixture.recording, &line)
    }

    fn says(fixture: &Fixture, more: &[&str]) -> (String, Status) {
        of_check(fixture, "acs", more)
    }

    const ALL: &str =
        "pci=config_acs=xx111x0@0008:00:00.0;xx110x1@0008:02:00.0;xx101x1@0008:02:02.0;\
                       xx111x0@0009:00:00.0;xx110x1@0009:02:00.0;xx101x1@0009:02:02.0";

    #[test]
    fn data_direct_that_is_set_up_is_well() {
        let fixture = fixture::data_direct();
        let (text, status) = says(&fixture, &[]);
        assert_eq!(status, Status::Ok, "{text}");
        assert!(text.starts_with("Nothing wrong was seen"), "{text}");
        // And it looked.
        let (text, _) = says(&fixture, &["--all"]);
        for words in [
            "0009:00:00.0 xx111x0",
            "0009:02:00.0 xx110x1",
            "0009:02:02.0 xx101x1",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn data_direct_with_the_kernels_own_acs_is_not() {
        let (text, status) = says(&fixture::data_direct_acs(), &[]);
        assert_eq!(status, Status::Findings, "{text}");
        for words in [
            "0009:02:00.0 (Data Direct's port) has ReqRedir on",
            "0009:02:02.0 (the GPU's port) has CmpltRedir on",
            "0009:00:00.0 (root port) has SrcValid on",
            "`setpci -s 0009:00:00.0 ECAP_ACS+0x6.w=001c:001d`",
            "`setpci -s 0009:02:00.0 ECAP_ACS+0x6.w=0019:001d`",
            "`setpci -s 0009:02:02.0 ECAP_ACS+0x6.w=0015:001d`",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(text.contains(ALL), "{text}");
        assert!(!text.contains("0009:05:00.0"), "that is well: {text}");
    }

    /// A port, what is set there, and what is said of it.
    #[test]
    fn each_bit_of_data_direct_counts() {
        for (at, set, words) in [
            (
                "0009:02:00.0",
                0x1d,
                "0009:02:00.0 (Data Direct's port) has ReqRedir on",
            ),
            (
                "0009:02:00.0",
                0x11,
                "0009:02:00.0 (Data Direct's port) has CmpltRedir off",
            ),
            (
                "0009:02:00.0",
                0x18,
                "0009:02:00.0 (Data Direct's port) has SrcValid off",
            ),
            (
                "0009:02:00.0",
                0,
                "has SrcValid, CmpltRedir, UpstreamFwd off",
            ),
            (
                "0009:02:02.0",
                0x1d,
                "0009:02:02.0 (the GPU's port) has CmpltRedir on",
            ),
            (
                "0009:02:02.0",
                0x11,
                "0009:02:02.0 (the GPU's port) has ReqRedir off",
            ),
            (
                "0009:00:00.0",
                0x1d,
                "0009:00:00.0 (root port) has SrcValid on",
            ),
            (
                "0009:00:00.0",
                0x0c,
                "0009:00:00.0 (root port) has UpstreamFwd off",
            ),
            (
                "0009:05:00.0",
                0x19,
                "0009:05:00.0 (downstream port) has ReqRedir off",
            ),
        ] {
            let mut fixture = fixture::data_direct();
            let port = match at {
                "0009:00:00.0" => Pci::grace_port(set, 0),
                _ => Pci::connectx8_port(6, set, 0),
            };
            fixture.set_config(at, &port);
            let (text, status) = says(&fixture, &[]);
            assert_eq!(status, Status::Findings, "{at} {set:#x}: {text}");
            assert!(text.contains(words), "{text}");
            assert!(text.contains(&format!("`setpci -s {at} ")), "{text}");
            assert_eq!(text.matches("setpci -s").count(), 1, "{text}");
            assert!(text.contains(ALL), "{text}");
        }
        // What is in nobody's way, there or elsewhere.
        let mut fixture = fixture::data_direct();
        fixture.set_config("0009:02:00.0", &Pci::connectx8_port(6, 0x19 | 0x62, 0));
        fixture.set_config("0000:02:00.0", &Pci::connectx8_port(6, 0, 0));
        assert_eq!(says(&fixture, &[]).1, Status::Ok);
    }

    #[test]
    fn both_must_be_in_one_group() {
        let mut fixture = fixture::data_direct();
        let (text, status) = of_check(&fixture, "iommu", &["--all"]);
        assert_eq!(status, Status::Ok, "{text}");
        let words = "Data Direct 0009:03:00.0 and the GPU 0009:06:00.0 are in IOMMU group 30";
        assert!(text.contains(words), "{text}");
        // Translation before the NIC's own function takes nothing from GPU memory.
        assert!(!text.contains("note iommu mlx5"), "{text}");
        fixture.iommu_group("0009:06:00.0", 50, "DMA-FQ");
        let (text, status) = of_check(&fixture, "iommu", &[]);
        assert_eq!(status, Status::Findings, "{text}");
        let words = "Data Direct 0009:03:00.0 is in IOMMU group 30, the GPU 0009:06:00.0 in 50";
        assert!(text.contains(words), "{text}");
        assert!(text.contains(ALL), "{text}");
        let parameters = "DmaRemapPeerMmio: 1\nGrdmaPciTopoCheckOverride: 1\n";
        fixture.file("/proc/driver/nvidia/params", parameters);
        let (text, status) = of_check(&fixture, "iommu", &["--all"]);
        assert_eq!(status, Status::Ok, "{text}");
        assert!(text.contains("GrdmaPciTopoCheckOverride=1"), "{text}");
        // Where ACS is wrong, it is told there alone.
        let (text, status) = of_check(&fixture::data_direct_acs(), "iommu", &[]);
        assert_eq!(status, Status::Ok, "{text}");
    }

    #[test]
    fn it_takes_a_driver_and_an_rdma_device() {
        let at = "0009:03:00.0";
        let mut fixture = fixture::data_direct();
        let well = of_check(&fixture, "nic-driver", &["--all"]);
        assert_eq!(well, ("Nothing wrong was seen.".to_owned(), Status::Ok));
        let own = fixture.place(at);
        fixture.remove(&format!("{own}/driver"));
        let (text, status) = of_check(&fixture, "nic-driver", &[]);
        assert_eq!(status, Status::Findings, "{text}");
        assert!(text.contains(&format!("the Data Direct function {at} has no driver")));
        let mut fixture = fixture::data_direct();
        fixture.vpd(at, "another");
        let (text, status) = of_check(&fixture, "nic-driver", &["--all"]);
        assert_eq!(status, Status::Ok, "{text}");
        assert!(
            text.contains("no RDMA device's VPD has the same V3"),
            "{text}"
        );
        let mut fixture = fixture::data_direct();
        fixture.unprivileged();
        let (text, _) = of_check(&fixture, "nic-driver", &["--all"]);
        let words = format!("the Data Direct function {at} belongs to: not visible without root");
        assert!(text.contains(&words), "{text}");
    }
}
