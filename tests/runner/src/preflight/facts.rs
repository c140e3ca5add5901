// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! This machine: its disks, memory and rights, and its package sources.

use std::fs;
use std::io::{stdin, IsTerminal as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::plan::Plan;
use crate::apt;
use crate::paths::Paths;
use crate::progress::output;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    Root,
    /// sudo works without a password, or on a terminal where the user can type the password.
    Sudo,
    /// sudo needs a password, and there is no terminal.
    Mute,
    None,
}

/// A file system that the steps write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) device: u64,
    pub(super) place: PathBuf,
    pub(super) free_mib: u64,
    pub(super) wanted_mib: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) architecture: String,
    pub(super) debian: bool,
    pub(super) rooms: Vec<Room>,
    pub(super) cache: PathBuf,
    pub(super) available_mib: Option<u64>,
    pub(super) rights: Rights,
    /// `true` if dpkg was interrupted, and this program had not started dpkg.
    pub(super) interrupted: bool,
    /// Reason why the package sources cannot be reached, or `None` if they can be reached.
    pub(super) unreachable: Option<String>,
}

/// Returns the folder itself, or its nearest existing parent.
fn existing(path: &Path) -> &Path {
    path.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"))
}

pub(super) fn look(paths: &Paths, plan: &Plan) -> Facts {
    let mut rooms: Vec<Room> = Vec::new();
    let packages = &plan.packages;
    for (place, wanted_mib) in [
        // Includes space for logs and for the files of a VM.
        (
            paths.cache.as_path(),
            64 + plan.steps.iter().map(|step| step.mib).sum::<u64>(),
        ),
        (Path::new("/usr"), packages.installed_mib),
        (Path::new("/var/cache/apt/archives"), packages.download_mib),
        // Compilers put their temporary files in this folder.
        (&std::env::temp_dir(), 64),
    ] {
        let place = existing(place);
        let (Ok(metadata), Ok(space)) = (fs::metadata(place), rustix::fs::statvfs(place)) else {
            continue;
        };
        match rooms.iter_mut().find(|room| room.device == metadata.dev()) {
            Some(room) => room.wanted_mib += wanted_mib,
            None => rooms.push(Room {
                device: metadata.dev(),
                place: place.to_path_buf(),
                free_mib: space.f_bavail.saturating_mul(space.f_frsize) >> 20,
                wanted_mib,
            }),
        }
    }
    let installs = !packages.names.is_empty();
    let fetches = plan.steps.iter().any(|step| step.fetches);
    Facts {
        architecture: std::env::consts::ARCH.to_owned(),
        debian: Path::new("/etc/debian_version").exists(),
        rooms,
        cache: paths.cache.clone(),
        available_mib: available(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        rights: rights(),
        interrupted: installs && !apt::was_begun(paths) && apt::is_interrupted(),
        unreachable: fetches.then(|| probe(paths)).flatten(),
    }
}

/// Returns the available memory and swap in MiB, from /proc/meminfo.
pub(super) fn available(meminfo: &str) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        meminfo
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    };
    Some((field("MemAvailable")? + field("SwapFree").unwrap_or(0)) >> 10)
}

fn rights() -> Rights {
    if rustix::process::geteuid().is_root() {
        return Rights::Root;
    }
    let asked = Command::new("sudo")
        .args(["-n", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match asked {
        Err(_) => Rights::None,
        Ok(status) if status.success() || stdin().is_terminal() => Rights::Sudo,
        Ok(_) => Rights::Mute,
    }
}

/// Fetches the first file that `apt-get update` would fetch, in the way that apt-get does. Returns
/// the problem, if any.
fn probe(paths: &Paths) -> Option<String> {
    let listed = output(
        Command::new("apt-get")
            .args(["--print-uris", "update"])
            .env("LC_ALL", "C"),
    );
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => return Some(format!("{error:#}")),
    };
    let Some(address) = first_address(&listed) else {
        return Some("apt has no sources".to_owned());
    };
    let folder = paths.run_directory().ok()?;
    let result = Command::new("timeout")
        .arg((PATIENCE + 2).to_string())
        .arg("/usr/lib/apt/apt-helper")
        .args(["-o", "Acquire::Retries=0", "-o", "APT::Sandbox::User="])
        .args(["-o", &format!("Acquire::http::Timeout={PATIENCE}")])
        .args(["-o", &format!("Acquire::https::Timeout={PATIENCE}")])
        .arg("download-file")
        .arg(address)
        .arg(folder.join("probe"))
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output();
    match result {
        Ok(result) if result.status.success() => None,
        Ok(result) => Some(complaint(&String::from_utf8_lossy(&result.stderr))),
        Err(error) => Some(error.to_string()),
    }
}

/// Returns the first address that needs a network from the output of `apt-get --print-uris update`,
/// or else the first address.
pub(super) fn first_address(listed: &str) -> Option<&str> {
    let addresses = || listed.lines().filter_map(|line| line.split('\'').nth(1));
    addresses()
        .find(|address| address.starts_with("http"))
        .or_else(|| addresses().next())
}

/// Returns apt's last message.
pub(super) fn complaint(errors: &str) -> String {
    errors
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("E: ").or(line.strip_prefix("W: ")))
        .map_or_else(
            || format!("no answer in {PATIENCE} s"),
            |line| line.trim().trim_end_matches('.').to_owned(),
        )
}

/// Time in which the package sources must answer, in seconds.
pub(super) const PATIENCE: u32 = 6;
