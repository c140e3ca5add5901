// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cases that were reported from real machines, rebuilt on synthetic machines. In each case, the
//! first and only finding names the cause.

use crate::fixture::Fixture;
use crate::host::recording::Recording;
use crate::host::Fact;
use crate::{fixture, testing};

const GPU: &str = "0000:3b:00.0";

fn hgx() -> Fixture {
    fixture::all().remove("hgx").unwrap()
}

/// Makes a machine on which nvidia.ko is bound to a GPU that NVML does not list.
fn not_started() -> Fixture {
    let mut fixture = hgx();
    fixture.change_nvml(|nvml| nvml.gpus.retain(|gpu| gpu.at != GPU));
    fixture
}

/// Files for comparison, made from the healthy machine.
struct Before {
    folder: tempfile::TempDir,
}

impl Before {
    fn new(fixture: &Fixture) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let json = fixture.recording.to_json().unwrap();
        std::fs::write(folder.path().join("then.json"), json).unwrap();
        let (expect, _) = fixture.says("doctor --write-expect");
        std::fs::write(folder.path().join("expect.json"), expect).unwrap();
        Self { folder }
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }
}

#[test]
fn a_gpu_that_did_not_start_is_found_by_all() {
    let mut fixture = not_started();
    let before = Before::new(&hgx());
    let (then, expect) = (before.file("then.json"), before.file("expect.json"));
    fixture.session(&format!(
            "1$ doctor
             ^ fault gpu-driver GPU 2: nvidia.ko is bound to 0000:3b:00.0, but could not start it: NVML lists 7 of the 8 GPUs on PCI
             1 fault.
             2$ doctor --nagios
             1$ doctor --only expect --expect {expect}
             ^ fault expect
             7 GPUs of 10de:2330, but 8 are expected why Not counted: 0000:3b:00.0.
             1$ doctor --only baseline --baseline {then}
             ^ fault baseline
             the GPU is on PCI, but NVML does not list it as it did in the baseline
             1$ topo --diff {then}
             GPU 0000:3b:00.0 listed by NVML yes no 1 difference.
             $ doctor --write-expect
             \"count\": 7"
        ),
    );
    // The finding quotes the reason from the kernel log.
    let line = "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x55:2477)";
    fixture.fact(Fact::KernelLog, &format!("6,1,20000000,-;{line}\n"));
    let told = format!("$ doctor --only gpu-driver\nThe kernel's log: {line}");
    fixture.session(&told);
}

#[test]
fn no_gpu_at_all_starts() {
    let mut fixture = hgx();
    fixture.change_nvml(|nvml| nvml.gpus.clear());
    fixture.session("1$ doctor --only gpu-driver\nNVML lists 0 of the 8 GPUs");
    // The device files may belong to another user.
    fixture.fact(Fact::User, "1000");
    fixture.session("3$ doctor --nagios --only gpu-driver");
}

