/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What NVIDIA's configure step would have found out, as far as its headers ask. */
#define NV_LINUX_STDARG_H_PRESENT
