// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The known hazards: runs the schedules of `gdr hazards` against NVIDIA's nvidia-peermem and our
//! module, and makes the page with the results.
//!
//! A VM may die. The result then consists of the VM's output until its death and of the kernel's
//! reports. The page is made only from results. It therefore changes only if a result has changed.

mod machines;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::LazyLock;

use anyhow::{Context as _, Result};
use regex::Regex;

use self::machines::{Machine, MACHINES};
use crate::documents::{split, wrapped};
use crate::paths::Paths;
use crate::results::{pattern, Format, Reader, Test, Verdict};
use crate::vm::{Build, Named as _, Peermem};
use crate::{guest, kernel, klog, programs, results, setup, vm};

const PAGE: &str = "docs/hazards.md";

/// Letters of the hazards, as in the rows of the page. The names of a hazard's schedules begin with
/// its letter.
const LETTERS: [&str; 16] = [
    "A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M", "N", "O", "P",
];

/// Schedules that hang or crash the VM with every peer-memory module, each with the defect that
/// both modules must show.
const UNPREVENTABLE: [(&str, &str); 2] = [
    (
        "driver_holds_lock",
        "the free and the release wait for each other",
    ),
    (
        "core_locks_twice",
        "the registration waits for its own lock, and the free for the registration",
    ),
];

/// Schedules that have a section of the page.
const SECTIONS: [&str; 3] = ["two_allocations", UNPREVENTABLE[0].0, UNPREVENTABLE[1].0];

/// Returns the defect that a schedule must show with our module.
fn unpreventable(schedule: &str) -> Option<&'static str> {
    let found = UNPREVENTABLE.iter().find(|(name, _)| *name == schedule);
    found.map(|(_, defect)| *defect)
}

#[derive(Debug, Default, Clone)]
struct Outcome {
    saw: Vec<String>,
    wrong: Vec<String>,
    reports: Vec<String>,
    skipped: bool,
    /// Reasons why the schedule itself failed. The schedule's result is then meaningless.
    broken: Vec<String>,
}

impl Outcome {
    /// Parses the notes of `gdr hazards` about a schedule.
    fn new(notes: &[String], skipped: bool) -> Self {
        let said = |mark: &str| {
            notes
                .iter()
                .filter_map(|note| note.strip_prefix(mark))
                .map(str::to_owned)
                .collect()
        };
        Self {
            saw: said("saw "),
            wrong: said("wrong "),
            reports: Vec::new(),
            skipped,
            broken: said("failure: "),
        }
    }

    fn defects(&self) -> Option<String> {
        let oops = self.reports.iter().any(|report| report == OOPS);
        // After an oops, the kernel's state decides whether a thread or the whole VM dies, so the
        // result names neither.
        let follows = |word: &str| word == DEATH || word.starts_with(KILLED);
        let mut words: Vec<&str> = Vec::new();
        for word in self.wrong.iter().chain(&self.reports) {
            if words.contains(&word.as_str()) || oops && follows(word) {
                continue;
            }
            words.push(word);
        }
        (!words.is_empty()).then(|| words.join("; "))
    }

    fn words(&self) -> String {
        match self.defects() {
            Some(defects) if self.saw.is_empty() => format!("**{defects}**"),
            Some(defects) => format!("{}; **{defects}**", self.saw.join("; ")),
            None => self.saw.join("; "),
        }
    }
}

/// Outcomes by schedule, in the order of the run.
type Outcomes = Vec<(String, Outcome)>;

struct Ran {
    machine: &'static Machine,
    outcomes: Outcomes,
    /// Problems that belong to no schedule.
    problems: Vec<String>,
    version: String,
}

static WARNING_AT: LazyLock<Regex> = LazyLock::new(|| pattern(r"WARNING: \S+ at \w+\+"));
static ALLOCATOR: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^\[\w+ overwritten\]|^BUG kmalloc|at (object|slab)_err\+"));

