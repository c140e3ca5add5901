// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Results of earlier runs, which replace a run whose inputs have not changed. This module also
//! keeps the progress of `make test-all`, which continues after an interruption.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::git::tracked;
use crate::history::When;
use crate::paths::Paths;
use crate::progress::output;
use crate::results::Test;
use crate::stamp::Key;
use crate::suite::{Place, Run};
use crate::vm::{Options, Peermem};
use crate::{programs, setup, stamp};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kept {
    run: String,
    key: String,
    pub(crate) tests: Vec<Test>,
    pub(crate) when: When,
}

/// Kept results of one kind: a directory in the cache with a file for each run.
#[derive(Debug)]
pub(crate) struct Shelf(PathBuf);

impl Shelf {
    pub(crate) fn unchanged(paths: &Paths) -> Self {
        Self(paths.cache.join("results/unchanged"))
    }

    fn file(&self, run: &str) -> PathBuf {
        let name = run.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
        self.0.join(format!("{name}.json"))
    }

    /// Returns the kept result of this run if `key`, the hash of the run's inputs, has not changed.
    pub(crate) fn get(&self, run: &str, key: &str) -> Option<Kept> {
        let text = fs::read(self.file(run)).ok()?;
        let kept: Kept = serde_json::from_slice(&text).ok()?;
        (kept.run == run && kept.key == key).then_some(kept)
    }

    pub(crate) fn put(&self, run: &str, key: &str, tests: &[Test], when: &When) -> Result<()> {
        let kept = Kept {
            run: run.to_owned(),
            key: key.to_owned(),
            tests: tests.to_vec(),
            when: when.clone(),
        };
        stamp::update(&self.file(run), &serde_json::to_vec(&kept)?).map(drop)
    }
}

/// One pass of `make test-all`: all runs, over one state of the work tree.
#[derive(Debug)]
pub(crate) struct Pass {
    home: PathBuf,
    pub(crate) tree: String,
    pub(crate) shelf: Shelf,
}

impl Pass {
    /// Returns the unfinished pass for this state of the work tree, or a new pass.
    pub(crate) fn resume(paths: &Paths, restart: bool) -> Result<Self> {
        let mut key = Key::default();
        for name in tracked(&paths.repo)? {
            // Leaves out docs/last-passes.md, because the end of a pass writes the date of the pass
            // into this page.
            if name != LAST_PASSES_PAGE {
                add_file(&mut key, paths, &name)?;
            }
        }
        Self::of(paths.cache.join("results/pass"), key.finish(), restart)
    }

    fn of(home: PathBuf, tree: String, restart: bool) -> Result<Self> {
        // The stamp has the hash of the work tree under test.
        let stamp = home.join("tree");
        if home.exists() && (restart || !stamp::is_fresh(&stamp, &tree)) {
            fs::remove_dir_all(&home).with_context(|| home.display().to_string())?;
        }
        stamp::update(&stamp, tree.as_bytes())?;
        let shelf = Shelf(home.join("runs"));
        Ok(Self { home, tree, shelf })
    }

    /// Ends the pass. The next pass starts from the beginning.
    pub(crate) fn end(&self) -> Result<()> {
        fs::remove_dir_all(&self.home).with_context(|| self.home.display().to_string())
    }
}

pub(crate) const LAST_PASSES_PAGE: &str = "docs/last-passes.md";

/// Adds a file to the key. A file that was deleted but is still tracked counts as empty.
fn add_file(key: &mut Key, paths: &Paths, name: &str) -> Result<()> {
    let path = paths.repo.join(name);
    match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_file() => key.bytes(name, &fs::read(&path)?),
        Ok(metadata) if metadata.is_symlink() => {
            key.text(name, &fs::read_link(&path)?.to_string_lossy());
        }
        _ => key.text(name, ""),
    }
    Ok(())
}

/// Files and folders of the test runner that boot a VM and evaluate its results.
const JUDGES: &str =
    "arch.rs cases.rs command.rs detectors.rs guest.rs index.rs klog klog.rs results.rs setup.rs \
    topology.rs vm vm.rs";

/// Returns `true` if a VM contains anything compiled from `src/`.
pub(crate) fn has_ours(options: &Options, command: &str) -> bool {
    options.peermem == Peermem::Ours
        || options.beside
        || options.kunit
        || options.signed
        || options.mutant.is_some()
        || !options.patches.is_empty()
        // Other commands may load any module.
        || !matches!(
            command.split_whitespace().next(),
            Some("{gdr}" | "{repo}/tests/vm/perftest" | "{repo}/tests/vm/pyverbs")
        )
}

