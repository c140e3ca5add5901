// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Output of `doctor`'s findings: text, JSON, and a line for monitoring.

use serde::Serialize;

use super::scan::{Check, Scan};
use crate::finding::{Finding, Level, Plugin, Status, Subject};
use crate::render::{by_key, counted, unique, Paint, Table};
use crate::report::{object, Out};

pub(super) fn list(
    checks: impl Iterator<Item = &'static Check>,
    out: &mut Out,
) -> anyhow::Result<Status> {
    if out.is_json() {
        let checks = checks.map(|check| object! { check: check.name, about: check.about });
        let body = object! { checks: checks.collect::<Vec<_>>() };
        out.json("peermemctl.doctor-checks", 2, &body)?;
        return Ok(Status::Ok);
    }
    let mut table = Table::of("CHECK|LOOKS AT");
    for check in checks {
        table.row([check.name, check.about]);
    }
    out.table(&table);
    Ok(Status::Ok)
}

/// Number of findings of each level.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    fault: usize,
    warning: usize,
    pub(crate) note: usize,
    pub(crate) not_visible: usize,
    /// Number of values that only root can see.
    pub(crate) needs_root: usize,
}

impl Counts {
    pub(crate) fn of<'a>(findings: &(impl IntoIterator<Item = &'a Finding> + Clone)) -> Self {
        let count = |is: &dyn Fn(&Finding) -> bool| {
            let findings = findings.clone().into_iter();
            findings.filter(|finding| is(finding)).count()
        };
        let of = |level| count(&|finding| finding.level == level);
        Self {
            fault: of(Level::Fault),
            warning: of(Level::Warning),
            note: of(Level::Note),
            not_visible: of(Level::NotVisible),
            needs_root: count(&|finding| finding.needs_root),
        }
    }
}

/// Groups findings of one check that have the same level, reason and cost.
fn grouped(findings: &[Finding]) -> Vec<Vec<&Finding>> {
    let key = findings
        .iter()
        .map(|it| ((it.check, it.level, &it.why, &it.costs), it));
    let groups = by_key(key);
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Formats subjects as briefly as possible: a GPU by its index, and pairs as GPUs with their common
/// RDMA devices.
fn subject_names<'a>(scan: &Scan<'_>, subjects: impl Iterator<Item = &'a Subject>) -> String {
    let name_of = |at: &str| {
        let gpu = at.parse().ok().and_then(|at| scan.gpu(at));
        gpu.map_or(at.to_owned(), |gpu| format!("GPU {}", gpu.index))
    };
    let mut names: Vec<String> = Vec::new();
    // GPU and RDMA device of each pair.
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for subject in unique(subjects) {
        match subject {
            Subject::Machine => names.push("machine".to_owned()),
            Subject::Job => names.push("job".to_owned()),
            Subject::Gpu { gpu } => names.push(name_of(gpu)),
            Subject::Hca { hca } => names.push(hca.clone()),
            Subject::Pair { gpu, hca } => pairs.push((gpu, hca)),
        }
    }
    // Groups of GPUs that are paired with the same RDMA devices.
    let pairs = by_key(pairs);
    let shared = by_key(
        pairs
            .iter()
            .map(|(gpu, hcas)| (hcas.as_slice(), name_of(gpu))),
    );
    let mut all: Vec<String> = Vec::new();
    if !names.is_empty() {
        all.push(names.join(", "));
    }
    all.extend(
        shared
            .iter()
            .map(|(hcas, gpus)| format!("{} \u{2013} {}", gpus.join(", "), hcas.join(", "))),
    );
    all.join("; ")
}

/// Prints level and check of a finding.
pub(crate) fn heading(finding: &Finding, out: &mut Out) {
    let level = Paint::of_level(finding.level).on(finding.level.name().replace('_', " "));
    out.line(format!("{level} {}", Paint::Strong.on(finding.check)));
}

/// Prints a text of a finding after a label.
pub(crate) fn behind(word: &str, text: &str, out: &mut Out) {
    out.paragraph(&format!("  {word:<5}  "), text);
}

/// Prints reason and cost of a finding.
pub(crate) fn reasons(finding: &Finding, out: &mut Out) {
    for (word, text) in [("why", &finding.why), ("costs", &finding.costs)] {
        if let Some(text) = text {
            behind(word, text, out);
        }
    }
}

/// Prints a group of findings: each line once, with all its subjects.
fn group(scan: &Scan<'_>, group: &[&Finding], out: &mut Out) {
    let Some(first) = group.first() else {
        return;
    };
    heading(first, out);
    let founds = group.iter().map(|it| (it.found.as_str(), &it.subject));
    for (found, same) in by_key(founds) {
        let subjects = match first.subject {
            Subject::Machine => String::new(),
            _ => format!("{}: ", subject_names(scan, same.into_iter())),
        };
        out.paragraph("  ", &format!("{subjects}{found}"));
    }
    reasons(first, out);
    // Lines of the fix for single devices come first, then the lines that all devices share.
    let fixes: Vec<&str> = group.iter().filter_map(|it| it.fix.as_deref()).collect();
    let lines = fixes.iter().flat_map(|fix| unique(fix.lines()));
    let lines = by_key(lines.map(|line| (line, ())));
    let is_common = |times: &Vec<()>| times.len() == fixes.len();
    let own = lines.iter().filter(|(_, times)| !is_common(times));
    let common = lines.iter().filter(|(_, times)| is_common(times));
    let mut word = "fix";
    for (line, _) in own.chain(common) {
        behind(word, line, out);
        word = "";
    }
    out.gap();
}

