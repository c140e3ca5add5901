// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Registrations with the real libibverbs and librxe, on fake_kernel.c and fake_cuda.c. Prints a
 * line for each failed check, and returns the number of failed checks.
 *
 *	cases GROUP [VERSION]
 *
 * VERSION is the symbol version that dlvsym looks up. Without VERSION, the program uses the
 * functions to which it is linked.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fake_cuda.h"
#include "fake_kernel.h"

#ifdef OLDEST
#define VERSIONED(name) __asm__(".symver " #name "," #name "@IBVERBS_1.0")
VERSIONED(ibv_get_device_list);
VERSIONED(ibv_open_device);
VERSIONED(ibv_alloc_pd);
VERSIONED(ibv_reg_mr);
VERSIONED(ibv_dereg_mr);
#endif

void **ibv_get_device_list(int *number);
void *ibv_open_device(void *device);
void *ibv_alloc_pd(void *context);
void *ibv_reg_mr(void *pd, void *address, size_t length, int access);
int ibv_dereg_mr(void *mr);
int ibv_rereg_mr(void *mr, int flags, void *pd, void *address, size_t length, int access);
int ibv_fork_init(void);
void *ibv_reg_mr_iova2(void *pd, void *address, size_t length, uint64_t iova, unsigned int access);

static struct {
	void **(*get_device_list)(int *);
	void *(*open_device)(void *);
	void *(*alloc_pd)(void *);
	void *(*reg_mr)(void *, void *, size_t, int);
	int (*dereg_mr)(void *);
	int (*rereg_mr)(void *, int, void *, void *, size_t, int);
	int (*fork_init)(void);
	void *(*reg_mr_iova2)(void *, void *, size_t, uint64_t, unsigned int);
} verbs;

static struct fake_kernel *kernel;
static struct fake_cuda *cuda;
static void *pd;
static char *gpu;
static char host[1 << 16] __attribute__((aligned(4096)));

#define SIZE (64ul << 20)

static void look_up(const char *version)
{
	void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);

#define FIND(name) verbs.name = (__typeof__(verbs.name))dlvsym(library, "ibv_" #name, version)
	FIND(get_device_list);
	FIND(open_device);
	FIND(alloc_pd);
	FIND(reg_mr);
	FIND(dereg_mr);
	FIND(rereg_mr);
	FIND(fork_init);
	verbs.reg_mr_iova2 = (__typeof__(verbs.reg_mr_iova2))dlsym(library, "ibv_reg_mr_iova2");
}

static void set_up(const char *version)
{
	if (version) {
		look_up(version);
	} else {
#ifndef NOT_LINKED
		verbs.get_device_list = ibv_get_device_list;
		verbs.open_device = ibv_open_device;
		verbs.alloc_pd = ibv_alloc_pd;
		verbs.reg_mr = ibv_reg_mr;
		verbs.dereg_mr = ibv_dereg_mr;
		verbs.rereg_mr = ibv_rereg_mr;
		verbs.fork_init = ibv_fork_init;
		verbs.reg_mr_iova2 = ibv_reg_mr_iova2;
#endif
	}
	kernel = dlsym(RTLD_DEFAULT, "fake_kernel");
}

static void open_cuda(void)
{
	unsigned long long address = 0;
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	int (*allocate)(unsigned long long *, size_t) = dlsym(library, "cuMemAlloc_v2");

	cuda = dlsym(library, "fake_cuda");
	allocate(&address, SIZE);
	gpu = (char *)address;
	kernel->gpu_start = address;
	kernel->gpu_end = address + SIZE;
}

static void open_device(void)
{
	void **list = verbs.get_device_list(NULL);
	void *context = list && list[0] ? verbs.open_device(list[0]) : NULL;

	pd = context ? verbs.alloc_pd(context) : NULL;
	if (!pd) {
		printf("no device\n");
		exit(100);
	}
}

static void *reg(void *address, size_t length, int access)
{
	errno = 12345;
	return verbs.reg_mr(pd, address, length, access);
}

