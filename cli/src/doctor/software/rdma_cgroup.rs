// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Limits of a cgroup on RDMA objects.

use crate::doctor::scan::{check, Scan};
use crate::finding::{argument, path_argument, Finding, Subject};

check! {
    "rdma-cgroup": "how near this cgroup is to its limits of RDMA handles and objects",
    |scan| scan.has_both(), check, OfSoftware(tests::FAULTS)
}

/// Parses a line of `rdma.max` or `rdma.current`: device, handles, objects. `max` becomes the
/// greatest number.
fn rdma(line: &str) -> Option<(&str, u64, u64)> {
    let mut words = line.split_whitespace();
    let device = words.next()?;
    let (mut handles, mut objects) = (None, None);
    for word in words {
        let (key, value) = word.split_once('=')?;
        let value = match value {
            "max" => u64::MAX,
            _ => value.parse().ok()?,
        };
        match key {
            "hca_handle" => handles = Some(value),
            "hca_object" => objects = Some(value),
            _ => {}
        }
    }
    Some((device, handles?, objects?))
}

/// Returns the directories of this process's RDMA cgroup, and of all cgroups above that cgroup.
fn cgroups(scan: &Scan<'_>) -> Vec<String> {
    let text = scan.host.text("/proc/self/cgroup").unwrap_or_default();
    let mut folders = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            _ if controllers.split(',').any(|name| name == "rdma") => "/sys/fs/cgroup/rdma",
            _ => continue,
        };
        // A path with `..` leads out of the cgroup namespace, and its directories are not visible.
        if path.split('/').any(|part| part == "..") {
            continue;
        }
        let mut path = path.trim_end_matches('/');
        while !path.is_empty() {
            folders.push(format!("{root}{path}"));
            path = path.rsplit_once('/').map_or("", |(above, _)| above);
        }
    }
    folders
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for folder in cgroups(scan) {
        let file = |name: &str| scan.host.text(&format!("{folder}/rdma.{name}"));
        let (Ok(most), Ok(current)) = (file("max"), file("current")) else {
            continue;
        };
        for (device, most_handles, most_objects) in most.lines().filter_map(rdma) {
            let Some((_, handles, objects)) = current
                .lines()
                .filter_map(rdma)
                .find(|(name, _, _)| *name == device)
            else {
                continue;
            };
            if !scan.machine.hcas.iter().any(|hca| hca.name == device) {
                continue;
            }
            for (what, now, most) in [
                ("handles", handles, most_handles),
                ("objects", objects, most_objects),
            ] {
                // More than a tenth of the limit is left.
                if most == u64::MAX || now < most.saturating_sub(most / 10) {
                    continue;
                }
                let subject = Subject::Hca {
                    hca: device.to_owned(),
                };
                findings.push(
                    subject.warning(format!(
                        "the cgroup {folder} uses {now} RDMA {what} of {most} that are allowed"
                    ))
                    .why(
                        "an open device is a handle; a memory region, a queue pair and a completion queue are \
                        objects; beyond the limit, creating one fails with EAGAIN",
                    )
                    .fix(format!(
                        "`echo '{} hca_handle=max hca_object=max' | sudo tee {}/rdma.max`",
                        argument(device),
                        path_argument(&folder)
                    )),
                );
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::no_panic;

    use super::super::tests::faults;

    faults! {
        "a cgroup at its limit", "warning rdma-cgroup: …1900 RDMA objects of 2000" => |fixture| {
            let folder = "/sys/fs/cgroup/user.slice";
            fixture.file(&format!("{folder}/rdma.max"), "mlx5_0 hca_handle=4 hca_object=2000\n");
            fixture.file(&format!("{folder}/rdma.current"), "mlx5_0 hca_handle=1 hca_object=1900\n");
        };
    }

    #[test]
    fn lines_of_the_rdma_controller() {
        assert_eq!(
            rdma("mlx5_0 hca_handle=2 hca_object=max"),
            Some(("mlx5_0", 2, u64::MAX))
        );
        assert_eq!(rdma("mlx5_0 hca_handle=2"), None);
        assert_eq!(rdma("mlx5_0 hca_handle"), None);
        assert_eq!(rdma(""), None);
    }

    no_panic!(nothing_read_is_a_panic: rdma);
}
