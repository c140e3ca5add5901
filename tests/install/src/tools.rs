// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of `make install-tools` and `make uninstall-tools`: the places of the files, their use
//! there, and complete removal.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use anyhow::{ensure, Context as _, Result};

use crate::host::{run, tool, Host, Listing};
use crate::{repository, Case, Log};

/// A prefix other than /usr, because /usr on a synthetic host is this machine's. Files below this
/// prefix must not name /usr/bin/peermemctl.
const PREFIX: &str = "/opt/tools";

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("tools: installed and removed", there_and_back),
        Case::new("tools: the installed tools work", works),
        Case::new("tools: strangers' files stay", strangers),
    ]
}

/// Returns the path of the program, which is compiled beside this one.
fn program() -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let program = here.with_file_name("peermemctl");
    ensure!(
        program.exists(),
        "{} is missing: cargo build --release -p peermemctl",
        program.display()
    );
    Ok(program)
}

/// Returns the path of the library for `LD_PRELOAD`. cargo compiles the library beside this program,
/// or, for a test, into `deps`.
fn library() -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let places = ["libpeermem_preload.so", "deps/libpeermem_preload.so"];
    let mut places = places.into_iter().map(|name| here.with_file_name(name));
    places
        .find(|path| path.exists())
        .context("libpeermem_preload.so is missing: cargo build --release -p peermem-preload")
}

/// Returns the units to install.
fn units() -> Result<BTreeSet<String>> {
    let folder = repository("packaging/peermemctl");
    let Ok(entries) = fs::read_dir(&folder) else {
        return Ok(BTreeSet::new());
    };
    let mut names = BTreeSet::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".service") || name.ends_with(".timer") {
            names.insert(name);
        }
    }
    Ok(names)
}

/// Creates a host with the standard folders below its prefix.
fn host() -> Result<Host> {
    let host = Host::new("debian")?;
    for folder in ["bin", "lib", "share/man"] {
        fs::create_dir_all(host.path(&format!("opt/tools/{folder}")))?;
    }
    // make expects the output of `make tools` in this folder.
    fs::create_dir_all(host.path("synthetic/tools/release"))?;
    symlink(program()?, host.path("synthetic/tools/release/peermemctl"))?;
    let place = host.path("synthetic/tools/release/libpeermem_preload.so");
    symlink(library()?, place)?;
    Ok(host)
}

fn make(host: &Host, target: &str) -> Result<()> {
    run(tool("make")
        .arg("-C")
        .arg(repository(""))
        .arg(target)
        .arg(format!("TOOLS={}", host.path("synthetic/tools").display()))
        .arg(format!("DESTDIR={}", host.path("").display()))
        .arg(format!("PREFIX={PREFIX}"))
        // make must install existing files, and compile nothing as root.
        .arg("CARGO=false"))
    .map(drop)
}

/// Returns the files below the prefix that are in `after` but not in `before`.
fn added(before: &Listing, after: &Listing) -> BTreeSet<String> {
    after
        .iter()
        .filter(|(path, what)| !before.contains_key(*path) && *what != "folder")
        .map(|(path, _)| path.replacen("opt/tools/", "", 1))
        .collect()
}

fn there_and_back(log: Log) -> Result<()> {
    let host = host()?;
    let before = host.listing()?;
    make(&host, "install-tools")?;
    let after = host.listing()?;
    let files = added(&before, &after);
    log.note(format!(
        "installed: {}",
        files.iter().cloned().collect::<Vec<_>>().join(" ")
    ));
    let mut wanted: BTreeSet<String> = [
        "bin/peermemctl",
        "lib/libpeermem_preload.so",
        "share/bash-completion/completions/peermemctl",
        "share/fish/vendor_completions.d/peermemctl.fish",
        "share/zsh/site-functions/_peermemctl",
    ]
    .map(str::to_owned)
    .into();
    for unit in units()? {
        wanted.insert(format!("lib/systemd/system/{unit}"));
    }
    for file in [
        "alerts.yml",
        "daemonset.yaml",
        "grafana-dashboard.json",
        "node-problem-detector.json",
        "node-problem-detector.sh",
        "nrpe.cfg",
        "podmonitor.yaml",
        "slurm-health-check.sh",
        "slurm-prolog.sh",
    ] {
        wanted.insert(format!("share/peermemctl/{file}"));
    }
    let (pages, rest): (BTreeSet<String>, BTreeSet<String>) = files
        .into_iter()
        .partition(|name| name.starts_with("share/man/man1/peermemctl"));
    ensure!(rest == wanted, "beside the man pages: {rest:?}");
    // There is one page for the program, and one for each command.
    let commands = commands()?;
    log.equal("man pages", pages.len(), commands.len() + 1)?;
    for unit in units()? {
        let text = fs::read_to_string(host.path(&format!("opt/tools/lib/systemd/system/{unit}")))?;
        ensure!(
            !text.contains("/usr/bin/peermemctl"),
            "{unit} does not run the installed peermemctl"
        );
    }
    make(&host, "install-tools")?;
    host.is_as(log, "changed by installing it again", &after)?;
    make(&host, "uninstall-tools")?;
    host.is_as(log, "changed after uninstalling", &before)
}

/// Returns the program's visible commands, from its help.
fn commands() -> Result<Vec<String>> {
    let help = run(tool(&program()?.to_string_lossy()).arg("--help"))?;
    Ok(help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        // Continuation lines are indented further.
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .filter(|name| !name.is_empty() && *name != "help")
        .map(str::to_owned)
        .collect())
}

fn works(log: Log) -> Result<()> {
    let host = host()?;
    make(&host, "install-tools")?;
    let below = |path: &str| host.path(&format!("opt/tools/{path}"));
    let program = below("bin/peermemctl");
    log.note(run(tool(&program.to_string_lossy()).arg("--version"))?);
    // Asks bash to complete `peermemctl t`.
    let mut bash = tool("bash");
    bash.args(["--norc", "-c"])
        .arg(
            ". \"$1\" && complete -p peermemctl >/dev/null && COMP_WORDS=(peermemctl t) COMP_CWORD=1 && \
             _peermemctl peermemctl t peermemctl && echo \"${COMPREPLY[*]}\"",
        )
        .arg("bash")
        .arg(below("share/bash-completion/completions/peermemctl"));
    log.equal("bash completes t to", run(&mut bash)?, "topo")?;
    for (name, words) in [
        ("share/fish/vendor_completions.d/peermemctl.fish", "topo"),
        (
            "share/zsh/site-functions/_peermemctl",
            "#compdef peermemctl",
        ),
        ("share/man/man1/peermemctl.1", ".TH"),
        ("share/man/man1/peermemctl-topo.1", ".TH"),
    ] {
        let text = fs::read_to_string(below(name)).with_context(|| name.to_owned())?;
        log.that(&format!("{name} has {words}"), text.contains(words))?;
    }
    Ok(())
}

fn strangers(log: Log) -> Result<()> {
    let host = host()?;
    for file in [
        "opt/tools/share/bash-completion/completions/other",
        "opt/tools/share/man/man1/peermemctler.1",
        "opt/tools/lib/systemd/system/other.service",
    ] {
        host.put(file, "a stranger's\n")?;
    }
    let before = host.listing()?;
    make(&host, "install-tools")?;
    make(&host, "uninstall-tools")?;
    host.is_as(log, "changed after uninstalling", &before)
}
