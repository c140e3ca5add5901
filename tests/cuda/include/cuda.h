/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * The part of CUDA's driver API that the tests use, written from its public
 * documentation. Consumers are compiled with this file as cuda.h. cuda.c and
 * memory.c implement the functions on the stand-in GPU.
 */
#ifndef _TESTS_CUDA_H_
#define _TESTS_CUDA_H_

#include <stddef.h>

#define CUDA_VERSION	12080

/* A program that uses a name without a version gets this version. */
#define cuCtxCreate		cuCtxCreate_v2
#define cuCtxDestroy		cuCtxDestroy_v2
#define cuCtxPopCurrent		cuCtxPopCurrent_v2
#define cuCtxPushCurrent	cuCtxPushCurrent_v2
#define cuDevicePrimaryCtxRelease	cuDevicePrimaryCtxRelease_v2
#define cuDeviceTotalMem	cuDeviceTotalMem_v2
#define cuEventDestroy		cuEventDestroy_v2
#define cuGetProcAddress	cuGetProcAddress_v2
#define cuMemAlloc		cuMemAlloc_v2
#define cuMemAllocHost		cuMemAllocHost_v2
#define cuMemFree		cuMemFree_v2
#define cuMemGetAddressRange	cuMemGetAddressRange_v2
#define cuMemHostRegister	cuMemHostRegister_v2
#define cuMemcpyDtoD		cuMemcpyDtoD_v2
#define cuMemcpyDtoH		cuMemcpyDtoH_v2
#define cuMemcpyHtoD		cuMemcpyHtoD_v2
#define cuStreamDestroy		cuStreamDestroy_v2

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUevent_st *CUevent;
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
	char bytes[16];
} CUuuid;

typedef enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_SUPPORTED = 801,
} CUresult;

typedef enum {
	CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
	CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
	CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
	CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
	CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
	CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116,
	CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
} CUdevice_attribute;

typedef enum {
	CU_POINTER_ATTRIBUTE_CONTEXT = 1,
	CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
	CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
	CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
	CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
	CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
	CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
} CUpointer_attribute;

typedef enum {
	CU_MEMORYTYPE_HOST = 1,
	CU_MEMORYTYPE_DEVICE = 2,
} CUmemorytype;

typedef enum {
	CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
} CUmemRangeHandleType;

typedef enum {
	CU_MEM_ALLOCATION_TYPE_PINNED = 1,
} CUmemAllocationType;

typedef enum {
	CU_MEM_HANDLE_TYPE_NONE = 0,
} CUmemAllocationHandleType;

typedef enum {
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
} CUmemLocationType;

typedef struct {
	CUmemLocationType type;
	int id;
} CUmemLocation;

typedef struct {
	CUmemAllocationType type;
	CUmemAllocationHandleType requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType;
		unsigned char gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef enum {
	CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
	CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
} CUmemAccess_flags;

typedef struct {
	CUmemLocation location;
	CUmemAccess_flags flags;
} CUmemAccessDesc;

typedef enum {
	CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
	CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
} CUmemAllocationGranularity_flags;

typedef enum {
	CU_GET_PROC_ADDRESS_SUCCESS = 0,
	CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
} CUdriverProcAddressQueryResult;

#define CU_CTX_MAP_HOST	0x08

CUresult cuInit(unsigned int flags);
CUresult cuDriverGetVersion(int *version);
CUresult cuGetErrorName(CUresult error, const char **name);
CUresult cuGetErrorString(CUresult error, const char **text);
CUresult cuGetProcAddress(const char *name, void **function, int version,
			  unsigned long long flags,
			  CUdriverProcAddressQueryResult *status);

CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute,
			      CUdevice device);
CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *address);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGetName(char *name, int size, CUdevice device);
CUresult cuDeviceGetPCIBusId(char *address, int size, CUdevice device);
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
CUresult cuDeviceTotalMem(size_t *size, CUdevice device);

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags,
				    int *active);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease(CUdevice device);
CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device);
CUresult cuCtxDestroy(CUcontext context);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuCtxGetFlags(unsigned int *flags);
CUresult cuCtxGetId(CUcontext context, unsigned long long *id);
CUresult cuCtxPopCurrent(CUcontext *context);
CUresult cuCtxPushCurrent(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSetFlags(unsigned int flags);

CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size,
			     size_t alignment, CUdeviceptr wanted,
			     unsigned long long flags);
CUresult cuMemAlloc(CUdeviceptr *address, size_t size);
CUresult cuMemAllocHost(void **address, size_t size);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
		     const CUmemAllocationProp *properties,
		     unsigned long long flags);
CUresult cuMemFree(CUdeviceptr address);
CUresult cuMemFreeHost(void *address);
CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size,
			      CUdeviceptr address);
CUresult cuMemGetAllocationGranularity(size_t *size,
				       const CUmemAllocationProp *properties,
				       CUmemAllocationGranularity_flags which);
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
						CUmemGenericAllocationHandle handle);
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address,
				       size_t size, CUmemRangeHandleType type,
				       unsigned long long flags);
CUresult cuMemHostRegister(void *address, size_t size, unsigned int flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
		  CUmemGenericAllocationHandle handle,
		  unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle,
				     void *address);
CUresult cuMemSetAccess(CUdeviceptr address, size_t size,
			const CUmemAccessDesc *access, size_t count);
CUresult cuMemUnmap(CUdeviceptr address, size_t size);
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size,
		       CUstream stream);
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size);
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size);
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size);

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute,
			       CUdeviceptr address);
CUresult cuPointerGetAttributes(unsigned int count,
				CUpointer_attribute *attributes, void **values,
				CUdeviceptr address);
CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
			       CUdeviceptr address);

CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
CUresult cuStreamDestroy(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuEventCreate(CUevent *event, unsigned int flags);
CUresult cuEventDestroy(CUevent event);
CUresult cuEventQuery(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);

#endif /* _TESTS_CUDA_H_ */
