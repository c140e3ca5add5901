// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Finds reports in a kernel log, and compares them with the reports that a test declared.

mod lines;
mod smmu;

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use anyhow::{anyhow, ensure, Context as _, Result};
use regex::{Regex, RegexSet};

#[cfg(test)]
pub(crate) use self::lines::once;
pub(crate) use self::lines::{message, read};

/// Line by which the kernel reports lost lines. Lines are lost if the serial port is too slow.
const LOSS: &str = r"^\*\* \d+ printk messages dropped";

/// Patterns of lines that start a report. A report may continue for many lines.
static OPENERS: LazyLock<RegexSet> = LazyLock::new(|| {
    set(&[
        r"\bWARNING: ",
        r"\bBUG(:| \S+ \()|kernel BUG at ",
        r"\bOops\b",
        r"Kernel panic",
        r"general protection fault",
        // arm64's lines do not contain "Oops".
        r"^Internal error: |^Unable to handle kernel |\bSError\b",
        r"INFO: task .* blocked for more than",
        r"INFO: rcu\S* .*stall|rcu: INFO: .*stall|self-detected stall",
        r"soft lockup|hard LOCKUP",
        r"\b(KASAN|KMSAN|KCSAN|UBSAN)\b.*:",
        r"possible recursive locking|possible circular locking|suspicious RCU usage|inconsistent lock state",
        r"bad unlock balance|lock held when returning|held lock freed",
        r"INFO: trying to register non-static key|turning off the locking correctness validator",
        r"refcount_t: ",
        r"list_(add|del) corruption|slab-.*overwritten|Redzone overwritten|Object (padding|already)",
        r"scheduling while atomic|sleeping function called",
        r"unregister_netdevice: waiting",
        r"DMAR: (DRHD: handling fault|\[.*fault|\[DMA |\[INTR)",
        // SMMU: a device's forbidden access, and errors between the SMMU and its driver.
        r"^arm-smmu-v3 \S+: (event |unexpected |device has entered|no \w+ irq|CMD)",
        r"^arm-smmu-v3 \S+: .*(timeout|error|overflow|aborted|fail)",
        // Any message of kmemleak. [`HARMLESS`] excludes the messages at boot.
        r"^kmemleak: ",
        r"^DMA-API: ",
        r"^sysfs: cannot create duplicate filename",
        r"page allocation failure",
        r"rust_kernel: panicked",
        r"unknown parameter '.*' ignored",
        r"^runner: (teardown|setup):",
        LOSS,
    ])
});

fn is_loss(line: &str) -> bool {
    static LOST: LazyLock<RegexSet> = LazyLock::new(|| set(&[LOSS]));

    LOST.is_match(message(line))
}

/// Patterns of lines that match [`OPENERS`] but report nothing.
static HARMLESS: LazyLock<RegexSet> = LazyLock::new(|| {
    set(&[
        r"DMA-API: (preallocated|debugging enabled|dma_debug_entry pool grown)",
        r"kmemleak: Kernel memory leak detector initialized",
    ])
});

static CUT_HERE: &str = "------------[ cut here ]------------";
static END_OF_TRACE: &str = "---[ end trace";
static MAPPED_AT: &str = "DMA-API: Mapped at:";

/// Maximum length of a report, in lines. The lines after the maximum are searched for new reports.
const LONGEST_REPORT: usize = 160;

/// Number of lines that a failure shows after a report's first line.
const SHOWN_LINES: usize = 45;

#[expect(
    clippy::expect_used,
    reason = "the patterns are constants of this file"
)]
fn set(patterns: &[&str]) -> RegexSet {
    RegexSet::new(patterns).expect("constant pattern")
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// Line number, from 1.
    pub(crate) line: usize,
    pub(crate) lines: Vec<String>,
}

impl Report {
    /// Returns `true` if the report says that a part of the log is missing.
    pub(crate) fn is_loss(&self) -> bool {
        self.lines.first().is_some_and(|line| is_loss(line))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.lines.iter().take(SHOWN_LINES) {
            writeln!(f, "    {line}")?;
        }
        if self.lines.len() > SHOWN_LINES {
            writeln!(f, "    … {} more lines", self.lines.len() - SHOWN_LINES)?;
        }
        Ok(())
    }
}

/// A report that a test provokes: a pattern, and the number of reports that must match it.
#[derive(Debug, Clone)]
pub(crate) struct Expectation {
    pattern: Regex,
    min: usize,
    max: usize,
}

impl FromStr for Expectation {
    type Err = anyhow::Error;

