// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What the module is to reach, and whether it does.

use std::collections::BTreeMap;

use peermem_figures::What;
use serde::Serialize;

use super::record::{Beside, Figure, Row};
use super::{reasons, table};

const GIB: u64 = 1 << 30;

/// Prices of a V100's provider, in nanoseconds, as gdrcopy's users have published them (69.6 and 37.8 µs for 64 KiB; what a pin
/// of more takes longer is extrapolated). There is none for `dma_map_pages`.
pub(super) const PIN: f64 = 70_000.0;
const UNPIN: f64 = 38_000.0;
const PIN_OF_A_GIB: f64 = 3_000_000.0;

/// What so many calls cost, in nanoseconds.
pub(super) fn price(pins: u64, unpins: u64, bytes: u64) -> f64 {
    let gibs = bytes as f64 / GIB as f64;
    pins as f64 * (PIN + PIN_OF_A_GIB * gibs) + unpins as f64 * UNPIN
}

/// Own and provider's cost of a registration's life, in nanoseconds; an instruction is given one.
pub(super) fn whole(what: &What, row: &Row) -> f64 {
    row.own.median + price(row.pins, row.unpins, what.bytes)
}

/// The same, where the stand-in's mapping and unmapping are paid for by their instructions. To be compared where one module has
/// the provider map and the other maps by itself.
pub(super) fn whole_with_mapping(what: &What, row: &Row) -> f64 {
    whole(what, row) + row.standin_mapping.median
}

/// The same, with pins and unpins at no price: the least that any can be.
pub(super) fn without_pins(row: &Row) -> f64 {
    row.own.median + row.standin_mapping.median
}

/// How long a registration holds ib_core's mutex, in nanoseconds.
pub(super) fn mutex(what: &What, row: &Row) -> f64 {
    row.mutex.median + price(row.mutex_pins, row.mutex_unpins, what.bytes)
}

/// Both modules' rows of the same registrations.
pub(super) type Pairs<'a> = Vec<(&'a What, &'a Row, &'a Row)>;

pub(super) fn pairs<'a>(
    ours: &'a BTreeMap<What, Row>,
    theirs: &'a BTreeMap<What, Row>,
) -> Pairs<'a> {
    ours.iter()
        .filter_map(|(what, row)| Some((what, row, theirs.get(what)?)))
        .collect()
}

/// A goal, and the worst that was measured.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Goal {
    pub(super) name: &'static str,
    pub(super) limit: f64,
    /// Ours in parts of NVIDIA's; None where it was not measured.
    pub(super) worst: Option<f64>,
    /// Where that was.
    pub(super) at: Option<String>,
    /// Why it is missed, as far as the same figures say; nothing where it is met.
    pub(super) reasons: Vec<String>,
}

impl Goal {
    pub(super) fn new(
        name: &'static str,
        limit: f64,
        worst: Option<(f64, String)>,
        reasons: impl FnOnce(f64) -> Vec<String>,
    ) -> Self {
        let (worst, at) = worst.unzip();
        let missed = worst.filter(|worst| *worst > limit);
        Self {
            name,
            limit,
            worst,
            at,
            reasons: missed.map(reasons).unwrap_or_default(),
        }
    }

    pub(super) fn is_met(&self) -> Option<bool> {
        self.worst.map(|worst| worst <= self.limit)
    }
}

/// Those that differ from mode to mode.
#[derive(Debug)]
pub(super) struct Limits {
    whole_contiguous: f64,
    whole_fragmented: f64,
    own_a_page: f64,
}

pub(super) const PERSISTENT: Limits = Limits {
    whole_contiguous: 0.35,
    whole_fragmented: 0.35,
    own_a_page: 1.0,
};

pub(super) const REVOCABLE: Limits = Limits {
    whole_contiguous: 0.33,
    whole_fragmented: 0.45,
    own_a_page: 1.5,
};

const FRAGMENTED: &str = "64k";
const CONTIGUOUS: &str = "contiguous";

