/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Declarations that the files of the stand-in GPU share.
 *
 * Lock order, outermost first ("; LOCK" after a member: LOCK protects it):
 *
 *	mmap_lock of a process	held by the kernel around mmap, munmap, faults
 *	dma_resv		held by importers while they map a dma-buf
 *	export->lock		the mappings of one dma-buf
 *	API lock		api_lock() in lock.c
 *	gpu_locks		in nvidia/rm.c, around callbacks and BAR1
 *	pin->lock		the DMA mappings of one page table
 *	place_sem		excludes faults while memory is freed or moved
 *	mem_lock		allocations, the BAR and its counters
 *	gpus_lock		the list of GPUs
 *
 * Free callbacks run with the API lock held, so every lock that a client takes
 * in its callback is inside the API lock. User memory is never accessed with
 * any of these locks held, because munmap and exit take the API lock under
 * mmap_lock.
 */
#ifndef _STANDIN_NVIDIA_H_
#define _STANDIN_NVIDIA_H_

#include <linux/cdev.h>
#include <linux/cleanup.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/rbtree.h>
#include <linux/rwsem.h>
#include <linux/test_compat.h>
#include <linux/types.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include <nv-p2p.h>

#include "spent.h"
#include "standin.h"

#ifndef STANDIN_VERSION
#define STANDIN_VERSION		"595.45.04"
#endif
#define STANDIN_MAX_GPUS	8

/*
 * Attributes of DMA mappings. A page may be mapped any number of times.
 * CONFIG_DMA_API_DEBUG reports more than eight mappings of a page as a leak,
 * unless DMA_ATTR_DEBUGGING_IGNORE_CACHELINES is set. Kernels without that
 * attribute report even the second mapping of a page, except mappings with
 * DMA_ATTR_SKIP_CPU_SYNC. A BAR needs no sync, because it is not cached.
 */
#ifdef DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#define BAR_ATTRS	DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#define RAM_ATTRS	DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#else
#define BAR_ATTRS	DMA_ATTR_SKIP_CPU_SYNC
#define RAM_ATTRS	0
#endif

struct bar1;
struct dentry;
struct proc_dir_entry;
struct seq_file;
struct sg_table;

/**
 * struct gpu - one PCI function and its BAR (pci.c)
 * @dev: /dev/nvidia<N>. The device's reference count is that of this structure.
 * @cdev: the character device with its file operations
 * @pdev: the PCI function, valid until remove() returns
 * @pci: PCI address as text
 * @minor: N
 * @uuid: derived from the PCI address, and the same after every boot
 * @bar_start: bus address of the BAR
 * @bar_end: bus address of the BAR's last byte
 * @node: in the list of GPUs
 * @proc: /proc/driver/nvidia/gpus/<address>
 * @removing: no new pins or allocations. Written under mem_lock and API lock.
 * @is_wc: all mappings of the BAR are write-combined
 * @has_p2pdma: the BAR has struct pages; gpus_lock
 * @used: bitmap of the used 64 KiB pages of the BAR; mem_lock
 * @pages: number of 64 KiB pages of the BAR
 * @bar1: contents of the BAR, if memory can move (nvidia/bar1.c)
 * @pinned: number of 64 KiB pages with at least one pin; mem_lock
 * @refs: number of persistent pins and dma-bufs; mem_lock
 * @opens: number of open files, plus @refs. At 0 the GPU stops; mem_lock
 * @stopped: true from the stop until the GPU is opened again; mem_lock
 * @idle: woken when @refs falls to 0
 */
struct gpu {
	struct device dev;
	struct cdev cdev;
	struct pci_dev *pdev;
	char pci[16];
	unsigned int minor;
	u8 uuid[NVIDIA_P2P_GPU_UUID_LEN];
	phys_addr_t bar_start;
	phys_addr_t bar_end;
	struct list_head node;
	struct proc_dir_entry *proc;

