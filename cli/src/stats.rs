// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl stats`: the module's counters, its refusals with their reasons, and the used BAR1 of
//! each GPU.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::debugfs::{Counter, Module, Refusal, Time};
use crate::finding::Status;
use crate::host::nvml::Nvml;
use crate::host::Host;
use crate::machine::pci::Address;
use crate::registrations::{GpuId, Listing, Stranded};
use crate::render::{by_key, counted, known, unique, Paint, Table, NONE};
use crate::report::{object, Out};
use crate::{args, debugfs, registrations, render, shipped, watch};

const SCHEMA: &str = "peermemctl.stats";
const VERSION: u32 = 3;

/// Number of recent refusals in the text output.
const LAST: usize = 5;

/// A counter with its meaning, and its change since the last round.
#[derive(Debug, Serialize)]
pub(crate) struct Counted {
    #[serde(flatten)]
    pub(crate) counter: Counter,
    /// Change since the last round of `--watch`. Negative if the number of live registrations has
    /// decreased, or if the module was reloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) more: Option<i128>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) advice: Option<&'static str>,
}

/// A GPU and its pinned memory.
#[derive(Debug, Serialize)]
pub(crate) struct Held {
    /// The GPU, or `None` for registrations whose GPU the module does not know.
    pub(crate) gpu: Option<GpuId>,
    /// Number of registrations. The fields `registrations`, `bytes` and `distinct_bytes` are `None`
    /// if the module has no list of registrations.
    pub(crate) registrations: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) distinct_bytes: Option<u64>,
    /// Size of BAR1, from PCI or NVML.
    pub(crate) bar1_bytes: Option<u64>,
    /// Used size of BAR1 according to NVML. RDMA is not the only use of BAR1.
    pub(crate) bar1_used_bytes: Option<u64>,
    pub(crate) bar1_free_bytes: Option<u64>,
}

/// A refusal, and its age.
struct Refused {
    refusal: Refusal,
    age_seconds: Option<f64>,
}

impl Serialize for Refused {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let one = &self.refusal;
        let refused = object! {
            seq: one.seq,
            age_seconds: self.age_seconds,
            first_seconds: one.first.map(Time::seconds),
            last_seconds: one.last.map(Time::seconds),
            times: one.times,
            mode: &one.mode,
            step: &one.step,
            reason: &one.reason,
            code: one.code,
            addr: one.addr.map(|addr| format!("{addr:#x}")),
            len: one.len,
            pid: one.tgid,
            thread: one.pid,
            comm: &one.comm,
            text: &one.text,
            other: &one.other,
        };
        refused.serialize(serializer)
    }
}

/// Body of the JSON output.
#[derive(Serialize)]
struct Body {
    module: Module,
    now_seconds: Option<f64>,
    counters: Vec<Counted>,
    gpus: Vec<Held>,
    refusals: Option<Vec<Refused>>,
    non_gpu: Option<Vec<Refused>>,
    unreadable: u64,
    notes: Vec<String>,
}

/// Identity of a counter: event, mode, reason.
type Key = (String, Option<String>, Option<String>);

fn key(counter: &Counter) -> Key {
    (
        counter.event.clone(),
        counter.mode.clone(),
        counter.reason.clone(),
    )
}

/// Prints the module's counters. Returns an error if the counters cannot be read.
pub(crate) fn run(host: &dyn Host, args: &args::Stats, out: &mut Out) -> anyhow::Result<Status> {
    let interval = watch::interval(args.watch)?;
    let mut before: Option<BTreeMap<Key, u64>> = None;
    watch::repeat(interval, out, |out| {
        let (body, now) = scan(host, before.as_ref())?;
        let counts = body.counters.iter().map(|one| &one.counter);
        before = Some(counts.map(|one| (key(one), one.count)).collect());
        if out.is_json() {
            out.json(SCHEMA, VERSION, &body)?;
        } else {
            watch::heading(now, out);
            show(&body, out);
        }
        Ok(Status::Ok)
    })
}

