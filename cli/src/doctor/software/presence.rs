// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Presence of a GPU and of an RDMA device.

use super::netns;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::host::Unseen;
use crate::machine::{Listed, Unread};
use crate::render::counted;

check! {
    "presence": "whether there is a GPU, and an RDMA device",
    |_| true, check, OfSoftware(tests::FAULTS)
}

const DEVICES: &str = "/sys/class/infiniband";

/// Reports a device whose entry in sysfs cannot be read. Other checks do not know such a device.
fn unread(unread: &Unread) -> Finding {
    let (what, fix) = match &unread.device {
        Listed::Pci(at) => (
            format!("{at} on PCI"),
            format!("`lspci -s {at}`, and `dmesg | grep {at}`"),
        ),
        Listed::Hca(name) => (
            format!("the RDMA device {name}"),
            "`rdma link show` lists the RDMA devices that the kernel has".to_owned(),
        ),
    };
    match &unread.why {
        Unseen::Failed(why) => Subject::Machine
            .warning(format!("{what} is listed, but cannot be read: {why}"))
            .why("Nothing is known about the device. Other checks behave as if it did not exist.")
            .fix(fix),
        why => Scan::unseen(Subject::Machine, what, why),
    }
}

/// Returns `true` if ib_core is present without ib_uverbs, its interface to programs.
pub(super) fn lacks_uverbs(scan: &Scan<'_>) -> bool {
    let there = |paths: [&str; 2]| paths.map(|path| scan.host.has(path));
    there(["/sys/module/ib_core", DEVICES]).contains(&Ok(true))
        // A built-in ib_core may have no folder in /sys/module, but creates the class
        // /sys/class/infiniband.
        && there(["/sys/module/ib_uverbs", "/sys/class/infiniband_verbs"]) == [Ok(false), Ok(false)]
}

/// Reports that there is no RDMA device.
fn without_hca(scan: &Scan<'_>) -> Finding {
    let found = match scan.host.names(DEVICES) {
        Err(Unseen::Absent) => "no RDMA device: ib_core is not loaded",
        Ok(_) => "no RDMA device in /sys/class/infiniband",
        Err(why) => return Scan::unseen(Subject::Machine, DEVICES, &why),
    };
    let elsewhere = netns::elsewhere(scan);
    if let Some(first) = elsewhere.first() {
        return Subject::Machine
            .fault(format!(
                "no RDMA device in this network namespace; the RDMA devices of {} (the first: {first}) are in another \
                 namespace",
                counted(elsewhere.len(), "NIC")
            ))
            .why(
                "RDMA is in exclusive mode: each RDMA device belongs to one network namespace, and programs in others \
                find none (NCCL: \"NET/IB : No device found\")",
            )
            .fix(netns::FIX);
    }
    let why = "ibv_reg_mr is a call to an RDMA device";
    let loaded: Vec<&str> = netns::loaded(scan).collect();
    let first = match lacks_uverbs(scan) {
        true => "`sudo modprobe ib_uverbs`, which is not loaded, and then ",
        false => "",
    };
    if first.is_empty() && !loaded.is_empty() {
        let found = format!("{found}, although {} is loaded", loaded.join(", "));
        return Subject::Machine.fault(found).why(why).fix(format!(
            "{}; a NIC with RoCE turned off has no RDMA device either: `devlink dev param show`, enable_roce; `dmesg | \
             grep -i -e mlx5 -e infiniband` says why a driver made none",
            netns::FIX
        ));
    }
    Subject::Machine.fault(found).why(why).fix(format!(
        "{first}`sudo modprobe mlx5_ib`, or another driver of the NIC (bnxt_re, irdma, efa); in a virtual machine or a \
        container, give it the NIC"
    ))
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = scan.machine.unread.iter().map(unread).collect();
    let is_hca = |unread: &Unread| matches!(unread.device, Listed::Hca(_));
    let (unread_hcas, unread_pci): (Vec<&Unread>, Vec<&Unread>) =
        scan.machine.unread.iter().partition(|one| is_hca(one));
    if scan.machine.gpus.is_empty() && unread_pci.is_empty() {
        findings.push(
            Subject::Machine
                .fault("no NVIDIA GPU on PCI")
                .why("GPUDirect RDMA moves bytes between a GPU's memory and an RDMA device")
                .fix("in a virtual machine or a container, give it the GPU; `lspci -d 10de:` lists NVIDIA's \
                devices on PCI"),
        );
    }
    if scan.machine.hcas.is_empty() && !unread_hcas.is_empty() {
        return findings;
    }
    if scan.machine.hcas.is_empty() {
        findings.push(without_hca(scan));
    } else if lacks_uverbs(scan) {
        findings.push(
            Subject::Machine
                .fault("ib_uverbs is not loaded")
                .why(
                    "Programs open RDMA devices through ib_uverbs (/dev/infiniband/uverbs*). In MLNX_OFED since 5.5 \
                    and in DOCA-OFED, ib_uverbs also has the interface for peer memory.",
                )
                .fix("`sudo modprobe ib_uverbs`"),
        );
    } else if scan.machine.hcas.iter().all(|hca| hca.is_software) {
        // The test VM's rxe uses the memory of the stand-in GPU.
        let found = "all RDMA devices are software (rxe, siw)";
        let finding = match scan.machine.gpus.iter().all(|gpu| gpu.is_stand_in) {
            true => Subject::Machine.note(found),
            false => Subject::Machine.fault(found),
        };
        findings.push(
            finding
            .why("They copy with the processor, and cannot register GPU memory: there is no GPUDirect RDMA.")
            .fix(
                "Use a NIC with RDMA. If there is one, load its driver, for example `sudo modprobe mlx5_ib`; `lspci | \
                grep -i -e ethernet -e infiniband` lists NICs",
            ),
        );
    } else {
        findings.push(Subject::Machine.ok(format!(
            "{}, {}",
            counted(scan.machine.gpus.len(), "GPU"),
            counted(scan.machine.hcas.len(), "RDMA device")
        )));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, unload, without_function};
    use crate::software::REGISTER;

    faults! {
        "an ib_core that may have peer memory in a module that is not loaded",
            "fault presence: …sudo modprobe ib_uverbs" => |fixture| {
            unload(fixture);
            without_function(fixture, REGISTER);
            fixture.remove("/sys/module/ib_uverbs");
        };
        "an ib_core with peer memory, and no ib_uverbs for programs", "fault presence: …sudo modprobe ib_uverbs" =>
            |fixture| fixture.remove("/sys/module/ib_uverbs");
    }
}
