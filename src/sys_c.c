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
#include <linux/mutex.h>
#include <linux/panic.h>
#include <linux/rbtree.h>
#include <linux/rwsem.h>
#include <linux/sched/signal.h>
#include <linux/spinlock.h>
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
 * Is there a module @name that is not on its way out? Copies its version, which
 * may be empty.
 *
 * The kobject keeps the module's memory: a module that goes waits for that. Not
 * what goes before, as the version does: that wants a reference. It keeps a
 * module that is live; one that is still in its init goes all the same, if that
 * fails.
 */
int peermem_look_at_module(const char *name, char *version, size_t len)
{
	struct kobject *kobj;
	struct module *module;
	int found = 0;

	version[0] = '\0';
	kobj = kset_find_obj(THIS_MODULE->mkobj.kobj.kset, name);
	if (!kobj)
		return 0;
	module = container_of(kobj, struct module_kobject, kobj)->mod;
	if (!module) {
		/* A part of the kernel itself that has parameters. */
		found = PEERMEM_LOADED;
	} else if (try_module_get(module)) {
		found = PEERMEM_LOADED;
		if (READ_ONCE(module->state) == MODULE_STATE_LIVE &&
		    module->version)
			strscpy(version, module->version, len);
		if (test_bit(TAINT_PROPRIETARY_MODULE, &module->taints))
			found |= PEERMEM_PROPRIETARY;
		module_put(module);
	}
	kobject_put(kobj);
	return found;
}

bool peermem_is_killed(void)
{
	return fatal_signal_pending(current);
}

