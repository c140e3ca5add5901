// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The machines of a bench: what is measured in which, and what they say.

use std::fs;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use anyhow::{ensure, Context as _, Result};
use clap::ValueEnum as _;
use peermem_figures::{Line, Part};

use super::goals::Limits;
use super::{goals, Selection};
use crate::arch::Arch;
use crate::paths::Paths;
use crate::test::add_last_words;
use crate::vm::{Options, Peermem, Provider};
use crate::{kernel, programs, setup, vm};

/// Room for a registration of 64 GiB, in MiB.
const BAR: u64 = 128 * 1024;

/// What a machine's clock tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clock {
    /// Instructions, on one processor.
    Instructions,
    /// Wall time, on several.
    Wall,
}

impl Clock {
    pub(super) const ALL: [Self; 2] = [Self::Instructions, Self::Wall];

    fn name(self) -> &'static str {
        match self {
            Self::Instructions => "instructions",
            Self::Wall => "wall",
        }
    }

    fn of(part: Part) -> Self {
        match part {
            Part::Registrations | Part::Revocation | Part::Alive | Part::Datapath => {
                Self::Instructions
            }
            Part::Threads | Part::Small | Part::Startup => Self::Wall,
        }
    }
}

/// One of the two kinds of registrations that both modules know.
#[derive(Debug)]
pub(super) struct PinMode {
    pub(super) name: &'static str,
    ours: fn(&mut Options),
    theirs: fn(&mut Options),
    /// What need not be measured with both.
    leaves_out: &'static [Part],
    pub(super) limits: Limits,
}

pub(super) const MODES: [PinMode; 2] = [
    PinMode {
        name: "persistent",
        ours: |_| {},
        // It has no parameter: its client without the callback serves NICs that cannot revoke.
        theirs: |options| options.rxe_param.push("peer_inval=0".to_owned()),
        leaves_out: &[Part::Revocation],
        limits: goals::PERSISTENT,
    },
    PinMode {
        name: "revocable",
        ours: |options| options.param.push("persistent_api_support=0".to_owned()),
        theirs: |_| {},
        leaves_out: &[Part::Datapath],
        limits: goals::REVOCABLE,
    },
];

/// One machine of a bench.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machine {
    pub(super) clock: Clock,
    pub(super) mode: &'static PinMode,
    pub(super) module: Peermem,
    pub(super) round: usize,
}

/// What it said.
pub(super) struct Said {
    pub(super) lines: Vec<Line>,
    pub(super) version: String,
    pub(super) release: String,
}

impl Machine {
    pub(super) fn name(&self) -> String {
        format!(
            "{}-{}-{}-{}",
            self.round + 1,
            self.clock.name(),
            self.mode.name,
            self.module.name()
        )
    }

    /// Those of the parts that are measured in it. The data path is compared within one machine, and once takes long enough.
    fn parts(&self, chosen: &[Part]) -> Vec<Part> {
        let mut parts = chosen.to_vec();
        parts.retain(|part| {
            Clock::of(*part) == self.clock
                && !self.mode.leaves_out.contains(part)
                && (self.round == 0 || *part != Part::Datapath)
        });
        parts
    }

    fn options(&self) -> Options {
        let mut options = Options {
            peermem: self.module,
            // The bench subtracts this one's cost.
            provider: Provider::Ours,
            kernel: kernel::DEFAULT.to_owned(),
            bench: true,
            icount: self.clock == Clock::Instructions,
            smp: match self.clock {
                Clock::Instructions => 1,
                Clock::Wall => 4,
            },
            gpus: 1,
            bar: BAR,
            timeout: Some(1800),
            env: vec![vm::SYSTEM_PROGRAMS.to_owned()],
            frozen: true,
            ..Options::default()
        };
        match self.module {
            Peermem::Nvidia => (self.mode.theirs)(&mut options),
            _ => (self.mode.ours)(&mut options),
        }
        options
    }

    fn command(&self, paths: &Paths, selection: &Selection, parts: &[Part]) -> Vec<String> {
        // Later rounds show the spread, and the largest is done once.
        let (lengths, fragmented, regions) = match (selection.quick, self.round, selection.long) {
            (true, _, _) => ("64K,1M,1G", "1G", "1,10,100"),
            (_, 1.., _) => ("64K,1M,16M,256M,1G", "256M", "1,10,100"),
            (_, 0, false) => ("64K,1M,16M,256M,1G,8G,64G", "1G", "1,10,100,1000,10000"),
            (_, 0, true) => ("64K,1M,16M,256M,1G,8G,64G", "64G", "1,10,100,1000,10000"),
        };
        let alive = match (selection.quick, self.round) {
            (false, 0) => "0,1000,10000,100000",
            _ => "0,1000",
        };
        let repeats = selection.repeats.to_string();
        let mut command = programs::gdr_command(paths, Arch::X86_64, "bench");
        command.extend(
            parts
                .iter()
                .filter_map(|part| Some(part.to_possible_value()?.get_name().to_owned())),
        );
        command.extend(
            [
                ["--lengths", lengths],
                ["--longest-fragmented", fragmented],
                ["--regions", regions],
                ["--alive", alive],
                ["--repeats", &repeats],
            ]
            .concat()
            .into_iter()
            .map(str::to_owned),
        );
        command
    }

    /// Boots and measures; None where there is nothing to. Each line goes to a file in `folder` as it comes.
    pub(super) fn measure(
        &self,
        paths: &Paths,
        selection: &Selection,
        folder: &Path,
    ) -> Result<Option<Said>> {
        let parts = self.parts(selection.parts());
        if parts.is_empty() {
            return Ok(None);
        }
        let options = self.options();
        let boot = setup::boot(paths, &options)?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let file = folder.join(format!("{}.jsonl", self.name()));
        let mut kept = File::create(&file).with_context(|| file.display().to_string())?;
        let (outcome, (lines, said, written)) = vm::run_with(
            paths,
            &options,
            &boot,
            &self.command(paths, selection, &parts),
            (Vec::new(), Vec::new(), Ok(())),
            move |(lines, said, written), line, _| match serde_json::from_str::<Line>(line) {
                Ok(found) => {
                    lines.push(found);
                    if let Err(error) = writeln!(kept, "{line}") {
                        *written = Err(error);
                    }
                }
                Err(_) => said.push(line.to_owned()),
            },
        )?;
        written.with_context(|| file.display().to_string())?;
        let mut problems = outcome.failures;
        if outcome.status != Some(0) {
            problems.push(format!("its exit status is {:?}", outcome.status));
        }
        add_last_words(&said, &mut problems);
        ensure!(
            problems.is_empty(),
            "{} (kernel log: {})",
            problems.join("\n"),
            outcome.log.display()
        );
        Ok(Some(Said {
            lines,
            version: boot.peermem_version,
            release: boot.release,
        }))
    }
}
