// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Builds of our module with one rule taken out, and the tests that must see it: `tests/mutants`, one patch each.
//!
//! A test that passes says little as long as nobody has seen it fail. For each patch the tests it names must pass on the
//! module as it is and fail on the patched one, in the way that the patch declares.

mod host;
mod kept;
mod machine;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use std::{fs, thread};

use anyhow::{anyhow, bail, ensure, Context as _, Result};
use clap::Args;
use regex::Regex;

use crate::paths::Paths;
use crate::progress::duration;
use crate::results::{Test, Verdict};
use crate::toolchain::Toolchain;
use crate::{patch, setup, stamp};

use kept::Kept;
use machine::{Job, Machines};

/// The note of a test that was not run, since all that it depends on is as it was when it passed.
pub(crate) const UNCHANGED: &str = "unchanged";

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Only those in whose name, or test, one of these is
    words: Vec<String>,
    /// Names them and what they take out, and runs nothing
    #[arg(long)]
    list: bool,
}

/// How a test shows that it has seen the mutant.
#[derive(Debug, Clone)]
enum Sign {
    /// It fails, and says something that matches.
    Fails(Regex),
    /// The kernel log has a report that matches.
    Report(Regex),
    /// It does not come back.
    Hangs,
}

impl std::fmt::Display for Sign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fails(pattern) => write!(f, "fails /{pattern}/"),
            Self::Report(pattern) => write!(f, "report /{pattern}/"),
            Self::Hangs => f.write_str("hangs"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// `cargo test` of a package in a copy of the workspace, with its profile.
    Host { package: String, release: bool },
    /// `gdr test` in a virtual machine with these options, the module with these parameters beside the usual one.
    Vm {
        options: Vec<String>,
        parameters: Vec<String>,
    },
}

/// One test of a mutant.
#[derive(Debug, Clone)]
struct Check {
    place: Place,
    /// The test's name, or a part of it.
    test: String,
    /// All of them must be seen.
    signs: Vec<Sign>,
    /// In a machine of its own, whatever the signs: it leaves something behind there.
    alone: bool,
}

