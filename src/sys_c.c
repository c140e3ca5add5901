// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The C side of sys.rs: see sys.h.
 */

#include <linux/bitops.h>
#include <linux/container_of.h>
#include <linux/debugfs.h>
#include <linux/dma-mapping.h>
#include <linux/fs.h>
#include <linux/kobject.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/panic.h>
#include <linux/rwsem.h>
#include <linux/string.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>

#include "sys.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

/* docs/registration.md says what it costs. */
#define PEERMEM_MAX_PIECES	1024

/* Names, types, values and modes of the first two are those of NVIDIA's module. */
static int peerdirect_support;
module_param(peerdirect_support, int, 0444);
MODULE_PARM_DESC(peerdirect_support,
		 "How invalidations reach ib_core: 0 [default], or 1 for MLNX_OFED 4.9 LTS");

static int persistent_api_support = 1;
module_param(persistent_api_support, int, 0444);
MODULE_PARM_DESC(persistent_api_support,
		 "Clients: 1 [default] persistent pins only, 0 revocable pins first");

static unsigned int user_limit_mib;
module_param(user_limit_mib, uint, 0444);
MODULE_PARM_DESC(user_limit_mib,
		 "MiB of GPU memory that one user may have pinned: 0 [default] no limit");

static unsigned int max_pieces = PEERMEM_MAX_PIECES;
module_param(max_pieces, uint, 0444);
MODULE_PARM_DESC(max_pieces,
		 "Allocations that one registration may lie over: " __stringify(PEERMEM_MAX_PIECES) " [default], 1 as NVIDIA's module");

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

unsigned int peermem_user_limit_mib(void)
{
	return user_limit_mib;
}

unsigned int peermem_max_pieces(void)
{
	return max_pieces;
}

const char *peermem_version(void)
{
	return PEERMEM_VERSION;
}

/*
 * Is there a module @name in /sys/module? Copies its version, which may be
 * empty. Its kobject keeps it: a module that goes waits for that.
 */
int peermem_look_at_module(const char *name, char *version, size_t len)
{
	struct kobject *kobj;
	struct module *module;
	int found = PEERMEM_LOADED;

	version[0] = '\0';
	kobj = kset_find_obj(THIS_MODULE->mkobj.kobj.kset, name);
	if (!kobj)
		return 0;
	/* None: a part of the kernel itself that has parameters. */
	module = container_of(kobj, struct module_kobject, kobj)->mod;
	if (module) {
		if (module->version)
			strscpy(version, module->version, len);
		if (test_bit(TAINT_PROPRIETARY_MODULE, &module->taints))
			found |= PEERMEM_PROPRIETARY;
	}
	kobject_put(kobj);
	return found;
}

s64 peermem_microseconds(void)
{
	return ktime_to_us(ktime_get());
}

/* The calling thread's name. */
void peermem_comm(char comm[TASK_COMM_LEN])
{
	strscpy_pad(comm, current->comm, TASK_COMM_LEN);
}

bool peermem_is_user_address(unsigned long addr)
{
	return access_ok((const void __user *)addr, 1);
}

void peermem_trace_refused(const char *flavour, const char *step,
			   const char *reason, int code, u64 addr, u64 len,
			   pid_t tgid)
{
	trace_refused(flavour, step, reason, code, addr, len, tgid);
}

static int peermem_open(struct inode *inode, struct file *file)
{
	int (*show)(struct seq_file *seq, void *unused) = inode->i_private;

	return single_open(file, show, NULL);
}

/*
 * The kernel crate's files have no owner: closing one that was open while its
 * module went calls what is there no more. These keep the module.
 */
static const struct file_operations peermem_file_ops = {
	.owner = THIS_MODULE,
	.open = peermem_open,
	.read = seq_read,
	.llseek = seq_lseek,
	.release = single_release,
};

