// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The rules of the revocable mode. Each rule has a schedule that fails if the module breaks the
//! rule. The patches in `tests/mutants` make the module break the rules. The number in a case's
//! name is the rule's number.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{fs, io};

use anyhow::{bail, ensure, Context, Result};

use crate::cases::register::peer_region;
use crate::cases::stage::Stage;
use crate::child::Process;
use crate::counters::Counters;
use crate::gpu::{Allocation, Gpu, GRANULE};
use crate::hold::Hold;
use crate::knobs::{fail_next, Parameter};
use crate::ktap::{cases, expect, note, Case};
use crate::lab::{Lab, PinMode, M2};
use crate::module::Replaced;
use crate::sys::{Forked, Placement, Running, SharedWords};
use crate::{counters, ktap, module, module_files, sys};

const PATIENCE: Duration = Duration::from_secs(25);

pub(super) const CASES: &[Case] = cases![
    "rules.1.callback_before_get_returns" => callback_before_get_returns,
    "rules.3.unpin_beside_callback" => unpin_beside_callback,
    "rules.4.freed_before_get_pages" => freed_before_get_pages,
    "rules.4.stale_ticket" => stale_ticket,
    "rules.5.release_beside_invalidation" => release_beside_invalidation,
    "rules.7.revoked_is_not_put" => revoked_is_not_put,
    "rules.7.second_check" => second_check,
    "rules.7.put_rwsem_revocable" => |lab| put_rwsem(lab, PinMode::Revocable),
    "rules.7.put_rwsem_persistent" => |lab| put_rwsem(lab, PinMode::Persistent),
    "rules.8.cacheable" => |lab| served_by_the_other(lab, "table_flags", "1", None),
    "rules.8.outside_bar" => outside_bar,
    "rules.8.memory" => |lab| served_by_the_other(lab, "table_phys", "0x1000000", Some("not_in_bar")),
    "rules.8.struct_page" => struct_page,
    "rules.9.foreign_release" => foreign_release,
    "rules.9.module_stays" => module_stays,
    "rules.9.exit_unlisted" => exit_unlisted,
    "rules.9.exit_listed" => exit_listed,
    "rules.9.late_callback" => late_callback,
    "rules.10.not_ready" => not_ready,
    "rules.10.leaving" => leaving,
    "rules.10.exit_fence" => exit_fence,
    "rules.11.table_gone_before_get_returns" => table_gone_before_get_returns,
    "rules.25.refused_by_the_first" => refused_by_the_first,
];

fn stage(lab: &Lab) -> Result<Stage> {
    lab.needs_mode(PinMode::Revocable)?;
    lab.needs_ours()?;
    Stage::open(lab)
}

/// Prefixes of the kernel's lock functions that a stack can show above the module's function: one
/// of Linux 5.10, and two of kernels with PREEMPT_RT.
const LOCKS: [&str; 3] = ["rwsem_down_", "rt_mutex_", "__rt_mutex_"];

/// Returns `true` if a thread that sleeps at `place` waits in the module's own code, not in
/// nvidia.ko or ib_core.
fn in_module(place: &str) -> bool {
    let is_lock = |function: &str| LOCKS.iter().any(|lock| function.starts_with(lock));
    place
        .split(' ')
        .find(|function| !is_lock(function))
        .is_some_and(|innermost| innermost.ends_with("[nvidia_peermem]"))
}

/// Stops nvidia.ko's get after it has published the pin and before it returns. Frees the memory
/// meanwhile.
fn freed_inside_get(lab: &Lab, stage: &Stage) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    let (hold, registration) = stage.register_until(&memory, "nvidia/get_after_register")?;
    stage.free(&memory)?;
    match hold.finish(registration)? {
        Ok(_) => bail!("memory that was freed was registered"),
        Err(refused) => note("errno", refused.errno()),
    }
    counters::callbacks_are(&stage.before, 1)
}

/// Checks that every callback was for a pin that the module knows.
fn found_its_pin(stage: &Stage) -> Result<()> {
    match stage.logged("nvidia.ko revoked a pin that ")?.first() {
        None => Ok(()),
        Some(line) => bail!("the callback found no pin: {line}"),
    }
}

