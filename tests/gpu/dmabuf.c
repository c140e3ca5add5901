// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Exports GPU memory as dma-bufs, as nvidia.ko does (kernel-open/nvidia/
 * nv-dmabuf.c).
 *
 * The exporter has neither pin() nor move_notify(). Memory has a fixed place in
 * BAR1 while it is mapped, and an export is never revoked. The memory and the
 * GPU live until the last descriptor and the last mapping are gone, even if the
 * process has freed the memory. The importer gets -ENOMEM for each mapping that
 * fails.
 */
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "nvidia.h"
#ifdef STANDIN_BAR1
#include "nvidia/bar1.h"
#else
#define bar1_get	vidmem_pin
#define bar1_put	vidmem_unpin
#endif

#if KERNEL_VERSION(6, 13, 0) <= LINUX_VERSION_CODE
MODULE_IMPORT_NS("DMA_BUF");
#elif KERNEL_VERSION(5, 16, 0) <= LINUX_VERSION_CODE
MODULE_IMPORT_NS(DMA_BUF);
#endif

static bool dmabuf = true;
module_param(dmabuf, bool, 0644);
MODULE_PARM_DESC(dmabuf, "Y: memory can be exported as a dma-buf; N: memory cannot be exported, as with an older driver");

static bool dmabuf_topology_deny;
module_param(dmabuf_topology_deny, bool, 0644);
MODULE_PARM_DESC(dmabuf_topology_deny, "Y: no device can reach an exported dma-buf");

/* Maximum number of allocations in one dma-buf. */
#define MAX_PARTS	1024

/**
 * struct part - the exported bytes of one allocation
 * @mem: the memory, referenced
 * @offset: start in @mem, in bytes
 * @length: number of bytes
 */
struct part {
	struct vidmem *mem;
	u64 offset;
	u64 length;
};

/**
 * struct export - an exported range
 * @gpu: the GPU, in use until the release
 * @lock: protects @mapped
 * @mapped: number of mappings. The memory has its place in BAR1 while @mapped is not 0.
 * @count: number of parts
 * @part: the parts, adjacent in the process's address space
 */
struct export {
	struct gpu *gpu;
	struct mutex lock;
	unsigned int mapped;
	u32 count;
	struct part part[];
};

static u32 first_page(const struct part *part)
{
	return part->offset / STANDIN_PAGE_SIZE;
}

static u32 pages_of(const struct part *part)
{
	u64 end = part->offset + part->length;

	return DIV_ROUND_UP(end, STANDIN_PAGE_SIZE) - first_page(part);
}

/* Releases the places of the first @count parts in BAR1. */
static void put_places(struct export *export, u32 count)
{
	struct part *part;

	if (WARN_ON(api_lock()))
		return;
	while (count--) {
		part = &export->part[count];
		bar1_put(part->mem, first_page(part), pages_of(part));
	}
	api_unlock();
}

static int get_places(struct export *export)
{
	struct part *part;
	int ret;
	u32 i;

	ret = api_lock();
	if (ret)
		return ret;
	for (i = 0; !ret && i < export->count; i++) {
		part = &export->part[i];
		ret = bar1_get(part->mem, first_page(part), pages_of(part));
	}
	api_unlock();
	/* The part that failed has no place in BAR1. */
	if (ret)
		put_places(export, i - 1);
	return ret;
}

/*
 * Sets @phys to the address of byte @at of a part. Returns the number of bytes
 * that are contiguous from there, at most @max.
 */
static u64 run_at(const struct part *part, u64 at, u64 max, phys_addr_t *phys)
{
	u64 offset = part->offset + at, end = part->offset + part->length;
	u32 page = offset / STANDIN_PAGE_SIZE;
	phys_addr_t start = vidmem_phys(part->mem, page);
	u64 run = STANDIN_PAGE_SIZE;

	while ((page * (u64)STANDIN_PAGE_SIZE) + run < end &&
	       run - offset % STANDIN_PAGE_SIZE < max &&
	       vidmem_phys(part->mem, page + run / STANDIN_PAGE_SIZE) ==
	       start + run)
		run += STANDIN_PAGE_SIZE;
	*phys = start + offset % STANDIN_PAGE_SIZE;
	return min3(run - offset % STANDIN_PAGE_SIZE, end - offset, max);
}

