// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Access to memory regions over peer memory: copies and atomic operations. See
 * rxe_peer.c for how an access and a revocation exclude each other.
 */

#include <linux/io.h>

#include "rxe.h"
#include "rxe_loc.h"

#ifdef RXE_PEER_TASKLET
static void rxe_peer_lock(struct rxe_peer *peer)
{
	read_lock_bh(&peer->users);
}

static void rxe_peer_unlock(struct rxe_peer *peer)
{
	read_unlock_bh(&peer->users);
}
#else
static void rxe_peer_lock(struct rxe_peer *peer)
{
	down_read(&peer->lock);
}

static void rxe_peer_unlock(struct rxe_peer *peer)
{
	up_read(&peer->lock);
}
#endif

/*
 * Begins an access to [@iova, @iova + @length), which is inside the region as
 * the user knows it. Each success must be followed by rxe_peer_end().
 */
static int rxe_peer_begin(struct rxe_mr *mr, u64 iova, u64 length, u64 *offset)
{
	struct rxe_peer *peer = mr->peer;

	/* The region starts at @head in the first page, not at the page. */
	*offset = iova - mr->ibmr.iova + peer->head;
	if (unlikely(length > peer->size || *offset > peer->size - length))
		return -EFAULT;

	rxe_peer_lock(peer);
	if (unlikely(peer->revoked)) {
		rxe_peer_unlock(peer);
		rxe_dbg_mr(mr, "region was revoked\n");
		return -EKEYREVOKED;
	}

	return 0;
}

static void rxe_peer_end(struct rxe_mr *mr)
{
	rxe_peer_unlock(mr->peer);
}

/* Returns the mapping of @offset. Cuts *@length to the end of its run. */
static void __iomem *rxe_peer_at(const struct rxe_peer *peer, u64 offset,
				 u64 *length)
{
	size_t lo = 0, hi = peer->nruns;

	while (hi - lo > 1) {
		size_t mid = lo + (hi - lo) / 2;

		if (peer->runs[mid].offset <= offset)
			lo = mid;
		else
			hi = mid;
	}

	*length = min(*length, rxe_peer_run_end(peer, lo) - offset);
	return peer->runs[lo].va + (offset - peer->runs[lo].offset);
}

/**
 * rxe_peer_copy - move bytes into or out of a region
 * @mr: the region
 * @iova: address in the region, checked by the caller
 * @addr: buffer on the other side
 * @length: number of bytes, checked by the caller
 * @dir: direction
 *
 * Return: 0, or -EKEYREVOKED if the region was revoked.
 */
int rxe_peer_copy(struct rxe_mr *mr, u64 iova, void *addr, unsigned int length,
		  enum rxe_mr_copy_dir dir)
{
	u64 offset, left = length;
	int err;

	err = rxe_peer_begin(mr, iova, length, &offset);
	if (err)
		return err;

	while (left) {
		u64 bytes = left;
		void __iomem *va = rxe_peer_at(mr->peer, offset, &bytes);

		if (dir == RXE_TO_MR_OBJ)
			memcpy_toio(va, addr, bytes);
		else
			memcpy_fromio(addr, va, bytes);

		offset += bytes;
		addr += bytes;
		left -= bytes;
	}

	if (dir == RXE_TO_MR_OBJ) {
		/* Flush the combining buffers before the completion. */
		wmb();
	}

	rxe_peer_end(mr);
	return 0;
}

/*
 * Does the same as rxe_peer_begin() for the 8 bytes of an atomic operation.
 * Returns -EINVAL if they are not aligned.
 */
static int rxe_peer_begin_atomic(struct rxe_mr *mr, u64 iova, u64 __iomem **va)
{
	u64 offset, bytes = sizeof(u64);

	if (mr_check_range(mr, iova, sizeof(u64))) {
		rxe_dbg_mr(mr, "iova out of range\n");
		return -EFAULT;
	}

	if (rxe_peer_begin(mr, iova, sizeof(u64), &offset))
		return -EFAULT;

	if (unlikely(offset & 7)) {
		rxe_peer_end(mr);
		rxe_dbg_mr(mr, "iova not aligned\n");
		return -EINVAL;
	}

	/* Runs consist of whole pages, so an aligned word lies in one run. */
	*va = rxe_peer_at(mr->peer, offset, &bytes);
	return 0;
}

/**
 * rxe_peer_atomic - FETCH & ADD, COMPARE & SWAP
 * @mr: the region
 * @iova: address in the region
 * @opcode: IB_OPCODE_RC_COMPARE_SWAP or IB_OPCODE_RC_FETCH_ADD
 * @compare: value to compare with
 * @swap_add: value to swap in or to add
 * @orig_val: (out) the original value
 *
 * Atomic against rxe's other atomics, as for host memory.
 *
 * Return: 0, -EINVAL if @iova is not aligned, or -EFAULT.
 */
int rxe_peer_atomic(struct rxe_mr *mr, u64 iova, int opcode, u64 compare,
		    u64 swap_add, u64 *orig_val)
{
	u64 __iomem *va;
	u64 value;
	int err;

	err = rxe_peer_begin_atomic(mr, iova, &va);
	if (err)
		return err;

	spin_lock_bh(&atomic_ops_lock);
	value = __raw_readq(va);
	*orig_val = value;

	if (opcode != IB_OPCODE_RC_COMPARE_SWAP)
		__raw_writeq(value + swap_add, va);
	else if (value == compare)
		__raw_writeq(swap_add, va);

	/* The next lock holder must not read past a write-combining buffer. */
	wmb();
	spin_unlock_bh(&atomic_ops_lock);

	rxe_peer_end(mr);
	return 0;
}

/* If tasklets move bytes, rxe_resp.c does not export its states. */
#ifndef RXE_PEER_TASKLET
static enum resp_states rxe_peer_state(int err)
{
	if (!err)
		return RESPST_NONE;
	return err == -EINVAL ? RESPST_ERR_MISALIGNED_ATOMIC :
		RESPST_ERR_RKEY_VIOLATION;
}

/**
 * rxe_peer_atomic_op - rxe_peer_atomic() as a state of the responder
 * @mr: the region
 * @iova: address in the region
 * @opcode: IB_OPCODE_RC_COMPARE_SWAP or IB_OPCODE_RC_FETCH_ADD
 * @compare: value to compare with
 * @swap_add: value to swap in or to add
 * @orig_val: (out) the original value
 *
 * Return: RESPST_NONE, or the error state.
 */
enum resp_states rxe_peer_atomic_op(struct rxe_mr *mr, u64 iova, int opcode,
				    u64 compare, u64 swap_add, u64 *orig_val)
{
	return rxe_peer_state(rxe_peer_atomic(mr, iova, opcode, compare,
					      swap_add, orig_val));
}

/**
 * rxe_peer_atomic_write - ATOMIC WRITE
 * @mr: the region
 * @iova: address in the region
 * @value: 8 bytes
 *
 * Return: RESPST_NONE, or the error state.
 */
enum resp_states rxe_peer_atomic_write(struct rxe_mr *mr, u64 iova, u64 value)
{
	u64 __iomem *va;
	int err;

	err = rxe_peer_begin_atomic(mr, iova, &va);
	if (err)
		return rxe_peer_state(err);

	/* Order this after all earlier writes. */
	wmb();
	__raw_writeq(value, va);
	/* Order this before the completion. */
	wmb();

	rxe_peer_end(mr);
	return RESPST_NONE;
}
#endif
