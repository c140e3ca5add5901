// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Applies patches, and makes copies of the sources with patches applied.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, Context as _, Result};

use crate::paths::Paths;
use crate::stamp;

/// Applies a patch to the tree below `directory`. The error says why the patch does not apply.
/// `fuzz` is the number of context lines that may differ.
pub(crate) fn apply(directory: &Path, patch: &Path, fuzz: u32) -> Result<()> {
    let output = Command::new("patch")
        .args(["-p1", &format!("--fuzz={fuzz}"), "--batch", "--forward"])
        .args(["--no-backup-if-mismatch", "--reject-file=-", "-d"])
        .arg(directory)
        .arg("-i")
        .arg(patch)
        .stdin(Stdio::null())
        .output()
        .context("cannot start patch")?;
    if !output.status.success() {
        bail!(
            "{} does not fit:\n{}",
            patch.display(),
            String::from_utf8_lossy(&output.stdout).trim()
        );
    }
    Ok(())
}

/// Fakes of the kernel's services. The host packages compile the module's logic with these fakes.
pub(crate) const FAKES: &str = "tests/fakes";

/// The module's sources, and other inputs of the workspace's packages.
const SOURCES: &[&str] = &[
    "Kbuild",
    "src",
    "kunit",
    "rust-bindings",
    "portable",
    "docs/observe.md",
    FAKES,
];

/// Returns a copy of the sources with patches applied, for the module. All mutants share one copy.
/// Only files that change are written, so that make compiles no more than necessary.
pub(crate) fn patched(paths: &Paths, patches: &[PathBuf]) -> Result<PathBuf> {
    patched_as(paths, patches, "source")
}

/// Returns a patched copy like [`patched`], in a directory called `name`. A caller with a separate
/// copy need not wait for the users of the shared copy.
pub(crate) fn patched_as(paths: &Paths, patches: &[PathBuf], name: &str) -> Result<PathBuf> {
    let copy = paths.cache.join("mutants").join(name);
    let work = copy.with_extension("new");
    let _ = fs::remove_dir_all(&work);
    for name in SOURCES
        .iter()
        .map(|name| (*name).to_owned())
        .chain(workspace(paths)?)
    {
        for file in stamp::files(&paths.repo.join(&name))? {
            stamp::put(&file, &work.join(file.strip_prefix(&paths.repo)?))?;
        }
    }
    for patch in patches {
        // No fuzz: a patch that does not apply exactly may remove something else.
        apply(&work, patch, 0)?;
    }
    for file in stamp::files(&work)? {
        // Keeps the permissions, because the build runs scripts of the copy.
        stamp::put(&file, &copy.join(file.strip_prefix(&work)?))?;
    }
    for file in stamp::files(&copy)? {
        if !work.join(file.strip_prefix(&copy)?).exists() {
            fs::remove_file(&file)?;
        }
    }
    Ok(copy)
}

/// Returns the files that cargo needs before it compiles any package.
fn workspace(paths: &Paths) -> Result<Vec<String>> {
    let manifest = fs::read_to_string(paths.repo.join("Cargo.toml"))?;
    let members = manifest
        .split_once("members = [")
        .and_then(|(_, rest)| rest.split_once(']'))
        .map(|(members, _)| members)
        .context("Cargo.toml names no members")?;
    Ok(["Cargo.toml".to_owned(), "Cargo.lock".to_owned()]
        .into_iter()
        .chain(
            members
                .split(',')
                .map(|word| word.trim().trim_matches('"').to_owned()),
        )
        .filter(|name| !name.is_empty())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_must_apply_within_the_fuzz() {
        let directory = crate::paths::Folder::scratch("patch");
        let (file, patch) = (directory.join("x"), directory.join("x.patch"));
        fs::write(
            &patch,
            "--- a/x\n+++ b/x\n@@ -1,5 +1,5 @@\n a\n b\n-c\n+C\n d\n e\n",
        )
        .unwrap();
        let applied = |contents: &str, fuzz| {
            fs::write(&file, contents).unwrap();
            let result = apply(&directory, &patch, fuzz);
            (result.is_ok(), fs::read_to_string(&file).unwrap())
        };
        let results = [
            applied("a\nb\nc\nd\ne\n", 0),
            applied("a\nb\nc\nd\nother\n", 0),
            applied("a\nb\nc\nd\nother\n", 2),
            applied("a\nb\nother\nd\ne\n", 2),
        ];
        let expected = [
            (true, "a\nb\nC\nd\ne\n"),
            (false, "a\nb\nc\nd\nother\n"),
            (true, "a\nb\nC\nd\nother\n"),
            (false, "a\nb\nother\nd\ne\n"),
        ];
        assert_eq!(
            results,
            expected.map(|(fits, text)| (fits, text.to_owned()))
        );
    }
}
