// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! RDMA objects that the kernel tracks: memory regions and protection domains of each device. The
//! request is that of iproute2's `rdma resource show mr` (`include/uapi/rdma/rdma_netlink.h` and
//! `drivers/infiniband/core/nldev.c` of Linux 7.3).
//!
//! The kernel answers every user. Only the keys of memory regions need `CAP_NET_ADMIN`, and this
//! module does not read keys.

use std::collections::{BTreeMap, BTreeSet};

use netlink_packet_core::{parse_string, parse_u32, parse_u64, parse_u8, DefaultNla, NLM_F_DUMP};
use rustix::io::Errno;
use rustix::net::netlink::RDMA;
use serde::{Deserialize, Serialize};

use super::recording::Recorded;
use super::{Fact, Host, Seen, Unseen};
use crate::netlink::{attributes, Refused, Socket};

/// RDMA devices in sysfs.
pub(crate) const CLASS: &str = "/sys/class/infiniband";

/// Returns `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, command)`.
const fn kind(command: u16) -> u16 {
    const NLDEV: u16 = 5;
    (NLDEV << 10) | command
}

// `enum rdma_nldev_command`.
const GET: u16 = kind(1);
const SYS_GET: u16 = kind(6);
const RES_MR_GET: u16 = kind(13);
const RES_PD_GET: u16 = kind(14);

// `enum rdma_nldev_attr`.
const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const RES_PID: u16 = 28;
const RES_KERN_NAME: u16 = 29;
const RES_MR: u16 = 40;
const RES_MR_ENTRY: u16 = 41;
const RES_MRLEN: u16 = 45;
const RES_PD: u16 = 46;
const RES_PD_ENTRY: u16 = 47;
const RES_PDN: u16 = 60;
const SYS_NETNS_MODE: u16 = 66;

/// Creator of a memory region or a protection domain.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Maker {
    /// Thread ID in this program's PID namespace. `None`: the thread has ended, or has no ID in
    /// this namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) thread: Option<u32>,
    /// Name of the part of the kernel that created the object, if no process created the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kernel: Option<String>,
    /// Number of the protection domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) domain: Option<u32>,
}

/// Memory regions with the same creator and size.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Regions {
    #[serde(flatten)]
    pub(crate) maker: Maker,
    /// Size of each region.
    pub(crate) bytes: u64,
    pub(crate) count: u64,
}

/// An RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) regions: Vec<Regions>,
    pub(crate) domains: Vec<Maker>,
    /// Reason why the regions are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) refused: Option<String>,
}

/// The fact [`MemoryRegions`](Fact::MemoryRegions), as JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Tracked {
    pub(crate) devices: Vec<Device>,
    /// `true` if other network namespaces may have RDMA devices that are not visible in this
    /// namespace.
    pub(crate) is_exclusive: bool,
}

impl Recorded for Tracked {
    const FACT: Fact = Fact::MemoryRegions;
    const MISREAD: &'static str = "the list is not understood";

    fn ask(host: &dyn Host) -> Seen<Self> {
        // Without a device, this function sends no request. A socket of this protocol would make
        // the kernel load ib_core.
        match host.names(CLASS) {
            Ok(names) if names.is_empty() => Ok(Self::default()),
            Err(Unseen::Absent) if host.has("/sys/class") == Ok(false) => {
                Err(Unseen::Failed("/sys cannot be read here".to_owned()))
            }
            Err(Unseen::Absent) => Ok(Self::default()),
            _ => tracked().map_err(|why| Unseen::Failed(format!("RDMA netlink: {why}"))),
        }
    }
}

fn tracked() -> Result<Tracked, Refused> {
    let mut socket = Socket::open(Some(RDMA))?;
    let is_exclusive = match socket.ask((SYS_GET, 0), &[], &[]) {
        Ok(messages) => is_exclusive(&messages)?,
        // Kernels before 5.2 do not know the request. These kernels show all devices in all
        // namespaces.
        Err(Refused::Kernel(Errno::INVAL)) => false,
        Err(why) => return Err(why),
    };
    let mut devices = Vec::new();
    for message in socket.ask((GET, NLM_F_DUMP), &[], &[])? {
        let (index, name) = device(&message)?;
        let mut list = |command| {
            let index = DefaultNla::new(DEV_INDEX, index.to_ne_bytes().to_vec());
            socket.ask((command, NLM_F_DUMP), &[], &[index])
        };
        let regions = list(RES_MR_GET).and_then(|messages| regions(&messages));
        // An error is ignored. Without the list of protection domains, the owners of more regions
        // are unknown.
        let domains = list(RES_PD_GET).and_then(|messages| domains(&messages));
        devices.push(Device {
            name,
            refused: regions.as_ref().err().map(why),
            regions: regions.unwrap_or_default(),
            domains: domains.unwrap_or_default(),
        });
    }
    Ok(Tracked {
        devices,
        is_exclusive,
    })
}

