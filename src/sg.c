// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Scatter lists of DMA addresses, for sg.rs. In C, since the fields and their
 * accessors depend on the configuration, and the kernel crate only reads them.
 */

#include <linux/minmax.h>
#include <linux/scatterlist.h>

#include "helpers.h"

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
