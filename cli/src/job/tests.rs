// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of `job` on synthetic processes. `cli/tests/golden` holds the expected output.

use std::cell::Cell;

use crate::finding::Level::{Fault, Note, Warning};
use crate::finding::{Level, Status};
use crate::fixture::software::limits;
use crate::fixture::Fixture;
use crate::host::recording::Recording;
use crate::host::{Fact, Host, Seen, Unseen};
use crate::software::MODULE;
use crate::{fixture, testing};

const DEBUG: &str = crate::debugfs::DIRECTORY;
const PID: u32 = 4711;

fn says(host: &dyn Host, line: &str) -> (String, Status) {
    testing::says(host, line)
}

/// Returns the output in one line, without wrapping.
fn said(host: &dyn Host, line: &str) -> (String, Status) {
    let (text, status) = says(host, line);
    (
        text.split_whitespace().collect::<Vec<_>>().join(" "),
        status,
    )
}

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
    for (number, target) in [
        "/dev/null",
        "/dev/nvidiactl",
        "/dev/nvidia0",
        "/dev/infiniband/uverbs0",
        "pipe:[1]",
    ]
    .iter()
    .enumerate()
    {
        fixture.link(&format!("{own}/fd/{number}"), target);
    }
    for (link, target) in [
        ("ns/mnt", "mnt:[4026531841]"),
        ("ns/user", "user:[4026531837]"),
        ("root", "/"),
    ] {
        // The fixture has files below `root`, so `root` is a folder and not a link.
        if link != "root" {
            fixture.link(&format!("{own}/{link}"), target);
        }
    }
}

