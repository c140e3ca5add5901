// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What the manifests for Kubernetes must say, by their lines. No cluster was at hand.

const DAEMONSET: &str = include_str!("../../packaging/peermemctl/daemonset.yaml");

/// The lines that are not comments, without what indents them.
fn lines(text: &str) -> Vec<&str> {
    let lines = text
        .lines()
        .map(|line| line.trim().trim_start_matches("- "));
    lines.filter(|line| !line.starts_with('#')).collect()
}

/// The lines stand in the text, one after the other.
fn has(text: &str, wanted: &[&str]) -> bool {
    lines(text)
        .windows(wanted.len())
        .any(|lines| lines == wanted)
}

/// A node without RDMA has a fault for `doctor`, and an alert for nobody's sake.
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
fn it_is_probed_and_confined() {
    assert!(has(DAEMONSET, &["seccompProfile:", "type: RuntimeDefault"]));
    assert!(has(
        DAEMONSET,
        &["livenessProbe:", "tcpSocket:", "port: metrics"]
    ));
    assert!(has(
        DAEMONSET,
        &[
            "readinessProbe:",
            "httpGet:",
            "path: /metrics",
            "port: metrics"
        ]
    ));
    assert!(has(
        DAEMONSET,
        &["privileged: false", "allowPrivilegeEscalation: false"]
    ));
}

/// The label, the namespace and the name of the port are the pods' own.
#[test]
fn the_pod_monitor_finds_the_pods() {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../packaging/peermemctl/podmonitor.yaml"
    );
    let monitor = std::fs::read_to_string(file).unwrap_or_default();
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
