// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Bad input from an application, nvidia.ko or a device. `docs/bad-input.md` is made from the
//! output of these cases.
//!
//! Each case reloads the module, so that the log has the first message for each input.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{ensure, Context, Result};

use crate::cases::chunks::Row as Adjacent;
use crate::child::Process;
use crate::counters::Counters;
use crate::gpu::GRANULE;
use crate::knobs::Parameter;
use crate::ktap::{note, Case};
use crate::lab::{Lab, Peermem, PinMode, M2};
use crate::module::Replaced;
use crate::rdma::{errno_name, Hca, Refused};
use crate::sys::{KernelLog, Mapping, Placement, Span};
use crate::{ktap, module, sys};

/// Result of an `ibv_reg_mr` that succeeds.
const REGISTERS: i32 = 0;

/// Makes the table of cases. Each case is a row of the document, with the runner function, the
/// name, and the text in the document. A row also has the application's result with our module, in
/// persistent and in revocable mode, and the function that provokes it.
macro_rules! rows {
    ($($run:ident $name:literal: $text:literal, $expected:expr, $provoke:expr;)+) => {
        &[$(Case {
            name: $name,
            run: |lab| $run(lab, Input { text: $text, expected: $expected, provoke: &$provoke }),
        }),+]
    };
}

pub(super) const CASES: &[Case] = rows![
    row "input.host_memory": "memory of the CPU", [REGISTERS; 2], host_memory;
    row "input.host_addresses": "addresses of the CPU, with no access to memory", [libc::EFAULT; 2], host_addresses;
    row "input.nobodys_addresses": "addresses of nothing", [libc::EFAULT; 2], nobodys;
    row "input.kernel_addresses": "addresses of the kernel", [libc::EFAULT; 2], kernels;
    row "input.another_process": "GPU memory of another process", [libc::EFAULT; 2], another_process;
    row "input.before_the_fork": "GPU memory of the parent, from before a fork", [libc::EFAULT; 2], before_the_fork;
    row "input.freed": "freed, but still mapped by the process", [libc::EFAULT; 2], freed;
    row "input.freed_and_unmapped": "freed and unmapped", [libc::EFAULT; 2], freed_and_unmapped;
    row "input.half_freed": "half freed: one of two allocations side by side", [libc::EFAULT; 2], half_freed;
    row "input.half_unmapped": "half unmapped, which leaves the allocation whole", [REGISTERS; 2], half_unmapped;
    row "input.over_the_end": "over the end", [libc::EFAULT; 2], over_the_end;
    row "input.two_allocations": "across two allocations", [REGISTERS; 2], two_allocations;
    row "input.length_zero": "length zero", [libc::EINVAL; 2], length_zero;
    row "input.wrapping": "over the end of all addresses", [libc::EINVAL; 2], wrapping;
    row "input.too_long": "2 TiB; 2^32 pages less one", [libc::EFAULT; 2], too_long;
    row "input.too_many_pages": "2^32 pages", [libc::EINVAL; 2], too_many_pages;
    row "input.full_bar1": "a full BAR1 (registers once there is room)", [libc::EFAULT; 2], full_bar1;
    row "input.no_memlock": "RLIMIT_MEMLOCK is 0", [libc::EPERM; 2], memlock(0);
    row "input.little_memlock": "RLIMIT_MEMLOCK is 64 KiB", [libc::ENOMEM; 2], memlock(64 << 10);
    ours_only "input.device_not_pci": "an RDMA device whose DMA device is not PCI",
        [libc::ENODEV; 2], with("rdma_rxe", "peer_dma_dev", "nonpci");
    ours_only "input.device_absent": "an RDMA device without a DMA device",
        [libc::ENODEV; 2], with("rdma_rxe", "peer_dma_dev", "none");
    row_of_a_stranger "input.unreachable": "an RDMA device that cannot reach the GPU",
        [libc::EOPNOTSUPP, REGISTERS], with("nvidia", "topology_deny", "1");
    row "input.table_version_3_0": "a page table of version 3.0",
        [libc::EFAULT; 2], with("nvidia", "table_version", "0x00030000");
    row "input.table_version_2_1": "a page table of version 2.1",
        [REGISTERS; 2], with("nvidia", "table_version", "0x00020001");
    row "input.table_version_1_1": "a page table of version 1.1",
        [libc::EFAULT; 2], with("nvidia", "table_version", "0x00010001");
    row "input.table_pages_4kib": "a page table with pages of 4 KiB",
        [libc::EFAULT; 2], with("nvidia", "table_page_size", "0");
    row "input.table_pages_128kib": "a page table with pages of 128 KiB, twice too many",
        [libc::EFAULT; 2], with("nvidia", "table_page_size", "2");
    row "input.table_pages_unknown": "a page table with pages of an unknown size",
        [libc::EFAULT; 2], with("nvidia", "table_page_size", "3");
    row "input.table_entry_too_many": "a page table with one entry too many",
        [libc::EFAULT; 2], with("nvidia", "table_entries_delta", "1");
    row "input.table_entry_too_few": "a page table with one entry too few",
        [libc::EFAULT; 2], with("nvidia", "table_entries_delta", "-1");
    row "input.table_flags_unknown": "a page table with flags that nobody knows",
        [REGISTERS; 2], with_flags("0xfffffffe");
    row "input.table_cacheable": "a page table of memory that CPUs cache", [REGISTERS; 2], cacheable;
    row_of_a_stranger "input.mapping_version_3_0": "a DMA mapping of version 3.0",
        [libc::EINVAL, REGISTERS], with("nvidia", "dma_mapping_version", "0x00030000");
    row "input.mapping_version_2_4": "a DMA mapping of version 2.4",
        [REGISTERS; 2], with("nvidia", "dma_mapping_version", "0x00020004");
    row_of_a_stranger "input.mapping_version_2_2": "a DMA mapping of version 2.2",
        [libc::EINVAL, REGISTERS], with("nvidia", "dma_mapping_version", "0x00020002");
    row_of_a_stranger "input.mapping_entry_too_many": "a DMA mapping with one entry too many",
        [libc::EINVAL, REGISTERS], with("nvidia", "dma_entries_delta", "1");
    row_of_a_stranger "input.mapping_entry_too_few": "a DMA mapping with one entry too few",
        [libc::EINVAL, REGISTERS], with("nvidia", "dma_entries_delta", "-1");
    row "input.fork_safe": "RDMAV_FORK_SAFE=1 (bytes are moved)", [REGISTERS; 2], fork_safe;
    row "input.container": "a container: sysfs read-only, no debugfs (as above)",
        [REGISTERS; 2], container(&["--mount"]);
    in_user_namespace "input.user_namespace": "the same in a user namespace",
        [REGISTERS; 2], container(&["--user", "--map-root-user", "--mount"]);
];

