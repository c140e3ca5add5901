// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Measures any peer-memory module from outside. When a client registers, a
 * kprobe replaces the client by a copy, and ib_core gets the copy. The
 * functions of the copy read a clock, call the client's function, and read the
 * clock again. There is no probe in the measured code.
 *
 * The clock is the processor's cycle counter. If QEMU counts instructions
 * (-icount shift=0), the clock counts instructions and nothing else. The
 * stand-in GPU reports the time that a function spends in it
 * (tests/gpu/spent.h). This time is listed beside the total.
 *
 * Under /sys/kernel/debug/bench:
 *
 *	calls	a line for each function: name, number of calls, and cycles;
 *		then, for each kind of call that the function makes to
 *		nvidia.ko, number of calls and cycles. A write sets all values
 *		to zero except "empty" (the cost of a function that does
 *		nothing) and "provider" (the cost that a call to nvidia.ko
 *		adds to the caller's part)
 *	memory	see memory.c
 *	page_order
 *		see large.c
 *	persistent, revocable
 *		see provider.c
 *	table	see table.c
 *
 * Load this module before the module under test, and unload it last. The
 * numbers include the calls of all threads.
 */
#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/timex.h>

#include <nv-p2p.h>
#include <rdma/peer_mem.h>

#include "bench.h"
#include "spent.h"

enum function {
	ACQUIRE,
	GET_PAGES,
	DMA_MAP,
	GET_PAGE_SIZE,
	DMA_UNMAP,
	PUT_PAGES,
	RELEASE,
	EMPTY,
	PROVIDER,
	NR_FUNCTIONS,
};

static const char * const function_names[NR_FUNCTIONS] = {
	[ACQUIRE]	= "acquire",
	[GET_PAGES]	= "get_pages",
	[DMA_MAP]	= "dma_map",
	[GET_PAGE_SIZE]	= "get_page_size",
	[DMA_UNMAP]	= "dma_unmap",
	[PUT_PAGES]	= "put_pages",
	[RELEASE]	= "release",
	[EMPTY]		= "empty",
	[PROVIDER]	= "provider",
};

#define FIRST_FIXED	EMPTY

struct cost {
	atomic64_t calls;
	atomic64_t cycles;
	atomic64_t provider_calls[NR_SPENT];
	atomic64_t provider_cycles[NR_SPENT];
};

static struct cost costs[NR_FUNCTIONS];
static struct dentry *root;

/*
 * Thread that executes a client's function. If there are several, one of them.
 */
struct task_struct *inside_client;

/* The clock */

struct reading {
	u64 calls[NR_SPENT];
	u64 cycles[NR_SPENT];
	u64 begin;
};

static __always_inline void begin(struct reading *reading)
{
	int i;

	WRITE_ONCE(inside_client, current);
	for (i = 0; i < NR_SPENT; i++) {
		reading->calls[i] = atomic64_read(&standin_spent.calls[i]);
		reading->cycles[i] = atomic64_read(&standin_spent.cycles[i]);
	}
	barrier();
	reading->begin = get_cycles();
	barrier();
}

static __always_inline void end(enum function function,
				const struct reading *reading)
{
	struct cost *cost = &costs[function];
	u64 cycles;
	int i;

	barrier();
	cycles = get_cycles() - reading->begin;
	barrier();
	WRITE_ONCE(inside_client, NULL);
	atomic64_inc(&cost->calls);
	atomic64_add(cycles, &cost->cycles);
	for (i = 0; i < NR_SPENT; i++) {
		atomic64_add(atomic64_read(&standin_spent.calls[i]) -
			     reading->calls[i], &cost->provider_calls[i]);
		atomic64_add(atomic64_read(&standin_spent.cycles[i]) -
			     reading->cycles[i], &cost->provider_cycles[i]);
	}
}

/* The clients */

#define CLIENTS	2

static struct client {
	struct peer_memory_client_ex copy;
	const struct peer_memory_client *real;
	unsigned long address;
	size_t length;
} clients[CLIENTS];

static unsigned int nr_clients;

/*
 * No argument of acquire() identifies the client, so each client has its own
 * functions.
 */
#define CLIENT_FUNCTIONS(n)						\
static int acquire_##n(unsigned long address, size_t length,		\
		       void *data, char *name, void **context)		\
{									\
	struct reading reading;						\
	int ret;							\
									\
	clients[n].address = address;					\
	clients[n].length = length;					\
	begin(&reading);						\
	ret = clients[n].real->acquire(address, length, data, name,	\
				       context);			\
	end(ACQUIRE, &reading);						\
	return ret;							\
}									\
									\
