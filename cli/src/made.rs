// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Made-up machines for tests: recordings built by hand from the public formats of sysfs and of PCI config space,
//! with the numbers that public listings of such machines show. No such machine was at hand.
//!
//! A machine is complete: what is not in it is not there. A test takes a healthy one and plants one fault in it.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use crate::host::recording::encode;
use crate::host::recording::Recording;
use crate::host::Fact;
use crate::host::Unseen;

/// A machine in the making.
#[derive(Debug, Clone)]
pub(crate) struct Made {
    pub(crate) recording: Recording,
}

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

const GEN5: &str = "32.0 GT/s PCIe";
const GEN4: &str = "16.0 GT/s PCIe";

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

impl Made {
    /// A machine of one NUMA node for now, without PCI.
    fn new(about: &str) -> Self {
        let mut made = Self {
            recording: Recording::new(format!(
                "made by hand from the public formats of sysfs and PCI, no such machine was at hand: {about}"
            )),
        };
        for directory in [
            "/sys/bus/pci/devices",
            "/sys/class/net",
            "/sys/class/iommu",
            "/sys/kernel/iommu_groups",
            "/sys/devices/system/node/node0",
            "/proc",
        ] {
            made.directory(directory);
        }
        made.file(
            "/proc/cpuinfo",
            "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme sse sse2 vmx\n",
        );
        made.file(
            "/proc/cmdline",
            "BOOT_IMAGE=/vmlinuz root=/dev/sda2 ro iommu=pt\n",
        );
        made.fact(Fact::User, "0");
        made.fact(Fact::Monotonic, "3600.000000000");
        made.fact(Fact::KernelLog, "");
        made.recording
            .unseen
            .insert("fact nvml".to_owned(), Unseen::Absent);
        made
    }

    /// A directory, and those above it.
    pub(crate) fn directory(&mut self, path: &str) {
        self.recording
            .directories
            .entry(path.to_owned())
            .or_default();
        self.enter(path);
    }

    /// Enters a path into the directories above it.
    fn enter(&mut self, path: &str) {
        let Some((above, name)) = path.rsplit_once('/') else {
            return;
        };
        let above = if above.is_empty() { "/" } else { above };
        let names = self
            .recording
            .directories
            .entry(above.to_owned())
            .or_default();
        if !names.iter().any(|one| one == name) {
            names.push(name.to_owned());
            names.sort();
        }
        if above != "/" {
            self.enter(above);
        }
    }

    /// A file, in place of what was there.
    pub(crate) fn file(&mut self, path: &str, text: &str) {
        self.bytes(path, text.as_bytes());
    }

    pub(crate) fn bytes(&mut self, path: &str, bytes: &[u8]) {
        self.recording.unseen.remove(path);
        self.recording.files.insert(path.to_owned(), encode(bytes));
        self.enter(path);
    }

    /// A symbolic link.
    pub(crate) fn link(&mut self, path: &str, says: &str) {
        self.recording
            .links
            .insert(path.to_owned(), says.to_owned());
        self.enter(path);
    }

    pub(crate) fn fact(&mut self, fact: Fact, text: &str) {
        self.recording.facts.insert(fact, text.to_owned());
    }

    /// A file that takes rights to read.
    pub(crate) fn deny(&mut self, path: &str) {
        self.recording.files.remove(path);
        self.recording
            .unseen
            .insert(path.to_owned(), Unseen::Denied);
        self.enter(path);
    }

    /// Takes away a path and all below it.
    pub(crate) fn remove(&mut self, path: &str) {
        let below = format!("{path}/");
        let gone = |key: &String| key == path || key.starts_with(&below);
        self.recording.files.retain(|key, _| !gone(key));
        self.recording.directories.retain(|key, _| !gone(key));
        self.recording.links.retain(|key, _| !gone(key));
        self.recording.unseen.retain(|key, _| !gone(key));
        if let Some((above, name)) = path.rsplit_once('/') {
            if let Some(names) = self.recording.directories.get_mut(above) {
                names.retain(|one| one != name);
            }
        }
    }

