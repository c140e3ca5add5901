// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Compiles the module's own C code. Macros replace the few kernel functions
 * whose calls a test observes or makes fail.
 */

#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/sched/signal.h>

#include "fakes.h"

#define try_module_get fake_module_get
#define module_put fake_module_put
#define pci_domain_nr fake_pci_domain
#define sg_alloc_table fake_sg_alloc
#define dma_map_phys fake_dma_map
#define dma_unmap_phys fake_dma_unmap
#define dma_iova_try_alloc fake_iova_alloc
#define dma_iova_link fake_iova_link
#define dma_iova_sync fake_iova_sync
#define dma_iova_unlink fake_iova_unlink
#define dma_iova_free fake_iova_free
#define get_dma_ops fake_dma_ops
#undef pfn_valid
#define pfn_valid fake_pfn_valid
#define get_dev_pagemap fake_pagemap_get
#define put_dev_pagemap fake_pagemap_put
#define iommu_get_domain_for_dev fake_domain
#undef cond_resched
#define cond_resched fake_resched

#include "../src/helpers.c"
#include "../src/params.c"
#include "../src/sg.c"
#include "../src/trace.c"

static unsigned int fail_registration;
module_param(fail_registration, uint, 0444);
MODULE_PARM_DESC(fail_registration,
		 "in the recorded run of the module, the registration of this client fails (1: the first, 0: none)");

void fake_loaded_with(int *peerdirect, int *persistent, unsigned int *nth)
{
	*peerdirect = peermem_params.peerdirect_support;
	*persistent = peermem_params.persistent_api_support;
	*nth = fail_registration;
}

void fake_parameters(int peerdirect, int persistent)
{
	peermem_params.peerdirect_support = peerdirect;
	peermem_params.persistent_api_support = persistent;
	peermem_params.provider_maps = false;
	peermem_params.user_limit_mib = 0;
}

void fake_user_limit(unsigned int mib)
{
	peermem_params.user_limit_mib = mib;
}
