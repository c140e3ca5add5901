// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Checks the form of the code: formatting, lints, licences.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, ensure, Context as _, Result};

use crate::kernel::Extent;
use crate::lock::Lock;
use crate::modules::Builder;
use crate::paths::Paths;
use crate::progress::Stage;
use crate::results::{Test, Verdict};
use crate::toolchain::Toolchain;
use crate::{apt, git, kernel, programs, setup};

/// Returns `true` for a file that needs no licence line: a licence text, a generated file, a patch
/// or JSON. A patch has the licence of the file that it changes. JSON has no comments.
fn is_exempt(name: &str) -> bool {
    name.starts_with("LICENSES/")
        || name == "Cargo.lock"
        || name.starts_with("tests/kernel/patches/")
        || name.starts_with("cli/tests/golden/")
        || name.ends_with(".json")
}

/// Types of checkpatch's messages that do not apply outside the kernel's tree or are matters of
/// taste.
const CHECKPATCH_IGNORED: &str =
    "FILE_PATH_CHANGES,MISSING_SIGN_OFF,SPDX_LICENSE_TAG,COMMIT_LOG_LONG_LINE,LINUX_VERSION_CODE";

struct Linter<'a> {
    paths: &'a Paths,
    toolchain: &'a Toolchain,
    builder: &'a Builder<'a>,
    /// Directory that has `scripts/checkpatch.pl`.
    kernel_source: PathBuf,
    /// The files that slow checks look at, or `None` for all files.
    changed: Option<Vec<String>>,
}

impl Linter<'_> {
    /// Returns `true` if a check must run: `concerns` accepts a changed file, or all files are
    /// checked.
    fn looks_at(&self, concerns: impl Fn(&str) -> bool) -> bool {
        let changed = self.changed.as_deref();
        changed.is_none_or(|changed| changed.iter().any(|name| concerns(name)))
    }

    /// Returns the files for a check: all files that `is_one` accepts, or only the changed ones
    /// among them.
    fn files(&self, what: &str, is_one: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut names = tracked(self)?;
        names.retain(|name| is_one(name));
        if names.is_empty() {
            bail!("no {what} found");
        }
        if let Some(changed) = &self.changed {
            names.retain(|name| changed.contains(name));
        }
        Ok(names)
    }
}

/// A check: its name and its function. The function's error is the complaint.
type Check = (&'static str, fn(&Linter<'_>) -> Result<()>);

pub(crate) const CLIPPY_HOST: &str = "clippy, host";

/// Name of the check that compiles the object of the portable build.
pub(crate) const SAME_OBJECT: &str = "the same object from another directory";

const CHECKS: &[Check] = &[
    ("licence lines", licences),
    ("first words of comments", first_words),
    ("rustfmt, host", format_host),
    ("rustfmt, kernel", format_kernel),
    (CLIPPY_HOST, clippy_host),
    ("clippy, kernel", clippy_kernel),
    ("no panic in the module", no_panic),
    (SAME_OBJECT, same_object),
    ("checkpatch", checkpatch),
    ("shellcheck", shellcheck),
    ("promtool", promtool),
];

/// Runs the checks whose names `wanted` accepts, and returns one test for each. If `changed` is
/// given, slow checks only look at these files.
pub(crate) fn run(
    paths: &Paths,
    changed: Option<Vec<String>>,
    wanted: fn(&str) -> bool,
) -> Result<Vec<Test>> {
    apt::install(paths, apt::LINT)?;
    let toolchain = setup::tools(paths)?;
    let kernel = setup::find_kernel(paths, &toolchain, kernel::DEFAULT, Extent::Patched)?;
    let linter = Linter {
        paths,
        toolchain: &toolchain,
        builder: &Builder::new(paths, &toolchain, &kernel, false),
        kernel_source: kernel.source(),
        changed,
    };
    let mut tests = Vec::new();
    for (name, check) in CHECKS.iter().filter(|(name, _)| wanted(name)) {
        // Takes the lock for each check separately, so that a VM that is about to start waits for
        // one check, not for all. The check with cargo needs no lock, because cargo has its own.
        let _lock = (*name != CLIPPY_HOST)
            .then(|| Lock::take(paths, "modules"))
            .transpose()?;
        let stage = Stage::begin(format!("lint: {name}"));
        let test = Test::of((*name).to_owned(), check(&linter).map(|()| Vec::new()));
        stage.done(if test.verdict == Verdict::Passed {
            "ok"
        } else {
            "failed"
        });
        tests.push(test);
    }
    Ok(tests)
}

