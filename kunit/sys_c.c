// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The test module has its own copy of what sys.rs stands on. */
#include "../src/sys_c.c"
