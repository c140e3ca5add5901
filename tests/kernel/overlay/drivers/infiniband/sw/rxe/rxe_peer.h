/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Memory regions over peer memory: memory without struct pages that another
 * driver provides through ib_core's peer-memory interface.
 */
#ifndef RXE_PEER_H
#define RXE_PEER_H

struct net_device;
struct rxe_peer;
struct rxe_peer_dev;

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