/// Each entry of `marks` shows that the process runs in a container, or in a job that may use only
/// some of the GPUs.
#[test]
fn a_container_has_the_gpus_that_it_was_given() {
    let before = Before::new(&hgx());
    let marks: [fn(&mut Fixture); 9] = [
        |fixture| fixture.directory("/var/run/secrets/kubernetes.io"),
        |fixture| fixture.file("/proc/1/environ", "PATH=/bin\0container=podman\0"),
        // The device files of all other GPUs exist.
        |fixture| {
            for name in ["ctl", "0", "1", "3", "4", "5", "6", "7"] {
                fixture.file(&format!("/dev/nvidia{name}"), "");
            }
        },
        |fixture| fixture.file("/.dockerenv", ""),
        |fixture| fixture.file("/run/.containerenv", ""),
        |fixture| fixture.link("/proc/self/ns/pid", "pid:[4026532001]"),
        |fixture| fixture.link("/proc/self/ns/cgroup", "cgroup:[4026532001]"),
        |fixture| {
            let text = "0::/kubepods.slice/kubepods-pod1.slice\n";
            fixture.file("/proc/self/cgroup", text);
        },
        |fixture| {
            let job = "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n";
            fixture.file("/proc/self/cgroup", job);
        },
    ];
    for mark in marks {
        let mut fixture = not_started();
        mark(&mut fixture);
        fixture.session(&format!(
            "0$ doctor
                 0$ doctor --expect {}
                 0$ doctor --baseline {}
                 $ doctor --all --only gpu-driver
                 ^ note gpu-driver GPU 2: NVML does not list 0000:3b:00.0",
            before.file("expect.json"),
            before.file("then.json"),
        ));
    }
    // A recording still shows the container or the job, but not the name of the pod or the job.
    for cgroup in [
        "0::/kubepods.slice/kubepods-pod1.slice",
        "0::/docker/abc",
        "0::/slurm/uid_7/job_12",
    ] {
        let mut fixture = not_started();
        fixture.file("/proc/self/cgroup", &format!("{cgroup}\n"));
        let (json, _) = fixture.says("record");
        assert!(!json.contains("pod1") && !json.contains("job_12"), "{json}");
        let recording = Recording::parse(&json).unwrap();
        testing::session(&recording, "0$ doctor");
    }
    // Initial namespaces and an existing device file do not indicate a container.
    let mut fixture = not_started();
    for name in ["ctl", "0", "1", "2", "3", "4", "5", "6", "7"] {
        fixture.file(&format!("/dev/nvidia{name}"), "");
    }
    fixture.file("/proc/1/environ", "HOME=/\0my_container=1\0");
    fixture.link("/proc/self/ns/pid", "pid:[4026531836]");
    fixture.link("/proc/self/ns/cgroup", "cgroup:[4026531835]");
    fixture.session("1$ doctor");
}

#[test]
fn a_gpu_is_not_blamed_if_nvml_is_silent() {
    let mut without = hgx();
    without.no_nvml();
    let mut given = not_started();
    let own = given.place(GPU);
    given.link(
        &format!("{own}/driver"),
        "../../../../bus/pci/drivers/vfio-pci",
    );
    for fixture in [without, given] {
        fixture.session("0$ doctor --only gpu-driver");
    }
}

/// PCI lists a silent device until the next boot.
#[test]
fn a_device_that_does_not_answer_is_found() {
    for (at, first) in [
        (GPU, "gpu-driver GPU 2"),
        ("0000:9a:00.0", "nic-driver mlx5_4"),
    ] {
        let mut fixture = hgx();
        let own = fixture.place(at);
        fixture.bytes(&format!("{own}/config"), &[0xff; 4096]);
        let told = format!("1$ doctor\n^ fault {first}: {at} does not answer\n1 fault");
        fixture.session(&told);
    }
}

/// Replaces the file `resource` of a function. `lines` are the lines of BAR 0, BAR 2 and BAR 4.
fn resource(fixture: &mut Fixture, at: &str, lines: [&str; 3]) {
    let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000";
    let [first, second, third] = lines;
    let own = fixture.place(at);
    let text = format!("{first}\n{none}\n{second}\n{none}\n{third}\n{none}\n{none}\n");
    fixture.file(&format!("{own}/resource"), &text);
}

const BAR0: &str = "0x0000380000000000 0x0000380000ffffff 0x000000000014220c";
const BAR4: &str = "0x00003c0000000000 0x00003c0001ffffff 0x000000000014220c";
const NO_BAR: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000";
const UNSET: &str = "0x0000000000000000 0x0000001fffffffff 0x000000002014220c";

#[test]
fn a_bar_without_an_address_is_no_bar() {
    let mut fixture = not_started();
    resource(&mut fixture, GPU, [BAR0, UNSET, BAR4]);
    // nvidia.ko is not bound to the GPU.
    let own = fixture.place(GPU);
    fixture.remove(&format!("{own}/driver"));
    fixture.remove(&format!("/proc/driver/nvidia/gpus/{GPU}"));
    fixture.session(
        "1$ doctor
         ^ fault bar1 GPU 2: 0000:3b:00.0 has no address for BAR1 (128 GiB)
         1 fault
         Above 4G Decoding",
    );
    let (text, _) = fixture.says("topo");
    let line = text.lines().find(|line| line.contains(GPU)).unwrap();
    assert!(line.contains("x16  -  "), "{line}");
    let small = "0x0 0xffffff 0x2014220c";
    let set = "0x3a0000000000 0x3a1fffffffff 0x14220c";
    for (lines, says) in [
        (
            [UNSET, UNSET, BAR4],
            "BAR 0 of PCI (128 GiB), BAR1 (128 GiB)",
        ),
        ([small, set, BAR4], "BAR 0 of PCI (16 MiB)"),
    ] {
        let mut fixture = hgx();
        resource(&mut fixture, GPU, lines);
        let told =
            format!("1$ doctor\n^ fault bar1 GPU 2: 0000:3b:00.0 has \nno address for {says}");
        fixture.session(&told);
    }
}

