// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Texts of the page that a run cannot produce.

/// A row of the page.
pub(super) struct Row {
    pub(super) letter: &'static str,
    pub(super) what: &'static str,
    pub(super) schedule: &'static str,
    /// The rule of our module that prevents the hazard, and its place in the source.
    pub(super) rule: &'static str,
    /// Explanation that does not fit into the table.
    pub(super) more: Option<&'static str>,
}

/// The page up to the table. `{version}` is the version of NVIDIA's module.
pub(super) const HEAD: &str = "\
<!-- SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause -->
<!-- Made by `make hazards`; `make test` fails where it is not what a run makes. -->
# The known hazards

A peer-memory module for NVIDIA's GPUs can go wrong in sixteen known ways. This page shows each of them as a
deterministic schedule, run against NVIDIA's C module and against this one. The letters are this project's own.

```
make hazards                                      # runs all schedules, and writes this page
make vm CMD='gdr hazards A' VM='--interpose'      # runs hazard A against this module
```
";

pub(super) const ROWS: &[Row] = &[
    Row {
        letter: "A",
        what: "A process that did not pin the memory unpins it: nvidia.ko returns 0 and does nothing",
        schedule: "fork; the child closes the last descriptor; rmmod; free",
        rule: "nvidia.ko gets a number instead of a pointer, and the pin holds the module until the callback: `CallbackEntry` in `src/callback_pin.rs`, `Fixed` in `src/mr.rs`",
        more: Some(
            "nvidia.ko searches only the pins of the calling process. With NVIDIA's module the pin and its callback outlive \
             everything that the callback uses. The context is freed with the region, and nothing keeps the module \
             loaded, so the free can run whatever is at that address by then.",
        ),
    },
    Row {
        letter: "B",
        what: "dma_unmap uses a page table that a finished callback has freed",
        schedule: "deregister up to dma_unmap; free to the end of the callback; go on",
        rule: "The callback unmaps under the region's lock, and dma_unmap then finds no mapping: `RevocableMr::revoke` in `src/revocable.rs`",
        more: None,
    },
    Row {
        letter: "C",
        what: "A late put hits another pin, whose page table is at the address of the freed one",
        schedule: "deregister up to the put; free; register other memory; go on",
        rule: "A pin is never put after its callback, and no pin starts between this check and the put: `CallbackPin` in `src/callback_pin.rs`",
        more: Some(
            "The region that lost its pin is never revoked. Its memory can be freed and allocated to another process, and RDMA \
             still writes to it. The schedule does this, and checks the next owner's bytes.",
        ),
    },
    Row {
        letter: "D",
        what: "The memory is freed between pin and map, or while it is mapped",
        schedule: "register up to the map, into it, or up to the ticket; free; go on",
        rule: "acquire copies the addresses, and they are mapped without nvidia.ko; a mark makes the next step fail: `CallbackPin::read`, `RevocableMr::revoke`",
        more: Some(
            "A module that calls `nvidia_p2p_dma_map_pages()` cannot prevent this. A concurrent callback cannot wait, because \
             the function needs the lock that the callback holds. It cannot return either, because the page table is then \
             freed. This module's revocable mode does not call that function.",
        ),
    },
    Row {
        letter: "E",
        what: "The callback writes to its context after ib_core has released the region",
        schedule: "free up to the end of the invalidation; deregister; go on",
        rule: "release waits for the end of the callback: `RevocableMr::release` in `src/revocable.rs`",
        more: Some(
            "If the callback is stopped earlier, in the invalidation, NVIDIA's deregistration happens to wait as well: its put \
             needs the lock that the callback holds.",
        ),
    },
    Row {
        letter: "F",
        what: "If ib_core unmaps (`peerdirect_support=1`), the put runs under the lock that the callback waits for",
        schedule: "deregister up to put_pages; free up to ib_core's lock; go on",
        rule: "put_pages does nothing, and release unpins without a lock of ib_core: `src/ib.rs`",
        more: None,
    },
    Row {
        letter: "G",
        what: "One chunk of a scatter list cannot be allocated",
        schedule: "256 entries; the second chunk of the list fails",
        rule: "ib_core gets the list only when it is complete, and a release does not depend on the list: `src/persistent.rs`",
        more: Some(
            "NVIDIA's module compares ib_core's table with its own copy, which does not exist yet, and returns without \
             unpinning. In persistent mode nothing ever releases this memory and the GPU.",
        ),
    },
    Row {
        letter: "H",
        what: "ib_core returns another table than it got",
        schedule: "a field of the table's head changes before dma_unmap",
        rule: "A release never reads the table that ib_core returns: `src/ib.rs`",
        more: None,
    },
    Row {
        letter: "I",
        what: "The DMA device is not on the PCI bus, or is missing",
        schedule: "`peer_dma_dev=nonpci`, then `none`",
        rule: "The device is checked for NULL and for its bus first: `PciDevice` in `src/pci.rs`",
        more: None,
    },
    Row {
        letter: "J",
        what: "Each registration pins twice, and the memory can change in between",
        schedule: "one registration; then one whose memory is replaced before its ticket",
        rule: "One pin, from acquire to release: `PersistentMr::pin`, `RevocableMr::pin`",
        more: None,
    },
    Row {
        letter: "K",
        what: "Contiguous memory gets an entry for each 64 KiB",
        schedule: "128 MiB in one run; DMA addresses that descend",
        rule: "Adjacent DMA addresses are merged: `src/ranges.rs`",
        more: None,
    },
    Row {
        letter: "L",
        what: "Ranges that wrap or are empty",
        schedule: "0 bytes, ends beyond all addresses, 0 bytes inside a page",
        rule: "Checked arithmetic: `Span::covering` in `src/ranges.rs`",
        more: Some(
            "This does no harm today, because ib_core refuses ranges that wrap. For an empty range inside a page ib_core counts \
             that page, and NVIDIA's module pins 64 KiB.",
        ),
    },
    Row {
        letter: "M",
        what: "Memory for an absurd length is allocated before the address is checked",
        schedule: "8 TiB from an address of 2 MiB",
        rule: "The length is limited to 1 TiB before nvidia.ko is called: `MAX_LEN` in `src/mr.rs`",
        more: Some(
            "`nv-p2p.c` allocates 16 bytes for each page of 64 KiB before it looks for the owner of the memory: 2,048 MiB a call \
             for 8 TiB. With this module's limit it allocates at most 256 MiB. The table has the bytes that nvidia.ko would \
             allocate.",
        ),
    },
    Row {
        letter: "N",
        what: "Each failure in acquire becomes `not mine`; a failing put there leaks the pin",
        schedule: "a BAR without room; a put in acquire that fails",
        rule: "The cause is logged: `src/log.rs`. acquire never puts",
        more: None,
    },
    Row {
        letter: "O",
        what: "The callback drops the module's last reference before it has returned",
        schedule: "stop the callback after its module_put; rmmod; go on",
        rule: "An unload takes nvidia.ko's lock once, which the callback holds: `Callbacks::drop` in `src/nv.rs`",
        more: Some(
            "NVIDIA's module is unloaded while its callback runs. This does no harm if the compiler turns the callback's last \
             call into a jump, as here, because the callback then does not return to the module's text.",
        ),
    },
    Row {
        letter: "P",
        what: "nvidia.ko's versions, sizes and counts, and the result of its put, are not checked",
        schedule: "each of eight invalid answers; a put that fails with ENOMEM",
        rule: "`TablePtr::check`, `DmaMapping::check` and the drop of `PersistentPin` in `src/nv.rs`; the puts of `src/callback_pin.rs`",
        more: Some(
            "When `nvidia_p2p_put_pages` is out of memory, it has done nothing, and this module calls it again, up to ten times \
             in a second. nvidia.ko itself warns each time (`nv-p2p.c`), so a host with `panic_on_warn` stops. \
             `nvidia_p2p_put_pages_persistent` drops the GPU's usage count even if it fails, so this module calls it once, and \
             counts and logs the pin as lost. NVIDIA's module passes invalid mappings on to the NIC. The test VM's NIC \
             refuses them, because it compares the list with the region; a real NIC uses the addresses that it gets.",
        ),
    },
];

/// The end of the page. `{version}` is the version of NVIDIA's module.
pub(super) const LIMITS: &str = "
## Limits

- **In a VM, not on hardware.** NVIDIA's own `nv-p2p.c` ({version}) pins and maps, over an imitation of the resource
  manager. Results _on the stand-in's p2p.c_ show invalid answers, which NVIDIA's code does not give on request
  (`tests/gpu`). ib_core and the NIC's driver are patched.
- **NVIDIA's module is {version}**, Debian's package. The hazards were found by reading driver 595, whose default is the
  persistent mode. A to F concern the revocable mode. In driver 595 and in this module, `persistent_api_support=0`
  selects this mode. In {version}, which lacks the parameter, the first client has it. {version} uses a client with or
  without the callback, depending on the NIC's capabilities.
- **Some hazards are injected.** Probes in the kernel (`tests/interpose`) make an allocation fail half-way (G), change
  ib_core's scatter list (H), and delay a return (O). For C the stand-in reuses the address of the last freed page
  table, as any allocator can.
- J, K and M are costs, not crashes.
- The page names only the kind of a kernel report (an oops, a warning), because its place depends on the compiler.
- The kernel is an ordinary one with `slub_debug=FP`, which poisons and checks freed memory.
";
