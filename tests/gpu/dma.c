// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * DMA mappings: the work of nvidia_p2p_dma_map_pages() and
 * nvidia_p2p_dma_unmap_pages(). front.c calls the functions here.
 *
 * A page table may be mapped any number of times, for one or more devices. The
 * mappings are independent of each other, and are unmapped when the table is
 * freed.
 */
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/overflow.h>
#include <linux/poison.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/test_hold.h>

#include "nvidia.h"
#include "upper.h"

TEST_HOLD(dma_map_before_insert);

static uint dma_mapping_version = NVIDIA_P2P_DMA_MAPPING_VERSION;
module_param(dma_mapping_version, uint, 0644);
MODULE_PARM_DESC(dma_mapping_version, "version of DMA mappings");

static int dma_entries_delta;
module_param(dma_entries_delta, int, 0644);
MODULE_PARM_DESC(dma_entries_delta, "number added to the entry count that DMA mappings report");

static bool topology_deny;
module_param(topology_deny, bool, 0644);
MODULE_PARM_DESC(topology_deny, "Y: no device can reach the GPU");

/*
 * DMA addresses behind an IOMMU have no fixed order. This parameter maps the
 * pages of a table in reverse order. The DMA addresses then descend and differ
 * from the table's, even without an IOMMU.
 */
static bool dma_permute;
module_param(dma_permute, bool, 0644);
MODULE_PARM_DESC(dma_permute, "DMA mappings have the pages of the table in reverse order");

/**
 * struct mapping - a page table mapped for one device
 * @node: in pin->mappings
 * @pages: number of mapped 64 KiB pages
 * @coherent: true if the pages have struct pages, and are mapped together
 * @sgt: scatter table of a coherent mapping
 * @dma: the mapping that the client gets
 */
struct mapping {
	struct list_head node;
	u32 pages;
	bool coherent;
	struct sg_table sgt;
	struct nvidia_p2p_dma_mapping dma;
};

/* Returns false if the table was freed. A free poisons the magic number. */
static bool is_live(const struct pin *pin, const char *who)
{
	if (!WARN(pin->magic != PIN_MAGIC,
		  "nvidia: %s of a page table that is gone\n", who))
		return true;
	count(MISUSE);
	return false;
}

static struct mapping *mapping_alloc(struct pci_dev *peer, u32 pages)
{
	struct mapping *map;

	map = kzalloc_obj(*map);
	if (!map)
		return NULL;
	/*
	 * Allocate one more entry, for a client that trusts a false entry
	 * count.
	 */
	map->dma.dma_addresses = kvmalloc_array(pages + 1UL, sizeof(u64),
						GFP_KERNEL);
	if (!map->dma.dma_addresses) {
		kfree(map);
		return NULL;
	}
	map->dma.dma_addresses[pages] = DMA_MAPPING_ERROR;

	map->dma.version = READ_ONCE(dma_mapping_version);
	map->dma.page_size_type = NVIDIA_P2P_PAGE_SIZE_64KB;
	map->dma.entries = pages + READ_ONCE(dma_entries_delta);
	map->dma.private = map;
	map->dma.pci_dev = pci_dev_get(peer);
	return map;
}

/* Unmaps all mapped pages, and frees the mapping. */
static void mapping_free(struct mapping *map)
{
	u64 *addresses = map->dma.dma_addresses;
	u32 i;

	if (map->coherent && map->pages)
		coherent_unmap(&map->dma.pci_dev->dev, &map->sgt);
	for (i = 0; i < map->pages && !map->coherent; i++) {
		dma_unmap_resource(&map->dma.pci_dev->dev, addresses[i],
				   STANDIN_PAGE_SIZE, DMA_BIDIRECTIONAL, BAR_ATTRS);
		if (i % 1024 == 1023)
			cond_resched();
	}
	pci_dev_put(map->dma.pci_dev);
	memset(addresses, POISON_FREE, array_size(map->pages, sizeof(u64)));
	kvfree(addresses);
	memset(map, POISON_FREE, sizeof(*map));
	kfree(map);
}

/*
 * Maps coherent memory. It is not in a BAR, so there are no BAR bounds to
 * check.
 */
static int map_coherent(struct mapping *map, u32 pages)
{
	int ret = coherent_map(&map->dma.pci_dev->dev, &map->sgt,
			       map->dma.dma_addresses, pages);

	if (!ret)
		map->pages = pages;
	return ret;
}

