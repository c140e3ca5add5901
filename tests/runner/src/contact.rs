// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Runs `runner vm` for the first time from awkward paths. The path of the clone is below /tmp, and
//! has a blank and a non-ASCII letter. The cache is below /tmp, too. These paths are awkward,
//! because the VM mounts its own /tmp, and kbuild accepts no blanks.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{bail, Context as _, Result};

use crate::git::tracked;
use crate::paths::{Folder, Paths};
use crate::results::Test;
use crate::stamp;

/// Contents of a file that exists only in the working directory.
const MARK: &str = "of the working directory";

/// Compiles the modules in a clone below /tmp whose name has a blank and a non-ASCII letter, and
/// runs `gdr demo` in a VM. Then boots another VM from a folder below /dev/shm.
pub(crate) fn tests(paths: &Paths) -> Result<Vec<Test>> {
    let process = std::process::id();
    let clone = Folder::make(format!("/tmp/runner {process} clöne"))?;
    let shm = Folder::make(format!("/dev/shm/runner {process} ü"))?;
    let cache = Folder::make(format!("/tmp/runner-{process}-cache"))?;
    copy_tracked(&paths.repo, &clone)?;
    lend(&paths.cache, &cache.join("peermem-rs"))?;

    let run = |name: &str, cwd: &Path, script: &str, wanted: &[&str]| {
        let result = vm(paths, [&clone, &cache, cwd], script, wanted);
        Test::of(name.to_owned(), result)
    };
    let first = run(
        "clone below /tmp",
        &clone,
        "cat Kbuild > /tmp/Kbuild && cmp Kbuild src/../Kbuild && gdr demo",
        &["demo: ok", "NVIDIA's"],
    );
    let second = run(
        "working directory below /dev/shm",
        &shm,
        "peermemctl --version",
        &["peermemctl "],
    );
    Ok(vec![first, second])
}

fn copy_tracked(repo: &Path, to: &Path) -> Result<()> {
    for name in tracked(repo)? {
        let (from, target) = (repo.join(&name), to.join(&name));
        // Skips a file that was removed without a commit.
        if !from.exists() {
            continue;
        }
        stamp::put(&from, &target)?;
    }
    Ok(())
}

/// Adds to the new cache everything that takes minutes to make and does not depend on the clone's
/// path.
fn lend(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from.join("programs"))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let target = to.join("programs").join(entry.file_name());
            stamp::put(&entry.path(), &target)?;
        }
    }
    for name in ["bindgen", "kernel"] {
        if from.join(name).exists() {
            std::os::unix::fs::symlink(from.join(name), to.join(name))?;
        }
    }
    Ok(())
}

/// Runs `runner vm` of the clone, as the clone's user would. The output must contain the given
/// words.
fn vm(
    paths: &Paths,
    [clone, cache, cwd]: [&Path; 3],
    script: &str,
    wanted: &[&str],
) -> Result<Vec<String>> {
    fs::write(cwd.join("mark"), MARK)?;
    // Files that the VM writes to the host's folders stay in the VM.
    let script = format!("set -e; cat mark; echo; {script}; echo x > mark");
    let log = paths.new_log()?;
    // Runs this same program, even if cargo has replaced its file.
    let result = Command::new("/proc/self/exe")
        // The demo registers 1 GiB.
        .args(["vm", "--bar", "4096", "--log"])
        .arg(&log)
        .args(["--", "sh", "-c", &script])
        .current_dir(cwd)
        .env("RUNNER_REPO", clone)
        .env("XDG_CACHE_HOME", cache)
        .stdin(Stdio::null())
        .output()
        .context("cannot start runner")?;
    let said = String::from_utf8_lossy(&result.stdout).into_owned();
    let missing = [MARK]
        .iter()
        .chain(wanted)
        .find(|word| !said.contains(**word));
    let kept = fs::read_to_string(cwd.join("mark"))? == MARK;
    if !result.status.success() || missing.is_some() || !kept {
        let errors = String::from_utf8_lossy(&result.stderr);
        bail!(
            "{}{}\nkernel log: {}\n{said}\n{errors}",
            result.status,
            if kept {
                ""
            } else {
                ", and it wrote to the host's file"
            },
            log.display()
        );
    }
    Ok(Vec::new())
}
