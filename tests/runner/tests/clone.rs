// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests the Makefile and `bootstrap` in clones, some of whose paths have blanks, colons and
//! non-ASCII letters. Scripts replace cargo and the programs that `bootstrap` runs.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A clone with only the files that these tests need. The clone is removed on drop.
struct Clone {
    base: PathBuf,
    folder: PathBuf,
}

impl Drop for Clone {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.base);
    }
}

fn script(file: &Path, text: &str) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
}

impl Clone {
    fn new(test: &str, name: &str) -> Self {
        let base = std::env::temp_dir().join(format!("runner-{test}-{}", std::process::id()));
        let folder = base.join(name);
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        fs::create_dir_all(folder.join("tests/runner")).unwrap();
        fs::copy(repo.join("Makefile"), folder.join("Makefile")).unwrap();
        let clone = Self { base, folder };
        // bootstrap runs programs of this machine by their full names. The copy runs scripts
        // instead.
        let text = fs::read_to_string(repo.join("tests/runner/bootstrap")).unwrap();
        assert!(text.contains("/usr/bin/cargo build"));
        let text = text.replace(
            "/usr/bin/",
            &format!("{}/", clone.base.join("bin").display()),
        );
        let text = text.replacen("#!/bin/bash", "#!/usr/bin/env bash", 1);
        fs::write(clone.folder.join("tests/runner/bootstrap"), text).unwrap();
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(clone.folder.join("tests/runner/bootstrap"), mode).unwrap();
        clone
    }

    /// Adds a compiler that makes a program which prints its environment and arguments.
    fn with_cargo(self) -> Self {
        self.with_program("echo \"$RUNNER_REPO\"; for word; do echo \"<$word>\"; done")
    }

    /// Adds a compiler that makes this program.
    fn with_program(self, program: &str) -> Self {
        let bin = self.base.join("bin");
        script(&bin.join("program"), program);
        script(
            &bin.join("cargo"),
            "case $1 in --version) echo cargo 1.99.0; exit ;; esac\n\
             echo \"$@\" >\"$CARGO_TARGET_DIR/../arguments\"\n\
             mkdir -p \"$CARGO_TARGET_DIR/debug\"\n\
             cp \"${0%/*}/program\" \"$CARGO_TARGET_DIR/debug/runner\"",
        );
        script(&bin.join("rustc"), "echo rustc 1.99.0");
        script(&bin.join("cc"), "");
        self
    }

    fn cache(&self) -> PathBuf {
        self.base.join("cache")
    }

    fn make(&self, arguments: &[&str]) -> Output {
        self.make_command(arguments).output().unwrap()
    }