/// Returns the names of all files of the repository that git does not ignore, without links.
fn tracked(linter: &Linter<'_>) -> Result<Vec<String>> {
    let repo = &linter.paths.repo;
    let mut names = git::tracked(repo)?;
    names.retain(|name| {
        fs::symlink_metadata(repo.join(name)).is_ok_and(|metadata| metadata.is_file())
    });
    Ok(names)
}

fn licences(linter: &Linter<'_>) -> Result<()> {
    let mut without = Vec::new();
    for name in tracked(linter)? {
        if is_exempt(&name) {
            continue;
        }
        let text = fs::read(linter.paths.repo.join(&name)).with_context(|| name.clone())?;
        let text = String::from_utf8_lossy(&text);
        let has_line = text
            .lines()
            .take(3)
            .any(|line| line.contains("SPDX-License-Identifier:"));
        if !has_line {
            without.push(name);
        }
    }
    if !without.is_empty() {
        bail!("no SPDX line at the top of:\n{}", without.join("\n"));
    }
    Ok(())
}

/// Words that must not begin a comment. A comment must begin with its subject or its verb.
const RIDDLES: [&str; 8] = ["What", "Whether", "Who", "Of", "As", "That", "So", "With"];

/// Returns the comments that begin with one of [`RIDDLES`], each with the number of its line.
fn riddles(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    // `is_open` is `true` between `/*` and `*/`. `has_begun` is `true` after the first line of a
    // paragraph.
    let (mut is_open, mut has_begun) = (false, false);
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let comment = match is_open {
            true => Some(line.strip_prefix('*').unwrap_or(line)),
            false => ["///", "//!", "//", "/**", "/*"]
                .iter()
                .find_map(|marker| line.strip_prefix(marker)),
        };
        let Some(comment) = comment else {
            has_begun = false;
            continue;
        };
        let comment = comment.trim();
        let word = comment.split(|c: char| !c.is_alphanumeric()).next();
        let begins = !has_begun || (!is_open && line.starts_with("/*"));
        if begins && word.is_some_and(|word| RIDDLES.contains(&word)) {
            found.push((number, comment));
        }
        is_open = (is_open || line.starts_with("/*")) && !line.contains("*/");
        has_begun = !comment.is_empty();
    }
    found
}

fn first_words(linter: &Linter<'_>) -> Result<()> {
    let is_code = |name: &str| [".rs", ".c", ".h"].iter().any(|end| name.ends_with(end));
    let mut found = Vec::new();
    for name in linter.files("code", is_code)? {
        let text =
            fs::read_to_string(linter.paths.repo.join(&name)).with_context(|| name.clone())?;
        for (number, comment) in riddles(&text) {
            found.push(format!("{name}:{number}: {comment}"));
        }
    }
    if !found.is_empty() {
        bail!(
            "comments that begin with {}:\n{}",
            RIDDLES.join(", "),
            found.join("\n")
        );
    }
    Ok(())
}

fn passes(command: &mut Command) -> Result<()> {
    quiet(command, |_| false)
}

/// Runs a command that must succeed and print no line that `complains` accepts.
fn quiet(command: &mut Command, complains: impl Fn(&str) -> bool) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    // Standard input is empty, unless the caller sets it.
    let output = command
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    if !output.status.success() || said.lines().any(complains) {
        bail!("{}", said.trim());
    }
    Ok(())
}

fn format_host(linter: &Linter<'_>) -> Result<()> {
    let mut cargo = linter.toolchain.cargo(linter.paths);
    cargo.args(["fmt", "--all", "--check"]);
    passes(cargo.current_dir(&linter.paths.repo))
}