fn goal(
    name: &'static str,
    limit: f64,
    pairs: &Pairs<'_>,
    of: impl Fn(&What) -> bool,
    take: impl Fn(&What, &Row) -> f64,
    reasons: impl FnOnce(&What, &Row, &Row) -> Vec<String>,
) -> Goal {
    let worst = pairs
        .iter()
        .filter(|(what, _, _)| of(what))
        .map(|pair| (take(pair.0, pair.1) / take(pair.0, pair.2), *pair))
        .max_by(|(one, _), (other, _)| one.total_cmp(other));
    let at = |what: &What| format!("{}, {}", table::size(what.bytes), table::layout(what));
    Goal::new(
        name,
        limit,
        worst.map(|(ratio, (what, _, _))| (ratio, at(what))),
        |_| {
            worst.map_or_else(Vec::new, |(_, (what, ours, theirs))| {
                reasons(what, ours, theirs)
            })
        },
    )
}

/// Revocation: as fast as NVIDIA's, and no slower for each of many regions than for each of some.
pub(super) fn of_revocations(
    ours: &BTreeMap<u64, Figure>,
    theirs: &BTreeMap<u64, Figure>,
) -> Vec<Goal> {
    let worst = |ratios: Vec<(f64, u64)>| {
        ratios
            .into_iter()
            .max_by(|(one, _), (other, _)| one.total_cmp(other))
    };
    let against = worst(
        ours.iter()
            .filter_map(|(regions, figure)| {
                Some((figure.median / theirs.get(regions)?.median, *regions))
            })
            .collect(),
    );
    let linear = |of: &BTreeMap<u64, Figure>, regions: u64| {
        let each = |regions: u64| Some(of.get(&regions)?.median / regions as f64);
        Some(each(regions)? / each(SOME)?)
    };
    let many = worst(
        ours.keys()
            .filter(|&&regions| regions > SOME)
            .filter_map(|&regions| Some((linear(ours, regions)?, regions)))
            .collect(),
    );
    let at = |(ratio, regions): (f64, u64)| {
        let at = format!("{} regions", table::grouped(regions as f64));
        (ratio, at)
    };
    vec![
        Goal::new("revocation", 1.0, against.map(at), |_| Vec::new()),
        Goal::new(LINEAR, LINEAR_LIMIT, many.map(at), |_| {
            many.and_then(|(_, regions)| linear(theirs, regions))
                .map_or_else(Vec::new, |theirs| reasons::linear(theirs, LINEAR_LIMIT))
        }),
    ]
}

/// Regions on one allocation of which each has its share of what is there once.
const SOME: u64 = 100;

/// Not a comparison with NVIDIA's.
const LINEAR: &str = "revocation of one region, of many against 100";
const LINEAR_LIMIT: f64 = 1.1;

/// What a page more takes where none adjoins another, ours in parts of theirs: from the shortest to the longest.
fn own_a_page(limit: f64, pairs: &Pairs<'_>) -> Goal {
    let fragmented = || {
        pairs
            .iter()
            .filter(|(what, _, _)| what.layout == FRAGMENTED)
    };
    let ends = fragmented()
        .min_by_key(|(what, _, _)| what.bytes)
        .zip(fragmented().max_by_key(|(what, _, _)| what.bytes))
        .filter(|(short, long)| short.0.bytes < long.0.bytes);
    let slope = ends.map(|(short, long)| {
        let [ours, theirs] = [
            long.1.own.median - short.1.own.median,
            long.2.own.median - short.2.own.median,
        ];
        let [from, to] = [short, long].map(|(what, _, _)| table::size(what.bytes));
        (ours / theirs, format!("{from} to {to}"))
    });
    Goal::new("own cost a page, fragmented", limit, slope, |_| {
        ends.map_or_else(Vec::new, |(_, (_, ours, theirs))| {
            reasons::own(ours, theirs)
        })
    })
}