	bool removing;
	bool is_wc;
	bool has_p2pdma;
	unsigned long *used;
	unsigned long pages;
	struct bar1 *bar1;
	u64 pinned;
	unsigned int refs;
	unsigned int opens;
	bool stopped;
	wait_queue_head_t idle;
};

/*
 * Returns true if a range of the BAR can be mapped for a device. The real
 * driver calculates the end of the BAR one byte too low, so it cannot map the
 * last page of a BAR.
 */
static inline bool gpu_can_map(const struct gpu *gpu, phys_addr_t phys,
			       u64 length)
{
	return phys >= gpu->bar_start && phys + length <= gpu->bar_end;
}

/**
 * struct vidmem - physical memory, a set of pages of the BAR (bar.c)
 * @kref: held by the allocation, and by each pin and dma-buf
 * @gpu: the GPU, referenced
 * @pages: number of 64 KiB pages
 * @page: number of each page in the BAR, or in coherent_memory
 * @coherent: the pages are in coherent_memory. Pins need no BAR space.
 * @pins: number of pins of each page, NULL before the first pin; mem_lock
 *
 * The other fields are for memory that can move (nvidia/).
 *
 * @in_place: the memory has a layout, and stays in place
 * @content: bitmap of the pages that may contain data
 * @mapping: the CPU's mappings of the memory, or NULL; place_sem
 * @offset: offset of the memory in @mapping
 * @extents: the parts of the memory that are in BAR1; API lock
 * @kept: persistent pins, sorted by page table; API lock
 */
struct vidmem {
	struct kref kref;
	struct gpu *gpu;
	u32 pages;
	u32 *page;
	bool coherent;
	u32 *pins;
	bool in_place;
	unsigned long *content;
	struct address_space *mapping;
	loff_t offset;
	struct list_head extents;
	struct rb_root kept;
};

/**
 * struct alloc - memory at an address of a process (memory.c)
 * @kref: held by the registration, each piece of the VMA, and users
 * @node: in the list of allocations while registered; mem_lock
 * @gpu: the GPU. @file keeps it alive.
 * @vidmem: the memory, valid while registered
 * @tgid: the owner
 * @va: start address
 * @length: a multiple of the granule
 * @file: the opened device. Its address space holds the VMA's pieces.
 * @offset: offset in the address space of @file
 * @vmas: number of pieces of the VMA
 * @gone: the memory must not be mapped any more; place_sem
 * @registered: written under mem_lock and API lock
 * @pins: revocable pins, oldest first; API lock
 * @tables: revocable pins, sorted by page table (nvidia/); API lock
 * @work: frees the memory in a kernel thread
 */
struct alloc {
	struct kref kref;
	struct list_head node;
	struct gpu *gpu;
	struct vidmem *vidmem;
	pid_t tgid;
	u64 va;
	u64 length;
	struct file *file;
	loff_t offset;
	atomic_t vmas;
	bool gone;
	bool registered;
	struct list_head pins;
	struct rb_root tables;
	struct work_struct work;
};

/* Distinguishes a live page table from a freed one. */
#define PIN_MAGIC	0x70696e6e65642121ULL

/**
 * struct pin - a pin with its page table (p2p.c)
 * @magic: PIN_MAGIC while the pin is alive
 * @size: size of the allocation that begins with this structure
 * @node: in the list of revocable or of persistent pins; API lock
 * @of_alloc: in alloc->pins; API lock
 * @alloc: NULL for a persistent pin, and once the memory has been freed
 * @vidmem: referenced, NULL once detached
 * @first: first page in @vidmem
 * @pages: number of pages
 * @tgid: the process that pinned
 * @persistent: true for a persistent pin, false for a revocable pin
 * @foreign_put: another process has tried to put the pin
 * @lost: the pin is persistent, and its put has failed; API lock
 * @free_callback: NULL until registered
 * @data: argument of the callback
 * @lock: protects @mappings
 * @mappings: DMA mappings of the table
 * @table: the client's page table, last because older versions are shorter
 */
