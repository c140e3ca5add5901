// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What the machine should have, by a file that is written by hand or by `--write-expect`: how many GPUs and RDMA
//! devices of each model, their links, ports and firmware, and the versions of modules.
//!
//! Unlike a recording (`baseline.rs`) it knows no slots, so that one file serves all nodes of a model, and what it
//! leaves out is not compared.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use anyhow::{bail, Context as _};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::link::{gigabits, rate_of};
use super::scan::{Check, Scan};
use super::{port, started};
use crate::finding::{Finding, Level, Subject};
use crate::host::{recording, Host, Unseen};
use crate::machine::pci::{Address, Function, Link, Rate};
use crate::machine::{Gpu, Hca, Machine, Port};
use crate::nvml::Nvml;
use crate::render::counted;

pub(super) const EXPECT: Check = Check {
    name: "expect",
    about: "with --expect: whether GPUs, RDMA devices, ports, links, firmware and modules are those of a file",
    applies: |scan| scan.expected.is_some(),
    run: expect,
};

/// The file. Only what is in it counts.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Expected {
    gpus: Vec<Gpus>,
    hcas: Vec<Hcas>,
    /// Versions of modules, as `/sys/module/NAME/version` has them.
    modules: BTreeMap<String, String>,
}

/// GPUs of one model.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Gpus {
    count: usize,
    /// None: of any model.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Text<Model>>,
    /// Lanes, and the speed that both ends can: an idle GPU lowers the one that it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<Text<Rate>>,
}

/// RDMA devices of one model, without those in software.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hcas {
    count: usize,
    /// None: of any model.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Text<Model>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<Text<Rate>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    firmware: Option<String>,
    /// Of each.
    #[serde(skip_serializing_if = "Option::is_none")]
    active_ports: Option<usize>,
    /// Of each port that is ACTIVE.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<Text<PortRate>>,
}

/// PCI vendor and device, as `lspci -nn` prints them: `15b3:1021`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Model(u16, u16);

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
            .ok_or_else(|| format!("{text:?} is no PCI vendor and device such as 15b3:1021"))
    }
}

/// The rate of a port, as sysfs and `topo` have it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PortRate {
    text: String,
    megabits: u64,
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
            .ok_or_else(|| format!("{text:?} is no rate such as \"400 Gb/sec (4X NDR)\""))?;
        Ok(Self {
            text: text.to_owned(),
            megabits,
        })
    }
}

