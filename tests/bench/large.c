// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A host whose memory is in single pages, for the functions of a client and
 * for nobody else: while this is switched on, the page allocator refuses them
 * whatever is larger than a page. What can do with less goes on: a slab of one
 * page, vmalloc() behind kvmalloc().
 *
 * kmalloc() of two pages may find one in a slab that is there already, where
 * the page allocator is not asked. That is counted as given, unless its caller
 * can do without, as kvmalloc() can.
 *
 * /sys/kernel/debug/bench/page_order: "1" shows that what it is to refuse is
 * refused, and the rest is not, and switches on, or fails with EIO; "0"
 * switches off; reads as "on=0|1 refused=N given=N".
 */
#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/gfp.h>
#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/preempt.h>
#include <linux/sched.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/tracepoint.h>
#include <linux/uaccess.h>

#include "bench.h"

static DEFINE_MUTEX(lock);
static bool on;
static atomic_t refused, given;
static struct tracepoint *kmalloc_point;

/* The call returns NULL without having been made. */
static void answer_null(struct pt_regs *regs)
{
	regs_set_return_value(regs, 0);
#ifdef CONFIG_ARM64
	instruction_pointer_set(regs, procedure_link_pointer(regs));
#else
	instruction_pointer_set(regs, *(unsigned long *)kernel_stack_pointer(regs));
	regs->sp += sizeof(unsigned long);
#endif
}

/*
 * As in_client(), of what a probe has interrupted: by a trap, which counts as
 * an interrupt that is not maskable.
 */
static bool probed_in_client(void)
{
	unsigned int count = preempt_count();

	if (in_nmi())
		count -= NMI_OFFSET + HARDIRQ_OFFSET;
	return !(count & (NMI_MASK | HARDIRQ_MASK | SOFTIRQ_OFFSET)) &&
	       is_client(current);
}

static int before_alloc_pages(struct kprobe *probe, struct pt_regs *regs)
{
	unsigned int order = regs_get_kernel_argument(regs, 1);

	if (!order || !probed_in_client())
		return 0;
	atomic_inc(&refused);
	answer_null(regs);
	return 1;
}

/* A probe that has this is not turned into a jump, which could not redirect. */
static void not_optimised(struct kprobe *probe, struct pt_regs *regs,
			  unsigned long flags)
{
}

static struct kprobe pages_probe = {
	.symbol_name	= "__alloc_frozen_pages_noprof",
	.pre_handler	= before_alloc_pages,
	.post_handler	= not_optimised,
};

/* kvmalloc() has its first try give up at once, the sooner the newer it is. */
static bool can_do_without(gfp_t gfp)
{
	return !(gfp & __GFP_DIRECT_RECLAIM) || gfp & __GFP_NORETRY;
}

static void on_kmalloc(void *data, unsigned long site, const void *object,
		       size_t wanted, size_t bytes, gfp_t gfp, int node)
{
	if (object && bytes > PAGE_SIZE && in_client() && !can_do_without(gfp))
		atomic_inc(&given);
}

static void stop(void)
{
	if (!on)
		return;
	tracepoint_probe_unregister(kmalloc_point, on_kmalloc, NULL);
	tracepoint_synchronize_unregister();
	unregister_kprobe(&pages_probe);
	/* For the next registration. */
	pages_probe.addr = NULL;
	pages_probe.flags = 0;
	on = false;
}

/* What a client gets, and others. */
static bool proven(void)
{
	void *page, *two, *four, *many, *others;
	struct page *pages;
	bool sound;

	WRITE_ONCE(inside_client, current);
	page = kmalloc(PAGE_SIZE, GFP_KERNEL);
	two = kmalloc(2 * PAGE_SIZE, GFP_KERNEL);
	sound = atomic_read(&refused) + atomic_read(&given) > 0;
	atomic_set(&refused, 0);
	atomic_set(&given, 0);
	four = kmalloc(4 * PAGE_SIZE, GFP_KERNEL);
	sound &= !four && atomic_read(&refused) == 1;
	pages = alloc_pages(GFP_KERNEL, 1);
	sound &= !pages && atomic_read(&refused) == 2;
	many = kvmalloc(SZ_1M, GFP_KERNEL);
	sound &= page && many && !atomic_read(&given);
	WRITE_ONCE(inside_client, NULL);
	others = kmalloc(4 * PAGE_SIZE, GFP_KERNEL);
	sound &= !!others;

	kfree(others);
	kvfree(many);
	if (pages)
		__free_pages(pages, 1);
	kfree(four);
	kfree(two);
	kfree(page);
	return sound;
}

static int start(void)
{
	int ret;

	stop();
	atomic_set(&refused, 0);
	atomic_set(&given, 0);
	ret = register_kprobe(&pages_probe);
	if (ret)
		return ret;
	ret = tracepoint_probe_register(kmalloc_point, on_kmalloc, NULL);
	if (ret) {
		unregister_kprobe(&pages_probe);
		return ret;
	}
	on = true;
	if (!proven()) {
		stop();
		return -EIO;
	}
	atomic_set(&refused, 0);
	atomic_set(&given, 0);
	return 0;
}

static ssize_t page_order_read(struct file *file, char __user *buf, size_t len,
			       loff_t *pos)
{
	char text[64];
	int n;

	mutex_lock(&lock);
	n = scnprintf(text, sizeof(text), "on=%d refused=%d given=%d\n", on,
		      atomic_read(&refused), atomic_read(&given));
	mutex_unlock(&lock);
	return simple_read_from_buffer(buf, len, pos, text, n);
}

static ssize_t page_order_write(struct file *file, const char __user *buf,
				size_t len, loff_t *pos)
{
	bool wanted;
	int ret;

	ret = kstrtobool_from_user(buf, len, &wanted);
	if (ret)
		return ret;
	mutex_lock(&lock);
	if (wanted)
		ret = start();
	else
		stop();
	mutex_unlock(&lock);
	return ret ?: len;
}

static const struct file_operations page_order_fops = {
	.read	= page_order_read,
	.write	= page_order_write,
	.open	= simple_open,
	.llseek	= default_llseek,
};

static void find(struct tracepoint *point, void *unused)
{
	if (!strcmp(point->name, "kmalloc"))
		kmalloc_point = point;
}

int large_init(struct dentry *root)
{
	for_each_kernel_tracepoint(find, NULL);
	if (!kmalloc_point) {
		pr_err("no tracepoint kmalloc\n");
		return -ENOENT;
	}
	debugfs_create_file("page_order", 0600, root, NULL, &page_order_fops);
	return 0;
}

void large_exit(void)
{
	stop();
}
