/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * What ib_core or nvidia.ko lacks: see missing.c. ib.rs and nv.rs wrap it.
 */
#ifndef PEERMEM_MISSING_H
#define PEERMEM_MISSING_H

const char *peermem_missing_ib(void);
const char *peermem_missing_nv(void);

#endif /* PEERMEM_MISSING_H */