fn callback_before_get_returns(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    freed_inside_get(lab, &stage)?;
    found_its_pin(&stage)
}

fn table_gone_before_get_returns(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    freed_inside_get(lab, &stage)?;
    for text in ["nvidia.ko's page table", "pages where the range has"] {
        if let Some(line) = stage.logged(text)?.first() {
            bail!("the table was read when it was gone: {line}");
        }
    }
    Ok(())
}

/// Stops a release before its put. Frees the memory meanwhile, with its callback.
fn unpin_beside_callback(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let (memory, region) = stage.registered()?;
    let (hold, release) = stage.deregister_until(region, "nvidia/put_before_lock")?;
    let mut free = stage.start_free(&memory)?;
    if !free.ended_or_at("the module", in_module)? {
        // Freeing the memory would block, because the two threads wait for each other.
        std::mem::forget(memory);
        bail!("the callback waits in the module for a release that waits for the API lock");
    }
    free.done()??;
    note("callbacks", stage.counted("callbacks")?);
    hold.finish(release)
}

/// Frees memory after the pin, before ib_core has issued a ticket.
fn freed_before_get_pages(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let (hold, registration) = stage.register_until(&memory, "ib_peer_mem/before_get_pages")?;
    stage.free(&memory)?;
    match hold.finish(registration)? {
        Ok(_) => bail!("registered, though the memory was freed before"),
        Err(refused) => {
            note("errno", refused.errno());
            ensure!(refused.errno() == libc::EINVAL, "{refused}");
            Ok(())
        }
    }
}

/// Releases a region in another process, before the region's callback. A region of another owner
/// then gets the same ticket.
fn stale_ticket(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let _one_ticket = Parameter::set_file("/sys/kernel/debug/ib_peer_mem/tickets", "1")?;
    let old = lab.allocate_gpu(M2)?;
    stage.orphan(&old)?;
    let memory = lab.allocate_gpu(M2)?;
    let region = lab.far.reg_mr(memory.span(0, M2)?)?;
    stage.free(&old)?;
    counters::callbacks_are(&stage.before, 1)?;
    let state = peer_region(&lab.far, &region)?.state;
    note("state", &state);
    ensure!(state != "revoked", "a stranger's region was revoked");
    Ok(())
}

/// Stops a callback inside ib_core. A concurrent release must not return.
fn release_beside_invalidation(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let (memory, region) = stage.registered()?;
    let (inside, free) = Hold::catch("ib_peer_mem/invalidate_got_ref", || {
        stage.start_free(&memory)
    })?;
    let before = Hold::arm("ib_peer_mem/before_release")?;
    let after = Hold::arm("ib_peer_mem/after_release")?;
    let mut release = stage.start_deregister(region)?;
    ensure!(before.caught(&mut release)?, "release was not reached");
    before.release();
    let mut returned = false;
    let settled = sys::wait_until(PATIENCE, || {
        returned = after.waiting()? > 0;
        Ok(returned || in_module(&release.place()))
    })?;
    ensure!(
        settled,
        "the release neither returned nor waits in the module: {}",
        release.place()
    );
    if returned {
        // Without the hold points, the threads would continue in this order. The invalidation then
        // follows the pointer that ib_core has cleared after the release, and ib_core crashes.
        after.finish(release)?;
        inside.finish(free)??;
        bail!("release returned with its callback inside ib_core");
    }
    inside.finish(free)??;
    ensure!(after.caught(&mut release)?, "release does not return");
    after.finish(release)
}

/// Reuses the address of a page table that was freed with its memory: the next pin gets a page
/// table at this address. The release of the old region must not put the new page table.
fn revoked_is_not_put(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let _reuse = Parameter::set("nvidia", "table_reuse", "1")?;
    let (memory, region) = stage.registered()?;
    stage.free(&memory)?;
    let next = lab.allocate_gpu(M2)?;
    let other = stage.register(&next)?;
    drop(region);
    let (puts, live) = (
        stage.counted("put_pages")?,
        Counters::read()?.get("pins_live")?,
    );
    note("puts", puts);
    ensure!(live == 1, "the other region has lost its pin");
    ensure!(puts == 0, "a pin was put, though its callback had come");
    drop(other);
    Ok(())
}