static void served(void *address, size_t length, int access)
{
	long before = kernel->dmabuf;
	void *mr = reg(address, length, access);

	check(mr);
	check(kernel->dmabuf == before + 1);
	check(kernel->offset == ((uintptr_t)address & 4095));
	check(kernel->length == length);
	check(kernel->iova == (uintptr_t)address);
	check(errno == 12345);
	if (mr)
		check(!verbs.dereg_mr(mr));
}

/* Checks that a registration fails with the error of the stand-in kernel. */
static void refused(void *address, size_t length, int access)
{
	check(!reg(address, length, access));
	check(errno == kernel->reg_error);
}

static void parts(void)
{
	served(gpu, SIZE, 7);
	served(gpu + 4096, 4096, 1);
	served(gpu + 0x123, 0x2345, 15);
	served(gpu + SIZE - 1, 1, 0);
	served(gpu + 1, SIZE - 2, 7);
	/* Try an I/O address with the same offset in its page, and then one with another offset. */
	void *mr = verbs.reg_mr_iova2(pd, gpu + 0x80, 4096, 0x7000080, 7);

	check(mr && kernel->iova == 0x7000080 && kernel->offset == 0x80);
	if (mr)
		verbs.dereg_mr(mr);
	long before = kernel->dmabuf;

	check(!verbs.reg_mr_iova2(pd, gpu + 0x80, 4096, 0x7000084, 7));
	check(errno == EFAULT && kernel->dmabuf == before);
}

static void errors(void)
{
	static const int ours[] = { EFAULT, EPERM, ENOMEM, EOPNOTSUPP };
	static const int others[] = { EINVAL, EAGAIN, EIO, EBUSY };

	for (int at = 0; at < 4; at++) {
		kernel->reg_error = ours[at];
		served(gpu, 8192, 7);
	}
	long before = cuda->questions;

	for (int at = 0; at < 4; at++) {
		kernel->reg_error = others[at];
		refused(gpu, 8192, 7);
	}
	check(cuda->questions == before);
	kernel->reg_error = EFAULT;
	/* Host memory is not exported, even if it cannot be pinned. */
	before = cuda->exports;
	check(!reg(NULL, 4096, 7) && errno == EFAULT);
	check(cuda->exports == before);
	kernel->reg_error = ENOMEM;
	kernel->gpu_start = 0;
	kernel->gpu_end = UINTPTR_MAX / 2;
	refused(host, sizeof(host), 7);
	check(cuda->exports == before);
	kernel->gpu_start = (uintptr_t)gpu;
	kernel->gpu_end = (uintptr_t)gpu + SIZE;
	kernel->reg_error = EFAULT;
}

/*
 * Makes CUDA and the kernel fail. The program must get the error of its own call, and nothing may
 * leak.
 */
static void failing(void)
{
	static const int kernels[] = { EOPNOTSUPP, EPROTONOSUPPORT, ENOMEM, EREMOTEIO, 524 };
	static const int codes[] = { 801, 1, 2, 999 };
	int open = descriptors();

	for (int error = 0; error < 2; error++) {
		kernel->reg_error = error ? EPERM : EFAULT;
		for (int at = 0; at < 5; at++) {
			kernel->dmabuf_error = kernels[at];
			refused(gpu + 4096, 8192, 7);
		}
		kernel->dmabuf_error = 0;
		for (int at = 0; at < 4; at++) {
			cuda->export_code = codes[at];
			refused(gpu + 4096, 8192, 7);
		}
		cuda->export_code = 0;
	}
	kernel->reg_error = EFAULT;
	refused(gpu + SIZE - 4096, 8192, 7);
	check(descriptors() == open);
	check(cuda->depth == 0 && cuda->retained == 0);
	served(gpu, 8192, 7);
}

static void one_failure(int error, int code)
{
	kernel->dmabuf_error = error;
	cuda->export_code = code;
	refused(gpu, 8192, 7);
	refused(gpu, 8192, 7);
}

static void flags(void)
{
	long before = cuda->exports;

	for (int flag = 1 << 4; flag <= 1 << 9; flag <<= 1)
		refused(gpu, 8192, 7 | flag);
	check(cuda->exports == before);
	served(gpu, 8192, 7 | 1 << 20);
	/* A kernel without optional flags never sees the flags, because libibverbs drops them. */
	check(kernel->access == 7 || kernel->access == (7 | 1 << 20));
	served(gpu, 8192, 7 | 1 << 21);
	check(kernel->access == 7);
}

