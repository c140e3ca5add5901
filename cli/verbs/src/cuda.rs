// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPU memory through CUDA's driver API: allocation, copies, and export as dma-buf. All `unsafe`
//! code for CUDA is in this file.
//!
//! [`Cuda::load`] loads `libcuda.so.1`, which comes with the driver. Calls and constants follow the
//! documentation of CUDA's driver API. The library may lack functions that are newer than CUDA
//! 11.0. A call to a missing function returns an error.
//!
//! A context does not survive fork. A process that has loaded CUDA must start other processes by
//! exec.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::{fmt, ptr};

use anyhow::{anyhow, ensure, Context as _, Result};
use libloading::Library;

use crate::memory::Span;

/// The driver's library.
pub const LIBRARY: &str = "libcuda.so.1";

/// `CUresult`, `CUdevice`, `CUcontext`, `CUstream`, `CUdeviceptr`, `CUmemGenericAllocationHandle`.
type Code = c_int;
type Device = c_int;
type ContextPointer = *mut c_void;
type Stream = *mut c_void;
type Address = c_ulonglong;
type Handle = c_ulonglong;

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const ATTRIBUTE_MAPPING: c_int = 102;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
const ATTRIBUTE_MAPPING_RDMA: c_int = 110;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const ATTRIBUTE_DMA_BUF: c_int = 124;
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const POINTER_SYNC_MEMOPS: c_int = 6;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const RANGE_DMA_BUF: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const TYPE_PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const ACCESS_READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const GRANULARITY_MINIMUM: c_int = 0;
/// `CUDA_ERROR_INVALID_VALUE` and `CUDA_ERROR_NOT_SUPPORTED`.
const REFUSALS: [Code; 2] = [1, 801];

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Location {
    kind: c_int,
    id: Device,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *const c_void,
    compression: u8,
    rdma_capable: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug)]
struct Access {
    location: Location,
    flags: c_int,
}

/// Declares the functions that this module calls, and the code that looks up these functions in the
/// library.
macro_rules! functions {
    ($($field:ident: $symbol:literal = fn($($argument:ty),* $(,)?);)*) => {
        /// Functions of the library, as plain pointers. The library is never unloaded.
        struct Functions {
            $($field: Option<unsafe extern "C" fn($($argument),*) -> Code>,)*
        }

        impl Functions {
            fn of(library: &Library) -> Self {
                Self {
                    $(
                        // SAFETY: The symbol is a function with this signature in every version of
                        // CUDA's driver API.
                        $field: unsafe {
                            library
                                .get::<unsafe extern "C" fn($($argument),*) -> Code>($symbol)
                                .ok()
                                .map(|symbol| *symbol)
                        },
                    )*
                }
            }
        }
    };
}

functions! {
    init: b"cuInit\0" = fn(c_uint);
    error_name: b"cuGetErrorName\0" = fn(Code, *mut *const c_char);
    device_count: b"cuDeviceGetCount\0" = fn(*mut c_int);
    device_get: b"cuDeviceGet\0" = fn(*mut Device, c_int);
    device_name: b"cuDeviceGetName\0" = fn(*mut c_char, c_int, Device);
    device_bus_id: b"cuDeviceGetPCIBusId\0" = fn(*mut c_char, c_int, Device);
    device_attribute: b"cuDeviceGetAttribute\0" = fn(*mut c_int, c_int, Device);
    context_retain: b"cuDevicePrimaryCtxRetain\0" = fn(*mut ContextPointer, Device);
    context_release: b"cuDevicePrimaryCtxRelease_v2\0" = fn(Device);
    context_set: b"cuCtxSetCurrent\0" = fn(ContextPointer);
    allocate: b"cuMemAlloc_v2\0" = fn(*mut Address, usize);
    free: b"cuMemFree_v2\0" = fn(Address);
    copy_in: b"cuMemcpyHtoD_v2\0" = fn(Address, *const c_void, usize);
    copy_out: b"cuMemcpyDtoH_v2\0" = fn(*mut c_void, Address, usize);
    stream_wait: b"cuStreamSynchronize\0" = fn(Stream);
    granularity: b"cuMemGetAllocationGranularity\0" = fn(*mut usize, *const Properties, c_int);
    reserve: b"cuMemAddressReserve\0" = fn(*mut Address, usize, usize, Address, c_ulonglong);
    unreserve: b"cuMemAddressFree\0" = fn(Address, usize);
    create: b"cuMemCreate\0" = fn(*mut Handle, usize, *const Properties, c_ulonglong);
    release: b"cuMemRelease\0" = fn(Handle);
    map: b"cuMemMap\0" = fn(Address, usize, usize, Handle, c_ulonglong);
    unmap: b"cuMemUnmap\0" = fn(Address, usize);
    set_access: b"cuMemSetAccess\0" = fn(Address, usize, *const Access, usize);
    pointer_set: b"cuPointerSetAttribute\0" = fn(*const c_void, c_int, Address);
    range_handle: b"cuMemGetHandleForAddressRange\0" =
        fn(*mut c_void, Address, usize, c_int, c_ulonglong);
}

