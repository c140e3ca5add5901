/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * The peer-memory interface of ib_core. A driver whose memory has no struct
 * page gives RDMA devices access to that memory through this interface.
 *
 * Mainline never had this interface. MLNX_OFED, DOCA-OFED and some distribution
 * kernels have it. The declarations below describe the binary interface of OFED
 * >= 5.4. A build prefers the header that the installed ib_core was built with
 * (see Kbuild), and otherwise uses this header. rust-bindings/layout.c checks
 * both headers against the same layout.
 */
#ifndef RDMA_PEER_MEM_H
#define RDMA_PEER_MEM_H

#include <linux/types.h>

struct device;
struct sg_table;

#define IB_PEER_MEMORY_NAME_MAX	64
#define IB_PEER_MEMORY_VER_MAX	16

/* Tickets (core_context) are u64, not pointers. */
#define PEER_MEM_U64_CORE_CONTEXT

/**
 * struct peer_memory_client - name and callbacks of a client
 * @name: unique name, NUL-terminated
 * @version: version string, NUL-terminated. If the last byte is not zero, the
 *	structure is the first member of a &struct peer_memory_client_ex.
 * @acquire: claims [@addr, @addr + @size). Returns 1 and sets *@client_context
 *	if the range belongs to this client, and returns 0 otherwise. Called in
 *	the context of the process that registers, under ib_core's global
 *	client mutex.
 * @get_pages: pins the pages. @core_context is the ticket for an invalidation.
 *	Called with the registration's mapping_lock held. Returns 0 or a
 *	negative errno.
 * @dma_map: maps the pages for @dma_device. Fills @sg_head with DMA addresses
 *	and lengths, and *@nmap with the number of mapped entries. Called with
 *	mapping_lock held. Returns 0 or a negative errno.
 * @dma_unmap: undoes @dma_map. The return value is ignored.
 * @put_pages: undoes @get_pages.
 * @get_page_size: returns the size of the client's pages in bytes. Called
 *	after @dma_map. ib_core trims the first and the last entry of the table
 *	from this size to its own PAGE_SIZE, and restores both entries before
 *	@dma_unmap.
 * @release: undoes @acquire. This is the last call for @client_context.
 *
 * ib_core keeps the pointer to this structure until the client is unregistered.
 */
struct peer_memory_client {
	char	name[IB_PEER_MEMORY_NAME_MAX];
	char	version[IB_PEER_MEMORY_VER_MAX];
	int (*acquire)(unsigned long addr, size_t size,
		       void *peer_mem_private_data, char *peer_mem_name,
		       void **client_context);
	int (*get_pages)(unsigned long addr, size_t size, int write, int force,
			 struct sg_table *sg_head, void *client_context,
			 u64 core_context);
	int (*dma_map)(struct sg_table *sg_head, void *client_context,
		       struct device *dma_device, int dmasync, int *nmap);
	int (*dma_unmap)(struct sg_table *sg_head, void *client_context,
			 struct device *dma_device);
	void (*put_pages)(struct sg_table *sg_head, void *client_context);
	unsigned long (*get_page_size)(void *client_context);
	void (*release)(void *client_context);
};

enum {
	/*
	 * The client unmaps and unpins by itself when it invalidates. ib_core's
	 * invalidation function then calls neither dma_unmap nor put_pages. A
	 * concurrent deregistration may still call dma_unmap and release.
	 */
	PEER_MEM_INVALIDATE_UNMAPS = 1 << 0,
};

/**
 * struct peer_memory_client_ex - a client with flags
 * @client: with @client.version[IB_PEER_MEMORY_VER_MAX - 1] != 0
 * @ex_size: size of this structure in bytes, as the client was compiled.
 *	ib_core ignores anything beyond this size. If 0, ib_core ignores
 *	@flags, too.
 * @flags: PEER_MEM_INVALIDATE_UNMAPS or 0
 */
struct peer_memory_client_ex {
	struct peer_memory_client client;
	size_t ex_size;
	u32 flags;
};

/*
 * Revokes the registration with the ticket @core_context. Always returns 0,
 * even if the ticket is unknown or no longer known.
 */
typedef int (*invalidate_peer_memory)(void *reg_handle, u64 core_context);

/*
 * Returns an opaque handle, or NULL on failure. The client may revoke if
 * @invalidate_callback is not NULL. ib_core then sets *@invalidate_callback to
 * its function, and uses the client only for devices that support revocation.
 */
void *ib_register_peer_memory_client(const struct peer_memory_client *peer_client,
				     invalidate_peer_memory *invalidate_callback);

/* Sleeps until the last registration of the client is gone. */
void ib_unregister_peer_memory_client(void *reg_handle);

#endif /* RDMA_PEER_MEM_H */
