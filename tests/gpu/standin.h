/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * The interface of the stand-in GPU for user space, besides mmap().
 *
 * mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) of
 * /dev/nvidia<N> allocates GPU memory for the calling process. The address and
 * the length of the allocation are multiples of STANDIN_GRANULE, whatever the
 * length of the mapping. MAP_FIXED is allowed at such an address.
 */
#ifndef _STANDIN_H_
#define _STANDIN_H_

#include <linux/ioctl.h>
#include <linux/types.h>

#define STANDIN_GRANULE		(2u << 20)
#define STANDIN_PAGE_SIZE	(64u << 10)

/*
 * Free the memory in a kernel thread, as the real driver does after a deferred
 * close.
 */
#define STANDIN_FREE_KTHREAD	(1u << 0)

/**
 * struct standin_free - free an allocation of the calling process
 * @va: (in) start of the allocation
 * @flags: (in) STANDIN_FREE_KTHREAD or 0
 * @reserved: 0
 *
 * Returns when the memory is freed and all callbacks have run. The mapping
 * stays, but an access raises SIGBUS. Fails with -EINVAL if there is no
 * allocation.
 */
struct standin_free {
	__u64 va;
	__u32 flags;
	__u32 reserved;
};

/**
 * struct standin_info - location of an address
 * @va: (in) an address in an allocation of the calling process on this GPU,
 *	or 0 to get only the fields from @bar_start on
 * @start: start of the allocation
 * @length: length of the allocation
 * @phys: bus address of @va in the BAR
 * @run: number of bytes from @va on that are contiguous in the BAR
 * @bar_start: bus address of the BAR
 * @bar_length: length of the BAR
 * @bar_pinned: number of bytes of the BAR that are pinned now
 * @gpu: the N of /dev/nvidia<N>
 * @dma_buf: 1 if memory can be exported, else 0
 * @uuid: UUID of the GPU
 * @pci: PCI address of the GPU as text
 */
struct standin_info {
	__u64 va;
	__u64 start;
	__u64 length;
	__u64 phys;
	__u64 run;
	__u64 bar_start;
	__u64 bar_length;
	__u64 bar_pinned;
	__u32 gpu;
	__u32 dma_buf;
	__u8 uuid[16];
	char pci[16];
};

/**
 * struct standin_admit - give another process access to the caller's memory
 * @pid: (in) the process, which has opened this GPU
 * @reserved: 0
 *
 * The process may then pin all memory of the calling process on this GPU, at
 * the same addresses, until it closes its first file of the GPU. At most 256
 * processes have access, including the calling process. Fails with -EINVAL if
 * 256 processes have access already, or if the process has not opened the GPU.
 */
struct standin_admit {
	__u32 pid;
	__u32 reserved;
};

/**
 * struct standin_export - export memory of the calling process as a dma-buf
 * @va: (in) start address
 * @length: (in) number of bytes
 * @flags: 0
 * @fd: (out) the descriptor, closed on exec
 *
 * The range may span adjacent allocations on this GPU. Fails with -EINVAL
 * unless the range consists of whole kernel pages and is all GPU memory, and
 * with -EOPNOTSUPP if the driver exports nothing.
 */
struct standin_export {
	__u64 va;
	__u64 length;
	__u32 flags;
	__s32 fd;
};

#define STANDIN_IOC_FREE	_IOW('G', 1, struct standin_free)
#define STANDIN_IOC_INFO	_IOWR('G', 2, struct standin_info)
#define STANDIN_IOC_ADMIT	_IOW('G', 3, struct standin_admit)
#define STANDIN_IOC_EXPORT	_IOWR('G', 4, struct standin_export)

#endif /* _STANDIN_H_ */
