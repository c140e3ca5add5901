/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * What Rust cannot do by itself: module parameters that show in sysfs, the
 * module's version, and kernel functions that are inline or macros. sys.rs
 * wraps all of it.
 */
#ifndef PEERMEM_SYS_H
#define PEERMEM_SYS_H

#include <linux/pci.h>
#include <linux/rbtree.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/types.h>

int peermem_peerdirect_support(void);
int peermem_persistent_api_support(void);
unsigned int peermem_user_limit_mib(void);
unsigned int peermem_max_pieces(void);
const char *peermem_version(void);

/* A loaded module, as it can be seen. */
#define PEERMEM_LOADED		1
#define PEERMEM_PROPRIETARY	2
int peermem_look_at_module(const char *name, char *version, size_t len);

bool peermem_is_killed(void);
bool peermem_is_exiting(void);
s64 peermem_microseconds(void);

void peermem_comm(char comm[TASK_COMM_LEN]);
bool peermem_is_user_address(unsigned long addr);

void peermem_trace_refused(const char *flavour, const char *step,
			   const char *reason, int code, u64 addr, u64 len,
			   pid_t tgid);

void peermem_trace_registered(u64 id, const char *flavour, u64 addr, u64 len,
			      u64 page, u64 pieces, pid_t tgid);
void peermem_trace_mapped(u64 id, u32 entries, u64 hca);
void peermem_trace_revoked(u64 id);
void peermem_trace_released(u64 id, const char *state);

/* On the roll of registrations, while it is in the tree. */
struct peermem_place {
	struct rb_node node;
	u64 number;
};

void peermem_roll_lock(void);
void peermem_roll_unlock(void);
void peermem_roll_add(struct peermem_place *place, u64 number);
void peermem_roll_remove(struct peermem_place *place);
struct peermem_place *peermem_roll_from(u64 number);

/*
 * A file of lines, each with a number. @from copies the first with a number of
 * @number or a higher one to @reader, and says which it has, or 0; @show writes
 * what is there. @reader has @size bytes, all of them zero at first.
 */
struct peermem_lines {
	size_t size;
	u64 (*from)(void *reader, u64 number);
	int (*show)(struct seq_file *seq, void *reader);
};

struct dentry *peermem_debugfs_dir(void);
void peermem_debugfs_file(struct dentry *dir, const char *name, umode_t mode,
			  int (*show)(struct seq_file *seq, void *unused));
void peermem_debugfs_lines(struct dentry *dir, const char *name, umode_t mode,
			   const struct peermem_lines *lines);
void peermem_debugfs_remove(struct dentry *dir);

bool peermem_module_hold(void);
void peermem_module_release(void);

void peermem_gate_read(void);
void peermem_gate_read_end(void);
void peermem_gate_write(void);
void peermem_gate_write_end(void);

struct pci_dev *peermem_pci_dev_get(struct device *dev);
unsigned int peermem_max_segment(struct pci_dev *pdev);
u64 peermem_pci_address(struct pci_dev *pdev);

/* An entry of a scatter list that has no pages, only a DMA address. */
struct peermem_entry {
	u64 addr;
	u32 len;
};

/*
 * A scatter list that grows: whole chunks, linked as sg_alloc_table() links
 * them. All zero before the first call; sg_free_table() takes @table at any
 * time after.
 */
struct peermem_sg {
	struct sg_table table;
	/* The last chunk, how much of it is filled, and the one before it. */
	struct scatterlist *chunk;
	unsigned int used;
	struct scatterlist *before;
};

int peermem_sg_append(struct peermem_sg *list,
		      const struct peermem_entry *entries, unsigned int count);
int peermem_sg_finish(struct peermem_sg *list,
		      const struct peermem_entry *entries, unsigned int count);

/* So many GPUs have a number while the module is loaded. */
#define PEERMEM_GPUS		64

/* A memory BAR, and the number of its device; PEERMEM_GPUS: it has none. */
struct peermem_bar {
	u64 start;
	u64 len;
	u32 gpu;
};

bool peermem_bar_of(u64 addr, struct peermem_bar *bar);
bool peermem_gpu_address(u32 gpu, u64 *address);
void peermem_bars_forget(void);
bool peermem_has_struct_page(u64 addr, u64 len);
void peermem_rest(void);
int peermem_bar_map(struct pci_dev *pdev, u64 addr, size_t len, u64 *dma);
void peermem_bar_unmap(struct pci_dev *pdev, u64 dma, size_t len);

#endif /* PEERMEM_SYS_H */
