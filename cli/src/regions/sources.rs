// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Sources of facts about GPU memory other than the kernel's list of regions, and the limits of
//! that list.

use std::collections::BTreeSet;

use super::holder::Devices;
use crate::debugfs::{Missing, Module, Registration};
use crate::host::nldev::Tracked;
use crate::host::Host;
use crate::registrations;
use crate::render::counted;

/// Registrations of a peer-memory module.
pub(super) enum PeerMemory {
    None,
    Listed(Vec<Registration>),
    /// Number of registrations, if known, and the reason why their owners are unknown.
    Counted(Option<u64>, String),
}

impl PeerMemory {
    pub(super) fn scan(host: &dyn Host, is_elsewhere: bool) -> Self {
        let read = Module::scan(host).and_then(|module| module.registrations(host));
        match read {
            Err(Missing::NotLoaded) => Self::None,
            // Our module and NVIDIA's hold one reference per registration, from `nv_mem_acquire` to
            // `nv_mem_release`.
            Err(why) => match host.number("/sys/module/nvidia_peermem/refcnt").ok() {
                Some(0) => Self::None,
                count => Self::Counted(count, why.to_string()),
            },
            Ok(read) if read.unreadable > 0 => {
                let lines = counted(read.unreadable, "line");
                Self::Counted(None, format!("{lines} of its list could not be read"))
            }
            Ok(read) if is_elsewhere && !read.records.is_empty() => Self::Counted(
                Some(registrations::count(read.records.len())),
                "it uses the process IDs of the first PID namespace, but this program runs in another one"
                    .to_owned(),
            ),
            Ok(read) => Self::Listed(read.records),
        }
    }
}

/// Regions that may exist but are not visible.
#[derive(Debug, Default)]
pub(super) struct Hidden {
    /// RDMA devices whose regions the kernel does not list.
    refused: BTreeSet<String>,
    /// `true` if any device may have hidden regions.
    is_everywhere: bool,
    /// Explanations for the user. Empty if nothing is hidden.
    pub(super) notes: Vec<String>,
}

impl Hidden {
    pub(super) fn scan(host: &dyn Host, tracked: &Tracked) -> Self {
        let mut hidden = Self::default();
        let kernel = host.text("/proc/sys/kernel/osrelease").unwrap_or_default();
        if is_before_5_5(&kernel) {
            hidden.is_everywhere = true;
            hidden.notes.push(format!(
                "this kernel ({kernel}) leaves out the regions of threads that have ended, and those of other PID \
                 namespaces; Linux 5.5 and newer does not"
            ));
        }
        if tracked.is_exclusive {
            let note = "each network namespace has its own RDMA devices here (exclusive mode): those of other \
                        namespaces are not visible; for a process in another one: nsenter -t PID -n peermemctl list \
                        --all";
            hidden.notes.push(note.to_owned());
        }
        for device in &tracked.devices {
            if let Some(why) = &device.refused {
                hidden.refused.insert(device.name.clone());
                let name = &device.name;
                hidden.notes.push(format!(
                    "the memory regions of {name} are not visible: {why}"
                ));
            }
        }
        hidden
    }

    /// Returns `true` if a process that is not visible may use these devices.
    pub(super) fn may_use(&self, devices: &Devices) -> bool {
        match devices {
            Some(devices) => self.is_everywhere || !devices.is_disjoint(&self.refused),
            None => !self.notes.is_empty(),
        }
    }
}

/// Returns `true` for a kernel release, in the format of `uname -r`, before 5.5. Such kernels
/// filter their list by PID namespace, until the patch "RDMA/restrack: Remove PID namespace
/// support".
fn is_before_5_5(release: &str) -> bool {
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|word| word.parse::<u32>().ok());
    matches!((numbers.next(), numbers.next()), (Some(major), Some(minor)) if (major, minor) < (5, 5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        for (release, is_before) in [
            ("4.18.0-553.el8_10.x86_64", true),
            ("5.4.0-200-generic", true),
            ("5.5-rc1", false),
            ("5.15.0", false),
            ("6.8.0-45-generic", false),
            ("10.0", false),
            ("5", false),
            ("x.y", false),
            ("", false),
        ] {
            assert_eq!(is_before_5_5(release), is_before, "{release}");
        }
    }
}
