// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A stand-in for libcudart.so.12: the memory functions of CUDA's runtime API on
 * top of the stand-in for libcuda.so.1. NVIDIA's own library cannot be used
 * here, because it needs undocumented tables of the driver. A program that
 * contains GPU kernels can be loaded, but cannot launch the kernels.
 */
#include <stdint.h>
#include <string.h>

#include <cuda.h>

/* Errors have the same numbers as in the driver API. */
typedef CUresult cudaError_t;

cudaError_t cudaSetDevice(int device)
{
	CUcontext context;
	cudaError_t error = cuInit(0);

	if (!error)
		error = cuDevicePrimaryCtxRetain(&context, device);
	return error ? error : cuCtxSetCurrent(context);
}

/* Makes a thread without a device use the first one. */
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

/* The CPU can access both sides by their addresses, so @kind is not needed. */
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

/* Functions that a program with GPU kernels calls when it is loaded */

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