    /// Where a function is in `/sys/devices`.
    pub(crate) fn place(&self, at: &str) -> String {
        let says = &self.recording.links[&format!("/sys/bus/pci/devices/{at}")];
        format!("/sys/{}", says.trim_start_matches("../"))
    }

    /// Puts a function below another, or below a host bridge (`pci0000:00`).
    pub(crate) fn pci(&mut self, above: &str, at: &str, function: &Pci) {
        let above = match above.starts_with("pci") {
            true => format!("/sys/devices/{above}"),
            false => self.place(above),
        };
        let own = format!("{above}/{at}");
        let link = format!("../../../{}", own.trim_start_matches("/sys/"));
        self.link(&format!("/sys/bus/pci/devices/{at}"), &link);
        let Pci {
            vendor,
            device,
            class,
            ..
        } = function;
        self.file(&format!("{own}/vendor"), &format!("{vendor:#06x}\n"));
        self.file(&format!("{own}/device"), &format!("{device:#06x}\n"));
        self.file(&format!("{own}/class"), &format!("{class:#08x}\n"));
        self.file(&format!("{own}/numa_node"), &format!("{}\n", function.numa));
        self.bytes(&format!("{own}/config"), &function.config());
        if function.port.is_some() {
            self.set_link(at, function.now, function.most);
        }
        self.set_bars(at, &function.bars);
        if let Some(driver) = function.driver {
            let driver = format!("../../../../bus/pci/drivers/{driver}");
            self.link(&format!("{own}/driver"), &driver);
        }
        if let Some(group) = function.iommu_group {
            self.iommu_group(at, group, "DMA-FQ");
        }
    }

    /// The link of a function, by its own files.
    pub(crate) fn set_link(&mut self, at: &str, now: (&str, u32), most: (&str, u32)) {
        let own = self.place(at);
        self.file(
            &format!("{own}/current_link_speed"),
            &format!("{}\n", now.0),
        );
        self.file(
            &format!("{own}/current_link_width"),
            &format!("{}\n", now.1),
        );
        self.file(&format!("{own}/max_link_speed"), &format!("{}\n", most.0));
        self.file(&format!("{own}/max_link_width"), &format!("{}\n", most.1));
    }

    /// The BARs of a function.
    pub(crate) fn set_bars(&mut self, at: &str, bars: &[(usize, u64, u64)]) {
        let own = self.place(at);
        let mut lines = vec![format!("{:#018x} {:#018x} {:#018x}", 0, 0, 0); 7];
        for (index, size, flags) in bars {
            let start = (0x3800_u64 << 32) + (u64::try_from(*index).unwrap() << 40);
            lines[*index] = format!("{start:#018x} {:#018x} {flags:#018x}", start + size - 1);
        }
        self.file(
            &format!("{own}/resource"),
            &format!("{}\n", lines.join("\n")),
        );
    }

    /// Config space once more, after a change.
    pub(crate) fn set_config(&mut self, at: &str, function: &Pci) {
        let own = self.place(at);
        self.bytes(&format!("{own}/config"), &function.config());
    }

    /// Puts a function into an IOMMU group of a type: `identity`, `DMA`, `DMA-FQ`.
    pub(crate) fn iommu_group(&mut self, at: &str, group: u32, kind: &str) {
        let own = self.place(at);
        let groups = "/sys/kernel/iommu_groups";
        let ups = "../".repeat(own.matches('/').count() - 1);
        self.link(
            &format!("{own}/iommu_group"),
            &format!("{ups}kernel/iommu_groups/{group}"),
        );
        self.file(&format!("{groups}/{group}/type"), &format!("{kind}\n"));
        self.link(
            &format!("{groups}/{group}/devices/{at}"),
            &format!("../../../../{}", own.trim_start_matches("/sys/")),
        );
    }