const OOPS: &str = "an oops";
/// Consequences of a defect: the VM stops responding, or `gdr hazards` reports that a thread was
/// killed.
const DEATH: &str = "the kernel crashes or hangs";
const KILLED: &str = "the kernel killed ";
/// Words by which a schedule reports a thread that does not return.
const HANGING: &str = " does not return";

/// Returns the kind of a report. Drops the location and state of the kernel, which depend on the
/// compiler and on the contents of memory. Keeps the stand-in's own messages, which depend on
/// neither.
fn headline(report: &klog::Report) -> String {
    let lines: Vec<&str> = report
        .lines
        .iter()
        .map(|line| klog::message(line))
        .collect();
    for (index, line) in lines.iter().enumerate() {
        if ALLOCATOR.is_match(line) {
            return "report of the allocator".to_owned();
        }
        if line.contains("Oops") || line.starts_with("BUG: ") {
            return OOPS.to_owned();
        }
        if WARNING_AT.is_match(line) {
            let before = index.checked_sub(1).and_then(|index| lines.get(index));
            return match before.and_then(|line| line.strip_prefix("nvidia: ")) {
                Some(message) => format!("warning: {message}"),
                None => "a warning".to_owned(),
            };
        }
    }
    let first = lines.first().copied().unwrap_or_default();
    if first.starts_with("Kernel panic") {
        return "panic".to_owned();
    }
    first.to_owned()
}

/// Returns the schedule that was running when a line of the log was written.
fn schedule_at(log: &str, line: usize) -> Option<&str> {
    log.lines()
        .take(line)
        .filter_map(|line| Some(line.split_once("] hazard: ")?.1.trim()))
        .last()
}

fn run_machine(
    paths: &Paths,
    machine: &'static Machine,
    (kernel, build): (&str, Option<Build>),
) -> Result<Ran> {
    let mut options = machine.options(kernel)?;
    options.build = build;
    options.frozen = true;
    options.env = vec![guest::SYSTEM_PROGRAMS.to_owned()];
    let boot = setup::boot(paths, &options)?;
    let mut command = programs::gdr_command(paths, options.arch(), "hazards");
    command.extend(machine.schedules.iter().map(|name| (*name).to_owned()));
    let (outcome, said) = vm::run_with(
        paths,
        &options,
        &boot,
        &command,
        Reader::new(Format::Ktap),
        |said, line, is_error| {
            if !is_error {
                said.line(line);
            }
        },
    )?;
    let log = klog::read(&outcome.log)?;
    let ran = sort_out(machine, &said, &log, &outcome.failures, outcome.timed_out);
    Ok(Ran {
        version: boot.peermem_version,
        ..ran
    })
}

