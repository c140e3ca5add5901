// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The module's parameters and its version. This file is in C for two reasons.
 * Users look for parameters in sysfs, where parameters of Rust's module! do not
 * appear. module! also has no key for a version.
 */

#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/stringify.h>

#include "compat.h"
#include "helpers.h"

/* docs/registration.md gives the cost of many allocations. */
#define PEERMEM_MAX_CHUNKS	1024

struct peermem_params peermem_params = {
	.persistent_api_support = 1,
	.max_chunks = PEERMEM_MAX_CHUNKS,
};

#define PARAM(_name, _type, _text)					\
	module_param_named(_name, peermem_params._name, _type, 0444);	\
	MODULE_PARM_DESC(_name, _text)

/*
 * The first two parameters have the names, types, values and modes of NVIDIA's
 * nvidia-peermem.
 */
PARAM(peerdirect_support, int,
	"How invalidations reach ib_core: 0 [default], or 1 for MLNX_OFED 4.9 LTS");
PARAM(persistent_api_support, int,
	"Clients: 1 [default]: persistent only; 0: revocable first, then persistent");
PARAM(user_limit_mib, uint,
	"MiB of GPU memory that one user may have pinned: 0 [default] no limit");
PARAM(max_chunks, uint,
	"Maximum number of allocations in one registration: " __stringify(PEERMEM_MAX_CHUNKS) " [default], 1 as with NVIDIA's module");

PARAM(provider_maps, bool,
	"Persistent pins are mapped by: 0 [default] this module where it can, 1 nvidia.ko, as with NVIDIA's module");

/* Many applications read the version. */
MODULE_VERSION(PEERMEM_VERSION);
const char peermem_version[] = PEERMEM_VERSION;
/* From driver_flavour, peermemctl learns which nvidia.ko the module needs. */
#ifdef PEERMEM_NO_GPL_ONLY
MODULE_INFO(driver_flavour, "proprietary");
#endif
/* ib_core keeps 16 bytes of the version, the last of which is a flag. */
static_assert(sizeof(peermem_version) <= 15);