    /// Parses `REGEX=COUNT` or `REGEX=MIN-MAX`. The regular expression may contain `=`.
    fn from_str(text: &str) -> Result<Self> {
        let (pattern, count) = text
            .rsplit_once('=')
            .ok_or_else(|| anyhow!("'{text}' is not REGEX=COUNT"))?;
        let (min, max) = count.split_once('-').unwrap_or((count, count));
        let number = |text: &str| {
            let number = text.parse::<usize>();
            number.with_context(|| format!("'{count}' is not a count"))
        };
        let (min, max) = (number(min)?, number(max)?);
        ensure!(min <= max, "no count is in the range '{count}'");
        Ok(Self {
            pattern: Regex::new(pattern).with_context(|| format!("in '{text}'"))?,
            min,
            max,
        })
    }
}

#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) undeclared: Vec<Report>,
    /// One sentence for each declared report that occurred more or less often than declared.
    pub(crate) miscounted: Vec<String>,
}

impl Verdict {
    pub(crate) fn is_clean(&self) -> bool {
        self.undeclared.is_empty() && self.miscounted.is_empty()
    }
}

/// Returns `true` if the text of a line is indented, as in a stack trace: another space follows the
/// space after the time stamp.
fn is_indented(line: &str) -> bool {
    line.split_once(']')
        .is_some_and(|(_, text)| text.starts_with("  "))
}

/// Returns `true` if a report that starts with this line continues in the next lines.
fn has_dump(text: &str) -> bool {
    !(text.starts_with("runner: ")
        || text.starts_with("** ")
        || text.contains("unknown parameter")
        || text.contains("DMAR: ")
        || text.starts_with(smmu::DRIVER)
        || text.contains("kmemleak: ")
        || text.contains("unregister_netdevice")
        || text.contains("DMA-API: "))
}

fn opens(text: &str) -> bool {
    OPENERS.is_match(text) && !HARMLESS.is_match(text) && !text.starts_with(PROVOKES)
}

/// Returns `true` if this line starts a new report even before the previous one has ended.
fn is_headline(text: &str) -> bool {
    [
        "BUG: ",
        "WARNING: ",
        "INFO: task ",
        "watchdog: BUG: ",
        "Unable to handle kernel ",
    ]
    .iter()
    .any(|start| text.starts_with(start))
}

/// Returns `true` for a line that must belong to a report, such as the start of a stack trace. A
/// report whose end is missing extends at least to this line. Has the lines of both architectures.
fn is_telling(text: &str) -> bool {
    ["Call Trace", "RIP:", "Call trace", "pc :"]
        .iter()
        .any(|start| text.starts_with(start))
}

/// Returns `true` if a report that `first` started ends with the line `text`.
fn ends(first: &str, text: &str) -> bool {
    if text.contains(END_OF_TRACE) || text.contains("Rebooting in") {
        return true;
    }
    // The report of a fault or of KASAN has several stacks. The report of a lock or of a hang ends
    // with its stack.
    let many_stacks = first.contains("BUG:") || first.contains("Oops") || first == CUT_HERE;
    if text.contains("</TASK>") {
        return !many_stacks || first.contains("sleeping function") || first.contains("scheduling");
    }
    first.contains("KASAN") && text.starts_with("==========")
}

pub(crate) fn reports(log: &str) -> Vec<Report> {
    let lines: Vec<&str> = log.lines().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let first = message(lines[at]);
        let cut = first == CUT_HERE;
        if !cut && !opens(first) {
            at += 1;
            continue;
        }
        let start = at;
        let mut speaks = opens(first);
        let mut has_headline = is_headline(first);
        at += smmu::access(&lines[at..]).max(1);
        if cut || has_dump(first) {
            let limit = lines.len().min(start + LONGEST_REPORT);
            let mut ended = false;
            let mut probe = at;
            while probe < limit {
                let text = message(lines[probe]);
                if text == CUT_HERE || (has_headline && is_headline(text)) {
                    break;
                }
                has_headline |= is_headline(text);
                speaks |= opens(text);
                probe += 1;
                if ends(first, text) {
                    ended = true;
                    break;
                }
            }
            if ended {
                at = probe;
                // The origin of the mapping follows the end of the report.
                if lines.get(at).is_some_and(|line| message(line) == MAPPED_AT) {
                    at += 1;
                    while lines.get(at).is_some_and(|line| is_indented(line)) {
                        at += 1;
                    }
                }
            } else {
                // If no end is found, the report ends with its last line that [`opens`] or
                // [`is_telling`] accepts. Such lines are at most 40 lines apart.
                let mut last = start;
                for (offset, line) in lines[start..probe].iter().enumerate() {
                    let text = message(line);
                    if opens(text) || is_telling(text) {
                        last = start + offset;
                    } else if start + offset > last + 40 {
                        break;
                    }
                }
                at = (last + 1).max(start + 1);
            }
        }
        if speaks || cut {
            found.push(Report {
                line: start + 1,
                lines: lines[start..at]
                    .iter()
                    .map(|line| line.trim_end_matches('\r').to_owned())
                    .collect(),
            });
            // Lost lines inside a declared report are still a failure.
            let inside = lines[start..at].iter().enumerate().skip(1);
            let lost = inside.filter(|(_, line)| is_loss(line));
            found.extend(lost.map(|(offset, line)| Report {
                line: start + 1 + offset,
                lines: vec![(*line).to_owned()],
            }));
        }
    }
    found
}

