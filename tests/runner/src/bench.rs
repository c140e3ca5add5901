// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The bench: `gdr bench` with our module and with NVIDIA's, in turn, on the same kernel and machines; tables, JSON and plots of
//! what it says, and the page on it.
//!
//! The page is not compared with what a run makes, as that on the hazards is: instructions change with every compiler.

mod goals;
mod machine;
mod page;
mod plot;
mod reasons;
mod record;
mod table;
mod timed;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{ensure, Context as _, Result};
use clap::{Args, ValueEnum as _};
use serde::Serialize;

use self::goals::Goal;
use self::machine::{Clock, Machine, PinMode, MODES};
use self::record::{Beside, Figure, Row};
use self::timed::Timed;
use crate::paths::Paths;
use crate::progress::{duration, output};
use crate::vm::Peermem;
use crate::{documents, kernel, setup, vm};
use peermem_figures::{Calibration, Line, Part, Prices, What, Workers};

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Measures these parts alone; leaves docs/performance.md as it is
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    only: Vec<Part>,
    /// How often each module is measured, in turn with the other
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// How often everything is measured in a round, but registrations of more than 1 GiB and start-ups
    #[arg(long, default_value_t = 3)]
    repeats: u32,
    /// One round, up to 1 GiB; leaves docs/performance.md as it is
    #[arg(long)]
    quick: bool,
    /// Fragmented memory, too, up to 64 GiB, which takes many times as long
    #[arg(long, conflicts_with = "quick")]
    long: bool,
    /// Where the results go [default: results, in the repository]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

impl Selection {
    fn parts(&self) -> &[Part] {
        if self.only.is_empty() {
            Part::value_variants()
        } else {
            &self.only
        }
    }

    fn rounds(&self) -> usize {
        if self.quick {
            1
        } else {
            self.rounds
        }
    }

    /// Whether all is measured that the page tells of.
    fn is_whole(&self) -> bool {
        !self.quick && self.only.is_empty()
    }

    fn folder(&self, paths: &Paths) -> PathBuf {
        match &self.results {
            Some(folder) => folder.clone(),
            None => paths.repo.join("results"),
        }
    }
}

/// All of a mode, of all rounds.
struct Measured {
    name: &'static str,
    ours: BTreeMap<What, Row>,
    theirs: BTreeMap<What, Row>,
    /// Ours and theirs.
    freed: [BTreeMap<u64, Figure>; 2],
    alive: [BTreeMap<u64, Beside>; 2],
    timed: [Timed; 2],
    goals: Vec<Goal>,
}

impl Measured {
    /// Of the lines of our module and of theirs.
    fn of(mode: &PinMode, [ours, theirs]: &[Vec<Line>; 2]) -> Result<Self> {
        let freed = [record::revocations(ours)?, record::revocations(theirs)?];
        let alive = [record::alive(ours)?, record::alive(theirs)?];
        let timed = [Timed::of(ours)?, Timed::of(theirs)?];
        let (ours, theirs) = (record::rows(ours)?, record::rows(theirs)?);
        let pairs = goals::pairs(&ours, &theirs);
        let mut goals = goals::of_registrations(&mode.limits, &pairs, &alive);
        goals.extend(goals::of_revocations(&freed[0], &freed[1]));
        goals.push(timed::goal(&timed[0]));
        Ok(Self {
            name: mode.name,
            ours,
            theirs,
            freed,
            alive,
            timed,
            goals,
        })
    }
}

/// Where and how it was measured.
#[derive(Debug, Clone, Default, Serialize)]
struct Environment {
    processor: String,
    date: String,
    /// Of the tree that was measured.
    commit: String,
    qemu: String,
    kernel: String,
    ours: String,
    theirs: String,
    rounds: usize,
    calibration: Option<Calibration>,
    prices: Option<Prices>,
}

/// A row of the JSON.
#[derive(Serialize)]
struct Entry<'a> {
    mode: &'static str,
    module: &'static str,
    #[serde(flatten)]
    what: &'a What,
    #[serde(flatten)]
    row: &'a Row,
    whole_ns: f64,
    mutex_ns: f64,
}

#[derive(Serialize)]
struct Results<'a> {
    environment: &'a Environment,
    goals: BTreeMap<&'static str, &'a [Goal]>,
    /// By mode, ours and NVIDIA's: regions, and nanoseconds of the machine's clock.
    revocations: BTreeMap<&'static str, &'a [BTreeMap<u64, Figure>; 2]>,
    /// By mode, ours and NVIDIA's: regions that are alive, and what one more costs.
    alive: BTreeMap<&'static str, &'a [BTreeMap<u64, Beside>; 2]>,
    rows: Vec<Entry<'a>>,
    /// By mode, ours and NVIDIA's.
    timed: BTreeMap<&'static str, &'a [Timed; 2]>,
}

