// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The known hazards: runs the schedules of `gdr hazards` against NVIDIA's nvidia-peermem and our
//! module, and makes the page with the results.
//!
//! A VM may die. The result is then the VM's output until its death and its kernel's reports. The
//! page is made only from results, so it is the same for every run, unless something has changed.

mod machines;
mod rows;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::LazyLock;

use anyhow::{Context as _, Result};
use regex::Regex;

use self::machines::{Machine, MACHINES, POISON};
use self::rows::{HEAD, LIMITS, ROWS};
use crate::documents::wrapped;
use crate::paths::Paths;
use crate::results::{pattern, Format, Reader, Test, Verdict};
use crate::vm::{Build, Options, Peermem};
use crate::{guest, kernel, klog, programs, setup, vm};

/// Path of the page in the repository.
const PAGE: &str = "docs/hazards.md";

/// Time limit in seconds, many times longer than a VM needs before it dies.
const HANGS: u64 = 180;

/// A schedule that ends with the loss of the machine, whatever a client does.
struct Unpreventable {
    schedule: &'static str,
    title: &'static str,
    /// Text of the schedule's section of the page.
    text: &'static str,
    /// Defect that either module must show.
    defect: &'static str,
}

const UNPREVENTABLE: [Unpreventable; 2] = [
    Unpreventable {
        schedule: "driver_holds_lock",
        title: "A lock that the HCA's driver holds",
        text: "When mlx5 cannot load the new memory of a `rereg_mr`, it releases that memory with ib_core's lock held. In \
               revocable mode, a free at that moment waits for this lock, and the release for the free: NVIDIA's module \
               waits in its put, this one for the end of the callback. No client can prevent that.",
        defect: "the free and the release wait for each other",
    },
    Unpreventable {
        schedule: "core_locks_twice",
        title: "A lock that ib_core takes twice",
        text: "When mlx5 cannot create the HCA's region (`create_real_mr`), it stops ib_core's notifier, which it has not \
               activated yet. In revocable mode, an ib_core of OFED before 25.04, Ubuntu 5.15 or linux-nvidia 6.8 then \
               takes a lock that the same thread holds: the registration never ends, and a free of the memory waits for \
               it with nvidia.ko's locks held. No client can prevent that: \
               [which OFED the revocable mode needs](compatibility.md#ib_core).",
        defect: "the registration waits for its own lock, and the free for the registration",
    },
];

fn unpreventable(schedule: &str) -> Option<&'static Unpreventable> {
    UNPREVENTABLE
        .iter()
        .find(|unpreventable| unpreventable.schedule == schedule)
}

/// The result of a schedule in one VM.
#[derive(Debug, Default, Clone)]
struct Outcome {
    saw: Vec<String>,
    wrong: Vec<String>,
    /// Headlines of the kernel's reports.
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

