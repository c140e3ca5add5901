// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Memory regions over peer memory.
 *
 * A network card puts the DMA addresses of such a region on the bus. rxe is
 * software, so it translates each DMA address to the physical address that the
 * bus would deliver it to, through the IOMMU's own page tables if there is an
 * IOMMU. It then maps that physical address into the kernel. If a DMA address
 * is not mapped, the registration fails, as the card's access would.
 *
 * A region is stored as physically contiguous runs. The number of runs depends
 * on the layout of the memory and not on its size.
 *
 * Revocation: rxe_peer_data.c accesses the bytes of a region only with
 * &rxe_peer.lock held for reading, after a check of &rxe_peer.revoked. The
 * thread that revokes a region (for ib_core's notifier, or at the end of the
 * region) sets the flag with the lock held for writing. No access is in flight
 * then, and none starts later. The thread unmaps the runs before it releases the
 * lock. If an access ever got through, the access would fault and not reach
 * another owner's memory. A reader sleeps at most while the runs are unmapped.
 * rxe's whole data path runs from a work queue, where sleeping is allowed.
 * On-demand regions take a mutex at the same places. Before Linux 6.4, tasklets
 * run the data path (RXE_PEER_TASKLET). There an rwlock keeps the flag unchanged
 * during an access, and the runs are unmapped after the last access has ended.
 *
 * An HCA lets its firmware revoke a region and waits for the answer. Here a work
 * item revokes the region, and may fail. The region then stays unchanged:
 * dereg_mr fails, and after a failed invalidation the HCA still accesses freed
 * memory (as mlx5).
 *
 * Lock order: ib_core's mapping_lock of the umem, then &rxe_peer.lock.
 */

#include <linux/debugfs.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/iommu.h>
#include <linux/overflow.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/sched/signal.h>
#include <linux/seq_file.h>
#include <linux/test_compat.h>
#include <linux/test_hold.h>
#include <linux/workqueue.h>

#include "rxe.h"
#include "rxe_loc.h"

/* Pages to translate between two checks for signals and rescheduling. */
#define RXE_PEER_BATCH		4096
#define RXE_PEER_MIN_RUNS	4

static bool peer_inval = true;
module_param(peer_inval, bool, 0644);
MODULE_PARM_DESC(peer_inval, "Take peer memory that can be revoked (IB_PEER_MEM_INVAL_SUPP)");

static unsigned long peer_max_seg = SZ_2G;
module_param(peer_max_seg, ulong, 0644);
MODULE_PARM_DESC(peer_max_seg, "max_seg_size in bytes for the network card's PCI device, set when an rxe device is created; 0 leaves its own");

static unsigned int peer_fail_setup;
module_param(peer_fail_setup, uint, 0644);
MODULE_PARM_DESC(peer_fail_setup, "How many of the next registrations of peer memory fail after they have the umem, and release it without stopping the notifier");

static unsigned int peer_fail_create;
module_param(peer_fail_create, uint, 0644);
MODULE_PARM_DESC(peer_fail_create, "How many of the next registrations of peer memory fail after they have the umem, and stop the notifier before they release it");

static unsigned int peer_fail_revoke;
module_param(peer_fail_revoke, uint, 0644);
MODULE_PARM_DESC(peer_fail_revoke, "How many of the next revocations of peer memory fail");

TEST_HOLD(firmware);	/* about to revoke a region */

static struct workqueue_struct *rxe_peer_wq;

enum rxe_peer_dma {
	RXE_PEER_DMA_ANCESTOR,
	RXE_PEER_DMA_NONE,
	RXE_PEER_DMA_NONPCI,
	RXE_PEER_DMA_PCI,
};

/* Protected by kernel_param_lock(). */
static struct {
	enum rxe_peer_dma kind;
	unsigned int domain, bus, slot, func;
} rxe_peer_dma;

