// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Runs the suite and tells how it went.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::io::stdout;
use std::io::IsTerminal as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread;
use std::time::Instant;

use anyhow::anyhow;
use anyhow::Context as _;
use anyhow::Result;
use clap::Args;

use crate::documents;
use crate::mutants;
use crate::paths::Paths;
use crate::preflight;
use crate::programs;
use crate::progress::duration;
use crate::results::Format;
use crate::results::Reader;
use crate::results::Test;
use crate::results::Verdict;
use crate::setup;
use crate::suite::again;
use crate::suite::Place;
use crate::suite::Run;
use crate::suite::SUITE;
use crate::toolchain::Toolchain;
use crate::vm;
use crate::vm::Channels;
use crate::vm::Options;

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Only runs whose name contains this
    filter: Option<String>,
    /// Only cases of the verbs program whose name contains this
    #[arg(long, default_value = "")]
    case: String,
    /// Also the runs that take long
    #[arg(long)]
    full: bool,
    /// Another kernel for all runs: a flavour, or a build tree by its path
    #[arg(long, value_name = "FLAVOUR|PATH", default_value = crate::kernel::DEFAULT)]
    kernel: String,
    /// Also looks at the form of the code
    #[arg(long)]
    lint: bool,
    /// Writes the parts of the documentation that are made from results, where they are not what was seen
    #[arg(long)]
    update_docs: bool,
    /// So many runs at once; a machine keeps little more than one processor busy
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    /// Names the runs and runs none
    #[arg(long)]
    list: bool,
}

/// What came of one run.
struct Report {
    run: &'static Run,
    column: Option<String>,
    tests: Vec<Test>,
    /// What went wrong beside the tests; each counts as a failure.
    problems: Vec<String>,
    elapsed: std::time::Duration,
    log: Option<PathBuf>,
}

impl Report {
    /// Of a run that is not one machine: it has no column and no log.
    fn plain(run: &'static Run, started: Instant, tests: Vec<Test>, problems: Vec<String>) -> Self {
        Self {
            run,
            column: None,
            tests,
            problems,
            elapsed: started.elapsed(),
            log: None,
        }
    }

    /// Names of tests that failed and were not known to fail, and of those that were and passed.
    fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        for test in &self.tests {
            let known = self.run.known.iter().find(|(name, _)| *name == test.name);
            match (&test.verdict, known) {
                (Verdict::Failed, None) => failures.push(test.name.clone()),
                (Verdict::Passed, Some((name, reason))) => {
                    failures.push(format!("{name} passed, though: {reason}"));
                }
                _ => {}
            }
        }
        failures.extend(self.problems.iter().cloned());
        failures
    }

    fn passed(&self) -> usize {
        let skipped = self.skipped().count();
        let failed = self.failures().len() - self.problems.len();
        self.tests.len() - skipped - failed
    }

    fn skipped(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tests.iter().filter_map(|test| match &test.verdict {
            Verdict::Skipped(reason) => Some((test.name.as_str(), reason.as_str())),
            _ => None,
        })
    }
}

