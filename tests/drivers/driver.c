// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The parts of nvidia.ko that matter when a module that uses it is loaded:
 * exported names, version and licence. There is no code.
 *
 *   older		the open flavour before 535, without persistent pins
 *   proprietary	the proprietary flavour
 */

#include <linux/module.h>

#if defined(DRIVER_older)
#define VERSION "530.30.02"
#define LICENCE "Dual MIT/GPL"
#elif defined(DRIVER_proprietary)
#define VERSION "550.54.14"
#define LICENCE "NVIDIA"
#endif

/* Only the names matter. Nobody calls them. */
int nvidia_p2p_get_pages;
EXPORT_SYMBOL(nvidia_p2p_get_pages);
int nvidia_p2p_put_pages;
EXPORT_SYMBOL(nvidia_p2p_put_pages);
int nvidia_p2p_dma_map_pages;
EXPORT_SYMBOL(nvidia_p2p_dma_map_pages);
int nvidia_p2p_dma_unmap_pages;
EXPORT_SYMBOL(nvidia_p2p_dma_unmap_pages);
#ifdef DRIVER_proprietary
int nvidia_p2p_get_pages_persistent;
EXPORT_SYMBOL(nvidia_p2p_get_pages_persistent);
int nvidia_p2p_put_pages_persistent;
EXPORT_SYMBOL(nvidia_p2p_put_pages_persistent);
#endif

MODULE_DESCRIPTION("The names of an nvidia.ko, for tests");
MODULE_VERSION(VERSION);
MODULE_LICENSE(LICENCE);
