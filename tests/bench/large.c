// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Simulates a host with fragmented memory, but only for a client's functions.
 * While the simulation is on, the page allocator refuses all allocations by
 * these functions that are larger than a page. Code with a fallback continues:
 * the slab allocator with a slab of one page, and kvmalloc() with vmalloc().
 *
 * kmalloc() of two pages may find an object in an existing slab, without the
 * page allocator. Such an allocation counts as given, unless its caller has a
 * fallback, as kvmalloc() has.
 *
 * /sys/kernel/debug/bench/page_order: Writing "1" switches the simulation on.
 * The write fails with EIO if a self-test finds that an allocation by other
 * code is refused, or that a large allocation by a client's function is not
 * refused. Writing "0" switches the simulation off. A read returns "on=0|1
 * refused=N given=N".
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

/* Makes the probed call return NULL without running. */
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
 * Returns true if a probe has interrupted a client's function, outside
 * nvidia.ko and outside an interrupt. in_client() cannot be used: the probe is
 * a trap, and counts as a non-maskable interrupt itself.
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

/*
 * Does nothing. The kernel replaces only kprobes without a post_handler by a
 * jump.
 */
static void not_optimised(struct kprobe *probe, struct pt_regs *regs,
			  unsigned long flags)
{
}

static struct kprobe pages_probe = {
	.symbol_name	= "__alloc_frozen_pages_noprof",
	.pre_handler	= before_alloc_pages,
	.post_handler	= not_optimised,
};

/*
 * Returns true if the caller has a fallback. kvmalloc() has a fallback for its
 * first try, which has the flag __GFP_NORETRY or, in newer kernels, no direct
 * reclaim.
 */
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
	/* Prepare the kprobe for its next registration. */
	pages_probe.addr = NULL;
	pages_probe.flags = 0;
	on = false;
}

/*
 * Self-test: returns true if allocations of more than a page are refused to
 * clients, and to no other code.
 */
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
