// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Asserts that the kernel being built for has the sizes and offsets that
 * portable/kernel assumes for every kernel.
 */

#include <linux/mutex.h>
#include <linux/rbtree.h>
#include <linux/scatterlist.h>
#include <linux/stddef.h>
#include <linux/wait.h>

#include "../src/compat.h"
#include "../src/helpers.h"
#include "../src/memory_peers.h"

/*
 * Mutexes, wait queues and lock classes must fit into Room<20>, Room<12> and
 * Room<8> of kernel/sync, even with lockdep.
 */
static_assert(sizeof(struct mutex) <= 160, "mutexes are too large here");
static_assert(sizeof(wait_queue_head_t) <= 96,
	      "PREEMPT_RT with lock debugging is not supported: wait queues are too large");
static_assert(__alignof__(struct mutex) <= 8);
static_assert(__alignof__(wait_queue_head_t) <= 8);
static_assert(sizeof(struct lock_class_key) <= 64);
static_assert(__alignof__(struct lock_class_key) <= 8);

#define AT(type, member, offset) \
	static_assert(offsetof(type, member) == (offset))
AT(struct scatterlist, page_link, 0);
AT(struct scatterlist, offset, 8);
AT(struct scatterlist, length, 12);
AT(struct scatterlist, dma_address, 16);
AT(struct scatterlist, dma_length, 24);
static_assert(sizeof(struct scatterlist) == 32);
static_assert(PEERMEM_SG_CHUNK == 128);
static_assert(SG_MAX_SINGLE_ALLOC >= PEERMEM_SG_CHUNK);
AT(struct sg_table, sgl, 0);
AT(struct sg_table, nents, 8);
AT(struct sg_table, orig_nents, 12);
static_assert(sizeof(struct sg_table) == 16);
#ifdef PEERMEM_HAS_IOVA_ALLOC
AT(struct dma_iova_state, addr, 0);
static_assert(sizeof(struct dma_iova_state) == 16);
#endif
AT(struct rb_node, __rb_parent_color, 0);
AT(struct rb_node, rb_right, 8);
AT(struct rb_node, rb_left, 16);
static_assert(sizeof(struct rb_node) == 24);
AT(struct rb_root, rb_node, 0);
static_assert(sizeof(struct rb_root) == 8);
/* kmalloc() must align to MIN_ALIGN of kernel/alloc.rs. */
static_assert(ARCH_KMALLOC_MINALIGN >= 8);
static_assert(sizeof(dma_addr_t) == 8);
static_assert(sizeof(phys_addr_t) == 8);
static_assert(sizeof(pid_t) == 4);
static_assert(sizeof(umode_t) == 2);

/* The structures of generated.rs. */
AT(struct peermem_params, peerdirect_support, 0);
AT(struct peermem_params, persistent_api_support, 4);
AT(struct peermem_params, user_limit_mib, 8);
AT(struct peermem_params, max_chunks, 12);
AT(struct peermem_params, provider_maps, 16);
AT(struct peermem_settlement, settle, 0);
AT(struct peermem_file_ops, open, 0);
AT(struct peermem_file_ops, release, 8);
AT(struct peermem_file_ops, find, 16);
AT(struct peermem_file_ops, show, 24);
AT(struct peermem_sg, table, 0);
AT(struct peermem_sg, chunk, 16);
AT(struct peermem_sg, last, 24);
AT(struct peermem_sg, before, 32);
AT(struct peermem_peer, name, 0);
AT(struct peermem_peer, counters, 8);
