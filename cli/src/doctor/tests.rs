// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What is told of findings: to people, to programs, to monitoring.

use super::injected::bad;
use super::injected::socket;
use super::injected::Fixture;
use super::injected::ACS;
use super::injected::FIRST;
use super::injected::SECOND;
use super::*;
use crate::finding::Level;
use crate::finding::Subject;
use crate::fixture;
use crate::machine::config::Acs;
use crate::machine::pci::Function;
use crate::machine::Class;
use crate::testing;

#[test]
fn what_root_alone_sees_is_said_and_is_not_well() {
    let mut fixture = Fixture::healthy();
    for function in fixture.machine.functions.values_mut() {
        function.config.as_mut().unwrap().0.truncate(64);
    }
    let findings = fixture.findings();
    for check in [
        "acs",
        "ats",
        "max-payload",
        "relaxed-ordering",
        "max-read-request",
    ] {
        let of_check: Vec<&Finding> = findings.iter().filter(|it| it.check == check).collect();
        assert!(!of_check.is_empty(), "{check}");
        for finding in of_check {
            assert_eq!(finding.level, Level::NotVisible, "{finding:#?}");
            assert!(finding.needs_root, "{finding:#?}");
        }
    }
    // What stands in sysfs is seen all the same.
    assert!(bad(&findings)
        .iter()
        .all(|it| it.level == Level::NotVisible));
    let mut out = Out::gather(false);
    let status = print::nagios(&findings, &mut out);
    assert_eq!(status.code(), 3);
    assert!(out
        .into_text()
        .starts_with("GPUDIRECT UNKNOWN - nothing wrong was seen; "));
}

#[test]
fn a_pair_that_is_not_the_best_is_worth_a_note_unless_it_is_asked_for() {
    let fixture = Fixture::healthy();
    let far = fixture
        .machine
        .pairs
        .iter()
        .find(|pair| !pair.is_best)
        .unwrap();
    assert_eq!(far.class, Some(Class::Sys));
    let levels = |scan: &Scan<'_>| -> Vec<Level> {
        let findings = examine(scan, &[]).unwrap();
        let path = findings.into_iter().filter(|it| it.check == "path");
        path.map(|finding| finding.level).collect()
    };
    let mut scan = Scan::new(&fixture.host, &fixture.machine);
    assert_eq!(levels(&scan), [Level::Ok, Level::Ok]);
    scan.all = true;
    assert_eq!(
        levels(&scan),
        [Level::Note, Level::Note, Level::Ok, Level::Ok]
    );
    scan.only = Some(far);
    assert_eq!(levels(&scan), [Level::Warning]);
}

#[test]
fn findings_of_one_kind_are_told_under_one_head() {
    let mut fixture = Fixture::healthy();
    for bus in [FIRST, SECOND] {
        fixture.set(socket(bus).nic_port, ACS + 6, Acs::RR);
        fixture.machine.gpus[usize::from(bus == SECOND)]
            .bar1
            .as_mut()
            .unwrap()
            .size = 256 << 20;
    }
    let scan = Scan::new(&fixture.host, &fixture.machine);
    let findings: Vec<Finding> = fixture
        .findings()
        .into_iter()
        .filter(|finding| finding.level.is_finding())
        .collect();
    assert_eq!(findings.len(), 4);
    let mut out = Out::gather(false);
    let status = print::all(&scan, &findings, false, &mut out).unwrap();
    assert_eq!(status, Status::Findings);
    let text = out.into_text();
    println!("{text}");
    let count = |what: &str| text.matches(what).count();
    // One head for each kind.
    assert_eq!((count("warning acs"), count("warning bar1")), (1, 1));
    assert_eq!(
        (count("  why"), count("  costs"), count("  fix")),
        (2, 2, 2)
    );
    // What is the same of both is said once of both, what is not once of each.
    assert_eq!(count("GPU 0, GPU 1: BAR1 is 256 MiB"), 1);
    assert_eq!(count("setpci -s 0000:12:01.0 "), 1);
    assert_eq!(count("setpci -s 0000:82:01.0 "), 1);
    assert!(text.ends_with("4 warnings.\n"), "{text}");
}