fn first_line(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", vm::system_path())
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The commit of the tree that is measured, and whether the tree is not quite that.
fn commit(repo: &Path) -> Result<String> {
    let git = |arguments: &[&str]| {
        output(
            Command::new("git")
                .args(arguments)
                .env("PATH", vm::system_path())
                .current_dir(repo),
        )
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    let changed = git(&["status", "--porcelain", "--", "src"])?;
    Ok(match changed.trim() {
        "" => commit,
        _ => format!("{commit} with changes to `src` that are not committed"),
    })
}

fn processor() -> Result<String> {
    let text = fs::read_to_string("/proc/cpuinfo")?;
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("a processor without a name", |(_, name)| name);
    let count = text
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    Ok(format!("{count} × {name}"))
}

/// Runs all rounds; the tables, and where the rest lies. 1 where a goal is missed.
pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    let started = Instant::now();
    let rounds = selection.rounds();
    ensure!(rounds > 0 && selection.repeats > 0, "nothing to measure");
    setup::all(paths, [kernel::DEFAULT])?;
    // Before the long part: a page that does not say what was measured is not written.
    let commit = match commit(&paths.repo) {
        Ok(commit) => commit,
        Err(error) if selection.is_whole() => {
            return Err(error.context("docs/performance.md states the commit that was measured"));
        }
        Err(_) => "unknown".to_owned(),
    };
    let folder = selection.folder(paths);
    let lines_folder = folder.join("lines");
    let mut said: Vec<[Vec<Line>; 2]> = MODES.iter().map(|_| [Vec::new(), Vec::new()]).collect();
    let mut environment = Environment {
        processor: processor()?,
        date: first_line("date", &["-u", "+%F"])?,
        commit,
        qemu: first_line("qemu-system-x86_64", &["--version"])?,
        rounds,
        ..Environment::default()
    };
    for round in 0..rounds {
        for clock in Clock::ALL {
            for (mode, lines) in MODES.iter().zip(&mut said) {
                let mut order = [(0, Peermem::Ours), (1, Peermem::Nvidia)];
                if round % 2 == 1 {
                    order.reverse();
                }
                for (index, module) in order {
                    let machine = Machine {
                        clock,
                        mode,
                        module,
                        round,
                    };
                    let begun = Instant::now();
                    let found = machine.measure(paths, selection, &lines_folder);
                    let Some(found) = found.with_context(|| machine.name())? else {
                        continue;
                    };
                    println!(
                        "  {}: {} lines ({})",
                        machine.name(),
                        found.lines.len(),
                        duration(begun.elapsed())
                    );
                    for line in &found.lines {
                        match line {
                            Line::Calibration(found) => environment.calibration = Some(*found),
                            Line::Prices(found) => environment.prices = Some(*found),
                            _ => {}
                        }
                    }
                    lines[index].extend(found.lines);
                    environment.kernel = found.release;
                    match module {
                        Peermem::Nvidia => environment.theirs = found.version,
                        _ => environment.ours = found.version,
                    }
                }
            }
        }
    }
    let measured = MODES
        .iter()
        .zip(&said)
        .map(|(mode, lines)| Measured::of(mode, lines))
        .collect::<Result<Vec<_>>>()?;
    write(&folder, &environment, &measured)?;
    if selection.is_whole() {
        let file = paths.repo.join(page::PAGE);
        let text = page::page(&environment, &measured);
        fs::write(&file, &text)?;
        println!("  {} written", file.display());
        let readme = paths.repo.join(page::README);
        documents::check(&readme, page::README_PART, &page::readme(&text)?, true)?;
    }
    println!("measured in {}", duration(started.elapsed()));
    let missed = measured
        .iter()
        .flat_map(|mode| &mode.goals)
        .filter(|goal| goal.is_met() == Some(false))
        .count();
    if missed > 0 {
        println!("bench: {missed} goals missed");
        return Ok(1);
    }
    println!("bench: all goals met");
    Ok(0)
}

/// JSON, tables and plots.
fn write(folder: &Path, environment: &Environment, measured: &[Measured]) -> Result<()> {
    let mut results = Results {
        environment,
        goals: BTreeMap::new(),
        revocations: BTreeMap::new(),
        alive: BTreeMap::new(),
        rows: Vec::new(),
        timed: BTreeMap::new(),
    };
    for mode in measured {
        results.goals.insert(mode.name, &mode.goals);
        results.revocations.insert(mode.name, &mode.freed);
        results.alive.insert(mode.name, &mode.alive);
        results.timed.insert(mode.name, &mode.timed);
        for (module, rows) in [("ours", &mode.ours), ("nvidia", &mode.theirs)] {
            results.rows.extend(rows.iter().map(|(what, row)| Entry {
                mode: mode.name,
                module,
                what,
                row,
                whole_ns: goals::whole(what, row),
                mutex_ns: goals::mutex(what, row),
            }));
        }
        draw(folder, mode)?;
    }
    fs::write(
        folder.join("bench.json"),
        serde_json::to_string_pretty(&results)?,
    )?;
    let text = page::tables(measured);
    fs::write(folder.join("tables.md"), &text)?;
    print!("{text}");
    println!("  results: {}", folder.display());
    Ok(())
}

/// A figure of a registration, by its name, its title and its unit.
type Plot = (
    &'static str,
    &'static str,
    &'static str,
    fn(&What, &Row) -> f64,
);

const PLOTS: &[Plot] = &[
    (
        "own",
        "own cost of a registration's life",
        "instructions",
        |_, row| row.own.median,
    ),
    (
        "whole",
        "whole cost at a V100's prices",
        "nanoseconds",
        goals::whole,
    ),
    (
        "memory",
        "own kernel memory while registered",
        "bytes",
        |_, row| row.held as f64,
    ),
];

/// The plots of what was measured.
fn draw(folder: &Path, mode: &Measured) -> Result<()> {
    let pairs = goals::pairs(&mode.ours, &mode.theirs);
    let file = |name: &str| folder.join(format!("{name}-{}.svg", mode.name));
    let title = |what: &str| format!("{what}, {}", mode.name);
    for &(name, what, unit, take) in PLOTS {
        if !pairs.is_empty() {
            let lines = plot::lines(&pairs, take);
            plot::draw(&file(name), &title(what), &plot::over_length(unit), &lines)?;
        }
    }
    for workers in Workers::ALL {
        let lines = plot::crowds(&mode.timed, workers);
        if lines.iter().all(|line| !line.points.is_empty()) {
            let what = format!("{} that register at once, wall time", workers.name());
            plot::draw(
                &file(workers.name()),
                &title(&what),
                &plot::OVER_NUMBER,
                &lines,
            )?;
        }
    }
    Ok(())
}