/// Prefix of a log line by which a test case declares a report that it provokes.
const PROVOKES: &str = "gdr: provokes ";

/// Returns the expectations that test cases declare in the log itself. Ignores declarations that
/// cannot be parsed.
fn provoked(log: &str) -> impl Iterator<Item = Expectation> + '_ {
    log.lines()
        .filter_map(|line| message(line).strip_prefix(PROVOKES)?.parse().ok())
}

/// Compares the reports of a log with those declared in `declared` and in the log. Each report
/// counts for the first expectation that matches one of its lines.
///
/// An ordinary line, outside all reports, also counts for the first expectation that matches it.
pub(crate) fn judge(log: &str, declared: &[Expectation]) -> Verdict {
    let mut expectations = declared.to_vec();
    for new in provoked(log) {
        let same = |known: &&mut Expectation| known.pattern.as_str() == new.pattern.as_str();
        match expectations.iter_mut().find(same) {
            Some(known) => {
                known.min += new.min;
                known.max += new.max;
            }
            None => expectations.push(new),
        }
    }
    let mut verdict = Verdict::default();
    let mut counts = vec![0; expectations.len()];
    let mut in_reports = vec![false; log.lines().count() + 1];
    for report in reports(log) {
        for covered in in_reports
            .iter_mut()
            .skip(report.line)
            .take(report.lines.len())
        {
            *covered = true;
        }
        let declared = expectations
            .iter()
            .position(|e| report.lines.iter().any(|line| e.pattern.is_match(line)));
        match declared {
            Some(index) => counts[index] += 1,
            None => verdict.undeclared.push(report),
        }
    }
    for (number, line) in log.lines().enumerate() {
        if in_reports[number + 1] || message(line).starts_with(PROVOKES) {
            continue;
        }
        if let Some(index) = expectations.iter().position(|e| e.pattern.is_match(line)) {
            counts[index] += 1;
        }
    }
    for (expectation, count) in expectations.iter().zip(counts) {
        let Expectation { pattern, min, max } = expectation;
        if count < *min || count > *max {
            let declared = match min == max {
                true => min.to_string(),
                false => format!("{min} to {max}"),
            };
            verdict.miscounted.push(format!(
                "'{pattern}' was declared {declared} times and occurred {count} times"
            ));
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: &str = "\
[    0.000000] Linux version 7.3.4 (runner@runner)
[    0.100000] DMAR: Host address width 48
[    0.100000] DMAR: DRHD base: 0x000000fed90000 flags: 0x0
[    0.200000] DMA-API: preallocated 65536 debug entries
[    0.200000] DMA-API: debugging enabled by kernel config
[    0.300000] ACPI: DEBUG: nothing
[    1.300000] nvidia: loading out-of-tree module taints kernel.
[    1.400000] runner: command starts
";

    const WARN: &str = "\
[    2.000000] ------------[ cut here ]------------
[    2.000000] refcount_t: underflow; use-after-free.
[    2.000000] WARNING: lib/refcount.c:28 at refcount_warn_saturate+0x1/0x2, CPU#0: gdr/123
[    2.000000] Modules linked in: nvidia
[    2.000000] Call Trace:
[    2.000000]  <TASK>
[    2.000000]  peer_free+0x1/0x2
[    2.000000]  </TASK>
[    2.000000] ---[ end trace 0000000000000000 ]---
";

    const OOPS: &str = "\
[    3.000000][  T123] BUG: kernel NULL pointer dereference, address: 0000000000000010
[    3.000000][  T123] #PF: supervisor read access in kernel mode
[    3.000000][  T123] Oops: Oops: 0000 [#1] SMP
[    3.000000][  T123] RIP: 0010:nv_mem_release+0x1/0x2
[    3.000000][  T123] Call Trace:
[    3.000000][  T123]  <TASK>
[    3.000000][  T123]  </TASK>
[    3.000000][  T123] ---[ end trace 0000000000000000 ]---
";

    const ARM64_OOPS: &str = "\
[    3.000000] Unable to handle kernel NULL pointer dereference at virtual address 0000000000000010
[    3.000000] Mem abort info:
[    3.000000]   ESR = 0x0000000096000004
[    3.000000] Internal error: Oops: 0000000096000004 [#1]  SMP
[    3.000000] pc : nv_mem_release+0x1/0x2 [nvidia_peermem]
[    3.000000] Call trace:
[    3.000000]  nv_mem_release+0x1/0x2 [nvidia_peermem] (P)
[    3.000000] Code: 00000000 00000000 00000000 00000000 (b9401000)
[    3.000000] ---[ end trace 0000000000000000 ]---
";

    const LOCKDEP: &str = "\
[    4.000000] ======================================================
[    4.000000] WARNING: possible circular locking dependency detected
[    4.000000] 7.3.4 #1 Tainted: G O
[    4.000000] stack backtrace:
[    4.000000]  <TASK>
[    4.000000]  </TASK>
";

    const DMAR: &str = "\
[    5.000000] DMAR: DRHD: handling fault status reg 2
[    5.000000] DMAR: [DMA Write NO_PASID] Request device [00:04.0] fault addr 0x2000000000 [fault reason 0x05] PTE Write access is not set
";

    fn expect(text: &str) -> Vec<Expectation> {
        text.split(';').map(|part| part.parse().unwrap()).collect()
    }

    /// Checks that the line before the replay message is kept, unless the replayed line begins with
    /// it.
    #[test]
    fn replayed_lines_are_counted_once() {
        let replay = "** replaying previous printk message **";
        let line = "[    2.000000] nvidia-peermem: told nobody";
        for cut in [&line[..30], line] {
            let log = format!("[    1.000000] x\n{cut}\n{replay}\n{line}\n");
            assert_eq!(once(&log), format!("[    1.000000] x\n\n\n{line}\n"));
        }
        let log = format!("[    1.000000] x\n{replay}\n{line}\n");
        assert_eq!(once(&log), format!("[    1.000000] x\n\n{line}\n"));
        assert_eq!(once(&format!("{line}\n{replay}")), format!("{line}\n\n"));
        // A line that occurs twice in a row without a replay message counts twice.
        let log = format!("{line}\n{line}\n");
        assert_eq!(once(&log), log);
    }

    #[test]
    fn an_ordinary_log_is_clean() {
        assert!(reports(BOOT).is_empty());
        assert!(judge(BOOT, &[]).is_clean());
        assert!(judge("", &[]).is_clean());
    }

    #[test]
    fn each_kind_is_one_report() {
        for (text, start, lines) in [
            (WARN, 1, 9),
            (OOPS, 1, 8),
            (ARM64_OOPS, 1, 9),
            (LOCKDEP, 2, 5),
        ] {
            let found = reports(text);
            assert_eq!(found.len(), 1, "{text}");
            assert_eq!(
                (found[0].line, found[0].lines.len()),
                (start, lines),
                "{text}"
            );
        }
        assert_eq!(reports(DMAR).len(), 2);
        let all = [BOOT, WARN, OOPS, LOCKDEP, DMAR, WARN].concat();
        assert_eq!(reports(&all).len(), 6);
    }

    #[test]
    fn single_lines_that_are_reports() {
        for line in [
            "[    9.0] Kernel panic - not syncing: Fatal exception",
            "[    9.0] BUG: sleeping function called from invalid context at mm/slab.h:1",
            "[    9.0] BUG: scheduling while atomic: gdr/1/0x2",
            "[    9.0] BUG: KASAN: slab-use-after-free in peer_get+0x1/0x2",
            "[    9.0] BUG kmalloc-64 (Tainted: G  O): Redzone overwritten",
            "[    9.0] UBSAN: array-index-out-of-bounds in x.c:1:2",
            "[    9.0] INFO: task rmmod:12 blocked for more than 120 seconds.",
            "[    9.0] rcu: INFO: rcu_preempt self-detected stall on CPU",
            "[    9.0] watchdog: BUG: soft lockup - CPU#0 stuck for 22s!",
            "[    9.0] Internal error: synchronous external abort: 0000000096000010 [#1]  SMP",
            "[    9.0] SError Interrupt on CPU1, code 0x00000000bf000000 -- SError",
            "[    9.0] Oops: general protection fault, probably for non-canonical address: 0000 [#1]",
            "[    9.0] unregister_netdevice: waiting for eth0 to become free. Usage count = 2",
            "[    9.0] kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)",
            "[    9.0] rust_kernel: panicked at src/persistent.rs:1:2:",
            "[    9.0] WARNING: suspicious RCU usage",
            "[    9.0] DMA-API: nvidia 0000:00:04.0: device driver frees DMA memory with different size",
            "[    9.0] nvidia_peermem: unknown parameter 'nonsense' ignored",
            "[    9.0] runner: teardown: pins_live is 1, not 0",
            "** 17 printk messages dropped **",
        ] {
            assert_eq!(reports(line).len(), 1, "{line}");
        }
    }

    #[test]
    fn declared_reports_pass_and_others_do_not() {
        let log = [BOOT, WARN, BOOT, WARN].concat();
        assert!(judge(&log, &expect("refcount_t: underflow=2")).is_clean());
        let verdict = judge(&log, &expect("refcount_t: underflow=1"));
        assert!(verdict.undeclared.is_empty());
        assert_eq!(verdict.miscounted.len(), 1);
        let verdict = judge(&log, &expect("general protection=0"));
        assert_eq!(verdict.undeclared.len(), 2);
        let verdict = judge(BOOT, &expect("BUG: KASAN=1"));
        assert_eq!(verdict.miscounted.len(), 1);
    }

    #[test]
    fn a_test_case_declares_in_the_log() {
        let declaration = "[    1.900000] gdr: provokes refcount_t: underflow=1\n";
        let log = [declaration, WARN, BOOT, declaration, WARN].concat();
        assert!(judge(&log, &[]).is_clean());
        assert_eq!(judge(declaration, &[]).miscounted.len(), 1);
        let verdict = judge(&[declaration, WARN, WARN].concat(), &[]);
        assert_eq!(verdict.miscounted.len(), 1);
    }

    #[test]
    fn a_declared_report_hides_no_other() {
        let log = [WARN, OOPS].concat();
        let verdict = judge(&log, &expect("refcount_t=1"));
        assert_eq!(verdict.undeclared.len(), 1);
        assert!(verdict.undeclared[0].lines[0].contains("NULL pointer"));
        // If a report has no end, the next report must still be found.
        let cut = WARN.lines().take(4).collect::<Vec<_>>().join("\n");
        let log = format!("{cut}\n{OOPS}");
        assert_eq!(reports(&log).len(), 2);
    }

    #[test]
    fn lost_lines_fail_and_hide_no_later_report() {
        let log = [BOOT, "** 1 printk messages dropped **\n", WARN, BOOT].concat();
        assert_eq!(reports(&log).len(), 2);
        let verdict = judge(&log, &expect("refcount_t=1"));
        assert_eq!(verdict.undeclared.len(), 1);
        assert!(verdict.undeclared[0].is_loss());
        // The lost lines are inside another report.
        let (head, tail) = WARN.split_at(WARN.find("[    2.000000] Call").unwrap());
        let log = [head, "** 9 printk messages dropped **\n", tail].concat();
        let verdict = judge(&log, &expect("refcount_t=1"));
        assert_eq!(verdict.undeclared.len(), 1);
        assert!(verdict.undeclared[0].is_loss());
    }

    #[test]
    fn ordinary_messages_can_be_declared_too() {
        assert!(judge(BOOT, &expect("taints kernel=1")).is_clean());
        assert!(!judge(BOOT, &expect("taints kernel=2")).is_clean());
        for (range, is_clean) in [("0-1", true), ("1-2", true), ("2-3", false), ("0-0", false)] {
            let verdict = judge(BOOT, &expect(&format!("taints kernel={range}")));
            assert_eq!(verdict.is_clean(), is_clean, "{range}: {verdict:?}");
        }
    }

    #[test]
    fn expectations_are_read() {
        let parsed: Expectation = "a=b=3".parse().unwrap();
        assert_eq!(
            (parsed.pattern.as_str(), parsed.min, parsed.max),
            ("a=b", 3, 3)
        );
        let parsed: Expectation = "a=0-1".parse().unwrap();
        assert_eq!((parsed.min, parsed.max), (0, 1));
        assert!("a=1-".parse::<Expectation>().is_err());
        assert!("a=2-1".parse::<Expectation>().is_err());
        assert!("nothing".parse::<Expectation>().is_err());
        assert!("a=x".parse::<Expectation>().is_err());
        assert!("(=1".parse::<Expectation>().is_err());
    }
}
