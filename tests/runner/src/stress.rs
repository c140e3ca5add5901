// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The stress run: boots one VM after the other until the time is over. Each VM runs some epochs of
//! `gdr stress`.
//!
//! The progress is saved after each epoch, in a file for each seed, kernel and number of
//! operations. A run with the same values continues where the last run ended or was interrupted. If
//! a VM's kernel log has a report, the VM's epochs are removed from the file again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cases::{add_last_words, status_problem};
use crate::paths::Paths;
use crate::progress::duration;
use crate::results::{Format, Reader, Test, Verdict};
use crate::vm::Iommu;
use crate::{programs, setup, stamp, vm};

const EPOCHS_OF_A_MACHINE: u64 = 8;
const SEED: u64 = 0x7065_6572_6d65_6d00;

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Minutes after which no epoch begins
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Seed of all random choices
    #[arg(long, default_value_t = SEED, value_parser = number)]
    seed: u64,
    /// Runs only this epoch, and does not save the progress
    #[arg(long)]
    epoch: Option<u64>,
    /// Operations of an epoch; an epoch can be repeated only with the same number
    #[arg(long, default_value_t = 2000)]
    operations: u64,
    /// A kernel of the test VM by name
    #[arg(long, value_name = "FLAVOUR", default_value = crate::kernel::DEFAULT)]
    kernel: String,
}

fn number(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Account {
    next: u64,
    epochs: u64,
    milliseconds: u64,
    /// Counts of operations and events, by the names that `gdr stress` prints.
    counts: BTreeMap<String, u64>,
}

impl Account {
    fn add(&mut self, test: &Test) {
        self.next += 1;
        self.epochs += 1;
        for note in &test.notes {
            let Some((name, value)) = note.split_once(' ') else {
                continue;
            };
            if name == "seconds" {
                let seconds: f64 = value.parse().unwrap_or(0.0);
                self.milliseconds += (seconds * 1000.0) as u64;
            } else if let (false, Ok(value)) = (name == "seed", value.parse::<u64>()) {
                *self.counts.entry(name.to_owned()).or_default() += value;
            }
        }
    }

    fn save(&self, file: &Path) -> Result<()> {
        stamp::replace(file, &serde_json::to_vec(self)?)
    }

    fn operations(&self) -> u64 {
        self.counts.get("operations").copied().unwrap_or(0)
    }
}

/// Returns the options of an epoch's VM: one or two GPUs, sometimes an IOMMU.
fn machine(selection: &Selection, epoch: u64) -> vm::Options {
    let number = epoch / EPOCHS_OF_A_MACHINE;
    vm::Options {
        kernel: selection.kernel.clone(),
        gpus: if number % 2 == 0 { 2 } else { 1 },
        iommu: if number % 4 == 3 {
            Iommu::Strict
        } else {
            Iommu::Off
        },
        // One VM runs epochs of both modes. If ib_core's locks had only one class, lockdep would
        // report an inversion.
        ib_param: vec!["peer_lock_classes=2".to_owned()],
        frozen: true,
        ..vm::Options::default()
    }
}

struct Machine {
    tests: Vec<Test>,
    problems: Vec<String>,
    account: Account,
    log: PathBuf,
}

impl Machine {
    fn failed(&self) -> Option<&Test> {
        let mut tests = self.tests.iter();
        tests.find(|test| test.verdict != Verdict::Passed)
    }

    /// Prints why a VM failed, and how to repeat the epoch. The VM began with the epoch `first`.
    fn tell_failure(&self, selection: &Selection, epoch: u64, first: u64) {
        let failed = self.failed();
        if let Some(test) = failed {
            println!("FAILED: {}", test.name);
            for note in &test.notes {
                println!("    {note}");
            }
        }
        for problem in &self.problems {
            println!("FAILED: {}", problem.trim_end());
        }
        println!("kernel log: {}", self.log.display());
        let others = match failed {
            None if epoch > first => format!(" (or an earlier epoch, from {first} on)"),
            _ => String::new(),
        };
        println!(
            "stress: failed; to repeat: make stress SEED={:#x} EPOCH={epoch}{others}",
            selection.seed
        );
    }
}

fn run_machine(
    paths: &Paths,
    selection: &Selection,
    first: u64,
    epochs: u64,
    left: Duration,
    account: Account,
    mut done: impl FnMut(&mut Account, &Test) + Send + 'static,
) -> Result<Machine> {
    let mut options = machine(selection, first);
    options.timeout = Some(left.as_secs() + 1800);
    let boot = setup::boot(paths, &options)?;
    let mut command = programs::gdr_command(paths, options.arch(), "stress");
    command.extend(
        [
            ("--seed", selection.seed),
            ("--epoch", first),
            ("--epochs", epochs),
            ("--operations", selection.operations),
            ("--seconds", left.as_secs()),
        ]
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value.to_string()]),
    );
    let (outcome, (reader, said, account)) = vm::run_with(
        paths,
        &options,
        &boot,
        &command,
        (Reader::new(Format::Ktap), Vec::new(), account),
        move |(reader, said, account), line, is_error| {
            if is_error {
                said.push(line.to_owned());
            } else if let Some(test) = reader.line(line) {
                done(account, test);
            }
        },
    )?;
    let (tests, mut problems) = reader.finish();
    problems.extend(outcome.failures);
    status_problem(outcome.status, &tests, &mut problems);
    add_last_words(&said, &mut problems);
    Ok(Machine {
        tests,
        problems,
        account,
        log: outcome.log,
    })
}