static int get_pages_##n(unsigned long address, size_t length, int write, \
			 int force, struct sg_table *table,		\
			 void *context, u64 ticket)			\
{									\
	struct reading reading;						\
	int ret;							\
									\
	begin(&reading);						\
	ret = clients[n].real->get_pages(address, length, write, force,	\
					 table, context, ticket);	\
	end(GET_PAGES, &reading);					\
	return ret;							\
}									\
									\
static int dma_map_##n(struct sg_table *table, void *context,		\
		       struct device *device, int sync, int *entries)	\
{									\
	struct reading reading;						\
	int ret;							\
									\
	begin(&reading);						\
	ret = clients[n].real->dma_map(table, context, device, sync,	\
				       entries);			\
	end(DMA_MAP, &reading);						\
	if (!ret)							\
		table_mapped(table, clients[n].address,			\
			     clients[n].length);			\
	return ret;							\
}									\
									\
static int dma_unmap_##n(struct sg_table *table, void *context,		\
			 struct device *device)				\
{									\
	struct reading reading;						\
	int ret;							\
									\
	begin(&reading);						\
	ret = clients[n].real->dma_unmap(table, context, device);	\
	end(DMA_UNMAP, &reading);					\
	return ret;							\
}									\
									\
static void put_pages_##n(struct sg_table *table, void *context)	\
{									\
	struct reading reading;						\
									\
	begin(&reading);						\
	clients[n].real->put_pages(table, context);			\
	end(PUT_PAGES, &reading);					\
}									\
									\
static unsigned long get_page_size_##n(void *context)			\
{									\
	struct reading reading;						\
	unsigned long ret;						\
									\
	begin(&reading);						\
	ret = clients[n].real->get_page_size(context);			\
	end(GET_PAGE_SIZE, &reading);					\
	return ret;							\
}									\
									\
static void release_##n(void *context)					\
{									\
	struct reading reading;						\
									\
	begin(&reading);						\
	clients[n].real->release(context);				\
	end(RELEASE, &reading);						\
}									\
									\
static void use_functions_##n(struct peer_memory_client *copy)		\
{									\
	copy->acquire = acquire_##n;					\
	copy->get_pages = get_pages_##n;				\
	copy->dma_map = dma_map_##n;					\
	copy->dma_unmap = dma_unmap_##n;				\
	copy->put_pages = put_pages_##n;				\
	copy->get_page_size = get_page_size_##n;			\
	copy->release = release_##n;					\
}

CLIENT_FUNCTIONS(0)
CLIENT_FUNCTIONS(1)

static void (*const use_functions[CLIENTS])(struct peer_memory_client *) = {
	use_functions_0,
	use_functions_1,
};

/* Makes ib_register_peer_memory_client(real, …) register our copy. */
static int before_register(struct kprobe *probe, struct pt_regs *regs)
{
	const struct peer_memory_client *real =
		(void *)regs_get_kernel_argument(regs, 0);
	struct client *client;
	unsigned int n;

	/* If a module was reloaded, its client is already known. */
	for (n = 0; n < nr_clients; n++)
		if (!strcmp(clients[n].copy.client.name, real->name))
			break;
	/*
	 * Do not measure a client that lacks an optional function: ib_core
	 * checks which functions exist, so the copy must not add one.
	 */
	if (n >= CLIENTS || !real->release || !real->get_page_size)
		return 0;

	client = &clients[n];
	client->real = real;
	client->copy.client = *real;
	/* Only a client with this byte set has the extended structure. */
	if (real->version[IB_PEER_MEMORY_VER_MAX - 1])
		client->copy = *container_of(real, struct peer_memory_client_ex,
					     client);
	use_functions[n](&client->copy.client);
	nr_clients = max(nr_clients, n + 1);
#ifdef CONFIG_ARM64
	regs->regs[0] = (unsigned long)&client->copy.client;
#else
	regs->di = (unsigned long)&client->copy.client;
#endif
	return 0;
}

