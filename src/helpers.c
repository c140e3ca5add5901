// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * What the kernel has as macros and inline functions, and the kernel crate has
 * no helper for: as rust/helpers of the kernel.
 */

#include <linux/anon_inodes.h>
#include <linux/bitops.h>
#include <linux/cred.h>
#include <linux/debugfs.h>
#include <linux/dma-mapping.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/iommu.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/ptrace.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/sched/task_stack.h>
#include <linux/sizes.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include <asm/syscall.h>

#include "compat.h"
#include "helpers.h"

/*
 * Locks of statics: Rust has them made at run time alone. sync.rs wraps all.
 */
DEFINE_SPINLOCK(peermem_registry_lock);
DEFINE_SPINLOCK(peermem_history_lock);
DEFINE_MUTEX(peermem_quota_lock);
DEFINE_MUTEX(peermem_callbacks_lock);
/* Taken in dma_map with ib_core's mapping_lock held; below it are the PCI core's. */
DEFINE_MUTEX(peermem_bars_lock);
DECLARE_RWSEM(peermem_put_rwsem);

bool peermem_is_killed(void)
{
	return fatal_signal_pending(current);
}

/* Real user ID of the calling process, as the initial user namespace has it. */
unsigned int peermem_user(void)
{
	return __kuid_val(current_uid());
}

/* Another thread may write a new name meanwhile: then it is some of both. */
void peermem_comm(char *comm)
{
	memcpy(comm, current->comm, TASK_COMM_LEN);
}

/* A kernel thread, or a worker of io_uring, is in no system call of its own. */
bool peermem_returns_to_user(void)
{
	return !(current->flags & (PF_KTHREAD | PF_IO_WORKER | PF_EXITING));
}

/*
 * Has release() of @ops called, with @data as private_data of its file, when
 * the calling thread returns from its system call: fput() defers it to there.
 * If the thread exits first, a kernel thread calls it. The file keeps the
 * module of @ops until release() has returned. False if there is no file.
 */
bool peermem_at_return(const struct file_operations *ops, void *data)
{
	struct file *file = anon_inode_getfile("[nvidia_peermem]", ops, data,
					       O_RDONLY);

	if (IS_ERR(file))
		return false;
	fput(file);
	return true;
}

/* In release() of peermem_at_return(): did the system call succeed? */
bool peermem_syscall_succeeded(void)
{
	return peermem_returns_to_user() &&
	       !syscall_get_error(current, current_pt_regs());
}

bool peermem_is_user_address(unsigned long addr)
{
	return access_ok((const void __user *)addr, 1);
}

/* Lets others run, between two steps of what takes long. */
void peermem_cond_resched(void)
{
	cond_resched();
}

unsigned int peermem_max_segment(struct pci_dev *pdev)
{
	return dma_get_max_seg_size(&pdev->dev);
}

/* Where it is, in one number: see PciAddress of device.rs. */
u64 peermem_pci_address(struct pci_dev *pdev)
{
	return (u64)(u32)pci_domain_nr(pdev->bus) << 16 |
	       PCI_DEVID(pdev->bus->number, pdev->devfn);
}

/*
 * Returns true for a page of peer-to-peer DMA memory whose pagemap lies between
 * @first and @last. The pagemap is pinned meanwhile and no longer: its driver
 * may remove it at any time, and waits for the pin.
 */
static bool is_p2pdma(unsigned long pfn, u64 first, u64 last)
{
	struct dev_pagemap *pgmap = compat_get_pagemap(pfn);
	bool ret;

	if (!pgmap)
		return false;
	ret = compat_is_p2pdma(pgmap, first, last);
	put_dev_pagemap(pgmap);
	return ret;
}

/*
 * Returns true if any page of @len bytes from @addr on has a struct page that
 * makes it other than memory of the BAR between @first and @last. A BAR has
 * struct pages only where a driver made them, in steps of a subsection of
 * memory: nvidia-uvm makes the whole BAR peer-to-peer DMA memory on hosts that
 * are set up for GPUDirect Storage.
 */
