// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! PCI devices by where they are, and GPUs by their numbers.
//!
//! Uses `core` alone: see `ranges`.

use core::{
    fmt,
    iter, //
};

/// Where a PCI function is: the domain's number, eight bits of the bus, five of the device, three of
/// the function.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct PciAddress(pub(crate) u64);

impl fmt::Display for PciAddress {
    /// As in sysfs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (domain, bus) = (self.0 >> 16, self.0 >> 8 & 0xff);
        let (device, function) = (self.0 >> 3 & 0x1f, self.0 & 7);
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

/// nvidia.ko's answer whether a device reaches a GPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reach {
    /// nvidia.ko maps to the addresses to which this module would map.
    AsOurs,
    /// nvidia.ko maps to other addresses.
    Otherwise,
    /// nvidia.ko denies the device.
    Denied,
}

/// Some of the GPUs that the module has met, by their numbers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Gpus(u64);

impl Gpus {
    /// Numbers are smaller.
    pub(crate) const MOST: u32 = u64::BITS;

    /// The one with that number; none for a number that is too large.
    pub(crate) fn one(number: u32) -> Self {
        Gpus(1_u64.checked_shl(number).unwrap_or(0))
    }

    /// Those of either.
    pub(crate) fn or(self, other: Gpus) -> Self {
        Gpus(self.0 | other.0)
    }

    /// Those of all.
    pub(crate) fn all(many: impl Iterator<Item = Gpus>) -> Self {
        many.fold(Gpus::default(), Gpus::or)
    }

    /// Their numbers, the lowest first.
    pub(crate) fn numbers(self) -> impl Iterator<Item = u32> {
        let mut left = self.0;
        iter::from_fn(move || {
            let number = left.trailing_zeros();
            // `None` if no bit is left.
            left ^= 1_u64.checked_shl(number)?;
            Some(number)
        })
    }
}
