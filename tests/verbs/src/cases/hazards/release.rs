// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Hazards G to I, and parts of N and P: releases after a failed step or a changed result.

use anyhow::{ensure, Result};

use crate::cases::chunks::Row;
use crate::gpu::PAGE;
use crate::knobs::{fail_next, fail_none, lose_next_put, provoke_failing_put, rebind, Parameter};
use crate::ktap::cases;
use crate::rdma::errno_name;
use crate::sys::KernelLog;

use super::{interpose, interposed, times, Bench, Case, M2};

pub(super) const CASES: &[Case] = cases![
    "G.half_a_scatter_list" => half_a_scatter_list,
    "H.changed_table" => changed_table,
    "I.not_on_pci" => |bench| foreign_device(bench, "nonpci"),
    "I.no_device" => |bench| foreign_device(bench, "none"),
    "N.failing_put" => failing_put,
    "P.put_out_of_memory" => put_out_of_memory,
    "two_allocations" => two_allocations,
];

/// Makes the second of the scatter list's three allocations fail.
fn half_a_scatter_list(bench: &Bench) -> Result<()> {
    const ENTRIES: u64 = 256;
    let layout = Parameter::set("nvidia", "layout", "64k")?;
    let len = usize::try_from(ENTRIES * PAGE)?;
    let memory = bench.lab.allocate_gpu(len)?;
    drop(layout);
    interpose("sg_kmalloc", "2")?;
    let refused = bench.hca.reg_mr(memory.span(0, len)?);
    let failed = interposed("sg_kmalloc")?;
    interpose("sg_kmalloc", "0")?;
    ensure!(failed, "no allocation failed");
    // In revocable mode, our module already builds the scatter list in acquire.
    let expected = match bench.is_ours() && bench.is_revocable() {
        true => libc::EFAULT,
        false => libc::ENOMEM,
    };
    match refused {
        Ok(_) => anyhow::bail!("registered"),
        Err(refused) => {
            ensure!(refused.errno() == expected, "{refused}");
            bench.saw(&errno_name(expected));
        }
    }
    let references = bench.module_references()?;
    bench.check_nothing_left()?;
    ensure!(references == 0, "{references} references to the module");
    Ok(())
}

/// Makes ib_core return the scatter list with a changed head.
fn changed_table(bench: &Bench) -> Result<()> {
    let (_memory, region) = bench.registered()?;
    interpose("sg_table_edit", "1")?;
    drop(region);
    let changed = interposed("sg_table_edit")?;
    interpose("sg_table_edit", "0")?;
    ensure!(changed, "the scatter list was not changed");
    bench.check_nothing_left()
}

/// Tests an HCA without a DMA device, or with a DMA device that is not on the PCI bus.
fn foreign_device(bench: &Bench, device: &str) -> Result<()> {
    let parameter = Parameter::set("rdma_rxe", "peer_dma_dev", device)?;
    let memory = bench.allocate()?;
    let registration = bench.start_register(&memory)?;
    let Some(registered) = bench.fate("the registration", registration.finish()?) else {
        std::mem::forget((memory, parameter));
        return Ok(());
    };
    match registered {
        Ok(region) => {
            bench.wrong("registered for a device that is not on the bus");
            drop(region);
        }
        Err(refused) if refused.errno() == libc::ENODEV => bench.saw("ENODEV"),
        Err(refused) => bench.wrong(&format!(
            "taken for a PCI device, but refused with {}",
            errno_name(refused.errno())
        )),
    }
    drop(parameter);
    bench.check_nothing_left()
}

/// Makes a put fail during acquire.
fn failing_put(bench: &Bench) -> Result<()> {
    let memory = bench.allocate()?;
    fail_next("put_pages", libc::EIO)?;
    fail_next("put_pages_persistent", libc::EIO)?;
    let registered = bench.hca.reg_mr(memory.span(0, M2)?);
    for place in ["put_pages", "put_pages_persistent"] {
        if fail_none(place)? {
            provoke_failing_put()?;
        }
    }
    match registered {
        Ok(region) => {
            bench.saw("registered");
            drop(region);
        }
        Err(refused) => bench.saw(&errno_name(refused.errno())),
    }
    let references = bench.module_references()?;
    let pins = bench.pins()?;
    bench.check(
        pins == 0,
        "nothing left",
        &format!(
            "a failing put leaves {}, and {references} references to the module",
            times(pins, "pin")
        ),
    );
    Ok(())
}

/// Makes a put return -ENOMEM. In revocable mode, such a put changes nothing. In persistent mode,
/// such a put decrements the GPU's usage count and loses the pin.
fn put_out_of_memory(bench: &Bench) -> Result<()> {
    let (memory, region) = bench.registered()?;
    if bench.is_revocable() {
        provoke_failing_put()?;
        fail_next("put_pages", libc::ENOMEM)?;
        drop(region);
        return bench.check_nothing_left();
    }
    let log = KernelLog::from_now()?;
    lose_next_put(libc::ENOMEM)?;
    drop((region, memory));
    let misuse = bench.counted("misuse")?;
    bench.check(
        misuse == 0,
        "a lost pin is put once",
        &format!(
            "a repeated put dropped other pins' share of the GPU's usage count: {}",
            times(misuse, "use")
        ),
    );
    let lines = log.of_module()?;
    bench.check(
        lines.len() == 1,
        "the loss is in the kernel log",
        &format!("a lost pin, and {} lines in the kernel log", lines.len()),
    );
    if bench.is_ours() {
        // Frees the lost pin. With another module, the GPU may stay in use, and the unbind would
        // wait for ever.
        rebind(bench.gpu.bdf())?;
    }
    Ok(())
}

/// Registers and deregisters a range over two adjacent allocations.
fn two_allocations(bench: &Bench) -> Result<()> {
    let row = Row::on_one_gpu(&bench.lab, &[1, 1])?;
    match bench.hca.reg_mr(row.span(0, 2 * M2)?) {
        Ok(_) => bench.saw("registered"),
        Err(refused) => bench.saw(&errno_name(refused.errno())),
    }
    ensure!(bench.module_references()? == 0, "the module is still held");
    drop(row);
    bench.check_nothing_left()
}
