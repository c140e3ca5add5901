// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Stand-ins for the kernel and nvidia.ko in a user process: the functions that
 * the callbacks of a registration call, and the structures that the callbacks
 * read.
 *
 * kbuild compiles this file with the kernel's headers and flags, so structures
 * and prototypes are the kernel's. The test runner also links some objects of
 * the kernel. A call of a function that is in neither place ends the process:
 * see main.c.
 *
 * Every call succeeds, no call waits, and there is one thread.
 */

#include <linux/cpumask.h>
#include <linux/cred.h>
#include <linux/debugfs.h>
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/kobject.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/preempt.h>
#include <linux/printk.h>
#include <linux/rwsem.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/timekeeping.h>
#include <linux/wait.h>

#include <asm/processor.h>

#include <nv-p2p.h>
#include <rdma/peer_mem.h>

#include "cost.h"

/* Counts a call of a service, under its usual name. */
#define COUNT(_name)							\
	do {								\
		static struct cost_call call __section("cost_calls")	\
			__used __aligned(8) = { _name };		\
		call.count++;						\
	} while (0)

/* Resources that must be released by the end of a registration. */
enum held {
	ALLOCATIONS,
	MUTEXES,
	SPINLOCKS,
	READERS,
	WRITERS,
	RCU_READERS,
	MODULES,
	DEVICES,
	PINS,
	PROVIDER_MAPPINGS,
	RESOURCES,
	NR_HELD,
};

static const char *const held_names[NR_HELD] = {
	[ALLOCATIONS] = "allocations are left",
	[MUTEXES] = "mutexes are left locked",
	[SPINLOCKS] = "spinlocks are left locked",
	[READERS] = "rw_semaphores are left locked for reading",
	[WRITERS] = "rw_semaphores are left locked for writing",
	[RCU_READERS] = "RCU read locks are left",
	[MODULES] = "references to modules are left",
	[DEVICES] = "references to PCI devices are left",
	[PINS] = "pins are left",
	[PROVIDER_MAPPINGS] = "nvidia.ko's mappings are left",
	[RESOURCES] = "mappings of MMIO resources are left",
};

static long held[NR_HELD];

/* Takes a resource that exists only once. */
static void take(enum held what)
{
	if (held[what]++)
		host_fail(held_names[what], held[what]);
}

/* --- memory ----------------------------------------------------------------- */

static void *allocate(size_t size, size_t align, gfp_t flags)
{
	void *memory = host_alloc(size, align);

	held[ALLOCATIONS]++;
	if (flags & __GFP_ZERO)
		memset(memory, 0, size);
	return memory;
}

static void release(const void *memory)
{
	if (ZERO_OR_NULL_PTR(memory))
		return;
	held[ALLOCATIONS]--;
	host_free((void *)memory);
}

static void *resize(const void *old, size_t size, gfp_t flags)
{
	if (flags & __GFP_ZERO)
		host_fail("a larger zeroed allocation, in bytes", size);
	return host_realloc((void *)old, size);
}

/*
 * The kernel crate allocates, resizes and frees with this function. Size 0
 * frees.
 */
void *krealloc_node_align_noprof(const void *old, DECL_TOKEN_PARAMS(size, token),
				 unsigned long align, gfp_t flags, int node)
{
	if (!size) {
		COUNT("kfree");
		release(old);
		return ZERO_SIZE_PTR;
	}
	if (ZERO_OR_NULL_PTR(old)) {
		COUNT("kmalloc");
		return allocate(size, align, flags);
	}
	COUNT("krealloc");
	return resize(old, size, flags);
}

void *kvrealloc_node_align_noprof(const void *old, DECL_TOKEN_PARAMS(size, token),
				  unsigned long align, gfp_t flags, int node)
{
	if (!size) {
		COUNT("kvfree");
		release(old);
		return ZERO_SIZE_PTR;
	}
	if (ZERO_OR_NULL_PTR(old)) {
		COUNT("kvmalloc");
		return allocate(size, align, flags);
	}
	COUNT("kvrealloc");
	return resize(old, size, flags);
}

void *__kvmalloc_node_noprof(DECL_KMALLOC_PARAMS(size, b, token),
			     unsigned long align, gfp_t flags, int node)
{
	COUNT("kvmalloc");
	return allocate(size, align, flags);
}

void *__kmalloc_noprof(DECL_TOKEN_PARAMS(size, token), gfp_t flags)
{
	COUNT("kmalloc");
	return allocate(size, sizeof(u64), flags);
}

