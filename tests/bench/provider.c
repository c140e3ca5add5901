// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Makes the calls to nvidia.ko that one registration needs, from pin to unpin,
 * without a client, ib_core or an RDMA device. The rate of these calls is the
 * highest rate that nvidia.ko's own lock permits.
 *
 * /sys/kernel/debug/bench/persistent, revocable: A write of an address in the
 * writer's GPU memory pins 64 KiB at this address, and unpins them. In
 * persistent mode, it also maps the memory for the first NIC and unmaps it. A
 * revocable pin needs no mapping, because the page table has all addresses.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sizes.h>

#include <nv-p2p.h>

#include "bench.h"

static struct pci_dev *nic;

static int persistent_life(void *unused, u64 address)
{
	struct nvidia_p2p_dma_mapping *mapping;
	struct nvidia_p2p_page_table *table;
	int ret, err;

	ret = nvidia_p2p_get_pages_persistent(address, SZ_64K, &table, 0);
	if (ret)
		return ret;
	ret = nvidia_p2p_dma_map_pages(nic, table, &mapping);
	if (!ret)
		ret = nvidia_p2p_dma_unmap_pages(nic, table, mapping);
	err = nvidia_p2p_put_pages_persistent(address, table, 0);
	return ret ?: err;
}

/*
 * Free callback. It must not run, because the writer keeps the memory until its
 * write ends.
 */
static void revoked(void *data)
{
	WARN_ON(1);
}

static int revocable_life(void *unused, u64 address)
{
	struct nvidia_p2p_page_table *table;
	int ret;

	ret = nvidia_p2p_get_pages(0, 0, address, SZ_64K, &table, revoked,
				   NULL);
	if (ret)
		return ret;
	return nvidia_p2p_put_pages(0, 0, address, table);
}

DEFINE_DEBUGFS_ATTRIBUTE(persistent_fops, NULL, persistent_life, "%llu\n");
DEFINE_DEBUGFS_ATTRIBUTE(revocable_fops, NULL, revocable_life, "%llu\n");

int provider_init(struct dentry *root)
{
	nic = pci_get_class(PCI_CLASS_NETWORK_ETHERNET << 8, NULL);
	if (!nic)
		return -ENODEV;
	debugfs_create_file_unsafe("persistent", 0200, root, NULL,
				   &persistent_fops);
	debugfs_create_file_unsafe("revocable", 0200, root, NULL,
				   &revocable_fops);
	return 0;
}

void provider_exit(void)
{
	pci_dev_put(nic);
}
