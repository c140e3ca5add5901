// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * CUDA's driver API with two devices. Only the second device has an active primary context. An
 * allocation is a range that the process cannot access. A dma-buf is a memfd of the range's size.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_cuda.h"

struct fake_cuda fake_cuda;

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201 };

#define count(field, by) __atomic_fetch_add(&fake_cuda.field, by, __ATOMIC_RELAXED)

static uintptr_t start, end;
static __thread void *stack[8];
static __thread int depth;
static char primary;

int cuMemAlloc_v2(unsigned long long *address, size_t size)
{
	void *range = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (range == MAP_FAILED)
		return 2;
	start = *address = (uintptr_t)range;
	end = start + size;
	return SUCCESS;
}

int cuPointerGetAttribute(void *value, int attribute, unsigned long long address)
{
	count(questions, 1);
	if (fake_cuda.needs_context && !depth)
		return INVALID_CONTEXT;
	if (address < start || address >= end)
		return INVALID_VALUE;
	switch (attribute) {
	case 1:
		*(void **)value = fake_cuda.is_virtual ? NULL : &primary;
		return SUCCESS;
	case 2:
		*(unsigned int *)value = 2;
		return SUCCESS;
	case 9:
		*(int *)value = 1;
		return SUCCESS;
	}
	return INVALID_VALUE;
}

int cuDeviceGetCount(int *number)
{
	*number = 2;
	return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
	*device = ordinal + 10;
	return ordinal < 2 ? SUCCESS : INVALID_VALUE;
}

int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *is_active)
{
	*flags = 0;
	*is_active = device == 11;
	return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
	/* The library must not create the first device's primary context. */
	if (device != 11)
		__builtin_trap();
	count(retained, 1);
	*context = &primary;
	return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
	count(retained, -1);
	return device == 11 ? SUCCESS : INVALID_VALUE;
}

int cuCtxPushCurrent_v2(void *context)
{
	if (depth == 8)
		return INVALID_CONTEXT;
	stack[depth++] = context;
	count(depth, 1);
	return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context)
{
	if (!depth)
		return INVALID_CONTEXT;
	*context = stack[--depth];
	count(depth, -1);
	return SUCCESS;
}

#ifndef OLD
int cuMemGetHandleForAddressRange(void *handle, unsigned long long address, size_t length, int type,
				  unsigned long long flags)
{
	int fd;

	count(exports, 1);
	if (!depth || stack[depth - 1] != &primary)
		count(strangers, 1);
	if (fake_cuda.export_code)
		return fake_cuda.export_code;
	if (fake_cuda.default_code && !flags)
		return fake_cuda.default_code;
	if (type != 1 || flags > 1 || address % 4096 || length % 4096 || address < start ||
	    address + length > end)
		return INVALID_VALUE;
	fd = memfd_create("dmabuf", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, length) || fchmod(fd, flags ? 0701 : 0700))
		return 999;
	*(int *)handle = fd;
	return SUCCESS;
}
#endif
