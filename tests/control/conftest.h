/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * What NVIDIA's configure step would have found out about the rig's kernel, as
 * far as nvidia-peermem.c asks: ib_core has the peer-memory interface.
 */
#ifndef _RIG_CONFTEST_H
#define _RIG_CONFTEST_H

#define NV_MLNX_IB_PEER_MEM_SYMBOLS_PRESENT

#endif
