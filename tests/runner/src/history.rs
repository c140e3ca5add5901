// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Stores the duration and the last pass of each run of the suite, in `history.json` in the cache.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::git::git;
use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::output;
use crate::stamp;

/// A date and a commit. The commit ends in `+` if the work tree differs from the commit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct When {
    pub(crate) date: String,
    pub(crate) commit: String,
}

impl When {
    pub(crate) fn now(paths: &Paths) -> Self {
        let git = |words: &[&str]| git(&paths.repo, words).unwrap_or_default();
        let mut commit = git(&["rev-parse", "--short=10", "HEAD"]);
        if !git(&["status", "--porcelain"]).is_empty() {
            commit.push('+');
        }
        let date = output(Command::new("date").args(["-u", "+%Y-%m-%d"])).unwrap_or_default();
        Self { date, commit }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) seconds: f64,
    pub(crate) last_pass: Option<When>,
}

#[derive(Debug)]
pub(crate) struct History {
    file: PathBuf,
    records: BTreeMap<String, Record>,
}

fn read(file: &PathBuf) -> BTreeMap<String, Record> {
    let text = fs::read(file).unwrap_or_default();
    // A file that cannot be parsed counts as empty. The runs are then timed again.
    serde_json::from_slice(&text).unwrap_or_default()
}

impl History {
    pub(crate) fn load(paths: &Paths) -> Self {
        let file = paths.cache.join("history.json");
        let records = read(&file);
        Self { file, records }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Record> {
        self.records.get(name)
    }

    pub(crate) fn time(&self, name: &str) -> Option<Duration> {
        Duration::try_from_secs_f64(self.get(name)?.seconds).ok()
    }

    /// Saves the record of a run immediately, since the suite may be interrupted.
    pub(crate) fn add(
        &mut self,
        paths: &Paths,
        name: &str,
        elapsed: Duration,
        passed: bool,
        when: &When,
    ) -> Result<()> {
        let _lock = Lock::take(paths, "history")?;
        // Reads the file again, because another suite may have written to it in the meantime.
        let mut records = read(&self.file);
        let before = records.remove(name).and_then(|record| record.last_pass);
        let record = Record {
            seconds: elapsed.as_secs_f64(),
            last_pass: if passed { Some(when.clone()) } else { before },
        };
        records.insert(name.to_owned(), record);
        stamp::replace(&self.file, &serde_json::to_vec_pretty(&records)?)
            .context("history.json")?;
        self.records = records;
        Ok(())
    }
}

/// Returns the order in which runs begin: first those without a known duration, then the longest
/// first.
pub(crate) fn order(times: &[Option<Duration>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..times.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(times[at].unwrap_or(Duration::MAX)));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_begin_first() {
        let times = [5, 0, 9, 0, 7].map(|seconds| match seconds {
            0 => None,
            seconds => Some(Duration::from_secs(seconds)),
        });
        assert_eq!(order(&times), [1, 3, 2, 4, 0]);
    }

    #[test]
    fn a_run_is_remembered_with_its_last_pass() {
        let cache = crate::paths::Folder::scratch("history");
        let paths = Paths {
            repo: PathBuf::new(),
            cache: cache.to_path_buf(),
        };
        let when = |commit: &str| When {
            date: "2026-01-01".to_owned(),
            commit: commit.to_owned(),
        };
        let mut history = History::load(&paths);
        let mut add = |passed, commit| {
            let elapsed = Duration::from_secs(3);
            history
                .add(&paths, "run", elapsed, passed, &when(commit))
                .unwrap();
        };
        add(true, "a");
        add(false, "b");
        let found = History::load(&paths);
        let record = found.get("run").unwrap();
        assert_eq!(record.last_pass, Some(when("a")));
        assert_eq!(found.time("run"), Some(Duration::from_secs(3)));
        assert_eq!(found.time("other"), None);
    }
}
