// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Debian packages that the test runner needs, installed through this machine's apt.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};

use super::archive::{extract_all, is_newer};
use crate::command::as_root;
use crate::paths::Paths;
use crate::progress::{output, Stage};

/// Packages for compiling kernels and modules, with alternatives and the oldest version that
/// suffices. The debug kernel and its modules need clang 19 and its tools. The verbs crate compiles a
/// small C++ library and reads headers with libclang.
const BUILD: &str = "gcc make flex bison bc libelf-dev libssl-dev openssl dwarves kmod xz-utils patch perl \
    rustc|rustc-web=1.85 cargo|cargo-web=1.85 rust-src|rust-web-src=1.85 rustfmt|rustfmt-web=1.85 \
    rust-clippy|rust-web-clippy=1.85 libclang-19-dev|libclang-21-dev|libclang-20-dev|libclang-18-dev|libclang-17-dev \
    clang-19 lld-19 llvm-19 g++ cmake pkgconf|pkg-config";

/// Packages for running test VMs and the programs in them.
const RUN: &str =
    "qemu-system-x86 busybox-static util-linux iproute2 rdma-core ibverbs-providers ibverbs-utils \
    rdmacm-utils perftest python3-pyverbs";

/// Packages for making Debian packages, and for installing on synthetic hosts.
pub(crate) const INSTALL: &str = "dkms zstd systemd binutils debhelper dh-dkms lintian";

pub(crate) const ROOT: &str = "mmdebstrap";

/// Packages for packing peermemctl, and for testing its packages.
pub(crate) const PACKAGES: &str = "mmdebstrap python3-venv rpm umoci";

pub(crate) const LINT: &str = "shellcheck";

/// Packages for fetching wheels, if no other `pip` is available.
pub(crate) const WHEELS: &str = "python3-pip";

/// Packages for booting VMs of a foreign architecture, and for making their root. Modules for a stock
/// kernel need the compiler.
pub(crate) const FOREIGN: &str = "qemu-system-arm mmdebstrap gcc-aarch64-linux-gnu";

/// Packages for making the portable object for arm64, and for testing `portable/inspect.sh`.
pub(crate) const ARM64_OBJECT: &str = "binutils-aarch64-linux-gnu";

pub(crate) const COST: &str = "valgrind";

/// A requirement: one of several alternative packages must be installed. The first alternative that
/// apt offers is chosen.
#[derive(Debug, Clone)]
struct Need<'a> {
    packages: Vec<&'a str>,
    /// Oldest version that suffices.
    at_least: &'a str,
}

fn needs(list: &str) -> Vec<Need<'_>> {
    let need = |word| -> Option<Need<'_>> {
        let mut parts = str::split(word, '=');
        Some(Need {
            packages: parts.next()?.split('|').collect(),
            at_least: parts.next().unwrap_or_default(),
        })
    };
    list.split_whitespace().filter_map(need).collect()
}

/// Returns the versions of the installed packages among `packages`.
fn installed(packages: &[&str]) -> Result<BTreeMap<String, String>> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status} ${Version}\n"])
        .args(packages)
        .stderr(Stdio::null())
        .output()
        .context("cannot start dpkg-query; the test runner needs Debian")?;
    // dpkg-query exits with an error if dpkg does not know some of the packages. This error is
    // ignored.
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let (package, status) = (words.next()?, words.next()?);
            (status == "installed").then(|| (package.to_owned(), words.collect()))
        })
        .collect())
}

/// Returns the output of `apt-cache policy` for packages. Each call reads all of apt's lists.
fn policies<'a>(packages: impl IntoIterator<Item = &'a str>) -> String {
    let mut command = Command::new("apt-cache");
    command.arg("policy").args(packages).env("LC_ALL", "C");
    output(&mut command).unwrap_or_default()
}

fn will_do(version: &str, need: &Need<'_>) -> bool {
    let upstream = version.split_once(':').map_or(version, |(_, rest)| rest);
    need.at_least.is_empty() || upstream == need.at_least || is_newer(upstream, need.at_least)
}

/// Returns the requirements that no installed package meets.
fn missing(list: &str) -> Result<Vec<Need<'_>>> {
    let mut needs = needs(list);
    let names: Vec<&str> = needs
        .iter()
        .flat_map(|need| need.packages.clone())
        .collect();
    let installed = installed(&names)?;
    needs.retain(|need| {
        let versions = need
            .packages
            .iter()
            .filter_map(|package| installed.get(*package));
        !versions.into_iter().any(|version| will_do(version, need))
    });
    Ok(needs)
}

