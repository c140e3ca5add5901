// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Debian packages: those to be installed, and those that are only read, from suites that the machine does not have.
//!
//! The latter come through a private apt state in the cache. Its mirror and its keys are the machine's own, so apt checks
//! every signature as it does for the machine, and the machine's sources stay as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{anyhow, bail, Context as _, Result};

use crate::paths::Paths;
use crate::progress::{output, Stage};

/// One entry of apt's sources.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    uris: Vec<String>,
    suites: Vec<String>,
    signed_by: Option<String>,
}

/// Entries of the deb822 form that give binary packages.
fn deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for stanza in text.split("\n\n") {
        let mut fields: Vec<(String, String)> = Vec::new();
        for line in stanza.lines() {
            if line.starts_with('#') {
                continue;
            }
            if line.starts_with([' ', '\t']) {
                if let Some((_, value)) = fields.last_mut() {
                    value.push('\n');
                    value.push_str(line);
                }
            } else if let Some((name, value)) = line.split_once(':') {
                fields.push((name.trim().to_lowercase(), value.trim().to_owned()));
            }
        }
        let field = |name: &str| {
            fields
                .iter()
                .find(|(field, _)| field == name)
                .map(|(_, value)| value.as_str())
        };
        let words = |name: &str| -> Vec<String> {
            field(name)
                .unwrap_or_default()
                .split_whitespace()
                .map(str::to_owned)
                .collect()
        };
        let enabled = field("enabled").is_none_or(|value| !value.eq_ignore_ascii_case("no"));
        if enabled && words("types").iter().any(|kind| kind == "deb") {
            sources.push(Source {
                uris: words("uris"),
                suites: words("suites"),
                signed_by: field("signed-by").map(str::to_owned),
            });
        }
    }
    sources
}

/// Entries of the one-line form that give binary packages.
fn one_line(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(mut rest) = line
            .strip_prefix("deb")
            .filter(|rest| rest.starts_with([' ', '\t', '[']))
        else {
            continue;
        };
        rest = rest.trim_start();
        let mut signed_by = None;
        if let Some(inner) = rest.strip_prefix('[') {
            let Some((options, after)) = inner.split_once(']') else {
                continue;
            };
            signed_by = options
                .split_whitespace()
                .find_map(|option| option.strip_prefix("signed-by="))
                .map(|value| value.replace(',', " "));
            rest = after;
        }
        let mut words = rest.split_whitespace();
        if let (Some(uri), Some(suite)) = (words.next(), words.next()) {
            sources.push(Source {
                uris: vec![uri.to_owned()],
                suites: vec![suite.to_owned()],
                signed_by,
            });
        }
    }
    sources
}

/// The first entry that is Debian's own archive: it has the release itself, not its security updates or a stranger's suite.
fn archive(sources: &[Source], codename: &str) -> Option<Source> {
    sources
        .iter()
        .find(|source| {
            !source.uris.is_empty()
                && source.suites.iter().any(|suite| {
                    [codename, "stable", "testing", "unstable", "sid"].contains(&suite.as_str())
                })
        })
        .cloned()
}

fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    text.lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned())
        .ok_or_else(|| anyhow!("/etc/os-release names no release; the test runner needs Debian"))
}

fn machine_sources() -> Vec<Source> {
    let mut sources = Vec::new();
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        let mut more: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        more.sort();
        files.extend(more);
    }
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else {
            continue;
        };
        match file.extension().and_then(|suffix| suffix.to_str()) {
            Some("sources") => sources.extend(deb822(&text)),
            Some("list") => sources.extend(one_line(&text)),
            _ => {}
        }
    }
    sources
}

const NO_ARCHIVE: &str = "apt's sources on this machine name no Debian archive";

fn machine_archive() -> Result<Source> {
    archive(&machine_sources(), &codename()?).context(NO_ARCHIVE)
}

