// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `runner bench`: compares the costs of our module and of NVIDIA's nvidia-peermem. Counts
//! instructions without a VM (`cost.rs`), takes the figures that need a VM from `gdr bench`, and
//! writes `docs/performance.md` from both.

mod page;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{bail, ensure, Context as _, Result};
use clap::Args;

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
    /// Only writes docs/performance.md, from tests/cost/figures and tests/cost/vm-figures
    #[arg(long)]
    page: bool,
}

/// BAR size that has room for a registration of 64 GiB, in MiB.
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

/// Names of the modules in the figures.
const OURS: &str = "ours";
const NVIDIAS: &str = "nvidia";

/// Figures that need a VM, and the environment of their measurement.
#[derive(Debug, Default, PartialEq, Eq)]
struct Measured {
    /// Date, commit, kernel and the like, by name.
    environment: BTreeMap<String, String>,
    /// Figures by module, mode and name: "ours persistent 64KiB.bytes".
    figures: BTreeMap<String, u64>,
}

impl Measured {
    fn read(text: &str) -> Result<Self> {
        let mut measured = Self::default();
        for line in text.lines() {
            if let Some((name, value)) = line
                .strip_prefix("# ")
                .and_then(|line| line.split_once(": "))
            {
                measured
                    .environment
                    .insert(name.to_owned(), value.to_owned());
            } else if !line.starts_with('#') && !line.is_empty() {
                let (name, value) = line.rsplit_once(' ').context("a line without a number")?;
                let value = value.parse().with_context(|| line.to_owned())?;
                let old = measured.figures.insert(name.to_owned(), value);
                ensure!(old.is_none(), "for the second time: {line}");
            }
        }
        Ok(measured)
    }

    fn text(&self) -> String {
        let mut text = "# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause\n\
            #\n\
            # Figures of a registration that only the test VM shows. Written by `make bench`.\n\
            #\n"
        .to_owned();
        for (name, value) in &self.environment {
            let _ = writeln!(text, "# {name}: {value}");
        }
        text.push('\n');
        for (name, value) in &self.figures {
            let _ = writeln!(text, "{name} {value}");
        }
        text
    }

    fn get(&self, module: &str, mode: &str, name: &str) -> Option<u64> {
        let name = format!("{module} {mode} {name}");
        self.figures.get(&name).copied()
    }
}

fn file(repo: &Path) -> PathBuf {
    repo.join("tests/cost/vm-figures")
}

/// Returns the commit of the measured tree, with a note if `src` differs from the commit.
fn commit(repo: &Path) -> Result<String> {
    let mut commit = git(repo, &["rev-parse", "--short=12", "HEAD"])?;
    if !git(repo, &["status", "--porcelain", "--", "src"])?.is_empty() {
        commit.push_str(" with changes to `src` that are not committed");
    }
    Ok(commit)
}

/// Runs `runner cost`. Also writes the page if the counts are written.
pub(crate) fn count(paths: &Paths, selection: &cost::Selection) -> Result<i32> {
    let code = cost::run(paths, selection)?;
    if selection.update {
        page::write(&paths.repo)?;
    }
    Ok(code)
}

/// Counts and measures everything, and writes the page. Returns 1 if a goal is missed or was not
/// measured.
pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    let started = Instant::now();
    if !selection.page {
        cost::run(paths, &cost::Selection { update: true })?;
        measure(paths)?;
    }
    let (missed, unmeasured) = page::write(&paths.repo)?;
    println!("  done in {}", duration(started.elapsed()));
    if (missed, unmeasured) == (0, 0) {
        println!("bench: all goals met");
        return Ok(0);
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
                stamp::update(&file(&paths.repo), measured.text().as_bytes())?;
            }
        }
    }
    Ok(())
}

impl Machine {
    fn options(&self, mode: &str, module: Peermem) -> Options {
        let mut options = Options {
            peermem: module,
            // The bench subtracts the stand-in's cost.
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
            // NVIDIA's nvidia-peermem has no parameter that selects the mode. NVIDIA's client
            // without the callback serves NICs that cannot revoke.
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
            problems.push(format!("its exit status is {:?}", outcome.status));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_read_as_it_is_written() {
        let text = "# commit: abc\n\nours persistent 64KiB.bytes 544\n";
        let measured = Measured::read(text).unwrap();
        assert_eq!(measured.environment["commit"], "abc");
        let bytes = |module| measured.get(module, "persistent", "64KiB.bytes");
        assert_eq!([OURS, NVIDIAS].map(bytes), [Some(544), None]);
        let again = Measured::read(&measured.text()).unwrap();
        assert_eq!(again.figures, measured.figures);
        assert_eq!(again.environment["commit"], "abc");
        for wrong in ["ours", "ours persistent x", "a 1\na 2"] {
            assert!(Measured::read(wrong).is_err(), "{wrong}");
        }
    }
}