static void pcie(void)
{
	/* Only a mapping over PCIe is accepted: first by the kernel, and then by CUDA. */
	kernel->dmabuf_default_error = EREMOTEIO;
	void *mr = reg(gpu, 8192, 7);

	check(mr);
	if (mr)
		verbs.dereg_mr(mr);
	kernel->dmabuf_default_error = 0;
	cuda->default_code = 801;
	served(gpu, 8192, 7);
	cuda->default_code = 0;
}

static void contexts(void)
{
	for (int at = 0; at < 4; at++) {
		cuda->needs_context = at & 1;
		cuda->is_virtual = at >> 1;
		served(gpu, 8192, 7);
	}
	cuda->needs_context = cuda->is_virtual = 0;
	check(cuda->strangers == 0);
	check(cuda->depth == 0 && cuda->retained == 0);
}

static void many(void)
{
	int open = 0;
	long used = 0;
	void *mr;

	for (int at = 0; at < 101000; at++) {
		if (at == 1000) {
			open = descriptors();
			used = kernel->allocations - kernel->frees;
		}
		mr = reg(gpu + (at % 1000) * 512, 4096 + at % 5000, 7);
		if (!mr || verbs.dereg_mr(mr)) {
			check(!"registered");
			return;
		}
	}
	check(descriptors() == open);
	check(kernel->allocations - kernel->frees == used);
	check(cuda->depth == 0 && cuda->retained == 0);
	check(kernel->dereg == kernel->reg - kernel->reg_failed + kernel->dmabuf);
}

static void *thread(void *index)
{
	size_t own = (size_t)index;

	for (int at = 0; at < 2000; at++) {
		void *mr = verbs.reg_mr(pd, gpu + own * 65536 + at, 4096, 7);
		void *other = verbs.reg_mr(pd, host + own * 4096, 4096, 7);

		check(mr && other);
		if (mr)
			verbs.dereg_mr(mr);
		if (other)
			verbs.dereg_mr(other);
	}
	return NULL;
}

