// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `record`: saves a machine's answers to all commands, without identifying data (`scrub.rs`).

mod scrub;

use std::fs;

use anyhow::Context as _;
use clap::Parser as _;

use crate::args;
use crate::finding::Status;
use crate::host::recording::Recorder;
use crate::host::Host;
use crate::report::Out;
use scrub::{names_of, scrub};

/// Commands whose reads are recorded. Each command has the options with which it reads most.
const COMMANDS: [&str; 7] = [
    "topo --verbose",
    "doctor --all",
    "doctor --write-expect",
    "list",
    "list --all",
    "stats",
    "export",
];

/// Runs the commands through the function `command`, and writes the recording.
pub(crate) fn run(
    host: &dyn Host,
    args: &args::Record,
    command: fn(&dyn Host, &args::Command, &mut Out) -> anyhow::Result<Status>,
    out: &mut Out,
) -> anyhow::Result<Status> {
    let identity = match args.keep_identity {
        true => "with data that identifies the machine",
        false => "without data that identifies the machine",
    };
    let about = format!(
        "peermemctl {} record, {identity}",
        env!("CARGO_PKG_VERSION")
    );
    let recorder = Recorder::new(host, about);
    for words in COMMANDS {
        let line = std::iter::once("peermemctl").chain(words.split(' '));
        let cli = args::Cli::try_parse_from(line)?;
        // The reads of a command are recorded even if the command fails.
        let _ = command(&recorder, &cli.command, &mut Out::gather(false));
    }
    let mut recording = recorder.into_recording();
    if !args.keep_identity {
        scrub(&mut recording, &names_of(host));
    }
    let text = recording.to_json()?;
    match &args.output {
        Some(file) => fs::write(file, text).with_context(|| format!("{}", file.display()))?,
        None => out.raw(&text),
    }
    Ok(Status::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recording::Recording;
    use crate::host::Fact;
    use crate::{fixture, testing};

    fn recorded(host: &dyn Host, keep: bool) -> Recording {
        let line = if keep {
            "record --keep-identity"
        } else {
            "record"
        };
        let (text, status) = testing::says(host, line);
        assert_eq!(status, Status::Ok, "{text}");
        Recording::parse(&text).unwrap()
    }

    /// Every command has the same output for a recording as for the machine.
    #[test]
    fn a_recording_answers_every_command_as_the_machine_did() {
        for (name, fixture) in fixture::all() {
            for keep in [true, false] {
                let recording = recorded(&fixture.recording, keep);
                for line in COMMANDS {
                    // The output contains names of processes and users, which are removed.
                    if !keep && line.starts_with("list") {
                        continue;
                    }
                    let hosts = [&fixture.recording, &recording];
                    let [there, here] = hosts.map(|host| testing::says(host, line));
                    // No output of these commands depends on the removed data.
                    assert_eq!(there, here, "{name}: {line:?}, identity kept: {keep}");
                }
            }
        }
    }

    #[test]
    fn recording_again_changes_nothing() {
        let fixture = fixture::small();
        let once = recorded(&fixture.recording, false);
        let twice = recorded(&once, false);
        assert_eq!(once.to_json().unwrap(), twice.to_json().unwrap());
    }

    fn digits(text: &str) -> String {
        text.bytes().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn no_secret_survives() {
        let mut fixture = fixture::small();
        let nic = fixture.place("0000:18:00.0");
        let unescaped = |text: &str| {
            let text = text.replace(r"\n", "\n").replace(r"\t", "\t");
            text.replace(r"\0", "\0")
        };
        // Each row has a path, the contents of the file, and the secrets in the contents or in the
        // path.
        let injected: Vec<[&str; 3]> = testing::table(
            r"/sys/class/infiniband/mlx5_0/node_guid | b83f:d203:00aa:77fe\n | b83f 77fe
            /sys/class/infiniband/mlx5_0/ports/1/gids/0 | fe80:0000:0000:0000:b83f:d203:00aa:77fe\n | 77fe
            /sys/class/infiniband/mlx5_0/ports/1/gids/1 | 0000:0000:0000:0000:0000:ffff:0a11:0304\n | 0a11:0304
            /sys/class/infiniband/mlx5_0/ports/1/gids/2 | fd00:1234:5678:0000:b83f:d203:00aa:77fe\n | 1234:5678
            /sys/class/net/ibp24s0/address | b8:3f:d2:aa:77:01\n | 77:01
            /sys/class/dmi/id/product_serial | S1234567X\n | S1234567X
            /proc/driver/nvidia/gpus/0000:19:00.0/information | Model: \t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-6f9619ff-8b86-d011-b42d-00c04fc964ff\n | 6f9619ff 00c04fc964ff
            /proc/cmdline | root=UUID=6f9619ff-8b86-d011-b42d-00c04fc964fe ip=10.17.3.4 iommu=pt secret=hunter2\n | 6f9619ff 10.17.3.4 hunter2
            /proc/4711/cmdline | python3\0train.py\0--token=hunter2\0 | hunter2 train.py
            /proc/4711/comm | projectx\n | projectx
            /proc/4711/status | Name:\tprojectx\nUid:\t1003\t1003\t1003\t1003\n | projectx
            /sys/kernel/debug/nvidia_peermem/registrations | id=1 state=mapped tgid=4711 comm=projectx\n | projectx
            /proc/self/cgroup | 0::/user.slice/user-1003.slice/job_of_projectx\n | projectx user-1003
            /sys/fs/cgroup/user.slice/user-1003.slice/rdma.max | mlx5_0 hca_handle=max\n | user-1003
            /etc/passwd | root:x:0:0:root:/root:/bin/bash\njdoe:x:1003:1003:Jane Doe,Room 5:/home/jdoe:/bin/zsh\n | jdoe Jane Room
            /etc/hostname | node17.cluster.example\n | node17 cluster.example",
        );
        for [path, text, _] in &injected {
            let path = match path.strip_prefix("/sys/class/infiniband/mlx5_0") {
                Some(below) => format!("{nic}/infiniband/mlx5_0{below}"),
                None => (*path).to_owned(),
            };
            fixture.file(&path, &unescaped(text));
        }
        fixture.fact(
            Fact::KernelLog,
            "6,1,1,-;systemd[1]: Hostname set to <node17>\n\
             6,2,2,-;mlx5_core 0000:18:00.0: node17 of jdoe at 192.168.7.9\n\
             6,2,2,-;mlx5_core 0000:18:00.0: MAC b8:3f:d2:aa:77:01, serial number: MT2211X77\n\
             6,3,3,-;usb 1-1: SerialNumber: 4C530001\n",
        );
        // Adds the serial number of the NIC, which is in extended capability 3.
        let mut config = fixture.recording.bytes(&format!("{nic}/config")).unwrap();
        let serial = [0x01, 0x77, 0xaa, 0x00, 0x03, 0xd2, 0x3f, 0xb8];
        config[0x100..0x104].copy_from_slice(&[0x03, 0x00, 0x01, 0x20]);
        config[0x104..0x10c].copy_from_slice(&serial);
        config[0x200..0x204].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00]);
        fixture.bytes(&format!("{nic}/config"), &config);
        // Adds VPD with two serial numbers: that of the NIC, and that of the chip, which contains
        // the hardware address.
        let mut vpd = b"\x90\x1d\0SN\x09MT2244Z77V3\x0e0a5e8000b83f77".to_vec();
        vpd.push(0x78);
        fixture.bytes(&format!("{nic}/vpd"), &vpd);

        let recorder = Recorder::new(&fixture.recording, "a test");
        let (_, status) = testing::says(&recorder, "topo");
        assert_eq!(status, Status::Ok);
        for [path, ..] in &injected {
            assert!(recorder.bytes(path).is_ok(), "{path}");
        }
        assert!(recorder.fact(Fact::KernelLog).is_ok());
        let vpd = "/sys/bus/pci/devices/0000:18:00.0/vpd";
        assert!(recorder.bytes(vpd).is_ok());
        let mut recording = recorder.into_recording();
        let secrets = injected.iter().flat_map(|[.., secrets]| secrets.split(' '));
        let log = ["192.168.7.9", "MT2211X77", "4C530001", "77aa0003d23fb8"];
        let vpd = ["MT2244Z77", "0a5e8000b83f77"];
        let secrets: Vec<&str> = secrets.chain(log).chain(vpd).collect();
        let before = recording.to_json().unwrap();
        // Secrets may appear as text, or as the digits of a binary file.
        let is_in =
            |text: &str, secret: &str| text.contains(secret) || text.contains(&digits(secret));
        for secret in &secrets {
            assert!(is_in(&before, secret), "{secret} was not injected");
        }
        scrub(&mut recording, &names_of(&fixture.recording));
        let after = recording.to_json().unwrap();
        for secret in &secrets {
            assert!(!is_in(&after, secret), "{secret} is left in {after}");
        }
        // Useful data remains.
        assert!(after.contains("iommu=pt"), "{after}");
        assert!(after.contains("mlx5_core 0000:18:00.0"), "{after}");
        assert!(after.contains("root:x:0:0"), "{after}");
        // The kind of each GID remains.
        for gid in ["fe80:0000", "0000:ffff:0000:0000", "2001:0db8"] {
            assert!(after.contains(gid), "{gid} in {after}");
        }
        assert_eq!(
            testing::says(&recording, "topo -v"),
            fixture.says("topo -v")
        );
    }
}
