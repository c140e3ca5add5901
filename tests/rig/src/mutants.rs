// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Builds of our module with one rule taken out, and the tests that must see it: `tests/mutants`, one patch each.
//!
//! A test that passes says little as long as nobody has seen it fail. For each patch the tests it names must pass on the
//! module as it is and fail on the patched one, in the way that the patch declares.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::io::Seek as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use anyhow::anyhow;
use anyhow::bail;
use anyhow::ensure;
use anyhow::Context as _;
use anyhow::Result;
use clap::Args;
use regex::Regex;
use rustix::fs::memfd_create;
use rustix::fs::MemfdFlags;

use crate::patch;
use crate::paths::Paths;
use crate::programs;
use crate::progress::duration;
use crate::progress::Stage;
use crate::results::Format;
use crate::results::Reader;
use crate::results::Test;
use crate::results::Verdict;
use crate::setup;
use crate::stamp;
use crate::stamp::Key;
use crate::toolchain::Toolchain;
use crate::vm;
use crate::vm::Options;

/// How long a test on the host may take before it counts as hanging; it needs a three-hundredth.
const HOST_PATIENCE: Duration = Duration::from_secs(30);

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
    /// `gdr test` in a virtual machine with these options.
    Vm(Vec<String>),
}

/// One test of a mutant.
#[derive(Debug, Clone)]
struct Check {
    place: Place,
    /// The test's name, or a part of it.
    test: String,
    /// All of them must be seen.
    signs: Vec<Sign>,
}

