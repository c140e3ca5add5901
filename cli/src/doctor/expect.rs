// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What the machine should have, by a file that is written by hand or by `--write-expect`: how many GPUs and RDMA
//! devices of each model, their links, ports and firmware, and the versions of modules.
//!
//! Unlike a recording (`baseline.rs`) it knows no slots, so that one file serves all nodes of a model, and what it
//! leaves out is not compared.

use super::expected::{active, link, model_of, of_gpu, version_file, Hcas, Model, Text};
use super::port;
use super::scan::{Check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::{Host, Unseen};
use crate::machine::hca::{gigabits, rate_of};
use crate::machine::pci::{Address, Rate};
use crate::machine::{Gpu, Hca, Port};
use crate::render::counted;
use crate::software::listed::{is_unlisted, is_withheld};

pub(super) const CHECK: Check = Check {
    name: "expect",
    about: "with --expect: whether GPUs, RDMA devices, ports, links, firmware and modules are those of a file",
    #[cfg(test)]
    row: [
        "with `--expect`: counts, links, ports, firmware, modules",
        "as [above](#what-is-gone)",
        "by finding",
    ],
    applies: |scan| scan.expected.is_some(),
    run: expect,
    #[cfg(test)]
    faults: super::tests::Faults::OwnTest,
};

fn new(level: Level, subject: Subject, found: String) -> Finding {
    Finding::new(level, subject, found)
}

fn expect(scan: &Scan<'_>) -> Vec<Finding> {
    let Some(expected) = scan.expected else {
        return Vec::new();
    };
    let machine = scan.machine;
    let is_of = |at: Address, device: Option<Text<Model>>| {
        device.is_none_or(|Text(model)| model_of(machine, at) == Some(model))
    };
    let mut findings = Vec::new();
    for wanted in &expected.gpus {
        let gpus = machine.gpus.iter();
        let nvml = &scan.software().nvml;
        let (unlisted, there): (Vec<&Gpu>, Vec<&Gpu>) = gpus
            .filter(|gpu| is_of(gpu.at, wanted.device))
            .partition(|gpu| is_unlisted(machine, nvml, gpu));
        let count = count("GPU", "10de:", there.len(), wanted.count, wanted.device);
        findings.extend(count.map(|finding| with_unlisted(scan, finding, &unlisted)));
        for gpu in there {
            if let Some(Text(least)) = wanted.link {
                let now = link(machine, gpu.at).map(of_gpu);
                findings.extend(of_link(gpu.at, now, least, Subject::gpu(gpu)));
            }
        }
    }
    for wanted in &expected.hcas {
        let hcas = machine.hcas.iter().filter(|hca| !hca.is_software);
        let there: Vec<_> = hcas
            .filter(|hca| match hca.at {
                Some(at) => is_of(at, wanted.device),
                None => wanted.device.is_none(),
            })
            .collect();
        findings.extend(count(
            "RDMA device",
            "15b3:",
            there.len(),
            wanted.count,
            wanted.device,
        ));
        for hca in there {
            findings.extend(of_hca(scan, hca, wanted));
        }
    }
    for (module, version) in &expected.modules {
        findings.extend(of_module(scan.host, module, version));
    }
    if findings.is_empty() {
        findings.push(new(
            Level::Ok,
            Subject::Machine,
            format!(
                "{}, {} and {} are as expected",
                counted(
                    expected.gpus.iter().map(|gpus| gpus.count).sum::<usize>(),
                    "GPU"
                ),
                counted(
                    expected.hcas.iter().map(|hcas| hcas.count).sum::<usize>(),
                    "RDMA device"
                ),
                counted(expected.modules.len(), "module")
            ),
        ));
    }
    findings
}

/// `any` is what `lspci -d` takes for all of them.
fn count(
    what: &str,
    any: &str,
    there: usize,
    wanted: usize,
    device: Option<Text<Model>>,
) -> Option<Finding> {
    let (of, filter) = match device {
        Some(Text(model)) => (format!(" of {model}"), model.to_string()),
        None => (String::new(), any.to_owned()),
    };
    let is_or_are = if wanted == 1 { "is" } else { "are" };
    let found = format!(
        "{}{of}, and {wanted} {is_or_are} expected",
        counted(there, what)
    );
    if there > wanted {
        return Some(new(Level::Note, Subject::Machine, found));
    }
    (there < wanted).then(|| {
        new(Level::Fault, Subject::Machine, found)
            .why("One fell off the bus, was not found at boot, lost its driver, or was taken out.")
            .fix(format!(
                "`lspci -d {filter}` lists those on PCI, and `dmesg | grep -i -e Xid -e 'fallen off' -e mlx5_core` \
                 says what went wrong; `peermemctl doctor --baseline FILE` names the slot, if there is a recording"
            ))
    })
}

/// Names the GPUs that are on PCI and do not count, since NVML does not list them.
fn with_unlisted(scan: &Scan<'_>, finding: Finding, unlisted: &[&Gpu]) -> Finding {
    if finding.level != Level::Fault || unlisted.is_empty() {
        return finding;
    }
    let each: Vec<String> = unlisted.iter().map(|gpu| gpu.at.to_string()).collect();
    let each = each.join(", ");
    if unlisted.iter().all(|gpu| is_withheld(scan.host, gpu)) {
        return new(Level::Note, finding.subject, finding.found).why(format!(
            "On PCI there are more ({each}). In a container or a job NVML lists the GPUs that it may open."
        ));
    }
    finding.why(format!(
        "{each} on PCI does not count: NVML does not list it, since nvidia.ko could not start it or has lost it."
    ))
}

fn of_link(at: Address, now: Option<Rate>, least: Rate, subject: Subject) -> Option<Finding> {
    let Some(now) = now else {
        let why = Unseen::Failed("its speed and width are unknown".to_owned());
        return Some(Scan::unseen(subject, format!("the link of {at}"), &why));
    };
    (now.width < least.width || now.speed < least.speed).then(|| {
        new(
            Level::Warning,
            subject,
            format!("the link above {at} is {now}, and {least} is expected"),
        )
        .why("A link trains down where lanes or contacts are bad.")
        .fix("Reseat the device, check riser and cable; `dmesg | grep -i 'available PCIe bandwidth'`")
    })
}

fn of_hca(scan: &Scan<'_>, hca: &Hca, wanted: &Hcas) -> Vec<Finding> {
    let mut findings = Vec::new();
    let warn = |found: String, fix: String| new(Level::Warning, Subject::hca(hca), found).fix(fix);
    // An unknown value is no reason to warn.
    let unknown = |what: String| {
        let why = Unseen::Failed("not known".to_owned());
        Scan::unseen(Subject::hca(hca), what, &why)
    };
    if let Some(least) = wanted.active_ports {
        let is = active(hca).count();
        let down = || hca.ports.iter().filter(|port| !port.is_active());
        if is < least && down().any(|port| port.state.is_none()) {
            findings.push(unknown("the state of its ports".to_owned()));
        } else if is < least {
            let state = |port: &Port| {
                let state = port.state.as_deref()?;
                Some(format!("port {} is {state}", port.number))
            };
            let states: Vec<String> = down().filter_map(state).collect();
            let expected = format!("{} expected", counted(least, "ACTIVE port"));
            let fix = down().next().map(|port| port::fix(hca, port));
            findings.push(warn(
                match states.is_empty() {
                    true => format!("{}, and {expected}", counted(is, "port")),
                    false => format!("{}; {expected}", states.join(", ")),
                },
                fix.unwrap_or_else(|| port::cable(hca)),
            ));
        }
    }
    if let Some(Text(least)) = &wanted.rate {
        for port in active(hca) {
            let number = port.number;
            match port
                .rate
                .as_deref()
                .and_then(|rate| Some((rate, rate_of(rate)?)))
            {
                None => findings.push(unknown(format!("the rate of port {number}"))),
                Some((rate, is)) if is < least.megabits => findings.push(warn(
                    format!(
                        "port {number} has {rate}, and {} Gb/s is expected",
                        gigabits(least.megabits)
                    ),
                    port::cable(hca),
                )),
                Some(_) => {}
            }
        }
    }
    match (&wanted.firmware, &hca.firmware) {
        (Some(_), None) => findings.push(unknown("the firmware's version".to_owned())),
        (Some(wanted), Some(is)) if is != wanted => findings.push(warn(
            format!("the firmware is {is}, and {wanted} is expected"),
            "`mlxfwmanager --query` shows what is installed and what there is".to_owned(),
        )),
        _ => {}
    }
    if let (Some(Text(least)), Some(at)) = (wanted.link, hca.at) {
        let now = link(scan.machine, at).map(|link| link.now);
        findings.extend(of_link(at, now, least, Subject::hca(hca)));
    }
    findings
}

fn of_module(host: &dyn Host, module: &str, wanted: &str) -> Option<Finding> {
    let new = |level, found: String| Some(new(level, Subject::Machine, found));
    let file = version_file(module);
    match host.text(&file) {
        Ok(version) if version == wanted => None,
        Ok(version) => new(
            Level::Warning,
            format!("{module} is {version}, and {wanted} is expected"),
        ),
        Err(Unseen::Absent) => {
            let directory = file.trim_end_matches("/version");
            match host.has(directory) {
                Ok(true) => new(
                    Level::Warning,
                    format!("{module} has no version, and {wanted} is expected"),
                ),
                _ => new(
                    Level::Fault,
                    format!("{module} is not loaded, and {wanted} is expected"),
                )
                .map(|finding| finding.fix(format!("`modprobe {module}`"))),
            }
        }
        Err(why) => Some(Scan::unseen(
            Subject::Machine,
            format!("the version of {module}"),
            &why,
        )),
    }
}
