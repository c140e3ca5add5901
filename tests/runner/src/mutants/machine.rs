// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of mutants in VMs.
//!
//! A VM runs steps. Each step loads a module and runs a case on it (`tests/vm/mutants`). Mutants
//! whose only sign is a failing case share a VM. The unchanged module must pass the same case
//! before and after each mutant. If the unchanged module fails after a mutant, that mutant gets its
//! own VM, and the remaining mutants get another VM. Mutants that cause a kernel report or a hang
//! never share a VM.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{anyhow, bail, Result};

use super::rule::{Check, Mutant, Place, Sign};
use super::seen::Seen;
use crate::arch::Arch;
use crate::paths::Paths;
use crate::results::{Format, Reader};
use crate::vm::{Build, Options};
use crate::{guest, klog, programs, setup, vm};

/// Lines that the script prints at the beginning of a step (also to the kernel's log) and at its
/// end.
const BEGINS: &str = "runner: step ";
const ENDED: &str = "runner: step ended";

/// Time limit of a VM in which a mutant hangs, in seconds.
const HANGS: u64 = 180;

/// A test of a mutant in a VM.
pub(super) struct Job<'a> {
    /// Number by which the caller identifies the job.
    pub(super) number: usize,
    pub(super) mutant: &'a Mutant,
    pub(super) check: &'a Check,
}

impl<'a> Job<'a> {
    /// Returns the VM's options and the module's parameters.
    fn place(&self) -> (&'a [String], &'a [String]) {
        match &self.check.place {
            Place::Vm {
                options,
                parameters,
            } => (options, parameters),
            Place::Kunit { options } => (options, &[]),
            Place::Host { .. } => (&[], &[]),
        }
    }

    fn is_kunit(&self) -> bool {
        matches!(self.check.place, Place::Kunit { .. })
    }

    fn shares(&self) -> bool {
        let fails = |sign: &Sign| matches!(sign, Sign::Fails(_));
        !self.check.alone && self.check.signs.iter().all(fails)
    }

    /// Returns the step that runs the case on the unchanged module.
    fn base(&self) -> Step<'a> {
        Step {
            patches: self.mutant.base(),
            parameters: self.place().1,
            case: &self.check.test,
            must_pass: true,
        }
    }

    fn without(&self) -> Step<'a> {
        Step {
            patches: &self.mutant.patches,
            must_pass: false,
            ..self.base()
        }
    }

    fn signs(&self, seen: &Seen) -> Result<Vec<String>> {
        let shows = |sign| seen.shows(&self.check.test, sign);
        self.check.signs.iter().map(shows).collect()
    }
}

/// A module with its parameters, and a case to run on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Step<'a> {
    patches: &'a [PathBuf],
    parameters: &'a [String],
    case: &'a str,
    /// `true` if the module is unchanged.
    must_pass: bool,
}

impl Step<'_> {
    /// Returns the folder of the step's module, or `None` for the module that modprobe finds.
    fn folder(&self) -> Option<String> {
        let stem = self.patches.last()?.file_stem()?;
        Some(format!("mutant-{}", stem.to_string_lossy()))
    }

    /// Returns the step's arguments for the script.
    fn words(&self) -> [String; 4] {
        let usual = "persistent_api_support=0".to_owned();
        let parameters: Vec<String> = [usual].iter().chain(self.parameters).cloned().collect();
        [
            self.folder().unwrap_or("-".to_owned()),
            parameters.join(" "),
            self.case.to_owned(),
            if self.must_pass { "must" } else { "may" }.to_owned(),
        ]
    }
}

/// Returns the steps of a VM that these jobs share, and the index of each job's three steps. These
/// steps are: the unchanged module, the mutant, and the unchanged module again.
fn plan<'a>(jobs: &[Job<'a>]) -> (Vec<Step<'a>>, Vec<usize>) {
    let mut steps = Vec::new();
    let mut places = Vec::new();
    for job in jobs {
        if steps.last() != Some(&job.base()) {
            steps.push(job.base());
        }
        places.push(steps.len() - 1);
        steps.extend([job.without(), job.base()]);
    }
    (steps, places)
}

