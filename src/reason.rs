// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The reasons for which registrations are refused, and the other events that are counted. Reasons
//! and events each have one table, which the log, the files in debugfs, `docs/observe.md` and
//! `peermemctl` share. `peermemctl` includes this file by its path.
//!
//! ib_core turns every refusal of `acquire` into `EFAULT`, so only this module keeps the reason.
//! nvidia.ko uses one code for several causes. The message for such a code names all causes.
//!
//! Uses only `core`.

use core::{
    ffi::CStr,
    fmt, //
};

/// `ENOMEM`, as a negative number.
pub(crate) const ENOMEM: i32 = -12;
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
/// The kernel-internal `ENOTSUPP`, as a negative number. User space does not know this error.
pub(crate) const ENOTSUPP: i32 = -524;

/// The process's mapping at an address without GPU memory. Recorded only if the mapping shows that
/// the address was never meant for a GPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum VmaKind {
    /// The address is outside user space.
    Invalid,
    /// Nothing is mapped at the address.
    Unmapped,
    /// CPU memory is mapped at the address.
    Host,
}

/// The reason why a pin was not put. Such a pin stays until the memory is freed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PutError {
    /// A process that is not the owner released the registration.
    OtherProcess,
    /// nvidia.ko no longer finds the pin among the pins of its owner.
    Unlisted,
    /// The registration was released inside the callback of another of its pins.
    InCallback,
    /// nvidia.ko returned this code.
    Failed(i32),
}

/// A reason to refuse a registration at any of its steps, with details.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reason {
    /// The range is empty.
    Empty,
    /// The range ends beyond the address space.
    Wraps,
    /// The range is longer than any GPU's memory.
    TooLong,
    /// nvidia.ko did not pin the range, and returned this code.
    Pin(i32),
    /// nvidia.ko did not pin the range (-EINVAL), and the process's mappings show the cause.
    NonGpu(VmaKind),
    /// nvidia.ko's page table has a version that this module does not know.
    TableVersion(u32),
    /// nvidia.ko's page table has a page size (`enum nvidia_p2p_page_size_type`) that cannot be
    /// mapped.
    TablePageSize(u32),
    /// A page table or a DMA mapping does not cover the range.
    Entries {
        /// Number of entries found.
        have: u32,
        /// Number of pages in the range.
        want: u64,
    },
    /// The DMA device is absent or not a PCI device.
    NotPci,
    /// nvidia.ko did not map the pages for the device, and returned this code.
    Map(i32),
    /// nvidia.ko's DMA mapping has a version that this module does not know.
    MappingVersion(u32),
    /// nvidia.ko's DMA mapping has a page size that differs from the page table's.
    MappingPageSize(u32),
    /// The memory is in no PCI BAR. The revocable mode maps only memory in a BAR.
    NotInBar,
    /// The kernel has a `struct page` for these addresses of a PCI BAR.
    HasStructPages,
    /// The revocable mode cannot map memory that CPUs cache.
    CpuCacheable,
    /// The kernel's DMA API did not map a part of the BAR.
    MapResource {
        /// Bytes that were mapped before the failure.
        mapped: u64,
    },
    /// The memory was freed while it was being registered.
    Revoked,
    /// ib_core mapped one registration twice.
    MappedTwice,
    /// The kernel is out of memory for the module's own data.
    NoMemory,
    /// The module is still loading, or is being unloaded.
    Unloading,
    /// The user would exceed the parameter `user_limit_mib`.
    UserLimit {
        /// Bytes that the user has pinned already.
        pinned: u64,
        /// The user's limit, in bytes.
        limit: u64,
    },
    /// The range begins in GPU memory, but does not stay in it.
    Hole {
        /// Bytes of GPU memory from the first page to the hole.
        offset: u64,
    },
    /// The range spans more allocations than the parameter `max_chunks` allows.
    TooManyChunks {
        /// The value of `max_chunks`.
        limit: u32,
    },
    /// The process was killed during the search for the boundaries of its allocations.
    Killed,
}

/// The person who can remove the cause of a refusal.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cause {
    /// The application's developer: the request is wrong.
    Request,
    /// The administrator: the cause lies in the driver, the machine, or a limit.
    Machine,
    /// Nobody: ib_core calls the persistent client next.
    NextClient,
}

