// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What is timed as a whole: many at once, loops, start-ups, and the data path. Its figures and its tables.

use std::collections::BTreeMap;

use anyhow::Result;
use peermem_figures::{Line, Workers};
use serde::Serialize;

use super::goals::Goal;
use super::record::Figure;
use super::{reasons, table};

/// Threads or processes that register at once.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Crowd {
    workers: Workers,
    number: u64,
    /// Registrations that began and ended, a second.
    reached: Figure,
    /// As many of the provider's calls for them, and nothing else.
    allowed: Figure,
    /// What of `allowed` was not reached; each sample with the one beside it.
    lost: Figure,
}

/// A loop of register, WRITE, deregister, in nanoseconds each.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Small {
    each: Figure,
    /// With memory that stays registered.
    transfer: Figure,
}

/// A start-up and its end, in nanoseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Startup {
    processes: u64,
    regions: u64,
    register: Figure,
    deregister: Figure,
}

/// perftest's figure with both ends in GPU memory, and in the host's.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Datapath {
    gpu: Figure,
    host: Figure,
}

/// All of one module.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Timed {
    crowds: Vec<Crowd>,
    /// By length.
    small: BTreeMap<u64, Small>,
    startup: Option<Startup>,
    /// By command line.
    datapath: BTreeMap<String, Datapath>,
}

/// What `take` finds in lines, sorted by what they are about.
fn gather<K: Ord, V>(
    lines: &[Line],
    take: impl Fn(&Line) -> Option<(K, V)>,
) -> BTreeMap<K, Vec<V>> {
    let mut found: BTreeMap<K, Vec<V>> = BTreeMap::new();
    for (key, value) in lines.iter().filter_map(take) {
        found.entry(key).or_default().push(value);
    }
    found
}

fn figure<T>(samples: &[T], take: impl Fn(&T) -> f64) -> Result<Figure> {
    Figure::of(samples.iter().map(take).collect())
}

impl Timed {
    /// Of all rounds.
    pub(super) fn of(lines: &[Line]) -> Result<Self> {
        let crowds = gather(lines, |line| match line {
            Line::Crowd(found) => Some(((found.workers, found.number), *found)),
            _ => None,
        });
        let small = gather(lines, |line| match line {
            Line::Small(found) => Some((found.bytes, *found)),
            _ => None,
        });
        let startups = gather(lines, |line| match line {
            Line::Startup(found) => Some(((found.processes, found.regions), *found)),
            _ => None,
        });
        let datapath = gather(lines, |line| match line {
            Line::Datapath(found) => {
                Some((found.program.clone(), (found.memory.clone(), found.figure)))
            }
            _ => None,
        });
        Ok(Self {
            crowds: crowds
                .into_iter()
                .map(|((workers, number), all)| {
                    Ok(Crowd {
                        workers,
                        number,
                        reached: figure(&all, |one| one.reached.a_second())?,
                        allowed: figure(&all, |one| one.allowed.a_second())?,
                        lost: figure(&all, |one| {
                            1.0 - one.reached.a_second() / one.allowed.a_second()
                        })?,
                    })
                })
                .collect::<Result<_>>()?,
            small: small
                .into_iter()
                .map(|(bytes, all)| {
                    let small = Small {
                        each: figure(&all, |one| one.elapsed_ns as f64 / one.loops as f64)?,
                        transfer: figure(&all, |one| one.transfers_ns as f64 / one.loops as f64)?,
                    };
                    Ok((bytes, small))
                })
                .collect::<Result<_>>()?,
            startup: startups
                .into_iter()
                .map(|((processes, regions), all)| -> Result<_> {
                    Ok(Startup {
                        processes,
                        regions,
                        register: figure(&all, |one| one.register_ns as f64)?,
                        deregister: figure(&all, |one| one.deregister_ns as f64)?,
                    })
                })
                .next()
                .transpose()?,
            datapath: datapath
                .into_iter()
                .map(|(program, all)| {
                    let of = |kind: &str| {
                        let samples = all.iter().filter(|(memory, _)| memory == kind);
                        Figure::of(samples.map(|(_, figure)| *figure).collect())
                    };
                    let (gpu, host) = (of("gpu")?, of("host")?);
                    Ok((program, Datapath { gpu, host }))
                })
                .collect::<Result<_>>()?,
        })
    }
}

