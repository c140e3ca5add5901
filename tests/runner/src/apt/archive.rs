// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Finds, downloads and unpacks packages of suites that this machine does not use.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{bail, Context as _, Result};

use super::sources::{
    archive_of, codename, is_of, machine_archive, machine_sources, Source, NO_ARCHIVE,
};
use crate::command::as_root;
use crate::paths::Paths;
use crate::progress::{output, Stage};

/// A package in a suite of the archive. The package may not be downloaded yet.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) package: String,
    pub(crate) version: String,
    suite: String,
}

/// Returns a command for an apt program with a private state for one suite.
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
    // Hides this machine's installed packages. apt would prefer an installed package to an older
    // version in the suite, and could not download it.
    set("Dir::State::status", "/dev/null");
    set("Dir::Cache", &path("cache"));
    // The files belong to this user. apt's unprivileged user could not write here, and apt would
    // complain.
    set("APT::Sandbox::User", "");
    if let Some(architecture) = suite.split_once(OF).map(|(_, name)| name) {
        set("APT::Architecture", architecture);
        set("APT::Architectures", architecture);
    }
    set("Acquire::Languages", "none");
    for target in ["DEP-11", "Contents-deb"] {
        let name = format!("Acquire::IndexTargets::deb::{target}::DefaultEnabled");
        set(&name, "false");
    }
    set("Acquire::Retries", "3");
    command.env("LC_ALL", "C");
    command
}

/// Returns a deb822 entry for `suites` of an archive.
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

/// Returns sources of `suites` for [`make_root`], with this machine's mirror and keys.
pub(crate) fn sources_of(suites: &[&str]) -> Result<String> {
    Ok(entry(&machine_archive()?, "deb", &suites.join(" "), "main"))
}

/// Returns this machine's release, and all sources that provide packages for it, including updates.
pub(crate) fn own_sources() -> Result<(String, String)> {
    let codename = codename()?;
    let sources: Vec<String> = machine_sources()
        .iter()
        .filter(|source| is_of(source, &codename))
        .map(|source| entry(source, "deb", &source.suites.join(" "), "main"))
        .collect();
    Ok((codename, sources.join("\n")))
}

/// Makes a root directory from `sources` of `release`, with the given packages. Uses this machine's
/// apt settings for access to the mirror. If `foreign` names an architecture that this machine
/// cannot run, the packages are unpacked but not configured.
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
    // Makes no initial RAM disk, because no VM would use it.
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
        .args((!packages.is_empty()).then(|| format!("--include={}", packages.join(","))))
        .arg(release)
        .arg(root)
        .arg(&file);
    let log = paths.cache.join("logs/root.txt");
    stage.lines(&mut command, &log).map(drop)
}

/// Separator between a suite and Debian's name of a foreign architecture, as in `sid-for-arm64`.
const OF: &str = "-for-";

/// Returns the suites with packages for `architecture`, or `suites` if `architecture` is `None`.
pub(crate) fn suites_for(suites: &[&str], architecture: Option<&str>) -> Vec<String> {
    suites
        .iter()
        .map(|suite| match architecture {
            Some(name) => format!("{suite}{OF}{name}"),
            None => (*suite).to_owned(),
        })
        .collect()
}

/// Suffix for the name of a suite whose source packages are listed, too. These lists are separate,
/// because they are read only when needed.
const SOURCES: &str = "-sources";

fn log(paths: &Paths) -> PathBuf {
    paths.cache.join("logs/suites.txt")
}

fn apt_get(
    paths: &Paths,
    stage: &mut Stage,
    suite: &str,
    words: &[&str],
    directory: &Path,
) -> Result<()> {
    let mut command = apt(paths, suite, "apt-get");
    command.arg("-q").args(words).current_dir(directory);
    stage.files(&mut command, &log(paths))
}

/// Calls `fetch` with one suite after the other until a call succeeds. `what` names the thing to
/// fetch in the error message.
fn in_first<T>(suites: &[&str], what: &str, mut fetch: impl FnMut(&str) -> Result<T>) -> Result<T> {
    let mut problems = Vec::new();
    for suite in suites {
        match fetch(suite) {
            Ok(fetched) => return Ok(fetched),
            Err(error) => problems.push(format!("{suite}: {error:#}")),
        }
    }
    bail!("{what} could not be fetched:\n{}", problems.join("\n"))
}