/// A row of the table of reasons.
pub(crate) struct ReasonInfo {
    /// Name for programs, in debugfs, traces and metrics. A name never changes after a release.
    pub(crate) name: &'static CStr,
    /// The negative errno that a step after `acquire` returns to ib_core, or `None` for nvidia.ko's
    /// code.
    errno: Option<i32>,
    /// The person who can remove the cause.
    pub(crate) cause: Cause,
    /// Description of the refusal, for people.
    pub(crate) message: &'static str,
    /// Advice to the user, or an empty string.
    pub(crate) advice: &'static str,
}

/// Defines `Reason::ALL`, `Reason::index` and `Reason::info`. The first matching pattern applies.
macro_rules! reasons {
    ($($row:ident: $pattern:pat => $name:literal, $errno:expr, $cause:ident, $message:literal, $advice:literal;)*) => {
        enum Row {
            $($row),*
        }

        impl Reason {
            /// All reasons, in the order of the lines in `counters`. New reasons are added at the
            /// end.
            pub(crate) const ALL: &[ReasonInfo] = &[$(ReasonInfo {
                name: $name,
                errno: $errno,
                cause: Cause::$cause,
                message: $message,
                advice: $advice,
            }),*];

            /// Returns the index of the row in [`Reason::ALL`].
            pub(crate) fn index(&self) -> usize {
                // CAST: Rows are numbered from 0.
                match self {
                    $($pattern => Row::$row as usize,)*
                }
            }

            /// Returns the row in [`Reason::ALL`].
            fn info(&self) -> &'static ReasonInfo {
                match self {
                    $($pattern => const { &Reason::ALL[Row::$row as usize] },)*
                }
            }
        }
    };
}