pub(crate) fn suite(paths: &Paths, selection: &Selection) -> Result<i32> {
    // Who names a kernel has chosen the one that he wants.
    let again = match selection.full && selection.kernel == crate::kernel::DEFAULT {
        true => crate::kernel::others().flat_map(again).collect(),
        false => Vec::new(),
    };
    let runs: Vec<&'static Run> = SUITE
        .iter()
        .chain(again.leak().iter())
        .filter(|run| selection.full || !run.only_in_full)
        .filter(|run| selection.lint || !matches!(run.place, Place::Lint))
        .filter(|run| {
            let filter = selection.filter.as_deref().unwrap_or_default();
            run.name.contains(filter)
        })
        .collect();
    if selection.list {
        for run in &runs {
            println!("{}", run.name);
        }
        return Ok(0);
    }
    if runs.is_empty() {
        return Err(anyhow!("no run has that in its name (see --list)"));
    }
    let kernels: BTreeSet<String> = runs
        .iter()
        .filter_map(|run| match run.place {
            Place::Vm { options, .. } => Some(wanted(selection, run, options).kernel),
            Place::Mutants | Place::Debian | Place::Contact => {
                Some(crate::kernel::DEFAULT.to_owned())
            }
            _ => None,
        })
        .chain([selection.kernel.clone()])
        .collect();
    let names: Vec<&str> = kernels.iter().map(String::as_str).collect();
    let wanted = preflight::Wanted {
        kernels: &names,
        modules: true,
        programs: true,
        machines: selection.jobs,
    };
    preflight::check(paths, &wanted)?;
    eprintln!("rig: making what the tests need");
    let (others, usual): (Vec<&str>, Vec<&str>) = kernels
        .iter()
        .map(String::as_str)
        .partition(|name| crate::kernel::others().any(|other| other == *name));
    setup::all(paths, usual)?;
    for name in others {
        // Its runs fail then; the others go on.
        if let Err(error) = setup::all(paths, [name]) {
            eprintln!("rig: kernel {name}: {error:#}");
        }
    }
    let toolchain = Toolchain::find(paths)?;

    let mut reports = all(paths, &toolchain, &runs, selection);
    agreement(&mut reports);
    // Of other kernels, or of a part of the cases, the documentation says nothing.
    if "input.".starts_with(&selection.case) && selection.kernel == crate::kernel::DEFAULT {
        bad_input(paths, &mut reports, selection.update_docs);
    }
    Ok(summary(&reports))
}

