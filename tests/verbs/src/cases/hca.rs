// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Behaviour of an HCA's driver during a registration. The driver waits for its firmware, which may
//! fail. The driver may abort the registration with ib_core's lock held. The driver requests memory
//! that can be revoked, and memory that cannot. rxe imitates mlx5 (`rxe_peer.c` in
//! tests/kernel/overlay).

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::cases::stage::Stage;
use crate::counters::Counters;
use crate::hold::Hold;
use crate::knobs::Parameter;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::rdma::{full_access, Op, Part, Region, Status};
use crate::{counters, ktap, module, module_files, rdma};

/// Length of a transfer, in bytes.
const SOME: usize = 4096;

pub(super) const CASES: &[Case] = cases![
    "hca.waits_for_its_firmware" => |lab| with_each_unmapper(lab, firmware),
    "hca.fails_to_deregister" => fails_to_deregister,
    "hca.fails_to_revoke" => |lab| with_each_unmapper(lab, fails_to_revoke),
    "hca.gives_up_under_the_lock" => |lab| {
        lab.needs_module()?;
        if lab.setup.mode() == PinMode::Revocable {
            lab.needs_no_lockdep("a lock that is freed while it is held")?;
        }
        gives_up(lab, "peer_fail_setup")
    },
    "hca.gives_up_before_activation" => |lab| with_each_unmapper(lab, |lab| gives_up(lab, "peer_fail_create")),
    "hca.has_regions_of_both_clients" => both_clients,
];

/// Makes the next `count` revocations fail.
fn failing_revokes(count: usize) -> Result<Parameter> {
    Parameter::set("rdma_rxe", "peer_fail_revoke", &count.to_string())
}

/// Writes to the start of a region. Checks the status of the WRITE.
fn write_ends(lab: &Lab, to: Part, expected: Status) -> Result<()> {
    let local = Arena::on_host(lab, SOME, 1)?;
    let status = lab.status(Op::Write, local.part(0, SOME)?, to)?;
    note("write", format_args!("{status:?}"));
    ensure!(status == expected, "write: {status:?}");
    Ok(())
}

/// Runs `case` twice. After a revocation, the client unmaps in the first run, and ib_core unmaps in
/// the second run.
fn with_each_unmapper(lab: &Lab, case: fn(&Lab) -> Result<()>) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    case(lab)?;
    module::loaded_with_also("peerdirect_support=1", || case(lab)).context("where ib_core unmaps")
}

/// Makes the callback wait for the firmware. Meanwhile the list must show the region as revoked,
/// and the owner deregisters the region. The callback and the deregistration must end when the
/// firmware has answered.
fn firmware(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    let stage = Stage::open(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let region = stage.register(&memory)?;
    let (hold, free) = Hold::catch("rxe_peer/firmware", || stage.start_free(&memory))?;
    let mut release = stage.start_deregister(region)?;
    release.ended_or_in(&["rxe_dereg_mr"])?;
    let listed = module_files::lines("registrations")?;
    note("listed", format_args!("{listed:?}"));
    hold.finish(free)??;
    release.done()?;
    let states: Vec<_> = listed
        .iter()
        .map(|line| module_files::get(line, "state"))
        .collect();
    ensure!(matches!(states[..], [Ok("revoked")]), "listed: {states:?}");
    counters::pins_are(0)?;
    ktap::same("callbacks", stage.counted("callbacks")?, 1)
}

/// Makes `ibv_dereg_mr` fail. The region must keep its pin and work as before, and the next call
/// must succeed.
fn fails_to_deregister(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let memory = lab.allocate_gpu(M2)?;
    let region = lab.far.register(memory.span(0, M2)?, full_access())?;
    let failing = failing_revokes(1)?;
    let (region, error) = region
        .deregister()
        .err()
        .context("deregistered, though the HCA failed")?;
    drop(failing);
    note("error", &error);
    ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
    counters::pins_are(1)?;
    write_ends(lab, region.part(0, SOME as u64)?, Status::Success)?;
    region.deregister().map_err(|(_, error)| error)?;
    counters::pins_are(0)
}

/// Makes the HCA's revocation fail. The HCA continues to reach freed memory, and ib_core does not
/// learn of the failure. The module must behave as if the revocation had succeeded.
fn fails_to_revoke(lab: &Lab) -> Result<()> {
    let mut memory = lab.allocate_gpu(M2)?;
    let region = lab.far.reg_mr(memory.span(0, M2)?)?;
    let before = Counters::read()?;
    let failing = failing_revokes(1)?;
    memory.free()?;
    drop(failing);
    counters::callbacks_are(&before, 1)?;
    let states = counters::peer_regions(lab.far.name())?;
    note("regions", format_args!("{states:?}"));
    ensure!(states.iter().any(|region| region.state == "valid"));
    counters::pins_are(0).context("after the callback")?;
    drop(region);
    counters::pins_are(0)
}

/// Makes the HCA's driver fail after it has got its umem. The driver then releases the umem. In the
/// case of `peer_fail_setup`, the driver does not stop the notifier, and still holds the notifier's
/// lock. In the case of `peer_fail_create`, the driver first stops the notifier, which it has never
/// activated.
fn gives_up(lab: &Lab, failure: &str) -> Result<()> {
    lab.needs_module()?;
    let memory = lab.allocate_gpu(M2)?;
    let failing = Parameter::set("rdma_rxe", failure, "1")?;
    let refused = lab.far.reg_mr(memory.span(0, M2)?).err();
    drop(failing);
    let errno = refused
        .context("registered, though the HCA failed")?
        .errno();
    note("error", rdma::errno_name(errno));
    ensure!(errno == libc::EIO, "{}", rdma::errno_name(errno));
    counters::pins_are(0)?;
    let region = lab.far.reg_mr(memory.span(0, M2)?)?;
    write_ends(lab, region.part(0, SOME as u64)?, Status::Success)
}

/// Tests both clients with one HCA. mlx5 uses both clients: it can revoke its regions, but not its
/// queues. Each client registers one half of an allocation. When the allocation is freed, the
/// revocable client's region is revoked, and the persistent client's region still works.
fn both_clients(lab: &Lab) -> Result<()> {
    lab.needs_mode(PinMode::Revocable)?;
    lab.needs_both_clients()?;
    let mut memory = lab.allocate_gpu(2 * M2)?;
    let region = |offset| -> Result<Region> { Ok(lab.far.reg_mr(memory.span(offset, M2)?)?) };
    let lost = region(0)?;
    let kept = {
        let _cannot_lose = Parameter::set("rdma_rxe", "peer_inval", "N")?;
        region(M2)?
    };
    let counts = Counters::read()?;
    let pins = (
        counts.get("pins_live")?,
        counts.get("pins_persistent_live")?,
    );
    note("pins_revocable", pins.0);
    note("pins_persistent", pins.1);
    ensure!(pins == (1, 1), "revocable and persistent pins: {pins:?}");
    for region in [&lost, &kept] {
        write_ends(lab, region.part(0, SOME as u64)?, Status::Success)?;
    }
    memory.free()?;
    counters::callbacks_are(&counts, 1)?;
    write_ends(lab, lost.part(0, SOME as u64)?, Status::RemoteAccessError)?;
    write_ends(lab, kept.part(0, SOME as u64)?, Status::Success)?;
    drop(kept);
    drop(lost);
    counters::pins_are(0)
}