/// Returns the machine's archive of a suite. Security updates may have an archive of their own.
fn archive_of(sources: &[Source], codename: &str, suite: &str) -> Option<Source> {
    let own = format!("{codename}-security");
    let security = sources
        .iter()
        .find(|source| !source.uris.is_empty() && source.suites.contains(&own))
        .filter(|_| suite.ends_with("-security"));
    security.cloned().or_else(|| archive(sources, codename))
}

/// A package of some suite, not downloaded yet.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) package: String,
    pub(crate) version: String,
    suite: String,
}

/// A private view of one suite.
fn apt(paths: &Paths, suite: &str, program: &str) -> Command {
    let state = paths.cache.join("suites").join(suite);
    let mut command = Command::new(program);
    let mut set = |name: &str, value: &str| {
        command.arg("-o").arg(format!("{name}={value}"));
    };
    let path = |name: &str| state.join(name).to_string_lossy().into_owned();
    set("Dir::Etc::SourceList", &path("archive.sources"));
    set("Dir::Etc::SourceParts", "/dev/null");
    set("Dir::Etc::Preferences", "/dev/null");
    set("Dir::Etc::PreferencesParts", "/dev/null");
    set("Dir::State", &path("state"));
    // apt prefers an installed package to an older one of the suite, and then finds nowhere to download it from.
    set("Dir::State::status", "/dev/null");
    set("Dir::Cache", &path("cache"));
    // The files are this user's own; apt's unprivileged helper could not write here and would complain.
    set("APT::Sandbox::User", "");
    if let Some(architecture) = suite.split_once(OF).map(|(_, name)| name) {
        set("APT::Architecture", architecture);
        set("APT::Architectures", architecture);
    }
    set("Acquire::Languages", "none");
    set(
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled",
        "false",
    );
    set(
        "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled",
        "false",
    );
    set("Acquire::Retries", "3");
    command.env("LC_ALL", "C");
    command
}

/// An entry of the deb822 form for these suites of an archive.
fn entry(archive: &Source, types: &str, suites: &str, components: &str) -> String {
    let mut text = format!(
        "Types: {types}\nURIs: {}\nSuites: {suites}\nComponents: {components}\n",
        archive.uris.join(" ")
    );
    if let Some(keys) = &archive.signed_by {
        text.push_str(&format!("Signed-By: {keys}\n"));
    }
    text
}

/// Sources of these suites, for [`make_root`]. The mirror and its keys are the machine's own.
pub(crate) fn sources_of(suites: &[&str]) -> Result<String> {
    Ok(entry(&machine_archive()?, "deb", &suites.join(" "), "main"))
}

/// The machine's own release and all that gives packages for it, updates as well.
pub(crate) fn own_sources() -> Result<(String, String)> {
    let codename = codename()?;
    let sources: Vec<String> = machine_sources()
        .iter()
        .filter(|source| is_of(source, &codename))
        .map(|source| entry(source, "deb", &source.suites.join(" "), "main"))
        .collect();
    Ok((codename, sources.join("\n")))
}

/// Whether it gives packages of a release: all its suites are Debian's for that.
fn is_of(source: &Source, codename: &str) -> bool {
    let of = |suite: &String| {
        suite
            .strip_prefix(codename)
            .is_some_and(|rest| ["", "-updates", "-security", "-backports"].contains(&rest))
    };
    !source.uris.is_empty() && !source.suites.is_empty() && source.suites.iter().all(of)
}