/// A row of the document.
#[derive(Clone, Copy)]
struct Input<'a> {
    text: &'a str,
    /// The application's result with our module, in persistent and in revocable mode.
    expected: [i32; 2],
    provoke: &'a dyn Fn(&Lab, &mut Row) -> Result<()>,
}

#[derive(Debug, PartialEq, Eq)]
struct Seen {
    /// Result in the application: an errno, or [`REGISTERS`].
    errno: i32,
    asked: u64,
    pinned: u64,
    unpinned: u64,
}

/// The attempts of one row of the document, which must all have the same result.
struct Row {
    log: KernelLog,
    begun: Instant,
    seen: Vec<Seen>,
}

impl Row {
    /// Watches one attempt. `attempt` returns the result in the application.
    fn attempt(&mut self, attempt: impl FnOnce() -> Result<i32>) -> Result<()> {
        let before = Counters::read()?;
        let errno = attempt()?;
        let activity = Counters::read()?.activity(&before)?;
        self.seen.push(Seen {
            errno,
            asked: activity.attempts,
            pinned: activity.pins,
            unpinned: activity.unpins,
        });
        Ok(())
    }

    /// Registers `span` in this process, and deregisters it.
    fn register(&mut self, lab: &Lab, span: Span) -> Result<()> {
        self.attempt(|| Ok(errno_of(lab.near.reg_mr(span))))
    }
}

