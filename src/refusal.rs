// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Why a registration was refused, in words that an operator can act on.
//!
//! ib_core turns every refusal of `acquire` into `EFAULT`: the reason survives here alone. Where there
//! is something to do about it, the words say what; where nvidia.ko has one code for several causes,
//! they name them all and choose none.
//!
//! Uses `core` alone: see `extents`.

use core::ffi::CStr;
use core::fmt;

use super::extents::SpanError;

/// `ENOMEM`, as a negative number.
pub(crate) const ENOMEM: i32 = -12;
/// `EIO`, as a negative number. nvidia.ko has it for all that it has no other code for.
pub(crate) const EIO: i32 = -5;
/// `EOPNOTSUPP`, as a negative number.
pub(crate) const EOPNOTSUPP: i32 = -95;
/// `EINTR`, as a negative number.
pub(crate) const EINTR: i32 = -4;
/// `EBUSY`, as a negative number.
pub(crate) const EBUSY: i32 = -16;
/// `ENODEV`, as a negative number.
pub(crate) const ENODEV: i32 = -19;
/// `EINVAL`, as a negative number.
pub(crate) const EINVAL: i32 = -22;
/// The kernel's own `ENOTSUPP`, as a negative number. Applications have no word for it.
pub(crate) const ENOTSUPP: i32 = -524;

/// What the process itself has at an address that nvidia.ko knows nothing of, where that shows that it
/// was never meant for a GPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// Processes have no such addresses.
    Beyond,
    /// Nothing is mapped there.
    Nothing,
    /// Memory of the CPU.
    Cpu,
}

/// A reason not to register, or not to go on registering.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Refusal {
    /// The range itself is wrong.
    Range(SpanError),
    /// nvidia.ko did not pin the range; its code.
    Pin(i32),
    /// The same for -EINVAL, where the process's own mappings say more.
    Foreign(Place),
    /// A page table of a version that this module does not know.
    TableVersion(u32),
    /// A page table with pages of a size (`enum nvidia_p2p_page_size_type`) that cannot be mapped.
    TablePageSize(u32),
    /// A page table, or a DMA mapping, that does not cover the range.
    Entries {
        /// Pages found.
        have: u32,
        /// Pages of the range.
        want: u64,
    },
    /// The DMA device is absent or not a PCI device.
    NotPci,
    /// nvidia.ko did not map the pages for the device; its code.
    Map(i32),
    /// A DMA mapping of a version that this module does not know.
    MappingVersion(u32),
    /// A DMA mapping whose page size is not that of the page table.
    MappingPageSize(u32),
    /// The revocable flavour maps addresses of a PCI BAR, and these are not.
    NotInBar,
    /// The revocable flavour cannot map memory that CPUs cache.
    CpuCacheable,
    /// The kernel's DMA layer did not map a part of the BAR.
    MapResource {
        /// Bytes that it had mapped before.
        mapped: u64,
    },
    /// The memory was freed while it was being registered.
    Revoked,
    /// ib_core mapped one registration twice.
    MappedTwice,
    /// The kernel has no memory left for the module's own records.
    NoMemory,
    /// The module is not up yet, or on its way out.
    Unloading,
    /// The user would have more pinned than the parameter `user_limit_mib` allows.
    UserLimit {
        /// What the user has pinned already, in bytes.
        pinned: u64,
        /// What the user may have, in bytes.
        limit: u64,
    },
    /// The range begins in GPU memory, and does not go on in it.
    Hole {
        /// How far it does, in bytes from its first page on.
        offset: u64,
    },
    /// The range lies over more allocations than the parameter `max_pieces` allows.
    TooManyPieces {
        /// What it allows.
        limit: u32,
    },
    /// The process was killed while the borders between its allocations were looked for.
    Killed,
}

impl Refusal {
    /// Number of values that [`Refusal::kind`] can have.
    pub(crate) const KINDS: usize = 29;

    /// A word for each kind, in their order. Programs read them: one that has been in a release stays.
    pub(crate) const NAMES: [&'static CStr; Refusal::KINDS] = [
        c"empty",
        c"wraps",
        c"too_long",
        c"not_gpu_memory",
        c"no_room",
        c"pin_unsupported",
        c"pin_failed",
        c"table_version",
        c"table_page_size",
        c"page_count",
        c"not_pci",
        c"unreachable",
        c"map_failed",
        c"mapping_version",
        c"mapping_page_size",
        c"not_in_bar",
        c"cpu_cacheable",
        c"map_resource",
        c"revoked",
        c"mapped_twice",
        c"no_memory",
        c"unloading",
        c"user_limit",
        c"foreign_beyond",
        c"foreign_unmapped",
        c"foreign_cpu",
        c"hole",
        c"too_many_pieces",
        c"killed",
    ];

