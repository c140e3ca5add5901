/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * The C side of portable/kernel: one function for each kernel service that is a
 * macro or an inline function in some kernel. No function depends on the
 * module.
 */
#ifndef PEERMEM_SHIM_H
#define PEERMEM_SHIM_H

#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/rwsem.h>
#include <linux/scatterlist.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

void *shim_alloc(size_t size, bool warn);
void shim_free(void *memory);
void *shim_valloc(size_t size, bool warn);
void shim_vfree(void *memory);

void shim_print(int level, const char *text, int length);

void shim_mutex_init(struct mutex *lock, const char *name,
		     struct lock_class_key *key);
void shim_mutex_lock(struct mutex *lock);
void shim_mutex_unlock(struct mutex *lock);
void shim_spin_lock(spinlock_t *lock);
void shim_spin_unlock(spinlock_t *lock);
void shim_down_read(struct rw_semaphore *lock);
void shim_up_read(struct rw_semaphore *lock);
void shim_down_write(struct rw_semaphore *lock);
void shim_up_write(struct rw_semaphore *lock);

void shim_wait_init(wait_queue_head_t *queue, const char *name,
		    struct lock_class_key *key);
void shim_wait(wait_queue_head_t *queue, struct mutex *lock);
void shim_wake_all(wait_queue_head_t *queue);
void shim_sleep(u64 microseconds);

void shim_seq_write(struct seq_file *seq, const void *text, size_t length);
struct scatterlist *shim_sg_next(struct scatterlist *at);
bool shim_module_get(struct module *module);
void shim_module_put(struct module *module);

/* Functions of kunit.c, which only the tests use. */
struct completion;
struct kunit;

void shim_completion_init(struct completion *completion);
void shim_completion_wait(struct completion *completion);
void shim_complete_all(struct completion *completion);
void shim_kunit_fail(struct kunit *test);

#endif /* PEERMEM_SHIM_H */
