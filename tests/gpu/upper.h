/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Functions that front.c calls for clients. A build without NVIDIA's code has
 * them in p2p.c and dma.c. Otherwise they are NVIDIA's functions, which
 * nvidia/upper.c renames and which call nvidia/rm.c.
 */
#ifndef _STANDIN_UPPER_H_
#define _STANDIN_UPPER_H_

#include <linux/types.h>

struct nvidia_p2p_dma_mapping;
struct nvidia_p2p_page_table;
struct nvidia_p2p_params;
struct pci_dev;

int upper_init_mapping(u64 token, struct nvidia_p2p_params *params,
		       void (*destroy_callback)(void *data), void *data);
int upper_destroy_mapping(u64 token);
int upper_get_pages(u64 token, u32 va_space, u64 va,
		    u64 length, struct nvidia_p2p_page_table **table,
		    void (*free_callback)(void *data), void *data);
int upper_get_pages_persistent(u64 va, u64 length,
			       struct nvidia_p2p_page_table **table,
			       u32 flags);
int upper_put_pages(u64 token, u32 va_space, u64 va,
		    struct nvidia_p2p_page_table *table);
int upper_put_pages_persistent(u64 va,
			       struct nvidia_p2p_page_table *table,
			       u32 flags);
int upper_dma_map_pages(struct pci_dev *peer,
			struct nvidia_p2p_page_table *table,
			struct nvidia_p2p_dma_mapping **mapping);
int upper_dma_unmap_pages(struct pci_dev *peer,
			  struct nvidia_p2p_page_table *table,
			  struct nvidia_p2p_dma_mapping *mapping);
int upper_free_page_table(struct nvidia_p2p_page_table *table);
int upper_free_dma_mapping(struct nvidia_p2p_dma_mapping *mapping);

/*
 * Convert between a page table and the allocation that contains it, and return
 * the allocation's size.
 */
void *upper_memory(const void *table);
void *upper_table(void *memory);
size_t upper_memory_size(void);

/*
 * Returns true if the page table was not freed. In a build without NVIDIA's
 * code, always returns true, because p2p.c and dma.c check the tables
 * themselves.
 */
#ifdef STANDIN_BAR1
bool rm_has_table(const struct nvidia_p2p_page_table *table);
#else
static inline bool rm_has_table(const struct nvidia_p2p_page_table *table)
{
	return true;
}
#endif

#endif /* _STANDIN_UPPER_H_ */
