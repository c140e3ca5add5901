// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Mutants that tests have noticed, and the inputs of these tests. A test with the same inputs is
//! not repeated.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use anyhow::{Context as _, Result};
use regex::Regex;

use super::rule::{Check, Mutant, Place};
use super::{host, machine};
use crate::patch::FAKES;
use crate::paths::Paths;
use crate::results::pattern;
use crate::stamp::Key;
use crate::toolchain::Toolchain;
use crate::vm::{Build, Named as _};
use crate::{setup, stamp};

const CASES: &str = "tests/verbs/src/cases";

/// Inputs of all tests in a VM, besides their cases and the kernel.
const MACHINE: &[&str] = &[
    "tests/vm",
    "tests/gpu",
    "tests/bench",
    "tests/interpose",
    "cli/verbs",
];

pub(super) struct Kept<'a> {
    paths: &'a Paths,
    /// Inputs that all tests share.
    common: Key,
    kernels: BTreeMap<String, String>,
}

impl<'a> Kept<'a> {
    pub(super) fn new(paths: &'a Paths, toolchain: &Toolchain, build: Build) -> Result<Self> {
        let mut common = Key::default();
        common.text("tools", &toolchain.versions("gcc")?);
        common.text("build", &build.name());
        let own = ["mutants.rs", "mutants", "patch.rs"];
        common.inputs(&paths.repo.join("tests/runner/src"), &own)?;
        Ok(Self {
            paths,
            common,
            kernels: BTreeMap::new(),
        })
    }

    /// Returns a hash of a test's inputs: the patches and the files that they change, the test's
    /// source, and the programs that run it. The hash leaves out the module's other files. If a
    /// change of such a file reveals or hides the mutant, only a run of all tests shows this.
    pub(super) fn key(&mut self, mutant: &Mutant, check: &Check) -> Result<String> {
        let repo = &self.paths.repo;
        let mut key = self.common.clone();
        key.text("test", &check.label(&mutant.name));
        let mut files: BTreeSet<PathBuf> = mutant.patches.iter().cloned().collect();
        files.extend(mutant.changed()?.into_iter().map(|file| repo.join(file)));
        match &check.place {
            Place::Host { package, .. } => files.extend(of_package(repo, package, &check.test)?),
            Place::Kunit { .. } => {
                files.extend(["kunit", "tests/vm"].map(|part| repo.join(part)));
            }
            Place::Vm { .. } => {
                files.extend(MACHINE.iter().map(|part| repo.join(part)));
                files.extend(of_verbs(repo, &check.test)?);
            }
        }
        for file in files {
            key.path(repo, &file)?;
        }
        if let Some(name) = machine::kernel(check)? {
            if !self.kernels.contains_key(&name) {
                let key = setup::kernel_key(self.paths, &name)?;
                self.kernels.insert(name.clone(), key);
            }
            key.text("kernel", self.kernels.get(&name).map_or("", |key| key));
        }
        Ok(key.finish())
    }

    fn stamp(&self, name: &str) -> PathBuf {
        let mut key = Key::default();
        key.text("name", name);
        self.paths.cache.join("mutants/seen").join(key.finish())
    }

    /// Returns `true` if the named test has passed with this key.
    pub(super) fn has(&self, name: &str, key: &str) -> bool {
        stamp::is_fresh(&self.stamp(name), key)
    }

    /// Records that the test has passed. If the record cannot be saved, the test is simply run
    /// again.
    pub(super) fn add(&self, name: &str, key: &str) {
        let _ = stamp::update(&self.stamp(name), key.as_bytes());
    }
}

/// Returns the sources of a test that runs on this machine. These are the test's module, and all
/// files of the package that belong to no other test.
///
/// `test` is a path that begins with a module of the package, or with `src::` for a module beside
/// the code under test. For any other path, returns all sources.
fn of_package(repo: &Path, package: &str, test: &str) -> Result<Vec<PathBuf>> {
    let directory = repo.join(host::directory(package));
    let mut files = stamp::files(&directory)?;
    files.extend(stamp::files(&repo.join(FAKES))?);
    let words: Vec<&str> = test.split("::").collect();
    let own = match words[..] {
        ["src", module, "tests", ..] => repo.join(format!("src/{module}/tests.rs")),
        [module, ..] if module.ends_with("_tests") => directory.join(format!("src/{module}.rs")),
        _ => return Ok(files),
    };
    files.retain(|file| !file.to_string_lossy().ends_with("_tests.rs"));
    files.push(own);
    Ok(files)
}

