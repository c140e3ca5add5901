// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Lines of the kernel log about the module, the driver, the GPUs and the NICs.
//!
//! The log is a ring buffer, and only its present contents are examined. Lines about loading matter
//! only while the module is not loaded, and [`super::module`] reports such lines. Lines about a
//! device are reported only if the scan found the device, or if the device is gone from PCI.
//!
//! The code for reports of several lines is in separate files: [`super::xid`], [`super::oops`],
//! [`super::pci_log`].

use std::collections::BTreeMap;

use super::{oops, pci_log, xid};
use crate::debugfs;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::machine::pci::{Address, DEVICES};
use crate::shipped::reason::{Event, EventInfo, Severity};
use crate::software::log::{addresses, counted, is_of_module, Record};

check! {
    "kernel-log": "the kernel's log since boot: the module, NVIDIA's Xids, crashes of drivers, IOMMU faults, PCIe, the NICs' firmware",
    |scan| scan.has_both(), check, OfSoftware(tests::FAULTS)
}

/// A kind of log line that causes a finding.
struct Pattern {
    level: Level,
    matches: fn(&str) -> bool,
    /// `true` if the line is reported only for a device that the line names.
    of_device: bool,
    why: &'static str,
    fix: Option<&'static str>,
}

const PATTERNS: &[Pattern] = &[
    Pattern {
        level: Level::Warning,
        matches: |line| {
            let is_bad = |it: &&EventInfo| it.severity == Severity::Error;
            is_of_module(line) && Event::ALL.iter().filter(is_bad).any(|it| line.contains(it.message))
        },
        of_device: false,
        why: "nvidia.ko did not release what the module asked it to release",
        fix: None,
    },
    Pattern {
        level: Level::Warning,
        matches: |line| line.contains("ERROR detected invalid context"),
        of_device: false,
        why: "NVIDIA's module met memory that was freed while it was registered; NVIDIA calls this harmless, but \
        users saw crashes after it (nv_peer_memory#120)",
        fix: Some("install driver 560 or newer, whose module makes registrations that cannot be revoked; or \
            use peermem-rs"),
    },
    Pattern {
        level: Level::Fault,
        // Lines that the driver calls Non-fatal are excluded.
        matches: |line| line.contains("SXid (PCI:") && line.contains(", Fatal,"),
        of_device: false,
        why: "a fatal error of an NVSwitch (SXid): GPUs lose their NVLinks to one another, and CUDA does not start on \
        them (error 802, \"system not yet initialized\") until the fabric manager has set the switches up again",
        fix: Some("`sudo systemctl status nvidia-fabricmanager` says whether it runs, and why not; end the programs \
        that use the GPUs, `sudo nvidia-smi --gpu-reset` for all GPUs and NVSwitches at once, `sudo systemctl \
        restart nvidia-fabricmanager`, or reboot; if it happens again, report it to the vendor with the log line"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            (line.contains("DMAR:") && line.contains("fault addr"))
                || (line.contains("AMD-Vi:") && line.contains("IO_PAGE_FAULT"))
        },
        of_device: true,
        why: "the IOMMU stopped a transfer of this device: the bytes did not arrive, and usually no program got an \
            error",
        fix: Some("boot with iommu=pt, if the machine can do without translation; otherwise report this to \
        the vendor with the log line"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| line.contains("AER:") && line.contains("Uncorrect") && line.contains("error"),
        of_device: true,
        why: "PCIe lost a packet for good: transfers at that moment failed or hang",
        fix: Some("check seating, risers and cables of the device; `dmesg | grep AER` shows the kind of error"),
    },
    Pattern {
        level: Level::Note,
        matches: |line| line.contains("AER:") && line.contains("Corrected error"),
        of_device: true,
        why: "PCIe sent packets again; many such errors cost speed, and often precede worse errors",
        fix: Some("check seating, risers and cables of the device, if the number of errors grows"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            line.contains("mlx5_core")
                && [
                    "health compromised",
                    "Health issue observed",
                    "assert_var[",
                    "handling bad device",
                    "unrecoverable hardware error",
                    "Will cause a leak of a command resource",
                ]
                .iter()
                .any(|words| line.contains(words))
        },
        of_device: true,
        why: "the NIC's firmware reported trouble; queues and memory regions of that time may be lost",
        fix: Some("update the NIC's firmware (`mlxfwmanager`); report it to the vendor with the log line if it \
        happens again"),
    },
    Pattern {
        level: Level::Warning,
        matches: |line| {
            line.contains("mlx5_core")
                && line.contains(" failed, status ")
                // Tools and exporters cause failed queries, and failed reads of registers that this
                // function may not read.
                && ![" ACCESS_REG(", " QUERY_"].iter().any(|words| line.contains(words))
        },
        of_device: true,
        why: "the NIC's firmware refused a command of the driver: a memory region, queue or other object was not made or \
        changed, and the program got an error",
        fix: Some("compare the time of the line with the time of the program's error; \"bad resource\" and \"limits \
        exceeded\" mean that the NIC has no more of these objects (`rdma resource show`); otherwise update the NIC's firmware \
        (`mlxfwmanager`), and report the syndrome to the vendor"),
    },
];

/// Returns `true` if a line of a NIC's driver is about a function that is gone from PCI.
fn is_of_gone(scan: &Scan<'_>, line: &str) -> bool {
    let is_gone = |at: &Address| scan.host.has(&format!("{DEVICES}/{at}")) == Ok(false);
    line.contains("mlx5_core ") && addresses(line).first().is_some_and(is_gone)
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let records = match &scan.software().log {
        Ok(records) => records,
        Err(why) => {
            return vec![Scan::unseen(
                Subject::Machine,
                "the kernel's log (/dev/kmsg)",
                why,
            )]
        }
    };
    let devices = scan.devices();
    let mut seen: BTreeMap<(usize, Subject), Vec<&Record>> = BTreeMap::new();
    // The module's counters are more exact than the log, and cover the time since loading.
    let has_counters = scan
        .host
        .text(&debugfs::path(scan.host, super::refusals::COUNTERS))
        .is_ok();
    for record in records {
        if has_counters && is_of_module(&record.text) {
            continue;
        }
        for (index, pattern) in PATTERNS.iter().enumerate() {
            if !(pattern.matches)(&record.text) {
                continue;
            }
            let subject = match pattern.of_device {
                true => addresses(&record.text)
                    .iter()
                    // In a line, the device that reports an error comes first, and the device with
                    // the error comes last.
                    .rev()
                    .find_map(|at| devices.get(at).cloned())
                    .or_else(|| is_of_gone(scan, &record.text).then_some(Subject::Machine)),
                false => Some(Subject::Machine),
            };
            if let Some(subject) = subject {
                seen.entry((index, subject)).or_default().push(record);
            }
        }
    }
    let reported = seen.into_iter().filter_map(|((index, subject), lines)| {
        let pattern = PATTERNS.get(index)?;
        let mut finding = Finding::new(pattern.level, subject, counted(&lines)).why(pattern.why);
        finding.fix = pattern.fix.map(str::to_owned);
        Some(finding)
    });
    let mut findings = xid::findings(scan, records);
    findings.extend(oops::findings(records));
    findings.extend(pci_log::findings(scan, &devices, records));
    findings.extend(reported);
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::super::tests::{faults, log};
    use crate::host::{Fact, Unseen};
    use proptest::prelude::*;

    faults! {
        "a log that only root reads", "not_visible kernel-log: …not visible without root" =>
            |fixture| fixture.without_fact(Fact::KernelLog, Unseen::Denied);
        "an IOMMU that stops the NIC", "warning kernel-log: …once 10 s after boot: DMAR:" => |fixture| log(fixture, &[
            "DMAR: [DMA Write NO_PASID] Request device [0000:18:00.0] fault addr 0x3f8000000000 [fault reason 0x05] \
             PTE Write access is not set",
        ]);
        "an IOMMU that stops another device" => |fixture| log(fixture, &[
            "DMAR: [DMA Write NO_PASID] Request device [0000:f9:00.0] fault addr 0x3f8000000000 [fault reason 0x05] x",
        ]);
        "a GPU that fell off the bus", "fault kernel-log: …Xid" => |fixture| log(fixture, &[
            "NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        ]);
        "GPUs that need a reset or a reboot",
            "fault kernel-log: …once 10 s after boot: NVRM: Xid (PCI:0000:19:00): 48, pid=7, An uncorrectable double \
             bit error (DBE) has been detected; also Xid 154 (the GPU needs a reboot of the machine)" =>
            |fixture| log(fixture, &[
                "NVRM: Xid (PCI:0000:19:00): 48, pid=7, An uncorrectable double bit error (DBE) has been detected",
                "NVRM: Xid (PCI:0000:19:00): 45, pid=7, Ch 00000008",
                "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot \
                 Required)",
            ]);
        "a GPU that was reset" => |fixture| log(fixture, &[
            "NVRM: Xid (PCI:0000:19:00): 119, pid=7, Timeout after 45s of waiting for RPC response from GPU0 GSP!",
            "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        ]);
        "Xids of applications" => |fixture| log(fixture, &[
            "NVRM: Xid (PCI:0000:19:00): 13, pid=7, Graphics SM Warp Exception on (GPC 7, TPC 0, SM 0)",
            "NVRM: Xid (PCI:0000:19:00): 43, pid=7, Ch 00000008",
            "NVRM: Xid (PCI:0000:19:00): 94, pid=7, Contained: CE User Channel (0x9)",
        ]);
        "an NVLink with errors", "warning kernel-log: …nvidia-smi nvlink -e" => |fixture| log(fixture, &[
            "NVRM: Xid (PCI:0000:19:00): 74, pid='<unknown>', NVLink: fatal error detected on link 6",
        ]);
        "an NVLink of Blackwell with a fatal error", "fault kernel-log: …nvidia-smi --gpu-reset -i 0000:19:00.0" =>
            |fixture| log(fixture, &[
                "NVRM: Xid (PCI:0000:19:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)",
            ]);
        "an unknown Xid", "warning kernel-log: …Xid catalog" =>
            |fixture| log(fixture, &["NVRM: Xid (PCI:0000:19:00): 999, pid=7, x"]);
        "a GPU that is gone from PCI", "fault kernel-log: …once 10 s after boot: NVRM: Xid (PCI:0000:f9:00): 79" =>
            |fixture| log(fixture, &[
                "NVRM: Xid (PCI:0000:f9:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                "NVRM: GPU 0000:f9:00.0: GPU has fallen off the bus.",
            ]);
        "a GPU that is off the bus, reported without an Xid", "fault kernel-log: …power, seating and cooling" =>
            |fixture| log(fixture, &["NVRM: GPU 0000:19:00.0: GPU has fallen off the bus."]);
        "a crash in ib_core", "fault kernel-log: …10 s after boot: BUG: kernel NULL pointer" =>
            |fixture| log(fixture, &[
                "BUG: kernel NULL pointer dereference, address: 0000000000000008",
                "Oops: 0000 [#1] PREEMPT SMP NOPTI",
                "RIP: 0010:ib_umem_release+0x51/0x3a0 [ib_core]",
            ]);
        "a crash in another driver" => |fixture| log(fixture, &[
            "Oops: 0000 [#1] PREEMPT SMP NOPTI",
            "RIP: 0010:nvme_queue_rq+0x51/0x3a0 [nvme]",
        ]);
        "a link that went down",
            "fault kernel-log: …once 10 s after boot: pcieport 0000:17:00.0: DPC: containment event" =>
            |fixture| log(fixture, &[
                "pcieport 0000:17:00.0: DPC: containment event, status:0x1f01 source:0x0000",
                "pcieport 0000:17:00.0: pciehp: Slot(12): Link Down",
                "pcieport 0000:17:00.0: pciehp: Slot(12): Card not present",
            ]);
        "a link that went down and came up again", "warning kernel-log: …Slot(12): Link Down" =>
            |fixture| log(fixture, &[
                "pcieport 0000:17:00.0: pciehp: Slot(12): Link Down",
                "pcieport 0000:17:00.0: pciehp: Slot(12): Link Up",
            ]);
        "a link of another device that went down" =>
            |fixture| log(fixture, &["pcieport 0000:f9:00.0: pciehp: Slot(12): Link Down"]);
        "a device that was taken out" => |fixture| log(fixture, &[
            "pcieport 0000:17:00.0: pciehp: Slot(12): Powering off due to button press",
            "pcieport 0000:17:00.0: pciehp: Slot(12): Card not present",
        ]);
        "commands that the NIC refuses", "warning kernel-log: …2 times, the last" => |fixture| log(fixture, &[
            "mlx5_core 0000:18:00.0: mlx5_cmd_out_err:838:(pid 4711): CREATE_MKEY(0x200) op_mod(0x0) failed, status \
             bad resource(0x5), syndrome (0x5fa1c), err(-22)",
            "mlx5_core 0000:18:00.0: mlx5_cmd_out_err:838:(pid 4711): CREATE_MKEY(0x200) op_mod(0x0) failed, status \
             bad resource(0x5), syndrome (0x5fa1c), err(-22)",
        ]);
        "registers of a NIC that exporters may not read" => |fixture| log(fixture, &[
            "mlx5_core 0000:18:00.0: mlx5_cmd_out_err:838:(pid 268): ACCESS_REG(0x805) op_mod(0x1) failed, status bad \
             resource(0x5), syndrome (0x305684), err(-22)",
        ]);
        "a command that the NIC never answered", "warning kernel-log: …mlxfwmanager" => |fixture| log(fixture, &[
            "mlx5_core 0000:18:00.0: wait_func:1151:(pid 4711): CREATE_MKEY(0x200) timeout. Will cause a leak of a \
             command resource",
        ]);
        "a NIC that is gone from PCI", "warning kernel-log: …0000:f9:00.0: poll_health" => |fixture| log(fixture, &[
            "mlx5_core 0000:f9:00.0: poll_health:819:(pid 0): device's health compromised - reached miss count",
        ]);
        "a BAR of the NIC without an address",
            "fault kernel-log: …2 times, the last 10 s after boot: pci 0000:18:00.0: BAR 0" =>
            |fixture| log(fixture, &[
                "pci 0000:18:00.0: BAR 0 [mem size 0x02000000 64bit pref]: can't assign; no space",
                "pci 0000:18:00.0: BAR 0 [mem size 0x02000000 64bit pref]: failed to assign",
            ]);
        "a BAR that got an address at the second attempt" => |fixture| log(fixture, &[
            "pci 0000:19:00.0: BAR 2: no space for [mem size 0x2000000000 64bit pref]",
            "pci 0000:19:00.0: BAR 2: failed to assign [mem size 0x2000000000 64bit pref]",
            "pci 0000:19:00.0: BAR 2: assigned [mem 0x3a0000000000-0x3a1fffffffff 64bit pref]",
            "pci 0000:19:00.0: BAR 6: no space for [mem size 0x00080000 pref]",
        ]);
        "NVSwitches with a fatal error", "fault kernel-log: …once 10 s after boot: nvidia-nvswitch0: SXid" =>
            |fixture| log(fixture, &[
                "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 12 LTSSM Fault Up",
                "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 12 Sub-engine instance 00",
            ]);
        "NVSwitches with a non-fatal error" => |fixture| log(fixture, &[
            "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
        ]);
        "packets sent again on the path", "note kernel-log: …2 times, the last" => |fixture| log(fixture, &[
            "pcieport 0000:16:00.0: AER: Corrected error message received from 0000:17:01.0",
            "pcieport 0000:16:00.0: AER: Corrected error message received from 0000:17:01.0",
        ]);
        "packets lost on the path", "warning kernel-log: …Uncorrectable" => |fixture| log(fixture, &[
            "pcieport 0000:15:01.0: AER: Uncorrectable (Non-Fatal) error message received from 0000:18:00.0",
        ]);
        "firmware in trouble", "warning kernel-log: …mlxfwmanager" => |fixture| log(fixture, &[
            "mlx5_core 0000:18:00.0: poll_health:819:(pid 0): device's health compromised - reached miss count",
        ]);
        "BAR1 without an address", "fault kernel-log: …Above 4G Decoding" =>
            |fixture| log(fixture, &["NVRM: BAR1 is 0M @ 0x0 (PCI:0000:19:00.0)"]);
        "NVIDIA's module met freed memory", "warning kernel-log: …driver 560" => |fixture| log(fixture, &[
            "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
        ]);
        "a module that was loaded after a failed attempt" =>
            |fixture| log(fixture, &["nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)"]);
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(text in any::<String>(), log in "([0-9]{0,3},){0,4}[-;a-z:.()0-9PCI]{0,80}") {
            for text in [&text, &log] {
                for pattern in PATTERNS {
                    (pattern.matches)(text);
                }
            }
        }
    }
}