/// Runs the stress run. The last line is "stress: N operations, all well", or tells how to repeat
/// the failure.
pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    let started = Instant::now();
    let budget = Duration::from_secs(60 * selection.minutes);
    setup::all(paths, [selection.kernel.as_str()])?;
    let directory = paths.cache.join("stress");
    let file = directory.join(format!(
        "{:#x}-{}-{}",
        selection.seed, selection.kernel, selection.operations
    ));
    let mut account = match (selection.epoch, fs::read_to_string(&file)) {
        // Progress that cannot be read counts as missing.
        (None, Ok(text)) => serde_json::from_str(&text).unwrap_or_default(),
        _ => Account::default(),
    };
    if let Some(first) = selection.epoch {
        account.next = first;
    }
    println!(
        "seed {:#x}, from epoch {}, after {} operations",
        selection.seed,
        account.next,
        account.operations()
    );
    let keeps = selection.epoch.is_none();
    while account.epochs == 0 || started.elapsed() < budget {
        let before = account.clone();
        let first = account.next;
        let epochs = if keeps {
            EPOCHS_OF_A_MACHINE - first % EPOCHS_OF_A_MACHINE
        } else {
            1
        };
        let live_file = file.clone();
        let machine = run_machine(
            paths,
            selection,
            first,
            epochs,
            budget.saturating_sub(started.elapsed()),
            account,
            move |account, test| {
                if test.verdict == Verdict::Passed {
                    account.add(test);
                    println!(
                        "  {}: {} operations in all ({})",
                        test.name,
                        account.operations(),
                        duration(started.elapsed())
                    );
                    if keeps {
                        // A failed write is ignored, because the next write includes the same
                        // progress.
                        let _ = account.save(&live_file);
                    }
                }
            },
        )?;
        account = machine.account.clone();
        if machine.failed().is_some() || !machine.problems.is_empty() {
            if keeps {
                // Removes all epochs of this VM from the saved progress, because any of these
                // epochs may have caused the failure or the report in the kernel log.
                before.save(&file)?;
            }
            machine.tell_failure(selection, account.next, first);
            return Ok(1);
        }
        if !keeps {
            break;
        }
    }
    for (name, count) in &account.counts {
        println!("  {name:40} {count:>14}");
    }
    let minutes = account.milliseconds as f64 / 60_000.0;
    println!(
        "  {} epochs in {minutes:.1} minutes of work, {:.0} operations a minute",
        account.epochs,
        account.operations() as f64 / minutes.max(0.001)
    );
    println!("stress: {} operations, all well", account.operations());
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_kept_and_add_up() {
        let mut account = Account::default();
        let notes = [
            "seed 7",
            "layout 64k",
            "operations 20",
            "op.write 5",
            "seconds 1.5",
        ];
        let test = Test {
            notes: notes.map(str::to_owned).to_vec(),
            ..Test::new("stress.epoch_0", Verdict::Passed)
        };
        account.add(&test);
        account.add(&test);
        assert_eq!((account.next, account.epochs), (2, 2));
        assert_eq!((account.milliseconds, account.operations()), (3000, 40));
        assert_eq!(account.counts.get("op.write"), Some(&10));
        assert_eq!(account.counts.len(), 2);
    }

    #[test]
    fn an_epoch_determines_its_machine() {
        #[derive(clap::Parser)]
        struct Bare {
            #[command(flatten)]
            selection: Selection,
        }
        let selection = <Bare as clap::Parser>::parse_from(["runner", "--seed", "0x10"]).selection;
        assert_eq!(selection.seed, 16);
        let gpus = |epoch| machine(&selection, epoch).gpus;
        assert_eq!(
            (gpus(0), gpus(7), gpus(8), gpus(15), gpus(16)),
            (2, 2, 1, 1, 2)
        );
        assert_eq!(machine(&selection, 31).iommu, Iommu::Strict);
        assert_eq!(machine(&selection, 0).ib_param, ["peer_lock_classes=2"]);
    }
}
