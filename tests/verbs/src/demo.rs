// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The demo. It registers GPU memory, writes and reads the memory by RDMA, frees the memory, and
//! shows that no object is left.

use std::{env, fs};

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::cases::consumers;
use crate::cases::register::{allocate_aligned, peer_region};
use crate::counters::{peer_regions, Counters};
use crate::gpu::GRANULE;
use crate::lab::{Lab, Peermem, PinMode, Setup};
use crate::module::Replaced;
use crate::pattern::{difference, Pattern};
use crate::rdma::{Op, Region, Status};
use crate::{ktap, module, rdma, sys};

/// Number of bytes to write and read. The number is odd, and larger than a page of the kernel or
/// the GPU.
const BYTES: usize = (1 << 20) + 4097;
const OFFSET: usize = 65_536 + 123;

pub(crate) fn run(setup: &Setup) -> Result<()> {
    if setup.peermem == Peermem::Preload {
        return preloaded(setup);
    }
    let before = Counters::read()?;
    let mode = setup.mode();
    ensure!(mode == PinMode::Persistent);
    let control = control(setup).context("NVIDIA's module")?;

    introduce(&Lab::open(setup)?)?;
    registration(&Lab::open(setup)?, control.as_ref())?;
    write_and_read(&Lab::open(setup)?)?;
    println!("\n4. Freed under a live registration");
    freed_persistent(&Lab::open(setup)?)?;
    freed_revocable(setup)?;

    ktap::check_rest(&before)?;
    let now = Counters::read()?;
    let (pins, mappings) = (now.live_pins()?, now.get("mappings_live")?);
    end(&now, &format!("{pins} pins, {mappings} DMA mappings"))
}

/// Prints the objects that are left at the end of the demo.
fn end(now: &Counters, left: &str) -> Result<()> {
    println!(
        "\n5. What is left: {left}, {} references on a GPU, {} bytes pinned in a BAR",
        now.get("device_refs")?,
        now.get("bar_bytes_pinned")?
    );
    println!("demo: ok");
    Ok(())
}

/// Runs the demo without a module, on an ib_core without peer memory. A preloaded library registers
/// GPU memory by dma-buf.
fn preloaded(setup: &Setup) -> Result<()> {
    let before = Counters::read()?;
    let lab = Lab::open(setup)?;
    machine(&lab)?;
    println!(
        "  no peer-memory module; preloaded: {}",
        env::var("LD_PRELOAD")?
    );

    let len = 16 * GRANULE as usize;
    let memory = lab.allocate_gpu(len)?;
    let region = lab.far.reg_mr(memory.span(0, len)?)?;
    let entries: Vec<_> = peer_regions(lab.far.name())?
        .iter()
        .map(|region| region.entries)
        .collect();
    let now = Counters::read()?;
    println!(
        "\n1. ibv_reg_mr of {} MiB of GPU memory at {:#x}",
        len >> 20,
        memory.mapping().addr()
    );
    println!("   ib_core refused it, and the library registered a dma-buf of it.");
    println!(
        "   exports {}, mapped dma-bufs {}, pins {}, scatter-list entries {entries:?}",
        now.since(&before, "dmabuf_export")?,
        now.get("dmabuf_maps_live")?,
        now.get("pins_persistent_live")?
    );
    ensure!(
        now.get("dmabuf_maps_live")? == 1 && now.live_pins()? == 1 && entries.len() == 1,
        "the region is not one dma-buf"
    );
    drop(region);
    drop(memory);

    write_and_read(&lab)?;
    println!("\n4. Freed under a live registration");
    let (status, _, _) = freed(&lab)?;
    println!("   the region keeps the pages, a WRITE ends with {status:?}");
    ensure!(
        status == Status::Success,
        "the memory did not outlive the free"
    );

    ktap::check_rest(&before)?;
    let now = Counters::read()?;
    let (buffers, mapped) = (now.get("dmabufs_live")?, now.get("dmabuf_maps_live")?);
    end(
        &now,
        &format!("{buffers} dma-bufs, {mapped} of them mapped"),
    )
}

/// Cost of one registration with the loaded module.
struct Measurement {
    version: String,
    bytes: u64,
    address: u64,
    /// Number of pins by nvidia.ko during the registration and the deregistration. `unpins` is the
    /// number of unpins.
    pins: u64,
    unpins: u64,
    /// Number of scatter-list entries that rxe received.
    entries: u64,
}

