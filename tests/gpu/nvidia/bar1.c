// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Assigns space in BAR1 like the resource manager. Memory gets space in BAR1
 * when it is pinned: one range or, if no range is long enough, several. The
 * last unpin frees the space.
 *
 * In the stand-in, the BAR is the memory itself, so no page table can map
 * memory into BAR1. Memory moves instead: a pin gets a range of the BAR, and
 * the pinned memory is exchanged with the contents of this range. Pinned pages
 * stay in the range. Unpinned pages stay until another pin gets their place.
 * Page faults of the CPU wait until the move is complete, and then map the new
 * place.
 *
 * Memory with a layout other than "contiguous" is pinned where it lies, as with
 * static BAR1.
 */
#include <linux/bitmap.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "../nvidia.h"
#include "bar1.h"

/*
 * Contents of a page of the BAR: page @index of @mem, or nothing if @mem is
 * NULL.
 */
struct slot {
	struct vidmem *mem;
	u32 index;
};

/**
 * struct bar1 - the BAR of a GPU
 * @taken: bitmap of pages that are pinned or belong to a layout; mem_lock
 * @buffer: for exchanging two pages; place_sem
 * @slot: contents of each page; mem_lock
 */
struct bar1 {
	unsigned long *taken;
	void *buffer;
	struct slot slot[];
};

/**
 * struct extent - pages of a vidmem that got their places in BAR1 together
 * @node: in vidmem->extents, in order of @first; API lock
 * @first: first page
 * @pages: number of pages
 * @refs: pins that overlap with the extent. The last unpin releases all of it.
 */
struct extent {
	struct list_head node;
	u32 first;
	u32 pages;
	u32 refs;
};

int bar1_add_gpu(struct gpu *gpu)
{
	struct bar1 *bar1 = vzalloc(struct_size(bar1, slot, gpu->pages));

	gpu->bar1 = bar1;
	if (!bar1)
		return -ENOMEM;
	bar1->taken = bitmap_zalloc(gpu->pages, GFP_KERNEL);
	bar1->buffer = kmalloc(STANDIN_PAGE_SIZE, GFP_KERNEL);
	return bar1->taken && bar1->buffer ? 0 : -ENOMEM;
}

void bar1_release_gpu(struct gpu *gpu)
{
	if (!gpu->bar1)
		return;
	bitmap_free(gpu->bar1->taken);
	kfree(gpu->bar1->buffer);
	vfree(gpu->bar1);
}

int bar1_add_memory(struct vidmem *mem)
{
	struct bar1 *bar1 = mem->gpu->bar1;
	u32 i;

	lockdep_assert_held(&mem_lock);

	if (mem->coherent)
		return 0;
	mem->content = kvcalloc(BITS_TO_LONGS(mem->pages), sizeof(long),
				GFP_KERNEL);
	if (!mem->content)
		return -ENOMEM;
	for (i = 0; i < mem->pages; i++) {
		bar1->slot[mem->page[i]] = (struct slot){ mem, i };
		if (mem->in_place)
			__set_bit(mem->page[i], bar1->taken);
	}
	return 0;
}

void bar1_release_memory(struct vidmem *mem)
{
	struct bar1 *bar1 = mem->gpu->bar1;
	u32 i;

	lockdep_assert_held(&mem_lock);

	WARN_ON(!list_empty(&mem->extents));
	if (mem->coherent)
		return;
	for (i = 0; i < mem->pages; i++) {
		bar1->slot[mem->page[i]].mem = NULL;
		if (mem->in_place)
			__clear_bit(mem->page[i], bar1->taken);
	}
	kvfree(mem->content);
}

static void __iomem *map_page(const struct gpu *gpu, unsigned long page)
{
	return ioremap_wc(gpu->bar_start + (u64)page * STANDIN_PAGE_SIZE,
			  STANDIN_PAGE_SIZE);
}

/* Copies a page of the BAR or, if @both is set, exchanges two pages. */
static int copy_page_of(struct gpu *gpu, unsigned long to, unsigned long from,
			bool both)
{
	void __iomem *source = map_page(gpu, from), *target = map_page(gpu, to);
	void *buffer = gpu->bar1->buffer;
	int ret = -ENOMEM;

	if (source && target) {
		memcpy_fromio(buffer, source, STANDIN_PAGE_SIZE);
		if (both) {
			/* There is only one buffer, so copy piece by piece. */
			u8 piece[64];
			size_t at;

			for (at = 0; at < STANDIN_PAGE_SIZE; at += sizeof(piece)) {
				memcpy_fromio(piece, target + at, sizeof(piece));
				memcpy_toio(source + at, piece, sizeof(piece));
			}
		}
		memcpy_toio(target, buffer, STANDIN_PAGE_SIZE);
		ret = 0;
	}
	if (source)
		iounmap(source);
	if (target)
		iounmap(target);
	return ret;
}

static void unmap_from_cpu(const struct vidmem *mem, u32 first, u32 pages)
{
	if (mem->mapping)
		unmap_mapping_range(mem->mapping,
				    mem->offset + (u64)first * STANDIN_PAGE_SIZE,
				    (u64)pages * STANDIN_PAGE_SIZE, 1);
}