    /// What nvidia.ko says of a GPU.
    pub(crate) fn gpu(&mut self, at: &str, model: &str) {
        self.file(
            &format!("/proc/driver/nvidia/gpus/{at}/information"),
            &format!("Model: \t\t {model}\nIRQ:   \t\t 100\nGPU UUID: \t GPU-00000000-0000-0000-0000-000000000000\n\
                 Bus Location: \t {at}\n"),
        );
    }

    /// An RDMA device of a function, with one port.
    pub(crate) fn hca(&mut self, name: &str, at: &str, netdev: &str, layer: &str, rate: &str) {
        let device = self.place(at);
        let own = format!("{device}/infiniband/{name}");
        self.link(
            &format!("/sys/class/infiniband/{name}"),
            &format!("../../{}", own.trim_start_matches("/sys/")),
        );
        self.link(&format!("{own}/device"), &format!("../../../{at}"));
        self.file(&format!("{own}/fw_ver"), "28.39.1002\n");
        self.file(&format!("{own}/node_guid"), "b83f:d203:00aa:0001\n");
        self.port(&own, 1, layer, rate);
        self.netdev(netdev, Some(at));
    }

    /// A port of an RDMA device.
    pub(crate) fn port(&mut self, own: &str, number: u32, layer: &str, rate: &str) {
        let port = format!("{own}/ports/{number}");
        self.file(&format!("{port}/link_layer"), &format!("{layer}\n"));
        self.file(&format!("{port}/state"), "4: ACTIVE\n");
        self.file(&format!("{port}/phys_state"), "5: LinkUp\n");
        self.file(&format!("{port}/rate"), &format!("{rate}\n"));
    }

    /// A network interface: of a function, or of none.
    pub(crate) fn netdev(&mut self, name: &str, at: Option<&str>) {
        let own = match at {
            Some(at) => format!("{}/net/{name}", self.place(at)),
            None => format!("/sys/devices/virtual/net/{name}"),
        };
        self.link(
            &format!("/sys/class/net/{name}"),
            &format!("../../{}", own.trim_start_matches("/sys/")),
        );
        self.file(&format!("{own}/dev_port"), "0\n");
        self.file(&format!("{own}/address"), "b8:3f:d2:aa:00:01\n");
        self.file(&format!("{own}/operstate"), "up\n");
        if let Some(at) = at {
            self.link(&format!("{own}/device"), &format!("../../../{at}"));
        }
    }

    /// As a user without rights sees it: 64 bytes of config space.
    fn unprivileged(&mut self) {
        for (path, text) in &mut self.recording.files {
            if path.ends_with("/config") && text.starts_with("hex:") {
                text.truncate("hex:".len() + 2 * 64);
            }
        }
        self.fact(Fact::User, "1000");
        self.recording.facts.remove(&Fact::KernelLog);
        self.recording
            .unseen
            .insert("fact kernel_log".to_owned(), Unseen::Denied);
        self.deny("/sys/kernel/debug");
    }

    /// A root port with a switch below it that has as many ports. Returns the ports' addresses; what hangs on port N
    /// is at bus `bus + 3 + N`.
    fn switch(&mut self, root: &str, bus: u8, ports: u8, numa: i32) -> Vec<String> {
        let port = format!("0000:{bus:02x}:01.0");
        let up = format!("0000:{:02x}:00.0", bus + 1);
        self.pci(root, &port, &Pci::root_port(numa));
        self.pci(&port, &up, &Pci::switch_port(5, numa));
        let mut downs = Vec::new();
        for number in 0..ports {
            let down = format!("0000:{:02x}:{number:02x}.0", bus + 2);
            self.pci(&up, &down, &Pci::switch_port(6, numa));
            downs.push(down);
        }
        downs
    }
}

const NDR: &str = "400 Gb/sec (4X NDR)";

