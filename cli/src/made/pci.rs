// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI functions in the making, with their config space.

/// A PCI function in the making. The defaults are those of a PCI Express endpoint that is well.
#[derive(Debug, Clone)]
pub(crate) struct Pci {
    pub(crate) vendor: u16,
    pub(crate) device: u16,
    pub(crate) class: u32,
    pub(crate) driver: Option<&'static str>,
    pub(crate) numa: i32,
    /// Speed as sysfs has it and lanes: now, and at most.
    pub(crate) now: (&'static str, u32),
    pub(crate) most: (&'static str, u32),
    /// Index, size in bytes, flags of the kernel's `struct resource`.
    pub(crate) bars: Vec<(usize, u64, u64)>,
    /// Device/Port Type; none: conventional PCI.
    pub(crate) port: Option<u16>,
    /// Code of the payload that it can, and that it is set to: 0 is 128 bytes.
    pub(crate) payload: (u16, u16),
    /// Code of the longest read request.
    pub(crate) read_request: u16,
    pub(crate) relaxed_ordering: bool,
    /// What ACS can and what is set.
    pub(crate) acs: Option<(u16, u16)>,
    pub(crate) ats: Option<bool>,
    /// Resizable BAR: index, mask of sizes from 1 MiB on, code of the size that it has.
    pub(crate) resizable: Option<(u32, u32, u32)>,
    pub(crate) iommu_group: Option<u32>,
}

/// 64-bit, prefetchable memory.
pub(crate) const PREFETCHABLE: u64 = 0x14_220c;
/// 32-bit memory.
pub(crate) const PLAIN: u64 = 0x4_0200;

pub(super) const GEN5: &str = "32.0 GT/s PCIe";
pub(super) const GEN4: &str = "16.0 GT/s PCIe";

/// What a switch's downstream port can: all but egress control.
pub(crate) const ACS_ALL: u16 = 0x5f;
/// What Linux sets with an IOMMU on: source validation, request and completion redirect, upstream forwarding.
pub(crate) const ACS_LINUX: u16 = 0x1d;

impl Default for Pci {
    fn default() -> Self {
        Self {
            vendor: 0,
            device: 0,
            class: 0,
            driver: None,
            numa: 0,
            now: (GEN5, 16),
            most: (GEN5, 16),
            bars: Vec::new(),
            port: Some(0),
            payload: (2, 2),
            read_request: 5,
            relaxed_ordering: true,
            acs: None,
            ats: None,
            resizable: None,
            iommu_group: None,
        }
    }
}

impl Pci {
    /// Intel's root port of a Sapphire Rapids processor.
    pub(crate) fn root_port(numa: i32) -> Self {
        Self {
            vendor: 0x8086,
            device: 0x352a,
            class: 0x06_0400,
            driver: Some("pcieport"),
            numa,
            port: Some(4),
            acs: Some((ACS_ALL, 0)),
            ..Self::default()
        }
    }

    /// A port of Broadcom's PEX890xx switch, towards the root (5) or away from it (6).
    pub(crate) fn switch_port(port: u16, numa: i32) -> Self {
        Self {
            vendor: 0x1000,
            device: 0xc030,
            class: 0x06_0400,
            driver: Some("pcieport"),
            numa,
            port: Some(port),
            acs: (port == 6).then_some((ACS_ALL, 0)),
            ..Self::default()
        }
    }

    /// NVIDIA H100 SXM5 80 GB, BAR1 of 128 GiB.
    pub(crate) fn h100(numa: i32) -> Self {
        Self {
            vendor: 0x10de,
            device: 0x2330,
            class: 0x03_0200,
            driver: Some("nvidia"),
            numa,
            bars: vec![
                (0, 16 << 20, PREFETCHABLE),
                (2, 128 << 30, PREFETCHABLE),
                (4, 32 << 20, PREFETCHABLE),
            ],
            resizable: Some((2, (1 << 18) - (1 << 6), 17)),
            ..Self::default()
        }
    }

    /// NVIDIA ConnectX-7.
    pub(crate) fn connectx7(numa: i32) -> Self {
        Self {
            vendor: 0x15b3,
            device: 0x1021,
            class: 0x02_0700,
            driver: Some("mlx5_core"),
            numa,
            bars: vec![(0, 32 << 20, PREFETCHABLE)],
            ats: Some(false),
            ..Self::default()
        }
    }

    /// With a link that is, and can be, of this speed and width.
    pub(crate) fn link(mut self, speed: &'static str, lanes: u32) -> Self {
        self.now = (speed, lanes);
        self.most = (speed, lanes);
        self
    }

    /// Config space of 4096 bytes, or of 256 for conventional PCI.
    pub(crate) fn config(&self) -> Vec<u8> {
        let length = if self.port.is_some() { 4096 } else { 256 };
        let mut space = Space(vec![0; length]);
        space.word(0, self.vendor);
        space.word(2, self.device);
        space.word(4, 0x0406);
        space.word(6, 0x0010);
        space.long(8, self.class << 8);
        space.0[0x0e] = u8::from(self.class >> 8 == 0x0604);
        let Some(port) = self.port else {
            space.word(6, 0);
            return space.0;
        };
        // Power management, then PCI Express.
        space.0[0x34] = 0x40;
        space.word(0x40, 0x6001);
        space.word(0x42, 0x0003);
        space.word(0x60, 0x0010);
        space.word(0x62, 2 | port << 4);
        space.word(0x64, 0x8000 | self.payload.0);
        let relaxed = u16::from(self.relaxed_ordering) << 4;
        space.word(
            0x68,
            relaxed | self.payload.1 << 5 | 1 << 8 | self.read_request << 12,
        );
        let code = |speed: &str| match speed.split('.').next() {
            Some("2") => 1,
            Some("5") => 2,
            Some("8") => 3,
            Some("16") => 4,
            Some("32") => 5,
            _ => 6_u16,
        };
        let lanes = |lanes: u32| u16::try_from(lanes).unwrap() << 4;
        space.word(0x6c, code(self.most.0) | lanes(self.most.1));
        space.word(0x72, code(self.now.0) | lanes(self.now.1));
        // Advanced error reporting comes first, as on most devices.
        let mut at = 0x100;
        space.long(at, 0x0002_0001);
        let mut next = |space: &mut Space, id: u32, length: usize| {
            let before = at;
            at = if before == 0x100 {
                0x148
            } else {
                before + 0x30
            };
            assert!(length <= 0x30);
            let header = u32::from_le_bytes(space.0[before..before + 4].try_into().unwrap());
            space.long(before, header | u32::try_from(at).unwrap() << 20);
            space.long(at, 1 << 16 | id);
            at
        };
        if let Some((can, set)) = self.acs {
            let at = next(&mut space, 0x0d, 8);
            space.word(at + 4, can);
            space.word(at + 6, set);
        }
        if let Some(on) = self.ats {
            let at = next(&mut space, 0x0f, 8);
            space.word(at + 6, if on { 0x8000 } else { 0 });
        }
        if let Some((bar, sizes, size)) = self.resizable {
            let at = next(&mut space, 0x15, 12);
            space.long(at + 4, sizes << 4);
            space.long(at + 8, bar | 1 << 5 | size << 8);
        }
        space.0
    }
}

struct Space(Vec<u8>);

impl Space {
    fn word(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn long(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
}
