// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Kernel state that the cases check: the stand-in GPU's counters, rxe's list of peer-memory
//! regions, and references to modules.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

use crate::{ktap, module, module_files, sys};

const COUNTERS: &str = "/sys/kernel/debug/nvidia/counters";

/// Counters that must be zero while no process has GPU memory or a registration.
const LIVE: [&str; 8] = [
    "pins_live",
    "pins_persistent_live",
    "mappings_live",
    "device_refs",
    "bar_bytes_pinned",
    "allocs_live",
    "dmabufs_live",
    "dmabuf_maps_live",
];
/// Counters that must never increase.
const NEVER: [&str; 2] = ["misuse", "callbacks_after_put"];

/// One reading of the stand-in GPU's counters.
#[derive(Debug, Clone)]
pub(crate) struct Counters(BTreeMap<String, u64>);

impl Counters {
    pub(crate) fn read() -> Result<Self> {
        Self::parse(&fs::read_to_string(COUNTERS).context(COUNTERS)?)
    }

    /// Sets the counters of events to zero.
    pub(crate) fn reset() -> Result<()> {
        fs::write(COUNTERS, "0").context(COUNTERS)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut map = BTreeMap::new();
        for line in text.lines() {
            let (name, value) = line
                .split_once(' ')
                .with_context(|| format!("counters: {line:?}"))?;
            map.insert(
                name.to_owned(),
                value
                    .trim()
                    .parse()
                    .with_context(|| format!("counters: {line:?}"))?,
            );
        }
        Ok(Self(map))
    }

    pub(crate) fn get(&self, name: &str) -> Result<u64> {
        self.0
            .get(name)
            .copied()
            .with_context(|| format!("the stand-in GPU has no counter {name}"))
    }

    pub(crate) fn since(&self, before: &Self, name: &str) -> Result<u64> {
        self.get(name)?
            .checked_sub(before.get(name)?)
            .with_context(|| format!("counter {name} has decreased"))
    }

    /// Returns the number of live pins of both modes, plus the number of mapped dma-bufs. A mapped
    /// dma-buf holds memory like a persistent pin.
    pub(crate) fn live_pins(&self) -> Result<u64> {
        Ok(self.get("pins_live")?
            + self.get("pins_persistent_live")?
            + self.get("dmabuf_maps_live")?)
    }

    /// Returns each counter whose value is wrong once every pin, mapping and allocation is gone.
    pub(crate) fn leftovers(&self, before: &Self) -> Result<Vec<String>> {
        self.leftovers_beside(before, 0)
    }

    /// Returns the same as [`Self::leftovers`], but expects `allocations` live allocations.
    pub(crate) fn leftovers_beside(&self, before: &Self, allocations: u64) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for name in LIVE {
            let value = self.get(name)?;
            let expected = if name == "allocs_live" {
                allocations
            } else {
                0
            };
            if value != expected {
                found.push(format!("{name}={value}"));
            }
        }
        for name in NEVER {
            // A counter below its value in `before` was reset by a case. Its value then counts the
            // events since the reset.
            let value = self.since(before, name).or_else(|_| self.get(name))?;
            if value != 0 {
                found.push(format!("{name}+={value}"));
            }
        }
        Ok(found)
    }

    pub(crate) fn activity(&self, before: &Self) -> Result<Activity> {
        let since = |name| self.since(before, name);
        Ok(Activity {
            pins: since("get_pages_ok")? + since("get_pages_persistent_ok")?,
            unpins: since("put_pages_found")? + since("put_pages_persistent")?,
            attempts: since("get_pages")? + since("get_pages_persistent")?,
            maps: since("dma_map_ok")?,
            unmaps: since("dma_unmap")?,
            callbacks: since("callbacks")?,
        })
    }
}

/// Describes every object that is left, apart from `allocations` allocations: counters of live
/// objects, regions of the devices, and references to the module.
pub(crate) fn all_left(
    before: &Counters,
    allocations: u64,
    devices: &[String],
) -> Result<Vec<String>> {
    let mut left = Counters::read()?.leftovers_beside(before, allocations)?;
    for device in devices {
        for region in peer_regions(device)? {
            left.push(format!("{device} has {region:?}"));
        }
    }
    let references = module_references(module::NAME)?;
    if references != 0 {
        left.push(format!("{references} references to the module"));
    }
    Ok(left)
}