/// Frees memory after a release has found its pin alive. The release then waits for `put_rwsem`,
/// which a get of another registration holds. After the wait, the release must check the pin again
/// and make no put.
fn second_check(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    let next = lab.allocate_gpu(M2)?;
    let region = stage.register(&memory)?;
    let (hold, registration) = stage.register_until(&next, "nvidia/get_after_register")?;
    let mut release = stage.start_deregister(region)?;
    let ended = release.ended_or_at("the module", in_module)?;
    ensure!(!ended, "the release did not wait for put_rwsem");
    stage.free(&memory)?;
    let other = hold.finish(registration)??;
    release.done()?;
    expect("puts", stage.counted("put_pages")?, 0).context("release after the callback")?;
    drop(other);
    Ok(())
}

/// Stops a release after it has found its pin alive and before the put. A free at this moment makes
/// the address of the page table available for a new pin. No new pin may be made until the put has
/// returned.
fn put_rwsem(lab: &Lab, mode: PinMode) -> Result<()> {
    let stage = stage(lab)?;
    if mode == PinMode::Persistent {
        lab.needs_both_clients()?;
    }
    let _reuse = Parameter::set("nvidia", "table_reuse", "1")?;
    let memory = lab.allocate_gpu(M2)?;
    let next = lab.allocate_gpu(M2)?;
    let region = stage.register(&memory)?;
    let (hold, release) = stage.deregister_until(region, "nvidia/put_before_lock")?;
    stage.free(&memory)?;
    let _mode = match mode {
        PinMode::Persistent => Some(Parameter::set("rdma_rxe", "peer_inval", "N")?),
        PinMode::Revocable => None,
    };
    let mut registration = stage.start_register(&next)?;
    let made = registration.ended_or_at("the module", in_module)?;
    hold.finish(release)?;
    let other = registration.done()??;
    ensure!(!made, "a pin was made between the check and the put");
    counters::pins_are(1)?;
    drop(other);
    Ok(())
}

/// Makes nvidia.ko report memory that `dma_map_resource()` must not get. The persistent client must
/// serve this memory.
fn served_by_the_other(lab: &Lab, name: &str, value: &str, reason: Option<&str>) -> Result<()> {
    let stage = stage(lab)?;
    lab.needs_both_clients()?;
    let memory = lab.allocate_gpu(M2)?;
    let parameter = Parameter::set("nvidia", name, value)?;
    let mut expected = module_files::counts()?;
    let registered = stage.register(&memory);
    drop(parameter);
    let region = registered.context("the persistent client did not take it")?;
    let live = Counters::read()?;
    let (revocable, persistent) = (live.get("pins_live")?, live.get("pins_persistent_live")?);
    note("pins_revocable", revocable);
    note("pins_persistent", persistent);
    ensure!(
        revocable == 0,
        "{revocable} revocable pin on memory that cannot be mapped"
    );
    ensure!(persistent == 1, "{persistent} persistent pins");
    if let Some(reason) = reason {
        *expected.entry(format!("revocable/{reason}")).or_default() += 1;
        module_files::counted(&expected)?;
    }
    drop(region);
    Ok(())
}

/// Uses addresses that are above all BARs of the machine, but that a device can still reach.
fn outside_bar(lab: &Lab) -> Result<()> {
    const FAR: u64 = 1 << 30;
    let mut end = 0;
    for device in fs::read_dir("/sys/bus/pci/devices")? {
        let text = fs::read_to_string(device?.path().join("resource"))?;
        for line in text.lines() {
            let last = line.split(' ').nth(1).context("a BAR without an end")?;
            end = end.max(u64::from_str_radix(last.trim_start_matches("0x"), 16)?);
        }
    }
    let start = (end + 1).next_multiple_of(FAR);
    served_by_the_other(
        lab,
        "table_phys",
        &format!("{start:#x}"),
        Some("not_in_bar"),
    )
}

