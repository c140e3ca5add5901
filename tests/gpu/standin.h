/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * What user space can ask of the stand-in GPU, beside mmap().
 *
 * mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) of
 * /dev/nvidia<N> allocates GPU memory for the calling process. The address is
 * a multiple of STANDIN_GRANULE, and so is the length of the allocation,
 * whatever the length of the mapping. MAP_FIXED at such an address is allowed.
 */
#ifndef _STANDIN_H_
#define _STANDIN_H_

#include <linux/ioctl.h>
#include <linux/types.h>

#define STANDIN_GRANULE		(2u << 20)
#define STANDIN_PAGE_SIZE	(64u << 10)

/* Free in a kernel thread, as the real driver does for deferred closes. */
#define STANDIN_FREE_KTHREAD	(1u << 0)

/**
 * struct standin_free - free an allocation of the calling process
 * @va: (in) where it starts
 * @flags: (in) STANDIN_FREE_KTHREAD or 0
 * @reserved: 0
 *
 * Returns when the memory is free and every pin has been called back. The
 * mapping stays; touching it raises SIGBUS. -EINVAL if there is none.
 */
struct standin_free {
	__u64 va;
	__u32 flags;
	__u32 reserved;
};

/**
 * struct standin_info - where an address lies
 * @va: (in) an address in an allocation of the calling process on this GPU,
 *	or 0: only the fields from @bar_start on are filled then
 * @start: start of the allocation
 * @length: its length
 * @phys: bus address of @va in the BAR
 * @run: how many bytes from @va on are contiguous in the BAR
 * @bar_start: bus address of the BAR
 * @bar_length: length of the BAR
 * @bar_pinned: bytes of the BAR that are pinned now
 * @gpu: the N of /dev/nvidia<N>
 * @reserved: 0
 * @uuid: UUID of the GPU
 * @pci: its PCI address as text
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
	__u32 reserved;
	__u8 uuid[16];
	char pci[16];
};

/**
 * struct standin_admit - let another process into the memory of this one
 * @pid: (in) the process; it has opened this GPU
 * @reserved: 0
 *
 * It may then pin, at the same addresses, whatever the calling process has on
 * this GPU, until what it had opened first is closed. There are 256 places, of
 * which the calling process has one. -EINVAL if none is left or the process
 * has not opened the GPU.
 */
struct standin_admit {
	__u32 pid;
	__u32 reserved;
};

#define STANDIN_IOC_FREE	_IOW('G', 1, struct standin_free)
#define STANDIN_IOC_INFO	_IOWR('G', 2, struct standin_info)
#define STANDIN_IOC_ADMIT	_IOW('G', 3, struct standin_admit)

#endif /* _STANDIN_H_ */