static int rxe_peer_dma_set(const char *val, const struct kernel_param *kp)
{
	unsigned int domain, bus, slot, func;
	char end;

	if (sysfs_streq(val, "")) {
		rxe_peer_dma.kind = RXE_PEER_DMA_ANCESTOR;
		return 0;
	}
	if (sysfs_streq(val, "none")) {
		rxe_peer_dma.kind = RXE_PEER_DMA_NONE;
		return 0;
	}
	if (sysfs_streq(val, "nonpci")) {
		rxe_peer_dma.kind = RXE_PEER_DMA_NONPCI;
		return 0;
	}

	if (sscanf(val, "%x:%x:%x.%x %c", &domain, &bus, &slot, &func, &end) != 4) {
		domain = 0;
		if (sscanf(val, "%x:%x.%x %c", &bus, &slot, &func, &end) != 3)
			return -EINVAL;
	}
	if (domain > INT_MAX || bus > 0xff || slot > 0x1f || func > 7)
		return -EINVAL;

	rxe_peer_dma.kind = RXE_PEER_DMA_PCI;
	rxe_peer_dma.domain = domain;
	rxe_peer_dma.bus = bus;
	rxe_peer_dma.slot = slot;
	rxe_peer_dma.func = func;
	return 0;
}

static int rxe_peer_dma_get(char *buf, const struct kernel_param *kp)
{
	switch (rxe_peer_dma.kind) {
	case RXE_PEER_DMA_NONE:
		return sysfs_emit(buf, "none\n");
	case RXE_PEER_DMA_NONPCI:
		return sysfs_emit(buf, "nonpci\n");
	case RXE_PEER_DMA_PCI:
		return sysfs_emit(buf, "%04x:%02x:%02x.%u\n",
				  rxe_peer_dma.domain, rxe_peer_dma.bus,
				  rxe_peer_dma.slot, rxe_peer_dma.func);
	default:
		return sysfs_emit(buf, "\n");
	}
}

static const struct kernel_param_ops rxe_peer_dma_ops = {
	.set = rxe_peer_dma_set,
	.get = rxe_peer_dma_get,
};

module_param_cb(peer_dma_dev, &rxe_peer_dma_ops, NULL, 0644);
MODULE_PARM_DESC(peer_dma_dev, "DMA device of peer memory: empty for the network card's PCI device, none, nonpci, or [domain:]bus:slot.func");

/**
 * struct rxe_peer_dev - an rxe device's state for peer memory
 * @lock: protects @regions
 * @regions: the live regions, for debugfs
 * @pci: the network card, NULL if no PCI device is behind the netdev
 * @own_max_seg: original max_seg_size of @pci
 * @set_max_seg: max_seg_size that was set on @pci, 0 if none
 * @dir: debugfs directory
 */
struct rxe_peer_dev {
	struct mutex		lock;	/* protects regions */
	struct list_head	regions;
	struct device		*pci;
	unsigned int		own_max_seg;
	unsigned int		set_max_seg;
	struct dentry		*dir;
};

#ifdef RXE_PEER_TASKLET
/* Waits for running accesses. The caller holds @peer->lock for writing. */
static void rxe_peer_close(struct rxe_peer *peer)
{
	write_lock_bh(&peer->users);
	WRITE_ONCE(peer->revoked, true);
	write_unlock_bh(&peer->users);
}
#else
/* The caller holds @peer->lock for writing. */
static void rxe_peer_close(struct rxe_peer *peer)
{
	WRITE_ONCE(peer->revoked, true);
}
#endif

static struct dentry *rxe_peer_root;
static struct platform_device *rxe_peer_nonpci;

static struct sg_table *rxe_peer_table(struct ib_umem *umem)
{
#if KERNEL_VERSION(5, 15, 0) <= LINUX_VERSION_CODE
	return &umem->sgt_append.sgt;
#else
	return &umem->sg_head;
#endif
}

