// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The stress run: many processes register, transfer, compare, deregister, free, fork, pass
//! descriptors, exit and are killed. Meanwhile the network, the RDMA devices, the GPUs and the
//! module are removed and restored.
//!
//! The run has epochs. The seed and the number of an epoch determine the actions of the epoch. An
//! epoch ends with everything at rest: nvidia.ko holds nothing, there is no region and no reference
//! to the module, and the module is unloaded. Later epochs therefore do not depend on earlier
//! epochs, and an epoch can be repeated by its number. The machine determines how the processes of
//! an epoch interleave.

mod board;
mod bystanders;
mod chaos;
mod plan;
mod session;

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};
use std::{fs, panic};

use anyhow::{bail, ensure, Context as _, Result};

use crate::counters::Counters;
use crate::gpu::Gpu;
use crate::ktap;
use crate::ktap::note;
use crate::lab::{PinMode, Setup};
use crate::pattern::Choice;
use crate::sys::{Ended, Pid, Reaped};
use crate::{counters, module, rdma, sys};
use board::{Board, Figure, Glance, Operation, SLOTS};
use plan::Plan;
use session::World;

/// Time without any progress after which the run counts as hung.
const STALL: Duration = Duration::from_secs(150);

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of the first epoch
    #[arg(long, default_value_t = 0)]
    epoch: u64,
    /// Number of epochs
    #[arg(long, default_value_t = 1)]
    epochs: u64,
    /// Number of operations in an epoch
    #[arg(long, default_value_t = 2000)]
    operations: u64,
    /// Time after which no epoch begins, in seconds
    #[arg(long)]
    seconds: Option<u64>,
}

/// Descriptions of the faults that processes found, in a file that all processes share.
#[derive(Debug)]
struct Faults(File);

impl Faults {
    fn new() -> Result<Self> {
        Ok(Self(sys::unnamed_file()?))
    }

    fn add(&self, board: &Board, who: &str, what: &str) {
        // Makes one write, at the file position that all processes share.
        let text = format!("{who}: {}\n", what.replace('\n', "; "));
        if (&self.0).write_all(text.as_bytes()).is_err() {
            eprint!("stress: {text}");
        }
        board.fail();
    }

    /// Runs the body of a process and returns its exit status.
    fn judged(&self, board: &Board, who: &str, body: impl FnOnce() -> Result<()>) -> i32 {
        match panic::catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(())) => 0,
            Ok(Err(error)) => {
                self.add(board, who, &format!("{error:#}"));
                1
            }
            Err(_) => {
                self.add(board, who, "panicked");
                1
            }
        }
    }
}

/// Runs the epochs. Returns `true` if all passed.
pub(crate) fn run(options: &Options, setup: &Setup) -> Result<bool> {
    let started = Instant::now();
    // Packets are lost in this run, including the last message of an endpoint that is gone. All
    // retries together take 15 s.
    rdma::wait_for_answers(19, 6);
    sys::adopt_orphans()?;
    let usual = module::parameters();
    println!("KTAP version 1");
    println!("# seed {}", setup.seed);
    let mut number = 0;
    let mut well = true;
    for epoch in options.epoch..options.epoch + options.epochs {
        let over = |limit| started.elapsed() >= Duration::from_secs(limit);
        if !well || number > 0 && options.seconds.is_some_and(over) {
            break;
        }
        number += 1;
        let plan = Plan::of(setup.seed, epoch);
        let begun = Instant::now();
        let result = run_epoch(options, setup, &plan);
        let seconds = begun.elapsed().as_secs_f64();
        note("seconds", format_args!("{seconds:.1}"));
        let peerdirect = if plan.peerdirect { "_peerdirect" } else { "" };
        let name = format!("stress.epoch_{epoch}_{}{peerdirect}", plan.mode);
        match result {
            Ok(()) => println!("ok {number} {name}"),
            Err(error) => {
                ktap::fail(&error);
                for line in sys::kernel_log_tail(8) {
                    println!("# kernel: {line}");
                }
                println!("not ok {number} {name}");
                well = false;
            }
        }
    }
    println!("1..{number}");
    if well && !module::is_loaded() {
        module::load(&usual)?;
    }
    Ok(well)
}

