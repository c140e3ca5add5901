// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* A provider that is linked to fake_ibverbs.c. */
#include <rdma/mlx5_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <string.h>

#include "fake_verbs.h"

int ibv_cmd_reg_mr(struct pd *, void *, size_t, uint64_t, int, struct mr *, void *, size_t,
		   uint32_t *, size_t);
int ibv_cmd_reg_mr_ex(struct pd *, struct mr *, struct init_attr *);
int ibv_cmd_rereg_mr(struct mr *, uint32_t, void *, size_t, uint64_t, int, struct pd *, void *,
		     size_t, void *, size_t);
int execute_ioctl(struct context *, struct command *);
extern struct fake_counts fake_counts;

static int poll_cq(void)
{
	return 0;
}

static struct context context = { .ops = { [11] = poll_cq } };
static struct pd pd = { .context = &context };

struct fake_counts *provider_counts(void)
{
	return &fake_counts;
}

int provider_reg_mr(void *address, size_t length, int access, struct mr *mr, uint32_t *response)
{
	return ibv_cmd_reg_mr(&pd, address, length, (uintptr_t)address, access, mr, address, 0x1234,
			      response, 12);
}

int provider_reg_mr_ex(struct init_attr *attr, struct mr *mr)
{
	return ibv_cmd_reg_mr_ex(&pd, mr, attr);
}

int provider_rereg_mr(struct mr *mr, void *address, size_t length)
{
	mr->context = &context;
	return ibv_cmd_rereg_mr(mr, 1, address, length, (uintptr_t)address, 0, &pd, &pd, 0x1234,
				&pd, 0x5678);
}

/* Sends the command of __mlx5dv_devx_umem_reg_ex in libmlx5. */
int provider_umem_reg(int fd, void *address, size_t length, uint32_t access, uint32_t *id,
		      uint64_t *handle)
{
	struct command it = {
		.header = { .object_id = MLX5_IB_OBJECT_DEVX_UMEM,
			    .method_id = MLX5_IB_METHOD_DEVX_UMEM_REG,
			    .num_attrs = 6 },
		.attrs = { { .attr_id = MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR, .len = 8, .flags = 1,
			     .data = (uintptr_t)address },
			   { .attr_id = MLX5_IB_ATTR_DEVX_UMEM_REG_LEN, .len = 8, .flags = 1,
			     .data = length },
			   { .attr_id = MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS, .len = 4, .flags = 1,
			     .data = access },
			   { .attr_id = MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP, .len = 8,
			     .data = ~4095ul },
			   { .attr_id = MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, .len = 4, .flags = 1,
			     .data = (uintptr_t)id },
			   { .attr_id = MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE, .flags = 1 } },
	};
	context.cmd_fd = fd;
	int error = execute_ioctl(&context, &it);
	*handle = it.attrs[5].data;
	return it.attrs[0].data == (uintptr_t)address && it.attrs[2].data == access ? error : -1;
}
