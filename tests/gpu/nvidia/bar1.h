/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef _STANDIN_BAR1_H_
#define _STANDIN_BAR1_H_

#include <linux/types.h>

struct vidmem;

int bar1_get(struct vidmem *mem, u32 first, u32 pages);
void bar1_put(struct vidmem *mem, u32 first, u32 pages);

#endif /* _STANDIN_BAR1_H_ */
