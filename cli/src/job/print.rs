// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Text output of `job`.

use super::nics::{Choice, Near};
use super::settings::{Effect, Judged};
use super::{Found, Job, Member};
use crate::doctor::print;
use crate::doctor::print::Counts;
use crate::finding::Level;
use crate::host::Seen;
use crate::machine::Class;
use crate::regions::Verdict;
use crate::registrations::GpuId;
use crate::render::{counted, known, Paint, Table};
use crate::report::Out;
use crate::{list, render};

/// Note on the origin of the variables.
pub(super) const FIRST_ENVIRONMENT: &str =
    "Variables are those that the process started with (/proc/PID/environ). Later changes by the program, for example \
     through Python's os.environ, are not visible.";

/// Maximum number of processes without GPUs and RDMA that the text output names.
const MOST_OTHERS: usize = 8;

/// Prints a job.
pub(super) fn job(job: &Job, with_all: bool, out: &mut Out) {
    for member in &job.processes {
        process(member, with_all, out);
        out.gap();
    }
    if let Some(value) = &job.suggested_nccl_ib_hca {
        out.line(format!("Nearest to the job's GPUs: NCCL_IB_HCA={value}"));
        out.gap();
    }
    for found in &job.findings {
        let level = found.finding.level;
        if with_all || level.is_finding() || level == Level::NotVisible {
            finding(found, out);
        }
    }
    others(job, with_all, out);
    for note in &job.notes {
        out.paragraph("note: ", note);
    }
    out.gap();
    out.line(summary(job, with_all));
}

fn process(member: &Member, with_all: bool, out: &mut Out) {
    let user = list::user(member.user.as_deref(), member.uid);
    let title = format!("Process {} of {user}", member.pid);
    let command = known(member.command.as_deref());
    out.paragraph("", &format!("{}: {command}", Paint::Strong.on(title)));
    out.paragraph("  GPUDirect RDMA  ", &registered(member));
    out.paragraph("  GPUs open       ", &seen(&member.gpus, GpuId::name));
    out.paragraph("  NICs open       ", &seen(&member.hcas, Clone::clone));
    if let Some(text) = &member.memory_lock {
        out.paragraph("  locked memory   ", text);
    }
    let preload = match (&member.libraries, member.mapped("peermem preload").next()) {
        (Err(why), _) => why.to_string(),
        (_, Some(library)) => library.path.clone(),
        (_, None) => "not mapped".to_owned(),
    };
    out.paragraph("  preload library ", &preload);
    if member.has_own_mounts == Some(true) {
        out.line("  files           its own mounts, as in a container: paths are as seen inside");
    }
    libraries(member, out);
    settings(member, with_all, out);
    nics(member, out);
}

/// Formats a list, or the reason why it is not visible.
fn seen<T>(list: &Seen<Vec<T>>, name: fn(&T) -> String) -> String {
    match list {
        Ok(list) if list.is_empty() => "none".to_owned(),
        Ok(list) => list.iter().map(name).collect::<Vec<_>>().join(", "),
        Err(why) => why.to_string(),
    }
}

fn registered(member: &Member) -> String {
    let it = &member.registered;
    let mut parts = Vec::new();
    if let (Some(count @ 1..), Some(bytes)) = (it.registrations, it.bytes) {
        let gpus = it.gpus.iter().filter_map(|share| share.gpu.as_ref());
        let gpus: Vec<String> = gpus.map(GpuId::name).collect();
        let on = if gpus.is_empty() {
            String::new()
        } else {
            format!(" of GPU {}", gpus.join(", "))
        };
        let bytes = render::bytes(bytes);
        parts.push(format!(
            "{}, {bytes}{on}, by peer memory",
            counted(count, "registration")
        ));
    }
    if let Some(count @ 1..) = it.dma_buf_regions {
        parts.push(format!("{} by dma-buf", counted(count, "region")));
    }
    if let Some(count @ 1..) = it.unknown_regions {
        parts.push(format!("{} may be GPU memory", counted(count, "region")));
    }
    let answer = match it.gpudirect {
        Some(Verdict::Yes) => Paint::Good.on("yes"),
        Some(Verdict::No) => "no GPU memory is registered now".to_owned(),
        _ => "not visible".to_owned(),
    };
    match parts.is_empty() {
        true => answer,
        false => format!("{answer}: {}", parts.join("; ")),
    }
}

