// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI functions as sysfs shows them: `Documentation/ABI/testing/sysfs-bus-pci`.

use std::fmt;
use std::str::FromStr;

use crate::host;
use crate::host::Host;
use crate::host::Seen;
use crate::host::Unseen;

/// Domain, bus, device and function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address {
    pub(crate) domain: u32,
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// It is no address of a PCI function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no PCI address such as 0000:3b:00.0")]
pub(crate) struct NoAddress(String);

impl FromStr for Address {
    type Err = NoAddress;

    /// As sysfs writes it; without a domain it is 0000, as in lspci. NVML's eight digits of domain are taken, too.
    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let wrong = || NoAddress(text.to_owned());
        let hex = |digits: &str, most: u32| {
            let only = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            u32::from_str_radix(digits, 16)
                .ok()
                .filter(|&number| only && number <= most)
                .ok_or_else(wrong)
        };
        let narrow = |number: u32| u8::try_from(number).map_err(|_| wrong());
        let (front, function) = text.rsplit_once('.').ok_or_else(wrong)?;
        let (front, device) = front.rsplit_once(':').ok_or_else(wrong)?;
        let (domain, bus) = front.split_once(':').unwrap_or(("0", front));
        Ok(Self {
            domain: hex(domain, u32::MAX)?,
            bus: narrow(hex(bus, 0xff)?)?,
            device: narrow(hex(device, 0x1f)?)?,
            function: narrow(hex(function, 7)?)?,
        })
    }
}

/// Speed and width of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    /// In tenths of GT/s: 160 is 16.0 GT/s. 0: unknown to the kernel.
    pub(crate) speed: u32,
    /// Lanes. 0: no link.
    pub(crate) width: u32,
}

/// A link as it is, and as this end of it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) now: Rate,
    pub(crate) most: Rate,
}

/// A base address register with something behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bar {
    /// 0 to 5.
    pub(crate) index: usize,
    pub(crate) start: u64,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) is_64_bit: bool,
    pub(crate) is_prefetchable: bool,
}

/// Config space, as much as this process may read: 64 bytes without root, 256 without extended config space, or 4096.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Config(pub(crate) Vec<u8>);

/// One PCI function.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) at: Address,
    pub(crate) vendor: u16,
    pub(crate) device: u16,
    /// Base class, subclass, programming interface: 0x020700 is InfiniBand.
    pub(crate) class: u32,
    /// The host bridge's directory: `pci0000:00`.
    pub(crate) root: String,
    /// The bridges above it, from the root port down to the one that it hangs on.
    pub(crate) above: Vec<Address>,
    /// Of the memory that is near; none: the machine has one node, or the firmware does not say.
    pub(crate) numa: Option<u32>,
    pub(crate) driver: Option<String>,
    pub(crate) link: Seen<Link>,
    pub(crate) bars: Vec<Bar>,
    pub(crate) config: Seen<Config>,
    pub(crate) iommu_group: Seen<u32>,
    /// Of a virtual function: the physical one.
    pub(crate) physical: Option<Address>,
}

impl serde::Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Rate {
    /// In millions of bits a second, one way, without the line's coding; 0: not known.
    pub(crate) fn megabits(self) -> u64 {
        // 8b/10b up to 5 GT/s, 128b/130b from 8 GT/s on; 64 GT/s has flits of 242 bytes of 256.
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

/// What kind of PCI Express port or device a function is: the Device/Port Type of its capabilities register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortType {
    Endpoint,
    RootPort,
    Upstream,
    Downstream,
    /// Of the root complex itself, or a bridge to another bus.
    Other(u8),
}

/// The PCI Express capability: what the function can, and how it is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Express {
    pub(crate) port: PortType,
    /// The largest payload that it can, in bytes.
    pub(crate) payload_most: u32,
    /// The largest payload that it is set to, in bytes.
    pub(crate) payload: u32,
    /// The longest read that it may ask for, in bytes.
    pub(crate) read_request: u32,
    /// Whether it may mark its transfers as relaxed in their order.
    pub(crate) relaxed_ordering: bool,
}

