/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * /sys/kernel/mm/memory_peers: see memory_peers.c. memory_peers.rs wraps these
 * functions.
 */
#ifndef PEERMEM_MEMORY_PEERS_H
#define PEERMEM_MEMORY_PEERS_H

#include <linux/types.h>

/* The number of counters that ib_core keeps for each client. */
#define PEERMEM_COUNTERS	7

/*
 * A client: its name, and its counters, which change without a lock. The order
 * of the counters is that of their files.
 */
struct peermem_peer {
	const char *name;
	const u64 *counters;
} __no_randomize_layout;

/* The number of client modes. */
#define PEERMEM_PEERS	2

void peermem_memory_peers_probe(const char *name);
void peermem_memory_peers_show(const struct peermem_peer *peers,
			       unsigned int count);
void peermem_memory_peers_hide(void);

#endif /* PEERMEM_MEMORY_PEERS_H */