impl Check {
    /// What the result goes by.
    fn label(&self, mutant: &str) -> String {
        match &self.place {
            Place::Host { package, .. } => format!("{mutant} ({package}: {})", self.test),
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

/// One patch of `tests/mutants`.
#[derive(Debug)]
pub(crate) struct Mutant {
    pub(crate) name: String,
    rule: String,
    removes: String,
    without: String,
    /// Applied in this order. All but the last belong to what the tests must pass on.
    pub(crate) patches: Vec<PathBuf>,
    checks: Vec<Check>,
}

/// Lines `# key: value` at a patch's head.
fn header(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .take_while(|line| line.starts_with('#'))
        .filter_map(|line| line.trim_start_matches('#').trim().split_once(": "))
}

impl Mutant {
    fn parse(name: &str, file: &Path, text: &str) -> Result<Self> {
        let mut mutant = Self {
            name: name.to_owned(),
            rule: String::new(),
            removes: String::new(),
            without: String::new(),
            patches: Vec::new(),
            checks: Vec::new(),
        };
        for (key, value) in header(text) {
            match key {
                "rule" => value.clone_into(&mut mutant.rule),
                "removes" => value.clone_into(&mut mutant.removes),
                "without" => value.clone_into(&mut mutant.without),
                // Points where a test can hold both builds, the one with the rule and the one without.
                "on" => mutant.patches.push(file.with_file_name(value)),
                "host" | "vm" => mutant.checks.push(check(key, value)?),
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
                        .context("alone before the test that it belongs to")?
                        .alone = true;
                }
                "SPDX-License-Identifier" => {}
                _ => bail!("its head has an unknown key: {key}"),
            }
        }
        mutant.patches.push(file.to_owned());
        for (key, value) in [
            ("rule", &mutant.rule),
            ("removes", &mutant.removes),
            ("without", &mutant.without),
        ] {
            ensure!(!value.is_empty(), "its head has no {key}");
        }
        ensure!(!mutant.checks.is_empty(), "it names no test");
        for check in &mutant.checks {
            ensure!(!check.signs.is_empty(), "{} has no sign", check.test);
            let in_machine = matches!(check.place, Place::Vm { .. });
            ensure!(
                in_machine || !check.alone,
                "{} is in no machine",
                check.test
            );
        }
        Ok(mutant)
    }

    /// What its tests must pass on.
    fn base(&self) -> &[PathBuf] {
        &self.patches[..self.patches.len() - 1]
    }
}

fn check(key: &str, value: &str) -> Result<Check> {
    let mut words = value.split_whitespace().map(str::to_owned);
    let mut next = || words.next().context("a test without a name");
    let first = next()?;
    let (place, test) = if key == "host" {
        // Loom is not to be borne without optimisation.
        let release = first == "peermem-loom";
        let package = first;
        (Place::Host { package, release }, next()?)
    } else {
        // The module is loaded for each test: its parameters make no other machine.
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

fn sign(value: &str) -> Result<Sign> {
    let (kind, pattern) = value.split_once(' ').unwrap_or((value, ""));
    let pattern = Regex::new(pattern)?;
    match kind {
        "fails" => Ok(Sign::Fails(pattern)),
        "report" => Ok(Sign::Report(pattern)),
        "hangs" => Ok(Sign::Hangs),
        _ => bail!("a sign is none of fails, report, hangs: {kind}"),
    }
}

/// All of them, by name.
fn all(paths: &Paths) -> Result<Vec<Mutant>> {
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

/// The mutant of that name.
pub(crate) fn find(paths: &Paths, name: &str) -> Result<Mutant> {
    all(paths)?
        .into_iter()
        .find(|mutant| mutant.name == name)
        .ok_or_else(|| anyhow!("there is no mutant {name} in tests/mutants"))
}

/// What a change can break of them, seen without compiling anything: that each patch fits, and that the test that it names
/// is there. Says how many there are.
pub(crate) fn fit(paths: &Paths) -> Result<String> {
    let mutants = all(paths)?;
    let mut tests = String::new();
    for directory in ["src", "tests/host", "tests/loom", "tests/verbs"] {
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
            if target.exists() {
                continue;
            }
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::copy(paths.repo.join(name), &target).with_context(|| name.to_owned())?;
        }
    }
    for patch in patches {
        patch::apply(&copy, patch, 0)?;
    }
    Ok(())
}

/// What the packages on the host put around the module's logic.
const FAKES: &str = "tests/fakes";

/// The module's sources, and what the workspace's packages are compiled from besides.
const SOURCES: &[&str] = &[
    "Kbuild",
    "src",
    "rust-bindings",
    "portable",
    "docs/observe.md",
    FAKES,
];

/// A copy of the sources with patches applied, for the module. There is one copy for all mutants, and of its files only those
/// that change are written, so that make compiles no more than it must.
pub(crate) fn patched(paths: &Paths, patches: &[PathBuf]) -> Result<PathBuf> {
    patched_as(paths, patches, "source")
}

/// The same by another name, for who does not want to wait for the other.
fn patched_as(paths: &Paths, patches: &[PathBuf], name: &str) -> Result<PathBuf> {
    let copy = paths.cache.join("mutants").join(name);
    let work = copy.with_extension("new");
    let _ = fs::remove_dir_all(&work);
    for name in SOURCES
        .iter()
        .map(|name| (*name).to_owned())
        .chain(workspace(paths)?)
    {
        for file in stamp::files(&paths.repo.join(&name))? {
            let target = work.join(file.strip_prefix(&paths.repo)?);
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::copy(&file, &target).with_context(|| file.display().to_string())?;
        }
    }
    for patch in patches {
        // Without fuzz: what does not fit exactly may take out something else.
        patch::apply(&work, patch, 0)?;
    }
    for file in stamp::files(&work)? {
        stamp::update(&copy.join(file.strip_prefix(&work)?), &fs::read(&file)?)?;
    }
    for file in stamp::files(&copy)? {
        if !work.join(file.strip_prefix(&copy)?).exists() {
            fs::remove_file(&file)?;
        }
    }
    Ok(copy)
}

/// What cargo wants to see before it compiles any package.
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

/// What came of some tests on one build.
#[derive(Debug, Default)]
struct Seen {
    tests: Vec<Test>,
    hung: bool,
    /// It came to its end, whatever that was.
    ended: bool,
    /// What went wrong beside the tests: for a machine, reports of its kernel.
    problems: Vec<String>,
    output: String,
}

impl Seen {
    /// The tests whose name contains `name`.
    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Test> {
        self.tests
            .iter()
            .filter(move |test| test.name.contains(name))
    }

    /// Nothing but success.
    fn passed(&self, name: &str) -> Result<()> {
        ensure!(!self.hung, "{name} hangs on the module as it is");
        ensure!(
            self.problems.is_empty(),
            "on the module as it is: {}",
            self.summary()
        );
        ensure!(self.ended, "{name} did not end on the module as it is");
        let mut count = 0;
        for test in self.of(name) {
            ensure!(
                test.verdict == Verdict::Passed,
                "{} on the module as it is: {:?} {}",
                test.name,
                test.verdict,
                test.notes.join("; ")
            );
            count += 1;
        }
        ensure!(count > 0, "there is no test {name}");
        Ok(())
    }

    /// What shows `sign`.
    fn shows(&self, name: &str, sign: &Sign) -> Result<String> {
        match sign {
            Sign::Hangs => {
                ensure!(self.hung, "{name} came back");
                Ok("hangs".to_owned())
            }
            Sign::Report(pattern) => self
                .problems
                .iter()
                .flat_map(|problem| problem.lines())
                .find(|line| pattern.is_match(line))
                .map(|line| line.trim().to_owned())
                .ok_or_else(|| anyhow!("no report matches {pattern}: {}", self.summary())),
            Sign::Fails(pattern) => {
                let failed: Vec<_> = self
                    .of(name)
                    .filter(|test| test.verdict == Verdict::Failed)
                    .collect();
                ensure!(
                    !failed.is_empty(),
                    "{name} passes without the rule: {}",
                    self.summary()
                );
                // What other tests say, and the program around them, is no sign.
                failed
                    .iter()
                    .find_map(|test| {
                        let said = test.notes.join("\n");
                        let found = pattern.find(&said)?.range();
                        let from = said[..found.start].rfind('\n').map_or(0, |at| at + 1);
                        let to = said[found.end..]
                            .find('\n')
                            .map_or(said.len(), |at| found.end + at);
                        Some(said[from..to].trim().to_owned())
                    })
                    .ok_or_else(|| {
                        anyhow!(
                            "{name} fails otherwise than by {pattern}: {}",
                            self.summary()
                        )
                    })
            }
        }
    }

    /// What a reader needs who was not there.
    fn summary(&self) -> String {
        let mut lines: Vec<String> = self
            .tests
            .iter()
            .filter(|test| test.verdict != Verdict::Passed)
            .map(|test| {
                format!(
                    "{}: {:?} {}",
                    test.name,
                    test.verdict,
                    test.notes.join("; ")
                )
            })
            .collect();
        // A report's first lines say what it is.
        for problem in &self.problems {
            lines.extend(problem.lines().take(8).map(str::to_owned));
        }
        if self.hung {
            lines.push("timed out".to_owned());
        }
        let said: Vec<&str> = self.output.lines().collect();
        if self.tests.is_empty() {
            let tail = &said[said.len().saturating_sub(8)..];
            lines.extend(tail.iter().map(|line| (*line).to_owned()));
        }
        lines.join("\n")
    }
}

/// Tells of one result.
fn tell(test: &Test, started: Instant) {
    let word = match test.verdict {
        Verdict::Passed => "seen  ",
        _ => "FAILED",
    };
    println!(
        "      {word} {} ({})",
        test.name,
        duration(started.elapsed())
    );
    for line in test.notes.iter().flat_map(|note| note.lines()) {
        println!("             {line}");
    }
}

/// Runs one test on both builds, and returns what showed the mutant.
fn on_host(
    paths: &Paths,
    toolchain: &Toolchain,
    mutant: &Mutant,
    check: &Check,
) -> Result<Vec<String>> {
    let Place::Host { package, release } = &check.place else {
        bail!("{} is in a machine", check.test);
    };
    let run = |patches| {
        let programs = {
            let _lock = setup::Lock::take(paths, "packages")?;
            host::programs(paths, toolchain, patches, package, *release)?
        };
        host::run(&programs, &check.test)
    };
    run(mutant.base())?.passed(&check.test)?;
    let seen = run(&mutant.patches)?;
    check
        .signs
        .iter()
        .map(|sign| seen.shows(&check.test, sign))
        .collect()
}

/// Those whose name, or test, has one of `words`; all if there are none.
fn chosen(paths: &Paths, words: &[String]) -> Result<Vec<Mutant>> {
    let mut mutants = all(paths)?;
    for mutant in &mut mutants {
        let name = mutant.name.clone();
        let chosen = |check: &Check| words.iter().any(|word| check.label(&name).contains(word));
        mutant
            .checks
            .retain(|check| words.is_empty() || chosen(check));
    }
    mutants.retain(|mutant| !mutant.checks.is_empty());
    ensure!(
        !mutants.is_empty(),
        "no mutant and no test has that in its name"
    );
    Ok(mutants)
}

/// Runs the tests of all mutants that `words` choose; each test of each mutant is one result. Unless it is `fresh`, those are
/// left out that have passed with the same sources, patch and case: their only note is [`UNCHANGED`].
///
/// Kernels, modules and programs must have been made.
pub(crate) fn tests(paths: &Paths, words: &[String], fresh: bool) -> Result<Vec<Test>> {
    let toolchain = Toolchain::find(paths)?;
    let mutants = chosen(paths, words)?;
    let mut kept = Kept::new(paths, &toolchain)?;
    // Each with the key that its result is kept by; a result when there is one.
    let mut all = Vec::new();
    for mutant in &mutants {
        for check in &mutant.checks {
            let key = kept.key(mutant, check)?;
            let name = check.label(&mutant.name);
            let unchanged = !fresh && kept.has(&name, &key);
            let result = unchanged.then(|| Test::of(name.clone(), Ok(vec![UNCHANGED.to_owned()])));
            all.push((mutant, check, name, key, result));
        }
    }
    let left = all.iter().filter(|one| one.4.is_some()).count();
    if left > 0 {
        println!(
            "      {left} of {} unchanged since they were seen, and not run",
            all.len()
        );
    }
    let (mut on_hosts, mut in_machines) = (Vec::new(), Vec::new());
    for (number, (mutant, check, _, _, result)) in all.iter().enumerate() {
        match check.place {
            _ if result.is_some() => {}
            Place::Host { .. } => on_hosts.push((number, *mutant, *check)),
            Place::Vm { .. } => in_machines.push(Job {
                number,
                mutant,
                check,
            }),
        }
    }
    let found: Mutex<Vec<(usize, Test)>> = Mutex::new(Vec::new());
    let add = |number: usize, started: Instant, result| {
        let Some((_, _, name, key, _)) = all.get(number) else {
            return;
        };
        let test = Test::of(name.clone(), result);
        if test.verdict == Verdict::Passed {
            kept.add(name, key);
        }
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        tell(&test, started);
        found.push((number, test));
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            for (number, mutant, check) in on_hosts {
                let started = Instant::now();
                let result = on_host(paths, &toolchain, mutant, check);
                add(number, started, result);
            }
        });
        let mut started = Instant::now();
        Machines::new(paths).run(in_machines, |number, result| {
            add(number, started, result);
            started = Instant::now();
        });
    });
    let mut results: Vec<(usize, Test)> = all
        .into_iter()
        .enumerate()
        .filter_map(|(number, one)| Some((number, one.4?)))
        .collect();
    results.extend(found.into_inner().unwrap_or_else(PoisonError::into_inner));
    results.sort_by_key(|(number, _)| *number);
    Ok(results.into_iter().map(|(_, test)| test).collect())
}

/// `runner mutants`.
pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    if selection.list {
        for mutant in all(paths)? {
            println!("{} (rule {})", mutant.name, mutant.rule);
            println!("    takes out: {}", mutant.removes);
            println!("    without it: {}", mutant.without);
            for check in &mutant.checks {
                let signs: Vec<String> = check.signs.iter().map(Sign::to_string).collect();
                println!("    {} {}", check.test, signs.join(", "));
            }
        }
        return Ok(0);
    }
    let mutants = chosen(paths, &selection.words)?;
    let mut kernels = vec![crate::kernel::DEFAULT.to_owned()];
    for check in mutants.iter().flat_map(|mutant| &mutant.checks) {
        kernels.extend(machine::kernel(check)?);
    }
    kernels.sort_unstable();
    kernels.dedup();
    setup::all(paths, kernels.iter().map(String::as_str))?;
    let started = Instant::now();
    let results = tests(paths, &selection.words, true)?;
    let failed = results
        .iter()
        .filter(|test| test.verdict != Verdict::Passed)
        .count();
    println!(
        "{} seen, {failed} failed ({})",
        results.len() - failed,
        duration(started.elapsed())
    );
    Ok(i32::from(failed > 0))
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
    fn heads_of_patches() {
        let mutant = parse(
            "# SPDX-License-Identifier: X\n# rule: 4\n# removes: a\n# without: b: c\n# on: holds.diff\n\
             # host: peermem-host tests::x\n# sign: fails left: .*right\n\
             # vm: rules.4.x --kernel debug --param a=1\n# sign: report BUG: .*\n# sign: hangs\n\
             # alone: it stays\n",
        )
        .unwrap();
        assert_eq!((&*mutant.rule, &*mutant.without), ("4", "b: c"));
        assert_eq!(mutant.base(), [PathBuf::from("/x/holds.diff")]);
        assert_eq!(mutant.checks.len(), 2);
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
            [false, true]
        );
    }

    #[test]
    fn heads_that_say_too_little() {
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

    #[test]
    fn signs_are_looked_for() {
        let test = |verdict| Test {
            name: "rules.4.x".to_owned(),
            verdict,
            notes: vec!["failure: two pins".to_owned()],
        };
        let seen = |verdict, problems: &[&str]| Seen {
            tests: vec![test(verdict)],
            problems: problems.iter().map(|text| (*text).to_owned()).collect(),
            ended: true,
            output: "KTAP version 1\n# failure: two pins\nnot ok 1 rules.4.x\n".to_owned(),
            ..Seen::default()
        };
        let shows = |seen: &Seen, text: &str| seen.shows("rules.4.x", &sign(text).unwrap()).is_ok();
        let failed = seen(Verdict::Failed, &["the kernel reports:\n  BUG: x\n"]);
        assert!(shows(&failed, "fails two pins"));
        assert!(!shows(&failed, "fails three pins"));
        // Any run says that.
        assert!(!shows(&failed, "fails version"));
        // What other cases say is theirs.
        let mut two = seen(Verdict::Failed, &[]);
        two.tests.push(Test {
            name: "rules.5.y".to_owned(),
            notes: vec!["failure: three pins".to_owned()],
            ..test(Verdict::Failed)
        });
        assert!(!shows(&two, "fails three pins"));
        // And a sign may be longer than a line.
        two.tests[0].notes = ["left: 1", "right: 2", "x"].map(str::to_owned).to_vec();
        assert!(shows(&two, r"fails left: 1\s+right: 2"));
        assert!(!shows(&two, r"fails left: 1.*right: 2"));
        assert!(shows(&failed, "report BUG"));
        assert!(!shows(&failed, "hangs"));
        assert!(failed.passed("rules.4.x").is_err());
        let passed = seen(Verdict::Passed, &[]);
        assert!(!shows(&passed, "fails two pins"));
        assert!(passed.passed("rules.4.x").is_ok());
        assert!(passed.passed("rules.5").is_err());
        assert!(seen(Verdict::Skipped(String::new()), &[])
            .passed("rules.4.x")
            .is_err());
    }

    /// What is said whatever fails is no sign of anything.
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