/// Returns a key, which is a hash of all inputs of a run. Returns `None` if the run depends on
/// `src/` and is therefore always done.
pub(crate) fn key(paths: &Paths, run: &Run, machine: Option<&Options>) -> Result<Option<String>> {
    let mut key = Key::default();
    match (run.place, machine, run.src) {
        (Place::Vm { command, .. }, Some(options), _) if !has_ours(options, command) => {
            key.text("command", command);
            key.text("options", &format!("{options:?}"));
            let judges: Vec<&str> = JUDGES.split(' ').collect();
            key.inputs(&paths.repo.join("tests/runner/src"), &judges)?;
            let mut files = vec![
                paths.repo.join("tests/vm"),
                programs::gdr(paths, options.arch()),
                programs::peermemctl(paths, options.arch()),
            ];
            for (name, make) in programs::ON_DEMAND {
                if command.contains(name) {
                    files.push(make(paths)?);
                }
            }
            let boot = setup::boot(paths, options)?;
            files.push(boot.image);
            files.extend(boot.control);
            files.extend(boot.drivers.into_iter().map(|(_, file)| file));
            files.extend(boot.modules.files().cloned());
            for file in files {
                key.path(&paths.cache, &file)?;
            }
        }
        (Place::Cargo(arguments), _, Some(known)) => {
            key.text("arguments", arguments);
            for name in tracked(&paths.repo)? {
                if !name.starts_with("src/") || known.contains(&name.as_str()) {
                    add_file(&mut key, paths, &name)?;
                } else {
                    key.text(&name, "");
                }
            }
            for compiler in ["/usr/bin/rustc", "gcc"] {
                key.text(compiler, &output(Command::new(compiler).arg("--version"))?);
            }
        }
        _ => return Ok(None),
    }
    // The VM uses this machine's programs and libraries, too.
    key.bytes(
        "packages",
        &fs::read("/var/lib/dpkg/status").unwrap_or_default(),
    );
    Ok(Some(key.finish()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::Folder;

    #[test]
    fn machines_with_our_module_depend_on_src() {
        let test = "{gdr} test";
        let of = |peermem| Options {
            peermem,
            ..Options::default()
        };
        let nvidia = || of(Peermem::Nvidia);
        assert!(!has_ours(&nvidia(), test));
        assert!(!has_ours(&of(Peermem::None), test));
        assert!(has_ours(&of(Peermem::None), "{repo}/tests/vm/kunit"));
        assert!(has_ours(&of(Peermem::None), "true"));
        assert!(has_ours(&of(Peermem::Ours), test));
        for change in [
            (|options| options.beside = true) as fn(&mut Options),
            |options| options.kunit = true,
            |options| options.signed = true,
            |options| options.mutant = Some("x".to_owned()),
            |options| options.patches.push(PathBuf::from("x")),
        ] {
            let mut options = nvidia();
            change(&mut options);
            assert!(has_ours(&options, test), "{options:?}");
        }
    }

    #[test]
    fn results_are_kept_by_what_they_depend_on() {
        let home = Folder::scratch("shelf");
        let shelf = Shelf(home.to_path_buf());
        let tests = [Test::skipped("a", "why".to_owned())];
        let when = When::default();
        shelf.put("a: b", "key", &tests, &when).unwrap();
        let found = ["key", "other"].map(|key| shelf.get("a: b", key));
        // The runs `a; b` and `a: b` have the same file name.
        let stranger = shelf.get("a: c", "key").or(shelf.get("a; b", "key"));
        let kept = found[0].as_ref().unwrap();
        assert_eq!(kept.tests, tests);
        assert!(found[1].is_none() && stranger.is_none());
    }

    #[test]
    fn a_pass_continues_only_on_the_same_tree() {
        let home = Folder::scratch("pass");
        let pass =
            |tree: &str, restart| Pass::of(home.to_path_buf(), tree.to_owned(), restart).unwrap();
        let ran = |pass: &Pass| pass.shelf.get("run", &pass.tree).is_some();
        let when = When::default();
        let put = |pass: &Pass| pass.shelf.put("run", &pass.tree, &[], &when).unwrap();
        put(&pass("a", false));
        assert!(ran(&pass("a", false)));
        assert!(!ran(&pass("a", true)));
        put(&pass("a", false));
        assert!(!ran(&pass("b", false)));
        let again = pass("a", false);
        assert!(!ran(&again));
        again.end().unwrap();
        assert!(!home.exists());
    }
}