    fn make_command(&self, arguments: &[&str]) -> Command {
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new("make");
        command
            .args(arguments)
            .current_dir(&self.folder)
            .env(
                "PATH",
                format!("{}:{path}", self.base.join("bin").display()),
            )
            .env("XDG_CACHE_HOME", self.cache())
            .env_remove("MAKEFLAGS")
            .env_remove("MAKELEVEL");
        command
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn kbuild_targets_refuse_such_a_path_first() {
    for name in ["a b", "a:b", "a ", "a\tb"] {
        let clone = Clone::new("refuses", name);
        for target in ["module", "install", "compile"] {
            let result = clone.make(&[target]);
            let said = text(&result.stderr);
            assert_eq!(result.status.code(), Some(2), "{said}");
            assert_eq!(text(&result.stdout), "");
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains("move this clone"), "{said}");
        }
        assert_eq!(clone.make(&["help"]).status.code(), Some(0));
    }
    let clone = Clone::new("takes", "ü-b");
    let said = text(&clone.make(&["module"]).stderr);
    assert!(!said.contains("move this clone"), "{said}");
}

#[test]
fn the_rig_is_started_from_any_path() {
    for name in ["a b", "ü 'x' \"y\" $HOME", "a:b", "-n"] {
        let clone = Clone::new("starts", name).with_cargo();
        let result = clone.make(&["vm", "CMD=echo \"a  b\" '$x'"]);
        assert!(result.status.success(), "{}", text(&result.stderr));
        let said = text(&result.stdout);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(
            lines,
            [
                &clone.folder.to_string_lossy(),
                "<vm>",
                "<-->",
                "<sh>",
                "<-c>",
                "<echo \"a  b\" '$x'>"
            ]
        );
        let told = fs::read_to_string(clone.cache().join("peermem-rs/arguments")).unwrap();
        let manifest = clone.folder.join("Cargo.toml");
        assert!(told.contains(&*manifest.to_string_lossy()), "{told}");
    }
}

/// Checks that make tells kbuild to use the gcc that built the kernel. The file auto.conf has the
/// name of this gcc in quotes on some kernels, and without quotes on others.
#[test]
fn the_gcc_that_built_the_kernel_is_used() {
    // Columns: a line of auto.conf, an argument of make, the variable CC of the environment, and
    // the argument for kbuild.
    let table = "\
\"gcc-98 (Debian 98.1) 98.1\" | KVER=0 | | CC=gcc-98
gcc-98 (Debian 98.1) 98.1 | KVER=0 | | CC=gcc-98
gcc-97 (Debian 97.1) 97.1 | KVER=0 | |
gcc-98 (Debian 98.1) 98.1 | KVER=0 | /opt/conda/bin/cc | CC=gcc-98
gcc-98 (Debian 98.1) 98.1 | CC=gcc | |
gcc-98 (Debian 98.1) 98.1 | LLVM=1 | |
gcc-98 (Debian 98.1) 98.1 | CROSS_COMPILE=other- | | CC=other-gcc-98
other-gcc-98 (Debian 98.1) 98.1 | CROSS_COMPILE=other- | | CC=other-gcc-98
gcc-99 (Debian 99.1) 99.1 | CROSS_COMPILE=other- | |";
    let clone = Clone::new("compiler", "clone");
    for name in ["gcc-98", "other-gcc-98", "gcc-99"] {
        script(&clone.base.join("bin").join(name), "");
    }
    let configuration = clone.folder.join("include/config/auto.conf");
    fs::create_dir_all(configuration.parent().unwrap()).unwrap();
    for row in table.lines() {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        fs::write(
            &configuration,
            format!("CONFIG_CC_VERSION_TEXT={}\n", columns[0]),
        )
        .unwrap();
        let show = "--eval=show:;@echo '$(KBUILD_CC)'";
        let mut make = clone.make_command(&["-s", show, "show", "KDIR=.", columns[1]]);
        for name in ["CC", "LLVM", "CROSS_COMPILE"] {
            make.env_remove(name);
        }
        if !columns[2].is_empty() {
            make.env("CC", columns[2]);
        }
        let result = make.output().unwrap();
        assert_eq!(text(&result.stdout).trim(), columns[3], "{row}");
    }
}

/// Checks that make deletes an object if the copy fails midway, for example because the disk is
/// full.
#[test]
fn a_truncated_object_is_deleted() {
    let clone = Clone::new("truncates", "clone");
    script(&clone.folder.join("portable/object.sh"), "");
    script(
        &clone.base.join("bin/cp"),
        "eval \"to=\\${$#}\"; echo part >\"$to\"; exit 1",
    );
    let object = "portable/nvidia_peermem-x86_64.o_shipped";
    let result = clone.make(&[object]);
    assert_eq!(result.status.code(), Some(2), "{}", text(&result.stderr));
    assert!(!clone.folder.join(object).exists());
}

/// Checks that only one checkout compiles at a time. A second checkout would remove files that this
/// checkout's cargo is writing, and would replace its program.
#[test]
fn only_one_checkout_compiles_at_a_time() {
    let clone = Clone::new("waits", "second")
        .with_program("flock -n \"$XDG_CACHE_HOME/peermem-rs/locks/runner\" echo free");
    let cache = clone.cache().join("peermem-rs");
    let begun = cache.join("target/debug/.fingerprint/runner-0");
    fs::create_dir_all(&begun).unwrap();
    fs::create_dir(cache.join("locks")).unwrap();
    let lock = fs::File::create(cache.join("locks/runner")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut second = clone
        .make_command(&["vm"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut stderr = BufReader::new(second.stderr.take().unwrap());
    stderr.read_line(&mut said).unwrap();
    let was_there = begun.exists();
    drop(lock);
    let output = second.wait_with_output().unwrap();
    assert_eq!(
        said,
        "  waiting for another process that is building the same product (runner) …\n"
    );
    assert!(was_there);
    assert!(!begun.exists());
    // Other checkouts can compile while the program runs.
    assert_eq!(text(&output.stdout), "free\n");
}

/// Checks that obstacles to the installation of a compiler are reported before anything is changed.
#[test]
fn bootstrap_says_what_this_machine_lacks() {
    // Columns: a name, the programs that report a problem, and the sentence that bootstrap prints.
    let cases = "\
machine | uname=echo riscv64 | this machine is riscv64
debian | apt-get= | this is not Debian
room | df=echo Avail; echo 123 | no room: 123 MiB are free in the file system of /usr
root | id=echo 1000, sudo=exit 1 | as root, run 'apt-get install cargo rustc gcc
dpkg | dpkg=echo half installed | run 'sudo dpkg --configure -a' first
lock | grep= | apt is in use by another program, which has locked /var/lib/dpkg/lock-frontend
sources | apt-get=exit 100, dpkg= | apt's package sources cannot be reached";
    // Programs that a case does not name report no problem.
    let usual = "uname=echo x86_64, apt-get=exit 1, dpkg=, df=echo Avail; echo 99999, id=echo 0, sudo=, ls=, grep=exit 1";
    for case in cases.lines() {
        let columns: Vec<&str> = case.split(" | ").collect();
        let [name, programs, sentence] = columns[..] else {
            unreachable!("{case}");
        };
        let clone = Clone::new("lacks", name);
        let bin = clone.base.join("bin");
        for program in usual.split(", ").chain(programs.split(", ")) {
            let (program, what) = program.split_once('=').unwrap();
            script(&bin.join(program), what);
        }
        if name == "debian" {
            fs::remove_file(bin.join("apt-get")).unwrap();
        }
        for tool in "bash dirname mkdir tail cut sort stat sh".split(' ') {
            let found = std::env::split_paths("/usr/bin:/bin")
                .map(|folder| folder.join(tool))
                .find(|file| file.exists())
                .unwrap();
            std::os::unix::fs::symlink(found, bin.join(tool)).unwrap();
        }
        let result = Command::new("/bin/bash")
            .arg(clone.folder.join("tests/runner/bootstrap"))
            .arg("demo")
            .env("PATH", &bin)
            .env("XDG_CACHE_HOME", clone.cache())
            .output()
            .unwrap();
        let said = text(&result.stderr);
        assert_eq!(result.status.code(), Some(125), "{name}: {said}");
        assert!(said.contains(sentence), "{name}: {said}");
        let sentences = said.lines().filter(|line| line.starts_with("runner: "));
        assert_eq!(sentences.count(), 1, "{name}: {said}");
        assert!(!clone.cache().join("peermem-rs/target").exists());
        assert!(!clone.cache().join("peermem-rs/packages.begun").exists());
    }
}