static int map_page(struct mapping *map, const struct gpu *gpu, u64 phys)
{
	dma_addr_t addr;
	int ret;

	ret = fail_here(FAIL_DMA_MAP_PAGE);
	if (ret)
		return ret;

	if (!gpu_can_map(gpu, phys, STANDIN_PAGE_SIZE))
		return -EIO;

	addr = dma_map_resource(&map->dma.pci_dev->dev, phys, STANDIN_PAGE_SIZE,
				DMA_BIDIRECTIONAL, BAR_ATTRS);
	if (dma_mapping_error(&map->dma.pci_dev->dev, addr))
		return -EIO;
	map->dma.dma_addresses[map->pages++] = addr;
	return 0;
}

int upper_dma_map_pages(struct pci_dev *peer,
			struct nvidia_p2p_page_table *table,
			struct nvidia_p2p_dma_mapping **dma_mapping)
{
	bool permute = READ_ONCE(dma_permute);
	struct mapping *map;
	struct pin *pin;
	struct gpu *gpu;
	u32 i, page;
	u64 phys;
	int ret;

	if (!peer || !table || !dma_mapping)
		return -EINVAL;

	/*
	 * No lock is held yet, so the table may be freed during these checks.
	 */
	pin = container_of(table, struct pin, table);
	if (!is_live(pin, "dma_map"))
		return -EINVAL;
	if (!table->gpu_uuid)
		return -EINVAL;
	*dma_mapping = NULL;
	gpu = gpu_get_by_uuid(table->gpu_uuid);
	if (!gpu)
		return -EINVAL;

	map = mapping_alloc(peer, pin->pages);
	if (!map) {
		ret = -ENOMEM;
		goto put_gpu;
	}

	ret = fail_here(FAIL_DMA_MAP) ?: api_lock();
	if (ret)
		goto free_mapping;
	ret = topology_deny ? -ENOTSUPP : 0;
	/*
	 * A revocation may have freed the table while this thread waited for
	 * the lock.
	 */
	if (!is_live(pin, "dma_map"))
		ret = -EIO;
	if (!ret)
		map->coherent = coherent_has(table->pages[0]->physical_address);
	for (i = 0; !ret && i < pin->pages; i++) {
		page = permute ? pin->pages - 1 - i : i;
		phys = table->pages[page]->physical_address;
		if (map->coherent)
			map->dma.dma_addresses[i] = phys;
		else
			ret = map_page(map, gpu, phys);
	}
	if (!ret && map->coherent)
		ret = map_coherent(map, pin->pages);
	api_unlock();
	if (ret)
		goto free_mapping;

	/* A revocation may also free the table here. */
	test_hold_here(&dma_map_before_insert);
	if (!is_live(pin, "dma_map")) {
		ret = -EIO;
		goto free_mapping;
	}

	mutex_lock(&pin->lock);
	list_add_tail(&map->node, &pin->mappings);
	count(MAPPINGS_LIVE);
	*dma_mapping = &map->dma;
	mutex_unlock(&pin->lock);
	gpu_put(gpu);
	return 0;

free_mapping:
	mapping_free(map);
put_gpu:
	gpu_put(gpu);
	return ret;
}

static struct mapping *unlink_mapping(struct pin *pin,
				      const struct nvidia_p2p_dma_mapping *dma)
{
	struct mapping *map;

	guard(mutex)(&pin->lock);
	list_for_each_entry(map, &pin->mappings, node) {
		if (&map->dma == dma) {
			list_del(&map->node);
			uncount(MAPPINGS_LIVE);
			return map;
		}
	}
	return NULL;
}

/*
 * Unmaps a table for one device. Clients may call this function in a free
 * callback, or while a callback runs in another thread. The function therefore
 * does not take the API lock. It ignores a mapping that the table does not
 * have.
 */
int upper_dma_unmap_pages(struct pci_dev *peer,
			  struct nvidia_p2p_page_table *table,
			  struct nvidia_p2p_dma_mapping *dma_mapping)
{
	struct mapping *map;
	struct pin *pin;

	if (!peer || !table || !dma_mapping)
		return -EINVAL;
	pin = container_of(table, struct pin, table);
	if (!is_live(pin, "dma_unmap"))
		return 0;
	map = unlink_mapping(pin, dma_mapping);
	if (!map)
		return 0;
	WARN(map->dma.pci_dev != peer, "nvidia: dma_unmap for another device\n");

	/* From here on, another thread may free the table. */
	mapping_free(map);
	return 0;
}

int upper_free_dma_mapping(struct nvidia_p2p_dma_mapping *dma_mapping)
{
	return 0;
}

/* Unmaps a table that is being freed. */
void dma_unmap_all(struct pin *pin)
{
	struct mapping *map, *next;

	guard(mutex)(&pin->lock);
	list_for_each_entry_safe(map, next, &pin->mappings, node) {
		list_del(&map->node);
		uncount(MAPPINGS_LIVE);
		mapping_free(map);
	}
}

void dma_hold_points(struct dentry *dir)
{
	test_hold_debugfs(dir, &dma_map_before_insert);
}
