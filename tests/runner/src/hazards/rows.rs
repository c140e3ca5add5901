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

Sixteen ways in which a peer-memory module for NVIDIA's GPUs can go wrong, each as a schedule that leaves nothing to
chance, run against NVIDIA's C module and against this one. The letters are this project's own.

- **In a VM, not on hardware.** What pins and maps is NVIDIA's own `nv-p2p.c` ({version}) over a resource manager that
  is imitated, but where a result says _on the stand-in's p2p.c_: strange answers, which NVIDIA's code gives on no
  request (`tests/gpu`). ib_core and the NIC are patched ones. What is shown is what the modules do there.
- **NVIDIA's module is {version}**, Debian's package. The hazards were read in a newer one (595), whose default is the
  mode that nobody revokes: A to F are about the mode with the callback, `persistent_api_support=0` there and
  here, and the first client of {version}. It runs with and without the callback by what the NIC says that it can do.
- **Some are made to happen.** An allocation that fails half-way (G), a scatter list that ib_core changes (H), a
  return that takes its time (O): probes in the kernel (`tests/interpose`) see to that. C has the stand-in hand out
  the address of the last page table that was freed, as any allocator may.
- **J, K and M are costs**, not crashes; the table has counts. Bytes in M are what the provider would allocate before it
  looks at the address.
- Of what the kernel reports (an oops, a warning) the kind is named alone: where it stood depends on the compiler.
- L does no harm with the modules of today; O none where the compiler ends the callback with a jump.
- The kernel is an ordinary one; `slab_debug=FP` fills what is freed and looks at it.
";