/*
 * Walks over the entries of the scatter list. Counts the entries if @sgt is
 * NULL, else maps them. Returns the number of entries, or a negative errno with
 * sgt->nents entries mapped.
 */
static int walk(struct export *export, struct device *dev, struct sg_table *sgt)
{
	u64 max = ALIGN_DOWN(dma_get_max_seg_size(dev), PAGE_SIZE);
	struct scatterlist *sg = sgt ? sgt->sgl : NULL;
	struct gpu *gpu = export->gpu;
	phys_addr_t phys;
	dma_addr_t addr;
	int entries = 0;
	u64 at, length;
	u32 i;

	if (!max)
		return -EINVAL;
	for (i = 0; i < export->count; i++) {
		for (at = 0; at < export->part[i].length; at += length) {
			length = run_at(&export->part[i], at, max, &phys);
			entries++;
			if (!sgt)
				continue;
			if (!gpu_can_map(gpu, phys, length))
				return -EIO;
			addr = dma_map_resource(dev, phys, length,
						DMA_BIDIRECTIONAL, BAR_ATTRS);
			if (dma_mapping_error(dev, addr))
				return -EIO;
			sg_set_page(sg, NULL, length, 0);
			sg_dma_address(sg) = addr;
			sg_dma_len(sg) = length;
			sgt->nents = entries;
			sg = sg_next(sg);
			cond_resched();
		}
	}
	return entries;
}

static void unmap_entries(struct device *dev, struct sg_table *sgt)
{
	struct scatterlist *sg;
	unsigned int i;

	for_each_sg(sgt->sgl, sg, sgt->nents, i) {
		dma_unmap_resource(dev, sg_dma_address(sg), sg_dma_len(sg),
				   DMA_BIDIRECTIONAL, BAR_ATTRS);
		cond_resched();
	}
}

static struct sg_table *map_entries(struct export *export, struct device *dev)
{
	int entries = walk(export, dev, NULL);
	struct sg_table *sgt;

	if (entries < 0)
		return NULL;
	sgt = kzalloc_obj(*sgt);
	if (!sgt)
		return NULL;
	if (sg_alloc_table(sgt, entries, GFP_KERNEL))
		goto free_sgt;
	sgt->nents = 0;
	if (walk(export, dev, sgt) == entries)
		return sgt;
	unmap_entries(dev, sgt);
	sg_free_table(sgt);
free_sgt:
	kfree(sgt);
	return NULL;
}

static int dmabuf_attach(struct dma_buf *buf, struct dma_buf_attachment *attach)
{
	if (READ_ONCE(dmabuf_topology_deny))
		return -ENOTSUPP;
	/* This importer needs struct pages, and a BAR has none. */
	if (attach->importer_ops && !attach->peer2peer)
		return -ENOTSUPP;
	return 0;
}

static struct sg_table *dmabuf_map(struct dma_buf_attachment *attach,
				   enum dma_data_direction direction)
{
	struct export *export = attach->dmabuf->priv;
	struct sg_table *sgt;

	guard(mutex)(&export->lock);
	if (fail_here(FAIL_DMABUF_MAP))
		return NULL;
	if (!export->mapped && get_places(export))
		return NULL;
	sgt = map_entries(export, attach->dev);
	if (sgt) {
		export->mapped++;
		count(DMABUF_MAPS_LIVE);
	} else if (!export->mapped) {
		put_places(export, export->count);
	}
	return sgt;
}

static void dmabuf_unmap(struct dma_buf_attachment *attach,
			 struct sg_table *sgt,
			 enum dma_data_direction direction)
{
	struct export *export = attach->dmabuf->priv;

	guard(mutex)(&export->lock);
	unmap_entries(attach->dev, sgt);
	sg_free_table(sgt);
	kfree(sgt);
	if (!--export->mapped)
		put_places(export, export->count);
	uncount(DMABUF_MAPS_LIVE);
}

static void export_free(struct export *export)
{
	while (export->count)
		vidmem_put(export->part[--export->count].mem);
	gpu_unuse(export->gpu);
	gpu_put(export->gpu);
	mutex_destroy(&export->lock);
	kvfree(export);
}