/// Makes a root of its own out of the release and its sources, with these packages. How the mirror is reached is the machine's
/// own. What this machine cannot run, `foreign` by Debian's name, is unpacked and not configured.
pub(crate) fn make_root(
    paths: &Paths,
    stage: &mut Stage,
    (release, sources): (&str, &str),
    packages: &[String],
    root: &Path,
    foreign: Option<&str>,
) -> Result<()> {
    let work = paths.cache.join("suites");
    fs::create_dir_all(&work)?;
    let file = work.join("root.sources");
    fs::write(&file, sources)?;
    let reached: Vec<String> = output(Command::new("apt-config").arg("dump"))?
        .lines()
        .filter(|line| line.starts_with("Acquire::http") || line.starts_with("Acquire::Check"))
        .map(str::to_owned)
        .collect();
    let options = work.join("root.options");
    fs::write(
        &options,
        format!(
            "{}\nAcquire::Languages \"none\";\nAPT::Install-Recommends \"false\";\n",
            reached.join("\n")
        ),
    )?;
    let mut command = as_root("env");
    // No initial RAM disk: nobody boots it.
    command
        .args(["INITRD=No", "mmdebstrap", "--mode=root"])
        .args(match foreign {
            None => vec!["--variant=minbase".to_owned()],
            Some(name) => vec![
                "--variant=extract".to_owned(),
                format!("--architectures={name}"),
                "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr".to_owned(),
            ],
        })
        .arg(format!("--aptopt={}", options.display()))
        .args(
            ["doc", "man", "locale"]
                .map(|folder| format!("--dpkgopt=path-exclude=/usr/share/{folder}/*")),
        )
        .arg(format!("--include={}", packages.join(",")))
        .arg(release)
        .arg(root)
        .arg(&file);
    let log = paths.cache.join("logs/root.txt");
    stage.run(&mut command, &log, "lines", |_| true)?;
    Ok(())
}

/// Between a suite's name and Debian's name of other processors than this machine's: the packages for these.
const OF: &str = "-for-";

/// The suites with packages for other processors, if there is such a name.
pub(crate) fn suites_for(suites: &[&str], architecture: Option<&str>) -> Vec<String> {
    suites
        .iter()
        .map(|suite| match architecture {
            Some(name) => format!("{suite}{OF}{name}"),
            None => (*suite).to_owned(),
        })
        .collect()
}

/// Behind a suite's name: its source packages, whose lists nobody else needs.
const SOURCES: &str = "-sources";

/// Reads a suite's lists, once a run.
fn read_suite(paths: &Paths, stage: &mut Stage, suite: &str) -> Result<()> {
    static READ: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // Held while they are read: another thread may want the same.
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if read.contains(suite) {
        return Ok(());
    }
    let archive = archive_of(&machine_sources(), &codename()?, suite).context(NO_ARCHIVE)?;
    let state = paths.cache.join("suites").join(suite);
    for directory in ["state/lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(state.join(directory))?;
    }
    let entry = match suite.strip_suffix(SOURCES) {
        Some(name) => entry(&archive, "deb-src", name, "main"),
        None => {
            let name = suite.split_once(OF).map_or(suite, |(name, _)| name);
            entry(&archive, "deb", name, "main contrib")
        }
    };
    fs::write(state.join("archive.sources"), entry)?;
    let log = paths.cache.join("logs/suites.txt");
    stage.run(
        apt(paths, suite, "apt-get").args(["-q", "update", "-o", "APT::Update::Error-Mode=any"]),
        &log,
        "files",
        |line| line.starts_with("Get:"),
    )?;
    read.insert(suite.to_owned());
    Ok(())
}

fn madison(paths: &Paths, suite: &str, pattern: &str) -> Result<Vec<Candidate>> {
    // Names first: madison takes no pattern.
    let names = output(apt(paths, suite, "apt-cache").args(["pkgnames", pattern]))?;
    let mut found = Vec::new();
    if names.is_empty() {
        return Ok(found);
    }
    // All at once: each call reads the suite's lists.
    let table = output(
        apt(paths, suite, "apt-cache")
            .arg("madison")
            .args(names.lines()),
    )?;
    for line in table.lines() {
        let mut columns = line.split('|').map(str::trim);
        let (name, version) = (columns.next(), columns.next());
        if let (Some(name), Some(version)) = (name, version) {
            found.push(Candidate {
                package: name.to_owned(),
                version: version.to_owned(),
                suite: suite.to_owned(),
            });
        }
    }
    Ok(found)
}

