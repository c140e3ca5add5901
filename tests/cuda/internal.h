/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * GPUs and contexts (cuda.c) and memory (memory.c) of the stand-in for CUDA's
 * library.
 */
#ifndef _TESTS_CUDA_INTERNAL_H_
#define _TESTS_CUDA_INTERNAL_H_

#include <cuda.h>
#include "standin.h"

#define MAX_GPUS	8

#pragma GCC visibility push(hidden)

struct CUctx_st {
	CUdevice device;
	unsigned int flags;
	unsigned long long id;
};

struct gpu {
	int fd;
	struct standin_info info;
	struct CUctx_st primary;
};

extern struct gpu gpus[MAX_GPUS];

CUresult check_device(CUdevice device);

/* Frees all memory that a context has allocated. */
void free_all_of(CUcontext context);

#pragma GCC visibility pop

#endif /* _TESTS_CUDA_INTERNAL_H_ */