/// Tests a BAR whose last 2 MiB have struct pages that are not peer-to-peer DMA memory of this BAR.
fn struct_page(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let text = fs::read_to_string("/sys/class/nvidia/nvidia0/device/resource")?;
    let bar = text.lines().nth(2).context("a GPU without BAR 2")?;
    let last = bar.split(' ').nth(1).context("a BAR without an end")?;
    let last = u64::from_str_radix(last.trim_start_matches("0x"), 16)?;
    let start = format!("{:#x}", last + 1 - GRANULE);
    drop(stage);
    for kind in ["private", "coherent", "fs_dax", "generic", "beyond"] {
        let _pages = Parameter::set("nvidia", "stray_pages", kind)?;
        served_by_the_other(lab, "table_phys", &start, Some("has_struct_pages")).context(kind)?;
    }
    Ok(())
}

/// Releases a region in another process. nvidia.ko does not put the pin for that process. The pin
/// and the reference to the module must stay until the callback.
fn foreign_release(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    stage.orphan(&memory)?;
    let live = Counters::read()?.get("pins_live")?;
    let foreign = stage.counted("put_pages_foreign")?;
    let references = counters::module_references(module::NAME)?;
    note("pins", live);
    note("module_references", references);
    stage.free(&memory)?;
    ensure!(
        foreign == 0,
        "a pin was put by a process that does not own the pin"
    );
    ensure!(live == 1, "{live} pins after the release");
    counters::callbacks_are(&stage.before, 1)?;
    ensure!(references > 0, "no reference to the module was held");
    found_its_pin(&stage)?;
    module::references_are(0).context("after the callback")
}

/// Checks that the module cannot be unloaded while a callback is outstanding.
fn module_stays(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let memory = lab.allocate_gpu(M2)?;
    stage.orphan(&memory)?;
    if let Err(error) = module::must_stay() {
        // A free would call the unloaded module.
        std::mem::forget(memory);
        return Err(error);
    }
    stage.free(&memory)?;
    note("callbacks", stage.counted("callbacks")?);
    Ok(())
}

/// Address for shared GPU memory. The address is far from the programs and libraries of all
/// processes.
const ELSEWHERE: u64 = 0x2000_0000_0000;
/// Capacity of nvidia.ko's list of processes.
const LISTED: usize = 256;

/// Starts a guest: a process that is admitted to the GPU of `memory`, registers the memory and
/// ends. `gives_up` is the time at which the guest closes the GPU.
fn registered_by_a_guest(
    lab: &Lab,
    stage: &Stage,
    memory: &Allocation,
    gives_up: &str,
) -> Result<()> {
    let addr = memory.mapping().addr().to_string();
    let seed = lab.setup.seed;
    let mut guest = Process::start(&lab.setup, seed, &["guest", &addr, gives_up])?;
    stage.gpu.admit(guest.id())?;
    guest.go();
    guest.join()
}

/// Checks that only the pin of `memory` holds the module, and that the callback finds the pin.
fn held_until_freed(stage: &Stage, memory: Allocation) -> Result<()> {
    let events = || -> Result<[u64; 2]> {
        let late = module_files::event("late_callback")?;
        Ok([late, module_files::event("spurious_callback")?])
    };
    let before = events()?;
    let live = Counters::read()?.get("pins_live")?;
    let references = counters::module_references(module::NAME)?;
    note("pins", live);
    note("module_references", references);
    if let Err(error) = module::must_stay() {
        // A free would call the unloaded module.
        std::mem::forget(memory);
        return Err(error);
    }
    stage.free(&memory)?;
    ensure!(live == 1, "{live} pins after the release");
    ensure!(references == 1, "{references} references to the module");
    module::references_are(0).context("after the callback")?;
    let after = events()?;
    ensure!(after == before, "the callback found no pin: {after:?}");
    Ok(())
}

