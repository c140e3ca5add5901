// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! This machine, read directly.

use std::io::{BufRead as _, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::{fs, io};

use rustix::fs::{fstat, openat2, FileType, Mode, OFlags, ResolveFlags};

use super::module_files::Files;
use super::nldev::Tracked;
use super::nvml::Nvml;
use super::recording::Recorded as _;
use super::{dcb, facts, Fact, Host, Seen, Unseen};

/// Upper bound on the size of a file, in bytes. The module's list of 100,000 registrations has
/// about 25 MB.
const LONGEST: u64 = 64 << 20;

/// Upper bound on the length of a line, in bytes.
const LONGEST_LINE: u64 = 64 << 10;

/// Upper bound on the total size of the matching lines of a file, and on the kernel log, in bytes.
const MOST: usize = 8 << 20;

/// This machine.
#[derive(Debug, Default)]
pub(crate) struct Live;

impl From<io::Error> for Unseen {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // `ENOTDIR`: a component of the path is a file.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Absent,
            io::ErrorKind::PermissionDenied => Self::Denied,
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// Splits a path below the root directory of a process into that directory, which ends with a slash,
/// and the rest.
fn in_root(path: &str) -> Option<(&str, &str)> {
    let (pid, inside) = path.strip_prefix("/proc/")?.split_once('/')?;
    let below = inside.strip_prefix("root/")?;
    let is_pid = !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit());
    let root = path.strip_suffix(below)?;
    is_pid.then_some((root, below))
}

/// Opens a regular file below the root directory of a process, or a regular file that a process has
/// mapped. Returns `None` for all other paths.
///
/// The process controls these paths. This function therefore follows no symbolic link out of the
/// root directory of the process. Only regular files are opened, because opening a device can
/// change the device's state.
fn open_of_process(path: &str) -> Option<io::Result<fs::File>> {
    const PLACE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);
    let place = match in_root(path) {
        Some((root, below)) => {
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            let root = rustix::fs::open(root, PLACE, Mode::empty());
            root.and_then(|root| openat2(&root, below, PLACE, Mode::empty(), resolve))
        }
        None if path.starts_with("/proc/") && path.contains("/map_files/") => {
            rustix::fs::open(path, PLACE, Mode::empty())
        }
        None => return None,
    };
    Some(
        place
            .map_err(io::Error::from)
            .and_then(|place| regular(&place)),
    )
}

/// Opens a regular file for reading.
fn regular(place: &OwnedFd) -> io::Result<fs::File> {
    if !FileType::from_raw_mode(fstat(place)?.st_mode).is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    fs::File::open(format!("/proc/self/fd/{}", place.as_raw_fd()))
}

/// Opens a file without blocking, even if it is a pipe.
fn open(path: &str) -> io::Result<fs::File> {
    if let Some(file) = open_of_process(path) {
        return file;
    }
    fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
}

