// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the manifests for Kubernetes, and of the scripts for schedulers. The manifests are
//! compared line by line. The scripts run `doctor` on a recording. The tests use no cluster.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const DAEMONSET: &str = include_str!("../../packaging/peermemctl/daemonset.yaml");

/// Returns the lines without comments and indentation.
fn lines(text: &str) -> Vec<&str> {
    let lines = text
        .lines()
        .map(|line| line.trim().trim_start_matches("- "));
    lines.filter(|line| !line.starts_with('#')).collect()
}

/// Returns `true` if the text contains these lines in sequence.
fn has(text: &str, wanted: &[&str]) -> bool {
    lines(text)
        .windows(wanted.len())
        .any(|lines| lines == wanted)
}

/// On a node without RDMA, `doctor` would report a fault, and the alert would be useless.
#[test]
fn nodes_have_a_gpu_and_rdma() {
    let gpu =
        "{key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: [\"true\"]}";
    for rdma in ["pci-15b3.present", "rdma.available"] {
        let rdma =
            format!("{{key: feature.node.kubernetes.io/{rdma}, operator: In, values: [\"true\"]}}");
        assert!(has(DAEMONSET, &["matchExpressions:", gpu, &rdma]), "{rdma}");
    }
    assert!(!lines(DAEMONSET).contains(&"nodeSelector:"));
}

#[test]
fn nvml_is_in_the_container() {
    assert!(has(DAEMONSET, &["runtimeClassName: nvidia"]));
    for (name, value) in [
        ("VISIBLE_DEVICES", "all"),
        ("DRIVER_CAPABILITIES", "utility"),
    ] {
        let (name, value) = (format!("name: NVIDIA_{name}"), format!("value: {value}"));
        assert!(has(DAEMONSET, &[&name, &value]), "{name}");
    }
}

#[test]
fn the_pod_is_probed_and_confined() {
    for words in [
        "seccompProfile:, type: RuntimeDefault",
        "livenessProbe:, tcpSocket:, port: metrics",
        "readinessProbe:, httpGet:, path: /metrics, port: metrics",
        "privileged: false, allowPrivilegeEscalation: false",
    ] {
        let lines: Vec<&str> = words.split(", ").collect();
        assert!(has(DAEMONSET, &lines), "{words}");
    }
}

/// The label, the namespace and the port's name match those of the pods.
#[test]
fn the_pod_monitor_finds_the_pods() {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../packaging/peermemctl/podmonitor.yaml"
    );
    let monitor = fs::read_to_string(file).unwrap_or_default();
    assert!(has(&monitor, &["kind: PodMonitor"]));
    for shared in [
        &["namespace: monitoring"][..],
        &["matchLabels:", "app.kubernetes.io/name: peermemctl"],
    ] {
        assert!(
            has(&monitor, shared) && has(DAEMONSET, shared),
            "{shared:?}"
        );
    }
    assert!(has(&monitor, &["podMetricsEndpoints:", "port: metrics"]));
    assert!(has(DAEMONSET, &["ports:", "name: metrics"]));
}

/// `doctor` reads PFC and DSCP by netlink. Without netlink, PFC and DSCP are not visible, and no
/// warning appears.
#[test]
fn the_systemd_units_allow_netlink() {
    for unit in ["peermemctl-export", "peermemctl-export-http"] {
        let file = format!(
            "{}/../packaging/peermemctl/{unit}.service",
            env!("CARGO_MANIFEST_DIR")
        );
        let text = fs::read_to_string(file).unwrap();
        let families = lines(&text)
            .into_iter()
            .find_map(|line| line.strip_prefix("RestrictAddressFamilies="));
        let mut families = families.unwrap().split_whitespace();
        assert!(families.any(|family| family == "AF_NETLINK"), "{unit}");
    }
}

