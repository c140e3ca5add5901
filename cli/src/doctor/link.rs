// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Speed and width of each link of a path, compared with the best speed and width that both ends of
//! the link support.

use super::route::{routes, Joined};
use super::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::host::Unseen;
use crate::machine::hca::gigabits;
use crate::machine::pci::Address;

check! {
    "link": "speed and width of each link of the path, compared with the maximum of both ends",
    super::route::applies, link, OnPaths(tests::FAULTS)
}

fn link(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (pair, route) in routes(scan) {
        let ends = [(route.gpu, true), (route.nic, false)];
        // Data Direct is on the same chip as the switch above it.
        for (end, is_gpu_side) in ends.into_iter().filter(|(end, _)| !end.is_data_direct()) {
            for joined in route.links(end) {
                let is_end = joined.lower.at == end.at;
                let subject = match (scan.gpu(pair.gpu), scan.hca(&pair.hca)) {
                    (Some(gpu), _) if is_end && is_gpu_side => Subject::gpu(gpu),
                    (_, Some(hca)) if is_end => Subject::hca(hca),
                    _ => Subject::pair(pair),
                };
                let gpu = (is_end && is_gpu_side).then_some(end.at);
                let finding = of_link(scan, &joined, gpu, subject);
                let level = scan.level(pair, finding.level);
                findings.push(Finding { level, ..finding });
            }
            let unseen = match &end.link {
                Err(why) if *why != Unseen::Absent => Some(why),
                _ => None,
            };
            if let Some(why) = unseen {
                let what = format!("the link of {}", end.at);
                findings.push(Scan::unseen(Subject::pair(pair), what, why));
            }
        }
    }
    findings
}

/// Lowest utilization of a GPU at which a slow link is a warning, in percent.
const BUSY: u32 = 10;

/// Returns NVML's evidence that a GPU is working, or `None` if the GPU is idle or its utilization
/// is unknown.
fn work(scan: &Scan<'_>, gpu: Address) -> Option<String> {
    let nvml = scan.software().nvml.as_ref().ok()?;
    let gpu = nvml.gpu(gpu)?;
    if let Some(percent) = gpu.utilization_percent.filter(|percent| *percent >= BUSY) {
        return Some(format!("{percent} % busy"));
    }
    // Without persistence mode, the query itself wakes the GPU.
    let is_awake = gpu.performance_state == Some(0) && gpu.persistence_mode == Some(true);
    is_awake.then(|| "in performance state P0".to_owned())
}

/// Returns the finding about a link. `gpu` is set if the lower end of the link is a GPU.
fn of_link(
    scan: &Scan<'_>,
    joined: &Joined<'_>,
    gpu: Option<Address>,
    subject: Subject,
) -> Finding {
    let (now, most) = (joined.now, joined.most);
    let (upper, lower) = (joined.upper.at, joined.lower.at);
    let is_narrow = now.width < most.width;
    let is_slow = now.speed < most.speed;
    let link = format!("the link {upper} \u{2013} {lower} is {now}");
    let work = gpu.and_then(|gpu| work(scan, gpu));
    let less = match &work {
        Some(work) => format!("{link} while the GPU is {work}; both ends support {most}"),
        None => format!("{link}; both ends support {most}"),
    };
    match (is_narrow, is_slow) {
        (false, false) => subject.ok(format!("{link}, the maximum of both ends")),
        // The power management of an idle GPU lowers the speed, and restores the speed when the GPU
        // works.
        (false, true) if gpu.is_some() && work.is_none() => subject.note(less)
            .why("GPUs lower their link's speed when idle, and the link then looks like this.")
            .fix("Run doctor again while the GPU works; `nvidia-smi -q -d PERFORMANCE` shows its state."),
        _ => subject.warning(less)
            .why("A link trains down if lanes or contacts are bad, if a riser or cable does not support the speed, \
                or if the slot has fewer lanes.")
            .costs(format!(
                "{} of {} Gb/s.",
                gigabits(now.megabits()),
                gigabits(most.megabits())
            ))
            .fix(
                "Reseat the NIC, check riser and cable, and check the slot's lanes (\"bifurcation\", \"Link Speed\") \
                 in the firmware's setup; `dmesg | grep -i 'available PCIe bandwidth'`",
            ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, FIRST, SECOND};

    faults! {
        "a link at half its lanes",
            "warning link: …the link 0000:12:01.0 \u{2013} 0000:14:00.0 is 32.0 GT/s x8; both ends support 32.0 GT/s \
             x16… fix …riser" => |fixture| {
            let it = socket(FIRST);
            for at in [it.nic, it.nic_port] {
                fixture.function(at).link.as_mut().unwrap().now.width = 8;
            }
        };
        "a GPU's link at half its lanes", "warning link: …0000:83:00.0 is 32.0 GT/s x8… fix …riser" => |fixture| {
            let it = socket(SECOND);
            for at in [it.gpu, it.gpu_port] {
                fixture.function(at).link.as_mut().unwrap().now.width = 8;
            }
        };
        "a NIC's link at less speed", "warning link: …is 16.0 GT/s x16; both ends support 32.0 GT/s x16… fix …riser" =>
            |fixture| {
                let it = socket(FIRST);
                for at in [it.nic, it.nic_port] {
                    fixture.function(at).link.as_mut().unwrap().now.speed = 160;
                }
            };
    }
}
