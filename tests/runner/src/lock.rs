// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Locks between processes: two `runner`s never make the same thing at the same time.

use std::fs;

use anyhow::Result;

use crate::paths::Paths;

/// Lock on one product. Another `runner`, or another thread of this one, waits for the lock.
pub(crate) struct Lock(fs::File);

impl Lock {
    pub(crate) fn take(paths: &Paths, what: &str) -> Result<Self> {
        let directory = paths.cache.join("locks");
        fs::create_dir_all(&directory)?;
        let file = fs::File::create(directory.join(what))?;
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("  waiting for another process that is building the same product ({what}) …");
            rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
        }
        Ok(Self(file))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}