pub(crate) fn pins_are(expected: u64) -> Result<()> {
    ktap::same("live pins", Counters::read()?.live_pins()?, expected)
}

/// Checks the number of callbacks since `before`.
pub(crate) fn callbacks_are(before: &Counters, expected: u64) -> Result<()> {
    let callbacks = Counters::read()?.since(before, "callbacks")?;
    ktap::expect("callbacks", callbacks, expected)
}

/// Numbers of successful calls to nvidia.ko, summed over both modes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Activity {
    pub(crate) pins: u64,
    pub(crate) unpins: u64,
    /// Calls to pin, including refused calls.
    pub(crate) attempts: u64,
    pub(crate) maps: u64,
    pub(crate) unmaps: u64,
    pub(crate) callbacks: u64,
}

/// A peer-memory region in rxe's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerRegion {
    pub(crate) lkey: u64,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// Scatter-list entries that the peer-memory client returned.
    pub(crate) entries: u64,
    pub(crate) state: String,
}

pub(crate) fn peer_regions(device: &str) -> Result<Vec<PeerRegion>> {
    let path = format!("/sys/kernel/debug/rxe_peer/{device}/mrs");
    fs::read_to_string(&path)
        .context(path)?
        .lines()
        .map(parse_peer_region)
        .collect()
}

fn parse_peer_region(line: &str) -> Result<PeerRegion> {
    let line = module_files::parse(line)?;
    let field = |name| number(module_files::get(&line, name)?);
    Ok(PeerRegion {
        lkey: field("lkey")?,
        addr: field("addr")?,
        len: field("len")?,
        entries: field("nents")?,
        state: module_files::get(&line, "state")?.to_owned(),
    })
}

fn number(text: &str) -> Result<u64> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.with_context(|| format!("not a number: {text:?}"))
}

/// Returns a parameter of a loaded module, or `None` if the module or the parameter does not exist.
pub(crate) fn module_parameter(module: &str, name: &str) -> Option<String> {
    sys::read_line(&format!("/sys/module/{module}/parameters/{name}")).ok()
}

/// Returns the number of duplicate requests that an rxe device has received, or `None` if the
/// device is gone.
pub(crate) fn duplicate_requests(device: &str) -> Option<u64> {
    let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/duplicate_request");
    sys::read_line(&path).ok()?.parse().ok()
}

pub(crate) fn module_references(module: &str) -> Result<u64> {
    Ok(sys::read_line(&format!("/sys/module/{module}/refcnt"))?.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_parse_and_compare() {
        let text = |pins: u64, misuse: u64| {
            let mut text: String = LIVE.iter().map(|name| format!("{name} 0\n")).collect();
            text += &format!("get_pages {pins}\nget_pages_ok {pins}\nget_pages_persistent 0\n");
            text += "get_pages_persistent_ok 0\nput_pages_found 1\nput_pages_persistent 0\ndma_map_ok 1\n";
            text += &format!("dma_unmap 1\ncallbacks 0\ncallbacks_after_put 0\nmisuse {misuse}\n");
            text
        };
        let before = Counters::parse(&text(1, 0)).expect("before");
        let after = Counters::parse(&text(3, 1)).expect("after");
        assert_eq!(after.activity(&before).expect("all there").pins, 2);
        assert_eq!(after.leftovers(&before).expect("all there"), ["misuse+=1"]);
        let earlier = Counters::parse(&text(1, 5)).expect("earlier");
        assert_eq!(after.leftovers(&earlier).expect("all there"), ["misuse+=1"]);
        assert!(before.leftovers(&earlier).expect("all there").is_empty());
        assert!(before.activity(&after).is_err());
        assert!(Counters::parse("nonsense").is_err());
    }

    #[test]
    fn peer_region_line() {
        let region =
            parse_peer_region("lkey=0x1f2 addr=0x7f0000000000 len=4096 nents=1 runs=1 state=valid")
                .expect("a region");
        assert_eq!(region.lkey, 0x1f2);
        assert_eq!(
            (region.len, region.entries, region.state.as_str()),
            (4096, 1, "valid")
        );
        assert!(parse_peer_region("lkey=1").is_err());
    }
}