struct pin {
	u64 magic;
	size_t size;
	struct list_head node;
	struct list_head of_alloc;
	struct alloc *alloc;
	struct vidmem *vidmem;
	u32 first;
	u32 pages;
	pid_t tgid;
	bool persistent;
	bool foreign_put;
	bool lost;
	void (*free_callback)(void *data);
	void *data;
	struct mutex lock;
	struct list_head mappings;
	struct nvidia_p2p_page_table table;
};

/* lock.c */
int __must_check api_lock(void);
void api_unlock(void);
/* Sleep for the cost of a pin or an unpin, with the lock held. */
void api_pay_pin(void);
void api_pay_unpin(void);

/* pci.c */
struct gpu *gpu_get_by_uuid(const u8 *uuid);
void gpu_open(struct gpu *gpu);
void gpu_close(struct gpu *gpu);
void gpu_use(struct gpu *gpu);
void gpu_unuse(struct gpu *gpu);

static inline struct gpu *gpu_get(struct gpu *gpu)
{
	get_device(&gpu->dev);
	return gpu;
}

static inline void gpu_put(struct gpu *gpu)
{
	put_device(&gpu->dev);
}

/* memory.c */
extern struct rw_semaphore place_sem;
extern struct mutex mem_lock;
extern const struct file_operations memory_fops;

struct alloc *memory_find(pid_t tgid, u64 va);
struct alloc *memory_find_listed(pid_t tgid, u64 va);
bool memory_lists(const struct alloc *alloc, pid_t tgid);
void memory_free_all(struct gpu *gpu);
int memory_init(void);
void memory_exit(void);

/**
 * struct coherent_memory - memory of the GPUs besides their BARs (coherent.c)
 * @start: start address
 * @pages: number of 64 KiB pages. 0: there is no such memory.
 * @used: bitmap of the used pages; mem_lock
 */
struct coherent_memory {
	phys_addr_t start;
	unsigned long pages;
	unsigned long *used;
};

extern struct coherent_memory coherent_memory;

/* Returns true if @phys is coherent memory, for code without a vidmem. */
static inline bool coherent_has(phys_addr_t phys)
{
	return phys - coherent_memory.start <
	       (u64)coherent_memory.pages * STANDIN_PAGE_SIZE;
}

bool coherent_is_wanted(void);
int coherent_map(struct device *peer, struct sg_table *sgt, u64 *addresses,
		 u32 pages);
void coherent_unmap(struct device *peer, struct sg_table *sgt);
int __init coherent_init(void);
void coherent_exit(void);

/* bar.c */
void bar_init(void);
int bar_add_gpu(struct gpu *gpu);
void bar_release_gpu(struct gpu *gpu);
struct vidmem *vidmem_alloc(struct gpu *gpu, u64 length);
struct vidmem *vidmem_get(struct vidmem *mem);
void vidmem_put(struct vidmem *mem);
bool bar_has_room(const struct gpu *gpu, u64 pages);
int vidmem_pin(struct vidmem *mem, u32 first, u32 pages);
void vidmem_unpin(struct vidmem *mem, u32 first, u32 pages);
phys_addr_t vidmem_phys(const struct vidmem *mem, u32 page);
phys_addr_t vidmem_phys_told(const struct vidmem *mem, u32 first, u32 page,
			     bool persistent);

/* dmabuf.c */
long dmabuf_ioctl(struct gpu *gpu, void __user *argp);
bool dmabuf_is_supported(void);

/* nvidia/bar1.c, where memory can move */
#ifdef STANDIN_BAR1
int bar1_add_gpu(struct gpu *gpu);
void bar1_release_gpu(struct gpu *gpu);
int bar1_add_memory(struct vidmem *mem);
void bar1_release_memory(struct vidmem *mem);