fn is_kernel_rust(name: &str) -> bool {
    ["src/", "kunit/", "rust-bindings/"]
        .iter()
        .any(|directory| name.starts_with(directory))
        && name.ends_with(".rs")
}

fn format_kernel(linter: &Linter<'_>) -> Result<()> {
    let files = linter.files("kernel Rust", is_kernel_rust)?;
    if files.is_empty() {
        return Ok(());
    }
    let mut rustfmt = Command::new("/usr/bin/rustfmt");
    rustfmt.args(["--check", "--edition", "2021"]).args(&files);
    passes(rustfmt.current_dir(&linter.paths.repo))
}

fn clippy_host(linter: &Linter<'_>) -> Result<()> {
    let mut cargo = linter.toolchain.cargo(linter.paths);
    cargo.args([
        "clippy",
        "--workspace",
        "--release",
        "--locked",
        "--all-targets",
    ]);
    cargo.args(["--", "-D", "warnings"]);
    passes(cargo.current_dir(&linter.paths.repo))
}

fn clippy_kernel(linter: &Linter<'_>) -> Result<()> {
    if linter.looks_at(|name| name == "Kbuild" || is_kernel_rust(name)) {
        linter.builder.clippy()?;
    }
    Ok(())
}

/// Fails if the object depends on the directory in which it is built. Users verify a release by the
/// object's hash.
fn same_object(linter: &Linter<'_>) -> Result<()> {
    let folders = ["portable/", "src/", "rust-bindings/"];
    if linter.looks_at(|name| folders.iter().any(|folder| name.starts_with(folder))) {
        linter.builder.object_is_reproducible()?;
    }
    Ok(())
}

/// Fails if our module calls a panicking function of `core`, for a check that the compiler could
/// not remove.
fn no_panic(linter: &Linter<'_>) -> Result<()> {
    let calls = linter.builder.calls()?;
    if !calls.iter().any(|name| name == "nvidia_p2p_put_pages") {
        bail!("the module's calls were not read: {} names", calls.len());
    }
    let panics: Vec<String> = calls
        .into_iter()
        .filter(|name| name.contains("panic"))
        .collect();
    if !panics.is_empty() {
        bail!("the module can panic: {}", panics.join(", "));
    }
    Ok(())
}

/// Folder of C files, and types of checkpatch's messages that do not apply there. A file belongs to
/// the first row that fits.
const CHECKPATCH: [(&str, &str); 3] = [
    // CUDA's interface prescribes the type names. Programs do not have the kernel's macros for
    // attributes.
    ("tests/cuda/", "NEW_TYPEDEFS,PREFER_DEFINED_ATTRIBUTE_MACRO"),
    // The tests also set errno to positive numbers, and define functions of other libraries.
    (
        "preload/",
        "NEW_TYPEDEFS,PREFER_DEFINED_ATTRIBUTE_MACRO,AVOID_EXTERNS,COMPLEX_MACRO,EMBEDDED_FUNCTION_NAME,\
         FUNCTION_ARGUMENTS,SYMBOLIC_PERMS,USE_NEGATIVE_ERRNO",
    ),
    ("", ""),
];