fn with_job(mut fixture: Fixture) -> Fixture {
    fixture.software();
    fixture.file(
        "/etc/passwd",
        "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n",
    );
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
fn a_healthy_process_and_one_with_much_to_say() {
    let mut fixture = healthy();
    register(&mut fixture);
    let (text, status) = says(&fixture.recording, "job 4711");
    assert_eq!(status, Status::Ok, "{text}");
    testing::golden("golden/job.txt", &text);
    let page = include_str!("../../../docs/peermemctl.md");
    assert!(
        page.contains(&text),
        "docs/peermemctl.md has another output"
    );
    assert!(!text.contains("hunter2"), "{text}");
    let (text, _) = says(&fixture.recording, "job 4711 --json");
    testing::golden("golden/job.json", &text);
    assert!(!text.contains("hunter2"), "{text}");

    let mut fixture = with_job(fixture::hgx());
    environ(
        &mut fixture,
        "NCCL_IB_HCA=mlx5_4,mlx5_9 NCCL_DMABUF_ENABLE=0 NCCL_DEBUG=INFO UCX_TLS=rc,sm NCCL_GIN_TYPE=3 \
         LD_PRELOAD=/opt/libpeermem_preload.so",
    );
    fixture.file(
        "/proc/4711/root/etc/nccl.conf",
        "NCCL_NET_GDR_LEVEL=PIX\nNCCL_DEBUG=WARN\n",
    );
    process(&mut fixture, 4712);
    let (text, status) = says(&fixture.recording, "job --slurm 71 --all");
    assert_eq!(status, Status::Findings, "{text}");
    testing::golden("golden/job-slurm.txt", &text);
}

/// A fault, and words of the finding that it must cause: check, level, words.
struct Case {
    name: &'static str,
    inject: fn(&mut Fixture),
    says: (&'static str, Level, &'static str),
}

const fn case(
    name: &'static str,
    says: (&'static str, Level, &'static str),
    inject: fn(&mut Fixture),
) -> Case {
    Case { name, inject, says }
}

const CASES: &[Case] = &[
    case(
        "NCCL without InfiniBand",
        ("settings", Warning, "but sockets"),
        |it| environ(it, "NCCL_IB_DISABLE=1"),
    ),
    case(
        "a limit that nothing meets",
        ("settings", Warning, "no path is near enough"),
        |it| {
            environ(it, "NCCL_NET_GDR_LEVEL=LOC");
        },
    ),
    case(
        "no reads by the NIC",
        ("settings", Warning, "does not read GPU memory"),
        |it| {
            environ(it, "NCCL_NET_GDR_READ=0");
        },
    ),
    case(
        "the user's nccl.conf",
        ("settings", Warning, "in /home/alice/.nccl.conf"),
        |it| {
            it.file(
                "/proc/4711/root/home/alice/.nccl.conf",
                "NCCL_IB_DISABLE=1\n",
            );
            it.file("/proc/4711/root/etc/nccl.conf", "NCCL_IB_DISABLE=0\n");
        },
    ),
    case(
        "a setting of a library that is not mapped",
        ("settings", Note, "UCX_TLS=tcp"),
        |it| environ(it, "UCX_TLS=tcp"),
    ),
    case(
        "an unknown value",
        ("settings", Note, "does not know this value"),
        |it| environ(it, "NCCL_IB_DISABLE=yes"),
    ),
    case(
        "dma-buf off beside no module",
        ("settings", Fault, "nvidia_peermem alone"),
        |it| {
            it.remove(MODULE);
            environ(it, "NCCL_DMABUF_ENABLE=0");
        },
    ),
    case(
        "dma-buf off beside the module",
        ("settings", Note, "nvidia_peermem alone"),
        |it| {
            environ(it, "NVSHMEM_IB_DISABLE_DMABUF=1");
        },
    ),
    case(
        "no module",
        ("registration", Note, "by dma-buf alone"),
        |it| it.remove(MODULE),
    ),
    case(
        "no way to register",
        ("registration", Fault, "no way to register"),
        |it| {
            it.remove(MODULE);
            it.file(
                "/proc/driver/nvidia/version",
                &fixture::software::driver("x86_64 Kernel Module"),
            );
        },
    ),
    case(
        "a device that is not there",
        ("nics", Fault, "no RDMA device with an active port"),
        |it| {
            environ(it, "NCCL_IB_HCA=mlx5_7");
        },
    ),
    case(
        "one of two is not there",
        ("nics", Warning, "there is no RDMA device mlx5_7 here"),
        |it| {
            environ(it, "NCCL_IB_HCA=mlx5_0,mlx5_7");
        },
    ),
    case(
        "a port that is down",
        ("nics", Fault, "no RDMA device with an active port"),
        |it| {
            environ(it, "NCCL_IB_HCA==mlx5_0");
            it.hca_file("mlx5_0", "ports/1/state", "1: DOWN\n");
        },
    ),
    case(
        "a limit below the path",
        ("path", Warning, "up to NVL"),
        |it| environ(it, "NCCL_NET_GDR_LEVEL=NVL"),
    ),
    case(
        "a topology file",
        ("path", Note, "which are not judged here"),
        |it| {
            environ(it, "NCCL_TOPO_FILE=/opt/topo.xml");
            it.file("/proc/4711/root/opt/topo.xml", "<system/>");
        },
    ),
    case(
        "a topology file that is not there",
        ("path", Warning, "there is no such file"),
        |it| {
            environ(it, "NCCL_TOPO_FILE=/opt/topo.xml");
            it.file("/opt/topo.xml", "<system/>");
        },
    ),
    case(
        "IBGDA without the driver's setting",
        ("ibgda", Warning, "runs without PeerMappingOverride"),
        |it| {
            environ(
                it,
                "NVSHMEM_IB_ENABLE_IBGDA=1 NVSHMEM_IBGDA_NIC_HANDLER=gpu",
            );
        },
    ),
    case(
        "IBGDA with a thread of the processor",
        ("ibgda", Note, "falls back to a thread of the processor"),
        |it| environ(it, "NVSHMEM_IB_ENABLE_IBGDA=1"),
    ),
    case(
        "IBGDA of an NVSHMEM that does not fall back",
        ("ibgda", Warning, "runs without PeerMappingOverride"),
        |it| {
            let file = "/proc/4711/root/usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3";
            it.file(file, "NVSHMEM v3.4.4");
            environ(it, "NVSHMEM_IB_ENABLE_IBGDA=1");
        },
    ),
    case(
        "GDAKI where the setting is not visible",
        ("ibgda", Level::NotVisible, "is not visible"),
        |it| {
            environ(it, "NCCL_GIN_TYPE=3");
            it.remove("/proc/driver/nvidia/params");
        },
    ),
    case(
        "a capability that may not count",
        ("memlock", Level::NotVisible, "CAP_IPC_LOCK counts"),
        |it| {
            it.file(
                "/proc/4711/status",
                "Tgid:\t4711\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n",
            );
            it.recording.links.remove("/proc/4711/ns/user");
            it.recording
                .unseen
                .insert("/proc/4711/ns/user".to_owned(), Unseen::Denied);
            it.recording
                .unseen
                .insert("link /proc/4711/ns/user".to_owned(), Unseen::Denied);
        },
    ),
    case(
        "little locked memory",
        ("memlock", Warning, "the process may lock 8 MiB"),
        |it| {
            it.file("/proc/4711/limits", &limits("8388608"));
        },
    ),
    case(
        "a capability of a user namespace",
        ("memlock", Warning, "the process may lock 8 MiB"),
        |it| {
            it.file("/proc/4711/limits", &limits("8388608"));
            it.file(
                "/proc/4711/status",
                "Tgid:\t4711\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t000001ffffffffff\n",
            );
            it.link("/proc/4711/ns/user", "user:[4026532500]");
        },
    ),
    case(
        "a replaced library",
        ("libraries", Note, "was replaced or removed"),
        |it| {
            let maps = MAPS.replace("libmlx5.so.1.24.50.0", "libmlx5.so.1.24.50.0 (deleted)");
            it.file("/proc/4711/maps", &maps);
        },
    ),
    case(
        "two NCCLs",
        ("libraries", Note, "NCCL is mapped 2 times"),
        |it| {
            let more =
                "7f1900000000-7f1900100000 r-xp 00000000 fe:00 9 /usr/lib/libnccl.so.2.20.5\n";
            it.file("/proc/4711/maps", &format!("{MAPS}{more}"));
        },
    ),
    case(
        "an NCCL that is too old for the module",
        ("libraries", Note, "NCCL 2.21.5 does not find"),
        |it| {
            let maps = MAPS.replace("libnccl.so.2\n", "libnccl.so.2.21.5\n");
            it.file("/proc/4711/maps", &maps);
            it.remove("/sys/kernel/mm/memory_peers");
            it.file(&format!("{MODULE}/parameters/memory_peers"), "N\n");
        },
    ),
    case(
        "a preload that is not mapped",
        ("preload", Warning, "it is not mapped"),
        |it| {
            environ(it, "LD_PRELOAD=/opt/libpeermem_preload.so");
        },
    ),
    case(
        "a preload that is off",
        ("preload", Note, "turns it off"),
        |it| {
            environ(it, "PEERMEM_SHIM=off");
            let more =
                "7f1900000000-7f1900100000 r-xp 00000000 fe:00 9 /opt/libpeermem_preload.so\n";
            it.file("/proc/4711/maps", &format!("{MAPS}{more}"));
        },
    ),
    case(
        "an environment of another user",
        (
            "access",
            Level::NotVisible,
            "environment: not visible without root",
        ),
        |it| {
            it.deny("/proc/4711/environ");
        },
    ),
    case(
        "regions that are not seen",
        (
            "gpudirect",
            Level::NotVisible,
            "whether GPU memory is registered",
        ),
        |it| {
            it.recording.facts.remove(&Fact::MemoryRegions);
            it.recording
                .unseen
                .insert("fact memory_regions".to_owned(), Unseen::Denied);
        },
    ),
];

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..proptest::prelude::ProptestConfig::default()
    })]

    /// For all contents of its files, no process causes a panic.
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
            let (text, _) = says(&fixture.recording, line);
            assert!(!text.is_empty(), "{line}");
        }
    }
}

