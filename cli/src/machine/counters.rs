// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Counters of NICs and PCI functions: `counters` and `hw_counters` of RDMA ports, and AER's error
//! counts. Formats: `Documentation/ABI/stable/sysfs-class-infiniband` and
//! `testing/sysfs-bus-pci-devices-aer`.

use std::collections::BTreeMap;

use super::pci::{Address, DEVICES};
use super::Machine;
use crate::host::{Fact, Host};

/// Kind of event that a counter counts. The kind decides the severity of an increase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Errors of the link, often of the cable or of its connectors.
    Link,
    /// Packets that were lost and sent again.
    Loss,
    /// Packets that were dropped because a queue was full.
    Discard,
    /// Requests to senders to slow down.
    Congestion,
    /// Packets for which the receiver had posted no buffer.
    Receiver,
    /// Data, in words of four bytes.
    Data,
    Packets,
    /// Time that a port waited before it could send, in a unit that depends on the NIC.
    Wait,
}

/// A counter of an RDMA port.
#[derive(Debug)]
pub(crate) struct Counter {
    /// Name of the counter's file.
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    is_hardware: bool,
}

impl Counter {
    /// Returns the directory of the counter's file, below the port's directory.
    pub(crate) fn directory(&self) -> &'static str {
        match self.is_hardware {
            true => "hw_counters",
            false => "counters",
        }
    }
}

const fn port(name: &'static str, kind: Kind) -> Counter {
    Counter {
        name,
        kind,
        is_hardware: false,
    }
}

const fn hardware(name: &'static str, kind: Kind) -> Counter {
    Counter {
        name,
        kind,
        is_hardware: true,
    }
}

/// The counters that this program reads, most significant first. The names in `counters` are the
/// same for all RDMA devices. The names in `hw_counters` are those of mlx5, and of other drivers
/// with the same counters.
pub(crate) const COUNTERS: &[Counter] = &[
    port("link_downed", Kind::Link),
    port("link_error_recovery", Kind::Link),
    port("symbol_error", Kind::Link),
    port("port_rcv_errors", Kind::Link),
    port("port_rcv_remote_physical_errors", Kind::Link),
    port("local_link_integrity_errors", Kind::Link),
    port("excessive_buffer_overrun_errors", Kind::Link),
    hardware("rx_icrc_encapsulated", Kind::Link),
    port("port_xmit_discards", Kind::Discard),
    hardware("out_of_sequence", Kind::Loss),
    hardware("packet_seq_err", Kind::Loss),
    hardware("implied_nak_seq_err", Kind::Loss),
    hardware("local_ack_timeout_err", Kind::Loss),
    hardware("duplicate_request", Kind::Loss),
    hardware("roce_adp_retrans", Kind::Loss),
    hardware("roce_adp_retrans_to", Kind::Loss),
    hardware("req_transport_retries_exceeded", Kind::Loss),
    hardware("np_cnp_sent", Kind::Congestion),
    hardware("np_ecn_marked_roce_packets", Kind::Congestion),
    hardware("rp_cnp_handled", Kind::Congestion),
    hardware("rp_cnp_ignored", Kind::Congestion),
    hardware("roce_slow_restart", Kind::Congestion),
    hardware("out_of_buffer", Kind::Receiver),
    hardware("rnr_nak_retry_err", Kind::Receiver),
    port("port_xmit_data", Kind::Data),
    port("port_rcv_data", Kind::Data),
    port("port_xmit_packets", Kind::Packets),
    port("port_rcv_packets", Kind::Packets),
    port("port_xmit_wait", Kind::Wait),
];

/// AER's files, by severity, mildest first.
pub(crate) const SEVERITIES: [&str; 3] = ["correctable", "nonfatal", "fatal"];

/// Values of all counters at one time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters {
    /// Time of the reading, in seconds since boot. `None`: unknown.
    pub(crate) when: Option<f64>,
    /// Values of each port, in the order of [`COUNTERS`]. The key is the RDMA device and the port
    /// number.
    pub(crate) ports: BTreeMap<(String, u32), Vec<Option<u64>>>,
    /// AER's counts for GPUs and NICs: severity, kind of error, count.
    pub(crate) errors: BTreeMap<Address, Vec<(&'static str, String, u64)>>,
}

impl Counters {
    /// Reads all counters of `machine`.
    pub(crate) fn scan(host: &dyn Host, machine: &Machine) -> Self {
        let mut counters = Self {
            when: host
                .fact(Fact::Monotonic)
                .ok()
                .and_then(|seconds| seconds.parse().ok()),
            ..Self::default()
        };
        for hca in &machine.hcas {
            for port in &hca.ports {
                let own = format!("/sys/class/infiniband/{}/ports/{}", hca.name, port.number);
                let files = |directory: &str| {
                    let names = host.names(&format!("{own}/{directory}"));
                    names.unwrap_or_default()
                };
                let (standard, hardware) = (files("counters"), files("hw_counters"));
                if standard.is_empty() && hardware.is_empty() {
                    continue;
                }
                let values = COUNTERS.iter().map(|counter| {
                    let names = match counter.is_hardware {
                        true => &hardware,
                        false => &standard,
                    };
                    let is_there = names.iter().any(|name| name == counter.name);
                    let file = format!("{own}/{}/{}", counter.directory(), counter.name);
                    is_there.then(|| host.number(&file).ok()).flatten()
                });
                counters
                    .ports
                    .insert((hca.name.clone(), port.number), values.collect());
            }
        }
        let gpus = machine.gpus.iter().map(|gpu| gpu.at);
        let nics = machine.hcas.iter().flat_map(|hca| hca.functions());
        for at in gpus.chain(nics) {
            let mut errors = Vec::new();
            for severity in SEVERITIES {
                let file = format!("{DEVICES}/{at}/aer_dev_{severity}");
                for line in host.text(&file).unwrap_or_default().lines() {
                    if let Some((name, count)) = line.split_once(' ') {
                        // AER's totals are the sum of the other lines.
                        if let (false, Ok(count)) = (name.starts_with("TOTAL_"), count.parse()) {
                            errors.push((severity, name.to_owned(), count));
                        }
                    }
                }
            }
            if !errors.is_empty() {
                counters.errors.insert(at, errors);
            }
        }
        counters
    }
}
