// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Peer memory: umems whose memory belongs to another driver.
 *
 * get_user_pages() cannot pin GPU memory behind a PCI BAR, because such memory
 * has no struct page. If the RDMA driver allows it, ib_core then asks the
 * peer-memory clients, in the order of their registration, if the address is
 * theirs. The first client that accepts pins the memory and maps it for the
 * RDMA device.
 *
 *	acquire -> get_pages -> dma_map		ib_umem_get_peer()
 *	dma_unmap -> put_pages			ib_umem_stop_invalidation_notifier()
 *	release					ib_umem_release(), which unmaps first
 *						if the notifier was not stopped
 *
 * This test fixture gives mainline, which never had the interface, the
 * behaviour of MLNX_OFED and DOCA-OFED from 25.04 on, as clients see it.
 * Behaviour that is awkward for clients is marked "as OFED": a client that only
 * works with a better ib_core than OFED's is useless.
 *
 * Lock order
 *
 *	mmap_lock (a GPU driver may revoke in munmap())
 *	  locks of the GPU driver that it holds when it revokes
 *	    ib_umem_peer::mapping_lock
 *	      locks of the RDMA driver, and the client's own
 *	      ib_peer_client::umems.xa_lock
 *
 *	peer_memory_mutex
 *	  locks that acquire() takes, of the client and of the GPU driver
 *
 * peer_memory_mutex and mapping_lock never nest in either order. Consequences
 * for the three parties:
 *
 * - ib_core calls get_pages() and dma_map() with mapping_lock held, and the
 *   invalidation function takes mapping_lock. A client that revokes must not
 *   wait, in get_pages() and dma_map(), for a lock that is held around its call
 *   of the invalidation function. The same holds for dma_unmap() and
 *   put_pages(), unless the client has set PEER_MEM_INVALIDATE_UNMAPS, and
 *   always for put_pages() after a failed dma_map().
 * - An RDMA driver that got a umem with IB_PEER_MEM_INVAL_SUPP holds
 *   mapping_lock without seeing it. The driver must not fault in user memory
 *   before ib_umem_activate_invalidation_notifier().
 * - If a client does not revoke, no invalidation takes the mapping_lock of its
 *   umems, and mapping_lock may be taken outside the GPU driver's locks. lockdep
 *   has one class for all umems (as OFED), and reports an inversion if clients
 *   of both kinds are in use. peer_lock_classes=2 prevents that report.
 *
 * One function locks mapping_lock and another unlocks it, but always in the
 * task that runs the verb, as mutexes require. A driver that releases without a
 * stop frees a locked mutex, which mutexes do not allow.
 */

#include <linux/completion.h>
#include <linux/debugfs.h>
#include <linux/device.h>
#include <linux/kobject.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <linux/test_compat.h>
#include <linux/test_hold.h>
#include <linux/xarray.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/peer_mem.h>

#include "core_priv.h"

/* Ticket of a umem that cannot be invalidated. */
#define PEER_NO_TICKET		U32_MAX

/* Kernels since 6.4 do not export mm_kobj, and OFED has no such files. */
static bool peer_mem_sysfs;
module_param(peer_mem_sysfs, bool, 0444);
MODULE_PARM_DESC(peer_mem_sysfs, "Show peer-memory clients in /sys/kernel/mm/memory_peers, as kernels before 6.4 (default: N)");

static unsigned int peer_lock_classes = 1;
module_param(peer_lock_classes, uint, 0444);
MODULE_PARM_DESC(peer_lock_classes, "How many classes lockdep has for mapping_lock: 1, as OFED, or 2, with one for clients that never revoke");

static bool peer_old_stop;
module_param(peer_old_stop, bool, 0644);
MODULE_PARM_DESC(peer_old_stop, "Stop the notifier as OFED before 25.04, with != for ==: a umem whose notifier was never activated hangs for ever (default: N)");

/*
 * Number of tickets, which are assigned cyclically. With all 32 bits, no test
 * runs long enough to see a ticket again. A test that sets a small limit must
 * not register from other threads meanwhile: a ticket is free for the next umem
 * before release() has informed the client, and no client can handle this.
 */
