// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The lower half of nvidia.ko: functions that NVIDIA's nv-p2p.c, the upper
 * half, calls. They belong to the resource manager, its DMA layer and the
 * operating system. The lower half manages the owner of memory, the places in
 * BAR1, and the callbacks. The upper half determines the rest of the interface.
 * The prototypes in nv.h are NVIDIA's.
 */
#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/poison.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/test_hold.h>
#include <linux/xarray.h>

#include "os-interface.h"
#include "nv-linux.h"
#include "nv-ibmnpu.h"
#include "nv-rsync.h"
#include "rmp2pdefines.h"

#include "../nvidia.h"
#include "bar1.h"
#include "../upper.h"

static_assert(NVRM_P2P_PAGESIZE_BIG_64K == STANDIN_PAGE_SIZE);

TEST_HOLD(get_after_register);
TEST_HOLD(put_before_lock);
TEST_HOLD(callback_exit);
TEST_HOLD(dma_map_before_insert);

static bool table_reuse;
module_param(table_reuse, bool, 0644);
MODULE_PARM_DESC(table_reuse, "the next page table gets the address of the page table that was freed last");

static bool dma_permute;
module_param(dma_permute, bool, 0644);
MODULE_PARM_DESC(dma_permute, "DMA mappings have the pages of the table in reverse order");

/*
 * Stands for the locks of all GPUs. The resource manager takes these locks to
 * free memory, so a callback that waits blocks every GPU. This lock is taken
 * with the API lock held.
 */
static DEFINE_MUTEX(gpu_locks);

/**
 * struct mapping_info - memory that a pin has in BAR1
 * @node: in infos; API lock
 * @by_key: in alloc->tables or vidmem->kept; API lock
 * @key: address of the page table, whose contents are not read
 * @alloc: allocation whose end runs the callback, NULL for a persistent pin
 * @mem: the memory; @alloc or this structure holds a reference
 * @gpu: GPU of the memory
 * @first: first page in @mem
 * @pages: number of pages
 * @callback: NULL until registered
 * @data: argument of the callback
 * @foreign_put: another process has tried to put the pin
 * @lost: the pin is persistent, and its put has failed
 */
struct mapping_info {
	struct list_head node;
	struct rb_node by_key;
	const void *key;
	struct alloc *alloc;
	struct vidmem *mem;
	struct gpu *gpu;
	u32 first;
	u32 pages;
	void (*callback)(void *data);
	void *data;
	bool foreign_put;
	bool lost;
};

static LIST_HEAD(infos);

/*
 * Functions of the operating system for the upper half
 */

void *nvidia_p2p_page_t_cache;

/* Page tables that are not freed yet. */
static DEFINE_XARRAY(tables);

/* Lists of mapped DMA addresses, and their lengths. */
static DEFINE_XARRAY(mappings);

static void *spare_table;
static DEFINE_SPINLOCK(spare_lock);

static void *swap_spare(void *memory)
{
	guard(spinlock)(&spare_lock);
	swap(spare_table, memory);
	return memory;
}

/*
 * Fails if a size is absurdly large. The real function would exhaust the
 * machine's memory.
 */
NV_STATUS NV_API_CALL os_alloc_mem(void **address, u64 size)
{
	*address = NULL;
	if (size == upper_memory_size())
		*address = swap_spare(NULL);
	if (!*address && size / PAGE_SIZE <= max(si_mem_available(), 0L) / 2)
		*address = kvmalloc(size, GFP_KERNEL | __GFP_NOWARN);
	return *address ? NV_OK : NV_ERR_NO_MEMORY;
}

void NV_API_CALL os_free_mem(void *address)
{
	void *entry;

	/* Poison the memory, to reveal a later use. */
	entry = xa_erase(&mappings, (unsigned long)address);
	if (entry) {
		uncount(MAPPINGS_LIVE);
		memset(address, POISON_FREE, xa_to_value(entry) * sizeof(u64));
	}
	entry = xa_erase(&tables, (unsigned long)address);
	if (entry) {
		memset(address, POISON_FREE, upper_memory_size());
		if (READ_ONCE(table_reuse))
			address = swap_spare(address);
	}
	kvfree(address);
}

