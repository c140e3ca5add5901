// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What NVIDIA's management library (NVML, `libnvidia-ml.so.1`, of the driver) tells of the GPUs: the fact
//! [`Nvml`](crate::host::Fact::Nvml) as JSON. The one file with `unsafe` code for it.
//!
//! What tells one GPU from another of its kind (serial numbers, UUIDs) is not asked for. Nothing is set.
//! By <https://docs.nvidia.com/deploy/nvml-api/> and the driver's `nvml.h`.

use std::ffi::c_char;
use std::ffi::c_int;
use std::ffi::c_uint;
use std::ffi::c_ulonglong;
use std::ffi::c_void;
use std::ffi::CStr;
use std::sync::OnceLock;

use libloading::Library;
use libloading::Symbol;
use serde::Deserialize;
use serde::Serialize;

use crate::host::Fact;
use crate::host::Host;
use crate::host::Seen;
use crate::host::Unseen;
use crate::machine::pci::Address;

/// Of GPUs: a library that counts more is not believed.
const MOST_GPUS: c_uint = 1024;

/// What NVML said.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Nvml {
    /// The driver's version: `570.86.15`.
    pub(crate) driver: Option<String>,
    /// Why it tells nothing: the library is there and did not start.
    pub(crate) error: Option<Refused>,
    pub(crate) gpus: Vec<Gpu>,
}

/// NVML's own error: `nvmlReturn_t`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refused {
    pub(crate) code: i32,
    pub(crate) text: String,
}

/// The library and nvidia.ko are not of one version.
pub(crate) const VERSION_MISMATCH: i32 = 18;
const NOT_SUPPORTED: i32 = 3;
const NO_PERMISSION: i32 = 4;
const FUNCTION_NOT_FOUND: i32 = 13;

/// A GPU; what it does not tell is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Gpu {
    /// The PCI address as NVML writes it, with eight digits of domain.
    pub(crate) at: String,
    pub(crate) name: Option<String>,
    pub(crate) bar1: Option<Memory>,
    pub(crate) memory_total_bytes: Option<u64>,
    pub(crate) persistence_mode: Option<bool>,
    pub(crate) mig: Option<bool>,
    pub(crate) virtualization: Option<Virtualization>,
    /// 0, at full speed, to 15; idle GPUs are at 8 or higher.
    pub(crate) performance_state: Option<u32>,
}

/// What of a memory is used, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) used_bytes: u64,
}

/// `nvmlGpuVirtualizationMode_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Virtualization {
    None,
    /// Given to a virtual machine as it is.
    PassThrough,
    /// A share of a GPU, seen from a virtual machine.
    Vgpu,
    /// A GPU that is shared out from here.
    HostVgpu,
    /// A GPU that renders for virtual machines.
    HostVsga,
}

impl Gpu {
    /// The PCI address; none: it is not one.
    pub(crate) fn address(&self) -> Option<Address> {
        self.at.parse().ok()
    }
}

impl Nvml {
    /// What the host's NVML says. [`Unseen::Absent`]: there is no such library.
    pub(crate) fn look(host: &dyn Host) -> Seen<Self> {
        let text = host.fact(Fact::Nvml)?;
        serde_json::from_str(&text)
            .map_err(|error| Unseen::Failed(format!("NVML's answer is not understood: {error}")))
    }

    /// The GPU at this address.
    pub(crate) fn gpu(&self, at: Address) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.address() == Some(at))
    }
}

/// The fact, of this machine. The library is loaded and started once and stays so, since starting it may take seconds
/// on each GPU that nobody uses; what it says is asked anew each time.
pub(crate) fn ask() -> Seen<String> {
    static STARTED: OnceLock<Seen<Loaded>> = OnceLock::new();
    let said = match STARTED.get_or_init(Loaded::load) {
        Ok(calls) => collect(calls),
        Err(unseen) => return Err(unseen.clone()),
    };
    serde_json::to_string(&said).map_err(|error| Unseen::Failed(error.to_string()))
}

/// Asks for all of it.
fn collect(calls: &dyn Calls) -> Nvml {
    if let Err(code) = calls.start() {
        return Nvml {
            error: Some(Refused {
                code,
                text: calls.error(code),
            }),
            ..Nvml::default()
        };
    }
    let count = calls.count().unwrap_or(0).min(MOST_GPUS);
    Nvml {
        driver: calls.driver().ok(),
        error: None,
        gpus: (0..count).filter_map(|index| gpu(calls, index)).collect(),
    }
}

