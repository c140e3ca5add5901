// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl list`: registered GPU memory, its owners, and the RDMA devices. [`regions`]
//! implements `--all`.

use std::collections::BTreeSet;

use anyhow::{anyhow, bail};

use crate::debugfs::Missing;
use crate::finding::Status;
use crate::host::Host;
use crate::machine::pci::Address;
use crate::machine::{Class, Machine};
use crate::process::State;
use crate::registrations::{Freed, GpuId, Listing, Registration, Share, Stranded};
use crate::render::{counted, known, Paint, Table};
use crate::report::{object, Out};
use crate::{args, regions, registrations, render, watch};

const SCHEMA: &str = "peermemctl.list";
const VERSION: u32 = 2;

/// Lists the registrations. Returns an error if the registrations cannot be read.
pub(crate) fn run(host: &dyn Host, args: &args::List, out: &mut Out) -> anyhow::Result<Status> {
    if args.all {
        return regions::run(host, args, out);
    }
    let interval = watch::interval(args.watch)?;
    watch::repeat(interval, out, |out| {
        let mut listing = Listing::scan(host).map_err(why)?;
        if let Some(pid) = args.pid {
            listing
                .registrations
                .retain(|one| one.line.tgid == Some(pid));
        }
        if let Some(gpu) = &args.gpu {
            let address = address_of(gpu, &listing)?;
            let is_it = |one: &GpuId| one.address.parse() == Ok(address);
            listing
                .registrations
                .retain(|one| one.gpus.iter().any(is_it));
        }
        if out.is_json() {
            let each = &listing.registrations;
            let body = object! {
                module: &listing.module,
                now_seconds: listing.now.map(|now| now.seconds()),
                #[serde(flatten)]
                each: (!args.by_process).then(|| object! { registrations: each }),
                #[serde(flatten)]
                all: args.by_process.then(|| object! { processes: listing.holders() }),
                gpus: listing.shares(),
                unreadable: listing.unreadable,
                notes: notes(&listing),
            };
            out.json(SCHEMA, VERSION, &body)?;
            return Ok(Status::Ok);
        }
        watch::heading(listing.now, out);
        if args.by_process {
            show_holders(&listing, out);
        } else {
            show_each(&listing, out);
        }
        Ok(Status::Ok)
    })
}

/// Returns the error if the list of registrations is unavailable. The text names another command,
/// if that command may help.
fn why(why: Missing) -> anyhow::Error {
    match why {
        Missing::NotLoaded | Missing::Other(_) => anyhow!(
            "{why}; peermemctl list --all shows all memory regions, whatever registered them"
        ),
        why => why.into(),
    }
}

/// Returns the PCI address of a GPU that the user named by index or address.
fn address_of(gpu: &str, listing: &Listing) -> anyhow::Result<Address> {
    if let Ok(address) = gpu.parse::<Address>() {
        return Ok(address);
    }
    let index: usize = gpu
        .parse()
        .map_err(|_| anyhow!("{gpu:?} is neither the index of a GPU nor a PCI address"))?;
    let machine: &Machine = match &listing.machine {
        Ok(machine) => machine,
        Err(why) => {
            bail!("GPUs cannot be found by their index, because PCI devices cannot be seen: {why}")
        }
    };
    match machine.gpus.iter().find(|gpu| gpu.index == index) {
        Some(gpu) => Ok(gpu.at),
        None => bail!(
            "there is no GPU {index}: {} GPUs are visible, numbered from 0",
            machine.gpus.len()
        ),
    }
}

/// Prints a table without a width limit, for grep and awk: one line per registration or process.
pub(crate) fn show(table: &Table, out: &mut Out) {
    for line in table.lines(usize::from(u16::MAX)) {
        out.line(line);
    }
}

fn show_each(listing: &Listing, out: &mut Out) {
    let mut table = Table::of(
        "ID|PID|COMMAND|USER|GPU|HCA|PATH|ADDRESS|SIZE|CHUNKS|ENTRIES|MODE|AGE|STATE|FREED",
    );
    for one in &listing.registrations {
        let line = &one.line;
        table.row([
            line.id.to_string(),
            pid(line.tgid, one.process.state),
            known(line.comm.as_deref()),
            user(one.process.user.as_deref(), one.process.uid),
            gpus(one.gpus.iter()),
            known(one.hca.as_ref().map(registrations::HcaId::name)),
            known(one.class.map(Class::name)),
            known(line.addr.map(|addr| format!("{addr:#x}"))),
            known(line.len.map(render::bytes)),
            known(line.chunks),
            known(line.entries),
            known(line.mode.as_deref()),
            known(one.age_seconds.map(render::seconds)),
            state(line.state.as_deref()),
            known(one.freed_bytes.map(render::bytes)),
        ]);
    }
    table.right(&[0, 8, 9, 10, 14]);
    if !table.is_empty() {
        show(&table, out);
        out.gap();
    }
    show_sum(listing, out);
}