/// Eight H100 and eight ConnectX-7 behind four switches of two sockets, and a network card of 25 Gb/s for all else.
pub(crate) fn hgx() -> Made {
    let mut made = Made::new("HGX H100: 8 GPUs, 8 ConnectX-7, 4 switches, 2 sockets, ACS off");
    made.directory("/sys/devices/system/node/node1");
    let mut hca = 0;
    for (number, (bus, numa)) in [(0x15_u8, 0), (0x37, 0), (0x97, 1), (0xbf, 1)]
        .into_iter()
        .enumerate()
    {
        let ports = made.switch(&format!("pci0000:{bus:02x}"), bus, 4, numa);
        for (port, above) in ports.iter().enumerate() {
            let at = format!("0000:{:02x}:00.0", usize::from(bus) + 3 + port);
            if port % 2 == 0 {
                made.pci(above, &at, &Pci::connectx7(numa));
                let netdev = format!("ibp{}s0", usize::from(bus) + 3 + port);
                made.hca(&format!("mlx5_{hca}"), &at, &netdev, "InfiniBand", NDR);
                hca += 1;
            } else {
                made.pci(above, &at, &Pci::h100(numa));
                made.gpu(&at, "NVIDIA H100 80GB HBM3");
            }
        }
        assert!(number < 4);
    }
    let other = Pci {
        device: 0x101f,
        class: 0x02_0000,
        ..Pci::connectx7(0)
    };
    made.pci("pci0000:00", "0000:00:1c.0", &Pci::root_port(0));
    made.pci("0000:00:1c.0", "0000:01:00.0", &other.link(GEN4, 8));
    made.hca(
        "mlx5_8",
        "0000:01:00.0",
        "ens1f0np0",
        "Ethernet",
        "25 Gb/sec (1X EDR)",
    );
    made
}

/// One H100 and one ConnectX-7 behind one switch: what most faults are planted in.
pub(crate) fn small() -> Made {
    let mut made = Made::new("one H100 and one ConnectX-7 behind one switch");
    let ports = made.switch("pci0000:15", 0x15, 2, 0);
    made.pci(&ports[0], "0000:18:00.0", &Pci::connectx7(0));
    made.hca("mlx5_0", "0000:18:00.0", "ibp24s0", "InfiniBand", NDR);
    made.pci(&ports[1], "0000:19:00.0", &Pci::h100(0));
    made.gpu("0000:19:00.0", "NVIDIA H100 80GB HBM3");
    made
}

/// Two sockets, each with a GPU and a card on root ports of their own: in one host bridge, and in two.
pub(crate) fn two_sockets() -> Made {
    let mut made = Made::new("two sockets without switches: 2 H100 PCIe, 2 ConnectX-7");
    made.directory("/sys/devices/system/node/node1");
    let h100 = |numa| Pci {
        device: 0x2331,
        ..Pci::h100(numa)
    };
    made.pci("pci0000:16", "0000:16:01.0", &Pci::root_port(0));
    made.pci("0000:16:01.0", "0000:17:00.0", &h100(0));
    made.pci("pci0000:16", "0000:16:03.0", &Pci::root_port(0));
    made.pci("0000:16:03.0", "0000:18:00.0", &Pci::connectx7(0));
    made.pci("pci0000:97", "0000:97:01.0", &Pci::root_port(1));
    made.pci("0000:97:01.0", "0000:98:00.0", &h100(1));
    made.pci("pci0000:c7", "0000:c7:01.0", &Pci::root_port(1));
    made.pci("0000:c7:01.0", "0000:c8:00.0", &Pci::connectx7(1));
    for at in ["0000:17:00.0", "0000:98:00.0"] {
        made.gpu(at, "NVIDIA H100 PCIe");
    }
    made.hca("mlx5_0", "0000:18:00.0", "ibp24s0", "InfiniBand", NDR);
    made.hca("mlx5_1", "0000:c8:00.0", "ibp200s0", "InfiniBand", NDR);
    made
}

