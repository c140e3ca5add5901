// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The BAR: the pages in use, the order of an allocation's pages (the layout),
 * and the number of pinned pages.
 *
 * The stand-in's memory is its BAR, and the RAM of coherent.c. An allocation
 * therefore has its place in the BAR from the start. On a real GPU, memory gets
 * a place in the BAR only when it is pinned. If the stand-in is built with
 * NVIDIA's nv-p2p.c, a pin moves memory in the BAR (nvidia/bar1.c). Pinned
 * pages are counted as on a real GPU. Memory is never cleared: new memory may
 * still hold its last owner's data, as on a GPU.
 */
#include <linux/bitmap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/prandom.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "nvidia.h"

#define PAGES_PER_GRANULE	(STANDIN_GRANULE / STANDIN_PAGE_SIZE)

/*
 * nvidia.ko reserves the same number of bytes of every BAR1, independent of the
 * BAR's size.
 */
static ulong bar1_reserve_mib = 36;
module_param(bar1_reserve_mib, ulong, 0644);
MODULE_PARM_DESC(bar1_reserve_mib, "MiB of each BAR that cannot be pinned");

static unsigned long long table_phys;
module_param(table_phys, ullong, 0644);
MODULE_PARM_DESC(table_phys, "false physical address of the memory in revocable page tables; 0: the true address");

enum layout {
	LAYOUT_CONTIGUOUS,
	LAYOUT_64K,
	LAYOUT_2M,
	LAYOUT_DESCENDING,
	LAYOUT_RANDOM,
	LAYOUT_RUN,
	NR_LAYOUTS,
};

static const char * const layout_names[NR_LAYOUTS] = {
	[LAYOUT_CONTIGUOUS]	= "contiguous",
	[LAYOUT_64K]		= "64k",
	[LAYOUT_2M]		= "2m",
	[LAYOUT_DESCENDING]	= "descending",
	[LAYOUT_RANDOM]		= "random",
	[LAYOUT_RUN]		= "run",
};

static enum layout layout;

static int layout_set(const char *val, const struct kernel_param *kp)
{
	int ret = sysfs_match_string(layout_names, val);

	if (ret < 0)
		return ret;
	WRITE_ONCE(layout, ret);
	return 0;
}

static int layout_get(char *buf, const struct kernel_param *kp)
{
	return sysfs_emit(buf, "%s\n", layout_names[layout]);
}

static const struct kernel_param_ops layout_ops = {
	.set = layout_set,
	.get = layout_get,
};

module_param_cb(layout, &layout_ops, NULL, 0644);
MODULE_PARM_DESC(layout, "order of an allocation's pages in the BAR: contiguous, 64k (no two pages adjacent), 2m (no two pieces of 2 MiB adjacent), descending, random (runs of 1 to 64 pages), run (contiguous except the first and last 2 MiB)");

static struct rnd_state random_state;
static uint layout_seed;

static int layout_seed_set(const char *val, const struct kernel_param *kp)
{
	int ret = param_set_uint(val, kp);

	if (!ret)
		prandom_seed_state(&random_state, layout_seed);
	return ret;
}

static const struct kernel_param_ops layout_seed_ops = {
	.set = layout_seed_set,
	.get = param_get_uint,
};

module_param_cb(layout_seed, &layout_seed_ops, &layout_seed, 0644);
MODULE_PARM_DESC(layout_seed, "seed of the random layout");

/*
 * Seeds the generator of the random layout. An unseeded generator returns only
 * zeros.
 */
void bar_init(void)
{
	prandom_seed_state(&random_state, layout_seed);
}

/* Sets up the page map of a BAR. The BAR's bounds must be set before. */
int bar_add_gpu(struct gpu *gpu)
{
	gpu->pages = (gpu->bar_end - gpu->bar_start + 1) / STANDIN_PAGE_SIZE;
	gpu->used = bitmap_zalloc(gpu->pages, GFP_KERNEL);
	return gpu->used ? bar1_add_gpu(gpu) : -ENOMEM;
}

void bar_release_gpu(struct gpu *gpu)
{
	bar1_release_gpu(gpu);
	bitmap_free(gpu->used);
}

/* Returns the bus address of a 64 KiB page. */
phys_addr_t vidmem_phys(const struct vidmem *mem, u32 page)
{
	phys_addr_t start = mem->coherent ? coherent_memory.start :
					    mem->gpu->bar_start;

	return start + (u64)mem->page[page] * STANDIN_PAGE_SIZE;
}

