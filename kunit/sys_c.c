// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * What sys.rs stands on: the module's own lines, on fakes of the few functions
 * of the kernel that a test wants to see called, or to fail.
 */

#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/sched/signal.h>

#include "../src/missing.h"
#include "fakes.h"

#define try_module_get fake_module_get
#define module_put fake_module_put
#define pci_get_device fake_pci_get
#define pci_domain_nr fake_pci_domain
#define sg_alloc_table fake_sg_alloc
#define dma_map_resource fake_dma_map
#define dma_unmap_resource fake_dma_unmap
#undef cond_resched
#define cond_resched fake_resched

#include "../src/sys_c.c"

/* Both neighbours are fakes, and lack nothing. */
const char *peermem_missing_ib(void)
{
	return NULL;
}

const char *peermem_missing_nv(void)
{
	return NULL;
}

unsigned int fake_remembered(void)
{
	unsigned int at, count = 0;

	for (at = 0; at < OWNERS; at++)
		count += !!owners[at].pdev;
	return count;
}

static unsigned int fail_registration;
module_param(fail_registration, uint, 0444);
MODULE_PARM_DESC(fail_registration,
		 "In the life that the tests look at, ib_core refuses the nth client");

void fake_loaded_with(int *peerdirect, int *persistent, unsigned int *nth)
{
	*peerdirect = peerdirect_support;
	*persistent = persistent_api_support;
	*nth = fail_registration;
}

void fake_parameters(int peerdirect, int persistent)
{
	peerdirect_support = peerdirect;
	persistent_api_support = persistent;
}
