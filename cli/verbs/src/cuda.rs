// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! GPU memory by CUDA's driver API: allocated, copied to and from, exported as a dma-buf. The one file with `unsafe`
//! for it.
//!
//! `libcuda.so.1` comes with the driver and is looked up when [`Cuda::load`] is called. Calls and constants are those
//! of CUDA's driver API documentation; what came after CUDA 11.0 may be missing from the library, and is then an error
//! of the call that needs it.
//!
//! A context does not survive fork: a process that has loaded CUDA starts others by exec alone.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::{fmt, ptr};

use anyhow::{anyhow, ensure, Context as _, Result};
use libloading::Library;

use crate::memory::Span;

/// The driver's library.
pub const LIBRARY: &str = "libcuda.so.1";

/// `CUresult`, `CUdevice`, `CUcontext`, `CUdeviceptr`.
type Code = c_int;
type Device = c_int;
type ContextPointer = *mut c_void;
type Address = c_ulonglong;

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const ATTRIBUTE_DMA_BUF: c_int = 124;
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const POINTER_SYNC_MEMOPS: c_int = 6;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const RANGE_DMA_BUF: c_int = 1;

/// Declares the functions of the library that are used, and how all are looked up.
macro_rules! functions {
    ($($field:ident: $symbol:literal = fn($($argument:ty),* $(,)?);)*) => {
        /// The library's functions. A plain pointer each: the library is never unloaded.
        struct Functions {
            $($field: Option<unsafe extern "C" fn($($argument),*) -> Code>,)*
        }

        impl Functions {
            fn of(library: &Library) -> Self {
                Self {
                    $(
                        // SAFETY: The symbol is a function of this signature in CUDA's driver API, whatever the
                        // version.
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
    pointer_set: b"cuPointerSetAttribute\0" = fn(*const c_void, c_int, Address);
    range_handle: b"cuMemGetHandleForAddressRange\0" =
        fn(*mut c_void, Address, usize, c_int, c_ulonglong);
}

/// What a call of CUDA's answered instead of success.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct Failed {
    /// The function, as CUDA names it.
    pub call: &'static str,
    /// `CUresult`.
    pub code: i32,
    /// Its name, as the library has it.
    pub name: String,
}

/// CUDA's driver API, initialised.
pub struct Cuda {
    functions: Functions,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").finish_non_exhaustive()
    }
}

/// Calls a function of the library; its failure, or its absence, is an error.
macro_rules! call {
    ($cuda:expr, $field:ident, $name:literal, $($argument:expr),* $(,)?) => {{
        let function = $cuda
            .functions
            .$field
            .ok_or_else(|| anyhow!("{LIBRARY} has no {}", $name))?;
        // SAFETY: The signature is CUDA's; what the pointers lead to lives in the caller for the call's time and has
        // the sizes that are given, as its own comment says.
        let code = unsafe { function($($argument),*) };
        $cuda.checked($name, code)
    }};
}

impl Cuda {
    /// Loads the library and initialises it for this process.
    ///
    /// # Errors
    /// Where the library is not there, and where the driver cannot be reached ([`Failed`]).
    pub fn load() -> Result<Arc<Self>> {
        // SAFETY: NVIDIA's library, whose constructors have no conditions.
        let library = unsafe { Library::new(LIBRARY) }
            .map_err(|error| anyhow!("{LIBRARY} cannot be loaded: {}", crate::cause(&error)))?;
        let functions = Functions::of(&library);
        // It has threads of its own: it stays until the process ends.
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
            // SAFETY: One pointer is written, to a string that lives as long as the library.
            unsafe { function(code, &raw mut name) };
        }
        if name.is_null() {
            return "an error without a name".to_owned();
        }
        // SAFETY: As above, and CUDA's strings end with a NUL.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }

    /// The GPUs that this process may use, in CUDA's order.
    pub fn gpus(self: &Arc<Self>) -> Result<Vec<Gpu>> {
        let mut count = 0;
        // One number is written.
        call!(self, device_count, "cuDeviceGetCount", &raw mut count)?;
        (0..count).map(|index| Gpu::new(self, index)).collect()
    }
}

/// A string that a function of the library writes.
fn text(write: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
    let mut bytes = [0u8; 128];
    write(bytes.as_mut_ptr().cast(), bytes.len() as c_int)?;
    let name = CStr::from_bytes_until_nul(&bytes).context("a string without an end")?;
    Ok(name.to_string_lossy().into_owned())
}

/// A PCI address as the kernel writes it.
fn pci_address(cuda: &str) -> String {
    // CUDA: capital letters, and eight digits of a domain in some drivers.
    let lower = cuda.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[4..])
        }
        _ => lower,
    }
}