bool peermem_has_struct_page(u64 addr, u64 len, u64 first, u64 last)
{
	u64 end = addr + len - 1;

	do {
		unsigned long pfn = PHYS_PFN(addr);

		if (pfn_valid(pfn) && !is_p2pdma(pfn, first, last))
			return true;
		/* 0 behind the last of all addresses. */
		addr = round_down(addr, SZ_2M) + SZ_2M;
	} while (addr && addr <= end);
	return false;
}

/*
 * Any number of registrations may have the same memory, each with a mapping of
 * its own. CONFIG_DMA_API_DEBUG takes more than eight for a leak unless told.
 */
#ifdef DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#define BAR_ATTRS	DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#else
#define BAR_ATTRS	0
#endif

int peermem_bar_map(struct pci_dev *pdev, u64 addr, size_t len, u64 *dma)
{
	dma_addr_t mapped = compat_map_bar(&pdev->dev, addr, len, BAR_ATTRS);

	if (dma_mapping_error(&pdev->dev, mapped))
		return -EIO;
	*dma = mapped;
	return 0;
}

void peermem_bar_unmap(struct pci_dev *pdev, u64 dma, size_t len)
{
	compat_unmap_bar(&pdev->dev, dma, len, BAR_ATTRS);
}

/*
 * Does nothing translate what the device says? Then a mapping gives it nothing
 * that it could not reach before.
 */
bool peermem_is_direct(struct pci_dev *pdev)
{
	struct device *dev = &pdev->dev;
	struct iommu_domain *domain = iommu_get_domain_for_dev(dev);

	return !get_dma_ops(dev) && !compat_has_dma_offset(dev) &&
	       (!domain || domain->type == IOMMU_DOMAIN_IDENTITY);
}

/*
 * The DMA API rounds to whole pages of an IOMMU's. Does it map exactly what it
 * is asked for, where @bits has each bit of each address and length?
 */
bool peermem_maps_exactly(struct pci_dev *pdev, u64 bits)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(&pdev->dev);

	return !domain || domain->type == IOMMU_DOMAIN_IDENTITY ||
	       !domain->pgsize_bitmap ||
	       !(bits & (BIT(__ffs(domain->pgsize_bitmap)) - 1));
}

/* Of no physical address: what is linked begins at a page of the IOMMU's. */
bool peermem_iova_alloc(struct pci_dev *pdev, struct dma_iova_state *state,
			size_t size)
{
	return compat_iova_alloc(&pdev->dev, state, size);
}

int peermem_iova_link(struct pci_dev *pdev, struct dma_iova_state *state,
		      u64 addr, size_t offset, size_t len)
{
	return compat_iova_link(&pdev->dev, state, addr, offset, len);
}

int peermem_iova_sync(struct pci_dev *pdev, struct dma_iova_state *state,
		      size_t offset, size_t len)
{
	return compat_iova_sync(&pdev->dev, state, offset, len);
}

/* dma_iova_destroy() does for what is linked from the beginning on alone. */
void peermem_iova_unlink(struct pci_dev *pdev, struct dma_iova_state *state,
			 size_t offset, size_t len)
{
	compat_iova_unlink(&pdev->dev, state, offset, len);
}

void peermem_iova_free(struct pci_dev *pdev, struct dma_iova_state *state)
{
	compat_iova_free(&pdev->dev, state);
}

/* Without debugfs these do nothing. */

struct dentry *peermem_debugfs_dir(const char *name)
{
	return debugfs_create_dir(name, NULL);
}

/* The module stays as long as anybody has the file open. */
void peermem_debugfs_file(const char *name, umode_t mode, struct dentry *dir,
			  const struct file_operations *ops)
{
	debugfs_create_file(name, mode, dir, NULL, ops);
}

void peermem_debugfs_remove(struct dentry *dir)
{
	debugfs_remove(dir);
}
