// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A stand-in for libcudart.so.12: the memory of CUDA's runtime API on
 * libcuda.so.1 beside it, where NVIDIA's own wants tables of the driver that
 * nobody has documented. A program with kernels in it can be loaded; there is
 * nothing to launch them with.
 */
#include <stdint.h>
#include <string.h>

#include <cuda.h>

/* Errors have the numbers that they have in the driver API. */
typedef CUresult cudaError_t;

cudaError_t cudaSetDevice(int device)
{
	CUcontext context;
	cudaError_t error = cuInit(0);

	if (!error)
		error = cuDevicePrimaryCtxRetain(&context, device);
	return error ? error : cuCtxSetCurrent(context);
}

/* A thread that has chosen no device is on the first. */
static cudaError_t choose(void)
{
	CUcontext context;

	cuCtxGetCurrent(&context);
	return context ? CUDA_SUCCESS : cudaSetDevice(0);
}

cudaError_t cudaGetDeviceCount(int *count)
{
	cudaError_t error = cuInit(0);

	return error ? error : cuDeviceGetCount(count);
}

cudaError_t cudaMalloc(void **address, size_t size)
{
	CUdeviceptr allocated;
	cudaError_t error = choose();

	if (!error)
		error = cuMemAlloc(&allocated, size);
	if (!error)
		*address = (void *)(uintptr_t)allocated;
	return error;
}

cudaError_t cudaFree(void *address)
{
	cudaError_t error = choose();

	return error ? error : cuMemFree((uintptr_t)address);
}

/* Which end is the GPU's can be seen by the addresses. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, int kind)
{
	(void)kind;
	return cuMemcpy((uintptr_t)to, (uintptr_t)from, size);
}

cudaError_t cudaMemset(void *address, int value, size_t size)
{
	memset(address, value, size);
	return CUDA_SUCCESS;
}

cudaError_t cudaDeviceSynchronize(void)
{
	return CUDA_SUCCESS;
}

const char *cudaGetErrorString(cudaError_t error)
{
	const char *text;

	return cuGetErrorString(error, &text) ? "unknown error" : text;
}

/* What a compiler puts into a program with kernels, to be called when it is loaded. */

void **__cudaRegisterFatBinary(void *binary)
{
	static void *handle;

	handle = binary;
	return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
	(void)handle;
}

void __cudaRegisterFunction(void)
{
}

void __cudaRegisterVar(void)
{
}

void __cudaUnregisterFatBinary(void **handle)
{
	(void)handle;
}