/// A string of the file with a form of its own, so that a wrong one is refused with its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Text<T>(T);

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
    /// From a file.
    ///
    /// # Errors
    /// It is no JSON, or has a key or a value that is not known: the key and its line are named.
    pub(crate) fn load(file: &Path) -> anyhow::Result<Self> {
        let name = file.display();
        let text = recording::read(file).with_context(|| format!("{name}"))?;
        let expected: Self = serde_json::from_str(&text).with_context(|| format!("{name}"))?;
        let is_name = |name: &str| {
            let mut letters = name.chars();
            letters.all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-'))
        };
        if let Some(module) = expected.modules.keys().find(|module| !is_name(module)) {
            bail!("{name}: {module:?} is no module's name");
        }
        Ok(expected)
    }

    /// What the machine has now.
    pub(super) fn of(host: &dyn Host, machine: &Machine) -> Self {
        let mut expected = Self::default();
        let nvml = Nvml::scan(host);
        for (at, model) in machine
            .gpus
            .iter()
            .filter(|gpu| !started::is_unlisted(machine, &nvml, gpu))
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

    /// One more RDMA device. Of a model the least is expected that any device has, so that the machine is as expected.
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
        // One without an ACTIVE port has no rate.
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

fn active(hca: &Hca) -> impl Iterator<Item = &Port> {
    hca.ports.iter().filter(|port| port::is_active(port))
}

fn slowest(hca: &Hca) -> Option<Text<PortRate>> {
    let rates = active(hca).filter_map(|port| port.rate.as_deref()?.parse::<PortRate>().ok());
    rates.min_by_key(|rate| rate.megabits).map(Text)
}

fn version_file(module: &str) -> String {
    // The kernel writes them so, whatever the file is called.
    format!("/sys/module/{}/version", module.replace('-', "_"))
}

fn model_of(machine: &Machine, at: Address) -> Option<Model> {
    machine.functions.get(&at).map(Model::of)
}

/// None: its speed and width are not known, as in many virtual machines.
fn link(machine: &Machine, at: Address) -> Option<Link> {
    let is_known = |link: &Link| link.now.speed != 0 && link.now.width != 0 && link.most.speed != 0;
    machine.link(at).filter(is_known)
}

/// Of an idle GPU the speed goes down; what both ends can does not.
fn of_gpu(link: Link) -> Rate {
    Rate {
        speed: link.most.speed,
        ..link.now
    }
}

fn new(level: Level, subject: Subject, found: String) -> Finding {
    Finding::new(EXPECT.name, level, subject, found)
}

fn expect(scan: &Scan<'_>) -> Vec<Finding> {
    let Some(expected) = scan.expected else {
        return Vec::new();
    };
    let machine = scan.machine;
    let is_of = |at: Address, device: Option<Text<Model>>| {
        device.is_none_or(|Text(model)| model_of(machine, at) == Some(model))
    };
    let mut findings = Vec::new();
    for wanted in &expected.gpus {
        let gpus = machine.gpus.iter();
        let nvml = &scan.software().nvml;
        let (unlisted, there): (Vec<&Gpu>, Vec<&Gpu>) = gpus
            .filter(|gpu| is_of(gpu.at, wanted.device))
            .partition(|gpu| started::is_unlisted(machine, nvml, gpu));
        let count = count("GPU", "10de:", there.len(), wanted.count, wanted.device);
        findings.extend(count.map(|finding| with_unlisted(scan, finding, &unlisted)));
        for gpu in there {
            if let Some(Text(least)) = wanted.link {
                let now = link(machine, gpu.at).map(of_gpu);
                findings.extend(of_link(gpu.at, now, least, Subject::gpu(gpu)));
            }
        }
    }
    for wanted in &expected.hcas {
        let hcas = machine.hcas.iter().filter(|hca| !hca.is_software);
        let there: Vec<_> = hcas
            .filter(|hca| match hca.at {
                Some(at) => is_of(at, wanted.device),
                None => wanted.device.is_none(),
            })
            .collect();
        findings.extend(count(
            "RDMA device",
            "15b3:",
            there.len(),
            wanted.count,
            wanted.device,
        ));
        for hca in there {
            findings.extend(of_hca(scan, hca, wanted));
        }
    }
    for (module, version) in &expected.modules {
        findings.extend(of_module(scan.host, module, version));
    }
    if findings.is_empty() {
        findings.push(new(
            Level::Ok,
            Subject::Machine,
            format!(
                "{}, {} and {} are as expected",
                counted(
                    expected.gpus.iter().map(|gpus| gpus.count).sum::<usize>(),
                    "GPU"
                ),
                counted(
                    expected.hcas.iter().map(|hcas| hcas.count).sum::<usize>(),
                    "RDMA device"
                ),
                counted(expected.modules.len(), "module")
            ),
        ));
    }
    findings
}

/// `any` is what `lspci -d` takes for all of them.
fn count(
    what: &str,
    any: &str,
    there: usize,
    wanted: usize,
    device: Option<Text<Model>>,
) -> Option<Finding> {
    let (of, filter) = match device {
        Some(Text(model)) => (format!(" of {model}"), model.to_string()),
        None => (String::new(), any.to_owned()),
    };
    let is_or_are = if wanted == 1 { "is" } else { "are" };
    let found = format!(
        "{}{of}, and {wanted} {is_or_are} expected",
        counted(there, what)
    );
    if there > wanted {
        return Some(new(Level::Note, Subject::Machine, found));
    }
    (there < wanted).then(|| {
        new(Level::Fault, Subject::Machine, found)
            .why("One fell off the bus, was not found at boot, lost its driver, or was taken out.")
            .fix(format!(
                "`lspci -d {filter}` lists those on PCI, and `dmesg | grep -i -e Xid -e 'fallen off' -e mlx5_core` \
                 says what went wrong; `peermemctl doctor --baseline FILE` names the slot, if there is a recording"
            ))
    })
}

/// Names the GPUs that are on PCI and do not count, since NVML does not list them.
fn with_unlisted(scan: &Scan<'_>, finding: Finding, unlisted: &[&Gpu]) -> Finding {
    if finding.level != Level::Fault || unlisted.is_empty() {
        return finding;
    }
    let each: Vec<String> = unlisted.iter().map(|gpu| gpu.at.to_string()).collect();
    let each = each.join(", ");
    if unlisted
        .iter()
        .all(|gpu| started::is_withheld(scan.host, gpu))
    {
        return new(Level::Note, finding.subject, finding.found).why(format!(
            "On PCI there are more ({each}). In a container or a job NVML lists the GPUs that it may open."
        ));
    }
    finding.why(format!(
        "{each} on PCI does not count: NVML does not list it, since nvidia.ko could not start it or has lost it."
    ))
}

fn of_link(at: Address, now: Option<Rate>, least: Rate, subject: Subject) -> Option<Finding> {
    let Some(now) = now else {
        let why = Unseen::Failed("its speed and width are unknown".to_owned());
        return Some(Scan::unseen(
            EXPECT.name,
            subject,
            format!("the link of {at}"),
            &why,
        ));
    };
    (now.width < least.width || now.speed < least.speed).then(|| {
        new(
            Level::Warning,
            subject,
            format!("the link above {at} is {now}, and {least} is expected"),
        )
        .why("A link trains down where lanes or contacts are bad.")
        .fix("Reseat the device, check riser and cable; `dmesg | grep -i 'available PCIe bandwidth'`")
    })
}

fn of_hca(scan: &Scan<'_>, hca: &Hca, wanted: &Hcas) -> Vec<Finding> {
    let mut findings = Vec::new();
    let warn = |found: String, fix: String| new(Level::Warning, Subject::hca(hca), found).fix(fix);
    // An unknown value is no reason to warn.
    let unknown = |what: String| {
        let why = Unseen::Failed("not known".to_owned());
        Scan::unseen(EXPECT.name, Subject::hca(hca), what, &why)
    };
    if let Some(least) = wanted.active_ports {
        let is = active(hca).count();
        let down = || hca.ports.iter().filter(|port| !port::is_active(port));
        if is < least && down().any(|port| port.state.is_none()) {
            findings.push(unknown("the state of its ports".to_owned()));
        } else if is < least {
            let state = |port: &Port| {
                let state = port.state.as_deref()?;
                Some(format!("port {} is {state}", port.number))
            };
            let states: Vec<String> = down().filter_map(state).collect();
            let expected = format!("{} expected", counted(least, "ACTIVE port"));
            let fix = down().next().map(|port| port::fix(hca, port));
            findings.push(warn(
                match states.is_empty() {
                    true => format!("{}, and {expected}", counted(is, "port")),
                    false => format!("{}; {expected}", states.join(", ")),
                },
                fix.unwrap_or_else(|| port::cable(hca)),
            ));
        }
    }
    if let Some(Text(least)) = &wanted.rate {
        for port in active(hca) {
            let number = port.number;
            match port
                .rate
                .as_deref()
                .and_then(|rate| Some((rate, rate_of(rate)?)))
            {
                None => findings.push(unknown(format!("the rate of port {number}"))),
                Some((rate, is)) if is < least.megabits => findings.push(warn(
                    format!(
                        "port {number} has {rate}, and {} Gb/s is expected",
                        gigabits(least.megabits)
                    ),
                    port::cable(hca),
                )),
                Some(_) => {}
            }
        }
    }
    match (&wanted.firmware, &hca.firmware) {
        (Some(_), None) => findings.push(unknown("the firmware's version".to_owned())),
        (Some(wanted), Some(is)) if is != wanted => findings.push(warn(
            format!("the firmware is {is}, and {wanted} is expected"),
            "`mlxfwmanager --query` shows what is installed and what there is".to_owned(),
        )),
        _ => {}
    }
    if let (Some(Text(least)), Some(at)) = (wanted.link, hca.at) {
        let now = link(scan.machine, at).map(|link| link.now);
        findings.extend(of_link(at, now, least, Subject::hca(hca)));
    }
    findings
}

fn of_module(host: &dyn Host, module: &str, wanted: &str) -> Option<Finding> {
    let new = |level, found: String| Some(new(level, Subject::Machine, found));
    let file = version_file(module);
    match host.text(&file) {
        Ok(version) if version == wanted => None,
        Ok(version) => new(
            Level::Warning,
            format!("{module} is {version}, and {wanted} is expected"),
        ),
        Err(Unseen::Absent) => {
            let directory = file.trim_end_matches("/version");
            match host.has(directory) {
                Ok(true) => new(
                    Level::Warning,
                    format!("{module} has no version, and {wanted} is expected"),
                ),
                _ => new(
                    Level::Fault,
                    format!("{module} is not loaded, and {wanted} is expected"),
                )
                .map(|finding| finding.fix(format!("`modprobe {module}`"))),
            }
        }
        Err(why) => Some(Scan::unseen(
            EXPECT.name,
            Subject::Machine,
            format!("the version of {module}"),
            &why,
        )),
    }
}
