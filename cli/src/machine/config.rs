// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Config space of a PCI function: the capabilities that affect GPUDirect RDMA, as the PCI and PCI
//! Express specifications define them.

use crate::host::{Seen, Unseen};

/// The part of config space that this process may read: 64 bytes without root, 256 bytes without
/// extended config space, or 4096 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Config(pub(crate) Vec<u8>);

/// Kind of a PCI Express port or device: the Device/Port Type field of its capabilities register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortType {
    Endpoint,
    RootPort,
    Upstream,
    Downstream,
    /// Function in the root complex itself, or bridge to a bus of another kind.
    Other,
}

/// The PCI Express capability: the function's abilities and settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Express {
    pub(crate) port: PortType,
    /// Maximum payload that the function supports, in bytes.
    pub(crate) payload_most: u32,
    /// Configured maximum payload, in bytes.
    pub(crate) payload: u32,
    /// Configured maximum read request, in bytes.
    pub(crate) read_request: u32,
    /// `true` if the function may mark its transfers as relaxed ordered.
    pub(crate) relaxed_ordering: bool,
}

/// Bits of Access Control Services (ACS), which can keep a port from forwarding packets directly
/// from one device to another.
pub(crate) enum Acs {}

impl Acs {
    /// Source Validation.
    pub(crate) const SV: u16 = 1;
    /// Translation Blocking.
    pub(crate) const TB: u16 = 1 << 1;
    /// P2P Request Redirect: requests between devices go up to the root.
    pub(crate) const RR: u16 = 1 << 2;
    /// P2P Completion Redirect.
    pub(crate) const CR: u16 = 1 << 3;
    /// Upstream Forwarding.
    pub(crate) const UF: u16 = 1 << 4;
    /// P2P Egress Control.
    pub(crate) const EC: u16 = 1 << 5;
    /// Direct Translated P2P: a request with an address that ATS has translated goes directly to
    /// the other device.
    pub(crate) const DT: u16 = 1 << 6;

    /// Returns the names of `bits`, as in lspci.
    pub(crate) fn names(bits: u16) -> Vec<&'static str> {
        let all = [
            (Self::SV, "SrcValid"),
            (Self::TB, "TransBlk"),
            (Self::RR, "ReqRedir"),
            (Self::CR, "CmpltRedir"),
            (Self::UF, "UpstreamFwd"),
            (Self::EC, "EgressCtrl"),
            (Self::DT, "DirectTrans"),
        ];
        all.iter()
            .filter(|(bit, _)| bits & bit != 0)
            .map(|(_, name)| *name)
            .collect()
    }
}

/// A BAR with a configurable size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resizable {
    /// Number of the BAR, 0 to 5.
    pub(crate) bar: usize,
    /// Configured size, in bytes.
    pub(crate) size: u64,
    /// Supported sizes in bytes, smallest first.
    pub(crate) sizes: Vec<u64>,
}

/// Capability identities of the PCI and PCI Express specifications, as in Linux's `pci_regs.h`.
const EXPRESS: u8 = 0x10;
const EXT_ACS: u16 = 0x0d;
const EXT_ATS: u16 = 0x0f;
const EXT_SRIOV: u16 = 0x10;
const EXT_RESIZABLE: u16 = 0x15;

/// Length of the config space that the kernel shows to a user other than root.
const HEADER: usize = 64;
/// Offset where extended config space begins.
const CONVENTIONAL: usize = 256;

impl Config {
    fn bytes<const N: usize>(&self, at: usize) -> Seen<[u8; N]> {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
        bytes.copied().ok_or_else(|| match self.0.len() {
            0..=HEADER => Unseen::Denied,
            _ => Unseen::Failed("config space ends too early".to_owned()),
        })
    }

    fn word(&self, at: usize) -> Seen<u16> {
        self.bytes(at).map(u16::from_le_bytes)
    }

    fn long(&self, at: usize) -> Seen<u32> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    /// Returns the offset of the first capability.
    fn first(&self) -> Seen<usize> {
        let [first] = self.bytes(0x34)?;
        Ok(usize::from(first & 0xfc))
    }

    /// Returns `true` if the header is all ones, as for a device that does not answer. The vendor
    /// and device of a virtual function also read as ones.
    pub(crate) fn is_silent(&self) -> bool {
        let header = self.0.get(..HEADER);
        header.is_some_and(|header| header.iter().all(|byte| *byte == 0xff))
    }

    /// Returns a copy without the contents of unknown capabilities, which keep only their header.
    /// For example, the serial number capability of a NIC contains its hardware address.
    pub(crate) fn known(&self) -> Vec<u8> {
        let mut known = vec![0; self.0.len()];
        let mut keep = |at: usize, length: usize| {
            let end = at.saturating_add(length).min(self.0.len());
            if let (Some(to), Some(from)) = (known.get_mut(at..end), self.0.get(at..end)) {
                to.copy_from_slice(from);
            }
        };
        keep(0, HEADER);
        let mut at = self.first().unwrap_or(0);
        for _ in 0..(CONVENTIONAL - HEADER) / 4 {
            let (HEADER.., Ok(header)) = (at, self.word(at)) else {
                break;
            };
            let [id, next] = header.to_le_bytes();
            keep(at, if id == EXPRESS { 0x3c } else { 2 });
            at = usize::from(next & 0xfc);
        }
        let mut at = CONVENTIONAL;
        for _ in 0..(4096 - CONVENTIONAL) / 4 {
            let (CONVENTIONAL.., Ok(header)) = (at, self.long(at)) else {
                break;
            };
            let length = match u16::try_from(header & 0xffff).unwrap_or(0) {
                EXT_ACS | EXT_ATS => 8,
                EXT_SRIOV => 0x40,
                EXT_RESIZABLE => 0x34,
                _ => 4,
            };
            keep(at, length);
            at = usize::try_from((header >> 20) & 0xffc).unwrap_or(0);
        }
        known
    }