    /// A small number that is equal for refusals of one cause.
    pub(crate) fn kind(&self) -> usize {
        match self {
            Refusal::Range(SpanError::Empty) => 0,
            Refusal::Range(SpanError::Wraps) => 1,
            Refusal::Range(SpanError::TooLong) => 2,
            Refusal::Pin(EINVAL) => 3,
            Refusal::Pin(ENOMEM) => 4,
            Refusal::Pin(ENOTSUPP) => 5,
            Refusal::Pin(_) => 6,
            Refusal::TableVersion(_) => 7,
            Refusal::TablePageSize(_) => 8,
            Refusal::Entries { .. } => 9,
            Refusal::NotPci => 10,
            Refusal::Map(ENOTSUPP) => 11,
            Refusal::Map(_) => 12,
            Refusal::MappingVersion(_) => 13,
            Refusal::MappingPageSize(_) => 14,
            Refusal::NotInBar => 15,
            Refusal::CpuCacheable => 16,
            Refusal::MapResource { .. } => 17,
            Refusal::Revoked => 18,
            Refusal::MappedTwice => 19,
            Refusal::NoMemory => 20,
            Refusal::Unloading => 21,
            Refusal::UserLimit { .. } => 22,
            Refusal::Foreign(Place::Beyond) => 23,
            Refusal::Foreign(Place::Nothing) => 24,
            Refusal::Foreign(Place::Cpu) => 25,
            Refusal::Hole { .. } => 26,
            Refusal::TooManyPieces { .. } => 27,
            Refusal::Killed => 28,
        }
    }

    /// The word of its kind.
    pub(crate) fn name(&self) -> &'static CStr {
        Refusal::NAMES
            .get(self.kind())
            .copied()
            .unwrap_or(c"unknown")
    }

    /// nvidia.ko's code; 0 where it was not nvidia.ko that refused.
    pub(crate) fn code(&self) -> i32 {
        match self {
            Refusal::Pin(code) | Refusal::Map(code) => *code,
            Refusal::Foreign(_) | Refusal::Hole { .. } => EINVAL,
            _ => 0,
        }
    }

    /// The range was never meant for a GPU: ib_core asks about whatever is not the memory of a
    /// process, and any process can ask it at any time.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self, Refusal::Foreign(_))
    }

    /// The same, knowing what `look` finds where the range begins. It is called where that matters.
    pub(crate) fn seen(self, look: impl FnOnce() -> Option<Place>) -> Refusal {
        match self {
            Refusal::Pin(EINVAL) => look().map_or(self, Refusal::Foreign),
            _ => self,
        }
    }

    /// The negative errno that goes to ib_core, where a step may return one.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Refusal::Pin(ENOTSUPP) | Refusal::Map(ENOTSUPP) => EOPNOTSUPP,
            // Nothing that ib_core could take for success, or for a pointer.
            Refusal::Pin(code) | Refusal::Map(code) if (-4095..0).contains(code) => *code,
            Refusal::NoMemory | Refusal::UserLimit { .. } => ENOMEM,
            Refusal::NotPci | Refusal::Unloading => ENODEV,
            Refusal::MappedTwice => EBUSY,
            Refusal::Killed => EINTR,
            _ => EINVAL,
        }
    }
}