/// The switch redirects, as Linux leaves it with the IOMMU on.
pub(crate) fn acs() -> Made {
    let mut made = small();
    made.recording
        .about
        .push_str("; ACS redirects at the switch");
    for port in ["0000:17:00.0", "0000:17:01.0"] {
        let redirecting = Pci {
            acs: Some((ACS_ALL, ACS_LINUX)),
            ..Pci::switch_port(6, 0)
        };
        made.set_config(port, &redirecting);
    }
    made
}

/// The IOMMU translates.
pub(crate) fn iommu() -> Made {
    let mut made = small();
    made.recording.about.push_str("; the IOMMU translates");
    made.file(
        "/proc/cmdline",
        "BOOT_IMAGE=/vmlinuz root=/dev/sda2 ro intel_iommu=on\n",
    );
    made.link(
        "/sys/class/iommu/dmar0",
        "../../devices/virtual/iommu/dmar0",
    );
    made.directory("/sys/devices/virtual/iommu/dmar0");
    made.iommu_group("0000:18:00.0", 40, "DMA-FQ");
    made.iommu_group("0000:19:00.0", 41, "DMA-FQ");
    made
}

/// The card's link came up with a quarter of its lanes, the GPU's at half its speed.
pub(crate) fn trained_down() -> Made {
    let mut made = small();
    made.recording.about.push_str("; links trained down");
    for at in ["0000:17:00.0", "0000:18:00.0"] {
        made.set_link(at, (GEN5, 4), (GEN5, 16));
    }
    for at in ["0000:17:01.0", "0000:19:00.0"] {
        made.set_link(at, (GEN4, 16), (GEN5, 16));
    }
    made
}

/// A GPU whose BAR1 is of 256 MiB, and could be larger.
pub(crate) fn small_bar1() -> Made {
    let mut made = small();
    made.recording.about.push_str("; BAR1 of 256 MiB");
    made.set_bars(
        "0000:19:00.0",
        &[
            (0, 16 << 20, PREFETCHABLE),
            (2, 256 << 20, PREFETCHABLE),
            (4, 32 << 20, PREFETCHABLE),
        ],
    );
    let gpu = Pci {
        resizable: Some((2, (1 << 18) - (1 << 6), 8)),
        ..Pci::h100(0)
    };
    made.set_config("0000:19:00.0", &gpu);
    made
}

/// A virtual machine that a GPU and a virtual function of a card were given to: all on one bus.
pub(crate) fn virtual_machine() -> Made {
    let mut made = Made::new("a virtual machine with an H100 and a ConnectX-7 VF passed through");
    made.file(
        "/proc/cpuinfo",
        "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme sse sse2 hypervisor\n",
    );
    made.file("/sys/class/dmi/id/sys_vendor", "QEMU\n");
    let gpu = Pci {
        numa: -1,
        ..Pci::h100(-1)
    };
    let card = Pci {
        device: 0x101e,
        now: ("Unknown", 0),
        most: ("Unknown", 0),
        ..Pci::connectx7(-1)
    };
    made.pci("pci0000:00", "0000:00:05.0", &gpu);
    made.gpu("0000:00:05.0", "NVIDIA H100 80GB HBM3");
    made.pci("pci0000:00", "0000:00:06.0", &card);
    made.hca("mlx5_0", "0000:00:06.0", "ibp0s6", "InfiniBand", NDR);
    made
}

