// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Pins: the work of nvidia_p2p_get_pages(), nvidia_p2p_put_pages() and their
 * persistent counterparts in front.c. If memory is freed while it is pinned,
 * this file also ends the pins.
 *
 * These functions imitate the real driver's pitfalls on purpose: see README.md.
 */
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/poison.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/test_hold.h>

#include "nvidia.h"
#include "upper.h"

/* The only flag of get_pages_persistent. Only coherent GPUs support it. */
#define FLAGS_FORCE_BAR1	BIT(0)

/*
 * Value of the caller's table pointer if nvidia_p2p_get_pages() fails before
 * the memory is pinned: the address of a freed table. If the function fails
 * later, the pointer is NULL.
 */
#define STALE_TABLE		((void *)0x6e766964006964ULL + POISON_POINTER_DELTA)

TEST_HOLD(get_after_register);
TEST_HOLD(put_before_lock);
TEST_HOLD(callback_exit);

/* Contents of page tables. */
static uint table_version = NVIDIA_P2P_PAGE_TABLE_VERSION;
module_param(table_version, uint, 0644);
MODULE_PARM_DESC(table_version, "version of page tables; below 0x00020000 they have no flags");

static uint table_page_size = NVIDIA_P2P_PAGE_SIZE_64KB;
module_param(table_page_size, uint, 0644);
MODULE_PARM_DESC(table_page_size, "page size that page tables report: 0, 1 or 2, as in the enum of nv-p2p.h");

static uint table_flags;
module_param(table_flags, uint, 0644);
MODULE_PARM_DESC(table_flags, "flags of page tables");

static int table_entries_delta;
module_param(table_entries_delta, int, 0644);
MODULE_PARM_DESC(table_entries_delta, "number added to the entry count that page tables report");

/*
 * Imitates an allocator that reuses freed memory at once, as any allocator may.
 * Tests then need not wait for a reuse. Freed memory is poisoned as usual.
 */
static bool table_reuse;
module_param(table_reuse, bool, 0644);
MODULE_PARM_DESC(table_reuse, "the next page table gets the address of the page table that was freed last, if the sizes agree");

static struct pin *spare_pin;
static size_t spare_size;
static DEFINE_SPINLOCK(spare_lock);

static struct pin *pin_memory(size_t size)
{
	struct pin *pin = NULL;

	spin_lock(&spare_lock);
	if (spare_pin && spare_size == size) {
		pin = spare_pin;
		spare_pin = NULL;
	}
	spin_unlock(&spare_lock);

	if (!pin)
		return kzalloc(size, GFP_KERNEL);
	memset(pin, 0, size);
	return pin;
}

static void pin_memory_free(struct pin *pin, size_t size)
{
	struct pin *old = pin;

	if (READ_ONCE(table_reuse)) {
		spin_lock(&spare_lock);
		old = spare_pin;
		spare_pin = pin;
		spare_size = size;
		spin_unlock(&spare_lock);
	}
	kfree(old);
}

/* Registered pins of each mode. Protected by the API lock. */
static LIST_HEAD(revocable_pins);
static LIST_HEAD(persistent_pins);
/*
 * Pins whose memory was freed before nvidia_p2p_get_pages() registered the
 * callback. Neither this function nor the resource manager frees such a pin, so
 * it stays here until the module is unloaded.
 */
static LIST_HEAD(leaked_pins);

static struct kmem_cache *page_cache;

/* The resource manager's data about a page, in 16 bytes. */
struct page_info {
	u64 physical_address;
	u32 wreqmb_h;
	u32 rreqmb_h;
};

/* Number of objects per bulk allocation. */
#define BATCH	256

static void pages_free(struct nvidia_p2p_page **pages, u32 n)
{
	u32 i;

	for (i = 0; i < n; i++)
		memset(pages[i], POISON_FREE, sizeof(*pages[i]));
	for (i = 0; i < n; i += BATCH) {
		kmem_cache_free_bulk(page_cache, min(n - i, BATCH),
				     (void **)pages + i);
		cond_resched();
	}
	memset(pages, POISON_FREE, n * sizeof(*pages));
	kvfree(pages);
}

/*
 * Allocates @n entries and one more, which is NULL, for a client that trusts a
 * false entry count.
 */