/// Combines the program's output with the kernel's log.
fn sort_out(
    machine: &'static Machine,
    said: &Reader,
    log: &str,
    failures: &[String],
    timed_out: bool,
) -> Ran {
    let mut outcomes: Outcomes = said
        .tests
        .iter()
        .map(|test| {
            let skipped = matches!(test.verdict, Verdict::Skipped(_));
            (test.name.clone(), Outcome::new(&test.notes, skipped))
        })
        .collect();
    let mut problems = Vec::new();
    // The hung thread may leave the other processor to the program. The program then reports the
    // hang, and the VM runs until its time limit.
    let hung = machine.is_fatal() && timed_out;
    let hangs = |outcome: &Outcome| outcome.broken.iter().any(|why| why.contains(HANGING));
    outcomes.retain(|(_, outcome)| !(hung && hangs(outcome)));
    let told = match log.split_once("] hazard: end") {
        Some((before, _)) if hung => before,
        _ => log,
    };
    // The program prints no result for a schedule that killed the VM.
    let last = schedule_at(told, usize::MAX).unwrap_or("end");
    let died = last != "end" && !outcomes.iter().any(|(name, _)| name == last);
    if died {
        let mut outcome = Outcome::new(said.unfinished(), false);
        outcome.reports.push(DEATH.to_owned());
        outcomes.push((last.to_owned(), outcome));
    }
    let verdict = klog::judge(log, &[]);
    if !died {
        problems.extend(verdict.miscounted);
    }
    for report in verdict.undeclared {
        if report.is_loss() {
            problems.push("lines of the kernel log are lost".to_owned());
            continue;
        }
        let headline = headline(&report);
        let schedule = schedule_at(log, report.line);
        let of = schedule.and_then(|name| outcomes.iter_mut().find(|(other, _)| other == name));
        match of {
            // The panic after an oops is the VM's death.
            Some(_) if headline == "panic" => {}
            Some((name, _)) if machine.is_fatal() && died && name == last => {}
            Some((_, outcome)) => outcome.reports.insert(0, headline),
            // The schedule that left something behind in NVIDIA's nvidia-peermem already reports
            // the defect.
            None if machine.module == Peermem::Nvidia => {}
            None => problems.push(format!("the kernel reports: {headline}")),
        }
    }
    if timed_out && !(machine.is_fatal() && died) {
        problems.push("timed out".to_owned());
    }
    let lost = said
        .unfinished()
        .iter()
        .any(|note| note == "the machine is lost");
    let ends_early = died || lost;
    if !said.is_complete() && !ends_early {
        problems.push("not all schedules have a result".to_owned());
    }
    let must_last = machine.module == Peermem::Ours
        && !machine
            .schedules
            .iter()
            .any(|schedule| unpreventable(schedule).is_some());
    if must_last && (ends_early || !failures.is_empty()) {
        problems.extend(failures.iter().cloned());
        if ends_early {
            problems.push("the machine is lost".to_owned());
        }
    }
    Ran {
        machine,
        outcomes,
        problems,
        version: String::new(),
    }
}

fn belongs(schedule: &str, letter: &str) -> bool {
    schedule.split('.').next() == Some(letter)
}

/// Returns the cell of a hazard's row for one module. The cell has a text for each mode, or one
/// text if the modes agree.
fn cell(ran: &[Ran], module: Peermem, letter: &str) -> String {
    let mut said: Vec<(&str, Vec<String>)> = Vec::new();
    for ran in ran.iter().filter(|ran| ran.machine.module == module) {
        let ran_at_all = ran.outcomes.iter().any(|(name, _)| belongs(name, letter));
        if !ran_at_all {
            continue;
        }
        let mode = ran.machine.name;
        let at = said.iter().position(|(other, _)| *other == mode);
        let at = at.unwrap_or_else(|| {
            said.push((mode, Vec::new()));
            said.len() - 1
        });
        let words = &mut said[at].1;
        for (_, outcome) in ran
            .outcomes
            .iter()
            .filter(|(name, outcome)| belongs(name, letter) && !outcome.skipped)
        {
            let word = match module {
                Peermem::Nvidia => outcome.defects(),
                _ => Some(outcome.words()),
            };
            if let Some(word) = word.filter(|word| !words.contains(word)) {
                words.push(word);
            }
        }
    }
    let by_mode: Vec<(&str, String)> = said
        .into_iter()
        .map(|(mode, words)| match words.is_empty() {
            true => (mode, "holds".to_owned()),
            false => (mode, once_each(&words)),
        })
        .collect();
    let different: BTreeSet<&String> = by_mode.iter().map(|(_, words)| words).collect();
    match by_mode.first() {
        None => "not run".to_owned(),
        Some((_, words)) if different.len() == 1 && by_mode.len() > 1 => words.clone(),
        Some(_) => by_mode
            .iter()
            .map(|(mode, words)| format!("_{mode}:_ {words}"))
            .collect::<Vec<_>>()
            .join("<br>"),
    }
}

fn once_each(words: &[String]) -> String {
    let mut said: Vec<&str> = Vec::new();
    for phrase in words.iter().flat_map(|words| words.split("; ")) {
        if !said.contains(&phrase) {
            said.push(phrase);
        }
    }
    said.join("; ")
}