fn is_newer(one: &str, other: &str) -> bool {
    Command::new("dpkg")
        .args(["--compare-versions", one, "gt", other])
        .status()
        .is_ok_and(|status| status.success())
}

/// All packages whose name begins with `prefix`, in any of the suites, newest first. A suite that the mirror does not have
/// is passed over as long as another answers.
pub(crate) fn search(
    paths: &Paths,
    stage: &mut Stage,
    suites: &[&str],
    prefix: &str,
) -> Result<Vec<Candidate>> {
    let mut found: Vec<Candidate> = Vec::new();
    let mut problems = Vec::new();
    for suite in suites {
        match read_suite(paths, stage, suite).and_then(|()| madison(paths, suite, prefix)) {
            Ok(candidates) => found.extend(candidates),
            Err(error) => problems.push(format!("{suite}: {error:#}")),
        }
    }
    if problems.len() == suites.len() {
        bail!(
            "no suite of Debian's archive could be read:\n{}",
            problems.join("\n")
        );
    }
    let mut sorted: Vec<Candidate> = Vec::new();
    for candidate in found {
        let at = sorted
            .iter()
            .position(|other| is_newer(&candidate.version, &other.version))
            .unwrap_or(sorted.len());
        sorted.insert(at, candidate);
    }
    Ok(sorted)
}

/// Downloads a package into a directory.
pub(crate) fn download(
    paths: &Paths,
    stage: &mut Stage,
    candidate: &Candidate,
    directory: &Path,
) -> Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let log = paths.cache.join("logs/suites.txt");
    let wanted = format!("{}={}", candidate.package, candidate.version);
    stage.run(
        apt(paths, &candidate.suite, "apt-get")
            .args(["-q", "download", &wanted])
            .current_dir(directory),
        &log,
        "files",
        |line| line.starts_with("Get:"),
    )?;
    let prefix = format!("{}_", candidate.package);
    fs::read_dir(directory)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(&prefix) && name.ends_with(".deb"))
        })
        .ok_or_else(|| anyhow!("{wanted} was downloaded and is not there"))
}

/// Downloads the source of a package as its authors gave it out, without Debian's changes: the newest of the first suite
/// that can be read.
pub(crate) fn original(
    paths: &Paths,
    stage: &mut Stage,
    suites: &[&str],
    package: &str,
    directory: &Path,
) -> Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let log = paths.cache.join("logs/suites.txt");
    let mut problems = Vec::new();
    for suite in suites {
        let suite = format!("{suite}{SOURCES}");
        let fetched = read_suite(paths, stage, &suite).and_then(|()| {
            stage.run(
                apt(paths, &suite, "apt-get")
                    .args(["-q", "source", "--download-only", "--tar-only", package])
                    .current_dir(directory),
                &log,
                "files",
                |line| line.starts_with("Get:"),
            )
        });
        if let Err(error) = fetched {
            problems.push(format!("{suite}: {error:#}"));
            continue;
        }
        return fs::read_dir(directory)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.to_string_lossy().contains(".orig.tar."))
            .with_context(|| format!("{package} was downloaded and is not there"));
    }
    bail!(
        "the source of {package} could not be fetched:\n{}",
        problems.join("\n")
    )
}

/// Unpacks packages of the first of the suites that has them all. Nothing is installed.
pub(crate) fn unpack(
    paths: &Paths,
    stage: &mut Stage,
    suites: &[&str],
    packages: &[&str],
    root: &Path,
) -> Result<()> {
    let directory = paths.run_directory()?;
    let log = paths.cache.join("logs/suites.txt");
    let result = (|| {
        let mut problems = Vec::new();
        for suite in suites {
            let fetched = read_suite(paths, stage, suite).and_then(|()| {
                stage.run(
                    apt(paths, suite, "apt-get")
                        .args(["-q", "download"])
                        .args(packages)
                        .current_dir(&directory),
                    &log,
                    "files",
                    |line| line.starts_with("Get:"),
                )
            });
            match fetched {
                Ok(_) => {
                    for entry in fs::read_dir(&directory)? {
                        extract(stage, &entry?.path(), root, &log)?;
                    }
                    return Ok(());
                }
                Err(error) => problems.push(format!("{suite}: {error:#}")),
            }
        }
        bail!(
            "{} could not be fetched:\n{}",
            packages.join(", "),
            problems.join("\n")
        )
    })();
    let _ = fs::remove_dir_all(&directory);
    result
}