/// All goals that a registration's figures decide. `alive` is of ours and of theirs, where that was measured.
pub(super) fn of_registrations(
    limits: &Limits,
    pairs: &Pairs<'_>,
    alive: &[BTreeMap<u64, Beside>; 2],
) -> Vec<Goal> {
    let own = |_: &What, row: &Row| row.own.median;
    let is = |layout: &'static str, bytes: u64| {
        move |what: &What| what.layout == layout && what.bytes == bytes
    };
    // Of the most that were alive: there each has its own share alone.
    let [ours, theirs] = alive.each_ref().map(|of| of.values().next_back());
    let why_own = |_: &What, one: &Row, other: &Row| {
        let mut found = reasons::own(one, other);
        found.extend(reasons::allocations(ours, theirs));
        found
    };
    let unknown = |_: &What, _: &Row, _: &Row| Vec::new();
    let pins = |_: &What, row: &Row| row.pins as f64;
    let unpins = |_: &What, row: &Row| row.unpins as f64;
    vec![
        goal("pins", 0.5, pairs, |_| true, pins, unknown),
        goal("unpins", 0.5, pairs, |_| true, unpins, unknown),
        goal(
            "whole cost with mapping",
            0.55,
            pairs,
            |_| true,
            whole_with_mapping,
            reasons::whole,
        ),
        goal(
            "whole cost with mapping, 64 GiB contiguous",
            limits.whole_contiguous,
            pairs,
            is(CONTIGUOUS, 64 * GIB),
            whole_with_mapping,
            reasons::whole,
        ),
        goal(
            "whole cost with mapping, 1 GiB fragmented",
            limits.whole_fragmented,
            pairs,
            is(FRAGMENTED, GIB),
            whole_with_mapping,
            reasons::whole,
        ),
        goal(
            "own cost, 64 KiB",
            1.0,
            pairs,
            |what| what.bytes == 64 << 10,
            own,
            why_own,
        ),
        goal(
            "own cost, 1 GiB contiguous",
            0.3,
            pairs,
            is(CONTIGUOUS, GIB),
            own,
            why_own,
        ),
        own_a_page(limits.own_a_page, pairs),
        goal(
            "own kernel memory, contiguous, 1 GiB and more",
            0.01,
            pairs,
            |what| what.layout == CONTIGUOUS && what.bytes >= GIB,
            |_, row| row.held as f64,
            unknown,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::record;
    use super::*;

    #[test]
    fn goals_are_compared_with_the_worst() {
        let ours = record::rows(&record::tests::lines(1, 100)).expect("rows");
        let theirs = record::rows(&record::tests::lines(2, 200)).expect("rows");
        let goals = of_registrations(&PERSISTENT, &pairs(&ours, &theirs), &Default::default());
        let found = |name: &str| {
            goals
                .iter()
                .find(|goal| goal.name.starts_with(name))
                .map(|goal| (goal.worst, goal.is_met()))
        };
        assert_eq!(found("pins"), Some((Some(0.5), Some(true))));
        let own = 301.0 / 601.0;
        assert_eq!(found("own cost, 64"), Some((Some(own), Some(true))));
        assert_eq!(found("own cost, 1 GiB"), Some((Some(own), Some(false))));
        assert_eq!(found("own kernel"), Some((Some(0.5), Some(false))));
        assert_eq!(goals[2].at.as_deref(), Some("64 KiB, contiguous"));
        let goals = of_registrations(&PERSISTENT, &Vec::new(), &Default::default());
        assert!(goals.iter().all(|goal| goal.is_met().is_none()));
    }

    #[test]
    fn revocations_are_linear_or_not() {
        let figures = |of: &[(u64, f64)]| -> BTreeMap<u64, Figure> {
            of.iter()
                .map(|&(regions, time)| (regions, Figure::of(vec![time]).expect("a sample")))
                .collect()
        };
        let ours = figures(&[(1, 50.0), (100, 1000.0), (1000, 20_000.0)]);
        let theirs = figures(&[(1, 100.0), (100, 1000.0), (1000, 20_000.0)]);
        let goals = of_revocations(&ours, &theirs);
        assert_eq!((goals[0].worst, goals[0].is_met()), (Some(1.0), Some(true)));
        assert_eq!(
            (goals[1].worst, goals[1].is_met()),
            (Some(2.0), Some(false))
        );
        assert_eq!(goals[1].at.as_deref(), Some("1,000 regions"));
        assert!(goals[0].reasons.is_empty());
        assert_eq!(
            goals[1].reasons,
            ["NVIDIA's module misses it as well, with 2.0000."]
        );
        // The very figures of theirs decide what is said of them.
        let linear = figures(&[(1, 100.0), (100, 1000.0), (1000, 10_000.0)]);
        assert_eq!(
            of_revocations(&ours, &linear)[1].reasons,
            ["NVIDIA's module reaches 1.0000."]
        );
        assert!(of_revocations(&linear, &ours)
            .iter()
            .all(|goal| goal.reasons.is_empty()));
        let none = of_revocations(&BTreeMap::new(), &theirs);
        assert!(none.iter().all(|goal| goal.is_met().is_none()));
    }

    #[test]
    fn a_page_more_is_a_slope() {
        let rows = |short, long| {
            let (one, other) = (
                record::tests::lines(1, short),
                record::tests::lines(1, long),
            );
            let [short, mut long] = [one, other].map(|lines| record::rows(&lines).expect("rows"));
            let what = |bytes| What {
                layout: FRAGMENTED.to_owned(),
                bytes,
            };
            long.extend(
                short
                    .into_iter()
                    .filter_map(|(from, row)| (from == what(GIB)).then(|| (what(64 << 10), row))),
            );
            long
        };
        // Whatever the first page costs.
        let (ours, theirs) = (rows(5000, 5300), rows(100, 300));
        let goal = own_a_page(1.0, &pairs(&ours, &theirs));
        assert_eq!((goal.worst, goal.is_met()), (Some(1.5), Some(false)));
        assert_eq!(goal.at.as_deref(), Some("64 KiB to 1 GiB"));
        assert!(goal.reasons[0].contains("`acquire` 5,000"), "{goal:?}");
        assert_eq!(own_a_page(1.5, &pairs(&ours, &theirs)).is_met(), Some(true));
        let one = record::rows(&record::tests::lines(1, 100)).expect("rows");
        assert_eq!(own_a_page(1.0, &pairs(&one, &one)).is_met(), None);
    }

    #[test]
    fn prices() {
        assert_eq!(price(1, 1, 0), 108_000.0);
        assert_eq!(price(2, 2, GIB), 2.0 * 3_108_000.0);
    }

    /// The reasons of each goal that has any.
    fn reasons_of(goals: &[Goal]) -> BTreeMap<&str, &[String]> {
        goals
            .iter()
            .filter(|goal| !goal.reasons.is_empty())
            .map(|goal| (goal.name, goal.reasons.as_slice()))
            .collect()
    }

    #[test]
    fn a_goal_that_is_missed_has_its_reasons_and_no_other() {
        let rows = |own| record::rows(&record::tests::lines(1, own)).expect("rows");
        let found = |ours: &BTreeMap<What, Row>, theirs: &BTreeMap<What, Row>| {
            let alive = [300, 100].map(|own| record::alive(&record::tests::lines(1, own)));
            let alive = alive.map(|found| found.expect("samples"));
            of_registrations(&PERSISTENT, &pairs(ours, theirs), &alive)
        };
        // Ours makes as many calls, and takes three times the instructions.
        let (slow, quick) = (rows(300), rows(100));
        let goals = found(&slow, &quick);
        let told = reasons_of(&goals);
        assert_eq!(
            told.keys().copied().collect::<Vec<_>>(),
            [
                "own cost, 1 GiB contiguous",
                "own cost, 64 KiB",
                "whole cost with mapping",
                "whole cost with mapping, 1 GiB fragmented",
                "whole cost with mapping, 64 GiB contiguous",
            ]
        );
        let more = "Instructions more than NVIDIA's: `acquire` 200, `dma_map` 200, `release` 200.";
        assert_eq!(told["own cost, 64 KiB"], [more]);
        assert_eq!(
            told["whole cost with mapping"],
            ["The provider's calls alone are 1.0000 of NVIDIA's, own cost is 2.9934."]
        );
        // The other way round those goals are met; not that of 1 GiB, nor those that count calls.
        let goals = found(&quick, &slow);
        let told = reasons_of(&goals);
        assert!(!told.contains_key("own cost, 64 KiB"), "{told:?}");

        // Half of the calls: the whole cost is as it is to be, and nothing is said of it.
        let twice = record::rows(&record::tests::lines(2, 100)).expect("rows");
        let goals = found(&slow, &twice);
        let told = reasons_of(&goals);
        assert!(told.contains_key("own cost, 64 KiB"), "{told:?}");
        assert!(!told.contains_key("whole cost with mapping"), "{told:?}");

        // What is said of entries, of mapping, and of allocations, is so in these figures alone.
        let mut mapped = slow;
        for row in mapped.values_mut() {
            (row.entries, row.maps) = (16, 0);
        }
        let goals = found(&mapped, &quick);
        let told = reasons_of(&goals)["own cost, 64 KiB"].join(" ");
        assert!(!told.contains("joined"), "{told}");
        assert!(told.contains("the 500 instructions"), "{told}");
        let mut as_many = quick;
        for row in as_many.values_mut() {
            row.entries = 16;
        }
        let goals = found(&mapped, &as_many);
        let told = reasons_of(&goals)["own cost, 64 KiB"].join(" ");
        assert!(told.contains("has 16 entries, as NVIDIA's"), "{told}");
    }
}