/// An error from a call to CUDA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct Failed {
    /// CUDA's name of the function.
    pub call: &'static str,
    /// `CUresult`.
    pub code: i32,
    /// The library's name of the code.
    pub name: String,
}

impl Failed {
    /// Returns `true` if the driver refused the arguments, or does not support the call.
    pub fn is_refusal(&self) -> bool {
        REFUSALS.contains(&self.code)
    }
}

/// Error because the library or the GPU lacks a function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(String);

/// CUDA's driver API, initialised.
pub struct Cuda {
    functions: Functions,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").finish_non_exhaustive()
    }
}

/// Calls a function of the library. Returns an error if the function fails or is missing.
macro_rules! call {
    ($cuda:expr, $field:ident, $name:literal, $($argument:expr),* $(,)?) => {{
        let function = $cuda
            .functions
            .$field
            .ok_or_else(|| Unsupported(format!("{LIBRARY} has no {}", $name)))?;
        // SAFETY: The signature is CUDA's. The caller's pointers are valid for the call, for the
        // sizes given. A comment at each call states the memory that the function accesses.
        let code = unsafe { function($($argument),*) };
        $cuda.checked($name, code)
    }};
}

impl Cuda {
    /// Loads the library, and initialises CUDA for this process.
    ///
    /// # Errors
    /// The library is missing, or the driver cannot be reached ([`Failed`]).
    pub fn load() -> Result<Arc<Self>> {
        // SAFETY: NVIDIA's library has constructors without preconditions.
        let library = unsafe { Library::new(LIBRARY) }
            .map_err(|error| anyhow!("{LIBRARY} cannot be loaded: {}", crate::cause(&error)))?;
        let functions = Functions::of(&library);
        // The library has its own threads, so it stays loaded until the process exits.
        std::mem::forget(library);
        let cuda = Self { functions };
        call!(cuda, init, "cuInit", 0)?;
        Ok(Arc::new(cuda))
    }

    fn checked(&self, call: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(Failed {
            call,
            code,
            name: self.name_of(code),
        }
        .into())
    }

