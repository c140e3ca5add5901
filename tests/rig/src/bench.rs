// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The bench: `gdr bench` with our module and with NVIDIA's, in turn, on the same kernel and machine; tables, JSON and plots of
//! what it says, and the page on it.
//!
//! The page is not compared with what a run makes, as that on the hazards is: instructions change with every compiler.

mod goals;
mod page;
mod plot;
mod record;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use anyhow::Context as _;
use anyhow::Result;
use clap::Args;
use serde::Serialize;

use self::goals::Goal;
use self::record::Calibration;
use self::record::Figure;
use self::record::Line;
use self::record::Row;
use self::record::What;
use crate::kernel;
use crate::paths::Paths;
use crate::programs;
use crate::progress::duration;
use crate::setup;
use crate::test::add_last_words;
use crate::vm;
use crate::vm::Options;
use crate::vm::Peermem;

/// Room for a registration of 64 GiB.
const BAR_MIB: u64 = 128 * 1024;

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// How often each module is measured, in turn with the other
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// How often each length of up to 1 GiB is measured in a round, and each number of regions
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

/// One of the two kinds of registrations that both modules know.
struct Flavour {
    name: &'static str,
    ours: fn(&mut Options),
    theirs: fn(&mut Options),
}

const FLAVOURS: &[Flavour] = &[
    Flavour {
        name: "persistent",
        ours: |_| {},
        // It has no parameter: its client without the callback serves cards that cannot revoke.
        theirs: |options| options.rxe_param.push("peer_inval=0".to_owned()),
    },
    Flavour {
        name: "revocable",
        ours: |options| options.param.push("persistent_api_support=0".to_owned()),
        theirs: |_| {},
    },
];

/// What one machine said.
struct Said {
    lines: Vec<Line>,
    version: String,
    release: String,
}

fn measure(
    paths: &Paths,
    selection: &Selection,
    round: usize,
    flavour: &Flavour,
    module: Peermem,
) -> Result<Said> {
    let mut options = Options {
        peermem: module,
        kernel: kernel::DEFAULT.to_owned(),
        bench: true,
        icount: true,
        smp: 1,
        gpus: 1,
        bar: BAR_MIB,
        timeout: Some(1800),
        env: vec![vm::SYSTEM_PROGRAMS.to_owned()],
        frozen: true,
        ..Options::default()
    };
    match module {
        Peermem::Nvidia => (flavour.theirs)(&mut options),
        _ => (flavour.ours)(&mut options),
    }
    let boot = setup::boot(paths, &options)?;
    let mut command = programs::gdr_command(paths, "bench");
    let (lengths, fragmented, regions) = match (selection.quick, selection.long) {
        (true, _) => ("64K,1M,1G", "1G", "1,10,100"),
        // Later rounds show the spread, and the rest is done once.
        _ if round > 0 => ("64K,1M,16M,256M,1G", "256M", "1,10,100"),
        (_, false) => ("64K,1M,16M,256M,1G,8G,64G", "1G", "1,10,100,1000,10000"),
        (_, true) => ("64K,1M,16M,256M,1G,8G,64G", "64G", "1,10,100,1000,10000"),
    };
    let repeats = selection.repeats.to_string();
    command.extend(
        [
            ["--lengths", lengths],
            ["--longest-fragmented", fragmented],
            ["--regions", regions],
            ["--repeats", &repeats],
        ]
        .concat()
        .into_iter()
        .map(str::to_owned),
    );
    let (outcome, (lines, said)) = vm::run_with(
        paths,
        &options,
        &boot,
        &command,
        (Vec::new(), Vec::new()),
        |(lines, said), line, _| match serde_json::from_str::<Line>(line) {
            Ok(found) => lines.push(found),
            Err(_) => said.push(line.to_owned()),
        },
    )?;
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
    Ok(Said {
        lines,
        version: boot.peermem_version,
        release: boot.release,
    })
}

/// All of a flavour, of all rounds.
struct Measured {
    name: &'static str,
    ours: BTreeMap<What, Row>,
    theirs: BTreeMap<What, Row>,
    /// Ours and theirs.
    freed: [BTreeMap<u64, Figure>; 2],
    goals: Vec<Goal>,
}

/// Where it was measured.
#[derive(Debug, Clone, Serialize)]
struct Machine {
    processor: String,
    qemu: String,
    kernel: String,
    ours: String,
    theirs: String,
    rounds: usize,
    calibration: Calibration,
}

/// A row of the JSON.
#[derive(Serialize)]
struct Entry<'a> {
    flavour: &'static str,
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
    machine: &'a Machine,
    goals: BTreeMap<&'static str, &'a [Goal]>,
    /// By flavour, ours and NVIDIA's: regions, and nanoseconds of the machine's clock.
    revocations: BTreeMap<&'static str, &'a [BTreeMap<u64, Figure>; 2]>,
    rows: Vec<Entry<'a>>,
}

