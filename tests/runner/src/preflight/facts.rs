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

/// The user's right to install packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    Root,
    /// sudo works without a password, or on a terminal where the user can type it.
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

/// Facts about this machine.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) architecture: String,
    pub(super) debian: bool,
    pub(super) rooms: Vec<Room>,
    pub(super) cache: PathBuf,
    pub(super) available_mib: Option<u64>,
    pub(super) rights: Rights,
    /// The process that holds apt's or dpkg's lock.
    pub(super) busy: Option<String>,
    /// `true` if dpkg was interrupted, and this program had not started dpkg.
    pub(super) interrupted: bool,
    /// Reason why the package sources cannot be reached.
    pub(super) unreachable: Option<String>,
}

/// Returns the folder itself, or its nearest existing parent.
pub(super) fn existing(path: &Path) -> &Path {
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
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let files: Vec<(u64, u64)> = LOCKS
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .map(|metadata| (metadata.dev(), metadata.ino()))
        .collect();
    Facts {
        architecture: std::env::consts::ARCH.to_owned(),
        debian: Path::new("/etc/debian_version").exists(),
        rooms,
        cache: paths.cache.clone(),
        available_mib: available(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        rights: rights(),
        busy: installs
            .then(|| holder(&locks, &files))
            .flatten()
            .map(named),
        interrupted: installs && !apt::was_begun(paths) && apt::is_interrupted(),
        unreachable: fetches.then(|| probe(paths)).flatten(),
    }
}

/// Formats a process: "apt-get (process 17)".
pub(super) fn named(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    match name.trim() {
        "" => format!("process {process}"),
        name => format!("{name} (process {process})"),
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

/// Returns the process that holds a lock on one of the files, from /proc/locks.
pub(super) fn holder(locks: &str, files: &[(u64, u64)]) -> Option<u32> {
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // The line of a process that waits for a lock has one more word, an arrow.
        let &[_, _, _, _, process, place, ..] = words.as_slice() else {
            return None;
        };
        let mut parts = place.split(':');
        let (major, minor) = (parts.next()?, parts.next()?);
        let (major, minor) = (
            u32::from_str_radix(major, 16).ok()?,
            u32::from_str_radix(minor, 16).ok()?,
        );
        let inode: u64 = parts.next()?.parse().ok()?;
        let is_one = files.iter().any(|(device, file)| {
            // For files on an overlay, /proc/locks has another device than stat(2).
            let same = rustix::fs::major(*device) == major && rustix::fs::minor(*device) == minor;
            *file == inode && (same || rustix::fs::major(*device) == 0)
        });
        is_one.then(|| process.parse().ok())?
    })
}

pub(super) fn rights() -> Rights {
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
pub(super) fn probe(paths: &Paths) -> Option<String> {
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

/// Files that apt and dpkg lock while they work.
pub(super) const LOCKS: [&str; 4] = [
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
];

/// Time in which the package sources must answer, in seconds.
pub(super) const PATIENCE: u32 = 6;
