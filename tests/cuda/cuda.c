// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A stand-in for libcuda.so.1: the memory functions of CUDA's driver API on the
 * stand-in GPU (tests/gpu), for unmodified consumers. The stand-in runs no GPU
 * kernels. A consumer that needs a missing function fails when it is linked, or
 * when it looks the function up.
 *
 * Memory (memory.c) is a mapping of /dev/nvidia<N> in the GPU's BAR. The CPU
 * makes all copies, so each copy is complete when its call returns.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cuda.h>
#include "internal.h"

#define MAX_CONTEXTS	16

struct gpu gpus[MAX_GPUS];

static int gpu_count;
static unsigned long long contexts;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Contexts of the thread, with the current one on top. */
static __thread CUcontext stack[MAX_CONTEXTS];
static __thread int top;

static void open_gpus(void)
{
	char path[32];
	struct gpu *gpu;

	while (gpu_count < MAX_GPUS) {
		gpu = &gpus[gpu_count];
		snprintf(path, sizeof(path), "/dev/nvidia%d", gpu_count);
		gpu->fd = open(path, O_RDWR | O_CLOEXEC);
		if (gpu->fd < 0)
			return;
		if (ioctl(gpu->fd, STANDIN_IOC_INFO, &gpu->info)) {
			close(gpu->fd);
			return;
		}
		gpu->primary.id = ++contexts;
		gpu->primary.device = gpu_count++;
	}
}

CUresult check_device(CUdevice device)
{
	if (!gpu_count)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (device < 0 || device >= gpu_count)
		return CUDA_ERROR_INVALID_DEVICE;
	return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_once(&once, open_gpus);
	return gpu_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version)
{
	*version = CUDA_VERSION;
	return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
	static const struct {
		CUresult error;
		const char *name;
	} names[] = {
		{ CUDA_SUCCESS, "CUDA_SUCCESS" },
		{ CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
		{ CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY" },
		{ CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED" },
		{ CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE" },
		{ CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE" },
		{ CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT" },
		{ CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM" },
		{ CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND" },
		{ CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED" },
		{ CUDA_SUCCESS, NULL },
	};
	int i = 0;

	while (names[i].name && names[i].error != error)
		i++;
	*name = names[i].name;
	return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
	return cuGetErrorName(error, text);
}

/*
 * Returns the version of the function that cuda.h declares, and ignores the
 * requested version.
 */
CUresult cuGetProcAddress(const char *name, void **function, int version,
			  unsigned long long flags,
			  CUdriverProcAddressQueryResult *status)
{
	char second[64];

	(void)version;
	(void)flags;
	snprintf(second, sizeof(second), "%s_v2", name);
	*function = dlsym(RTLD_DEFAULT, second);
	if (!*function)
		*function = dlsym(RTLD_DEFAULT, name);
	if (status)
		*status = *function ? CU_GET_PROC_ADDRESS_SUCCESS :
				      CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Devices */

CUresult cuDeviceGetCount(int *count)
{
	if (!gpu_count)
		return CUDA_ERROR_NOT_INITIALIZED;
	*count = gpu_count;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult result = check_device(ordinal);

	if (!result)
		*device = ordinal;
	return result;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
	CUresult result = check_device(device);

	if (!result)
		snprintf(name, size, "stand-in GPU");
	return result;
}

CUresult cuDeviceGetPCIBusId(char *address, int size, CUdevice device)
{
	CUresult result = check_device(device);

	if (!result)
		snprintf(address, size, "%s", gpus[device].info.pci);
	return result;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *address)
{
	for (*device = 0; *device < gpu_count; ++*device)
		if (!strcasecmp(gpus[*device].info.pci, address))
			return CUDA_SUCCESS;
	return gpu_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
	CUresult result = check_device(device);

	if (!result)
		memcpy(uuid->bytes, gpus[device].info.uuid, sizeof(uuid->bytes));
	return result;
}

CUresult cuDeviceTotalMem(size_t *size, CUdevice device)
{
	CUresult result = check_device(device);

	if (!result)
		*size = gpus[device].info.bar_length;
	return result;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute,
			      CUdevice device)
{
	CUresult result = check_device(device);
	unsigned int domain, bus, slot;

	if (result)
		return result;
	if (sscanf(gpus[device].info.pci, "%x:%x:%x", &domain, &bus, &slot) != 3)
		return CUDA_ERROR_INVALID_DEVICE;
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
		*value = domain;
		break;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		*value = bus;
		break;
	case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
		*value = slot;
		break;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
		*value = 1;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value = 9;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
	case CU_DEVICE_ATTRIBUTE_INTEGRATED:
		*value = 0;
		break;
	case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
		*value = gpus[device].info.dma_buf;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

/* Contexts. A context has a device, and owns memory but no other objects. */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	CUresult result = check_device(device);

	if (!result)
		*context = &gpus[device].primary;
	return result;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags,
				    int *active)
{
	*flags = 0;
	*active = 1;
	return check_device(device);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
	return check_device(device);
}

CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
	CUresult result = check_device(device);

	if (result)
		return result;
	*context = calloc(1, sizeof(**context));
	if (!*context)
		return CUDA_ERROR_OUT_OF_MEMORY;
	(*context)->device = device;
	(*context)->flags = flags;
	pthread_mutex_lock(&lock);
	(*context)->id = ++contexts;
	pthread_mutex_unlock(&lock);
	return cuCtxPushCurrent(*context);
}

CUresult cuCtxDestroy(CUcontext context)
{
	if (!context || context == &gpus[context->device].primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (stack[top] == context)
		cuCtxPopCurrent(NULL);
	free_all_of(context);
	free(context);
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
	if (!stack[top])
		return CUDA_ERROR_INVALID_CONTEXT;
	*device = stack[top]->device;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags)
{
	if (!stack[top])
		return CUDA_ERROR_INVALID_CONTEXT;
	*flags = stack[top]->flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags)
{
	if (!stack[top])
		return CUDA_ERROR_INVALID_CONTEXT;
	stack[top]->flags = flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
	if (!context)
		context = stack[top];
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	*id = context->id;
	return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context)
{
	if (!context || top == MAX_CONTEXTS - 1)
		return CUDA_ERROR_INVALID_VALUE;
	stack[++top] = context;
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
	if (!stack[top])
		return CUDA_ERROR_INVALID_CONTEXT;
	if (context)
		*context = stack[top];
	stack[top] = NULL;
	if (top)
		top--;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
	if (!context && top)
		return cuCtxPopCurrent(NULL);
	stack[top] = context;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
	*context = stack[top];
	return CUDA_SUCCESS;
}

/* Streams and events. The work in a stream is always complete. */

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	(void)flags;
	*stream = malloc(1);
	return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuStreamDestroy(CUstream stream)
{
	free(stream);
	return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream)
{
	(void)stream;
	return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	(void)flags;
	*event = malloc(1);
	return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuEventDestroy(CUevent event)
{
	free(event);
	return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
	(void)event;
	return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
	(void)event;
	(void)stream;
	return CUDA_SUCCESS;
}
