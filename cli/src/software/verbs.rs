// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The device files of RDMA devices, and the results of opening them in this process: the fact
//! [`Verbs`](crate::host::Fact::Verbs).
//!
//! Opening such a file creates nothing on the device. Only later calls create objects.

use std::os::unix::fs::OpenOptionsExt as _;
use std::{fs, io};

use crate::host::{Fact, Host, Seen, Unseen};

/// Directory of the device files.
pub(crate) const DIRECTORY: &str = "/dev/infiniband";
const CLASS: &str = "/sys/class/infiniband_verbs";

/// Result of opening a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    Ok,
    Absent,
    Denied,
    Failed(String),
}

/// Device file of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    /// Name of the RDMA device: `mlx5_0`.
    pub(crate) hca: String,
    /// Name of the file: `uverbs0`.
    pub(crate) name: String,
    pub(crate) state: State,
}

/// Returns the device files of a host.
pub(crate) fn scan(host: &dyn Host) -> Seen<Vec<File>> {
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
            "ok" => State::Ok,
            "absent" => State::Absent,
            "denied" => State::Denied,
            other => State::Failed(other.strip_prefix("failed ").unwrap_or(other).to_owned()),
        },
    })
}

/// Returns the fact for this machine.
pub(crate) fn ask(host: &dyn Host) -> Seen<String> {
    let names = host.names(CLASS)?;
    // A container that sees the host's processes is an observer of the host. The lack of device
    // files in such a container says nothing about the host.
    let is_observer = || host.text("/proc/2/comm").as_deref() == Ok("kthreadd");
    if host.has(DIRECTORY) == Ok(false) && is_observer() {
        return Err(Unseen::Failed(
            "not in this container, which sees the host's processes".to_owned(),
        ));
    }
    let mut lines = Vec::new();
    for name in names.iter().filter(|name| name.starts_with("uverbs")) {
        let Ok(hca) = host.text(&format!("{CLASS}/{name}/ibdev")) else {
            continue;
        };
        lines.push(format!("{hca} {name} {}", open(name)));
    }
    Ok(lines.join("\n"))
}

/// Opens a device file as libibverbs does, and returns the result in words.
fn open(name: &str) -> String {
    let opened = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(format!("{DIRECTORY}/{name}"));
    match opened {
        Ok(_) => "ok".to_owned(),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "absent".to_owned(),
            io::ErrorKind::PermissionDenied => "denied".to_owned(),
            _ => format!("failed {error}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn a_line_of_the_fact() {
        let state = |line: &str| parse(line).map(|file| file.state);
        assert_eq!(state("mlx5_0 uverbs0 ok"), Some(State::Ok));
        assert_eq!(state("mlx5_0 uverbs0 absent"), Some(State::Absent));
        assert_eq!(state("mlx5_0 uverbs0 denied"), Some(State::Denied));
        let failed = State::Failed("No such device (os error 19)".to_owned());
        assert_eq!(
            state("mlx5_0 uverbs0 failed No such device (os error 19)"),
            Some(failed)
        );
        assert_eq!(state("mlx5_0 uverbs0"), None);
        assert_eq!(state(""), None);
    }

    #[test]
    fn a_file_that_is_not_there() {
        assert_eq!(open("none/of/this"), "absent");
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(text in any::<String>()) {
            parse(&text);
        }
    }
}
