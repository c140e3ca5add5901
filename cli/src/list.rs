// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl list`: who holds which GPU memory registered, and through which RDMA device.

use std::collections::BTreeSet;

use anyhow::anyhow;
use anyhow::bail;
use serde::Serialize;

use crate::args;
use crate::debugfs::Module;
use crate::finding::Status;
use crate::host::Host;
use crate::living;
use crate::living::Gpu;
use crate::living::Holder;
use crate::living::Living;
use crate::living::Roll;
use crate::living::Share;
use crate::living::Stranded;
use crate::machine::pci::Address;
use crate::machine::Class;
use crate::machine::Machine;
use crate::process::State;
use crate::render;
use crate::render::counted;
use crate::render::known;
use crate::render::Paint;
use crate::render::Table;
use crate::report::Out;
use crate::watch;

const SCHEMA: &str = "peermemctl.list";
const VERSION: u32 = 1;

/// The body of the JSON.
#[derive(Serialize)]
struct Body<'a> {
    module: &'a Module,
    now_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    registrations: Option<&'a [Living]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<Vec<Holder>>,
    gpus: Vec<Share>,
    unreadable: u64,
    notes: Vec<String>,
}

/// Shows the registrations that are alive. An error: they cannot be seen.
pub(crate) fn run(host: &dyn Host, args: &args::List, out: &mut Out) -> anyhow::Result<Status> {
    let interval = watch::interval(args.watch)?;
    watch::looks(interval, out, |out| {
        let mut roll = Roll::look(host)?;
        if let Some(pid) = args.pid {
            roll.living.retain(|one| one.pid == Some(pid));
        }
        if let Some(gpu) = &args.gpu {
            let address = address_of(gpu, &roll)?;
            let is_it = |one: &Gpu| one.address.parse() == Ok(address);
            roll.living.retain(|one| one.gpus.iter().any(is_it));
        }
        if out.is_json() {
            let body = Body {
                module: &roll.module,
                now_seconds: roll.now.map(|now| now.seconds()),
                registrations: (!args.by_process).then_some(&roll.living[..]),
                processes: args.by_process.then(|| roll.holders()),
                gpus: roll.shares(),
                unreadable: roll.unreadable,
                notes: notes(&roll),
            };
            out.json(SCHEMA, VERSION, &body)?;
            return Ok(Status::Well);
        }
        watch::heading(roll.now, out);
        if args.by_process {
            show_holders(&roll, out);
        } else {
            show_each(&roll, out);
        }
        Ok(Status::Well)
    })
}

/// The PCI address of a GPU that somebody named by its index or address.
fn address_of(gpu: &str, roll: &Roll) -> anyhow::Result<Address> {
    if let Ok(address) = gpu.parse::<Address>() {
        return Ok(address);
    }
    let index: usize = gpu
        .parse()
        .map_err(|_| anyhow!("{gpu:?} is neither the index of a GPU nor a PCI address"))?;
    let machine: &Machine = match &roll.machine {
        Ok(machine) => machine,
        Err(why) => {
            bail!("GPUs cannot be told by their index, for PCI devices cannot be seen: {why}")
        }
    };
    match machine.gpus.iter().find(|gpu| gpu.index == index) {
        Some(gpu) => Ok(gpu.at),
        None => bail!(
            "there is no GPU {index}: {} seen, from 0",
            machine.gpus.len()
        ),
    }
}

/// A table that is as wide as it must be: a line is a registration, or a process, for grep and awk.
fn show(table: &Table, out: &mut Out) {
    for line in table.lines(usize::from(u16::MAX)) {
        out.line(line);
    }
}

fn show_each(roll: &Roll, out: &mut Out) {
    let mut table = Table::new(&[
        "ID", "PID", "COMMAND", "USER", "GPU", "HCA", "PATH", "ADDRESS", "SIZE", "PIECES",
        "ENTRIES", "FLAVOUR", "AGE", "STATE",
    ]);
    for one in &roll.living {
        table.row([
            one.id.to_string(),
            pid(one.pid, one.process),
            known(one.comm.as_deref()),
            user(one.user.as_deref(), one.uid),
            gpus(one.gpus.iter()),
            known(one.hca.as_ref().map(living::Hca::name)),
            known(one.class.map(Class::name)),
            known(one.addr.map(|addr| format!("{addr:#x}"))),
            known(one.len.map(render::bytes)),
            known(one.pieces),
            known(one.entries),
            known(one.flavour.as_deref()),
            known(one.age_seconds.map(render::seconds)),
            state(one.state.as_deref()),
        ]);
    }
    table.right(&[0, 8, 9, 10]);
    if !table.is_empty() {
        show(&table, out);
        out.gap();
    }
    show_sum(roll, out);
}