/// Does all runs, some of them side by side, and tells of each when it has ended. The reports come in the order of `runs`.
fn all(
    paths: &Paths,
    toolchain: &Toolchain,
    runs: &[&'static Run],
    selection: &Selection,
) -> Vec<Report> {
    let reports: Mutex<Vec<(usize, Report)>> = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    let work = || loop {
        let at = next.fetch_add(1, Relaxed);
        let Some(run) = runs.get(at) else {
            return;
        };
        let title = format!("[{}/{}] {}", at + 1, runs.len(), run.name);
        println!("{title} …");
        let started = Instant::now();
        let report = match one(paths, toolchain, run, selection) {
            Ok(report) => report,
            // A run that cannot even begin fails; the others go on.
            Err(error) => Report::plain(run, started, Vec::new(), vec![format!("{error:#}")]),
        };
        // What others print comes before or after.
        let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
        println!("{title}");
        tell(&report);
        reports.push((at, report));
    };
    thread::scope(|scope| {
        for _ in 1..selection.jobs {
            scope.spawn(work);
        }
        work();
    });
    let mut reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    reports.sort_by_key(|(at, _)| *at);
    reports.into_iter().map(|(_, report)| report).collect()
}

/// Compares the runs that must have the same results.
fn agreement(reports: &mut [Report]) {
    for at in 0..reports.len() {
        let report = &reports[at];
        let Some(other) = reports
            .iter()
            .find(|other| report.run.same_as == Some(other.run.name))
            // Where one of them gave no results at all, that is its failure, told once.
            .filter(|other| !other.tests.is_empty() && !report.tests.is_empty())
        else {
            continue;
        };
        let problems = differences(&other.tests, &report.tests);
        for problem in &problems {
            println!("      FAILED: {}: {problem}", report.run.name);
        }
        reports[at].problems.extend(problems);
    }
}

/// Compares the table of bad input with what was seen, if all that it is made from was run.
fn bad_input(paths: &Paths, reports: &mut [Report], update: bool) {
    let of = |name: &&str| reports.iter().find(|report| report.run.name == *name);
    let runs: Vec<&[Test]> = documents::BAD_INPUT_RUNS
        .iter()
        .filter_map(of)
        .map(|report| report.tests.as_slice())
        .collect();
    let Ok(runs) = <[&[Test]; 4]>::try_from(runs) else {
        return;
    };
    let file = paths.repo.join("docs/bad-input.md");
    let problem = documents::bad_input(runs)
        .and_then(|part| documents::check(&file, "bad input", &part, update))
        .unwrap_or_else(|error| Some(format!("docs/bad-input.md: {error:#}")));
    if let (Some(problem), Some(report)) = (problem, reports.last_mut()) {
        println!("      FAILED: {problem}");
        report.problems.push(problem);
    }
}

/// The checks of the code's form by themselves.
pub(crate) fn lint(paths: &Paths) -> Result<i32> {
    let tests = setup::lint(paths)?;
    let mut failed = 0;
    for test in &tests {
        if test.verdict == Verdict::Passed {
            println!("  {}: ok", test.name);
        } else {
            failed += 1;
            println!("  {}: FAILED", test.name);
            for note in &test.notes {
                println!("      {note}");
            }
        }
    }
    Ok(i32::from(failed > 0))
}

const DEMO_OK: &str = "demo: ok";

/// The demo. Whether it went well is for this side to say: it has seen the kernel's log as well.
pub(crate) fn demo(paths: &Paths) -> Result<i32> {
    setup::all(paths, [crate::kernel::DEFAULT])?;
    let options = Options {
        timeout: Some(600),
        with_control: true,
        // Room for a region of 1 GiB.
        bar: 4096,
        ..Options::default()
    };
    let boot = setup::boot(paths, &options)?;
    let command = programs::gdr_command(paths, "demo");
    let outcome = vm::run(
        paths,
        &options,
        &boot,
        &command,
        Channels::Lines(Box::new(|line, is_error| {
            if is_error {
                eprintln!("{line}");
            } else if line != DEMO_OK {
                println!("{line}");
            }
        })),
    )?;
    for failure in &outcome.failures {
        println!("{}", failure.trim_end());
    }
    let code = outcome.exit_code();
    if code == 0 {
        println!("{DEMO_OK}");
    } else {
        println!("kernel log: {}", outcome.log.display());
        println!("demo: FAILED");
    }
    Ok(code)
}

/// What differs between two runs that are to be the same.
fn differences(one: &[Test], other: &[Test]) -> Vec<String> {
    let word = |test: Option<&Test>| match test.map(|test| &test.verdict) {
        None => "absent",
        Some(Verdict::Passed) => "passed",
        Some(Verdict::Failed) => "failed",
        Some(Verdict::Skipped(_)) => "skipped",
    };
    let mut pairs: BTreeMap<&str, [Option<&Test>; 2]> = BTreeMap::new();
    for (side, tests) in [one, other].into_iter().enumerate() {
        for test in tests {
            pairs.entry(&test.name).or_default()[side] = Some(test);
        }
    }
    pairs
        .into_iter()
        .filter(|(_, [one, other])| word(*one) != word(*other))
        .map(|(name, [one, other])| format!("{name}: {} there, {} here", word(one), word(other)))
        .collect()
}

/// The machine of a run.
fn wanted(selection: &Selection, run: &Run, options: fn(&mut Options)) -> Options {
    let mut wanted = Options {
        kernel: run.kernel.unwrap_or(&selection.kernel).to_owned(),
        frozen: true,
        env: vec![vm::SYSTEM_PROGRAMS.to_owned()],
        ..Options::default()
    };
    options(&mut wanted);
    wanted
}

fn one(
    paths: &Paths,
    toolchain: &Toolchain,
    run: &'static Run,
    selection: &Selection,
) -> Result<Report> {
    let started = Instant::now();
    let (tests, problems) = match run.place {
        Place::Cargo(arguments) => on_host(paths, toolchain, run, arguments)?,
        Place::Lint => (setup::lint(paths)?, Vec::new()),
        Place::Mutants => (mutants::tests(paths, &[])?, Vec::new()),
        Place::Debian => setup::debian(paths)?,
        Place::Contact => (setup::contact(paths)?, Vec::new()),
        Place::Hazards => {
            let frozen = selection.kernel == crate::kernel::DEFAULT;
            crate::hazards::check(paths, frozen)?
        }
        Place::Vm { options, command } => {
            let wanted = wanted(selection, run, options);
            let mut words = Vec::new();
            for word in command {
                let mut word = word
                    .replace("{repo}", &vm::in_machine(&paths.repo))
                    .replace("{filter}", &selection.case)
                    .replace("{gdr}", &vm::in_machine(&programs::gdr(paths)))
                    .replace(
                        "{peermemctl}",
                        &vm::in_machine(&programs::peermemctl(paths)),
                    );
                if word.contains("{promtool}") {
                    word = word.replace("{promtool}", &vm::in_machine(&programs::promtool(paths)?));
                }
                if word.contains("{pyverbs}") {
                    word = word.replace("{pyverbs}", &vm::in_machine(&programs::pyverbs(paths)?));
                }
                if !word.is_empty() {
                    words.push(word);
                }
            }
            return in_machine(paths, run, &wanted, &words);
        }
    };
    Ok(Report::plain(run, started, tests, problems))
}

/// Shows a terminal's reader how far a run is.
fn show(line: &str) {
    if stdout().is_terminal() {
        let line: String = line.chars().take(100).collect();
        print!("\r\x1b[K      {line}");
        let _ = stdout().flush();
    }
}

fn clear() {
    if stdout().is_terminal() {
        print!("\r\x1b[K");
    }
}

fn in_machine(
    paths: &Paths,
    run: &'static Run,
    options: &Options,
    command: &[String],
) -> Result<Report> {
    let boot = setup::boot(paths, options)?;
    let (outcome, tests) = machine(paths, options, &boot, command, run.format)?;
    Ok(Report {
        run,
        column: run
            .column
            .map(|column| column.replace("{version}", &boot.peermem_version)),
        tests,
        problems: outcome.failures,
        elapsed: outcome.elapsed,
        log: Some(outcome.log),
    })
}

/// Runs a command that prints tests in a machine. What its exit status should not say is among the failures.
pub(crate) fn machine(
    paths: &Paths,
    options: &Options,
    boot: &vm::Boot,
    command: &[String],
    format: Format,
) -> Result<(vm::Outcome, Vec<Test>)> {
    let (mut outcome, (reader, said)) = vm::run_with(
        paths,
        options,
        boot,
        command,
        (Reader::new(format), Vec::new()),
        |(reader, said), line, is_error| {
            said.push(line.to_owned());
            if is_error {
                return;
            }
            if let Some(test) = reader.line(line) {
                show(&test.name);
            }
        },
    )?;
    clear();
    let (tests, mut problems) = reader.finish();
    problems.append(&mut outcome.failures);
    status_problem(outcome.status, &tests, &mut problems);
    add_last_words(&said, &mut problems);
    outcome.failures = problems;
    Ok((outcome, tests))
}

/// A program's exit status must say what its results say.
pub(crate) fn status_problem(status: Option<i32>, tests: &[Test], problems: &mut Vec<String>) {
    let Some(status) = status else {
        return;
    };
    let failed = tests.iter().any(|test| test.verdict == Verdict::Failed);
    if (status != 0) != failed {
        problems.push(format!(
            "its exit status is {status}, {} failed tests",
            if failed { "with" } else { "without" }
        ));
    }
}

/// Tells with the last problem, if there is one, what the program said last.
pub(crate) fn add_last_words(said: &[String], problems: &mut [String]) {
    if let (Some(last), false) = (problems.last_mut(), said.is_empty()) {
        let tail = &said[said.len().saturating_sub(20)..];
        last.push_str(&format!("\n    it said last:\n    {}", tail.join("\n    ")));
    }
}

fn on_host(
    paths: &Paths,
    toolchain: &Toolchain,
    run: &Run,
    arguments: &[&str],
) -> Result<(Vec<Test>, Vec<String>)> {
    let output = toolchain
        .cargo(paths)
        .args(arguments)
        .arg("--locked")
        .current_dir(&paths.repo)
        .stdin(Stdio::null())
        .output()
        .context("cannot start cargo")?;
    let mut reader = Reader::new(run.format);
    let text = String::from_utf8_lossy(&output.stdout);
    for line in text.lines() {
        reader.line(line);
    }
    let (tests, mut problems) = reader.finish();
    status_problem(output.status.code(), &tests, &mut problems);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = text.lines().chain(errors.lines()).collect();
        let tail = &said[said.len().saturating_sub(60)..];
        problems.push(format!(
            "cargo {}:\n    {}",
            arguments.join(" "),
            tail.join("\n    ")
        ));
    }
    Ok((tests, problems))
}

