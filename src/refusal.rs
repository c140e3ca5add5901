// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Why a registration was refused, in words that an operator can act on.
//!
//! ib_core turns every refusal of `acquire` into `EFAULT`, so this text in the kernel log is the
//! only place where the reason survives.
//!
//! Uses `core` alone: see `extents`.

use core::fmt;

use super::extents::SpanError;

/// `ENOMEM`, as a negative number.
pub(crate) const ENOMEM: i32 = -12;
/// `EOPNOTSUPP`, as a negative number.
pub(crate) const EOPNOTSUPP: i32 = -95;
/// `EBUSY`, as a negative number.
pub(crate) const EBUSY: i32 = -16;
/// `ENODEV`, as a negative number.
pub(crate) const ENODEV: i32 = -19;
/// `EINVAL`, as a negative number.
pub(crate) const EINVAL: i32 = -22;
/// The kernel's own `ENOTSUPP`, as a negative number. Applications have no word for it.
pub(crate) const ENOTSUPP: i32 = -524;

/// A reason not to register, or not to go on registering.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Refusal {
    /// The range itself is wrong.
    Range(SpanError),
    /// nvidia.ko did not pin the range; its code.
    Pin(i32),
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
    /// The kernel's DMA layer did not map a run of the BAR.
    MapResource,
    /// The memory was freed while it was being registered.
    Revoked,
    /// ib_core mapped one registration twice.
    MappedTwice,
    /// The kernel has no memory left for the module's own records.
    NoMemory,
    /// The module is not up yet, or on its way out.
    Unloading,
}

impl Refusal {
    /// Number of values that [`Refusal::kind`] can have.
    pub(crate) const KINDS: usize = 22;

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
            Refusal::MapResource => 17,
            Refusal::Revoked => 18,
            Refusal::MappedTwice => 19,
            Refusal::NoMemory => 20,
            Refusal::Unloading => 21,
        }
    }

    /// The negative errno that goes to ib_core, where a step may return one.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Refusal::Pin(ENOTSUPP) | Refusal::Map(ENOTSUPP) => EOPNOTSUPP,
            // Nothing that ib_core could take for success, or for a pointer.
            Refusal::Pin(code) | Refusal::Map(code) if (-4095..0).contains(code) => *code,
            Refusal::NoMemory => ENOMEM,
            Refusal::NotPci | Refusal::Unloading => ENODEV,
            Refusal::MappedTwice => EBUSY,
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
                f.write_str("the range is longer than the memory of any GPU")
            }
            Refusal::Pin(EINVAL) => f.write_str(
                "not one allocation of GPU memory of this process: CPU or managed memory, another \
                 process's, freed, or a range over several allocations (nvidia.ko: -EINVAL)",
            ),
            Refusal::Pin(ENOMEM) => {
                f.write_str("no room in the GPU's BAR1, or no kernel memory (nvidia.ko: -ENOMEM)")
            }
            Refusal::Pin(ENOTSUPP) => f.write_str(
                "the GPU or its virtual function does not support this pin (nvidia.ko: -ENOTSUPP)",
            ),
            Refusal::Pin(code) => write!(f, "nvidia.ko could not pin (error {code})"),
            Refusal::TableVersion(version) => write!(
                f,
                "nvidia.ko's page table has version {version:#010x}; this module knows 1.2 and 2.x"
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
                "the RDMA device cannot reach this GPU's memory over PCIe (nvidia.ko: -ENOTSUPP)",
            ),
            Refusal::Map(code) => {
                write!(
                    f,
                    "nvidia.ko could not map for the RDMA device (error {code})"
                )
            }
            Refusal::MappingVersion(version) => write!(
                f,
                "nvidia.ko's DMA mapping has version {version:#010x}; this module knows 2.3"
            ),
            Refusal::MappingPageSize(code) => write!(
                f,
                "nvidia.ko's DMA mapping has pages of size code {code}, its page table another"
            ),
            Refusal::NotInBar => f.write_str("the memory does not lie in a PCI BAR"),
            Refusal::CpuCacheable => f.write_str("the memory is cached by CPUs"),
            Refusal::MapResource => {
                f.write_str("the kernel could not map the BAR for the RDMA device")
            }
            Refusal::Revoked => f.write_str("the memory was freed during its registration"),
            Refusal::MappedTwice => f.write_str("ib_core mapped the registration twice"),
            Refusal::NoMemory => f.write_str("out of kernel memory"),
            Refusal::Unloading => f.write_str("the module is being loaded or unloaded"),
        }
    }
}
