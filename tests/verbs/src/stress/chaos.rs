// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Disturbances while the sessions of a stress run work: the network, the RDMA devices, the GPUs
//! and the module are removed and restored. One process makes one disturbance at a time. The seed
//! determines their order, and the count of operations determines when each disturbance begins.

use std::net::UdpSocket;
use std::time::Duration;

use anyhow::{bail, ensure, Context as _, Result};

use super::board::{Operation, Place};
use super::plan::Plan;
use super::session::World;
use super::{bystanders, Faults};
use crate::gpu::Gpu;
use crate::knobs::write_driver;
use crate::pattern::Choice;
use crate::rdma::Hca;
use crate::sys::{Ended, Reaped, SharedWords};
use crate::{module, sys};

/// Maximum number of attempts to unload the module.
const ATTEMPTS: u64 = 300;
/// Time limit of a system program, and of the return of a device.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
enum Action {
    Module,
    Unbind,
    Net,
    Link,
    Load,
}

const ACTIONS: [Action; 6] = [
    Action::Module,
    Action::Unbind,
    Action::Net,
    Action::Link,
    Action::Load,
    Action::Module,
];

/// Makes disturbances until the run stops. The interval is short enough that an epoch of
/// `operations` operations includes each action.
pub(super) fn run(world: &World, plan: &Plan, faults: &Faults, operations: u64) -> Result<()> {
    let mut choice = Choice::new(plan.stream(1001, 0));
    let step = (operations / (ACTIONS.len() as u64 + 1)).clamp(20, 800);
    let mut due = step;
    loop {
        let mut order = ACTIONS;
        for last in (1..order.len()).rev() {
            order.swap(last, choice.below(last as u64 + 1) as usize);
        }
        for action in order {
            while world.board.total() < due {
                if world.board.is_stopped() {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            due += step;
            match action {
                Action::Module => cycle_module(world, plan, &mut choice),
                Action::Unbind => rebind_gpu(world, plan, faults, &mut choice),
                Action::Net => net_down_up(world, &mut choice),
                Action::Link => cycle_link(world, &mut choice),
                Action::Load => load_net(world, &mut choice),
            }
            .with_context(|| format!("{action:?}"))?;
        }
    }
}

fn pause(choice: &mut Choice, most: u64) {
    std::thread::sleep(Duration::from_millis(choice.below(most)));
}

/// Unloads the module as soon as nobody uses it, and loads it again. While the module is used, it
/// must stay loaded.
fn cycle_module(world: &World, plan: &Plan, choice: &mut Choice) -> Result<()> {
    let board = &world.board;
    let mut busy = false;
    // In one of four attempts on average, the sessions keep their regions, so the module can stay
    // in use.
    let thin = choice.below(4) > 0;
    board.thin(thin);
    for _ in 0..if thin { ATTEMPTS } else { ATTEMPTS / 10 } {
        if board.is_stopped() {
            break;
        }
        board.disturb(Place::Module);
        let result = sys::unload_module(module::NAME);
        if result.is_ok() {
            pause(choice, 30);
            module::load(&plan.module_parameters())?;
            board.disturb(Place::Module);
            board.done(Operation::ModuleCycle);
            break;
        }
        board.disturb(Place::Module);
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Err((Some(libc::EAGAIN | libc::EBUSY), _)) => busy = true,
            Err((_, error)) => bail!("unloading: {error}"),
            Ok(()) => {}
        }
        std::thread::sleep(Duration::from_micros(500 + choice.below(4000)));
    }
    if busy {
        board.done(Operation::ModuleBusy);
    }
    board.thin(false);
    Ok(())
}

/// Unbinds and binds a GPU. The unbind frees memory, refuses new pins, waits for persistent pins,
/// and then returns.
fn rebind_gpu(world: &World, plan: &Plan, faults: &Faults, choice: &mut Choice) -> Result<()> {
    let board = &world.board;
    let gpu = choice.below(world.gpus.len() as u64) as usize;
    let bdf = &world.gpus[gpu];
    // No prober runs in an epoch with a small BAR1 ([`Plan::tight`]), because a full BAR1 also
    // causes refusals.
    let state = SharedWords::new(2)?;
    let (ready, over) = (&state.all()[0], &state.all()[1]);
    let set = |word: &std::sync::atomic::AtomicU64| {
        word.store(1, std::sync::atomic::Ordering::SeqCst);
    };
    let is_set =
        |word: &std::sync::atomic::AtomicU64| word.load(std::sync::atomic::Ordering::SeqCst) != 0;
    let mut prober = None;
    if !plan.tight {
        let pid = sys::fork(|| {
            faults.judged(board, "prober", || {
                bystanders::probe(world, plan, gpu, || set(ready), || is_set(over))
            })
        })?;
        prober = Some(pid);
        let mut patience = sys::patience(PATIENCE);
        while !is_set(ready) {
            if let Reaped::Child(_, ended) = sys::reap(Some(pid), false)? {
                bail!("the prober does not get ready: {ended:?}");
            }
            ensure!(!patience.is_over(), "the prober does not get ready");
            std::thread::sleep(Duration::from_millis(1));
        }
        pause(choice, 10);
    }
    board.disturb(Place::Gpu(gpu));
    write_driver("unbind", bdf)?;
    set(over);
    if let Some(pid) = prober {
        let ended = sys::reap(Some(pid), true)?;
        ensure!(ended == Reaped::Child(pid, Ended::Exited(0)), "{ended:?}");
    }
    pause(choice, 20);
    write_driver("bind", bdf)?;
    Gpu::open(gpu, bdf.clone()).context("after binding")?;
    board.disturb(Place::Gpu(gpu));
    board.done(Operation::Unbind);
    Ok(())
}

fn system(program: &str, arguments: &str) -> Result<()> {
    sys::succeed(program, arguments.split_whitespace()).map(drop)
}

/// Waits until a device can be opened and is active.
fn wait_for_device(name: &str) -> Result<()> {
    let mut last = None;
    let there = sys::wait_until(PATIENCE, || {
        let state = format!("/sys/class/infiniband/{name}/ports/1/state");
        let active = sys::read_line(&state).is_ok_and(|state| state.contains("ACTIVE"));
        match Hca::open(name) {
            Ok(_) => Ok(active),
            Err(error) => {
                last = Some(error);
                Ok(false)
            }
        }
    })?;
    ensure!(there, "{name} does not come back: {last:?}");
    Ok(())
}

/// Restores the network after a NIC was down. The test VM keeps its IP addresses, but loses its
/// routes and neighbour entries.
fn bring_up(nic: u64) -> Result<()> {
    let (here, there) = (nic + 1, 2 - nic);
    system("ip", &format!("link set eth{nic} up"))?;
    system(
        "ip",
        &format!(
            "neigh replace 10.77.0.{there} lladdr 52:54:00:77:00:0{there} dev eth{nic} nud permanent"
        ),
    )?;
    system(
        "ip",
        &format!("route replace 10.77.0.{there} dev eth{nic} src 10.77.0.{here} table 10{here}"),
    )
}

fn net_down_up(world: &World, choice: &mut Choice) -> Result<()> {
    let nic = choice.below(2);
    world.board.disturb(Place::Net);
    let quiet = sys::wait_until(2 * PATIENCE, || Ok(!world.board.has_reads()))?;
    ensure!(quiet, "a session's READ does not end");
    // A killed session's child may still have the queue pair. The sleep gives this child time to
    // end.
    std::thread::sleep(Duration::from_secs(1) * sys::slower());
    system("ip", &format!("link set eth{nic} down"))?;
    pause(choice, 300);
    bring_up(nic)?;
    wait_for_device(&world.devices[nic as usize])?;
    world.board.disturb(Place::Net);
    world.board.done(Operation::NetDown);
    Ok(())
}

/// Removes an RDMA device in use and adds it again. The kernel ends everything that depends on the
/// device, in the thread that removes the device.
fn cycle_link(world: &World, choice: &mut Choice) -> Result<()> {
    let nic = choice.below(2);
    let name = &world.devices[nic as usize];
    world.board.disturb(Place::Link);
    system("rdma", &format!("link delete {name}"))?;
    pause(choice, 30);
    system("rdma", &format!("link add {name} type rxe netdev eth{nic}"))?;
    wait_for_device(name)?;
    world.board.disturb(Place::Link);
    world.board.done(Operation::LinkCycle);
    Ok(())
}

/// Sends unrelated packets between the two NICs, in both directions.
fn load_net(world: &World, choice: &mut Choice) -> Result<()> {
    let data = [0u8; 4000];
    for nic in 0..2 {
        let (here, there) = (nic + 1, 2 - nic);
        let socket = UdpSocket::bind(format!("10.77.0.{here}:0"))?;
        for _ in 0..100 + choice.below(400) {
            // No program listens at this port, so an error is expected.
            let _ = socket.send_to(&data, format!("10.77.0.{there}:9"));
        }
    }
    world.board.done(Operation::NetLoad);
    Ok(())
}
