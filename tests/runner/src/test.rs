// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Runs the suite and reports the results.

mod last_passes;
mod report;
mod skips;
mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{anyhow, Context as _, Result};
use clap::Args;

use self::report::{missing, Origin, Report};
use self::skips::Skips;
use self::tables::summary;
use crate::arch::Arch;
use crate::history::{History, When};
use crate::kept::{Pass, Shelf};
use crate::paths::Paths;
use crate::results::{Test, Verdict, DEMO_OK};
use crate::suite::{again, every_run, Place, Run, Same};
use crate::toolchain::Toolchain;
use crate::vm::{Channels, Options, Peermem};
use crate::{
    cases, contact, debian, documents, guest, history, kept, lint, mutants, packages, preflight,
    programs, results, setup, vm,
};

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Runs only rows whose name contains this text
    filter: Option<String>,
    /// Runs only the row with exactly this name
    #[arg(long, requires = "filter")]
    exact: bool,
    /// Also runs slow rows, and repeats unchanged rows; implies --strict; without a filter,
    /// continues an interrupted pass
    #[arg(long)]
    full: bool,
    /// Starts a pass of --full from the beginning
    #[arg(long, requires = "full")]
    restart: bool,
    /// Also repeats rows that passed and have not changed
    #[arg(long)]
    fresh: bool,
    /// Does not repeat a failed row
    #[arg(long)]
    strict: bool,
    /// Also runs the linters
    #[arg(long)]
    lint: bool,
    /// Updates the generated parts of the documentation
    #[arg(long)]
    update_docs: bool,
    /// Writes the skipped tests to tests/runner/skips
    #[arg(long)]
    update_skips: bool,
    /// Number of rows that run at once; a VM keeps little more than one processor busy
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    /// Lists the rows and runs none
    #[arg(long)]
    list: bool,
}

pub(crate) fn suite(paths: &Paths, selection: &Selection) -> Result<i32> {
    let began = Instant::now();
    let again = match selection.full {
        true => crate::kernel::others().flat_map(again).collect(),
        false => Vec::new(),
    };
    let runs: Vec<&'static Run> = every_run()
        .iter()
        .chain(again.leak().iter())
        .filter(|run| selection.full || !run.only_in_full)
        .filter(|run| selection.lint || !matches!(run.place, Place::Lint))
        .filter(|run| {
            let filter = selection.filter.as_deref().unwrap_or_default();
            match selection.exact {
                true => run.name == filter,
                false => run.name.contains(filter),
            }
        })
        .collect();
    if selection.list {
        for run in &runs {
            println!("{}", run.name);
        }
        return Ok(0);
    }
    if runs.is_empty() {
        return Err(anyhow!("no run's name contains these words (see --list)"));
    }
    let kernels: BTreeSet<String> = runs
        .iter()
        .filter_map(|run| kernel_of(run))
        .chain([crate::kernel::DEFAULT.to_owned()])
        .collect();
    let names: Vec<&str> = kernels.iter().map(String::as_str).collect();
    let wanted = preflight::Wanted {
        kernels: &names,
        modules: true,
        programs: true,
        machines: runs
            .iter()
            .map(|run| run.machines())
            .max()
            .unwrap_or(1)
            .max(selection.jobs),
    };
    preflight::check(paths, &wanted)?;
    eprintln!("runner: making what the tests need");
    let (others, usual): (Vec<&str>, Vec<&str>) =
        kernels.iter().map(String::as_str).partition(|name| {
            crate::kernel::flavour(name).is_some_and(|flavour| flavour.only_in_full)
                || crate::kernel::others().any(|other| other == *name)
        });
    setup::all(paths, usual)?;
    let mut broken = BTreeMap::new();
    for name in others {
        // If a kernel cannot be made, its runs fail, and the other runs continue.
        if let Err(error) = setup::all(paths, [name]) {
            let error = format!("{error:#}");
            eprintln!("runner: kernel {name}: {error}");
            broken.insert(name.to_owned(), error);
        }
    }
    let suite = Suite {
        paths,
        toolchain: Toolchain::find(paths)?,
        selection,
        broken,
        now: When::now(paths),
        unchanged: Shelf::unchanged(paths),
        pass: selection.pass(paths),
        history: Mutex::new(History::load(paths)),
        skips: Skips::load(paths)?,
    };

    let mut reports = suite.all(&runs);
    if !selection.is_strict() {
        suite.second_tries(&mut reports);
    }
    agreement(&mut reports);
    compare_documents(paths, &mut reports, selection);
    if selection.update_docs {
        last_passes::write(paths, &History::load(paths))?;
    }
    let code = summary(&reports, began.elapsed());
    // If a run failed, the progress of `make test-all` is kept. The next call then does only the
    // runs that have not passed.
    if let (0, Some(pass)) = (code, &suite.pass) {
        pass.end()?;
    }
    if selection.update_skips {
        suite.skips.update(paths, &reports)?;
    }
    Ok(code)
}