static struct nvidia_p2p_page **pages_alloc(u32 n)
{
	struct nvidia_p2p_page **pages;
	u32 i;

	pages = kvmalloc_array(n + 1UL, sizeof(*pages), GFP_KERNEL | __GFP_NOWARN);
	if (!pages)
		return NULL;

	for (i = 0; i < n; i += BATCH) {
		u32 batch = min(n - i, BATCH);

		if (!kmem_cache_alloc_bulk(page_cache, GFP_KERNEL | __GFP_NOWARN,
					   batch, (void **)pages + i)) {
			pages_free(pages, i);
			return NULL;
		}
		cond_resched();
	}
	pages[n] = NULL;
	return pages;
}

/*
 * Returns the size of a pin. An older version of the table has no flags. KASAN
 * detects an access to the flags. Without KASAN, their place holds a value that
 * no client can mistake for flags.
 */
static size_t pin_size(bool has_flags)
{
	if (has_flags)
		return sizeof(struct pin);
	return offsetof(struct pin, table.flags) +
	       (IS_ENABLED(CONFIG_KASAN) ? 0 : sizeof(u64));
}

static void pin_free(struct pin *pin)
{
	size_t size;

	dma_unmap_all(pin);
	mutex_destroy(&pin->lock);
	if (pin->table.pages)
		pages_free(pin->table.pages, pin->pages);
	memset(pin->table.gpu_uuid, POISON_FREE, NVIDIA_P2P_GPU_UUID_LEN);
	kfree(pin->table.gpu_uuid);
	size = pin->size;
	memset(pin, POISON_FREE, size);
	pin_memory_free(pin, size);
}

/*
 * Allocates a pin and the data about each page, before the address is checked.
 * In the real driver, the data is three arrays with 16 bytes per page in total,
 * so an absurd length costs memory. The stand-in must not exhaust the machine,
 * so this function fails where the real driver would invoke the OOM killer. The
 * entries of the table are allocated when the pages are pinned: see pin_fill().
 */
static struct pin *pin_alloc(u64 length, struct page_info **info)
{
	u64 pages = length / STANDIN_PAGE_SIZE;
	uint version = READ_ONCE(table_version);
	size_t size = pin_size(version >= 0x00020000);
	u64 cost = pages * sizeof(struct page_info);
	struct pin *pin;

	static_assert(sizeof(struct page_info) == 16);
	if (pages >= U32_MAX ||
	    cost / PAGE_SIZE > max(si_mem_available(), 0L) / 2)
		return NULL;

	pin = pin_memory(size);
	if (!pin)
		return NULL;
	/* Poison the fields that are not set below, such as flags of a later version. */
	memset(&pin->table, 0xa5, size - offsetof(struct pin, table));

	pin->table.gpu_uuid = kzalloc(NVIDIA_P2P_GPU_UUID_LEN, GFP_KERNEL);
	if (!pin->table.gpu_uuid)
		goto free_pin;
	*info = kvmalloc_array(pages, sizeof(**info), GFP_KERNEL | __GFP_NOWARN);
	if (!*info)
		goto free_uuid;

	pin->magic = PIN_MAGIC;
	pin->size = size;
	pin->pages = pages;
	pin->tgid = current->tgid;
	INIT_LIST_HEAD(&pin->node);
	INIT_LIST_HEAD(&pin->of_alloc);
	INIT_LIST_HEAD(&pin->mappings);
	mutex_init(&pin->lock);

	pin->table.version = version;
	pin->table.page_size = READ_ONCE(table_page_size);
	pin->table.pages = NULL;
	pin->table.entries = pages + READ_ONCE(table_entries_delta);
	if (version >= 0x00020000)
		pin->table.flags = READ_ONCE(table_flags);
	return pin;

free_uuid:
	kfree(pin->table.gpu_uuid);
free_pin:
	kfree(pin);
	return NULL;
}

/*
 * Attaches a pin to the memory of [@va, @va + @length), which must lie in one
 * allocation to which the calling process has access. Checks the address first,
 * then the GPU, and then the flags.
 */
static int pin_attach(struct pin *pin, u64 va, u64 length, u32 flags,
		      struct page_info *info)
{
	struct alloc *alloc;
	bool removing;
	u32 i;
	int ret;

