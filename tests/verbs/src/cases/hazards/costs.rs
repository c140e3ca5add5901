// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Hazards J to N and P: the cost of a registration, requests to nvidia.ko before the address is
//! checked, and results of nvidia.ko that a module uses unchecked.

use std::collections::BTreeMap;

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::cases::reasons;
use crate::cases::register::peer_region;
use crate::counters::Counters;
use crate::gpu::{GRANULE, PAGE};
use crate::knobs::Parameter;
use crate::ktap::cases;
use crate::rdma::{errno_name, Op};
use crate::sys::{Placement, Span};
use crate::{ktap, module, module_files, rdma, sys};

use super::{times, Bench, Case, M2};

pub(super) const CASES: &[Case] = cases![
    "J.pins_of_one_registration" => pins_of_one_registration,
    "J.memory_changes_hands" => memory_changes_hands,
    "K.entries" => entries,
    "K.addresses_out_of_order" => addresses_out_of_order,
    "L.empty_or_wrapping" => empty_or_wrapping,
    "M.absurd_length" => absurd_length,
    "N.reason" => reason,
    "P.strange_tables" => strange_tables,
    "P.strange_mappings" => strange_mappings,
];

fn pins_of_one_registration(bench: &Bench) -> Result<()> {
    let (_memory, region) = bench.registered()?;
    drop(region);
    let activity = Counters::read()?.activity(&bench.before)?;
    let said = format!(
        "{}, {}",
        times(activity.pins, "pin"),
        times(activity.unpins, "unpin")
    );
    bench.check(activity.pins == 1 && activity.unpins == 1, &said, &said);
    bench.check_nothing_left()
}

/// Frees the memory between the two pins of a registration, and allocates other memory at the same
/// addresses.
fn memory_changes_hands(bench: &Bench) -> Result<()> {
    // The addresses are far from the neighbour's addresses.
    let memory = bench.gpu.allocate(M2, Placement::At(16 << 40))?;
    let addr = memory.mapping().addr();
    let (hold, registration) = bench.register_until(&memory, "ib_peer_mem/before_get_pages")?;
    // Place in the BAR that the pin assigned to the memory.
    let place = memory.bar_address();
    // The neighbour keeps the place, so the new memory lies elsewhere.
    drop(memory);
    let neighbour = bench.allocate()?;
    let other = bench.gpu.allocate(M2, Placement::At(addr))?;
    let registered = hold.finish(registration)?;
    let kept = neighbour.bar_address() != place;
    match registered {
        Ok(region) => {
            let before = other.bytes(0, 4096)?;
            let source = Arena::on_host(&bench.lab, M2, 7)?;
            let mut connection = rdma::connect(&bench.lab.near, &bench.hca)?;
            connection.transfer(Op::Write, source.part(0, 4096)?, region.part(0, 4096)?)?;
            bench.check(
                other.bytes(0, 4096)? == before && kept,
                "registers the memory that was acquired, and keeps it",
                "registers memory that it did not acquire",
            );
        }
        Err(refused) => {
            bench.saw(&format!("refused with {}", errno_name(refused.errno())));
        }
    }
    drop((other, neighbour));
    bench.check_nothing_left()
}

/// Registers contiguous memory.
fn entries(bench: &Bench) -> Result<()> {
    const LEN: usize = 128 << 20;
    // The memory does not cross a multiple of 2 GiB, where an entry ends on purpose.
    let addr = sys::free_address(LEN as u64, LEN as u64)?;
    let memory = bench.lab.gpu(0)?.allocate(LEN, Placement::At(addr))?;
    ensure!(memory.is_contiguous()?, "not contiguous");
    let region = bench.hca.reg_mr(memory.span(0, LEN)?)?;
    let entries = peer_region(&bench.hca, &region)?.entries;
    let said = format!(
        "{} MiB: {entries} {}",
        LEN >> 20,
        if entries == 1 { "entry" } else { "entries" }
    );
    bench.check(entries == 1, &said, &said);
    drop(region);
    bench.check_nothing_left()
}