fn tell(report: &Report) {
    let failures = report.failures();
    let skipped = report.skipped().count();
    let mut line = format!("      {} passed", report.passed());
    if !failures.is_empty() {
        line.push_str(&format!(", {} FAILED", failures.len()));
    }
    if skipped > 0 {
        line.push_str(&format!(", {skipped} skipped"));
    }
    println!("{line} ({})", duration(report.elapsed));
    for test in &report.tests {
        if let Some(shown) = report.run.shown {
            for (name, value) in figures(test) {
                if name.starts_with(shown) {
                    println!("      {name}: {value}");
                }
            }
        }
        if test.verdict != Verdict::Failed {
            continue;
        }
        let known = report.run.known.iter().find(|(name, _)| *name == test.name);
        match known {
            Some((name, reason)) => println!("      fails as known: {name}: {reason}"),
            None => {
                println!("      FAILED: {}", test.name);
                for note in &test.notes {
                    println!("          {note}");
                }
            }
        }
    }
    for (name, reason) in report.run.known {
        let passed = report
            .tests
            .iter()
            .any(|test| test.name == *name && test.verdict == Verdict::Passed);
        if passed {
            println!("      FAILED: {name} passed, though: {reason}");
        }
    }
    for problem in &report.problems {
        println!("      FAILED: {}", problem.trim_end());
    }
    if let (false, Some(log)) = (failures.is_empty(), &report.log) {
        println!("      kernel log: {}", log.display());
    }
}

