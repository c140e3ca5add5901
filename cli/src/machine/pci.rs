// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI functions in sysfs (`Documentation/ABI/testing/sysfs-bus-pci`).

use std::fmt;
use std::str::FromStr;

use super::config::{Config, Express, PortType};
use crate::host;
use crate::host::{Host, Seen, Unseen};

pub(crate) use crate::host::address::Address;

/// Speed and width of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    /// Speed in tenths of GT/s: 160 is 16.0 GT/s. 0: unknown to the kernel.
    pub(crate) speed: u32,
    /// Number of lanes. 0: no link.
    pub(crate) width: u32,
}

/// Current rate of a link, and the best supported rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) now: Rate,
    pub(crate) most: Rate,
}

/// A base address register in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bar {
    /// Number of the BAR, 0 to 5.
    pub(crate) index: usize,
    /// Size in bytes.
    pub(crate) size: u64,
    pub(crate) is_64_bit: bool,
    pub(crate) is_prefetchable: bool,
    /// `false` if the kernel found no address for the BAR.
    pub(crate) is_assigned: bool,
}

/// A PCI function.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) at: Address,
    pub(crate) vendor: u16,
    pub(crate) device: u16,
    /// Base class, subclass and programming interface: 0x020700 is InfiniBand.
    pub(crate) class: u32,
    /// Name of the host bridge's directory: `pci0000:00`.
    pub(crate) root: String,
    /// Bridges above the function, from the root port downwards.
    pub(crate) above: Vec<Address>,
    /// NUMA node of the function. `None`: the machine has one node, or the firmware reports none.
    pub(crate) numa: Option<u32>,
    /// Near processors, in the kernel's format: `0-55,112-167`.
    pub(crate) cpus: Option<String>,
    pub(crate) driver: Option<String>,
    pub(crate) link: Seen<Link>,
    pub(crate) bars: Seen<Vec<Bar>>,
    pub(crate) config: Seen<Config>,
    pub(crate) iommu_group: Seen<u32>,
    /// Physical function of a virtual function.
    pub(crate) physical: Option<Address>,
}

impl Rate {
    /// Returns the bandwidth in one direction, in Mb/s, after the overhead of line coding and flits
    /// is subtracted. 0: unknown.
    pub(crate) fn megabits(self) -> u64 {
        // Up to 5 GT/s, links use 8b/10b coding. From 8 to 32 GT/s, links use 128b/130b coding. At
        // 64 GT/s, a flit of 256 bytes has 242 bytes of payload.
        let lane = match self.speed {
            0..=50 => u64::from(self.speed) * 100 * 8 / 10,
            51..=320 => u64::from(self.speed) * 100 * 128 / 130,
            _ => u64::from(self.speed) * 100 * 242 / 256,
        };
        lane.saturating_mul(u64::from(self.width))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.speed {
            0 => f.write_str("unknown speed")?,
            speed => write!(f, "{}.{} GT/s", speed / 10, speed % 10)?,
        }
        write!(f, " x{}", self.width)
    }
}

impl FromStr for Rate {
    type Err = String;

    /// Parses `32.0 GT/s x16`.
    fn from_str(text: &str) -> Result<Self, String> {
        let rate = text.split_once(" x").and_then(|(before, lanes)| {
            Some(Self {
                speed: Some(speed(before.strip_suffix(" GT/s")?)).filter(|speed| *speed > 0)?,
                width: Some(width(lanes)).filter(|lanes| *lanes > 0)?,
            })
        });
        rate.ok_or_else(|| format!("{text:?} is not a link such as \"32.0 GT/s x16\""))
    }
}

/// Mellanox, now NVIDIA Networking.
pub(crate) const MELLANOX: u16 = 0x15b3;

/// Vendor and device ID of ConnectX-8's Data Direct function.
pub(crate) const DATA_DIRECT: (u16, u16) = (MELLANOX, 0x2100);

/// Directory of all functions in sysfs.
pub(crate) const DEVICES: &str = "/sys/bus/pci/devices";

/// Flags of the kernel's `struct resource`, from `ioport.h`.
const MEMORY: u64 = 0x200;
const PREFETCHABLE: u64 = 0x2000;
const IS_64_BIT: u64 = 0x10_0000;
/// `IORESOURCE_UNSET`: a BAR of known size without an address.
const UNSET: u64 = 0x2000_0000;