/// Returns the findings of a command as check, level, and text.
fn findings(host: &dyn Host) -> Vec<(String, String, String)> {
    let (text, _) = says(host, "job 4711 --json");
    let said: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
    let word = |it: &serde_json::Value, key: &str| it[key].as_str().unwrap_or_default().to_owned();
    let all = said["findings"].as_array().unwrap();
    all.iter()
        .map(|it| {
            (
                word(it, "check"),
                word(it, "level"),
                format!("{} {}", word(it, "found"), word(it, "fix")),
            )
        })
        .collect()
}

#[test]
fn each_fault_is_reported() {
    let usual = findings(&healthy().recording);
    assert!(
        usual
            .iter()
            .all(|(_, level, _)| level == "ok" || level == "note"),
        "{usual:#?}"
    );
    for case in CASES {
        let mut fixture = healthy();
        (case.inject)(&mut fixture);
        let found = findings(&fixture.recording);
        let (check, level, words) = case.says;
        let is_it = |(own, its, text): &&(String, String, String)| {
            own == check && its == level.name() && text.contains(words)
        };
        assert_eq!(
            found.iter().filter(is_it).count(),
            1,
            "{}: {found:#?}",
            case.name
        );
        // A fault causes one bad finding, without its consequences.
        let bad = found
            .iter()
            .filter(|(_, level, _)| level == "warning" || level == "fault");
        assert!(bad.count() <= 1, "{}: {found:#?}", case.name);
    }
}