/*
 * Returns the first page of the BAR's second half. New memory is allocated
 * there, because pins move memory to the first free pages of the BAR.
 */
static inline unsigned long bar1_home(const struct gpu *gpu)
{
	return gpu->pages / 2;
}

static inline void bar1_touch(struct vidmem *mem, u32 page)
{
	if (!mem->coherent)
		set_bit(page, mem->content);
}
#else
static inline int bar1_add_gpu(struct gpu *gpu) { return 0; }
static inline void bar1_release_gpu(struct gpu *gpu) { }
static inline int bar1_add_memory(struct vidmem *mem) { return 0; }
static inline void bar1_release_memory(struct vidmem *mem) { }
static inline unsigned long bar1_home(const struct gpu *gpu) { return 0; }
static inline void bar1_touch(struct vidmem *mem, u32 page) { }
#endif

/* p2p.c, or nvidia/rm.c */
void p2p_revoke(struct alloc *alloc);
void p2p_free_lost(struct gpu *gpu);
void p2p_hold_points(struct dentry *dir);
int p2p_init(void);
void p2p_exit(void);

/* dma.c */
void dma_unmap_all(struct pin *pin);
void dma_hold_points(struct dentry *dir);

/* proc.c */
int proc_init(void);
void proc_exit(void);
void proc_add_gpu(struct gpu *gpu);

/* debug.c */

/*
 * Counters of states come first, then counters of events. Writing to the
 * debugfs file resets only the counters of events.
 */
enum counter {
	PINS_LIVE,
	PINS_PERSISTENT_LIVE,
	MAPPINGS_LIVE,
	DEVICE_REFS,
	BAR_BYTES_PINNED,
	ALLOCS_LIVE,
	DMABUFS_LIVE,
	DMABUF_MAPS_LIVE,
	GET_PAGES,
	GET_PAGES_OK,
	GET_PAGES_PERSISTENT,
	GET_PAGES_PERSISTENT_OK,
	PUT_PAGES,
	PUT_PAGES_FOUND,
	PUT_PAGES_FOREIGN,
	PUT_PAGES_PERSISTENT,
	DMA_MAP,
	DMA_MAP_OK,
	DMA_UNMAP,
	CALLBACKS,
	CALLBACKS_AFTER_PUT,
	MISUSE,
	RECORD_BYTES,
	DMABUF_EXPORT,
	NR_COUNTERS,
};

#define FIRST_EVENT_COUNTER	GET_PAGES

/* Places at which a call can fail on request. */
enum fail_site {
	FAIL_GET_PAGES,
	FAIL_GET_PAGES_REGISTER,
	FAIL_GET_PAGES_PERSISTENT,
	FAIL_DUP_OBJECT,
	FAIL_PUT_PAGES,
	FAIL_PUT_PAGES_PERSISTENT,
	FAIL_DMA_MAP,
	FAIL_DMA_MAP_PAGE,
	FAIL_DMA_UNMAP,
	FAIL_FREE_PAGE_TABLE,
	FAIL_FREE_DMA_MAPPING,
	FAIL_DMABUF_EXPORT,
	FAIL_DMABUF_MAP,
	NR_FAIL_SITES,
};

void count_add(enum counter counter, s64 n);

static inline void count(enum counter counter)
{
	count_add(counter, 1);
}

static inline void uncount(enum counter counter)
{
	count_add(counter, -1);
}

/* Measurement of one client's call; see spent.h. */
struct spent {
	enum spent_on on;
	u64 begin;
};

struct spent spent_begin(enum spent_on on);
void spent_end(struct spent spent);

/* CLASS(spent, unused)(on) measures from here to the end of the function. */
DEFINE_CLASS(spent, struct spent, spent_end(_T), spent_begin(on), enum spent_on on)

int fail_here(enum fail_site site);
int debug_init(void);
void debug_exit(void);

#endif /* _STANDIN_NVIDIA_H_ */