/*
 * The caches that a kmalloc() of constant size uses. Only the address matters.
 */
kmem_buckets kmalloc_caches[NR_KMALLOC_TYPES];

void *__kmalloc_cache_noprof(struct kmem_cache *pool, gfp_t flags, size_t size)
{
	COUNT("kmalloc");
	return allocate(size, sizeof(u64), flags);
}

void kfree(const void *memory)
{
	COUNT("kfree");
	release(memory);
}

void kvfree(const void *memory)
{
	COUNT("kvfree");
	release(memory);
}

unsigned long get_free_pages_noprof(gfp_t flags, unsigned int order)
{
	COUNT("get_free_pages");
	return (unsigned long)allocate(PAGE_SIZE << order, PAGE_SIZE, flags);
}

void free_pages(unsigned long memory, unsigned int order)
{
	COUNT("free_pages");
	release((void *)memory);
}

/*
 * --- locks and other functions that would wait ------------------------------
 */

void mutex_init_generic(struct mutex *lock)
{
	COUNT("mutex_init");
}

void mutex_lock(struct mutex *lock)
{
	COUNT("mutex_lock");
	held[MUTEXES]++;
}

void mutex_unlock(struct mutex *lock)
{
	COUNT("mutex_unlock");
	held[MUTEXES]--;
}

void _raw_spin_lock(raw_spinlock_t *lock)
{
	COUNT("spin_lock");
	take(SPINLOCKS);
}

void _raw_spin_unlock(raw_spinlock_t *lock)
{
	COUNT("spin_unlock");
	held[SPINLOCKS]--;
}

void down_read(struct rw_semaphore *lock)
{
	COUNT("down_read");
	held[READERS]++;
}

void up_read(struct rw_semaphore *lock)
{
	COUNT("up_read");
	held[READERS]--;
}

void down_write(struct rw_semaphore *lock)
{
	COUNT("down_write");
	take(WRITERS);
}

void up_write(struct rw_semaphore *lock)
{
	COUNT("up_write");
	held[WRITERS]--;
}

void __init_waitqueue_head(struct wait_queue_head *queue, const char *name,
			   struct lock_class_key *key)
{
	COUNT("init_waitqueue_head");
}

int __wake_up(struct wait_queue_head *queue, unsigned int mode, int count,
	      void *key)
{
	COUNT("wake_up");
	return 0;
}

bool try_module_get(struct module *module)
{
	COUNT("try_module_get");
	held[MODULES]++;
	return true;
}

void __module_get(struct module *module)
{
	COUNT("module_get");
	held[MODULES]++;
}

void module_put(struct module *module)
{
	COUNT("module_put");
	held[MODULES]--;
}

void __rcu_read_lock(void)
{
	COUNT("rcu_read_lock");
	held[RCU_READERS]++;
}

void __rcu_read_unlock(void)
{
	COUNT("rcu_read_unlock");
	held[RCU_READERS]--;
}

ktime_t ktime_get(void)
{
	COUNT("ktime_get");
	return ms_to_ktime(1000);
}

/*
 * --- the process, the processor, memory with a struct page ------------------
 */

static struct cred cred;
static struct task_struct task = {
	.comm = "cost",
	.pid = 4711,
	.tgid = 4711,
	.group_leader = &task,
	.cred = &cred,
	.real_cred = &cred,
};

/* In a process, %gs is 0, so a per-CPU variable is at its symbol's address. */
DEFINE_PER_CPU_CACHE_HOT(struct task_struct *, current_task) = &task;
asm(".globl const_current_task; .set const_current_task, current_task");
DEFINE_PER_CPU_CACHE_HOT(unsigned long, __preempt_count) = PREEMPT_ENABLED;

struct cpuinfo_x86 boot_cpu_data;

/* The GPU's BAR is in no section of memory. Addresses have 46 bits. */
static struct mem_section *roots[BIT(46 - SECTION_SIZE_BITS) / SECTIONS_PER_ROOT];
struct mem_section **mem_section = roots;

/* --- PCI: the HCA, and the GPU with its BAR ---------------------------------- */

#define BAR_START	0x380000000000UL
#define BAR_LEN		SZ_256G

const struct bus_type pci_bus_type;