/// Returns the application's errno, or [`REGISTERS`].
pub(super) fn errno_of<R>(result: Result<R, Refused>) -> i32 {
    match result {
        Ok(_) => REGISTERS,
        Err(refused) => refused.errno(),
    }
}

/// Returns the document's word for a result.
fn word(errno: i32) -> String {
    match errno {
        REGISTERS => "registers".to_owned(),
        refused => errno_name(refused),
    }
}

/// Returns a log line of the module without its variable parts.
fn shape(line: &str) -> String {
    let mut words: Vec<&str> = Vec::new();
    for word in line.split(' ') {
        words.push(match words.last() {
            _ if word.starts_with("0x") && word.contains("+0x") => "ADDRESS+LENGTH",
            Some(&"process") if word.bytes().all(|byte| byte.is_ascii_digit()) => "PID",
            _ => word,
        });
    }
    words.join(" ")
}

/// Runs the attempts of a row, prints the result, and checks that nothing leaks.
fn row(lab: &Lab, input: Input<'_>) -> Result<()> {
    module_for(lab, input)?;
    lab.first_registrations()?;
    row_of_this_module(lab, input)
}

/// Runs a row in which the module asks nvidia.ko for the first time whether the HCA reaches the
/// GPU.
fn row_of_a_stranger(lab: &Lab, input: Input<'_>) -> Result<()> {
    module_for(lab, input)?;
    row_of_this_module(lab, input)
}

fn module_for(lab: &Lab, input: Input<'_>) -> Result<()> {
    note("input", input.text);
    lab.needs_module()?;
    Replaced::begin()?.end()
}

fn row_of_this_module(lab: &Lab, input: Input<'_>) -> Result<()> {
    let mut row = Row {
        log: KernelLog::from_now()?,
        begun: Instant::now(),
        seen: Vec::new(),
    };
    (input.provoke)(lab, &mut row)?;

    let first = row.seen.first().context("nothing was attempted")?;
    note("application", word(first.errno));
    let Seen {
        asked,
        pinned,
        unpinned,
        ..
    } = first;
    let calls = format_args!("{asked} asked, {pinned} pinned, {unpinned} unpinned");
    note("provider", calls);
    ensure!(row.seen.iter().all(|seen| seen == first), "{:?}", row.seen);
    ensure!(pinned == unpinned);
    if lab.setup.peermem == Peermem::Ours {
        let lines = row.log.of_module()?;
        for line in &lines {
            note("log", shape(line));
        }
        let [persistent, revocable] = input.expected;
        let expected = match lab.setup.mode() {
            PinMode::Persistent => persistent,
            PinMode::Revocable => revocable,
        };
        ensure!(
            first.errno == expected,
            "the application got {} where {} was expected",
            word(first.errno),
            word(expected)
        );
        // The module logs its own refusals, with at most one line for a cause in a minute. The
        // module logs neither ib_core's refusals nor successes.
        let said = lines.len() as u64;
        ensure!(said <= 1 + row.begun.elapsed().as_secs() / 60);
    }
    // Checks that everything works as before.
    let memory = lab.allocate_gpu(M2)?;
    lab.near.reg_mr(memory.span(0, M2)?).context("afterwards")?;
    module::references_are(0).context("afterwards")
}

