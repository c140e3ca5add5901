// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Tests the CUDA half of libpeermem_preload.so on a real GPU, without an RDMA device:
 * fake_ibverbs.c refuses to pin memory, and accepts each dma-buf that is large enough. Prints a
 * line for each case, and returns the number of failed cases. gpu.sh beside this file compiles and
 * runs this program.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fake_verbs.h"

typedef unsigned long long ptr;

/* CUmemAllocationProp and CUmemAccessDesc of cuda.h. */
struct prop {
	int type, handle_types, location_type, location_id;
	void *win32;
	unsigned char compression, rdma_capable;
	unsigned short usage;
	unsigned char reserved[4];
};

struct access {
	int location_type, location_id, flags;
};

#define CUDA(name, ...) static int (*name)(__VA_ARGS__)
CUDA(cuInit, unsigned int);
CUDA(cuDeviceGet, int *, int);
CUDA(cuDeviceGetCount, int *);
CUDA(cuDevicePrimaryCtxRetain, void **, int);
CUDA(cuCtxCreate_v2, void **, unsigned int, int);
CUDA(cuCtxSetCurrent, void *);
CUDA(cuCtxGetCurrent, void **);
CUDA(cuMemAlloc_v2, ptr *, size_t);
CUDA(cuMemFree_v2, ptr);
CUDA(cuMemAllocManaged, ptr *, size_t, unsigned int);
CUDA(cuMemAllocHost_v2, void **, size_t);
CUDA(cuMemAllocAsync, ptr *, size_t, void *);
CUDA(cuMemCreate, ptr *, size_t, const struct prop *, ptr);
CUDA(cuMemAddressReserve, ptr *, size_t, size_t, ptr, ptr);
CUDA(cuMemMap, ptr, size_t, size_t, ptr, ptr);
CUDA(cuMemUnmap, ptr, size_t);
CUDA(cuMemSetAccess, ptr, size_t, const struct access *, size_t);
CUDA(cuPointerGetAttribute, void *, int, ptr);

static int (*reg_mr)(void *, size_t, int, struct mr *, uint32_t *);
static struct fake_counts *counted;
static void *context;

static int reg(ptr address, size_t length)
{
	struct mr mr = { .type = 9 };
	uint32_t response[3];

	errno = 0;
	int error = reg_mr((void *)address, length, 7, &mr, response);

	if (error && errno != error)
		return -1;
	return error ? error : mr.type;
}

static void is(const char *name, int result, int expected)
{
	printf("%-4s %s", result == expected ? "ok" : "FAIL", name);
	if (result != expected) {
		failures++;
		printf(": %d instead of %d", result, expected);
	}
	printf("\n");
}

static void served(const char *name, ptr address, size_t length)
{
	is(name, reg(address, length), 0);
}

static void refused(const char *name, ptr address, size_t length)
{
	is(name, reg(address, length), EFAULT);
}

static void need(const char *what, int code)
{
	if (code) {
		printf("FAIL %s: CUDA returned %d\n", what, code);
		exit(100);
	}
}

static ptr plain, vmm;

static void *without(void *unused)
{
	void *now = &plain, *then = &plain;

	cuCtxGetCurrent(&now);
	served("a thread without a context: cuMemAlloc", plain, 1 << 20);
	served("a thread without a context: cuMemCreate", vmm, 2 << 20);
	cuCtxGetCurrent(&then);
	is("the thread has no context afterwards", now || then, 0);
	unsigned int type = 0;

	printf("info cuPointerGetAttribute without a context returns %d\n",
	       cuPointerGetAttribute(&type, 2, plain));
	return NULL;
}

static void *other(void *second)
{
	void *then = NULL;

	cuCtxSetCurrent(second);
	served("a thread with another context: cuMemAlloc", plain, 1 << 20);
	served("a thread with another context: cuMemCreate", vmm, 2 << 20);
	cuCtxGetCurrent(&then);
	is("the thread has its context afterwards", then != second, 0);
	return NULL;
}

static void *own(void *address)
{
	served("memory of cuCtxCreate's context, in a thread without one", (ptr)address, 4096);
	return NULL;
}

static void run(void *(*body)(void *), void *argument)
{
	pthread_t thread;

	pthread_create(&thread, NULL, body, argument);
	pthread_join(thread, NULL);
}

static ptr create(int device, size_t size, int rdma_capable)
{
	struct prop prop = { .type = 1, .location_type = 1, .location_id = device,
			     .rdma_capable = rdma_capable };
	ptr handle = 0;

	need("cuMemCreate", cuMemCreate(&handle, size, &prop, 0));
	return handle;
}

int main(int argc, char **argv)
{
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
	void *provider = dlopen(argc > 1 ? argv[1] : "./libprovider.so", RTLD_NOW);
	int device, devices;
	size_t size = 64 << 20, chunk = 2 << 20;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!cuda || !provider) {
		printf("FAIL cannot open %s\n", cuda ? "the provider" : "libcuda.so.1");
		return 100;
	}
