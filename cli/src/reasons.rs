// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's reasons to refuse, and what else it counts, in short words: `docs/observe.md` has them in full.

/// What a reason means, and what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Meaning {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// None: nothing.
    pub(crate) mend: Option<&'static str>,
}

const fn mends(name: &'static str, what: &'static str, mend: &'static str) -> Meaning {
    Meaning {
        name,
        what,
        mend: Some(mend),
    }
}

const fn known(name: &'static str, what: &'static str) -> Meaning {
    Meaning {
        name,
        what,
        mend: None,
    }
}

/// Each `reason` of `refused`.
pub(crate) const REASONS: &[Meaning] = &[
    known("empty", "the range is empty"),
    known("wraps", "the range ends beyond the address space"),
    known("too_long", "the range is longer than any GPU's memory"),
    mends(
        "not_gpu_memory",
        "no GPU memory of this process there: managed, freed, another process's or its parent's, or past the end",
        "register in the process that allocated, after fork",
    ),
    mends(
        "no_room",
        "no room in the GPU's BAR1, or no kernel memory",
        "deregister or register less; see BAR1 in nvidia-smi -q -d MEMORY",
    ),
    mends(
        "pin_unsupported",
        "the GPU does not support this pin: a vGPU without RDMA, or persistent pins on some vGPUs and MIG instances",
        "load with persistent_api_support=0",
    ),
    mends(
        "pin_failed",
        "nvidia.ko could not pin",
        "read nvidia.ko's own lines in the kernel's log",
    ),
    mends(
        "table_version",
        "nvidia.ko's page table is of a version that the module does not know",
        "a module for this driver",
    ),
    mends(
        "table_page_size",
        "nvidia.ko's page table has pages of a size that the module does not know",
        "a module for this driver",
    ),
    mends(
        "page_count",
        "nvidia.ko returned another number of pages than the range has",
        "a module for this driver",
    ),
    known("not_pci", "the RDMA device does its DMA through no PCI device"),
    mends(
        "unreachable",
        "nvidia.ko denies the way from this RDMA device to this GPU",
        "a device behind the GPU's own switch: peermemctl topo",
    ),
    known(
        "map_failed",
        "the DMA layer or an IOMMU refused, or the memory touches the last 64 KiB of BAR1",
    ),
    mends(
        "mapping_version",
        "nvidia.ko's DMA mapping is of a version that the module does not know",
        "a module for this driver",
    ),
    mends(
        "mapping_page_size",
        "nvidia.ko's DMA mapping has other pages than its page table",
        "a module for this driver",
    ),
    known(
        "not_in_bar",
        "the revocable client cannot map memory outside a PCI BAR; the persistent one is asked next",
    ),
    known(
        "cpu_cacheable",
        "the revocable client cannot map memory that CPUs cache; the persistent one is asked next",
    ),
    known("map_resource", "an IOMMU refused, or the RDMA device cannot address the BAR"),
    known("revoked", "the memory was freed while it was being registered"),
    mends("mapped_twice", "ib_core mapped a registration twice", "report it"),
    known("no_memory", "the kernel has no memory"),
    mends("unloading", "asked while the module came or went", "again, later"),
    mends(
        "user_limit",
        "the user has as much pinned as user_limit_mib allows",
        "deregister, or a higher user_limit_mib",
    ),
    known("foreign_beyond", "not meant for a GPU: no process has such addresses"),
    known("foreign_unmapped", "not meant for a GPU: the process has nothing there"),
    mends(
        "foreign_cpu",
        "not meant for a GPU: memory of the CPU that ib_core could not take",
        "look why: no right to write, past the end of a file",
    ),
    mends(
        "hole",
        "the range begins in GPU memory and does not go on in it",
        "register what is there",
    ),
    mends(
        "too_many_pieces",
        "the range lies over more allocations than max_pieces allows",
        "a higher max_pieces, or register less at a time",
    ),
    known("killed", "the process was killed while the borders of its allocations were looked for"),
];

/// Each `event` that is neither a refusal nor a life.
pub(crate) const EVENTS: &[Meaning] = &[
    mends(
        "lost",
        "a persistent pin that nvidia.ko did not take back",
        "the memory is lost until the GPU is reset or unbound",
    ),
    known(
        "kept_other_process",
        "a revocable pin that another process released: it stays until the memory is freed",
    ),
    known(
        "kept_unlisted",
        "a revocable pin of a process that nvidia.ko no longer took it from: it stays until the memory is freed",
    ),
    known(
        "kept_in_callback",
        "a revocable pin released inside the callback of another: it stays until the memory is freed",
    ),
    mends(
        "kept_failed",
        "a revocable pin that nvidia.ko did not take back: it stays until the memory is freed",
        "read nvidia.ko's own lines in the kernel's log",
    ),
    mends(
        "not_unmapped",
        "a DMA mapping that nvidia.ko did not undo",
        "read nvidia.ko's own lines in the kernel's log",
    ),
    known(
        "late_callback",
        "nvidia.ko revoked a pin that it had reported as unpinned: each unpin is checked first since then",
    ),
    mends("stray_callback", "nvidia.ko revoked a pin that does not exist", "report it"),
];

/// What a reason or an event means.
pub(crate) fn meaning(name: &str) -> Option<&'static Meaning> {
    REASONS
        .iter()
        .chain(EVENTS)
        .find(|meaning| meaning.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::shipped::refusal::Refusal;

    /// In the module's order, so that what it does not know any more and what is new both show.
    #[test]
    fn each_reason_of_the_module_has_a_meaning() {
        let names: Vec<&str> = REASONS.iter().map(|meaning| meaning.name).collect();
        let modules: Vec<&str> = Refusal::NAMES
            .iter()
            .map(|name| name.to_str().unwrap())
            .collect();
        assert_eq!(names, modules);
    }
}
