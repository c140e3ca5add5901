/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Wrappers of C interfaces that differ between kernels. Distributions backport
 * interfaces to older kernels, so this file checks no version number.
 *
 * Before the module's C files are compiled, rust-bindings/probe.sh compiles
 * each line of this file that begins with PROBE, as the body of a function with
 * the parameters "void *p" and "unsigned long n". The probe succeeds if the
 * line compiles and the kernel exports every function that the line calls. If
 * the probe succeeds, compat-found.h defines PEERMEM_HAS_ plus the name in the
 * line. After all probes, this file is compiled alone. If no variant fits the
 * kernel, this step ends the build with an error message. The compiler does not
 * check an unused macro. All variants are therefore functions, except macros
 * that compile with every kernel.
 *
 * If PEERMEM_NO_GPL_ONLY is set, the module uses no function that the kernel
 * exports to GPL modules only. Otherwise the kernel would not let the module
 * use the proprietary nvidia.ko. A function that only GPL modules may use
 * counts as missing. If there is no other variant, the module works without the
 * function.
 *
 * To support another variant of an interface, add a PROBE line and an
 * implementation for each result. If the interface is a macro in every kernel
 * that has it, an #ifdef is enough. docs/kernels.md lists the variants that
 * each kernel has.
 */
#ifndef PEERMEM_COMPAT_H
#define PEERMEM_COMPAT_H

#include <linux/anon_inodes.h>
#include <linux/build_bug.h>
#include <linux/debugfs.h>
#include <linux/delay.h>
#include <linux/device.h>
#include <linux/dma-mapping.h>
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/iommu.h>
#include <linux/kernel.h>
#include <linux/kernfs.h>
#include <linux/kobject.h>
#include <linux/ktime.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/sched.h>
#include <linux/sysfs.h>
#include <linux/timekeeping.h>
#include <linux/trace_events.h>
#include <linux/types.h>
#include <linux/uaccess.h>
/* Since 5.10. Older kernels declare its functions in linux/dma-mapping.h. */
#if __has_include("linux/dma-map-ops.h")
#include <linux/dma-map-ops.h>
#endif

/* Probes are compiled with only the lines above this comment. */
#ifndef PEERMEM_PROBE

#ifndef PEERMEM_FOUND
#include <compat-found.h>
#endif

#ifndef static_assert
#define static_assert(condition, ...) _Static_assert(condition, #condition)
#endif

/* On kernels without PF_IO_WORKER, io_uring workers are kernel threads. */
#ifndef PF_IO_WORKER
#define PF_IO_WORKER	0
#endif

#ifndef VM_ACCESS_FLAGS
#define VM_ACCESS_FLAGS	(VM_READ | VM_WRITE | VM_EXEC)
#endif

#ifndef PCI_STD_NUM_BARS
#define PCI_STD_NUM_BARS	6
#endif

/* PROBE access_ok: n = access_ok((void __user *)n, n); */
static inline bool compat_access_ok(unsigned long addr)
{
#ifdef PEERMEM_HAS_ACCESS_OK
	return access_ok((void __user *)addr, 1);
#else
	return access_ok(VERIFY_READ, (void __user *)addr, 1);
#endif
}

/* PROBE mmap_lock: if (mmap_read_trylock(p)) mmap_read_unlock(p); */
static inline bool compat_mmap_trylock(struct mm_struct *mm)
{
#ifdef PEERMEM_HAS_MMAP_LOCK
	return mmap_read_trylock(mm);
#else
	return down_read_trylock(&mm->mmap_sem);
#endif
}

static inline void compat_mmap_unlock(struct mm_struct *mm)
{
#ifdef PEERMEM_HAS_MMAP_LOCK
	mmap_read_unlock(mm);
#else
	up_read(&mm->mmap_sem);
#endif
}

/* portable/shim.c uses the result of this probe. */
/* PROBE fsleep: fsleep(n); */

/*
 * Returns the monotonic time in microseconds. The coarse clock, which replaces
 * a missing ktime_get(), has the monotonic time of the last tick.
 */
/* PROBE ktime_get: ktime_get(); */
static inline u64 compat_microseconds(void)
{
#ifdef PEERMEM_HAS_KTIME_GET
	return ktime_to_us(ktime_get());
#else
	struct timespec64 now;

	ktime_get_coarse_ts64(&now);
	return timespec64_to_ns(&now) / NSEC_PER_USEC;
#endif
}

/* Without kset_find_obj(), the module cannot find other modules. */
/* PROBE kset_find_obj: kset_find_obj(p, p); */
#ifndef PEERMEM_HAS_KSET_FIND_OBJ
#define kset_find_obj(...)	NULL
#endif