static void threads(void)
{
	pthread_t all[8];
	int status, open = descriptors();

	cuda->needs_context = 1;
	for (size_t at = 0; at < 8; at++)
		pthread_create(&all[at], NULL, thread, (void *)at);
	/* Forks children while the threads register memory. */
	for (int at = 0; at < 20; at++) {
		pid_t child = fork();

		if (!child) {
			alarm(20);
			_exit(reg(gpu, 4096, 7) && reg(host, 4096, 7) ? 0 : 1);
		}
		waitpid(child, &status, 0);
		check(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	for (size_t at = 0; at < 8; at++)
		pthread_join(all[at], NULL);
	cuda->needs_context = 0;
	check(descriptors() == open);
	check(cuda->depth == 0 && cuda->retained == 0);
}

static void *cancelled(void *memory)
{
	pthread_cancel(pthread_self());
	/* write() in libibverbs is a cancellation point. */
	reg(memory, 4096, 7);
	return NULL;
}

/* Cancels a thread in a registration. The thread must end, and the process must continue. */
static void cancels(void)
{
	char *const memory[] = { host, gpu };

	for (int at = 0; at < 2; at++) {
		pthread_t one;
		void *result = NULL;

		pthread_create(&one, NULL, cancelled, memory[at]);
		pthread_join(one, &result);
		check(result == PTHREAD_CANCELED);
	}
}

/* Registers memory while standard error is a full pipe, a pipe without a reader, or closed. */
static void pipes(void)
{
	int ends[2];
	char bytes[4096] = {};

	alarm(20);
	check(!pipe2(ends, O_NONBLOCK));
	while (write(ends[1], bytes, sizeof(bytes)) > 0)
		;
	fcntl(ends[1], F_SETFL, 0);
	dup2(ends[1], STDERR_FILENO);
	close(ends[1]);
	kernel->dmabuf_error = EOPNOTSUPP;
	refused(gpu, 8192, 7);
	close(ends[0]);
	kernel->dmabuf_error = ENOMEM;
	refused(gpu, 8192, 7);
	close(STDERR_FILENO);
	kernel->dmabuf_error = EREMOTEIO;
	refused(gpu, 8192, 7);
}

/* ibv_dereg_mr undoes ibv_dontfork_range for each region. */
static void forks(void)
{
	for (int at = 0; at < 100; at++)
		served(gpu + at * 8192, 8192, 7);
	check(kernel->dontfork >= 100);
	check(kernel->dofork == kernel->dontfork);
}

static void rereg(void)
{
	void *mr = reg(gpu, 8192, 7);

	check(mr);
	errno = 0;
	/*
	 * Some versions of librxe have no rereg_mr. The program must get the error of its own call.
	 */
	check(verbs.rereg_mr(mr, 1, NULL, gpu + 8192, 8192, 0) != 0);
	check(errno == EOPNOTSUPP);
	check(!verbs.dereg_mr(mr));
}

/* Prints the numbers of allocations and kernel calls that registrations of host memory cost. */
static void cost(void)
{
	void *mr = reg(host, 4096, 7);

	verbs.dereg_mr(mr);
	long allocations = kernel->allocations, calls = kernel->reg;

	for (int at = 0; at < 1000; at++)
		verbs.dereg_mr(reg(host, sizeof(host), 7));
	printf("allocations %ld calls %ld\n", kernel->allocations - allocations,
	       kernel->reg - calls);
}

/* Host memory beyond RLIMIT_MEMLOCK, in a program without CUDA. */
static void no_cuda(void)
{
	kernel->gpu_end = UINTPTR_MAX / 2;
	kernel->reg_error = ENOMEM;
	refused(host, sizeof(host), 7);
	refused(host, sizeof(host), 7);
}

static void off(void)
{
	refused(gpu, 8192, 7);
	check(cuda->questions == 0 && cuda->exports == 0);
}

static void force(void)
{
	served(gpu, 8192, 7);
	check(kernel->reg == 0);
	/* From here on, a peer-memory client would serve the address. */
	kernel->gpu_end = kernel->gpu_start;
	served(gpu, 8192, 7);
	check(kernel->reg == 0);
	kernel->dmabuf_error = EOPNOTSUPP;
	void *mr = reg(gpu, 8192, 7);

	check(mr && kernel->reg == 1);
	verbs.dereg_mr(mr);
	kernel->gpu_end = kernel->gpu_start + SIZE;
	refused(gpu, 8192, 7);
	long before = kernel->dmabuf;

	mr = reg(host, 4096, 7);
	check(mr && kernel->dmabuf == before);
	verbs.dereg_mr(mr);
}

static void basic(void)
{
	served(gpu, 8192, 7);
	void *mr = reg(host, 4096, 7);

	check(mr);
	if (mr)
		verbs.dereg_mr(mr);
	/* From here on, a peer-memory client serves the address. */
	long before = cuda->exports;

	kernel->gpu_end = kernel->gpu_start;
	mr = reg(gpu, 8192, 7);
	check(mr && cuda->exports == before);
	if (mr)
		verbs.dereg_mr(mr);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; void (*run)(void); } groups[] = {
		{ "parts", parts }, { "errors", errors }, { "failing", failing },
		{ "flags", flags }, { "pcie", pcie }, { "contexts", contexts }, { "many", many },
		{ "threads", threads }, { "forks", forks }, { "rereg", rereg }, { "cost", cost },
		{ "off", off }, { "force", force }, { "basic", basic }, { "cancels", cancels },
		{ "pipes", pipes }, { "no_cuda", no_cuda },
	};

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc < 2)
		return 100;
	set_up(argc > 2 && strcmp(argv[2], "-") ? argv[2] : NULL);
	if (!strcmp(argv[1], "forks") && verbs.fork_init())
		return 101;
	open_device();
	if (strcmp(argv[1], "cost") && strcmp(argv[1], "no_cuda"))
		open_cuda();
	if (!strcmp(argv[1], "failure")) {
		one_failure(argc > 3 ? atoi(argv[3]) : 0, argc > 4 ? atoi(argv[4]) : 0);
		return failures;
	}
	for (size_t at = 0; at < sizeof(groups) / sizeof(*groups); at++) {
		if (!strcmp(argv[1], groups[at].name)) {
			groups[at].run();
			return failures;
		}
	}
	return 100;
}