static void dmabuf_release(struct dma_buf *buf)
{
	struct export *export = buf->priv;

	WARN_ON(export->mapped);
	uncount(DMABUFS_LIVE);
	export_free(export);
}

static int dmabuf_mmap(struct dma_buf *buf, struct vm_area_struct *vma)
{
	return -ENOTSUPP;
}

static const struct dma_buf_ops dmabuf_ops = {
	.attach		= dmabuf_attach,
	.map_dma_buf	= dmabuf_map,
	.unmap_dma_buf	= dmabuf_unmap,
	.release	= dmabuf_release,
	.mmap		= dmabuf_mmap,
};

/* Finds the parts of a range of the calling process. Caller holds mem_lock. */
static int find_parts(struct export *export, u64 va, u64 length)
{
	struct alloc *alloc;
	struct part *part;

	if (export->gpu->removing)
		return -ENODEV;
	while (length) {
		alloc = memory_find(current->tgid, va);
		if (!alloc || alloc->gpu != export->gpu ||
		    export->count == MAX_PARTS)
			return -EINVAL;
		if (alloc->vidmem->coherent)
			return -EOPNOTSUPP;
		part = &export->part[export->count++];
		part->mem = vidmem_get(alloc->vidmem);
		part->offset = va - alloc->va;
		part->length = min(length, alloc->length - part->offset);
		va += part->length;
		length -= part->length;
	}
	return 0;
}

static struct dma_buf *export_range(struct gpu *gpu, u64 va, u64 length)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct export *export;
	struct dma_buf *buf;
	int ret;

	if (!READ_ONCE(dmabuf))
		return ERR_PTR(-EOPNOTSUPP);
	if (!length || !PAGE_ALIGNED(va) || !PAGE_ALIGNED(length) ||
	    va + length < va)
		return ERR_PTR(-EINVAL);
	ret = fail_here(FAIL_DMABUF_EXPORT);
	if (ret)
		return ERR_PTR(ret);

	export = kvzalloc(struct_size(export, part, MAX_PARTS), GFP_KERNEL);
	if (!export)
		return ERR_PTR(-ENOMEM);
	mutex_init(&export->lock);
	export->gpu = gpu_get(gpu);
	gpu_use(gpu);
	mutex_lock(&mem_lock);
	ret = find_parts(export, va, length);
	mutex_unlock(&mem_lock);
	if (ret) {
		export_free(export);
		return ERR_PTR(ret);
	}

	info.ops = &dmabuf_ops;
	info.size = length;
	info.flags = O_RDWR | O_CLOEXEC;
	info.priv = export;
	buf = dma_buf_export(&info);
	if (IS_ERR(buf))
		export_free(export);
	else
		count(DMABUFS_LIVE);
	return buf;
}

/**
 * dmabuf_ioctl - export a range of the calling process's memory
 * @gpu: GPU of the memory
 * @argp: struct standin_export
 *
 * Return: 0 or a negative errno.
 */
long dmabuf_ioctl(struct gpu *gpu, void __user *argp)
{
	struct standin_export arg;
	struct dma_buf *buf;
	int fd;

	if (copy_from_user(&arg, argp, sizeof(arg)))
		return -EFAULT;
	if (arg.flags)
		return -EINVAL;
	buf = export_range(gpu, arg.va, arg.length);
	count(DMABUF_EXPORT);
	if (IS_ERR(buf))
		return PTR_ERR(buf);

	fd = get_unused_fd_flags(O_CLOEXEC);
	arg.fd = fd;
	if (fd >= 0 && copy_to_user(argp, &arg, sizeof(arg))) {
		put_unused_fd(fd);
		fd = -EFAULT;
	}
	if (fd < 0) {
		dma_buf_put(buf);
		return fd;
	}
	fd_install(fd, buf->file);
	return 0;
}

/**
 * dmabuf_is_supported - check if memory can be exported
 *
 * Return: false to imitate a driver that cannot export memory.
 */
bool dmabuf_is_supported(void)
{
	return READ_ONCE(dmabuf);
}
