// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Made-up machines for tests: recordings built by hand from the public formats of sysfs and of PCI config space,
//! with the numbers that public listings of such machines show. No such machine was at hand.
//!
//! A machine is complete: what is not in it is not there. A test takes a healthy one and plants one fault in it.

mod machines;
mod pci;
pub(crate) mod software;

pub(crate) use machines::*;
pub(crate) use pci::*;

use crate::host::recording::encode;
use crate::host::recording::Recording;
use crate::host::Fact;
use crate::host::Unseen;

/// A machine in the making.
#[derive(Debug, Clone)]
pub(crate) struct Made {
    pub(crate) recording: Recording,
}

impl Made {
    /// A machine of one NUMA node for now, without PCI.
    pub(crate) fn new(about: &str) -> Self {
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

    /// Takes a device off PCI, as if it had fallen off the bus.
    pub(crate) fn unplug(&mut self, at: &str) {
        let own = self.place(at);
        let below = format!("../../{}/", own.trim_start_matches("/sys/"));
        let links = self.recording.links.iter();
        let of_it: Vec<String> = links
            .filter(|(_, says)| format!("{says}/").contains(&below))
            .map(|(link, _)| link.clone())
            .collect();
        for path in of_it {
            self.remove(&path);
        }
        self.remove(&own);
        self.remove(&format!("/sys/bus/pci/devices/{at}"));
        self.remove(&format!("/proc/driver/nvidia/gpus/{at}"));
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
        for (which, (speed, width)) in [("current", now), ("max", most)] {
            self.file(&format!("{own}/{which}_link_speed"), &format!("{speed}\n"));
            self.file(&format!("{own}/{which}_link_width"), &format!("{width}\n"));
        }
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

    /// A file of an RDMA device, in place of what was there.
    pub(crate) fn hca_file(&mut self, name: &str, file: &str, text: &str) {
        let says = &self.recording.links[&format!("/sys/class/infiniband/{name}")];
        let own = format!("/sys/{}", says.trim_start_matches("../"));
        self.file(&format!("{own}/{file}"), text);
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
    pub(crate) fn switch(&mut self, root: &str, bus: u8, ports: u8, numa: i32) -> Vec<String> {
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