static struct pci_sysdata sysdata;
static struct pci_bus bus = { .sysdata = &sysdata };
/* The limit of mlx5. */
static struct device_dma_parameters parameters = { .max_segment_size = SZ_2G };
static struct pci_dev hca = {
	.bus = &bus,
	.devfn = PCI_DEVFN(1, 0),
	.dev = {
		.bus = &pci_bus_type,
		.dma_parms = &parameters,
		.kobj = { .state_in_sysfs = 1 },
	},
};
static struct resource window;
static struct pci_dev gpu = {
	.bus = &bus,
	.devfn = PCI_DEVFN(2, 0),
	.dev = {
		.bus = &pci_bus_type,
		.kobj = { .state_in_sysfs = 1 },
	},
	.resource = {
		[1] = {
			.start = BAR_START,
			.end = BAR_START + BAR_LEN - 1,
			.flags = IORESOURCE_MEM | IORESOURCE_PREFETCH | IORESOURCE_MEM_64,
			.parent = &window,
		},
	},
};

struct pci_dev *pci_dev_get(struct pci_dev *dev)
{
	COUNT("pci_dev_get");
	if (dev)
		held[DEVICES]++;
	return dev;
}

void pci_dev_put(struct pci_dev *dev)
{
	COUNT("pci_dev_put");
	if (dev)
		held[DEVICES]--;
}

/*
 * Returns the HCA first, then the GPU. Puts the reference to @from, as the
 * kernel does.
 */
struct pci_dev *pci_get_device(unsigned int vendor, unsigned int device,
			       struct pci_dev *from)
{
	COUNT("pci_get_device");
	if (from)
		held[DEVICES]--;
	if (from == &gpu)
		return NULL;
	held[DEVICES]++;
	return from ? &gpu : &hca;
}

/* Returns NULL, because no IOMMU translates DMA addresses. */
struct iommu_domain *iommu_get_domain_for_dev(struct device *dev)
{
	COUNT("iommu_get_domain_for_dev");
	return NULL;
}

dma_addr_t dma_map_phys(struct device *dev, phys_addr_t addr, size_t len,
			enum dma_data_direction direction, unsigned long attrs)
{
	COUNT("dma_map_phys");
	held[RESOURCES]++;
	return addr;
}

void dma_unmap_phys(struct device *dev, dma_addr_t addr, size_t len,
		    enum dma_data_direction direction, unsigned long attrs)
{
	COUNT("dma_unmap_phys");
	held[RESOURCES]--;
}

/* --- nvidia.ko --------------------------------------------------------------- */

static const struct cost_shape *shape;
/*
 * The pin of the registration, a second pin, and a mapping. The second pin is
 * the pin of one page with which the module asks if the HCA reaches the GPU.
 */
static struct pin {
	struct nvidia_p2p_page_table table;
	struct nvidia_p2p_page *pages;
	void (*free_callback)(void *data);
	void *data;
} pins[2];
static struct nvidia_p2p_dma_mapping mapping;

static int pin(u64 len, struct nvidia_p2p_page_table **found,
	       void (*free_callback)(void *data), void *data)
{
	u32 count = len / SZ_64K;
	struct pin *new = &pins[held[PINS]];
	u32 i;

	if (held[PINS]++ >= ARRAY_SIZE(pins))
		host_fail(held_names[PINS], held[PINS]);
	if (len != (new == pins ? shape->len : SZ_64K))
		host_fail("not the registered length", len);
	new->pages = host_alloc(array_size(count, sizeof(*new->pages)), sizeof(u64));
	new->table = (struct nvidia_p2p_page_table) {
		.version = NVIDIA_P2P_PAGE_TABLE_VERSION,
		.page_size = NVIDIA_P2P_PAGE_SIZE_64KB,
		.pages = host_alloc(array_size(count, sizeof(*new->table.pages)), sizeof(u64)),
		.entries = count,
	};
	for (i = 0; i < count; i++) {
		new->pages[i].physical_address = BAR_START + i * shape->stride;
		new->table.pages[i] = &new->pages[i];
	}
	new->free_callback = free_callback;
	new->data = data;
	*found = &new->table;
	return 0;
}

static int unpin(struct nvidia_p2p_page_table *put)
{
	struct pin *last = &pins[--held[PINS]];

	if (held[PINS] < 0 || put != &last->table)
		host_fail("nvidia.ko does not know this page table", (long)put);
	host_free(last->table.pages);
	host_free(last->pages);
	return 0;
}

int nvidia_p2p_get_pages(uint64_t token, uint32_t space, uint64_t addr,
			 uint64_t len, struct nvidia_p2p_page_table **found,
			 void (*free_callback)(void *data), void *data)
{
	COUNT("nvidia_p2p_get_pages");
	return pin(len, found, free_callback, data);
}