impl Selection {
    /// Returns the pass that this call belongs to. Runs that a filter selects belong to no pass.
    fn pass(&self, paths: &Paths) -> Option<Pass> {
        if !self.full || self.filter.is_some() {
            return None;
        }
        Pass::resume(paths, self.restart)
            .inspect_err(|error| eprintln!("runner: cannot resume the pass: {error:#}"))
            .ok()
    }

    fn is_strict(&self) -> bool {
        self.strict || self.full
    }

    fn takes_unchanged(&self) -> bool {
        !self.fresh && !self.full
    }
}

fn kernel_of(run: &Run) -> Option<String> {
    match run.place {
        Place::Vm { .. } => run.machine().map(|machine| machine.kernel),
        Place::Hazards(_) => Some(run.kernel.unwrap_or(crate::kernel::DEFAULT).to_owned()),
        Place::Debian(release) => Some(release.kernel.to_owned()),
        Place::Mutants(_) | Place::Cost | Place::Contact => Some(crate::kernel::DEFAULT.to_owned()),
        Place::Cargo(_) | Place::Lint | Place::Packages => None,
    }
}

/// Returns the reason why a run is impossible: the files of its VM could not be made, and existing
/// files are outdated.
fn blocked(kernel: Option<&str>, broken: &BTreeMap<String, String>) -> Option<String> {
    let (name, error) = broken.get_key_value(kernel?)?;
    Some(format!(
        "kernel {name}, or a module for it, was not made: {error}"
    ))
}

struct Suite<'a> {
    paths: &'a Paths,
    toolchain: Toolchain,
    selection: &'a Selection,
    /// Kernels that could not be built, or whose modules could not be built. The value is the
    /// error.
    broken: BTreeMap<String, String>,
    now: When,
    unchanged: Shelf,
    pass: Option<Pass>,
    history: Mutex<History>,
    skips: Skips,
}

