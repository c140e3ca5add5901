// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Registrations with versions of libibverbs that are not installed, each behind its own provider.
 * Prints a line for each failed check, and returns the number of failed checks.
 *
 *	copies served|refused PROVIDER [PROVIDER]
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "fake_cuda.h"
#include "fake_kernel.h"
#include "fake_verbs.h"

static char *gpu;
static struct fake_cuda *cuda;
static struct fake_kernel *kernel;

static void provider(const char *path, int is_served)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		printf("%s\n", dlerror());
		failures++;
		return;
	}
#define FUNCTION(name, ...) __typeof__(__VA_ARGS__) *name = dlsym(library, "provider_" #name)
	FUNCTION(counts, struct fake_counts *(void));
	FUNCTION(reg_mr, int(void *, size_t, int, struct mr *, uint32_t *));
	FUNCTION(reg_mr_ex, int(struct init_attr *, struct mr *));
	FUNCTION(rereg_mr, int(struct mr *, void *, size_t));
	FUNCTION(umem_reg, int(int, void *, size_t, uint32_t, uint32_t *, uint64_t *));
	struct fake_counts *counted = counts();
	struct mr mr = { .type = 9, .access = 9 };
	uint32_t response[3] = {};
	int expected = is_served ? 0 : EFAULT;

	errno = 0;
	/*
	 * Relaxed ordering, and a flag that a kernel may ignore and that dma-buf regions do not
	 * support.
	 */
	int access = 7 | 1 << 20 | 1 << 21;

	check(reg_mr(gpu + 16, 8192, access, &mr, response) == expected);
	check(errno == expected);
	check(counted->reg == 1);
	/* A region of an unknown layout is deregistered. */
	check(counted->dereg == (is_served ? 0 : counted->dmabuf));
	if (is_served) {
		check(counted->dmabuf == 1);
		check(mr.type == 0 && mr.access == access);
		check(mr.handle == 77 && mr.lkey == 0x7700 && mr.length == 8192);
		check(response[0] == 77 && response[1] == 0x7700 && response[2] == 0x7700);
	}

	/*
	 * ibv_reg_mr_ex with an address, then also with an I/O address, with a DMA handle, and with
	 * the program's own dma-buf.
	 */
	struct init_attr attr = { .length = 4096, .access = 7, .mask = 2, .address = gpu };
	long before = counted->dmabuf;

	check(reg_mr_ex(&attr, &mr) == expected);
	attr.mask = 3;
	attr.iova = 0x70000;
	check(reg_mr_ex(&attr, &mr) == expected);
	check(counted->dmabuf == before + 2 * is_served || !is_served);
	before = counted->dmabuf;
	attr.mask = 2 | 16;
	check(reg_mr_ex(&attr, &mr) == EFAULT);
	attr.mask = 2 | 64;
	check(reg_mr_ex(&attr, &mr) == EFAULT);
	attr.mask = 4 | 8 | 1;
	check(reg_mr_ex(&attr, &mr) == 0);
	check(counted->dmabuf == before);

	/* If a call has no new range, the message contains the old range. */
	mr.address = gpu;
	mr.length = 8192;
	check(rereg_mr(&mr, NULL, 0) == EINVAL && errno == EINVAL);
	check(rereg_mr(&mr, gpu + 4096, 4096) == EINVAL && errno == EINVAL);
	check(counted->rereg == 2);

	/* Memory that is registered by DEVX. */
	uint32_t id = 0;
	uint64_t handle = 0;
	int fd = open("/dev/infiniband/uverbs0", O_RDWR);
	/* The layout of struct verbs_mr does not concern DEVX. */
	int error = umem_reg(fd, gpu + 0x40, 8192, 7 | 1 << 21, &id, &handle);

	check(error == expected || !error);
	check(counted->execute == 1);
	if (!error) {
		check(id == 4711 && handle == 12);
		check(kernel->offset == 0x40 && kernel->length == 8192 && kernel->access == 7);
	}
	check(umem_reg(fd, kernel, 8192, 7, &id, &handle) == EFAULT);
	kernel->dmabuf_error = EPROTONOSUPPORT;
	handle = 0;
	check(umem_reg(fd, gpu, 8192, 7, &id, &handle) == EFAULT && errno == EFAULT && !handle);
	kernel->dmabuf_error = 0;
	check(cuda->depth == 0 && cuda->retained == 0);
}

int main(int argc, char **argv)
{
	unsigned long long address = 0;
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	int (*allocate)(unsigned long long *, size_t) = dlsym(library, "cuMemAlloc_v2");

	allocate(&address, 1 << 20);
	gpu = (char *)address;
	cuda = dlsym(library, "fake_cuda");
	kernel = dlsym(RTLD_DEFAULT, "fake_kernel");
	int open = descriptors();

	for (int at = 2; at < argc; at++)
		provider(argv[at], !strcmp(argv[1], "served"));
	/* One descriptor of /dev/infiniband/uverbs0 for each provider. */
	check(descriptors() == open + argc - 2);
	return failures;
}