fn show_holders(listing: &Listing, out: &mut Out) {
    let mut table = Table::of("PID|USER|REGISTRATIONS|SIZE|DISTINCT|GPU|STATE|OLDEST|COMMAND");
    let holders = listing.holders();
    for holder in &holders {
        let on = holder.gpus.iter().filter_map(|share| share.gpu.as_ref());
        let states: Vec<String> = holder
            .states
            .iter()
            .map(|(name, count)| format!("{count} {}", state(Some(name))))
            .collect();
        let process = &holder.process;
        let command = process.command.as_deref().or(holder.comm.as_deref());
        table.row([
            pid(holder.pid, process.state),
            user(process.user.as_deref(), process.uid),
            holder.registrations.to_string(),
            render::bytes(holder.bytes),
            render::bytes(holder.distinct_bytes),
            gpus(on),
            states.join(", "),
            known(holder.age_seconds.map(render::seconds)),
            known(command),
        ]);
    }
    table.right(&[2, 3, 4]);
    if table.is_empty() {
        return show_sum(listing, out);
    }
    show(&table, out);
    out.gap();
    let mut table = Table::of("GPU|ADDRESS|BAR1|PID|REGISTRATIONS|SIZE|DISTINCT");
    for share in listing.shares() {
        let bar = share.gpu.as_ref().and_then(|gpu| bar1(gpu, listing));
        let mut row = |who: String, share: &Share| {
            table.row([
                known(share.gpu.as_ref().map(GpuId::name)),
                known(share.gpu.as_ref().map(|gpu| &gpu.address)),
                known(bar.map(render::bytes)),
                who,
                share.registrations.to_string(),
                render::bytes(share.bytes),
                render::bytes(share.distinct_bytes),
            ]);
        };
        row("all".to_owned(), &share);
        for holder in &holders {
            let its = holder.gpus.iter().find(|its| its.gpu == share.gpu);
            if let Some(its) = its {
                row(pid(holder.pid, holder.process.state), its);
            }
        }
    }
    table.right(&[2, 4, 5, 6]);
    show(&table, out);
    out.gap();
    show_sum(listing, out);
}

/// Returns the size of a GPU's BAR1, in bytes.
fn bar1(gpu: &GpuId, listing: &Listing) -> Option<u64> {
    let machine = listing.machine.as_ref().ok()?;
    let at: Address = gpu.address.parse().ok()?;
    machine.gpu(at)?.bar1.map(|bar| bar.size)
}

fn show_sum(listing: &Listing, out: &mut Out) {
    if listing.registrations.is_empty() {
        out.line("no registration of GPU memory is active");
    } else {
        let all = || listing.registrations.iter();
        let processes: BTreeSet<_> = all().map(Registration::owner).collect();
        let bytes = all().filter_map(|one| one.line.len);
        let bytes = bytes.fold(0, u64::saturating_add);
        out.line(format!(
            "{} of {}: {}",
            counted(listing.registrations.len(), "registration"),
            counted(processes.len(), "process"),
            render::bytes(bytes),
        ));
    }
    for note in notes(listing) {
        out.paragraph("note: ", &note);
    }
}

/// Returns the notes below the table.
fn notes(listing: &Listing) -> Vec<String> {
    let mut notes = Vec::new();
    let of = |state: State| -> BTreeSet<u32> {
        listing
            .registrations
            .iter()
            .filter(|one| one.process.state == state)
            .filter_map(|one| one.line.tgid)
            .collect()
    };
    let name = |numbers: &BTreeSet<u32>| render::first(numbers.iter(), 8);
    let kept = listing
        .registrations
        .iter()
        .filter(|one| one.is_in("orphaned"))
        .count();
    if kept > 0 {
        notes.push(format!(
            "{} deregistered and stays pinned until its memory is freed (state orphaned): another process deregistered \
             it, or nvidia.ko did not take it back",
            match kept {
                1 => "one registration is".to_owned(),
                _ => format!("{kept} registrations are"),
            }
        ));
    }
    let freed = listing
        .registrations
        .iter()
        .filter_map(|one| one.freed_bytes);
    if let Some(found) = Freed::found(freed) {
        notes.push(format!("{found}: {}; {}", Freed::WHY, Freed::FIX));
    }
    for stranded in &listing.stranded {
        notes.push(format!("{}; {}", stranded.found(), Stranded::WHY));
    }
    let gone = of(State::Gone);
    if !gone.is_empty() {
        notes.push(format!(
            "/proc has no process {}: the process is gone (its registrations are then orphaned, or held by a child \
             that inherited them), or this /proc is not that of the first PID namespace, whose process IDs the \
             module uses",
            name(&gone)
        ));
    }
    let reused = of(State::Reused);
    if !reused.is_empty() {
        notes.push(format!(
            "process {} began after the registration: the process that registered is gone, and another process has \
             its number now",
            name(&reused)
        ));
    }
    if !of(State::Elsewhere).is_empty() {
        notes.push(
            "this program does not run in the first PID namespace, whose process IDs the module uses: commands and \
             users are not shown"
                .to_owned(),
        );
    }
    if let Err(why) = &listing.machine {
        notes.push(format!(
            "PCI devices cannot be seen ({why}): GPUs and RDMA devices are shown by address"
        ));
    }
    if listing.unreadable > 0 {
        notes.push(format!(
            "{} of the module's file could not be read and had to be left out",
            counted(listing.unreadable, "line")
        ));
    }
    notes
}

/// Formats a process ID, and the state of its process.
pub(crate) fn pid(pid: Option<u32>, state: State) -> String {
    known(pid.map(|pid| match state {
        State::Gone => format!("{pid} (gone)"),
        State::Reused => format!("{pid} (reused)"),
        State::Alive | State::Elsewhere | State::NotVisible => pid.to_string(),
    }))
}

pub(crate) fn user(name: Option<&str>, uid: Option<u32>) -> String {
    known(name.map(str::to_owned).or(uid.map(|uid| uid.to_string())))
}

fn gpus<'a>(gpus: impl Iterator<Item = &'a GpuId>) -> String {
    let names: Vec<String> = gpus.map(GpuId::name).collect();
    known((!names.is_empty()).then(|| names.join(",")))
}

fn state(name: Option<&str>) -> String {
    match name {
        Some("revoked" | "orphaned") => Paint::Warning.on(known(name)),
        _ => known(name),
    }
}
