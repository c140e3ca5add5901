// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Which way the packets of a pair go, and where they turn round.

use super::scan::Scan;
use crate::machine::config::PortType;
use crate::machine::pci::{Address, Function, Link, Rate};
use crate::machine::{Gpu, Pair};

/// The two ends, and the bridges above each that the other has not.
pub(super) struct Route<'a> {
    pub(super) gpu: &'a Function,
    pub(super) nic: &'a Function,
    /// Bridges above both. Not 0: the last of them is the upstream port of the switch where packets turn round.
    shared: usize,
    functions: &'a std::collections::BTreeMap<Address, Function>,
}

/// Two ends of a link that are both known.
pub(super) struct Joined<'a> {
    /// The end that is nearer to the processor.
    pub(super) upper: &'a Function,
    pub(super) lower: &'a Function,
    pub(super) now: Rate,
    /// The least of what both ends can do.
    pub(super) most: Rate,
}

/// Whether there is a pair with a path over PCI.
pub(super) fn applies(scan: &Scan<'_>) -> bool {
    scan.pairs().any(|pair| Route::of(scan, pair).is_some())
}

impl<'a> Route<'a> {
    /// None where the RDMA device is not on PCI, or the GPU's memory is not behind PCI alone: Data Direct reaches that
    /// through PCI all the same.
    pub(super) fn of(scan: &Scan<'a>, pair: &Pair) -> Option<Self> {
        let is_by_pci = |gpu: &&Gpu| !gpu.is_coherent || pair.is_data_direct();
        let gpu = scan.gpu(pair.gpu).filter(is_by_pci)?;
        let functions = &scan.machine.functions;
        let (gpu, nic) = (functions.get(&gpu.at)?, functions.get(&pair.nic?)?);
        Some(Self {
            gpu,
            nic,
            shared: gpu.shared(nic),
            functions,
        })
    }

    /// The bridges between the end and where packets turn round, the highest first.
    fn side(&self, end: &'a Function) -> &'a [Address] {
        end.above.get(self.shared..).unwrap_or_default()
    }

    /// The downstream ports of one switch between which packets can turn round: the NIC's and the GPU's. None where
    /// they go through the root complex, or both hang on one port.
    pub(super) fn turn(&self) -> Option<(&'a Function, &'a Function)> {
        if self.shared == 0 {
            return None;
        }
        let port = |end: &'a Function| self.functions.get(self.side(end).first()?);
        Some((port(self.nic)?, port(self.gpu)?))
    }

    /// All bridges above the NIC's end and the GPU, the highest first, those above both once.
    pub(super) fn bridges(&self) -> Vec<&'a Function> {
        let all = self.nic.above.iter().chain(self.side(self.gpu));
        all.filter_map(|at| self.functions.get(at)).collect()
    }

    /// Whether packets go through the root complex by the shape of the machine.
    pub(super) fn is_through_root(&self) -> bool {
        self.shared == 0
    }

    /// From the highest bridge that is this end's alone down to the end.
    pub(super) fn down_to(&self, end: &'a Function) -> Vec<&'a Function> {
        let bridges = self.side(end).iter();
        let known = bridges.filter_map(|at| self.functions.get(at));
        known.chain([end]).collect()
    }

    /// The links that packets go over on one end's side. A switch's own ports are joined without one.
    pub(super) fn links(&self, end: &'a Function) -> Vec<Joined<'a>> {
        let chain = self.down_to(end);
        chain
            .iter()
            .zip(chain.iter().skip(1))
            .filter_map(|(upper, lower)| Joined::of(upper, lower))
            .collect()
    }
}

impl<'a> Joined<'a> {
    /// The link between two neighbours. None where there is none, or where one end says otherwise than the other:
    /// inside a switch, and in a virtual machine, whose bridges are not those of the device.
    pub(super) fn of(upper: &'a Function, lower: &'a Function) -> Option<Self> {
        let link = |function: &Function| -> Option<Link> { function.link.as_ref().ok().copied() };
        let (above, below) = (link(upper)?, link(lower)?);
        let is_up = below.now.speed > 0 && below.now.width > 0;
        let most = Rate {
            speed: above.most.speed.min(below.most.speed),
            width: above.most.width.min(below.most.width),
        };
        let kind = |function: &Function| Some(function.express().ok()?.port);
        let inside =
            kind(upper) == Some(PortType::Upstream) && kind(lower) == Some(PortType::Downstream);
        (is_up && !inside && above.now == below.now && most.speed > 0).then_some(Self {
            upper,
            lower,
            now: below.now,
            most,
        })
    }
}