#[test]
fn a_selection_that_leaves_out_the_nearest() {
    let mut fixture = with_job(fixture::hgx());
    environ(&mut fixture, "NCCL_IB_HCA==mlx5_4");
    let (text, status) = said(&fixture.recording, "job 4711");
    assert_eq!(status, Status::Findings);
    assert!(
        text.contains("leaves out the nearest RDMA device: GPU 0 has mlx5_0, mlx5_1 (PIX)"),
        "{text}"
    );
    assert!(text.contains("fix NCCL_IB_HCA==mlx5_0,mlx5_1"), "{text}");
    // The path to mlx5_4 is a consequence.
    assert!(!text.contains("warning path"), "{text}");
    let mut fixture = with_job(fixture::hgx());
    for hca in ["mlx5_0", "mlx5_1"] {
        fixture.hca_file(hca, "ports/1/state", "1: DOWN\n");
    }
    let (text, _) = said(&fixture.recording, "job 4711");
    assert!(
        text.contains("no port of the nearest RDMA device is active: GPU 0"),
        "{text}"
    );
}

#[test]
fn a_number_without_a_process() {
    let fixture = healthy();
    for (line, words) in [
        ("job 99999", "there is no process 99999"),
        (
            "job --slurm 72",
            "no process that is visible here belongs to Slurm job 72",
        ),
        ("job --pod 0-1", "belongs to pod 0-1"),
        ("job --cgroup /none", "belongs to control group /none"),
    ] {
        let (text, status) = said(&fixture.recording, line);
        assert_eq!(status, Status::Failed, "{line}: {text}");
        assert!(text.contains(words), "{line}: {text}");
    }
    let (text, status) = said(&Recording::new("another machine"), "job 4711");
    assert_eq!(status, Status::Failed);
    assert!(
        text.contains("the recording does not have process 4711"),
        "{text}"
    );
    use clap::Parser as _;
    for wrong in [
        &["job"][..],
        &["job", "x"],
        &["job", "1", "--slurm", "7"],
        &["job", "-1"],
    ] {
        let words = std::iter::once("peermemctl").chain(wrong.iter().copied());
        assert!(
            crate::args::Cli::try_parse_from(words).is_err(),
            "{wrong:?}"
        );
    }
}

/// A thread's number stands for its process.
#[test]
fn a_thread_is_its_process() {
    let mut fixture = healthy();
    fixture.file("/proc/4712/status", "Tgid:\t4711\n");
    let (text, _) = said(&fixture.recording, "job 4712");
    assert!(
        text.starts_with("Process 4711 of alice: python3 train.py"),
        "{text}"
    );
}