impl Suite<'_> {
    fn history(&self) -> std::sync::MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does all runs, some of them in parallel, and prints each result when the run has ended. The
    /// reports have the order of `runs`.
    fn all(&self, runs: &[&'static Run]) -> Vec<Report> {
        let reports: Mutex<Vec<(usize, Report)>> = Mutex::new(Vec::new());
        let times: Vec<_> = runs
            .iter()
            .map(|run| match run.place {
                // The duration is unknown, because it depends on the number of changed mutants.
                Place::Mutants(_) => None,
                _ => self.history().time(run.name),
            })
            .collect();
        // A run with two VMs runs alone, after the others.
        let (pairs, others): (Vec<_>, Vec<_>) = history::order(&times)
            .into_iter()
            .partition(|&at| runs[at].machines() > 1);
        let done = AtomicUsize::new(0);
        let work = |order: &[usize], next: &AtomicUsize| loop {
            let Some(&at) = order.get(next.fetch_add(1, Relaxed)) else {
                return;
            };
            let run = runs[at];
            let number = done.fetch_add(1, Relaxed) + 1;
            let title = format!("[{number}/{}] {}", runs.len(), run.name);
            println!("{title} …");
            let report = self.report(run, true);
            // The lock keeps the output of other threads apart.
            let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
            println!("{title}");
            report.tell();
            reports.push((at, report));
        };
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 1..self.selection.jobs {
                scope.spawn(|| work(&others, &next));
            }
            work(&others, &next);
        });
        work(&pairs, &AtomicUsize::new(0));
        let mut reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
        reports.sort_by_key(|(at, _)| *at);
        reports.into_iter().map(|(_, report)| report).collect()
    }

    fn report(&self, run: &'static Run, may_be_kept: bool) -> Report {
        let started = Instant::now();
        // A run that cannot even begin fails, and the other runs continue.
        let failed = |error| Report::plain(run, started, Vec::new(), vec![error]);
        let kernel = kernel_of(run);
        if let Some(problem) = blocked(kernel.as_deref(), &self.broken) {
            return failed(problem);
        }
        self.try_report(run, may_be_kept)
            .unwrap_or_else(|error| failed(format!("{error:#}")))
    }

    fn try_report(&self, run: &'static Run, may_be_kept: bool) -> Result<Report> {
        let resumed = self.pass.as_ref().filter(|_| may_be_kept);
        if let Some(kept) = resumed.and_then(|pass| pass.shelf.get(run.name, &pass.tree)) {
            return Ok(Report::kept(run, kept, Origin::Resumed));
        }
        let machine = wanted(run);
        // If the hash of the inputs cannot be computed, the run itself fails for the same reason,
        // and reports it.
        let key = kept::key(self.paths, run, machine.as_ref()).unwrap_or_default();
        if let Some(key) = key
            .as_ref()
            .filter(|_| may_be_kept && self.selection.takes_unchanged())
        {
            if let Some(kept) = self.unchanged.get(run.name, key) {
                return Ok(Report::kept(run, kept, Origin::Unchanged));
            }
        }
        let mut report = one(self.paths, &self.toolchain, run, self.selection)?;
        report.before = self.history().time(run.name);
        // A run with a problem may have stopped early. Its missing tests would only repeat the
        // problem.
        if report.problems.is_empty() {
            report.problems = missing(run, &report.tests);
            if !self.selection.update_skips {
                let skips = self.skips.unexpected(run.name, &report.tests);
                report.problems.extend(skips);
            }
        }
        self.keep(&report, key.as_deref())?;
        Ok(report)
    }

    /// Saves the duration of a run, and its results if it passed.
    fn keep(&self, report: &Report, key: Option<&str>) -> Result<()> {
        let (name, passed) = (report.run.name, report.has_passed());
        if report.tests.is_empty() {
            return Ok(());
        }
        self.history()
            .add(self.paths, name, report.elapsed, passed, &self.now)?;
        let shelves = [
            key.map(|key| (&self.unchanged, key)),
            self.pass
                .as_ref()
                .map(|pass| (&pass.shelf, pass.tree.as_str())),
        ];
        for (shelf, key) in shelves.into_iter().flatten().filter(|_| passed) {
            shelf.put(name, key, &report.tests, &self.now)?;
        }
        Ok(())
    }

    /// Repeats failed runs of VMs one at a time, the shortest first. If a run fails again, the
    /// suite has failed, and the other runs are not repeated.
    fn second_tries(&self, reports: &mut [Report]) {
        let mut failed: Vec<usize> = (0..reports.len())
            .filter(|&at| reports[at].may_be_tried_again())
            .collect();
        failed.sort_by_key(|&at| reports[at].elapsed);
        for at in failed {
            let run = reports[at].run;
            println!("[again, alone] {} …", run.name);
            let second = self.report(run, false);
            println!("[again, alone] {}", run.name);
            second.tell();
            let first = std::mem::replace(
                &mut reports[at],
                Report::plain(run, Instant::now(), Vec::new(), Vec::new()),
            );
            let mut report = first.after_second_try(second);
            if let Some(first) = &mut report.flaky {
                for log in &mut first.logs {
                    *log = self.paths.keep_log(log);
                }
            }
            let is_flaky = report.flaky.is_some();
            reports[at] = report;
            if !is_flaky {
                break;
            }
        }
    }
}

fn agreement(reports: &mut [Report]) {
    for at in 0..reports.len() {
        let report = &reports[at];
        let Some(same) = report.run.same_as else {
            continue;
        };
        let Some(other) = reports
            .iter()
            .find(|other| other.run.name == same.run)
            // A run without results has already reported its failure.
            .filter(|other| !other.tests.is_empty() && !report.tests.is_empty())
        else {
            continue;
        };
        let Differences { problems, excused } = differences(&other.tests, &report.tests, &same);
        for (reason, tests) in excused {
            println!(
                "  {} differs from {} as expected: {reason}",
                report.run.name, same.run
            );
            println!("      {}", tests.join(" "));
        }
        for problem in &problems {
            println!("      FAILED: {}: {problem}", report.run.name);
        }
        reports[at].problems.extend(problems);
    }
}

