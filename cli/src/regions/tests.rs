// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of `list --all` on synthetic machines: one test for each verdict, and one for each reason
//! why the verdict is unknown. `cli/tests/golden` holds the expected output.

use serde_json::{json, Value};

use crate::dma_buf::tests::bufinfo;
use crate::finding::Status;
use crate::fixture::Fixture;
use crate::host::recording::Recording;
use crate::host::{Fact, Host as _, Unseen};
use crate::testing::{faults_of, Fault};
use crate::{dma_buf, fixture, testing};

const FILES: &str = crate::debugfs::DIRECTORY;
const MODULE: &str = "/sys/module/nvidia_peermem";
/// PCI addresses of RDMA devices of the machine.
const MLX5_0: &str = "0000:18:00.0";
const MLX5_1: &str = "0000:1a:00.0";
/// A NIC's function that is not an RDMA device.
const DATA_DIRECT: &str = "0000:1f:00.0";

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Returns a line of the module's list.
fn registration(id: u64, state: &str, pid: u32, len: u64, hca: &str) -> String {
    format!(
        "id={id} state={state} mode=persistent addr={:#x} len={len} page=65536 chunks=1 entries=1 gpus=0000:19:00.0 \
         hca={hca} tgid={pid} pid={} since=3000.500000 comm=pt_main_thread\n",
        0x7f00_0000_0000 + (id << 32),
        pid + 1
    )
}

/// Returns the kernel's list for one device.
fn device(name: &str, regions: &[Value]) -> Value {
    json!({ "name": name, "regions": regions, "domains": [] })
}

fn region(thread: Option<u32>, domain: u32, bytes: u64, count: u64) -> Value {
    json!({ "thread": thread, "domain": domain, "bytes": bytes, "count": count })
}

fn track(fixture: &mut Fixture, devices: &[Value]) {
    let devices = json!({ "devices": devices }).to_string();
    fixture.fact(Fact::MemoryRegions, &devices);
}

/// Writes the kernel's list of dma-bufs: exporter, name, bytes and devices of each.
fn buffers(fixture: &mut Fixture, all: &[(&str, &str, u64, &[&str])]) {
    fixture.file(dma_buf::FILE, &bufinfo(all));
}

