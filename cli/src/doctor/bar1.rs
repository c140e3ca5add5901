// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Size of BAR1, the PCI window through which a NIC reaches GPU memory, and the largest size that
//! the GPU supports.

use super::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::machine::config::Resizable;
use crate::machine::pci::{Bar, Function};
use crate::machine::{is_bar1, Gpu};
use crate::render::bytes;

check! {
    "bar1": "size of the GPU's BAR1, and whether it can be larger",
    |scan| scan.has_pci_gpu(), bar1, OnPaths(tests::FAULTS)
}

/// Firmware and kernel settings that make room for BARs.
pub(super) const ROOM: &str = "Turn on \"Above 4G Decoding\" (\"Memory Mapped I/O above 4 GB\", \"MMIO High Size\") \
     in the setup of the firmware or of the virtual machine, or boot with pci=realloc; `dmesg | grep -i -e 'BAR.*no \
     space' -e 'failed to assign'` shows the kernel's messages";

/// Returns NVIDIA's name or the PCI number of a BAR, with the BAR's size.
fn named(bar: &Bar) -> String {
    let name = match is_bar1(bar) {
        true => "BAR1".to_owned(),
        false => format!("BAR {} of PCI", bar.index),
    };
    format!("{name} ({})", bytes(bar.size))
}

/// Usual size of BAR1 on GPUs whose BAR1 covers only a part of the memory, in bytes.
const SMALL: u64 = 256 << 20;

fn bar1(scan: &Scan<'_>) -> Vec<Finding> {
    scan.pci_gpus().map(|gpu| of_gpu(scan, gpu)).collect()
}

fn of_gpu(scan: &Scan<'_>, gpu: &Gpu) -> Finding {
    let function = scan.machine.functions.get(&gpu.at);
    if let Some(Err(why)) = function.map(|function| &function.bars) {
        let what = format!("the BARs of {}", gpu.at);
        return Scan::unseen(Subject::gpu(gpu), what, why);
    }
    let unassigned: Vec<String> = function
        .into_iter()
        .flat_map(Function::unassigned)
        .map(named)
        .collect();
    if !unassigned.is_empty() {
        let found = format!("{} has no address for {}", gpu.at, unassigned.join(", "));
        return Subject::gpu(gpu).fault(found)
            .why(
                "The firmware or the kernel found no room for the BAR. No NIC reaches memory behind such a BAR, and \
                 nvidia.ko does not drive the GPU.",
            )
            .fix(ROOM);
    }
    let Some(bar) = gpu.bar1 else {
        let found = format!(
            "{} has no BAR1 (no BAR that is 64-bit and prefetchable)",
            gpu.at
        );
        return Subject::gpu(gpu).fault(found)
            .why("A NIC can only reach memory that is behind a BAR. The firmware omits a BAR for which it has no \
                room.")
            .fix(ROOM);
    };
    let larger = function.and_then(|function| resizable(function, bar.index));
    let could = larger.filter(|can| can.sizes.last().is_some_and(|most| *most > bar.size));
    let could_be = match &could {
        Some(can) => format!(
            ", and can be {}",
            bytes(can.sizes.last().copied().unwrap_or(0))
        ),
        None => String::new(),
    };
    let nvml = scan.software().nvml.as_ref().ok();
    let memory = nvml.and_then(|nvml| nvml.gpu(gpu.at)?.memory_total_bytes);
    if bar.size > SMALL {
        // The size of a BAR is a power of two. The memory that NVML reports is slightly smaller
        // than the GPU's nominal memory, and fits into a BAR of the nominal size.
        if let Some(memory) = memory.filter(|memory| *memory > bar.size) {
            let found = format!(
                "BAR1 is {}{could_be}, but the GPU has {} of memory",
                bytes(bar.size),
                bytes(memory)
            );
            return Subject::gpu(gpu)
                .note(found)
                .why("All processes together can register no more than the size of BAR1 at once.")
                .fix(enlarge(could.is_some()));
        }
        let found = format!("BAR1 is {}{could_be}", bytes(bar.size));
        return match could {
            Some(_) => Subject::gpu(gpu)
                .note(found)
                .why("With a larger BAR1, programs could register more memory at once.")
                .fix(enlarge(true)),
            None => Subject::gpu(gpu).ok(found),
        };
    }
    Subject::gpu(gpu).warning(format!("BAR1 is {}{could_be}", bytes(bar.size)))
        .why(
            "All processes together can register no more than the size of BAR1 at once, and nvidia.ko keeps a part \
             of BAR1. Further registrations fail with ENOMEM or EFAULT.",
        )
        .costs("On such GPUs, others have seen registrations above about 200 MB fail (nv_peer_memory#101, UCX#8049).")
        .fix(enlarge(could.is_some()))
}

/// Returns the Resizable BAR capability of the BAR with this index. Returns `None` if the
/// capability is absent or not visible.
fn resizable(function: &Function, index: usize) -> Option<Resizable> {
    let bars = function.config().ok()?.resizable().ok()?;
    bars.into_iter().find(|bar| bar.bar == index)
}

/// Returns the fix for a small BAR1. `can` is `true` if the firmware can enlarge BAR1.
pub(super) fn enlarge(can: bool) -> &'static str {
    match can {
        true => "Turn on \"Re-Size BAR Support\" and \"Above 4G Decoding\" in the firmware's setup",
        false => {
            "On A40, L40, RTX A6000 and similar GPUs, NVIDIA's `displaymodeselector --gpumode \
             physical_display_disabled` enlarges BAR1. Other GPUs have no larger BAR1: register less at once."
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, FIRST};
    use crate::fixture::Pci;
    use crate::machine::config::Config;

    faults! {
        "a BAR1 of 256 MiB", "warning bar1: …BAR1 is 256 MiB… fix …displaymodeselector" =>
            |fixture| fixture.machine.gpus[0].bar1.as_mut().unwrap().size = 256 << 20;
        "a BAR1 of 256 MiB that can be larger",
            "warning bar1: …BAR1 is 256 MiB, and can be 32 GiB… fix …Re-Size BAR" => |fixture| {
            fixture.machine.gpus[0].bar1.as_mut().unwrap().size = 256 << 20;
            // BAR 2 supports 256 MiB and 32 GiB, and is set to 256 MiB.
            let gpu = Pci {
                resizable: Some((2, (1 << 8) | (1 << 15), 8)),
                ..Pci::h100(0)
            };
            fixture.function(socket(FIRST).gpu).config = Ok(Config(gpu.config()));
        };
        "no BAR1", "fault bar1: …has no BAR1… fix …Above 4G Decoding" => |fixture| fixture.machine.gpus[0].bar1 = None;
    }
}
