// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of `list`, `stats` and `export` on a synthetic machine whose module has registrations.
//! `cli/tests/golden` holds the expected output.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use regex::Regex;

use crate::finding::Status;
use crate::fixture::Fixture;
use crate::host::Fact;
use crate::machine::counters::{Kind, COUNTERS};
use crate::shipped::reason::{Event, EventInfo, Reason};
use crate::{fixture, testing};

const FILES: &str = crate::debugfs::DIRECTORY;
const PROC: &str = crate::debugfs::PROC;

/// Lines in the format of `docs/observe.md`. The comments state the purpose of each line.
const REGISTRATIONS: &str = concat!(
    // A running process has registered the same memory twice.
    "id=1 state=mapped mode=persistent addr=0x7f0000000000 len=2147483648 page=65536 chunks=1 entries=1 \
     gpus=0000:19:00.0 hca=0000:18:00.0 tgid=4711 pid=4712 since=3000.500000 comm=pt_main_thread\n",
    "id=2 state=mapped mode=persistent addr=0x7f0040000000 len=1073741824 page=65536 chunks=1 entries=1 \
     gpus=0000:19:00.0 hca=0000:1a:00.0 tgid=4711 pid=4713 since=3000.750000 comm=pt_main_thread\n",
    // The first line has a NIC of another node, and two allocations. The second line has a device
    // unknown to PCI, and a process that is gone.
    "id=3 state=mapped mode=revocable addr=0x7f1000000000 len=4194304 page=65536 chunks=2 entries=2 \
     gpus=0000:1b:00.0 hca=0000:c2:00.0 tgid=4800 pid=4800 since=3599.000000 comm=gdr\n",
    "id=5 state=orphaned mode=revocable addr=0x7f2000000000 len=65536 page=65536 chunks=1 entries=1 \
     gpus=0000:1b:00.0 hca=0000:ee:00.0 tgid=4801 pid=4801 since=1.000000 comm=a\\x20b\\x1b[2J\n",
    // The first line has a registration that is not mapped yet, and a reused process ID. The second
    // line has revoked memory, and a key of a future version.
    "id=6 state=pinned mode=persistent addr=0x7f3000000000 len=131072 page=65536 chunks=1 entries=0 \
     gpus=- hca=- tgid=4900 pid=4900 since=2000.000000 comm=old\n",
    "id=9 state=revoked mode=revocable addr=0x7f4000000000 len=131072 page=65536 chunks=1 entries=1 \
     gpus=0000:19:00.0,0000:3b:00.0 hca=0000:18:00.0 tgid=4711 pid=4711 since=3500.000000 comm=pt_main_thread \
     colour=red\n",
    "what is this\n",
);

const REFUSALS: &str = concat!(
    "seq=0 first=10.000000 last=3599.500000 times=12 mode=persistent step=acquire reason=no_room code=-12 \
     addr=0x7f5000000000 len=68719476736 tgid=4711 pid=4711 comm=pt_main_thread text=\"no room in the GPU's BAR1, \
     or no kernel memory (nvidia.ko: -ENOMEM)\"\n",
    "seq=1 first=20.000000 last=20.000000 times=1 mode=persistent step=dma_map reason=unreachable code=-524 \
     addr=0x7f6000000000 len=65536 tgid=77 pid=77 comm=gdr text=\"nvidia.ko denies the path from this RDMA device to this GPU\"\n",
);