/// Registers and deregisters contiguous GPU memory. The length is the largest power of two up to
/// 1 GiB and up to half of the first GPU's BAR. The address is aligned to the length.
fn measure(lab: &Lab) -> Result<Measurement> {
    let bytes = (1_u64 << (lab.gpu(0)?.bar_len() / 2).ilog2()).min(1 << 30);
    let memory = allocate_aligned(lab, bytes, bytes)?;
    ensure!(memory.is_contiguous()?, "the memory is not contiguous");
    let before = Counters::read()?;
    let region = lab.near.reg_mr(memory.span(0, usize::try_from(bytes)?)?)?;
    let entries = peer_region(&lab.near, &region)?.entries;
    drop(region);
    let activity = Counters::read()?.activity(&before)?;
    Ok(Measurement {
        version: module::version()?,
        bytes,
        address: memory.mapping().addr(),
        pins: activity.pins,
        unpins: activity.unpins,
        entries,
    })
}

/// Returns the measurement of NVIDIA's nvidia-peermem for the same registration on the same
/// machine.
fn control(setup: &Setup) -> Result<Option<Measurement>> {
    let Some(file) = consumers::control() else {
        return Ok(None);
    };
    let replaced = Replaced::begin()?;
    module::load_file(&file)?;
    let measured = measure(&Lab::open(setup)?)?;
    replaced.end()?;
    Ok(Some(measured))
}

fn machine(lab: &Lab) -> Result<()> {
    let gpu = lab.gpu(0)?;
    let information = fs::read_to_string(format!(
        "/proc/driver/nvidia/gpus/{}/information",
        gpu.bdf()
    ))?;
    let uuid = information
        .lines()
        .find_map(|line| line.strip_prefix("GPU UUID:"))
        .context("no UUID")?
        .trim();
    println!(
        "The machine: Linux {}, emulated.",
        sys::read_line("/proc/sys/kernel/osrelease")?
    );
    println!(
        "  {} stand-in GPU(s), first at {}, {uuid}, BAR1 of {} MiB",
        lab.gpus().len(),
        gpu.bdf(),
        gpu.bar_len() >> 20
    );
    println!(
        "  RDMA devices {} and {}, each on its own NIC",
        lab.near.name(),
        lab.far.name()
    );
    Ok(())
}

fn introduce(lab: &Lab) -> Result<()> {
    machine(lab)?;
    println!(
        "  peer-memory module: {} {}",
        module::NAME,
        module::version()?
    );
    lab.first_registrations()?;
    println!("  For each GPU and NIC, the module has made nvidia.ko map one page, to compare the addresses. From here on, the module maps by itself.");
    Ok(())
}