/// One GPU; none: another user's, or lost.
fn gpu(calls: &dyn Calls, index: c_uint) -> Option<Gpu> {
    let device = calls.device(index).ok()?;
    Some(Gpu {
        at: calls.address(device).ok()?,
        name: calls.name(device).ok(),
        bar1: calls.bar1(device).ok(),
        memory_total_bytes: calls.memory_total(device).ok(),
        persistence_mode: calls.persistence(device).ok().and_then(bool_of),
        mig: match calls.mig(device) {
            Ok(mode) => bool_of(mode),
            // It has no such thing.
            Err(NOT_SUPPORTED | FUNCTION_NOT_FOUND) => Some(false),
            Err(_) => None,
        },
        virtualization: calls.virtualization(device).ok().and_then(|mode| {
            Some(match mode {
                0 => Virtualization::None,
                1 => Virtualization::PassThrough,
                2 => Virtualization::Vgpu,
                3 => Virtualization::HostVgpu,
                4 => Virtualization::HostVsga,
                _ => return None,
            })
        }),
        // 32 is "unknown".
        performance_state: calls
            .performance_state(device)
            .ok()
            .filter(|&state| state <= 15),
    })
}

fn bool_of(mode: u32) -> Option<bool> {
    match mode {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

/// `nvmlReturn_t` other than success.
type Code = i32;

/// `nvmlDevice_t`: the library's own pointer, valid as long as it is started.
#[derive(Debug, Clone, Copy)]
struct Device(*mut c_void);

/// The calls of the library that are made.
trait Calls {
    fn start(&self) -> Result<(), Code>;
    fn error(&self, code: Code) -> String;
    fn driver(&self) -> Result<String, Code>;
    fn count(&self) -> Result<c_uint, Code>;
    fn device(&self, index: c_uint) -> Result<Device, Code>;
    fn address(&self, device: Device) -> Result<String, Code>;
    fn name(&self, device: Device) -> Result<String, Code>;
    fn bar1(&self, device: Device) -> Result<Memory, Code>;
    fn memory_total(&self, device: Device) -> Result<u64, Code>;
    fn persistence(&self, device: Device) -> Result<u32, Code>;
    fn mig(&self, device: Device) -> Result<u32, Code>;
    fn virtualization(&self, device: Device) -> Result<u32, Code>;
    fn performance_state(&self, device: Device) -> Result<u32, Code>;
}

/// `nvmlPciInfo_t` of `nvmlDeviceGetPciInfo_v3`.
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[derive(Default)]
struct Bar1Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct DeviceMemory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

type Plain = unsafe extern "C" fn() -> c_int;
type Text = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
type OfDevice<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> c_int;

/// The real library.
struct Loaded(Library);

impl Loaded {
    fn load() -> Seen<Self> {
        // SAFETY: `dlopen` runs the library's initialisers. It is the driver's own, found where the system looks for
        // libraries, and made to be loaded by any process; it is never closed while the process runs.
        match unsafe { Library::new("libnvidia-ml.so.1") } {
            Ok(library) => Ok(Self(library)),
            // dlopen has no codes; that it is not there is by far the most frequent.
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

    /// A function of the library.
    ///
    /// # Safety
    ///
    /// `T` is the function's type in `nvml.h`.
    unsafe fn function<T>(&self, name: &CStr) -> Result<Symbol<'_, T>, Code> {
        // SAFETY: by this function's own contract.
        unsafe { self.0.get(name.to_bytes_with_nul()) }.map_err(|_| FUNCTION_NOT_FOUND)
    }

    /// What one of the functions writes that take a device and a place for one value.
    ///
    /// # Safety
    ///
    /// `name` is a function `nvmlReturn_t (nvmlDevice_t, T *)` that writes no more than a `T`.
    unsafe fn of_device<T>(&self, name: &CStr, device: Device, empty: T) -> Result<T, Code> {
        let mut value = empty;
        // SAFETY: by this function's contract it is the function's type.
        let function = unsafe { self.function::<OfDevice<T>>(name) }?;
        // SAFETY: the device came from this library, which was started and is never stopped; the place is a `T`.
        done(unsafe { function(device.0, &mut value) })?;
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

/// Text up to the first NUL, or all of it.
fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes
        .iter()
        .map(|&byte| u8::from_ne_bytes(byte.to_ne_bytes()))
        .take_while(|&byte| byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Calls for Loaded {
    fn start(&self) -> Result<(), Code> {
        // It counts its starts, and is never stopped.
        static ANSWER: OnceLock<Result<(), Code>> = OnceLock::new();
        *ANSWER.get_or_init(|| {
            // SAFETY: `nvmlReturn_t nvmlInit_v2(void)`.
            let function = unsafe { self.function::<Plain>(c"nvmlInit_v2") }?;
            // SAFETY: it may be called at any time, from any thread.
            done(unsafe { function() })
        })
    }

    fn error(&self, code: Code) -> String {
        type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
        if code == FUNCTION_NOT_FOUND {
            return "the library lacks a function that is needed".to_owned();
        }
        // SAFETY: `const char *nvmlErrorString(nvmlReturn_t)`, which is an int.
        let Ok(function) = (unsafe { self.function::<ErrorString>(c"nvmlErrorString") }) else {
            return format!("error {code}");
        };
        // SAFETY: it may be called without a start, and takes any number.
        let said = unsafe { function(code) };
        if said.is_null() {
            return format!("error {code}");
        }
        // SAFETY: it is a constant of the library, ended by a NUL.
        unsafe { CStr::from_ptr(said) }
            .to_string_lossy()
            .into_owned()
    }

    fn driver(&self) -> Result<String, Code> {
        let mut buffer: [c_char; 80] = [0; 80];
        // SAFETY: `nvmlReturn_t nvmlSystemGetDriverVersion(char *, unsigned int)`.
        let function = unsafe { self.function::<Text>(c"nvmlSystemGetDriverVersion") }?;
        // SAFETY: the length is the buffer's, beyond which it does not write.
        done(unsafe { function(buffer.as_mut_ptr(), 80) })?;
        Ok(text(&buffer))
    }

    fn count(&self) -> Result<c_uint, Code> {
        type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
        let mut count = 0;
        // SAFETY: `nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *)`.
        let function = unsafe { self.function::<Count>(c"nvmlDeviceGetCount_v2") }?;
        // SAFETY: the place is an unsigned int.
        done(unsafe { function(&mut count) })?;
        Ok(count)
    }

    fn device(&self, index: c_uint) -> Result<Device, Code> {
        type Handle = unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_int;
        let mut device = std::ptr::null_mut();
        // SAFETY: `nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int, nvmlDevice_t *)`, the latter a pointer.
        let function = unsafe { self.function::<Handle>(c"nvmlDeviceGetHandleByIndex_v2") }?;
        // SAFETY: it takes any index, and the place is a pointer.
        done(unsafe { function(index, &mut device) })?;
        Ok(Device(device))
    }

    fn address(&self, device: Device) -> Result<String, Code> {
        let empty = PciInfo {
            bus_id_legacy: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            pci_device_id: 0,
            pci_subsystem_id: 0,
            bus_id: [0; 32],
        };
        // SAFETY: `nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t, nvmlPciInfo_t *)`, which is laid out as ours.
        let info = unsafe { self.of_device(c"nvmlDeviceGetPciInfo_v3", device, empty) }?;
        Ok(text(&info.bus_id).to_lowercase())
    }

    fn name(&self, device: Device) -> Result<String, Code> {
        type Name = unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_int;
        let mut buffer: [c_char; 96] = [0; 96];
        // SAFETY: `nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t, char *, unsigned int)`.
        let function = unsafe { self.function::<Name>(c"nvmlDeviceGetName") }?;
        // SAFETY: the device came from this library, which stays started; the length is the buffer's.
        done(unsafe { function(device.0, buffer.as_mut_ptr(), 96) })?;
        Ok(text(&buffer))
    }

    fn bar1(&self, device: Device) -> Result<Memory, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t, nvmlBAR1Memory_t *)`, laid out as ours.
        let memory = unsafe {
            self.of_device(
                c"nvmlDeviceGetBAR1MemoryInfo",
                device,
                Bar1Memory::default(),
            )
        }?;
        Ok(Memory {
            total_bytes: memory.total,
            free_bytes: memory.free,
            used_bytes: memory.used,
        })
    }

    fn memory_total(&self, device: Device) -> Result<u64, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t, nvmlMemory_t *)`, laid out as ours.
        let memory =
            unsafe { self.of_device(c"nvmlDeviceGetMemoryInfo", device, DeviceMemory::default()) }?;
        Ok(memory.total)
    }

    fn persistence(&self, device: Device) -> Result<u32, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t, nvmlEnableState_t *)`, an enum of small
        // numbers,
        // which in C is as large as an unsigned int.
        unsafe { self.of_device(c"nvmlDeviceGetPersistenceMode", device, 0) }
    }

    fn mig(&self, device: Device) -> Result<u32, Code> {
        type Mig = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_uint) -> c_int;
        let (mut now, mut pending) = (0, 0);
        // SAFETY: `nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t, unsigned int *, unsigned int *)`.
        let function = unsafe { self.function::<Mig>(c"nvmlDeviceGetMigMode") }?;
        // SAFETY: the device came from this library, which stays started; both places are unsigned ints.
        done(unsafe { function(device.0, &mut now, &mut pending) })?;
        Ok(now)
    }

    fn virtualization(&self, device: Device) -> Result<u32, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t, nvmlGpuVirtualizationMode_t *)`, an enum
        // as
        // above.
        unsafe { self.of_device(c"nvmlDeviceGetVirtualizationMode", device, 0) }
    }

    fn performance_state(&self, device: Device) -> Result<u32, Code> {
        // SAFETY: `nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t, nvmlPstates_t *)`, an enum as above.
        unsafe { self.of_device(c"nvmlDeviceGetPerformanceState", device, 0) }
    }
}

impl Refused {
    /// Whether it takes rights that this process has not.
    pub(crate) fn is_denied(&self) -> bool {
        self.code == NO_PERMISSION
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    /// A library that answers as it is told, and fails in one of its calls.
    struct Fake {
        start: Result<(), Code>,
        count: c_uint,
        /// The call that fails with "not supported".
        fails: Option<&'static str>,
        mode: u32,
    }

    impl Fake {
        fn answer<T>(&self, call: &str, value: T) -> Result<T, Code> {
            if self.fails == Some(call) {
                Err(NOT_SUPPORTED)
            } else {
                Ok(value)
            }
        }
    }

    impl Calls for Fake {
        fn start(&self) -> Result<(), Code> {
            self.start
        }
        fn error(&self, code: Code) -> String {
            format!("number {code}")
        }
        fn driver(&self) -> Result<String, Code> {
            self.answer("driver", "595.45.04".to_owned())
        }
        fn count(&self) -> Result<c_uint, Code> {
            self.answer("count", self.count)
        }
        fn device(&self, _index: c_uint) -> Result<Device, Code> {
            self.answer("device", Device(std::ptr::null_mut()))
        }
        fn address(&self, _device: Device) -> Result<String, Code> {
            self.answer("address", "00000000:19:00.0".to_owned())
        }
        fn name(&self, _device: Device) -> Result<String, Code> {
            self.answer("name", "NVIDIA H100 80GB HBM3".to_owned())
        }
        fn bar1(&self, _device: Device) -> Result<Memory, Code> {
            self.answer(
                "bar1",
                Memory {
                    total_bytes: 3,
                    free_bytes: 2,
                    used_bytes: 1,
                },
            )
        }
        fn memory_total(&self, _device: Device) -> Result<u64, Code> {
            self.answer("memory", 80 << 30)
        }
        fn persistence(&self, _device: Device) -> Result<u32, Code> {
            self.answer("persistence", self.mode)
        }
        fn mig(&self, _device: Device) -> Result<u32, Code> {
            self.answer("mig", self.mode)
        }
        fn virtualization(&self, _device: Device) -> Result<u32, Code> {
            self.answer("virtualization", self.mode)
        }
        fn performance_state(&self, _device: Device) -> Result<u32, Code> {
            self.answer("state", self.mode)
        }
    }

    fn fake() -> Fake {
        Fake {
            start: Ok(()),
            count: 1,
            fails: None,
            mode: 1,
        }
    }

    #[test]
    fn all_that_is_asked_is_told() {
        let said = collect(&fake());
        assert_eq!(said.driver.as_deref(), Some("595.45.04"));
        let gpu = said
            .gpu("0000:19:00.0".parse().unwrap())
            .expect("the GPU is found by its address");
        assert_eq!(gpu.persistence_mode, Some(true));
        assert_eq!(gpu.mig, Some(true));
        assert_eq!(gpu.virtualization, Some(Virtualization::PassThrough));
        assert_eq!(gpu.performance_state, Some(1));
        assert_eq!(gpu.bar1.map(|memory| memory.free_bytes), Some(2));
    }

    #[test]
    fn what_one_call_does_not_tell_is_none_and_the_rest_is_there() {
        for (call, lacks) in [
            ("driver", "driver"),
            ("name", "name"),
            ("bar1", "bar1"),
            ("memory", "memory_total_bytes"),
            ("persistence", "persistence_mode"),
            ("virtualization", "virtualization"),
            ("state", "performance_state"),
        ] {
            let said = collect(&Fake {
                fails: Some(call),
                ..fake()
            });
            let value = serde_json::to_value(&said).unwrap();
            let mut nulls = Vec::new();
            for object in [&value, &value["gpus"][0]] {
                for (key, value) in object.as_object().unwrap() {
                    if value.is_null() && key != "error" {
                        nulls.push(key.clone());
                    }
                }
            }
            assert_eq!(nulls, [lacks], "{call} fails");
        }
        // A GPU without an address is of no use, and one without MIG has none.
        for call in ["device", "address", "count"] {
            let said = collect(&Fake {
                fails: Some(call),
                ..fake()
            });
            assert_eq!(said.gpus, [], "{call} fails");
        }
        let said = collect(&Fake {
            fails: Some("mig"),
            ..fake()
        });
        assert_eq!(said.gpus.first().and_then(|gpu| gpu.mig), Some(false));
    }

    #[test]
    fn a_library_that_does_not_start_says_why() {
        let said = collect(&Fake {
            start: Err(VERSION_MISMATCH),
            ..fake()
        });
        assert_eq!(
            said.error,
            Some(Refused {
                code: VERSION_MISMATCH,
                text: "number 18".to_owned()
            })
        );
        assert_eq!(said.gpus, []);
    }

    #[test]
    fn strange_numbers_are_not_believed() {
        let said = collect(&Fake {
            mode: 99,
            count: c_uint::MAX,
            ..fake()
        });
        assert_eq!(said.gpus.len(), 1024);
        let gpu = said.gpus.first().expect("there are GPUs");
        assert_eq!(gpu.persistence_mode, None);
        assert_eq!(gpu.mig, None);
        assert_eq!(gpu.virtualization, None);
        assert_eq!(gpu.performance_state, None);
    }

    #[test]
    fn the_layouts_are_those_of_nvml_h() {
        assert_eq!(size_of::<PciInfo>(), 68);
        assert_eq!(size_of::<Bar1Memory>(), 24);
        assert_eq!(size_of::<DeviceMemory>(), 24);
    }

    #[test]
    fn text_ends_at_a_nul_or_at_the_end() {
        let letter = |letter: u8| c_char::from_ne_bytes([letter]);
        assert_eq!(text(&[letter(b'a'), 0, letter(b'b')]), "a");
        assert_eq!(text(&[letter(b'a'), letter(b'b')]), "ab");
        assert_eq!(text(&[]), "");
    }

    proptest! {
        #[test]
        fn any_answer_is_taken_or_refused(text in ".{0,200}") {
            let _ = serde_json::from_str::<Nvml>(&text);
        }

        #[test]
        fn what_is_written_is_read(total: u64, free: u64, mig: Option<bool>, state in proptest::option::of(0u32..16)) {
            let said = Nvml {
                driver: Some("595".to_owned()),
                error: None,
                gpus: vec![Gpu {
                    at: "0000:19:00.0".to_owned(),
                    bar1: Some(Memory { total_bytes: total, free_bytes: free, used_bytes: 0 }),
                    mig,
                    performance_state: state,
                    ..Gpu::default()
                }],
            };
            let text = serde_json::to_string(&said).unwrap();
            prop_assert_eq!(serde_json::from_str::<Nvml>(&text).unwrap(), said);
        }
    }
}
