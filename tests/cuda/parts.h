/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Memory of several adjacent allocations, as in PyTorch's expandable segments.
 * The addresses are reserved first, then the parts are mapped one after the
 * other. All parts have the same size. The addresses include room for one more
 * part, which stays empty, so that no other memory is adjacent.
 */
#ifndef _TESTS_CUDA_PARTS_H_
#define _TESTS_CUDA_PARTS_H_

#include <cuda.h>

static inline CUresult add_part(CUdeviceptr address, size_t part)
{
	CUmemAllocationProp properties = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.location.type = CU_MEM_LOCATION_TYPE_DEVICE,
		.allocFlags.gpuDirectRDMACapable = 1,
	};
	CUmemAccessDesc access = { .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;
	CUresult result = cuCtxGetDevice(&properties.location.id);

	if (!result)
		result = cuMemCreate(&handle, part, &properties, 0);
	if (result)
		return result;
	access.location = properties.location;
	result = cuMemMap(address, part, 0, handle, 0);
	cuMemRelease(handle);
	return result ? result : cuMemSetAccess(address, part, &access, 1);
}

/* If this fails, the parts that were mapped stay until the process ends. */
static inline CUresult allocate_parts(CUdeviceptr *address, size_t size,
				      size_t part)
{
	size_t all = (size + part - 1) / part * part;
	CUresult result = cuMemAddressReserve(address, all + part, 0, 0, 0);

	for (size_t at = 0; !result && at < all; at += part)
		result = add_part(*address + at, part);
	return result;
}

static inline CUresult free_parts(CUdeviceptr address)
{
	size_t part, all = 0;
	CUresult result = cuMemGetAddressRange(NULL, &part, address);

	if (result)
		return result;
	while (!cuMemGetAddressRange(NULL, NULL, address + all))
		all += part;
	result = cuMemUnmap(address, all);
	return result ? result : cuMemAddressFree(address, all + part);
}

#endif /* _TESTS_CUDA_PARTS_H_ */