/// Access Control Services: what a port can keep from going straight from one device to another, and what it does keep.
/// Bits by name in [`Acs::names`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Acs {
    /// Where it stands in config space: its control register is 6 bytes on.
    pub(crate) at: u16,
    pub(crate) can: u16,
    pub(crate) set: u16,
}

impl Acs {
    /// Source Validation.
    pub(crate) const SV: u16 = 1;
    /// Translation Blocking.
    pub(crate) const TB: u16 = 1 << 1;
    /// P2P Request Redirect: requests between devices go up to the root.
    pub(crate) const RR: u16 = 1 << 2;
    /// P2P Completion Redirect.
    pub(crate) const CR: u16 = 1 << 3;
    /// Upstream Forwarding.
    pub(crate) const UF: u16 = 1 << 4;
    /// P2P Egress Control.
    pub(crate) const EC: u16 = 1 << 5;
    /// Direct Translated P2P: what ATS has translated goes straight.
    pub(crate) const DT: u16 = 1 << 6;

    /// The names of bits, as lspci has them.
    pub(crate) fn names(bits: u16) -> Vec<&'static str> {
        let all = [
            (Self::SV, "SrcValid"),
            (Self::TB, "TransBlk"),
            (Self::RR, "ReqRedir"),
            (Self::CR, "CmpltRedir"),
            (Self::UF, "UpstreamFwd"),
            (Self::EC, "EgressCtrl"),
            (Self::DT, "DirectTrans"),
        ];
        all.iter()
            .filter(|(bit, _)| bits & bit != 0)
            .map(|(_, name)| *name)
            .collect()
    }
}

/// A BAR whose size can be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resizable {
    /// 0 to 5.
    pub(crate) bar: usize,
    /// In bytes, as it is set.
    pub(crate) size: u64,
    /// In bytes, all that it can be, smallest first.
    pub(crate) sizes: Vec<u64>,
}

/// Capability identities of the PCI and PCI Express specifications, as in Linux's `pci_regs.h`.
const EXPRESS: u8 = 0x10;
const EXT_ACS: u16 = 0x0d;
const EXT_ATS: u16 = 0x0f;
const EXT_SRIOV: u16 = 0x10;
const EXT_RESIZABLE: u16 = 0x15;

/// What the kernel gives who is not root.
const HEADER: usize = 64;
/// Where the capabilities of PCI Express begin.
const CONVENTIONAL: usize = 256;

impl Config {
    fn byte(&self, at: usize) -> Option<u8> {
        self.0.get(at).copied()
    }

    fn word(&self, at: usize) -> Option<u16> {
        let bytes = self.0.get(at..at.checked_add(2)?)?;
        Some(u16::from_le_bytes(bytes.try_into().ok()?))
    }

    fn long(&self, at: usize) -> Option<u32> {
        let bytes = self.0.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }

    /// Why there is nothing at a place where something should be.
    fn short(&self) -> Unseen {
        match self.0.len() {
            0..=HEADER => Unseen::Denied,
            _ => Unseen::Failed("config space ends too early".to_owned()),
        }
    }

    /// The device does not answer.
    fn is_silent(&self) -> bool {
        is_silent(&self.0)
    }

    /// The same without what nothing here reads: of each capability that is not known, the header alone is kept. A
    /// network card's serial number capability has its hardware address.
    pub(crate) fn known(&self) -> Vec<u8> {
        let mut known = vec![0; self.0.len()];
        let mut keep = |at: usize, length: usize| {
            let end = at.saturating_add(length).min(self.0.len());
            if let (Some(to), Some(from)) = (known.get_mut(at..end), self.0.get(at..end)) {
                to.copy_from_slice(from);
            }
        };
        keep(0, HEADER);
        let mut at = usize::from(self.byte(0x34).unwrap_or(0) & 0xfc);
        for _ in 0..(CONVENTIONAL - HEADER) / 4 {
            let (HEADER.., Some(header)) = (at, self.word(at)) else {
                break;
            };
            let [id, next] = header.to_le_bytes();
            keep(at, if id == EXPRESS { 0x3c } else { 2 });
            at = usize::from(next & 0xfc);
        }
        let mut at = CONVENTIONAL;
        for _ in 0..(4096 - CONVENTIONAL) / 4 {
            let (CONVENTIONAL.., Some(header)) = (at, self.long(at)) else {
                break;
            };
            let length = match u16::try_from(header & 0xffff).unwrap_or(0) {
                EXT_ACS | EXT_ATS => 8,
                EXT_SRIOV => 0x40,
                EXT_RESIZABLE => 0x34,
                _ => 4,
            };
            keep(at, length);
            at = usize::try_from((header >> 20) & 0xffc).unwrap_or(0);
        }
        known
    }