/// Returns the last host bridge in a path below `/sys/devices`, and the addresses after it.
pub(crate) fn way(path: &str) -> Option<(String, Vec<Address>)> {
    let mut root = None;
    let mut addresses = Vec::new();
    for name in path.split('/') {
        if name.starts_with("pci") && name.contains(':') {
            root = Some(name.to_owned());
            addresses.clear();
        } else if root.is_some() {
            // Only full addresses such as `0000:3b:00.0` are accepted.
            if let (12.., Ok(address)) = (name.len(), name.parse()) {
                addresses.push(address);
            }
        }
    }
    root.map(|root| (root, addresses))
}

/// Parses `16.0 GT/s PCIe` into tenths of GT/s. Returns 0 for an unknown speed.
fn speed(text: &str) -> u32 {
    let figure = text.split_whitespace().next().unwrap_or_default();
    let (whole, tenths) = figure.split_once('.').unwrap_or((figure, "0"));
    let whole = whole.parse::<u32>().unwrap_or(0);
    let tenths = tenths.get(..1).and_then(|digit| digit.parse().ok());
    whole.saturating_mul(10).saturating_add(tenths.unwrap_or(0))
}

/// Parses the width. Returns 0 for an unknown width. The kernel writes an unknown width as 255, and
/// the width of a missing link as 63 or 0.
fn width(text: &str) -> u32 {
    let lanes = text.parse().ok();
    lanes.filter(|lanes| (1..=32).contains(lanes)).unwrap_or(0)
}

/// Number of BARs of a function. Each BAR has a line in `resource`.
const BARS: usize = 6;

/// Parses the first six lines of `resource`: first address, last address, flags. Fails if lines are
/// missing.
fn bars_of(text: &str) -> Seen<Vec<Bar>> {
    match text.lines().count() {
        BARS.. => Ok(bars(text)),
        lines => Err(Unseen::Failed(format!("resource has {lines} lines"))),
    }
}

fn bars(text: &str) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (index, line) in text.lines().take(BARS).enumerate() {
        let mut numbers = line.split_whitespace().map(host::number);
        let (Some(Some(start)), Some(Some(end)), Some(Some(flags))) =
            (numbers.next(), numbers.next(), numbers.next())
        else {
            continue;
        };
        let Some(size) = end.checked_sub(start).and_then(|size| size.checked_add(1)) else {
            continue;
        };
        if flags & MEMORY != 0 && end != 0 {
            bars.push(Bar {
                index,
                size,
                is_64_bit: flags & IS_64_BIT != 0,
                is_prefetchable: flags & PREFETCHABLE != 0,
                // Address 0 belongs to the processor's memory, and never to a BAR.
                is_assigned: flags & UNSET == 0 && start != 0,
            });
        }
    }
    bars
}

impl Function {
    /// Reads a function. Fails if the function does not exist, or if its identity cannot be read.
    pub(crate) fn scan(host: &dyn Host, at: Address) -> Seen<Self> {
        let own = |file: &str| format!("{DEVICES}/{at}/{file}");
        let identity = |file: &str| {
            let path = own(file);
            let number = host.number(&path)?;
            u32::try_from(number).map_err(|_| Unseen::Failed(format!("{path}: {number:#x}")))
        };
        let narrow = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        let real = host.resolved(&format!("{DEVICES}/{at}"))?;
        let (root, mut above) = way(&real)
            .ok_or_else(|| Unseen::Failed(format!("{real} is below no PCI host bridge")))?;
        // The last address is that of the function itself.
        above.pop();
        let rate = |speed_file: &str, width_file: &str| -> Seen<Rate> {
            Ok(Rate {
                speed: speed(&host.text(&own(speed_file))?),
                width: width(&host.text(&own(width_file))?),
            })
        };
        let link = || -> Seen<Link> {
            Ok(Link {
                now: rate("current_link_speed", "current_link_width")?,
                most: rate("max_link_speed", "max_link_width")?,
            })
        };
        let numa = host.text(&own("numa_node")).ok();
        let cpus = host.text(&own("local_cpulist")).ok();
        let group = host.link(&own("iommu_group"));
        let physical = host.resolved(&own("physfn")).ok();
        Ok(Self {
            at,
            vendor: narrow(identity("vendor")?),
            device: narrow(identity("device")?),
            class: identity("class")?,
            root,
            above,
            numa: numa.and_then(|node| node.parse().ok()),
            cpus: cpus.filter(|list| !list.is_empty()),
            driver: host
                .link(&own("driver"))
                .ok()
                .and_then(|says| last(&says).map(str::to_owned)),
            link: link(),
            bars: host.text(&own("resource")).and_then(|text| bars_of(&text)),
            config: host.bytes(&own("config")).map(Config),
            iommu_group: group.and_then(|says| {
                last(&says)
                    .and_then(|name| name.parse().ok())
                    .ok_or_else(|| {
                        Unseen::Failed(format!("the IOMMU group {says:?} has no number"))
                    })
            }),
            physical: physical.and_then(|path| way(&path)?.1.pop()),
        })
    }

