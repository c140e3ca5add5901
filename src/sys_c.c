// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The C side of sys.rs: see sys.h.
 */

#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/rwsem.h>
#include <linux/timekeeping.h>

#include "sys.h"

/* Names, types, values and modes are those of NVIDIA's module. */
static int peerdirect_support;
module_param(peerdirect_support, int, 0444);
MODULE_PARM_DESC(peerdirect_support,
		 "How invalidations reach ib_core: 0 [default], or 1 for MLNX_OFED 4.9 LTS");

static int persistent_api_support = 1;
module_param(persistent_api_support, int, 0444);
MODULE_PARM_DESC(persistent_api_support,
		 "Clients: 1 [default] persistent pins only, 0 revocable pins first");

/* Rust's module! has no key for it, and every consumer looks at it. */
MODULE_VERSION(PEERMEM_VERSION);
/* ib_core keeps 16 bytes of it, of which the last is a flag. */
static_assert(sizeof(PEERMEM_VERSION) <= 15);

int peermem_peerdirect_support(void)
{
	return peerdirect_support;
}

int peermem_persistent_api_support(void)
{
	return persistent_api_support;
}

const char *peermem_version(void)
{
	return PEERMEM_VERSION;
}

time64_t peermem_seconds(void)
{
	return ktime_get_seconds();
}

/* Fails once the module is going away. */
bool peermem_module_hold(void)
{
	return try_module_get(THIS_MODULE);
}

void peermem_module_release(void)
{
	module_put(THIS_MODULE);
}

static DECLARE_RWSEM(gate);

void peermem_gate_read(void)
{
	down_read(&gate);
}

void peermem_gate_read_end(void)
{
	up_read(&gate);
}

void peermem_gate_write(void)
{
	down_write(&gate);
}

void peermem_gate_write_end(void)
{
	up_write(&gate);
}

/* A reference to the PCI device that @dev is, or NULL. */
struct pci_dev *peermem_pci_dev_get(struct device *dev)
{
	return dev && dev_is_pci(dev) ? pci_dev_get(to_pci_dev(dev)) : NULL;
}

unsigned int peermem_max_segment(struct pci_dev *pdev)
{
	return dma_get_max_seg_size(&pdev->dev);
}

int peermem_sg_alloc(struct sg_table *table, unsigned int entries)
{
	return sg_alloc_table(table, entries, GFP_KERNEL);
}

/* Fills an entry that has no pages, only a DMA address. Returns the next. */
struct scatterlist *peermem_sg_fill(struct scatterlist *sg, u64 addr,
				    unsigned int len)
{
	sg_set_page(sg, NULL, len, 0);
	sg_dma_address(sg) = addr;
	sg_dma_len(sg) = len;
	return sg_next(sg);
}

/* The memory BAR that has @addr in it, of any PCI device. */
bool peermem_bar_of(u64 addr, u64 *start, u64 *len)
{
	struct pci_dev *pdev = NULL;

	for_each_pci_dev(pdev) {
		int i;

		for (i = 0; i < PCI_STD_NUM_BARS; i++) {
			struct resource *res = &pdev->resource[i];

			if (!(res->flags & IORESOURCE_MEM) || !res->parent)
				continue;
			if (addr < res->start || addr > res->end)
				continue;
			*start = res->start;
			*len = resource_size(res);
			pci_dev_put(pdev);
			return true;
		}
	}
	return false;
}

/*
 * Is there a struct page for any of it? A BAR has one only where its driver
 * made it peer-to-peer DMA memory, in steps of a subsection of memory.
 */
bool peermem_has_struct_page(u64 addr, u64 len)
{
	u64 pos;

	for (pos = 0; pos < len; pos += SZ_2M)
		if (pfn_valid(PHYS_PFN(addr + pos)))
			return true;
	return len && pfn_valid(PHYS_PFN(addr + len - 1));
}

/*
 * Any number of registrations may have the same memory, each with a mapping of
 * its own. CONFIG_DMA_API_DEBUG takes more than eight for a leak unless told.
 */
#ifdef DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#define BAR_ATTRS	DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#else
#define BAR_ATTRS	0
#endif

int peermem_bar_map(struct pci_dev *pdev, u64 addr, size_t len, u64 *dma)
{
	dma_addr_t mapped = dma_map_resource(&pdev->dev, addr, len,
					     DMA_BIDIRECTIONAL, BAR_ATTRS);

	if (dma_mapping_error(&pdev->dev, mapped))
		return -EIO;
	*dma = mapped;
	return 0;
}

void peermem_bar_unmap(struct pci_dev *pdev, u64 dma, size_t len)
{
	dma_unmap_resource(&pdev->dev, dma, len, DMA_BIDIRECTIONAL, BAR_ATTRS);
}
