// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Differences from a recording of this machine, or of a similar machine: missing devices, ports
//! that are down, lower rates, slower links.
//!
//! A missing device leaves no trace in sysfs. Only a comparison reveals a missing device.

use super::scan::{check, Scan};
use super::{bar1, port};
use crate::finding::{Finding, Subject};
use crate::host::nvml::Nvml;
use crate::machine::pci::{Address, DEVICES};
use crate::machine::{Gpu, Hca, Machine, Port};
use crate::render::{bytes, counted};
use crate::software::listed::{is_unlisted, is_withheld};
use crate::software::Software;

check! {
    "baseline": "with --baseline: whether GPUs, RDMA devices, ports and links are what they were in a recording",
    |scan| scan.baseline.is_some(), baseline, OwnTest
}

fn baseline(scan: &Scan<'_>) -> Vec<Finding> {
    let Some(baseline) = scan.baseline else {
        return Vec::new();
    };
    let before = &baseline.machine;
    let mut findings = Vec::new();
    let nvml = Nvml::scan(&baseline.recording);
    for was in &before.gpus {
        match scan.gpu(was.at) {
            Some(now)
                if is_unlisted(scan.machine, &scan.software().nvml, now)
                    && !is_unlisted(before, &nvml, was) =>
            {
                findings.push(unlisted_gpu(scan, now));
            }
            Some(now) => findings.extend(of_gpu(scan, before, was, now)),
            None => findings.push(lost_gpu(was)),
        }
    }
    for was in &before.hcas {
        match scan.machine.same_hca(was) {
            Some(now) => findings.extend(of_hca(scan, before, was, now)),
            None => findings.push(lost_hca(scan, was)),
        }
    }
    let (gpus, hcas) = (scan.machine.gpus.iter(), scan.machine.hcas.iter());
    let gpus = gpus.filter(|gpu| before.gpu(gpu.at).is_none());
    let hcas = hcas.filter(|hca| before.same_hca(hca).is_none());
    let others = gpus.map(Subject::gpu).chain(hcas.map(Subject::hca));
    findings.extend(others.map(|other| other.note("not in the baseline")));
    let version = |software: &Software| software.nvidia()?.version.clone();
    let (was, now) = (
        version(&Software::scan(&baseline.recording)),
        version(scan.software()),
    );
    if let (Some(was), Some(now)) = (was, now) {
        findings.extend(changed("nvidia.ko", &was, &now, Subject::Machine));
    }
    if findings.is_empty() {
        findings.push(Subject::Machine.ok(format!(
            "as in the baseline: {} and {}",
            counted(before.gpus.len(), "GPU"),
            counted(before.hcas.len(), "RDMA device")
        )));
    }
    findings
}

fn lost_gpu(was: &Gpu) -> Finding {
    Subject::gpu(was)
        .fault(format!(
            "the GPU is gone: the baseline has {} there",
            was.name
        ))
        .why("It fell off the bus, was not found at boot, or was taken out.")
        .fix(format!(
        "`dmesg | grep -e Xid -e {}` says when it disappeared; do a cold boot, then check its seating and power",
        was.at
    ))
}

/// Reports a GPU that NVML listed in the baseline and does not list now.
fn unlisted_gpu(scan: &Scan<'_>, now: &Gpu) -> Finding {
    match is_withheld(scan.host, now) {
        true => Subject::gpu(now)
            .note("NVML does not list the GPU, but did in the baseline")
            .why("In a container or a job, NVML lists only the GPUs that the process may open."),
        false => Subject::gpu(now)
            .fault("the GPU is on PCI, but NVML does not list it as it did in the baseline")
            .why("nvidia.ko could not start the GPU, or has lost it. CUDA does not see the GPU.")
            .fix(format!(
            "`dmesg | grep -e NVRM -e Xid -e {}` says why; do a cold boot, then check its seating and power",
            now.at
        )),
    }
}

fn lost_hca(scan: &Scan<'_>, was: &Hca) -> Finding {
    let lost = |found: String| Subject::hca(was).fault(found);
    let Some(at) = was.at else {
        return lost("the RDMA device is gone".to_owned())
            .fix("`rdma link show` lists the RDMA devices that are present");
    };
    match scan.host.has(&format!("{DEVICES}/{at}")) {
        Ok(false) => lost(format!(
            "the RDMA device is gone, and {at} is gone from PCI"
        ))
        .why("It fell off the bus, was not found at boot, or was taken out.")
        .fix(format!(
            "`dmesg | grep {at}` says when it disappeared; do a cold boot, then check its seating"
        )),
        _ => lost(format!("the RDMA device is gone, but {at} is still on PCI"))
            .why("The NIC's driver is not loaded, or could not initialize the NIC.")
            .fix(format!(
            "`dmesg | grep {at}` says why; load the NIC's driver, such as `sudo modprobe mlx5_ib`"
        )),
    }
}

fn of_gpu(scan: &Scan<'_>, before: &Machine, was: &Gpu, now: &Gpu) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(changed("the GPU", &was.name, &now.name, Subject::gpu(now)));
    if let (Some(was), Some(is)) = (was.bar1, now.bar1) {
        if is.size < was.size {
            findings.push(
                Subject::gpu(now)
                    .warning(format!(
                        "BAR1 is {}, but was {} in the baseline",
                        bytes(is.size),
                        bytes(was.size)
                    ))
                    .why("All processes together can register no more than the size of BAR1 at once.")
                    .fix(bar1::enlarge(true)),
            );
        }
    }
    // The speed is not compared, because the link of an idle GPU is slower.
    findings.extend(narrower(scan, before, was.at, false, Subject::gpu(now)));
    findings
}

