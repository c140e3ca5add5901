// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of `job` on synthetic processes. `cli/tests/golden` holds the expected output.

use std::cell::Cell;

use crate::finding::Status;
use crate::fixture;
use crate::fixture::software::limits;
use crate::fixture::Fixture;
use crate::host::recording::Recording;
use crate::host::{Fact, Unseen};
use crate::process::seen_by;
use crate::software::MODULE;
use crate::testing;
use crate::testing::{faults_of, is_like, Fault};

const DEBUG: &str = crate::debugfs::DIRECTORY;
const PID: u32 = 4711;
const STATUS: &str = "/proc/4711/status";
const MAPPED: &str = "/proc/4711/maps";

const MAPS: &str = "\
55d0c0a00000-55d0c0a01000 r--p 00000000 fe:00 11                         /usr/bin/python3.12\n\
7f1200000000-7f1200100000 rw-s 00000000 00:06 41                         /dev/nvidia0\n\
7f1300000000-7f1300200000 r-xp 00000000 fe:00 1201                       /opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2\n\
7f1300200000-7f1300300000 rw-p 00200000 fe:00 1201                       /opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2\n\
7f1400000000-7f1400100000 r-xp 00000000 fe:00 1202                       /usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3\n\
7f1500000000-7f1500100000 r-xp 00000000 fe:00 1203                       /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0\n\
7f1600000000-7f1600100000 r-xp 00000000 fe:00 1204                       /usr/lib/x86_64-linux-gnu/libmlx5.so.1.24.50.0\n\
7f1700000000-7f1700100000 r-xp 00000000 fe:00 1205                       /usr/local/nvidia/lib64/libcuda.so.580.159.04\n\
7f1800000000-7f1800100000 rw-p 00000000 00:00 0 \n\
7ffd00000000-7ffd00100000 rw-p 00000000 00:00 0                          [stack]\n";

fn stat(pid: u32, start: u32) -> String {
    format!("{pid} (pt main) x) S 1 1 1 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 {start} 0 0\n")
}

/// Adds a process of the user alice that trains on GPU 0, in a Slurm job.
fn process(fixture: &mut Fixture, pid: u32) {
    let own = format!("/proc/{pid}");
    let status = format!(
        "Name:\tpt main) x\nTgid:\t{pid}\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n"
    );
    for (file, text) in [
        ("status", status.as_str()),
        ("stat", &stat(pid, 6000)),
        ("cmdline", "python3\0train.py\0"),
        ("comm", "pt main) x\n"),
        ("environ", "HOME=/home/alice\0SECRET=hunter2\0"),
        ("maps", MAPS),
        ("limits", &limits("unlimited")),
        (
            "cgroup",
            "0::/system.slice/slurmstepd.scope/job_71/step_0/user/task_0\n",
        ),
        ("uid_map", "         0          0 4294967295\n"),
        (
            "root/etc/passwd",
            "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n",
        ),
        (
            "root/usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3",
            "\u{1}\0NVSHMEM v3.4.5\0\n",
        ),
    ] {
        fixture.file(&format!("{own}/{file}"), text);
    }
    let packages = "root/opt/venv/lib/python3.12/site-packages";
    fixture.directory(&format!(
        "{own}/{packages}/nvidia_nccl_cu12-2.27.5.dist-info"
    ));
    let open = "/dev/null /dev/nvidiactl /dev/nvidia0 /dev/infiniband/uverbs0 pipe:[1]";
    for (number, target) in open.split(' ').enumerate() {
        fixture.link(&format!("{own}/fd/{number}"), target);
    }
    // The fixture has files below `root`, so `root` is a folder and not a link.
    fixture.link(&format!("{own}/ns/mnt"), "mnt:[4026531841]");
    fixture.link(&format!("{own}/ns/user"), "user:[4026531837]");
}

