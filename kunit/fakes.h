/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Declares the C side of the fakes (fakes.c), and stand-ins for the kernel
 * functions that kernel.c and memory_peers.c call. fakes.rs and fakes/dma.rs
 * define these stand-ins.
 */
#ifndef PEERMEM_KUNIT_FAKES_H
#define PEERMEM_KUNIT_FAKES_H

#include <linux/bits.h>
#include <linux/dma-mapping.h>
#include <linux/memremap.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/types.h>

/* BARs of the fake GPU, at addresses where no test VM has RAM. */
#define FAKE_BAR_START		BIT_ULL(44)
#define FAKE_BAR_LEN		BIT_ULL(36)
/* Start addresses of an I/O port range and of an unassigned BAR. */
#define FAKE_IO_START		(FAKE_BAR_START + BIT_ULL(40))
#define FAKE_UNASSIGNED_START	(FAKE_BAR_START + BIT_ULL(41))
/*
 * Start of RAM that the fake GPU presents as a BAR, so that the BAR has struct
 * pages. All test VMs have RAM at this address. On arm64, RAM begins here.
 */
#define FAKE_RAM_START		BIT_ULL(30)
#define FAKE_SMALL_LEN		BIT_ULL(24)
/* Start of a second memory BAR. */
#define FAKE_SECOND_START	(FAKE_BAR_START + BIT_ULL(42))
/* Start of a third memory BAR, directly behind the second. */
#define FAKE_THIRD_START	(FAKE_SECOND_START + FAKE_SMALL_LEN)
/* Start of the BARs of additional GPUs, which lie one after another. */
#define FAKE_MORE_START		(FAKE_BAR_START + BIT_ULL(43))

/* Stand-ins, written in Rust, for kernel functions that kernel.c redefines. */
bool fake_module_get(struct module *module);
void fake_module_put(struct module *module);
int fake_sg_alloc(struct sg_table *table, unsigned int entries, gfp_t gfp);
u64 fake_dma_map(struct device *dev, u64 addr, size_t len, int dir,
		 unsigned long attrs);
void fake_dma_unmap(struct device *dev, u64 dma, size_t len, int dir,
		    unsigned long attrs);
void fake_resched(void);
bool fake_iova_alloc(struct device *dev, struct dma_iova_state *state,
		     phys_addr_t phys, size_t size);
int fake_iova_link(struct device *dev, struct dma_iova_state *state,
		   phys_addr_t phys, size_t offset, size_t len,
		   enum dma_data_direction dir, unsigned long attrs);
int fake_iova_sync(struct device *dev, struct dma_iova_state *state,
		   size_t offset, size_t len);
void fake_iova_unlink(struct device *dev, struct dma_iova_state *state,
		      size_t offset, size_t len, enum dma_data_direction dir,
		      unsigned long attrs);
void fake_iova_free(struct device *dev, struct dma_iova_state *state);

/*
 * Kinds of path between the fake NIC and memory. The numbers match Guard in
 * fakes/dma.rs. In the order of the constants: DMA operations of the
 * architecture; a direct path; an IOMMU that leaves addresses unchanged, one
 * that translates them, and one that blocks them; a bus with an offset from
 * physical addresses (dma_range_map).
 */
enum {
	FAKE_OPS,
	FAKE_NOTHING,
	FAKE_IDENTITY,
	FAKE_TRANSLATES,
	FAKE_BLOCKS,
	FAKE_RANGE_MAP,
};

void fake_nic_guard(int guard);
const struct dma_map_ops *fake_dma_ops(struct device *dev);
struct iommu_domain *fake_domain(struct device *dev);

/*
 * Stand-in for pci_get_device(). The list of devices has the fake NIC first,
 * then the fake GPUs.
 */
struct pci_dev *fake_pci_get(unsigned int vendor, unsigned int device,
			     struct pci_dev *from);
int fake_pci_domain(struct pci_bus *bus);
/*
 * Sets the range that has struct pages and a pagemap, in addition to RAM: @len
 * bytes from @start on. @type is an enum memory_type, or 0 for a pagemap that
 * is being removed.
 */
void fake_pages(u64 start, u64 len, int type);
bool fake_pfn_valid(unsigned long pfn);
struct dev_pagemap *fake_pagemap_get(unsigned long pfn);
void fake_pagemap_put(struct dev_pagemap *pgmap);
/* Returns the number of references to the pagemap. */
int fake_pagemap_refs(void);
int fake_machine_new(void);
void fake_machine_free(void);
/*
 * Returns the number of calls of fake_pci_get() so far. Each call returns the
 * next device, or NULL after the last device.
 */
unsigned int fake_pci_steps(void);
/* Removes the first GPU. Its BARs then belong to no device. */
void fake_gpu_leaves(void);
/* Removes the first GPU, and adds a new GPU with the same PCI address. */
int fake_gpu_is_replaced(void);
/* Adds @count GPUs to the machine, each with a BAR of FAKE_SMALL_LEN. */
int fake_more_gpus(unsigned int count);
/* Replaces the NIC by a new NIC with the same PCI address. */
int fake_nic_is_replaced(void);
struct device *fake_nic(void);
void fake_nic_max_segment(unsigned int bytes);
/*
 * Returns the number of references to fake devices. Does not count the one
 * reference that fakes.c holds to each device, nor the references that the
 * module keeps to remember devices. fake_remembered() returns the number of the
 * latter.
 */
unsigned int fake_device_refs(void);
unsigned int fake_remembered(void);

/* kernel.c defines these functions, which set the module's parameters. */
void fake_parameters(int peerdirect_support, int persistent_api_support);
void fake_user_limit(unsigned int mib);
/*
 * Returns the parameters with which this test module was loaded. The shipped
 * module has no parameter fail_registration.
 */
void fake_loaded_with(int *peerdirect_support, int *persistent_api_support,
		      unsigned int *fail_registration);

/*
 * memory_peers.c calls these functions, which inject failures and record when
 * the directory memory_peers is created or removed.
 */
bool fake_kobject_fails(void);
bool fake_group_fails(void);
void fake_directory(bool made);

/*
 * memory_peers.c defines these functions, which create, change and inspect the
 * stand-in for /sys/kernel.
 */
int fake_sysfs_new(void);
void fake_sysfs_free(void);
void fake_sysfs_without_mm(void);
void fake_sysfs_occupy(const char *client);
int fake_sysfs_refs(void);
bool fake_sysfs_has(const char *client, const char *file);

/*
 * Lets the calling thread's allocations use the memory reserves instead of
 * waiting for reclaim, until fake_no_reserves().
 */
unsigned int fake_reserves(void);
void fake_no_reserves(unsigned int flags);
/*
 * Calls @callback as if memory reclaim waited for it. lockdep then checks the
 * locks that @callback takes.
 */
void fake_in_reclaim(void (*callback)(void *data), void *data);

/*
 * fake_test_begins() records the running test. While the test runs, any thread
 * can make it fail with fake_test_fails().
 */
void fake_test_begins(void);
void fake_test_fails(const char *file, int line, const char *text);

/* Kernel threads. */
struct task_struct *fake_thread_start(int (*run)(void *data), void *data);
void fake_thread_join(struct task_struct *task);

#endif /* PEERMEM_KUNIT_FAKES_H */
