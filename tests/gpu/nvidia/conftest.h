/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Results of NVIDIA's configure step that NVIDIA's headers use. */
#include <linux/version.h>

#if KERNEL_VERSION(5, 15, 0) <= LINUX_VERSION_CODE
#define NV_LINUX_STDARG_H_PRESENT
#endif