/// Figures that a test measured, by name. Several of one name stand together.
fn figures(test: &Test) -> BTreeMap<&str, String> {
    let mut found: BTreeMap<&str, String> = BTreeMap::new();
    for note in &test.notes {
        let Some((name, value)) = note.split_once(' ') else {
            continue;
        };
        // Said by every test, and no figure of what it tests.
        if matches!(name, "seconds" | "seed" | "failure:" | "kernel:") {
            continue;
        }
        let values = found.entry(name).or_default();
        if !values.is_empty() {
            values.push(' ');
        }
        values.push_str(value);
    }
    found
}

/// The lines of one case: its verdicts, and below them the figures that are not the same in all columns.
fn rows<'a>(name: &'a str, results: &[Option<&'a Test>]) -> Vec<Vec<String>> {
    let verdicts = results
        .iter()
        .map(|test| match test.map(|test| &test.verdict) {
            None => "",
            Some(Verdict::Passed) => "ok",
            Some(Verdict::Failed) => "FAILS",
            Some(Verdict::Skipped(_)) => "-",
        });
    let mut rows = vec![[name]
        .into_iter()
        .chain(verdicts)
        .map(str::to_owned)
        .collect()];
    let measured: Vec<Option<BTreeMap<&str, String>>> = results
        .iter()
        .map(|test| {
            test.filter(|test| !matches!(test.verdict, Verdict::Skipped(_)))
                .map(figures)
        })
        .collect();
    let names: BTreeSet<&str> = measured
        .iter()
        .flatten()
        .flat_map(BTreeMap::keys)
        .copied()
        .collect();
    for figure in names {
        let values: Vec<Option<&str>> = measured
            .iter()
            .map(|figures| Some(figures.as_ref()?.get(figure).map_or("", String::as_str)))
            .collect();
        let different: BTreeSet<&str> = values.iter().flatten().copied().collect();
        if different.len() < 2 {
            continue;
        }
        let mut row = vec![format!("    {figure}")];
        row.extend(
            values
                .iter()
                .map(|value| cut(value.unwrap_or_default(), CELL)),
        );
        rows.push(row);
    }
    rows
}

