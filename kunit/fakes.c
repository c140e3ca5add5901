// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The C side of fakes.rs: fake PCI devices, threads, and the few kernel macros
 * that Rust cannot use.
 */

#include <kunit/test.h>
#include <kunit/test-bug.h>
#include <linux/device.h>
#include <linux/dma-direct.h>
#include <linux/dma-map-ops.h>
#include <linux/iommu.h>
#include <linux/kthread.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/sched/mm.h>
#include <linux/sched/task.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "fakes.h"

/* --- devices ---------------------------------------------------------------- */

static struct pci_dev *nic;
static struct pci_dev *gpu;
static struct pci_dev *more[70];
/* Parent resource of every assigned BAR. */
static struct resource window;
static struct pci_bus bus = { .number = 0x81 };
static unsigned int steps;

static void pci_free(struct device *dev)
{
	kfree(to_pci_dev(dev));
}

static struct pci_dev *pci_new(const char *name, unsigned int devfn)
{
	struct pci_dev *pdev = kzalloc_obj(*pdev);

	if (!pdev)
		return NULL;
	device_initialize(&pdev->dev);
	pdev->dev.bus = &pci_bus_type;
	pdev->bus = &bus;
	pdev->devfn = devfn;
	pdev->dev.release = pci_free;
	pdev->dev.dma_parms = &pdev->dma_parms;
	if (dev_set_name(&pdev->dev, "%s", name)) {
		put_device(&pdev->dev);
		return NULL;
	}
	pdev->dev.kobj.state_in_sysfs = 1;
	return pdev;
}

static void pci_remove(struct pci_dev *pdev)
{
	if (!pdev)
		return;
	/*
	 * The device was never in sysfs, so the kernel must not remove it from
	 * sysfs.
	 */
	pdev->dev.kobj.state_in_sysfs = 0;
	put_device(&pdev->dev);
}

static void bar(struct pci_dev *pdev, int index, u64 start, u64 len,
		unsigned long flags, struct resource *parent)
{
	pdev->resource[index].start = start;
	pdev->resource[index].end = start + len - 1;
	pdev->resource[index].flags = flags;
	pdev->resource[index].parent = parent;
}

static struct pci_dev *gpu_new(void)
{
	struct pci_dev *pdev = pci_new("fake-gpu", PCI_DEVFN(2, 1));

	if (!pdev)
		return NULL;
	bar(pdev, 0, FAKE_IO_START, FAKE_SMALL_LEN, IORESOURCE_IO, &window);
	bar(pdev, 1, FAKE_BAR_START, FAKE_BAR_LEN, IORESOURCE_MEM, &window);
	bar(pdev, 2, FAKE_UNASSIGNED_START, FAKE_SMALL_LEN, IORESOURCE_MEM,
	    NULL);
	bar(pdev, 3, FAKE_RAM_START, FAKE_SMALL_LEN, IORESOURCE_MEM, &window);
	bar(pdev, 4, FAKE_SECOND_START, FAKE_SMALL_LEN, IORESOURCE_MEM,
	    &window);
	bar(pdev, 5, FAKE_THIRD_START, FAKE_SMALL_LEN, IORESOURCE_MEM, &window);
	return pdev;
}

static struct pci_dev *nic_new(void)
{
	struct pci_dev *pdev = pci_new("fake-nic", PCI_DEVFN(1, 0));

	if (pdev)
		pdev->dma_parms.max_segment_size = 1U << 31;
	return pdev;
}

int fake_machine_new(void)
{
	nic = nic_new();
	gpu = gpu_new();
	if (!nic || !gpu) {
		fake_machine_free();
		return -ENOMEM;
	}
	fake_nic_guard(FAKE_OPS);
	fake_pages(0, 0, 0);
	return 0;
}

void fake_machine_free(void)
{
	int i;

	pci_remove(nic);
	pci_remove(gpu);
	for (i = 0; i < ARRAY_SIZE(more); i++) {
		pci_remove(more[i]);
		more[i] = NULL;
	}
	nic = NULL;
	gpu = NULL;
}

int fake_nic_is_replaced(void)
{
	struct pci_dev *new = nic_new();

	if (!new)
		return -ENOMEM;
	pci_remove(nic);
	nic = new;
	return 0;
}

int fake_gpu_is_replaced(void)
{
	struct pci_dev *new = gpu_new();

	if (!new)
		return -ENOMEM;
	fake_gpu_leaves();
	pci_remove(gpu);
	gpu = new;
	return 0;
}

int fake_more_gpus(unsigned int count)
{
	unsigned int i;

	for (i = 0; i < min(count, ARRAY_SIZE(more)); i++) {
		more[i] = pci_new("fake-gpu", PCI_DEVFN(3 + i / 8, i % 8));
		if (!more[i])
			return -ENOMEM;
		bar(more[i], 1, FAKE_MORE_START + i * FAKE_SMALL_LEN,
		    FAKE_SMALL_LEN, IORESOURCE_MEM, &window);
	}
	return 0;
}

struct device *fake_nic(void)
{
	return &nic->dev;
}

void fake_nic_max_segment(unsigned int bytes)
{
	nic->dma_parms.max_segment_size = bytes;
}