/// Runs a row that NVIDIA's nvidia-peermem does not survive.
fn ours_only(lab: &Lab, input: Input<'_>) -> Result<()> {
    if lab.setup.peermem == Peermem::Nvidia {
        note("input", input.text);
        return ktap::skip("NVIDIA's module takes any device for a PCI device");
    }
    row(lab, input)
}

fn in_user_namespace(lab: &Lab, input: Input<'_>) -> Result<()> {
    if !Path::new("/proc/self/ns/user").exists() {
        note("input", input.text);
        return ktap::skip("this kernel has no user namespaces");
    }
    row(lab, input)
}

/// Makes a valid registration while a module parameter is set.
fn with(
    module: &'static str,
    name: &'static str,
    value: &'static str,
) -> impl Fn(&Lab, &mut Row) -> Result<()> {
    move |lab, row| {
        let memory = lab.allocate_gpu(M2)?;
        let _parameter = Parameter::set(module, name, value)?;
        row.register(lab, memory.span(0, M2)?)
    }
}

fn with_flags(flags: &'static str) -> impl Fn(&Lab, &mut Row) -> Result<()> {
    move |lab, row| {
        // Older tables have no flags.
        let _version = Parameter::set("nvidia", "table_version", "0x00020000")?;
        with("nvidia", "table_flags", flags)(lab, row)
    }
}

/// Makes two registrations. The revocable client leaves both registrations to the persistent
/// client, and the log warns once.
fn cacheable(lab: &Lab, row: &mut Row) -> Result<()> {
    let log = KernelLog::from_now()?;
    for _ in 0..2 {
        with_flags("1")(lab, row)?;
    }
    if lab.setup.peermem == Peermem::Ours {
        let lines = log.of_module()?;
        let words = "what it registers is not revoked";
        let said = lines.iter().filter(|line| line.contains(words)).count();
        let expected = usize::from(lab.setup.mode() == PinMode::Revocable);
        ensure!(said == expected, "{said} lines, not {expected}: {lines:?}");
    }
    Ok(())
}

fn host_memory(lab: &Lab, row: &mut Row) -> Result<()> {
    let memory = Mapping::anonymous(M2)?;
    row.register(lab, memory.span(0, M2)?)
}

fn host_addresses(lab: &Lab, row: &mut Row) -> Result<()> {
    let memory = Mapping::reserve(M2)?;
    row.register(lab, memory.span(0, M2)?)
}

fn nobodys(lab: &Lab, row: &mut Row) -> Result<()> {
    let addr = sys::free_address(4 * GRANULE, GRANULE)?;
    row.register(lab, Span::anywhere(addr, GRANULE)?)?;
    row.register(lab, Span::anywhere(addr + 4097, 1)?)
}

fn kernels(lab: &Lab, row: &mut Row) -> Result<()> {
    for addr in [0xffff_8880_0000_0000, 0x8000_0000_0000_0000] {
        row.register(lab, Span::anywhere(addr, GRANULE)?)?;
    }
    Ok(())
}

/// Runs `attempt`, which returns an errno, in a forked child.
pub(super) fn in_child(name: &str, attempt: impl FnOnce(&Hca) -> Result<i32>) -> Result<i32> {
    const FAILED: i32 = 255;
    let name = name.to_owned();
    let status = sys::in_forked_child(move || {
        Hca::open(&name)
            .and_then(|hca| attempt(&hca))
            .unwrap_or_else(|error| {
                eprintln!("forked child: {error:#}");
                FAILED
            })
    })?;
    ensure!(status != FAILED, "the forked child failed");
    Ok(status)
}

/// Registers addresses at which another live process has GPU memory.
fn another_process(lab: &Lab, row: &mut Row) -> Result<()> {
    let addr = sys::free_address(GRANULE, GRANULE)?;
    let owner = Process::start(&lab.setup, lab.setup.seed, &["own", &addr.to_string()])?;
    row.register(lab, Span::anywhere(addr, GRANULE)?)?;
    owner.join()
}

