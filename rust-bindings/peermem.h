/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * The input of bindgen. The two interface headers come from the host that the
 * module is built for, or from this repository (see Kbuild).
 */
#ifndef PEERMEM_BINDINGS_H
#define PEERMEM_BINDINGS_H

#include <linux/types.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>

#include PEERMEM_NV_HEADER
#include PEERMEM_IB_HEADER

#include "../src/helpers.h"
#include "../src/memory_peers.h"

#ifndef NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API
#error "nv-p2p.h has no nvidia_p2p_get_pages_persistent(): NVIDIA's driver must be 535 or newer"
#endif
#ifndef PEER_MEM_U64_CORE_CONTEXT
#error "rdma/peer_mem.h does not declare core_context as u64: MLNX_OFED must be 5.4-3.0.3.0 or newer"
#endif

/*
 * Since MLNX_OFED 4.0, the header declares core_context as u64. The flag
 * PEER_MEM_INVALIDATE_UNMAPS and struct peer_memory_client_ex came later. If
 * the flag is missing, the compiler reports an error in the assertion below and
 * prints the line, which says what is needed.
 */
static_assert(PEER_MEM_INVALIDATE_UNMAPS == 1, "MLNX_OFED must be 5.4-3.0.3.0 or newer");

/*
 * The layout of struct nvidia_p2p_page_table since driver 580. In older
 * drivers, the structure ends with gpu_uuid. Drivers and headers are updated
 * separately. The module therefore checks the table's version at run time, and
 * does not rely on the header of the build. layout.c compares the two
 * structures.
 */
struct peermem_page_table {
	uint32_t version;
	uint32_t page_size;
	struct nvidia_p2p_page **pages;
	uint32_t entries;
	uint8_t *gpu_uuid;
	uint32_t flags;
};

#define PEERMEM_PAGE_TABLE_CPU_CACHEABLE	0x1

#endif /* PEERMEM_BINDINGS_H */
