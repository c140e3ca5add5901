// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The bindings that bindgen generates from [`peermem.h`](peermem.h). Only the files that wrap C
//! code in safe types, such as `ib.rs` and `nv.rs`, may use this module.
//!
//! Types of the kernel itself come from the `kernel` crate, so the bindings and that crate use the
//! same types. `module_put`, `pci_get_device` and `try_module_get` come from that crate as well.
//! The KUnit tests replace these three functions with fakes.

mod generated {
    #![allow(
        clippy::all,
        dead_code,
        clippy::undocumented_unsafe_blocks,
        improper_ctypes,
        missing_docs,
        non_camel_case_types,
        non_snake_case,
        non_upper_case_globals,
        unreachable_pub,
        unused_imports,
        unsafe_op_in_unsafe_fn,
        reason = "generated: which of these apply depends on the headers"
    )]

    use kernel::bindings::*;
    use kernel::ffi;

    include!(concat!(env!("PEERMEM_GENERATED"), "/generated.rs"));
}

pub(crate) use generated::*;

#[cfg(not(peermem_kunit))]
pub(crate) use kernel::bindings::{
    module_put,
    pci_get_device,
    try_module_get, //
};

/// `struct peer_memory_client_ex` with a named field for its last four bytes. MLNX_OFED 4.9 reads
/// these bytes as half of a pointer, and unnamed padding need not be zero.
#[derive(Default)]
#[repr(C)]
pub(crate) struct ClientEx {
    pub(crate) client: peer_memory_client,
    pub(crate) ex_size: usize,
    pub(crate) flags: u32,
    pub(crate) _zero: u32,
}

/// Asserts the same layout as `layout.c`.
const _: () = {
    use core::mem::offset_of;
    use core::mem::size_of;

    assert!(offset_of!(peer_memory_client, name) == 0);
    assert!(offset_of!(peer_memory_client, version) == 64);
    assert!(offset_of!(peer_memory_client, acquire) == 80);
    assert!(offset_of!(peer_memory_client, get_pages) == 88);
    assert!(offset_of!(peer_memory_client, dma_map) == 96);
    assert!(offset_of!(peer_memory_client, dma_unmap) == 104);
    assert!(offset_of!(peer_memory_client, put_pages) == 112);
    assert!(offset_of!(peer_memory_client, get_page_size) == 120);
    assert!(offset_of!(peer_memory_client, release) == 128);
    assert!(size_of::<peer_memory_client>() == 136);
    assert!(offset_of!(peer_memory_client_ex, client) == 0);
    assert!(offset_of!(peer_memory_client_ex, ex_size) == 136);
    assert!(offset_of!(peer_memory_client_ex, flags) == 144);
    assert!(PEER_MEM_INVALIDATE_UNMAPS == 1);
    assert!(size_of::<ClientEx>() == size_of::<peer_memory_client_ex>());
    assert!(offset_of!(ClientEx, ex_size) == offset_of!(peer_memory_client_ex, ex_size));
    assert!(offset_of!(ClientEx, flags) == offset_of!(peer_memory_client_ex, flags));

    assert!(offset_of!(peermem_page_table, version) == 0);
    assert!(offset_of!(peermem_page_table, page_size) == 4);
    assert!(offset_of!(peermem_page_table, pages) == 8);
    assert!(offset_of!(peermem_page_table, entries) == 16);
    assert!(offset_of!(peermem_page_table, gpu_uuid) == 24);
    assert!(offset_of!(peermem_page_table, flags) == 32);
    assert!(size_of::<peermem_page_table>() == 40);

    assert!(offset_of!(nvidia_p2p_page, physical_address) == 0);

    assert!(offset_of!(nvidia_p2p_dma_mapping, version) == 0);
    assert!(offset_of!(nvidia_p2p_dma_mapping, page_size_type) == 4);
    assert!(offset_of!(nvidia_p2p_dma_mapping, entries) == 8);
    assert!(offset_of!(nvidia_p2p_dma_mapping, dma_addresses) == 16);
    assert!(size_of::<nvidia_p2p_dma_mapping>() == 40);
};