reasons! {
    Empty: Reason::Empty => c"empty", Some(EINVAL), Request,
        "the range is empty", "";
    Wraps: Reason::Wraps => c"wraps", Some(EINVAL), Request,
        "the range ends beyond the address space", "";
    TooLong: Reason::TooLong => c"too_long", Some(EINVAL), Request,
        "the range is longer than 1 TiB, which no GPU has", "";
    NotGpuMemory: Reason::Pin(EINVAL) => c"not_gpu_memory", Some(EINVAL), Request,
        "the range, or its beginning, is not GPU memory of this process: managed memory, memory of another process \
         or of the parent, freed memory, memory past the end, or several allocations with max_chunks=1",
        "register in the process that allocated the memory, after fork()";
    NoRoom: Reason::Pin(ENOMEM) => c"no_room", Some(ENOMEM), Machine,
        "no room in the GPU's BAR1, or no kernel memory",
        "deregister or register less; nvidia-smi -q -d MEMORY shows BAR1, and peermemctl list --by-process shows who \
         holds it";
    PinUnsupported: Reason::Pin(ENOTSUPP) => c"pin_unsupported", Some(EOPNOTSUPP), Machine,
        "the GPU does not support this kind of pin: a vGPU without RDMA, or persistent pins on some vGPUs and MIG instances",
        "load the module with persistent_api_support=0; a vGPU needs RDMA in its profile";
    PinFailed: Reason::Pin(_) => c"pin_failed", None, Machine,
        "nvidia.ko could not pin the memory; error -5 is a GPU that is not at full power, memory that nvidia.ko \
         could not keep, or an address that occurs twice",
        "look for nvidia.ko's own lines in the kernel log (dmesg | grep NVRM)";
    TableVersion: Reason::TableVersion(_) => c"table_version", Some(EINVAL), Machine,
        "nvidia.ko's page table has a version that this module does not know (it knows 1.2 and 2.x)",
        "install a version of peermem-rs for this driver";
    TablePageSize: Reason::TablePageSize(_) => c"table_page_size", Some(EINVAL), Machine,
        "nvidia.ko's page table has pages of a size that this module does not know, or the range is not a multiple of it",
        "install a version of peermem-rs for this driver";
    PageCount: Reason::Entries { .. } => c"page_count", Some(EINVAL), Machine,
        "nvidia.ko returned the wrong number of pages for the range",
        "install a version of peermem-rs for this driver";
    NotPci: Reason::NotPci => c"not_pci", Some(ENODEV), Machine,
        "the RDMA device does its DMA through no PCI device",
        "use an RDMA device that is a PCI device; rxe and siw are not";
    Unreachable: Reason::Map(ENOTSUPP) => c"unreachable", Some(EOPNOTSUPP), Machine,
        "nvidia.ko denies the path from this RDMA device to this GPU",
        "use a device behind the same PCIe switch as the GPU (peermemctl topo) or, at your own risk, load nvidia.ko with \
         NVreg_GrdmaPciTopoCheckOverride=1";
    MapFailed: Reason::Map(_) => c"map_failed", None, Machine,
        "nvidia.ko could not map the memory for the RDMA device; error -5 is an IOMMU or DMA layer that refused, bounce \
         buffers that are forced (swiotlb=force, a confidential VM), or memory that touches the last 64 KiB of BAR1",
        "look for an IOMMU's lines and nvidia.ko's in the kernel log (dmesg | grep -e DMAR -e AMD-Vi -e arm-smmu -e NVRM)";
    MappingVersion: Reason::MappingVersion(_) => c"mapping_version", Some(EINVAL), Machine,
        "nvidia.ko's DMA mapping has a version that this module does not know (it knows 2.3)",
        "install a version of peermem-rs for this driver";
    MappingPageSize: Reason::MappingPageSize(_) => c"mapping_page_size", Some(EINVAL), Machine,
        "nvidia.ko's DMA mapping and its page table have different page sizes",
        "install a version of peermem-rs for this driver";
    NotInBar: Reason::NotInBar => c"not_in_bar", Some(EINVAL), NextClient,
        "the revocable client cannot map memory that is in no PCI BAR; the persistent one is asked next, and what it \
         registers is not revoked",
        "deregister such memory before it is freed, or it stays pinned";
    CpuCacheable: Reason::CpuCacheable => c"cpu_cacheable", Some(EINVAL), NextClient,
        "the revocable client cannot map memory that CPUs cache; the persistent one is asked next, and what it \
         registers is not revoked",
        "deregister such memory before it is freed, or it stays pinned";
    MapResource: Reason::MapResource { .. } => c"map_resource", Some(EINVAL), Machine,
        "the kernel could not map the BAR for the RDMA device: no memory for the IOMMU's page tables, no free \
         addresses in the IOMMU, a device that cannot address the BAR, or forced bounce buffers (swiotlb=force, a \
         confidential VM)",
        "look for an IOMMU's lines in the kernel log (dmesg | grep -e DMAR -e AMD-Vi -e arm-smmu)";
    Revoked: Reason::Revoked => c"revoked", Some(EINVAL), Request,
        "the memory was freed while it was being registered", "";
    MappedTwice: Reason::MappedTwice => c"mapped_twice", Some(EBUSY), Request,
        "ib_core mapped the registration twice", "report it";
    NoMemory: Reason::NoMemory => c"no_memory", Some(ENOMEM), Machine,
        "out of kernel memory", "free memory of the host (free -m)";
    Unloading: Reason::Unloading => c"unloading", Some(ENODEV), Request,
        "the module is being loaded or unloaded", "try again later";
    UserLimit: Reason::UserLimit { .. } => c"user_limit", Some(ENOMEM), Machine,
        "the user would have more GPU memory pinned than user_limit_mib allows",
        "deregister, register less, or raise user_limit_mib";
    NonGpuInvalid: Reason::NonGpu(VmaKind::Invalid) => c"non_gpu_invalid", Some(EINVAL), Request,
        "not GPU memory: no process has such addresses", "";
    NonGpuUnmapped: Reason::NonGpu(VmaKind::Unmapped) => c"non_gpu_unmapped", Some(EINVAL), Request,
        "not GPU memory of this process: it has nothing at that address (freed and unmapped, or another process's)", "";
    NonGpuHost: Reason::NonGpu(VmaKind::Host) => c"non_gpu_host", Some(EINVAL), Request,
        "not GPU memory: the range begins in memory of the CPU, and ib_core could not take all of it",
        "look for pages that may not be written, lie past the end of a file, or are not CPU memory";
    Hole: Reason::Hole { .. } => c"hole", Some(EINVAL), Request,
        "the range begins in GPU memory of this process and does not stay in it: the range extends past the end, \
         part of it is freed, not mapped yet or another process's, or two allocations do not meet at a multiple of 2 \
         MiB",
        "register only memory that is allocated";
    TooManyChunks: Reason::TooManyChunks { .. } => c"too_many_chunks", Some(EINVAL), Request,
        "the range spans more allocations than max_chunks allows, or their sizes vary too much",
        "load the module with a higher max_chunks, or register less at a time (PyTorch's expandable_segments makes \
         one allocation for each 20 MiB)";
    Killed: Reason::Killed => c"killed", Some(EINTR), Request,
        "the process was killed while the module looked for the boundaries of its allocations", "";
    HasStructPages: Reason::HasStructPages => c"has_struct_pages", Some(EINVAL), NextClient,
        "the revocable client cannot map memory of a PCI BAR that has struct pages; the persistent one is asked next, and \
         what it registers is not revoked",
        "deregister such memory before it is freed, or it stays pinned; or load nvidia.ko without RMForceStaticBar1=1, with \
         which nvidia-uvm makes struct pages";
}

