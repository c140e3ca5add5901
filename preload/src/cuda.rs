// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Calls to CUDA's driver API, if the process has loaded libcuda: to check if an address is GPU
//! memory, and to export a range as a dma-buf.
//!
//! The numbers and types are those of `cuda.h`. They are the same in all versions of CUDA.

use std::ffi::{c_int, c_uint, c_ulonglong, CStr};
use std::ptr::{from_mut, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::verbs::{function, open, symbol, P};

type Pointer = c_ulonglong;
type Code = c_int;

/// `CUresult` values.
const SUCCESS: Code = 0;
const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const NOT_SUPPORTED: Code = 801;

/// `CUpointer_attribute` values.
const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
/// `CU_MEMORYTYPE_DEVICE`
const DEVICE: u64 = 2;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
const DMA_BUF_FD: c_int = 1;

/// Functions of `libcuda.so.1`. Versions before CUDA 11.7 lack `export`.
pub(crate) struct Cuda {
    attribute: unsafe extern "C" fn(P, c_int, Pointer) -> Code,
    export: Option<unsafe extern "C" fn(P, Pointer, usize, c_int, c_ulonglong) -> Code>,
    push: unsafe extern "C" fn(P) -> Code,
    pop: unsafe extern "C" fn(*mut P) -> Code,
    count: unsafe extern "C" fn(*mut c_int) -> Code,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
    state: unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> Code,
    retain: unsafe extern "C" fn(*mut P, c_int) -> Code,
    release: unsafe extern "C" fn(c_int) -> Code,
}

static LOADED: AtomicPtr<Cuda> = AtomicPtr::new(null_mut());

/// Kind of mapping for which a dma-buf is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapping {
    Default,
    /// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`
    Pcie,
}

/// A dma-buf's file descriptor. The drop closes it.
pub(crate) struct Descriptor(pub(crate) c_int);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: CUDA gave this descriptor to this thread, and nothing else knows its number.
        unsafe { libc::close(self.0) };
    }
}