/* Returns the device to map for, with a reference. */
static int rxe_peer_dma_dev(struct rxe_dev *rxe, struct device **dma_dev)
{
	struct pci_dev *pdev;
	int err = 0;

	*dma_dev = NULL;
	kernel_param_lock(THIS_MODULE);
	switch (rxe_peer_dma.kind) {
	case RXE_PEER_DMA_ANCESTOR:
		*dma_dev = get_device(rxe->peer->pci);
		break;
	case RXE_PEER_DMA_NONE:
		break;
	case RXE_PEER_DMA_NONPCI:
		*dma_dev = get_device(&rxe_peer_nonpci->dev);
		break;
	case RXE_PEER_DMA_PCI:
		pdev = pci_get_domain_bus_and_slot(rxe_peer_dma.domain,
						   rxe_peer_dma.bus,
						   PCI_DEVFN(rxe_peer_dma.slot,
							     rxe_peer_dma.func));
		if (pdev)
			*dma_dev = &pdev->dev;
		else
			err = -ENODEV;
		break;
	}
	kernel_param_unlock(THIS_MODULE);

	if (err)
		rxe_err_dev(rxe, "no PCI device at peer_dma_dev\n");
	return err;
}

/* Returns the domain that translates DMA addresses of @dev, or NULL. */
static struct iommu_domain *rxe_peer_domain(struct device *dev)
{
#ifdef CONFIG_IOMMU_API
	struct iommu_domain *domain = dev ? iommu_get_domain_for_dev(dev) : NULL;

	if (domain && domain->type != IOMMU_DOMAIN_IDENTITY)
		return domain;
#endif
	return NULL;
}

/* Appends @len bytes at @phys. The size is always whole pages. */
static int rxe_peer_add(struct rxe_peer *peer, phys_addr_t phys, u64 len)
{
	struct rxe_peer_run *run;

	if (peer->nruns) {
		run = &peer->runs[peer->nruns - 1];
		if (run->phys + (peer->size - run->offset) == phys)
			goto out;
	}

	if (peer->nruns == peer->max_runs) {
		size_t max = max(2 * peer->max_runs, RXE_PEER_MIN_RUNS);

		/* 16 bytes per run, many megabytes if fragmented. */
		run = kvmalloc_array(max, sizeof(*run), GFP_KERNEL);
		if (!run)
			return -ENOMEM;
		if (peer->nruns)
			memcpy(run, peer->runs, peer->nruns * sizeof(*run));
		kvfree(peer->runs);
		peer->runs = run;
		peer->max_runs = max;
	}

	run = &peer->runs[peer->nruns++];
	run->offset = peer->size;
	run->phys = phys;
out:
	peer->size += len;
	return 0;
}

/* Appends the memory behind the DMA addresses [@dma, @dma + @len). */
static int rxe_peer_add_dma(struct rxe_peer *peer, struct iommu_domain *domain,
			    dma_addr_t dma, u64 len)
{
	u64 step = domain ? PAGE_SIZE : len;
	unsigned int batch = 0;
	dma_addr_t last;
	int err;

	if (!len || !IS_ALIGNED(dma, PAGE_SIZE) || !IS_ALIGNED(len, PAGE_SIZE) ||
	    check_add_overflow(dma, (dma_addr_t)(len - 1), &last)) {
		rxe_err_mr(peer->mr, "bad scatter list entry: %pad + %#llx\n",
			   &dma, len);
		return -EINVAL;
	}

	for (; len; dma += step, len -= step) {
		phys_addr_t phys = domain ? iommu_iova_to_phys(domain, dma) : dma;

		if (!phys) {
			rxe_err_mr(peer->mr, "DMA address %pad is not mapped\n",
				   &dma);
			return -EFAULT;
		}

		err = rxe_peer_add(peer, phys, step);
		if (err)
			return err;

		if (++batch % RXE_PEER_BATCH == 0) {
			if (fatal_signal_pending(current))
				return -EINTR;
			cond_resched();
		}
	}

	return 0;
}