impl Reason {
    /// Returns the name for programs.
    pub(crate) fn name(&self) -> &'static CStr {
        self.info().name
    }

    /// Returns nvidia.ko's code, or 0 if nvidia.ko did not cause the refusal.
    pub(crate) fn code(&self) -> i32 {
        match self {
            Reason::Pin(code) | Reason::Map(code) => *code,
            Reason::NonGpu(_) | Reason::Hole { .. } => EINVAL,
            _ => 0,
        }
    }

    /// Returns `true` if the range was never meant for a GPU. ib_core asks about any address that
    /// is not ordinary memory, and any process can trigger such a question at any time.
    pub(crate) fn is_non_gpu(&self) -> bool {
        matches!(self, Reason::NonGpu(_))
    }

    /// Returns `true` if the revocable client leaves the range to the persistent one.
    pub(crate) fn is_handed_on(&self) -> bool {
        self.info().cause == Cause::NextClient
    }

    /// Returns `true` if the reason is logged only once. Any process can trigger a reason for which
    /// [`Self::is_non_gpu`] holds, at any time. A reason for which [`Self::is_handed_on`] holds is
    /// a property of the machine.
    pub(crate) fn is_logged_once(&self) -> bool {
        self.is_handed_on() || self.is_non_gpu()
    }

    /// Returns a more precise reason, if `look` finds one. `look` returns the mapping at the
    /// beginning of the range, and is called only for a reason that the mapping can refine.
    pub(crate) fn refine(self, look: impl FnOnce() -> Option<VmaKind>) -> Reason {
        match self {
            Reason::Pin(EINVAL) => look().map_or(self, Reason::NonGpu),
            _ => self,
        }
    }

    /// Returns the negative errno that a step after `acquire` returns to ib_core. ib_core cannot
    /// mistake this value for success or for a pointer.
    pub(crate) fn errno(&self) -> i32 {
        match self.info().errno.unwrap_or(self.code()) {
            errno @ -4095..=-1 => errno,
            _ => EINVAL,
        }
    }
}

/// Prints the description, the details and the advice.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = self.info();
        f.write_str(info.message)?;
        match *self {
            Reason::Pin(code) | Reason::Map(code) => write!(f, " (nvidia.ko: {})", Code(code)),
            Reason::Hole { offset } => {
                write!(f, " (after {offset:#x} bytes; nvidia.ko: {})", Code(EINVAL))
            }
            Reason::TableVersion(version) | Reason::MappingVersion(version) => {
                write!(f, " (version {version:#010x})")
            }
            Reason::TablePageSize(code) | Reason::MappingPageSize(code) => {
                write!(f, " (size code {code})")
            }
            Reason::Entries { have, want } => write!(f, " ({have}, not {want})"),
            Reason::MapResource { mapped } => write!(f, " (after {mapped:#x} bytes)"),
            Reason::UserLimit { pinned, limit } => {
                write!(f, " ({} of {} MiB pinned)", pinned >> 20, limit >> 20)
            }
            Reason::TooManyChunks { limit } => write!(f, " (max_chunks={limit})"),
            _ => Ok(()),
        }?;
        match info.advice {
            "" => Ok(()),
            advice => write!(f, "; {advice}"),
        }
    }
}

