/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * /sys/kernel/mm/memory_peers: see memory_peers.c. memory_peers.rs wraps these
 * functions.
 */
#ifndef PEERMEM_MEMORY_PEERS_H
#define PEERMEM_MEMORY_PEERS_H

#include <linux/types.h>

/* The counters that ib_core keeps for each client. */
struct peermem_stats {
	u64 alloc_mrs;
	u64 dealloc_mrs;
	u64 reg_pages;
	u64 dereg_pages;
	u64 reg_bytes;
	u64 dereg_bytes;
	u64 free_callbacks;
} __no_randomize_layout;

/* A client: its name, and its counters, which change without a lock. */
struct peermem_peer {
	const char *name;
	const struct peermem_stats *stats;
} __no_randomize_layout;

/* The number of client modes. */
#define PEERMEM_PEERS	2

void peermem_memory_peers_probe(const char *name);
void peermem_memory_peers_show(const struct peermem_peer *peers,
			       unsigned int count);
void peermem_memory_peers_hide(void);

#endif /* PEERMEM_MEMORY_PEERS_H */
