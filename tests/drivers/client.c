// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A peer-memory client of another driver, with the name CLIENT. The client
 * accepts ranges between @start and @end. For each range, it maps the memory at
 * @phys, in a PCI BAR. Without parameters, the client accepts no range. A
 * client with the name nv_mem imitates nv_peer_mem, the predecessor of NVIDIA's
 * nvidia-peermem.
 */

#include <linux/dma-mapping.h>
#include <linux/errno.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <rdma/peer_mem.h>

static unsigned long start, end, phys;
module_param(start, ulong, 0644);
module_param(end, ulong, 0644);
module_param(phys, ulong, 0444);

/* The context that ib_core keeps for the client is the length of the range. */
static int acquire(unsigned long addr, size_t size, void *private_data,
		   char *peer_name, void **context)
{
	if (addr < start || addr >= end || size > end - addr)
		return 0;
	*context = (void *)size;
	return 1;
}

static int get_pages(unsigned long addr, size_t size, int write, int force,
		     struct sg_table *sgt, void *context, u64 ticket)
{
	return 0;
}

static int dma_map(struct sg_table *sgt, void *context, struct device *dev,
		   int dmasync, int *nmap)
{
	size_t size = (size_t)context;
	dma_addr_t dma;

	if (sg_alloc_table(sgt, 1, GFP_KERNEL))
		return -ENOMEM;
	dma = dma_map_resource(dev, phys, size, DMA_BIDIRECTIONAL, 0);
	if (dma_mapping_error(dev, dma)) {
		sg_free_table(sgt);
		return -EIO;
	}
	sg_dma_address(sgt->sgl) = dma;
	sg_dma_len(sgt->sgl) = size;
	sgt->sgl->length = size;
	*nmap = 1;
	return 0;
}

static int dma_unmap(struct sg_table *sgt, void *context, struct device *dev)
{
	dma_unmap_resource(dev, sg_dma_address(sgt->sgl), (size_t)context,
			   DMA_BIDIRECTIONAL, 0);
	sg_free_table(sgt);
	return 0;
}

static void put_pages(struct sg_table *sgt, void *context)
{
}

static unsigned long get_page_size(void *context)
{
	return PAGE_SIZE;
}

static const struct peer_memory_client client = {
	.name = CLIENT,
	.version = "1.3",
	.acquire = acquire,
	.get_pages = get_pages,
	.dma_map = dma_map,
	.dma_unmap = dma_unmap,
	.put_pages = put_pages,
	.get_page_size = get_page_size,
};

static void *handle;

static int __init client_init(void)
{
	handle = ib_register_peer_memory_client(&client, NULL);
	return handle ? 0 : -EINVAL;
}
module_init(client_init);

static void __exit client_exit(void)
{
	ib_unregister_peer_memory_client(handle);
}
module_exit(client_exit);

MODULE_DESCRIPTION("A client of another driver, for tests");
MODULE_VERSION("1.3");
MODULE_LICENSE("Dual BSD/GPL");
