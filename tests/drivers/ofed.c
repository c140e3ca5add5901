// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Modules by which another module detects OFED's ib_core and its version:
 * mlx_compat, which only OFED has, and mlx5_core, which has OFED's version.
 * There is no code.
 */

#include <linux/module.h>

#if defined(DRIVER_ofed_24_10)
MODULE_VERSION("24.10-3.2.5");
#elif defined(DRIVER_ofed_25_04)
MODULE_VERSION("25.04-0.6.1");
#endif

MODULE_DESCRIPTION("The name of a module of OFED's, for tests");
MODULE_LICENSE("GPL");
