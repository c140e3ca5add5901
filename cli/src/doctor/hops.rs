// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! One path in full, hop by hop, for `--pair`.

use serde::Serialize;

use super::Look;
use crate::machine::pci::Address;
use crate::machine::pci::Rate;
use crate::machine::Class;
use crate::machine::Pair;
use crate::render::Table;
use crate::report::Out;

/// A function that a transfer goes through, or ends at.
#[derive(Debug, Serialize)]
pub(super) struct Hop {
    at: String,
    /// `GPU 0`, `bridge`, `mlx5_0`.
    what: String,
    /// The link above it, as it is; none: not visible, or it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    /// What this end of it can be.
    #[serde(skip_serializing_if = "Option::is_none")]
    link_most: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
}

/// From the GPU to the RDMA device.
#[derive(Debug, Serialize)]
pub(super) struct Path {
    class: Option<Class>,
    hops: Vec<Hop>,
}

/// `16.0 GT/s x16`.
pub(super) fn rate(rate: Rate) -> String {
    format!(
        "{}.{} GT/s x{}",
        rate.speed / 10,
        rate.speed % 10,
        rate.width
    )
}

impl Path {
    pub(super) fn of(look: &Look<'_>, pair: &Pair) -> Self {
        let gpu = match look.gpu(pair.gpu) {
            Some(gpu) => format!("GPU {}", gpu.index),
            None => "GPU".to_owned(),
        };
        let hca = look.hca(&pair.hca).and_then(|hca| hca.at);
        let mut hops = vec![Hop::of(look, pair.gpu, gpu)];
        for at in &pair.bridges {
            hops.push(Hop::of(look, *at, "bridge".to_owned()));
        }
        if let Some(at) = hca {
            hops.push(Hop::of(look, at, pair.hca.clone()));
        }
        Self {
            class: pair.class,
            hops,
        }
    }
}

impl Hop {
    fn of(look: &Look<'_>, at: Address, what: String) -> Self {
        let function = look.machine.functions.get(&at);
        let link = function.and_then(|function| function.link.as_ref().ok());
        Self {
            at: at.to_string(),
            what,
            link: link.map(|link| rate(link.now)),
            link_most: link.map(|link| rate(link.most)),
            numa: function.and_then(|function| function.numa),
            driver: function.and_then(|function| function.driver.clone()),
        }
    }
}

/// As a table.
pub(super) fn tell(look: &Look<'_>, pair: &Pair, out: &mut Out) {
    let path = Path::of(look, pair);
    let mut table = Table::new(&["HOP", "", "LINK NOW", "AT MOST", "NUMA", "DRIVER"]);
    for hop in path.hops {
        let numa = hop.numa.map(|numa| numa.to_string());
        table.row([
            hop.at,
            hop.what,
            hop.link.unwrap_or_default(),
            hop.link_most.unwrap_or_default(),
            numa.unwrap_or_default(),
            hop.driver.unwrap_or_default(),
        ]);
    }
    out.table(&table);
    out.gap();
}
