// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the selection of checks and pairs, and of the output: text, JSON, and the line for
//! monitoring.

mod hosts;
pub(in crate::doctor) mod paths;

use paths::{bad, socket, TwoSockets, ACS, FIRST, SECOND};

use super::*;
use crate::finding::{Level, Subject};
use crate::fixture::Fixture;
use crate::machine::config::Acs;
use crate::machine::pci::Function;
use crate::machine::Class;
use crate::testing::{is_like, told, Fault};
use crate::{fixture, testing};

impl Fixture {
    /// Runs a function on a scan of this machine.
    pub(in crate::doctor) fn scanned<T>(&self, run: impl FnOnce(&Scan<'_>) -> T) -> T {
        let machine = Machine::scan(&self.recording).unwrap();
        run(&Scan::new(&self.recording, &machine))
    }

    /// Returns the findings of a check that applies to this machine.
    pub(in crate::doctor) fn findings(&self, check: &Check) -> Vec<Finding> {
        let findings = self.scanned(|scan| {
            assert!((check.applies)(scan), "{}", check.name);
            check.findings(scan)
        });
        findings.iter().for_each(testing::commands_are_marked);
        findings
    }
}

/// Checks that each fault causes its findings, and no other finding that is worse than ok.
pub(in crate::doctor) fn each_is_told<'a>(
    faults: impl IntoIterator<Item = &'a Fault<Fixture>>,
    healthy: fn() -> Fixture,
    findings: impl Fn(&Fixture) -> Vec<Finding>,
) {
    let mut wrong = Vec::new();
    for Fault { name, inject, says } in faults {
        let mut fixture = healthy();
        inject(&mut fixture);
        let mut found = findings(&fixture);
        found.retain(|finding| finding.level != Level::Ok);
        let is_said = |(finding, says): (&Finding, &&str)| is_like(&told(finding), says);
        if found.len() != says.len() || !found.iter().zip(*says).all(is_said) {
            wrong.push(format!("{name}: {found:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

/// Returns the text or the JSON that `doctor` prints for findings.
pub(in crate::doctor) fn printed(scan: &Scan<'_>, findings: &[Finding], json: bool) -> String {
    let mut out = Out::gather(json);
    print::all(scan, findings, scan.all, &mut out).unwrap();
    out.into_text()
}

#[test]
fn values_for_root_only_are_reported_as_not_visible() {
    let mut fixture = TwoSockets::healthy();
    for function in fixture.machine.functions.values_mut() {
        function.config.as_mut().unwrap().0.truncate(64);
    }
    let findings = fixture.findings();
    for check in "acs ats max-payload relaxed-ordering max-read-request".split(' ') {
        let of_check: Vec<&Finding> = findings.iter().filter(|it| it.check == check).collect();
        assert!(!of_check.is_empty(), "{check}");
        for finding in of_check {
            assert_eq!(finding.level, Level::NotVisible, "{finding:#?}");
            assert!(finding.needs_root, "{finding:#?}");
        }
    }
    // Values in sysfs are still visible.
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
    let fixture = TwoSockets::healthy();
    let far = fixture
        .machine
        .pairs
        .iter()
        .find(|pair| !pair.is_best)
        .unwrap();
    assert_eq!(far.class, Some(Class::Sys));
    let levels = |scan: &Scan<'_>| -> Vec<Level> {
        let findings = examine(scan, Selection::default()).unwrap();
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
fn findings_of_one_kind_have_one_heading() {
    let mut fixture = TwoSockets::healthy();
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
    let text = printed(&scan, &findings, false);
    println!("{text}");
    let count = |what: &str| text.matches(what).count();
    // Each kind of finding has one heading.
    assert_eq!((count("warning acs"), count("warning bar1")), (1, 1));
    assert_eq!(
        (count("  why"), count("  costs"), count("  fix")),
        (2, 2, 2)
    );
    // Lines that the subjects share appear once. Other lines appear once for each subject.
    assert_eq!(count("GPU 0, GPU 1: BAR1 is 256 MiB"), 1);
    assert_eq!(count("setpci -s 0000:12:01.0 "), 1);
    assert_eq!(count("setpci -s 0000:82:01.0 "), 1);
    assert!(text.ends_with("4 warnings.\n"), "{text}");
}

#[test]
fn monitoring_gets_one_line_and_its_own_status() {
    let mut fixture = TwoSockets::healthy();
    let nagios = |fixture: &TwoSockets| {
        let mut out = Out::gather(false);
        let status = print::nagios(&fixture.findings(), &mut out);
        (status.code(), out.into_text())
    };
    let well =
        "GPUDIRECT OK - nothing wrong was seen | faults=0 warnings=0 notes=0 not_visible=0\n";
    assert_eq!(nagios(&fixture), (0, well.to_owned()));
    fixture.set(socket(FIRST).nic_port, ACS + 6, Acs::RR);
    let bad = "GPUDIRECT WARNING - 1 warning: acs | faults=0 warnings=1 notes=0 not_visible=0\n";
    assert_eq!(nagios(&fixture), (1, bad.to_owned()));
    fixture.function(socket(FIRST).gpu).driver = None;
    assert_eq!(nagios(&fixture).0, 2);
    assert!(nagios(&fixture)
        .1
        .starts_with("GPUDIRECT CRITICAL - 1 fault, 1 warning: "));
}

#[test]
fn a_check_or_a_pair_that_is_not_there_is_an_error() {
    let fixture = TwoSockets::healthy();
    let scan = Scan::new(&fixture.host, &fixture.machine);
    let (none, acs) = (["no-such-check".to_owned()], ["acs".to_owned()]);
    let with = |only, skip| examine(&scan, Selection { only, skip });
    assert!(with(&[], &none).is_err() && with(&none, &[]).is_err());
    let skipped = with(&[], &acs).unwrap();
    assert!(!skipped.iter().any(|finding| finding.check == "acs"));
    let only = with(&acs, &[]).unwrap();
    assert!(!only.is_empty() && only.iter().all(|finding| finding.check == "acs"));
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
fn one_pair_is_shown_hop_by_hop() {
    let fixture = TwoSockets::healthy();
    let mut scan = Scan::new(&fixture.host, &fixture.machine);
    scan.only = fixture.machine.pairs.first();
    let findings = fixture.findings();
    let text = printed(&scan, &findings, false);
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
    let text = printed(&scan, &findings, true);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["schema"], "peermemctl.doctor");
    assert_eq!(json["path"]["class"], "PIX");
    assert_eq!(json["path"]["hops"].as_array().unwrap().len(), 5);
    assert_eq!(json["path"]["hops"][1]["max_payload"], 512);
    assert_eq!(json["findings"].as_array().unwrap().len(), 0);
}

/// `--fail-on` changes the exit status, but not the output.
#[test]
fn what_counts_as_failing_can_be_chosen() {
    let healthy = fixture::small().with_software();
    let slow = fixture::acs().with_software();
    let mut broken = slow.clone();
    broken
        .recording
        .links
        .retain(|path, _| !path.ends_with("0000:19:00.0/driver"));
    use Status::Findings;
    for (machine, on_warning, on_fault) in [
        (&healthy, Status::Ok, Status::Ok),
        (&slow, Findings, Status::Ok),
        (&broken, Findings, Findings),
    ] {
        let says = |line: &str| machine.says(line);
        let (text, status) = says("doctor");
        assert_eq!(status, on_warning, "{text}");
        assert_eq!(says("doctor --fail-on warning"), (text.clone(), on_warning));
        assert_eq!(says("doctor --fail-on fault"), (text, on_fault));
        let (_, status) = says("doctor --fail-on fault --json");
        assert_eq!(status, on_fault);
    }
}

/// Runs the checks of paths and devices on a synthetic machine, and returns `doctor`'s output, its
/// exit status, and the findings.
fn reported(fixture: &Fixture, all: bool) -> (String, Status, Vec<Finding>) {
    let host = &fixture.recording;
    let machine = Machine::scan(host).unwrap();
    let mut scan = Scan::new(host, &machine);
    scan.all = all;
    let findings = run_all(&scan, OF_HARDWARE.iter());
    let status = print::status(&findings, Level::Warning);
    (printed(&scan, &findings, false), status, findings)
}

#[test]
fn the_output_for_each_machine_is_as_before() {
    for (name, fixture) in fixture::all() {
        let (brief, ..) = reported(&fixture, false);
        let mut text = format!("$ peermemctl doctor\n{brief}\n");
        // The output for all pairs of eight GPUs is too long for a golden file.
        if name != "hgx" {
            text.push_str(&format!(
                "$ peermemctl doctor --all\n{}",
                reported(&fixture, true).0
            ));
        }
        testing::golden(&format!("golden/paths-{name}.txt"), &text);
    }
}

/// Compares the JSON for a machine with one fault with a golden file. The JSON lists the commands
/// of the fix separately. The second part of the file is the JSON for the machine's only pair
/// (`--pair`).
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
        text.push_str(&printed(&scan, &findings, true));
    }
    testing::golden("golden/paths-acs.json.txt", &text);
    let (checks, status) = testing::says(host, "doctor --list-checks");
    assert_eq!(status, Status::Ok);
    assert!(
        OF_HARDWARE.iter().all(|check| checks.contains(check.name)),
        "{checks}"
    );
}

/// ACS redirects the packets of sixteen pairs. The output contains one heading, one reason, and one
/// command for each port.
#[test]
fn the_output_for_a_large_machine_is_short() {
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

/// Each number in a finding's costs names its source, or is computed from values that were read.
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

/// Half of the InfiniBand ports (rails) are down. Each GPU has one active port left, and half of
/// its bandwidth is gone.
#[test]
fn dead_rails_are_found() {
    let fixture = &fixture::degraded()["dead_rails"];
    let (text, status, findings) = reported(fixture, false);
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
    assert!(text.contains("mlx5_0, mlx5_2, mlx5_4, mlx5_6: port 1 is DOWN"));
    fixture.session("1$ doctor --nagios\n^ GPUDIRECT WARNING - 4 warnings: port");
}

/// One of eight rails has fewer lanes or a lower speed. The ninth NIC is of another model, and is
/// not compared.
#[test]
fn a_slow_rail_is_found() {
    for rate in ["200 Gb/sec (2X NDR)", "100 Gb/sec (4X EDR)"] {
        let mut fixture = fixture::hgx().with_software();
        fixture.hca_file("mlx5_3", "ports/1/rate", &format!("{rate}\n"));
        let told = format!(
            "1$ doctor
             mlx5_3: port 1 is ACTIVE, {rate}; 7 others of its kind have 400 Gb/sec (4X NDR)
             ~ 1 warning."
        );
        fixture.session(&told);
    }
}

/// A slow link of an idle GPU is a note. A slow link of a GPU that NVML reports as working is a
/// warning.
#[test]
fn a_slow_link_of_a_busy_gpu_is_a_warning() {
    let level = |state: u32, percent: u32, persistence: bool| {
        let mut fixture = fixture::small().with_software();
        for at in ["0000:17:01.0", "0000:19:00.0"] {
            fixture.set_link(at, ("2.5 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16));
        }
        fixture.change_nvml(|nvml| {
            let gpu = &mut nvml.gpus[0];
            gpu.performance_state = Some(state);
            gpu.utilization_percent = Some(percent);
            gpu.persistence_mode = Some(persistence);
        });
        let (_, _, findings) = reported(&fixture, false);
        let slow = findings
            .iter()
            .find(|it| it.found.contains("is 2.5 GT/s x16"));
        slow.unwrap().level
    };
    assert_eq!(level(8, 0, true), Level::Note);
    assert_eq!(level(8, 97, true), Level::Warning);
    assert_eq!(level(0, 0, true), Level::Warning);
    // The query itself woke the GPU.
    assert_eq!(level(0, 0, false), Level::Note);
}

/// GPUs with the same RDMA devices are named together.
#[test]
fn pairs_are_not_listed_one_by_one() {
    let fixture = fixture::hgx().with_software();
    let (text, _) = fixture.says("doctor --all");
    println!("{text}");
    let pairs = "GPU 0, GPU 1 \u{2013} mlx5_0, mlx5_1; GPU 2, GPU 3 \u{2013} mlx5_2, mlx5_3;";
    assert!(text.contains(pairs), "{text}");
    let begin = text.find("max-payload").unwrap();
    let payload = text[begin..].split("\n\n").next().unwrap();
    assert!(payload.lines().count() <= 4, "{payload}");
}

/// Applies each change to a machine, and compares the machine with a file. `check` names the check
/// and the option. The expected findings of a change are the beginnings of groups in the output.
pub(super) fn are_found(before: &Fixture, check: &str, file: &str, changes: &[Fault<Fixture>]) {
    for Fault { name, inject, says } in changes {
        let mut now = before.clone();
        inject(&mut now);
        let option = format!("--{check}");
        let line = format!("doctor --all --only {check} {option} {file}");
        let (text, status) = now.says(&line);
        // The groups of findings that are worse than ok, each as one line.
        let unwrap = |group: &str| group.split_whitespace().collect::<Vec<_>>().join(" ");
        let groups: Vec<String> = text
            .split("\n\n")
            .filter(|group| group.contains(&format!(" {check}\n")) && !group.starts_with("ok"))
            .map(unwrap)
            .collect();
        assert_eq!(groups.len(), says.len(), "{name}: {text}");
        for (group, says) in groups.iter().zip(*says) {
            assert!(group.starts_with(says), "{name}: {group}");
        }
        let mut levels = says.iter().filter_map(|says| says.split(' ').next());
        let is_bad = levels.any(|level| matches!(level, "fault" | "warning"));
        assert_eq!(status == Status::Findings, is_bad, "{name}: {text}");
    }
}

/// A comparison finds each loss on a large machine. Some losses are found only by comparison.
#[test]
fn what_was_lost_is_found_by_comparison() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name| folder.path().join(name).to_str().unwrap().to_owned();
    let (baseline, expect) = (file("then.json"), file("expect.json"));
    let before = &fixture::all()["hgx"].recording;
    std::fs::write(&baseline, before.to_json().unwrap()).unwrap();
    let expected = testing::says(before, "doctor --write-expect").0;
    std::fs::write(&expect, expected).unwrap();
    for (name, machine) in fixture::degraded() {
        let alone = machine.says("doctor").1;
        let sees_nothing = name.starts_with("lost");
        assert_eq!(alone == Status::Ok, sees_nothing, "{name}");
        for (option, file) in [("--baseline", &baseline), ("--expect", &expect)] {
            let line = format!("doctor --fail-on warning {option} {file}");
            let (text, status) = machine.says(&line);
            assert_eq!(status, Status::Findings, "{name}: {text}");
            let level = if sees_nothing { "fault" } else { "warning" };
            let group = format!("{level} {}\n", option.trim_start_matches("--"));
            assert!(text.contains(&group), "{name}: {text}");
        }
    }
}

/// No finding appears twice, however many pairs there are.
#[test]
fn a_large_machine_is_examined_once() {
    let fixture = fixture::flat(24, 12);
    let machine = Machine::scan(&fixture.recording).unwrap();
    let scan = Scan::new(&fixture.recording, &machine);
    assert_eq!(scan.pairs().count(), 24 * 12);
    let findings = examine(&scan, Selection::default()).unwrap();
    let mut unique: Vec<&Finding> = Vec::new();
    for finding in &findings {
        if !unique.contains(&finding) {
            unique.push(finding);
        }
    }
    assert_eq!(unique.len(), findings.len());
    let (text, _) = fixture.says("doctor --all");
    assert!(text.contains("GPU 0, GPU 1, GPU 2"), "{text}");
}

/// `docs/doctor.md` has a row for each check, in the order of the checks.
#[test]
fn the_documentation_has_each_check() {
    let document = include_str!("../../../../docs/doctor.md");
    let tables = document.split("| check |").skip(1);
    let rows = tables.map(|table| {
        let rows = table
            .lines()
            .skip(2)
            .map_while(|line| line.strip_prefix("| `"));
        rows.map(|row| row.split('`').next().unwrap()).collect()
    });
    let names = |checks: &[Check]| checks.iter().map(|check| check.name).collect::<Vec<_>>();
    let checks = [OF_HARDWARE, software::OF_SOFTWARE].map(names);
    assert_eq!(
        rows.collect::<Vec<Vec<&str>>>(),
        checks,
        "rows of docs/doctor.md, and checks"
    );
}

/// Faults of one check. A check without faults has its own test, or reports nothing worse than a
/// note.
#[derive(Clone, Copy)]
pub(super) enum Faults {
    /// Faults that are injected into the scan of [`paths::TwoSockets`].
    OnPaths(&'static [Fault<TwoSockets>]),
    /// Faults that are injected into the files and facts of a synthetic machine.
    OfSoftware(&'static [Fault<Fixture>]),
    OwnTest,
}

#[test]
fn each_check_has_a_test() {
    for check in checks() {
        let is_tried = match check.faults {
            Faults::OnPaths(faults) => !faults.is_empty(),
            Faults::OfSoftware(faults) => {
                let mut says = faults.iter().flat_map(|fault| fault.says);
                says.any(|says| says.split([' ', ':']).nth(1) == Some(check.name))
            }
            Faults::OwnTest => true,
        };
        assert!(is_tried, "{}: no fault has a finding of it", check.name);
    }
}