/// Returns the page with these results. All other text stays.
fn render(page: &str, ran: &[Ran]) -> Result<String> {
    let is_nvidia = |ran: &&Ran| ran.machine.module == Peermem::Nvidia;
    let version = ran.iter().find(is_nvidia).map_or("", |ran| &ran.version);
    let head = page.split_once("| schedule | NVIDIA's ");
    let (before, _) = head
        .and_then(|(_, rest)| rest.split_once(' '))
        .context("no version")?;
    let mut page = page.replace(before, version);
    for name in SECTIONS {
        let cells = [Peermem::Nvidia, Peermem::Ours].map(|module| whole(ran, module, name));
        let table = format!(
            "| NVIDIA's {version} | this module |\n|---|---|\n| {} |\n",
            cells.join(" | ")
        );
        page = replaced(&page, name, &table)?;
    }
    page = replaced(&page, "schedules", &every_schedule(ran))?;
    Ok(page.lines().map(|line| row(line, ran) + "\n").collect())
}

fn replaced(page: &str, name: &str, part: &str) -> Result<String> {
    let [before, _, after] = split(page, name)?;
    Ok([before, part, after].concat())
}

/// Returns a line of the page. If the line is the row of a hazard, its results are replaced by
/// these.
fn row(line: &str, ran: &[Ran]) -> String {
    match line.split(" | ").collect::<Vec<_>>()[..] {
        [first, what, schedule, _, _, rule]
            if LETTERS.contains(&first.trim_start_matches("| ")) =>
        {
            let letter = first.trim_start_matches("| ");
            let [theirs, ours] =
                [Peermem::Nvidia, Peermem::Ours].map(|module| cell(ran, module, letter));
            [first, what, schedule, &theirs, &ours, rule].join(" | ")
        }
        _ => line.to_owned(),
    }
}

fn every_schedule(ran: &[Ran]) -> String {
    let mut schedules: BTreeMap<&str, String> = BTreeMap::new();
    for ran in ran {
        let module = match ran.machine.module {
            Peermem::Nvidia => "NVIDIA's",
            _ => "ours",
        };
        for (name, outcome) in &ran.outcomes {
            let text = schedules.entry(name).or_default();
            if !outcome.skipped {
                let line = format!("- {module}, {}: {}", ran.machine.name, outcome.words());
                wrapped(text, &line, "  ");
            }
        }
    }
    let texts = schedules
        .iter()
        .map(|(name, text)| format!("\n`{name}`\n{text}"));
    texts.collect()
}

/// Returns everything that one schedule showed with a module: correct results as well as defects.
fn whole(ran: &[Ran], module: Peermem, name: &str) -> String {
    let mut found: Vec<String> = ran
        .iter()
        .filter(|ran| ran.machine.module == module)
        .flat_map(|ran| &ran.outcomes)
        .filter(|(other, _)| other == name)
        .map(|(_, outcome)| outcome.words())
        .collect();
    found.dedup();
    found.join("<br>")
}

/// Returns the lines of the page `made` that the committed page lacks.
fn differing(committed: &str, made: &str) -> Vec<String> {
    let old: BTreeSet<&str> = committed.lines().collect();
    let new: BTreeSet<&str> = made.lines().collect();
    let mut found: Vec<String> = new
        .difference(&old)
        .map(|line| format!("now: {line}"))
        .collect();
    if found.is_empty() && committed != made {
        found.push("a line is gone, or the order has changed".to_owned());
    }
    found
}

