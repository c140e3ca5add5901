// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * GPU memory. Each allocation is a mapping of /dev/nvidia<N> in the GPU's BAR,
 * which the CPU can copy.
 *
 * The stand-in GPU has no memory without an address. cuMemMap() therefore
 * allocates the memory of a handle of cuMemCreate(), and can map a handle only
 * once.
 *
 * If CUDA_PART_MIB is in the environment, cuMemAlloc() composes its memory of
 * parts, for programs that do not use cuMemMap(). The variable is the size of a
 * part in MiB.
 *
 * If CUDA_KNOWS_ALL is in the environment, the library initialises itself, and
 * also treats memory that the program has mapped from /dev/nvidia<N> without
 * CUDA as CUDA's memory. Such an allocation may be exported together with an
 * adjacent one, like a part that cuMemMap() has mapped.
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include <cuda.h>
#include "internal.h"
#include "parts.h"

/*
 * UCX intercepts allocations by a jump that it writes over the beginning of a
 * function. UCX keeps the overwritten instructions, and understands only the
 * usual first instructions of functions with little optimisation. This macro
 * therefore generates such a beginning, with room for a jump to any address.
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

/* Unit of exported ranges, in bytes. */
#define EXPORT_PAGE	4096

/*
 * Result of cuMemCreate(). Freed when it has neither handles nor an allocation.
 */
struct part {
	size_t size;
	CUmemAllocationProp properties;
	unsigned int handles;
	int was_mapped;
};

enum state {
	MAPPED,
	/* cuMemUnmap() was called, but handles may remain. */
	KEPT,
	GOING,
};

struct allocation {
	struct allocation *next;
	CUdeviceptr start;
	size_t size;
	CUdevice device;
	/* Set by cuMemAlloc(). */
	CUcontext context;
	/* Set by cuMemMap(). */
	struct part *part;
	enum state state;
	unsigned long long id;
};

/* Addresses that cuMemAddressReserve() reserved. */
struct reservation {
	struct reservation *next;
	CUdeviceptr start;
	size_t size;
};

/*
 * No thread maps or unmaps memory with this lock held. UCX intercepts such
 * calls, and may then ask this library about an address while UCX's own lock is
 * held.
 */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;
static struct reservation *reservations;
static unsigned long long buffers;

/* Returns the allocation at an address, or NULL. Caller holds the lock. */
static struct allocation *find(CUdeviceptr address)
{
	struct allocation *it;

	for (it = allocations; it; it = it->next)
		if (it->state == MAPPED && address >= it->start &&
		    address - it->start < it->size)
			return it;
	return NULL;
}

static int knows_all;

__attribute__((constructor)) static void initialise(void)
{
	knows_all = getenv("CUDA_KNOWS_ALL") != NULL;
	if (knows_all)
		cuInit(0);
}

/* Asks the driver for an allocation that the program has made without CUDA. */
static int ask_driver(CUdeviceptr address, struct allocation *copy)
{
	static struct part foreign;
	struct standin_info info;
	int error = errno, gpu;

	for (gpu = 0; knows_all && check_device(gpu) == CUDA_SUCCESS; gpu++) {
		memset(&info, 0, sizeof(info));
		info.va = address;
		if (!address || ioctl(gpus[gpu].fd, STANDIN_IOC_INFO, &info))
			continue;
		memset(copy, 0, sizeof(*copy));
		copy->start = info.start;
		copy->size = info.length;
		copy->device = gpu;
		copy->part = &foreign;
		return 1;
	}
	errno = error;
	return 0;
}

/* Copies the allocation at an address. Returns false if there is none. */
static int look_up(CUdeviceptr address, struct allocation *copy)
{
	struct allocation *found;

	pthread_mutex_lock(&lock);
	found = find(address);
	if (found)
		*copy = *found;
	pthread_mutex_unlock(&lock);
	return found || ask_driver(address, copy);
}

/*
 * Returns true if a range lies completely in GPU memory, in one allocation or
 * in adjacent parts.
 */
static int is_device(CUdeviceptr address, size_t size)
{
	struct allocation it;
	size_t rest;

	while (look_up(address, &it)) {
		rest = it.size - (address - it.start);
		if (size <= rest)
			return 1;
		if (!it.part)
			return 0;
		address += rest;
		size -= rest;
	}
	return 0;
}

/* Caller holds the lock. */
static void add(struct allocation *new)
{
	new->id = ++buffers;
	new->next = allocations;
	allocations = new;
}

/* Caller holds the lock. */
static void take_out(struct allocation *old)
{
	struct allocation **link = &allocations;

	while (*link != old)
		link = &(*link)->next;
	*link = old->next;
}

