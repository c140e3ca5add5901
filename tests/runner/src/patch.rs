// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Applies patches.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{bail, Context as _, Result};

/// Applies a patch to the tree below `directory`, or says why it does not fit. `fuzz` is how many of the lines around a
/// change may be others.
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_fits_exactly_and_what_almost_does() {
        let directory = std::env::temp_dir().join(format!("runner-patch-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
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
        fs::remove_dir_all(&directory).unwrap();
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
