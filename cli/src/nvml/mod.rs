// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What NVIDIA's management library (NVML, `libnvidia-ml.so.1`, of the driver) tells of the GPUs: the fact
//! [`Nvml`](crate::host::Fact::Nvml) as JSON.
//!
//! What tells one GPU from another of its kind (serial numbers, UUIDs) is not asked for. Nothing is set.
//! By <https://docs.nvidia.com/deploy/nvml-api/> and the driver's `nvml.h`.

mod library;

use std::sync::OnceLock;

use serde::Deserialize;
use serde::Serialize;

use crate::host::Fact;
use crate::host::Host;
use crate::host::Seen;
use crate::host::Unseen;
use crate::machine::pci::Address;
use library::Calls;
use library::Loaded;
use library::FUNCTION_NOT_FOUND;
use library::NOT_SUPPORTED;
use library::NO_PERMISSION;

pub(crate) use library::Memory;
pub(crate) use library::VERSION_MISMATCH;

/// Of GPUs: a library that counts more is not believed.
const MOST_GPUS: u32 = 1024;

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

impl Refused {
    /// Whether it takes rights that this process has not.
    pub(crate) fn is_denied(&self) -> bool {
        self.code == NO_PERMISSION
    }
}

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
    /// For how much of the last second or less it worked, in percent.
    pub(crate) utilization_percent: Option<u32>,
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
    pub(crate) fn scan(host: &dyn Host) -> Seen<Self> {
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
fn gpu(calls: &dyn Calls, index: u32) -> Option<Gpu> {
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
        utilization_percent: calls
            .utilization(device)
            .ok()
            .filter(|&percent| percent <= 100),
    })
}

fn bool_of(mode: u32) -> Option<bool> {
    match mode {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::library::Code;
    use super::library::Device;
    use super::*;

    use proptest::prelude::*;

    /// A library that answers as it is told, and fails in one of its calls.
    struct Fake {
        start: Result<(), Code>,
        count: u32,
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
        fn count(&self) -> Result<u32, Code> {
            self.answer("count", self.count)
        }
        fn device(&self, _index: u32) -> Result<Device, Code> {
            self.answer("device", Device::none())
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
        fn utilization(&self, _device: Device) -> Result<u32, Code> {
            self.answer("utilization", self.mode)
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
        assert_eq!(gpu.utilization_percent, Some(1));
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
            ("utilization", "utilization_percent"),
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
            mode: 101,
            count: u32::MAX,
            ..fake()
        });
        assert_eq!(said.gpus.len(), 1024);
        let gpu = said.gpus.first().expect("there are GPUs");
        assert_eq!(gpu.persistence_mode, None);
        assert_eq!(gpu.mig, None);
        assert_eq!(gpu.virtualization, None);
        assert_eq!(gpu.performance_state, None);
        assert_eq!(gpu.utilization_percent, None);
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
