// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A stand-in for libcuda.so.1: the memory of CUDA's driver API on the stand-in
 * GPU (tests/gpu), for consumers that are run unmodified. A test fixture: it
 * runs no kernels, and what it lacks is lacking at link time or when it is
 * looked up.
 *
 * Memory is a mapping of /dev/nvidia<N>. It lies in the GPU's BAR, and the CPU
 * copies it, so that each copy is over when its call returns.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cuda.h>
#include "standin.h"

#define MAX_GPUS	8
#define MAX_CONTEXTS	16

struct CUctx_st {
	CUdevice device;
	unsigned int flags;
	unsigned long long id;
};

static struct gpu {
	int fd;
	struct standin_info info;
	struct CUctx_st primary;
} gpus[MAX_GPUS];

/*
 * UCX hears of allocations by a jump that it puts over the beginning of a
 * function; what was there it keeps. It knows few instructions, those with
 * which functions usually begin where little is optimised. So the beginning is
 * not left to the compiler, and has room for a jump to any address.
 */
#define STRING(text)	#text
#define BEGINNING(name, body)			\
	__asm__(".text\n"			\
		".globl " STRING(name) "\n"	\
		".type " STRING(name) ", @function\n" \
		STRING(name) ":\n"		\
		"	push %rbp\n"		\
		"	mov %rsp, %rbp\n"	\
		"	mov $0, %eax\n"		\
		"	mov $0, %eax\n"		\
		"	pop %rbp\n"		\
		"	jmp " STRING(body) "\n"	\
		".size " STRING(name) ", . - " STRING(name))
#define BODY	__attribute__((used, noinline, noclone))

static int gpu_count;
static unsigned long long contexts, buffers;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A thread's own contexts, the current one on top. */
static __thread CUcontext stack[MAX_CONTEXTS];
static __thread int top;

struct allocation {
	struct allocation *next;
	CUdeviceptr start;
	size_t size;
	CUcontext context;
	unsigned long long id;
};

static struct allocation *allocations;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

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

static CUresult check_device(CUdevice device)
{
	if (!gpu_count)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (device < 0 || device >= gpu_count)
		return CUDA_ERROR_INVALID_DEVICE;
	return CUDA_SUCCESS;
}

/* The allocation at an address, or NULL. Caller holds the lock. */
static struct allocation *find(CUdeviceptr address)
{
	struct allocation *it;

	for (it = allocations; it; it = it->next)
		if (address >= it->start && address - it->start < it->size)
			return it;
	return NULL;
}

/* What is known of an address; false if it is not the GPU's. */
static int look_up(CUdeviceptr address, struct allocation *copy)
{
	struct allocation *found;

	pthread_mutex_lock(&lock);
	found = find(address);
	if (found)
		*copy = *found;
	pthread_mutex_unlock(&lock);
	return found != NULL;
}