	mutex_lock(&mem_lock);
	alloc = memory_find_listed(current->tgid, va);
	removing = alloc && alloc->gpu->removing;
	mutex_unlock(&mem_lock);
	if (!alloc || !length || length > alloc->length - (va - alloc->va))
		return -EINVAL;
	if (removing)
		return pin->persistent ? -ENODEV : -EINVAL;
	if (flags & FLAGS_FORCE_BAR1)
		return -ENOTSUPP;

	pin->first = (va - alloc->va) / STANDIN_PAGE_SIZE;
	ret = vidmem_pin(alloc->vidmem, pin->first, pin->pages);
	if (ret)
		return ret;

	pin->vidmem = vidmem_get(alloc->vidmem);
	if (pin->vidmem->coherent && pin->table.version >= 0x00020000)
		pin->table.flags |= NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE;
	memcpy(pin->table.gpu_uuid, alloc->gpu->uuid, NVIDIA_P2P_GPU_UUID_LEN);
	for (i = 0; i < pin->pages; i++) {
		info[i].physical_address =
			vidmem_phys_told(pin->vidmem, pin->first, i,
					 pin->persistent);
		info[i].wreqmb_h = 0;
		info[i].rreqmb_h = 0;
	}

	/* Freeing the memory revokes only revocable pins. */
	if (!pin->persistent) {
		pin->alloc = alloc;
		list_add_tail(&pin->of_alloc, &alloc->pins);
	}
	api_pay_pin();
	return 0;
}

static void pin_detach(struct pin *pin)
{
	vidmem_unpin(pin->vidmem, pin->first, pin->pages);
	vidmem_put(pin->vidmem);
	pin->vidmem = NULL;
}

/* Makes the entries of the table, once the pages are known. */
static int pin_fill(struct pin *pin, const struct page_info *info)
{
	struct nvidia_p2p_page *page;
	u32 i;

	pin->table.pages = pages_alloc(pin->pages);
	if (!pin->table.pages)
		return -ENOMEM;
	for (i = 0; i < pin->pages; i++) {
		page = pin->table.pages[i];
		memset(page, 0, sizeof(*page));
		page->physical_address = info[i].physical_address;
		page->registers.fermi.wreqmb_h = info[i].wreqmb_h;
		page->registers.fermi.rreqmb_h = info[i].rreqmb_h;
	}
	return 0;
}

/*
 * Finds the pin of a table. Compares pointer values only, because @table may be
 * an invalid pointer.
 */
static struct pin *find_pin(struct list_head *pins,
			    const struct nvidia_p2p_page_table *table)
{
	struct pin *pin;

	list_for_each_entry(pin, pins, node)
		if (&pin->table == table)
			return pin;
	return NULL;
}

int upper_get_pages(u64 token, u32 va_space, u64 va, u64 length,
		    struct nvidia_p2p_page_table **page_table,
		    void (*free_callback)(void *data), void *data)
{
	struct page_info *info;
	struct pin *pin;
	bool leaked;
	int ret;

	if (!free_callback || !page_table)
		return -EINVAL;
	if ((va | length) % STANDIN_PAGE_SIZE)
		return -EINVAL;

	*page_table = STALE_TABLE;
	pin = pin_alloc(length, &info);
	if (!pin)
		return -ENOMEM;

	ret = fail_here(FAIL_GET_PAGES) ?: api_lock();
	if (!ret) {
		ret = pin_attach(pin, va, length, 0, info);
		api_unlock();
	}
	if (ret) {
		kvfree(info);
		pin_free(pin);
		return ret;
	}

	ret = pin_fill(pin, info);
	kvfree(info);
	*page_table = &pin->table;

	/* If the memory is freed at this point, no callback runs. */

	if (!ret)
		ret = fail_here(FAIL_GET_PAGES_REGISTER);
	if (WARN_ON(api_lock()))
		return -EIO;
	leaked = !pin->alloc;
	if (!ret && leaked)
		ret = -EINVAL;
	if (!ret) {
		pin->free_callback = free_callback;
		pin->data = data;
		list_add_tail(&pin->node, &revocable_pins);
		count(PINS_LIVE);
	} else if (leaked) {
		list_add_tail(&pin->node, &leaked_pins);
	} else {
		list_del_init(&pin->of_alloc);
		pin_detach(pin);
	}
	api_unlock();

	if (ret) {
		if (!leaked)
			pin_free(pin);
		*page_table = NULL;
		return ret;
	}

	/* From here on, the callback may run and free the pin. */
	test_hold_here(&get_after_register);
	return 0;
}