fn process(fixture: &mut Fixture, pid: u32, threads: &[u32], uid: u32, command: &str) {
    for number in threads.iter().chain([&pid]) {
        let status =
            format!("Name:\tx\nTgid:\t{pid}\nPid:\t{number}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
        fixture.file(&format!("/proc/{number}/status"), &status);
    }
    fixture.file(&format!("/proc/{pid}/cmdline"), command);
    let stat = format!("{pid} (x) S 1 1 1\n");
    fixture.file(&format!("/proc/{pid}/stat"), &stat);
}

/// Returns a machine without a module and without GPU dma-bufs. Two processes and the kernel have
/// regions.
fn machine() -> Fixture {
    let mut fixture = fixture::hgx();
    fixture.link("/proc/self/ns/pid", "pid:[4026531836]");
    fixture.file("/etc/passwd", "alice:x:1000:1000::/home/alice:/bin/bash\n");
    buffers(&mut fixture, &[("udmabuf", "frames", 65_536, &[])]);
    let command = "python3\0train.py\0";
    process(&mut fixture, 4711, &[4712, 4713], 1000, command);
    process(&mut fixture, 4800, &[], 1001, "ib_write_bw\0");
    let first = [
        region(Some(4712), 2, 2 * GIB, 1),
        region(Some(4713), 2, GIB - 4096, 1),
        region(Some(4711), 2, 4 * MIB, 210),
        json!({ "kernel": "nvme_rdma", "bytes": 131_072, "count": 128 }),
    ];
    let second = [
        region(Some(4711), 1, 2 * GIB, 1),
        region(Some(4800), 3, 65_536, 2),
    ];
    let devices = [
        device("mlx5_0", &first),
        device("mlx5_1", &second),
        device("mlx5_2", &[]),
    ];
    track(&mut fixture, &devices);
    fixture
}

/// Gives each of the two processes its own device.
fn apart(fixture: &mut Fixture) {
    let first = [
        region(Some(4712), 2, 2 * GIB, 1),
        region(Some(4711), 2, 4 * MIB, 210),
    ];
    let second = device("mlx5_1", &[region(Some(4800), 3, 65_536, 2)]);
    track(fixture, &[device("mlx5_0", &first), second]);
}

/// Returns a machine with peermem-rs and these registrations.
fn ours(registrations: &str) -> Fixture {
    let mut fixture = machine();
    fixture.file(&format!("{MODULE}/version"), "595.45.04-rs1\n");
    fixture.file(&format!("{MODULE}/refcnt"), "3\n");
    let version = "format=3 module=595.45.04-rs1\n";
    fixture.file(&format!("{FILES}/version"), version);
    fixture.file(&format!("{FILES}/registrations"), registrations);
    fixture
}

/// Returns a machine with NVIDIA's module and `count` registrations.
fn nvidias(count: u64) -> Fixture {
    let mut fixture = machine();
    fixture.file(&format!("{MODULE}/version"), "580.159.04\n");
    fixture.file(&format!("{MODULE}/refcnt"), &format!("{count}\n"));
    fixture
}

fn says(fixture: &Fixture, line: &str) -> String {
    let (text, status) = fixture.says(line);
    assert_eq!(status, Status::Ok, "{text}");
    text
}

fn json(fixture: &Fixture) -> Value {
    serde_json::from_str(&says(fixture, "list --all --json")).unwrap()
}

/// Returns the verdict on a process, or on regions without a known owner. Also returns four numbers
/// of regions: peer memory, dma-buf, other memory, unknown memory.
fn of(answer: &Value, pid: Option<u32>) -> (String, [u64; 4]) {
    let all = answer["processes"].as_array().unwrap();
    let is_it = |one: &&Value| one["pid"] == json!(pid) && one["kernel"].is_null();
    let one = all.iter().find(is_it).unwrap();
    let parts = ["peer_memory", "dma_buf", "other", "unknown"];
    let parts = parts.map(|part| one[part]["regions"].as_u64().unwrap());
    let without = one["without_region"].as_u64().unwrap();
    assert_eq!(
        parts.iter().sum::<u64>(),
        one["regions"].as_u64().unwrap(),
        "{one:#}, {without} without"
    );
    (one["gpudirect"].as_str().unwrap().to_owned(), parts)
}

#[track_caller]
fn is_told(answer: &Value, pid: Option<u32>, verdict: &str, parts: [u64; 4]) {
    assert_eq!(of(answer, pid), (verdict.to_owned(), parts), "{answer:#}");
}

/// Checks that the reasons, or the notes, contain these words.
#[track_caller]
fn has(answer: &Value, key: &str, words: &str) {
    let text = answer[key].to_string();
    assert!(text.contains(words), "{words}: {text}");
}

#[test]
fn each_answer_is_shown() {
    let registrations = [
        registration(1, "mapped", 4711, 2 * GIB, MLX5_0),
        registration(2, "mapped", 4711, GIB, MLX5_0),
        registration(3, "mapped", 4711, 2 * GIB, MLX5_1),
        registration(4, "orphaned", 4711, 4 * MIB, MLX5_0),
    ];
    let ours = ours(&registrations.concat());
    let mut shared = nvidias(2);
    let gpu = ("nv_dmabuf", "<none>", 2 * GIB);
    buffers(
        &mut shared,
        &[
            (gpu.0, gpu.1, gpu.2, &[MLX5_0, MLX5_1]),
            ("udmabuf", "frames", 65_536, &[MLX5_1]),
        ],
    );
    for (name, fixture, line) in [
        ("list-all.txt", &ours, "list --all"),
        ("list-all.json", &ours, "list --all --json"),
        ("list-all-pid.txt", &ours, "list --all --pid 4711"),
        ("list-all-unknown.txt", &shared, "list --all"),
    ] {
        testing::golden(&format!("golden/{name}"), &says(fixture, line));
    }
}

#[test]
fn a_process_without_gpu_memory_is_reported() {
    let answer = json(&machine());
    is_told(&answer, Some(4711), "no", [0, 0, 213, 0]);
    is_told(&answer, Some(4800), "no", [0, 0, 2, 0]);
    assert_eq!(answer["reasons"], json!([]));
    // The kernel was built without dma-buf.
    let mut without = machine();
    without.remove("/sys/kernel/debug/dma_buf");
    without.file("/sys/kernel/debug/x", "");
    assert_eq!(of(&json(&without), Some(4711)).0, "no");
    machine().session(
        "0$ list --all --pid 4711
         process 4711 does not use GPUDirect RDMA now: none of its 213 regions is GPU memory
         0$ list --all --pid 77
         process 77 does not use GPUDirect RDMA now: it has no memory region",
    );
}

#[test]
fn registrations_of_peermem_rs_are_gpu_memory() {
    // If several regions match a registration, the longest region is chosen.
    let mapped = |pid, len| registration(1, "mapped", pid, len, MLX5_0);
    let answer = json(&ours(&mapped(4711, GIB)));
    is_told(&answer, Some(4711), "yes", [1, 0, 212, 0]);
    let bytes = &answer["processes"][0]["peer_memory"]["bytes"];
    assert_eq!(bytes, &json!(GIB - 4096));
    assert_eq!(of(&answer, Some(4800)).0, "no");
    // No region counts as GPU memory if the registration is not mapped yet or no longer mapped.
    for state in ["revoked", "orphaned", "pinned"] {
        let answer = json(&ours(&registration(1, state, 4711, GIB, MLX5_0)));
        assert_eq!(of(&answer, Some(4711)).0, "no", "{state}");
    }
    // A registration by DEVX is in the module's list, but has no region. A region of another device
    // does not match.
    for (registration, pid) in [
        (mapped(4800, 64 * MIB), 4800),
        (registration(1, "mapped", 4711, GIB, MLX5_1), 4711),
    ] {
        let fixture = ours(&registration);
        let (verdict, [by_peer_memory, ..]) = of(&json(&fixture), Some(pid));
        assert_eq!((verdict.as_str(), by_peer_memory), ("yes", 0));
        fixture.session("0$ list --all\nin no memory region");
    }
    // The process has a registration, but no regions.
    let answer = json(&ours(&mapped(99, GIB)));
    is_told(&answer, Some(99), "yes", [0; 4]);
}

#[test]
fn registrations_of_nvidias_module_belong_to_the_only_user() {
    assert_eq!(of(&json(&nvidias(0)), Some(4711)).0, "no");
    // Either of two processes may own the registrations.
    let answer = json(&nvidias(3));
    is_told(&answer, Some(4711), "unknown", [0, 0, 0, 213]);
    is_told(&answer, Some(4800), "unknown", [0, 0, 0, 2]);
    has(&answer, "reasons", "has 3 registrations of GPU memory");
    has(&answer, "reasons", "not peermem-rs");
    nvidias(3).session(
        "0$ list --all --pid 4800
         it is unknown whether process 4800 uses GPUDirect RDMA: 2 of its 2 regions may be",
    );
    let mut alone = nvidias(3);
    let regions = [
        region(Some(4711), 2, GIB, 4),
        json!({ "kernel": "nvme_rdma", "bytes": 4096, "count": 9 }),
    ];
    track(&mut alone, &[device("mlx5_0", &regions)]);
    let answer = json(&alone);
    is_told(&answer, Some(4711), "yes", [3, 0, 1, 0]);
    // It is unknown which three of the four regions are GPU memory.
    assert!(answer["processes"][0]["peer_memory"]["bytes"].is_null());
    // The reference count of our module is readable without root.
    let mut denied = ours("");
    denied.remove("/sys/kernel/debug");
    denied.deny("/sys/kernel/debug");
    denied.deny(&format!("{FILES}/version"));
    denied.deny(dma_buf::FILE);
    let answer = json(&denied);
    assert_eq!(of(&answer, Some(4711)).0, "unknown");
    for said in [
        "not visible without root",
        "has 3 registrations",
        "by dma-buf",
    ] {
        has(&answer, "reasons", said);
    }
    denied.file(&format!("{MODULE}/refcnt"), "0\n");
    let answer = json(&denied);
    assert_eq!(of(&answer, Some(4711)).0, "unknown");
    let reasons = answer["reasons"].to_string();
    assert!(!reasons.contains("registrations"), "{reasons}");
}

#[test]
fn a_dma_buf_belongs_to_the_only_user_of_its_device() {
    let attached = |fixture: &mut Fixture, exporter: &str, device: &str| {
        buffers(fixture, &[(exporter, "<none>", 2 * GIB, &[device])]);
    };
    let mut fixture = machine();
    apart(&mut fixture);
    for exporter in ["nv_dmabuf", "nvidia"] {
        attached(&mut fixture, exporter, MLX5_0);
        let answer = json(&fixture);
        is_told(&answer, Some(4711), "yes", [0, 1, 210, 0]);
        is_told(&answer, Some(4800), "no", [0, 0, 2, 0]);
        assert_eq!(answer["processes"][0]["dma_buf"]["bytes"], json!(2 * GIB));
    }
    // A dma-buf that is attached to an unused device, to another GPU or to a disk does not change
    // the verdict.
    for device in ["0000:29:00.0", "0000:1b:00.0", "0000:99:00.0", "card0"] {
        attached(&mut fixture, "nv_dmabuf", device);
        assert_eq!(of(&json(&fixture), Some(4711)).0, "no", "{device}");
    }
    // Two processes share a device. The regions of process 4711 on the other device are not
    // affected.
    let mut shared = machine();
    attached(&mut shared, "nv_dmabuf", MLX5_1);
    let answer = json(&shared);
    is_told(&answer, Some(4711), "unknown", [0, 0, 212, 1]);
    is_told(&answer, Some(4800), "unknown", [0, 0, 0, 2]);
    has(&answer, "reasons", "processes 4711, 4800");
    // A process with only a protection domain on the device also counts as a user of the device.
    let mut domain = machine();
    let mut first = device("mlx5_0", &[region(Some(4711), 2, 2 * GIB, 1)]);
    first["domains"] =
        json!([{ "thread": 4800, "domain": 3 }, { "kernel": "rdma_cm", "domain": 0 }]);
    track(&mut domain, &[first]);
    attached(&mut domain, "nv_dmabuf", MLX5_0);
    assert_eq!(of(&json(&domain), Some(4711)).0, "unknown");
    // If no region matches a dma-buf, the process registered the dma-buf by DEVX.
    let mut more = machine();
    track(
        &mut more,
        &[device("mlx5_0", &[region(Some(4711), 2, 4 * GIB, 1)])],
    );
    attached(&mut more, "nv_dmabuf", MLX5_0);
    is_told(&json(&more), Some(4711), "yes", [0, 0, 1, 0]);
    // A dma-buf of another exporter causes a note, but does not count as GPU memory.
    attached(&mut more, "udmabuf", MLX5_0);
    let answer = json(&more);
    assert_eq!(of(&answer, Some(4711)).0, "no");
    has(&answer, "notes", "udmabuf");
}

#[test]
fn a_dma_buf_of_a_nic_without_rdma_may_belong_to_any_process() {
    let mut fixture = machine();
    buffers(
        &mut fixture,
        &[("nv_dmabuf", "<none>", GIB, &[DATA_DIRECT])],
    );
    let text = "0x15b3\n";
    fixture.file(&format!("/sys/bus/pci/devices/{DATA_DIRECT}/vendor"), text);
    let answer = json(&fixture);
    assert_eq!(of(&answer, Some(4711)).0, "unknown");
    has(&answer, "reasons", "Data Direct");
    track(
        &mut fixture,
        &[device("mlx5_0", &[region(Some(4711), 2, GIB, 2)])],
    );
    is_told(&json(&fixture), Some(4711), "yes", [0, 1, 1, 0]);
}

// Reasons for an unknown verdict, each with the change to the machine that causes the reason.
faults_of! {
    Fixture;
    "bufinfo is not visible without root" => |fixture| fixture.deny(dma_buf::FILE);
    "debugfs is not mounted: mount -t debugfs" => |fixture| {
        fixture.remove("/sys/kernel/debug");
        fixture.directory("/sys/kernel/debug");
    };
    "this kernel has no debugfs" => |fixture| fixture.remove("/sys/kernel/debug");
    "is incomplete" => |fixture| fixture.file(dma_buf::FILE, "\nDma-buf Objects:\n");
    "nv_peer_mem is loaded" => |fixture| fixture.file("/sys/module/nv_peer_mem/refcnt", "0\n");
    "the registrations of nvidia_peermem are not visible" =>
        |fixture| fixture.file(&format!("{MODULE}/version"), "580.159.04\n");
}

#[test]
fn an_unknown_verdict_has_a_reason() {
    for Fault { name, inject, .. } in FAULTS {
        let mut fixture = machine();
        inject(&mut fixture);
        let answer = json(&fixture);
        let (verdict, [.., unknown]) = of(&answer, Some(4711));
        assert_eq!((verdict.as_str(), unknown), ("unknown", 213), "{name}");
        has(&answer, "reasons", name);
        fixture.session(&format!("0$ list --all --pid 4800\n{name}"));
    }
    let newer =
        registration(7, "mapped", 4711, GIB, MLX5_0).replace("state=mapped", "state=parked");
    has(
        &json(&ours(&newer)),
        "reasons",
        "registration 7 of the module's list",
    );
    let cut = ours("id=1 state=map");
    has(
        &json(&cut),
        "reasons",
        "1 line of its list could not be read",
    );
    let mut grace = fixture::grace();
    buffers(&mut grace, &[]);
    track(
        &mut grace,
        &[device("mlx5_0", &[region(Some(4711), 2, GIB, 1)])],
    );
    has(&json(&grace), "reasons", "Grace");
    // A region that is known to be GPU memory is reported even if the other regions are unknown.
    let mut known = ours(&registration(1, "mapped", 4711, GIB, MLX5_0));
    known.deny(dma_buf::FILE);
    is_told(&json(&known), Some(4711), "yes", [1, 0, 0, 212]);
}

#[test]
fn hidden_regions_make_the_verdict_unknown() {
    let refused = json!({ "name": "mlx5_1", "refused": "the kernel lists none" });
    let seen = device("mlx5_0", &[region(Some(4711), 2, GIB, 1)]);
    // One process is visible. The registrations that the module counts, or the attached dma-bufs,
    // may belong to processes that are not visible.
    for (hide, said) in [
        (
            (|_| {}) as fn(&mut Fixture),
            "of mlx5_1 are not visible: the kernel lists none",
        ),
        (
            |fixture| fixture.file("/proc/sys/kernel/osrelease", "5.4.0-200-generic\n"),
            "this kernel (5.4.0-200-generic) leaves out",
        ),
    ] {
        for (registered, verdict) in [(3, "unknown"), (0, "no")] {
            let mut fixture = nvidias(registered);
            track(&mut fixture, &[seen.clone(), refused.clone()]);
            hide(&mut fixture);
            let answer = json(&fixture);
            assert_eq!(of(&answer, Some(4711)).0, verdict, "{said}");
            has(&answer, "notes", said);
            let text = fixture.session(&format!("0$ list --all --pid 4800\n{said}"));
            let is_open = text.contains("it is unknown whether process 4800 uses GPUDirect RDMA");
            assert_eq!(is_open, registered > 0, "{text}");
            assert_eq!(
                text.contains("has 3 registrations"),
                registered > 0,
                "{text}"
            );
        }
    }
    let mut fixture = nvidias(0);
    buffers(&mut fixture, &[("nvidia", "<none>", GIB, &[MLX5_0])]);
    track(&mut fixture, &[seen, refused.clone()]);
    assert_eq!(of(&json(&fixture), Some(4711)).0, "yes");
    let mut elsewhere = fixture.clone();
    buffers(&mut elsewhere, &[("nvidia", "<none>", GIB, &[MLX5_1])]);
    elsewhere.session(
        "0$ list --all --pid 4711
         none of its 1 region is GPU memory, and there may be others
         attached to mlx5_1",
    );
    fixture.file("/proc/sys/kernel/osrelease", "4.18.0-553.el8_10.x86_64\n");
    assert_eq!(of(&json(&fixture), Some(4711)).0, "unknown");
    track(&mut fixture, &[refused]);
    fixture.session("0$ list --all\nno memory region is visible");
}

#[test]
fn a_missing_list_is_an_error() {
    let mut fixture = machine();
    for (why, said) in [
        (Unseen::NotRecorded, "the recording has no memory regions"),
        (
            Unseen::Failed("RDMA netlink: x".to_owned()),
            "memory regions are not visible: RDMA netlink: x",
        ),
    ] {
        fixture.without_fact(Fact::MemoryRegions, why);
        fixture.session(&format!("2$ list --all\n{said}"));
    }
    fixture.fact(Fact::MemoryRegions, "{\"devices\":7}");
    fixture.session("2$ list --all\nnot understood");
    // On a machine without an RDMA device, the command succeeds.
    let without = fixture::no_hca().recording;
    testing::session(&without, "0$ list --all\nnothing uses RDMA now");
}

#[test]
fn regions_of_ended_threads_belong_to_their_process() {
    let mut fixture = machine();
    let mut first = device(
        "mlx5_0",
        &[region(None, 2, GIB, 3), region(None, 3, MIB, 1)],
    );
    first["domains"] = json!([{ "thread": 4713, "domain": 2 }]);
    // A protection domain with the same number on another device is a different domain.
    let second = device("mlx5_1", &[region(None, 2, GIB, 1)]);
    track(&mut fixture, &[first, second]);
    let answer = json(&fixture);
    is_told(&answer, Some(4711), "no", [0, 0, 3, 0]);
    is_told(&answer, None, "no", [0, 0, 2, 0]);
    has(
        &answer,
        "notes",
        "the kernel does not name the process of 2 regions",
    );
    // The module knows the owner of a region whose owner the kernel does not name.
    let mut known = ours(&registration(1, "mapped", 4800, GIB, MLX5_1));
    known.recording.facts = fixture.recording.facts.clone();
    let answer = json(&known);
    is_told(&answer, Some(4800), "yes", [1, 0, 0, 0]);
    is_told(&answer, None, "no", [0, 0, 1, 0]);
    // Unowned regions may belong to a process without regions.
    fixture.deny(dma_buf::FILE);
    fixture.session(
        "0$ list --all --pid 4800
         it is unknown whether
         the kernel does not name the process of 2 regions
         without root",
    );
    // Another process, which began at 3,590 s, has the ID now.
    let stat = "4800 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 359000 0 0\n";
    known.file("/proc/4800/stat", stat);
    let answer = json(&known);
    is_told(&answer, None, "yes", [1, 0, 1, 0]);
    known.session("0$ list --all --pid 4800\nit is unknown whether");
    // Two processes share a protection domain, so the owner of the region is unknown.
    let shared = [
        region(None, 2, GIB, 1),
        region(Some(4711), 2, GIB, 1),
        region(Some(4800), 2, GIB, 1),
    ];
    track(&mut fixture, &[device("mlx5_0", &shared)]);
    assert_eq!(of(&json(&fixture), None).1, [0, 0, 0, 1]);
}

#[test]
fn another_pid_namespace_has_its_own_process_ids() {
    let mut fixture = ours(&registration(1, "mapped", 4711, GIB, MLX5_0));
    fixture.link("/proc/self/ns/pid", "pid:[4026532001]");
    let answer = json(&fixture);
    // Process 4711 of the module's list is not the process with the ID 4711 in this PID namespace.
    // The names belong to this namespace.
    assert_eq!(of(&answer, Some(4711)).0, "unknown");
    assert_eq!(answer["processes"][0]["user"], json!("alice"));
    has(&answer, "reasons", "PID namespace");
    has(&answer, "notes", "of this namespace");
    fixture.file(&format!("{FILES}/registrations"), "");
    assert_eq!(of(&json(&fixture), Some(4711)).0, "no");
}

#[test]
fn other_network_namespaces_may_have_devices() {
    let mut fixture = nvidias(3);
    let devices = json!([device("mlx5_0", &[region(Some(4711), 2, GIB, 4)])]);
    for (exclusive, verdict, without) in [
        (false, "yes", "does not use"),
        (true, "unknown", "it is unknown whether"),
    ] {
        let fact = json!({ "devices": devices, "is_exclusive": exclusive });
        fixture.fact(Fact::MemoryRegions, &fact.to_string());
        assert_eq!(of(&json(&fixture), Some(4711)).0, verdict);
        let text = fixture.session(&format!("0$ list --all --pid 4800\n{without}"));
        assert_eq!(text.contains("nsenter"), exclusive, "{text}");
    }
    // A visible device has no users in other network namespaces.
    fixture.file(&format!("{MODULE}/refcnt"), "0\n");
    buffers(&mut fixture, &[("nv_dmabuf", "<none>", GIB, &[MLX5_0])]);
    is_told(&json(&fixture), Some(4711), "yes", [0, 1, 3, 0]);
}

/// A recording gives the same answer as the machine, whether or not identifying names were removed.
#[test]
fn a_recording_gives_the_same_answer() {
    let mut fixture = ours(&registration(1, "mapped", 4711, GIB, MLX5_0));
    buffers(
        &mut fixture,
        &[
            ("nv_dmabuf", "project-x", GIB, &[MLX5_1]),
            ("udmabuf", "cat\n\tx", 4096, &[]),
        ],
    );
    let line = "list --all --json";
    for (keep, record) in [(true, "record --keep-identity"), (false, "record")] {
        let text = says(&fixture, record);
        let recording = Recording::parse(&text).unwrap();
        let mut there: Value = serde_json::from_str(&says(&fixture, line)).unwrap();
        let (text, status) = testing::says(&recording, line);
        assert_eq!(status, Status::Ok, "{text}");
        let mut here: Value = serde_json::from_str(&text).unwrap();
        if !keep {
            for answer in [&mut there, &mut here] {
                for one in answer["processes"].as_array_mut().unwrap() {
                    one["command"] = Value::Null;
                    one["user"] = Value::Null;
                }
            }
        }
        assert_eq!(here, there, "identity kept: {keep}");
        let kept = recording.text(dma_buf::FILE).unwrap();
        assert_eq!(kept.contains("project-x"), keep, "{kept}");
        assert_eq!(kept.contains("cat"), keep, "{kept}");
    }
}

proptest::proptest! {
    #![proptest_config(testing::cases(64))]

    /// Each region is counted once, for all answers of the kernel and the module.
    #[test]
    fn each_region_counts_once(
        regions in proptest::collection::vec((0_u32..4, 0_u32..3, 0_u64..5, 1_u64..4, 0_usize..2), 0..12),
        registrations in proptest::collection::vec((0_u32..3, 0_u64..5, 0_usize..3), 0..8),
        buffers in proptest::collection::vec((0_u64..5, 0_usize..3), 0..6),
        refcnt in 0_u64..4,
        is_ours in proptest::prelude::any::<bool>(),
    ) {
        let names = ["mlx5_0", "mlx5_1"];
        let functions = [MLX5_0, MLX5_1, "0000:19:00.0"];
        let lines: String = registrations
            .iter()
            .enumerate()
            .map(|(id, (pid, mib, hca))| registration(id as u64, "mapped", 4711 + pid, mib * MIB, functions[*hca]))
            .collect();
        let mut fixture = if is_ours { ours(&lines) } else { nvidias(refcnt) };
        let buffers: Vec<(u64, [&str; 1])> = buffers.iter().map(|(mib, at)| (mib * MIB, [functions[*at]])).collect();
        let buffers: Vec<_> = buffers.iter().map(|(bytes, at)| ("nvidia", "<none>", *bytes, &at[..])).collect();
        fixture.file(dma_buf::FILE, &bufinfo(&buffers));
        let on = |index: usize| {
            let its = regions.iter().filter(|region| region.4 == index);
            let its: Vec<Value> = its
                .map(|(thread, domain, mib, count, _)| {
                    region((*thread > 0).then_some(4710 + thread), *domain, mib * MIB, *count)
                })
                .collect();
            device(names[index], &its)
        };
        track(&mut fixture, &[on(0), on(1)]);
        let answer = json(&fixture);
        let (mut count, mut bytes) = (0, 0);
        for one in answer["processes"].as_array().unwrap() {
            let parts = ["peer_memory", "dma_buf", "other", "unknown"];
            let parts = parts.map(|part| (one[part]["regions"].as_u64().unwrap(), one[part]["bytes"].as_u64()));
            let its: u64 = parts.iter().map(|part| part.0).sum();
            proptest::prop_assert_eq!(Some(its), one["regions"].as_u64());
            if let Some(known) = parts.iter().map(|part| part.1).sum::<Option<u64>>() {
                proptest::prop_assert_eq!(Some(known), one["bytes"].as_u64());
            }
            count += its;
            bytes += one["bytes"].as_u64().unwrap();
        }
        proptest::prop_assert_eq!(count, regions.iter().map(|region| region.3).sum::<u64>());
        proptest::prop_assert_eq!(bytes, regions.iter().map(|region| region.2 * MIB * region.3).sum::<u64>());
    }
}
