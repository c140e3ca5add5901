// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Changes calls between a module under test and the kernel, in three ways that
 * the stand-ins of the test VM cannot. The allocation of a scatter list fails
 * half-way, ib_core changes a scatter list of the module, or a call returns
 * late. Kprobes make the changes. The kernel and the two peer-memory modules
 * are therefore the same as in all other tests.
 *
 * Under /sys/kernel/debug/interpose:
 *
 *	sg_kmalloc		"N": from now on, the writing process's Nth
 *				allocation of a piece of a scatter list fails;
 *				reads as "left=N hits=N"
 *	sg_table_edit		"1": ib_core changes the head of the next
 *				scatter list that it returns, as a later
 *				version might; reads as sg_kmalloc
 *	module_put		"1": the next module_put() of nvidia_peermem
 *				returns through hold/module_put_done
 *	hold/module_put_done	see linux/test_hold.h
 */
#include <linux/debugfs.h>
#include <linux/kernel.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/test_hold.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <rdma/ib_umem.h>

TEST_HOLD(module_put_done);

/**
 * struct trap - counts calls, and catches one of them
 * @name: name of the trap's file
 * @lock: protects the fields after it
 * @tgid: process whose calls count, or 0 for all processes
 * @left: calls until the catch, or 0 if disarmed
 * @hits: catches since the trap was armed
 * @own_calls: set @tgid to the process that arms the trap
 */
struct trap {
	const char *name;
	spinlock_t lock;	/* protects the fields below */
	pid_t tgid;
	unsigned int left;
	unsigned int hits;
	bool own_calls;
};

#define TRAP(_name, _own_calls)						\
	static struct trap _name##_trap = {				\
		.name = #_name,						\
		.lock = __SPIN_LOCK_UNLOCKED(_name##_trap.lock),	\
		.own_calls = _own_calls,				\
	}

TRAP(sg_kmalloc, true);
TRAP(sg_table_edit, false);
TRAP(module_put, false);

static struct dentry *root;

static bool caught(struct trap *trap)
{
	unsigned long flags;
	bool hit = false;

	spin_lock_irqsave(&trap->lock, flags);
	if (trap->left && (!trap->tgid || trap->tgid == current->tgid) &&
	    !--trap->left) {
		trap->hits++;
		hit = true;
	}
	spin_unlock_irqrestore(&trap->lock, flags);
	return hit;
}

/* Makes the probed call return @value without running. */
static void answer(struct pt_regs *regs, unsigned long value)
{
	regs_set_return_value(regs, value);
#ifdef CONFIG_ARM64
	instruction_pointer_set(regs, procedure_link_pointer(regs));
#else
	instruction_pointer_set(regs, *(unsigned long *)kernel_stack_pointer(regs));
	regs->sp += sizeof(unsigned long);
#endif
}

static int before_sg_kmalloc(struct kprobe *probe, struct pt_regs *regs)
{
	if (!caught(&sg_kmalloc_trap))
		return 0;
	answer(regs, 0);
	return 1;
}

/* Returns the table that ib_core passes to dma_unmap() and put_pages(). */
static struct sg_table *table_of(struct ib_umem *umem)
{
#if KERNEL_VERSION(5, 15, 0) <= LINUX_VERSION_CODE
	return &umem->sgt_append.sgt;
#else
	return &umem->sg_head;
#endif
}

static int before_unmap(struct kprobe *probe, struct pt_regs *regs)
{
	struct ib_umem *umem = (void *)regs_get_kernel_argument(regs, 0);

	if (umem->is_peer && caught(&sg_table_edit_trap))
		table_of(umem)->orig_nents++;
	return 0;
}

/*
 * Replaces module_put(). Puts the reference, and returns only when the test
 * allows it.
 */
static void put_and_wait(struct module *module)
{
	module_put(module);
	test_hold_here(&module_put_done);
}

static int before_module_put(struct kprobe *probe, struct pt_regs *regs)
{
	struct module *module = (void *)regs_get_kernel_argument(regs, 0);

	if (!module || strcmp(module->name, "nvidia_peermem") ||
	    !caught(&module_put_trap))
		return 0;
	instruction_pointer_set(regs, (unsigned long)put_and_wait);
	return 1;
}

/*
 * Does nothing. The kernel does not optimise a kprobe with a post_handler to a
 * jump. Only a probe that is a trap can redirect the call.
 */
static void not_optimised(struct kprobe *probe, struct pt_regs *regs,
			  unsigned long flags)
{
}

#define PROBE(_function, _handler)					\
	{								\
		.symbol_name = _function,				\
		.pre_handler = _handler,				\
		.post_handler = not_optimised,				\
	}

static struct kprobe probes[] = {
	PROBE("sg_kmalloc", before_sg_kmalloc),
	PROBE("ib_umem_stop_invalidation_notifier", before_unmap),
	PROBE("ib_peer_umem_release", before_unmap),
	PROBE("module_put", before_module_put),
};

static ssize_t trap_read(struct file *file, char __user *buf, size_t len,
			 loff_t *pos)
{
	struct trap *trap = file->private_data;
	char text[64];
	int n;

	spin_lock_irq(&trap->lock);
	n = scnprintf(text, sizeof(text), "left=%u hits=%u\n", trap->left,
		      trap->hits);
	spin_unlock_irq(&trap->lock);
	return simple_read_from_buffer(buf, len, pos, text, n);
}

static ssize_t trap_write(struct file *file, const char __user *buf, size_t len,
			  loff_t *pos)
{
	struct trap *trap = file->private_data;
	unsigned int left;
	int ret;

	ret = kstrtouint_from_user(buf, len, 0, &left);
	if (ret)
		return ret;

	spin_lock_irq(&trap->lock);
	trap->tgid = trap->own_calls ? current->tgid : 0;
	trap->left = left;
	trap->hits = 0;
	spin_unlock_irq(&trap->lock);
	return len;
}

static const struct file_operations trap_fops = {
	.owner	= THIS_MODULE,
	.open	= simple_open,
	.read	= trap_read,
	.write	= trap_write,
	.llseek	= default_llseek,
};

static void trap_file(struct trap *trap)
{
	debugfs_create_file(trap->name, 0600, root, trap, &trap_fops);
}

static int __init interpose_init(void)
{
	int i, ret;

	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		ret = register_kprobe(&probes[i]);
		if (ret) {
			pr_err("no probe at %s: %d\n", probes[i].symbol_name, ret);
			goto unregister;
		}
	}

	root = debugfs_create_dir("interpose", NULL);
	trap_file(&sg_kmalloc_trap);
	trap_file(&sg_table_edit_trap);
	trap_file(&module_put_trap);
	test_hold_debugfs(debugfs_create_dir("hold", root), &module_put_done);
	return 0;

unregister:
	while (i--)
		unregister_kprobe(&probes[i]);
	return ret;
}

static void __exit interpose_exit(void)
{
	int i;

	debugfs_remove(root);
	for (i = 0; i < ARRAY_SIZE(probes); i++)
		unregister_kprobe(&probes[i]);
}

module_init(interpose_init);
module_exit(interpose_exit);
MODULE_DESCRIPTION("Breaks calls of the kernel on request, for tests");
MODULE_LICENSE("Dual BSD/GPL");
