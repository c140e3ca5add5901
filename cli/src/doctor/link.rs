// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Links of the path: as fast and as wide as both ends can, and fast enough for the NIC's ports.

use super::route::{Joined, Route};
use super::scan::{Check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::Unseen;
use crate::machine::pci::Address;
use crate::machine::{Hca, Port};

pub(super) const LINK: Check = Check {
    name: "link",
    about: "speed and width of each link of the path, against what both its ends can",
    applies: super::route::applies,
    run: link,
};

pub(super) const SLOT: Check = Check {
    name: "slot",
    about: "whether the NIC's slot is as fast as its port",
    applies: |scan| scan.has_hardware_hca(),
    run: slot,
};

fn link(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for pair in scan.pairs() {
        let Some(route) = Route::of(scan, pair) else {
            continue;
        };
        let ends = [(route.gpu, true), (route.nic, false)];
        // Data Direct is in one chip with the switch above it.
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
                findings.push(Scan::unseen(LINK.name, Subject::pair(pair), what, why));
            }
        }
    }
    findings
}

/// Of a GPU whose link has no reason to be slow, in percent.
const BUSY: u32 = 10;

/// How it shows that a GPU is at work, as NVML has it. None: it is idle, or nobody knows.
fn work(scan: &Scan<'_>, gpu: Address) -> Option<String> {
    let nvml = scan.software().nvml.as_ref().ok()?;
    let gpu = nvml.gpu(gpu)?;
    if let Some(percent) = gpu.utilization_percent.filter(|percent| *percent >= BUSY) {
        return Some(format!("{percent} % busy"));
    }
    // Without persistence mode to ask is to wake it.
    let is_awake = gpu.performance_state == Some(0) && gpu.persistence_mode == Some(true);
    is_awake.then(|| "in performance state P0".to_owned())
}

/// `gpu` is at the lower end, if it is.
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
        Some(work) => format!("{link}, and the GPU is {work}; both ends can {most}"),
        None => format!("{link}; both ends can {most}"),
    };
    match (is_narrow, is_slow) {
        (false, false) => Finding::new(
            LINK.name,
            Level::Ok,
            subject,
            format!("{link}, all that both ends can"),
        ),
        // Its own power management, which gives the lanes back their speed in a moment.
        (false, true) if gpu.is_some() && work.is_none() => Finding::new(LINK.name, Level::Note, subject, less)
            .why("GPUs lower their link's speed when idle: it looks so then.")
            .fix("Run doctor again while the GPU works; `nvidia-smi -q -d PERFORMANCE` tells its state."),
        _ => Finding::new(LINK.name, Level::Warning, subject, less)
            .why("A link trains down where lanes or contacts are bad, a riser or cable does not do the speed, or \
                the slot has fewer lanes.")
            .costs(format!(
                "{} of {} Gb/s.",
                gigabits(now.megabits()),
                gigabits(most.megabits())
            ))
            .fix(
                "Seat the NIC anew, look at riser and cable, and at the slot's lanes (\"bifurcation\", \"Link \
                 Speed\") in the firmware's setup; `dmesg | grep -i 'available PCIe bandwidth'`",
            ),
    }
}

/// In tenths.
pub(super) fn gigabits(megabits: u64) -> String {
    match megabits / 100 {
        tenths if tenths % 10 == 0 => format!("{}", tenths / 10),
        tenths => format!("{}.{}", tenths / 10, tenths % 10),
    }
}

/// The rate of a port, in millions of bits a second.
pub(super) fn port_rate(port: &Port) -> Option<u64> {
    rate_of(port.rate.as_deref()?)
}

/// Of `400 Gb/sec (4X NDR)`, in millions of bits a second.
pub(crate) fn rate_of(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ')?;
    if !unit.starts_with("Gb/sec") {
        return None;
    }
    // `2.5`: there are no finer ones.
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    let whole: u64 = whole.parse().ok()?;
    let tenth: u64 = tenth.parse().ok().filter(|tenth| *tenth < 10)?;
    whole.checked_mul(1000)?.checked_add(tenth * 100)
}

fn slot(scan: &Scan<'_>) -> Vec<Finding> {
    let hcas = scan.hcas().filter(|hca| !hca.is_software);
    hcas.filter_map(|hca| of_slot(scan, hca)).collect()
}

fn of_slot(scan: &Scan<'_>, hca: &Hca) -> Option<Finding> {
    let functions = &scan.machine.functions;
    let function = functions.get(&hca.at?)?;
    // What its own slot carries is no GPU memory.
    if scan.is_by_data_direct(hca) {
        return None;
    }
    // A virtual function has no link of its own.
    if function.physical.is_some() {
        return None;
    }
    let upper = functions.get(function.above.last()?)?;
    let joined = Joined::of(upper, function)?;
    let link = joined.most.megabits();
    let active = hca.ports.iter().filter(|port| super::port::is_active(port));
    let port = active.filter_map(port_rate).max()?;
    // Of a port's rate all is data; of a link's, headers take some, which no slot can help.
    if link == 0 || port <= link {
        return Some(Finding::new(
            SLOT.name,
            Level::Ok,
            Subject::hca(hca),
            format!(
                "slot and NIC can {}, for a port of {} Gb/s",
                joined.most,
                gigabits(port)
            ),
        ));
    }
    let finding = Finding::new(
        SLOT.name,
        scan.level_of(hca, Level::Warning),
        Subject::hca(hca),
        format!(
            "slot and NIC can {} ({} Gb/s), and a port is {} Gb/s",
            joined.most,
            gigabits(link),
            gigabits(port)
        ),
    );
    Some(
        finding
            .why("No byte gets faster into the GPU than the slot lets it.")
            .costs(format!(
                "{} of {} Gb/s at most.",
                gigabits(link),
                gigabits(port)
            ))
            .fix(format!(
                "Put it into a slot as fast as itself: the port above ({}) can {}, the NIC {}.",
                upper.at,
                upper.link.as_ref().map_or(joined.most, |link| link.most),
                function.link.as_ref().map_or(joined.most, |link| link.most),
            )),
    )
}