/// Results of the jobs that shared a VM.
struct Settled {
    /// Results in the order of the jobs. Jobs without a result need another VM.
    results: Vec<Result<Vec<String>>>,
    /// `true` if the mutant of the first job without a result made the VM useless for the following
    /// jobs.
    spoiled: bool,
}

fn settle(jobs: &[Job<'_>], places: &[usize], seen: &[Seen]) -> Settled {
    let mut results = Vec::new();
    for (job, &at) in jobs.iter().zip(places) {
        let [before, without, after] = &seen[at..at + 3] else {
            break;
        };
        let test = &job.check.test;
        if let Err(error) = before.passed(test) {
            // A failure caused by the previous mutant would have shown in the step after that
            // mutant. This failure therefore belongs to the unchanged module.
            let own = jobs[results.len()..]
                .iter()
                .take_while(|other| other.base() == job.base());
            let error = format!("{error:#}");
            results.extend(own.map(|_| Err(anyhow!("{error}"))));
            break;
        }
        if after.passed(test).is_err() {
            return Settled {
                results,
                spoiled: true,
            };
        }
        results.push(job.signs(without));
    }
    Settled {
        results,
        spoiled: false,
    }
}

pub(super) struct Machines<'a> {
    paths: &'a Paths,
    build: Build,
    /// Modules, by kernel, by whether the build avoids GPL-only symbols, and by patches.
    modules: BTreeMap<(String, bool, &'a [PathBuf]), Result<PathBuf, String>>,
    /// Results of the KUnit tests on modules without a mutant's patch, by VM options and patches.
    kunit: BTreeMap<(&'a [String], &'a [PathBuf]), Seen>,
}

impl<'a> Machines<'a> {
    pub(super) fn new(paths: &'a Paths, build: Build) -> Self {
        Self {
            paths,
            build,
            modules: BTreeMap::new(),
            kunit: BTreeMap::new(),
        }
    }

    /// Runs all jobs, and calls `tell` for each with the signs that showed the mutant.
    pub(super) fn run(
        &mut self,
        jobs: Vec<Job<'a>>,
        mut tell: impl FnMut(usize, Result<Vec<String>>),
    ) {
        let mut shared: BTreeMap<&[String], Vec<Job<'a>>> = BTreeMap::new();
        let mut own = Vec::new();
        let (kunit, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().partition(Job::is_kunit);
        for job in kunit {
            tell(job.number, self.kunit(&job));
        }
        for job in jobs {
            // A job whose module cannot be compiled does not affect other jobs.
            let module = self.options(job.place().0).and_then(|options| {
                self.module(&options, job.mutant.base())?;
                self.module(&options, &job.mutant.patches)
            });
            match module {
                Err(error) => tell(job.number, Err(error)),
                Ok(_) if job.shares() => shared.entry(job.place().0).or_default().push(job),
                Ok(_) => own.push(job),
            }
        }
        for (_, mut jobs) in shared {
            jobs.sort_by_key(Job::base);
            self.share(jobs, &mut tell);
        }
        for job in own {
            tell(job.number, self.alone(&job));
        }
    }

    fn share(&mut self, mut jobs: Vec<Job<'a>>, tell: &mut impl FnMut(usize, Result<Vec<String>>)) {
        while let Some(first) = jobs.first() {
            let (steps, places) = plan(&jobs);
            let seen = match self.boot(first.place().0, None, &steps) {
                Ok(seen) => seen,
                Err(error) => {
                    let error = format!("{error:#}");
                    jobs.drain(..)
                        .for_each(|job| tell(job.number, Err(anyhow!("{error}"))));
                    return;
                }
            };
            let settled = settle(&jobs, &places, &seen);
            for (job, result) in jobs.drain(..settled.results.len()).zip(settled.results) {
                tell(job.number, result);
            }
            if settled.spoiled {
                let job = jobs.remove(0);
                let result = self.alone(&job).map(|mut said| {
                    said.push("this mutant spoiled the VM that it shared".to_owned());
                    said
                });
                tell(job.number, result);
            }
        }
    }

    /// Runs a job in its own VM, which may end with the job.
    fn alone(&mut self, job: &Job<'a>) -> Result<Vec<String>> {
        let hangs = job
            .check
            .signs
            .iter()
            .any(|sign| matches!(sign, Sign::Hangs));
        let steps = [job.base(), job.without()];
        let seen = self.boot(job.place().0, hangs.then_some(HANGS), &steps)?;
        let [base, without] = &seen[..] else {
            bail!("two steps were run, but {} have results", seen.len());
        };
        base.passed(&job.check.test)?;
        job.signs(without)
    }

    /// Runs the KUnit tests on the mutant. The unchanged module must pass the tests first, and its
    /// result is kept for the following mutants.
    fn kunit(&mut self, job: &Job<'a>) -> Result<Vec<String>> {
        let words = job.place().0;
        let base = (words, job.mutant.base());
        if !self.kunit.contains_key(&base) {
            let seen = self.boot_kunit(base.0, base.1)?;
            self.kunit.insert(base, seen);
        }
        self.kunit[&base].passed(&job.check.test)?;
        job.signs(&self.boot_kunit(words, &job.mutant.patches)?)
    }

    /// Boots a VM and runs the KUnit tests of the module with these patches.
    fn boot_kunit(&self, words: &[String], patches: &[PathBuf]) -> Result<Seen> {
        let usual = "runner --kunit --peermem none --gpus 0 --append slab_debug=FZP \
            --append oops=panic --append kunit.enable=1 --append kunit.autorun=1";
        let words = usual
            .split_whitespace()
            .chain(words.iter().map(String::as_str));
        let mut options = Options::parse(words)?;
        options.frozen = true;
        options.build = Some(self.build);
        options.patches = patches.to_vec();
        options.env.push(guest::SYSTEM_PROGRAMS.to_owned());
        let boot = setup::boot(self.paths, &options)?;
        let script = guest::in_machine(&self.paths.repo.join("tests/vm/kunit"));
        let command = format!("{script}; echo '{ENDED}'");
        let command = ["sh", "-c", &command].map(str::to_owned);
        let (outcome, said) = vm::run_with(
            self.paths,
            &options,
            &boot,
            &command,
            Said {
                steps: vec![(Reader::new(Format::Ktap), Seen::default())],
            },
            Said::line,
        )?;
        let mut seen = said.finish(1).remove(0);
        let reports = klog::judge(&klog::read(&outcome.log)?, &[]).undeclared;
        seen.problems = reports.iter().map(ToString::to_string).collect();
        seen.hung = outcome.timed_out;
        Ok(seen)
    }

    /// Returns the options of a VM, with the build of the module.
    fn options(&self, words: &[String]) -> Result<Options> {
        let mut options = options(words)?;
        options.build = Some(match options.no_gpl_only {
            true => Build::Portable,
            false => self.build,
        });
        Ok(options)
    }

    fn module(&mut self, options: &Options, patches: &'a [PathBuf]) -> Result<PathBuf> {
        let paths = self.paths;
        let file = self
            .modules
            .entry((options.kernel.clone(), options.no_gpl_only, patches))
            .or_insert_with(|| {
                setup::our_module(paths, options, patches).map_err(|error| format!("{error:#}"))
            });
        file.clone().map_err(|error| anyhow!("{error}"))
    }

    /// Boots a VM and runs all steps in it, or as many as possible.
    fn boot(
        &mut self,
        words: &[String],
        limit: Option<u64>,
        steps: &[Step<'a>],
    ) -> Result<Vec<Seen>> {
        let mut options = self.options(words)?;
        options.timeout = limit;
        let mut boot = setup::boot(self.paths, &options)?;
        for step in steps {
            let Some(folder) = step.folder() else {
                continue;
            };
            if boot.drivers.iter().all(|(name, _)| *name != folder) {
                let file = self.module(&options, step.patches)?;
                // The name is leaked, because names in `drivers` must be `'static`.
                boot.drivers.push((folder.leak(), file));
            }
        }
        let script = self.paths.repo.join("tests/vm/mutants");
        let mut command = vec![
            guest::in_machine(&script),
            guest::in_machine(&programs::gdr(self.paths, Arch::X86_64)),
        ];
        command.extend(steps.iter().flat_map(Step::words));
        let (outcome, said) = vm::run_with(
            self.paths,
            &options,
            &boot,
            &command,
            Said::default(),
            Said::line,
        )?;
        let log = klog::read(&outcome.log)?;
        let mut seen = said.finish(steps.len());
        for report in klog::judge(&log, &[]).undeclared {
            if let Some(at) = step_of(&log, report.line).and_then(|at| seen.get_mut(at)) {
                at.problems.push(report.to_string());
            }
        }
        // Problems of the VM itself are attributed to the step that did not end.
        if let Some(last) = seen.iter_mut().find(|seen| !seen.ended) {
            last.hung = outcome.timed_out;
            let others = outcome
                .failures
                .into_iter()
                .filter(|failure| !failure.starts_with("the kernel reports"));
            last.problems.extend(others);
        }
        Ok(seen)
    }
}

/// Parses the options of a VM from the words of a command line.
fn options(words: &[String]) -> Result<Options> {
    // A kernel that continues after an oops leaves locks held, and the VM would hang.
    let usual = "runner --param persistent_api_support=0 --gpus 1 --append oops=panic";
    let usual = usual.split(' ');
    let words = usual.chain(words.iter().map(String::as_str));
    let mut options = Options::parse(words)?;
    // Everything was built when the run began.
    options.frozen = true;
    options.env.push(guest::SYSTEM_PROGRAMS.to_owned());
    Ok(options)
}

pub(super) fn kernel(check: &Check) -> Result<Option<String>> {
    match &check.place {
        Place::Host { .. } => Ok(None),
        Place::Kunit { options: words } | Place::Vm { options: words, .. } => {
            Ok(Some(options(words)?.kernel))
        }
    }
}

#[derive(Default)]
struct Said {
    steps: Vec<(Reader, Seen)>,
}

impl Said {
    fn line(&mut self, line: &str, is_error: bool) {
        if !is_error && line == ENDED {
            if let Some((_, seen)) = self.steps.last_mut() {
                seen.ended = true;
            }
        } else if !is_error && line.starts_with(BEGINS) {
            self.steps
                .push((Reader::new(Format::Ktap), Seen::default()));
        } else if let Some((reader, seen)) = self.steps.last_mut() {
            if !is_error {
                reader.line(line);
            }
            seen.output.push_str(line);
            seen.output.push('\n');
        }
    }

    /// Returns the results of `count` steps. The results of steps that did not begin are empty.
    fn finish(self, count: usize) -> Vec<Seen> {
        let mut seen: Vec<Seen> = self
            .steps
            .into_iter()
            .map(|(reader, mut seen)| {
                seen.tests = reader.finish().0;
                seen
            })
            .collect();
        seen.resize_with(count, Seen::default);
        seen
    }
}

/// Returns the step, from 0, that was running when a line of the kernel's log was written. Lines
/// count from 1. Lines before the first step number belong to the first step. After the last step,
/// the script prints one more step number.
fn step_of(log: &str, line: usize) -> Option<usize> {
    let number = log
        .lines()
        .take(line)
        .filter_map(|line| klog::message(line).strip_prefix(BEGINS)?.parse().ok())
        .last()
        .unwrap_or(1_usize);
    number.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::results::tests;

    fn mutant(name: &str, lines: &str) -> Mutant {
        let head = format!("# rule: 1\n# removes: a\n# without: b\n{lines}\n# sign: fails gone\n");
        Mutant::parse(name, Path::new(&format!("/x/{name}.patch")), &head).unwrap()
    }

    fn jobs(mutants: &[Mutant]) -> Vec<Job<'_>> {
        mutants
            .iter()
            .enumerate()
            .map(|(number, mutant)| Job {
                number,
                mutant,
                check: &mutant.checks[0],
            })
            .collect()
    }

    /// Returns the results of a VM's steps, one letter each. `p` stands for passed, `f` for failed
    /// with the sign, `o` for failed without the sign, and a blank for no result.
    fn seen(steps: &[Step<'_>], how: &str) -> Vec<Seen> {
        let step = |(step, how): (&Step<'_>, char)| {
            let rest = match how {
                'p' => "",
                'f' => " FAILED | failure: gone",
                'o' => " FAILED | failure: otherwise",
                _ => return Seen::default(),
            };
            Seen {
                tests: tests(&[&format!("{}{rest}", step.case)]),
                ended: true,
                ..Seen::default()
            }
        };
        assert_eq!(steps.len(), how.len());
        steps.iter().zip(how.chars()).map(step).collect()
    }

    #[test]
    fn the_unchanged_module_runs_before_and_after_each_mutant() {
        let mutants = [
            mutant("a", "# vm: case.x"),
            mutant("b", "# vm: case.x"),
            mutant("c", "# vm: case.x --param p=1"),
            mutant("d", "# on: holds.diff\n# vm: case.x"),
        ];
        let jobs = jobs(&mutants);
        let (steps, places) = plan(&jobs);
        let words: Vec<String> = steps.iter().map(|step| step.words().join(" ")).collect();
        let usual = "persistent_api_support=0";
        assert_eq!(
            words,
            [
                format!("- {usual} case.x must"),
                format!("mutant-a {usual} case.x may"),
                format!("- {usual} case.x must"),
                format!("mutant-b {usual} case.x may"),
                format!("- {usual} case.x must"),
                format!("- {usual} p=1 case.x must"),
                format!("mutant-c {usual} p=1 case.x may"),
                format!("- {usual} p=1 case.x must"),
                format!("mutant-holds {usual} case.x must"),
                format!("mutant-d {usual} case.x may"),
                format!("mutant-holds {usual} case.x must"),
            ]
        );
        assert_eq!(places, [0, 2, 5, 8]);
    }

    #[test]
    fn a_job_that_spoils_the_machine_changes_no_other_result() {
        let mutants = ["a", "b", "c"].map(|name| mutant(name, "# vm: case.x"));
        let jobs = jobs(&mutants);
        let (steps, places) = plan(&jobs);
        let settled = |how: &str| {
            let settled = settle(&jobs, &places, &seen(&steps, how));
            let results: Vec<bool> = settled.results.iter().map(Result::is_ok).collect();
            (results, settled.spoiled)
        };
        assert_eq!(settled("pfpfpfp"), (vec![true; 3], false));
        // In the first job, the case passes on the mutant. In the second job, the case fails on the
        // mutant without the sign.
        assert_eq!(settled("pppopfp"), (vec![false, false, true], false));
        // The VM ends in the second job, or the unchanged module fails after the second job's
        // mutant.
        assert_eq!(settled("pfp    "), (vec![true], true));
        assert_eq!(settled("pfpf   "), (vec![true], true));
        assert_eq!(settled("pfpfo  "), (vec![true], true));
        assert_eq!(settled("pf     "), (vec![], true));
        // If the unchanged module fails before all mutants, each job fails, and no mutant spoiled
        // the VM.
        assert_eq!(settled("o      "), (vec![false; 3], false));
        assert_eq!(settled("       "), (vec![false; 3], false));
    }

    #[test]
    fn another_case_has_another_base() {
        let mutants = [mutant("a", "# vm: case.x"), mutant("b", "# vm: case.y")];
        let jobs = jobs(&mutants);
        let (steps, places) = plan(&jobs);
        let failed = settle(&jobs, &places, &seen(&steps, "o     "));
        assert_eq!((failed.results.len(), failed.spoiled), (1, false));
        let failed = settle(&jobs, &places, &seen(&steps, "pfpo  "));
        let results: Vec<bool> = failed.results.iter().map(Result::is_ok).collect();
        assert_eq!((results, failed.spoiled), (vec![true, false], false));
    }

    #[test]
    fn each_step_has_its_own_lines() {
        let mut said = Said::default();
        for (line, is_error) in [
            ("before", false),
            ("runner: step 1", false),
            ("1..1", false),
            ("# failure: x", true),
            ("ok 1 a", false),
            ("runner: step ended", false),
            ("runner: step 2", false),
            ("1..1", false),
            ("# failure: y", false),
            ("not ok 1 a", false),
        ] {
            said.line(line, is_error);
        }
        let seen = said.finish(3);
        assert!(seen[0].ended && seen[0].tests[0].notes.is_empty());
        assert!(!seen[1].ended && seen[1].tests[0].notes == ["failure: y"]);
        assert!(!seen[2].ended && seen[2].tests.is_empty());
        let log = "[ 1.0] x\n[ 2.0] runner: step 1\n[ 3.0] y\n[ 4.0] runner: step 2\n[ 5.0] z\n";
        let steps: Vec<_> = (1..=5).map(|line| step_of(log, line)).collect();
        assert_eq!(steps, [Some(0), Some(0), Some(0), Some(1), Some(1)]);
    }
}