fn counters() -> String {
    let mut text = String::new();
    for mode in ["persistent", "revocable"] {
        for reason in Reason::ALL {
            let name = reason.name.to_str().expect("ASCII");
            let count = match (mode, name) {
                ("persistent", "no_room") => 12,
                ("persistent", "unreachable") => 1,
                ("revocable", "not_in_bar") => 3,
                ("revocable", "non_gpu_host") => 44,
                _ => 0,
            };
            let _ = writeln!(
                text,
                "event=refused count={count} mode={mode} reason={name}"
            );
        }
    }
    for EventInfo { name, .. } in &Event::ALL {
        let count = u64::from(*name == "orphaned_other_process");
        let _ = writeln!(text, "event={name} count={count}");
    }
    for (event, persistent, revocable) in [
        ("registered", 6, 3),
        ("mapped", 5, 3),
        ("revoked", 0, 1),
        ("released", 3, 0),
        ("active", 3, 3),
        ("active_bytes", 3_221_356_544_u64, 4_390_912),
    ] {
        let _ = writeln!(text, "event={event} count={persistent} mode=persistent");
        let _ = writeln!(text, "event={event} count={revocable} mode=revocable");
    }
    text
}

fn module_file(fixture: &mut Fixture, name: &str, text: &str) {
    fixture.file(&format!("{FILES}/{name}"), text);
}

/// Returns a machine with our module and no registrations.
fn idle() -> Fixture {
    let mut fixture = fixture::hgx();
    fixture.file("/sys/module/nvidia_peermem/version", "595.45.04-rs1\n");
    for (name, value) in [("persistent_api_support", "0\n"), ("max_chunks", "1024\n")] {
        fixture.file(
            &format!("/sys/module/nvidia_peermem/parameters/{name}"),
            value,
        );
    }
    module_file(&mut fixture, "version", "format=3 module=595.45.04-rs1\n");
    let count = Regex::new("count=[0-9]+").unwrap();
    let none = count.replace_all(&counters(), "count=0").into_owned();
    module_file(&mut fixture, "counters", &none);
    for file in ["refusals", "non_gpu", "registrations"] {
        module_file(&mut fixture, file, "");
    }
    fixture.file("/proc/uptime", "3600.01 99999.99\n");
    fixture.link("/proc/self/ns/pid", "pid:[4026531836]");
    let text = "root:x:0:0:root:/root:/bin/bash\nalice:x:1000:1000::/home/alice:/bin/bash\n";
    fixture.file("/etc/passwd", text);
    fixture
}