/// Returns the present contents of `/dev/kmsg` (`Documentation/ABI/testing/dev-kmsg`). Each read
/// returns one record.
fn kernel_log() -> Seen<String> {
    let mut file = open("/dev/kmsg")?;
    // The buffer has room for the longest record, because the kernel refuses a buffer that is too
    // short.
    let mut record = vec![0; 64 << 10];
    let mut log = String::new();
    while log.len() < MOST {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(length) => {
                let text = String::from_utf8_lossy(record.get(..length).unwrap_or_default());
                // The lines after the first are properties of the record.
                log.push_str(text.lines().next().unwrap_or_default());
                log.push('\n');
            }
            // The log has no more records.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Records were overwritten. The next read continues after the overwritten records.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(log)
}

impl Host for Live {
    fn bytes(&self, path: &str) -> Seen<Vec<u8>> {
        let file = open(path)?;
        let mut bytes = Vec::new();
        file.take(LONGEST).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn names(&self, path: &str) -> Seen<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(path)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn link(&self, path: &str) -> Seen<String> {
        match fs::read_link(path) {
            // The path is not a symbolic link.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Err(Unseen::Absent),
            other => Ok(other?.to_string_lossy().into_owned()),
        }
    }

    fn resolved(&self, path: &str) -> Seen<String> {
        Ok(fs::canonicalize(path)?.to_string_lossy().into_owned())
    }

    fn matching(&self, path: &str, word: &str) -> Seen<String> {
        let mut file = io::BufReader::new(open(path)?);
        let mut matching = Vec::new();
        let end = super::line_end(path);
        loop {
            let mut line = Vec::new();
            // The limit keeps a file without line ends from filling memory.
            let read = (&mut file).take(LONGEST_LINE).read_until(end, &mut line)?;
            if read == 0 {
                return Ok(String::from_utf8_lossy(&matching).into_owned());
            }
            let found = word.is_empty() || line.windows(word.len()).any(|at| at == word.as_bytes());
            if found && matching.len().saturating_add(line.len()) <= MOST {
                if let Some(last) = line.last_mut().filter(|last| **last == end) {
                    *last = b'\n';
                }
                matching.append(&mut line);
            }
        }
    }

    fn is_live(&self) -> bool {
        true
    }

    fn fact(&self, fact: Fact) -> Seen<String> {
        match fact {
            Fact::User => {
                let status = self.text("/proc/self/status")?;
                // The line has the real, effective, saved and file system user ID.
                let users = super::field(&status, "Uid:");
                let user = users.and_then(|users| users.split_whitespace().nth(1));
                user.map(str::to_owned)
                    .ok_or_else(|| Unseen::Failed("/proc/self/status names no user".to_owned()))
            }
            Fact::Monotonic => {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
                Ok(format!("{}.{:09}", now.tv_sec, now.tv_nsec))
            }
            Fact::KernelLog => kernel_log(),
            Fact::Nvml => Nvml::json(self),
            Fact::KernelSymbols => facts::symbols(),
            Fact::ModuleFiles => Files::json(self),
            Fact::Services => facts::services(self),
            Fact::Dcb => dcb::Interfaces::json(self),
            Fact::MemoryRegions => Tracked::json(self),
            Fact::Verbs => facts::verbs(self),
            Fact::FabricManager => facts::fabric_manager(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_goes_on() {
        let seconds = || -> f64 { Live.fact(Fact::Monotonic).unwrap().parse().unwrap() };
        let before = seconds();
        assert!(before > 0.0 && seconds() >= before, "{before}");
    }

    #[test]
    fn missing_paths_are_absent() {
        assert_eq!(Live.bytes("/proc/self/none"), Err(Unseen::Absent));
        assert_eq!(Live.bytes("/proc/self/stat/none"), Err(Unseen::Absent));
        assert_eq!(Live.names("/proc/none"), Err(Unseen::Absent));
        assert_eq!(Live.link("/proc/self/stat"), Err(Unseen::Absent));
        assert_eq!(Live.has("/proc/none"), Ok(false));
        assert_eq!(Live.has("/proc/self"), Ok(true));
    }

    #[test]
    fn paths_of_a_process_stay_below_its_root() {
        let own = format!("/proc/{}/root", std::process::id());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        fs::write(folder.path().join("file"), "text\n").unwrap();
        for (name, target) in [
            ("inside", format!("{path}/file")),
            ("device", "/dev/null".to_owned()),
            ("magic", "/proc/self/exe".to_owned()),
        ] {
            std::os::unix::fs::symlink(target, folder.path().join(name)).unwrap();
        }
        assert_eq!(
            Live.text(&format!("{own}{path}/file")).as_deref(),
            Ok("text")
        );
        assert_eq!(
            Live.text(&format!("{own}{path}/inside")).as_deref(),
            Ok("text")
        );
        assert_eq!(Live.text(&format!("{own}{path}/none")), Err(Unseen::Absent));
        for refused in ["device", "magic"] {
            let answer = Live.text(&format!("{own}{path}/{refused}"));
            assert!(
                matches!(answer, Err(Unseen::Failed(_))),
                "{refused}: {answer:?}"
            );
        }
        for other in ["/proc/self/root", "/proc/1/rootx"] {
            assert_eq!(in_root(&format!("{other}/etc/passwd")), None, "{other}");
        }
        let (root, below) = ("/proc/1/root", "etc/a/root");
        assert_eq!(
            in_root(&format!("{root}/{below}/b")),
            Some((&*format!("{root}/"), &*format!("{below}/b")))
        );
    }

    #[test]
    fn lines_that_match_are_found_in_a_file_of_any_length() {
        let found = Live.matching("/proc/self/status", "Uid:").unwrap();
        assert_eq!(found.lines().count(), 1, "{found}");
        assert!(found.starts_with("Uid:"), "{found}");
    }

    #[test]
    fn the_kernels_log_is_read_or_refused() {
        match Live.fact(Fact::KernelLog) {
            Ok(log) => assert!(log.lines().all(|line| line.contains(';')), "{log}"),
            Err(why) => assert!(why == Unseen::Denied || why == Unseen::Absent, "{why}"),
        }
    }
}