/*
 * Returns the address that a page table contains for its page @page. The table
 * begins with page @first of @mem. If table_phys is set, a revocable table
 * contains a false address.
 */
phys_addr_t vidmem_phys_told(const struct vidmem *mem, u32 first, u32 page,
			     bool persistent)
{
	u64 false_start = persistent ? 0 : READ_ONCE(table_phys);

	if (false_start)
		return false_start + (u64)page * STANDIN_PAGE_SIZE;
	return vidmem_phys(mem, first + page);
}

/*
 * used_in() returns the bitmap of used pages, of the BAR or of the coherent
 * memory. pages_in() returns the number of bits in this bitmap.
 */
static unsigned long *used_in(const struct vidmem *mem)
{
	return mem->coherent ? coherent_memory.used : mem->gpu->used;
}

static unsigned long pages_in(const struct vidmem *mem)
{
	return mem->coherent ? coherent_memory.pages : mem->gpu->pages;
}

static unsigned long find_hole(const struct vidmem *mem, unsigned long from)
{
	return bitmap_find_next_zero_area(used_in(mem), pages_in(mem), from,
					  mem->pages, PAGES_PER_GRANULE - 1);
}

/* Takes free pages in ascending order, and marks them used. */
static int take_pages(struct vidmem *mem)
{
	unsigned long *used = used_in(mem);
	unsigned long pages = pages_in(mem), p;
	u32 i;

	lockdep_assert_held(&mem_lock);

	if (pages - bitmap_weight(used, pages) < mem->pages)
		return -ENOMEM;

	/* If no free range is long enough, take the first free pages. */
	p = find_hole(mem, mem->coherent ? 0 : bar1_home(mem->gpu));
	if (p >= pages)
		p = find_hole(mem, 0);
	if (p >= pages)
		p = 0;

	for (i = 0; i < mem->pages; i++, p++) {
		p = find_next_zero_bit(used, pages, p);
		__set_bit(p, used);
		mem->page[i] = p;
	}
	return 0;
}

/*
 * Layouts: each of these functions permutes an ascending list of pages. Some
 * functions keep pieces of @piece pages together.
 */

/*
 * Copies the pieces 1, 3, 5, … to @to, and then the pieces 0, 2, 4, …. No piece
 * is followed by the piece with the next number.
 */
static void interleave(u32 *to, const u32 *from, u32 pages, u32 piece)
{
	u32 start, i;

	for (start = piece; ; start = 0) {
		for (i = start; i < pages; i += 2 * piece, to += piece)
			memcpy(to, from + i, piece * sizeof(*to));
		if (!start)
			return;
	}
}

/* Cuts the list into runs of 1 to 64 pages, and shuffles the runs. */
static int shuffle(u32 *to, const u32 *from, u32 pages)
{
	struct run {
		u32 start;
		u32 length;
	} *runs, *run;
	u32 nr = 0, at;

	runs = kvmalloc_objs(*runs, pages);
	if (!runs)
		return -ENOMEM;

	for (at = 0; at < pages; at += run->length) {
		run = &runs[nr++];
		run->start = at;
		run->length = min(1 + prandom_u32_state(&random_state) % 64,
				  pages - at);
	}

	while (nr) {
		run = &runs[prandom_u32_state(&random_state) % nr];
		memcpy(to, from + run->start, run->length * sizeof(*to));
		to += run->length;
		*run = runs[--nr];
	}

	kvfree(runs);
	return 0;
}

static int apply_layout(struct vidmem *mem)
{
	enum layout order = READ_ONCE(layout);
	u32 *from = mem->page, *to, i;
	int ret = 0;

	if (order == LAYOUT_CONTIGUOUS)
		return 0;
	mem->in_place = true;

	to = kvmalloc_objs(*to, mem->pages);
	if (!to)
		return -ENOMEM;

	switch (order) {
	case LAYOUT_64K:
		interleave(to, from, mem->pages, 1);
		break;
	case LAYOUT_2M:
		interleave(to, from, mem->pages, PAGES_PER_GRANULE);
		break;
	case LAYOUT_RANDOM:
		ret = shuffle(to, from, mem->pages);
		break;
	case LAYOUT_RUN:
		memcpy(to, from, mem->pages * sizeof(*to));
		for (i = 0; i < PAGES_PER_GRANULE; i++)
			swap(to[i], to[mem->pages - PAGES_PER_GRANULE + i]);
		break;
	default:
		for (i = 0; i < mem->pages; i++)
			to[i] = from[mem->pages - 1 - i];
		break;
	}

	if (ret) {
		kvfree(to);
		return ret;
	}
	mem->page = to;
	kvfree(from);
	return 0;
}

