// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Debian packages that the test runner needs, installed through this machine's apt.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{anyhow, Context as _, Result};

use super::archive::{extract, is_newer};
use crate::command::as_root;
use crate::paths::Paths;
use crate::progress::{output, Stage};

/// A package that must be installed: the first of several alternatives that is available.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    packages: &'static [&'static str],
    /// Oldest version that suffices.
    at_least: &'static str,
}

const fn need(packages: &'static [&'static str]) -> Need {
    Need {
        packages,
        at_least: "",
    }
}

const fn need_rust(packages: &'static [&'static str]) -> Need {
    Need {
        packages,
        at_least: "1.85",
    }
}

/// Packages for compiling kernels and modules.
const BUILD: &[Need] = &[
    need(&["gcc"]),
    need(&["make"]),
    need(&["flex"]),
    need(&["bison"]),
    need(&["bc"]),
    need(&["libelf-dev"]),
    need(&["libssl-dev"]),
    need(&["openssl"]),
    need(&["dwarves"]),
    need(&["kmod"]),
    need(&["xz-utils"]),
    need(&["patch"]),
    need(&["perl"]),
    need_rust(&["rustc", "rustc-web"]),
    need_rust(&["cargo", "cargo-web"]),
    need_rust(&["rust-src", "rust-web-src"]),
    need_rust(&["rustfmt", "rustfmt-web"]),
    need_rust(&["rust-clippy", "rust-web-clippy"]),
    need(&[
        "libclang-19-dev",
        "libclang-21-dev",
        "libclang-20-dev",
        "libclang-18-dev",
        "libclang-17-dev",
    ]),
    // The debug kernel and its modules need clang 19 and its tools.
    need(&["clang-19"]),
    need(&["lld-19"]),
    need(&["llvm-19"]),
    // The verbs crate compiles a small C++ library and reads headers with libclang.
    need(&["g++"]),
    need(&["cmake"]),
    need(&["pkgconf", "pkg-config"]),
];

/// Packages for running test VMs and the programs in them.
const RUN: &[Need] = &[
    need(&["qemu-system-x86"]),
    need(&["busybox-static"]),
    need(&["util-linux"]),
    need(&["iproute2"]),
    need(&["rdma-core"]),
    need(&["ibverbs-providers"]),
    need(&["ibverbs-utils"]),
    need(&["rdmacm-utils"]),
    need(&["perftest"]),
    need(&["python3-pyverbs"]),
];

/// Packages for making Debian packages, and for installing on synthetic hosts.
pub(crate) const INSTALL: &[Need] = &[
    need(&["dkms"]),
    need(&["zstd"]),
    need(&["systemd"]),
    need(&["binutils"]),
    need(&["debhelper"]),
    need(&["dh-dkms"]),
    need(&["lintian"]),
];

/// Packages for making the root of a host.
pub(crate) const ROOT: &[Need] = &[need(&["mmdebstrap"])];

/// Packages for packing peermemctl, and for testing its packages.
pub(crate) const PACKAGES: &[Need] = &[
    need(&["mmdebstrap"]),
    need(&["python3-venv"]),
    need(&["rpm"]),
    need(&["umoci"]),
];

/// Packages for linting.
pub(crate) const LINT: &[Need] = &[need(&["shellcheck"])];

/// Packages for fetching wheels, if no other `pip` is available.
pub(crate) const WHEELS: &[Need] = &[need(&["python3-pip"])];

/// Packages for booting VMs of a foreign architecture, and for making their root.
pub(crate) const FOREIGN: &[Need] = &[
    need(&["qemu-system-arm"]),
    need(&["mmdebstrap"]),
    // Modules for a stock kernel need this compiler.
    need(&["gcc-aarch64-linux-gnu"]),
];

/// Packages for the arm64 object of the portable build.
pub(crate) const ARM64_OBJECT: &[Need] = &[need(&["binutils-aarch64-linux-gnu"])];

/// Packages for counting instructions.
pub(crate) const COST: &[Need] = &[need(&["valgrind"])];

/// Returns the versions of the installed packages among `packages`.
fn installed(packages: &[&str]) -> Result<BTreeMap<String, String>> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status} ${Version}\n"])
        .args(packages)
        .stderr(Stdio::null())
        .output()
        .context("cannot start dpkg-query; the test runner needs Debian")?;
    // The exit status is an error if some packages are unknown, which is no failure here.
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let (package, status) = (words.next()?, words.next()?);
            (status == "installed").then(|| (package.to_owned(), words.collect()))
        })
        .collect())
}