/// Checks that nvidia.ko's list of processes admits no further process when it is full. Then checks
/// that the module makes no put for a process that leaves the list before the kernel deregisters.
/// For such a put, nvidia.ko would return 0 and still call back.
fn exit_unlisted(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let memory = stage.gpu.allocate(M2, Placement::At(ELSEWHERE))?;
    let words = SharedWords::new(2)?;
    let [opened, done] = words.all() else {
        bail!("two words");
    };
    let others = (1..LISTED)
        .map(|_| {
            let mut other = Forked::start(|| {
                let gpus = Gpu::all();
                opened.fetch_add(1, Ordering::SeqCst);
                // Waits until the end of the case, or for 5 minutes if the case failed.
                for _ in 0..600 {
                    if done.load(Ordering::SeqCst) != 0 {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(500));
                }
                i32::from(gpus.is_err())
            })?;
            other.go();
            Ok(other)
        })
        .collect::<Result<Vec<_>>>()?;
    let all = LISTED as u64 - 1;
    let ready = sys::wait_until(PATIENCE, || Ok(opened.load(Ordering::SeqCst) == all))?;
    ensure!(ready, "not all processes that fill the list have started");
    for other in &others {
        stage.gpu.admit(other.id().context("runs")?)?;
    }
    let full = registered_by_a_guest(lab, &stage, &memory, "first");
    done.store(1, Ordering::SeqCst);
    for other in others {
        ensure!(
            other.wait()? == 0,
            "a process in the list has not opened the GPU"
        );
    }
    let errno = full
        .as_ref()
        .err()
        .and_then(|error| error.downcast_ref::<io::Error>()?.raw_os_error());
    ensure!(
        errno == Some(libc::EINVAL),
        "a full list did not refuse a guest with EINVAL: {full:?}"
    );
    let kept = module_files::event("orphaned_unlisted")?;
    registered_by_a_guest(lab, &stage, &memory, "first")?;
    let foreign = stage.counted("put_pages_foreign")?;
    ensure!(
        foreign == 0,
        "a pin was put by a process that is not in nvidia.ko's list"
    );
    ensure!(module_files::event("orphaned_unlisted")? == kept + 1);
    held_until_freed(&stage, memory)
}

/// Tests the end of a process that is still in nvidia.ko's list, unlike the process of
/// [`exit_unlisted`]. No pin and no reference to the module may be left.
fn exit_listed(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let memory = stage.gpu.allocate(M2, Placement::At(ELSEWHERE))?;
    registered_by_a_guest(lab, &stage, &memory, "last")?;
    let found = stage.counted("put_pages_found")?;
    let live = Counters::read()?.get("pins_live")?;
    ensure!(live == 0, "{live} pins after the release");
    ensure!(found == 2);
    module::references_are(0)
}

/// Checks that the module assumes that a running process is in the list, until a callback shows
/// otherwise. From then on, the module must ask nvidia.ko before each put.
fn late_callback(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let again = Replaced::remember();
    let result = asked_from_then_on(lab, &stage);
    // The module would continue to ask until it is unloaded.
    again.end()?;
    // The counter is reset, because a callback after a put is an error in all other test cases.
    let after_put = stage.counted("callbacks_after_put")?;
    Counters::reset()?;
    result?;
    ensure!(after_put == 1, "{after_put} callbacks after a put");
    Ok(())
}

fn asked_from_then_on(lab: &Lab, stage: &Stage) -> Result<()> {
    let first = stage.gpu.allocate(M2, Placement::At(ELSEWHERE))?;
    let second = stage.gpu.allocate(M2, Placement::At(ELSEWHERE + GRANULE))?;
    registered_by_a_guest(lab, stage, &first, "early")?;
    ensure!(stage.counted("put_pages_foreign")? == 1, "not put");
    let late = module_files::event("late_callback")?;
    stage.free(&first)?;
    ensure!(module_files::event("late_callback")? == late + 1);
    registered_by_a_guest(lab, stage, &second, "early")?;
    let foreign = stage.counted("put_pages_foreign")?;
    ensure!(
        foreign == 1,
        "a pin was put by a process that is not in nvidia.ko's list"
    );
    held_until_freed(stage, second)
}

/// Skips the case if the module has no hold points. Only the builds for mutants have them
/// (`tests/mutants/holds.diff`).
fn needs_hold_points() -> Result<()> {
    if counters::module_parameter(module::NAME, "hold_init").is_none() {
        return ktap::skip("the module has no hold points in this build");
    }
    Ok(())
}

const INIT: &str = "/sys/kernel/debug/nvidia_peermem_points/hold/init";