/// Returns `true` if each network namespace has its own RDMA devices. The kernel's value 1 means
/// shared.
fn is_exclusive(messages: &[Vec<u8>]) -> Result<bool, Refused> {
    for message in messages {
        for attribute in attributes(message) {
            if let (SYS_NETNS_MODE, value) = attribute? {
                return Ok(parse_u8(value)? == 0);
            }
        }
    }
    Ok(false)
}

/// Returns the reason why the regions of a device are not listed.
fn why(refused: &Refused) -> String {
    match refused {
        // The kernel does not know the index or the command.
        Refused::Kernel(Errno::INVAL) => {
            "the kernel lists none (Linux before 4.17 has no such list), or the device has just disappeared"
                .to_owned()
        }
        why => why.to_string(),
    }
}

fn device(message: &[u8]) -> Result<(u32, String), Refused> {
    let (mut index, mut name) = (None, None);
    for attribute in attributes(message) {
        match attribute? {
            (DEV_INDEX, value) => index = Some(parse_u32(value)?),
            (DEV_NAME, value) => name = Some(parse_string(value)?),
            _ => {}
        }
    }
    let missing = || Refused::Answer("a device without number or name".to_owned());
    index.zip(name).ok_or_else(missing)
}

fn entries(messages: &[Vec<u8>], table: u16, entry: u16) -> Result<Vec<&[u8]>, Refused> {
    let mut entries = Vec::new();
    for message in messages {
        for attribute in attributes(message) {
            let (kind, inside) = attribute?;
            if kind != table {
                continue;
            }
            for attribute in attributes(inside) {
                let (kind, value) = attribute?;
                entries.extend((kind == entry).then_some(value));
            }
        }
    }
    Ok(entries)
}

impl Maker {
    /// Stores an attribute of a known kind, and ignores all others.
    fn take(&mut self, kind: u16, value: &[u8]) -> Result<(), Refused> {
        match kind {
            // Kernels before 5.5 write 0 for a thread that has ended.
            RES_PID => self.thread = Some(parse_u32(value)?).filter(|thread| *thread != 0),
            RES_KERN_NAME => self.kernel = Some(parse_string(value)?),
            RES_PDN => self.domain = Some(parse_u32(value)?),
            _ => {}
        }
        Ok(())
    }
}

fn regions(messages: &[Vec<u8>]) -> Result<Vec<Regions>, Refused> {
    let mut counts: BTreeMap<(Maker, u64), u64> = BTreeMap::new();
    for entry in entries(messages, RES_MR, RES_MR_ENTRY)? {
        let (mut maker, mut bytes) = (Maker::default(), None);
        for attribute in attributes(entry) {
            let (kind, value) = attribute?;
            match kind {
                RES_MRLEN => bytes = Some(parse_u64(value)?),
                _ => maker.take(kind, value)?,
            }
        }
        let bytes = bytes.ok_or_else(|| Refused::Answer("a region without length".to_owned()))?;
        let count = counts.entry((maker, bytes)).or_default();
        *count = count.saturating_add(1);
    }
    let all = counts.into_iter();
    Ok(all
        .map(|((maker, bytes), count)| Regions {
            maker,
            bytes,
            count,
        })
        .collect())
}