/// A process that ends: its files disappear, or its number becomes another's, after `reads` reads
/// of its start time.
struct Ending {
    machine: Recording,
    reads: Cell<u32>,
    then: Seen<Vec<u8>>,
}

impl Host for Ending {
    fn bytes(&self, path: &str) -> Seen<Vec<u8>> {
        if path == "/proc/4711/stat" {
            let reads = self.reads.get();
            self.reads.set(reads.saturating_sub(1));
            if reads == 0 {
                return self.then.clone();
            }
        }
        self.machine.bytes(path)
    }
    fn names(&self, path: &str) -> Seen<Vec<String>> {
        self.machine.names(path)
    }
    fn link(&self, path: &str) -> Seen<String> {
        self.machine.link(path)
    }
    fn resolved(&self, path: &str) -> Seen<String> {
        self.machine.resolved(path)
    }
    fn matching(&self, path: &str, word: &str) -> Seen<String> {
        self.machine.matching(path, word)
    }
    fn fact(&self, fact: Fact) -> Seen<String> {
        self.machine.fact(fact)
    }
}

#[test]
fn a_process_that_ends_meanwhile() {
    let ends = [
        Err(Unseen::Absent),
        Err(Unseen::Failed("No such process (os error 3)".to_owned())),
        Ok(stat(PID, 7000).into_bytes()),
    ];
    for then in ends {
        for reads in 0..3 {
            let ending = |machine: Recording| Ending {
                machine,
                reads: Cell::new(reads),
                then: then.clone(),
            };
            // If every read returns the other start time, the test has only one process, which does
            // not end.
            if reads == 0 && then.is_ok() {
                continue;
            }
            let (text, status) = said(&ending(healthy().recording), "job 4711");
            assert_eq!(status, Status::Failed, "{then:?} {reads}: {text}");
            assert!(
                text.contains("process 4711 ended while it was read"),
                "{text}"
            );
            let mut fixture = healthy();
            process(&mut fixture, 4712);
            let (text, status) = said(&ending(fixture.recording), "job --slurm 71");
            assert_eq!(status, Status::Ok, "{text}");
            assert!(text.contains("Process 4712 of"), "{text}");
            assert!(text.contains("ended meanwhile: 4711"), "{text}");
        }
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
    let (text, status) = said(&fixture.recording, "job 4711");
    assert_eq!(status, Status::Ok, "{text}");
    for words in [
        "GPUs open not visible without root",
        "preload library not visible without root",
        "the mapped libraries (maps): not visible without root",
        "the first environment: not visible without root",
        "/etc/nccl.conf: not visible without root",
        "~/.nccl.conf: not visible without root",
        "things not visible",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (text, _) = says(&fixture.recording, "job 4711 --json");
    let said: serde_json::Value = serde_json::from_str(&text).unwrap();
    let member = &said["processes"][0];
    for key in ["libraries", "gpus", "hcas", "has_own_mounts"] {
        assert!(member[key].is_null(), "{key}: {text}");
    }
    // Not everything is visible, so no process is left out as having nothing to do with GPUs.
    let (text, _) = self::said(&fixture.recording, "job --slurm 71");
    assert!(text.contains("Process 4711 of alice"), "{text}");
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
        ("root/root/.nccl.conf", "NCCL_IB_DISABLE=1\n"),
    ] {
        fixture.file(&format!("/proc/4711/{file}"), text);
    }
    // The container does not have these files of the host.
    fixture.file("/etc/nccl.conf", "NCCL_NET_GDR_LEVEL=LOC\n");
    fixture.file("/root/.nccl.conf", "NCCL_NET_GDR_READ=0\n");
    fixture.link("/proc/4711/ns/mnt", "mnt:[4026532999]");
    let pod = "job --pod 0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0";
    let (text, status) = said(&fixture.recording, pod);
    assert_eq!(status, Status::Findings, "{text}");
    assert!(text.contains("Process 4711 of 100000"), "{text}");
    assert!(text.contains("its own mounts, as in a container"), "{text}");
    assert!(
        text.contains("NCCL_IB_DISABLE=1 (in /root/.nccl.conf)"),
        "{text}"
    );
    assert!(
        !text.contains("GDR_LEVEL=LOC") && !text.contains("GDR_READ"),
        "{text}"
    );
}

#[test]
fn an_environment_of_a_megabyte_that_is_no_text() {
    let mut fixture = healthy();
    let mut bytes = b"A=".to_vec();
    bytes.extend(std::iter::repeat_n(b'x', 70_000));
    bytes.extend(b"\nNCCL_IB_DISABLE=1\0");
    bytes.extend((0..1_000_000_u32).map(|number| u8::try_from(number % 255 + 1).unwrap()));
    bytes.extend(b"\0NCCL_IB_HCA=mlx5_\xff\x1b[2J\0NCCL_NET_GDR_READ=1\0=\0\0NCCL_\0");
    fixture.bytes("/proc/4711/environ", &bytes);
    let (text, _) = said(&fixture.recording, "job 4711");
    assert!(text.contains("NCCL_NET_GDR_READ=1"), "{text}");
    // A value that looks like a variable is not a variable.
    assert!(!text.contains("NCCL_IB_DISABLE"), "{text}");
    assert!(text.contains("NCCL_IB_HCA=mlx5_\u{fffd}\\x1b[2J"), "{text}");
}

/// A shell of the job has nothing to do with GPUs. A process that is exiting has no maps.
#[test]
fn processes_without_gpus_are_named() {
    let mut fixture = healthy();
    for (pid, maps) in [
        (
            4700_u32,
            "00400000-00452000 r-xp 00000000 fe:00 1 /bin/bash\n",
        ),
        (4701, ""),
    ] {
        process(&mut fixture, pid);
        fixture.file(&format!("/proc/{pid}/maps"), maps);
        fixture.file(&format!("/proc/{pid}/cmdline"), "bash\0job.sh\0");
        for number in 0..5 {
            fixture.link(&format!("/proc/{pid}/fd/{number}"), "/dev/null");
        }
    }
    let (text, _) = said(
        &fixture.recording,
        "job --cgroup /sys/fs/cgroup/system.slice/slurmstepd.scope/",
    );
    assert!(
        text.contains(
            "2 processes with no such library, GPU or RDMA device: 4700 (bash), 4701 (bash)"
        ),
        "{text}"
    );
    let (text, _) = said(&fixture.recording, "job 4700");
    assert!(
        text.contains("Process 4700 of alice: bash job.sh"),
        "{text}"
    );
    assert!(text.contains("GPUs open none"), "{text}");
}

/// A removed file is read through the mapping, and never by its path.
#[test]
fn the_version_of_a_removed_library() {
    let removed = |with_mapping: bool| {
        let mut fixture = healthy();
        let maps = MAPS.replace("libnvshmem_host.so.3", "libnvshmem_host.so.3 (deleted)");
        fixture.file("/proc/4711/maps", &maps);
        if with_mapping {
            fixture.file(
                "/proc/4711/map_files/7f1400000000-7f1400100000",
                "NVSHMEM v3.2.1\n",
            );
        }
        said(&fixture.recording, "job 4711").0
    };
    let line = "/usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3 (deleted)";
    assert!(
        removed(true).contains(&format!("NVSHMEM 3.2.1 {line}")),
        "{}",
        removed(true)
    );
    assert!(
        removed(false).contains(&format!("NVSHMEM - {line}")),
        "{}",
        removed(false)
    );
}

/// In another PID namespace, the module's numbers belong to other processes.
#[test]
fn the_modules_numbers_are_of_the_first_namespace() {
    let mut fixture = healthy();
    register(&mut fixture);
    fixture.link("/proc/self/ns/pid", "pid:[4026532777]");
    let (text, _) = said(&fixture.recording, "job 4711");
    assert!(text.contains("GPUDirect RDMA not visible"), "{text}");
    assert!(
        text.contains("a PID namespace") || text.contains("first PID namespace"),
        "{text}"
    );
}
