/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Results of NVIDIA's configure step for the test VM's kernel, as
 * far as nvidia-peermem.c asks: ib_core has the peer-memory interface.
 */
#ifndef _TEST_CONFTEST_H
#define _TEST_CONFTEST_H

#define NV_MLNX_IB_PEER_MEM_SYMBOLS_PRESENT

#endif