/* Exchanges a page of memory with the contents of page @to of the BAR. */
static int move_page(struct vidmem *mem, u32 index, unsigned long to)
{
	struct gpu *gpu = mem->gpu;
	struct bar1 *bar1 = gpu->bar1;
	unsigned long from = mem->page[index];
	struct slot other = bar1->slot[to];
	bool own = test_bit(index, mem->content);
	bool others = other.mem && test_bit(other.index, other.mem->content);
	int ret = 0;

	if (from == to)
		return 0;
	if (others)
		unmap_from_cpu(other.mem, other.index, 1);
	if (own)
		ret = copy_page_of(gpu, to, from, others);
	else if (others)
		ret = copy_page_of(gpu, from, to, false);
	if (ret)
		return ret;

	bar1->slot[from] = other;
	bar1->slot[to] = (struct slot){ mem, index };
	mem->page[index] = to;
	if (other.mem) {
		other.mem->page[other.index] = from;
	} else {
		__clear_bit(from, gpu->used);
		__set_bit(to, gpu->used);
	}
	return 0;
}

static int extent_move(struct vidmem *mem, const struct extent *extent)
{
	struct gpu *gpu = mem->gpu;
	unsigned long *taken = gpu->bar1->taken, to;
	u32 i;
	int ret;

	unmap_from_cpu(mem, extent->first, extent->pages);

	to = bitmap_find_next_zero_area(taken, gpu->pages, 0, extent->pages, 0);
	if (to >= gpu->pages)
		to = 0;
	for (i = 0; i < extent->pages; i++, to++) {
		to = find_next_zero_bit(taken, gpu->pages, to);
		ret = to < gpu->pages ?
		      move_page(mem, extent->first + i, to) : -ENOMEM;
		if (ret)
			break;
		__set_bit(to, taken);
		cond_resched();
	}
	if (i == extent->pages)
		return 0;
	while (i--)
		__clear_bit(mem->page[extent->first + i], taken);
	return ret;
}

static struct extent *extent_add(struct vidmem *mem, struct list_head *before,
				 u32 first, u32 pages)
{
	struct gpu *gpu = mem->gpu;
	struct extent *extent;
	int ret = 0;

	extent = kzalloc_obj(*extent);
	if (!extent)
		return NULL;
	extent->first = first;
	extent->pages = pages;

	scoped_guard(rwsem_write, &place_sem) {
		guard(mutex)(&mem_lock);
		if (!bar_has_room(gpu, pages))
			ret = -ENOMEM;
		else if (!mem->in_place)
			ret = extent_move(mem, extent);
		if (!ret) {
			/*
			 * All pages may contain data now, because an HCA may
			 * write to them.
			 */
			bitmap_set(mem->content, first, pages);
			gpu->pinned += pages;
			count_add(BAR_BYTES_PINNED, (u64)pages * STANDIN_PAGE_SIZE);
		}
	}
	if (ret) {
		kfree(extent);
		return NULL;
	}
	list_add_tail(&extent->node, before);
	return extent;
}

static void extent_remove(struct vidmem *mem, struct extent *extent)
{
	struct gpu *gpu = mem->gpu;
	u32 i;

	guard(mutex)(&mem_lock);
	for (i = 0; i < extent->pages && !mem->in_place; i++)
		__clear_bit(mem->page[extent->first + i], gpu->bar1->taken);
	gpu->pinned -= extent->pages;
	count_add(BAR_BYTES_PINNED, -(s64)extent->pages * STANDIN_PAGE_SIZE);
	list_del(&extent->node);
	kfree(extent);
}

/*
 * Gives pages a place in BAR1. Pages that have a place from an earlier pin stay
 * there. The other pages get new places, which need not be adjacent to the old
 * ones. If the function fails, it releases the new places. The caller holds the
 * API lock.
 */
int bar1_get(struct vidmem *mem, u32 first, u32 pages)
{
	u32 at = first, end = first + pages;
	struct extent *extent;

	if (mem->coherent)
		return 0;
	list_for_each_entry(extent, &mem->extents, node) {
		if (at >= end)
			break;
		if (at >= extent->first + extent->pages)
			continue;
		if (at < extent->first) {
			u32 next = min(end, extent->first);
			struct extent *new = extent_add(mem, &extent->node, at,
							next - at);

			if (!new)
				goto undo;
			new->refs = 1;
			at = next;
			if (at >= end)
				break;
		}
		extent->refs++;
		at = extent->first + extent->pages;
	}
	if (at < end) {
		extent = extent_add(mem, &mem->extents, at, end - at);
		if (!extent)
			goto undo;
		extent->refs = 1;
	}
	return 0;

undo:
	bar1_put(mem, first, at - first);
	return -ENOMEM;
}

/* Undoes bar1_get(). The caller holds the API lock. */
void bar1_put(struct vidmem *mem, u32 first, u32 pages)
{
	struct extent *extent, *next;

	list_for_each_entry_safe(extent, next, &mem->extents, node)
		if (extent->first < first + pages &&
		    first < extent->first + extent->pages && !--extent->refs)
			extent_remove(mem, extent);
}