void *NV_API_CALL os_mem_copy(void *to, const void *from, u32 size)
{
	return memcpy(to, from, size);
}

int NV_API_CALL nv_printf(u32 level, const char *format, ...)
{
	va_list args;
	int ret;

	va_start(args, format);
	ret = vprintk(format, args);
	va_end(args);
	return ret;
}

void upper_page_free(struct kmem_cache *cache, void *page)
{
	memset(page, POISON_FREE, sizeof(struct nvidia_p2p_page));
	kmem_cache_free(cache, page);
}

bool rm_has_table(const struct nvidia_p2p_page_table *table)
{
	return xa_load(&tables, (unsigned long)upper_memory(table));
}

int nvidia_dev_get_uuid(const u8 *uuid, nvidia_stack_t *sp)
{
	struct gpu *gpu = gpu_get_by_uuid(uuid);
	int ret = 0;

	if (!gpu)
		return -ENODEV;
	/*
	 * If an unbind has begun, the check below sees it. An unbind that
	 * begins later waits for this use.
	 */
	gpu_use(gpu);
	if (READ_ONCE(gpu->removing)) {
		gpu_unuse(gpu);
		ret = -ENODEV;
	}
	gpu_put(gpu);
	return ret;
}

void nvidia_dev_put_uuid(const u8 *uuid, nvidia_stack_t *sp)
{
	struct gpu *gpu = gpu_get_by_uuid(uuid);

	if (!gpu)
		return;
	gpu_unuse(gpu);
	gpu_put(gpu);
}

/* Always fails, because there are no NPUs of POWER. */
int nv_register_rsync_driver(int (*get)(int *mode, void *data),
			     void (*put)(int mode, void *data),
			     void (*wait)(struct pci_dev *gpu, void *data),
			     void *data)
{
	return -ENODEV;
}

void nv_unregister_rsync_driver(int (*get)(int *mode, void *data),
				void (*put)(int mode, void *data),
				void (*wait)(struct pci_dev *gpu, void *data),
				void *data)
{
}

NV_STATUS NV_API_CALL nv_get_ibmnpu_genreg_info(nv_state_t *nv, u64 *addr,
						u64 *size, void **device)
{
	return NV_ERR_NOT_SUPPORTED;
}

int nv_get_ibmnpu_chip_id(nv_state_t *nv)
{
	return -1;
}

/*
 * Functions of the resource manager
 */

/* Returns the status that the upper half converts to this error. */
static NV_STATUS status_of(int error)
{
	switch (error) {
	case 0:
		return NV_OK;
	case -ENOMEM:
		return NV_ERR_NO_MEMORY;
	case -EINVAL:
		return NV_ERR_INVALID_ARGUMENT;
	case -ENOTSUPP:
		return NV_ERR_NOT_SUPPORTED;
	case -EBUSY:
		return NV_ERR_STATE_IN_USE;
	case -ENODEV:
		return NV_ERR_GPU_UUID_NOT_FOUND;
	default:
		return NV_ERR_GENERIC;
	}
}

static NV_STATUS __must_check rm_lock(void)
{
	return api_lock() ? NV_ERR_INVALID_LOCK_STATE : NV_OK;
}

/*
 * Returns the newest entry with a key. If get_pages fails, it puts its pin. If
 * this put fails too, the old entry stays, and a later entry may have the same
 * key.
 */
static struct mapping_info *info_find(const void *key)
{
	struct mapping_info *info;

	list_for_each_entry_reverse(info, &infos, node)
		if (info->key == key)
			return info;
	return NULL;
}

static bool info_less(struct rb_node *a, const struct rb_node *b)
{
	return rb_entry(a, struct mapping_info, by_key)->key <
	       rb_entry(b, struct mapping_info, by_key)->key;
}

static struct rb_root *info_root(struct mapping_info *info)
{
	return info->alloc ? &info->alloc->tables : &info->mem->kept;
}