fn candidate(package: &str) -> Option<String> {
    let text = output(
        Command::new("apt-cache")
            .args(["policy", package])
            .env("LC_ALL", "C"),
    )
    .ok()?;
    text.lines()
        .find_map(|line| line.trim().strip_prefix("Candidate: "))
        .filter(|version| *version != "(none)")
        .map(str::to_owned)
}

fn will_do(version: &str, need: &Need) -> bool {
    let upstream = version.split_once(':').map_or(version, |(_, rest)| rest);
    need.at_least.is_empty() || upstream == need.at_least || is_newer(upstream, need.at_least)
}

/// Returns the needs that no installed package meets.
fn missing(needs: &[Need]) -> Result<Vec<Need>> {
    let names: Vec<&str> = needs
        .iter()
        .flat_map(|need| need.packages)
        .copied()
        .collect();
    let installed = installed(&names)?;
    let is_met = |need: &&Need| {
        need.packages.iter().any(|package| {
            installed
                .get(*package)
                .is_some_and(|version| will_do(version, need))
        })
    };
    Ok(needs.iter().filter(|need| !is_met(need)).copied().collect())
}

/// Installs the missing packages. Does not use the network if none is missing.
pub(crate) fn install(paths: &Paths, needs: &[Need]) -> Result<()> {
    let missing = missing(needs)?;
    if missing.is_empty() {
        return Ok(());
    }
    let log = paths.cache.join("logs/packages.txt");
    let choose = |need: &Need| {
        need.packages
            .iter()
            .find(|package| candidate(package).is_some_and(|version| will_do(&version, need)))
            .copied()
    };
    if lists_are_old() || missing.iter().any(|need| choose(need).is_none()) {
        read_lists(paths)?;
    }
    let mut chosen = Vec::new();
    for need in &missing {
        chosen.push(choose(need).ok_or_else(|| {
            anyhow!(
                "this machine's apt sources have none of: {}{}",
                need.packages.join(", "),
                if need.at_least.is_empty() {
                    String::new()
                } else {
                    format!(" (at least version {})", need.at_least)
                }
            )
        })?);
    }
    let begun = begun(paths);
    if begun.exists() && is_interrupted() {
        let mut stage = Stage::begin("packages: completing what was interrupted");
        stage.run(
            as_root("env").args([
                "DEBIAN_FRONTEND=noninteractive",
                "dpkg",
                "--configure",
                "-a",
            ]),
            &log,
            "steps",
            |line| line.starts_with("Setting up"),
        )?;
        stage.done("");
    }
    fs::write(&begun, "")?;
    let mut stage = Stage::begin(format!("packages: installing {}", chosen.join(" ")));
    stage.run(
        as_root("env")
            .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"])
            .args(["install", "--no-install-recommends"])
            .args(&chosen),
        &log,
        "steps",
        |line| line.starts_with("Get:") || line.starts_with("Setting up"),
    )?;
    fs::remove_file(&begun)?;
    stage.done("");
    Ok(())
}

/// Returns `true` if dpkg has left packages half installed, or has not finished its journal.
pub(crate) fn is_interrupted() -> bool {
    let notes =
        fs::read_dir("/var/lib/dpkg/updates").is_ok_and(|mut entries| entries.next().is_some());
    notes || output(Command::new("dpkg").arg("--audit")).is_ok_and(|text| !text.is_empty())
}

/// Returns `true` if this machine's package lists are missing or too old to install from.
fn lists_are_old() -> bool {
    let newest = fs::read_dir("/var/lib/apt/lists")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok())
        .filter(|entry| entry.file_name().to_string_lossy().ends_with("Release"))
        .filter_map(|entry| entry.metadata().ok()?.modified().ok())
        .max();
    newest.is_none_or(|newest| {
        SystemTime::now()
            .duration_since(newest)
            .is_ok_and(|age| age > LISTS_KEPT)
    })
}

/// Age limit of package lists. Older lists name versions that the archive no longer has.
const LISTS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Returns the path of a file that exists while this program installs packages. If the program is
/// interrupted, dpkg is left in an intermediate state, and this file shows that this program caused
/// that state.
fn begun(paths: &Paths) -> PathBuf {
    paths.cache.join("packages.begun")
}

/// Returns `true` if this program started dpkg and did not see it finish.
pub(crate) fn was_begun(paths: &Paths) -> bool {
    begun(paths).exists()
}

