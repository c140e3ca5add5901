// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Asks git about the repository, which may belong to another user.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::progress::output;

pub(crate) fn git(repo: &Path, words: &[&str]) -> Result<String> {
    let usual = ["-c", "safe.directory=*", "-c", "core.quotePath=off", "-C"];
    output(Command::new("git").args(usual).arg(repo).args(words))
}

/// Returns the names of all files that git does not ignore, sorted. The list includes files that
/// were removed without a commit.
pub(crate) fn tracked(repo: &Path) -> Result<Vec<String>> {
    let words = [
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ];
    let list = git(repo, &words)?;
    let names: BTreeSet<&str> = list.split('\0').filter(|name| !name.is_empty()).collect();
    Ok(names.into_iter().map(str::to_owned).collect())
}