/// Formats the numbers of faults and warnings: `1 fault, 2 warnings`. Returns `None` if nothing is
/// wrong.
fn summary(counts: Counts) -> Option<String> {
    let of = |count: usize, word| (count > 0).then(|| counted(count, word));
    let parts = [of(counts.fault, "fault"), of(counts.warning, "warning")];
    let text = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    Some(text).filter(|text| !text.is_empty())
}

/// Formats the numbers of faults, warnings and invisible values as the beginning of a sentence.
pub(crate) fn sentence(counts: Counts) -> String {
    let text = summary(counts).unwrap_or_else(|| "Nothing wrong was seen".to_owned());
    match counts.not_visible {
        0 => text,
        count => format!("{text}; {} not visible", counted(count, "thing")),
    }
}

/// Text after [`sentence`] if some findings are not shown.
pub(crate) const MORE: &str = "; --all shows what else there is to know";

/// Returns the exit status: [`Status::Findings`] if any finding has level `fail_on` or worse, or
/// else [`Status::Ok`].
pub(super) fn status(findings: &[Finding], fail_on: Level) -> Status {
    match findings.iter().any(|finding| finding.level >= fail_on) {
        true => Status::Findings,
        false => Status::Ok,
    }
}

/// Prints findings as text or as JSON.
pub(super) fn all(
    scan: &Scan<'_>,
    findings: &[Finding],
    with_ok: bool,
    out: &mut Out,
) -> anyhow::Result<()> {
    let counts = Counts::of(&findings);
    if out.is_json() {
        let shown = findings
            .iter()
            .filter(|finding| with_ok || finding.level != Level::Ok);
        let told = shown.map(|finding| {
            let commands = Some(finding.commands()).filter(|commands| !commands.is_empty());
            object! {
                #[serde(flatten)]
                finding: finding,
                #[serde(flatten)]
                commands: commands.map(|commands| object! { commands: commands }),
            }
        });
        let path = scan.only.map(|pair| super::hops::Path::of(scan, pair));
        let body = object! {
            counts: counts,
            findings: told.collect::<Vec<_>>(),
            #[serde(flatten)]
            path: path.map(|path| object! { path: path }),
        };
        out.json("peermemctl.doctor", 2, &body)?;
        return Ok(());
    }
    // If `--pair` selects a pair, all its findings are shown.
    let in_full = with_ok || scan.only.is_some();
    if let Some(pair) = scan.only {
        super::hops::tell(scan, pair, out);
    }
    for one in grouped(findings) {
        if in_full || one.iter().any(|finding| finding.level.is_finding()) {
            group(scan, &one, out);
        }
    }
    out.gap();
    let mut last = sentence(counts);
    match counts.needs_root {
        0 => {}
        all if all == counts.not_visible => last.push_str(" without root"),
        some => last.push_str(&format!(", {some} of them because they need root")),
    }
    if !in_full && counts.note + counts.not_visible > 0 {
        last.push_str(MORE);
    }
    last.push('.');
    out.paragraph("", &last);
    Ok(())
}

/// Prints one line and returns a state, as in the Monitoring Plugins Development Guidelines.
pub(super) fn nagios(findings: &[Finding], out: &mut Out) -> Status {
    let counts = Counts::of(&findings);
    let (word, state) = match counts {
        Counts { fault: 1.., .. } => ("CRITICAL", Plugin::Critical),
        Counts { warning: 1.., .. } => ("WARNING", Plugin::Warning),
        // A state that could not be read must not look healthy.
        Counts {
            needs_root: 1.., ..
        } => ("UNKNOWN", Plugin::Unknown),
        _ => ("OK", Plugin::Ok),
    };
    let bad = findings.iter().filter(|finding| finding.level.is_finding());
    let checks = unique(bad.map(|finding| finding.check));
    let mut text = match summary(counts) {
        None => "nothing wrong was seen".to_owned(),
        // The text contains no vertical bar, which would start the performance data.
        Some(some) => format!("{some}: {}", checks.join(", ")),
    };
    if counts.needs_root > 0 {
        let things = counted(counts.needs_root, "thing");
        text = format!("{text}; {things} not visible without root");
    }
    out.line(format!(
        "GPUDIRECT {word} - {text} | faults={} warnings={} notes={} not_visible={}",
        counts.fault, counts.warning, counts.note, counts.not_visible
    ));
    Status::Plugin(state)
}
