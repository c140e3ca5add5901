// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Facts about the GPUs from NVIDIA's management library (NVML, the driver's `libnvidia-ml.so.1`).
//!
//! This module provides the fact [`Nvml`](Fact::Nvml), as JSON. The code reads no serial numbers or
//! UUIDs, and sets nothing. See <https://docs.nvidia.com/deploy/nvml-api/> and the driver's
//! `nvml.h`.

mod library;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::address::Address;
use super::recording::Recorded;
use super::{Fact, Host, Seen};
use library::{
    Calls, Device, Loaded, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION,
};

pub(crate) use library::{Memory, VERSION_MISMATCH};

/// Maximum number of GPUs. A larger count from the library is reduced to this number.
const MOST_GPUS: u32 = 1024;
/// Maximum number of NVLinks of a GPU; nvml.h allows 18.
const MOST_LINKS: u32 = 64;

/// Report of NVML.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Nvml {
    /// Driver version, such as `570.86.15`.
    pub(crate) driver: Option<String>,
    /// Error of a library that exists but did not start.
    pub(crate) error: Option<Refused>,
    pub(crate) gpus: Vec<GpuReport>,
}

/// Error from NVML: `nvmlReturn_t` and its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refused {
    pub(crate) code: i32,
    pub(crate) text: String,
}

impl Refused {
    /// Returns `true` if the process lacks the rights.
    pub(crate) fn is_denied(&self) -> bool {
        self.code == NO_PERMISSION
    }
}

/// A GPU. Values that NVML does not report are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct GpuReport {
    /// PCI address in NVML's format, with eight digits of domain.
    pub(crate) at: String,
    /// Index of the GPU in NVML and nvidia-smi.
    pub(crate) index: Option<u32>,
    pub(crate) name: Option<String>,
    pub(crate) bar1: Option<Memory>,
    pub(crate) memory_total_bytes: Option<u64>,
    pub(crate) persistence_mode: Option<bool>,
    pub(crate) mig: Option<bool>,
    pub(crate) virtualization: Option<Virtualization>,
    /// Performance state, from 0 (full speed) to 15. Idle GPUs are at 8 or higher.
    pub(crate) performance_state: Option<u32>,
    /// Busy time during the last sample period of at most a second, in percent.
    pub(crate) utilization_percent: Option<u32>,
    /// Number of active NVLinks by remote end: the PCI address of a GPU, [`SWITCH`], `npu`, or
    /// `unknown`.
    pub(crate) nvlinks: Option<BTreeMap<String, u32>>,
    /// State of the NVLink fabric. `None`: the GPU is in no fabric, or the driver does not report
    /// the state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fabric: Option<Fabric>,
}

/// `nvmlGpuFabricInfo_t`, without the identity of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fabric {
    pub(crate) state: FabricState,
    /// Result of the setup of the fabric, an `nvmlReturn_t`. Valid if `state` is completed.
    pub(crate) status: i32,
}

/// `nvmlGpuFabricState_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FabricState {
    NotStarted,
    InProgress,
    Completed,
}

/// Remote end of an NVLink: an NVSwitch.
pub(crate) const SWITCH: &str = "switch";

/// NVLinks from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nvlinks {
    /// Number of links; 0 if there are none.
    pub(crate) count: u32,
    pub(crate) is_by_switch: bool,
}

/// `nvmlGpuVirtualizationMode_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Virtualization {
    None,
    /// A GPU that is passed through to a virtual machine.
    PassThrough,
    /// A vGPU, seen from inside a virtual machine.
    Vgpu,
    /// A GPU that this host divides among virtual machines.
    HostVgpu,
    /// A GPU that renders for virtual machines.
    HostVsga,
}

impl GpuReport {
    /// Returns the PCI address, or `None` if it is invalid.
    pub(crate) fn address(&self) -> Option<Address> {
        self.at.parse().ok()
    }
}

impl Nvml {
    /// Returns the report of the host's NVML, or [`Absent`](super::Unseen::Absent) if there
    /// is no library.
    pub(crate) fn scan(host: &dyn Host) -> Seen<Self> {
        Self::of(host)
    }