static void info_remove(struct mapping_info *info)
{
	scoped_guard(mutex, &gpu_locks)
		bar1_put(info->mem, info->first, info->pages);
	rb_erase(&info->by_key, info_root(info));
	list_del(&info->node);
	if (!info->alloc)
		vidmem_put(info->mem);
	kfree(info);
}

/*
 * Finds the memory of a range. The range must lie in one allocation to which
 * the calling process has access. The caller holds the API lock, which keeps
 * the memory alive.
 */
static NV_STATUS memory_behind(u64 va, u64 length, struct alloc **found)
{
	struct alloc *alloc;

	guard(mutex)(&mem_lock);
	alloc = length ? memory_find_listed(current->tgid, va) : NULL;
	if (!alloc || length > alloc->length - (va - alloc->va))
		return NV_ERR_OBJECT_NOT_FOUND;
	if (alloc->gpu->stopped)
		return NV_ERR_GPU_NOT_FULL_POWER;
	*found = alloc;
	return NV_OK;
}

/*
 * Returns true if @info is a revocable pin of memory to which the calling
 * process has access. The caller holds the API lock.
 */
static bool info_is_listed(const struct mapping_info *info)
{
	guard(mutex)(&mem_lock);
	return info && info->alloc && memory_lists(info->alloc, current->tgid);
}

static NV_STATUS give_uuid(const struct gpu *gpu, u8 **uuid)
{
	NV_STATUS status = os_alloc_mem((void **)uuid, GPU_UUID_LEN);

	if (status == NV_OK)
		memcpy(*uuid, gpu->uuid, GPU_UUID_LEN);
	return status;
}

static NV_STATUS info_add(struct alloc *alloc, bool persistent, u64 va,
			  u64 length, const void *key, u64 *addresses,
			  u32 *entries)
{
	unsigned long memory = (unsigned long)upper_memory(key);
	struct mapping_info *info;
	int ret;
	u32 i;

	info = kzalloc_obj(*info);
	if (!info)
		return NV_ERR_NO_MEMORY;
	if (xa_err(xa_store(&tables, memory, xa_mk_value(1), GFP_KERNEL))) {
		kfree(info);
		return NV_ERR_NO_MEMORY;
	}
	info->key = key;
	info->mem = alloc->vidmem;
	info->gpu = alloc->gpu;
	info->first = (va - alloc->va) / STANDIN_PAGE_SIZE;
	info->pages = DIV_ROUND_UP(length, STANDIN_PAGE_SIZE);

	scoped_guard(mutex, &gpu_locks)
		ret = bar1_get(info->mem, info->first, info->pages);
	if (ret) {
		xa_erase(&tables, memory);
		kfree(info);
		return NV_ERR_INSUFFICIENT_RESOURCES;
	}
	for (i = 0; i < info->pages; i++)
		addresses[i] = vidmem_phys_told(info->mem, info->first, i,
						persistent);
	*entries = info->pages;

	/*
	 * A persistent pin keeps the memory. A revocable pin ends when the
	 * memory is freed.
	 */
	if (persistent)
		vidmem_get(info->mem);
	else
		info->alloc = alloc;
	rb_add(&info->by_key, info_root(info), info_less);
	list_add_tail(&info->node, &infos);
	api_pay_pin();
	return NV_OK;
}

NV_STATUS NV_API_CALL rm_p2p_get_pages(nvidia_stack_t *sp, u64 token,
				       u32 va_space, u64 va, u64 length,
				       u64 *addresses, u32 *wreqmb_h,
				       u32 *rreqmb_h, u32 *entries,
				       u8 **uuid, void *key)
{
	struct alloc *alloc;
	NV_STATUS status;

	status = status_of(fail_here(FAIL_GET_PAGES)) ?: rm_lock();
	if (status != NV_OK)
		return status;
	status = va % STANDIN_PAGE_SIZE ? NV_ERR_INVALID_ARGUMENT :
					  memory_behind(va, length, &alloc);
	if (status == NV_OK && alloc->gpu->removing)
		status = NV_ERR_OBJECT_NOT_FOUND;
	if (status == NV_OK)
		status = give_uuid(alloc->gpu, uuid);
	if (status == NV_OK)
		status = info_add(alloc, false, va, length, key, addresses,
				  entries);
	if (status == NV_OK) {
		memset(wreqmb_h, 0, *entries * sizeof(*wreqmb_h));
		memset(rreqmb_h, 0, *entries * sizeof(*rreqmb_h));
	} else if (*uuid) {
		os_free_mem(*uuid);
		*uuid = NULL;
	}
	api_unlock();
	return status;
}

