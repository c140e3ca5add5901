// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI functions in sysfs: the bridges between two functions, and the redirection of ACS.

use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Context, Result};

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

    /// Returns the place of the NIC under an rxe device.
    pub(crate) fn of_rxe(device: &str) -> Result<Self> {
        let netdev = crate::sys::read_line(&format!("/sys/class/infiniband/{device}/parent"))?;
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

    /// Returns the bridges on the way to `there`, in order.
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
pub(crate) const REDIRECT: u16 = 0b1100;

/// The control word of a bridge's Access Control Services, restored when dropped.
#[derive(Debug)]
pub(crate) struct Acs {
    config: File,
    offset: u64,
    before: u16,
}

/// ID of the Access Control Services Extended Capability.
const ACS: u32 = 0x000d;
/// Length of the header, the capabilities and the control word, in bytes.
const ACS_LENGTH: usize = 8;

impl Acs {
    /// Returns the ACS of a bridge. Returns `None` if the bridge has no ACS, or the kernel shows no
    /// extended config space.
    pub(crate) fn of(address: &str) -> Result<Option<Self>> {
        let path = config_path(address);
        let config = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| path.clone())?;
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

/// Size of config space with the extended part, in bytes.
const LONGEST: usize = 4096;
/// Maximum number of extended capabilities. This limit also ends the walk over a circular list.
const MOST: usize = (LONGEST - 0x100) / 4;

fn config_path(address: &str) -> String {
    format!("/sys/bus/pci/devices/{address}/config")
}

/// Overlay of another config space on the sysfs file of a bridge, until dropped. The bridge itself
/// does not change.
#[derive(Debug)]
pub(crate) struct Overlay {
    path: String,
    contents: PathBuf,
}

impl Overlay {
    /// Adds the ACS of bridge `model`, with this control word, after the last capability of a
    /// bridge without ACS.
    pub(crate) fn with_acs(bridge: &str, model: &str, control: u16) -> Result<Self> {
        let path = config_path(bridge);
        let mut config = fs::read(&path).with_context(|| path.clone())?;
        let model = fs::read(config_path(model))?;
        let at = extended_capability(&model, ACS).context("the model has no ACS")?;
        let acs = model.get(at..at + ACS_LENGTH).context("ACS is cut short")?;
        add_capability(&mut config, acs, control)?;
        let contents = std::env::temp_dir().join(format!("config-{bridge}"));
        fs::write(&contents, &config)?;
        let overlay = Self { path, contents };
        overlay.mount(&["--bind"], Some(&overlay.contents))?;
        Ok(overlay)
    }

    fn mount(&self, words: &[&str], from: Option<&Path>) -> Result<()> {
        let program = if from.is_some() { "mount" } else { "umount" };
        let status = Command::new(program)
            .args(words)
            .args(from)
            .arg(&self.path)
            .status()
            .context(program)?;
        ensure!(status.success(), "{program} {}: {status}", self.path);
        Ok(())
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        if let Err(error) = self.mount(&[], None) {
            eprintln!("{error:#}");
        }
        let _ = fs::remove_file(&self.contents);
    }
}

/// Appends ACS to the list of extended capabilities.
fn add_capability(config: &mut [u8], acs: &[u8], control: u16) -> Result<()> {
    ensure!(config.len() == LONGEST, "no extended config space");
    ensure!(extended_capability(config, ACS).is_none(), "ACS already");
    // The end of config space, which has no registers.
    let place = LONGEST - ACS_LENGTH;
    let mut last = 0x100_usize;
    for _ in 0..MOST {
        match next_capability(config, last) {
            Some(next) => last = next,
            None => break,
        }
    }
    let header = config.get(last..last + 4).context("no capability")?;
    let header = u32::from_le_bytes(header.try_into()?);
    // An empty list has one header of zeros. Any other header keeps its number and version.
    let header = header | (u32::try_from(place)? << 20);
    put(config, last, &header.to_le_bytes())?;
    put(config, place, acs)?;
    // The new capability is the last one.
    put(config, place, &(ACS | 1 << 16).to_le_bytes())?;
    put(config, place + 6, &control.to_le_bytes())
}

fn put(config: &mut [u8], at: usize, bytes: &[u8]) -> Result<()> {
    config
        .get_mut(at..at + bytes.len())
        .context("beyond config space")?
        .copy_from_slice(bytes);
    Ok(())
}

/// Returns the offset of the extended capability after this one.
fn next_capability(config: &[u8], at: usize) -> Option<usize> {
    let bytes = config.get(at..at.checked_add(4)?)?;
    let header = u32::from_le_bytes(bytes.try_into().ok()?);
    let next = usize::try_from(header >> 20).ok()?;
    (next >= 0x100).then_some(next)
}

fn extended_capability(config: &[u8], wanted: u32) -> Option<usize> {
    let mut at = 0x100_usize;
    for _ in 0..MOST {
        let bytes = config.get(at..at.checked_add(4)?)?;
        let header = u32::from_le_bytes(bytes.try_into().ok()?);
        if header & 0xffff == wanted {
            return Some(at);
        }
        at = next_capability(config, at)?;
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

    #[test]
    fn one_more_capability() {
        let mut config = vec![0; 4096];
        put(&mut config, 0x100, &0x1481_0001_u32.to_le_bytes()).expect("room");
        put(&mut config, 0x148, &0x0001_0019_u32.to_le_bytes()).expect("room");
        let acs = [0x0d, 0, 1, 0x33, 0x5f, 0, 0, 0];
        add_capability(&mut config, &acs, 0x1d).expect("added");
        let at = extended_capability(&config, ACS).expect("found");
        assert_eq!(config[at..at + 8], [0x0d, 0, 1, 0, 0x5f, 0, 0x1d, 0]);
        assert_eq!(extended_capability(&config, 0x19), Some(0x148));
        assert!(add_capability(&mut config, &acs, 0).is_err());
        assert!(add_capability(&mut config[..256], &acs, 0).is_err());
    }
}
