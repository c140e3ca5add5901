// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * libibverbs of a version that is not installed. The ibv_cmd_reg_mr of this library always fails.
 * The test compiles this file with a linker script that gives the symbols a version.
 *
 *	NO_DMABUF	has no ibv_cmd_reg_dmabuf_mr (rdma-core before 34)
 *	SHIFTED		has another layout of struct verbs_mr
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "fake_verbs.h"

#ifdef SHIFTED
#define TYPE(mr) (mr)->access
#else
#define TYPE(mr) (mr)->type
#endif

struct fake_counts fake_counts;

static int failed(int error)
{
	errno = error;
	return error;
}

int ibv_cmd_reg_mr(struct pd *pd, void *address, size_t length, uint64_t iova, int access,
		   struct mr *mr, void *command, size_t command_size, uint32_t *response,
		   size_t response_size)
{
	fake_counts.reg++;
	/* All ten arguments must arrive. */
	if (command != address || command_size != 0x1234 || !response || response_size != 12)
		abort();
	return failed(EFAULT);
}

int ibv_cmd_reg_mr_ex(struct pd *pd, struct mr *mr, struct init_attr *attr)
{
	fake_counts.reg_ex++;
	if (!(attr->mask & 4))
		return failed(EFAULT);
	TYPE(mr) = 3;
	return 0;
}

int ibv_cmd_rereg_mr(struct mr *mr, uint32_t flags, void *address, size_t length, uint64_t iova,
		     int access, struct pd *pd, void *command, size_t command_size, void *response,
		     size_t response_size)
{
	fake_counts.rereg++;
	if (command_size != 0x1234 || response_size != 0x5678)
		abort();
	return failed(EINVAL);
}

int ibv_cmd_dereg_mr(struct mr *mr)
{
	fake_counts.dereg++;
	return 0;
}

#ifndef NO_DMABUF
int ibv_cmd_reg_dmabuf_mr(struct pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
			  int access, struct mr *mr, void *driver)
{
	struct stat it;

	fake_counts.dmabuf++;
	if (driver)
		abort();
	if (fstat(fd, &it) || (uint64_t)it.st_size < offset + length)
		return failed(EINVAL);
	mr->handle = 77;
	mr->lkey = mr->rkey = 0x7700;
	mr->context = pd->context;
	mr->pd = pd;
	mr->address = (void *)offset;
	mr->length = length;
	TYPE(mr) = 3;
	return 0;
}
#endif

/* Fails with EFAULT, as if the kernel could not pin the memory of mlx5dv_devx_umem_reg(). */
int execute_ioctl(struct context *context, struct command *command)
{
	fake_counts.execute++;
	command->header.length = sizeof(command->header) + 16 * command->header.num_attrs;
	command->header.driver_id = RDMA_DRIVER_MLX5;
	return failed(EFAULT);
}