/// Checks that the module takes no range while its first client is registered and its second client
/// is not.
fn not_ready(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    needs_hold_points()?;
    let memory = lab.allocate_gpu(M2)?;
    let parameters = module::parameters();
    let _again = Replaced::begin()?;
    let mut command = Command::new("modprobe");
    command
        .arg(module::NAME)
        .args(parameters)
        .arg("hold_init=1");
    let mut modprobe = Running::start(&mut command)?;
    let held = sys::wait_until(PATIENCE, || {
        let text = fs::read_to_string(INIT);
        Ok(text.is_ok_and(|text| text.contains("waiting=1")) || !modprobe.is_running()?)
    })?;
    let early = stage.register(&memory).map(drop);
    fs::write(INIT, "0")?;
    let modprobe = modprobe.finish(PATIENCE)?;
    ensure!(held && modprobe.success(), "modprobe: {}", modprobe.output);
    ensure!(
        early.is_err(),
        "a module whose second client is not registered yet accepted a range"
    );
    stage.register(&memory)?;
    Ok(())
}

/// Checks that the module takes no range once it has begun to unload, while both of its clients are
/// still registered.
fn leaving(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    needs_hold_points()?;
    let memory = lab.allocate_gpu(M2)?;
    let _again = Replaced::remember();
    let hold = Hold::arm("nvidia_peermem_points/exit")?;
    let mut rmmod = Running::start(Command::new("rmmod").arg(module::NAME))?;
    let held = sys::wait_until(PATIENCE, || Ok(hold.waiting()? > 0 || !rmmod.is_running()?))?;
    let late = stage.register(&memory).map(drop);
    hold.release();
    let rmmod = rmmod.finish(PATIENCE)?;
    ensure!(held && rmmod.success(), "rmmod: {}", rmmod.output);
    ensure!(late.is_err(), "registered by a module that is leaving");
    Ok(())
}

/// Returns the kernel functions in which a process sleeps.
fn place_of(pid: u32) -> String {
    fs::read_to_string(PathBuf::from(format!("/proc/{pid}/stack"))).unwrap_or_default()
}

/// Stops a callback that has dropped its reference to the module. The unload must wait until the
/// callback has returned.
fn exit_fence(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    let (memory, region) = stage.registered()?;
    let (hold, free) = Hold::catch("nvidia/callback_exit", || stage.start_free(&memory))?;
    stage.start_deregister(region)?.done()?;
    let references = counters::module_references(module::NAME)?;
    expect("module_references", references, 0)?;
    let _again = Replaced::remember();
    let mut rmmod = Running::start(Command::new("rmmod").arg(module::NAME))?;
    let mut gone = false;
    let settled = sys::wait_until(PATIENCE, || {
        gone = !rmmod.is_running()?;
        Ok(gone || place_of(rmmod.id()).contains("nvidia_p2p_put_pages"))
    })?;
    let place = place_of(rmmod.id());
    hold.finish(free)??;
    let rmmod = rmmod.finish(PATIENCE)?;
    ensure!(rmmod.success(), "rmmod: {}", rmmod.output);
    ensure!(settled, "rmmod neither ended nor waits: {place}");
    ensure!(!gone, "the module was unloaded under its callback");
    Ok(())
}

/// Makes the revocable client fail to pin a range that could be pinned a moment later. The
/// persistent client must not take this range. If the HCA cannot revoke, ib_core does not ask the
/// revocable client. The persistent client must then take the same range from the same thread.
fn refused_by_the_first(lab: &Lab) -> Result<()> {
    let stage = stage(lab)?;
    lab.needs_both_clients()?;
    let memory = lab.allocate_gpu(M2)?;
    let fails_once = || -> Result<()> {
        fail_next("get_pages", libc::ENOMEM)?;
        let registered = stage.register(&memory);
        let live = Counters::read()?.get("pins_persistent_live")?;
        note("pins_persistent", live);
        ensure!(
            registered.is_err(),
            "the persistent client has taken a range that the revocable client refused: {live} pins"
        );
        let asked = stage.counted("get_pages_persistent")?;
        ensure!(asked == 0, "the module asked for {asked} persistent pins");
        Ok(())
    };
    fails_once()?;
    drop(stage.register(&memory).context("the next registration")?);
    fails_once()?;
    let _cannot_lose = Parameter::set("rdma_rxe", "peer_inval", "N")?;
    let region = stage
        .register(&memory)
        .context("for an HCA that cannot revoke")?;
    let live = Counters::read()?.get("pins_persistent_live")?;
    ensure!(live == 1, "{live} persistent pins");
    drop(region);
    Ok(())
}
