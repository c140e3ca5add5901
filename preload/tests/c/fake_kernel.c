// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A kernel with one RDMA device, for the real libibverbs and librxe. A test preloads this library,
 * so that it gets the calls for /dev/infiniband/uverbs0. The kernel supports the old write()
 * interface. Its ioctl() interface supports only registrations by dma-buf.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
#include <rdma/rdma_user_ioctl.h>

#include "fake_kernel.h"

struct fake_kernel fake_kernel = { .reg_error = EFAULT };

#define count(field) __atomic_fetch_add(&fake_kernel.field, 1, __ATOMIC_RELAXED)

static const char device[] = "/dev/infiniband/uverbs0";
static int cdev = -1;

static const char *redirect(const char *path)
{
	return strcmp(path, device) ? path : "/dev/null";
}

static int do_open(const char *path, int flags, mode_t mode)
{
	int fd = syscall(SYS_openat, AT_FDCWD, redirect(path), flags, mode);

	if (!strcmp(path, device))
		cdev = fd;
	return fd;
}

static mode_t mode_of(int flags, va_list rest)
{
	return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

int open(const char *path, int flags, ...)
{
	va_list rest;

	va_start(rest, flags);
	int fd = do_open(path, flags, mode_of(flags, rest));

	va_end(rest);
	return fd;
}

int open64(const char *path, int flags, ...)
{
	va_list rest;

	va_start(rest, flags);
	int fd = do_open(path, flags, mode_of(flags, rest));

	va_end(rest);
	return fd;
}

int stat(const char *path, struct stat *it)
{
	return fstatat(AT_FDCWD, redirect(path), it, 0);
}

int stat64(const char *path, struct stat64 *it)
{
	return fstatat64(AT_FDCWD, redirect(path), it, 0);
}

/* The name of stat in glibc before 2.33. */
int __xstat(int version, const char *path, struct stat *it)
{
	return stat(path, it);
}

/* Without netlink, libibverbs reads SYSFS_PATH. */
int socket(int domain, int type, int protocol)
{
	if (domain == AF_NETLINK && protocol == 20) {
		errno = EPROTONOSUPPORT;
		return -1;
	}
	return syscall(SYS_socket, domain, type, protocol);
}

int madvise(void *start, size_t length, int advice)
{
	if (advice == MADV_DONTFORK)
		count(dontfork);
	if (advice == MADV_DOFORK)
		count(dofork);
	return syscall(SYS_madvise, start, length, advice);
}

#ifndef KEEP_MALLOC
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);

void *malloc(size_t size)
{
	count(allocations);
	return __libc_malloc(size);
}

void *calloc(size_t number, size_t size)
{
	count(allocations);
	return __libc_calloc(number, size);
}

void *realloc(void *old, size_t size)
{
	count(allocations);
	if (old)
		count(frees);
	return __libc_realloc(old, size);
}

void free(void *old)
{
	if (old)
		count(frees);
	__libc_free(old);
}
#endif

static atomic_uint handles = 1;

/* Makes the checks of ib_uverbs_reg_mr that concern the caller's memory. */
static int reg_mr(const struct ib_uverbs_reg_mr *in)
{
	struct ib_uverbs_reg_mr_resp *out = (void *)in->response;

	count(reg);
	if (in->start + in->length > fake_kernel.gpu_start && in->start < fake_kernel.gpu_end) {
		count(reg_failed);
		return fake_kernel.reg_error;
	}
	if (!in->start) {
		count(reg_failed);
		return EFAULT;
	}
	out->mr_handle = handles++;
	out->lkey = out->rkey = out->mr_handle << 8;
	return 0;
}

ssize_t write(int fd, const void *buffer, size_t size)
{
	const struct ib_uverbs_cmd_hdr *header = buffer;
	int error = 0;

	if (fd != cdev || cdev < 0)
		return syscall(SYS_write, fd, buffer, size);
	pthread_testcancel();
	switch (header->command) {
	case IB_USER_VERBS_CMD_GET_CONTEXT: {
		const struct ib_uverbs_get_context *in = (void *)(header + 1);
		struct ib_uverbs_get_context_resp *out = (void *)in->response;

		out->async_fd = syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDONLY, 0);
		out->num_comp_vectors = 1;
		break;
	}
	case IB_USER_VERBS_CMD_ALLOC_PD: {
		const struct ib_uverbs_alloc_pd *in = (void *)(header + 1);
		struct ib_uverbs_alloc_pd_resp *out = (void *)in->response;

		out->pd_handle = handles++;
		break;
	}
	case IB_USER_VERBS_CMD_REG_MR:
		error = reg_mr((void *)(header + 1));
		break;
	case IB_USER_VERBS_CMD_DEREG_MR:
		count(dereg);
		break;
	case IB_USER_VERBS_CMD_REREG_MR:
		count(rereg);
		error = EOPNOTSUPP;
		break;
	}
	if (error) {
		errno = error;
		return -1;
	}
	return size;
}

