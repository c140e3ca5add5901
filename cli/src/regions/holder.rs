// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Memory regions of each process. `usage.rs` classifies the regions one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use serde::Serialize;

use crate::host::nldev::{Device, Maker};
use crate::process::Processes;

/// Names of RDMA devices. `None` stands for all devices.
pub(super) type Devices = Option<BTreeSet<String>>;

/// Number and total size of some memory regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Part {
    pub(crate) regions: u64,
    /// Total size, or `None` if unknown.
    pub(crate) bytes: Option<u64>,
}

impl Default for Part {
    fn default() -> Self {
        Self {
            regions: 0,
            bytes: Some(0),
        }
    }
}

impl Part {
    pub(super) fn add(&mut self, regions: u64, bytes: u64) {
        self.regions = self.regions.saturating_add(regions);
        self.bytes = self.bytes.map(|sum| sum.saturating_add(bytes));
    }
}

/// Owner of regions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Process(u32),
    Kernel(String),
    Unknown,
}

/// Regions of one owner.
#[derive(Debug, Default)]
pub(super) struct Holder {
    /// Unclassified regions: for each device, the number of regions of each length.
    pub(super) left: BTreeMap<String, BTreeMap<u64, u64>>,
    /// Devices of the owner's regions.
    pub(super) devices: BTreeSet<String>,
    /// Devices of the owner's regions and protection domains. A protection domain exists before its
    /// regions.
    pub(super) uses: BTreeSet<String>,
    pub(super) all: Part,
    pub(super) peer_memory: Part,
    pub(super) dma_buf: Part,
    pub(super) other: Part,
    pub(super) unknown: Part,
    pub(super) without_region: u64,
}

impl Holder {
    /// Removes an unclassified region: the longest one on `devices` whose length is in `lengths`.
    /// Returns its device and length, or `None` if there is no such region.
    fn take_on(
        &mut self,
        devices: &Devices,
        lengths: RangeInclusive<u64>,
    ) -> Option<(String, u64)> {
        let on = |device: &String| {
            devices
                .as_ref()
                .is_none_or(|devices| devices.contains(device))
        };
        let here = self.left.iter_mut().filter(|(device, _)| on(device));
        let longest = here.filter_map(|(device, regions)| {
            let length = *regions.range(lengths.clone()).next_back()?.0;
            Some((length, device.clone(), regions))
        });
        let (length, device, regions) = longest.max_by_key(|(length, ..)| *length)?;
        let count = regions.get_mut(&length)?;
        *count = count.saturating_sub(1);
        if *count == 0 {
            regions.remove(&length);
        }
        Some((device, length))
    }

    pub(super) fn take(&mut self, devices: &Devices, lengths: RangeInclusive<u64>) -> Option<u64> {
        self.take_on(devices, lengths).map(|(_, length)| length)
    }

    /// Removes a region like [`Self::take`], and also subtracts the region from this owner's total.
    /// The caller can then add the region to another owner.
    pub(super) fn give(
        &mut self,
        devices: &Devices,
        lengths: RangeInclusive<u64>,
    ) -> Option<(String, u64)> {
        let (device, length) = self.take_on(devices, lengths)?;
        self.all.regions = self.all.regions.saturating_sub(1);
        self.all.bytes = self.all.bytes.map(|bytes| bytes.saturating_sub(length));
        Some((device, length))
    }

    /// Adds unclassified regions.
    pub(super) fn add(&mut self, device: &str, bytes: u64, count: u64) {
        self.devices.insert(device.to_owned());
        self.uses.insert(device.to_owned());
        self.all.add(count, bytes.saturating_mul(count));
        let lengths = self.left.entry(device.to_owned()).or_default();
        let regions = lengths.entry(bytes).or_default();
        *regions = regions.saturating_add(count);
    }

    pub(super) fn left(&self) -> Part {
        let mut left = Part::default();
        for regions in self.left.values() {
            for (bytes, count) in regions {
                left.add(*count, bytes.saturating_mul(*count));
            }
        }
        left
    }

    /// Counts one registration of GPU memory. `how` selects the total for the kind of registration.
    /// `region` is the size of the memory region in bytes, or `None` if no memory region is
    /// visible.
    pub(super) fn is_gpu(&mut self, how: fn(&mut Self) -> &mut Part, region: Option<u64>) {
        match region {
            Some(bytes) => how(self).add(1, bytes),
            None => self.without_region = self.without_region.saturating_add(1),
        }
    }
}

/// Returns the regions of all devices by owner.
pub(super) fn holders(devices: &[Device], processes: &Processes<'_>) -> BTreeMap<Owner, Holder> {
    let mut of_threads = BTreeMap::new();
    let mut process = |thread: u32| {
        *of_threads
            .entry(thread)
            .or_insert_with(|| processes.of_thread(thread))
    };
    let mut holders: BTreeMap<Owner, Holder> = BTreeMap::new();
    for device in devices {
        // If the creating thread has ended, the owner is found by the protection domain: the
        // process with objects in the same domain, if there is exactly one.
        let mut domains: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        let makers = device.regions.iter().map(|regions| &regions.maker);
        for maker in makers.chain(&device.domains) {
            if let (Some(domain), Some(thread)) = (maker.domain, maker.thread) {
                domains.entry(domain).or_default().insert(process(thread));
            }
        }
        let mut owner = |maker: &Maker| {
            let mut of_domain = maker
                .domain
                .iter()
                .filter_map(|domain| domains.get(domain))
                .flatten();
            match (&maker.kernel, maker.thread) {
                (Some(kernel), _) => Owner::Kernel(kernel.clone()),
                (None, Some(thread)) => Owner::Process(process(thread)),
                (None, None) => match (of_domain.next(), of_domain.next()) {
                    (Some(process), None) => Owner::Process(*process),
                    _ => Owner::Unknown,
                },
            }
        };
        for domain in &device.domains {
            let holder = holders.entry(owner(domain)).or_default();
            holder.uses.insert(device.name.clone());
        }
        for regions in &device.regions {
            let holder = holders.entry(owner(&regions.maker)).or_default();
            holder.add(&device.name, regions.bytes, regions.count);
        }
    }
    holders
}
