// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Maximum payload size of a packet (MaxPayload) at each function of a path.

use super::packets::{counted, express};
use super::route::routes;
use super::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::host::Seen;
use crate::machine::pci::Function;

check! {
    "max-payload": "MaxPayload of both ends and of each bridge between",
    super::route::applies, max_payload, OnPaths(tests::FAULTS)
}

/// A function on a path, with its configured and its largest supported payload, in bytes.
struct Payload<'a> {
    function: &'a Function,
    set: u32,
    most: u32,
}

/// Returns the payload sizes of the functions of `chain`, in the same order.
fn payloads<'a>(scan: &Scan<'a>, chain: &[&'a Function]) -> Seen<Vec<Payload<'a>>> {
    let mut all = Vec::new();
    for function in chain {
        let Some(function) = counted(scan, function) else {
            continue;
        };
        if let Some(express) = express(function)? {
            // A size of 0 stands for a reserved code in the register.
            if express.payload > 0 && express.payload_most > 0 {
                all.push(Payload {
                    function,
                    set: express.payload,
                    most: express.payload_most,
                });
            }
        }
    }
    Ok(all)
}

const MISMATCH: &str =
    "If a packet is larger than the next function accepts, that function drops it as malformed, and the sender's \
     link may go down.";

fn max_payload(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (pair, route) in routes(scan) {
        let subject = Subject::pair(pair);
        let sides = [route.gpu, route.nic].map(|end| payloads(scan, &route.down_to(end)));
        let (gpu_side, nic_side) = match sides {
            [Ok(gpu), Ok(nic)] => (gpu, nic),
            [Err(why), _] | [_, Err(why)] => {
                findings.push(Scan::unseen(subject, "MaxPayload along the path", &why));
                continue;
            }
        };
        let reported = |all: &[&Payload<'_>]| -> String {
            let each = all
                .iter()
                .map(|it| format!("{} {} B", it.function.at, it.set));
            each.collect::<Vec<_>>().join(", ")
        };
        // All functions in the order of a packet's path: up from the GPU, then down to the NIC.
        let all: Vec<&Payload<'_>> = gpu_side.iter().rev().chain(&nic_side).collect();
        let sets = || all.iter().map(|it| it.set);
        let (Some(least), Some(largest)) = (sets().min(), sets().max()) else {
            continue;
        };
        let steps = |side: &[Payload<'_>]| {
            let pairs = side.iter().zip(side.iter().skip(1));
            pairs.fold((false, false), |(smaller, larger), (upper, lower)| {
                (
                    smaller || upper.set < lower.set,
                    larger || upper.set > lower.set,
                )
            })
        };
        let (gpu_bad, gpu_odd) = steps(&gpu_side);
        let (nic_bad, nic_odd) = steps(&nic_side);
        let across = !route.is_through_root() && least != largest;
        if across || gpu_bad || nic_bad {
            let found = format!("MaxPayload differs along the path: {}", reported(&all));
            let finding = subject.fault(found).why(MISMATCH).fix(
                "Boot with pci=pcie_bus_safe, which sets all functions to the largest size that all support; or with \
                 pci=pcie_bus_peer2peer (128 B)",
            );
            findings.push(scan.judged(pair, finding));
            continue;
        }
        if gpu_odd || nic_odd {
            let found = format!(
                "a bridge sends larger packets than the device below is set to accept: {}",
                reported(&all)
            );
            // `pci=pcie_bus_perf` configures smaller payloads below a bridge on purpose, and limits
            // reads to the size that fits.
            let cmdline = scan.host.text("/proc/cmdline").unwrap_or_default();
            let finding = match cmdline.contains("pcie_bus_perf") {
                true => subject.note(found),
                false => subject.warning(found),
            };
            let fix =
                "Boot with pci=pcie_bus_safe, which sets all functions to the largest size that all support";
            findings.push(scan.judged(pair, finding.why(MISMATCH).fix(fix)));
            continue;
        }
        let most = all.iter().map(|it| it.most).min().unwrap_or(least);
        findings.push(match least < most.min(256) {
            true => subject
                .note(format!("MaxPayload is {least} B along the path, but all functions support {most} B"))
                .why("Each packet has about 20 to 30 bytes in addition to the payload.")
                .costs("Headers are 14 to 19 % of the bytes on the link at 128 B, and 7 to 10 % at 256 B.")
                .fix("Raise \"Max Payload Size\" in the firmware's setup, or boot with pci=pcie_bus_safe"),
            false => subject.ok(format!("MaxPayload is at least {least} B along the path")),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, EXPRESS, FIRST};

    faults! {
        "a GPU that takes smaller packets",
            "fault max-payload: …0000:13:00.0 256 B, 0000:12:00.0 512 B… fix …pci=pcie_bus_safe" =>
            |fixture| fixture.set(socket(FIRST).gpu, EXPRESS + 8, 0x5030);
    }
}
