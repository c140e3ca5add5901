// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Counts the kernel memory that a client's functions allocate. Memory that
 * nvidia.ko allocates during these functions does not count.
 *
 * The counts come from the tracepoints of the allocators. An allocation by a
 * thread that is in a client's function, outside nvidia.ko, belongs to the
 * client until it is freed. The size of an allocation is the size that the
 * allocator reserved for it. Compound pages are not counted as pages, because
 * they belong to the slab allocator or to large kmalloc() calls, which are
 * counted as objects.
 *
 * The slab allocator also allocates arrays of free objects for each processor
 * during a client's call. These arrays may be allocated at any time, and stay,
 * so they do not belong to the client. They are recognised by the function that
 * allocates them.
 *
 * /sys/kernel/debug/bench/memory: Writing "1" clears the table and starts to
 * count. Writing "0" stops. Writing "2" continues with the old table, which is
 * correct only if no object in the table was freed meanwhile. A read returns
 * "held=BYTES peak=BYTES objects=N lost=N". An allocation is lost if the table
 * has no room for it. The numbers are wrong if any allocation was lost.
 */
#include <linux/debugfs.h>
#include <linux/gfp.h>
#include <linux/hash.h>
#include <linux/kallsyms.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/tracepoint.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#include "bench.h"

/* Room for 100,000 registrations of about 20 objects each. */
#define SLOT_BITS	21
#define SLOTS		BIT(SLOT_BITS)

struct slot {
	unsigned long key;	/* 0: free */
	size_t bytes;
};

/*
 * Protects the table of allocations, its totals, and the cache of call sites.
 */
static DEFINE_SPINLOCK(lock);
static struct slot *slots;
static bool watching;
static u64 held, peak, objects, lost;

static struct slot *slot_of(unsigned long key)
{
	unsigned long at = hash_long(key, SLOT_BITS);
	unsigned long i;

	for (i = 0; i < SLOTS; i++, at = (at + 1) % SLOTS)
		if (slots[at].key == key || !slots[at].key)
			return &slots[at];
	return NULL;
}

/*
 * Frees a slot and closes the gap, so that a search finds the entries after it.
 */
static void slot_free(struct slot *slot)
{
	unsigned long gap = slot - slots, at = gap, home;

	for (;;) {
		at = (at + 1) % SLOTS;
		if (!slots[at].key)
			break;
		home = hash_long(slots[at].key, SLOT_BITS);
		/* Move the entry if a search for it would meet the gap. */
		if (((at - home) % SLOTS) >= ((at - gap) % SLOTS)) {
			slots[gap] = slots[at];
			gap = at;
		}
	}
	slots[gap] = (struct slot) {};
}

/*
 * Parts of the names of the functions that allocate arrays of free objects,
 * which are called sheaves since Linux 6.18.
 */
static const char * const allocators[] = { "sheaf", "__pcs_" };

/*
 * Call sites, and whether each is in one of these functions. Protected by lock.
 */
static struct site {
	unsigned long address;
	bool is_allocators;
} sites[64];
static unsigned int nr_sites;

static bool is_allocators(unsigned long address)
{
	static char name[KSYM_SYMBOL_LEN];
	struct site site = { .address = address };
	unsigned int i;

	for (i = 0; i < nr_sites; i++)
		if (sites[i].address == address)
			return sites[i].is_allocators;

	sprint_symbol_no_offset(name, address);
	for (i = 0; i < ARRAY_SIZE(allocators); i++)
		site.is_allocators |= !!strstr(name, allocators[i]);
	if (nr_sites < ARRAY_SIZE(sites))
		sites[nr_sites++] = site;
	return site.is_allocators;
}

/* Records an allocation. @site: return address of the allocating call, or 0. */
static void taken(unsigned long key, size_t bytes, unsigned long site)
{
	unsigned long flags;
	struct slot *slot;

	if (!key || !in_client())
		return;

	spin_lock_irqsave(&lock, flags);
	if (site && is_allocators(site)) {
		spin_unlock_irqrestore(&lock, flags);
		return;
	}
	/* Leave one slot free, because a search ends at a free slot. */
	slot = objects + 1 < SLOTS ? slot_of(key) : NULL;
	if (slot) {
		/* The tracepoints report large kmalloc() allocations twice. */
		objects += !slot->key;
		held += bytes - slot->bytes;
		slot->key = key;
		slot->bytes = bytes;
		peak = max(peak, held);
	} else {
		lost++;
	}
	spin_unlock_irqrestore(&lock, flags);
}