    pub(crate) fn gpu(&self, at: Address) -> Option<&GpuReport> {
        self.gpus.iter().find(|gpu| gpu.address() == Some(at))
    }

    /// Returns `true` if the library started and does not list the GPU at this address.
    pub(crate) fn lacks(&self, at: Address) -> bool {
        self.error.is_none() && self.gpu(at).is_none()
    }

    /// Returns the NVLinks between the GPUs at these addresses, or `None` if the NVLinks are
    /// unknown. If NVSwitches connect the GPUs, the GPU with fewer links limits the number.
    pub(crate) fn nvlinks(&self, one: Address, other: Address) -> Option<Nvlinks> {
        let of = |at: Address| self.gpu(at)?.nvlinks.as_ref();
        let (links, back) = (of(one)?, of(other)?);
        let to_switch = |links: &BTreeMap<String, u32>| links.get(SWITCH).copied().unwrap_or(0);
        let direct = links.get(&other.to_string()).copied().unwrap_or(0);
        let by_switch = to_switch(links).min(to_switch(back));
        Some(Nvlinks {
            count: direct.max(by_switch),
            is_by_switch: by_switch > direct,
        })
    }
}

impl Recorded for Nvml {
    const FACT: Fact = Fact::Nvml;
    const MISREAD: &'static str = "NVML's answer is not understood";

    /// Loads and starts the library once, because a start may take seconds for each unused GPU.
    /// Reads the values anew each time.
    fn ask(_: &dyn Host) -> Seen<Self> {
        static STARTED: OnceLock<Seen<Loaded>> = OnceLock::new();
        match STARTED.get_or_init(Loaded::load) {
            Ok(calls) => Ok(collect(calls)),
            Err(unseen) => Err(unseen.clone()),
        }
    }
}

/// Collects the whole report.
fn collect(calls: &dyn Calls) -> Nvml {
    // An error is reported instead of an empty list, so that missing GPUs are noticed.
    let count = match calls.start().and_then(|()| calls.count()) {
        Ok(count) => count.min(MOST_GPUS),
        Err(code) => {
            return Nvml {
                error: Some(Refused {
                    code,
                    text: calls.error(code),
                }),
                ..Nvml::default()
            };
        }
    };
    Nvml {
        driver: calls.driver().ok(),
        error: None,
        gpus: (0..count).filter_map(|index| gpu(calls, index)).collect(),
    }
}

