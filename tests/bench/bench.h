/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
#ifndef _RIG_BENCH_H_
#define _RIG_BENCH_H_

#include <linux/types.h>

struct dentry;
struct sg_table;
struct task_struct;

/* bench.c */
extern struct task_struct *inside_client;

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

#endif /* _RIG_BENCH_H_ */