/// A GPU as CUDA has it.
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
        // One number is written.
        call!(cuda, device_get, "cuDeviceGet", &raw mut device, index)?;
        // So many bytes may be written.
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

    /// Its product name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its PCI address, as `0000:3b:00.0`.
    pub fn pci(&self) -> &str {
        &self.pci
    }

    /// Whether the driver says that it exports its memory as dma-buf.
    pub fn has_dma_buf(&self) -> Result<bool> {
        let mut value = 0;
        // One number is written.
        call!(
            self.cuda,
            device_attribute,
            "cuDeviceGetAttribute",
            &raw mut value,
            ATTRIBUTE_DMA_BUF,
            self.device
        )?;
        Ok(value != 0)
    }

    /// Makes this GPU's primary context the calling thread's.
    pub fn enter(&self) -> Result<Context> {
        let mut context = ptr::null_mut();
        // One pointer is written.
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

/// The primary context of a GPU, current in the thread that made it. Let go when dropped.
#[derive(Debug)]
pub struct Context {
    gpu: Gpu,
}

impl Context {
    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Allocates GPU memory, for which copies are made to wait until they are done, as GPUDirect RDMA needs it.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Result<Allocation> {
        let mut address = 0;
        let cuda = &self.gpu.cuda;
        // One number is written.
        call!(cuda, allocate, "cuMemAlloc", &raw mut address, len)?;
        let allocation = Allocation {
            context: Arc::clone(self),
            address,
            len,
            freed: false,
        };
        let on: c_uint = 1;
        // One number is read.
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
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(release) = self.gpu.cuda.functions.context_release {
            // SAFETY: It was retained by `enter`, once.
            unsafe { release(self.gpu.device) };
        }
    }
}

/// GPU memory of this process. Freed when dropped, unless it was before.
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    address: Address,
    len: usize,
    freed: bool,
}

impl Allocation {
    /// How many bytes were asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The range `[offset, offset + len)` of it.
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
        ensure!(!self.freed, "a copy of freed GPU memory");
        self.check(offset, len)
    }

    /// Copies from the GPU; returns when the bytes are there.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check_alive(offset, out.len())?;
        // As many bytes are written as the slice has; pageable host memory, so the call returns after them.
        call!(
            self.context.gpu.cuda,
            copy_out,
            "cuMemcpyDtoH",
            out.as_mut_ptr().cast(),
            self.address + offset as u64,
            out.len()
        )
    }

    /// Copies to the GPU; returns when the bytes are there.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check_alive(offset, data.len())?;
        // As many bytes are read as the slice has; the memory's copies are synchronous by its attribute.
        call!(
            self.context.gpu.cuda,
            copy_in,
            "cuMemcpyHtoD",
            self.address + offset as u64,
            data.as_ptr().cast(),
            data.len()
        )
    }

    /// A dma-buf of the first `len` bytes, which are whole pages of the host.
    ///
    /// # Errors
    /// [`Failed`], `CUDA_ERROR_NOT_SUPPORTED` where the driver has none, or no such function in an old library.
    pub fn dma_buf(&self, len: usize) -> Result<OwnedFd> {
        self.check_alive(0, len)?;
        let mut descriptor: c_int = -1;
        // One descriptor is written.
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
        // SAFETY: The call has made the descriptor for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Frees the memory.
    pub fn free(&mut self) -> Result<()> {
        ensure!(!self.freed, "freed twice");
        call!(self.context.gpu.cuda, free, "cuMemFree", self.address)?;
        self.freed = true;
        Ok(())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.freed {
            // It fails where the context is broken already, which the call before has said.
            let _ = self.free();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_the_kernels() {
        assert_eq!(pci_address("0000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(pci_address("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(pci_address("00010000:3B:00.0"), "00010000:3b:00.0");
        assert_eq!(pci_address("3B:00.0"), "3b:00.0");
    }
}