fn run_epoch(options: &Options, setup: &Setup, plan: &Plan) -> Result<()> {
    // Each process opens the GPUs itself, so no GPU stays open here.
    let gpus: Vec<String> = {
        let all = Gpu::all()?;
        if let Some(gpu) = all.first() {
            for (name, value) in plan.gpu_parameters(gpu.bar_len()) {
                let path = format!("/sys/module/nvidia/parameters/{name}");
                fs::write(&path, value).context(path)?;
            }
        }
        all.iter().map(|gpu| gpu.bdf().to_owned()).collect()
    };
    ensure!(!gpus.is_empty(), "no GPU");
    note("layout", plan.layout);
    note("tight", u8::from(plan.tight));
    note("kernel_thread_frees", u8::from(plan.kernel_thread_frees));
    if module::is_loaded() {
        module::unload()?;
    }
    module::load(&plan.module_parameters())?;
    let before = Counters::read()?;

    let (keeper, kept) = UnixDatagram::pair()?;
    let world = World {
        board: Board::new()?,
        devices: setup.devices.clone(),
        gpus,
        keeper,
    };
    let faults = Faults::new()?;
    let mut crew = Crew {
        world: &world,
        plan,
        faults: &faults,
        slots: (0..SLOTS).map(|_| None).collect(),
        others: Vec::new(),
        next: 0,
        killed: 0,
        shots: 0,
    };
    let result = crew
        .work(options, &kept)
        .and_then(|()| at_rest(&world, &before, plan));
    note("operations", world.board.total());
    for (name, count) in world.board.operations() {
        note(&format!("op.{name}"), count);
    }
    for (name, count) in world.board.figures() {
        note(name, count);
    }
    let found = sys::whole(&faults.0)?;
    if !found.is_empty() {
        return result
            .and_then(|()| bail!("something is wrong"))
            .context(found);
    }
    result
}

struct Session {
    pid: Pid,
    number: u64,
    /// Number of operations after which the session is killed.
    shot_at: Option<u64>,
    shot: bool,
    opened: Glance,
}

/// The processes of an epoch.
struct Crew<'a> {
    world: &'a World,
    plan: &'a Plan,
    faults: &'a Faults,
    slots: Vec<Option<Session>>,
    /// The keeper and the chaos process.
    others: Vec<(Pid, &'static str)>,
    /// Number of the next session, counted over all slots.
    next: u64,
    killed: u64,
    shots: u64,
}

impl Crew<'_> {
    fn work(&mut self, options: &Options, kept: &UnixDatagram) -> Result<()> {
        let (world, plan, faults) = (self.world, self.plan, self.faults);
        let board = &world.board;
        let pid =
            sys::fork(|| faults.judged(board, "keeper", || bystanders::keep(world, plan, kept)))?;
        self.others.push((pid, "keeper"));
        let operations = options.operations;
        let pid = sys::fork(|| {
            faults.judged(board, "chaos", || {
                chaos::run(world, plan, faults, operations)
            })
        })?;
        self.others.push((pid, "chaos"));
        let mut seen = 0;
        let mut patience = sys::patience(STALL);
        loop {
            if board.total() >= options.operations {
                board.stop();
            }
            self.start_sessions()?;
            self.shoot();
            let alone = self.reap()?;
            if board.is_stopped() {
                // A slow session may pass a descriptor after the keeper has ended, and a GPU that
                // is being unbound waits for pins through that descriptor.
                while let Some(descriptor) = sys::receive_descriptor(kept.as_fd())? {
                    drop(descriptor);
                    board.done(Operation::LastClose);
                }
                if alone {
                    break;
                }
            }
            // The end of a process is also progress.
            let progress = board.total() + self.next + self.killed;
            if progress != seen {
                (seen, patience) = (progress, sys::patience(STALL));
            } else if patience.is_over() {
                report_stall();
                self.kill_all();
                bail!("no operation for {STALL:?}; the stacks are in the kernel log");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        ensure!(!board.has_failed(), "a process has failed");
        let own = board.operations().nth(Operation::KillSelf as usize);
        ensure!(self.killed <= own.map_or(0, |(_, count)| count) + self.shots);
        Ok(())
    }

    fn start_sessions(&mut self) -> Result<()> {
        let (world, plan, faults) = (self.world, self.plan, self.faults);
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_some() || world.board.is_stopped() {
                continue;
            }
            let number = self.next;
            self.next += 1;
            world.board.begin_session(slot);
            let opened = world.board.glance();
            let pid = sys::fork(|| {
                faults.judged(
                    &world.board,
                    &format!("session {number} in slot {slot}"),
                    || session::run(world, plan, slot, number),
                )
            })?;
            let mut choice = Choice::new(plan.stream(2000 + slot as u64, number));
            let shot = choice.below(6) == 0;
            self.slots[slot] = Some(Session {
                pid,
                number,
                shot_at: shot.then(|| 1 + choice.below(60)),
                shot: false,
                opened,
            });
        }
        Ok(())
    }

    /// Kills each session that has done `shot_at` operations, in the middle of its next operation.
    fn shoot(&mut self) {
        for (slot, session) in self.slots.iter_mut().enumerate() {
            let Some(session) = session else { continue };
            let Some(at) = session.shot_at else { continue };
            if !session.shot && self.world.board.progress(slot) >= at {
                session.shot = true;
                self.shots += 1;
                sys::kill(session.pid);
            }
        }
    }

    /// Records which processes have ended. Returns `true` if none is left.
    fn reap(&mut self) -> Result<bool> {
        loop {
            let (pid, ended) = match sys::reap(None, false)? {
                Reaped::Nobody => return Ok(true),
                Reaped::NotYet => return Ok(false),
                Reaped::Child(pid, ended) => (pid, ended),
            };
            let slot = self
                .slots
                .iter()
                .position(|session| session.as_ref().is_some_and(|session| session.pid == pid));
            if let Some((slot, session)) =
                slot.and_then(|slot| Some((slot, self.slots[slot].take()?)))
            {
                self.world.board.end_read(slot);
                self.judge(&session, ended);
            } else if let Some(at) = self.others.iter().position(|(other, _)| *other == pid) {
                let (_, who) = self.others.remove(at);
                if ended != Ended::Exited(0) {
                    self.faults
                        .add(&self.world.board, who, &format!("{ended:?}"));
                }
            }
            // Any other process is the child of a session that has ended.
        }
    }

    fn judge(&mut self, session: &Session, ended: Ended) {
        let board = &self.world.board;
        match ended {
            Ended::Exited(0) => {}
            Ended::Killed(libc::SIGKILL) => {
                self.killed += 1;
                if session.shot {
                    board.done(Operation::Killed);
                }
            }
            // The session's GPU was unbound while the session read the GPU's memory.
            Ended::Killed(libc::SIGBUS) if board.gpu_gone_since(&session.opened) => {
                board.note(Figure::Bus, 1);
            }
            // [`Faults::judged`] has already recorded the fault of a session that exits with an
            // error.
            Ended::Exited(_) if board.has_failed() => {}
            _ => self.faults.add(
                board,
                &format!("session {}", session.number),
                &format!("{ended:?}"),
            ),
        }
    }

    fn kill_all(&mut self) {
        self.world.board.fail();
        for session in self.slots.iter().flatten() {
            sys::kill(session.pid);
        }
        for (pid, _) in &self.others {
            sys::kill(*pid);
        }
    }
}