/// Grace Hopper: a domain for each device, the GPU's memory part of the processor's.
pub(crate) fn grace() -> Made {
    let mut made = Made::new("GH200 480GB with a ConnectX-7, a PCI domain each");
    made.directory("/sys/devices/system/node/node1");
    made.file(
        "/proc/cpuinfo",
        "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
    );
    made.file(
        "/sys/class/dmi/id/sys_vendor",
        "Quanta Cloud Technology Inc.\n",
    );
    let port = |numa| Pci {
        vendor: 0x10de,
        device: 0x22b1,
        ..Pci::root_port(numa)
    };
    made.pci("pci0009:00", "0009:00:00.0", &port(0));
    made.pci(
        "0009:00:00.0",
        "0009:01:00.0",
        &Pci {
            device: 0x2345,
            bars: vec![(0, 16 << 20, PREFETCHABLE), (2, 128 << 20, PREFETCHABLE)],
            resizable: None,
            ..Pci::h100(0)
        }
        .link(GEN4, 1),
    );
    made.gpu("0009:01:00.0", "NVIDIA GH200 480GB");
    made.pci("pci0000:00", "0000:00:00.0", &port(0));
    made.pci("0000:00:00.0", "0000:01:00.0", &Pci::connectx7(0));
    made.hca("mlx5_0", "0000:01:00.0", "ibp1s0", "InfiniBand", NDR);
    made
}

/// A card of two ports that are one RDMA device over a bond.
pub(crate) fn bond() -> Made {
    let mut made =
        Made::new("an H100 and a dual-port ConnectX-6 Dx, its ports bonded into one RDMA device");
    let ports = made.switch("pci0000:15", 0x15, 2, 0);
    let card = Pci {
        device: 0x101d,
        class: 0x02_0000,
        ..Pci::connectx7(0)
    }
    .link(GEN4, 16);
    made.pci(&ports[0], "0000:18:00.0", &card);
    made.pci(&ports[0], "0000:18:00.1", &card);
    made.hca(
        "mlx5_bond_0",
        "0000:18:00.0",
        "ens1f0np0",
        "Ethernet",
        "100 Gb/sec (4X EDR)",
    );
    made.netdev("ens1f1np1", Some("0000:18:00.1"));
    made.netdev("bond0", None);
    made.file(
        "/sys/devices/virtual/net/bond0/bonding/slaves",
        "ens1f0np0 ens1f1np1\n",
    );
    for (number, name) in ["ens1f0np0", "ens1f1np1"].into_iter().enumerate() {
        let own = format!("{}/net/{name}", made.place(&format!("0000:18:00.{number}")));
        let ups = "../".repeat(own.matches('/').count() - 2);
        made.link(&format!("{own}/master"), &format!("{ups}virtual/net/bond0"));
    }
    made.pci(&ports[1], "0000:19:00.0", &Pci::h100(0));
    made.gpu("0000:19:00.0", "NVIDIA H100 80GB HBM3");
    made
}

/// A card with a virtual function, both RDMA devices.
pub(crate) fn sriov() -> Made {
    let mut made = small();
    made.recording
        .about
        .push_str("; a virtual function of the card");
    let function = Pci {
        device: 0x101e,
        now: ("Unknown", 0),
        most: ("Unknown", 0),
        ..Pci::connectx7(0)
    };
    made.pci("0000:17:00.0", "0000:18:00.1", &function);
    let (one, other) = (made.place("0000:18:00.1"), made.place("0000:18:00.0"));
    made.link(&format!("{one}/physfn"), "../0000:18:00.0");
    made.link(&format!("{other}/virtfn0"), "../0000:18:00.1");
    made.file(&format!("{other}/sriov_numvfs"), "1\n");
    made.hca("mlx5_1", "0000:18:00.1", "ibp24s0v0", "InfiniBand", NDR);
    made
}

