// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The debug kernel's detectors, and checks that they still work.
//!
//! A detector that has switched itself off finds nothing, and its run looks like a run without
//! faults. Each VM therefore ends with injected faults (`tests/injected`), and all of them must be
//! reported. The guest (`tests/vm/detectors`) writes the detectors' state to the kernel's log,
//! which is parsed here.

use anyhow::Result;

use crate::klog;
use crate::klog::Expectation;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detector {
    /// Use of memory after free or out of bounds.
    Kasan,
    /// Locks taken in an order that can deadlock.
    Lockdep,
    /// Sleeping in atomic context.
    Sleep,
    /// Misuse of DMA mappings.
    Dma,
    /// Memory that nothing points to.
    Kmemleak,
}

/// Factor for time limits on the debug kernel, which is slower than the test VM's default kernel.
pub(crate) const SLOWER: u32 = 4;

pub(crate) const MEMORY_MIB: u32 = 512;

/// Returns the detectors that a VM must have. `faults` means that allocations in the VM fail on
/// purpose. kmemleak is then useless: its own allocations fail too, and a failed call may leave
/// memory behind that is not leaked. DMA debugging switches itself off as soon as one of its own
/// allocations fails.
pub(crate) fn wanted(faults: bool) -> &'static [Detector] {
    use Detector::{Dma, Kasan, Kmemleak, Lockdep, Sleep};
    if faults {
        &[Kasan, Lockdep, Sleep]
    } else {
        &[Kasan, Lockdep, Sleep, Dma, Kmemleak]
    }
}

/// Kernel parameters for the detectors. KASAN continues after its first report, DMA debugging has
/// entries for all mappings of a test, and an RCU stall may last longer than on hardware.
const ARGUMENTS: &str =
    "kasan_multi_shot dma_debug_entries=262144 rcupdate.rcu_cpu_stall_timeout=120";

/// Kernel parameter that switches off the slab allocator's per-processor caches. kmemleak takes the
/// pointers in these caches for references, and would miss the injected leak. If allocations fail
/// on purpose, the caches are filled at unpredictable times, and no count of allocations would be
/// exact. Any flag of slub_debug switches the caches off, and Z is the cheapest flag.
const NO_CACHES: &str = "slub_debug=Z";

/// Limits the VM to four levels of page tables.
///
/// If the processor supports five levels, the kernel computes the number of levels a second time
/// while it identifies the boot processor. During an interrupt at that moment, KASAN reports every
/// memory access as wild. Printing a report takes longer than a timer tick, so the VM prints
/// reports forever. This happened in one of some hundreds of boots ("kasan: Fix false-positive
/// wild-memory-access on x86 under 5-level paging", linux-mm, June 2026).
pub(crate) const PROCESSOR: &str = ",la57=off";

pub(crate) fn kernel_arguments(faults: bool) -> String {
    let off = if faults {
        "kmemleak=off dma_debug=off"
    } else {
        ""
    };
    format!("{ARGUMENTS} {NO_CACHES} {off}")
}

/// Returns the messages of the two detectors that `--faults` switches off on purpose.
pub(crate) fn switched_off() -> Result<[Expectation; 2]> {
    Ok([
        "kmemleak: Kernel memory leak detector disabled=1".parse()?,
        "DMA-API: debugging disabled on kernel command line=1".parse()?,
    ])
}

impl Detector {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kasan => "kasan",
            Self::Lockdep => "lockdep",
            Self::Sleep => "sleep",
            Self::Dma => "dma",
            Self::Kmemleak => "kmemleak",
        }
    }

    /// Returns the words that the report of the injected fault must contain, all in one report.
    fn report(self) -> &'static [&'static str] {
        match self {
            Self::Kasan => &["BUG: KASAN: slab-use-after-free in injected_use_after_free"],
            Self::Lockdep => &[
                "possible circular locking dependency",
                "injected_lock_inversion",
            ],
            Self::Sleep => &["BUG: sleeping function called", "injected_sleep"],
            Self::Dma => &["pending DMA allocations while released", "injected_mapping"],
            Self::Kmemleak => &["kmemleak: ", " new suspected memory leaks"],
        }
    }
}