#[test]
fn monitoring_gets_one_line_and_its_own_status() {
    let mut fixture = Fixture::healthy();
    let nagios = |fixture: &Fixture| {
        let mut out = Out::gather(false);
        let status = print::nagios(&fixture.findings(), &mut out);
        (status.code(), out.into_text())
    };
    assert_eq!(
        nagios(&fixture),
        (
            0,
            "GPUDIRECT OK - nothing wrong was seen | faults=0 warnings=0 notes=0 not_visible=0\n"
                .to_owned()
        )
    );
    fixture.set(socket(FIRST).nic_port, ACS + 6, Acs::RR);
    assert_eq!(
        nagios(&fixture),
        (
            1,
            "GPUDIRECT WARNING - 1 warning: acs | faults=0 warnings=1 notes=0 not_visible=0\n"
                .to_owned()
        )
    );
    fixture.function(socket(FIRST).gpu).driver = None;
    assert_eq!(nagios(&fixture).0, 2);
    assert!(nagios(&fixture)
        .1
        .starts_with("GPUDIRECT CRITICAL - 1 fault, 1 warning: "));
}

#[test]
fn a_check_or_a_pair_that_is_not_there_is_an_error() {
    let fixture = Fixture::healthy();
    let scan = Scan::new(&fixture.host, &fixture.machine);
    assert!(examine(&scan, &["no-such-check".to_owned()]).is_err());
    let skipped = examine(&scan, &["acs".to_owned()]).unwrap();
    assert!(!skipped.iter().any(|finding| finding.check == "acs"));
    for (name, is_there) in [
        ("0,mlx5_0", true),
        ("1, mlx5_0", true),
        ("0000:13:00.0,mlx5_1", true),
        ("13:00.0,mlx5_1", true),
        ("2,mlx5_0", false),
        ("0,mlx5_2", false),
        ("0", false),
        (",", false),
    ] {
        let found = pair_named(&fixture.machine, name);
        assert_eq!(found.is_ok(), is_there, "{name}");
    }
}

#[test]
fn one_pair_is_told_hop_by_hop() {
    let fixture = Fixture::healthy();
    let mut scan = Scan::new(&fixture.host, &fixture.machine);
    scan.only = fixture.machine.pairs.first();
    let findings = fixture.findings();
    let mut out = Out::gather(false);
    print::all(&scan, &findings, false, &mut out).unwrap();
    let text = out.into_text();
    println!("{text}");
    let places: Vec<usize> = [
        "0000:13:00.0",
        "0000:12:00.0",
        "0000:12:01.0",
        "0000:14:00.0",
    ]
    .iter()
    .map(|at| text.find(at).unwrap())
    .collect();
    assert!(places.is_sorted(), "{text}");
    let mut out = Out::gather(true);
    print::all(&scan, &findings, false, &mut out).unwrap();
    let json: serde_json::Value = serde_json::from_str(&out.into_text()).unwrap();
    assert_eq!(json["schema"], "peermemctl.doctor");
    assert_eq!(json["path"]["class"], "PIX");
    assert_eq!(json["path"]["hops"].as_array().unwrap().len(), 5);
    assert_eq!(json["path"]["hops"][1]["max_payload"], 512);
    assert_eq!(json["findings"].as_array().unwrap().len(), 0);
}

/// What the checks of paths and devices say of a synthetic machine, as `doctor` tells it.
fn reported(fixture: &fixture::Fixture, all: bool) -> (String, Status, Vec<Finding>) {
    let host = &fixture.recording;
    let machine = Machine::scan(host).unwrap();
    let mut scan = Scan::new(host, &machine);
    scan.all = all;
    let findings = run_all(&scan, OF_HARDWARE.iter());
    let mut out = Out::gather(false);
    let status = print::all(&scan, &findings, all, &mut out).unwrap();
    (out.into_text(), status, findings)
}

#[test]
fn every_machine_is_told_of_as_before() {
    for (name, fixture) in fixture::all() {
        let (brief, ..) = reported(&fixture, false);
        let mut text = format!("$ peermemctl doctor\n{brief}\n");
        // All pairs of eight GPUs are nothing to read again.
        if name != "hgx" {
            text.push_str(&format!(
                "$ peermemctl doctor --all\n{}",
                reported(&fixture, true).0
            ));
        }
        testing::golden(&format!("golden/paths-{name}.txt"), &text);
    }
}