fn process(fixture: &mut Fixture, number: u32, uid: u32, ticks: u64, command: &str) {
    let own = format!("/proc/{number}");
    let status = format!("Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
    fixture.file(&format!("{own}/status"), &status);
    fixture.file(&format!("{own}/cmdline"), command);
    let stat = format!("{number} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {ticks} 0 0\n");
    fixture.file(&format!("{own}/stat"), &stat);
}

/// Returns a machine with registrations and refusals.
fn busy() -> Fixture {
    let mut fixture = idle();
    module_file(&mut fixture, "registrations", REGISTRATIONS);
    module_file(&mut fixture, "refusals", REFUSALS);
    module_file(&mut fixture, "counters", &counters());
    let command = "python3\0train.py\0--model\0x\x1b[2J\0";
    process(&mut fixture, 4711, 1000, 299_000, command);
    // Address ranges like those that CUDA reserves. The last quarter of the registered memory is
    // freed.
    fixture.file(
        "/proc/4711/maps",
        "55d000000000-55d000001000 r-xp 00000000 fe:00 12 /usr/bin/python3\n\
         7efff0000000-7f0060000000 ---p 00000000 00:00 0 \n",
    );
    process(&mut fixture, 4800, 1001, 359_800, "gdr\0hold\0");
    process(&mut fixture, 4900, 0, 359_000, "new\0");
    fixture.counters(
        "mlx5_0",
        &[
            ("link_downed", 3),
            ("out_of_sequence", 12),
            ("np_cnp_sent", 4000),
            ("port_xmit_data", 250_000_000),
            ("port_rcv_packets", 1_000_000),
        ],
    );
    let errors = "RxErr 0\nBadTLP 2\nTOTAL_ERR_COR 2\n";
    fixture.errors("0000:18:00.0", "correctable", errors);
    fixture.fact(
        Fact::Nvml,
        "{\"driver\":\"595.45.04\",\"gpus\":[{\"at\":\"00000000:19:00.0\",\"bar1\":{\"total_bytes\":137438953472,\
         \"used_bytes\":3221225472,\"free_bytes\":134217728000}}]}",
    );
    fixture
}

/// Returns the output of a command line, which must succeed.
fn says(fixture: &Fixture, line: &str) -> String {
    let (text, status) = fixture.says(line);
    assert_eq!(status, Status::Ok, "{line:?}: {text}");
    text
}

#[test]
fn live_registrations_are_listed() {
    let (busy, idle) = (busy(), idle());
    for (name, fixture, line) in [
        ("list.txt", &busy, "list"),
        ("list.json", &busy, "list --json"),
        ("list-by-process.txt", &busy, "list --by-process"),
        ("list-by-process.json", &busy, "list --by-process --json"),
        ("list-gpu.txt", &busy, "list --gpu 1"),
        ("list-idle.txt", &idle, "list"),
    ] {
        testing::golden(&format!("golden/{name}"), &says(fixture, line));
    }
    assert!(says(&busy, "list --pid 4800").contains("\n1 registration of 1 process: 4 MiB\n"));
    let (by_address, by_index) = ("list --gpu 0000:1B:00.0", "list --gpu 1");
    assert_eq!(says(&busy, by_address), says(&busy, by_index));
    busy.session("2$ list --gpu 8\nthere is no GPU 8");
}

#[test]
fn counters_are_shown() {
    let (busy, idle) = (busy(), idle());
    for (name, fixture, line) in [
        ("stats.txt", &busy, "stats"),
        ("stats.json", &busy, "stats --json"),
        ("stats-idle.txt", &idle, "stats"),
    ] {
        testing::golden(&format!("golden/{name}"), &says(fixture, line));
    }
    // A GPU disappears from PCI while its memory is pinned.
    let mut lost = idle;
    lost.file(
        &format!("{FILES}/registrations"),
        "id=1 state=orphaned mode=revocable addr=0x7f2000000000 len=65536 page=65536 chunks=1 entries=0 \
         gpus=0000:f9:00.0 hca=- tgid=1 pid=1 since=1.000000 comm=a\n",
    );
    for line in ["stats", "list"] {
        let told = "0000:f9:00.0, which is gone from PCI\nuntil the machine restarts";
        lost.session(&format!("0$ {line}\n{told}"));
    }
    // The module has counters, but no list of registrations.
    let mut older = busy;
    older.remove(&format!("{FILES}/registrations"));
    let told = "0$ stats\nhas no file registrations\nno_room";
    older.session(told);
}

/// Parses Prometheus text, checks the format, and returns the samples by name and labels.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut types: BTreeMap<&str, &str> = BTreeMap::new();
    for line in text.lines() {
        if let Some(of) = line.strip_prefix("# TYPE ") {
            let (name, kind) = of.split_once(' ').unwrap();
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(types.insert(name, kind).is_none(), "{line}: twice");
        } else if let Some(of) = line.strip_prefix("# HELP ") {
            let help = of.split_once(' ').map(|(_, help)| help);
            assert!(help.is_some_and(|help| !help.is_empty()), "{line}");
        } else {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let family = name.split('{').next().unwrap();
            assert!(types.contains_key(family), "{line}: of no type");
            assert!(family.starts_with("peermem_"), "{line}");
            let value: f64 = value.parse().unwrap();
            let other = samples.insert(name.to_owned(), value);
            assert!(other.is_none(), "{line}: twice");
        }
    }
    samples
}

/// Returns the sample of a check's faults.
fn of_check(name: &str) -> String {
    format!("peermem_doctor_findings{{check=\"{name}\",level=\"fault\"}}")
}