#[test]
fn no_other_bar_is_mistaken_for_bar1() {
    let mut fixture = hgx();
    resource(&mut fixture, "0000:19:00.0", [BAR0, NO_BAR, BAR4]);
    // The check `bar1-free` reports nothing about a GPU without BAR1.
    fixture.session(
        "1$ doctor
         ^ fault bar1 GPU 0: 0000:19:00.0 has no BAR1
         1 fault
         $ doctor --only bar1-free --all
         bar1-free GPU 1, GPU 2",
    );
    // BARs that are not visible are not a fault.
    let mut fixture = hgx();
    let own = fixture.place("0000:19:00.0");
    fixture.deny(&format!("{own}/resource"));
    let line = "0$ doctor --only bar1";
    fixture.session(&format!("{line}\n1 thing not visible without root"));
    fixture.file(&format!("{own}/resource"), "");
    fixture.session(line);
}

/// The check `bar1` ignores a coherent GPU, because RDMA devices do not reach its memory through a
/// BAR.
#[test]
fn a_coherent_gpu_without_a_driver_is_reported() {
    let mut fixture = fixture::all().remove("grace").unwrap();
    resource(&mut fixture, "0009:01:00.0", [BAR0, UNSET, NO_BAR]);
    let own = fixture.place("0009:01:00.0");
    fixture.remove(&format!("{own}/driver"));
    fixture.session("1$ doctor\n^ fault gpu-driver GPU 0: 0009:01:00.0 has no driver\n1 fault");
}

/// No driver is bound to a NIC whose BARs have no address.
#[test]
fn a_nic_without_an_address_lacks_room() {
    let mut fixture = hgx();
    fixture.remove("/sys/class/infiniband/mlx5_8");
    let own = fixture.place("0000:01:00.0");
    for gone in ["driver", "infiniband", "net"] {
        fixture.remove(&format!("{own}/{gone}"));
    }
    resource(&mut fixture, "0000:01:00.0", [UNSET, NO_BAR, NO_BAR]);
    fixture.session(
        "1$ doctor
         ^ warning nic-driver the NIC 0000:01:00.0 has no driver, and BARs without an address
         1 warning
         ! modprobe",
    );
}

/// A value that cannot be read is reported as not visible, not as different from the expected
/// value.
#[test]
fn unknown_values_are_not_compared() {
    let fixture = hgx();
    let before = Before::new(&fixture);
    let own = fixture.place("0000:18:00.0");
    for file in ["fw_ver", "ports/1/rate", "ports/1/state"] {
        let mut fixture = fixture.clone();
        fixture.deny(&format!("{own}/infiniband/mlx5_0/{file}"));
        let expect = before.file("expect.json");
        let told = format!("0$ doctor --only expect --expect {expect}\n1 thing not visible");
        fixture.session(&told);
    }
}

/// Names that a shell or another reader would misinterpret.
const ODD: [&str; 7] = [
    "a|b\"c\\d\u{1b}[31m\ne{f}=1,\u{202e};#",
    "x\r\n# TYPE evil counter\nevil 1",
    "   ",
    "a`reboot`",
    "$(reboot)",
    "-rf",
    "a'; reboot; '",
];

fn commands(fixture: &Fixture) -> Vec<String> {
    let json = fixture.json("doctor --all --json");
    let findings = json["findings"].as_array().unwrap().iter();
    let commands = findings.filter_map(|finding| finding["commands"].as_array());
    commands
        .flatten()
        .filter_map(|command| command.as_str().map(str::to_owned))
        .collect()
}