    /// Returns the defects, or `None` if there are none.
    fn defects(&self) -> Option<String> {
        let oops = self.reports.iter().any(|report| report == OOPS);
        // The kernel's state decides whether the defect kills a thread or the machine.
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

/// All results of one VM.
struct Ran {
    machine: &'static Machine,
    outcomes: Outcomes,
    /// Problems that belong to no schedule.
    problems: Vec<String>,
    version: String,
}

static STAMP: LazyLock<Regex> = LazyLock::new(|| pattern(r"^\[[ 0-9.]+\](\[[ TC0-9]+\])? "));
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
    let lines: Vec<String> = report
        .lines
        .iter()
        .map(|line| STAMP.replace(line, "").into_owned())
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
    let first = lines.first().map_or("", String::as_str);
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
    frozen: bool,
) -> Result<Ran> {
    let mut options = Options {
        peermem: machine.module,
        kernel: kernel.to_owned(),
        build,
        frozen,
        gpus: 1,
        interpose: true,
        timeout: Some(if machine.fatal { HANGS } else { 1200 }),
        env: vec![guest::SYSTEM_PROGRAMS.to_owned()],
        append: vec![POISON.to_owned()],
        ..Options::default()
    };
    if machine.fatal {
        options.append.push("oops=panic".to_owned());
    }
    (machine.options)(&mut options);
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
    // If the hung thread leaves the other processor to the program, the program reports the hang,
    // and the VM does not end.
    let hung = machine.fatal && timed_out;
    let hangs = |outcome: &Outcome| outcome.broken.iter().any(|why| why.contains(HANGING));
    outcomes.retain(|(_, outcome)| !(hung && hangs(outcome)));
    let told = match log.split_once("] hazard: end") {
        Some((before, _)) if hung => before,
        _ => log,
    };
    // A schedule that killed the VM has no result of its own.
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
            Some((name, _)) if machine.fatal && died && name == last => {}
            Some((_, outcome)) => outcome.reports.insert(0, headline),
            // The schedule that left something behind in NVIDIA's nvidia-peermem already reports
            // the defect.
            None if machine.module == Peermem::Nvidia => {}
            None => problems.push(format!("the kernel reports: {headline}")),
        }
    }
    if timed_out && !(machine.fatal && died) {
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

/// Returns `true` if a schedule belongs to a row.
fn belongs(schedule: &str, letter: &str) -> bool {
    schedule.split('.').next() == Some(letter)
}

/// Returns the text of a row for one of the modules: by mode, or once if the modes agree.
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

/// Joins phrases, and drops duplicates.
fn once_each(words: &[String]) -> String {
    let mut said: Vec<&str> = Vec::new();
    for phrase in words.iter().flat_map(|words| words.split("; ")) {
        if !said.contains(&phrase) {
            said.push(phrase);
        }
    }
    said.join("; ")
}

fn render(ran: &[Ran]) -> String {
    let version = ran
        .iter()
        .find(|ran| ran.machine.module == Peermem::Nvidia)
        .map_or("", |ran| ran.version.as_str());
    let mut text = HEAD.replace("{version}", version);
    text.push_str(&format!(
        "\n| | hazard | schedule | NVIDIA's {version} | this module | prevented by |\n|---|---|---|---|---|---|\n"
    ));
    for row in ROWS {
        text.push_str(&format!(
            "| {} | {} | {} | {} | {} | {} |\n",
            row.letter,
            row.what,
            row.schedule,
            cell(ran, Peermem::Nvidia, row.letter),
            cell(ran, Peermem::Ours, row.letter),
            row.rule
        ));
    }
    text.push_str("\n## Details\n");
    for row in ROWS {
        if let Some(more) = row.more {
            text.push('\n');
            wrapped(&mut text, &format!("**{}.** {more}", row.letter), "");
        }
    }
    text.push_str(
        "\n## Two allocations side by side\n\nThis module registers a range over both allocations. NVIDIA's module refuses it.\n\n",
    );
    text.push_str(&format!(
        "| NVIDIA's {version} | this module |\n|---|---|\n| {} | {} |\n",
        whole(ran, Peermem::Nvidia, "two_allocations"),
        whole(ran, Peermem::Ours, "two_allocations")
    ));
    for unpreventable in &UNPREVENTABLE {
        text.push_str(&format!("\n## {}\n\n", unpreventable.title));
        wrapped(&mut text, unpreventable.text, "");
        text.push_str(&format!(
            "\n| NVIDIA's {version} | this module |\n|---|---|\n| {} | {} |\n",
            whole(ran, Peermem::Nvidia, unpreventable.schedule),
            whole(ran, Peermem::Ours, unpreventable.schedule)
        ));
    }
    text.push_str(
        "\n## Every schedule\n\nDefects are **bold**. `gdr hazards NAME` runs the schedules whose names begin with NAME. Some \
         need a VM with\n`--interpose --append slub_debug=FP,kmalloc-*`.\n",
    );
    let mut schedules: BTreeMap<&str, Vec<(&Ran, &Outcome)>> = BTreeMap::new();
    for ran in ran {
        for (name, outcome) in &ran.outcomes {
            schedules.entry(name).or_default().push((ran, outcome));
        }
    }
    for (name, outcomes) in schedules {
        text.push_str(&format!("\n`{name}`\n"));
        for (ran, outcome) in outcomes {
            if outcome.skipped {
                continue;
            }
            let module = match ran.machine.module {
                Peermem::Nvidia => "NVIDIA's",
                _ => "ours",
            };
            let line = format!("- {module}, {}: {}", ran.machine.name, outcome.words());
            wrapped(&mut text, &line, "  ");
        }
    }
    text.push_str(&LIMITS.replace("{version}", version));
    text
}

/// Returns the same as `cell`, plus the results that are correct for both modules.
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

/// Returns the differences between two pages: rows by their letters, otherwise lines.
fn differing(committed: &str, made: &str) -> Vec<String> {
    let of = |text: &str| -> Vec<String> { text.lines().map(str::to_owned).collect() };
    let (old, new) = (of(committed), of(made));
    let mut found = BTreeSet::new();
    for line in new.iter().filter(|line| !old.contains(line)) {
        let letter = line
            .strip_prefix("| ")
            .and_then(|rest| rest.split(' ').next())
            .filter(|letter| ROWS.iter().any(|row| row.letter == *letter));
        found.insert(match letter {
            Some(letter) => format!("row {letter}: now {line}"),
            None => format!("now: {line}"),
        });
    }
    if found.is_empty() && old != new {
        found.insert("a line is gone, or the order has changed".to_owned());
    }
    found.into_iter().collect()
}

/// Returns one test for each row, and the problems that belong to no row.
fn verdicts(ran: &[Ran]) -> (Vec<Test>, Vec<String>) {
    let mut tests = Vec::new();
    let letters = ROWS
        .iter()
        .map(|row| row.letter)
        .chain(["two_allocations"])
        .chain(UNPREVENTABLE.iter().map(|one| one.schedule));
    for letter in letters {
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
                    let expected = unpreventable(name).map(|one| one.defect);
                    if defects.as_deref() != expected {
                        let found = defects.as_deref().unwrap_or("holds");
                        notes.push(format!("{name}, {}: {found}", ran.machine.name));
                    }
                }
            }
        }
        if ours == 0 {
            notes.push("ours was not run".to_owned());
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

/// Runs all schedules and makes the page.
fn run_all(paths: &Paths, frozen: bool) -> Result<(Vec<Ran>, String)> {
    let ran = MACHINES
        .iter()
        .map(|machine| run_machine(paths, machine, (kernel::DEFAULT, None), frozen))
        .collect::<Result<Vec<_>>>()?;
    let page = render(&ran);
    Ok((ran, page))
}

/// Runs the check for the suite: our module must pass, and the page must equal the committed one.
pub(crate) fn check(paths: &Paths, frozen: bool) -> Result<(Vec<Test>, Vec<String>)> {
    let (ran, page) = run_all(paths, frozen)?;
    let (tests, mut problems) = verdicts(&ran);
    let committed = fs::read_to_string(paths.repo.join(PAGE)).unwrap_or_default();
    for difference in differing(&committed, &page) {
        problems.push(format!("{PAGE} is not what this run makes: {difference}"));
    }
    Ok((tests, problems))
}

/// Runs the check for the suite on another kernel or with another build, which the page does not
/// cover: our module must pass.
pub(crate) fn check_ours(
    paths: &Paths,
    kernel: &str,
    build: Option<Build>,
) -> Result<(Vec<Test>, Vec<String>)> {
    let ran = MACHINES
        .iter()
        .filter(|machine| machine.module == Peermem::Ours)
        .map(|machine| run_machine(paths, machine, (kernel, build), true))
        .collect::<Result<Vec<_>>>()?;
    Ok(verdicts(&ran))
}

/// Runs all schedules and writes the page into the work tree.
pub(crate) fn write(paths: &Paths) -> Result<i32> {
    setup::all(paths, [kernel::DEFAULT])?;
    let (ran, page) = run_all(paths, true)?;
    let (tests, problems) = verdicts(&ran);
    let mut failed = problems.len();
    for test in &tests {
        if test.verdict == Verdict::Passed {
            println!("{}: ok", test.name);
            continue;
        }
        failed += 1;
        println!("{}: FAILED", test.name);
        for note in &test.notes {
            println!("    {note}");
        }
    }
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
    fn a_report_has_one_name_in_every_run() {
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
        let mut reader = Reader::new(Format::Ktap);
        for line in text.lines() {
            reader.line(line);
        }
        reader
    }

    #[test]
    fn a_schedule_that_takes_the_machine_along_is_told() {
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
        let machine = MACHINES.iter().find(|machine| machine.fatal);
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
        // A VM that ends without dying in a schedule gives no result.
        let ran = sort_out(machine, &said("1..1\n"), "", &[], true);
        assert!(!ran.problems.is_empty());
    }

    #[test]
    fn what_comes_of_an_oops_is_no_result_of_its_own() {
        let outcome = |wrong: &[&str], reports: &[&str]| Outcome {
            wrong: wrong.iter().map(ToString::to_string).collect(),
            reports: reports.iter().map(ToString::to_string).collect(),
            ..Outcome::default()
        };
        let killed = outcome(&["x", "the kernel killed the thread in the free"], &[OOPS]);
        let died = outcome(&["x"], &[OOPS, DEATH]);
        assert_eq!(killed.defects().as_deref(), Some("x; an oops"));
        assert_eq!(killed.defects(), died.defects());
        // Without an oops, the death is a defect of its own.
        let hangs = outcome(&["x"], &[DEATH]);
        assert_eq!(hangs.defects().as_deref(), Some("x; the kernel crashes or hangs"));
    }

    #[test]
    fn a_log_with_a_hole_is_a_problem() {
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
    fn ours_may_not_have_a_report_anywhere() {
        let ours = MACHINES.iter().find(|m| m.module == Peermem::Ours).unwrap();
        let said = said("1..1\n# saw a\nok 1 X.one\n");
        let log = "[    1.0] hazard: X.one\n[    2.0] hazard: end\n[    3.0] runner: teardown: pins_live is 1, not 0\n";
        let ran = sort_out(ours, &said, log, &[], false);
        assert_eq!(ran.problems.len(), 1);
        assert!(ran.outcomes[0].1.defects().is_none());
    }

    #[test]
    fn differing_rows_are_named() {
        let old = "# x\n| A | one |\n| B | two |\n";
        assert!(differing(old, old).is_empty());
        assert_eq!(
            differing(old, "# x\n| A | one |\n| B | three |\n"),
            ["row B: now | B | three |"]
        );
        assert_eq!(differing(old, "# x\n| A | one |\n").len(), 1);
    }
}