#[test]
fn metrics_are_what_list_and_stats_say() {
    let text = says(&busy(), "export");
    let samples = samples(&text);
    // `doctor` has its own test of its checks.
    let kept: String = text
        .lines()
        .filter(|line| !line.contains("peermem_doctor_findings"))
        .map(|line| format!("{line}\n"))
        .collect();
    testing::golden("golden/export.prom", &kept);
    // Some checks have nothing to examine on this machine. The machine has no systemd, no baseline,
    // no RoCE near a GPU and no NVSwitch, and lacks the data that `verbs` and `ibgda` read. The
    // export skips the checks `counters` and `preload`.
    let absent = "verbs fabric ibgda module-at-boot preload baseline expect counters roce roce-qos";
    let absent: Vec<&str> = absent.split(' ').collect();
    for check in crate::doctor::checks().filter(|check| !absent.contains(&check.name)) {
        let sample = of_check(check.name);
        assert!(
            samples.contains_key(&sample),
            "{sample}: a check that does not apply to this machine belongs to `absent`"
        );
    }
    let without = says(&busy(), "export --no-doctor");
    assert!(!without.contains("doctor"), "{without}");
}

/// Exported metrics with their labels, and the counters of ports.
struct Exported<'a> {
    labels: BTreeMap<&'a str, BTreeSet<&'a str>>,
    counters: BTreeSet<&'a str>,
    metric: Regex,
    grouped: Regex,
    matcher: Regex,
}

impl<'a> Exported<'a> {
    fn parse(text: &'a str) -> Self {
        let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut counters = BTreeSet::new();
        let label = Regex::new("([a-z_]+)=\"((?:[^\"\\\\]|\\\\.)*)\"").unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, of) = line.split_once(['{', ' ']).unwrap();
            let labels = labels
                .entry(name)
                .or_insert_with(|| BTreeSet::from(["instance"]));
            for found in label.captures_iter(of) {
                let (_, [key, value]) = found.extract();
                labels.insert(key);
                if key == "counter" {
                    counters.insert(value);
                }
            }
        }
        Self {
            labels,
            counters,
            metric: Regex::new(r"(peermem_[a-z0-9_]+)(?:\{([^}]*)\})?").unwrap(),
            grouped: Regex::new(r"\b(?:by|on) \(([^)]*)\)").unwrap(),
            matcher: Regex::new("([a-z_]+)(?:=|!)~?\"([^\"]*)\"").unwrap(),
        }
    }

    /// Checks that a query uses existing metrics and labels. Returns the label matchers of each
    /// metric, and the counters that these matchers name.
    fn has_all_of<'q>(&self, query: &'q str, shown: &[&str]) -> (Vec<&'q str>, Vec<&'q str>) {
        let mut known: BTreeSet<&str> = BTreeSet::new();
        let (mut all, mut counters) = (Vec::new(), Vec::new());
        for found in self.metric.captures_iter(query) {
            let name = found.get(1).unwrap().as_str();
            let has = self
                .labels
                .get(name)
                .unwrap_or_else(|| panic!("{name} is not exported: {query}"));
            let matchers = found.get(2).map_or("", |matchers| matchers.as_str());
            for found in self.matcher.captures_iter(matchers) {
                let (_, [key, value]) = found.extract();
                assert!(has.contains(key), "{name} has no label {key}: {query}");
                if key == "counter" {
                    counters.extend(value.split('|'));
                }
            }
            known.extend(has);
            all.push(matchers);
        }
        let groups = self.grouped.captures_iter(query);
        let names =
            groups.flat_map(|found| found.extract::<1>().1[0].split(", ").collect::<Vec<_>>());
        for name in names.chain(shown.iter().copied()) {
            assert!(known.contains(name), "no metric has {name}: {query}");
        }
        (all, counters)
    }
}

/// Returns the labels that a template text shows.
fn shown(text: &str) -> Vec<&str> {
    let label = Regex::new(r"\{\{ ?(?:\$labels\.)?([a-z_]+) ?\}\}").unwrap();
    let found = label.captures_iter(text);
    found.map(|found| found.extract::<1>().1[0]).collect()
}

