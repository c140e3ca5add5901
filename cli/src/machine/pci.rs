// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI functions as sysfs shows them: `Documentation/ABI/testing/sysfs-bus-pci`.

use std::fmt;
use std::str::FromStr;

use crate::host::Seen;

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