fn scan(
    host: &dyn Host,
    before: Option<&BTreeMap<Key, u64>>,
) -> Result<(Body, Option<Time>), debugfs::Missing> {
    let module = Module::scan(host)?;
    let counters = module.counters(host)?;
    let mut notes = Vec::new();
    let mut unreadable = counters.unreadable;
    let mut refused = |file: Result<debugfs::Records<Refusal>, debugfs::Missing>| match file {
        Ok(read) => {
            unreadable = unreadable.saturating_add(read.unreadable);
            Some(read.records)
        }
        Err(why) => {
            notes.push(why.to_string());
            None
        }
    };
    let refusals = refused(module.refusals(host));
    let non_gpu = refused(module.non_gpu(host));
    let listing = match Listing::scan(host) {
        Ok(listing) => Some(listing),
        Err(why) => {
            notes.push(why.to_string());
            None
        }
    };
    let now = registrations::now(host);
    let gpus = held(host, listing.as_ref());
    if let Some(listing) = &listing {
        for stranded in &listing.stranded {
            notes.push(format!("{}; {}", stranded.found(), Stranded::WHY));
        }
        unreadable = unreadable.saturating_add(listing.unreadable);
    }
    if unreadable > 0 {
        notes.push(format!(
            "{} of the module's files could not be read and had to be left out",
            counted(unreadable, "line")
        ));
    }
    notes.dedup();
    let aged = |all: Option<Vec<Refusal>>| -> Option<Vec<Refused>> {
        let mut all = all?;
        // Refusals are sorted by the time of their last occurrence.
        all.sort_by_key(|one| one.last);
        let aged = all.into_iter().map(|refusal| Refused {
            age_seconds: refusal
                .last
                .zip(now)
                .map(|(last, now)| debugfs::seconds(last.until(now))),
            refusal,
        });
        Some(aged.collect())
    };
    let body = Body {
        module,
        now_seconds: now.map(Time::seconds),
        counters: counters
            .records
            .into_iter()
            .map(|counter| with_meaning(counter, before))
            .collect(),
        gpus,
        refusals: aged(refusals),
        non_gpu: aged(non_gpu),
        unreadable,
        notes,
    };
    Ok((body, now))
}

fn with_meaning(counter: Counter, before: Option<&BTreeMap<Key, u64>>) -> Counted {
    let name = counter.reason.as_deref().unwrap_or(&counter.event);
    let meaning = shipped::meaning(name);
    let more = before.map(|before| {
        let old = before.get(&key(&counter)).copied().unwrap_or(0);
        i128::from(counter.count).saturating_sub(i128::from(old))
    });
    Counted {
        more,
        message: meaning.map(|(message, _)| message),
        advice: meaning.and_then(|(_, advice)| advice),
        counter,
    }
}

/// Returns each visible GPU, and each GPU with registrations.
pub(crate) fn held(host: &dyn Host, listing: Option<&Listing>) -> Vec<Held> {
    let scanned;
    let machine = match listing {
        Some(listing) => listing.machine.as_ref(),
        None => {
            scanned = crate::machine::Machine::scan(host);
            scanned.as_ref()
        }
    };
    let nvml = Nvml::scan(host).ok();
    let mut shares: BTreeMap<Option<GpuId>, _> = BTreeMap::new();
    for share in listing.map(Listing::shares).unwrap_or_default() {
        shares.insert(share.gpu.clone(), share);
    }
    let mut all: BTreeSet<Option<GpuId>> = shares.keys().cloned().collect();
    for gpu in machine.map(|machine| &machine.gpus[..]).unwrap_or_default() {
        all.insert(Some(GpuId {
            index: Some(gpu.index),
            address: gpu.at.to_string(),
        }));
    }
    all.into_iter()
        .map(|gpu| {
            let at = gpu
                .as_ref()
                .and_then(|gpu| gpu.address.parse::<Address>().ok());
            let bar = at.and_then(|at| Some(machine.ok()?.gpu(at)?.bar1?.size));
            let used = at.and_then(|at| nvml.as_ref()?.gpu(at)?.bar1);
            let share = shares.get(&gpu);
            // If the list of registrations was read, a GPU without registrations has the value 0.
            let known = |number: Option<u64>| number.or(listing.map(|_| 0));
            Held {
                registrations: known(share.map(|share| share.registrations)),
                bytes: known(share.map(|share| share.bytes)),
                distinct_bytes: known(share.map(|share| share.distinct_bytes)),
                bar1_bytes: bar.or(used.map(|used| used.total_bytes)),
                bar1_used_bytes: used.map(|used| used.used_bytes),
                bar1_free_bytes: used.map(|used| used.free_bytes),
                gpu,
            }
        })
        .collect()
}

