// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The functions that clients call. The work is done by NVIDIA's upper half
 * (nvidia/upper.c) or, in a build without NVIDIA's code, by p2p.c and dma.c.
 * This file adds the stand-in's counters. It also makes calls fail on request
 * before they reach the resource manager.
 */
#include <linux/export.h>
#include <linux/kernel.h>
#include <linux/pci.h>

#include "nvidia.h"
#include "upper.h"


/*
 * Returns false if the caller's table was freed. NVIDIA's code would use
 * whatever is at the table's old address.
 */
static bool is_live(const struct nvidia_p2p_page_table *table, const char *who)
{
	if (!WARN(table && !rm_has_table(table),
		  "nvidia: %s of a page table that is gone\n", who))
		return true;
	count(MISUSE);
	return false;
}

/*
 * Counts the bytes of the three arrays that get_pages allocates before it
 * checks the address.
 */
static void count_records(u64 length)
{
	count_add(RECORD_BYTES, length / STANDIN_PAGE_SIZE * 16);
}

int nvidia_p2p_get_pages(u64 p2p_token, u32 va_space, u64 virtual_address,
			 u64 length, struct nvidia_p2p_page_table **page_table,
			 void (*free_callback)(void *data), void *data)
{
	CLASS(spent, spent)(SPENT_PIN);
	int ret;

	might_sleep();
	count(GET_PAGES);

	count_records(length);
	ret = upper_get_pages(p2p_token, va_space, virtual_address, length,
			      page_table, free_callback, data);
	if (!ret)
		count(GET_PAGES_OK);
	return ret;
}
EXPORT_SYMBOL(nvidia_p2p_get_pages);

int nvidia_p2p_get_pages_persistent(u64 virtual_address, u64 length,
				    struct nvidia_p2p_page_table **page_table,
				    u32 flags)
{
	CLASS(spent, spent)(SPENT_PIN);
	int ret;

	might_sleep();
	count(GET_PAGES_PERSISTENT);

	count_records(length);
	ret = upper_get_pages_persistent(virtual_address, length, page_table,
					 flags);
	if (!ret)
		count(GET_PAGES_PERSISTENT_OK);
	return ret;
}
EXPORT_SYMBOL(nvidia_p2p_get_pages_persistent);

int nvidia_p2p_put_pages(u64 p2p_token, u32 va_space, u64 virtual_address,
			 struct nvidia_p2p_page_table *page_table)
{
	CLASS(spent, spent)(SPENT_UNPIN);

	might_sleep();
	count(PUT_PAGES);
	return upper_put_pages(p2p_token, va_space, virtual_address, page_table);
}
EXPORT_SYMBOL(nvidia_p2p_put_pages);

int nvidia_p2p_put_pages_persistent(u64 virtual_address,
				    struct nvidia_p2p_page_table *page_table,
				    u32 flags)
{
	CLASS(spent, spent)(SPENT_UNPIN);

	might_sleep();
	count(PUT_PAGES_PERSISTENT);

	if (!is_live(page_table, "put_pages_persistent"))
		return -EINVAL;
	return upper_put_pages_persistent(virtual_address, page_table, flags);
}
EXPORT_SYMBOL(nvidia_p2p_put_pages_persistent);

int nvidia_p2p_dma_map_pages(struct pci_dev *peer,
			     struct nvidia_p2p_page_table *page_table,
			     struct nvidia_p2p_dma_mapping **dma_mapping)
{
	CLASS(spent, spent)(SPENT_MAP);
	int ret;

	might_sleep();
	count(DMA_MAP);

	ret = is_live(page_table, "dma_map") ? 0 : -EINVAL;
	if (!ret)
		ret = upper_dma_map_pages(peer, page_table, dma_mapping);
	if (!ret)
		count(DMA_MAP_OK);
	return ret;
}
EXPORT_SYMBOL(nvidia_p2p_dma_map_pages);

int nvidia_p2p_dma_unmap_pages(struct pci_dev *peer,
			       struct nvidia_p2p_page_table *page_table,
			       struct nvidia_p2p_dma_mapping *dma_mapping)
{
	CLASS(spent, spent)(SPENT_UNMAP);
	int ret;

	might_sleep();
	count(DMA_UNMAP);

	ret = fail_here(FAIL_DMA_UNMAP);
	if (ret)
		return ret;

	if (!is_live(page_table, "dma_unmap"))
		return 0;
	return upper_dma_unmap_pages(peer, page_table, dma_mapping);
}
EXPORT_SYMBOL(nvidia_p2p_dma_unmap_pages);

int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *page_table)
{
	CLASS(spent, spent)(SPENT_NOTHING);
	int ret;

	might_sleep();
	ret = fail_here(FAIL_FREE_PAGE_TABLE);
	return ret ?: upper_free_page_table(page_table);
}
EXPORT_SYMBOL(nvidia_p2p_free_page_table);

int nvidia_p2p_free_dma_mapping(struct nvidia_p2p_dma_mapping *dma_mapping)
{
	CLASS(spent, spent)(SPENT_NOTHING);
	int ret;

	might_sleep();
	ret = fail_here(FAIL_FREE_DMA_MAPPING);
	return ret ?: upper_free_dma_mapping(dma_mapping);
}
EXPORT_SYMBOL(nvidia_p2p_free_dma_mapping);

int nvidia_p2p_init_mapping(u64 p2p_token, struct nvidia_p2p_params *params,
			    void (*destroy_callback)(void *data), void *data)
{
	might_sleep();
	return upper_init_mapping(p2p_token, params, destroy_callback, data);
}
EXPORT_SYMBOL(nvidia_p2p_init_mapping);

int nvidia_p2p_destroy_mapping(u64 p2p_token)
{
	might_sleep();
	return upper_destroy_mapping(p2p_token);
}
EXPORT_SYMBOL(nvidia_p2p_destroy_mapping);