    /// Returns the number of bridges above both functions.
    pub(crate) fn shared(&self, other: &Self) -> usize {
        let both = self.above.iter().zip(&other.above);
        match self.root == other.root {
            true => both.take_while(|(one, other)| one == other).count(),
            false => 0,
        }
    }

    /// Returns the BARs without an address.
    pub(crate) fn unassigned(&self) -> impl Iterator<Item = &Bar> {
        let bars = self.bars.iter().flatten();
        bars.filter(|bar| !bar.is_assigned)
    }

    /// Returns `true` if the function does not answer: its config space reads as all ones.
    pub(crate) fn is_silent(&self) -> bool {
        self.config.as_ref().is_ok_and(Config::is_silent)
    }

    /// Returns the config space, or the reason why it could not be read.
    pub(crate) fn config(&self) -> Seen<&Config> {
        self.config.as_ref().map_err(Clone::clone)
    }

    /// Returns `true` for ConnectX-8's Data Direct function.
    pub(crate) fn is_data_direct(&self) -> bool {
        (self.vendor, self.device) == DATA_DIRECT
    }

    /// Returns the kind of bridge, as far as known.
    pub(crate) fn kind_of_bridge(&self) -> &'static str {
        match self.express().map(|express| express.port) {
            Ok(PortType::RootPort) => "root port",
            Ok(PortType::Upstream) => "upstream port",
            Ok(PortType::Downstream) => "downstream port",
            _ => "bridge",
        }
    }

    /// Returns the PCI Express capability, or [`Unseen::Absent`] for conventional PCI.
    pub(crate) fn express(&self) -> Seen<Express> {
        self.config()?.express()
    }
}

/// Returns the last component of a path.
fn last(path: &str) -> Option<&str> {
    path.rsplit('/').find(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_sysfs_names_the_bridges() {
        let names = |path: &str| -> Option<String> {
            let (root, all) = way(path)?;
            let all: Vec<String> = all.iter().map(Address::to_string).collect();
            Some(format!("{root} {}", all.join(" ")))
        };
        let path = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/infiniband/mlx5_0";
        let bridges = "pci0000:15 0000:15:01.0 0000:16:00.0";
        assert_eq!(names(path).as_deref(), Some(bridges));
        // Intel's VMD is a host bridge below a function.
        let path = "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0";
        assert_eq!(names(path).as_deref(), Some("pci10000:e0 10000:e0:06.0"));
        assert_eq!(names("/sys/devices/virtual/net/lo"), None);
    }

    #[test]
    fn links_and_bars_are_read() {
        assert_eq!(speed("32.0 GT/s PCIe"), 320);
        assert_eq!(speed("2.5 GT/s PCIe"), 25);
        assert_eq!(speed("8 GT/s"), 80);
        assert_eq!(speed("Unknown"), 0);
        assert_eq!(width("16"), 16);
        assert_eq!(width("255"), 0);
        let rate = Rate {
            speed: 320,
            width: 16,
        };
        assert_eq!(rate.to_string(), "32.0 GT/s x16");
        assert_eq!(rate.megabits(), 504_112);
        let found = bars(
            "0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200\n\
             0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n",
        );
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[1].size, 128 << 30);
        assert!(found[1].is_64_bit && found[1].is_prefetchable);
        assert!(found.iter().all(|bar| bar.is_assigned));
        for unset in [
            "0x0000000000000000 0x0000001fffffffff 0x000000002014220c",
            "0x0000380000000000 0x0000381fffffffff 0x000000002014220c",
            "0x0000000000000000 0x0000001fffffffff 0x000000000014220c",
        ] {
            let found = bars(unset);
            let [bar] = found.as_slice() else {
                panic!("{found:?}");
            };
            assert_eq!((bar.size, bar.is_assigned), (128 << 30, false), "{unset}");
        }
        assert!(bars_of("").is_err());
        assert!(bars_of(&"0x0 0x0 0x0\n".repeat(6)).is_ok_and(|bars| bars.is_empty()));
        assert!(bars("0xffffffffffffffff 0x0 0x200").is_empty());
        assert!(bars("0x0 0xffffffffffffffff 0x200").is_empty());
    }
}