/// Makes nvidia.ko's DMA addresses descend while the addresses of the memory ascend. Each
/// scatter-list entry must have the DMA address that nvidia.ko returned for its page.
fn addresses_out_of_order(bench: &Bench) -> Result<()> {
    if bench.is_revocable() && bench.is_ours() {
        return ktap::skip("our module's revocable mode maps by itself");
    }
    if !bench.is_ours() {
        return mapped_out_of_order(bench);
    }
    module::loaded_with_also(module::PROVIDER_MAPS, || mapped_out_of_order(bench))?;
    // The reloaded module has made no first registrations yet. The next schedules count calls, or
    // make calls fail.
    bench.lab.first_registrations()
}

fn mapped_out_of_order(bench: &Bench) -> Result<()> {
    let permute = Parameter::set("nvidia", "dma_permute", "1")?;
    let memory = bench.allocate()?;
    memory.write(0, &vec![0; M2])?;
    let region = bench.register(&memory)?;
    drop(permute);
    let entries = peer_region(&bench.hca, &region)?.entries;
    let source = Arena::on_host(&bench.lab, M2, 5)?;
    let mut connection = rdma::connect(&bench.lab.near, &bench.hca)?;
    connection.transfer(Op::Write, source.part(0, M2)?, region.part(0, M2 as u64)?)?;
    let page = usize::try_from(PAGE)?;
    let found = memory.bytes(0, M2)?;
    let wanted = source.expected(0, M2)?;
    let in_place = found
        .chunks(page)
        .zip(wanted.chunks(page).rev())
        .all(|(found, wanted)| found == wanted);
    bench.check(
        in_place && entries == GRANULE / PAGE,
        "addresses that descend: one entry each, every byte in its place",
        "addresses that descend: bytes land elsewhere",
    );
    drop(region);
    bench.check_nothing_left()
}

fn empty_or_wrapping(bench: &Bench) -> Result<()> {
    let memory = bench.allocate()?;
    let start = memory.mapping().addr();
    for (addr, len) in [
        (start, 0),
        (u64::MAX - 4095, 8192),
        (u64::MAX - 65535, 65535),
    ] {
        let refused = bench.hca.reg_mr(Span::anywhere(addr, len)?);
        ensure!(refused.is_err(), "{addr:#x}+{len:#x} was registered");
    }
    let asked = Counters::read()?.activity(&bench.before)?.attempts;
    bench.check(
        asked == 0,
        "an empty or wrapping range gets no further than ib_core",
        "an empty or wrapping range reaches nvidia.ko",
    );
    // ib_core counts one page if an empty range does not begin at a page boundary.
    let registered = bench.hca.reg_mr(memory.span(512, 0)?);
    let asked = Counters::read()?.activity(&bench.before)?.attempts;
    match registered {
        Err(refused) => bench.saw(&format!(
            "0 bytes inside a page: {}, {} to nvidia.ko",
            errno_name(refused.errno()),
            times(asked, "call")
        )),
        Ok(region) => {
            let pinned = Counters::read()?.get("bar_bytes_pinned")?;
            bench.wrong(&format!(
                "0 bytes inside a page: registered, {} KiB pinned",
                pinned >> 10
            ));
            drop(region);
        }
    }
    bench.check_nothing_left()
}

/// Registers 8 TiB from an address of the GPU.
fn absurd_length(bench: &Bench) -> Result<()> {
    const LEN: u64 = 8 << 40;
    let memory = bench.gpu.allocate(M2, Placement::At(16 << 40))?;
    let refused = bench
        .hca
        .reg_mr(Span::anywhere(memory.mapping().addr(), LEN)?)
        .err()
        .context("8 TiB were registered")?;
    let bytes = bench.counted("record_bytes")?;
    let calls = Counters::read()?.activity(&bench.before)?.attempts;
    // For each page, nv-p2p.c allocates a 64-bit address and two 32-bit numbers before it asks the
    // resource manager.
    let records = calls * (LEN / PAGE) * (8 + 4 + 4);
    ensure!(bytes == records);
    let said = format!(
        "{}; {} to nvidia.ko, which asks for {} MiB of kernel memory",
        errno_name(refused.errno()),
        times(calls, "call"),
        bytes >> 20
    );
    bench.check(bytes == 0, &said, &said);
    bench.check_nothing_left()
}