/// Log line that the guest writes before it injects faults.
const INJECTING: &str = "runner: injecting";
/// Log line that the guest writes after all faults were injected.
const INJECTED: &str = "runner: injected";

/// Part of the line for the injected mapping in `dma-api/dump`.
const INJECTED_MAPPING: &str = " P=0x00000000fed1c000 ";

const SHOWN_LEAKS: usize = 5;

/// Splits a log at the line where the injection of faults begins. The second part is empty if there
/// is no such line.
pub(crate) fn split(log: &str) -> (&str, &str) {
    let mut at = 0;
    for line in log.split_inclusive('\n') {
        if klog::message(line.trim_end_matches('\n')) == INJECTING {
            return log.split_at(at);
        }
        at += line.len();
    }
    (log, "")
}

/// Returns the guest's log lines that begin with `runner: ` and this heading, without this prefix.
fn said<'a>(log: &'a str, heading: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let start = format!("runner: {heading}: ");
    log.lines()
        .filter_map(move |line| klog::message(line).strip_prefix(&start))
}

/// Returns a value from the kernel's directory `dma-api`, as the guest logged it.
fn dma(log: &str, name: &str) -> Option<String> {
    said(log, "dma").find_map(|text| Some(text.strip_prefix(name)?.trim().to_owned()))
}

fn dead(detector: Detector, why: &str) -> String {
    format!("detector {} is dead: {why}", detector.name())
}

/// Returns the problems: detectors that do not work, and faults that working detectors found.
pub(crate) fn judge(run: &str, injected: &str, wanted: &[Detector]) -> Vec<String> {
    if injected.is_empty() {
        return vec!["the injection of faults did not begin".to_owned()];
    }
    let mut problems = Vec::new();
    if wanted.contains(&Detector::Lockdep) {
        let state = said(run, "lockdep").last().unwrap_or("nothing");
        let on = state.split_whitespace().eq(["debug_locks:", "1"]);
        if !on {
            problems.push(dead(Detector::Lockdep, &format!("it says '{state}'")));
        }
    }
    if wanted.contains(&Detector::Dma) {
        problems.extend(dma_problems(run));
        let left = said(injected, "dma").filter(|text| text.contains(INJECTED_MAPPING));
        if left.count() != 1 {
            problems.push(dead(
                Detector::Dma,
                "the list of remaining mappings lacks the injected one",
            ));
        }
    }
    if wanted.contains(&Detector::Kmemleak) {
        let since = said(run, "modules").find_map(|text| text.strip_prefix("from ")?.parse().ok());
        match since {
            Some(since) => problems.extend(leaks(injected, since)),
            None => {
                problems.push("the log does not say when the first module was loaded".to_owned());
            }
        }
    }
    problems.extend(reports(injected, wanted));
    for line in injected.lines().map(klog::message) {
        if line.starts_with("runner: cannot inject") {
            problems.push(line.to_owned());
        }
    }
    if !injected.lines().any(|line| klog::message(line) == INJECTED) {
        problems.push("the injection of faults did not end".to_owned());
    }
    problems
}

/// Returns a problem for each injected fault without a report, and for each other report.
fn reports(injected: &str, wanted: &[Detector]) -> Vec<String> {
    let mut problems = Vec::new();
    let reports = klog::reports(injected);
    let is_of = |report: &klog::Report, detector: Detector| {
        let says = |words: &str| report.lines.iter().any(|line| line.contains(words));
        detector.report().iter().all(|words| says(words))
    };
    for &detector in wanted {
        if !reports.iter().any(|report| is_of(report, detector)) {
            problems.push(dead(detector, "its injected fault was not reported"));
        }
    }
    for report in &reports {
        if !wanted.iter().any(|&detector| is_of(report, detector)) {
            problems.push(format!(
                "the kernel log has a report that belongs to no injected fault:\n{report}"
            ));
        }
    }
    problems
}