static int rxe_peer_collect(struct rxe_peer *peer, struct ib_umem *umem)
{
	struct iommu_domain *domain = rxe_peer_domain(peer->dma_dev);
	struct sg_table *sgt = rxe_peer_table(umem);
	struct scatterlist *sg;
	u64 pages, all = 0;
	unsigned int i;
	int err;

	for_each_sgtable_dma_sg(sgt, sg, i) {
		err = rxe_peer_add_dma(peer, domain, sg_dma_address(sg),
				       sg_dma_len(sg));
		if (err)
			return err;

		/* Without an IOMMU, each entry is one step above. */
		if (i % RXE_PEER_BATCH == RXE_PEER_BATCH - 1) {
			if (fatal_signal_pending(current))
				return -EINTR;
			cond_resched();
		}
	}

	/* Some drivers use orig_nents and must find the same memory. */
	for_each_sgtable_sg(sgt, sg, i) {
		all += sg_dma_len(sg);
		if (i % RXE_PEER_BATCH == RXE_PEER_BATCH - 1)
			cond_resched();
	}
	if (all != peer->size) {
		rxe_err_mr(peer->mr, "%#llx bytes in nents, %#llx in orig_nents\n",
			   peer->size, all);
		return -EINVAL;
	}

	/*
	 * ib_core has trimmed both ends to the pages that the region touches. A
	 * table of another size would shift every byte behind the error.
	 */
	pages = ib_umem_num_pages(umem);
	if (peer->size != pages << PAGE_SHIFT) {
		rxe_err_mr(peer->mr, "scatter list of %#llx bytes for %#llx pages\n",
			   peer->size, pages);
		return -EINVAL;
	}

	return 0;
}

/* Unmaps the first @n runs. */
static void rxe_peer_unmap(struct rxe_peer *peer, size_t n)
{
	size_t i;

	for (i = 0; i < n; i++) {
		iounmap(peer->runs[i].va);
		cond_resched();
	}
}

/*
 * Maps the runs write-combined, as a BAR of memory is mapped: writes are
 * posted, reads have no side effects, and no cache hides the peer's writes.
 * The BAR is still device memory, hence memcpy_toio() and memcpy_fromio(): not
 * every architecture allows all accesses of a plain memcpy() to such memory.
 * memremap() has no advantage: it makes the same mapping, and hides the kind of
 * memory.
 */
static int rxe_peer_map(struct rxe_peer *peer)
{
	size_t i;
	int err;

	for (i = 0; i < peer->nruns; i++) {
		struct rxe_peer_run *run = &peer->runs[i];
		u64 len = rxe_peer_run_end(peer, i) - run->offset;
		phys_addr_t phys = run->phys;

		/* Checked here: ioremap() of system RAM warns. */
		if (region_intersects(phys, len, IORESOURCE_SYSTEM_RAM,
				      IORES_DESC_NONE) != REGION_DISJOINT) {
			rxe_err_mr(peer->mr, "%pap + %#llx is system RAM\n",
				   &phys, len);
			err = -EFAULT;
			goto err_unmap;
		}

		if (fatal_signal_pending(current)) {
			err = -EINTR;
			goto err_unmap;
		}

		run->va = ioremap_wc(phys, len);
		if (!run->va) {
			rxe_err_mr(peer->mr, "cannot map %pap + %#llx\n",
				   &phys, len);
			err = -ENOMEM;
			goto err_unmap;
		}

		cond_resched();
	}

	return 0;

err_unmap:
	rxe_peer_unmap(peer, i);
	return err;
}

/* Decrements *@left and returns true, unless *@left is 0. */
static bool rxe_peer_fails(unsigned int *left)
{
	unsigned int n = READ_ONCE(*left);

	while (n) {
		if (try_cmpxchg(left, &n, n - 1))
			return true;
	}
	return false;
}

struct rxe_peer_command {
	struct work_struct	work;
	struct completion	done;
	struct rxe_peer		*peer;
	int			err;
};

static void rxe_peer_take_away(struct work_struct *work)
{
	struct rxe_peer_command *command =
		container_of(work, struct rxe_peer_command, work);
	struct rxe_peer *peer = command->peer;

	test_hold_here(&firmware);

	down_write(&peer->lock);
	if (!peer->revoked) {
		if (rxe_peer_fails(&peer_fail_revoke)) {
			command->err = -EIO;
		} else {
			/* Accesses that found the region earlier see @revoked. */
			WRITE_ONCE(peer->mr->state, RXE_MR_STATE_INVALID);
			rxe_peer_close(peer);
			rxe_peer_unmap(peer, peer->nruns);
		}
	}
	up_write(&peer->lock);

	complete(&command->done);
}