static void *map(CUdeviceptr address, size_t size, int access, int flags, int fd)
{
	return mmap((void *)(uintptr_t)address, size, access, flags, fd, 0);
}

/* Memory */

/* Returns the size of a part, or 0 if cuMemAlloc() makes one allocation. */
static size_t part_size(void)
{
	const char *mib = getenv("CUDA_PART_MIB");

	return mib ? strtoul(mib, NULL, 10) << 20 : 0;
}

BEGINNING(cuMemAlloc, allocate);
static BODY CUresult allocate(CUdeviceptr *address, size_t size)
{
	struct allocation *new;
	size_t part = part_size();
	CUcontext context;
	void *start;

	if (!size || !address)
		return CUDA_ERROR_INVALID_VALUE;
	cuCtxGetCurrent(&context);
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (part)
		return allocate_parts(address, size, part);
	new = calloc(1, sizeof(*new));
	if (!new)
		return CUDA_ERROR_OUT_OF_MEMORY;
	start = map(0, size, PROT_READ | PROT_WRITE, MAP_SHARED,
		    gpus[context->device].fd);
	if (start == MAP_FAILED) {
		free(new);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	new->start = (uintptr_t)start;
	new->size = size;
	new->device = context->device;
	new->context = context;
	pthread_mutex_lock(&lock);
	add(new);
	pthread_mutex_unlock(&lock);
	*address = new->start;
	return CUDA_SUCCESS;
}

BEGINNING(cuMemFree, release);
static BODY CUresult release(CUdeviceptr address)
{
	struct allocation *old;

	if (!address)
		return CUDA_SUCCESS;
	if (part_size())
		return free_parts(address);
	pthread_mutex_lock(&lock);
	old = find(address);
	if (old && (old->part || old->start != address))
		old = NULL;
	if (old)
		take_out(old);
	pthread_mutex_unlock(&lock);
	if (!old)
		return CUDA_ERROR_INVALID_VALUE;
	/*
	 * munmap() makes the stand-in GPU free the memory, and run the
	 * callbacks.
	 */
	munmap((void *)(uintptr_t)old->start, old->size);
	free(old);
	return CUDA_SUCCESS;
}

void free_all_of(CUcontext context)
{
	struct allocation *it;

	do {
		pthread_mutex_lock(&lock);
		it = allocations;
		while (it && it->context != context)
			it = it->next;
		pthread_mutex_unlock(&lock);
	} while (it && cuMemFree(it->start) == CUDA_SUCCESS);
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

/* Does nothing, because the CPU can copy host memory without preparation. */
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

/*
 * Returns the number of bytes of an allocation's last page that the program did
 * not request.
 */
static size_t rest_of_page(size_t size)
{
	return (EXPORT_PAGE - size % EXPORT_PAGE) % EXPORT_PAGE;
}

/*
 * Exports a range of whole pages, in one allocation or in adjacent parts. The
 * results are those of two H200 GPUs with 580.159.04: a range that ends after
 * the memory is an invalid value, and the flag for a mapping over PCIe is not
 * supported.
 */
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address,
				       size_t size, CUmemRangeHandleType type,
				       unsigned long long flags)
{
	struct standin_export arg = { .va = address, .length = size };
	CUcontext context;
	struct allocation it;

	cuCtxGetCurrent(&context);
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || !size ||
	    address % EXPORT_PAGE || size % EXPORT_PAGE || flags > 1 ||
	    !look_up(address, &it))
		return CUDA_ERROR_INVALID_VALUE;
	/* The unused end of the last page belongs to the allocation. */
	if (!is_device(address, size) &&
	    (it.part || address + size != it.start + it.size + rest_of_page(it.size)))
		return CUDA_ERROR_INVALID_VALUE;
	if (flags)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (!ioctl(gpus[it.device].fd, STANDIN_IOC_EXPORT, &arg)) {
		*(int *)handle = arg.fd;
		return CUDA_SUCCESS;
	}
	switch (errno) {
	case EINVAL:
		return CUDA_ERROR_INVALID_VALUE;
	case ENOMEM:
		return CUDA_ERROR_OUT_OF_MEMORY;
	case EOPNOTSUPP:
		return CUDA_ERROR_NOT_SUPPORTED;
	default:
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
}

/* Memory that is mapped at reserved addresses */

static struct part *part_of(CUmemGenericAllocationHandle handle)
{
	return (struct part *)(uintptr_t)handle;
}

static int is_granular(size_t size)
{
	return size && size % STANDIN_GRANULE == 0;
}

/* Reserves addresses without memory. */
static void *reserve(CUdeviceptr address, size_t size)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

	return map(address, size, PROT_NONE, address ? flags | MAP_FIXED : flags,
		   -1);
}