NV_STATUS NV_API_CALL rm_p2p_register_callback(nvidia_stack_t *sp, u64 token,
					       u64 va, u64 length,
					       void *key,
					       void (*callback)(void *data),
					       void *data)
{
	struct mapping_info *info;
	NV_STATUS status;
	int fail;

	/* If the memory is freed at this point, no callback runs. */

	fail = fail_here(FAIL_GET_PAGES_REGISTER);
	status = rm_lock();
	if (status != NV_OK)
		return status;
	info = info_find(key);
	if (fail) {
		status = status_of(fail);
	} else if (!info_is_listed(info)) {
		status = NV_ERR_OBJECT_NOT_FOUND;
	} else {
		info->callback = callback;
		info->data = data;
		count(PINS_LIVE);
	}
	api_unlock();

	/* From here on, the callback may run and free the pin. */
	if (status == NV_OK)
		test_hold_here(&get_after_register);
	return status;
}

NV_STATUS NV_API_CALL rm_p2p_put_pages(nvidia_stack_t *sp, u64 token,
				       u32 va_space, u64 va, void *key)
{
	struct mapping_info *info;
	bool mine;
	NV_STATUS status;

	test_hold_here(&put_before_lock);

	/* A put waits here until a running callback ends. */
	status = status_of(fail_here(FAIL_PUT_PAGES)) ?: rm_lock();
	if (status != NV_OK)
		return status;

	info = info_find(key);
	mine = info_is_listed(info);
	if (mine) {
		/*
		 * Without a callback, the caller is get_pages, which has failed
		 * and undoes its own pin.
		 */
		if (info->callback) {
			count(PUT_PAGES_FOUND);
			uncount(PINS_LIVE);
		}
		info_remove(info);
		api_pay_unpin();
	} else if (info && info->alloc) {
		count(PUT_PAGES_FOREIGN);
		info->foreign_put = true;
	} else if (WARN(info, "nvidia: put_pages of a persistent page table\n")) {
		count(MISUSE);
	}
	api_unlock();
	return mine ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
}

NV_STATUS NV_API_CALL rm_p2p_get_gpu_info(nvidia_stack_t *sp, u64 va,
					  u64 length, u8 **uuid,
					  void **gpu_info)
{
	struct alloc *alloc;
	NV_STATUS status;

	status = rm_lock();
	if (status != NV_OK)
		return status;
	status = memory_behind(va, length, &alloc);
	if (status == NV_OK) {
		status = give_uuid(alloc->gpu, uuid);
		*gpu_info = alloc->gpu;
	}
	api_unlock();
	return status;
}

NV_STATUS NV_API_CALL rm_p2p_get_pages_persistent(nvidia_stack_t *sp, u64 va,
						  u64 length, void **object,
						  u64 *addresses,
						  u32 *entries, void *key,
#if STANDIN_SERIES >= 555
						  void *gpu_info,
						  void **mig_info)
#else
						  void *gpu_info)
#endif
{
	struct alloc *alloc;
	NV_STATUS status;

	status = status_of(fail_here(FAIL_GET_PAGES_PERSISTENT)) ?: rm_lock();
	if (status != NV_OK)
		return status;
	/* The memory may have been freed since get_gpu_info. */
	status = memory_behind(va, length, &alloc);
	if (status == NV_OK && alloc->gpu != gpu_info)
		status = NV_ERR_OBJECT_NOT_FOUND;
	/* Before 555, the upper half does not check the alignment. */
	if (status == NV_OK && va % STANDIN_PAGE_SIZE)
		status = NV_ERR_INVALID_ARGUMENT;
	/*
	 * This failure stands for any failure to duplicate the memory's handle.
	 */
	if (status == NV_OK && fail_here(FAIL_DUP_OBJECT))
		status = NV_ERR_INVALID_STATE;
	if (status == NV_OK)
		status = info_add(alloc, true, va, length, key, addresses,
				  entries);
	if (status == NV_OK) {
		*object = alloc->gpu;
		count(PINS_PERSISTENT_LIVE);
	}
	api_unlock();
	return status;
}