int nvidia_p2p_put_pages(uint64_t token, uint32_t space, uint64_t addr,
			 struct nvidia_p2p_page_table *put)
{
	COUNT("nvidia_p2p_put_pages");
	return unpin(put);
}

int nvidia_p2p_get_pages_persistent(uint64_t addr, uint64_t len,
				    struct nvidia_p2p_page_table **found,
				    uint32_t flags)
{
	COUNT("nvidia_p2p_get_pages_persistent");
	return pin(len, found, NULL, NULL);
}

int nvidia_p2p_put_pages_persistent(uint64_t addr,
				    struct nvidia_p2p_page_table *put,
				    uint32_t flags)
{
	COUNT("nvidia_p2p_put_pages_persistent");
	return unpin(put);
}

int nvidia_p2p_dma_map_pages(struct pci_dev *peer,
			     struct nvidia_p2p_page_table *of,
			     struct nvidia_p2p_dma_mapping **found)
{
	u32 i;

	COUNT("nvidia_p2p_dma_map_pages");
	take(PROVIDER_MAPPINGS);
	mapping = (struct nvidia_p2p_dma_mapping) {
		.version = NVIDIA_P2P_DMA_MAPPING_VERSION,
		.page_size_type = of->page_size,
		.entries = of->entries,
		.dma_addresses = host_alloc(array_size(of->entries, sizeof(u64)),
					    sizeof(u64)),
		.pci_dev = peer,
	};
	for (i = 0; i < of->entries; i++)
		mapping.dma_addresses[i] = of->pages[i]->physical_address;
	*found = &mapping;
	return 0;
}

static void unmap(struct nvidia_p2p_dma_mapping *undone)
{
	if (undone != &mapping)
		host_fail("nvidia.ko does not know this mapping", (long)undone);
	held[PROVIDER_MAPPINGS]--;
	host_free(mapping.dma_addresses);
}

int nvidia_p2p_dma_unmap_pages(struct pci_dev *peer,
			       struct nvidia_p2p_page_table *of,
			       struct nvidia_p2p_dma_mapping *undone)
{
	COUNT("nvidia_p2p_dma_unmap_pages");
	unmap(undone);
	return 0;
}

/* This function and the next one do nothing, as in nv-p2p.c: see revoke(). */
int nvidia_p2p_free_dma_mapping(struct nvidia_p2p_dma_mapping *undone)
{
	COUNT("nvidia_p2p_free_dma_mapping");
	return 0;
}

int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *put)
{
	COUNT("nvidia_p2p_free_page_table");
	return 0;
}

/*
 * --- functions for loading the module, not counted --------------------------
 */

#define TICKET	7

static const struct peer_memory_client *client;
static bool wants_persistent, is_revoking;

/*
 * Acts as ib_core in a revocation. The module calls this function once, for the
 * revoked region.
 */
static int invalidate(void *handle, u64 ticket)
{
	COUNT("ib_invalidate_peer_memory");
	if (!is_revoking || handle != client || ticket != TICKET)
		host_fail("the module revokes the wrong ticket", ticket);
	is_revoking = false;
	return 0;
}

/* Registers a client. A client with the callback is revocable. */
void *ib_register_peer_memory_client(const struct peer_memory_client *peer,
				     invalidate_peer_memory *callback)
{
	if (wants_persistent == !callback)
		client = peer;
	if (callback)
		*callback = invalidate;
	return (void *)peer;
}

/* Ends the process, because only a module that fails to load calls this. */
void ib_unregister_peer_memory_client(void *handle)
{
	host_fail("the module unregisters a client", (long)handle);
}

/*
 * Does nothing. A counted registration must not log, because the instructions
 * of the call would be counted.
 */
int _printk(const char *fmt, ...)
{
	return 0;
}

struct kobject *kset_find_obj(struct kset *kset, const char *name)
{
	return NULL;
}

struct dentry *debugfs_create_dir(const char *name, struct dentry *parent)
{
	return ERR_PTR(-ENODEV);
}

struct dentry *debugfs_create_file_full(const char *name, umode_t mode,
					struct dentry *parent, void *data,
					const void *aux,
					const struct file_operations *ops)
{
	return ERR_PTR(-ENODEV);
}

/* The module's parameters, in the kernel's section. */
extern const struct kernel_param __start___param[], __stop___param[];

