// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Records the scatter lists that a client gives to ib_core.
 *
 * /sys/kernel/debug/bench/table: Writing "1" makes the module record each table
 * that is mapped. Writing "0" stops, and forgets the last table. A read returns
 * the last table as 64-bit numbers: address and length of the registration,
 * number of entries, and DMA address and length of each entry. The file is
 * empty if no table was mapped.
 */
#include <linux/debugfs.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/scatterlist.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#include "bench.h"

#define HEAD	3

static DEFINE_MUTEX(lock);
static bool wanted;
static u64 *record;
static size_t record_size;

static void forget(void)
{
	vfree(record);
	record = NULL;
	record_size = 0;
}

/**
 * table_mapped - Records a table that ib_core is about to receive
 * @table: the table
 * @address: start of the registration
 * @length: length of the registration
 */
void table_mapped(const struct sg_table *table, unsigned long address,
		  size_t length)
{
	struct scatterlist *sg;
	size_t size, at = HEAD;
	int i;

	if (!READ_ONCE(wanted))
		return;
	mutex_lock(&lock);
	forget();
	size = array_size(HEAD + 2UL * table->nents, sizeof(*record));
	record = vmalloc(size);
	if (record) {
		record[0] = address;
		record[1] = length;
		record[2] = table->nents;
		for_each_sgtable_dma_sg(table, sg, i) {
			record[at++] = sg_dma_address(sg);
			record[at++] = sg_dma_len(sg);
		}
		record_size = size;
	}
	mutex_unlock(&lock);
}

static ssize_t table_read(struct file *file, char __user *buf, size_t len,
			  loff_t *pos)
{
	ssize_t ret;

	mutex_lock(&lock);
	ret = simple_read_from_buffer(buf, len, pos, record, record_size);
	mutex_unlock(&lock);
	return ret;
}

static ssize_t table_write(struct file *file, const char __user *buf,
			   size_t len, loff_t *pos)
{
	bool on;
	int ret;

	ret = kstrtobool_from_user(buf, len, &on);
	if (ret)
		return ret;
	mutex_lock(&lock);
	forget();
	WRITE_ONCE(wanted, on);
	mutex_unlock(&lock);
	return len;
}

static const struct file_operations table_fops = {
	.read	= table_read,
	.write	= table_write,
	.open	= simple_open,
	.llseek	= default_llseek,
};

void table_init(struct dentry *root)
{
	debugfs_create_file("table", 0600, root, NULL, &table_fops);
}

void table_exit(void)
{
	forget();
}