fn with_job(mut fixture: Fixture) -> Fixture {
    fixture.software();
    let text = "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n";
    fixture.file("/etc/passwd", text);
    fixture.file("/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
    fixture.file("/sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n");
    fixture.link("/proc/self/ns/mnt", "mnt:[4026531841]");
    process(&mut fixture, PID);
    fixture
}

fn healthy() -> Fixture {
    with_job(fixture::small())
}

fn environ(fixture: &mut Fixture, variables: &str) {
    let text = format!("HOME=/home/alice\0{}\0", variables.replace(' ', "\0"));
    fixture.file(&format!("/proc/{PID}/environ"), &text);
}

/// Adds a mapping to the process.
fn map(fixture: &mut Fixture, path: &str) {
    let more = format!("7f1900000000-7f1900100000 r-xp 00000000 fe:00 9 {path}\n");
    fixture.file(MAPPED, &format!("{MAPS}{more}"));
}

/// Gives the process a registration in the module's list.
fn register(fixture: &mut Fixture) {
    fixture.file(
        &format!("{DEBUG}/registrations"),
        &format!(
            "id=1 state=mapped mode=persistent addr=0x7f1200000000 len=1048576 page=65536 chunks=1 entries=1 \
             gpus=0000:19:00.0 hca=0000:18:00.0 tgid={PID} pid=4712 since=3000.500000 comm=pt_main\n"
        ),
    );
}

#[test]
fn a_healthy_process_and_one_with_many_settings() {
    let mut fixture = healthy();
    register(&mut fixture);
    let (text, status) = fixture.says("job 4711");
    assert_eq!(status, Status::Ok, "{text}");
    testing::golden("golden/job.txt", &text);
    let page = include_str!("../../../docs/peermemctl.md");
    assert!(
        page.contains(&text),
        "docs/peermemctl.md has another output"
    );
    assert!(!text.contains("hunter2"), "{text}");
    let (text, _) = fixture.says("job 4711 --json");
    testing::golden("golden/job.json", &text);
    assert!(!text.contains("hunter2"), "{text}");

    let mut fixture = with_job(fixture::hgx());
    environ(
        &mut fixture,
        "NCCL_IB_HCA=mlx5_4,mlx5_9 NCCL_DMABUF_ENABLE=0 NCCL_DEBUG=INFO UCX_TLS=rc,sm NCCL_GIN_TYPE=3 \
         LD_PRELOAD=/opt/libpeermem_preload.so",
    );
    fixture.file(
        &seen_by(PID, "/etc/nccl.conf"),
        "NCCL_NET_GDR_LEVEL=PIX\nNCCL_DEBUG=WARN\n",
    );
    process(&mut fixture, 4712);
    let (text, status) = fixture.says("job --slurm 71 --all");
    assert_eq!(status, Status::Findings, "{text}");
    testing::golden("golden/job-slurm.txt", &text);
}

// Each fault causes exactly one finding of this form, and no other warning or fault.
faults_of! {
    Fixture;
    "NCCL without InfiniBand", "warning settings: …but sockets" => |it| environ(it, "NCCL_IB_DISABLE=1");
    "a limit that nothing meets", "warning settings: …no path is near enough" =>
        |it| environ(it, "NCCL_NET_GDR_LEVEL=LOC");
    "no reads by the NIC", "warning settings: …does not read GPU memory" => |it| environ(it, "NCCL_NET_GDR_READ=0");
    "the user's nccl.conf", "warning settings: …in /home/alice/.nccl.conf" => |it| {
        it.file(&seen_by(PID, "/home/alice/.nccl.conf"), "NCCL_IB_DISABLE=1\n");
        it.file(&seen_by(PID, "/etc/nccl.conf"), "NCCL_IB_DISABLE=0\n");
    };
    "a setting of a library that is not mapped", "note settings: …UCX_TLS=tcp" => |it| environ(it, "UCX_TLS=tcp");
    "an unknown value", "note settings: …does not know this value" => |it| environ(it, "NCCL_IB_DISABLE=yes");
    "dma-buf off beside no module", "fault settings: …only by nvidia_peermem" => |it| {
        it.remove(MODULE);
        environ(it, "NCCL_DMABUF_ENABLE=0");
    };
    "dma-buf off beside the module", "note settings: …only by nvidia_peermem" =>
        |it| environ(it, "NVSHMEM_IB_DISABLE_DMABUF=1");
    "no module", "note registration: …can only be registered by dma-buf" => |it| it.remove(MODULE);
    "no way to register", "fault registration: …no way to register" => |it| {
        it.remove(MODULE);
        it.file("/proc/driver/nvidia/version", &fixture::software::driver("x86_64 Kernel Module"));
    };
    "a device that is not there", "fault nics: …no RDMA device with an active port" =>
        |it| environ(it, "NCCL_IB_HCA=mlx5_7");
    "one of two is not there", "warning nics: …there is no RDMA device mlx5_7 here" =>
        |it| environ(it, "NCCL_IB_HCA=mlx5_0,mlx5_7");
    "a port that is down", "fault nics: …no RDMA device with an active port" => |it| {
        environ(it, "NCCL_IB_HCA==mlx5_0");
        it.hca_file("mlx5_0", "ports/1/state", "1: DOWN\n");
    };
    "a limit below the path", "warning path: …up to NVL" => |it| environ(it, "NCCL_NET_GDR_LEVEL=NVL");
    "a topology file", "note path: …which are not judged here" => |it| {
        environ(it, "NCCL_TOPO_FILE=/opt/topo.xml");
        it.file(&seen_by(PID, "/opt/topo.xml"), "<system/>");
    };
    "a topology file that is not there", "warning path: …there is no such file" => |it| {
        environ(it, "NCCL_TOPO_FILE=/opt/topo.xml");
        it.file("/opt/topo.xml", "<system/>");
    };
    "IBGDA without the driver's setting", "warning ibgda: …runs without PeerMappingOverride" =>
        |it| environ(it, "NVSHMEM_IB_ENABLE_IBGDA=1 NVSHMEM_IBGDA_NIC_HANDLER=gpu");
    "IBGDA with a thread of the processor", "note ibgda: …falls back to a thread of the processor" =>
        |it| environ(it, "NVSHMEM_IB_ENABLE_IBGDA=1");
    "IBGDA of an NVSHMEM that does not fall back", "warning ibgda: …runs without PeerMappingOverride" => |it| {
        it.file(&seen_by(PID, "/usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3"), "NVSHMEM v3.4.4");
        environ(it, "NVSHMEM_IB_ENABLE_IBGDA=1");
    };
    "GDAKI where the setting is not visible", "not_visible ibgda: …is not visible" => |it| {
        environ(it, "NCCL_GIN_TYPE=3");
        it.remove("/proc/driver/nvidia/params");
    };
    "a capability that may not count", "not_visible memlock: …CAP_IPC_LOCK lifts the limit" => |it| {
        it.file(STATUS, "Tgid:\t4711\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n");
        it.deny_link("/proc/4711/ns/user");
    };
    "little locked memory", "warning memlock: …the process may lock 8 MiB" =>
        |it| it.file("/proc/4711/limits", &limits("8388608"));
    "a capability of a user namespace", "warning memlock: …the process may lock 8 MiB" => |it| {
        it.file("/proc/4711/limits", &limits("8388608"));
        it.file(STATUS, "Tgid:\t4711\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t000001ffffffffff\n");
        it.link("/proc/4711/ns/user", "user:[4026532500]");
    };
    "a replaced library", "note libraries: …was replaced or removed" =>
        |it| it.file(MAPPED, &MAPS.replace("libmlx5.so.1.24.50.0", "libmlx5.so.1.24.50.0 (deleted)"));
    "two NCCLs", "note libraries: …NCCL is mapped 2 times" => |it| map(it, "/usr/lib/libnccl.so.2.20.5");
    "an NCCL that is too old for the module", "note libraries: …NCCL 2.21.5 does not find" => |it| {
        it.file(MAPPED, &MAPS.replace("libnccl.so.2\n", "libnccl.so.2.21.5\n"));
        it.remove("/sys/kernel/mm/memory_peers");
        it.file(&format!("{MODULE}/parameters/memory_peers"), "N\n");
    };
    "a preload that is not mapped", "warning preload: …it is not mapped" =>
        |it| environ(it, "LD_PRELOAD=/opt/libpeermem_preload.so");
    "a preload that is off", "note preload: …turns it off" => |it| {
        environ(it, "PEERMEM_SHIM=off");
        map(it, "/opt/libpeermem_preload.so");
    };
    "an environment of another user", "not_visible access: …environment: not visible without root" =>
        |it| it.deny("/proc/4711/environ");
    "regions that are not seen", "not_visible gpudirect: …whether GPU memory is registered" =>
        |it| it.without_fact(Fact::MemoryRegions, Unseen::Denied);
}

proptest::proptest! {
    #![proptest_config(testing::cases(24))]

    /// No contents of a process's files cause a panic.
    #[test]
    fn no_process_is_a_panic(
        file in proptest::sample::select(&["status", "stat", "maps", "environ", "limits", "cgroup", "uid_map",
            "cmdline", "root/etc/passwd", "root/etc/nccl.conf"][..]),
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200),
        value in "[-^=,:a-z0-9_]{0,12}",
    ) {
        let mut fixture = healthy();
        environ(&mut fixture, &format!("NCCL_IB_HCA={value} UCX_TLS={value} NCCL_NET_GDR_LEVEL={value}"));
        fixture.bytes(&format!("/proc/{PID}/{file}"), &bytes);
        for line in ["job 4711 --all", "job 4711 --json", "job --slurm 71"] {
            let (text, _) = fixture.says(line);
            assert!(!text.is_empty(), "{line}");
        }
    }
}