/* Of these, nothing needs to succeed: without debugfs there are no files. */
struct dentry *peermem_debugfs_dir(void)
{
	return debugfs_create_dir(KBUILD_MODNAME, NULL);
}

void peermem_debugfs_file(struct dentry *dir, const char *name, umode_t mode,
			  int (*show)(struct seq_file *seq, void *unused))
{
	debugfs_create_file(name, mode, dir, show, &peermem_file_ops);
}

void peermem_debugfs_remove(struct dentry *dir)
{
	debugfs_remove(dir);
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

static void peermem_sg_set(struct scatterlist *sg, u64 addr, u32 len)
{
	sg_set_page(sg, NULL, len, 0);
	sg_dma_address(sg) = addr;
	sg_dma_len(sg) = len;
}

static void peermem_sg_fill(struct scatterlist *sg,
			    const struct peermem_entry *entries,
			    unsigned int count)
{
	for (; count; count--, entries++, sg++)
		peermem_sg_set(sg, entries->addr, entries->len);
}

static void peermem_sg_copy(struct scatterlist *to, struct scatterlist *from,
			    unsigned int count)
{
	for (; count; count--, to++, from++)
		peermem_sg_set(to, sg_dma_address(from), sg_dma_len(from));
}

/* The last chunk is full. */
static int peermem_sg_grow(struct peermem_sg *list)
{
	struct sg_table chunk;

	if (sg_alloc_table(&chunk, SG_MAX_SINGLE_ALLOC, GFP_KERNEL))
		return -ENOMEM;
	list->before = list->chunk;
	if (!list->before) {
		list->table = chunk;
		list->used = 0;
	} else {
		/* The place of its last entry is the link's now. */
		peermem_sg_copy(chunk.sgl,
				&list->before[SG_MAX_SINGLE_ALLOC - 1], 1);
		sg_chain(list->before, SG_MAX_SINGLE_ALLOC, chunk.sgl);
		list->table.orig_nents += SG_MAX_SINGLE_ALLOC - 1;
		list->used = 1;
	}
	list->chunk = chunk.sgl;
	return 0;
}

/* Adds entries to @list. May sleep. */
int peermem_sg_append(struct peermem_sg *list,
		      const struct peermem_entry *entries, unsigned int count)
{
	while (count) {
		unsigned int now;

		if (!list->chunk || list->used == SG_MAX_SINGLE_ALLOC) {
			int ret = peermem_sg_grow(list);

			if (ret)
				return ret;
		}
		now = min(count, SG_MAX_SINGLE_ALLOC - list->used);
		peermem_sg_fill(&list->chunk[list->used], entries, now);
		list->used += now;
		entries += now;
		count -= now;
	}
	return 0;
}

/* Adds the last entries, and gives back what was allocated beyond. May sleep. */
int peermem_sg_finish(struct peermem_sg *list,
		      const struct peermem_entry *entries, unsigned int count)
{
	struct sg_table last, chunk = {};

	if (!list->chunk) {
		if (sg_alloc_table(&last, count, GFP_KERNEL))
			return -ENOMEM;
		peermem_sg_fill(last.sgl, entries, count);
		list->table = last;
		return 0;
	}
	if (peermem_sg_append(list, entries, count))
		return -ENOMEM;
	if (list->used < SG_MAX_SINGLE_ALLOC) {
		if (sg_alloc_table(&last, list->used, GFP_KERNEL))
			return -ENOMEM;
		peermem_sg_copy(last.sgl, list->chunk, list->used);
		if (list->before)
			sg_chain(list->before, SG_MAX_SINGLE_ALLOC, last.sgl);
		else
			list->table.sgl = last.sgl;
		list->table.orig_nents -= SG_MAX_SINGLE_ALLOC - list->used;
		chunk.sgl = list->chunk;
		chunk.orig_nents = SG_MAX_SINGLE_ALLOC;
		sg_free_table(&chunk);
	}
	list->table.nents = list->table.orig_nents;
	return 0;
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
