/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Structures of rdma-core's verbs.h, driver.h and cmd_ioctl.h, for fake_ibverbs.c and its users. */
#include <stddef.h>
#include <stdint.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>

struct context {
	void *device, *ops[32];
	int cmd_fd;
};

struct pd {
	struct context *context;
	uint32_t handle;
};

struct mr {
	struct context *context;
	struct pd *pd;
	void *address;
	size_t length;
	uint32_t handle, lkey, rkey, padding;
	int type, access;
};

struct init_attr {
	size_t length;
	int access;
	uint64_t mask, iova;
	void *address;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};

struct command {
	void *next, *next_attr, *last_attr;
	uint8_t rest[8];
	struct {
		uint16_t length, object_id, method_id, num_attrs;
		uint64_t reserved1;
		uint32_t driver_id, reserved2;
	} header;
	struct ib_uverbs_attr attrs[8];
};

struct fake_counts {
	long reg, reg_ex, rereg, dereg, dmabuf, execute;
};
