// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PCI route between the GPU and the NIC of a pair, and the switch where packets between both turn
//! round.

use super::scan::Scan;
use crate::machine::config::PortType;
use crate::machine::pci::{Address, Function, Link, Rate};
use crate::machine::{Gpu, Pair};

/// PCI route between a GPU and a NIC.
pub(super) struct Route<'a> {
    pub(super) gpu: &'a Function,
    pub(super) nic: &'a Function,
    /// Number of bridges above both ends. The last of these bridges, if any, is the upstream port
    /// of the switch where packets turn round.
    shared: usize,
    functions: &'a std::collections::BTreeMap<Address, Function>,
}

/// A link whose two ends are known.
pub(super) struct Joined<'a> {
    /// End nearer to the processor.
    pub(super) upper: &'a Function,
    pub(super) lower: &'a Function,
    pub(super) now: Rate,
    /// Best speed and width that both ends support.
    pub(super) most: Rate,
}

/// Returns `true` if any pair has a PCI path.
pub(super) fn applies(scan: &Scan<'_>) -> bool {
    routes(scan).next().is_some()
}

/// Returns the pairs of [`Scan::pairs`] that have a PCI path, each with its route.
pub(super) fn routes<'s, 'a>(
    scan: &'s Scan<'a>,
) -> impl Iterator<Item = (&'a Pair, Route<'a>)> + 's {
    let pairs = scan.pairs();
    pairs.filter_map(move |pair| Some((pair, Route::of(scan, pair)?)))
}

impl<'a> Route<'a> {
    /// Returns the route, or `None` if the RDMA device is not on PCI. Returns `None` for a coherent
    /// GPU, too, unless the pair uses Data Direct.
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

    /// Returns the bridges between an end and the place where packets turn round, highest first.
    fn side(&self, end: &'a Function) -> &'a [Address] {
        end.above.get(self.shared..).unwrap_or_default()
    }

    /// Returns the two switch ports between which packets can turn round: the port toward the NIC,
    /// and the port toward the GPU. Returns `None` if packets go through the root complex, or if
    /// both ends are below one port.
    pub(super) fn turn(&self) -> Option<(&'a Function, &'a Function)> {
        if self.shared == 0 {
            return None;
        }
        let port = |end: &'a Function| self.functions.get(self.side(end).first()?);
        Some((port(self.nic)?, port(self.gpu)?))
    }

    /// Returns all bridges above both ends, highest first, each once.
    pub(super) fn bridges(&self) -> Vec<&'a Function> {
        let all = self.nic.above.iter().chain(self.side(self.gpu));
        all.filter_map(|at| self.functions.get(at)).collect()
    }

    /// Returns `true` if the topology sends packets through the root complex.
    pub(super) fn is_through_root(&self) -> bool {
        self.shared == 0
    }

    /// Returns the bridges above this end only, highest first, followed by the end.
    pub(super) fn down_to(&self, end: &'a Function) -> Vec<&'a Function> {
        let bridges = self.side(end).iter();
        let known = bridges.filter_map(|at| self.functions.get(at));
        known.chain([end]).collect()
    }

    /// Returns the links on one end's side. Ports inside a switch have no link.
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
    /// Returns the link between a function and the function directly above. Returns `None` if there
    /// is no link, or if both ends report different links. The reports differ in a virtual machine
    /// with emulated bridges.
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
