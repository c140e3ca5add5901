// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The memory of coherent GPUs, as on Grace. The memory is not behind a BAR,
 * CPUs cache it, and each of its pages has a struct page. Processes map it like
 * the BAR, by page frame numbers, and get_user_pages() refuses it. The stand-in
 * imitates a driver that keeps the memory to itself and does not give it to the
 * kernel as a NUMA node.
 *
 * The memory is RAM that is reserved on the kernel's command line, by memmap=,
 * or on arm64 by mem=, which cuts off the end of RAM. rxe maps a peer's memory
 * write-combined, and a page must not have CPU mappings of two types. All
 * mappings are therefore write-combined. A test in a VM cannot see the
 * difference. On arm64, the kernel's own mapping stays cached. This conflict
 * has no effect in an emulator.
 */
#include <linux/bitmap.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "nvidia.h"

static unsigned long long coherent_start;
module_param(coherent_start, ullong, 0444);
MODULE_PARM_DESC(coherent_start, "start address of the reserved RAM that is memory of coherent GPUs");

static uint coherent_mib;
module_param(coherent_mib, uint, 0444);
MODULE_PARM_DESC(coherent_mib, "size of the RAM at coherent_start in MiB; 0: no coherent memory");

static bool coherent;
module_param(coherent, bool, 0644);
MODULE_PARM_DESC(coherent, "Y: new allocations are made in the memory of coherent GPUs");

struct coherent_memory coherent_memory;

static struct dev_pagemap pagemap = {
	.type		= MEMORY_DEVICE_GENERIC,
	.nr_range	= 1,
};

/* Returns true if new allocations go to coherent memory. */
bool coherent_is_wanted(void)
{
	return READ_ONCE(coherent);
}

/*
 * Maps pages for a device with the DMA API's functions for RAM. The function
 * replaces the physical address of each 64 KiB page in @addresses by the DMA
 * address. An IOMMU may map each smaller page of the kernel to any address. If
 * the parts of a 64 KiB page are not adjacent after that, the function fails
 * with -EIO, because nvidia.ko's interface cannot describe such a page.
 */
int coherent_map(struct device *peer, struct sg_table *sgt, u64 *addresses,
		 u32 pages)
{
	const u32 per_page = STANDIN_PAGE_SIZE / PAGE_SIZE;
	u64 count = (u64)pages * per_page, i;
	struct sg_dma_page_iter iter;
	struct page **list;
	int ret;

	ret = fail_here(FAIL_DMA_MAP_PAGE);
	if (ret)
		return ret;

	list = kvmalloc_objs(*list, count);
	if (!list)
		return -ENOMEM;
	for (i = 0; i < count && !ret; i++) {
		unsigned long pfn = PHYS_PFN(addresses[i / per_page]) + i % per_page;

		if (pfn_valid(pfn))
			list[i] = pfn_to_page(pfn);
		else
			ret = -EIO;
	}
	if (!ret)
		ret = sg_alloc_table_from_pages(sgt, list, count, 0,
						count << PAGE_SHIFT, GFP_KERNEL);
	kvfree(list);
	if (ret)
		return ret;

	if (dma_map_sgtable(peer, sgt, DMA_BIDIRECTIONAL, RAM_ATTRS)) {
		sg_free_table(sgt);
		return -EIO;
	}
	i = 0;
	for_each_sgtable_dma_page(sgt, &iter, 0) {
		dma_addr_t addr = sg_page_iter_dma_address(&iter);
		u64 *page = &addresses[i / per_page];
		u64 offset = i++ % per_page * PAGE_SIZE;

		if (!offset)
			*page = addr;
		else if (addr != *page + offset)
			ret = -EIO;
	}
	if (ret)
		coherent_unmap(peer, sgt);
	return ret;
}

void coherent_unmap(struct device *peer, struct sg_table *sgt)
{
	dma_unmap_sgtable(peer, sgt, DMA_BIDIRECTIONAL, RAM_ATTRS);
	sg_free_table(sgt);
}

/* Adds the coherent memory that coherent_start and coherent_mib describe. */
int __init coherent_init(void)
{
	u64 length = (u64)coherent_mib << 20;
	void *mapped;
	int ret;

	if (!length)
		return 0;
	if (!IS_ALIGNED(coherent_start | length, STANDIN_GRANULE) ||
	    region_intersects(coherent_start, length, IORESOURCE_SYSTEM_RAM,
			      IORES_DESC_NONE) != REGION_DISJOINT) {
		pr_err("nvidia: no memory of a coherent GPU at %#llx: reserve it (memmap= or mem=)\n",
		       coherent_start);
		return -EINVAL;
	}

	coherent_memory.start = coherent_start;
	coherent_memory.pages = length / STANDIN_PAGE_SIZE;
	coherent_memory.used = bitmap_zalloc(coherent_memory.pages, GFP_KERNEL);
	if (!coherent_memory.used)
		return -ENOMEM;
	ret = arch_io_reserve_memtype_wc(coherent_start, length);
	if (ret)
		goto free_bitmap;
	pagemap.range.start = coherent_start;
	pagemap.range.end = coherent_start + length - 1;
	mapped = memremap_pages(&pagemap, numa_mem_id());
	if (!IS_ERR(mapped))
		return 0;

	ret = PTR_ERR(mapped);
	arch_io_free_memtype_wc(coherent_start, length);
free_bitmap:
	bitmap_free(coherent_memory.used);
	return ret;
}

void coherent_exit(void)
{
	if (!coherent_memory.pages)
		return;
	memunmap_pages(&pagemap);
	arch_io_free_memtype_wc(coherent_start, (u64)coherent_mib << 20);
	bitmap_free(coherent_memory.used);
}