    fn name_of(&self, code: Code) -> String {
        let mut name: *const c_char = ptr::null();
        if let Some(function) = self.functions.error_name {
            // SAFETY: The function writes one pointer, to a string that lives as long as the
            // library.
            unsafe { function(code, &raw mut name) };
        }
        if name.is_null() {
            return "an error without a name".to_owned();
        }
        // SAFETY: The string lives as long as the library, and ends with a NUL.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }

    /// Returns the GPUs that this process may use, in CUDA's order.
    pub fn gpus(self: &Arc<Self>) -> Result<Vec<Gpu>> {
        let mut count = 0;
        // CUDA writes one number.
        call!(self, device_count, "cuDeviceGetCount", &raw mut count)?;
        (0..count).map(|index| Gpu::new(self, index)).collect()
    }
}

/// Returns a string that a function of the library writes.
fn text(write: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
    let mut bytes = [0u8; 128];
    write(bytes.as_mut_ptr().cast(), bytes.len() as c_int)?;
    let name =
        CStr::from_bytes_until_nul(&bytes).context("CUDA returned a string without a NUL")?;
    Ok(name.to_string_lossy().into_owned())
}

/// Converts a PCI address from CUDA's format to the kernel's.
fn pci_address(cuda: &str) -> String {
    // CUDA uses capital letters, and some drivers write eight digits of the domain.
    let lower = cuda.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[4..])
        }
        _ => lower,
    }
}

/// A GPU, as enumerated by CUDA.
#[derive(Debug, Clone)]
pub struct Gpu {
    cuda: Arc<Cuda>,
    device: Device,
    name: String,
    pci: String,
}

impl Gpu {
    fn new(cuda: &Arc<Cuda>, index: c_int) -> Result<Self> {
        let mut device = 0;
        // CUDA writes one number.
        call!(cuda, device_get, "cuDeviceGet", &raw mut device, index)?;
        // CUDA writes at most `len` bytes.
        let name = text(|to, len| call!(cuda, device_name, "cuDeviceGetName", to, len, device))?;
        let pci =
            text(|to, len| call!(cuda, device_bus_id, "cuDeviceGetPCIBusId", to, len, device))?;
        Ok(Self {
            cuda: Arc::clone(cuda),
            device,
            name,
            pci: pci_address(&pci),
        })
    }

    /// Returns the product name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the PCI address, in the form `0000:3b:00.0`.
    pub fn pci(&self) -> &str {
        &self.pci
    }

    /// Returns `true` if the driver can export GPU memory as dma-buf.
    pub fn has_dma_buf(&self) -> Result<bool> {
        self.has(ATTRIBUTE_DMA_BUF)
    }

    fn has(&self, attribute: c_int) -> Result<bool> {
        let mut value = 0;
        // CUDA writes one number.
        call!(
            self.cuda,
            device_attribute,
            "cuDeviceGetAttribute",
            &raw mut value,
            attribute,
            self.device
        )?;
        Ok(value != 0)
    }

    /// Makes the primary context of this GPU current in the calling thread.
    pub fn enter(&self) -> Result<Context> {
        let mut context = ptr::null_mut();
        // CUDA writes one pointer.
        call!(
            self.cuda,
            context_retain,
            "cuDevicePrimaryCtxRetain",
            &raw mut context,
            self.device
        )?;
        let entered = Context { gpu: self.clone() };
        call!(self.cuda, context_set, "cuCtxSetCurrent", context)?;
        Ok(entered)
    }
}

/// Primary context of a GPU, current in the thread that created it, and released on drop.
#[derive(Debug)]
pub struct Context {
    gpu: Gpu,
}