/// Runs the checks of `doctor` that the module's service runs after a failure.
#[test]
fn the_service_names_checks_that_exist() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let unit = fs::read_to_string(format!("{root}/packaging/peermem-rs.service")).unwrap();
    let (_, behind) = unit.split_once("exec peermemctl ").unwrap();
    let (line, _) = behind.split_once('\'').unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_peermemctl"))
        .args(line.split_whitespace())
        .args(["--machine", &format!("{root}/cli/tests/machines/hgx.json")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

/// A cluster node, as the scripts see the node. `peermemctl` reads a recording. Messages to Slurm
/// and to the system log are written to a file.
struct Node {
    folder: tempfile::TempDir,
}

impl Node {
    /// Creates a node. `change` edits the recording of an HGX machine, and `expect.json` describes
    /// the machine before the change.
    fn new(change: impl Fn(String) -> String) -> Self {
        let node = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let healthy = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machines/hgx.json");
        let program = env!("CARGO_BIN_EXE_peermemctl");
        let expected = Command::new(program)
            .args(["doctor", "--write-expect", "--machine", healthy])
            .output();
        fs::write(node.path("expect.json"), expected.unwrap().stdout).unwrap();
        let machine = change(fs::read_to_string(healthy).unwrap());
        fs::write(node.path("machine.json"), machine).unwrap();
        let machine = node.path("machine.json");
        let machine = machine.display();
        node.program(
            "peermemctl",
            &format!("exec {program} \"$@\" --machine {machine}"),
        );
        node.program("logger", "echo \"$@\" >>\"$SAID\"");
        node.program(
            "scontrol",
            "case \"$*\" in *show*) echo \"NodeName=n1 State=$STATE \" ;; *) echo \"$@\" >>\"$SAID\" ;; esac",
        );
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn program(&self, name: &str, does: &str) {
        fs::write(self.path(name), format!("#!/bin/sh\n{does}\n")).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs a script. Returns the script's status, its output, and its messages to Slurm or the
    /// log.
    fn run(&self, script: &str, variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
        let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/peermemctl");
        let text = fs::read_to_string(packaging.join(script)).unwrap();
        // The prolog sets its own search path.
        let own = format!("PATH={}:", self.folder.path().display());
        let text = text.replace("PATH=/usr/sbin:", &format!("{own}/usr/sbin:"));
        fs::write(self.path(script), text).unwrap();
        let path = std::env::var("PATH").unwrap();
        let _ = fs::remove_file(self.path("said"));
        let output = Command::new("sh")
            .arg(self.path(script))
            .env("PATH", format!("{}:{path}", self.folder.path().display()))
            .env("PEERMEMCTL", self.path("peermemctl"))
            .env("EXPECT", self.path("expect.json"))
            .env("SAID", self.path("said"))
            .env("SLURMD_NODENAME", "n1")
            .env("STATE", "IDLE")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let said = fs::read_to_string(self.path("said")).unwrap_or_default();
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), out, said)
    }
}

fn is_shell(script: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../packaging/peermemctl")
        .join(script);
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o111, 0o111, "{script} is not executable");
    let checked = Command::new("sh").arg("-n").arg(&file).status().unwrap();
    assert!(checked.success(), "{script}");
}

fn healthy() -> Node {
    Node::new(|machine| machine)
}

/// Returns a node without `mlx5_4`.
fn broken() -> Node {
    Node::new(|machine| {
        let mut json: serde_json::Value = serde_json::from_str(&machine).unwrap();
        let names = json["directories"]["/sys/class/infiniband"].as_array_mut();
        names.unwrap().retain(|name| name != "mlx5_4");
        json.to_string()
    })
}

/// Returns a node on which one RDMA port is down.
fn slow() -> Node {
    Node::new(|machine| {
        let mut json: serde_json::Value = serde_json::from_str(&machine).unwrap();
        let files = json["files"].as_object_mut().unwrap();
        let state = files
            .iter_mut()
            .find(|(path, _)| path.ends_with("mlx5_2/ports/1/state"));
        *state.unwrap().1 = "1: DOWN\n".into();
        json.to_string()
    })
}

/// Returns a node without any visible data.
fn blind() -> Node {
    Node::new(|_| "{}".to_owned())
}

#[test]
fn the_prolog_keeps_jobs_only_from_broken_nodes() {
    const SCRIPT: &str = "slurm-prolog.sh";
    is_shell(SCRIPT);
    let (status, _, said) = healthy().run(SCRIPT, &[]);
    assert_eq!((status, said.as_str()), (Some(0), ""));
    let (status, _, said) = broken().run(SCRIPT, &[]);
    assert_eq!(status, Some(1), "{said}");
    assert!(
        said.contains("7 RDMA devices of 15b3:1021, but 8 are expected"),
        "{said}"
    );
    let slow = slow();
    assert_eq!(slow.run(SCRIPT, &[]).0, Some(0));
    let (status, _, said) = slow.run(SCRIPT, &[("FAIL_ON", "warning")]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("mlx5_2: port 1 is DOWN"), "{said}");
    let (status, _, said) = blind().run(SCRIPT, &[]);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("status 2: peermemctl: "), "{said}");
    // If the file with the expectations is missing, the script still runs `doctor`, but without
    // expectations.
    let none = [("EXPECT", "/none.json")];
    assert_eq!(slow.run(SCRIPT, &none).0, Some(0));
}

#[test]
fn the_health_check_drains_broken_nodes_once() {
    const SCRIPT: &str = "slurm-health-check.sh";
    is_shell(SCRIPT);
    let (status, _, said) = healthy().run(SCRIPT, &[]);
    assert_eq!((status, said.as_str()), (Some(0), ""));
    let broken = broken();
    let (status, _, said) = broken.run(SCRIPT, &[]);
    assert_eq!(status, Some(0));
    assert!(
        said.starts_with("update NodeName=n1 State=DRAIN Reason=GPUDIRECT CRITICAL - 1 fault"),
        "{said}"
    );
    assert!(said.contains("expect") && !said.contains('|'), "{said}");
    let (_, _, said) = broken.run(SCRIPT, &[("STATE", "IDLE+DRAIN")]);
    assert_eq!(said, "");
    let slow = slow();
    assert_eq!(slow.run(SCRIPT, &[]).2, "");
    let (_, _, said) = slow.run(SCRIPT, &[("FAIL_ON", "warning")]);
    assert!(said.contains("Reason=GPUDIRECT WARNING"), "{said}");
    let (status, _, said) = blind().run(SCRIPT, &[]);
    assert_eq!((status, said.as_str()), (Some(0), ""));
}

#[test]
fn the_problem_detector_has_its_own_statuses() {
    const SCRIPT: &str = "node-problem-detector.sh";
    is_shell(SCRIPT);
    let (status, out, _) = healthy().run(SCRIPT, &[]);
    assert_eq!(status, Some(0));
    assert!(out.starts_with("GPUDIRECT OK"), "{out}");
    let (status, out, _) = broken().run(SCRIPT, &[]);
    assert_eq!(status, Some(1));
    assert!(out.starts_with("GPUDIRECT CRITICAL - "), "{out}");
    let slow = slow();
    assert_eq!(slow.run(SCRIPT, &[]).0, Some(0));
    assert_eq!(slow.run(SCRIPT, &[("FAIL_ON", "warning")]).0, Some(1));
    assert_eq!(blind().run(SCRIPT, &[]).0, Some(2));
}