static void give_back(struct vidmem *mem)
{
	u32 i;

	for (i = 0; i < mem->pages; i++)
		__clear_bit(mem->page[i], used_in(mem));
}

/*
 * Allocates memory from the BAR, or from coherent memory. @length is a multiple
 * of STANDIN_GRANULE, and not 0.
 */
struct vidmem *vidmem_alloc(struct gpu *gpu, u64 length)
{
	struct vidmem *mem;
	int ret;

	lockdep_assert_held(&mem_lock);

	mem = kzalloc_obj(*mem);
	if (!mem)
		return ERR_PTR(-ENOMEM);
	kref_init(&mem->kref);
	mem->gpu = gpu;
	mem->coherent = coherent_is_wanted();
	INIT_LIST_HEAD(&mem->extents);
	if (length / STANDIN_PAGE_SIZE > pages_in(mem)) {
		ret = -ENOMEM;
		goto free_mem;
	}
	mem->pages = length / STANDIN_PAGE_SIZE;
	mem->page = kvmalloc_objs(*mem->page, mem->pages);
	if (!mem->page) {
		ret = -ENOMEM;
		goto free_mem;
	}

	ret = take_pages(mem);
	if (ret)
		goto free_list;
	ret = apply_layout(mem);
	if (!ret)
		ret = bar1_add_memory(mem);
	if (ret)
		goto free_pages;

	gpu_get(gpu);
	return mem;

free_pages:
	give_back(mem);
free_list:
	kvfree(mem->page);
free_mem:
	kfree(mem);
	return ERR_PTR(ret);
}

struct vidmem *vidmem_get(struct vidmem *mem)
{
	kref_get(&mem->kref);
	return mem;
}

static void vidmem_release(struct kref *kref)
{
	struct vidmem *mem = container_of(kref, struct vidmem, kref);
	struct gpu *gpu = mem->gpu;

	bar1_release_memory(mem);
	give_back(mem);
	mutex_unlock(&mem_lock);

	kvfree(mem->pins);
	kvfree(mem->page);
	kfree(mem);
	gpu_put(gpu);
}

void vidmem_put(struct vidmem *mem)
{
	kref_put_mutex(&mem->kref, vidmem_release, &mem_lock);
}

/* Returns true if @pages more pages fit into the BAR outside its reserve. */
bool bar_has_room(const struct gpu *gpu, u64 pages)
{
	u64 room = gpu->bar_end - gpu->bar_start + 1;

	lockdep_assert_held(&mem_lock);
	room -= min(room, (u64)READ_ONCE(bar1_reserve_mib) << 20);
	return (gpu->pinned + pages) * STANDIN_PAGE_SIZE <= room;
}

/*
 * Pins pages of the BAR. Pages that are already pinned need no more room.
 * Returns -ENOMEM if the BAR has no room for the pages that are not pinned yet.
 */
int vidmem_pin(struct vidmem *mem, u32 first, u32 pages)
{
	struct gpu *gpu = mem->gpu;
	u64 more = 0;
	int ret = 0;
	u32 i;

	mutex_lock(&mem_lock);
	if (!mem->pins)
		mem->pins = kvzalloc_objs(*mem->pins, mem->pages);
	if (!mem->pins) {
		ret = -ENOMEM;
		goto unlock;
	}

	for (i = first; i < first + pages && !mem->coherent; i++)
		more += !mem->pins[i];

	if (more && !bar_has_room(gpu, more)) {
		ret = -ENOMEM;
		goto unlock;
	}

	for (i = first; i < first + pages; i++)
		mem->pins[i]++;
	gpu->pinned += more;
	count_add(BAR_BYTES_PINNED, more * STANDIN_PAGE_SIZE);
unlock:
	mutex_unlock(&mem_lock);
	return ret;
}

void vidmem_unpin(struct vidmem *mem, u32 first, u32 pages)
{
	u64 less = 0;
	u32 i;

	mutex_lock(&mem_lock);
	for (i = first; i < first + pages; i++)
		less += !--mem->pins[i] && !mem->coherent;
	mem->gpu->pinned -= less;
	count_add(BAR_BYTES_PINNED, -(s64)(less * STANDIN_PAGE_SIZE));
	mutex_unlock(&mem_lock);
}
