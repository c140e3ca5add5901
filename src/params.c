// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The module's parameters and its version. In C, since parameters of Rust's
 * module! are not in sysfs, where users look for these, and it has no key for a
 * version.
 */

#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/stringify.h>

#include "compat.h"
#include "helpers.h"

/* docs/registration.md says what it costs. */
#define PEERMEM_MAX_CHUNKS	1024

struct peermem_params peermem_params = {
	.persistent_api_support = 1,
	.max_chunks = PEERMEM_MAX_CHUNKS,
};

#define PARAM(_name, _type, _text)					\
	module_param_named(_name, peermem_params._name, _type, 0444);	\
	MODULE_PARM_DESC(_name, _text)

/* Names, types, values and modes of the first two are those of NVIDIA's module. */
PARAM(peerdirect_support, int,
	"How invalidations reach ib_core: 0 [default], or 1 for MLNX_OFED 4.9 LTS");
PARAM(persistent_api_support, int,
	"Clients: 1 [default] persistent pins only, 0 revocable pins first");
PARAM(user_limit_mib, uint,
	"MiB of GPU memory that one user may have pinned: 0 [default] no limit");
PARAM(max_chunks, uint,
	"Allocations that one registration may lie over: " __stringify(PEERMEM_MAX_CHUNKS) " [default], 1 as NVIDIA's module");

PARAM(provider_maps, bool,
	"Who maps persistent pins: 0 [default] this module wherever it can, 1 nvidia.ko, as for NVIDIA's module");

/* Every consumer looks at it. */
MODULE_VERSION(PEERMEM_VERSION);
const char peermem_version[] = PEERMEM_VERSION;
/* peermemctl tells from it which nvidia.ko the module can be loaded beside. */
#ifdef PEERMEM_NO_GPL_ONLY
MODULE_INFO(driver_flavour, "proprietary");
#endif
/* ib_core keeps 16 bytes of it, of which the last is a flag. */
static_assert(sizeof(peermem_version) <= 15);
