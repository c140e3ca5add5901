/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Knobs and counters of fake_kernel.c. */
#include <stddef.h>
#include <stdint.h>

struct fake_kernel {
	/* Range that the kernel cannot pin, and the error of its registration. */
	uintptr_t gpu_start, gpu_end;
	int reg_error;
	/*
	 * Errors of a registration by dma-buf, or 0: for each dma-buf, and only for dma-bufs that
	 * are not for a mapping over PCIe.
	 */
	int dmabuf_error, dmabuf_default_error;
	/* Number of calls. */
	long reg, reg_failed, dmabuf, dmabuf_failed, dereg, rereg;
	long dontfork, dofork, allocations, frees;
	/* The last registration by dma-buf. */
	uint64_t offset, length, iova;
	uint32_t access;
};