static const struct kernel_param *parameter(const char *name)
{
	const struct kernel_param *found;

	for (found = __start___param; found < __stop___param; found++)
		if (!strcmp(found->name, name))
			return found;
	host_fail(name, 0);
}

int init_module(void);

/*
 * True if an entry covers several pages. NVIDIA's nvidia-peermem makes an entry
 * for each page.
 */
static bool joins_pages;

/*
 * Loads a module. NVIDIA's nvidia-peermem registers both clients. Our module
 * registers only the persistent client, or both clients.
 */
void cost_load(int is_ours, int persistent)
{
	int ret;

	wants_persistent = persistent;
	joins_pages = is_ours;
	if (is_ours) {
		*(int *)parameter("persistent_api_support")->arg = persistent;
		/* memory_peers accesses sysfs, which no registration does. */
		*(bool *)parameter("memory_peers")->arg = false;
	}
	ret = init_module();
	if (ret)
		host_fail("the module does not load", ret);
	if (!client)
		host_fail("the module has no client", 0);
}

/*
 * --- one registration, as ib_core makes it ----------------------------------
 */

#define ADDR	0x7f0000000000UL

static void *context;
static struct sg_table sgt;
static long before[NR_HELD];

void cost_begin(const struct cost_shape *next)
{
	shape = next;
	memcpy(before, held, sizeof(before));
	memset(&sgt, 0, sizeof(sgt));
}

long cost_entries(void)
{
	return sgt.nents;
}

long cost_allocations(void)
{
	return held[ALLOCATIONS] - before[ALLOCATIONS];
}

/* Checks that all resources were released. */
void cost_end(void)
{
	int i;

	for (i = 0; i < NR_HELD; i++)
		if (held[i] != before[i])
			host_fail(held_names[i], held[i] - before[i]);
	if (raw_cpu_read(__preempt_count) != PREEMPT_ENABLED)
		host_fail("preemption is still disabled", raw_cpu_read(__preempt_count));
}

static void acquire(void)
{
	if (client->acquire(ADDR, shape->len, NULL, NULL, &context) != 1)
		host_fail(__func__, 0);
}

static void get_pages(void)
{
	int ret = client->get_pages(ADDR, shape->len, 1, 0, &sgt, context, TICKET);

	if (ret)
		host_fail(__func__, ret);
}

static void dma_map(void)
{
	int wanted = joins_pages ? shape->entries : shape->len / SZ_64K;
	struct scatterlist *sg;
	int entries, i;
	int ret = client->dma_map(&sgt, context, &hca.dev, 0, &entries);

	if (ret)
		host_fail(__func__, ret);
	if (entries != wanted || sgt.nents != entries)
		host_fail("wrong number of entries", entries);
	for_each_sgtable_dma_sg(&sgt, sg, i)
		if (sg_dma_address(sg) != BAR_START + i * shape->stride ||
		    sg_dma_len(sg) != shape->len / entries)
			host_fail("wrong entry, number", i);
}

static void get_page_size(void)
{
	unsigned long size = client->get_page_size(context);

	if (size != SZ_64K)
		host_fail("wrong page size", size);
}

static void dma_unmap(void)
{
	client->dma_unmap(&sgt, context, &hca.dev);
}

static void put_pages(void)
{
	client->put_pages(&sgt, context);
}

static void release_callback(void)
{
	client->release(context);
}

/*
 * Frees the memory: nvidia.ko calls the callback of the pin, and frees the page
 * table and its mapping. If the client unmaps the memory itself
 * (PEER_MEM_INVALIDATE_UNMAPS), release() is the only callback that ib_core
 * calls afterwards.
 */
static void revoke(void)
{
	is_revoking = true;
	pins[0].free_callback(pins[0].data);
	if (is_revoking)
		host_fail("the module does not call ib_core for the revocation", 0);
	if (held[PROVIDER_MAPPINGS])
		unmap(&mapping);
	unpin(&pins[0].table);
}

const struct cost_callback cost_deregistered[] = {
	{ "acquire", acquire },
	{ "get_pages", get_pages },
	{ "dma_map", dma_map },
	{ "get_page_size", get_page_size },
	{ "dma_unmap", dma_unmap },
	{ "put_pages", put_pages },
	{ "release", release_callback },
	{}
};

const struct cost_callback cost_revoked[] = {
	{ "acquire", acquire },
	{ "get_pages", get_pages },
	{ "dma_map", dma_map },
	{ "get_page_size", get_page_size },
	{ "revoke", revoke },
	{ "release", release_callback },
	{}
};
