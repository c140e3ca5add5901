// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The machines.

use std::collections::BTreeMap;

use super::*;

const NDR: &str = "400 Gb/sec (4X NDR)";

/// Eight H100 and eight ConnectX-7 behind four switches of two sockets, and a network card of 25 Gb/s for all else.
pub(crate) fn hgx() -> Made {
    let mut made = Made::new("HGX H100: 8 GPUs, 8 ConnectX-7, 4 switches, 2 sockets, ACS off");
    made.directory("/sys/devices/system/node/node1");
    let mut hca = 0;
    for (bus, numa) in [(0x15_u8, 0), (0x37, 0), (0x97, 1), (0xbf, 1)] {
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