static void given_back(unsigned long key)
{
	unsigned long flags;
	struct slot *slot;

	if (!key)
		return;
	spin_lock_irqsave(&lock, flags);
	slot = slot_of(key);
	if (slot && slot->key) {
		held -= slot->bytes;
		objects--;
		slot_free(slot);
	}
	spin_unlock_irqrestore(&lock, flags);
}

/* Returns an odd key, which cannot be the address of an object. */
static unsigned long page_key(const struct page *page)
{
	return page_to_pfn(page) << 1 | 1;
}

static void on_kmalloc(void *data, unsigned long site, const void *object,
		       size_t wanted, size_t bytes, gfp_t gfp, int node)
{
	taken((unsigned long)object, bytes, site);
}

static void on_cache_alloc(void *data, unsigned long site, const void *object,
			   struct kmem_cache *cache, gfp_t gfp, int node)
{
	taken((unsigned long)object, kmem_cache_size(cache), site);
}

static void on_page_alloc(void *data, struct page *page, unsigned int order,
			  gfp_t gfp, int migratetype)
{
	if (page && !(gfp & __GFP_COMP))
		taken(page_key(page), PAGE_SIZE << order, 0);
}

static void on_kfree(void *data, unsigned long site, const void *object)
{
	given_back((unsigned long)object);
}

static void on_cache_free(void *data, unsigned long site, const void *object,
			  const struct kmem_cache *cache)
{
	given_back((unsigned long)object);
}

static void on_page_free(void *data, struct page *page, unsigned int order)
{
	given_back(page_key(page));
}

static struct watch {
	const char *name;
	void *probe;
	struct tracepoint *point;
} watches[] = {
	{ "kmalloc", on_kmalloc },
	{ "kmem_cache_alloc", on_cache_alloc },
	{ "mm_page_alloc", on_page_alloc },
	{ "kfree", on_kfree },
	{ "kmem_cache_free", on_cache_free },
	{ "mm_page_free", on_page_free },
};

static void find(struct tracepoint *point, void *unused)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(watches); i++)
		if (!strcmp(point->name, watches[i].name))
			watches[i].point = point;
}

/* Unregisters the first @count probes. */
static void unwatch(int count)
{
	while (count--)
		tracepoint_probe_unregister(watches[count].point,
					    watches[count].probe, NULL);
	tracepoint_synchronize_unregister();
}

static void stop(void)
{
	if (!watching)
		return;
	unwatch(ARRAY_SIZE(watches));
	watching = false;
}

static int watch(void)
{
	int i, ret;

	stop();
	for (i = 0; i < ARRAY_SIZE(watches); i++) {
		ret = tracepoint_probe_register(watches[i].point,
						watches[i].probe, NULL);
		if (ret) {
			unwatch(i);
			return ret;
		}
	}
	watching = true;
	return 0;
}

static int start(void)
{
	stop();
	memset(slots, 0, array_size(SLOTS, sizeof(*slots)));
	held = 0;
	peak = 0;
	objects = 0;
	lost = 0;
	return watch();
}

static ssize_t memory_read(struct file *file, char __user *buf, size_t len,
			   loff_t *pos)
{
	char text[128];
	int n;

	spin_lock_irq(&lock);
	n = scnprintf(text, sizeof(text),
		      "held=%llu peak=%llu objects=%llu lost=%llu\n", held,
		      peak, objects, lost);
	spin_unlock_irq(&lock);
	return simple_read_from_buffer(buf, len, pos, text, n);
}

/* Starts or stops the counting. Only one process at a time may use the file. */
static ssize_t memory_write(struct file *file, const char __user *buf,
			    size_t len, loff_t *pos)
{
	unsigned int wanted;
	int ret;

	ret = kstrtouint_from_user(buf, len, 0, &wanted);
	if (ret)
		return ret;
	switch (wanted) {
	case 0:
		stop();
		break;
	case 1:
		ret = start();
		break;
	case 2:
		ret = watch();
		break;
	default:
		ret = -EINVAL;
	}
	return ret ?: len;
}

static const struct file_operations memory_fops = {
	.read	= memory_read,
	.write	= memory_write,
	.open	= simple_open,
	.llseek	= default_llseek,
};

int memory_init(struct dentry *root)
{
	int i;

	for_each_kernel_tracepoint(find, NULL);
	for (i = 0; i < ARRAY_SIZE(watches); i++) {
		if (!watches[i].point) {
			pr_err("no tracepoint %s\n", watches[i].name);
			return -ENOENT;
		}
	}
	slots = vcalloc(SLOTS, sizeof(*slots));
	if (!slots)
		return -ENOMEM;
	debugfs_create_file("memory", 0600, root, NULL, &memory_fops);
	return 0;
}

void memory_exit(void)
{
	stop();
	vfree(slots);
}
