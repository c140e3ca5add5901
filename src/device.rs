// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Addresses of PCI devices, and sets of GPUs.
//!
//! Uses only `core`, so cargo also compiles this file on the host.

use core::{
    fmt,
    iter, //
};

/// PCI address of a function: the domain, then eight bits of the bus, five of the device and three
/// of the function.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct PciAddress(pub(crate) u64);

impl fmt::Display for PciAddress {
    /// Prints the address as in sysfs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (domain, bus) = (self.0 >> 16, self.0 >> 8 & 0xff);
        let (device, function) = (self.0 >> 3 & 0x1f, self.0 & 7);
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

/// nvidia.ko's answer to the question whether a device reaches a GPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reach {
    /// nvidia.ko maps the GPU's memory at the same DMA addresses as this module.
    AsOurs,
    /// nvidia.ko maps the GPU's memory at other DMA addresses than this module.
    Otherwise,
    /// nvidia.ko refuses to map the GPU's memory for the device.
    Denied,
}

/// A set of GPUs, stored as a bit mask of the module's GPU numbers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Gpus(u64);

impl Gpus {
    /// Exclusive upper bound on the numbers of GPUs.
    pub(crate) const MOST: u32 = u64::BITS;

    /// Returns the set of one GPU, or an empty set if `number` is too large.
    pub(crate) fn one(number: u32) -> Self {
        Gpus(1_u64.checked_shl(number).unwrap_or(0))
    }

    /// Returns the union of both sets.
    pub(crate) fn or(self, other: Gpus) -> Self {
        Gpus(self.0 | other.0)
    }

    /// Returns the union of all sets.
    pub(crate) fn all(many: impl Iterator<Item = Gpus>) -> Self {
        many.fold(Gpus::default(), Gpus::or)
    }

    /// Returns the numbers of the GPUs in ascending order.
    pub(crate) fn numbers(self) -> impl Iterator<Item = u32> {
        let mut left = self.0;
        iter::from_fn(move || {
            let number = left.trailing_zeros();
            // `checked_shl` returns `None` if no bit is left.
            left ^= 1_u64.checked_shl(number)?;
            Some(number)
        })
    }
}