fn show_holders(roll: &Roll, out: &mut Out) {
    let mut table = Table::new(&[
        "PID",
        "USER",
        "REGISTRATIONS",
        "SIZE",
        "DISTINCT",
        "GPU",
        "STATE",
        "OLDEST",
        "COMMAND",
    ]);
    let holders = roll.holders();
    for holder in &holders {
        let on = holder.gpus.iter().filter_map(|share| share.gpu.as_ref());
        let states: Vec<String> = holder
            .states
            .iter()
            .map(|(name, count)| format!("{count} {}", state(Some(name))))
            .collect();
        let command = holder.command.as_deref().or(holder.comm.as_deref());
        table.row([
            pid(holder.pid, holder.process),
            user(holder.user.as_deref(), holder.uid),
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
        return show_sum(roll, out);
    }
    show(&table, out);
    out.gap();
    let mut table = Table::new(&[
        "GPU",
        "ADDRESS",
        "BAR1",
        "PID",
        "REGISTRATIONS",
        "SIZE",
        "DISTINCT",
    ]);
    for share in roll.shares() {
        let bar = share.gpu.as_ref().and_then(|gpu| bar1(gpu, roll));
        let mut row = |who: String, share: &Share| {
            table.row([
                known(share.gpu.as_ref().map(Gpu::name)),
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
                row(pid(holder.pid, holder.process), its);
            }
        }
    }
    table.right(&[2, 4, 5, 6]);
    show(&table, out);
    out.gap();
    show_sum(roll, out);
}

/// The size of a GPU's BAR1, in bytes.
fn bar1(gpu: &Gpu, roll: &Roll) -> Option<u64> {
    let machine = roll.machine.as_ref().ok()?;
    let at: Address = gpu.address.parse().ok()?;
    machine.gpu(at)?.bar1.map(|bar| bar.size)
}

fn show_sum(roll: &Roll, out: &mut Out) {
    if roll.living.is_empty() {
        out.line("no registration of GPU memory is alive");
    } else {
        let processes: BTreeSet<_> = roll
            .living
            .iter()
            .map(|one| (one.pid, one.process == State::Reused))
            .collect();
        let bytes = roll
            .living
            .iter()
            .filter_map(|one| one.len)
            .fold(0, u64::saturating_add);
        out.line(format!(
            "{} of {}: {}",
            counted(roll.living.len(), "registration"),
            counted(processes.len(), "process"),
            render::bytes(bytes),
        ));
    }
    for note in notes(roll) {
        out.paragraph("note: ", &note);
    }
}

/// What a reader of the table should know.
fn notes(roll: &Roll) -> Vec<String> {
    let mut notes = Vec::new();
    let of = |state: State| -> BTreeSet<u32> {
        roll.living
            .iter()
            .filter(|one| one.process == state)
            .filter_map(|one| one.pid)
            .collect()
    };
    let name = |numbers: &BTreeSet<u32>| {
        let mut names: Vec<String> = numbers.iter().take(8).map(u32::to_string).collect();
        let more = numbers.len().saturating_sub(8);
        if more > 0 {
            names.push(format!("{more} more"));
        }
        names.join(", ")
    };
    let kept = roll
        .living
        .iter()
        .filter(|one| one.state.as_deref() == Some("kept"))
        .count();
    if kept > 0 {
        notes.push(format!(
            "{} deregistered and stays pinned until its memory is freed (state kept): another process deregistered \
             it, or nvidia.ko did not take it back",
            match kept {
                1 => "one registration is".to_owned(),
                _ => format!("{kept} registrations are"),
            }
        ));
    }
    for stranded in &roll.stranded {
        notes.push(format!("{}; {}", stranded.found(), Stranded::WHY));
    }
    let gone = of(State::Gone);
    if !gone.is_empty() {
        notes.push(format!(
            "/proc has no process {}: gone (what it registered is then held by a child that inherited it, or kept), or \
             this /proc is not of the first PID namespace, by which the module numbers processes",
            name(&gone)
        ));
    }
    let reused = of(State::Reused);
    if !reused.is_empty() {
        notes.push(format!(
            "process {} began after the registration: the process that registered is gone, and its number is \
             another's now",
            name(&reused)
        ));
    }
    if !of(State::Elsewhere).is_empty() {
        notes.push(
            "this program runs in a PID namespace of its own, and the module numbers processes as the first one does: \
             commands and users are not shown"
                .to_owned(),
        );
    }
    if let Err(why) = &roll.machine {
        notes.push(format!(
            "PCI devices cannot be seen ({why}): GPUs and RDMA devices are shown by address"
        ));
    }
    if roll.unreadable > 0 {
        notes.push(format!(
            "{} of the module's file could not be read and left out",
            counted(roll.unreadable, "line")
        ));
    }
    notes
}

/// A process's number, and what has become of it.
fn pid(pid: Option<u32>, state: State) -> String {
    known(pid.map(|pid| match state {
        State::Gone => format!("{pid} (gone)"),
        State::Reused => format!("{pid} (reused)"),
        State::Alive | State::Elsewhere | State::NotVisible => pid.to_string(),
    }))
}

fn user(name: Option<&str>, uid: Option<u32>) -> String {
    known(name.map(str::to_owned).or(uid.map(|uid| uid.to_string())))
}

fn gpus<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> String {
    let names: Vec<String> = gpus.map(Gpu::name).collect();
    known((!names.is_empty()).then(|| names.join(",")))
}

fn state(name: Option<&str>) -> String {
    match name {
        Some("revoked" | "kept") => Paint::Warning.on(known(name)),
        _ => known(name),
    }
}