impl Check {
    /// What the result goes by.
    fn label(&self, mutant: &str) -> String {
        match &self.place {
            Place::Host { package, .. } => format!("{mutant} ({package}: {})", self.test),
            Place::Vm(words) => {
                let words: String = words.iter().map(|word| format!(" {word}")).collect();
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
        (Place::Vm(words.collect()), first)
    };
    Ok(Check {
        place,
        test,
        signs: Vec::new(),
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

/// The module's sources, and what the workspace's packages are compiled from besides.
const SOURCES: &[&str] = &["Kbuild", "src", "rust-bindings", "docs/observe.md"];

/// A copy of the sources with patches applied. There is one copy for all mutants, and of its files only those that
/// change are written, so that make and cargo compile no more than they must.
pub(crate) fn patched(paths: &Paths, patches: &[PathBuf]) -> Result<PathBuf> {
    let work = paths.cache.join("mutants/patching");
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
    let copy = paths.cache.join("mutants/source");
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

/// The test programs of a package, compiled from patched sources, or kept from the last time.
fn host_programs(
    paths: &Paths,
    toolchain: &Toolchain,
    patches: &[PathBuf],
    package: &str,
    release: bool,
) -> Result<Vec<PathBuf>> {
    let name = patches
        .last()
        .and_then(|patch| patch.file_stem())
        .map_or("unchanged".into(), |stem| {
            stem.to_string_lossy().into_owned()
        });
    let home = paths
        .cache
        .join("mutants/programs")
        .join(package)
        .join(&name);
    let stamp = home.with_extension("stamp");
    let mut key = Key::default();
    key.text("tools", &toolchain.versions("gcc")?);
    for input in [
        "Cargo.toml",
        "Cargo.lock",
        "src",
        "docs/observe.md",
        "tests/host",
        "tests/loom",
    ] {
        key.path(&paths.repo, &paths.repo.join(input))?;
    }
    for patch in patches {
        key.path(&paths.repo, patch)?;
    }
    let key = key.finish();
    if !stamp::is_fresh(&stamp, &key) {
        let copy = patched(paths, patches)?;
        let stage = Stage::begin(format!("mutant {name}: compiling {package}"));
        let output = toolchain
            .cargo(paths)
            // To cargo the copy is the repository, and what is compiled from either the other's.
            .env("CARGO_TARGET_DIR", paths.cache.join("mutants/target"))
            .args(["test", "--locked", "--no-run", "-p", package])
            .args(release.then_some("--release"))
            .current_dir(&copy)
            .stdin(Stdio::null())
            .output()
            .context("cannot start cargo")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{name} does not compile:\n{said}");
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home)?;
        // `  Executable unittests src/lib.rs (target/debug/deps/peermem_host-0123456789abcdef)`
        for line in said.lines().filter(|line| line.contains("Executable")) {
            let program = line
                .rsplit_once('(')
                .and_then(|(_, rest)| rest.strip_suffix(')'))
                .with_context(|| format!("cargo said {line:?}"))?;
            let program = copy.join(program);
            let target = home.join(program.file_name().context("a program without a name")?);
            fs::copy(&program, &target).with_context(|| program.display().to_string())?;
        }
        stamp::set(&stamp, &key)?;
        stage.done("");
    }
    let programs = stamp::files(&home)?;
    ensure!(!programs.is_empty(), "{package} has no tests");
    Ok(programs)
}

/// What came of some tests on one build.
#[derive(Debug, Default)]
struct Seen {
    tests: Vec<Test>,
    hung: bool,
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

    /// The line that shows `sign`.
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
                failed
                    .iter()
                    .flat_map(|test| test.notes.iter().map(String::as_str))
                    .chain(self.output.lines())
                    .find(|line| pattern.is_match(line))
                    .map(|line| line.trim().to_owned())
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

/// Runs test programs of the host.
fn on_host(programs: &[PathBuf], test: &str) -> Result<Seen> {
    let mut seen = Seen::default();
    for program in programs {
        // Without a name: whoever kills this rig leaves nothing behind that the next takes for a program.
        let mut output = fs::File::from(memfd_create("output", MemfdFlags::CLOEXEC)?);
        let mut child = Command::new(program)
            .args([test, "--test-threads=1"])
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let deadline = Instant::now() + HOST_PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() > deadline {
                seen.hung = true;
                child.kill()?;
                break child.wait()?;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut text = Vec::new();
        output.rewind()?;
        output.read_to_end(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        let mut reader = Reader::new(Format::Cargo);
        for line in text.lines() {
            reader.line(line);
        }
        let mut tests = reader.finish().0;
        if !status.success() && !seen.hung && tests.is_empty() {
            // A panic in a destructor ends the program before it can say which test it was.
            tests.push(Test {
                name: test.to_owned(),
                verdict: Verdict::Failed,
                notes: vec![format!("the program died: {status}")],
            });
        }
        seen.tests.append(&mut tests);
        seen.output.push_str(&text);
    }
    Ok(seen)
}

/// The options of a machine, as a command line has them.
fn options(words: &[String]) -> Result<Options> {
    // A kernel that goes on after an oops leaves locks behind, and the machine would hang.
    let usual = "rig --param persistent_api_support=0 --gpus 1 --append oops=panic";
    let usual = usual.split(' ');
    let words = usual.chain(words.iter().map(String::as_str));
    let mut options = Options::parse(words)?;
    options.timeout.get_or_insert(180);
    options.env.push(vm::SYSTEM_PROGRAMS.to_owned());
    Ok(options)
}

/// Runs cases of the verbs program in a machine.
fn in_machine(paths: &Paths, options: &Options, cases: &[&str]) -> Result<Seen> {
    let boot = setup::boot(paths, options)?;
    let mut command = programs::gdr_command(paths, "test");
    command.extend(cases.iter().map(|case| (*case).to_owned()));
    let (outcome, (reader, output)) = vm::run_with(
        paths,
        options,
        &boot,
        &command,
        (Reader::new(Format::Ktap), String::new()),
        |(reader, output), line, is_error| {
            if !is_error {
                reader.line(line);
            }
            output.push_str(line);
            output.push('\n');
        },
    )?;
    Ok(Seen {
        tests: reader.finish().0,
        hung: outcome.timed_out,
        problems: outcome.failures,
        output,
    })
}

/// Each group of tests that need the same machine, on what they must pass on: by base and options, the outcome.
#[derive(Default)]
struct Machines(BTreeMap<(Vec<PathBuf>, Vec<String>), Result<Seen, String>>);

impl Machines {
    fn passed(
        &mut self,
        paths: &Paths,
        mutants: &[Mutant],
        mutant: &Mutant,
        check: &Check,
        words: &[String],
    ) -> Result<()> {
        let key = (mutant.base().to_vec(), words.to_vec());
        let seen = self.0.entry(key).or_insert_with(|| {
            let mut cases: Vec<&str> = mutants
                .iter()
                .filter(|other| other.base() == mutant.base())
                .flat_map(|other| &other.checks)
                .filter(|other| other.place == check.place)
                .map(|other| other.test.as_str())
                .collect();
            cases.sort_unstable();
            cases.dedup();
            let run = || {
                let mut options = options(words)?;
                options.patches = mutant.base().to_vec();
                // One machine for all of them.
                options.timeout = options.timeout.map(|one| one + 10 * cases.len() as u64);
                in_machine(paths, &options, &cases)
            };
            run().map_err(|error| format!("{error:#}"))
        });
        match seen {
            Ok(seen) => seen.passed(&check.test),
            Err(error) => bail!("{error}"),
        }
    }
}

/// Runs one test on both builds, and returns what showed the mutant.
fn run_check(
    paths: &Paths,
    toolchain: &Toolchain,
    machines: &mut Machines,
    mutants: &[Mutant],
    mutant: &Mutant,
    check: &Check,
) -> Result<Vec<String>> {
    let seen = match &check.place {
        Place::Host { package, release } => {
            let programs = |patches| {
                let _lock = setup::Lock::take(paths, "modules")?;
                host_programs(paths, toolchain, patches, package, *release)
            };
            on_host(&programs(mutant.base())?, &check.test)?.passed(&check.test)?;
            on_host(&programs(&mutant.patches)?, &check.test)?
        }
        Place::Vm(words) => {
            machines.passed(paths, mutants, mutant, check, words)?;
            let mut options = options(words)?;
            options.mutant = Some(mutant.name.clone());
            in_machine(paths, &options, &[&check.test])?
        }
    };
    check
        .signs
        .iter()
        .map(|sign| seen.shows(&check.test, sign))
        .collect()
}

/// Runs the tests of all mutants that `words` choose; each test of each mutant is one result.
pub(crate) fn tests(paths: &Paths, words: &[String]) -> Result<Vec<Test>> {
    let toolchain = Toolchain::find(paths)?;
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
    let mut machines = Machines::default();
    let mut results = Vec::new();
    for mutant in &mutants {
        for check in &mutant.checks {
            let started = Instant::now();
            let result = run_check(paths, &toolchain, &mut machines, &mutants, mutant, check);
            let test = Test::of(check.label(&mutant.name), result);
            println!(
                "      {} {} ({})",
                if test.verdict == Verdict::Passed {
                    "seen  "
                } else {
                    "FAILED"
                },
                test.name,
                duration(started.elapsed())
            );
            for note in &test.notes {
                println!("             {note}");
            }
            results.push(test);
        }
    }
    Ok(results)
}

/// `rig mutants`.
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
    setup::all(paths, [crate::kernel::DEFAULT])?;
    let started = Instant::now();
    let results = tests(paths, &selection.words)?;
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
    use std::os::unix::fs::PermissionsExt as _;

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
             # vm: rules.4.x --kernel debug\n# sign: report BUG: .*\n# sign: hangs\n",
        )
        .unwrap();
        assert_eq!((&*mutant.rule, &*mutant.without), ("4", "b: c"));
        assert_eq!(mutant.base(), [PathBuf::from("/x/holds.diff")]);
        assert_eq!(mutant.checks.len(), 2);
        assert_eq!(mutant.checks[1].signs.len(), 2);
        let words = vec!["--kernel".to_owned(), "debug".to_owned()];
        assert_eq!(mutant.checks[1].place, Place::Vm(words));
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
        ] {
            assert!(parse(&good.replace(from, to)).is_err(), "{from:?} {to:?}");
        }
    }

    #[test]
    fn programs_stay_alone_in_their_folder() {
        let folder = std::env::temp_dir().join(format!("rig-mutants-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join("program");
        fs::write(&program, "#!/bin/sh\nls \"${0%/*}\"; echo \"$1\" >&2\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let seen = on_host(&[program], "x");
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(seen.unwrap().output, "program\nx\n");
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
            ..Seen::default()
        };
        let shows = |seen: &Seen, text: &str| seen.shows("rules.4.x", &sign(text).unwrap()).is_ok();
        let failed = seen(Verdict::Failed, &["the kernel reports:\n  BUG: x\n"]);
        assert!(shows(&failed, "fails two pins"));
        assert!(!shows(&failed, "fails three pins"));
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
}
