/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The part of nvidia.ko's peer-to-peer interface that peermem-rs uses.
 *
 * A build prefers the nv-p2p.h of the installed driver (see Kbuild). Without an
 * installed driver, as in the test VM, a build uses this header.
 * rust-bindings/layout.c checks both headers against the same layout.
 */
#ifndef _NV_P2P_H_
#define _NV_P2P_H_

#include <linux/types.h>

struct pci_dev;

/* The upper 16 bits are the major version, the lower 16 bits the minor. */
#define NVIDIA_P2P_PAGE_TABLE_VERSION	0x00020000
#define NVIDIA_P2P_DMA_MAPPING_VERSION	0x00020003

#define NVIDIA_P2P_GPU_UUID_LEN		16

/* Drivers since version 535 have nvidia_p2p_get_pages_persistent(). */
#define NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API

enum nvidia_p2p_page_size_type {
	NVIDIA_P2P_PAGE_SIZE_4KB = 0,
	NVIDIA_P2P_PAGE_SIZE_64KB,
	NVIDIA_P2P_PAGE_SIZE_128KB,
	NVIDIA_P2P_PAGE_SIZE_COUNT
};

struct nvidia_p2p_page {
	uint64_t physical_address;
	union nvidia_p2p_request_registers {
		struct {
			uint32_t wreqmb_h;
			uint32_t rreqmb_h;
			uint32_t rreqmb_0;
			uint32_t reserved[3];
		} fermi;
	} registers;
};

/* Bit of the page table's flags, which exist from version 2.0 (driver 580). */
#define NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE	0x1

/*
 * Pinned GPU memory: @entries pages of @page_size (enum
 * nvidia_p2p_page_size_type) each. @flags exists in version 2.0 and later.
 * nvidia.ko owns the table. The table is valid until put, or until the free
 * callback returns.
 */
struct nvidia_p2p_page_table {
	uint32_t version;
	uint32_t page_size;
	struct nvidia_p2p_page **pages;
	uint32_t entries;
	uint8_t *gpu_uuid;
	uint32_t flags;
};

/* A page table mapped for one device: one DMA address for each page. */
struct nvidia_p2p_dma_mapping {
	uint32_t version;
	enum nvidia_p2p_page_size_type page_size_type;
	uint32_t entries;
	uint64_t *dma_addresses;
	void *private;
	struct pci_dev *pci_dev;
};

/*
 * Pins GPU memory of the calling process. @virtual_address and @length are
 * multiples of 64 KiB. If the memory is freed before put, nvidia.ko calls
 * @free_callback(@data) with its API lock held. nvidia.ko frees the table when
 * the callback returns.
 * Returns 0, -EINVAL, -ENOTSUPP, -ENOMEM, -EBUSY, -ENODEV or -EIO.
 */
int nvidia_p2p_get_pages(uint64_t p2p_token, uint32_t va_space,
			 uint64_t virtual_address, uint64_t length,
			 struct nvidia_p2p_page_table **page_table,
			 void (*free_callback)(void *data), void *data);

/* Like get_pages, but the memory stays until put_pages_persistent(). */
int nvidia_p2p_get_pages_persistent(uint64_t virtual_address, uint64_t length,
				    struct nvidia_p2p_page_table **page_table,
				    uint32_t flags);

/*
 * Unpins. Searches the pins of the calling process for the pointer value
 * @page_table. If there is no such pin, does nothing and returns 0.
 */
int nvidia_p2p_put_pages(uint64_t p2p_token, uint32_t va_space,
			 uint64_t virtual_address,
			 struct nvidia_p2p_page_table *page_table);

int nvidia_p2p_put_pages_persistent(uint64_t virtual_address,
				    struct nvidia_p2p_page_table *page_table,
				    uint32_t flags);

int nvidia_p2p_dma_map_pages(struct pci_dev *peer,
			     struct nvidia_p2p_page_table *page_table,
			     struct nvidia_p2p_dma_mapping **dma_mapping);

int nvidia_p2p_dma_unmap_pages(struct pci_dev *peer,
			       struct nvidia_p2p_page_table *page_table,
			       struct nvidia_p2p_dma_mapping *dma_mapping);

/* Every driver since 535 has these functions. They do nothing and return 0. */
int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *page_table);
int nvidia_p2p_free_dma_mapping(struct nvidia_p2p_dma_mapping *dma_mapping);

/* No current driver supports the next two functions. They return -ENOTSUPP. */
struct nvidia_p2p_params;
int nvidia_p2p_init_mapping(uint64_t p2p_token,
			    struct nvidia_p2p_params *params,
			    void (*destroy_callback)(void *data), void *data);
int nvidia_p2p_destroy_mapping(uint64_t p2p_token);

#endif /* _NV_P2P_H_ */