    /// Where a capability stands.
    pub(crate) fn capability(&self, wanted: u8) -> Seen<usize> {
        if self.is_silent() {
            return Err(Unseen::Failed("the device does not answer".to_owned()));
        }
        let status = self.word(0x06).ok_or_else(|| self.short())?;
        if status & 0x10 == 0 {
            return Err(Unseen::Absent);
        }
        let mut at = usize::from(self.byte(0x34).ok_or_else(|| self.short())? & 0xfc);
        // There is room for no more; a list may bite its tail.
        for _ in 0..(CONVENTIONAL - HEADER) / 4 {
            if at < HEADER {
                return Err(Unseen::Absent);
            }
            let id = self.byte(at).ok_or_else(|| self.short())?;
            let next = self
                .byte(at.saturating_add(1))
                .ok_or_else(|| self.short())?;
            if id == wanted {
                return Ok(at);
            }
            at = usize::from(next & 0xfc);
        }
        Err(Unseen::Failed(
            "the list of capabilities is a circle".to_owned(),
        ))
    }

    /// Where a capability of extended config space stands.
    pub(crate) fn extended(&self, wanted: u16) -> Seen<usize> {
        // Conventional PCI has none, and root alone sees which it is.
        self.capability(EXPRESS)?;
        if self.0.len() <= CONVENTIONAL {
            return Err(Unseen::Failed(
                "extended config space cannot be read on this machine".to_owned(),
            ));
        }
        let mut at = CONVENTIONAL;
        for _ in 0..(4096 - CONVENTIONAL) / 4 {
            let header = self.long(at).ok_or_else(|| self.short())?;
            if header == 0 || header == u32::MAX {
                return Err(Unseen::Absent);
            }
            if header & 0xffff == u32::from(wanted) {
                return Ok(at);
            }
            at = usize::try_from((header >> 20) & 0xffc).unwrap_or(0);
            if at < CONVENTIONAL {
                return Err(Unseen::Absent);
            }
        }
        Err(Unseen::Failed(
            "the list of extended capabilities is a circle".to_owned(),
        ))
    }

    /// The PCI Express capability. [`Unseen::Absent`]: conventional PCI.
    pub(crate) fn express(&self) -> Seen<Express> {
        let at = self.capability(EXPRESS)?;
        let word = |offset: usize| {
            self.word(at.saturating_add(offset))
                .ok_or_else(|| self.short())
        };
        let (flags, can, control) = (word(2)?, word(4)?, word(8)?);
        // 6 and 7 are reserved.
        let bytes = |code: u16| match code {
            0..=5 => 128_u32 << code,
            _ => 0,
        };
        Ok(Express {
            port: match (flags >> 4) & 0xf {
                0 | 1 => PortType::Endpoint,
                4 => PortType::RootPort,
                5 => PortType::Upstream,
                6 => PortType::Downstream,
                other => PortType::Other(u8::try_from(other).unwrap_or(0xf)),
            },
            payload_most: bytes(can & 7),
            payload: bytes((control >> 5) & 7),
            read_request: bytes((control >> 12) & 7),
            relaxed_ordering: control & 0x10 != 0,
        })
    }

    /// Access Control Services. [`Unseen::Absent`]: the port has none.
    pub(crate) fn acs(&self) -> Seen<Acs> {
        let at = self.extended(EXT_ACS)?;
        let word = |offset: usize| {
            self.word(at.saturating_add(offset))
                .ok_or_else(|| self.short())
        };
        Ok(Acs {
            at: u16::try_from(at).unwrap_or(0),
            can: word(4)?,
            set: word(6)?,
        })
    }

    /// Whether Address Translation Services are on. [`Unseen::Absent`]: the function has none.
    pub(crate) fn ats(&self) -> Seen<bool> {
        let at = self.extended(EXT_ATS)?;
        let control = self
            .word(at.saturating_add(6))
            .ok_or_else(|| self.short())?;
        Ok(control & 0x8000 != 0)
    }

