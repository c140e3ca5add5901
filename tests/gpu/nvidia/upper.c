// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The upper half of nvidia.ko: NVIDIA's unmodified nv-p2p.c. Only its interface
 * functions are renamed, so that front.c can wrap them.
 */
#define nvidia_p2p_init_mapping		upper_init_mapping
#define nvidia_p2p_destroy_mapping	upper_destroy_mapping
#define nvidia_p2p_get_pages		upper_get_pages
#define nvidia_p2p_get_pages_persistent	upper_get_pages_persistent
#define nvidia_p2p_put_pages		upper_put_pages
#define nvidia_p2p_put_pages_persistent	upper_put_pages_persistent
#define nvidia_p2p_dma_map_pages	upper_dma_map_pages
#define nvidia_p2p_dma_unmap_pages	upper_dma_unmap_pages
#define nvidia_p2p_free_page_table	upper_free_page_table
#define nvidia_p2p_free_dma_mapping	upper_free_dma_mapping

#include "nv-p2p.c"

#include <linux/moduleparam.h>

#include "../upper.h"

static uint table_version = NVIDIA_P2P_PAGE_TABLE_VERSION;
module_param(table_version, uint, 0444);
MODULE_PARM_DESC(table_version, "version of the page tables of this nv-p2p.c");

void *upper_memory(const void *table)
{
	return container_of((struct nvidia_p2p_page_table *)table,
			    nv_p2p_mem_info_t, page_table);
}

void *upper_table(void *memory)
{
	return &((nv_p2p_mem_info_t *)memory)->page_table;
}

size_t upper_memory_size(void)
{
	return sizeof(nv_p2p_mem_info_t);
}