/// Returns, for each requirement, the first package that apt would install in a sufficient version.
fn choose<'a>(needs: &[Need<'a>]) -> Vec<Option<&'a str>> {
    let policies = policies(needs.iter().flat_map(|need| need.packages.iter().copied()));
    let candidates = candidates(&policies);
    let of_need = |need: &Need<'a>| {
        let mut packages = need.packages.iter().copied();
        packages.find(|package| {
            let version = candidates.get(*package);
            version.is_some_and(|version| will_do(version, need))
        })
    };
    needs.iter().map(of_need).collect()
}

/// Installs the missing packages. If no package is missing, the network is not used.
pub(crate) fn install(paths: &Paths, list: &str) -> Result<()> {
    let missing = missing(list)?;
    if missing.is_empty() {
        return Ok(());
    }
    let log = paths.cache.join("logs/packages.txt");
    let mut found = choose(&missing);
    if lists_are_old() || found.contains(&None) {
        read_lists(paths)?;
        found = choose(&missing);
    }
    let mut chosen = Vec::new();
    for (need, package) in missing.iter().zip(found) {
        chosen.push(package.with_context(|| {
            let names = need.packages.join(", ");
            let version = match need.at_least {
                "" => String::new(),
                at_least => format!(" (at least version {at_least})"),
            };
            format!("this machine's apt sources have none of: {names}{version}")
        })?);
    }
    let begun = begun(paths);
    if begun.exists() && is_interrupted() {
        let mut stage = Stage::begin("packages: completing the interrupted installation");
        stage.run(
            as_root("env").args("DEBIAN_FRONTEND=noninteractive dpkg --configure -a".split(' ')),
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

fn read_lists(paths: &Paths) -> Result<()> {
    let mut stage = Stage::begin("packages: reading lists");
    let log = paths.cache.join("logs/packages.txt");
    stage.files(as_root("apt-get").args(["-q", "update"]), &log)?;
    stage.done("");
    Ok(())
}

/// Unpacks packages of this machine's release without installing them: no maintainer script runs,
/// and no service starts.
pub(crate) fn unpack_own(
    paths: &Paths,
    stage: &mut Stage,
    packages: &[&str],
    root: &Path,
) -> Result<()> {
    if candidates(&policies(packages.iter().copied())).len() < packages.len() {
        read_lists(paths)?;
    }
    let log = paths.cache.join("logs/packages.txt");
    let directory = paths.run_directory()?;
    let mut command = Command::new("apt-get");
    command
        .args(["-q", "download"])
        .args(packages)
        .args(["-o", "APT::Sandbox::User="]);
    stage.files(command.current_dir(&*directory), &log)?;
    extract_all(stage, &directory, root, &log)
}

/// Returns the contents of one file of a package of this machine's release.
pub(crate) fn file_of(paths: &Paths, package: &str, file: &str) -> Result<Vec<u8>> {
    let mut stage = Stage::begin(format!("package {package}: fetching {file}"));
    let root = paths.run_directory()?;
    unpack_own(paths, &mut stage, &[package], &root)?;
    let contents = fs::read(root.join(file)).with_context(|| format!("{package} has no {file}"))?;
    stage.done("");
    Ok(contents)
}

fn all_needs(more: &str) -> String {
    [BUILD, RUN, INSTALL, ARM64_OBJECT, more].join(" ")
}

pub(crate) fn install_all(paths: &Paths) -> Result<()> {
    install(paths, &all_needs(""))
}

/// Returns the packages that [`install_all`] and `install(paths, more)` would install. For each
/// need, this is the first package that apt offers in a sufficient version, or else the first
/// alternative.
pub(crate) fn missing_all(more: &str) -> Result<Vec<String>> {
    let list = all_needs(more);
    let missing = missing(&list)?;
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    let names = missing.iter().zip(choose(&missing));
    let names = names.filter_map(|(need, name)| name.or(need.packages.first().copied()));
    Ok(names.map(str::to_owned).collect())
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
        let rust = &needs("rustc|rustc-web=1.85")[0];
        assert_eq!(rust.packages, ["rustc", "rustc-web"]);
        assert!(will_do("1.96.0+dfsg1-1~deb12u2", rust));
        assert!(will_do("1:1.85.1-2", rust));
        assert!(!will_do("1.63.0+dfsg1-2", rust));
        assert!(will_do("anything", &needs("gcc")[0]));
    }
}