/// Returns the findings, in the form of [`testing::told`].
fn findings(fixture: &Fixture) -> Vec<String> {
    let said = fixture.json("job 4711 --json");
    let told = |it: &serde_json::Value| {
        let [check, level, found, fix] =
            ["check", "level", "found", "fix"].map(|key| it[key].as_str().unwrap_or_default());
        format!("{level} {check}: {found} fix {fix}")
    };
    said["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(told)
        .collect()
}

#[test]
fn each_fault_is_reported() {
    let bad = |findings: &[String]| -> usize {
        let is_bad = |it: &&String| it.starts_with("warning") || it.starts_with("fault");
        findings.iter().filter(is_bad).count()
    };
    let usual = findings(&healthy());
    let is_usual = |it: &String| it.starts_with("ok ") || it.starts_with("note ");
    assert!(usual.iter().all(is_usual), "{usual:#?}");
    for Fault { name, inject, says } in FAULTS {
        let mut fixture = healthy();
        inject(&mut fixture);
        let found = findings(&fixture);
        let its = found.iter().filter(|it| is_like(it, says[0]));
        assert_eq!(its.count(), 1, "{name}: {found:#?}");
        // A fault causes one bad finding. The consequences of the fault cause no finding.
        assert!(bad(&found) <= 1, "{name}: {found:#?}");
    }
}

#[test]
fn a_selection_that_leaves_out_the_nearest() {
    let mut fixture = with_job(fixture::hgx());
    environ(&mut fixture, "NCCL_IB_HCA==mlx5_4");
    // The selection forces the long path to mlx5_4, so the path causes no finding.
    fixture.session(
        "1$ job 4711
         leaves out the nearest RDMA device: GPU 0 has mlx5_0, mlx5_1 (PIX)
         fix NCCL_IB_HCA==mlx5_0,mlx5_1
         ! warning path",
    );
    let mut fixture = with_job(fixture::hgx());
    for hca in ["mlx5_0", "mlx5_1"] {
        fixture.hca_file(hca, "ports/1/state", "1: DOWN\n");
    }
    fixture.session("$ job 4711\nno port of the nearest RDMA device is active: GPU 0");
}

#[test]
fn a_number_without_a_process() {
    healthy().session(
        "2$ job 99999
         there is no process 99999
         2$ job --slurm 72
         no process that is visible here belongs to Slurm job 72
         2$ job --pod 0-1
         belongs to pod 0-1
         2$ job --cgroup /none
         belongs to control group /none",
    );
    let told = "2$ job 4711\nthe recording does not have process 4711";
    testing::session(&Recording::new("another machine"), told);
    use clap::Parser as _;
    for wrong in ["job", "job x", "job 1 --slurm 7", "job -1"] {
        let words = std::iter::once("peermemctl").chain(wrong.split(' '));
        assert!(crate::args::Cli::try_parse_from(words).is_err(), "{wrong}");
    }
}

/// If the user gives the ID of a thread, `job` examines the thread's process.
#[test]
fn a_thread_is_its_process() {
    let mut fixture = healthy();
    fixture.file("/proc/4712/status", "Tgid:\t4711\n");
    fixture.session("$ job 4712\n^ Process 4711 of alice: python3 train.py");
}

/// A process ends after some reads of its start time. Then its files disappear, or another process
/// gets its ID.
#[test]
fn a_process_that_ends_during_the_scan() {
    let ends = [
        Err(Unseen::Absent),
        Err(Unseen::Failed("No such process (os error 3)".to_owned())),
        Ok(stat(PID, 7000).into_bytes()),
    ];
    for (then, reads) in ends
        .iter()
        .flat_map(|then| (0..3).map(move |reads| (then, reads)))
    {
        // If every read returns the other start time, the test has only one process, which does not
        // end.
        if reads == 0 && then.is_ok() {
            continue;
        }
        let ending = |fixture: &Fixture, lines: &str| {
            let left = Cell::new(reads);
            let file = |path: &str| match (path, left.get()) {
                ("/proc/4711/stat", 0) => Some(then.clone()),
                ("/proc/4711/stat", more) => {
                    left.set(more - 1);
                    None
                }
                _ => None,
            };
            let machine = &fixture.recording;
            let fact = &|_: Fact| {};
            testing::session(
                &testing::Watched {
                    machine,
                    fact,
                    file: &file,
                },
                lines,
            );
        };
        ending(
            &healthy(),
            "2$ job 4711\nprocess 4711 ended while it was read",
        );
        let mut fixture = healthy();
        process(&mut fixture, 4712);
        let told = "0$ job --slurm 71\nProcess 4712 of\nended meanwhile: 4711";
        ending(&fixture, told);
    }
}

#[test]
fn a_process_of_another_user() {
    let mut fixture = healthy();
    fixture.fact(Fact::User, "1001");
    for file in ["environ", "maps", "fd", "ns/mnt", "ns/user", "root"] {
        fixture.remove(&format!("/proc/4711/{file}"));
        fixture.deny(&format!("/proc/4711/{file}"));
    }
    fixture.deny("/sys/kernel/debug");
    // The files of the processes are not visible, so `job` shows every process.
    fixture.session(
        "0$ job 4711
         GPUs open not visible without root
         preload library not visible without root
         the mapped libraries (maps): not visible without root
         the first environment: not visible without root
         /etc/nccl.conf: not visible without root
         ~/.nccl.conf: not visible without root
         things not visible
         $ job --slurm 71
         Process 4711 of alice",
    );
    let member = &fixture.json("job 4711 --json")["processes"][0];
    for key in ["libraries", "gpus", "hcas", "has_own_mounts"] {
        assert!(member[key].is_null(), "{key}: {member}");
    }
}

/// A container has its own mounts and user namespace: its root is the host's user 100000.
#[test]
fn a_process_in_a_container() {
    let mut fixture = healthy();
    for (file, text) in [
        ("status", "Tgid:\t4711\nUid:\t100000\t100000\t100000\t100000\nCapEff:\t0000000000000000\n"),
        ("uid_map", "         0     100000      65536\n"),
        ("cgroup", "0::/kubepods.slice/kubepods-pod0b1c2d3e_4f50_6172_8394_a5b6c7d8e9f0.slice/cri-1.scope\n"),
        ("environ", "NCCL_DEBUG=INFO\0"),
        ("root/etc/passwd", "root:x:0:0::/home/admin:/bin/sh\n"),
        ("root/home/admin/.nccl.conf", "NCCL_IB_DISABLE=1\n"),
    ] {
        fixture.file(&format!("/proc/4711/{file}"), text);
    }
    // The container does not have these files of the host.
    fixture.file("/etc/nccl.conf", "NCCL_NET_GDR_LEVEL=LOC\n");
    fixture.file("/home/admin/.nccl.conf", "NCCL_NET_GDR_READ=0\n");
    fixture.link("/proc/4711/ns/mnt", "mnt:[4026532999]");
    fixture.session(
        "1$ job --pod 0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0
         Process 4711 of 100000
         its own mounts, as in a container
         NCCL_IB_DISABLE=1 (in /home/admin/.nccl.conf)
         ! GDR_LEVEL=LOC
         ! GDR_READ",
    );
}

#[test]
fn a_large_environment_that_is_not_utf8() {
    let mut fixture = healthy();
    let mut bytes = b"A=".to_vec();
    bytes.extend(std::iter::repeat_n(b'x', 70_000));
    bytes.extend(b"\nNCCL_IB_DISABLE=1\0");
    bytes.extend((0..1_000_000_u32).map(|number| u8::try_from(number % 255 + 1).unwrap()));
    bytes.extend(b"\0NCCL_IB_HCA=mlx5_\xff\x1b[2J\0NCCL_NET_GDR_READ=1\0=\0\0NCCL_\0");
    fixture.bytes("/proc/4711/environ", &bytes);
    // A value that looks like a variable is not a variable.
    fixture.session(
        "$ job 4711
         NCCL_NET_GDR_READ=1
         ! NCCL_IB_DISABLE
         NCCL_IB_HCA=mlx5_\u{fffd}\\x1b[2J",
    );
}

/// A shell of the job has nothing to do with GPUs. A process that is exiting has no maps.
#[test]
fn processes_without_gpus_are_named() {
    let mut fixture = healthy();
    let bash = "00400000-00452000 r-xp 00000000 fe:00 1 /bin/bash\n";
    for (pid, maps) in [(4700_u32, bash), (4701, "")] {
        process(&mut fixture, pid);
        fixture.file(&format!("/proc/{pid}/maps"), maps);
        fixture.file(&format!("/proc/{pid}/cmdline"), "bash\0job.sh\0");
        for number in 0..5 {
            fixture.link(&format!("/proc/{pid}/fd/{number}"), "/dev/null");
        }
    }
    fixture.session(
        "$ job --cgroup /sys/fs/cgroup/system.slice/slurmstepd.scope/
         2 processes with no such library, GPU or RDMA device: 4700 (bash), 4701 (bash)
         $ job 4700
         Process 4700 of alice: bash job.sh
         GPUs open none",
    );
}

/// A removed file is read through the mapping, and never by its path.
#[test]
fn the_version_of_a_removed_library() {
    let mut fixture = healthy();
    let maps = MAPS.replace("libnvshmem_host.so.3", "libnvshmem_host.so.3 (deleted)");
    fixture.file(MAPPED, &maps);
    let line = "/usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3 (deleted)";
    fixture.session(&format!("$ job 4711\nNVSHMEM - {line}"));
    let mapping = "/proc/4711/map_files/7f1400000000-7f1400100000";
    fixture.file(mapping, "NVSHMEM v3.2.1\n");
    fixture.session(&format!("$ job 4711\nNVSHMEM 3.2.1 {line}"));
}

/// In another PID namespace, the process IDs that the module reports belong to other processes.
#[test]
fn the_module_reports_process_ids_of_the_first_namespace() {
    let mut fixture = healthy();
    register(&mut fixture);
    fixture.link("/proc/self/ns/pid", "pid:[4026532777]");
    fixture.session("$ job 4711\nGPUDirect RDMA not visible\nfirst PID namespace");
}
