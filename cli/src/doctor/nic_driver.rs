// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! NICs without an RDMA device, and Data Direct functions.

use super::bar1::ROOM;
use super::controls::UNUSED;
use super::gpu_driver::silent;
use super::scan::{check, Scan};
use super::software::netns;
use crate::finding::{Finding, Subject};
use crate::machine::pci::{Function, MELLANOX};

// The check does not apply if `--pair` is set, because the selected pair has an RDMA device.
check! {
    "nic-driver": "InfiniBand and NVIDIA NICs for which no driver makes an RDMA device, and Data Direct functions",
    |scan| scan.only.is_none() && scan.machine.functions.values().any(is_nic), nic_driver, OnPaths(tests::FAULTS)
}

/// Class code of an InfiniBand controller.
const INFINIBAND: u32 = 0x0207;
/// Class code of an Ethernet controller.
const ETHERNET: u32 = 0x0200;

fn is_nic(function: &Function) -> bool {
    match function.class >> 8 {
        _ if function.is_data_direct() => true,
        INFINIBAND => true,
        ETHERNET => function.vendor == MELLANOX,
        _ => false,
    }
}

fn nic_driver(scan: &Scan<'_>) -> Vec<Finding> {
    let is_known = |function: &Function| {
        let mut hcas = scan.machine.hcas.iter();
        hcas.any(|hca| hca.functions().contains(&function.at))
    };
    let mut findings = Vec::new();
    for function in scan.machine.functions.values().filter(|it| is_nic(it)) {
        if function.is_data_direct() {
            findings.extend(data_direct(scan, function));
            continue;
        }
        if function.is_silent() {
            let mut hcas = scan.machine.hcas.iter();
            let own = hcas.find(|hca| hca.functions().contains(&function.at));
            let subject = own.map_or(Subject::Machine, Subject::hca);
            findings.push(silent(subject, function.at));
            continue;
        }
        // A virtual function without a driver may be meant for a virtual machine.
        if is_known(function) || function.physical.is_some() {
            continue;
        }
        let at = function.at;
        if netns::is_elsewhere(scan, at) {
            // If the machine shows no RDMA device at all, the check `presence` reports the
            // namespace.
            if !scan.machine.hcas.is_empty() {
                let found =
                    format!("the RDMA device of the NIC {at} is in another network namespace");
                findings.push(Subject::Machine.note(found).fix(netns::FIX));
            }
            continue;
        }
        findings.push(match function.driver.as_deref() {
            None if function.unassigned().next().is_some() => Subject::Machine.warning(format!(
                "the NIC {at} has no driver, and BARs without an address"
            ))
            .why("Its driver does not drive a NIC whose BARs have no address. The firmware or the kernel found no \
                room for them.")
            .fix(ROOM),
            None => Subject::Machine.warning(format!("the NIC {at} has no driver"))
            .why("It has no RDMA device, so nothing can be registered with it.")
            .fix(
                "`modprobe mlx5_core` (or the driver of another vendor's NIC), and read the kernel's log",
            ),
            Some("vfio-pci") => Subject::Machine.note(format!(
                "the NIC {at} is given to a virtual machine (vfio-pci)"
            )),
            Some(driver) => Subject::Machine.note(format!(
                "the NIC {at} has the driver {driver}, which makes no RDMA device"
            ))
            .fix({
                let rdma = match driver {
                    "mlx4_core" => "mlx4_ib",
                    _ => "mlx5_ib",
                };
                let roce = format!("`devlink dev param show pci/{at} name enable_roce`");
                match netns::loaded(scan).any(|it| it == rdma) {
                    true => roce,
                    false => format!("`modprobe {rdma}`; {roce}"),
                }
            }),
        });
    }
    findings
}

/// Reports a Data Direct function that cannot be used, or whose RDMA device is unknown.
fn data_direct(scan: &Scan<'_>, function: &Function) -> Option<Finding> {
    let at = function.at;
    if function.driver.is_none() {
        return Some(
            Subject::Machine.warning(format!("the Data Direct function {at} has no driver"))
                .why(
                    "The mlx5_ib of Linux 6.12 or newer, or of OFED, drives the function. Without this driver, software does \
                     not find Data Direct.",
                )
                .costs(UNUSED)
                .fix("`modprobe mlx5_ib`, of a newer kernel or OFED; `dmesg | grep mlx5` says why mlx5_ib does not \
                    drive the function"),
        );
    }
    if !scan.machine.unassigned_data_direct().any(|it| it.at == at) {
        return None;
    }
    let what = format!("which RDMA device the Data Direct function {at} belongs to");
    Some(match &scan.machine.data_direct_unseen {
        Some(why) => Scan::unseen(Subject::Machine, what, why),
        None => Subject::Machine
            .note(format!(
                "{what} is not known: no RDMA device's VPD has the same V3 field"
            ))
            .why(
                "The function's paths are therefore not judged. The paths of the RDMA devices' own functions are judged.",
            ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, FIRST};
    use crate::fixture;

    faults! {
        "a NIC without a driver", "warning nic-driver: …the NIC 0000:14:00.1 has no driver… fix …modprobe mlx5_core" =>
            |fixture| {
                let mut other = fixture.function(socket(FIRST).nic).clone();
                other.at.function = 1;
                other.driver = None;
                fixture.machine.functions.insert(other.at, other);
            };
    }

    #[test]
    fn data_direct_needs_a_driver_and_an_rdma_device() {
        let at = "0009:03:00.0";
        let told = |fixture: &fixture::Fixture, options: &str, words: &str| {
            let lines =
                format!("{options}\n{words}").replacen('$', "$ doctor --only nic-driver", 1);
            fixture.session(&lines)
        };
        let mut fixture = fixture::data_direct();
        let well = told(&fixture, "0$ --all", "");
        assert_eq!(well, "Nothing wrong was seen.");
        let own = fixture.place(at);
        fixture.remove(&format!("{own}/driver"));
        told(
            &fixture,
            "1$",
            "the Data Direct function 0009:03:00.0 has no driver",
        );
        let mut fixture = fixture::data_direct();
        fixture.vpd(at, "another");
        told(&fixture, "0$ --all", "no RDMA device's VPD has the same V3");
        let mut fixture = fixture::data_direct();
        fixture.unprivileged();
        let words = "the Data Direct function 0009:03:00.0 belongs to: not visible without root";
        told(&fixture, "$ --all", words);
    }
}