static u32 peer_tickets = PEER_NO_TICKET;

/*
 * Places where a test can stop threads, in the order in which a umem passes
 * them. mapping_lock is held at before_dma_unmap and before_put_pages, unless
 * the client has set PEER_MEM_INVALIDATE_UNMAPS. A release without a stop
 * passes only before_put_pages, without the lock.
 */
TEST_HOLD(before_get_pages);	/* acquired, mapping_lock held, no ticket */
TEST_HOLD(before_dma_map);	/* pinned, ticket known, mapping_lock held */
TEST_HOLD(before_activate);	/* mapped, mapping_lock held */
TEST_HOLD(invalidate_got_ref);	/* umem found and referenced, no lock held */
TEST_HOLD(invalidate_locked);	/* umem is mapped, mapping_lock held */
TEST_HOLD(invalidate_unlocked);	/* umem is invalidated, no lock held */
TEST_HOLD(before_dma_unmap);	/* notifier stopped, table not yet restored */
TEST_HOLD(before_put_pages);	/* between dma_unmap() and put_pages() */
TEST_HOLD(before_release);	/* ticket erased, no lock held */
TEST_HOLD(after_release);	/* released and put, pointer not cleared */

enum peer_stat {
	PEER_ALLOC_MRS,
	PEER_DEALLOC_MRS,
	PEER_REG_PAGES,
	PEER_DEREG_PAGES,
	PEER_REG_BYTES,
	PEER_DEREG_BYTES,
	PEER_FREE_CALLBACKS,
	PEER_STATS
};

/**
 * struct ib_peer_client - a registered client
 * @kobj: the client's directory in memory_peers. Its release frees the client.
 * @ops: the client's structure, valid until the client has unregistered
 * @entry: in peer_clients
 * @usecnt: one for the registration, and one for each acquired context
 * @unused: completed when @usecnt is zero
 * @can_revoke: the client took the invalidation function, so only drivers
 *	that can lose a umem may use its memory
 * @umems: ticket to &struct ib_umem_peer
 * @next_ticket: where the search for a free ticket continues
 * @stats: counters in memory_peers
 */
struct ib_peer_client {
	struct kobject kobj;
	const struct peer_memory_client *ops;
	struct list_head entry;
	refcount_t usecnt;
	struct completion unused;
	bool can_revoke;
	struct xarray umems;
	u32 next_ticket;
	atomic64_t stats[PEER_STATS];
};

enum peer_state {
	PEER_UNMAPPED,		/* not yet, no longer, or never mapped */
	PEER_MAPPED,
	PEER_INVALIDATED,	/* client has revoked, and unmaps itself */
};

/* An entry of the client's table before it was trimmed. */
struct peer_sg_save {
	struct scatterlist *sg;
	dma_addr_t dma_address;
	unsigned int dma_length;
	unsigned int length;
};

/**
 * struct ib_umem_peer - a umem of a client's memory
 * @umem: the RDMA driver's part. Has the client's table, without pages.
 * @kref: one for the RDMA driver, one for each running invalidation
 * @client: owner of the memory, NULL after the release
 * @context: the client's context of the umem
 * @dma_device: the device that the memory is mapped for, or NULL
 * @mapping_lock: protects @state and @func, and excludes an invalidation while
 *	they change
 * @pending: mapping_lock has been held since ib_umem_get_peer(). Used by the
 *	driver's thread only.
 * @state: mapped or not, and if the client unmaps the memory itself
 * @ticket: the ticket with which the client invalidates, or PEER_NO_TICKET
 * @func: stops the RDMA driver's use of the umem
 * @priv: argument of @func
 * @first: first entry of the table
 * @last: last entry of the table, which may be the first
 */
struct ib_umem_peer {
	struct ib_umem umem;
	struct kref kref;
	struct ib_peer_client *client;
	void *context;
	struct device *dma_device;
	struct mutex mapping_lock;
	bool pending;
	enum peer_state state;
	u32 ticket;
	umem_invalidate_func_t func;
	void *priv;
	struct peer_sg_save first;
	struct peer_sg_save last;
};

