// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Calls to NVML's library, as declared in `nvml.h`. All `unsafe` code for NVML is in this file.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::sync::OnceLock;

use libloading::{Library, Symbol};
use serde::{Deserialize, Serialize};

use crate::host::{Seen, Unseen};

/// Error code: the versions of the library and of nvidia.ko differ.
pub(crate) const VERSION_MISMATCH: i32 = 18;
pub(super) const INVALID_ARGUMENT: i32 = 2;
pub(super) const NOT_SUPPORTED: i32 = 3;
pub(super) const NO_PERMISSION: i32 = 4;
pub(super) const FUNCTION_NOT_FOUND: i32 = 13;

/// `nvmlReturn_t` of a failure.
pub(super) type Code = i32;

/// `nvmlDevice_t`: the library's own pointer, valid while the library is started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Device(*mut c_void);

#[cfg(test)]
impl Device {
    pub(super) fn none() -> Self {
        Self(std::ptr::null_mut())
    }
}

/// Calls to the library.
pub(super) trait Calls {
    fn start(&self) -> Result<(), Code>;
    fn error(&self, code: Code) -> String;
    fn driver(&self) -> Result<String, Code>;
    fn count(&self) -> Result<u32, Code>;
    fn device(&self, index: u32) -> Result<Device, Code>;
    fn address(&self, device: Device) -> Result<String, Code>;
    fn name(&self, device: Device) -> Result<String, Code>;
    fn bar1(&self, device: Device) -> Result<Memory, Code>;
    fn memory_total(&self, device: Device) -> Result<u64, Code>;
    fn persistence(&self, device: Device) -> Result<u32, Code>;
    fn mig(&self, device: Device) -> Result<u32, Code>;
    fn virtualization(&self, device: Device) -> Result<u32, Code>;
    fn performance_state(&self, device: Device) -> Result<u32, Code>;
    fn utilization(&self, device: Device) -> Result<u32, Code>;
    fn nvlink_state(&self, device: Device, link: u32) -> Result<u32, Code>;
    fn nvlink_remote_kind(&self, device: Device, link: u32) -> Result<u32, Code>;
    fn nvlink_remote_address(&self, device: Device, link: u32) -> Result<String, Code>;
    /// Returns the state and status of the NVLink fabric.
    fn fabric(&self, device: Device) -> Result<(u8, i32), Code>;
}

/// Total and used size of a memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) used_bytes: u64,
}

