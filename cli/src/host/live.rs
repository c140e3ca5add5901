// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! This machine.

use std::fs;
use std::io;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;

use super::Fact;
use super::Host;
use super::Seen;
use super::Unseen;

/// Of one file, in bytes.
const LONGEST: u64 = 8 << 20;

/// This machine, or what of it lies under another root.
#[derive(Debug, Default)]
pub(crate) struct Live;

impl From<io::Error> for Unseen {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // ENOTDIR: a part of the path is a file.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Absent,
            io::ErrorKind::PermissionDenied => Self::Denied,
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl Host for Live {
    fn bytes(&self, path: &str) -> Seen<Vec<u8>> {
        // Nothing here may wait: a pipe in a strange place would.
        let file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)?;
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
            // No link.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Err(Unseen::Absent),
            other => Ok(other?.to_string_lossy().into_owned()),
        }
    }

    fn resolved(&self, path: &str) -> Seen<String> {
        Ok(fs::canonicalize(path)?.to_string_lossy().into_owned())
    }

    fn fact(&self, fact: Fact) -> Seen<String> {
        match fact {
            Fact::User => {
                let status = self.text("/proc/self/status")?;
                // Real, effective, saved, of the file system.
                let user = status
                    .lines()
                    .find_map(|line| line.strip_prefix("Uid:"))
                    .and_then(|line| line.split_whitespace().nth(1));
                user.map(str::to_owned)
                    .ok_or_else(|| Unseen::Failed("/proc/self/status names no user".to_owned()))
            }
            Fact::Monotonic => Err(Unseen::Failed("not asked yet".to_owned())),
            Fact::KernelLog => Err(Unseen::Failed("not asked yet".to_owned())),
            Fact::Nvml => Err(Unseen::Failed("not asked yet".to_owned())),
        }
    }
}
