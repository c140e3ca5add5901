// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Stamps: a hash of a product's inputs, kept beside the product. If the hash differs, the product
//! is made again.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

/// A hash of named inputs.
#[derive(Clone, Default)]
pub(crate) struct Key {
    whole: Sha256,
    /// The files among the inputs, each with its own hash, so that changed files can be named
    /// later.
    files: Vec<(String, String)>,
}

/// Input files of the keys that this process made, by key. [`set`] saves the files of a key beside
/// the key's stamp.
static FILES: Mutex<BTreeMap<String, Vec<(String, String)>>> = Mutex::new(BTreeMap::new());

/// Returns the beginning of a hash, long enough to be unique.
fn short(hash: Sha256) -> String {
    hash.finalize()[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn hash_of(contents: &[u8]) -> String {
    short(Sha256::new().chain_update(contents))
}

impl Key {
    pub(crate) fn text(&mut self, name: &str, value: &str) {
        self.bytes(name, value.as_bytes());
    }

    /// Adds bytes. The hash includes the name and the length, so that no bytes can move from one
    /// input to the next unnoticed.
    pub(crate) fn bytes(&mut self, name: &str, value: &[u8]) {
        self.whole.update(format!("{name}\0{}\0", value.len()));
        self.whole.update(value);
    }

    /// Adds a file, or all files of a directory in the order of their names.
    pub(crate) fn path(&mut self, base: &Path, path: &Path) -> Result<()> {
        for file in files(path)? {
            let name = file.strip_prefix(base).unwrap_or(&file);
            let contents =
                fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            self.bytes(&name.to_string_lossy(), &contents);
            if name.is_relative() {
                let name = name.to_string_lossy().into_owned();
                self.files.push((name, hash_of(&contents)));
            }
        }
        Ok(())
    }

    pub(crate) fn inputs(&mut self, repo: &Path, names: &[impl AsRef<Path>]) -> Result<()> {
        names
            .iter()
            .try_for_each(|name| self.path(repo, &repo.join(name)))
    }

    pub(crate) fn finish(self) -> String {
        let key = short(self.whole);
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        files.insert(key.clone(), self.files);
        key
    }
}

/// Returns all files at or below a path, sorted. Follows links. A path that does not exist has no
/// files.
pub(crate) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
        Ok(metadata) if metadata.is_file() => {
            found.push(path.to_path_buf());
            return Ok(found);
        }
        Ok(_) => {}
    }
    let mut entries: Vec<PathBuf> = fs::read_dir(path)
        .with_context(|| format!("cannot read {}", path.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    entries.sort();
    for entry in entries {
        found.extend(files(&entry)?);
    }
    Ok(found)
}

/// Returns `true` if the stamp says that the product of this key exists.
pub(crate) fn is_fresh(stamp: &Path, key: &str) -> bool {
    fs::read_to_string(stamp).is_ok_and(|text| text.trim() == key)
}

/// Writes the stamp, after the product is complete.
pub(crate) fn set(stamp: &Path, key: &str) -> Result<()> {
    let files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let text: String = files
        .get(key)
        .into_iter()
        .flatten()
        .map(|(name, hash)| format!("{hash} {name}\n"))
        .collect();
    drop(files);
    replace(&files_of(stamp), text.as_bytes())?;
    replace(stamp, key.as_bytes())
}

fn files_of(stamp: &Path) -> PathBuf {
    let mut name = stamp.file_name().unwrap_or_default().to_owned();
    name.push(".files");
    stamp.with_file_name(name)
}

/// Returns the repository's files that have changed or gone since the stamp was set. New files need
/// not be included, because another file must have changed to use a new file.
pub(crate) fn changed(stamp: &Path, repo: &Path) -> Vec<String> {
    let text = fs::read_to_string(files_of(stamp)).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(hash, name)| {
            fs::read(repo.join(name)).map_or(true, |contents| hash_of(&contents) != **hash)
        })
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// Replaces a file atomically, and creates its directories. A program that has the old file open
/// keeps the old contents.
pub(crate) fn replace(path: &Path, contents: &[u8]) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    fs::write(&new, contents).with_context(|| format!("cannot write {}", new.display()))?;
    fs::rename(&new, path).with_context(|| format!("cannot replace {}", path.display()))
}

/// Makes `to` a copy of `from`, with the same permissions. Replaces `to` only if the contents
/// differ.
pub(crate) fn put(from: &Path, to: &Path) -> Result<()> {
    let contents = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    update(to, &contents)?;
    fs::set_permissions(to, fs::metadata(from)?.permissions())?;
    Ok(())
}

/// Replaces a file unless it already has these contents. Returns `true` if the file was replaced.
pub(crate) fn update(path: &Path, contents: &[u8]) -> Result<bool> {
    if fs::read(path).is_ok_and(|present| present == contents) {
        return Ok(false);
    }
    replace(path, contents)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_do_not_change_are_left_alone() {
        let directory = crate::paths::Folder::scratch("stamp");
        let file = directory.join("a/b");
        let results = ["x", "x", "y"].map(|text| update(&file, text.as_bytes()).unwrap());
        let contents = fs::read_to_string(&file);
        assert_eq!(results, [true, false, true]);
        assert_eq!(contents.unwrap(), "y");
    }

    #[test]
    fn files_that_changed_are_named() {
        let repo = crate::paths::Folder::scratch("changed");
        let stamp = repo.join("x.stamp");
        for name in ["src/a", "src/b", "c"] {
            update(&repo.join(name), b"text").unwrap();
        }
        let mut key = Key::default();
        key.text("tools", "1");
        key.inputs(&repo, &["src", "c"]).unwrap();
        set(&stamp, &key.finish()).unwrap();
        assert!(changed(&stamp, &repo).is_empty());
        fs::write(repo.join("src/b"), b"other").unwrap();
        fs::remove_file(repo.join("c")).unwrap();
        let named = changed(&stamp, &repo);
        assert_eq!(named, ["src/b", "c"]);
    }

    #[test]
    fn a_key_depends_on_where_its_parts_begin() {
        let key = |parts: &[(&str, &str)]| {
            let mut key = Key::default();
            for (name, value) in parts {
                key.text(name, value);
            }
            key.finish()
        };
        assert_eq!(key(&[("a", "b")]), key(&[("a", "b")]));
        assert_ne!(key(&[("a", "bc")]), key(&[("ab", "c")]));
        assert_ne!(key(&[("a", "b"), ("c", "")]), key(&[("a", ""), ("c", "b")]));
    }
}