/// An error code of nvidia.ko. Known codes are printed by name.
struct Code(i32);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            EINVAL => f.write_str("-EINVAL"),
            ENOMEM => f.write_str("-ENOMEM"),
            ENOTSUPP => f.write_str("-ENOTSUPP"),
            code => write!(f, "error {code}"),
        }
    }
}

/// The log level of an event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Severity {
    /// A normal event.
    Info,
    /// An abnormal event that this module handled.
    Warning,
    /// A resource is lost, or stays in use.
    Error,
}

/// A row of the table of events.
pub(crate) struct EventInfo {
    /// Name for programs. A name never changes after a release.
    pub(crate) name: &'static str,
    /// Log level of the event.
    pub(crate) severity: Severity,
    /// Description of the event, for people.
    pub(crate) message: &'static str,
    /// Advice to the user, or an empty string.
    pub(crate) advice: &'static str,
}

/// Defines [`Event`] and its table.
macro_rules! events {
    ($($(#[$doc:meta])* $event:ident => $name:literal, $severity:ident, $message:literal, $advice:literal;)*) => {
        /// An event that is counted and does not refuse a registration.
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        pub(crate) enum Event {
            $($(#[$doc])* $event,)*
        }

        impl Event {
            /// All events, in the order of their numbers and of the lines in `counters`.
            pub(crate) const ALL: [EventInfo; [$($name),*].len()] = [$(EventInfo {
                name: $name,
                severity: Severity::$severity,
                message: $message,
                advice: $advice,
            }),*];
        }
    };
}

events! {
    /// A persistent pin could not be put, and is lost.
    Leaked => "leaked", Error,
        "nvidia.ko did not undo a persistent pin: its memory is lost until the GPU is reset or unbound",
        "nvidia-smi --gpu-reset when nobody uses the GPU, or reboot";
    /// A revocable pin was not put, because another process released it.
    OrphanedOtherProcess => "orphaned_other_process", Info,
        "another process released a revocable pin: it stays until the memory is freed", "";
    /// A revocable pin was not put, because nvidia.ko no longer links its memory to the process.
    OrphanedUnlisted => "orphaned_unlisted", Info,
        "nvidia.ko no longer finds a revocable pin among its owner's pins: it stays until the memory is freed", "";
    /// A revocable pin was not put, because it was released inside the callback of another pin.
    OrphanedInCallback => "orphaned_in_callback", Info,
        "a revocable pin was released inside the callback of another pin: it stays until the memory is freed", "";
    /// A revocable pin was not put, because nvidia.ko returned an error.
    OrphanedFailed => "orphaned_failed", Error,
        "nvidia.ko did not undo a revocable pin, or could not be asked: it stays until the memory is freed",
        "look for nvidia.ko's own lines in the kernel log (dmesg | grep NVRM)";
    /// A DMA mapping could not be undone.
    NotUnmapped => "not_unmapped", Error,
        "nvidia.ko did not undo a DMA mapping: it stays until the memory is unpinned",
        "look for nvidia.ko's own lines in the kernel log (dmesg | grep NVRM)";
    /// nvidia.ko called back for a pin that it had reported as unpinned.
    LateCallback => "late_callback", Warning,
        "nvidia.ko revoked a pin that it had reported as unpinned: since then, each unpin is checked first", "";
    /// nvidia.ko called back for a pin that does not exist.
    SpuriousCallback => "spurious_callback", Error,
        "nvidia.ko revoked a pin that does not exist",
        "report it";
    /// A scatter list may get an HCA page that is larger than 2 GiB.
    LargeHcaPage => "large_hca_page", Warning,
        "its DMA and virtual addresses differ by a multiple of 4 GiB: the ib_core of OFED 25.07 and 25.10 may \
         give the NIC wrong addresses",
        "register at most 4 GiB at once (docs/dma.md)";
    /// Another module's client accepted a range that this module had refused. Never logged.
    OtherClient => "other_client", Info,
        "another driver's peer-memory client took a range that this module refused", "";
}

#[cfg(all(test, feature = "unit"))]
#[path = "reason/tests.rs"]
mod tests;