impl Cuda {
    /// Returns CUDA's functions, if the process has loaded libcuda. libcuda stays loaded.
    pub(crate) fn loaded() -> Option<&'static Self> {
        let mut known = LOADED.load(Ordering::Acquire);
        if known.is_null() {
            let new = Box::into_raw(Box::new(Self::find()?));
            let (done, failed) = (Ordering::AcqRel, Ordering::Acquire);
            known = match LOADED.compare_exchange(known, new, done, failed) {
                Ok(_) => new,
                Err(others) => {
                    // SAFETY: the box was made above, and LOADED does not hold its address.
                    drop(unsafe { Box::from_raw(new) });
                    others
                }
            };
        }
        // SAFETY: LOADED only ever holds one leaked box.
        unsafe { known.as_ref() }
    }

    fn find() -> Option<Self> {
        let handle = is_loaded().then(|| open(c"libcuda.so.1"))??;
        // SAFETY: each type is that of the function's declaration in cuda.h.
        unsafe {
            Some(Self {
                attribute: function(symbol(handle, c"cuPointerGetAttribute"))?,
                export: function(symbol(handle, c"cuMemGetHandleForAddressRange")),
                push: function(symbol(handle, c"cuCtxPushCurrent_v2"))?,
                pop: function(symbol(handle, c"cuCtxPopCurrent_v2"))?,
                count: function(symbol(handle, c"cuDeviceGetCount"))?,
                device: function(symbol(handle, c"cuDeviceGet"))?,
                state: function(symbol(handle, c"cuDevicePrimaryCtxGetState"))?,
                retain: function(symbol(handle, c"cuDevicePrimaryCtxRetain"))?,
                release: function(symbol(handle, c"cuDevicePrimaryCtxRelease_v2"))?,
            })
        }
    }

    /// Returns `true` if an address is GPU memory. The calling thread needs no context.
    pub(crate) fn owns(&self, address: u64) -> bool {
        self.ask(MEMORY_TYPE, address) == Ok(DEVICE)
    }

    /// Exports a range of whole pages as a dma-buf, in the context of the memory. Returns CUDA's
    /// error code if the export fails, and `None` if this libcuda has no function for exports.
    pub(crate) fn export(
        &self,
        start: u64,
        length: usize,
        mapping: Mapping,
    ) -> Result<Descriptor, Option<Code>> {
        let export = self.export.ok_or(None)?;
        let _entered = self.enter(start);
        let mut fd: c_int = -1;
        let flags = match mapping {
            Mapping::Default => 0,
            Mapping::Pcie => 1,
        };
        // SAFETY: the function writes a file descriptor, an int, for this type of handle.
        let code = unsafe { export(from_mut(&mut fd).cast(), start, length, DMA_BUF_FD, flags) };
        match code {
            SUCCESS if fd >= 0 => Ok(Descriptor(fd)),
            code => Err(Some(code)),
        }
    }

    /// Makes the context of an allocation current. Memory of `cuMemCreate` has no context, so the
    /// primary context of the memory's device becomes current instead.
    fn enter(&self, address: u64) -> Option<Entered<'_>> {
        match self.ask(CONTEXT, address) {
            Ok(context) if context != 0 => self.push(usize::try_from(context).ok()? as P, None),
            _ => {
                let ordinal = self.ask(DEVICE_ORDINAL, address).ok()?;
                // The attribute is an int.
                self.enter_primary(c_int::try_from(ordinal & 0xffff_ffff).ok()?)
            }
        }
    }

    /// Returns an attribute of an address. If CUDA requires a context and the thread has none,
    /// repeats the query in the first active primary context.
    fn ask(&self, attribute: c_int, address: u64) -> Result<u64, Code> {
        let answer = self.ask_here(attribute, address);
        if answer != Err(INVALID_CONTEXT) {
            return answer;
        }
        let mut count = 0;
        // SAFETY: the function writes an int.
        unsafe { (self.count)(&mut count) };
        let _entered = (0..count).find_map(|ordinal| self.enter_primary(ordinal));
        self.ask_here(attribute, address)
    }

    fn ask_here(&self, attribute: c_int, address: u64) -> Result<u64, Code> {
        let mut value: u64 = 0;
        // SAFETY: no attribute that this library queries is larger than a pointer.
        match unsafe { (self.attribute)(from_mut(&mut value).cast(), attribute, address) } {
            SUCCESS => Ok(value),
            code => Err(code),
        }
    }

    /// Makes a device's primary context current if the context is active. An inactive context stays
    /// inactive, because its activation would take GPU memory.
    fn enter_primary(&self, ordinal: c_int) -> Option<Entered<'_>> {
        let (mut device, mut flags, mut is_active, mut context) = (0, 0, 0, null_mut());
        // SAFETY: the functions write a CUdevice, which is an int, an unsigned int, an int and a
        // pointer.
        unsafe {
            if (self.device)(&mut device, ordinal) != SUCCESS
                || (self.state)(device, &mut flags, &mut is_active) != SUCCESS
                || is_active == 0
                || (self.retain)(&mut context, device) != SUCCESS
            {
                return None;
            }
        }
        self.push(context, Some(device))
    }

    fn push(&self, context: P, primary: Option<c_int>) -> Option<Entered<'_>> {
        // SAFETY: the context belongs to live memory, or was retained.
        if unsafe { (self.push)(context) } == SUCCESS {
            return Some(Entered {
                cuda: self,
                primary,
            });
        }
        if let Some(device) = primary {
            // SAFETY: the caller has retained the device's context.
            unsafe { (self.release)(device) };
        }
        None
    }
}

/// Returns `true` if the process has loaded libcuda. Without this check, `dlopen` would search the
/// file system for libcuda at each registration that fails.
fn is_loaded() -> bool {
    unsafe extern "C" fn is_cuda(info: *mut libc::dl_phdr_info, _: usize, _: P) -> c_int {
        // SAFETY: dl_iterate_phdr passes a live description, whose name is a C string.
        let name = unsafe { CStr::from_ptr((*info).dlpi_name) }.to_bytes();
        let file = name.rsplit(|byte| *byte == b'/').next();
        c_int::from(file.is_some_and(|it| it.starts_with(b"libcuda.so")))
    }
    // SAFETY: the callback fits, and needs no data.
    unsafe { libc::dl_iterate_phdr(Some(is_cuda), null_mut()) != 0 }
}

/// A CUDA context that is current until this value is dropped.
struct Entered<'a> {
    cuda: &'a Cuda,
    /// Device whose primary context the drop releases.
    primary: Option<c_int>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = null_mut();
        // SAFETY: `push` has pushed a context in this thread, and `primary` was retained.
        unsafe {
            (self.cuda.pop)(&mut context);
            if let Some(device) = self.primary {
                (self.cuda.release)(device);
            }
        }
    }
}