impl Timed {
    /// Numbers of such workers, and what is reached with them.
    pub(super) fn reached(&self, workers: Workers) -> Vec<(f64, f64)> {
        self.crowds_of(workers, |crowd| crowd.reached)
    }

    /// Numbers of such workers, and what the provider's lock allows them.
    pub(super) fn allowed(&self, workers: Workers) -> Vec<(f64, f64)> {
        self.crowds_of(workers, |crowd| crowd.allowed)
    }

    fn crowds_of(&self, workers: Workers, take: fn(&Crowd) -> Figure) -> Vec<(f64, f64)> {
        self.crowds
            .iter()
            .filter(|crowd| crowd.workers == workers)
            .map(|crowd| (crowd.number as f64, take(crowd).median))
            .collect()
    }
}

/// Of how many that register at once a lock is in the way of any.
const MANY: u64 = 4;

/// As much of the provider's rate may be lost.
const LOST_LIMIT: f64 = 0.05;

/// What the goal of many at once came to.
pub(super) fn goal(ours: &Timed) -> Goal {
    let worst = ours
        .crowds
        .iter()
        .filter(|crowd| crowd.number >= MANY)
        .max_by(|one, other| one.lost.median.total_cmp(&other.lost.median));
    Goal::new(
        "lost of what the provider's lock allows, 4 and more at once",
        LOST_LIMIT,
        worst.map(|crowd| {
            let at = format!("{} {}", crowd.number, crowd.workers.name());
            (crowd.lost.median, at)
        }),
        |lost| {
            worst.map_or_else(Vec::new, |crowd| {
                let spread = crowd.lost.upper - crowd.lost.lower;
                reasons::spread(lost - LOST_LIMIT, spread)
            })
        },
    )
}

/// Many at once.
pub(super) fn crowds([ours, theirs]: &[Timed; 2]) -> Option<String> {
    let rows = ours.crowds.iter().filter_map(|crowd| {
        let other = theirs
            .crowds
            .iter()
            .find(|other| (other.workers, other.number) == (crowd.workers, crowd.number))?;
        Some(vec![
            crowd.workers.name().to_owned(),
            crowd.number.to_string(),
            table::grouped(crowd.reached.median),
            table::grouped(crowd.allowed.median),
            table::percent(crowd.lost.median),
            table::percent(crowd.lost.upper - crowd.lost.lower),
            table::grouped(other.reached.median),
            table::grouped(other.allowed.median),
            table::percent(other.lost.median),
            table::ratio(crowd.reached.median, other.reached.median),
        ])
    });
    table::filled(
        &[
            "at once",
            "number",
            "a second, ours",
            "allowed",
            "lost",
            "spread",
            "NVIDIA's",
            "allowed",
            "lost",
            "ours / NVIDIA's",
        ],
        1,
        rows,
    )
}

/// Loops of small buffers.
pub(super) fn small([ours, theirs]: &[Timed; 2]) -> Option<String> {
    let rows = ours.small.iter().filter_map(|(&bytes, small)| {
        let other = theirs.small.get(&bytes)?;
        Some(vec![
            table::size(bytes),
            table::time(small.each.median),
            table::time(other.each.median),
            table::ratio(small.each.median, other.each.median),
            table::percent(small.each.spread()),
            table::percent(other.each.spread()),
            table::time(small.transfer.median),
            table::time(other.transfer.median),
        ])
    });
    table::filled(
        &[
            "length",
            "a loop, ours",
            "NVIDIA's",
            "ratio",
            "spread, ours",
            "NVIDIA's",
            "WRITE alone, ours",
            "NVIDIA's",
        ],
        0,
        rows,
    )
}

/// Start-ups.
pub(super) fn startups([ours, theirs]: &[Timed; 2]) -> Option<String> {
    let (ours, theirs) = (ours.startup?, theirs.startup?);
    let row = |name: &str, take: &dyn Fn(&Startup) -> Figure| {
        let (own, other) = (take(&ours), take(&theirs));
        vec![
            format!(
                "{name} {} regions, {} processes",
                table::grouped(ours.regions as f64),
                ours.processes
            ),
            table::time(own.median),
            table::time(other.median),
            table::ratio(own.median, other.median),
            table::percent(own.spread()),
            table::percent(other.spread()),
        ]
    };
    table::filled(
        &["", "ours", "NVIDIA's", "ratio", "spread, ours", "NVIDIA's"],
        1,
        [
            row("register", &|startup| startup.register),
            row("deregister", &|startup| startup.deregister),
        ],
    )
}