#define FIND(name) name = (__typeof__(name))dlsym(cuda, #name)
	FIND(cuInit);
	FIND(cuDeviceGet);
	FIND(cuDeviceGetCount);
	FIND(cuDevicePrimaryCtxRetain);
	FIND(cuCtxCreate_v2);
	FIND(cuCtxSetCurrent);
	FIND(cuCtxGetCurrent);
	FIND(cuMemAlloc_v2);
	FIND(cuMemFree_v2);
	FIND(cuMemAllocManaged);
	FIND(cuMemAllocHost_v2);
	FIND(cuMemAllocAsync);
	FIND(cuMemCreate);
	FIND(cuMemAddressReserve);
	FIND(cuMemMap);
	FIND(cuMemUnmap);
	FIND(cuMemSetAccess);
	FIND(cuPointerGetAttribute);
	reg_mr = dlsym(provider, "provider_reg_mr");
	counted = ((struct fake_counts *(*)(void))dlsym(provider, "provider_counts"))();

	refused("host memory before cuInit", (ptr)&size, 8);
	need("cuInit", cuInit(0));
	need("cuDeviceGet", cuDeviceGet(&device, 0));
	cuDeviceGetCount(&devices);
	refused("host memory before the first context", (ptr)&size, 8);
	need("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, device));
	cuCtxSetCurrent(context);

	need("cuMemAlloc", cuMemAlloc_v2(&plain, size));
	served("cuMemAlloc, whole", plain, size);
	served("cuMemAlloc, a page", plain + 4096, 4096);
	served("cuMemAlloc, 0x2345 bytes at 0x123", plain + 0x123, 0x2345);
	served("cuMemAlloc, last byte", plain + size - 1, 1);
	refused("cuMemAlloc, over the end", plain + size - 4096, 64 << 20);
	ptr small[3];

	for (int at = 0; at < 3; at++)
		need("cuMemAlloc", cuMemAlloc_v2(&small[at], 100));
	served("cuMemAlloc of 100 bytes", small[0], 100);
	served("cuMemAlloc of 100 bytes, the next one", small[1], 100);
	ptr odd;

	need("cuMemAlloc", cuMemAlloc_v2(&odd, (3 << 20) + 4097));
	served("cuMemAlloc of 3 MiB and 4097 bytes", odd, (3 << 20) + 4097);

	need("cuMemAddressReserve", cuMemAddressReserve(&vmm, 4 * chunk, 0, 0, 0));
	for (int at = 0; at < 3; at++)
		need("cuMemMap", cuMemMap(vmm + at * chunk, chunk, 0, create(device, chunk, at != 1), 0));
	struct access access = { 1, device, 3 };

	need("cuMemSetAccess", cuMemSetAccess(vmm, 3 * chunk, &access, 1));
	served("cuMemCreate, one", vmm, chunk);
	served("cuMemCreate, three side by side", vmm, 3 * chunk);
	served("cuMemCreate, across two borders, at an odd address", vmm + chunk - 5, chunk + 10);
	refused("cuMemCreate, past the last part", vmm + 2 * chunk, chunk + 1);
	refused("reserved addresses without memory", vmm + 3 * chunk, 4096);

	run(without, NULL);
	void *second = NULL;

	if (devices > 1) {
		need("cuDeviceGet", cuDeviceGet(&device, 1));
		need("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&second, device));
	} else if (!cuCtxCreate_v2 || cuCtxCreate_v2(&second, 0, device)) {
		printf("info no second context\n");
	}
	if (second) {
		run(other, second);
		ptr others = 0;

		cuCtxSetCurrent(second);
		need("cuMemAlloc", cuMemAlloc_v2(&others, size));
		run(own, (void *)others);
		cuCtxSetCurrent(context);
		served("memory of the second context", others, size);
	}

	ptr managed = 0, async = 0;
	void *pinned = NULL;

	need("cuMemAllocManaged", cuMemAllocManaged(&managed, size, 1));
	refused("managed memory", managed, size);
	need("cuMemAllocHost", cuMemAllocHost_v2(&pinned, size));
	refused("pinned host memory", (ptr)pinned, size);
	if (cuMemAllocAsync && !cuMemAllocAsync(&async, size, NULL))
		printf("info memory of cuMemAllocAsync: %d\n", reg(async, size));

	int open = descriptors();
	struct timespec from, to;

	clock_gettime(CLOCK_MONOTONIC, &from);
	int failed = 0;

	for (int at = 0; at < 10000; at++)
		failed += !!reg(plain + at * 64, 1 << 16);
	clock_gettime(CLOCK_MONOTONIC, &to);
	is("10,000 registrations", failed, 0);
	is("descriptors left open", descriptors() - open, 0);
	printf("info %.1f us for each\n",
	       ((to.tv_sec - from.tv_sec) * 1e9 + to.tv_nsec - from.tv_nsec) / 1e3 / 10000);

	pid_t child = fork();

	if (!child) {
		alarm(20);
		int error = reg(plain, 4096);

		printf("info a registration in a child of fork: %d\n", error);
		_exit(error && error != EFAULT);
	}
	int status = 0;

	waitpid(child, &status, 0);
	is("a child of fork comes back", status, 0);

	need("cuMemFree", cuMemFree_v2(plain));
	refused("freed memory", plain, size);
	need("cuMemUnmap", cuMemUnmap(vmm, chunk));
	refused("unmapped memory", vmm, chunk);
	served("the memory after the unmapped memory", vmm + chunk, chunk);
	printf("%d failed; %ld registrations by dma-buf\n", failures, counted->dmabuf);
	return failures;
}