/// Compares the parts of documents for which all runs were done.
fn compare_documents(paths: &Paths, reports: &mut [Report], selection: &Selection) {
    for part in documents::PARTS {
        let problem = {
            let of = |name: &str| {
                let found = reports.iter().find(|report| report.run.name == name)?;
                Some(found.tests.as_slice())
            };
            part.compare(&paths.repo, of, selection.update_docs)
        };
        let report = reports
            .iter_mut()
            .find(|report| part.runs.contains(&report.run.name));
        if let (Some(problem), Some(report)) = (problem, report) {
            println!("      FAILED: {problem}");
            report.problems.push(problem);
        }
    }
}

pub(crate) fn lint(paths: &Paths) -> Result<i32> {
    let failed = results::tell(&lint::run(paths, None, |_| true)?);
    Ok(i32::from(failed > 0))
}

/// Runs the demo. The result is decided here and not in the VM, because it also depends on the
/// kernel log.
pub(crate) fn demo(paths: &Paths, kernel: String, peermem: Peermem) -> Result<i32> {
    let options = Options {
        timeout: Some(600),
        with_control: peermem.is_module(),
        peermem,
        // The BAR has room for a region of 1 GiB.
        bar: 4096,
        kernel,
        ..Options::default()
    };
    setup::demo(paths, &options)?;
    let boot = setup::boot(paths, &options)?;
    let command = programs::gdr_command(paths, boot.arch, "demo");
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

/// Differences between two runs that must have the same results.
#[derive(Debug, Default, PartialEq, Eq)]
struct Differences<'a> {
    problems: Vec<String>,
    /// By reason: tests whose results may differ, because one run skips the test for an accepted
    /// reason.
    excused: BTreeMap<&'a str, Vec<&'a str>>,
}

fn differences<'a>(one: &'a [Test], other: &'a [Test], same: &Same) -> Differences<'a> {
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
    let group = |name: &'a str| name.split('.').next();
    let groups = [one, other].map(|tests| {
        tests
            .iter()
            .map(|test| group(&test.name))
            .collect::<BTreeSet<_>>()
    });
    let mut differences = Differences::default();
    for (name, pair) in pairs {
        if same.in_part && groups.iter().any(|side| !side.contains(&group(name))) {
            continue;
        }
        let [one, other] = pair.map(word);
        let excuse = pair.iter().flatten().find_map(|test| match &test.verdict {
            Verdict::Skipped(why) if same.but_for.contains(&why.as_str()) => Some(why.as_str()),
            _ => None,
        });
        match excuse {
            _ if one == other => {}
            Some(why) => differences.excused.entry(why).or_default().push(name),
            None => differences
                .problems
                .push(format!("{name}: {one} in the other run, {other} here")),
        }
    }
    differences
}

fn wanted(run: &Run) -> Option<Options> {
    Some(Options {
        frozen: true,
        env: vec![guest::SYSTEM_PROGRAMS.to_owned()],
        ..run.machine()?
    })
}

fn one(
    paths: &Paths,
    toolchain: &Toolchain,
    run: &'static Run,
    selection: &Selection,
) -> Result<Report> {
    let started = Instant::now();
    let (tests, problems) = match run.place {
        Place::Cargo(arguments) => cases::on_host(paths, toolchain, run.format, arguments)?,
        Place::Lint => (lint::run(paths, None, |_| true)?, Vec::new()),
        Place::Mutants(build) => {
            let fresh = selection.full || selection.fresh;
            (mutants::tests(paths, &[], fresh, build)?, Vec::new())
        }
        Place::Cost => (crate::cost::tests(paths)?, Vec::new()),
        Place::Debian(release) => debian::tests(paths, release)?,
        Place::Packages => packages::tests(paths)?,
        Place::Contact => (contact::tests(paths)?, Vec::new()),
        Place::Hazards(None) if run.kernel.is_none() => crate::hazards::check(paths)?,
        Place::Hazards(build) => {
            let kernel = run.kernel.unwrap_or(crate::kernel::DEFAULT);
            crate::hazards::check_ours(paths, kernel, build)?
        }
        Place::Vm { command, .. } => {
            let wanted = wanted(run).context("a run without a machine")?;
            let words = words(paths, command, wanted.arch())?;
            return in_machine(paths, run, &wanted, &words);
        }
    };
    Ok(Report::plain(run, started, tests, problems))
}