/// Grafana's dashboard queries existing metrics and labels.
#[test]
fn the_dashboard_queries_existing_metrics() {
    let text = says(&busy(), "export");
    let exported = Exported::parse(&text);
    let dashboard = include_str!("../../../packaging/peermemctl/grafana-dashboard.json");
    let dashboard: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let mut asked = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let target = &panel["targets"][0];
        let query = target["expr"].as_str().unwrap();
        let legend = target["legendFormat"].as_str().unwrap_or_default();
        let (matchers, counters) = exported.has_all_of(query, &shown(legend));
        assert!(!matchers.is_empty(), "{query}");
        for matchers in matchers {
            assert!(matchers.contains("instance=~\"$instance\""), "{query}");
        }
        asked.extend(counters);
    }
    // Every counter is in a panel.
    assert_eq!(asked, exported.counters);
}

/// The alerts query existing metrics and labels, and each rate that `doctor` warns of has an alert.
#[test]
fn the_alerts_query_existing_metrics() {
    let text = says(&busy(), "export");
    let exported = Exported::parse(&text);
    let alerts = include_str!("../../../packaging/peermemctl/alerts.yml");
    let mut asked = Vec::new();
    for alert in alerts.split("- alert: ").skip(1) {
        let (query, rest) = alert.split_once("labels:").unwrap();
        // Skips the alert on another program's metric.
        if !query.contains("node_textfile") {
            asked.extend(exported.has_all_of(query, &shown(rest)).1);
        }
    }
    let warned = COUNTERS
        .iter()
        .filter(|counter| matches!(counter.kind, Kind::Link | Kind::Discard | Kind::Loss));
    let mut warned: Vec<&str> = warned.map(|counter| counter.name).collect();
    warned.sort_unstable();
    asked.sort_unstable();
    assert_eq!(asked, warned);
}

/// On a machine without an RDMA device, most checks have nothing to examine. Such checks export no
/// metric, rather than the value 0.
#[test]
fn a_check_that_did_not_run_has_no_metric() {
    let checks = |fixture: &Fixture| -> BTreeMap<String, f64> {
        let mut found = samples(&says(fixture, "export"));
        found.retain(|sample, _| sample.starts_with("peermem_doctor_findings"));
        found
    };
    let without = fixture::no_hca().with_software();
    let without = checks(&without);
    let presence = without.get(&of_check("presence"));
    assert_eq!(presence, Some(&1.0), "{without:?}");
    let driver = without.get(&of_check("nvidia-driver"));
    assert_eq!(driver, Some(&0.0), "{without:?}");
    for check in "port acs path link module consumers memlock kernel-log".split(' ') {
        let sample = of_check(check);
        assert!(!without.contains_key(&sample), "{check}: {without:?}");
    }
    // NVML is not available, so its data is unknown.
    let mut fixture = fixture::small().with_software();
    fixture.no_nvml();
    let found = checks(&fixture);
    assert!(!found.contains_key(&of_check("bar1-free")), "{found:?}");
    assert!(found.contains_key(&of_check("port")), "{found:?}");
}

#[test]
fn metrics_say_that_there_is_no_module() {
    for (machine, loaded, module, machine_seen) in [
        (fixture::hgx(), Some(0.0), 1.0, 1.0),
        (without_root(), Some(1.0), 0.0, 1.0),
        (nothing(), None, 0.0, 0.0),
    ] {
        let samples = samples(&says(&machine, "export"));
        assert_eq!(samples.get("peermem_module_loaded").copied(), loaded);
        let success =
            |part: &str| samples[&format!("peermem_collector_success{{collector=\"{part}\"}}")];
        assert_eq!(
            (success("module"), success("machine")),
            (module, machine_seen)
        );
        assert!(!samples.contains_key("peermem_processes"));
    }
}

