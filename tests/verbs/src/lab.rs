// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Resources of a case: two RDMA devices, the GPUs, and the setup under test.

use std::path::Path;
use std::sync::Arc;
use std::{fmt, fs};

use anyhow::{Context, Result};

use crate::gpu::{Allocation, Gpu, GRANULE};
use crate::rdma::{Hca, Op, Part, Status};
use crate::sys::{Mapping, Placement, Span};
use crate::{counters, ktap, rdma};

/// Size of a granule of the GPU's memory, as a `usize`.
pub(crate) const M2: usize = GRANULE as usize;

/// The peermem module under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Peermem {
    Ours,
    Nvidia,
    /// No module. This program and its children preload the library that registers GPU memory by
    /// dma-buf.
    Preload,
    None,
}

impl Peermem {
    /// Returns `true` if a peer-memory module is loaded.
    pub(crate) fn is_module(self) -> bool {
        matches!(self, Self::Ours | Self::Nvidia)
    }
}

impl fmt::Display for Peermem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinMode {
    /// nvidia.ko never revokes the pins. The pages stay pinned until the deregistration.
    Persistent,
    /// nvidia.ko revokes the pins, by a callback, when the memory is freed.
    Revocable,
}

impl fmt::Display for PinMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) peermem: Peermem,
    pub(crate) seed: u64,
    pub(crate) devices: [String; 2],
    /// `true` if an IOMMU chooses the DMA addresses.
    pub(crate) translating_iommu: bool,
}

/// The kernel's default limit on a DMA segment of a PCI device, in bytes. The default applies if
/// the driver sets no limit.
const DEFAULT_SEGMENT: u64 = 64 << 10;

pub(crate) fn translating_iommu() -> bool {
    let Ok(groups) = fs::read_dir("/sys/kernel/iommu_groups") else {
        return false;
    };
    groups.flatten().any(|group| {
        fs::read_to_string(group.path().join("type")).is_ok_and(|text| text.starts_with("DMA"))
    })
}

impl Setup {
    /// Returns the longest scatter-list entry that rxe's DMA device accepts, in bytes.
    pub(crate) fn entry_limit(&self) -> u64 {
        let set = counters::module_parameter("rdma_rxe", "peer_max_seg");
        let set = set.and_then(|text| text.parse().ok());
        set.filter(|limit| *limit != 0).unwrap_or(DEFAULT_SEGMENT)
    }

    /// Returns the mode of rxe's registrations with the loaded module.
    pub(crate) fn mode(&self) -> PinMode {
        let offered = counters::module_parameter("rdma_rxe", "peer_inval").as_deref() == Some("Y");
        let asked = counters::module_parameter("nvidia_peermem", "persistent_api_support");
        // NVIDIA's nvidia-peermem of driver 550 has no parameter for the mode, and registers two
        // clients. ib_core asks the client with a callback first. If the HCA cannot revoke, ib_core
        // asks only the client without a callback.
        let revokes = match asked.as_deref() {
            None => self.peermem == Peermem::Nvidia,
            Some(value) => value == "0",
        };
        match revokes && offered {
            true => PinMode::Revocable,
            false => PinMode::Persistent,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
    Host,
    Gpu(usize),
}

/// Resources that are opened again for each case, so that no case inherits a queue pair in error or
/// other state of a device.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) setup: Setup,
    pub(crate) near: Hca,
    pub(crate) far: Hca,
    gpus: Vec<Arc<Gpu>>,
}

impl Lab {
    pub(crate) fn open(setup: &Setup) -> Result<Self> {
        let [near, far] = &setup.devices;
        Ok(Self {
            setup: setup.clone(),
            near: Hca::open(near)?,
            far: Hca::open(far)?,
            gpus: Gpu::all()?,
        })
    }

    /// Makes the first registration of each GPU with each HCA. For the first registration of a GPU
    /// with an HCA, our module in persistent mode makes an additional pin and mapping, to find out
    /// how nvidia.ko maps. A case that counts calls must run later.
    pub(crate) fn first_registrations(&self) -> Result<()> {
        if self.setup.peermem != Peermem::Ours || self.setup.mode() != PinMode::Persistent {
            return Ok(());
        }
        for gpu in self.gpus() {
            let memory = gpu.allocate(GRANULE as usize, Placement::Any)?;
            for hca in [&self.near, &self.far] {
                hca.reg_mr(memory.span(0, memory.mapping().len())?)?;
            }
        }
        Ok(())
    }