fn first_line(program: &str, arguments: &[&str]) -> Result<String> {
    let output = std::process::Command::new(program)
        .args(arguments)
        .env("PATH", vm::system_path())
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
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

fn calibration(lines: &[Line]) -> Result<Calibration> {
    lines
        .iter()
        .find_map(|line| match line {
            Line::Calibration(found) => Some(*found),
            _ => None,
        })
        .context("what measuring adds was not said")
}

/// Runs all rounds; the tables, and where the rest lies. 1 where a goal is missed.
pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    let started = Instant::now();
    let rounds = if selection.quick { 1 } else { selection.rounds };
    ensure!(rounds > 0, "no rounds");
    setup::all(paths, [kernel::DEFAULT])?;
    let mut said: Vec<[Vec<Line>; 2]> = FLAVOURS.iter().map(|_| [Vec::new(), Vec::new()]).collect();
    let mut versions = [String::new(), String::new()];
    let mut release = String::new();
    for round in 0..rounds {
        for (flavour, lines) in FLAVOURS.iter().zip(&mut said) {
            let mut order = [(0, Peermem::Ours), (1, Peermem::Nvidia)];
            if round % 2 == 1 {
                order.reverse();
            }
            for (index, module) in order {
                let begun = Instant::now();
                let found = measure(paths, selection, round, flavour, module)
                    .with_context(|| format!("{}, {}", module.name(), flavour.name))?;
                println!(
                    "  round {} of {rounds}: {}, {}: {} lines ({})",
                    round + 1,
                    module.name(),
                    flavour.name,
                    found.lines.len(),
                    duration(begun.elapsed())
                );
                lines[index].extend(found.lines);
                versions[index] = found.version;
                release = found.release;
            }
        }
    }
    let [ours, theirs] = versions;
    let machine = Machine {
        processor: processor()?,
        qemu: first_line("qemu-system-x86_64", &["--version"])?,
        kernel: release,
        ours,
        theirs,
        rounds,
        calibration: calibration(said.iter().flatten().next().context("no flavours")?)?,
    };
    let mut measured = Vec::new();
    for (flavour, [ours, theirs]) in FLAVOURS.iter().zip(&said) {
        let freed = [record::revocations(ours)?, record::revocations(theirs)?];
        let (ours, theirs) = (record::rows(ours)?, record::rows(theirs)?);
        let mut goals = goals::of_registrations(&goals::pairs(&ours, &theirs));
        goals.extend(goals::of_revocations(&freed[0], &freed[1]));
        measured.push(Measured {
            name: flavour.name,
            ours,
            theirs,
            freed,
            goals,
        });
    }
    write(paths, selection, &machine, &measured)?;
    println!("measured in {}", duration(started.elapsed()));
    let missed = measured
        .iter()
        .flat_map(|flavour| &flavour.goals)
        .filter(|goal| goal.is_met() == Some(false))
        .count();
    if missed > 0 {
        println!("bench: {missed} goals missed");
        return Ok(1);
    }
    println!("bench: all goals met");
    Ok(0)
}

fn write(
    paths: &Paths,
    selection: &Selection,
    machine: &Machine,
    measured: &[Measured],
) -> Result<()> {
    let folder = match &selection.results {
        Some(folder) => folder.clone(),
        None => paths.repo.join("results"),
    };
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut results = Results {
        machine,
        goals: BTreeMap::new(),
        revocations: BTreeMap::new(),
        rows: Vec::new(),
    };
    for flavour in measured {
        results.goals.insert(flavour.name, &flavour.goals);
        results.revocations.insert(flavour.name, &flavour.freed);
        for (module, rows) in [("ours", &flavour.ours), ("nvidia", &flavour.theirs)] {
            results.rows.extend(rows.iter().map(|(what, row)| Entry {
                flavour: flavour.name,
                module,
                what,
                row,
                whole_ns: goals::whole(what, row),
                mutex_ns: goals::mutex(what, row),
            }));
        }
        let pairs = goals::pairs(&flavour.ours, &flavour.theirs);
        let file = |name: &str| folder.join(format!("{name}-{}.svg", flavour.name));
        let title = |what: &str| format!("{what}, {}", flavour.name);
        plot::draw(
            &file("own"),
            &title("own cost of a registration's life"),
            "instructions",
            &pairs,
            |_, row| row.own.median,
        )?;
        plot::draw(
            &file("whole"),
            &title("whole cost at a V100's prices"),
            "nanoseconds",
            &pairs,
            goals::whole,
        )?;
        plot::draw(
            &file("memory"),
            &title("own kernel memory while registered"),
            "bytes",
            &pairs,
            |_, row| row.held as f64,
        )?;
    }
    fs::write(
        folder.join("bench.json"),
        serde_json::to_string_pretty(&results)?,
    )?;
    let text = page::tables(measured);
    fs::write(folder.join("tables.md"), &text)?;
    print!("{text}");
    println!("  results: {}", folder.display());
    if !selection.quick {
        let file = paths.repo.join(page::PAGE);
        fs::write(&file, page::page(machine, measured))?;
        println!("  {} written", file.display());
    }
    Ok(())
}