/*
 * FLAGS_FORCE_BAR1, bit 0 of @flags, is the only defined flag. This GPU does
 * not support it.
 */
int upper_get_pages_persistent(u64 va, u64 length,
			       struct nvidia_p2p_page_table **page_table,
			       u32 flags)
{
	struct page_info *info;
	struct pin *pin;
	struct gpu *gpu;
	int ret;

	if (!page_table || (va | length) % STANDIN_PAGE_SIZE)
		return -EINVAL;

	*page_table = STALE_TABLE;
	pin = pin_alloc(length, &info);
	if (!pin)
		return -ENOMEM;
	pin->persistent = true;

	ret = fail_here(FAIL_GET_PAGES_PERSISTENT) ?: api_lock();
	if (ret)
		goto free;
	ret = pin_attach(pin, va, length, flags, info);
	if (!ret) {
		gpu_use(pin->vidmem->gpu);
		count(PINS_PERSISTENT_LIVE);
		/* No caller knows the table yet, so none can put it. */
		list_add_tail(&pin->node, &persistent_pins);
	}
	api_unlock();
	if (ret)
		goto free;

	ret = pin_fill(pin, info);
	if (ret)
		goto detach;
	kvfree(info);
	*page_table = &pin->table;
	return 0;

detach:
	*page_table = NULL;
	if (WARN_ON(api_lock()))
		return -EIO;
	gpu = gpu_get(pin->vidmem->gpu);
	list_del(&pin->node);
	pin_detach(pin);
	uncount(PINS_PERSISTENT_LIVE);
	api_unlock();
	gpu_unuse(gpu);
	gpu_put(gpu);
free:
	kvfree(info);
	pin_free(pin);
	return ret;
}

/*
 * Puts the pin whose table has this address. Returns 0 even if there is no such
 * pin.
 */
int upper_put_pages(u64 token, u32 va_space, u64 va,
		    struct nvidia_p2p_page_table *table)
{
	struct pin *pin;
	bool mine;
	int ret;

	if (!table)
		return 0;

	test_hold_here(&put_before_lock);

	/* A put waits here until a running callback ends. */
	ret = fail_here(FAIL_PUT_PAGES) ?: api_lock();
	if (WARN(ret, "nvidia: put_pages failed\n"))
		return ret;

	/*
	 * A process may put any pin of memory to which it has access, even
	 * another process's pin.
	 */
	pin = find_pin(&revocable_pins, table);
	scoped_guard(mutex, &mem_lock)
		mine = pin && memory_lists(pin->alloc, current->tgid);
	if (mine) {
		count(PUT_PAGES_FOUND);
		uncount(PINS_LIVE);
		list_del(&pin->node);
		list_del(&pin->of_alloc);
		pin_detach(pin);
		api_pay_unpin();
	} else if (pin) {
		count(PUT_PAGES_FOREIGN);
		pin->foreign_put = true;
	} else {
		pin = find_pin(&persistent_pins, table);
		if (WARN(pin, "nvidia: put_pages of a persistent page table\n"))
			count(MISUSE);
	}
	api_unlock();

	if (mine)
		pin_free(pin);
	return 0;
}

/*
 * Like the real driver, this function decrements the GPU's usage count even if
 * the resource manager fails. A failed put leaves the pin registered. Each
 * further put of the pin then takes away the count of another user.
 */