    /// Runs one request from the near device to the far device on a new connection, and returns its
    /// status.
    pub(crate) fn status(&self, op: Op, local: Part, remote: Part) -> Result<Status> {
        rdma::connect(&self.near, &self.far)?.status(op, local, remote)
    }

    pub(crate) fn gpus(&self) -> &[Arc<Gpu>] {
        &self.gpus
    }

    /// Returns GPU number `index`, or the last GPU if there are fewer. On a machine with one GPU, a
    /// case for two GPUs therefore uses two allocations of this GPU.
    pub(crate) fn gpu(&self, index: usize) -> Result<&Arc<Gpu>> {
        let gpu = self.gpus.get(index).or(self.gpus.last());
        gpu.context("no GPU")
    }

    /// Allocates memory that can be registered.
    pub(crate) fn allocate(&self, place: Where, len: usize) -> Result<Memory> {
        match place {
            Where::Gpu(index) => {
                self.needs_module()?;
                Ok(Memory::Gpu(self.gpu(index)?.allocate(len, Placement::Any)?))
            }
            Where::Host => Ok(Memory::Host(
                Mapping::anonymous(len).context("host memory")?,
            )),
        }
    }

    /// Allocates memory of the first GPU.
    pub(crate) fn allocate_gpu(&self, len: usize) -> Result<Allocation> {
        self.gpu(0)?.allocate(len, Placement::Any)
    }

    /// Skips the case if there is neither a peermem module nor the preloaded library.
    pub(crate) fn needs_module(&self) -> Result<()> {
        if self.setup.peermem == Peermem::None {
            return ktap::skip("no peermem module is loaded");
        }
        Ok(())
    }

    /// Skips the case unless a peermem module is loaded. The case checks the module's pins or
    /// scatter list, so the preloaded library is not enough.
    pub(crate) fn needs_pins(&self) -> Result<()> {
        self.needs_module()?;
        if !self.setup.peermem.is_module() {
            return ktap::skip("a dma-buf instead of a module's pins");
        }
        Ok(())
    }

    /// Skips the case unless our module is loaded. The case tests behaviour that other modules
    /// lack.
    pub(crate) fn needs_ours(&self) -> Result<()> {
        if self.setup.peermem != Peermem::Ours {
            return ktap::skip(format_args!(
                "needs more than this module supports: {}",
                self.setup.peermem
            ));
        }
        Ok(())
    }

    /// Skips the case on a kernel with lockdep. Lockdep would report `sees`, because ib_core and
    /// the HCA's driver imitate OFED's behaviour.
    pub(crate) fn needs_no_lockdep(&self, sees: &str) -> Result<()> {
        if Path::new("/proc/lockdep").exists() {
            return ktap::skip(format_args!("lockdep reports {sees}"));
        }
        Ok(())
    }

    /// Skips a case with regions of both clients if ib_core's locks for both clients have the same
    /// lock class and the kernel has lockdep. Lockdep would report a deadlock there.
    pub(crate) fn needs_both_clients(&self) -> Result<()> {
        if counters::module_parameter("ib_core", "peer_lock_classes").as_deref() == Some("2") {
            return Ok(());
        }
        self.needs_no_lockdep("the one class of ib_core's locks for regions of both clients")
    }

    pub(crate) fn needs_mode(&self, mode: PinMode) -> Result<()> {
        self.needs_module()?;
        let found = self.setup.mode();
        if found != mode {
            return ktap::skip(format_args!("registrations are {found} here"));
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) enum Memory {
    Host(Mapping),
    Gpu(Allocation),
}

impl Memory {
    fn mapping(&self) -> &Mapping {
        match self {
            Self::Host(mapping) => mapping,
            Self::Gpu(allocation) => allocation.mapping(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.mapping().len()
    }

    pub(crate) fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.mapping().span(offset, len)
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(mapping) => mapping.read(offset, out),
            Self::Gpu(allocation) => allocation.read(offset, out),
        }
    }

    pub(crate) fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        match self {
            Self::Host(mapping) => mapping.write(offset, data),
            Self::Gpu(allocation) => allocation.write(offset, data),
        }
    }
}