    /// Returns the offset of a capability.
    fn capability(&self, wanted: u8) -> Seen<usize> {
        if self.is_silent() {
            return Err(Unseen::Failed("the device does not answer".to_owned()));
        }
        if self.word(0x06)? & 0x10 == 0 {
            return Err(Unseen::Absent);
        }
        let mut at = self.first()?;
        // The loop is bounded, because a broken list may be circular.
        for _ in 0..(CONVENTIONAL - HEADER) / 4 {
            if at < HEADER {
                return Err(Unseen::Absent);
            }
            let [id, next] = self.bytes(at)?;
            if id == wanted {
                return Ok(at);
            }
            at = usize::from(next & 0xfc);
        }
        Err(Unseen::Failed(
            "the list of capabilities is circular".to_owned(),
        ))
    }

    /// Returns the offset of a capability in extended config space.
    fn extended(&self, wanted: u16) -> Seen<usize> {
        // Conventional PCI has no extended config space. Only root can distinguish conventional PCI
        // from PCI Express.
        self.capability(EXPRESS)?;
        if self.0.len() <= CONVENTIONAL {
            return Err(Unseen::Failed(
                "extended config space cannot be read on this machine".to_owned(),
            ));
        }
        let mut at = CONVENTIONAL;
        for _ in 0..(4096 - CONVENTIONAL) / 4 {
            let header = self.long(at)?;
            if header == 0 || header == u32::MAX {
                return Err(Unseen::Absent);
            }
            if header & 0xffff == u32::from(wanted) {
                return Ok(at);
            }
            at = usize::try_from((header >> 20) & 0xffc).unwrap_or(0);
            if at < CONVENTIONAL {
                return Err(Unseen::Absent);
            }
        }
        Err(Unseen::Failed(
            "the list of extended capabilities is circular".to_owned(),
        ))
    }

    /// Returns the PCI Express capability, or [`Unseen::Absent`] for conventional PCI.
    pub(crate) fn express(&self) -> Seen<Express> {
        let at = self.capability(EXPRESS)?;
        let word = |offset: usize| self.word(at.saturating_add(offset));
        let (flags, can, control) = (word(2)?, word(4)?, word(8)?);
        // Codes 6 and 7 are reserved.
        let bytes = |code: u16| match code {
            0..=5 => 128_u32 << code,
            _ => 0,
        };
        Ok(Express {
            port: match (flags >> 4) & 0xf {
                0 | 1 => PortType::Endpoint,
                4 => PortType::RootPort,
                5 => PortType::Upstream,
                6 => PortType::Downstream,
                _ => PortType::Other,
            },
            payload_most: bytes(can & 7),
            payload: bytes((control >> 5) & 7),
            read_request: bytes((control >> 12) & 7),
            relaxed_ordering: control & 0x10 != 0,
        })
    }

    /// Returns the bits of [`Acs`] that are on, or [`Unseen::Absent`] if the port has no ACS.
    pub(crate) fn acs(&self) -> Seen<u16> {
        let at = self.extended(EXT_ACS)?;
        self.word(at.saturating_add(6))
    }

    /// Returns `true` if Address Translation Services are on, or [`Unseen::Absent`] if the function
    /// has none.
    pub(crate) fn ats(&self) -> Seen<bool> {
        let at = self.extended(EXT_ATS)?;
        Ok(self.word(at.saturating_add(6))? & 0x8000 != 0)
    }

    /// Returns the BARs with a configurable size, or [`Unseen::Absent`] if there are none.
    pub(crate) fn resizable(&self) -> Seen<Vec<Resizable>> {
        let at = self.extended(EXT_RESIZABLE)?;
        let first = self.long(at.saturating_add(8))?;
        let count = usize::try_from((first >> 5) & 7).unwrap_or(0).min(6);
        let mut bars = Vec::new();
        for number in 0..count {
            let entry = at.saturating_add(8 * number);
            let can = self.long(entry.saturating_add(4))?;
            let control = self.long(entry.saturating_add(8))?;
            // Bit 4 of the first register stands for 1 MiB. The upper half of the second register
            // continues at 256 TiB.
            let powers = (u64::from(can) >> 4) | (u64::from(control >> 16) << 28);
            let size = |power: u32| 1_u64.checked_shl(power.saturating_add(20));
            bars.push(Resizable {
                bar: usize::try_from(control & 7).unwrap_or(7),
                size: size((control >> 8) & 0x3f).unwrap_or(0),
                sizes: (0..43)
                    .filter(|power| powers & (1 << power) != 0)
                    .filter_map(size)
                    .collect(),
            });
        }
        Ok(bars)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_space_that_is_short_or_odd_is_no_panic() {
        assert_eq!(Config(vec![0; 64]).express(), Err(Unseen::Absent));
        let mut listed = vec![0; 64];
        listed[6] = 0x10;
        listed[0x34] = 0x40;
        assert_eq!(Config(listed.clone()).express(), Err(Unseen::Denied));
        // A circular list.
        listed.resize(256, 0);
        listed[0x41] = 0x40;
        assert!(matches!(Config(listed).express(), Err(Unseen::Failed(_))));
        assert!(matches!(
            Config(vec![0xff; 4096]).express(),
            Err(Unseen::Failed(_))
        ));
    }

    proptest::proptest! {
        #[test]
        fn any_config_space_is_decoded_or_refused(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..4200),
        ) {
            let config = Config(bytes);
            let _ = config.express();
            let _ = config.acs();
            let _ = config.ats();
            let _ = config.resizable();
            assert_eq!(config.known().len(), config.0.len());
        }
    }
}
