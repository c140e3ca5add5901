// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Comparison with a file that is written by hand or by `--write-expect`. The file contains the
//! number of GPUs and RDMA devices of each model, their links, ports and firmware, and versions of
//! modules.
//!
//! Unlike a recording (`baseline.rs`), the file contains no PCI addresses. One file therefore fits
//! all nodes of a model. Omitted values are not compared.

use super::expected::{active, link, model_of, of_gpu, version_file, Hcas, Model, Text};
use super::port;
use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::{Host, Unseen};
use crate::machine::hca::{gigabits, rate_of};
use crate::machine::pci::{Address, Rate};
use crate::machine::{Gpu, Hca, Port};
use crate::render::counted;
use crate::software::listed::{is_unlisted, is_withheld};

check! {
    "expect": "with --expect: whether GPUs, RDMA devices, ports, links, firmware and modules match a file",
    |scan| scan.expected.is_some(), expect, OwnTest
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
        let gpus: usize = expected.gpus.iter().map(|gpus| gpus.count).sum();
        let hcas: usize = expected.hcas.iter().map(|hcas| hcas.count).sum();
        findings.push(Subject::Machine.ok(format!(
            "{}, {} and {} are as expected",
            counted(gpus, "GPU"),
            counted(hcas, "RDMA device"),
            counted(expected.modules.len(), "module")
        )));
    }
    findings
}

/// Compares a number of devices with the expected number. `any` is the filter with which `lspci -d`
/// lists devices of any model.
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
        "{}{of}, but {wanted} {is_or_are} expected",
        counted(there, what)
    );
    if there > wanted {
        return Some(Subject::Machine.note(found));
    }
    (there < wanted).then(|| {
        Subject::Machine.fault(found)
            .why("A device fell off the bus, was not found at boot, lost its driver, or was taken out.")
            .fix(format!(
                "`lspci -d {filter}` lists the devices on PCI, and `dmesg | grep -i -e Xid -e 'fallen off' -e \
                 mlx5_core` says what went wrong; `peermemctl doctor --baseline FILE` names the slot, if there is a \
                 recording"
            ))
    })
}

/// Adds the GPUs that PCI lists but NVML does not to a finding about missing GPUs.
fn with_unlisted(scan: &Scan<'_>, finding: Finding, unlisted: &[&Gpu]) -> Finding {
    if finding.level != Level::Fault || unlisted.is_empty() {
        return finding;
    }
    let each: Vec<String> = unlisted.iter().map(|gpu| gpu.at.to_string()).collect();
    let each = each.join(", ");
    if unlisted.iter().all(|gpu| is_withheld(scan.host, gpu)) {
        return finding.subject.note(finding.found).why(format!(
            "PCI has more ({each}). In a container or a job, NVML lists only the GPUs that the process may open."
        ));
    }
    finding.why(format!(
        "Not counted: {each}. NVML does not list a GPU that nvidia.ko could not start or has lost."
    ))
}

fn of_link(at: Address, now: Option<Rate>, least: Rate, subject: Subject) -> Option<Finding> {
    let Some(now) = now else {
        let why = Unseen::Failed("its speed and width are unknown".to_owned());
        return Some(Scan::unseen(subject, format!("the link of {at}"), &why));
    };
    (now.width < least.width || now.speed < least.speed).then(|| {
        subject.warning(format!("the link above {at} is {now}, but {least} is expected"))
        .why("A link trains down if lanes or contacts are bad.")
        .fix("Reseat the device, check riser and cable; `dmesg | grep -i 'available PCIe bandwidth'`")
    })
}