static int guard;
static struct iommu_domain domain = { .pgsize_bitmap = SZ_4K | SZ_2M | SZ_1G };
static const struct dma_map_ops ops;
static const struct bus_dma_region range_map[2];

void fake_nic_guard(int wanted)
{
	guard = wanted;
	nic->dev.dma_range_map = guard == FAKE_RANGE_MAP ? range_map : NULL;
	domain.type = guard == FAKE_IDENTITY ? IOMMU_DOMAIN_IDENTITY :
		      guard == FAKE_BLOCKS ? IOMMU_DOMAIN_BLOCKED :
					     IOMMU_DOMAIN_DMA;
}

const struct dma_map_ops *fake_dma_ops(struct device *dev)
{
	return guard == FAKE_OPS ? &ops : NULL;
}

struct iommu_domain *fake_domain(struct device *dev)
{
	return guard == FAKE_IDENTITY || guard == FAKE_TRANSLATES ||
	       guard == FAKE_BLOCKS ? &domain : NULL;
}

unsigned int fake_device_refs(void)
{
	unsigned int refs = kref_read(&nic->dev.kobj.kref) - 1 +
			    kref_read(&gpu->dev.kobj.kref) - 1;
	int i;

	for (i = 0; i < ARRAY_SIZE(more) && more[i]; i++)
		refs += kref_read(&more[i]->dev.kobj.kref) - 1;
	return refs - fake_remembered();
}

int fake_pci_domain(struct pci_bus *bus)
{
	return 3;
}

unsigned int fake_pci_steps(void)
{
	return steps;
}

void fake_gpu_leaves(void)
{
	int i;

	for (i = 0; i < PCI_STD_NUM_BARS; i++)
		gpu->resource[i].parent = NULL;
	gpu->dev.kobj.state_in_sysfs = 0;
}

/*
 * Like pci_get_device(): drops the reference to @from and returns the next
 * device.
 */
struct pci_dev *fake_pci_get(unsigned int vendor, unsigned int device,
			     struct pci_dev *from)
{
	struct pci_dev *next = !from ? nic : from == nic ? gpu : more[0];
	int i;

	for (i = 0; i < ARRAY_SIZE(more); i++)
		if (from && from == more[i])
			next = i + 1 < ARRAY_SIZE(more) ? more[i + 1] : NULL;
	steps++;
	pci_dev_get(next);
	pci_dev_put(from);
	return next;
}

/* --- struct pages ------------------------------------------------------------- */

static struct dev_pagemap pagemap;
static int pagemap_refs;

void fake_pages(u64 start, u64 len, int type)
{
	pagemap.range.start = start;
	pagemap.range.end = start + len - 1;
	pagemap.nr_range = len ? 1 : 0;
	pagemap.type = type;
}

static bool has_pagemap(unsigned long pfn)
{
	return pagemap.nr_range && PFN_PHYS(pfn) >= pagemap.range.start &&
	       PFN_PHYS(pfn) <= pagemap.range.end;
}

bool fake_pfn_valid(unsigned long pfn)
{
	return pfn_valid(pfn) || has_pagemap(pfn);
}

struct dev_pagemap *fake_pagemap_get(unsigned long pfn)
{
	if (!pagemap.type || !has_pagemap(pfn))
		return NULL;
	pagemap_refs++;
	return &pagemap;
}

void fake_pagemap_put(struct dev_pagemap *pgmap)
{
	pagemap_refs--;
}

int fake_pagemap_refs(void)
{
	return pagemap_refs;
}

/* --- failures --------------------------------------------------------------- */

static struct kunit *current_test;

void fake_test_begins(void)
{
	WRITE_ONCE(current_test, kunit_get_current_test());
}

void fake_test_fails(const char *file, int line, const char *text)
{
	struct kunit_loc loc = { .file = kbasename(file), .line = line };
	struct kunit *test = READ_ONCE(current_test);
	struct kunit_assert none = {};

	if (test)
		__kunit_do_failed_assertion(test, &loc, KUNIT_EXPECTATION, &none,
					    kunit_fail_assert_format,
					    "    %s", text);
}

/* --- threads ------------------------------------------------------------------ */

struct task_struct *fake_thread_start(int (*run)(void *data), void *data)
{
	struct task_struct *task;

	task = kthread_create(run, data, "peermem-kunit");
	if (IS_ERR(task))
		return NULL;
	get_task_struct(task);
	wake_up_process(task);
	return task;
}

/*
 * Waits until the thread has exited. The thread's function must have signalled
 * its end before this call. After this call, the thread runs no code of this
 * module.
 */
void fake_thread_join(struct task_struct *task)
{
	kthread_stop(task);
	put_task_struct(task);
}

unsigned int fake_reserves(void)
{
	return memalloc_noreclaim_save();
}

void fake_no_reserves(unsigned int flags)
{
	memalloc_noreclaim_restore(flags);
}

void fake_in_reclaim(void (*callback)(void *data), void *data)
{
	fs_reclaim_acquire(GFP_KERNEL);
	callback(data);
	fs_reclaim_release(GFP_KERNEL);
}
