// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The settings of a VM, which are also the options of `runner vm`.

use std::path::PathBuf;

use anyhow::Result;
use clap::builder::ArgPredicate;
use clap::{Args, Parser as _, ValueEnum};

use crate::arch::Arch;
use crate::klog;
use crate::topology::Topology;

/// A value of an option, with its name on the command line.
pub(crate) trait Named: ValueEnum {
    fn name(&self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl<T: ValueEnum> Named for T {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peermem {
    /// The module of this repository
    Ours,
    /// NVIDIA's nvidia-peermem, unchanged
    Nvidia,
    /// No module: the library of preload/ registers GPU memory by dma-buf, on an ib_core without peer memory
    Preload,
    /// No peer-memory module
    None,
}

impl Peermem {
    /// Returns `true` if the VM loads a module.
    pub(crate) fn is_module(self) -> bool {
        matches!(self, Self::Ours | Self::Nvidia)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Provider {
    /// The stand-in's own code, which behaves as driver 595
    Ours,
    /// NVIDIA's own nv-p2p.c of driver 550, over the stand-in's resource manager
    Nvidia,
    /// NVIDIA's own nv-p2p.c of driver 555, over the stand-in's resource manager
    Nvidia555,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rdma {
    /// ib_core and rxe with peer memory
    Patched,
    /// ib_core and rxe as in the kernel's source
    Stock,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Iommu {
    /// No IOMMU
    Off,
    /// An IOMMU that passes addresses through
    Pt,
    /// An IOMMU that translates; the kernel unmaps lazily
    On,
    /// An IOMMU that translates; the kernel unmaps at once
    Strict,
}

/// How this repository's module is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Build {
    /// Against the kernel's own `kernel` crate
    InTree,
    /// One object of the Rust code for all kernels, linked with the C files by the kernel's makefiles
    Portable,
}

/// Options of a VM.
#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// Peer-memory module to load
    #[arg(long, value_enum, default_value = "ours")]
    pub(crate) peermem: Peermem,
    /// Code that pins GPU memory in nvidia.ko
    #[arg(long, value_enum, default_value = "nvidia")]
    pub(crate) provider: Provider,
    /// RDMA modules to load
    #[arg(long, value_enum, default_value = "patched")]
    pub(crate) rdma: Rdma,
    /// Parameter of the peer-memory module
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) param: Vec<String>,
    /// Parameter of rdma_rxe
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) rxe_param: Vec<String>,
    /// Parameter of the stand-in GPU's driver
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) gpu_param: Vec<String>,
    /// Parameter of ib_core's peer memory
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) ib_param: Vec<String>,
    /// Makes ib_core show its clients in memory_peers, as OFED's does on kernels before 6.4
    #[arg(long)]
    pub(crate) memory_peers: bool,
    /// Memory of the VM
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    pub(crate) mem: u32,
    /// Boots two VMs, hosts 1 and 2, with a wire between them, and runs the command on both. In the command's environment,
    /// TESTVM_HOST is 1 or 2, and TESTVM_PEER is the address of the other host (tests/runner/README.md, Two hosts)
    #[arg(long)]
    pub(crate) pair: bool,
    /// Host 2's command powers its VM off, and host 1 continues (--pair)
    #[arg(skip)]
    pub(crate) host_2_is_lost: bool,
    /// Number of this VM in a pair
    #[arg(skip)]
    pub(crate) host_number: Option<u32>,
    /// Number of processors: one by default with --pair, and always one with Debian's stock kernels
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        default_value_if("pair", ArgPredicate::Equals("true".into()), "1")
    )]
    pub(crate) smp: u32,
    /// Number of GPUs, 0 to 8
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=8))]
    pub(crate) gpus: u32,
    /// Size of each GPU's BAR, a power of two
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub(crate) bar: u64,
    /// IOMMU of the VM
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) iommu: Iommu,
    /// Bridges between the GPUs and the NICs; all but flat need --kernel 7.2, which has NUMA and extended config
    /// space
    #[arg(long, value_enum, default_value = "flat")]
    pub(crate) topology: Topology,
    /// Adds an NVMe controller with a disk of this size
    #[arg(long, value_name = "MIB")]
    pub(crate) nvme: Option<u64>,
    /// Architecture of the VM; it chooses the kernel if --kernel is not given
    #[arg(long, value_enum, default_value = "x86-64")]
    pub(crate) arch: Arch,
    /// A kernel of the test VM by name; the VM has the kernel's architecture
    #[arg(
        long,
        value_name = "FLAVOUR",
        default_value = crate::kernel::DEFAULT,
        default_value_if("arch", "arm64", crate::kernel::ARM64),
        default_value_if("peermem", "preload", crate::kernel::DMABUF)
    )]
    pub(crate) kernel: String,
    /// Build of our module [default: in-tree if the kernel supports Rust]
    #[arg(long, value_enum)]
    pub(crate) build: Option<Build>,
    /// Uses the portable build that needs no GPL-only symbols; only this build loads with
    /// --gpu-param proprietary=1
    #[arg(long)]
    pub(crate) no_gpl_only: bool,
    /// Directory that becomes the VM's root, read-only; the host's files are in /host, as always. A VM of another
    /// architecture has a Debian root by default
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
    /// Additional arguments for the kernel
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub(crate) append: Vec<String>,
    /// Additional argument for QEMU
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub(crate) qemu_arg: Vec<String>,
    /// Time limit of the run, in seconds; 0 means none [default: 7200 with a command, 0 without]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
    /// Report that must be in the kernel log exactly COUNT times, or MIN-MAX times, and that does
    /// not fail the run
    #[arg(long, value_name = "REGEX=COUNT")]
    pub(crate) expect: Vec<klog::Expectation>,
    /// File for the kernel log [default: in the cache]
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// Variable in the command's environment
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Loads a module that makes calls of the kernel fail on request (tests/interpose)
    #[arg(long)]
    pub(crate) interpose: bool,
    /// Adds the module of the KUnit tests, and leaves loading it to the command (tests/vm/kunit)
    #[arg(long)]
    pub(crate) kunit: bool,
    /// Loads a module that measures the peer-memory module (tests/bench)
    #[arg(long)]
    pub(crate) bench: bool,
    /// The VM's clock counts instructions, one per nanosecond; needs --smp 1
    #[arg(long)]
    pub(crate) icount: bool,
    /// Applies this patch of tests/mutants to our module
    #[arg(long, value_name = "NAME")]
    pub(crate) mutant: Option<String>,
    /// Upper layer of an overlay file system over the root
    #[arg(skip)]
    pub(crate) layer: Option<PathBuf>,
    /// Patches to our module
    #[arg(skip)]
    pub(crate) patches: Vec<PathBuf>,
    /// Also copies NVIDIA's nvidia-peermem into the VM; TESTVM_CONTROL_KO has its path
    #[arg(long)]
    pub(crate) with_control: bool,
    /// Installs our module for modprobe, and adds drivers that it cannot work with (tests/drivers); TESTVM_DRIVERS has the
    /// path of their directory; needs --peermem none
    #[arg(long)]
    pub(crate) beside: bool,
    /// The kernel loads only signed modules (module.sig_enforce=1); the test VM's key signs the modules of the run
    #[arg(long)]
    pub(crate) signed: bool,
    /// For runs in which allocations fail on purpose: switches kmemleak and DMA debugging off on the debug kernel
    #[arg(long)]
    pub(crate) faults: bool,
    /// Uses earlier builds even if files have changed since, so that all runs of a suite test the same code
    #[arg(skip)]
    pub(crate) frozen: bool,
}

/// A command line with only options, after the program's name.
#[derive(clap::Parser)]
struct Bare {
    #[command(flatten)]
    options: Options,
}

impl Options {
    /// Returns the VM's architecture, which is that of its kernel.
    pub(crate) fn arch(&self) -> Arch {
        crate::kernel::arch_of(&self.kernel)
    }

    pub(crate) fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, clap::Error> {
        Ok(Bare::try_parse_from(words)?.options)
    }
}

impl Default for Options {
    fn default() -> Self {
        Bare::parse_from(["runner"]).options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preloaded_library_chooses_its_kernel() {
        let kernel = |words: &str| {
            let words = format!("runner {words}");
            let options = Options::parse(words.split_whitespace()).unwrap();
            (options.kernel, options.peermem.is_module())
        };
        assert_eq!(
            kernel("--peermem preload"),
            (crate::kernel::DMABUF.to_owned(), false)
        );
        assert_eq!(
            kernel("--peermem preload --kernel 6.1"),
            ("6.1".to_owned(), false)
        );
        assert_eq!(kernel(""), (crate::kernel::DEFAULT.to_owned(), true));
    }
}
