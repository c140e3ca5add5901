/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The part of NVIDIA's nv-linux.h that nv-p2p.c needs. nv-p2p.c otherwise
 * includes NVIDIA's own headers. One of them is nv.h, so the compiler checks
 * the prototypes of rm.c.
 */
#ifndef _STANDIN_NV_LINUX_H_
#define _STANDIN_NV_LINUX_H_

#include <linux/io.h>
#include <linux/list.h>
#include <linux/pci.h>
#include <linux/semaphore.h>
#include <linux/slab.h>

#include "nv.h"

/* The open flavour of the driver needs no separate stack. */
struct nvidia_stack_s;

static inline int nv_kmem_cache_alloc_stack(nvidia_stack_t **stack)
{
	*stack = NULL;
	return 0;
}

static inline void nv_kmem_cache_free_stack(nvidia_stack_t *stack)
{
}

/* Poisons a struct nvidia_p2p_page, and frees it. */
void upper_page_free(struct kmem_cache *cache, void *page);

#define NV_KMEM_CACHE_ALLOC(cache)	kmem_cache_alloc(cache, GFP_KERNEL | __GFP_NOWARN)
#define NV_KMEM_CACHE_FREE(ptr, cache)	upper_page_free(cache, ptr)

#define NV_INIT_MUTEX(mutex)	sema_init(mutex, 1)

/* front.c exports the functions that clients call. */
#define NV_EXPORT_SYMBOL(symbol)

struct nv_dma_device {
	struct {
		u64 start;
		u64 limit;
	} addressable_range;
	struct device *dev;
	NvBool nvlink;
};

int nvidia_dev_get_uuid(const u8 *uuid, nvidia_stack_t *sp);
void nvidia_dev_put_uuid(const u8 *uuid, nvidia_stack_t *sp);

/* Used only for the registers of POWER's NPUs, which no VM has. */
struct nv_linux_state {
	struct nv_linux_state *next;
	struct pci_dev *pci_dev;
	nv_state_t nv_state;
};

#define nv_linux_state_t	struct nv_linux_state
#define nv_linux_devices	((nv_linux_state_t *)NULL)
#define LOCK_NV_LINUX_DEVICES()
#define UNLOCK_NV_LINUX_DEVICES()
#define NV_STATE_PTR(nvl)	(&(nvl)->nv_state)
#define nv_ioremap_nocache	ioremap

static inline void nv_iounmap(void *address, u64 size)
{
	iounmap(address);
}

#endif /* _STANDIN_NV_LINUX_H_ */