NV_STATUS NV_API_CALL rm_p2p_put_pages_persistent(nvidia_stack_t *sp,
#if STANDIN_SERIES >= 555
						  void *object, void *key,
						  void *mig_info)
#else
						  void *object, void *key)
#endif
{
	struct mapping_info *info;
	NV_STATUS status;
	int fail;

	fail = fail_here(FAIL_PUT_PAGES_PERSISTENT);
	status = rm_lock();
	if (status != NV_OK)
		return status;

	info = info_find(key);
	if (!object || !info) {
		/* The real driver would follow an invalid pointer. */
		count(MISUSE);
		WARN(1, "nvidia: put_pages_persistent of a table that is %s\n",
		     info ? "not persistent" : "not there");
		status = NV_ERR_INVALID_STATE;
	} else {
		if (WARN(info->lost, "nvidia: put_pages_persistent again after it failed\n"))
			count(MISUSE);
		if (fail) {
			info->lost = true;
			status = status_of(fail);
		} else {
			info_remove(info);
			uncount(PINS_PERSISTENT_LIVE);
			api_pay_unpin();
		}
	}
	api_unlock();
	return status;
}

/*
 * Revokes the pins of memory that is being freed, in the calling thread, which
 * holds the API lock. Revokes one pin after the other, in the order in which
 * the pins become the root of the tree. For each pin, the upper half calls the
 * client, and frees the page table and its DMA mappings. Then the pages leave
 * BAR1. No reference keeps the callback's module loaded.
 */
void p2p_revoke(struct alloc *alloc)
{
	struct mapping_info *info;
	struct rb_node *node;

	while ((node = alloc->tables.rb_node)) {
		info = rb_entry(node, struct mapping_info, by_key);
		if (info->callback) {
			count(CALLBACKS);
			if (info->foreign_put)
				count(CALLBACKS_AFTER_PUT);
			scoped_guard(mutex, &gpu_locks)
				info->callback(info->data);
			test_hold_here(&callback_exit);
			uncount(PINS_LIVE);
		}
		info_remove(info);
	}
}

/* Frees those pins of a removed GPU for which a put has failed. */
void p2p_free_lost(struct gpu *gpu)
{
	struct mapping_info *info, *next;

	if (WARN_ON(api_lock()))
		return;
	list_for_each_entry_safe(info, next, &infos, node) {
		if (!info->lost || info->gpu != gpu)
			continue;
		nv_p2p_free_platform_data((void *)info->key);
		info_remove(info);
		uncount(PINS_PERSISTENT_LIVE);
	}
	api_unlock();
}

/*
 * DMA
 */

static NV_STATUS map_for_peer(nv_dma_device_t *peer, const struct gpu *gpu,
			      u64 pages, u64 *va)
{
	dma_addr_t addr;

	if (fail_here(FAIL_DMA_MAP_PAGE))
		return NV_ERR_GENERIC;

	if (!gpu_can_map(gpu, *va, pages * PAGE_SIZE))
		return NV_ERR_INVALID_REQUEST;

	addr = dma_map_resource(peer->dev, *va, pages * PAGE_SIZE,
				DMA_BIDIRECTIONAL, BAR_ATTRS);
	if (dma_mapping_error(peer->dev, addr))
		return NV_ERR_OPERATING_SYSTEM;
	*va = addr;
	return NV_OK;
}

void NV_API_CALL nv_dma_unmap_peer(nv_dma_device_t *peer, u64 pages,
				   u64 va)
{
	dma_unmap_resource(peer->dev, va, pages * PAGE_SIZE, DMA_BIDIRECTIONAL,
			   BAR_ATTRS);
}