impl From<SpanError> for Refusal {
    fn from(error: SpanError) -> Refusal {
        Refusal::Range(error)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Range(SpanError::Empty) => f.write_str("the range is empty"),
            Refusal::Range(SpanError::Wraps) => {
                f.write_str("the range ends beyond the address space")
            }
            Refusal::Range(SpanError::TooLong) => {
                f.write_str("the range is longer than the memory of any GPU (1 TiB at most)")
            }
            Refusal::Pin(EINVAL) => f.write_str(
                "no GPU memory of this process, where the range begins or in all of it: managed \
                 memory, another process's or its parent's, freed, past the end, or over several \
                 allocations where max_pieces=1; nvidia.ko does not say which (nvidia.ko: -EINVAL)",
            ),
            Refusal::Pin(ENOMEM) => f.write_str(
                "no room in the GPU's BAR1, or no kernel memory (nvidia.ko: -ENOMEM); deregister \
                 or register less, see BAR1 in nvidia-smi -q -d MEMORY",
            ),
            Refusal::Pin(ENOTSUPP) => f.write_str(
                "the GPU or its virtual function does not support this pin (nvidia.ko: -ENOTSUPP); \
                 a vGPU needs RDMA, and persistent pins, which some vGPUs and MIG instances lack: \
                 persistent_api_support=0 tries the others first",
            ),
            Refusal::Pin(EIO) => f.write_str(
                "nvidia.ko could not pin (error -5), which is all that it has no other code for: a \
                 GPU not at full power, memory that it could not keep, an address that is there \
                 twice; its own lines in the log may say more",
            ),
            Refusal::Pin(code) => write!(f, "nvidia.ko could not pin (error {code})"),
            Refusal::Foreign(Place::Beyond) => {
                f.write_str("not GPU memory: no process has such addresses")
            }
            Refusal::Foreign(Place::Nothing) => f.write_str(
                "not GPU memory of this process: it has nothing at that address (freed and \
                 unmapped, or another process's)",
            ),
            Refusal::Foreign(Place::Cpu) => f.write_str(
                "not GPU memory: the range begins in memory of the CPU, and ib_core could not take \
                 all of it (such as what may not be written, lies behind the end of a file, or \
                 goes on as something else)",
            ),
            Refusal::TableVersion(version) => write!(
                f,
                "nvidia.ko's page table has version {version:#010x}; this module knows 1.2 and \
                 2.x: a driver of another time needs another module"
            ),
            Refusal::TablePageSize(code) => write!(
                f,
                "nvidia.ko's page table has pages of size code {code}, or the range is not a \
                 multiple of them"
            ),
            Refusal::Entries { have, want } => {
                write!(
                    f,
                    "nvidia.ko returned {have} pages where the range has {want}"
                )
            }
            Refusal::NotPci => f.write_str("the RDMA device does its DMA through no PCI device"),
            Refusal::Map(ENOTSUPP) => f.write_str(
                "the RDMA device cannot reach this GPU's memory over PCIe (nvidia.ko: -ENOTSUPP); \
                 use one behind the same PCIe switch as the GPU (nvidia-smi topo -m), or, at your \
                 risk, nvidia.ko's NVreg_GrdmaPciTopoCheckOverride=1",
            ),
            Refusal::Map(EIO) => f.write_str(
                "nvidia.ko could not map for the RDMA device (error -5): the DMA layer or an IOMMU \
                 refused, or the memory touches the last 64 KiB of BAR1",
            ),
            Refusal::Map(code) => {
                write!(
                    f,
                    "nvidia.ko could not map for the RDMA device (error {code})"
                )
            }
            Refusal::MappingVersion(version) => write!(
                f,
                "nvidia.ko's DMA mapping has version {version:#010x}; this module knows 2.3: a \
                 driver of another time needs another module"
            ),
            Refusal::MappingPageSize(code) => write!(
                f,
                "nvidia.ko's DMA mapping has pages of size code {code}, its page table another"
            ),
            Refusal::NotInBar => f.write_str(
                "the memory does not lie in a PCI BAR, or has a struct page; the persistent client, \
                 which is asked next, may take it",
            ),
            Refusal::CpuCacheable => f.write_str(
                "the memory is cached by CPUs; the persistent client, which is asked next, may \
                 take it",
            ),
            Refusal::MapResource { mapped } => write!(
                f,
                "the kernel could not map the BAR for the RDMA device, after {mapped:#x} bytes of it: no memory for \
                 the IOMMU's page tables, no addresses left in it, or the device cannot address the BAR",
            ),
            Refusal::Revoked => f.write_str("the memory was freed during its registration"),
            Refusal::MappedTwice => f.write_str("ib_core mapped the registration twice"),
            Refusal::NoMemory => f.write_str("out of kernel memory"),
            Refusal::Unloading => f.write_str("the module is being loaded or unloaded"),
            Refusal::UserLimit { pinned, limit } => write!(
                f,
                "the user has {} MiB of GPU memory pinned, and may have no more than {} \
                 (user_limit_mib)",
                pinned >> 20,
                limit >> 20
            ),
            Refusal::Hole { offset } => write!(
                f,
                "GPU memory of this process for {offset:#x} bytes and none behind: the range goes \
                 over the end, part of it was freed, is another process's or not mapped yet, or \
                 allocations meet elsewhere than at 2 MiB (nvidia.ko: -EINVAL)"
            ),
            Refusal::TooManyPieces { limit } => write!(
                f,
                "the range lies over more allocations, or more uneven ones, than max_pieces={limit} \
                 allows: load the module with a higher max_pieces, or register less at a time \
                 (PyTorch: expandable_segments makes an allocation of each 20 MiB)"
            ),
            Refusal::Killed => f.write_str(
                "the process was killed while the borders of its allocations were looked for",
            ),
        }
    }
}