    /// The BARs whose size can be chosen. [`Unseen::Absent`]: none.
    pub(crate) fn resizable(&self) -> Seen<Vec<Resizable>> {
        let at = self.extended(EXT_RESIZABLE)?;
        let first = self
            .long(at.saturating_add(8))
            .ok_or_else(|| self.short())?;
        let count = usize::try_from((first >> 5) & 7).unwrap_or(0).min(6);
        let mut bars = Vec::new();
        for number in 0..count {
            let entry = at.saturating_add(8 * number);
            let can = self
                .long(entry.saturating_add(4))
                .ok_or_else(|| self.short())?;
            let control = self
                .long(entry.saturating_add(8))
                .ok_or_else(|| self.short())?;
            // Bit 4 of the first register is 1 MiB; the second's upper half goes on from 256 TiB.
            let powers = (u64::from(can) >> 4) | (u64::from(control >> 16) << 28);
            let size = |power: u32| 1_u64.checked_shl(power.saturating_add(20));
            bars.push(Resizable {
                bar: usize::try_from(control & 7).unwrap_or(7),
                size: size((control >> 8) & 0x3f).unwrap_or(0),
                sizes: (0..43)
                    .filter(|power| powers & (1 << power) != 0)
                    .filter_map(size)
                    .collect(),
            });
        }
        Ok(bars)
    }
}

/// Where sysfs lists all functions.
pub(crate) const DEVICES: &str = "/sys/bus/pci/devices";

/// All of the header is ones, as of a device that does not answer. A virtual function's vendor and device are, too.
pub(crate) fn is_silent(config: &[u8]) -> bool {
    config.len() >= HEADER && config.iter().take(HEADER).all(|byte| *byte == 0xff)
}

/// Flags of the kernel's `struct resource`, as its `ioport.h` has them.
const MEMORY: u64 = 0x200;
const PREFETCHABLE: u64 = 0x2000;
const IS_64_BIT: u64 = 0x10_0000;

/// The addresses in a path under `/sys/devices`, after the last host bridge, which comes first.
pub(crate) fn way(path: &str) -> Option<(String, Vec<Address>)> {
    let mut root = None;
    let mut addresses = Vec::new();
    for name in path.split('/') {
        if name.starts_with("pci") && name.contains(':') {
            root = Some(name.to_owned());
            addresses.clear();
        } else if root.is_some() {
            // `0000:3b:00.0` alone: other names have no such form.
            if let (12.., Ok(address)) = (name.len(), name.parse()) {
                addresses.push(address);
            }
        }
    }
    root.map(|root| (root, addresses))
}

/// `16.0 GT/s PCIe`, in tenths of GT/s; 0 for what is unknown.
fn speed(text: &str) -> u32 {
    let figure = text.split_whitespace().next().unwrap_or_default();
    let (whole, tenths) = figure.split_once('.').unwrap_or((figure, "0"));
    let whole = whole.parse::<u32>().unwrap_or(0);
    let tenths = tenths.get(..1).and_then(|digit| digit.parse().ok());
    whole.saturating_mul(10).saturating_add(tenths.unwrap_or(0))
}

/// 0 for what is unknown, which the kernel writes as 255, or 63 or 0 where there is no link.
fn width(text: &str) -> u32 {
    let lanes = text.parse().ok();
    lanes.filter(|lanes| (1..=32).contains(lanes)).unwrap_or(0)
}

/// The first six lines of `resource`: first and last address, flags.
fn bars(text: &str) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (index, line) in text.lines().take(6).enumerate() {
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
                start,
                size,
                is_64_bit: flags & IS_64_BIT != 0,
                is_prefetchable: flags & PREFETCHABLE != 0,
            });
        }
    }
    bars
}