/* This function and the next one are for coherent GPUs only. */
static NV_STATUS map_coherent(nv_dma_device_t *peer, u32 pages, u64 *addresses,
			      void **private)
{
	struct sg_table *sgt = kzalloc_obj(*sgt);
	int ret = sgt ? coherent_map(peer->dev, sgt, addresses, pages) : -ENOMEM;

	if (ret) {
		kfree(sgt);
		return ret == -ENOMEM ? NV_ERR_NO_MEMORY : NV_ERR_OPERATING_SYSTEM;
	}
	*private = sgt;
	return NV_OK;
}

NV_STATUS NV_API_CALL nv_dma_unmap_alloc(nv_dma_device_t *device, u64 pages,
					 u64 *addresses, void **private)
{
	coherent_unmap(device->dev, *private);
	kfree(*private);
	*private = NULL;
	return NV_OK;
}

NV_STATUS NV_API_CALL rm_p2p_dma_map_pages(nvidia_stack_t *sp,
					   nv_dma_device_t *peer, u8 *uuid,
					   u64 page_size, u32 pages,
					   u64 *addresses, void **private)
{
	NV_STATUS status;
	struct gpu *gpu;
	u32 i, done = 0;

	*private = NULL;

	status = status_of(fail_here(FAIL_DMA_MAP)) ?: rm_lock();
	if (status != NV_OK)
		return status;
	gpu = gpu_get_by_uuid(uuid);
	if (!gpu) {
		status = NV_ERR_INVALID_ARGUMENT;
		goto unlock;
	}
	for (i = 0; READ_ONCE(dma_permute) && i < pages / 2; i++)
		swap(addresses[i], addresses[pages - 1 - i]);
	if (pages && coherent_has(addresses[0])) {
		status = map_coherent(peer, pages, addresses, private);
		goto mapped;
	}
	for (done = 0; done < pages; done++) {
		status = map_for_peer(peer, gpu, page_size / PAGE_SIZE,
				      &addresses[done]);
		if (status != NV_OK)
			break;
		if (done % 1024 == 1023)
			cond_resched();
	}
mapped:
	if (status == NV_OK &&
	    xa_err(xa_store(&mappings, (unsigned long)addresses,
			    xa_mk_value(pages), GFP_KERNEL)))
		status = NV_ERR_NO_MEMORY;
	if (status == NV_OK)
		count(MAPPINGS_LIVE);
	else if (*private)
		nv_dma_unmap_alloc(peer, pages, addresses, private);
	while (status != NV_OK && done--)
		nv_dma_unmap_peer(peer, page_size / PAGE_SIZE, addresses[done]);
	gpu_put(gpu);
unlock:
	api_unlock();

	/* A callback may run before the mapping is in the table's list. */
	if (status == NV_OK)
		test_hold_here(&dma_map_before_insert);
	return status;
}

void p2p_hold_points(struct dentry *dir)
{
	test_hold_debugfs(dir, &get_after_register);
	test_hold_debugfs(dir, &put_before_lock);
	test_hold_debugfs(dir, &callback_exit);
	test_hold_debugfs(dir, &dma_map_before_insert);
}

int p2p_init(void)
{
	/* Use a separate cache, so that no other user reuses a stale page. */
	nvidia_p2p_page_t_cache =
		kmem_cache_create("nvidia_p2p_page",
				  sizeof(struct nvidia_p2p_page), 0,
				  SLAB_NO_MERGE, NULL);
	return nvidia_p2p_page_t_cache ? 0 : -ENOMEM;
}

void p2p_exit(void)
{
	unsigned long memory;
	void *entry;

	/*
	 * Free the tables of pins whose memory was freed before get_pages
	 * registered the callback.
	 */
	xa_for_each(&tables, memory, entry)
		nv_p2p_free_platform_data(upper_table((void *)memory));
	kvfree(swap_spare(NULL));
	kmem_cache_destroy(nvidia_p2p_page_t_cache);
}