fn of_hca(scan: &Scan<'_>, hca: &Hca, wanted: &Hcas) -> Vec<Finding> {
    let mut findings = Vec::new();
    let warn = |found: String, fix: String| Subject::hca(hca).warning(found).fix(fix);
    // An unknown value is not a reason to warn.
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
            let rate = port.rate.as_deref();
            match rate.and_then(|rate| Some((rate, rate_of(rate)?))) {
                None => findings.push(unknown(format!("the rate of port {number}"))),
                Some((rate, is)) if is < least.megabits => findings.push(warn(
                    format!(
                        "port {number} has {rate}, but {} Gb/s is expected",
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
            format!("the firmware is {is}, but {wanted} is expected"),
            "`mlxfwmanager --query` shows the installed and the available version".to_owned(),
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
    let file = version_file(module);
    let is = match host.text(&file) {
        Ok(version) if version == wanted => return None,
        Ok(version) => format!("is {version}"),
        Err(Unseen::Absent) => match host.has(file.trim_end_matches("/version")) {
            Ok(true) => "has no version".to_owned(),
            _ => {
                let found = format!("{module} is not loaded, but {wanted} is expected");
                let finding = Subject::Machine.fault(found);
                return Some(finding.fix(format!("`modprobe {module}`")));
            }
        },
        Err(why) => {
            let what = format!("the version of {module}");
            return Some(Scan::unseen(Subject::Machine, what, &why));
        }
    };
    Some(Subject::Machine.warning(format!("{module} {is}, but {wanted} is expected")))
}

#[cfg(test)]
mod tests {
    use super::super::software::tests::faults;
    use super::super::tests::are_found;
    use crate::finding::Status;
    use crate::{fixture, testing};

    /// The output of `--write-expect` matches the machine: a comparison finds nothing.
    #[test]
    fn each_machine_meets_its_own_expectation() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("expect.json");
        for (name, fixture) in fixture::all() {
            let (text, status) = fixture.says("doctor --write-expect");
            assert_eq!(status, Status::Ok, "{text}");
            if name == "hgx" {
                testing::golden("golden/expect-hgx.json", &text);
            }
            std::fs::write(&file, text).unwrap();
            let line = format!(
                "0$ doctor --only expect --all --json --expect {}",
                file.display()
            );
            let json = fixture.session(&line);
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            let findings = json["findings"].as_array().unwrap();
            assert_eq!(findings.len(), 1, "{name}: {json}");
            assert_eq!(findings[0]["level"], "ok", "{name}: {json}");
        }
    }

    faults! {
        "nothing" => |_| {};
        "a lost GPU", "fault expect 7 GPUs of 10de:2330, but 8 are expected why A device fell off the bus" =>
            |fixture| fixture.unplug("0000:3b:00.0");
        "a lost NIC", "fault expect 7 RDMA devices of 15b3:1021, but 8 are expected" =>
            |fixture| fixture.unplug("0000:9a:00.0");
        "a NIC whose driver failed", "fault expect 7 RDMA devices of 15b3:1021, but 8 are expected" =>
            |fixture| fixture.remove("/sys/class/infiniband/mlx5_4");
        "one more NIC", "note expect 9 RDMA devices of 15b3:1021, but 8 are expected" => |fixture| {
            let above = "0000:39:03.0";
            fixture.pci(above, "0000:3e:00.0", &fixture::Pci::connectx7(0));
            fixture.hca("mlx5_9", "0000:3e:00.0", "ib9", "InfiniBand", "400 Gb/sec (4X NDR)");
        };
        "dead rails", "warning expect mlx5_2, mlx5_5: port 1 is DOWN; 1 ACTIVE port expected" => |fixture| {
            fixture.hca_file("mlx5_2", "ports/1/state", "1: DOWN\n");
            fixture.hca_file("mlx5_5", "ports/1/state", "1: DOWN\n");
        };
        "a slow rail", "warning expect mlx5_3: port 1 has 200 Gb/sec (2X NDR), but 400 Gb/s is expected" =>
            |fixture| fixture.hca_file("mlx5_3", "ports/1/rate", "200 Gb/sec (2X NDR)\n");
        "other firmware", "warning expect mlx5_0: the firmware is 28.43.2026, but 28.39.1002 is expected" =>
            |fixture| fixture.hca_file("mlx5_0", "fw_ver", "28.43.2026\n");
        "a NIC's link with half of its lanes, and an idle GPU's",
            "warning expect mlx5_0: the link above 0000:18:00.0 is 32.0 GT/s x8, but 32.0 GT/s x16 is expected" =>
            |fixture| {
                for at in ["0000:17:00.0", "0000:18:00.0"] {
                    fixture.set_link(at, ("32.0 GT/s PCIe", 8), ("32.0 GT/s PCIe", 16));
                }
                for at in ["0000:17:01.0", "0000:19:00.0"] {
                    fixture.set_link(at, ("2.5 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16));
                }
            };
        "a GPU in a slot of half the lanes",
            "warning expect GPU 0: the link above 0000:19:00.0 is 32.0 GT/s x8, but 32.0 GT/s x16 is expected" =>
            |fixture| {
                for at in ["0000:17:01.0", "0000:19:00.0"] {
                    fixture.set_link(at, ("32.0 GT/s PCIe", 8), ("32.0 GT/s PCIe", 8));
                }
            };
        "another driver", "warning expect nvidia is 570.124.06, but 570.86.15 is expected" =>
            |fixture| fixture.file("/sys/module/nvidia/version", "570.124.06\n");
        "a module that is not loaded",
            "fault expect nvidia_peermem is not loaded, but 595.45.04-rs1 is expected fix `modprobe nvidia_peermem`" =>
            |fixture| fixture.remove("/sys/module/nvidia_peermem");
        "a module whose version cannot be seen",
            "not visible expect the version of nvidia: not visible without root" =>
            |fixture| fixture.deny("/sys/module/nvidia/version");
    }

    /// Compares an HGX machine with a file for all machines like it.
    #[test]
    fn what_is_not_as_expected_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("expect.json");
        let mut before = fixture::hgx().with_software();
        let expected = before.says("doctor --write-expect").0;
        std::fs::write(&file, expected).unwrap();
        let file = file.to_str().unwrap();
        are_found(&before, "expect", file, FAULTS);
        // `export` reports the finding, too.
        before.unplug("0000:3b:00.0");
        let (text, _) = before.says(&format!("export --expect {file}"));
        let sample = "peermem_doctor_findings{check=\"expect\",level=\"fault\"} 1";
        assert!(text.lines().any(|line| line == sample), "{text}");
    }

    /// An error in the file is reported with its line, and no check runs.
    #[test]
    fn a_wrong_expectation_is_refused_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("expect.json");
        let name = file.to_str().unwrap();
        let machine = fixture::small().with_software();
        let refused = |text: &str, says: &str| {
            std::fs::write(&file, text).unwrap();
            let told = format!(
                "2$ doctor --expect {name}
                 {says}
                 {name}
                 3$ doctor --nagios --expect {name}
                 ^ GPUDIRECT UNKNOWN - "
            );
            machine.session(&told);
        };
        let fields = "unknown field `gpu`, expected one of `gpus`, `hcas`, `modules` at line 2";
        refused("{\n \"gpu\": []}", fields);
        let fields = "unknown field `lanes`, expected one of `count`, `device`, `link` at line 3";
        refused("{\"gpus\": [\n {\"count\": 8,\n \"lanes\": 16}]}", fields);
        refused("{\"hcas\": [\n{}]}", "missing field `count` at line 2");
        let hcas = |text: &str, says: &str| refused(&format!("{{\"hcas\": [\n{{{text}}}]}}"), says);
        hcas("\"count\": \"8\"", "expected usize at line 2");
        let device = "\"H100\" is not a PCI vendor and device such as 15b3:1021 at line 2";
        hcas("\"count\": 1, \"device\": \"H100\"", device);
        let link = "\"gen5 x16\" is not a link such as \"32.0 GT/s x16\" at line 2";
        hcas("\"count\": 1, \"link\": \"gen5 x16\"", link);
        let rate = "\"NDR\" is not a rate such as \"400 Gb/sec (4X NDR)\" at line 2";
        hcas("\"count\": 1, \"rate\": \"NDR\"", rate);
        refused(
            "{\"modules\": {\"../x\": \"1\"}}",
            "\"../x\" is not a module's name",
        );
        refused("", "it is empty");
        // Omitted values are not compared.
        let text = "{\"gpus\": [{\"count\": 1}], \"hcas\": [{\"count\": 1}]}";
        std::fs::write(&file, text).unwrap();
        machine.session(&format!("0$ doctor --expect {name}"));
    }
}