/* So far that it may have closed some of its descriptors. */
bool peermem_is_exiting(void)
{
	return current->flags & PF_EXITING;
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

void peermem_trace_registered(u64 id, const char *flavour, u64 addr, u64 len,
			      u64 page, u64 pieces, pid_t tgid)
{
	trace_registered(id, flavour, addr, len, page, pieces, tgid);
}

void peermem_trace_mapped(u64 id, u32 entries, u64 hca)
{
	trace_mapped(id, entries, hca);
}

void peermem_trace_revoked(u64 id)
{
	trace_revoked(id);
}

void peermem_trace_released(u64 id, const char *state)
{
	trace_released(id, state);
}

/* Guards all that is on the roll, in Rust as in C. A leaf. */
static DEFINE_SPINLOCK(roll_lock);
static struct rb_root roll = RB_ROOT;
/* Numbers only grow: the next comes behind this one. */
static struct rb_node *roll_last;

void peermem_roll_lock(void)
{
	spin_lock(&roll_lock);
}

void peermem_roll_unlock(void)
{
	spin_unlock(&roll_lock);
}

/* The lock is held; @number is higher than any before. */
void peermem_roll_add(struct peermem_place *place, u64 number)
{
	place->number = number;
	rb_link_node(&place->node, roll_last,
		     roll_last ? &roll_last->rb_right : &roll.rb_node);
	rb_insert_color(&place->node, &roll);
	roll_last = &place->node;
}

/* The lock is held, and @place is on the roll. */
void peermem_roll_remove(struct peermem_place *place)
{
	if (roll_last == &place->node)
		roll_last = rb_prev(roll_last);
	rb_erase(&place->node, &roll);
}

/* The first with this number or a higher one. The lock is held. */
struct peermem_place *peermem_roll_from(u64 number)
{
	struct peermem_place *found = NULL;
	struct rb_node *node = roll.rb_node;

	while (node) {
		struct peermem_place *place =
			rb_entry(node, struct peermem_place, node);

		if (place->number >= number) {
			found = place;
			node = node->rb_left;
		} else {
			node = node->rb_right;
		}
	}
	return found;
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

/*
 * A file of lines: a reader of many holds nothing between two of them, and no
 * buffer has to have room for all.
 */
struct peermem_reader {
	const struct peermem_lines *lines;
	u64 own[];
};

/* The position is a number: what goes or comes in between moves nothing. */
static void *peermem_lines_from(struct seq_file *seq, loff_t *pos)
{
	struct peermem_reader *reader = seq->private;
	u64 number = reader->lines->from(reader->own, *pos);

	if (!number)
		return NULL;
	*pos = number;
	return reader;
}

static void *peermem_lines_next(struct seq_file *seq, void *v, loff_t *pos)
{
	++*pos;
	return peermem_lines_from(seq, pos);
}

static void peermem_lines_stop(struct seq_file *seq, void *v)
{
}

static int peermem_lines_show(struct seq_file *seq, void *v)
{
	struct peermem_reader *reader = v;

	return reader->lines->show(seq, reader->own);
}

static const struct seq_operations peermem_lines_ops = {
	.start = peermem_lines_from,
	.next = peermem_lines_next,
	.stop = peermem_lines_stop,
	.show = peermem_lines_show,
};

static int peermem_lines_open(struct inode *inode, struct file *file)
{
	const struct peermem_lines *lines = inode->i_private;
	struct peermem_reader *reader;

	reader = __seq_open_private(file, &peermem_lines_ops,
				    sizeof(*reader) + lines->size);
	if (!reader)
		return -ENOMEM;
	reader->lines = lines;
	return 0;
}

static const struct file_operations peermem_lines_file_ops = {
	.owner = THIS_MODULE,
	.open = peermem_lines_open,
	.read = seq_read,
	.llseek = seq_lseek,
	.release = seq_release_private,
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

void peermem_debugfs_lines(struct dentry *dir, const char *name, umode_t mode,
			   const struct peermem_lines *lines)
{
	debugfs_create_file(name, mode, dir, (void *)lines,
			    &peermem_lines_file_ops);
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

/* Where it is, in one number: see PciAddress of roll.rs. */
u64 peermem_pci_address(struct pci_dev *pdev)
{
	return (u64)(u32)pci_domain_nr(pdev->bus) << 16 | pci_dev_id(pdev);
}

/*
 * The devices in whose BARs addresses were found: a look for the next one
 * begins with these, and walks over all devices of the machine only if it is in
 * none of them. Each is kept by a reference. That keeps no device in the
 * machine: one that was removed has given up its BARs, and is not found by
 * them.
 */
#define OWNERS	16
static struct {
	struct pci_dev *pdev;
	u32 gpu;
} owners[OWNERS];
static unsigned int next_owner;

/* Numbers of devices, by where they are: these stay. */
static u64 gpus[PEERMEM_GPUS];
static u32 gpu_count;

/* Guards all of them. Taken with a slot's lock held; below it are the PCI core's. */
static DEFINE_MUTEX(owners_lock);

/* The memory BAR of @pdev that has @addr in it. */
static bool peermem_bar_in(struct pci_dev *pdev, u64 addr,
			   struct peermem_bar *bar)
{
	int i;

	for (i = 0; i < PCI_STD_NUM_BARS; i++) {
		struct resource *res = &pdev->resource[i];

		if (!(res->flags & IORESOURCE_MEM) || !res->parent)
			continue;
		if (addr < res->start || addr > res->end)
			continue;
		bar->start = res->start;
		bar->len = resource_size(res);
		return true;
	}
	return false;
}

static u32 peermem_gpu_number(struct pci_dev *pdev)
{
	u64 address = peermem_pci_address(pdev);
	u32 gpu;

	for (gpu = 0; gpu < gpu_count; gpu++)
		if (gpus[gpu] == address)
			return gpu;
	if (gpu < PEERMEM_GPUS) {
		gpus[gpu] = address;
		gpu_count++;
	}
	return gpu;
}

/* Keeps the caller's reference, in the place of one that is gone if there is any. */
static u32 peermem_remember(struct pci_dev *pdev)
{
	unsigned int at;

	for (at = 0; at < OWNERS; at++)
		if (!owners[at].pdev || !device_is_registered(&owners[at].pdev->dev))
			break;
	if (at == OWNERS) {
		at = next_owner;
		next_owner = (next_owner + 1) % OWNERS;
	}
	pci_dev_put(owners[at].pdev);
	owners[at].pdev = pdev;
	owners[at].gpu = peermem_gpu_number(pdev);
	return owners[at].gpu;
}

/* The memory BAR that has @addr in it, of any PCI device. May sleep. */
bool peermem_bar_of(u64 addr, struct peermem_bar *bar)
{
	struct pci_dev *pdev = NULL;
	unsigned int at;

	guard(mutex)(&owners_lock);
	for (at = 0; at < OWNERS && owners[at].pdev; at++) {
		if (peermem_bar_in(owners[at].pdev, addr, bar)) {
			bar->gpu = owners[at].gpu;
			return true;
		}
	}
	for_each_pci_dev(pdev) {
		if (peermem_bar_in(pdev, addr, bar)) {
			bar->gpu = peermem_remember(pdev);
			return true;
		}
	}
	return false;
}

/* Where the GPU with that number is. */
bool peermem_gpu_address(u32 gpu, u64 *address)
{
	guard(mutex)(&owners_lock);
	if (gpu >= gpu_count)
		return false;
	*address = gpus[gpu];
	return true;
}

void peermem_bars_forget(void)
{
	unsigned int at;

	guard(mutex)(&owners_lock);
	for (at = 0; at < OWNERS; at++) {
		pci_dev_put(owners[at].pdev);
		owners[at].pdev = NULL;
	}
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

/* Lets others run, between two steps of what takes long. */
void peermem_rest(void)
{
	cond_resched();
}

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