/// The JSON of a machine with one fault, and of its one pair in full.
#[test]
fn json_is_as_before() {
    let fixture = fixture::acs();
    let host = &fixture.recording;
    let machine = Machine::scan(host).unwrap();
    let mut text = String::new();
    for only in [None, machine.pairs.first()] {
        let mut scan = Scan::new(host, &machine);
        scan.only = only;
        let findings = run_all(&scan, OF_HARDWARE.iter());
        let mut out = Out::gather(true);
        print::all(&scan, &findings, false, &mut out).unwrap();
        text.push_str(&out.into_text());
    }
    testing::golden("golden/paths-acs.json.txt", &text);
    let (checks, status) = testing::says(host, &["doctor", "--list-checks"]);
    assert_eq!(status, Status::Ok);
    assert!(
        OF_HARDWARE.iter().all(|check| checks.contains(check.name)),
        "{checks}"
    );
}

/// The machines that have a fault have that fault, and the others have none.
#[test]
fn made_up_machines_have_what_was_made_in_them() {
    for (name, fixture) in fixture::all() {
        let (text, status, findings) = reported(&fixture, false);
        let mut checks: Vec<&str> = findings
            .iter()
            .filter(|finding| finding.level.is_finding())
            .map(|finding| finding.check)
            .collect();
        checks.dedup();
        let wanted: &[&str] = match name {
            "acs" => &["acs"],
            "iommu" => &["iommu"],
            "trained_down" => &["link"],
            "small_bar1" => &["bar1"],
            _ => &[],
        };
        assert_eq!(checks, wanted, "{name}: {text}");
        let wanted_status = match wanted {
            [] => Status::Ok,
            _ => Status::Findings,
        };
        assert_eq!(status, wanted_status, "{name}");
        println!("{name}: {checks:?}");
    }
}

/// Sixteen good pairs, all redirected: one reason, a line for each pair, a command for each port.
#[test]
fn a_large_machine_is_told_of_in_little() {
    let mut fixture = fixture::hgx();
    let machine = Machine::scan(&fixture.recording).unwrap();
    let redirecting = fixture::Pci {
        acs: Some((fixture::ACS_ALL, fixture::ACS_LINUX)),
        ..fixture::Pci::switch_port(6, 0)
    };
    let mut ports = std::collections::BTreeSet::new();
    for gpu in &machine.gpus {
        let function = &machine.functions[&gpu.at];
        let up = function.above[function.above.len() - 2];
        let below = |it: &&Function| it.above.last() == Some(&up);
        ports.extend(machine.functions.values().filter(below).map(|it| it.at));
    }
    assert_eq!(ports.len(), 16);
    for port in &ports {
        fixture.set_config(&port.to_string(), &redirecting);
    }
    let (text, status, findings) = reported(&fixture, false);
    println!("{text}");
    assert_eq!(status, Status::Findings);
    assert_eq!(
        findings.iter().filter(|it| it.level.is_finding()).count(),
        16
    );
    assert_eq!(text.matches("warning acs").count(), 1);
    assert_eq!(text.matches("  why").count(), 1);
    for port in &ports {
        assert_eq!(
            text.matches(&format!("setpci -s {port} ")).count(),
            1,
            "{port}"
        );
    }
}

/// Each figure says whose it is, or is arithmetic on what was seen.
#[test]
fn costs_name_their_source() {
    for (name, fixture) in fixture::all() {
        for finding in reported(&fixture, true).2 {
            let costs = finding.costs.unwrap_or_default();
            let has_source = ["#", "guide", "Gb/s", "stackoverflow.com", "128 B"]
                .iter()
                .any(|word| costs.contains(word));
            let names_nobody = costs.contains("operator's published");
            assert!(
                costs.is_empty() || has_source && !names_nobody,
                "{name}: {costs}"
            );
        }
    }
}

/// A machine with some ports of the fabric down: each GPU has a port left, and yet half of the bandwidth is gone.
#[test]
fn dead_rails_are_found() {
    let mut fixture = fixture::hgx();
    fixture.software();
    for hca in [0, 2, 4, 6] {
        fixture.hca_file(&format!("mlx5_{hca}"), "ports/1/state", "1: DOWN\n");
    }
    let (text, status, findings) = reported(&fixture, false);
    println!("{text}");
    assert_eq!(status, Status::Findings);
    let subjects: Vec<&Subject> = findings
        .iter()
        .filter(|finding| finding.level == Level::Warning && finding.check == "port")
        .map(|finding| &finding.subject)
        .collect();
    let hca = |number| Subject::Hca {
        hca: format!("mlx5_{number}"),
    };
    assert_eq!(subjects, [&hca(0), &hca(2), &hca(4), &hca(6)]);
    assert!(
        text.contains("mlx5_0, mlx5_2, mlx5_4, mlx5_6: port 1 is DOWN"),
        "{text}"
    );
    let (line, status) = testing::says(&fixture.recording, &["doctor", "--nagios"]);
    assert_eq!(status.code(), 1, "{line}");
    assert!(
        line.starts_with("GPUDIRECT WARNING - 4 warnings: port"),
        "{line}"
    );
}

