/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Hold points: named places in kernel code where a test can stop threads.
 *
 * A race test needs one thread inside a window of a few instructions while
 * another thread runs. Sleeps make this likely, a hold point makes it certain:
 * the test arms the point, waits until a thread is counted there, performs the
 * race, and releases the thread.
 *
 *	TEST_HOLD(before_frob);
 *	...
 *	test_hold_here(&before_frob);			in the code under test
 *	...
 *	test_hold_debugfs(dir, &before_frob);		once, at start-up
 *
 * The file of that name in @dir then takes "1" (arm) and "0" (disarm, and
 * release every thread that waits), and reads as
 *
 *	armed=<0|1> waiting=<n> passed=<n> abandoned=<n>
 *
 * "passed" counts the threads that have passed the place since it was last
 * armed, with or without waiting.
 *
 * No timeout limits how long a thread is held, because a machine may pause
 * for any time. The point belongs to the process that armed it, and the
 * thread stays while that process lives. If the process ends without
 * releasing the thread, the thread continues within a second, so that the
 * machine can still be shut down and its log be read. "abandoned" counts
 * these cases, and the log has a warning, which fails the run.
 *
 * Everything is in this header, so that modules outside the kernel's tree can
 * use it, too.
 */
#ifndef _LINUX_TEST_HOLD_H
#define _LINUX_TEST_HOLD_H

#include <linux/bug.h>
#include <linux/debugfs.h>
#include <linux/fs.h>
#include <linux/jiffies.h>
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/pid.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/spinlock.h>
#include <linux/wait.h>

/* How often a held thread checks that the owner still exists. */
#define TEST_HOLD_LOOK		HZ

/**
 * struct test_hold - a place where threads can be stopped
 * @name: name of the file
 * @lock: protects all following fields. Taken only in process context.
 * @armed: true if a thread that arrives now must wait
 * @generation: incremented by every disarming. A waiter waits for a change of
 *	this number, not for @armed to be false. If the point were armed again
 *	at once, a waiter that had not run in between would sleep on.
 * @waiting: threads that sleep here
 * @passed: threads that have left since the last arming
 * @abandoned: releases because the owner ended, since the last arming
 * @owner: the process that armed the point
 * @wait: queue of the waiting threads
 */
struct test_hold {
	const char *name;
	spinlock_t lock;
	bool armed;
	unsigned long generation;
	unsigned int waiting;
	unsigned int passed;
	unsigned int abandoned;
	struct pid *owner;
	wait_queue_head_t wait;
};

/**
 * TEST_HOLD - define a hold point that is not armed
 * @_name: name of the variable and of its file
 */
#define TEST_HOLD(_name)						\
	static struct test_hold _name = {				\
		.name = #_name,						\
		.lock = __SPIN_LOCK_UNLOCKED(_name.lock),		\
		.wait = __WAIT_QUEUE_HEAD_INITIALIZER(_name.wait),	\
	}

/* The caller holds @hold->lock. */
static inline void __test_hold_disarm(struct test_hold *hold)
{
	hold->armed = false;
	put_pid(hold->owner);
	hold->owner = NULL;
	WRITE_ONCE(hold->generation, hold->generation + 1);
	wake_up_all(&hold->wait);
}

/* Returns true if the owner is gone. The caller holds @hold->lock. */
static inline bool __test_hold_is_abandoned(struct test_hold *hold)
{
	struct task_struct *task;
	bool abandoned;

	rcu_read_lock();
	task = pid_task(hold->owner, PIDTYPE_TGID);
	abandoned = !task || (task->signal->flags & SIGNAL_GROUP_EXIT);
	rcu_read_unlock();
	return abandoned;
}

/**
 * test_hold_here - stop here if a test has armed the point
 * @hold: the place
 *
 * May sleep, even with mutexes held, which is the purpose. The sleep is not
 * interruptible, because a thread that continues on a signal would make the
 * test's result random. It is idle, so it never counts as a hung task.
 */
static inline void test_hold_here(struct test_hold *hold)
{
	unsigned long generation;
	bool abandoned = false;

	might_sleep();

	spin_lock(&hold->lock);
	if (hold->armed) {
		hold->waiting++;
		generation = hold->generation;
		while (hold->generation == generation && !abandoned) {
			spin_unlock(&hold->lock);
			wait_event_idle_timeout(hold->wait,
						READ_ONCE(hold->generation) != generation,
						TEST_HOLD_LOOK);
			spin_lock(&hold->lock);
			abandoned = hold->generation == generation &&
				    __test_hold_is_abandoned(hold);
		}
		hold->waiting--;
		if (abandoned) {
			hold->abandoned++;
			__test_hold_disarm(hold);
		}
	}
	hold->passed++;
	spin_unlock(&hold->lock);

	WARN(abandoned, "hold point %s: nobody is left to release it\n",
	     hold->name);
}

static inline void test_hold_set(struct test_hold *hold, bool armed)
{
	spin_lock(&hold->lock);
	if (armed && !hold->armed) {
		hold->armed = true;
		hold->owner = get_task_pid(current, PIDTYPE_TGID);
		hold->passed = 0;
		hold->abandoned = 0;
	} else if (!armed) {
		__test_hold_disarm(hold);
	}
	spin_unlock(&hold->lock);
}

static inline ssize_t test_hold_read(struct file *file, char __user *buf,
				     size_t len, loff_t *pos)
{
	struct test_hold *hold = file->private_data;
	char text[80];
	int n;

	spin_lock(&hold->lock);
	n = scnprintf(text, sizeof(text),
		      "armed=%d waiting=%u passed=%u abandoned=%u\n",
		      hold->armed, hold->waiting, hold->passed,
		      hold->abandoned);
	spin_unlock(&hold->lock);

	return simple_read_from_buffer(buf, len, pos, text, n);
}

static inline ssize_t test_hold_write(struct file *file, const char __user *buf,
				      size_t len, loff_t *pos)
{
	bool armed;
	int ret;

	ret = kstrtobool_from_user(buf, len, &armed);
	if (ret)
		return ret;

	test_hold_set(file->private_data, armed);
	return len;
}

static const struct file_operations test_hold_fops __maybe_unused = {
	.owner	= THIS_MODULE,
	.open	= simple_open,
	.read	= test_hold_read,
	.write	= test_hold_write,
	.llseek	= default_llseek,
};

/**
 * test_hold_debugfs - create the file of a hold point
 * @dir: debugfs directory, usually named "hold"
 * @hold: the place
 *
 * The file is removed with its directory. The owner removes the directory
 * before the module that defines @hold is unloaded.
 */
static inline void test_hold_debugfs(struct dentry *dir, struct test_hold *hold)
{
	debugfs_create_file(hold->name, 0600, dir, hold, &test_hold_fops);
}

#endif /* _LINUX_TEST_HOLD_H */