/// Checks that everything of an epoch is gone, and unloads the module.
fn at_rest(world: &World, before: &Counters, plan: &Plan) -> Result<()> {
    ktap::settled(|| counters::all_left(before, 0, &world.devices))?;
    balance()?;
    module::unload()?;
    let now = Counters::read()?;
    let of_other = match plan.mode {
        PinMode::Persistent => "get_pages_ok",
        PinMode::Revocable => "get_pages_persistent_ok",
    };
    let others = now.since(before, of_other)?;
    ensure!(others == 0, "{others} pins of the other mode");
    let activity = now.activity(before)?;
    note("pins", activity.pins);
    note("unpins", activity.unpins);
    note("callbacks", activity.callbacks);
    ensure!(activity.pins == activity.unpins + activity.callbacks);
    ensure!(
        (activity.callbacks == 0) == (plan.mode == PinMode::Persistent),
        "{} callbacks in an epoch that is {}",
        activity.callbacks,
        plan.mode
    );
    Ok(())
}

/// Checks in ib_core's statistics that all regions are gone.
fn balance() -> Result<()> {
    let Ok(clients) = fs::read_dir("/sys/kernel/mm/memory_peers") else {
        return Ok(());
    };
    for client in clients {
        let path = client?.path();
        let read = |name: &str| sys::read_line(&path.join(name).to_string_lossy());
        let (came, gone) = (read("num_alloc_mrs")?, read("num_dealloc_mrs")?);
        ensure!(came == gone, "{}: {came}, {gone}", path.display());
    }
    Ok(())
}

/// Writes to the kernel log where each user process sleeps.
fn report_stall() {
    let Ok(mut log) = fs::OpenOptions::new().write(true).open("/dev/kmsg") else {
        return;
    };
    let mut tell = |about: &str, path: &str| {
        for line in fs::read_to_string(path).unwrap_or_default().lines() {
            let _ = writeln!(log, "stress: {about} {line}");
        }
    };
    tell(
        "registered:",
        "/sys/kernel/debug/nvidia_peermem/registrations",
    );
    for process in sys::names("/proc").unwrap_or_default() {
        for thread in sys::names(format!("/proc/{process}/task")).unwrap_or_default() {
            let folder = format!("/proc/{process}/task/{thread}");
            let maps = fs::read_to_string(format!("{folder}/maps"));
            // Skips kernel threads that wait for work.
            if maps.is_ok_and(|maps| !maps.is_empty()) || sys::state(&folder) == Some('D') {
                tell(&thread, &format!("{folder}/stat"));
                tell(&thread, &format!("{folder}/stack"));
            }
        }
    }
}