/*
 * Revokes the region. On success, no access is in flight on return, and none
 * will start. The wait is not interruptible. The work item must not need any
 * lock that the caller holds.
 */
static int rxe_peer_revoke(struct rxe_peer *peer)
{
	struct rxe_peer_command command = { .peer = peer };

	/* lockdep does not see this wait. */
	might_lock(&peer->lock);
	init_completion(&command.done);
	INIT_WORK_ONSTACK(&command.work, rxe_peer_take_away);
	queue_work(rxe_peer_wq, &command.work);
	wait_for_completion(&command.done);
	destroy_work_on_stack(&command.work);

	if (command.err)
		rxe_dbg_mr(peer->mr, "region was not taken away\n");
	return command.err;
}

/*
 * ib_core's notifier. May sleep. The umem's mapping_lock is held. A failure
 * cannot be reported.
 */
static void rxe_peer_invalidate(struct ib_umem *umem, void *priv)
{
	rxe_peer_revoke(priv);
}

static void rxe_peer_free(struct rxe_peer *peer)
{
	kvfree(peer->runs);
	kfree(peer);
}

static struct rxe_peer *rxe_peer_create(struct rxe_mr *mr, struct ib_umem *umem,
					struct device *dma_dev)
{
	struct rxe_peer *peer;
	int err;

	/* Refused, like all memory that is not persistent. */
	if (mr->access & IB_ACCESS_FLUSH_PERSISTENT) {
		rxe_dbg_mr(mr, "peer memory can't be persistent\n");
		return ERR_PTR(-EINVAL);
	}

	peer = kzalloc_obj(*peer);
	if (!peer)
		return ERR_PTR(-ENOMEM);

	init_rwsem(&peer->lock);
#ifdef RXE_PEER_TASKLET
	rwlock_init(&peer->users);
#endif
	INIT_LIST_HEAD(&peer->list);
	peer->mr = mr;
	peer->dma_dev = dma_dev;
	peer->nents = rxe_peer_table(umem)->nents;
	peer->head = ib_umem_offset(umem);

	err = rxe_peer_collect(peer, umem);
	if (!err)
		err = rxe_peer_map(peer);
	if (err) {
		rxe_peer_free(peer);
		return ERR_PTR(err);
	}

	return peer;
}

/**
 * rxe_peer_umem_get - get the memory of a region, of the host or of a peer
 * @rxe: the rxe device
 * @mr: the region
 * @start: user virtual address
 * @length: length in bytes
 * @access: IB access flags
 *
 * The caller handles host memory. A region over peer memory is complete on
 * return, and may already be revoked.
 *
 * Return: the umem, or an ERR_PTR().
 */
struct ib_umem *rxe_peer_umem_get(struct rxe_dev *rxe, struct rxe_mr *mr,
				  u64 start, u64 length, int access)
{
	unsigned long flags = IB_PEER_MEM_ALLOW;
	struct device *dma_dev;
	struct rxe_peer *peer;
	struct ib_umem *umem;
	int err;

	err = rxe_peer_dma_dev(rxe, &dma_dev);
	if (err)
		return ERR_PTR(err);

	if (READ_ONCE(peer_inval))
		flags |= IB_PEER_MEM_INVAL_SUPP;

	umem = ib_umem_get_peer_with_dma_device(&rxe->ib_dev, dma_dev, start,
						length, access, flags);
	if (IS_ERR(umem) || !umem->is_peer)
		goto put_dev;

	/*
	 * If the client revokes, its umem's mapping_lock is held until the
	 * notifier is activated, so the memory stays mapped until then. On an
	 * error, stopping the notifier unlocks it.
	 */
	if (rxe_peer_fails(&peer_fail_setup)) {
		/* mlx5 does this if its rereg_mr cannot load the new memory. */
		ib_umem_release(umem);
		umem = ERR_PTR(-EIO);
		goto put_dev;
	}

	/* mlx5 does this if its create_real_mr() fails. */
	peer = rxe_peer_fails(&peer_fail_create) ? ERR_PTR(-EIO) :
		rxe_peer_create(mr, umem, dma_dev);
	if (IS_ERR(peer)) {
		if (flags & IB_PEER_MEM_INVAL_SUPP)
			ib_umem_stop_invalidation_notifier(umem);
		ib_umem_release(umem);
		umem = ERR_CAST(peer);
		goto put_dev;
	}
	peer->inval = flags & IB_PEER_MEM_INVAL_SUPP;

	/* Everything must be set before the notifier can run. */
	mr->umem = umem;
	mr->peer = peer;
	mr->ibmr.type = IB_MR_TYPE_USER;
	mr->state = RXE_MR_STATE_VALID;
	ib_umem_activate_invalidation_notifier(umem, rxe_peer_invalidate, peer);

	mutex_lock(&rxe->peer->lock);
	list_add_tail(&peer->list, &rxe->peer->regions);
	mutex_unlock(&rxe->peer->lock);

	return umem;

put_dev:
	put_device(dma_dev);
	return umem;
}

