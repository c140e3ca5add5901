// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Growing scatter lists of DMA addresses, for sg.rs. This file is in C because
 * the kernel crate has no function for the links between chunks.
 */

#include <linux/scatterlist.h>

#include "helpers.h"

/* Copies entries to new entries that sg_alloc_table() has made. */
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
 * Makes room after the @filled entries from @first on, in the rest of the last
 * chunk or in a new chunk. @list->chunk is NULL, or equals @first and is full.
 * Returns the number of filled entries in the new @list->chunk, or 0 if there
 * is no memory. May sleep.
 */
unsigned int peermem_sg_grow(struct peermem_sg *list, struct scatterlist *first,
			     unsigned int filled)
{
	struct scatterlist *next = first + filled;
	struct sg_table chunk;

	/*
	 * The last chunk has room only if a page has more than PEERMEM_SG_CHUNK
	 * entries.
	 */
	if (list->last && next < list->last + SG_MAX_SINGLE_ALLOC) {
		list->chunk = min(next - 1, list->last + SG_MAX_SINGLE_ALLOC -
						    PEERMEM_SG_CHUNK);
		return next - list->chunk;
	}
	if (sg_alloc_table(&chunk, SG_MAX_SINGLE_ALLOC, GFP_KERNEL))
		return 0;
	list->before = list->last;
	list->last = chunk.sgl;
	list->chunk = chunk.sgl;
	if (!list->before) {
		list->table = chunk;
		peermem_sg_copy(chunk.sgl, first, filled);
		return filled;
	}
	/* The last entry moves, because the link takes its place. */
	peermem_sg_copy(chunk.sgl, next - 1, 1);
	sg_chain(list->before, SG_MAX_SINGLE_ALLOC, chunk.sgl);
	list->table.orig_nents += SG_MAX_SINGLE_ALLOC - 1;
	return 1;
}

/*
 * Ends the list with the @filled entries from @first on, and frees the unused
 * entries of the last chunk. @list->chunk is NULL, or equals @first. May sleep.
 */
int peermem_sg_finish(struct peermem_sg *list, struct scatterlist *first,
		      unsigned int filled)
{
	struct sg_table last;

	if (list->last) {
		filled += first - list->last;
		first = list->last;
	}
	if (filled < SG_MAX_SINGLE_ALLOC) {
		if (sg_alloc_table(&last, filled, GFP_KERNEL))
			return -ENOMEM;
		peermem_sg_copy(last.sgl, first, filled);
		if (!list->last) {
			list->table = last;
			return 0;
		}
		if (list->before)
			sg_chain(list->before, SG_MAX_SINGLE_ALLOC, last.sgl);
		else
			list->table.sgl = last.sgl;
		list->table.orig_nents -= SG_MAX_SINGLE_ALLOC - filled;
		last = (struct sg_table) {
			.sgl = list->last,
			.orig_nents = SG_MAX_SINGLE_ALLOC,
		};
		sg_free_table(&last);
	}
	list->table.nents = list->table.orig_nents;
	return 0;
}
