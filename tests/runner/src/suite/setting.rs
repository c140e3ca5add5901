// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Settings of a run's VM that depend on its kernel or on its other options.

use anyhow::{bail, Error, Result};
use clap::ValueEnum as _;

use crate::arch::Arch;
use crate::{kernel, vm};

/// Applies a setting, which is a word that begins with `@` in the suite's table.
pub(super) fn apply(word: &str, vm: &mut vm::Options) -> Result<()> {
    let (name, values) = word.split_once('=').unwrap_or((word, ""));
    match name {
        "@coherent" => coherent(vm),
        "@dma" => dma(vm, values)?,
        "@host-2-is-lost" => vm.host_2_is_lost = true,
        "@kunit" => kunit(vm),
        _ => bail!("no such setting: {word}"),
    }
    Ok(())
}

/// Adds RAM that imitates the memory of coherent GPUs. One part is hidden from the kernel, like
/// memory that the driver keeps to itself. The other part is movable RAM, like memory that the
/// driver gives to the kernel.
fn coherent(vm: &mut vm::Options) {
    const MIB: u32 = 128;
    vm.mem += MIB + 512;
    let (reserved, start) = match vm.arch() {
        Arch::X86_64 => (format!("memmap={MIB}M$0x60000000"), 0x6000_0000),
        // On arm64, RAM begins at 1 GiB, and the kernel can leave out only the end of its RAM.
        Arch::Arm64 => {
            let kept = vm.mem - MIB;
            (format!("mem={kept}M"), u64::from(1024 + kept) << 20)
        }
    };
    vm.append.push(format!("{reserved} movablecore=512M"));
    vm.gpu_param
        .push(format!("coherent_start={start:#x} coherent_mib={MIB}"));
}

/// Leaves out the modules and devices that the KUnit tests replace by fakes.
fn kunit(vm: &mut vm::Options) {
    vm.peermem = vm::Peermem::None;
    if kernel::flavour(&vm.kernel).is_none_or(|flavour| flavour.pristine_rdma) {
        vm.rdma = vm::Rdma::Stock;
    }
    vm.gpus = 0;
    vm.kunit = true;
    vm.append.push("kunit.enable=1 kunit.autorun=1".to_owned());
    // The slab allocator detects uses of freed memory.
    vm.append.push("slub_debug=FZP".to_owned());
}

/// Sets up a VM for DMA by emulated devices, with both modes available. `values` are the IOMMU, the
/// number of refused reads and the number of refused writes.
fn dma(vm: &mut vm::Options, values: &str) -> Result<()> {
    let values: Vec<&str> = values.split(',').collect();
    let [iommu, reads, writes] = values[..] else {
        bail!("not three values");
    };
    vm.iommu = vm::Iommu::from_str(iommu, false).map_err(Error::msg)?;
    let (reads, writes): (usize, usize) = (reads.parse()?, writes.parse()?);
    vm.nvme = Some(64);
    // Allows registrations of more than 4 GiB.
    vm.bar = 8 * 1024;
    // Allows commands of 4 MiB, whose address lists continue in a second page.
    vm.qemu_arg
        .extend(["-global", "nvme.mdts=10"].map(str::to_owned));
    if vm.peermem == vm::Peermem::Ours {
        vm.param.push("persistent_api_support=0".to_owned());
    }
    let reports: &[(&str, usize)] = match vm.arch() {
        Arch::X86_64 => &[
            (r"DMAR: DRHD: handling fault", reads + writes),
            (r"DMAR: \[DMA Read NO_PASID\]", reads),
            (r"DMAR: \[DMA Write NO_PASID\]", writes),
        ],
        Arch::Arm64 => &[
            (r"arm-smmu-v3 \S+: (un)?priv data read s1", reads),
            (r"arm-smmu-v3 \S+: (un)?priv data write s1", writes),
        ],
    };
    for (pattern, count) in reports {
        vm.expect.push(format!("{pattern}={count}").parse()?);
    }
    Ok(())
}
