// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of mutants that cargo compiles for this machine.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context as _, Result};
use rustix::fs::{memfd_create, MemfdFlags};

use super::seen::Seen;
use crate::patch::{patched_as, FAKES};
use crate::paths::Paths;
use crate::progress::Stage;
use crate::results::{Format, Reader, Test, Verdict};
use crate::stamp;
use crate::stamp::Key;
use crate::toolchain::Toolchain;

/// Time after which a test counts as hanging, if no deadlock is detected earlier. No test needs a
/// hundredth of this time.
const PATIENCE: Duration = Duration::from_secs(300);

/// Returns the directory of a package of the workspace that has tests for mutants.
pub(super) fn directory(package: &str) -> String {
    match package.trim_start_matches("peermem-") {
        "preload" => "preload".to_owned(),
        name => format!("tests/{name}"),
    }
}

/// Returns the test programs of a package, compiled from patched sources. Uses the programs of the
/// previous compilation if no input has changed.
pub(super) fn programs(
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
    let workspace = ["Cargo.toml", "Cargo.lock", "src", "portable"];
    key.inputs(&paths.repo, &workspace)?;
    let package_too = ["docs/observe.md", FAKES, &directory(package)];
    key.inputs(&paths.repo, &package_too)?;
    for patch in patches {
        key.path(&paths.repo, patch)?;
    }
    let key = key.finish();
    if !stamp::is_fresh(&stamp, &key) {
        let copy = patched_as(paths, patches, "packages")?;
        let stage = Stage::begin(format!("mutant {name}: compiling {package}"));
        let output = toolchain
            .cargo(paths)
            // cargo cannot distinguish the copy from the repository, and would use files compiled
            // from one for the other.
            .env("CARGO_TARGET_DIR", paths.cache.join("mutants/target"))
            // Debug information is not needed.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .args(["test", "--locked", "--no-run", "-p", package])
            .args(release.then_some("--release"))
            .current_dir(&copy)
            .stdin(Stdio::null())
            .output()
            .context("cannot start cargo")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{name} does not compile:\n{said}");
        let _ = fs::remove_dir_all(&home);
        // `  Executable unittests src/lib.rs (target/debug/deps/peermem_host-0123456789abcdef)`
        for line in said.lines().filter(|line| line.contains("Executable")) {
            let program = line
                .rsplit_once('(')
                .and_then(|(_, rest)| rest.strip_suffix(')'))
                .with_context(|| format!("cargo said {line:?}"))?;
            let program = copy.join(program);
            let name = program.file_name().context("a program without a name")?;
            stamp::put(&program, &home.join(name))?;
            // The tests of a library for LD_PRELOAD find the library in their own folder.
            let library = format!("lib{}.so", package.replace('-', "_"));
            let from = program.with_file_name(&library);
            if from.exists() {
                stamp::put(&from, &home.join(library))?;
            }
        }
        stamp::set(&stamp, &key)?;
        stage.done("");
    }
    let mut programs = stamp::files(&home)?;
    programs.retain(|file| file.extension().is_none());
    ensure!(!programs.is_empty(), "{package} has no tests");
    Ok(programs)
}