/**
 * rxe_peer_dereg - revoke a region's peer memory before its end, if it has any
 * @mr: the region
 *
 * The next step undoes the DMA mapping. The notifier may run concurrently
 * until ib_umem_stop_invalidation_notifier() has returned. The second call of
 * rxe_peer_revoke() finds the region revoked.
 *
 * Return: 0, or a negative errno if the region is unchanged.
 */
int rxe_peer_dereg(struct rxe_mr *mr)
{
	return mr->peer ? rxe_peer_revoke(mr->peer) : 0;
}

/**
 * rxe_peer_mr_end - release a region's peer memory, if it has any
 * @mr: the region, after rxe_peer_dereg()
 *
 * Accesses that found the region earlier find it revoked.
 */
void rxe_peer_mr_end(struct rxe_mr *mr)
{
	struct rxe_dev *rxe = to_rdev(mr->ibmr.device);
	struct rxe_peer *peer = mr->peer;

	if (!peer)
		return;

	mutex_lock(&rxe->peer->lock);
	list_del(&peer->list);
	mutex_unlock(&rxe->peer->lock);

	WARN_ON(!peer->revoked);
	/* The notifier stays active without the flag (as mlx5's QPs). */
	if (peer->inval)
		ib_umem_stop_invalidation_notifier(mr->umem);
	ib_umem_release(mr->umem);
	mr->umem = NULL;

	put_device(peer->dma_dev);
}

/**
 * rxe_peer_mr_free - free a region's peer memory data, if it has any
 * @mr: the region, no longer reachable by lookups, after rxe_peer_mr_end()
 */
void rxe_peer_mr_free(struct rxe_mr *mr)
{
	struct rxe_peer *peer = mr->peer;

	if (!peer)
		return;

	mr->peer = NULL;
	rxe_peer_free(peer);
}

/**
 * rxe_peer_mr_cleanup - end a region's peer memory, if it has any
 * @mr: the region, no longer reachable by lookups, after rxe_peer_dereg()
 */
void rxe_peer_mr_cleanup(struct rxe_mr *mr)
{
	rxe_peer_mr_end(mr);
	rxe_peer_mr_free(mr);
}

/**
 * rxe_peer_check_rereg - check if a region over peer memory may change
 * @mr: the region
 * @flags: requested changes: IB_MR_REREG_PD or IB_MR_REREG_ACCESS or both
 * @access: new IB access flags
 *
 * ib_umem_check_rereg() refuses all changes, for cards that must set up the
 * region again. Here the runs and the notifier serve any domain, and any access
 * that the memory was mapped for.
 *
 * Return: 0 or a negative errno. -EFAULT if the memory is gone, like a new
 * setup of the region.
 */
int rxe_peer_check_rereg(struct rxe_mr *mr, int flags, int access)
{
	if (flags & IB_MR_REREG_ACCESS) {
		if (access & IB_ACCESS_FLUSH_PERSISTENT)
			return -EINVAL;
		if (ib_access_writable(access) && !mr->umem->writable)
			return -EACCES;
	}

	return rxe_peer_is_revoked(mr) ? -EFAULT : 0;
}

