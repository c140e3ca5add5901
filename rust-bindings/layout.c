// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Checks the headers of this build against the layouts that the module relies
 * on. bindings.rs checks bindgen's output against the same numbers.
 */

#include <linux/sched.h>
#include <linux/stddef.h>

#include "../src/compat.h"
#include "peermem.h"

#define AT(type, member, offset) \
	static_assert(offsetof(struct type, member) == (offset))
#define SIZE(type, size) \
	static_assert(sizeof(struct type) == (size))

/* COMM_LEN in src/history.rs has this value. */
static_assert(TASK_COMM_LEN == 16);

AT(peer_memory_client, name, 0);
AT(peer_memory_client, version, 64);
AT(peer_memory_client, acquire, 80);
AT(peer_memory_client, get_pages, 88);
AT(peer_memory_client, dma_map, 96);
AT(peer_memory_client, dma_unmap, 104);
AT(peer_memory_client, put_pages, 112);
AT(peer_memory_client, get_page_size, 120);
AT(peer_memory_client, release, 128);
SIZE(peer_memory_client, 136);
AT(peer_memory_client_ex, ex_size, 136);
AT(peer_memory_client_ex, flags, 144);

#define SAME(member) \
	static_assert(offsetof(struct peermem_page_table, member) == \
		      offsetof(struct nvidia_p2p_page_table, member))

SAME(version);
SAME(page_size);
SAME(pages);
SAME(entries);
SAME(gpu_uuid);
#if NVIDIA_P2P_PAGE_TABLE_VERSION >= 0x00020000
SAME(flags);
#endif
AT(peermem_page_table, flags, 32);
SIZE(peermem_page_table, 40);

AT(nvidia_p2p_page, physical_address, 0);

AT(nvidia_p2p_dma_mapping, version, 0);
AT(nvidia_p2p_dma_mapping, page_size_type, 4);
AT(nvidia_p2p_dma_mapping, entries, 8);
AT(nvidia_p2p_dma_mapping, dma_addresses, 16);
SIZE(nvidia_p2p_dma_mapping, 40);

static_assert(NVIDIA_P2P_PAGE_SIZE_4KB == 0);
static_assert(NVIDIA_P2P_PAGE_SIZE_64KB == 1);
static_assert(NVIDIA_P2P_PAGE_SIZE_128KB == 2);

/*
 * The functions that Rust calls, and the callbacks that Rust provides. A header
 * that declares one of them differently fails the build here.
 */
#define FUNCTION(name, type) \
	static_assert(__builtin_types_compatible_p(typeof(name), type))
#define CALLBACK(member, type) \
	FUNCTION(((struct peer_memory_client *)NULL)->member, type)

FUNCTION(nvidia_p2p_get_pages,
	 int (u64 token, u32 va_space, u64 address, u64 length,
	      struct nvidia_p2p_page_table **table,
	      void (*free_callback)(void *data), void *data));
FUNCTION(nvidia_p2p_put_pages,
	 int (u64 token, u32 va_space, u64 address,
	      struct nvidia_p2p_page_table *table));
FUNCTION(nvidia_p2p_get_pages_persistent,
	 int (u64 address, u64 length, struct nvidia_p2p_page_table **table,
	      u32 flags));
FUNCTION(nvidia_p2p_put_pages_persistent,
	 int (u64 address, struct nvidia_p2p_page_table *table, u32 flags));
FUNCTION(nvidia_p2p_dma_map_pages,
	 int (struct pci_dev *peer, struct nvidia_p2p_page_table *table,
	      struct nvidia_p2p_dma_mapping **mapping));
FUNCTION(nvidia_p2p_dma_unmap_pages,
	 int (struct pci_dev *peer, struct nvidia_p2p_page_table *table,
	      struct nvidia_p2p_dma_mapping *mapping));
FUNCTION(ib_register_peer_memory_client,
	 void *(const struct peer_memory_client *client,
		int (**callback)(void *handle, u64 context)));
FUNCTION(ib_unregister_peer_memory_client, void (void *handle));
FUNCTION((invalidate_peer_memory)NULL, int (*)(void *handle, u64 context));

CALLBACK(acquire, int (*)(unsigned long addr, size_t size, void *data,
			  char *name, void **context));
CALLBACK(get_pages, int (*)(unsigned long addr, size_t size, int write,
			    int force, struct sg_table *table, void *context,
			    u64 core_context));
CALLBACK(dma_map, int (*)(struct sg_table *table, void *context,
			  struct device *device, int dmasync, int *nmap));
CALLBACK(dma_unmap, int (*)(struct sg_table *table, void *context,
			    struct device *device));
CALLBACK(put_pages, void (*)(struct sg_table *table, void *context));
CALLBACK(get_page_size, unsigned long (*)(void *context));
CALLBACK(release, void (*)(void *context));