/// Returns `true` if an event counts bytes.
fn is_bytes(event: &str) -> bool {
    event.ends_with("_bytes")
}

fn figure(event: &str, count: u64, more: Option<i128>) -> String {
    let size = |number: u64| match is_bytes(event) {
        true => render::bytes(number),
        false => number.to_string(),
    };
    match more {
        None | Some(0) => size(count),
        Some(more) => {
            let sign = if more > 0 { '+' } else { '-' };
            let change = u64::try_from(more.unsigned_abs()).unwrap_or(u64::MAX);
            format!("{} ({sign}{})", size(count), size(change))
        }
    }
}

fn show(body: &Body, out: &mut Out) {
    out.line(format!("nvidia_peermem {}", body.module.version));
    show_lives(body, out);
    show_gpus(body, out);
    show_refused(body, out);
    show_events(body, out);
    show_last(body, out);
    if !body.notes.is_empty() {
        out.gap();
    }
    for note in &body.notes {
        out.paragraph("note: ", note);
    }
}

/// Returns the modes of the counters, in the module's order, and a row for each event or reason.
fn by_mode<'a>(
    counters: &[&'a Counted],
    name: fn(&'a Counted) -> &'a str,
) -> (Vec<&'a str>, Vec<(&'a str, Vec<&'a Counted>)>) {
    let modes = counters
        .iter()
        .filter_map(|one| one.counter.mode.as_deref());
    let rows = by_key(counters.iter().map(|one| (name(one), *one)));
    (unique(modes), rows)
}

fn cells(row: &[&Counted], modes: &[&str]) -> Vec<String> {
    modes
        .iter()
        .map(|mode| {
            let mut found = row.iter();
            let found = found.find(|one| one.counter.mode.as_deref() == Some(mode));
            known(found.map(|one| figure(&one.counter.event, one.counter.count, one.more)))
        })
        .collect()
}

fn headings(first: &str, modes: &[&str]) -> Vec<String> {
    std::iter::once(first.to_owned())
        .chain(modes.iter().map(|mode| mode.to_uppercase()))
        .collect()
}

fn table(headings: &[String]) -> Table {
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    Table::new(&headings)
}

fn show_lives(body: &Body, out: &mut Out) {
    let lives: Vec<&Counted> = body
        .counters
        .iter()
        .filter(|one| one.counter.reason.is_none() && one.counter.mode.is_some())
        .collect();
    if lives.is_empty() {
        return;
    }
    let (modes, rows) = by_mode(&lives, |one| &one.counter.event);
    let mut table = table(&headings("REGISTRATIONS", &modes));
    for (event, row) in rows {
        let mut line = vec![event.to_owned()];
        line.extend(cells(&row, &modes));
        table.row(line);
    }
    table.right(&(1..=modes.len()).collect::<Vec<_>>());
    out.gap();
    out.table(&table);
}

fn show_gpus(body: &Body, out: &mut Out) {
    let mut table = Table::of("GPU|ADDRESS|REGISTRATIONS|SIZE|DISTINCT|BAR1|USED|FREE");
    let size = |bytes: Option<u64>| known(bytes.map(render::bytes));
    for held in &body.gpus {
        table.row([
            known(held.gpu.as_ref().map(GpuId::name)),
            known(held.gpu.as_ref().map(|gpu| &gpu.address)),
            known(held.registrations),
            size(held.bytes),
            size(held.distinct_bytes),
            size(held.bar1_bytes),
            size(held.bar1_used_bytes),
            size(held.bar1_free_bytes),
        ]);
    }
    if table.is_empty() {
        return;
    }
    table.right(&[2, 3, 4, 5, 6, 7]);
    out.gap();
    out.table(&table);
}

fn show_refused(body: &Body, out: &mut Out) {
    let refused: Vec<&Counted> = body
        .counters
        .iter()
        .filter(|one| one.counter.reason.is_some())
        .collect();
    let (modes, rows) = by_mode(&refused, |one| {
        one.counter.reason.as_deref().unwrap_or(NONE)
    });
    let mut first = headings("REFUSED", &modes);
    first.push("MEANING".to_owned());
    let mut table = table(&first);
    for (name, row) in rows {
        if row.iter().all(|one| one.counter.count == 0) {
            continue;
        }
        let mut line = vec![name.to_owned()];
        line.extend(cells(&row, &modes));
        line.push(
            row.first()
                .map(|one| meaning(one.message, one.advice))
                .unwrap_or_default(),
        );
        table.row(line);
    }
    out.gap();
    if table.is_empty() {
        out.line("nothing was refused");
        return;
    }
    table.right(&(1..=modes.len()).collect::<Vec<_>>());
    out.table(&table);
}

fn meaning(message: Option<&str>, advice: Option<&str>) -> String {
    match (message, advice) {
        (Some(message), Some(advice)) => format!("{message}; {advice}"),
        (Some(message), None) => message.to_owned(),
        _ => NONE.to_owned(),
    }
}

fn show_events(body: &Body, out: &mut Out) {
    let mut table = Table::of("WENT WRONG|COUNT|MEANING");
    let mut none = Vec::new();
    for one in &body.counters {
        let Counter {
            event,
            count,
            mode: None,
            reason: None,
            ..
        } = &one.counter
        else {
            continue;
        };
        match count {
            0 => none.push(event.as_str()),
            _ => table.row([
                Paint::Warning.on(event),
                figure(event, *count, one.more),
                meaning(one.message, one.advice),
            ]),
        }
    }
    out.gap();
    if !table.is_empty() {
        table.right(&[1]);
        out.table(&table);
        out.gap();
    }
    if !none.is_empty() {
        out.paragraph("none of: ", &none.join(", "));
    }
}

fn show_last(body: &Body, out: &mut Out) {
    let Some(refusals) = &body.refusals else {
        return;
    };
    if refusals.is_empty() {
        return;
    }
    out.gap();
    out.line(Paint::Strong.on("LAST REFUSALS"));
    let from = refusals.len().saturating_sub(LAST);
    for Refused {
        refusal: one,
        age_seconds,
    } in refusals.iter().skip(from)
    {
        let age = match age_seconds {
            Some(age) => format!("{} ago", render::seconds(*age)),
            None => "at an unknown time".to_owned(),
        };
        let times = match one.times {
            None | Some(1) => String::new(),
            Some(times) => format!(", {times} times"),
        };
        out.paragraph(
            "- ",
            &format!(
                "{age}{times}, {} of process {} ({}), {} in {}: {}: {}",
                known(one.len.map(render::bytes)),
                known(one.tgid),
                known(one.comm.as_deref()),
                known(one.mode.as_deref()),
                known(one.step.as_deref()),
                known(one.reason.as_deref()),
                known(one.text.as_deref()),
            ),
        );
    }
    if from > 0 {
        out.line(format!("{from} more with --json"));
    }
}
