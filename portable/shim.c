// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The functions of shim.h. */

#define pr_fmt(fmt) "nvidia-peermem: " fmt

#include <linux/mm.h>
#include <linux/printk.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "../src/compat.h"
#include "shim.h"

/* Without @warn, the kernel does not log a failed allocation. */
static gfp_t flags(bool warn)
{
	return warn ? GFP_KERNEL : GFP_KERNEL | __GFP_NOWARN;
}

/* The result is aligned to 8 bytes. May sleep. */
void *shim_alloc(size_t size, bool warn)
{
	return kmalloc(size, flags(warn));
}

void shim_free(void *memory)
{
	kfree(memory);
}

/* The result need not be contiguous in physical memory. May sleep. */
void *shim_valloc(size_t size, bool warn)
{
	return kvmalloc(size, flags(warn));
}

void shim_vfree(void *memory)
{
	kvfree(memory);
}

/*
 * @level is the digit of a level from KERN_EMERG to KERN_INFO. printk() accepts
 * only literal levels.
 */
void shim_print(int level, const char *text, int length)
{
	switch (level) {
	case 0:
		pr_emerg("%.*s", length, text);
		break;
	case 3:
		pr_err("%.*s", length, text);
		break;
	case 4:
		pr_warn("%.*s", length, text);
		break;
	case 5:
		pr_notice("%.*s", length, text);
		break;
	default:
		pr_info("%.*s", length, text);
		break;
	}
}

void shim_mutex_init(struct mutex *lock, const char *name,
		     struct lock_class_key *key)
{
	__mutex_init(lock, name, key);
}

void shim_mutex_lock(struct mutex *lock)
{
	mutex_lock(lock);
}

void shim_mutex_unlock(struct mutex *lock)
{
	mutex_unlock(lock);
}

void shim_spin_lock(spinlock_t *lock)
{
	spin_lock(lock);
}

void shim_spin_unlock(spinlock_t *lock)
{
	spin_unlock(lock);
}

void shim_down_read(struct rw_semaphore *lock)
{
	down_read(lock);
}

void shim_up_read(struct rw_semaphore *lock)
{
	up_read(lock);
}

void shim_down_write(struct rw_semaphore *lock)
{
	down_write(lock);
}

void shim_up_write(struct rw_semaphore *lock)
{
	up_write(lock);
}

void shim_wait_init(wait_queue_head_t *queue, const char *name,
		    struct lock_class_key *key)
{
	__init_waitqueue_head(queue, name, key);
}

/*
 * Releases @lock, sleeps until the next wake-up, and takes @lock again. The
 * thread enters the queue first, so no wake-up by a holder of @lock is lost.
 */
void shim_wait(wait_queue_head_t *queue, struct mutex *lock)
{
	DEFINE_WAIT(wait);

	prepare_to_wait_exclusive(queue, &wait, TASK_UNINTERRUPTIBLE);
	mutex_unlock(lock);
	schedule();
	finish_wait(queue, &wait);
	mutex_lock(lock);
}

void shim_wake_all(wait_queue_head_t *queue)
{
	wake_up_all(queue);
}

void shim_sleep(u64 microseconds)
{
#ifdef PEERMEM_HAS_FSLEEP
	fsleep(microseconds);
#else
	if (microseconds < 20 * USEC_PER_MSEC)
		usleep_range(microseconds, 2 * microseconds);
	else
		msleep(DIV_ROUND_UP(microseconds, USEC_PER_MSEC));
#endif
}

void shim_seq_write(struct seq_file *seq, const void *text, size_t length)
{
	seq_write(seq, text, length);
}

/* sg_next() is exported up to Linux 6.14, and is an inline function in 7.2. */
struct scatterlist *shim_sg_next(struct scatterlist *at)
{
	return sg_next(at);
}

bool shim_module_get(struct module *module)
{
	return try_module_get(module);
}

void shim_module_put(struct module *module)
{
	module_put(module);
}
