// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Paths: the repository, which is only read, and the cache, which holds all products.

use std::ffi::OsStr;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{bail, Context as _, Result};

use crate::stamp;

const LOGS_KEPT: usize = 300;

/// Maximum number of kept kernel logs of flaky runs. These logs have a separate folder.
const FLAKY_LOGS_KEPT: usize = 60;

/// Makes room for one more file in a directory whose file names sort by time.
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

/// A folder that is removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Makes an empty folder.
    pub(crate) fn make(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }

    #[cfg(test)]
    pub(crate) fn scratch(name: &str) -> Self {
        let name = format!("runner-{name}-{}", std::process::id());
        Self::make(std::env::temp_dir().join(name)).unwrap()
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<OsStr> for Folder {
    fn as_ref(&self) -> &OsStr {
        self.0.as_os_str()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) struct Paths {
    pub(crate) repo: PathBuf,
    pub(crate) cache: PathBuf,
}

impl Paths {
    pub(crate) fn find() -> Result<Self> {
        // The bootstrap script passes the path of its tree. A program that was started by hand
        // belongs to the tree in which it was built.
        let repo = std::env::var_os("RUNNER_REPO").map_or_else(
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
        if let Some(what) = hinders_kbuild(&cache) {
            bail!(
                "no kernel can be built in {}, whose name has {what}: set XDG_CACHE_HOME to another folder",
                cache.display()
            );
        }
        if repo.to_str().is_none() {
            bail!(
                "the name of {} is not UTF-8: move this clone",
                repo.display()
            );
        }
        Ok(Self { repo, cache })
    }

    /// Returns the directory in which kbuild compiles a module whose source is in `folder` and
    /// whose files are `inputs`. This is `folder` itself, or a copy if kbuild cannot handle the
    /// repository's path.
    pub(crate) fn for_kbuild(&self, folder: &Path, inputs: &[PathBuf]) -> Result<PathBuf> {
        if hinders_kbuild(&self.repo).is_none() {
            return Ok(folder.to_path_buf());
        }
        self.copy(folder, inputs, &self.cache.join("checkout"))
    }

    /// Copies the inputs of a module, and returns the path of `folder` in the copy. A folder
    /// outside the repository is not copied.
    pub(crate) fn copy(&self, folder: &Path, inputs: &[PathBuf], copy: &Path) -> Result<PathBuf> {
        let Ok(name) = folder.strip_prefix(&self.repo) else {
            return Ok(folder.to_path_buf());
        };
        for input in inputs {
            let Ok(input) = input.strip_prefix(&self.repo) else {
                continue;
            };
            for file in stamp::files(&self.repo.join(input))? {
                // Keeps the permissions, because the build runs scripts of the copy.
                stamp::put(&file, &copy.join(file.strip_prefix(&self.repo)?))?;
            }
            for file in stamp::files(&copy.join(input))? {
                if !self.repo.join(file.strip_prefix(copy)?).exists() {
                    fs::remove_file(&file)?;
                }
            }
        }
        Ok(copy.join(name))
    }

    /// Returns a new directory for one run, and removes the directories of runs that were killed.
    pub(crate) fn run_directory(&self) -> Result<Folder> {
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
        Folder::make(runs.join(unique_name()))
    }

    /// Returns the path of a new kernel log, and removes the oldest ones.
    pub(crate) fn new_log(&self) -> Result<PathBuf> {
        let directory = self.cache.join("logs");
        rotate(&directory, LOGS_KEPT)?;
        Ok(directory.join(format!("{}.log", unique_name())))
    }

    /// Copies a log to a folder where logs of other runs do not replace the copy. Returns the
    /// copy's path.
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

/// Returns the part of a path that kbuild, make or a shell would misinterpret.
fn hinders_kbuild(path: &Path) -> Option<String> {
    let Some(name) = path.to_str() else {
        return Some("bytes that are no UTF-8".to_owned());
    };
    let plain = |letter: &char| letter.is_alphanumeric() || "/._-+".contains(*letter);
    name.chars()
        .find(|letter| !plain(letter))
        .map(|letter| format!("{letter:?}"))
}

/// Returns a unique name that contains this process's ID and sorts by time.
fn unique_name() -> String {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn names_that_hinder_kbuild() {
        let what = |name: &str| hinders_kbuild(Path::new(name)).unwrap_or_default();
        assert_eq!(what("/home/jörg/.cache/peermem-rs_2+1"), "");
        assert_eq!(what("/tmp/a b"), "' '");
        assert_eq!(what("/tmp/100%"), "'%'");
        assert_eq!(what("/tmp/$HOME"), "'$'");
        assert_eq!(what("/tmp/a\tb"), "'\\t'");
    }

    #[test]
    fn kbuild_gets_a_copy_of_sources_in_awkward_paths() {
        let base = Folder::scratch("paths");
        let paths = Paths {
            repo: base.join("a b"),
            cache: base.join("cache"),
        };
        let file = |name: &str| paths.repo.join(name);
        for name in ["Kbuild", "src/x.rs", "src/y.rs", "docs/z"] {
            stamp::update(&file(name), b"text").unwrap();
        }
        let inputs = [file("Kbuild"), file("src")];
        let copy = paths.for_kbuild(&paths.repo, &inputs).unwrap();
        assert_eq!(copy, base.join("cache/checkout"));
        assert_eq!(stamp::files(&copy).unwrap().len(), 3);
        fs::set_permissions(file("Kbuild"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(file("src/x.rs"), b"other").unwrap();
        fs::remove_file(file("src/y.rs")).unwrap();
        let folder = paths.for_kbuild(&file("src"), &inputs).unwrap();
        assert_eq!(folder, copy.join("src"));
        assert_eq!(fs::read(copy.join("src/x.rs")).unwrap(), b"other");
        assert!(!copy.join("src/y.rs").exists());
        let [original, copied] = [&paths.repo, &copy]
            .map(|folder| fs::metadata(folder.join("Kbuild")).unwrap().permissions());
        assert_eq!(copied, original);
        let plain = Paths {
            repo: base.join("plain"),
            ..paths
        };
        let folder = plain.repo.join("src");
        assert_eq!(plain.for_kbuild(&folder, &[]).unwrap(), folder);
    }
}