/*
 * Returns true if there is memory in a range, including unmapped parts that
 * have handles. Caller holds the lock.
 */
static int has_memory(CUdeviceptr address, size_t size)
{
	struct allocation *it;

	for (it = allocations; it; it = it->next)
		if (it->start < address + size && address < it->start + it->size)
			return 1;
	return 0;
}

/* Caller holds the lock. */
static int is_reserved(CUdeviceptr address, size_t size)
{
	struct reservation *it;

	for (it = reservations; it; it = it->next)
		if (address >= it->start && size <= it->size &&
		    address - it->start <= it->size - size)
			return 1;
	return 0;
}

/*
 * Returns true if a range is exactly one part or several adjacent ones. Caller
 * holds the lock.
 */
static int is_of_parts(CUdeviceptr address, size_t size)
{
	struct allocation *it = NULL;

	while (size) {
		it = find(address);
		if (!it || !it->part || it->start != address || it->size > size)
			return 0;
		address += it->size;
		size -= it->size;
	}
	return it != NULL;
}

/*
 * Frees parts that cuMemUnmap() has unmapped and that have no handle. reserve()
 * replaces the part's mapping, so the stand-in GPU frees the memory, and runs
 * the callbacks.
 */
static void free_unused(void)
{
	struct allocation *old;

	for (;;) {
		pthread_mutex_lock(&lock);
		old = allocations;
		while (old && (old->state != KEPT || old->part->handles))
			old = old->next;
		if (old)
			old->state = GOING;
		pthread_mutex_unlock(&lock);
		if (!old)
			return;
		reserve(old->start, old->size);
		pthread_mutex_lock(&lock);
		take_out(old);
		pthread_mutex_unlock(&lock);
		free(old->part);
		free(old);
	}
}

CUresult cuMemGetAllocationGranularity(size_t *size,
				       const CUmemAllocationProp *properties,
				       CUmemAllocationGranularity_flags which)
{
	(void)which;
	*size = STANDIN_GRANULE;
	return check_device(properties->location.id);
}

/* A handle cannot be passed to another process. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
		     const CUmemAllocationProp *properties,
		     unsigned long long flags)
{
	struct part *new;
	CUresult result = check_device(properties->location.id);

	if (result)
		return result;
	if (flags || !is_granular(size) ||
	    properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
	    properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	if (properties->requestedHandleTypes)
		return CUDA_ERROR_NOT_SUPPORTED;
	new = calloc(1, sizeof(*new));
	if (!new)
		return CUDA_ERROR_OUT_OF_MEMORY;
	new->size = size;
	new->properties = *properties;
	new->handles = 1;
	*handle = (uintptr_t)new;
	return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	struct part *part = part_of(handle);
	int was_never_mapped;

	if (!part)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	was_never_mapped = !--part->handles && !part->was_mapped;
	pthread_mutex_unlock(&lock);
	if (was_never_mapped)
		free(part);
	else
		free_unused();
	return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size,
			     size_t alignment, CUdeviceptr wanted,
			     unsigned long long flags)
{
	struct reservation *new;
	size_t step = STANDIN_GRANULE;
	uintptr_t start, first;
	void *found;

	/* The address is only a hint. */
	(void)wanted;
	if (flags || !is_granular(size) || size > SIZE_MAX - step ||
	    alignment > step || (alignment & (alignment - 1)))
		return CUDA_ERROR_INVALID_VALUE;
	new = calloc(1, sizeof(*new));
	if (!new)
		return CUDA_ERROR_OUT_OF_MEMORY;
	found = reserve(0, size + step);
	if (found == MAP_FAILED) {
		free(new);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	start = (uintptr_t)found;
	first = (start + step - 1) / step * step;
	if (first > start)
		munmap(found, first - start);
	if (first < start + step)
		munmap((void *)(first + size), start + step - first);
	new->start = first;
	new->size = size;
	pthread_mutex_lock(&lock);
	new->next = reservations;
	reservations = new;
	pthread_mutex_unlock(&lock);
	*address = first;
	return CUDA_SUCCESS;
}

/*
 * Frees a whole reservation. Fails while the range has memory, even unmapped
 * memory with a handle.
 */
CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
	struct reservation **link, *old;

	pthread_mutex_lock(&lock);
	link = &reservations;
	while (*link && ((*link)->start != address || (*link)->size != size))
		link = &(*link)->next;
	old = *link;
	if (old && has_memory(address, size))
		old = NULL;
	if (old)
		*link = old->next;
	pthread_mutex_unlock(&lock);
	if (!old)
		return CUDA_ERROR_INVALID_VALUE;
	munmap((void *)(uintptr_t)address, size);
	free(old);
	return CUDA_SUCCESS;
}