/* Opens an anonymous file. Returns the file, or an error pointer. */
/* PROBE anon_inode: anon_inode_getfile(p, p, p, 0); */
static inline struct file *compat_anon_file(const char *name,
					    const struct file_operations *fops,
					    void *data)
{
#ifdef PEERMEM_HAS_ANON_INODE
	return anon_inode_getfile(name, fops, data, O_RDONLY);
#else
	return ERR_PTR(-EOPNOTSUPP);
#endif
}

/*
 * The next two probes guard all of trace.c and memory_peers.c. If the first
 * probe fails, the module has no tracepoints. If the second probe fails, the
 * module has no /sys/kernel/mm/memory_peers of its own.
 */
/* PROBE tracepoints: *(void **)p = trace_event_reg; */
/* PROBE memory_peers: kernfs_put(kernfs_find_and_get(kernel_kobj->sd, p)); *(void **)p = kobject_create_and_add(p, p); n = sysfs_create_group(p, p); */

/*
 * Folders and files for administrators: in debugfs, or in /proc if the module
 * cannot use debugfs. Without CONFIG_DEBUG_FS, the functions of debugfs exist
 * and do nothing. PDE_DATA() has been in lower case since 5.17.
 */
/* PROBE debugfs: BUILD_BUG_ON(!IS_ENABLED(CONFIG_DEBUG_FS)); debugfs_create_file(p, 0, debugfs_create_dir(p, p), p, (struct file_operations *)p); debugfs_remove(p); */
/* PROBE pde_data: *(void **)p = pde_data(p); */
#ifndef PEERMEM_HAS_DEBUGFS
static inline void *compat_proc_data(const struct inode *inode)
{
#ifdef PEERMEM_HAS_PDE_DATA
	return pde_data(inode);
#else
	return PDE_DATA(inode);
#endif
}
#endif

/*
 * Returns true for a page of peer-to-peer DMA memory whose pagemap lies between
 * @first and @last. The reference to the pagemap is dropped before the return:
 * the pagemap's driver may remove the pagemap at any time, and the removal
 * waits for the reference. nr_range counts the ranges that were already added.
 * While the first range of a pagemap is being added, nr_range is still 0. The
 * loop therefore always checks the first range.
 *
 * On kernels without FOLL_PCI_P2PDMA, processes have no peer-to-peer DMA
 * memory. dma_map_resource() of these kernels may refuse all memory that has a
 * struct page.
 */
/* PROBE p2pdma: n = MEMORY_DEVICE_PCI_P2PDMA + FOLL_PCI_P2PDMA; */
/* PROBE pagemap: *(void **)p = get_dev_pagemap; put_dev_pagemap(p); */
/* PROBE pagemap_of_pfn: get_dev_pagemap(n); */
/* PROBE pagemap_ranges: struct dev_pagemap *m = p; m->ranges[m->nr_range].end = n; */
static inline bool compat_is_p2pdma(unsigned long pfn, u64 first, u64 last)
{
#if defined(PEERMEM_HAS_P2PDMA) && defined(PEERMEM_HAS_PAGEMAP) && \
	defined(PEERMEM_HAS_PAGEMAP_RANGES)
#ifdef PEERMEM_HAS_PAGEMAP_OF_PFN
	struct dev_pagemap *pgmap = get_dev_pagemap(pfn);
#else
	struct dev_pagemap *pgmap = get_dev_pagemap(pfn, NULL);
#endif
	bool ret;
	int i = 0;

	if (!pgmap)
		return false;
	ret = pgmap->type == MEMORY_DEVICE_PCI_P2PDMA;
	do {
		ret = ret && pgmap->ranges[i].start >= first &&
		      pgmap->ranges[i].end <= last;
	} while (++i < pgmap->nr_range);
	put_dev_pagemap(pgmap);
	return ret;
#else
	return false;
#endif
}

/*
 * Returns true if @pfn has a struct page. Returns @unknown if the module cannot
 * call pfn_valid(). On 5.10, pfn_valid() calls rcu_read_unlock_strict(), which
 * is for GPL modules only.
 */
/* PROBE pfn_valid: n = pfn_valid(n); */
static inline bool compat_has_page(unsigned long pfn, bool unknown)
{
#ifdef PEERMEM_HAS_PFN_VALID
	return pfn_valid(pfn);
#else
	return unknown;
#endif
}

/*
 * Several registrations may share the same memory, each with its own mapping.
 * CONFIG_DMA_API_DEBUG reports more than eight mappings as a leak, unless
 * DMA_ATTR_DEBUGGING_IGNORE_CACHELINES is set. Kernels without this flag also
 * warn of the second mapping, unless DMA_ATTR_SKIP_CPU_SYNC is set. A BAR needs
 * no cache synchronization, so DMA_ATTR_SKIP_CPU_SYNC is right for a BAR.
 */
#ifdef DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#define COMPAT_BAR_ATTRS	DMA_ATTR_DEBUGGING_IGNORE_CACHELINES
#else
#define COMPAT_BAR_ATTRS	DMA_ATTR_SKIP_CPU_SYNC
#endif