/// Reads one GPU. Returns `None` if NVML denies access to the GPU, or if the GPU has fallen off the
/// bus.
fn gpu(calls: &dyn Calls, index: u32) -> Option<GpuReport> {
    let device = calls.device(index).ok()?;
    Some(GpuReport {
        at: calls.address(device).ok()?,
        index: Some(index),
        name: calls.name(device).ok(),
        bar1: calls.bar1(device).ok(),
        memory_total_bytes: calls.memory_total(device).ok(),
        persistence_mode: calls.persistence(device).ok().and_then(bool_of),
        mig: match calls.mig(device) {
            Ok(mode) => bool_of(mode),
            // This GPU does not support MIG.
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
        // The state 32 means "unknown".
        performance_state: calls
            .performance_state(device)
            .ok()
            .filter(|&state| state <= 15),
        utilization_percent: calls
            .utilization(device)
            .ok()
            .filter(|&percent| percent <= 100),
        nvlinks: nvlinks(calls, device),
        fabric: calls.fabric(device).ok().and_then(fabric),
    })
}

/// Reads the state and the status of a GPU's fabric.
fn fabric((state, status): (u8, i32)) -> Option<Fabric> {
    let state = match state {
        1 => FabricState::NotStarted,
        2 => FabricState::InProgress,
        3 => FabricState::Completed,
        // The state 0 means "not supported".
        _ => return None,
    };
    Some(Fabric { state, status })
}

fn nvlinks(calls: &dyn Calls, device: Device) -> Option<BTreeMap<String, u32>> {
    let mut links: BTreeMap<String, u32> = BTreeMap::new();
    for link in 0..MOST_LINKS {
        match calls.nvlink_state(device, link) {
            Ok(1) => {}
            // The link is down, or does not exist.
            Ok(_) | Err(NOT_SUPPORTED) => continue,
            Err(INVALID_ARGUMENT) => break,
            Err(_) => return None,
        }
        let to = match calls.nvlink_remote_kind(device, link) {
            Ok(1) => "npu".to_owned(),
            Ok(2) => SWITCH.to_owned(),
            // The remote end is a GPU, or an old library does not report its kind.
            _ => {
                let address = calls.nvlink_remote_address(device, link).ok();
                let address = address.and_then(|address| address.parse::<Address>().ok());
                address.map_or("unknown".to_owned(), |address| address.to_string())
            }
        };
        let count = links.entry(to).or_default();
        *count = count.saturating_add(1);
    }
    Some(links)
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
    use super::library::{Code, Device};
    use super::*;

    /// A fake library with fixed answers. One of its calls may fail.
    struct Fake {
        start: Result<(), Code>,
        count: u32,
        /// Name of the call that fails with "not supported".
        fails: Option<&'static str>,
        mode: u32,
        /// Kind of the remote end of the first NVLink.
        remote: u32,
    }

    impl Fake {
        fn answer<T>(&self, call: &str, value: impl FnOnce(&Self) -> T) -> Result<T, Code> {
            match self.fails == Some(call) {
                true => Err(NOT_SUPPORTED),
                false => Ok(value(self)),
            }
        }
    }

    /// Defines calls that return a value, or that fail if `fails` contains the call's name.
    macro_rules! answers {
        ($($call:ident($($argument:ty),*) -> $type:ty: $name:literal, $value:expr;)*) => {
            $(fn $call(&self, $(_: $argument),*) -> Result<$type, Code> {
                self.answer($name, $value)
            })*
        };
    }

    impl Calls for Fake {
        answers! {
            driver() -> String: "driver", |_| "595.45.04".to_owned();
            count() -> u32: "count", |it| it.count;
            device(u32) -> Device: "device", |_| Device::none();
            address(Device) -> String: "address", |_| "00000000:19:00.0".to_owned();
            name(Device) -> String: "name", |_| "NVIDIA H100 80GB HBM3".to_owned();
            bar1(Device) -> Memory: "bar1", |_| Memory { total_bytes: 3, free_bytes: 2, used_bytes: 1 };
            memory_total(Device) -> u64: "memory", |_| 80 << 30;
            persistence(Device) -> u32: "persistence", |it| it.mode;
            mig(Device) -> u32: "mig", |it| it.mode;
            virtualization(Device) -> u32: "virtualization", |it| it.mode;
            performance_state(Device) -> u32: "state", |it| it.mode;
            utilization(Device) -> u32: "utilization", |it| it.mode;
            nvlink_remote_address(Device, u32) -> String: "remote", |_| "00000000:3b:00.0".to_owned();
            fabric(Device) -> (u8, i32): "fabric", |_| (3, 0);
        }
        fn start(&self) -> Result<(), Code> {
            self.start
        }
        fn error(&self, code: Code) -> String {
            format!("number {code}")
        }
        /// Reports three links, the second of which is down.
        fn nvlink_state(&self, _device: Device, link: u32) -> Result<u32, Code> {
            match link {
                3.. => Err(INVALID_ARGUMENT),
                _ => self.answer("nvlink", |_| u32::from(link != 1)),
            }
        }
        fn nvlink_remote_kind(&self, _device: Device, link: u32) -> Result<u32, Code> {
            self.answer("kind", |it| if link == 0 { it.remote } else { 0 })
        }
    }

    fn fake() -> Fake {
        Fake {
            start: Ok(()),
            count: 1,
            fails: None,
            mode: 1,
            remote: 2,
        }
    }

    fn failing(call: &'static str) -> Fake {
        Fake {
            fails: Some(call),
            ..fake()
        }
    }

    #[test]
    fn all_values_are_reported() {
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
        assert_eq!(gpu.index, Some(0));
    }

    /// Returns the number of NVLinks by remote end.
    fn by_end(links: &[(&str, u32)]) -> BTreeMap<String, u32> {
        let links = links.iter().map(|(to, count)| ((*to).to_owned(), *count));
        links.collect()
    }

    #[test]
    fn nvlinks_are_counted_by_remote_end() {
        let told = |fake: Fake| collect(&fake).gpus[0].nvlinks.clone();
        let links = |links: &[(&str, u32)]| Some(by_end(links));
        let gpu = "0000:3b:00.0";
        assert_eq!(told(fake()), links(&[(gpu, 1), (SWITCH, 1)]));
        for (remote, expected) in [(0, links(&[(gpu, 2)])), (1, links(&[(gpu, 1), ("npu", 1)]))] {
            assert_eq!(told(Fake { remote, ..fake() }), expected);
        }
        let fails = |call| told(failing(call));
        // The three calls fail on a GPU without NVLink, with an old library, and for an unknown
        // remote end.
        assert_eq!(fails("nvlink"), links(&[]));
        assert_eq!(fails("kind"), links(&[(gpu, 2)]));
        assert_eq!(fails("remote"), links(&[(SWITCH, 1), ("unknown", 1)]));
    }

    #[test]
    fn a_fabric_has_a_state() {
        let state = |state| fabric((state, 0)).map(|fabric| fabric.state);
        assert_eq!(state(0), None);
        assert_eq!(state(1), Some(FabricState::NotStarted));
        assert_eq!(state(2), Some(FabricState::InProgress));
        assert_eq!(state(3), Some(FabricState::Completed));
        assert_eq!(state(4), None);
        let told = |fails| collect(&Fake { fails, ..fake() }).gpus[0].fabric;
        assert_eq!(told(None), fabric((3, 0)));
        assert_eq!(told(Some("fabric")), None);
    }

    #[test]
    fn nvlinks_between_two_gpus_are_direct_or_by_switches() {
        let gpu = |at: &str, links: Option<&[(&str, u32)]>| GpuReport {
            at: at.to_owned(),
            nvlinks: links.map(by_end),
            ..GpuReport::default()
        };
        let between = |one, other| {
            let nvml = Nvml {
                gpus: vec![gpu("00000000:19:00.0", one), gpu("0000:3b:00.0", other)],
                ..Nvml::default()
            };
            let (one, other) = (
                "0000:19:00.0".parse().unwrap(),
                "0000:3b:00.0".parse().unwrap(),
            );
            let there = nvml.nvlinks(one, other);
            assert_eq!(there, nvml.nvlinks(other, one));
            there.map(|links| (links.count, links.is_by_switch))
        };
        let (to_one, to_other) = ([("0000:19:00.0", 4)], [("0000:3b:00.0", 4)]);
        assert_eq!(between(Some(&to_other), Some(&to_one)), Some((4, false)));
        assert_eq!(
            between(Some(&[(SWITCH, 18)]), Some(&[(SWITCH, 17)])),
            Some((17, true))
        );
        // Links to a switch are counted only if both GPUs have such links. Links to a third GPU are
        // not counted.
        assert_eq!(between(Some(&[(SWITCH, 18)]), Some(&[])), Some((0, false)));
        assert_eq!(
            between(Some(&[("0000:5d:00.0", 4)]), Some(&[])),
            Some((0, false))
        );
        assert_eq!(between(Some(&[(SWITCH, 18)]), None), None);
    }

    #[test]
    fn a_failed_call_leaves_the_other_values() {
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
            let said = collect(&failing(call));
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
        // A GPU without an address is not reported. A GPU that does not support MIG has MIG
        // disabled.
        for call in ["device", "address", "count"] {
            let said = collect(&failing(call));
            assert_eq!(said.gpus, [], "{call} fails");
        }
        let said = collect(&failing("mig"));
        assert_eq!(said.gpus.first().and_then(|gpu| gpu.mig), Some(false));
    }

    #[test]
    fn a_library_that_does_not_start_says_why() {
        let said = collect(&Fake {
            start: Err(VERSION_MISMATCH),
            ..fake()
        });
        let error = said.error.map(|error| (error.code, error.text));
        assert_eq!(error, Some((VERSION_MISMATCH, "number 18".to_owned())));
        assert_eq!(said.gpus, []);
    }

    #[test]
    fn numbers_out_of_range_are_not_reported() {
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
}