/// Makes a machine with faults whose fixes are commands: a port that is down, and a port with a
/// small MTU and without PFC.
fn named(hca: &str, netdev: &str) -> Fixture {
    let mut fixture = fixture::hgx();
    for (name, at) in [("mlx5_0", "0000:18:00.0"), ("mlx5_1", "0000:1a:00.0")] {
        let own = fixture.place(at);
        fixture.remove(&format!("{own}/infiniband"));
        fixture.remove(&format!("{own}/net"));
        fixture.remove(&format!("/sys/class/infiniband/{name}"));
    }
    let rate = "400 Gb/sec (4X NDR)";
    fixture.hca(hca, "0000:18:00.0", "ib0", "InfiniBand", rate);
    fixture.hca_file(hca, "ports/1/state", "1: DOWN\n");
    fixture.hca("roce0", "0000:1a:00.0", netdev, "Ethernet", rate);
    fixture.roce("roce0", netdev, 1500, &[fixture::LINK_LOCAL; 2]);
    fixture.dcb(netdev, Some(0), |_| None);
    fixture.ecn(netdev, 0, 0);
    fixture.software();
    fixture
}

#[test]
fn no_command_has_an_odd_name() {
    let plain = commands(&named("mlx5_0", "ens1"));
    for wanted in [
        "mlxlink -d mlx5_0 -m -c",
        "ip link set ens1 mtu 9000",
        "ip address show ens1",
        "sudo dcb pfc set dev ens1 prio-pfc 3:on",
    ] {
        assert!(plain.contains(&wanted.to_owned()), "{wanted}: {plain:?}");
    }
    for name in ODD {
        let fixture = named(name, name);
        let commands = commands(&fixture);
        // Commands that do not contain the name are unchanged.
        assert!(commands.len() < plain.len(), "{name:?}: {commands:?}");
        for command in &commands {
            assert!(plain.contains(command), "{name:?}: {command:?}");
        }
        fixture.session("$ doctor\na command is left out\n! \0");
    }
}

#[test]
fn a_device_with_circular_links_is_reported() {
    let mut fixture = hgx();
    let at = "0000:19:00.0";
    let circle = |fixture: &mut Fixture, path: &str, says: &str| fixture.link(path, says);
    let device = format!("/sys/bus/pci/devices/{at}");
    circle(&mut fixture, &device, &device);
    circle(&mut fixture, "/sys/class/infiniband/mlx5_0", "mlx5_1");
    circle(&mut fixture, "/sys/class/infiniband/mlx5_1", "mlx5_0");
    // The remaining devices may not be the nearest, because the position of the unread devices is
    // unknown.
    fixture.session(
        "1$ doctor --only presence
         0000:19:00.0 on PCI is listed, but cannot be read: too many levels of symbolic links
         the RDMA device mlx5_1 is listed, but cannot be read: too many levels
         3 warnings
         0$ doctor --only path
         $ topo
         0000:19:00.0 is on PCI and cannot be read
         The RDMA device mlx5_0 cannot be read",
    );
    // If the only RDMA device cannot be read, the check does not claim that there is no RDMA
    // device.
    let mut fixture = fixture::all().remove("small").unwrap();
    circle(&mut fixture, "/sys/class/infiniband/mlx5_0", "mlx5_0");
    fixture.session("$ doctor\ncannot be read\n! no RDMA device\n! software");
}

#[test]
fn without_sys_list_and_stats_say_so() {
    let mut absent = hgx();
    absent.remove("/sys");
    let root = absent.recording.directories.get_mut("/").unwrap();
    root.retain(|name| name != "sys");
    let mut empty = absent.clone();
    empty.directory("/sys");
    let mut denied = absent.clone();
    denied.deny("/sys");
    for fixture in [absent, empty, denied] {
        for line in ["list", "stats", "list --json"] {
            let told = format!("2$ {line}\n/sys cannot be read here\n! is not loaded");
            fixture.session(&told);
        }
    }
    let mut unloaded = hgx();
    unloaded.remove("/sys/module/nvidia_peermem");
    unloaded.session("$ list\nthe module nvidia_peermem is not loaded");
}