/// Matches the paths by which a case names other cases' modules: one name, or several in braces.
static USED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?:crate::cases|super)::(\w+|\{[^}]*\})"));

/// Returns the sources of a case of the verbs program. These are the file with the case's name, the
/// files of other cases that this file uses, and the files that all cases use.
fn of_verbs(repo: &Path, case: &str) -> Result<Vec<PathBuf>> {
    let sources = repo.join("tests/verbs/src");
    let mut found: BTreeSet<PathBuf> = fs::read_dir(&sources)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .filter(|path| path.is_file())
        .collect();
    let cases = repo.join(CASES);
    let mut left = Vec::new();
    for file in stamp::files(&cases)? {
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        // The search includes the quote before a name, and may match only the beginning of the
        // name.
        if text.contains(&format!("\"{case}")) {
            left.push(file);
        }
    }
    if left.is_empty() {
        left = stamp::files(&cases)?;
    }
    while let Some(file) = left.pop() {
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        if found.insert(file) {
            let names = USED.captures_iter(&text).flat_map(|names| {
                let names = names[1].to_owned();
                let words = names.split(|c: char| !c.is_alphanumeric() && c != '_');
                words.map(str::to_owned).collect::<Vec<_>>()
            });
            let files = names.map(|name| cases.join(format!("{name}.rs")));
            left.extend(files.filter(|file| file.exists()));
        }
    }
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &[PathBuf]) -> Vec<String> {
        files
            .iter()
            .filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned()))
            .collect()
    }

    #[test]
    fn a_test_depends_on_its_own_sources() {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let host = names(&of_package(&repo, "peermem-host", "callback_pin_tests::x").unwrap());
        for (file, is_in) in [
            ("callback_pin_tests.rs", true),
            ("provider.rs", true),
            ("lib.rs", true),
            ("registry_tests.rs", false),
        ] {
            assert_eq!(host.iter().any(|name| name == file), is_in, "{file}");
        }
        let beside = of_package(&repo, "peermem-host", "src::ranges::tests::x").unwrap();
        assert!(beside.contains(&repo.join("src/ranges/tests.rs")));
        assert!(!names(&beside).contains(&"callback_pin_tests.rs".to_owned()));
        let all = names(&of_package(&repo, "peermem-loom", "models::x").unwrap());
        assert!(all.len() > 4);
        let preload = names(&of_package(&repo, "peermem-preload", "modes").unwrap());
        assert!(
            preload.contains(&"entry.rs".to_owned()) && preload.contains(&"cases.c".to_owned())
        );
        let verbs = names(&of_verbs(&repo, "rules.4.stale_ticket").unwrap());
        for (file, is_in) in [
            ("rules.rs", true),
            ("stage.rs", true),
            ("register.rs", true),
            ("hold.rs", true),
            ("ktap.rs", true),
            ("registrations.rs", false),
        ] {
            assert_eq!(verbs.iter().any(|name| name == file), is_in, "{file}");
        }
        // The case names this file in braces, together with other files.
        let coherent = names(&of_verbs(&repo, "coherent.").unwrap());
        assert!(coherent.contains(&"dma.rs".to_owned()));
        assert!(!coherent.contains(&"rules.rs".to_owned()));
        // The name is a prefix of several cases' names.
        assert!(names(&of_verbs(&repo, "input.table").unwrap()).contains(&"input.rs".to_owned()));
    }

    #[test]
    fn a_result_is_kept_by_its_key() {
        let folder = crate::paths::Folder::scratch("mutants-kept");
        let paths = Paths {
            repo: PathBuf::new(),
            cache: folder.to_path_buf(),
        };
        let kept = Kept {
            paths: &paths,
            common: Key::default(),
            kernels: BTreeMap::new(),
        };
        assert!(!kept.has("a", "1"));
        kept.add("a", "1");
        let found = [("a", "1"), ("a", "2"), ("b", "1")].map(|(name, key)| kept.has(name, key));
        assert_eq!(found, [true, false, false]);
    }
}