/// The data path.
pub(super) fn datapaths([ours, theirs]: &[Timed; 2]) -> Option<String> {
    let rows = ours.datapath.iter().filter_map(|(program, own)| {
        let other = theirs.datapath.get(program)?;
        let unit = if program.contains("lat") {
            "µs"
        } else {
            "MB/s"
        };
        let mut row = vec![program.clone(), unit.to_owned()];
        for module in [own, other] {
            row.extend([
                format!("{:.1}", module.gpu.median),
                format!("{:.1}", module.host.median),
                table::ratio(module.gpu.median, module.host.median),
                table::percent(module.gpu.spread().max(module.host.spread())),
            ]);
        }
        Some(row)
    });
    table::filled(
        &[
            "program",
            "unit",
            "GPU, ours",
            "host",
            "ratio",
            "spread",
            "GPU, NVIDIA's",
            "host",
            "ratio",
            "spread",
        ],
        2,
        rows,
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Lines of a module with which everything takes so many times as long.
    pub(in crate::bench) fn lines(slower: u64) -> Vec<Line> {
        let mut lines = vec![r#"{"kind":"prices","pin_us":700,"unpin_us":380}"#.to_owned()];
        for number in [1, 4] {
            for workers in ["threads", "processes"] {
                lines.push(format!(
                    r#"{{"kind":"crowd","workers":"{workers}","number":{number},"reached":{{"lives":{},"elapsed_ns":500000000}},"allowed":{{"lives":400,"elapsed_ns":500000000}}}}"#,
                    390 / slower
                ));
            }
        }
        lines.push(format!(
            r#"{{"kind":"small","bytes":4096,"loops":10,"elapsed_ns":{},"transfers_ns":1000}}"#,
            40_000 * slower
        ));
        lines.push(format!(
            r#"{{"kind":"startup","processes":8,"regions":4096,"register_ns":{},"deregister_ns":5000000}}"#,
            9_000_000 * slower
        ));
        for (memory, figure) in [("gpu", 99.0), ("host", 100.0)] {
            lines.push(format!(
                r#"{{"kind":"datapath","program":"ib_write_bw -s 1","memory":"{memory}","figure":{figure}}}"#
            ));
        }
        lines
            .iter()
            .map(|line| serde_json::from_str(line).expect("a line"))
            .collect()
    }

    #[test]
    fn figures_and_the_goal() {
        let ours = Timed::of(&lines(1)).expect("figures");
        assert_eq!(ours.crowds.len(), 4);
        assert_eq!(ours.crowds[0].reached.median, 780.0);
        let met = goal(&ours);
        assert!((met.worst.expect("measured") - 0.025).abs() < 1e-9);
        assert_eq!(met.is_met(), Some(true));
        assert_eq!(met.at.as_deref(), Some("4 threads"));
        let theirs = Timed::of(&lines(2)).expect("figures");
        assert_eq!(goal(&theirs).is_met(), Some(false));
        // One sample spreads over nothing: why so much is lost is not known.
        assert!(goal(&theirs).reasons.is_empty() && met.reasons.is_empty());
        let mut varied = [lines(1), lines(2), lines(2), lines(1), lines(2)].concat();
        let told = goal(&Timed::of(&varied).expect("figures")).reasons;
        assert_eq!(
            told,
            ["It is missed by 46.25 %, and the spread of that figure is 48.75 %."]
        );
        varied.extend(lines(1));
        varied.extend(lines(1));
        assert!(goal(&Timed::of(&varied).expect("figures"))
            .reasons
            .is_empty());
        assert_eq!(goal(&Timed::default()).is_met(), None);
    }

    #[test]
    fn tables_of_both() {
        let both = [1, 2].map(|slower| Timed::of(&lines(slower)).expect("figures"));
        let text = crowds(&both).expect("rows");
        assert_eq!(text.lines().count(), 2 + 4);
        assert!(text.contains("2.50 %"), "{text}");
        assert!(small(&both).expect("rows").contains("4 KiB"));
        assert!(startups(&both).expect("rows").contains("4,096 regions"));
        assert!(datapaths(&both).expect("rows").contains("0.9900"));
        let none = [Timed::default(), Timed::default()];
        for table in [crowds, small, startups, datapaths] {
            assert_eq!(table(&none), None);
        }
    }
}
