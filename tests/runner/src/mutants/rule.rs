// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The mutants of `tests/mutants`: the rule that each patch removes, and the tests that must
//! notice.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, ensure, Context as _, Result};
use regex::Regex;

use crate::paths::Paths;
use crate::{patch, stamp};

/// Sign by which a test shows that it has noticed the mutant.
#[derive(Debug, Clone)]
pub(super) enum Sign {
    /// The test fails with a message that matches.
    Fails(Regex),
    /// The kernel log has a report that matches.
    Report(Regex),
    Hangs,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// KUnit tests in a VM with these options.
    Kunit { options: Vec<String> },
    /// `cargo test` of a package in a copy of the workspace, with the given profile.
    Host { package: String, release: bool },
    /// `gdr test` in a VM with these options. The module gets these parameters in addition to the
    /// usual parameter.
    Vm {
        options: Vec<String>,
        parameters: Vec<String>,
    },
}

#[derive(Debug, Clone)]
pub(super) struct Check {
    pub(super) place: Place,
    /// Name of the test, or a part of it.
    pub(super) test: String,
    /// Signs that must all be seen.
    pub(super) signs: Vec<Sign>,
    /// `true` if the test needs its own VM whatever its signs are, because the test leaves
    /// something behind.
    pub(super) alone: bool,
}