/*
 * Does nothing. The kernel replaces only kprobes without a post_handler by a
 * jump.
 */
static void not_optimised(struct kprobe *probe, struct pt_regs *regs,
			  unsigned long flags)
{
}

static struct kprobe register_probe = {
	.symbol_name	= "ib_register_peer_memory_client",
	.pre_handler	= before_register,
	.post_handler	= not_optimised,
};

/* Cost of the measurement itself */

static noinline void nothing(void)
{
	barrier();
}

static void (*empty)(void) = nothing;

/* Calls a function of nvidia.ko that does nothing. */
static noinline void call_provider(void)
{
	nvidia_p2p_free_page_table(NULL);
}

static void (*provider)(void) = call_provider;

#define CALIBRATIONS	256

static void calibrate(void)
{
	struct reading reading;
	int i;

	for (i = 0; i < CALIBRATIONS; i++) {
		begin(&reading);
		READ_ONCE(empty)();
		end(EMPTY, &reading);
		begin(&reading);
		READ_ONCE(provider)();
		end(PROVIDER, &reading);
	}
}

/* calls */

static int calls_show(struct seq_file *m, void *unused)
{
	int i, kind;

	seq_printf(m, "clients %u\n", nr_clients);
	for (i = 0; i < NR_FUNCTIONS; i++) {
		seq_printf(m, "%s %lld %lld", function_names[i],
			   atomic64_read(&costs[i].calls),
			   atomic64_read(&costs[i].cycles));
		for (kind = 0; kind < NR_SPENT; kind++)
			seq_printf(m, " %lld %lld",
				   atomic64_read(&costs[i].provider_calls[kind]),
				   atomic64_read(&costs[i].provider_cycles[kind]));
		seq_putc(m, '\n');
	}
	return 0;
}

static ssize_t calls_write(struct file *file, const char __user *buf,
			   size_t len, loff_t *pos)
{
	int i, kind;

	for (i = 0; i < FIRST_FIXED; i++) {
		atomic64_set(&costs[i].calls, 0);
		atomic64_set(&costs[i].cycles, 0);
		for (kind = 0; kind < NR_SPENT; kind++) {
			atomic64_set(&costs[i].provider_calls[kind], 0);
			atomic64_set(&costs[i].provider_cycles[kind], 0);
		}
	}
	return len;
}

DEFINE_SHOW_STORE_ATTRIBUTE(calls);

static int __init bench_init(void)
{
	int ret;

	calibrate();
	root = debugfs_create_dir("bench", NULL);
	debugfs_create_file("calls", 0600, root, NULL, &calls_fops);
	ret = memory_init(root);
	if (ret)
		goto remove;
	ret = provider_init(root);
	if (ret)
		goto memory;
	ret = large_init(root);
	if (ret)
		goto provider;
	table_init(root);
	ret = register_kprobe(&register_probe);
	if (ret) {
		pr_err("no probe at %s: %d\n", register_probe.symbol_name, ret);
		goto table;
	}
	return 0;

table:
	table_exit();
	large_exit();
provider:
	provider_exit();
memory:
	memory_exit();
remove:
	debugfs_remove(root);
	return ret;
}

static void __exit bench_exit(void)
{
	unregister_kprobe(&register_probe);
	debugfs_remove(root);
	table_exit();
	large_exit();
	provider_exit();
	memory_exit();
}

module_init(bench_init);
module_exit(bench_exit);
MODULE_DESCRIPTION("Measures peer-memory modules");
MODULE_LICENSE("Dual BSD/GPL");