int upper_put_pages_persistent(u64 va, struct nvidia_p2p_page_table *table,
			       u32 flags)
{
	int ret, fail = fail_here(FAIL_PUT_PAGES_PERSISTENT);
	struct pin *pin;
	struct gpu *gpu;

	if (flags)
		return -EINVAL;
	if (!table)
		return 0;

	/*
	 * This fails in a callback, because the thread already holds the lock.
	 */
	ret = api_lock();
	if (ret)
		fail = ret;

	pin = find_pin(&persistent_pins, table);
	if (!pin) {
		/*
		 * The real driver would treat any memory at this address as a
		 * table.
		 */
		count(MISUSE);
		pin = find_pin(&revocable_pins, table);
		WARN(1, "nvidia: put_pages_persistent of a table that is %s\n",
		     pin ? "not persistent" : "not there");
		if (!ret)
			api_unlock();
		return -EINVAL;
	}
	if (WARN(pin->lost, "nvidia: put_pages_persistent again after it failed\n"))
		count(MISUSE);

	gpu = gpu_get(pin->vidmem->gpu);
	if (WARN(fail, "nvidia: put_pages_persistent failed\n")) {
		pin->lost = true;
	} else {
		list_del(&pin->node);
		pin_detach(pin);
		uncount(PINS_PERSISTENT_LIVE);
		api_pay_unpin();
	}
	if (!ret)
		api_unlock();

	if (!fail)
		pin_free(pin);
	gpu_unuse(gpu);
	gpu_put(gpu);
	return fail;
}

/*
 * Revokes the pins of memory that is being freed, in the calling thread, which
 * holds the API lock. For each pin in turn, calls the callback, and then frees
 * the DMA mappings, the table and the BAR space. No reference keeps the
 * callback's module loaded.
 */
void p2p_revoke(struct alloc *alloc)
{
	struct vidmem *vidmem;
	struct pin *pin;
	u32 first, pages;

	while (!list_empty(&alloc->pins)) {
		pin = list_first_entry(&alloc->pins, struct pin, of_alloc);
		list_del_init(&pin->of_alloc);
		pin->alloc = NULL;

		if (!pin->free_callback) {
			/*
			 * upper_get_pages() notices the loss when it registers
			 * the callback.
			 */
			pin_detach(pin);
			continue;
		}

		list_del(&pin->node);
		count(CALLBACKS);
		if (pin->foreign_put)
			count(CALLBACKS_AFTER_PUT);
		pin->free_callback(pin->data);
		test_hold_here(&callback_exit);

		vidmem = pin->vidmem;
		first = pin->first;
		pages = pin->pages;
		pin_free(pin);
		vidmem_unpin(vidmem, first, pages);
		vidmem_put(vidmem);
		uncount(PINS_LIVE);
	}
}

/* Frees those pins of a removed GPU for which a put has failed. */
void p2p_free_lost(struct gpu *gpu)
{
	struct pin *pin, *next;
	LIST_HEAD(lost);

	if (WARN_ON(api_lock()))
		return;
	list_for_each_entry_safe(pin, next, &persistent_pins, node)
		if (pin->lost && pin->vidmem->gpu == gpu)
			list_move_tail(&pin->node, &lost);
	api_unlock();

	list_for_each_entry_safe(pin, next, &lost, node) {
		pin_detach(pin);
		pin_free(pin);
		uncount(PINS_PERSISTENT_LIVE);
	}
}

int upper_free_page_table(struct nvidia_p2p_page_table *page_table)
{
	return 0;
}

int upper_init_mapping(u64 token, struct nvidia_p2p_params *params,
		       void (*destroy_callback)(void *data), void *data)
{
	return -ENOTSUPP;
}

int upper_destroy_mapping(u64 token)
{
	return -ENOTSUPP;
}

void p2p_hold_points(struct dentry *dir)
{
	test_hold_debugfs(dir, &get_after_register);
	test_hold_debugfs(dir, &put_before_lock);
	test_hold_debugfs(dir, &callback_exit);
	dma_hold_points(dir);
}

int p2p_init(void)
{
	/* Use a separate cache, so that no other user reuses a stale page. */
	page_cache = kmem_cache_create("nvidia_p2p_page",
				       sizeof(struct nvidia_p2p_page), 0,
				       SLAB_NO_MERGE, NULL);
	return page_cache ? 0 : -ENOMEM;
}

void p2p_exit(void)
{
	struct pin *pin, *next;

	list_for_each_entry_safe(pin, next, &leaked_pins, node)
		pin_free(pin);
	kfree(spare_pin);
	kmem_cache_destroy(page_cache);
}
