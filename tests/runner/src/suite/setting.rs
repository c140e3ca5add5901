// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Settings of a run's VM.

use crate::arch::Arch;
use crate::{topology, vm};

/// A setting of a VM. Later settings of a run override earlier ones.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Setting {
    /// Several settings.
    All(&'static [Setting]),
    /// Kernel parameters.
    Append(&'static str),
    /// Size of each GPU's BAR, in MiB.
    Bar(u64),
    Bench,
    Beside,
    Build(vm::Build),
    /// RAM that serves as the memory of coherent GPUs.
    Coherent,
    /// Real DMA behind this IOMMU, which refuses these numbers of reads and writes.
    Dma(vm::Iommu, [usize; 2]),
    /// A report that must occur this often: `REGEX=COUNT`.
    Expect(&'static str),
    Faults,
    /// Parameters of the stand-in GPU's driver.
    Gpu(&'static str),
    Gpus(u32),
    Host2IsLost,
    /// Parameters of ib_core's peer memory.
    Ib(&'static str),
    Icount,
    Iommu(vm::Iommu),
    Kernel(&'static str),
    /// The KUnit tests. These tests use fakes for everything that the VM leaves out.
    Kunit,
    /// Memory of the VM, in MiB.
    Memory(u32),
    MemoryPeers,
    NoGplOnly,
    Pair,
    /// Parameters of the peer-memory module.
    Param(&'static str),
    Peermem(vm::Peermem),
    Provider(vm::Provider),
    Rdma(vm::Rdma),
    /// Parameters of rdma_rxe.
    Rxe(&'static str),
    Signed,
    Smp(u32),
    /// Time limit, in seconds.
    Timeout(u64),
    Topology(topology::Topology),
    WithControl,
}

impl Setting {
    /// Applies the setting. The VM's kernel must be set before, because some settings depend on its
    /// architecture.
    pub(super) fn apply(self, vm: &mut vm::Options) {
        match self {
            Self::All(settings) => settings.iter().for_each(|setting| setting.apply(vm)),
            Self::Append(words) => vm.append.push(words.to_owned()),
            Self::Bar(mib) => vm.bar = mib,
            Self::Bench => vm.bench = true,
            Self::Beside => vm.beside = true,
            Self::Build(build) => vm.build = Some(build),
            Self::Coherent => coherent(vm),
            Self::Dma(iommu, refused) => dma(vm, iommu, refused),
            // If an expectation cannot be parsed, it is left out, and the undeclared report fails
            // the run.
            Self::Expect(report) => vm.expect.extend(report.parse()),
            Self::Faults => vm.faults = true,
            Self::Gpu(values) => vm.gpu_param.push(values.to_owned()),
            Self::Gpus(number) => vm.gpus = number,
            Self::Host2IsLost => vm.host_2_is_lost = true,
            Self::Ib(values) => vm.ib_param.push(values.to_owned()),
            Self::Icount => vm.icount = true,
            Self::Iommu(iommu) => vm.iommu = iommu,
            Self::Kernel(name) => name.clone_into(&mut vm.kernel),
            Self::Kunit => kunit(vm),
            Self::Memory(mib) => vm.mem = mib,
            Self::MemoryPeers => vm.memory_peers = true,
            Self::NoGplOnly => vm.no_gpl_only = true,
            Self::Pair => vm.pair = true,
            Self::Param(values) => vm.param.push(values.to_owned()),
            Self::Peermem(peermem) => vm.peermem = peermem,
            Self::Provider(provider) => vm.provider = provider,
            Self::Rdma(rdma) => vm.rdma = rdma,
            Self::Rxe(values) => vm.rxe_param.push(values.to_owned()),
            Self::Signed => vm.signed = true,
            Self::Smp(number) => vm.smp = number,
            Self::Timeout(seconds) => vm.timeout = Some(seconds),
            Self::Topology(topology) => vm.topology = topology,
            Self::WithControl => vm.with_control = true,
        }
    }
}

/// Reserves RAM for a driver that keeps it to itself. Also adds RAM with movable pages, for a
/// driver that gives the memory to the kernel.
fn coherent(vm: &mut vm::Options) {
    const MIB: u32 = 128;
    vm.mem += MIB + 512;
    let (reserved, start) = match vm.arch() {
        Arch::X86_64 => (format!("memmap={MIB}M$0x60000000"), 0x6000_0000),
        // arm64 can only leave out the end of its memory, which begins at 1 GiB.
        Arch::Arm64 => {
            let kept = vm.mem - MIB;
            (format!("mem={kept}M"), u64::from(1024 + kept) << 20)
        }
    };
    vm.append.push(format!("{reserved} movablecore=512M"));
    vm.gpu_param
        .push(format!("coherent_start={start:#x} coherent_mib={MIB}"));
}

/// Leaves out everything for which the KUnit tests have fakes.
fn kunit(vm: &mut vm::Options) {
    vm.peermem = vm::Peermem::None;
    // Kernels for other architectures have no stock modules.
    vm.rdma = match vm.arch() {
        Arch::X86_64 => vm::Rdma::Stock,
        Arch::Arm64 => vm::Rdma::Patched,
    };
    vm.gpus = 0;
    vm.kunit = true;
    vm.append.push("kunit.enable=1 kunit.autorun=1".to_owned());
    // Detects uses of freed memory.
    vm.append.push("slub_debug=FZP".to_owned());
}

/// Sets up a VM for real DMA, with both modes available.
fn dma(vm: &mut vm::Options, iommu: vm::Iommu, [reads, writes]: [usize; 2]) {
    vm.iommu = iommu;
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
        vm.expect.extend(format!("{pattern}={count}").parse());
    }
}