fn dma_problems(run: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let mut check = |name: &str, is_well: fn(&str) -> bool| {
        let value = dma(run, name).unwrap_or_default();
        if !is_well(&value) {
            problems.push(dead(Detector::Dma, &format!("{name} is '{value}'")));
        }
    };
    check("disabled", |value| value == "N");
    check("error_count", |value| value == "0");
    // 0 means that DMA debugging ran out of entries and switched itself off.
    check("min_free_entries", |value| {
        value.parse::<u64>().is_ok_and(|count| count > 0)
    });
    let left: Vec<&str> = said(run, "dma")
        .filter_map(|text| text.strip_prefix("mapping "))
        .collect();
    if let Some(first) = left.first() {
        problems.push(format!(
            "{} DMA mappings are left, the first of them: {first}",
            left.len()
        ));
    }
    problems
}

/// Returns the seconds from boot to the allocation time that kmemleak prints for an object.
/// kmemleak prints ticks, which start five minutes before 2³² (`INITIAL_JIFFIES`, with the HZ of
/// `debug.config`).
fn born(object: &[&str]) -> Option<f64> {
    const HZ: u32 = 100;
    let ticks: f64 = object
        .iter()
        .find_map(|line| line.rsplit_once(", jiffies "))
        .and_then(|(_, ticks)| ticks.trim().parse().ok())?;
    Some((ticks - (2f64.powi(32) - f64::from(300 * HZ))) / f64::from(HZ))
}

