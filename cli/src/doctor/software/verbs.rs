// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The device files through which programs open RDMA devices: `/dev/infiniband/uverbs*`.

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::facts::DEVICE_FILES;
use crate::host::{Fact, Host, Seen, Unseen};

check! {
    "verbs": "whether programs can open each RDMA device (/dev/infiniband/uverbs*)",
    applies, check, OfSoftware(tests::FAULTS)
}

const WHY: &str = "programs open an RDMA device through this file: without it, libibverbs omits the device, and NCCL \
says \"NET/IB : No device found\"";

/// Device file of an RDMA device.
struct File {
    /// Name of the RDMA device: `mlx5_0`.
    hca: String,
    /// Name of the file: `uverbs0`.
    name: String,
    /// Result of opening the file in this process.
    state: Seen<()>,
}

/// Returns the device files of a host.
fn files(host: &dyn Host) -> Seen<Vec<File>> {
    let text = host.fact(Fact::Verbs)?;
    Ok(text.lines().filter_map(parse).collect())
}

/// Parses a line of the fact.
fn parse(line: &str) -> Option<File> {
    let mut words = line.splitn(3, ' ');
    let (hca, name, state) = (words.next()?, words.next()?, words.next()?);
    Some(File {
        hca: hca.to_owned(),
        name: name.to_owned(),
        state: match state {
            "ok" => Ok(()),
            "absent" => Err(Unseen::Absent),
            "denied" => Err(Unseen::Denied),
            other => Err(Unseen::Failed(
                other.strip_prefix("failed ").unwrap_or(other).to_owned(),
            )),
        },
    })
}

/// Returns `true` if the state of the device files is known. Recordings of older versions lack this
/// state.
fn applies(scan: &Scan<'_>) -> bool {
    scan.has_both()
        && !matches!(
            scan.host.fact(Fact::Verbs),
            Err(Unseen::NotRecorded | Unseen::Absent)
        )
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let files = match files(scan.host) {
        Ok(files) => files,
        Err(Unseen::NotRecorded | Unseen::Absent) => return Vec::new(),
        Err(why) => return vec![Scan::unseen(Subject::Machine, DEVICE_FILES, &why)],
    };
    let is_root = scan.host.fact(Fact::User).as_deref() == Ok("0");
    let mut findings = Vec::new();
    for hca in scan.hcas() {
        let at = |level, found: String| {
            Finding::new(scan.level_of(hca, level), Subject::hca(hca), found)
        };
        let mut of_hca = files.iter().filter(|file| file.hca == hca.name).peekable();
        if of_hca.peek().is_none() {
            findings.push(
                at(
                    Level::Fault,
                    format!("{} has no device file for programs", hca.name),
                )
                .why(WHY)
                .fix("`sudo modprobe ib_uverbs`; `dmesg | grep -i uverbs` says why the kernel made none"),
            );
        }
        for file in of_hca {
            let path = format!("{}/{}", DEVICE_FILES, file.name);
            findings.push(match &file.state {
                Ok(()) => at(Level::Ok, format!("{path} can be opened")),
                Err(Unseen::Absent) => at(Level::Fault, format!("{path} is not there"))
                    .why(WHY)
                    .fix(
                        "in a container: --device=/dev/infiniband, or the RDMA device plugin of Kubernetes, or \
                        privileged; on the machine itself: `sudo udevadm trigger -c add -s infiniband_verbs`",
                    ),
                // A device cgroup binds root, too. For other users, the cause may be the file's
                // mode.
                Err(Unseen::Denied) if is_root => at(Level::Fault, format!("root may not open {path}"))
                    .why(WHY)
                    .fix(
                        "the container's device rules forbid it: --device=/dev/infiniband, or the RDMA device plugin of \
                        Kubernetes, instead of a mount of /dev/infiniband",
                    ),
                Err(Unseen::Denied) => at(Level::Warning, format!("this user may not open {path}"))
                    .why(WHY)
                    .fix(
                        "rdma-core's udev rules give the file the mode 0666 (ls -l /dev/infiniband); in a container also \
                        --device=/dev/infiniband",
                    ),
                Err(why) => at(Level::Fault, format!("{path} cannot be opened: {why}"))
                    .why(WHY)
                    .fix(
                        "the file belongs to a device that is gone, or the RDMA driver was reloaded: restart the \
                        container; on the machine itself `dmesg | grep -i -e uverbs -e mlx5`",
                    ),
            });
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::faults;
    use super::*;
    use crate::testing::no_panic;

    faults! {
        "device files that are not there", "fault verbs: …/dev/infiniband/uverbs0 is not there" =>
            |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 absent");
        "a container whose rules forbid the device file", "fault verbs: …root may not open /dev/infiniband/uverbs0" =>
            |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 denied");
        "a user who may not open the device file", "warning verbs: …this user may not open" => |fixture| {
            fixture.fact(Fact::User, "1000");
            fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 denied");
        };
        "a device file of a device that is gone", "fault verbs: …cannot be opened: No such device" =>
            |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 failed No such device (os error 19)");
        "an RDMA device without a device file", "fault verbs: …mlx5_0 has no device file" =>
            |fixture| fixture.fact(Fact::Verbs, "mlx5_7 uverbs0 ok");
        "device files that can be opened" => |fixture| fixture.fact(Fact::Verbs, "mlx5_0 uverbs0 ok");
        "device files that an observer does not have", "not_visible verbs: …not in this container" => |fixture| {
            let why = Unseen::Failed("not in this container".to_owned());
            fixture.without_fact(Fact::Verbs, why);
        };
    }

    #[test]
    fn a_line_of_the_fact() {
        let state = |line: &str| parse(line).map(|file| file.state);
        assert_eq!(state("mlx5_0 uverbs0 ok"), Some(Ok(())));
        assert_eq!(state("mlx5_0 uverbs0 absent"), Some(Err(Unseen::Absent)));
        assert_eq!(state("mlx5_0 uverbs0 denied"), Some(Err(Unseen::Denied)));
        let failed = Unseen::Failed("No such device (os error 19)".to_owned());
        assert_eq!(
            state("mlx5_0 uverbs0 failed No such device (os error 19)"),
            Some(Err(failed))
        );
        assert_eq!(state("mlx5_0 uverbs0"), None);
        assert_eq!(state(""), None);
    }

    no_panic!(no_line_is_a_panic: parse);
}
