// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Where things lie: the repository, which is only read, and the cache, which holds all that is made.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use anyhow::Context as _;
use anyhow::Result;

/// As many kernel logs are kept.
const LOGS_KEPT: usize = 300;

/// As many of those of flaky runs, apart.
const FLAKY_LOGS_KEPT: usize = 60;

/// Makes room for one more file among those of a directory, whose names sort by time.
fn rotate(directory: &Path, kept: usize) -> Result<()> {
    fs::create_dir_all(directory)?;
    let mut old: Vec<PathBuf> = fs::read_dir(directory)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    old.sort();
    let surplus = old.len().saturating_sub(kept - 1);
    for log in &old[..surplus] {
        let _ = fs::remove_file(log);
    }
    Ok(())
}

pub(crate) struct Paths {
    pub(crate) repo: PathBuf,
    pub(crate) cache: PathBuf,
}

impl Paths {
    pub(crate) fn find() -> Result<Self> {
        // The bootstrap script names the tree it stands in; a program started by hand belongs to the one it was built in.
        let repo = std::env::var_os("RIG_REPO").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."),
            PathBuf::from,
        );
        let repo = fs::canonicalize(&repo)
            .with_context(|| format!("no repository at {}", repo.display()))?;
        let cache = match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
            Some(directory) => PathBuf::from(directory),
            None => {
                PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache")
            }
        };
        let cache = cache.join("peermem-rs");
        fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
        let cache = fs::canonicalize(cache)?;
        Ok(Self { repo, cache })
    }

    /// A new directory for one run. Those of runs that were killed go.
    pub(crate) fn run_directory(&self) -> Result<PathBuf> {
        let runs = self.cache.join("run");
        fs::create_dir_all(&runs)?;
        for entry in fs::read_dir(&runs)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let process = name.rsplit('-').next().unwrap_or_default();
            let process = process.trim_start_matches('0');
            if !Path::new("/proc").join(process).exists() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let directory = runs.join(stamp());
        fs::create_dir_all(&directory)?;
        Ok(directory)
    }

    /// A new kernel log; the oldest go.
    pub(crate) fn new_log(&self) -> Result<PathBuf> {
        let directory = self.cache.join("logs");
        rotate(&directory, LOGS_KEPT)?;
        Ok(directory.join(format!("{}.log", stamp())))
    }

    /// Copies a log to where those of other runs do not push it out, and says where it lies then.
    pub(crate) fn keep_log(&self, log: &Path) -> PathBuf {
        let directory = self.cache.join("logs-of-flaky-runs");
        let kept = directory.join(log.file_name().unwrap_or_default());
        let copied = rotate(&directory, FLAKY_LOGS_KEPT).is_ok() && fs::copy(log, &kept).is_ok();
        if copied {
            kept
        } else {
            log.to_owned()
        }
    }
}

/// Sorts by time, is this process's own, and given once.
fn stamp() -> String {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    format!(
        "{}-{:04}-{:06}",
        now.as_millis(),
        GIVEN.fetch_add(1, Relaxed),
        std::process::id()
    )
}