impl Check {
    pub(super) fn label(&self, mutant: &str) -> String {
        match &self.place {
            Place::Host { package, .. } => format!("{mutant} ({package}: {})", self.test),
            Place::Kunit { options } => {
                let words = [&["kunit".to_owned()], &options[..]].concat().join(" ");
                format!("{mutant} ({words}: {})", self.test)
            }
            Place::Vm {
                options,
                parameters,
            } => {
                let words: String = parameters
                    .iter()
                    .chain(options)
                    .map(|word| format!(" {word}"))
                    .collect();
                format!("{mutant} (vm{words}: {})", self.test)
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Mutant {
    pub(crate) name: String,
    /// Patches in the order of application. The last patch makes the mutant. The other patches make
    /// the base module, on which the tests must pass.
    pub(crate) patches: Vec<PathBuf>,
    pub(super) checks: Vec<Check>,
}

/// Returns the lines `# key: value` at the head of a patch.
fn header(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .take_while(|line| line.starts_with('#'))
        .filter_map(|line| line.trim_start_matches('#').trim().split_once(": "))
}

impl Mutant {
    pub(super) fn parse(name: &str, file: &Path, text: &str) -> Result<Self> {
        let mut mutant = Self {
            name: name.to_owned(),
            patches: Vec::new(),
            checks: Vec::new(),
        };
        for (key, value) in header(text) {
            match key {
                // These lines are for readers. The runner does not use them.
                "rule" | "removes" | "without" => {}
                // `on` names another patch, which is applied with and without the mutant. This
                // patch adds points where a test can pause.
                "on" => mutant.patches.push(file.with_file_name(value)),
                "host" | "kunit" | "vm" => mutant.checks.push(check(key, value)?),
                "sign" => mutant
                    .checks
                    .last_mut()
                    .context("a sign before the test that it belongs to")?
                    .signs
                    .push(sign(value)?),
                "alone" => {
                    mutant
                        .checks
                        .last_mut()
                        .context("`alone` before the test that it belongs to")?
                        .alone = true;
                }
                "SPDX-License-Identifier" => {}
                _ => bail!("its head has an unknown key: {key}"),
            }
        }
        mutant.patches.push(file.to_owned());
        for key in ["rule", "removes", "without"] {
            let is_it = |(other, value): (&str, &str)| other == key && !value.is_empty();
            ensure!(header(text).any(is_it), "its head has no {key}");
        }
        ensure!(!mutant.checks.is_empty(), "it names no test");
        for check in &mutant.checks {
            ensure!(!check.signs.is_empty(), "{} has no sign", check.test);
            let in_machine = matches!(check.place, Place::Vm { .. });
            ensure!(
                in_machine || !check.alone,
                "{} has the line `alone`, but does not run in a VM",
                check.test
            );
        }
        Ok(mutant)
    }

    /// Returns the patches of the base module, on which the tests must pass.
    pub(super) fn base(&self) -> &[PathBuf] {
        &self.patches[..self.patches.len() - 1]
    }

    pub(super) fn changed(&self) -> Result<Vec<String>> {
        let mut files = Vec::new();
        for patch in &self.patches {
            let text = fs::read_to_string(patch).with_context(|| patch.display().to_string())?;
            files.extend(changed(&text).map(str::to_owned));
        }
        Ok(files)
    }

    /// Returns `true` if the portable build must show the mutant, too. Such a mutant changes a C
    /// file of the module, or a Rust file that has `unsafe`. The portable build cannot have a
    /// mutant whose patches add points for tests, because its bindings lack the functions of these
    /// points.
    pub(super) fn is_for_portable(&self, repo: &Path) -> Result<bool> {
        if !self.base().is_empty() {
            return Ok(false);
        }
        for file in self.changed()? {
            let text = fs::read_to_string(repo.join(&file)).with_context(|| file.clone())?;
            if !file.ends_with(".rs") || text.contains("unsafe {") {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn changed(patch: &str) -> impl Iterator<Item = &str> {
    patch.lines().filter_map(|line| line.strip_prefix("+++ b/"))
}

fn check(key: &str, value: &str) -> Result<Check> {
    let mut words = value.split_whitespace().map(str::to_owned);
    let mut next = || words.next().context("a test without a name");
    let first = next()?;
    let (place, test) = if key == "host" {
        // Loom is too slow without optimisation.
        let release = first == "peermem-loom";
        let package = first;
        (Place::Host { package, release }, next()?)
    } else if key == "kunit" {
        let options = words.collect();
        (Place::Kunit { options }, first)
    } else {
        // The module is loaded for each test, so its parameters do not require another VM.
        let (mut options, mut parameters) = (Vec::new(), Vec::new());
        while let Some(word) = words.next() {
            if word == "--param" {
                parameters.push(words.next().context("--param without a parameter")?);
            } else {
                options.push(word);
            }
        }
        let place = Place::Vm {
            options,
            parameters,
        };
        (place, first)
    };
    Ok(Check {
        place,
        test,
        signs: Vec::new(),
        alone: false,
    })
}

pub(super) fn sign(value: &str) -> Result<Sign> {
    let (kind, pattern) = value.split_once(' ').unwrap_or((value, ""));
    let pattern = Regex::new(pattern)?;
    match kind {
        "fails" => Ok(Sign::Fails(pattern)),
        "report" => Ok(Sign::Report(pattern)),
        "hangs" => Ok(Sign::Hangs),
        _ => bail!("unknown sign (not fails, report or hangs): {kind}"),
    }
}

pub(super) fn all(paths: &Paths) -> Result<Vec<Mutant>> {
    let directory = paths.repo.join("tests/mutants");
    let mut found = Vec::new();
    for file in stamp::files(&directory)? {
        if file.extension().is_none_or(|suffix| suffix != "patch") {
            continue;
        }
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        found.push(Mutant::parse(&name, &file, &text).with_context(|| format!("mutant {name}"))?);
    }
    Ok(found)
}

pub(crate) fn find(paths: &Paths, name: &str) -> Result<Mutant> {
    all(paths)?
        .into_iter()
        .find(|mutant| mutant.name == name)
        .ok_or_else(|| anyhow!("there is no mutant {name} in tests/mutants"))
}

/// Checks without compiling that each patch applies, and that each test that a patch names exists.
/// Returns a message with the number of mutants.
pub(crate) fn fit(paths: &Paths) -> Result<String> {
    let mutants = all(paths)?;
    let mut tests = String::new();
    for directory in [
        "src",
        "kunit",
        "preload",
        "tests/host",
        "tests/loom",
        "tests/verbs",
    ] {
        for file in stamp::files(&paths.repo.join(directory))? {
            if file.extension().is_some_and(|suffix| suffix == "rs") {
                tests += &fs::read_to_string(&file)?;
            }
        }
    }
    let mut wrong = Vec::new();
    for mutant in &mutants {
        if let Err(error) = fits(paths, &mutant.patches) {
            wrong.push(format!("{}: {error:#}", mutant.name));
        }
        for check in &mutant.checks {
            let declared = match check.place {
                Place::Host { .. } => {
                    let name = check.test.rsplit("::").next().unwrap_or_default();
                    format!("fn {name}")
                }
                Place::Kunit { .. } => {
                    let name = check.test.rsplit('.').next().unwrap_or_default();
                    format!("fn {name}()")
                }
                Place::Vm { .. } => format!("\"{}", check.test),
            };
            if !tests.contains(&declared) {
                wrong.push(format!("{}: there is no test {}", mutant.name, check.test));
            }
        }
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(format!("{} fit", mutants.len()))
}

/// Applies patches to a copy of the files that they change.
fn fits(paths: &Paths, patches: &[PathBuf]) -> Result<()> {
    let copy = paths.cache.join("mutants/fit");
    let _ = fs::remove_dir_all(&copy);
    for patch in patches {
        let text = fs::read_to_string(patch).with_context(|| patch.display().to_string())?;
        for name in text.lines().filter_map(|line| line.strip_prefix("--- a/")) {
            let target = copy.join(name);
            if !target.exists() {
                stamp::put(&paths.repo.join(name), &target)?;
            }
        }
    }
    for patch in patches {
        patch::apply(&copy, patch, 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(head: &str) -> Result<Mutant> {
        Mutant::parse(
            "m",
            Path::new("/x/m.patch"),
            &format!("{head}--- a/src/x.rs\n# not: this\n"),
        )
    }

    #[test]
    fn a_patch_names_what_it_changes() {
        let patch = "# rule: 1\n--- a/src/x.rs\n+++ b/src/x.rs\n@@\n+++ c\n--- a/y\n+++ b/y\n";
        assert_eq!(changed(patch).collect::<Vec<_>>(), ["src/x.rs", "y"]);
    }

    #[test]
    fn files_with_unsafe_are_for_the_portable_build() {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mutant = |file: &str| {
            let patch = std::env::temp_dir().join(format!("border-{}", std::process::id()));
            fs::write(&patch, format!("+++ b/{file}\n")).unwrap();
            let head = "# rule: 1\n# removes: a\n# without: b\n# vm: x\n# sign: hangs\n";
            let mutant = Mutant::parse("m", &patch, head).unwrap();
            let found = mutant.is_for_portable(&repo).unwrap();
            fs::remove_file(&patch).unwrap();
            found
        };
        assert!(mutant("src/nv.rs") && mutant("src/helpers.c") && mutant("src/compat.h"));
        assert!(!mutant("src/revocable.rs") && !mutant("src/ranges.rs"));
        let file = repo.join("tests/mutants/10-takes-at-exit.patch");
        let head = fs::read_to_string(&file).unwrap();
        let with_points = Mutant::parse("m", &file, &head).unwrap();
        assert!(!with_points.is_for_portable(&repo).unwrap());
    }

    #[test]
    fn heads_of_patches() {
        let mutant = parse(
            "# SPDX-License-Identifier: X\n# rule: 4\n# removes: a\n# without: b: c\n# on: holds.diff\n\
             # host: peermem-host tests::x\n# sign: fails left: .*right\n\
             # vm: rules.4.x --kernel debug --param a=1\n# sign: report BUG: .*\n# sign: hangs\n\
             # alone: it stays\n# kunit: mapping.x --kernel debug\n# sign: fails y\n",
        )
        .unwrap();
        assert_eq!(mutant.base(), [PathBuf::from("/x/holds.diff")]);
        assert_eq!(mutant.checks.len(), 3);
        assert_eq!(mutant.checks[1].signs.len(), 2);
        let place = Place::Vm {
            options: ["--kernel", "debug"].map(str::to_owned).to_vec(),
            parameters: vec!["a=1".to_owned()],
        };
        assert_eq!(mutant.checks[1].place, place);
        assert_eq!(
            mutant
                .checks
                .iter()
                .map(|check| check.alone)
                .collect::<Vec<_>>(),
            [false, true, false]
        );
        let options = ["--kernel", "debug"].map(str::to_owned).to_vec();
        assert_eq!(mutant.checks[2].place, Place::Kunit { options });
        let label = mutant.checks[2].label("m");
        assert_eq!(label, "m (kunit --kernel debug: mapping.x)");
    }

    #[test]
    fn heads_without_a_required_line() {
        let good = "# rule: 4\n# removes: a\n# without: b\n# host: p x\n# sign: hangs\n";
        assert!(parse(good).is_ok());
        for (from, to) in [
            ("# sign: hangs\n", ""),
            ("# sign: hangs\n", "# sign: smiles\n"),
            ("# host: p x\n# sign: hangs\n", ""),
            ("# host: p x\n", ""),
            ("# rule: 4\n", ""),
            ("# rule: 4\n", "# rul: 4\n"),
            ("# sign: hangs\n", "# sign: hangs\n# alone: why\n"),
        ] {
            assert!(parse(&good.replace(from, to)).is_err(), "{from:?} {to:?}");
        }
    }

    /// Checks that no sign matches a message that every failure prints.
    #[test]
    fn no_sign_is_in_any_failure() {
        let paths = Paths {
            repo: Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."),
            cache: PathBuf::new(),
        };
        let mutants = all(&paths).unwrap();
        assert!(!mutants.is_empty());
        for mutant in mutants {
            for check in &mutant.checks {
                let (package, module) = check.test.split_once("::").unwrap_or(("", ""));
                let always = format!(
                    "KTAP version 1\n1..1\nseed 8098986842105146624\nseconds 0.12\nfailure: \n\
                     failure: left behind: pins_live=1 mappings_live=1 allocs_live=1\nfailure: panicked\n\
                     kernel: nvidia-peermem: loaded\nnot ok 1 {}\nTotals: pass:0 fail:1 skip:0\n\
                     thread '{}' panicked at tests/host/src/{package}.rs:1:1:\n{module}\n\
                     assertion failed: \nassertion `left == right` failed\n  left: 0\n right: 1\n\
                     note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n\
                     ibv_reg_mr: Bad address (os error 14)\n",
                    check.test, check.test
                );
                for sign in &check.signs {
                    if let Sign::Fails(pattern) = sign {
                        assert!(!pattern.is_match(&always), "{}: {pattern}", mutant.name);
                    }
                }
            }
        }
    }
}
