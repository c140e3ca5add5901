// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * What the provider's own lock allows: its calls for one registration's life,
 * without a client, ib_core or an RDMA device.
 *
 * /sys/kernel/debug/bench/persistent, revocable: writing an address of GPU
 * memory of the writing process pins 64 KiB there and unpins it; in the
 * persistent flavour it is mapped for the first network card between. What a
 * revocable pin has to say is in its page table, a mapping is not needed.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sizes.h>

#include <nv-p2p.h>

#include "bench.h"

static struct pci_dev *card;

static int persistent_life(u64 address)
{
	struct nvidia_p2p_dma_mapping *mapping;
	struct nvidia_p2p_page_table *table;
	int ret, err;

	ret = nvidia_p2p_get_pages_persistent(address, SZ_64K, &table, 0);
	if (ret)
		return ret;
	ret = nvidia_p2p_dma_map_pages(card, table, &mapping);
	if (!ret)
		ret = nvidia_p2p_dma_unmap_pages(card, table, mapping);
	err = nvidia_p2p_put_pages_persistent(address, table, 0);
	return ret ?: err;
}

/* Whoever writes has the memory until the write is over. */
static void revoked(void *data)
{
	WARN_ON(1);
}

static int revocable_life(u64 address)
{
	struct nvidia_p2p_page_table *table;
	int ret;

	ret = nvidia_p2p_get_pages(0, 0, address, SZ_64K, &table, revoked,
				   NULL);
	if (ret)
		return ret;
	return nvidia_p2p_put_pages(0, 0, address, table);
}

static ssize_t live(int (*life)(u64 address), const char __user *buf,
		    size_t len)
{
	u64 address;
	int ret;

	ret = kstrtou64_from_user(buf, len, 0, &address);
	if (!ret)
		ret = life(address);
	return ret ?: len;
}

static ssize_t persistent_write(struct file *file, const char __user *buf,
				size_t len, loff_t *pos)
{
	return live(persistent_life, buf, len);
}

static ssize_t revocable_write(struct file *file, const char __user *buf,
			       size_t len, loff_t *pos)
{
	return live(revocable_life, buf, len);
}

static const struct file_operations persistent_fops = {
	.write	= persistent_write,
	.open	= simple_open,
	.llseek	= noop_llseek,
};

static const struct file_operations revocable_fops = {
	.write	= revocable_write,
	.open	= simple_open,
	.llseek	= noop_llseek,
};

int provider_init(struct dentry *root)
{
	card = pci_get_class(PCI_CLASS_NETWORK_ETHERNET << 8, NULL);
	if (!card)
		return -ENODEV;
	debugfs_create_file("persistent", 0200, root, NULL, &persistent_fops);
	debugfs_create_file("revocable", 0200, root, NULL, &revocable_fops);
	return 0;
}

void provider_exit(void)
{
	pci_dev_put(card);
}