/// Returns the words of a command. Words in braces are replaced by programs and folders.
fn words(paths: &Paths, command: &str, arch: Arch) -> Result<Vec<String>> {
    let gdr = guest::in_machine(&programs::gdr(paths, arch));
    let peermemctl = guest::in_machine(&programs::peermemctl(paths, arch));
    let mut words = Vec::new();
    for word in command.split_whitespace() {
        let mut word = word
            .replace("{repo}", &guest::in_machine(&paths.repo))
            .replace("{gdr}", &gdr)
            .replace("{peermemctl}", &peermemctl);
        for (name, make) in programs::ON_DEMAND {
            if word.contains(name) {
                word = word.replace(name, &guest::in_machine(&make(paths)?));
            }
        }
        words.push(word);
    }
    Ok(words)
}

fn in_machine(
    paths: &Paths,
    run: &'static Run,
    options: &Options,
    command: &[String],
) -> Result<Report> {
    let boot = setup::boot(paths, options)?;
    let (outcome, tests) = cases::machine(paths, options, &boot, command, run.format)?;
    Ok(Report {
        elapsed: outcome.elapsed,
        log: Some(outcome.log),
        ..Report::plain(run, Instant::now(), tests, outcome.failures)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests;
    use crate::suite::BASE;

    static RUN: Run = Run {
        name: "run",
        ..BASE
    };

    fn report(run: &'static Run, lines: &[&str]) -> Report {
        Report::plain(run, Instant::now(), tests(lines), Vec::new())
    }

    #[test]
    fn runs_that_must_agree() {
        let one = tests(&["a", "b FAILED", "d SKIP not here", "e SKIP otherwise"]);
        let other = tests(&["a", "b", "c", "d", "e"]);
        let mut same = Same {
            run: "",
            but_for: &["not here"],
            in_part: false,
        };
        let found = differences(&one, &other, &same);
        let problems = [
            "b: failed in the other run, passed here",
            "c: absent in the other run, passed here",
            "e: skipped in the other run, passed here",
        ];
        assert_eq!(found.problems, problems);
        assert_eq!(found.excused, BTreeMap::from([("not here", vec!["d"])]));
        same.in_part = true;
        let (one, other) = (tests(&["a.1", "b.1"]), tests(&["b.2", "c.1"]));
        let found = differences(&one, &other, &same);
        assert_eq!(
            found.problems,
            [
                "b.1: passed in the other run, absent here",
                "b.2: absent in the other run, passed here"
            ]
        );
    }

    #[test]
    fn runs_that_must_agree_are_found_whichever_ends_first() {
        static OTHER: Run = Run {
            name: "other",
            same_as: Some(Same {
                run: "run",
                but_for: &[],
                in_part: false,
            }),
            ..RUN
        };
        let (first, second) = (|| report(&RUN, &["a"]), |lines| report(&OTHER, lines));
        for mut reports in [
            [first(), second(&["a FAILED"])],
            [second(&["a FAILED"]), first()],
        ] {
            agreement(&mut reports);
            let problems: Vec<&String> = reports.iter().flat_map(|one| &one.problems).collect();
            assert_eq!(problems, ["a: passed in the other run, failed here"]);
        }
        // A run without any test is not compared, because it has already reported why it failed.
        let mut reports = [first(), second(&[])];
        agreement(&mut reports);
        assert!(reports.iter().all(|one| one.problems.is_empty()));
    }

    #[test]
    fn runs_of_a_kernel_that_was_not_made_fail() {
        let broken = BTreeMap::from([("7.2".to_owned(), "why".to_owned())]);
        assert_eq!(
            blocked(Some("7.2"), &broken).unwrap(),
            "kernel 7.2, or a module for it, was not made: why"
        );
        assert!(blocked(Some("7.3"), &broken).is_none() && blocked(None, &broken).is_none());
        let of = |name: &str| {
            let run = every_run().iter().find(|run| run.name == name).unwrap();
            kernel_of(run)
        };
        assert_eq!(of("peermemctl: root ports").as_deref(), Some("7.2"));
        assert_eq!(of("debug kernel: KUnit").as_deref(), Some("debug"));
        assert_eq!(of("lint"), None);
    }
}