BEGINNING(cuMemMap, map_part);
static BODY CUresult map_part(CUdeviceptr address, size_t size, size_t offset,
			      CUmemGenericAllocationHandle handle,
			      unsigned long long flags)
{
	struct part *part = part_of(handle);
	struct allocation *new;
	CUresult result = CUDA_SUCCESS;

	if (!part || flags || offset || size != part->size ||
	    address % STANDIN_GRANULE)
		return CUDA_ERROR_INVALID_VALUE;
	new = calloc(1, sizeof(*new));
	if (!new)
		return CUDA_ERROR_OUT_OF_MEMORY;
	new->start = address;
	new->size = size;
	new->device = part->properties.location.id;
	new->part = part;
	pthread_mutex_lock(&lock);
	if (!is_reserved(address, size) || has_memory(address, size))
		result = CUDA_ERROR_INVALID_VALUE;
	/* A second mapping would get other memory than the first. */
	else if (part->was_mapped)
		result = CUDA_ERROR_NOT_SUPPORTED;
	if (!result) {
		part->was_mapped = 1;
		add(new);
	}
	pthread_mutex_unlock(&lock);
	if (result) {
		free(new);
		return result;
	}
	/* No access is allowed until cuMemSetAccess(). */
	if (map(address, size, PROT_NONE, MAP_SHARED | MAP_FIXED,
		gpus[new->device].fd) != MAP_FAILED)
		return CUDA_SUCCESS;
	/* The failed call has removed the reserved mapping. */
	reserve(address, size);
	pthread_mutex_lock(&lock);
	take_out(new);
	part->was_mapped = 0;
	pthread_mutex_unlock(&lock);
	free(new);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/*
 * Unmaps whole parts. The memory of a part is freed here or, if the part has
 * handles, with the last handle. The addresses stay reserved.
 */
BEGINNING(cuMemUnmap, unmap_parts);
static BODY CUresult unmap_parts(CUdeviceptr address, size_t size)
{
	CUdeviceptr at = address;
	struct allocation *it;
	int are_parts;

	pthread_mutex_lock(&lock);
	are_parts = is_of_parts(address, size);
	while (are_parts && at - address < size) {
		it = find(at);
		it->state = KEPT;
		at += it->size;
	}
	pthread_mutex_unlock(&lock);
	if (!are_parts)
		return CUDA_ERROR_INVALID_VALUE;
	mprotect((void *)(uintptr_t)address, size, PROT_NONE);
	free_unused();
	return CUDA_SUCCESS;
}

/*
 * Sets the CPU's access to the memory, because the CPU acts for the GPU. The
 * flags have the same values as those of mprotect().
 */
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc access[],
			size_t count)
{
	CUdeviceptr at = address;
	struct allocation it;
	int are_parts;

	if (!access || !count)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++)
		if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
		    check_device(access[i].location.id))
			return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	are_parts = is_of_parts(address, size);
	pthread_mutex_unlock(&lock);
	if (!are_parts)
		return CUDA_ERROR_INVALID_VALUE;
	for (; at - address < size && look_up(at, &it); at += it.size)
		for (size_t i = 0; i < count; i++)
			if (access[i].location.id == it.device &&
			    mprotect((void *)(uintptr_t)it.start, it.size,
				     access[i].flags))
				return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle,
				     void *address)
{
	struct allocation *found;

	pthread_mutex_lock(&lock);
	found = find((uintptr_t)address);
	if (found && found->part) {
		found->part->handles++;
		*handle = (uintptr_t)found->part;
	} else {
		found = NULL;
	}
	pthread_mutex_unlock(&lock);
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult
cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
				       CUmemGenericAllocationHandle handle)
{
	if (!handle)
		return CUDA_ERROR_INVALID_VALUE;
	*properties = part_of(handle)->properties;
	return CUDA_SUCCESS;
}

/* The source and the destination may be GPU memory or host memory. */
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

/*
 * Attributes of pointers into allocations. All other pointers are unknown to
 * CUDA.
 */

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
		*(int *)value = it.device;
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

/* Returns zero for the attributes of an unknown address, without an error. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute attributes[],
				void **values, CUdeviceptr address)
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

/*
 * Copies are complete when their calls return, so the attribute SYNC_MEMOPS has
 * no effect. The attribute cannot be set for parts.
 */
CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
			       CUdeviceptr address)
{
	struct allocation it;

	(void)value;
	if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !look_up(address, &it))
		return CUDA_ERROR_INVALID_VALUE;
	return it.part ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
