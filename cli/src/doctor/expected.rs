// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The file of `--expect`: number of GPUs and RDMA devices of each model, their links, ports and
//! firmware, and versions of modules.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use anyhow::{bail, Context as _};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::host::nvml::Nvml;
use crate::host::{recording, Host};
use crate::machine::hca::rate_of;
use crate::machine::pci::{Address, Function, Link, Rate};
use crate::machine::{Hca, Machine, Port};
use crate::software::listed::is_unlisted;

/// Contents of the file. Omitted values are not compared.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Expected {
    pub(super) gpus: Vec<Gpus>,
    pub(super) hcas: Vec<Hcas>,
    /// Versions of modules, as in `/sys/module/NAME/version`.
    pub(super) modules: BTreeMap<String, String>,
}

/// GPUs of one model.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Gpus {
    pub(super) count: usize,
    /// `None`: any model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<Text<Model>>,
    /// Current width, and the best speed that both ends support. The current speed of an idle GPU
    /// is lower.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) link: Option<Text<Rate>>,
}

/// RDMA devices of one model. `count` does not include software devices.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hcas {
    pub(super) count: usize,
    /// `None`: any model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<Text<Model>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) link: Option<Text<Rate>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) firmware: Option<String>,
    /// Number of ACTIVE ports of each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) active_ports: Option<usize>,
    /// Rate of each ACTIVE port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rate: Option<Text<PortRate>>,
}

/// PCI vendor and device ID, in the format of `lspci -nn`: `15b3:1021`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Model(u16, u16);

impl Model {
    fn of(function: &Function) -> Self {
        Self(function.vendor, function.device)
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x}", self.0, self.1)
    }
}

impl FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hex = |text: &str| match text.len() {
            4 => u16::from_str_radix(text, 16).ok(),
            _ => None,
        };
        text.split_once(':')
            .and_then(|(vendor, device)| Some(Self(hex(vendor)?, hex(device)?)))
            .ok_or_else(|| format!("{text:?} is not a PCI vendor and device such as 15b3:1021"))
    }
}

/// Rate of a port, in the format of sysfs and `topo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PortRate {
    text: String,
    pub(super) megabits: u64,
}

impl fmt::Display for PortRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for PortRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let megabits = rate_of(text)
            .ok_or_else(|| format!("{text:?} is not a rate such as \"400 Gb/sec (4X NDR)\""))?;
        Ok(Self {
            text: text.to_owned(),
            megabits,
        })
    }
}

/// A value that the file stores as a formatted string. An invalid string is reported with its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Text<T>(pub(super) T);

impl<T: fmt::Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de, T: FromStr<Err = String>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(D::Error::custom)
    }
}

impl Expected {
    /// Reads a file. Returns an error if the file is not JSON, or has an unknown key or value. The
    /// message names the key and its line.
    pub(crate) fn load(file: &Path) -> anyhow::Result<Self> {
        let name = file.display();
        let text = recording::read(file).with_context(|| format!("{name}"))?;
        let expected: Self = serde_json::from_str(&text).with_context(|| format!("{name}"))?;
        let is_name = |name: &str| {
            let mut letters = name.chars();
            letters.all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-'))
        };
        if let Some(module) = expected.modules.keys().find(|module| !is_name(module)) {
            bail!("{name}: {module:?} is not a module's name");
        }
        Ok(expected)
    }

    /// Returns an expectation that the machine meets in its current state.
    pub(super) fn of(host: &dyn Host, machine: &Machine) -> Self {
        let mut expected = Self::default();
        let nvml = Nvml::scan(host);
        for (at, model) in machine
            .gpus
            .iter()
            .filter(|gpu| !is_unlisted(machine, &nvml, gpu))
            .filter_map(|gpu| Some((gpu.at, model_of(machine, gpu.at)?)))
        {
            let link = link(machine, at).map(|link| Text(of_gpu(link)));
            let device = Some(Text(model));
            match expected.gpus.iter_mut().find(|gpus| gpus.device == device) {
                Some(gpus) => {
                    gpus.count = gpus.count.saturating_add(1);
                    gpus.link = lesser(gpus.link, link);
                }
                None => expected.gpus.push(Gpus {
                    count: 1,
                    device,
                    link,
                }),
            }
        }
        for hca in machine.hcas.iter().filter(|hca| !hca.is_software) {
            let Some(model) = hca.at.and_then(|at| model_of(machine, at)) else {
                continue;
            };
            expected.add(Hcas {
                count: 1,
                device: Some(Text(model)),
                link: hca
                    .at
                    .and_then(|at| link(machine, at))
                    .map(|link| Text(link.now)),
                firmware: hca.firmware.clone(),
                active_ports: Some(active(hca).count()).filter(|count| *count > 0),
                rate: slowest(hca),
            });
        }
        for module in ["nvidia", "nvidia_peermem", "mlx5_core"] {
            if let Ok(version) = host.text(&version_file(module)) {
                expected.modules.insert(module.to_owned(), version);
            }
        }
        expected
    }

    /// Adds an RDMA device to the entry of its model. The entry has the lowest values among the
    /// devices of the model, because each device must meet the entry. If firmware versions differ,
    /// the entry has no firmware version.
    fn add(&mut self, one: Hcas) {
        let Some(same) = self.hcas.iter_mut().find(|hcas| hcas.device == one.device) else {
            self.hcas.push(one);
            return;
        };
        same.count = same.count.saturating_add(one.count);
        same.link = lesser(same.link, one.link);
        if same.firmware != one.firmware {
            same.firmware = None;
        }
        same.active_ports = same.active_ports.min(one.active_ports);
        // A device without an ACTIVE port has no rate.
        same.rate = match (same.rate.take(), one.rate) {
            (Some(one), Some(other)) => Some(if other.0.megabits < one.0.megabits {
                other
            } else {
                one
            }),
            (one, other) => one.or(other),
        };
    }
}

fn lesser(one: Option<Text<Rate>>, other: Option<Text<Rate>>) -> Option<Text<Rate>> {
    let (Text(one), Text(other)) = (one?, other?);
    Some(Text(Rate {
        speed: one.speed.min(other.speed),
        width: one.width.min(other.width),
    }))
}

pub(super) fn active(hca: &Hca) -> impl Iterator<Item = &Port> {
    hca.ports.iter().filter(|port| port.is_active())
}

fn slowest(hca: &Hca) -> Option<Text<PortRate>> {
    let rates = active(hca).filter_map(|port| port.rate.as_deref()?.parse::<PortRate>().ok());
    rates.min_by_key(|rate| rate.megabits).map(Text)
}

pub(super) fn version_file(module: &str) -> String {
    // The kernel replaces dashes in module names with underscores.
    format!("/sys/module/{}/version", module.replace('-', "_"))
}

pub(super) fn model_of(machine: &Machine, at: Address) -> Option<Model> {
    machine.functions.get(&at).map(Model::of)
}

/// Returns the link, or `None` if speed and width are unknown, as in many virtual machines.
pub(super) fn link(machine: &Machine, at: Address) -> Option<Link> {
    let is_known = |link: &Link| link.now.speed != 0 && link.now.width != 0 && link.most.speed != 0;
    machine.link(at).filter(is_known)
}

/// Returns the current width of a GPU's link, and the best speed that both ends support. An idle
/// GPU lowers the current speed.
pub(super) fn of_gpu(link: Link) -> Rate {
    Rate {
        speed: link.most.speed,
        ..link.now
    }
}
