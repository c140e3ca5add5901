/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Memory regions over peer memory: memory without struct pages that another
 * driver provides through ib_core's peer-memory interface.
 */
#ifndef RXE_PEER_H
#define RXE_PEER_H

#include <linux/list.h>
#include <linux/rwsem.h>
#include <linux/spinlock.h>
#include <linux/types.h>

struct net_device;
struct rxe_peer_dev;

/**
 * struct rxe_peer_run - a physically contiguous part of a region
 * @offset: start in the region. The run ends where the next one begins.
 * @phys: physical address
 * @va: address of the mapping, which replaces @phys
 */
struct rxe_peer_run {
	u64			offset;
	union {
		phys_addr_t	phys;
		void __iomem	*va;
	};
};

/**
 * struct rxe_peer - the memory of a region
 * @list: in &rxe_peer_dev.regions
 * @mr: the region
 * @dma_dev: the device that the client mapped for, NULL if none was given
 * @nents: entries of the client's scatter list
 * @inval: the umem was requested with IB_PEER_MEM_INVAL_SUPP
 * @lock: held for reading while bytes are moved, for writing to revoke
 * @users: held for reading instead of @lock if tasklets move bytes
 * @revoked: the runs are gone for good
 * @head: offset of the region's first byte in the first run
 * @size: length of all runs
 * @nruns: number of runs
 * @max_runs: capacity of @runs
 * @runs: the runs, by offset
 */
struct rxe_peer {
	struct list_head	list;
	struct rxe_mr		*mr;
	struct device		*dma_dev;
	unsigned int		nents;
	bool			inval;
	struct rw_semaphore	lock;
#ifdef RXE_PEER_TASKLET
	rwlock_t		users;	/* keeps revoked unchanged */
#endif
	bool			revoked;
	unsigned int		head;
	u64			size;
	size_t			nruns;
	size_t			max_runs;
	struct rxe_peer_run	*runs;
};

int rxe_peer_init(void);
void rxe_peer_exit(void);

int rxe_peer_dev_add(struct rxe_dev *rxe, struct net_device *ndev);
void rxe_peer_dev_remove(struct rxe_dev *rxe);

struct ib_umem *rxe_peer_umem_get(struct rxe_dev *rxe, struct rxe_mr *mr,
				  u64 start, u64 length, int access);
int rxe_peer_dereg(struct rxe_mr *mr);
void rxe_peer_mr_end(struct rxe_mr *mr);
void rxe_peer_mr_free(struct rxe_mr *mr);
void rxe_peer_mr_cleanup(struct rxe_mr *mr);
int rxe_peer_check_rereg(struct rxe_mr *mr, int flags, int access);

int rxe_peer_copy(struct rxe_mr *mr, u64 iova, void *addr, unsigned int length,
		  enum rxe_mr_copy_dir dir);
int rxe_peer_atomic(struct rxe_mr *mr, u64 iova, int opcode, u64 compare,
		    u64 swap_add, u64 *orig_val);
enum resp_states rxe_peer_atomic_op(struct rxe_mr *mr, u64 iova, int opcode,
				    u64 compare, u64 swap_add, u64 *orig_val);
enum resp_states rxe_peer_atomic_write(struct rxe_mr *mr, u64 iova, u64 value);

static inline u64 rxe_peer_run_end(const struct rxe_peer *peer, size_t i)
{
	return i + 1 < peer->nruns ? peer->runs[i + 1].offset : peer->size;
}

static inline bool is_peer_mr(struct rxe_mr *mr)
{
	return mr->peer;
}

/* A hint only. rxe_peer_copy() and the atomics check again. */
static inline bool rxe_peer_is_revoked(struct rxe_mr *mr)
{
	return mr->peer && READ_ONCE(mr->state) != RXE_MR_STATE_VALID;
}

#endif /* RXE_PEER_H */