pub(super) fn run(programs: &[PathBuf], test: &str) -> Result<Seen> {
    let mut seen = Seen::default();
    for program in programs {
        // The file has no name. If this runner is killed, no file is left that the next runner
        // would take for a program.
        let mut output = fs::File::from(memfd_create("output", MemfdFlags::CLOEXEC)?);
        let mut child = Command::new(program)
            .args([test, "--test-threads=1"])
            // A backtrace is not needed, and names in it would look like the test's output.
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let deadline = Instant::now() + PATIENCE;
        let mut before = None;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            let asleep = asleep(&Path::new("/proc").join(child.id().to_string()));
            if Instant::now() > deadline || (asleep.is_some() && asleep == before) {
                seen.hung = true;
                child.kill()?;
                break child.wait()?;
            }
            before = asleep;
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut text = Vec::new();
        output.rewind()?;
        output.read_to_end(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        let died = !status.success() && !seen.hung;
        seen.tests.extend(results(&text, test, died));
        seen.output.push_str(&text);
    }
    seen.ended = !seen.hung;
    Ok(seen)
}

/// Returns how often each thread of a process has slept so far, if all threads sleep in futex(2)
/// without a timeout. If two calls return the same numbers, no thread ran between the calls, and no
/// thread is left to wake another.
fn asleep(process: &Path) -> Option<BTreeMap<PathBuf, String>> {
    let mut threads = BTreeMap::new();
    for entry in fs::read_dir(process.join("task")).ok()? {
        let thread = entry.ok()?.path();
        // The file has the call's number, then the call's arguments. The fourth argument is the
        // timeout.
        let call = fs::read_to_string(thread.join("syscall")).ok()?;
        let mut words = call.split_whitespace();
        let (number, limit) = (words.next()?, words.nth(3)?);
        if number != "202" || limit != "0x0" {
            return None;
        }
        let status = fs::read_to_string(thread.join("status")).ok()?;
        let slept = status
            .lines()
            .find(|line| line.starts_with("voluntary_ctxt_switches"))?;
        threads.insert(thread, slept.to_owned());
    }
    Some(threads)
}

/// Parses the tests of a program's output. If the program `died` and no test has failed, `test`
/// counts as failed. A panic in a destructor ends a program before the program can name the test.
fn results(text: &str, test: &str, died: bool) -> Vec<Test> {
    let reader = Reader::of(Format::Cargo, text);
    let mut notes = vec!["the program died".to_owned()];
    notes.extend_from_slice(reader.unfinished());
    let mut tests = reader.finish().0;
    if died && tests.iter().all(|test| test.verdict == Verdict::Passed) {
        let died = Test::new(test, Verdict::Failed);
        tests.push(Test { notes, ..died });
    }
    tests
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn script(name: &str, text: &str) -> Seen {
        let folder = crate::paths::Folder::scratch(&format!("mutants-{name}"));
        let program = folder.join("program");
        fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        run(&[program], "x").unwrap()
    }

    #[test]
    fn programs_stay_alone_in_their_folder() {
        let seen = script("alone", "ls \"${0%/*}\"; echo \"$1\" >&2");
        assert_eq!(seen.output, "program\nx\n");
    }

    #[test]
    fn output_belongs_to_its_test() {
        let text = "running 3 tests\ntest a::x ... FAILED\ntest b::x ... ok\ntest c::x ... FAILED\n\nfailures:\n\n\
                    ---- a::x stdout ----\nleft: 1\nright: 2\n\n---- c::x stdout ----\nleft: 3\n\n\n\
                    failures:\n    a::x\n    c::x\n\ntest result: FAILED. 1 passed; 2 failed\n";
        let tests = results(text, "x", false);
        assert_eq!(tests[0].notes, ["left: 1", "right: 2", ""]);
        assert!(tests[1].notes.is_empty());
        assert_eq!(tests[2].notes, ["left: 3", "", ""]);
        // A test that kills the program has no section of output. The last lines belong to this
        // test.
        let text =
            "running 2 tests\nnoise\ntest a::x ... ok\ntest b::x ... thread panicked on drop\n";
        let tests = results(text, "x", true);
        assert_eq!(tests[1].verdict, Verdict::Failed);
        assert_eq!(
            tests[1].notes,
            ["the program died", "test b::x ... thread panicked on drop"]
        );
        assert_eq!(results(text, "x", false).len(), 1);
    }

    #[test]
    fn a_running_or_sleeping_test_is_not_deadlocked() {
        assert_eq!(asleep(Path::new("/proc/self")), None);
        let seen = script("sleeps", "sleep 0.3; echo awake");
        assert!(!seen.hung);
        assert_eq!(seen.output, "awake\n");
    }
}
