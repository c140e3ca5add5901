// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Injected faults. On correct code, a working detector and a broken detector
 * both report nothing. Only a fault shows that a detector works. Every test VM
 * with the debug kernel makes each fault before the VM ends, by writing the
 * fault's name to the parameter "inject". The detector must report each fault.
 *
 * Each fault has its own function, because a report names the function.
 */
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/preempt.h>
#include <linux/slab.h>
#include <linux/string.h>

#define OBJECT_SIZE	96
/* Number of leaked objects. A stale pointer on a stack may hide one of them. */
#define LEAKS		8

static noinline int injected_leak(void)
{
	char *object = kzalloc(OBJECT_SIZE, GFP_KERNEL);

	if (!object)
		return -ENOMEM;
	strscpy(object, "injected leak", OBJECT_SIZE);
	OPTIMIZER_HIDE_VAR(object);
	return 0;
}

static int leak_some(void)
{
	int i, ret = 0;

	for (i = 0; !ret && i < LEAKS; i++)
		ret = injected_leak();
	return ret;
}

static noinline int injected_use_after_free(void)
{
	char *object = kzalloc(OBJECT_SIZE, GFP_KERNEL);

	if (!object)
		return -ENOMEM;
	kfree(object);
	OPTIMIZER_HIDE_VAR(object);
	(void)READ_ONCE(*object);
	return 0;
}

static DEFINE_MUTEX(injected_first);
static DEFINE_MUTEX(injected_second);

/* Takes two locks in both orders, one after the other, so no thread hangs. */
static noinline int injected_lock_inversion(void)
{
	mutex_lock(&injected_first);
	mutex_lock(&injected_second);
	mutex_unlock(&injected_second);
	mutex_unlock(&injected_first);

	mutex_lock(&injected_second);
	mutex_lock(&injected_first);
	mutex_unlock(&injected_first);
	mutex_unlock(&injected_second);
	return 0;
}

static noinline int injected_sleep(void)
{
	preempt_disable();
	might_sleep();
	preempt_enable();
	return 0;
}

/*
 * Address to map for the host bridge, which has no driver in the test VM's
 * kernel. Like a BAR, the address is not RAM. Nothing accesses it.
 */
#define HOLE		0xfed1c000

static int injected_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	dma_addr_t addr;
	int ret;

	ret = dma_set_mask(&pdev->dev, DMA_BIT_MASK(64));
	if (ret)
		return ret;
	addr = dma_map_resource(&pdev->dev, HOLE, PAGE_SIZE, DMA_BIDIRECTIONAL, 0);
	return dma_mapping_error(&pdev->dev, addr);
}

static const struct pci_device_id injected_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_INTEL, 0x29c0) },
	{ }
};

static struct pci_driver injected_driver = {
	.name		= "injected",
	.id_table	= injected_ids,
	.probe		= injected_probe,
};

/*
 * Leaks a mapping. The kernel reports it when the driver is unbound from its
 * device.
 */
static noinline int injected_mapping(void)
{
	int ret = pci_register_driver(&injected_driver);

	if (!ret)
		pci_unregister_driver(&injected_driver);
	return ret;
}

static const struct {
	const char *name;
	int (*inject)(void);
} faults[] = {
	{ "leak",		leak_some },
	{ "mapping",		injected_mapping },
	{ "sleep",		injected_sleep },
	{ "lock_inversion",	injected_lock_inversion },
	{ "use_after_free",	injected_use_after_free },
};

static int inject(const char *name, const struct kernel_param *unused)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(faults); i++)
		if (sysfs_streq(name, faults[i].name))
			return faults[i].inject();
	return -EINVAL;
}

static const struct kernel_param_ops inject_ops = {
	.set = inject,
};
module_param_cb(inject, &inject_ops, NULL, 0200);
MODULE_PARM_DESC(inject, "name of a fault to make");

MODULE_DESCRIPTION("injects faults that the detectors must report");
MODULE_LICENSE("Dual BSD/GPL");
