// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Why a goal is missed, as far as the figures of the run that missed it say. Each sentence is one of its figures, or follows
//! from them: what they do not show is not said.

use peermem_figures::What;

use super::record::{Beside, Row};
use super::{goals, table};

/// Of a registration's own cost.
pub(super) fn own(ours: &Row, theirs: &Row) -> Vec<String> {
    let mut reasons = Vec::new();
    let mut more: Vec<(f64, &str)> = ours
        .functions
        .iter()
        .map(|(name, cost)| {
            let other = theirs.functions.get(name).map_or(0.0, |cost| cost.median);
            (cost.median - other, name.as_str())
        })
        .filter(|(more, _)| *more > 0.0)
        .collect();
    more.sort_by(|one, other| other.0.total_cmp(&one.0));
    if !more.is_empty() {
        let parts: Vec<String> = more
            .iter()
            .map(|(more, name)| format!("`{name}` {}", table::grouped(*more)))
            .collect();
        reasons.push(format!(
            "Instructions more than NVIDIA's: {}.",
            parts.join(", ")
        ));
    }
    if ours.entries > 1 && ours.entries == theirs.entries {
        reasons.push(format!(
            "Nothing could be joined: the scatter list has {} entries, as NVIDIA's.",
            table::grouped(ours.entries as f64)
        ));
    }
    if ours.maps == 0 && theirs.maps > 0 {
        reasons.push(format!(
            "The provider was not asked to map, so mapping is in this module's cost. NVIDIA's had it map, and the {} instructions \
             of that are not in NVIDIA's.",
            table::grouped(theirs.standin_mapping.median)
        ));
    }
    reasons
}

/// The allocations that are kept for a registration, where they were counted.
pub(super) fn allocations(ours: Option<&Beside>, theirs: Option<&Beside>) -> Option<String> {
    let [ours, theirs] = [ours?.objects?, theirs?.objects?];
    (ours > theirs).then(|| {
        format!(
            "A registration keeps {} allocations, NVIDIA's {}.",
            table::grouped(ours),
            table::grouped(theirs)
        )
    })
}

/// Of a registration's whole cost: it is the provider's calls and the own cost, and no more.
pub(super) fn whole(what: &What, ours: &Row, theirs: &Row) -> Vec<String> {
    let calls = |row: &Row| goals::price(row.pins, row.unpins, what.bytes);
    vec![format!(
        "The provider's calls alone are {} of NVIDIA's, own cost is {}.",
        table::ratio(calls(ours), calls(theirs)),
        table::ratio(ours.own.median, theirs.own.median)
    )]
}

/// Of a region's share among many, where NVIDIA's has grown by `theirs`.
pub(super) fn linear(theirs: f64, limit: f64) -> Vec<String> {
    vec![if theirs > limit {
        format!("NVIDIA's module misses it as well, with {theirs:.4}.")
    } else {
        format!("NVIDIA's module reaches {theirs:.4}.")
    }]
}

/// Of a figure that varies: by how much the goal is missed, and how far the middle half of the samples spreads.
pub(super) fn spread(by: f64, spread: f64) -> Vec<String> {
    if by >= spread {
        return Vec::new();
    }
    vec![format!(
        "It is missed by {}, and the spread of that figure is {}.",
        table::percent(by),
        table::percent(spread)
    )]
}