/// The widest figure of the table.
const CELL: usize = 48;

/// A text's beginning, where it is longer than `most` characters.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

/// The same cases with each peer-memory module, side by side.
fn table(reports: &[Report]) {
    let mut columns: Vec<&str> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    let mut results: BTreeMap<(&str, &str), &Test> = BTreeMap::new();
    for report in reports {
        let Some(column) = report.column.as_deref() else {
            continue;
        };
        if !columns.contains(&column) {
            columns.push(column);
        }
        for test in &report.tests {
            if !names.contains(&test.name.as_str()) {
                names.push(&test.name);
            }
            results.insert((&test.name, column), test);
        }
    }
    if columns.len() < 2 {
        return;
    }
    let mut lines = vec![[""]
        .iter()
        .chain(&columns)
        .map(|&word| word.to_owned())
        .collect()];
    for name in names {
        let tests: Vec<Option<&Test>> = columns
            .iter()
            .map(|column| results.get(&(name, *column)).copied())
            .collect();
        lines.extend(rows(name, &tests));
    }
    let widths: Vec<usize> = (0..=columns.len())
        .map(|at| {
            lines
                .iter()
                .map(|line| line[at].chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    println!("\nThe same cases with each module, and the figures in which they differ");
    for line in &lines {
        let cells: Vec<String> = line
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        println!("  {}", cells.join("  ").trim_end());
    }
}

/// Says which tests were skipped, and why, and returns how many.
fn list_skipped(reports: &[Report]) -> usize {
    // By test and reason, the runs; then by reason and runs, the tests: most are skipped together.
    let mut runs: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for report in reports {
        for skipped in report.skipped() {
            runs.entry(skipped).or_default().push(report.run.name);
        }
    }
    let count = runs.values().map(Vec::len).sum();
    let mut groups: BTreeMap<(&str, Vec<&str>), Vec<&str>> = BTreeMap::new();
    for ((name, reason), runs) in runs {
        groups.entry((reason, runs)).or_default().push(name);
    }
    if count > 0 {
        println!("\nSkipped");
    }
    for ((reason, runs), names) in groups {
        println!("  {reason}");
        println!("    in {}", runs.join("; "));
        let mut line = String::new();
        for name in names {
            if !line.is_empty() && line.len() + name.len() > 100 {
                println!("     {line}");
                line.clear();
            }
            line.push(' ');
            line.push_str(name);
        }
        println!("     {line}");
    }
    count
}

/// The end of the output. Its last line is for programs.
fn summary(reports: &[Report]) -> i32 {
    table(reports);
    let skips = list_skipped(reports);
    let failures: Vec<(&str, String)> = reports
        .iter()
        .flat_map(|report| {
            report
                .failures()
                .into_iter()
                .map(|failure| (report.run.name, failure))
        })
        .collect();
    if !failures.is_empty() {
        println!("\nFailed");
        for (run, failure) in &failures {
            println!("  {run}: {}", failure.lines().next().unwrap_or_default());
        }
    }
    let passed: usize = reports.iter().map(Report::passed).sum();
    let skips = if skips > 0 {
        format!(", {skips} skipped")
    } else {
        String::new()
    };
    println!("\n{passed} passed, {} failed{skips}", failures.len());
    i32::from(!failures.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_figures_are_cut() {
        assert_eq!(cut("ab…d", 4), "ab…d");
        assert_eq!(cut("ab…de", 4), "ab……");
    }

    fn test(name: &str, verdict: Verdict) -> Test {
        Test {
            name: name.to_owned(),
            verdict,
            notes: vec!["pins 1".to_owned(), "seconds 0.2".to_owned()],
        }
    }

    static RUN: Run = Run {
        name: "run",
        place: Place::Cargo(&[]),
        format: Format::Ktap,
        column: None,
        known: &[("b", "reason"), ("c", "reason")],
        same_as: None,
        shown: None,
        only_in_full: false,
        kernel: None,
    };

    fn report(tests: Vec<Test>, problems: Vec<String>) -> Report {
        Report {
            run: &RUN,
            column: None,
            tests,
            problems,
            elapsed: std::time::Duration::ZERO,
            log: None,
        }
    }

    #[test]
    fn known_failures_must_fail() {
        let report = report(
            vec![
                test("a", Verdict::Passed),
                test("b", Verdict::Failed),
                test("c", Verdict::Passed),
                test("d", Verdict::Failed),
                test("e", Verdict::Skipped("x".into())),
            ],
            vec!["the machine died".into()],
        );
        assert_eq!(
            report.failures(),
            ["c passed, though: reason", "d", "the machine died"]
        );
        assert_eq!(report.passed(), 2);
    }

    #[test]
    fn runs_that_must_agree() {
        let one = [test("a", Verdict::Passed), test("b", Verdict::Failed)];
        let other = [
            test("a", Verdict::Passed),
            test("b", Verdict::Passed),
            test("c", Verdict::Passed),
        ];
        assert_eq!(
            differences(&one, &other),
            [
                "b: failed there, passed here",
                "c: absent there, passed here"
            ]
        );
    }

    #[test]
    fn runs_that_must_agree_are_found_whichever_ends_first() {
        static OTHER: Run = Run {
            name: "other",
            same_as: Some("run"),
            ..RUN
        };
        let first = || report(vec![test("a", Verdict::Passed)], Vec::new());
        let second = |tests| Report {
            run: &OTHER,
            ..report(tests, Vec::new())
        };
        let failed = || vec![test("a", Verdict::Failed)];
        for mut reports in [[first(), second(failed())], [second(failed()), first()]] {
            agreement(&mut reports);
            let problems: Vec<&String> = reports.iter().flat_map(|one| &one.problems).collect();
            assert_eq!(problems, ["a: passed there, failed here"]);
        }
        // One without results has said why.
        let mut reports = [first(), second(Vec::new())];
        agreement(&mut reports);
        assert!(reports.iter().all(|one| one.problems.is_empty()));
    }

    #[test]
    fn an_exit_status_must_agree_with_the_results() {
        let mut problems = Vec::new();
        status_problem(Some(0), &[test("a", Verdict::Passed)], &mut problems);
        status_problem(Some(1), &[test("a", Verdict::Failed)], &mut problems);
        assert!(problems.is_empty());
        status_problem(Some(1), &[test("a", Verdict::Passed)], &mut problems);
        status_problem(Some(0), &[test("a", Verdict::Failed)], &mut problems);
        assert_eq!(problems.len(), 2);
    }

    #[test]
    fn figures_that_differ_have_a_row() {
        let mut one = test("a", Verdict::Passed);
        let mut other = test("a", Verdict::Passed);
        one.notes = vec![
            "pins 1".into(),
            "bytes 8".into(),
            "seconds 1".into(),
            "pins 3".into(),
        ];
        other.notes = vec!["pins 2".into(), "bytes 8".into(), "seconds 2".into()];
        let skipped = test("a", Verdict::Skipped("x".into()));
        assert_eq!(
            rows("a", &[Some(&one), Some(&other), Some(&skipped), None]),
            [["a", "ok", "ok", "-", ""], ["    pins", "1 3", "2", "", ""]]
        );
        assert_eq!(rows("a", &[Some(&one), None]), [["a", "ok", ""]]);
    }
}