/// Returns the first file in a directory whose name `is_it` accepts.
fn find(directory: &Path, what: &str, is_it: impl Fn(&str) -> bool) -> Result<PathBuf> {
    fs::read_dir(directory)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(&is_it)
        })
        .with_context(|| format!("{what} was downloaded but is missing"))
}

/// Reads a suite's package lists, once per run.
fn read_suite(paths: &Paths, stage: &mut Stage, suite: &str) -> Result<()> {
    static READ: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // The lock is held while the lists are read, since another thread may need the same lists.
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
    let words = ["update", "-o", "APT::Update::Error-Mode=any"];
    apt_get(paths, stage, suite, &words, &state)?;
    read.insert(suite.to_owned());
    Ok(())
}

fn madison(paths: &Paths, suite: &str, pattern: &str) -> Result<Vec<Candidate>> {
    // Gets the names first, because madison takes no pattern.
    let names = output(apt(paths, suite, "apt-cache").args(["pkgnames", pattern]))?;
    let mut found = Vec::new();
    if names.is_empty() {
        return Ok(found);
    }
    // Asks for all names at once, because each call reads the suite's lists.
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

pub(super) fn is_newer(one: &str, other: &str) -> bool {
    Command::new("dpkg")
        .args(["--compare-versions", one, "gt", other])
        .status()
        .is_ok_and(|status| status.success())
}

/// Returns all packages whose name begins with `prefix`, from all suites, newest first. Skips a
/// suite that the mirror lacks if another suite can be read.
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

pub(crate) fn download(
    paths: &Paths,
    stage: &mut Stage,
    candidate: &Candidate,
    directory: &Path,
) -> Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let wanted = format!("{}={}", candidate.package, candidate.version);
    let words = ["download", &wanted];
    apt_get(paths, stage, &candidate.suite, &words, directory)?;
    let prefix = format!("{}_", candidate.package);
    find(directory, &wanted, |name| {
        name.starts_with(&prefix) && name.ends_with(".deb")
    })
}

/// Downloads the upstream source of a package without Debian's changes: the newest version in the
/// first suite that can be read.
pub(crate) fn original(
    paths: &Paths,
    stage: &mut Stage,
    suites: &[&str],
    package: &str,
    directory: &Path,
) -> Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let words = ["source", "--download-only", "--tar-only", package];
    in_first(suites, &format!("the source of {package}"), |suite| {
        let suite = format!("{suite}{SOURCES}");
        read_suite(paths, stage, &suite)?;
        apt_get(paths, stage, &suite, &words, directory)
    })?;
    find(directory, package, |name| name.contains(".orig.tar."))
}

/// Downloads packages into a directory, from the first suite that has all of them.
pub(crate) fn download_all(
    paths: &Paths,
    stage: &mut Stage,
    suites: &[&str],
    packages: &[&str],
    directory: &Path,
) -> Result<()> {
    fs::create_dir_all(directory)?;
    let words = [&["download"], packages].concat();
    in_first(suites, &packages.join(", "), |suite| {
        read_suite(paths, stage, suite)?;
        apt_get(paths, stage, suite, &words, directory)
    })
}

/// Unpacks packages from the first suite that has all of them. Installs nothing.
pub(crate) fn unpack(
    paths: &Paths,
    stage: &mut Stage,
    suites: &[&str],
    packages: &[&str],
    root: &Path,
) -> Result<()> {
    let directory = paths.run_directory()?;
    download_all(paths, stage, suites, packages, &directory)?;
    extract_all(stage, &directory, root, &log(paths))
}

pub(super) fn extract_all(
    stage: &mut Stage,
    directory: &Path,
    root: &Path,
    log: &Path,
) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        extract(stage, &entry?.path(), root, log)?;
    }
    Ok(())
}

pub(crate) fn extract(stage: &mut Stage, package: &Path, root: &Path, log: &Path) -> Result<()> {
    fs::create_dir_all(root)?;
    stage.quietly(
        Command::new("dpkg-deb").arg("-x").arg(package).arg(root),
        log,
    )
}