fn domains(messages: &[Vec<u8>]) -> Result<Vec<Maker>, Refused> {
    let mut domains = BTreeSet::new();
    for entry in entries(messages, RES_PD, RES_PD_ENTRY)? {
        let mut maker = Maker::default();
        for attribute in attributes(entry) {
            let (kind, value) = attribute?;
            maker.take(kind, value)?;
        }
        domains.insert(maker);
    }
    Ok(domains.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::tests::attribute;

    use proptest::prelude::*;

    fn number(kind: u16, number: u32) -> Vec<u8> {
        attribute(kind, &number.to_ne_bytes())
    }

    /// Returns a region as `fill_res_mr_entry` writes it for a user with `CAP_NET_ADMIN`: keys,
    /// length, number, domain, thread.
    fn region(bytes: u64, domain: u32, thread: Option<u32>) -> Vec<u8> {
        let mut entry = [number(42, 0x1234), number(43, 0x1234)].concat();
        entry.extend(attribute(45, &bytes.to_ne_bytes()));
        entry.extend([number(62, 9), number(60, domain)].concat());
        entry.extend(thread.map(|thread| number(28, thread)).unwrap_or_default());
        // Attributes of the driver.
        entry.extend(attribute(0x8000 | 54, &attribute(55, b"x")));
        attribute(41, &entry)
    }

    fn of_kernel(bytes: u64, name: &str) -> Vec<u8> {
        let name = [name.as_bytes(), b"\0"].concat();
        let length = attribute(45, &bytes.to_ne_bytes());
        attribute(41, &[length, attribute(29, &name)].concat())
    }

    fn message(table: u16, entries: &[Vec<u8>]) -> Vec<u8> {
        let mut message = [number(1, 0), attribute(2, b"mlx5_0\0")].concat();
        message.extend(attribute(table, &entries.concat()));
        message
    }

    #[test]
    fn a_device_has_its_number_and_name() {
        let message = [number(1, 3), attribute(2, b"mlx5_0\0"), number(3, 1)].concat();
        assert_eq!(device(&message), Ok((3, "mlx5_0".to_owned())));
        assert!(device(&number(1, 3)).is_err());
        assert!(device(&attribute(2, b"mlx5_0\0")).is_err());
        assert!(device(&[attribute(1, b"\0\0"), attribute(2, b"x\0")].concat()).is_err());
        assert!(device(&[number(1, 3), attribute(2, b"\xff\0")].concat()).is_err());
    }

    #[test]
    fn the_mode_of_network_namespaces_is_read() {
        let mode = |value: &[u8]| is_exclusive(&[[number(1, 0), attribute(66, value)].concat()]);
        assert_eq!(mode(&[0]), Ok(true));
        assert_eq!(mode(&[1]), Ok(false));
        assert!(mode(&[]).is_err() && mode(&[0, 0]).is_err());
        assert_eq!(is_exclusive(&[]), Ok(false));
    }

    #[test]
    fn similar_regions_are_counted_together() {
        let first = [
            region(4096, 2, Some(4712)),
            region(1 << 40, 2, Some(4712)),
            region(4096, 2, Some(4712)),
        ];
        let second = [
            region(4096, 2, None),
            region(4096, 2, Some(0)),
            of_kernel(65_536, "nvme_rdma"),
        ];
        let read = regions(&[message(40, &first), message(40, &second)]).unwrap();
        // Recordings keep this JSON, which contains no key of a region.
        let json = serde_json::to_string(&read).unwrap();
        let expected = [
            r#"{"domain":2,"bytes":4096,"count":2}"#,
            r#"{"kernel":"nvme_rdma","bytes":65536,"count":1}"#,
            r#"{"thread":4712,"domain":2,"bytes":4096,"count":2}"#,
            r#"{"thread":4712,"domain":2,"bytes":1099511627776,"count":1}"#,
        ];
        assert_eq!(json, format!("[{}]", expected.join(",")));
        assert_eq!(serde_json::from_str::<Vec<Regions>>(&json).unwrap(), read);
    }

    #[test]
    fn protection_domains_have_their_creators() {
        let one = attribute(47, &[number(60, 2), number(28, 4711)].concat());
        let of_kernel = attribute(47, &[number(60, 0), attribute(29, b"rdma_cm\0")].concat());
        let read = domains(&[message(46, &[one, of_kernel])]).unwrap();
        let json = serde_json::to_string(&read).unwrap();
        let expected = r#"[{"kernel":"rdma_cm","domain":0},{"thread":4711,"domain":2}]"#;
        assert_eq!(json, expected);
    }

    #[test]
    fn incomplete_entries_are_errors() {
        let no_length = attribute(41, &number(28, 1));
        let short_length = attribute(41, &number(45, 1));
        let long_pid = attribute(
            41,
            &[attribute(45, &[0; 8]), attribute(28, &[0; 8])].concat(),
        );
        for entry in [no_length, short_length, long_pid] {
            assert!(regions(&[message(40, &[entry])]).is_err());
        }
        // A truncated message is an error. A message that ends before the table of regions is an
        // empty list.
        let whole = message(40, &[region(4096, 2, Some(1))]);
        for length in 0..whole.len() {
            let read = regions(&[whole[..length].to_vec()]);
            assert!(
                read.as_ref().is_ok_and(Vec::is_empty) || read.is_err(),
                "{length}: {read:?}"
            );
        }
        // The length of the inner attribute exceeds the length of the outer attribute.
        let mut odd = whole;
        let table = number(1, 0).len() + attribute(2, b"mlx5_0\0").len();
        let entry = table + 4;
        odd[entry..entry + 2].copy_from_slice(&u16::MAX.to_ne_bytes());
        assert!(regions(&[odd]).is_err());
        // A table of another kind is ignored.
        assert_eq!(regions(&[message(46, &[])]), Ok(Vec::new()));
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = device(&bytes);
            let messages = [bytes];
            let _ = (regions(&messages), domains(&messages), is_exclusive(&messages));
        }

        /// Replaces some bytes of a valid list by random bytes.
        #[test]
        fn no_list_is_a_panic(
            lengths in prop::collection::vec(any::<u64>(), 0..5),
            odd in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        ) {
            let entries: Vec<_> = lengths.iter().map(|bytes| region(*bytes, 1, Some(7))).collect();
            let mut bytes = message(40, &entries);
            for (place, byte) in odd {
                let place = place.index(bytes.len());
                bytes[place] = byte;
            }
            if let Ok(read) = regions(&[bytes]) {
                prop_assert!(read.iter().map(|one| one.count).sum::<u64>() <= lengths.len() as u64);
            }
        }
    }
}