/// `nvmlPciInfo_t` of `nvmlDeviceGetPciInfo_v3` and `nvmlDeviceGetNvLinkRemotePciInfo_v2`.
#[repr(C)]
#[derive(Default)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlBAR1Memory_t` and `nvmlMemory_t`, which have the same layout.
#[repr(C)]
#[derive(Default)]
struct RawMemory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlGpuFabricInfo_t` of `nvmlDeviceGetGpuFabricInfo`.
#[repr(C)]
#[derive(Default)]
struct RawFabric {
    cluster: [u8; 16],
    status: c_int,
    clique: c_uint,
    state: u8,
}

/// `nvmlUtilization_t`, in percent of the last sample period.
#[repr(C)]
#[derive(Default)]
struct RawUtilization {
    gpu: c_uint,
    memory: c_uint,
}

type Plain = unsafe extern "C" fn() -> c_int;
type Text = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
type OfDevice<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> c_int;
type OfLink<T> = unsafe extern "C" fn(*mut c_void, c_uint, *mut T) -> c_int;

/// The real library.
pub(super) struct Loaded(Library);

impl Loaded {
    pub(super) fn load() -> Seen<Self> {
        // SAFETY: `dlopen` runs the library's initialisers. The library belongs to the driver, is
        // found in the system's search path, and is made to be loaded by any process. The library
        // is never closed while the process runs.
        match unsafe { Library::new("libnvidia-ml.so.1") } {
            Ok(library) => Ok(Self(library)),
            // dlopen has no error codes. A missing library is by far the most frequent error.
            Err(error) => {
                let text = error.to_string();
                if text.contains("No such file") {
                    Err(Unseen::Absent)
                } else {
                    Err(Unseen::Failed(text))
                }
            }
        }
    }

    /// Returns a function of the library.
    ///
    /// # Safety
    ///
    /// `T` must be the function's type in `nvml.h`.
    unsafe fn function<T>(&self, name: &CStr) -> Result<Symbol<'_, T>, Code> {
        // SAFETY: The caller promises that `T` is the function's type.
        unsafe { self.0.get(name.to_bytes_with_nul()) }.map_err(|_| FUNCTION_NOT_FOUND)
    }

    /// Calls a function that takes a device and writes one value, and returns the value.
    ///
    /// # Safety
    ///
    /// `name` must be a function `nvmlReturn_t (nvmlDevice_t, T *)` that writes at most a `T`.
    unsafe fn of_device<T: Default>(&self, name: &CStr, device: Device) -> Result<T, Code> {
        let mut value = T::default();
        // SAFETY: The caller promises that this is the function's type.
        let function = unsafe { self.function::<OfDevice<T>>(name) }?;
        // SAFETY: The device came from this library, which was started and is never stopped. The
        // value is a `T`.
        done(unsafe { function(device.0, &mut value) })?;
        Ok(value)
    }

    /// Calls a function that takes a device and an NVLink and writes one value, and returns the
    /// value.
    ///
    /// # Safety
    ///
    /// `name` must be a function `nvmlReturn_t (nvmlDevice_t, unsigned int, T *)` that writes at
    /// most a `T`.
    unsafe fn of_link<T: Default>(
        &self,
        name: &CStr,
        device: Device,
        link: u32,
    ) -> Result<T, Code> {
        let mut value = T::default();
        // SAFETY: The caller promises that this is the function's type.
        let function = unsafe { self.function::<OfLink<T>>(name) }?;
        // SAFETY: The device came from this library, which was started and is never stopped. The
        // library rejects an invalid link. The value is a `T`.
        done(unsafe { function(device.0, link, &mut value) })?;
        Ok(value)
    }
}

fn done(code: c_int) -> Result<(), Code> {
    if code == 0 {
        Ok(())
    } else {
        Err(code)
    }
}

/// Returns the text up to the first NUL, or the whole text if there is no NUL.
fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes
        .iter()
        .map(|&byte| u8::from_ne_bytes(byte.to_ne_bytes()))
        .take_while(|&byte| byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Defines calls of functions that write one value of a device:
/// `call -> result: function, type of the value, result from the value;`.
macro_rules! of_device {
    ($($call:ident -> $result:ty: $function:literal, $value:ty, $of:expr;)*) => {$(
        fn $call(&self, device: Device) -> Result<$result, Code> {
            let of: fn($value) -> $result = $of;
            // SAFETY: In `nvml.h`, each function is `nvmlReturn_t (nvmlDevice_t, T *)`, where `T`
            // has the layout of the type given here. The values of each enum are small, so the enum
            // has the size of an unsigned int in C.
            Ok(of(unsafe { self.of_device::<$value>($function, device) }?))
        }
    )*};
}

impl Calls for Loaded {
    of_device! {
        address -> String: c"nvmlDeviceGetPciInfo_v3", PciInfo, |info| text(&info.bus_id).to_lowercase();
        bar1 -> Memory: c"nvmlDeviceGetBAR1MemoryInfo", RawMemory, |memory| Memory {
            total_bytes: memory.total,
            free_bytes: memory.free,
            used_bytes: memory.used,
        };
        memory_total -> u64: c"nvmlDeviceGetMemoryInfo", RawMemory, |memory| memory.total;
        // `nvmlEnableState_t`
        persistence -> u32: c"nvmlDeviceGetPersistenceMode", c_uint, |mode| mode;
        // `nvmlGpuVirtualizationMode_t`
        virtualization -> u32: c"nvmlDeviceGetVirtualizationMode", c_uint, |mode| mode;
        // `nvmlPstates_t`
        performance_state -> u32: c"nvmlDeviceGetPerformanceState", c_uint, |state| state;
        utilization -> u32: c"nvmlDeviceGetUtilizationRates", RawUtilization, |rates| rates.gpu;
        fabric -> (u8, i32): c"nvmlDeviceGetGpuFabricInfo", RawFabric, |info| (info.state, info.status);
    }

    fn start(&self) -> Result<(), Code> {
        // The library counts calls to start and stop. This program starts the library once, and
        // never stops it.
        static ANSWER: OnceLock<Result<(), Code>> = OnceLock::new();
        *ANSWER.get_or_init(|| {
            // SAFETY: `nvmlReturn_t nvmlInit_v2(void)`.
            let function = unsafe { self.function::<Plain>(c"nvmlInit_v2") }?;
            // SAFETY: The function may be called at any time, from any thread.
            done(unsafe { function() })
        })
    }

    fn error(&self, code: Code) -> String {
        type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
        if code == FUNCTION_NOT_FOUND {
            return "the library lacks a function that is needed".to_owned();
        }
        // SAFETY: `const char *nvmlErrorString(nvmlReturn_t)`, where the argument is an int.
        let Ok(function) = (unsafe { self.function::<ErrorString>(c"nvmlErrorString") }) else {
            return format!("error {code}");
        };
        // SAFETY: The function may be called before the library is started, and accepts any number.
        let said = unsafe { function(code) };
        if said.is_null() {
            return format!("error {code}");
        }
        // SAFETY: The string is a constant of the library, terminated by a NUL.
        unsafe { CStr::from_ptr(said) }
            .to_string_lossy()
            .into_owned()
    }

    fn driver(&self) -> Result<String, Code> {
        let mut buffer: [c_char; 80] = [0; 80];
        // SAFETY: `nvmlReturn_t nvmlSystemGetDriverVersion(char *, unsigned int)`.
        let function = unsafe { self.function::<Text>(c"nvmlSystemGetDriverVersion") }?;
        // SAFETY: The function writes at most the given length, which is the buffer's length.
        done(unsafe { function(buffer.as_mut_ptr(), 80) })?;
        Ok(text(&buffer))
    }

    fn count(&self) -> Result<u32, Code> {
        type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
        let mut count = 0;
        // SAFETY: `nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *)`.
        let function = unsafe { self.function::<Count>(c"nvmlDeviceGetCount_v2") }?;
        // SAFETY: The function writes one unsigned int.
        done(unsafe { function(&mut count) })?;
        Ok(count)
    }

    fn device(&self, index: u32) -> Result<Device, Code> {
        type Handle = unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_int;
        let mut device = std::ptr::null_mut();
        // SAFETY: `nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int, nvmlDevice_t *)`.
        // `nvmlDevice_t` is itself a pointer.
        let function = unsafe { self.function::<Handle>(c"nvmlDeviceGetHandleByIndex_v2") }?;
        // SAFETY: The function accepts any index, and writes one pointer.
        done(unsafe { function(index, &mut device) })?;
        Ok(Device(device))
    }

    fn name(&self, device: Device) -> Result<String, Code> {
        type Name = unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_int;
        let mut buffer: [c_char; 96] = [0; 96];
        // SAFETY: `nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t, char *, unsigned int)`.
        let function = unsafe { self.function::<Name>(c"nvmlDeviceGetName") }?;
        // SAFETY: The device came from this library, which stays started. The function writes at
        // most the given length, which is the buffer's length.
        done(unsafe { function(device.0, buffer.as_mut_ptr(), 96) })?;
        Ok(text(&buffer))
    }

    fn mig(&self, device: Device) -> Result<u32, Code> {
        type Mig = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_uint) -> c_int;
        let (mut now, mut pending) = (0, 0);
        // SAFETY: `nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t, unsigned int *, unsigned int
        // *)`.
        let function = unsafe { self.function::<Mig>(c"nvmlDeviceGetMigMode") }?;
        // SAFETY: The device came from this library, which stays started. The function writes two
        // unsigned ints.
        done(unsafe { function(device.0, &mut now, &mut pending) })?;
        Ok(now)
    }

    fn nvlink_state(&self, device: Device, link: u32) -> Result<u32, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t, unsigned int,
        // nvmlEnableState_t *)`. The enum has the size of an unsigned int.
        unsafe { self.of_link(c"nvmlDeviceGetNvLinkState", device, link) }
    }

    fn nvlink_remote_kind(&self, device: Device, link: u32) -> Result<u32, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t, unsigned int,
        // nvmlIntNvLinkDeviceType_t *)`. The enum has the size of an unsigned int.
        unsafe { self.of_link(c"nvmlDeviceGetNvLinkRemoteDeviceType", device, link) }
    }

    fn nvlink_remote_address(&self, device: Device, link: u32) -> Result<String, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t, unsigned int,
        // nvmlPciInfo_t *)`, with the layout of `PciInfo`.
        let info: PciInfo =
            unsafe { self.of_link(c"nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link) }?;
        Ok(text(&info.bus_id).to_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layouts_are_those_of_nvml_h() {
        assert_eq!(size_of::<PciInfo>(), 68);
        assert_eq!(size_of::<RawMemory>(), 24);
        assert_eq!(size_of::<RawUtilization>(), 8);
        assert_eq!(size_of::<RawFabric>(), 28);
    }

    #[test]
    fn text_ends_at_a_nul_or_at_the_end() {
        let letter = |letter: u8| c_char::from_ne_bytes([letter]);
        assert_eq!(text(&[letter(b'a'), 0, letter(b'b')]), "a");
        assert_eq!(text(&[letter(b'a'), letter(b'b')]), "ab");
        assert_eq!(text(&[]), "");
    }
}