fn without_root() -> Fixture {
    let mut fixture = idle();
    fixture.remove("/sys/kernel/debug");
    fixture.deny("/sys/kernel/debug");
    for file in ["version", "registrations", "counters"] {
        fixture.deny(&format!("{FILES}/{file}"));
    }
    fixture
}

fn nothing() -> Fixture {
    let mut fixture = fixture::hgx();
    fixture.recording = crate::host::recording::Recording::new("empty");
    fixture
}

/// Each reason for missing data causes its own sentence, and exit status 2.
#[test]
fn missing_data_has_a_reason() {
    let with = |change: fn(&mut Fixture)| {
        let mut fixture = idle();
        change(&mut fixture);
        fixture
    };
    let nvidias = with(|fixture| {
        fixture.remove(FILES);
        fixture.file("/sys/kernel/debug/x", "");
        fixture.file("/sys/module/nvidia_peermem/version", "595.45.04\n");
    });
    let no_files = with(|fixture| {
        fixture.remove(FILES);
        fixture.file("/sys/kernel/debug/x", "");
    });
    let not_mounted = with(|fixture| fixture.remove(FILES));
    let no_debugfs = with(|fixture| fixture.remove("/sys/kernel/debug"));
    let newer = with(|fixture| module_file(fixture, "version", "format=4 module=x\n"));
    let no_list = with(|fixture| fixture.remove(&format!("{FILES}/registrations")));
    for (fixture, says) in [
        (fixture::hgx(), "is not loaded"),
        (without_root(), "not visible without root"),
        (nvidias, "NVIDIA's own module reports nothing"),
        (
            no_files,
            "is loaded, but neither /sys/kernel/debug/nvidia_peermem nor",
        ),
        (not_mounted, "debugfs is not mounted"),
        (no_debugfs, "this kernel has no debugfs"),
        (newer, "have the format 4"),
        (no_list, "has no file registrations"),
        (nothing(), "the recording does not contain"),
    ] {
        fixture.session(&format!("2$ list\n^ peermemctl: \n{says}"));
        let (text, _) = fixture.says("list");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

/// Moves the module's files to `/proc`, as for the proprietary nvidia.ko.
fn in_proc(mut fixture: Fixture) -> Fixture {
    let files: Vec<(String, String)> = fixture
        .recording
        .files
        .iter()
        .filter_map(|(path, text)| Some((path.strip_prefix(FILES)?.to_owned(), text.clone())))
        .collect();
    fixture.remove(FILES);
    for (name, text) in files {
        fixture
            .recording
            .files
            .insert(format!("{PROC}{name}"), text);
    }
    fixture
}

/// The output is the same whether the module's files are in debugfs or in `/proc`.
#[test]
fn files_in_proc_are_read_like_files_in_debugfs() {
    for command in ["list", "stats"] {
        let (expected, _) = busy().says(command);
        let mut without_debugfs = in_proc(busy());
        without_debugfs.remove("/sys/kernel/debug");
        for fixture in [in_proc(busy()), without_debugfs] {
            let (text, status) = fixture.says(command);
            assert_eq!(text, expected, "{command}");
            assert_ne!(status, Status::Failed);
        }
    }
    let mut denied = in_proc(idle());
    denied.deny(&format!("{PROC}/version"));
    denied.session("2$ list\n^ peermemctl: only root can read /proc/driver/nvidia-peermem");
}

/// The previous release of the module counts memory with struct pages as `not_in_bar`.
#[test]
fn the_previous_format_is_read_too() {
    for format in [2, 3] {
        let mut fixture = busy();
        let version = format!("format={format} module=595.45.04-rs1\n");
        fixture.file(&format!("{FILES}/version"), &version);
        for command in ["list", "stats"] {
            let json: serde_json::Value =
                serde_json::from_str(&says(&fixture, &format!("{command} --json"))).expect("JSON");
            assert_eq!(json["module"]["format"], format, "{command}");
        }
    }
}

/// In a container with its own PID namespace, a process ID that the module reports belongs to no
/// process, or to another process.
#[test]
fn process_ids_of_another_namespace_are_not_looked_up() {
    let mut fixture = busy();
    fixture.link("/proc/self/ns/pid", "pid:[4026532001]");
    fixture.session(
        "0$ list --by-process
         ! train.py
         ! alice
         note: this program does not run in the first PID namespace",
    );
}

#[test]
fn ten_thousand_registrations_are_listed() {
    const MANY: u64 = 10_000;
    let mut fixture = busy();
    let mut text = String::new();
    for id in 1..=MANY {
        let (addr, pid) = (id << 16, 4000 + id % 200);
        let _ = writeln!(
            text,
            "id={id} state=mapped mode=persistent addr={addr:#x} len=65536 page=65536 chunks=1 entries=1 \
             gpus=0000:19:00.0 hca=0000:18:00.0 tgid={pid} pid={pid} since=3000.500000 comm=many"
        );
    }
    fixture.file(&format!("{FILES}/registrations"), &text);
    let begin = std::time::Instant::now();
    let list = says(&fixture, "list");
    let listed = begin.elapsed();
    let lines = list.lines();
    let lines = lines.filter(|line| line.contains("0000:18") || line.contains("mlx5_0"));
    assert_eq!(lines.count(), 10_000);
    assert!(list.contains("10000 registrations of 200 processes: 625 MiB"));
    let begin = std::time::Instant::now();
    let json: serde_json::Value = serde_json::from_str(&says(&fixture, "list --json")).unwrap();
    let reported = begin.elapsed();
    assert_eq!(json["registrations"].as_array().unwrap().len(), 10_000);
    let begin = std::time::Instant::now();
    assert!(says(&fixture, "export --no-doctor").contains("peermem_processes 200\n"));
    let exported = begin.elapsed();
    println!(
        "{MANY} registrations, {} bytes: list {listed:?}, with --json {reported:?}, export {exported:?}",
        text.len()
    );
}

/// The recording of a machine with registrations gives the same output as the machine.
#[test]
fn a_recording_has_the_registrations() {
    let busy = busy();
    let text = says(&busy, "record --keep-identity");
    let recording = crate::host::recording::Recording::parse(&text).unwrap();
    for line in ["list", "list --json", "stats", "export"] {
        let there = testing::says(&recording, line);
        assert_eq!(there, (says(&busy, line), Status::Ok), "{line:?}");
    }
}

proptest::proptest! {
    #![proptest_config(testing::cases(32))]

    /// No answer of the module and `/proc` causes a panic.
    #[test]
    fn no_answer_of_the_module_is_a_panic(
        changes in proptest::collection::vec(
            (
                proptest::prelude::any::<proptest::sample::Index>(),
                0_usize..2000,
                0_usize..30,
                "[0-9a-fx=.:,\\\\\" \n-]{0,12}|\\PC{0,8}|18446744073709551615",
            ),
            1..9,
        ),
    ) {
        let mut fixture = busy();
        let files: Vec<String> = fixture
            .recording
            .files
            .keys()
            .filter(|path| path.starts_with(FILES) || path.starts_with("/proc/") || path.starts_with("/etc/"))
            .cloned()
            .collect();
        for (index, from, length, text) in changes {
            let old = fixture.recording.files.get_mut(index.get(&files)).unwrap();
            let before: String = old.chars().take(from).collect();
            let behind: String = old.chars().skip(from + length).collect();
            *old = before + &text + &behind;
        }
        for line in "list, list --json, list --by-process, stats, stats --json, export --no-doctor".split(", ") {
            let (text, _) = fixture.says(line);
            assert!(!text.is_empty(), "{line:?} says nothing");
        }
    }
}
