/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
#ifndef _TEST_BENCH_H_
#define _TEST_BENCH_H_

#include <linux/atomic.h>
#include <linux/preempt.h>
#include <linux/sched.h>
#include <linux/types.h>

#include "spent.h"

struct dentry;
struct sg_table;

/* bench.c */
extern struct task_struct *inside_client;

/* Returns true if @task is in a client's function, outside nvidia.ko. */
static inline bool is_client(struct task_struct *task)
{
	return READ_ONCE(inside_client) == task &&
	       !atomic_read(&standin_spent.inside);
}

/*
 * Returns true if the current thread is in a client's function, outside
 * nvidia.ko and outside an interrupt.
 */
static inline bool in_client(void)
{
	return in_task() && is_client(current);
}

/* large.c */
int large_init(struct dentry *root);
void large_exit(void);

/* memory.c */
int memory_init(struct dentry *root);
void memory_exit(void);

/* provider.c */
int provider_init(struct dentry *root);
void provider_exit(void);

/* table.c */
void table_mapped(const struct sg_table *table, unsigned long address,
		  size_t length);
void table_init(struct dentry *root);
void table_exit(void);

#endif /* _TEST_BENCH_H_ */
