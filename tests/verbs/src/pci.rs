// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI functions in sysfs: the bridges between two functions, and the redirection of ACS.

use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{ensure, Context, Result};

use crate::sys;

/// Path to a function: the host bridge's directory, and the functions from there down to the
/// function itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// Name of the host bridge's directory, such as `pci0000:00`.
    pub(crate) root: String,
    /// PCI addresses, such as `0000:00:01.0`.
    functions: Vec<String>,
}

impl Place {
    pub(crate) fn of_function(address: &str) -> Result<Self> {
        Self::of(&format!("/sys/bus/pci/devices/{address}"))
    }

    /// Returns the path to the NIC that an rxe device uses.
    pub(crate) fn of_rxe(device: &str) -> Result<Self> {
        let netdev = sys::read_line(&format!("/sys/class/infiniband/{device}/parent"))?;
        Self::of(&format!("/sys/class/net/{netdev}/device"))
    }

    fn of(path: &str) -> Result<Self> {
        let real = fs::canonicalize(path).with_context(|| path.to_owned())?;
        Self::parse(&real).with_context(|| format!("{} is not on PCI", real.display()))
    }

    /// Parses the path of a device in sysfs. Ignores devices below the function, such as virtio's.
    fn parse(path: &Path) -> Option<Self> {
        let names: Vec<&str> = path.iter().filter_map(|name| name.to_str()).collect();
        let at = names.iter().position(|name| is_root(name))?;
        let (root, below) = names.get(at..)?.split_first()?;
        let functions: Vec<String> = below
            .iter()
            .take_while(|name| is_function(name))
            .map(|name| (*name).to_owned())
            .collect();
        (!functions.is_empty()).then(|| Self {
            root: (*root).to_owned(),
            functions,
        })
    }

    pub(crate) fn address(&self) -> &str {
        self.functions.last().map_or("", String::as_str)
    }

    /// Returns the bridges above the function, from the host bridge down.
    pub(crate) fn above(&self) -> &[String] {
        self.functions.split_last().map_or(&[], |(_, above)| above)
    }

    /// Returns the bridges between this function and `there`, in the order of the path.
    pub(crate) fn bridges_to(&self, there: &Self) -> Vec<String> {
        let (near, far) = (self.above(), there.above());
        let shared = if self.root == there.root {
            near.iter()
                .zip(far)
                .take_while(|(one, other)| one == other)
                .count()
        } else {
            0
        };
        let up = near.iter().skip(shared).rev();
        up.chain(far.iter().skip(shared)).cloned().collect()
    }
}

fn is_root(name: &str) -> bool {
    name.strip_prefix("pci")
        .is_some_and(|rest| rest.contains(':'))
}

fn is_function(name: &str) -> bool {
    matches!(
        name.as_bytes(),
        [_, _, _, _, b':', _, _, b':', _, _, b'.', _]
    )
}

/// Bits that send peer-to-peer requests and completions up to the host bridge.
const REDIRECT: u16 = 0b1100;

/// The control word of a bridge's Access Control Services, restored when dropped.
#[derive(Debug)]
pub(crate) struct Acs {
    config: File,
    offset: u64,
    before: u16,
}

/// ID of the Access Control Services Extended Capability.
const ACS: u32 = 0x000d;
/// Size of config space with the extended part, in bytes.
const LONGEST: usize = 4096;
/// Maximum number of extended capabilities. This limit also ends the walk over a circular list.
const MOST: usize = (LONGEST - 0x100) / 4;

impl Acs {
    /// Returns the ACS of a bridge. Returns `None` if the bridge has no ACS, or the kernel shows no
    /// extended config space.
    pub(crate) fn of(address: &str) -> Result<Option<Self>> {
        let config = sys::open_rw(&format!("/sys/bus/pci/devices/{address}/config"))?;
        let mut bytes = vec![0; LONGEST];
        let got = config.read_at(&mut bytes, 0)?;
        bytes.truncate(got);
        let Some(capability) = extended_capability(&bytes, ACS) else {
            return Ok(None);
        };
        let offset = capability as u64 + 6;
        let mut acs = Self {
            config,
            offset,
            before: 0,
        };
        acs.before = acs.control()?;
        Ok(Some(acs))
    }

    pub(crate) fn control(&self) -> Result<u16> {
        let mut word = [0; 2];
        self.config.read_exact_at(&mut word, self.offset)?;
        Ok(u16::from_le_bytes(word))
    }

    pub(crate) fn redirect(&self) -> Result<()> {
        let wanted = self.before | REDIRECT;
        self.config
            .write_all_at(&wanted.to_le_bytes(), self.offset)?;
        let found = self.control()?;
        ensure!(found == wanted, "wrote {wanted:#x}, read {found:#x}");
        Ok(())
    }
}

impl Drop for Acs {
    fn drop(&mut self) {
        if let Err(error) = self
            .config
            .write_all_at(&self.before.to_le_bytes(), self.offset)
        {
            eprintln!("ACS: {error}");
        }
    }
}

fn extended_capability(config: &[u8], wanted: u32) -> Option<usize> {
    let mut at = 0x100_usize;
    for _ in 0..MOST {
        let bytes = config.get(at..at.checked_add(4)?)?;
        let header = u32::from_le_bytes(bytes.try_into().ok()?);
        if header & 0xffff == wanted {
            return Some(at);
        }
        at = usize::try_from(header >> 20).ok()?;
        if at < 0x100 {
            break;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str) -> Place {
        Place::parse(Path::new(path)).expect("a place")
    }

    #[test]
    fn the_bridges_between() {
        let gpu =
            place("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:07:00.0");
        let nic = place(
            "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/virtio3",
        );
        assert_eq!(gpu.address(), "0000:07:00.0");
        assert_eq!(nic.address(), "0000:03:00.0");
        assert_eq!(gpu.bridges_to(&nic), ["0000:02:02.0", "0000:02:00.0"]);
        let other = place("/sys/devices/pci0000:40/0000:40:00.0/0000:41:00.0");
        assert_eq!(
            other.bridges_to(&nic),
            [
                "0000:40:00.0",
                "0000:00:01.0",
                "0000:01:00.0",
                "0000:02:00.0"
            ]
        );
        assert!(gpu.bridges_to(&gpu).is_empty());
        assert!(Place::parse(Path::new("/sys/devices/virtual/net/lo")).is_none());
    }

    #[test]
    fn capabilities_in_any_order() {
        let mut config = vec![0; 4096];
        let mut put = |at: usize, header: u32| {
            config
                .get_mut(at..at + 4)
                .expect("room")
                .copy_from_slice(&header.to_le_bytes());
        };
        put(0x100, 0x1480_0001);
        put(0x148, 0x1001_000d);
        assert_eq!(extended_capability(&config, 0x000d), Some(0x148));
        // The list leads back to the first capability.
        assert_eq!(extended_capability(&config, 0x0019), None);
        assert_eq!(extended_capability(&config[..256], 0x000d), None);
        assert_eq!(extended_capability(&config[..0x14a], 0x000d), None);
    }
}
