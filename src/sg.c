// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * How scatter lists of DMA addresses grow, for sg.rs. In C, since the kernel
 * crate has no form for the links between their chunks.
 */

#include <linux/scatterlist.h>

#include "helpers.h"

/* To entries that are as sg_alloc_table() left them. */
static void peermem_sg_copy(struct scatterlist *to, struct scatterlist *from,
			    unsigned int count)
{
	for (; count; count--, to++, from++) {
		to->length = from->length;
		sg_dma_address(to) = sg_dma_address(from);
		sg_dma_len(to) = sg_dma_len(from);
	}
}

/*
 * Adds a chunk that begins with the @filled entries from @first on if it is
 * the first chunk, and else with the last of these, whose place is the link's
 * now. Returns how many it begins with, or 0 without memory. May sleep.
 */
unsigned int peermem_sg_grow(struct peermem_sg *list, struct scatterlist *first,
			     unsigned int filled)
{
	struct sg_table chunk;

	if (sg_alloc_table(&chunk, PEERMEM_SG_CHUNK, GFP_KERNEL))
		return 0;
	list->before = list->chunk;
	list->chunk = chunk.sgl;
	if (!list->before) {
		list->table = chunk;
		peermem_sg_copy(chunk.sgl, first, filled);
		return filled;
	}
	peermem_sg_copy(chunk.sgl, &first[filled - 1], 1);
	sg_chain(list->before, PEERMEM_SG_CHUNK, chunk.sgl);
	list->table.orig_nents += PEERMEM_SG_CHUNK - 1;
	return 1;
}

/*
 * Ends the list with the @filled entries from @first on, which are the last
 * chunk's if there is any, and gives back what it has beyond. May sleep.
 */
int peermem_sg_finish(struct peermem_sg *list, struct scatterlist *first,
		      unsigned int filled)
{
	struct sg_table last;

	if (filled < PEERMEM_SG_CHUNK) {
		if (sg_alloc_table(&last, filled, GFP_KERNEL))
			return -ENOMEM;
		peermem_sg_copy(last.sgl, first, filled);
		if (!list->chunk) {
			list->table = last;
			return 0;
		}
		if (list->before)
			sg_chain(list->before, PEERMEM_SG_CHUNK, last.sgl);
		else
			list->table.sgl = last.sgl;
		list->table.orig_nents -= PEERMEM_SG_CHUNK - filled;
		last = (struct sg_table) {
			.sgl = list->chunk,
			.orig_nents = PEERMEM_SG_CHUNK,
		};
		sg_free_table(&last);
	}
	list->table.nents = list->table.orig_nents;
	return 0;
}
