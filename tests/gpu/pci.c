// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The core of the stand-in GPU: a PCI driver for the BAR of QEMU's
 * ivshmem-plain device, a character device for each GPU, and the order in which
 * everything starts and stops.
 */
#include <linux/io.h>
#include <linux/idr.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci-p2pdma.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "nvidia.h"

#define NVIDIA_MAJOR	195
#define BAR		2

static LIST_HEAD(gpus);
static DEFINE_MUTEX(gpus_lock);
static DEFINE_IDA(minors);

/* Returns the GPU, referenced, or NULL. */
struct gpu *gpu_get_by_uuid(const u8 *uuid)
{
	struct gpu *gpu;

	guard(mutex)(&gpus_lock);
	list_for_each_entry(gpu, &gpus, node)
		if (!memcmp(gpu->uuid, uuid, sizeof(gpu->uuid)))
			return gpu_get(gpu);
	return NULL;
}

/* Counts a use of a GPU. The first use starts the GPU. */
void gpu_open(struct gpu *gpu)
{
	guard(mutex)(&mem_lock);
	gpu->opens++;
	gpu->stopped = false;
}

/*
 * Releases one use of a GPU, no matter which client counted that use. Stops the
 * GPU after the last use.
 */
void gpu_close(struct gpu *gpu)
{
	guard(mutex)(&mem_lock);
	if (gpu->opens && !--gpu->opens)
		gpu->stopped = true;
}

/*
 * Counts a persistent pin or a dma-buf. The GPU cannot be unbound until
 * gpu_unuse().
 */
void gpu_use(struct gpu *gpu)
{
	gpu_open(gpu);
	scoped_guard(mutex, &mem_lock)
		WRITE_ONCE(gpu->refs, gpu->refs + 1);
	count(DEVICE_REFS);
}

/*
 * Releases the use of a persistent pin or a dma-buf. Like the real driver, does
 * not check who counted the use.
 */
void gpu_unuse(struct gpu *gpu)
{
	gpu_close(gpu);

	guard(mutex)(&mem_lock);
	if (WARN(!gpu->refs, "nvidia: the usage count of the GPU is 0 already\n")) {
		count(MISUSE);
		return;
	}
	WRITE_ONCE(gpu->refs, gpu->refs - 1);
	if (!gpu->refs)
		wake_up_all(&gpu->idle);
	uncount(DEVICE_REFS);
}

/* Lets every user open the device, as the real driver does. */
static char *devnode(const struct device *dev, umode_t *mode)
{
	if (mode)
		*mode = 0666;
	return NULL;
}

/*
 * Before 6.4 the kernel writes to the class. Before 6.2 the argument of
 * devnode() is not const.
 */
static struct class gpu_class = {
	.name		= "nvidia",
	.devnode	= (void *)devnode,
};

static void gpu_release(struct device *dev)
{
	struct gpu *gpu = container_of(dev, struct gpu, dev);

	bar_release_gpu(gpu);
	kfree(gpu);
}

static void make_uuid(struct gpu *gpu)
{
	static const u8 prefix[12] = "stand-in GPU";
	u32 where = pci_domain_nr(gpu->pdev->bus) << 16 | pci_dev_id(gpu->pdev);

	memcpy(gpu->uuid, prefix, sizeof(prefix));
	put_unaligned_be32(where, gpu->uuid + sizeof(prefix));
}

/* Struct pages of the BAR */

static bool p2pdma;

/*
 * Adds the struct pages, like nvidia-uvm when it starts on a GPU with static
 * BAR1.
 */
static int p2pdma_add(struct gpu *gpu)
{
	int ret;

	if (gpu->has_p2pdma)
		return 0;
	ret = pci_p2pdma_add_resource(gpu->pdev, BAR, 0, 0);
	gpu->has_p2pdma = !ret;
	return ret;
}

/*
 * Removes the struct pages, like nvidia-uvm when it stops. Waits for users of
 * the pagemap.
 */
static void p2pdma_remove(struct gpu *gpu)
{
	if (!gpu->has_p2pdma)
		return;
	gpu->has_p2pdma = false;
	devm_memunmap_pages(&gpu->pdev->dev,
			    page_pgmap(pfn_to_page(PHYS_PFN(gpu->bar_start))));
}

static struct dev_pagemap stray = {
	.type		= MEMORY_DEVICE_GENERIC,
	.nr_range	= 1,
};

static const char * const stray_names[] = {
	[0]				= "none",
	[MEMORY_DEVICE_PRIVATE]		= "private",
	[MEMORY_DEVICE_COHERENT]	= "coherent",
	[MEMORY_DEVICE_FS_DAX]		= "fs_dax",
	[MEMORY_DEVICE_GENERIC]		= "generic",
	[MEMORY_DEVICE_PCI_P2PDMA]	= "beyond",
};

static int stray_pages;

