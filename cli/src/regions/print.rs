// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Text and JSON output of `peermemctl list --all`.

use anyhow::anyhow;

use super::holder::Part;
use super::usage::{Usage, User, Verdict};
use crate::debugfs::Time;
use crate::finding::Status;
use crate::host::{Host, Unseen};
use crate::process::State;
use crate::registrations::count;
use crate::render::{counted, known, Paint, Table};
use crate::report::{object, Out};
use crate::{args, list, render, watch};

const SCHEMA: &str = "peermemctl.list-all";
const VERSION: u32 = 1;

/// Prints the memory regions by process. Returns an error if the regions cannot be read.
pub(crate) fn run(host: &dyn Host, args: &args::List, out: &mut Out) -> anyhow::Result<Status> {
    let interval = watch::interval(args.watch)?;
    watch::repeat(interval, out, |out| {
        let mut usage = Usage::scan(host).map_err(why)?;
        let gpudirect = args.pid.map(|pid| usage.verdict(pid));
        if let Some(pid) = args.pid {
            usage.users.retain(|user| user.pid == Some(pid));
        }
        if out.is_json() {
            let body = object! {
                now_seconds: usage.now.map(Time::seconds),
                // Verdict on the process given by `--pid`.
                #[serde(flatten)]
                verdict: gpudirect.map(|verdict| object! { gpudirect: verdict }),
                processes: &usage.users,
                reasons: &usage.reasons,
                notes: notes(&usage),
            };
            out.json(SCHEMA, VERSION, &body)?;
            return Ok(Status::Ok);
        }
        watch::heading(usage.now, out);
        show(&usage, out);
        match args.pid.zip(gpudirect) {
            Some((pid, verdict)) => out.line(answer(pid, verdict, usage.users.first())),
            None => out.line(sum(&usage)),
        }
        let is_unknown = |user: &User| user.unknown.regions > 0;
        if gpudirect == Some(Verdict::Unknown)
            || usage.is_open
            || usage.users.iter().any(is_unknown)
        {
            for reason in &usage.reasons {
                out.paragraph("not told: ", reason);
            }
        }
        for note in notes(&usage) {
            out.paragraph("note: ", &note);
        }
        Ok(Status::Ok)
    })
}

fn why(why: Unseen) -> anyhow::Error {
    match why {
        Unseen::NotRecorded => {
            anyhow!("the recording has no memory regions: it is older than this program")
        }
        why => anyhow!("memory regions are not visible: {why}"),
    }
}

fn show(usage: &Usage, out: &mut Out) {
    let mut table =
        Table::of("PID|USER|HCA|REGIONS|SIZE|PEERMEM|DMA-BUF|OTHER|UNKNOWN|GPUDIRECT|COMMAND");
    for user in &usage.users {
        let command = match &user.kernel {
            Some(kernel) => Some(format!("[{kernel}]")),
            None => user.process.command.clone(),
        };
        table.row([
            list::pid(user.pid, user.process.state),
            list::user(user.process.user.as_deref(), user.process.uid),
            known((!user.devices.is_empty()).then(|| user.devices.join(","))),
            user.regions.to_string(),
            render::bytes(user.bytes),
            part(&user.peer_memory),
            part(&user.dma_buf),
            part(&user.other),
            part(&user.unknown),
            verdict(user.gpudirect),
            known(command),
        ]);
    }
    table.right(&[3, 4]);
    if !table.is_empty() {
        list::show(&table, out);
        out.gap();
    }
}

/// Formats the number and total size of regions.
fn part(part: &Part) -> String {
    match (part.regions, part.bytes) {
        (0, _) => render::NONE.to_owned(),
        (regions, Some(bytes)) => format!("{regions} ({})", render::bytes(bytes)),
        (regions, None) => regions.to_string(),
    }
}

fn verdict(verdict: Option<Verdict>) -> String {
    match verdict {
        Some(Verdict::Yes) => Paint::Good.on("yes"),
        Some(Verdict::No) => "no".to_owned(),
        Some(Verdict::Unknown) => Paint::Warning.on("unknown"),
        None => render::NONE.to_owned(),
    }
}

