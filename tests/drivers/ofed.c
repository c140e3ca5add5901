// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Modules by which nvidia-peermem detects OFED's ib_core and its version. Only
 * OFED has mlx_compat. The version of mlx5_core is OFED's version. There is no
 * code.
 */

#include <linux/module.h>

#if defined(DRIVER_ofed_24_10)
MODULE_VERSION("24.10-3.2.5");
#elif defined(DRIVER_ofed_25_04)
MODULE_VERSION("25.04-0.6.1");
#endif

MODULE_DESCRIPTION("The name of a module of OFED's, for tests");
MODULE_LICENSE("GPL");
