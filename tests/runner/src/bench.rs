// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `runner bench`: compares the costs of our module and of NVIDIA's nvidia-peermem. Counts
//! instructions without a VM (`cost.rs`), takes the figures that need a VM from `gdr bench`, and
//! writes `docs/performance.md` from both.

mod page;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{bail, ensure, Context as _, Result};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::arch::Arch;
use crate::cases::add_last_words;
use crate::command::tool;
use crate::git::git;
use crate::guest::SYSTEM_PROGRAMS;
use crate::history::When;
use crate::paths::Paths;
use crate::progress::{duration, output};
use crate::vm::{Options, Peermem, Provider};
use crate::{cost, kernel, programs, setup, stamp, vm};

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Only writes docs/performance.md, from tests/cost/figures and tests/cost/vm-figures.json
    #[arg(long)]
    page: bool,
}

/// BAR size, in MiB, with room for a registration of 64 GiB.
const BAR: u64 = 128 * 1024;

/// A VM of the bench: its clock, and the parts of `gdr bench` that run in it.
struct Machine {
    counts_instructions: bool,
    parts: &'static [&'static str],
}

const MACHINES: [Machine; 2] = [
    Machine {
        counts_instructions: true,
        parts: &["registrations", "revocation"],
    },
    Machine {
        counts_instructions: false,
        parts: &["threads"],
    },
];

const OURS: &str = "ours";
const NVIDIAS: &str = "nvidia";

/// Figures that need a VM, and the environment of their measurement.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Measured {
    /// Date, commit, kernel and the like, by name.
    environment: BTreeMap<String, String>,
    /// Figures by module, mode and name: "ours persistent 64KiB.bytes".
    figures: BTreeMap<String, u64>,
}

impl Measured {
    /// Reads the figures from the file. Returns no figures if there is no file.
    fn read(repo: &Path) -> Result<Self> {
        match fs::read(file(repo)) {
            Ok(text) => serde_json::from_slice(&text).context("tests/cost/vm-figures.json"),
            Err(_) => Ok(Self::default()),
        }
    }

    fn write(&self, repo: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        stamp::update(&file(repo), text.as_bytes()).map(drop)
    }

    fn get(&self, module: &str, mode: &str, name: &str) -> Option<u64> {
        let name = format!("{module} {mode} {name}");
        self.figures.get(&name).copied()
    }
}

fn file(repo: &Path) -> PathBuf {
    repo.join("tests/cost/vm-figures.json")
}

/// Returns the commit of the measured tree, with a note if `src` differs from the commit.
fn commit(repo: &Path) -> Result<String> {
    let mut commit = git(repo, &["rev-parse", "--short=12", "HEAD"])?;
    if !git(repo, &["status", "--porcelain", "--", "src"])?.is_empty() {
        commit.push_str(" with changes to `src` that are not committed");
    }
    Ok(commit)
}

/// Runs `runner cost`. If the counts are written to the file, also writes the page.
pub(crate) fn count(paths: &Paths, selection: &cost::Selection) -> Result<i32> {
    let code = cost::run(paths, selection)?;
    if selection.update {
        page::write(&paths.repo)?;
    }
    Ok(code)
}

/// Counts instructions, measures the other costs in VMs, and writes the page. Returns 1 if a check
/// of the counts fails, or if a goal is missed or was not measured.
pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    let started = Instant::now();
    let mut code = 0;
    if !selection.page {
        code = cost::run(paths, &cost::Selection { update: true })?;
        measure(paths)?;
    }
    let (missed, unmeasured) = page::write(&paths.repo)?;
    println!("  done in {}", duration(started.elapsed()));
    if (missed, unmeasured) == (0, 0) {
        println!("bench: all goals met");
        return Ok(code);
    }
    println!("bench: {missed} goals missed, {unmeasured} not measured");
    Ok(1)
}

/// Boots each VM with each module in each mode, and saves the figures after each run.
fn measure(paths: &Paths) -> Result<()> {
    setup::all(paths, [kernel::DEFAULT])?;
    let qemu = output(tool("qemu-system-x86_64").arg("--version"))?;
    let qemu = qemu.lines().next().unwrap_or_default().to_owned();
    let mut measured = Measured::default();
    for (name, value) in [
        ("date", When::now(paths).date),
        ("commit", commit(&paths.repo)?),
        ("qemu", qemu),
    ] {
        measured.environment.insert(name.to_owned(), value);
    }
    for machine in &MACHINES {
        for mode in cost::MODES {
            for module in [Peermem::Ours, Peermem::Nvidia] {
                machine.measure(paths, mode, module, &mut measured)?;
                measured.write(&paths.repo)?;
            }
        }
    }
    Ok(())
}

impl Machine {
    fn options(&self, mode: &str, module: Peermem) -> Options {
        let mut options = Options {
            peermem: module,
            // The stand-in's own p2p.c counts the cost of its functions, and the bench subtracts
            // this cost.
            provider: Provider::Ours,
            kernel: kernel::DEFAULT.to_owned(),
            bench: true,
            icount: self.counts_instructions,
            smp: if self.counts_instructions { 1 } else { 4 },
            gpus: 1,
            bar: BAR,
            timeout: Some(1800),
            env: vec![SYSTEM_PROGRAMS.to_owned()],
            frozen: true,
            ..Options::default()
        };
        match (module, mode) {
            // NVIDIA's nvidia-peermem has no parameter that selects the mode. Its persistent client
            // serves NICs that cannot revoke. `peer_inval=0` makes rxe such a NIC.
            (Peermem::Nvidia, "persistent") => options.rxe_param.push("peer_inval=0".to_owned()),
            (Peermem::Ours, "revocable") => {
                options.param.push("persistent_api_support=0".to_owned());
            }
            _ => {}
        }
        options
    }

    fn measure(
        &self,
        paths: &Paths,
        mode: &str,
        module: Peermem,
        measured: &mut Measured,
    ) -> Result<()> {
        let begun = Instant::now();
        let options = self.options(mode, module);
        let boot = setup::boot(paths, &options)?;
        let mut command = programs::gdr_command(paths, Arch::X86_64, "bench");
        command.extend(self.parts.iter().map(|part| (*part).to_owned()));
        let (outcome, said) = vm::run_with(
            paths,
            &options,
            &boot,
            &command,
            Vec::new(),
            |said: &mut Vec<String>, line, _| said.push(line.to_owned()),
        )?;
        let whose = match module {
            Peermem::Nvidia => NVIDIAS,
            _ => OURS,
        };
        let name = format!("{} ({whose}, {mode})", self.parts.join(", "));
        let mut problems = outcome.failures;
        if outcome.status != Some(0) {
            problems.push(format!("the program's exit status is {:?}", outcome.status));
            add_last_words(&said, &mut problems);
        }
        if !problems.is_empty() {
            let log = outcome.log.display();
            bail!("{name}: {} (kernel log: {log})", problems.join("\n"));
        }
        let mut found = 0;
        for line in &said {
            if let Some(figure) = line.strip_prefix("figure ") {
                let (figure, value) = figure.split_once(' ').with_context(|| line.clone())?;
                let value = value.parse().with_context(|| line.clone())?;
                measured
                    .figures
                    .insert(format!("{whose} {mode} {figure}"), value);
                found += 1;
            }
        }
        ensure!(found > 0, "{name}: no figure");
        let versions = [("kernel", boot.release), (whose, boot.peermem_version)];
        for (name, value) in versions {
            measured.environment.insert(name.to_owned(), value);
        }
        println!("  {name}: {found} figures ({})", duration(begun.elapsed()));
        Ok(())
    }
}