impl Context {
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Allocates GPU memory. Makes copies to and from this memory synchronous, as GPUDirect RDMA
    /// requires.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Result<Allocation> {
        let mut address = 0;
        let cuda = &self.gpu.cuda;
        // CUDA writes one number.
        call!(cuda, allocate, "cuMemAlloc", &raw mut address, len)?;
        let allocation = Allocation {
            context: Arc::clone(self),
            address,
            len,
            parts: None,
            freed: false,
        };
        let on: c_uint = 1;
        // CUDA reads one number.
        call!(
            cuda,
            pointer_set,
            "cuPointerSetAttribute",
            ptr::from_ref(&on).cast(),
            POINTER_SYNC_MEMOPS,
            address
        )?;
        Ok(allocation)
    }

    /// Allocates GPU memory in two allocations that are mapped side by side, as in PyTorch's
    /// expandable segments. The first `head` bytes lie in the first allocation.
    ///
    /// # Errors
    /// [`Unsupported`] if the library or the GPU cannot map allocations.
    pub fn allocate_two(self: &Arc<Self>, head: usize, len: usize) -> Result<Allocation> {
        let (gpu, cuda) = (&self.gpu, &self.gpu.cuda);
        if !gpu.has(ATTRIBUTE_MAPPING)? {
            return Err(Unsupported("the GPU has no cuMemMap".to_owned()).into());
        }
        let location = Location {
            kind: LOCATION_DEVICE,
            id: gpu.device,
        };
        let properties = Properties {
            kind: TYPE_PINNED,
            handle_types: 0,
            location,
            win32: ptr::null(),
            compression: 0,
            // Drivers that do not know the attribute refuse the query.
            rdma_capable: gpu.has(ATTRIBUTE_MAPPING_RDMA).unwrap_or(false).into(),
            usage: 0,
            reserved: [0; 4],
        };
        let mut granule = 0;
        // CUDA reads the properties, and writes one number.
        call!(
            cuda,
            granularity,
            "cuMemGetAllocationGranularity",
            &raw mut granule,
            &raw const properties,
            GRANULARITY_MINIMUM
        )?;
        let tail = len.checked_sub(head).context("head exceeds len")?;
        ensure!(head > 0 && tail > 0 && granule > 0, "{head:#x}+{tail:#x}");
        let size = head.max(tail).checked_next_multiple_of(granule);
        let size = size.context("the size of an allocation")?;
        let all = size.checked_mul(2).context("the size of two allocations")?;
        let mut start = 0;
        // CUDA writes one number.
        call!(
            cuda,
            reserve,
            "cuMemAddressReserve",
            &raw mut start,
            all,
            0,
            0,
            0
        )?;
        let mut parts = Parts {
            start,
            size,
            mapped: 0,
        };
        let mapped = parts.fill(cuda, &properties);
        let memory = Allocation {
            context: Arc::clone(self),
            address: start + (size - head) as u64,
            len,
            parts: Some(parts),
            freed: false,
        };
        // If `fill` failed, the drop of `memory` frees the parts.
        mapped?;
        let access = Access {
            location,
            flags: ACCESS_READ_WRITE,
        };
        // CUDA reads one description.
        call!(
            cuda,
            set_access,
            "cuMemSetAccess",
            start,
            all,
            &raw const access,
            1
        )?;
        Ok(memory)
    }
}

/// Addresses that are reserved for two allocations side by side. Each allocation lives as long as
/// its mapping.
#[derive(Debug)]
struct Parts {
    start: Address,
    /// Size of each allocation, in bytes.
    size: usize,
    /// Number of mapped allocations.
    mapped: usize,
}

impl Parts {
    fn at(&self, index: usize) -> Address {
        self.start + (index * self.size) as u64
    }

    /// Creates and maps both allocations. All functions used here and in [`Self::free`] came with
    /// CUDA 10.2.
    fn fill(&mut self, cuda: &Cuda, properties: &Properties) -> Result<()> {
        while self.mapped < 2 {
            let (at, mut handle) = (self.at(self.mapped), 0);
            // CUDA reads the properties, and writes one number.
            call!(
                cuda,
                create,
                "cuMemCreate",
                &raw mut handle,
                self.size,
                properties,
                0
            )?;
            let mapped = call!(cuda, map, "cuMemMap", at, self.size, 0, handle, 0);
            // The mapping keeps the memory allocated.
            let released = call!(cuda, release, "cuMemRelease", handle);
            mapped?;
            self.mapped += 1;
            released?;
        }
        Ok(())
    }

    /// Unmaps the allocations and releases the reserved addresses. Unmapping an allocation frees
    /// its memory.
    fn free(&mut self, cuda: &Cuda) -> Result<()> {
        while let Some(last) = self.mapped.checked_sub(1) {
            call!(cuda, unmap, "cuMemUnmap", self.at(last), self.size)?;
            self.mapped = last;
        }
        call!(
            cuda,
            unreserve,
            "cuMemAddressFree",
            self.start,
            2 * self.size
        )
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(release) = self.gpu.cuda.functions.context_release {
            // SAFETY: `enter` retained the context once.
            unsafe { release(self.gpu.device) };
        }
    }
}

