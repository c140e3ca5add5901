// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI addresses, in the format of sysfs.

use std::fmt;
use std::str::FromStr;

/// PCI address: domain, bus, device and function.
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

/// A string that is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address such as 0000:3b:00.0")]
pub(crate) struct NoAddress(String);

impl FromStr for Address {
    type Err = NoAddress;

    /// Parses the format of sysfs. The default domain is 0000, as in lspci. Domains of eight
    /// digits, as in NVML, are valid too.
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

impl serde::Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
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
}