/* Protects the next three, and is held while a client's acquire() runs. */
static DEFINE_MUTEX(peer_memory_mutex);
static LIST_HEAD(peer_clients);
static struct kobject *peers_kobj;
/* Number of directories in peers_kobj. A client has one until it is unused. */
static unsigned int peers_kobj_users;
static struct dentry *peer_debugfs;

static struct sg_table *peer_table(struct ib_umem_peer *peer)
{
#if KERNEL_VERSION(5, 15, 0) <= LINUX_VERSION_CODE
	return &peer->umem.sgt_append.sgt;
#else
	return &peer->umem.sg_head;
#endif
}

/* Copies the table's counts to the umem, where drivers before 5.15 read them. */
static void peer_table_mapped(struct ib_umem_peer *peer)
{
#if KERNEL_VERSION(5, 15, 0) > LINUX_VERSION_CODE
	peer->umem.nmap = peer->umem.sg_head.nents;
	peer->umem.sg_nents = peer->umem.sg_head.orig_nents;
#endif
}

static void peer_table_forget(struct ib_umem_peer *peer)
{
#if KERNEL_VERSION(5, 15, 0) <= LINUX_VERSION_CODE
	memset(&peer->umem.sgt_append, 0, sizeof(peer->umem.sgt_append));
#else
	memset(&peer->umem.sg_head, 0, sizeof(peer->umem.sg_head));
#endif
	peer_table_mapped(peer);
}

static inline struct ib_umem_peer *to_ib_umem_peer(struct ib_umem *umem)
{
	return container_of(umem, struct ib_umem_peer, umem);
}

static void peer_count(struct ib_peer_client *client, enum peer_stat stat,
		       u64 n)
{
	atomic64_add(n, &client->stats[stat]);
}

/*
 * Returns true if the client unmaps and unpins itself after an invalidation. A
 * non-zero last byte of the version means that flags follow the structure.
 */
static bool peer_invalidate_unmaps(const struct peer_memory_client *ops)
{
	const struct peer_memory_client_ex *ex;

	if (!ops->version[IB_PEER_MEMORY_VER_MAX - 1])
		return false;

	ex = container_of(ops, const struct peer_memory_client_ex, client);
	return ex->ex_size >= offsetofend(struct peer_memory_client_ex, flags) &&
	       ex->flags & PEER_MEM_INVALIDATE_UNMAPS;
}

struct peer_attribute {
	struct attribute attr;
	enum peer_stat stat;
};