/// Returns the summary of all processes.
fn sum(usage: &Usage) -> String {
    let users = &usage.users;
    if users.is_empty() {
        return match usage.is_whole {
            true => "there is no memory region: nothing uses RDMA now",
            false => "no memory region is visible",
        }
        .to_owned();
    }
    let regions = users
        .iter()
        .fold(0, |sum: u64, user| sum.saturating_add(user.regions));
    let bytes = users
        .iter()
        .fold(0, |sum: u64, user| sum.saturating_add(user.bytes));
    let verdicts = [
        (Verdict::Yes, "is used by"),
        (Verdict::No, "is not used by"),
        (Verdict::Unknown, "may be used by"),
    ];
    let parts = verdicts.iter().filter_map(|(verdict, words)| {
        let those = users.iter().filter(|user| user.gpudirect == Some(*verdict));
        let number = those.count();
        (number > 0).then(|| format!("{words} {}", counted(number, "process")))
    });
    let parts: Vec<String> = parts.collect();
    let regions = counted(regions, "memory region");
    let bytes = render::bytes(bytes);
    match parts.is_empty() {
        true => format!("{regions}, {bytes}, all owned by the kernel"),
        false => format!("{regions}, {bytes}; GPUDirect RDMA {}", parts.join(", ")),
    }
}

/// Returns the summary of one process.
fn answer(pid: u32, verdict: Verdict, user: Option<&User>) -> String {
    let Some(user) = user else {
        return match verdict {
            Verdict::Unknown => format!("it is unknown whether process {pid} uses GPUDirect RDMA"),
            _ => format!(
                "process {pid} does not use GPUDirect RDMA now: it has no memory region; `peermemctl list --all` shows \
                 whether its children have any"
            ),
        };
    };
    let regions = counted(user.regions, "region");
    match verdict {
        Verdict::No => {
            format!("process {pid} does not use GPUDirect RDMA now: none of its {regions} is GPU memory")
        }
        Verdict::Unknown if user.unknown.regions == 0 => format!(
            "it is unknown whether process {pid} uses GPUDirect RDMA: none of its {regions} is GPU memory, and there \
             may be others"
        ),
        Verdict::Unknown => format!(
            "it is unknown whether process {pid} uses GPUDirect RDMA: {} of its {regions} may be GPU memory",
            user.unknown.regions
        ),
        Verdict::Yes => {
            let ways = [
                (&user.peer_memory, "by peer memory"),
                (&user.dma_buf, "by dma-buf"),
            ];
            let ways = ways.iter().filter(|(its, _)| its.regions > 0);
            let ways: Vec<String> = ways
                .map(|(its, way)| format!("{} {way}", part(its)))
                .collect();
            let found = match ways.is_empty() {
                true => format!("it has registered GPU memory besides its {regions}"),
                false => format!("GPU memory among its {regions}: {}", ways.join(", ")),
            };
            format!("process {pid} uses GPUDirect RDMA; {found}")
        }
    }
}

/// Returns the notes below the table.
fn notes(usage: &Usage) -> Vec<String> {
    let mut notes = usage.notes.clone();
    let without = usage.users.iter().filter(|user| user.without_region > 0);
    let names: Vec<String> = without
        .filter_map(|user| user.pid)
        .map(|pid| pid.to_string())
        .collect();
    if !names.is_empty() {
        notes.push(format!(
            "process {} has registered GPU memory that is in no memory region: by DEVX (as GPU-initiated communication \
             does), or during this scan",
            names.join(", ")
        ));
    }
    let gone = usage
        .users
        .iter()
        .filter(|user| user.process.state == State::Gone);
    let gone = count(gone.count());
    if gone > 0 {
        notes.push(format!(
            "/proc no longer has {} of this list, or does not show them",
            counted(gone, "process")
        ));
    }
    notes
}