/// Returns one test for each row, and the problems that belong to no row.
fn verdicts(ran: &[Ran]) -> (Vec<Test>, Vec<String>) {
    let mut tests = Vec::new();
    for letter in LETTERS.into_iter().chain(SECTIONS) {
        let mut notes = Vec::new();
        let mut ours = 0;
        for ran in ran {
            for (name, outcome) in &ran.outcomes {
                if !belongs(name, letter) {
                    continue;
                }
                for broken in &outcome.broken {
                    notes.push(format!("{name} in {}: {broken}", ran.machine.name));
                }
                if ran.machine.module == Peermem::Ours && !outcome.skipped {
                    ours += 1;
                    let defects = outcome.defects();
                    if defects.as_deref() != unpreventable(name) {
                        let found = defects.as_deref().unwrap_or("holds");
                        notes.push(format!("{name}, {}: {found}", ran.machine.name));
                    }
                }
            }
        }
        if ours == 0 {
            notes.push("our module was not run".to_owned());
        }
        tests.push(Test {
            name: format!("hazard {letter}"),
            verdict: if notes.is_empty() {
                Verdict::Passed
            } else {
                Verdict::Failed
            },
            notes,
        });
    }
    let problems = ran
        .iter()
        .flat_map(|ran| {
            let module = ran.machine.module.name();
            ran.problems
                .iter()
                .map(move |problem| format!("{module}, {}: {problem}", ran.machine.name))
        })
        .collect();
    (tests, problems)
}

/// Runs all schedules. Returns the outcomes, the committed page, and the page with the new results.
fn run_all(paths: &Paths) -> Result<(Vec<Ran>, [String; 2])> {
    let ran = MACHINES
        .iter()
        .map(|machine| run_machine(paths, machine, (kernel::DEFAULT, None)))
        .collect::<Result<Vec<_>>>()?;
    let page = fs::read_to_string(paths.repo.join(PAGE)).context(PAGE)?;
    let made = render(&page, &ran).context(PAGE)?;
    Ok((ran, [page, made]))
}

/// Runs the check for the suite: our module must pass, and the page must equal the committed one.
pub(crate) fn check(paths: &Paths) -> Result<(Vec<Test>, Vec<String>)> {
    let (ran, [committed, page]) = run_all(paths)?;
    let (tests, mut problems) = verdicts(&ran);
    for difference in differing(&committed, &page) {
        problems.push(format!(
            "{PAGE} differs from this run's results: {difference}"
        ));
    }
    Ok((tests, problems))
}

/// Runs the check for the suite on another kernel or with another build: our module must pass. The
/// page does not cover these runs.
pub(crate) fn check_ours(
    paths: &Paths,
    kernel: &str,
    build: Option<Build>,
) -> Result<(Vec<Test>, Vec<String>)> {
    let ran = MACHINES
        .iter()
        .filter(|machine| machine.module == Peermem::Ours)
        .map(|machine| run_machine(paths, machine, (kernel, build)))
        .collect::<Result<Vec<_>>>()?;
    Ok(verdicts(&ran))
}

