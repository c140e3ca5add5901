/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Result of NVIDIA's configure step that nvidia-peermem.c needs for the test
 * VM's kernel: ib_core has the peer-memory interface.
 */
#ifndef _TEST_CONFTEST_H
#define _TEST_CONFTEST_H

#define NV_MLNX_IB_PEER_MEM_SYMBOLS_PRESENT

#endif