fn before_the_fork(lab: &Lab, row: &mut Row) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    let addr = memory.mapping().addr();
    let region = lab.near.reg_mr(memory.span(0, M2)?)?;
    row.attempt(|| {
        in_child(lab.near.name(), |hca| {
            Ok(errno_of(hca.reg_mr(Span::anywhere(addr, GRANULE)?)))
        })
    })?;
    drop(region);
    Ok(())
}

fn freed(lab: &Lab, row: &mut Row) -> Result<()> {
    let mut memory = lab.allocate_gpu(M2)?;
    lab.near.reg_mr(memory.span(0, M2)?)?;
    memory.free()?;
    row.register(lab, memory.span(0, M2)?)
}

fn freed_and_unmapped(lab: &Lab, row: &mut Row) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    let span = memory.span(0, M2)?;
    lab.near.reg_mr(span)?;
    drop(memory);
    row.register(lab, Span::anywhere(span.addr(), span.len())?)
}

fn half_freed(lab: &Lab, row: &mut Row) -> Result<()> {
    let mut memory = Adjacent::on_one_gpu(lab, &[1, 1])?;
    memory.parts[1].free()?;
    row.register(lab, memory.span(0, 2 * M2)?)?;
    row.register(lab, memory.span(M2 - 1, 2)?)
}

/// Registers an allocation whose first half is unmapped. nvidia.ko knows allocations, but not
/// mappings.
fn half_unmapped(lab: &Lab, row: &mut Row) -> Result<()> {
    let addr = sys::free_address(2 * GRANULE, GRANULE)?;
    let mut memory = lab.gpu(0)?.allocate(2 * M2, Placement::At(addr))?;
    memory.unmap_head(M2)?;
    row.register(lab, Span::anywhere(addr + GRANULE, GRANULE)?)?;
    row.register(lab, Span::anywhere(addr, 2 * GRANULE)?)
}

fn over_the_end(lab: &Lab, row: &mut Row) -> Result<()> {
    // Reserves address space behind the allocation, so that nothing else lies there.
    let addr = sys::free_address(3 * GRANULE, GRANULE)?;
    let memory = lab.gpu(0)?.allocate(M2, Placement::At(addr))?;
    for (addr, len) in [
        (addr, GRANULE + 1),
        (addr + GRANULE - 1, 2),
        (addr, 2 * GRANULE),
    ] {
        row.register(lab, Span::anywhere(addr, len)?)?;
    }
    lab.near.reg_mr(memory.span(M2 - 1, 1)?)?;
    Ok(())
}

/// Registers two adjacent allocations as one region and separately.
fn two_allocations(lab: &Lab, row: &mut Row) -> Result<()> {
    let memory = Adjacent::on_one_gpu(lab, &[1, 1])?;
    row.register(lab, memory.span(0, 2 * M2)?)?;
    row.register(lab, memory.span(M2 - 1, 2)?)?;
    for part in &memory.parts {
        lab.near.reg_mr(part.span(0, M2)?)?;
    }
    Ok(())
}

fn length_zero(lab: &Lab, row: &mut Row) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    row.register(lab, memory.span(0, 0)?)
}

fn wrapping(lab: &Lab, row: &mut Row) -> Result<()> {
    for (behind, len) in [(4095, 4096), (4095, 8192), (65535, 65535)] {
        row.register(lab, Span::anywhere(u64::MAX - behind, len)?)?;
    }
    Ok(())
}

const TIB: u64 = 1 << 40;
/// Number of pages that overflows ib_core's 32-bit count.
const PAGES: u64 = 1 << 32;

/// Returns an address with [`PAGES`] free pages after it, and the page size. If pages have 4 KiB,
/// the range is below all mappings of a small program. If pages have 64 KiB, the range is above the
/// addresses that the kernel chooses.
fn free_pages() -> Result<(u64, u64)> {
    let page = sys::page_size();
    Ok((PAGES * page, page))
}

