// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * As the module before NVIDIA's, which has the same client: here one that wants
 * no address.
 */

#include <linux/errno.h>
#include <linux/module.h>
#include <rdma/peer_mem.h>

static int acquire(unsigned long addr, size_t size, void *private_data,
		   char *peer_name, void **context)
{
	return 0;
}

/* After an acquire that answered with yes alone, so never. */
static int get_pages(unsigned long addr, size_t size, int write, int force,
		     struct sg_table *sgt, void *context, u64 ticket)
{
	return -EINVAL;
}

static int dma_map(struct sg_table *sgt, void *context, struct device *dev,
		   int dmasync, int *nmap)
{
	return -EINVAL;
}

static int dma_unmap(struct sg_table *sgt, void *context, struct device *dev)
{
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
	.name = "nv_mem",
	.version = "1.3",
	.acquire = acquire,
	.get_pages = get_pages,
	.dma_map = dma_map,
	.dma_unmap = dma_unmap,
	.put_pages = put_pages,
	.get_page_size = get_page_size,
};

static void *handle;

static int __init nv_peer_mem_init(void)
{
	handle = ib_register_peer_memory_client(&client, NULL);
	return handle ? 0 : -EINVAL;
}
module_init(nv_peer_mem_init);

static void __exit nv_peer_mem_exit(void)
{
	ib_unregister_peer_memory_client(handle);
}
module_exit(nv_peer_mem_exit);

MODULE_DESCRIPTION("A client of the same name, for tests");
MODULE_VERSION("1.3");
MODULE_LICENSE("Dual BSD/GPL");