static void stray_remove(void)
{
	if (!stray_pages)
		return;
	/* The kernel can remove only the range that it has added. */
	if (stray_pages == MEMORY_DEVICE_PCI_P2PDMA)
		stray.range.end -= STANDIN_GRANULE;
	stray_pages = 0;
	stray.type = MEMORY_DEVICE_GENERIC;
	memunmap_pages(&stray);
}

/*
 * Adds generic struct pages, which have the fewest requirements. Nothing uses
 * the pages. Afterwards, only the pagemap is changed: it then claims another
 * type, or a range beyond the BAR, where other devices may be.
 */
static int stray_add(int type)
{
	struct gpu *gpu;
	void *mapped;

	if (!type)
		return 0;
	/* A GPU that was bound again is at the end of the list. */
	list_for_each_entry(gpu, &gpus, node)
		if (!gpu->minor)
			break;
	if (list_entry_is_head(gpu, &gpus, node) || gpu->has_p2pdma)
		return -EBUSY;
	stray.nr_range = 1;
	stray.range.start = gpu->bar_end + 1 - STANDIN_GRANULE;
	stray.range.end = gpu->bar_end;
	mapped = memremap_pages(&stray, numa_mem_id());
	if (IS_ERR(mapped))
		return PTR_ERR(mapped);
	if (type == MEMORY_DEVICE_PCI_P2PDMA)
		stray.range.end += STANDIN_GRANULE;
	stray.type = type;
	stray_pages = type;
	return 0;
}

static int p2pdma_set(const char *val, const struct kernel_param *kp)
{
	struct gpu *gpu;
	int ret = param_set_bool(val, kp);

	guard(mutex)(&gpus_lock);
	list_for_each_entry(gpu, &gpus, node) {
		if (ret)
			break;
		if (p2pdma)
			ret = p2pdma_add(gpu);
		else
			p2pdma_remove(gpu);
	}
	return ret;
}

static const struct kernel_param_ops p2pdma_ops = {
	.flags = KERNEL_PARAM_OPS_FL_NOARG,
	.set = p2pdma_set,
	.get = param_get_bool,
};

module_param_cb(p2pdma, &p2pdma_ops, &p2pdma, 0644);
MODULE_PARM_DESC(p2pdma, "Y: all of each BAR is peer-to-peer DMA memory, as nvidia-uvm makes it for GPUDirect Storage");

static int stray_set(const char *val, const struct kernel_param *kp)
{
	int type = sysfs_match_string(stray_names, val);

	if (type < 0)
		return type;
	guard(mutex)(&gpus_lock);
	stray_remove();
	return stray_add(type);
}

static int stray_get(char *buf, const struct kernel_param *kp)
{
	return sysfs_emit(buf, "%s\n", stray_names[READ_ONCE(stray_pages)]);
}

static const struct kernel_param_ops stray_ops = {
	.set = stray_set,
	.get = stray_get,
};

module_param_cb(stray_pages, &stray_ops, NULL, 0644);
MODULE_PARM_DESC(stray_pages, "struct pages for the last 2 MiB of nvidia0's BAR: none, private, coherent, fs_dax, generic, or beyond (peer-to-peer DMA memory that continues after the BAR)");

static int probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	u64 length = pci_resource_len(pdev, BAR);
	struct gpu *gpu;
	int ret;

	/* Shorter BARs belong to ivshmem devices with another purpose. */
	if (length < STANDIN_GRANULE)
		return -ENODEV;

	gpu = kzalloc_obj(*gpu);
	if (!gpu)
		return -ENOMEM;
	gpu->pdev = pdev;
	gpu->bar_start = pci_resource_start(pdev, BAR);
	gpu->bar_end = pci_resource_end(pdev, BAR);
	strscpy(gpu->pci, pci_name(pdev), sizeof(gpu->pci));
	make_uuid(gpu);
	init_waitqueue_head(&gpu->idle);

	device_initialize(&gpu->dev);
	gpu->dev.class = &gpu_class;
	gpu->dev.parent = &pdev->dev;
	gpu->dev.release = gpu_release;

	ret = bar_add_gpu(gpu);
	if (ret)
		goto put_gpu;

	ret = ida_alloc_max(&minors, STANDIN_MAX_GPUS - 1, GFP_KERNEL);
	if (ret < 0)
		goto put_gpu;
	gpu->minor = ret;
	gpu->dev.devt = MKDEV(NVIDIA_MAJOR, gpu->minor);
	ret = dev_set_name(&gpu->dev, "nvidia%u", gpu->minor);
	if (ret)
		goto free_minor;

	ret = pci_enable_device_mem(pdev);
	if (ret)
		goto free_minor;
	ret = pci_request_region(pdev, BAR, "nvidia");
	if (ret)
		goto disable;

	/*
	 * All mappings of the BAR are write-combined, including CPU mappings of
	 * user space, so that they have the same memory type. A BAR that has
	 * struct pages is mapped uncached, like by the real driver with
	 * RMForceDisableIomapWC.
	 */
	gpu->is_wc = !p2pdma;
	if (gpu->is_wc)
		ret = arch_io_reserve_memtype_wc(gpu->bar_start, length);
	else
		ret = p2pdma_add(gpu);
	if (ret)
		goto release_region;

	pci_set_drvdata(pdev, gpu);
	proc_add_gpu(gpu);
	mutex_lock(&gpus_lock);
	list_add_tail(&gpu->node, &gpus);
	mutex_unlock(&gpus_lock);

	cdev_init(&gpu->cdev, &memory_fops);
	gpu->cdev.owner = THIS_MODULE;
	ret = cdev_device_add(&gpu->cdev, &gpu->dev);
	if (ret)
		goto unlist;

	dev_info(&pdev->dev, "GPU-%pUb, BAR of %llu MiB, /dev/nvidia%u\n",
		 gpu->uuid, length >> 20, gpu->minor);
	return 0;