/// A workstation: a GeForce, and soft RoCE over the board's network interface.
pub(crate) fn soft_roce() -> Made {
    let mut made = Made::new("a workstation with an RTX 4090 and soft RoCE");
    made.recording
        .directories
        .remove("/sys/devices/system/node/node0");
    made.pci(
        "pci0000:00",
        "0000:00:01.0",
        &Pci {
            numa: -1,
            ..Pci::root_port(-1)
        },
    );
    let gpu = Pci {
        device: 0x2684,
        class: 0x03_0000,
        bars: vec![
            (0, 16 << 20, PLAIN),
            (1, 32 << 30, PREFETCHABLE),
            (3, 32 << 20, PREFETCHABLE),
        ],
        resizable: Some((1, (1 << 16) - (1 << 6), 15)),
        ..Pci::h100(-1)
    }
    .link(GEN4, 16);
    made.pci("0000:00:01.0", "0000:01:00.0", &gpu);
    made.gpu("0000:01:00.0", "NVIDIA GeForce RTX 4090");
    made.pci(
        "pci0000:00",
        "0000:00:1c.0",
        &Pci {
            numa: -1,
            ..Pci::root_port(-1)
        },
    );
    let card = Pci {
        vendor: 0x8086,
        device: 0x15f3,
        class: 0x02_0000,
        driver: Some("igc"),
        numa: -1,
        bars: vec![(0, 1 << 20, PLAIN)],
        ..Pci::default()
    }
    .link("5.0 GT/s PCIe", 1);
    made.pci("0000:00:1c.0", "0000:02:00.0", &card);
    made.netdev("enp2s0", Some("0000:02:00.0"));
    let own = "/sys/devices/virtual/infiniband/rxe0";
    made.link(
        "/sys/class/infiniband/rxe0",
        "../../devices/virtual/infiniband/rxe0",
    );
    made.file(&format!("{own}/parent"), "enp2s0\n");
    made.file(&format!("{own}/fw_ver"), "\n");
    made.port(own, 1, "Ethernet", "2.5 Gb/sec (1X SDR)");
    made
}

/// No GPU.
pub(crate) fn no_gpu() -> Made {
    let mut made = small();
    made.recording.about.push_str("; its GPU taken out");
    let place = made.place("0000:19:00.0");
    made.remove(&place);
    made.remove("/sys/bus/pci/devices/0000:19:00.0");
    made.remove("/proc/driver/nvidia/gpus/0000:19:00.0");
    made
}

/// No RDMA device.
pub(crate) fn no_hca() -> Made {
    let mut made = small();
    made.recording.about.push_str("; its card taken out");
    let place = made.place("0000:18:00.0");
    made.remove(&place);
    made.remove("/sys/bus/pci/devices/0000:18:00.0");
    made.remove("/sys/class/infiniband/mlx5_0");
    made.remove("/sys/class/net/ibp24s0");
    made
}

/// Seen by a user without rights.
pub(crate) fn unprivileged() -> Made {
    let mut made = small();
    made.recording.about.push_str("; seen without root");
    made.unprivileged();
    made
}

/// All of them, by name, with software that is well.
pub(crate) fn all() -> BTreeMap<&'static str, Made> {
    type Make = fn() -> Made;
    let makers: [(&str, Make); 15] = [
        ("hgx", hgx),
        ("small", small),
        ("two_sockets", two_sockets),
        ("acs", acs),
        ("iommu", iommu),
        ("trained_down", trained_down),
        ("small_bar1", small_bar1),
        ("virtual_machine", virtual_machine),
        ("grace", grace),
        ("bond", bond),
        ("sriov", sriov),
        ("soft_roce", soft_roce),
        ("no_gpu", no_gpu),
        ("no_hca", no_hca),
        ("unprivileged", unprivileged),
    ];
    makers
        .into_iter()
        .map(|(name, make)| {
            let mut made = make();
            made.software();
            (name, made)
        })
        .collect()
}

/// A file beside the tests: `machines/hgx.json`.
fn beside(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(name)
}

/// Compares with a file of `cli/tests`, which `UPDATE_GOLDEN=1` writes anew.
pub(crate) fn golden(name: &str, text: &str) {
    let path = beside(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        return;
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == text,
        "{} is other than this; UPDATE_GOLDEN=1 writes it anew:\n{text}",
        path.display()
    );
}

/// What a command line says of a machine, and its exit status.
pub(crate) fn says(
    host: &dyn crate::host::Host,
    line: &[&str],
) -> (String, crate::finding::Status) {
    use clap::Parser as _;
    let words = std::iter::once("peermemctl").chain(line.iter().copied());
    let cli = crate::args::Cli::try_parse_from(words).unwrap();
    let mut out = crate::report::Out::gather(cli.common.json);
    let status = crate::command(host, &cli.command, &mut out);
    let status = status.unwrap_or_else(|error| {
        out.line(format!("peermemctl: {error:#}"));
        crate::finding::Status::Failed
    });
    (out.into_text(), status)
}