/* Returns an attribute of a command, or NULL. */
static struct ib_uverbs_attr *find(struct ib_uverbs_ioctl_hdr *header, unsigned int id)
{
	for (int at = 0; at < header->num_attrs; at++)
		if (header->attrs[at].attr_id == id)
			return &header->attrs[at];
	return NULL;
}

/* Makes the checks of UVERBS_METHOD_REG_DMABUF_MR and ib_umem_dmabuf_get. */
static int reg_dmabuf(struct ib_uverbs_ioctl_hdr *header)
{
#define ATTR(name) find(header, UVERBS_ATTR_REG_DMABUF_MR_##name)
	struct stat it;
	unsigned int number = handles++;
	uint64_t offset = ATTR(OFFSET)->data, length = ATTR(LENGTH)->data;
	uint64_t iova = ATTR(IOVA)->data, access = ATTR(ACCESS_FLAGS)->data;

	count(dmabuf);
	/* The test reads these values. Another thread's call may overwrite them. */
	fake_kernel.offset = offset;
	fake_kernel.length = length;
	fake_kernel.iova = iova;
	fake_kernel.access = access;
	if (fake_kernel.dmabuf_error)
		return fake_kernel.dmabuf_error;
	if (access & ~(0xfull | 1u << 20))
		return EINVAL;
	if (fstat(ATTR(FD)->data_s64, &it))
		return EBADF;
	/* The stand-in libcuda sets S_IXOTH on the file for a mapping over PCIe. */
	if (fake_kernel.dmabuf_default_error && !(it.st_mode & S_IXOTH))
		return fake_kernel.dmabuf_default_error;
	if ((offset ^ iova) & 4095)
		return EINVAL;
	if ((uint64_t)it.st_size < offset + length)
		return EINVAL;
	ATTR(HANDLE)->data = number;
	*(uint32_t *)ATTR(RESP_LKEY)->data = *(uint32_t *)ATTR(RESP_RKEY)->data = number << 8;
	return 0;
#undef ATTR
}

/* Makes the checks of devx_umem_get of mlx5_ib. */
static int reg_umem(struct ib_uverbs_ioctl_hdr *header)
{
#define ATTR(name) find(header, MLX5_IB_ATTR_DEVX_UMEM_REG_##name)
	struct ib_uverbs_attr *fd = ATTR(DMABUF_FD);
	uint64_t offset = ATTR(ADDR)->data, length = ATTR(LEN)->data;
	struct stat it;

	if (header->length != sizeof(*header) + header->num_attrs * sizeof(*header->attrs))
		return EINVAL;
	if (header->driver_id != RDMA_DRIVER_MLX5)
		return EINVAL;
	fake_kernel.offset = offset;
	fake_kernel.length = length;
	fake_kernel.access = ATTR(ACCESS)->data;
	if (fd && (fd->len || fd->flags != UVERBS_ATTR_F_MANDATORY))
		return EINVAL;
	if (fake_kernel.dmabuf_error)
		return fake_kernel.dmabuf_error;
	if (!fd || fstat(fd->data_s64, &it))
		return EFAULT;
	if ((uint64_t)it.st_size < offset + length)
		return EINVAL;
	ATTR(HANDLE)->data = 12;
	*(uint32_t *)ATTR(OUT_ID)->data = 4711;
	return 0;
#undef ATTR
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list rest;

	va_start(rest, request);
	void *argument = va_arg(rest, void *);

	va_end(rest);
	if (fd != cdev || cdev < 0 || request != RDMA_VERBS_IOCTL)
		return syscall(SYS_ioctl, fd, request, argument);

	struct ib_uverbs_ioctl_hdr *header = argument;
	int error = ENOTTY;

	if (header->object_id == UVERBS_OBJECT_MR &&
	    header->method_id == UVERBS_METHOD_REG_DMABUF_MR) {
		error = reg_dmabuf(header);
		if (error)
			count(dmabuf_failed);
	}
	if (header->object_id == MLX5_IB_OBJECT_DEVX_UMEM &&
	    header->method_id == MLX5_IB_METHOD_DEVX_UMEM_REG)
		error = reg_umem(header);
	if (!error)
		return 0;
	errno = error;
	return -1;
}