fn checkpatch(linter: &Linter<'_>) -> Result<()> {
    let script = linter.kernel_source.join("scripts/checkpatch.pl");
    let mut sources = linter.files("C", |name| name.ends_with(".c") || name.ends_with(".h"))?;
    let patches = linter.files("patches of the kernel", |name| {
        name.ends_with(".patch") && name.starts_with("tests/kernel/")
    })?;
    // checkpatch passes file names to a shell unquoted. Through this link, the file names have no
    // blanks.
    let folder = linter.paths.run_directory()?;
    let repo = folder.join("repository");
    std::os::unix::fs::symlink(&linter.paths.repo, &repo)?;
    let mut problems = Vec::new();
    let mut run = |option: &str, ignored: &str, files: &[String]| {
        if files.is_empty() {
            return;
        }
        let mut command = Command::new("perl");
        command
            .arg(&script)
            .args("--no-tree --terse --quiet --no-summary --show-types".split(' '))
            .args(["--max-line-length=100", option])
            .arg(format!("--ignore={CHECKPATCH_IGNORED},{ignored}"))
            .args(files.iter().map(|name| repo.join(name)))
            // Runs outside the work tree, where checkpatch would take every tracked file for a
            // source.
            .current_dir("/");
        if let Err(error) = quiet(&mut command, |line| !line.trim().is_empty()) {
            problems.push(error.to_string());
        }
    };
    for (folder, ignored) in CHECKPATCH {
        let (files, rest) = sources
            .into_iter()
            .partition(|name| name.starts_with(folder));
        sources = rest;
        run("--file", ignored, &files);
    }
    // Older kernels have no kzalloc_obj().
    run("--no-signoff", "ALLOC_WITH_SIZEOF", &patches);
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

fn shellcheck(linter: &Linter<'_>) -> Result<()> {
    let scripts = linter.files("shell scripts", |name| {
        is_shell(&linter.paths.repo.join(name))
    })?;
    if scripts.is_empty() {
        return Ok(());
    }
    let mut shellcheck = Command::new("shellcheck");
    shellcheck.args(["--external-sources", "--check-sourced"]);
    passes(shellcheck.args(&scripts).current_dir(&linter.paths.repo))
}

const ALERTS: &str = "packaging/peermemctl/alerts";

/// Output of the exporter for synthetic machines.
const METRICS: &str = "cli/tests/golden/export.prom";

/// Checks the rules for Prometheus, runs their tests, and checks the exporter's metrics.
fn promtool(linter: &Linter<'_>) -> Result<()> {
    if !linter.looks_at(|name| name.starts_with(ALERTS) || name == METRICS) {
        return Ok(());
    }
    let program = programs::of_prometheus(linter.paths, "promtool")?;
    let metrics = linter.paths.repo.join(METRICS);
    let metrics = fs::File::open(&metrics).with_context(|| metrics.display().to_string())?;
    quiet(
        Command::new(&program)
            .args(["check", "metrics"])
            .stdin(metrics),
        |_| true,
    )?;
    let names = tracked(linter)?;
    let (tests, rules): (Vec<&String>, Vec<&String>) = names
        .iter()
        .filter(|name| name.starts_with(ALERTS) && name.ends_with(".yml"))
        .partition(|name| name.ends_with(".test.yml"));
    for (action, files) in [("check", rules), ("test", tests)] {
        if files.is_empty() {
            bail!("nothing to {action}: no rules found");
        }
        quiet(
            Command::new(&program)
                .args([action, "rules"])
                .args(files)
                .current_dir(&linter.paths.repo),
            |line| line.contains("FAILED"),
        )?;
    }
    Ok(())
}

fn is_shell(file: &Path) -> bool {
    let Ok(contents) = fs::read(file) else {
        return false;
    };
    let first = contents
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    let first = String::from_utf8_lossy(first);
    first.starts_with("#!")
        && first
            .split(['/', ' '])
            .any(|word| matches!(word, "sh" | "bash"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_words_of_comments() {
        // Each line begins with a quotation mark, so that the lint does not take it for a comment.
        let text = [
            "/// Of late, in seconds.",
            "/// What a second line begins with is free.",
            "fn a() {} // As is the end of a line of code.",
            "",
            "//! Reads a file.",
            "//!",
            "//! So does this paragraph.",
            "",
            "    // Whether.",
            "/* Who reads. */",
            "/*",
            " * That goes on,",
            " * With a second line.",
            " *",
            " * What begins a paragraph.",
            " */",
            "*pointer = What;",
            "/* A mark. */ int code;",
            "What = 0;",
            "/// Office hours.",
            "/// `What` as a name.",
        ]
        .join("\n");
        let found: Vec<_> = riddles(&text)
            .into_iter()
            .map(|(number, _)| number)
            .collect();
        assert_eq!(found, [1, 7, 9, 10, 12, 15]);
    }
}