/// Unpacks the files of a package.
pub(crate) fn extract(stage: &mut Stage, package: &Path, root: &Path, log: &Path) -> Result<()> {
    fs::create_dir_all(root)?;
    stage.run(
        Command::new("dpkg-deb").arg("-x").arg(package).arg(root),
        log,
        "",
        |_| false,
    )?;
    Ok(())
}

/// Something that must be installed: the first of several packages that will do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    packages: &'static [&'static str],
    /// The oldest version that will do.
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

/// To compile kernels and modules.
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
    // The debug kernel and its modules.
    need(&["clang-19"]),
    need(&["lld-19"]),
    need(&["llvm-19"]),
    // The verbs crate compiles a small C++ library and reads headers with libclang.
    need(&["g++"]),
    need(&["cmake"]),
    need(&["pkgconf", "pkg-config"]),
];

/// To run machines and the programs in them.
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

/// To install on synthetic hosts.
const INSTALL: &[Need] = &[
    need(&["dkms"]),
    need(&["zstd"]),
    need(&["systemd"]),
    need(&["binutils"]),
    need(&["debhelper"]),
    need(&["dh-dkms"]),
    need(&["lintian"]),
];

/// To make the root of a host.
pub(crate) const ROOT: &[Need] = &[need(&["mmdebstrap"])];

/// To look at the code.
pub(crate) const LINT: &[Need] = &[need(&["shellcheck"])];

/// To fetch wheels, where no other `pip` is at hand.
pub(crate) const WHEELS: &[Need] = &[need(&["python3-pip"])];

/// To boot machines that this one's programs do not run on, and to make their root.
pub(crate) const FOREIGN: &[Need] = &[
    need(&["qemu-system-arm"]),
    need(&["mmdebstrap"]),
    // Modules for a stock kernel.
    need(&["gcc-aarch64-linux-gnu"]),
];

/// To make the object of the portable build for arm64.
pub(crate) const ARM64_OBJECT: &[Need] = &[need(&["binutils-aarch64-linux-gnu"])];

/// To count instructions.
pub(crate) const COST: &[Need] = &[need(&["valgrind"])];

/// Versions of those of the packages that are installed.
fn installed(packages: &[&str]) -> Result<BTreeMap<String, String>> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status} ${Version}\n"])
        .args(packages)
        .stderr(Stdio::null())
        .output()
        .context("cannot start dpkg-query; the test runner needs Debian")?;
    // Its status says that some are unknown, which is no failure here.
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

/// Needs that no installed package meets.
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

/// The program as root, by `sudo` where that is needed.
pub(crate) fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        Command::new(program)
    } else {
        let mut command = Command::new("sudo");
        command.arg(program);
        command
    }
}

/// Installs what is missing of these; does not touch the network when nothing is.
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

/// Whether dpkg has left packages half installed, or notes of what it was doing.
pub(crate) fn is_interrupted() -> bool {
    let notes =
        fs::read_dir("/var/lib/dpkg/updates").is_ok_and(|mut entries| entries.next().is_some());
    notes || output(Command::new("dpkg").arg("--audit")).is_ok_and(|text| !text.is_empty())
}

/// Whether the machine's lists of packages are missing or too old to install from.
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

/// Lists of packages that are older name versions that the archive has no more.
const LISTS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// There while packages are installed. Who is interrupted then leaves dpkg in the middle of it, and this says whose work it was.
fn begun(paths: &Paths) -> PathBuf {
    paths.cache.join("packages.begun")
}

