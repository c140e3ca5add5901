// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Two processes besides the sessions of a stress run: the keeper of their descriptors, and the
//! prober of a GPU that is being unbound.

use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure, Result};

use super::board::{Figure, Glance, Operation};
use super::plan::Plan;
use super::session::{wrong, World, Wrong, COMPLETION};
use crate::gpu::Gpu;
use crate::lab::{PinMode, M2};
use crate::pattern::Choice;
use crate::rdma::Hca;
use crate::sys;
use crate::sys::Placement;

/// Receives descriptors, keeps some for a while, and closes them. If a close is the last one of its
/// file, this process releases everything that depends on the file.
pub(super) fn keep(world: &World, plan: &Plan, from: &UnixDatagram) -> Result<()> {
    const KEPT: usize = 6;
    let mut choice = Choice::new(plan.stream(1000, 0));
    let mut kept = Vec::new();
    loop {
        let ends = world.board.is_stopped();
        let taken = sys::receive_descriptor(from.as_fd())?;
        let idle = taken.is_none();
        kept.extend(taken);
        let uprooted = |now: Glance| world.board.disturbed_since(&now);
        let all = world.board.is_thin() || ends && idle || uprooted(world.board.glance());
        while !kept.is_empty() && (all || kept.len() > KEPT) {
            drop(kept.swap_remove(choice.below(kept.len() as u64) as usize));
            world.board.done(Operation::LastClose);
        }
        if ends && idle && kept.is_empty() {
            return Ok(());
        }
        if idle {
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

/// Returns `true` if `errno` is a correct refusal of memory of a GPU that is being unbound, after
/// `refusals` refusals. `EFAULT` means that the memory is gone. `EINVAL` means that the memory was
/// freed during the registration, which happens at most once, and only in revocable mode.
fn refuses_unbound(mode: PinMode, errno: i32, refusals: u64) -> bool {
    match errno {
        libc::EFAULT => true,
        libc::EINVAL => mode == PinMode::Revocable && refusals == 0,
        _ => false,
    }
}

/// Registers and deregisters memory of a GPU until a registration is refused, because the GPU is
/// being unbound. From then on, every registration must be refused.
pub(super) fn probe(
    world: &World,
    plan: &Plan,
    gpu: usize,
    ready: impl FnOnce(),
    over: impl Fn() -> bool,
) -> Result<()> {
    let hca = Hca::open(&world.devices[0])?;
    let opened = Arc::new(Gpu::open(gpu, world.gpus[gpu].clone())?);
    let memory = opened.allocate(M2, Placement::Any)?;
    let span = memory.span(0, M2)?;
    drop(hca.reg_mr(span)?);
    world.board.done(Operation::Register);
    world.board.done(Operation::Deregister);
    ready();
    let mut patience = sys::patience(COMPLETION);
    let mut refusals = 0;
    // Makes one more attempt after the unbind, because the memory must stay gone.
    let mut last = false;
    while !last {
        last = over();
        match hca.reg_mr(span) {
            Ok(_) if refusals > 0 => {
                wrong!("memory of a GPU that is being unbound was pinned after {refusals} refusals")
            }
            Ok(_) => {}
            Err(refused) if refuses_unbound(plan.mode, refused.errno(), refusals) => refusals += 1,
            Err(refused) => bail!("while a GPU was being unbound: {refused}"),
        }
        ensure!(!patience.is_over(), "the unbinding does not end");
    }
    if refusals == 0 {
        wrong!("memory of a GPU that was unbound can still be pinned");
    }
    world.board.note(Figure::ProbeRefusals, refusals);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unbind_frees_memory_during_at_most_one_registration() {
        assert!(refuses_unbound(PinMode::Revocable, libc::EINVAL, 0));
        assert!(!refuses_unbound(PinMode::Revocable, libc::EINVAL, 1));
        assert!(!refuses_unbound(PinMode::Persistent, libc::EINVAL, 0));
        assert!(refuses_unbound(PinMode::Persistent, libc::EFAULT, 1));
        assert!(!refuses_unbound(PinMode::Revocable, libc::ENOMEM, 0));
    }
}