unlist:
	mutex_lock(&gpus_lock);
	list_del(&gpu->node);
	stray_remove();
	p2pdma_remove(gpu);
	mutex_unlock(&gpus_lock);
	proc_remove(gpu->proc);
	if (gpu->is_wc)
		arch_io_free_memtype_wc(gpu->bar_start, length);
release_region:
	pci_release_region(pdev, BAR);
disable:
	pci_disable_device(pdev);
free_minor:
	ida_free(&minors, gpu->minor);
put_gpu:
	gpu_put(gpu);
	return ret;
}

/*
 * Revokes memory that is in use, with callbacks, and waits for persistent pins
 * without a time limit. No new uses are allowed in the meantime, so the wait
 * ends.
 */
static void remove(struct pci_dev *pdev)
{
	struct gpu *gpu = pci_get_drvdata(pdev);

	cdev_device_del(&gpu->cdev, &gpu->dev);

	if (!WARN_ON(api_lock())) {
		mutex_lock(&mem_lock);
		gpu->removing = true;
		mutex_unlock(&mem_lock);
		api_unlock();
	}
	memory_free_all(gpu);
	wait_event_idle(gpu->idle, !READ_ONCE(gpu->refs));
	p2p_free_lost(gpu);

	mutex_lock(&gpus_lock);
	list_del(&gpu->node);
	stray_remove();
	p2pdma_remove(gpu);
	mutex_unlock(&gpus_lock);
	proc_remove(gpu->proc);
	if (gpu->is_wc)
		arch_io_free_memtype_wc(gpu->bar_start,
					gpu->bar_end - gpu->bar_start + 1);
	pci_release_region(pdev, BAR);
	pci_disable_device(pdev);
	ida_free(&minors, gpu->minor);
	gpu_put(gpu);
}

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_REDHAT_QUMRANET, 0x1110) },
	{ }
};
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver driver = {
	.name		= "nvidia",
	.id_table	= ids,
	.probe		= probe,
	.remove		= remove,
};

/*
 * Sets the taint of a proprietary module. The module loader then refuses the
 * stand-in's symbols to modules that use GPL-only symbols. The loader has
 * already resolved the GPL-only symbols that the stand-in itself uses. Like the
 * closed driver, the stand-in exports its symbols to all modules.
 */
static bool proprietary;
module_param(proprietary, bool, 0444);
MODULE_PARM_DESC(proprietary, "Y: other modules see a proprietary licence, like the closed driver's; N [default]");

static int __init nvidia_init(void)
{
	int ret;

	if (proprietary)
		set_bit(TAINT_PROPRIETARY_MODULE, &THIS_MODULE->taints);
	bar_init();
	ret = coherent_init();
	if (ret)
		return ret;
	ret = p2p_init();
	if (ret)
		goto exit_coherent;
	ret = memory_init();
	if (ret)
		goto exit_p2p;
	ret = debug_init();
	if (ret)
		goto exit_memory;
	ret = proc_init();
	if (ret)
		goto exit_debug;
	ret = class_register(&gpu_class);
	if (ret)
		goto exit_proc;
	ret = register_chrdev_region(MKDEV(NVIDIA_MAJOR, 0), STANDIN_MAX_GPUS,
				     "nvidia");
	if (ret)
		goto unregister_class;
	ret = pci_register_driver(&driver);
	if (ret)
		goto unregister_region;
	return 0;

unregister_region:
	unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, 0), STANDIN_MAX_GPUS);
unregister_class:
	class_unregister(&gpu_class);
exit_proc:
	proc_exit();
exit_debug:
	debug_exit();
exit_memory:
	memory_exit();
exit_p2p:
	p2p_exit();
exit_coherent:
	coherent_exit();
	return ret;
}

static void __exit nvidia_exit(void)
{
	pci_unregister_driver(&driver);
	unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, 0), STANDIN_MAX_GPUS);
	class_unregister(&gpu_class);
	proc_exit();
	debug_exit();
	memory_exit();
	p2p_exit();
	coherent_exit();
}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_DESCRIPTION("Stand-in for NVIDIA's driver, over a PCI BAR, for tests");
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(STANDIN_VERSION);