impl Function {
    /// Looks at one. Fails where it is not there, or says not even what it is.
    pub(crate) fn look(host: &dyn Host, at: Address) -> Seen<Self> {
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
        // The last is the function itself.
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
            driver: host
                .link(&own("driver"))
                .ok()
                .and_then(|says| last(&says).map(str::to_owned)),
            link: link(),
            bars: bars(&host.text(&own("resource")).unwrap_or_default()),
            config: host.bytes(&own("config")).map(Config),
            iommu_group: group.and_then(|says| {
                last(&says)
                    .and_then(|name| name.parse().ok())
                    .ok_or_else(|| Unseen::Failed(format!("a group by the name {says:?}")))
            }),
            physical: physical.and_then(|path| way(&path)?.1.pop()),
        })
    }

    /// How many bridges are above both this one and another, the highest first.
    pub(crate) fn shared(&self, other: &Self) -> usize {
        let both = self.above.iter().zip(&other.above);
        match self.root == other.root {
            true => both.take_while(|(one, other)| one == other).count(),
            false => 0,
        }
    }

    /// Its config space, or why there is none.
    pub(crate) fn config(&self) -> Seen<&Config> {
        self.config.as_ref().map_err(Clone::clone)
    }

    /// The PCI Express capability. [`Unseen::Absent`]: conventional PCI.
    pub(crate) fn express(&self) -> Seen<Express> {
        self.config()?.express()
    }
}

/// The last name in a path.
fn last(path: &str) -> Option<&str> {
    path.rsplit('/').find(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        let read = |text: &str| text.parse::<Address>().map(|address| address.to_string());
        assert_eq!(read("0000:3b:00.0"), Ok("0000:3b:00.0".to_owned()));
        assert_eq!(read("3b:00.0"), Ok("0000:3b:00.0".to_owned()));
        assert_eq!(read("00000009:01:1f.7"), Ok("0009:01:1f.7".to_owned()));
        assert_eq!(read("10000:e1:00.0"), Ok("10000:e1:00.0".to_owned()));
        for wrong in [
            "",
            "3b",
            "3b:00",
            "3b:20.0",
            "3b:00.8",
            "x:3b:00.0",
            "+1:00.0",
            ":.",
            "0:0:0:0.0",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_path_in_sysfs_names_the_bridges() {
        let names = |path: &str| {
            way(path).map(|(root, all)| {
                (
                    root,
                    all.iter()
                        .map(Address::to_string)
                        .collect::<Vec<_>>()
                        .join(" "),
                )
            })
        };
        assert_eq!(
            names("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/infiniband/mlx5_0"),
            Some((
                "pci0000:15".to_owned(),
                "0000:15:01.0 0000:16:00.0".to_owned()
            ))
        );
        // Intel's VMD is a host bridge below a function.
        assert_eq!(
            names("/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0"),
            Some(("pci10000:e0".to_owned(), "10000:e0:06.0".to_owned()))
        );
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
        assert_eq!(
            Rate {
                speed: 320,
                width: 16
            }
            .to_string(),
            "32.0 GT/s x16"
        );
        assert_eq!(
            Rate {
                speed: 320,
                width: 16
            }
            .megabits(),
            504_112
        );
        let found = bars(
            "0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200\n\
             0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n",
        );
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[1].size, 128 << 30);
        assert!(found[1].is_64_bit && found[1].is_prefetchable);
        assert!(bars("0xffffffffffffffff 0x0 0x200").is_empty());
        assert!(bars("0x0 0xffffffffffffffff 0x200").is_empty());
    }

    #[test]
    fn config_space_that_is_short_or_odd_is_no_panic() {
        assert_eq!(Config(vec![0; 64]).express(), Err(Unseen::Absent));
        let mut listed = vec![0; 64];
        listed[6] = 0x10;
        listed[0x34] = 0x40;
        assert_eq!(Config(listed.clone()).express(), Err(Unseen::Denied));
        // A list that goes round.
        listed.resize(256, 0);
        listed[0x41] = 0x40;
        assert!(matches!(Config(listed).express(), Err(Unseen::Failed(_))));
        assert!(matches!(
            Config(vec![0xff; 4096]).express(),
            Err(Unseen::Failed(_))
        ));
    }

    proptest::proptest! {
        #[test]
        fn any_config_space_is_decoded_or_refused(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..4200),
        ) {
            let config = Config(bytes);
            let _ = config.express();
            let _ = config.acs();
            let _ = config.ats();
            let _ = config.resizable();
            assert_eq!(config.known().len(), config.0.len());
        }
    }
}