/// GPU memory of this process, freed on drop at the latest.
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    address: Address,
    len: usize,
    /// The two allocations of [`Context::allocate_two`].
    parts: Option<Parts>,
    freed: bool,
}

impl Allocation {
    /// Returns the requested number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the memory lies in two allocations.
    pub fn is_two(&self) -> bool {
        self.parts.is_some()
    }

    /// Returns the range `[offset, offset + len)` of the memory.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.check(offset, len)?;
        Ok(Span::of_device(self.address + offset as u64, len as u64))
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        let end = offset.checked_add(len).context("offset overflow")?;
        ensure!(
            end <= self.len,
            "{offset:#x}+{len:#x} is outside an allocation of {:#x} bytes",
            self.len
        );
        Ok(())
    }

    fn check_alive(&self, offset: usize, len: usize) -> Result<()> {
        ensure!(!self.freed, "a copy to or from freed GPU memory");
        self.check(offset, len)
    }

    /// Copies from the GPU. Returns when the bytes have arrived.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check_alive(offset, out.len())?;
        // CUDA writes as many bytes as the slice has. The host memory is pageable, so the call
        // returns after the copy.
        call!(
            self.context.gpu.cuda,
            copy_out,
            "cuMemcpyDtoH",
            out.as_mut_ptr().cast(),
            self.address + offset as u64,
            out.len()
        )
    }

    /// Copies to the GPU. Returns when the bytes have arrived.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check_alive(offset, data.len())?;
        let cuda = &self.context.gpu.cuda;
        // CUDA reads as many bytes as the slice has.
        call!(
            cuda,
            copy_in,
            "cuMemcpyHtoD",
            self.address + offset as u64,
            data.as_ptr().cast(),
            data.len()
        )?;
        match self.parts {
            // The memory's attribute makes copies synchronous.
            None => Ok(()),
            // Memory of `cuMemCreate` has no such attribute. Copies are on the default stream.
            Some(_) => call!(cuda, stream_wait, "cuStreamSynchronize", ptr::null_mut()),
        }
    }

    /// Exports the first `len` bytes, which are whole pages of the host, as a dma-buf.
    ///
    /// # Errors
    /// [`Failed`] with `CUDA_ERROR_NOT_SUPPORTED` if the driver does not export dma-bufs, or
    /// [`Unsupported`] if an old library lacks the function.
    pub fn dma_buf(&self, len: usize) -> Result<OwnedFd> {
        self.check_alive(0, len)?;
        let mut descriptor: c_int = -1;
        // CUDA writes one descriptor.
        call!(
            self.context.gpu.cuda,
            range_handle,
            "cuMemGetHandleForAddressRange",
            (&raw mut descriptor).cast(),
            self.address,
            len,
            RANGE_DMA_BUF,
            0
        )?;
        ensure!(
            descriptor >= 0,
            "cuMemGetHandleForAddressRange gave no descriptor"
        );
        // SAFETY: The call created the descriptor for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Frees the memory.
    pub fn free(&mut self) -> Result<()> {
        ensure!(!self.freed, "freed twice");
        let cuda = &self.context.gpu.cuda;
        match &mut self.parts {
            None => call!(cuda, free, "cuMemFree", self.address)?,
            Some(parts) => parts.free(cuda)?,
        }
        self.freed = true;
        Ok(())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.freed {
            // The free fails only if the context is already broken, which an earlier call has
            // reported.
            let _ = self.free();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_in_the_format_of_the_kernel() {
        assert_eq!(pci_address("0000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(pci_address("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(pci_address("00010000:3B:00.0"), "00010000:3b:00.0");
        assert_eq!(pci_address("3B:00.0"), "3b:00.0");
    }
}