/// Runs all schedules and writes the page into the work tree.
pub(crate) fn write(paths: &Paths) -> Result<i32> {
    setup::all(paths, [kernel::DEFAULT])?;
    let (ran, [_, page]) = run_all(paths)?;
    let (tests, problems) = verdicts(&ran);
    let failed = problems.len() + results::tell(&tests);
    for problem in &problems {
        println!("FAILED: {}", problem.trim_end());
    }
    fs::write(paths.repo.join(PAGE), page).context(PAGE)?;
    println!("{PAGE} is written; {failed} failed");
    Ok(i32::from(failed > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headline_of(text: &str) -> String {
        headline(&klog::Report {
            line: 1,
            lines: text.lines().map(str::to_owned).collect(),
        })
    }

    #[test]
    fn a_report_has_the_same_headline_in_every_run() {
        for (text, name) in [
            (
                "[    1.0] ------------[ cut here ]------------\n[    1.0] nvidia: dma_unmap of a page table that is gone\n\
                 [    1.0] WARNING: dma.c:73 at is_live+0x1/0x2, CPU#0: gdr/123",
                "warning: dma_unmap of a page table that is gone",
            ),
            (
                "[    1.0] ------------[ cut here ]------------\n[    1.0] WARNING: x.c:3 at nv_mem_put_pages+0xe/0x60 [m]",
                "a warning",
            ),
            (
                "[    1.0] Oops: int3: 0000 [#1] SMP\n[    1.0] RIP: 0010:0xffffffffa0075411",
                "an oops",
            ),
            (
                "[    1.0] BUG: kernel NULL pointer dereference, address: 10\n[    1.0] RIP: 0010:dma_map_phys+0x1/0x2",
                "an oops",
            ),
            (
                "[    1.0] BUG kmalloc-128 (Tainted: G   W  O ): Object corrupt",
                "report of the allocator",
            ),
            ("[    1.0] Kernel panic - not syncing: Fatal exception", "panic"),
        ] {
            assert_eq!(headline_of(text), name);
        }
    }

    fn said(text: &str) -> Reader {
        Reader::of(Format::Ktap, text)
    }

    #[test]
    fn a_schedule_that_kills_the_machine_is_reported() {
        let said = said("1..3\n# saw a\nok 1 X.one\n# saw b\n# wrong c\n");
        let log = "[    1.0] hazard: X.one\n[    2.0] hazard: X.two\n[    2.1] Oops: 0000 [#1]\n\
                   [    2.1] RIP: 0010:f+0x1/0x2\n[    2.2] Kernel panic - not syncing: x\n";
        let ran = sort_out(&MACHINES[0], &said, log, &[], false);
        assert_eq!(ran.outcomes.len(), 2);
        assert_eq!(ran.outcomes[1].1.defects().as_deref(), Some("c; an oops"));
        assert!(ran.problems.is_empty(), "{:?}", ran.problems);
    }

    #[test]
    fn a_lock_in_freed_memory_faults_or_hangs() {
        let machine = MACHINES.iter().find(|machine| machine.is_fatal());
        let machine = machine.expect("a machine that dies");
        let hung = "[    2.0] hazard: X.one\n";
        let faulted = format!(
            "{hung}[    2.1] Oops: 0000 [#1]\n[    2.1] RIP: 0010:f+0x1/0x2\n[    2.2] Kernel panic - not syncing: x\n"
        );
        // The schedule sometimes writes to freed memory, and the allocator notices.
        let noticed = format!("{hung}[    2.1] BUG kmalloc-64 (Not tainted): Poison overwritten\n");
        for (log, timed_out) in [(hung, true), (&faulted, false), (&noticed, true)] {
            let ran = sort_out(machine, &said("1..1\n"), log, &[], timed_out);
            assert_eq!(ran.outcomes[0].1.defects().as_deref(), Some(DEATH));
            assert!(ran.problems.is_empty(), "{:?}", ran.problems);
        }
        // In this log, the other processor continued.
        let waited = said("1..1\n# failure: the registration does not return: \nnot ok 1 X.one\n");
        let log = format!(
            "{hung}[   27.0] hazard: end\n[  128.5] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n"
        );
        let ran = sort_out(machine, &waited, &log, &[], true);
        assert_eq!(ran.outcomes[0].1.defects().as_deref(), Some(DEATH));
        assert!(ran.problems.is_empty(), "{:?}", ran.problems);
        assert!(ran.outcomes[0].1.broken.is_empty());
        // If a VM with a hung thread ends by itself, or the schedule fails for another reason, the
        // schedule has failed.
        let ran = sort_out(machine, &waited, &log, &[], false);
        assert_eq!(ran.outcomes[0].1.broken.len(), 1);
        let failed = said("1..1\n# failure: x was not reached\nnot ok 1 X.one\n");
        let ran = sort_out(machine, &failed, &log, &[], true);
        assert_eq!(ran.outcomes[0].1.broken.len(), 1);
        // A VM that times out before its first schedule is a problem.
        let ran = sort_out(machine, &said("1..1\n"), "", &[], true);
        assert!(!ran.problems.is_empty());
    }

    #[test]
    fn consequences_of_an_oops_are_no_separate_result() {
        let outcome = |wrong: &[&str], reports: &[&str]| Outcome {
            wrong: wrong.iter().map(ToString::to_string).collect(),
            reports: reports.iter().map(ToString::to_string).collect(),
            ..Outcome::default()
        };
        let killed = outcome(&["x", "the kernel killed the thread in the free"], &[OOPS]);
        let died = outcome(&["x"], &[OOPS, DEATH]);
        assert_eq!(killed.defects().as_deref(), Some("x; an oops"));
        assert_eq!(killed.defects(), died.defects());
        // Without an oops, the crash or hang counts as a separate defect.
        let hangs = outcome(&["x"], &[DEATH]);
        assert_eq!(
            hangs.defects().as_deref(),
            Some("x; the kernel crashes or hangs")
        );
    }

    #[test]
    fn a_log_with_lost_lines_is_a_problem() {
        let said = said("1..1\n# saw a\nok 1 X.one\n");
        let log =
            "[    1.0] hazard: X.one\n** 3 printk messages dropped **\n[    2.0] hazard: end\n";
        let ran = sort_out(&MACHINES[0], &said, log, &[], false);
        assert_eq!(ran.problems, ["lines of the kernel log are lost"]);
        assert!(ran.outcomes[0].1.defects().is_none());
    }

    #[test]
    fn results_that_are_missing_are_a_problem() {
        let said = said("1..2\n# saw a\nok 1 X.one\n");
        let log = "[    1.0] hazard: X.one\n[    2.0] hazard: end\n";
        let ran = sort_out(&MACHINES[0], &said, log, &[], false);
        assert_eq!(ran.problems, ["not all schedules have a result"]);
    }

    #[test]
    fn our_module_must_cause_no_report() {
        let ours = MACHINES.iter().find(|m| m.module == Peermem::Ours).unwrap();
        let said = said("1..1\n# saw a\nok 1 X.one\n");
        let log = "[    1.0] hazard: X.one\n[    2.0] hazard: end\n[    3.0] runner: teardown: pins_live is 1, not 0\n";
        let ran = sort_out(ours, &said, log, &[], false);
        assert_eq!(ran.problems.len(), 1);
        assert!(ran.outcomes[0].1.defects().is_none());
    }

    /// Checks that the page has a place for each result, and that the results change no other text.
    #[test]
    fn the_page_is_written_from_results() {
        let repo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let page = fs::read_to_string(repo.join(PAGE)).unwrap();
        let ran = |machine: &'static Machine| {
            let log = "[    1.0] hazard: C.one\n[    2.0] hazard: end\n";
            let said = said("1..1\n# saw a\nok 1 C.one\n");
            let version = "1.2.3".to_owned();
            Ran {
                version,
                ..sort_out(machine, &said, log, &[], false)
            }
        };
        let made = render(&page, &[ran(&MACHINES[0]), ran(&MACHINES[10])]).unwrap();
        let rows = |text: &str| made.lines().filter(|line| line.contains(text)).count();
        assert_eq!(rows(" | not run | not run | "), LETTERS.len() - 1);
        assert_eq!(
            rows(" | _revocable:_ holds | _persistent:_ a | A pin is never put after"),
            1
        );
        assert_eq!(rows("NVIDIA's 1.2.3 | this module |"), 1 + SECTIONS.len());
        assert!(
            made.contains("\n`C.one`\n- NVIDIA's, revocable: a\n- ours, persistent: a\n<!-- end")
        );
        assert_eq!(
            render(&made, &[ran(&MACHINES[0]), ran(&MACHINES[10])]).unwrap(),
            made
        );
        let new = "now: | C | late |";
        assert_eq!(differing("# x\n", "# x\n| C | late |\n"), [new]);
        assert_eq!(differing("# x\n", "").len(), 1);
        assert!(differing(&made, &made).is_empty());
    }
}