/// Whether this program had dpkg work and has not seen the end of it.
pub(crate) fn was_begun(paths: &Paths) -> bool {
    begun(paths).exists()
}

/// Has the machine's own apt look at what there is.
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

/// Unpacks packages of the machine's own release, which are not installed: what else a package would do to the machine,
/// such as starting a service, is not done.
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

/// One file of such a package.
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

/// What [`install_all`] would install, and [`install`] of `more`: of each need the first package that apt knows, or the first.
pub(crate) fn missing_all(more: &[Need]) -> Result<Vec<String>> {
    let missing = missing(&[&all_needs(), more].concat())?;
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    // All at once: each call reads all of apt's lists.
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

/// The versions that apt would install, by package, of what `apt-cache policy` prints.
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

    const SOURCES: &str = "Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\
        Components: main\nSigned-By: /usr/share/keyrings/a.gpg\n\n\
        Types: deb deb-src\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n\n\
        Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\nComponents: main\n";

    #[test]
    fn deb822_sources() {
        let sources = deb822(SOURCES);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].uris, ["http://mirror.example/debian"]);
        assert_eq!(sources[0].suites, ["bookworm", "bookworm-updates"]);
        assert_eq!(
            sources[0].signed_by.as_deref(),
            Some("/usr/share/keyrings/a.gpg")
        );
        assert_eq!(sources[1].signed_by, None);
    }

    #[test]
    fn deb822_takes_keys_over_several_lines() {
        let text = "Types: deb\nURIs: http://a\nSuites: sid\nSigned-By:\n -----BEGIN-----\n .\n abc\n -----END-----\n";
        let sources = deb822(text);
        assert_eq!(
            sources[0].signed_by.as_deref(),
            Some("\n -----BEGIN-----\n .\n abc\n -----END-----")
        );
    }

    #[test]
    fn one_line_sources() {
        let text = "# deb http://no.example sid main\n\
            deb [arch=amd64 signed-by=/k/a.gpg,/k/b.gpg] http://third.example/x nodistro main\n\
            deb http://mirror.example/debian trixie main contrib # why\n\
            deb-src http://mirror.example/debian trixie main\n";
        let sources = one_line(text);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].signed_by.as_deref(), Some("/k/a.gpg /k/b.gpg"));
        assert_eq!(sources[1].uris, ["http://mirror.example/debian"]);
    }

    #[test]
    fn the_archive_is_the_one_with_the_release() {
        let mut sources = one_line("deb http://third.example/x nodistro main\n");
        assert_eq!(archive(&sources, "bookworm"), None);
        sources.extend(deb822(SOURCES));
        let found = archive(&sources, "bookworm").unwrap();
        assert_eq!(found.uris, ["http://mirror.example/debian"]);
        assert_eq!(archive(&sources, "trixie"), None);
        let of = |suite| archive_of(&sources, "bookworm", suite).unwrap();
        assert_eq!(of("bullseye").uris, ["http://mirror.example/debian"]);
        assert_eq!(of("bullseye-security").suites, ["bookworm-security"]);
        let one = [archive(&sources, "bookworm").unwrap()];
        let found = archive_of(&one, "bookworm", "bullseye-security");
        assert_eq!(found.as_ref(), one.first());
    }

    #[test]
    fn updates_belong_to_the_release_and_strangers_do_not() {
        let of = |codename: &str| -> Vec<String> {
            let mut sources = one_line("deb http://third.example/x bookworm-pgdg main\n");
            sources.extend(one_line("deb http://third.example/x cloud-bookworm main\n"));
            sources.extend(deb822(SOURCES));
            let found = sources.iter().filter(|source| is_of(source, codename));
            found.map(|source| source.suites.join(" ")).collect()
        };
        assert_eq!(
            of("bookworm"),
            ["bookworm bookworm-updates", "bookworm-security"]
        );
        assert!(of("book").is_empty());
    }

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