fn of_hca(scan: &Scan<'_>, before: &Machine, was: &Hca, now: &Hca) -> Vec<Finding> {
    let subject = || Subject::hca(now);
    let mut findings = Vec::new();
    findings.extend(changed("its name", &was.name, &now.name, subject()));
    if let (Some(was), Some(now)) = (&was.firmware, &now.firmware) {
        findings.extend(changed("the firmware", was, now, subject()));
    }
    for port in &was.ports {
        let is = now.ports.iter().find(|is| is.number == port.number);
        findings.extend(match is {
            Some(is) => of_port(now, port, is),
            None => Some(subject().fault(format!("port {} is gone", port.number))),
        });
    }
    if let Some(at) = was.at {
        findings.extend(narrower(scan, before, at, true, subject()));
    }
    findings
}

fn of_port(hca: &Hca, was: &Port, now: &Port) -> Option<Finding> {
    if !was.is_active() {
        return None;
    }
    let number = now.number;
    if !now.is_active() {
        let state = now.state.as_deref()?;
        return Some(
            Subject::hca(hca)
                .warning(format!(
                    "port {number} is {state}, but was ACTIVE in the baseline"
                ))
                .fix(port::fix(hca, now)),
        );
    }
    let (then, is) = (was.megabits()?, now.megabits()?);
    (is < then).then(|| {
        let rate = |port: &Port| port.rate.clone().unwrap_or_default();
        Subject::hca(hca)
            .warning(format!(
                "port {number} has {}, but had {} in the baseline",
                rate(now),
                rate(was)
            ))
            .fix(port::cable(hca))
    })
}

/// Reports a link that has fewer lanes than before or, if `with_speed` is set, a lower speed.
fn narrower(
    scan: &Scan<'_>,
    before: &Machine,
    at: Address,
    with_speed: bool,
    subject: Subject,
) -> Option<Finding> {
    let link = |machine: &Machine| Some(machine.functions.get(&at)?.link.as_ref().ok()?.now);
    let (was, now) = (link(before)?, link(scan.machine)?);
    let is_less = now.width < was.width || (with_speed && now.speed < was.speed);
    is_less.then(|| {
        subject.warning(format!("the link above {at} is {now}, but was {was} in the baseline"))
        .why("A link trains down if lanes or contacts are bad.")
        .fix("Reseat the NIC, check riser and cable; `dmesg | grep -i 'available PCIe bandwidth'`")
    })
}

/// Reports a changed value as a note, because the change may be intended.
fn changed(what: &str, was: &str, now: &str, subject: Subject) -> Option<Finding> {
    (was != now).then(|| subject.note(format!("{what} is {now}, but was {was} in the baseline")))
}

#[cfg(test)]
mod tests {
    use super::super::software::tests::faults;
    use super::super::tests::are_found;
    use crate::fixture;

    faults! {
        "nothing" => |_| {};
        "a lost GPU", "fault baseline 0000:3b:00.0: the GPU is gone: the baseline has NVIDIA H100 80GB HBM3 there" =>
            |fixture| fixture.unplug("0000:3b:00.0");
        "a lost NIC", "fault baseline mlx5_4: the RDMA device is gone, and 0000:9a:00.0 is gone from PCI" =>
            |fixture| fixture.unplug("0000:9a:00.0");
        "a NIC whose driver failed",
            "fault baseline mlx5_4: the RDMA device is gone, but 0000:9a:00.0 is still on PCI" =>
            |fixture| fixture.remove("/sys/class/infiniband/mlx5_4");
        "an Ethernet port that is down", "warning baseline mlx5_8: port 1 is DOWN, but was ACTIVE in the baseline" =>
            |fixture| fixture.hca_file("mlx5_8", "ports/1/state", "1: DOWN\n");
        "all rails slower, so that no two differ",
            "warning baseline mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7: port 1 has 200 Gb/sec \
             (4X HDR), but had 400 Gb/sec (4X NDR) in the baseline" => |fixture| {
            for hca in 0..8 {
                fixture.hca_file(&format!("mlx5_{hca}"), "ports/1/rate", "200 Gb/sec (4X HDR)\n");
            }
        };
        "new firmware", "note baseline mlx5_0: the firmware is 28.43.2026, but was 28.39.1002 in the baseline" =>
            |fixture| fixture.hca_file("mlx5_0", "fw_ver", "28.43.2026\n");
    }

    /// Compares an HGX machine with a recording of its healthy state.
    #[test]
    fn a_baseline_finds_what_is_gone() {
        let mut before = fixture::hgx().with_software();
        let folder = tempfile::tempdir().unwrap();
        // The finding says "1 GPU", not "1 GPUs".
        let one = folder.path().join("one.json");
        let small = fixture::small().with_software();
        std::fs::write(&one, small.recording.to_json().unwrap()).unwrap();
        let told = format!(
            "$ doctor --all --baseline {}
             as in the baseline: 1 GPU and 1 RDMA device
             1 GPU, 1 RDMA device",
            one.display()
        );
        small.session(&told);
        let file = folder.path().join("before.json");
        std::fs::write(&file, before.recording.to_json().unwrap()).unwrap();
        let file = file.to_str().unwrap();
        are_found(&before, "baseline", file, FAULTS);
        let lines = "2$ doctor --baseline /none.json\n2$ export --baseline /none.json";
        before.session(lines);
        // `export` reports the finding, too.
        before.unplug("0000:3b:00.0");
        let (text, _) = before.says(&format!("export --baseline {file}"));
        let sample = "peermem_doctor_findings{check=\"baseline\",level=\"fault\"} 1";
        assert!(text.lines().any(|line| line == sample), "{text}");
    }
}