fn too_long(lab: &Lab, row: &mut Row) -> Result<()> {
    let (start, page) = free_pages()?;
    for len in [2 * TIB, (PAGES - 1) * page] {
        row.register(lab, Span::anywhere(start, len)?)?;
    }
    Ok(())
}

fn too_many_pages(lab: &Lab, row: &mut Row) -> Result<()> {
    let (start, page) = free_pages()?;
    row.register(lab, Span::anywhere(start, PAGES * page)?)
}

fn full_bar1(lab: &Lab, row: &mut Row) -> Result<()> {
    let gpu = lab.gpu(0)?;
    let kept = (gpu.bar_len() >> 20) - 4;
    let _reserve = Parameter::set("nvidia", "bar1_reserve_mib", &kept.to_string())?;
    let memory = gpu.allocate(3 * M2, Placement::Any)?;
    let _first = lab.near.reg_mr(memory.span(0, M2)?)?;
    let second = lab.near.reg_mr(memory.span(M2, M2)?)?;
    let last = memory.span(2 * M2, M2)?;
    row.register(lab, last)?;
    drop(second);
    lab.near.reg_mr(last).context("with room made")?;
    Ok(())
}

/// ID of a user without an entry in any system file. The attempt does not run as root, because root
/// has no limit on locked memory.
const NOBODY: u32 = 54_322;

fn memlock(bytes: u64) -> impl Fn(&Lab, &mut Row) -> Result<()> {
    move |lab, row| {
        let gpu = lab.gpu(0)?;
        let attempt = |lifted| {
            in_child(lab.near.name(), |hca| {
                let memory = gpu.allocate(M2, Placement::Any)?;
                let span = memory.span(0, M2)?;
                sys::limit_locked_memory(Some(bytes))?;
                sys::become_user(NOBODY)?;
                let errno = errno_of(hca.reg_mr(span));
                if lifted {
                    sys::lock_any_memory()?;
                    hca.reg_mr(span).context("with the limit lifted")?;
                }
                Ok(errno)
            })
        };
        row.attempt(|| attempt(false))?;
        attempt(true).map(drop)
    }
}

/// Runs a process that registers on both sides, moves bytes and compares them.
fn exercise(row: &mut Row, start: impl FnOnce(&[&str]) -> Result<Process>) -> Result<()> {
    row.attempt(|| {
        start(&["exercise", "1"])?.join()?;
        Ok(REGISTERS)
    })
}

fn fork_safe(lab: &Lab, row: &mut Row) -> Result<()> {
    exercise(row, |role| {
        let mut command = Command::new(std::env::current_exe()?);
        command.env("RDMAV_FORK_SAFE", "1");
        Process::start_as(command, &lab.setup, lab.setup.seed, role)
    })
}

fn container(namespaces: &'static [&str]) -> impl Fn(&Lab, &mut Row) -> Result<()> {
    // A process in a user namespace cannot unmount an earlier mount, but can mount over it.
    const ENTER: &str =
        "mount -t tmpfs none /sys/kernel/debug && mount -o remount,bind,ro /sys && \
                         ! [ -e /sys/kernel/debug/nvidia ] && \
                         ! touch /sys/module/nvidia_peermem/uevent 2>/dev/null && exec \"$@\"";
    move |lab, row| {
        exercise(row, |role| {
            let mut command = Command::new("unshare");
            command
                .args(namespaces)
                .args(["sh", "-c", ENTER, "sh"])
                .arg(std::env::current_exe()?);
            Process::start_as(command, &lab.setup, lab.setup.seed, role)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_loses_its_addresses_and_processes() {
        assert_eq!(
            shape("nvidia-peermem: refused 0x7f00+0x10000 of process 47 in acquire: version 0x3 of process x"),
            "nvidia-peermem: refused ADDRESS+LENGTH of process PID in acquire: version 0x3 of process x"
        );
    }
}