#[test]
fn the_machines_are_written_down() {
    for (name, made) in all() {
        golden(
            &format!("machines/{name}.json"),
            &made.recording.to_json().unwrap(),
        );
    }
}

/// Every way of asking that reads a machine and comes to an end.
const LINES: &[&[&str]] = &[
    &["topo"],
    &["topo", "--verbose"],
    &["topo", "--json"],
    &["doctor"],
    &["doctor", "--all"],
    &["doctor", "--json"],
    &["doctor", "--nagios"],
    &["doctor", "--pair", "0,mlx5_0"],
    &["list"],
    &["list", "--json"],
    &["list", "--by-process"],
    &["list", "--gpu", "0"],
    &["stats"],
    &["stats", "--json"],
    &["export"],
    &["record"],
];

/// What may stand in a file instead.
fn odd_text() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::prelude::*;
    prop_oneof![
        Just(String::new()),
        Just("\n".to_owned()),
        Just("-1".to_owned()),
        Just("18446744073709551615".to_owned()),
        Just("0xffffffffffffffffffffffff".to_owned()),
        Just("0x0 0xffffffffffffffff 0xffffffffffffffff\n".repeat(9)),
        Just("..".to_owned()),
        Just("../../..".to_owned()),
        Just("hex:".to_owned()),
        Just("hex:ffffffff+4092".to_owned()),
        Just("hex:+64".to_owned()),
        Just("=".to_owned()),
        Just("a=b=c \"".to_owned()),
        Just("99999999999999999999.9 GT/s".to_owned()),
        "\\PC{0,40}",
        proptest::collection::vec(any::<u8>(), 0..600).prop_map(|bytes| encode(&bytes)),
    ]
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..proptest::prelude::ProptestConfig::default()
    })]

    /// Whatever a machine answers, no command panics, and each says something or says why not.
    #[test]
    fn no_answer_of_a_machine_is_a_panic(
        machine in proptest::sample::select(all().into_values().collect::<Vec<_>>()),
        changes in proptest::collection::vec(
            (0_u8..9, proptest::prelude::any::<proptest::sample::Index>(), odd_text()),
            1..12,
        ),
    ) {
        let mut recording = machine.recording;
        for (kind, index, text) in changes {
            let key_of = |keys: Vec<&String>| match keys.is_empty() {
                true => None,
                false => Some((*index.get(&keys)).clone()),
            };
            let file = key_of(recording.files.keys().collect());
            let directory = key_of(recording.directories.keys().collect());
            let link = key_of(recording.links.keys().collect());
            match (kind, file, directory, link) {
                (0, Some(file), ..) => drop(recording.files.remove(&file)),
                (1 | 2, Some(file), ..) => drop(recording.files.insert(file, text)),
                (3, Some(file), ..) => {
                    let kept = recording.files.get(&file).cloned().unwrap_or_default();
                    let half = kept.chars().take(kept.chars().count() / 2).collect();
                    recording.files.insert(file, half);
                }
                (4, Some(file), ..) => {
                    recording.files.remove(&file);
                    recording.unseen.insert(file, Unseen::Denied);
                }
                (5, _, Some(directory), _) => drop(recording.directories.remove(&directory)),
                (6, _, Some(directory), _) => recording.directories.entry(directory).or_default().push(text),
                (7, _, _, Some(link)) => drop(recording.links.remove(&link)),
                (8, _, _, Some(link)) => drop(recording.links.insert(link, text)),
                _ => {}
            }
        }
        for line in LINES {
            let (text, _) = says(&recording, line);
            assert!(!text.is_empty() || line.contains(&"doctor"), "{line:?} says nothing");
        }
    }
}