fn registration(lab: &Lab, control: Option<&Measurement>) -> Result<()> {
    let ours = measure(lab)?;
    if let Some(control) = control {
        ensure!(control.bytes == ours.bytes);
    }
    println!(
        "\n1. ibv_reg_mr of {} MiB of contiguous GPU memory at {:#x}",
        ours.bytes >> 20,
        ours.address
    );
    println!("   The address has no CPU pages, so ib_core asked its peer-memory clients, and the module accepted the memory.");
    let other = |value: fn(&Measurement) -> String| control.map_or("-".to_owned(), value);
    println!("   {:24}{:>18}{:>22}", "", "ours", "NVIDIA's");
    for (name, value) in [
        (
            "version",
            (|m| m.version.clone()) as fn(&Measurement) -> String,
        ),
        ("pins by the GPU's driver", |m| m.pins.to_string()),
        ("unpins", |m| m.unpins.to_string()),
        ("scatter-list entries", |m| m.entries.to_string()),
    ] {
        println!("   {name:24}{:>18}{:>22}", value(&ours), other(value));
    }
    ensure!((ours.pins, ours.unpins) == (1, 1));
    ensure!(ours.entries == 1, "{} entries", ours.entries);
    if let Some(control) = control {
        ensure!((control.pins, control.unpins) == (2, 2));
        ensure!(control.entries == control.bytes >> 16);
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<Vec<_>>()
        .join(" ")
}

fn count_differing(expected: &[u8], found: &[u8]) -> usize {
    difference(expected, found).map_or(0, |difference| difference.count)
}

fn write_and_read(lab: &Lab) -> Result<()> {
    let seed = lab.setup.seed;
    let room = 2 * GRANULE as usize;
    let memory = lab.allocate_gpu(room)?;
    let background = Pattern::new(seed, 1).bytes(0, room);
    memory.write(0, &background)?;
    let region = lab.far.reg_mr(memory.span(0, room)?)?;
    let mut host = Arena::on_host(lab, room, 2)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let remote = region.part(OFFSET as u64, BYTES as u64)?;

    println!(
        "\n2. RDMA WRITE of {BYTES} bytes from host memory on {} to GPU memory on {}",
        lab.near.name(),
        lab.far.name()
    );
    let data = host.expected(0, BYTES)?.to_vec();
    // The view reads the memory through the BAR in sysfs, independently of the transfer.
    let view = memory.bar_view()?;
    let bar_address = memory.bar_address() + OFFSET as u64;
    let width = format!("in the BAR at {bar_address:#x}, before").len();
    println!(
        "   in the BAR at {bar_address:#x}, before  {}",
        hex(&view.bytes(OFFSET, 12)?)
    );
    println!("   {:>width$}  {}", "what is written", hex(&data[..12]));
    connection.transfer(Op::Write, host.part(0, BYTES)?, remote)?;
    let now = view.bytes(0, room)?;
    println!(
        "   in the BAR at {bar_address:#x}, after   {}",
        hex(&now[OFFSET..OFFSET + 12])
    );
    let wrong = count_differing(&data, &now[OFFSET..OFFSET + BYTES]);
    let outside = count_differing(&background[..OFFSET], &now[..OFFSET])
        + count_differing(&background[OFFSET + BYTES..], &now[OFFSET + BYTES..]);
    println!(
        "   differing bytes: {wrong} of {BYTES}; changed outside: {outside} of {}",
        room - BYTES
    );
    ensure!(wrong == 0 && outside == 0, "the WRITE went wrong");

    println!("\n3. RDMA READ of the same {BYTES} bytes back into other host memory");
    let back = room - BYTES;
    connection.transfer(Op::Read, host.part(back, BYTES)?, remote)?;
    let found = host.bytes(back, BYTES)?;
    let wrong = count_differing(&data, &found);
    println!(
        "   first bytes {}, differing bytes: {wrong} of {BYTES}",
        hex(&found[..12])
    );
    ensure!(wrong == 0, "the READ went wrong");
    host.expect(back, &data)?;
    host.check()
}

fn write_status(lab: &Lab, host: &Arena, region: &Region) -> Result<Status> {
    lab.status(Op::Write, host.part(0, 4096)?, region.part(0, 4096)?)
}

fn freed(lab: &Lab) -> Result<(Status, u64, u64)> {
    let room = GRANULE as usize;
    let mut memory = lab.allocate_gpu(room)?;
    let host = Arena::on_host(lab, room, 3)?;
    let region = lab.far.reg_mr(memory.span(0, room)?)?;
    let status = write_status(lab, &host, &region)?;
    ensure!(status == Status::Success);
    memory.free()?;
    let status = write_status(lab, &host, &region)?;
    let live = Counters::read()?.live_pins()?;
    drop(region);
    Ok((status, live, Counters::read()?.live_pins()?))
}

fn freed_persistent(lab: &Lab) -> Result<()> {
    let (status, live, after) = freed(lab)?;
    println!("   persistent (default): {live} pin keeps the pages, a WRITE ends with {status:?}; after ibv_dereg_mr {after} pins");
    ensure!(
        status == Status::Success && live == 1 && after == 0,
        "the persistent mode did not keep the pages until ibv_dereg_mr"
    );
    Ok(())
}

/// Reloads the module, because the mode is a module parameter.
fn freed_revocable(setup: &Setup) -> Result<()> {
    module::loaded_with(&["persistent_api_support=0".to_owned()], || {
        let lab = Lab::open(setup)?;
        let mode = lab.setup.mode();
        ensure!(mode == PinMode::Revocable);
        let (status, live, after) = freed(&lab)?;
        println!("   revocable (persistent_api_support=0): {live} pins, a WRITE ends with {status:?}; after ibv_dereg_mr {after} pins");
        ensure!(
            status == Status::RemoteAccessError && live == 0 && after == 0,
            "the revocable mode did not revoke the region at the free"
        );
        Ok(())
    })
}