fn libraries(member: &Member, out: &mut Out) {
    let Ok(libraries) = &member.libraries else {
        return;
    };
    let shown = libraries
        .iter()
        .filter(|library| library.name != "peermem preload");
    let mut table = Table::new(&["  LIBRARY", "VERSION", "FILE"]);
    for library in shown {
        let deleted = if library.is_deleted { " (deleted)" } else { "" };
        table.row([
            format!("  {}", library.name),
            known(library.version.as_deref()),
            format!("{}{deleted}", library.path),
        ]);
    }
    if !table.is_empty() {
        out.gap();
        list::show(&table, out);
    }
}

fn effect(effect: Effect) -> String {
    match effect {
        Effect::Forbids => Paint::Warning.on("forbids"),
        Effect::Limits => "limits".to_owned(),
        Effect::Forces => "forces".to_owned(),
        Effect::Allows => "allows".to_owned(),
        Effect::Selects => "selects".to_owned(),
        Effect::NotJudged => "-".to_owned(),
    }
}

fn settings(member: &Member, with_all: bool, out: &mut Out) {
    let is_shown = |setting: &&Judged| with_all || setting.meaning.is_some();
    let mut table = Table::new(&["  SETTING", "EFFECT", "MEANING"]);
    for setting in member.settings.iter().filter(is_shown) {
        // The first environment is the usual origin, so the text does not mention it.
        let place = match setting.place.as_str() {
            "in the first environment" => String::new(),
            other => format!(" ({other})"),
        };
        table.row([
            format!("  {}={}{place}", setting.name, setting.value),
            effect(setting.effect),
            known(setting.meaning),
        ]);
    }
    if !table.is_empty() {
        out.gap();
        out.table(&table);
    }
}

fn nics(member: &Member, out: &mut Out) {
    if !member.near.is_empty() {
        out.gap();
        let mut table = Table::new(&["  GPU", "NEAREST NICS", "NICS OF NCCL"]);
        for near in &member.near {
            let Near {
                nearest, chosen, ..
            } = near;
            table.row([
                format!("  {}", near.gpu),
                named(nearest, near.nearest_class),
                named(chosen, near.chosen_class),
            ]);
        }
        out.table(&table);
    }
    let is_set = |choice: &&Choice| choice.setting.is_some() && choice.library != "NCCL";
    for choice in member.nics.iter().filter(is_set) {
        let first = format!("  NICs of {}: ", choice.library);
        out.paragraph(
            &first,
            &known((!choice.devices.is_empty()).then(|| choice.devices.join(", "))),
        );
    }
}

fn named(hcas: &[String], class: Option<Class>) -> String {
    match (hcas.is_empty(), class) {
        (true, _) => "-".to_owned(),
        (false, Some(class)) => format!("{} {}", class.name(), hcas.join(", ")),
        (false, None) => hcas.join(", "),
    }
}

fn finding(found: &Found, out: &mut Out) {
    let it = &found.finding;
    print::heading(it, out);
    let pids: Vec<String> = found.pids.iter().map(u32::to_string).collect();
    let word = match pids.len() {
        1 => "process",
        _ => "processes",
    };
    out.paragraph("  ", &format!("{word} {}: {}", pids.join(", "), it.found));
    print::reasons(it, out);
    if let Some(fix) = &it.fix {
        print::behind("fix", fix, out);
    }
    out.gap();
}

/// Prints the processes that use neither GPUs nor RDMA, and the processes that ended.
fn others(job: &Job, with_all: bool, out: &mut Out) {
    let most = if with_all { usize::MAX } else { MOST_OTHERS };
    if !job.others.is_empty() {
        let named = job.others.iter().map(|other| {
            let command = other.command.as_deref().and_then(|it| it.split(' ').next());
            let command = command.map(|command| format!(" ({command})"));
            format!("{}{}", other.pid, command.unwrap_or_default())
        });
        let named = render::first(named, most);
        let count = counted(job.others.len(), "process");
        let text = format!("no such library, GPU or RDMA device: {named}");
        out.paragraph(&format!("{count} with "), &text);
    }
    if !job.ended.is_empty() {
        let ended: Vec<String> = job.ended.iter().map(u32::to_string).collect();
        out.paragraph("ended meanwhile: ", &ended.join(", "));
    }
}

fn summary(job: &Job, with_all: bool) -> String {
    let counts = Counts::of(&job.findings.iter().map(|found| &found.finding));
    let mut text = print::sentence(counts);
    if counts.not_visible > 0 && counts.needs_root == counts.not_visible {
        text.push_str(" without root");
    }
    if !with_all && counts.note > 0 {
        text.push_str(print::MORE);
    }
    format!("{text}.")
}
