// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Command lines of QEMU and of the kernel.

use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use super::boot::Boot;
use super::options::{Iommu, Options};
use crate::arch::Arch;
use crate::detectors;
use crate::topology::Topology;

/// Escapes a path for an option of QEMU, where a comma ends a value.
pub(super) fn value(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[derive(Default)]
pub(super) struct Words(pub(super) Vec<String>);

impl Words {
    pub(super) fn add(&mut self, words: &[&str]) {
        self.0.extend(words.iter().map(|word| (*word).to_owned()));
    }
}

pub(super) fn kernel_arguments(options: &Options, boot: &Boot) -> String {
    let mut words = Words::default();
    words.add(&[
        &format!(
            "console={} loglevel=7 panic=-1 printk.devkmsg=on",
            boot.arch.console()
        ),
        &boot.arch.kernel_arguments(options.icount),
        // The log waits for the serial port in a buffer of 1 MiB. The longer timeout keeps a paused
        // VM from reporting a stall.
        "log_buf_len=1M rcupdate.rcu_cpu_stall_timeout=120",
    ]);
    if options.iommu != Iommu::Off && boot.arch == Arch::X86_64 {
        words.add(&["intel_iommu=on"]);
    }
    words.add(&[match options.iommu {
        Iommu::Off => "",
        Iommu::Pt if boot.arch == Arch::X86_64 => "iommu=pt",
        Iommu::Pt => "iommu.passthrough=1",
        Iommu::On => "iommu.passthrough=0 iommu.strict=0",
        Iommu::Strict => "iommu.passthrough=0 iommu.strict=1",
    }]);
    if boot.signing.is_some() {
        words.add(&["module.sig_enforce=1"]);
    }
    if boot.detectors {
        words.add(&[&detectors::kernel_arguments(options.faults)]);
    }
    words.0.extend(options.append.iter().cloned());
    words.0.join(" ")
}

/// Returns QEMU's arguments for the VM and its devices, except those that need files of the run.
pub(super) fn arguments(
    options: &Options,
    boot: &Boot,
    kernel_arguments: &str,
    log: &Path,
    scratch: &Path,
    wire: Option<&UnixDatagram>,
) -> Words {
    let mut words = Words::default();
    add_processors(&mut words, options, boot);
    words.add(&["-chardev", &format!("file,id=log,path={}", value(log))]);
    words.add(&["-serial", "chardev:log", "-monitor", "none"]);
    match options.iommu {
        _ if boot.arch != Arch::X86_64 => {}
        Iommu::Off => {}
        // Caching mode stays off here, because it makes the kernel unmap immediately, whatever its
        // parameters say.
        Iommu::On => words.add(&["-device", "intel-iommu,aw-bits=48"]),
        Iommu::Pt | Iommu::Strict => {
            words.add(&["-device", "intel-iommu,aw-bits=48,caching-mode=on"]);
        }
    }
    words.add(&["-append", kernel_arguments]);
    add_share(&mut words, "host", Path::new("/"));
    if options.root != Path::new("/") {
        add_share(&mut words, "root", &options.root);
    }
    if let Some(layer) = &options.layer {
        add_share(&mut words, "layer", layer);
    }
    add_devices(&mut words, options, scratch, wire);
    words
}

fn add_processors(words: &mut Words, options: &Options, boot: &Boot) {
    let accel = if options.icount {
        words.add(&["-icount", "shift=0"]);
        "tcg,thread=single"
    } else {
        "tcg,thread=multi"
    };
    // Reserves space for the BARs above memory, with enough address bits. A bridge's window is
    // aligned to the largest BAR in it.
    let gpu_bytes = u64::from(options.gpus) * options.bar;
    let room = match options.topology {
        Topology::Flat => 2 * gpu_bytes,
        _ => 4 * gpu_bytes,
    };
    let hole = room.next_power_of_two().max(32 * 1024);
    let machine = match (boot.arch, options.iommu) {
        (Arch::X86_64, Iommu::Off) => "q35",
        (Arch::X86_64, _) => "q35,kernel-irqchip=split",
        (Arch::Arm64, Iommu::Off) => "virt,gic-version=3",
        (Arch::Arm64, _) => "virt,gic-version=3,iommu=smmuv3",
    };
    let mut cpu = "max".to_owned();
    if boot.arch == Arch::X86_64 && hole > 256 * 1024 {
        cpu.push_str(",phys-bits=46");
    }
    if boot.detectors {
        cpu.push_str(detectors::PROCESSOR);
    }
    words.add(&["-nodefaults", "-no-user-config", "-no-reboot"]);
    words.add(&["-display", "none"]);
    words.add(&["-machine", machine, "-accel", accel, "-cpu", &cpu]);
    // On arm64, the MMIO window of QEMU's `virt` machine always has 512 GiB.
    if boot.arch == Arch::X86_64 {
        words.add(&["-global", &format!("q35-pcihost.pci-hole64-size={hole}M")]);
    }
    let mut processors = options.topology.processors(options.smp);
    // If no second processor can be added, QEMU translates locked instructions to ordinary ones,
    // although its devices have their own threads. The kernel uses locked instructions as barriers.
    // Without barriers, a NIC misses a notification and hangs forever.
    if options.smp == 1 && !options.icount {
        processors.push_str(",maxcpus=2");
    }
    words.add(&["-smp", &processors, "-m", &options.mem.to_string()]);
}

/// Adds a read-only share of one of this machine's folders. The bus is explicit, because QEMU might
/// choose a bus that accepts only bridges.
fn add_share(words: &mut Words, id: &str, path: &Path) {
    let folder = value(path);
    words.add(&[
        "-fsdev",
        &format!("local,id={id},path={folder},security_model=none,readonly=on,multidevs=remap"),
        "-device",
        &format!("virtio-9p-pci,fsdev={id},mount_tag={id},bus=pcie.0"),
    ]);
}

/// Adds the bridges, the NICs with the wire between them, and the GPUs.
fn add_devices(words: &mut Words, options: &Options, scratch: &Path, wire: Option<&UnixDatagram>) {
    let layout = options
        .topology
        .layout(options.gpus, options.smp, options.mem);
    for argument in &layout.arguments {
        words.add(&[argument]);
    }
    // Connects the two NICs by a wire. UNIX datagrams stay in order, and the sender waits if the
    // receiver is full. QEMU's hub lets later packets overtake packets that it holds, and RDMA READ
    // does not recover from the wrong order.
    let end = |nic: u32| value(&scratch.join(format!("wire{nic}")));
    let inside = |nic, peer| {
        format!(
            "local.type=unix,local.path={},remote.type=unix,remote.path={}",
            end(nic),
            end(peer)
        )
    };
    let nics = match (options.host_number, wire) {
        (Some(number), Some(wire)) => {
            vec![(
                number,
                format!("local.type=fd,local.str={}", wire.as_raw_fd()),
            )]
        }
        _ => vec![(1, inside(1, 2)), (2, inside(2, 1))],
    };
    for (bus, (nic, ends)) in layout.nics.iter().zip(nics) {
        words.add(&["-netdev", &format!("dgram,id=net{nic},{ends}")]);
        // Mergeable buffers are off: with them and a translating IOMMU, the NICs sometimes wrote to
        // address 0.
        words.add(&[
            "-device",
            &format!(
                "virtio-net-pci,netdev=net{nic},mac=52:54:00:77:00:0{nic},host_mtu=4500,\
                 mrg_rxbuf=off,romfile=,bus={bus}"
            ),
        ]);
    }
    for (gpu, bus) in layout.gpus.iter().enumerate() {
        // The memory is sparse and not reserved, because a BAR may be larger than this machine's
        // memory.
        let size = options.bar;
        words.add(&[
            "-object",
            &format!("memory-backend-memfd,id=bar{gpu},size={size}M,share=on,reserve=off"),
            "-device",
            &format!("ivshmem-plain,memdev=bar{gpu},bus={bus}"),
        ]);
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::super::options::Named as _;
    use super::*;

    fn options(words: &str) -> Options {
        Options::parse(format!("runner {words}").split_whitespace()).unwrap()
    }

    fn arguments_for(options: &Options, wire: Option<&UnixDatagram>) -> Vec<String> {
        let boot = Boot {
            arch: options.arch(),
            ..Boot::default()
        };
        let (log, scratch) = (Path::new("log"), Path::new("scratch"));
        arguments(options, &boot, "", log, scratch, wire).0
    }

    fn bus(argument: &str) -> Option<&str> {
        argument
            .split(',')
            .find_map(|word| word.strip_prefix("bus="))
    }

    #[test]
    fn the_kernel_says_which_processors() {
        let of = |words: &str| {
            let options = options(words);
            let arguments = arguments_for(&options, None).join(" ");
            let (_, rest) = arguments.split_once("-machine ").unwrap();
            let machine = rest.split(' ').next().unwrap_or_default().to_owned();
            (options.kernel, machine, arguments)
        };
        let (kernel, machine, arguments) = of("--iommu on");
        assert_eq!((&*kernel, &*machine), ("7.3", "q35,kernel-irqchip=split"));
        assert!(arguments.contains("intel-iommu") && arguments.contains("pci-hole64-size"));
        for (words, name, end) in [
            ("--arch arm64", "7.3-arm64", "gic-version=3"),
            ("--arch arm64 --iommu on", "7.3-arm64", "iommu=smmuv3"),
            (
                "--kernel 7.3-arm64-64k --iommu pt",
                "7.3-arm64-64k",
                "iommu=smmuv3",
            ),
        ] {
            let (kernel, machine, arguments) = of(words);
            assert_eq!(kernel, name);
            let is_right = machine.starts_with("virt,") && machine.ends_with(end);
            assert!(is_right, "{machine}");
            assert!(!arguments.contains("intel-iommu") && !arguments.contains("q35"));
        }
        // `--arch` does not replace a kernel that `--kernel` names.
        assert_eq!(of("--arch arm64 --kernel debug").0, "debug");
    }

    #[test]
    fn each_of_a_pair_has_one_nic() {
        let mut pair = options("--pair");
        pair.host_number = Some(2);
        let (wire, _other) = UnixDatagram::pair().unwrap();
        let arguments = arguments_for(&pair, Some(&wire));
        let of = |kind: &str| -> Vec<&str> {
            let all = arguments.iter().map(String::as_str);
            all.filter(|text| text.starts_with(kind)).collect()
        };
        let end = format!("dgram,id=net2,local.type=fd,local.str={}", wire.as_raw_fd());
        assert_eq!(of("dgram,"), [end]);
        assert_eq!(of("1,"), ["1,maxcpus=2"]);
        assert!(
            matches!(of("virtio-net-pci,")[..], [nic] if nic.contains("mac=52:54:00:77:00:02"))
        );
        let smp = ["--pair", "--pair --smp 2", ""].map(|words| options(words).smp);
        assert_eq!(smp, [1, 2, 2]);
    }

    /// Checks that each device is on the bus that the topology chooses, and comes after this bus.
    #[test]
    fn devices_go_where_the_topology_says() {
        for topology in Topology::value_variants() {
            let options = options(&format!("--topology {}", topology.name()));
            let arguments = arguments_for(&options, None);
            let layout = topology.layout(options.gpus, options.smp, options.mem);
            for (kind, places) in [
                ("ivshmem-plain,", &layout.gpus[..]),
                ("virtio-net-pci,", &layout.nics[..]),
            ] {
                let of_kind = arguments.iter().filter(|text| text.starts_with(kind));
                let buses: Vec<&str> = of_kind.filter_map(|text| bus(text)).collect();
                assert_eq!(buses, places, "{kind} {topology:?}");
            }
            for (at, argument) in arguments.iter().enumerate() {
                if let Some(bus) = bus(argument).filter(|bus| *bus != "pcie.0") {
                    let id = format!("id={bus}");
                    let is_it = |other: &String| other.split(',').any(|word| word == id);
                    assert!(arguments[..at].iter().any(is_it), "{argument}");
                }
            }
        }
    }
}