static int rxe_peer_mrs_show(struct seq_file *m, void *unused)
{
	struct rxe_peer_dev *dev = m->private;
	struct rxe_peer *peer;

	mutex_lock(&dev->lock);
	list_for_each_entry(peer, &dev->regions, list)
		seq_printf(m, "lkey=%#x addr=%#lx len=%zu nents=%u runs=%zu state=%s\n",
			   peer->mr->ibmr.lkey, peer->mr->umem->address,
			   peer->mr->umem->length, peer->nents, peer->nruns,
			   READ_ONCE(peer->revoked) ? "revoked" : "valid");
	mutex_unlock(&dev->lock);

	return 0;
}
DEFINE_SHOW_ATTRIBUTE(rxe_peer_mrs);

/**
 * rxe_peer_dev_add - set up peer memory for an rxe device
 * @rxe: the rxe device. A move to another network namespace repeats the call.
 * @ndev: its network device
 *
 * Return: 0 or a negative errno.
 */
int rxe_peer_dev_add(struct rxe_dev *rxe, struct net_device *ndev)
{
	struct rxe_peer_dev *dev = rxe->peer;
	unsigned int max_seg;
	struct device *pci;

	if (dev) {
		test_debugfs_rename(dev->dir, dev_name(&rxe->ib_dev.dev));
		return 0;
	}

	dev = kzalloc_obj(*dev);
	if (!dev)
		return -ENOMEM;

	mutex_init(&dev->lock);
	INIT_LIST_HEAD(&dev->regions);

	/* The netdev's parent for e1000e, the parent's parent for virtio-net. */
	for (pci = ndev->dev.parent; pci && !dev_is_pci(pci); pci = pci->parent)
		;
	dev->pci = get_device(pci);

	max_seg = min_t(unsigned long, READ_ONCE(peer_max_seg), UINT_MAX);
	if (pci && max_seg) {
		dev->own_max_seg = dma_get_max_seg_size(pci);
		dev->set_max_seg = max_seg;
		dma_set_max_seg_size(pci, max_seg);
	}

	dev->dir = debugfs_create_dir(dev_name(&rxe->ib_dev.dev), rxe_peer_root);
	debugfs_create_file("mrs", 0444, dev->dir, dev, &rxe_peer_mrs_fops);

	rxe->peer = dev;
	return 0;
}

/**
 * rxe_peer_dev_remove - undo rxe_peer_dev_add()
 * @rxe: the rxe device, which has no regions left
 */
void rxe_peer_dev_remove(struct rxe_dev *rxe)
{
	struct rxe_peer_dev *dev = rxe->peer;

	if (!dev)
		return;

	debugfs_remove_recursive(dev->dir);
	WARN_ON(!list_empty(&dev->regions));

	/* The next rxe device on this card may need the card's own value. */
	if (dev->set_max_seg &&
	    dma_get_max_seg_size(dev->pci) == dev->set_max_seg)
		dma_set_max_seg_size(dev->pci, dev->own_max_seg);
	put_device(dev->pci);

	mutex_destroy(&dev->lock);
	rxe->peer = NULL;
	kfree(dev);
}

int rxe_peer_init(void)
{
	rxe_peer_wq = alloc_workqueue("rxe_peer", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!rxe_peer_wq)
		return -ENOMEM;

	rxe_peer_nonpci = platform_device_register_simple("rxe-peer-nonpci",
							  PLATFORM_DEVID_NONE,
							  NULL, 0);
	if (IS_ERR(rxe_peer_nonpci)) {
		destroy_workqueue(rxe_peer_wq);
		return PTR_ERR(rxe_peer_nonpci);
	}

	rxe_peer_root = debugfs_create_dir("rxe_peer", NULL);
	test_hold_debugfs(debugfs_create_dir("hold", rxe_peer_root), &firmware);
	return 0;
}

void rxe_peer_exit(void)
{
	debugfs_remove_recursive(rxe_peer_root);
	platform_device_unregister(rxe_peer_nonpci);
	destroy_workqueue(rxe_peer_wq);
}