/*
 * Maps @len bytes of a BAR, which may have struct pages, for @dev.
 * dma_map_resource() refuses memory with struct pages on 5.10, and also on 7.0
 * if CONFIG_DMA_API_DEBUG is set. The refused memory includes a BAR's
 * peer-to-peer DMA memory.
 */
/* PROBE dma_map_phys: dma_map_phys(p, n, n, DMA_BIDIRECTIONAL, DMA_ATTR_MMIO); */
/* PROBE dma_unmap_phys: dma_unmap_phys(p, n, n, DMA_BIDIRECTIONAL, DMA_ATTR_MMIO); */
static inline dma_addr_t compat_map_bar(struct device *dev, phys_addr_t addr,
					size_t len, unsigned long attrs)
{
#if defined(PEERMEM_HAS_DMA_MAP_PHYS) && defined(PEERMEM_HAS_DMA_UNMAP_PHYS)
	return dma_map_phys(dev, addr, len, DMA_BIDIRECTIONAL,
			    DMA_ATTR_MMIO | attrs);
#else
	return dma_map_resource(dev, addr, len, DMA_BIDIRECTIONAL, attrs);
#endif
}

static inline void compat_unmap_bar(struct device *dev, dma_addr_t dma,
				    size_t len, unsigned long attrs)
{
#if defined(PEERMEM_HAS_DMA_MAP_PHYS) && defined(PEERMEM_HAS_DMA_UNMAP_PHYS)
	dma_unmap_phys(dev, dma, len, DMA_BIDIRECTIONAL, DMA_ATTR_MMIO | attrs);
#else
	dma_unmap_resource(dev, dma, len, DMA_BIDIRECTIONAL, attrs);
#endif
}

/*
 * Returns true if DMA addresses of @dev are physical addresses plus an offset.
 */
/* PROBE dma_range_map: ((struct device *)p)->dma_range_map = NULL; */
static inline bool compat_has_dma_offset(struct device *dev)
{
#ifdef PEERMEM_HAS_DMA_RANGE_MAP
	return dev->dma_range_map;
#else
	return dev->dma_pfn_offset;
#endif
}

/*
 * Returns true if an IOMMU translates the addresses of @dev. Returns @unknown
 * if the module cannot call iommu_get_domain_for_dev().
 */
/* PROBE iommu_domain: *(void **)p = iommu_get_domain_for_dev(p); */
static inline bool compat_iommu_translates(struct device *dev, bool unknown)
{
#ifdef PEERMEM_HAS_IOMMU_DOMAIN
	struct iommu_domain *domain = iommu_get_domain_for_dev(dev);

	return domain && domain->type != IOMMU_DOMAIN_IDENTITY;
#else
	return unknown;
#endif
}

/*
 * Returns the size to which the DMA API rounds mappings for @dev, or a larger
 * size. Returns 1 if the DMA API does not round. The size is that of an IOMMU
 * page, and is no larger than a CPU page, as init_iova_domain() enforces.
 */
static inline unsigned long compat_dma_granule(struct device *dev)
{
#ifdef PEERMEM_HAS_IOMMU_DOMAIN
	struct iommu_domain *domain = iommu_get_domain_for_dev(dev);

	if (!domain || domain->type == IOMMU_DOMAIN_IDENTITY ||
	    !domain->pgsize_bitmap)
		return 1;
	return BIT(__ffs(domain->pgsize_bitmap));
#else
	return PAGE_SIZE;
#endif
}

/*
 * I/O virtual address (IOVA) ranges. A kernel without the functions below
 * cannot allocate a range, and the module maps each range of memory separately.
 * The macros replace the functions on such a kernel. The module then calls only
 * dma_iova_try_alloc().
 */
struct dma_iova_state;
/* PROBE iova_alloc: dma_iova_try_alloc(p, p, 0, n); dma_iova_free(p, p); */
/* PROBE iova_link: dma_iova_link(p, p, n, n, n, DMA_BIDIRECTIONAL, DMA_ATTR_MMIO); */
/* PROBE iova_sync: dma_iova_sync(p, p, n, n); */
/* PROBE iova_unlink: dma_iova_unlink(p, p, n, n, DMA_BIDIRECTIONAL, DMA_ATTR_MMIO); */
#if !defined(PEERMEM_HAS_IOVA_ALLOC) || !defined(PEERMEM_HAS_IOVA_LINK) || \
	!defined(PEERMEM_HAS_IOVA_SYNC) || !defined(PEERMEM_HAS_IOVA_UNLINK)
#define dma_iova_try_alloc(...)	false
#define dma_iova_link(...)	(-EOPNOTSUPP)
#define dma_iova_sync(...)	(-EOPNOTSUPP)
#define dma_iova_unlink(...)	((void)0)
#define dma_iova_free(...)	((void)0)
#endif

#endif /* PEERMEM_PROBE */
#endif /* PEERMEM_COMPAT_H */