/// One rail is slower than the seven others, by lanes or by speed; the NIC for all else is of another model.
#[test]
fn a_slow_rail_is_found() {
    for rate in ["200 Gb/sec (2X NDR)", "100 Gb/sec (4X EDR)"] {
        let mut fixture = fixture::hgx();
        fixture.software();
        fixture.hca_file("mlx5_3", "ports/1/rate", &format!("{rate}\n"));
        let (text, status) = testing::says(&fixture.recording, &["doctor"]);
        println!("{text}");
        assert_eq!(status, Status::Findings);
        let found = format!(
            "mlx5_3: port 1 is ACTIVE, {rate}; 7 others of its kind have 400 Gb/sec (4X NDR)"
        );
        assert!(text.contains(&found), "{text}");
        assert!(text.ends_with("1 warning.\n"), "{text}");
    }
}

/// A GPU's slow link: worth a note while the GPU is idle, and a warning when NVML says that it works.
#[test]
fn a_slow_link_of_a_busy_gpu_is_a_warning() {
    let level = |state: u32, percent: u32, persistence: bool| {
        let mut fixture = fixture::small();
        fixture.software();
        for at in ["0000:17:01.0", "0000:19:00.0"] {
            fixture.set_link(at, ("2.5 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16));
        }
        let nvml = &fixture.recording.facts[&crate::host::Fact::Nvml];
        let mut nvml: serde_json::Value = serde_json::from_str(nvml).unwrap();
        let gpu = &mut nvml["gpus"][0];
        gpu["performance_state"] = state.into();
        gpu["utilization_percent"] = percent.into();
        gpu["persistence_mode"] = persistence.into();
        fixture.fact(crate::host::Fact::Nvml, &nvml.to_string());
        let (_, _, findings) = reported(&fixture, false);
        let slow = findings
            .iter()
            .find(|it| it.found.contains("is 2.5 GT/s x16"));
        slow.unwrap().level
    };
    assert_eq!(level(8, 0, true), Level::Note);
    assert_eq!(level(8, 97, true), Level::Warning);
    assert_eq!(level(0, 0, true), Level::Warning);
    // Woken by the question.
    assert_eq!(level(0, 0, false), Level::Note);
}

/// A program need not take the commands out of prose.
#[test]
fn json_has_the_commands_apart() {
    let mut fixture = fixture::acs();
    fixture.software();
    let (text, _) = testing::says(&fixture.recording, &["doctor", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let commands: Vec<&str> = json["findings"][0]["commands"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(serde_json::Value::as_str)
        .collect();
    assert_eq!(
        commands,
        [
            "setpci -s 0000:17:00.0 ECAP_ACS+0x6.w=0000:002c",
            "setpci -s 0000:17:01.0 ECAP_ACS+0x6.w=0000:002c"
        ]
    );
}

/// GPUs that have the same RDMA devices are named once with them.
#[test]
fn pairs_are_not_listed_one_by_one() {
    let mut fixture = fixture::hgx();
    fixture.software();
    let (text, _) = testing::says(&fixture.recording, &["doctor", "--all"]);
    println!("{text}");
    assert!(
        text.contains(
            "GPU 0, GPU 1 \u{2013} mlx5_0, mlx5_1; GPU 2, GPU 3 \u{2013} mlx5_2, mlx5_3;"
        ),
        "{text}"
    );
    let begin = text.find("max-payload").unwrap();
    let payload = text[begin..].split("\n\n").next().unwrap();
    assert!(payload.lines().count() <= 4, "{payload}");
}

/// An HGX machine that is compared with what it was: what is gone or less is found, and nothing else.
#[test]
fn a_baseline_finds_what_is_gone() {
    type Change = fn(&mut fixture::Fixture);
    type Wanted = &'static [(Level, &'static str)];
    let changes: &[(&str, Change, Wanted)] = &[
        ("nothing", |_| {}, &[]),
        (
            "a lost GPU",
            |fixture| fixture.unplug("0000:3b:00.0"),
            &[(
                Level::Fault,
                "0000:3b:00.0: the GPU is gone: the baseline has NVIDIA H100 80GB HBM3 there",
            )],
        ),
        (
            "a lost NIC",
            |fixture| fixture.unplug("0000:9a:00.0"),
            &[(
                Level::Fault,
                "mlx5_4: the RDMA device is gone, and 0000:9a:00.0 from PCI with it",
            )],
        ),
        (
            "a NIC whose driver gave up",
            |fixture| fixture.remove("/sys/class/infiniband/mlx5_4"),
            &[(
                Level::Fault,
                "mlx5_4: the RDMA device is gone, though 0000:9a:00.0 is still on PCI",
            )],
        ),
        (
            "a port for all else that is down",
            |fixture| fixture.hca_file("mlx5_8", "ports/1/state", "1: DOWN\n"),
            &[(
                Level::Warning,
                "mlx5_8: port 1 is DOWN, and ACTIVE in the baseline",
            )],
        ),
        (
            "all rails slower, so that no two differ",
            |fixture| {
                for hca in 0..8 {
                    fixture.hca_file(&format!("mlx5_{hca}"), "ports/1/rate", "200 Gb/sec (4X HDR)\n");
                }
            },
            &[(
                Level::Warning,
                "mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7: port 1 has 200 Gb/sec (4X HDR), and \
                 400 Gb/sec (4X NDR) in the baseline",
            )],
        ),
        (
            "new firmware",
            |fixture| fixture.hca_file("mlx5_0", "fw_ver", "28.43.2026\n"),
            &[(
                Level::Note,
                "mlx5_0: the firmware is 28.43.2026, and 28.39.1002 in the baseline",
            )],
        ),
    ];
    let mut before = fixture::hgx();
    before.software();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("before.json");
    std::fs::write(&file, before.recording.to_json().unwrap()).unwrap();
    let file = file.to_str().unwrap();
    for (name, change, wanted) in changes {
        let mut now = before.clone();
        change(&mut now);
        let line = ["doctor", "--all", "--baseline", file];
        let (text, status) = testing::says(&now.recording, &line);
        // A group each, wrapped; those of the level "well" aside.
        let unwrap = |group: &str| group.split_whitespace().collect::<Vec<_>>().join(" ");
        let groups: Vec<String> = text
            .split("\n\n")
            .filter(|group| group.contains(" baseline\n") && !group.starts_with("ok"))
            .map(unwrap)
            .collect();
        assert_eq!(groups.len(), wanted.len(), "{name}: {text}");
        for (group, (level, words)) in groups.iter().zip(*wanted) {
            let begin = format!("{} baseline {words}", level.name());
            assert!(group.starts_with(&begin), "{name}: {group}");
        }
        let is_bad = wanted.iter().any(|(level, _)| level.is_finding());
        assert_eq!(status == Status::Findings, is_bad, "{name}: {text}");
    }
    for command in ["doctor", "export"] {
        let line = [command, "--baseline", "/none.json"];
        assert_eq!(testing::says(&before.recording, &line).1, Status::Failed);
    }
    // Monitoring has it, too.
    before.unplug("0000:3b:00.0");
    let (text, _) = testing::says(&before.recording, &["export", "--baseline", file]);
    let sample = "peermem_doctor_findings{check=\"baseline\",level=\"fault\"} 1";
    assert!(text.lines().any(|line| line == sample), "{text}");
}

/// docs/doctor.md has a row for each check, and for nothing else.
#[test]
fn the_documentation_has_each_check() {
    let document = include_str!("../../../docs/doctor.md");
    let mut rows = Vec::new();
    let mut is_of_checks = false;
    for line in document.lines() {
        is_of_checks = line.starts_with("| check |") || is_of_checks && line.starts_with('|');
        let name = line
            .strip_prefix("| `")
            .and_then(|rest| rest.split('`').next());
        rows.extend(name.filter(|_| is_of_checks));
    }
    rows.sort_unstable();
    let mut names: Vec<&str> = checks().map(|check| check.name).collect();
    names.sort_unstable();
    assert_eq!(rows, names);
}
