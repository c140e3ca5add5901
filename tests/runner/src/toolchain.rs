// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The compilers for kernels and modules, each named explicitly. Another Rust may come first in
//! PATH, and a Rust without the library's source cannot build a kernel.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context as _, Result};

use crate::apt;
use crate::command::{quoted, system_path, tool};
use crate::paths::Paths;
use crate::progress::{output, Stage};

/// Suites with a bindgen that is new enough for the kernel. They are used if this machine's bindgen
/// is older. The newer bindgen needs the C library of its own release, so the loader of that
/// library starts bindgen. The newer bindgen and its C library are only unpacked into the cache,
/// not installed.
const BINDGEN_SUITES: &[&str] = &["forky", "sid"];
const OLDEST_BINDGEN: (u64, u64, u64) = (0, 71, 1);
const OLDEST_LIBCLANG: u32 = 17;

pub(crate) struct Toolchain {
    bindgen: PathBuf,
    libclang: PathBuf,
}

impl Toolchain {
    pub(crate) fn find(paths: &Paths) -> Result<Self> {
        Ok(Self {
            bindgen: bindgen(paths)?,
            libclang: libclang()?,
        })
    }

    /// Returns a `make` command that uses these tools. The products of make do not depend on this
    /// machine.
    pub(crate) fn make(&self) -> Command {
        let mut command = tool("make");
        command
            .args(["RUSTC=/usr/bin/rustc", "HOSTRUSTC=/usr/bin/rustc"])
            .args(["RUSTDOC=/usr/bin/rustdoc", "RUSTFMT=/usr/bin/rustfmt"])
            .arg("CLIPPY_DRIVER=/usr/bin/clippy-driver")
            .arg(format!("BINDGEN={}", self.bindgen.display()))
            .env("LIBCLANG_PATH", &self.libclang)
            .env("KBUILD_BUILD_USER", "runner")
            .env("KBUILD_BUILD_HOST", "runner")
            .env("KBUILD_BUILD_TIMESTAMP", "2026-01-01");
        command
    }

    /// Returns a `cargo` command that uses the distribution's compiler and leaves the work tree
    /// clean.
    pub(crate) fn cargo(&self, paths: &Paths) -> Command {
        let mut command = cargo(paths);
        command.env("LIBCLANG_PATH", &self.libclang);
        command
    }

    /// Returns the versions of all tools that a product of this C compiler depends on.
    pub(crate) fn versions(&self, compiler: &str) -> Result<String> {
        let mut text = String::new();
        for program in [
            Path::new(compiler),
            Path::new("/usr/bin/rustc"),
            &self.bindgen,
        ] {
            text.push_str(&output(Command::new(program).arg("--version"))?);
            text.push('\n');
        }
        text.push_str(&self.libclang.to_string_lossy());
        Ok(text)
    }
}

fn cargo(paths: &Paths) -> Command {
    let mut command = Command::new("/usr/bin/cargo");
    command
        .env("PATH", format!("/usr/bin:{}", system_path()))
        .env("RUSTC", "/usr/bin/rustc")
        .env("RUSTDOC", "/usr/bin/rustdoc")
        .env("CARGO_TARGET_DIR", paths.cache.join("target"))
        .env_remove("RUSTUP_TOOLCHAIN");
    command
}

fn version(text: &str) -> Option<(u64, u64, u64)> {
    let mut numbers = text
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?
        .split('.')
        .map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next()??))
}

fn will_do(program: &Path) -> bool {
    output(Command::new(program).arg("--version"))
        .ok()
        .and_then(|text| version(&text))
        .is_some_and(|version| version >= OLDEST_BINDGEN)
}

/// Finds a bindgen that is new enough for the kernel.
pub(crate) fn find_bindgen(paths: &Paths) -> Option<PathBuf> {
    std::env::split_paths(&system_path())
        .chain([paths.cache.join("bindgen")])
        .map(|directory| directory.join("bindgen"))
        .find(|program| program.is_file() && will_do(program))
}

fn bindgen(paths: &Paths) -> Result<PathBuf> {
    if let Some(program) = find_bindgen(paths) {
        return Ok(program);
    }
    let home = paths.cache.join("bindgen");
    let program = home.join("bindgen");
    let mut stage = Stage::begin("bindgen: fetching the package of a newer Debian");
    let root = home.join("root");
    let _ = fs::remove_dir_all(&home);
    apt::unpack(
        paths,
        &mut stage,
        BINDGEN_SUITES,
        &["bindgen", "libc6"],
        &root,
    )?;
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let script = loaded_by(&libraries, &root.join("usr/bin/bindgen"));
    fs::write(&program, script)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let version = output(Command::new(&program).arg("--version"))?;
    if !will_do(&program) {
        bail!("{version} is too old for the kernel");
    }
    stage.done(&version);
    Ok(program)
}

/// Returns a script that starts a program with the C library in this folder.
pub(crate) fn loaded_by(libraries: &Path, program: &Path) -> String {
    format!(
        "#!/bin/sh\nexec {} --library-path {}:/usr/lib/x86_64-linux-gnu {} \"$@\"\n",
        quoted(&libraries.join("ld-linux-x86-64.so.2").to_string_lossy()),
        quoted(&libraries.to_string_lossy()),
        quoted(&program.to_string_lossy()),
    )
}

/// Returns the directory of the newest libclang.
fn libclang() -> Result<PathBuf> {
    let found = fs::read_dir("/usr/lib")
        .context("/usr/lib")?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let number = path.file_name()?.to_str()?.strip_prefix("llvm-")?;
            let number: u32 = number.parse().ok()?;
            let library = path.join("lib");
            let will_do = number >= OLDEST_LIBCLANG && library.join("libclang.so").exists();
            will_do.then_some((number, library))
        });
    found.max().map(|(_, path)| path).with_context(|| {
        format!("no libclang of version {OLDEST_LIBCLANG} or newer below /usr/lib")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(version("bindgen 0.72.1"), Some((0, 72, 1)));
        assert_eq!(version("bindgen"), None);
        assert!(version("bindgen 0.60.1") < Some(OLDEST_BINDGEN));
    }

    /// Checks that every dependency in the lock file compiles with the minimum Rust version of the
    /// workspace, which Debian 13 has.
    #[test]
    fn no_dependency_needs_a_newer_rust() {
        let metadata = |more: &[&str]| {
            Command::new(env!("CARGO"))
                .args(["metadata", "--locked", "--format-version", "1"])
                .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
                .args(more)
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .output()
                .expect("cargo")
        };
        // The dependencies of other packages may not be fetched yet, if only this package was
        // tested before.
        let mut output = metadata(&["--offline"]);
        if !output.status.success() {
            output = metadata(&[]);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let rust = |version: &str| super::version(&format!("{version}.0"));
        let ours = rust(env!("CARGO_PKG_RUST_VERSION"));
        assert!(ours.is_some());
        let used: Vec<&serde_json::Value> = metadata["resolve"]["nodes"]
            .as_array()
            .expect("nodes")
            .iter()
            .map(|node| &node["id"])
            .collect();
        let newer: Vec<String> = metadata["packages"]
            .as_array()
            .expect("packages")
            .iter()
            .filter(|package| used.contains(&&package["id"]))
            .filter(|package| package["rust_version"].as_str().and_then(rust) > ours)
            .map(|package| format!("{} {}", package["name"], package["rust_version"]))
            .collect();
        assert!(newer.is_empty(), "{newer:?}");
    }
}