/// Updates this machine's package lists.
fn read_lists(paths: &Paths) -> Result<()> {
    let mut stage = Stage::begin("packages: reading lists");
    stage.run(
        as_root("apt-get").args(["-q", "update"]),
        &paths.cache.join("logs/packages.txt"),
        "files",
        |line| line.starts_with("Get:"),
    )?;
    stage.done("");
    Ok(())
}

/// Unpacks packages of this machine's release without installing them. No other effect of an
/// installation happens, such as the start of a service.
pub(crate) fn unpack_own(
    paths: &Paths,
    stage: &mut Stage,
    packages: &[&str],
    root: &Path,
) -> Result<()> {
    if packages.iter().any(|package| candidate(package).is_none()) {
        read_lists(paths)?;
    }
    let log = paths.cache.join("logs/packages.txt");
    let directory = paths.run_directory()?;
    let result = (|| {
        stage.run(
            Command::new("apt-get")
                .args(["-q", "download"])
                .args(packages)
                .args(["-o", "APT::Sandbox::User="])
                .current_dir(&directory),
            &log,
            "files",
            |line| line.starts_with("Get:"),
        )?;
        for entry in fs::read_dir(&directory)? {
            extract(stage, &entry?.path(), root, &log)?;
        }
        Ok(())
    })();
    let _ = fs::remove_dir_all(&directory);
    result
}

/// Returns the contents of one file of a package of this machine's release.
pub(crate) fn file_of(paths: &Paths, package: &str, file: &str) -> Result<Vec<u8>> {
    let mut stage = Stage::begin(format!("package {package}: fetching {file} of it"));
    let root = paths.run_directory()?;
    let contents = unpack_own(paths, &mut stage, &[package], &root).and_then(|()| {
        fs::read(root.join(file)).with_context(|| format!("{package} has no {file}"))
    });
    let _ = fs::remove_dir_all(&root);
    let contents = contents?;
    stage.done("");
    Ok(contents)
}

fn all_needs() -> Vec<Need> {
    BUILD.iter().chain(RUN).chain(INSTALL).copied().collect()
}

pub(crate) fn install_all(paths: &Paths) -> Result<()> {
    install(paths, &all_needs())
}

/// Returns the packages that [`install_all`] and `install(paths, more)` would install. Each need
/// gives the first package that apt knows, or else its first package.
pub(crate) fn missing_all(more: &[Need]) -> Result<Vec<String>> {
    let missing = missing(&[&all_needs(), more].concat())?;
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    // Asks for all names at once, because each call reads all of apt's lists.
    let names = missing.iter().flat_map(|need| need.packages);
    let policies = output(
        Command::new("apt-cache")
            .arg("policy")
            .args(names)
            .env("LC_ALL", "C"),
    )
    .unwrap_or_default();
    let candidates = candidates(&policies);
    let chosen = missing.iter().filter_map(|need| {
        let is_known = |package: &&&str| {
            candidates
                .get(**package)
                .is_some_and(|version| will_do(version, need))
        };
        let known = need.packages.iter().find(is_known);
        known.or(need.packages.first())
    });
    Ok(chosen.map(|package| (*package).to_owned()).collect())
}

/// Parses the output of `apt-cache policy`. Returns the version that apt would install, by package.
fn candidates(policies: &str) -> BTreeMap<&str, &str> {
    let mut found = BTreeMap::new();
    let mut package = "";
    for line in policies.lines() {
        if let Some(name) = line.strip_suffix(':').filter(|name| !name.starts_with(' ')) {
            package = name;
        } else if let Some(version) = line.trim().strip_prefix("Candidate: ") {
            if version != "(none)" {
                found.insert(package, version);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_apt_would_install() {
        let said =
            "gcc:\n  Installed: (none)\n  Candidate: 4:12.2\n  Version table:\n     4:12.2 500\n\
            no:\n  Installed: (none)\n  Candidate: (none)\n  Version table:\n";
        let found = candidates(said);
        assert_eq!(found.get("gcc"), Some(&"4:12.2"));
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn versions_with_epochs() {
        let rust = need_rust(&[]);
        assert!(will_do("1.96.0+dfsg1-1~deb12u2", &rust));
        assert!(will_do("1:1.85.1-2", &rust));
        assert!(!will_do("1.63.0+dfsg1-2", &rust));
        assert!(will_do("anything", &need(&[])));
    }
}