#define PEER_ATTR(_name, _stat)						\
	(&((struct peer_attribute) {					\
		.attr = { .name = #_name, .mode = 0444 },		\
		.stat = _stat,						\
	}).attr)

static struct attribute *peer_attrs[] = {
	/* PEER_STATS is no counter. The attribute shows the version. */
	PEER_ATTR(version, PEER_STATS),
	PEER_ATTR(num_alloc_mrs, PEER_ALLOC_MRS),
	PEER_ATTR(num_dealloc_mrs, PEER_DEALLOC_MRS),
	PEER_ATTR(num_reg_pages, PEER_REG_PAGES),
	PEER_ATTR(num_dereg_pages, PEER_DEREG_PAGES),
	PEER_ATTR(num_reg_bytes, PEER_REG_BYTES),
	PEER_ATTR(num_dereg_bytes, PEER_DEREG_BYTES),
	PEER_ATTR(num_free_callbacks, PEER_FREE_CALLBACKS),
	NULL
};
ATTRIBUTE_GROUPS(peer);

static ssize_t peer_attr_show(struct kobject *kobj, struct attribute *attr,
			      char *buf)
{
	struct ib_peer_client *client =
		container_of(kobj, struct ib_peer_client, kobj);
	enum peer_stat stat =
		container_of(attr, struct peer_attribute, attr)->stat;

	if (stat == PEER_STATS)
		return sysfs_emit(buf, "%.*s\n", IB_PEER_MEMORY_VER_MAX - 1,
				  client->ops->version);

	return sysfs_emit(buf, "%lld\n", atomic64_read(&client->stats[stat]));
}

static const struct sysfs_ops peer_sysfs_ops = {
	.show = peer_attr_show,
};

static void peer_client_free(struct kobject *kobj)
{
	struct ib_peer_client *client =
		container_of(kobj, struct ib_peer_client, kobj);

	xa_destroy(&client->umems);
	kfree(client);
}

static const struct kobj_type peer_client_type = {
	.release = peer_client_free,
	.sysfs_ops = &peer_sysfs_ops,
	.default_groups = peer_groups,
};

/* The caller holds peer_memory_mutex. */
static int peer_sysfs_add(struct ib_peer_client *client)
{
	int ret;

	if (!peer_mem_sysfs)
		return 0;

	if (!peers_kobj)
		peers_kobj = kobject_create_and_add("memory_peers", mm_kobj);
	if (!peers_kobj)
		return -ENOMEM;

	/* Only this makes names unique (as OFED). */
	ret = kobject_add(&client->kobj, peers_kobj, "%s", client->ops->name);
	if (!ret) {
		peers_kobj_users++;
	} else if (!peers_kobj_users) {
		kobject_put(peers_kobj);
		peers_kobj = NULL;
	}
	return ret;
}

/* The caller holds peer_memory_mutex. */
static void peer_sysfs_del(struct ib_peer_client *client)
{
	if (!peer_mem_sysfs)
		return;

	kobject_del(&client->kobj);
	if (!--peers_kobj_users) {
		kobject_put(peers_kobj);
		peers_kobj = NULL;
	}
}

static void peer_client_put(struct ib_peer_client *client)
{
	if (refcount_dec_and_test(&client->usecnt))
		complete(&client->unused);
}

static int ib_invalidate_peer_memory(void *reg_handle, u64 core_context);

/**
 * ib_register_peer_memory_client - offer memory to RDMA devices
 * @peer_client: the client. Must not change until it has unregistered.
 * @invalidate_callback: where to store the function with which the client
 *	revokes, or NULL if it never revokes
 *
 * Return: a handle, or NULL. Never an ERR_PTR().
 */
void *ib_register_peer_memory_client(const struct peer_memory_client *peer_client,
				     invalidate_peer_memory *invalidate_callback)
{
	struct ib_peer_client *client;

	/*
	 * get_page_size() is not required here, but is called without a check
	 * (as OFED). It is mandatory for all clients that map.
	 */
	if (!peer_client->acquire || !peer_client->get_pages ||
	    !peer_client->put_pages || !peer_client->dma_map ||
	    !peer_client->dma_unmap) {
		pr_err("peer memory: client %s lacks a mandatory function\n",
		       peer_client->name);
		return NULL;
	}

	client = kzalloc_obj(*client);
	if (!client)
		return NULL;

	/* Before 6.1, the function does not take a const type. */
	kobject_init(&client->kobj, (void *)&peer_client_type);
	client->ops = peer_client;
	refcount_set(&client->usecnt, 1);
	init_completion(&client->unused);
	xa_init_flags(&client->umems, XA_FLAGS_ALLOC);
	if (invalidate_callback) {
		client->can_revoke = true;
		*invalidate_callback = ib_invalidate_peer_memory;
	}

	mutex_lock(&peer_memory_mutex);
	if (peer_sysfs_add(client)) {
		mutex_unlock(&peer_memory_mutex);
		kobject_put(&client->kobj);
		return NULL;
	}
	list_add_tail(&client->entry, &peer_clients);
	mutex_unlock(&peer_memory_mutex);

	return client;
}
EXPORT_SYMBOL(ib_register_peer_memory_client);

/**
 * ib_unregister_peer_memory_client - withdraw the offer
 * @reg_handle: the result of ib_register_peer_memory_client()
 *
 * Returns when the client's last umem is gone, without a time limit. Signals
 * do not end the wait. No function of the client is called afterwards.
 */
void ib_unregister_peer_memory_client(void *reg_handle)
{
	struct ib_peer_client *client = reg_handle;

	mutex_lock(&peer_memory_mutex);
	list_del(&client->entry);
	mutex_unlock(&peer_memory_mutex);

	peer_client_put(client);
	wait_for_completion(&client->unused);

	mutex_lock(&peer_memory_mutex);
	peer_sysfs_del(client);
	mutex_unlock(&peer_memory_mutex);
	kobject_put(&client->kobj);
}
EXPORT_SYMBOL(ib_unregister_peer_memory_client);

/*
 * The mutex is held while clients decide, so a client that is about to
 * unregister is not asked, or its unregistration waits. All registrations of a
 * machine wait for each other here (as OFED).
 */
static struct ib_peer_client *
peer_client_acquire(unsigned long addr, size_t size, unsigned long flags,
		    void **context)
{
	struct ib_peer_client *client;

	mutex_lock(&peer_memory_mutex);
	list_for_each_entry(client, &peer_clients, entry) {
		if (client->can_revoke && !(flags & IB_PEER_MEM_INVAL_SUPP))
			continue;

		/* An error counts as "not mine", like 0 (as OFED). */
		if (client->ops->acquire(addr, size, NULL, NULL, context) > 0) {
			refcount_inc(&client->usecnt);
			mutex_unlock(&peer_memory_mutex);
			return client;
		}
	}
	mutex_unlock(&peer_memory_mutex);
	return NULL;
}

static void peer_client_release(struct ib_peer_client *client, void *context)
{
	if (client->ops->release)
		client->ops->release(context);
	peer_client_put(client);
}

static void peer_umem_free(struct kref *kref)
{
	struct ib_umem_peer *peer =
		container_of(kref, struct ib_umem_peer, kref);

	put_device(peer->dma_device);
	mutex_destroy(&peer->mapping_lock);
	kfree(peer);
}

static void peer_sg_trim(struct peer_sg_save *save, struct scatterlist *sg,
			 unsigned long head, unsigned long tail)
{
	save->sg = sg;
	save->dma_address = sg_dma_address(sg);
	save->dma_length = sg_dma_len(sg);
	save->length = sg->length;

	sg_dma_address(sg) += head;
	sg_dma_len(sg) -= head + tail;
	/* Otherwise both are the same field, which is trimmed already. */
	if (IS_ENABLED(CONFIG_NEED_SG_DMA_LENGTH))
		sg->length -= head + tail;
}

static void peer_sg_restore(const struct peer_sg_save *save)
{
	if (!save->sg)
		return;

	sg_dma_address(save->sg) = save->dma_address;
	sg_dma_len(save->sg) = save->dma_length;
	save->sg->length = save->length;
}

/*
 * The client's table covers whole pages of the client. RDMA drivers expect a
 * table that begins and ends with the CPU pages in which the umem begins and
 * ends. They find the first byte with ib_umem_offset().
 */
static void peer_trim(struct ib_umem_peer *peer, unsigned long peer_page_size)
{
	struct sg_table *sgt = peer_table(peer);
	unsigned long start = peer->umem.address;
	unsigned long end = start + peer->umem.length;
	struct scatterlist *sg;
	int i;

	/* Iterates over orig_nents. Entry nents - 1 is the last (as OFED). */
	for_each_sgtable_sg(sgt, sg, i) {
		if (i == 0)
			peer_sg_trim(&peer->first, sg,
				     ALIGN_DOWN(start, PAGE_SIZE) -
				     ALIGN_DOWN(start, peer_page_size), 0);
		if (i == sgt->nents - 1)
			peer_sg_trim(&peer->last, sg, 0,
				     ALIGN(end, peer_page_size) -
				     ALIGN(end, PAGE_SIZE));
	}
}

/* Restores in reverse order: a single entry has been trimmed twice. */
static void peer_untrim(struct ib_umem_peer *peer)
{
	peer_sg_restore(&peer->last);
	peer_sg_restore(&peer->first);
}

/*
 * Ends the mapping. May run without mapping_lock. A concurrent call with the
 * lock must then find nothing left to do.
 */
static void peer_unmap(struct ib_umem_peer *peer, enum peer_state from,
		       enum peer_state to)
{
	struct ib_peer_client *client = peer->client;
	struct sg_table *sgt = peer_table(peer);

	if (from == PEER_MAPPED) {
		/*
		 * This writes to the client's memory. The client must keep the
		 * table until release(), even after it has revoked (as OFED).
		 */
		peer_untrim(peer);

		if (to == PEER_UNMAPPED) {
			client->ops->dma_unmap(sgt, peer->context,
					       peer->dma_device);
			test_hold_here(&before_put_pages);
			client->ops->put_pages(sgt, peer->context);
		}

		/* From here on, the table is the client's alone. */
		peer_table_forget(peer);
		peer_count(client, PEER_DEALLOC_MRS, 1);
	}

	if (from != PEER_UNMAPPED && to == PEER_UNMAPPED) {
		/* The table is gone by now, so this adds 0 (as OFED). */
		peer_count(client, PEER_DEREG_PAGES, sgt->nents);
		peer_count(client, PEER_DEREG_BYTES, peer->umem.length);
	}

	peer->state = to;
}

/*
 * Revokes a umem for its client, from any context that may sleep. The client
 * may hold its own locks.
 */
static int ib_invalidate_peer_memory(void *reg_handle, u64 core_context)
{
	struct ib_peer_client *client = reg_handle;
	enum peer_state from, to;
	struct ib_umem_peer *peer;

	peer_count(client, PEER_FREE_CALLBACKS, 1);

	/* While the ticket is known, the driver's reference exists. */
	xa_lock(&client->umems);
	peer = xa_load(&client->umems, core_context);
	if (peer)
		kref_get(&peer->kref);
	xa_unlock(&client->umems);
	if (!peer)
		return 0;

	test_hold_here(&invalidate_got_ref);

	mutex_lock(&peer->mapping_lock);
	/*
	 * The pointer is NULL after release(). If a client lets release()
	 * return during this call, this line crashes (as OFED).
	 */
	to = peer_invalidate_unmaps(READ_ONCE(peer->client)->ops) ?
		PEER_INVALIDATED : PEER_UNMAPPED;
	from = peer->state;

	if (from == PEER_MAPPED) {
		test_hold_here(&invalidate_locked);
		if (peer->func)
			peer->func(&peer->umem, peer->priv);
	}

	/* If already unmapped, this counts it once more (as OFED). */
	peer_unmap(peer, from, to);
	mutex_unlock(&peer->mapping_lock);

	test_hold_here(&invalidate_unlocked);
	kref_put(&peer->kref, peer_umem_free);
	return 0;
}

/**
 * ib_umem_activate_invalidation_notifier - get notified of a revocation
 * @umem: a umem from ib_umem_get_peer()
 * @func: called at most once, with a lock of ib_core held. On return, the
 *	device must no longer access the memory.
 * @priv: argument of @func
 *
 * A client that can revoke cannot do so before this call. The driver calls this
 * after its last read of the table. @func may run before this function returns.
 * Does nothing for any other umem.
 */
void ib_umem_activate_invalidation_notifier(struct ib_umem *umem,
					    umem_invalidate_func_t func,
					    void *priv)
{
	struct ib_umem_peer *peer = to_ib_umem_peer(umem);

	if (!umem->is_peer || !peer->pending)
		return;

	test_hold_here(&before_activate);
	peer->func = func;
	peer->priv = priv;
	peer->pending = false;
	mutex_unlock(&peer->mapping_lock);
}
EXPORT_SYMBOL(ib_umem_activate_invalidation_notifier);

/**
 * ib_umem_stop_invalidation_notifier - unmap a peer umem
 * @umem: any umem
 *
 * The caller has made sure that the device no longer accesses the memory. When
 * this function returns, the notifier is not running and will not run any more.
 * The umem then has no table. The only next step is ib_umem_release(). Does
 * nothing for a umem that is not a peer's.
 */
void ib_umem_stop_invalidation_notifier(struct ib_umem *umem)
{
	struct ib_umem_peer *peer = to_ib_umem_peer(umem);
	enum peer_state from;
	bool unmaps;

	if (!umem->is_peer)
		return;

	unmaps = peer_invalidate_unmaps(peer->client->ops);

	if (READ_ONCE(peer_old_stop)) {
		/*
		 * Locks twice if the notifier was never activated, never if
		 * the client does not revoke (as OFED before 25.04, Ubuntu's
		 * 5.15 and linux-nvidia 6.8).
		 */
		if (peer->func || peer->ticket != PEER_NO_TICKET)
			mutex_lock(&peer->mapping_lock);
		peer->pending = false;
	} else if (peer->pending) {
		peer->pending = false;	/* never activated, still locked */
	} else {
		mutex_lock(&peer->mapping_lock);
	}

	peer->func = NULL;
	from = peer->state;
	peer->state = PEER_UNMAPPED;

	/*
	 * A client that unmaps itself holds its own lock when it invalidates,
	 * and takes that lock in dma_unmap(). From here on, such an
	 * invalidation does nothing in ib_core, but the client's part may run
	 * concurrently (as OFED). Other clients are called under mapping_lock.
	 */
	if (unmaps)
		mutex_unlock(&peer->mapping_lock);

	if (from == PEER_MAPPED)
		test_hold_here(&before_dma_unmap);
	peer_unmap(peer, from, PEER_UNMAPPED);

	if (!unmaps)
		mutex_unlock(&peer->mapping_lock);
}
EXPORT_SYMBOL(ib_umem_stop_invalidation_notifier);

/**
 * ib_peer_umem_get - turn a umem that could not be pinned into a peer umem
 * @old_umem: describes the request, and has no pages. Freed on success.
 * @old_ret: error of the failed pinning
 * @peer_mem_flags: &enum ib_peer_mem_flags
 * @dma_device: device to map for. NULL is passed to the client unchanged.
 *
 * If the client can revoke, the umem's mapping_lock is held on success.
 *
 * Return: the new umem, an ERR_PTR() of @old_ret if no client accepts the
 * address, or an ERR_PTR() of the client's error.
 */
struct ib_umem *ib_peer_umem_get(struct ib_umem *old_umem, int old_ret,
				 unsigned long peer_mem_flags,
				 struct device *dma_device)
{
	static struct lock_class_key never_revoked_key;
	const struct peer_memory_client *ops;
	struct ib_peer_client *client;
	struct ib_umem_peer *peer;
	unsigned long page_size;
	struct sg_table *sgt;
	void *context;
	int ret;

	client = peer_client_acquire(old_umem->address, old_umem->length,
				     peer_mem_flags, &context);
	if (!client)
		return ERR_PTR(old_ret);
	ops = client->ops;

	peer = kzalloc_obj(*peer);
	if (!peer) {
		ret = -ENOMEM;
		goto err_release;
	}

	kref_init(&peer->kref);
	peer->umem = *old_umem;
	peer_table_forget(peer);
	peer->umem.is_peer = 1;
	peer->client = client;
	peer->context = context;
	peer->dma_device = get_device(dma_device);
	peer->ticket = PEER_NO_TICKET;
	mutex_init(&peer->mapping_lock);
	if (peer_lock_classes == 2 && !client->can_revoke)
		lockdep_set_class_and_name(&peer->mapping_lock,
					   &never_revoked_key,
					   "mapping_lock/never_revoked");
	sgt = peer_table(peer);

	mutex_lock(&peer->mapping_lock);
	test_hold_here(&before_get_pages);

	if (client->can_revoke) {
		u32 tickets = max(READ_ONCE(peer_tickets), 1);

		ret = xa_alloc_cyclic(&client->umems, &peer->ticket, peer,
				      XA_LIMIT(0, tickets - 1),
				      &client->next_ticket, GFP_KERNEL);
		if (ret < 0)
			goto err_unlock;
	}

	/*
	 * Always for writing, which breaks copy-on-write before the device
	 * writes. @force waives write permission if the device only reads.
	 */
	ret = ops->get_pages(peer->umem.address, peer->umem.length, 1,
			     !peer->umem.writable, NULL, context,
			     peer->ticket);
	if (ret)
		goto err_ticket;

	test_hold_here(&before_dma_map);

	ret = ops->dma_map(sgt, context, dma_device, 0, (int *)&sgt->nents);
	if (ret)
		goto err_pages;

	page_size = ops->get_page_size(context);
	if (page_size != PAGE_SIZE)
		peer_trim(peer, page_size);
	peer_table_mapped(peer);

	peer->state = PEER_MAPPED;
	peer_count(client, PEER_ALLOC_MRS, 1);
	/* Number of table entries, whatever their size (as OFED). */
	peer_count(client, PEER_REG_PAGES, sgt->nents);
	peer_count(client, PEER_REG_BYTES, peer->umem.length);

	if (client->can_revoke)
		peer->pending = true;
	else
		mutex_unlock(&peer->mapping_lock);

	kfree(old_umem);
	return &peer->umem;

err_pages:
	/* Under mapping_lock for every kind of client (as OFED). */
	ops->put_pages(sgt, context);
err_ticket:
	if (client->can_revoke)
		xa_erase(&client->umems, peer->ticket);
err_unlock:
	mutex_unlock(&peer->mapping_lock);
	kref_put(&peer->kref, peer_umem_free);
err_release:
	peer_client_release(client, context);
	/*
	 * The error is unchanged. If a client returns a positive number, its
	 * registration continues with a wild pointer (as OFED).
	 */
	return ERR_PTR(ret);
}

/**
 * ib_peer_umem_release - release a peer umem
 * @umem: a umem from ib_peer_umem_get()
 *
 * If the client can revoke, ib_umem_stop_invalidation_notifier() comes first.
 * Other umems are unmapped here if they have not been.
 */
void ib_peer_umem_release(struct ib_umem *umem)
{
	struct ib_umem_peer *peer = to_ib_umem_peer(umem);
	struct ib_peer_client *client = peer->client;

	/* Without a stop, @func may have run on memory that was freed. */
	WARN_ON(peer->func);

	/*
	 * Does not take mapping_lock. A driver that neither activated nor
	 * stopped the notifier leaves it locked (as OFED). An invalidation then
	 * waits for it forever, with the GPU driver's locks held.
	 */
	peer_unmap(peer, peer->state, PEER_UNMAPPED);

	if (peer->ticket != PEER_NO_TICKET)
		xa_erase(&client->umems, peer->ticket);

	test_hold_here(&before_release);
	peer_client_release(client, peer->context);
	test_hold_here(&after_release);

	/* Without a lock (as OFED). An invalidation may follow the pointer. */
	WRITE_ONCE(peer->client, NULL);

	atomic64_sub(ib_umem_num_pages(umem), &umem->owning_mm->pinned_vm);
	mmdrop(umem->owning_mm);
	kref_put(&peer->kref, peer_umem_free);
}

extern struct kobject *mm_kobj __weak;

void ib_peer_mem_init(void)
{
	struct dentry *hold;

	if (!&mm_kobj)
		peer_mem_sysfs = false;
	peer_debugfs = debugfs_create_dir("ib_peer_mem", NULL);
	debugfs_create_u32("tickets", 0600, peer_debugfs, &peer_tickets);
	hold = debugfs_create_dir("hold", peer_debugfs);
	test_hold_debugfs(hold, &before_get_pages);
	test_hold_debugfs(hold, &before_dma_map);
	test_hold_debugfs(hold, &before_activate);
	test_hold_debugfs(hold, &invalidate_got_ref);
	test_hold_debugfs(hold, &invalidate_locked);
	test_hold_debugfs(hold, &invalidate_unlocked);
	test_hold_debugfs(hold, &before_dma_unmap);
	test_hold_debugfs(hold, &before_put_pages);
	test_hold_debugfs(hold, &before_release);
	test_hold_debugfs(hold, &after_release);
}

void ib_peer_mem_exit(void)
{
	debugfs_remove_recursive(peer_debugfs);
}