pub(super) const ROWS: &[Row] = &[
    Row {
        letter: "A",
        what: "A process that did not pin unpins: the provider says 0 and does nothing",
        schedule: "fork; the child closes the last descriptor; rmmod; free",
        rule: "The provider holds a number, and the pin holds the module, until the callback comes: `CallbackEntry` in `src/callback_pin.rs`, `Fixed` in `src/mr.rs`",
        more: Some(
            "The provider looks for a pin among those of the calling process alone. With NVIDIA's module the pin and its \
             callback outlive everything that the callback uses: the context is freed when the region goes, and nothing \
             keeps the module loaded, so the free runs whatever has come to lie there.",
        ),
    },
    Row {
        letter: "B",
        what: "dma_unmap of a page table that a finished callback took with it",
        schedule: "deregister up to dma_unmap; free, callback and all; go on",
        rule: "The callback unmaps under the region's lock; dma_unmap finds nothing: `RevocableMr::revoke` in `src/revocable.rs`",
        more: None,
    },
    Row {
        letter: "C",
        what: "A late put finds another pin at the address of its dead page table",
        schedule: "deregister up to the put; free; register other memory; go on",
        rule: "A pin that was called back is never put, and no pin is made between check and put: `CallbackPin` in `src/callback_pin.rs`",
        more: Some(
            "The region whose pin was put by mistake is never revoked: its memory can be freed and given to somebody else, and \
             RDMA goes on writing there. The schedule does that, and looks at the next owner's bytes.",
        ),
    },
    Row {
        letter: "D",
        what: "The memory is freed between pin and map, or while it is mapped",
        schedule: "register up to the map, into it, or up to the ticket; free; go on",
        rule: "The addresses are copied in acquire and mapped without the provider; a mark makes the next step fail: `CallbackPin::read`, `RevocableMr::revoke`",
        more: Some(
            "Not to be cured while the provider maps: a callback beside `nvidia_p2p_dma_map_pages()` can neither wait, since the \
             map wants the lock that the callback holds, nor return, since the page table is freed then. This module's \
             revocable mode does not call it.",
        ),
    },
    Row {
        letter: "E",
        what: "The callback stores into its context after ib_core has let the region go",
        schedule: "free up to the end of the invalidation; deregister; go on",
        rule: "release waits until the callback is out of ib_core and done: `RevocableMr::release` in `src/revocable.rs`",
        more: Some(
            "Stopped earlier, inside the invalidation, NVIDIA's deregistration waits too, by luck: its put wants the lock that \
             the callback holds.",
        ),
    },
    Row {
        letter: "F",
        what: "Where ib_core unmaps (`peerdirect_support=1`): put under the lock that the callback waits for",
        schedule: "deregister up to put_pages; free up to ib_core's lock; go on",
        rule: "put_pages does nothing; release unpins, with no lock of ib_core's held: `src/ib.rs`",
        more: None,
    },
    Row {
        letter: "G",
        what: "A scatter list of which one piece cannot be allocated",
        schedule: "256 entries; the second piece of the list fails",
        rule: "The list is built apart and lent when it is whole; what is released does not depend on it: `src/persistent.rs`",
        more: Some(
            "NVIDIA's module compares what ib_core hands back with its own copy, which was never made, and leaves without \
             unpinning. Without the callback nothing ever gives the memory back, nor lets go of the GPU.",
        ),
    },
    Row {
        letter: "H",
        what: "ib_core hands back another table than it was lent",
        schedule: "a field of the table's head changes before dma_unmap",
        rule: "Nothing is released by looking at what ib_core hands back: `src/ib.rs`",
        more: None,
    },
    Row {
        letter: "I",
        what: "A DMA device that is not on the PCI bus, or none",
        schedule: "`peer_dma_dev=nonpci`, then `none`",
        rule: "NULL and the bus are asked first: `PciDevice` in `src/pci.rs`",
        more: None,
    },
    Row {
        letter: "J",
        what: "Every registration pins twice, and what is pinned may change in between",
        schedule: "one registration; then one whose memory is replaced before its ticket",
        rule: "One pin, from acquire to release: `PersistentMr::pin`, `RevocableMr::pin`",
        more: None,
    },
    Row {
        letter: "K",
        what: "An entry for each 64 KiB of contiguous memory",
        schedule: "128 MiB in one run; DMA addresses that descend",
        rule: "Runs of DMA addresses are joined: `src/ranges.rs`",
        more: None,
    },
    Row {
        letter: "L",
        what: "Ranges that wrap or are empty",
        schedule: "0 bytes, ends beyond all addresses, 0 bytes inside a page",
        rule: "Checked arithmetic: `Span::covering` in `src/ranges.rs`",
        more: Some(
            "No defect today: ib_core refuses what wraps. Of an empty range inside a page it counts that page, and NVIDIA's \
             module pins 64 KiB for it.",
        ),
    },
    Row {
        letter: "M",
        what: "Records for an absurd length are allocated before anybody looks at the address",
        schedule: "8 TiB from an address of 2 MiB",
        rule: "A limit of 1 TiB before the provider is called: `MAX_LEN` in `src/mr.rs`",
        more: Some(
            "`nv-p2p.c` allocates 16 bytes for each page of 64 KiB, an address and two numbers, before it asks whose the memory \
             is: 2,048 MiB a call for 8 TiB. Up to the limit it does so for this module as well, up to 256 MiB.",
        ),
    },
    Row {
        letter: "N",
        what: "Whatever fails in acquire is `not mine`; a failing put there leaves the pin",
        schedule: "a BAR without room; a put in acquire that fails",
        rule: "The cause is logged: `src/log.rs`. Nothing is put in acquire",
        more: None,
    },
    Row {
        letter: "O",
        what: "The callback drops the module's last reference before it has returned",
        schedule: "stop the callback after its module_put; rmmod; go on",
        rule: "Unloading takes the provider's lock once, which the callback holds: `Callbacks::drop` in `src/nv.rs`",
        more: Some(
            "NVIDIA's module is gone while its callback is under way. Nothing breaks where the compiler makes the callback's last \
             call a jump, as here: the return then leads past the module's text. A few instructions decide that.",
        ),
    },
    Row {
        letter: "P",
        what: "Versions, sizes and counts of the provider, and its put's answer, are not looked at",
        schedule: "each of eight strange answers; a put that is out of memory",
        rule: "`TablePtr::check`, `DmaMapping::check` and the drop of `PersistentPin` in `src/nv.rs`; the puts of `src/callback_pin.rs`",
        more: Some(
            "Out of memory, `nvidia_p2p_put_pages` has done nothing, and is called again, up to ten times in a second; nvidia.ko \
             itself warns each time (`nv-p2p.c`), so a host with `panic_on_warn` stops. `nvidia_p2p_put_pages_persistent` has \
             given back the GPU's usage count, as after any error: it is called once, and the pin counted and logged as lost. \
             That a strange mapping fails with NVIDIA's module is the doing of the test VM's NIC, which compares the list with the \
             region; a real one takes the addresses that it is given.",
        ),
    },
];