/* Whether all of a range lies in one allocation. */
static int is_device(CUdeviceptr address, size_t size)
{
	struct allocation it;

	return look_up(address, &it) && size <= it.size - (address - it.start);
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

/* What cuda.h declares, whichever version of a function is asked for. */
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
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
		*value = 1;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value = 9;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
	case CU_DEVICE_ATTRIBUTE_INTEGRATED:
	case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
		*value = 0;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

/* Contexts: each has a device, and owns nothing. */

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
	struct allocation *it;

	if (!context || context == &gpus[context->device].primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (stack[top] == context)
		cuCtxPopCurrent(NULL);
	/* What it allocated goes with it. */
	pthread_mutex_lock(&lock);
	it = allocations;
	while (it && it->context != context)
		it = it->next;
	pthread_mutex_unlock(&lock);
	if (it && cuMemFree(it->start) == CUDA_SUCCESS)
		return cuCtxDestroy(context);
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

/* Memory */

BEGINNING(cuMemAlloc, allocate);
static BODY CUresult allocate(CUdeviceptr *address, size_t size)
{
	struct allocation *new;
	void *start;

	if (!size || !address)
		return CUDA_ERROR_INVALID_VALUE;
	if (!stack[top])
		return CUDA_ERROR_INVALID_CONTEXT;
	new = malloc(sizeof(*new));
	if (!new)
		return CUDA_ERROR_OUT_OF_MEMORY;
	start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED,
		     gpus[stack[top]->device].fd, 0);
	if (start == MAP_FAILED) {
		free(new);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	new->start = (uintptr_t)start;
	new->size = size;
	new->context = stack[top];
	pthread_mutex_lock(&lock);
	new->id = ++buffers;
	new->next = allocations;
	allocations = new;
	pthread_mutex_unlock(&lock);
	*address = new->start;
	return CUDA_SUCCESS;
}

BEGINNING(cuMemFree, release);
static BODY CUresult release(CUdeviceptr address)
{
	struct allocation **link, *old;

	if (!address)
		return CUDA_SUCCESS;
	pthread_mutex_lock(&lock);
	link = &allocations;
	while (*link && (*link)->start != address)
		link = &(*link)->next;
	old = *link;
	if (old)
		*link = old->next;
	pthread_mutex_unlock(&lock);
	if (!old)
		return CUDA_ERROR_INVALID_VALUE;
	/* The last of the mapping frees the memory, and makes the callbacks. */
	munmap((void *)(uintptr_t)old->start, old->size);
	free(old);
	return CUDA_SUCCESS;
}

CUresult cuMemAllocHost(void **address, size_t size)
{
	*address = malloc(size);
	return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

BEGINNING(cuMemFreeHost, release_host);
static BODY CUresult release_host(void *address)
{
	free(address);
	return CUDA_SUCCESS;
}

/* The host's memory is the CPU's to copy as it is. */
CUresult cuMemHostRegister(void *address, size_t size, unsigned int flags)
{
	(void)flags;
	return address && size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostUnregister(void *address)
{
	return address ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size,
			      CUdeviceptr address)
{
	struct allocation it;

	if (!look_up(address, &it))
		return CUDA_ERROR_NOT_FOUND;
	if (start)
		*start = it.start;
	if (size)
		*size = it.size;
	return CUDA_SUCCESS;
}

/* The stand-in GPU exports nothing: consumers are to register the address. */
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address,
				       size_t size, CUmemRangeHandleType type,
				       unsigned long long flags)
{
	(void)handle;
	(void)type;
	(void)flags;
	return is_device(address, size) ? CUDA_ERROR_NOT_SUPPORTED :
					  CUDA_ERROR_INVALID_VALUE;
}

/* There is no memory but that of cuMemAlloc(). */
CUresult cuMemGetAllocationGranularity(size_t *size,
				       const CUmemAllocationProp *properties,
				       CUmemAllocationGranularity_flags which)
{
	(void)size;
	(void)properties;
	(void)which;
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle,
				     void *address)
{
	(void)handle;
	(void)address;
	return CUDA_ERROR_INVALID_VALUE;
}

/* Either end may be the GPU's or the host's. */
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
	memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
	return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size,
		       CUstream stream)
{
	(void)stream;
	return cuMemcpy(to, from, size);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size)
{
	if (!is_device(to, size) || !is_device(from, size))
		return CUDA_ERROR_INVALID_VALUE;
	return cuMemcpy(to, from, size);
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size)
{
	if (!is_device(from, size))
		return CUDA_ERROR_INVALID_VALUE;
	return cuMemcpy((uintptr_t)to, from, size);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size)
{
	if (!is_device(to, size))
		return CUDA_ERROR_INVALID_VALUE;
	return cuMemcpy(to, (uintptr_t)from, size);
}

/* Pointers: those that cuMemAlloc() has given. All others are unknown to CUDA. */

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute,
			       CUdeviceptr address)
{
	struct allocation it;

	if (!look_up(address, &it))
		return CUDA_ERROR_INVALID_VALUE;
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)value = it.context;
		break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)value = CU_MEMORYTYPE_DEVICE;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)value = address;
		break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned int *)value = 0;
		break;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
		*(unsigned int *)value = 1;
		break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)value = it.id;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)value = it.context->device;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)value = it.start;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)value = it.size;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

/* What is not known of an address is zero, and that is no failure. */
CUresult cuPointerGetAttributes(unsigned int count,
				CUpointer_attribute *attributes, void **values,
				CUdeviceptr address)
{
	struct allocation it;
	int known = look_up(address, &it);

	for (unsigned int i = 0; i < count; i++) {
		if (known && cuPointerGetAttribute(values[i], attributes[i], address))
			return CUDA_ERROR_INVALID_VALUE;
		if (known)
			continue;
		switch (attributes[i]) {
		case CU_POINTER_ATTRIBUTE_CONTEXT:
		case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
			memset(values[i], 0, sizeof(CUdeviceptr));
			break;
		default:
			memset(values[i], 0, sizeof(unsigned int));
		}
	}
	return CUDA_SUCCESS;
}

/* Copies are over when their calls return, whatever is set. */
CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
			       CUdeviceptr address)
{
	(void)value;
	if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !is_device(address, 1))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

/* Streams and events: whatever is put into one is over already. */

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