/// Checks the objects that kmemleak lists. The injected objects must be in the list. No other
/// object may be younger than the first module.
fn leaks(injected: &str, since: f64) -> Vec<String> {
    let mut objects: Vec<Vec<&str>> = Vec::new();
    for line in said(injected, "kmemleak") {
        if line.starts_with("unreferenced object") {
            objects.push(Vec::new());
        }
        if let Some(object) = objects.last_mut() {
            object.push(line);
        }
    }
    let all = objects.len();
    objects.retain(|object| !object.iter().any(|line| line.contains("injected_leak+")));
    let found = all - objects.len();
    objects.retain(|object| born(object).is_none_or(|age| age >= since));
    let mut problems = Vec::new();
    if found == 0 {
        problems.push(dead(
            Detector::Kmemleak,
            "it does not list the injected leak",
        ));
    }
    if !objects.is_empty() {
        let shown: String = objects
            .iter()
            .take(SHOWN_LEAKS)
            .flatten()
            .map(|line| format!("\n    {line}"))
            .collect();
        problems.push(format!("{} objects are leaked:{shown}", objects.len()));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = include_str!("../samples/debug.log");

    /// Returns the problems of [`LOG`] after a change of its lines.
    fn problems(change: impl Fn(&str) -> String) -> Vec<String> {
        let log: String = LOG.lines().map(|line| change(line) + "\n").collect();
        let log = klog::once(&log);
        let (run, injected) = split(&log);
        judge(run, injected, wanted(false))
    }

    fn without(words: &str) -> Vec<String> {
        with(words, words, "")
    }

    /// Returns the problems of [`LOG`] after `old` is replaced by `new` in the lines that contain
    /// `words`. If `new` is empty, these lines are emptied.
    fn with(words: &str, old: &str, new: &str) -> Vec<String> {
        assert!(LOG.contains(words), "{words}");
        problems(|line| match line.contains(words) {
            true if new.is_empty() => String::new(),
            true => line.replace(old, new),
            false => line.to_owned(),
        })
    }

    fn is_dead(name: &str, problems: &[String]) {
        let dead = format!("detector {name} is dead");
        assert!(
            problems.iter().any(|problem| problem.starts_with(&dead)),
            "{name}: {problems:?}"
        );
    }

    /// Tests a log in which two processors wrote to the console at once. The second processor began
    /// when the first one had written a part of the line, or all of it.
    #[test]
    fn a_replayed_line_counts_once() {
        for (words, written) in [
            (INJECTED_MAPPING, 90),
            (INJECTED_MAPPING, 0),
            ("BUG: sleeping function called", usize::MAX),
            ("possible circular locking dependency", 40),
        ] {
            let twice = |line: &str| {
                let cut = &line[..written.min(line.len())];
                match line.contains(words) {
                    true => format!("{cut}\n** replaying previous printk message **\n{line}"),
                    false => line.to_owned(),
                }
            };
            assert_eq!(problems(twice), Vec::<String>::new(), "{words}");
        }
    }

    #[test]
    fn a_log_of_working_detectors_is_clean() {
        let (run, injected) = split(LOG);
        assert!(klog::judge(run, &[]).is_clean());
        assert_eq!(judge(run, injected, wanted(false)), Vec::<String>::new());
        // `wanted(true)` is for a VM without kmemleak and DMA debugging. The reports of the
        // injected leak and of the injected mapping are then two problems.
        let found = judge(run, injected, wanted(true));
        assert_eq!(found.len(), 2, "{found:?}");
    }

    #[test]
    fn each_dead_detector_is_named() {
        for (words, name) in [
            ("KASAN: slab-use-after-free", "kasan"),
            ("possible circular locking", "lockdep"),
            ("sleeping function called", "sleep"),
            ("has pending DMA allocations", "dma"),
            ("dma: mapping pci", "dma"),
            ("injected_leak+", "kmemleak"),
            ("new suspected memory leaks", "kmemleak"),
        ] {
            is_dead(name, &without(words));
        }
        // A detector that has switched itself off also counts as dead.
        for (old, new, name) in [
            (
                "debug_locks:                             1",
                "debug_locks: 0",
                "lockdep",
            ),
            ("dma: disabled N", "dma: disabled Y", "dma"),
            ("min_free_entries 262144", "min_free_entries 0", "dma"),
            ("error_count 0", "error_count 3", "dma"),
        ] {
            is_dead(name, &with(old, old, new));
        }
        assert_eq!(without("runner: lockdep:").len(), 1);
        assert_eq!(without("runner: dma: ").len(), 4);
    }

    #[test]
    fn reports_beside_the_injected_faults_are_failures() {
        let leaked = "unreferenced object 0xff1100000cb5e020 (size 96):";
        let young = "\n[  105.2] runner: kmemleak:   comm \"gdr\", pid 9, jiffies 4294941795\n\
                     [  105.2] runner: kmemleak: unreferenced object 0xff1100000cb5e021 (size 96):";
        let mapping = "runner: dma: mapping virtio-pci 0000:00:02.0 phy idx 1 P=0x0000002000000000 attrs=0xc00";
        let fault =
            "BUG: unable to handle page fault for address: ff11\n[  200.0] runner: injected";
        for (old, new, problem) in [
            (leaked, format!("{leaked}{young}"), "1 objects are leaked"),
            (
                "runner: command ended",
                mapping.to_owned(),
                "1 DMA mappings are left",
            ),
            (
                "runner: injected",
                fault.to_owned(),
                "the kernel log has a report",
            ),
        ] {
            let found = with(old, old, &new);
            assert!(
                found.len() == 1 && found[0].starts_with(problem),
                "{found:?}"
            );
        }
    }

    #[test]
    fn leaks_from_the_boot_are_no_problem() {
        // The first module is loaded 13 s after boot. These objects are allocated at 12.99 s and
        // 13.08 s.
        let object = |ticks: &'static str| {
            let line = format!("  comm \"init\", pid 1, jiffies {ticks}");
            let injected = format!(
                "runner: kmemleak: unreferenced object 0x1 (size 8):\nrunner: kmemleak: {line}\n\
                 runner: kmemleak: unreferenced object 0x2 (size 8):\nrunner: kmemleak:  injected_leak+0x1/0x2\n"
            );
            leaks(&injected, 13.07).len()
        };
        assert_eq!(object("4294938595"), 0);
        assert_eq!(object("4294938604"), 1);
    }

    #[test]
    fn an_injection_that_did_not_end_is_a_problem() {
        assert_eq!(without("runner: injected").len(), 1);
        assert_eq!(
            without("runner: injecting"),
            ["the injection of faults did not begin"]
        );
        assert_eq!(without("runner: modules:").len(), 1);
    }
}