/// Reports the application's errno and the lines in the kernel log when the BAR has no room.
fn reason(bench: &Bench) -> Result<()> {
    let reserve = Parameter::set("nvidia", "bar1_reserve_mib", "65536")?;
    let memory = bench.allocate()?;
    let refused = bench
        .hca
        .reg_mr(memory.span(0, M2)?)
        .err()
        .context("registered in a full BAR")?;
    drop(reserve);
    let lines = bench.logged("nvidia-peermem")?.len() + bench.logged("nvidia_peermem")?.len();
    let named = !bench.logged("no room in the GPU's BAR1")?.is_empty();
    let errno = errno_name(refused.errno());
    bench.check(
        named,
        &format!("{errno}, and the cause in the kernel log"),
        &format!("{errno}, and {lines} lines in the kernel log"),
    );
    bench.check_nothing_left()
}

/// An invalid result of nvidia.ko: the stand-in's parameter that causes it, the parameter's value,
/// and our module's reason for the refusal.
type Strange = (&'static str, &'static str, &'static str);

/// Sets each parameter of the stand-in in turn. The module must refuse the registration. Our module
/// must return `errno`, for the given reason only.
fn refuse_each(bench: &Bench, errno: i32, answers: &[Strange]) -> Result<()> {
    let mut believed = Vec::new();
    for (knob, value, reason) in answers {
        let parameter = Parameter::set("nvidia", knob, value)?;
        let memory = bench.allocate()?;
        let passed_on = bench.logged("rxe_peer_")?.len();
        let mut expected = if bench.is_ours() {
            module_files::counts()?
        } else {
            BTreeMap::new()
        };
        let outcome = match bench.hca.reg_mr(memory.span(0, M2)?) {
            Ok(_) => Some("registered"),
            // The test VM's NIC checks its input, unlike a real NIC.
            Err(_) if bench.logged("rxe_peer_")?.len() > passed_on => Some("passed on to the NIC"),
            Err(refused) if bench.is_ours() => {
                for (name, times) in reasons::expected_counts(&bench.lab, reason, 1) {
                    *expected.entry(name).or_default() += times;
                }
                let found = module_files::counts()?;
                ensure!(
                    refused.errno() == errno && found == expected,
                    "{knob}={value}: {refused} and refusals {found:?}, expected {} and {expected:?}",
                    errno_name(errno)
                );
                None
            }
            Err(_) => None,
        };
        if let Some(outcome) = outcome {
            believed.push(format!("{knob}={value} {outcome}"));
        }
        drop(parameter);
    }
    bench.check(
        believed.is_empty(),
        &format!("{} invalid answers, none accepted", answers.len()),
        &believed.join(", "),
    );
    bench.check_nothing_left()
}

fn strange_tables(bench: &Bench) -> Result<()> {
    refuse_each(
        bench,
        libc::EFAULT,
        &[
            ("table_version", "0x00030000", "table_version"),
            ("table_page_size", "0", "table_page_size"),
            ("table_page_size", "2", "page_count"),
            ("table_entries_delta", "1", "page_count"),
            ("table_entries_delta", "-1", "page_count"),
        ],
    )
}

fn strange_mappings(bench: &Bench) -> Result<()> {
    if bench.is_revocable() && bench.is_ours() {
        return ktap::skip("our module's revocable mode maps by itself");
    }
    refuse_each(
        bench,
        libc::EINVAL,
        &[
            ("dma_mapping_version", "0x00030000", "mapping_version"),
            ("dma_entries_delta", "1", "page_count"),
            ("dma_entries_delta", "-1", "page_count"),
        ],
    )
}
