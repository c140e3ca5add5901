/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Knobs and counters of fake_kernel.c. */
#include <stddef.h>
#include <stdint.h>

struct fake_kernel {
	/* Range that ibv_reg_mr cannot pin, and the error of such a registration. */
	uintptr_t gpu_start, gpu_end;
	int reg_error;
	/* Error of a registration by dma-buf, and of a dma-buf that is not mapped over PCIe. */
	int dmabuf_error, dmabuf_default_error;
	/* Number of calls. */
	long reg, reg_failed, dmabuf, dmabuf_failed, dereg, rereg;
	long dontfork, dofork, allocations, frees;
	/* The last registration by dma-buf. */
	uint64_t offset, length, iova;
	uint32_t access;
};
